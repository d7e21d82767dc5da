"""Allowed tokens and bad words."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tiny import prompt

from foreword.engine.request import SamplingParams
from foreword.entrypoints.llm import LLM
from foreword.errors import BadRequest


@pytest.fixture(scope="module")
def llama(engine: Callable[..., LLM]) -> LLM:
    return engine("llama")


def test_only_allowed_tokens_come(llama: LLM) -> None:
    """`allowed_token_ids` excludes everything else, whatever the temperature."""
    allowed = (7, 8, 200)
    for temperature in (0.0, 1.0, 3.0):
        params = SamplingParams(
            max_tokens=30, temperature=temperature, seed=1, allowed_token_ids=allowed, ignore_eos=True
        )
        assert set(llama.generate([prompt(8, 5)], params)[0].outputs[0].tokens) <= set(allowed)
    for wrong in ((), (10_000,)):
        with pytest.raises(BadRequest) as caught:
            llama.generate("x", SamplingParams(allowed_token_ids=wrong))
        assert caught.value.param == "allowed_token_ids"


def test_bad_words_do_not_come(llama: LLM) -> None:
    """Words of one token and of several are not generated; their parts are."""
    allowed = tuple(llama.tokenizer.encode("abc"))
    common = {"max_tokens": 80, "seed": 4, "allowed_token_ids": allowed, "ignore_eos": True}
    text = llama.generate("x", SamplingParams(**common))[0].outputs[0].text
    assert "ab" in text and "c" in text
    text = llama.generate("x", SamplingParams(bad_words=("ab", "c"), **common))[0].outputs[0].text
    assert "ab" not in text and "c" not in text
    assert text and set(text) <= {"a", "b"}
    with pytest.raises(BadRequest):
        SamplingParams(bad_words=("",))
