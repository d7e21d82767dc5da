// The fleet at a glance: what needs attention in words, and one cell per replica.

import { NONE, count, h, percent, renew, seconds } from "./dom.js";
import { shortOf } from "./fleet.js";
import { HEALTHY } from "./health.js";
import { NO_LOSS } from "./outcomes.js";
import { card } from "./parts.js";

const WORDS = {
  failing: ["fails", "fail"], "not used": ["takes no requests", "take no requests"], slow: ["is slow", "are slow"], full: ["is full", "are full"], busy: ["is busy", "are busy"],
  "few hits": ["has few hits", "have few hits"], draining: ["is draining", "are draining"],
};
const TENANTS = 2;
const NAMES = 3;

export const namesOf = (names) => `${names.slice(0, NAMES).map(shortOf).join(", ")}${names.length > NAMES ? ` and ${count(names.length - NAMES)} more` : ""}`;
export const tellTimes = (found, word) => (found ? `${word} median ${seconds(found[0])}, p99 ${seconds(found[1])}` : `${word} ${NONE}`);
export const prefixName = (one) => (one.names.length ? one.names.join(", ") : `${count(one.tokens)} tokens of ${one.tenants.join(", ")}`);
export const holdersOf = (one, replicas) => replicas.filter((_, place) => one.tiers[place] !== "-").map((replica) => replica.replica);

function findings(rows, now) {
  const found = [];
  for (const [word, [one, many]] of Object.entries(WORDS)) {
    const those = rows.filter((row) => row.state.word === word);
    if (those.length) found.push([word, those[0].state.tone, `${namesOf(those.map((row) => row.replica))} ${those.length === 1 ? one : many}`, those[0].state.why, "#replicas"]);
  }
  if (rows.length && !found.length) found.push(["well", "good", `${rows.length === 1 ? "The replica is" : `All ${count(rows.length)} replicas are`} in service`, "none is slow or fails", "#replicas"]);
  for (const one of (now.prefixes || []).slice(0, 1)) {
    const holders = holdersOf(one, now.replicas);
    found.push(["prefix", "none", `Most used prefix: ${prefixName(one)}`, holders.length ? `on ${holders.length} of ${one.replicas}: ${namesOf(holders)}` : "on no replica now", "#shared"]);
  }
  for (const one of (now.misses || []).filter(({ cause, tokens }) => tokens && !NO_LOSS.includes(cause)).slice(0, TENANTS)) {
    found.push(["misses", "none", `${one.tenant} misses: ${one.cause.replaceAll("_", " ")}`, `${count(one.tokens)} tokens in ${count(one.requests)} ${one.requests === 1 ? "request" : "requests"}`, "#tenants"]);
  }
  return found;
}

const tell = (row) => `${shortOf(row.replica)}: ${row.state.word}. ${row.state.why ? `${row.state.why}. ` : ""}${tellTimes(row.ttft, "TTFT")}; ${tellTimes(row.itl, "ITL")}; ${count(row.in_flight)} in flight.`;
const toneOf = (row) => (row.state.rank < HEALTHY ? row.state.tone : row.state.tone === "none" || row.ratio === null ? "none" : row.ratio > 1.4 ? "near" : "good");

export class Strip {
  // `onPick` is called with the name of a replica that was chosen.
  constructor(onPick) {
    this.onPick = onPick;
    this.list = h("ul", { id: "findings" });
    this.cells = h("div", { id: "strip", role: "listbox", tabindex: 0, "aria-label": "Replicas, one cell each, in the order of their names" });
    this.told = h("p", { class: "readout", "aria-live": "polite" });
    this.active = 0;
    const legend = h("p", { class: "legend" }, h("span", {}, "TTFT against the fleet:"),
      ...[["good", "like the others"], ["near", "above 1.4 times"], ["warn", "needs attention"], ["bad", "fails or not used"], ["none", "not measured yet"]].map(([tone, word]) => h("span", { class: `cellkey ${tone}` }, word)));
    this.element = card("", "Fleet", this.list, this.cells, this.told, legend);
    this.cells.addEventListener("keydown", (event) => this.key(event));
    this.cells.addEventListener("focus", () => this.point(this.active));
    this.cells.addEventListener("blur", () => { this.told.textContent = ""; });
    this.cells.addEventListener("pointerover", (event) => { if (event.target.id.startsWith("cell-")) this.tell(Number(event.target.id.slice(5))); });
    this.cells.addEventListener("pointerleave", () => { this.told.textContent = ""; });
    this.cells.addEventListener("click", (event) => { if (event.target.id.startsWith("cell-")) this.pick(Number(event.target.id.slice(5))); });
  }

  show(rows, now) {
    renew(this.list, findings(rows, now), (found) => found.map(([word, tone, what, why, place]) =>
      h("li", { "data-finding": word }, h("a", { href: place, class: `finding ${tone}` }, h("b", {}, what), why ? h("span", {}, ` ${why}`) : null))));
    this.rows = [...rows].sort((a, b) => (a.replica < b.replica ? -1 : 1));
    renew(this.cells, this.rows.map((row) => [row.replica, toneOf(row), tell(row)]), (cells) =>
      cells.map(([replica, tone, text], place) => h("i", { id: `cell-${place}`, role: "option", class: `cell ${tone}`, "data-cell": replica, "aria-label": text, "aria-selected": place === this.active })));
    this.cells.hidden = !rows.length;
    if (document.activeElement === this.cells) this.point(this.active);
  }

  tell(place) { if (this.rows[place]) this.told.textContent = tell(this.rows[place]); }

  point(place) {
    this.active = Math.max(0, Math.min(this.rows.length - 1, place));
    for (const cell of this.cells.querySelectorAll("[aria-selected=true]")) cell.setAttribute("aria-selected", "false");
    const cell = this.cells.children[this.active];
    if (!cell) return;
    cell.setAttribute("aria-selected", "true");
    this.cells.setAttribute("aria-activedescendant", cell.id);
    this.tell(this.active);
  }

  pick(place) {
    this.point(place);
    this.onPick(this.rows[place].replica);
  }

  key(event) {
    const line = () => Math.max(1, [...this.cells.children].findIndex((cell) => cell.offsetTop > this.cells.children[0].offsetTop));
    const moves = { ArrowRight: () => this.active + 1, ArrowLeft: () => this.active - 1, ArrowDown: () => this.active + line(), ArrowUp: () => this.active - line(), Home: () => 0, End: () => this.rows.length - 1 };
    if (moves[event.key]) this.point(moves[event.key]());
    else if (event.key === "Enter" || event.key === " ") this.pick(this.active);
    else return;
    event.preventDefault();
  }
}

export const shareOf = (part, whole) => (whole ? percent(part / whole) : NONE);
