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
    label: label || null, labelSize: label ? 18 : 0, labelFont: "12px system-ui", font: "11px system-ui",
    // The title is beside the longest number.
    size: (plot, ticks) => Math.max(40, 20 + 6.5 * Math.max(0, ...(ticks || []).map((tick) => tick.length))),
  };
}

// uPlot's own format has three decimals: a KL divergence of 0.0004 would be 0.
const NUMBER = new Intl.NumberFormat("en", { maximumSignificantDigits: 6 });

function number(value) {
  if (value == null) return "–";
  return value !== 0 && Math.abs(value) < 1e-3 ? value.toExponential(1) : NUMBER.format(value);
}

// Of style.css. Lines beyond the eighth repeat the colours with dashes.
const COLOURS = 8;
const DASHES = [[], [7, 4], [2, 3], [9, 3, 2, 3]];

// Steps are whole numbers.
const STEPS_APART = [1, 10, 100, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8].flatMap((power) => [power, 2 * power, 5 * power]);

// What the reader has chosen, kept for other pages: the horizontal axis, and the weight of what came before.
const AXES = { steps: "optimiser step", hours: "hours since the first step", tokens: "tokens trained on" };
const view = { axis: localStorage.axis in AXES ? localStorage.axis : "steps", smoothing: Number(localStorage.smoothing) || 0 };
let runs = [];

// The mean of all values so far, weighted as in W&B and TensorBoard: the first ones are not drawn towards 0.
function smoothed(values) {
  let mean = 0, weight = 0;
  return values.map((value) => {
    if (value == null) return null;
    mean = view.smoothing * mean + (1 - view.smoothing) * value;
    weight = view.smoothing * weight + (1 - view.smoothing);
    return mean / weight;
  });
}

// Returns one chart for each title, with the lines of all runs. Of several runs, each has one colour.
function overlaid() {
  const several = runs.length > 1;
  return [...new Set(runs.flatMap((run) => run.charts.map((chart) => chart.title)))].map((title) => {
    const lines = runs.flatMap((run, place) => run.charts.filter((chart) => chart.title === title).flatMap((chart) => chart.series.map((one, n) => ({
      label: [several && run.name, (!several || chart.series.length > 1) && one.label + (several && n % DASHES.length ? " (dashed)" : "")].filter(Boolean).join(": "), unit: chart.unit, dots: one.dots,
      stroke: colour(`--s${(several ? place : n) % COLOURS}`), dash: DASHES[(several ? n + Math.floor(place / COLOURS) : 0) % DASHES.length],
      points: new Map(run[view.axis].map((x, i) => [x, one.values[i]]).filter(([, value]) => value != null)),
    }))));
    const xs = [...new Set(lines.flatMap((line) => [...line.points.keys()]))].sort((a, b) => a - b);
    const raw = lines.map((line) => xs.map((x) => line.points.get(x) ?? null));
    const shown = raw.map((values, n) => lines[n].dots ? values : smoothed(values));
    return { title, unit: lines[0].unit, lines, data: [xs, ...shown, ...(view.smoothing ? raw : [])] };
  });
}

function options(chart, width, open) {
  const few = chart.data[0].length < 2;
  const lines = chart.lines.map((one) => ({
    label: one.label, stroke: one.stroke, dash: one.dash, width: 1.6, value: (plot, value) => number(value), spanGaps: true, points: { show: one.dots || few, size: 6, fill: colour("--page") },
  }));
  const faint = lines.map((one) => ({ ...one, class: "raw", width: 1, alpha: 0.25, points: { show: false } }));
  return {
    width, height: HEIGHT, scales: { x: { time: false } }, cursor: { drag: { x: true, y: false } },
    axes: [
      { ...axis(AXES[view.axis]), size: 30, values: (plot, ticks) => ticks.map(number), ...(view.axis === "steps" ? { incrs: STEPS_APART } : {}) },
      { ...axis(chart.unit), values: (plot, ticks) => ticks.map(number) },
    ],
    series: [{ label: view.axis.replace(/s$/, ""), value: (plot, value) => number(value) }, ...lines, ...(view.smoothing ? faint : [])],
    hooks: { ready: [(plot) => openOnClick(plot, open), (plot) => plot.over.addEventListener("mouseleave", () => latest(plot)), latest], draw: [restarts] },
  };
}

// Without a pointer, the legend has the last value of each line.
function latest(plot) {
  plot.setLegend({ idxs: plot.data.map((values) => values.findLastIndex((value) => value != null)) });
}

function restarts(plot) {
  const { ctx, bbox } = plot;
  ctx.save();
  ctx.setLineDash([4 * devicePixelRatio, 4 * devicePixelRatio]);
  runs.forEach((run, place) => run.restarts.forEach((step) => {
    const x = plot.valToPos(run[view.axis][run.steps.indexOf(step)], "x", true);
    if (x < bbox.left || x > bbox.left + bbox.width) return;
    ctx.strokeStyle = colour(runs.length > 1 ? `--s${place % COLOURS}` : "--quiet");
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
  }));
  ctx.restore();
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
  // Charts of several runs lead to no step, and after the last step there are only evaluations.
  const open = (x) => {
    const step = runs[0].steps[runs[0][view.axis].indexOf(x)];
    if (place.dataset.steps) location.href = step <= runs[0].last ? place.dataset.steps + step : place.dataset.evaluations;
  };
  charts.push({ box, plot: new uPlot(options(chart, width(box), open), chart.data, box) });
}

async function load(place) {
  try {
    runs = await Promise.all([...document.querySelectorAll("[data-source]")].map(async (source) => {
      const answer = await fetch(source.dataset.source);
      if (!answer.ok) throw new Error(`status ${answer.status}`);
      return { name: source.textContent, ...await answer.json() };
    }));
    show(place);
  } catch (error) {
    // A chart that is there stays: the server may only be restarting.
    if (!charts.length) place.textContent = `the charts cannot be loaded: ${error.message}`;
  }
}

function show(place) {
  const found = overlaid();
  if (!found.length) {
    place.textContent = "No step has been reported yet.";
    return;
  }
  const kind = JSON.stringify([view.axis, Boolean(view.smoothing), found.map((chart) => [chart.title, chart.lines.length])]);
  if (kind === place.dataset.kind) {
    charts.forEach((one, n) => { one.plot.setData(found[n].data); latest(one.plot); });
    return;
  }
  place.dataset.kind = kind;
  charts.forEach((one) => one.plot.destroy());
  charts.length = 0;
  place.replaceChildren();
  const boxes = found.map((chart) => frame(place, chart));
  found.forEach((chart, n) => draw(place, boxes[n], chart));
}

function choose(place) {
  for (const [name, event] of [["axis", "change"], ["smoothing", "input"]]) {
    const control = document.getElementById(name);
    control.value = view[name];
    control.addEventListener(event, () => {
      localStorage[name] = control.value;
      view[name] = name === "axis" ? control.value : Number(control.value);
      show(place);
    });
  }
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
  choose(place);
  load(place);
  // The part of the page that changes was replaced: there is a new step or trajectory.
  document.body.addEventListener("htmx:afterSwap", () => load(place));
  document.body.addEventListener("htmx:oobBeforeSwap", (event) => {
    for (const one of event.detail.fragment.querySelectorAll("details[id]")) one.open = document.getElementById(one.id)?.open;
  });
  window.addEventListener("resize", () => charts.forEach((one) => one.plot.setSize({ width: width(one.box), height: HEIGHT })));
  // The colours of a chart are fixed when it is drawn.
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => location.reload());
});
