"""The search in the stores for the longest position from which a model with several KV groups can continue."""

from __future__ import annotations

import random
import time

import pytest
from example_counts import represented

from foreword.blocks.keys import Scope, chain_keys
from foreword.blocks.layout import chain_prefix, key_of
from foreword.blocks.resume import GroupKind, KVGroup, alignment
from foreword.offload.search import Found, StoredGroup, find_resumable
from foreword.store.base import Name
from foreword.store.frame import RAW, Header, frame
from foreword.store.memory.memory_store import MemoryStore
from foreword.store.tiered import TieredStore, TierSearch

KEY_SIZE = 4
TOKENS = 160
ROOT = Scope(b"model", KEY_SIZE).root()
KEYS = chain_keys(ROOT, range(TOKENS), KEY_SIZE)


def _put(store: MemoryStore, names: list[Name]) -> None:
    frames = [frame(Header(name[:16], name[16:32], key_of(name), bytes(32), 0, RAW, 8, 8), bytes(8)) for name in names]
    assert store.put(frames, deadline=time.monotonic() + 60) == len(names)


def _name(one: StoredGroup, block: int, rank: int = 0) -> Name:
    [key] = one.keys(KEYS, [block])
    return chain_prefix(one.layouts[rank], ROOT) + key


def _search(tiers: TieredStore, groups: list[StoredGroup], held: int, limit: int) -> Found:
    return find_resumable(tiers, groups, ROOT, KEYS, held, limit, TierSearch(time.monotonic() + 60))


def _draw_groups(rng: random.Random, ranks: int) -> list[StoredGroup]:
    found = []
    for number in range(rng.randint(1, 3)):
        size = KEY_SIZE * rng.choice((1, 1, 2))
        group = KVGroup(rng.choice(list(GroupKind)), size, span=rng.randint(1, 5 * size))
        layouts = tuple(bytes([number, rank]) * 8 for rank in range(ranks))
        found.append(StoredGroup(group, layouts, size // KEY_SIZE))
    return found


@pytest.mark.parametrize("seed", represented(range(150), *range(0, 150, 3)))
def test_the_longest_position_of_all_ranks_and_tiers(seed: int) -> None:
    """The search finds, with random blocks in two tiers, for one or two ranks, the last position for which every group has on
    every rank what it needs, and the tier of each block that is to be loaded."""
    rng = random.Random(seed)
    ranks = rng.choice((1, 2))
    groups = _draw_groups(rng, ranks)
    step = alignment([one.group for one in groups])
    held = rng.randrange(0, TOKENS // 2) // step * step
    share = rng.choice((0.6, 0.9, 1.0))
    stores = [MemoryStore(1 << 20), MemoryStore(1 << 20)]
    there: dict[Name, int] = {}
    for one in groups:
        for block in range(TOKENS // one.group.block_size):
            for rank in range(ranks):
                if rng.random() < share:
                    there[_name(one, block, rank)] = rng.randrange(2)
    for tier, store in enumerate(stores):
        _put(store, [name for name, place in there.items() if place == tier])

    def is_held(one: StoredGroup, block: int) -> bool:
        names = [_name(one, block, rank) for rank in range(ranks)]
        return block * one.group.block_size < held or all(name in there for name in names)

    limit = rng.randint(held, TOKENS)
    possible = [
        position
        for position in range(held, limit + 1, step)
        if position == held or all(is_held(one, block) for one in groups for block in one.group.needed(position))
    ]
    tiers = TieredStore(stores)
    found = _search(tiers, groups, held, limit)
    assert found.position == max(possible) <= found.reach
    wanted = {
        (number, block)
        for number, one in enumerate(groups)
        for block in one.group.needed(found.position)
        if found.position > held and block * one.group.block_size >= held
    }
    assert set(found.places) == wanted
    for (number, block), place in found.places.items():
        assert place in {there[_name(groups[number], block, rank)] for rank in range(ranks)}
    tiers.close()


@pytest.mark.parametrize("seed", represented(range(150), *range(0, 150, 3)))
def test_positions_without_the_slowest_tiers(seed: int) -> None:
    """Positions in `shorter`, with random blocks in three tiers, are the last for which full attention needs no block of the
    slowest tier in use, and none of the two slowest; each with the places of what it needs."""
    rng = random.Random(1000 + seed)
    groups = [StoredGroup(KVGroup(GroupKind.FULL, KEY_SIZE), (b"f" * 16,))]
    groups += [StoredGroup(KVGroup(GroupKind.WINDOW, KEY_SIZE, span=rng.randint(1, 4 * KEY_SIZE)), (b"w" * 16,))]
    held = rng.randrange(0, TOKENS // 4) // KEY_SIZE * KEY_SIZE
    there: list[dict[int, int]] = [{}, {}]
    ends = sorted(rng.sample(range(1, TOKENS // KEY_SIZE), 2))
    for block in range(TOKENS // KEY_SIZE):
        there[0][block] = sum(block >= end for end in ends) if rng.random() < 0.9 else rng.randrange(3)
        if rng.random() < 0.7:
            there[1][block] = rng.randrange(3)
    stores = [MemoryStore(1 << 20) for _ in range(3)]
    for tier, store in enumerate(stores):
        _put(store, [_name(one, b) for one, at in zip(groups, there, strict=True) for b, t in at.items() if t == tier])
    tiers = TieredStore(stores)
    found = _search(tiers, groups, held, TOKENS)
    tiers.close()

    def needed(position: int, number: int) -> list[int]:
        return [block for block in groups[number].group.needed(position) if block * KEY_SIZE >= held]

    def longest(slowest: int) -> int:
        fits = (
            position
            for position in range(held, found.position + 1, KEY_SIZE)
            if all(there[0].get(block, 3) <= slowest for block in needed(position, 0))
            and all(block in there[1] for block in needed(position, 1))
        )
        return max(fits, default=held)

    used = sorted({there[0][block] for block in needed(found.position, 0)}, reverse=True)
    expected = dict.fromkeys(longest(tier) for tier in used[1:])
    assert [one.position for one in found.shorter] == [at for at in expected if held < at < found.position]
    for one in found.shorter:
        assert one.reach == found.reach and not one.shorter
        wanted = {(number, block) for number in (0, 1) for block in needed(one.position, number)}
        assert one.places == {(number, block): there[number][block] for number, block in wanted}


def test_reach_says_where_prompts_diverged() -> None:
    """If the blocks of full attention go on where a recurrent state is missing, `reach` is the end of the former."""
    full = StoredGroup(KVGroup(GroupKind.FULL, KEY_SIZE), (b"f" * 16,))
    state = StoredGroup(KVGroup(GroupKind.STATE, KEY_SIZE), (b"s" * 16,))
    store = MemoryStore(1 << 20)
    _put(store, [_name(full, block) for block in range(10)] + [_name(state, block) for block in (3, 20)])
    found = _search(TieredStore([store]), [full, state], 0, TOKENS)
    assert (found.position, found.reach) == (4 * KEY_SIZE, 10 * KEY_SIZE)
    assert len(found.places) == 5
