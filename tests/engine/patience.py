"""Stores without hurry: on a busy machine an engine must not compute what a test wants it to load."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from foreword.entrypoints.async_engine import AsyncEngine
from foreword.entrypoints.llm import LLM
from foreword.store_config import StoreConfig

Engine = TypeVar("Engine", LLM, AsyncEngine)


def patient(store: str | Sequence[str], **times: float) -> StoreConfig:
    urls = (store,) if isinstance(store, str) else tuple(store)
    return StoreConfig(urls=urls, **({"lookup_timeout": 60.0, "load_timeout": 60.0} | times))


def unhurried(engine: Engine) -> Engine:
    """Make the engine load what it finds, even if computing looks faster."""
    if engine.offload is not None:
        engine.offload.costs.prefill_rate = float
    return engine
