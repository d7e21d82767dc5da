"""The learned cost model: accurate in spite of outliers, sane without data."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreword.routing.costs import CostModel, ReplicaCosts, RobustLine, pairs


@settings(max_examples=50, deadline=None)
@given(st.floats(0.0, 0.1), st.floats(1e-6, 1e-2), st.integers(0, 2**32))
def test_a_line_is_found_in_spite_of_outliers(base: float, slope: float, seed: int) -> None:
    """Predictions are within 20 % over the sampled range, with one outlier in six samples and 2 % noise."""
    rng, line = random.Random(seed), RobustLine(0.02, 2e-4)
    for _ in range(200):
        x = rng.uniform(100, 10_000)
        y = (base + slope * x) * rng.uniform(0.98, 1.02)
        line.add(x, y * (50 if rng.random() < 1 / 6 else 1))
    for x in (1_000, 5_000, 10_000):
        assert line.base + line.slope * x == pytest.approx(base + slope * x, rel=0.2)


def test_samples_of_one_size_scale_the_prior() -> None:
    """If all samples have the same x, the prediction there is right."""
    line = RobustLine(0.02, 2e-4)
    for _ in range(50):
        line.add(1000, 1.0)
    assert line.base + line.slope * 1000 == pytest.approx(1.0)
    assert line.base > 0 and line.slope > 0


@given(st.lists(st.tuples(st.floats(), st.floats()), max_size=60))
def test_invalid_samples_are_ignored(samples: list[tuple[float, float]]) -> None:
    """Whatever is measured, the line stays finite, with a base of at least 0 and a slope above 0."""
    line = RobustLine(0.02, 2e-4)
    for x, y in samples:
        line.add(x, y)
    assert 0 <= line.base < float("inf")
    assert 0 < line.slope < float("inf")


def test_a_change_is_followed() -> None:
    """A replica that becomes three times slower is estimated so within sixty requests."""
    rng, model = random.Random(5), CostModel()
    for factor in (1.0, 3.0):
        for _ in range(60):
            tokens = rng.randrange(50, 8000)
            model.observe_first_token(tokens, 0, 0.03 + factor * 1e-4 * tokens)
        assert model.costs.prefill == pytest.approx(factor * 1e-4, rel=0.05)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([0.0, 2e-9, 2e-8]))
def test_attention_cost_is_learned(seed: int, attention: float) -> None:
    """Long prompts cost more per token: after a hundred requests with one outlier in ten, an estimate is within 10
    %, or within 1 % of what the longest prompts take."""
    rng, model = random.Random(seed), CostModel()
    truth = ReplicaCosts(prefill=1e-4, first=0.03, attention=attention)
    for _ in range(100):
        tokens, before = rng.randrange(50, 60_000), rng.choice((0, 0, rng.randrange(30_000)))
        seconds = (truth.first + truth.compute(tokens, before)) * rng.uniform(0.98, 1.02)
        wild = 20 if rng.random() < 0.1 else 1
        model.observe_first_token(tokens, 0, seconds * wild, pairs=pairs(tokens, before))
    noise = 0.01 * truth.compute(60_000, 0)
    for tokens in (2_000, 20_000, 60_000):
        costs = model.costs
        expected = truth.first + truth.compute(tokens, 0)
        assert costs.first + costs.compute(tokens, 0) == pytest.approx(expected, rel=0.1, abs=noise)


def test_decode_interference_is_not_counted_twice() -> None:
    """TTFTs that are higher because 50 sequences decode do not change the learned prefill cost."""
    prior = ReplicaCosts(step_tokens=512, decode_each=4e-4)
    rng, model = random.Random(5), CostModel(prior)
    for _ in range(60):
        tokens = rng.randrange(500, 8000)
        model.observe_first_token(tokens, 50, 0.03 + 1e-4 * tokens + prior.interference(tokens, 50))
    assert model.costs.prefill == pytest.approx(1e-4, rel=0.05)


def test_decoding_is_learned() -> None:
    """The inter-token latency is learned as a line over the number of decoding sequences."""
    rng, model = random.Random(5), CostModel()
    for _ in range(60):
        running = rng.randrange(1, 64)
        model.observe_decode(running, 20, 20 * (0.01 + 5e-4 * running))
    costs = model.costs
    assert (costs.decode_base, costs.decode_each) == (pytest.approx(0.01), pytest.approx(5e-4))


def test_only_a_replica_that_contradicts_the_others_has_costs_of_its_own() -> None:
    """Equal replicas with different prompts have equal costs, although the true costs are not linear. One that is three
    times slower is known to be after ten requests, and until it is forgotten."""
    rng, common = random.Random(5), CostModel()
    short, long, slow = (CostModel(common=common) for _ in range(3))
    truth = ReplicaCosts(prefill=4e-5, first=0.01, attention=4e-8)

    def observe(model: CostModel, tokens: int, factor: float = 1.0) -> None:
        work, noise = pairs(tokens, 500), rng.uniform(0.9, 1.1)
        seconds = factor * noise * (truth.first + truth.compute_pairs(tokens, work))
        model.observe_first_token(tokens, 0, seconds, pairs=work)

    for _ in range(100):
        observe(short, rng.randrange(20, 300))
        observe(long, rng.randrange(1000, 3000))
    assert short.costs == long.costs == common.costs
    for _ in range(10):
        observe(slow, rng.randrange(20, 3000), factor=3.0)
    expected = slow.costs.first + slow.costs.compute(1500, 500)
    assert expected > 2 * (common.costs.first + common.costs.compute(1500, 500))
    slow.forget()
    assert slow.costs == common.costs


@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_a_token_costs_something_where_prompts_do_not_show_it(noise: float) -> None:
    """Where TTFT does not grow with the prompt, a token costs 1/64 of its prior cost, estimates are still right, and the cost
    does not count as measured. It does once TTFTs grow."""
    rng, prior, model = random.Random(3), ReplicaCosts(), CostModel()
    assert not model.prefill_measured
    for _ in range(200):
        model.observe_first_token(rng.randrange(10, 8000), 0, 0.16 * rng.uniform(1 - noise, 1 + noise))
    assert model.costs.prefill >= prior.prefill / 64
    assert model.costs.first + model.costs.compute(4000, 0) == pytest.approx(0.16, rel=0.1)
    assert noise or not model.prefill_measured
    for _ in range(200):
        tokens = rng.randrange(10, 8000)
        model.observe_first_token(tokens, 0, 0.02 + 1e-4 * tokens)
    assert model.prefill_measured and model.costs.prefill == pytest.approx(1e-4, rel=0.05)
