"""The fair queue, against a list."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from example_counts import examples
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from foreword.errors import ConfigError
from foreword.request_errors import QueueFull
from foreword.routing.queue import FairQueue, QueueEntry

TENANTS = ("a", "b", "c", "d")
WEIGHTS = {"a": 1.0, "b": 2.0, "c": 0.5}
ROOM = 12


class Machine(RuleBasedStateMachine):
    """Nothing is lost or returned twice, each tenant is served in order, the earliest start goes first."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: FairQueue[int] = FairQueue(ROOM, WEIGHTS)
        self.inside: list[QueueEntry[int]] = []
        self.number = 0

    @rule(tenant=st.sampled_from(TENANTS), cost=st.integers(0, 20))
    def push(self, tenant: str, cost: int) -> None:
        self.number += 1
        held = Counter(entry.tenant for entry in self.inside)
        try:
            entry, displaced = self.queue.push(self.number, tenant, cost, 0.0)
        except QueueFull:
            assert len(self.inside) == ROOM
            share = (held[tenant] + 1) / WEIGHTS.get(tenant, 1.0)
            assert all(share >= held[name] / WEIGHTS.get(name, 1.0) for name in held)
            return
        assert (displaced is None) == (len(self.inside) < ROOM)
        if displaced is not None:
            assert displaced.tenant != tenant
            assert displaced is [one for one in self.inside if one.tenant == displaced.tenant][-1]
            self.inside.remove(displaced)
        self.inside.append(entry)

    @rule()
    def pop(self) -> None:
        entry = self.queue.pop(0.0)
        if entry is None:
            assert not self.inside
            return
        heads = [next(one for one in self.inside if one.tenant == name) for name in {one.tenant for one in self.inside}]
        assert entry in heads
        assert entry.start == min(one.start for one in heads)
        self.inside.remove(entry)

    @rule(choice=st.randoms(use_true_random=False))
    def give_up(self, choice: random.Random) -> None:
        if self.inside:
            entry = choice.choice(self.inside)
            assert self.queue.remove(entry)
            assert not self.queue.remove(entry)
            self.inside.remove(entry)

    @invariant()
    def accounts(self) -> None:
        assert len(self.queue) == len(self.inside) <= ROOM
        held = Counter(entry.tenant for entry in self.inside)
        assert all(self.queue.queued(name) == held[name] for name in TENANTS)
        assert 1 <= self.queue.retry_after(0.0) <= 60


TestAgainstList = Machine.TestCase
TestAgainstList.settings = settings(
    max_examples=examples(80), stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_shares_follow_the_weights() -> None:
    """Under load, tenants are served in proportion to their weights, whatever each request costs."""
    queue: FairQueue[None] = FairQueue(10_000, {"heavy": 3.0, "light": 1.0})
    rng = random.Random(3)
    for _ in range(2000):
        queue.push(None, "heavy", rng.uniform(1, 50), 0.0)
        queue.push(None, "light", rng.uniform(1, 10), 0.0)
    served = dict.fromkeys(("heavy", "light"), 0.0)
    for _ in range(1000):
        entry = queue.pop(0.0)
        assert entry is not None
        served[entry.tenant] += entry.cost
    assert served["heavy"] / served["light"] == pytest.approx(3.0, rel=0.05)


def test_a_flood_does_not_delay_others() -> None:
    """A tenant with one request waits for one request of the flooding tenant, not for five hundred."""
    queue: FairQueue[int] = FairQueue()
    for number in range(500):
        queue.push(number, "flood", 10, 0.0)
    for _ in range(100):
        queue.pop(0.0)
    queue.push(-1, "quiet", 10, 0.0)
    assert -1 in [entry.item for entry in (queue.pop(0.0), queue.pop(0.0)) if entry is not None]


def test_a_flood_does_not_shut_out_others() -> None:
    """In a full queue the tenant with the most entries loses its newest one; its own new request is refused with a
    time to retry."""
    queue: FairQueue[int] = FairQueue(10)
    for number in range(10):
        queue.push(number, "flood", 1, 0.0)
    with pytest.raises(QueueFull, match=r"10 requests are queued already; try again in \d+ s"):
        queue.push(10, "flood", 1, 0.0)
    _, displaced = queue.push(11, "quiet", 1, 0.0)
    assert displaced is not None and displaced.item == 9
    assert (queue.queued("flood"), queue.queued("quiet")) == (9, 1)


def test_idle_time_earns_no_credit() -> None:
    """A tenant that returns does not get what it did not use before."""
    queue: FairQueue[str] = FairQueue()
    queue.push("early", "b", 1, 0.0)
    for _ in range(50):
        queue.push("a", "a", 1, 0.0)
    for _ in range(30):
        queue.pop(0.0)
    for _ in range(20):
        queue.push("b", "b", 1, 0.0)
    served = Counter(entry.item for entry in (queue.pop(0.0) for _ in range(20)) if entry is not None)
    assert 9 <= served["a"] <= 11


def test_retry_after_follows_the_service_rate() -> None:
    """Ten units are served per second and 200 are queued: half of them take ten seconds."""
    queue: FairQueue[int] = FairQueue()
    for number in range(1200):
        if number < 1024:
            queue.push(number, "a", 1, 0.0)
    for step in range(600):
        queue.pop(step / 10)
        if len(queue) < 400:
            queue.push(-1, "a", 1, step / 10)
    assert queue.retry_after(60.0) == pytest.approx(len(queue) / 2 / 10, rel=0.1)


def test_memory_stays_bounded_when_entries_are_removed() -> None:
    """Thousands of tenants that come and leave leave nothing behind."""
    queue: FairQueue[int] = FairQueue(4)
    queue.push(0, "stays", 1, 0.0)
    for number in range(20_000):
        entry, _ = queue.push(number, f"tenant-{number}", 1, 0.0)
        queue.remove(entry)
    assert len(queue) == 1
    assert len(queue._tenants) == 1


def test_wrong_settings_are_refused() -> None:
    """A length below 1 and invalid weights are refused with a message."""
    with pytest.raises(ConfigError, match="at least 1"):
        FairQueue(0)
    with pytest.raises(ConfigError, match="weight of tenant 'a'"):
        FairQueue(1, {"a": 0.0})
