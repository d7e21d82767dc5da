// Building blocks of both views.

import { NONE, h, svg } from "./dom.js";

const COLUMNS = 60;
const WIDTHS = [5, 10, 15, 20, 30, 60];

export const card = (classes, title, ...rest) => h("section", { class: `card ${classes}` }, h("h2", {}, title), ...rest);

const HOUR = 3600;
const SPARK_COLUMNS = 40;
const SPARK_EVERY = 10; // seconds between two computations: each reads hundreds of samples
const [SPARK_WIDTH, SPARK_HEIGHT] = [160, 26];

// A figure's last hour as a line that starts at zero; a column in which nothing was measured is a gap. The label says what the
// line shows, for readers that see no lines.
function spark(values, word) {
  const known = values.filter(Number.isFinite);
  if (known.length < 2) return null;
  const [low, high] = [Math.min(...known), Math.max(...known)];
  const step = SPARK_WIDTH / values.length;
  let path = "";
  values.forEach((value, number) => {
    if (!Number.isFinite(value)) return;
    const y = SPARK_HEIGHT - 1 - (high > 0 ? value / high : 0) * (SPARK_HEIGHT - 3);
    const joined = number > 0 && Number.isFinite(values[number - 1]);
    path += `${joined ? "L" : "M"}${(number * step).toFixed(1)},${y.toFixed(1)}H${((number + 1) * step).toFixed(1)}`;
  });
  const text = `Last hour: ${word(low)} to ${word(high)}, now ${word(known[known.length - 1])}`;
  const line = svg("path", { class: "line", d: path });
  return svg("svg", { class: "spark", viewBox: `0 0 ${SPARK_WIDTH} ${SPARK_HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": text }, line);
}

// `past(timeline, before, after, from, to)` gives the figure's value in a column of the last hour, and `word` its text.
export function figure(field, title, { past, word } = {}) {
  const big = h("p", { class: "big", "data-field": field }, NONE);
  const sub = h("p", { class: "sub", "data-field": `${field}-sub` });
  const line = h("div", { class: "past", "data-field": `${field}-past` });
  let drawn = -Infinity;
  return {
    element: card("figure w4", title, big, sub, past ? line : null),
    set: (value, text) => { big.textContent = value; sub.textContent = text; },
    look: (timeline) => {
      const now = timeline.last.t;
      if (!past || Math.abs(now - drawn) < SPARK_EVERY) return;
      drawn = now;
      const width = HOUR / SPARK_COLUMNS;
      const values = Array.from({ length: SPARK_COLUMNS }, (_, number) => {
        const from = now - (SPARK_COLUMNS - number) * width;
        if (from + width <= timeline.since) return NaN;
        return past(timeline, timeline.at(from), timeline.at(from + width), from, from + width);
      });
      line.replaceChildren(...[spark(values, word)].filter(Boolean));
    },
  };
}

export const empty = (text) => h("p", { class: "empty" }, text);

export const table = (heads, rows) => h("table", {},
  h("thead", {}, h("tr", {}, heads.map(([word, classes, order]) => h("th", { class: classes, scope: "col", "aria-sort": order }, word)))), h("tbody", {}, rows));

// Edges of the charts' columns, in seconds: as long as the period, or as the server has been up.
export function columnsOf(timeline, range) {
  const span = Math.min(range || HOUR, timeline.last.t - (timeline.start || 0));
  const width = WIDTHS.find((one) => one * COLUMNS >= span) || WIDTHS[WIDTHS.length - 1];
  const end = Math.ceil(timeline.last.t / width) * width;
  return Array.from({ length: COLUMNS }, (_, number) => [end - (COLUMNS - number) * width, end - (COLUMNS - number - 1) * width]);
}
