"""Notices that weights change while vLLM runs, where vLLM tells no connector.

Trainers change weights through methods of vLLM's workers (`EngineCore.collective_rpc`), or, with vLLM in their process, by the
model's own `load_weights`. Of vLLM's own methods it is known which change weights. Around any other call the workers compare
what they have: how often `load_weights` was called, and, around functions, which may write anywhere, the bytes of all tensors.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable
from hashlib import sha256
from itertools import chain
from typing import Any, Final

import torch
from torch import Tensor, nn

# Methods of vLLM's workers.
_CHANGES: Final = frozenset({
    "checkpoint_restore", "elastic_ep_execute", "finish_weight_update", "load_model", "reload_weights", "reset_weights",
    "start_draft_weight_update", "start_weight_update", "update_draft_weights", "update_weights",
})  # fmt: skip
_CHUNK: Final = 1 << 22  # words of 8 bytes that are summed at once
_ODD: Final = 0x9E3779B97F4A7C15 - (1 << 64)

_loads = 0
_told: list[weakref.WeakMethod[Callable[[], object]]] = []


def notice_changes(
    core: Any, method: str | Callable[..., Any], changed: Callable[[], object]
) -> Callable[[], None] | None:
    """Before `EngineCore.collective_rpc` calls a method of the workers: call `changed` if it changes weights.

    Returns a function to be called after it, where that shows only then.
    """
    if changes_weights(method):
        changed()
        return None
    if isinstance(method, str) and method != "apply_model" and _is_vllms(method):
        return None
    whole = not isinstance(method, str) or method == "apply_model"
    before = core.model_executor.collective_rpc(weights_mark, args=(whole,))

    def compare() -> None:
        if core.model_executor.collective_rpc(weights_mark, args=(whole,)) != before:
            changed()

    return compare


def changes_weights(method: str | Callable[..., Any]) -> bool:
    """Whether this is a method of vLLM's own that changes weights."""
    return method in _CHANGES


def _is_vllms(method: str) -> bool:
    """Whether vLLM's own workers have this method; extensions add others."""
    from vllm.v1.worker.worker_base import WorkerBase

    with contextlib.suppress(ImportError):
        from vllm.v1.worker.gpu_worker import Worker

        return hasattr(Worker, method) or hasattr(WorkerBase, method)
    return hasattr(WorkerBase, method)


def follow_loads(model: Any, told: Callable[[], object] | None = None) -> None:
    """Count calls of a model's `load_weights` from now on. `told`, a bound method, is called before each.

    In a process the workers' models are counted together: what asks does not ask which model it was.
    """
    if told is not None:
        _told.append(weakref.WeakMethod(told))
    load = getattr(model, "load_weights", None)
    if load is None or hasattr(load, "foreword"):
        return

    @functools.wraps(load)
    def load_weights(*args: Any, **kwargs: Any) -> Any:
        global _loads
        _loads += 1
        for one in [found for known in _told if (found := known()) is not None]:
            one()
        return load(*args, **kwargs)

    load_weights.foreword = True  # type: ignore[attr-defined]
    model.load_weights = load_weights


def weights_mark(worker: Any, whole: bool) -> tuple[int, str]:
    """Called by vLLM in each worker: differs after a change of its weights. `whole`: also after one that passed no loader."""
    return _loads, content_mark(worker.model_runner.get_model()) if whole else ""


def content_mark(model: nn.Module) -> str:
    """A digest of a model's modules and of all bytes of their tensors."""
    digest = sha256()
    for name, module in model.named_modules():
        # Kernels for CPUs keep packed copies of weights in the module, which change only with it.
        digest.update(f"{name} {id(module)}\n".encode())
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {_sums(tensor)}\n".encode())
    return digest.hexdigest()


def _sums(tensor: Tensor) -> list[int]:
    """Sums over the bytes that change with any word, and with the order of words."""
    flat = tensor.detach().as_subclass(Tensor).contiguous().reshape(-1).view(torch.uint8)
    flat = flat.clone() if flat.storage_offset() % 8 else flat
    words = flat[: flat.numel() // 8 * 8].view(torch.long)
    found = [int(flat[flat.numel() // 8 * 8 :].sum())]
    order = torch.arange(1, min(_CHUNK, words.numel()) + 1, device=flat.device) * _ODD
    for chunk in torch.split(words, _CHUNK):
        found.append(int(((chunk ^ (chunk >> 29)) * order[: chunk.numel()]).sum()))
    return found
