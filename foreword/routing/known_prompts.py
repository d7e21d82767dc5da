"""Prompts that were placed, recognized by their bytes: where a prefix is, and how long, while its tokens are not known. Pure;
times are given.

A prompt has two identities. Replicas know its *blocks*, which need its tokens. Its *chain* has a hash for each message, over
the bytes of all parts up to it in the order in which templates render them, and needs nothing else:

    scope | system messages | tools | message | message ...      each link: its hash, and the bytes up to it

Each prompt leaves both, so one whose tokens come late, or never, still finds the replica that has its prefix, and has a length
and a price: the tokens of the longest known link, and for what follows as many per byte as before.

How many tokens a link has is exact only where a prompt ended: a template may render a message otherwise when others follow. For
other links it follows from the bytes, less a tenth. An error costs time and never correctness.
"""

from __future__ import annotations

import itertools
from array import array
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from msgspec import Struct

from foreword.blocks.bounded import Bounded

_MAX_BYTES: Final = 64 << 20
_MOST: Final = 8192
# The first links of a conversation are kept, which others share, and the last ones, from which it goes on or branches.
_FIRST: Final = 32
_LAST: Final = 32
_TOKEN_BYTES: Final = 4
_LINK_BYTES: Final = 400
# A text of which nothing is known.
_BYTES_PER_TOKEN: Final = 4
# Share of an estimated length that counts as known: an estimate that is too long would name blocks that the prompt has not.
_SURE: Final = 0.9


class PromptChain(Struct, frozen=True):
    """A prompt as hashes.

    Attributes:
        owner: whose it is, for fair shares of the memory. The first link depends on it, too.
        links: a hash of 16 bytes for each part, over all parts up to it.
        sizes: bytes up to the end of each part.
    """

    owner: bytes
    links: tuple[bytes, ...]
    sizes: tuple[int, ...]


class KnownPrefix(NamedTuple):
    """The known part of a prompt.

    Attributes:
        tokens: leading tokens of it. exact: they are certain to be those of the prompt, if its template is one that only
            adds to what it has rendered.
        length: tokens of its known part, at least as many as `tokens`.
        total: estimated tokens of all of it.
        sent: the replica to which the known part was sent, with its length. At most one.
        held: the same if no table of blocks has it: its tokens were not known then, or were not the replica's, or KV events of
            the replica were late or lost.
        home: the replica of the conversation that goes on with this prompt, as its first; else empty.
    """

    tokens: array[int]
    exact: bool
    length: int
    total: int
    sent: Mapping[str, int]
    held: Mapping[str, int]
    home: str = ""


class _Link(NamedTuple):
    """`tokens` of the `size` bytes up to its end; exact for a `whole` prompt."""

    size: int
    tokens: int
    whole: bool


@dataclass(slots=True, eq=False)
class _Conversation:
    """Prompts that continue each other. `links`: in order. `tokens`: of the longest that is known.

    `replica`, `lost`, `placed_at`: where and when the last one was placed, and how often the replica had lost its blocks then.
    `missed`: how often events of it had been missed; -1 if no table of blocks tells where the prompt is.
    """

    links: dict[bytes, _Link] = field(default_factory=dict)
    tokens: array[int] = field(default_factory=lambda: array("I"))
    replica: str = ""
    lost: int = 0
    placed_at: float = 0.0
    missed: int = 0

    @property
    def weight(self) -> int:
        """Bytes that it takes, about."""
        return _TOKEN_BYTES * len(self.tokens) + _LINK_BYTES * (1 + len(self.links))

    def trim(self) -> list[bytes]:
        """Drop the links in the middle of a long conversation, and return them."""
        names = list(self.links)
        gone = names[_FIRST : max(len(names) - _LAST, _FIRST)]
        for name in gone:
            del self.links[name]
        return gone

    def rate(self) -> float:
        """Tokens per byte."""
        if not self.links:
            return 1 / _BYTES_PER_TOKEN
        last = max(self.links.values(), key=lambda one: (one.whole, one.size))
        return last.tokens / last.size if last.size and last.tokens else 1 / _BYTES_PER_TOKEN


_Key = tuple[bytes, int]


class KnownPrompts:
    """The most recent conversations of all tenants, which have equal shares of `max_bytes`. Not thread-safe.

    Args:
        ttl: seconds after which a replica is not believed to have what was sent there.
    """

    def __init__(self, max_bytes: int = _MAX_BYTES, ttl: float = 3600.0) -> None:
        self.ttl = ttl
        self._kept: Bounded[_Key, _Conversation] = Bounded(
            max_bytes, size=lambda _, one: one.weight, owner=lambda key: key[0], most=_MOST, dropped=self._unlink
        )
        self._by_link: dict[bytes, _Key] = {}
        self._numbers = itertools.count()
        self._lost, self._missed = Counter[str](), Counter[str]()

    @property
    def held_bytes(self) -> int:
        """Bytes kept, about."""
        return self._kept.bytes

    def __len__(self) -> int:
        """Number of links by which a prompt can be found."""
        return len(self._by_link)

    def find(self, chain: PromptChain, now: float) -> KnownPrefix | None:
        """The longest known part of a prompt."""
        found = self._find(chain)
        if found is None:
            return None
        at, key = found
        one = self._kept[key]
        link = one.links[chain.links[at]]
        length = link.tokens if link.whole else int(_SURE * link.tokens)
        rest = round((chain.sizes[-1] - link.size) * one.rate())
        fresh = one.replica and one.lost == self._lost[one.replica] and now - one.placed_at <= self.ttl
        sent = {one.replica: length} if fresh and length else {}
        held = {} if one.missed == self._missed[one.replica] else sent
        ends = at < len(chain.links) - 1 and chain.links[at] == next(reversed(one.links))
        home = one.replica if fresh and ends else ""
        return KnownPrefix(one.tokens[:length], link.whole, length, max(link.tokens + rest, 1), sent, held, home)

    def learn(self, chain: PromptChain, tokens: array[int]) -> None:
        """A prompt has these tokens. They may become known after it was placed."""
        key, one, _ = self._begin(chain)
        if len(tokens) > len(one.tokens) or chain.links[-1] == next(reversed(one.links)):
            one.tokens = tokens
        self._counted(chain, one, len(tokens))
        self._keep(key, one)

    def computed(self, chain: PromptChain, tokens: int | None, *, named: bool) -> bool:
        """A replica has computed a prompt: of how many tokens, if it says so, and whether a table of blocks has it (`named`).
        Another number than is known shows that those known are not its own. True if it is news that no table tells where the
        prompt is."""
        found = self._find(chain)
        if found is None or found[0] < len(chain.links) - 1:
            return False
        one, before = self._kept[found[1]], self._kept[found[1]].missed
        link = one.links[chain.links[-1]]
        if tokens and not (link.whole and link.tokens == tokens):
            if link.whole:
                one.tokens, named = array("I"), False
            self._counted(chain, one, tokens)
        one.missed = before if named else -1
        return one.missed < before

    def placed(self, chain: PromptChain, tokens: int, replica: str, now: float, *, by_keys: bool) -> None:
        """A prompt of about so many tokens was sent to a replica. `by_keys`: all of its blocks are known."""
        key, one, grown = self._begin(chain)
        end = one.links[chain.links[-1]]
        if not end.whole:
            one.links[chain.links[-1]] = _Link(end.size, tokens, False)
        one.replica, one.lost, one.placed_at = replica, self._lost[replica], now
        one.missed = self._missed[replica] if by_keys else -1
        (self._keep if grown else self._claim)(key, one)

    def interrupted(self, replica: str, lost: bool) -> None:
        """A replica's events were missed, or begin anew: no table of blocks says what of earlier prompts it has. Or it has
        `lost` them: its process is another one, has other weights, or has cleared its blocks."""
        (self._lost if lost else self._missed)[replica] += 1

    def forget(self, owner: bytes) -> None:
        """Forget an owner's prompts: their tokens too."""
        for key in [key for key in self._kept if key[0] == owner]:
            self._unlink(key, self._kept.pop(key))

    # Internals

    def _find(self, chain: PromptChain) -> tuple[int, _Key] | None:
        by_link = self._by_link
        for at in range(len(chain.links) - 1, -1, -1):
            key = by_link.get(chain.links[at])
            if key is not None:
                self._kept.use(key)
                return at, key
        return None

    def _begin(self, chain: PromptChain) -> tuple[_Key, _Conversation, bool]:
        """The conversation of a prompt, with its links: the one that it continues or repeats, or a new one; and whether it has
        links that it did not have."""
        found, last = self._find(chain), len(chain.links) - 1
        at = -1
        if found is None:
            key, one = (chain.owner, next(self._numbers)), _Conversation()
        else:
            at, key = found
            one = self._kept[key]
            ends_there = chain.links[at] == next(reversed(one.links))
            if at < last and not ends_there:  # a branch
                known = one
                key, one = (chain.owner, next(self._numbers)), _Conversation()
                one.links = {name: known.links[name] for name in chain.links[: at + 1] if name in known.links}
        rate = one.rate()
        for new in range(at + 1, last + 1):
            if new < _FIRST or new > last - _LAST:
                size = chain.sizes[new]
                one.links[chain.links[new]] = _Link(size, round(size * rate), False)
        return key, one, at < last

    def _counted(self, chain: PromptChain, one: _Conversation, tokens: int) -> None:
        """The tokens of a whole prompt; those of its other links follow from their bytes."""
        whole = chain.sizes[-1]
        one.links[chain.links[-1]] = _Link(whole, tokens, True)
        for name in chain.links[:-1]:
            link = one.links.get(name)
            if link is not None and not link.whole:
                one.links[name] = link._replace(tokens=round(tokens * link.size / max(whole, 1)))

    def _keep(self, key: _Key, one: _Conversation) -> None:
        if len(one.links) > _FIRST + _LAST:
            for name in one.trim():
                if self._by_link.get(name) == key:
                    del self._by_link[name]
        self._claim(key, one)
        self._kept[key] = one

    def _claim(self, key: _Key, one: _Conversation) -> None:
        """Let all of its links name this conversation, the newest."""
        for name in one.links:
            self._by_link[name] = key

    def _unlink(self, key: _Key, one: _Conversation) -> None:
        for name in one.links:
            if self._by_link.get(name) == key:
                del self._by_link[name]
