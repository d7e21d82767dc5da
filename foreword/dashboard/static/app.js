// The page: fetches data from this server each second while it is visible, and passes the data to the view.

import { Closed, Failed, Refused, askForKey, get, getJson, refused } from "./api.js";
import { clock } from "./dom.js";
import { Timeline, parse } from "./metrics.js";
import { RouterView } from "./router.js";
import { ServerView } from "./server.js";

const EVERY = 1000;
const EVERY_PER_REPLICA = 20; // so that a router of a thousand replicas is not busy with this page
const TIMEOUT = 8000;
const STATES = { ready: ["ready", "good"], not_ready: ["loading", "warn"], shutting_down: ["draining", "warn"], engine_error: ["failed", "bad"], quarantine: ["wrong KV found", "bad"] };
const ROUTER_STATES = { ...STATES, not_ready: ["no replica", "warn"] };

const element = (id) => document.getElementById(id);
const page = { timeline: new Timeline(), now: null, range: 1800, paused: false, view: null, kind: null, timer: null, busy: false, fresh: false };

function say(word, tone, notice = "") {
  const state = element("state");
  if (state.textContent !== word) state.textContent = word;
  state.className = `pill ${tone}`;
  element("notice").hidden = !notice;
  if (element("notice").textContent !== notice) element("notice").textContent = notice;
}

async function open() {
  const about = await getJson("data/kind", AbortSignal.timeout(TIMEOUT));
  if (!about.welcome) throw refused();
  if (about.closed) throw new Closed(about.closed);
  page.kind = about.kind;
  page.view = new (about.kind === "router" ? RouterView : ServerView)(element("view"));
  element("foot").textContent = `Foreword ${about.version} · figures from /metrics, updated each second while this page is visible`;
}

async function ask() {
  const signal = AbortSignal.timeout(TIMEOUT);
  if (!page.kind) await open();
  if (!page.fresh) {
    page.timeline.load(await getJson("data/history", signal));
    page.fresh = true;
  }
  const [metrics, now] = await Promise.all([get("../metrics", signal).then((answer) => answer.text()), getJson("data/now", signal)]);
  page.timeline.push(now.time, parse(metrics)); // the server's clock, which is that of its history
  page.now = now;
  page.state = (page.kind === "router" ? ROUTER_STATES : STATES)[now.state.status] || [now.state.status, "warn"];
  page.answered = true;
  if (now.model) {
    element("subject").textContent = `${now.model.name} · ${now.model.dtype} on ${now.model.device} · blocks of ${now.model.block_size} tokens`;
    page.title = `${now.model.name} – Foreword`;
  } else if (now.subject) {
    element("subject").textContent = now.subject;
    page.title = `${now.subject} – Foreword`;
  }
  document.body.classList.remove("stale");
  page.heard = Date.now() / 1000;
}

async function tick() {
  if (page.busy) return;
  page.busy = true;
  page.answered = false;
  clearTimeout(page.timer);
  try {
    await ask();
  } catch (error) {
    if (error instanceof Refused) {
      say("key needed", "warn");
      await askForKey(error.message);
    } else if (error instanceof Closed) {
      say("closed", "warn", error.message);
    } else if (error instanceof Failed || error.name === "TimeoutError" || error.name === "AbortError") {
      document.body.classList.add("stale");
      page.fresh = false;
      say("no answer", "bad", `${error instanceof Failed ? error.message : "The server does not answer in time."} ${page.heard ? `Last answer at ${clock(page.heard)}; t` : "T"}rying again.`);
    } else {
      broken(error);
    }
  }
  page.busy = false;
  draw();
  if (!document.hidden && !page.paused) page.timer = setTimeout(tick, Math.max(EVERY, EVERY_PER_REPLICA * ((page.now && page.now.replicas) || []).length));
}

// An error of this page itself: shown and logged. The page continues.
function broken(error) {
  console.error(error);
  say("page error", "bad", `This page failed to draw: ${error.message}. Please report it.`);
}

// The header and the title of the tab say the worst of the process and of the replicas behind it.
function tellState() {
  const [word, tone] = (page.state[1] === "good" && page.view.worst) || page.state;
  say(word, tone, page.now.state.reason);
  if (page.title) document.title = tone === "good" ? page.title : `${word} – ${page.title}`;
}

function draw() {
  try {
    if (page.view && page.timeline.last) page.view.draw(page.timeline, page.now, page.range);
    if (page.answered) tellState();
  } catch (error) {
    broken(error);
  }
}

element("range").addEventListener("change", (event) => {
  page.range = Number(event.target.value);
  draw();
});
element("pause").addEventListener("click", () => {
  page.paused = !page.paused;
  element("pause").setAttribute("aria-pressed", page.paused);
  if (page.paused) clearTimeout(page.timer); else tick();
});
// The time while the page was hidden comes from the server's history.
document.addEventListener("visibilitychange", () => {
  clearTimeout(page.timer);
  if (document.hidden) return;
  page.fresh = false;
  if (!page.paused) tick();
});
tick();
