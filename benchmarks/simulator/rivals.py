"""The placement rules of other routers, for comparison in the simulator.

Each has its project's default settings and knows what replicas truly hold and do; a real one knows that later or estimates it.
They were written from the projects' descriptions.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

from foreword.routing.directory import CacheTier
from foreword.routing.placement import Candidate, PlacementQuery
from foreword.routing.rule_policies import RulePolicy

_DEVICE = CacheTier.DEVICE


class CacheAware(RulePolicy):
    """The `cache_aware` policy of SGLang's router, which vLLM's router has too: the longest prefix if that is a share of the
    prompt, else the replica with the fewest cached tokens; the fewest requests while loads differ much."""

    name = "sglang"
    needs_prompts = True

    def __init__(self, share: float = 0.3, difference: int = 64, ratio: float = 1.5) -> None:
        self._share, self._difference, self._ratio = share, difference, ratio
        self._computed = Counter[str]()

    def pick(self, query: PlacementQuery, usable: Sequence[Candidate]) -> str:
        requests = {one.name: one.queued + one.running for one in usable}
        most, fewest = max(requests.values()), min(requests.values())
        longest = max(usable, key=lambda one: (one.reach[_DEVICE], one.name))
        if most - fewest > self._difference and most > self._ratio * fewest:
            chosen = min(usable, key=lambda one: (requests[one.name], one.name))
        elif longest.reach[_DEVICE] * query.block_size > self._share * query.tokens:
            chosen = longest
        else:
            chosen = min(usable, key=lambda one: (self._computed[one.name], one.name))
        self._computed[chosen.name] += max(query.tokens - chosen.reach[_DEVICE] * query.block_size, 0)
        return chosen.name


class WeightedScores(RulePolicy):
    """llm-d's scorers at their default weights: prefix 3, queue 2, KV memory 2; the highest sum, ties at random."""

    name = "llm-d"
    needs_prompts = True

    def __init__(self, prefix: float = 3, queue: float = 2, memory: float = 2) -> None:
        self._prefix, self._queue, self._memory = prefix, queue, memory
        self._rng = random.Random(0)

    def pick(self, query: PlacementQuery, usable: Sequence[Candidate]) -> str:
        longest, shortest = max(one.queued for one in usable), min(one.queued for one in usable)
        scores = {
            one.name: self._prefix * one.reach[_DEVICE] / max(len(query.keys), 1)
            + self._queue * ((longest - one.queued) / (longest - shortest) if longest > shortest else 1.0)
            + self._memory * (1 - min(one.resident / max(one.capacity, 1), 1.0))
            for one in usable
        }
        highest = max(scores.values())
        return self._rng.choice([name for name, score in scores.items() if score >= highest - 1e-9])


class BlocksInUse(RulePolicy):
    """The rule of NVIDIA Dynamo's KV router: the fewest blocks, those to prefill and those in use together."""

    name = "dynamo"
    needs_prompts = True

    def pick(self, query: PlacementQuery, usable: Sequence[Candidate]) -> str:
        def tokens(one: Candidate) -> float:
            prefill = one.queued_tokens + query.tokens - one.reach[_DEVICE] * query.block_size
            return prefill + one.resident + query.tokens

        return min(usable, key=lambda one: (tokens(one), one.name)).name


RIVALS = {one.name: one for one in (CacheAware, WeightedScores, BlocksInUse)}
