"""The contracts of bounded mappings: with a limit in bytes, over seeded sequences of operations, and with one in entries."""

from __future__ import annotations

import copy
from random import Random

import pytest

from foreword.blocks.bounded import Bounded
from foreword.newest import Newest


def size(key: object, value: bytes) -> int:
    return 400 + len(value)


@pytest.mark.parametrize("seed", range(20))
def test_never_more_than_the_limit(seed: int) -> None:
    """Bytes are those of the entries, and at most the limit, after every operation; a key has the value that was set last, or
    none. Each entry that leaves because of the limit is told, once."""
    draw, limit = Random(seed), 20_000
    dropped: list[int] = []
    kept: Bounded[int, bytes] = Bounded(
        limit, size=size, owner=lambda key: key % 3, most=40, dropped=lambda key, value: dropped.append(key)
    )
    truth: dict[int, bytes] = {}
    for _ in range(2_000):
        key, action = draw.randrange(60), draw.random()
        if action < 0.6:
            value = draw.randbytes(draw.choice((0, 10, 1_000, 30_000)))
            truth[key] = value
            kept[key] = value
        elif action < 0.8:
            assert kept.use(key) == kept.get(key) == (truth[key] if key in kept else None)
        elif key in kept:
            del kept[key]
            del truth[key]
        for one in dropped:
            assert one not in kept and truth.pop(one) is not None
        dropped.clear()
        assert dict(kept) == truth and len(kept) == len(truth) <= 40
        assert kept.bytes == sum(size(*one) for one in truth.items()) <= limit
        assert sorted(value for owner in range(3) for value in kept.newest(owner)) == sorted(truth.values())


def test_the_least_recently_used_leaves_first() -> None:
    kept: Bounded[str, str] = Bounded(3, size=lambda key, value: 1)
    for key in "abc":
        kept[key] = key
    assert kept.use("a") == "a"
    kept["d"] = "d"
    assert list(kept.newest(None)) == ["d", "a", "c"]
    kept["c"] = "new"
    kept["e"] = "e"
    assert set(kept) == {"d", "c", "e"}


def test_an_owner_within_its_share_loses_nothing() -> None:
    """However much others set."""
    kept: Bounded[tuple[str, int], int] = Bounded(100, size=lambda key, value: value, owner=lambda key: key[0])
    for number in range(5):
        kept["ann", number] = 10
    for number in range(500):
        kept["bob", number] = 10
    assert sorted(number for who, number in kept if who == "ann") == list(range(5))
    assert sorted(number for who, number in kept if who == "bob") == list(range(495, 500))
    kept["ann", 5] = 10  # beyond the share
    assert sorted(number for who, number in kept if who == "ann") == [1, 2, 3, 4, 5]


def test_an_entry_beyond_the_limit_is_not_kept() -> None:
    """And takes the place of no other; what had its key before is gone."""
    kept: Bounded[str, bytes] = Bounded(10_000, size=size)
    kept["a"], kept["b"] = b"1", b"2"
    kept["a"] = bytes(20_000)
    assert dict(kept) == {"b": b"2"}


def test_an_entry_that_has_grown_is_counted_anew() -> None:
    kept: Bounded[str, list[bytes]] = Bounded(5_000, size=lambda _, value: 400 + sum(map(len, value)))
    kept["a"], kept["b"] = [], []
    kept["b"].append(bytes(4_300))
    kept.change("b")
    assert set(kept) == {"b"} and 4_300 < kept.bytes <= 5_000


@pytest.mark.parametrize("seed", range(5))
def test_with_a_window_it_is_full_after_that_many_requests(seed: int) -> None:
    """However few of the requests set something: exactly those entries are kept that were set or used within the window."""
    draw, window, left = Random(seed), 500, set[int]()
    kept: Bounded[int, int] = Bounded(
        1 << 20, size=lambda *_: 1, owner=lambda key: key % 3, window=window, dropped=lambda key, value: left.add(key)
    )
    used: dict[int, int] = {}
    for number in range(5_000):
        action = draw.random()
        if action < 0.05 and kept:
            again = draw.choice(list(kept))
            assert kept.use(again) == again
            used[again] = number
            continue
        if action < 0.1:
            kept[number] = used[number] = number
        else:
            kept.passed()
        assert set(kept) == {key for key, at in used.items() if at > number - window} == set(used) - left
    assert left


def test_the_newest_entries_are_kept() -> None:
    """An entry that is set again is new again, however it is set. Reading and removing change no order."""
    kept: Newest[str, int] = Newest(3)
    for number, key in enumerate("abca"):
        kept[key] = number
    assert kept["b"] == 1 and kept.get("c") == 2
    kept["d"] = 4
    assert list(kept.items()) == [("c", 2), ("a", 3), ("d", 4)]
    assert kept.pop("c") == 2
    kept |= {"e": 5, "f": 6}
    assert list(kept) == ["d", "e", "f"]
    assert kept.setdefault("g", 7) == 7 and list(kept) == ["e", "f", "g"]
    again = copy.deepcopy(kept)
    again["h"] = 8
    assert list(again) == ["f", "g", "h"] and list(kept) == ["e", "f", "g"]
