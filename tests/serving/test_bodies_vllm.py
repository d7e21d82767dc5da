"""Seeded bodies straight to a real vLLM, and through a router in front of it. Needs FOREWORD_VLLM_PYTHON, an interpreter with
vLLM; skipped without it. FOREWORD_BODIES: how many (500 for a whole run)."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
from fuzz_requests import GENERATED, fuzz_body
from router_parts import RouterProcess
from shared_server import until
from vllm_process import needs_vllm
from vllm_server import VllmServer

import foreword

pytestmark = [*needs_vllm[:2], pytest.mark.timeout(3600)]
COUNT = int(os.environ.get("FOREWORD_BODIES", "80"))
MODEL = Path(foreword.__file__).parent / "models" / "stdlib-nano"
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
# Foreword's own fields, or those that the router sets or needs.
OWN = (
    "cache_report",
    "prefix",
    "cache_salt",
    "prompt_cache_retention",
    "continuation",
    "store",
    "previous_response_id",
)
# What differs between two answers to one request.
_NAMES = "id|item_id|call_id|request_id|created|created_at|completed_at|system_fingerprint"
CHANGING = re.compile(rf'"({_NAMES})": ?("[^"]*"|[\d.]+|null)')


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Of vLLM, and of the router in front of it."""
    log = tmp_path_factory.mktemp("vllm") / "vllm.log"
    flags = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--no-enable-prefix-caching")
    server = VllmServer(MODEL, log, "--kv-cache-memory-bytes", str(256 << 20), "--max-num-seqs", "4", *flags)
    try:
        until(server.healthy, 600)
        router = RouterProcess("--replica", server.url).wait_for(1)
        yield server.url, router.url
        router.kill()
    finally:
        server.kill()


def bodies() -> Iterator[tuple[str, bytes]]:
    draw = Random(1)
    for _ in range(COUNT):
        path = draw.choice(GENERATED)
        data = fuzz_body(draw, path)
        try:
            body = json.loads(data)
        except ValueError:
            yield path, data
            continue
        if isinstance(body, dict):
            body = {
                "model": "tiny",
                **{name: value for name, value in body.items() if name not in OWN},
                "temperature": 0,
            }
            if path == "/v1/chat/completions" and draw.random() < 0.1:
                body["messages"] = [{"role": "user", "content": [{"type": "text", "text": "hi"}, IMAGE]}]
            if draw.random() < 0.2:
                body["temprature"] = 1
        yield path, json.dumps(body).encode()


def shape(answer: httpx.Response) -> Any:
    """What must be equal: the status, and of an answer all but ids and times."""
    if answer.status_code != 200:
        return answer.status_code
    return 200, CHANGING.sub("", answer.text)


def test_equal_answers_or_equal_refusals(urls: tuple[str, str]) -> None:
    """The router answers as the vLLM behind it would. On completions and chats: the same bytes but for ids and times, where
    vLLM succeeds, and the same status where it refuses. On the other dialects, which are translated: the same status, but
    that the router may understand what vLLM refuses."""
    found, counts = [], Counter[str]()
    with httpx.Client(timeout=120, headers={"content-type": "application/json"}) as client:
        for path, data in bodies():
            straight, through = (client.post(f"{url}{path}", content=data) for url in urls)
            one, other = shape(straight), shape(through)
            if path not in ("/v1/chat/completions", "/v1/completions"):
                one, other = straight.status_code, through.status_code
                if (one, other) == (400, 200):
                    counts[f"{path} only the router understands it"] += 1
                    continue
            kind = "equal" if one == other else f"{straight.status_code} {through.status_code}"
            counts[f"{path} {kind}"] += 1
            if one != other:
                found.append((path, data[:700], straight.text[:500], through.text[:500]))
    print(dict(counts))
    for line in found:
        print(*line, sep="\n  ")
    assert not found
