"""Other policies: what the one by cost is compared with, and what may be chosen in its place (`--policy`). Pure.

They ask the candidates for what their rule needs and for nothing else; the prices in their decisions are there to be shown.
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from foreword.errors import ConfigError, did_you_mean
from foreword.routing.directory import Tier
from foreword.routing.placement import Candidate, CheapestFirstToken, Decision, Policy, Query, price, rendezvous, score

_POINTS: Final = 64
# What a policy by hash takes for the prompt's prefix, in tokens: longer than the system prompt that all share.
_PREFIX_TOKENS: Final = 1024


class Baseline(ABC):
    """A policy whose rule names one of the candidates that take requests."""

    name = ""

    def choose(self, query: Query, candidates: Sequence[Candidate], home: str | None = None) -> Decision:
        prices = tuple(price(query, candidate) for candidate in candidates)
        usable = [candidate for candidate in candidates if not candidate.excluded]
        if not usable:
            return Decision(None, prices, "none", home=home)
        return Decision(self.rule(query, usable), prices, self.name, home=home)

    @abstractmethod
    def rule(self, query: Query, usable: Sequence[Candidate]) -> str:
        """The name of one of `usable`, which is not empty."""


class Random(Baseline):
    """Any of them."""

    name = "random"

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def rule(self, query: Query, usable: Sequence[Candidate]) -> str:
        return self._random.choice(usable).name


class RoundRobin(Baseline):
    """One after the other."""

    name = "round-robin"

    def __init__(self) -> None:
        self._turn = 0

    def rule(self, query: Query, usable: Sequence[Candidate]) -> str:
        self._turn += 1
        return usable[(self._turn - 1) % len(usable)].name


class LeastLoaded(Baseline):
    """The one with the fewest requests in flight; equals take turns."""

    name = "least-loaded"

    def __init__(self) -> None:
        self._turn = 0

    def rule(self, query: Query, usable: Sequence[Candidate]) -> str:
        self._turn += 1
        order = range(len(usable))
        best = min(order, key=lambda i: (requests(usable[i]), (i - self._turn) % len(usable)))
        return usable[best].name


class LeastTokens(Baseline):
    """The one with the fewest tokens of prompts to be computed, then the fewest requests. The queue is counted as placement by
    cost counts it, without what is cached; where this prompt's own prefix lies makes no difference."""

    name = "least-tokens"

    def rule(self, query: Query, usable: Sequence[Candidate]) -> str:
        return min(usable, key=lambda one: (one.queued_tokens, requests(one), one.name)).name


class BoundedHashing(Baseline):
    """Consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam, 2018): the first replica on the ring behind
    the prompt's prefix that has no more than `bound` times its share of the requests.

    Raises ConfigError for a bound below 1.
    """

    name = "consistent-hashing"

    def __init__(self, bound: float = 1.25) -> None:
        if not bound >= 1:
            raise ConfigError(f"the bound of consistent hashing must be at least 1, not {bound}")
        self.bound = bound
        self._names: tuple[str, ...] = ()
        self._ring: list[tuple[bytes, str]] = []

    def rule(self, query: Query, usable: Sequence[Candidate]) -> str:
        self._make_ring(tuple(one.name for one in usable))
        loads = {one.name: requests(one) for one in usable}
        most = math.ceil(self.bound * (sum(loads.values()) + 1) / len(usable))
        start = bisect_right(self._ring, (score(prefix_of(query), "ring"), ""))
        places = (self._ring[(start + i) % len(self._ring)][1] for i in range(len(self._ring)))
        return next(name for name in places if loads[name] < most)

    def _make_ring(self, names: tuple[str, ...]) -> None:
        if names != self._names:
            self._names = names
            self._ring = sorted((score(str(i).encode(), name), name) for name in names for i in range(_POINTS))


class LongestPrefix(Baseline):
    """The one that has most of the prompt on its device; equals by requests in flight."""

    name = "longest-prefix"

    def rule(self, query: Query, usable: Sequence[Candidate]) -> str:
        return min(usable, key=lambda one: (-one.reach[Tier.DEVICE], requests(one), one.name)).name


class TwoChoices(Baseline):
    """Two replicas by hash of the prompt's prefix, and of them the one with fewer requests in flight."""

    name = "two-choices"

    def rule(self, query: Query, usable: Sequence[Candidate]) -> str:
        prefix, names = prefix_of(query), [one.name for one in usable]
        first = rendezvous(prefix, names)
        second = rendezvous(prefix, [name for name in names if name != first] or names)
        loads = {one.name: requests(one) for one in usable}
        return first if loads[first] <= loads[second] else second


def requests(candidate: Candidate) -> int:
    """Requests in flight."""
    return candidate.queued + candidate.running


def prefix_of(query: Query) -> bytes:
    """What hashing takes for the prompt's prefix: the session, else the block in which the first 1,024 tokens end."""
    if query.session is not None:
        return query.session.encode()
    if not query.keys:
        return b""
    return query.keys[min(-(-_PREFIX_TOKENS // query.block_size), len(query.keys)) - 1]


POLICIES: Final[Mapping[str, Callable[[], Policy]]] = {
    "cost": CheapestFirstToken,
    "random": Random,
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "least-tokens": LeastTokens,
    "consistent-hashing": BoundedHashing,
    "longest-prefix": LongestPrefix,
    "two-choices": TwoChoices,
}


def policy_named(name: str) -> Policy:
    """A new policy. Raises ConfigError for an unknown name."""
    if name not in POLICIES:
        raise ConfigError(f"unknown policy {name!r}{did_you_mean(name, POLICIES)}")
    return POLICIES[name]()
