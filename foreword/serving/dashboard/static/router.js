// The view of a router.

import { h } from "./dom.js";

export class RouterView {
  constructor(root) { root.replaceChildren(h("p", {}, "")); }

  draw() {}
}
