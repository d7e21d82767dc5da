"""vLLM with two ranks (tensor parallel), each with its part of every block, over one folder."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from vllm_process import BLOCK, RemoteVllm, answers, disk, make_model, needs_vllm, prompts, run

from foreword.conformance import soon
from foreword.store.frame import Header, read_header
from foreword.store.urls import open_store

pytestmark = needs_vllm

ASKED = prompts(31, [100, 200, 256])
OTHERS = prompts(32, [128, 210])
BLOCKS = sum(len(prompt) // BLOCK for prompt in ASKED)
RANKS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
COUNTED = {**RANKS, "disable_log_stats": False}
CORES = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
HITS = [len(prompt) // BLOCK * BLOCK for prompt in ASKED]


def two_ranks(model: Path, store: list[str] | None, folder: Path, rounds: int) -> dict[str, Any]:
    job = {
        "model": str(model),
        "store": store,
        "rounds": [ASKED] * rounds,
        "llm": RANKS,
        "files": str(folder),
        "counts": [2 * BLOCKS] * rounds,
    }
    return run("vllm_script.py", job, **CORES)


def frames(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and path.read_bytes()[-192:-188] == b"FWKV"]


def chain_to_depth(depth: int, headers: Iterable[Header]) -> set[bytes]:
    """Keys of the only chain of that length."""
    parents = {header.key: header.parent for header in headers}
    [key] = [header.key for header in headers if header.depth == depth]
    found = set()
    while key in parents:
        found.add(key)
        key = parents[key]
    return found


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("vllm") / "model")


def test_two_ranks(model: Path, tmp_path: Path) -> None:
    """Both ranks save and load their part: the same answers, hits after a reset and in new processes. A block is a miss if one
    rank's part is missing, and is recomputed if one rank's part is damaged."""
    first = two_ranks(model, [disk(tmp_path)], tmp_path, 2)["rounds"]
    assert answers(first[0]) == answers(first[1])
    assert [one["cached"] for one in first[1]] == HITS
    found = {path: read_header(path.read_bytes()) for path in frames(tmp_path)}
    layouts = {header.layout for header in found.values()}
    assert len(layouts) == 2 and len(found) == 2 * BLOCKS
    of_one = {path: header for path, header in found.items() if header.layout == min(layouts)}
    longest = chain_to_depth(7, of_one.values())
    store = open_store([disk(tmp_path)])
    for path, header in of_one.items():
        if header.depth == 1 and header.key not in longest:
            store.delete([header.name], deadline=soon())
        elif header.depth == 5 and header.key in longest:
            flip(path)
    store.close()
    second = two_ranks(model, [disk(tmp_path)], tmp_path, 1)["rounds"][0]
    assert answers(second) == answers(first[0])
    assert [one["cached"] for one in second] == [BLOCK, BLOCK, HITS[2]]


def test_load_or_compute(model: Path, tmp_path: Path) -> None:
    """The scheduler, in another process, knows how fast the ranks read each tier. It loads nothing that is computed faster."""
    served = RemoteVllm(tmp_path / "log", CORES, model, [disk(tmp_path)], llm=COUNTED)
    try:
        served.ready()
        computed = [served.ask(prompt)["tokens"] for prompt in ASKED]
        served.call("forget_written", folder=str(tmp_path), count=2 * BLOCKS)
        assert [served.ask(prompt)["cached"] for prompt in ASKED] == HITS
        [rate] = served.call("compute_quickly")["rates"]
        assert rate > 0
        served.call("forget")
        again = [served.ask(prompt) for prompt in ASKED]
        assert [one["tokens"] for one in again] == computed and [one["cached"] for one in again] == [0] * len(ASKED)
        assert served.call("state")["loads_declined"] == len(ASKED)
    finally:
        served.end()


def test_memory_tiers_and_handoff(model: Path, tmp_path: Path) -> None:
    """The scheduler, in another process, finds blocks in each rank's memory tier: what vLLM evicted is loaded. In a hand-off
    between two vLLMs with two ranks, each rank reads from the same rank, and the leases end on both; answers are the same."""
    tiers = ["memory://?size=64MiB", disk(tmp_path)]
    both = RemoteVllm(tmp_path / "both.log", CORES, model, tiers, extra={"transfer": {}}, llm=COUNTED)
    second = RemoteVllm(tmp_path / "second.log", CORES, model, [], role="kv_consumer", llm=COUNTED)
    try:
        both.ready()
        computed = [both.ask(prompt)["tokens"] for prompt in ASKED]
        both.call("forget_written", folder=str(tmp_path), count=2 * BLOCKS)
        again = [both.ask(prompt) for prompt in ASKED]
        assert [one["tokens"] for one in again] == computed and [one["cached"] for one in again] == HITS
        assert both.call("state")["loaded"] == {"memory": 2 * BLOCKS}
        second.ready()
        free = both.call("state")["free"]
        for prompt in OTHERS:
            params = both.prefill(prompt)
            assert len(params["foreword"]["addresses"]) == 2
            tokens = second.ask(prompt, params)["tokens"]
            assert both.call("idle")["free"] == free
            second.call("forget")
            assert second.ask(prompt)["tokens"] == tokens
        found = both.call("state")
        assert (found["leases"], found["leases_unread"]) == (2 * len(OTHERS), 0)
        assert found["lent_blocks"] + found["shared_blocks"] == 2 * sum(len(prompt) // BLOCK for prompt in OTHERS)
        assert second.call("state")["loaded"] == {"prefill": found["lent_blocks"] + found["shared_blocks"]}
    finally:
        both.end()
        second.end()
