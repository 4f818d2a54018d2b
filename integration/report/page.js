// Draws each chart from the JSON below it, in the page's own colours, and again when they change.
"use strict";
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function themed(layout, width) {
  const ink = colour("--ink"), line = colour("--line");
  const axis = { gridcolor: line, linecolor: line, tickcolor: line };
  const room = Math.floor(width / 7); // characters
  const clipped = (a) =>
    a.name !== "note" || a.text.length <= room
      ? a
      : { ...a, text: a.text.slice(0, room - 1) + "…", hovertext: a.text };
  return {
    ...layout,
    annotations: (layout.annotations || []).map(clipped),
    // A long name and its figure side by side, also on a telephone.
    font: { family: getComputedStyle(document.body).fontFamily, size: width < 480 ? 11 : 13, color: ink },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    hoverlabel: { bgcolor: colour("--soft"), bordercolor: line, font: { color: ink } },
    xaxis: { ...axis, ...layout.xaxis },
    yaxis: { ...axis, ...layout.yaxis },
    shapes: (layout.shapes || []).map((s) => ({ ...s, line: { ...s.line, color: ink } })),
    // A finger that drags scrolls the page; a mouse that drags zooms.
    dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
  };
}

const figures = new Map();
function draw() {
  for (const div of document.querySelectorAll(".chart")) {
    if (div.closest("details:not([open])")) continue; // closed: drawn when it is opened
    if (!figures.has(div)) figures.set(div, JSON.parse(document.getElementById(`${div.id}-figure`).textContent));
    const { data, layout } = figures.get(div);
    for (const trace of data) {
      if (trace.error_x) trace.error_x.color = colour("--ink");
    }
    Plotly.react(div, data, themed(layout, div.clientWidth), { responsive: true, displayModeBar: false });
  }
}

for (const button of document.querySelectorAll(".legend button")) {
  button.addEventListener("click", () => {
    const div = document.getElementById(button.getAttribute("aria-controls"));
    const shown = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", shown);
    for (const trace of figures.get(div).data) {
      if (trace.name === button.dataset.name) trace.visible = shown;
    }
    draw();
  });
}
for (const closed of document.querySelectorAll(".closed")) closed.addEventListener("toggle", draw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
draw();
