"""The contract of engines under llama.cpp, run by `engine_suites.py` in an interpreter that has it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import llama_cpp
import pytest
from llama_script import answer

from benchmarks.engine import gguf_model
from foreword.conformance.engine_contract import EngineContract, EngineRun, Start
from foreword.integrations.llama_cpp import ForewordCache, _payloads, _state
from foreword.store.tiered import TieredStore

ENGINES = {
    "llama.cpp": {
        "guide": "llama-cpp.md",
        "how": "cache of llama-cpp-python",
        "variable": "FOREWORD_LLAMA_PYTHON",
        "package": "llama-cpp-python",
    }
}

BLOCK = 8


class Context:
    """A `Llama` with the cache of each tenant."""

    def __init__(self, model: Path, store: TieredStore) -> None:
        self._store, self._caches = store, {}
        self._llm = llama_cpp.Llama(str(model), n_ctx=256, n_threads=1, n_threads_batch=1, verbose=False)

    def run(self, tokens: Sequence[int], tenant: str = "") -> EngineRun:
        cache = self._caches.get(tenant)
        if cache is None:
            cache = ForewordCache(self._llm, self._store, block_size=BLOCK, salt=tenant.encode(), timeout=5.0)
            self._caches[tenant] = cache
        self._llm.set_cache(cache)
        self._llm._ctx.kv_cache_clear()
        self._llm.reset()
        cache.loaded_tokens = 0
        answer(self._llm, list(tokens), 1)
        arrays, count = cache._format.cut(_state(self._llm))
        blocks = _payloads(arrays, 0, count // BLOCK, BLOCK)
        kv = {(0, BLOCK * (number + 1)): block.tobytes() for number, block in enumerate(blocks)}
        return EngineRun(cache.loaded_tokens, kv)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    paths = [folder / f"{seed}.gguf" for seed in (0, 1)]
    for seed, path in enumerate(paths):
        gguf_model.write_random(path, gguf_model.SIZES["tiny"], seed, exact=True)
    return paths


class TestLlama(EngineContract):
    @pytest.fixture
    def start(self, models: list[Path]) -> Start:
        return lambda store, model: Context(models[model], store)
