"""Batch invariance: the bits of a token's KV and logits depend on the tokens before it, and on nothing else.

Chunks, batch, length of the hit, number of threads and the place of blocks do not change them, so a hit equals the
computation bit for bit. The compiled kernels give this where they compute everything: a product adds up in the order of
its inputs for any number of rows (kernels/product.h), attention takes keys from fixed positions on (kernels/attention.h)
and does not cut them, and all else is computed row by row. vLLM has the same property as `VLLM_BATCH_INVARIANT`.

Whether it holds for a model is tried at load (`check_bits` in self_check.py).
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from foreword.engine.kernels.kernel_choice import COMPILED
from foreword.engine.kernels.native import Kernels
from foreword.engine.linear import PackedForward, Patch
from foreword.errors import ConfigError, ModelUnsupported

_ACTIVATIONS = ("torch.nn.modules.activation", "transformers.activations")
# Numbers below which PyTorch does not divide an operation among threads, and of which its vectors are divisors.
_SHARE, _VECTORS = 32_767, 128


def scoped_fingerprint(fingerprint: bytes, kernels: Kernels) -> bytes:
    """The model's fingerprint under batch invariance. KV that was computed without it, by another build of the kernels
    or on another processor has other bits, so it has other keys: it is a miss."""
    parts = (
        fingerprint,
        kernels.name.encode(),
        torch.__version__.encode(),
        torch.backends.cpu.get_cpu_capability().encode(),
    )
    digest = hashlib.sha256(b"batch-invariant")
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


def prepare(model: nn.Module) -> None:
    """Give activations a `forward` whose bits do not depend on the other rows. Raises ConfigError or ModelUnsupported unless
    the compiled kernels multiply by all weights, for any number of rows."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            forward = module.__dict__.get("forward")
            if not isinstance(forward, PackedForward) or set(forward.product.served) != {COMPILED}:
                raise ConfigError(
                    f"engine.batch_invariant needs a packed copy of every weight, but {name} has none; "
                    "raise engine.linear_memory (--linear-memory)"
                )
        elif not isinstance(module, nn.Embedding):
            if any(parameter.dim() > 1 for parameter in module.parameters(recurse=False)):
                raise ModelUnsupported(
                    f"engine.batch_invariant (--batch-invariant) does not hold for {name}, a {type(module).__name__}: "
                    "only products of linear layers are batch-invariant"
                )
            if type(module).__module__ in _ACTIVATIONS:
                setattr(module, "forward", ActivationForward(module))  # noqa: B010 - a method is replaced


class ActivationForward(Patch):
    """`forward` of an activation, a few rows at a time.

    PyTorch computes numbers in vectors, and what is left at the end of a thread's share one by one, which rounds
    otherwise. Here a share is one of whole rows and of whole vectors, or a single row.
    """

    __slots__ = ("_module",)

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(self, x: Tensor) -> Tensor:
        width = x.shape[-1]
        rows = 1 if width % _VECTORS else max(1, _SHARE // width)
        parts = [type(self._module).forward(self._module, part) for part in torch.split(x.reshape(-1, width), rows)]
        return torch.cat(parts).view(x.shape)
