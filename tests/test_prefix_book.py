"""The bookkeeping of named prefixes (R15 to R18), without an engine."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from foreword.errors import BadRequest, PrefixBudgetExceeded, UnknownPrefix
from foreword.prefixes import PrefixBook

BLOCK_BYTES, BLOCK_SIZE = 100, 4


class Pins:
    """Notes which blocks were given back."""

    def __init__(self) -> None:
        self.unpinned: list[int] = []

    def unpin(self, blocks: Sequence[int]) -> None:
        self.unpinned += blocks


def book(budget: int = 1000) -> tuple[PrefixBook, Pins]:
    pins = Pins()
    return PrefixBook(budget, BLOCK_BYTES, BLOCK_SIZE, pins.unpin), pins


def register(prefixes: PrefixBook, name: str, blocks: list[int], *, salt: bytes = b"", replacing: bool = False) -> None:
    tokens = list(range(len(blocks) * BLOCK_SIZE))
    prefixes.promise(name, tokens, salt=salt, replacing=replacing)
    prefixes.keep(name, "text", name, tokens, blocks, salt=salt)


def test_r15_any_number_of_names() -> None:
    """Every registered prefix is listed by name with its size, version and tokens."""
    prefixes, _ = book()
    for i, name in enumerate(("b", "a", "c")):
        register(prefixes, name, [2 * i, 2 * i + 1])
    assert [(p.name, p.version, p.bytes, len(p.tokens)) for p in prefixes.list()] == [
        ("a", 1, 200, 8),
        ("b", 1, 200, 8),
        ("c", 1, 200, 8),
    ]


def test_r16_a_use_is_counted() -> None:
    """A request that names a prefix gets its tokens and is counted, with the tokens that it found cached."""
    prefixes, _ = book()
    register(prefixes, "manual", [1, 2])
    assert prefixes.use("manual", "text").tokens == tuple(range(8))
    prefixes.note_hit("manual", 100)
    found = prefixes.get("manual")
    assert (found.uses, found.hit_tokens) == (1, 8)
    assert found.last_used is not None


def test_r16_the_other_kind_is_refused() -> None:
    """A text prefix cannot stand before a chat, and the error says where it can."""
    prefixes, _ = book()
    register(prefixes, "manual", [1])
    with pytest.raises(BadRequest, match="/v1/completions"):
        prefixes.use("manual", "messages")


def test_r17_unknown_names_are_errors_with_close_names() -> None:
    """A name that was never registered is an error that lists close ones, of the same tenant only."""
    prefixes, _ = book()
    register(prefixes, "manual", [1])
    register(prefixes, "manuals", [2], salt=b"other")
    with pytest.raises(UnknownPrefix, match=r"'manual'\?$") as caught:
        prefixes.use("manul", "text")
    assert caught.value.status == 404


def test_r18_the_budget_holds_also_while_prefixes_are_computed() -> None:
    """What is pinned and what is being computed never exceed the budget; a promise that is broken gives its share back."""
    prefixes, _ = book(budget=500)
    register(prefixes, "a", [1, 2, 3])
    promised = prefixes.promise("b", range(8), salt=b"", replacing=False)
    with pytest.raises(PrefixBudgetExceeded, match="0 are left"):
        prefixes.promise("c", range(4), salt=b"", replacing=False)
    prefixes.break_promise(promised)
    assert prefixes.promise("c", range(8), salt=b"", replacing=False) == 200


def test_r18_a_new_version_replaces_the_old() -> None:
    """Replacing makes the next version and gives the old one's blocks back; adding a name twice is refused."""
    prefixes, pins = book()
    register(prefixes, "manual", [1, 2])
    with pytest.raises(BadRequest, match="PUT"):
        register(prefixes, "manual", [3])
    register(prefixes, "manual", [3], replacing=True)
    assert prefixes.get("manual").version == 2
    assert pins.unpinned == [1, 2]
    assert prefixes.pinned_bytes == 100


def test_r18_removal_gives_the_blocks_back() -> None:
    """A removed prefix is unknown, and its blocks are no longer pinned."""
    prefixes, pins = book()
    register(prefixes, "manual", [4, 5])
    prefixes.remove("manual")
    assert pins.unpinned == [4, 5]
    assert prefixes.pinned_bytes == 0
    with pytest.raises(UnknownPrefix):
        prefixes.get("manual")


@pytest.mark.parametrize("name", ["", "a b", "../x", "x" * 129, "-a"])
def test_bad_names(name: str) -> None:
    """A name that would not fit into a URL's path is refused."""
    prefixes, _ = book()
    with pytest.raises(BadRequest, match="letters, digits"):
        prefixes.promise(name, [1], salt=b"", replacing=False)
