"""The vLLM KV connector: `kv_connector_module_path` is `foreword.integrations.vllm`.

`ForewordECConnector` keeps encoder outputs; `NamedPrefixes` is a middleware. vLLM is imported when one of these classes
is asked for, not before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foreword.integrations.vllm.connector import ForewordConnector
    from foreword.integrations.vllm.encoder_cache import ForewordECConnector
    from foreword.integrations.vllm.middleware import NamedPrefixes

__all__ = ["ForewordConnector", "ForewordECConnector", "NamedPrefixes"]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name == "ForewordConnector":
        return import_module("foreword.integrations.vllm.connector").ForewordConnector
    if name == "ForewordECConnector":
        return import_module("foreword.integrations.vllm.encoder_cache").ForewordECConnector
    if name == "NamedPrefixes":
        return import_module("foreword.integrations.vllm.middleware").NamedPrefixes
    raise AttributeError(f"module 'foreword.integrations.vllm' has no attribute {name!r}")
