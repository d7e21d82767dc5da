"""Putting an engine together: model, pool, scheduler and loop from one `EngineConfig`."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from foreword.blocks import PrefixCache
from foreword.blocks.layout import Layout
from foreword.blocks.miss_history import MissHistory
from foreword.blocks.prefix import BlockTable
from foreword.config import EngineConfig, PrefixConfig, StoreConfig, TransferConfig, parse_bytes
from foreword.engine import model as models
from foreword.engine.loop import EngineCore, Limits
from foreword.engine.scheduler import Scheduler
from foreword.engine.tokenizer import Tokenizer
from foreword.engine.torch_runner import TorchRunner
from foreword.errors import ConfigError
from foreword.events import BlocksRemoved, BlocksStored, Observer
from foreword.offload.manager import OffloadManager
from foreword.offload.staging import StagingArena, layout_of, tensors_of
from foreword.prefixes.book import PrefixBook
from foreword.prefixes.service import PrefixService
from foreword.prefixes.stored import StoredPrefixes
from foreword.prefixes.tokens import content_tokens
from foreword.store.base import Store
from foreword.store.frame import HEADER_BYTES
from foreword.store.urls import Opener, StoreUrl, loss_of, open_store, parse

if TYPE_CHECKING:
    from foreword.disaggregation.block_server import BlockServer, ChainIndex, Post

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _KEPT_BYTES = -1, -3, 1 << 30
_FEWEST_SLOTS = 16


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What is served. `fingerprint` is hexadecimal; `max_model_len` counts prompt and output."""

    name: str
    max_model_len: int
    vocab_size: int
    fingerprint: str
    dtype: str
    device: str
    block_size: int
    num_blocks: int
    kv_bytes_per_block: int
    parameters: int


@dataclass(frozen=True, slots=True)
class Assembly:
    """An engine that is ready to run, and what belongs to it. `share` makes its blocks readable for other instances, given what
    runs a function on the engine's thread; None if it was not asked for."""

    core: EngineCore
    info: ModelInfo
    tokenizer: Tokenizer
    prefixes: PrefixService
    offload: OffloadManager | None = None
    flush_seconds: float = 0.0
    share: Callable[[Post], BlockServer] | None = None
    runner: TorchRunner | None = None


def assemble(
    config: EngineConfig,
    *,
    prefixes: PrefixConfig | None = None,
    store: StoreConfig | None = None,
    transfer: TransferConfig | None = None,
    observers: Iterable[Observer] = (),
    progress: Callable[[str], None] = lambda _: None,
) -> Assembly:
    """Load the model, check it, take the memory for KV, open the stores. With `transfer` other instances may read its blocks.

    Raises ForewordError.
    """
    stores = store or StoreConfig()
    if stores.urls and not config.enable_prefix_caching:
        raise ConfigError("a store (--store) needs prefix caching, which is switched off (--no-enable-prefix-caching)")
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    _keep_freed_memory()
    loaded = models.load_model(config, progress)
    tokenizer = Tokenizer.load(loaded.source, loaded.end_tokens, trust_remote_code=config.trust_remote_code)
    if config.self_check:
        progress("checking the engine against the model's own forward pass")
        models.self_check(loaded, config.block_size)
    num_blocks = models.kv_blocks(config, loaded)
    progress(f"taking {num_blocks} blocks of {config.block_size} tokens")
    runner = TorchRunner(
        loaded.model,
        loaded.layouts,
        loaded.kv_dtype,
        num_blocks,
        config.block_size,
        share_prefixes=config.shared_prefix_attention,
        kernels=loaded.kernels,
    )
    watchers = tuple(observers)
    if transfer is not None:
        chains = _chains()
        watchers = (*watchers, chains)
    cache = _cache(config, num_blocks, loaded.fingerprint, watchers)
    offload = open_cache(stores, runner, loaded.fingerprint, progress, transfer) if stores.urls else None
    scheduler = Scheduler(
        cache,
        max_batch_tokens=config.max_batch_tokens,
        max_num_seqs=config.max_num_seqs,
        reserve=config.reserve,
        offload=offload,
    )
    # A text that fills the pool to its last block could never be joined by another; it must still fit alone.
    longest = min(loaded.max_model_len, num_blocks * config.block_size)
    limits = Limits(longest, loaded.vocab_size, tokenizer.eos_token_ids, config.seed, config.report_other_tenants)
    history = MissHistory(config.history_tokens)
    core = EngineCore(runner, cache, scheduler, tokenizer, limits, history=history, observers=watchers, offload=offload)
    info = ModelInfo(
        name=loaded.name,
        max_model_len=longest,
        vocab_size=loaded.vocab_size,
        fingerprint=loaded.fingerprint.hex(),
        dtype=str(loaded.dtype).removeprefix("torch."),
        device=str(loaded.device),
        block_size=config.block_size,
        num_blocks=num_blocks,
        kv_bytes_per_block=runner.bytes_per_block,
        parameters=loaded.parameters,
    )
    service = _prefix_service(prefixes or PrefixConfig(), info, tokenizer, cache, offload)
    if offload is not None:
        offload.describe({"model": info.name, "fingerprint": info.fingerprint})
    assembly = Assembly(core, info, tokenizer, service, offload, stores.flush_seconds, runner=runner)
    if transfer is None:
        return assembly
    layout = layout_of(runner.layers, loaded.fingerprint) if offload is None else offload.layout
    return replace(assembly, share=_sharing(layout, runner, cache, chains, _in_memory(stores, offload)))


def _prefix_service(
    config: PrefixConfig, info: ModelInfo, tokenizer: Tokenizer, cache: PrefixCache, offload: OffloadManager | None
) -> PrefixService:
    def size_of(tokens: Sequence[int]) -> int:  # a partial block is not pinned
        return len(tokens) // info.block_size * info.kv_bytes_per_block

    book = PrefixBook(config.budget_bytes(info.num_blocks * info.kv_bytes_per_block), size_of, cache.unpin)
    storage = None
    if offload is not None:
        storage = StoredPrefixes(offload, info.fingerprint, info.name, info.block_size)
    return PrefixService(book, functools.partial(content_tokens, tokenizer), storage)


def _chains() -> ChainIndex:
    from foreword.disaggregation.block_server import ChainIndex  # needs msgspec

    return ChainIndex()


def _sharing(
    layout: Layout, runner: TorchRunner, cache: PrefixCache, chains: ChainIndex, memory: Sequence[Store]
) -> Callable[[Post], BlockServer]:
    from foreword.disaggregation.block_server import BlockServer, num_frame_slots

    staging = StagingArena(
        tensors_of(runner.layers), min(num_frame_slots(layout), max(2 * runner.num_blocks, _FEWEST_SLOTS))
    )
    return lambda post: BlockServer(layout, cache.pool, chains, post, staging, memory)


def _in_memory(config: StoreConfig, offload: OffloadManager | None) -> list[Store]:
    """The tiers that are this process's own memory."""
    if offload is None:
        return []
    tiers = zip(config.urls, offload.store.tiers, strict=True)
    return [tier.store for url, tier in tiers if parse(url).scheme == "memory"]


def open_cache(
    config: StoreConfig,
    runner: TorchRunner,
    fingerprint: bytes,
    progress: Callable[[str], None],
    transfer: TransferConfig | None = None,
) -> OffloadManager:
    """Open the stores for a runner's blocks. Raises StoreError."""
    layout = layout_of(runner.layers, fingerprint, loss_of(config.urls))
    progress(f"opening {len(config.urls)} stores for blocks of {layout.block_bytes} bytes")
    tiers = open_store(config.urls, layout, {"peer": peer_opener(transfer or TransferConfig())})
    wanted = parse_bytes(config.staging) // (layout.block_bytes + HEADER_BYTES)
    staging = StagingArena(tensors_of(runner.layers), max(min(wanted, 2 * runner.num_blocks), _FEWEST_SLOTS))
    return OffloadManager(
        tiers, staging, layout, lookup_timeout=config.lookup_timeout, load_timeout=config.load_timeout
    )


def peer_opener(config: TransferConfig) -> Opener:
    """Opens `peer://` stores; a URL that names no secret takes the configuration's."""

    def open_peer(place: StoreUrl, layout: Layout | None) -> Store:
        from foreword.transfer.peer import opener

        return opener(config)(place, layout)

    return open_peer


def _keep_freed_memory() -> None:
    """Let glibc keep what is freed instead of giving it back: activations of a step are as large as those of the next, and
    touching fresh pages costs a CPU a fifth of its speed (docs/lab-notes.md). Other C libraries are left as they are."""
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def _cache(config: EngineConfig, num_blocks: int, fingerprint: bytes, observers: Sequence[Observer]) -> PrefixCache:
    def published(table: BlockTable, start: int, end: int) -> None:
        chain, size = table.chain, config.block_size
        keys, tokens = chain.keys_to(end)[start:end], chain.tokens[start * size : end * size]
        salt = cache.salt_of(chain.root) if not start else None
        event = BlocksStored(chain.key_before(start), tuple(keys), tokens, salt)
        for observer in observers:
            observer.notify(event)

    def removed(keys: list[bytes]) -> None:
        for observer in observers:
            observer.notify(BlocksRemoved(tuple(keys)))

    cache = PrefixCache(
        num_blocks,
        config.block_size,
        model=fingerprint,
        enabled=config.enable_prefix_caching,
        partial_reuse=config.partial_reuse,
        lookahead_blocks=config.lookahead_blocks,
        on_published=published if observers else None,
        on_removed=removed if observers else None,
    )
    return cache
