// The page: its head, a part for each document, and the connection to a board.

import { formatTime, h, readPage, replaceAll, themeButton } from "./base.js";
import { drawCheckpoint } from "./checkpoint.js";
import { drawComparison } from "./comparison.js";
import { drawPlan } from "./plan.js";
import { drawRun } from "./run.js";

const DRAW = { run: drawRun, checkpoint: drawCheckpoint, comparison: drawComparison, plan: drawPlan };
const KINDS = { run: "Run", checkpoint: "Checkpoint", comparison: "Comparison", plan: "Plan" };

const page = await readPage();
const root = document.getElementById("page");

function titleOf(found) {
  return found.kind === "comparison" ? `${found.a.path} → ${found.b.path}` : found.path ?? found.title;
}

/** Draw all documents. Several get tabs. */
function drawPage(documents) {
  const main = h("div", {});
  const tabs = documents.map((found, n) =>
    h("button", { type: "button", role: "tab", "aria-selected": String(n === 0), onclick: () => show(n) }, `${KINDS[found.kind]}: ${titleOf(found)}`));
  function show(chosen) {
    tabs.forEach((tab, n) => tab.setAttribute("aria-selected", String(n === chosen)));
    const found = documents[chosen];
    replaceAll(main, h("header", { class: "title" }, h("span", { class: "kind" }, KINDS[found.kind]), h("h1", {}, titleOf(found))), DRAW[found.kind](found, page.live));
  }
  const bar = h("nav", { class: "bar" },
    h("span", { class: "brand" }, "ostraka"),
    documents.length > 1 ? h("div", { role: "tablist", class: "tabs" }, tabs) : null,
    h("span", { class: "spring" }),
    h("span", { id: "live", class: "muted" }),
    themeButton());
  replaceAll(root, bar, main, h("footer", { class: "muted" }, `Made by ostraka ${page.version ?? ""} ${page.at ? formatTime(page.at) : ""}`));
  if (documents.length) show(0);
  document.documentElement.dataset.ready = "yes";
}

drawPage(page.documents);
