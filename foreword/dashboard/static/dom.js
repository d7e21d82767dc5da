// Elements and numbers. Text reaches the page as text nodes only, whatever is in it.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export const h = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
export const svg = (tag, attributes = {}, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

// Part of a bar: `share` of its width.
export function segment(share, classes, title) {
  const part = h("i", { class: classes, title });
  part.style.width = `${Math.max(0, Math.min(1, share || 0)) * 100}%`;
  return part;
}

// Rebuilds a place in the page only when what it shows has changed, so that focus and selection stay.
export function renew(place, shown, build) {
  const signature = JSON.stringify(shown);
  if (place.signature === signature) return;
  place.signature = signature;
  place.replaceChildren(...[build(shown)].flat(Infinity).filter(Boolean));
}

// How a figure without data is shown, everywhere: never as 0, and with the reason beside it.
export const NONE = "–";
export const nothing = (why) => h("small", { class: "nothing", title: why, "aria-label": `not known: ${why}` }, NONE);

export const count = (value) => (Number.isFinite(value) ? Math.round(value).toLocaleString("en") : NONE);

export const percent = (share) => {
  if (!Number.isFinite(share)) return NONE;
  const value = share * 100;
  return `${value > 0 && value < 10 ? value.toFixed(1) : Math.round(value)} %`;
};

export function bytes(value) {
  if (!Number.isFinite(value)) return NONE;
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) { value /= 1024; unit += 1; }
  return `${unit && value < 100 ? value.toFixed(1) : Math.round(value)} ${units[unit]}`;
}

export function seconds(value) {
  if (value === null || !Number.isFinite(value)) return NONE;
  if (value < 0.0995) return `${(value * 1000).toFixed(value < 0.00995 ? 1 : 0)} ms`;
  return value < 10 ? `${value.toFixed(2)} s` : value < 120 ? `${value.toFixed(1)} s` : `${Math.round(value / 60)} min`;
}

export const clock = (at, withSeconds = true) =>
  new Date(at * 1000).toLocaleTimeString("en-GB", withSeconds ? {} : { hour: "2-digit", minute: "2-digit" });

export function ago(at, now) {
  if (!at) return "never";
  const past = Math.max(0, now - at);
  if (past < 60) return `${Math.round(past)} s ago`;
  if (past < 3600) return `${Math.round(past / 60)} min ago`;
  return past < 172800 ? `${Math.round(past / 3600)} h ago` : `${Math.round(past / 86400)} days ago`;
}
