"""Experts of a mixture by the compiled kernels, with a fixed order of sums: a token's result does not depend on the others.

The experts are those of Transformers' interface (`use_experts_implementation`): weights of all experts in one tensor,
`[experts, outputs, inputs]` or transposed. A router chooses some of them for each token, and their results are added up in the
router's order, in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from foreword.engine.kernels.native import Kernels, PackedWeight
from foreword.engine.linear import ROUNDING, Patch

_NAMES = ("gate_up_proj", "down_proj")
# Computes an elementwise function of rows, some at a time, with the same bits for any rows (`batch_invariance.by_rows`).
ByRows = Callable[[Callable[[Tensor], Tensor], Tensor, int], list[Tensor]]


def is_experts(module: nn.Module) -> bool:
    """Whether a module has the gated experts that `ExpertsForward` computes."""
    weights = [getattr(module, name, None) for name in _NAMES]
    return (
        all(isinstance(weight, nn.Parameter) and weight.dim() == 3 for weight in weights)
        and bool(getattr(module, "has_gate", False))
        and not getattr(module, "has_post_expert_norm", True)
        and {name for name, one in module.named_parameters(recurse=False) if one.dim() > 2} == set(_NAMES)
    )


class ExpertsForward(Patch):
    """`forward` of experts, by packed copies of their weights. `by_rows` computes the gate, where it is not SiLU's."""

    __slots__ = ("_by_rows", "_down", "_gate", "_gate_up", "_inner", "_kernels", "_module")

    def __init__(self, module: Any, kernels: Kernels, by_rows: ByRows) -> None:
        self._module, self._kernels, self._by_rows = module, kernels, by_rows
        self._gate_up, self._down = (self._pack(name) for name in _NAMES)
        self._inner = self._down[0].inputs
        self._gate = self._is_silu()

    def _pack(self, name: str) -> list[PackedWeight]:
        module = self._module
        weights, biases = getattr(module, name).detach(), getattr(module, f"{name}_bias", None)
        packed = []
        for number, weight in enumerate(weights):
            outputs = weight.t().contiguous() if module.is_transposed else weight
            packed.append(self._kernels.pack([outputs], [] if biases is None else [biases[number]]))
        return packed

    @torch.inference_mode()
    def fits(self) -> bool:
        """Whether it computes what the module's own `forward` does, which the engine's self-check would not see: both of its
        passes use this one."""
        down: Tensor = self._module.down_proj
        noise = torch.Generator().manual_seed(0)
        x = torch.randn(5, self._gate_up[0].inputs, generator=noise).to(down.dtype)
        chosen = torch.stack([torch.randperm(len(self._down), generator=noise)[:2] for _ in x])
        weights = torch.rand(chosen.shape, generator=noise).to(down.dtype)
        try:
            expected = type(self._module).forward(self._module, x, chosen, weights).float()
        except (TypeError, AttributeError, RuntimeError, ValueError, LookupError):
            return False
        error = torch.linalg.vector_norm(self(x, chosen, weights).float() - expected)
        return bool(error <= 2 * ROUNDING[down.dtype] * torch.linalg.vector_norm(expected))

    def release(self) -> None:
        """Take the weights from the module."""
        for name in _NAMES:
            weight = getattr(self._module, name).detach()
            setattr(self._module, name, nn.Parameter(weight.to("meta"), requires_grad=False))

    def _is_silu(self) -> bool:
        """Whether the gates are the first half of the outputs, and SiLU's."""
        x = torch.linspace(-8.0, 8.0, 8 * self._inner).view(4, -1)
        gate, up = x.chunk(2, dim=-1)
        return torch.allclose(self._module._apply_gate(x), functional.silu(gate) * up, atol=1e-5)

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        rows, chosen = top_k_index.shape
        experts = top_k_index.reshape(-1)
        order = torch.argsort(experts, stable=True)
        counts = torch.bincount(experts, minlength=len(self._down)).tolist()
        between = self._multiply(self._gate_up, hidden_states[order // chosen], counts)
        if self._gate:
            inner = self._kernels.gate(between.unsqueeze(0)).squeeze(0)
        else:
            inner = torch.cat(self._by_rows(self._module._apply_gate, between, self._inner))[: len(between)]
        weighted = self._multiply(self._down, inner, counts) * top_k_weights.reshape(-1, 1)[order]
        placed = torch.empty_like(weighted, dtype=torch.float32)
        placed[order] = weighted.float()
        parts = placed.view(rows, chosen, -1)
        total = parts[:, 0]
        for place in range(1, chosen):
            total = total + parts[:, place]
        return total.to(hidden_states.dtype)

    def _multiply(self, weights: Sequence[PackedWeight], x: Tensor, counts: Sequence[int]) -> Tensor:
        """Rows of `x`, ordered by expert, times each one's weight."""
        parts = zip(weights, torch.split(x, list(counts)), strict=True)
        return torch.cat([self._kernels.multiply(weight, part) for weight, part in parts if len(part)])
