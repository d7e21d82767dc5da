"""A short campaign of almost right requests at every front."""

from __future__ import annotations

from random import Random

import pytest
from fuzz_campaign import run
from fuzz_requests import fuzz_request


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_short_campaign() -> None:
    """None of 3,000 requests to server, router and picker is answered with a 5xx of ours, none that is well-formed ends without
    an answer, none leaves a traceback in the log or a block in use."""
    rows = run(3000, seed=1)
    assert [row.label for row in rows] == ["server", "router", "picker"]
    for row in rows:
        assert row.good and row.requests == 1000, row
        assert row.of("2") > 100 or row.statuses["answered"] > 900, "too little is understood to show anything"


def test_a_seed_repeats() -> None:
    """Equal seeds make equal requests."""
    first, second = Random(5), Random(5)
    for _ in range(200):
        assert fuzz_request(first) == fuzz_request(second)
