"""Linear layers on CPUs, as fast as the machine allows, with the same weights.

Two facts about CPUs without bfloat16 units (docs/decisions/0006): a bfloat16 matrix-vector product runs at the speed of
memory, because half as many bytes are read; but with more than a few rows the same operator falls to a fraction of what
float32 reaches. And oneDNN multiplies by a weight that it has laid out beforehand faster than by one that it has not,
above all with few rows. So a layer keeps a float32 copy, packed by oneDNN, for batches and prompts, and its bfloat16 weight
for single rows. A product of bfloat16 numbers is exact in float32, so both sum the same products in float32.
"""

from __future__ import annotations

from collections.abc import Iterator

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
            if dtype == torch.float32 or (dtype == torch.bfloat16 and not has_bfloat16_units()):
                yield module


def packed_bytes(model: nn.Module) -> int:
    """Bytes that `pack` takes for the copies it makes."""
    return sum(4 * linear.weight.numel() for linear in packable(model))


def pack(model: nn.Module, budget: int) -> int:
    """Give linear layers a packed float32 copy, in order, until `budget` bytes are used; returns the bytes used.

    Only `forward` of the layer's instance is replaced; its parameters stay as they are, so tied weights stay tied.
    """
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return 0
    used = 0
    for linear in packable(model):
        size = 4 * linear.weight.numel()
        if used + size <= budget:
            setattr(linear, "forward", _PackedForward(linear))  # noqa: B010 - a method is replaced, by intent
            used += size
    return used


class _PackedForward:
    """`forward` of one linear layer: `[..., in] -> [..., out]` in the input's dtype."""

    __slots__ = ("_bias", "_linear", "_packed", "_wide")

    def __init__(self, linear: nn.Linear) -> None:
        self._linear = linear
        self._wide = linear.weight.dtype == torch.float32
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach().float().contiguous(), None)
        self._bias = None if linear.bias is None else linear.bias.detach().float()

    def __call__(self, x: Tensor) -> Tensor:
        if self._wide:
            return self._multiply(x)
        if x.numel() <= GEMV_ROWS * x.shape[-1]:
            return functional.linear(x, self._linear.weight, self._linear.bias)
        return self._multiply(x.float()).to(x.dtype)

    def _multiply(self, x: Tensor) -> Tensor:
        product = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        assert isinstance(product, Tensor)
        return product
