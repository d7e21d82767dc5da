// Which replicas hold the prefixes that prompts share, and why tenants miss.

import { clock, count, h, renew } from "./dom.js";
import { shortOf } from "./fleet.js";
import { NO_LOSS } from "./outcomes.js";
import { empty, table } from "./parts.js";
import { holdersOf, namesOf, prefixName, shareOf } from "./strip.js";

const TIERS = ["device", "memory", "disk"];

export class Sharing {
  constructor() {
    this.prefixes = h("div", { id: "shared" });
    this.tenants = h("div", { id: "tenants" });
  }

  show(now) {
    const { prefixes, misses } = now;
    renew(this.prefixes, [prefixes, now.replicas.map((one) => one.replica), now.reads_prompts], () => (!prefixes ? empty("Shown to callers with the admin key.") : prefixes.length ? prefixTable(prefixes, now.replicas)
      : empty(now.reads_prompts || !now.replicas.length ? "No two recent prompts share a full block." : "Unknown: the router reads no prompts, because it has one replica or a policy that does not look at them.")));
    renew(this.tenants, misses, () => (!misses ? empty("Shown to callers with the admin key.") : misses.length ? causes(misses) : empty("None, as far as replicas report cached tokens.")));
  }
}

// Cells of replicas in the order of their names. The list of holders has the same in words.
function prefixTable(prefixes, replicas) {
  return table([["Prefix"], ["Tokens", "n wide"], ["Prompts", "n"], ["Replicas that hold it", "holders"]], prefixes.map((one) => {
    const holders = holdersOf(one, replicas);
    const text = holders.length ? `${holders.length} of ${one.replicas}: ${namesOf(holders)}` : "none";
    const cells = h("div", { class: "cells", role: "img", "aria-label": text }, [...one.tiers].map((tier, place) => h("i", { class: tier === "-" ? "cell empty" : `cell ${TIERS[tier]}`, title: `${shortOf(replicas[place].replica)}${tier === "-" ? "" : `: ${TIERS[tier]}`}` })));
    return h("tr", { "data-shared": one.request_id, "data-holders": holders.length },
      h("td", {}, h("b", {}, prefixName(one)), h("br"), h("small", {}, one.model)), h("td", { class: "n wide" }, count(one.tokens)),
      h("td", { class: "n", title: `of the last ${count(one.of)}` }, `${count(one.prompts)}`, h("small", {}, ` ${shareOf(one.prompts, one.of)}`)),
      h("td", { class: "holders" }, cells, holders.length > 3 ? h("details", {}, h("summary", {}, text), h("p", {}, holders.map((name) => `${shortOf(name)} `))) : h("p", {}, text), one.shared ? h("small", {}, "also in the shared store") : null));
  }));
}

function causes(misses) {
  return misses.map((one) => {
    const lost = NO_LOSS.includes(one.cause) ? "" : `, ${count(one.tokens)} tokens recomputed`;
    return h("details", { class: "cause", "data-tenant": one.tenant, "data-cause-of": one.cause },
      h("summary", {}, h("b", {}, one.tenant), ` ${one.cause.replaceAll("_", " ")}: ${count(one.requests)} ${one.requests === 1 ? "request" : "requests"}${lost}`),
      one.last[0].advice ? h("p", { class: "note" }, one.last[0].advice) : null,
      table([["Time"], ["Request"], ["Replica", "wide"], ["Where"], ["Tokens", "n"]], one.last.map((request) => h("tr", { "data-missed": request.request_id },
        h("td", { class: "t" }, clock(request.time)), h("td", { class: "id", title: request.request_id }, request.request_id), h("td", { class: "wide" }, request.replica ? shortOf(request.replica) : "none"),
        h("td", {}, request.where), h("td", { class: "n" }, count(request.tokens))))));
  });
}
