"""The costs of kinds of replicas, which are learned together. Pure.

Replicas are of one kind if they have the same role, the same configured costs, if any, and the same machine, as far as that is
known, and if the prompt with which each was measured took about as long. So replicas of unequal speed have costs of their own
from their first request, and equal ones learn together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final, NamedTuple

from foreword.routing.costs import DEFAULT_COSTS, CostModel, ReplicaCosts, pairs

# Length of the prompt with which a replica is measured, about: as long as a step of most engines.
MEASURED_TOKENS: Final = 2000
# As for a replica whose own requests differ from the common costs of its kind.
_DIFFERENT: Final = 1.4
# Most kinds of one machine, and most machines.
_MOST_OF_MACHINE: Final = 8
MOST_MACHINES: Final = 256
MOST_NAME: Final = 512


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

    def distance(self, model: CostModel) -> float:
        """How much it differs from the model's costs, as the logarithm of a factor."""
        return abs(math.log(max(self.ratio(model.costs), 1e-12)))


_Group = tuple[str, ReplicaCosts | None, str]


class CostKinds:
    """The common costs of all kinds. Bounded: by machine, and in all."""

    def __init__(self) -> None:
        self._kinds: dict[_Group, list[CostModel]] = {}

    def of(
        self, role: str, costs: ReplicaCosts | None, machine: str = "", measured: Measurement | None = None
    ) -> CostModel:
        """The common costs of a replica's kind. `costs`: configured ones, which no measurement changes."""
        known = self._of_machine((role, costs, machine))
        if costs is not None or measured is None or not measured.is_usable:
            if not known:
                known.append(CostModel(costs))
            return known[0]
        near = min(known, key=measured.distance, default=None)
        if near is None or measured.distance(near) > math.log(_DIFFERENT):
            if near is None:
                near = CostModel(DEFAULT_COSTS.slower(measured.ratio(DEFAULT_COSTS)))
            else:
                # The first kind's lessons from long prompts hold for the others too, but for their speed.
                near = CostModel(None, known[0], measured.ratio(known[0].costs))
            known.append(near)
            del known[:-_MOST_OF_MACHINE]
        return near

    def begin(self, role: str, machine: str, costs: ReplicaCosts) -> CostModel | None:
        """Begin a kind of a machine with known costs. None if it has too many."""
        known = self._of_machine((role, None, machine))
        if len(known) >= _MOST_OF_MACHINE:
            return None
        known.append(CostModel(costs))
        return known[-1]

    def of_machines(self) -> Iterator[tuple[str, str, CostModel]]:
        """Role, machine and costs of each kind whose machine is known and whose costs are not configured."""
        for (role, costs, machine), known in self._kinds.items():
            if machine and costs is None:
                yield from ((role, machine, one) for one in known)

    def _of_machine(self, group: _Group) -> list[CostModel]:
        """The kinds of one machine. Those of the machine that was unused for longest are forgotten if there are too many."""
        self._kinds[group] = known = self._kinds.pop(group, [])
        while len(self._kinds) > MOST_MACHINES:
            del self._kinds[next(iter(self._kinds))]
        return known
