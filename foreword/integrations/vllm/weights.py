"""The weights that a server computes with: versions of weights that are updated in place, and calls of vLLM's engine that tell
of them."""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections.abc import Callable
from typing import Any

import torch


def adapters_spoil_base() -> bool:
    """Whether this vLLM computes requests without an adapter wrongly in steps that also have adapters.

    Its operators for CPUs took "no adapter", -1, for the last one (seen up to vLLM 0.32).
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return False
    try:
        from vllm.lora.ops.torch_ops import bgmv_shrink
    except ImportError:
        return True  # not known, so nothing is saved that could be wrong
    output = torch.zeros(1, 1)
    bgmv_shrink(torch.ones(1, 2), torch.ones(1, 1, 1, 2), output, torch.tensor([-1]))
    return bool(output.any())


def follow_engine(vllm_config: Any, method: str, told: Callable[..., object], *, before: bool = False) -> bool:
    """Call `told` after each call of a method of vLLM's `EngineCore`, with its arguments, in the engine's thread.

    vLLM tells connectors neither the version of the weights (`set_weight_version`) nor that encoder outputs are reset
    (`reset_encoder_cache`), so this wraps the methods. False if this vLLM has no such method, or the engine is elsewhere.

    Args:
        told: a bound method. It is called as long as its object lives: the class outlives its engines, and would keep their
            KV cache.
        before: call it before the method, with the `EngineCore` before the arguments. What it returns, if anything, is called
            when the method has ended, also by an error.
    """
    model = vllm_config.model_config
    return follow_engines(lambda config: config.model_config is model, method, told, before=before)


def follow_engines(
    mine: Callable[[Any], bool], method: str, told: Callable[..., object], *, before: bool = False
) -> bool:
    """Like `follow_engine`, for the engines of this process whose configuration is `mine`: one that has it from vLLM need not
    know it. `mine` refers to no engine."""
    try:
        from vllm.v1.engine.core import EngineCore
    except ImportError:
        return False
    wrapped = getattr(EngineCore, method, None)
    if wrapped is None:
        return False
    listeners = getattr(wrapped, "foreword", None)
    if listeners is None:
        listeners = []
        setattr(EngineCore, method, _announced(wrapped, listeners))
    listeners[:] = [one for one in listeners if one[1]() is not None]
    listeners.append((mine, weakref.WeakMethod(told), before))
    return True


_Listener = tuple[Callable[[Any], bool], weakref.WeakMethod[Callable[..., object]], bool]


def _announced(wrapped: Callable[..., Any], listeners: list[_Listener]) -> Callable[..., Any]:
    @functools.wraps(wrapped)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = [(known(), before) for mine, known, before in listeners if mine(self.vllm_config)]
        following = [(told, before) for told, before in found if told is not None]
        with contextlib.ExitStack() as ends:
            for told, before in following:
                at_end = told(self, *args, **kwargs) if before else None
                if callable(at_end):
                    ends.callback(at_end)
            result = wrapped(self, *args, **kwargs)
        for told, before in following:
            if not before:
                told(*args, **kwargs)
        return result

    call.foreword = listeners  # type: ignore[attr-defined]
    return call


class WeightsVersion:
    """The version of weights that are updated in place, as part of the keys.

    At first it is that of the files. A reset begins a version without a name, which only this process knows. A name takes its
    place if nothing is left of other weights: under it, KV is found again when the same name returns.

    Attributes:
        salt: for `chain_salt`; b"" for the weights in the files.
        stale: vLLM's own cache may hold KV of other weights, so what requests compute from it belongs to no version.
        computed: vLLM has computed with the present weights.
    """

    def __init__(self, name: str = "") -> None:
        self.salt = _named(name) if name else b""
        self.stale = False
        self._waiting = ""  # the name to be used once vLLM's cache is empty
        self.computed = False

    def reset(self, empty: bool = True) -> None:
        """The weights may change, and vLLM has dropped its own cache; it has not if that is not `empty`."""
        self._begin(_unnamed(), stale=not empty)

    def _begin(self, salt: bytes, *, stale: bool = False, waiting: str = "") -> None:
        self.salt, self.stale, self._waiting, self.computed = salt, stale, waiting, False

    def set(self, name: str, empty: bool | None = None) -> bool:
        """The weights are those of version `name`. False if vLLM's cache may hold KV of others; the version is then one without
        a name, until `settle`.

        Args:
            empty: whether nothing is cached or in use in vLLM's cache. None: not known; then whether nothing was computed since
                the last reset decides.
        """
        if self.salt == _named(name) and not self.stale:
            return True
        if empty or (empty is None and not self.computed):
            self._begin(_named(name))
            return True
        self._begin(_unnamed(), stale=empty is not None, waiting=name)
        return False

    def settle(self) -> str:
        """vLLM's cache was seen empty: all that is computed from now on is of the present weights. The version's name."""
        name = self._waiting
        self._begin(_named(name) if name else self.salt)
        return name

    def changed(self, empty: bool | None = None) -> bool:
        """The weights may have changed without a word about their version. False if the version stays: it has its name, and
        nothing was computed since it got it."""
        if not self.computed and self.salt.startswith(_NAMED):
            return False
        self._begin(_unnamed(), stale=empty is False)
        return True


_NAMED = b"\x00version\x00"


def _named(name: str) -> bytes:
    return _NAMED + name.encode()


def _unnamed() -> bytes:
    return b"\x00reset\x00" + os.urandom(16)
