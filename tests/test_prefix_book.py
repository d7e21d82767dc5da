"""The book of named prefixes: names, versions, use, tenants. No engine."""

from __future__ import annotations

import itertools
from dataclasses import replace as replaced
from typing import Any

import pytest

from foreword.blocks.leases import Lease, Leases
from foreword.errors import BadRequest
from foreword.prefixes.book import NamedPrefix, PrefixBook
from foreword.prefixes.errors import PrefixBudgetExceeded, UnknownPrefix


class Shelf:
    """A book, and the leases of its names: blocks of ten bytes."""

    def __init__(self) -> None:
        self.leases = Leases[int](1 << 20, 0, block_bytes=10)
        self.book = PrefixBook()
        self._blocks = itertools.count()

    @property
    def leased(self) -> int:
        """Bytes of all leases."""
        return self.leases.named_bytes

    def lease(self, count: int) -> Lease[int]:
        found = self.leases.reserve("name", count)
        assert found is not None
        self.leases.fill(found, [next(self._blocks) for _ in range(count)])
        return found

    def add(
        self,
        name: str,
        length: int,
        *,
        salt: bytes = b"",
        replace: bool = False,
        content: Any = "text",
    ) -> NamedPrefix:
        """Check, compute, commit."""
        tokens = (7,) * length
        self.book.check(name, content, tokens, salt=salt, replace=replace)
        prefix = NamedPrefix(name, self.book.version(name, salt=salt) + 1, content, tokens, 1.0)
        lease = self.lease(length)
        return self.book.commit(replaced(prefix, bytes=lease.size), lease, salt=salt)


def test_registers() -> None:
    """A prefix that was kept is known by its name, with its size and without uses."""
    shelf = Shelf()
    made = shelf.add("rules", 10)
    assert made == shelf.book.get("rules")
    facts = (made.version, made.bytes, made.uses, made.hit_tokens, made.last_used, made.ready)
    assert facts == (1, 100, 0, 0, None, True)
    assert made.tokens == (7,) * 10


@pytest.mark.parametrize("name", ["", "-a", ".a", "a b", "a/b", "ä", "a" * 129, "a\n", "../etc"])
def test_bad_names(name: str) -> None:
    """A name is letters, digits and a few marks, so that it can stand in an address."""
    with pytest.raises(BadRequest) as refusal:
        Shelf().add(name, 4)
    assert refusal.value.param == "name"


@pytest.mark.parametrize("name", ["a", "0", "A.b-c_d", "a" * 128])
def test_good_names(name: str) -> None:
    """All other names are fine."""
    assert Shelf().add(name, 4).name == name


def test_empty() -> None:
    """A prefix without tokens is refused."""
    with pytest.raises(BadRequest, match="empty"):
        Shelf().add("rules", 0)


def test_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The names of a tenant, and the bytes of its prefixes and of all, have limits; a known name may be replaced, and what
    is removed makes room. Other tenants have their own."""
    monkeypatch.setattr("foreword.prefixes.book.TENANT_PREFIXES", 3)
    monkeypatch.setattr("foreword.prefixes.book.TENANT_BYTES", 20_000)
    monkeypatch.setattr("foreword.prefixes.book.MOST_BYTES", 30_000)
    shelf = Shelf()
    for name in ("a", "b", "c"):
        shelf.add(name, 1)
    with pytest.raises(PrefixBudgetExceeded, match="remove some"):
        shelf.add("d", 1)
    assert shelf.add("c", 1, replace=True).version == 2
    shelf.add("d", 1, salt=b"other")
    shelf.book.remove("a")
    for more in (
        {"length": 600},
        {"length": 1, "content": "x" * 20_000},
        {"length": 1, "content": ({"content": "x" * 20_000},)},
    ):
        with pytest.raises(PrefixBudgetExceeded):
            shelf.add("e", **more)
    shelf.add("e", 300)
    with pytest.raises(PrefixBudgetExceeded):
        shelf.add("f", 420, salt=b"third")
    assert len(shelf.book.all()) == 4


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
    """A name is replaced only on purpose; the new version counts up, starts unused, and the old KV goes back."""
    shelf = Shelf()
    shelf.add("rules", 8)
    shelf.book.use("rules", "text")
    with pytest.raises(BadRequest, match="exists; replace it"):
        shelf.add("rules", 4)
    assert shelf.book.get("rules").version == 1
    made = shelf.add("rules", 4, replace=True)
    assert (made.version, made.uses, made.bytes) == (2, 0, 40)
    assert shelf.leased == 40
    assert shelf.add("new", 4, replace=True).version == 1
    # A name that was removed begins again.
    shelf.book.remove("rules")
    assert shelf.add("rules", 4).version == 1


def test_adopted() -> None:
    """A version of another instance takes the place of the one here. The same version, computed, keeps its counts."""
    shelf = Shelf()
    made = shelf.add("rules", 8)
    shelf.book.adopt(replaced(made, version=2), salt=b"")
    assert (shelf.book.get("rules").version, shelf.book.get("rules").ready, shelf.leased) == (2, False, 0)
    shelf.book.use("rules", "text")
    again = shelf.book.commit(replaced(made, version=2, bytes=80), shelf.lease(8), salt=b"")
    assert (again.uses, again.bytes, again.ready) == (1, 80, True)


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
    shelf.add("chat", 4, content=({"role": "system", "content": "x"},))
    assert shelf.book.use("chat", "messages").kind == "messages"
    with pytest.raises(BadRequest, match="'content' and serves /v1/completions"):
        shelf.book.use("plain", "messages")
    with pytest.raises(BadRequest, match="'messages' and serves /v1/chat/completions"):
        shelf.book.use("chat", "text")
    assert shelf.book.get("plain").uses == 0


def test_tenants() -> None:
    """Names of tenants do not meet."""
    shelf = Shelf()
    shelf.add("b", 4, salt=b"one")
    shelf.add("a", 4, salt=b"one")
    shelf.add("b", 4, salt=b"two")
    assert [prefix.name for prefix in shelf.book.list(salt=b"one")] == ["a", "b"]
    assert shelf.book.list() == []
    with pytest.raises(UnknownPrefix):
        shelf.book.get("b")
    shelf.book.remove("b", salt=b"one")
    assert [prefix.name for prefix in shelf.book.list(salt=b"two")] == ["b"]
    assert shelf.leased == 80
