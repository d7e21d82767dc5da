"""Prefill here, decode there, or both in one place? By the same costs. Pure.

The replica that decodes could compute the prompt itself. Sending it to another first pays if that one is sooner in spite of
the transfer, or if the prompt would hold up many that decode. Where little is left to compute, it does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from foreword.errors import ConfigError
from foreword.routing.placement import Candidate, Decision, Policy, Price, Query


@dataclass(frozen=True, slots=True)
class Disaggregation:
    """When a prompt is computed on another replica than the one that decodes.

    Attributes:
        min_tokens: prompts with fewer tokens to compute are never sent to two replicas.
        stall: what it is worth to spare others: for each sequence that decodes where the prompt would be computed, this share
            of the time that computing takes counts as a cost, up to the whole of it.

    Raises ConfigError for negative values.
    """

    min_tokens: int = 512
    stall: float = 0.1

    def __post_init__(self) -> None:
        if self.min_tokens < 0 or not self.stall >= 0:
            raise ConfigError(f"min_tokens and stall must be at least 0, not {self.min_tokens} and {self.stall}")

    def choose(
        self,
        query: Query,
        prefill: Sequence[Candidate],
        decode: Sequence[Candidate],
        policy: Policy,
        home: str | None = None,
    ) -> Decision:
        """A decision whose `prefill` is set if two replicas share the work. A pool that takes no requests is done without:
        decoding replicas compute prompts, and if none of them is left a prefilling one does all."""
        alone = policy.choose(query, decode, home)
        if alone.price is None:
            return _both(policy.choose(query, prefill, home), alone)
        first = policy.choose(query, prefill)
        if first.price is None or alone.price.computed < self.min_tokens:
            return alone
        second = policy.choose(query, [_receiver(one) for one in decode], home)
        if second.price is None or second.replica == first.replica:
            return alone
        pair = _pair(first.price, second.price)
        running = next(one.running for one in decode if one.name == alone.replica)
        spared = alone.price.compute * min(running * self.stall, 1.0)
        if pair.total >= alone.price.total + spared:
            return alone
        others = tuple(one for one in alone.prices if one.replica != second.replica)
        return Decision(second.replica, (pair, *others), second.reason, prefill=first.replica, home=home)


def _receiver(candidate: Candidate) -> Candidate:
    """The candidate as one that is sent what it lacks: what it would compute travels, and nothing waits for its queue."""
    transfer = candidate.costs.transfer
    costs = replace(candidate.costs, prefill=transfer.per_token, attention=0.0, first=transfer.latency, decode_each=0.0)
    return replace(candidate, costs=costs, queued_tokens=0.0, queued_pairs=0.0)


def _pair(first: Price, second: Price) -> Price:
    """What the request waits for when `first` computes the prompt and `second` is sent what it lacks."""
    sending = second.total
    return replace(first, replica=second.replica, transfer=sending)


def _both(found: Decision, none: Decision) -> Decision:
    return found if found.price is not None else replace(found, prices=(*none.prices, *found.prices))
