"""`make gpu` on a machine without a GPU: the script itself works."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.steps import STEPS

ROOT = Path(__file__).parents[2]
# What a machine for experiments may not have: importing them fails.
ABSENT = ["zstandard", "starlette", "uvicorn", "zmq", "aiohttp", "prometheus_client"]
BLOCK = f"import sys; sys.modules.update(dict.fromkeys({ABSENT}))"


def run_plan(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "sitecustomize.py").write_text(BLOCK)
    # No GPU is seen, whatever there is.
    hidden = {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1", "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.gpu.plan", "--out", str(folder), *options]
    return subprocess.run(command, env=os.environ | hidden, capture_output=True, text=True, timeout=850, cwd=ROOT)


@pytest.mark.slow
def test_says_that_there_is_no_gpu(tmp_path: Path) -> None:
    """Without a GPU nothing runs, and the status says so."""
    done = run_plan(tmp_path)
    assert done.returncode == 2 and "no GPU" in done.stdout
    assert not list(tmp_path.glob("gpu-plan*"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_steps_run_on_a_cpu(tmp_path: Path) -> None:
    """Every step runs with tiny shapes in Triton's interpreter, without packages that it is not to need."""
    pytest.importorskip("triton")
    done = run_plan(tmp_path, "--device", "cpu", "--tiny")
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "gpu-plan.json").read_text())["results"]
    assert [result["step"] for result in results] == list(STEPS)
    assert all(result["rows"] and not result["error"] for result in results)
    assert "FAILED" not in (tmp_path / "gpu-plan.md").read_text()
