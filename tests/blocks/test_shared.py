"""Chains that texts share."""

from __future__ import annotations

from array import array
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from foreword.blocks.common_prefixes import common_prefixes

SIZE = 2
Texts = st.lists(st.lists(st.integers(0, 2), max_size=9), max_size=12)


@given(Texts)
def test_users_are_counted(texts: list[list[int]]) -> None:
    """Each prefix is listed once, with its full blocks and the number of texts that begin with it. Every prefix that two texts
    share is listed, or is the prefix of a longer one with the same users."""
    found = common_prefixes([array("I", text) for text in texts], SIZE, 1000)
    prefixes = Counter(tuple(text[: SIZE * blocks]) for text in texts for blocks in range(1, len(text) // SIZE + 1))
    users = {tuple(chain.tokens): chain.users for chain in found}
    assert len(users) == len(found)
    assert all(len(chain.tokens) == chain.blocks * SIZE for chain in found)
    for tokens, count in users.items():
        assert prefixes[tokens] == count >= 2
    for tokens, count in prefixes.items():
        if count > 1:
            assert any(known[: len(tokens)] == tokens and users[known] == count for known in users)


def test_the_best_first() -> None:
    """A short chain of many comes before a long one of two where it saves more, and no more are given than were asked for."""
    many = [array("I", [1, 1, 1, 1, 9, number]) for number in range(10)]
    two = [array("I", [2] * 8 + [number]) for number in range(2)]
    first, second = common_prefixes([*many, *two], SIZE, 5)
    assert (first.blocks, first.users) == (2, 10) and (second.blocks, second.users) == (4, 2)
    assert len(common_prefixes([*many, *two], SIZE, 1)) == 1
    assert common_prefixes([], SIZE, 5) == []


def test_a_growing_text_does_not_crowd_out_others() -> None:
    """Popularity of a chain counts what the chain adds, not what it continues: of a long conversation its first turn comes
    first."""
    turns = [array("I", [3] * 12 + [5] * (2 * turn)) for turn in range(6)]
    many = [array("I", [1, 1, 1, 1, 9, number]) for number in range(6)]
    first, second, *_ = common_prefixes([*turns, *many], SIZE, 8)
    assert (first.blocks, first.users) == (6, 6) and (second.blocks, second.users) == (2, 6)
