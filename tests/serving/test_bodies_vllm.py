"""Seeded bodies straight to a real vLLM, and through a router in front of it. Needs FOREWORD_VLLM_PYTHON, an interpreter with
vLLM; skipped without it. FOREWORD_BODIES: how many (500 for a whole run), FOREWORD_SEED: of which seed."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from router_parts import RouterProcess
from shared_server import until
from vllm_bodies import bodies, odd_requests
from vllm_process import needs_vllm
from vllm_server import VllmServer
from vllm_waits import WITHIN

import foreword
from foreword.referee.models import IMAGES

pytestmark = [*needs_vllm[:2], pytest.mark.timeout(3600)]
COUNT, SEED = int(os.environ.get("FOREWORD_BODIES", "80")), int(os.environ.get("FOREWORD_SEED", "1"))
NANO = Path(foreword.__file__).parent / "models" / "stdlib-nano"
SHOWN_BY_TEMPLATE = "{% for m in messages %}t7 {{ m.content }} {% endfor %}t8"
MODELS: dict[str, tuple[Callable[[Path], Path], tuple[str, ...]]] = {
    "text": (lambda folder: NANO, ()),
    "images": (IMAGES.build, ("--chat-template", SHOWN_BY_TEMPLATE, "--max-model-len", "512")),
}
# Fields that differ between two answers to one request.
_NAMES = (
    "id|item_id|call_id|response_id|tool_use_id|request_id|created|created_at|completed_at|system_fingerprint|signature"
)
CHANGING = re.compile(rf'"({_NAMES})": ?("[^"]*"|[\d.]+|null)')
AGAIN = 6
# An error of vLLM's own in a stream, and what the router says of it.
FAILED = re.compile('"Internal server error"|"type":"internal_error"|"code":"replica_failed"')
HEADERS = ("content-type", "retry-after", "allow")


@pytest.fixture(scope="module", params=MODELS)
def urls(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """URLs of vLLM, and of the router in front of it."""
    folder = tmp_path_factory.mktemp("vllm")
    build, more = MODELS[request.param]
    flags = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--no-enable-prefix-caching", *more)
    size = ("--kv-cache-memory-bytes", str(256 << 20), "--max-num-seqs", "4")
    server = VllmServer(build(folder / "model"), folder / "vllm.log", *size, *flags)
    try:
        until(server.healthy, 600)
        router = RouterProcess("--replica", server.url).wait_for(1)
        yield server.url, router.url
        router.kill()
    finally:
        server.kill()


def ask(client: httpx.Client, url: str, data: bytes) -> tuple[Any, str]:
    """Asks, and returns what must be equal: status, headers and bytes, but ids and times, and the order of several choices; of
    a refusal the status; `failed` where vLLM has an exception. Then the text."""
    try:
        answer = client.post(url, content=data)
    except httpx.RemoteProtocolError as error:
        return "failed", str(error)
    text = CHANGING.sub("", answer.text)
    if answer.status_code >= 500 or FAILED.search(text):
        return "failed", text
    if answer.status_code != 200:
        return answer.status_code, text
    heads = tuple(answer.headers.get(name, "").partition(";")[0] for name in HEADERS)
    lines = text.split("\n")
    return (200, heads, sorted(lines) if '"index":1' in text else lines), text


@pytest.mark.parametrize("requests", [partial(bodies, SEED, COUNT), odd_requests], ids=["seeded", "odd"])
def test_equal_answers_or_equal_refusals(
    urls: tuple[str, str], requests: Callable[[], Iterator[tuple[str, bytes]]]
) -> None:
    """The router answers as the vLLM behind it would, in every dialect: the same bytes but for ids and times where vLLM
    succeeds, the same status where it refuses, and an error where it fails."""
    found, counts = [], Counter[str]()
    with httpx.Client(timeout=WITHIN, headers={"content-type": "application/json"}) as client:
        for path, data in requests():
            # How many tokens a chunk has depends on when they come.
            seen = list[Any]()
            for _ in range(AGAIN):
                (one, straight), (other, through) = (ask(client, f"{url}{path}", data) for url in urls)
                fails = one == "failed" and other in ("failed", 400)  # the router may refuse what vLLM fails at
                if one == other or fails:
                    break
                seen.append(one)
            # vLLM may have several greedy answers to one request: then status and headers must be equal.
            answered = isinstance(one, tuple) and isinstance(other, tuple)
            varies = answered and any(straight != seen[0] for straight in seen)
            if one != other and varies and one[:2] == other[:2]:
                kind = "vLLM's own answers vary"
            elif one != other and not fails:
                kind = f"different: {straight[:3]} {through[:3]}"
                found.append((path, data[:1500], straight[:900], through[:900]))
            elif isinstance(one, tuple):
                kind = "equal answers"
            elif fails:
                kind = "vLLM fails"
            else:
                kind = "equal refusals" if straight == through else "equal refusals, in the router's words"
            counts[f"{path}: {kind}"] += 1
    print("", *(f"{count:5} {kind}" for kind, count in sorted(counts.items())), sep="\n")
    for line in found:
        print(*line, sep="\n  ")
    assert not found
