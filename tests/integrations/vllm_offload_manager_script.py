"""Runs in an environment with vLLM: vLLM's manager of several tiers with `ForewordTier`, without a model, as JSON.

python vllm_offload_manager_script.py '{"model": DIR, "folder": DIR}'

Host memory is an array. The checks are here, as vLLM is; what was found is printed for those who read a failure.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import vllm_case
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager

from foreword.errors import StoreUnavailable
from foreword.integrations.vllm_offload.offload_identity import namespace, read_settings
from foreword.store.wrappers import StoreWrapper

ROW, ROWS, TOKENS = 8192, 48, 32


class Region:
    """Host memory in place of vLLM's shared one."""

    def __init__(self) -> None:
        self.rows = np.zeros((ROWS, ROW), np.uint8)
        self.cleaned = False

    def create_kv_memoryview(self) -> memoryview:
        return memoryview(self.rows)

    def cleanup(self) -> None:
        self.cleaned = True


class Failing(StoreWrapper):
    """A store that fails whatever is asked of it."""

    def put(self, *_: Any, **__: Any) -> int:
        raise StoreUnavailable("the device is gone")

    def get(self, *_: Any, **__: Any) -> list[int]:
        raise StoreUnavailable("the device is gone")


class Unsure(StoreWrapper):
    """A store that knows of no block without a call, which waits until it may answer."""

    may_answer = threading.Event()

    def present(self, names: Any, *, deadline: float) -> list[bool]:
        assert self.may_answer.wait(vllm_case.WITHIN)
        return super().present(names, deadline=deadline)

    def known(self, names: Any) -> list[None]:
        return [None] * len(names)


def engine_config(model: str, **given: Any) -> Any:
    transfer = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "engine_id": "one"}
    given = {"dtype": "float32", "max_model_len": 512, "skip_tokenizer_init": True, **given}
    return EngineArgs(model=model, kv_transfer_config=transfer, **given).create_engine_config()


def offloading_config() -> OffloadingConfig:
    parallel = OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, True)
    group = OffloadingGroupConfig(TOKENS, ("layer.0", "layer.1"), 0)
    model, cache = OffloadingModelConfig("tiny", "float32"), OffloadingCacheConfig(TOKENS, 1)
    return OffloadingConfig((group,), ROW, False, {}, "one", model, cache, parallel)


class Offloading:
    """vLLM's manager over host memory and one `ForewordTier`."""

    def __init__(self, config: Any, store: list[str], **settings: Any) -> None:
        self.region = Region()
        primary = CPUPrimaryTierOffloadingManager(ROWS, self.region)
        view = primary.get_kv_memoryview()
        settings |= {"lookup_timeout": vllm_case.WITHIN, "load_timeout": 2 * vllm_case.WITHIN}
        tier = {"type": "ForewordTier", "module_path": "foreword.integrations.vllm", "store": store, **settings}
        self.tier: Any = SecondaryTierFactory.create_secondary_tier(
            tier, view, SimpleNamespace(config=offloading_config())
        )
        del view
        self.manager = TieringOffloadingManager(primary, [self.tier])
        executor = SimpleNamespace(collective_rpc=lambda *_, **__: [])
        self.core = SimpleNamespace(vllm_config=config, model_executor=executor, scheduler=None)
        self.tier.engine_calls(self.core)
        self.count = 0

    def begin(self, seed: int, blocks: int, salt: str | None = None) -> tuple[ReqContext, list[Any], Any]:
        """A request with drawn hashes: its context and vLLM's keys."""
        draw = random.Random(f"{seed} {salt}")  # vLLM's hashes cover the salt
        self.count += 1
        request = SimpleNamespace(
            request_id=f"request {self.count}", block_hashes=[draw.randbytes(32) for _ in range(blocks)],
            cache_salt=salt, mm_features=[], lora_request=None, prompt_embeds=None, num_prompt_tokens=blocks * TOKENS,
        )  # fmt: skip
        self.tier.engine_calls(self.core, request)
        context = ReqContext(req_id=request.request_id)
        keys = [make_offload_key(one, 0) for one in request.block_hashes]
        for number, key in enumerate(keys, 1):
            context.set_offload_key_position(key, number * TOKENS)
        self.manager.on_new_request(context)
        return context, keys, request

    def step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext((), ()))

    def until_idle(self) -> None:
        until = time.monotonic() + vllm_case.WITHIN
        while self.manager._jobs:
            assert time.monotonic() < until, "a job did not end"
            self.step()

    def fill(self, seed: int, blocks: int, salt: str | None = None, *, wait: bool = True) -> np.ndarray[Any, Any]:
        """A request computes blocks, which vLLM copies to host memory. Returns their bytes."""
        context, keys, _ = self.begin(seed, blocks, salt)
        output = self.manager.prepare_store(keys, context)
        assert output is not None
        data = np.random.default_rng(seed).integers(0, 256, (len(output.keys_to_store), ROW), np.uint8)
        self.region.rows[output.store_spec.chunk_ids] = data
        self.manager.complete_store(output.keys_to_store, context)
        self.manager.on_request_finished(context)
        if wait:
            self.until_idle()
        return data

    def look_up(self, context: ReqContext, keys: list[Any]) -> list[LookupResult]:
        """vLLM's answers once no lookup or load is under way."""
        until = time.monotonic() + vllm_case.WITHIN
        while True:
            found = [self.manager.lookup(key, context) for key in keys]
            self.step()
            if not {LookupResult.RETRY, LookupResult.HIT_PENDING} & {*found}:
                return found
            assert time.monotonic() < until, "a lookup did not end"

    def load(self, seed: int, blocks: int, salt: str | None = None) -> list[np.ndarray[Any, Any] | None]:
        """Loads a request's blocks from host memory after vLLM's lookups, by block; None for a miss."""
        context, keys, _ = self.begin(seed, blocks, salt)
        found = []
        for key, result in zip(keys, self.look_up(context, keys), strict=True):
            if result is LookupResult.HIT:
                spec = self.manager.prepare_load([key], context)
                found.append(self.region.rows[spec.chunk_ids[0]].copy())
                self.manager.complete_load([key], context)
            else:
                found.append(None)
        self.manager.on_request_finished(context)
        return found


def check_bytes(config: Any, url: str) -> None:
    """Checks that another server loads what one has saved, byte for byte; shutdowns write the queue and let go of the
    memory."""
    one = Offloading(config, [url], queue=ROWS * ROW)
    data = one.fill(1, 20, wait=False)
    one.manager.shutdown()
    assert one.region.cleaned
    two = Offloading(config, [url])
    found = two.load(1, 20)
    assert all(row is not None and (row == wanted).all() for row, wanted in zip(found, data, strict=True))
    assert two.load(2, 3) == [None] * 3 and two.load(1, 3, "foreword:aa") == [None] * 3
    two.manager.shutdown()


def check_unsure(config: Any, url: str) -> None:
    """A store that has to be asked gives a retry, and then what it has."""
    one = Offloading(config, [url])
    tier = one.tier._store.tiers[0]
    data = one.fill(3, 4)
    one.manager.primary_tier.reset_cache()
    tier.store = Unsure(tier.store)
    context, keys, _ = one.begin(3, 4)
    assert one.manager.lookup(keys[0], context) is LookupResult.RETRY
    tier.store.may_answer.set()
    assert one.look_up(context, keys) == [LookupResult.HIT] * 4
    spec = one.manager.prepare_load(keys, context)
    assert (one.region.rows[spec.chunk_ids] == data).all()
    one.manager.complete_load(keys, context)
    one.manager.on_request_finished(context)
    one.manager.shutdown()


def check_failures(config: Any, url: str) -> None:
    """Jobs end where the store fails, lookups too, and a load that fails is not tried for ever."""
    one = Offloading(config, [url])
    tier = one.tier._store.tiers[0]
    one.fill(4, 4)
    tier.store = Failing(tier.store)
    one.fill(5, 4)
    one.manager.primary_tier.reset_cache()
    assert one.load(4, 4) == [None] * 4
    assert one.tier.counts["not_saved"] == 4 and one.tier.counts["not_loaded"] == 4
    one.manager.shutdown()


def check_queue(config: Any, url: str) -> None:
    """While a write stands still, vLLM's thread goes on, pins stay within the queue, and a reset waits for the copy only."""
    one = Offloading(config, [url], queue=8 * ROW)
    tier = one.tier._store.tiers[0]
    gate = vllm_case.Gate(tier.store, "put")
    tier.store = gate
    gate.shut()
    one.fill(6, 6, wait=False)
    assert gate.reached.wait(vllm_case.WITHIN)
    one.fill(7, 6, wait=False)
    one.fill(8, 6, wait=False)
    assert one.tier._jobs.queued_bytes == 8 * ROW and one.tier._jobs.dropped == 10
    gate.open()
    one.until_idle()
    assert one.tier.counts["saved"] == 8 and one.tier.counts["not_saved"] == 10
    stats = one.tier.get_stats()
    assert stats.reduce()["vllm:foreword_offload_blocks:('dropped',)"] == 10 and one.tier.get_stats() is None
    one.manager.shutdown()


def check_reset(config: Any, url: str) -> None:
    """After a reset of vLLM's host memory nothing from before is found, as the weights may have changed; jobs have ended."""
    one = Offloading(config, [url])
    one.fill(9, 4, wait=False)
    one.manager.reset_cache()
    assert not one.manager._jobs and one.load(9, 4) == [None] * 4
    one.manager.shutdown()


def check_sessions(config: Any, url: str) -> None:
    """The next input of a session comes as a request of its own with the session's id, and hashes of its own tokens. The start
    is kept; the rest, which may have other media, is not; other requests go on. What vLLM refuses leaves nothing here."""
    one = Offloading(config, [url])
    context, keys, session = one.begin(10, 6)
    output = one.manager.prepare_store(keys[:3], context)
    one.manager.complete_store(output.keys_to_store, context)
    one.until_idle()
    update = SimpleNamespace(**{**vars(session), "block_hashes": [bytes(32)], "num_prompt_tokens": TOKENS})
    one.tier.engine_calls(one.core, update)
    assert one.manager.lookup(keys[4], context) is LookupResult.MISS
    output = one.manager.prepare_store(keys[3:], context)
    one.manager.complete_store(output.keys_to_store, context)
    one.until_idle()
    assert one.tier.counts["saved"] == one.tier.counts["refused"] == 3 and not one.tier.degraded
    one.manager.on_request_finished(context)
    one.tier.engine_calls(one.core, SimpleNamespace(**{**vars(session), "request_id": "refused"}))
    one.fill(11, 4)
    one.manager.primary_tier.reset_cache()
    assert all(row is not None for row in one.load(11, 4)) and not one.tier._requests
    one.manager.shutdown()


def check_namespaces(config: Any, model: str, folder: str) -> None:
    """Equal settings in one folder have one namespace; each of these differences gives another."""
    url, other = f"disk://{folder}/one?size=8MiB", f"disk://{folder}/two?size=8MiB"

    def of(store: str, vllm_config: Any = config, shape: Any = None, **settings: Any) -> bytes:
        return namespace(vllm_config, shape or offloading_config(), read_settings({"store": [store], **settings}))

    mine = of(url)
    assert of(url) == mine and of(url, shape=replace(offloading_config(), engine_id="two")) == mine
    parallel = replace(offloading_config().parallel, tp_size=2, world_size=2)
    different = [
        of(other), of(url, shape=replace(offloading_config(), parallel=parallel)),
        of(url, shape=replace(offloading_config(), kv_cache_layout="HND")),
        of(url, engine_config(model, dtype="bfloat16")), of(url, engine_config(model, prefix_caching_hash_algo="sha256_cbor")),
        of(url, engine_config(model, hf_overrides={"rope_theta": 5000.0})), of(url, fingerprint="ab" * 32),
    ]  # fmt: skip
    os.environ["PYTHONHASHSEED"] = "5"
    different.append(of(url))
    del os.environ["PYTHONHASHSEED"]
    os.environ["VLLM_CPU_ATTN_SPLIT_KV"] = "0"
    different.append(of(url))
    del os.environ["VLLM_CPU_ATTN_SPLIT_KV"]
    assert len({mine, *different}) == 1 + len(different)
    trusted = of(url, trust_unmeasured=True)
    assert of(other, trust_unmeasured=True) == trusted != mine
    assert of("memory://?size=8MiB") != of("memory://?size=8MiB")
    assert of("memory://?size=8MiB", trust_unmeasured=True) == trusted


def main() -> None:
    job = json.loads(sys.argv[1])
    config = engine_config(job["model"])
    checks = (check_bytes, check_unsure, check_failures, check_queue, check_reset, check_sessions)
    for check in checks:
        check(config, f"disk://{job['folder']}/{check.__name__}?size=64MiB")
    check_namespaces(config, job["model"], job["folder"])
    vllm_case.finish({"checks": [check.__name__ for check in checks]})


if __name__ == "__main__":
    main()
