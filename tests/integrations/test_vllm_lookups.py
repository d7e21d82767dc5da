"""Lookups and tiers that fail as an operator of `vllm serve` sees them. Needs FOREWORD_VLLM_PYTHON, as test_vllm.py does;
skipped without. On CPUs vLLM's scheduler and its worker are two processes, each with its own connections to the stores."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis as redis_client
from prometheus_client.parser import text_string_to_metric_families
from servers import RedisServer
from vllm_process import CHECKOUT, HERE, needs_vllm
from vllm_server import BLOCK, VllmServer, make_byte_model
from vllm_waits import WITHIN

pytestmark = needs_vllm


class Operated:
    """A server with a small disk and Redis, its log and its metrics."""

    def __init__(self, folder: Path, redis: RedisServer) -> None:
        self.redis = redis
        self.disk = folder / "disk"
        self.asked = 0
        (folder / "archive").mkdir()
        archive = f"disk://{folder}/archive?read_only=1&label=archive"
        transfer = {
            "kv_connector": "ForewordConnector",
            "kv_connector_module_path": "foreword.integrations.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "store": [f"disk://{self.disk}/kv?size=1GiB", redis.url, archive],
                "lookup_timeout": 2.0,  # so that Redis is not late because the machine is busy
            },
        }
        packages = folder / "packages"
        packages.mkdir()
        # Redis's client, which an environment with vLLM may lack. It is plain Python.
        (packages / "redis").symlink_to(Path(redis_client.__file__).parent)
        self.server = VllmServer(
            make_byte_model(folder / "model"), folder / "log", "--max-model-len", "1024", "--block-size", str(BLOCK),
            "--kv-cache-memory-bytes", str(64 << 20), "--max-num-seqs", "4", "--seed", "0",
            "--kv-transfer-config", json.dumps(transfer), forked=False, VLLM_LOG_STATS_INTERVAL="1",
            VLLM_SERVER_DEV_MODE="1", VLLM_LOGGING_LEVEL="INFO", PYTHONPATH=f"{CHECKOUT}:{HERE}:{packages}",
        )  # fmt: skip

    def ask(self, seed: int, length: int = 300) -> int:
        """Complete a prompt. Returns its cached tokens."""
        self.asked += 1
        words = " ".join(f"w{(seed * 7919 + i * i) % 997}" for i in range(length))[:length]
        body = {"prompt": words, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{self.server.url}/v1/completions", json=body, timeout=WITHIN)
        assert answer.status_code == 200, answer.text
        return (answer.json()["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0

    def forget(self) -> None:
        """Reset vLLM's own prefix cache."""
        assert httpx.post(f"{self.server.url}/reset_prefix_cache", timeout=WITHIN).status_code == 200

    def metrics(self, name: str) -> dict[tuple[str, ...], float]:
        """The values of a metric of the connector, by its labels `tier`, `process`, `state`, `outcome`."""
        text = httpx.get(f"{self.server.url}/metrics", timeout=WITHIN).text
        found: dict[tuple[str, ...], float] = {}
        for family in text_string_to_metric_families(text):
            for one in family.samples:
                if one.name == f"vllm:foreword_{name}":
                    labels = (one.labels.get(label) for label in ("tier", "process", "state", "outcome"))
                    found[tuple(label for label in labels if label)] = one.value
        return found

    def states(self) -> dict[tuple[str, str], str]:
        """The state of each tier, by tier and process."""
        return {
            (tier, process): state for (tier, process, state), is_now in self.metrics("tier_state").items() if is_now
        }

    def until(
        self, seen: Callable[[], bool], name: str, act: Callable[[], Any] = lambda: None, within: float = WITHIN
    ) -> None:
        deadline = time.monotonic() + within
        while not seen():
            assert time.monotonic() < deadline, f"not seen: {name}\n{self.lines('oreword')[-20:]}"
            act()
            time.sleep(0.1)

    def lines(self, word: str) -> list[str]:
        return [line for line in self.server.log.read_text().splitlines() if word in line]

    def has_line(self, level: str, process: str, words: str) -> bool:
        """Whether the log has a line of that level, with its time, its process and where it is from."""
        line = re.compile(
            rf"\({process}\w* pid=\d+\) {level} \d\d-\d\d \d\d:\d\d:\d\d \[[\w.]+:\d+\] Foreword: .*{re.escape(words)}"
        )
        return any(line.search(one) for one in self.lines(words))


@pytest.fixture(scope="module")
def operated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operated]:
    folder = tmp_path_factory.mktemp("operated")
    (folder / "disk").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m,mode=0700", "foreword-test", str(folder / "disk")]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no small file system can be mounted here")
    redis = RedisServer(folder / "redis")
    try:
        made = Operated(folder, redis)
        try:
            made.until(made.server.healthy, "a server that is ready", within=400)
            yield made
        finally:
            made.server.kill()
    finally:
        redis.kill()
        subprocess.run(["umount", "-l", str(folder / "disk")], check=True)


def test_lookups_are_counted(operated: Operated) -> None:
    """Before the first request every outcome has a line. Then the outcomes of requests add up to the requests, and the tokens
    to those that were looked up; vLLM's log line has them too."""
    assert operated.metrics("request_lookups_total").keys() == {
        ("found",), ("absent",), ("timed_out",), ("tier_off",), ("not_allowed",), ("too_small",)
    }  # fmt: skip
    assert {tier for tier, _ in operated.metrics("lookups_total")} == {"disk", "redis", "archive"}
    assert operated.ask(1) == 0 and operated.ask(2, BLOCK - 1) == 0
    operated.until(lambda: operated.metrics("saved_blocks_total")[("redis",)] >= 300 // BLOCK, "saved blocks")
    operated.forget()
    assert operated.ask(1) == 300 // BLOCK * BLOCK
    outcomes = operated.metrics("request_lookups_total")
    assert {name: count for (name,), count in outcomes.items() if count} == {"found": 1, "absent": 1, "too_small": 1}
    tokens = operated.metrics("request_lookup_tokens_total")
    assert (tokens[("found",)], tokens[("absent",)]) == (288, 288)
    assert operated.metrics("lookups_total")[("disk", "found")] >= 1
    assert operated.metrics("lookup_seconds_total")[("disk",)] > 0
    assert {state for (tier, _), state in operated.states().items() if tier != "archive"} == {"ok"}
    operated.until(lambda: bool(operated.lines("lookups found=1")), "vLLM's log line")


def test_the_set_up_loses_work(operated: Operated) -> None:
    """A server without --shutdown-timeout says at its start what that costs."""
    assert operated.has_line("WARNING", "EngineCore", "start it with --shutdown-timeout")


def test_a_redis_that_hangs(operated: Operated) -> None:
    """The scheduler's tier is off while Redis hangs, with a line when that begins and ends; the disk hits all the time."""
    operated.ask(3)
    with operated.redis.stopped():

        def ask() -> None:
            operated.forget()
            operated.ask(3)
            operated.ask(int(1000 * time.monotonic()) % 10**6, 100)

        operated.until(lambda: operated.states()[("redis", "scheduler")] == "off", "the tier is off", ask)
        operated.forget()
        assert operated.ask(3) == 300 // BLOCK * BLOCK
    assert operated.has_line("WARNING", "EngineCore", "tier redis is not used for now")
    operated.until(lambda: operated.states()[("redis", "scheduler")] == "ok", "the tier is used again", ask)
    assert operated.has_line("INFO", "EngineCore", "tier redis works again")
    missed = operated.metrics("request_lookups_total")
    assert missed[("timed_out",)] + missed[("tier_off",)] > 0


def test_a_disk_that_is_full(operated: Operated) -> None:
    """The worker's tier is full, and takes blocks again when there is room: states and lines. The read-only tier is shown."""
    seeds = iter(range(100, 10_000))

    def ask() -> None:
        operated.ask(next(seeds), 900)

    def is_now(state: str) -> bool:
        return operated.states().get(("disk", "worker 0")) == state

    operated.until(lambda: is_now("full"), "a full disk", ask)
    assert operated.has_line("WARNING", "Worker", "tier disk is full")
    assert operated.states()[("archive", "worker 0")] == operated.states()[("archive", "scheduler")] == "read_only"
    subprocess.run(["mount", "-o", "remount,size=64m", str(operated.disk)], check=True)

    def ask_little() -> None:
        operated.ask(next(seeds), BLOCK)
        time.sleep(1)

    operated.until(lambda: is_now("ok"), "a disk with room", ask_little)
    assert operated.has_line("INFO", "Worker", "tier disk takes blocks again")


def test_outcomes_add_up(operated: Operated) -> None:
    """After all that, every request has one outcome."""
    operated.until(
        lambda: sum(operated.metrics("request_lookups_total").values()) == operated.asked, "an outcome of each request"
    )
