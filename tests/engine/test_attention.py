"""Paged attention against its definition in float64, for any placement of blocks and any chunks."""

from __future__ import annotations

import itertools
import math
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import tiny
import torch
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from foreword.blocks.layout import LayerLayout
from foreword.engine.attention import metadata
from foreword.engine.attention.backend import StepAttention
from foreword.engine.attention.cpu_backend import CpuLayers
from foreword.engine.attention.kv_tensors import PagedLayer
from foreword.engine.attention.metadata import (
    AttentionMetadata,
    AttentionParams,
    QueryChunk,
    find_kv_slots,
    shared_tokens,
)
from foreword.engine.attention.torch_backend import merge
from foreword.engine.kernels import native
from foreword.entrypoints.llm import LLM

CPU = torch.device("cpu")
EXACT = {"rtol": 1e-4, "atol": 2e-5}


def pieces(num_blocks: int, seed: int) -> list[int]:
    """All blocks, out of order, but for a few short and long rows."""
    chance = random.Random(seed)
    left, found = list(range(num_blocks)), []
    while left:
        length = chance.choice((1, 1, 2, 6, 20))
        found.append(left[:length])
        left = left[length:]
    chance.shuffle(found)
    return [block for piece in found for block in piece]


@dataclass
class Case:
    """A layer, and the sequences of a step: `(start, count)` each, of which the first `shared` tokens are common to those of a
    family: every `families`-th sequence."""

    chunks: list[tuple[int, int]]
    shared: int = 0
    families: int = 1
    block_size: int = 4
    kv_heads: int = 2
    groups: int = 2
    key_dim: int = 8
    value_dim: int = 8
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    in_a_row: bool = False
    share: bool = True
    seed: int = 0
    scale: float = 0.4
    dtype: torch.dtype = torch.float32
    # Made from the above:
    tables: list[list[int]] = field(default_factory=list)
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    queries: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        noise = torch.Generator().manual_seed(self.seed)
        size, heads = self.block_size, self.kv_heads * self.groups
        whole = self.shared // size
        lengths = [start + count for start, count in self.chunks]
        needed = [max(-(-length // size) - whole, 0) for length in lengths]
        self.num_blocks = whole * self.families + sum(needed) + 3
        free = list(range(self.num_blocks)) if self.in_a_row else pieces(self.num_blocks, self.seed)
        families = []
        for _ in range(self.families):
            common, free = free[:whole], free[whole:]
            first_k = torch.randn(whole * size, self.kv_heads, self.key_dim, generator=noise)
            first_v = torch.randn(whole * size, self.kv_heads, self.value_dim, generator=noise)
            families.append((common, first_k, first_v))
        for number, (length, count) in enumerate(zip(lengths, needed, strict=True)):
            common, first_k, first_v = families[number % self.families]
            self.tables.append(common + free[:count])
            free = free[count:]
            k = torch.randn(length, self.kv_heads, self.key_dim, generator=noise)
            v = torch.randn(length, self.kv_heads, self.value_dim, generator=noise)
            self.keys.append(torch.cat([first_k, k[len(first_k) :]])[:length])
            self.values.append(torch.cat([first_v, v[len(first_v) :]])[:length])
        self.queries = [torch.randn(count, heads, self.key_dim, generator=noise) for _, count in self.chunks]
        self.queries, self.keys, self.values = (
            [rows.to(self.dtype) for rows in each] for each in (self.queries, self.keys, self.values)
        )
        self.sink_values = torch.randn(heads, generator=noise) if self.sinks else None

    def metadata(self, *, share: bool = True) -> AttentionMetadata:
        """The step's chunks; every token of them is written."""
        chunks, row = [], 0
        for (start, count), blocks in zip(self.chunks, self.tables, strict=True):
            chunks.append(QueryChunk(row, start, count, blocks, start))
            row += count
        return AttentionMetadata(chunks, self.block_size, share_prefixes=share)

    def layer(self) -> PagedLayer:
        """The paged tensors before the step. Slots that were not written are NaN, so reading them fails the test."""
        layout = LayerLayout(self.kv_heads, self.key_dim, self.value_dim)
        paged = PagedLayer(layout, self.dtype, self.num_blocks, self.block_size, CPU)
        paged.k.fill_(math.nan)
        paged.v.fill_(math.nan)
        for (start, _), blocks, k, v in zip(self.chunks, self.tables, self.keys, self.values, strict=True):
            slots = [
                blocks[position // self.block_size] * self.block_size + position % self.block_size
                for position in range(start)
            ]
            paged.k[slots], paged.v[slots] = k[:start], v[:start]
        return paged

    def packed(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value of the step's tokens as from the model: `[1, heads, tokens, dim]`."""
        k = [k[start:] for (start, _), k in zip(self.chunks, self.keys, strict=True)]
        v = [v[start:] for (start, _), v in zip(self.chunks, self.values, strict=True)]
        return tuple(torch.cat(rows).transpose(0, 1).unsqueeze(0) for rows in (self.queries, k, v))  # type: ignore[return-value]

    @property
    def params(self) -> AttentionParams:
        return AttentionParams(self.scale, self.window, self.softcap, self.sink_values)

    def compute(self, paged: PagedLayer, *, share: bool | None = None, cpu: CpuLayers | None = None) -> Tensor:
        """The step's attention: by PyTorch's operators, or by the compiled kernels with `cpu`."""
        metadata = self.metadata(share=self.share if share is None else share)
        step = StepAttention({0: metadata}, {0: paged}, cpu=cpu)
        return step.attend(0, *self.packed(), self.params)[0]

    def expected(self) -> Tensor:
        """The definition, a token at a time."""
        rows = []
        for (start, count), query, k, v in zip(self.chunks, self.queries, self.keys, self.values, strict=True):
            # `[heads, tokens, dim]`
            k, v = (each.double().repeat_interleave(self.groups, 1).transpose(0, 1) for each in (k, v))
            for i in range(count):
                end = start + i + 1
                first = 0 if self.window is None else max(0, end - self.window)
                scores = (k[:, first:end] @ query[i].double()[:, :, None])[:, :, 0] * self.scale
                if self.softcap is not None:
                    scores = torch.tanh(scores / self.softcap) * self.softcap
                if self.sink_values is not None:
                    scores = torch.cat([scores, self.sink_values.double()[:, None]], 1)
                weights = torch.softmax(scores, 1)[:, None, : end - first]
                rows.append((weights @ v[:, first:end])[:, 0])
        return torch.stack(rows)


def kernels(layers: dict[int, PagedLayer]) -> CpuLayers:
    """The compiled kernels over some layers."""
    if shutil.which("c++") is None:
        pytest.skip("there is no C++ compiler")
    return CpuLayers(native.load(), layers)


def check(case: Case, long_run: int = metadata.LONG_RUN) -> None:
    """PyTorch's operators and the kernels; `long_run`: how long a run must be to be read in place beside others."""
    expected = case.expected()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metadata, "LONG_RUN", long_run)
        found = case.compute(case.layer())
    assert torch.allclose(found.double(), expected, **EXACT), (found - expected).abs().max()
    paged = case.layer()
    found = case.compute(paged, cpu=kernels({0: paged}))
    assert torch.allclose(found.double(), expected, **EXACT), (found - expected).abs().max()


chunk = st.one_of(
    st.tuples(st.integers(0, 60), st.just(1)),
    st.tuples(st.integers(0, 40), st.integers(2, 24)),
    st.tuples(st.just(0), st.integers(1, 24)),
)


long_runs = st.sampled_from([metadata.LONG_RUN, 1, 7])


@settings(max_examples=examples(250), deadline=None)
@given(
    chunks=st.lists(chunk, min_size=1, max_size=5),
    block_size=st.integers(1, 9),
    kv_heads=st.integers(1, 3),
    groups=st.integers(1, 3),
    dims=st.sampled_from([(8, 8), (8, 4), (4, 8)]),
    window=st.one_of(st.none(), st.integers(1, 30)),
    softcap=st.sampled_from([None, 2.0]),
    sinks=st.booleans(),
    in_a_row=st.booleans(),
    share=st.booleans(),
    seed=st.integers(0, 1000),
    long_run=long_runs,
)
def test_is_attention(dims: tuple[int, int], long_run: int, **options: Any) -> None:
    """For any tables, chunks, windows, caps, sinks, groups and head sizes the result is attention by its definition."""
    check(Case(key_dim=dims[0], value_dim=dims[1], **options), long_run)


@settings(max_examples=examples(100), deadline=None)
@given(
    own=st.lists(st.integers(0, 20), min_size=2, max_size=6),
    others=st.lists(chunk, max_size=2),
    blocks=st.integers(8, 24),
    block_size=st.sampled_from([4, 8, 16]),
    groups=st.integers(1, 3),
    value_dim=st.sampled_from([8, 4]),
    window=st.sampled_from([None, 10, 150, 10_000]),
    softcap=st.sampled_from([None, 2.0]),
    sinks=st.booleans(),
    in_a_row=st.booleans(),
    seed=st.integers(0, 1000),
    long_run=long_runs,
)
def test_shared_prefix(
    own: list[int], others: list[tuple[int, int]], blocks: int, long_run: int, **options: Any
) -> None:
    """Decoding sequences that share a prefix get the same result as each of them alone, and as the definition."""
    shared = blocks * options["block_size"]
    # The others are long enough to hold the prefix as well: they prefill behind it.
    chunks = [(shared + length, 1) for length in own] + [(shared + start, count) for start, count in others]
    case = Case(chunks=chunks, shared=shared, **options)
    check(case, long_run)
    together, alone = (case.compute(case.layer(), share=share) for share in (True, False))
    assert torch.allclose(together, alone, **EXACT)
    layers = [case.layer() for _ in range(2)]
    together, alone = (
        case.compute(paged, share=share, cpu=kernels({0: paged}))
        for share, paged in zip((True, False), layers, strict=True)
    )
    assert torch.allclose(together, alone, **EXACT)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("value_dim", [8, 4])
def test_long_prompt(window: int | None, value_dim: int) -> None:
    """A prompt of many hundred tokens, with and without a past, is attention too."""
    check(Case(chunks=[(0, 700), (90, 300)], window=window, value_dim=value_dim, kv_heads=1, block_size=16))


@settings(max_examples=examples(200), deadline=None)
@given(
    cuts=st.lists(st.integers(1, 30), min_size=2, max_size=6),
    spread=st.sampled_from([0.1, 1.0, 30.0]),
    shift=st.sampled_from([0.0, 80.0, -300.0]),
    seed=st.integers(0, 1000),
)
def test_merge(cuts: list[int], spread: float, shift: float, seed: int) -> None:
    """Attention over keys cut into parts in any way, merged in any order, is attention over all of them."""
    noise = torch.Generator().manual_seed(seed)
    total = sum(cuts)
    scores = torch.randn(2, 3, total, generator=noise) * spread
    scores[..., : cuts[0]] += shift
    values = torch.randn(2, total, 4, generator=noise)

    def attend(low: int, high: int) -> tuple[Tensor, Tensor]:
        part = scores[..., low:high]
        return torch.softmax(part, -1) @ values[:, low:high], torch.logsumexp(part, -1)

    parts = [attend(sum(cuts[:i]), sum(cuts[: i + 1])) for i in range(len(cuts))]
    random.Random(seed).shuffle(parts)
    result, lse = parts[0]
    for part in parts[1:]:
        result, lse = merge(result, lse, *part)
    whole, whole_lse = attend(0, total)
    assert torch.allclose(result, whole, **EXACT)
    assert torch.allclose(lse, whole_lse, **EXACT)


@settings(max_examples=examples(300), deadline=None)
@given(
    blocks=st.lists(st.integers(0, 40), min_size=1, max_size=12, unique=True),
    block_size=st.integers(1, 8),
    long_run=long_runs,
    data=st.data(),
)
def test_find_kv_slots(blocks: list[int], block_size: int, long_run: int, data: st.DataObject) -> None:
    """`find_kv_slots` names exactly the slots of the tokens asked for, in order; consecutive blocks are one run,
    without an index."""
    kind = data.draw(st.sampled_from(["random", "row", "pieces"]))
    if kind != "random":
        blocks = list(range(40)) if kind == "row" else pieces(40, blocks[0])
    stop = data.draw(st.integers(1, len(blocks) * block_size))
    start = data.draw(st.integers(0, stop - 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metadata, "LONG_RUN", long_run)
        keys = find_kv_slots(blocks, start, stop, block_size, CPU)
        in_order = find_kv_slots(blocks, start, stop, block_size, CPU, ordered=True)
    slots = [blocks[p // block_size] * block_size + p % block_size for p in range(start, stop)]
    viewed = [slot for low, high in keys.runs for slot in range(low, high)]
    held = [] if keys.blocks is None else keys.blocks.tolist()
    spread = [block * block_size + offset for block in held for offset in range(block_size)]
    gathered = spread[keys.skip : keys.skip + keys.gathered]
    assert sorted(viewed + gathered) == sorted(slots)
    assert keys.count == stop - start
    if all(b == a + 1 for a, b in itertools.pairwise(slots)):
        assert keys.blocks is None
        assert len(keys.runs) == 1
    if in_order.blocks is None:
        assert [slot for low, high in in_order.runs for slot in range(low, high)] == slots
    else:
        spread = [block * block_size + offset for block in in_order.blocks.tolist() for offset in range(block_size)]
        assert spread[in_order.skip : in_order.skip + in_order.gathered] == slots


class Reads(TorchDispatchMode):
    """Counts the slots of K that operators other than views read, and whether any of them gathers."""

    def __init__(self, paged: PagedLayer) -> None:
        super().__init__()
        self._storage = paged.k.untyped_storage().data_ptr()
        self._row = paged.k[0].numel()
        self.slots = 0
        self.gathers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in ("index_select", "index", "gather", "embedding", "take"):
            self.gathers += 1
            self.slots += result.numel() // self._row if self._is_k(args[0]) else 0
            return result
        made = result if isinstance(result, tuple | list) else (result,)
        if not any(self._is_k(one) for one in made):  # neither a view of K nor a write to it
            self.slots += sum(one.numel() // self._row for one in args if self._is_k(one))
        return result

    def _is_k(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.untyped_storage().data_ptr() == self._storage


def reads(case: Case) -> Reads:
    paged = case.layer()
    with Reads(paged) as counter:
        case.compute(paged)
    return counter


def test_blocks_in_a_row_are_read_in_place() -> None:
    """A sequence whose blocks are consecutive is read in place, each slot once: nothing is gathered."""
    for chunks, window, slots in (([(37, 1)], None, 38), ([(30, 8)], None, 30), ([(60, 1)], 10, 10)):
        found = reads(Case(chunks=chunks, window=window, in_a_row=True))
        assert (found.slots, found.gathers) == (slots, 0)
    assert reads(Case(chunks=[(100, 1)], in_a_row=False)).gathers > 0


@pytest.mark.parametrize("in_a_row", [True, False])
def test_shared_prefix_is_read_once(in_a_row: bool) -> None:
    """A prefix that a batch shares is read once per layer and step, not once per sequence."""
    chunks, shared = [(128 + own, 1) for own in (0, 3, 5, 9, 20, 33)], 128
    together = reads(Case(chunks=chunks, shared=shared, in_a_row=in_a_row))
    apart = reads(Case(chunks=chunks, shared=shared, in_a_row=in_a_row, share=False))
    own = sum(start + 1 - shared for start, _ in chunks)
    # Blocks that are not consecutive are gathered whole, 4 tokens each.
    blocks = 4 * 2 * len(chunks)
    assert shared + own <= together.slots <= shared + own + blocks
    # Sequences that are gathered together are padded to the longest.
    assert 6 * shared + own <= apart.slots <= 1.5 * (6 * shared + own) + blocks


def test_window_that_has_slid_past_the_prefix() -> None:
    """A window shorter than the prefix reads only its own tokens."""
    case = Case(chunks=[(200, 1), (205, 1)], shared=192, window=16, in_a_row=True)
    check(case)
    assert reads(case).slots <= 2 * 2 * 16


def test_shared_tokens() -> None:
    """The common prefix is whole blocks, and every sequence keeps at least its newest token."""
    case = Case(chunks=[(16, 1), (23, 1), (16, 1)], shared=16)
    assert shared_tokens(case.metadata().decodes, 4) == 16
    assert shared_tokens(case.metadata().decodes[:1], 4) == 16
    apart = Case(chunks=[(16, 1), (16, 1)], shared=8)
    assert shared_tokens(apart.metadata().decodes, 4) == 8


@pytest.mark.parametrize("compiled", [False, True])
def test_shared_blocks_are_not_written(compiled: bool) -> None:
    """A token whose K and V are in a shared block is computed but not written; the others of its chunk are written."""
    case = Case(chunks=[(11, 1), (6, 5)], in_a_row=True)
    first, second = case.tables
    # All of the first sequence is shared, and two tokens of the second's chunk.
    chunks = [QueryChunk(0, 11, 1, first, 12), QueryChunk(1, 6, 5, second, 8)]
    paged = case.layer()
    for number, position in ((0, 11), (1, 6), (1, 7)):
        slot = case.tables[number][position // 4] * 4 + position % 4
        paged.k[slot], paged.v[slot] = case.keys[number][position], case.values[number][position]
    before = paged.k.clone()
    cpu = kernels({0: paged}) if compiled else None
    found = StepAttention({0: AttentionMetadata(chunks, 4)}, {0: paged}, cpu=cpu).attend(
        0, *case.packed(), case.params
    )[0]
    assert torch.allclose(found.double(), case.expected(), **EXACT)
    changed = (paged.k.nan_to_num(7.0) != before.nan_to_num(7.0)).any(dim=(1, 2)).nonzero().flatten().tolist()
    assert changed == [second[2] * 4 + offset for offset in range(3)]


def test_nothing_of_others_is_read(engine: Callable[..., LLM], reference: Callable[[str], tiny.Reference]) -> None:
    """Slots after a sequence's tokens, and unused blocks, have no effect on its output, even if they are NaN."""
    llm = engine("llama")
    for layer in llm._core._runner.layers.values():
        layer.k_blocks.fill_(math.nan)
        layer.v_blocks.fill_(math.nan)
    prompts = [tiny.prompt(length, length) for length in (5, 9, 18, 33)]
    for tokens, output in zip(prompts, llm.generate(prompts, tiny.greedy(6)), strict=True):
        reference("llama").check(tokens, output.outputs[0], 6)
