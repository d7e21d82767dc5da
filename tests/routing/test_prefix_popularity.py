"""How common prefixes are."""

from __future__ import annotations

import random
from hashlib import sha256

import pytest

from foreword.routing.costs import ReplicaCosts
from foreword.routing.placement import Candidate, CostPolicy, PlacementQuery, PrefixPopularity

COSTS = ReplicaCosts(prefill=1e-3, first=0.0, decode_each=0.0)


def key(number: int) -> bytes:
    return sha256(str(number).encode()).digest()


def test_shares_follow_recent_prompts() -> None:
    """A share follows its prompts, one in four and then one in two, within two hundred of them."""
    counts, rng = PrefixPopularity(), random.Random(1)
    for share in (0.25, 0.5):
        found = [counts.record(key(0) if rng.random() < share else key(rng.randrange(1, 10**9))) for _ in range(600)]
        seen = [one for one in found[200:] if one > 0.1]
        assert sum(seen) / len(seen) == pytest.approx(share, abs=0.08)


def test_shares_start_low() -> None:
    """A prefix seen once has share 0, one seen twice a low one."""
    counts = PrefixPopularity()
    assert counts.record(key(0)) == 0.0
    assert counts.record(key(0)) < 0.2
    assert counts.record(None) == 0.0


def test_counts_are_bounded() -> None:
    """A thousand different prefixes take the memory of a hundred."""
    counts = PrefixPopularity(100)
    for number in range(1000):
        counts.record(key(number))
    assert len(counts) == 100


def test_a_common_prefix_is_replicated() -> None:
    """A prefix of all prompts is on all four replicas after two hundred requests, without any queue. A prefix of one
    in ten stays on one replica."""
    common = [key(-1 - i) for i in range(90)]
    for every, held in ((1, 4), (10, 1)):
        policy, holders = CostPolicy(), {"r0"}
        recent = dict.fromkeys(("r0", "r1", "r2", "r3"), 0.0)
        for number in range(200):
            usual = number % every == 0
            own = [key(1000 * number + i) for i in range(10 if usual else 100)]
            fleet = [
                Candidate(name, COSTS, (90 if usual and name in holders else 0,) * 4, recent_tokens=tokens)
                for name, tokens in recent.items()
            ]
            chosen = policy.choose(PlacementQuery([*common, *own] if usual else own, 1600, 16), fleet).replica
            assert chosen is not None
            recent[chosen] += 1600
            holders |= {chosen} if usual else set()
        assert len(holders) == held
