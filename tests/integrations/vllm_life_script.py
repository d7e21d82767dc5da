"""Runs in an environment with vLLM: what a trainer does to a running vLLM, with and without a store.

    python vllm_life_script.py '{"model": DIR, "llm": {...}, "where": "one process", "prompts": [[token, ...], ...],
        "turns": [[token, ...], ...], "runs": [{"store": null or [URL], "do": NAME}, ...]}'

Each run is one vLLM in a process of its own, forked from this one. `where`: "one process"; "workers": engine here, worker in
another process; "served": engine and worker in other processes. `do` names a function of this file. The output has its answer
for each run.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # functions for workers

from vllm_case import WITHIN, finish, make_llm, worker_of
from vllm_patient import change_embeddings

MODES = ("abort", "keep")


class Life:
    """A vLLM, and the calls that change it."""

    def __init__(self, job: dict[str, Any], store: list[str] | None) -> None:
        from vllm.v1.engine import utils

        self.job, self.store = job, store
        more = {"distributed_executor_backend": "mp"} if job["where"] == "workers" else {}
        given = {
            "store": store,
            "llm": {**job["llm"], **more, "max_model_len": 1024},
            "kv_bytes": 32 << 20,
        }
        # vLLM's CPU build would start the processes of engine and worker anew, and each imports everything again.
        utils.get_mp_context = lambda: multiprocessing.get_context("fork")
        self.llm = make_llm({"model": job["model"], **given})
        self.engine = self.llm.llm_engine
        self.core = self.engine.engine_core

    def ask(self, prompts: list[list[int]], count: int = 8) -> list[dict[str, Any]]:
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True, detokenize=False)
        found = []
        for prompt in prompts:
            [one] = self.llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
            found.append({"tokens": list(one.outputs[0].token_ids), "cached": one.num_cached_tokens})
        return found

    def call(self, name: str, *args: Any) -> Any:
        """A method of vLLM's `EngineCore`."""
        core = getattr(self.core, "engine_core", None)
        return getattr(core, name)(*args) if core is not None else self.core.call_utility(name, *args)

    def change_weights(self) -> None:
        self.llm.apply_model(change_embeddings)

    def name_weights(self, name: str) -> None:
        self.call("set_weight_version", name)

    def add(self, name: str, prompt: list[int]) -> None:
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, detokenize=False)
        self.engine.add_request(name, {"prompt_token_ids": prompt}, params)

    def until(self, reached: Callable[[], bool]) -> None:
        """An engine in this process steps meanwhile; another steps by itself."""
        deadline = time.monotonic() + WITHIN
        while not reached():
            assert time.monotonic() < deadline, "that never happened"
            if self.job["where"] != "served":
                self.engine.step()
            time.sleep(0.001)

    def finish(self, name: str) -> list[int] | None:
        """The tokens of a request; None if it was aborted, which an engine in this process tells no caller."""
        core = getattr(self.core, "engine_core", None)
        while self.engine.has_unfinished_requests():
            if core is not None and not core.scheduler.requests:
                self.engine.abort_request([name])
                return None
            for one in self.engine.step():
                if one.finished:
                    return None if one.outputs[0].finish_reason == "abort" else list(one.outputs[0].token_ids)
        return None

    def settle(self) -> None:
        """Everything that can be written is."""
        if self.store is None:
            return
        worker = worker_of(self.llm)
        if worker is not None:
            assert worker.offload.flush(WITHIN)
            return
        folder, same, before = Path(self.store[0].removeprefix("disk://").partition("?")[0]), 0, -1
        while same < 20:  # the worker is in another process: until nothing comes for a second
            time.sleep(0.05)
            now = sum(one.stat().st_size for one in folder.rglob("*") if one.is_file())
            same, before = same + 1 if now == before else 0, now


def said(call: Callable[[], Any]) -> Any:
    """The value that a call returns, or the name of what it raises."""
    try:
        return call()
    except RuntimeError as error:  # vLLM's, also for what was raised in another process
        return str(error)[:60]


def changed(life: Life) -> Any:
    """The right answers of the changed weights."""
    life.change_weights()
    return {"answers": life.ask(life.job["turns"])}


def trainer(life: Life) -> Any:
    """Answers; each call that drops vLLM's cache, directly after an answer; then other weights, their name, and answers."""
    prompts = life.job["prompts"]
    told: dict[str, Any] = {}
    before = life.ask(life.job["turns"])

    def after_an_answer(name: str, call: Callable[[], Any]) -> None:
        life.ask(prompts)
        told[name] = said(call)

    after_an_answer("reset", life.llm.reset_prefix_cache)
    told["reset again"] = said(life.llm.reset_prefix_cache)
    after_an_answer("reset running", lambda: life.llm.reset_prefix_cache(reset_running_requests=True))
    for mode in MODES:
        after_an_answer(f"pause {mode}", lambda mode=mode: life.call("pause_scheduler", mode, True))  # type: ignore[misc]
        life.call("resume_scheduler")
    for level in (0, 1):
        after_an_answer(f"sleep {level}", lambda level=level: life.llm.sleep(level))  # type: ignore[misc]
        life.llm.wake_up(["scheduling"] if not level else None)
    after_an_answer("reset connector", lambda: life.llm.reset_prefix_cache(reset_connector=True))
    life.change_weights()
    life.name_weights("step-1")
    answers = life.ask(life.job["turns"])
    life.settle()
    return {"told": told, "before": before, "answers": answers}


def forgetful(life: Life) -> Any:
    """Other weights and their name over a cache that was not reset; then a reset. What vLLM answers before the reset is its
    own affair, and must not be saved."""
    life.ask(life.job["prompts"])
    life.change_weights()
    life.name_weights("step-1")
    life.ask(life.job["turns"])
    told = said(life.llm.reset_prefix_cache)
    answers = life.ask(life.job["turns"])
    life.settle()
    return {"told": {"reset": told}, "answers": answers}


def second(life: Life) -> Any:
    """Another server with the same weights under the same name. It computes the starts itself."""
    life.llm.reset_prefix_cache(reset_connector=True)
    life.change_weights()
    life.name_weights("step-1")
    life.ask(life.job["prompts"], 1)
    return {"answers": life.ask(life.job["turns"])}


def held(life: Life) -> Any:
    """Each call that stops vLLM, while a load is held open that does not end by itself; then the prompt once more."""
    [prompt, other, *_] = life.job["prompts"]
    hold = Path(os.environ["HOLD_LOADS"])
    reached = hold.with_suffix(".reached")
    calls: dict[str, Callable[[], Any]] = {
        "reset running": lambda: life.llm.reset_prefix_cache(reset_running_requests=True),
        "pause keep": lambda: life.call("pause_scheduler", "keep", True),
        "pause abort": lambda: life.call("pause_scheduler", "abort", True),
        "sleep keep": lambda: life.llm.sleep(1, "keep"),
        "sleep abort": lambda: life.llm.sleep(1, "abort"),
    }
    told, answers, after = {}, {}, {}
    for number, (name, call) in enumerate(calls.items()):
        life.name_weights("one")
        life.ask([prompt])
        life.settle()
        life.llm.reset_prefix_cache()
        hold.touch()
        life.add(f"held-{number}", prompt)
        life.until(reached.exists)
        told[name] = said(call)
        life.call("resume_scheduler") if name.startswith("pause") else life.llm.wake_up()
        hold.unlink()  # what was held has no blocks any more
        reached.unlink()
        answers[name] = life.finish(f"held-{number}")
        after[name] = life.ask([other])[0]["tokens"]
    return {
        "told": told,
        "held": answers,
        "after": after,
        "right": [one["tokens"] for one in life.ask([prompt, other])],
    }


def in_a_child(job: dict[str, Any], run: dict[str, Any]) -> dict[str, Any]:
    """vLLM cannot be made twice in a process that has changed its environment. An answer without `done` is a failure."""
    mine, theirs = os.pipe()
    child = os.fork()
    if not child:
        os.environ["HOLD_LOADS"] = job["hold"]
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1" if job["where"] == "served" else "0"
        with os.fdopen(theirs, "w") as pipe:
            try:
                life = Life(job, run["store"])
                json.dump({**globals()[run["do"]](life), "done": True}, pipe)
                pipe.flush()
                life.core.shutdown()
            except BaseException:
                json.dump({"failed": traceback.format_exc()[-2000:]}, pipe)
                pipe.flush()
                raise
            finally:
                os._exit(0)
    os.close(theirs)
    with os.fdopen(mine) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    answer: dict[str, Any] = json.loads(text or "{}")
    return answer


if __name__ == "__main__":
    job = json.loads(sys.argv[1])
    finish({"runs": [in_a_child(job, run) for run in job["runs"]]})
