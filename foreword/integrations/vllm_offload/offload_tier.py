"""Foreword's stores as a secondary tier of vLLM's own offloading (`SecondaryTierManager`).

vLLM copies blocks between the device and rows of host memory; a secondary tier copies between these rows and what it has. vLLM
calls it in the scheduler's thread, so each call here looks into memory or appends to a list. What moves bytes is in
`row_jobs.py`, what blocks are called in `block_names.py`, whose they are in `offload_identity.py`.

vLLM gives a tier neither its configuration nor its requests. Both come from methods of vLLM's `EngineCore`, which are wrapped
(`weights.follow_engines`). Without them the tier has nothing and takes nothing.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, ClassVar, Final

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingMetricMetadata,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from foreword import __version__
from foreword.blocks.resume import GroupKind
from foreword.config import parse_bytes
from foreword.errors import StoreError
from foreword.integrations.vllm.degraded import degrade, hook
from foreword.integrations.vllm.request_identity import RequestIdentities, request_identities, salt_of
from foreword.integrations.vllm.weight_changes import follow_loads, notice_changes
from foreword.integrations.vllm.weights import WeightsVersion, adapters_spoil_base, follow_engines
from foreword.integrations.vllm_offload.block_names import BlockGroup, RequestBlocks, group_of
from foreword.integrations.vllm_offload.offload_identity import block_groups, namespace, read_settings
from foreword.integrations.vllm_offload.row_jobs import RowJobs, Rows
from foreword.integrations.vllm_offload.row_parts import unwritten_parts
from foreword.offload.policy import search_seconds
from foreword.store.background_jobs import BackgroundJobs
from foreword.store.layout_records import LAYOUTS, LayoutRecord
from foreword.store.shared_records import SharedRecords
from foreword.store.tiered import TieredStore, TierSearch
from foreword.store.urls import open_store

logger = logging.getLogger("vllm.foreword")

_BLOCKS: Final = "vllm:foreword_offload_blocks"
_LOOKUPS: Final = 4  # threads
_MOST_LOOKUPS: Final = 256  # stretches of blocks that wait for a thread


class ForewordTier(SecondaryTierManager):  # type: ignore[misc]
    """The tier. vLLM gets it by `"type": "ForewordTier", "module_path": "foreword.integrations.vllm"`.

    Attributes:
        degraded: why it does nothing any more; empty while it works.
        namespace: of the blocks; b"" until vLLM's configuration is known.
        counts: blocks by what became of them.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        queue: str | int = "auto",
        locality: str | None = None,
        **given: Any,
    ) -> None:
        """
        Args:
            queue: bytes of vLLM's host memory that may wait to be saved; "auto" is a quarter.
            locality: LOCAL or REMOTE, for vLLM's filters of tiers.
            given: see `read_settings`.
        """
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = Locality(locality) if locality is not None else None
        self.degraded, self.namespace = "", b""
        self.counts: Counter[str] = Counter()
        self._reported: Counter[str] = Counter()
        self._settings = read_settings(given)
        share = primary_kv_view.nbytes // 4
        self._queue_bytes = share if queue == "auto" else parse_bytes(str(queue), "queue of ForewordTier")
        rows = np.frombuffer(primary_kv_view, np.uint8) if primary_kv_view.ndim == 1 else np.asarray(primary_kv_view)
        self._rows: Rows | None = rows.view(np.uint8).reshape(-1, self.block_size_bytes)
        self._offloading = offloading_spec.config
        self._store: TieredStore | None = None
        self._jobs: RowJobs | None = None
        self._refused: list[JobResult] = []  # of jobs that no queue knows
        self._groups: dict[int, BlockGroup] = {}
        self._identities: RequestIdentities | None = None
        self._requests: dict[str, RequestBlocks] = {}
        self._added: RequestBlocks | None = None  # the request that vLLM is adding
        self._loading: dict[int, tuple[str, Sequence[bytes]]] = {}
        self._lookups = BackgroundJobs("lookup", most=_MOST_LOOKUPS, threads=_LOOKUPS)
        self._version = WeightsVersion(self._settings.weights_version)
        self._used = False  # vLLM may have KV that was computed since its last reset
        self._core: Any = None
        self._is_mine = partial(_is_engine, self._offloading.engine_id)
        # The first of these calls brings vLLM's configuration: at the end of the engine's start, or with a request.
        follow_engines(self._is_mine, "_initialize_effective_attention_block_size", self.engine_calls, before=True)
        follow_engines(self._is_mine, "add_request", self.engine_calls, before=True)

    # From vLLM's engine

    def engine_calls(self, core: Any, request: Any = None, *_: Any, **__: Any) -> None:
        """`EngineCore` ends its start, or adds a request."""
        if self._core is None:
            self._begin(core)
        if request is not None:
            self._add(request)

    @hook(lambda *_: None, at_start=True)
    def _begin(self, core: Any) -> None:
        """Find out whose KV the blocks are, and open the stores."""
        self._core, config, settings = core, core.vllm_config, self._settings
        began = time.monotonic()
        shape = getattr(core.scheduler, "kv_cache_config", None)
        unwritten = unwritten_parts(self._offloading, shape, self.block_size_bytes)
        self.namespace = namespace(config, self._offloading, settings)
        self._groups = block_groups(self.namespace, self._offloading, self.block_size_bytes)
        self._identities = request_identities(config, int(self._offloading.cache.tokens_per_hash))
        self._version = settings.version_of(config)
        layouts = [one.layout for one in self._groups.values()]
        self._store = store = open_store(
            settings.store.urls, layouts[0], more_layouts=layouts[1:], keys=settings.keys()
        )
        store.warm_up([layouts[0].fingerprint])
        assert self._rows is not None
        self._jobs = RowJobs(store, self._rows, self._queue_bytes, settings.store.load_timeout, unwritten)
        self._lookups.submit(self._describe, str(config.model_config.model))
        follow_engines(self._is_mine, "set_weight_version", self.set_weights_version)
        follow_engines(self._is_mine, "collective_rpc", self.before_workers, before=True)
        follow_loads(None, self.weights_changed)
        core.model_executor.collective_rpc(count_loads)
        if config.lora_config is not None and adapters_spoil_base():
            degrade(self, "this vLLM computes requests without an adapter wrongly beside those with one")
            logger.warning("Foreword keeps no KV of vLLM's offloading: %s", self.degraded)
        logger.info(
            "Foreword %s under vLLM's offloading: namespace %s, found and opened in %.2f s; %s; blocks of %d bytes",
            __version__,
            self.namespace.hex()[:12],
            time.monotonic() - began,
            store.label,
            self.block_size_bytes,
        )

    def _describe(self, model: str) -> None:
        """Write the records of the layouts, for tools."""
        assert self._store is not None
        records = SharedRecords(self._store, LAYOUTS)
        for one in self._groups.values():
            facts = one.layout.describe(), self.namespace.hex(), GroupKind.FULL
            try:
                records.put(LAYOUTS.key(one.layout.fingerprint.hex()), LayoutRecord(model, *facts))
            except StoreError as error:
                logger.warning("Foreword: the layout of blocks is not recorded: %s", error.message)

    @hook(lambda *_: None)
    def _add(self, request: Any) -> None:
        """vLLM adds a request, or refuses it, or adds the next input to a session, whose request is another object. The rest of
        a session has no blocks here: its media are not those of its start. Nor has a request with an adapter: vLLM's hashes
        name that by its path, and what is loaded from there cannot be seen from the scheduler."""
        assert self._identities is not None
        self._requests.pop(request.request_id, None)
        self._added = None
        identity = None if request.lora_request is not None else self._identities.of(request)
        if identity is not None:
            salt = self._settings.current(salt_of(request))
            tokens = int(self._offloading.cache.tokens_per_hash)
            self._added = RequestBlocks(self._groups, request, salt, identity.inputs, tokens, self._version.salt)

    # Versions of the weights

    @property
    def _empty(self) -> bool:
        """Whether neither vLLM's cache on the device nor its host memory has KV: nothing was computed since their reset."""
        return not self._used and self._is_pool_empty()  # a request that was preempted goes on without a word

    def _is_pool_empty(self) -> bool:
        """Whether vLLM's cache on the device holds nothing: it has just been reset."""
        pool = getattr(getattr(getattr(self._core, "scheduler", None), "kv_cache_manager", None), "block_pool", None)
        if pool is None:
            return False
        cached = getattr(pool, "cached_block_hash_to_block", None)
        return pool.num_gpu_blocks - pool.get_num_free_blocks() == 1 and cached is not None and not len(cached)

    @hook(lambda *_: None)
    def before_workers(self, core: Any, method: Any, *_: Any, **__: Any) -> Callable[[], None] | None:
        """vLLM is about to call a method of its workers, which may change weights."""
        return notice_changes(core, method, self.weights_changed)

    @hook(lambda *_: None)
    def set_weights_version(self, name: str) -> None:
        """The weights are those of version `name`: what was saved under it is found again."""
        self._start_version(self._version.set(name, self._empty))

    @hook(lambda *_: None)
    def weights_changed(self) -> None:
        """The weights have changed, or are about to, without a word about their version."""
        if self._version.changed(self._empty):
            self._start_version(not self._version.stale)

    def _start_version(self, trusted: bool) -> None:
        for one in self._requests.values():
            one.begin(self._version.salt)
        if not trusted:
            logger.warning(
                "Foreword: the weights have changed under vLLM's own cache and host memory: nothing is saved or loaded until "
                "both are empty: reset them with reset_prefix_cache(reset_running_requests=True, reset_connector=True)"
            )

    # Called by vLLM

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        """The scheduler has taken a request. The next inputs of sessions come without this call."""
        added, self._added = self._added, None
        if added is not None and added.request.request_id == req_context.req_id:
            self._requests[req_context.req_id] = added
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        self._requests.pop(req_context.req_id, None)

    def on_schedule_end(self, context: Any) -> None:
        if self._requests or context.new_req_ids:
            self._used = self._version.computed = True

    @hook(lambda *_: LookupResult.MISS)
    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        known = self._usable(req_context)
        if known is None:
            return LookupResult.MISS
        if key not in known.found:
            self._look_up(known, key, req_context.get_offload_key_position(key))
        found = known.found[key]
        return LookupResult.RETRY if found is None else LookupResult.HIT if found else LookupResult.MISS

    def _usable(self, req_context: Any) -> RequestBlocks | None:
        """The request, unless its KV is not to be kept."""
        known = self._requests.get(req_context.req_id)
        return None if self._version.stale or self._jobs is None else known

    def _look_up(self, known: RequestBlocks, key: bytes, end: int | None) -> None:
        """Note whether the stores have a block, and those near it if vLLM goes on: it does behind a block that is there, and
        where a window is searched, which shows when one more is asked for."""
        if end is None or group_of(key) not in self._groups:
            known.found[key] = False
            return
        if group_of(key) in known.missed or self._ask(known, {key: end}):
            self._ask(known, {one: at for one, at in known.together(key, end).items() if one not in known.found})
        else:
            known.missed.add(group_of(key))

    def _ask(self, known: RequestBlocks, asked: dict[bytes, int]) -> bool:
        """Note which blocks, given by vLLM's key and their end, the stores have, as far as they know by themselves, and look up
        the others on a thread. False if all are missing."""
        assert self._store is not None
        names = [known.name(one, at) for one, at in asked.items()]
        local, remote = search_seconds(self._settings.store.lookup_timeout, None)
        deadline = time.monotonic() + local + remote
        search = TierSearch(deadline, local, remote)
        places = self._store.find(names, search=search, inline=True)
        missing = [(one, name) for one, name, place in zip(asked, names, places, strict=True) if place < 0]
        known.found.update((one, None if place < 0 else True) for one, place in zip(asked, places, strict=True))
        later = search.undecided and self._lookups.add(
            partial(self._search, known.found, missing, deadline, local, remote)
        )
        if not later:
            known.found.update((one, False) for one, _ in missing)
        return later or any(place >= 0 for place in places)

    def _search(
        self,
        found: dict[bytes, bool | None],
        missing: Sequence[tuple[bytes, bytes]],
        deadline: float,
        local: float,
        remote: float,
    ) -> None:
        """Look up blocks, given by vLLM's key and their name, on a thread. A request waits for it, so it always ends them."""
        places = [-1] * len(missing)
        try:
            assert self._store is not None
            places = self._store.find([name for _, name in missing], search=TierSearch(deadline, local, remote))
        finally:
            found.update({key: place >= 0 for (key, _), place in zip(missing, places, strict=True)})

    def _refuse(self, job: Any) -> None:
        """End a job of which nothing is to be moved."""
        self._refused.append(JobResult(job.job_id, success=False))

    @hook(_refuse)
    def submit_store(self, job_metadata: Any) -> None:
        known = self._usable(job_metadata.req_context)
        keys = list(job_metadata.keys)
        ends = [job_metadata.req_context.get_offload_key_position(key) for key in keys]
        if (
            known is None
            or self._jobs is None
            or None in ends
            or not all(group_of(key) in self._groups for key in keys)
        ):
            self.counts["refused"] += len(keys)
            self._refuse(job_metadata)
            return
        headers = [known.header(key, end) for key, end in zip(keys, ends, strict=True)]
        self._jobs.save(job_metadata.job_id, headers, [int(row) for row in job_metadata.chunk_ids])

    @hook(_refuse)
    def submit_load(self, job_metadata: Any) -> None:
        known = self._usable(job_metadata.req_context)
        keys = list(job_metadata.keys)
        ends = [job_metadata.req_context.get_offload_key_position(key) for key in keys]
        if known is None or self._jobs is None or None in ends:
            self._refuse(job_metadata)
            return
        names = [known.name(key, end) for key, end in zip(keys, ends, strict=True)]
        self._loading[job_metadata.job_id] = job_metadata.req_context.req_id, keys
        self._jobs.load(job_metadata.job_id, names, [int(row) for row in job_metadata.chunk_ids])

    def get_finished_jobs(self) -> Iterable[JobResult]:
        ended, self._refused = self._refused, []
        for job in () if self._jobs is None else self._jobs.take_ended():
            moved = sum(job.kept) * self.block_size_bytes
            request, keys = self._loading.pop(job.number, ("", ()))
            if keys:
                loaded = [key for key, kept in zip(keys, job.kept, strict=True) if kept]
                known = self._requests.get(request)
                if known is not None:  # it is not to ask for the others again
                    known.found.update((key, False) for key, kept in zip(keys, job.kept, strict=True) if not kept)
            else:
                loaded = []
            self.counts["loaded" if keys else "saved"] += sum(job.kept)
            self.counts["not_loaded" if keys else "not_saved"] += len(job.kept) - sum(job.kept)
            ended.append(JobResult(job.number, all(job.kept), loaded or None, job.seconds, moved))
        return ended

    def drain_jobs(self) -> None:
        """vLLM calls this when it resets its host memory, and for nothing else. The weights may change then without a word."""
        if self._jobs is not None:
            self._jobs.drain()
        self._used = not self._is_pool_empty()
        self._version.reset(self._empty)
        self._start_version(self._empty)

    def shutdown(self) -> None:
        """Write what waits, for at most `flush_seconds`, and close the stores. No thread uses vLLM's memory afterwards."""
        self._lookups.stop()
        jobs, self._jobs = self._jobs, None
        if jobs is not None and not jobs.close(self._settings.store.flush_seconds):
            logger.warning("Foreword: not all blocks of vLLM's offloading were written before the end")
        self._rows = None
        if self._store is not None:
            self._store.close()

    # Metrics

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        words = "Blocks of Foreword's tier of vLLM's offloading, by what became of them."
        return {_BLOCKS: OffloadingCounterMetadata(documentation=words, labelnames=("outcome",))}

    def get_stats(self) -> OffloadingConnectorStats | None:
        """How many blocks were saved, loaded, not saved, not loaded, refused, dropped and damaged since the last call."""
        if self._store is not None and self._jobs is not None:
            self.counts["dropped"] = self._jobs.dropped
            self.counts["damaged"] = sum(sum(one.counters.bad.values()) for one in self._store.tiers)
        fresh, self._reported = self.counts - self._reported, self.counts.copy()
        if not fresh:
            return None
        stats = OffloadingConnectorStats()
        for outcome, count in fresh.items():
            stats.increase_counter(_BLOCKS, count, (outcome,))
        return stats


def _is_engine(engine_id: str, vllm_config: Any) -> bool:
    transfer = vllm_config.kv_transfer_config
    return transfer is not None and transfer.engine_id == engine_id


def count_loads(worker: Any) -> None:
    """Called by vLLM in each worker: from now on loads of weights are counted there (`weight_changes.py`)."""
    follow_loads(worker.model_runner.get_model())
