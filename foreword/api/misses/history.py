"""Recent conversations, and the one that a new request is nearest to."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice
from typing import Final

from foreword.api.misses.differences import first_difference
from foreword.api.misses.outline import Conversation, MessageOutline

# Numbers of 8 bytes.
CAPACITY: Final = 1 << 22
# Conversations that are compared if none starts with the same messages.
_COMPARED: Final = 16
# Share of the text from which a conversation that starts with the same messages needs no comparison with others.
_ENOUGH: Final = 0.8
_SAME_SESSION: Final = 0.5


class ConversationHistory:
    """The most recent conversations of all tenants, about `capacity` numbers of them."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._total = 0
        self._all: OrderedDict[int, Conversation] = OrderedDict()
        self._by_tenant: dict[str, OrderedDict[int, Conversation]] = {}
        self._by_session: dict[tuple[str, str], Conversation] = {}
        # By tenant, hash of settings and tools (0: any) and hash of the first messages.
        self._by_prefix: dict[tuple[str, int, int], Conversation] = {}
        self._weights: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._all)

    @property
    def size(self) -> int:
        """Numbers kept."""
        return self._total

    def known_messages(self, tenant: str, session: str | None) -> dict[int, MessageOutline]:
        """Messages of the session's last conversation, by the hash of their content."""
        last = self._by_session.get((tenant, session)) if session is not None else None
        return {} if last is None else {one.content: one for one in last.messages}

    def add(self, new: Conversation) -> None:
        """Find the nearest earlier conversation, and remember this one."""
        new.nearest = self.nearest(new)
        self._all[id(new)] = new
        self._by_tenant.setdefault(new.tenant, OrderedDict())[id(new)] = new
        if new.session is not None:
            self._by_session[new.tenant, new.session] = new
        for key in _prefix_keys(new):
            self._by_prefix[key] = new
        self._weigh(new)

    def answered(self, one: Conversation, answer: MessageOutline) -> None:
        """The answer is the next message of the conversation."""
        one.answer = answer
        one.__dict__.pop("hashes", None)
        if id(one) in self._all:
            self._weigh(one)

    def _weigh(self, one: Conversation) -> None:
        self._total += one.weight - self._weights.get(id(one), 0)
        self._weights[id(one)] = one.weight
        while self._total > self._capacity and len(self._all) > 1:
            self._remove(next(iter(self._all.values())))

    def settle(self, done: Conversation) -> None:
        """A conversation was computed: forget the one that it continues, which it contains."""
        if math.isinf(done.computed_at):
            done.computed_at = done.began
        old, done.nearest = done.nearest, None
        if old is None or math.isinf(old.computed_at):
            return
        if id(old) in self._all and first_difference(old, done) is None:
            self._remove(old)

    def nearest(self, new: Conversation) -> Conversation | None:
        """The earlier conversation of the tenant that has most of the new one's text."""
        longest = self._longest_prefix(new, new.scope)
        if longest is not None and _shared(longest, new)[0] >= _ENOUGH:
            return longest
        candidates = [
            longest,
            self._longest_prefix(new, 0),
            self._by_session.get((new.tenant, new.session)) if new.session else None,
        ]
        candidates += islice(reversed(self._by_tenant.get(new.tenant, {}).values()), _COMPARED)
        scored = [(_nearness(one, new), one) for one in dict.fromkeys(candidates) if one is not None]
        best = max(scored, key=lambda entry: entry[0], default=None)
        return best[1] if best is not None and best[0] > 0 else None

    def _longest_prefix(self, new: Conversation, scope: int) -> Conversation | None:
        found = (self._by_prefix.get((new.tenant, scope, prefix)) for prefix in reversed(new.prefixes))
        return next((one for one in found if one is not None), None)

    def _remove(self, old: Conversation) -> None:
        del self._all[id(old)]
        old.nearest = None  # otherwise requests that never end would keep a chain of forgotten ones
        tenant = self._by_tenant[old.tenant]
        del tenant[id(old)]
        if not tenant:
            del self._by_tenant[old.tenant]
        self._total -= self._weights.pop(id(old))
        if old.session is not None and self._by_session.get((old.tenant, old.session)) is old:
            del self._by_session[old.tenant, old.session]
        for key in _prefix_keys(old):
            if self._by_prefix.get(key) is old:
                del self._by_prefix[key]


def _prefix_keys(one: Conversation) -> Iterator[tuple[str, int, int]]:
    for prefix in one.prefixes:
        yield one.tenant, one.scope, prefix
        yield one.tenant, 0, prefix


def _nearness(old: Conversation, new: Conversation) -> float:
    """Text at the start counts twice: that is what a cache has. A session's own conversations are preferred."""
    common, repeated = _shared(old, new)
    same_session = new.session is not None and old.session == new.session
    return 2 * common + repeated + (_SAME_SESSION if same_session else 0.0)


def _shared(old: Conversation, new: Conversation) -> tuple[float, float]:
    """Shares of the new text that the old conversation has: at its start, and behind the first difference."""
    difference = first_difference(old, new)
    if difference is None:
        return 1.0, 0.0
    return difference.common, difference.repeated
