"""How common beginnings are."""

from __future__ import annotations

import random
from hashlib import sha256

import pytest

from foreword.routing.common_prefixes import Beginnings
from foreword.routing.costs import ReplicaCosts
from foreword.routing.placement import Candidate, CheapestFirstToken, Query

COSTS = ReplicaCosts(prefill=1e-3, first=0.0, decode_each=0.0)


def key(number: int) -> bytes:
    return sha256(str(number).encode()).digest()


def test_shares_are_those_of_late() -> None:
    """One prompt in four, then one in two: the share follows within two hundred prompts."""
    counts, rng = Beginnings(), random.Random(1)
    for share in (0.25, 0.5):
        found = [counts.share(key(0) if rng.random() < share else key(rng.randrange(1, 10**9))) for _ in range(600)]
        seen = [one for one in found[200:] if one > 0.1]
        assert sum(seen) / len(seen) == pytest.approx(share, abs=0.08)


def test_the_first_prompts_prove_nothing() -> None:
    """What came once is common to no one, what came twice to few."""
    counts = Beginnings()
    assert counts.share(key(0)) == 0.0
    assert counts.share(key(0)) < 0.2
    assert counts.share(None) == 0.0


def test_counts_are_bounded() -> None:
    """A million different beginnings take the room of a thousand."""
    counts = Beginnings(100)
    for number in range(1000):
        counts.share(key(number))
    assert len(counts) == 100


def test_what_all_begin_with_lies_on_all() -> None:
    """Prompts of which nine tenths are common to all of them, one after the other, no queue: after a hundred of them all four
    replicas have that beginning. What one in ten begins with stays where it is."""
    common = [key(-1 - i) for i in range(90)]
    for every, held in ((1, 4), (10, 1)):
        policy, holders = CheapestFirstToken(), {"r0"}
        recent = dict.fromkeys(("r0", "r1", "r2", "r3"), 0.0)
        for number in range(200):
            usual = number % every == 0
            own = [key(1000 * number + i) for i in range(10 if usual else 100)]
            fleet = [
                Candidate(name, COSTS, (90 if usual and name in holders else 0,) * 4, recent_tokens=tokens)
                for name, tokens in recent.items()
            ]
            chosen = policy.choose(Query([*common, *own] if usual else own, 1600, 16), fleet).replica
            assert chosen is not None
            recent[chosen] += 1600
            holders |= {chosen} if usual else set()
        assert len(holders) == held
