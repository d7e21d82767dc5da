"""Checkpoints: which blocks a request saves so that later requests can continue."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from example_counts import represented

from foreword.blocks.checkpoints import DENSE_TOKENS, GAP, SHARE, CheckpointPlan, ReplacedCheckpoints
from foreword.blocks.resume import GroupKind, KVGroup, alignment, longest_resumable


def _random_group(rng: random.Random, block_size: int) -> KVGroup:
    kind = rng.choice((GroupKind.WINDOW, GroupKind.CHUNKED, GroupKind.STATE))
    sinks = rng.choice((0, 1, block_size + 1)) if kind is GroupKind.WINDOW else 0
    return KVGroup(kind, block_size, span=rng.randint(1, 8 * block_size), sinks=sinks)


def _random_model(rng: random.Random) -> tuple[list[KVGroup], list[int]]:
    groups = [KVGroup(GroupKind.FULL, rng.choice((8, 16)))]
    groups += [_random_group(rng, rng.choice((8, 16, 32))) for _ in range(rng.randint(1, 3))]
    return groups, [rng.randint(1, 100) for _ in groups]


def _window_model(window: int, block_size: int, ratio: int = 5) -> tuple[list[KVGroup], list[int]]:
    """`ratio` groups of window layers for one of full attention. All blocks take one byte per token."""
    groups = [KVGroup(GroupKind.FULL, block_size)]
    groups += [KVGroup(GroupKind.WINDOW, block_size, span=window)] * ratio
    return groups, [block_size] * len(groups)


def _recurrent_model(block_size: int) -> tuple[list[KVGroup], list[int]]:
    groups = [KVGroup(GroupKind.FULL, block_size), *[KVGroup(GroupKind.STATE, block_size)] * 3]
    return groups, [block_size] * len(groups)


def _saved(plan: CheckpointPlan, groups: list[KVGroup], tokens: int, start: int = 0) -> list[set[int]]:
    """The full blocks of each group that the plan wants among those that begin at `start` or later."""
    return [
        {i for i in range(start // group.block_size, tokens // group.block_size) if plan.wanted(number, i)}
        for number, group in enumerate(groups)
    ]


def _sparse_bytes(blocks: list[set[int]], groups: list[KVGroup], block_bytes: list[int]) -> int:
    return sum(len(have) * one for have, group, one in zip(blocks, groups, block_bytes, strict=True) if not group.whole)


@pytest.mark.parametrize("seed", represented(range(300), *range(0, 300, 4)))
def test_every_checkpoint_is_resumable(seed: int) -> None:
    """A request can continue from each position of the plan, given what the request continued from and what it saved."""
    rng = random.Random(seed)
    groups, block_bytes = _random_model(rng)
    step = alignment(groups)
    prompt = rng.randint(1, 4000)
    resumed = rng.randrange(prompt) // step * step if rng.random() < 0.5 else 0
    plan = CheckpointPlan(groups, block_bytes, prompt, resumed=resumed, cached=rng.randint(0, prompt))
    answer = rng.randint(0, 300)
    asked = plan.add(rng.randint(0, prompt)), plan.end_turn(prompt + answer)
    assert {p for p in asked if p} <= set(plan.positions)
    held = _saved(plan, groups, prompt + answer, resumed)
    for number, group in enumerate(groups):
        held[number].update(group.needed(resumed))
    for position in plan.positions:
        if position >= resumed:
            assert longest_resumable(groups, position, lambda g, i: i in held[g]) == position


@pytest.mark.parametrize("seed", represented(range(300), *range(0, 300, 4)))
def test_budget_is_kept(seed: int) -> None:
    """Spaced checkpoints are made only while everything saved stays within the budget."""
    rng = random.Random(seed)
    groups, block_bytes = _random_model(rng)
    step = alignment(groups)
    prompt = rng.randint(1, 8000)
    resumed = rng.randrange(prompt) // step * step if rng.random() < 0.5 else 0
    cached = rng.randint(0, prompt)
    plan = CheckpointPlan(groups, block_bytes, prompt, resumed=resumed, cached=cached)
    always = {p // step * step for p in (prompt, prompt - 1, cached if cached > resumed else 0)} - {0}
    assert always <= set(plan.positions)
    if set(plan.positions) == always:
        return
    every = [set(range(resumed // group.block_size, prompt // group.block_size)) for group in groups]
    budget = SHARE * _sparse_bytes(every, groups, block_bytes)
    if all(group.kind is not GroupKind.STATE for group in groups):
        first = [
            {i for i in have if (i + 1) * g.block_size <= DENSE_TOKENS} for have, g in zip(every, groups, strict=True)
        ]
        budget = max(budget, _sparse_bytes(first, groups, block_bytes))
    assert _sparse_bytes(_saved(plan, groups, prompt, resumed), groups, block_bytes) <= budget


@pytest.mark.parametrize("block_size", [16, 32, 128])
@pytest.mark.parametrize("window", [128, 512, 1024])
def test_window_models_store_a_third_of_long_prompts(window: int, block_size: int) -> None:
    """Prompts of 8k tokens with five window layers to one of full attention store at most a third of all blocks."""
    groups, block_bytes = _window_model(window, block_size)
    for prompt in (8000, 8192, 8209):
        plan = CheckpointPlan(groups, block_bytes, prompt)
        plan.end_turn(prompt + 300)
        saved = sum(len(have) * block_size for have in _saved(plan, groups, prompt + 300))
        assert saved <= 6 * (prompt + 300) / 3


@pytest.mark.parametrize("window", [128, 512, 1024])
def test_shortened_prompts_of_window_models(window: int) -> None:
    """A short prompt of a window model saves every block: each prefix of it is a hit up to its last full block."""
    groups, block_bytes = _window_model(window, 128)
    held = _saved(CheckpointPlan(groups, block_bytes, 1500), groups, 1500)
    found = [longest_resumable(groups, tokens - 1, lambda g, i: i in held[g]) for tokens in (1500, 700, 333)]
    assert found == [1408, 640, 256]


def test_shortened_long_prompts_lose_at_most_the_spacing() -> None:
    """A prefix of a long prompt is a hit up to the last spaced checkpoint."""
    groups, block_bytes = _window_model(128, 16)
    plan = CheckpointPlan(groups, block_bytes, 8000)
    held = _saved(plan, groups, 8000)
    for tokens in range(1, 8000, 97):
        found = longest_resumable(groups, tokens - 1, lambda g, i: i in held[g])
        assert tokens - found <= 1024


def test_recurrent_models_save_few_states() -> None:
    """A recurrent model saves the ends, the place where an earlier prompt diverged, and states at a spacing."""
    groups, block_bytes = _recurrent_model(512)
    plan = CheckpointPlan(groups, block_bytes, 24 * 512 + 100, cached=3 * 512 + 5)
    assert plan.end_turn(26 * 512 + 1) == 26 * 512
    assert [position // 512 for position in plan.positions] == [3, 16, 24, 26]
    assert [i for i in range(26) if plan.wanted(1, i)] == [2, 15, 23, 25]
    assert all(plan.wanted(0, i) for i in range(26))


def test_end_of_turn() -> None:
    """The end of a turn is saved, except after a repeated prompt, and for recurrent models after the first turn if it is near
    the end of the prompt."""
    groups, block_bytes = _recurrent_model(512)
    assert CheckpointPlan(groups, block_bytes, 3000, resumed=1024).end_turn(3100) == 3072
    assert CheckpointPlan(groups, block_bytes, 3000, resumed=2560).end_turn(3100) == 0
    assert CheckpointPlan(groups, block_bytes, 3000).end_turn(3100) == 0
    assert CheckpointPlan(groups, block_bytes, 3000).end_turn(3600) == 3584
    groups, block_bytes = _window_model(128, 128)
    assert CheckpointPlan(groups, block_bytes, 3000).end_turn(3100) == 3072
    assert CheckpointPlan(groups, block_bytes, 3000, resumed=2944).end_turn(3100) == 0


def test_states_of_a_long_answer() -> None:
    """If states exist only while their boundary is computed, an answer saves ever fewer of them. The next turn recomputes at
    most a quarter of the answer."""
    groups, block_bytes = _recurrent_model(512)
    plan = CheckpointPlan(groups, block_bytes, 10 * 512 + 1, resumed=9 * 512)
    taken = [i for i in range(11, 43) if plan.answered(i * 512)]
    assert taken == [11, 12, 13, 14, 16, 18, 21, 25, 30, 37]
    assert plan.positions == [10 * 512, *(i * 512 for i in taken)]
    repeated = CheckpointPlan(groups, block_bytes, 10 * 512 + 1, resumed=10 * 512)
    assert not any(repeated.answered(i * 512) for i in range(11, 43))


def test_prompt_that_ends_at_a_boundary() -> None:
    """The last token of a prompt is always computed: a checkpoint before it serves the same prompt again."""
    groups, block_bytes = _recurrent_model(512)
    assert CheckpointPlan(groups, block_bytes, 1024).positions == [512, 1024]
    assert CheckpointPlan(groups, block_bytes, 1025).positions == [1024]
    assert CheckpointPlan(groups, block_bytes, 511).positions == []


def test_states_at_the_ends_of_chunks() -> None:
    """If states exist only at the ends of chunks, the last one before each planned checkpoint is saved."""
    groups, block_bytes = _recurrent_model(512)
    plan = CheckpointPlan(groups, block_bytes, 24 * 512 + 1, cached=3 * 512)
    ends = [0, 2, 6, 11, 15, 19, 24]
    assert [a for a, b in pairwise(ends) if plan.offer(a * 512, b * 512)] == [2, 15]
    assert [plan.wanted(1, i - 1) for i in ends[1:]] == [True, False, False, True, False, True]
    assert not plan.offer(700, 30 * 512)


def _key(position: int) -> bytes:
    return position.to_bytes(8, "big")


@pytest.mark.parametrize("seed", represented(range(12), 0, 1, 2))
def test_session_keeps_checkpoints_to_go_back_to(seed: int) -> None:
    """A long session deletes most of its checkpoints, never the last ones. Gaps are at most a share of the position behind."""
    rng = random.Random(seed)
    replaced = ReplacedCheckpoints()
    made: list[int] = []
    held: set[int] = set()
    resumed = 0
    for _ in range(200):
        prompt = resumed + rng.randint(1, 40)
        ends = {end: _key(end) for end in (prompt, prompt + rng.randint(0, 10))}
        gone = {int.from_bytes(one, "big") for one in replaced.ended(ends, resumed, _key(resumed))}
        assert gone <= held
        held = held - gone | set(ends)
        made += sorted(ends)
        resumed = rng.choice(list(ends))
        for before, after in pairwise([0, *sorted(held)]):
            assert after - before <= max(GAP * after, *(b - a for a, b in pairwise([0, *made])))
    assert len(held) < len(made) / 2


def test_checkpoints_that_others_need_are_not_replaced() -> None:
    """Repeated prompts, prompts that diverged and checkpoints with two successors delete nothing."""
    replaced = ReplacedCheckpoints()
    ends = {100: b"prompt", 101: b"turn"}
    assert replaced.ended(ends) == []
    assert replaced.ended({100: b"prompt"}, 100, b"prompt") == []
    assert replaced.ended(ends, 100, b"prompt") == []
    assert replaced.ended({102: b"diverged"}, 100) == []
    assert replaced.ended({102: b"first"}, 101, b"turn") == [b"turn"]
    assert replaced.ended({103: b"second"}, 101, b"turn") == []


@pytest.mark.parametrize(("capacity", "expected"), [(2, []), (3, [b"second"])])
def test_replaced_checkpoints_are_remembered_up_to_a_number(capacity: int, expected: list[bytes]) -> None:
    """Checkpoints beyond the capacity are forgotten, the oldest first, and stay in the store."""
    replaced = ReplacedCheckpoints(capacity)
    assert replaced.ended({100: b"first"}) == []
    assert replaced.ended({110: b"second"}, 100, b"first") == []
    replaced.ended({100: b"other"})
    replaced.ended({100: b"another"})
    assert replaced.ended({120: b"third"}, 110, b"second") == expected
