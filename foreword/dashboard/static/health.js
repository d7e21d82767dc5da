// What is wrong with each replica of a fleet: its last requests against those of the others.

import { count, percent, seconds } from "./dom.js";

// How many times the others' median is slow: little where there are some requests, much where there are few, as at a replica that
// placement avoids. Smaller differences say nothing.
const SLOW = [[10, 2], [3, 4], [1, 5]];
const LEAST = { ttft: 0.02, itl: 0.005 };
const BUSY = 3;
const MIN_BUSY = 8;
const FEW_HITS = 0.5;
const MIN_TOKENS = 20000;
// How each state is shown: its rank (the worst is 0) and its tone.
const STATES = {
  failing: [0, "bad"], "not used": [1, "bad"], slow: [2, "warn"], full: [3, "warn"], busy: [4, "warn"], "few hits": [5, "warn"],
  draining: [6, "warn"], ready: [7, "good"], unused: [8, "none"],
};
export const HEALTHY = 7;

const times = (value) => (value >= 9.5 ? count(value) : value.toFixed(1));
const fallsShort = (row, share) => row.asked >= MIN_TOKENS && share > 0.1 && row.actual / row.asked < FEW_HITS * share;

// For each row the median of the others' medians of `kind`, without sorting again for each.
function medians(rows, kind) {
  const known = rows.filter((row) => row[kind]).sort((a, b) => a[kind][0] - b[kind][0]);
  const found = new Map();
  known.forEach((row, place) => {
    const middle = (known.length - 1) >> 1;
    const other = known[middle < place ? middle : middle + 1];
    if (other) found.set(row.replica, other[kind][0]);
  });
  return found;
}

function slowness(row, kind, word, others) {
  const usual = others.get(row.replica);
  return usual !== undefined && SLOW.some(([requests, ratio]) => row[kind][2] >= requests && row[kind][0] > ratio * usual) && row[kind][0] - usual > LEAST[kind]
    ? `${word} median ${seconds(row[kind][0])}, ${times(row[kind][0] / Math.max(usual, 1e-9))} times that of the others (${seconds(usual)})` : null;
}

function stateOf(row, usual) {
  if (row.failures >= 2 && row.failures * 2 >= row.ended) return ["failing", `${row.failures} of its last ${row.ended} requests failed: ${row.problem}`];
  if (row.drained) return ["draining", ""];
  if (row.reason) return row.reason.startsWith("overloaded") ? ["full", row.reason] : ["not used", row.reason];
  const slow = slowness(row, "ttft", "TTFT", usual.ttft) || slowness(row, "itl", "ITL", usual.itl);
  if (slow) return ["slow", slow];
  if (row.in_flight >= MIN_BUSY && row.in_flight > BUSY * usual.flight) return ["busy", `${count(row.in_flight)} requests in flight, ${count(usual.flight)} at the others`];
  if (fallsShort(row, usual.share)) return ["few hits", `${percent(row.actual / row.asked)} of its prompt tokens cached, ${percent(usual.share)} in the fleet`];
  return row.ended || row.ttft || row.sent ? ["ready", ""] : ["unused", ""];
}

// The rows with `state` {word, tone, rank, why}, the worst first; equally bad ones in the order of their names.
export function judged(rows) {
  const flights = rows.map((row) => row.in_flight).sort((a, b) => a - b);
  const [asked, actual] = [rows.reduce((sum, row) => sum + row.asked, 0), rows.reduce((sum, row) => sum + row.actual, 0)];
  const usual = { ttft: medians(rows, "ttft"), itl: medians(rows, "itl"), flight: flights[(flights.length - 1) >> 1] || 0, share: asked ? actual / asked : 0 };
  return rows.map((row) => {
    const [word, why] = stateOf(row, usual);
    const [rank, tone] = STATES[word];
    const base = usual.ttft.get(row.replica);
    return { ...row, state: { word, why, rank, tone }, ratio: base ? row.ttft[0] / base : null };
  }).sort((a, b) => a.state.rank - b.state.rank || (b.ratio || 0) * (a.state.word === "slow") - (a.ratio || 0) * (a.state.word === "slow") || (a.replica < b.replica ? -1 : 1));
}
