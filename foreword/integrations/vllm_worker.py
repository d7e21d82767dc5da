"""The workers' side of the vLLM connector: loads and saves the blocks of one rank."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterable

import torch

from foreword.cache import BlockCache, Ticket
from foreword.config import parse_bytes
from foreword.errors import ConfigError, ModelUnsupported
from foreword.integrations.vllm_events import TierWatch
from foreword.integrations.vllm_facts import Facts, Settings, by_block
from foreword.integrations.vllm_metrics import ForewordStats, StatsReader
from foreword.integrations.vllm_plan import Load, StepPlan, WorkerNews
from foreword.paged import Staging
from foreword.store.frame import HEADER_BYTES
from foreword.store.urls import open_store

logger = logging.getLogger(__name__)

_FEWEST_SLOTS = 16
_MEASURED_TOKENS = 64
_REST_SECONDS = 0.005

# One process may hold a scheduler's side and a worker's side of the same engine.
_workers: dict[str, WorkerSide] = {}
_workers_lock = threading.Lock()


def worker_of(engine: str) -> WorkerSide | None:
    """The only rank's worker of this engine, if it is in this process."""
    with _workers_lock:
        return _workers.get(engine)


class WorkerSide:
    """Loads and saves the blocks of one rank. Called from the worker's thread only; the cache's threads do the waiting."""

    def __init__(self, facts: Facts, settings: Settings, engine: str) -> None:
        self._facts = facts
        self._settings = settings
        self._engine = engine
        self.cache: BlockCache | None = None
        self._loading: dict[str, Ticket] = {}
        self._failed: set[int] = set()
        self._failed_requests: set[str] = set()
        self._seconds: list[float] = []
        self._stats: StatsReader | None = None
        self._watch: TierWatch | None = None
        self.step_began = 0.0
        self._seen = 0

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """vLLM's tensors are there: open the stores. Raises ModelUnsupported for an arrangement that is not known."""
        from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

        rank = get_tensor_model_parallel_rank() if self._facts.ranks > 1 else 0
        tensors = by_block([kv_caches[name] for name in self._facts.layer_names])
        layout = self._facts.layout(rank)
        config = self._settings.store
        if self._facts.ranks > 1 and any(url.startswith("memory:") for url in config.urls):
            raise ConfigError("memory:// is not for several ranks; use disk:///dev/shm/foreword?size=8GiB")
        blocks = parse_bytes(config.staging) // (layout.block_bytes + HEADER_BYTES)
        staging = Staging(tensors, max(min(blocks, 2 * len(tensors[0])), _FEWEST_SLOTS))
        if staging.block_bytes != layout.block_bytes:
            raise ModelUnsupported(
                f"vLLM keeps {staging.block_bytes} bytes per block, but its description of the layers says {layout.block_bytes}"
            )
        store = open_store(config.urls, layout)
        if self._facts.events:
            self._watch = TierWatch(store, rank)
        self.cache = BlockCache(
            store, staging, layout, lookup_timeout=config.lookup_timeout, load_timeout=config.load_timeout
        )
        self._stats = StatsReader(self.cache, rank)
        name = str(self._facts.config.model_config.model)
        self.cache.describe({"model": name, "fingerprint": self._facts.model.hex()})
        if self._facts.ranks == 1:
            with _workers_lock:
                _workers[self._engine] = self
        logger.info("Foreword: stores %s, %d bytes per block, %d slots", store.label, layout.block_bytes, staging.slots)

    # Loading

    def load(self, loads: Iterable[Load]) -> None:
        assert self.cache is not None
        for load in loads:
            fingerprint = self.cache.layout.fingerprint
            ticket = Ticket([fingerprint + key for key in load.keys], math.inf)
            ticket.places = list(load.places)
            self._loading[load.request_id] = ticket
            self.cache.load(ticket, 0, load.blocks)

    def stop(self, request_ids: Iterable[str]) -> None:
        """Requests that have ended: no block is written for them from now on. vLLM keeps their blocks until it hears so."""
        for request_id in request_ids:
            ticket = self._loading.get(request_id)
            if ticket is not None:
                ticket.close()

    def loaded(self) -> set[str]:
        """Requests whose loads have ended since this was asked last: from then on nothing is written into their blocks. What
        did not come is noted as failed."""
        ended = {name: ticket for name, ticket in self._loading.items() if ticket.done}
        for name, ticket in ended.items():
            del self._loading[name]
            count = len(ticket.close())
            self._seconds.append(time.monotonic() - ticket.started)
            if count == len(ticket.blocks):
                continue
            if self._facts.windowed:
                self._failed_requests.add(name)
            else:
                self._failed.update(ticket.blocks[count:])
        return set(ended)

    def take_failed(self) -> set[int]:
        """Blocks that did not come."""
        failed, self._failed = self._failed, set()
        return failed

    def take_failed_requests(self) -> set[str]:
        """Requests, of those that `loaded` named, whose loads brought less than all."""
        failed, self._failed_requests = self._failed_requests, set()
        return failed

    def rest(self) -> None:
        """vLLM has nothing to compute and would ask again at once, without end: the threads that load need the processor, and
        the interpreter, more than it does."""
        assert self.cache is not None
        if not any(ticket.done for ticket in self._loading.values()):
            self.cache.wait(self._seen, _REST_SECONDS)
        self._seen = self.cache.changes

    # Saving

    def save(self, plan: StepPlan) -> None:
        assert self.cache is not None
        if plan.tokens >= _MEASURED_TOKENS:
            self.cache.prefill_seconds.note(plan.tokens, time.monotonic() - self.step_began)
        for save in plan.saves:
            self.cache.save(save.keys, save.parent, save.depth, save.blocks)

    # Telling

    def stats(self) -> ForewordStats | None:
        """What happened since this was asked last; None for nothing."""
        if self._stats is None:
            return None
        seconds, self._seconds = self._seconds, []
        return self._stats.read(seconds)

    def news(self) -> WorkerNews | None:
        """What changed in the tiers since this was asked last; None for nothing."""
        changes = self._watch.take() if self._watch is not None else []
        return WorkerNews(changes) if changes else None

    @property
    def has_news(self) -> bool:
        """Whether `news` or `stats` have something to tell, or will once the queue is written."""
        watch, stats = self._watch, self._stats
        return watch is not None and stats is not None and (watch.pending or stats.behind)

    def close(self) -> None:
        if self.cache is not None:
            with _workers_lock:
                _workers.pop(self._engine, None)
            self.cache.close(self._settings.store.flush_seconds)
