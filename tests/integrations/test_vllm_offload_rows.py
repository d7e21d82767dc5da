"""Blocks between rows of memory and stores (`row_jobs.py`), and what they are called (`block_names.py`)."""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm_stub import stubbed_vllm

from foreword.blocks.layout import Layout, key_of
from foreword.blocks.salt import Salt
from foreword.errors import ModelUnsupported, StoreUnavailable
from foreword.integrations.vllm_offload.block_names import BlockGroup, RequestBlocks
from foreword.integrations.vllm_offload.row_jobs import EndedJob, RowJobs
from foreword.store.base import Name
from foreword.store.frame import Frame, frame
from foreword.store.memory.memory_store import MemoryStore
from foreword.store.tiered import TieredStore
from foreword.store.urls import open_store
from foreword.store.wrappers import StoreWrapper

ROW, ROWS, WITHIN = 4096, 24, 30.0
MODEL = bytes(range(32))


def groups(row: int = ROW) -> dict[int, BlockGroup]:
    """Two groups, of which the second has blocks of twice the tokens."""
    layouts = [
        Layout(MODEL, size, (), "uint8", order="vllm-offload", group=f"{number}", opaque_bytes=row)
        for number, size in enumerate((32, 64))
    ]
    return {number: BlockGroup(layout, layout.block_size, 16) for number, layout in enumerate(layouts)}


def blocks(seed: int = 1, count: int = 64, **how: Any) -> RequestBlocks:
    """A request with as many of vLLM's block hashes."""
    draw = np.random.default_rng(seed)
    request = SimpleNamespace(block_hashes=[draw.bytes(32) for _ in range(count)])
    given = {"salt": Salt(), "inputs": (), "inputs_tokens": 16, "version": b"", **how}
    return RequestBlocks(groups(), request, **given)


def keys(one: RequestBlocks, count: int, group: int = 0) -> list[tuple[bytes, int]]:
    """vLLM's keys of the first blocks of a group, and where they end."""
    step = one.groups[group].chunk // 16
    return [
        (one.request.block_hashes[(number + 1) * step - 1] + group.to_bytes(4, "big"), (number + 1) * step * 16)
        for number in range(count)
    ]


class Gated(StoreWrapper):
    """Calls of one kind wait while the gate is shut."""

    def __init__(self, inner: MemoryStore, kind: str) -> None:
        super().__init__(inner)
        self.blocking = True
        self._kind = kind
        self.gate, self.reached = threading.Event(), threading.Event()

    def _wait(self, kind: str) -> None:
        if kind == self._kind:
            self.reached.set()
            assert self.gate.wait(WITHIN)

    def put(self, frames: Sequence[Frame], *, deadline: float) -> int:
        self._wait("put")
        return super().put(frames, deadline=deadline)

    def get(self, names: Sequence[Name], buffers: Sequence[memoryview], *, deadline: float) -> list[int]:
        self._wait("get")
        return super().get(names, buffers, deadline=deadline)


class Failing(StoreWrapper):
    """A store that fails whatever is asked of it."""

    def put(self, frames: Sequence[Frame], *, deadline: float) -> int:
        raise StoreUnavailable("the device is gone")

    def get(self, names: Sequence[Name], buffers: Sequence[memoryview], *, deadline: float) -> list[int]:
        raise StoreUnavailable("the device is gone")


Made = Callable[..., tuple[RowJobs, Any, TieredStore]]


@pytest.fixture
def make() -> Iterator[Made]:
    """Makes jobs over rows with drawn bytes. Arguments: a store, and the bytes of the queue."""
    made: list[tuple[RowJobs, TieredStore]] = []

    def build(store: Any = None, queue: int = ROWS * ROW, **how: Any) -> tuple[RowJobs, Any, TieredStore]:
        tiers = store if isinstance(store, TieredStore) else TieredStore([store or memory()])
        rows = np.random.default_rng(7).integers(0, 256, (ROWS, ROW), np.uint8)
        jobs = RowJobs(tiers, rows, queue, WITHIN, **how)
        made.append((jobs, tiers))
        return jobs, rows, tiers

    yield build
    for jobs, tiers in made:
        jobs.close(0.0)
        tiers.close()


def memory() -> MemoryStore:
    return MemoryStore(1 << 20)


def ended(jobs: RowJobs, count: int) -> dict[int, EndedJob]:
    """The jobs that have ended, once there are as many."""
    found: dict[int, EndedJob] = {}
    until = time.monotonic() + WITHIN
    while len(found) < count:
        assert time.monotonic() < until, "a job did not end"
        found |= {one.number: one for one in jobs.take_ended()}
        threading.Event().wait(0.001)
    return found


def save(jobs: RowJobs, one: RequestBlocks, count: int, number: int = 1, first: int = 0) -> list[tuple[bytes, int]]:
    """Ask for a save of the first blocks of a request, which lie in rows from `first` on."""
    chosen = keys(one, count)
    jobs.save(number, [one.header(*key) for key in chosen], range(first, first + count))
    return chosen


def test_rows_come_back(make: Made, tmp_path: Path) -> None:
    """Rows that were saved are loaded into other rows, byte for byte, also by another process's store in the same folder; what
    was never saved is not, and its row stays as it is."""
    url = f"disk://{tmp_path}/kv?size=64MiB"
    layouts = [one.layout for one in groups().values()]
    jobs, rows, store = make(open_store([url], layouts[0], more_layouts=layouts[1:]))
    one, before = blocks(), None
    chosen = save(jobs, one, 6)
    assert ended(jobs, 1)[1].kept == [True] * 6
    before = rows.copy()
    assert jobs.close(WITHIN)
    store.close()
    again, rows, _ = make(open_store([url], layouts[0], more_layouts=layouts[1:]))
    untouched = rows[17].copy()
    again.load(2, [one.name(*key) for key in (*chosen, *keys(blocks(2), 1))], range(11, 18))
    assert ended(again, 1)[2].kept == [True] * 6 + [False]
    assert (rows[11:17] == before[:6]).all() and (rows[17] == untouched).all()


def test_what_vllm_did_not_write_is_not_saved(make: Made) -> None:
    """Parts of a row that hold what was there before are saved as zeros, of the groups that have such parts and no others, and
    vLLM's row stays as it is."""
    parts = [slice(100, 200), slice(ROW - 50, ROW)]
    jobs, rows, _ = make(unwritten={1: parts})
    before, one = rows.copy(), blocks()
    chosen = keys(one, 2) + keys(one, 2, 1)
    jobs.save(1, [one.header(*key) for key in chosen], range(4))
    assert ended(jobs, 1)[1].kept == [True] * 4 and (rows == before).all()
    jobs.load(2, [one.name(*key) for key in chosen], range(10, 14))
    assert ended(jobs, 1)[2].kept == [True] * 4
    for part in parts:
        before[2:4, part] = 0
    assert (rows[10:14] == before[:4]).all()


LAYERS = ([f"window {n}" for n in range(4)], [f"full {n}" for n in range(3)])


def offloading(*layers: Sequence[str], ranks: int = 1, per_chunk: int = 1, **more: Any) -> Any:
    """vLLM's `OffloadingConfig` of groups with these layers, whose pages have 100 bytes; rows are padded to 4 KiB."""
    parallel = SimpleNamespace(world_size=ranks, pp_size=1)
    groups = [SimpleNamespace(group_id=number, layer_names=names) for number, names in enumerate(layers)]
    room = 100 * max(map(len, layers))
    given = {"replicated_layout": False, "canonical_layout": False, "kv_cache_layout": "LBHNC", **more}
    given["worker_kv_bytes_per_block"] = room
    cache = SimpleNamespace(blocks_per_chunk=per_chunk)
    return SimpleNamespace(groups=groups, parallel=parallel, cache=cache, **given)


def kv_caches(*layers: Sequence[str], outer: bool = False, kind: Any = SimpleNamespace, real: int = 100) -> Any:
    """vLLM's `KVCacheConfig`: blocks of all layers one behind the other if `outer`, else layers of all blocks."""
    most = 100 * max(map(len, layers))
    spec = kind()
    spec.page_size_bytes, spec.real_page_size_bytes = 100, real
    strides = {"layer_stride": 100, "block_stride": most} if outer else {"layer_stride": 10_000, "block_stride": 100}
    tensors = [SimpleNamespace(layers=list(names), **strides) for names in layers]
    return SimpleNamespace(
        kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for _ in layers], kv_cache_tensors=tensors
    )


def test_which_parts_of_a_row_are_not_written() -> None:
    """A group with fewer layers leaves the end of each rank's part of a row, padded pages their ends, and what lies behind the
    ranks is nobody's, in either order of layers and blocks. One full-attention group fills rows, of several blocks, too. Where
    it cannot be told the start ends."""
    with stubbed_vllm():
        module: Any = importlib.import_module("foreword.integrations.vllm_offload.row_parts")
        parts = module.unwritten_parts
        for outer in (False, True):
            shape = kv_caches(*LAYERS, outer=outer)
            order = "BLHNC" if outer else "LBHNC"
            assert parts(offloading(*LAYERS, kv_cache_layout=order), shape, 400) == {1: (slice(300, 400),)}
            assert parts(offloading(*LAYERS, ranks=2, kv_cache_layout=order), shape, 4096) == {
                0: (slice(800, 4096),),
                1: (slice(300, 400), slice(700, 4096)),
            }
        mixed = kv_caches(*LAYERS, outer=True)
        mixed.kv_cache_tensors[1].layer_stride = 80
        assert parts(offloading(*LAYERS, kv_cache_layout="BLNHC"), mixed, 400) == {1: (slice(240, 400),)}
        shape = kv_caches(["a", "b"], ["c", "d"], real=70)
        assert parts(offloading(["a", "b"], ["c", "d"]), shape, 200)[0] == (slice(70, 100), slice(170, 200))
        kind = type("Full", (module.FullAttentionSpec,), {"__init__": lambda _: None})
        one = offloading(LAYERS[0], per_chunk=4)
        assert not parts(one, kv_caches(LAYERS[0], kind=kind), 4096)
        windowed = kv_caches(LAYERS[0])
        assert not parts(offloading(LAYERS[0]), windowed, 4096) and not parts(offloading(LAYERS[0]), None, 4096)
        both = kv_caches(*LAYERS)
        refused = [
            (one, windowed), (offloading(*LAYERS, per_chunk=2), both), (offloading(*LAYERS), None),
            (offloading(*LAYERS, canonical_layout=True), both), (offloading(*LAYERS, kv_cache_layout="BHLNC"), both),
            (offloading(*LAYERS), mixed), (offloading(*LAYERS, kv_cache_layout="BLHNC"), kv_caches(LAYERS[0], ["other"])),
            (offloading(*LAYERS), SimpleNamespace(**vars(both), hisparse_host_num_blocks=4)),
        ]  # fmt: skip
        for config, caches in refused:
            with pytest.raises(ModelUnsupported):
                parts(config, caches, 4096)


def test_a_block_of_another_size_is_a_miss(make: Made) -> None:
    """A sound frame under the right name that is no row's is not loaded, and its row stays as it is."""
    jobs, rows, store = make()
    one, before = blocks(), rows.copy()
    header = one.header(*keys(one, 1)[0])
    short = replace(header, length=ROW // 2, raw_length=ROW // 2)
    assert store.put([frame(short, bytes(ROW // 2))], deadline=time.monotonic() + WITHIN) == 1
    jobs.load(1, [header.name], [0])
    assert ended(jobs, 1)[1].kept == [False] and (rows == before).all()


@pytest.mark.parametrize("at", [0, ROW // 2, ROW - 1, ROW + 10, ROW + 170])
def test_damage_is_a_miss(make: Made, at: int) -> None:
    """A block with one flipped bit, in its payload or its header, is not loaded, is counted, and leaves its row as it is."""

    class Flipping(StoreWrapper):
        def get(self, names: Sequence[Name], buffers: Sequence[memoryview], *, deadline: float) -> list[int]:
            found = super().get(names, buffers, deadline=deadline)
            for name, buffer in zip(names, buffers, strict=True):
                buffer[at] ^= 4 * (name == wrong)
            return found

    one = blocks()
    wrong = one.name(*keys(one, 2)[1])
    jobs, rows, store = make(Flipping(memory()))
    chosen = save(jobs, one, 3)
    ended(jobs, 1)
    before = rows.copy()
    jobs.load(2, [one.name(*key) for key in chosen], range(10, 13))
    assert ended(jobs, 1)[2].kept == [True, False, True]
    assert (rows[10] == before[0]).all() and (rows[11] == before[11]).all() and (rows[12] == before[2]).all()
    assert sum(store.tiers[0].counters.bad.values()) == 1


def test_queue_has_a_bound(make: Made) -> None:
    """While the store stands still, asking for saves returns; the rows that wait stay within the bound; what has no room is
    dropped from the end of its job, which ends all the same."""
    gated = Gated(memory(), "put")
    jobs, _, _ = make(gated, queue=8 * ROW)
    save(jobs, blocks(1), 6, number=1)
    assert gated.reached.wait(WITHIN)
    save(jobs, blocks(2), 6, number=2, first=6)
    save(jobs, blocks(3), 6, number=3, first=12)
    assert jobs.queued_bytes == 8 * ROW and jobs.dropped == 10
    gated.gate.set()
    found = ended(jobs, 3)
    assert [sum(found[number].kept) for number in (1, 2, 3)] == [6, 2, 0]
    assert found[2].kept[:2] == [True, True] and jobs.queued_bytes == 0


def test_jobs_end_where_the_store_fails(make: Made) -> None:
    """Every job ends, with nothing kept, and no row is changed."""
    jobs, rows, _ = make(Failing(memory()))
    before, one = rows.copy(), blocks()
    chosen = save(jobs, one, 4, number=1)
    jobs.load(2, [one.name(*key) for key in chosen], range(8, 12))
    found = ended(jobs, 2)
    assert not any(found[1].kept) and not any(found[2].kept) and (rows == before).all()


def test_drain_ends_all_jobs(make: Made) -> None:
    """A drain waits for the copy that runs, ends what waits without one, and leaves no job and no row in use."""
    gated = Gated(memory(), "put")
    jobs, _, _ = make(gated)
    save(jobs, blocks(1), 2, number=1)
    assert gated.reached.wait(WITHIN)
    one = blocks(2)
    save(jobs, one, 2, number=2, first=2)
    drained = threading.Thread(target=jobs.drain)
    drained.start()
    gated.gate.set()
    drained.join(WITHIN)
    assert not drained.is_alive()
    found = {job.number: job.kept for job in jobs.take_ended()}
    assert found == {1: [True, True], 2: [False, False]} and jobs.queued_bytes == 0
    save(jobs, one, 2, number=3, first=2)
    assert ended(jobs, 1)[3].kept == [True, True]


def test_end_writes_what_waits_and_lets_go_of_the_rows(make: Made) -> None:
    """At the end the queue is written. A store that hangs is not waited for beyond the time given, and what it brings later is
    not copied: the memory of the rows can be released."""
    jobs, _, store = make()
    one = blocks()
    chosen = save(jobs, one, 5)
    assert jobs.close(WITHIN)
    assert store.present([one.name(*key) for key in chosen], deadline=time.monotonic() + WITHIN) == [True] * 5
    gated = Gated(memory(), "get")
    view = memoryview(bytearray(ROWS * ROW))
    rows = np.asarray(view).reshape(ROWS, ROW)
    tiers = TieredStore([gated])
    hung = RowJobs(tiers, rows, ROWS * ROW, WITHIN)
    del rows
    save(hung, one, 2, number=1)
    ended(hung, 1)
    hung.load(2, [one.name(*key) for key in chosen[:2]], range(2))
    assert gated.reached.wait(WITHIN)
    hung.close(0.0)
    view.release()
    gated.gate.set()
    assert ended(hung, 1)[2].kept == [False, False]
    tiers.close()


def test_names_say_whose_blocks_they_are() -> None:
    """A name changes with the tenant, the client's salt, the version of the weights, the group, vLLM's hash, and media up to
    the block's end; media behind it change nothing. Blocks of a tenant have its prefix."""
    one, [key] = blocks(), keys(blocks(), 1)
    name = one.name(*key)
    others = [
        blocks(salt=Salt(b"tenant")), blocks(salt=Salt(b"", b"client" + bytes(10))), blocks(version=b"two"),
        blocks(inputs=[b"image"]), blocks(inputs=[b"", b"image"]),
    ]  # fmt: skip
    names = [other.name(*key) for other in others] + [one.name(*keys(one, 1, 1)[0]), one.name(*keys(one, 2)[1])]
    assert len({name, *names}) == 8
    assert blocks(inputs=[b"", b"", b"image"]).name(*key) == name
    assert others[0].name(*key)[16:28] == Salt(b"tenant").prefix
    assert key_of(others[0].name(*key)) != key_of(name)


def test_chains_of_blocks() -> None:
    """Each block's header names the block before it in its group, and the first the root of the tenant's chains."""
    one = blocks(salt=Salt(b"tenant"))
    for group in (0, 1):
        headers = [one.header(*key) for key in keys(one, 5, group)]
        assert [header.depth for header in headers] == list(range(5))
        assert all(after.parent == before.key for before, after in pairwise(headers))
        assert headers[0].parent[:16] == headers[0].root == Salt(b"tenant").digest
        assert [header.name for header in headers] == [one.name(*key) for key in keys(one, 5, group)]


def test_blocks_that_are_looked_up_together() -> None:
    """A lookup asks for the blocks near the one that vLLM asks for, as far as their hashes are known, and for one that ends
    within a block, too."""
    one = blocks(count=64)
    key, end = keys(one, 1)[0]
    assert one.together(key, end) == dict(keys(one, 32))
    partial = one.request.block_hashes[2] + bytes(4)
    assert one.together(partial, 48) == {partial: 48} | dict(keys(one, 32))
    assert one.header(partial, 48).depth == 1


def test_settings() -> None:
    """Settings that the tier does not have are refused by name, as are stores and codecs that it cannot use."""
    with stubbed_vllm():
        from foreword.errors import ConfigError
        from foreword.integrations.vllm_offload.offload_identity import read_settings

        assert read_settings({"store": ["disk:///tmp/kv"], "flush_seconds": 3}).store.flush_seconds == 3
        for given, word in (
            ({"store": ["disk:///tmp/kv"], "trust_unmeasurd": True}, "trust_unmeasured"),
            ({"store": ["disk:///tmp/kv?codec=lossless"]}, "codec="),
            ({"store": ["disk:///tmp/kv"], "transfer": {}}, "transfer"),
            ({}, "store"),
        ):
            with pytest.raises(ConfigError, match=word):
                read_settings(given)


def test_versions_of_the_weights() -> None:
    """Another version of the weights gives a request's blocks other names, and what was found is forgotten."""
    one, key = blocks(), keys(blocks(), 1)[0]
    before = one.name(*key)
    one.found[key[0]] = True
    running = one.found
    one.begin(b"two")
    running[key[0]] = True  # a lookup that has begun before ends
    assert not one.found and one.name(*key) != before == replace(one, version=b"").name(*key)


def test_changed_weights_under_a_request_that_goes_on() -> None:
    """vLLM's cache was reset, and a request that had been preempted computes again without a word: when the weights change
    then, its KV is of the ones before, so nothing is saved or loaded until the cache is empty once more."""
    with stubbed_vllm():
        base: Any = importlib.import_module("vllm.v1.kv_offload.base")
        base.Medium = SimpleNamespace(STORAGE="storage")
        offload_tier = importlib.import_module("foreword.integrations.vllm_offload.offload_tier")
        tier = object.__new__(offload_tier.ForewordTier)
        used, cached = [1], dict[bytes, int]()
        pool = SimpleNamespace(
            num_gpu_blocks=8, get_num_free_blocks=lambda: 8 - used[0], cached_block_hash_to_block=cached
        )
        manager = SimpleNamespace(block_pool=pool)
        tier._core = SimpleNamespace(scheduler=SimpleNamespace(kv_cache_manager=manager))
        tier._version, tier._requests, tier._jobs, tier.degraded = offload_tier.WeightsVersion(), {}, None, ""
        tier.drain_jobs()
        tier.weights_changed()
        assert not tier._version.stale
        used[0], cached[b"hash"] = 3, 1
        tier.weights_changed()
        assert tier._version.stale
        used[0] = 1
        cached.clear()
        tier.drain_jobs()
        assert not tier._version.stale
