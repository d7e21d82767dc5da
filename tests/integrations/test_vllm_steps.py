"""The connector adds no steps to prompts for which it loads nothing, counted under a real vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm_process import BLOCK, disk, make_model, needs_vllm, prompts, run

pytestmark = needs_vllm
# With blocks of 32 tokens: multiples of a block, and others.
LENGTHS = [96, 100, 128, 161, 256, 300, 384, 450]


def test_own_hits_and_new_prompts_take_the_steps_of_vllm_alone(tmp_path: Path) -> None:
    """A prompt that no store has, and one that vLLM's own cache has, are computed in the same steps with a connector over
    memory, and over memory and disk, as without: no step only waits for a lookup, and no load is made for the last block of an
    own hit, which is computed in less time than any load takes. The lookups end on vLLM's thread."""
    job = {"model": str(make_model(tmp_path / "model")), "prompts": prompts(59, LENGTHS)}
    alone = run("vllm_steps_script.py", {**job, "store": None})["steps"]
    for store in (["memory://?size=64MiB"], ["memory://?size=64MiB", disk(tmp_path)]):
        check(run("vllm_steps_script.py", {**job, "store": store}), alone)


def test_a_scheduler_in_another_process_than_its_worker(tmp_path: Path) -> None:
    """Lookups end on vLLM's thread, too, over memory and disk of a worker that is another process: of new prompts, own hits,
    and prompts that only the tiers have."""
    job = {"model": str(make_model(tmp_path / "model")), "prompts": prompts(59, LENGTHS), "files": str(tmp_path)}
    job["llm"] = {"distributed_executor_backend": "mp"}
    alone = run("vllm_steps_script.py", {**job, "store": None})["steps"]
    check(run("vllm_steps_script.py", {**job, "store": ["memory://?size=64MiB", disk(tmp_path)]}), alone)


def check(found: dict[str, Any], alone: list[list[int]]) -> None:
    assert found["steps"] == alone
    assert found["loaded"] == 0
    assert found["inline"] >= 0.95 * found["lookups"] and found["lookups"] >= len(LENGTHS)
    assert found["hits"] >= sum((length - 1) // BLOCK * BLOCK for length in LENGTHS)
