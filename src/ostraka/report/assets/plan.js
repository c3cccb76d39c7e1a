// The page of a plan: sizes, files, times and recovery, and sliders that recompute them.

import { badge, card, choice, dataTable, facts, figures, formatBytes, formatCount, formatNumber, formatSeconds, h, replaceAll } from "./base.js";
import { barChart, lineChart } from "./charts.js";

// The formulas of ostraka.planner.time, in bytes and seconds. null is unknown.

function slowestTransfer(...transfers) {
  const known = transfers.filter(([, rate]) => rate !== null).map(([size, rate]) => size / rate);
  return known.length ? Math.max(...known) : null;
}

/** Daly's time to work between two saves that cost `cost` each, as `best_interval_s`. */
function dalyInterval(cost, mtbf) {
  if (cost >= 2 * mtbf) return mtbf;
  const part = cost / (2 * mtbf);
  return Math.sqrt(2 * cost * mtbf) * (1 + Math.sqrt(part) / 3 + part / 9) - cost;
}

/** As `advise_interval`. */
function adviseInterval(blocked, background, restore, mtbf) {
  const daly = dalyInterval(blocked, mtbf);
  const interval = Math.max(daly, background, blocked < 2 * mtbf ? blocked : 0);
  const lost = (blocked ? blocked / (interval + blocked) : 0) + (interval / 2 + background + restore) / mtbf;
  return { interval_s: interval, blocked_s: blocked, young_s: Math.sqrt(2 * blocked * mtbf), daly_s: daly, lost_share: Math.min(lost, 1) };
}

function restoreSeconds(restore, rates) {
  return slowestTransfer([restore.read_bytes.most, rates.host_read], [Math.round(restore.read_bytes.mean * restore.hosts), rates.storage]);
}

/** All times of a plan at some bandwidths, as `describe_plan` has them. */
export function planTimes(plan, rates, mtbf) {
  const save = slowestTransfer([plan.host_bytes.most, rates.host_write], [plan.total_bytes, rates.storage]);
  const restore = restoreSeconds(plan.restore, rates);
  const blocked = rates.device === null ? null : plan.staging_bytes.held_by_save_async / rates.device;
  const alone = (size, rate) => slowestTransfer([size, rate], [size, rates.storage]);
  const { lost_shard: shard, lost_host: host, lost_disk: disk } = plan.recovery;
  const isAdvised = mtbf !== null && save !== null;
  return {
    save_s: save, restore_s: restore, save_async_blocked_s: blocked,
    onto_s: plan.onto.map((one) => restoreSeconds(one, rates)),
    lost_shard_s: shard === null ? null : alone(shard.size_bytes, rates.host_write),
    lost_host_s: alone(host.held_bytes, rates.host_read),
    lost_disk_s: alone(disk.written_bytes, rates.host_write),
    save_every: isAdvised ? adviseInterval(save, 0, restore ?? 0, mtbf) : null,
    save_async_every: isAdvised && blocked !== null ? adviseInterval(blocked, save, restore ?? 0, mtbf) : null,
  };
}

// The settings of the page

const PLAN_SLIDERS = [
  { key: "host_write", name: "A host writes", low: 1e8, high: 1e11, show: formatRate },
  { key: "host_read", name: "A host reads", low: 1e8, high: 1e11, show: formatRate },
  { key: "storage", name: "The storage, for all hosts", low: 1e9, high: 1e13, show: formatRate, open: "no limit" },
  { key: "device", name: "Devices to host memory", low: 1e9, high: 1e12, show: formatRate },
  { key: "mtbf_s", name: "Time between failures", low: 900, high: 60 * 86400, show: formatSeconds },
  { key: "keep", name: "Checkpoints to keep", low: 1, high: 64, show: (number) => String(number), whole: true },
];
const PARITY_NOUNS = { hosts: "host", processes: "process", files: "shard file" };
const PLAN_STEPS = 400;
const PLAN_ALIKE = 0.01;

function formatRate(rate) {
  const power = Math.min(Math.floor(Math.log10(rate) / 3 + 1e-9), 4);
  return `${Number((rate / 1000 ** power).toPrecision(3))} ${["B", "kB", "MB", "GB", "TB"][power]}/s`;
}

/** The settings of one variant: those that were moved, those given, and those assumed. */
function settingsOf(variant, moved, assumed) {
  const given = { ...variant.inputs.bandwidths, mtbf_s: variant.inputs.mtbf_s, keep: variant.inputs.keep };
  const found = {}, isAssumed = {};
  for (const { key } of PLAN_SLIDERS) {
    const other = { host_write: given.storage, host_read: given.storage }[key] ?? null;
    const isNeeded = given[key] === null && other === null && assumed[key] !== null && assumed[key] !== undefined;
    found[key] = moved[key] !== undefined ? moved[key] : given[key] ?? (isNeeded ? assumed[key] : null);
    isAssumed[key] = moved[key] === undefined && isNeeded;
  }
  return { values: found, isAssumed };
}

/** A slider on a logarithmic scale. The right end of an `open` one stands for null. */
function planSlider({ key, name, low, high, show, open, whole }, read, onmove) {
  const place = (value) => (value === null ? PLAN_STEPS : Math.round(Math.log(value / low) / Math.log(high / low) * (open ? PLAN_STEPS - 1 : PLAN_STEPS)));
  const number = (at) => { const value = low * (high / low) ** (at / (open ? PLAN_STEPS - 1 : PLAN_STEPS)); return whole ? Math.round(value) : Number(value.toPrecision(3)); };
  const shown = h("output", {}), note = h("span", {});
  const input = h("input", { type: "range", min: 0, max: PLAN_STEPS, step: 1, id: `plan-${key}`, "aria-label": name,
    oninput: () => { const at = Number(input.value); onmove(key, open && at === PLAN_STEPS ? null : number(at)); } });
  const update = () => {
    const { value, kind } = read(key), text = value === null ? open ?? "unknown" : show(value);
    if (document.activeElement !== input || kind !== "moved") input.value = String(place(value));
    input.setAttribute("aria-valuetext", text);
    replaceAll(shown, text);
    replaceAll(note, badge(kind, kind === "assumed" ? "warn" : kind === "moved" ? "accent" : ""));
  };
  update();
  return { element: h("label", { class: "slider" }, h("span", { class: "row" }, h("span", {}, name), h("span", { class: "spring" }), shown, note), input), update };
}

/** The page of a plan. */
export function drawPlan(found) {
  const moved = {}, chosen = found.variants.map(() => ({ mesh: 0, dtype: 0 }));
  const holder = h("div", {}), isAlone = found.variants.length === 1;
  const first = () => settingsOf(found.variants[0], moved, found.assumed);
  const read = (key) => {
    const { values, isAssumed } = first();
    return { value: values[key], kind: key in moved ? "moved" : isAssumed[key] ? "assumed" : values[key] === null ? "not given" : "given" };
  };
  const move = (key, value) => { moved[key] = value; update(); };
  const sliders = PLAN_SLIDERS.map((one) => planSlider(one, read, move));
  const update = () => { sliders.forEach((one) => one.update()); replaceAll(holder, drawPlans(found, chosen, moved, isAlone)); };
  const reset = h("button", { type: "button", class: "small", onclick: () => {
    for (const key of Object.keys(moved)) delete moved[key];
    chosen.forEach((one) => { one.mesh = 0; one.dtype = 0; });
    replaceAll(pickers, found.variants.map((variant, n) => drawPicker(variant, chosen[n], update, isAlone)));
    update();
  } }, "Reset");
  const pickers = h("div", { class: "pickers" }, found.variants.map((variant, n) => drawPicker(variant, chosen[n], update, isAlone)));
  const hasAssumed = PLAN_SLIDERS.some(({ key }) => first().isAssumed[key]);
  update();
  return h("div", { class: "plan-page" }, h("div", { class: "cards" },
    h("section", { class: "card settings", "aria-label": "Settings" },
      h("h2", { class: "row" }, "What if", h("span", { class: "spring" }), reset),
      pickers, h("div", { class: "sliders" }, sliders.map(({ element }) => element)),
      hasAssumed ? h("p", { class: "muted" }, "Times use assumed numbers where none were given. Move a slider, or give the option: --write-bandwidth, --read-bandwidth, --device-bandwidth, --mtbf, --keep.") : null)),
  holder);
}

/** Buttons for the meshes and dtypes of a variant that could be planned. */
function drawPicker(variant, chosen, onchange, isAlone) {
  const has = (mesh, dtype) => (mesh === 0 && dtype === 0) || variant.choices.some((one) => one.mesh === mesh && one.dtype === dtype);
  const holder = h("div", { class: "picker" });
  const draw = () => {
    const meshes = variant.meshes.map((mesh, n) => [n, showMesh(mesh)]).filter(([n]) => has(n, chosen.dtype));
    const dtypes = variant.dtypes.map((dtype, n) => [n, dtype]).filter(([n]) => has(chosen.mesh, n));
    const pick = (key) => (value) => { chosen[key] = value; draw(); onchange(); };
    replaceAll(holder, isAlone ? null : h("b", {}, variant.name),
      meshes.length > 1 ? choice("Mesh", meshes, chosen.mesh, pick("mesh")) : null,
      dtypes.length > 1 ? choice("Dtype", dtypes, chosen.dtype, pick("dtype")) : null);
  };
  draw();
  return holder;
}

function showMesh(mesh) {
  return Object.entries(mesh).map(([axis, size]) => `${axis}=${size}`).join(", ") || "one device";
}

function drawPlans(found, chosen, moved, isAlone) {
  const all = found.variants.map((variant, n) => {
    const { mesh, dtype } = chosen[n], other = variant.choices.find((one) => one.mesh === mesh && one.dtype === dtype);
    const numbers = other ? other.numbers : variant.numbers, { values } = settingsOf(variant, moved, found.assumed);
    return { variant, numbers, values, plan: numbers.plan, times: planTimes(numbers.plan, values, values.mtbf_s) };
  });
  const intervals = drawIntervals(all);
  if (isAlone) return h("div", { class: "cards" }, drawOverview(all[0], true), drawDetails(all[0], "half"), intervals, drawFindings(all[0]));
  return h("div", { class: "cards" }, drawContest(found, all),
    h("div", { class: `plan-columns ${all.length === 3 ? "three" : ""}` }, drawColumns(all)),
    intervals);
}

// Several plans side by side

function drawColumns(all) {
  const columns = all.map((one) => [drawOverview(one, false), ...drawDetails(one, ""), drawFindings(one)].filter(Boolean));
  const rows = Math.max(...columns.map((cards) => cards.length));
  return columns.map((cards) => { const column = h("div", { class: "cards" }, cards); column.style.setProperty("--rows", rows); return column; });
}

function numberAt(one, key) {
  if (key === "save.duration_s") return one.times.save_s;
  if (key === "restore.duration_s") return one.times.restore_s;
  return key.split(".").reduce((value, part) => (value === null || value === undefined ? null : value[part]), one.plan);
}

function showAt(key, value) {
  if (key.endsWith("skew")) return `${(100 * value).toFixed(2)} %`;
  if (key.endsWith("_s")) return formatSeconds(value);
  return key === "files.shards" ? value.toLocaleString("en-US") : formatBytes(value);
}

/** The numbers that are better when smaller, as `compare_plans` judges them. */
function drawContest(found, all) {
  const rows = found.contests.map(([key, title]) => {
    const values = all.map((one) => numberAt(one, key));
    if (values.some((value) => value === null)) return null;
    const least = Math.min(...values), limit = key.endsWith("skew") ? least + PLAN_ALIKE : least * (1 + PLAN_ALIKE);
    const best = values.map((value) => value <= limit), isEven = best.every(Boolean);
    const isEqual = values.every((value) => value === values[0]);
    return h("tr", {}, h("th", { scope: "row" }, title, isEven ? h("small", {}, isEqual ? " equal" : " equal within 1 %") : null),
      values.map((value, n) => h("td", { class: `right ${best[n] && !isEven ? "best" : ""}` }, best[n] && !isEven ? badge("better", "good") : null, " ", showAt(key, value))));
  });
  return card("Side by side", h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "side by side" }, h("table", { class: "contest" },
    h("thead", {}, h("tr", {}, h("td", {}), all.map(({ variant }) => h("th", { scope: "col", class: "right" }, variant.name)))), h("tbody", {}, rows))));
}

// One plan

function drawOverview({ variant, plan, times }, isAlone) {
  const meshes = plan.meshes.map(showMesh).join("; ");
  const place = `${meshes ? `mesh ${meshes}, ` : ""}${formatCount(plan.devices, "device")} on ${formatCount(plan.hosts, "host")}`;
  const limits = plan.limits.map((limit) => h("div", { class: `notice ${limit.ok ? "good" : "bad"}` },
    `${limit.ok ? "within" : "exceeds"} --${limit.name.replaceAll("_", "-")}: ${formatBytes(limit.found_bytes)}, limit ${formatBytes(limit.limit_bytes)}`));
  return h("section", { class: "card", "aria-label": "Overview" },
    h("h2", {}, isAlone ? "Overview" : variant.name), h("p", { class: "muted place" }, place),
    figures({
      "in all": formatBytes(plan.total_bytes),
      "compressed, about": plan.compressed ? formatBytes(plan.compressed.total_bytes) : null,
      "on the busiest host": formatBytes(plan.host_bytes.most),
      "files, with metadata": plan.files.in_all.toLocaleString("en-US"),
      "largest file": plan.files.largest ? formatBytes(plan.files.largest.bytes) : null,
      "to save": formatSeconds(times.save_s),
      "save_async blocks": formatSeconds(times.save_async_blocked_s),
      "to restore": formatSeconds(times.restore_s),
      "parameters": plan.parameters === null ? null : formatNumber(plan.parameters),
    }), limits);
}

/** Bars with names on the left and texts on the right: `[[name, number, text, colour]]`. */
function shareBars(rows) {
  const most = Math.max(...rows.map(([, number]) => number ?? 0), 0) || 1;
  return h("div", { class: "share-bars" }, rows.map(([name, number, text, colour]) => h("div", { class: "share-row" },
    h("span", {}, name),
    h("div", { class: "share-bar" }, h("i", { style: { width: `${Math.max(100 * (number ?? 0) / most, number ? 0.5 : 0)}%`, background: colour ?? "var(--c0)" } })),
    h("b", {}, text))));
}

function drawDetails(one, size) {
  const { plan, numbers, times } = one, isAlone = Boolean(size);
  const make = (title, ...children) => { const made = card(title, ...children); if (size) made.classList.add(size); return made; };
  const staging = plan.staging_bytes, save = plan.save.requests, restore = plan.restore;
  const groups = Object.entries(plan.groups).map(([name, group], n) => [name, group.bytes, `${formatBytes(group.bytes)} ${Object.keys(group.dtypes).join(", ")}`, `var(--c${n % 8})`]);
  if (plan.parity) groups.push(["parity", plan.parity.bytes, `${formatBytes(plan.parity.bytes)}, ${formatCount(plan.parity.files, "file")}`, "var(--c7)"]);
  const power = Math.min(Math.floor(Math.log2(Math.max(...numbers.host_bytes, 1)) / 10), 6), unit = 1024 ** power;
  const showUnits = (number) => `${formatNumber(number, 3)} ${power ? `${" KMGTPE"[power]}iB` : "B"}`;
  const chosenHosts = numbers.hosts.length < plan.hosts ? `${numbers.hosts.length} of ${formatCount(plan.hosts, "host")}, evenly chosen. ` : "";
  return [
    make("Bytes by group", shareBars(groups)),
    make("Times", shareBars([
      ["save", times.save_s, formatSeconds(times.save_s)],
      ["save_async blocks the loop", times.save_async_blocked_s, formatSeconds(times.save_async_blocked_s), "var(--c1)"],
      ["restore as saved", times.restore_s, formatSeconds(times.restore_s), "var(--c2)"],
      ...plan.onto.map((onto, n) => [`restore onto ${showMesh(onto.mesh)}`, times.onto_s[n], formatSeconds(times.onto_s[n]), "var(--c2)"]),
    ]), h("p", { class: "muted" }, "The time of the transfer alone. save blocks for all of it.")),
    make("Bytes per host", barChart(numbers.hosts.map((host, n) => ({ x: host, parts: { "written by a host": numbers.host_bytes[n] / unit } })), { "written by a host": "var(--c0)" }, { xLabel: "host", yLabel: "bytes", showX: String, showY: showUnits }),
      h("p", { class: "muted" }, `${chosenHosts}From ${formatBytes(plan.host_bytes.least)} to ${formatBytes(plan.host_bytes.most)}; the busiest has ${(100 * plan.host_bytes.skew).toFixed(2)} % more than the mean.`)),
    make("Files by size", barChart(numbers.file_bytes.counts.map((count, n) => ({ x: numbers.file_bytes.edges[n], parts: { files: count } })), { files: "var(--c4)" }, { xLabel: "size of a file, up to twice of it", yLabel: "files", showX: formatBytes, showY: (count) => count.toLocaleString("en-US") }),
      h("p", { class: "muted" }, `${formatCount(plan.files.shards, "shard")}, and ${formatBytes(plan.metadata_bytes)} of metadata.`)),
    make("If something is lost", dataTable([
      { name: "lost", value: (row) => row.name },
      { name: "to bring back", right: true, value: (row) => row.bytes, show: (row) => formatBytes(row.bytes) },
      { name: "takes", right: true, value: (row) => row.s, show: (row) => formatSeconds(row.s) },
      { name: "held elsewhere", value: (row) => row.note },
    ], recoveryRows(plan, times)), h("p", { class: "muted" }, plan.parity && plan.parity.covers ? `Parity stands the loss of any ${plan.parity.count === 1 ? PARITY_NOUNS[plan.parity.covers] : `two ${plan.parity.covers}`}.` : "Lost files need a copy, or --parity.")),
    make("Memory and requests", facts({
      "staging memory of a host": `${formatBytes(staging.accelerators)} with accelerators, ${formatBytes(staging.cpu)} on CPUs`,
      "held by save_async": `${formatBytes(staging.held_by_save_async)} on a host with accelerators`,
      "requests of a save": `${save.most.toLocaleString("en-US")} of a host, ${save.in_all.toLocaleString("en-US")} in all`,
      "requests of a restore": `${restore.requests.most.toLocaleString("en-US")} of a host, in ${formatCount(restore.files.most, "file")}`,
      "a host reads": `${formatBytes(restore.read_bytes.most)}, ${(100 * restore.over_read).toFixed(2)} % more than it needs`,
    })),
    isAlone ? null : make("Over time", overTime(one)),
  ];
}

/** Storage and intervals. */
function overTime({ plan, times, values }) {
  return facts({
    [`storage for ${values.keep}`]: `${formatBytes(values.keep * plan.total_bytes)}, ${formatBytes((values.keep + 1) * plan.total_bytes)} while one more is saved`,
    "time between failures": formatSeconds(values.mtbf_s),
    "save every": showAdvice(times.save_every),
    "save_async every": showAdvice(times.save_async_every),
  });
}

function showAdvice(advice) {
  return advice === null ? null : `${formatSeconds(advice.interval_s)}, ${(100 * advice.lost_share).toFixed(1)} % of time lost`;
}

function recoveryRows(plan, times) {
  const { lost_shard: shard, lost_host: host, lost_disk: disk } = plan.recovery;
  return [
    shard ? { name: "the largest shard", bytes: shard.size_bytes, s: times.lost_shard_s, note: `${formatBytes(shard.held_elsewhere_bytes)}, on other devices` } : null,
    { name: "a host", bytes: host.held_bytes, s: times.lost_host_s, note: `${formatBytes(host.held_bytes - host.sole_bytes)}, on other hosts` },
    { name: "a host's disk", bytes: disk.written_bytes, s: times.lost_disk_s, note: `${formatBytes(disk.held_elsewhere_bytes)}, on other hosts` },
  ].filter(Boolean);
}

/** How often to save, over the mean time between failures. */
function drawIntervals(all) {
  const series = [], hours = Array.from({ length: 22 }, (_, n) => n / 2 - 1);
  all.forEach(({ variant, plan, values }, n) => {
    for (const [call, key, colour] of [["save", "save_every", 2 * n], ["save_async", "save_async_every", 2 * n + 1]]) {
      const points = hours.map((x) => [x, planTimes(plan, values, 3600 * 2 ** x)[key]?.interval_s ?? NaN]).filter(([, y]) => Number.isFinite(y));
      if (points.length) series.push({ name: all.length > 1 ? `${call}, ${variant.name}` : call, colour: `var(--c${colour % 8})`, points });
    }
  });
  if (!series.length) return null;
  const most = Math.max(...series.flatMap(({ points }) => points.map(([, y]) => y)));
  const [unit, name] = most > 4 * 3600 ? [3600, "h"] : most > 240 ? [60, "min"] : [1, "s"];
  for (const one of series) one.points = one.points.map(([x, y]) => [x, y / unit]);
  const mtbf = all[0].values.mtbf_s;
  const chart = lineChart(series, { xLabel: "mean time between failures", yLabel: "time between saves", showX: (x) => formatSeconds(3600 * 2 ** x), showY: (y) => `${formatNumber(y, 3)} ${name}`, fromZero: true, marks: [{ at: Math.log2(mtbf / 3600) }] });
  const note = h("p", { class: "muted" }, `The dashed line is at ${formatSeconds(mtbf)}. The interval loses the least time to saving and to repeated work (Daly). No save begins before the one before has ended.`);
  return card("How often to save", h("div", { class: "two-parts" }, chart, h("div", {}, all.length > 1 ? null : overTime(all[0]), note)));
}

function drawFindings({ plan }) {
  if (!plan.findings.length) return null;
  return card("Findings", plan.findings.map((finding) => h("div", { class: `notice ${finding.severity === "error" ? "bad" : ""}` }, finding.message)));
}
