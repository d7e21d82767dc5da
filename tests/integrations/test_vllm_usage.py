"""The usage ledger of vLLM's connector against the counters of vLLM itself. Needs FOREWORD_VLLM_PYTHON; skipped without."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
from vllm_process import needs_vllm
from vllm_server import VllmServer, make_byte_model
from vllm_waits import WITHIN

from foreword.blocks.salt import Salt

pytestmark = needs_vllm

TENANTS = (None, "one salt", "another salt", Salt(b"a tenant of a router").text)
REQUESTS, LONGEST = 60, 200


def settings(folder: Path) -> str:
    extra = {"store": [f"disk://{folder}/kv?size=64MiB"], "usage_ledger": str(folder / "usage.jsonl")}
    patient = {"lookup_timeout": 60.0, "load_timeout": 300.0}
    return json.dumps({"kv_connector": "ForewordConnector", "kv_connector_module_path": "vllm_patient",
                       "kv_role": "kv_both", "kv_connector_extra_config": extra | patient})  # fmt: skip


def counted(client: httpx.Client, name: str) -> int:
    lines = client.get("/metrics").text.splitlines()
    return int(sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name + "{")))


def leave(client: httpx.Client, body: dict[str, Any], after: int) -> None:
    """Read some pieces of a streamed answer, and close the connection."""
    with client.stream("POST", "/v1/completions", json={**body, "max_tokens": 800, "stream": True}) as answer:
        pieces = answer.iter_lines()
        for _ in range(after):
            next(pieces)


@pytest.mark.slow
def test_sums_are_those_of_vllms_counters(tmp_path: Path) -> None:
    """Each request has one line, also if its client has left or if it makes several answers; tokens of prompts, answers and
    the cache add up to vLLM's counters. A tenant's lines have one digest, and those without a salt none."""
    chance = random.Random(7)
    texts = ["".join(chance.choices("abcdefgh", k=LONGEST)) for _ in range(6)]
    server = VllmServer(
        make_byte_model(tmp_path / "model"), tmp_path / "log", "--kv-transfer-config", settings(tmp_path),
        "--shutdown-timeout", "30", "--block-size", "32", "--kv-cache-memory-bytes", str(64 << 20),
        "--num-gpu-blocks-override", "40",
    )  # fmt: skip
    try:
        while not server.healthy():
            time.sleep(0.1)
        asked, left = Counter[str](), 0
        with httpx.Client(base_url=server.url, timeout=WITHIN) as client:
            for number in range(REQUESTS):
                salt = TENANTS[number % len(TENANTS)]
                body = {
                    "model": "tiny",
                    "prompt": chance.choice(texts)[: chance.randint(1, LONGEST)],
                    "ignore_eos": True,
                }
                body |= {"cache_salt": salt} if salt else {}
                if number % 10 == 9:
                    leave(client, body, chance.randint(1, 5))
                    asked[salt or ""] += 1
                    left += 1
                else:
                    several = 1 + number % 2
                    body |= {"max_tokens": chance.randint(1, 12), "n": several, "temperature": 1.0, "seed": number}
                    assert client.post("/v1/completions", json=body).status_code == 200
                    asked[salt or ""] += several
            deadline = time.monotonic() + WITHIN
            while len(lines := [json.loads(one) for one in (tmp_path / "usage.jsonl").open()]) < sum(asked.values()):
                assert time.monotonic() < deadline, lines
                time.sleep(0.1)
            usage = [one["usage"] for one in lines]
            assert len({one["id"] for one in lines}) == len(lines) == sum(asked.values())
            # On a busy machine an answer may end before vLLM notices that its client has left.
            assert 0 < sum(one["status"] == 499 for one in lines) <= left
            assert sorted(Counter(one["tenant"] for one in lines).values()) == sorted(asked.values())
            assert sum(not one["tenant"] for one in lines) == asked[""]
            sums = {field: sum(one.get(field, 0) for one in usage) for field in ("prompt", "cached", "output")}
            assert sums["prompt"] == counted(client, "vllm:prompt_tokens_total")
            assert sums["cached"] == counted(client, "vllm:prompt_tokens_cached_total")
            # vLLM's front counts what it has received when the client leaves: the engine may be further.
            whole = sum(one["usage"].get("output", 0) for one in lines if one["status"] == 200)
            assert whole < counted(client, "vllm:generation_tokens_total") <= sums["output"]
            assert sum(sum(one.get("read", {}).values()) for one in usage) > 0
            assert all(one["model"] == "tiny" and len(one["weights"]) == 64 for one in usage)
    finally:
        server.stop()
