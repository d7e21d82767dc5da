"""Foreword's stores under vLLM: a KV connector that vLLM loads by name.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "ForewordConnector",
        "kv_connector_module_path": "foreword.integrations.vllm", "kv_role": "kv_both",
        "kv_connector_extra_config": {"store": ["memory://?size=8GiB", "disk:///var/cache/foreword?size=200GiB"]}}'

vLLM makes one connector in its scheduler and one in each worker. The scheduler side looks up in the stores what vLLM does not
have, and sends loads and saves along with each step. The worker side carries them out on the blocks of its rank. Where both
are in one process, which is so with a single rank, they share one `OffloadManager`.

Block keys are Foreword's own, made of token ids, so they are equal across processes and versions. The layout of a block (shape,
packing for the instruction set, backend) is part of its name, so a block is never loaded into another layout. Which servers
share KV follows from what they resolve and measure at start (`namespace.py`), not from names or versions.
Written for vLLM 0.31 and later; it depends on `kv_connector/v1/base.py` and what that imports.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_events import KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from foreword.integrations.vllm.connector_config import ConnectorSettings, KVCacheInfo, warn_of_lost_writes
from foreword.integrations.vllm.connector_counts import ConnectorCounts
from foreword.integrations.vllm.connector_metrics import ForewordPromMetrics, ForewordStats
from foreword.integrations.vllm.degraded import Expectations, Loads, degrade, hook, quick
from foreword.integrations.vllm.give_back import give_back
from foreword.integrations.vllm.kv_probe import calling_multi_connector, calling_worker, open_when_warm
from foreword.integrations.vllm.scheduler_side import ForewordConnectorScheduler
from foreword.integrations.vllm.step_messages import (
    BlockSave,
    ForewordConnectorMetadata,
    ForewordWorkerMetadata,
    WorkerHandshake,
)
from foreword.integrations.vllm.weight_changes import notice_changes
from foreword.integrations.vllm.weights import follow_engine
from foreword.integrations.vllm.worker_side import ForewordConnectorWorker, told_by_stores, worker_of

if TYPE_CHECKING:
    from foreword.integrations.vllm_extras.interfaces import ChangeEvents

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ModuleNotFoundError:  # vLLM 0.31 does not ask where hits come from
    CacheHitSource = None


class ForewordConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """The connector. vLLM wants both roles in one class; each call goes to the scheduler side or to the worker side.

    Loads are asynchronous: a request waits while its blocks are loaded, and other requests run. If a request is aborted
    meanwhile, its load stops, and vLLM keeps its blocks until the worker side reports that nothing is written any more.

    A step in which nothing is to be moved is *idle*. vLLM makes a dozen calls of this class in each step; in an idle one each
    reads a few attributes, so that the cost does not grow with the requests that run or wait.

    It supports vLLM's hybrid KV cache manager: models with several KV cache groups keep it.

    Saves copy whole blocks after the step (`wait_for_save`), before vLLM can give them to another request. What has no room
    waits while vLLM keeps the blocks (`late_saves.py`). The last window of a request is copied when it ends. If the worker is
    in another process, vLLM keeps the request's blocks until the next step, or until it resets its cache if that comes first
    (`give_back.py`). Saving layer by layer would gain little: the copy takes 10 ms per 48 MB, less than 0.3 % of the prefill
    that filled them.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.degraded = ""
        # A MultiConnector gives each of its connectors a copy of the configuration, with settings of its own.
        self._behind_another = calling_multi_connector()
        self._reported = False  # that it is degraded
        self._loads, self._expected = Loads(), Expectations()
        self._divisible = False
        self._idle = False  # the workers have nothing to do for the step that runs
        self._prefills = False  # it computes prompts
        self._quiet = False  # nor anything to report, or to forget from the steps before: only while it is not degraded
        self._stats_due = 0.0  # when the worker side's statistics are read again
        self._held: dict[str, int] = {}  # tokens that requests have before what is to be loaded
        self._pool: Any = None
        self._scheduler_side: ForewordConnectorScheduler | None = None
        self._worker_side: ForewordConnectorWorker | None = None
        self._prepare(vllm_config, role == KVConnectorRole.WORKER, kv_cache_config)

    @hook(lambda *_: None, at_start=True)
    def _prepare(self, vllm_config: Any, is_worker: bool, kv_cache_config: Any) -> None:
        transfer = vllm_config.kv_transfer_config
        # A block that cannot be loaded is a miss. vLLM's default policy would end the request with an error.
        transfer.kv_load_failure_policy = "recompute"
        settings = ConnectorSettings.read(transfer.kv_connector_extra_config or {}, str(transfer.kv_role))
        self._info = info = KVCacheInfo(vllm_config, kv_cache_config, settings)
        self._settings, self._divisible = settings, info.divisible
        # Connectors of one MultiConnector have one engine id: each scheduler side finds the worker side with its stores.
        self._engine = f"{transfer.engine_id} {settings.store.urls}"
        if is_worker:
            self._worker_side = ForewordConnectorWorker(info, settings, self._engine)
        else:
            warn_of_lost_writes(vllm_config, sys.argv)

    @property
    def _scheduler(self) -> ForewordConnectorScheduler:
        """The scheduler side. It begins with the workers' handshake, which brings the namespace, or when it is first needed."""
        return self._scheduler_side if self._scheduler_side is not None else self._begin(b"")

    def _begin(self, namespace: bytes) -> ForewordConnectorScheduler:
        worker = worker_of(self._engine)
        if worker is not None:
            namespace = worker.open(None)
        elif self._behind_another:  # the record of a start is read once, also where the handshake says the same
            namespace = told_by_stores(self._info, self._settings) or namespace
        self._info.settle(namespace)
        self._scheduler_side = side = ForewordConnectorScheduler(self._info, self._settings, self._engine)
        side.bind_pool(self._pool)
        follow_engine(self._info.config, "reset_prefix_cache", self.before_reset, before=True)
        follow_engine(self._info.config, "collective_rpc", self.before_workers, before=True)
        return side

    @property
    def _worker(self) -> ForewordConnectorWorker:
        """The worker side. Its stores open with the handshake, or when they are first needed."""
        side = self._worker_side
        assert side is not None
        if side.offload is None:
            side.open(None)
        return side

    @property
    def requires_kv_delivery(self) -> bool:
        """False, as this is a cache: what is lost is recomputed."""
        return False

    # Scheduler side

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._pool = gpu_block_pool

    @hook(lambda *_, **__: None)
    def before_reset(self, core: Any, reset_running_requests: bool = False, reset_connector: bool = False) -> None:
        """vLLM is about to reset its own cache."""
        alone = core.scheduler.connector is self
        told = self._expected.given_back if alone else None
        give_back(core, self._scheduler, running=reset_running_requests, told=told)

    @hook(lambda *_, **__: None)
    def before_workers(self, core: Any, method: Any, *_: Any, **__: Any) -> Callable[[], None] | None:
        """vLLM is about to call a method of its workers, which may change weights."""
        compare = notice_changes(core, method, self._scheduler.weights_changed)
        return None if compare is None else partial(self.after_workers, compare)

    @hook(lambda *_: None)
    def after_workers(self, compare: Callable[[], None]) -> None:
        """Notice that a method of the workers was called, which may have changed weights."""
        compare()

    @hook(lambda *_: (0, False))
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        self._held[request.request_id] = num_computed_tokens
        return self._scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def _expect(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        held = self._held.get(request.request_id, 0)
        if num_external_tokens:
            size = self._info.groups[0].block_size
            self._expected.load(request.request_id, held, num_external_tokens, size, blocks.get_block_ids())

    @hook(_expect)
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler.update_state_after_alloc(request, blocks.get_block_ids(), num_external_tokens)
        self._expect(request, blocks, num_external_tokens)

    @hook(lambda self, output: self._expected.give_up(output.total_num_scheduled_tokens))
    def build_connector_meta(self, scheduler_output: Any) -> ForewordConnectorMetadata:
        metadata = (self._scheduler_side or self._scheduler).build_connector_meta(scheduler_output)
        if not metadata.idle:
            self._expected.sent()
        return metadata

    @quick
    def update_connector_output(self, connector_output: Any) -> None:
        side, found = self._scheduler_side, connector_output
        ended = found.finished_recving or found.finished_sending or found.invalid_block_ids
        reported = getattr(found, "kv_connector_worker_meta", None)  # vLLM 0.31 has none
        if ended or reported is not None or side is None or side.measures:
            self._note_output(connector_output)

    @hook(lambda *_: None)
    def _note_output(self, connector_output: Any) -> None:
        reported = getattr(connector_output, "kv_connector_worker_meta", None)
        if isinstance(reported, ForewordWorkerMetadata) and reported.degraded:
            degrade(self, reported.degraded)
        else:
            self._scheduler.update_connector_output(connector_output)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    @hook(lambda *_: (False, None))
    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._held.pop(request.request_id, None)
        kept, params = self._scheduler.request_finished(request, block_ids)
        if kept:
            self._expected.keep(request.request_id)
        return kept, params

    @hook(lambda self, request, tokens: {CacheHitSource("external_unspecified"): tokens} if tokens else {})
    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        counts = self._scheduler.hit_sources(request, num_external_tokens)
        return {CacheHitSource(source): tokens for source, tokens in counts.items()}

    @hook(lambda *_: None, at_start=True)
    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        workers = {rank: one for rank, one in metadata.items() if isinstance(one, WorkerHandshake)}
        if self._scheduler_side is None:
            self._begin(next((one.namespace for one in workers.values()), b""))
        self._scheduler.set_workers(workers)

    @quick
    def take_events(self) -> Iterable[KVCacheEvent]:
        side = self._scheduler_side
        return () if side is None or side.events is None else self._take_events(side.events)

    @hook(lambda *_: ())
    def _take_events(self, events: ChangeEvents) -> Iterable[KVCacheEvent]:
        return events.take()

    @quick
    def has_pending_push_work(self) -> bool:
        """True keeps vLLM stepping until it has the KV events of the last saves, if it publishes events, and until it has back
        the blocks that it keeps for saves."""
        side = self._scheduler_side
        return side is not None and bool(side.keeping or side.events is not None) and self._expects_more(side)

    @hook(lambda *_: False)
    def _expects_more(self, side: ForewordConnectorScheduler) -> bool:
        return side.expects_events or bool(side.keeping)

    @hook(lambda *_: True)
    def reset_cache(self) -> bool | None:
        """Called for `reset_prefix_cache(reset_connector=True)`, which vLLM also does when it pauses or sleeps so that weights
        can be changed in place. A fingerprint of files does not change then, so this server stops using all KV that was saved
        before. The stores keep it, for other servers and for this one after a restart."""
        self._scheduler.reset()
        return True

    # Worker side

    @hook(lambda *_: None, at_start=True)
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor | list[torch.Tensor]]) -> None:
        assert self._worker_side is not None
        self._worker_side.register_kv_caches(kv_caches)
        if self._behind_another:
            open_when_warm(calling_worker(), self._open)

    @hook(lambda *_: None, at_start=True)
    def _open(self, vllm_worker: Any) -> None:
        assert self._worker_side is not None
        self._worker_side.open(vllm_worker, announced=True)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """True. vLLM sleeps only when no request has blocks, and it resets the connector before (`reset_cache`). Between the
        two calls below, which vLLM 0.33 and later makes around it, nothing touches the KV cache."""
        return True

    @hook(lambda *_: None)
    def unregister_kv_caches(self) -> None:
        assert self._worker_side is not None
        self._worker_side.unregister_kv_caches()

    @hook(lambda *_: None)
    def restore_kv_caches(self) -> None:
        assert self._worker_side is not None
        self._worker_side.restore_kv_caches()

    @hook(lambda *_: None, at_start=True)
    def get_handshake_metadata(self) -> WorkerHandshake | None:
        """vLLM asks each worker once, when the model is loaded, compiled and warm, and before the first request."""
        if self._worker_side is None:
            return None
        self._worker_side.open(calling_worker())
        return self._worker_side.handshake

    @quick
    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        self._connector_metadata = connector_metadata
        if type(connector_metadata) is not ForewordConnectorMetadata:
            return
        moves = not connector_metadata.idle or connector_metadata.prefills or not connector_metadata.tokens
        if moves or not self._quiet or self.degraded:
            self._quiet = False
            self._begin_step(connector_metadata)

    @hook(lambda self, metadata: self._loads.begin_step(metadata))
    def _begin_step(self, metadata: ForewordConnectorMetadata) -> None:
        self._idle, self._prefills = metadata.idle, bool(metadata.prefills)
        self._loads.begin_step(metadata)
        if self._worker_side is not None:
            self._worker_side.begin_step(metadata)

    @quick
    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """From now on nothing reads a preempted request's blocks."""
        metadata = kv_connector_metadata
        if type(metadata) is ForewordConnectorMetadata and metadata.ended and self._worker_side is not None:
            self._take_back(self._worker_side, metadata.ended)

    @hook(lambda *_: None)
    def _take_back(self, side: ForewordConnectorWorker, ended: Sequence[str]) -> None:
        side.drop_late(ended)

    @quick
    def start_load_kv(self, forward_context: Any, **_: Any) -> None:
        if not self._idle:
            self._start_loads(self._metadata())

    @hook(lambda *_: None)
    def _start_loads(self, metadata: ForewordConnectorMetadata) -> None:
        self._worker.refuse(metadata.refused)
        self._worker.start_loads(metadata.loads)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are asynchronous: a request is not scheduled before its blocks are loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **_: Any) -> None:
        """Blocks are saved whole, after the step (`wait_for_save`)."""

    @quick
    def wait_for_save(self) -> None:
        if not self._idle or self._prefills:
            self._save()

    @hook(lambda *_: None)
    def _save(self) -> None:
        self._worker.save(self._metadata())

    def _metadata(self) -> ForewordConnectorMetadata:
        assert isinstance(self._connector_metadata, ForewordConnectorMetadata)
        return self._connector_metadata

    def _give_up(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        received, sent = self._loads.give_up()
        if self._worker_side is not None:
            self._worker_side.drop_loads()
            with contextlib.suppress(Exception):  # leases end by themselves, if they still work
                sent |= self._worker_side.take_sent(finished_req_ids)
        failed = set() if self._divisible else received
        return KVConnectorTransferResults(finished_sending=sent, finished_recving=received, failed_recving=failed)

    @quick
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        return self._results(finished_req_ids) if finished_req_ids or not self._quiet else KVConnectorTransferResults()

    @hook(_give_up)
    def _results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        worker = self._worker
        if finished_req_ids:
            worker.stop_loads(finished_req_ids)
        metadata = self._connector_metadata
        computes = not isinstance(metadata, ForewordConnectorMetadata) or metadata.tokens > 0
        if not computes:
            worker.wait()
        if not finished_req_ids and not worker.has_results:
            self._quiet = computes and self._idle
            return KVConnectorTransferResults()
        received, sent = worker.take_received(), worker.take_sent(finished_req_ids)
        failed = worker.take_failed_requests()
        results = KVConnectorTransferResults(finished_sending=sent, finished_recving=received, failed_recving=failed)
        self._loads.note(received, sent)
        return results

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending or None, results.finished_recving or None

    @quick
    def get_block_ids_with_load_errors(self) -> set[int]:
        return set() if self._quiet else self._failed_blocks()

    @hook(lambda self: self._loads.blocks() if self._divisible else set())
    def _failed_blocks(self) -> set[int]:
        return self._worker.take_failed_blocks()

    @quick
    def build_connector_worker_meta(self) -> ForewordWorkerMetadata | None:
        side = self._worker_side
        return self._changes(side) if self.degraded or (side is not None and side.reports) else None

    @hook(lambda self, _: ForewordWorkerMetadata(degraded=self.degraded))
    def _changes(self, side: ForewordConnectorWorker | None) -> ForewordWorkerMetadata | None:
        return side.take_changes() if side is not None else None

    def _end_anyway(self, names: Sequence[str], saves: Sequence[BlockSave]) -> set[str]:
        if self._worker_side is not None:
            self._worker_side.drop_loads()
        return self._loads.end(names)

    @hook(_end_anyway)
    def end_work(self, names: Sequence[str], saves: Sequence[BlockSave]) -> set[str]:
        """Between two steps: end loads as failed, and save blocks. Returns the requests whose loads have ended by this."""
        self._worker.save_blocks(saves)
        return self._loads.end(self._worker.end_loads(names))

    def _report_degraded(self) -> KVConnectorStats | None:
        if self._reported:
            return None
        self._reported = True
        return ForewordStats().count(ConnectorCounts(degraded=1))

    @quick
    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """vLLM asks both sides, after each step. Each reads its counters ten times a second at most while steps compute."""
        side = self._scheduler_side
        if self._worker_side is not None:
            waits = self._quiet and time.monotonic() < self._stats_due
        else:
            waits = side is not None and not side.news and (side.stats is None or time.monotonic() < side.stats.due_at)
        return None if waits and not self.degraded else self._read_stats()

    @hook(_report_degraded)
    def _read_stats(self) -> KVConnectorStats | None:
        worker, metadata = self._worker_side, self._connector_metadata
        if worker is None:
            return self._scheduler.take_stats()
        # A step without tokens costs nothing, and may be the last one for long.
        computes = isinstance(metadata, ForewordConnectorMetadata) and metadata.tokens > 0
        found = worker.take_stats(at_once=not computes)
        self._stats_due = worker.stats_due
        return found

    # Both sides

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return ForewordStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> ForewordPromMetrics:
        return ForewordPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        self._close(self._worker_side)
        self._close(self._scheduler_side)

    @hook(lambda *_: None, always=True)
    def _close(self, side: ForewordConnectorWorker | ForewordConnectorScheduler | None) -> None:
        if side is not None:
            side.close()
