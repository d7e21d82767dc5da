// The view of a router.

import { Lines, Shares } from "./charts.js";
import { NONE, count, h, percent, renew, seconds } from "./dom.js";
import { ReplicaTable, decisionLegend, decisionTable } from "./fleet.js";
import { HEALTHY, judged } from "./health.js";
import { Outcomes } from "./outcomes.js";
import { card, columnsOf, empty, figure } from "./parts.js";
import { Sharing } from "./sharing.js";
import { Strip } from "./strip.js";

// As replicas report them, under every policy.
const ASKED = "foreword:router_usage_prompt_tokens_total";
const FOUND = "foreword:router_usage_cached_tokens_total";
const EXPECTED = "foreword:router_expected_cached_tokens_total";
const DECIDED = "foreword:router_decisions_total";
const TTFT = "foreword:router_time_to_first_token_seconds";
const ITL = "foreword:router_time_per_output_token_seconds";
const FAILED = "foreword:router_failures_total";
const SHOWN_DECISIONS = 5;

// The sum over all series of a metric, of a map of values or of a period.
const sum = (timeline, value, name) => [...timeline.last.values.keys()].filter((key) => key === name || key.startsWith(`${name}|`)).reduce((all, key) => all + value(key), 0);

// What the header says of the fleet if the router itself is well: the number of replicas in the worst state, and its tone.
export function worstOf(rows) {
  const [first] = rows;
  if (!first || first.state.rank >= HEALTHY) return null;
  const tone = first.state.tone;
  const those = rows.filter((row) => row.state.tone === tone && row.state.rank < HEALTHY);
  const same = those.every((row) => row.state.word === first.state.word);
  const word = same ? (first.state.word === "not used" ? "down" : first.state.word) : tone === "bad" ? "failing or down" : "need attention";
  return [`${count(those.length)} of ${count(rows.length)} ${word}`, tone];
}

export class RouterView {
  constructor(root) {
    const share = (timeline, before, after) => {
      const delta = (name) => sum(timeline, (key) => (after.get(key) || 0) - (before.get(key) || 0), name);
      return delta(FOUND) / delta(ASKED);
    };
    const median = (name) => (timeline, before, after) => timeline.quantile(after, before, name, 0.5);
    const most = (timeline, before, after, from, to) => timeline.mostOf(from, to, ["foreword:router_in_flight"])[0];
    this.hit = figure("hit-share", "Cache hit rate", { past: share, word: percent });
    this.first = figure("first-token", "Time to first token (TTFT), median", { past: median(TTFT), word: seconds });
    this.next = figure("inter-token", "Inter-token latency (ITL), median", { past: median(ITL), word: seconds });
    this.outcomes = new Outcomes("foreword:router_");
    this.flight = figure("in-flight", "Requests in flight", { past: most, word: count });
    this.moved = figure("moved", "Sessions moved");
    this.replicas = new ReplicaTable();
    this.strip = new Strip((replica) => this.replicas.choose(replica));
    this.sharing = new Sharing();
    this.count = h("small");
    this.sources = new Shares("Prompt tokens cached at the chosen replica, over time", 170);
    this.sourcesLegend = h("p", { class: "legend" });
    this.load = new Lines("Requests in flight and queued at the router, over time", 170, ["running", "waiting"]);
    this.decisions = h("div", { id: "decisions" });
    this.open = false; // whether earlier decisions are shown
    const legend = h("p", { class: "legend" },
      h("span", {}, h("span", { class: "swatch-line" }), "in flight"), h("span", {}, h("span", { class: "swatch-line waiting" }), "queued here"));
    root.replaceChildren(
      this.strip.element,
      this.hit.element, this.first.element, this.next.element, this.flight.element, this.moved.element, this.outcomes.errors.element,
      card("", h("span", {}, "Replicas ", this.count), this.replicas.element),
      card("w7", h("span", {}, "Shared prefixes ", h("small", {}, "of recent prompts, and where they are")), this.sharing.prefixes),
      card("w5", h("span", {}, "Why tenants miss ", h("small", {}, "in the last decisions; open one for its requests")), this.sharing.tenants),
      card("w6", "Cached prompt tokens", this.sources.element, this.sourcesLegend),
      card("w6", "Requests", this.load.element, legend),
      ...this.outcomes.cards,
      card("", "Last decisions", decisionLegend(), this.decisions),
    );
  }

  draw(timeline, now, range) {
    if (!timeline.last || !now) return;
    const period = timeline.period(range);
    const total = (name) => sum(timeline, period.deltaOf, name);
    const level = (name) => sum(timeline, (key) => timeline.last.values.get(key), name);
    const [asked, found] = [total(ASKED), total(FOUND)];
    this.hit.set(asked ? percent(found / asked) : NONE, asked ? `${count(found)} of ${count(asked)}` : "no usage with cached tokens in this period");
    const firsts = period.delta(`${TTFT}_count`);
    this.first.set(firsts ? seconds(period.quantile(TTFT, 0.5)) : NONE, firsts ? `p99 ${seconds(period.quantile(TTFT, 0.99))}, of ${count(firsts)} requests` : "no streams in this period");
    const streams = period.delta(`${ITL}_count`);
    this.next.set(streams ? seconds(period.quantile(ITL, 0.5)) : NONE, streams ? `p99 ${seconds(period.quantile(ITL, 0.99))}, of ${count(streams)} requests' means` : "no streams in this period");
    this.outcomes.draw(timeline, period);
    this.flight.set(count(level("foreword:router_in_flight")), `${count(level("foreword:router_queue_length"))} queued here`);
    this.moved.set(count(total("foreword:router_sessions_moved_total")), `${count(level("foreword:router_sessions"))} sessions known`);
    for (const one of [this.hit, this.first, this.next, this.flight]) one.look(timeline);
    this.drawReplicas(timeline, period, now);
    this.drawCharts(timeline, range, asked, found);
    renew(this.decisions, now.decisions, (rows) => (rows.length ? this.decided(rows) : empty("None since the router started.")));
  }

  // The newest decisions; the others are behind one line.
  decided(rows) {
    const rest = rows.slice(SHOWN_DECISIONS);
    if (!rest.length) return decisionTable(rows);
    const more = h("details", { open: this.open }, h("summary", { "data-rest": rest.length }, `${count(rest.length)} earlier ones`), this.open ? decisionTable(rest) : null);
    more.addEventListener("toggle", () => {
      if (more.open === this.open) return;
      this.open = more.open;
      if (this.open) more.append(decisionTable(rest)); else more.lastChild.remove();
    });
    return [decisionTable(rows.slice(0, SHOWN_DECISIONS)), more];
  }

  drawReplicas(timeline, period, now) {
    const rows = now.replicas.map((one) => {
      const of = (name) => period.delta(name, { replica: one.replica });
      return { ...one, sent: of(DECIDED), expected: of(EXPECTED), asked: of(ASKED), actual: of(FOUND), failed: of(FAILED) };
    });
    const ready = rows.filter((row) => !row.reason).length;
    this.count.textContent = rows.length ? `${count(ready)} of ${count(rows.length)} take requests` : "There is no replica yet.";
    const found = judged(rows);
    this.worst = worstOf(found);
    this.strip.show(found, now);
    this.replicas.show(found, now.fleet);
    this.sharing.show(now);
  }

  drawCharts(timeline, range, asked, found) {
    const tell = (part, whole) => (whole ? `${percent(part / whole)} of ${count(whole)} tokens cached` : NONE);
    const points = columnsOf(timeline, range).map(([from, to]) => {
      const [before, after] = [timeline.at(from), timeline.at(to)];
      const delta = (name) => Math.max(0, sum(timeline, (key) => (after.get(key) || 0) - (before.get(key) || 0), name));
      const whole = delta(ASKED);
      const part = Math.min(whole, delta(FOUND));
      return { from, parts: [["plain", part], ["computed", whole - part]], text: tell(part, whole) };
    });
    this.sources.show(points, tell(found, asked));
    renew(this.sourcesLegend, [found, asked], () => [["plain", "Cached", found], ["computed", "Computed", asked - found]].map(([kind, word, tokens]) =>
      h("span", { class: `key ${kind}` }, `${word} `, h("b", {}, asked ? percent(tokens / asked) : NONE))));
    const names = ["foreword:router_in_flight", "foreword:router_queue_length"];
    const loads = columnsOf(timeline, range).map(([from, to]) => {
      const values = timeline.mostOf(from, to, names);
      return { from, values, text: Number.isFinite(values[0]) ? `at most ${count(values[0])} in flight, ${count(values[1])} queued` : "not known" };
    });
    this.load.show(loads, `Now ${loads[loads.length - 1].text}.`);
  }
}
