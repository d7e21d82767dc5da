"""Admission of blocks to a tier: every one, at the second use, of prompts, of long prompts, and within a rate of writes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

import pytest

from foreword.conformance import SMALL_PAYLOAD, make_frames, names_of, present, soon
from foreword.errors import StoreConfigError
from foreword.store.frame import HEADER_BYTES, Frame
from foreword.store.memory.memory_store import MemoryStore
from foreword.store.tier_admission import AdmissionRule
from foreword.store.tier_rules import BlockUse
from foreword.store.tiered import TieredStore
from foreword.store.urls import open_store, parse

SIZE = HEADER_BYTES + SMALL_PAYLOAD


class Clock:
    """A clock that tests advance."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def opened(rule: AdmissionRule, clock: Clock | None = None) -> TieredStore:
    """A tier that takes all blocks, and one with a rule."""
    stores = [MemoryStore(1 << 20, label="all"), MemoryStore(1 << 20, label="some")]
    return TieredStore(stores, clock=clock or Clock(), rules=[None, rule])


def taken(store: TieredStore, frames: Sequence[Frame], use: BlockUse) -> list[bool]:
    """Blocks that the tier with the rule takes."""
    found: list[bool] = []
    for tiers, low, high in store.admitted([one.header for one in frames], use):
        assert use.again or 0 in tiers
        found += [1 in tiers] * (high - low)
    return found


def test_second_use() -> None:
    """A block is taken when it is computed or used for the second time, and not offered again afterwards."""
    store, chain = opened(AdmissionRule("second")), make_frames(1, 6, SMALL_PAYLOAD)
    assert taken(store, chain[:4], BlockUse()) == [False] * 4
    assert taken(store, chain[:2], BlockUse(again=True)) == [True] * 2
    assert taken(store, chain, BlockUse()) == [True] * 4 + [False] * 2
    assert taken(store, chain[:4], BlockUse(again=True)) == [False] * 4
    assert store.tiers[1].counters.refused == {"first_use": 6}


def test_put_writes_what_the_tier_takes() -> None:
    """`put` of the tiered store writes a block at its second use into the tier with the rule, at once into the other."""
    store, chain = opened(AdmissionRule("second")), make_frames(1, 3, SMALL_PAYLOAD)
    for expected in (False, True):
        assert store.put(chain, deadline=soon()) == 3
        assert present(store.tiers[0].store, chain) == [True] * 3
        assert present(store.tiers[1].store, chain) == [expected] * 3


def test_prompts_and_long_prompts() -> None:
    """No block of answers, and of short prompts, is taken, until a later prompt has these blocks."""
    chain = make_frames(1, 6, SMALL_PAYLOAD)
    store = opened(AdmissionRule("prompts", min_tokens=64))
    assert taken(store, chain[:3], BlockUse(48, 16)) == [False] * 3
    assert taken(store, chain[:3], BlockUse(100, 16, again=True)) == [True] * 3
    assert taken(store, chain[3:], BlockUse(70, 16)) == [True, False, False], "the fourth block ends at token 64"
    assert taken(store, chain, BlockUse(100, 16, again=True)) == [False] * 4 + [True] * 2
    assert store.tiers[1].counters.refused == {"short": 3, "answer": 2}


def test_promotions() -> None:
    """A block that was loaded from a slower tier has been used again, so it is taken."""
    store, chain = opened(AdmissionRule("second", min_tokens=1000)), make_frames(1, 3, SMALL_PAYLOAD)
    assert taken(store, chain, BlockUse(promotion=True)) == [True] * 3


def test_write_rate() -> None:
    """Blocks beyond the rate are refused, with the rest of their chain, and the next second has room again."""
    clock = Clock()
    store = opened(AdmissionRule(write_rate=10 * SIZE), clock)
    chain = make_frames(1, 30, SMALL_PAYLOAD)
    assert taken(store, chain[:12], BlockUse()) == [True] * 10 + [False] * 2
    clock.now += 0.5
    assert taken(store, chain[12:], BlockUse()) == [False] * 18, "no lookup would find them"
    assert taken(store, make_frames(2, 9, SMALL_PAYLOAD), BlockUse()) == [True] * 5 + [False] * 4
    clock.now += 100.0
    assert taken(store, chain, BlockUse(again=True)) == [False] * 10 + [True] * 10 + [False] * 10
    assert store.tiers[1].counters.refused == {"rate": 3, "gap": 1 + 18 + 3 + 9}


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tier remembers the most recent blocks and forgets older ones."""
    monkeypatch.setattr("foreword.store.tier_admission._REMEMBERED", 16)
    store = opened(AdmissionRule("second"))
    first, last = make_frames(1, 4, SMALL_PAYLOAD), make_frames(2, 4, SMALL_PAYLOAD)
    for chain in (first, *(make_frames(seed, 8, SMALL_PAYLOAD) for seed in range(3, 8)), last):
        assert not any(taken(store, chain, BlockUse()))
    assert taken(store, last, BlockUse()) == [True] * 4
    assert taken(store, first, BlockUse()) == [False] * 4


def test_urls() -> None:
    """Every URL of a store that is written accepts the rules. Wrong ones are refused."""
    url = parse("disk:///x?admit=second&min_tokens=512&write_rate=20MB&size=1GiB")
    assert url.rule == AdmissionRule("second", 512, 20_000_000) and url.options == {"size": "1GiB"}
    assert parse("memory://").rule is None
    for wrong, why in (
        ("memory://?admit=third", "every, second, prompts"),
        ("memory://?min_tokens=many", "min_tokens"),
        ("memory://?write_rate=-1", "write_rate"),
        ("disk:///x?read_only=1&admit=second", "nothing is written"),
        ("peer://host:1?write_rate=1MB", "nothing is written"),
    ):
        with pytest.raises(StoreConfigError, match=why):
            parse(wrong)
    with closing(open_store(["memory://?size=1MiB&admit=second"])) as store:
        chain = make_frames(1, 3, SMALL_PAYLOAD)
        assert store.put(chain, deadline=soon()) == 0 and store.put(chain, deadline=soon()) == 3
        assert store.lookup(names_of(chain), deadline=soon()) == 3
