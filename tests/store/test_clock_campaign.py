"""Short campaigns of three servers with one wrong clock, and a test of the campaign itself."""

from __future__ import annotations

import time

import pytest
from clock_campaign import SKEWS, run

from foreword.store.shared_records import SharedRecords


@pytest.mark.parametrize("operations", [60, pytest.param(2000, marks=pytest.mark.slow)])
def test_wrong_clocks_change_nothing(operations: int) -> None:
    """Every answer is as with right clocks: blocks, shares, pins, retentions, quarantine, records; erasures leave nothing."""
    rows = run(operations, seed=operations)
    assert rows.keys() == SKEWS.keys()
    for label, row in rows.items():
        assert row["left"] == 0 and row["quarantine kept"] and row["erase"], (label, row)
        assert not {verb: count for verb, count in row.items() if verb.endswith("differs") and count}, label


def test_the_campaign_notices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that ends records by its own wall clock is reported."""
    real = time.time()

    def left(self: SharedRecords, key: str, value: object) -> float:
        ends = getattr(value, "until", None) or getattr(value, "expires", None)
        return 3600.0 if ends is None else ends - time.time()

    monkeypatch.setattr(SharedRecords, "left", left)
    rows = run(60, seed=60)
    assert abs(time.time() - real) < 3600, "the clocks of the servers are their own"
    assert rows["right"]["look differs"] == 0 and rows["a year ahead"]["look differs"] > 0
