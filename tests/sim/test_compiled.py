"""The compiled simulator: the same results as from source."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from foreword.sim.compiled import use_compiled


def test_modules_that_are_imported_stay_as_they_are() -> None:
    """A process that has imported the scheduler keeps it."""
    import foreword.engine.scheduler

    assert not use_compiled()
    assert foreword.engine.scheduler.__file__.endswith(".py")


@pytest.mark.slow
def test_results_are_those_of_the_source(tmp_path: Path) -> None:
    """Failures, tiers, groups, prefill replicas, tenants, quotas and sessions under two policies: compiled modules give every
    number that the source gives."""
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(line) + "\n" for line in _requests(seed=5)), encoding="utf-8")
    fleet = ["--replicas", "4", "--prefill", "1", "--device", "30000", "--memory", "40000", "--shared", "200000"]
    changes = ["--change", "20s fail r1", "--change", "30s start r1", "--group", "slow replicas=1 device=40000"]
    tenants = ["--tenant", "a share=3", "--tenant", "b priority=5", "--quota", "b requests=600"]
    arguments = [str(trace), *fleet, *changes, *tenants, "--policy", "cost,two-choices", "--json"]
    assert _simulate("--compile", *arguments) == _simulate("--no-compile", *arguments)


def _requests(seed: int) -> list[dict[str, Any]]:
    """Conversations with a common first block, of 1 to 20 blocks of 512 tokens."""
    rng = random.Random(seed)
    talks = [[0, 1000 * number + 1] for number in range(1, 30)]
    found = []
    for i in range(400):
        talk = rng.choice(talks)
        length = 512 * (len(talk) - 1) + rng.randint(1, 512)
        found.append(
            {"timestamp": 150 * i, "input_length": length, "output_length": rng.randint(1, 400), "hash_ids": list(talk)}
        )
        if len(talk) < 20:
            talk.append(talk[-1] + 1)
    return found


def _simulate(*arguments: str) -> Any:
    command = [sys.executable, "-m", "foreword", "simulate", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | {"COLUMNS": "120"})
    answer = json.loads(done.stdout)
    for one in answer["simulations"]:
        del one["wall_seconds"]
    return answer
