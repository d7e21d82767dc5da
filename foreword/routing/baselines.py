"""Other placement policies, for comparison with the cost policy and for `--policy`. Pure.

Their rules use only what they need of the candidates; the cost estimates in their decisions are for display.
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from foreword.errors import ConfigError, did_you_mean
from foreword.routing.directory import CacheTier
from foreword.routing.placement import (
    Candidate,
    CostPolicy,
    Decision,
    PlacementQuery,
    Policy,
    estimate_cost,
    rendezvous,
    score,
)

_POINTS: Final = 64
# Tokens that hashing policies use as the prompt's prefix: more than a shared system prompt.
_PREFIX_TOKENS: Final = 1024


class BaselinePolicy(ABC):
    """A policy that applies a rule to the available candidates."""

    name = ""

    def choose(self, query: PlacementQuery, candidates: Sequence[Candidate], home: str | None = None) -> Decision:
        estimates = tuple(estimate_cost(query, candidate) for candidate in candidates)
        usable = [candidate for candidate in candidates if not candidate.excluded]
        if not usable:
            return Decision(None, estimates, "none", home=home)
        return Decision(self.rule(query, usable), estimates, self.name, home=home)

    @abstractmethod
    def rule(self, query: PlacementQuery, usable: Sequence[Candidate]) -> str:
        """Returns the name of one of `usable`, which is not empty."""


class Random(BaselinePolicy):
    """A random candidate."""

    name = "random"

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def rule(self, query: PlacementQuery, usable: Sequence[Candidate]) -> str:
        return self._random.choice(usable).name


class RoundRobin(BaselinePolicy):
    """Each candidate in turn."""

    name = "round-robin"

    def __init__(self) -> None:
        self._turn = 0

    def rule(self, query: PlacementQuery, usable: Sequence[Candidate]) -> str:
        self._turn += 1
        return usable[(self._turn - 1) % len(usable)].name


class LeastLoaded(BaselinePolicy):
    """The candidate with the fewest requests in flight; ties take turns."""

    name = "least-loaded"

    def __init__(self) -> None:
        self._turn = 0

    def rule(self, query: PlacementQuery, usable: Sequence[Candidate]) -> str:
        self._turn += 1
        order = range(len(usable))
        best = min(order, key=lambda i: (in_flight(usable[i]), (i - self._turn) % len(usable)))
        return usable[best].name


class LeastTokens(BaselinePolicy):
    """The candidate with the fewest queued prompt tokens, then the fewest requests. Cached tokens of queued prompts do not
    count. Where this prompt's prefix is cached makes no difference."""

    name = "least-tokens"

    def rule(self, query: PlacementQuery, usable: Sequence[Candidate]) -> str:
        return min(usable, key=lambda one: (one.queued_tokens, in_flight(one), one.name)).name


class BoundedHashing(BaselinePolicy):
    """Consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam, 2018): the first replica on the ring after the
    prompt's prefix with at most `bound` times its fair share of requests.

    Raises ConfigError for a bound below 1.
    """

    name = "consistent-hashing"

    def __init__(self, bound: float = 1.25) -> None:
        if not bound >= 1:
            raise ConfigError(f"the bound of consistent hashing must be at least 1, not {bound}")
        self.bound = bound
        self._names: tuple[str, ...] = ()
        self._ring: list[tuple[bytes, str]] = []

    def rule(self, query: PlacementQuery, usable: Sequence[Candidate]) -> str:
        self._make_ring(tuple(one.name for one in usable))
        loads = {one.name: in_flight(one) for one in usable}
        most = math.ceil(self.bound * (sum(loads.values()) + 1) / len(usable))
        start = bisect_right(self._ring, (score(prefix_of(query), "ring"), ""))
        places = (self._ring[(start + i) % len(self._ring)][1] for i in range(len(self._ring)))
        return next(name for name in places if loads[name] < most)

    def _make_ring(self, names: tuple[str, ...]) -> None:
        if names != self._names:
            self._names = names
            self._ring = sorted((score(str(i).encode(), name), name) for name in names for i in range(_POINTS))


class LongestPrefix(BaselinePolicy):
    """The candidate with the longest prefix on its device, then the fewest requests in flight."""

    name = "longest-prefix"

    def rule(self, query: PlacementQuery, usable: Sequence[Candidate]) -> str:
        return min(usable, key=lambda one: (-one.reach[CacheTier.DEVICE], in_flight(one), one.name)).name


class TwoChoices(BaselinePolicy):
    """Of two replicas selected by hash of the prompt's prefix, the one with fewer requests in flight."""

    name = "two-choices"

    def rule(self, query: PlacementQuery, usable: Sequence[Candidate]) -> str:
        prefix, names = prefix_of(query), [one.name for one in usable]
        first = rendezvous(prefix, names)
        second = rendezvous(prefix, [name for name in names if name != first] or names)
        loads = {one.name: in_flight(one) for one in usable}
        return first if loads[first] <= loads[second] else second


def in_flight(candidate: Candidate) -> int:
    """Requests in flight on a candidate."""
    return candidate.queued + candidate.running


def prefix_of(query: PlacementQuery) -> bytes:
    """The hash key of a prompt: the session, else the block that contains token 1,024."""
    if query.session is not None:
        return query.session.encode()
    if not query.keys:
        return b""
    return query.keys[min(-(-_PREFIX_TOKENS // query.block_size), len(query.keys)) - 1]


POLICIES: Final[Mapping[str, Callable[[], Policy]]] = {
    "cost": CostPolicy,
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
