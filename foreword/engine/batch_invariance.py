"""Batch invariance: the bits of a token's KV and logits depend on the tokens before it, and on nothing else.

Chunks, batch, length of the hit, number of threads and the place of blocks do not change them, so a hit equals the
computation bit for bit. The compiled kernels give this where they compute everything: a product adds up in the order of
its inputs for any number of rows (kernels/product.h), attention takes keys in order and from fixed positions on
(kernels/attention.h), and all else is computed row by row. vLLM has the same property as `VLLM_BATCH_INVARIANT`.

What a model is made of decides whether it can be kept (`obstacle`); whether it holds is tried at load (`check_bits` in
self_check.py).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from foreword.engine.attention.backend import LayerRecorder
from foreword.engine.kernels import native
from foreword.engine.kernels.kernel_choice import COMPILED
from foreword.engine.kernels.native import TYPES, Kernels, PackedWeight
from foreword.engine.linear import ROUNDING, PackedForward, Patch
from foreword.errors import ModelUnsupported

# Parameters of Transformers' interface for experts (`use_experts_implementation`): weights of all experts in one tensor,
# `[experts, outputs, inputs]` or transposed.
_EXPERTS = ("gate_up_proj", "down_proj")
_ACTIVATIONS = ("torch.nn.modules.activation", "transformers.activations")
# PyTorch's vectors have divisors of this many numbers.
_VECTORS: Final = 64
# Modules that compute in Python: a change of it may change bits that the probe, of a few tokens, does not show.
_COMPUTE: Final = (
    "batch_invariance.py", "linear.py", "decoder.py", "torch_runner.py", "attention/cpu_backend.py", "kernels/native.py",
)  # fmt: skip


def scoped_fingerprint(fingerprint: bytes, kernels: Kernels, probe: bytes) -> bytes:
    """The name of a model's KV under batch invariance: its fingerprint, what the bits of a computation depend on, and `probe`,
    a digest of the bits of one. KV that was computed without it, by another build or on another processor has other bits, so
    it has other keys: it is a miss."""
    parts = (
        fingerprint,
        kernels.name.encode(),
        torch.__version__.encode(),
        transformers.__version__.encode(),
        torch.backends.cpu.get_cpu_capability().encode(),
        probe,
        *((Path(__file__).parent / name).read_bytes() for name in _COMPUTE),
    )
    digest = hashlib.sha256(b"batch-invariant")
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


def obstacle(model: nn.Module, recorder: LayerRecorder) -> str:
    """Why this model cannot be computed by the compiled kernels alone; empty if it can."""
    for layer, layout in recorder.layouts.items():
        if recorder.dtype == torch.bfloat16 and layout.key_dim % 2:
            return f"no kernel attends with heads of {layout.key_dim} in bfloat16 (layer {layer})"
    for name, module in model.named_modules():
        weights = [one for one in module.parameters(recurse=False) if one.dim() > 1]
        if not weights or isinstance(module, nn.Embedding) or is_experts(module):
            continue
        plain = type(module) is nn.Linear or (len(weights) == 1 and not list(module.children()))
        if not plain or weights[0].dim() != 2:
            return f"{name}, a {type(module).__name__}, has weights that no kernel multiplies by"
        if weights[0].dtype not in TYPES or weights[0].shape[1] % 2:
            return f"no kernel multiplies {weights[0].shape[1]} inputs in {weights[0].dtype} ({name})"
    return ""


def prepare(model: nn.Module, kernels: Kernels) -> str:
    """Give routers, experts and activations of a packed model a `forward` whose bits do not depend on the other rows. Returns
    why it does not; empty if it does. Raises ModelUnsupported if a layer's experts are unlike the others'."""
    forwards: dict[nn.Module, Patch] = {}
    experts = []
    for name, module in model.named_modules():
        if type(module) is nn.Linear:
            packed = module.__dict__.get("forward")
            if not isinstance(packed, PackedForward) or set(packed.product.served) != {COMPILED}:
                return f"{name} has no packed copy of its weight"
        elif is_experts(module):
            experts.append((name, module))
        elif any(parameter.dim() > 1 for parameter in module.parameters(recurse=False)):
            if not isinstance(module, nn.Embedding):
                forwards[module] = router = RouterForward(module, kernels)
                if not router.fits():
                    return f"{name}, a {type(module).__name__}, does not choose row by row"
        elif type(module).__module__ in _ACTIVATIONS:
            forwards[module] = ActivationForward(module)
    for name, module in experts:
        forwards[module] = packed_experts = ExpertsForward(module, kernels)
        if not packed_experts.fits():
            if module is experts[0][1]:
                return f"{name}, a {type(module).__name__}, does something else than the kernels"
            raise ModelUnsupported(f"{name} does not compute what other layers' experts do; its weights may be damaged")
        packed_experts.release()
    for module, forward in forwards.items():
        setattr(module, "forward", forward)  # noqa: B010 - a method is replaced
    return ""


def by_rows(function: Callable[[Tensor], Any], x: Tensor, width: int, fewest: int = 1) -> Any:
    """A function's results for `x` `[rows, n]` and for zeros that follow it, at least `fewest` rows. It computes each row by
    itself, and numbers one by one, `width` of a row.

    PyTorch computes numbers in vectors, and what is left at the end one by one, which rounds otherwise. With the zeros nothing
    is left, in one thread. Rows that do not follow one another in memory would each have numbers left: they are copied.
    """
    rows = max(fewest, _VECTORS // math.gcd(_VECTORS, width))
    with native.undivided():
        return function(functional.pad(x, (0, 0, 0, -len(x) % rows)) if len(x) % rows else x.contiguous())


class ActivationForward(Patch):
    """`forward` of an activation, in whole vectors."""

    __slots__ = ("_module",)

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        found: Tensor = by_rows(type(self._module).forward.__get__(self._module), rows, x.shape[-1])
        return found[: len(rows)].view(x.shape)


class RouterForward(Patch):
    """`forward` of a module that multiplies by one weight of its own, `[experts, inputs]`, and chooses from the products row by
    row. The kernels multiply."""

    __slots__ = ("_module", "_products")

    def __init__(self, module: nn.Module, kernels: Kernels) -> None:
        self._module = module
        weight = next(one for one in module.parameters(recurse=False) if one.dim() > 1)
        self._products = _Products(weight, kernels)

    def __call__(self, x: Tensor) -> Any:
        x = x.reshape(-1, x.shape[-1])
        forward = type(self._module).forward.__get__(self._module)
        with self._products:
            # At least two rows: of a single one PyTorch adds up numbers as of one long row.
            found = by_rows(forward, x, self._products.outputs, fewest=2)
        return found[: len(x)] if isinstance(found, Tensor) else tuple(one[: len(x)] for one in found)

    @torch.inference_mode()
    def fits(self) -> bool:
        """Whether it computes what the module's own `forward` does. Which experts it chooses is not compared, but their weights
        are: where two are nearly equal, rounding may choose the other."""
        weight = next(one for one in self._module.parameters(recurse=False) if one.dim() > 1)
        x = torch.randn(5, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight.dtype)

        def parts(found: Any) -> list[Tensor]:
            listed: list[Tensor] = [found] if isinstance(found, Tensor) else list(found)
            return [one.sort(dim=-1).values if one.is_floating_point() else one[..., :0] for one in listed]

        try:
            pairs = list(zip(parts(self(x)), parts(type(self._module).forward(self._module, x)), strict=True))
        except (TypeError, AttributeError, RuntimeError, ValueError, LookupError):
            return False
        return all(a.dtype == b.dtype and a.shape == b.shape for a, b in pairs) and all(
            torch.allclose(a.float(), b.float(), rtol=0.05, atol=0.02) for a, b in pairs
        )


class _Products(TorchFunctionMode):
    """While it is active, the kernels compute products with one weight `[outputs, inputs]`, as it is or in another dtype."""

    def __init__(self, weight: Tensor, kernels: Kernels) -> None:
        super().__init__()
        self.outputs = weight.shape[0]
        self._weight, self._kernels = weight, kernels
        self._packed: dict[torch.dtype, PackedWeight] = {}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is functional.linear:
            return self._multiply(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))

    def _multiply(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        packed = self._packed.get(weight.dtype)
        if packed is None:
            if not torch.equal(weight, self._weight.to(weight.dtype)):
                raise RuntimeError("a router multiplies by another weight than its own")
            packed = self._packed[weight.dtype] = self._kernels.pack([weight], [] if bias is None else [bias])
        return self._kernels.multiply(packed, input)


def is_experts(module: nn.Module) -> bool:
    """Whether a module has the gated experts that `ExpertsForward` computes."""
    weights = [getattr(module, name, None) for name in _EXPERTS]
    return (
        all(isinstance(weight, nn.Parameter) and weight.dim() == 3 for weight in weights)
        and bool(getattr(module, "has_gate", False))
        and not getattr(module, "has_post_expert_norm", True)
        and {name for name, one in module.named_parameters(recurse=False) if one.dim() > 2} == set(_EXPERTS)
    )


class ExpertsForward(Patch):
    """`forward` of a mixture's experts, by packed copies of their weights. A router chooses some of them for each token, and
    their results are added up in the router's order, in float32: a token's result does not depend on the others."""

    __slots__ = ("_down", "_gate", "_gate_up", "_inner", "_kernels", "_module")

    def __init__(self, module: Any, kernels: Kernels) -> None:
        self._module, self._kernels = module, kernels
        self._gate_up, self._down = (self._pack(name) for name in _EXPERTS)
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
        for name in _EXPERTS:
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
            inner = by_rows(self._module._apply_gate, between, self._inner)[: len(between)]
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
