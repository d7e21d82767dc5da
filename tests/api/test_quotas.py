"""Rate limits and quotas of tenants."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreword.api.quotas import Bucket, Quota, Quotas
from foreword.errors import ConfigError
from foreword.request_errors import RateLimited


def test_requests_per_minute() -> None:
    """A tenant may send a minute's worth at once, then at the configured rate; the error says when to retry."""
    quotas = Quotas({"alice": Quota(requests=60)})
    for _ in range(60):
        quotas.admit("alice", 0.0)
    with pytest.raises(RateLimited, match="60 requests") as caught:
        quotas.admit("alice", 0.0)
    assert caught.value.retry_after == pytest.approx(1.0)
    quotas.admit("alice", 1.0)
    quotas.admit("bob", 1.0)


def test_tokens_are_charged_when_known() -> None:
    """A long request runs, and the next one waits until the debt is paid. A second charge adds the difference only."""
    quotas = Quotas({"*": Quota(tokens=600)})
    first = quotas.admit("alice", 0.0)
    quotas.charge(first, 1000, 0.0)
    quotas.charge(first, 1200, 0.0)
    with pytest.raises(RateLimited) as caught:
        quotas.admit("alice", 0.0)
    assert caught.value.retry_after == pytest.approx(60.1)
    quotas.admit("alice", 60.2)


def test_concurrent_requests() -> None:
    """A request that ends makes room for the next; other tenants are not concerned."""
    quotas = Quotas({"*": Quota(concurrent=1)})
    with quotas.admit("alice", 0.0):
        with pytest.raises(RateLimited, match="at most 1"):
            quotas.admit("alice", 0.0)
        quotas.admit("bob", 0.0)
    quotas.admit("alice", 0.0)


def test_continued_requests_are_not_refused() -> None:
    """A request that was admitted elsewhere runs on although its tenant has spent everything, and what is left of it counts."""
    quotas = Quotas({"ann": Quota(requests=1, tokens=10, concurrent=1)})
    with quotas.admit("ann", 0.0), quotas.admit("ann", 0.0, continued=True) as continued:
        quotas.charge(continued, 20, 0.0)
    with pytest.raises(RateLimited), quotas.admit("ann", 60.0):
        pass
    with quotas.admit("ann", 120.0):
        pass


def test_refused_requests_cost_nothing() -> None:
    """A request refused for one limit is not counted against another."""
    quotas = Quotas({"*": Quota(requests=2, concurrent=1)})
    with quotas.admit("alice", 0.0):
        for _ in range(5):
            with pytest.raises(RateLimited, match="run already"):
                quotas.admit("alice", 0.0)
    quotas.admit("alice", 0.0)


def test_many_tenants_take_bounded_memory() -> None:
    """Idle tenants are forgotten; a tenant with a running request is not."""
    quotas = Quotas({"*": Quota(concurrent=1)})
    quotas.admit("busy", 0.0)
    for number in range(20_000):
        quotas.finish(quotas.admit(f"tenant {number}", 0.0))
    assert len(quotas._accounts) <= 10_000
    with pytest.raises(RateLimited):
        quotas.admit("busy", 0.0)


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 50)), max_size=30))
def test_a_bucket_never_gives_more_than_its_rate(steps: list[tuple[float, float]]) -> None:
    """Whatever is taken when there is enough, the sum stays below a minute's worth plus the rate times the time."""
    bucket, now, taken = Bucket(60.0, 0.0), 0.0, 0.0
    for amount, pause in steps:
        now += pause
        if bucket.level(now) >= amount:
            bucket.take(amount, now)
            taken += amount
        assert taken <= 60.0 + now + 1e-6


def test_entries_of_the_configuration() -> None:
    """Entries name a tenant and its limits; a mistake is a ConfigError that shows the form."""
    quotas = Quotas.parse(["alice requests=1 tokens=10.5 concurrent=2", "* concurrent=1"])
    assert quotas._quotas["alice"] == Quota(1.0, 10.5, 2)
    for wrong in ("alice requests=0", "alice request=1", "alice tokens=-1", "alice tokens=many"):
        with pytest.raises(ConfigError, match="concurrent=N"):
            Quotas.parse([wrong])
