"""The book of named prefixes: names, versions, budget, use, tenants. No engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from foreword.errors import BadRequest, PrefixBudgetExceeded, UnknownPrefix
from foreword.prefixes.book import NamedPrefix, PrefixBook

BLOCK_BYTES, BLOCK = 100, 4


class Shelf:
    """A book, and the blocks that are pinned at this moment."""

    def __init__(self, budget: int = 1000) -> None:
        self.pinned: set[int] = set()
        self.book = PrefixBook(budget, lambda tokens: len(tokens) // BLOCK * BLOCK_BYTES, self._unpin)
        self._next = 0

    def _unpin(self, blocks: Sequence[int]) -> None:
        assert self.pinned.issuperset(blocks), "unpinned twice"
        self.pinned.difference_update(blocks)

    def reserve(self, name: str, length: int, *, salt: bytes = b"", replace: bool = False) -> int:
        return self.book.reserve(name, [7] * length, salt=salt, replace=replace)

    def add(self, name: str, length: int, *, salt: bytes = b"", replace: bool = False, **more: Any) -> NamedPrefix:
        """Reserve, compute, commit."""
        self.reserve(name, length, salt=salt, replace=replace)
        return self.commit(name, length, salt=salt, **more)

    def commit(
        self, name: str, length: int, *, salt: bytes = b"", kind: Any = "text", content: Any = "text"
    ) -> NamedPrefix:
        blocks = list(range(self._next, self._next + length // BLOCK))
        self._next += len(blocks)
        self.pinned.update(blocks)
        size, version = len(blocks) * BLOCK_BYTES, self.book.version(name, salt=salt) + 1
        prefix = NamedPrefix(name, version, kind, content, (7,) * length, 1.0, size, ready=True)
        return self.book.commit(prefix, blocks, reserved=size, salt=salt)


def test_registers() -> None:
    """A prefix that was kept is known by its name, with its size and without uses."""
    shelf = Shelf()
    made = shelf.add("rules", 10)
    assert made == shelf.book.get("rules")
    assert (made.version, made.bytes, made.uses, made.hit_tokens, made.last_used, made.ready) == (
        1,
        200,
        0,
        0,
        None,
        True,
    )
    assert made.tokens == (7,) * 10
    assert shelf.book.pinned_bytes == 200
    assert shelf.book.reserved_bytes == 0


@pytest.mark.parametrize("name", ["", "-a", ".a", "a b", "a/b", "ä", "a" * 129, "a\n", "../etc"])
def test_bad_names(name: str) -> None:
    """A name is letters, digits and a few marks, so that it can stand in an address."""
    with pytest.raises(BadRequest) as refusal:
        Shelf().reserve(name, 4)
    assert refusal.value.param == "name"


@pytest.mark.parametrize("name", ["a", "0", "A.b-c_d", "a" * 128])
def test_good_names(name: str) -> None:
    """All other names are fine."""
    assert Shelf().add(name, 4).name == name


def test_empty() -> None:
    """A prefix without tokens is refused."""
    with pytest.raises(BadRequest, match="empty"):
        Shelf().reserve("rules", 0)


def test_unknown_names() -> None:
    """An unknown name is an error that lists close names of the same tenant only."""
    shelf = Shelf()
    with pytest.raises(UnknownPrefix, match="None is known yet"):
        shelf.book.get("rules")
    shelf.add("house-rules", 4)
    shelf.add("house-rulez", 4, salt=b"other")
    for asked in (shelf.book.get, shelf.book.remove, lambda name: shelf.book.use(name, "text")):
        with pytest.raises(UnknownPrefix, match="Did you mean 'house-rules'") as refusal:
            asked("house-rule")
        assert "rulez" not in str(refusal.value)
        assert (refusal.value.status, refusal.value.code) == (404, "prefix_not_found")


def test_replacing() -> None:
    """A name is replaced only on purpose; the new version counts up, starts unused, and the old blocks go back."""
    shelf = Shelf()
    shelf.add("rules", 8)
    shelf.book.use("rules", "text")
    with pytest.raises(BadRequest, match="exists; replace it"):
        shelf.reserve("rules", 4)
    assert shelf.book.get("rules").version == 1
    made = shelf.add("rules", 4, replace=True)
    assert (made.version, made.uses, made.bytes) == (2, 0, 100)
    assert len(shelf.pinned) == 1
    assert shelf.add("new", 4, replace=True).version == 1
    # A name that was removed begins again.
    shelf.book.remove("rules")
    assert shelf.add("rules", 4).version == 1


def test_old_version_serves_until_the_new_one_is_ready() -> None:
    """While a new version is computed, the old one is still there and still counts."""
    shelf = Shelf(budget=300)
    shelf.add("rules", 8)
    shelf.reserve("rules", 4, replace=True)
    assert shelf.book.get("rules").version == 1
    assert shelf.book.pinned_bytes == 200
    with pytest.raises(PrefixBudgetExceeded):
        shelf.reserve("other", 4)
    shelf.commit("rules", 4)
    shelf.reserve("other", 8)


def test_budget() -> None:
    """What is promised counts as if it were pinned; what is broken or removed is free again."""
    shelf = Shelf(budget=1000)
    shelf.add("a", 20)
    size = shelf.reserve("b", 20)
    with pytest.raises(PrefixBudgetExceeded, match=r"needs 100 bytes, but of the 1,000 bytes .* 0 are left") as refusal:
        shelf.reserve("c", 4)
    assert (refusal.value.status, refusal.value.retry) == (409, False)
    assert shelf.reserve("tiny", 3) == 0
    shelf.book.release(size)
    shelf.add("c", 20)
    shelf.book.remove("a")
    shelf.add("d", 20)
    assert shelf.book.pinned_bytes == 1000


def test_use_is_counted() -> None:
    """Uses and hits are counted; a hit counts no more tokens than the prefix has."""
    shelf = Shelf()
    shelf.add("rules", 10)
    assert shelf.book.use("rules", "text").uses == 1
    used = shelf.book.use("rules", "text")
    assert used.uses == 2
    assert used.last_used is not None
    assert used.last_used >= used.created
    shelf.book.note_hit("rules", 8)
    shelf.book.note_hit("rules", 300)
    shelf.book.note_hit("gone", 5)
    assert shelf.book.get("rules").hit_tokens == 18


def test_kinds() -> None:
    """A prefix of text does not serve a chat, nor the other way round; the error says where it does serve."""
    shelf = Shelf()
    shelf.add("plain", 4)
    shelf.add("chat", 4, kind="messages", content=({"role": "system", "content": "x"},))
    assert shelf.book.use("chat", "messages").kind == "messages"
    with pytest.raises(BadRequest, match="'content' and serves /v1/completions"):
        shelf.book.use("plain", "messages")
    with pytest.raises(BadRequest, match="'messages' and serves /v1/chat/completions"):
        shelf.book.use("chat", "text")
    assert shelf.book.get("plain").uses == 0


def test_tenants() -> None:
    """Names of tenants do not meet; the budget is one for all."""
    shelf = Shelf(budget=300)
    shelf.add("b", 4, salt=b"one")
    shelf.add("a", 4, salt=b"one")
    shelf.add("b", 4, salt=b"two")
    assert [prefix.name for prefix in shelf.book.list(salt=b"one")] == ["a", "b"]
    assert shelf.book.list() == []
    with pytest.raises(UnknownPrefix):
        shelf.book.get("b")
    with pytest.raises(PrefixBudgetExceeded):
        shelf.reserve("c", 4)
    shelf.book.remove("b", salt=b"one")
    assert [prefix.name for prefix in shelf.book.list(salt=b"two")] == ["b"]
    assert len(shelf.pinned) == 2


actions = st.tuples(
    st.sampled_from(["begin", "keep", "break", "remove"]),
    st.sampled_from(["a", "b", "c"]),
    st.integers(1, 20),
    st.sampled_from([b"", b"x"]),
    st.booleans(),
)


@settings(max_examples=examples(300), deadline=None)
@given(plan=st.lists(actions, max_size=40), budget=st.integers(0, 1500))
def test_never_over_budget(plan: list[tuple[str, str, int, bytes, bool]], budget: int) -> None:
    """Whatever is promised, kept, broken and removed in whatever order: the budget holds, and blocks are pinned once each."""
    shelf = Shelf(budget)
    coming: list[tuple[str, int, bytes, int]] = []
    for action, name, length, salt, replacing in plan:
        if action == "begin":
            try:
                size = shelf.reserve(name, length, salt=salt, replace=replacing)
            except (BadRequest, PrefixBudgetExceeded):
                continue
            coming.append((name, length, salt, size))
        elif action == "keep" and coming:
            name, length, salt, _ = coming.pop(0)
            shelf.commit(name, length, salt=salt)
        elif action == "break" and coming:
            shelf.book.release(coming.pop()[3])
        elif action == "remove":
            try:
                shelf.book.remove(name, salt=salt)
            except UnknownPrefix:
                continue
        promised = sum(size for *_, size in coming)
        assert shelf.book.pinned_bytes + promised <= budget
        assert shelf.book.pinned_bytes == len(shelf.pinned) * BLOCK_BYTES
    for name, length, salt, _ in coming:
        shelf.commit(name, length, salt=salt)
    for salt in (b"", b"x"):
        for prefix in shelf.book.list(salt=salt):
            shelf.book.remove(prefix.name, salt=salt)
    assert shelf.pinned == set()
    assert shelf.book.pinned_bytes == 0
    assert shelf.reserve("all", max(budget // BLOCK_BYTES * BLOCK, 1)) <= budget
