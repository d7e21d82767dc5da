"""Resumable positions of models with several KV groups."""

from __future__ import annotations

import random

import pytest
from example_counts import represented

from foreword.blocks.resume import GroupKind, KVGroup, alignment, longest_resumable


def _attends(group: KVGroup, query: int, key: int) -> bool:
    """Whether the token at `query` needs what the token at `key` left behind."""
    if group.kind is GroupKind.WINDOW:
        return query - key < group.span or key < group.sinks
    if group.kind is GroupKind.CHUNKED:
        return query // group.span == key // group.span
    return True


def _can_continue(group: KVGroup, position: int, held: set[int]) -> bool:
    """By definition: every token from `position` on finds what it attends to. Recurrent layers need the state at `position`."""
    size = group.block_size
    if group.kind is GroupKind.STATE:
        return not position or position // size - 1 in held
    keys = (
        key for key in range(position) if any(_attends(group, query, key) for query in range(position, position + 40))
    )
    return all(key // size in held for key in keys)


def _random_group(rng: random.Random, size: int) -> KVGroup:
    kind = rng.choice(list(GroupKind))
    sinks = rng.choice((0, 0, 1, size, size + 1))
    return KVGroup(kind, size, span=rng.randint(1, 5 * size), sinks=sinks if kind is GroupKind.WINDOW else 0)


@pytest.mark.parametrize("seed", represented(range(300), *range(0, 300, 4)))
def test_longest_resumable_position_is_that_of_the_definition(seed: int) -> None:
    """For random groups and random blocks, the position found is the last one that the definition of attention allows."""
    rng = random.Random(seed)
    groups = [_random_group(rng, rng.choice((2, 4, 6))) for _ in range(rng.randint(1, 3))]
    limit = rng.randint(0, 60)
    share = rng.choice((0.5, 0.8, 0.95, 1.0))
    held = [{i for i in range(limit // group.block_size) if rng.random() < share} for group in groups]
    step = alignment(groups)
    expected = max(
        p
        for p in range(0, limit + 1, step)
        if all(_can_continue(group, p, have) for group, have in zip(groups, held, strict=True))
    )
    assert longest_resumable(groups, limit, lambda g, i: i in held[g]) == expected


def test_blocks_needed_to_continue() -> None:
    """Each kind of group needs the documented blocks, the last one first."""
    assert list(KVGroup(GroupKind.FULL, 4).needed(12)) == [2, 1, 0]
    assert list(KVGroup(GroupKind.WINDOW, 4, span=5).needed(12)) == [2]
    assert list(KVGroup(GroupKind.WINDOW, 4, span=6).needed(12)) == [2, 1]
    assert list(KVGroup(GroupKind.WINDOW, 4, span=2, sinks=3).needed(12)) == [2, 0]
    assert list(KVGroup(GroupKind.CHUNKED, 4, span=8).needed(12)) == [2]
    assert list(KVGroup(GroupKind.CHUNKED, 4, span=12).needed(12)) == []
    assert list(KVGroup(GroupKind.STATE, 4).needed(12)) == [2]
    assert list(KVGroup(GroupKind.STATE, 4).needed(0)) == []
