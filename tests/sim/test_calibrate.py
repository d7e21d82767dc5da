"""Calibration: the fit, and the measurement of a real engine."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreword.errors import ConfigError
from foreword.routing.costs import pairs
from foreword.sim.calibrate import CalibrationSetup, StepSample, fit, measure
from foreword.sim.costs import read_profile


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.booleans(), st.booleans())
def test_the_fit_finds_what_steps_cost(seed: int, with_attention: bool, with_context: bool) -> None:
    """The fitted cost of a token is right within 10 % with 1 % noise, that of every step within 5 %, and none is negative."""
    rng = random.Random(seed)
    base, token, each = 0.005, 1e-4, 5e-4
    attention, context = (2e-8 if with_attention else 0.0), (1e-7 if with_context else 0.0)
    times: list[tuple[StepSample, float]] = []
    for count in (16, 64, 256, 512):
        for before in (0, 512, 1024, 3584):
            sample = StepSample(count, pairs(count, before), 0, 0)
            times.append((sample, base + token * count + attention * sample.pairs))
    for batch in (1, 2, 4, 8, 16):
        for length in (64, 2048):
            times.append((StepSample(0, 0, batch, batch * length), base + each * batch + context * batch * length))
    found = fit([(sample, seconds * rng.uniform(0.99, 1.01)) for sample, seconds in times])
    costs = found.costs
    assert costs.prefill == pytest.approx(token, rel=0.1)
    assert found.median_error < 0.02 and found.worst_error < 0.05
    assert min(costs.base, costs.attention, costs.decode_each, costs.decode_context) >= 0


def test_noise_does_not_make_costs_lower() -> None:
    """The fitted costs of all steps together are the measured ones, with steps that take from half to twice their time."""
    rng = random.Random(1)
    sizes = [rng.randrange(1, 512) for _ in range(400)]
    times = [
        (StepSample(size, size**2 / 2, 1, 100), (2e-3 + 1e-4 * size) * rng.choice((0.5, 1.0, 2.0))) for size in sizes
    ]
    costs = fit(times).costs
    found = sum(costs.base + costs.decode_each + costs.prefill * size + costs.attention * size**2 / 2 for size in sizes)
    assert found == pytest.approx(sum(seconds for _, seconds in times), rel=0.05)


def test_insufficient_samples_are_refused() -> None:
    """Decoding steps alone do not determine the cost of a prefilled token."""
    with pytest.raises(ConfigError, match="do not determine"):
        fit([(StepSample(0, 0, 1, 100), 0.01), (StepSample(0, 0, 2, 200), 0.02)])


@pytest.mark.slow
def test_a_real_engine(tmp_path: Path) -> None:
    """Measuring the embedded model gives all costs, and the file can be read again and describes its origin. Where other work
    makes the times useless, it says so, and is repeated here."""
    said: list[str] = []
    for last in (False, False, False, True):
        try:
            profile = measure(CalibrationSetup(threads=1, longest=512, rounds=3, max_batch_tokens=256), said.append)
            break
        except ConfigError as error:
            assert "something else runs on this machine" in error.message and not last
    assert profile.costs.prefill > 0 and profile.costs.base + profile.costs.decode_each > 0
    assert profile.kv_bytes_per_token == 2304
    assert profile.about["longest_context"] == 512 and "stdlib-nano" in str(profile.about["model"])
    assert set(profile.about["loads"]) == {"memory", "disk", "shared"}
    assert any("round 3 of 3" in line for line in said)
    path = tmp_path / "costs.json"
    path.write_text(profile.to_json())
    assert read_profile(path) == profile


def test_setups_that_are_too_small_are_refused() -> None:
    """A context that is too short, or no round, is an error."""
    with pytest.raises(ConfigError, match="--longest"):
        CalibrationSetup(longest=100)
    with pytest.raises(ConfigError, match="--rounds"):
        CalibrationSetup(rounds=0)
