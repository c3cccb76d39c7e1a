// The page of a comparison: what stands out, the change by layer and role, and every leaf.

import { append, asNumber, badge, card, choice, dataTable, decode, figures, formatCount, formatNumber, formatShare, formatTime, h, hideTip, replaceAll, s, showTip } from "./base.js";

const FLAG_NAMES = { nan: "NaN or infinity", exploding: "Exploding", dead: "Dead", frozen: "Frozen" };
const MARK_NAMES = { ...FLAG_NAMES, new: "new: zero or absent before", gone: "gone: only in a", same: "no change" };
const MARK_SHAPES = {
  nan: "M1.5 1.5l7 7m0 -7l-7 7", exploding: "M5 1l4.5 8h-9z", dead: "M5 9l-4.5 -8h9z", frozen: "M1.5 1.5h7v7h-7z",
  new: "M5 1v8m-4 -4h8", gone: "M1 5h8", same: "M3.5 4h3m-3 2.5h3",
};
const MARK_LINES = new Set(["nan", "new", "gone", "same"]);
const HEAT_ROWS = 300;
const FLAGS_SHOWN = 4;

/** The page of a comparison. */
export function drawComparison(found) {
  const leaves = readLeaves(found);
  const groups = found.leaves.group.texts;
  let group = groups[0] ?? "parameters";
  const map = h("div", {}), list = h("div", {});
  const show = (chosen) => {
    group = chosen;
    const code = found.leaves.group.texts.indexOf(group), codes = found.leaves.group.codes;
    const rows = leaves.rows.filter((row) => codes[row] === code);
    replaceAll(map, drawLayers(leaves, rows, groups.length > 1 ? switches : null));
    replaceAll(list, drawLeafList(leaves, rows));
  };
  const switches = choice("Group", groups.map((name) => [name, name]), group, show);
  show(group);
  const pick = (flag) => {
    const row = leaves.rows.find((one) => leaves.path(one) === flag.path);
    const own = row === undefined ? group : leaves.group(row);
    if (own !== group) switches.querySelectorAll("button")[groups.indexOf(own)].click();
    const cell = row === undefined ? null : map.querySelector(`td[data-layer="${found.leaves.layer.codes[row]}"][data-role="${found.leaves.role.codes[row]}"]`);
    if (cell) { cell.click(); cell.scrollIntoView({ block: "center" }); cell.focus({ preventScroll: true }); }
  };
  return h("div", { class: "cards" },
    drawSummary(found, leaves),
    drawFlags(found, pick),
    card("Relative change by layer and role", map),
    found.along && found.along.pairs.length ? drawAlong(found.along) : null,
    card("Leaves", list),
    found.notes.length ? card("Notes", h("ul", { class: "plain" }, found.notes.map((note) => h("li", {}, note)))) : null);
}

/** The leaves of a comparison as functions of their row. */
function readLeaves(found) {
  const table = found.leaves, shared = new Set(table.same_as);
  const sizes = table.shape.texts.map((text) => (text === "()" ? 1 : text.split(" × ").reduce((product, size) => product * Number(size), 1)));
  const layerOf = (row) => table.layer.texts[table.layer.codes[row]];
  const relative = table.norm_delta.map((delta, row) => (delta === null ? null : asNumber(delta) === 0 ? 0 : asNumber(delta) / asNumber(table.norm_a[row])));
  const elements = (row) => sizes[table.shape.codes[row]] ?? 0;
  return {
    table, elements, rows: table.norm_delta.map((_, row) => row), isShared: (row) => shared.has(row),
    path: (row) => { const name = decode(table.name, row); return name ? layerOf(row) + found.separator + name : layerOf(row); },
    group: (row) => decode(table.group, row), flag: (row) => table.flag[row] ?? "", state: (row) => decode(table.state, row),
    changed: (row) => (table.equal[row] === null ? null : elements(row) - table.equal[row]),
    nan: (row) => table.nan[row] ?? 0,
    relative: (row) => relative[row],
  };
}

/** A relative change for people: `inf` is a leaf that was zero. */
function formatRelative(value) {
  if (value === null || value === undefined) return "–";
  if (Number.isNaN(value)) return "nan";
  return value === Infinity ? "new" : formatNumber(value, 3);
}

function drawSummary(found, leaves) {
  const table = found.leaves;
  let delta = 0, a = 0, changed = 0, elements = 0, isPartial = false;
  for (const row of leaves.rows) {
    if (leaves.isShared(row) || leaves.group(row) !== "parameters") continue;
    if (table.equal[row] !== null) { changed += leaves.changed(row); elements += leaves.elements(row); }
    if (table.norm_delta[row] === null) continue;
    const own = asNumber(table.norm_delta[row]) ** 2;
    if (!Number.isFinite(own)) { isPartial = true; continue; }
    delta += own; a += asNumber(table.norm_a[row]) ** 2;
  }
  const [moved, compared] = found.moved, only = found.counts["only in a"] + found.counts["only in b"];
  const side = (name, one) => h("div", { class: "side" }, h("b", {}, name), h("code", {}, one.path),
    h("span", { class: "muted" }, [one.step === null ? null : `step ${formatNumber(one.step)}`, one.saved_at ? formatTime(one.saved_at) : null].filter(Boolean).join(", ")));
  return card("Parameters from a to b",
    figures({
      [`relative change ‖b − a‖ / ‖a‖${isPartial ? ", of finite leaves" : ""}`]: formatRelative(delta === 0 ? 0 : Math.sqrt(delta / a)),
      "parameters changed": `${moved.toLocaleString("en-US")} of ${compared.toLocaleString("en-US")}`,
      "of their elements": formatShare(changed, elements),
      "leaves differ": found.counts.different.toLocaleString("en-US"),
      "leaves are equal": found.counts["the same"].toLocaleString("en-US"),
      "leaves in one only": only ? only.toLocaleString("en-US") : null,
    }),
    h("div", { class: "sides" }, side("a", found.a), side("b", found.b)));
}

// What stands out

/** Flags between a and b, and those along the run, one for each kind and layer. */
function joinFlags(found) {
  const joined = new Map();
  for (const flag of found.flags) joined.set(`${flag.flag} ${flag.layer}`, { ...flag, when: "" });
  for (const flag of found.along?.flags ?? []) {
    const key = `${flag.flag} ${flag.layer}`, pair = `steps ${flag.steps[0]} and ${flag.steps[1]}`;
    if (joined.has(key)) joined.get(key).when = `first between ${pair}`;
    else joined.set(key, { ...flag, when: `between ${pair}` });
  }
  return [...joined.values()];
}

function drawFlags(found, pick) {
  const all = joinFlags(found);
  if (!all.length) {
    return h("section", { class: "card", "aria-label": "What stands out", id: "flags" },
      h("div", { class: "notice good" }, found.same ? "Both checkpoints are the same." :
        `Nothing stands out: no NaN, and no exploding, dead or frozen parameter among ${formatCount(found.moved[1], "parameter")}.`));
  }
  const kinds = Object.keys(FLAG_NAMES).filter((kind) => all.some(({ flag }) => flag === kind));
  return h("section", { class: "flags", "aria-label": "What stands out", id: "flags" }, kinds.map((kind) => {
    const some = all.filter(({ flag }) => flag === kind);
    const line = (flag) => h("li", {},
      h("button", { type: "button", class: "link", onclick: () => pick(flag) }, flag.layer),
      h("div", { class: "muted" }, h("span", {}, `${flag.path.slice(flag.layer.length + 1) || "it"} `), flag.why, flag.leaves > 1 ? `; ${formatCount(flag.leaves, "leaf")} in this layer` : null, flag.when ? `; ${flag.when}` : null));
    const rest = some.slice(FLAGS_SHOWN);
    return h("section", { class: `card flag ${kind}` },
      h("h2", {}, markShape(kind), FLAG_NAMES[kind], " ", badge(formatCount(some.length, "layer"), kind === "frozen" ? "warn" : "bad")),
      h("ul", { class: "plain" }, some.slice(0, FLAGS_SHOWN).map(line)),
      rest.length ? h("details", {}, h("summary", {}, `and ${rest.length.toLocaleString("en-US")} more`), h("ul", { class: "plain" }, rest.map(line))) : null);
  }));
}

function markShape(kind) {
  const isLine = MARK_LINES.has(kind);
  return s("svg", { class: `mark ${isLine ? "line" : ""}`, viewBox: "0 0 10 10", width: 10, height: 10, role: "img", "aria-label": MARK_NAMES[kind] },
    s("path", { d: MARK_SHAPES[kind] }));
}

// Heat maps

/** A CSS colour for a share between 0 and 1 of the scale. */
function heatColour(share) {
  const at = Math.min(Math.max(share, 0), 1);
  return at < 0.5
    ? `color-mix(in oklab, var(--heat1) ${(200 * at).toFixed(1)}%, var(--heat0))`
    : `color-mix(in oklab, var(--heat2) ${(200 * at - 100).toFixed(1)}%, var(--heat1))`;
}

/** A logarithmic scale over whole decades, at most six, that ends with the largest value. */
function decadesOf(values) {
  let low = Infinity, high = 0;
  for (const value of values) if (value > 0 && Number.isFinite(value)) { low = Math.min(low, value); high = Math.max(high, value); }
  if (!high) return { low: -3, high: 0 };
  const top = Math.ceil(Math.log10(high) - 1e-9);
  return { low: Math.max(Math.min(Math.floor(Math.log10(low) + 1e-9), top - 1), top - 6), high: top };
}

function heatLegend({ low, high }, marks) {
  const ticks = [];
  for (let power = low; power <= high; power += 1) ticks.push(h("span", { style: { left: `${(power - low) / (high - low) * 100}%` } }, formatNumber(10 ** power, 1)));
  return h("div", { class: "heat-legend" },
    h("span", { class: "muted" }, "relative change ‖b − a‖ / ‖a‖, logarithmic"),
    h("div", { class: "heat-scale" }, h("i", {}), h("div", { class: "ticks" }, ticks)),
    [...marks].map((kind) => h("span", { class: "key" }, markShape(kind), MARK_NAMES[kind])));
}

/**
 * A map of cells. `rows`: `[{name, cells: [cell or null]}]`, `columns`: names. A cell has `value`,
 * `mark`, `lines()` and data for `onpick`. Arrow keys move, and Enter picks.
 */
function heatMap(label, columns, rows, { onpick, corner, wide = false }) {
  const shown = rows.slice(0, HEAT_ROWS);
  const scale = decadesOf(rows.flatMap(({ cells }) => cells.map((cell) => cell?.value)));
  const marks = new Set(Object.keys(MARK_NAMES).filter((kind) => rows.some(({ cells }) => cells.some((cell) => cell?.mark === kind))));
  const body = h("tbody", {});
  const drawRow = ({ name, cells }, y) => h("tr", {}, h("th", { scope: "row", title: name }, h("span", {}, shortName(name))),
    cells.map((cell, x) => {
      if (!cell) return h("td", { class: "none" });
      const hasColour = cell.value > 0 && Number.isFinite(cell.value);
      const colour = hasColour ? heatColour((Math.log10(cell.value) - scale.low) / (scale.high - scale.low)) : null;
      return h("td", { tabindex: -1, "data-x": x, "data-y": y, ...cell.data, class: cell.mark in FLAG_NAMES ? "flagged" : null, style: { background: colour ?? "" }, "aria-label": `${name}, ${columns[x]}: ${cell.text}` },
        cell.mark ? markShape(cell.mark) : null);
    }));
  append(body, shown.map(drawRow));
  const grid = h("table", { class: `heat ${wide ? "wide" : ""}`, role: "grid", "aria-label": label },
    h("thead", {}, h("tr", {}, h("th", { class: "corner" }, corner), columns.map((name) => h("th", { scope: "col" }, h("span", {}, name))))), body);
  const cellOf = (target) => { const td = target.closest?.("td[data-y]"); return td && grid.contains(td) ? [td, rows[td.dataset.y].cells[td.dataset.x]] : [null, null]; };
  const tell = (event, at) => { const [, cell] = cellOf(event.target); if (cell) showTip(cell.lines(), at); else hideTip(); };
  grid.addEventListener("pointermove", (event) => tell(event, event));
  grid.addEventListener("pointerleave", hideTip);
  grid.addEventListener("focusin", (event) => {
    const [td] = cellOf(event.target);
    if (!td) return;
    grid.querySelectorAll('td[tabindex="0"]').forEach((one) => one.setAttribute("tabindex", -1));
    td.setAttribute("tabindex", 0);
    const box = td.getBoundingClientRect();
    if (td.matches(":focus-visible")) tell(event, { clientX: box.left + box.width / 2, clientY: box.bottom });
  });
  grid.addEventListener("focusout", hideTip);
  const choose = (event) => {
    const [td, cell] = cellOf(event.target);
    if (!cell || !onpick) return;
    grid.querySelectorAll(".picked").forEach((one) => one.classList.remove("picked"));
    td.classList.add("picked");
    onpick(cell);
  };
  grid.addEventListener("click", choose);
  grid.addEventListener("keydown", (event) => {
    const [td] = cellOf(event.target);
    if (!td) return;
    if (event.key === "Enter" || event.key === " ") { event.preventDefault(); choose(event); return; }
    const move = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (!move) return;
    event.preventDefault();
    let x = Number(td.dataset.x), y = Number(td.dataset.y), next = null;
    while (!next && x + move[0] >= 0 && x + move[0] < columns.length && y + move[1] >= 0 && y + move[1] < body.rows.length) {
      x += move[0]; y += move[1];
      next = body.rows[y].cells[x + 1].dataset.y ? body.rows[y].cells[x + 1] : null;
    }
    next?.focus();
  });
  body.querySelector("td[data-y]")?.setAttribute("tabindex", 0);
  const more = rows.length > HEAT_ROWS
    ? h("button", { type: "button", onclick: () => { append(body, rows.slice(HEAT_ROWS).map((row, n) => drawRow(row, n + HEAT_ROWS))); more.remove(); } }, `Show all ${formatCount(rows.length, "row")}`)
    : null;
  return h("div", {}, h("div", { class: "scroll heat-frame", role: "region", "aria-label": label }, grid), more, heatLegend(scale, marks));
}

function shortName(name) {
  return name.length <= 30 ? name : `…${name.slice(-29)}`;
}

/** The map of layers and roles for some rows, and the leaves of the chosen cell. */
function drawLayers(leaves, rows, switches) {
  const { table } = leaves;
  const cells = new Map(), roles = new Set();
  for (const row of rows) {
    const layer = table.layer.codes[row], role = table.role.codes[row], key = `${layer} ${role}`;
    if (!cells.has(key)) cells.set(key, { layer, role, rows: [] });
    cells.get(key).rows.push(row);
    roles.add(role);
  }
  const columns = [...roles].sort((a, b) => a - b);
  const byLayer = new Map();
  for (const cell of cells.values()) {
    if (!byLayer.has(cell.layer)) byLayer.set(cell.layer, new Map());
    byLayer.get(cell.layer).set(cell.role, sumCell(leaves, cell));
  }
  let order = "in order";
  const picked = h("div", { class: "picked-leaves", "aria-live": "polite" }), holder = h("div", {});
  const onpick = (cell) => {
    replaceAll(picked, h("h3", {}, `${table.layer.texts[cell.layer]}, ${table.role.texts[cell.role]}: ${formatCount(cell.rows.length, "leaf")}`), leafTable(leaves, cell.rows));
  };
  const draw = () => {
    const lines = [...byLayer].map(([layer, own]) => ({ layer, name: table.layer.texts[layer], cells: columns.map((role) => own.get(role) ?? null) }));
    if (order === "in order") lines.sort((a, b) => a.layer - b.layer);
    else { const most = new Map(lines.map((line) => [line, badnessOf(line.cells)])); lines.sort((a, b) => most.get(b) - most.get(a)); }
    replaceAll(holder, heatMap("relative change by layer and role", columns.map((role) => table.role.texts[role]), lines, { onpick, corner: "layer" }));
  };
  draw();
  const orders = choice("Layers", [["in order", "in order"], ["most changed", "most changed first"]], order, (chosen) => { order = chosen; draw(); });
  return h("div", {}, h("div", {}, switches, byLayer.size > 1 ? orders : null), holder, picked);
}

function badnessOf(cells) {
  return Math.max(...cells.map((cell) => (!cell ? -1 : cell.mark === "nan" ? Infinity : Number.isFinite(cell.value) ? cell.value : 0)));
}

/** The norms of the leaves in a cell together, and the mark that it gets. */
function sumCell(leaves, { layer, role, rows }) {
  const { table } = leaves;
  let a = 0, b = 0, delta = 0, nan = 0, changed = 0, elements = 0, known = false;
  for (const row of rows) {
    nan += leaves.nan(row); changed += leaves.changed(row) ?? 0; elements += leaves.elements(row);
    if (table.norm_delta[row] === null) continue;
    known = true;
    a += asNumber(table.norm_a[row]) ** 2; b += asNumber(table.norm_b[row]) ** 2; delta += asNumber(table.norm_delta[row]) ** 2;
  }
  const flags = new Set(rows.map((row) => leaves.flag(row))), states = new Set(rows.map((row) => leaves.state(row)));
  const value = !known ? null : delta === 0 ? 0 : Math.sqrt(delta / a);
  let mark = Object.keys(FLAG_NAMES).find((kind) => flags.has(kind)) ?? null;
  if (!mark && (value === Infinity || (states.size === 1 && states.has("only in b")))) mark = "new";
  if (!mark && states.size === 1 && states.has("only in a")) mark = "gone";
  if (!mark && !changed && states.size === 1 && states.has("the same")) mark = "same";
  const text = [known ? `relative change ${formatRelative(value)}` : "no norm", mark ? MARK_NAMES[mark] : null].filter(Boolean).join(", ");
  const lines = () => [
    h("b", {}, `${table.layer.texts[layer]}, ${table.role.texts[role]}`),
    h("div", {}, text),
    known ? h("div", {}, `‖a‖ ${formatNumber(Math.sqrt(a), 4)}, ‖b‖ ${formatNumber(Math.sqrt(b), 4)}, ‖b − a‖ ${formatNumber(Math.sqrt(delta), 4)}`) : null,
    h("div", {}, `${changed.toLocaleString("en-US")} of ${formatCount(elements, "element")} changed`),
    nan ? h("div", {}, `${nan.toLocaleString("en-US")} NaN or infinite in b`) : null,
    h("div", { class: "muted" }, rows.length === 1 ? leaves.path(rows[0]) : `${leaves.path(rows[0])} and ${rows.length - 1} more`),
  ];
  return { layer, role, rows, value, mark, text, lines, data: { "data-layer": layer, "data-role": role } };
}

// Along a run

function drawAlong(along) {
  const pairs = along.pairs.map(([from, to]) => `${from} → ${to}`);
  const isFlagged = new Map(along.flags.map((flag) => [`${flag.layer} ${flag.steps.join(" ")}`, flag]));
  const picked = h("div", { class: "picked-leaves", "aria-live": "polite" });
  const makeCell = (name, numbers, layer) => numbers.map((number, x) => {
    if (number === null) return null;
    const value = asNumber(number), flag = isFlagged.get(`${name} ${along.pairs[x].join(" ")}`);
    const mark = flag ? flag.flag : Number.isNaN(value) ? "nan" : value === Infinity ? "new" : value === 0 ? "same" : null;
    const text = `relative change ${formatRelative(value)}`;
    const lines = () => [h("b", {}, `${name}, steps ${pairs[x]}`), h("div", {}, text), flag ? h("div", {}, `${FLAG_NAMES[flag.flag]}: ${flag.path} ${flag.why}`) : null];
    return { value, mark, text, lines, layer, x };
  });
  const rows = along.layers.map((name, layer) => ({ name, cells: makeCell(name, along.relative[layer], layer) }));
  const onpick = ({ layer, x }) => {
    const own = along.cells.map(([of, role], n) => ({ of, role: along.roles[role], value: along.by_role[n][x] })).filter(({ of }) => of === layer);
    replaceAll(picked, h("h3", {}, `${along.layers[layer]}, steps ${pairs[x]}`), dataTable([
      { name: "role", value: (one) => one.role },
      { name: "relative change", right: true, value: (one) => asNumber(one.value), show: (one) => formatRelative(one.value === null ? null : asNumber(one.value)) },
    ], own, { empty: "There were too many layers and steps to keep the change by role." }));
  };
  return card("Relative change of the parameters along the run",
    heatMap("relative change by layer and steps", pairs, rows, { onpick, corner: "layer, from step to step", wide: true }), picked);
}

// Leaves

/** NaN above all, and new leaves, whose change is relative to nothing, below all. */
function sortableRelative(value) {
  return Number.isNaN(value) ? Infinity : value === Infinity ? -1 : value;
}

function leafTable(leaves, rows) {
  const { table } = leaves;
  const norm = (name, column) => ({ name, right: true, value: (row) => (column[row] === null ? null : asNumber(column[row])), show: (row) => formatNumber(column[row], 4) });
  return dataTable([
    { name: "leaf", value: leaves.path, show: (row) => h("code", {}, leaves.path(row)) },
    { name: "relative", right: true, value: (row) => sortableRelative(leaves.relative(row)), show: (row) => formatRelative(leaves.relative(row)) },
    norm("‖b − a‖", table.norm_delta), norm("‖a‖", table.norm_a), norm("‖b‖", table.norm_b),
    { name: "changed", right: true, value: leaves.changed, show: (row) => (leaves.changed(row) === null ? "–" : leaves.changed(row) === leaves.elements(row) ? `all ${formatNumber(leaves.elements(row))}` : formatNumber(leaves.changed(row))) },
    { name: "NaN, inf", right: true, value: leaves.nan, show: (row) => (leaves.nan(row) ? formatNumber(leaves.nan(row)) : "") },
    { name: "flag", value: leaves.flag, show: (row) => (leaves.flag(row) ? [markShape(leaves.flag(row)), " ", FLAG_NAMES[leaves.flag(row)]] : "") },
    { name: "shape", value: (row) => leaves.elements(row), show: (row) => decode(table.shape, row) || "–" },
    { name: "differs in", value: leaves.state },
  ], rows, { sort: rows.length > 1 ? "relative" : null, descending: true });
}

function drawLeafList(leaves, all) {
  const holder = h("div", {}), count = h("span", { class: "muted" });
  let words = [], kind = "all";
  const wanted = { all: () => true, changed: (row) => leaves.state(row) !== "the same", flagged: (row) => Boolean(leaves.flag(row)) };
  const draw = () => {
    const rows = all.filter((row) => {
      if (!wanted[kind](row)) return false;
      if (!words.length) return true;
      const path = leaves.path(row).toLowerCase();
      return words.every((word) => path.includes(word));
    });
    replaceAll(count, formatCount(rows.length, "leaf"));
    replaceAll(holder, rows.length ? leafTable(leaves, rows) : h("p", { class: "muted" }, "No leaf is like that."));
  };
  const search = h("input", { type: "search", id: "leaf-search", placeholder: "Search paths", "aria-label": "Search paths", oninput: () => { words = search.value.toLowerCase().split(/\s+/).filter(Boolean); draw(); } });
  draw();
  return h("div", {},
    h("div", { class: "row" }, search, choice("Show", [["all", "all"], ["changed", "changed"], ["flagged", "flagged"]], kind, (chosen) => { kind = chosen; draw(); }), count),
    holder);
}
