"""The compiled kernels on several instruction sets: products, norms and attention against their definitions in float64, and
the same bits for a row whatever else is computed."""

from __future__ import annotations

import math
import platform
import random
import shutil
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from example_counts import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_attention import Case, chunk
from torch import Tensor
from torch.nn import functional

from foreword import compiled_code
from foreword.blocks.layout import LayerLayout
from foreword.engine.attention.backend import StepAttention
from foreword.engine.attention.cpu_backend import CpuAttention, CpuLayers
from foreword.engine.attention.kv_tensors import PagedLayer
from foreword.engine.attention.metadata import AttentionMetadata, AttentionParams, QueryChunk
from foreword.engine.kernels import native
from foreword.engine.kernels.native import Kernels
from foreword.engine.request import SamplingParams
from foreword.engine.sampler import block_maxima, choose, largest, random_bits, sampled_row, shape
from foreword.engine.sequence import Draw

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Of numbers around 1.
CLOSE = {torch.float32: {"rtol": 1e-4, "atol": 2e-5}, torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2}}
CLOSE[torch.float16] = {"rtol": 2e-3, "atol": 2e-3}
HEADS = [(64, 64), (80, 80), (96, 96), (128, 128), (256, 256), (24, 12), (6, 10), (2, 2), (66, 64), (130, 18)]
# Of the longest text, in tokens: several of the parts into which the kernels divide keys; and of a block of the pool.
LONGEST, SIZE = 1_300, 16
# Builds for this machine's own instruction set, and for others that it has: those of wheels, and one without vectors. Each is
# compiled, which takes longer than the tests; AVX2 is not what this machine has where it has AVX512.
HAS = compiled_code.processor_flags()
WHEELS = [
    pytest.param(
        one.flags,
        id=one.name,
        marks=pytest.mark.extended if one.name == "avx2" and "avx512f" in HAS else pytest.mark.slow,
    )
    for one in compiled_code.SHIPPED
    if one.machine == platform.machine() and one.needs <= HAS
]
PLAIN = (
    [pytest.param(("-march=x86-64",), id="x86-64", marks=pytest.mark.slow)] if platform.machine() == "x86_64" else []
)


@pytest.fixture(scope="module", params=[pytest.param((), id="native"), *WHEELS, *PLAIN])
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    """The kernels for one instruction set."""
    if not request.param:
        return native.load()
    # One folder in any order of the tests: what is compiled is compiled once.
    folder = tmp_path_factory.getbasetemp() / "kernels"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        return native.open_library(compiled_code.library((*compiled_code.COMMON_FLAGS, *request.param)))


def repeated(**options: Any) -> Any:
    """Hypothesis settings for tests that use the fixture above, which may be kept between examples."""
    return settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], **options)


def attend(case: Case, kernels: Kernels) -> Tensor:
    paged = case.layer()
    return case.compute(paged, cpu=CpuLayers(kernels, {0: paged}))


def check(case: Case, kernels: Kernels) -> None:
    found, expected = attend(case, kernels), case.expected()
    assert found.dtype == case.dtype
    close = CLOSE[case.dtype]
    assert torch.allclose(found.double(), expected, **close), (found - expected).abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
@repeated(max_examples=examples(60))
@given(
    chunks=st.lists(chunk, min_size=1, max_size=4),
    block_size=st.sampled_from([1, 3, 4, 16, 128]),
    kv_heads=st.integers(1, 3),
    groups=st.integers(1, 9),
    dims=st.sampled_from(HEADS),
    window=st.one_of(st.none(), st.integers(1, 70)),
    softcap=st.sampled_from([None, 2.0]),
    sinks=st.booleans(),
    share=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_attention(dtype: torch.dtype, kernels: Kernels, dims: tuple[int, int], **options: Any) -> None:
    """For any tables, chunks, heads, head sizes, windows, caps and sinks it is attention by its definition."""
    check(Case(key_dim=dims[0], value_dim=dims[1], dtype=dtype, scale=dims[0] ** -0.5, **options), kernels)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 100])
def test_long_texts(dtype: torch.dtype, window: int | None, kernels: Kernels) -> None:
    """Long contexts (many blocks of keys) and prompts of several tiles."""
    chunks = [(0, 300), (410, 70), (500, 1), (129, 1)]
    check(Case(chunks=chunks, block_size=16, groups=3, key_dim=32, value_dim=32, window=window, dtype=dtype), kernels)


@pytest.mark.parametrize("dtype", DTYPES)
def test_odd_head_sizes_in_bfloat16(dtype: torch.dtype, kernels: Kernels) -> None:
    """Heads of an odd size are computed, by PyTorch's operators if need be."""
    check(Case(chunks=[(9, 5), (30, 1)], key_dim=7, value_dim=5, dtype=dtype), kernels)


@pytest.mark.parametrize("sinks", [False, True])
@repeated(max_examples=40)
@given(
    lengths=st.lists(st.integers(0, 1_100), min_size=1, max_size=4),
    shared=st.sampled_from([0, 64, 512, 720]),
    prompt=st.sampled_from([None, (1_200, 3), (0, 40)]),
    threads=st.sampled_from([2, 8]),
    seed=st.integers(0, 1000),
)
def test_keys_in_parts(
    sinks: bool,
    kernels: Kernels,
    lengths: list[int],
    shared: int,
    prompt: tuple[int, int] | None,
    threads: int,
    seed: int,
) -> None:
    """Keys that are split among threads, and shared prefixes, are merged exactly."""
    chunks = [(shared + length, 1) for length in lengths]
    if prompt is not None:
        chunks.append((shared + prompt[0], prompt[1]))
    case = Case(chunks=chunks, shared=shared, block_size=8, sinks=sinks, seed=seed, groups=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: threads)
        check(case, kernels)


def test_keys_are_cut_for_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys of one long sequence are split for several threads; with many sequences, or one thread, they are not."""

    def tasks(chunks: list[tuple[int, int]]) -> int:
        case = Case(chunks=chunks, block_size=16)
        paged = case.layer()
        layers = CpuLayers(native.load(), {0: paged})
        step = StepAttention({0: case.metadata()}, {0: paged}, cpu=layers)
        cpu = step.cpu(0)
        assert cpu is not None
        return int(cpu.tasks(None, layers.layer(0, 4)).num_tasks)

    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert tasks([(5000, 1)]) >= 8
    assert tasks([(1000, 1)] * 16) == 16
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert tasks([(5000, 1)]) == 1


@pytest.mark.parametrize("dtype", DTYPES)
@repeated(max_examples=30)
@given(
    window=st.one_of(st.none(), st.integers(1, 700)),
    softcap=st.sampled_from([None, 2.0]),
    sinks=st.booleans(),
    group=st.integers(1, 9),
    chunks=st.lists(st.integers(1, 520), min_size=1, max_size=5),
    decoded=st.lists(st.integers(0, LONGEST - 1), max_size=5, unique=True),
    threads=st.sampled_from([1, 2, 8]),
    seed=st.integers(0, 1000),
)
def test_rows_of_attention(
    dtype: torch.dtype,
    kernels: Kernels,
    window: int | None,
    softcap: float | None,
    sinks: bool,
    group: int,
    chunks: list[int],
    decoded: list[int],
    threads: int,
    seed: int,
) -> None:
    """A token's attention has the same bits in a prompt that is computed at once, in chunks, and among decoding sequences that
    share its blocks, with any number of threads; what its window has left may be anything."""
    noise = torch.Generator().manual_seed(seed)
    paged = PagedLayer(LayerLayout(2, 32, 32), dtype, LONGEST // SIZE + 1, SIZE, torch.device("cpu"))
    for tensor in (paged.k, paged.v):
        tensor.copy_(torch.randn(tensor.shape, generator=noise))
    table = torch.randperm(LONGEST // SIZE + 1, generator=noise).tolist()
    query = torch.randn(1, 2 * group, LONGEST, 32, generator=noise).to(dtype)
    params = AttentionParams(0.3, window, softcap, torch.randn(2 * group, generator=noise) if sinks else None)
    layers = CpuLayers(kernels, {0: paged})

    def attend(parts: list[tuple[int, int]]) -> torch.Tensor:
        rows, step = [], []
        for start, count in parts:
            blocks = array("q", table)
            if window is not None:
                blocks[: max(0, start - window + 1) // SIZE] = array("q", [-1]) * (max(0, start - window + 1) // SIZE)
            step.append(QueryChunk(len(rows), start, count, blocks, start + count))
            rows += range(start, start + count)
        packed = query[:, :, rows]
        return CpuAttention(AttentionMetadata(step, SIZE), layers).attend(0, packed, packed, packed, params)[0]

    expected = attend([(0, LONGEST)])
    start = 0
    for count in chunks:
        parts = [(start, min(count, LONGEST - start)), *((position, 1) for position in decoded)]
        rows = [row for first, length in parts for row in range(first, first + length)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "get_num_threads", lambda: threads)
            assert torch.equal(attend(parts), expected[rows])
        start = min(start + count, LONGEST - 1)


def test_what_is_not_numbers_stays_outside(kernels: Kernels) -> None:
    """Unwritten slots hold NaN in these tests; infinities in them have no effect either."""
    case = Case(chunks=[(30, 1), (5, 9), (0, 3)], block_size=16, dtype=torch.bfloat16)
    paged = case.layer()
    paged.k.nan_to_num_(nan=torch.inf)
    paged.v.nan_to_num_(nan=-torch.inf)
    found = case.compute(paged, cpu=CpuLayers(kernels, {0: paged}))
    assert torch.allclose(found.double(), case.expected(), **CLOSE[torch.bfloat16])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 8])
def test_what_is_not_a_number_is_not_hidden(
    dtype: torch.dtype, threads: int, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row that sees NaN in one key, or in all keys of a part, is NaN: as a prompt's and as a decoding sequence's."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    for bad in (slice(0, 1), slice(511, 513), slice(512, 1_024), slice(1_024, LONGEST)):
        paged = PagedLayer(LayerLayout(2, 32, 32), dtype, LONGEST // SIZE + 1, SIZE, torch.device("cpu"))
        for tensor in (paged.k, paged.v):
            tensor.fill_(0.5)
        paged.k[bad] = torch.nan
        table, layers = array("q", range(LONGEST // SIZE + 1)), CpuLayers(kernels, {0: paged})
        for start, count in ((LONGEST - 1, 1), (LONGEST - 10, 10)):
            query = torch.ones(1, 6, count, 32, dtype=dtype)
            metadata = AttentionMetadata([QueryChunk(0, start, count, table, start + count)], SIZE)
            found = CpuAttention(metadata, layers).attend(0, query, query, query, AttentionParams(0.3))
            assert found.isnan().all()


def test_large_scores(kernels: Kernels) -> None:
    """Scores of several hundreds, of both signs, neither overflow nor vanish."""
    for scale in (40.0, -40.0):
        case = Case(chunks=[(70, 4), (90, 1)], scale=scale, block_size=16)
        assert torch.isfinite(attend(case, kernels)).all()
        check(case, kernels)


@pytest.mark.parametrize("dtype", DTYPES)
@repeated(max_examples=examples(60))
@given(
    rows=st.one_of(st.integers(1, 3), st.integers(0, 40)),
    words=st.integers(1, 80),
    outputs=st.lists(st.integers(1, 90), min_size=1, max_size=3),
    bias=st.booleans(),
    strided=st.booleans(),
    int8=st.booleans(),
    seed=st.integers(0, 100),
)
def test_product(
    dtype: torch.dtype,
    kernels: Kernels,
    rows: int,
    words: int,
    outputs: list[int],
    bias: bool,
    strided: bool,
    int8: bool,
    seed: int,
) -> None:
    """Rows times packed weights, one or several, with a bias or without, are the product in float64, for any shape; also where
    weights are 8-bit integers with a scale for each output."""
    noise = torch.Generator().manual_seed(seed)
    inputs = 2 * words
    exact = [torch.randn(size, inputs, generator=noise).to(dtype).double() for size in outputs]
    scales = [torch.rand(size, generator=noise) / 64 + 1e-4 for size in outputs] if int8 else []
    if int8:
        exact = [
            torch.randint(-127, 128, (len(scale), inputs), generator=noise) * scale.double().unsqueeze(1)
            for scale in scales
        ]
    weights = [weight.to(dtype) for weight in exact]
    biases = [torch.randn(size, generator=noise).to(dtype) for size in outputs] if bias else []
    x = torch.randn(rows, 3, inputs, generator=noise).to(dtype)[:, 1]
    x = x if strided else x.contiguous()
    found = kernels.multiply(kernels.pack(weights, biases, scales), x)
    expected = functional.linear(x.double(), torch.cat(exact), torch.cat(biases).double() if bias else None)
    assert found.dtype == dtype
    assert found.shape == (rows, sum(outputs))
    rtol, atol = (1e-5, 2e-5) if dtype == torch.float32 else (2**-7, 2**-7)
    assert torch.allclose(found.double(), expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", DTYPES)
@repeated(max_examples=30)
@given(words=st.integers(1, 80), outputs=st.integers(1, 90), int8=st.booleans(), seed=st.integers(0, 100))
def test_rows_of_a_product(
    dtype: torch.dtype, kernels: Kernels, words: int, outputs: int, int8: bool, seed: int
) -> None:
    """A row's product has the same bits among any number of rows, with 8-bit weights as well."""
    noise = torch.Generator().manual_seed(seed)
    scales = [torch.rand(outputs, generator=noise) + 0.01] if int8 else []
    weight = kernels.pack([torch.randn(outputs, 2 * words, generator=noise).to(dtype)], [], scales)
    x = torch.randn(40, 2 * words, generator=noise).to(dtype)
    whole = kernels.multiply(weight, x)
    for count in (1, 2, 3, 5, 12, 13, 25):
        first = random.Random(seed + count).randint(0, 40 - count)
        assert torch.equal(kernels.multiply(weight, x[first : first + count]), whole[first : first + count])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 7, 16, 96, 1000])
def test_norm(dtype: torch.dtype, size: int, kernels: Kernels) -> None:
    """The root mean square norm, of large rows, small ones, and rows of zeros."""
    noise = torch.Generator().manual_seed(size)
    x = (torch.randn(4, size, generator=noise) * torch.tensor([1.0, 1e-3, 50.0, 0.0]).unsqueeze(1)).to(dtype)
    weight = torch.randn(size, generator=noise).to(dtype)
    exact = x.double() * torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + 1e-5) * weight.double()
    assert torch.allclose(kernels.norm(x, weight, 1e-5).double(), exact, **CLOSE[dtype])


def test_the_layer_is_written_in_place(kernels: Kernels) -> None:
    """K and V of a step's tokens go into their slots, bit for bit, and nothing else changes."""
    case = Case(chunks=[(11, 1), (6, 5)], dtype=torch.bfloat16)
    paged = case.layer()
    before = paged.k.clone()
    case.compute(paged, cpu=CpuLayers(kernels, {0: paged}))
    for (start, count), blocks, k in zip(case.chunks, case.tables, case.keys, strict=True):
        for position in range(start, start + count):
            slot = blocks[position // 4] * 4 + position % 4
            assert torch.equal(paged.k[slot], k[position])
            before[slot] = k[position]
    assert torch.equal(paged.k.nan_to_num(7.0), before.nan_to_num(7.0))


def test_unknown_dtype_is_left_to_torch() -> None:
    """A layer in float64 is computed by PyTorch operators."""
    case = Case(chunks=[(9, 5), (30, 1)], dtype=torch.float64)
    paged: PagedLayer = case.layer()
    layers = CpuLayers(native.load(), {0: paged})
    assert not layers.supports(0, torch.empty(1, dtype=torch.float64))
    found = case.compute(paged, cpu=layers)
    assert torch.allclose(found.double(), case.expected(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1, 7, 129, 4099])
def test_sampling(vocab: int, dtype: torch.dtype, kernels: Kernels) -> None:
    """Under any mixture of filters, penalties, biases, exclusions and masks, rows of any size get the tokens that PyTorch's
    operators choose. (A random number may lie so near to the border of two tokens that rounding decides.)"""
    made, generator = random.Random(vocab), torch.Generator().manual_seed(vocab)
    logits = torch.randn(150, vocab, generator=generator) * torch.rand(150, 1, generator=generator) * 6
    # In some rows the first tokens tell nothing of the largest logit.
    for first, more in enumerate((-50.0, 50.0, 150.0)):
        logits[first::9, vocab // 2 :] += more
    logits = logits.to(dtype)
    logits[torch.rand(logits.shape, generator=generator) < torch.rand(150, 1, generator=generator) - 0.5] = -math.inf
    draws, masks = [], {}
    for row in range(150):
        other = made.random() < 0.5  # than filters and a repetition penalty
        tokens = [made.randrange(vocab) for _ in range(made.choice((0, 3, 200)))]
        params = SamplingParams(
            temperature=made.choice((0.0, 0.5, 1.0, 1.5)),
            top_k=made.choice((0, 0, 1, 5, 200)),
            top_p=made.choice((1.0, 1.0, 0.1, 0.9)),
            min_p=made.choice((0.0, 0.0, 0.1)),
            repetition_penalty=made.choice((1.0, 1.3)),
            presence_penalty=made.choice((0.0, 0.5)) * other,
            frequency_penalty=made.choice((0.0, -0.2)) * other,
            logit_bias=made.choice(({}, {made.randrange(vocab): 4.0})) if other else {},
            allowed_token_ids=made.choice((None, None, (0, vocab // 2, 0))) if other else None,
            min_tokens=made.choice((0, 1)) * other,
        )
        words = tuple((*tokens[-1:], made.randrange(vocab)) for _ in range(3 * other))
        draws.append(Draw(params, row, 0, tokens, len(tokens) // 2, (made.randrange(vocab),), bad_words=words))
        if row % 3 == 0:
            bits = torch.rand(32 * -(-vocab // 32), generator=generator) < made.choice((0.01, 0.5, 0.99))
            masks[row] = np.packbits(bits.numpy(), bitorder="little")
    numbers = [random_bits(row, 0, 0) for row in range(150)]
    rows = [sampled_row(draws[row], numbers[row], masks.get(row), vocab) for row in range(150)]
    found = kernels.sample(logits, rows)
    shaped = shape(logits, draws, {row: torch.from_numpy(mask) for row, mask in masks.items()})
    maxima = block_maxima(shaped)
    likeliest = largest(shaped, maxima).tolist()
    drawn = choose(shaped, maxima, [draw.params for draw in draws], numbers).tolist()
    expected = [
        best if draw.params.greedy else token for draw, best, token in zip(draws, likeliest, drawn, strict=True)
    ]
    assert sum(token != other for token, other in zip(found, expected, strict=True)) <= 1


def test_sources_are_shipped() -> None:
    """Every C++ source of the package belongs to a library."""
    folder = Path(compiled_code.__file__).parent
    sources = {name for names in compiled_code.LIBRARIES for name in names}
    assert {str(path.relative_to(folder)) for path in folder.rglob("*") if path.suffix in (".h", ".cpp")} == sources
