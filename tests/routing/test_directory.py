"""The directory of blocks, against a dictionary of what was said."""

from __future__ import annotations

import random
from hashlib import sha256

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from foreword.errors import ConfigError
from foreword.routing.directory import NOTHING, NUM_TIERS, Directory, Tier, leading

NAMES = ("a", "b", "c")
OWN = (Tier.DEVICE, Tier.HOST, Tier.DISK)
Path = tuple[int, ...]


def keys_of(path: Path) -> list[bytes]:
    """Keys of a chain whose blocks are numbered so."""
    return [sha256(bytes(path[: i + 1])).digest() for i in range(len(path))]


def chain(number: int, length: int) -> list[bytes]:
    return [sha256(f"{number}/{i}".encode()).digest() for i in range(length)]


class Machine(RuleBasedStateMachine):
    """Chains are stored from their beginning and lose their tails, as pools do it; then the directory is exact."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Directory(100_000)
        self.held: dict[tuple[str, Tier], set[Path]] = {}

    paths = st.lists(st.integers(0, 1), min_size=1, max_size=9).map(tuple)
    holders = st.tuples(st.sampled_from(NAMES), st.sampled_from(list(Tier)))

    def owner(self, name: str, tier: Tier) -> tuple[str, Tier]:
        return ("", tier) if tier == Tier.SHARED else (name, tier)

    @rule(holder=holders, path=paths)
    def store(self, holder: tuple[str, Tier], path: Path) -> None:
        name, tier = holder
        self.directory.stored(name, tier, b"\x00" * 32, keys_of(path))
        self.held.setdefault(self.owner(name, tier), set()).update(path[: i + 1] for i in range(len(path)))

    @rule(holder=holders, path=paths)
    def remove(self, holder: tuple[str, Tier], path: Path) -> None:
        name, tier = holder
        known = self.held.get(self.owner(name, tier), set())
        gone = {one for one in known if one[: len(path)] == path}
        self.directory.removed(name, tier, [keys_of(one)[-1] for one in gone])
        known -= gone

    @rule(name=st.sampled_from(NAMES))
    def clear(self, name: str) -> None:
        self.directory.cleared(name)
        for tier in OWN:
            self.held.pop((name, tier), None)

    @rule(path=paths, name=st.sampled_from(NAMES))
    def touch(self, path: Path, name: str) -> None:
        self.directory.touched(name, keys_of(path))

    @rule(buckets=st.integers(0, 3000))
    def scrub(self, buckets: int) -> None:
        self.directory.scrub(buckets)

    @rule()
    def clear_shared(self) -> None:
        self.directory.cleared_shared()
        self.held.pop(("", Tier.SHARED), None)

    @rule(path=paths)
    def look(self, path: Path) -> None:
        found = self.directory.held(keys_of(path))
        for name in NAMES:
            assert found.of(name) == self.reach(name, path)
        assert found.of("nobody") == self.reach("nobody", path)

    def reach(self, name: str, path: Path) -> tuple[int, ...]:
        reached = []
        for deepest in Tier:
            tiers = [self.held.get(self.owner(name, tier), set()) for tier in Tier if tier <= deepest]
            ends = (i for i in range(len(path)) if not any(path[: i + 1] in held for held in tiers))
            reached.append(next(ends, len(path)))
        return tuple(reached)

    @invariant()
    def counts(self) -> None:
        for name in NAMES:
            distinct = set().union(*(self.held.get((name, tier), set()) for tier in OWN))
            assert self.directory.blocks(name) == len(distinct)
        assert self.directory.shared_blocks == len(self.held.get(("", Tier.SHARED), set()))


TestAgainstSets = Machine.TestCase
TestAgainstSets.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


@given(count=st.integers(0, 300), held=st.integers(0, 300))
def test_leading_finds_the_edge(count: int, held: int) -> None:
    """`leading` finds the first block that is not held, and never asks for one outside."""
    asked: list[int] = []

    def holds(i: int) -> bool:
        asked.append(i)
        return i < held

    assert leading(count, holds) == min(count, held)
    assert all(0 <= i < count for i in asked)
    assert len(asked) <= 20


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 400), st.lists(st.tuples(st.integers(0, 5), st.integers(1, 120)), max_size=40))
def test_never_more_than_it_may_hold(most: int, said: list[tuple[int, int]]) -> None:
    """However much is stored, the number of records stays within the budget, and the accounts are right."""
    directory = Directory(most)
    for turn, (replica, length) in enumerate(said):
        directory.stored(f"r{replica}", Tier.DEVICE, None, chain(turn, length))
        if turn % 7 == 6:
            directory.cleared(f"r{replica}")
        assert len(directory) <= most


def test_what_was_used_longest_ago_goes_first() -> None:
    """Chains that were stored or used lately are still whole after ten times the budget was stored."""
    directory = Directory(20_000)
    favourite = chain(-1, 50)
    directory.stored("a", Tier.DEVICE, None, favourite)
    for number in range(2_000):
        directory.stored("a", Tier.DEVICE, None, chain(number, 100))
        directory.touched("a", favourite)
    assert directory.held(favourite).of("a")[Tier.DEVICE] == 50
    assert directory.held(chain(1_995, 100)).of("a")[Tier.DEVICE] == 100
    assert directory.held(chain(0, 100)).of("a") == NOTHING
    assert directory.evicted > 150_000


def test_tails_go_before_heads() -> None:
    """Of a chain twice as long as the table its head stays, and of what is behind the middle little more than its end."""
    directory = Directory(4_800)
    keys = chain(0, 9_600)
    directory.stored("a", Tier.DEVICE, None, keys)
    kept = [directory.held(keys[i : i + 1]).of("a")[0] for i in range(9_600)]
    assert sum(kept[:3_000]) > 0.98 * 3_000
    assert sum(kept[6_000:9_000]) < 0.1 * 3_000


def test_one_of_two_copies_may_go() -> None:
    """A replica that tells of every copy still holds a block when one of two copies went, and no more when both did."""
    directory = Directory(1000)
    keys = chain(0, 3)
    for _ in range(2):
        directory.stored("a", Tier.DEVICE, None, keys, counted=True)
    directory.removed("a", Tier.DEVICE, keys)
    assert directory.held(keys).of("a")[Tier.DEVICE] == 3
    directory.removed("a", Tier.DEVICE, keys)
    assert directory.held(keys).of("a") == NOTHING
    assert len(directory) == 0


def test_told_twice_is_stored_once_where_copies_are_not_counted() -> None:
    """A replica that tells of keys, not of copies, may repeat itself: one removal removes."""
    directory = Directory(1000)
    keys = chain(0, 3)
    for _ in range(2):
        directory.stored("a", Tier.DEVICE, None, keys)
    directory.removed("a", Tier.DEVICE, keys)
    assert directory.held(keys).of("a") == NOTHING


def test_a_shared_store_is_within_everybodys_reach() -> None:
    """What a replica wrote into the shared store counts for all, behind what each has of its own, and outlives the writer."""
    directory = Directory(1000)
    keys = chain(0, 10)
    directory.stored("a", Tier.DEVICE, None, keys[:4])
    directory.stored("a", Tier.SHARED, None, keys)
    found = directory.held(keys)
    assert found.of("a") == (4, 4, 4, 10)
    assert found.of("b") == found.shared == (0, 0, 0, 10)
    directory.cleared("a")
    assert directory.held(keys).of("a") == (0, 0, 0, 10)


def test_tiers_follow_each_other() -> None:
    """Blocks on the device, then in host memory, then on disk make one prefix, whichever order they were told in."""
    directory = Directory(1000)
    keys = chain(0, 9)
    directory.stored("a", Tier.DISK, keys[5], keys[6:])
    directory.stored("a", Tier.DEVICE, None, keys[:3])
    directory.stored("a", Tier.HOST, keys[2], keys[3:6])
    assert directory.held(keys).of("a") == (3, 6, 9, 9)


def test_what_lies_behind_a_gap_does_not_count() -> None:
    """A has blocks 0 to 2 and 5 to 8 of nine that B has: A's prefix ends at 3."""
    directory = Directory(1000)
    keys = chain(0, 9)
    directory.stored("a", Tier.DEVICE, None, keys[:3])
    directory.stored("a", Tier.DEVICE, keys[4], keys[5:])
    directory.stored("b", Tier.DEVICE, None, keys)
    assert directory.held(keys).of("a") == (3, 3, 3, 3)
    assert directory.held(keys).of("b") == (9, 9, 9, 9)


def test_memory_of_the_gone_comes_back() -> None:
    """After a replica was cleared nothing of it is found, its blocks are scrubbed away, and it can begin anew meanwhile."""
    directory = Directory(10_000)
    keys = chain(0, 500)
    for _ in range(5):
        directory.stored("a", Tier.DEVICE, None, keys)
        directory.cleared("a")
        assert directory.held(keys).of("a") == NOTHING
    directory.stored("a", Tier.DEVICE, None, keys[:10])
    directory.scrub(100_000)
    assert len(directory) == directory.blocks("a") == 10
    assert directory.held(keys).of("a")[0] == 10


def test_a_wrong_directory_is_only_wrong() -> None:
    """Removals of what is unknown, gaps, unknown replicas and empty prompts are no errors."""
    directory = Directory(100)
    keys = chain(0, 8)
    directory.removed("a", Tier.DEVICE, keys)
    directory.cleared("a")
    directory.touched("a", keys)
    directory.stored("a", Tier.DEVICE, None, keys)
    directory.removed("a", Tier.DEVICE, keys[3:4])
    assert 0 < directory.held(keys).of("a")[0] <= 8
    assert directory.held([]).of("a") == NOTHING == (0,) * NUM_TIERS
    directory.removed("a", Tier.DEVICE, keys)
    assert len(directory) == 0


def test_same_history_same_directory() -> None:
    """Two directories that were told the same answer the same, evictions included."""

    def told() -> list[object]:
        rng, directory = random.Random(7), Directory(3_000)
        for _ in range(200):
            keys = chain(rng.randrange(60), rng.randrange(1, 100))
            directory.stored(rng.choice(NAMES), rng.choice(list(Tier)), None, keys)
        return [directory.held(chain(number, 100)) for number in range(60)]

    assert told() == told()


def test_no_room_is_an_error() -> None:
    """A directory without room is refused in words."""
    with pytest.raises(ConfigError, match="at least one block"):
        Directory(0)
