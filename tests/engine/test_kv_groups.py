"""Layers with sliding windows in KV groups of their own: they hold little, and the tokens are those of Transformers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from example_counts import represented
from tiny import Reference, greedy, prompt

from foreword.blocks.layout import LayerLayout
from foreword.blocks.prefix_cache import HOLE
from foreword.engine.kv_groups import group_layers
from foreword.entrypoints.llm import LLM

Find = Callable[[str], Reference]
Make = Callable[..., LLM]

# How many groups of full attention and of windows each has.
GROUPS = {"mistral": (0, 1), "gpt_oss": (1, 1), "gemma2": (1, 1), "gemma3_5to1": (1, 5), "llama": (1, 0)}
SMALL = LayerLayout(2, 16, 16)
HYBRIDS = ["mistral", "gpt_oss", "gemma3_5to1"]
each_hybrid = pytest.mark.parametrize("family", represented(HYBRIDS, "mistral"))


def watch(llm: LLM) -> list[list[int]]:
    """After each step the blocks that the oldest running sequence holds, by group."""
    scheduler, held = llm._core.scheduler, []
    settle = scheduler.settle

    def observe(step: object) -> None:
        settle(step)  # type: ignore[arg-type]
        if scheduler.running:
            groups = scheduler.running[0].table.groups
            held.append([sum(block != HOLE for block in blocks) for blocks in groups])

    scheduler.settle = observe  # type: ignore[method-assign, assignment]
    return held


@pytest.mark.parametrize("family", GROUPS)
def test_groups_of_a_model(family: str, engine: Make) -> None:
    """Layers of full attention and layers of windows are in groups of their own, full attention first."""
    llm = engine(family)
    groups = llm._core.cache.groups
    full, windows = GROUPS[family]
    assert [group.whole for group in groups] == [True] * full + [False] * windows
    assert llm.info.kv_groups == len(groups)
    assert llm.info.kv_tokens == 1024


@each_hybrid
def test_windows_hold_little(family: str, engine: Make, reference: Find) -> None:
    """A text of 120 tokens holds 30 blocks of 4 with full attention. With a window of 8 it holds 3: two, and the one that is
    being filled."""
    llm, tokens = engine(family, lookahead_blocks=0, max_batch_tokens=8), prompt(60, 1)
    held = watch(llm)
    [output] = llm.generate([tokens], greedy(61))
    reference(family).check(tokens, output.outputs[0], 61)
    full, _ = GROUPS[family]
    assert held[-2][:full] == [30] * full
    decoding = held[10:]
    assert {count for counts in decoding for count in counts[full:]} == {3}
    prefilling = held[:8]
    assert max(count for counts in prefilling for count in counts[full:]) <= 5


@each_hybrid
def test_longer_than_the_pool(family: str, engine: Make, reference: Find) -> None:
    """Windows make room: a text that is longer than the memory's tokens in all layers runs, and is refused at the limit."""
    llm = engine(family, kv_memory="48 tokens", max_batch_tokens=8, lookahead_blocks=0)
    assert engine("llama", kv_memory="48 tokens", max_batch_tokens=8).info.max_model_len == 48
    longest = min(llm.info.max_model_len, 120)
    assert longest > 70
    tokens = prompt(longest - 5, 2)
    [output] = llm.generate([tokens], greedy(5))
    reference(family).check(tokens, output.outputs[0], 5)
    llm.check()


@each_hybrid
def test_hit_after_the_front_was_evicted(family: str, engine: Make, reference: Find) -> None:
    """A conversation goes on from its last window after the blocks before it were evicted; what was evicted in full attention,
    or in the window, is computed again. The tokens are the same."""
    llm, truth = engine(family, kv_memory="96 tokens", max_batch_tokens=16, lookahead_blocks=0), reference(family)
    tokens = prompt(40, 3)
    counts = []
    for other in (0, 24, 48, 72, 96):
        [output] = llm.generate([tokens], greedy(8))
        truth.check(tokens, output.outputs[0], 8)
        counts.append(output.cached_tokens)
        if other:
            llm.generate([prompt(other, 100 + other)], greedy(1))
        longer = [*tokens, *output.outputs[0].tokens, *prompt(2, 4)]
        [output] = llm.generate([longer], greedy(8))
        truth.check(longer, output.outputs[0], 8)
        counts.append(output.cached_tokens)
        llm.check()
    assert counts[1] == 47  # nothing evicted: all but the last token of the output
    assert counts[-1] < 47


@each_hybrid
def test_named_prefix_pins_a_window(family: str, engine: Make) -> None:
    """A named prefix pins all blocks of full attention and the last window of the others, and is a hit when all else is
    evicted."""
    llm = engine(family, kv_memory="256 tokens", max_batch_tokens=16, lookahead_blocks=0)
    made = llm.add_prefix("instructions", "Answer in one word, or say that you do not know it. " * 2)
    tokens, (full, windows) = made.tokens, GROUPS[family]
    whole = len(tokens) // 4
    assert made.bytes == (whole * full + 2 * windows) * llm.info.kv_bytes_per_block
    for seed in range(6):
        llm.generate([prompt(100, 200 + seed)], greedy(4))
    [output] = llm.generate([[*tokens, *prompt(7, 6)]], greedy(4))
    assert output.cached_tokens == whole * 4
    llm.check()


def test_layers_per_group() -> None:
    """Groups have as many layers as wastes little memory and makes few groups."""

    def shape(full: int, windows: int) -> tuple[int, int, int]:
        kinds = dict.fromkeys(range(full), None) | dict.fromkeys(range(full, full + windows), 8)
        made = group_layers(dict.fromkeys(kinds, SMALL), kinds, 1000)
        assert sorted(layer for group in made.groups for layer in group) == sorted(kinds)
        return made.windows.count(None), made.windows.count(8), len(made.columns)

    assert shape(12, 12) == (1, 1, 12)
    assert shape(4, 22) == (1, 6, 4)
    assert shape(8, 40) == (1, 5, 8)
    assert shape(20, 6) == (2, 1, 10)
    assert shape(0, 32) == (0, 1, 32)
    assert shape(32, 0) == (1, 0, 32)


def test_layers_that_stay_together() -> None:
    """Layers that keep different amounts per token stay in one group, and so does a window that no text leaves."""
    unequal = group_layers({0: SMALL, 1: LayerLayout(1, 16, 16)}, {0: None, 1: 8}, 1000)
    assert (unequal.groups, unequal.windows) == (((0, 1),), (None,))
    wide = group_layers({0: SMALL, 1: SMALL}, {0: None, 1: 1000}, 1000)
    assert (wide.groups, wide.windows) == (((0, 1),), (None,))


@each_hybrid
def test_report_of_a_window_that_is_missing(family: str, engine: Make) -> None:
    """Where the blocks of full attention are cached and a window before a resumable position is not, the report says so. A
    model that has windows only has lost what it misses."""
    llm, tokens = engine(family, kv_memory="96 tokens", max_batch_tokens=16, lookahead_blocks=0), prompt(60, 3)
    reasons = []
    for seed in range(12):
        llm.generate([[*tokens, *prompt(20, seed)]], greedy(1))
        llm.generate([prompt(30, 100 + seed)], greedy(1))
        [output] = llm.generate([[*tokens[:30], *prompt(8, 200 + seed)]], greedy(1), cache_report=True)
        assert output.cache_report is not None
        reasons.append(output.cache_report.reason)
    assert ("checkpoint_missing" in reasons) == bool(GROUPS[family][0])
