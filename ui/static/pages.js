"use strict";
// Charts of the run page, and moves by keyboard. Everything else on the pages works without a script.

const charts = [];
const HEIGHT = 210;

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function axis(label) {
  return {
    stroke: colour("--quiet"), grid: { stroke: colour("--line"), width: 0.5 }, ticks: { stroke: colour("--line"), width: 0.5 },
    label: label || null, labelSize: label ? 18 : 0, labelFont: "12px system-ui", font: "11px system-ui", size: 50,
  };
}

// uPlot's own format has three decimals: a KL divergence of 0.0004 would be 0.
const NUMBER = new Intl.NumberFormat("en", { maximumSignificantDigits: 6 });

function number(value) {
  if (value == null) return "--";
  return value !== 0 && Math.abs(value) < 1e-3 ? value.toExponential(1) : NUMBER.format(value);
}

// Of style.css. Lines beyond the fourth repeat the colours with dashes.
const COLOURS = 4;
const DASHES = [[], [7, 4], [2, 3], [9, 3, 2, 3]];

// Steps are whole numbers.
const STEPS_APART = [1, 10, 100, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8].flatMap((power) => [power, 2 * power, 5 * power]);

function options(chart, width, open) {
  const series = chart.series.map((one, n) => ({
    label: one.label, stroke: colour(`--s${n % COLOURS}`), dash: DASHES[Math.floor(n / COLOURS) % DASHES.length], width: 1.6, value: (plot, value) => number(value), spanGaps: true, points: { show: one.dots || chart.steps.length < 2, size: 6 },
  }));
  return {
    width, height: HEIGHT, scales: { x: { time: false } }, cursor: { drag: { x: true, y: false } },
    axes: [
      { ...axis("optimiser step"), size: 30, incrs: STEPS_APART },
      { ...axis(chart.unit), values: (plot, ticks) => ticks.map(number) },
    ],
    series: [{ label: "step" }, ...series],
    hooks: { ready: [(plot) => openOnClick(plot, open)] },
  };
}

// A click, not the end of a drag, opens the step next to the pointer.
function openOnClick(plot, open) {
  let down = 0;
  plot.over.addEventListener("mousedown", (event) => { down = event.clientX; });
  plot.over.addEventListener("click", (event) => {
    if (Math.abs(event.clientX - down) < 3 && plot.cursor.idx != null) open(plot.data[0][plot.cursor.idx]);
  });
}

// Returns the frame of a chart. All frames are there before the first chart is drawn, so that their widths are final.
function frame(place, chart) {
  const box = document.createElement("div");
  box.className = "chart";
  const title = document.createElement("h3");
  title.textContent = chart.title;
  box.append(title);
  place.append(box);
  return box;
}

function width(box) {
  return Math.max(box.clientWidth - 18, 200);
}

function draw(place, box, chart) {
  // Charts of several runs lead to no step.
  const open = (step) => { if (place.dataset.steps) location.href = place.dataset.steps + step; };
  const values = chart.series.map((one) => one.values);
  charts.push({ box, plot: new uPlot(options(chart, width(box), open), [chart.steps, ...values], box) });
}

async function load(place) {
  try {
    const answer = await fetch(place.dataset.source);
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    show(place, await answer.json());
  } catch (error) {
    // A chart that is there stays: the server may only be restarting.
    if (!charts.length) place.textContent = `the charts cannot be loaded: ${error.message}`;
  }
}

function show(place, found) {
  if (!found.length) {
    place.textContent = "No step has been reported yet.";
    return;
  }
  if (charts.length === found.length && charts.every((one, n) => one.plot.series.length === found[n].series.length + 1)) {
    charts.forEach((one, n) => one.plot.setData([found[n].steps, ...found[n].series.map((series) => series.values)]));
    return;
  }
  charts.forEach((one) => one.plot.destroy());
  charts.length = 0;
  place.replaceChildren();
  const boxes = found.map((chart) => frame(place, chart));
  found.forEach((chart, n) => draw(place, boxes[n], chart));
}

function move(by) {
  const rows = [...document.querySelectorAll("table.rows tbody tr")];
  if (!rows.length) return;
  const now = rows.findIndex((row) => row.classList.contains("selected"));
  const next = Math.min(Math.max(now + by, 0), rows.length - 1);
  if (now >= 0) rows[now].classList.remove("selected");
  rows[next].classList.add("selected");
  rows[next].scrollIntoView({ block: "nearest" });
}

function follow(selector) {
  const link = document.querySelector(selector);
  if (link) link.click();
  return Boolean(link);
}

const KEYS = {
  j: () => move(1),
  k: () => move(-1),
  Enter: () => follow("tr.selected a"),
  "]": () => follow("a[rel=next]"),
  "[": () => follow("a[rel=prev]") || history.back(),
  "/": () => { const field = document.querySelector("[data-focus]"); if (field) { const closed = field.closest("details"); if (closed) closed.open = true; field.focus(); field.select(); } },
};

document.addEventListener("keydown", (event) => {
  const target = event.target;
  if (event.key === "Escape") { target.blur(); return; }
  // Ctrl+Enter runs the statement of the SQL page.
  if (event.key === "Enter" && event.ctrlKey && target.form) { target.form.requestSubmit(); return; }
  if (event.ctrlKey || event.metaKey || event.altKey || target.matches("input, select, textarea, a, button, summary")) return;
  const action = KEYS[event.key];
  if (action) { event.preventDefault(); action(); }
});

// Empty fields of a filter are no part of its address.
document.addEventListener("formdata", (event) => {
  [...event.formData].forEach(([name, value]) => { if (!value) event.formData.delete(name); });
});

document.addEventListener("DOMContentLoaded", () => {
  // On a telephone a long filter would hide the list.
  const filters = document.querySelector("details.filters");
  if (filters && matchMedia("(max-width: 700px)").matches) filters.open = false;
  const place = document.getElementById("charts");
  if (!place) return;
  load(place);
  // The part of the page that changes was replaced: there is a new step or trajectory.
  document.body.addEventListener("htmx:afterSwap", () => load(place));
  window.addEventListener("resize", () => charts.forEach((one) => one.plot.setSize({ width: width(one.box), height: HEIGHT })));
  // The colours of a chart are fixed when it is drawn.
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => location.reload());
});
