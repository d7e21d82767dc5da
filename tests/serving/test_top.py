"""`foreword top`: what servers, routers and strangers publish, shown as tables and JSON. Servers and routers are processes."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from router_parts import RouterProcess
from server_process import ServerProcess

from foreword.observability.scrape import Period, Scrape

BOUNDS = (0.1, 0.5, 1.0, 5.0)


def top(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "foreword", "top", "--interval", "0.5", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def shown(*urls: str) -> tuple[int, dict[str, Any]]:
    done = top("--json", *urls)
    assert not done.stderr
    return done.returncode, json.loads(done.stdout)


@contextmanager
def answering(status: int, body: bytes, *, endless: bool = False) -> Iterator[str]:
    """The URL of a server that answers everything with a body, over and over if it is endless."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            try:
                self.wfile.write(body)
                while endless:
                    self.wfile.write(body)
            except OSError:
                pass

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def test_a_server_behind_a_router(tmp_path: Path) -> None:
    """A server with a disk store and the router in front of it are shown: the kinds, the cached share, the tier and the
    replica, as tables too, and nothing is wrong. Once the server is killed, that is the first problem, and the status is 1."""
    server = ServerProcess("--store", f"disk://{tmp_path}/kv?size=64MiB")
    router = None
    try:
        url = server.wait_ready()
        router = RouterProcess("--replica", url)
        front = router.wait_for(1).url
        prompt = {"model": "stdlib-nano", "prompt": "a sentence that is read twice " * 30, "max_tokens": 1}
        for _ in range(2):
            httpx.post(f"{front}/v1/completions", json=prompt, timeout=60).raise_for_status()
        status, view = shown(url, f"{front}/v1")
        assert (status, view["problems"]) == (0, [])
        first, second = view["servers"]
        assert (first["kind"], second["kind"]) == ("Foreword", "router")
        assert first["prompt_tokens_per_s"] == 0 and second["ttft_p50"] is None, (
            "nothing was asked between the two looks"
        )
        assert [(tier["tier"], tier["state"]) for tier in view["tiers"]] == [("disk", "ok")]
        assert view["tiers"][0]["budget_bytes"] == 64 << 20
        assert [(one["replica"], one["up"]) for one in view["replicas"]] == [(url, True)]
        tables = top("--once", url, front).stdout
        assert "no problem found" in tables and "disk" in tables and "64.0 MiB" in tables
        server.popen.kill()
        server.popen.wait()
        status, view = shown(url)
        assert (status, view["problems"], view["servers"]) == (1, [f"{url}: no connection: Connection refused"], [])
    finally:
        if router:
            router.kill()
        server.popen.kill()
        server.end()


@pytest.mark.parametrize(
    ("status", "body", "endless", "said"),
    [
        (200, b"<html>It works</html>", False, "is not Prometheus' text format"),
        (200, b"up 1\n", False, "it is no vLLM, SGLang, Foreword server or router"),
        (200, b"", False, "it is no vLLM, SGLang, Foreword server or router"),
        (200, b"\xff\xfe\x00", False, "is not Prometheus' text format"),
        (200, b"# x" + b" " * 4000 + b"\n", True, "its metrics have more than 8 MiB"),
        (200, b'vllm:a_bucket{le="1",\t="\\n"} 1\n', False, "is not Prometheus' text format"),
        (401, b"no", False, "HTTP 401"),
    ],
)
def test_strangers(status: int, body: bytes, endless: bool, said: str) -> None:
    """A server that it does not know is named in one sentence, and nothing of it is shown."""
    with answering(status, body, endless=endless) as url:
        code, view = shown(url)
    assert code == 1 and len(view["problems"]) == 1 and said in view["problems"][0]
    assert not (view["servers"] or view["tiers"] or view["replicas"])


@pytest.mark.parametrize(
    "body",
    [
        b'foreword:tier_state{state="full"} 1\n',
        b'foreword:tier_state{tier="disk"} 1\n',
        b"foreword:tier_state 1\n",
        b'vllm:foreword_tier_state{rank="0"} 1\nvllm:foreword_loaded_blocks_total{tier="disk"} 1\n',
        b'vllm:time_to_first_token_seconds_bucket{le="soon"} 1\nvllm:time_to_first_token_seconds_bucket{le="NaN"} 2\n',
        b'sglang:time_to_first_token_seconds_bucket{le=""} 1\nsglang:num_running_reqs NaN\nsglang:token_usage +Inf\n',
        b'vllm:foreword_loaded_blocks_total{tier="a"} +Inf\nvllm:foreword_corrupt_blocks_total{tier="a"} NaN\n'
        b"vllm:foreword_degraded_total NaN\nvllm:foreword_dropped_blocks_total NaN\n",
        b'foreword:router_replica_up{replica="a"} 1\nforeword:router_in_flight{replica="a"} NaN\n'
        b'foreword:router_usage_prompt_tokens_total{replica="a"} 5\n'
        b'foreword:router_usage_cached_tokens_total{replica="a"} NaN\n',
    ],
)
def test_one_odd_server_ends_nothing(body: bytes) -> None:
    """Series that lack a label, bounds that are no numbers, and values that JSON does not have: what is left of the server is
    shown, in JSON as the standard has it, and a server beside it as ever."""

    def refused(name: str) -> None:
        raise ValueError(f"JSON has no {name}")

    sound = b'vllm:num_requests_running 3\nvllm:foreword_tier_state{tier="disk",state="ok"} 1\n'
    with answering(200, body) as url, answering(200, sound) as other:
        done = top("--json", url, other)
        tables = top("--once", url, other)
    assert (done.returncode, done.stderr, tables.returncode, tables.stderr) == (0, "", 0, "")
    view = json.loads(done.stdout, parse_constant=refused)
    odd, beside = view["servers"]
    assert (odd["url"], beside["url"], beside["running"], view["problems"]) == (url, other, 3, [])
    assert odd["ttft_p50"] is None and all(tier["state"] == "ok" for tier in view["tiers"])


def test_arguments() -> None:
    """A URL that is none, and too many of them, are refused before anything is asked."""
    assert (top("ftp://x").returncode, top(*[f"http://127.0.0.1:1/{number}" for number in range(65)]).returncode) == (
        2,
        2,
    )


def test_names_of_others_are_not_markup() -> None:
    """A name that a server chose is shown as it is: terminals get neither colours nor an error from it."""
    text = b'vllm:num_requests_running 1\nvllm:foreword_loaded_blocks_total{tier="[red]x[/]"} 1\n'
    with answering(200, text) as url:
        done = top("--once", url)
    assert done.returncode == 0 and "[red]x[/]" in done.stdout and not done.stderr


@given(
    st.lists(st.floats(0, 4.9), max_size=50),
    st.lists(st.floats(0, 4.9), min_size=1, max_size=50),
    st.floats(0.01, 0.99),
)
def test_quantiles_of_a_period(before: list[float], after: list[float], share: float) -> None:
    """A quantile of a period lies in the bucket of the observation with that rank, whatever was observed before it."""
    registry = CollectorRegistry()
    histogram = Histogram("h", "-", buckets=BOUNDS, registry=registry)
    for value in before:
        histogram.observe(value)
    first = Scrape(generate_latest(registry).decode())
    for value in after:
        histogram.observe(value)
    found = Period(first, Scrape(generate_latest(registry).decode()), 1.0).quantile(share, "h")
    # The smallest bound with at least the wanted share of the observations.
    counts = [sum(value <= bound for value in after) for bound in BOUNDS]
    bucket = bisect_left(counts, share * len(after))
    assert found is not None
    assert (0.0, *BOUNDS)[bucket] <= found <= BOUNDS[bucket]


def test_a_counter_that_began_again() -> None:
    """A process that was restarted between two looks counts from 0: growth is never negative, and never counted twice."""
    texts = []
    for value in (100, 7):
        registry = CollectorRegistry()
        Counter("c", "-", registry=registry).inc(value)
        texts.append(generate_latest(registry).decode())
    assert Period(Scrape(texts[0]), Scrape(texts[1]), 2.0).grown("c_total") == 7
