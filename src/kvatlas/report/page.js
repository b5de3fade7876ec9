"use strict";
/* Draws the charts in the reader's choice of axes and colours, keeps labels apart, sorts the tables. */
(() => {
  const cells = JSON.parse(document.getElementById("data").textContent);
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

  const look = () => {
    const font = getComputedStyle(document.body).fontFamily;
    const axis = { labelColor: css("soft"), titleColor: css("text"), gridColor: css("line"), domainColor: css("line"), tickColor: css("line") };
    return {
      background: "transparent", font, view: { stroke: null }, text: { color: css("text") }, rule: { color: css("soft") },
      axis: { ...axis, labelFontSize: 13, titleFontSize: 13, titleFontWeight: "normal", titlePadding: 10, gridOpacity: 0.6 },
      axisY: { titleAnchor: "middle" },
    };
  };

  const coloured = (rows) => rows.map((row) => ({ ...row, color: css(row.ink) }));

  /* Width of a text as it will be drawn. */
  const pen = document.createElement("canvas").getContext("2d");
  const width = (text) => { pen.font = `13px ${getComputedStyle(document.body).fontFamily}`; return pen.measureText(text).width + 4; };

  const area = (one, two) => Math.max(0, Math.min(one.x2, two.x2) - Math.max(one.x1, two.x1)) * Math.max(0, Math.min(one.y2, two.y2) - Math.max(one.y1, two.y1));

  /* Places around a point, nearest first. */
  const places = [];
  for (const far of [0, 1, 2, 3]) {
    const side = 10 + 2 * far, rise = 15 + 14 * far;
    if (far === 0) places.push(["left", side, 0], ["right", -side, 0]);
    places.push(["center", 0, -rise], ["center", 0, rise], ["left", side, -rise + 4], ["left", side, rise - 4], ["right", -side, -rise + 4], ["right", -side, rise - 4]);
  }

  const box = (row, [align, dx, dy]) => {
    const wide = width(row.name), left = row.px + dx - (align === "left" ? 0 : align === "right" ? wide : wide / 2);
    return { x1: left, x2: left + wide, y1: row.py + dy - 8, y2: row.py + dy + 8 };
  };

  /* Gives each label the place where it covers least of what is there already. */
  const arrange = (view, rows) => {
    const x = view.scale("x"), y = view.scale("y"), right = view.width(), bottom = view.height();
    const at = rows.map((row) => ({ ...row, px: x(row.x), py: y(row.y) }));
    const taken = [];
    for (const row of at) {
      taken.push({ x1: row.px - 7, x2: row.px + 7, y1: row.py - 7, y2: row.py + 7, weight: 3 });
      taken.push({ x1: row.px - 1, x2: row.px + 1, y1: y(row.y_high), y2: y(row.y_low), weight: 8 });
      taken.push({ x1: x(row.x_low), x2: x(row.x_high), y1: row.py - 1, y2: row.py + 1, weight: 8 });
    }
    const outside = (b) => Math.max(0, -b.x1) + Math.max(0, b.x2 - right - 4) + Math.max(0, -4 - b.y1) + Math.max(0, b.y2 - bottom);
    for (const row of at.filter((one) => one.name).sort((a, b) => b.px - a.px)) {
      let best = null;
      places.forEach((place, order) => {
        const b = box(row, place);
        const cost = taken.reduce((sum, other) => sum + area(b, other) * (other.weight ?? 4), 0) + outside(b) * 200 + order * 3;
        if (!best || cost < best.cost) best = { cost, place, b };
      });
      [row.align, row.dx, row.dy] = best.place;
      taken.push(best.b);
    }
    return at.map(({ px, py, ...row }) => {
      const far = Math.hypot(row.dx, row.dy) > 22;
      return { ...row, far, label_x: x.invert(px + row.dx), label_y: y.invert(py + row.dy - Math.sign(row.dy) * 7) };
    });
  };

  const embed = (panel, spec) => {
    if (panel.view) panel.view.finalize();
    const theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
    const options = { renderer: "svg", config: look(), actions: false, tooltip: { theme }, logLevel: 1 };
    return vegaEmbed(panel.chart, spec, options).then(({ view }) => { panel.view = view; });
  };

  /* Twice: the first drawing says where the points lie, the second has the labels in their places. */
  const draw = async (panel) => {
    const { figure, data } = panel;
    const choice = {};
    for (const select of figure.querySelectorAll("select")) choice[select.dataset.axis] = select.value;
    const key = data.x.length ? `${choice.x}|${choice.y}` : "";
    figure.querySelector(".note").textContent = data.notes[key] || "";
    panel.chart.hidden = !data.specs[key];
    if (panel.chart.hidden) return;
    const spec = structuredClone(data.specs[key]);
    spec.data.values = coloured(spec.data.values);
    await embed(panel, structuredClone(spec));
    panel.width = panel.chart.clientWidth;
    if (!data.x.length || !spec.data.values.some((row) => row.name)) return;
    spec.data.values = arrange(panel.view, spec.data.values);
    await embed(panel, spec);
  };

  const panels = [];
  for (const figure of document.querySelectorAll(".panel")) {
    const chart = figure.querySelector(".chart");
    if (!chart) continue;
    const panel = { figure, chart, data: cells[Number(figure.dataset.cell)][figure.dataset.chart], view: null, width: 0 };
    panels.push(panel);
    for (const select of figure.querySelectorAll("select")) select.addEventListener("change", () => draw(panel));
  }
  keepDrawn(panels, draw);

  /* Sorting: a click sorts all tables of its comparison alike; missing figures go last. */
  const order = (head, column, down) => {
    const rows = [...head.closest("table").tBodies[0].rows];
    const value = (row) => column < 0 ? Number(row.dataset.place) : row.cells[column + 1].dataset.value === "" ? NaN : Number(row.cells[column + 1].dataset.value);
    return rows.sort((a, b) => {
      const [one, two] = [value(a), value(b)];
      if (Number.isNaN(one) || Number.isNaN(two)) return Number.isNaN(one) - Number.isNaN(two);
      return (down ? two - one : one - two) || a.dataset.place - b.dataset.place;
    }).map((row) => row.dataset.place);
  };
  for (const button of document.querySelectorAll(".figures button")) {
    button.addEventListener("click", () => {
      const head = button.closest("th"), down = head.getAttribute("aria-sort") === "ascending";
      const sorted = order(head, Number(button.dataset.column), down), cell = head.closest(".cell");
      cell.querySelectorAll("th[aria-sort]").forEach((one) => one.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      for (const body of cell.querySelectorAll(".figures tbody")) {
        for (const place of sorted) body.append(body.querySelector(`tr[data-place="${place}"]`));
      }
    });
  }
})();
