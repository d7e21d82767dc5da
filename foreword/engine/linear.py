"""Faster linear layers on CPUs: each keeps a packed copy of its weight, or two (dev/decisions/0006-cpu-linear-layers.md).

Products of one input with the weights are of these kinds:

- compiled: the weight in panels, by the kernels of kernels/product.h, as 8-bit integers if it is quantized (`quantize`);
- onednn: the weight in oneDNN's packed layout;
- wide: a float32 copy of a 16-bit weight in oneDNN's packed layout, for processors without units for such numbers. A product
  of two of them is exact in float32, so the sums are the same;
- plain: PyTorch's operator on the layer's own weight.

Which kind serves which number of rows is measured at load (measure.py, kernels/kernel_choice.py). A layer whose packed copies
serve all numbers of rows loses its own weight when it is packed.

Weights can be quantized to 8-bit integers: one scale for each output, rounded to the nearest, no calibration. A layer then
keeps the product of integer and scale in the model's dtype as its weight, so that every kind of product computes with the same
numbers, up to rounding. The compiled kernels keep the integers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from foreword.engine.kernels.kernel_choice import COMPILED, ONEDNN, PLAIN, ROWS, WIDE, Times, choose, row_bucket
from foreword.engine.kernels.native import TYPES, Kernels

_SCALE = "weight_scale"
_LARGEST = 127
# Error that rounding explains, relative to the product.
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
# Inputs and outputs of a product.
Shape = tuple[int, int]


def quantize(layers: Iterable[nn.Linear]) -> int:
    """Quantize the weights of these layers; returns how many. A weight that is tied to another module's becomes its own.

    The scale, float32 `[outputs]`, becomes a buffer of the layer: it is part of the model's fingerprint.
    """
    count = 0
    for layer in layers:
        weight = layer.weight.detach().float()
        scale = weight.abs().amax(dim=1).clamp_min(torch.finfo(torch.float32).tiny) / _LARGEST
        rounded = weight.div_(scale.unsqueeze(1)).round_().mul_(scale.unsqueeze(1)).to(layer.weight.dtype)
        layer.weight = nn.Parameter(rounded, requires_grad=False)
        set_scale(layer, scale)
        count += 1
    return count


def scale_of(layer: nn.Linear) -> Tensor | None:
    """The scale of each output of a quantized layer."""
    scale = layer._buffers.get(_SCALE)
    assert scale is None or isinstance(scale, Tensor)
    return scale


def set_scale(layer: nn.Linear, scale: Tensor) -> None:
    """Say that the layer's weight consists of multiples of these scales, float32 `[outputs]`."""
    layer.register_buffer(_SCALE, scale)


class Product:
    """The product of one input with the weights of one or more layers, `[..., in]` to the layers' outputs side by side,
    `[..., out]`."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self.layers = list(layers)

    def multiply(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class CompiledProduct(Product):
    """The product by the compiled kernels."""

    def __init__(self, layers: Sequence[nn.Linear], kernels: Kernels) -> None:
        super().__init__(layers)
        self._kernels = kernels
        biases = [layer.bias for layer in layers if layer.bias is not None]
        self.weight = kernels.pack([layer.weight for layer in layers], biases, [scale_of(layer) for layer in layers])

    def multiply(self, x: Tensor) -> Tensor:
        return self._kernels.multiply(self.weight, x)


class OneDnnProduct(Product):
    """The product by oneDNN in `dtype`. Raises RuntimeError for a dtype that oneDNN does not multiply here."""

    def __init__(self, layers: Sequence[nn.Linear], dtype: torch.dtype) -> None:
        super().__init__(layers)
        self._dtype = dtype
        weight = torch.cat([layer.weight.detach().to(dtype) for layer in layers])
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        biases = [layer.bias.detach().to(dtype) for layer in layers if layer.bias is not None]
        self._bias = torch.cat(biases) if biases else None

    def multiply(self, x: Tensor) -> Tensor:
        product = torch.ops.mkldnn._linear_pointwise(x.to(self._dtype), self._packed, self._bias, "none", [], "")
        assert isinstance(product, Tensor)
        return product.to(x.dtype)


class PlainProduct(Product):
    """The product by PyTorch's operator on the layers' own weights."""

    def multiply(self, x: Tensor) -> Tensor:
        parts = [functional.linear(x, layer.weight, layer.bias) for layer in self.layers]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def kinds(dtype: torch.dtype, inputs: int, kernels: Kernels | None) -> list[str]:
    """The kinds of products that there may be for a weight, the preferred ones first."""
    found = [PLAIN]
    if torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        found = [ONEDNN, *([WIDE] if dtype != torch.float32 else []), PLAIN]
    # A word of the kernels holds two numbers of bfloat16.
    if kernels is not None and dtype in TYPES and inputs % 2 == 0:
        found.insert(0, COMPILED)
    return found


def size_of(kind: str, layers: Sequence[nn.Linear]) -> int:
    """Bytes that a product of this kind keeps for these layers."""

    def itemsize(layer: nn.Linear) -> int:
        quantized = kind == COMPILED and scale_of(layer) is not None
        return 1 if quantized else 4 if kind == WIDE else layer.weight.dtype.itemsize

    return sum(layer.weight.numel() * itemsize(layer) for layer in layers)


def make_product(kind: str, layers: Sequence[nn.Linear], kernels: Kernels | None) -> Product | None:
    """A product of this kind; None if this machine does not compute it, or not right.

    The product of random rows is compared with what the layers compute: the engine's self-check would not see a difference,
    as both of its passes use the same products.
    """
    if kind == PLAIN:
        return PlainProduct(layers)
    try:
        if kind == COMPILED:
            assert kernels is not None
            product: Product = CompiledProduct(layers, kernels)
        else:
            product = OneDnnProduct(layers, torch.float32 if kind == WIDE else layers[0].weight.dtype)
        return product if _is_product(product) else None
    except RuntimeError:  # an instruction set that oneDNN lacks for this dtype
        return None


@torch.inference_mode()
def _is_product(product: Product) -> bool:
    first = product.layers[0].weight
    x = torch.randn(2, first.shape[1], generator=torch.Generator().manual_seed(0)).to(first.dtype)
    expected = PlainProduct(product.layers).multiply(x).float()
    error = torch.linalg.vector_norm(product.multiply(x).float() - expected)
    return bool(error <= ROUNDING[first.dtype] * torch.linalg.vector_norm(expected))


class ChosenProduct(Product):
    """The product of one input with one or more layers, for each number of rows by the kind that was chosen.

    Sibling layers share one product: the first of them that is called computes the outputs of all, and each takes its
    own once. This relies on what `find_siblings` saw in a trial pass: the siblings are called one after the other with
    the same tensor object, and nothing changes the tensor in between. Any other order of calls computes the product
    again. The input is referenced until all outputs are taken, so no other tensor can have its identity.
    """

    def __init__(self, layers: Sequence[nn.Linear], served: Sequence[str], products: Mapping[str, Product]) -> None:
        super().__init__(layers)
        self.served = tuple(served)
        self._by_rows = [products[kind] for kind in served]
        self._sizes = [layer.weight.shape[0] for layer in layers]
        self.inputs, self.outputs = layers[0].weight.shape[1], sum(self._sizes)
        compiled = products.get(COMPILED)
        self.compiled = compiled if isinstance(compiled, CompiledProduct) else None
        self._input: Tensor | None = None
        # By place of the layer; those that were not taken yet.
        self._outputs: dict[int, Tensor] = {}

    def kind(self, rows: int) -> str:
        """The kind that multiplies this number of rows."""
        return self.served[row_bucket(rows)]

    def multiply(self, x: Tensor) -> Tensor:
        return self._by_rows[row_bucket(x.numel() // self.inputs)].multiply(x)

    def output(self, x: Tensor, place: int) -> Tensor:
        """The output of layer number `place`."""
        layer = self.layers[place]
        if self.kind(x.numel() // self.inputs) == PLAIN:
            return functional.linear(x, layer.weight, layer.bias)
        if len(self.layers) == 1:
            return self.multiply(x)
        if x is not self._input or place not in self._outputs:
            self._input = x
            self._outputs = dict(enumerate(torch.split(self.multiply(x), self._sizes, dim=-1)))
        output = self._outputs.pop(place)
        if not self._outputs:
            self._input = None
        return output


def replace_transposed(model: nn.Module) -> None:
    """Replace layers that keep a weight as `[inputs, outputs]` (GPT-2's) by linear layers with the same numbers."""
    for name, module in list(model.named_modules()):
        if type(module) is Conv1D:
            inputs, outputs = module.weight.shape
            layer = nn.Linear(inputs, outputs, device="meta")
            layer.weight = nn.Parameter(module.weight.detach().t().contiguous(), requires_grad=False)
            layer.bias = nn.Parameter(module.bias.detach(), requires_grad=False)
            model.set_submodule(name, layer)


def packable(model: nn.Module) -> Iterator[nn.Linear]:
    """The plain linear layers of a model on a CPU, in the dtypes that packing makes faster."""
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.device.type == "cpu" and module.weight.dtype in TYPES:
            yield module


def groups(model: nn.Module, siblings: Sequence[Sequence[nn.Linear]] = ()) -> list[list[nn.Linear]]:
    """The packable layers in order, siblings together (`find_siblings`)."""
    together = {layer: list(group) for group in siblings for layer in group}
    found: list[list[nn.Linear]] = []
    done: set[nn.Linear] = set()
    for linear in packable(model):
        if linear not in done:
            group = together.get(linear, [linear])
            done.update(group)
            found.append(group)
    return found


def shape_of(group: Sequence[nn.Linear]) -> Shape:
    """Inputs and outputs of the product of a group."""
    return group[0].weight.shape[1], sum(layer.weight.shape[0] for layer in group)


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
        first = groups[-1][0] if same else layer
        if same and first.weight.dtype == layer.weight.dtype and (first.bias is None) == (layer.bias is None):
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


class Patch:
    """A replacement of `forward` of one instance of a module."""

    __slots__ = ()


def replaceable(model: nn.Module, run: Callable[[], object], errors: tuple[type[Exception], ...]) -> set[nn.Linear]:
    """Layers whose weight can be taken away once a packed copy computes the product: no other module has it, and `run`, a pass
    of the model, reads none of them. If it does, it raises one of `errors`, and there are none."""
    shared = _shared_storage(model)
    # A model's device is that of its first parameter.
    first = next(model.parameters(), None)
    layers = [layer for layer in packable(model) if layer.weight is not first and _address(layer.weight) not in shared]
    weights = [layer.weight for layer in layers]
    try:
        for layer in layers:
            setattr(layer, "forward", _HeldWeight(layer))  # noqa: B010 - a method is replaced
            _take_weight(layer)
        run()
    except errors:
        return set()
    finally:
        for layer, weight in zip(layers, weights, strict=True):
            layer.weight = weight
            layer.__dict__.pop("forward", None)
    return set(layers)


class _HeldWeight(Patch):
    """`forward` of a linear layer with the weight that the layer had."""

    __slots__ = ("_bias", "_weight")

    def __init__(self, layer: nn.Linear) -> None:
        self._weight, self._bias = layer.weight, layer.bias

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self._weight, self._bias)


def _take_weight(layer: nn.Linear) -> None:
    """Leave a parameter without memory, of the same shape and dtype."""
    layer.weight = nn.Parameter(layer.weight.detach().to("meta"), requires_grad=False)


def pack(
    model: nn.Module,
    budget: int,
    siblings: Sequence[Sequence[nn.Linear]] = (),
    kernels: Kernels | None = None,
    times: Mapping[Shape, Times] | None = None,
    released: Collection[nn.Linear] = (),
) -> int:
    """Give linear layers packed copies, in order, until `budget` bytes are used; returns the bytes used.

    Only `forward` of the layer's instance is replaced; its parameters stay as they are, so tied weights stay tied. Layers of
    `released` lose their weight at once if its copies serve all numbers of rows (`replaceable`).
    `siblings` share one product (`find_siblings`). `times` are those measured for each shape; a shape without any has the first
    kind of product that this machine computes.
    """
    shared = _shared_storage(model)
    used = 0
    for group in groups(model, siblings):
        tied = any(_address(layer.weight) in shared for layer in group)
        product = _product(group, kernels, (times or {}).get(shape_of(group)), budget - used, tied)
        for place, layer in enumerate(group):
            setattr(layer, "forward", PackedForward(layer, product, place))  # noqa: B010 - a method is replaced
            if layer in released and PLAIN not in product.served:
                _take_weight(layer)
        used += sum(size_of(kind, group) for kind in set(product.served) - {PLAIN})
    return used


def _product(
    group: Sequence[nn.Linear], kernels: Kernels | None, times: Times | None, room: int, tied: bool
) -> ChosenProduct:
    """The product of a group's layers with copies of at most `room` bytes."""
    possible = kinds(group[0].weight.dtype, group[0].weight.shape[1], kernels)
    measured = times or {kind: [1.0 + place] * len(ROWS) for place, kind in enumerate(possible)}
    # A shape's times may be from another group, and a kind fail for this one.
    left = {kind: measured[kind] for kind in possible if kind in measured} or {PLAIN: [1.0] * len(ROWS)}
    while True:
        sizes = {kind: size_of(kind, group) for kind in left}
        if tied:
            sizes[PLAIN] = 0
        served = choose(left, sizes, room)
        made: dict[str, Product] = {}
        for kind in dict.fromkeys(served):
            product = make_product(kind, group, kernels)
            if product is None:
                del left[kind]
                break
            made[kind] = product
        else:
            return ChosenProduct(group, served, made)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _shared_storage(model: nn.Module) -> set[int]:
    """Addresses of memory that more than one module has a parameter or a buffer in."""
    counts: Counter[int] = Counter()
    for module in model.modules():
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            counts[_address(tensor)] += 1
    return {address for address, count in counts.items() if count > 1}


class PackedForward(Patch):
    """`forward` of one linear layer: `[..., in] -> [..., out]` in the input's dtype."""

    __slots__ = ("_linear", "_place", "product")

    def __init__(self, linear: nn.Linear, product: ChosenProduct, place: int) -> None:
        self._linear = linear
        self.product = product
        self._place = place

    def __call__(self, x: Tensor) -> Tensor:
        linear = self._linear
        if x.dtype != linear.weight.dtype:
            return functional.linear(x, linear.weight, linear.bias)
        return self.product.output(x, self._place)
