"""Starts `llama_script.py` in an environment with llama-cpp-python, which FOREWORD_LLAMA_PYTHON names (`.ci/llama` makes one),
on tiny random models."""

from __future__ import annotations

import json
import os
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest

PYTHON = os.environ.get("FOREWORD_LLAMA_PYTHON", "")
HERE = Path(__file__).parent
CHECKOUT = HERE.parent.parent
BLOCK = 32

needs_llama = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="FOREWORD_LLAMA_PYTHON names no interpreter with llama-cpp-python"),
    pytest.mark.timeout(600),
]


def make_model(path: Path, seed: int = 0, *, exact: bool = True) -> Path:
    """In float32, in which a hit and a computation differ so little that greedy tokens are equal. In Q8_0 if not `exact`."""
    command = [PYTHON, "-m", "benchmarks.engine.gguf_model", str(path), "--random", "tiny", f"--seed={seed}"]
    command += ["--exact"] * exact
    subprocess.run(command, check=True, cwd=CHECKOUT, capture_output=True, timeout=300)
    return path


def make_kind(kind: str, path: Path) -> Path:
    """A model of `llama_kinds.py`."""
    subprocess.run([PYTHON, str(HERE / "llama_kinds.py"), kind, str(path)], check=True, timeout=300)
    return path


def start(model: Path, store: list[str] | None, rounds: list[list[list[int]]], **job: Any) -> subprocess.Popen[str]:
    """`job` is that of llama_script.py; `environment` are variables."""
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), **job.pop("environment", {})}
    given = {"model": str(model), "store": store, "rounds": rounds, **job}
    command = [PYTHON, str(HERE / "llama_script.py"), json.dumps(given)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def result(process: subprocess.Popen[str]) -> dict[str, Any]:
    said, warned = process.communicate(timeout=500)
    assert process.returncode == 0, warned[-3000:]
    found: dict[str, Any] = json.loads(said.strip().splitlines()[-1])
    return found


def llama(model: Path, store: list[str] | None, rounds: list[list[list[int]]], **job: Any) -> dict[str, Any]:
    return result(start(model, store, rounds, **job))


def prompts(seed: int, lengths: list[int]) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(3, 4000) for _ in range(length)] for length in lengths]


def answers(found: list[dict[str, Any]]) -> list[list[int]]:
    return [one["tokens"] for one in found]


def loaded(found: list[dict[str, Any]]) -> list[int]:
    return [one["loaded"] for one in found]


def disk(folder: Path, size: str = "256MiB") -> str:
    return f"disk://{folder}/kv?size={size}"
