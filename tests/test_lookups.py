"""Lookups of requests: each ends with one counted outcome, whatever the tiers do, and waits only as long as that can pay."""

from __future__ import annotations

import itertools
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from example_counts import represented
from servers import RedisServer, wait_until

from foreword.blocks.keys import chain_keys
from foreword.blocks.layout import LayerLayout, Layout
from foreword.blocks.resume import GroupKind, KVGroup
from foreword.conformance import FlakyStore, soon
from foreword.errors import StoreConfigError, StoreFull, StoreReadOnly
from foreword.offload.lookups import StoreLookups, StoreSearch
from foreword.offload.search import StoredGroup
from foreword.store.base import Name, Store
from foreword.store.disk.disk_store import DiskStore
from foreword.store.frame import RAW, Frame, Header, frame
from foreword.store.memory.memory_store import MemoryStore
from foreword.store.redis.redis_store import RedisStore
from foreword.store.tier import StoreTier
from foreword.store.tier_counters import LookupOutcome, TierState
from foreword.store.tiered import TieredStore, TierSearch
from foreword.store.urls import open_store

PATIENCE = 60.0
LAYOUT = Layout(b"m" * 32, 16, (LayerLayout(1, 8, 8),), "float32")
ROOT = b"r" * 32
FULL = StoredGroup(KVGroup(GroupKind.FULL, 16), (LAYOUT.fingerprint,))
FOUND, ABSENT, TIMED_OUT, TIER_OFF, NOT_ALLOWED, TOO_SMALL = LookupOutcome


def keys_of(chain: int, blocks: int) -> list[bytes]:
    return chain_keys(ROOT, [chain] * 16 * blocks, 16)


def frames_of(chain: int, blocks: int) -> list[Frame]:
    size, parent, made = LAYOUT.block_bytes, ROOT, []
    for depth, key in enumerate(keys_of(chain, blocks)):
        header = Header(LAYOUT.fingerprint, ROOT[:16], key, parent, depth, RAW, size, size)
        made.append(frame(header, bytes(size)))
        parent = key
    return made


class Requests:
    """Lookups of chains of four blocks in a tiered store."""

    def __init__(self, store: TieredStore, lookup_timeout: float = PATIENCE) -> None:
        self.store = store
        self.rate = 0.0
        self.lookups = StoreLookups(store, lookup_timeout, PATIENCE, lambda: self.rate)
        self.started = 0

    def start(self, chain: int) -> StoreSearch:
        self.started += 1
        return self.lookups.search([FULL], ROOT, keys_of(chain, 4), 0, 64)

    def ask(self, chain: int) -> int:
        """Look up a chain, and wait for the end. Returns the tokens found."""
        load = self.start(chain)
        wait_until(lambda: load.answered, "the end of the lookup")
        return 0 if load.found is None else load.found.position

    @property
    def outcomes(self) -> dict[LookupOutcome, int]:
        return {one: count for one, count in self.lookups.counts().lookups.items() if count}

    def check_sums(self) -> None:
        """Every lookup has one outcome, and every token that was looked up was found or has a reason."""
        counts = self.lookups.counts()
        assert sum(counts.lookups.values()) == self.started
        assert sum(counts.tokens.values()) == 64 * self.started


@pytest.fixture
def over() -> Iterator[Callable[..., Requests]]:
    """Makes requests over stores, and closes everything in the end."""
    made: list[Requests] = []

    def make(*stores: Store, lookup_timeout: float = PATIENCE) -> Requests:
        made.append(Requests(TieredStore(stores), lookup_timeout))
        return made[-1]

    yield make
    for one in made:
        one.lookups.close()
        one.store.close()


@contextmanager
def counted_calls() -> Iterator[dict[str, int]]:
    """Counts how often each tier is to look something up, by its label."""
    calls: dict[str, int] = {}
    with pytest.MonkeyPatch.context() as patch:
        for name in ("lookup", "present"):
            whole = getattr(StoreTier, name)

            def call(tier: StoreTier, *args: Any, whole: Any = whole) -> Any:
                calls[tier.label] = calls.get(tier.label, 0) + 1
                return whole(tier, *args)

            patch.setattr(StoreTier, name, call)
        yield calls


@pytest.mark.parametrize("seed", represented(range(12), *range(4)))
def test_outcomes_add_up_under_faults(over: Callable[..., Requests], seed: int) -> None:
    """Tiers fail, hang until the deadline, never return, are late, lose nodes, are suspended and come back, in random order;
    requests come together and alone. The outcomes of each tier add up to its lookups, those of requests to the requests, and
    the tokens to those that were looked up."""
    draw = random.Random(seed)
    memory = MemoryStore(1 << 20, label="memory")
    flaky = [FlakyStore(MemoryStore(1 << 20, label=label), seed=seed) for label in ("near", "far")]
    flaky[0].local = draw.random() < 0.5
    for store, chain in itertools.product((memory, *(one.inner for one in flaky)), range(6)):
        if draw.random() < 0.4:
            store.put(frames_of(chain, draw.randint(1, 4)), deadline=soon())
    with counted_calls() as calls:
        requests = over(memory, *flaky, lookup_timeout=0.004)
        for _ in range(30):
            victim, tier = draw.choice([*zip(flaky, requests.store.tiers[1:], strict=True)])
            for action in draw.sample(["fail", "hang", "stick", "release", "delay", "nodes", "suspend", "rate"], 2):
                if action in ("fail", "hang"):
                    victim.inject("fail" if action == "fail" else "hang", draw.choice((0.0, 0.0, 0.5, 1.0)))
                elif action == "stick":
                    victim.stick()
                elif action == "release":
                    victim.release()
                elif action == "delay":
                    victim.delay(draw.choice((0.0, 0.002)))
                elif action == "nodes":
                    victim.lose_nodes(draw.choice((0.0, 0.3)))
                elif action == "suspend":
                    tier.suspended = draw.random() < 0.3
                else:
                    requests.rate = draw.choice((0.0, 1e3, 1e6))
            for load in [requests.start(draw.randrange(8)) for _ in range(draw.choice((1, 1, 6)))]:
                wait_until(lambda load=load: load.answered, "the end of the lookup")  # type: ignore[misc]
        for one in flaky:
            one.release()
        requests.lookups.close()
        requests.check_sums()
        for tier in requests.store.tiers:
            wait_until(
                lambda tier=tier: sum(tier.counters.lookups.values()) == calls.get(tier.label, 0),  # type: ignore[misc]
                f"an outcome of each lookup in {tier.label}",
            )


def test_found_and_absent(over: Callable[..., Requests]) -> None:
    """Blocks that are found count as found, also where the rest is absent; the tokens tell both."""
    store = MemoryStore(1 << 20)
    store.put(frames_of(1, 4), deadline=soon())
    store.put(frames_of(2, 1), deadline=soon())
    requests = over(store)
    assert [requests.ask(chain) for chain in (1, 2, 3)] == [64, 16, 0]
    assert requests.outcomes == {FOUND: 2, ABSENT: 1}
    assert requests.lookups.counts().tokens == {FOUND: 80, ABSENT: 112}
    requests.check_sums()


@pytest.mark.parametrize("others", [False, True])
def test_lookups_of_mixed_traffic_end_on_the_asking_thread(
    over: Callable[..., Requests], tmp_path: Path, others: bool
) -> None:
    """Chains are new, in memory, on disk, in both in part, and stored and evicted meanwhile: the thread that asks has the
    answer of at least 95 % of its lookups when the call returns, and each finds all that is there. Where another store object
    adds blocks to the folder now and then, those are found too, and 90 % of the lookups end on the thread that asks."""
    draw = random.Random(59)
    memory, disk = MemoryStore(16 * 700, slot_bytes=700), DiskStore(tmp_path / "kv", 1 << 20)
    other = DiskStore(tmp_path / "kv", 1 << 20)
    requests, inline = over(memory, disk), 0
    for step in range(400):
        frames = frames_of(draw.randrange(60), 4)
        if draw.random() < 0.3:
            memory.put(frames[: draw.randint(1, 4)], deadline=soon())
        if draw.random() < 0.1:
            disk.put(frames[: draw.randint(1, 4)], deadline=soon())
        if others and step % 40 == 0:
            other.put(frames, deadline=soon())
        asked = draw.randrange(60)
        names = [one.name for one in frames_of(asked, 4)]
        there = [
            any(found) for found in zip(*(one.present(names, deadline=soon()) for one in (memory, other)), strict=True)
        ]
        load = requests.start(asked)
        inline += load.found is not None
        wait_until(lambda load=load: load.answered, "the end of the lookup")  # type: ignore[misc]
        assert load.found is not None and load.found.position == 16 * [*there, False].index(False)
    counts = requests.lookups.counts()
    assert sum(counts.lookups.values()) == 400 and counts.inline >= (360 if others else 380) and inline >= counts.inline
    requests.check_sums()
    other.close()


def test_a_hung_remote_tier_takes_nothing_from_a_local_one(over: Callable[..., Requests]) -> None:
    """While a remote tier does not return, what a local one has is found. The remote one has timed out, then it is off."""
    remote, local = FlakyStore(MemoryStore(1 << 20, label="remote")), FlakyStore(MemoryStore(1 << 20, label="local"))
    local.local = True
    for store in (remote, local):
        store.inner.put(frames_of(1, 4), deadline=soon())
    local.inner.put(frames_of(2, 2), deadline=soon())
    requests = over(remote, local, lookup_timeout=0.02)
    requests.rate = 8.0  # computing would take 8 s
    remote.stick()
    assert [requests.ask(chain) for chain in (1, 2, 1, 3)] == [64, 32, 64, 0]
    remote.release()
    assert requests.outcomes == {FOUND: 3, TIER_OFF: 1}
    far = requests.store.tiers[0].counters.lookups
    assert far[TIMED_OUT] == 1 and far[TIER_OFF] >= 3 and not far[FOUND]
    assert not requests.store.tiers[1].counters.errors
    assert requests.lookups.counts().tokens[TIER_OFF] >= 64, "of those that were not found"
    requests.check_sums()


class Timed(FlakyStore):
    """Notes how much time each lookup has, and can take some."""

    def __init__(self, label: str, *, local: bool) -> None:
        super().__init__(MemoryStore(1 << 20, label=label))
        self.local = local
        self.given: list[float] = []
        self.takes = 0.0

    def lookup(self, names: Sequence[Name], *, deadline: float) -> int:
        self.given.append(deadline - time.monotonic())
        time.sleep(self.takes)
        return super().lookup(names, deadline=deadline)


@pytest.mark.parametrize("first_is_local", [True, False])
def test_local_and_remote_tiers_have_limits_of_their_own(first_is_local: bool) -> None:
    """A tier that takes more than the whole limit of the other kind leaves that kind its limit. Two of one kind share."""
    first, second, third = (
        Timed(label, local=local == first_is_local) for label, local in (("a", True), ("b", False), ("c", False))
    )
    first.takes = 1.2
    limits = {first_is_local: 40.0, not first_is_local: 1.0}
    store = TieredStore([first, second, third])
    search = TierSearch(soon(PATIENCE), limits[True], limits[False])
    assert store.locate([one.name for one in frames_of(1, 2)], search=search) == []
    store.close()
    assert 1.0 < first.given[0] <= 40.0
    assert 0.0 < second.given[0] <= 0.5, "half of it"


def test_a_busy_machine_is_waited_for(over: Callable[..., Requests]) -> None:
    """A local tier that answers late, as on a busy machine, is waited for: the first lookups of a process and those of prompts
    that take long to compute. What its limit does not allow has timed out."""
    disk, never = FlakyStore(MemoryStore(1 << 20, label="disk")), threading.Event()
    disk.local = True
    disk.inner.put(frames_of(1, 4), deadline=soon())
    requests = over(disk, lookup_timeout=0.25)
    disk.stick()
    load = requests.start(1)
    assert not never.wait(0.5) and not load.answered, "lookup_timeout has passed"
    disk.release()
    wait_until(lambda: load.answered, "the end of the lookup")
    assert load.found is not None and load.found.position == 64
    assert requests.outcomes == {FOUND: 1}


def test_a_result_that_comes_too_late_is_not_used(over: Callable[..., Requests]) -> None:
    """A request that has stopped waiting counts as timed out, once, and gets nothing of what is found afterwards."""
    store = FlakyStore(MemoryStore(1 << 20))
    store.inner.put(frames_of(1, 4), deadline=soon())
    requests = over(store)
    store.stick()
    load = requests.start(1)
    load.deadline = 0.0
    assert load.answered and load.found is None
    assert requests.outcomes == {TIMED_OUT: 1}
    store.release()
    wait_until(lambda: requests.store.tiers[0].counters.lookups[FOUND] > 0, "the end of the search")
    assert requests.ask(1) == 64
    assert load.found is None
    assert requests.outcomes == {TIMED_OUT: 1, FOUND: 1}
    requests.check_sums()


def test_what_is_not_looked_up_is_counted(over: Callable[..., Requests]) -> None:
    """Requests that may not load, prompts shorter than a block, and a tier that an audit has suspended."""
    store = MemoryStore(1 << 20)
    store.put(frames_of(1, 4), deadline=soon())
    requests = over(store)
    requests.lookups.refuse(NOT_ALLOWED, 100)
    requests.lookups.refuse(TOO_SMALL, 7)
    requests.store.tiers[0].suspended = True
    assert requests.ask(1) == 0
    assert requests.outcomes == {NOT_ALLOWED: 2, TOO_SMALL: 1}
    assert requests.lookups.counts().tokens[NOT_ALLOWED] == 164
    assert requests.store.tiers[0].counters.lookups == {NOT_ALLOWED: 1}
    assert requests.store.tiers[0].state is TierState.SUSPENDED


@pytest.mark.parametrize(
    ("error", "state", "began"),
    [
        (StoreFull, TierState.FULL, "is full: no room"),
        (StoreReadOnly, TierState.READ_ONLY, "takes no blocks now: no room"),
    ],
)
def test_a_tier_that_takes_no_blocks_is_still_read(
    caplog: pytest.LogCaptureFixture, error: type[StoreFull], state: TierState, began: str
) -> None:
    """A full or read-only store is not switched off: it is read. Its state says what it is, and the log when it began and when
    it ended, once each."""
    caplog.set_level("INFO", "foreword.store")
    flaky, kept, more = FlakyStore(MemoryStore(1 << 20)), frames_of(1, 2), frames_of(2, 2)
    store = TieredStore([flaky])
    [tier] = store.tiers
    assert store.put(kept, deadline=soon()) == 2 and tier.state is TierState.OK
    flaky.fail_next(5, lambda: error("no room"))
    for _ in range(5):
        assert store.put(more, deadline=soon()) == 0
        assert tier.state is state
    assert store.locate([one.name for one in kept], deadline=soon()) == [0, 0]
    assert not tier.breaker.is_open and sum(tier.counters.errors.values()) == 5
    assert store.put(more, deadline=soon()) == 2 and tier.state is TierState.OK
    label = tier.label
    assert [(one.levelno, one.message) for one in caplog.records] == [
        (logging.WARNING, f"tier {label} {began}"),
        (logging.INFO, f"tier {label} takes blocks again"),
    ]
    store.close()


def test_a_store_smaller_than_a_block_is_refused(tmp_path: Path) -> None:
    """A store that has no room for one block is an error that says how much it needs. Tools, which know no block, open it."""
    for url in ("memory://?size=1KiB", f"disk://{tmp_path}/kv?size=1KiB"):
        with pytest.raises(StoreConfigError, match=r"has 1,024 bytes, and a block of this model takes 1,\d\d\d"):
            open_store([url], LAYOUT)
        open_store([url]).close()
        open_store([url.replace("1KiB", "2KiB")], LAYOUT).close()


# Real Redis


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path / "redis")
    yield server
    server.kill()


@pytest.mark.parametrize("how", ["killed", "hung", "slow"])
def test_what_an_operator_sees_of_a_failing_redis(
    over: Callable[..., Requests], redis: RedisServer, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    """Redis is killed, hangs or is slow: a line when it begins and one when it ends, a state, and outcomes that add up. Memory
    before it is found all the time."""
    caplog.set_level("INFO", "foreword.store")
    memory, store = MemoryStore(1 << 20), FlakyStore(RedisStore(redis.url))
    memory.put(frames_of(1, 4), deadline=soon())
    requests = over(memory, store, lookup_timeout=0.05)
    [_, tier] = requests.store.tiers
    assert tier.put(frames_of(2, 4), soon()) == 4

    def ask(seen: Callable[[], bool], name: str) -> None:
        def look() -> bool:
            assert requests.ask(1) == 64
            requests.ask(2)
            return seen()

        wait_until(look, name)

    ask(lambda: requests.ask(2) == 64, "a healthy Redis")
    if how == "hung":
        with redis.stopped():
            ask(lambda: tier.state is TierState.OFF, "the tier is off")
    elif how == "killed":
        redis.kill()
        ask(lambda: tier.state is TierState.OFF, "the tier is off")
        redis.start()
    else:
        store.delay(PATIENCE)
        ask(lambda: tier.state is TierState.OFF, "the tier is off")
        store.delay(0.0)
    ask(lambda: tier.state is TierState.OK, "the tier is used again")
    began, ended = [one for one in caplog.records if "tier" in one.message][:2]
    assert began.levelno == logging.WARNING and "tier redis is not used for now" in began.message
    assert ended.levelno == logging.INFO and ended.message == "tier redis works again"
    outcomes = requests.outcomes
    assert outcomes[FOUND] and outcomes.get(TIMED_OUT, 0) + outcomes[TIER_OFF] > 0
    requests.check_sums()


def test_a_thread_that_fails_ends_its_lookup() -> None:
    """An error at the end of a lookup's thread ends the lookup, with nothing found: no request waits for its time limit."""
    fails = threading.Event()

    def profile(frame: FrameType, event: str, called: Any) -> None:
        if event == "call" and frame.f_code.co_name == "end" and not fails.is_set():
            fails.set()
            raise MemoryError("planted")

    store = TieredStore([FlakyStore(MemoryStore(1 << 20))])
    threading.setprofile(profile)
    try:
        requests = Requests(store, 10 * PATIENCE)
        assert requests.ask(1) == 0 and fails.is_set()
    finally:
        threading.setprofile(None)
    assert requests.outcomes == {TIER_OFF: 1}
    store.close()
