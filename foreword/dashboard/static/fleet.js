// Tables of a router: its replicas, and the candidates of its last decisions, with small bars.

import { NONE, clock, count, h, nothing, percent, seconds, segment } from "./dom.js";
import { HEALTHY } from "./health.js";
import { missCause } from "./outcomes.js";
import { table } from "./parts.js";
import { deviceText, tierText } from "./places.js";
import { kindOf, wordOf } from "./sources.js";

// Rows that are drawn at once.
const SHOWN_REPLICAS = 50;
// A smaller fleet is shown as a whole.
const FOLDED_FROM = 9;
const TIERS = ["device", "memory", "disk", "shared"];
const REASONS = { cheapest: "lowest TTFT", session: "session affinity", moved: "session moved", spread: "spread, least loaded", common: "spread, common prefix", only: "only one available" };

export const shortOf = (text) => text.replaceAll(/\bhttps?:\/\//g, "");

const bar = (kind, title, ...parts) => h("div", { class: `bar thin ${kind}`, role: "img", title, "aria-label": title }, parts);
const timesCell = (found, share) => (found ? [seconds(found[0]), h("small", {}, ` p99 ${seconds(found[1])}`), share === undefined ? null : bar("plain", `${seconds(found[0])}, of the slowest's median`, segment(share, "tone"))] : nothing("no streamed request yet"));
const medianOf = (found) => (found ? found[0] : -1);

// Columns: name, classes, value to sort by, cell. `row` has what `now` tells of a replica and its counters of the period.
const COLUMNS = [
  ["Replica", "", (row) => row.replica, replicaCell],
  ["TTFT", "n", (row) => medianOf(row.ttft), (row, most) => timesCell(row.ttft, row.ttft && row.ttft[0] / most.ttft)],
  ["ITL", "n wide", (row) => medianOf(row.itl), (row, most) => timesCell(row.itl, row.itl && row.itl[0] / most.itl)],
  ["In flight", "n", (row) => row.in_flight, (row, most) => [count(row.in_flight), bar("plain", `${count(row.waiting || 0)} before the first token`,
    segment((row.waiting || 0) / most.in_flight, "tone"), segment((row.in_flight - (row.waiting || 0)) / most.in_flight, "tone light"))]],
  ["Queued tokens", "n wide", (row) => row.queued_tokens, (row, most) => [count(row.queued_tokens), bar("computed", `${count(row.queued_tokens)} queued prompt tokens`, segment(row.queued_tokens / most.queued_tokens, "tone"))]],
  ["Memory", "memories", (row) => (row.device ? 1 - row.device.free / row.device.all : row.usage || 0), memoryCell],
  ["Requests", "n wide", (row) => row.sent, (row, most) => [count(row.sent), bar("plain", `${percent(row.sent / most.all)} of the requests`, segment(row.sent / most.sent, "tone"))]],
  ["Cached tokens", "n wide", (row) => row.actual, (row, most) => (row.asked ? [count(row.actual), bar("plain", `expected ${count(row.expected)}, actual ${count(row.actual)} of ${count(row.asked)}`, segment(row.actual / most.cached, "tone")), h("small", {}, `${count(row.expected)} expected`)] : nothing("its usage has no cached tokens"))],
  ["Tokens/s", "n wide", (row) => row.speed || 0, (row) => (row.speed ? count(row.speed) : nothing("prefill speed: too few requests, or TTFT does not grow with the prompt"))],
  ["Failed", "n", (row) => row.failed, (row) => count(row.failed)],
];

function replicaCell(row) {
  const { word, tone, why } = row.state;
  return [h("span", { class: "replica-name", title: row.kv_events ? `${count(row.known_blocks)} cached blocks known from KV events` : "cached blocks are estimated" }, shortOf(row.replica)), " ", h("span", { class: `pill ${tone}` }, word === "unused" ? "ready" : word), word === "unused" ? h("small", {}, " no requests yet") : null, row.role === "both" ? null : h("small", {}, ` ${row.role}`),
    why ? h("p", { class: `note ${tone === "bad" ? "broken" : ""}` }, why) : null, row.reason && !row.drained && row.reason !== why && !row.reason.endsWith(row.problem || why) ? h("p", { class: "note" }, row.reason) : null];
}

function memoryCell(row) {
  const { device } = row;
  const places = [];
  if (device) {
    const { used, idle, text } = deviceText({ ...device, each: NaN });
    const parts = [segment(device.pinned / device.all, "tone deep"), segment(used / device.all, "tone"), segment(idle / device.all, "tone light")];
    places.push(["device", text, device.cached, parts]);
  } else if (row.usage !== null) {
    places.push(["device", `${percent(row.usage)} in use by requests`, null, [segment(row.usage, "tone")]]);
  }
  for (const tier of row.tiers) {
    const text = `${tier.open ? "circuit open, " : ""}${tierText(tier)}`;
    places.push([tier.tier, text, null, tier.open ? [segment(1, "failing")] : tier.budget ? [segment(tier.held / tier.budget, "tone")] : []]);
  }
  return places.length ? places.map(([name, text, cached, parts]) =>
    h("div", { "data-place": name, "data-cached": cached }, bar(kindOf(name), `${wordOf(name)}: ${text}`, parts))) : nothing("it does not say what it holds");
}

// The fleet's own times, those that need attention (the worst first), one that was chosen, and the others behind one line.
export class ReplicaTable {
  constructor() {
    this.search = h("input", { type: "search", id: "find", "aria-label": "Find a replica", placeholder: "Find a replica", autocomplete: "off", spellcheck: "false" });
    this.place = h("div");
    this.element = h("div", { id: "replicas", tabindex: -1 }, this.search, this.place);
    this.column = null;
    this.up = true;
    this.open = false;
    this.chosen = null;
    this.search.addEventListener("input", () => this.draw());
  }

  // `rows`: judged, the worst first.
  show(rows, fleet) {
    const signature = JSON.stringify([rows, fleet]);
    if (signature === this.signature) return;
    this.signature = signature;
    this.rows = rows;
    this.fleet = fleet;
    this.draw();
  }

  choose(replica) {
    this.chosen = replica;
    this.draw();
    this.element.scrollIntoView({ block: "nearest" });
  }

  sorted(rows) {
    if (this.column === null) return rows;
    const [value, sign] = [COLUMNS[this.column][2], this.up ? 1 : -1];
    return [...rows].sort((a, b) => { const [x, y] = [value(a), value(b)]; return sign * (x < y ? -1 : x > y ? 1 : 0); });
  }

  // An order or a search is about all replicas; otherwise the healthy ones are behind one line.
  draw() {
    const wanted = this.search.value.trim().toLowerCase();
    const rows = this.sorted(this.rows.filter((row) => row.replica.toLowerCase().includes(wanted)));
    const all = wanted || this.column !== null || this.rows.length < FOLDED_FROM;
    const first = rows.filter((row) => all || row.state.rank < HEALTHY || row.replica === this.chosen);
    const rest = rows.filter((row) => !first.includes(row));
    const focused = document.activeElement && document.activeElement.getAttribute("data-sort");
    const [body, more] = [first.slice(0, SHOWN_REPLICAS), Math.max(0, first.length - SHOWN_REPLICAS)];
    const parts = [this.tableOf(body, true), more ? h("p", { class: "note" }, `and ${count(more)} more`) : null, rest.length ? this.folded(rest) : null];
    this.place.replaceChildren(...parts.filter(Boolean));
    for (const button of this.place.querySelectorAll("th button")) {
      button.addEventListener("click", () => this.sort(Number(button.getAttribute("data-sort"))));
      if (focused === button.getAttribute("data-sort")) button.focus();
    }
    const details = this.place.querySelector("details");
    if (details) details.addEventListener("toggle", () => { if (details.open !== this.open) { this.open = details.open; this.draw(); } });
  }

  folded(rest) {
    const ready = rest.filter((row) => row.state.rank === HEALTHY).length;
    const words = [ready ? `${count(ready)} ready` : null, rest.length > ready ? `${count(rest.length - ready)} without requests yet` : null].filter(Boolean).join(", ");
    const medians = rest.filter((row) => row.ttft).map((row) => row.ttft[0]).sort((a, b) => a - b);
    const summary = h("summary", { "data-rest": rest.length }, `${this.place.childElementCount && rest.length < this.rows.length ? "The others: " : ""}${words}; TTFT ${medians.length ? `medians ${seconds(medians[0])} to ${seconds(medians[medians.length - 1])}` : NONE}`);
    const shown = rest.slice(0, SHOWN_REPLICAS);
    return h("details", { open: this.open }, summary, ...(this.open ? [this.tableOf(shown, false), rest.length > shown.length ? h("p", { class: "note" }, `and ${count(rest.length - shown.length)} more: sort or search`) : null] : []).filter(Boolean));
  }

  tableOf(rows, heads) {
    const of = (pick) => Math.max(1, ...this.rows.map(pick));
    const longest = (kind) => Math.max(1e-9, ...this.rows.map((row) => medianOf(row[kind])));
    const most = {
      in_flight: of((row) => row.in_flight), queued_tokens: of((row) => row.queued_tokens), sent: of((row) => row.sent), cached: of((row) => row.actual),
      all: this.rows.reduce((sum, row) => sum + row.sent, 0), ttft: longest("ttft"), itl: longest("itl"),
    };
    const head = COLUMNS.map(([name, classes], column) => [heads ? h("button", { type: "button", "data-sort": column }, name, column === this.column ? (this.up ? " ▲" : " ▼") : "") : name, classes, heads && column === this.column ? (this.up ? "ascending" : "descending") : null]);
    const fleet = h("tr", { id: "fleet-row" }, COLUMNS.map(([name, classes]) => h("td", { class: classes }, { Replica: h("b", {}, "All replicas"), TTFT: timesCell(this.fleet.ttft), ITL: timesCell(this.fleet.itl) }[name] || null)));
    return table(head, [...(heads ? [fleet] : []), ...rows.map((row) => h("tr", { "data-replica": row.replica, "data-state": row.state.word, "data-sent": row.sent }, COLUMNS.map(([, classes, , cell]) => h("td", { class: classes }, [cell(row, most)].flat()))))]);
  }

  // Numbers begin with the largest, names with the first.
  sort(column) {
    this.up = this.column === column ? !this.up : column === 0;
    this.column = column;
    this.draw();
  }
}

export function decisionTable(rows) {
  return table([["Time"], ["Request", "wide"], ["Dialect", "wide"], ["To"], ["Prompt tokens", "n wide"], ["Candidates by expected TTFT", "candidates"], ["Cache miss", "wide"]], rows.map((one) =>
    h("tr", { "data-decision": one.request_id, class: one.replica ? null : "bad" },
      h("td", { class: "t" }, clock(one.time)), h("td", { class: "id wide", title: one.request_id }, one.request_id), h("td", { class: "t wide" }, one.dialect),
      h("td", { class: "to", title: one.in_words }, one.replica ? shortOf(one.replica) : "none", h("br"), h("small", {}, REASONS[one.reason] || one.reason)),
      h("td", { class: "n wide" }, one.tokens_from === "unread" ? nothing("the router did not read the prompt") : count(one.prompt_tokens)),
      h("td", { class: "candidates" }, candidates(one)), h("td", { class: "why wide" }, missCause(one.miss)))));
}

// Per candidate: its name, the parts of its TTFT and the sources of the prompt's tokens.
function candidates({ replica, candidates: shown, more, tokens_from: source }) {
  // Without the prompt's tokens there is nothing to expect.
  if (source === "unread") return nothing("the router did not read the prompt, so it expected nothing of its candidates");
  const longest = Math.max(1e-9, ...shown.map((one) => one.seconds));
  return [h("div", { class: "offers" }, shown.map((one) => {
    const chosen = one.replica === replica;
    const name = h("span", { class: chosen ? "offer chosen" : "offer", "data-candidate": one.replica }, shortOf(one.replica));
    if (one.excluded) return [name, h("small", { class: "excluded" }, one.excluded)];
    const cached = one.tokens.map((tokens, tier) => [TIERS[tier], tokens]).concat([["computed", one.computed]]);
    const all = one.tokens.reduce((sum, tokens) => sum + tokens, one.computed) || 1;
    const slowest = TIERS[one.tokens.findLastIndex((tokens) => tokens > 0)] || "device";
    const parts = [["queued", "plain", one.queued], ["loading", slowest, one.loading], ["computing", "computed", one.computing], ["other", "rest", one.other]];
    return [name, h("div", {},
      bar("time", parts.filter(([, , time]) => time >= 0.0005).map(([word, , time]) => `${word} ${seconds(time)}`).join(", "), parts.map(([, kind, time]) => segment(time / longest, `tone ${kind}`))),
      bar("tokens", cached.filter(([, tokens]) => tokens).map(([word, tokens]) => `${word} ${count(tokens)} tokens`).join(", "), cached.map(([kind, tokens]) => segment(tokens / all, `tone ${kind}`)))),
    h("small", {}, seconds(one.seconds))];
  })), more ? h("small", {}, `${count(more)} more`) : null];
}

export const decisionLegend = () => h("p", { class: "legend" }, h("span", {}, "Upper bar, TTFT:"), ...[["plain", "queued"], ["disk", "loading, by tier"], ["computed", "computing"], ["rest", "other"]].map(([kind, word]) => h("span", { class: `key ${kind}` }, word)),
  h("span", {}, "Lower bar, prompt tokens:"), ...[...TIERS, "computed"].map((kind) => h("span", { class: `key ${kind}` }, kind)));
