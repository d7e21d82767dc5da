"""Costs by kind of replica: known from the first request."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreword.routing.cost_kinds import MOST_MACHINES, CostKinds, Measurement
from foreword.routing.costs import DEFAULT_COSTS, CostModel, ReplicaCosts, pairs
from foreword.routing.fleet import Fleet
from foreword.routing.placement import PlacementQuery

SLOW = ReplicaCosts(prefill=1e-3, first=0.05, attention=3e-8, decode_base=0.1, decode_each=1e-3)


def took(seconds: float, tokens: int = 2000) -> Measurement:
    return Measurement(tokens, seconds)


def test_replicas_of_unequal_speed_have_their_costs_before_a_request() -> None:
    """Costs that were measured are expected; the same speed within a factor of 1.4 is one kind, which learns together; another
    machine never is."""
    kinds = CostKinds()
    fast, slow = kinds.of("both", None, "m", took(0.1)), kinds.of("both", None, "m", took(0.4))
    assert took(0.1).ratio(fast.costs) == pytest.approx(1) == took(0.4).ratio(slow.costs)
    assert slow.costs.decode_each == pytest.approx(4 * fast.costs.decode_each)
    assert kinds.of("both", None, "m", took(0.13)) is fast
    assert kinds.of("both", None, "m", took(0.3)) is slow
    assert kinds.of("both", None, "other", took(0.1)) is not fast
    assert kinds.of("prefill", None, "m", took(0.1)) is not fast


@pytest.mark.parametrize("speed", [1, 2, 4])
def test_a_short_measurement_tells_long_prompts_of_a_dense_model(speed: int) -> None:
    """A replica of a dense model, of any speed, that has computed only the prompt with which it was measured: prompts up to
    432,000 tokens, which take most of their time in attention, are expected to take half to twice as long as they do."""
    true = ReplicaCosts(prefill=1.1e-4, first=0.02, attention=2e-9).slower(speed)
    seconds = true.first + true.compute(2000, 0)
    expected = CostKinds().of("both", None, "m", took(seconds)).costs
    for tokens in (10_000, 100_000, 432_000):
        assert 0.5 < expected.compute(tokens, 0) / true.compute(tokens, 0) < 2


def test_a_model_without_quadratic_attention_is_overrated_until_it_computes_long_prompts() -> None:
    """A hybrid, linear or sliding-window model is expected to take up to six times as long for 432,000 tokens as it does, until
    prompts of different lengths have been computed: then within a tenth."""
    true = ReplicaCosts(prefill=1.1e-4, first=0.02, attention=0.0)
    model = CostKinds().of("both", None, "m", took(true.first + true.compute(2000, 0)))

    def error() -> float:
        return model.costs.compute(432_000, 0) / true.compute(432_000, 0)

    assert 1 < error() < 6
    for number in range(96):
        tokens = 500 + 1000 * (number % 48)
        model.observe_first_token(tokens, 0, true.first + true.compute(tokens, 0), pairs=pairs(tokens, 0))
    assert error() == pytest.approx(1, rel=0.1)


@pytest.mark.parametrize("measured", [None, took(0.0), took(math.inf), took(-1.0), took(math.nan), took(1.0, 0)])
def test_without_a_measurement_costs_are_those_of_the_machine(measured: Measurement | None) -> None:
    """A replica that was not measured, or of which a number cannot be, has the costs of others of its machine, else the general
    ones. Configured costs are never changed."""
    kinds = CostKinds()
    assert kinds.of("both", None, "new", measured).costs == DEFAULT_COSTS
    known = kinds.of("both", None, "m", took(0.4))
    assert kinds.of("both", None, "m", measured) is known
    assert kinds.of("both", SLOW, "m", took(0.4)).costs == SLOW


@given(st.lists(st.tuples(st.integers(0, 400), st.floats(1e-3, 1e3)), max_size=600))
def test_kinds_are_bounded(asked: list[tuple[int, float]]) -> None:
    """Whatever joins, no more than a bounded number of machines and of kinds of each is known, and what is asked for is
    always there."""
    kinds = CostKinds()
    for machine, seconds in asked:
        assert isinstance(kinds.of("both", None, f"m{machine}", took(seconds)), CostModel)
    assert len(kinds._kinds) <= MOST_MACHINES and all(len(one) <= 8 for one in kinds._kinds.values())


def test_an_overdue_prompt_is_an_observation() -> None:
    """While a prompt takes longer than its whole computation should, the replica is expected to be as much slower, before
    anything has ended there; one that is in time changes nothing, and neither does a prompt that has ended."""
    fleet = Fleet()
    for name in ("a", "b"):
        fleet.add(name, costs=ReplicaCosts(prefill=1e-3, first=0.0, decode_each=0.0, step_tokens=100))
    first = PlacementQuery((), 1000, 16)
    decision = fleet.place(first, 0.0)
    fleet.sent("1", first, decision, 0.0)

    def computing(now: float) -> dict[str, float]:
        return {one.replica: one.compute for one in fleet.place(PlacementQuery((), 500, 16), now).estimates}

    [other] = {"a", "b"} - {decision.replica}
    assert decision.replica is not None
    assert list(computing(1.05).values()) == pytest.approx([0.5, 0.5])
    late = computing(4.4)
    assert late[decision.replica] == pytest.approx(4 * 0.5) and late[other] == pytest.approx(0.5)
    fleet.first_token("1", 4.5)
    assert computing(4.6)[decision.replica] == pytest.approx(0.5)


def test_what_one_kind_learns_of_long_prompts_holds_for_the_slower_one() -> None:
    """A measurement is too short to show what attention costs. Once a fast replica has computed long prompts, a slow one of the
    same machine is expected to take as many times longer for these as for what was measured."""
    kinds = CostKinds()
    fast, slow = kinds.of("both", None, "m", took(0.25)), kinds.of("both", None, "m", took(1.0))
    for number in range(96):
        tokens = 500 + 1000 * (number % 48)
        work = pairs(tokens, 0)
        fast.observe_first_token(tokens, 0, 0.05 + 1e-4 * tokens + 2e-9 * work, pairs=work)
    assert fast.costs.attention == pytest.approx(2e-9, rel=0.1)
    for tokens in (2000, 20_000, 200_000):
        assert slow.costs.compute(tokens, 0) == pytest.approx(4 * fast.costs.compute(tokens, 0), rel=0.01)
