// How full a device and each tier are.

import { bytes, count, h, percent, segment } from "./dom.js";
import { kindOf, wordOf } from "./sources.js";

// Blocks in use and cached without use, and both in words. `free` blocks may still hold KV: `idle` is the number of those.
export function deviceText({ all, pinned, free, cached, each }) {
  const used = Math.max(0, all - free - pinned);
  const idle = Math.max(0, Math.min(free, cached - (all - free)));
  const text = `${percent((pinned + used + idle) / all)} full: ${count(cached)} of ${count(all)} blocks cached${Number.isFinite(each) ? `, ${bytes(all * each)} in all` : ""}`;
  return { used, idle, text };
}

export function devicePlace(device) {
  const { all, pinned, cached } = device;
  const { used, idle, text } = deviceText(device);
  return h("div", { class: "place device", "data-place": "device", "data-cached": cached },
    h("b", {}, "Device"),
    h("div", { class: "bar", role: "img", "aria-label": `Device: ${text}` },
      segment(pinned / all, "tone deep", `${count(pinned)} pinned`), segment(used / all, "tone", `${count(used)} in use`), segment(idle / all, "tone light", `${count(idle)} cached, evictable`)),
    h("p", {}, text),
    h("p", { class: "legend" }, h("span", { class: "key device" }, `in use ${percent(used / all)}`), h("span", { class: "key device light" }, `cached ${percent(idle / all)}`), pinned > 0 && h("span", {}, `pinned ${count(pinned)} blocks`)));
}

export const tierText = ({ held, budget, blocks }) =>
  (blocks < 0 ? "size unknown" : budget ? `${percent(held / budget)} full: ${bytes(held)} of ${bytes(budget)}` : `${bytes(held)}, no size limit`);

export function tierPlace({ tier, held, budget, blocks, pinned, open, facts = [] }) {
  const size = tierText({ held, budget, blocks });
  const more = [blocks >= 0 ? `${count(blocks)} blocks` : null, ...facts].filter(Boolean).join(", ");
  return h("div", { class: `place ${kindOf(tier)}`, "data-place": tier, "data-bytes": held },
    h("b", {}, wordOf(tier)),
    budget ? h("div", { class: "bar", role: "img", "aria-label": `${tier}: ${size}` },
      segment(pinned / budget, "tone deep", `${bytes(pinned)} pinned`), segment((held - pinned) / budget, "tone")) : h("span"),
    h("p", {}, open ? h("span", { class: "broken" }, "Circuit open: this tier keeps failing. ") : null, more ? `${size}; ${more}` : size));
}
