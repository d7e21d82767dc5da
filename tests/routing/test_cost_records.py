"""Learned costs are kept over restarts, and never taken from a number that cannot be."""

from __future__ import annotations

import math

import pytest
from test_cost_kinds import took

from foreword.routing.cost_kinds import CostKinds
from foreword.routing.cost_records import RECORD_SECONDS, CostRecord, CostRecords
from foreword.routing.costs import DEFAULT_COSTS

NOW = 1.8e9
STEPS = {"decode_base": 0.1, "decode_each": 1e-3}


def record(machine: str = "m", at: float = NOW, **more: float) -> CostRecord:
    return CostRecord("both", machine, at, **{"prefill": 1e-3, "first": 0.05, "attention": 3e-8} | STEPS | more)


def test_what_was_learned_is_kept() -> None:
    """A kind that has learned is restored with its costs: a replica of that machine and speed has them at once. One that
    did not learn again keeps its record and its age."""
    kinds = CostKinds()
    model = kinds.of("both", None, "m", took(2.0))
    for number in range(48):
        tokens = 500 + 100 * number
        model.observe_first_token(tokens, 0, 0.05 + 1e-3 * tokens)
    unread = kinds.of("both", None, "prompts that were not read", took(2.0))
    for _ in range(48):
        unread.observe_first_token(1, 0, 0.5)
    kept = CostRecords(kinds).records(NOW)
    assert [one.machine for one in kept] == ["m"]
    again = CostKinds()
    records = CostRecords(again)
    records.restore(kept, NOW + 60)
    assert again.of("both", None, "m", took(2.1)).costs.prefill == pytest.approx(model.costs.prefill)
    assert again.of("both", None, "m").costs.prefill == pytest.approx(1e-3, rel=0.05)
    assert records.records(NOW + 60) == kept
    assert records.records(NOW + 2 * RECORD_SECONDS) == []


@pytest.mark.parametrize(
    "odd",
    [
        record(at=NOW + 10),
        record(at=NOW - RECORD_SECONDS - 1),
        record(machine=""),
        record(machine="x" * 5000),
        record(prefill=0.0),
        record(prefill=math.nan),
        record(first=-1.0),
        record(decode_base=math.inf),
        record(attention=1e9),
    ],
)
def test_odd_records_are_ignored(odd: CostRecord) -> None:
    """Records that are old, of the future or of impossible costs leave the general costs, and do not stay."""
    kinds = CostKinds()
    records = CostRecords(kinds)
    records.restore([odd], NOW)
    assert kinds.of("both", None, odd.machine).costs == DEFAULT_COSTS
    assert records.records(NOW) == []
