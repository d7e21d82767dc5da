// The view of a router.

import { Lines, Shares } from "./charts.js";
import { clock, count, h, percent, renew, seconds, segment } from "./dom.js";
import { Outcomes, missCause } from "./outcomes.js";
import { card, columnsOf, empty, figure, table } from "./parts.js";
import { devicePlace, tierPlace, usagePlace } from "./places.js";

const PLACED = "foreword:router_prompt_tokens_total";
const FOUND = "foreword:router_actual_cached_tokens_total";
const EXPECTED = "foreword:router_expected_cached_tokens_total";
const DECIDED = "foreword:router_decisions_total";
const TTFT = "foreword:router_time_to_first_token_seconds";
const ITL = "foreword:router_time_per_output_token_seconds";
const REASONS = { cheapest: "lowest TTFT", session: "session affinity", moved: "session moved", spread: "spread, least loaded", only: "only one available" };

// The sum over all series of a metric, of a map of values or of a period.
const sum = (timeline, value, name) => [...timeline.last.values.keys()].filter((key) => key.startsWith(`${name}|`)).reduce((all, key) => all + value(key), 0);

const shortOf = (text) => text.replaceAll(/\bhttps?:\/\//g, "");

export class RouterView {
  constructor(root) {
    this.hit = figure("hit-share", "Cache hit rate");
    this.first = figure("first-token", "Time to first token (TTFT), mean");
    this.next = figure("inter-token", "Inter-token latency (ITL), median");
    this.outcomes = new Outcomes("foreword:router_");
    this.flight = figure("in-flight", "Requests in flight");
    this.moved = figure("moved", "Sessions moved");
    this.replicas = h("div", { class: "replicas", id: "replicas" });
    this.sources = new Shares("Prompt tokens cached at the chosen replica, over time", 170);
    this.sourcesLegend = h("p", { class: "legend" });
    this.load = new Lines("Requests in flight and queued at the router, over time", 170, ["running", "waiting"]);
    this.expected = h("div", { id: "expected" });
    this.decisions = h("div", { id: "decisions" });
    const legend = h("p", { class: "legend" },
      h("span", {}, h("span", { class: "swatch-line" }), "in flight"), h("span", {}, h("span", { class: "swatch-line waiting" }), "queued here"));
    root.replaceChildren(
      this.hit.element, this.first.element, this.next.element, this.flight.element, this.moved.element, this.outcomes.errors.element, this.replicas,
      card("w6", "Cached prompt tokens", this.sources.element, this.sourcesLegend),
      card("w6", "Requests", this.load.element, legend),
      card("", h("span", {}, "Expected and actual ", h("small", {}, "cached tokens, as estimated by the router and as reported by the replicas")), this.expected),
      ...this.outcomes.cards,
      card("", "Last decisions", this.decisions),
    );
  }

  draw(timeline, now, range) {
    if (!timeline.last || !now) return;
    const period = timeline.period(range);
    const total = (name) => sum(timeline, period.deltaOf, name);
    const level = (name) => sum(timeline, (key) => timeline.last.values.get(key), name);
    const [placed, found] = [total(PLACED), total(FOUND)];
    this.hit.set(placed ? percent(found / placed) : "–", placed ? `${count(found)} of ${count(placed)}` : "no prompts in this period");
    const firsts = total(`${TTFT}_count`);
    this.first.set(firsts ? seconds(total(`${TTFT}_sum`) / firsts) : "–", `of ${count(firsts)} streamed requests`);
    const streams = period.delta(`${ITL}_count`);
    this.next.set(streams ? seconds(period.quantile(ITL, 0.5)) : "–", streams ? `p99 ${seconds(period.quantile(ITL, 0.99))}, of ${count(streams)} requests' means` : "no streams in this period");
    this.outcomes.draw(timeline, period);
    this.flight.set(count(level("foreword:router_in_flight")), `${count(level("foreword:router_queue_length"))} queued here`);
    this.moved.set(count(total("foreword:router_sessions_moved_total")), `${count(level("foreword:router_sessions"))} sessions known`);
    this.drawReplicas(timeline, period, now);
    this.drawCharts(timeline, range, placed, found);
    this.drawExpected(period, now);
    renew(this.decisions, now.decisions, (rows) => (rows.length ? decisionTable(rows) : empty("None since the router started.")));
  }

  drawReplicas(timeline, period, now) {
    const reasons = timeline.labels(DECIDED, "reason");
    const sent = (replica) => reasons.reduce((all, reason) => all + period.delta(DECIDED, { replica, reason }), 0);
    const all = now.replicas.reduce((most, one) => most + sent(one.replica), 0);
    renew(this.replicas, now.replicas.map((one) => [one, sent(one.replica), all]), (rows) =>
      (rows.length ? rows.map((row) => replicaCard(...row)) : card("", "Replicas", empty("There is no replica yet."))));
  }

  drawCharts(timeline, range, placed, found) {
    const tell = (part, whole) => (whole ? `${percent(part / whole)} of ${count(whole)} tokens cached` : "no prompts");
    const points = columnsOf(timeline, range).map(([from, to]) => {
      const [before, after] = [timeline.at(from), timeline.at(to)];
      const delta = (name) => Math.max(0, sum(timeline, (key) => (after.get(key) || 0) - (before.get(key) || 0), name));
      const whole = delta(PLACED);
      const part = Math.min(whole, delta(FOUND));
      return { from, parts: [["plain", part], ["computed", whole - part]], text: tell(part, whole) };
    });
    this.sources.show(points, tell(found, placed));
    renew(this.sourcesLegend, [found, placed], () => [["plain", "Cached", found], ["computed", "Computed", placed - found]].map(([kind, word, tokens]) =>
      h("span", { class: `key ${kind}` }, `${word} `, h("b", {}, placed ? percent(tokens / placed) : "–"))));
    const names = ["foreword:router_in_flight", "foreword:router_queue_length"];
    const loads = columnsOf(timeline, range).map(([from, to]) => {
      const values = timeline.mostOf(from, to, names);
      return { from, values, text: Number.isFinite(values[0]) ? `at most ${count(values[0])} in flight, ${count(values[1])} queued` : "not known" };
    });
    this.load.show(loads, `Now ${loads[loads.length - 1].text}.`);
  }

  drawExpected(period, now) {
    const rows = now.replicas.map(({ replica }) => [replica, period.delta(EXPECTED, { replica }), period.delta(FOUND, { replica })]);
    renew(this.expected, rows, () => {
      const most = Math.max(1, ...rows.flatMap(([, expected, found]) => [expected, found]));
      return rows.length ? table([["Replica"], ["Expected", "n"], ["Actual", "n"], ["Actual of expected", "n wide"]], rows.map(([url, expected, found]) =>
        h("tr", { "data-expected": url },
          h("td", {}, shortOf(url), h("div", { class: "bar thin plain", title: `expected ${count(expected)}` }, segment(expected / most, "tone light")), h("div", { class: "bar thin plain", title: `actual ${count(found)}` }, segment(found / most, "tone"))),
          h("td", { class: "n" }, count(expected)), h("td", { class: "n" }, count(found)), h("td", { class: "n wide" }, expected ? percent(found / expected) : "–")))) : empty("There is no replica yet.");
    });
  }
}

function replicaCard(one, sent, all) {
  const [word, tone] = one.drained ? ["draining", "warn"] : one.reason ? ["not used", "bad"] : ["ready", "good"];
  const facts = [
    ["Requests", `${count(sent)} of ${count(all)}, ${all ? percent(sent / all) : "–"}`],
    ["In flight", `${count(one.in_flight)}, ${count(one.waiting || 0)} before the first token`],
    ["Queued prompts", `${count(one.queued_tokens)} tokens`],
    ["Prefill speed", one.costs && one.costs.prefill_seconds_per_token > 0 ? `${count(1 / one.costs.prefill_seconds_per_token)} tokens/s` : "not measured yet"],
    ["Cached blocks", one.kv_events && one.kv_events.length ? `${count(one.known_blocks)} blocks, from KV events` : `${count(one.estimated_blocks || 0)} blocks, estimated`],
  ];
  const share = h("div", { class: "bar thin plain", "aria-hidden": "true" }, segment(all ? sent / all : 0, "tone"));
  return h("section", { class: "card replica", "data-replica": one.replica, "data-sent": sent },
    h("h2", {}, h("span", {}, shortOf(one.replica)), h("span", { class: `pill ${tone}` }, word), one.role === "both" ? null : h("small", {}, one.role)),
    one.reason && !one.drained ? h("p", { class: "note broken" }, one.reason) : null,
    h("div", { class: "places" },
      one.device ? devicePlace({ ...one.device, each: NaN }) : one.usage !== null ? usagePlace(one.usage) : h("p", { class: "empty" }, "Its memory use is unknown."),
      one.tiers.map(tierPlace)),
    h("dl", {}, facts.flatMap(([name, text], row) => [h("dt", {}, name), h("dd", {}, text), row ? null : share])));
}

function decisionTable(rows) {
  return table([["Time"], ["Request", "wide"], ["Dialect", "wide"], ["To"], ["Prompt", "n wide"], ["Expected", "n"], ["Why"], ["Cache miss", "wide"]], rows.map((one) =>
    h("tr", { "data-decision": one.request_id, class: one.replica ? null : "bad" },
      h("td", { class: "t" }, clock(one.time)), h("td", { class: "id wide", title: one.request_id }, one.request_id), h("td", { class: "wide" }, one.dialect),
      h("td", { class: "t" }, one.replica ? shortOf(one.replica) : "none", h("br"), h("small", {}, REASONS[one.reason] || one.reason)),
      h("td", { class: "n wide" }, count(one.prompt_tokens)), h("td", { class: "n" }, count(one.expected_cached_tokens)), h("td", { class: "why" }, shortOf(one.in_words)), h("td", { class: "why wide" }, missCause(one.miss)))));
}
