"""Runs in an environment with vLLM: the tokens of each step that new prompts and own hits take, as JSON.

python vllm_steps_script.py '{"model": DIR, "store": [URL, ...] or null, "prompts": [[token, ...], ...], "llm": {...}}'

Each prompt is asked twice: it is new, then vLLM has it in its own cache. Then vLLM forgets all, and they are asked once more.
`inline` and `lookups` are those of the connector, without the one of the first prompt. The workers may be other processes.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import vllm_case

from foreword.store.tier_counters import LookupOutcome, Rate


class FastDevice(Rate):
    """A prefill rate that does not depend on how busy this machine is: a block of 32 tokens takes 1.6 ms."""

    @property
    def value(self) -> float:
        return 20_000.0

    def note(self, amount: float, seconds: float) -> None:
        """Ignored."""


def main() -> None:
    job: dict[str, Any] = json.loads(sys.argv[1])
    from vllm import SamplingParams
    from vllm.v1.core.sched.scheduler import Scheduler

    steps: list[int] = []
    schedule = Scheduler.schedule

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        planned = schedule(self, *args, **kwargs)
        steps.append(planned.total_num_scheduled_tokens)
        return planned

    Scheduler.schedule = counted
    llm = vllm_case.make_llm({**job, "connector": "ForewordConnector"})
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True, detokenize=False)
    side = vllm_case.scheduler_of(llm).connector._scheduler_side if job["store"] is not None else None
    worker = vllm_case.worker_of(llm) if side is not None else None

    def ask(prompt: list[int]) -> list[int]:
        steps.clear()
        llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        if worker is not None:
            assert worker.offload.flush(vllm_case.WITHIN)
        elif side is not None:
            asked[tuple(prompt)] = len(prompt) // 32
            vllm_case.wait_for_files(job["files"], sum(asked.values()))
        return list(steps)

    asked: dict[tuple[int, ...], int] = {}
    ask(job["prompts"][0][::-1])  # the first prompt measures how fast vLLM computes
    if side is not None:
        (worker.offload if worker is not None else side._lookup).prefill_rate = FastDevice()
        before = side._stores.lookups.counts()
    found: dict[str, Any] = {"steps": [ask(prompt) for prompt in job["prompts"] for _ in range(2)]}
    if side is not None:
        found["loaded"] = len(side._load_began) + len(side._stores.costs.fixed.measured)
        assert llm.reset_prefix_cache()
        for prompt in job["prompts"]:
            ask(prompt)
        counts = side._stores.lookups.counts()
        found["inline"] = counts.inline - before.inline
        found["lookups"] = sum(counts.lookups.values()) - sum(before.lookups.values())
        found["hits"] = counts.tokens[LookupOutcome.FOUND] - before.tokens[LookupOutcome.FOUND]
    vllm_case.finish(found)


if __name__ == "__main__":
    main()
