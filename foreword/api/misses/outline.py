"""A conversation as hashes: of each field, message and line. Where two of them differ first, and what kind of change it is."""

from __future__ import annotations

import json
import math
import re
import secrets
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Final, Literal

import xxhash

from foreword.api.request import GenerateRequest, Message, Prompt, Tool, ToolCall

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
# Random for each process, so that a client cannot make two texts look equal.
_SEED: Final = secrets.randbits(64)
# Lines of a message that are compared one by one; the others count as one line.
MAX_LINES: Final = 512
_TOKENS_PER_LINE: Final = 64
_TEXT_PER_TOKEN: Final = 4
_CONVERSATION_WEIGHT, _MESSAGE_WEIGHT, _TOOL_WEIGHT = 256, 96, 32
# Names of days and months, and words with a digit: dates, times, counters and random ids. The count is limited because a
# search starts at each character.
_VOLATILE: Final = re.compile(
    r"\b(?:Mon|Tues?|Wed(?:nes)?|Thu(?:rs)?|Fri|Sat(?:ur)?|Sun)(?:day)?\b"
    r"|\b(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|Sep(?:t(?:ember)?)?"
    r"|Oct(?:ober)?|Nov(?:ember)?|Dec(?:ember)?|AM|PM)\b"
    r"|\b[A-Za-z_-]{0,32}[0-9][\w:.+-]*"
)


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


@dataclass(frozen=True, slots=True)
class CallOutline:
    """A tool call. `canonical` does not depend on the order of keys or on white space in the arguments."""

    exact: int
    canonical: int


@dataclass(frozen=True, slots=True)
class MessageOutline:
    """A message, or a prompt of `completions`.

    Attributes:
        content: of the text without white space at its ends.
        lines: one hash per line. `shapes`: the same with dates, numbers and ids masked. `lengths`: of the lines.
        characters: of content, reasoning and calls.
        whole: of everything that a chat template may show.
    """

    role: str
    content: int
    lines: array[int]
    shapes: array[int]
    lengths: array[int]
    reasoning: int
    calls: tuple[CallOutline, ...]
    characters: int
    whole: int

    @property
    def answer(self) -> tuple[int, tuple[int, ...]]:
        """The key by which two answers are equal, however their reasoning and JSON are written."""
        return self.content, tuple(call.canonical for call in self.calls)


@dataclass(frozen=True, slots=True)
class ToolOutline:
    name: str
    exact: int
    canonical: int
    characters: int


@dataclass(eq=False)
class Conversation:
    """A request as hashes, and what became known of it later.

    Attributes:
        tenant: conversations of different tenants are never compared.
        settings: hashes of what changes the prompt or the names of its blocks as a whole, in the order in which they are
            compared.
        names: how the client's dialect calls each message.
        began, computed_at: when it arrived, and when its prompt was computed, on one clock.
        prompt_tokens, answer, replica: known later. `request`: the engine's id of it.
        nearest: the earlier conversation that it is compared with.
    """

    tenant: str
    session: str | None
    settings: Mapping[str, int]
    tools: tuple[ToolOutline, ...]
    messages: tuple[MessageOutline, ...]
    names: tuple[str, ...]
    prompt_tokens: int = 0
    answer: MessageOutline | None = None
    replica: str | None = None
    request: str = ""
    began: float = 0.0
    computed_at: float = math.inf
    nearest: Conversation | None = field(default=None, repr=False)

    @cached_property
    def prefixes(self) -> list[int]:
        """For each message, a hash of all messages up to it."""
        return list(accumulate((one.whole for one in self.messages), lambda *both: _of_numbers(both)))

    @cached_property
    def hashes(self) -> frozenset[int]:
        return frozenset(one.whole for one in self.with_answer)

    @property
    def with_answer(self) -> tuple[MessageOutline, ...]:
        return self.messages if self.answer is None else (*self.messages, self.answer)

    @cached_property
    def tool_characters(self) -> int:
        return sum(one.characters for one in self.tools)

    @cached_property
    def characters(self) -> int:
        return self.tool_characters + sum(one.characters for one in self.messages)

    @cached_property
    def scope(self) -> int:
        """A hash of settings and tools."""
        return _of_numbers((*self.settings.values(), *(one.exact for one in self.tools)))

    @property
    def weight(self) -> int:
        """About the memory that it takes, in numbers of 8 bytes."""
        messages = sum(3 * len(one.lines) + _MESSAGE_WEIGHT for one in self.with_answer)
        return _CONVERSATION_WEIGHT + messages + _TOOL_WEIGHT * len(self.tools)


def digest(data: str | bytes) -> int:
    return xxhash.xxh3_64_intdigest(data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data, _SEED)


def outline(
    request: GenerateRequest,
    tenant: str,
    *,
    model: str = "",
    salt: str = "",
    template: str = "",
    known: Mapping[int, MessageOutline] | None = None,
) -> Conversation:
    """The outline of a request.

    Args:
        model: the model or adapter that computes it. `salt`: what separates its cache from others of the tenant.
        known: messages of earlier outlines by `digest` of their content, whose lines need not be hashed again.
    """
    settings = {
        "model": digest(model or request.model or ""),
        "cache_salt": digest(salt),
        "chat_template": digest(template),
        "prefix": digest(request.prefix or ""),
        **{
            f"chat_template_kwargs.{k}": digest(json.dumps(v, sort_keys=True, default=str))
            for k, v in sorted(request.template_options.items())
        },
    }
    known = known or {}
    if request.messages:
        messages = tuple(message_outline(one, known) for one in request.messages)
        names = tuple(_names(request))
    else:
        messages = tuple(_prompt_outline(one) for one in request.prompts)
        names = ("prompt",) if len(messages) == 1 else tuple(f"prompt[{i}]" for i in range(len(messages)))
    tools = tuple(_tool_outline(one) for one in request.tools)
    session = request.cache.key or request.session
    return Conversation(tenant, session, settings, tools, messages, names)


def message_outline(message: Message, known: Mapping[int, MessageOutline] | None = None) -> MessageOutline:
    content = message.content.strip()
    key = digest(content)
    same = (known or {}).get(key)
    lines = (same.lines, same.shapes, same.lengths) if same else _line_hashes(content)
    calls = tuple(_call_outline(call) for call in message.tool_calls)
    reasoning = digest(message.reasoning.strip()) if message.reasoning.strip() else 0
    whole = _of_numbers((key, reasoning, digest(message.role), *(call.exact for call in calls)))
    characters = len(content) + len(message.reasoning) + sum(len(c.name) + len(c.arguments) for c in message.tool_calls)
    return MessageOutline(message.role, key, *lines, reasoning, calls, characters, whole)


def _prompt_outline(prompt: Prompt) -> MessageOutline:
    if isinstance(prompt, str):
        return message_outline(Message("user", prompt))
    try:
        data = array("q", prompt)
    except OverflowError:  # no token; a replica will say so
        return _prompt_outline(str(prompt))
    parts = [data[i : i + _TOKENS_PER_LINE].tobytes() for i in range(0, len(data), _TOKENS_PER_LINE)]
    lines, lengths = _hashed(parts, b"")
    whole = digest(data.tobytes())
    return MessageOutline("user", whole, lines, lines, lengths, 0, (), len(prompt) * _TEXT_PER_TOKEN, whole)


def _line_hashes(content: str) -> tuple[array[int], array[int], array[int]]:
    lines, lengths = _hashed(_lines_of(content), b"\n")
    shapes, _ = _hashed(_lines_of(_VOLATILE.sub("#", content)), b"\n")
    return lines, lines if shapes == lines else shapes, lengths


def _lines_of(text: str) -> list[bytes]:
    return text.encode("utf-8", "surrogatepass").split(b"\n")


def _hashed(parts: list[bytes], separator: bytes) -> tuple[array[int], array[int]]:
    """Hashes and lengths of the parts; those beyond the limit count as one."""
    rest = [separator.join(parts[MAX_LINES:])] if len(parts) > MAX_LINES else []
    kept = [*parts[:MAX_LINES], *rest]
    return array("Q", [digest(part) for part in kept]), array("Q", map(len, kept))


def _call_outline(call: ToolCall) -> CallOutline:
    exact = digest(f"{call.name}\0{call.arguments}")
    try:
        canonical = digest(f"{call.name}\0{json.dumps(json.loads(call.arguments), sort_keys=True)}")
    except (ValueError, RecursionError):
        canonical = exact
    return CallOutline(exact, canonical)


def _tool_outline(tool: Tool) -> ToolOutline:
    text = json.dumps(tool.parameters, default=str)
    head = f"{tool.name}\0{tool.description}\0"
    canonical = digest(head + json.dumps(tool.parameters, sort_keys=True, default=str))
    return ToolOutline(tool.name, digest(head + text), canonical, len(head) + len(text))


def _names(request: GenerateRequest) -> Iterable[str]:
    """How the client finds each message in its body."""
    apart = {"messages": ("system", "messages"), "responses": ("instructions", "input")}.get(request.dialect)
    if apart is None:
        return (f"messages[{i}]" for i in range(len(request.messages)))
    leading = 1 if request.messages[0].role == "system" else 0
    return (apart[0] if i < leading else f"{apart[1]}[{i - leading}]" for i in range(len(request.messages)))


def _of_numbers(numbers: Sequence[int]) -> int:
    return digest(array("Q", numbers).tobytes())
