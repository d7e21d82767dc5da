"""The workers' side of the vLLM connector: loads and saves the blocks of one rank."""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from foreword.blocks.layout import Layout
from foreword.config import TransferConfig, parse_bytes
from foreword.errors import ModelUnsupported
from foreword.integrations.vllm.config import Facts, Settings, by_block
from foreword.integrations.vllm.events import TierWatch
from foreword.integrations.vllm.metrics import ForewordStats, StatsReader
from foreword.integrations.vllm.peers import open_tiers, peers_of
from foreword.integrations.vllm.producers import Loan
from foreword.integrations.vllm.step_messages import Load, StepPlan, WorkerAddress, WorkerNews
from foreword.integrations.vllm.transfer import PeersDoor, SchedulersDoor, address_of, for_rank
from foreword.offload.manager import OffloadManager, StoreLoad
from foreword.offload.staging import StagingArena
from foreword.store.background import set_background_cores, use_background_cores
from foreword.store.base import Store
from foreword.store.frame import HEADER_BYTES
from foreword.store.tiered import StoreTier, TieredStore
from foreword.store.urls import parse

logger = logging.getLogger(__name__)

_FEWEST_SLOTS = 16
# Steps of fewer tokens tell little of how fast vLLM computes prompts.
MEASURED_TOKENS = 64
_REST_SECONDS = 0.005
# While nothing is loaded and blocks are only kept for others; a request that comes meanwhile waits as long at most.
_LONGEST_REST = 0.025
# The label of the tier that is other instances which computed a prompt for this one.
LENDERS = "prefill"

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
        self.cache: OffloadManager | None = None
        self._loading: dict[str, StoreLoad] = {}
        self._loans: dict[str, Loan] = {}
        self._scheduler: SchedulersDoor | None = None
        self._peers: PeersDoor | None = None
        self._failed: set[int] = set()
        self._failed_requests: set[str] = set()
        self._seconds: list[float] = []
        self._stats: StatsReader | None = None
        self._watch: TierWatch | None = None
        self.step_began = 0.0
        self._seen = 0
        self._rests = 0

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """vLLM's tensors are there: open the stores. Raises ModelUnsupported for an arrangement that is not known."""
        if all(cache.device.type == "cpu" for cache in kv_caches.values()):
            set_background_cores(_cores_of_parent())
        with ThreadPoolExecutor(
            1, "foreword-open", use_background_cores
        ) as opener:  # threads that are started there inherit its cores
            opener.submit(self._open, kv_caches).result()

    def _open(self, kv_caches: dict[str, torch.Tensor]) -> None:
        from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

        rank = get_tensor_model_parallel_rank() if self._facts.ranks > 1 else 0
        tensors = by_block([kv_caches[name] for name in self._facts.layer_names])
        layout = self._facts.layout(rank)
        config = self._settings.store
        blocks = parse_bytes(config.staging) // (layout.block_bytes + HEADER_BYTES)
        staging = StagingArena(tensors, max(min(blocks, 2 * len(tensors[0])), _FEWEST_SLOTS))
        if staging.block_bytes != layout.block_bytes:
            raise ModelUnsupported(
                f"vLLM keeps {staging.block_bytes} bytes per block, but its description of the layers says {layout.block_bytes}"
            )
        travel = for_rank(self._settings.transfer or TransferConfig(), layout)
        store = open_tiers(config.urls, layout, {"peer": peers_of(travel, rank, self._facts.ranks)})
        if self._facts.events:
            self._watch = TierWatch(store, rank)
        self.cache = OffloadManager(
            store, staging, layout, lookup_timeout=config.lookup_timeout, load_timeout=config.load_timeout
        )
        self._open_doors(travel, layout, rank, tensors, store)
        self._stats = StatsReader(self.cache, rank, self._peers.leases if self._peers is not None else None)
        name = str(self._facts.config.model_config.model)
        if config.urls:
            self.cache.describe({"model": name, "fingerprint": self._facts.model.hex()})
        if self._facts.ranks == 1:
            with _workers_lock:
                _workers[self._engine] = self
        logger.info("Foreword: stores %s, %d bytes per block, %d slots", store.label, layout.block_bytes, staging.slots)

    def _open_doors(
        self, travel: TransferConfig, layout: Layout, rank: int, tensors: Sequence[torch.Tensor], store: TieredStore
    ) -> None:
        """Listen for the scheduler, if it is in another process and there is memory to ask for, and for other instances."""
        tiers = zip(self._settings.store.urls, store.tiers, strict=True)
        memory: list[Store] = [tier.store for url, tier in tiers if parse(url).scheme == "memory"]
        if memory and self._facts.apart:
            self._scheduler = SchedulersDoor(layout, memory, self._engine, rank)
        if self._settings.transfer is None:
            return
        self._peers = PeersDoor(
            travel, layout, tensors, memory, listens=self._settings.listens, lenders=_label(LENDERS, store)
        )
        if self._settings.takes_over:
            store.tiers.append(StoreTier(self._peers.lenders, writable=False))

    @property
    def address(self) -> WorkerAddress:
        """Where this worker can be reached."""
        return address_of(self._scheduler, self._peers)

    # Loading

    def load(self, loads: Iterable[Load]) -> None:
        assert self.cache is not None
        for load in loads:
            fingerprint = self.cache.layout.fingerprint
            store_load = StoreLoad([fingerprint + key for key in load.keys], math.inf)
            store_load.places, store_load.started = list(load.places), time.monotonic()
            self._loading[load.request_id] = store_load
            if load.lender is None or self._peers is None:
                self.cache.load(store_load, 0, load.blocks)
                continue
            begin = partial(self.cache.load, store_load, 0, load.blocks)
            self._loans[load.request_id] = self._peers.lenders.open(load.lender, store_load.names, begin)

    def stop(self, request_ids: Iterable[str]) -> None:
        """Requests that have ended: no block is written for them from now on. vLLM keeps their blocks until it hears so."""
        for request_id in request_ids:
            store_load = self._loading.get(request_id)
            if store_load is not None:
                store_load.close()

    def loaded(self) -> set[str]:
        """Requests whose loads have ended since this was asked last: from then on nothing is written into their blocks. What
        did not come is noted as failed."""
        ended = {name: store_load for name, store_load in self._loading.items() if store_load.done}
        for name, store_load in ended.items():
            del self._loading[name]
            loan = self._loans.pop(name, None)
            if loan is not None and self._peers is not None:
                self._peers.lenders.give_back(loan)
            count = len(store_load.close())
            self._seconds.append(time.monotonic() - store_load.started)
            if count == len(store_load.blocks):
                continue
            if self._facts.windowed:
                self._failed_requests.add(name)
            else:
                self._failed.update(store_load.blocks[count:])
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
        self._rests = 0 if self._loading else self._rests + 1
        if not any(store_load.done for store_load in self._loading.values()):
            self.cache.wait(self._seen, min(max(self._rests, 1) * _REST_SECONDS, _LONGEST_REST))
        self._seen = self.cache.changes

    # Saving

    def save(self, plan: StepPlan) -> None:
        assert self.cache is not None
        if plan.tokens:
            self._rests = 0
        if plan.tokens >= MEASURED_TOKENS:
            self.cache.prefill_rate.note(plan.tokens, time.monotonic() - self.step_began)
        for save in plan.saves:
            self.cache.save(save.keys, save.parent, save.depth, save.blocks)
        if self._peers is not None and self._peers.leases is not None:
            for lend in plan.lends:
                self._peers.leases.lend(lend)

    # Handing over

    def withdraw(self, plan: StepPlan) -> None:
        """Before a step writes into any block: what others may not read any more."""
        if self._peers is None:
            return
        if self._peers.leases is not None:
            for withdrawn in plan.withdrawn:
                self._peers.leases.withdraw(withdrawn)
        for lender in plan.forsaken:
            self._peers.lenders.forsake(lender)

    def sent(self, ended: Iterable[str]) -> set[str]:
        """Requests whose blocks nobody reads any more. `ended`: those that vLLM has ended since this was asked last."""
        leases = self._peers.leases if self._peers is not None else None
        if leases is None:
            return set()
        leases.finished(ended)
        return leases.collect()

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
        for door in (self._scheduler, self._peers):
            if door is not None:
                door.close()
        if self.cache is not None:
            with _workers_lock:
                _workers.pop(self._engine, None)
            self.cache.close(self._settings.store.flush_seconds)


def _cores_of_parent() -> set[int]:
    """Where the process may run that started this one, as vLLM's engine starts its workers; none if this is no such process.

    On CPUs vLLM binds each thread of a worker that computes to a core, the worker's first thread among them.
    """
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None or sys.platform != "linux":
        return set()
    try:
        return os.sched_getaffinity(parent.pid) | os.sched_getaffinity(0)
    except OSError:
        return set()


def _label(word: str, store: TieredStore) -> str:
    """The word, or one like it that no tier has as its label."""
    taken = {tier.label for tier in store.tiers}
    return next(one for one in (word, *(f"{word}-{n}" for n in range(2, len(taken) + 3))) if one not in taken)
