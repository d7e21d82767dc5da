"""The dashboard of a server: its data over HTTP, and its page in a real headless Chromium."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from time import monotonic
from typing import Any

import http_client
import httpx
import pytest
from browser import Page, browser
from dashboard_server import HOSTILE, MODEL, DashboardServer, open_dashboard_server
from prometheus_client import CollectorRegistry, Gauge
from shared_server import until, words

from foreword.blocks.salt import tenant_digest
from foreword.dashboard.metric_history import KEEP_SECONDS, SAMPLE_SECONDS, MetricsHistory
from foreword.prefixes.lease_records import PREFIXES, PrefixRecord
from foreword.store.shared_records import SharedRecords

# With a browser.
pytestmark = [pytest.mark.timeout(240), pytest.mark.slow]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DashboardServer]:
    with open_dashboard_server(tmp_path_factory.mktemp("store")) as made:
        yield made


@pytest.fixture(scope="module")
def chromium() -> Iterator[Page]:
    with browser() as page:
        yield page


@pytest.fixture
def page(chromium: Page) -> Iterator[Page]:
    """The browser. After each test its console must be empty."""
    chromium.size(1280, 900)
    chromium.scheme("light")
    chromium.complaints()
    yield chromium
    complaints = chromium.complaints()
    chromium.driver.get("about:blank")
    assert complaints == []


def since_start(page: Page, url: str) -> None:
    page.open(url)
    page.click("#range input[value='0']")
    page.wait(lambda: page.text("#state") == "ready")


def number(text: str) -> int:
    return int(text.replace(",", ""))


def test_numbers_are_those_of_metrics(site: DashboardServer, page: Page) -> None:
    """Hits, sources, tiers, the block pool and TTFT on the page equal those of `/metrics`."""
    text = words("numbers", 200)
    for _ in range(2):
        site.complete(text)
    until(lambda: site.metric("foreword:store_queued_blocks") == 0)
    asyncio.run(site.engine.clear_cache())
    site.complete(text)
    since_start(page, site.url)
    hits, asked = (site.metric(f"vllm:prefix_cache_{name}_total") for name in ("hits", "queries"))
    assert hits > 0
    page.wait(lambda: page.text("[data-field=hit-share-sub]") == f"{hits:,.0f} of {asked:,.0f}")
    assert page.text("[data-field=hit-share]") == f"{100 * hits / asked:.0f} %"
    assert page.text("[data-field=running]") == "0" and page.text("[data-field=running-sub]") == "0 waiting"
    shown = {name: number(page.attribute(f"[data-source='{name}']", "data-tokens") or "") for name in SOURCES}
    sources = {name: site.metric("vllm:prompt_tokens_cached_by_source_total", source=name) for name in SOURCES[:2]}
    assert sources["memory"] > 0
    assert {name: shown[name] for name in sources} == sources and shown["computed"] == asked - hits
    assert page.attribute("[data-place=device]", "data-cached") == f"{site.metric('foreword:blocks_cached'):.0f}"
    for tier in ("memory", "disk"):
        held = site.metric("foreword:tier_bytes", tier=tier)
        assert held > 0 and page.attribute(f"[data-place={tier}]", "data-bytes") == f"{held:.0f}"
    firsts = site.metric("vllm:time_to_first_token_seconds_count")
    assert re.fullmatch(rf"p99 [\d.]+ m?s, of {firsts:.0f} requests", page.text("[data-field=first-token-sub]"))
    for share in ("none", "some", "most"):
        count = site.metric("foreword:time_to_first_token_by_cached_seconds_count", cached=share)
        assert page.attribute(f"[data-ttft={share}]", "data-count") == f"{count:.0f}"


def test_dialects_errors_and_misses(site: DashboardServer, page: Page) -> None:
    """Requests of every dialect, how they ended, inter-token latencies and causes of misses are those of `/metrics`."""
    turn = [{"role": "user", "content": words("dialects", 60)}]
    for path, body in (
        ("chat/completions", {"messages": turn}),
        ("chat/completions", {"messages": turn, "stream": True}),
        ("responses", {"input": "hello", "max_output_tokens": 4}),
        ("messages", {"messages": turn, "max_tokens": 4}),
        ("messages", {"messages": 7}),
    ):
        http_client.post(f"{site.url}/v1/{path}", json={"model": MODEL, "max_tokens": 4} | body)
    site.complete("hello")
    since_start(page, site.url)
    page.wait(lambda: page.text("[data-dialect=messages] [data-outcome=client_error]") == "1")
    for dialect, least in (("chat", 2), ("completions", 1), ("responses", 1), ("messages", 1)):
        served = site.metric("foreword:requests_total", dialect=dialect, outcome="ok")
        assert served >= least and page.text(f"[data-dialect={dialect}] [data-outcome=ok]") == f"{served:,.0f}"
        assert f">{dialect}<" in page.run("return document.getElementById('recent').innerHTML")
    assert re.match(r"[\d.]+ m?s$", page.text("[data-field=inter-token]"))
    assert page.text("[data-field=inter-token-sub]").startswith("p99 ")
    assert "client error" in page.text("[data-field=errors-sub]")
    count = site.metric("foreword:cache_misses_total", cause="new_conversation")
    assert page.text("[data-cause=new_conversation] td:nth-child(2)") == f"{count:,.0f}"


SOURCES = ("device", "memory", "disk", "computed")


def test_hit_share_changes(site: DashboardServer, page: Page) -> None:
    """An open page shows a new request within seconds: its tokens, its cache report, its hit."""
    text = words("warm", 80)
    site.complete(text)
    since_start(page, site.url)
    page.wait(lambda: page.text("[data-field=hit-share-sub]") != "")
    before = page.text("[data-field=hit-share-sub]")
    answer = site.complete(text)
    assert "cache_report" not in answer  # the page asked for it, this client did not
    page.wait(lambda: page.text("[data-field=hit-share-sub]") != before)
    page.wait(lambda: "Everything but the last token" in page.text("#recent tbody tr:first-child"))
    assert "100 %" in page.text("#recent tbody tr:first-child") or "99 %" in page.text("#recent tbody tr:first-child")
    page.wait(lambda: page.run("return document.querySelectorAll('.chart svg rect.device').length") >= 1)


def test_named_prefix_and_shared_chain(site: DashboardServer, page: Page) -> None:
    """A named prefix appears with size, version and uses, and the common prefix of its requests has its name."""
    content = words("guide", 40)
    site.name_prefix("guide", content)
    site.name_prefix("guide", content + " again")
    for question in range(3):
        site.complete(f" question {question}", prefix="guide")
    [prefix] = [one for one in site.now()["prefixes"] if one["name"] == "guide"]
    page.open(site.url)
    row = "[data-prefix=guide]"
    page.wait(lambda: f"{prefix['num_tokens']}" in page.text(row))
    assert "v2" in page.text(row) and page.text(f"{row} td:nth-child(4)") == "3"
    blocks = prefix["num_tokens"] // 16
    page.wait(lambda: "guide" in page.text(f"[data-common-prefix='{blocks * 16}']"))
    cells = [page.text(f"[data-common-prefix='{blocks * 16}'] td:nth-child({column})") for column in (2, 3, 5)]
    assert [number(cell) for cell in cells] == [blocks * 16, blocks, 5]  # two versions, three questions


def test_hostile_text(site: DashboardServer, page: Page) -> None:
    """Markup in the model's name and in a request's id is shown as text and is not run. A record of a prefix whose name is
    not its own, which another instance may have put into the shared store, is not shown."""
    off = site.engine.offload
    assert off is not None
    word = f"prefixes/{site.engine.info.namespace[:32]}/{tenant_digest(b'')}/evil"
    info = site.engine.info
    records = SharedRecords(off.store, PREFIXES)
    facts: dict[str, Any] = {"name": "evil", "version": 1, "kind": "text", "content": "x = 1\n" * 20, "last_key": ""}
    records.put(word, PrefixRecord(0, info.block_size, **facts, created=1.0, model=info.name))
    record = off.store.get_record(word, deadline=monotonic() + 60)
    assert record is not None
    changed = record.replace(b'"name": "evil"', b'"name": "' + HOSTILE.encode() + b'"')
    assert changed != record
    off.store.put_record(word, changed, deadline=monotonic() + 60)
    site.complete("hello", request_id=HOSTILE)
    page.open(site.url)
    page.wait(lambda: HOSTILE in page.text("#recent"))
    assert HOSTILE not in page.text("#prefixes")
    assert MODEL in page.text("#subject")
    assert page.run("return document.images.length + document.querySelectorAll('main script').length") == 0
    assert page.run("return window.hacked === undefined")
    records.remove(word)


@pytest.mark.slow
def test_phone_and_desk(site: DashboardServer, page: Page) -> None:
    """Nothing scrolls sideways, on a phone or at 1280 pixels, also with long names."""
    site.name_prefix("n" * 120, words("long", 20))
    site.complete("hello", request_id="i" * 120)
    page.open(site.url)
    page.wait(lambda: "nnnn" in page.text("#prefixes"))
    for width, phone in ((360, True), (1280, False)):
        page.size(width, 800, phone=phone)
        page.wait(lambda width=width: page.run("return innerWidth") == width)  # type: ignore[misc]
        assert page.run("return document.documentElement.scrollWidth") <= width
    http_client.delete(f"{site.url}/v1/prefixes/{'n' * 120}").raise_for_status()


def luminance(colour: str) -> float:
    parts = [float(part) / 255 for part in re.findall(r"[\d.]+", colour)[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.slow
def test_dark_and_light(site: DashboardServer, page: Page) -> None:
    """The page follows the system's color scheme. In both, text has contrast 4.5 (WCAG) and colors have contrast 3 to
    the card."""
    page.open(site.url)
    page.wait(lambda: page.text("#state") == "ready")
    cards = {}
    for scheme in ("light", "dark"):
        page.scheme(scheme)
        colour = lambda selector, of="color": page.run(  # noqa: E731
            "return getComputedStyle(document.querySelector(arguments[0]))[arguments[1]]", selector, of
        )
        cards[scheme] = card = colour(".card", "backgroundColor")
        for selector in (".figure .big", ".figure .sub", "th", "#state"):
            page.wait(lambda s=selector: page.run("return !!document.querySelector(arguments[0])", s))  # type: ignore[misc]
            assert contrast(colour(selector), card) >= 4.5, (scheme, selector)
        for kind in ("device", "memory", "disk", "shared", "peer", "computed"):
            shown = page.run(
                "const one = document.createElement('i'); one.className = `tone ${arguments[0]}`;"
                "document.querySelector('.card').append(one); const found = getComputedStyle(one).backgroundColor;"
                "one.remove(); return found",
                kind,
            )
            assert contrast(shown, card) >= 3, (scheme, kind)
    assert luminance(cards["light"]) > 0.9 > 0.1 > luminance(cards["dark"])


@pytest.mark.slow
def test_keyboard(site: DashboardServer, page: Page) -> None:
    """All controls are reached with the Tab key, and the columns of a chart are read with the arrow keys."""
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    site.complete("hello")
    page.open(site.url)
    page.wait(lambda: page.text("#sources") != "")
    reached = []
    for _ in range(6):
        ActionChains(page.driver).send_keys(Keys.TAB).perform()
        reached.append(page.run("const e = document.activeElement; return e.id || e.name || e.className"))
    assert reached[:3] == ["skip", "range", "pause"] and reached.count("chart") == 2
    page.run("document.querySelector('.chart').focus()")
    ActionChains(page.driver).send_keys(Keys.ARROW_LEFT).perform()
    assert re.match(r"\d\d:\d\d:\d\d: ", page.text(".readout"))


def test_key(site: DashboardServer, page: Page) -> None:
    """The page of a server with API keys asks for one, reports a wrong one, keeps a valid one for the tab only, and shows the
    data of its tenant only."""
    site.name_prefix("anns", words("anns", 20), "k1")
    site.name_prefix("bobs", words("bobs", 20), "k2")
    page.open(site.keyed)
    page.wait(lambda: page.run("return document.getElementById('ask').open"))
    assert page.text("#prefixes") == ""
    enter(page, "wrong")
    page.wait(lambda: "not one that this server knows" in page.text("#ask-why"))
    enter(page, "k1")
    page.wait(lambda: "anns" in page.text("#prefixes"))
    assert "bobs" not in page.text("body")
    assert page.run("return [localStorage.length, document.cookie, sessionStorage.length]") == [0, "", 1]
    page.driver.refresh()
    page.wait(lambda: "anns" in page.text("#prefixes"))
    page.run("sessionStorage.clear()")


def enter(page: Page, key: str) -> None:
    page.run("document.getElementById('ask-key').value = arguments[0]", key)
    page.click("#ask button")


@pytest.mark.slow
def test_stops_when_hidden(site: DashboardServer, page: Page) -> None:
    """A hidden page makes no requests, and fetches the history when it is visible again."""
    page.open(site.url)
    page.wait(lambda: page.text("#state") == "ready")
    first = page.driver.current_window_handle
    page.driver.switch_to.new_window("tab")
    asked = lambda: site.metric("foreword:http_responses_total", route="/ui/data/history")  # noqa: E731
    page.driver.switch_to.window(first)
    hide(page, True)
    page.wait(lambda: requests_stop(page))
    histories = asked()
    hide(page, False)
    page.wait(lambda: asked() > histories)
    page.driver.switch_to.new_window("tab")
    for handle in page.driver.window_handles[1:]:
        page.driver.switch_to.window(handle)
        page.driver.close()
    page.driver.switch_to.window(first)


def requests_stop(page: Page, seconds: float = 3) -> bool:
    """Whether the page finishes no request for a time. It makes several requests a second while it is visible."""
    count = "performance.getEntriesByType('resource').length"
    page.driver.set_script_timeout(60)
    script = f"const before = {count}; setTimeout(() => arguments[1]({count} === before), arguments[0])"
    return bool(page.driver.execute_async_script(script, seconds * 1000))


def hide(page: Page, hidden: bool) -> None:
    """Tell the page that it is hidden; headless browsers show every tab."""
    page.run(
        "Object.defineProperty(document, 'hidden', {configurable: true, get: () => arguments[0]});"
        "document.dispatchEvent(new Event('visibilitychange'))".replace("arguments[0]", str(hidden).lower())
    )


# Over HTTP


def test_files(site: DashboardServer) -> None:
    """`/` leads to the page. All its files come from this server, with a policy that allows no inline scripts and no other
    hosts."""
    with httpx.Client(base_url=site.url, follow_redirects=True, timeout=60) as client:
        answer = client.get("/")
        assert str(answer.url).endswith("/ui/") and answer.headers["content-type"].startswith("text/html")
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "*" not in policy
        names = re.findall(r'(?:src|href)="([^"#]+)"', answer.text)
        assert names and not [name for name in names if "/" in name]
        assert not re.findall(r"<style|style=|\son\w+=|<script(?![^>]*src=)", answer.text)
        for name in names:
            got = client.get(f"/ui/{name}")
            assert got.status_code == 200 and got.headers["content-security-policy"] == policy
            again = client.get(f"/ui/{name}", headers={"if-none-match": got.headers["etag"]})
            assert again.status_code == 304
        for path in ("/ui/none.js", "/ui/..%2Fserver.py", "/ui/%2e%2e/server.py"):
            assert client.get(path).status_code == 404


def test_nothing_from_elsewhere() -> None:
    """No file of the page names another host."""
    folder = Path(__file__).parents[2] / "foreword" / "dashboard" / "static"
    for path in folder.iterdir():
        found = set(re.findall(r"https?://[^\s\"'`)]+", path.read_text())) - {"http://www.w3.org/2000/svg"}
        assert not found, path.name


def test_tenants_see_their_own(site: DashboardServer) -> None:
    """Without a key there is no data. With one, a tenant sees its own requests, prefixes and common prefixes, and no
    text."""
    for path in ("now", "history"):
        assert http_client.get(f"{site.keyed}/ui/data/{path}").status_code == 401
    assert http_client.get(f"{site.keyed}/ui/data/kind").json()["welcome"] is False
    secret = words("swordfish", 40)
    site.name_prefix("treasure", secret, "k1")
    for number in range(2):
        site.complete(f"{secret} {number}", "k1", request_id=f"ann-{number}")
    mine, theirs = site.now("k1"), site.now("k2")
    assert [one["id"] for one in mine["requests"]][:2] == ["cmpl-ann-1", "cmpl-ann-0"]
    assert "ann-" not in str(theirs) and "treasure" not in str(theirs) and theirs["common_prefixes"] == []
    until(
        lambda: any(one["part_of"] == ["treasure"] or one["starts_with"] for one in site.now("k1")["common_prefixes"])
    )
    assert "swordfish" not in str(mine) and "salt" not in str(mine)


_LAST_HOUR = """
const done = arguments[arguments.length - 1];
const [times, rows, start] = arguments;
const modules = ["./metrics.js", "./parts.js", "./dom.js"].map((name) => import(name));
Promise.all(modules).then(([{ Timeline }, { figure }, { percent }]) => {
  const timeline = new Timeline();
  timeline.load({ series: [["asked", {}], ["found", {}]], times, values: rows });
  const [asked, found] = rows[rows.length - 1];
  const values = new Map([["process_start_time_seconds", start], ["asked", asked], ["found", found]]);
  timeline.push(times[times.length - 1] + 1, values);
  const past = (_, before, after) => {
    const delta = (name) => (after.get(name) || 0) - (before.get(name) || 0);
    return delta("found") / delta("asked");
  };
  const one = figure("share", "Share", { past, word: percent });
  one.look(timeline);
  const line = one.element.querySelector("svg");
  done(line ? [line.getAttribute("aria-label"), line.querySelector("path").getAttribute("d").split("M").length - 1] : null);
}).catch((error) => done(String(error)));
"""


@pytest.mark.slow
def test_the_last_hour_is_drawn(site: DashboardServer, page: Page) -> None:
    """A figure's line covers the last hour: lowest, highest and newest value in words, a gap where nothing was measured.

    Half the prompts hit in the first twenty minutes, none are asked in the next, nine of ten hit in the last.
    """
    page.open(site.url)
    page.wait(lambda: page.text("[data-field=hit-share-sub]") != "")
    start = 10_000.0
    times = [start + 10 * number for number in range(361)]
    rows = []
    asked = found = 0
    for at in times:
        rows.append([asked, found])
        part = int((at - start) // 1200)
        asked, found = asked + (0 if part == 1 else 10), found + (5, 0, 9, 9)[part]
    drawn = page.driver.execute_async_script(_LAST_HOUR, times, rows, start)
    assert drawn == ["Last hour: 50 % to 90 %, now 90 %", 2]
    assert page.driver.execute_async_script(_LAST_HOUR, times[:5], rows[:5], start) is None, "four samples are no line"


def test_history_is_kept_and_bounded() -> None:
    """The ring buffer keeps an hour, accepts series that appear later, and skips buckets of histograms."""
    registry = CollectorRegistry()
    first = Gauge("foreword:first", "", ("model_name", "tier"), registry=registry)
    Gauge("python:other", "", registry=registry)
    time = [1000.0]
    history = MetricsHistory(registry.collect, lambda: time[0])
    samples = int(KEEP_SECONDS / SAMPLE_SECONDS)
    for number in range(samples + 10):
        first.labels("m", "a").set(number)
        if number == samples + 9:
            first.labels("m", "b").set(7)
        time[0] += SAMPLE_SECONDS
        history.take()
    kept = history.plain()
    assert len(kept["times"]) == len(kept["values"]) == samples
    assert kept["times"][-1] - kept["times"][0] == KEEP_SECONDS - SAMPLE_SECONDS
    assert kept["series"] == [["foreword:first", {"tier": "a"}], ["foreword:first", {"tier": "b"}]]
    assert kept["values"][0] == [10.0] and kept["values"][-1] == [samples + 9.0, 7.0]


def test_history_of_a_server(site: DashboardServer) -> None:
    """A server samples its metrics from its first request on, also when no page is open."""
    site.complete("hello")

    def known() -> dict[str, float]:
        kept = http_client.get(f"{site.url}/ui/data/history").json()
        names = [name for name, labels in kept["series"] if not labels]
        return dict(zip(names, kept["values"][-1], strict=False)) if kept["times"] else {}

    until(lambda: known().get("foreword:blocks") == site.metric("foreword:blocks"))
