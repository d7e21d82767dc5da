"""Runs in an environment with vLLM: one vLLM whose blocks are copied straight between its KV and a memory tier, as JSON.

    TRITON_INTERPRET=1 python vllm_direct_script.py '{"model": DIR, "store": [URL, ...], "cases": [[NAME, ARG, ...], ...]}'

Prints what each case has found. `vllm_direct.py` has the device.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from typing import Any

from vllm_case import WITHIN, Engine, finish, make_llm, scheduler_of, worker_of

Prompts = list[list[int]]


class Cases:
    """The cases. Each is a method."""

    def __init__(self, job: dict[str, Any]) -> None:
        from vllm_direct import device

        more = {"connector": "DirectConnector", "extra": {"direct": True}, **job}
        self.device, self.engine = device, Engine(make_llm(more))
        self.offload = worker_of(self.engine.llm).offload
        until = time.monotonic() + WITHIN
        while not self.offload.direct_state:
            assert time.monotonic() < until, "the test at the start does not end"
            time.sleep(0.01)

    def _ask(self, prompts: Prompts, count: int = 8) -> dict[str, Any]:
        names = [f"{time.monotonic()}-{number}" for number in range(len(prompts))]
        for name, prompt in zip(names, prompts, strict=True):
            self.engine.add(name, prompt, count)
        self.engine.run()
        return {
            "answers": [self.engine.tokens[name] for name in names],
            "cached": [self.engine.cached[name] for name in names],
        }

    def _tiers(self) -> Any:
        return self.offload.store.tiers

    def ask(self, prompts: Prompts) -> dict[str, Any]:
        """Answers, when vLLM has forgotten its own cache, and how many blocks each tier gave."""
        before = [tier.counters.hit_blocks for tier in self._tiers()]
        found = self._ask(prompts)
        self.engine.settle()
        return {
            **found,
            "read": [tier.counters.hit_blocks - b for tier, b in zip(self._tiers(), before, strict=True)],
        }

    def about(self) -> dict[str, Any]:
        status = self.offload.status()
        return {
            "state": self.offload.direct_state,
            "directly": self.offload._direct.saved if self.offload._direct is not None else 0,
            **{name: getattr(status, name) for name in ("saved", "loaded", "dropped", "failed")},
            "bad": [sum(tier.counters.bad.values()) for tier in self._tiers()],
            "work": {stream.value: count for stream, count in self.device.work.items()},
        }

    def flip(self, prompt: list[int], number: int, place: int) -> None:
        """Flip a bit of a block where it lies in memory."""
        with self._lent(prompt) as frames:
            frames[number][place] ^= 1

    @contextlib.contextmanager
    def _lent(self, prompt: list[int]) -> Any:
        from foreword.blocks.keys import chain_keys
        from foreword.blocks.salt import NO_SALT

        root = scheduler_of(self.engine.llm).connector._scheduler._info.scope(NO_SALT).root()
        names = self.offload.units[0].names(root, chain_keys(root, prompt, 32))
        with self._tiers()[0].store.lend(names, deadline=time.monotonic() + WITHIN) as lent:
            yield lent.frames

    def order(self, prompt: list[int]) -> list[str]:
        """Lists the launches on the stream that computes, in order: the model of each step, and copies of blocks. Several of a
        kind that follow each other count once."""
        from foreword.offload.device import Stream

        launched, submit = list[str](), self.device.submit

        def note(what: str) -> None:
            if launched[-1:] != [what]:
                launched.append(what)

        def submitted(stream: Stream, work: Any) -> None:
            if stream is Stream.COMPUTE:
                note("copies")
            submit(stream, work)

        self.engine.llm.apply_model(
            lambda model: model.register_forward_pre_hook(lambda *given: note("model")) and None
        )
        self.device.submit = submitted
        self._ask([prompt], 1)
        self.device.submit = submit
        return launched

    def abort(self, prompt: list[int], others: Prompts) -> dict[str, Any]:
        """A request is aborted while the copies into its blocks wait in their stream; the others then need every block."""
        from foreword.offload.device import Stream

        engine, free = self.engine, self.engine.free_blocks
        before = self.device.work[Stream.LOAD]
        self.device.open.clear()
        engine.add("aborted", prompt)
        engine.until(lambda: self.device.work[Stream.LOAD] > before)
        engine.engine.abort_request(["aborted"])
        for _ in range(20):
            engine.step()
        held = free - engine.free_blocks
        self.device.open.set()
        engine.until(lambda: engine.free_blocks == free)
        return {"held": held, **self._ask(others)}

    def preempt(self, prompts: Prompts, count: int) -> dict[str, Any]:
        """More requests run than there are blocks for their answers; then each is continued, after a reset."""
        preempted: set[str] = set()
        engine = self.engine
        for number, prompt in enumerate(prompts):
            engine.add(f"one-{number}", prompt, count)
        while engine.engine.has_unfinished_requests():
            engine.step()
            preempted.update(name for name, one in scheduler_of(engine.llm).requests.items() if one.num_preemptions)
        answers = [engine.tokens[f"one-{number}"] for number in range(len(prompts))]
        engine.settle()
        later = [self._ask([prompt + answer[: count // 2]]) for prompt, answer in zip(prompts, answers, strict=True)]
        return {
            "preempted": len(preempted),
            "answers": answers,
            "later": [one["answers"][0] for one in later],
            "cached": [one["cached"][0] for one in later],
        }


def state_of(worker: Any) -> dict[str, Any]:
    """How the connector of a rank copies. A module's function, as vLLM pickles it for its workers."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    offload = get_kv_transfer_group()._worker_side.offload
    until = time.monotonic() + WITHIN
    while not offload.direct_state or not offload.flush(WITHIN):
        assert time.monotonic() < until, "the test at the start does not end"
        time.sleep(0.01)
    status = offload.status()
    directly = offload._direct.saved if offload._direct is not None else 0
    return {"state": offload.direct_state, "directly": directly, "loaded": status.loaded, "dropped": status.dropped}


def ranks(job: dict[str, Any]) -> dict[str, Any]:
    """Several ranks, each in a process of its own: answers, and once more when vLLM has forgotten its own cache."""
    from vllm import SamplingParams

    llm = make_llm({"connector": "DirectConnector", "extra": {"direct": True}, **job})
    llm.collective_rpc(state_of)
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, detokenize=False)
    rounds = []
    for _ in range(2):
        prompts = [{"prompt_token_ids": one} for one in job["ranks"]]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        rounds.append([{"tokens": list(o.outputs[0].token_ids), "cached": o.num_cached_tokens} for o in outputs])
        states = llm.collective_rpc(state_of)
        assert llm.reset_prefix_cache()
    return {"rounds": rounds, "states": states}


def main() -> None:
    job = json.loads(sys.argv[1])
    if "ranks" in job:
        finish(ranks(job))
    cases = Cases(job)
    found = [getattr(cases, name)(*arguments) for name, *arguments in job["cases"]]
    cases.offload.close(WITHIN)
    finish({"found": found})


if __name__ == "__main__":
    main()
