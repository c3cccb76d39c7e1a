// The page of a run: its steps in time, metrics, sizes, save times, and what goes next.

import { append, asNumber, badge, card, choice, dataTable, facts, figures, formatAge, formatBytes, formatCount, formatNumber, formatSeconds, formatTime, h, hideTip, replaceAll, s, showTip } from "./base.js";
import { extent, frame, linearScale, niceTicks, plot, widthOf } from "./charts.js";

const STEP_STATES = {
  committed: ["committed: all files are listed with their sizes", "var(--c0)", ""],
  verified: ["verified: all bytes were read", "var(--good)", "good"],
  damaged: ["damaged", "var(--bad)", "bad"],
  forbidden: ["forbidden: you may not read it", "var(--warn)", "warn"],
  unsupported: ["unsupported: a newer version of Ostraka wrote it", "var(--warn)", "warn"],
};
const GROUP_COLOURS = { parameters: "var(--c0)", optimizer: "var(--c1)", other: "var(--c7)" };
const TIME_COLOURS = { blocked: "var(--c3)", background: "var(--c5)" };
const PLOT = { left: 58, right: 14, top: 14, bottom: 30 };

/** What a person chose on the page. It outlives the next drawing. */
const runView = { table: {}, by: "time" };

/** The page of a run. On a board `live.open(path)` shows a step. */
export function drawRun(found, live) {
  const together = new Map();
  const open = live ? (row) => live.open(row.path) : null;
  const shared = { rows: found.steps, together, open };
  return h("div", { class: "cards" },
    runSummary(found),
    found.notes.length ? card("Notes", found.notes.map((note) => h("div", { class: "notice" }, note))) : null,
    found.steps.length ? [
      stepsCard(found, shared),
      Object.keys(found.metrics).map((name) => metricCard(found, name, shared)),
      sizesCard(found, shared),
      timesCard(found, shared),
      stepsTable(found, open),
    ] : null,
    keepingCard(found));
}

function runSummary(found) {
  const last = found.steps.at(-1);
  const writer = found.writer;
  const status = writer ? badge(writer.is_running ? `a Manager writes: ${writer.host}, process ${writer.pid}` : `last written from ${writer.host}, process ${writer.pid}`, writer.is_running ? "good" : "") : null;
  const section = card("Summary", figures({
    steps: formatNumber(found.steps.length),
    "newest step": last ? formatNumber(last.step) : null,
    saved: last ? ageOf(last) : null,
    "in all": formatBytes(found.bytes),
    "blocked for a save (median)": medianText(found.steps.map((row) => row.blocked_s)),
    "deleted after the next save": goesNext(found),
    "free on the disk": found.space ? formatBytes(found.space.free_bytes) : null,
    "saves until the disk is full": found.space?.saves_left != null ? formatNumber(found.space.saves_left) : null,
    mirror: found.mirror ? mirrorText(found.mirror) : null,
  }), status ? h("p", { class: "status" }, status) : null);
  section.classList.add("summary");
  return section;
}

function ageOf(row) {
  return h("time", { title: formatTime(row.saved_at), "data-saved-at": row.saved_at }, formatAge(row.saved_at));
}

function medianOf(numbers) {
  const sorted = numbers.filter((n) => n !== null && n !== undefined).sort((a, b) => a - b);
  if (!sorted.length) return null;
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

function medianText(numbers) {
  const middle = medianOf(numbers);
  return middle === null ? null : formatSeconds(middle);
}

function goesNext(found) {
  const going = found.steps.filter((row) => row.goes_next).map((row) => row.step);
  if (!found.rules || found.rules.keep_if) return "unknown";
  if (!going.length) return "none";
  return going.length > 3 ? formatCount(going.length, "step") : going.map((n) => formatNumber(n)).join(", ");
}

function mirrorText(mirror) {
  if (!mirror.waiting.length) return "up to date";
  return mirror.lag_s === null ? `${formatNumber(mirror.waiting.length)} waiting` : `${formatSeconds(mirror.lag_s)} behind`;
}

// Charts. All have the steps as their x axis, and show the same step when one is picked.

/** The lines and labels of a y axis, and the pixels to its left. */
function yAxis(y, low, high, width, show) {
  // Sizes are shown in powers of 1024, so their ticks are round numbers of those.
  const unit = show === formatBytes ? 1024 ** Math.floor(Math.log2(Math.max(high, 1)) / 10) : 1;
  const ticks = niceTicks(low / unit, high / unit, 4).map((tick) => tick * unit), left = leftOfSteps(ticks.map(show));
  return [left, ticks.flatMap((tick) => [
    s("line", { x1: left, x2: width - PLOT.right, y1: y(tick), y2: y(tick), class: "grid" }),
    s("text", { x: left - 8, y: y(tick) + 4, "text-anchor": "end", class: "tick" }, show(tick)),
  ])];
}

/** The same for most charts, so that they are aligned. */
function leftOfSteps(texts) {
  return Math.max(PLOT.left, widthOf(texts) + 4);
}

function tickSeconds(seconds) {
  return seconds > 0 && seconds < 1 ? `${formatNumber(seconds * 1000, 3)} ms` : formatSeconds(seconds);
}

/** Labels below some of the steps, as many as there is room for, and the name of the axis. */
function stepLabels(rows, xs, left, width, height) {
  const texts = rows.map((row) => formatNumber(row.step));
  const room = Math.max(...texts.map((text) => text.length)) * 7 + 18, labels = [];
  let free = -Infinity;
  texts.forEach((text, n) => {
    const half = text.length * 3.4;
    if (xs[n] - room / 2 < free || xs[n] + half > width || xs[n] - half < 0) return;
    labels.push(s("text", { x: xs[n], y: height - 12, "text-anchor": "middle", class: "tick" }, text));
    free = xs[n] + room / 2;
  });
  return [s("line", { x1: left, x2: width - PLOT.right, y1: height - PLOT.bottom, y2: height - PLOT.bottom, class: "axis" }), labels,
    s("text", { x: 4, y: height - 12, class: "label" }, "step")];
}

/** Let a pointer or the arrow keys pick the nearest step, in all charts at once. */
function pickable(drawing, xs, { rows, together, open }, { width, height, label }) {
  const line = s("line", { y1: PLOT.top - 6, y2: height - PLOT.bottom, class: "cross", visibility: "hidden" });
  const area = s("rect", { x: 0, y: 0, width, height, class: open ? "pick area" : "area", tabindex: 0, role: "slider", "aria-label": label, "aria-valuemin": 0, "aria-valuemax": rows.length - 1 });
  let at = rows.length - 1;
  const show = (n) => {
    if (n === null) line.setAttribute("visibility", "hidden");
    else { line.setAttribute("x1", xs[n]); line.setAttribute("x2", xs[n]); line.removeAttribute("visibility"); }
  };
  const pick = (n, where) => {
    at = n;
    area.setAttribute("aria-valuenow", n);
    area.setAttribute("aria-valuetext", `step ${rows[n].step}`);
    together.forEach((one) => one(n));
    const box = drawing.getBoundingClientRect();
    showTip(stepTip(rows[n]), where ?? { clientX: box.left + xs[n] * box.width / width, clientY: box.top + box.height / 2 });
  };
  const leave = () => { together.forEach((one) => one(null)); hideTip(); };
  const nearest = (event) => {
    const box = drawing.getBoundingClientRect(), x = (event.clientX - box.left) * width / box.width;
    return xs.reduce((best, one, n) => (Math.abs(one - x) < Math.abs(xs[best] - x) ? n : best), 0);
  };
  area.addEventListener("pointermove", (event) => pick(nearest(event), event));
  area.addEventListener("pointerleave", leave);
  area.addEventListener("blur", leave);
  area.addEventListener("focus", () => { if (area.matches(":focus-visible")) pick(at); });
  area.addEventListener("click", (event) => { if (open) open(rows[nearest(event)]); });
  area.addEventListener("keydown", (event) => {
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: rows.length - 1 }[event.key];
    if (event.key === "Enter" && open) open(rows[at]);
    if (to === undefined) return;
    event.preventDefault();
    pick(Math.min(Math.max(to, 0), rows.length - 1));
  });
  together.set(label, show);
  drawing.append(line, area);
  return drawing;
}

function stepTip(row) {
  const metrics = Object.entries(row.metrics).map(([name, value]) => h("div", {}, `${name}: ${formatNumber(value)}`));
  return [h("b", {}, `step ${formatNumber(row.step)}`), ` ${[row.state, ...flagsOf(row)].join(", ")}`, metrics,
    row.blocked_s === null ? null : h("div", {}, `blocked ${formatSeconds(row.blocked_s)}, background ${formatSeconds(row.background_s)}`),
    h("div", { class: "muted" }, `${formatBytes(row.bytes)}, ${formatTime(row.saved_at)}`),
    row.problems.slice(0, 2).map((problem) => h("div", {}, problem))];
}

function flagsOf(row) {
  return [
    row.pinned ? "pinned" : null,
    row.best.length ? `best ${row.best.join(", ")}` : null,
    row.mirrored === null ? null : row.mirrored ? "mirrored" : "not mirrored yet",
    row.held ? `held by ${formatCount(row.held, "reader")}` : null,
    row.goes_next ? "goes next" : null,
    row.format === "orbax" ? "written by Orbax" : null,
  ].filter(Boolean);
}

// The steps in time

function stepShape(row, x, y, r) {
  const colour = STEP_STATES[row.state][1];
  if (row.state === "damaged") return s("path", { d: `M${x - r} ${y - r}l${2 * r} ${2 * r}m0 ${-2 * r}l${-2 * r} ${2 * r}`, stroke: colour, "stroke-width": 2.5, class: "mark damaged" });
  if (row.state === "forbidden" || row.state === "unsupported") return s("path", { d: `M${x} ${y - r - 1}l${r + 1} ${r + 1}l${-r - 1} ${r + 1}l${-r - 1} ${-r - 1}z`, fill: "var(--card)", stroke: colour, "stroke-width": 2, class: `mark ${row.state}` });
  if (row.goes_next) return s("circle", { cx: x, cy: y, r, fill: "var(--card)", stroke: "var(--warn)", "stroke-width": 2, "stroke-dasharray": "3 2", class: `mark ${row.state} going` });
  if (row.state === "verified") return s("g", { class: "mark verified" }, s("circle", { cx: x, cy: y, r: r + 2, fill: "none", stroke: colour, "stroke-width": 1.5 }), s("circle", { cx: x, cy: y, r: r - 1, fill: colour }));
  return s("circle", { cx: x, cy: y, r, fill: colour, class: "mark committed" });
}

/** What a step can have besides its state: a row below the steps for each. */
const STEP_LANES = [
  ["pinned", (row) => row.pinned, (x, y) => s("path", { d: `M${x - 3} ${y + 5}v-10h8l-2.5 3l2.5 3h-8`, fill: "var(--c4)", stroke: "var(--c4)", class: "mark pinned" })],
  ["best", (row) => row.best.length > 0, (x, y) => s("path", { d: `M${x} ${y - 5}l1.6 3.4l3.6 .4l-2.7 2.5l.8 3.7l-3.3 -1.9l-3.3 1.9l.8 -3.7l-2.7 -2.5l3.6 -.4z`, fill: "var(--c1)", class: "mark best" })],
  ["mirrored", (row) => row.mirrored !== null, (x, y, row) => s("path", { d: `M${x - 4} ${y - 4}h8v8h-8z`, fill: row.mirrored ? "var(--c2)" : "var(--card)", stroke: row.mirrored ? "var(--c2)" : "var(--warn)", "stroke-width": 1.5, class: row.mirrored ? "mark mirrored" : "mark waiting" })],
  ["held", (row) => row.held > 0, (x, y) => s("g", { class: "mark held" }, s("circle", { cx: x, cy: y, r: 4.5, fill: "none", stroke: "var(--c3)", "stroke-width": 1.5 }), s("circle", { cx: x, cy: y, r: 1.8, fill: "var(--c3)" }))],
];
const LANE_NAMES = { best: "best by a metric", held: "held by a reader" };

function shapeLegend(found) {
  const has = (test) => found.steps.some(test), entry = (shape, text) => h("span", {}, s("svg", { width: 16, height: 14, viewBox: "0 0 16 14", "aria-hidden": "true" }, shape), text);
  const plain = { goes_next: false };
  return h("div", { class: "legend" },
    Object.entries(STEP_STATES).filter(([state]) => has((row) => row.state === state)).map(([state, [text]]) => entry(stepShape({ ...plain, state }, 7, 7, 4), text)),
    has((row) => row.goes_next) ? entry(stepShape({ state: "committed", goes_next: true }, 7, 7, 5), "deleted after the next save") : null,
    STEP_LANES.filter(([, is]) => has(is)).map(([name, is, shape]) => entry(shape(7, 7, { mirrored: true }), LANE_NAMES[name] ?? name)),
    has((row) => row.mirrored === false) ? entry(STEP_LANES[2][2](7, 7, { mirrored: false }), "not mirrored yet") : null);
}

function stepsCard(found, shared) {
  const rows = found.steps, box = h("div", {});
  const hasTimes = rows.every((row) => row.saved_at !== null);
  const draw = () => {
    const byTime = hasTimes && runView.by === "time";
    replaceAll(box, plot("steps", heightOfSteps(rows), (width) => drawSteps(rows, shared, width, byTime)));
  };
  const options = choice("Axis", [["time", "time"], ["step", "step"]], runView.by, (value) => { runView.by = value; draw(); });
  draw();
  const section = card("Steps", hasTimes ? options : null, box, shapeLegend(found));
  section.id = "steps";
  return section;
}

function lanesOf(rows) {
  return STEP_LANES.filter(([, is]) => rows.some(is));
}

function heightOfSteps(rows) {
  return 66 + 18 * lanesOf(rows).length;
}

function drawSteps(rows, shared, width, byTime) {
  const height = heightOfSteps(rows), middle = 24, at = (row) => (byTime ? row.saved_at : row.step), lanes = lanesOf(rows);
  const [low, high] = rows.length > 1 ? extent(rows.map(at)) : [at(rows[0]) - 1, at(rows[0]) + 1];
  const r = rows.length > 400 ? 2.5 : rows.length > 120 ? 3.5 : 5, left = lanes.length ? 78 : 18;
  const x = linearScale(low, high, left, width - 18), xs = rows.map((row) => x(at(row)));
  const drawing = frame(width, height, `${rows.length} steps over ${byTime ? "time" : "step numbers"}`);
  drawing.append(s("line", { x1: left - 8, x2: width - 10, y1: middle, y2: middle, class: "axis" }));
  // Damage and deletion are drawn last, above their neighbours.
  const order = rows.map((row, n) => n).sort((a, b) => (rows[a].state !== "committed" || rows[a].goes_next) - (rows[b].state !== "committed" || rows[b].goes_next));
  append(drawing, order.map((n) => stepShape(rows[n], xs[n], middle, r)));
  lanes.forEach(([name, is, shape], lane) => {
    const y = middle + 22 + 18 * lane;
    append(drawing, [
      s("line", { x1: left - 8, x2: width - 10, y1: y, y2: y, class: "grid" }), s("text", { x: 2, y: y + 4, class: "label" }, name),
      rows.map((row, n) => (is(row) ? shape(xs[n], y, row) : null))]);
  });
  if (lanes.length) drawing.append(s("text", { x: 2, y: middle + 4, class: "label" }, "saved"));
  append(drawing, byTime ? timeLabels(low, high, x, width, height) : niceTicks(low, high, width / 110).map((tick) => s("text", { x: x(tick), y: height - 8, "text-anchor": "middle", class: "tick" }, formatNumber(tick))));
  return pickable(drawing, xs, shared, { width, height: height + 10, label: "Steps" });
}

function timeLabels(low, high, x, width, height) {
  const span = high - low, steps = [1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14400, 43200, 86400, 172800, 604800, 2592000, 31536000];
  const step = steps.find((one) => span / one <= Math.max(width / 130, 3)) ?? span;
  const isDaily = step >= 86400, labels = [];
  let day = "";
  for (let at = Math.ceil(low / step) * step; at <= high; at += step) {
    const text = new Date(at * 1000).toISOString(), here = text.slice(0, 10);
    const shown = isDaily ? here : `${here === day ? "" : `${here.slice(5)} `}${step < 60 ? text.slice(11, 19) : text.slice(11, 16)}`;
    day = here;
    if (x(at) > 30 && x(at) < width - 30) labels.push(s("text", { x: x(at), y: height - 8, "text-anchor": "middle", class: "tick" }, shown));
  }
  if (labels.length) return labels;
  // The steps are less than a few seconds apart.
  return [s("text", { x: x(low), y: height - 8, class: "tick" }, formatTime(low)), width > 520 ? s("text", { x: x(high), y: height - 8, "text-anchor": "end", class: "tick" }, `${formatNumber(span, 3)} s later`) : null];
}

// Metrics

function metricCard(found, name, shared) {
  const about = found.metrics[name], rows = found.steps;
  const best = rows.find((row) => row.step === about.best_step);
  const odd = rows.filter((row) => typeof row.metrics[name] === "string");
  const section = card(name,
    h("p", { class: "reading" }, h("b", {}, formatNumber(about.latest)), h("span", { class: "muted" }, " latest"),
      best ? [h("b", {}, formatNumber(best.metrics[name])), h("span", { class: "muted" }, ` best (${about.better === "low" ? "lowest" : "highest"}), step ${formatNumber(best.step)}`)] : null,
      odd.length ? badge(`${formatCount(odd.length, "value")} not finite`, "bad") : null),
    plot(`metric ${name}`, 170, (width) => drawMetric(rows, name, about, shared, width)));
  const names = Object.keys(found.metrics);
  section.classList.add(cardWidth(names.indexOf(name), names.length));
  section.dataset.metric = name;
  return section;
}

/** How wide the n-th card of several is, so that each row is full. */
function cardWidth(n, count) {
  const halves = { 0: 0, 1: count === 1 ? 0 : 4, 2: 2 }[count % 3];
  return count === 1 ? "whole" : n >= count - halves ? "half" : "third";
}

function drawMetric(rows, name, about, shared, width) {
  const height = 170, steps = rows.map((row) => row.step), values = rows.map((row) => asNumber(row.metrics[name]));
  const [x0, x1] = extent(steps), [y0, y1] = extent(values);
  const y = linearScale(y0, y1, height - PLOT.bottom - 6, PLOT.top), drawing = frame(width, height, `${name} over steps`);
  const [left, lines] = values.some(Number.isFinite) ? yAxis(y, y0, y1, width, (tick) => formatNumber(tick, 4)) : [PLOT.left, []];
  const x = linearScale(x0, x1, left, width - PLOT.right), xs = steps.map(x);
  append(drawing, [lines, stepLabels(rows, xs, left, width, height)]);
  let path = "", isPenDown = false;
  values.forEach((value, n) => {
    if (Number.isFinite(value)) { path += `${isPenDown ? "L" : "M"}${xs[n].toFixed(1)} ${y(value).toFixed(1)}`; isPenDown = true; }
    else if (name in rows[n].metrics) drawing.append(s("path", { d: `M${xs[n] - 4} ${PLOT.top - 4}l8 8m0 -8l-8 8`, stroke: "var(--bad)", "stroke-width": 2, class: "mark nan" }));
  });
  drawing.append(s("path", { d: path, fill: "none", stroke: "var(--c0)", "stroke-width": 2, "stroke-linejoin": "round", "stroke-linecap": "round" }));
  if (rows.length <= 60) values.forEach((value, n) => { if (Number.isFinite(value)) drawing.append(s("circle", { cx: xs[n], cy: y(value), r: 2.5, fill: "var(--c0)" })); });
  const best = rows.findIndex((row) => row.step === about.best_step);
  if (best >= 0 && Number.isFinite(values[best])) drawing.append(s("circle", { cx: xs[best], cy: y(values[best]), r: 6, fill: "none", stroke: "var(--c1)", "stroke-width": 2.5, class: "mark best" }));
  return pickable(drawing, xs, shared, { width, height, label: name });
}

// Sizes and times as stacked bars: one path for each colour, so that 1,000 steps are drawn at once

function drawStacks(rows, parts, colours, show, shared, width, height, label) {
  const totals = rows.map((row, n) => Object.keys(colours).reduce((sum, key) => sum + (parts[n]?.[key] ?? 0), 0));
  const most = Math.max(...totals) || 1, y = linearScale(0, most, height - PLOT.bottom, PLOT.top);
  const [left, lines] = yAxis(y, 0, most, width, show);
  const slot = (width - left - PLOT.right) / rows.length, thick = Math.max(Math.min(slot * 0.78, 36), Math.min(slot, 1));
  const xs = rows.map((row, n) => left + slot * (n + 0.5)), drawing = frame(width, height, label);
  append(drawing, [lines, stepLabels(rows, xs, left, width, height)]);
  const from = rows.map(() => 0);
  for (const [key, colour] of Object.entries(colours)) {
    let path = "";
    parts.forEach((one, n) => {
      const value = one?.[key] ?? 0;
      if (!value) return;
      path += `M${(xs[n] - thick / 2).toFixed(2)} ${y(from[n]).toFixed(2)}h${thick.toFixed(2)}V${y(from[n] + value).toFixed(2)}h${(-thick).toFixed(2)}z`;
      from[n] += value;
    });
    if (path) drawing.append(s("path", { d: path, fill: colour, class: `stack ${key}` }));
  }
  return pickable(drawing, xs, shared, { width, height, label });
}

function colourLegend(colours, texts) {
  return h("div", { class: "legend" }, Object.entries(colours).map(([key, colour]) => h("span", {}, h("i", { style: { background: colour } }), texts[key] ?? key)));
}

function sizesCard(found, shared) {
  const parts = found.steps.map((row) => row.groups), last = parts.findLast((one) => one) ?? {};
  const used = Object.fromEntries(Object.entries(GROUP_COLOURS).filter(([key]) => parts.some((one) => one?.[key])));
  const texts = Object.fromEntries(Object.keys(used).map((key) => [key, last[key] === undefined ? key : `${key}: ${formatBytes(last[key])} in the newest step`]));
  const section = card("Bytes by group", plot("sizes", 190, (width) => drawStacks(found.steps, parts, used, formatBytes, shared, width, 190, "Bytes by group")), colourLegend(used, texts));
  section.classList.add("half");
  section.id = "sizes";
  return section;
}

function timesCard(found, shared) {
  const rows = found.steps, parts = rows.map((row) => (row.blocked_s === null ? null : { blocked: row.blocked_s, background: row.background_s ?? 0 }));
  const between = rows.slice(1).map((row, n) => (row.saved_at === null || rows[n].saved_at === null ? null : row.saved_at - rows[n].saved_at)).filter((gap) => gap === null || gap > 0);
  const advice = found.advice, steps = advice?.interval_steps ? `, which is ${formatCount(advice.interval_steps, "step")}` : "";
  const advised = !advice ? null : advice.interval_s !== null ? `every ${formatSeconds(advice.interval_s)}${steps}` : "unknown: give the Manager mtbf_s";
  const section = card("Seconds of each save",
    parts.some(Boolean) ? plot("times", 190, (width) => drawStacks(rows, parts, TIME_COLOURS, tickSeconds, shared, width, 190, "Seconds of each save")) : h("p", { class: "muted" }, "These saves have recorded no times."),
    colourLegend(TIME_COLOURS, { blocked: "blocked: the loop waited", background: "background: the loop went on" }),
    facts({ "time between saves (median)": medianText(between), "advised interval": advised }));
  section.classList.add("half");
  section.id = "times";
  return section;
}

// The table

function stepsTable(found, open) {
  const names = Object.keys(found.metrics).slice(0, 6);
  const columns = [
    { name: "step", right: true, value: (row) => row.step, show: (row) => formatNumber(row.step) },
    { name: "state", value: (row) => row.state, show: (row) => [badge(row.state, STEP_STATES[row.state][2]), flagsOf(row).map((flag) => [" ", badge(flag, flag === "goes next" || flag.startsWith("not") ? "warn" : "accent")])] },
    { name: "saved", value: (row) => row.saved_at, show: ageOf },
    { name: "size", right: true, value: (row) => row.bytes, show: (row) => formatBytes(row.bytes) },
    ...names.map((name) => ({ name, right: true, value: (row) => asNumber(row.metrics[name]), show: (row) => formatNumber(row.metrics[name]) })),
    { name: "blocked", right: true, value: (row) => row.blocked_s, show: (row) => (row.blocked_s === null ? "–" : formatSeconds(row.blocked_s)) },
    { name: "background", right: true, value: (row) => row.background_s, show: (row) => (row.background_s === null ? "–" : formatSeconds(row.background_s)) },
  ];
  const section = card("Table of steps", dataTable(columns, found.steps, { sort: "step", descending: true, onpick: open, state: runView.table }));
  section.id = "table";
  return section;
}

// What is kept

function keepingCard(found) {
  const rules = found.rules, mirror = found.mirror, space = found.space;
  const going = found.steps.filter((row) => row.goes_next).map((row) => formatNumber(row.step));
  const section = card("Saving and keeping", facts({
    directory: h("code", {}, found.path),
    saves: rules ? rules.saves : "unknown: no Manager has said so",
    keeps: rules ? `${rules.keeps}; the newest and pinned steps stay` : null,
    "deleted after the next save": !rules || rules.keep_if ? "unknown" : going.length ? going.slice(0, 20).join(", ") + (going.length > 20 ? ` and ${going.length - 20} more` : "") : "none",
    advice: found.advice ? found.advice.text : null,
    mirror: mirror ? [h("code", {}, mirror.path), ` has ${formatCount(mirror.steps, "step")}`, mirror.newest === null ? "" : `, the newest is ${formatNumber(mirror.newest)}`, `; ${mirrorText(mirror)}`] : null,
    "the mirror lacks": mirror && mirror.waiting.length ? mirror.waiting.slice(-20).map((n) => formatNumber(n)).join(", ") : null,
    space: space ? `${formatBytes(space.free_bytes)} of ${formatBytes(space.total_bytes)} are free${space.saves_left === null ? "" : `, enough for ${formatCount(space.saves_left, "save")} like the last one`}` : null,
  }), mirror?.problem ? h("div", { class: "notice bad" }, mirror.problem) : null);
  section.id = "keeping";
  return section;
}
