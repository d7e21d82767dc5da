"""The worker side of the vLLM connector: loads and saves the blocks of one rank."""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import transformers
import vllm

from foreword import __version__
from foreword.blocks.layout import Layout, block_names
from foreword.errors import ModelUnsupported
from foreword.integrations.vllm.connector_config import ConnectorSettings, KVCacheInfo
from foreword.integrations.vllm.connector_extras import (
    loaded_adapters,
    opened_by,
    retire,
    tier_watch,
    transfer_extra,
)
from foreword.integrations.vllm.connector_metrics import REPORT_SECONDS, ForewordStats, StatsReader
from foreword.integrations.vllm.kv_probe import measure, resolved_attributes, rotary_embeddings, weight_attributes
from foreword.integrations.vllm.kv_views import block_views
from foreword.integrations.vllm.late_saves import LateSaves
from foreword.integrations.vllm.namespace import (
    Observations,
    ProbeSample,
    announce,
    announced,
    choose,
    engine_of,
    layout_words,
    note_unmeasured,
)
from foreword.integrations.vllm.rank_stores import open_tiers
from foreword.integrations.vllm.step_messages import (
    BlockLoad,
    BlockSave,
    ForewordConnectorMetadata,
    ForewordWorkerMetadata,
    WorkerHandshake,
)
from foreword.integrations.vllm.weight_changes import follow_loads
from foreword.offload.device import follow_stream
from foreword.offload.frame_copies import PlaneGroup
from foreword.offload.load import StoreLoad
from foreword.offload.manager import OffloadManager
from foreword.offload.staging import StagingArena
from foreword.store.background import set_background_cores, use_background_cores
from foreword.store.base import Store
from foreword.store.frame import HEADER_BYTES
from foreword.store.tier import StoreTier
from foreword.store.tiered import TieredStore
from foreword.store.types import Reach
from foreword.store.urls import parse

if TYPE_CHECKING:
    from foreword.integrations.vllm_extras.interfaces import ChangeWatch, Endpoint, InstanceEndpoint, InstanceLeases

logger = logging.getLogger(__name__)

_MIN_SLOTS = 16
# Smaller steps say little about vLLM's prefill throughput.
MEASURED_TOKENS = 64
_WAIT_SECONDS = 0.005
# How long vLLM keeps the blocks of a request that has ended, for saves that wait for room.
_KEEP_SECONDS = 10.0
# The longest wait, while blocks are only kept for other instances. A new request waits as long, at most.
_MAX_WAIT_SECONDS = 0.025
# Label of the tier that reads from KV producers, in metrics.
PRODUCERS_LABEL = "prefill"


def _tier_in_words(tier: StoreTier) -> str:
    budget = tier.store.status().budget
    return f"{tier.label} ({budget / 2**30:.1f} GiB)" if budget else tier.label


# The worker sides of this process by engine and stores, for a scheduler side in the same process. Each use is one call of a
# dictionary with keys of text, which is atomic, also without the interpreter's lock.
_workers: dict[str, ForewordConnectorWorker] = {}


def worker_of(engine: str) -> ForewordConnectorWorker | None:
    """The worker side of a single-rank engine, if it is in this process."""
    return _workers.get(engine)


class ForewordConnectorWorker:
    """See the module. Called from the worker's thread only. Loads and saves run on the threads of `OffloadManager`."""

    def __init__(self, info: KVCacheInfo, settings: ConnectorSettings, engine: str) -> None:
        self._info = info
        self._settings = settings
        self._engine = engine
        self.offload: OffloadManager | None = None
        self.reports = info.separate or info.events  # whether the scheduler's side has to hear of the tiers
        self._memory_tiers: list[Store] = []
        self._saves: list[bool] = []
        self._loading: dict[str, StoreLoad] = {}
        self._lease_readers: dict[str, Any] = {}
        self._lookups: Endpoint | None = None
        self._instances: InstanceEndpoint | None = None
        self._failed_blocks: set[int] = set()
        self._failed_requests: set[str] = set()
        self._finished: dict[str, float] = {}  # requests whose blocks vLLM keeps for saves, and until when
        self._late: LateSaves | None = None
        self._late_reported: frozenset[str] = frozenset()
        self._refused: list[BlockLoad] = []
        self._adapters = loaded_adapters(info.config)
        self._load_seconds: list[float] = []
        self._stats: StatsReader | None = None
        self._changes: ChangeWatch | None = None
        self._addresses: Callable[[], list[int]] = list
        self._registered: list[int] = []
        self._model: Any = None
        self._mapped = True
        self._step_started = 0.0
        self._seen = 0
        self._waits = 0
        self._rank = 0
        self._rates: tuple[float, ...] = ()  # as the scheduler's side knows them
        self._rates_due = 0.0
        self._tensors: list[list[torch.Tensor]] = []
        self._staging: StagingArena | None = None

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """Prepare copies of vLLM's KV cache. Raises ModelUnsupported for an unknown layout."""
        from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

        if _device_of(kv_caches) == "cpu":
            set_background_cores(_cores_of_parent())
        self._addresses = partial(_addresses_of, kv_caches)
        self._registered = self._addresses()
        info, config = self._info, self._settings.store
        self._rank = get_tensor_model_parallel_rank() if info.ranks > 1 else 0
        self._tensors = tensors = [block_views(kv_caches, one.layer_names, info.num_blocks) for one in info.groups]
        units = info.units(self._rank)
        longest = max(_block_bytes(views) for views in tensors)
        most = max(one.block_units for one in units)
        frames = 2 * info.num_blocks * most
        frame = longest // min(one.block_units for one in units) + HEADER_BYTES
        # Half of them are for saves: room for two blocks, as a block is queued whole.
        slots = max(min(config.staging_bytes(_device_of(kv_caches)) // frame, frames), _MIN_SLOTS, 4 * most)
        staged: Sequence[Sequence[torch.Tensor] | PlaneGroup] = tensors
        if self._settings.units is not None:
            pairs = zip(info.groups, units, strict=True)
            staged = [self._settings.units.staged(kv_caches, info.config, *pair) for pair in pairs]
        self._staging = staging = StagingArena(staged, slots)
        for size, divided, one in zip(staging.block_bytes, units, info.groups, strict=True):
            expected = divided.layouts[0].block_bytes
            if size != expected and not one.uneven:
                raise ModelUnsupported(
                    f"vLLM's blocks of {one.layer_names[0]} have {size} bytes, but its description of the layers says "
                    f"{expected}"
                )
        if info.ranks == 1:
            _workers[self._engine] = self

    def open(self, vllm_worker: Any | None, *, announced: bool = False) -> bytes:
        """Find out the namespace, and open the stores. Returns the namespace, also when it is called again.

        All ranks call it together. Without vLLM's worker nothing is measured (`kv_probe.py`). `announced`: no handshake may
        tell the scheduler the namespace, so the stores do.
        """
        if vllm_worker is not None:
            self._model = vllm_worker.model_runner.get_model()
            follow_loads(self._model)
        if self.offload is None:
            started, info = time.monotonic(), self._info
            announced = announced and info.separate
            found = self._namespace(vllm_worker)
            info.settle(
                b"" if announced and not any(parse(url).persistent for url in self._settings.store.urls) else found
            )
            if announced and not self._rank:
                with persistent_tiers(self._settings) as store:
                    announce(store, info.base, info.settings, info.model, engine_of(info.config))
            # Threads that are started on this thread inherit its cores.
            with ThreadPoolExecutor(1, "foreword-open", use_background_cores) as pool:
                pool.submit(self._open, started).result()
        return self._info.model

    def tell_of_changes(self, told: Callable[[], object]) -> None:
        """Call `told`, a bound method, before the model of this process loads other weights."""
        follow_loads(self._model, told)

    def _namespace(self, vllm_worker: Any | None) -> bytes:
        """b"" where the scheduler is in another process that cannot be told: it and the ranks then have one in common."""
        from vllm.distributed.parallel_state import get_tp_group

        info, staging = self._info, self._staging
        assert staging is not None
        if vllm_worker is None:
            self._warn_unmeasured("vLLM has not asked the connector before the first request: report this")
            return b"" if info.separate else self._unmeasured()
        follow_stream(staging.device)
        found = measure(vllm_worker, info, staging, info.units(self._rank))
        measured, why = found.samples, found.why
        if info.ranks > 1:
            every: list[dict[str, ProbeSample]] = [{} for _ in range(info.ranks)]
            torch.distributed.all_gather_object(every, measured, group=get_tp_group().cpu_group)
            measured = {name: one for rank in every for name, one in rank.items()} if all(every) else {}
        namespace = b""
        if self._rank == 0 and measured:
            namespace = self._chosen(vllm_worker, measured, found.behind)
        elif self._rank == 0:
            self._warn_unmeasured(why or "another rank could not compute the probe")
            namespace = self._unmeasured()
        return bytes(get_tp_group().broadcast_object(namespace, src=0)) if info.ranks > 1 else namespace

    def _warn_unmeasured(self, why: str) -> None:
        if self._rank:
            return
        info = self._info
        shared = (
            "trust_unmeasured is set, so it is shared with servers whose settings look the same"
            if info.trusts
            else "so it is shared with no other process, and not found after a restart"
        )
        logger.warning("Foreword: this server's KV cannot be measured: %s; %s", why, shared)

    def _unmeasured(self) -> bytes:
        """The namespace of a server that could not measure: no other process's, unless its operator trusts its settings."""
        info = self._info
        namespace, engine = (info.trusted(), "") if info.trusts else (os.urandom(32), engine_of(info.config))
        with persistent_tiers(self._settings) as store:
            note_unmeasured(store, info.base, info.settings, namespace, engine)
        return namespace

    def _chosen(self, vllm_worker: Any, measured: Mapping[str, ProbeSample], behind: Collection[str]) -> bytes:
        """The namespace that the records in the stores give to what was measured. `behind`: see `ProbeOutcome`."""
        info = self._info
        config, model = info.config.model_config, vllm_worker.model_runner.get_model()
        rotary = rotary_embeddings(model, int(config.max_model_len), config.dtype)
        resolved = resolved_attributes(model, info.config)
        resolved |= weight_attributes(info.config, info.fingerprint, model, behind)
        versions = f"vLLM {vllm.__version__} with Transformers {transformers.__version__}"
        layouts = [one for rank in range(info.ranks) for units in info.units(rank) for one in units.layouts]
        seen = Observations(versions, info.settings, resolved, {**measured, **rotary}, layout_words(layouts))
        with persistent_tiers(self._settings) as store:
            return choose(store, info.base, seen, layouts)

    def _open(self, started: float) -> None:
        info, config, tensors = self._info, self._settings.store, self._tensors
        rank, staging = self._rank, self._staging
        assert staging is not None
        layouts, units = info.layouts(rank), info.units(rank)
        longest = max(_block_bytes(views) for views in tensors)
        frames_of = [layout for one in units for layout in one.layouts]
        openers = {Reach.INSTANCE: opened_by(lambda extra: extra.peers_of_rank(self._settings, layouts, longest))}
        store = open_tiers(config.urls, self._settings.keys(), frames_of, openers, staging.device.type)
        store.warm_up(one.layouts[0].fingerprint for one in units[:1])
        if info.events:
            self._changes = tier_watch(store, units)
        self.offload = OffloadManager(
            store,
            staging,
            units,
            lookup_timeout=config.lookup_timeout,
            load_timeout=config.load_timeout,
            direct=config.direct,
        )
        self._late = LateSaves(self._save, self.offload.await_room, self.offload.note_dropped)
        self._memory_tiers = [
            tier.store for url, tier in zip(config.urls, store.tiers, strict=True) if parse(url).reach is Reach.PROCESS
        ]
        self._saves = [one.writes or bool(self._memory_tiers) for one in units]
        self._listen(layouts, tensors, store)
        leases = self._instances.leases if self._instances is not None else None
        self._stats = StatsReader(
            f"worker {rank}", store, self.offload.lookups, self.offload.costs, self.offload, leases
        )
        if config.urls:
            name = str(info.config.model_config.model)
            self.offload.describe(name, info.model, [one.group for one in info.groups], info.key_size)
        logger.info(
            "Foreword %s: namespace %s, found and opened in %.2f s; tiers %s; %s",
            __version__,
            info.model.hex()[:12],
            time.monotonic() - started,
            ", ".join(map(_tier_in_words, store.tiers)) or "none",
            "; ".join(
                f"{one.group.kind} blocks of {layout.block_bytes} bytes, layout {divided.layouts[0].fingerprint.hex()[:12]}"
                f"{f' ({divided.block_units} units)' if divided.block_units > 1 else ''}"
                for one, layout, divided in zip(info.groups, layouts, units, strict=True)
            ),
        )

    def _listen(
        self,
        layouts: Sequence[Layout],
        tensors: Sequence[Sequence[torch.Tensor]],
        store: TieredStore,
    ) -> None:
        """Listen for lookups of a scheduler in another process, if there is a memory tier, and for other instances."""
        memory = self._memory_tiers
        if memory and self._info.separate:
            assert self.offload is not None
            found = [layout for one in self.offload.units for layout in one.layouts]
            # It names a folder: without the stores, whose URLs may have passwords.
            engine = self._engine.partition(" ")[0]
            self._lookups = transfer_extra().workers_memory(found, memory, engine, layouts[0].shard[0])
        if self._settings.transfer is None:
            return
        label = _unused_label(PRODUCERS_LABEL, store)
        self._instances = transfer_extra().instances(
            self._settings, layouts, tensors, memory, producers=label, num_blocks=self._info.num_blocks
        )
        if self._settings.consumes:
            store.tiers.append(StoreTier(self._instances.producers, writable=False))

    @property
    def handshake(self) -> WorkerHandshake:
        """Where this worker listens."""
        memory = self._lookups.address if self._lookups is not None else ""
        peers = self._instances.address if self._instances is not None else ""
        return WorkerHandshake(memory, peers, self._info.model)

    # Sleep

    def unregister_kv_caches(self) -> None:
        """vLLM is about to take the memory from under its KV cache. Once this returns, no thread reads or writes there, until
        `restore_kv_caches`. Loads count as failed, also those that vLLM has not yet heard of: their blocks are lost."""
        self._mapped = False
        if self._late is not None:
            self._late.drop(self._late.requests())
        self._discard(self._loading.values())
        if self._leases is not None:
            self._leases.drop_held()

    def restore_kv_caches(self) -> None:
        """The KV cache has memory again, with any contents. vLLM maps it to the same addresses; if it ever does not, nothing is
        saved or loaded until a restart."""
        self._mapped = self._addresses() == self._registered
        if not self._mapped:
            logger.error(
                "Foreword: vLLM's KV cache is at other addresses after sleep mode. It saves and loads nothing until this "
                "server restarts"
            )

    # Loading

    def start_loads(self, loads: Iterable[BlockLoad]) -> None:
        assert self.offload is not None
        for load in loads:
            if not self._mapped or not self._adapters.may_load(load.adapter):
                self._refused.append(load)
                continue
            store_load = self.offload.hand_over(load.root, load.parts, load.position - load.held)
            self._loading[load.request_id] = store_load
            start = partial(self.offload.start, store_load)
            if load.producer is None or self._instances is None:
                start()
            else:
                reader = self._instances.producers.open(load.producer, store_load.names, start)
                self._lease_readers[load.request_id] = reader

    def refuse(self, loads: Iterable[BlockLoad]) -> None:
        """Report that these have failed, without loading."""
        self._refused.extend(loads)

    def drop_loads(self) -> None:
        """End all loads: nothing is written into their blocks any more, and none counts as loaded."""
        loads, self._loading, self._refused = self._loading, {}, []
        if self._late is not None:
            self._late.drop(self._late.requests())
        self._discard(loads.values())

    def _discard(self, loads: Collection[StoreLoad]) -> None:
        """End loads whose blocks are not the connector's any more when this returns. It waits for copies that have begun."""
        for load in loads:
            load.discard()
        if loads and self.offload is not None:
            self.offload.drain(loads)

    def end_loads(self, request_ids: Iterable[str]) -> set[str]:
        """End the loads of these requests now, as failed, and their saves. Returns the requests that had one, or whose blocks
        vLLM keeps, whose end was not reported yet: it is not reported any more. On return their blocks are not used."""
        names = set(request_ids)
        if self._late is not None:
            self._late.drop(names)
        kept = names & self._finished.keys()
        for request_id in kept:
            del self._finished[request_id]
        ended = kept | {load.request_id for load in self._refused if load.request_id in names}
        self._refused = [load for load in self._refused if load.request_id not in names]
        loads = {request_id: self._loading.pop(request_id) for request_id in names & self._loading.keys()}
        self._discard(loads.values())
        for request_id in loads:
            reader = self._lease_readers.pop(request_id, None)
            if reader is not None and self._instances is not None:
                self._instances.producers.close_reader(reader)
            ended.add(request_id)
        return ended

    def stop_loads(self, request_ids: Iterable[str]) -> None:
        """Finished requests: no copy into their blocks begins any more. vLLM keeps the blocks until `take_received` has the
        request, when those that have begun are done: this thread does not wait for them."""
        for request_id in request_ids:
            load = self._loading.get(request_id)
            if load is not None:
                load.close()

    def take_received(self) -> set[str]:
        """Requests whose loads have ended since the last call: nothing is written into their blocks any more."""
        assert self.offload is not None
        ended = {request_id: load for request_id, load in self._loading.items() if load.done}
        for request_id, load in ended.items():
            del self._loading[request_id]
            reader = self._lease_readers.pop(request_id, None)
            if reader is not None and self._instances is not None:
                self._instances.producers.close_reader(reader)
            count = len(load.close())
            self._load_seconds.append(time.monotonic() - load.started)
            if count == len(load.blocks):
                continue
            if self._info.divisible:
                size = self.offload.units[0].block_units
                self._failed_blocks.update(unit // size for unit in load.blocks[count:])
            else:
                self._failed_requests.add(request_id)
        return set(ended) | self._take_refused()

    def _take_refused(self) -> set[str]:
        """Requests for which nothing may be loaded: as if all their blocks were missing."""
        assert self.offload is not None
        refused, self._refused = self._refused, []
        self.offload.note_refused(len(refused))
        for load in refused:
            if self._info.divisible:
                self._failed_blocks.update(block for part in load.parts for block in part.blocks)
            else:
                self._failed_requests.add(load.request_id)
        return {load.request_id for load in refused}

    @property
    def has_results(self) -> bool:
        """Whether a load or a lease may have ended, or a request's last blocks are saved."""
        if self._loading or self._refused or self._finished or self._failed_requests or self._failed_blocks:
            return True
        return self._instances is not None

    def take_failed_blocks(self) -> set[int]:
        """Blocks that were not loaded."""
        if not self._failed_blocks:
            return set()
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_failed_requests(self) -> set[str]:
        """Received requests whose blocks were not all loaded, and that must be recomputed as a whole."""
        failed, self._failed_requests = self._failed_requests, set()
        return failed

    def wait(self) -> None:
        """Wait for a load. A step without tokens ends at once and vLLM runs the next, which would take the processor and the
        interpreter from the loading threads."""
        assert self.offload is not None
        self._waits = 0 if self._loading else self._waits + 1
        if not any(load.done for load in self._loading.values()):
            self.offload.wait(self._seen, min(max(self._waits, 1) * _WAIT_SECONDS, _MAX_WAIT_SECONDS))
        self._seen = self.offload.changes

    # Saving

    def save(self, metadata: ForewordConnectorMetadata) -> None:
        """Save and lease the blocks that the step has filled."""
        assert self.offload is not None
        if metadata.prefills:
            self.offload.prefill_rate.note(metadata.tokens, time.monotonic() - self._step_started)
        if metadata.idle:
            return
        self.save_blocks(metadata.saves)
        self._finished.update(dict.fromkeys(metadata.finished, time.monotonic() + _KEEP_SECONDS))
        if metadata.deletes:
            layouts = [one.layouts[0].fingerprint for one in self.offload.units]
            named = [name for group, root, key in metadata.deletes for name in block_names(layouts[group], root, [key])]
            self.offload.delete([key for _, _, key in metadata.deletes], lambda: named)
        if metadata.retired:
            # First: a save cancels the deletion of its blocks, and these have waited since before it was asked for.
            if self._late is not None:
                self._late.retire(self._finished, {key for one in metadata.retired if one.drop for key in one.keys})
            retire(self.offload, self._info, metadata.retired)
        if self._leases is not None:
            for lease in metadata.leases:
                if all(map(self._may_save, (*lease.held, *lease.copied))):
                    self._leases.add(lease)

    def save_blocks(self, saves: Iterable[BlockSave]) -> None:
        """Copy computed blocks, and queue them for the stores. On return vLLM may give them to other requests."""
        assert self.offload is not None and self._late is not None
        wanted = [save for save in saves if self._saves[save.group] and self._may_save(save)]
        with self._late.lock, self.offload.saving():
            self._late.add([save for save in wanted if save.request_id])
            for save in wanted:
                if not save.request_id:
                    self.offload.note_dropped(len(save.blocks) - self._save(save))

    def _save(self, save: BlockSave) -> int:
        """Save blocks. Returns for how many of the first there was room."""
        assert self.offload is not None
        where = save.depth, save.blocks, save.group
        return self.offload.save(save.root, save.keys, save.parent, *where, prompt=save.prompt, again=save.again)

    def is_late(self, request_id: str) -> bool:
        """Whether blocks of a request wait for room in the write queue."""
        return self._late is not None and self._late.has(request_id)

    def drop_late(self, request_ids: Iterable[str]) -> None:
        """vLLM takes back the blocks of these requests."""
        if self._late is not None:
            self._late.drop(request_ids)

    def _may_save(self, save: BlockSave) -> bool:
        return self._mapped and self._adapters.may_save(save.adapter)

    # Hand-off

    @property
    def _leases(self) -> InstanceLeases | None:
        return self._instances.leases if self._instances is not None else None

    def begin_step(self, metadata: ForewordConnectorMetadata) -> None:
        """Before a step overwrites blocks: end the leases that it says, here and at producers. Copies follow its stream."""
        if metadata.tokens:
            self._waits = 0
        if metadata.prefills:
            self._step_started = time.monotonic()
        if metadata.idle:
            return
        if metadata.ended:
            self.drop_late(metadata.ended)
        if self._staging is not None and self._staging.queues is not None:
            follow_stream(self._staging.device)
        if self._leases is not None:
            for revoked in metadata.revoked:
                self._leases.revoke(revoked)
        if self._instances is not None:
            for producer in metadata.released:
                self._instances.producers.release(producer)

    def take_sent(self, finished: Iterable[str]) -> set[str]:
        """Requests whose leases have ended, or whose last blocks are saved. `finished`: those that vLLM has finished since the
        last call."""
        now = time.monotonic()
        sent = {name for name, until in self._finished.items() if now >= until or not self.is_late(name)}
        if sent:
            self.drop_late(sent)
        for name in sent:
            del self._finished[name]
        if self._leases is not None:
            self._leases.finished(finished)
            sent |= self._leases.take_ended()
        return sent

    # Reports

    def take_stats(self, *, at_once: bool = False) -> ForewordStats | None:
        """Statistics since the last report; None if nothing has changed, or, unless `at_once`, if it is too early."""
        stats = self._stats
        if stats is None or not (at_once or stats.due):
            return None
        seconds, self._load_seconds = self._load_seconds, []
        return stats.read(seconds)

    @property
    def stats_due(self) -> float:
        """When the statistics are to be read again."""
        return self._stats.due_at if self._stats is not None else 0.0

    def take_changes(self) -> ForewordWorkerMetadata | None:
        """Changes in the tiers since the last call, and how fast they are read if the scheduler is in another process; None if
        there is nothing new."""
        changes = self._changes.take() if self._changes is not None else []
        rates = self._rates
        if self._info.separate and self.offload is not None and time.monotonic() >= self._rates_due:
            rates, self._rates_due = tuple(self.offload.read_rates()), time.monotonic() + REPORT_SECONDS
        late = self._late_changes()
        if rates == self._rates:
            return ForewordWorkerMetadata(changes, late=late) if changes or late else None
        self._rates = rates
        return ForewordWorkerMetadata(changes, {self._rank: rates}, late=late)

    def _late_changes(self) -> dict[int, frozenset[str]]:
        """For a scheduler in another process, the requests whose blocks wait for room, if they are others than before."""
        late = self._late.requests() if self._info.separate and self._late is not None else frozenset()
        if late == self._late_reported:
            return {}
        self._late_reported = late
        return {self._rank: late}

    @property
    def has_changes(self) -> bool:
        """Whether there are changes or statistics to report, or will be once the write queue is empty."""
        changes, stats = self._changes, self._stats
        return changes is not None and stats is not None and (changes.pending or stats.behind)

    def close(self) -> None:
        for endpoint in (self._lookups, self._instances):
            if endpoint is not None:
                endpoint.close()
        _workers.pop(self._engine, None)  # also if its stores did not open
        if self.offload is not None:
            if self._late is not None:
                self._late.close(self._settings.store.flush_seconds)
            self.offload.close(self._settings.store.flush_seconds)


@contextmanager
def persistent_tiers(settings: ConnectorSettings) -> Iterator[TieredStore]:
    """The stores that outlive a process."""
    urls = [url for url in settings.store.urls if parse(url).persistent]
    store = open_tiers(urls, settings.keys(), (), {})
    try:
        yield store
    finally:
        store.close()


def told_by_stores(info: KVCacheInfo, settings: ConnectorSettings) -> bytes:
    """The namespace that the ranks, in other processes, have announced to this scheduler; b"" if they have not."""
    with persistent_tiers(settings) as store:
        return announced(store, info.base, info.settings, engine_of(info.config))


def _block_bytes(views: Sequence[torch.Tensor]) -> int:
    return sum(view[0].numel() * view.element_size() for view in views)


def _addresses_of(kv_caches: Mapping[str, Any]) -> list[int]:
    """Where the tensors of the KV cache are."""
    parts = (one if isinstance(one, list | tuple) else [one] for one in kv_caches.values())
    return [int(tensor.data_ptr()) for some in parts for tensor in some]


def _device_of(kv_caches: Mapping[str, Any]) -> str:
    """The kind of device that the KV cache is on."""
    first = next(iter(kv_caches.values()), None)
    tensor = first[0] if isinstance(first, list | tuple) else first
    return "none" if tensor is None else str(tensor.device.type)


def _cores_of_parent() -> set[int]:
    """The cores of the process that started this one, which is vLLM's engine for its workers; none if it was not started so.

    On CPUs vLLM binds each computing thread of a worker to a core, among them the worker's main thread.
    """
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None or sys.platform != "linux":
        return set()
    try:
        return os.sched_getaffinity(parent.pid) | os.sched_getaffinity(0)
    except OSError:
        return set()


def _unused_label(label: str, store: TieredStore) -> str:
    """The label, or the label with a number if a tier has it already."""
    taken = {tier.label for tier in store.tiers}
    candidates = (label, *(f"{label}-{n}" for n in range(2, len(taken) + 3)))
    return next(one for one in candidates if one not in taken)
