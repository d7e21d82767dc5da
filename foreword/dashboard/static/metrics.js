// Prometheus' text format, and what the counters did in a period.

const LINE = /^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)/;
const LABEL = /([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"/g;
// Buckets only of the histograms whose quantiles are shown.
const UNSHOWN = /_created$|(?<!vllm:time_to_first_token_seconds|:inter_token_latency_seconds|:router_time_per_output_token_seconds|:router_time_to_first_token_seconds)_bucket$/;
const ROUTER = /^foreword:router_/;
const BY_REPLICA = /^foreword:router_(decisions|failures|expected_cached_tokens|usage_prompt_tokens|usage_cached_tokens)_total$/;
const KEEP = 3600;

// A server has one model; a router may have several. Few metrics are shown by replica, so that the work stays small in a large
// fleet; the others are sums over the replicas. `metric_history.py` keeps the same.
const isKept = (name, label) => (label === "model_name" ? ROUTER.test(name) : label === "replica" ? BY_REPLICA.test(name) : label !== "reason" || !ROUTER.test(name));

export const keyOf = (name, labels = {}) => name + Object.keys(labels).filter((label) => isKept(name, label)).sort().map((label) => `|${label}=${labels[label]}`).join("");

const unescape = (text) => text.replace(/\\(.)/g, (_, one) => (one === "n" ? "\n" : one));

export function parse(text) {
  const values = new Map();
  for (const line of text.split("\n")) {
    const found = line[0] === "#" ? null : LINE.exec(line);
    if (!found || UNSHOWN.test(found[1])) continue;
    const labels = {};
    for (const [, label, value] of (found[2] || "").matchAll(LABEL)) labels[label] = unescape(value);
    const key = keyOf(found[1], labels);
    values.set(key, (values.get(key) || 0) + Number(found[3].replace("Inf", "Infinity")));
  }
  return values;
}

// Samples of the last hour, oldest first: those that the server kept, then our own.
export class Timeline {
  constructor() { this.samples = []; }

  get last() { return this.samples[this.samples.length - 1]; }

  // Since when anything is known: the server's start, or the oldest sample.
  get since() { return this.samples.length ? Math.max(this.start || 0, this.samples[0].t - KEEP) : Infinity; }

  load(history) {
    const keys = history.series.map(([name, labels]) => keyOf(name, labels));
    const known = history.times.map((t, row) => {
      const values = new Map();
      history.values[row].forEach((value, column) => { if (value !== null) values.set(keys[column], value); });
      return { t, values };
    });
    this.samples = [...this.samples, ...known].sort((a, b) => a.t - b.t);
    this.trim();
  }

  push(t, values) {
    const start = values.get("process_start_time_seconds");
    if (this.start !== undefined && start !== this.start) this.samples = this.samples.filter((one) => one.t > start);
    this.start = start;
    this.samples.push({ t, values });
    if (this.samples.length % 60 === 0) this.trim();
  }

  // Every second for five minutes, then every ten seconds.
  trim() {
    const now = this.last ? this.last.t : 0;
    let before = -Infinity;
    this.samples = this.samples.filter(({ t }) => {
      if (t < now - KEEP - 30 || (t < now - 300 && t - before < 9.5)) return false;
      before = t;
      return true;
    });
  }

  // The sample that held at a time; before the first one all counters were 0, unless the server is
  // older than what is remembered.
  at(t) {
    let low = 0;
    let high = this.samples.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.samples[middle].t <= t) low = middle + 1; else high = middle;
    }
    if (low) return this.samples[low - 1].values;
    const first = this.samples[0];
    return first && this.start <= first.t - KEEP && t > this.start ? first.values : new Map();
  }

  // The largest values of gauges between two times.
  most(from, to, keys) {
    const found = keys.map(() => NaN);
    for (const { t, values } of this.samples) {
      if (t < from || t >= to) continue;
      keys.forEach((key, number) => {
        const value = values.get(key);
        if (value !== undefined && !(value <= found[number])) found[number] = value;
      });
    }
    return found;
  }

  // The same of sums over all of a metric's series.
  mostOf(from, to, names) {
    const found = names.map(() => NaN);
    for (const { t, values } of this.samples) {
      if (t < from || t >= to) continue;
      names.forEach((name, number) => {
        let all = NaN;
        for (const [key, value] of values) if (key.startsWith(`${name}|`) || key === name) all = (all || 0) + value;
        if (Number.isFinite(all) && !(all <= found[number])) found[number] = all;
      });
    }
    return found;
  }

  // Since when the figures of a period are known. `range` 0 is since the server's start.
  period(range) {
    const now = this.last.t;
    const values = this.last.values;
    const base = range ? this.at(now - range) : new Map();
    const get = (name, labels) => values.get(keyOf(name, labels)) || 0;
    return {
      now,
      gauge: (name, labels) => values.get(keyOf(name, labels)),
      deltaOf: (key) => Math.max(0, (values.get(key) || 0) - (base.get(key) || 0)),
      quantile: (name, share) => this.quantile(values, base, name, share),
      delta: (name, labels) => Math.max(0, get(name, labels) - (base.get(keyOf(name, labels)) || 0)),
    };
  }

  // A quantile of a histogram without labels, as Prometheus' histogram_quantile.
  quantile(values, base, name, share) {
    const edges = this.labels(`${name}_bucket`, "le").map((le) => [Number(le.replace("Inf", "Infinity")), le]).sort(([a], [b]) => a - b);
    const counts = edges.map(([, le]) => { const key = keyOf(`${name}_bucket`, { le }); return (values.get(key) || 0) - (base.get(key) || 0); });
    const wanted = share * (counts[counts.length - 1] || 0);
    const found = counts.findIndex((number) => number >= wanted && number > 0);
    if (found < 0) return NaN;
    const [low, before] = found ? [edges[found - 1][0], counts[found - 1]] : [0, 0];
    return Number.isFinite(edges[found][0]) ? low + (edges[found][0] - low) * (wanted - before) / (counts[found] - before) : low;
  }

  // Values of one label of a metric, in the order in which the server gives them.
  labels(name, label) {
    const start = `${name}|`;
    const found = new Set();
    for (const key of this.last.values.keys()) {
      if (!key.startsWith(start)) continue;
      for (const part of key.slice(start.length).split("|")) if (part.startsWith(`${label}=`)) found.add(part.slice(label.length + 1));
    }
    return [...found];
  }
}
