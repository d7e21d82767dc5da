"""The first difference between a conversation and an earlier one, and what kind of change it is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

from foreword.api.misses.outline import Conversation, MessageOutline

Change = Literal[
    "volatile_line",
    "tools_reordered",
    "json_reordered",
    "tools_changed",
    "reasoning_changed",
    "compacted",
    "template_changed",
    "salt_changed",
    "model_changed",
    "prefix_changed",
    "system_prompt_changed",
    "message_edited",
]
_OF_SETTING: Final[dict[str, Change]] = {
    "model": "model_changed",
    "cache_salt": "salt_changed",
    "chat_template": "template_changed",
    "prefix": "prefix_changed",
}


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two conversations part.

    Attributes:
        where: field of the client's body, `messages[3].content line 2`.
        common: share of the new conversation's text before the difference.
        repeated: share of it behind the difference that the earlier conversation has too: lost only because of the place.
        latest: share of it before the difference if the template writes tools and system prompt in the other order.
    """

    change: Change
    where: str
    common: float
    repeated: float
    latest: float = 0.0


def first_difference(old: Conversation, new: Conversation) -> Difference | None:
    """None if one of them continues the other."""
    for name in dict.fromkeys((*old.settings, *new.settings)):
        if old.settings.get(name) != new.settings.get(name):
            return Difference(_OF_SETTING.get(name, "template_changed"), name, 0.0, _alike(old, new))
    if [tool.exact for tool in old.tools] != [tool.exact for tool in new.tools]:
        return _tools(old, new)
    at = _first_message(old.with_answer, new.messages)
    return None if at is None else _message(old, new, at)


def common_share(old: Conversation, new: Conversation) -> float:
    """Share of the new conversation's text in the messages and tools that the two start with."""
    at = _first_message(old.with_answer, new.messages)
    messages = new.messages[: len(old.with_answer) if at is None else at]
    return (new.tool_characters + sum(one.characters for one in messages)) / max(new.characters, 1)


def _first_message(old: tuple[MessageOutline, ...], new: tuple[MessageOutline, ...]) -> int | None:
    pairs = enumerate(zip(old, new, strict=False))
    return next((i for i, (a, b) in pairs if a.whole != b.whole), None)


def _alike(old: Conversation, new: Conversation) -> float:
    """Share of the new conversation's text that the old one has anywhere."""
    same = sum(one.characters for one in new.messages if one.whole in old.hashes)
    tools = {tool.canonical for tool in old.tools}
    same += sum(tool.characters for tool in new.tools if tool.canonical in tools)
    return same / max(new.characters, 1)


def _tools(old: Conversation, new: Conversation) -> Difference:
    before, now = [tool.exact for tool in old.tools], [tool.exact for tool in new.tools]
    at = next((i for i, (a, b) in enumerate(zip(before, now, strict=False)) if a != b), min(len(before), len(now)))
    if sorted(before) == sorted(now):
        change: Change = "tools_reordered"
    elif sorted(tool.canonical for tool in old.tools) == sorted(tool.canonical for tool in new.tools):
        change = "json_reordered"
    else:
        change = "tools_changed"
    latest = new.messages[0].characters / max(new.characters, 1) if new.messages else 0.0
    return Difference(change, f"tools[{at}]", 0.0, _alike(old, new), latest)


def _message(old: Conversation, new: Conversation, at: int) -> Difference:
    before, now = old.with_answer[at], new.messages[at]
    change, where, kept = _change(old, new, at, before, now)
    ahead = sum(one.characters for one in new.messages[:at]) + (new.tool_characters if at else 0)
    inside = kept * now.characters
    behind = sum(one.characters for one in new.messages[at + 1 :] if one.whole in old.hashes)
    behind += 0 if at else new.tool_characters
    same_lines = _same_lines(before, now, change) * now.characters
    total = max(new.characters, 1)
    common, repeated = ahead + inside, behind + max(same_lines - inside, 0)
    latest = common + (0 if at else new.tool_characters)
    return Difference(change, where, common / total, repeated / total, latest / total)


def _same_lines(before: MessageOutline, now: MessageOutline, change: Change) -> float:
    """Share of the message's lines that the earlier one has too."""
    if change == "json_reordered":
        return 1.0
    if change == "volatile_line":
        return _share(now, before.shapes, now.shapes)
    return _share(now, before.lines, now.lines)


def _share(now: MessageOutline, before: Iterable[int], lines: Iterable[int]) -> float:
    """Share of the text in those of its lines that are among the earlier ones."""
    known = set(before)
    same = sum(length for line, length in zip(lines, now.lengths, strict=True) if line in known)
    return same / max(sum(now.lengths), 1)


def _change(
    old: Conversation, new: Conversation, at: int, before: MessageOutline, now: MessageOutline
) -> tuple[Change, str, float]:
    """The kind of change, its place, and the share of the message ahead of it."""
    name = new.names[at]
    if before.role == now.role and before.answer == now.answer:
        if before.reasoning != now.reasoning:
            return "reasoning_changed", f"{name}.reasoning", 0.0
        calls = zip(before.calls, now.calls, strict=True)
        number = next(i for i, (a, b) in enumerate(calls) if a.exact != b.exact)
        return "json_reordered", f"{name}.tool_calls[{number}].arguments", 0.0
    line = next((i for i, (a, b) in enumerate(zip(before.lines, now.lines, strict=False)) if a != b), None)
    if line is None:
        line = min(len(before.lines), len(now.lines))
    place = f"{name}.content line {line + 1}" if now.content != before.content else f"{name}.tool_calls"
    place = place.replace(".content", "") if name.startswith("prompt") else place
    kept = sum(now.lengths[:line]) / max(sum(now.lengths), 1)
    if (
        before.role == now.role
        and before.shapes[line : line + 1] == now.shapes[line : line + 1]
        and line < len(now.lines)
    ):
        return "volatile_line", place, kept
    if _compacted(old, new, at, before, now):
        return "compacted", name, kept
    if at == 0 and now.role == "system":
        return "system_prompt_changed", place, kept
    return "message_edited", place, kept


def _compacted(old: Conversation, new: Conversation, at: int, before: MessageOutline, now: MessageOutline) -> bool:
    """Whether earlier messages were dropped, replaced by a summary, or shortened."""
    if not at:
        return False
    earlier = old.with_answer
    if [one.whole for one in earlier[at + 1 : at + 2]] == [one.whole for one in new.messages[at + 1 : at + 2]]:
        return before.role == now.role and now.characters < before.characters / 2
    if len(new.messages) > len(old.messages):  # a next turn has the answer and a message more
        return False
    shorter = len(new.messages) < len(earlier)
    later = {one.whole for one in earlier[at + 1 :]}
    same_session = new.session is not None and new.session == old.session
    return (shorter and same_session) or any(one.whole in later for one in new.messages[at:])
