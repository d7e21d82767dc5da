"""The vLLM KV connector: `kv_connector_module_path` is `foreword.integrations.vllm`.

vLLM is imported when `ForewordConnector` or `NamedPrefixes` (the middleware) is asked for, not before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foreword.integrations.vllm.connector import ForewordConnector
    from foreword.integrations.vllm.middleware import NamedPrefixes

__all__ = ["ForewordConnector", "NamedPrefixes"]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name == "ForewordConnector":
        return import_module("foreword.integrations.vllm.connector").ForewordConnector
    if name == "NamedPrefixes":
        return import_module("foreword.integrations.vllm.middleware").NamedPrefixes
    raise AttributeError(f"module 'foreword.integrations.vllm' has no attribute {name!r}")
