// How requests of each dialect ended, and what caused cache misses. Both views have these cards.

import { count, h, percent, renew } from "./dom.js";
import { card, empty, figure, table } from "./parts.js";

const OUTCOMES = [["ok", "Answered"], ["client_error", "Client errors"], ["overloaded", "Overloaded"], ["server_error", "Server errors"], ["disconnected", "Client left"]];
const FAILED = ["overloaded", "server_error"];
// Not shown on phones.
const LESS = ["overloaded", "disconnected"];
export const NO_LOSS = ["all_cached", "new_text", "new_conversation", "shorter_than_block", "disabled"];

export class Outcomes {
  // `prefix`: how the names of the metrics begin.
  constructor(prefix) {
    this.prefix = prefix;
    this.errors = figure("errors", "Failed requests");
    this.dialects = h("div", { id: "dialects" });
    this.causes = h("div", { id: "causes" });
    this.cards = [
      card("w7", h("span", {}, "Requests by dialect ", h("small", {}, "and how they ended")), this.dialects),
      card("w5", h("span", {}, "Cache misses ", h("small", {}, "by cause, and the tokens that were recomputed for it")), this.causes),
    ];
  }

  draw(timeline, period) {
    const name = `${this.prefix}requests_total`;
    const rows = timeline.labels(name, "dialect").sort().map((dialect) => [dialect, ...OUTCOMES.map(([outcome]) => period.delta(name, { dialect, outcome }))]);
    this.drawErrors(rows);
    renew(this.dialects, rows, () => (rows.length ? dialectTable(rows) : empty("None since the start.")));
    const misses = timeline.labels(`${this.prefix}cache_misses_total`, "cause").map((cause) =>
      [cause, period.delta(`${this.prefix}cache_misses_total`, { cause }), period.delta(`${this.prefix}cache_miss_tokens_total`, { cause })]);
    const shown = misses.filter(([, requests]) => requests).sort((a, b) => b[2] - a[2] || b[1] - a[1]);
    renew(this.causes, shown, () => (shown.length ? causeTable(shown) : empty("None in this period.")));
  }

  drawErrors(rows) {
    const all = (outcome) => rows.reduce((sum, row) => sum + row[1 + OUTCOMES.findIndex(([name]) => name === outcome)], 0);
    const total = OUTCOMES.reduce((sum, [outcome]) => sum + all(outcome), 0);
    const failed = FAILED.reduce((sum, outcome) => sum + all(outcome), 0);
    const wrong = all("client_error");
    this.errors.set(total ? percent(failed / total) : "–", total ? `${count(failed)} of ${count(total)}; ${count(wrong)} client ${wrong === 1 ? "error" : "errors"}` : "no requests in this period");
  }
}

function dialectTable(rows) {
  const heads = OUTCOMES.map(([name, word]) => [word, LESS.includes(name) ? "n wide" : "n"]);
  return table([["Dialect"], ...heads], rows.map(([dialect, ...amounts]) =>
    h("tr", { "data-dialect": dialect }, h("td", {}, dialect), amounts.map((amount, column) => h("td", { class: heads[column][1], "data-outcome": OUTCOMES[column][0] }, count(amount))))));
}

function causeTable(rows) {
  return table([["Cause"], ["Requests", "n"], ["Tokens", "n"]], rows.map(([cause, requests, tokens]) =>
    h("tr", { "data-cause": cause }, h("td", {}, cause.replaceAll("_", " ")), h("td", { class: "n" }, count(requests)), h("td", { class: "n" }, NO_LOSS.includes(cause) ? "–" : count(tokens)))));
}

export function missCause(miss) {
  if (!miss || NO_LOSS.includes(miss.cause)) return null;
  const lost = miss.tokens_lost ? `, ${count(miss.tokens_lost)} tokens` : "";
  return h("span", { title: miss.advice }, h("b", {}, miss.cause.replaceAll("_", " ")), miss.where ? ` ${miss.where}${lost}. ` : `${lost}. `);
}
