// Charts of a page, and, on a live page, what is new. Text of the log comes as text, never as HTML.
"use strict";
const DASHES = ["solid", "dash", "dot", "dashdot"], COLORS = ["--a", "--e", "--d", "--good", "--c", "--b"];
const SYMBOLS = { kill: "x", restart: "triangle-right", "weight pull": "line-ns-open", checkpoint: "square", evaluation: "star" };
const NAMES = { held_out_best: "best of each row", tokens_per_s: "tokens/s" };
const $ = (id) => document.getElementById(id);
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const runs = JSON.parse(document.body.dataset.runs || "[]");
const data = $("data") ? JSON.parse($("data").textContent) : { runs: {}, timeline: null };
const controls = $("controls"), isLive = "live" in document.body.dataset;
const chosen = () => (controls ? Object.fromEntries(new FormData(controls)) : {});
const address = (run, file) => `/r/${encodeURIComponent(run)}/${file}`;

function smoothed(values, weight) {
  let last = 0, mass = 0;
  return values.map((value) => {
    if (value === null) return null;
    last = weight * last + (1 - weight) * value;
    mass = weight * mass + (1 - weight);
    return last / mass;
  });
}

function scale(series, by) {
  if (by !== "time") return (step) => step;
  const first = series.ms[0] ?? series.held_out[0]?.[1] ?? 0;
  return (_, ms) => (ms - first) / 60000;
}

function line(series, name, by) {
  const at = { held_out: 2, held_out_best: 3 }[name], place = scale(series, by);
  if (at) return [series.held_out.map((p) => place(p[0], p[1])), series.held_out.map((p) => p[at])];
  return [series.step.map((step, n) => place(step, series.ms[n])), series.lines[name] ?? []];
}

function tracesOf(chart, options) {
  const weight = Number(options.smooth ?? 0), many = runs.length > 1, traces = [];
  runs.forEach((run, r) => chart.lines.forEach((name, n) => {
    if (!data.runs[run]) return;
    const [x, y] = line(data.runs[run], name, options.x), few = name.startsWith("held_out");
    const paint = color(COLORS[(many ? r : n) % COLORS.length]);
    const measured = name === "held_out" ? `held-out ${data.runs[run].measure}` : NAMES[name];
    const label = (measured ?? name.replaceAll("_", " ")) + (many ? `, ${run}` : "");
    const base = { x, y, name: label.replaceAll("<", "‹"), type: "scatter", connectgaps: true,
      mode: few || x.length < 2 ? "lines+markers" : "lines", marker: { size: 6 },
      line: { color: paint, width: 2, dash: DASHES[n % DASHES.length] } };
    if (weight > 0 && !few) {
      traces.push({ ...base, opacity: 0.3, showlegend: false, hoverinfo: "skip", line: { ...base.line, width: 1 } });
      base.y = smoothed(y, weight);
    }
    traces.push(base);
  }));
  return traces;
}

function layoutOf(extra) {
  const axis = { gridcolor: color("--line"), zeroline: false, automargin: true, exponentformat: "e" };
  return { margin: { l: 46, r: 14, t: 6, b: 34 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: color("--muted"), size: 12, family: "system-ui, sans-serif" }, hovermode: "x unified",
    hoverlabel: { bgcolor: color("--paper"), font: { color: color("--ink") } }, uirevision: "kept",
    dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom", showlegend: false,
    legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 }, ...extra,
    xaxis: { ...axis, ...extra.xaxis }, yaxis: { ...axis, ...extra.yaxis } };
}

function marks(chart, options, width) {
  const shapes = [], annotations = [];
  if (runs.length !== 1 || !data.runs[runs[0]]) return { shapes, annotations };
  const series = data.runs[runs[0]], place = scale(series, options.x);
  series.marks.forEach((mark, n) => {
    const x = place(mark.step, mark.ms);
    shapes.push({ type: "line", x0: x, x1: x, y0: 0, y1: 1, yref: "paper",
      line: { color: color("--bad"), width: 1.2, dash: "dash" } });
    if (chart.id === "learning" && series.marks.length <= width / 100) annotations.push({ x, y: 0.02 + 0.08 * (n % 3),
      yref: "paper", text: mark.text, showarrow: false, font: { color: color("--bad"), size: 11 },
      xanchor: x > 0.8 * place(series.step.at(-1) ?? 1, series.ms.at(-1)) ? "right" : "left" });
  });
  return { shapes, annotations };
}

function draw(figure) {
  const chart = JSON.parse(figure.dataset.chart), options = chosen(), traces = tracesOf(chart, options);
  const isSeveral = chart.lines.length * runs.length > 1;
  const limits = [options.from, options.to].map((text) => (text ? Number(text) : null));
  const layout = layoutOf({ ...marks(chart, options, figure.clientWidth - 300), showlegend: isSeveral,
    xaxis: { title: { text: options.x === "time" ? "minutes since the first step" : "optimizer step" },
      ...(limits.some((end) => end !== null) ? { range: limits, uirevision: limits.join() } : {}) },
    yaxis: { title: { text: chart.unit, standoff: 8 } } });
  if (isSeveral) layout.margin.t = 30;
  return put(figure, traces, layout);
}

// With a view box the drawing shrinks with its box where nothing draws it anew: on paper.
function put(figure, traces, layout) {
  const plot = figure.querySelector(".plot");
  return Plotly.react(plot, traces, layout, { displayModeBar: false, responsive: true }).then(() => {
    const { width, height } = plot._fullLayout;
    plot.querySelectorAll(".main-svg").forEach((svg) => svg.setAttribute("viewBox", `0 0 ${width} ${height}`));
  });
}

function drawTimeline(figure) {
  const { lives, marks: kinds } = data.timeline, when = (ms) => new Date(ms).toISOString().replace("Z", "");
  const traces = [{ type: "bar", orientation: "h", base: lives.map((l) => when(l[1])), y: lives.map((l) => l[0]),
    x: lives.map((l) => Math.max(l[2] - l[1], 1)), hovertext: lives.map((l) => l[3]), hoverinfo: "text",
    marker: { color: color("--line"), line: { color: color("--b"), width: 1 } }, name: "lives" }];
  Object.entries(kinds).forEach(([kind, found], n) => found.length && traces.push({ type: "scatter", mode: "markers",
    name: kind, x: found.map((m) => when(m[1])), y: found.map((m) => m[0]), hovertext: found.map((m) => m[2]), hoverinfo: "text+x",
    marker: { symbol: SYMBOLS[kind], size: 9, line: { width: 1.5, color: color(COLORS[(n + 1) % 6]) },
      color: kind === "kill" ? color("--bad") : color(COLORS[(n + 1) % 6]) } }));
  const layout = layoutOf({ hovermode: "closest", barmode: "overlay", showlegend: true,
    xaxis: { type: "date" }, yaxis: { autorange: "reversed", type: "category" } });
  layout.margin.t = 30;
  return put(figure, traces, layout);
}

const visible = new Set();
const paint = (figure) => (figure.classList.contains("timeline") ? data.timeline && drawTimeline(figure) : draw(figure));
const repaint = () => visible.forEach(paint);
const watch = new IntersectionObserver((seen) => seen.forEach(({ isIntersecting, target }) => {
  if (!isIntersecting) { visible.delete(target); return; }
  visible.add(target);
  paint(target);
}), { rootMargin: "200px" });
const drawable = () => [...document.querySelectorAll("figure[data-chart], figure.timeline")]
  .filter((figure) => !figure.closest("details:not([open])"));

// Also those that nobody has scrolled to: a picture of the whole page and a sheet of paper have them.
function drawWhenIdle(left) {
  if (!left.length) { document.body.dataset.drawn = ""; return; }
  (window.requestIdleCallback ?? setTimeout)(() => {
    if (!left[0].querySelector(".main-svg")) paint(left[0]);
    drawWhenIdle(left.slice(1));
  });
}

function onPaper(is) {
  document.documentElement.classList.toggle("paper", is);
  drawable().forEach(paint);
}

async function readPlotter() {
  const packed = $("plotter");
  if (!packed) return;
  const bytes = Uint8Array.from(atob(packed.textContent), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.textContent = await new Response(stream).text();
  document.head.append(script);
}

async function readSeries(run) {
  const known = data.runs[run], after = known?.step.at(-1) ?? 0;
  const got = await (await fetch(address(run, `series.json?after=${after}`))).json();
  data.timeline = got.timeline;
  if (!known || !known.step.length) { data.runs[run] = got; return; }
  const length = known.step.length;
  for (const name of Object.keys(got.lines)) known.lines[name] ??= Array(length).fill(null);
  for (const [name, kept] of Object.entries(known.lines)) kept.push(...(got.lines[name] ?? got.step.map(() => null)));
  known.step.push(...got.step);
  known.ms.push(...got.ms);
  Object.assign(known, { held_out: got.held_out, measure: got.measure, marks: got.marks, target: got.target });
}

async function readNew() {
  const figures = document.querySelectorAll("figure[data-chart]");
  if (figures.length) await Promise.all(runs.map(readSeries));
  repaint();
  if (!document.querySelector("[data-fresh]")) return;
  const page = new DOMParser().parseFromString(await (await fetch(location.href)).text(), "text/html");
  for (const part of document.querySelectorAll("[data-fresh]")) {
    const fresh = page.getElementById(part.id);
    if (fresh && !part.contains(document.activeElement)) part.replaceWith(document.adoptNode(fresh));
  }
}

function follow() {
  let isBusy = false, isDue = false;
  const read = async () => {
    isDue = true;
    if (isBusy) return;
    isBusy = true;
    while (isDue) {
      isDue = false;
      await readNew().catch(() => {});
      await new Promise((done) => setTimeout(done, 500));
    }
    isBusy = false;
  };
  // A browser has six connections to a host, for all its tabs: a page that nobody sees gives its own back.
  const status = $("status");
  let stream = null;
  const connect = () => {
    stream?.close();
    stream = document.hidden ? null : new EventSource("/events");
    if (!stream) return;
    stream.onmessage = read;
    stream.onopen = () => { status.textContent = ""; };
    stream.onerror = () => { status.textContent = "no connection to the page's process"; };
  };
  document.addEventListener("visibilitychange", connect);
  addEventListener("pageshow", connect);
  addEventListener("pagehide", () => stream?.close());
  connect();
}

async function start() {
  if (controls) {
    for (const [name, value] of new URLSearchParams(location.search)) {
      const field = controls.elements.namedItem(name);
      if (field) field.value = value;
    }
    controls.addEventListener("submit", (event) => event.preventDefault());
    controls.addEventListener("input", () => {
      const query = new URLSearchParams(location.search);
      for (const [name, value] of Object.entries(chosen())) query.set(name, value);
      history.replaceState(null, "", `?${query}`);
      repaint();
    });
    controls.addEventListener("reset", () => setTimeout(() => controls.dispatchEvent(new Event("input"))));
  }
  const figures = document.querySelectorAll("figure[data-chart], figure.timeline");
  if (figures.length) {
    const wanted = isLive && document.querySelector("figure[data-chart]") ? runs.map(readSeries) : [];
    await Promise.all([readPlotter(), ...wanted]);
    figures.forEach((figure) => watch.observe(figure));
    drawWhenIdle(drawable());
    addEventListener("beforeprint", () => onPaper(true));
    addEventListener("afterprint", () => onPaper(false));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
  }
  if (isLive) follow();
}
start();
