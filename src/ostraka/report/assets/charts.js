// Scales, axes, lines and bars in SVG, with units and legends.

import { explain, h, legend, s } from "./base.js";

/** Round numbers that divide a range into about `count` parts. */
export function niceTicks(low, high, count = 5) {
  if (!(high > low)) return [low];
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((n) => n * power).find((n) => n >= rough) ?? 10 * power;
  const ticks = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n += 1) ticks.push(Number((n * step).toPrecision(12)));
  return ticks;
}

/** A function from numbers to pixels. */
export function linearScale(low, high, from, to) {
  const span = high - low || 1;
  return (value) => from + (value - low) / span * (to - from);
}

/** The least and the most of the finite numbers, a little apart if they are equal. */
export function extent(numbers) {
  let low = Infinity, high = -Infinity;
  for (const n of numbers) if (Number.isFinite(n)) { if (n < low) low = n; if (n > high) high = n; }
  if (low > high) return [0, 1];
  return low === high ? [low - (Math.abs(low) || 1) * 0.05, high + (Math.abs(high) || 1) * 0.05] : [low, high];
}

const FRAME = { width: 720, height: 220, left: 64, right: 16, top: 12, bottom: 34 };

/**
 * Lines over a common x axis. `series`: `[{name, colour, points: [[x, y], …]}]`.
 * Points whose y is not finite are marked at the top with a cross.
 */
export function lineChart(series, { xLabel, yLabel, showX = String, showY = String, fromZero = false, height = FRAME.height, marks = [] } = {}) {
  const { width, left, right, top, bottom } = FRAME;
  const all = series.flatMap(({ points }) => points);
  const [x0, x1] = extent(all.map(([x]) => x));
  let [y0, y1] = extent(all.map(([, y]) => y));
  if (fromZero) { y0 = Math.min(y0, 0); y1 = Math.max(y1, 0); }
  const x = linearScale(x0, x1, left, width - right), y = linearScale(y0, y1, height - bottom, top);
  const drawing = s("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${yLabel} over ${xLabel}` });
  drawing.append(...axes({ x, y, x0, x1, y0, y1, width, height, xLabel, yLabel, showX, showY }));
  for (const { at, colour } of marks) drawing.append(s("line", { x1: x(at), x2: x(at), y1: top, y2: height - bottom, stroke: colour ?? "var(--muted)", "stroke-dasharray": "3 3" }));
  for (const { name, colour, points } of series) {
    const finite = points.filter(([, value]) => Number.isFinite(value));
    const path = finite.map(([px, py], n) => `${n ? "L" : "M"}${x(px).toFixed(1)} ${y(py).toFixed(1)}`).join("");
    drawing.append(s("path", { d: path, fill: "none", stroke: colour, "stroke-width": 2, "stroke-linejoin": "round" }));
    const isFew = points.length <= 300;
    for (const [px, py] of points) {
      const isFinite = Number.isFinite(py);
      if (isFinite && !isFew) continue;
      const dot = isFinite
        ? s("circle", { cx: x(px), cy: y(py), r: 4, fill: colour, class: "dot", tabindex: 0 })
        : s("path", { d: `M${x(px) - 4} ${top}l8 8m0 -8l-8 8`, stroke: "var(--bad)", "stroke-width": 2, class: "dot", tabindex: 0 });
      drawing.append(explain(dot, () => [h("b", {}, name), h("div", {}, `${xLabel} ${showX(px)}: ${showY(py)}`)]));
    }
  }
  return h("figure", {}, drawing, series.length > 1 ? legend(series.map(({ name, colour }) => [name, colour])) : null);
}

/** Stacked bars. `bars`: `[{x, parts: {name: value}}]`, `colours`: `{name: css colour}`. */
export function barChart(bars, colours, { xLabel, yLabel, showX = String, showY = String, height = FRAME.height } = {}) {
  const { width, left, right, top, bottom } = FRAME;
  const total = (bar) => Object.values(bar.parts).reduce((sum, n) => sum + (n ?? 0), 0);
  const y1 = Math.max(...bars.map(total), 0) || 1;
  const y = linearScale(0, y1, height - bottom, top);
  const slot = (width - left - right) / Math.max(bars.length, 1), thick = Math.max(Math.min(slot * 0.8, 48), 1);
  const middle = (n) => left + slot * (n + 0.5);
  const drawing = s("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${yLabel} by ${xLabel}` });
  drawing.append(...axes({ x: null, y, y0: 0, y1, width, height, xLabel, yLabel, showX, showY }));
  const every = Math.max(Math.ceil(bars.length / 12), 1);
  bars.forEach((bar, n) => {
    let from = 0;
    for (const [name, value] of Object.entries(bar.parts)) {
      if (!value) continue;
      const rect = s("rect", { x: middle(n) - thick / 2, y: y(from + value), width: thick, height: Math.max(y(from) - y(from + value), 0.5), fill: colours[name], class: "bar", tabindex: 0 });
      drawing.append(explain(rect, () => [h("b", {}, `${xLabel} ${showX(bar.x)}`), h("div", {}, `${name}: ${showY(value)}`), h("div", { class: "muted" }, `in all ${showY(total(bar))}`)]));
      from += value;
    }
    if (n % every === 0) drawing.append(s("text", { x: middle(n), y: height - bottom + 16, "text-anchor": "middle", class: "tick" }, showX(bar.x)));
  });
  return h("figure", {}, drawing, legend(Object.entries(colours)));
}

function axes({ x, y, x0, x1, y0, y1, width, height, xLabel, yLabel, showX, showY }) {
  const { left, right, top, bottom } = FRAME, parts = [];
  for (const tick of niceTicks(y0, y1, 4)) {
    parts.push(s("line", { x1: left, x2: width - right, y1: y(tick), y2: y(tick), class: "grid" }));
    parts.push(s("text", { x: left - 6, y: y(tick) + 4, "text-anchor": "end", class: "tick" }, showY(tick)));
  }
  if (x) for (const tick of niceTicks(x0, x1, 8)) parts.push(s("text", { x: x(tick), y: height - bottom + 16, "text-anchor": "middle", class: "tick" }, showX(tick)));
  parts.push(s("line", { x1: left, x2: width - right, y1: height - bottom, y2: height - bottom, class: "axis" }));
  parts.push(s("text", { x: (left + width - right) / 2, y: height - 3, "text-anchor": "middle", class: "label" }, xLabel));
  parts.push(s("text", { x: 12, y: (top + height - bottom) / 2, "text-anchor": "middle", class: "label", transform: `rotate(-90 12 ${(top + height - bottom) / 2})` }, yLabel));
  return parts;
}
