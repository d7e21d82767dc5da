"""The costs of kinds of replicas: learned together, and records of them that outlive a router. Pure; times are given.

Replicas are of one kind if they have the same role, the same configured costs, if any, and the same machine, as far as that is
known, and if the prompt with which each was measured took about as long. So replicas of unequal speed have costs of their own
from their first request, and equal ones learn together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from foreword.routing.costs import DEFAULT_COSTS, CostModel, ReplicaCosts, pairs

# Length of the prompt with which a replica is measured, about: as long as a step of most engines.
MEASURED_TOKENS: Final = 2000
# As for a replica whose own requests differ from the common costs of its kind.
_DIFFERENT: Final = 1.4
# Most kinds of one machine, and most records of all machines.
_MOST_OF_MACHINE: Final = 8
MOST_RECORDS: Final = 256
MOST_NAME: Final = 512
# Records older than this say nothing: drivers, engines and models change.
RECORD_SECONDS: Final = 30 * 86_400.0
# In a record, times of a token, a request or a step beyond these are a mistake.
_LEAST_SECONDS: Final = 1e-10
_MOST_SECONDS: Final = 60.0


class Measurement(NamedTuple):
    """A prompt that an idle replica computed: its length, none of which was cached, and the seconds to the first token."""

    tokens: int
    seconds: float

    @property
    def is_usable(self) -> bool:
        return self.tokens > 0 and 0 < self.seconds < math.inf

    def ratio(self, costs: ReplicaCosts) -> float:
        """How many times as long it took as these costs expect."""
        return self.seconds / (costs.first + costs.compute_pairs(self.tokens, pairs(self.tokens, 0)))


@dataclass(frozen=True, slots=True)
class CostRecord:
    """Learned costs of one kind. `at`: seconds since 1970; `machine`: what replicas of the kind report about themselves.

    A record is only of use where it `is_plausible`.
    """

    role: str
    machine: str
    at: float
    prefill: float
    first: float
    attention: float
    decode_base: float
    decode_each: float

    def is_plausible(self, now: float) -> bool:
        """Whether it is neither old, nor of the future, nor has a number that no replica has."""
        times = self.first, self.attention, self.decode_base, self.decode_each
        return (
            0 <= now - self.at <= RECORD_SECONDS
            and 0 < len(self.machine) <= MOST_NAME
            and _LEAST_SECONDS <= self.prefill <= _MOST_SECONDS
            and all(0 <= seconds <= _MOST_SECONDS for seconds in times)
        )

    @property
    def costs(self) -> ReplicaCosts:
        return replace(
            DEFAULT_COSTS,
            prefill=self.prefill,
            first=self.first,
            attention=self.attention,
            decode_base=self.decode_base,
            decode_each=self.decode_each,
        )


_Group = tuple[str, ReplicaCosts | None, str]


@dataclass(slots=True)
class _Kind:
    """The common costs of a kind, and the record they began with, if any."""

    model: CostModel
    record: CostRecord | None = None

    def distance(self, measured: Measurement) -> float:
        """How much its costs differ from what was measured, as the logarithm of a factor."""
        return abs(math.log(max(measured.ratio(self.model.costs), 1e-12)))


class CostKinds:
    """The common costs of all kinds. Bounded: by machine, and in all."""

    def __init__(self) -> None:
        self._kinds: dict[_Group, list[_Kind]] = {}

    def of(
        self, role: str, costs: ReplicaCosts | None, machine: str = "", measured: Measurement | None = None
    ) -> CostModel:
        """The common costs of a replica's kind. `costs`: configured ones, which no measurement changes."""
        known = self._of_machine((role, costs, machine))
        if costs is not None or measured is None or not measured.is_usable:
            if not known:
                known.append(_Kind(CostModel(costs)))
            return known[0].model
        near = min(known, key=lambda one: one.distance(measured), default=None)
        if near is None or near.distance(measured) > math.log(_DIFFERENT):
            if near is None:
                near = _Kind(CostModel(DEFAULT_COSTS.slower(measured.ratio(DEFAULT_COSTS))))
            else:
                # What the first kind learns of long prompts holds for the others too, but for their speed.
                first = known[0].model
                near = _Kind(CostModel(None, first, measured.ratio(first.costs)))
            known.append(near)
            del known[:-_MOST_OF_MACHINE]
        return near.model

    def restore(self, records: Iterable[CostRecord], now: float) -> None:
        """Begin with the plausible ones of these records, the newest first."""
        found = sorted((one for one in records if one.is_plausible(now)), key=lambda one: -one.at)
        for one in found[:MOST_RECORDS]:
            known = self._of_machine((one.role, None, one.machine))
            if len(known) < _MOST_OF_MACHINE:
                known.append(_Kind(CostModel(one.costs), one))

    def records(self, now: float) -> list[CostRecord]:
        """Records of each kind that has learned, or was restored and has not learned again since. `now`: seconds since 1970."""
        found = [
            _record(role, machine, now, one.model.costs) if one.model.has_learned else one.record
            for (role, costs, machine), known in self._kinds.items()
            if machine and costs is None
            for one in known
        ]
        kept = [one for one in found if one is not None and one.is_plausible(now)]
        return sorted(kept, key=lambda one: -one.at)[:MOST_RECORDS]

    def _of_machine(self, group: _Group) -> list[_Kind]:
        """The kinds of one machine. Those of the machine that was unused for longest are forgotten if there are too many."""
        self._kinds[group] = known = self._kinds.pop(group, [])
        while len(self._kinds) > MOST_RECORDS:
            del self._kinds[next(iter(self._kinds))]
        return known


def _record(role: str, machine: str, now: float, costs: ReplicaCosts) -> CostRecord:
    fitted = costs.prefill, costs.first, costs.attention, costs.decode_base, costs.decode_each
    return CostRecord(role, machine, now, *fitted)
