"""`best_of`, allowed tokens and bad words."""

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


def test_the_likeliest_sequences_are_returned(llama: LLM) -> None:
    """Of `best_of` sequences the `n` with the highest mean log-probability come back, the best first."""
    sampling = {"max_tokens": 12, "seed": 3, "ignore_eos": True}
    [every] = llama.generate([prompt(9, 1)], SamplingParams(n=6, logprobs=0, **sampling))
    ranked = sorted(every.outputs, key=lambda one: -sum(each.logprob for each in one.logprobs) / len(one.tokens))
    [best] = llama.generate([prompt(9, 1)], SamplingParams(n=2, best_of=6, **sampling))
    assert [(one.tokens, one.text) for one in best.outputs] == [(one.tokens, one.text) for one in ranked[:2]]
    assert [one.index for one in best.outputs] == [0, 1]
    assert all(one.logprobs == () for one in best.outputs)
    with_logprobs = SamplingParams(n=2, best_of=6, logprobs=1, **sampling)
    assert all(len(one.logprobs) == 12 for one in llama.generate([prompt(9, 1)], with_logprobs)[0].outputs)


def test_best_of_beside_other_requests(llama: LLM) -> None:
    """Other requests of a batch are delivered as without it; a request that is ended leaves nothing behind."""
    plain = SamplingParams(max_tokens=10, seed=1, ignore_eos=True)
    best = SamplingParams(max_tokens=14, seed=2, best_of=4, ignore_eos=True)
    first, second = llama.generate([prompt(8, 2), prompt(8, 3)], [plain, best])
    assert first.outputs[0].tokens == llama.generate([prompt(8, 2)], plain)[0].outputs[0].tokens
    assert len(second.outputs) == 1
    with pytest.raises(BadRequest):
        SamplingParams(n=3, best_of=2)


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
