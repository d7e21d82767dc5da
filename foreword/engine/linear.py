"""Linear layers on CPUs, as fast as the machine allows, with the same weights.

oneDNN multiplies by a weight that it has laid out beforehand faster than by one that it has not, above all with few rows
(docs/decisions/0006): so a layer keeps a packed copy of its weight, in its own dtype where the processor multiplies that.
A processor without bfloat16 units is a case of its own. There a bfloat16 matrix-vector product runs at the speed of memory,
because half as many bytes are read, but with more than a few rows the same operator falls to a fraction of what float32
reaches; so a bfloat16 layer keeps a packed float32 copy for batches and prompts, and its own weight for single rows. A
product of bfloat16 numbers is exact in float32, so both sum the same products in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

GEMV_ROWS = 2


def has_bfloat16_units() -> bool:
    """Whether oneDNN multiplies bfloat16 matrices natively here (AVX512-BF16, AMX, Arm BF16)."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def packable(model: nn.Module) -> Iterator[nn.Linear]:
    """The plain linear layers of a model whose products packing makes faster here."""
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.device.type == "cpu":
            dtype = module.weight.dtype
            if dtype in (torch.float32, torch.bfloat16):
                yield module


def packed_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of a packed copy of a weight of `dtype`."""
    return dtype if dtype == torch.float32 or has_bfloat16_units() else torch.float32


def packed_bytes(model: nn.Module) -> int:
    """Bytes that `pack` takes for the copies it makes."""
    return sum(_packed_size(linear) for linear in packable(model))


def _packed_size(linear: nn.Linear) -> int:
    return packed_dtype(linear.weight.dtype).itemsize * linear.weight.numel()


def find_siblings(model: nn.Module, run: Callable[[], object]) -> list[list[nn.Linear]]:
    """Layers that one pass, `run`, calls one after the other with the very same input (a layer's query, key and value, or
    gate and up projections): one product serves them all. A layer is in one group at most."""
    groups: list[list[nn.Linear]] = []
    last: list[tuple[Tensor, Tensor]] = []
    seen: set[nn.Linear] = set()

    def note(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        assert isinstance(layer, nn.Linear)
        x = inputs[0]
        # The same object with the same numbers: a model might add to its input in between.
        same = bool(last) and x is last[0][0] and torch.equal(x, last[0][1])
        last[:] = [(x, x.clone())]
        if layer in seen:
            return
        seen.add(layer)
        if same and _fits(groups[-1][0], layer):
            groups[-1].append(layer)
        else:
            groups.append([layer])

    hooks = [layer.register_forward_pre_hook(note) for layer in packable(model)]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return [group for group in groups if len(group) > 1]


def _fits(first: nn.Linear, other: nn.Linear) -> bool:
    return first.weight.dtype == other.weight.dtype and (first.bias is None) == (other.bias is None)


def pack(model: nn.Module, budget: int, siblings: Sequence[Sequence[nn.Linear]] = ()) -> int:
    """Give linear layers a packed copy, in order, until `budget` bytes are used; returns the bytes used.

    Only `forward` of the layer's instance is replaced; its parameters stay as they are, so tied weights stay tied.
    `siblings` share one packed copy (`find_siblings`).
    """
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return 0
    together = {layer: group for group in siblings for layer in group}
    used = 0
    done: set[nn.Linear] = set()
    for linear in packable(model):
        if linear in done:
            continue
        group = together.get(linear, [linear])
        size = sum(map(_packed_size, group))
        done.update(group)
        if used + size <= budget:
            product = _Product(group)
            for place, layer in enumerate(group):
                setattr(layer, "forward", _PackedForward(layer, product, place))  # noqa: B010 - a method is replaced
            used += size
    return used


class _Product:
    """The product of one input with the weights of one or more layers: `[..., in] -> [..., out]` for each."""

    __slots__ = ("_bias", "_input", "_outputs", "_packed", "_sizes", "wider")

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        kind = packed_dtype(layers[0].weight.dtype)
        self.wider = kind != layers[0].weight.dtype
        weight = torch.cat([layer.weight.detach().to(kind) for layer in layers])
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        biases = [layer.bias.detach().to(kind) for layer in layers if layer.bias is not None]
        self._bias = torch.cat(biases) if biases else None
        self._sizes = [layer.weight.shape[0] for layer in layers]
        self._input: Tensor | None = None
        self._outputs: list[Tensor | None] = []

    def of(self, x: Tensor, place: int) -> Tensor:
        """The output of layer number `place`. The first to come with an input computes it for all; each takes its own once."""
        if len(self._sizes) == 1:
            return self._multiply(x)
        if x is not self._input or self._outputs[place] is None:
            self._input = x
            self._outputs = list(torch.split(self._multiply(x), self._sizes, dim=-1))
        output = self._outputs[place]
        assert output is not None
        self._outputs[place] = None
        if not any(other is not None for other in self._outputs):
            self._input = None
        return output

    def _multiply(self, x: Tensor) -> Tensor:
        wide = x.float() if self.wider else x
        product = torch.ops.mkldnn._linear_pointwise(wide, self._packed, self._bias, "none", [], "")
        assert isinstance(product, Tensor)
        return product.to(x.dtype) if self.wider else product


class _PackedForward:
    """`forward` of one linear layer: `[..., in] -> [..., out]` in the input's dtype."""

    __slots__ = ("_linear", "_place", "_product")

    def __init__(self, linear: nn.Linear, product: _Product, place: int) -> None:
        self._linear = linear
        self._product = product
        self._place = place

    def __call__(self, x: Tensor) -> Tensor:
        if self._product.wider and x.numel() <= GEMV_ROWS * x.shape[-1]:
            return functional.linear(x, self._linear.weight, self._linear.bias)
        return self._product.of(x, self._place)
