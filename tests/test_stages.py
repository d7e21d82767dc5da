"""Every slow test has a stage of `.ci/run` that must pass: `.ci/slow` gives each file a landing. Every product has one, too."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import products
import pytest

pytestmark = pytest.mark.extended

CHECKOUT = Path(__file__).parent.parent


@pytest.mark.timeout(1000)  # it imports all tests once more
def test_every_slow_test_has_a_stage() -> None:
    """A test that pytest collects as slow is in a part that takes its turn, or is named as failing with its figure."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "--quiet", "-m", "slow", "-p", "no:xdist", "tests"]
    collected = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=True, timeout=900).stdout
    slow = {line.rpartition(":")[0] for line in collected.splitlines() if line.startswith("tests/")}
    loader = importlib.machinery.SourceFileLoader("slow_stages", str(CHECKOUT / ".ci" / "slow"))
    spec = importlib.util.spec_from_loader("slow_stages", loader)
    assert spec is not None
    stages = importlib.util.module_from_spec(spec)
    loader.exec_module(stages)
    turns = {name for vllm in (True, False) for part in stages.parts(vllm) for name, _ in part}
    assert len(slow) > 50 and slow == turns | stages.ALWAYS
    run = (CHECKOUT / ".ci" / "run").read_text(encoding="utf-8")
    assert all(name in run for name in stages.ALWAYS)


def test_every_product_has_its_turn_alone() -> None:
    """`.ci/run` tries each product that has tests from wheels, as a whole or in all parts of it, and nothing else."""
    run = (CHECKOUT / ".ci" / "run").read_text(encoding="utf-8")
    listed = re.search(r"^alone=\(([^)]*)\)", run, re.MULTILINE)
    assert listed is not None
    turns: dict[str, list[str]] = defaultdict(list)
    for one in listed[1].split():
        name, _, part = one.partition(":")
        turns[name].append(part or "0/1")
    assert set(turns) == {name for name in products.NEEDS if products.tests_of(name)}
    for name, parts in turns.items():
        assert sorted(parts) == [f"{number}/{len(parts)}" for number in range(len(parts))], name
