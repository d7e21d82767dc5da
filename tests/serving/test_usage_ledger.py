"""The usage ledgers of a router and its servers against the engines' own counters."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import http_client
import pytest
from router_parts import RouterThread
from server_process import ControlledProcess, slow
from shared_server import until

REQUESTS = 48
TEXTS = [f"Chapter {number}. " + "The cache keeps what was computed once. " * 12 for number in range(4)]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


def sums(path: Path) -> Counter[str]:
    found: Counter[str] = Counter()
    for line in lines(path):
        usage = line.get("usage", {})
        found.update({name: usage.get(name, 0) for name in ("prompt", "output", "cached")})
    return found


def counted(url: str) -> Counter[str]:
    """By the engine."""
    text = http_client.get(f"{url}/metrics").text
    names = {"prompt": "vllm:prompt_tokens_total", "output": "vllm:generation_tokens_total"}
    return Counter(
        {key: round(float(re.search(rf"^{name}{{.*}} (\S+)$", text, re.M)[1])) for key, name in names.items()}
    )  # type: ignore[index]


def ask(url: str, draw: random.Random) -> tuple[int, int]:
    """One request. Returns its prompt and output tokens as the client saw them."""
    body = {"prompt": draw.choice(TEXTS) + f"Question {draw.randrange(9)}.", "max_tokens": draw.randint(1, 12)}
    body |= {"temperature": 0, "ignore_eos": True}
    usage = http_client.post(f"{url}/v1/completions", json=body).json()["usage"]
    return usage["prompt_tokens"], usage["completion_tokens"]


def leave(url: str, draw: random.Random) -> None:
    """A client that leaves after the first event of a long answer."""
    body = {"prompt": draw.choice(TEXTS), "max_tokens": 400, "stream": True, "ignore_eos": True}
    with http_client.stream("POST", f"{url}/v1/completions", json=body) as answer:
        next(answer.iter_lines())


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ledgers_have_what_engines_count(tmp_path: Path) -> None:
    """With two servers behind a router: the router's ledger has each request once, with the tokens that its client was told;
    the ledgers of the servers together have what their engines counted. A request whose client leaves is in both, with its
    prompt and what was seen of its answer."""
    draw = random.Random(5)
    ledgers = [tmp_path / f"server{number}.jsonl" for number in range(2)]
    routed = tmp_path / "router.jsonl"
    servers = [ControlledProcess("--usage-ledger", str(path)) for path in ledgers]
    urls = [server.wait_ready() for server in servers]
    router = RouterThread(*(f"--replica={url}" for url in urls), "--usage-ledger", str(routed))
    try:
        router.wait_for(2)
        told = [ask(router.url, draw) for _ in range(REQUESTS)]
        until(lambda: len(lines(routed)) == sum(len(lines(path)) for path in ledgers) == REQUESTS, 60)
        assert [(line["usage"]["prompt"], line["usage"]["output"]) for line in lines(routed)] == told
        both, engines = [sums(path) for path in ledgers], [counted(url) for url in urls]
        for key in ("prompt", "output"):
            assert sum(one[key] for one in both) == sum(one[key] for one in engines) == sums(routed)[key]
        assert sums(routed)["cached"] == sum(one["cached"] for one in both) > 0
        with slow(*servers):
            for _ in range(4):
                leave(router.url, draw)
            until(lambda: len(lines(routed)) == sum(len(lines(path)) for path in ledgers) == REQUESTS + 4, 60)
        for path in (routed, *ledgers):
            left = [line for line in lines(path) if line["status"] == 499]
            assert path != routed or len(left) == 4
            assert all(line["usage"]["prompt"] > 100 and 0 < line["usage"]["output"] < 400 for line in left)
    finally:
        router.kill()
        for server in servers:
            server.kill()
