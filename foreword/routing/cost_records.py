"""Records of learned costs, which outlive a router. Pure; times are given."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from foreword.routing.cost_kinds import MOST_NAME, CostKinds
from foreword.routing.costs import DEFAULT_COSTS, LEARNED, CostModel, ReplicaCosts

# Most records of all machines.
MOST_RECORDS: Final = 256
# Records older than this say nothing: drivers, engines and models change.
RECORD_SECONDS: Final = 30 * 86_400.0
# In a record, times of a token, a request or a step beyond these are a mistake.
_LEAST_SECONDS: Final = 1e-10
_MOST_SECONDS: Final = 60.0


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
        return replace(DEFAULT_COSTS, **{name: getattr(self, name) for name in LEARNED})


class CostRecords:
    """The records of these kinds."""

    def __init__(self, kinds: CostKinds) -> None:
        self._kinds = kinds
        # The costs that began with a record.
        self._restored: dict[CostModel, CostRecord] = {}

    def restore(self, records: Iterable[CostRecord], now: float) -> None:
        """Begin with the plausible ones of these records, the newest first."""
        found = sorted((one for one in records if one.is_plausible(now)), key=lambda one: -one.at)
        for one in found[:MOST_RECORDS]:
            model = self._kinds.begin(one.role, one.machine, one.costs)
            if model is not None:
                self._restored[model] = one

    def records(self, now: float) -> list[CostRecord]:
        """Records of each kind that has learned, or was restored and has not learned again since. `now`: seconds since 1970."""
        found = [
            _record(role, machine, now, model.costs) if model.has_learned else self._restored.get(model)
            for role, machine, model in self._kinds.of_machines()
        ]
        kept = [one for one in found if one is not None and one.is_plausible(now)]
        return sorted(kept, key=lambda one: -one.at)[:MOST_RECORDS]


def _record(role: str, machine: str, now: float, costs: ReplicaCosts) -> CostRecord:
    return CostRecord(role, machine, now, *[getattr(costs, name) for name in LEARNED])
