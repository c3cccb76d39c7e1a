// Puts the documents of the page on the screen: tabs, theme, and the connection to a board.

import { breakable, formatAge, formatBytes, formatTime, h, hideTip, readPage, replaceAll, themeButton } from "./base.js";
import { drawCheckpoint } from "./checkpoint.js";
import { drawComparison } from "./comparison.js";
import { drawPlan } from "./plan.js";
import { drawRun } from "./run.js";

const DRAW = { run: drawRun, checkpoint: drawCheckpoint, comparison: drawComparison, plan: drawPlan };
const KINDS = { run: "Run", checkpoint: "Checkpoint", comparison: "Comparison", plan: "Plan" };

/** A board says every 5 s that it is there. */
const SILENT_MS = 15000;

const page = await readPage();
const root = document.getElementById("page");

function titleOf(found) {
  return found.kind === "comparison" ? `${found.a.path} → ${found.b.path}` : found.path ?? found.title;
}

function headOf(found) {
  return h("header", { class: "title" }, h("span", { class: "kind" }, KINDS[found.kind]), h("h1", {}, breakable(titleOf(found))));
}

/** Draw the bar, `main` and the foot of the page. */
function drawFrame(main, tabs) {
  const bar = h("nav", { class: "bar" }, h("span", { class: "brand" }, "ostraka"), tabs, h("span", { class: "spring" }), h("span", { id: "live", class: "muted", role: "status" }), themeButton());
  replaceAll(root, bar, main, h("footer", { class: "muted" }, `Made by ostraka ${page.version}${page.at ? `, ${formatTime(page.at)}` : ""}`));
}

/** Draw all documents. Several get tabs. */
function drawPage(documents) {
  const main = h("div", {});
  const tabs = documents.map((found, n) =>
    h("button", { type: "button", role: "tab", "aria-selected": String(n === 0), onclick: () => show(n) }, `${KINDS[found.kind]}: ${titleOf(found)}`));
  function show(chosen) {
    tabs.forEach((tab, n) => tab.setAttribute("aria-selected", String(n === chosen)));
    replaceAll(main, headOf(documents[chosen]), DRAW[documents[chosen].kind](documents[chosen], null));
  }
  drawFrame(main, documents.length > 1 ? h("div", { role: "tablist", class: "tabs" }, tabs) : null);
  if (documents.length) show(0);
  document.documentElement.dataset.ready = "yes";
}

/** Draw again without moving what a person looks at, or taking the focus away. */
function redrawInPlace(main, draw) {
  const scrolls = () => [...main.querySelectorAll(".scroll")];
  const focusable = () => [...main.querySelectorAll("button, a, select, input, [tabindex]")];
  const before = scrolls().map((one) => [one.scrollTop, one.scrollLeft]);
  const focused = focusable().indexOf(document.activeElement), top = window.scrollY;
  hideTip();
  draw();
  scrolls().forEach((one, n) => { if (before[n]) [one.scrollTop, one.scrollLeft] = before[n]; });
  window.scrollTo(0, top);
  if (focused >= 0) focusable()[focused]?.focus({ preventScroll: true });
}

// A board. The hash of the address says what is shown: nothing for the run, `#step/PATH`, `#compare/A/B`.

function startBoard({ token, path }) {
  const main = h("div", {}, h("p", { class: "muted" }, "Looking at the directory …"));
  let run = null, shown = null, runTop = 0, source = null, heardAt = 0;
  drawFrame(main, null);
  const status = document.getElementById("live");

  function say(text, kind) {
    status.textContent = text;
    status.className = kind;
    status.dataset.state = kind;
  }

  async function ask(name, query = {}, signal = null) {
    const answer = await fetch(`/api/${name}?${new URLSearchParams(query)}`, { headers: { "X-Ostraka-Token": token }, signal });
    const found = await answer.json();
    if (!answer.ok) throw Object.assign(new Error(found.error), { status: answer.status });
    return found;
  }

  const live = {
    leaf: (documentPath, leafPath) => ask("leaf", { path: documentPath, leaf: leafPath }),
    compare: (a, b) => ask("compare", { a, b }),
    open: (step) => { location.hash = `#step/${encodeURIComponent(step)}`; },
    openComparison: (a, b) => { location.hash = `#compare/${encodeURIComponent(a)}/${encodeURIComponent(b)}`; },
  };

  /** Read every byte of a step, and show what that found. Whoever leaves meanwhile ends it. */
  async function verify(found, button) {
    const leaving = new AbortController(), leave = () => leaving.abort();
    button.disabled = true;
    button.textContent = `Reading ${formatBytes(found.totals.stored_bytes)} …`;
    window.addEventListener("hashchange", leave, { once: true });
    try {
      drawFound(await ask("verify", { path: found.path }, leaving.signal));
    } catch (error) {
      button.textContent = "Verify again";
      button.disabled = false;
      button.after(h("span", { class: "notice bad", role: "alert" }, error.message));
    }
    window.removeEventListener("hashchange", leave);
  }

  /** The way back to the run, and from a step to its comparison with another one. */
  function wayBack(found) {
    const others = run ? run.steps.filter((row) => row.path !== found.path) : [];
    const pick = h("select", { "aria-label": "Compare with", onchange: (event) => live.openComparison(event.target.value, found.path) },
      h("option", { value: "" }, "Compare with …"), others.toReversed().map((row) => h("option", { value: row.path }, `step ${row.step}`)));
    const isStep = found.kind === "checkpoint";
    const check = isStep && found.integrity.verify
      ? h("button", { type: "button", id: "verify", title: "Read every byte and compare it with its checksum", onclick: (event) => verify(found, event.target) }, `Verify ${formatBytes(found.totals.stored_bytes)}`)
      : null;
    return h("p", { class: "way" }, h("a", { href: "#" }, `← ${path}`), isStep && others.length ? pick : null, check);
  }

  function drawFound(found) {
    replaceAll(main, wayBack(found), headOf(found), DRAW[found.kind](found, live));
  }

  function sayIfDeleted() {
    const name = decodeURIComponent(location.hash.slice(1).split("/")[1]);
    const isThere = run.steps.some((row) => row.path === name || row.path.endsWith(`/${name}`));
    if (!isThere && !document.getElementById("deleted")) {
      main.prepend(h("div", { class: "notice", id: "deleted" }, "This step has been deleted. What you see was read before."));
    }
  }

  function drawRunHere() {
    replaceAll(main, headOf(run), drawRun(run, live));
    document.documentElement.dataset.ready = "yes";
  }

  async function route() {
    const [kind, ...words] = location.hash.slice(1).split("/").map(decodeURIComponent);
    const wanted = location.hash;
    hideTip();
    if (kind !== "step" && kind !== "compare") {
      shown = "run";
      if (run) { drawRunHere(); window.scrollTo(0, runTop); }
      return;
    }
    if (shown === "run") runTop = window.scrollY;
    shown = kind;
    replaceAll(main, h("p", { class: "muted" }, `Reading ${words.join(" and ")} …`));
    let found, problem = null;
    try {
      found = kind === "step" ? await ask("checkpoint", { path: words[0] }) : await live.compare(words[0], words[1]);
    } catch (error) {
      problem = error.message;
    }
    if (location.hash !== wanted) return;
    if (problem !== null) replaceAll(main, wayBack({}), h("div", { class: "notice bad" }, problem));
    else drawFound(found);
    window.scrollTo(0, 0);
    document.documentElement.dataset.ready = "yes";
  }

  function take(found) {
    const isFirst = run === null;
    run = found;
    say("live", "good");
    if (document.hidden) connect();
    if (shown === "run" && isFirst) drawRunHere();
    else if (shown === "run") redrawInPlace(main, drawRunHere);
    else if (shown === "step") sayIfDeleted();
  }

  // A browser has six connections to a board, for all its tabs: those that nobody sees use none.
  function connect() {
    source?.close();
    source = null;
    if (document.hidden && run !== null) return;
    const events = source = new EventSource(`/api/events?token=${encodeURIComponent(token)}`);
    const read = (event) => JSON.parse(event.data);
    heardAt = Date.now();
    ["run", "change", "problem", "beat"].forEach((kind) => events.addEventListener(kind, () => { heardAt = Date.now(); }));
    events.addEventListener("run", (event) => take(read(event)));
    events.addEventListener("change", (event) => {
      const news = read(event), steps = new Map(run.steps.map((row) => [row.step, row]));
      news.gone.forEach((step) => steps.delete(step));
      news.steps.forEach((row) => steps.set(row.step, row));
      take({ ...news.document, steps: [...steps.values()].sort((a, b) => a.step - b.step) });
    });
    events.addEventListener("problem", (event) => say(read(event).problem, "bad"));
    events.addEventListener("error", async () => {
      say("reconnecting …", "warn");
      if (events.readyState !== EventSource.CLOSED || events !== source) return;
      // The browser has given up. A board that was started anew has another token.
      try {
        await ask("run");
      } catch (error) {
        if (error.status === 403) { source = null; say("restarted: open the new address", "bad"); return; }
      }
      setTimeout(() => { if (events === source) connect(); }, 1000);
    });
  }

  // A connection that broke while the machine slept looks open for ever.
  setInterval(() => {
    if (source === null || Date.now() - heardAt < SILENT_MS) return;
    say("reconnecting …", "warn");
    connect();
  }, 1000);
  document.addEventListener("visibilitychange", connect);
  window.addEventListener("hashchange", route);
  setInterval(() => document.querySelectorAll("time[data-saved-at]").forEach((one) => { one.textContent = formatAge(Number(one.dataset.savedAt)); }), 5000);
  say("connecting …", "muted");
  route();
  connect();
}

if (page.live) startBoard(page.live);
else drawPage(page.documents);
