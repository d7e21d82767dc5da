"""Runs in an environment with vLLM: lets calls inside of the connector fail, one at a time, and prints JSON.

    python vllm_failures_script.py '{"model": DIR, "store": [URL, ...], "phase": "start" | "serve" | "stop" | "threads",
        "count": 50, "seed": 1, "prompts": [[token, ...], ...]}'

Before each failure the connector starts anew in the same vLLM: its stores, its threads, the handshake. The n-th call that the
package makes raises, of all calls of Python and C functions on vLLM's thread, or with "threads" on the connector's own.
"""

from __future__ import annotations

import itertools
import json
import logging
import random
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

from vllm_case import WITHIN, finish, make_llm, scheduler_of

import foreword

PACKAGE = str(Path(foreword.__file__).parent)
ERRORS = (
    lambda: MemoryError("planted"),
    lambda: OSError(24, "planted: too many open files"),
    lambda: RuntimeError("planted: can't start new thread"),
)


class Plant:
    """Raises at the `number`th call that the package makes on the threads of its kind; counts them until then."""

    def __init__(self, number: int, threads: bool) -> None:
        self.number, self.threads = number, threads
        self.calls = itertools.count(1)
        self.made = 0
        self.where = ""

    def __call__(self, frame: FrameType, event: str, called: Any) -> None:
        code = frame.f_code
        if (
            event not in ("call", "c_call")
            or not code.co_filename.startswith(PACKAGE)
            or "degraded.py" in code.co_filename
        ):
            return
        if (threading.current_thread() is threading.main_thread()) == self.threads:
            return
        if event == "c_call" and called.__name__ in ("__exit__", "release"):
            return  # to let go of a lock cannot fail
        if code.co_qualname.startswith("ForewordConnector.") and not self._by_package(frame.f_back):
            return  # in what nothing guards, and vLLM calls itself: methods that do nothing which can fail, and the constructor
        self.made = next(self.calls)
        if self.made == self.number:
            name = getattr(called, "__qualname__", "") if event == "c_call" else ""
            self.where = f"{code.co_filename.removeprefix(PACKAGE)}:{frame.f_lineno} {code.co_qualname} {name}"
            raise ERRORS[self.number % len(ERRORS)]()

    def _by_package(self, caller: FrameType | None) -> bool:
        return caller is not None and caller.f_code.co_filename.startswith(PACKAGE)

    def __enter__(self) -> Plant:
        sys.setprofile(self)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)


class Host:
    """A vLLM whose connector can be started anew."""

    def __init__(self, job: dict[str, Any]) -> None:
        from vllm.distributed.kv_transfer import kv_transfer_state

        self.state = kv_transfer_state
        self.llm = make_llm({**job, "connector": "PatientConnector"})
        self.core = self.llm.llm_engine.engine_core.engine_core
        self.scheduler = scheduler_of(self.llm)
        first = kv_transfer_state._KV_CONNECTOR_AGENT
        self.kind, self.config, self.cache = type(first), self.llm.llm_engine.vllm_config, first._kv_cache_config
        runner = self.core.model_executor.driver_worker.worker.model_runner
        self.tensors = {
            name: layer.kv_cache
            for name, layer in runner.compilation_config.static_forward_context.items()
            if getattr(layer, "kv_cache", None) is not None
        }

    def start(self) -> None:
        """Starts as vLLM itself does."""
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

        worker = self.state._KV_CONNECTOR_AGENT = self.kind(self.config, KVConnectorRole.WORKER, self.cache)
        worker.register_kv_caches(self.tensors)
        side = self.scheduler.connector = self.kind(self.config, KVConnectorRole.SCHEDULER, self.cache)
        side.bind_gpu_block_pool(self.scheduler.kv_cache_manager.block_pool)
        found = self.core.model_executor.get_kv_connector_handshake_metadata()
        ranks = {rank: one for some in found or () for rank, one in (some or {}).items() if one is not None}
        if ranks:
            side.set_xfer_handshake_metadata(ranks)

    def stop(self) -> None:
        for side in (self.scheduler.connector, self.state._KV_CONNECTOR_AGENT):
            side.shutdown()

    @property
    def degraded(self) -> str:
        worker = self.state._KV_CONNECTOR_AGENT  # None where its start has failed
        return self.scheduler.connector.degraded or worker is None or worker.degraded

    def answers(self, prompts: list[list[int]]) -> list[list[int]]:
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, detokenize=False)
        self.llm.reset_prefix_cache()
        outputs = self.llm.generate([{"prompt_token_ids": one} for one in prompts], params, use_tqdm=False)
        return [list(one.outputs[0].token_ids) for one in outputs]


class Said(logging.Handler):
    """Errors that the package logs."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def main() -> None:
    job: dict[str, Any] = json.loads(sys.argv[1])
    draw, prompts, phase = random.Random(job["seed"]), job["prompts"], job["phase"]
    threads = phase == "threads"
    known, new = prompts[: len(prompts) // 2], prompts[len(prompts) // 2 :]
    said = Said()
    logging.getLogger("foreword").addHandler(said)
    host = Host(job)
    expected = [host.answers([one])[0] for one in prompts]
    host.stop()
    found: dict[str, Any] = {"failures": [], "wrong": [], "lines": [], "degraded": 0, "calls": 0, "blocks": []}
    calls = 0
    free = host.scheduler.kv_cache_manager.block_pool.get_num_free_blocks
    blocks = None
    for number in itertools.count():
        if number > job["count"]:
            break
        # The first round only counts.
        plant = Plant(draw.randint(1, calls) if number else 0, threads)
        said.lines.clear()
        asked = [*known, *([new[number % len(new)]] if new else [])]
        wanted = [expected[prompts.index(one)] for one in asked]
        began = time.monotonic()
        if phase == "start" or threads:
            if threads:
                threading.setprofile(plant)
            with plant:
                host.start()
                first = host.answers(asked) if threads else None
        else:
            host.start()
            first = None
        if phase == "serve":
            with plant:
                first = host.answers(asked)
        again = host.answers(asked)
        degraded = host.degraded
        if phase == "stop":
            with plant:
                host.stop()
        else:
            host.stop()
        if not number:
            calls = found["calls"] = plant.made
            assert calls, "nothing was called"
            blocks = free()
            continue
        wrong = again != wanted or (first is not None and first != wanted)
        where = f"{plant.number}: {plant.where} ({time.monotonic() - began:.1f} s) {degraded}"
        found["failures"].append(where)
        found["degraded"] += bool(degraded)
        if wrong:
            found["wrong"].append(where)
        lines = [one for one in said.lines if "degraded" in one]
        if len(lines) > 1 or (degraded and not lines):
            found["lines"].append(f"{where}: {said.lines}")
        if free() != blocks:
            found["blocks"].append(f"{where}: {free()} of {blocks} blocks are free")
        if time.monotonic() - began > WITHIN / 2:
            found["lines"].append(f"{where}: took long")
        print(where, "WRONG" if wrong else "", file=sys.stderr, flush=True)
    found["threads"] = sum(one.name.startswith("foreword-") for one in threading.enumerate())
    found["unguarded"] = unguarded(host.kind.__mro__[1])
    finish(found)


def unguarded(connector: type) -> list[str]:
    """The calls that vLLM makes and that nothing guards."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

    own = {name: value for name, value in vars(connector).items() if callable(value) and name[0] != "_"}
    asked = {name for base in (KVConnectorBase_V1, SupportsHMA) for name in dir(base)}
    return sorted(name for name, value in own.items() if name in asked and not hasattr(value, "is_hook"))


if __name__ == "__main__":
    main()
