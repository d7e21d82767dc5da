"""Faster linear layers on CPUs: each keeps a packed copy of its weight (docs/decisions/0006-cpu-linear-layers.md).

oneDNN multiplies faster by a weight that was packed beforehand, above all with few rows. The copy has the weight's
dtype where the processor has units for it. A processor without bfloat16 units multiplies a bfloat16 matrix by one or
two rows at the speed of memory, but by more rows at a fraction of the speed of float32. There a bfloat16 layer has a
packed float32 copy for batches and prompts, and uses its own weight for single rows. A product of two bfloat16 numbers
is exact in float32, so both give the same sums.

Where the compiled kernels are faster than oneDNN (kernels/product.h), they do the packing and the product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from foreword.engine.kernels.native import Kernels

# With at most this many rows a layer multiplies by its own weight rather than by a wider copy.
GEMV_ROWS = 2
# Error that rounding explains, relative to the product.
_ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def has_bfloat16_units() -> bool:
    """Whether oneDNN multiplies bfloat16 matrices natively here (AVX512-BF16, AMX, Arm BF16)."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def packable(model: nn.Module) -> Iterator[nn.Linear]:
    """The plain linear layers of a model, in the dtypes that packing makes faster."""
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.device.type == "cpu":
            dtype = module.weight.dtype
            if dtype in (torch.float32, torch.bfloat16):
                yield module


def packed_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of a packed copy of a weight of `dtype`."""
    return dtype if dtype == torch.float32 or has_bfloat16_units() else torch.float32


def packed_bytes(model: nn.Module) -> int:
    """Bytes of all copies that `pack` makes without a budget."""
    return sum(_packed_size(linear) for linear in packable(model))


def _packed_size(linear: nn.Linear) -> int:
    return packed_dtype(linear.weight.dtype).itemsize * linear.weight.numel()


def find_siblings(model: nn.Module, run: Callable[[], object]) -> list[list[nn.Linear]]:
    """Groups of layers that one pass, `run`, calls one after the other with the same tensor: query, key and value
    projections, or gate and up projections. One product serves a group. A layer is in one group at most."""
    groups: list[list[nn.Linear]] = []
    last: list[tuple[Tensor, Tensor]] = []
    seen: set[nn.Linear] = set()

    def note(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        assert isinstance(layer, nn.Linear)
        x = inputs[0]
        # The same object with the same numbers: a model may change the tensor in between.
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
    """Within, all modules of the model have their own `forward`."""
    patches = [(module, module.__dict__.pop("forward")) for module in model.modules() if is_patched(module)]
    try:
        yield
    finally:
        for module, forward in patches:
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
            product = packed_product(group, kernels)
            for place, layer in enumerate(group):
                setattr(layer, "forward", PackedForward(layer, product, place))  # noqa: B010 - a method is replaced
            used += size
    return used


def packed_product(layers: Sequence[nn.Linear], kernels: Kernels | None) -> PackedProduct:
    """The product of one input with the weights of these layers, by the compiled kernels where they are faster."""
    first = layers[0].weight
    # A word of the kernels holds two numbers of bfloat16.
    if kernels is not None and kernels.multiplies(first.dtype) and first.shape[1] % 2 == 0:
        product = CompiledProduct(layers, kernels)
        if _is_product(product, layers):
            return product
    return _OneDnnProduct(layers)


class PackedProduct:
    """The product of one input with the packed weights of one or more layers.

    Sibling layers share one product: the first of them that is called computes the outputs of all, and each takes its
    own once. This relies on what `find_siblings` saw in a trial pass: the siblings are called one after the other with
    the same tensor object, and nothing changes the tensor in between. Any other order of calls computes the product
    again. The input is referenced until all outputs are taken, so no other tensor can have its identity.
    """

    # Whether the packed weights have a wider dtype than the layers' own.
    wider = False

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self.layers = list(layers)
        self._sizes = [layer.weight.shape[0] for layer in layers]
        self._input: Tensor | None = None
        # By place of the layer; those that were not taken yet.
        self._outputs: dict[int, Tensor] = {}

    def multiply(self, x: Tensor) -> Tensor:
        """`[..., in]` to the outputs of all layers side by side, `[..., out]`."""
        raise NotImplementedError

    def output(self, x: Tensor, place: int) -> Tensor:
        """The output of layer number `place`."""
        if len(self.layers) == 1:
            return self.multiply(x)
        if x is not self._input or place not in self._outputs:
            self._input = x
            self._outputs = dict(enumerate(torch.split(self.multiply(x), self._sizes, dim=-1)))
        output = self._outputs.pop(place)
        if not self._outputs:
            self._input = None
        return output


class CompiledProduct(PackedProduct):
    """The product by the compiled kernels."""

    def __init__(self, layers: Sequence[nn.Linear], kernels: Kernels) -> None:
        super().__init__(layers)
        self._kernels = kernels
        biases = [layer.bias for layer in layers if layer.bias is not None]
        self.weight = kernels.pack([layer.weight for layer in layers], biases)

    def multiply(self, x: Tensor) -> Tensor:
        return self._kernels.multiply(self.weight, x)


class _OneDnnProduct(PackedProduct):
    """The product by oneDNN."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        super().__init__(layers)
        kind = packed_dtype(layers[0].weight.dtype)
        self.wider = kind != layers[0].weight.dtype
        weight = torch.cat([layer.weight.detach().to(kind) for layer in layers])
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        biases = [layer.bias.detach().to(kind) for layer in layers if layer.bias is not None]
        self._bias = torch.cat(biases) if biases else None

    def multiply(self, x: Tensor) -> Tensor:
        wide = x.float() if self.wider else x
        product = torch.ops.mkldnn._linear_pointwise(wide, self._packed, self._bias, "none", [], "")
        assert isinstance(product, Tensor)
        return product.to(x.dtype) if self.wider else product


@torch.inference_mode()
def _is_product(product: PackedProduct, layers: Sequence[nn.Linear]) -> bool:
    """Whether the product of random rows is what the layers compute. The engine's self-check would not see a
    difference: both of its passes multiply by packed weights."""
    first = layers[0].weight
    x = torch.randn(2, first.shape[1], generator=torch.Generator().manual_seed(0)).to(first.dtype)
    expected = torch.cat([functional.linear(x, layer.weight, layer.bias) for layer in layers], dim=-1).float()
    error = torch.linalg.vector_norm(product.multiply(x).float() - expected)
    return bool(error <= _ROUNDING[first.dtype] * torch.linalg.vector_norm(expected))


class PackedForward(Patch):
    """`forward` of one linear layer: `[..., in] -> [..., out]` in the input's dtype."""

    __slots__ = ("_linear", "_place", "product")

    def __init__(self, linear: nn.Linear, product: PackedProduct, place: int) -> None:
        self._linear = linear
        self.product = product
        self._place = place

    def __call__(self, x: Tensor) -> Tensor:
        linear = self._linear
        few_rows = self.product.wider and x.numel() <= GEMV_ROWS * x.shape[-1]
        if few_rows or x.dtype != linear.weight.dtype:
            return functional.linear(x, linear.weight, linear.bias)
        return self.product.output(x, self._place)
