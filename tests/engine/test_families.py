"""Every model family gives the tokens of Transformers: chunked, cached, preempted and with shared prefixes."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from example_counts import represented
from tiny import FAMILIES, Reference, greedy, prompt

from foreword.entrypoints.llm import LLM

COUNT = 20
# Shorter and longer than a block, than the sliding windows of 8, and than the smaller chunks.
MIXED = [prompt(length, seed) for seed, length in enumerate((1, 5, 8, 13, 26, 41))]
COMMON = prompt(64, 100)
FORKED = [COMMON + prompt(length, 200 + length) for length in (1, 2, 6, 9)]
# Together they outgrow a small pool, even where a sequence holds only a window.
GROWING = [*MIXED[1:], *(prompt(3, 400 + seed) for seed in range(7))]
TIGHT = {"kv_memory": "64 tokens", "reserve": 0.0, "lookahead_blocks": 0}

Find = Callable[[str], Reference]
Make = Callable[..., LLM]

# Full attention in place and dense, windows, sinks, several KV groups: each way through the arithmetic once.
KINDS = ["llama", "mistral", "gemma2", "gemma3_5to1", "gpt_oss", "deepseek_v3"]

every_family = pytest.mark.parametrize("family", represented(FAMILIES, "llama", "gpt_oss", "gpt2"))
kinds_first = pytest.mark.parametrize("family", represented(FAMILIES, "gemma2", "deepseek_v3"))
each_kind = pytest.mark.parametrize("family", represented(KINDS, "llama", "gpt_oss"))


def shuffle_blocks(llm: LLM) -> None:
    """Shuffle the free list: the blocks of a table are not consecutive."""
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


@kinds_first
def test_mixed_batch(family: str, engine: Make, reference: Find) -> None:
    """Prompts of different lengths in one batch do not change each other."""
    check(engine(family), reference(family), MIXED)


@every_family
def test_cached_prefix(family: str, engine: Make, reference: Find) -> None:
    """The check at start passes. A prompt gives the tokens of `generate()`, which vary from token to token, and so does a
    second run that reuses cached blocks, whole and partial ones."""
    llm, truth = engine(family, self_check=True), reference(family)
    assert check(llm, truth, [MIXED[4]]) == [0]
    assert len(set(truth.greedy(MIXED[4], COUNT))) >= COUNT // 2
    check(llm, truth, [MIXED[5]])
    assert check(llm, truth, [MIXED[4], MIXED[5]]) == [25, 40]
    # The next turn of a conversation: prompt and answer are cached, and a few new tokens follow.
    longer = [*MIXED[4], *truth.greedy(MIXED[4], COUNT)[:-1], *prompt(5, 300)]
    assert check(llm, truth, [longer]) == [len(MIXED[4]) + COUNT - 1]
    # The common prefix ends inside a block.
    assert check(llm, truth, [MIXED[5][:22] + prompt(7, 301)])[0] >= 20


@kinds_first
@pytest.mark.parametrize("chunk", [3, *(pytest.param(size, marks=pytest.mark.slow) for size in (16, 512))])
def test_chunked_prefill(family: str, chunk: int, engine: Make, reference: Find) -> None:
    """However a prompt is cut into chunks, the tokens are the same, cold and cached."""
    llm, truth = engine(family, max_batch_tokens=chunk), reference(family)
    check(llm, truth, MIXED[3:])
    assert min(check(llm, truth, MIXED[3:])) > 0


@pytest.mark.slow
@kinds_first
def test_preemption(family: str, engine: Make, reference: Find) -> None:
    """When memory runs out, preempted requests resume and give the same tokens."""
    llm = engine(family, **TIGHT)
    check(llm, reference(family), GROWING)
    assert llm._core.scheduler.num_preemptions > 0


@each_kind
def test_preemption_without_caching(family: str, engine: Make, reference: Find) -> None:
    """Without prefix caching a preempted request recomputes all its tokens, and gives the same output."""
    llm = engine(family, **TIGHT, enable_prefix_caching=False)
    assert check(llm, reference(family), GROWING) == [0] * len(GROWING)
    assert llm._core.scheduler.num_preemptions > 0


@kinds_first
def test_shared_prefix_in_fragments(family: str, engine: Make, reference: Find) -> None:
    """A shared prefix in scattered blocks gives each sequence of a batch the same tokens as alone."""
    llm, truth = engine(family), reference(family)
    shuffle_blocks(llm)
    check(llm, truth, [COMMON], 1)
    cached = check(llm, truth, [*FORKED, MIXED[2]])
    assert min(cached[:4]) >= len(COMMON)


@kinds_first
def test_shared_prefix_in_a_row(family: str, engine: Make, reference: Find) -> None:
    """A shared prefix in consecutive blocks, which is read in place, gives each sequence the same tokens as alone."""
    llm, truth = engine(family), reference(family)
    check(llm, truth, [COMMON], 1)
    cached = check(llm, truth, [*FORKED, MIXED[2]])
    assert min(cached[:4]) >= len(COMMON)


@each_kind
def test_unshared_prefix(family: str, engine: Make, reference: Find) -> None:
    """Sequences read the prefix themselves where shared-prefix attention is switched off, and give the same tokens."""
    truth = reference(family)
    for shuffled in (False, True):
        llm = engine(family)
        llm._core._runner.share_prefixes = False
        if shuffled:
            shuffle_blocks(llm)
        check(llm, truth, [COMMON], 1)
        assert min(check(llm, truth, FORKED)) >= len(COMMON)


@pytest.mark.slow
@kinds_first
def test_large_blocks(family: str, engine: Make, reference: Find) -> None:
    """Blocks longer than the sliding window and longer than most prompts change nothing."""
    llm, truth = engine(family, block_size=32), reference(family)
    for _ in range(2):
        check(llm, truth, [*MIXED, *FORKED])
