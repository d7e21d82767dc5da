// Tables of a router: its replicas, sortable, and the candidates of its last decisions, with small bars.

import { clock, count, h, percent, seconds, segment } from "./dom.js";
import { missCause } from "./outcomes.js";
import { table } from "./parts.js";
import { deviceText, tierText } from "./places.js";
import { kindOf, wordOf } from "./sources.js";

const SHOWN_REPLICAS = 200;
const TIERS = ["device", "memory", "disk", "shared"];
const REASONS = { cheapest: "lowest TTFT", session: "session affinity", moved: "session moved", spread: "spread, least loaded", only: "only one available" };

export const shortOf = (text) => text.replaceAll(/\bhttps?:\/\//g, "");

const bar = (kind, title, ...parts) => h("div", { class: `bar thin ${kind}`, role: "img", title, "aria-label": title }, parts);

// Columns: name, classes, value to sort by, cell. `row` has what `now` tells of a replica and its counters of the period.
const COLUMNS = [
  ["Replica", "", (row) => row.replica, replicaCell],
  ["In flight", "n", (row) => row.in_flight, (row, most) => [count(row.in_flight), bar("plain", `${count(row.waiting || 0)} before the first token`,
    segment((row.waiting || 0) / most.in_flight, "tone"), segment((row.in_flight - (row.waiting || 0)) / most.in_flight, "tone light"))]],
  ["Queued tokens", "n", (row) => row.queued_tokens, (row, most) => [count(row.queued_tokens), bar("computed", `${count(row.queued_tokens)} queued prompt tokens`, segment(row.queued_tokens / most.queued_tokens, "tone"))]],
  ["Memory", "memories", (row) => (row.device ? 1 - row.device.free / row.device.all : row.usage || 0), memoryCell],
  ["Requests", "n wide", (row) => row.sent, (row, most) => [count(row.sent), bar("plain", `${percent(row.sent / most.all)} of the requests`, segment(row.sent / most.sent, "tone"))]],
  ["Cached tokens", "n wide", (row) => row.actual, (row, most) => [count(row.actual), bar("plain", `expected ${count(row.expected)}, actual ${count(row.actual)}`, segment(row.actual / most.cached, "tone")), h("small", {}, `${count(row.expected)} expected`)]],
  ["Tokens/s", "n wide", (row) => row.speed || 0, (row) => (row.speed ? count(row.speed) : "–")],
  ["Failed", "n wide", (row) => row.failed, (row) => count(row.failed)],
];

function replicaCell(row) {
  const [word, tone] = row.drained ? ["draining", "warn"] : row.reason ? ["not used", "bad"] : ["ready", "good"];
  return [h("span", { class: "replica-name", title: row.kv_events ? `${count(row.known_blocks)} cached blocks known from KV events` : "cached blocks are estimated" }, shortOf(row.replica)), " ", h("span", { class: `pill ${tone}` }, word), row.role === "both" ? null : h("small", {}, ` ${row.role}`),
    row.reason && !row.drained ? h("p", { class: "note broken" }, row.reason) : null];
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
    h("div", { "data-place": name, "data-cached": cached }, bar(kindOf(name), `${wordOf(name)}: ${text}`, parts))) : h("small", {}, "unknown");
}

export class ReplicaTable {
  constructor() {
    this.element = h("div", { id: "replicas" });
    this.column = null;
    this.up = true;
  }

  // Replicas that take no requests are first, unless another order was chosen.
  sorted(rows) {
    const value = this.column === null ? (row) => (row.reason ? 0 : 1) : COLUMNS[this.column][2];
    const sign = this.up ? 1 : -1;
    return [...rows].sort((a, b) => { const [x, y] = [value(a), value(b)]; return sign * (x < y ? -1 : x > y ? 1 : 0); });
  }

  // Draws only what has changed, so that focus and selection stay.
  show(rows) {
    const signature = JSON.stringify(rows);
    if (signature === this.signature) return;
    this.signature = signature;
    this.rows = rows;
    this.draw();
  }

  draw() {
    const { rows } = this;
    const of = (pick) => Math.max(1, ...rows.map(pick));
    const most = {
      in_flight: of((row) => row.in_flight), queued_tokens: of((row) => row.queued_tokens), sent: of((row) => row.sent),
      cached: of((row) => row.actual), all: rows.reduce((sum, row) => sum + row.sent, 0),
    };
    const shown = this.sorted(rows).slice(0, SHOWN_REPLICAS);
    const heads = COLUMNS.map(([name, classes], column) => [h("button", { type: "button", "data-sort": column, "aria-pressed": column === this.column }, name, column === this.column ? (this.up ? " ▲" : " ▼") : ""), classes]);
    const body = shown.map((row) => h("tr", { "data-replica": row.replica, "data-sent": row.sent }, COLUMNS.map(([, classes, , cell]) => h("td", { class: classes }, [cell(row, most)].flat()))));
    const focused = document.activeElement && document.activeElement.getAttribute("data-sort");
    this.element.replaceChildren(table(heads, body), ...(rows.length > shown.length ? [h("p", { class: "note" }, `and ${count(rows.length - shown.length)} more`)] : []));
    for (const button of this.element.querySelectorAll("button")) {
      button.addEventListener("click", () => this.sort(Number(button.getAttribute("data-sort"))));
      if (focused === button.getAttribute("data-sort")) button.focus();
    }
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
      h("td", { class: "n wide" }, count(one.prompt_tokens)),
      h("td", { class: "candidates" }, candidates(one)), h("td", { class: "why wide" }, missCause(one.miss)))));
}

// Per candidate: its name, the parts of its TTFT and the sources of the prompt's tokens.
function candidates({ replica, candidates: shown, more }) {
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
