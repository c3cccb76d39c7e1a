// Scales, axes, lines and bars in SVG, with units and legends.

import { explain, h, legend, replaceAll, s } from "./base.js";

/** Round numbers that divide a range into about `count` parts. */
export function niceTicks(low, high, count = 5) {
  if (!(high > low)) return [low];
  const rough = high / count - low / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((n) => n * power).find((n) => n >= rough) ?? 10 * power;
  const ticks = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n += 1) ticks.push(Number((n * step).toPrecision(12)));
  return ticks;
}

/** A function from numbers to pixels. */
export function linearScale(low, high, from, to) {
  // In halves, since the distance of the largest numbers is infinite.
  const span = high / 2 - low / 2 || 1;
  return (value) => from + (value / 2 - low / 2) / span * (to - from);
}

/** The least and the most of the finite numbers, a little apart if they are equal. */
export function extent(numbers) {
  let low = Infinity, high = -Infinity;
  for (const n of numbers) if (Number.isFinite(n)) { if (n < low) low = n; if (n > high) high = n; }
  if (low > high) return [0, 1];
  return low === high ? [low - (Math.abs(low) || 1) * 0.05, high + (Math.abs(high) || 1) * 0.05] : [low, high];
}

const TICK_PX = 6.4, TOP = 12, BOTTOM = 34, RIGHT = 16;
const widths = new Map();

/** A box whose drawing has its width in pixels, so that letters stay readable on any screen. */
export function plot(name, height, draw) {
  const box = h("div", { class: "plot" });
  let drawn = 0;
  box.style.minHeight = `${height}px`;
  const drawAt = (width) => {
    if (!width || width === drawn) return;
    drawn = width;
    replaceAll(box, draw(width));
  };
  // At once if it was drawn before: a page that is drawn again must not jump.
  drawAt(widths.get(name));
  const fit = () => { const width = Math.floor(box.clientWidth); if (width) { widths.set(name, width); drawAt(width); } };
  new ResizeObserver(fit).observe(box);
  Object.assign(box, { drawAt, fit });
  return box;
}

// Nothing tells the width of a column on paper in time, but it is about that of A4.
const PAPER_PX = { column: 330, page: 690 };
window.addEventListener("beforeprint", () => document.querySelectorAll(".plot").forEach((box) => box.drawAt(box.closest(".half, .third, .two-parts, .plan-columns") ? PAPER_PX.column : PAPER_PX.page)));
window.addEventListener("afterprint", () => document.querySelectorAll(".plot").forEach((box) => box.fit()));

/** An empty drawing. */
export function frame(width, height, label) {
  return s("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
}

/** The pixels that some labels beside an axis need. */
export function widthOf(texts) {
  return Math.max(...texts.map((text) => text.length), 0) * TICK_PX + 10;
}

/**
 * Lines over a common x axis. `series`: `[{name, colour, points: [[x, y], …]}]`.
 * Points whose y is not finite are marked at the top with a cross.
 */
export function lineChart(series, { xLabel, yLabel, showX = String, showY = String, fromZero = false, height = 220, marks = [] } = {}) {
  const all = series.flatMap(({ points }) => points);
  const [x0, x1] = extent(all.map(([x]) => x));
  let [y0, y1] = extent(all.map(([, y]) => y));
  if (fromZero) { y0 = Math.min(y0, 0); y1 = Math.max(y1, 0); }
  const draw = (width) => {
    const label = `${yLabel} over ${xLabel}`, drawing = frame(width, height, label), left = leftOf(y0, y1, showY);
    const x = linearScale(x0, x1, left, width - RIGHT), y = linearScale(y0, y1, height - BOTTOM, TOP);
    drawing.append(...axes({ y, y0, y1, left, width, height, xLabel, yLabel, showY }));
    const texts = niceTicks(x0, x1, Math.min((width - left) / 80, 8));
    drawing.append(...texts.map((tick) => s("text", { x: x(tick), y: height - BOTTOM + 16, "text-anchor": "middle", class: "tick" }, showX(tick))));
    for (const { at, colour } of marks) drawing.append(s("line", { x1: x(at), x2: x(at), y1: TOP, y2: height - BOTTOM, stroke: colour ?? "var(--muted)", "stroke-dasharray": "3 3" }));
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
          : s("path", { d: `M${x(px) - 4} ${TOP}l8 8m0 -8l-8 8`, stroke: "var(--bad)", "stroke-width": 2, class: "dot", tabindex: 0 });
        drawing.append(explain(dot, () => [h("b", {}, name), h("div", {}, `${xLabel} ${showX(px)}: ${showY(py)}`)]));
      }
    }
    return drawing;
  };
  return h("figure", {}, plot(`${yLabel} over ${xLabel}`, height, draw), series.length > 1 ? legend(series.map(({ name, colour }) => [name, colour])) : null);
}

/** Stacked bars. `bars`: `[{x, parts: {name: value}}]`, `colours`: `{name: css colour}`. */
export function barChart(bars, colours, { xLabel, yLabel, showX = String, showY = String, height = 220 } = {}) {
  const total = (bar) => Object.values(bar.parts).reduce((sum, n) => sum + (n ?? 0), 0);
  const y1 = Math.max(...bars.map(total), 0) || 1;
  const draw = (width) => {
    const drawing = frame(width, height, `${yLabel} by ${xLabel}`), left = leftOf(0, y1, showY);
    const y = linearScale(0, y1, height - BOTTOM, TOP);
    const slot = (width - left - RIGHT) / Math.max(bars.length, 1), thick = Math.max(Math.min(slot * 0.8, 48), 1);
    const middle = (n) => left + slot * (n + 0.5);
    drawing.append(...axes({ y, y0: 0, y1, left, width, height, xLabel, yLabel, showY }));
    const every = Math.max(Math.ceil(widthOf(bars.map((bar) => showX(bar.x))) / slot), 1);
    bars.forEach((bar, n) => {
      let from = 0;
      for (const [name, value] of Object.entries(bar.parts)) {
        if (!value) continue;
        const rect = s("rect", { x: middle(n) - thick / 2, y: y(from + value), width: thick, height: Math.max(y(from) - y(from + value), 0.5), fill: colours[name], class: "bar", tabindex: 0 });
        drawing.append(explain(rect, () => [h("b", {}, `${xLabel} ${showX(bar.x)}`), h("div", {}, `${name}: ${showY(value)}`), Object.keys(bar.parts).length > 1 ? h("div", { class: "muted" }, `in all ${showY(total(bar))}`) : null]));
        from += value;
      }
      if (n % every === 0) drawing.append(s("text", { x: middle(n), y: height - BOTTOM + 16, "text-anchor": "middle", class: "tick" }, showX(bar.x)));
    });
    return drawing;
  };
  const names = Object.entries(colours);
  return h("figure", {}, plot(`${yLabel} by ${xLabel}`, height, draw), names.length > 1 ? legend(names) : null);
}

function leftOf(y0, y1, showY) {
  return widthOf(niceTicks(y0, y1, 4).map(showY)) + 18;
}

function axes({ y, y0, y1, left, width, height, xLabel, yLabel, showY }) {
  const middle = (TOP + height - BOTTOM) / 2;
  return [
    ...niceTicks(y0, y1, 4).flatMap((tick) => [
      s("line", { x1: left, x2: width - RIGHT, y1: y(tick), y2: y(tick), class: "grid" }),
      s("text", { x: left - 6, y: y(tick) + 4, "text-anchor": "end", class: "tick" }, showY(tick)),
    ]),
    s("line", { x1: left, x2: width - RIGHT, y1: height - BOTTOM, y2: height - BOTTOM, class: "axis" }),
    s("text", { x: (left + width - RIGHT) / 2, y: height - 3, "text-anchor": "middle", class: "label" }, xLabel),
    s("text", { x: 12, y: middle, "text-anchor": "middle", class: "label", transform: `rotate(-90 12 ${middle})` }, yLabel),
  ];
}
