// Elements, numbers, themes and small widgets that all pages share.
// Text reaches the page only as text nodes and attributes, never as markup.

const SVG = "http://www.w3.org/2000/svg";

/** Make an HTML element. `attributes` may have `class`, `on…` listeners and `style` as an object. */
export function h(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** Make an SVG element. */
export function s(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(element.style, value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  append(element, children);
  return element;
}

/** Append elements and texts. Nested arrays are flattened, and nothing is left out. */
export function append(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : visible(String(child)));
  }
}

/** Replace the children of an element. */
export function replaceAll(element, ...children) {
  element.replaceChildren();
  append(element, children);
  return element;
}

/** A text whose control characters and invisible ones are shown by their codes. */
export function visible(text) {
  return text.replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g,
    (c) => `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`);
}

/** The contents of the page. Long ones are compressed. */
export async function readPage() {
  const element = document.getElementById("data"), text = element.textContent;
  if (element.type === "application/json") return JSON.parse(text);
  const packed = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  element.remove();
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).json();
}

// Numbers, in the same words as the command

export function formatBytes(count) {
  if (count === null || count === undefined) return "unknown";
  if (count < 1024) return `${count} B`;
  const power = Math.min(Math.floor(Math.log2(count) / 10), 6);
  return `${formatFixed(count / 1024 ** power, 1)} ${" KMGTPE"[power]}iB`;
}

/** As Python's `:.0f` and `:.1f`: ties go to the even digit, so that page and command agree. */
function formatFixed(value, digits) {
  const step = digits ? 0.5 : 1, below = Math.floor(value * 10 ** digits);
  const isTie = value % step === step / 2;
  return (isTie ? (below + below % 2) / 10 ** digits : value).toFixed(digits);
}

export function formatSeconds(seconds) {
  if (seconds === null || seconds === undefined) return "unknown";
  if (seconds < 60) return seconds < 1 ? `${formatFixed(seconds * 1000, 0)} ms` : `${formatFixed(seconds, 1)} s`;
  const minutes = Math.floor(seconds / 60), hours = Math.floor(minutes / 60);
  const parts = [[Math.floor(hours / 24), "d"], [hours % 24, "h"], [minutes % 60, "min"]];
  const first = parts.findIndex(([number]) => number);
  return parts.slice(first, first + 2).filter(([n]) => n).map(([n, unit]) => `${n} ${unit}`).join(" ");
}

/** A number of a document, where NaN and infinity are strings, as a number. */
export function asNumber(value) {
  if (value === null || value === undefined) return NaN;
  return typeof value === "number" ? value : { nan: NaN, inf: Infinity, "-inf": -Infinity }[value] ?? NaN;
}

export function formatNumber(value, digits = 6) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "string") return value;
  if (Number.isInteger(value) && Math.abs(value) < 1e15) return value.toLocaleString("en-US");
  // As Python's %g: small numbers have an exponent, which is shorter than their zeros.
  const text = Math.abs(value) < 1e-4 ? value.toExponential(digits - 1) : value.toPrecision(digits);
  return text.includes("e") ? text.replace(/\.?0+e/, "e") : text.includes(".") ? text.replace(/\.?0+$/, "") : text;
}

export function formatCount(number, noun) {
  const plural = noun.endsWith("leaf") ? noun.replace(/leaf$/, "leaves") : `${noun}s`;
  return `${number.toLocaleString("en-US")} ${number === 1 ? noun : plural}`;
}

export function formatShare(part, whole) {
  if (!whole) return "–";
  const share = 100 * part / whole;
  return part === 0 || part === whole ? `${share} %` : `${share < 0.01 ? "<0.01" : Number(share.toPrecision(3))} %`;
}

export function formatTime(at) {
  return at === null || at === undefined ? "at an unknown time" : `${new Date(at * 1000).toISOString().slice(0, 19).replace("T", " ")} UTC`;
}

export function formatAge(at, now = Date.now() / 1000) {
  if (at === null || at === undefined) return "unknown";
  const age = now - at;
  if (age < -60) return "in the future";
  return age >= 1 ? `${formatSeconds(age)} ago` : "just now";
}

export function formatShape(shape) {
  return shape && shape.length ? shape.join(" × ") : "()";
}

/** The text of one row of a `Coded` column, or an empty text. */
export function decode(column, row) {
  return column.texts[column.codes[row]] ?? "";
}

// Widgets

export function card(title, ...children) {
  return h("section", { class: "card", "aria-label": title }, h("h2", {}, title), ...children);
}

/** A path that may break behind each of its names. */
export function breakable(path) {
  return path.split(/(?<=[^\s/.][/.])/).map((name, n) => [n ? h("wbr", {}) : null, name]);
}

/** Names and values in two columns. Values may be elements. Those without a value are left out. */
export function facts(entries) {
  const rows = Object.entries(entries).filter(([, value]) => value !== null && value !== undefined && value !== "");
  return h("dl", { class: "facts" }, rows.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
}

/** Large numbers in a row, each with its unit or name below. */
export function figures(entries) {
  const items = Object.entries(entries).filter(([, value]) => value !== null && value !== undefined);
  return h("div", { class: "figures" }, items.map(([name, value]) =>
    h("div", { class: "figure" }, h("b", {}, value), h("span", {}, name))));
}

export function badge(text, kind = "") {
  return h("span", { class: `badge ${kind}` }, text);
}

/** A colour and a name for each entry: `[[name, css colour], …]`. */
export function legend(entries) {
  return h("div", { class: "legend" }, entries.map(([name, colour]) =>
    h("span", {}, h("i", { style: { background: colour } }), name)));
}

export function copyButton(text, label = "Copy") {
  const button = h("button", { type: "button", class: "small", title: text, onclick: copy }, label);
  async function copy() {
    let isCopied = true;
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      const area = h("textarea", { class: "offscreen" });
      area.value = text;
      document.body.append(area);
      area.select();
      isCopied = document.execCommand("copy");
      area.remove();
    }
    button.textContent = isCopied ? "Copied" : "Press Ctrl-C";
    setTimeout(() => { button.textContent = label; }, 1500);
  }
  return button;
}

/** A command or a line of code that can be copied. */
export function command(text, label = "Copy") {
  return h("div", { class: "command" }, h("code", {}, text), copyButton(text, label));
}

/** Buttons of which one is chosen. `onchange` receives its value. */
export function choice(label, options, chosen, onchange) {
  const buttons = options.map(([value, name]) =>
    h("button", { type: "button", "aria-pressed": String(value === chosen), onclick: () => pick(value) }, name));
  function pick(value) {
    options.forEach(([one], at) => buttons[at].setAttribute("aria-pressed", String(one === value)));
    onchange(value);
  }
  return h("div", { class: "choice", role: "group", "aria-label": label }, h("span", {}, label), buttons);
}

/** A table whose columns sort. `columns`: `[{name, value(row), show?(row), right?}]`. `state` keeps the order. */
export function dataTable(columns, rows, { most = 200, sort = null, descending = false, onpick = null, empty = "none", state = {} } = {}) {
  if (!rows.length) return h("p", { class: "muted" }, empty);
  let order = state.order ?? sort, isDown = state.isDown ?? descending;
  const head = columns.map((column) =>
    h("th", { class: column.right ? "right" : null, scope: "col" },
      h("button", { type: "button", onclick: () => { isDown = order === column.name ? !isDown : Boolean(column.right); order = column.name; Object.assign(state, { order, isDown }); draw(); } }, column.name)));
  const body = h("tbody", {});
  const more = h("p", { class: "muted" });
  function draw() {
    const by = columns.find((column) => column.name === order);
    const sorted = by ? rows.map((row) => [by.value(row), row]).sort(([a], [b]) => compareValues(a, b) * (isDown ? -1 : 1)).map(([, row]) => row) : rows;
    columns.forEach((column, at) => head[at].setAttribute("aria-sort", column !== by ? "none" : isDown ? "descending" : "ascending"));
    replaceAll(body, sorted.slice(0, most).map((row) => {
      const cells = columns.map((column) => h("td", { class: column.right ? "right" : null }, column.show ? column.show(row) : column.value(row)));
      if (!onpick) return h("tr", {}, cells);
      const key = (event) => { if (event.key === "Enter") onpick(row); };
      return h("tr", { tabindex: 0, class: "pick", onclick: () => onpick(row), onkeydown: key }, cells);
    }));
    replaceAll(more, rows.length > most ? `… and ${(rows.length - most).toLocaleString("en-US")} more` : null);
  }
  draw();
  return h("div", {}, h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "table" }, h("table", {}, h("thead", {}, h("tr", {}, head)), body)), more);
}

function compareValues(a, b) {
  if (a === b) return 0;
  if (a === null || a === undefined) return -1;
  if (b === null || b === undefined) return 1;
  if (typeof a === "number" && typeof b === "number") return a - b;
  return String(a).localeCompare(String(b), "en", { numeric: true });
}

// The box that explains what is under the pointer or has the focus

let tip = null;

/** Show lines beside an element while it is pointed at or focused. `lines()` returns children. */
export function explain(element, lines) {
  const show = (event) => showTip(lines(), event.clientX ? event : middleOf(element));
  element.addEventListener("pointermove", show);
  element.addEventListener("focus", show);
  for (const name of ["pointerleave", "blur"]) element.addEventListener(name, hideTip);
  return element;
}

function middleOf(element) {
  const box = element.getBoundingClientRect();
  return { clientX: box.left + box.width / 2, clientY: box.top + box.height / 2 };
}

export function showTip(children, { clientX, clientY }) {
  if (!tip) document.body.append(tip = h("div", { id: "tip", role: "status" }));
  replaceAll(tip, children);
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const left = Math.min(clientX + 14, document.documentElement.clientWidth - width - 8);
  const top = clientY + 18 + height > window.innerHeight ? clientY - height - 12 : clientY + 18;
  tip.style.left = `${Math.max(left, 4)}px`;
  tip.style.top = `${Math.max(top, 4)}px`;
}

export function hideTip() {
  if (tip) tip.hidden = true;
}

// Light and dark

const THEMES = ["auto", "light", "dark"];

export function themeButton() {
  const button = h("button", { type: "button", class: "small", id: "theme", title: "Change the theme", onclick: next });
  function set(theme) {
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    button.textContent = `Theme: ${theme}`;
    button.dataset.theme = theme;
    window.dispatchEvent(new Event("themechange"));
  }
  function next() {
    const theme = THEMES[(THEMES.indexOf(button.dataset.theme) + 1) % THEMES.length];
    try { localStorage.setItem("ostraka-theme", theme); } catch { /* a page in a file may have no storage */ }
    set(theme);
  }
  let kept = null;
  try { kept = localStorage.getItem("ostraka-theme"); } catch { /* the same */ }
  set(THEMES.includes(kept) ? kept : "auto");
  return button;
}

/** The value of a colour of the theme, for canvases. */
export function themeColour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

/** The CSS colour of the n-th category. */
export function categoryColour(number) {
  return `var(--c${((number % 8) + 8) % 8})`;
}
