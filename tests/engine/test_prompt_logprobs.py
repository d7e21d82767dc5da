"""Log-probabilities of prompts: the model's own, whatever is cached, and without effect on other requests."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tiny
import torch
from example_counts import represented
from tiny import ROUNDING, greedy, prompt

from foreword.engine.request import RequestOutput, SamplingParams
from foreword.entrypoints.llm import LLM


def check(output: RequestOutput, reference: tiny.Reference, count: int) -> None:
    """The entries are the model's own for the prompt of this output."""
    tokens, found = output.prompt_tokens, output.prompt_logprobs
    assert found is not None and len(found) == len(tokens) and found[0] is None
    expected = reference.logprobs(tokens[:1], tokens[1:])
    for row, entry in zip(expected, found[1:], strict=True):
        assert entry is not None and len(entry.top) == count
        assert abs(row[entry.token] - entry.logprob) < ROUNDING
        best = torch.topk(row, max(count, 1)).values[:count]
        assert torch.allclose(torch.tensor([value for _, value in entry.top]), best, rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("family", represented(["llama", "gemma3"], "llama"))
@pytest.mark.parametrize("length", [1, 2, 65, 200])
def test_entries_are_the_models_own(
    family: str, length: int, engine: Callable[..., LLM], reference: Callable[[str], tiny.Reference]
) -> None:
    """Prompts of one token, of one chunk and of several, fresh and fully cached; the output is the same as without."""
    llm, tokens = engine(family), prompt(length, length)
    plain = llm.generate([tokens], greedy(5))[0].outputs[0]
    for count in (0, 3):
        [output] = llm.generate([tokens], greedy(5, prompt_logprobs=count))
        check(output, reference(family), count)
        assert output.outputs[0].tokens == plain.tokens
        assert output.cached_tokens == 0
    again = llm.generate([tokens], greedy(5))[0]
    assert again.prompt_logprobs is None
    assert again.outputs[0].tokens == plain.tokens
    llm.check()


def test_without_output(engine: Callable[..., LLM], reference: Callable[[str], tiny.Reference]) -> None:
    """`max_tokens=0` scores a text and generates nothing, as evaluations do."""
    [output] = engine("llama").generate([prompt(90, 1)], SamplingParams(max_tokens=0, prompt_logprobs=1))
    check(output, reference("llama"), 1)
    assert output.outputs[0].tokens == ()


@pytest.mark.extended
def test_among_other_requests(engine: Callable[..., LLM], reference: Callable[[str], tiny.Reference]) -> None:
    """Requests beside it, several sequences of its prompt, and little memory change nothing."""
    llm, alone = engine("llama", kv_memory="512 tokens"), engine("llama")
    prompts = [prompt(60, seed) for seed in range(8)]
    params = [greedy(30, prompt_logprobs=2, n=2) if seed % 2 else greedy(30) for seed in range(8)]
    outputs = llm.generate(prompts, params)
    for one, tokens, output in zip(params, prompts, outputs, strict=True):
        if one.prompt_logprobs is not None:
            check(output, reference("llama"), 2)
        expected = alone.generate([tokens], greedy(30))[0].outputs[0].tokens
        assert {each.tokens for each in output.outputs} == {expected}
    assert llm._core.scheduler.num_preemptions > 0
    llm.check()
