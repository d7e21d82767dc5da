"""A stand-in for vLLM, with which the connector's modules can be imported where vLLM is not installed."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest


def _empty_class(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {"__init__": lambda *_: None})


class _Stub(Loader, MetaPathFinder):
    """Modules of vLLM whose attributes are empty classes."""

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] == "vllm" else None

    def create_module(self, spec: ModuleSpec) -> Any:
        module: Any = ModuleType(spec.name)
        module.__getattr__ = _empty_class
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


@contextmanager
def stubbed_vllm() -> Iterator[None]:
    """The connector can be imported; its modules are forgotten at the end. Skips the test where vLLM is installed."""
    if importlib.util.find_spec("vllm") is not None:
        pytest.skip("vLLM is installed")
    known, stub = set(sys.modules), _Stub()
    sys.meta_path.insert(0, stub)
    try:
        yield
    finally:
        sys.meta_path.remove(stub)
        for name in set(sys.modules) - known:
            if name.split(".")[0] == "vllm" or name.startswith("foreword.integrations.vllm"):
                del sys.modules[name]
