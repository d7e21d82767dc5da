"""Host pools of SGLang in CPU memory, pages with known bytes, and backends over them. Needs an environment with SGLang."""

from __future__ import annotations

import contextlib
import random
import sys
import threading
from array import array
from collections.abc import Iterator, Sequence
from hashlib import sha256
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.srt.mem_cache.device_pool_info import (
    KVBufferLayout,
    KVBuffers,
    MambaStateBufferInfo,
    MHABufferInfo,
    MLABufferInfo,
)
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.pool_host.group import HostPoolGroup, PoolEntry
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.runtime_context import get_context, get_parallel

from foreword.integrations.sglang import ForewordStorage

PAGE = 4  # tokens
SLOTS = 12  # pages of a host pool
FINGERPRINT = "ab" * 32
_CPU = torch.device("cpu")
# The base class of SGLang's test kit imports its benchmarks, which need this package.
sys.modules.setdefault("datasets", SimpleNamespace(load_dataset=None))  # type: ignore[arg-type]


def _pointers(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([one.data_ptr() for one in tensors], dtype=torch.uint64)


def mha(layout: str = "page_first", dtype: torch.dtype = torch.bfloat16, page: int = PAGE, **more: int) -> Any:
    """Keys and values: two layers, two heads, 8 elements. `start`: the first layer."""
    start, heads = more.get("start", 0), more.get("heads", 2)
    k, v = (tuple(torch.zeros(SLOTS * page, heads, 8, dtype=dtype) for _ in range(2)) for _ in range(2))
    buffers = KVBuffers(k=k, v=v, k_data_ptrs=_pointers(k), v_data_ptrs=_pointers(v), layout=KVBufferLayout.NHD)
    shape = {"page_size": page, "head_num": heads, "head_dim": 8, "v_head_dim": 8, "dtype": dtype, "device": _CPU}
    info = MHABufferInfo(buffers=buffers, **shape)
    more = {"device_capacity_tokens": SLOTS * page, "start_layer": start, "end_layer": start + 2}
    return MHATokenToKVPoolHost(info, 1.0, 0, page, layout, False, **more)


def mla(layout: str = "page_first", dtype: torch.dtype = torch.bfloat16) -> Any:
    """Latent attention: two layers, 16 and 8 elements."""
    rows = tuple(torch.zeros(SLOTS * PAGE, 1, 24, dtype=dtype) for _ in range(2))
    shape = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "kv_cache_dim": 24, "page_size": PAGE}
    info = MLABufferInfo(
        buffers=rows, data_ptrs=_pointers(rows), layer_indices=(0, 1), device_layer_num=2, dtype=dtype, device=_CPU, **shape
    )  # fmt: skip
    layers = {"start_layer": 0, "end_layer": 2, "target_layer_num": 2}
    return MLATokenToKVPoolHost(info, 1.0, 0, PAGE, layout, False, device_capacity_tokens=SLOTS * PAGE, **layers)


def mamba(layout: str = "page_first") -> Any:
    """Recurrent states: two layers, in float32, with convolutions in bfloat16."""
    temporal, conv = torch.zeros(2, SLOTS, 3, 4), torch.zeros(2, SLOTS, 6, 3, dtype=torch.bfloat16)
    info = MambaStateBufferInfo(temporal=temporal, conv=(conv,))
    return MambaPoolHost(info, 1.0, 0, device_capacity=SLOTS, pin_memory=False, layout=layout)


def config(**given: Any) -> HiCacheStorageConfig:
    extra = {"fingerprint": FINGERPRINT, **given.pop("extra", {})}
    facts = {
        "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1, "is_mla_model": False,
        "enable_storage_metrics": False, "is_page_first_layout": True, "model_name": "tiny",
    }  # fmt: skip
    return HiCacheStorageConfig(**{**facts, **given}, extra_config=extra)


def backend(store: Any, kv: Any | None = None, pools: dict[PoolName, Any] | None = None, **given: Any) -> Any:
    """A backend over a store's URL or an open store, with host pools as SGLang registers them."""
    extra = {**given.pop("extra", {}), **({"store": store} if isinstance(store, str) else {})}
    made = ForewordStorage(config(extra=extra, **given), **({} if isinstance(store, str) else {"store": store}))
    made.register_mem_pool_host(mha() if kv is None else kv)
    made.register_mem_host_pool_v2(made.mem_pool_host, PoolName.KV)
    for name, pool in (pools or {}).items():
        made.register_mem_host_pool_v2(pool, name)
    made.on_host_pools_registered()
    return made


@contextlib.contextmanager
def controller(
    kv: Any, extra: dict[str, Any], pools: dict[PoolName, Any] | None = None, **server: Any
) -> Iterator[HiCacheController]:
    """SGLang's own cache controller with its threads, as in a server with `--hicache-storage-backend dynamic`; that for models
    with several kinds of layers if there are more pools."""
    extra = {
        "backend_name": "foreword", "module_path": "foreword.integrations.sglang", "class_name": "ForewordStorage", **extra
    }  # fmt: skip
    size, dtype = SLOTS * PAGE, kv.dtype
    ranks = get_parallel().override(tp_rank=0, pp_rank=0, attn_dcp_rank=0)
    with get_context().override_server_args(**server), ranks:
        device = MHATokenToKVPool(size, PAGE, dtype, 2, 8, 2, "cpu", False)
        allocator = TokenToKVPoolAllocator(size, dtype, "cpu", device, False)
        settings = {"storage_backend": "dynamic", "storage_backend_extra_config": extra, "prefetch_threshold": PAGE}
        entries = [PoolEntry(PoolName.KV, kv, device, lambda layer: layer, is_primary_index_anchor=True)]
        entries += [PoolEntry(name, pool, None, lambda layer: layer) for name, pool in (pools or {}).items()]
        kind, host = (HybridCacheController, HostPoolGroup(entries)) if pools else (HiCacheController, kv)
        made = kind(allocator, host, PAGE, None, threading.Event(), model_name="tiny", **settings)
        try:
            yield made
        finally:
            made.detach_storage_backend()


def prefetched(made: HiCacheController, key: RadixKey, windows: Sequence[PoolTransfer] = ()) -> torch.Tensor:
    """Prefetches as the scheduler does for a request with these tokens: where SGLang has loaded their pages in the host pool.
    `windows`: what the request needs of other pools."""
    handle = CacheRequestHandle("request", 0) if windows else "request"
    made.prefetch(handle, key, None, [], **({"extra_pools": list(windows)} if windows else {}))
    operation = made.prefetch_hit_queue.get(timeout=60)
    operation.host_indices = made.mem_pool_host.alloc(operation.storage_hit_count)
    made.prefetch_buffer.put(operation)
    loaded = 0
    while not (ack := made.ack_prefetch_queue.get(timeout=60)).completed_req:
        loaded = max(loaded, ack.completed_tokens or 0)
    return operation.host_indices[:loaded]


def tokens(count: int, **caller: str) -> RadixKey:
    """The tokens of a request. `caller`: its `cache_salt` and `extra_key`."""
    return RadixKey(array("q", range(count)), **caller)


def keys(count: int, chain: object = "a") -> list[str]:
    """The hashes of a chain's pages."""
    return [sha256(f"{chain}/{number}".encode()).hexdigest() for number in range(count)]


def content(pool: Any, key: str) -> torch.Tensor:
    """Content of the page with this key in a pool: bytes that follow from both."""
    flat = pool.get_dummy_flat_data_page()
    seed = f"{type(pool).__name__}/{key}"
    return torch.frombuffer(bytearray(random.Random(seed).randbytes(flat.nbytes)), dtype=torch.uint8).view(flat.dtype)


def slots(pool: Any, pages: Sequence[int]) -> torch.Tensor:
    """The host indices of these pages of a pool."""
    return torch.tensor([page * pool.page_size + token for page in pages for token in range(pool.page_size)])


def fill(pool: Any, names: Sequence[str], at: int = 0) -> torch.Tensor:
    """Put the pages' content into a pool, from page `at` on. Returns their indices."""
    indices = slots(pool, range(at, at + len(names)))
    for number, name in enumerate(names):
        pool.set_from_flat_data_page(int(indices[number * pool.page_size]), content(pool, name))
    return indices


def page_bytes(pool: Any, index: int) -> bytes:
    """The bytes of a page of a pool."""
    return bytes(pool.get_data_page(index, flat=True).contiguous().view(torch.uint8).numpy())


def holds(pool: Any, indices: torch.Tensor, names: Sequence[str]) -> list[bool]:
    """Whether the pages at these indices have the content of these keys."""
    starts = indices[:: pool.page_size].tolist()
    wanted = [bytes(content(pool, name).view(torch.uint8).numpy()) for name in names]
    return [page_bytes(pool, start) == one for start, one in zip(starts, wanted, strict=True)]


def blank(pool: Any) -> None:
    """Fill a pool with zeros: an eviction, or a new process."""
    empty = torch.zeros_like(pool.get_dummy_flat_data_page())
    for page in range(SLOTS):
        pool.set_from_flat_data_page(page * pool.page_size, empty)


def window(
    names: Sequence[str], pool: Any, indices: torch.Tensor | None, name: PoolName = PoolName.SWA
) -> PoolTransfer:
    """A transfer of the last pages of a prefix."""
    return PoolTransfer(name=name, keys=list(names), host_indices=indices, hit_policy=PoolHitPolicy.TRAILING_PAGES)
