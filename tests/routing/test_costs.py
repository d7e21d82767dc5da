"""Learned costs: they come near the truth, in spite of outliers, and are sane before there is any data."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreword.routing.costs import Learner, Line, LoadCost, ReplicaCosts, pairs
from foreword.routing.directory import Tier


@settings(max_examples=50, deadline=None)
@given(st.floats(0.0, 0.1), st.floats(1e-6, 1e-2), st.integers(0, 2**32))
def test_a_line_is_found_in_spite_of_outliers(base: float, slope: float, seed: int) -> None:
    """With one sample in six wild, and 2 % of noise, predictions are right within a fifth where samples were."""
    rng, line = random.Random(seed), Line(0.02, 2e-4)
    for _ in range(200):
        x = rng.uniform(100, 10_000)
        y = (base + slope * x) * rng.uniform(0.98, 1.02)
        line.note(x, y * (50 if rng.random() < 1 / 6 else 1))
    for x in (1_000, 5_000, 10_000):
        assert line.at(x) == pytest.approx(base + slope * x, rel=0.2)


def test_samples_of_one_size_scale_the_prior() -> None:
    """Where all requests are alike, what they take is right, though nobody can tell its parts."""
    line = Line(0.02, 2e-4)
    for _ in range(50):
        line.note(1000, 1.0)
    assert line.at(1000) == pytest.approx(1.0)
    assert line.base > 0 and line.slope > 0


@given(st.lists(st.tuples(st.floats(), st.floats()), max_size=60))
def test_nonsense_does_not_poison(samples: list[tuple[float, float]]) -> None:
    """Whatever is measured, the line stays finite, its base at least 0 and its slope above 0."""
    line = Line(0.02, 2e-4)
    for x, y in samples:
        line.note(x, y)
    assert 0 <= line.base < float("inf")
    assert 0 < line.slope < float("inf")


def test_a_change_is_followed() -> None:
    """A replica that becomes three times as slow is priced so within fifty requests."""
    rng, learner = random.Random(5), Learner()
    for factor in (1.0, 3.0):
        for _ in range(60):
            tokens = rng.randrange(50, 8000)
            learner.note_first_token(tokens, 0, 0.03 + factor * 1e-4 * tokens)
        assert learner.costs.prefill == pytest.approx(factor * 1e-4, rel=0.05)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([0.0, 2e-9, 2e-8]))
def test_what_context_costs_is_learned(seed: int, attention: float) -> None:
    """Long prompts cost more for each token: after a hundred requests, with one sample in ten wild, a price is right within a
    tenth, or within a hundredth of what the longest prompts take."""
    rng, learner = random.Random(seed), Learner()
    truth = ReplicaCosts(prefill=1e-4, first=0.03, attention=attention)
    for _ in range(100):
        tokens, before = rng.randrange(50, 60_000), rng.choice((0, 0, rng.randrange(30_000)))
        seconds = (truth.first + truth.compute(tokens, before)) * rng.uniform(0.98, 1.02)
        wild = 20 if rng.random() < 0.1 else 1
        learner.note_first_token(tokens, 0, seconds * wild, pairs=pairs(tokens, before))
    noise = 0.01 * truth.compute(60_000, 0)
    for tokens in (2_000, 20_000, 60_000):
        costs = learner.costs
        expected = truth.first + truth.compute(tokens, 0)
        assert costs.first + costs.compute(tokens, 0) == pytest.approx(expected, rel=0.1, abs=noise)


def test_what_others_take_is_not_counted_twice() -> None:
    """First tokens that came later because 50 others decoded say nothing about the speed of computing."""
    prior = ReplicaCosts(step_tokens=512, decode_each=4e-4)
    rng, learner = random.Random(5), Learner(prior)
    for _ in range(60):
        tokens = rng.randrange(500, 8000)
        learner.note_first_token(tokens, 50, 0.03 + 1e-4 * tokens + prior.interference(tokens, 50))
    assert learner.costs.prefill == pytest.approx(1e-4, rel=0.05)


def test_decoding_and_tiers_are_learned() -> None:
    """A step's time by its batch, a tier's by its tokens, and the tiers apart."""
    rng, learner = random.Random(5), Learner()
    for _ in range(60):
        running, tokens = rng.randrange(1, 64), rng.randrange(100, 9000)
        learner.note_decode(running, 0.01 + 5e-4 * running)
        learner.note_load(Tier.DISK, tokens, 0.004 + 3e-5 * tokens)
        learner.note_transfer(tokens, 0.001 + 7e-5 * tokens)
    costs = learner.costs
    assert (costs.decode_base, costs.decode_each) == (pytest.approx(0.01), pytest.approx(5e-4))
    assert costs.load(Tier.DISK) == LoadCost(pytest.approx(3e-5), pytest.approx(0.004))
    assert costs.load(Tier.HOST) == ReplicaCosts().load(Tier.HOST)
    assert costs.transfer == LoadCost(pytest.approx(7e-5), pytest.approx(0.001))
