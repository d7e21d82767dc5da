"""Random models on disk and their references, made once per session. See tiny.py."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Before torch: with more threads than free cores OpenMP is a hundred times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import tiny
import torch
import transformers
from config_constants import constants, taken
from patience import patient, unhurried

from foreword.engine_config import EngineConfig
from foreword.entrypoints.llm import LLM

torch.set_num_threads(1)
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

Folder = Callable[[str], Path]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """The checkpoint of a family, by name."""
    root = tmp_path_factory.mktemp("models")

    def find(family: str) -> Path:
        path = root / family
        return path if path.exists() else tiny.save(tiny.random_model(tiny.FAMILIES[family]()), path)

    return find


@pytest.fixture(scope="session")
def reference(folder: Folder) -> Callable[[str], tiny.Reference]:
    """The truth about a family, by name."""
    made: dict[str, tiny.Reference] = {}

    def find(family: str) -> tiny.Reference:
        if family not in made:
            made[family] = tiny.Reference(folder(family))
        return made[family]

    return find


@pytest.fixture(scope="session")
def engine(folder: Folder) -> Callable[..., LLM]:
    """An engine of a family: blocks of 4 tokens, room for 1024, and no check at start unless the options say otherwise. What
    is found in stores given by their URLs is loaded; a `StoreConfig` is taken as it is."""

    def make(family: str, **options: Any) -> LLM:
        settings: dict[str, Any] = {"dtype": "float32", "kv_memory": "1024 tokens", "block_size": 4, "threads": 1}
        settings["self_check"] = False
        with constants(EngineConfig, **taken(EngineConfig, options)):
            if isinstance(options.get("store"), str | list):
                return unhurried(
                    LLM(str(folder(family)), **(settings | options | {"store": patient(options["store"])}))
                )
            return LLM(str(folder(family)), **(settings | options))

    return make


@pytest.fixture(scope="session")
def llama(folder: Folder) -> Path:
    """The plainest checkpoint."""
    return folder("llama")
