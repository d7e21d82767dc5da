"""Placement in large fleets: a bounded number of replicas is priced, and the decision is about as good as with all priced."""

from __future__ import annotations

import copy
import heapq
import random

import pytest
from example_counts import represented

from foreword.blocks.keys import Scope, chain_keys
from foreword.routing.costs import ReplicaCosts
from foreword.routing.directory import CacheTier
from foreword.routing.fleet import Fleet
from foreword.routing.placement import Decision, PlacementQuery
from foreword.routing.shortlist import MAX_PRICED, SentPrefixes

BLOCK = 16
ROOT = Scope(b"model", BLOCK).root()
# More are never priced in a fleet whose replicas are of two speeds and one role.
MOST_PRICED = 40


def text(seed: object, length: int) -> list[int]:
    rng = random.Random(str(seed))
    return [rng.randrange(1000) for _ in range(length)]


def query(tokens: list[int], session: str | None = None) -> PlacementQuery:
    return PlacementQuery(chain_keys(ROOT, tokens, BLOCK), len(tokens), BLOCK, session)


class Traffic:
    """Requests about documents in virtual time. Each prompt is also placed by the same policy with all replicas priced."""

    def __init__(self, replicas: int, seed: int, *, events: bool = False) -> None:
        self.rng, self.now, self.number = random.Random(seed), 0.0, 0
        self.fleet, self.replicas = Fleet(), replicas
        self.ends: list[tuple[float, str]] = []
        for number in range(replicas):
            costs = ReplicaCosts(prefill=self.rng.choice((1e-4, 1e-4, 3e-4)), first=0.01)
            self.fleet.add(f"r{number}", costs=costs, sends_events=events, capacity_tokens=100_000, max_queued=8)

    def next(self, *, compare: bool = True) -> tuple[Decision, Decision | None]:
        """Place and send a request. Returns its decision and, to compare, that with all replicas priced."""
        fleet, rng = self.fleet, self.rng
        self.now += rng.expovariate(self.replicas * 10)
        while self.ends and self.ends[0][0] <= self.now:
            at, name = heapq.heappop(self.ends)
            fleet.first_token(name, at)
            fleet.finished(name, at, output_tokens=16)
        prompt = query(text(rng.randrange(3 * self.replicas), 1024) + text(rng.random(), 128))
        reference = None
        if compare:
            reference = copy.deepcopy(fleet.policy).choose(prompt, fleet.candidates(prompt, self.now))
        decision = fleet.place(prompt, self.now)
        self.number += 1
        fleet.sent(str(self.number), prompt, decision, self.now)
        assert decision.estimate is not None and decision.replica is not None
        heapq.heappush(self.ends, (self.now + decision.estimate.total, str(self.number)))
        if fleet.replicas[decision.replica].sends_events:
            fleet.directory.stored(decision.replica, CacheTier.DEVICE, None, prompt.keys)
        return decision, reference


@pytest.mark.parametrize("replicas", [2, 8, MAX_PRICED])
def test_small_fleets_are_priced_as_a_whole(replicas: int) -> None:
    """The decision is that of the policy for all replicas, with the same explanation."""
    traffic = Traffic(replicas, seed=replicas)
    for _ in range(150):
        decision, reference = traffic.next()
        assert decision == reference


@pytest.mark.parametrize("events", represented([False, True], True))
def test_large_fleets_decide_about_as_well(events: bool) -> None:
    """A bounded number is priced, and the price is within a tenth of that with all priced, on average."""
    traffic = Traffic(80, seed=3, events=events)
    ours = best = 0.0
    for number in range(480):
        decision, reference = traffic.next(compare=number >= 120 and number % 5 == 0)
        assert len(decision.estimates) <= MOST_PRICED
        if reference is not None:
            assert decision.estimate is not None and reference.estimate is not None
            ours += decision.estimate.price
            best += reference.estimate.price
    assert ours <= 1.1 * best, ours / best


def test_the_holder_of_a_prefix_is_found_among_many() -> None:
    """The holder of most of a prompt, one replica of hundreds, is found from what was sent there, and gets the next
    question."""
    fleet = Fleet()
    for number in range(300):
        fleet.add(f"r{number}", costs=ReplicaCosts(prefill=1e-3))
    document = text("document", 2000)
    first = query(document + text(1, 48))
    decision = fleet.place(first, 0.0)
    fleet.sent("first", first, decision, 0.0)
    fleet.first_token("first", 3.0)
    fleet.finished("first", 3.0)
    later = fleet.place(query(document + text(2, 48)), 100.0)
    assert later.replica == decision.replica
    assert later.expected_cached == 2000


def test_replicas_that_take_no_requests_are_not_chosen() -> None:
    """Excluded, avoided and full replicas are skipped, whatever they hold. Without any other, all reasons are given."""
    fleet = Fleet()
    names = [f"r{number}" for number in range(40)]
    for name in names:
        fleet.add(name, costs=ReplicaCosts(), max_queued=1)
    prompt = query(text("prompt", 400))
    for name in names[:20]:
        fleet.exclude(name, "draining")
    left = set(names[20:])
    for number in range(10):
        decision = fleet.place(prompt, float(number), avoid=names[30:])
        assert decision.replica in left and decision.replica in names[20:30]
        fleet.sent(str(number), prompt, decision, float(number))
        left.remove(decision.replica)
    decision = fleet.place(prompt, 20.0, avoid=names[30:])
    assert decision.replica is None
    assert {one.replica for one in decision.estimates} == set(names)
    assert "draining" in decision.in_words()
    fleet.exclude("r0", "")
    assert fleet.place(prompt, 21.0, avoid=names[30:]).replica == "r0"
    fleet.remove("r0")
    assert fleet.place(prompt, 22.0).replica in names[30:]


def test_sent_prefixes_find_most_of_a_prefix_and_stay_bounded() -> None:
    """At least five sixths of the blocks that a prompt shares with an earlier one are found; old prompts are forgotten."""
    sent, rng = SentPrefixes(), random.Random(5)
    prompts = [chain_keys(ROOT, text(number, 16 * rng.randrange(20, 300)), BLOCK) for number in range(50)]
    for number, keys in enumerate(prompts):
        sent.add(f"r{number}", keys, 8)
    for number, keys in enumerate(prompts):
        shared = rng.randrange(1, len(keys) + 1)
        mixed = [*keys[:shared], *prompts[number - 1][shared:]]
        assert shared * 5 / 6 - 1 <= sent.find(mixed)[f"r{number}"] <= shared
    for number in range(9000):
        keys = [number.to_bytes(32, "little"), *(rng.randbytes(32) for _ in range(9))]
        sent.add("new", keys, 8)
    assert not sent.find(prompts[0])
