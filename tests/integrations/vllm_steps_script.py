"""Runs in an environment with vLLM: the tokens of each step that new prompts and own hits take, as JSON.

python vllm_steps_script.py '{"model": DIR, "store": [URL, ...] or null, "prompts": [[token, ...], ...]}'

Each prompt is asked twice: it is new, then vLLM has it in its own cache. `inline` and `lookups` are those of the connector.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import vllm_case

from foreword.store.tier_counters import Rate


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
    worker = vllm_case.worker_of(llm) if job["store"] is not None else None

    def ask(prompt: list[int]) -> list[int]:
        steps.clear()
        llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        if worker is not None:
            assert worker.offload.flush(vllm_case.WITHIN)
        return list(steps)

    ask(job["prompts"][0][::-1])  # the first prompt measures how fast vLLM computes
    if worker is not None:
        worker.offload.prefill_rate = FastDevice()
    found: dict[str, Any] = {"steps": [ask(prompt) for prompt in job["prompts"] for _ in range(2)]}
    if worker is not None:
        counts = worker.offload.status().lookups
        found |= {"inline": counts.inline, "lookups": sum(counts.lookups.values())}
        found["loaded"] = worker.offload.status().loaded
    vllm_case.finish(found)


if __name__ == "__main__":
    main()
