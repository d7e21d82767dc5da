"""Weights as 8-bit integers: the engine computes with them, and never shares KV with the unquantized model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from example_counts import represented
from torch import nn

from foreword.engine.linear import quantize, scale_of
from foreword.engine_config import EngineConfig
from foreword.entrypoints.llm import LLM
from foreword.errors import ConfigError

Folder = Callable[[str], Path]
PROMPTS = [tiny.prompt(length, seed) for seed, length in enumerate((1, 17, 40))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nearest_multiples(dtype: torch.dtype) -> None:
    """Each weight is within half a step of what it was, a step being 1/127 of its output's largest weight. An output of zeros
    stays zero."""
    layer = nn.Linear(40, 6, dtype=dtype).requires_grad_(False)
    layer.weight[2] = 0
    before = layer.weight.float().clone()
    assert quantize([layer]) == 1
    scale = scale_of(layer)
    assert scale is not None
    assert torch.allclose(scale, before.abs().amax(1) / 127)
    slack = torch.finfo(dtype).eps * before.abs() + 1e-7
    assert ((layer.weight.float() - before).abs() <= scale.unsqueeze(1) / 2 + slack).all()
    assert not layer.weight[2].any()


def rounded(model: Any) -> None:
    """All linear layers, by hand; the embedding stays."""
    embedding = model.get_input_embeddings().weight
    before = embedding.clone()
    quantize([module for module in model.modules() if isinstance(module, nn.Linear)])
    assert torch.equal(embedding, before)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("family", represented(["llama", "gemma2"], "gemma2"))
def test_same_output_as_the_rounded_model(
    family: str, kernels: str, folder: Folder, engine: Callable[..., LLM]
) -> None:
    """The engine's tokens are those of Transformers with the same rounded weights, cold and cached. Gemma's output layer
    is tied to its embedding, which is not rounded."""
    truth = tiny.Reference(folder(family), rounded)
    llm = engine(family, quantization="int8", kernels=kernels)
    for _ in range(2):
        for tokens, output in zip(PROMPTS, llm.generate(PROMPTS, tiny.greedy(12)), strict=True):
            truth.check(tokens, output.outputs[0], 12)


def test_stored_kv_is_not_shared(engine: Callable[..., LLM], tmp_path: Path) -> None:
    """An engine with 8-bit weights finds nothing of what one without them has stored, and its own after a restart."""
    tokens, store = tiny.prompt(40, 5), f"disk://{tmp_path}/kv?size=64MiB"
    cached = []
    for quantization in ("none", "int8", "int8", "none"):
        with engine("llama", quantization=quantization, store=store) as llm:
            cached.append(llm.generate([tokens], tiny.greedy(4))[0].cached_tokens)
    assert cached[:2] == [0, 0]
    assert min(cached[2:]) >= 36


def test_refused(folder: Folder) -> None:
    """An unknown kind."""
    with pytest.raises(ConfigError, match="quantization"):
        EngineConfig(quantization="int7")
