"""Cost of the connector on vLLM's thread in steps that move no KV, counted under a real vLLM."""

from __future__ import annotations

from pathlib import Path

from vllm_process import disk, make_model, needs_vllm, run

pytestmark = needs_vllm
# Calls of Python functions in all hooks of a step, both sides of the connector. vLLM makes 13 calls of them.
MOST = 22
# In a step that reads the statistics, which happens ten times a second.
MOST_READING = 48


def test_an_idle_step_costs_the_same_for_any_number_of_requests(tmp_path: Path) -> None:
    """A step that only decodes makes few calls, and as many for 64 requests as for one, running or waiting, whether it reads
    the statistics or not. (The time is printed by `benchmarks.vllm.hooks`.)"""
    job = {
        "model": str(make_model(tmp_path / "model")),
        "store": ["memory://?size=64MiB", disk(tmp_path)],
        "loads": [[1, 0], [16, 0], [64, 0], [16, 64]],
    }
    found = run("vllm_hooks_script.py", job)["found"]
    assert all(one["steps"] > 30 for one in found)
    for kind, most in (("calls", MOST), ("reading", MOST_READING)):
        medians = [one[kind][len(one[kind]) // 2] for one in found]
        assert max(medians) <= most, (kind, medians)
        assert max(medians) - min(medians) <= 1, (kind, medians)
