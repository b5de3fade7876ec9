"use strict";
/* Draws all panels, and again those whose width has changed, or all when the page's colours have. */
const keepDrawn = (panels, draw) => {
  const all = async (some) => {
    for (const panel of some) await draw(panel);
    document.documentElement.dataset.drawn = panels.length;
  };
  let later = 0;
  window.addEventListener("resize", () => {
    clearTimeout(later);
    later = setTimeout(() => all(panels.filter((panel) => panel.width !== panel.chart.clientWidth)), 200);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => all(panels));
  all(panels);
};
