"""Name the cause of a cache miss, from the recent conversations and the one that a new request is nearest to."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final, Literal

from foreword.api.misses.outline import (
    Change,
    Conversation,
    Difference,
    MessageOutline,
    common_share,
    first_difference,
    message_outline,
    outline,
)
from foreword.api.output import CallArguments, CallStart, Piece, Reasoning, Text
from foreword.api.request import GenerateRequest, Message, ToolCall
from foreword.blocks.bounded import Bounded

# Numbers of 8 bytes.
CAPACITY: Final = 1 << 22
_NUMBER: Final = 8
# Short conversations would take long to fill it.
_MOST: Final = 4096
# Conversations that are compared if none starts with the same messages.
_COMPARED: Final = 16
# Share of the text from which a conversation that starts with the same messages needs no comparison with others.
_ENOUGH: Final = 0.8
_SAME_SESSION: Final = 0.5
# Causes that are not a change of the conversation.
Outside = Literal[
    "all_cached",
    "new_text",
    "new_conversation",
    "evicted",
    "not_computed_yet",
    "checkpoint_missing",
    "other_replica",
    "shorter_than_block",
    "disabled",
]
MissCause = Change | Outside
# Reasons of an engine that say more than the comparison of conversations can.
_OF_ENGINE: Final[dict[str, Outside]] = {
    "evicted": "evicted",
    "not_computed_yet": "not_computed_yet",
    "checkpoint_missing": "checkpoint_missing",
    "shorter_than_block": "shorter_than_block",
    "disabled": "disabled",
}
_DETAILS: Final[dict[MissCause, str]] = {
    "volatile_line": "a date, time, number or id in this line has changed; move it behind the stable text",
    "tools_reordered": "the same tools come in another order; send them in a fixed order",
    "json_reordered": "the same JSON is written in another way; keep the order of keys, and send arguments back unchanged",
    "tools_changed": "the tools differ; offer the same tools in all requests of a session",
    "reasoning_changed": "the reasoning of an earlier answer was dropped or rewritten; send it back unchanged",
    "compacted": "earlier messages were dropped, shortened or replaced by a summary",
    "template_changed": "the chat template or its options differ",
    "salt_changed": "the cache salt differs; salts do not share a cache",
    "model_changed": "another model or adapter",
    "prefix_changed": "another named prefix",
    "system_prompt_changed": "the system prompt was edited",
    "message_edited": "an earlier message was edited",
    "all_cached": "everything was cached",
    "new_text": "everything that an earlier conversation shares was cached; the rest is new",
    "new_conversation": "no recent conversation shares text with this one",
    "evicted": "the KV was computed before and has been evicted",
    "not_computed_yet": "a request with the same prefix was still being computed",
    "checkpoint_missing": "the blocks are cached, but no state or window from which the model can continue",
    "other_replica": "another replica has the KV; this one was chosen",
    "shorter_than_block": "what is not cached does not fill a block",
    "disabled": "prefix caching is switched off",
}
# Blocks are reused as a whole, and the length of text in tokens is an estimate: fewer tokens than this are no loss, and
# less than this share of what was expected is one.
_BLOCK: Final = 16
_SURE: Final = 0.7
_AHEAD, _NEARLY = 1.1, 0.85
# Share of the rest that an earlier conversation has behind something else.
_WORTH_SAYING: Final = 0.1


@dataclass(frozen=True, slots=True)
class Miss:
    """Why part of a prompt was not cached.

    Attributes:
        where: the first field of the client's body that differs; empty if none does.
        tokens_lost: tokens, estimated from the length of the text, that an earlier request computed and that would have been
            cached without this cause.
    """

    cause: MissCause
    where: str
    tokens_lost: int
    advice: str


class MissFinder:
    """Compares each request with the recent conversations of its tenant. Tenants have equal shares of what is kept: about
    `capacity` numbers, and at most 4,096 conversations. Not thread-safe.

    Args:
        capacity: numbers (of 8 bytes) that it may keep.
        window: requests after which one is forgotten, those included that are only counted (`passed`).
    """

    def __init__(self, capacity: int = CAPACITY, window: int | None = None) -> None:
        self._all: Bounded[tuple[str, int], Conversation] = Bounded(
            _NUMBER * capacity,
            size=lambda _, one: _NUMBER * one.weight,
            owner=lambda key: key[0],
            most=_MOST,
            window=window,
            dropped=lambda _, one: self._unlink(one),
        )
        self._by_session: dict[tuple[str, str], Conversation] = {}
        # By tenant, hash of settings and tools (0: any) and hash of the first messages.
        self._by_prefix: dict[tuple[str, int, int], Conversation] = {}

    @property
    def size(self) -> int:
        """Numbers kept."""
        return self._all.bytes // _NUMBER

    def passed(self, count: int) -> None:
        """Count requests that are not compared."""
        self._all.passed(count)

    def begin(
        self,
        request: GenerateRequest,
        tenant: str = "",
        *,
        model: str = "",
        salt: str = "",
        template: str = "",
        began: float = 0.0,
    ) -> Conversation:
        """Remember a request. Arguments as for `outline`."""
        known = self.known_messages(request, tenant)
        new = outline(request, tenant, model=model, salt=salt, template=template, known=known)
        new.began = began
        self.add(new)
        return new

    def known_messages(self, request: GenerateRequest, tenant: str) -> dict[int, MessageOutline]:
        """Messages of the session's last conversation, by the hash of their content: they need not be hashed again."""
        session = request.cache.key or request.session
        last = self._by_session.get((tenant, session)) if session is not None else None
        return {} if last is None else {one.content: one for one in last.messages}

    def add(self, new: Conversation) -> None:
        """Find the nearest earlier conversation, and remember this one. Its outline may be made on another thread, if it is
        long."""
        new.nearest = self._nearest(new)
        if new.session is not None:
            self._by_session[new.tenant, new.session] = new
        for key in _prefix_keys(new):
            self._by_prefix[key] = new
        self._all[_key(new)] = new

    def explain(
        self,
        new: Conversation,
        prompt_tokens: int,
        cached_tokens: int,
        *,
        reason: str = "",
        replica: str | None = None,
        block_size: int = _BLOCK,
    ) -> Miss:
        """Name the cause, once the engine has said how much was cached.

        Args:
            reason: of the engine's own cache report, if it has one.
            replica: where it was computed.
            block_size: tokens that are cached together or not at all.

        Set `computed_at` of the conversation before, if the time of its first token is known.
        """
        new.prompt_tokens, new.replica = prompt_tokens, replica
        miss = _explain(new, prompt_tokens, cached_tokens, reason, max(block_size, _BLOCK))
        self._settle(new)
        return miss

    def answered(self, one: Conversation, pieces: Sequence[Piece]) -> None:
        """The answer is the next message of the conversation."""
        one.answer = message_outline(_as_message(pieces))
        one.__dict__.pop("hashes", None)
        if _key(one) in self._all:
            self._all.change(_key(one))

    def _settle(self, done: Conversation) -> None:
        """A conversation was computed: forget the one that it continues, which it contains."""
        if math.isinf(done.computed_at):
            done.computed_at = done.began
        old, done.nearest = done.nearest, None
        if old is None or math.isinf(old.computed_at):
            return
        if _key(old) in self._all and first_difference(old, done) is None:
            del self._all[_key(old)]
            self._unlink(old)

    def _nearest(self, new: Conversation) -> Conversation | None:
        """The earlier conversation of the tenant that has most of the new one's text."""
        longest = self._longest_prefix(new, new.scope)
        if longest is not None and _shared(longest, new)[0] >= _ENOUGH:
            return longest
        candidates = [
            longest,
            self._longest_prefix(new, 0),
            self._by_session.get((new.tenant, new.session)) if new.session else None,
        ]
        candidates += islice(self._all.newest(new.tenant), _COMPARED)
        scored = [(_nearness(one, new), one) for one in dict.fromkeys(candidates) if one is not None]
        best = max(scored, key=lambda entry: entry[0], default=None)
        return best[1] if best is not None and best[0] > 0 else None

    def _longest_prefix(self, new: Conversation, scope: int) -> Conversation | None:
        found = (self._by_prefix.get((new.tenant, scope, prefix)) for prefix in reversed(new.prefixes))
        return next((one for one in found if one is not None), None)

    def _unlink(self, old: Conversation) -> None:
        old.nearest = None  # otherwise requests that never end would keep a chain of forgotten ones
        if old.session is not None and self._by_session.get((old.tenant, old.session)) is old:
            del self._by_session[old.tenant, old.session]
        for key in _prefix_keys(old):
            if self._by_prefix.get(key) is old:
                del self._by_prefix[key]


def _key(one: Conversation) -> tuple[str, int]:
    return one.tenant, id(one)


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


def _explain(new: Conversation, prompt: int, cached: int, reason: str, block: int) -> Miss:
    computed = prompt - cached
    old = new.nearest
    if computed <= 1 or reason == "all_cached":
        return _miss("all_cached", "", 0)
    if reason in ("disabled", "shorter_than_block"):
        return _miss(_OF_ENGINE[reason], "", 0)
    if old is None:
        return _miss(_OF_ENGINE.get(reason, "new_conversation"), "", 0)
    difference = first_difference(old, new)
    outside = _outside(old, new, difference, prompt, cached, reason, block)
    if outside is not None:
        return outside
    if difference is None or _without_effect(difference, prompt, cached, block):
        return _miss("new_text", "", 0)
    lost = min(round(difference.repeated * prompt), computed)
    if lost < _BLOCK and difference.change != "compacted":
        return _miss("new_text" if difference.common * prompt >= _BLOCK else "new_conversation", "", 0)
    return _miss(difference.change, difference.where, lost, _elsewhere(new, difference, prompt, cached, lost))


def _elsewhere(new: Conversation, difference: Difference, prompt: int, cached: int, lost: int) -> str:
    """How much of the rest an earlier conversation has behind something else, and what would reuse it."""
    place = difference.where.partition(" ")[0].partition(".")[0]
    in_system = bool(new.messages) and new.messages[0].role == "system" and place == new.names[0]
    share = lost / max(prompt - cached, 1)
    if share < _WORTH_SAYING or not (in_system or difference.where.startswith("tools[")):
        return ""
    behind = "another system prompt" if in_system else "other tools"
    return (
        f"about {share:.0%} of what follows token {cached} was cached behind {behind}; "
        "--volatile-lines and --template-order of a server or router put such parts behind it"
    )


def _without_effect(difference: Difference, prompt: int, cached: int, block: int) -> bool:
    """Whether more was cached than what is ahead of the difference: the template does not show it."""
    behind = cached > _AHEAD * difference.latest * prompt + 2 * block
    return behind and cached >= _NEARLY * (difference.common + difference.repeated) * prompt


def _outside(
    old: Conversation,
    new: Conversation,
    difference: Difference | None,
    prompt: int,
    cached: int,
    reason: str,
    block: int,
) -> Miss | None:
    """The cause if less was cached than the two conversations have in common."""
    expected = _expected(old, new, difference, prompt)
    lost = max(min(expected, prompt - 1) - cached, 0)
    waited = old.computed_at > new.began
    if reason in _OF_ENGINE:
        return _miss("not_computed_yet" if reason == "evicted" and waited else _OF_ENGINE[reason], "", lost)
    if reason == "diverged" and difference is None and lost >= block:
        return _rendered_otherwise(new, lost)
    if lost < block or cached >= _SURE * expected - block:
        return None
    if waited:
        return _miss("not_computed_yet", "", lost)
    if new.replica != old.replica:
        return _miss("other_replica", "", lost)
    if difference is None and _ends_at_reasoning(new, prompt, cached):
        return _rendered_otherwise(new, lost)
    return _miss("evicted", "", lost)


def _ends_at_reasoning(new: Conversation, prompt: int, cached: int) -> bool:
    """Whether what was cached ends about where the first reasoning is: many templates drop it from earlier turns."""
    at = _first_reasoning(new)
    if at is None or not cached:
        return False
    before = new.tool_characters + sum(one.characters for one in new.messages[:at])
    return cached >= _SURE * prompt * before / max(new.characters, 1)


def _first_reasoning(new: Conversation) -> int | None:
    return next((i for i, one in enumerate(new.messages) if one.reasoning), None)


def _expected(old: Conversation, new: Conversation, difference: Difference | None, prompt: int) -> int:
    """Tokens that both conversations start with."""
    if difference is not None:
        return round(difference.common * prompt)
    return min(old.prompt_tokens, prompt) if old.prompt_tokens else round(common_share(old, new) * prompt)


def _rendered_otherwise(new: Conversation, lost: int) -> Miss:
    """The messages are the same, their tokens are not: the template writes earlier turns differently."""
    at = _first_reasoning(new)
    if at is None:
        return _miss("template_changed", "chat_template", lost)
    return _miss("reasoning_changed", f"{new.names[at]}.reasoning", lost)


def _miss(cause: MissCause, where: str, lost: int, more: str = "") -> Miss:
    return Miss(cause, where, lost, f"{_DETAILS[cause]}. {more}" if more else _DETAILS[cause])


def _as_message(pieces: Sequence[Piece]) -> Message:
    calls: dict[int, tuple[str, list[str]]] = {}
    for piece in pieces:
        if isinstance(piece, CallStart):
            calls[piece.index] = (piece.name, [])
        elif isinstance(piece, CallArguments):
            calls[piece.index][1].append(piece.text)
    return Message(
        "assistant",
        "".join(piece.text for piece in pieces if isinstance(piece, Text)),
        tool_calls=tuple(ToolCall("", name, "".join(parts)) for name, parts in calls.values()),
        reasoning="".join(piece.text for piece in pieces if isinstance(piece, Reasoning)),
    )
