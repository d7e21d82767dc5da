"""A real Ray cluster on this machine with two vLLM workers. Needs FOREWORD_RAY_PYTHON, an interpreter that has Ray and vLLM
(`.ci/ray`); skipped without."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner
from vllm_process import CHECKOUT, HERE, disk, make_model, result

from benchmarks.vllm.ray_batch import draw, run
from foreword.cli.main import app

PYTHON = os.environ.get("FOREWORD_RAY_PYTHON", "")
DOCUMENTS, PROMPTS, TOKENS, BLOCK = 3, 48, 320, 32

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="FOREWORD_RAY_PYTHON names no interpreter with Ray and vLLM"),
    pytest.mark.timeout(1500),
]


def stored(url: str) -> tuple[int, int]:
    """Blocks in a store, and how often they were found."""
    said = CliRunner().invoke(app, ["inspect", "--json", url], catch_exceptions=False)
    [tier] = json.loads(said.output)["tiers"]
    return tier["blocks"], sum(group["hits"] for group in tier["layouts"])


def alone(model: Path, prompts: list[list[int]]) -> list[list[int]]:
    """The answers of one vLLM without Ray and without a store."""
    job = {"model": str(model), "store": None, "rounds": [prompts]}
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1"}
    command = [PYTHON, str(HERE / "vllm_script.py"), json.dumps(job)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=500, check=False)
    return [one["tokens"] for one in result(done)["rounds"][0]]


def test_a_job_that_is_killed_and_run_again(tmp_path: Path) -> None:
    """All processes of a job's cluster are killed when half of its prompts are answered. Workers of another cluster find in the
    store what those had computed, and every answer of both jobs is that of a vLLM alone."""
    model, prompts = make_model(tmp_path / "model"), draw(DOCUMENTS, PROMPTS, TOKENS, 500)
    (tmp_path / "prompts").write_text(json.dumps(prompts))
    url = disk(tmp_path)
    asked: dict[str, Any] = {
        "model": str(model), "store": [url], "prompts": str(tmp_path / "prompts"), "workers": 2,
        "llm": {"max_model_len": 512, "kv_cache_memory_bytes": 128 << 20},
    }  # fmt: skip
    killed = run(PYTHON, asked, tmp_path / "log", until=PROMPTS // 2)
    blocks, found = stored(url)
    assert PROMPTS // 2 <= len(killed.answers) < PROMPTS and killed.workers == 2
    assert blocks >= DOCUMENTS * (TOKENS // BLOCK)
    again = run(PYTHON, asked, tmp_path / "log")
    assert len(again.answers) == PROMPTS and again.workers == 2
    # Each document is loaded by the first worker that meets it, at least.
    assert stored(url)[1] - found >= DOCUMENTS * (TOKENS // BLOCK)
    right = alone(model, prompts)
    for job in (killed, again):
        for number, answer in job.answers.items():
            assert answer["tokens"] == right[number]
