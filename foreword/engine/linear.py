"""Linear layers on CPUs, as fast as the machine allows, with the same weights.

oneDNN multiplies by a weight that it has laid out beforehand faster than by one that it has not, above all with few rows
(docs/decisions/0006): so a layer keeps a packed copy of its weight, in its own dtype where the processor multiplies that.
A processor without bfloat16 units is a case of its own. There a bfloat16 matrix-vector product runs at the speed of memory,
because half as many bytes are read, but with more than a few rows the same operator falls to a fraction of what float32
reaches; so a bfloat16 layer keeps a packed float32 copy for batches and prompts, and its own weight for single rows. A
product of bfloat16 numbers is exact in float32, so both sum the same products in float32.

Where the compiled kernels multiply faster than oneDNN (kernels/product.h), the packed copy is theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from foreword.engine.kernels.native import Kernels, PackedProduct

GEMV_ROWS = 2
# Of the length of a product's rows.
_ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


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


class Patch:
    """A replacement of `forward` of one instance of a module."""

    __slots__ = ()


@contextmanager
def unpatched(model: nn.Module) -> Iterator[None]:
    """Within, all modules of the model compute as they came."""
    held = [(module, module.__dict__.pop("forward")) for module in model.modules() if is_patched(module)]
    try:
        yield
    finally:
        for module, forward in held:
            module.__dict__["forward"] = forward


def is_patched(module: nn.Module) -> bool:
    """Whether its `forward` is a replacement."""
    return isinstance(module.__dict__.get("forward"), Patch)


def pack(
    model: nn.Module,
    budget: int,
    siblings: Sequence[Sequence[nn.Linear]] = (),
    kernels: Kernels | None = None,
) -> int:
    """Give linear layers a packed copy, in order, until `budget` bytes are used; returns the bytes used.

    Only `forward` of the layer's instance is replaced; its parameters stay as they are, so tied weights stay tied.
    `siblings` share one packed copy (`find_siblings`). `kernels` multiply where they are faster than oneDNN.
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
            product = product_of(group, kernels)
            for place, layer in enumerate(group):
                setattr(layer, "forward", PackedForward(layer, product, place))  # noqa: B010 - a method is replaced
            used += size
    return used


def product_of(layers: Sequence[nn.Linear], kernels: Kernels | None) -> Shared:
    """The product of one input with the weights of these layers."""
    first = layers[0].weight
    # A word of the kernels holds two numbers of bfloat16.
    if kernels is not None and kernels.multiplies(first.dtype) and first.shape[1] % 2 == 0:
        product = NativeProduct(layers, kernels)
        if _is_product(product, layers):
            return Shared(layers, product)
    return Shared(layers, _OneDnnProduct(layers))


class _Multiplies(Protocol):
    """A product with packed weights. `wider`: they are of a wider dtype than the layers' own."""

    wider: bool

    def __call__(self, x: Tensor) -> Tensor: ...


class NativeProduct:
    """The product by the compiled kernels."""

    __slots__ = ("_kernels", "packed", "wider")

    def __init__(self, layers: Sequence[nn.Linear], kernels: Kernels) -> None:
        self.wider = False
        self._kernels = kernels
        biases = [layer.bias for layer in layers if layer.bias is not None]
        self.packed: PackedProduct = kernels.pack([layer.weight for layer in layers], biases)

    def __call__(self, x: Tensor) -> Tensor:
        return self._kernels.multiply(self.packed, x)


@torch.inference_mode()
def _is_product(product: NativeProduct, layers: Sequence[nn.Linear]) -> bool:
    """Whether random rows times the packed weights are what the layers make of them: the engine's check of the whole model
    compares two passes that both multiply by packed weights."""
    first = layers[0].weight
    x = torch.randn(2, first.shape[1], generator=torch.Generator().manual_seed(0)).to(first.dtype)
    expected = torch.cat([functional.linear(x, layer.weight, layer.bias) for layer in layers], dim=-1).float()
    error = torch.linalg.vector_norm(product(x).float() - expected)
    return bool(error <= _ROUNDING[first.dtype] * torch.linalg.vector_norm(expected))


class _OneDnnProduct:
    """The product by oneDNN."""

    __slots__ = ("_bias", "_packed", "wider")

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        kind = packed_dtype(layers[0].weight.dtype)
        self.wider = kind != layers[0].weight.dtype
        weight = torch.cat([layer.weight.detach().to(kind) for layer in layers])
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        biases = [layer.bias.detach().to(kind) for layer in layers if layer.bias is not None]
        self._bias = torch.cat(biases) if biases else None

    def __call__(self, x: Tensor) -> Tensor:
        wide = x.float() if self.wider else x
        product = torch.ops.mkldnn._linear_pointwise(wide, self._packed, self._bias, "none", [], "")
        assert isinstance(product, Tensor)
        return product.to(x.dtype) if self.wider else product


class Shared:
    """The product of one input with the weights of one or more layers: `[..., in] -> [..., out]` for each."""

    __slots__ = ("_input", "_outputs", "_sizes", "layers", "multiply")

    def __init__(self, layers: Sequence[nn.Linear], multiply: _Multiplies) -> None:
        self.layers = list(layers)
        self.multiply = multiply
        self._sizes = [layer.weight.shape[0] for layer in layers]
        self._input: Tensor | None = None
        self._outputs: list[Tensor | None] = []

    def of(self, x: Tensor, place: int) -> Tensor:
        """The output of layer number `place`. The first to come with an input computes it for all; each takes its own once."""
        if len(self._sizes) == 1:
            return self.multiply(x)
        if x is not self._input or self._outputs[place] is None:
            self._input = x
            self._outputs = list(torch.split(self.multiply(x), self._sizes, dim=-1))
        output = self._outputs[place]
        assert output is not None
        self._outputs[place] = None
        if not any(other is not None for other in self._outputs):
            self._input = None
        return output


class PackedForward(Patch):
    """`forward` of one linear layer: `[..., in] -> [..., out]` in the input's dtype."""

    __slots__ = ("_linear", "_place", "product")

    def __init__(self, linear: nn.Linear, product: Shared, place: int) -> None:
        self._linear = linear
        self.product = product
        self._place = place

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype != self._linear.weight.dtype:
            return functional.linear(x, self._linear.weight, self._linear.bias)
        if self.product.multiply.wider and x.numel() <= GEMV_ROWS * x.shape[-1]:
            return functional.linear(x, self._linear.weight, self._linear.bias)
        return self.product.of(x, self._place)
