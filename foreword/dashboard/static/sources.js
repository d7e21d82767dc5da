// Sources of KV: a few kinds with one color each, independent of the tiers' labels.

const ORDER = ["device", "memory", "disk", "shared", "peer", "computed"];

export function kindOf(label) {
  if (label === "device" || label === "memory" || label === "disk" || label === "computed") return label;
  if (/^(memory|ram|host)/i.test(label)) return "memory";
  if (/^(disk|nvme|ssd)/i.test(label)) return "disk";
  return /^(peer|prefill|transfer|decode)/i.test(label) ? "peer" : "shared";
}

export const bySpeed = (a, b) => ORDER.indexOf(kindOf(a)) - ORDER.indexOf(kindOf(b)) || (a < b ? -1 : a > b ? 1 : 0);
export const wordOf = (label) => label.charAt(0).toUpperCase() + label.slice(1);
