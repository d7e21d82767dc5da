// Building blocks of both views.

import { NONE, h } from "./dom.js";

const COLUMNS = 60;
const WIDTHS = [5, 10, 15, 20, 30];

export const card = (classes, title, ...rest) => h("section", { class: `card ${classes}` }, h("h2", {}, title), ...rest);

export function figure(field, title) {
  const big = h("p", { class: "big", "data-field": field }, NONE);
  const sub = h("p", { class: "sub", "data-field": `${field}-sub` });
  return { element: card("figure w4", title, big, sub), set: (value, text) => { big.textContent = value; sub.textContent = text; } };
}

export const empty = (text) => h("p", { class: "empty" }, text);

export const table = (heads, rows) => h("table", {},
  h("thead", {}, h("tr", {}, heads.map(([word, classes, order]) => h("th", { class: classes, scope: "col", "aria-sort": order }, word)))), h("tbody", {}, rows));

// Edges of the charts' columns, in seconds: as long as the period, or as the server has been up.
export function columnsOf(timeline, range) {
  const span = Math.min(range || 1800, timeline.last.t - (timeline.start || 0));
  const width = WIDTHS.find((one) => one * COLUMNS >= span) || WIDTHS[WIDTHS.length - 1];
  const end = Math.ceil(timeline.last.t / width) * width;
  return Array.from({ length: COLUMNS }, (_, number) => [end - (COLUMNS - number) * width, end - (COLUMNS - number - 1) * width]);
}
