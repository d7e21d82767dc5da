"""Weights of linear layers as 8-bit integers: one scale for each output, rounded to the nearest, no calibration.

A layer keeps the product of integer and scale in the model's dtype as its weight, so that every kind of product computes with
the same numbers, up to rounding. The compiled kernels keep the integers.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

_SCALE = "weight_scale"
_LARGEST = 127


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
