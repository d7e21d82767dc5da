"""Foreword: a KV-cache system for LLM serving. The KV of a shared prefix is computed once and reused.

`Cache` finds, loads, saves, keeps and forgets the KV of prefixes in stores. `LLM` runs offline batches, `AsyncEngine` serves
requests, `PrefixCache` is the block bookkeeping for other engines. `LLM` and `AsyncEngine` need torch and transformers
(`pip install foreword[engine]`). All are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from foreword.errors import ForewordError

if TYPE_CHECKING:
    from foreword.blocks.prefix_cache import PrefixCache
    from foreword.cache import Cache
    from foreword.engine.request import Request, SamplingParams
    from foreword.engine_config import EngineConfig
    from foreword.entrypoints.async_engine import AsyncEngine
    from foreword.entrypoints.llm import LLM

__version__ = "0.2.0.dev0"
__all__ = ["LLM", "AsyncEngine", "Cache", "EngineConfig", "ForewordError", "PrefixCache", "Request", "SamplingParams"]

_MODULES = {
    "LLM": "foreword.entrypoints.llm",
    "AsyncEngine": "foreword.entrypoints.async_engine",
    "Cache": "foreword.cache",
    "EngineConfig": "foreword.engine_config",
    "PrefixCache": "foreword.blocks.prefix_cache",
    "Request": "foreword.engine.request",
    "SamplingParams": "foreword.engine.request",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'foreword' has no attribute {name!r}")
    import importlib

    try:
        module = importlib.import_module(_MODULES[name])
    except ModuleNotFoundError as error:
        # A part of the name of its own module: the product that has it is not installed.
        absent = f"{_MODULES[name]}.".startswith(f"{error.name}.")
        if error.name is None or (error.name.startswith("foreword") and not absent):
            raise
        needed = f"foreword.{name} needs {error.name}, which is not installed: pip install 'foreword[engine]'"
        raise ImportError(needed) from error
    return getattr(module, name)
