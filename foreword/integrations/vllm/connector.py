"""Foreword's stores under vLLM: a KV connector that vLLM loads by name.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "ForewordConnector",
        "kv_connector_module_path": "foreword.integrations.vllm", "kv_role": "kv_both",
        "kv_connector_extra_config": {"store": ["memory://?size=8GiB", "disk:///var/cache/foreword?size=200GiB"]}}'

vLLM makes one connector in its scheduler and one in each worker. The scheduler's searches the stores for what vLLM does not
have, plans loads and saves, and sends them along with each step; the worker's carries them out on the blocks of its own rank.
Where both live in one process, which is so with a single rank, they share one `OffloadManager`.

Keys are Foreword's own, made of token ids, so they agree across processes and versions. What a block's bytes mean is vLLM's
business: shape, packing for the instruction set, backend and version are in the layout, so a block never lands in a layout
that it was not made for. Written for vLLM 0.31 and later; it depends on `kv_connector/v1/base.py` and what that names.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch
from vllm.distributed.kv_events import KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from foreword.integrations.vllm.config import Facts, Settings
from foreword.integrations.vllm.metrics import ForewordPromMetrics, ForewordStats
from foreword.integrations.vllm.scheduler import SchedulerSide
from foreword.integrations.vllm.step_messages import StepPlan, WorkerAddress, WorkerNews
from foreword.integrations.vllm.worker import WorkerSide

__all__ = ["ForewordConnector", "Settings"]

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ModuleNotFoundError:  # vLLM 0.31, which does not ask where hits come from
    CacheHitSource = None


class ForewordConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """See the module. Both roles in one class, as vLLM wants it; each delegates to a side.

    Loads are asynchronous: a request waits while its blocks come, and the others run. vLLM keeps the blocks of a request that
    was aborted meanwhile until the worker's side says that nothing is written any more; it stops the load at once.

    Saves are whole blocks, copied out after the step (`wait_for_save`), so nothing of a block is read after vLLM may give it
    to another request: preemptions and ends need no further care. Layer by layer would win nothing that counts: the copy
    takes 10 ms per 48 MB, below 0.3 % of the prefill that filled them, and needs no call per layer.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        settings = Settings.read(transfer.kv_connector_extra_config or {}, str(transfer.kv_role))
        # A block that does not come is a miss; vLLM's default would end the request with an error.
        transfer.kv_load_failure_policy = "recompute"
        facts = Facts(vllm_config, kv_cache_config, settings)
        engine = str(transfer.engine_id)
        self._scheduler = SchedulerSide(facts, settings, engine) if role == KVConnectorRole.SCHEDULER else None
        self._worker = WorkerSide(facts, settings, engine) if role == KVConnectorRole.WORKER else None

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache: what is lost is computed again."""
        return False

    # The scheduler's side

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        assert self._scheduler is not None
        if self._scheduler.announcer is not None:
            self._scheduler.announcer.hash_size = gpu_block_pool.hash_block_size

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        assert self._scheduler is not None
        return self._scheduler.match(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        assert self._scheduler is not None
        self._scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepPlan:
        assert self._scheduler is not None
        return self._scheduler.plan(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        assert self._scheduler is not None
        self._scheduler.learn(connector_output)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        assert self._scheduler is not None
        params = self._scheduler.finished(request, block_ids)
        return params is not None, params

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        assert self._scheduler is not None
        counts = self._scheduler.sources(request, num_external_tokens)
        return {CacheHitSource(source): tokens for source, tokens in counts.items()}

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        assert self._scheduler is not None
        self._scheduler.meet(
            {rank: address for rank, address in metadata.items() if isinstance(address, WorkerAddress)}
        )

    def take_events(self) -> Iterable[KVCacheEvent]:
        announcer = self._scheduler.announcer if self._scheduler is not None else None
        return announcer.take() if announcer is not None else ()

    def has_pending_push_work(self) -> bool:
        """Keeps vLLM stepping until it has heard what the tiers hold, if somebody listens to its KV events."""
        return self._scheduler is not None and self._scheduler.expects_news

    def reset_cache(self) -> bool | None:
        """Asked for with `reset_prefix_cache(reset_connector=True)`, which vLLM does itself when it pauses or sleeps so that
        weights can be changed in place. The files' fingerprint does not tell of that, so nothing that was saved before is
        found by this server any more. The stores keep it: it is right for other servers, and for this one after a restart.
        """
        assert self._scheduler is not None
        self._scheduler.reset()
        return True

    # The worker's side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        assert self._worker is not None
        self._worker.register(kv_caches)

    def get_handshake_metadata(self) -> WorkerAddress | None:
        return self._worker.address if self._worker is not None else None

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None and isinstance(connector_metadata, StepPlan):
            self._worker.step_began = time.monotonic()
            self._worker.withdraw(connector_metadata)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Nothing is read from a preempted request's blocks: what was to be saved was copied in the step that filled it."""

    def start_load_kv(self, forward_context: Any, **_: Any) -> None:
        plan = self._get_connector_metadata()
        assert self._worker is not None and isinstance(plan, StepPlan)
        self._worker.load(plan.loads)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are asynchronous: whoever computes has its blocks."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **_: Any) -> None:
        """Blocks are saved whole, after the step (`wait_for_save`)."""

    def wait_for_save(self) -> None:
        plan = self._get_connector_metadata()
        assert self._worker is not None and isinstance(plan, StepPlan)
        self._worker.save(plan)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        plan = self._get_connector_metadata() if self.has_connector_metadata() else None
        assert self._worker is not None
        self._worker.stop(finished_req_ids)
        if isinstance(plan, StepPlan) and not plan.tokens:
            self._worker.rest()
        loaded, sent = self._worker.loaded(), self._worker.sent(finished_req_ids)
        failed = self._worker.take_failed_requests()
        return KVConnectorTransferResults(finished_sending=sent, finished_recving=loaded, failed_recving=failed)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending or None, results.finished_recving or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        assert self._worker is not None
        return self._worker.take_failed()

    def build_connector_worker_meta(self) -> WorkerNews | None:
        return self._worker.news() if self._worker is not None else None

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        return self._worker.stats() if self._worker is not None else None

    # Both

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return ForewordStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> ForewordPromMetrics:
        return ForewordPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        for side in (self._worker, self._scheduler):
            if side is not None:
                side.close()
