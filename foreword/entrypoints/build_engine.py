"""Building an engine from its configuration: model, KV tensors, prefix cache, stores, scheduler and loop."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final

import psutil
import torch

from foreword.blocks.prefix_cache import BlockTable, PrefixCache
from foreword.blocks.public_blocks import public_keys
from foreword.blocks.resume import KVGroup
from foreword.blocks.salt import PUBLIC, tenant_digest
from foreword.blocks.session_book import Alone
from foreword.disaggregation.block_server import BlockServer, ChainIndex, Post
from foreword.engine import model as models
from foreword.engine import preflight
from foreword.engine.batch_invariance import scoped_fingerprint
from foreword.engine.cache_report import MissHistory
from foreword.engine.external_kv import EngineStores
from foreword.engine.loop import EngineCore, EngineLimits
from foreword.engine.model import LoadedModel
from foreword.engine.paged_layers import layout_of, tensors_of
from foreword.engine.prompt_leases import EngineLeases
from foreword.engine.request import ModelInfo, Request, SamplingParams
from foreword.engine.scheduler import Scheduler
from foreword.engine.self_check import check_bits, probe_bits, self_check
from foreword.engine.sequence import SequenceState
from foreword.engine.structured.compiler import GrammarCompiler
from foreword.engine.structured.vocabulary import Vocabulary
from foreword.engine.torch_runner import TorchRunner, bytes_per_block
from foreword.engine_config import KV_MEMORY_FORMS, EngineConfig, PrefixConfig
from foreword.entrypoints.hit_reports import build_audit
from foreword.errors import ConfigError, ModelUnsupported, StoreError
from foreword.events import BlocksRemoved, BlocksStored, Observer
from foreword.offload.ring import RING_BYTES
from foreword.offload.staging import StagingArena
from foreword.offload.writer import WRITE_TIMEOUT
from foreword.prefixes.book import Content
from foreword.prefixes.lease_follower import LeaseFollower
from foreword.prefixes.open_erasures import OpenErasures
from foreword.prefixes.pins import StorePins
from foreword.prefixes.prefix_service import PrefixService
from foreword.prefixes.quarantine import ChainQuarantine
from foreword.prefixes.stored_names import PrefixStorage, models_with_names
from foreword.store.frame import HEADER_BYTES
from foreword.store.store_keys import keys_of
from foreword.store.types import Reach
from foreword.store.urls import loss_of, open_store, parse
from foreword.store_config import EncryptionConfig, StoreConfig
from foreword.tokens.tokenizer import Tokenizer
from foreword.transfer.frame_server import num_frame_slots
from foreword.transfer.peer import opener as peer_opener
from foreword.transfer_config import TransferConfig

if TYPE_CHECKING:
    from foreword.store.key_interfaces import StoreKeys, TenantKeys

log = logging.getLogger(__name__)

# Shares of the memory that is free. What a GPU's pool leaves is for sampling, CUDA graphs and fragmentation.
_HOST_SHARE = 1 / 3
_DEVICE_SHARE = 0.9
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _KEPT_BYTES = -1, -3, 1 << 30
_FEWEST_SLOTS = 16
_HISTORY_TOKENS: Final = 1 << 20  # of recent prompts, by which misses are explained: 4 MiB


@dataclass(frozen=True, slots=True)
class EngineParts:
    """An engine that is ready to run, for `LLM` and `AsyncEngine`.

    Attributes:
        offload, stores: the stores behind the device, if any, and their configuration.
        pins, retentions, erasures: of blocks in the stores, if there are any.
        keys: data keys of tenants, if blocks in the stores are encrypted.
        earlier: as in `PrefixStorage`.
        chains: where each published block is in its chain; None unless other instances may read blocks.
        quarantine: chains that are not reused, because an audit found their KV to be wrong.
    """

    core: EngineCore
    runner: TorchRunner
    info: ModelInfo
    tokenizer: Tokenizer
    stores: StoreConfig
    offload: EngineStores | None
    chains: ChainIndex | None
    quarantine: ChainQuarantine
    pins: StorePins | None = None
    retentions: LeaseFollower | None = None
    erasures: OpenErasures | None = None
    keys: TenantKeys | None = None
    earlier: str = ""

    def flush(self, timeout: float) -> bool:
        """Wait until the stores have everything; False if that takes longer. True without a store."""
        deadline = time.monotonic() + timeout
        written = self.retentions is None or self.retentions.flush(timeout)
        return written and (self.offload is None or self.offload.flush(max(deadline - time.monotonic(), 0.0)))

    def close_stores(self) -> None:
        """Write what the stores do not have yet, and close them."""
        if self.retentions is not None:
            self.retentions.close(self.stores.flush_seconds)
        self.quarantine.close()
        if self.erasures is not None:
            self.erasures.close()
        if self.offload is not None:
            self.offload.close(self.stores.flush_seconds)

    def prefix_service(self) -> PrefixService:
        """The engine's named prefixes."""
        info, offload, storage, cache = self.info, self.offload, None, self.core.cache
        if offload is not None and self.pins is not None:
            storage = PrefixStorage(offload.store, self.pins, info.name, info.block_size, cache.public, self.earlier)

        def tokenize(content: Content) -> list[int]:
            if isinstance(content, str):
                return self.tokenizer.encode(content)
            return self.tokenizer.render_chat(content, add_generation_prompt=False)

        def mark(texts: list[Sequence[int]]) -> None:
            cache.public.set(public_keys(cache.scope(PUBLIC), tokens) for tokens in texts)

        return PrefixService(tokenize, self.core.leases.reserve, storage, mark)

    def block_server(self, post: Post) -> BlockServer:
        """Lets other instances read the blocks on the device and in this process's memory tiers."""
        assert self.chains is not None
        if self.offload is not None:
            layout, tiers = (
                self.offload.units[0].layouts[0],
                zip(self.stores.urls, self.offload.store.tiers, strict=True),
            )
            memory = [tier.store for url, tier in tiers if parse(url).reach is Reach.PROCESS]
        else:
            layout, memory = layout_of(self.runner.layers, bytes.fromhex(self.info.namespace)), []
        slots = min(num_frame_slots(layout.block_bytes), max(2 * self.runner.num_blocks, _FEWEST_SLOTS))
        staging = StagingArena([tensors_of(self.runner.layers)], slots)
        return BlockServer(layout, self.core.cache.pool, self.chains, post, staging, memory)


def build_engine(
    config: EngineConfig,
    *,
    prefixes: PrefixConfig | None = None,
    store: StoreConfig | None = None,
    encryption: EncryptionConfig | None = None,
    transfer: TransferConfig | None = None,
    readable: bool = False,
    observers: Iterable[Observer] = (),
    progress: Callable[[str], None] = lambda _: None,
) -> EngineParts:
    """Load the model, check it, take the memory for KV, open the stores.

    Args:
        transfer: for stores of other instances (`peer://`).
        readable: other instances may read this engine's blocks (`EngineParts.block_server`).

    Raises ForewordError.
    """
    stores = store or StoreConfig()
    preflight.check(config, stores, transfer or TransferConfig(), encryption)
    keys = keys_of(stores, encryption)
    data_keys = None if keys is None else keys.data
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    _keep_freed_memory()
    if config.batch_invariant == "auto" and loss_of(stores.urls):
        log.warning("not batch-invariant: a store has a lossy codec")
        config = replace(config, batch_invariant="off")
    named = _models_with_names(stores, keys)
    loaded = models.load_model(config, progress, named=named)
    if readable or any(parse(url).reach is Reach.INSTANCE for url in stores.urls):
        # Blocks that other instances read and write have all layers in a block.
        loaded = replace(loaded, layers=loaded.layers.merged())
    tokenizer = Tokenizer.load(loaded.source, loaded.end_tokens, trust_remote_code=config.trust_remote_code)
    if config.self_check:
        progress("checking the engine against the model's own forward pass")
        self_check(loaded, config.block_size)
    loaded = _in_namespace(config, loaded, progress)
    models.trim_heap()
    runner = _take_kv_memory(config, loaded, progress, _copy_bytes(stores, loaded.device.type))
    chains = ChainIndex() if readable else None
    watchers = tuple(observers) if chains is None else (*observers, chains)
    cache = _prefix_cache(config, loaded, runner.num_blocks, watchers)
    offload = None
    if stores.urls:
        offload = _open_stores(stores, keys, loaded, cache.groups, runner, transfer or TransferConfig(), progress)
    info = _model_info(config, loaded, runner, cache)
    prefixes = prefixes or PrefixConfig()
    leases = _leases(prefixes, info, cache)
    core = _engine_core(config, info, runner, cache, tokenizer, offload, watchers, leases)
    if offload is not None:
        offload.describe(info.name, bytes.fromhex(info.fingerprint), cache.groups)
    pins = retentions = erasures = None
    if offload is not None:
        erasures = OpenErasures(offload.store, offload.erasing, data_keys)
        pins = StorePins(
            offload.store,
            info.namespace,
            offload.groups,
            info.fingerprint,
            run=offload.after_writes,
            seconds=WRITE_TIMEOUT,
        )
        core.on_superseded = partial(_retire, offload, pins)
        if offload.store.writable:
            retentions = LeaseFollower(leases.book, offload.store, pins, info.block_size)
    core.audit, quarantine = audit, _ = build_audit(config, asdict(info), runner, cache, offload)
    if config.audit_every:
        audit.attach(core.hooks)
    quarantine.on_change = lambda: core.post(audit.apply_quarantine)
    audit.apply_quarantine()  # what the stores had when they were opened
    kept_there = pins, retentions, erasures, data_keys
    earlier = loaded.earlier.hex()[:32]
    return EngineParts(
        core,
        runner,
        info,
        tokenizer,
        stores,
        offload,
        chains,
        quarantine,
        *kept_there,
        earlier if earlier in named else "",
    )


def _models_with_names(stores: StoreConfig, keys: StoreKeys | None) -> set[str]:
    """The models of whose named prefixes the stores have records. None if they cannot be opened: `_open_stores` says so."""
    urls = [url for url in stores.urls if parse(url).persistent]
    if not urls:
        return set()
    try:
        with contextlib.closing(open_store(urls, keys=keys)) as store:
            return models_with_names(store)
    except StoreError:
        return set()


def _retire(offload: EngineStores, pins: StorePins, tenant: bytes, alone: Alone) -> None:
    unneeded = partial(pins.unneeded, tenant_digest(tenant), alone.root, alone.keys)
    offload.retire(alone.keys, unneeded, drop=alone.drop)


def _in_namespace(
    config: EngineConfig, loaded: models.LoadedModel, progress: Callable[[str], None]
) -> models.LoadedModel:
    """The model, checked for batch invariance, with what its KV is named by. Raises ModelUnsupported if `batch_invariant` is on
    and does not hold."""
    if not loaded.inexact and config.self_check:
        progress("checking that bits do not depend on the batch")
        try:
            check_bits(loaded, config.block_size)
        except ModelUnsupported as error:
            if config.batch_invariant == "on":
                raise
            loaded = replace(loaded, inexact=error.message)
    if loaded.inexact:
        level = logging.INFO if config.batch_invariant == "off" else logging.WARNING
        log.log(level, "not batch-invariant: %s", loaded.inexact)
        return loaded
    assert loaded.kernels is not None
    namespace = scoped_fingerprint(loaded.fingerprint, loaded.kernels, probe_bits(loaded))
    return replace(loaded, namespace=namespace)


def _take_kv_memory(
    config: EngineConfig, loaded: models.LoadedModel, progress: Callable[[str], None], staging: int
) -> TorchRunner:
    num_blocks = kv_blocks(config, loaded, staging)
    progress(f"allocating {num_blocks} blocks of {config.block_size} tokens")
    runner = loaded.runner(num_blocks, config.block_size)
    if loaded.triton and loaded.device.type == "cuda":  # pragma: no cover - needs a GPU
        progress("recording CUDA graphs")
        runner.record_graphs(config.max_num_seqs)
    return runner


def _model_info(config: EngineConfig, loaded: models.LoadedModel, runner: TorchRunner, cache: PrefixCache) -> ModelInfo:
    return ModelInfo(
        name=loaded.name,
        # A sequence that fills the pool to its last block leaves no room for another, but it must fit alone.
        max_model_len=cache.longest(loaded.max_model_len, config.max_batch_tokens),
        vocab_size=loaded.vocab_size,
        fingerprint=loaded.fingerprint.hex(),
        dtype=str(loaded.dtype).removeprefix("torch."),
        device=str(loaded.device),
        block_size=config.block_size,
        num_blocks=runner.num_blocks,
        kv_bytes_per_block=runner.bytes_per_block,
        parameters=loaded.parameters,
        kv_groups=len(cache.groups),
        sampling=loaded.sampling,
        backends=loaded.backends,
        inexact=loaded.inexact,
        namespace=loaded.namespace.hex(),
    )


def _engine_core(
    config: EngineConfig,
    info: ModelInfo,
    runner: TorchRunner,
    cache: PrefixCache,
    tokenizer: Tokenizer,
    offload: EngineStores | None,
    observers: Sequence[Observer],
    leases: EngineLeases,
) -> EngineCore:
    scheduler = Scheduler(
        cache,
        max_batch_tokens=config.max_batch_tokens,
        max_num_seqs=config.max_num_seqs,
        reserve=config.reserve,
        offload=offload,
        reclaim=leases.yield_one,
    )
    ends, seed = tokenizer.eos_token_ids, config.seed
    limits = EngineLimits(info.max_model_len, info.vocab_size, ends, seed)
    history = MissHistory(_HISTORY_TOKENS)
    return EngineCore(
        runner,
        cache,
        scheduler,
        tokenizer,
        limits,
        history=history,
        observers=observers,
        offload=offload,
        leases=leases,
        grammars=GrammarCompiler(lambda: Vocabulary(tokenizer.as_json(), info.vocab_size, ends)),
    )


def _leases(config: PrefixConfig, info: ModelInfo, cache: PrefixCache) -> EngineLeases:
    size, pool = info.kv_bytes_per_block, info.num_blocks * info.kv_bytes_per_block
    given = config.budget_bytes(pool)
    budget, retained = (min(one, pool) // size * size for one in (given, given // 2))  # what whole blocks take
    return EngineLeases(
        cache,
        budget,
        int(retained * config.retain_tenant_share),
        retain_budget=retained,
        block_bytes=size,
    )


def _prefix_cache(
    config: EngineConfig, loaded: models.LoadedModel, num_blocks: int, observers: Sequence[Observer]
) -> PrefixCache:
    def published(table: BlockTable, start: int, end: int) -> None:
        chain, size = table.chain, config.block_size
        parts = (start, min(end, chain.public), PUBLIC), (max(start, chain.public), end, table.salt)
        for low, high, salt in parts:
            if low >= high:
                continue
            keys, tokens = chain.keys_to(high)[low:high], chain.tokens[low * size : high * size]
            begins = salt.text if low in (0, chain.public) else None
            event = BlocksStored(chain.key_before(low), tuple(keys), tokens, begins)
            for observer in observers:
                observer.notify(event)

    def removed(keys: list[bytes]) -> None:
        for observer in observers:
            observer.notify(BlocksRemoved(tuple(keys)))

    cache = PrefixCache(
        num_blocks,
        config.block_size,
        groups=loaded.layers.kv_groups(config.block_size),
        model=loaded.namespace,
        enabled=config.enable_prefix_caching,
        partial_reuse=config.partial_reuse,
        lookahead_blocks=config.lookahead_blocks,
        on_published=published if observers else None,
        on_removed=removed if observers else None,
    )
    return cache


def _open_stores(
    config: StoreConfig,
    keys: StoreKeys | None,
    loaded: models.LoadedModel,
    kinds: Sequence[KVGroup],
    runner: TorchRunner,
    transfer: TransferConfig,
    progress: Callable[[str], None],
) -> EngineStores:
    """Open the stores for a runner's blocks. Raises StoreError."""
    loss, groups = loss_of(config.urls), [{n: runner.layers[n] for n in group} for group in loaded.layers.groups]
    layouts = [
        replace(layout_of(layers, loaded.namespace, loss), group=name)
        for layers, name in zip(groups, loaded.layers.names(), strict=True)
    ]
    largest = max(layouts, key=lambda layout: layout.block_bytes)
    count = len(config.urls)
    progress(f"opening {count} store{'s' if count > 1 else ''} for blocks of {largest.block_bytes} bytes")
    smaller = [layout for layout in layouts if layout is not largest]
    openers = {Reach.INSTANCE: peer_opener(transfer)}
    device = loaded.device.type
    tiers = open_store(config.urls, largest, openers, more_layouts=smaller, keys=keys, device=device)
    tiers.warm_up(layout.fingerprint for layout in layouts[:1])
    wanted = config.staging_bytes(device) // (largest.block_bytes + HEADER_BYTES)
    slots = max(min(wanted, 2 * runner.num_blocks), _FEWEST_SLOTS)
    staging = StagingArena([tensors_of(layers) for layers in groups], slots)
    return EngineStores(
        tiers,
        staging,
        layouts,
        kinds=kinds,
        lookup_timeout=config.lookup_timeout,
        load_timeout=config.load_timeout,
        direct=config.direct,
    )


def _keep_freed_memory() -> None:
    """Let glibc keep freed memory for the next allocation: activations of a step are as large as those of the next, and
    touching fresh pages costs a CPU a fifth of its speed (dev/lab-notes.md). Other C libraries are not changed."""
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def _copy_bytes(config: StoreConfig, device: str) -> int:
    """Bytes that copies to and from stores take on a device of this type."""
    if not config.urls:
        return 0
    return max(config.staging_bytes(device), RING_BYTES if config.direct and device == "cuda" else 0)


def kv_blocks(config: EngineConfig, loaded: LoadedModel, staging: int = 0) -> int:
    """Number of blocks in the pool, from `kv_memory` (bytes, tokens in all layers, or auto: a share of the free memory, on a
    GPU without the `staging` bytes that copies to and from stores take there). Raises ConfigError if that is less than two
    blocks for each KV group."""
    per_block = bytes_per_block(loaded.layers, loaded.kv_dtype, config.block_size)
    groups = len(loaded.layers.groups)
    size = config.kv_size()
    if size is None:
        useful = config.max_num_seqs * -(-loaded.max_model_len // config.block_size) * groups
        blocks = min(_free_bytes(config, loaded, staging) // per_block, useful)
    else:
        number, unit = size
        blocks = number // per_block if unit == "bytes" else -(-number // config.block_size) * groups
    if blocks < 2 * groups:
        raise ConfigError(
            f"engine.kv_memory (--kv-memory) is {config.kv_memory!r}, which is less than two blocks of "
            f"{per_block * groups} bytes; {KV_MEMORY_FORMS}"
        )
    return int(blocks)


def _free_bytes(config: EngineConfig, loaded: LoadedModel, staging: int) -> int:
    """Memory for the pool: a third of the free host memory; on a GPU most of what the largest step leaves."""
    if loaded.device.type != "cuda":
        return int(psutil.virtual_memory().available * _HOST_SHARE)
    gc.collect()  # pragma: no cover - needs a GPU
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(loaded.device)
    before = torch.cuda.memory_allocated(loaded.device)
    run_largest_step(config, loaded)
    needed = torch.cuda.max_memory_allocated(loaded.device) - before
    gc.collect()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(loaded.device)
    return int((free - needed - staging) * _DEVICE_SHARE)


def run_largest_step(config: EngineConfig, loaded: LoadedModel) -> None:
    """A forward pass over a prompt of `max_batch_tokens` tokens, with logits of as many rows as sequences may run."""
    count = min(config.max_batch_tokens, loaded.max_model_len)
    groups = loaded.layers.kv_groups(config.block_size)
    blocks = (-(-count // config.block_size) + 2) * len(groups)
    runner = loaded.runner(blocks, config.block_size)
    cache = PrefixCache(blocks, config.block_size, groups=groups)
    scheduler = Scheduler(cache, max_batch_tokens=count)
    request = Request("memory", (0,) * count, SamplingParams())
    sequence = SequenceState(request, cache.open(request.tokens), 0, count)
    scheduler.add(sequence)
    step = scheduler.schedule()
    runner.logits(step, rows=range(min(count, config.max_num_seqs)))
    scheduler.settle(step)
    scheduler.finish(sequence)
