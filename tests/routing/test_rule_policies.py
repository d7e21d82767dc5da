"""Placement policies with a simple rule each."""

from __future__ import annotations

import random

import pytest
from candidates import candidate, query

from foreword.errors import ConfigError
from foreword.routing.fleet import Fleet
from foreword.routing.policies import POLICIES, policy_named
from foreword.routing.rule_policies import RULES


def test_they_are_found_by_name() -> None:
    """Each policy is listed, and a typo is answered with similar names."""
    assert set(RULES) < set(POLICIES)
    with pytest.raises(ConfigError, match="round-robin"):
        policy_named("roundrobin")


def test_round_robin_takes_turns() -> None:
    """Round robin places on each available replica in turn."""
    policy = policy_named("round-robin")
    fleet = [candidate("a"), candidate("b", excluded="draining"), candidate("c")]
    assert [policy.choose(query(16), fleet).replica for _ in range(4)] == ["a", "c", "a", "c"]


def test_least_loaded_counts_requests() -> None:
    """The fewest requests in flight; ties take turns."""
    policy = policy_named("least-loaded")
    busy = [candidate("a", queued=1, running=3), candidate("b", running=2), candidate("c", queued=2)]
    assert {policy.choose(query(16), busy).replica for _ in range(4)} == {"b", "c"}


def test_least_tokens_counts_tokens() -> None:
    """A long prompt weighs more than two short ones."""
    fleet = [candidate("a", queued=1, queued_tokens=9000), candidate("b", queued=2, queued_tokens=500)]
    assert policy_named("least-tokens").choose(query(16), fleet).replica == "b"


def test_longest_prefix_ignores_load() -> None:
    """The longest prefix wins, however long the queue is."""
    fleet = [candidate("a", 50, queued=100, queued_tokens=1e6), candidate("b", 49)]
    assert policy_named("longest-prefix").choose(query(1600), fleet).replica == "a"


def test_consistent_hashing_is_bounded() -> None:
    """A prefix goes to one replica until that has 1.25 times its share of requests, then to the next on the ring."""
    policy = policy_named("consistent-hashing")
    idle = [candidate(f"r{i}") for i in range(4)]
    first = policy.choose(query(1600), idle).replica
    assert policy.choose(query(1600), idle).replica == first
    loaded = [one._replace(running=10 if one.name == first else 1) for one in idle]
    assert policy.choose(query(1600), loaded).replica != first


def test_two_choices_uses_two_replicas() -> None:
    """A prefix goes to at most two replicas, to the less loaded of them."""
    policy = policy_named("two-choices")
    rng = random.Random(1)
    fleets = [[candidate(f"r{i}", running=rng.randrange(9)) for i in range(8)] for _ in range(50)]
    assert len({policy.choose(query(1600), fleet).replica for fleet in fleets}) == 2


@pytest.mark.parametrize("name", RULES)
def test_it_runs_a_fleet(name: str) -> None:
    """Each policy serves the same requests, and nothing is left in flight."""
    fleet = Fleet(policy_named(name))
    for replica in "abc":
        fleet.add(replica)
    for number in range(30):
        asked, now = query(500, number % 5), float(number)
        decision = fleet.place(asked, now)
        fleet.sent(str(number), asked, decision, now)
        fleet.first_token(str(number), now)
        fleet.finished(str(number), now + 1.0, cached_tokens=None, output_tokens=1)
    assert len(fleet._requests) == 0
