"""Sessions: which blocks go when one is compacted or ends."""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass, field

import pytest
from example_counts import represented

from foreword.blocks.keys import chain_keys
from foreword.blocks.prefix_cache import PrefixCache
from foreword.blocks.salt import Salt
from foreword.blocks.session_book import Alone, SessionBook
from foreword.errors import BadRequest, NotFound

SIZE = 4


@dataclass
class Model:
    """The blocks that remain, as simply as possible: for each block the families that have used it since it came."""

    families: dict[str, str] = field(default_factory=dict)  # session -> family
    chains: dict[str, list[bytes]] = field(default_factory=dict)
    users: dict[bytes, set[str]] = field(default_factory=dict)

    def use(self, session: str, outside: str, keys: list[bytes]) -> None:
        family = self.families.get(session, outside)
        for key in keys:
            self.users.setdefault(key, set()).add(family)
        if session in self.families:
            self.chains[session] = keys

    def drop(self, session: str) -> None:
        """Removes the blocks that only this session has used."""
        family = self.families[session]
        relatives = [self.chains[one] for one in self.chains if one != session and self.families[one] == family]
        for key in self.chains.get(session, []):
            if self.users[key] == {family} and not any(key in chain for chain in relatives):
                del self.users[key]
        self.chains[session] = [key for key in self.chains.get(session, []) if key in self.users]

    def end(self, session: str) -> None:
        self.drop(session)
        del self.chains[session], self.families[session]


class Tenant:
    """A tenant's sessions on one device, beside the model of them."""

    def __init__(self, name: str, cache: PrefixCache, book: SessionBook, rng: random.Random) -> None:
        self.name, self.cache, self.book, self.rng = name, cache, book, rng
        self.salt = Salt(name.encode())
        self.model = Model()
        self.texts: dict[str, list[int]] = {}
        self.made = 0

    def fresh(self, most: int) -> list[int]:
        self.made += 1
        return [1000 * self.made + i for i in range(self.rng.randint(1, most))]

    def request(self, session: str, tokens: list[int], *, ends: bool = False) -> None:
        """`ends`: the session ends while the request runs."""
        self.made += 1
        table = self.cache.open(array("I", tokens), salt=self.salt)
        match = self.cache.lookup(table)
        self.cache.admit(table, match)
        assert self.cache.advance(table, len(tokens))
        keys = list(table.chain.keys_to(table.published)[: table.published])
        args = (self.salt.tenant, f"r{self.made}", table.chain.root, keys, len(match.blocks))
        if ends:
            self.cache.retire(self.cache.unused(self.book.end(self.salt.tenant, session).keys), drop=True)
        retired = self.book.note(*args, session=session, started=0.0)
        self.cache.release(table)
        for alone in retired:
            assert alone.drop == ends
            self.cache.retire(self.cache.unused(alone.keys) if ends else alone.keys, drop=ends)
        if ends:
            self.model.drop(session)
        self.model.use(session, f"outside {self.made}", keys)

    def act(self) -> None:
        rng, sessions = self.rng, sorted(self.texts)
        what = rng.choice(["open", "step", "step", "step", "fork", "compact", "end", "outside"])
        if what == "open" or not sessions:
            self.made += 1
            name = f"s{self.made}"
            self.book.open(self.salt.tenant, name)
            self.model.families[name] = name
            self.model.chains[name] = []
            self.texts[name] = [1, 2, 3, 4, 5, 6, 7, 8] if rng.random() < 0.5 else []
            return
        name = rng.choice(sessions)
        if what == "step":
            self.texts[name] += self.fresh(20)
            self.request(name, self.texts[name])
        elif what == "fork":
            child = f"{name}.{self.made}"
            self.made += 1
            self.book.open(self.salt.tenant, child, name)
            self.model.families[child] = self.model.families[name]
            self.model.chains[child] = self.model.chains[name]
            self.texts[child] = self.texts[name] + self.fresh(9)
            if rng.random() < 0.7:
                self.request(child, self.texts[child])
        elif what == "compact":
            self.retire(self.book.compact(self.salt.tenant, name))
            self.model.drop(name)
            self.texts[name] = self.texts[name][:8] + self.fresh(9)
        elif what == "end":
            if rng.random() < 0.4:
                self.request(name, self.texts[name] + self.fresh(20), ends=True)
            else:
                self.retire(self.book.end(self.salt.tenant, name))
            self.model.end(name)
            del self.texts[name]
        else:  # someone without a session has read the same text
            self.request("", self.texts[name][: rng.randint(0, 40)] + self.fresh(6))

    def retire(self, alone: Alone) -> None:
        keys = self.cache.unused(alone.keys)
        assert keys == alone.keys  # nothing runs
        self.cache.retire(keys, drop=True)


@pytest.mark.parametrize("seed", represented(range(20), *range(7)))
def test_what_remains_after_any_sessions(seed: int) -> None:
    """After random opens, forks, compactions, ends and requests outside of sessions of three tenants, exactly the blocks are
    gone that only ended or compacted sessions and their ended relatives have used. No tenant changes another's."""
    rng = random.Random(seed)
    cache, book = PrefixCache(20_000, SIZE, partial_reuse=False), SessionBook()
    tenants = [Tenant(name, cache, book, rng) for name in ("a", "b", "c")]
    for _ in range(250):
        rng.choice(tenants).act()
    cache.check()
    for tenant in tenants:
        assert {one.name for one in book.all(tenant.salt.tenant)} == tenant.texts.keys()
    expected = set().union(*(tenant.model.users for tenant in tenants))
    found = {key for block in range(20_000) if (key := cache.pool.key(block)) is not None}
    assert found == expected


def keys_of(tokens: int, start: int = 0) -> list[bytes]:
    return chain_keys(b"root" * 8, array("I", range(start, start + tokens)), SIZE)


def test_a_fork_keeps_what_it_shares_until_it_ends() -> None:
    """A session that ends leaves its fork what both have; the fork's end frees it."""
    book = SessionBook()
    book.open(b"t", "main")
    keys = keys_of(40)
    book.note(b"t", "r1", b"root", keys[:6], 0, session="main")
    book.open(b"t", "fork", "main")
    book.note(b"t", "r2", b"root", keys, 6, session="fork")
    assert book.end(b"t", "main").keys == []
    assert book.end(b"t", "fork").keys == keys


def test_what_does_not_continue_a_session_supersedes_it() -> None:
    """A session is one line of requests: the rest of the request before goes first, and only that."""
    book = SessionBook()
    book.open(b"t", "main")
    keys, other = keys_of(40), keys_of(40, 7)
    book.note(b"t", "r1", b"root", keys, 0, session="main")
    [alone] = book.note(b"t", "r2", b"root", keys[:4] + other, 4, session="main")
    assert (alone.keys, alone.drop) == (keys[4:], False)


def test_a_shortened_history_outside_of_sessions_supersedes_the_long_one() -> None:
    """Without sessions, a request that is said to have another's history in a shorter form supersedes what that one had, but
    not what a third has too."""
    book = SessionBook()
    keys, other = keys_of(40), keys_of(40, 7)
    book.note(b"t", "r1", b"root", keys[:8], 0)
    book.note(b"t", "r2", b"root", keys, 8)
    book.note(b"t", "r3", b"root", keys[:5] + other[:2], 5)
    [alone] = book.note(b"t", "r4", b"root", keys[:1] + other[5:], 1, supersedes="r2")
    assert alone.keys == keys[5:]
    assert book.note(b"t", "r5", b"root", other, 0, supersedes="r2") == []  # it is forgotten


def test_sessions_are_bounded_and_forgotten() -> None:
    """Sessions of a tenant, requests outside of them and blocks in all are bounded. An idle session is forgotten, and its
    blocks stay."""
    now = [1000.0]
    book = SessionBook(2, most_noted=3, most_blocks=25, clock=lambda: now[0])
    with pytest.raises(NotFound):
        book.open(b"t", "child", "nobody")
    book.open(b"t", "one", idle=10)
    book.open(b"t", "two")
    with pytest.raises(BadRequest, match="2 sessions"):
        book.open(b"t", "three")
    book.open(b"u", "one")  # another tenant's
    now[0] += 11
    assert [one.name for one in book.all(b"t")] == ["two"]
    with pytest.raises(NotFound):
        book.end(b"t", "one")
    for number in range(9):
        book.note(b"t", f"r{number}", b"root", keys_of(20, 100 * number), 0)
    for number in range(9):  # all but the newest three are forgotten
        known = book.note(b"t", f"s{number}", b"root", keys_of(20, 9999), 0, supersedes=f"r{number}")
        assert bool(known) == (number >= 7), number
    book.note(b"t", "long", b"root", keys_of(80, 5), 0, session="two")
    assert len(book.end(b"t", "two").keys) == 20
    book.open(b"t", "two")
    book.note(b"t", "longer", b"root", keys_of(200, 5), 0, session="two")
    with pytest.raises(NotFound):  # more blocks than may be remembered
        book.end(b"t", "two")
    book.forget(b"t")
    assert book.all(b"t") == []


def test_tenants_do_not_end_each_others_sessions() -> None:
    """A name is a tenant's own."""
    book = SessionBook()
    book.open(b"t", "main")
    for verb in (book.end, book.compact):
        with pytest.raises(NotFound):
            verb(b"u", "main")
    assert book.all(b"u") == []
