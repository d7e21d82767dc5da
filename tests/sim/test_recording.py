"""Recordings contain no text and no tokens, and the simulator reproduces the engine's cache hits from them."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest
from config_constants import constants

from foreword.blocks.keys import Scope, chain_keys
from foreword.engine.request import SamplingParams
from foreword.engine_config import EngineConfig
from foreword.entrypoints.llm import LLM
from foreword.errors import ConfigError
from foreword.observability.recording import RequestRecord, TraceRecorder
from foreword.router_extras.router_misses import record_finished
from foreword.routing.fleet import Fleet
from foreword.routing.placement import PlacementQuery
from foreword.server.engine_observers import EngineRecorder
from foreword.sim.costs import FleetSpec
from foreword.sim.run import simulate
from foreword.sim.trace import read_trace

ROOT = Scope(b"model", 16).root()


def request(tokens: list[int], answer: list[int], arrived: float = 0.0, session: str | None = None) -> RequestRecord:
    keys = chain_keys(ROOT, tokens + answer, 16)
    return RequestRecord(arrived, keys, 16, len(tokens), len(answer), 0, 0.5, 1.0, session)


def record(
    path: Path, requests: list[RequestRecord], salt: str | None = None, max_bytes: int = 1 << 30
) -> TraceRecorder:
    recorder = TraceRecorder(path, salt=salt, max_bytes=max_bytes, clock=lambda: 0.0)
    for one in requests:
        recorder.add(one)
    recorder.close()
    return recorder


def test_the_simulator_reproduces_the_engines_hits(tmp_path: Path) -> None:
    """Conversations through the real engine, recorded and simulated: each request has the same number of cached tokens, and
    the file contains no tokens and no keys."""
    path, rng = tmp_path / "trace.jsonl", random.Random(3)
    recorder = TraceRecorder(path)
    options = {"threads": 1, "self_check": False, "seed": 0}
    with constants(EngineConfig, partial_reuse=False):
        llm = LLM(observers=[EngineRecorder(recorder, 16)], kv_memory="8192 tokens", **options)
    talks = [[rng.randrange(300, 4000) for _ in range(40)] for _ in range(3)]
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    found: list[int] = []
    for turn in range(9):
        talk = talks[turn % 3]
        [output] = llm.generate([talk], params)
        found.append(output.cached_tokens)
        talk += list(output.outputs[0].tokens) + [rng.randrange(300, 4000) for _ in range(25)]
    recorder.close()
    assert recorder.written == 9 and recorder.dropped == 0
    text = path.read_text()
    for block in (talks[0][:16], talks[1][16:32]):
        assert ", ".join(map(str, block)) not in text and ",".join(map(str, block)) not in text
    # Slowly, so that each output ends before the next turn arrives, as in the recording.
    trace = read_trace(path, speed=0.001)
    outcomes = simulate(trace, FleetSpec(replicas=1, device_tokens=8192, block_size=16)).outcomes
    assert [one.cached_tokens for one in outcomes] == found
    assert [json.loads(line)["cached_tokens"] for line in text.splitlines()] == found
    assert sum(found) > 9 * 20, "outputs are cached too"


def test_hashes_depend_on_the_salt(tmp_path: Path) -> None:
    """Equal salts give equal hashes in two files, so that they fit together; other salts, and drawn ones, give others."""
    asked = request(list(range(64)), list(range(64, 80)), session="tenant/chat")
    lines = []
    for name, salt in (("a", "salt"), ("b", "salt"), ("c", "other"), ("d", None), ("e", None)):
        record(tmp_path / name, [asked], salt)
        lines.append(json.loads((tmp_path / name).read_text()))
    same, *others = [(line["hash_ids"], line["session"]) for line in lines[1:]]
    assert (lines[0]["hash_ids"], lines[0]["session"]) == same
    assert len({tuple(ids) for ids, _ in [same, *others]}) == 4
    assert "chat" not in (tmp_path / "a").read_text()
    first, second = read_trace([tmp_path / "a", tmp_path / "b"])
    assert first.prompt() == second.prompt() and first.output() == second.output()


def test_lengths_that_are_no_multiple_of_a_block(tmp_path: Path) -> None:
    """A prompt whose last block is partly filled is read back with its length, and shares only its full blocks."""
    asked = [request(list(range(40)), [7]), request([*range(40), 99], [7], 1.0)]
    record(tmp_path / "trace", asked)
    first, second = read_trace(tmp_path / "trace")
    assert (first.prompt_tokens, second.prompt_tokens, second.arrival) == (40, 41, 1.0)
    assert first.prompt()[:32] == second.prompt()[:32]
    assert first.prompt()[32:] != second.prompt()[32:40]


def test_a_recording_ends_at_its_size(tmp_path: Path) -> None:
    """A recording exceeds its size limit by less than a line, dropped requests are counted, and all lines are complete."""
    recorder = record(tmp_path / "trace", [request(list(range(160)), [1])] * 50, max_bytes=1000)
    lines = (tmp_path / "trace").read_text().splitlines()
    assert recorder.written == len(lines) and recorder.written + recorder.dropped == 50
    assert 1000 <= sum(len(line) + 1 for line in lines) < 1000 + len(lines[0]) + 1
    assert all(json.loads(line)["input_length"] == 160 for line in lines)


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    """An existing file is not changed; a missing folder is an error."""
    path = tmp_path / "trace"
    path.write_text("kept")
    with pytest.raises(ConfigError, match="exists already"):
        TraceRecorder(path)
    assert path.read_text() == "kept"
    with pytest.raises(ConfigError, match="cannot write the recording"):
        TraceRecorder(tmp_path / "none" / "trace")


def test_a_router_records_successful_requests(tmp_path: Path) -> None:
    """Finished requests are recorded with replica, hashed session, times and lengths; failed ones are not."""
    recorder, fleet = TraceRecorder(tmp_path / "trace", clock=lambda: 100.0), Fleet()
    fleet.on_finished = record_finished(recorder.add)
    fleet.add("http://a")
    query = PlacementQuery(chain_keys(ROOT, list(range(100)), 16), 100, 16, session="me")
    for name in ("1", "2", "3"):
        fleet.sent(name, query, fleet.place(query, 100.0), 100.0)
    fleet.first_token("1", 100.5)
    fleet.finished("1", 102.0, cached_tokens=16, output_tokens=9)
    fleet.failed("2", 103.0)
    fleet.finished("3", 104.0)
    recorder.close()
    first, second = map(json.loads, (tmp_path / "trace").read_text().splitlines())
    assert (first["timestamp"], first["input_length"], first["output_length"]) == (0, 100, 9)
    assert (first["ttft"], first["seconds"], first["cached_tokens"]) == (0.5, 2.0, 16)
    assert first["replica"] == "http://a" and len(first["hash_ids"]) == 7 and first["session"] != "me"
    assert "ttft" not in second and second["hash_ids"][:6] == first["hash_ids"][:6]


@pytest.mark.slow
def test_a_server_records_its_traffic(tmp_path: Path) -> None:
    """`foreword serve --record`: after SIGTERM the file contains the requests and the simulator can read it."""
    path = tmp_path / "trace.jsonl"
    flags = ["--port", "0", "--threads", "1", "--kv-memory", "4096 tokens", "--no-self-check", "--record", str(path)]
    environ = {key: value for key, value in os.environ.items() if not key.startswith("FOREWORD_")}
    process = subprocess.Popen(
        [sys.executable, "-m", "foreword", "serve", *flags], stderr=subprocess.PIPE, text=True, env=environ
    )
    timer = threading.Timer(120, process.kill)
    timer.start()
    try:
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")
        url = next(match[1] for line in lines if (match := re.search(r"listens on (http://[^\s;]+)", line)))
        assert any("ready:" in line for line in lines)
        body = {"prompt": "def parse(text):\n" * 20, "max_tokens": 5, "temperature": 0}
        usages = [httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()["usage"] for _ in range(2)]
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    finally:
        timer.cancel()
        process.kill()
        process.wait()
        if process.stderr is not None:
            process.stderr.close()
    first, second = read_trace(path)
    assert first.prompt_tokens == second.prompt_tokens == usages[0]["prompt_tokens"]
    recorded = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["cached_tokens"] for line in recorded] == [
        usage["prompt_tokens_details"]["cached_tokens"] for usage in usages
    ]
    assert "parse" not in path.read_text()
