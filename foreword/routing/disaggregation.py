"""Disaggregated prefill: whether one replica computes the prompt and another decodes. Uses the cost model. Pure.

Both replicas have the same weights: those of the replica that would serve the request alone.

The decoding replica could compute the prompt itself. A separate prefill pays if it gives a lower TTFT in spite of the
KV transfer, or if the prompt would slow down many decoding sequences. It does not pay where little is left to compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from msgspec import structs

from foreword.errors import ConfigError
from foreword.routing.placement import Candidate, CostEstimate, Decision, PlacementQuery, Policy


@dataclass(frozen=True, slots=True)
class DisaggregationPolicy:
    """When a prompt is computed on another replica than the one that decodes.

    Attributes:
        min_tokens: prompts with fewer tokens to compute are never split.
        stall: value of not interrupting decodes: for each sequence that decodes on the replica that would compute the
            prompt, this share of the computing time counts as a cost, up to all of it.

    Raises ConfigError for negative values.
    """

    min_tokens: int = 512
    stall: float = 0.1

    def __post_init__(self) -> None:
        if self.min_tokens < 0 or not self.stall >= 0:
            raise ConfigError(f"min_tokens and stall must be at least 0, not {self.min_tokens} and {self.stall}")

    def choose(
        self,
        query: PlacementQuery,
        prefill: Sequence[Candidate],
        decode: Sequence[Candidate],
        policy: Policy,
        home: str | None = None,
    ) -> Decision:
        """A decision; its `prefill` is set if two replicas share the request.

        If no prefill replica is available, the decode replica computes the prompt. If no decode replica is available, a
        prefill replica serves the whole request.
        """
        alone = policy.choose(query, decode, home)
        if alone.estimate is None:
            return _with_estimates(policy.choose(query, prefill, home), alone)
        weights = next(one.weights for one in decode if one.name == alone.replica)
        # Unknown weights are never known to be the same.
        prefill = [one for one in prefill if one.weights == weights is not None]
        decode = [one for one in decode if one.weights == weights]
        if not prefill:
            return alone
        first = policy.choose(query, prefill)
        if first.estimate is None or alone.estimate.computed < self.min_tokens:
            return alone
        second = policy.choose(query, [_as_receiver(one) for one in decode], home)
        if second.estimate is None or second.replica == first.replica:
            return alone
        # The prompt's KV is sent once it is computed: the second estimate is the time of the transfer.
        pair = first.estimate._replace(replica=second.estimate.replica, transfer=second.estimate.total)
        running = next(one.running for one in decode if one.name == alone.replica)
        avoided_stall = alone.estimate.compute * min(running * self.stall, 1.0)
        if pair.total >= alone.estimate.total + avoided_stall:
            return alone
        others = tuple(one for one in alone.estimates if one.replica != second.replica)
        return Decision(second.replica, (pair, *others), second.reason, prefill=first.replica, home=home)


def _as_receiver(candidate: Candidate) -> Candidate:
    """The candidate as a receiver of KV: missing tokens are transferred instead of computed and skip the queue."""
    transfer = candidate.costs.transfer
    costs = replace(candidate.costs, prefill=transfer.per_token, attention=0.0, first=transfer.latency, decode_each=0.0)
    return candidate._replace(costs=costs, queued_tokens=0.0, queued_pairs=0.0, queued=0)


def _with_estimates(decision: Decision, unavailable: Decision) -> Decision:
    estimates: tuple[CostEstimate, ...] = (*unavailable.estimates, *decision.estimates)
    return decision if decision.estimate is not None else structs.replace(decision, estimates=estimates)
