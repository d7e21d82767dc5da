// Two charts: shares as stacked columns, and lines. Both can be read with the pointer or the arrow keys.

import { clock, h, svg } from "./dom.js";

const LEFT = 44;
const BOTTOM = 20;
const TOP = 6;

class Chart {
  constructor(name, height) {
    this.height = height;
    this.name = name;
    this.picked = null;
    this.box = h("div", { class: "chart", tabindex: 0, role: "img" });
    this.readout = h("p", { class: "readout", "aria-live": "polite" });
    this.element = h("div", {}, this.box, this.readout);
    this.box.addEventListener("pointermove", (event) => this.pick(this.nearest(event)));
    this.box.addEventListener("pointerleave", () => this.pick(null));
    this.box.addEventListener("blur", () => this.pick(null));
    this.box.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.draw()).observe(this.box);
  }

  get length() { return this.points ? this.points.length : 0; }

  nearest(event) {
    const inside = event.clientX - this.box.getBoundingClientRect().left - LEFT;
    return Math.max(0, Math.min(this.length - 1, Math.floor((inside / this.plot) * this.length)));
  }

  key(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") this.pick(null);
    if (!step || !this.length) return;
    event.preventDefault();
    const from = this.picked === null ? (step < 0 ? this.length : -1) : this.picked;
    this.pick(Math.max(0, Math.min(this.length - 1, from + step)));
  }

  pick(number) {
    if (number === this.picked) return;
    this.picked = number;
    this.draw();
  }

  show(points, summary) {
    this.points = points;
    this.box.setAttribute("aria-label", `${this.name}. ${summary}`);
    this.draw();
  }

  draw() {
    const width = Math.max(180, this.box.clientWidth);
    if (!this.points || !this.box.clientWidth) return;
    this.plot = width - LEFT - 2;
    this.high = this.height - BOTTOM - TOP;
    const picture = svg("svg", { viewBox: `0 0 ${width} ${this.height}`, height: this.height, "aria-hidden": "true" });
    for (const [share, label] of this.scale()) {
      const y = TOP + (1 - share) * this.high;
      picture.append(svg("line", { class: "grid", x1: LEFT, x2: width, y1: y, y2: y }));
      picture.append(svg("text", { x: LEFT - 7, y: y + 4, "text-anchor": "end" }, label));
    }
    for (const [number, anchor] of [[0, "start"], [this.length >> 1, "middle"], [this.length - 1, "end"]]) {
      const point = this.points[number];
      if (!point) continue;
      const x = anchor === "start" ? LEFT : anchor === "end" ? width : LEFT + this.plot / 2;
      picture.append(svg("text", { x, y: this.height - 5, "text-anchor": anchor }, clock(point.from, false)));
    }
    this.marks(picture);
    if (this.picked !== null && this.points[this.picked]) {
      const x = LEFT + ((this.picked + 0.5) / this.length) * this.plot;
      picture.append(svg("line", { class: "cursor", x1: x, x2: x, y1: TOP, y2: TOP + this.high }));
    }
    this.box.replaceChildren(picture);
    const point = this.points[this.picked];
    this.readout.textContent = point ? `${clock(point.from)}: ${this.tell(point)}` : this.resting || "";
  }
}

// Points: {from, parts: [[class, amount]], text}. A column is split by shares; one without amounts stays empty.
export class Shares extends Chart {
  scale() { return [[0, "0 %"], [0.5, "50 %"], [1, "100 %"]]; }

  tell(point) { return point.text; }

  marks(picture) {
    const step = this.plot / this.length;
    this.points.forEach((point, number) => {
      const total = point.parts.reduce((sum, [, amount]) => sum + amount, 0);
      let y = TOP + this.high;
      for (const [kind, amount] of total ? point.parts : []) {
        const height = (amount / total) * this.high;
        y -= height;
        if (height > 0) {
          const x = LEFT + number * step;
          picture.append(svg("rect", { class: `tone ${kind}`, x, y, width: Math.max(1, step - 1.5), height: Math.max(0.5, height - 0.7) }));
        }
      }
    });
  }
}

// Points: {from, values: [..], text}. Lines step from point to point; `classes` has one class per line.
export class Lines extends Chart {
  constructor(name, height, classes) {
    super(name, height);
    this.classes = classes;
  }

  get top() {
    const most = Math.max(1, ...this.points.flatMap((point) => point.values.filter(Number.isFinite)));
    return most <= 4 ? Math.ceil(most) : Math.ceil(most / 2) * 2;
  }

  scale() { return [[0, "0"], [1, this.top.toLocaleString("en")]]; }

  tell(point) { return point.text; }

  marks(picture) {
    const { top } = this;
    this.classes.forEach((name, line) => {
      let path = "";
      this.points.forEach((point, number) => {
        const value = point.values[line];
        if (!Number.isFinite(value)) return;
        const x = LEFT + (number / this.length) * this.plot;
        const y = TOP + (1 - value / top) * this.high;
        path += path ? `V${y.toFixed(1)}` : `M${x.toFixed(1)},${y.toFixed(1)}`;
        path += `H${(x + this.plot / this.length).toFixed(1)}`;
      });
      if (path) picture.append(svg("path", { class: `line ${name}`, d: path }));
    });
  }
}
