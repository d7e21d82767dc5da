"""Simpler placement policies than the cost policy: for comparison, for `--policy`, and the base of those of packages. Pure.

Their rules use only what they need of the candidates; the cost estimates in their decisions are for display.
"""

from __future__ import annotations

import itertools
import math
import random
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Final

from foreword.routing.directory import CacheTier
from foreword.routing.placement import (
    Candidate,
    Decision,
    PlacementQuery,
    Policy,
    estimate_cost,
    rendezvous,
    score,
)

_RING_POINTS: Final = 64
# A replica on the hash ring may have this many times its fair share of requests.
_LOAD_BOUND: Final = 1.25
# Tokens that hashing policies use as the prompt's prefix: more than a shared system prompt.
_PREFIX_TOKENS: Final = 1024


class RulePolicy:
    """A policy that applies a rule to the available candidates. Subclasses have a `name` and implement `pick`."""

    name: str
    needs_all = True
    needs_prompts = False

    def choose(self, query: PlacementQuery, candidates: Sequence[Candidate], home: str | None = None) -> Decision:
        estimates = tuple(estimate_cost(query, candidate) for candidate in candidates)
        usable = [candidate for candidate in candidates if not candidate.excluded]
        if not usable:
            return Decision(None, estimates, "none", home=home)
        return Decision(self.pick(query, usable), estimates, self.name, home=home)

    def pick(self, query: PlacementQuery, usable: Sequence[Candidate]) -> str:
        """The name of one of the available candidates, of which there is at least one."""
        raise NotImplementedError


class RandomPolicy(RulePolicy):
    """A random candidate, from a fixed seed."""

    name = "random"

    def __init__(self) -> None:
        self._rng = random.Random(0)

    def pick(self, query: PlacementQuery, usable: Sequence[Candidate]) -> str:
        return self._rng.choice(usable).name


class RoundRobin(RulePolicy):
    """Each candidate in turn."""

    name = "round-robin"

    def __init__(self) -> None:
        self._turns = itertools.count()

    def pick(self, query: PlacementQuery, usable: Sequence[Candidate]) -> str:
        return usable[next(self._turns) % len(usable)].name


class LeastLoaded(RulePolicy):
    """The candidate with the fewest requests in flight; ties take turns."""

    name = "least-loaded"

    def __init__(self) -> None:
        self._turns = itertools.count(1)

    def pick(self, query: PlacementQuery, usable: Sequence[Candidate]) -> str:
        turn, count = next(self._turns), len(usable)
        return usable[min(range(count), key=lambda i: (_requests(usable[i]), (i - turn) % count))].name


class LeastTokens(RulePolicy):
    """The candidate with the fewest queued prompt tokens (cached ones do not count), then the fewest requests."""

    name = "least-tokens"

    def pick(self, query: PlacementQuery, usable: Sequence[Candidate]) -> str:
        return min(usable, key=lambda one: (one.queued_tokens, _requests(one), one.name)).name


class LongestPrefix(RulePolicy):
    """The candidate with the longest prefix on its device, then the fewest requests in flight."""

    name = "longest-prefix"
    needs_prompts = True

    def pick(self, query: PlacementQuery, usable: Sequence[Candidate]) -> str:
        device = CacheTier.DEVICE
        return min(usable, key=lambda one: (-one.reach[device], _requests(one), one.name)).name


class TwoChoices(RulePolicy):
    """The replica with fewer requests in flight, of two selected by hash of the prompt's prefix."""

    name = "two-choices"
    needs_prompts = True

    def pick(self, query: PlacementQuery, usable: Sequence[Candidate]) -> str:
        prefix, loads = _prefix_of(query), {one.name: _requests(one) for one in usable}
        first = rendezvous(prefix, list(loads))
        second = rendezvous(prefix, [name for name in loads if name != first] or list(loads))
        return first if loads[first] <= loads[second] else second


class ConsistentHashing(RulePolicy):
    """Consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam, 2018): the first replica on the ring after the
    prompt's prefix that has no more than `_LOAD_BOUND` times its fair share of requests."""

    name = "consistent-hashing"
    needs_prompts = True

    def __init__(self) -> None:
        self._ring: list[tuple[bytes, str]] = []
        self._names: set[str] = set()

    def pick(self, query: PlacementQuery, usable: Sequence[Candidate]) -> str:
        loads = {one.name: _requests(one) for one in usable}
        if loads.keys() != self._names:
            self._names = set(loads)
            self._ring = sorted((score(str(i).encode(), name), name) for name in loads for i in range(_RING_POINTS))
        limit = math.ceil(_LOAD_BOUND * (sum(loads.values()) + 1) / len(usable))
        ring, start = self._ring, bisect_right(self._ring, (score(_prefix_of(query), "ring"), ""))
        names = (ring[(start + i) % len(ring)][1] for i in range(len(ring)))
        return next(name for name in names if loads[name] < limit)


def _requests(candidate: Candidate) -> int:
    """Requests in flight on a candidate."""
    return candidate.queued + candidate.running


def _prefix_of(query: PlacementQuery) -> bytes:
    """The hash key of a prompt: the session, else the block that contains token 1,024."""
    if query.session is not None:
        return query.session.encode()
    if not query.keys:
        return b""
    return query.keys[min(-(-_PREFIX_TOKENS // query.block_size), len(query.keys)) - 1]


# By name.
RULES: Final[Mapping[str, type[Policy]]] = {
    "random": RandomPolicy,
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "least-tokens": LeastTokens,
    "consistent-hashing": ConsistentHashing,
    "longest-prefix": LongestPrefix,
    "two-choices": TwoChoices,
}
