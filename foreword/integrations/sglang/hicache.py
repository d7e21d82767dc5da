"""HiCache's storage backend over Foreword's stores.

SGLang names a page by a hash of its tokens, of all tokens before it, and of the request's `extra_key` and `cache_salt`. Here
such a hash is the key of a block, below the namespace of the server (`hicache_identity.py`). So a page is found for the same
tokens, tenant, model and layout, and for no others. Each host pool (keys and values, windows, recurrent states) has a layout of
its own.

A page is verified in the backend's own memory before it is copied into the pool. What is damaged, late or missing is a miss. No
failure of a store is raised into SGLang.
"""

from __future__ import annotations

import functools
import logging
import re
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Final, cast

import torch
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolHitPolicy, PoolName, PoolTransferResult
from torch import Tensor

from foreword.blocks.keys import KEY_BYTES
from foreword.blocks.layout import Layout
from foreword.config_layers import build
from foreword.errors import ConfigError, StoreError, did_you_mean
from foreword.integrations.sglang.hicache_identity import page_layout, server_namespace
from foreword.prefixes.tier_erasure import erase_tier
from foreword.store.base import Name
from foreword.store.engine_store import EngineStore
from foreword.store.frame import HEADER_BYTES
from foreword.store.layout_records import LAYOUTS, LayoutRecord
from foreword.store.series import Series, series_of
from foreword.store.shared_records import SharedRecords
from foreword.store.store_keys import keys_from_environment
from foreword.store.tier_counters import TierCounters
from foreword.store.tiered import TieredStore, TierSearch
from foreword.store.urls import check_stores, open_store
from foreword.store_config import StoreConfig

log = logging.getLogger("sglang.foreword")

_STAGING_BYTES: Final = 64 << 20  # pages that one call has in memory of its own at once
_ERASE_SECONDS: Final = 60.0
_LOCAL_SHARE: Final = 8.0  # memory and disks answer late only on a busy machine
_METRICS_SECONDS: Final = 1.0
# Keys that SGLang reads itself, and leaves in the configuration.
_SGLANG: Final = frozenset({"backend_name", "module_path", "class_name", "interface_v1"})
_OURS: Final = ("store", "fingerprint", "lookup_timeout", "load_timeout")

_HASH: Final = re.compile(rf"[0-9a-f]{{{2 * KEY_BYTES}}}")

Put = Callable[[int, Tensor], object]
Take = Callable[[int], Tensor]


@dataclass(frozen=True, slots=True)
class HiCacheSettings:
    """The keys of `--hicache-storage-backend-extra-config` that are Foreword's.

    Attributes:
        fingerprint: a digest of the weights, 32 or 64 hexadecimal digits, for weights that are not in files.
    """

    store: StoreConfig
    fingerprint: str = ""

    @classmethod
    def read(cls, extra: dict[str, Any] | None, *, opened: bool = False) -> HiCacheSettings:
        """`opened`: there is a store already. Raises ConfigError for an unknown key or a bad value, StoreError for a URL."""
        given = {key: value for key, value in (extra or {}).items() if key not in _SGLANG}
        where = "--hicache-storage-backend-extra-config"
        for key in given:
            if key not in _OURS:
                raise ConfigError(f"unknown key {key!r} in {where}{did_you_mean(key, (*_OURS, *_SGLANG))}")
        urls = given.pop("store", ())
        urls = [urls] if isinstance(urls, str) else urls
        if not isinstance(urls, list | tuple) or not (urls or opened) or not all(isinstance(url, str) for url in urls):
            raise ConfigError(
                f'store in {where} is a URL or a list of them: "store": "disk:///var/cache/foreword?size=200GiB"'
            )
        for url in check_stores(urls):
            if url.codec != "raw":
                raise ConfigError(f"{url.shown}: pages of SGLang are stored as they are; remove codec={url.codec}")
        fingerprint = given.pop("fingerprint", "")
        try:
            length = len(bytes.fromhex(fingerprint)) if fingerprint else 32
        except (TypeError, ValueError):
            length = 0
        if length not in (16, 32):
            raise ConfigError(f"fingerprint in {where} has 32 or 64 hexadecimal digits, unlike {fingerprint!r}")
        return cls(build(StoreConfig, "store", {"urls": list(urls), **given}), fingerprint)


@dataclass(frozen=True, slots=True)
class PagePool:
    """A host pool of SGLang, and its pages in the stores. `dtype`: of a page as SGLang takes it, flat."""

    host: Any
    pages: EngineStore
    dtype: torch.dtype

    @property
    def layout(self) -> Layout:
        return self.pages.layout

    def names(self, keys: Iterable[str]) -> list[Name]:
        return self.pages.names([_key(key) for key in keys])

    def starts(self, indices: Tensor | None, pages: int) -> list[int] | None:
        """The index of each page's first token, given those of all tokens. None if they are not those of `pages` pages."""
        size = self.layout.block_size
        if indices is None or indices.numel() != pages * size:
            return None
        return cast("list[int]", indices[::size].tolist())


class ForewordStorage(HiCacheStorage):  # type: ignore[misc]
    """Keeps pages of HiCache in Foreword's stores. SGLang makes one per rank, and calls it from several threads.

    `store`: one that is open already, in place of the configured URLs; the backend closes it.

    Raises ConfigError, StoreError and ModelUnsupported when it is made and when a pool is registered, and nothing later.
    """

    def __init__(self, storage_config: Any, _more: Any = None, *, store: TieredStore | None = None) -> None:
        self.settings = HiCacheSettings.read(storage_config.extra_config, opened=store is not None)
        if storage_config.should_split_heads:
            raise ConfigError(
                "pages are not divided by heads: remove tp_lcm_size from --hicache-storage-backend-extra-config"
            )
        self._config = storage_config
        self._namespace = server_namespace(self.settings.fingerprint)
        self._keys = keys_from_environment()
        self._store = open_store(self.settings.store.urls, keys=self._keys) if store is None else store
        self._pools: dict[str, PagePool] = {}
        self._off = False
        # Several threads append, one takes: calls of a deque are atomic, also without the interpreter's lock.
        self._done = {kind: deque[tuple[int, float]](maxlen=1024) for kind in ("prefetch", "backup")}
        self._shown, self._counted = 0.0, dict[tuple[str, ...], float]()
        _follow_weights(self)

    # Pools

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self._register(mem_pool_host, PoolName.KV)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._register(host_pool, host_pool_name)

    def _register(self, host: Any, name: Any) -> None:
        layout = page_layout(host, str(name), self._namespace, self._config)
        # SGLang's hashes have the request's salt in them but do not show it: all pages are one tenant's here.
        pages = EngineStore(layout, self._store, keys=self._keys)
        self._pools[str(name)] = PagePool(host, pages, host.get_dummy_flat_data_page().dtype)
        record = LayoutRecord(str(self._config.model_name), layout.describe(), self.settings.fingerprint)
        try:  # tools need it; pages are found without
            SharedRecords(self._store, LAYOUTS).put(LAYOUTS.key(layout.fingerprint.hex()), record)
        except StoreError as error:
            log.warning("Foreword: the layout of %s is not recorded: %s", name, error.message)

    def on_host_pools_registered(self) -> None:
        self._store.warm_up([pool.layout.fingerprint for pool in self._pools.values()])

    # Lookups

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: Sequence[str], extra_info: Any = None) -> int:
        pool = self._pools.get(PoolName.KV)
        return 0 if pool is None or self._off else self._count(pool, keys, extra_info)

    def _count(self, pool: PagePool, keys: Sequence[str], extra_info: Any) -> int:
        before = pool.names(_before(extra_info))
        return len(self._store.locate(pool.names(keys), search=self._search(), before=before))

    def batch_exists_v2(
        self, keys: Sequence[str], pool_transfers: Sequence[Any] | None = None, extra_info: Any = None
    ) -> PoolTransferResult:
        pages = self.batch_exists(keys, extra_info)
        hits = {PoolName.KV: pages} if pages else {}
        lengths = list(range(1, pages + 1))
        for transfer in pool_transfers or ():
            if not lengths:
                break
            # A second form of the same pages, which never ends a hit: without a verdict SGLang does not use it.
            if transfer.hit_policy == PoolHitPolicy.BLOCK_GROUPS:
                continue
            pool = self._pools.get(str(transfer.name))
            if pool is None:
                possible = []
            elif transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
                possible = list(range(1, self._count(pool, keys[:pages], extra_info) + 1))
            else:
                possible = self._window_ends(pool, keys[:pages], max(1, len(transfer.keys or ())), extra_info)
            if possible:
                hits[transfer.name] = possible[-1]
            lengths = [length for length in lengths if length in set(possible)]
        return PoolTransferResult(lengths[-1] if lengths else 0, hits, lengths)

    def _window_ends(self, pool: PagePool, keys: Sequence[str], window: int, extra_info: Any) -> list[int]:
        """The lengths of prefixes whose last pages, as many as the window has, are all present."""
        before = pool.names(_before(extra_info))
        places = self._store.find(pool.names(keys), search=self._search(), before=before)
        ends, run = [], 0
        for length, place in enumerate(places, 1):
            run = run + 1 if place >= 0 else 0
            if run >= min(window, length):
                ends.append(length)
        return ends

    # Reading

    def batch_get_v1(self, keys: Sequence[str], host_indices: Tensor, extra_info: Any = None) -> list[bool]:
        return self._get_pages(PoolName.KV, keys, host_indices)

    def batch_get_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        return {one.name: self._get_pages(one.name, one.keys or [], one.host_indices) for one in transfers}

    def _get_pages(self, name: Any, keys: Sequence[str], indices: Tensor | None) -> list[bool]:
        pool = self._pools.get(str(name))
        starts = None if pool is None else pool.starts(indices, len(keys))
        if pool is None or starts is None:
            log.error("Foreword: %s has no such pages in the host pool", name)
            return [False] * len(keys)
        return self._read(
            pool, keys, lambda i, page: pool.host.set_from_flat_data_page(starts[i], page.view(pool.dtype))
        )

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Tensor | None:
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: Sequence[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[Tensor | None]:
        pool, results = self._pools.get(PoolName.KV), cast("list[Tensor | None]", [None] * len(keys))
        if pool is None:
            return results
        targets = list(target_locations or results)

        def put(i: int, page: Tensor) -> None:
            if targets[i] is None:
                targets[i] = pool.host.get_dummy_flat_data_page()
            targets[i].copy_(page.view(pool.dtype))

        for i, found in enumerate(self._read(pool, keys, put)):
            results[i] = targets[i] if found else None
        return results

    def _read(self, pool: PagePool, keys: Sequence[str], put: Put) -> list[bool]:
        """Give verified pages to `put`. True for each one that was; none behind the first part in which one is missing."""
        began, found = time.monotonic(), [False] * len(keys)
        deadline, length = began + self.settings.store.load_timeout, pool.layout.block_bytes + HEADER_BYTES
        for part in [] if self._off else _parts(len(keys), length):
            memory = torch.empty(len(part), length, dtype=torch.uint8)
            rows = [memoryview(cast(Any, row.numpy())) for row in memory]
            verified = pool.pages.read([_key(keys[i]) for i in part], rows, deadline)
            for row, good in enumerate(verified):
                if good and not self._off:
                    put(part[row], memory[row, :-HEADER_BYTES])
                    found[part[row]] = True
            if not all(found[i] for i in part):
                break
        self._note("prefetch", sum(found), length, began)
        return found

    # Writing

    def batch_set_v1(self, keys: Sequence[str], host_indices: Tensor, extra_info: Any = None) -> list[bool]:
        return self._set_pages(PoolName.KV, keys, host_indices, extra_info)

    def batch_set_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        return {one.name: self._set_pages(one.name, one.keys or [], one.host_indices, extra_info) for one in transfers}

    def _set_pages(self, name: Any, keys: Sequence[str], indices: Tensor | None, extra_info: Any) -> list[bool]:
        pool = self._pools.get(str(name))
        starts = None if pool is None else pool.starts(indices, len(keys))
        if pool is None or starts is None:
            log.error("Foreword: %s has no such pages in the host pool", name)
            return [False] * len(keys)
        return self._write(pool, keys, lambda i: pool.host.get_data_page(starts[i], flat=False), extra_info)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return self.batch_set([key], [value])

    def batch_set(
        self, keys: Sequence[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        pool = self._pools.get(PoolName.KV)
        if pool is None or values is None or any(value is None for value in values):
            return False
        return all(self._write(pool, keys, lambda i: values[i], None))

    def _write(self, pool: PagePool, keys: Sequence[str], take: Take, extra_info: Any) -> list[bool]:
        """Store the pages that no store has. True for each one that one has then."""
        if self._off:
            return [False] * len(keys)
        began, before = time.monotonic(), _before(extra_info)
        deadline, size = began + self.settings.store.load_timeout, pool.layout.block_bytes
        names, root = pool.names(keys), pool.pages.root
        chain = [*([_key(before[-1])] if before else [root]), *map(_key, keys)]
        stored = [place >= 0 for place in self._store.find(names, search=self._search())]
        fresh = [i for i, there in enumerate(stored) if not there]
        for part in _parts(len(fresh), size + HEADER_BYTES):
            frames = []
            for i in (fresh[one] for one in part):
                page, memory = take(i), torch.empty(size + HEADER_BYTES, dtype=torch.uint8)
                if page.nbytes != size:
                    log.error("Foreword: a page of %d bytes is not one of %s", page.nbytes, pool.layout.group)
                    return stored
                memory[:size].view(page.dtype).view(page.shape).copy_(page)
                buffer = memoryview(cast(Any, memory.numpy()))
                frames.append(pool.pages.seal(root, chain[i + 1], chain[i], len(before) + i, buffer))
            kept = self._store.put(frames, deadline=deadline) == len(frames)
            found = [0] * len(part) if kept else self._store.find([one.name for one in frames], search=self._search())
            for one, place in zip(part, found, strict=True):
                stored[fresh[one]] = place >= 0
        self._note("backup", sum(stored[i] for i in fresh), size + HEADER_BYTES, began)
        return stored

    def _search(self) -> TierSearch:
        seconds = self.settings.store.lookup_timeout
        local = _LOCAL_SHARE * seconds
        return TierSearch(time.monotonic() + local + seconds, local, seconds)

    # The rest

    def clear(self) -> bool:
        """Erase the pages of this model and rank from all stores. False if some may be left."""
        deadline, removed, problems = time.monotonic() + _ERASE_SECONDS, 0, []
        for tier in (self._store.tiers[index] for index in self._store.writable):
            for pool in self._pools.values():
                try:
                    steps = list(erase_tier(tier, pool.layout.fingerprint, b"", None, deadline))
                except StoreError as error:
                    problems.append(f"{tier.label}: {error.message}")
                    continue
                removed += sum(one.removed for one in steps)
                problems += [f"{tier.label}: {one.problem.message}" for one in steps if one.problem is not None]
        for problem in dict.fromkeys(problems):
            log.error("Foreword: not every page is erased: %s", problem)
        log.info("Foreword: %d pages are erased", removed)
        return not problems

    def get_stats(self) -> Any:
        """Counts of pages read and written since the last call, for SGLang's metrics; and those of the tiers, once a
        second."""
        from sglang.srt.observability.metrics_collector import StorageMetrics

        if time.monotonic() - self._shown > _METRICS_SECONDS:
            self._shown = time.monotonic()
            self._show_tiers()
        done = {kind: [calls.popleft() for _ in range(len(calls))] for kind, calls in self._done.items()}
        rates = {kind: [pages for pages, _ in calls] for kind, calls in done.items()}
        speeds = {kind: [rate for _, rate in calls] for kind, calls in done.items()}
        return StorageMetrics(rates["prefetch"], rates["backup"], speeds["prefetch"], speeds["backup"])

    def _show_tiers(self) -> None:
        for series in series_of(TierCounters):
            for tier in self._store.tiers:
                for labels, amount in series.amounts(tier.counters, engine=True).items():
                    name = series.engine, tier.label, *labels
                    _counter(series).labels(tier.label, *labels).inc(amount - self._counted.get(name, 0.0))
                    self._counted[name] = amount

    def _note(self, kind: str, pages: int, length: int, began: float) -> None:
        """Count a call: its pages, and GB per second."""
        if pages:
            self._done[kind].append((pages, pages * length / 1e9 / max(time.monotonic() - began, 1e-9)))

    def weights_change(self) -> None:
        """From now on nothing is saved or found: the files do not say which weights the server computes with."""
        if not self._off:
            log.warning(
                "Foreword: weights are updated in place; pages are not stored or loaded until the server restarts"
            )
        self._off = True

    def close(self) -> None:
        self._store.close()


def _before(extra_info: Any) -> list[str]:
    """The keys of the pages before those of a call, if SGLang tells them (`hicache_storage_pass_prefix_keys`)."""
    return list(getattr(extra_info, "prefix_keys", None) or ())


def _key(key: str) -> bytes:
    """SGLang's hash, 64 hexadecimal digits, as bytes. Of another text its hash."""
    return bytes.fromhex(key) if _HASH.fullmatch(key) else sha256(key.encode()).digest()


def _parts(count: int, size: int) -> list[range]:
    """Divide `count` pages of this size into parts that fit into the staging memory."""
    step = max(1, _STAGING_BYTES // size)
    return [range(low, min(low + step, count)) for low in range(0, count, step)]


@functools.cache
def _counter(series: Series) -> Any:
    from prometheus_client import Counter

    return Counter(f"sglang:foreword_{series.engine}", series.text, ("tier", *series.labels(engine=True)))


_backends: weakref.WeakSet[ForewordStorage] = weakref.WeakSet()


def _follow_weights(backend: ForewordStorage) -> None:
    """Turn the backend off before weights are updated in place. SGLang tells backends nothing about that, so this wraps the
    methods of the class that does it."""
    for name in dir(SchedulerWeightUpdaterManager):
        method = getattr(SchedulerWeightUpdaterManager, name)
        if name.startswith("update_weights_from_") and not hasattr(method, "foreword"):
            setattr(SchedulerWeightUpdaterManager, name, _announced(method))
    _backends.add(backend)


def _announced(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def update(self: Any, *args: Any, **kwargs: Any) -> Any:
        for backend in list(_backends):
            backend.weights_change()
        return method(self, *args, **kwargs)

    update.foreword = True  # type: ignore[attr-defined]
    return update
