"""The CUDA path on a CPU: Triton kernels under Triton's interpreter, and decode steps over fixed buffers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from example_counts import examples, represented
from hypothesis import given, settings
from hypothesis import strategies as st
from test_attention import CPU, EXACT, Case, chunk
from torch import Tensor

from foreword.engine.attention.backend import StepAttention
from foreword.engine.attention.kv_tensors import PagedLayer
from foreword.engine.attention.metadata import AttentionMetadata, QueryChunk
from foreword.entrypoints.llm import LLM

pytest.importorskip("triton")
from foreword.engine.attention import triton_backend
from foreword.engine.attention.triton_backend import StepTensors, TritonAttention
from foreword.engine.cuda_graphs import batch_sizes
from foreword.engine.decoder import NormForward

# Rounding of K, V and the result: 8 bits and 11 bits of mantissa.
ROUGH = {
    torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2},
    torch.float16: {"rtol": 3e-3, "atol": 3e-3},
    torch.float32: EXACT,
}


def attend(case: Case, paged: PagedLayer, metadata: AttentionMetadata | None = None) -> Tensor:
    """The step's attention by the Triton kernels."""
    metadata = metadata or case.metadata()

    def backend(metadata: AttentionMetadata) -> TritonAttention:
        return TritonAttention(StepTensors.of(metadata, CPU, saving=1), {0: paged})

    step = StepAttention({0: metadata}, {0: paged}, make_backend=backend)
    return step.attend(0, *case.packed(), case.params)[0]


def check(case: Case) -> None:
    """Against the definition, and K and V in the slots against those that PyTorch's operators write."""
    paged, other = case.layer(), case.layer()
    found = attend(case, paged)
    assert torch.allclose(found.double(), case.expected(), **ROUGH[case.dtype]), (found - case.expected()).abs().max()
    case.compute(other)
    for ours, theirs in ((paged.k, other.k), (paged.v, other.v)):
        assert torch.equal(ours.nan_to_num(7.0), theirs.nan_to_num(7.0))


@pytest.mark.parametrize(
    "options",
    [
        {"chunks": [(37, 1), (5, 1), (0, 24), (30, 8)]},
        {"chunks": [(70, 1), (3, 1)], "window": 10, "softcap": 2.0, "sinks": True, "groups": 3},
        {
            "chunks": [(90, 30)],
            "window": 20,
            "key_dim": 24,
            "value_dim": 4,
            "sinks": True,
            "kv_heads": 3,
            "block_size": 5,
        },
        {"chunks": [(40, 1)] * 5, "sinks": True, "kv_heads": 2, "dtype": torch.bfloat16},
        {"chunks": [(40, 1), (9, 7)], "softcap": 2.0, "dtype": torch.float16},
        pytest.param(
            {
                "chunks": [(40, 1), (0, 5), (35, 1), (90, 1), (41, 1), (99, 1)],
                "shared": 32,
                "families": 2,
                "sinks": True,
            },
            marks=pytest.mark.extended,
        ),
        pytest.param(
            {"chunks": [(40 + i, 1) for i in range(12)], "shared": 40, "families": 5, "groups": 5, "softcap": 2.0},
            marks=pytest.mark.slow,
        ),
        {"chunks": [(80, 1), (75, 1), (21, 1)], "shared": 70, "window": 64, "dtype": torch.bfloat16},
    ],
)
def test_kernels_are_attention(options: dict[str, Any]) -> None:
    """The kernels attend as the definition does, and write K and V as PyTorch's operators do."""
    check(Case(**options))


@pytest.mark.slow
@settings(max_examples=examples(60), deadline=None)
@given(
    chunks=st.lists(st.one_of(chunk, st.tuples(st.integers(0, 60), st.just(1))), min_size=1, max_size=6),
    shared=st.sampled_from([0, 10, 40]),
    families=st.integers(1, 2),
    block_size=st.integers(1, 9),
    kv_heads=st.integers(1, 3),
    groups=st.integers(1, 5),
    dims=st.sampled_from([(8, 8), (8, 4), (4, 8), (20, 16), (64, 64), (192, 128)]),
    window=st.one_of(st.none(), st.integers(1, 30)),
    softcap=st.sampled_from([None, 2.0]),
    sinks=st.booleans(),
    dtype=st.sampled_from(list(ROUGH)),
    scale=st.sampled_from([0.05, 0.4]),
    seed=st.integers(0, 1000),
)
def test_any_kernels_are_attention(dims: tuple[int, int], **options: Any) -> None:
    """For any tables, chunks, windows, caps, sinks, groups, head sizes and dtypes the kernels attend as the definition."""
    if dims[0] > 8:  # sharp scores make rounding large
        options["scale"] = 0.05
    check(Case(key_dim=dims[0], value_dim=dims[1], **options))


def test_cached_tokens_are_not_written() -> None:
    """A token whose K and V are in a shared block is computed but not written."""
    case = Case(chunks=[(11, 1), (6, 5)], in_a_row=True)
    first, second = case.tables
    chunks = [QueryChunk(0, 11, 1, first, 12), QueryChunk(1, 6, 5, second, 8)]
    paged = case.layer()
    for number, position in ((0, 11), (1, 6), (1, 7)):
        slot = case.tables[number][position // 4] * 4 + position % 4
        paged.k[slot], paged.v[slot] = case.keys[number][position], case.values[number][position]
    before = paged.k.clone()
    found = attend(case, paged, AttentionMetadata(chunks, 4))
    assert torch.allclose(found.double(), case.expected(), **EXACT)
    changed = (paged.k.nan_to_num(7.0) != before.nan_to_num(7.0)).any(dim=(1, 2)).nonzero().flatten().tolist()
    assert changed == [second[2] * 4 + offset for offset in range(3)]


def test_batch_sizes() -> None:
    """The sizes end with the first that holds the largest batch."""
    for largest in (1, 3, 17, 64, 200):
        sizes = batch_sizes(largest)
        assert sizes == sorted(set(sizes)) and sizes[-1] >= largest and all(size < largest for size in sizes[:-1])


class Repeats:
    """Repeats functions over the same memory, as CUDA graphs do: a function must read nothing but its buffers."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        out, number = run().clone(), len(self.counts)
        self.counts.append(0)

        def replay() -> None:
            self.counts[number] += 1
            out.copy_(run())

        return replay, out


@pytest.mark.slow
@pytest.mark.parametrize("family", represented(["llama", "gemma3_5to1", "gpt_oss"], "gpt_oss"))
def test_engine(
    family: str,
    engine: Callable[..., LLM],
    reference: Callable[[str], tiny.Reference],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine's output with Triton kernels, and decode steps over padded buffers, is that of the model itself, with and
    without a cached prefix, and where a short prefix of the batch is read once."""
    monkeypatch.setattr(triton_backend, "_SAVED_BYTES", 1)
    llm, repeats = engine(family, kernels="triton"), Repeats()
    runner = llm._core._runner
    norms = sum(isinstance(module.__dict__.get("forward"), NormForward) for module in runner._model.modules())
    assert norms or family == "gemma3_5to1"  # whose norm adds one to the weights
    runner.record_graphs(4, capture=repeats)
    assert runner._graphs.sizes == [1, 2, 4]
    prompts = [tiny.prompt(16, 1) + tiny.prompt(length, length) for length in (1, 5, 8)]
    for _ in range(2):
        for tokens, output in zip(prompts, llm.generate(prompts, tiny.greedy(4)), strict=True):
            reference(family).check(tokens, output.outputs[0], 4)
    assert repeats.counts[1]  # the graph for four sequences that share a prefix


@pytest.mark.slow
def test_kernels_compile(tmp_path: Path) -> None:
    """Triton compiles every kernel for a GPU, which its interpreter does not show."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    script = Path(__file__).with_name("compile_kernels.py")
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 12
