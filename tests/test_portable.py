"""The portable layout: units that instances with other block sizes, ranks and packings read."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product

import pytest
import torch
import whole_loads
from hypothesis import given, settings
from hypothesis import strategies as st
from lazy_queues import LazyQueues
from torch import Tensor

from foreword.blocks.keys import chain_keys
from foreword.blocks.layout import LayerLayout, Layout, chain_prefix, key_of
from foreword.blocks.portable_units import portable_units
from foreword.blocks.resume import GroupKind, KVGroup
from foreword.conformance import soon
from foreword.engine.external_kv import EngineStores
from foreword.errors import ConfigError, ModelUnsupported
from foreword.integrations.vllm_extras.packing import cpu_planes, plain_planes
from foreword.offload.frame_copies import UnitCopyMaker, copy_compiled, copy_with_views
from foreword.offload.search import StoredGroup, find_resumable
from foreword.offload.staging import StagingArena
from foreword.offload.unit_group import UnitGroup
from foreword.store.base import Store
from foreword.store.codec import CodedStore, codec_named
from foreword.store.frame import HEADER_BYTES, Frame, read_header
from foreword.store.memory.memory_store import MemoryStore
from foreword.store.tiered import TieredStore, TierSearch

COPIES = [pytest.param(copy_with_views, id="views"), pytest.param(copy_compiled, id="compiled")]
ROOT = bytes(32)
DIM = 32
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def layout(block_size: int, heads: Sequence[int], shard: tuple[int, int] = (0, 1), dtype: str = "float32") -> Layout:
    return Layout(b"m" * 32, block_size, tuple(LayerLayout(n, 8, 4) for n in heads), dtype, order="native", shard=shard)


def packed(values: Tensor, t2: int, d2: int, order: Sequence[int]) -> Tensor:
    """A packed view `[rows, t1, t2, heads, d1, d2]` of `[rows, tokens, heads, dim]`. Its memory has the other axes in the given
    order, and gaps between rows."""
    rows, tokens, heads, dim = values.shape
    split = values.view(rows, tokens // t2, t2, heads, dim // d2, d2)
    axes = [1 + axis for axis in order]
    memory = split.permute(0, *axes).reshape(rows, -1)
    padded = torch.zeros(rows, memory.shape[1] + 16, dtype=values.dtype)
    padded[:, 8:-8] = memory
    inner = padded[:, 8:-8].unflatten(1, [split.shape[axis] for axis in axes])
    return inner.permute(0, *(1 + axes.index(axis) for axis in range(1, 6)))


@st.composite
def groups(draw: Callable[..., int]) -> tuple[list[Tensor], list[Tensor], int, int]:
    """Layers with K and V in random packings: their values, packed views, tokens and head units of a unit."""
    t2, unit, per_row = draw(st.sampled_from([1, 2, 16])), draw(st.sampled_from([16, 32])), draw(st.integers(1, 3))
    head_units, per_unit, rows = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(2, 5))
    dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
    random_order = random.Random(draw(st.integers(0, 1 << 30)))
    values, views = [], []
    for _ in range(draw(st.integers(1, 3))):
        d2 = draw(st.sampled_from([1, 2, 16]))
        dim = d2 * draw(st.integers(1, 5))
        shape = (rows, unit * per_row, head_units * per_unit, dim)
        values.append(torch.randint(-99, 99, shape).to(dtype))
        order = random_order.sample(range(5), 5)
        views.append(packed(values[-1], t2, d2, order))
    return values, views, unit, head_units


@pytest.mark.parametrize("make_copy", COPIES)
@settings(max_examples=80, deadline=None)
@given(group=groups(), seed=st.integers(0, 1 << 30))
def test_units_of_any_packing(
    group: tuple[list[Tensor], list[Tensor], int, int], seed: int, make_copy: UnitCopyMaker
) -> None:
    """By the functions for CPUs."""
    check_units(group, seed, make_copy)


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(group=groups(), seed=st.integers(0, 1 << 30))
def test_units_of_any_packing_on_a_device(group: tuple[list[Tensor], list[Tensor], int, int], seed: int) -> None:
    """By the kernel, on streams that run in any order."""
    pytest.importorskip("triton")
    check_units(group, seed, None)


def check_units(group: tuple[list[Tensor], list[Tensor], int, int], seed: int, make_copy: UnitCopyMaker | None) -> None:
    """A frame has its unit's K and V in the order of tokens, whatever the packing. Units that are loaded elsewhere have the
    same values there, and nothing else changes."""
    values, views, tokens, head_units = group
    staged = UnitGroup(views, tokens, head_units, make_copy)
    rows, row_tokens = values[0].shape[:2]
    per_row = row_tokens // tokens
    count = rows * per_row * head_units
    arena = StagingArena([staged], count, None if make_copy else LazyQueues(seed))
    order = random.Random(seed)
    first = order.randrange(count)
    units = list(range(first, order.randrange(first, count) + 1)) + order.sample(range(first), first // 2)
    slots = list(range(len(units)))
    arena.gather(units, slots)

    def of_unit(unit: int) -> tuple[int, slice, slice]:
        (row, piece), head = divmod(unit // head_units, per_row), unit % head_units
        heads = values[0].shape[2] // head_units
        return row, slice(piece * tokens, (piece + 1) * tokens), slice(head * heads, (head + 1) * heads)

    for unit, slot in zip(units, slots, strict=True):
        content = b"".join(value[of_unit(unit)].contiguous().view(torch.uint8).numpy().tobytes() for value in values)
        assert bytes(arena.buffer(slot)[:-HEADER_BYTES]) == content
    targets = order.sample(range(count), len(units))
    expected = [value.clone() for value in values]
    for unit, target in zip(units, targets, strict=True):
        for new, value in zip(expected, values, strict=True):
            new[of_unit(target)] = value[of_unit(unit)]
    arena.scatter(slots, targets)
    for view, new in zip(views, expected, strict=True):
        assert torch.equal(view.reshape(new.shape), new)


@pytest.mark.parametrize("make_copy", COPIES)
@pytest.mark.parametrize(("tokens", "heads"), [(24, 2), (16, 3), (8, 2)])
def test_units_that_cut_a_packing_are_refused(tokens: int, heads: int, make_copy: UnitCopyMaker) -> None:
    """Tensors that do not consist of whole units are an error: 32 tokens packed by 16, 4 heads."""
    with pytest.raises(ModelUnsupported, match="cannot be divided"):
        UnitGroup([torch.zeros(2, 2, 16, 4, 8, 1)], tokens, heads, make_copy)


def test_instances_of_other_sizes_share_one_layout() -> None:
    """Ranks of 1, 2 and 4, with blocks of 16 to 128 tokens, have the same units: each head unit has one layout, wherever it is.
    The native layouts of these instances all differ."""
    sizes, ranks = (16, 32, 64, 128), (1, 2, 4)
    made: dict[int, set[bytes]] = {}
    for size, count in product(sizes, ranks):
        units = [portable_units(layout(size, [4 // count, 8 // count], (rank, count))) for rank in range(count)]
        assert all(one.writes for one in units)
        for number, one in enumerate(found for rank in units for found in rank.layouts):
            made.setdefault(number, set()).add(one.fingerprint)
        assert {one.fingerprint for one in units[0].every} == {
            one.fingerprint for rank in units for one in rank.layouts
        }
        assert all(one.per_block * one.tokens == size for one in units)
    assert len(made) == 4 and all(len(prints) == 1 for prints in made.values())
    assert len(set.union(*made.values())) == 4


def test_units_of_replicated_heads() -> None:
    """Ranks that have the same KV heads read the same units, and one of them writes. So do all ranks with latent KV (MLA)."""
    two_heads = [portable_units(layout(32, [1], (rank, 4)), replicas=2) for rank in range(4)]
    alone = portable_units(layout(32, [2]))
    assert [one.layouts for one in two_heads] == [alone.layouts[:1]] * 2 + [alone.layouts[1:]] * 2
    assert [one.writes for one in two_heads] == [True, False, True, False]
    latent = [portable_units(layout(32, [1], (rank, 4)), replicas=4) for rank in range(4)]
    assert {one.layouts for one in latent} == {portable_units(layout(64, [1])).layouts}
    assert [one.writes for one in latent] == [True, False, False, False]


@pytest.mark.parametrize(
    ("heads", "shard", "options", "reason"),
    [
        ([4], (0, 1), {"unit_tokens": 24}, "divides the block size"),
        ([4], (0, 1), {"unit_tokens": 64}, "divides the block size"),
        ([4], (0, 1), {"unit_tokens": 0}, "divides the block size"),
        ([1], (0, 3), {"head_units": 2}, "multiple of 3"),
        ([2, 1], (0, 4), {"head_units": 2}, "multiple of 4"),
        ([1], (0, 4), {"replicas": 3}, "groups of 3"),
        ([4], (0, 1), {"head_units": 0}, "head_units"),
    ],
)
def test_sizes_that_have_no_whole_units(
    heads: list[int], shard: tuple[int, int], options: dict[str, int], reason: str
) -> None:
    """Blocks and ranks that do not consist of whole units are errors that say what to change."""
    with pytest.raises(ConfigError, match=reason):
        portable_units(layout(32, heads, shard), **options)


def cpu_place(packing: str, kind: str, token: int, dim: int, tokens: int, dims: int) -> int:
    """Where vLLM's CPU kernels for types of 16 bits keep an element in a head's plane, from their source."""
    if packing != "amx":
        return dim * tokens + token if kind == "k" else token * dims + dim
    if kind == "k":
        return (token // 16) * 16 * dims + (dim // 2) * 32 + (token % 16) * 2 + dim % 2
    return (dim // 16) * 16 * tokens + (token // 2) * 32 + (dim % 16) * 2 + token % 2


@pytest.mark.parametrize("packing", ["vec", "vec16", "amx"])
@pytest.mark.parametrize(("tokens", "dims"), [(32, 64), (64, 32)])
def test_packings_of_vllms_cpu_backend(packing: str, tokens: int, dims: int) -> None:
    """The packed views of vLLM's KV cache show each element where its kernel puts it."""
    rows, heads = 2, 3
    cache = torch.arange(rows * heads * tokens * 2 * dims).reshape(rows, heads, tokens, 2 * dims).short()
    memory = cache.view(rows, heads, 2, tokens * dims)
    planes = cpu_planes(cache, packing, dims)
    for number, (kind, plane) in enumerate(zip("kv", planes, strict=True)):
        shown = plane.reshape(rows, tokens, heads, dims)
        place = torch.tensor(
            [[cpu_place(packing, kind, i, j, tokens, dims) for j in range(dims)] for i in range(tokens)]
        )
        for row, head in product(range(rows), range(heads)):
            assert torch.equal(shown[row, :, head], memory[row, head, number][place])


def test_caches_that_are_not_packed() -> None:
    """K is the first part of the last dimension and V the rest; latent KV has no V. Any order of the memory will do."""
    cache = torch.randn(3, 32, 2, 12).transpose(1, 2)
    keys, values = plain_planes(cache, 8, 4)
    assert torch.equal(keys.reshape(3, 32, 2, 8), cache.transpose(1, 2)[..., :8])
    assert torch.equal(values.reshape(3, 32, 2, 4), cache.transpose(1, 2)[..., 8:])
    [latent] = plain_planes(cache, 12, 0)
    assert torch.equal(latent.reshape(3, 32, 2, 12), cache.transpose(1, 2))


@pytest.mark.parametrize(
    ("packing", "tokens", "dims"), [("neon", 32, 64), ("rvv", 32, 64), ("amx", 24, 64), ("amx", 32, 80)]
)
def test_packings_that_are_not_known(packing: str, tokens: int, dims: int) -> None:
    """A packing that is not known is refused, as are caches of another shape."""
    with pytest.raises(ModelUnsupported, match="does not support"):
        cpu_planes(torch.zeros(2, 1, tokens, 2 * dims), packing, dims)
    for wrong in (torch.zeros(2, 1, tokens, dims), torch.zeros(2, 2, tokens, 1, dims)):
        with pytest.raises(ModelUnsupported, match="KV cache of shape"):
            cpu_planes(wrong, "vec", dims)
        with pytest.raises(ModelUnsupported, match="KV cache of shape"):
            plain_planes(wrong, dims, dims)


class Rank:
    """A rank of an instance: K and V of two layers, packed like vLLM's `vec`, over a shared store."""

    def __init__(
        self, store: Store, kv: Sequence[Tensor], block_size: int, shard: tuple[int, int], replicas: int
    ) -> None:
        heads, blocks = kv[0].shape[1] * replicas // shard[1], len(kv[0]) // block_size
        own = Layout(b"m" * 32, block_size, (LayerLayout(heads, DIM, DIM),) * 2, "float32", order="vec", shard=shard)
        self.units = portable_units(own, unit_tokens=16, head_units=4, replicas=replicas)
        first = shard[0] // replicas * heads
        self.kv = [one[:, first : first + heads] for one in kv]
        self.caches = [torch.zeros(2 * blocks, heads, block_size, 2 * DIM) for _ in range(2)]
        planes = [plane for cache in self.caches for plane in cpu_planes(cache, "vec", DIM)]
        group = UnitGroup(planes, 16, len(self.units.layouts))
        self.staging = StagingArena([group], 256)
        self.offload = EngineStores(
            TieredStore([store]), self.staging, [self.units], lookup_timeout=60.0, load_timeout=60.0
        )
        self.blocks = list(range(1, 2 * blocks, 2))  # every other one
        self.planes = planes

    def tokens(self) -> list[Tensor]:
        """K and V `[tokens, heads, dim]` of each layer, from the cache."""
        heads = self.kv[0].shape[1]
        return [plane[self.blocks].reshape(-1, heads, DIM) for plane in self.planes]

    def compute(self) -> None:
        for plane, values in zip(self.planes, self.kv, strict=True):
            target = plane[self.blocks]
            for number, block in enumerate(self.blocks):
                plane[block] = values.view(len(self.blocks), *target.shape[1:3], *target.shape[3:])[number]

    def save(self, keys: Sequence[bytes]) -> None:
        if self.units.writes:
            self.offload.save(ROOT, keys, ROOT, 0, self.blocks)
            assert self.offload.flush(60.0)

    def load(self, keys: Sequence[bytes]) -> int:
        """How many frames were loaded."""
        found = whole_loads.load(self.offload, ROOT, keys, self.blocks)
        wait_for(lambda: found.finished)
        return found.loaded


def wait_for(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60.0
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def instance(store: Store, kv: Sequence[Tensor], block_size: int, ranks: int) -> list[Rank]:
    replicas = max(ranks // kv[0].shape[1], 1)
    return [Rank(store, kv, block_size, (rank, ranks), replicas) for rank in range(ranks)]


@pytest.mark.parametrize("heads", [4, 2, 1])
@pytest.mark.parametrize(
    ("writer", "reader"), [((32, 1), (64, 2)), ((64, 2), (32, 1)), ((16, 4), (128, 1)), ((128, 1), (16, 4))]
)
def test_unequal_instances_share_a_store(heads: int, writer: tuple[int, int], reader: tuple[int, int]) -> None:
    """Blocks that an instance of one block size and number of ranks saved are loaded by one of another: all of them, in the
    right places. Heads that several ranks have are written once."""
    draw = torch.Generator().manual_seed(7)
    kv = [torch.randn(256, heads, DIM, generator=draw) for _ in range(4)]
    keys = chain_keys(ROOT, range(256), 16)
    store = MemoryStore(1 << 22)
    written = instance(store, kv, *writer)
    for rank in written:
        rank.compute()
        rank.save(keys)
    units = math.gcd(4, heads)
    assert store.status().blocks == 256 // 16 * units
    for rank in instance(store, kv, *reader):
        assert rank.load(keys) == len(keys) * len(rank.units.layouts)
        for loaded, expected in zip(rank.tokens(), rank.kv, strict=True):
            assert torch.equal(loaded, expected)
        assert not any(cache[::2].any() for cache in rank.caches)


def test_units_of_others_are_misses() -> None:
    """A search finds a position only if all head units of all its tokens are there. A unit of another head, or at another
    position, under a wanted name is a miss."""
    kv = [torch.randn(128, 4, DIM) for _ in range(4)]
    keys = chain_keys(ROOT, range(128), 16)
    store = MemoryStore(1 << 22)
    [alone] = instance(store, kv, 32, 1)
    alone.compute()
    alone.save(keys)
    layouts = tuple(layout.fingerprint for layout in alone.units.every)
    group = StoredGroup(KVGroup(GroupKind.FULL, 32), layouts, 2, divided=True)

    def position() -> int:
        return find_resumable(TieredStore([store]), [group], ROOT, keys, 0, 128, TierSearch(soon())).position

    assert position() == 128
    prefixes = [chain_prefix(layout, ROOT) for layout in layouts]
    names = [prefixes[3] + keys[5], prefixes[0] + keys[2]]
    for name, expected in zip(names, (64, 32), strict=True):
        assert store.delete([name], deadline=soon()) == 1
        assert position() == expected
    wrong = memoryview(bytearray(HEADER_BYTES + alone.units.layouts[0].block_bytes))
    for source, name in zip((prefixes[2] + keys[5], prefixes[0] + keys[3]), names, strict=True):
        assert store.get([source], [wrong], deadline=soon()) == [len(wrong)]
        header = replace(read_header(wrong), layout=name[:16], key=key_of(name))
        store.put([Frame(header, wrong)], deadline=soon())
    assert position() == 128
    assert alone.load(keys) == 2 * 4


def test_codecs_encode_all_head_units() -> None:
    """A codec of a tier encodes the units of all heads, a lossy one too, and the units come back."""
    kv = [torch.randn(64, 4, DIM) for _ in range(4)]
    keys = chain_keys(ROOT, range(64), 16)
    inner = MemoryStore(1 << 22)
    plain = Rank(inner, kv, 32, (0, 1), 1)
    lossy = [replace(layout, loss="int8") for layout in plain.units.every]
    store = CodedStore(inner, codec_named("int8"), *lossy)
    plain.units = replace(plain.units, layouts=tuple(lossy), every=tuple(lossy))
    plain.offload = EngineStores(TieredStore([store]), plain.staging, [plain.units], lookup_timeout=60.0)
    plain.compute()
    plain.save(keys)
    assert store.status().notes["codec_encoded"] == store.status().blocks == 4 * 4
    for plane in plain.planes:
        plane.zero_()
    assert plain.load(keys) == 4 * 4
    for loaded, expected in zip(plain.tokens(), kv, strict=True):
        assert torch.allclose(loaded, expected, atol=0.05)
