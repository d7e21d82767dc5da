"""vLLM in two ranks (tensor parallel), each with its own part of every block, over one folder."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from vllm_process import BLOCK, Told, answers, disk, make_model, needs_vllm, prompts, run

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
    return [path for path in folder.rglob("*") if path.is_file() and path.read_bytes()[:4] == b"FWKV"]


def chain_to_depth(depth: int, headers: Iterable[Header]) -> set[bytes]:
    """Keys of the one chain that is so long."""
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
    """Both ranks save and load their own part: the same answers, hits after a reset and in fresh processes; where one rank's
    part of a block is missing it is a miss for both, from there on; where it is damaged both compute from there."""
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
            store.delete([header.layout + header.key], deadline=soon())
        elif header.depth == 5 and header.key in longest:
            flip(path)
    store.close()
    second = two_ranks(model, [disk(tmp_path)], tmp_path, 1)["rounds"][0]
    assert answers(second) == answers(first[0])
    assert [one["cached"] for one in second] == [BLOCK, BLOCK, HITS[2]]


def test_memory_and_handing_over(model: Path, tmp_path: Path) -> None:
    """Each rank has a memory tier of its own, which the scheduler, in another process, finds: what vLLM forgot is loaded. What
    it computes for another vLLM of two ranks, each rank reads from its like, and the leases end on both; the answers are
    the same."""
    tiers = ["memory://?size=64MiB", disk(tmp_path)]
    both = Told(tmp_path / "both.log", CORES, model, tiers, extra={"transfer": {}}, llm=COUNTED)
    second = Told(tmp_path / "second.log", CORES, model, [], role="kv_consumer", llm=COUNTED)
    try:
        both.ready()
        computed = [both.ask(prompt)["tokens"] for prompt in ASKED]
        both.tell("forget_written", folder=str(tmp_path), count=2 * BLOCKS)
        again = [both.ask(prompt) for prompt in ASKED]
        assert [one["tokens"] for one in again] == computed and [one["cached"] for one in again] == HITS
        assert both.tell("state")["loaded"] == {"memory": 2 * BLOCKS}
        second.ready()
        free = both.tell("state")["free"]
        for prompt in OTHERS:
            params = both.prefill(prompt)
            assert len(params["foreword"]["addresses"]) == 2
            tokens = second.ask(prompt, params)["tokens"]
            assert both.tell("idle")["free"] == free
            second.tell("forget")
            assert second.ask(prompt)["tokens"] == tokens
        found = both.tell("state")
        assert (found["leases"], found["leases_unread"]) == (2 * len(OTHERS), 0)
        assert found["lent_blocks"] + found["shared_blocks"] == 2 * sum(len(prompt) // BLOCK for prompt in OTHERS)
        assert second.tell("state")["loaded"] == {"prefill": found["lent_blocks"] + found["shared_blocks"]}
    finally:
        both.end()
        second.end()
