"use strict";
/* Draws the charts of an inspection in the page's colours, anew when the page's colours or width change. */
(() => {
  const specs = JSON.parse(document.getElementById("data").textContent);
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const dark = matchMedia("(prefers-color-scheme: dark)");

  const look = () => {
    const font = getComputedStyle(document.body).fontFamily;
    const words = { labelColor: css("soft"), titleColor: css("text"), labelFontSize: 12 };
    return {
      background: "transparent", font, view: { stroke: null }, legend: words,
      axis: { ...words, titleFontSize: 12.5, titleFontWeight: "normal", tickColor: css("line"), grid: false },
    };
  };

  const draw = async (panel) => {
    if (panel.view) panel.view.finalize();
    const options = { renderer: "canvas", config: look(), actions: false, tooltip: { theme: dark.matches ? "dark" : "light" }, logLevel: 1 };
    panel.view = (await vegaEmbed(panel.chart, structuredClone(specs[panel.name]), options)).view;
    panel.width = panel.chart.clientWidth;
  };

  const panels = [...document.querySelectorAll(".panel")].map((figure) => ({ chart: figure.querySelector(".chart"), name: figure.dataset.chart, view: null, width: 0 }));
  keepDrawn(panels, draw);
})();
