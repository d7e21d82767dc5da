"""The contract of engines under vLLM: a real one in another process for each engine (`vllm_contract_script.py`).
Blocks go through a socket into the store of the test, whose events are those that the contract looks at."""

from __future__ import annotations

import contextlib
import json
import subprocess
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import store_bridge
import vllm_process
from vllm_waits import WITHIN

from foreword.conformance.engine_contract import EngineContract, EngineRun, Start
from foreword.referee.process import Forked
from foreword.store.tiered import TieredStore

ENGINES = {
    "vLLM": {
        "guide": "vllm.md",
        "how": "KV connector: offload, sharing, disaggregation",
        "variable": "FOREWORD_VLLM_PYTHON",
        "package": "vllm",
        "inside": False,
    }
}


def _end(process: Forked) -> None:
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        process.kill()
        process.wait(WITHIN)


class Server:
    """vLLM with one model and the store of the test."""

    def __init__(self, model: Path, store: TieredStore) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as the server
        job: dict[str, Any] = {
            "model": str(model),
            "store": [f"contract://{store_bridge.serve(store)}"],
            "extra": {"lookup_timeout": 2.0, "load_timeout": 5.0},
        }
        self._process = vllm_process.start("vllm_contract_script.py", job, {}, stderr=self._log)
        weakref.finalize(self, _end, self._process)
        self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if "reply> " in line:
                found: dict[str, Any] = json.loads(line.partition("reply> ")[2])
                return found
        self._log.seek(0)
        raise AssertionError(self._log.read()[-6000:])

    def run(self, tokens: Sequence[int], tenant: str = "") -> EngineRun:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"tokens": list(tokens), "tenant": tenant}) + "\n")
        self._process.stdin.flush()
        found = self._answer()
        return EngineRun(found["cached"], {(0, int(end)): bytes.fromhex(kv) for end, kv in found["kv"].items()})


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    return [vllm_process.make_model(folder / str(seed), seed) for seed in (0, 1)]


class TestVllm(EngineContract):
    @pytest.fixture
    def start(self, models: list[Path]) -> Start:
        return lambda store, model: Server(models[model], store)
