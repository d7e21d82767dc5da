"""Products of one input with the weights of linear layers: the kinds that `choice.choose` chooses among.

- compiled: the weight in panels, by the kernels of kernels/product.h, as 8-bit integers if it is quantized (quantize.py);
- onednn: the weight in oneDNN's packed layout;
- wide: a float32 copy of a bfloat16 weight in oneDNN's packed layout, for processors without bfloat16 units. A product of
  two bfloat16 numbers is exact in float32, so the sums are the same;
- plain: PyTorch's operator on the layer's own weight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from foreword.engine.kernels.kernel_choice import COMPILED, ONEDNN, PLAIN, WIDE, row_bucket
from foreword.engine.kernels.native import TYPES, Kernels
from foreword.engine.quantize import scale_of

# Error that rounding explains, relative to the product.
_ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


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
        found = [ONEDNN, *([WIDE] if dtype == torch.bfloat16 else []), PLAIN]
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
    return bool(error <= _ROUNDING[first.dtype] * torch.linalg.vector_norm(expected))


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
