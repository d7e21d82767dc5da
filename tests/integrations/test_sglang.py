"""Runs `sglang_suite.py` and `sglang_tree_suite.py` in an environment with SGLang (`.ci/sglang`), which FOREWORD_SGLANG_PYTHON
names."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

PYTHON = os.environ.get("FOREWORD_SGLANG_PYTHON", "")
HERE = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not PYTHON, reason="FOREWORD_SGLANG_PYTHON names no interpreter with SGLang")
@pytest.mark.parametrize("suite", ["sglang_suite", "sglang_tree_suite"])
def test_under_sglang(suite: str) -> None:
    """HiCache's storage contract holds over Foreword, under SGLang itself, and SGLang's radix tree loads what another wrote.
    Each in a process of its own: SGLang's test kit sets options of the process."""
    paths = os.pathsep.join(map(str, [HERE.parents[1], HERE.parent, HERE]))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(HERE / f"{suite}.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=HERE.parents[1], check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
