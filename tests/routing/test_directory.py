"""The block directory, against dictionaries of sets."""

from __future__ import annotations

import random
import tracemalloc
from hashlib import sha256
from typing import Any

import pytest
from example_counts import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from foreword.errors import ConfigError
from foreword.routing.directory import NOTHING, NUM_TIERS, CacheTier, Directory, leading

NAMES = ("a", "b", "c")
OWN = (CacheTier.DEVICE, CacheTier.HOST, CacheTier.DISK)
Path = tuple[int, ...]


def keys_of(path: Path) -> list[bytes]:
    """Keys of a chain of numbered blocks."""
    return [sha256(bytes(path[: i + 1])).digest() for i in range(len(path))]


def chain(number: int, length: int) -> list[bytes]:
    return [sha256(f"{number}/{i}".encode()).digest() for i in range(length)]


class Machine(RuleBasedStateMachine):
    """Chains are stored from their start and removed from their end, as block pools do; then the directory is
    exact."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Directory(100_000)
        self.held: dict[tuple[str, CacheTier], set[Path]] = {}

    paths = st.lists(st.integers(0, 1), min_size=1, max_size=9).map(tuple)
    holders = st.tuples(st.sampled_from(NAMES), st.sampled_from(list(CacheTier)))

    def owner(self, name: str, tier: CacheTier) -> tuple[str, CacheTier]:
        return ("", tier) if tier == CacheTier.SHARED else (name, tier)

    @rule(holder=holders, path=paths)
    def store(self, holder: tuple[str, CacheTier], path: Path) -> None:
        name, tier = holder
        self.directory.stored(name, tier, b"\x00" * 32, keys_of(path))
        self.held.setdefault(self.owner(name, tier), set()).update(path[: i + 1] for i in range(len(path)))

    @rule(holder=holders, path=paths)
    def remove(self, holder: tuple[str, CacheTier], path: Path) -> None:
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

    @rule(path=paths)
    def look(self, path: Path) -> None:
        found = self.directory.lookup(keys_of(path))
        for name in NAMES:
            assert found.of(name) == self.reach(name, path)
        assert found.of("another") == self.reach("another", path)

    def reach(self, name: str, path: Path) -> tuple[int, ...]:
        reached = []
        for deepest in CacheTier:
            tiers = [self.held.get(self.owner(name, tier), set()) for tier in CacheTier if tier <= deepest]
            ends = (i for i in range(len(path)) if not any(path[: i + 1] in held for held in tiers))
            reached.append(next(ends, len(path)))
        return tuple(reached)

    @invariant()
    def counts(self) -> None:
        for name in NAMES:
            distinct = set().union(*(self.held.get((name, tier), set()) for tier in OWN))
            assert self.directory.blocks(name) == len(distinct)


TestAgainstSets = Machine.TestCase
TestAgainstSets.settings = settings(
    max_examples=examples(60), stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


@given(count=st.integers(0, 300), held=st.integers(0, 300))
def test_leading_finds_the_edge(count: int, held: int) -> None:
    """`leading` finds the first block that is not held, in few probes."""
    asked: list[bytes] = []

    class Held:
        def __contains__(self, key: object) -> bool:
            assert isinstance(key, bytes)
            asked.append(key)
            return int.from_bytes(key) < held

    keys = [i.to_bytes(2) for i in range(count)]
    assert leading(keys, Held()) == min(count, held)
    assert len(asked) <= 20


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 400), st.lists(st.tuples(st.integers(0, 5), st.integers(1, 120)), max_size=40))
def test_the_number_of_records_is_bounded(most: int, said: list[tuple[int, int]]) -> None:
    """However much is stored, the number of records stays within the budget."""
    directory = Directory(most)
    for turn, (replica, length) in enumerate(said):
        directory.stored(f"r{replica}", CacheTier.DEVICE, None, chain(turn, length))
        if turn % 7 == 6:
            directory.cleared(f"r{replica}")
        assert len(directory) <= most


def test_least_recently_used_chains_are_evicted() -> None:
    """Chains that were stored or used recently are complete after ten times the budget was stored."""
    directory = Directory(4_000)
    favourite = chain(-1, 50)
    directory.stored("a", CacheTier.DEVICE, None, favourite)
    for number in range(400):
        directory.stored("a", CacheTier.DEVICE, None, chain(number, 100))
        directory.touched("a", favourite)
    assert directory.lookup(favourite).of("a")[CacheTier.DEVICE] == 50
    assert directory.lookup(chain(395, 100)).of("a")[CacheTier.DEVICE] == 100
    assert directory.lookup(chain(0, 100)).of("a") == NOTHING
    assert directory.evicted > 30_000


def test_every_replica_of_a_large_fleet_holds_a_common_block() -> None:
    """A system prompt is known at each of 300 replicas, beside a chain of its own; a full directory forgets chains first."""
    directory = Directory(40_000)
    common = chain(0, 2)
    for number in range(300):
        directory.stored(f"r{number}", CacheTier.DEVICE, b"\x00" * 32, common)
        directory.stored(f"r{number}", CacheTier.DEVICE, common[-1], chain(1 + number, 60))
    for number in range(300):
        held = directory.lookup([*common, *chain(1 + number, 60)])
        assert held.of(f"r{number}")[CacheTier.DEVICE] > 50 and len(held.replicas) == 300
    assert len(directory) < 40_000


def test_the_end_of_a_chain_is_evicted_first() -> None:
    """The first blocks of a chain twice as long as the table stay, and most of the later ones go."""
    directory = Directory(4_800)
    keys = chain(0, 9_600)
    directory.stored("a", CacheTier.DEVICE, None, keys)
    kept = [directory.lookup(keys[i : i + 1]).of("a")[0] for i in range(9_600)]
    assert sum(kept[:3_000]) > 0.98 * 3_000
    assert sum(kept[6_000:9_000]) < 0.1 * 3_000


def test_two_copies_of_a_block_are_counted() -> None:
    """A replica that reports every copy still holds a block when one of two copies is removed, and not when both
    are."""
    directory = Directory(1000)
    keys = chain(0, 3)
    for _ in range(2):
        directory.stored("a", CacheTier.DEVICE, None, keys, counted=True)
    directory.removed("a", CacheTier.DEVICE, keys)
    assert directory.lookup(keys).of("a")[CacheTier.DEVICE] == 3
    directory.removed("a", CacheTier.DEVICE, keys)
    assert directory.lookup(keys).of("a") == NOTHING
    assert len(directory) == 0


def test_repeated_events_without_copy_counting() -> None:
    """For a replica that reports keys and not copies, one removal removes a block that was reported twice."""
    directory = Directory(1000)
    keys = chain(0, 3)
    for _ in range(2):
        directory.stored("a", CacheTier.DEVICE, None, keys)
    directory.removed("a", CacheTier.DEVICE, keys)
    assert directory.lookup(keys).of("a") == NOTHING


def test_the_shared_tier_counts_for_all_replicas() -> None:
    """Blocks that one replica wrote to the shared store count for all replicas, and remain when the writer is
    removed."""
    directory = Directory(1000)
    keys = chain(0, 10)
    directory.stored("a", CacheTier.DEVICE, None, keys[:4])
    directory.stored("a", CacheTier.SHARED, None, keys)
    found = directory.lookup(keys)
    assert found.of("a") == (4, 4, 4, 10)
    assert found.of("b") == found.shared == (0, 0, 0, 10)
    directory.cleared("a")
    assert directory.lookup(keys).of("a") == (0, 0, 0, 10)


def test_tiers_combine_to_one_prefix() -> None:
    """Blocks on the device, then in host memory, then on disk form one prefix, in whatever order they were
    reported."""
    directory = Directory(1000)
    keys = chain(0, 9)
    directory.stored("a", CacheTier.DISK, keys[5], keys[6:])
    directory.stored("a", CacheTier.DEVICE, None, keys[:3])
    directory.stored("a", CacheTier.HOST, keys[2], keys[3:6])
    assert directory.lookup(keys).of("a") == (3, 6, 9, 9)


def test_a_prefix_ends_at_a_gap() -> None:
    """A has blocks 0 to 2 and 5 to 8 of the nine that B has: A's prefix ends at 3."""
    directory = Directory(1000)
    keys = chain(0, 9)
    directory.stored("a", CacheTier.DEVICE, None, keys[:3])
    directory.stored("a", CacheTier.DEVICE, keys[4], keys[5:])
    directory.stored("b", CacheTier.DEVICE, None, keys)
    assert directory.lookup(keys).of("a") == (3, 3, 3, 3)
    assert directory.lookup(keys).of("b") == (9, 9, 9, 9)


def test_memory_of_removed_replicas_is_freed() -> None:
    """A cleared replica holds nothing, its records are scrubbed, and it can be filled again meanwhile."""
    directory = Directory(10_000)
    keys = chain(0, 500)
    for _ in range(5):
        directory.stored("a", CacheTier.DEVICE, None, keys)
        directory.cleared("a")
        assert directory.lookup(keys).of("a") == NOTHING
    directory.stored("a", CacheTier.DEVICE, None, keys[:10])
    directory.scrub(100_000)
    assert len(directory) == directory.blocks("a") == 10
    assert directory.lookup(keys).of("a")[0] == 10


@pytest.mark.extended
@pytest.mark.parametrize("how", ["removed", "cleared"])
def test_blocks_that_have_left_take_no_memory(how: str) -> None:
    """The memory of a table follows the blocks that replicas hold, not those that they have held since it began."""
    directory = Directory(48 * 20_000)
    tracemalloc.start()
    try:
        sizes = []
        for number in range(24):
            keys = chain(1000 * number, 500)
            directory.stored("a", CacheTier.DEVICE, None, keys)
            if how == "removed":
                directory.removed("a", CacheTier.DEVICE, keys)
            else:
                directory.cleared("a")
                directory.scrub(20_000)
            del keys
            sizes.append(tracemalloc.get_traced_memory()[0])
        assert sizes[-1] - sizes[3] < 100_000, "12,000 blocks have left 90 bytes each"
    finally:
        tracemalloc.stop()


def test_inconsistent_events_are_no_errors() -> None:
    """Removals of unknown blocks, gaps, unknown replicas and empty prompts are accepted."""
    directory = Directory(100)
    keys = chain(0, 8)
    directory.removed("a", CacheTier.DEVICE, keys)
    directory.cleared("a")
    directory.touched("a", keys)
    directory.stored("a", CacheTier.DEVICE, None, keys)
    directory.removed("a", CacheTier.DEVICE, keys[3:4])
    assert 0 < directory.lookup(keys).of("a")[0] <= 8
    assert directory.lookup([]).of("a") == NOTHING == (0,) * NUM_TIERS
    directory.removed("a", CacheTier.DEVICE, keys)
    assert len(directory) == 0


class Counted(list[bytes]):
    """Keys that count how often they are read."""

    reads = 0

    def __getitem__(self, index: Any) -> Any:
        self.reads += 1
        return super().__getitem__(index)


def test_a_lookup_is_bounded_where_many_replicas_hold_prefixes_of_many_lengths() -> None:
    """A lookup of 2,000 blocks, of which 40 replicas hold parts of 40 lengths, reads few of them, finds the longest exactly,
    and finds of the others at most what they hold and less by at most a sixteenth of the prompt."""
    directory, rng = Directory(200_000), random.Random(3)
    # Each key has its own bucket, so that none is evicted.
    keys = Counted([key[:5] + i.to_bytes(4, "little") + key[9:] for i, key in enumerate(chain(0, 2000))])
    lengths = {f"r{number}": length for number, length in enumerate(rng.sample(range(1, 2000), 40))}
    for name, length in lengths.items():
        directory.stored(name, CacheTier.DEVICE, None, keys[:length])
    keys.reads = 0
    found = directory.lookup(keys)
    assert keys.reads < 300
    for name, length in lengths.items():
        assert length - 2000 // 16 <= found.of(name)[CacheTier.DEVICE] <= length
    longest = sorted(lengths, key=lengths.__getitem__)[-8:]
    assert [found.of(name)[CacheTier.DEVICE] for name in longest] == [lengths[name] for name in longest]


def test_the_directory_is_deterministic() -> None:
    """Two directories with the same updates answer alike, including evictions."""

    def history() -> list[object]:
        rng, directory = random.Random(7), Directory(3_000)
        for _ in range(200):
            keys = chain(rng.randrange(60), rng.randrange(1, 100))
            directory.stored(rng.choice(NAMES), rng.choice(list(CacheTier)), None, keys)
        return [directory.lookup(chain(number, 100)) for number in range(60)]

    assert history() == history()


def test_no_capacity_is_an_error() -> None:
    """A directory without capacity is refused with a message."""
    with pytest.raises(ConfigError, match="at least one block"):
        Directory(0)


@pytest.mark.parametrize("seed", range(6))
def test_holders_of_a_common_prefix_stay_known(seed: int) -> None:
    """Holders of a prefix that most of 150 replicas hold are named by lookups between any changes, with how much each holds."""
    rng, directory = random.Random(seed), Directory()
    keys = [rng.randbytes(32) for _ in range(12)]
    held: dict[str, int] = {}
    for _ in range(900):
        name = f"replica-{rng.randrange(150)}"
        action = rng.random()
        if action < 0.7:
            held[name] = max(rng.choice((4, 12)), held.get(name, 0))
            directory.stored(name, CacheTier.DEVICE, None, keys[: held[name]])
        elif action < 0.9 and held.get(name):
            directory.removed(name, CacheTier.DEVICE, keys[4 if held[name] > 4 else 0 : held[name]])
            held[name] -= 8 if held[name] > 4 else 4
        else:
            directory.cleared(name)
            held.pop(name, None)
        directory.touched(name, keys)
        if rng.random() < 0.1:
            directory.scrub(rng.randrange(1 << 16))
        if rng.random() < 0.5:
            found = directory.lookup([*keys, rng.randbytes(32)]).replicas
            assert {one: reach[CacheTier.DEVICE] for one, reach in found.items()} == {
                one: blocks for one, blocks in held.items() if blocks
            }
