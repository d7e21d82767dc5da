"""Packed linear layers multiply by the same weights as before."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
import torch
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from foreword.engine import linear
from foreword.engine.kernels.kernel_choice import ONEDNN, PLAIN, WIDE
from foreword.engine.model import load_model
from foreword.engine_config import EngineConfig
from foreword.entrypoints.llm import LLM
from foreword.errors import ConfigError

DTYPES = [torch.float32, torch.bfloat16]


def times(*served: str) -> dict[str, list[float]]:
    """Measured times by which these kinds serve 1, 4, 16, 64 and 256 rows."""
    return {kind: [1.0 if kind == best else 2.0 for best in served] for kind in (ONEDNN, WIDE, PLAIN)}


# One kind for few rows and one for many; a float32 copy as on a processor without bfloat16 units.
FEW_PLAIN = times(PLAIN, *[WIDE] * 4)


def make(inputs: int, outputs: int, bias: bool, dtype: torch.dtype, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(inputs, outputs, bias=bias, dtype=dtype)).requires_grad_(False)
    return model.eval()


def exact(layer: nn.Linear, x: Tensor) -> Tensor:
    """The product of the very same numbers in float64."""
    bias = None if layer.bias is None else layer.bias.double()
    return functional.linear(x.double(), layer.weight.double(), bias)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=examples(60), deadline=None)
@given(
    rows=st.integers(1, 40),
    inputs=st.integers(1, 96),
    outputs=st.integers(1, 96),
    bias=st.booleans(),
    cubic=st.booleans(),
    strided=st.booleans(),
    seed=st.integers(0, 100),
)
def test_is_linear(
    dtype: torch.dtype, rows: int, inputs: int, outputs: int, bias: bool, cubic: bool, strided: bool, seed: int
) -> None:
    """A packed layer gives `F.linear` up to rounding of its dtype, for any shape, few rows and many, 2D and 3D."""
    model = make(inputs, outputs, bias, dtype, seed)
    layer = model[0]
    measured = {(inputs, outputs): FEW_PLAIN} if dtype == torch.bfloat16 else None
    assert linear.pack(model, 1 << 30, times=measured) == 4 * inputs * outputs
    x = torch.randn(rows, inputs, dtype=dtype)
    if strided:  # every other row of a larger tensor
        x = torch.randn(rows, 2, inputs, dtype=dtype)[:, 1]
    if cubic:
        x = x.unsqueeze(0)
    with torch.inference_mode():
        found = model(x)
    expected = exact(layer, x)
    assert found.dtype == dtype
    assert found.shape == expected.shape
    # float32 sums `inputs` products; bfloat16 rounds only the result.
    rtol, atol = (1e-5, 1e-5) if dtype == torch.float32 else (2**-8, 2**-8)
    assert torch.allclose(found.double(), expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", DTYPES)
def test_empty_input(dtype: torch.dtype) -> None:
    """No rows in, no rows out."""
    model = make(8, 6, True, dtype)
    linear.pack(model, 1 << 30)
    assert model(torch.empty(1, 0, 8, dtype=dtype)).shape == (1, 0, 6)


class Tied(nn.Module):
    """An output layer that is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight
        self.other = nn.Linear(8, 8)


def test_tied_weights_stay_tied() -> None:
    """Packing replaces no parameter: tied weights are still one tensor, and names, shapes and values are as before."""
    model = Tied().requires_grad_(False)
    before = {name: (value.data_ptr(), value.clone()) for name, value in model.state_dict().items()}
    linear.pack(model, 1 << 30)
    assert model.head.weight is model.embedding.weight
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(after[name].data_ptr() == place for name, (place, _) in before.items())
    assert all(torch.equal(after[name], value) for name, (_, value) in before.items())


def test_budget_is_respected() -> None:
    """Layers are packed in order while their copies fit; the rest stays as it was and still computes."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 32), nn.Linear(32, 8), nn.Linear(8, 4)).requires_grad_(False)
    plain = copy.deepcopy(model)
    sizes = [4 * 64, 4 * 256, 4 * 256, 4 * 32]
    x = torch.randn(5, 8)
    for budget in (0, 100, 4 * 64, 4 * 64 + 4 * 255, 4 * 64 + 4 * 256 + 200, sum(sizes)):
        packed = copy.deepcopy(model)
        used = linear.pack(packed, budget)
        assert used <= budget
        changed = [
            size for size, layer in zip(sizes, packed, strict=True) if set(layer.forward.product.served) != {PLAIN}
        ]
        assert sum(changed) == used
        assert torch.allclose(packed(x), plain(x), rtol=1e-5, atol=1e-5)
    assert used == sum(sizes)


def test_only_plain_linear_layers_are_packed() -> None:
    """Subclasses of `nn.Linear`, which may compute something else, and other dtypes are not packed."""

    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    model = nn.Sequential(Doubled(8, 8), nn.Linear(8, 8, dtype=torch.float64)).requires_grad_(False)
    assert linear.pack(model, 1 << 30) == 0


def test_two_copies_have_room_or_not() -> None:
    """Kinds that are best at some numbers of rows are used together where the budget has room for both, else one of them."""
    best = times(WIDE, WIDE, PLAIN, ONEDNN, ONEDNN)
    for budget, expected in ((1 << 30, {ONEDNN, WIDE, PLAIN}), (300, None), (100, {PLAIN})):
        model = make(8, 8, True, torch.bfloat16)
        used = linear.pack(model, budget, times={(8, 8): best})
        assert used <= budget
        served = set(model[0].forward.product.served)
        # A processor without bfloat16 units cannot pack bfloat16.
        assert expected is None or served == expected or served == expected - {ONEDNN}


def test_released_weights() -> None:
    """Weights that packed copies replace are freed; tied ones, those used for some rows, and the first parameter stay. The
    output is the same. Of a model whose code reads one of them, all stay."""
    model = nn.Sequential(Tied(), nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(4, 8)).requires_grad_(False)
    x = torch.randn(5, 8)
    expected = [layer(x) for layer in (model[0].head, model[0].other, model[1], model[2])]
    first = model[0].embedding.weight
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    shapes = [layer.weight.shape for layer in layers]
    assert linear.replaceable(model, lambda: model[1](x) @ model[3].weight.T, (RuntimeError,)) == set()
    released = linear.replaceable(model, lambda: model[2](model[1](x)), (RuntimeError,))
    assert released == {model[0].other, model[1], model[2], model[3]}
    assert not any(layer.weight.is_meta for layer in layers)
    linear.pack(model, 1 << 30, times={(8, 4): FEW_PLAIN | {ONEDNN: [1.5, 1, 1, 1, 1]}}, released=released)
    assert {layer for layer in layers if layer.weight.is_meta} == {model[0].other, model[1], model[3]}
    assert [layer.weight.shape for layer in layers] == shapes
    assert model[0].head.weight is first and not first.is_meta
    with torch.inference_mode():
        found = [layer(x) for layer in (model[0].head, model[0].other, model[1], model[2])]
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in zip(found, expected, strict=True))


class Gated(nn.Module):
    """Two projections of one input, one of another, and one that is called out of turn."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.gate, self.up, self.down = (nn.Linear(a, b, dtype=dtype) for a, b in ((24, 40), (24, 56), (40, 24)))
        self.last = nn.Linear(24, 8, dtype=dtype)

    def forward(self, x: Tensor, *, changes: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        gate = self.gate(x)
        if changes:
            x += 1
        up = self.up(x)
        return up, self.down(gate), self.last(x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_siblings_share_a_product(dtype: torch.dtype) -> None:
    """Layers that are called with the same input one after the other are found, and multiply together; the result is that of
    each alone, for one input after another, also where one of them is called twice or not at all."""
    model = Gated(dtype).requires_grad_(False)
    plain = copy.deepcopy(model)
    x = torch.randn(5, 24, dtype=dtype)
    siblings = linear.find_siblings(model, lambda: model(x))
    assert siblings == [[model.gate, model.up]]
    measured = {(24, 96): FEW_PLAIN} if dtype == torch.bfloat16 else None
    assert linear.pack(model, 1 << 30, siblings, times=measured) > 0
    with torch.inference_mode():
        for seed in range(3):
            x = torch.randn(5 + seed, 24, dtype=dtype)
            for found, expected in zip(model(x), plain(x), strict=True):
                assert torch.allclose(found, expected, rtol=2**-6, atol=2**-6)
            for layer, other in ((model.gate, plain.gate), (model.gate, plain.gate), (model.up, plain.up)):
                assert torch.allclose(layer(x), other(x), rtol=2**-6, atol=2**-6)


def test_an_input_that_changes_makes_no_siblings() -> None:
    """Two layers that are called with the same tensor, changed in between, are no siblings."""
    model = Gated(torch.float32).requires_grad_(False)
    assert linear.find_siblings(model, lambda: model(torch.randn(3, 24), changes=True)) == []


@pytest.mark.parametrize("budget", ["auto", "0", "64KiB"])
def test_engine_with_any_budget(
    budget: str, engine: Callable[..., LLM], reference: Callable[[str], tiny.Reference]
) -> None:
    """`linear_memory` changes speed, not output."""
    tokens = tiny.prompt(30, 1)
    found = engine("llama", linear_memory=budget).generate([tokens], tiny.greedy(16))[0]
    reference("llama").check(tokens, found.outputs[0], 16)


def test_fingerprint_does_not_see_packing(llama: Path) -> None:
    """Packed or not, the model's fingerprint, and with it every key, is the same."""
    prints = {
        load_model(EngineConfig(model=str(llama), dtype="float32", linear_memory=budget)).fingerprint
        for budget in ("0", "64KiB", "auto")
    }
    assert len(prints) == 1


def test_bad_budget(llama: Path) -> None:
    """A budget that is not a size in bytes is a configuration error."""
    with pytest.raises(ConfigError, match="not a size in bytes"):
        load_model(EngineConfig(model=str(llama), linear_memory="plenty"))
