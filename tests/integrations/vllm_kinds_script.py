"""Runs in an environment with vLLM: one model, one vLLM after the other in this process, each with some passes.

    python vllm_kinds_script.py '{"model": DIR, "llm": {...}, "prompts": {"seed": 1, "count": 8}, "runs": [
        {"store": null or [URL, ...], "llm": {...}, "passes": ["ask", "ask", "forget", "ask"]}, ...]}'

`prompts` are the tokens of each, or the arguments of `mixed_prompts`. A pass is the name of a method of `Passes`, or an
object with that name as `do` and its arguments. Each pass that asks adds a list to the run's `answers`: for each prompt the
new tokens, how many of the prompt were cached, and how many steps gave tokens. `results` of the output has a run each, with
the model's KV cache groups. `plant` names a change of meaning in this vLLM (`vllm_plants.py`).
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

from vllm_case import WITHIN, Engine, finish, make_llm, scheduler_of, worker_of
from vllm_plants import PLANTS

from foreword.referee.models import mixed_prompts

Answer = dict[str, Any]


class Passes:
    """Tasks for one vLLM.

    Attributes:
        vectors: embeddings of each prompt, by pass.
        preempted: how often requests were preempted.
        drafted: how many tokens were drafted for speculative decoding.
    """

    def __init__(self, llm: Any, prompts: list[list[int]]) -> None:
        self.llm = llm
        self.prompts = prompts
        self.answers: list[list[Answer]] = []
        self.vectors: list[list[list[float]]] = []
        self.preempted = 0
        self.drafted = 0
        self.worker = worker_of(llm) if llm.llm_engine.vllm_config.kv_transfer_config is not None else None
        self._engine = Engine(llm)
        self._asked = 0
        # Hits before the first request are records of namespaces, not KV.
        self._hits_at_start = self._hits()

    def ask(self, count: int = 8) -> None:
        """Asks one prompt after the other."""
        self.answers.append([self._one(prompt, count) for prompt in self.prompts])

    def together(self, count: int = 8) -> None:
        """All prompts at once."""
        names = [self._add(prompt, count) for prompt in self.prompts]
        self._run()
        self.answers.append([self._answer(name) for name in names])

    def abort(self, steps: int = 3, count: int = 8) -> None:
        """All prompts at once; every other one is aborted after some steps, and asked again when the rest is done."""
        names = [self._add(prompt, count) for prompt in self.prompts]
        for _ in range(steps):
            self._step()
        self._engine.engine.abort_request(names[1::2])
        self._run()
        names[1::2] = [self._add(prompt, count) for prompt in self.prompts[1::2]]
        self._run()
        self.answers.append([self._answer(name) for name in names])

    def preempt(self, steps: int = 20, count: int = 8) -> None:
        """All prompts at once; after some steps vLLM preempts all that run, and forgets its own cache."""
        names = [self._add(prompt, count) for prompt in self.prompts]
        for _ in range(steps):
            self._step()
        running = list(scheduler_of(self.llm).requests.values())
        assert self.llm.reset_prefix_cache(reset_running_requests=True)
        self.preempted += sum(one.num_preemptions for one in running)
        self._run()
        self.answers.append([self._answer(name) for name in names])

    def embed(self) -> None:
        """Embeds one prompt after the other, under a pooling model."""
        found = [self.llm.embed([{"prompt_token_ids": prompt}], use_tqdm=False)[0] for prompt in self.prompts]
        self.vectors.append([one.outputs.embedding for one in found])

    def forget(self) -> None:
        """Reset vLLM's own cache, once everything is written."""
        if self.worker is not None:
            self._engine.settle()
        else:
            assert self.llm.reset_prefix_cache()

    def result(self) -> dict[str, Any]:
        found = {
            "answers": self.answers,
            "vectors": self.vectors,
            "preempted": self.preempted,
            "drafted": self.drafted,
            "groups": groups(self.llm),
        }
        if self.worker is not None:
            found["tiers"] = [
                {"hit": hits - before, "bad": dict(tier.counters.bad), "errors": dict(tier.counters.errors)}
                for tier, hits, before in zip(
                    self.worker.offload.store.tiers, self._hits(), self._hits_at_start, strict=True
                )
            ]
        return found

    def _hits(self) -> list[int]:
        """Blocks found so far, by tier."""
        return [] if self.worker is None else [tier.counters.hit_blocks for tier in self.worker.offload.store.tiers]

    def _one(self, prompt: Sequence[int], count: int) -> Answer:
        name = self._add(prompt, count)
        self._run()
        return self._answer(name)

    def _add(self, prompt: Sequence[int], count: int) -> str:
        self._asked += 1
        return self._engine.add(f"asked-{self._asked}", prompt, count)

    def _answer(self, name: str) -> Answer:
        engine = self._engine
        return {"tokens": engine.tokens.pop(name), "cached": engine.cached.pop(name), "steps": engine.steps.pop(name)}

    def _run(self) -> None:
        while self._engine.engine.has_unfinished_requests():
            self._step()

    def _step(self) -> None:
        if not self._engine.step():
            time.sleep(0.0005)  # for the threads that it waits for
        self.drafted += sum(len(one.spec_token_ids) for one in scheduler_of(self.llm).requests.values())


def groups(llm: Any) -> list[str]:
    """The model's KV cache groups: the specification, its block size in tokens, and the number of layers."""
    found = []
    for group in scheduler_of(llm).kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        found.append(f"{type(spec).__name__} {spec.block_size} x{len(group.layer_names)}")
    return found


def run(job: dict[str, Any], one: dict[str, Any]) -> dict[str, Any]:
    """Start vLLM, make the passes, and end it so that another one can start in this process."""
    from vllm.distributed import cleanup_dist_env_and_memory

    llm = make_llm({**job, **one, "llm": {**job.get("llm", {}), **one.get("llm", {})}})
    prompts = job["prompts"] if isinstance(job["prompts"], list) else mixed_prompts(**job["prompts"])
    passes = Passes(llm, prompts)
    for each in one["passes"]:
        given = {"do": each} if isinstance(each, str) else dict(each)
        getattr(passes, given.pop("do"))(**given)
    found = passes.result()
    if passes.worker is not None:
        assert passes.worker.offload.flush(WITHIN)
    llm.llm_engine.engine_core.shutdown()
    del llm, passes
    cleanup_dist_env_and_memory()
    gc.collect()
    return found


def main() -> None:
    job: dict[str, Any] = json.loads(sys.argv[1])
    # Ending a vLLM unfreezes everything, and its collections, ten per start, would go through all modules: most of the time.
    gc.freeze()
    gc.freeze = gc.unfreeze = lambda: None
    if "plant" in job:
        PLANTS[job["plant"]]()
    finish({"results": [run(job, one) for one in job["runs"]]})


if __name__ == "__main__":
    main()
