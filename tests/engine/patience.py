"""Stores that are waited for: a machine that is busy for a second must not make an engine compute what a test has it load."""

from __future__ import annotations

from collections.abc import Sequence

from foreword.config import StoreConfig
from foreword.entrypoints.llm import LLM


def patient(store: str | Sequence[str], **times: float) -> StoreConfig:
    urls = (store,) if isinstance(store, str) else tuple(store)
    return StoreConfig(urls=urls, **({"lookup_timeout": 60.0, "load_timeout": 60.0} | times))


def unhurried(llm: LLM) -> LLM:
    """From now on the engine loads what it finds, however soon it could compute it."""
    if llm.offload is not None:
        llm.offload._seconds_per_token = lambda: None  # type: ignore[method-assign]
    return llm
