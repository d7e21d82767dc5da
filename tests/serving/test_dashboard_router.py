"""The dashboard of a router: two real servers, a real router, and its page in a real headless Chromium."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import config_constants
import http_client
import pytest
from aiohttp import web
from browser import Page, browser
from config_constants import split
from dashboard_server import HOSTILE, MODEL, open_dashboard_server
from example_counts import represented
from prometheus_client.parser import text_string_to_metric_families
from router_parts import QUICK, Loop
from scripted_replica import ScriptedReplica
from shared_server import until, words

import foreword
from foreword.dashboard.pages import PAGE, files
from foreword.router.replica_metrics import parse_metrics
from foreword.router_extras.replica_memory import memory_of

HOSTILE_LABEL = '"<img src=x onerror=window.hacked=1>"'
SENT = "return [...document.querySelectorAll('[data-replica]')].map((row) => row.dataset.sent)"

TALLEST = "return Math.max(...[...document.querySelectorAll(arguments[0])].map((one) => one.offsetHeight))"

# With a browser.
pytestmark = [pytest.mark.timeout(240), pytest.mark.slow]


@dataclass(frozen=True)
class Routed:
    """A router and its replicas."""

    url: str
    replicas: tuple[str, ...]

    def complete(self, prompt: str, **headers: str) -> None:
        body = {"prompt": prompt, "max_tokens": 4, "temperature": 0}
        http_client.post(f"{self.url}/v1/completions", json=body, headers=headers).raise_for_status()

    def total(self, name: str, **labels: str) -> float:
        """The sum of a metric's series with these labels."""
        found = 0.0
        for family in text_string_to_metric_families(http_client.get(f"{self.url}/metrics").text):
            for sample in family.samples:
                if sample.name == name and labels.items() <= sample.labels.items():
                    found += sample.value
        return found


@contextmanager
def routing(*arguments: str) -> Iterator[str]:
    """`foreword route` on a free port; its URL."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith("FOREWORD_")}
    given, own = split([*QUICK, *arguments])
    program = [config_constants.__file__, *given, str(Path(foreword.__file__).with_name("__main__.py"))]
    command = [sys.executable, "-P", *program, "route", "--port", "0", *own]
    popen = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environ)
    lines: list[str] = []
    assert popen.stderr is not None
    reader = threading.Thread(target=lambda: lines.extend(iter(popen.stderr.readline, "")), daemon=True)  # type: ignore[union-attr]
    reader.start()
    try:
        until(lambda: "routes on" in "".join(lines) or popen.poll() is not None, 120)
        found = re.search(r"http://\S+:\d+", next((line for line in lines if "routes on" in line), ""))
        assert found is not None, "".join(lines)
        until(lambda: http_client.get(f"{found[0]}/health").status_code == 200)
        yield found[0]
    finally:
        popen.kill()
        popen.wait()
        reader.join(5)
        popen.stderr.close()


@pytest.fixture(scope="module")
def routed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Routed]:
    first, second = tmp_path_factory.mktemp("store"), tmp_path_factory.mktemp("store")
    with open_dashboard_server(first) as one, open_dashboard_server(second) as other:
        urls = one.url, other.url
        with routing("--replica", urls[0], "--replica", urls[1]) as url:
            until(lambda: http_client.get(f"{url}/ready").status_code == 200, 60)
            yield Routed(url, urls)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Page]:
    with browser() as page:
        yield page


@pytest.fixture
def page(chromium: Page) -> Iterator[Page]:
    """Each test ends with a console that has said nothing."""
    chromium.size(1280, 900)
    chromium.complaints()
    yield chromium
    complaints = chromium.complaints()
    chromium.driver.get("about:blank")
    assert complaints == []


@pytest.mark.slow
def test_numbers_are_those_of_metrics(routed: Routed, page: Page) -> None:
    """Requests, cached tokens, expected and actual hits of each replica and its memory are those of the metrics; the last
    decisions are shown with the TTFT of each candidate."""
    for topic in ("one", "two", "three"):
        for _ in range(2):
            routed.complete(words(topic, 60))
    page.open(routed.url)
    page.click("#range input[value='0']")
    page.wait(lambda: page.text("#state") == "ready" and page.text("#decisions tbody") != "")
    placed = routed.total("foreword:router_usage_prompt_tokens_total")
    found = routed.total("foreword:router_usage_cached_tokens_total")
    assert found > 0
    page.wait(lambda: page.text("[data-field=hit-share-sub]") == f"{found:,.0f} of {placed:,.0f}")
    page.wait(lambda: page.text("[data-field=in-flight]") == "0")
    for replica in routed.replicas:
        card = f"[data-replica='{replica}']"
        sent = routed.total("foreword:router_decisions_total", replica=replica)
        assert page.attribute(card, "data-sent") == f"{sent:.0f}"
        assert page.text(f"{card} .pill") == "ready"
        expected = routed.total("foreword:router_expected_cached_tokens_total", replica=replica)
        actual = routed.total("foreword:router_usage_cached_tokens_total", replica=replica)
        assert page.text(f"{card} td:nth-child(8)") == f"{actual:,.0f}{expected:,.0f} expected"
        device, _ = memory_of(parse_metrics(http_client.get(f"{replica}/metrics").text).memory)
        assert device is not None
        cached = f"{device['cached']:.0f}"
        page.wait(
            lambda card=card, cached=cached: page.attribute(f"{card} [data-place=device]", "data-cached") == cached
        )  # type: ignore[misc]
        assert "64.0 MiB" in (page.attribute(f"{card} [data-place=disk] .bar", "title") or "")
    [last] = http_client.get(f"{routed.url}/v1/router/decisions?last=1").json()["data"]
    row = f"[data-decision='{last['request_id']}']"
    assert page.attribute(f"{row} td[title^=http]", "title") == last["in_words"]
    shown = page.run(
        "return [...document.querySelectorAll(arguments[0])].map((one) => one.dataset.candidate)", f"{row} .offer"
    )
    assert shown[0] == last["replica"] and sorted(shown) == sorted(one["replica"] for one in last["prices"])
    tokens = page.attribute(f"{row} .bar.tokens", "title") or ""
    assert (
        sum(int(number.replace(",", "")) for number in re.findall(r"([\d,]+) tokens", tokens)) == last["prompt_tokens"]
    )


def test_dialects_and_errors(routed: Routed, page: Page) -> None:
    """Requests of every dialect through the router, and how they ended, are those of the metrics."""
    turn = [{"role": "user", "content": words("dialects", 60)}]
    for path, body in (
        ("chat/completions", {"stream": True}),
        ("messages", {}),
        ("messages", {"max_tokens": -1}),
    ):
        body = {"messages": turn, "max_tokens": 4, "model": MODEL, **body}
        http_client.post(f"{routed.url}/v1/{path}", json=body)
    page.open(routed.url)
    page.click("#range input[value='0']")
    page.wait(lambda: page.text("[data-dialect=messages] [data-outcome=ok]") == "1")
    assert page.text("[data-dialect=messages] [data-outcome=client_error]") == "1"
    assert page.text("[data-dialect=chat] [data-outcome=ok]") == "1"
    assert "p99 " in page.text("[data-field=inter-token-sub]") and "1 client error" in page.text(
        "[data-field=errors-sub]"
    )
    assert ">messages<" in page.run("return document.getElementById('decisions').innerHTML")


def test_hostile_and_phone(routed: Routed, page: Page) -> None:
    """A request with markup for an id is shown as text; no sideways scrolling on a phone."""
    routed.complete("hello", **{"x-request-id": HOSTILE})
    page.open(routed.url)
    page.wait(lambda: HOSTILE in page.text("#decisions"))
    assert page.run("return document.images.length === 0 && window.hacked === undefined")
    page.size(360, 800, phone=True)
    page.wait(lambda: page.run("return innerWidth") == 360)
    assert page.run("return document.documentElement.scrollWidth") <= 360
    for scheme in ("dark", "light"):
        page.scheme(scheme)


class Plain(ScriptedReplica):
    """A replica that answers each prompt with one token."""

    def routes(self) -> list[web.RouteDef]:
        return [web.post("/v1/completions", self._complete)]

    async def _complete(self, request: web.Request) -> web.Response:
        usage = {"prompt_tokens": 60, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 30}}
        choice = {"index": 0, "text": "x", "finish_reason": "length"}
        return web.json_response({"id": "c", "object": "text_completion", "choices": [choice], "usage": usage})

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=f"vllm:kv_cache_usage_perc 0.5\nforeword:tier_bytes{{tier={HOSTILE_LABEL}}} 5\n")


@pytest.mark.slow
def test_sixty_replicas(page: Page) -> None:
    """The page of sixty replicas: the healthy ones are behind one line, and in the order of a chosen column when there is
    one; four candidates per decision and the number of the others; data of a bounded size; names and labels of replicas are
    text; no sideways scrolling on a phone."""
    loop = Loop()
    urls = [Plain(loop).url for _ in range(60)]
    with routing(*(part for url in urls for part in ("--replica", url))) as url:
        listed = lambda: http_client.get(f"{url}/v1/router/replicas").json()["data"]  # noqa: E731
        until(lambda: all(one["takes_requests"] for one in listed()), 60)
        for number in range(30):
            body = {"model": "m", "prompt": words(f"number {number}", 60), "max_tokens": 1}
            http_client.post(f"{url}/v1/completions", json=body).raise_for_status()
        page.open(url)
        page.wait(lambda: page.attribute("#replicas summary", "data-rest") == "60" and rows(page) == 0)
        decisions = "return document.querySelectorAll('[data-decision]').length"
        page.wait(lambda: page.run(decisions) == 5 and page.attribute("#decisions summary", "data-rest") == "15")
        page.click("#decisions summary")
        page.wait(lambda: page.run(decisions) == 20)
        page.click("#decisions summary")
        page.wait(lambda: page.run(decisions) == 5)
        chosen = page.run("return document.querySelectorAll('[data-decision]:first-child [data-candidate]').length")
        assert chosen == 4 and re.search(r"\d+ more$", page.text("[data-decision] td.candidates"))
        page.click("[data-sort='6']")
        sent = [int(number) for number in page.run(SENT)]
        assert sent == sorted(sent, reverse=True) and sum(sent) == 30 and len(sent) == 50
        assert page.attribute("th[aria-sort]", "aria-sort") == "descending"
        page.click("[data-sort='6']")
        assert page.run(SENT)[0] == "0"
        page.wait(lambda: "<img" in (page.attribute("[data-place*=img] .bar", "title") or ""))
        assert page.run("return document.images.length === 0 && window.hacked === undefined")
        page.size(360, 800, phone=True)
        page.wait(lambda: page.run("return innerWidth") == 360)
        assert page.run("return document.documentElement.scrollWidth") <= 360
        assert page.run(TALLEST, ".offer") < 45 and page.run(TALLEST, "[data-sort='5']") < 25, "words are broken"
        assert len(http_client.get(f"{url}/ui/data/now").content) < 64_000
        kept = http_client.get(f"{url}/ui/data/history").json()
        assert len(kept["series"]) < 60 * 5 + 150
        page.driver.get("about:blank")


def rows(page: Page) -> int:
    return int(page.run("return document.querySelectorAll('[data-replica]').length"))


def test_admin_key(routed: Routed, page: Page) -> None:
    """A router with an admin key asks for it; drained, unreachable and healthy replicas are shown differently."""
    gone = "http://127.0.0.1:9"
    arguments = ["--admin-key", "root", "--replica", routed.replicas[0], "--replica", gone]
    with routing(*arguments) as url:
        assert http_client.get(f"{url}/ui/data/now").status_code == 401
        page.open(url)
        page.wait(lambda: page.run("return document.getElementById('ask').open"))
        page.run("document.getElementById('ask-key').value = 'root'")
        page.click("#ask button")
        page.wait(lambda: page.text(f"[data-replica='{routed.replicas[0]}'] .pill") == "ready")
        page.wait(lambda: "cannot connect: connection refused" in page.text(f"[data-replica='{gone}'] .note"))
        assert "Connect call" not in page.run("return document.body.innerText"), "a person's words, not Python's"
        body: dict[str, Any] = {"replica": routed.replicas[0]}
        http_client.post(
            f"{url}/v1/router/drain", json=body, headers={"authorization": "Bearer root"}
        ).raise_for_status()
        page.wait(lambda: page.text(f"[data-replica='{routed.replicas[0]}'] .pill") == "draining")
        page.wait(lambda: page.text("#state") == "no replica" and "no replica takes requests" in page.text("#notice"))
        page.run("sessionStorage.clear()")
        page.driver.get("about:blank")


def test_closed(routed: Routed, page: Page, tmp_path: Path) -> None:
    """A router with tenants and without an admin key says why there is nothing to see."""
    with routing("--api-keys", "ann=k1", "--replica", routed.replicas[0]) as url:
        assert http_client.get(f"{url}/ui/data/history").status_code == 403
        page.open(url)
        page.wait(lambda: "--admin-key" in page.text("#notice"))
        page.driver.get("about:blank")


class Turns:
    """A count of a fleet's answers, by which one of its replicas is slow. A time in seconds would stand out less on a loaded
    machine.

    Args:
        clients: how many ask, one request at a time each.
    """

    def __init__(self, clients: int) -> None:
        self._clients = clients
        self._answered = self._waiting = 0
        self._changed = asyncio.Condition()

    async def pass_by(self, answers: int) -> None:
        """Wait until so many others were answered, or until all clients that are left wait here."""
        async with self._changed:
            until, self._waiting = self._answered + answers, self._waiting + 1
            self._changed.notify_all()
            await self._changed.wait_for(lambda: self._answered >= until or self._waiting >= self._clients)
            self._waiting -= 1

    async def note(self, *, answered: int = 0, left: int = 0) -> None:
        """Requests were answered, or clients have left."""
        async with self._changed:
            self._answered += answered
            self._clients -= left
            self._changed.notify_all()


class Streaming(ScriptedReplica):
    """A replica that streams three tokens, once `behind` others of the fleet were answered, or answers 500."""

    def __init__(self, loop: Loop, turns: Turns, *, behind: int = 0, fails: bool = False) -> None:
        self.turns, self.behind, self.fails, self.asked = turns, behind, fails, 0
        super().__init__(loop)

    def routes(self) -> list[web.RouteDef]:
        return [web.post("/v1/completions", self._complete)]

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        self.asked += 1
        if self.fails:
            return web.json_response({"error": {"message": "boom"}}, status=500)
        if self.behind:
            await self.turns.pass_by(self.behind)
        usage = {"prompt_tokens": 600, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 400}}
        choices = [
            {"index": 0, "text": "x", "finish_reason": "length" if last else None} for last in (False, False, True)
        ]
        events = [{"choices": [choice]} for choice in choices] + [{"choices": [], "usage": usage}]
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        whole = ({"id": "c", "object": "text_completion", "model": "m", **event} for event in events)
        # In one piece: time between them would be that of the machine's other work.
        await response.write(
            "".join(f"data: {json.dumps(event)}\n\n" for event in whole).encode() + b"data: [DONE]\n\n"
        )
        await self.turns.note(answered=1)
        return response


SEEN = """
const at = document.querySelector(arguments[0]); if (!at) return 'missing';
const box = at.getBoundingClientRect();
return box.top >= 0 && box.left >= 0 && box.bottom <= innerHeight && box.right <= innerWidth + 1 && box.height > 0
"""


@dataclass(frozen=True)
class Fleet:
    """A router of sixty replicas, of which one is slow and one fails, after some hundred requests with four prefixes."""

    url: str
    slow: str
    failing: str


@pytest.fixture(scope="module", params=["cost", "round-robin"])
def fleet(request: pytest.FixtureRequest) -> Iterator[Fleet]:
    clients = 6
    loop, turns = Loop(), Turns(clients)
    # The other clients go on meanwhile: an answer of the slow replica takes more than 20 times as long as that of another one.
    slow, failing = Streaming(loop, turns, behind=120), Streaming(loop, turns, fails=True)
    urls = [slow.url, failing.url, *(Streaming(loop, turns).url for _ in range(58))]
    with routing(*(part for url in urls for part in ("--replica", url)), "--policy", request.param) as url:
        listed = lambda: http_client.get(f"{url}/v1/router/replicas").json()["data"]  # noqa: E731
        until(lambda: all(one["takes_requests"] for one in listed()), 60)

        numbers = iter(range(3000))

        def ask(_client: int) -> None:
            # A new prompt goes to any replica: so each is asked, however few requests are under way at once.
            while (number := next(numbers)) < 420 or failing.asked < 2 or slow.asked < 1:
                prompt = words(f"prefix {number % 4 if number < 420 else number}", 1200) + words(f"number {number}", 60)
                body = {"model": "m", "prompt": prompt, "max_tokens": 3, "stream": True, "user": str(number)}
                http_client.post(f"{url}/v1/completions", json=body).raise_for_status()
            loop.call(lambda: turns.note(left=1))

        with ThreadPoolExecutor(clients) as pool:
            list(pool.map(ask, range(clients)))
        yield Fleet(url, slow.url.removeprefix("http://"), failing.url.removeprefix("http://"))


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 390])
def test_the_first_screen_answers(fleet: Fleet, page: Page, width: int) -> None:
    """Without scrolling, at both widths, in words: the slow one of sixty, the failing one, where a prefix is, why a tenant
    misses. Their rows are the first of the table; what was not measured is unknown and not 0."""
    page.size(width, 844 if width < 600 else 900, phone=width < 600)
    page.open(fleet.url)
    page.wait(lambda: page.text("[data-finding=failing]") != "" and page.text("[data-finding=slow]") != "")
    assert f"{fleet.failing} fails" in page.text("[data-finding=failing]") and "500: boom" in page.text(
        "[data-finding=failing]"
    )
    assert page.text("#state") == "1 of 60 failing", "the header says the worst of the fleet"
    assert page.run("return document.title").startswith("1 of 60 failing – ")
    assert page.run("return document.querySelectorAll('#decisions tbody tr').length") == 5, "the others are folded"
    assert page.text("[data-finding=slow]").startswith(fleet.slow) and "times" in page.text("[data-finding=slow]")
    assert page.text("[data-finding=misses]").startswith("default misses: ")
    shown = ["failing", "slow", "misses"]
    if page.text("[data-finding=prefix]"):
        shown.append("prefix")
        assert re.search(r" on \d+ of 60: 127", page.text("[data-finding=prefix]"))
        assert int(page.attribute("[data-shared]", "data-holders") or 0) > 0
    else:
        assert "reads no prompts" in page.text("#shared"), "round-robin looks at no prompt"
        assert page.text("[data-decision] td.candidates") == "–"
    for name in shown:
        assert page.run(SEEN, f"[data-finding={name}]") is True, name
    rows = page.run(
        "return [...document.querySelectorAll('#replicas tr[data-replica]')].map((row) => row.dataset.replica)"
    )
    assert rows[0] == f"http://{fleet.failing}" and f"http://{fleet.slow}" in rows and len(rows) < 20
    assert page.text(f"[data-replica='{rows[0]}'] td:nth-child(2)") == "–"
    assert "p99" in page.text("#fleet-row td:nth-child(2)"), "the fleet's own TTFT is beside"
    assert page.text("[data-field=hit-share]") == "67 %"
    assert page.run("return document.querySelectorAll('[data-cell]').length") == 60
    assert page.run(SEEN, f"[data-cell='http://{fleet.slow}']") is True
    assert page.run("return document.documentElement.scrollWidth") <= width


@pytest.mark.slow
def test_the_fleet_without_a_mouse(fleet: Fleet, page: Page) -> None:
    """The strip takes the arrow keys and tells each replica in words; Enter shows its row; a cause opens to its requests; a
    search finds a replica."""
    page.open(fleet.url)
    page.wait(lambda: page.text("[data-cell]") is not None and page.text("#tenants details") != "")
    page.run("document.getElementById('strip').focus()")
    keys = page.driver.switch_to.active_element
    keys.send_keys("\ue014\ue014")  # twice the right arrow
    page.wait(lambda: page.attribute("#strip", "aria-activedescendant") == "cell-2")
    name = page.attribute("#cell-2", "data-cell") or "?"
    assert page.text("#strip + .readout").startswith(f"{name.removeprefix('http://')}: ")
    keys.send_keys("\ue007")
    page.wait(lambda: page.run("return !!document.querySelector(arguments[0])", f"#replicas [data-replica='{name}']"))
    page.run("document.querySelector('#tenants summary').click()")
    assert page.run("return document.querySelector('#tenants details').open")
    missed = page.attribute("[data-missed]", "data-missed")
    assert any(
        one["request_id"] == missed
        for one in http_client.get(f"{fleet.url}/v1/router/decisions?last=1000").json()["data"]
    )
    search = page.driver.find_element("id", "find")
    assert search.accessible_name == "Find a replica"
    search.send_keys(fleet.slow)
    page.wait(
        lambda: (
            page.run(SENT) is not None
            and page.attribute("#replicas tr[data-replica]", "data-replica") == f"http://{fleet.slow}"
        )
    )
    assert page.run("return document.querySelectorAll('#replicas summary').length") == 0


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_screen_readers(fleet: Fleet, page: Page, scheme: str) -> None:
    """axe (FOREWORD_AXE: its axe.min.js, of npm's axe-core) finds nothing, in both schemes."""
    script = os.environ.get("FOREWORD_AXE")
    if not script:
        pytest.skip("FOREWORD_AXE does not name axe.min.js (npm install axe-core)")
    page.cdp("Page.setBypassCSP", enabled=True)
    page.scheme(scheme)
    page.open(fleet.url)
    page.wait(lambda: page.text("[data-finding=slow]") != "" and page.text("[data-decision]") != "")
    page.click("#replicas summary")
    page.click("#tenants summary")
    page.run(Path(script).read_text(encoding="utf-8"))
    done = page.driver.execute_async_script("const done = arguments[0]; axe.run().then(done)")
    page.scheme("light")
    assert len(done["passes"]) > 20
    assert [(one["id"], one["nodes"][0]["html"]) for one in done["violations"]] == []


class ThousandReplicas:
    """A router of a thousand replicas as the page asks it: one slow, one failing, and a prefix on three."""

    def __init__(self, loop: Loop) -> None:
        self.url: str = loop.call(self._start)

    async def _start(self) -> str:
        app = web.Application()
        for path, answer in (("kind", self._kind), ("history", self._history), ("now", self._now)):
            app.router.add_get(f"/ui/data/{path}", answer)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/ui", self._moved)
        app.router.add_get("/ui/{name:.*}", self._page)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        return f"http://{host}:{port}"

    async def _moved(self, request: web.Request) -> web.Response:
        return web.Response(status=307, headers={"location": "/ui/"})

    async def _page(self, request: web.Request) -> web.Response:
        file = files()[request.match_info["name"] or PAGE]
        return web.Response(body=file.content, headers={"content-type": file.media_type})

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(text="process_start_time_seconds 1\n")

    async def _kind(self, request: web.Request) -> web.Response:
        return web.json_response({"kind": "router", "version": "0", "welcome": True, "closed": ""})

    async def _history(self, request: web.Request) -> web.Response:
        return web.json_response({"every": 5, "series": [], "times": [], "values": []})

    async def _now(self, request: web.Request) -> web.Response:
        replicas = [_replica(f"http://replica-{number:03}:8000") for number in range(1000)]
        replicas[700] |= {"ttft": [0.9, 2.0, 40]}
        replicas[701] |= {"failures": 8, "problem": "it says 500: boom", "ttft": None, "itl": None}
        tiers = "".join("0" if number in (3, 4, 999) else "-" for number in range(1000))
        prefix = {"tenants": ["ann"], "names": ["rules"], "tokens": 2048, "prompts": 40, "of": 100, "request_id": "r"}
        known = {"time": 100.0, "state": {"status": "ready", "reason": ""}, "subject": "router of m", "decisions": []}
        prefixes = [{**prefix, "tiers": tiers, "shared": False, "model": "m", "replicas": 1000}]
        fleet = {"ttft": [0.05, 0.2, 8000], "itl": [0.01, 0.02, 8000]}
        more = {"fleet": fleet, "replicas": replicas, "reads_prompts": True, "prefixes": prefixes, "misses": []}
        return web.json_response({**known, **more})


def _replica(url: str) -> dict[str, Any]:
    load = {"in_flight": 1, "waiting": 0, "queued_tokens": 0, "known_blocks": 5, "kv_events": True, "speed": None}
    recent = {"ttft": [0.05, 0.1, 40], "itl": [0.01, 0.02, 40], "ended": 8, "failures": 0, "problem": ""}
    memory = {"usage": 0.5, "device": None, "tiers": []}
    return {"replica": url, "role": "both", "reason": None, "drained": False, **load, **recent, **memory}


@pytest.mark.parametrize("width", represented([1280, 390], 1280))
def test_a_thousand_replicas(page: Page, width: int) -> None:
    """The slow replica of a thousand, the failing one and the holders of a prefix are named on the first screen; few rows are
    drawn; any cell of the strip leads to its replica."""
    page.size(width, 844 if width < 600 else 900, phone=width < 600)
    page.open(ThousandReplicas(Loop()).url)
    page.wait(lambda: page.text("[data-finding=failing]").startswith("replica-701:8000 fails"))
    assert page.text("#state") == "1 of 1,000 failing" and page.run(SEEN, "#state") is True
    assert page.run("return document.title") == "1 of 1,000 failing – router of m – Foreword"
    assert page.text("[data-finding=slow]").startswith("replica-700:8000 is slow TTFT median 0.90 s, 18 times")
    assert "rules on 3 of 1000: replica-003:8000, replica-004:8000, replica-999:8000" in page.text(
        "[data-finding=prefix]"
    )
    for name in ("failing", "slow", "prefix"):
        assert page.run(SEEN, f"[data-finding={name}]") is True, name
    assert rows(page) == 2 and page.attribute("#replicas summary", "data-rest") == "998"
    assert page.run("return document.querySelectorAll('[data-cell]').length") == 1000
    assert page.run("return document.documentElement.scrollWidth") <= width
    page.click("#cell-999")
    page.wait(lambda: rows(page) == 3)
