"""Every family computes what Transformers computes, however its tokens are cut, cached, preempted and shared (R25)."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from tiny import FAMILIES, Reference, greedy, prompt

from foreword.entrypoints.llm import LLM

COUNT = 20
# Shorter and longer than a block, than the sliding windows of 8, and than the smaller chunks.
MIXED = [prompt(length, seed) for seed, length in enumerate((1, 5, 8, 13, 26, 41))]
COMMON = prompt(64, 100)
FORKED = [COMMON + prompt(length, 200 + length) for length in (1, 2, 6, 9)]

Find = Callable[[str], Reference]
Make = Callable[..., LLM]

every_family = pytest.mark.parametrize("family", FAMILIES)
# Full attention in place and dense, windows, sinks: each way through the arithmetic once.
each_kind = pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt_oss", "deepseek_v3"])


def shuffle_blocks(llm: LLM) -> None:
    """Put the free list out of order, so that no two blocks of a table lie in a row."""
    pool = llm._core.cache.pool
    blocks = pool.allocate(pool.num_blocks)
    assert blocks is not None
    random.Random(7).shuffle(blocks)
    for block in blocks:
        pool.release([block])


def check(llm: LLM, truth: Reference, prompts: list[list[int]], count: int = COUNT) -> list[int]:
    """All prompts at once; returns how many tokens of each were cached."""
    outputs = llm.generate(prompts, greedy(count))
    for tokens, output in zip(prompts, outputs, strict=True):
        truth.check(tokens, output.outputs[0], count)
    llm.check()
    return [output.cached_tokens for output in outputs]


@every_family
def test_alone(family: str, engine: Make, reference: Find) -> None:
    """A prompt alone gives the tokens of `generate()`, which vary from token to token."""
    llm, truth = engine(family), reference(family)
    assert check(llm, truth, [MIXED[4]]) == [0]
    assert len(set(truth.greedy(MIXED[4], COUNT))) >= COUNT // 2


@every_family
def test_mixed_batch(family: str, engine: Make, reference: Find) -> None:
    """Prompts of different lengths in one batch do not change each other."""
    check(engine(family), reference(family), MIXED)


@every_family
def test_cached_prefix(family: str, engine: Make, reference: Find) -> None:
    """A second run that reuses cached blocks, whole and partial ones, gives the same tokens as the first."""
    llm, truth = engine(family), reference(family)
    check(llm, truth, [MIXED[4], MIXED[5]])
    assert check(llm, truth, [MIXED[4], MIXED[5]]) == [25, 40]
    # A conversation goes on: prompt and answer are cached, and a few new tokens follow.
    longer = [*MIXED[4], *truth.greedy(MIXED[4], COUNT)[:-1], *prompt(5, 300)]
    assert check(llm, truth, [longer]) == [len(MIXED[4]) + COUNT - 1]
    # Only a part of a block agrees.
    assert check(llm, truth, [MIXED[5][:22] + prompt(7, 301)])[0] >= 20


@every_family
@pytest.mark.parametrize("chunk", [3, 16, 512])
def test_chunked_prefill(family: str, chunk: int, engine: Make, reference: Find) -> None:
    """However a prompt is cut into chunks, the tokens are the same, cold and cached."""
    llm, truth = engine(family, max_batch_tokens=chunk), reference(family)
    check(llm, truth, MIXED[3:])
    assert min(check(llm, truth, MIXED[3:])) > 0


@every_family
def test_preemption(family: str, engine: Make, reference: Find) -> None:
    """When memory runs out, preempted requests resume and give the same tokens."""
    llm = engine(family, kv_memory="96 tokens", reserve=0.0)
    check(llm, reference(family), MIXED[1:])
    assert llm._core.scheduler.num_preemptions > 0


@each_kind
def test_preemption_without_caching(family: str, engine: Make, reference: Find) -> None:
    """Without a prefix cache a preempted request computes everything again, and gives the same tokens."""
    llm = engine(family, kv_memory="96 tokens", reserve=0.0, enable_prefix_caching=False)
    assert check(llm, reference(family), MIXED[1:]) == [0] * 5
    assert llm._core.scheduler.num_preemptions > 0


@every_family
def test_shared_prefix_in_fragments(family: str, engine: Make, reference: Find) -> None:
    """A prefix that the whole batch shares, in blocks all over the pool, gives everyone the tokens that it has alone."""
    llm, truth = engine(family), reference(family)
    shuffle_blocks(llm)
    check(llm, truth, [COMMON], 1)
    cached = check(llm, truth, [*FORKED, MIXED[2]])
    assert min(cached[:4]) >= len(COMMON)


@every_family
def test_shared_prefix_in_a_row(family: str, engine: Make, reference: Find) -> None:
    """The same with a prefix whose blocks lie in a row, so that it is read in place."""
    llm, truth = engine(family), reference(family)
    check(llm, truth, [COMMON], 1)
    cached = check(llm, truth, [*FORKED, MIXED[2]])
    assert min(cached[:4]) >= len(COMMON)


@each_kind
def test_unshared_prefix(family: str, engine: Make, reference: Find) -> None:
    """With shared-prefix attention switched off everyone reads the prefix alone, in a row and in fragments."""
    truth = reference(family)
    for shuffled in (False, True):
        llm = engine(family, shared_prefix_attention=False)
        if shuffled:
            shuffle_blocks(llm)
        check(llm, truth, [COMMON], 1)
        assert min(check(llm, truth, FORKED)) >= len(COMMON)


@every_family
def test_large_blocks(family: str, engine: Make, reference: Find) -> None:
    """Blocks longer than the sliding window and longer than most prompts change nothing."""
    llm, truth = engine(family, block_size=32), reference(family)
    for _ in range(2):
        check(llm, truth, [*MIXED, *FORKED])
