"""Sampling where a request says nothing: the model's generation_config.json, unless that is switched off."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from foreword.engine.request import SamplingParams
from foreword.entrypoints.llm import LLM
from foreword.errors import ConfigError

OPTIONS = {"dtype": "float32", "kv_memory": "256 tokens", "block_size": 4, "threads": 1, "self_check": False}


@pytest.fixture
def model(folder: Callable[[str], Path], tmp_path: Path) -> Callable[..., str]:
    """A model whose generation_config.json has these values."""

    def make(**values: object) -> str:
        path = tmp_path / "model"
        shutil.copytree(folder("llama"), path, dirs_exist_ok=True)
        (path / "generation_config.json").write_text(json.dumps(values))
        return str(path)

    return make


def test_the_models_values_are_defaults(model: Callable[..., str]) -> None:
    """Values of the model's file hold for what a request leaves open; what it gives stays; other keys of the file mean nothing
    here."""
    llm = LLM(model(temperature=0.0, top_k=5, repetition_penalty=1.1, do_sample=True, max_length=7), **OPTIONS)
    found = llm.info.sampling_params({"top_k": 9, "max_tokens": 12})
    assert found == SamplingParams(temperature=0.0, top_k=9, repetition_penalty=1.1, max_tokens=12)
    assert llm.info.sampling_params({}) == SamplingParams(temperature=0.0, top_k=5, repetition_penalty=1.1)


def test_generate_without_parameters_uses_them(model: Callable[..., str]) -> None:
    """A batch without parameters is greedy where the model's file says so."""
    llm = LLM(model(temperature=0.0), max_model_len=40, **OPTIONS)
    first, second = (llm.generate("some text")[0].outputs[0].tokens for _ in range(2))
    assert first == second == llm.generate("some text", SamplingParams(temperature=0.0))[0].outputs[0].tokens


def test_they_can_be_ignored(model: Callable[..., str]) -> None:
    """`generation_config=openai` has OpenAI's defaults, also where the file's values are not usable."""
    path = model(temperature=-1.0, top_k=-1)
    with pytest.raises(ConfigError, match="generation_config"):
        LLM(path, **OPTIONS)
    assert LLM(path, generation_config="openai", **OPTIONS).info.sampling_params({}) == SamplingParams()
