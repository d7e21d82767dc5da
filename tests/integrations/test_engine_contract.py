"""The contract of engines over Foreword's stores: `generate()` of Transformers, the toy engine of `examples/`, and others in
interpreters of their own (`engine_suites.py`)."""

from __future__ import annotations

import copy
import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
import transformers
from engine_suites import CONTRACT, ROOT, SUITES, TABLE, run

from foreword.conformance.engine_contract import EngineContract, EngineRun, Start
from foreword.integrations.transformers import attach
from foreword.store.tiered import TieredStore

ENGINES = {
    "Transformers": {
        "tests": "TestTransformers",
        "guide": "transformers.md",
        "how": "`generate()` and pipelines",
        "package": "transformers",
    },
    "your own": {"tests": "TestToy", "guide": "own-engine.md", "how": "the contract, and a toy engine"},
}

BLOCK = 8
_TOY = Path(__file__).parents[2] / "examples" / "toy-engine" / "toy_engine.py"


@functools.cache
def _model(seed: int) -> Any:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, initializer_range=0.2, max_position_embeddings=256,
        pad_token_id=0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config).eval()


class Script:
    """A script that generates with a model to which the store is attached."""

    def __init__(self, store: TieredStore, seed: int) -> None:
        self._store, self._model = store, copy.deepcopy(_model(seed))

    def run(self, tokens: Sequence[int], tenant: str = "") -> EngineRun:
        attached = attach(self._model, self._store, block_size=BLOCK, salt=tenant.encode(), timeout=5.0)
        ids, cache = torch.tensor([tokens]), transformers.DynamicCache()
        self._model.generate(ids, attention_mask=torch.ones_like(ids), cache=cache, max_new_tokens=1)
        kv = {
            (0, end): b"".join(
                tensor[0, :, end - BLOCK : end].contiguous().numpy().tobytes()
                for layer in cache.layers
                for tensor in (layer.keys, layer.values)
            )
            for end in range(BLOCK, len(tokens) + 1, BLOCK)
        }
        return EngineRun(attached.loaded_tokens[0], kv)


@pytest.mark.slow
class TestTransformers(EngineContract):
    @pytest.fixture
    def start(self) -> Start:
        return Script


def _toy() -> Any:
    spec = importlib.util.spec_from_file_location("toy_engine", _TOY)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["toy_engine"] = module
    spec.loader.exec_module(module)
    return module


class TestToy(EngineContract):
    @pytest.fixture
    def start(self) -> Start:
        return _toy().ToyEngine  # type: ignore[no-any-return]


@pytest.mark.extended
def test_the_toy_runs(tmp_path: Path) -> None:
    """A second run of the toy's command loads the prompt's start, and says the same tokens."""
    command = [
        sys.executable,
        str(_TOY),
        f"disk://{tmp_path}/toy?size=1GiB",
        "The quick brown fox jumps over the lazy dog.",
    ]
    first, second = (subprocess.run(command, capture_output=True, text=True, check=True) for _ in range(2))
    assert first.stdout.startswith("0 of 44 tokens")
    assert "tier 0: 5 blocks stored" in first.stderr
    assert second.stdout == first.stdout.replace("0 of 44", "32 of 44", 1)


def test_the_toy_is_small() -> None:
    """An integration written from the page alone has less than 250 lines."""
    assert len(_TOY.read_text(encoding="utf-8").splitlines()) < 250


def _rows() -> dict[str, Any]:
    return {row["engine"]: row for row in json.loads(TABLE.read_text(encoding="utf-8"))["rows"]}


def test_the_table_is_of_this_contract() -> None:
    """README's table has every engine and every test of the contract, and the releases for which the tests' environments are
    made."""
    rows = _rows()
    assert list(rows) == list(SUITES)
    assert {tuple(row["tests"]) for row in rows.values()} == {tuple(CONTRACT)}
    for engine, script in (("vLLM", "vllm"), ("SGLang", "sglang"), ("llama.cpp", "llama")):
        text = (ROOT / ".ci" / script).read_text(encoding="utf-8")
        [version] = re.findall(r'^(?:DEFAULT = "|.*version=\$\{2:-)([0-9.]+)', text, re.MULTILINE)
        assert rows[engine]["version"] == version, "run: python tests/integrations/engine_suites.py"


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("engine", [name for name, suite in SUITES.items() if suite.variable])
def test_under(engine: str) -> None:
    """Under this engine came of the contract what README's table says."""
    if not SUITES[engine].python:
        pytest.skip(f"{SUITES[engine].variable} names no interpreter with {engine}")
    ran = run(engine)
    assert ran.tests == _rows()[engine]["tests"], ran.said
