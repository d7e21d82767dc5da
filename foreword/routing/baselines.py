"""Other placement policies, for comparison with the cost policy and for `--policy`. Pure.

Their rules use only what they need of the candidates; the cost estimates in their decisions are for display.
"""

from __future__ import annotations

import itertools
import math
import random
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from foreword.errors import ConfigError
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

_RING_POINTS: Final = 64
# A replica on the hash ring may have this many times its fair share of requests.
_LOAD_BOUND: Final = 1.25
# Tokens that hashing policies use as the prompt's prefix: more than a shared system prompt.
_PREFIX_TOKENS: Final = 1024

Rule = Callable[[PlacementQuery, Sequence[Candidate]], str]
"""Returns the name of one of the available candidates, of which there is at least one."""


class RulePolicy:
    """A policy that applies a rule to the available candidates."""

    needs_all = True

    def __init__(self, name: str, rule: Rule) -> None:
        self.name = name
        self._rule = rule

    def choose(self, query: PlacementQuery, candidates: Sequence[Candidate], home: str | None = None) -> Decision:
        estimates = tuple(estimate_cost(query, candidate) for candidate in candidates)
        usable = [candidate for candidate in candidates if not candidate.excluded]
        if not usable:
            return Decision(None, estimates, "none", home=home)
        return Decision(self._rule(query, usable), estimates, self.name, home=home)


def _random() -> Rule:
    """A random candidate, from a fixed seed."""
    rng = random.Random(0)
    return lambda query, usable: rng.choice(usable).name


def _round_robin() -> Rule:
    """Each candidate in turn."""
    turns = itertools.count()
    return lambda query, usable: usable[next(turns) % len(usable)].name


def _least_loaded() -> Rule:
    """The candidate with the fewest requests in flight; ties take turns."""
    turns = itertools.count(1)

    def rule(query: PlacementQuery, usable: Sequence[Candidate]) -> str:
        turn, count = next(turns), len(usable)
        return usable[min(range(count), key=lambda i: (_requests(usable[i]), (i - turn) % count))].name

    return rule


def _least_tokens() -> Rule:
    """The candidate with the fewest queued prompt tokens (cached ones do not count), then the fewest requests."""
    return lambda query, usable: min(usable, key=lambda one: (one.queued_tokens, _requests(one), one.name)).name


def _longest_prefix() -> Rule:
    """The candidate with the longest prefix on its device, then the fewest requests in flight."""
    device = CacheTier.DEVICE
    return lambda query, usable: min(usable, key=lambda one: (-one.reach[device], _requests(one), one.name)).name


def _two_choices() -> Rule:
    """Of two replicas selected by hash of the prompt's prefix, the one with fewer requests in flight."""

    def rule(query: PlacementQuery, usable: Sequence[Candidate]) -> str:
        prefix, loads = _prefix_of(query), {one.name: _requests(one) for one in usable}
        first = rendezvous(prefix, list(loads))
        second = rendezvous(prefix, [name for name in loads if name != first] or list(loads))
        return first if loads[first] <= loads[second] else second

    return rule


def _consistent_hashing() -> Rule:
    """Consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam, 2018): the first replica on the ring after the
    prompt's prefix that has no more than `_LOAD_BOUND` times its fair share of requests."""
    ring: list[tuple[bytes, str]] = []
    ring_names: set[str] = set()

    def rule(query: PlacementQuery, usable: Sequence[Candidate]) -> str:
        loads = {one.name: _requests(one) for one in usable}
        if loads.keys() != ring_names:
            ring_names.clear()
            ring_names.update(loads)
            ring[:] = sorted((score(str(i).encode(), name), name) for name in loads for i in range(_RING_POINTS))
        limit = math.ceil(_LOAD_BOUND * (sum(loads.values()) + 1) / len(usable))
        start = bisect_right(ring, (score(_prefix_of(query), "ring"), ""))
        names = (ring[(start + i) % len(ring)][1] for i in range(len(ring)))
        return next(name for name in names if loads[name] < limit)

    return rule


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


_RULES: Final[Mapping[str, Callable[[], Rule]]] = {
    "random": _random,
    "round-robin": _round_robin,
    "least-loaded": _least_loaded,
    "least-tokens": _least_tokens,
    "consistent-hashing": _consistent_hashing,
    "longest-prefix": _longest_prefix,
    "two-choices": _two_choices,
}
POLICIES: Final = ("cost", *_RULES)


def policy_named(name: str) -> Policy:
    """A new policy. Raises ConfigError for an unknown name."""
    usual = CostPolicy()
    if name == usual.name:
        return usual
    if name not in _RULES:
        raise ConfigError(f"unknown policy {name!r}; the policies are {', '.join(POLICIES)}")
    return RulePolicy(name, _RULES[name]())
