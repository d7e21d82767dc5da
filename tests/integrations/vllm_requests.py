"""Runs in an environment with vLLM: requests that are aborted, preempted or fail to load, each case by its name.

    python vllm_requests.py '{"model": DIR, "store": [URL], "prompts": [[token, ...], ...], "cases": [NAME, ...]}'

Prints the result of each case as JSON. A `Gate` wraps a real store.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

from vllm_case import WITHIN, Engine, Gate, finish, make_llm, scheduler_of, worker_of

Prompts = list[list[int]]


def gate(engine: Engine, kind: str) -> Gate:
    """Wrap the store of the first tier."""
    cache = worker_of(engine.llm).offload
    found = Gate(cache.store.tiers[0].store, kind)
    cache.store.tiers[0].store = found
    return found


def ungate(engine: Engine, placed: Gate) -> None:
    placed.open()
    worker_of(engine.llm).offload.store.tiers[0].store = placed._store


def saved(engine: Engine, prompts: Prompts) -> None:
    """Save the prompts' blocks in the store, and reset vLLM's own cache."""
    for number, prompt in enumerate(prompts):
        engine.add(f"saved-{number}-{prompt[0]}", prompt, 1)
    engine.run()
    engine.settle()


def tracked(engine: Engine) -> int:
    return len(scheduler_of(engine.llm).connector._scheduler._requests)


def abort_during_load(engine: Engine, prompts: Prompts) -> dict[str, Any]:
    """The first prompt is aborted during its load; the others then need every block there is."""
    saved(engine, prompts[:1])
    free = engine.free_blocks
    placed = gate(engine, "get")
    placed.shut()
    engine.add("aborted", prompts[0])
    engine.until(placed.reached.is_set)
    [request] = [one for one in scheduler_of(engine.llm).requests.values() if one.request_id.startswith("aborted")]
    taken = scheduler_of(engine.llm).kv_cache_manager.get_block_ids(request.request_id)[0]
    engine.engine.abort_request(["aborted"])
    held = engine.free_blocks < free
    engine.until(lambda: engine.free_blocks == free)
    for number, prompt in enumerate(prompts[1:]):
        engine.add(f"other-{number}", prompt)
    reused = set()
    while engine.engine.has_unfinished_requests():
        engine.step()
        manager = scheduler_of(engine.llm).kv_cache_manager
        for name in scheduler_of(engine.llm).requests:
            reused.update(set(manager.get_block_ids(name)[0]) & set(taken))
        if reused and not placed.passed.is_set():
            placed.open()  # blocks that are read now must not be written into the device
            assert placed.passed.wait(WITHIN)
    ungate(engine, placed)
    answers = [engine.tokens[f"other-{number}"] for number in range(len(prompts) - 1)]
    engine.settle()
    return {
        "held": held,
        "reused": len(reused),
        "answers": answers,
        "left": tracked(engine),
        "free": engine.free_blocks == free,
    }


def abort_during_lookup(engine: Engine, prompts: Prompts) -> dict[str, Any]:
    """A request is aborted during its lookup; another continues."""
    free = engine.free_blocks
    placed = gate(engine, "lookup")
    placed.shut()
    engine.add("aborted", prompts[0])
    engine.until(placed.reached.is_set)
    waiting = tracked(engine)
    engine.engine.abort_request(["aborted"])
    engine.add("other", prompts[1])
    ungate(engine, placed)
    engine.run()
    engine.settle()
    return {
        "waiting": waiting,
        "left": tracked(engine),
        "answers": [engine.tokens["other"]],
        "free": engine.free_blocks == free,
    }


def finish_while_saving(engine: Engine, prompts: Prompts) -> dict[str, Any]:
    """Requests finish, and vLLM reuses their blocks, before the store has written any of them."""
    placed = gate(engine, "put")
    placed.shut()
    for turn in (prompts[:2], prompts[2:]):
        for number, prompt in enumerate(turn):
            engine.add(f"first-{number}-{prompt[0]}", prompt, 1)
        engine.run()
        engine.until(lambda: not scheduler_of(engine.llm).has_requests())
        assert engine.llm.reset_prefix_cache()
    queued = worker_of(engine.llm).offload.status().queued
    ungate(engine, placed)
    engine.settle()
    for number, prompt in enumerate(prompts):
        engine.add(f"again-{number}", prompt)
        engine.run()
    return {
        "queued": queued,
        "answers": [engine.tokens[f"again-{number}"] for number in range(len(prompts))],
        "cached": [engine.cached[f"again-{number}"] for number in range(len(prompts))],
    }


def preempt(engine: Engine, prompts: Prompts) -> dict[str, Any]:
    """More requests run than there are blocks for their answers."""
    preempted: set[str] = set()
    for number, prompt in enumerate(prompts):
        engine.add(f"one-{number}", prompt, 100)
    while engine.engine.has_unfinished_requests():
        engine.step()
        assert worker_of(engine.llm).offload.flush(
            WITHIN
        )  # its queue is as small as the device: nothing is to be dropped
        preempted.update(name for name, one in scheduler_of(engine.llm).requests.items() if one.num_preemptions)
    answers = [engine.tokens[f"one-{number}"] for number in range(len(prompts))]
    engine.settle()
    for number, prompt in enumerate(prompts):
        engine.add(f"two-{number}", prompt + answers[number][:60], 8)
        engine.run()
    return {
        "preempted": len(preempted),
        "answers": answers,
        "later": [engine.tokens[f"two-{number}"] for number in range(len(prompts))],
        "cached": [engine.cached[f"two-{number}"] for number in range(len(prompts))],
        "loaded": worker_of(engine.llm).offload.status().loaded,
    }


def broken_in_the_middle(engine: Engine, prompts: Prompts) -> dict[str, Any]:
    """The fourth block of a prompt cannot be loaded. What vLLM computes instead is saved, so the next load is complete. The
    blocks from there on are deleted once the load has begun: those of the next load are the ones saved again."""
    saved(engine, prompts[:1])
    placed = gate(engine, "get")
    placed.broken = {3}
    placed.shut()
    before = worker_of(engine.llm).offload.status().cut
    engine.add("broken", prompts[0])
    engine.until(placed.reached.is_set)
    placed._store.delete(_names(engine, prompts[0])[3:], deadline=_soon())
    placed.open()
    engine.run()
    asked = placed.asked
    placed.broken = set()
    cut = worker_of(engine.llm).offload.status().cut - before
    engine.settle()
    engine.add("mended", prompts[0])
    engine.run()
    ungate(engine, placed)
    engine.settle()
    return {
        "asked": asked,
        "cut": cut,
        "answers": [engine.tokens["broken"]],
        "cached": [engine.cached["broken"], engine.cached["mended"]],
        "mended": engine.tokens["mended"],
    }


def never_delivered(engine: Engine, prompts: Prompts) -> dict[str, Any]:
    """A store finds all blocks of a prompt and reads none: the request loads once and computes."""
    saved(engine, prompts[:1])
    placed = gate(engine, "get")
    placed.broken = set(range(100000))
    engine.add("one", prompts[0])
    engine.run()
    asked = placed.asked
    ungate(engine, placed)
    engine.settle()
    return {"asked": asked, "answers": [engine.tokens["one"]]}


def _names(engine: Engine, prompt: list[int]) -> list[bytes]:
    from foreword.blocks.keys import chain_keys
    from foreword.blocks.salt import NO_SALT

    worker = worker_of(engine.llm)
    root = scheduler_of(engine.llm).connector._scheduler._info.scope(NO_SALT).root()
    return worker.offload.units[0].names(root, chain_keys(root, prompt, 32))


def _soon() -> float:
    return time.monotonic() + WITHIN


def retained(engine: Engine, prompts: Prompts) -> dict[str, Any]:
    """Retains one prompt by `kv_transfer_params` and pins a part of the other by `kv_hints`; then releases one."""
    from vllm import SamplingParams
    from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

    def ask(name: str, prompt: list[int], actions: Any = None, hints: Any = None) -> Any:
        extra = None if actions is None else {"kv_transfer_params": {"foreword_cache": actions}}
        params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True, detokenize=False, extra_args=extra)
        engine.engine.add_request(name, {"prompt_token_ids": prompt}, params, kv_hints=hints)
        found = []
        while engine.engine.has_unfinished_requests():
            found += [one.kv_transfer_params for one in engine.engine.step() if one.finished]
        engine.settle()
        return (found[0] or {}).get("foreword_cache")

    def pinned(count: int) -> int:
        """Pinned blocks, once they are `count` or it takes too long."""
        [tier] = worker_of(engine.llm).offload.store.tiers
        deadline = _soon()
        while True:
            found = sum(one.pinned for one in tier.store.scan(deadline=deadline))
            if found == count or time.monotonic() > deadline:
                return found
            time.sleep(0.05)

    retain = {"action": "retain", "ttl": 600}
    hint = KvHintAction("1", "pin", "1", {"tokens": 70})
    hints = KvHintsEnvelope("1", "1", [hint, KvHintAction("2", "retain", "1", {"ttl": "x"})])
    answers = [ask("kept", prompts[0], [retain, {"action": "other"}]), ask("hinted", prompts[1], None, hints)]
    answers.append(
        ask("malformed", prompts[1], [{"action": "retain", "ttl": -1}, {"action": "retain", "tokens": "x"}, 7])
    )
    found = {"answers": answers, "pinned": pinned(6)}
    found["released"] = ask("release", prompts[0], [{"action": "release"}])
    found["expired"] = pinned(2)
    ask("end", prompts[1], [{"action": "release"}])
    assert pinned(0) == 0
    return found


def session(engine: Engine, prompts: Prompts) -> dict[str, Any]:
    """A streaming session: each part of the input replaces the last sampled token. Blocks must be saved under the keys of the
    tokens that were computed."""
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.request import Request

    core = engine.engine.engine_core.engine_core
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, detokenize=False)

    def feed(tokens: list[int], resumable: bool) -> None:
        fields = {
            "request_id": "session", "prompt_token_ids": tokens, "mm_features": None, "sampling_params": params.clone(),
            "pooling_params": None, "arrival_time": 0.0, "lora_request": None, "cache_salt": None,
            "data_parallel_rank": None, "resumable": resumable,
        }  # fmt: skip
        given = EngineCoreRequest(
            **{name: fields[name] for name in EngineCoreRequest.__struct_fields__ if name in fields}
        )
        core.add_request(Request.from_engine_core_request(given, core.request_block_hasher))

    scheduler = scheduler_of(engine.llm)
    whole: list[int] = []
    for part in prompts:
        feed(part, True)
        for _ in range(1000):
            core.step_fn()
            request = scheduler.requests["session"]
            if request.status.name == "WAITING_FOR_STREAMING_REQ":
                break
        # As a step that is scheduled before the next part does.
        scheduler.connector._scheduler._state_of(request)
        whole = list(request.all_token_ids)
    feed([1], False)
    engine.until(lambda: "session" not in scheduler.requests)
    engine.settle()
    engine.add("same", whole)
    engine.run()
    return {
        "whole": whole,
        "cached": engine.cached["same"],
        "answers": [engine.tokens["same"]],
        "left": tracked(engine),
    }


def not_cached(engine: Engine, prompts: Prompts) -> dict[str, Any]:
    """A request with an adapter whose files are not there, with a prompt that the store has."""
    from vllm.lora.request import LoRARequest

    saved(engine, prompts)
    scheduler = scheduler_of(engine.llm)
    found = {}
    for kind in ("plain", "lora"):
        name = engine.add(kind, prompts[0])
        [request] = [one for one in scheduler.requests.values() if one.request_id.startswith(name)]
        if kind == "lora":
            request.lora_request = LoRARequest("adapter", 1, "/nowhere")
        answer = scheduler.connector.get_num_new_matched_tokens(request, 0)
        while answer[0] is None:
            answer = scheduler.connector.get_num_new_matched_tokens(request, 0)
        found[kind] = [answer[0], request.request_id in scheduler.connector._scheduler._requests]
        engine.engine.abort_request([name])
    engine.settle()
    return {**found, "left": tracked(engine)}


def refused(engine: Engine, prompts: Prompts) -> dict[str, Any]:
    """The connector's errors for unsupported KV caches, described by vLLM's own specs."""
    import dataclasses

    from foreword.errors import ModelUnsupported
    from foreword.integrations.vllm.connector_config import KVCacheInfo

    scheduler = scheduler_of(engine.llm)
    known, settings = scheduler.kv_cache_config, worker_of(engine.llm)._settings
    [group] = known.kv_cache_groups
    spec = group.kv_cache_spec
    kinds = {
        "uncached": [dataclasses.replace(group, kv_cache_spec=_Uncached())],
        "non_causal": [dataclasses.replace(group, kv_cache_spec=dataclasses.replace(spec, non_causal=True))],
        "other": [dataclasses.replace(group, kv_cache_spec=object())],
    }
    found = {}
    for kind, groups in kinds.items():
        try:
            KVCacheInfo(engine.engine.vllm_config, dataclasses.replace(known, kv_cache_groups=groups), settings)
        except ModelUnsupported as error:
            found[kind] = str(error)
    return found


class _Uncached:
    """Describes layers like vLLM's circular buffers."""

    prefix_cacheable = False
    block_size = 32


CASES: dict[str, Callable[[Engine, Prompts], dict[str, Any]]] = {
    one.__name__: one
    for one in (
        abort_during_load,
        abort_during_lookup,
        finish_while_saving,
        preempt,
        broken_in_the_middle,
        never_delivered,
        session,
        not_cached,
        refused,
        retained,
    )
}


def main() -> None:
    job: dict[str, Any] = json.loads(sys.argv[1])
    engine = Engine(make_llm(job))
    finish({name: CASES[name](engine, prompts) for name, prompts in job["cases"].items()})


if __name__ == "__main__":
    main()
