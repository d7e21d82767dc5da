"""The portable layout under vLLM: its packings, and instances with other block sizes and ranks over one store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm_process import answers, disk, make_model, needs_vllm, prompts, run

pytestmark = needs_vllm


def test_packings_of_the_cpu_backend() -> None:
    """KV that vLLM's CPU kernels write for one instruction set and block size, and Foreword loads for another, has the bytes
    that they write there themselves."""
    job = {
        "packings": ["vec", "vec16", "amx"],
        "dtypes": ["float32", "bfloat16", "float16"],
        "block_sizes": [32, 64, 128],
        "head_sizes": [32, 64, 80, 96, 112, 128, 256],
    }
    found = run("vllm_packing_script.py", job)
    assert found["different"] == []
    assert found["moves"] >= 1512  # without AMX; more with it


RANKS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
CORES = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
UNITS = {"layout": "portable", "unit_tokens": 32, "head_units": 2}
FIRST = prompts(41, [130, 200, 256])
SECOND = prompts(42, [100, 192, 300])


def frames(folder: Path) -> int:
    return sum(path.is_file() and path.read_bytes()[-192:-188] == b"FWKV" for path in folder.rglob("*"))


def hits(asked: list[list[int]], block_size: int) -> list[int]:
    return [len(prompt) // block_size * block_size for prompt in asked]


def instance(model: Path, folder: Path, asked: list[list[list[int]]], block_size: int, ranks: int) -> list[Any]:
    """Tokens and cached tokens of each round in a new process over the folder. The last round's prompts are new."""
    known = frames(folder)
    written = [known] * (len(asked) - 1) + [known + sum(hits(asked[-1], block_size)) // 32 * 2]
    job = {
        "model": str(model),
        "store": [disk(folder)],
        "rounds": asked,
        "extra": UNITS,
        "llm": {"block_size": block_size, **(RANKS if ranks > 1 else {})},
        **({"files": str(folder), "counts": written} if ranks > 1 else {}),
    }
    rounds: list[Any] = run("vllm_script.py", job, **(CORES if ranks > 1 else {}))["rounds"]
    return rounds


def test_unequal_instances_share_a_store(tmp_path: Path) -> None:
    """Blocks of 32 tokens that an instance with one rank wrote are read by one with two ranks and blocks of 64, and back: all
    full blocks are hits, and the float32 answers are equal."""
    model, folder = make_model(tmp_path / "model"), tmp_path / "store"
    [computed] = instance(model, folder, [FIRST], 32, 1)
    loaded, other = instance(model, folder, [FIRST, SECOND], 64, 2)
    assert answers(loaded) == answers(computed)
    assert [one["cached"] for one in loaded] == hits(FIRST, 64)
    back, again = instance(model, folder, [SECOND, FIRST], 32, 1)
    assert answers(back) == answers(other) and answers(again) == answers(computed)
    assert [one["cached"] for one in back] == hits(SECOND, 64)
    assert [one["cached"] for one in again] == hits(FIRST, 32)
