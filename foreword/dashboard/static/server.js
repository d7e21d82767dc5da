// The view of one engine.

import { Lines, Shares } from "./charts.js";
import { NONE, ago, bytes, clock, count, h, percent, renew, seconds, segment } from "./dom.js";
import { Outcomes, missCause } from "./outcomes.js";
import { card, columnsOf, empty, figure, table } from "./parts.js";
import { devicePlace, tierPlace } from "./places.js";
import { bySpeed, kindOf, wordOf } from "./sources.js";

const SOURCE = "vllm:prompt_tokens_cached_by_source_total";
const FIRST = "vllm:time_to_first_token_seconds";
const TTFT = "foreword:time_to_first_token_by_cached_seconds";
const ITL = "vllm:inter_token_latency_seconds";
const SHARES = [["none", "No hit", "computed"], ["some", "Under half", "device light"], ["most", "Half or more", "device"]];

export class ServerView {
  constructor(root) {
    const share = (timeline, before, after) => {
      const delta = (name) => (after.get(name) || 0) - (before.get(name) || 0);
      return delta("vllm:prefix_cache_hits_total") / delta("vllm:prefix_cache_queries_total");
    };
    const median = (name) => (timeline, before, after) => timeline.quantile(after, before, name, 0.5);
    const most = (timeline, before, after, from, to) => timeline.most(from, to, ["vllm:num_requests_running"])[0];
    this.hit = figure("hit-share", "Prefix cache hit rate", { past: share, word: percent });
    this.first = figure("first-token", "Time to first token (TTFT), median", { past: median(FIRST), word: seconds });
    this.next = figure("inter-token", "Inter-token latency (ITL), median", { past: median(ITL), word: seconds });
    this.outcomes = new Outcomes("foreword:");
    this.requests = figure("running", "Requests running", { past: most, word: count });
    this.rate = figure("rate", "Tokens per second");
    this.places = h("div", { class: "places", id: "places" });
    this.sources = new Shares("Where prompt tokens came from, over time", 190);
    this.sourcesLegend = h("p", { class: "legend", id: "sources" });
    this.ttft = h("div", { class: "ttft", id: "ttft" });
    this.load = new Lines("Requests running and waiting, over time", 130, ["running", "waiting"]);
    this.prefixes = h("div", { id: "prefixes" });
    this.commonPrefixes = h("div", { id: "common-prefixes" });
    this.recent = h("div", { id: "recent" });
    const legend = h("p", { class: "legend" },
      h("span", {}, h("span", { class: "swatch-line" }), "running"), h("span", {}, h("span", { class: "swatch-line waiting" }), "waiting"));
    root.replaceChildren(
      this.hit.element, this.first.element, this.next.element, this.requests.element, this.rate.element, this.outcomes.errors.element,
      card("w7", "Where prompt tokens came from", this.sources.element, this.sourcesLegend),
      card("w5", "Where blocks are", this.places),
      card("w7", "Requests", this.load.element, legend),
      card("w5", h("span", {}, "Time to first token ", h("small", {}, "mean, by the cached share of the prompt")), this.ttft),
      card("w6", h("span", {}, "Named prefixes ", h("small", {}, "pinned until removed")), this.prefixes),
      card("w6", h("span", {}, "Common prefixes ", h("small", {}, "of recent requests")), this.commonPrefixes),
      ...this.outcomes.cards,
      card("", "Recent requests", this.recent),
    );
  }

  draw(timeline, now, range) {
    if (!timeline.last || timeline.last.values.get("foreword:blocks") === undefined) return;
    const period = timeline.period(range);
    const labels = [...new Set(["device", ...timeline.labels("foreword:tier_bytes", "tier"), ...timeline.labels(SOURCE, "source")])].sort(bySpeed);
    this.drawFigures(timeline, period);
    this.drawSources(timeline, period, labels, range);
    this.drawPlaces(timeline, period, now);
    this.drawTtft(period);
    this.outcomes.draw(timeline, period);
    this.drawLoad(timeline, range);
    if (now) this.drawTables(now, labels);
  }

  drawFigures(timeline, period) {
    const asked = period.delta("vllm:prefix_cache_queries_total");
    const hits = period.delta("vllm:prefix_cache_hits_total");
    this.hit.set(asked ? percent(hits / asked) : NONE, asked ? `${count(hits)} of ${count(asked)}` : "no prompts in this period");
    const firsts = period.delta(`${FIRST}_count`);
    this.first.set(firsts ? seconds(period.quantile(FIRST, 0.5)) : NONE, firsts ? `p99 ${seconds(period.quantile(FIRST, 0.99))}, of ${count(firsts)} requests` : "no requests in this period");
    const tokens = period.delta(`${ITL}_count`);
    this.next.set(tokens ? seconds(period.quantile(ITL, 0.5)) : NONE, tokens ? `p99 ${seconds(period.quantile(ITL, 0.99))}, of ${count(tokens)} tokens` : "no tokens in this period");
    this.requests.set(count(period.gauge("vllm:num_requests_running")), `${count(period.gauge("vllm:num_requests_waiting"))} waiting`);
    const recent = timeline.period(10);
    const speed = (name) => recent.delta(name) / 10;
    const computed = speed("vllm:prefix_cache_queries_total") - speed("vllm:prefix_cache_hits_total");
    for (const one of [this.hit, this.first, this.next, this.requests]) one.look(timeline);
    this.rate.set(count(speed("vllm:generation_tokens_total")), `generated; ${count(computed)} prompt tokens computed`);
  }

  drawSources(timeline, period, labels, range) {
    const columns = [];
    const tell = (parts, total) => (total ? `${parts.filter(([, amount]) => amount > 0).map(([, amount, label]) => `${label} ${percent(amount / total)}`).join(", ")} of ${count(total)} tokens` : "no prompts");
    for (const [from, to] of columnsOf(timeline, range)) {
      const [before, after] = [timeline.at(from), timeline.at(to)];
      const parts = this.partsOf((key) => (after.get(key) || 0) - (before.get(key) || 0), labels);
      columns.push({ from, parts, text: tell(parts, parts.reduce((sum, part) => sum + part[1], 0)) });
    }
    const parts = this.partsOf((key) => { const [name, source] = key.split("|source="); return period.delta(name, source === undefined ? {} : { source }); }, labels);
    const total = parts.reduce((sum, [, amount]) => sum + amount, 0);
    this.sources.show(columns, tell(parts, total));
    renew(this.sourcesLegend, parts.map(([kind, amount, label]) => [kind, label, total ? percent(amount / total) : NONE, count(amount)]), (shown) =>
      shown.map(([kind, label, share, tokens]) => h("span", { class: `key ${kind}`, "data-source": label, "data-tokens": tokens, title: `${tokens} tokens` }, `${wordOf(label)} `, h("b", {}, share))));
  }

  partsOf(value, labels) {
    const parts = labels.map((label) => [kindOf(label), Math.max(0, value(`${SOURCE}|source=${label}`)), label]);
    const computed = value("vllm:prefix_cache_queries_total") - value("vllm:prefix_cache_hits_total");
    return [...parts, ["computed", Math.max(0, computed), "computed"]];
  }

  drawPlaces(timeline, period, now) {
    const gauge = period.gauge;
    const each = now && now.model ? now.model.kv_bytes_per_block : NaN;
    const device = { all: gauge("foreword:blocks"), pinned: gauge("foreword:blocks_pinned"), free: gauge("foreword:blocks_free"), cached: gauge("foreword:blocks_cached"), each };
    const tiers = timeline.labels("foreword:tier_bytes", "tier").sort(bySpeed).map((tier) => {
      const read = (name) => gauge(`foreword:tier_${name}`, { tier });
      const done = (name) => period.delta(`foreword:tier_${name}_total`, { tier });
      const spent = done("read_seconds");
      return {
        tier, held: read("bytes"), budget: read("budget_bytes"), blocks: read("blocks"), pinned: read("pinned_bytes"), open: read("open"),
        facts: [`${count(done("hit_blocks"))} read`, spent ? `at ${bytes(done("read_bytes") / spent)}/s` : null, done("evictions") ? `${count(done("evictions"))} evicted` : null],
      };
    });
    renew(this.places, [device, tiers, gauge("foreword:store_queued_blocks")], ([shown, rows, queued]) => [
      devicePlace(shown), ...rows.map(tierPlace),
      queued > 0 && h("p", { class: "note" }, `${count(queued)} ${queued === 1 ? "block waits" : "blocks wait"} to be written.`),
    ]);
  }

  drawTtft(period) {
    const rows = SHARES.map(([share, word, tone]) => {
      const number = period.delta(`${TTFT}_count`, { cached: share });
      return [word, tone, number, number ? period.delta(`${TTFT}_sum`, { cached: share }) / number : null, share];
    });
    renew(this.ttft, rows, (shown) => {
      const longest = Math.max(...shown.map((row) => row[3] || 0)) || 1;
      return shown.flatMap(([word, tone, number, mean, share]) => [
        h("span", {}, word),
        h("div", { class: `bar ${tone.split(" ")[0]}` }, segment((mean || 0) / longest, `tone ${tone.split(" ")[1] || ""}`)),
        h("span", { "data-ttft": share, "data-count": number }, h("b", {}, seconds(mean)), " ", h("small", {}, `of ${count(number)}`)),
      ]);
    });
  }

  drawLoad(timeline, range) {
    const points = [];
    for (const [from, to] of columnsOf(timeline, range)) {
      const values = timeline.most(from, to, ["vllm:num_requests_running", "vllm:num_requests_waiting"]);
      points.push({ from, values, text: Number.isFinite(values[0]) ? `at most ${count(values[0])} running, ${count(values[1])} waiting` : "not known" });
    }
    this.load.show(points, `Now ${points[points.length - 1].text}.`);
  }

  drawTables(now, labels) {
    const at = Math.floor(now.time / 5) * 5;
    renew(this.prefixes, [now.prefixes, at], ([rows]) => (rows.length ? prefixTable(rows, at) : empty("None. Register one with `foreword prefix add` or POST /v1/prefixes.")));
    renew(this.commonPrefixes, now.common_prefixes, (rows) => (rows.length ? commonPrefixTable(rows) : empty("No two recent requests share a full block.")));
    const tiers = labels.length > 1;
    renew(this.recent, [now.requests, tiers], ([rows]) => (rows.length ? requestTable(rows, tiers) : empty("None since the server started.")));
  }
}

function prefixTable(rows, now) {
  return table([["Name"], ["Tokens", "n"], ["Pins", "n"], ["Uses", "n"], ["Reused", "n wide"], ["Last used", "n wide"]], rows.map((one) =>
    h("tr", { "data-prefix": one.name }, h("td", { class: "name" }, one.name, " ", h("small", {}, `v${one.version}`), one.ready ? null : h("small", {}, " not on the device")),
      h("td", { class: "n" }, count(one.num_tokens)), h("td", { class: "n" }, bytes(one.bytes)), h("td", { class: "n" }, count(one.uses)),
      h("td", { class: "n wide" }, `${count(one.hit_tokens)} tokens`), h("td", { class: "n wide" }, ago(one.last_used, now)))));
}

function commonPrefixTable(rows) {
  const most = Math.max(...rows.map((one) => one.users));
  return table([["Starts with"], ["Tokens", "n"], ["Blocks", "n"], ["On device", "n wide"], ["Requests", "n"]], rows.map((one) =>
    h("tr", { "data-common-prefix": one.tokens }, h("td", {}, commonPrefixName(one), h("div", { class: "bar thin device" }, segment(one.users / most, "tone"))),
      h("td", { class: "n" }, count(one.tokens)), h("td", { class: "n" }, count(one.blocks)), h("td", { class: "n wide" }, percent(one.on_device / one.blocks)), h("td", { class: "n" }, count(one.users)))));
}

function commonPrefixName(one) {
  if (one.starts_with) return h("b", {}, one.starts_with);
  return one.part_of.length ? h("span", {}, "part of ", h("b", {}, one.part_of.join(", "))) : "unnamed";
}

function requestTable(rows, tiers) {
  const heads = [["Ended"], ["Request", "wide"], ["Dialect", "wide"], ["Prompt", "n"], ["Cached"], ["TTFT", "n"], ["Total", "n wide"], ["Output", "n"], ["Cache miss reason", "wide"]];
  return table(heads, rows.slice(0, 25).map((one) => {
    const failed = one.finish_reason === "error" || one.finish_reason === "abort";
    return h("tr", { class: failed ? "bad" : null, "data-request": one.number },
      h("td", { class: "t" }, clock(one.ended)),
      h("td", { class: "id wide", title: one.id }, one.prefix ? h("b", {}, `${one.prefix} `) : null, one.id),
      h("td", { class: "wide" }, one.dialect),
      h("td", { class: "n" }, count(one.prompt_tokens)),
      h("td", {}, `${percent(one.cached_tokens / one.prompt_tokens)}`, sourceBar(one, tiers)),
      h("td", { class: "n" }, seconds(one.ttft)), h("td", { class: "n wide" }, seconds(one.seconds)),
      h("td", { class: "n" }, failed ? { error: "failed", abort: "aborted" }[one.finish_reason] : count(one.output_tokens)),
      h("td", { class: "why wide" }, missCause(one.miss), one.report ? one.report.detail : one.miss ? null : h("span", { title: "Cache reports are made while this page is open." }, NONE)));
  }));
}

function sourceBar(one, tiers) {
  const bar = h("div", { class: "bar thin" });
  const part = (label, tokens) => tokens > 0 && bar.append(segment(tokens / one.prompt_tokens, `tone ${kindOf(label)}`, `${label}: ${count(tokens)} tokens`));
  if (one.report) {
    part("device", one.report.device_tokens + one.report.copied_tokens);
    Object.entries(one.report.loaded_tokens).sort(([a], [b]) => bySpeed(a, b)).forEach(([label, tokens]) => part(label, tokens));
  } else if (!tiers) {
    part("device", one.cached_tokens);
  } else if (one.cached_tokens) {
    bar.append(segment(one.cached_tokens / one.prompt_tokens, "tone unknown", `${count(one.cached_tokens)} tokens from a cache`));
  }
  part("computed", one.prompt_tokens - one.cached_tokens);
  return bar;
}
