"""Foreword's stores under vLLM: a KV connector that vLLM loads by name.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "ForewordConnector",
        "kv_connector_module_path": "foreword.integrations.vllm", "kv_role": "kv_both",
        "kv_connector_extra_config": {"store": ["memory://?size=8GiB", "disk:///var/cache/foreword?size=200GiB"]}}'

vLLM makes one connector in its scheduler and one in each worker. The scheduler's searches the stores for what vLLM does not
have, plans loads and saves, and sends them along with each step; the worker's carries them out on the blocks of its own rank.
Where both live in one process, which is so with a single rank, they share one `BlockCache`.

Keys are Foreword's own, made of token ids, so they agree across processes and versions. What a block's bytes mean is vLLM's
business: shape, packing for the instruction set, backend and version are in the layout, so a block never lands in a layout
that it was not made for. Written for vLLM 0.31 and later; it depends on `kv_connector/v1/base.py` only.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from foreword.blocks.keys import Scope, TokenChain
from foreword.blocks.layout import FINGERPRINT_BYTES, LayerLayout, Layout
from foreword.cache import BlockCache, Ticket
from foreword.config import StoreConfig, build, parse_bytes
from foreword.errors import ConfigError, ModelUnsupported, did_you_mean
from foreword.integrations.vllm_weights import fingerprint_folder, model_folder
from foreword.paged import Staging
from foreword.store.frame import HEADER_BYTES
from foreword.store.tiered import TieredStore
from foreword.store.urls import loss_of, open_store

logger = logging.getLogger(__name__)

_FEWEST_SLOTS = 16
_MEASURED_TOKENS = 64
_REST_SECONDS = 0.005
_SALT = b"vllm\x00"


@dataclass(frozen=True, slots=True)
class Settings:
    """`kv_connector_extra_config`. `fingerprint`: 32 hexadecimal digits that say what the weights are, where they are not in
    a folder of safetensors files."""

    store: StoreConfig
    fingerprint: str | None = None

    @classmethod
    def read(cls, extra: dict[str, Any]) -> Settings:
        """Raises ConfigError for an unknown key or a bad value."""
        given = dict(extra)
        urls = given.pop("store", ())
        fingerprint = given.pop("fingerprint", None)
        known = ("store", "fingerprint", "staging", "lookup_timeout", "load_timeout", "flush_seconds")
        for key in given:
            if key not in known:
                raise ConfigError(f"unknown key {key!r} in kv_connector_extra_config{did_you_mean(key, known)}")
        store = build(StoreConfig, "store", {"urls": [urls] if isinstance(urls, str) else list(urls), **given})
        if not store.urls:
            raise ConfigError('give stores in kv_connector_extra_config: {"store": ["disk:///var/cache/foreword"]}')
        return cls(store, fingerprint)


@dataclass(frozen=True, slots=True)
class Load:
    """Blocks of one request to be loaded: `names` without the rank's layout fingerprint, that is keys, and their targets."""

    request_id: str
    keys: tuple[bytes, ...]
    places: tuple[int, ...]
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Save:
    """Blocks that this step fills: keys, the key before them, their depth in the chain, and where they are."""

    keys: tuple[bytes, ...]
    parent: bytes
    depth: int
    blocks: tuple[int, ...]


@dataclass(slots=True)
class StepPlan(KVConnectorMetadata):  # type: ignore[misc]
    """What the scheduler's side asks of the workers' in one step."""

    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    tokens: int = 0


@dataclass(slots=True)
class _Tracked:
    """One request as the scheduler's side knows it.

    `held`: blocks that vLLM had itself when it last asked; `saved`: blocks from the first on that need not be saved.
    """

    request: Any
    chain: TokenChain
    ticket: Ticket | None = None
    searched_from: int = 0
    held: int = 0
    saved: int = 0
    tiers: dict[str, int] = field(default_factory=dict)


class Facts:
    """What both sides must know of vLLM's configuration. Raises ModelUnsupported for what cannot be cached right."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, settings: Settings) -> None:
        groups = kv_cache_config.kv_cache_groups
        if len(groups) != 1:
            raise ModelUnsupported(
                f"this model has {len(groups)} groups of KV caches; Foreword's connector holds models with one "
                "(--disable-hybrid-kv-cache-manager makes one of full and sliding-window attention)"
            )
        self.spec = groups[0].kv_cache_spec
        if not hasattr(self.spec, "num_kv_heads") or not hasattr(self.spec, "head_size"):
            raise ModelUnsupported("this model's layers keep something else than keys and values of every token")
        self.layer_names: list[str] = list(groups[0].layer_names)
        self.block_size: int = int(self.spec.block_size)
        self.config = vllm_config
        parallel = vllm_config.parallel_config
        self.ranks: int = int(parallel.tensor_parallel_size)
        if parallel.pipeline_parallel_size != 1:
            raise ModelUnsupported("pipeline parallelism is not supported by Foreword's connector")
        self.model = self._fingerprint(settings)
        self.loss = loss_of(settings.store.urls)

    def _fingerprint(self, settings: Settings) -> bytes:
        """Of the weights and of everything in vLLM's configuration that changes what they compute."""
        model = self.config.model_config
        if settings.fingerprint is not None:
            weights = bytes.fromhex(settings.fingerprint)
        else:
            weights = fingerprint_folder(model_folder(model.model, getattr(model, "revision", None)))
        overrides = repr(getattr(model, "hf_overrides", None) or {})
        return sha256(weights + overrides.encode()).digest()

    def layout(self, rank: int) -> Layout:
        """Of one rank's blocks. The same in the scheduler, which has no tensors, as in the workers."""
        cache = self.config.cache_config
        dtype = str(self.spec.dtype).removeprefix("torch.")
        quantised = str(getattr(self.config.model_config, "quantization", None))
        order = "/".join(
            (
                "vllm",
                ".".join(vllm.__version__.split("+")[0].split(".")[:2]),
                str(cache.cache_dtype),
                quantised,
                _instructions(self.spec.dtype, self.block_size, self.spec.head_size),
            )
        )
        layer = LayerLayout(
            self.spec.num_kv_heads, self.spec.head_size, getattr(self.spec, "head_size_v", self.spec.head_size)
        )
        return Layout(
            self.model,
            self.block_size,
            (layer,) * len(self.layer_names),
            dtype,
            order=order,
            shard=(rank, self.ranks),
            loss=self.loss,
        )

    def root(self, salt: bytes) -> bytes:
        """The key that chains of a salt begin with."""
        return Scope(self.model, self.block_size, salt).root()


def _instructions(dtype: torch.dtype, block_size: int, head_size: int) -> str:
    """How vLLM arranges a block's bytes for this processor. On others than CPUs: the platform's name."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return str(current_platform.device_name)
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    return f"cpu-{_get_attn_isa(dtype, block_size, head_size)}"


# One process may hold a scheduler's side and a worker's side of the same engine.
_shared: dict[str, BlockCache] = {}
_shared_lock = threading.Lock()


class ForewordConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """See the module. Both roles in one class, as vLLM wants it; each delegates to a side."""

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        settings = Settings.read(transfer.kv_connector_extra_config or {})
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

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        assert self._scheduler is not None
        return self._scheduler.match(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        assert self._scheduler is not None
        self._scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepPlan:
        assert self._scheduler is not None
        return self._scheduler.plan(scheduler_output)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        assert self._scheduler is not None
        self._scheduler.finished(request.request_id)
        return False, None

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[CacheHitSource, int]:
        assert self._scheduler is not None
        return self._scheduler.sources(request, num_external_tokens)

    # The worker's side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        assert self._worker is not None
        self._worker.register(kv_caches)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None:
            self._worker.step_began = time.monotonic()

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

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        plan = self._get_connector_metadata() if self.has_connector_metadata() else None
        assert self._worker is not None
        if isinstance(plan, StepPlan) and not plan.tokens:
            self._worker.rest()
        return None, self._worker.loaded() or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        assert self._worker is not None
        return self._worker.take_failed()

    def shutdown(self) -> None:
        for side in (self._worker, self._scheduler):
            if side is not None:
                side.close()

    def reset_cache(self) -> bool | None:
        """vLLM forgets its own cache (`reset_prefix_cache`). The stores keep theirs: what is in them is right."""
        return True


class SchedulerSide:
    """Searches, and plans."""

    def __init__(self, facts: Facts, settings: Settings, engine: str) -> None:
        self._facts = facts
        self._requests: dict[str, _Tracked] = {}
        self._to_load: list[Load] = []
        with _shared_lock:
            cache = _shared.get(engine)
        self._search: BlockCache | _Search = cache if cache is not None else _Search(facts, settings)

    def match(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens beyond the computed ones should be loaded; None to be asked again."""
        tracked = self._track(request)
        if tracked is None:
            return 0, False
        size = self._facts.block_size
        full, held = request.num_tokens // size, num_computed_tokens // size
        tracked.held = tracked.saved = held
        if held >= full:
            return 0, False
        if tracked.ticket is None or held < tracked.searched_from:
            tracked.ticket = self._search.find(tracked.chain.keys_to(full)[held:full])
            tracked.searched_from = held
        if not tracked.ticket.answered:
            return None, False
        count = self._search.worth_loading(tracked.ticket, held - tracked.searched_from, request.num_tokens)
        return count * size, count > 0

    def _track(self, request: Any) -> _Tracked | None:
        """None for requests whose KV depends on more than tokens and salt."""
        if (
            request.lora_request is not None
            or request.mm_features
            or getattr(request, "prompt_embeds", None) is not None
        ):
            return None
        tracked = self._requests.get(request.request_id)
        tokens = request.all_token_ids
        if tracked is None:
            salt = _SALT + request.cache_salt.encode() if request.cache_salt else b""
            chain = TokenChain(self._facts.root(salt), self._facts.block_size, tokens)
            tracked = self._requests[request.request_id] = _Tracked(request, chain)
        elif len(tracked.chain) < len(tokens):
            tracked.chain.tokens.extend(tokens[len(tracked.chain) :])
        return tracked

    def allocated(self, request: Any, blocks: Sequence[int], num_external_tokens: int) -> None:
        """vLLM has taken blocks for what is to be loaded."""
        tracked = self._requests.get(request.request_id)
        if tracked is None or not num_external_tokens or tracked.ticket is None:
            return
        count = num_external_tokens // self._facts.block_size
        low, high = tracked.held, tracked.held + count
        skip = low - tracked.searched_from
        places = tuple((tracked.ticket.places or [])[skip : skip + count])
        keys = tuple(tracked.chain.keys_to(high)[low:high])
        self._to_load.append(Load(request.request_id, keys, places, tuple(blocks[low:high])))
        tracked.tiers = self._search.tokens_by_tier(places, self._facts.block_size)
        tracked.saved, tracked.ticket = high, None

    def plan(self, output: Any) -> StepPlan:
        """What the workers are to do in this step."""
        loads, self._to_load = self._to_load, []
        plan = StepPlan(loads, [], output.total_num_scheduled_tokens)
        state = output.kv_connector_block_state
        for request_id, count in output.num_scheduled_tokens.items():
            tracked = self._requests.get(request_id)
            blocks = state.get_block_ids(request_id) if state is not None and tracked is not None else None
            if tracked is not None and blocks is not None:
                save = self._newly_full(tracked, count, blocks[0])
                if save is not None:
                    plan.saves.append(save)
        return plan

    def _newly_full(self, tracked: _Tracked, scheduled: int, blocks: Sequence[int]) -> Save | None:
        request = tracked.request
        self._track(request)
        # A token that is not known yet (asynchronous scheduling, speculation) fills no block.
        known = min(request.num_computed_tokens + scheduled, len(tracked.chain))
        first, full = tracked.saved, known // self._facts.block_size
        if full <= first:
            return None
        tracked.saved = full
        keys = tuple(tracked.chain.keys_to(full)[first:full])
        return Save(keys, tracked.chain.key_before(first), first, tuple(blocks[first:full]))

    def finished(self, request_id: str) -> None:
        self._requests.pop(request_id, None)

    def sources(self, request: Any, num_external_tokens: int) -> dict[CacheHitSource, int]:
        """vLLM knows host, disk and the rest."""
        tracked = self._requests.get(request.request_id)
        counts: dict[CacheHitSource, int] = {}
        for label, tokens in (tracked.tiers if tracked is not None else {}).items():
            kind = label.split("-")[0]
            source = {"memory": CacheHitSource.HOST, "disk": CacheHitSource.DISK}.get(kind, CacheHitSource.P2P)
            counts[source] = counts.get(source, 0) + tokens
        if sum(counts.values()) != num_external_tokens:
            return {CacheHitSource.EXTERNAL_UNSPECIFIED: num_external_tokens} if num_external_tokens else {}
        return counts

    def close(self) -> None:
        if isinstance(self._search, _Search):
            self._search.close()


class _Search:
    """Searching without blocks of one's own: the scheduler of several ranks, in a process apart from them. A block counts as
    found if every rank's part of it is there."""

    def __init__(self, facts: Facts, settings: Settings) -> None:
        forgetful = [url for url in settings.store.urls if url.startswith("memory:")]
        if forgetful:
            raise ConfigError(
                f"{forgetful[0]} lies in each worker's own memory, where the scheduler of several ranks does not see it; use "
                "a folder in shared memory instead: disk:///dev/shm/foreword?size=8GiB"
            )
        self._store: TieredStore = open_store(settings.store.urls)
        self._fingerprints = [facts.layout(rank).fingerprint for rank in range(facts.ranks)]
        self._timeout = settings.store.lookup_timeout
        self._finders = ThreadPoolExecutor(4, "foreword-find")

    def find(self, keys: Sequence[bytes]) -> Ticket:
        ticket = Ticket([self._fingerprints[0] + key for key in keys], time.monotonic() + self._timeout)

        def search() -> None:
            found: list[list[int]] = []
            for fingerprint in self._fingerprints:
                names = [fingerprint + name[FINGERPRINT_BYTES:] for name in ticket.names]
                found.append(self._store.locate(names, deadline=ticket.deadline))
            ticket.places = min(found, key=len)

        self._finders.submit(search)
        return ticket

    def worth_loading(self, ticket: Ticket, skip: int, tokens: int) -> int:
        return max(len(ticket.places or ()) - skip, 0)

    def tokens_by_tier(self, places: Iterable[int], block_size: int) -> dict[str, int]:
        return self._store.tokens_by_tier(places, block_size)

    def close(self) -> None:
        self._finders.shutdown(wait=False, cancel_futures=True)
        self._store.close()


class WorkerSide:
    """Loads and saves the blocks of one rank."""

    def __init__(self, facts: Facts, settings: Settings, engine: str) -> None:
        self._facts = facts
        self._settings = settings
        self._engine = engine
        self.cache: BlockCache | None = None
        self._loading: dict[str, Ticket] = {}
        self._failed: set[int] = set()
        self.step_began = 0.0
        self._seen = 0

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """vLLM's tensors are there: open the stores. Raises ModelUnsupported for an arrangement that is not known."""
        from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

        tensors = _by_block([kv_caches[name] for name in self._facts.layer_names])
        layout = self._facts.layout(get_tensor_model_parallel_rank() if self._facts.ranks > 1 else 0)
        urls = self._settings.store.urls
        if self._facts.ranks > 1 and any(url.startswith("memory:") for url in urls):
            raise ConfigError("memory:// is not for several ranks; use disk:///dev/shm/foreword?size=8GiB")
        blocks = parse_bytes(self._settings.store.staging) // (layout.block_bytes + HEADER_BYTES)
        staging = Staging(tensors, max(min(blocks, 2 * len(tensors[0])), _FEWEST_SLOTS))
        if staging.block_bytes != layout.block_bytes:
            raise ModelUnsupported(
                f"vLLM keeps {staging.block_bytes} bytes per block, but its description of the layers says {layout.block_bytes}"
            )
        store = open_store(urls, layout)
        config = self._settings.store
        self.cache = BlockCache(
            store, staging, layout, lookup_timeout=config.lookup_timeout, load_timeout=config.load_timeout
        )
        name = str(self._facts.config.model_config.model)
        self.cache.describe({"model": name, "fingerprint": self._facts.model.hex()})
        with _shared_lock:
            if self._facts.ranks == 1:
                _shared[self._engine] = self.cache
        logger.info("Foreword: stores %s, %d bytes per block, %d slots", store.label, layout.block_bytes, staging.slots)

    def load(self, loads: Iterable[Load]) -> None:
        assert self.cache is not None
        for load in loads:
            fingerprint = self.cache.layout.fingerprint
            ticket = Ticket([fingerprint + key for key in load.keys], math.inf)
            ticket.places = list(load.places)
            self._loading[load.request_id] = ticket
            self.cache.load(ticket, 0, load.blocks)

    def save(self, plan: StepPlan) -> None:
        assert self.cache is not None
        if plan.tokens >= _MEASURED_TOKENS:
            self.cache.prefill_seconds.note(plan.tokens, time.monotonic() - self.step_began)
        for save in plan.saves:
            self.cache.save(save.keys, save.parent, save.depth, save.blocks)

    def rest(self) -> None:
        """vLLM has nothing to compute and would ask again at once, without end: the threads that load need the processor, and
        the interpreter, more than it does."""
        assert self.cache is not None
        if not any(ticket.done for ticket in self._loading.values()):
            self.cache.wait(self._seen, _REST_SECONDS)
        self._seen = self.cache.changes

    def loaded(self) -> set[str]:
        """Requests whose loads have ended since this was asked last. Blocks that did not come are noted as failed."""
        ended = {name: ticket for name, ticket in self._loading.items() if ticket.done}
        for name, ticket in ended.items():
            del self._loading[name]
            self._failed.update(ticket.blocks[len(ticket.close()) :])
        return set(ended)

    def take_failed(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed

    def close(self) -> None:
        if self.cache is not None:
            with _shared_lock:
                _shared.pop(self._engine, None)
            self.cache.close(self._settings.store.flush_seconds)


def _by_block(caches: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors whose first dimension counts blocks. Raises ModelUnsupported for any other arrangement."""
    found = []
    for cache in caches:
        if not isinstance(cache, torch.Tensor) or not cache.is_contiguous():
            raise ModelUnsupported("vLLM's KV cache of a layer is not one contiguous tensor")
        # FlashAttention keeps `[2, blocks, ...]`: all keys, then all values.
        found += [cache[0], cache[1]] if cache.shape[0] == 2 and cache.dim() == 5 else [cache]
    if len({len(tensor) for tensor in found}) != 1:
        raise ModelUnsupported("vLLM's layers have different numbers of blocks")
    return found
