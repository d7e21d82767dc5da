"""SGLang's own unified radix tree, and the test kit of its storage tests, with Foreword as the storage backend, on a CPU.

`test_sglang.py` runs this in an environment with SGLang. The tree, its host pools, controllers, threads and hashes are
SGLang's. What needs a GPU is not: copies between the device's and the host's pool are copies of tensors, in the order of the
calls, and host memory is not pinned.
"""

from __future__ import annotations

import contextlib
import json
import random
import unittest
from array import array
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import sglang_case as case
import torch
from sglang.srt.managers import cache_controller
from sglang.srt.mem_cache import l2_transfer
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.srt.mem_cache.pool_host import common
from sglang.srt.mem_cache.pool_host.base import HostKVCache
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from sglang.test.kits.unified_radix_cache import fixtures
from sglang.test.kits.unified_radix_cache.config import CacheConfig
from sglang.test.kits.unified_radix_cache.fixtures import build_fixture, drop_hicache_atexit_pin, match_prefix
from sglang.test.kits.unified_radix_cache.storage import UnifiedRadixCacheStorageFixtures, aux_storage_key_transfers

WINDOWS = (ComponentType.FULL, ComponentType.SWA)
CONFIGS = {
    "dense, pages of 4": CacheConfig(page_size=4),
    "dense, pages of 64": CacheConfig(page_size=64, kv_size=1024, max_context_len=1024),
    "windows, pages of 4": CacheConfig(page_size=4, components=WINDOWS, sliding_window_size=4),
    "windows, pages of 16": CacheConfig(page_size=16, components=WINDOWS, sliding_window_size=32, kv_size=512),
}


def _rows(pool: Any, buffer: torch.Tensor, layer: int) -> torch.Tensor:
    """Keys or values of a layer in a host pool: one row per token."""
    return buffer[:, layer] if pool.layout == "page_first" else buffer[layer]


def _load(
    pool: Any, device: Any, host: torch.Tensor, there: torch.Tensor, layer: int, io: str, *, is_draft: bool = False
) -> None:
    if 0 <= layer < pool.layer_num:
        pool.device_k_buffers[layer][there] = _rows(pool, pool.k_buffer, layer)[host]
        pool.device_v_buffers[layer][there] = _rows(pool, pool.v_buffer, layer)[host]


def _backup(pool: Any, device: Any, host: torch.Tensor, there: torch.Tensor, io: str) -> None:
    for layer in range(pool.layer_num):
        _rows(pool, pool.k_buffer, layer)[host] = pool.device_k_buffers[layer][there]
        _rows(pool, pool.v_buffer, layer)[host] = pool.device_v_buffers[layer][there]


class _Stream:
    """A stream, or an event, of a device that has done everything when a call ends."""

    def __init__(self, *, enable_timing: bool = False) -> None:
        if enable_timing:
            raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        return lambda *given: True


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    device = ModuleType("device")
    vars(device).update(Stream=_Stream, Event=_Stream, current_stream=_Stream)
    vars(device)["stream"] = lambda one: contextlib.nullcontext()
    for module in (cache_controller, l2_transfer):
        monkeypatch.setattr(module, "device_module", device)
    monkeypatch.setattr(fixtures, "get_device", lambda: "cpu")
    monkeypatch.setattr(common, "_cuda_host_register", lambda *given: None)
    monkeypatch.setattr(
        HostKVCache, "pin_memory", property(lambda pool: False, lambda pool, value: None), raising=False
    )
    monkeypatch.setattr(MHATokenToKVPoolHost, "load_to_device_per_layer", _load)
    monkeypatch.setattr(MHATokenToKVPoolHost, "backup_from_device_all_layer", _backup)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *given: None)


class Tree(UnifiedRadixCacheStorageFixtures, unittest.TestCase):  # type: ignore[misc]
    """The steps of SGLang's tests, with Foreword's backend where they have SGLang's own over files."""

    __test__ = False

    def __init__(self, cfg: CacheConfig) -> None:
        super().__init__()
        self.cfg = cfg

    def runTest(self) -> None: ...

    def extra(self, storage_dir: Path) -> dict[str, Any]:
        return {
            "backend_name": "foreword", "module_path": "foreword.integrations.sglang", "class_name": "ForewordStorage",
            "interface_v1": 1, "fingerprint": case.FINGERPRINT, "store": f"disk://{storage_dir}?size=256MiB",
        }  # fmt: skip

    def _init_hicache(self, cache: Any, *, storage_dir: Any = None, **given: Any) -> None:
        override = get_parallel().override(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1)
        override.__enter__()
        self.addCleanup(override.__exit__, None, None, None)
        storage = {}
        if storage_dir is not None:
            extra = {**self.extra(storage_dir), "prefetch_threshold": 1, **(given.get("storage_extra") or {})}
            storage = {
                "backend": "dynamic",
                "backend_extra_config": json.dumps(extra),
                "prefetch_policy": "wait_complete",
            }
        server = ServerArgs(
            model_path="dummy", page_size=self.cfg.page_size, hicache_io_backend="kernel",
            hicache_host_memory_mode=given.get("host_memory_mode", "cache"), context_length=given.get("context_length"),
            **{f"hicache_storage_{name}": value for name, value in storage.items()},
        )  # fmt: skip
        server._mamba_cache_chunk_size = 64
        set_global_server_args_for_scheduler(server)
        cache.init_hicache(server, cache.cache_init_params)
        self.addCleanup(drop_hicache_atexit_pin, cache)
        self.addCleanup(cache.release_host_resources)
        cache.write_through_threshold, cache.load_back_threshold = 1 << 30, 0
        controller = cache.cache_controller
        controller.prefetch_capacity_limit = controller.mem_pool_host.size
        self.addCleanup(controller._stop_storage_threads)

    def found(self, folder: Path, tokens: list[int]) -> tuple[int, Any]:
        """How many tokens a tree that starts now loads from the store, and their keys and values on the device."""
        cache, allocator, _ = self._l3_consumer(folder)
        self._consume_prefetch(cache, tokens, CacheRequestHandle("request", 0))
        match = match_prefix(cache, tokens)
        if match.host_hit_length:
            self._load_back_node(cache, match.last_host_node)
        held = cache.path_device_indices(match_prefix(cache, tokens).last_device_node)
        cache.sanity_check()
        return match.host_hit_length, self._snapshot_full_kv(allocator, held)


@pytest.fixture(params=CONFIGS)
def tree(request: pytest.FixtureRequest) -> Iterator[Tree]:
    made = Tree(CONFIGS[request.param])
    yield made
    made.doCleanups()


def equal(found: Any, expected: Any) -> bool:
    """Whether what was found is the start of what was expected."""
    return all(torch.equal(one, other[: len(one)]) for one, other in zip(found, expected, strict=True))


def test_a_later_tree_loads_what_one_has_written(tree: Tree, tmp_path: Path) -> None:
    """Every page of a path is in the store, of each pool; a tree that starts later loads all tokens of it, with their bytes."""
    tokens = tree._buffer_swa_seq()
    expected = tree._l3_produce(tmp_path, tokens, marker=7)
    count, kv = tree.found(tmp_path, tokens)
    assert count == len(tokens) == len(kv[0]) and equal(kv, expected)
    cache, allocator, requests = tree._l3_consumer(tmp_path)
    tree._insert(cache, allocator, requests, tokens)
    leaf = match_prefix(cache, tokens).last_device_node
    hashes = tree._all_page_hashes(cache, leaf)
    assert tree._storage_exists_count(cache, hashes, aux_storage_key_transfers(cache, leaf)) == len(hashes)


def test_damaged_pages_end_a_hit(tree: Tree, tmp_path: Path) -> None:
    """A tree loads the tokens before a damaged page of the store at most, and no wrong byte."""
    tokens = tree._buffer_swa_seq(6)
    expected = tree._l3_produce(tmp_path, tokens, marker=7)
    pages = sorted(path for path in tmp_path.rglob("*") if path.is_file() and b"FWKV" in path.read_bytes()[-256:])
    assert len(pages) >= len(tokens) // tree.cfg.page_size
    counts = []
    for path in random.Random(1).sample(pages, 3):
        sound = path.read_bytes()
        path.write_bytes(bytes([sound[0] ^ 4]) + sound[1:])
        count, kv = tree.found(tmp_path, tokens)
        assert equal(kv, expected)
        counts.append(count)
    assert min(counts) < len(tokens)


def test_a_host_pool_that_is_a_buffer(tree: Tree, tmp_path: Path) -> None:
    """Pages go from the device to the store and back with `--hicache-host-memory-mode buffer_only`, for their tenant only."""
    tokens = tree._buffer_swa_seq()
    _, expected = tree._produce_buffer_l3(tmp_path, tokens, marker=9, cache_salt="ann")
    for salt in (None, "bob", "ann"):
        cache, allocator, _ = tree._build_buffer_hicache_fixture(tmp_path)
        request = CacheRequestHandle("request", 0)
        cache.prefetch_from_storage(request, cache.root_node_handle(), array("q", tokens), None, None, cache_salt=salt)
        tree._pump_hicache_until(
            cache, lambda cache=cache, request=request: cache.check_prefetch_progress(request), "nothing was fetched"
        )
        assert cache.buffer_pipeline.has_staged(request) == (salt == "ann")
        if salt == "ann":
            held = tree._consume_staged_prefetch(cache, request, cache_salt=salt)
            assert len(held) == len(tokens) and equal(tree._snapshot_full_kv(allocator, held), expected)
        cache.sanity_check()


def test_a_part_that_another_request_computes_meanwhile(tree: Tree, tmp_path: Path) -> None:
    """SGLang's own check: of fetched pages, those that are in the tree by then are dropped, and the others are right."""
    tree._assert_sibling_head_is_trimmed(tmp_path, tree._buffer_swa_seq(), False)


@pytest.mark.parametrize("missing", [True, False])
def test_ranks_agree(missing: bool, tmp_path: Path) -> None:
    """A window that one of several ranks does not find is used by none."""
    tree = Tree(CONFIGS["windows, pages of 4"])
    with mock.patch.object(tree, "_make_storage_dir", return_value=tmp_path):
        _, tokens = tree._setup_swa_tp_prefetch()
    cache, _, _ = tree._l3_consumer(tmp_path)
    cache.tp_world_size = 2
    tree._patch_tp_prefetch_sync(cache, drop_swa=missing)
    tree._consume_prefetch(cache, tokens, CacheRequestHandle("request", 0))
    assert match_prefix(cache, tokens).host_hit_length == (0 if missing else len(tokens))
    assert tree._swa_host_on_path(cache, tokens) != missing
    tree.doCleanups()


def test_attached_while_it_runs(tree: Tree, tmp_path: Path) -> None:
    """The backend can be attached and detached while a server runs (`/hicache/storage-backend`). What the store has is found
    when it is attached again."""
    tokens = tree._buffer_swa_seq()
    expected = tree._l3_produce(tmp_path, tokens, marker=7)
    cache, allocator, _ = build_fixture(tree.cfg)
    tree._init_hicache(cache)
    for _ in range(2):
        extra = {**tree.extra(tmp_path), "prefetch_threshold": 1}
        done, says = cache.attach_storage_backend("dynamic", json.dumps(extra), "dummy", "wait_complete")
        assert done, says
        limit = cache.cache_controller.mem_pool_host.size
        cache.cache_controller.prefetch_capacity_limit = limit
        done, says = cache.detach_storage_backend()
        assert done, says
    cache.attach_storage_backend("dynamic", json.dumps(extra), "dummy", "wait_complete")
    cache.cache_controller.prefetch_capacity_limit = limit
    tree._consume_prefetch(cache, tokens, CacheRequestHandle("request", 0))
    match = match_prefix(cache, tokens)
    assert match.host_hit_length == len(tokens)
    tree._load_back_node(cache, match.last_host_node)
    held = cache.path_device_indices(match_prefix(cache, tokens).last_device_node)
    assert equal(tree._snapshot_full_kv(allocator, held), expected)
