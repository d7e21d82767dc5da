"""Loads out of what a search has found: against a simple reference that tries every position, and in the simulator."""

from __future__ import annotations

import random
import time

import pytest
from example_counts import represented

from foreword.blocks.keys import Scope, chain_keys
from foreword.blocks.layout import chain_prefix, key_of
from foreword.blocks.resume import GroupKind, KVGroup, alignment
from foreword.offload.load import LoadPlan
from foreword.offload.policy import FixedCosts, LoadCosts
from foreword.offload.search import Found, StoredGroup, find_resumable
from foreword.routing.costs import LoadCost
from foreword.routing.directory import CacheTier
from foreword.sim.costs import EngineCosts
from foreword.sim.stores import SimulatedStores, SimulatedTier
from foreword.store.base import Name
from foreword.store.frame import RAW, Header, frame
from foreword.store.memory.memory_store import MemoryStore
from foreword.store.tiered import TieredStore, TierSearch

KEY_SIZE = 4
TOKENS = 160
TIERS = 3
ROOT = Scope(b"model", KEY_SIZE).root()
KEYS = chain_keys(ROOT, range(TOKENS), KEY_SIZE)


class Case:
    """KV groups, what three tiers have of a chain, and speeds. All speeds are powers of two, so that sums are exact."""

    def __init__(self, seed: int, *, whole: bool = False) -> None:
        self.draw = draw = random.Random(seed)
        kinds = [GroupKind.FULL] if whole else [draw.choice(list(GroupKind)) for _ in range(draw.randint(1, 3))]
        self.groups = [self._group(number, kind) for number, kind in enumerate(kinds)]
        self.step = alignment([one.group for one in self.groups])
        self.there: list[dict[int, int]] = []
        ends = sorted(draw.sample(range(1, TOKENS // KEY_SIZE), 2))
        for one in self.groups:
            share, blocks = draw.choice((0.9, 1.0)), range(TOKENS // one.group.block_size)
            usual = [sum(block * one.group.block_size >= end * KEY_SIZE for end in ends) for block in blocks]
            tiers = [place if draw.random() < 0.8 else draw.randrange(TIERS) for place in usual]
            self.there.append({block: tiers[block] for block in blocks if draw.random() < share})
        self.rates = [draw.choice((0.0, 2.0**9, 2.0**10, 2.0**11)) for _ in range(TIERS)]
        self.fixed = [draw.choice((0.0, 2.0**-6, 2.0**-4, 2.0**-2)) for _ in range(TIERS)]
        self.per_token = 2.0 ** -draw.randint(8, 12)
        self.sizes = [draw.choice((4, 8, 16)) for _ in self.groups]
        self.searched, self.limit = self._position(TOKENS // 2), draw.randint(TOKENS // 2, TOKENS)
        self.held = max(self._position(TOKENS), self.searched)

    def _group(self, number: int, kind: GroupKind) -> StoredGroup:
        size = KEY_SIZE * self.draw.choice((1, 1, 2))
        group = KVGroup(kind, size, span=self.draw.randint(1, 5 * size))
        return StoredGroup(group, (bytes([number]) * 16,), size // KEY_SIZE)

    def _position(self, most: int) -> int:
        return self.draw.choice((0, self.draw.randrange(most))) // self.step * self.step

    def name(self, group: int, block: int) -> Name:
        [key] = self.groups[group].keys(KEYS, [block])
        return chain_prefix(self.groups[group].layouts[0], ROOT) + key

    def found(self) -> Found:
        stores = [MemoryStore(1 << 20) for _ in range(TIERS)]
        for tier, store in enumerate(stores):
            names = [self.name(g, b) for g, at in enumerate(self.there) for b, place in at.items() if place == tier]
            heads = [Header(name[:16], name[16:32], key_of(name), bytes(32), 0, RAW, 8, 8) for name in names]
            assert store.put([frame(head, bytes(8)) for head in heads], deadline=time.monotonic() + 60) == len(names)
        tiers, search = TieredStore(stores), TierSearch(time.monotonic() + 60)
        found = find_resumable(tiers, self.groups, ROOT, KEYS, self.searched, self.limit, search)
        tiers.close()
        return found

    def costs(self) -> LoadCosts:
        sizes = [one.group.block_size for one in self.groups]
        costs = LoadCosts(self.sizes, sizes, lambda: self.rates, lambda: 1 / self.per_token)
        for tier, seconds in enumerate(self.fixed):
            for _ in range(300):  # the measurements are an average that moves
                costs.fixed.note(tier, seconds)
        return costs

    def needed(self, position: int) -> dict[tuple[int, int], int]:
        """The tier of each block that a load to this position brings. Raises KeyError where one is missing."""
        return {
            (number, block): self.there[number][block]
            for number, one in enumerate(self.groups)
            for block in sorted(one.group.needed(position))
            if block * one.group.block_size >= self.held
        }

    def saved(self, position: int, fixed: FixedCosts | None) -> float:
        """Seconds that a load to this position saves."""
        places = self.needed(position)
        rates = [(self.sizes[number], self.rates[place]) for (number, _), place in places.items()]
        loading = sum(size / rate for size, rate in rates if rate)
        least = max((fixed.value(place) for place in places.values()), default=0.0) if fixed is not None else 0.0
        return (position - self.held) * self.per_token - loading - least


@pytest.mark.parametrize("whole", [True, False], ids=["full attention", "any groups"])
@pytest.mark.parametrize("seed", represented(range(300), *range(0, 300, 4)))
def test_the_load_that_saves_the_most(seed: int, whole: bool) -> None:
    """The load that is chosen ends at the position that saves the most time, the first of several that save the same: with one
    group of full attention each that the stores reach, otherwise those of the search. Nothing where none saves time, which is
    counted, also where only the fixed cost is the reason. The plan names the blocks that this position needs and the device
    does not hold."""
    case = Case(seed, whole=whole)
    found, costs = case.found(), case.costs()
    if whole or (len(case.groups) == 1 and case.groups[0].group.whole):
        ends = range(case.held + case.step, found.position + 1, case.step)
    else:
        ends = sorted({found.position, *(one.position for one in found.shorter)})  # type: ignore[assignment]
    ends = [end for end in ends if end > case.held]  # type: ignore[assignment]
    saved = [(case.saved(end, costs.fixed), end) for end in ends]
    best = max((seconds for seconds, _ in saved), default=0.0)
    expected = next((end for seconds, end in saved if seconds == best > 0), None)
    plan = costs.best(found, case.held)
    assert (None if plan is None else plan.position) == expected
    assert costs.declined == bool(ends and plan is None)
    assert costs.too_small == bool(costs.declined and any(case.saved(end, None) > 0 for end in ends))
    everything = costs.best(found, case.held, patient=True)
    assert (everything is None) == (found.position <= case.held)
    for one in (plan, everything):
        if one is not None:
            _check_blocks(case, one)
    unknown = LoadCosts([1], [1], lambda: case.rates, lambda: 0.0)
    assert unknown.best(found, case.held) == everything, "nothing was computed yet"


def _check_blocks(case: Case, plan: LoadPlan) -> None:
    """A plan has the blocks of each group in the order of the chain, without those for which there is no device block."""
    needed = case.needed(plan.position)
    numbered = {at: number for number, at in enumerate(needed)}
    parts = list(plan.blocks(case.groups, KEYS, lambda group, block: numbered[group, block]))
    listed = [(part.group, block) for part in parts for block in part.numbers]
    assert listed == list(needed)
    assert [place for part in parts for place in part.places] == list(needed.values())
    assert [block for part in parts for block in part.blocks] == list(range(len(needed)))
    keys = [case.groups[number].keys(KEYS, [block])[0] for number, block in needed]
    assert [key for part in parts for key in part.keys] == keys
    left = set(case.draw.sample(list(needed), len(needed) // 2))
    some = plan.blocks(
        case.groups, KEYS, lambda group, block: numbered[group, block] if (group, block) in left else None
    )
    assert [(part.group, block) for part in some for block in part.numbers] == [at for at in needed if at in left]


@pytest.mark.parametrize("seed", represented(range(100), *range(0, 100, 4)))
def test_the_simulator_decides_as_the_product(seed: int) -> None:
    """A simulated replica finds and loads what the product does of the same blocks in the same tiers, with the same speeds."""
    case = Case(seed, whole=True)
    case.rates = [rate or 2.0**12 for rate in case.rates]
    size = case.groups[0].group.block_size
    case.sizes = [size]  # in the simulator a token has one byte
    found, costs = case.found(), case.costs()
    loads = tuple(LoadCost(1 / rate, costs.fixed.value(tier)) for tier, rate in enumerate(case.rates))
    tiers = [SimulatedTier(tier, TOKENS) for tier in (CacheTier.HOST, CacheTier.DISK, CacheTier.SHARED)]
    keys = case.groups[0].keys(KEYS, range(TOKENS // size))
    for block, place in case.there[0].items():
        tiers[place].put(ROOT, block, [keys[block]], lambda *_: None, lambda *_: None)
    waits: list[float] = []
    simulated = SimulatedStores(
        tiers,
        EngineCosts(prefill=case.per_token, loads=loads),
        size,
        lambda seconds, then: waits.append(seconds),
        lambda *_: None,
        lambda *_: None,
    )
    search = simulated.search(ROOT, keys, case.searched, case.limit // size * size)
    assert search.found.places == found.places and search.found.position == found.position
    plan = simulated.costs.best(search.found, case.held)
    assert plan == costs.best(found, case.held)
    if plan is not None:
        load = simulated.load(plan, ROOT, keys, range(len(keys)))
        assert load.places == list(case.needed(plan.position).values()) and len(waits) == 1
