// The page of a checkpoint: a map of its bytes, its tree, single arrays, the save, the files.

import {
  badge, breakable, card, categoryColour, choice, command, copyButton, dataTable, decode, explain, facts, figures,
  formatBytes, formatCount, formatNumber, formatSeconds, formatShape, formatShare, h,
  hideTip, legend, replaceAll, s, showTip, themeColour, visible,
} from "./base.js";
import { barChart, lineChart, linearScale, niceTicks } from "./charts.js";

const GROUPS = ["parameters", "optimizer", "other"];
const STATES = { present: "var(--c0)", verified: "var(--good)", missing: "var(--bad)", damaged: "var(--bad)", unread: "var(--c7)" };

/** The page of a checkpoint. `live` is the client of a board, or null in a file. */
export function drawCheckpoint(found, live) {
  const panel = leafPanel(found, live);
  const root = buildTree(found);
  const map = treemap(found, root, panel.show);
  const list = treeList(found, root, panel.show);
  const first = largestRow(found);
  if (first !== null) panel.show(first, false);
  return h("div", { class: "cards" },
    summaryCard(found, live),
    attentionCard(found, panel.show),
    h("div", { class: "ck-columns" },
      h("div", { class: "ck-main" }, map, list),
      h("div", { class: "ck-side" }, panel.element)),
    saveCard(found),
    filesCard(found));
}

// The head

function summaryCard(found, live) {
  const { totals, integrity, saved } = found;
  const states = { committed: "", verified: "good", damaged: "bad" };
  const meshes = found.meshes.filter(({ axes }) => Object.keys(axes).length).map(({ axes }) => showAxes(axes));
  const stored = totals.stored_bytes === totals.bytes ? null : formatBytes(totals.stored_bytes);
  return card("Summary",
    figures({
      parameters: formatCountShort(totals.parameters, [" ", " thousand", " million", " billion", " trillion"], 1e4),
      "of arrays": formatBytes(totals.bytes),
      "in files": stored,
      arrays: totals.arrays.toLocaleString("en-US"),
      [`${found.integrity.parity ? "shard and parity file" : found.format === "ostraka" ? "shard file" : "file"}${totals.files === 1 ? "" : "s"}`]: totals.files.toLocaleString("en-US"),
      [found.devices === 1 ? "device" : "devices"]: found.devices?.toLocaleString("en-US"),
      [found.processes === 1 ? "process" : "processes"]: found.processes?.toLocaleString("en-US"),
      step: found.step?.toLocaleString("en-US"),
    }),
    h("div", { class: "ck-facts" }, facts({
      state: h("span", {}, badge(integrity.state, states[integrity.state] ?? "warn"), found.pinned ? [" ", badge("pinned", "accent")] : null),
      format: { ostraka: "Ostraka", orbax: "Orbax", safetensors: "safetensors files" }[found.format],
      saved: saved.text,
      mesh: [...new Set(meshes)].join("; "),
      id: h("code", {}, found.id),
    }), facts({
      parameters: totals.parameters ? totals.parameters.toLocaleString("en-US") : null,
      bytes: GROUPS.filter((name) => found.groups[name]).map((name) => `${name} ${formatBytes(found.groups[name])}`).join(", "),
      dtypes: Object.entries(found.dtypes).map(([name, bytes]) => `${name} ${formatBytes(bytes)}`).join(", "),
      metrics: Object.entries(found.metrics).map(([name, value]) => `${name} ${formatNumber(value)}`).join(", "),
    })),
    found.values.command && !live ? h("div", { class: "notice" }, `The values of the arrays were not read. By itself, a page reads up to 1 GiB. This command reads them all:`, command(found.values.command)) : null,
    found.notes.map((note) => h("div", { class: "notice" }, note)));
}

function formatCountShort(number, units = ["", "k", "M", "G", "T"], least = 1000) {
  if (number < least) return number.toLocaleString("en-US");
  const power = Math.min(Math.floor(Math.log10(number) / 3), 4);
  return `${Number((number / 1000 ** power).toPrecision(3))}${units[power]}`;
}

function showAxes(axes) {
  return Object.entries(axes).map(([name, size]) => `${name}=${size}`).join(", ");
}

/** Leaves that a person should look at: unreadable ones, and those with NaN or infinity. */
function attentionCard(found, pick) {
  const rows = [];
  for (const [row, { path, values }] of Object.entries(found.details)) {
    if (values?.problem) rows.push({ row: Number(row), path, what: "could not be read", kind: "bad" });
    else if (values && (values.nan || values.infinite)) {
      const parts = [values.nan ? `${formatCount(values.nan, "NaN")}` : null, values.infinite ? `${values.infinite.toLocaleString("en-US")} infinite` : null];
      rows.push({ row: Number(row), path, what: `${parts.filter(Boolean).join(", ")} of ${values.count.toLocaleString("en-US")}`, kind: "bad" });
    } else if (values && values.count > 1 && values.zero === values.count && decode(found.leaves.group, Number(row)) === "parameters" && !path.endsWith("bias")) {
      rows.push({ row: Number(row), path, what: "all zero", kind: "warn" });
    }
  }
  if (!rows.length) return null;
  const element = card("Look at these arrays", dataTable([
    { name: "array", value: ({ path }) => path, show: ({ path }) => h("span", { class: "mono ck-any" }, breakable(path)) },
    { name: "why", value: ({ what }) => what, show: ({ what, kind }) => badge(what, kind) },
  ], rows, { most: 50, onpick: ({ row }) => pick(row, true) }));
  element.id = "attention";
  return element;
}

// The tree of names, with the bytes below each

function newNode(name, parent) {
  return { name, parent, path: "", bytes: 0, leaves: 0, children: null, row: -1, sorted: null, depth: parent ? parent.depth + 1 : 0 };
}

function childOf(node, name) {
  node.children ??= new Map();
  let child = node.children.get(name);
  if (!child) node.children.set(name, child = newNode(name, node));
  return child;
}

/** A tree of all leaves. `prefix(row)` may put names above each. */
function buildTree(found, prefix = null) {
  const root = newNode("all", null), { path, bytes } = found.leaves;
  for (let row = 0; row < path.length; row += 1) {
    if (prefix && !bytes[row]) continue;
    const names = path[row].split(found.separator);
    let node = root;
    count(node, row);
    if (prefix) count(node = childOf(node, prefix(row)), row);
    for (let at = 0; at < names.length; at += 1) {
      node = childOf(node, names[at]);
      count(node, row);
    }
    node.row = row;
  }
  function count(node, row) {
    node.bytes += bytes[row];
    node.leaves += 1;
  }
  return foldOnly(root, found.separator);
}

/** The bytes by host, process or file, and by the first names of the tree. */
function buildPlaces(places) {
  const root = newNode("all", null);
  for (const [place, names] of Object.entries(places.bytes)) {
    const above = childOf(root, place);
    for (const [name, bytes] of Object.entries(names)) {
      const node = childOf(above, name);
      node.bytes += bytes; above.bytes += bytes; root.bytes += bytes;
    }
  }
  return root;
}

/** Nothing is gained by a level with a single name: show it as one with the level below. */
function foldOnly(root, separator) {
  const waiting = [root];
  while (waiting.length) {
    const node = waiting.pop();
    for (const [name, child] of node.children ?? []) {
      let only = child;
      while (only.row < 0 && only.children?.size === 1) {
        const [below] = only.children.values();
        if (below.children === null && below.row >= 0 && only.depth > 1) break;
        below.name = `${only.name}${separator}${below.name}`;
        below.parent = node;
        only = below;
      }
      if (only !== child) node.children.set(name, only);
      waiting.push(only);
    }
  }
  return root;
}

function sortedChildren(node) {
  node.sorted ??= [...(node.children?.values() ?? [])].filter(({ bytes }) => bytes > 0).sort((a, b) => b.bytes - a.bytes);
  return node.sorted;
}

function pathOf(node) {
  const names = [];
  for (let at = node; at.parent; at = at.parent) names.unshift(at.name);
  return names;
}

function largestRow(found) {
  let most = null;
  found.leaves.bytes.forEach((bytes, row) => { if (found.leaves.shape[row] && (most === null || bytes > found.leaves.bytes[most])) most = row; });
  return most ?? (found.leaves.path.length ? 0 : null);
}

// The map of bytes

const MAP_HEIGHT = 440, HEAD_PX = 17, LEAST_PX = 7, LEAST_AREA = 60, GROUP_AREA = 1200;

/** A zoomable map in which areas are bytes. `pick(row)` shows an array. */
function treemap(found, tree, pick) {
  const canvas = h("canvas", { class: "ck-map", tabindex: 0, role: "application", "aria-label": "Map of bytes. Arrow keys choose, Enter opens, Escape goes back." });
  const crumbs = h("div", { class: "ck-crumbs", "aria-label": "where you are" });
  const status = h("p", { class: "muted ck-status", role: "status" });
  const key = h("div", {});
  const unit = { host: "host", process: "process", file: "file" }[found.places.unit];
  const hasPlaces = Object.keys(found.places.bytes).length > 0;
  const trees = { tree: () => tree, dtype: () => buildTree(found, (row) => decode(found.leaves.dtype, row)), place: () => buildPlaces(found.places) };
  const built = {};
  let by = "tree", root = tree, focus = 0, boxes = [], hovered = null;

  function colourNumber(node) {
    if (by === "tree") {
      let at = node;
      while (at.row < 0 && at.children) at = sortedChildren(at)[0] ?? at.children.values().next().value;
      return at.row < 0 ? 7 : Math.max(GROUPS.indexOf(decode(found.leaves.group, at.row)), 0);
    }
    let at = node;
    while (at.parent?.parent) at = at.parent;
    const number = sortedChildren(built[by]).indexOf(at);
    return number < 0 ? 7 : number % 8;
  }

  function layOut(width, height) {
    boxes = [];
    const fill = (node, x, y, w, hgt, depth) => {
      const items = sortedChildren(node), total = items.reduce((sum, one) => sum + one.bytes, 0);
      if (!total) return;
      squarify(items, total, x, y, w, hgt, (child, bx, by_, bw, bh) => {
        const rest = child.rest ?? 0, box = { node: child, x: bx, y: by_, w: bw, h: bh, depth, rest, head: false };
        boxes.push(box);
        if (rest || !child.children || bw < 24 || bh < 24) return;
        const hasHead = bw > 46 && bh > 34;
        box.head = hasHead;
        const pad = depth < 2 ? 2 : 1, top = hasHead ? HEAD_PX : pad;
        if (bw - 2 * pad > LEAST_PX && bh - top - pad > LEAST_PX) { box.open = true; fill(child, bx + pad, by_ + top, bw - 2 * pad, bh - top - pad, depth + 1); }
      });
    };
    if (root.children) fill(root, 0, 0, width, height, 0);
    else boxes.push({ node: root, x: 0, y: 0, w: width, h: height, depth: 0, head: false });
  }

  function draw() {
    const width = canvas.clientWidth, height = canvas.clientHeight;
    if (!width) return;
    const ratio = window.devicePixelRatio || 1;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    layOut(width, height);
    const pen = canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    const colours = Array.from({ length: 8 }, (_, n) => themeColour(`c${n}`));
    const cardColour = themeColour("card"), text = themeColour("text");
    pen.fillStyle = themeColour("soft");
    pen.fillRect(0, 0, width, height);
    pen.textBaseline = "middle";
    for (const box of boxes) {
      const { x, y, w, h: height_, node, open, depth } = box, colour = colours[colourNumber(node)];
      // Opaque first: colours inside each other must not add up to one that hides the names.
      pen.fillStyle = cardColour;
      pen.fillRect(x, y, w, height_);
      pen.globalAlpha = open ? 0.16 + 0.06 * Math.min(depth, 4) : box.rest ? 0.5 : 0.85;
      pen.fillStyle = colour;
      pen.fillRect(x, y, w, height_);
      pen.globalAlpha = 1;
      if (w > 3 && height_ > 3) { pen.strokeStyle = cardColour; pen.lineWidth = open ? 1 : 0.75; pen.strokeRect(x + 0.5, y + 0.5, w - 1, height_ - 1); }
      if (isBad(found, node.row)) { pen.strokeStyle = themeColour("bad"); pen.lineWidth = 2; pen.strokeRect(x + 1.5, y + 1.5, Math.max(w - 3, 1), Math.max(height_ - 3, 1)); }
      if (box.head) label(pen, open ? text : inkOn(colour), "600 11px system-ui, sans-serif", node.name, formatBytes(node.bytes), x + 5, y + HEAD_PX / 2 + 0.5, w - 10);
      else if (w > 40 && height_ > 16) {
        pen.save(); pen.beginPath(); pen.rect(x, y, w, height_); pen.clip();
        label(pen, inkOn(colour), "11px system-ui, sans-serif", node.name, "", x + 5, y + Math.min(11, height_ / 2), w - 10);
        if (height_ > 32) label(pen, inkOn(colour), "10px system-ui, sans-serif", formatBytes(node.bytes), "", x + 5, y + 25, w - 10, true);
        pen.restore();
      }
    }
    const marked = hovered ?? (document.activeElement === canvas ? focused() : null);
    if (marked) { pen.strokeStyle = text; pen.lineWidth = 2; pen.strokeRect(marked.x + 1, marked.y + 1, Math.max(marked.w - 2, 1), Math.max(marked.h - 2, 1)); }
  }

  function focused() {
    return boxes.filter(({ depth }) => depth === 0)[focus] ?? null;
  }

  function lines({ node, rest }) {
    if (rest) return [h("b", { class: "ck-any" }, pathOf(node).join(" / ")), h("div", {}, `${rest.toLocaleString("en-US")} small ones, ${formatBytes(node.bytes)} together`)];
    const at = node.row >= 0 ? [decode(found.leaves.dtype, node.row), formatShape(found.leaves.shape[node.row]), decode(found.leaves.sharding, node.row)].filter(Boolean).join(", ") : node.leaves ? formatCount(node.leaves, "leaf") : "";
    return [h("b", { class: "ck-any" }, pathOf(node).join(" / ")), h("div", {}, `${formatBytes(node.bytes)}, ${formatShare(node.bytes, built.tree.bytes)} of all`), at ? h("div", { class: "muted" }, at) : null];
  }

  function zoom(node) {
    root = node; focus = 0; hovered = null;
    hideTip();
    const above = [];
    for (let at = node; at; at = at.parent) above.unshift(at);
    replaceAll(crumbs, above.map((one, at) => [at ? h("span", { class: "muted" }, "›") : null,
      one === node ? h("b", { class: "ck-any" }, one.parent ? one.name : "all") : h("button", { type: "button", class: "small", onclick: () => zoom(one) }, one.parent ? one.name : "all")]),
      h("span", { class: "muted" }, ` ${formatBytes(node.bytes)}, ${formatShare(node.bytes, built.tree.bytes)}`));
    tell();
    draw();
  }
  function tell() {
    const box = focused();
    replaceAll(status, box && document.activeElement === canvas ? `${pathOf(box.node).join("/")}: ${formatBytes(box.node.bytes)}` : "Click a name to zoom in, an array to look at it. With the keyboard: arrows, Enter, Escape.");
  }
  function open(box) {
    if (!box) return;
    if (box.node.children) zoom(box.node);
    else if (box.node.row >= 0) pick(box.node.row, true);
  }
  function at(event) {
    const frame = canvas.getBoundingClientRect(), x = event.clientX - frame.left, y = event.clientY - frame.top;
    for (let n = boxes.length - 1; n >= 0; n -= 1) {
      const box = boxes[n];
      if (x >= box.x && x < box.x + box.w && y >= box.y && y < box.y + box.h) return box;
    }
    return null;
  }
  canvas.addEventListener("pointermove", (event) => {
    const box = at(event);
    if (box !== hovered) { hovered = box; draw(); }
    if (box) showTip(lines(box), event); else hideTip();
  });
  canvas.addEventListener("pointerleave", () => { hovered = null; hideTip(); draw(); });
  canvas.addEventListener("click", (event) => open(at(event)));
  for (const name of ["focus", "blur"]) canvas.addEventListener(name, () => { tell(); draw(); });
  canvas.addEventListener("keydown", (event) => {
    const many = boxes.filter(({ depth }) => depth === 0).length;
    if (["ArrowRight", "ArrowDown"].includes(event.key)) focus = Math.min(focus + 1, many - 1);
    else if (["ArrowLeft", "ArrowUp"].includes(event.key)) focus = Math.max(focus - 1, 0);
    else if (event.key === "Enter") open(focused());
    else if (event.key === "Escape") { if (root.parent) zoom(root.parent); }
    else return;
    event.preventDefault();
    hovered = null;
    tell();
    draw();
  });

  function change(value) {
    by = value;
    built.tree ??= tree;
    built[by] ??= trees[by]();
    const entries = by === "tree" ? GROUPS.map((name, n) => [name, n]).filter(([name]) => found.groups[name]) : sortedChildren(built[by]).slice(0, 8).map(({ name }, n) => [name, n]);
    replaceAll(key, legend(entries.map(([name, n]) => [name, categoryColour(n)])));
    zoom(built[by]);
  }
  const options = [["tree", "tree"], ["dtype", "dtype"]];
  if (hasPlaces) options.push(["place", unit]);
  const element = card("Bytes",
    h("div", { class: "ck-tools" }, choice("by", options, "tree", change)), crumbs, canvas, key, status);
  element.id = "map";
  canvas.style.height = `${MAP_HEIGHT}px`;
  new ResizeObserver(draw).observe(canvas);
  window.addEventListener("themechange", draw);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  change("tree");
  // For tests and for people with a console.
  canvas.boxes = () => boxes.map(({ node, x, y, w, h: height, depth, rest, open: isOpen }) => ({ name: node.name, path: pathOf(node).join("/"), bytes: node.bytes, x, y, w, h: height, depth, rest: rest ?? 0, open: Boolean(isOpen), row: node.row }));
  return element;
}

function isBad(found, row) {
  const values = row >= 0 ? found.details[row]?.values : null;
  return Boolean(values && (values.problem || values.nan || values.infinite));
}

function inkOn(colour) {
  const [r, g, b] = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
  return 0.299 * r + 0.587 * g + 0.114 * b > 150 ? "#10131a" : "#ffffff";
}

function label(pen, colour, font, text, more, x, y, width, isWhole = false) {
  pen.font = font;
  pen.fillStyle = colour;
  let shown = visible(text);
  if (shown.length > 200) shown = shown.slice(0, 200);
  const space = pen.measureText(shown).width;
  if (space > width) {
    const keep = Math.floor(shown.length * width / space) - 1;
    if (keep < 2 || isWhole) return;
    shown = `${shown.slice(0, keep)}…`;
  }
  pen.fillText(shown, x, y);
  if (more && space + 12 + pen.measureText(more).width < width) {
    pen.globalAlpha = 0.75;
    pen.textAlign = "right";
    pen.fillText(more, x + width, y);
    pen.textAlign = "left";
    pen.globalAlpha = 1;
  }
}

/** Put boxes whose areas are bytes into a rectangle, as square as can be. Tiny ones are gathered. */
function squarify(given, total, x, y, w, hgt, put) {
  const scale = w * hgt / total, items = gatherTiny(given, scale);
  let at = 0;
  while (at < items.length && w > 0 && hgt > 0) {
    const side = Math.min(w, hgt);
    let row = 0, end = at, worst = Infinity;
    while (end < items.length) {
      const area = items[end].bytes * scale, sum = row + area;
      const most = items[at].bytes * scale, least = area;
      const ratio = Math.max(side * side * most / (sum * sum), sum * sum / (side * side * least));
      if (ratio > worst) break;
      worst = ratio; row = sum; end += 1;
    }
    const thick = row / side;
    let along = 0;
    for (; at < end; at += 1) {
      const length = items[at].bytes * scale / thick;
      if (w >= hgt) put(items[at], x, y + along, thick, length);
      else put(items[at], x + along, y, length, thick);
      along += length;
    }
    if (w >= hgt) { x += thick; w -= thick; } else { y += thick; hgt -= thick; }
  }
}

/** Nodes, the largest first, of which those that are too small to see are gathered in groups. */
function gatherTiny(items, scale) {
  const first = items.findIndex(({ bytes }) => bytes * scale < LEAST_AREA);
  if (first < 0 || first === items.length - 1) return items;
  const tiny = items.slice(first), area = tiny.reduce((sum, { bytes }) => sum + bytes, 0) * scale;
  const each = Math.max(Math.ceil(tiny.length / Math.max(Math.floor(area / GROUP_AREA), 1)), 2);
  const groups = items.slice(0, first);
  for (let at = 0; at < tiny.length; at += each) {
    const members = tiny.slice(at, at + each);
    if (members.length === 1) { groups.push(members[0]); continue; }
    const group = newNode(`${members[0].name} … ${members.at(-1).name}`, members[0].parent);
    group.children = new Map(members.map((one, n) => [n, one]));
    group.rest = members.length;
    for (const one of members) { group.bytes += one.bytes; group.leaves += one.leaves; }
    groups.push(group);
  }
  return groups.sort((a, b) => b.bytes - a.bytes);
}

// The tree as a list

const ROW_PX = 26;

/** The leaves as a tree that opens, with a search. Only the visible rows are elements. */
function treeList(found, tree, pick) {
  const { leaves } = found;
  const search = h("input", { type: "search", id: "search", placeholder: "Search: part of a name, or a pattern such as model/**/kernel", "aria-label": "Search leaves" });
  const said = h("span", { class: "muted", role: "status", id: "matches" });
  const space = h("div", { class: "ck-space" });
  const box = h("div", { class: "ck-list", id: "tree", role: "tree", tabindex: 0, "aria-label": "Leaves" }, space);
  const opened = new Set([tree]);
  let rows = [], chosen = -1, cursor = 0;

  const inOrder = (node) => [...(node.children?.values() ?? [])];
  // Names at the top are open if that makes no long list.
  const inAll = inOrder(tree).reduce((sum, { children }) => sum + 1 + (children?.size ?? 0), 0);
  if (inAll <= 40) for (const node of inOrder(tree)) if (node.children) opened.add(node);

  function openRows() {
    const listed = [];
    const add = (node, depth) => {
      for (const child of inOrder(node)) {
        listed.push({ node: child, row: child.children ? -1 : child.row, depth });
        if (opened.has(child)) add(child, depth + 1);
      }
    };
    add(tree, 0);
    return listed;
  }
  function filter() {
    const text = search.value.trim();
    const matches = matcher(text);
    rows = text ? [] : openRows();
    if (text) for (let row = 0; row < leaves.path.length; row += 1) if (matches(leaves.path[row])) rows.push({ node: null, row, depth: 0 });
    replaceAll(said, text ? `${formatCount(rows.length, "leaf")} of ${leaves.path.length.toLocaleString("en-US")}` : formatCount(leaves.path.length, "leaf"));
    cursor = Math.min(cursor, Math.max(rows.length - 1, 0));
    space.style.height = `${rows.length * ROW_PX}px`;
    box.style.height = `${Math.min(Math.max(rows.length, 6), 18) * ROW_PX + 4}px`;
    draw();
  }
  function draw() {
    const first = Math.max(Math.floor(box.scrollTop / ROW_PX) - 8, 0);
    const last = Math.min(first + Math.ceil((box.clientHeight || 420) / ROW_PX) + 16, rows.length);
    const shown = [];
    for (let n = first; n < last; n += 1) shown.push(drawRow(n));
    replaceAll(space, shown);
    box.setAttribute("aria-activedescendant", rows.length ? `leaf-${cursor}` : "");
  }
  function drawRow(n) {
    const { node, row, depth } = rows[n], isLeaf = row >= 0;
    const bytes = isLeaf ? leaves.bytes[row] : node.bytes;
    const name = node ? node.name : leaves.path[row];
    const isOpen = node && opened.has(node);
    const about = !isLeaf ? formatCount(node.leaves, "leaf")
      : leaves.shape[row] ? `${decode(leaves.dtype, row)}  ${formatShape(leaves.shape[row])}` : leaves.values[row] ?? "";
    return h("div", {
      class: `ck-row${n === cursor ? " cursor" : ""}${isLeaf && row === chosen ? " chosen" : ""}`, role: "treeitem", id: `leaf-${n}`,
      "aria-level": depth + 1, "aria-expanded": isLeaf ? null : String(Boolean(isOpen)), "aria-selected": String(isLeaf && row === chosen),
      style: { top: `${n * ROW_PX}px`, paddingLeft: `${8 + Math.min(depth, 12) * 14}px` }, title: name, onclick: () => { cursor = n; enter(n); },
    },
    h("span", { class: "ck-toggle", "aria-hidden": "true" }, isLeaf ? "" : isOpen ? "▾" : "▸"),
    h("span", { class: "ck-name mono" }, name),
    h("span", { class: "ck-about muted" }, about),
    isLeaf && isBad(found, row) ? badge("!", "bad") : null,
    h("span", { class: "ck-bytes" }, leaves.same_as[row] !== undefined ? `= ${leaves.path[leaves.same_as[row]]}` : bytes ? formatBytes(bytes) : ""),
    h("span", { class: "ck-share", "aria-hidden": "true" }, h("i", { style: { width: `${100 * bytes / (tree.bytes || 1)}%` } })));
  }
  function enter(n) {
    const { node, row } = rows[n];
    if (row >= 0) { chosen = row; pick(row, true); draw(); } else toggle(node);
  }
  function toggle(node) {
    if (opened.has(node)) opened.delete(node); else opened.add(node);
    filter();
  }
  function go(n) {
    cursor = Math.max(Math.min(n, rows.length - 1), 0);
    const top = cursor * ROW_PX;
    if (top < box.scrollTop) box.scrollTop = top;
    if (top + ROW_PX > box.scrollTop + box.clientHeight) box.scrollTop = top + ROW_PX - box.clientHeight;
    draw();
  }
  box.addEventListener("scroll", draw, { passive: true });
  box.addEventListener("keydown", (event) => {
    if (!rows.length) return;
    const { node, row } = rows[cursor], page = Math.floor(box.clientHeight / ROW_PX) - 1;
    const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -rows.length, End: rows.length };
    if (moves[event.key]) go(cursor + moves[event.key]);
    else if (event.key === "Enter" || event.key === " ") enter(cursor);
    else if (event.key === "ArrowRight" && row < 0) { if (!opened.has(node)) toggle(node); else go(cursor + 1); }
    else if (event.key === "ArrowLeft") {
      if (row < 0 && opened.has(node)) toggle(node);
      else if (node) go(rows.findIndex((one) => one.node === node.parent));
    } else return;
    event.preventDefault();
  });
  search.addEventListener("input", () => { box.scrollTop = 0; cursor = 0; filter(); });
  search.addEventListener("keydown", (event) => { if (event.key === "ArrowDown" || event.key === "Enter") { box.focus(); event.preventDefault(); } });
  const element = card("Tree", h("div", { class: "ck-tools" }, search, said), box);
  filter();
  new ResizeObserver(draw).observe(box);
  return element;
}

/** A test of paths: by a part of the text, or by a pattern with * and **. */
function matcher(text) {
  if (!/[*?]/.test(text)) {
    const part = text.toLowerCase();
    return (path) => path.toLowerCase().includes(part);
  }
  const stands = { "**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]" };
  const source = text.split(/((?:(?<=\/)|(?<=^))\*\*\/|\*\*|\*|\?)/).map((part) => stands[part] ?? part.replace(/[\\^$.*+?()[\]{}|/]/g, "\\$&")).join("");
  const pattern = new RegExp(`^${source}(?:/.*)?$`, "s");
  return (path) => pattern.test(path);
}

// One array

/** The panel of an array. `show(row)` fills it. */
function leafPanel(found, live) {
  const element = card("Array");
  element.id = "leaf";
  element.setAttribute("aria-live", "polite");
  let current = -1;
  function show(row, isAsked = true) {
    current = row;
    const details = found.details[row] ?? found.details[found.leaves.same_as[row]] ?? null;
    draw(row, details, null);
    if (isAsked && window.innerWidth < 900) element.scrollIntoView({ behavior: "smooth", block: "start" });
    if (live && isAsked && found.leaves.shape[row] && !details?.values) fetchDetails(row);
  }
  async function fetchDetails(row) {
    draw(row, found.details[row] ?? null, "Reading …");
    let problem = null;
    try {
      found.details[row] = await live.leaf(found.path, found.leaves.path[row]);
    } catch (error) {
      problem = `It could not be read: ${error.message}`;
    }
    if (current === row) draw(row, found.details[row] ?? null, problem);
  }
  function draw(row, details, message) {
    const { leaves } = found, path = leaves.path[row], shape = leaves.shape[row];
    replaceAll(element, h("h2", {}, shape ? "Array" : "Value"),
      h("p", { class: "mono ck-path" }, breakable(path)),
      h("div", { class: "ck-buttons" }, copyButton(path, "Copy path"), copyButton(pythonLine(found, path), "Copy Python")),
      facts({
        dtype: decode(leaves.dtype, row),
        shape: shape ? formatShape(shape) : null,
        elements: shape ? shape.reduce((product, n) => product * n, 1).toLocaleString("en-US") : null,
        bytes: leaves.bytes[row] ? `${formatBytes(leaves.bytes[row])}, ${formatShare(leaves.bytes[row], found.totals.bytes)} of all` : null,
        group: decode(leaves.group, row),
        sharding: decode(leaves.sharding, row),
        "same array as": leaves.same_as[row] !== undefined ? leaves.path[leaves.same_as[row]] : null,
        value: shape ? null : leaves.values[row],
      }),
      shape ? [
        meshPicture(found, row),
        message ? h("p", { class: "muted" }, message) : null,
        details?.values ? valuesPart(details.values) : message ? null : live ? h("p", {}, h("button", { type: "button", onclick: () => fetchDetails(row) }, "Read the values")) : noValues(found, row),
        details ? boxesPart(found, details) : null,
      ] : null);
  }
  return { element, show };
}

/** The Python expression that opens a leaf. */
function pythonLine(found, path) {
  return `ostraka.open(${pythonText(found.path)})[${pythonText(path)}]`;
}

function pythonText(text) {
  const escaped = text.replace(/["\\]/g, "\\$&").replace(/[^\x20-\x7e\u00a1-\ud7ff\ue000-\ufefe]/gu, (c) => {
    const code = c.codePointAt(0);
    return code > 0xffff ? `\\U${code.toString(16).padStart(8, "0")}` : code > 0xff ? `\\u${code.toString(16).padStart(4, "0")}` : `\\x${code.toString(16).padStart(2, "0")}`;
  });
  return `"${escaped}"`;
}

function shellText(text) {
  return /^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", `'"'"'`)}'`;
}

function noValues(found, row) {
  const path = found.leaves.path[row];
  return h("div", { class: "notice" }, found.values.read ? "This page has no room for the values of this array. This command reads them:" : "The values were not read. This command reads them:",
    command(found.values.command ?? `ostraka show ${shellText(found.path)} ${shellText(path)} --stats`));
}

function expandRuns(runs) {
  return runs.flatMap(([start, step, count]) => Array.from({ length: count }, (_, n) => start + n * step));
}

const MOST_CELLS = 32;

/** How an array lies over the devices: a grid of shards along the two dimensions that are sharded. */
function meshPicture(found, row) {
  const placement = found.placements[found.leaves.placement[row]];
  const mesh = placement ? found.meshes[placement.mesh] : null;
  if (!mesh) return null;
  const devices = expandRuns(mesh.devices), names = Object.keys(mesh.axes), sizes = Object.values(mesh.axes);
  const processOf = expandRuns(found.process_of), shape = found.leaves.shape[row];
  const parts = shape.map((_, dimension) => (placement.spec[dimension] ?? []).reduce((product, axis) => product * mesh.axes[axis], 1));
  const cut = parts.map((n, dimension) => [n, dimension]).filter(([n]) => n > 1).map(([, dimension]) => dimension);
  const [down, across] = cut.length > 1 ? cut : [null, cut[0] ?? null];
  const rows = down === null ? 1 : parts[down], columns = across === null ? 1 : parts[across];
  const held = Array.from({ length: rows * columns }, () => []);
  devices.forEach((device, n) => {
    const at = {};
    for (let axis = sizes.length - 1, rest = n; axis >= 0; axis -= 1) { at[names[axis]] = rest % sizes[axis]; rest = Math.floor(rest / sizes[axis]); }
    const index = (dimension) => (placement.spec[dimension] ?? []).reduce((sum, axis) => sum * mesh.axes[axis] + at[axis], 0);
    const isFirst = cut.slice(2).every((dimension) => index(dimension) === 0);
    if (isFirst) held[(down === null ? 0 : index(down)) * columns + (across === null ? 0 : index(across))].push(device);
  });
  const stepRows = Math.ceil(rows / MOST_CELLS), stepColumns = Math.ceil(columns / MOST_CELLS);
  const shownRows = Math.ceil(rows / stepRows), shownColumns = Math.ceil(columns / stepColumns);
  const width = 340, left = down === null ? 4 : 26, top = 20, cellWidth = (width - left - 4) / shownColumns, cellHeight = Math.max(Math.min(cellWidth, 220 / shownRows, rows === 1 ? 42 : 60), 5);
  const height = top + cellHeight * shownRows + 4;
  const drawing = s("svg", { class: "chart ck-mesh", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "shards over devices" });
  const processes = new Map();
  for (let r = 0; r < shownRows; r += 1) {
    for (let c = 0; c < shownColumns; c += 1) {
      const own = held[r * stepRows * columns + c * stepColumns], process = processOf[own[0]] ?? 0;
      if (!processes.has(process)) processes.set(process, processes.size);
      const x = left + c * cellWidth, y = top + r * cellHeight;
      const cell = s("g", { class: "ck-shard", tabindex: shownRows * shownColumns <= 64 ? 0 : null },
        s("rect", { x: x + 0.75, y: y + 0.75, width: cellWidth - 1.5, height: cellHeight - 1.5, rx: 2, fill: categoryColour(processes.get(process)) }),
        cellWidth > 16 && cellHeight > 11 ? s("text", { x: x + cellWidth / 2, y: y + cellHeight / 2 + 3.5, "text-anchor": "middle", class: "ck-device" }, showDevices(own, cellWidth)) : null);
      drawing.append(explain(cell, () => [
        h("b", {}, `[${shape.map((extent, dimension) => { const at = dimension === down ? r * stepRows : dimension === across ? c * stepColumns : 0, n = parts[dimension]; return n > 1 ? `${extent / n * at}:${extent / n * (at + 1)}` : ":"; }).join(", ")}]`),
        h("div", {}, `${own.length === 1 ? "device" : "devices"} ${showRange(own)}`),
        h("div", { class: "muted" }, `process ${showRange([...new Set(own.map((device) => processOf[device] ?? 0))])}`)]));
    }
  }
  const name = (dimension) => `dimension ${dimension}: ${parts[dimension]} × ${shape[dimension] / parts[dimension]} along ${placement.spec[dimension].join(", ")}`;
  if (across !== null) drawing.append(s("text", { x: left, y: 12, class: "label" }, name(across)));
  else drawing.append(s("text", { x: left, y: 12, class: "label" }, devices.length > 1 ? "whole on every device" : "whole on one device"));
  if (down !== null) drawing.append(s("text", { x: 10, y: top + cellHeight * shownRows / 2, "text-anchor": "middle", class: "label", transform: `rotate(-90 10 ${top + cellHeight * shownRows / 2})` }, `dim. ${down}`));
  const copies = devices.length / (parts.reduce((product, n) => product * n, 1) || 1);
  return h("div", {}, h("h3", {}, `Shards${names.length ? ` on the mesh ${showAxes(mesh.axes)}` : ""}`), drawing,
    down !== null ? h("p", { class: "muted ck-note" }, `Down: ${name(down)}.`) : null,
    stepRows * stepColumns > 1 ? h("p", { class: "muted ck-note" }, `${rows} × ${columns} shards; each cell stands for ${stepRows} × ${stepColumns}.`) : null,
    cut.length > 2 ? h("p", { class: "muted ck-note" }, `Also sharded along dimension ${cut.slice(2).join(", ")}, whose first part is drawn.`) : null,
    copies > 1 ? h("p", { class: "muted ck-note" }, `Each shard is on ${copies.toLocaleString("en-US")} devices.`) : null,
    processes.size <= 8 ? legend([...processes].map(([process, n]) => [`process ${process}${found.saved.hosts[process] ? ` on ${found.saved.hosts[process]}` : ""}`, categoryColour(n)])) : h("p", { class: "muted ck-note" }, "Colours are processes. The numbers are devices."));
}

function showDevices(devices, width) {
  const text = devices.join(" ");
  return text.length * 6.2 < width - 4 ? text : devices.length > 1 && width > 30 ? `${devices[0]} +${devices.length - 1}` : `${devices[0]}`;
}

/** Numbers in few characters: `0 to 7`, or the first ones. */
function showRange(numbers) {
  const isRun = numbers.every((n, at) => at === 0 || n === numbers[at - 1] + 1);
  if (numbers.length > 2 && isRun) return `${numbers[0]} to ${numbers.at(-1)}`;
  return numbers.length > 12 ? `${numbers.slice(0, 12).join(", ")}, … (${numbers.length})` : numbers.join(", ");
}

function valuesPart(values) {
  if (values.problem) return h("div", {}, h("h3", {}, "Values"), h("div", { class: "notice bad" }, values.problem));
  const share = (n) => (n ? `${n.toLocaleString("en-US")} (${formatShare(n, values.count)})` : "0");
  return h("div", { id: "values" }, h("h3", {}, "Values"),
    values.histogram ? histogram(values.histogram) : null,
    h("div", { class: "ck-values" }, facts({
      least: formatNumber(values.least), most: formatNumber(values.most), mean: formatNumber(values.mean), std: formatNumber(values.std), norm: formatNumber(values.norm),
    }), facts({
      NaN: h("span", { class: values.nan ? "bad" : null }, share(values.nan)), infinite: h("span", { class: values.infinite ? "bad" : null }, share(values.infinite)), zero: share(values.zero), elements: values.count.toLocaleString("en-US"),
    })),
    values.slice && values.slice.values !== null ? [h("h3", {}, "First elements ", h("code", {}, values.slice.index)), sliceTable(values.slice.values)] : null);
}

function sliceTable(values) {
  const rows = !Array.isArray(values) ? [[values]] : Array.isArray(values[0]) ? values : [values];
  return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "first elements" }, h("table", { class: "ck-slice" }, h("tbody", {}, rows.map((row) => h("tr", {}, row.map((value) => h("td", { class: "right mono" }, typeof value === "number" ? formatNumber(value, 3) : String(value))))))));
}

/** Counts over the values, with a linear or a logarithmic scale. */
function histogram({ low, high, counts }) {
  const place = h("div", {});
  function draw(scale) {
    const width = 340, height = 150, left = 46, bottom = 30, top = 8, most = Math.max(...counts, 1);
    const x = linearScale(low, high, left, width - 8);
    const y = scale === "log" ? (n) => (n ? linearScale(0, Math.log10(most) || 1, height - bottom - 3, top)(Math.log10(n)) : height - bottom) : linearScale(0, most, height - bottom, top);
    const drawing = s("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "histogram of the values" });
    const ticks = scale === "log" ? niceTicks(0, Math.log10(most) || 1, 4).filter(Number.isInteger).map((n) => 10 ** n) : niceTicks(0, most, 3);
    for (const tick of ticks) drawing.append(s("line", { x1: left, x2: width - 8, y1: y(tick), y2: y(tick), class: "grid" }), s("text", { x: left - 5, y: y(tick) + 4, "text-anchor": "end", class: "tick" }, formatCountShort(tick)));
    const each = (high - low) / counts.length;
    counts.forEach((count, n) => {
      const from = low + n * each, bar = s("g", { class: "ck-bin" },
        s("rect", { x: x(from), y: top, width: Math.max(x(from + each) - x(from), 0.5), height: height - bottom - top, fill: "transparent" }),
        s("rect", { x: x(from) + 0.4, y: y(count), width: Math.max(x(from + each) - x(from) - 0.8, 0.5), height: Math.max(height - bottom - y(count), count ? 1 : 0), fill: "var(--c0)" }));
      drawing.append(explain(bar, () => [h("b", {}, formatCount(count, "element")), h("div", {}, `from ${formatNumber(from, 4)} to ${formatNumber(from + each, 4)}`)]));
    });
    for (const tick of niceTicks(low, high, 4)) drawing.append(s("text", { x: x(tick), y: height - bottom + 13, "text-anchor": "middle", class: "tick" }, formatNumber(tick, 3)));
    drawing.append(s("line", { x1: left, x2: width - 8, y1: height - bottom, y2: height - bottom, class: "axis" }),
      s("text", { x: (left + width) / 2, y: height - 3, "text-anchor": "middle", class: "label" }, "value"),
      s("text", { x: 10, y: (top + height - bottom) / 2, "text-anchor": "middle", class: "label", transform: `rotate(-90 10 ${(top + height - bottom) / 2})` }, "elements"));
    replaceAll(place, drawing);
  }
  draw("linear");
  return h("figure", { id: "histogram" }, choice("count", [["linear", "linear"], ["log", "log"]], "linear", draw), place);
}

function boxesPart(found, details) {
  const { files } = found;
  const nameOf = ({ file, name }) => (file >= 0 ? files.name[file].split("/").at(-1) : name ?? "");
  const hostOf = ({ file }) => (file >= 0 ? decode(files.host, file) || (files.process[file] === null ? "" : `process ${files.process[file]}`) : "");
  const columns = [
    { name: "slice", value: ({ box }) => box.map(([start]) => start).join(","), show: ({ box }) => h("span", { class: "mono" }, `[${box.map(([start, stop]) => `${start}:${stop}`).join(", ")}]`) },
    { name: "file", value: nameOf, show: (one) => h("span", { class: "mono" }, nameOf(one)) },
    { name: "host", value: hostOf, isNeeded: new Set(details.boxes.map(hostOf)).size > 1 },
    { name: "offset", isNeeded: details.boxes.some(({ offset }) => offset !== null), value: ({ offset }) => offset, show: ({ offset }) => (offset === null ? "–" : offset.toLocaleString("en-US")), right: true },
    { name: "bytes", value: ({ bytes }) => bytes, show: ({ bytes, stored_bytes: stored }) => formatBytes(stored) + (stored < bytes ? ` of ${formatBytes(bytes)}` : ""), right: true },
  ].filter(({ isNeeded }) => isNeeded !== false);
  const rest = details.boxes_in_all - details.boxes.length;
  return h("div", { id: "boxes" }, h("h3", {}, `Stored in ${formatCount(details.boxes_in_all, "slice")}`),
    details.problem ? h("div", { class: "notice bad" }, details.problem) : null,
    details.boxes.length ? dataTable(columns, details.boxes, { most: 64 }) : null,
    rest > 0 ? h("p", { class: "muted" }, `… and ${rest.toLocaleString("en-US")} more`) : null);
}

// The save

function saveCard(found) {
  const { saved } = found, phases = Object.entries(saved.phases);
  if (!phases.length) return null;
  const total = phases.reduce((sum, [, seconds]) => sum + seconds, 0);
  const bytes = found.totals.stored_bytes;
  const element = card("The save",
    figures({
      "from the call to the commit": formatSeconds(total),
      "the loop waited": saved.blocked_s === null ? null : formatSeconds(saved.blocked_s),
      "in the background": saved.background_s ? formatSeconds(saved.background_s) : null,
      throughput: total ? `${formatBytes(Math.round(bytes / total))}/s` : null,
    }),
    h("h3", {}, "Phases on process 0"),
    phaseBar(phases, total, saved.blocked_s),
    processChart(found));
  element.id = "save";
  return element;
}

function phaseBar(phases, total, blocked) {
  const width = 1000, height = 46, drawing = s("svg", { class: "chart ck-phases", viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": "seconds by phase" });
  let from = 0;
  phases.forEach(([name, seconds], n) => {
    const wide = total ? seconds / total * width : 0;
    const bar = s("rect", { x: from, y: 10, width: Math.max(wide - 1, 0.6), height: 26, rx: 2, fill: categoryColour(n), tabindex: 0 });
    drawing.append(explain(bar, () => [h("b", {}, name), h("div", {}, `${formatSeconds(seconds)}, ${formatShare(seconds, total)}`)]));
    from += wide;
  });
  if (blocked !== null && total && blocked < total) drawing.append(s("line", { x1: blocked / total * width, x2: blocked / total * width, y1: 0, y2: height, stroke: "var(--text)", "stroke-width": 2, "vector-effect": "non-scaling-stroke" }));
  return h("figure", {}, drawing, legend(phases.map(([name, seconds], n) => [`${name} ${formatSeconds(seconds)}`, categoryColour(n)])),
    blocked !== null && blocked < total ? h("p", { class: "muted ck-note" }, "The line marks where the loop went on, and the save continued in the background.") : null);
}

function processChart(found) {
  const { process_s: seconds, process_bytes: bytes, hosts } = found.saved;
  if (seconds.length < 2) return null;
  const options = { xLabel: "process", yLabel: "seconds", showX: (n) => `${n}`, showY: formatSeconds };
  const chart = seconds.length <= 64
    ? barChart(seconds.map((value, process) => ({ x: process, parts: { "wrote for": value } })), { "wrote for": "var(--c0)" }, options)
    : lineChart([{ name: "wrote for", colour: "var(--c0)", points: seconds.map((value, process) => [process, value]) }], { ...options, fromZero: true });
  const rows = seconds.map((value, process) => ({ process, host: hosts[process] ?? "", bytes: bytes[process], seconds: value, rate: value ? bytes[process] / value : null }));
  return [h("h3", {}, "Processes"), chart, dataTable([
    { name: "process", value: ({ process }) => process, right: true },
    { name: "host", value: ({ host }) => host },
    { name: "bytes", value: (row) => row.bytes, show: (row) => formatBytes(row.bytes), right: true },
    { name: "seconds", value: (row) => row.seconds, show: (row) => formatSeconds(row.seconds), right: true },
    { name: "throughput", value: ({ rate }) => rate, show: ({ rate }) => (rate === null ? "–" : `${formatBytes(Math.round(rate))}/s`), right: true },
  ], rows, { sort: "seconds", descending: true, most: 20 })];
}

// The files

const MOST_SQUARES = 2048;
const KIND_NAMES = { shard: "square: arrays", parity: "round: parity", index: "pale: index and metadata" };
const WORSE = ["missing", "damaged", "unread", "present", "verified"];

function filesCard(found) {
  const { files, integrity } = found;
  if (!files.name.length) return null;
  const damaged = Object.entries(files.problem).map(([row, problem]) => ({ row: Number(row), problem }));
  const counted = {}, kinds = new Set(files.kind.codes.map((code) => files.kind.texts[code]));
  files.name.forEach((_, row) => { const state = decode(files.state, row); counted[state] = (counted[state] ?? 0) + 1; });
  const element = card("Files and integrity",
    integritySentence(found, damaged.length),
    integrity.problems.length ? h("ul", { class: "ck-problems" }, integrity.problems.slice(0, 20).map((text) => h("li", { class: "ck-any" }, text)), integrity.problems.length > 20 ? h("li", { class: "muted" }, `… and ${integrity.problems.length - 20} more`) : null) : null,
    integrity.repair ? command(integrity.repair) : null,
    !integrity.repair && integrity.verify ? command(integrity.verify) : null,
    h("h3", {}, "Files"), fileSquares(found),
    h("div", { class: "legend" },
      Object.entries(counted).map(([state, count]) => h("span", {}, h("i", { style: { background: STATES[state] } }), `${state} ${count.toLocaleString("en-US")}`)),
      kinds.size > 1 ? Object.entries(KIND_NAMES).filter(([kind]) => kinds.has(kind)).map(([kind, name]) => h("span", {}, h("i", { class: `ck-kind ${kind}` }), name)) : null),
    integrity.parity ? parityPart(found) : null,
    fileTable(found));
  element.id = "files";
  return element;
}

function integritySentence(found, damaged) {
  const { integrity } = found, count = found.files.name.length, others = count - found.totals.files;
  const files = `${formatCount(count, "file")}${others > 0 && found.format === "ostraka" ? ` (${others.toLocaleString("en-US")} of them index and metadata)` : ""}`;
  if (integrity.state === "damaged") {
    const covers = integrity.restorable ? "Parity makes up for all of it: a restore reads the checkpoint in full, and this command repairs it:"
      : integrity.repair?.includes("--from") ? `${integrity.parity ? "Parity can't make up for all of it." : "It has no parity."} Give the command another copy, such as a mirror:` : "This command repairs it:";
    return h("div", { class: "notice bad" }, `${formatCount(damaged, "file")} of ${found.files.name.length.toLocaleString("en-US")} lost or damaged. ${covers}`);
  }
  if (integrity.read) return h("div", { class: "notice good" }, `All bytes of ${files} were read, and match their checksums.`);
  if (!integrity.has_checksums) return h("p", { class: "muted" }, `${files}, all present. This format has no checksums, so nobody can tell if bytes have changed.`);
  return h("p", { class: "muted" }, `${files}, all listed with their sizes. Nobody read them for this page. This command compares every byte with its checksum:`);
}

/** A square for each file, in rows by host. Of very many files, one for each host or several. */
function fileSquares(found) {
  const { files } = found, byHost = new Map();
  files.name.forEach((_, row) => {
    const host = decode(files.host, row) || (files.process[row] === null || found.format === "safetensors" ? "" : `process ${files.process[row]}`);
    if (!byHost.has(host)) byHost.set(host, []);
    byHost.get(host).push(row);
  });
  const worst = (rows) => WORSE[Math.min(...rows.map((row) => WORSE.indexOf(decode(files.state, row))))];
  const square = (rows, title) => {
    const state = worst(rows), kind = rows.length === 1 ? decode(files.kind, rows[0]) : "shard", isBadFile = state === "missing" || state === "damaged";
    const element = h("i", { class: `ck-file ${state} ${kind}`, tabindex: isBadFile ? 0 : null, style: { background: state === "missing" ? "transparent" : STATES[state], borderColor: STATES[state] } });
    return explain(element, () => {
      if (rows.length === 1) return [h("b", { class: "ck-any" }, files.name[rows[0]]), h("div", {}, `${kind}, ${formatBytes(files.bytes[rows[0]])}, ${state}`), files.problem[rows[0]] ? h("div", {}, files.problem[rows[0]]) : null, h("div", { class: "muted" }, title)];
      const bad = rows.filter((row) => files.problem[row]);
      return [h("b", {}, title), h("div", {}, `${formatCount(rows.length, "file")}, ${formatBytes(rows.reduce((sum, row) => sum + files.bytes[row], 0))}, ${state}`), bad.slice(0, 3).map((row) => h("div", {}, `${files.name[row].split("/").at(-1)}: ${files.problem[row]}`))];
    });
  };
  if (files.name.length <= MOST_SQUARES && byHost.size <= 64) {
    return h("div", { class: "ck-files" }, [...byHost].map(([host, rows]) => h("div", { class: "ck-host" }, host ? h("span", { class: "muted ck-any" }, host) : null, h("div", {}, rows.map((row) => square([row], host))))));
  }
  const hosts = [...byHost], each = Math.ceil(hosts.length / MOST_SQUARES);
  const groups = Array.from({ length: Math.ceil(hosts.length / each) }, (_, n) => hosts.slice(n * each, (n + 1) * each));
  return h("div", { class: "ck-files" }, h("p", { class: "muted ck-note" }, each > 1 ? `A square stands for the files of ${each} hosts.` : "A square stands for all files of a host."),
    h("div", { class: "ck-host" }, h("div", {}, groups.map((group) => square(group.flatMap(([, rows]) => rows), group.length > 1 ? `${group[0][0]} to ${group.at(-1)[0]}` : group[0][0])))));
}

function parityPart(found) {
  const { files, integrity: { parity } } = found;
  const losses = (group) => group.filter((row) => files.problem[row]).length;
  const rows = parity.groups.map((group, number) => ({ number, group, lost: losses(group) }));
  return h("details", { class: "ck-parity", open: rows.some(({ lost }) => lost) || null },
    h("summary", {}, `Parity: ${formatCount(parity.groups.length, "group")}, each survives the loss of ${parity.count === 1 ? "any one file" : `any ${parity.count} files`}`),
    dataTable([
      { name: "group", value: ({ number }) => number, right: true },
      { name: "files", value: ({ group }) => group.length - parity.count, right: true },
      { name: "parity", value: () => parity.count, right: true },
      { name: "affected", value: ({ lost }) => lost, show: ({ lost }) => (lost ? badge(`${lost} lost or damaged`, lost > parity.count ? "bad" : "warn") : badge("none", "good")) },
      { name: "bytes", value: ({ group }) => group.reduce((sum, row) => sum + files.bytes[row], 0), show: ({ group }) => formatBytes(group.reduce((sum, row) => sum + files.bytes[row], 0)), right: true },
      { name: "members", value: ({ group }) => files.name[group[0]], show: ({ group }) => h("span", { class: "mono wrap" }, group.map((row) => files.name[row].split("/").at(-1).replace(".safetensors", "")).join(" ")) },
    ], rows, { sort: "affected", descending: true, most: 50 }));
}

function fileTable(found) {
  const { files } = found, rows = files.name.map((_, row) => row);
  const table = () => dataTable([
    { name: "file", value: (row) => files.name[row], show: (row) => h("span", { class: "mono ck-any" }, files.name[row]) },
    { name: "kind", value: (row) => decode(files.kind, row) },
    { name: "process", value: (row) => files.process[row], right: true },
    { name: "host", value: (row) => decode(files.host, row) },
    { name: "bytes", value: (row) => files.bytes[row], show: (row) => formatBytes(files.bytes[row]), right: true },
    { name: "state", value: (row) => WORSE.indexOf(decode(files.state, row)), show: (row) => { const state = decode(files.state, row); return [badge(state, { verified: "good", missing: "bad", damaged: "bad" }[state] ?? ""), files.problem[row] ? h("span", { class: "wrap" }, ` ${files.problem[row]}`) : null]; } },
  ], rows, { most: 200, sort: Object.keys(files.problem).length ? "state" : null });
  const box = h("details", { class: "ck-table", ontoggle: () => { if (box.open && box.childElementCount === 1) box.append(table()); } }, h("summary", {}, `All ${formatCount(rows.length, "file")}`));
  return box;
}
