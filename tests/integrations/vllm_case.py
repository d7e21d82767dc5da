"""For the scripts that run in an environment with vLLM: one in this process, its scheduler and worker at hand."""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from vllm_waits import WITHIN as WITHIN

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
)
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

_MODULES = {"PatientConnector": "vllm_patient", "DirectConnector": "vllm_direct"}


def make_llm(job: dict[str, Any]) -> Any:
    """`job`: model, store (None for no connector), connector, role, extra, kv_bytes, llm, many (a folder for an
    ExampleConnector, which stands behind this one and another with its own store in a MultiConnector)."""
    from vllm import LLM
    from vllm.v1.executor import multiproc_executor

    # vLLM's CPU build would start the processes of ranks anew, and each imports everything again.
    multiproc_executor.get_mp_context = lambda: multiprocessing.get_context("fork")
    transfer = None
    if job["store"] is not None:
        name = job.get("connector", "PatientConnector")
        transfer = {
            "kv_connector": name,
            "kv_connector_module_path": _MODULES.get(name, "foreword.integrations.vllm"),
            "kv_role": job.get("role", "kv_both"),
            "kv_connector_extra_config": {
                "store": job["store"],
                "lookup_timeout": WITHIN,
                "load_timeout": 2 * WITHIN,
                **job.get("extra", {}),
            },
        }
        if job.get("many"):
            transfer["kv_load_failure_policy"] = "recompute"
            beside = {
                "kv_connector": "ExampleConnector", "kv_role": "kv_both",
                "kv_connector_extra_config": {"shared_storage_path": job["many"]},
            }  # fmt: skip
            memory = {**transfer["kv_connector_extra_config"], "store": ["memory://?size=64MiB"]}
            both = {"connectors": [transfer, {**transfer, "kv_connector_extra_config": memory}, beside]}
            transfer = {
                "kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": both,
                "kv_load_failure_policy": "recompute",
            }  # fmt: skip
    given = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 512,
        "kv_cache_memory_bytes": job.get("kv_bytes", 64 << 20),
        "block_size": 32,
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
        "seed": 0,
    }
    return LLM(job["model"], kv_transfer_config=transfer, **{**given, **job.get("llm", {})})


def scheduler_of(llm: Any) -> Any:
    """vLLM's scheduler."""
    return llm.llm_engine.engine_core.engine_core.scheduler


def worker_of(llm: Any) -> Any:
    """The connector's worker side; None if it is in another process."""
    from foreword.integrations.vllm.worker_side import _workers

    engine = str(llm.llm_engine.vllm_config.kv_transfer_config.engine_id)
    return next((worker for name, worker in _workers.items() if name.startswith(engine)), None)


def wait_for_files(folder: str, count: int) -> None:
    """Until workers in other processes have written as many blocks."""
    deadline = time.monotonic() + WITHIN

    def is_block(path: Path) -> bool:
        try:
            return path.is_file() and path.read_bytes()[-192:-188] == b"FWKV"
        except OSError:  # it had another name until it was whole
            return False

    while sum(map(is_block, Path(folder).rglob("*"))) < count:
        assert time.monotonic() < deadline, "blocks were not written"
        time.sleep(0.05)


def loaded(llm: Any) -> dict[str, float]:
    """Blocks by the tier that they came from, as vLLM's metrics have them."""
    return {one.labels["tier"]: one.value for one in metrics(llm, "loaded_blocks") if one.value}


def metrics(llm: Any, name: str) -> list[Any]:
    """The connector's series of that name; vLLM must have been started with its statistics."""
    return [one for one in llm.get_metrics() if one.name == f"vllm:foreword_{name}"]


def finish(found: dict[str, Any]) -> None:
    print("\n" + json.dumps(found), flush=True)
    os._exit(0)  # vLLM's shutdown takes seconds


class Gate:
    """Wraps a store, which lends nothing if the gate is for `get`. While it is shut, calls of one kind wait; `reached`
    and `passed` are set when a call starts and ends.

    `broken`: indexes of requested blocks, counted over all calls, that are not read.
    """

    def __init__(self, store: Any, kind: str) -> None:
        self._store = store
        self._kind = kind
        self._open = threading.Event()
        self._open.set()
        self.reached = threading.Event()
        self.passed = threading.Event()
        self.broken: set[int] = set()
        self.asked = 0

    def shut(self) -> None:
        self._open.clear()
        self.reached.clear()
        self.passed.clear()

    def open(self) -> None:
        self._open.set()

    def __getattr__(self, name: str) -> Any:
        inner = getattr(self._store, name)
        if name == "lend" and self._kind == "get":
            from foreword.store.base import Store

            return partial(Store.lend, self._store)  # memory is read by `get` then, as other stores are
        if name != self._kind:
            return inner

        def call(*args: Any, **kwargs: Any) -> Any:
            self.reached.set()
            assert self._open.wait(WITHIN)
            try:
                found = inner(*args, **kwargs)
                if name == "get":
                    first, self.asked = self.asked, self.asked + len(found)
                    found = [0 if first + i in self.broken else size for i, size in enumerate(found)]
                return found
            finally:
                self.passed.set()

        return call


class Engine:
    """vLLM's engine, step by step."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.engine = llm.llm_engine
        self.tokens: dict[str, list[int]] = {}
        self.cached: dict[str, int] = {}
        self.steps: Counter[str] = Counter()  # those that gave tokens

    def add(self, name: str, prompt: Sequence[int], max_tokens: int = 8, **more: Any) -> str:
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, detokenize=False)
        self.engine.add_request(name, {"prompt_token_ids": list(prompt), **more}, params)
        return name

    def step(self) -> bool:
        """Whether anything came of it."""
        outputs = self.engine.step()
        for output in outputs:
            self.tokens[output.request_id] = list(output.outputs[0].token_ids)
            self.cached[output.request_id] = output.num_cached_tokens
            self.steps[output.request_id] += 1
        return bool(outputs)

    def until(self, reached: Any) -> None:
        """Step until `reached()`."""
        deadline = time.monotonic() + WITHIN
        while not reached():
            assert time.monotonic() < deadline, "that never happened"
            if not self.step():
                time.sleep(0.0005)  # for the threads that it waits for

    def run(self) -> None:
        self.until(lambda: not self.engine.has_unfinished_requests())

    def settle(self) -> None:
        """Everything written, vLLM's own cache forgotten."""
        assert worker_of(self.llm).offload.flush(WITHIN)
        self.until(lambda: not scheduler_of(self.llm).has_requests())
        assert self.llm.reset_prefix_cache()

    @property
    def free_blocks(self) -> int:
        return int(scheduler_of(self.llm).kv_cache_manager.block_pool.get_num_free_blocks())
