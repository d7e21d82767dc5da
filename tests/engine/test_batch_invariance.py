"""Batch invariance: the bits of a token's KV and logits do not depend on chunks, batch, hit or source."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers
from example_counts import represented

from foreword.engine import batch_invariance
from foreword.engine.kernels.native import Kernels
from foreword.engine.request import SamplingParams
from foreword.entrypoints.llm import LLM
from foreword.errors import ConfigError, ModelUnsupported
from foreword.prefixes.erasure import forget_model, forget_prefix
from foreword.store.layout_records import layouts
from foreword.store.urls import open_store

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler")
Make = Callable[..., LLM]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"kernels": "torch"}, "engine.kernels is torch"),
        ({"linear_memory": "0"}, "linear_memory"),
        ({"store": "disk://FOLDER?size=1MiB&codec=int8"}, "lossy"),
    ],
)
def test_where_it_cannot_be_kept(
    options: dict[str, Any], reason: str, engine: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Settings under which it cannot hold are refused where it is on; by default the log and the status give the reason."""
    options = {name: value.replace("FOLDER", str(tmp_path)) for name, value in options.items()}
    with pytest.raises(ConfigError, match=reason):
        engine("llama", **options, batch_invariant="on")
    with caplog.at_level("WARNING"), engine("llama", **options) as llm:
        assert llm.info.inexact
    assert any("not batch-invariant" in line and reason in line for line in caplog.messages)


@pytest.mark.parametrize("dtype", represented(["float32", "bfloat16"], "bfloat16"))
@pytest.mark.parametrize("family", represented(tiny.FAMILIES, "gemma3", "gpt2", "gpt_oss"))
def test_default(family: str, dtype: str, engine: Make) -> None:
    """Every family is batch-invariant by default, and passes the checks at start."""
    llm = engine(family, dtype=dtype, self_check=True)
    assert llm.info.inexact == ""


@pytest.mark.parametrize("longest", [8, 100])
def test_short_sequences(longest: int, engine: Make) -> None:
    """The checks at start compute no position that sequences cannot have: behind the table of angles the kernels would read
    memory of others."""
    assert engine("llama", dtype="float32", max_model_len=longest, self_check=True).info.inexact == ""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_of_any_width(dtype: str, tmp_path: Path) -> None:
    """Experts whose rows are no multiple of 16 bytes, which PyTorch's grouped product refuses, are served, and with the bits of
    a computation."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 30}
    path = tiny.save(tiny.random_model(tiny.common(transformers.MixtralConfig, **experts)), tmp_path / "mixtral")
    with LLM(str(path), dtype=dtype, kv_memory="1024 tokens", threads=1) as llm:
        assert llm.info.inexact == ""


def test_weights_that_no_kernel_multiplies_by(engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A family with products of another kind is served as it is, and refused where batch invariance is on."""
    monkeypatch.setattr(batch_invariance, "is_experts", lambda module: False)
    assert "MixtralExperts" in engine("mixtral").info.inexact
    with pytest.raises(ConfigError, match="MixtralExperts"):
        engine("mixtral", batch_invariant="on")


def test_experts_that_do_something_else(engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts and routers whose own code does not do what the kernels do are left to it, and the status says so."""
    for name in ("Experts", "TopKRouter"):
        kind = getattr(transformers.models.mixtral.modeling_mixtral, f"Mixtral{name}")
        forward = kind.forward

        def other(self: Any, x: torch.Tensor, *rest: Any, forward: Any = forward) -> Any:
            return forward(self, x * (1.5 if len(x) == 5 else 1.0), *rest)

        with monkeypatch.context() as patch:
            patch.setattr(kind, "forward", other)
            assert f"Mixtral{name}" in engine("mixtral").info.inexact


def test_what_rounds_otherwise_is_found(engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check at load refuses a model whose bits depend on the number of rows."""
    multiply = Kernels.multiply
    scale = {True: 1.0, False: 1.0 + 2**-20}
    monkeypatch.setattr(Kernels, "multiply", lambda self, weight, x: multiply(self, weight, x) * scale[x.numel() < 640])
    with pytest.raises(ModelUnsupported, match="not batch-invariant"):
        engine("gemma2", batch_invariant="on", self_check=True)
    assert "not batch-invariant" in engine("gemma2", self_check=True).info.inexact


def test_kv_of_its_own(engine: Make) -> None:
    """KV that was computed with batch invariance has other keys than KV that was computed without it, and the same weights."""
    with_it, without = engine("llama", batch_invariant="on"), engine("llama", batch_invariant="off")
    assert with_it.info.fingerprint == without.info.fingerprint == without.info.namespace
    assert with_it.info.namespace != without.info.namespace
    assert with_it.info.namespace == engine("llama", block_size=16, max_model_len=64).info.namespace


def test_a_named_prefix_of_another_build(engine: Make, tmp_path: Path) -> None:
    """An engine that computes other bits of the same weights finds the names of the others, and computes their KV anew. Erasing
    a name erases the KV of both, and its model's erasure the name."""
    url = f"disk://{tmp_path}?size=8MiB"
    text, params = "You are a careful librarian, and name the shelf.", SamplingParams(temperature=0.0, max_tokens=2)

    def build(kind: str, *names: str) -> None:
        with engine("llama", batch_invariant=kind, store=url) as llm:
            assert [one.name for one in llm.list_prefixes()] == [*names]
            if not names:
                llm.add_prefix("rules", text)
            llm.generate(["Where?"], params, prefix="rules")

    def blocks() -> list[Path]:
        return [one for one in tmp_path.rglob("*") if one.is_file() and len(one.name) == 64]

    build("on")
    build("off", "rules")
    with closing(open_store([url])) as store:
        assert len({one.parents[2].name for one in blocks()}) == 2, "layouts"
        receipt = forget_prefix(store, "rules")
        assert receipt.complete and receipt.widened and receipt.records and not blocks()
    build("off")
    build("on", "rules")
    with closing(open_store([url])) as store:
        [model] = {one.model for one in layouts(store).values()}
        assert forget_model(store, model).records and not blocks()


def test_kv_of_what_computes_otherwise(engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine whose products differ in the last bits has keys of its own, whatever it says of itself."""
    before = engine("llama").info
    multiply = Kernels.multiply
    monkeypatch.setattr(Kernels, "multiply", lambda self, weight, x: multiply(self, weight, x) * (1.0 + 2**-20))
    after = engine("llama").info
    assert (after.fingerprint, after.inexact) == (before.fingerprint, "")
    assert after.namespace != before.namespace


def test_kv_of_another_source(engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A release that computes in another way has keys of its own, also where a few tokens do not show it."""
    before, read = engine("llama").info.namespace, Path.read_bytes
    assert engine("llama").info.namespace == before
    monkeypatch.setattr(Path, "read_bytes", lambda self: read(self) + b"\n" * (self.name == "linear.py"))
    assert engine("llama").info.namespace != before


def test_activations_by_rows() -> None:
    """An activation of any width has the same bits alone and among any number of rows, on any number of threads. Rows may have
    other numbers between them, as the outputs of one product of several layers."""
    threads = torch.get_num_threads()
    try:
        for width, rows in ((48, 97), (48, 96), (128, 97), (100, 96), (601, 97), (601, 128), (1152, 97)):
            module = torch.nn.GELU(approximate="tanh")
            forward = batch_invariance.ActivationForward(module)
            x = torch.randn(1, rows, 2 * width, generator=torch.Generator().manual_seed(width))[..., :width]
            torch.set_num_threads(3)
            whole = forward(x)
            assert torch.allclose(whole, module(x), atol=1e-6)
            torch.set_num_threads(1)
            assert torch.equal(whole, torch.cat([forward(x[:, row : row + 1]) for row in range(rows)], dim=1))
    finally:
        torch.set_num_threads(threads)


def test_functions_in_long_steps(tmp_path: Path) -> None:
    """Numbers that functions in a model's own code compute have the same bits in steps of any length, on several threads."""
    sizes = {"hidden_size": 112, "num_attention_heads": 7, "num_key_value_heads": 1, "max_position_embeddings": 1024}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "num_dense_layers": 1}
    config = tiny.common(transformers.AfmoeConfig, intermediate_size=64, sliding_window=40, **sizes, **experts)
    path, prompts = (
        tiny.save(tiny.random_model(config), tmp_path / "afmoe"),
        [tiny.prompt(681, seed) for seed in range(3)],
    )
    threads = torch.get_num_threads()
    try:
        for tokens in (64, 1024):  # of a step
            url = f"disk://{tmp_path / str(tokens)}?size=64MiB"
            with LLM(str(path), dtype="float32", threads=2, max_batch_tokens=tokens, store=url) as llm:
                assert llm.info.inexact == ""
                for prompt in prompts:
                    llm.generate([prompt], tiny.greedy(1))
    finally:
        torch.set_num_threads(threads)
    short, long = (
        {file.name: file.read_bytes() for file in (tmp_path / tokens).rglob("?" * 64)} for tokens in ("64", "1024")
    )
    assert len(short) == 3 * (681 // 16) and short == long
