"""Changes to a chat that make it hit the cache, each of them opt-in and named in the response.

They work on the body of a chat completion and leave whatever they do not understand as it is.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Final

from foreword.api.output import CallArguments, CallStart, Piece, Reasoning, Text
from foreword.errors import ConfigError

Body = Mapping[str, Any]
HEADER: Final = "x-foreword-normalised"
# Longer lines are not headers, and a regular expression may need long for them.
_MAX_LINE: Final = 1000
_MAX_ANSWER: Final = 1 << 20
_SYSTEM_ROLES: Final = ("system", "developer")


@dataclass(frozen=True, slots=True)
class _Answer:
    reasoning: str
    arguments: tuple[str, ...]

    @property
    def size(self) -> int:
        return len(self.reasoning) + sum(map(len, self.arguments)) + 256


class AnswerMemory:
    """Reasoning and arguments of recent answers, as the model wrote them, about `capacity` characters of them.

    An answer is found by its tenant and by the whole conversation up to it.
    """

    def __init__(self, capacity: int = 1 << 24) -> None:
        self._capacity = capacity
        self._size = 0
        self._answers: OrderedDict[bytes, _Answer] = OrderedDict()

    @property
    def size(self) -> int:
        return self._size

    def remember(self, tenant: str, messages: Sequence[Any], pieces: Sequence[Piece]) -> None:
        """Keep what the model answered to `messages`."""
        names = [piece.name for piece in pieces if isinstance(piece, CallStart)]
        arguments = [""] * len(names)
        for piece in pieces:
            if isinstance(piece, CallArguments) and piece.index < len(arguments):
                arguments[piece.index] += piece.text
        reasoning = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
        text = "".join(piece.text for piece in pieces if isinstance(piece, Text))
        answer = _Answer(reasoning, tuple(arguments))
        if not (reasoning or arguments) or answer.size > min(_MAX_ANSWER, self._capacity):
            return
        calls = [{"function": {"name": n, "arguments": a}} for n, a in zip(names, arguments, strict=True)]
        chain = _Chain(tenant)
        for message in messages:
            chain.add(message)
        self._put(chain.add({"role": "assistant", "content": text, "tool_calls": calls}), answer)

    def _put(self, key: bytes, answer: _Answer) -> None:
        old = self._answers.pop(key, None)
        self._size += answer.size - (old.size if old else 0)
        self._answers[key] = answer
        while self._size > self._capacity:
            self._size -= self._answers.popitem(last=False)[1].size

    def restore(self, tenant: str, messages: Sequence[Any]) -> tuple[list[Any], int]:
        """The messages with reasoning and arguments as the model wrote them, and the number of messages changed."""
        chain, changed = _Chain(tenant), 0
        restored = []
        for message in messages:
            answer = self._answers.get(chain.add(message))
            known = message if answer is None else _restored(message, answer)
            changed += known is not message
            restored.append(known)
        return restored, changed


class _Chain:
    """A hash of a conversation, message by message, without reasoning and without the way in which JSON is written."""

    def __init__(self, tenant: str) -> None:
        self._key = tenant.encode("utf-8", "surrogatepass")

    def add(self, message: Any) -> bytes:
        fields = message if isinstance(message, Mapping) else {}
        content = fields.get("content")
        calls = [(name, _canonical(arguments)) for name, arguments in _calls(message)]
        text = content.strip() if isinstance(content, str) else json.dumps(content, sort_keys=True, default=str)
        role = str(fields.get("role"))
        known = json.dumps([role, "" if content is None else text, calls, fields.get("tool_call_id") and "tool"])
        self._key = blake2b(known.encode(), key=blake2b(self._key, digest_size=32).digest(), digest_size=16).digest()
        return self._key


@dataclass(frozen=True)
class Normalisers:
    """Which changes are on.

    Attributes:
        volatile: lines of the system prompt in which one of these is found are dropped.
        tools: tools are sorted by name, and the keys of their schemas by name.
        answers: reasoning and arguments of earlier answers are restored from here, if the client dropped or rewrote them.
    """

    volatile: tuple[re.Pattern[str], ...] = ()
    tools: bool = False
    answers: AnswerMemory | None = field(default=None, compare=False)

    @classmethod
    def make(cls, volatile: Sequence[str] = (), *, tools: bool = False, reasoning: bool = False) -> Normalisers:
        """Raises ConfigError for a pattern that is no regular expression."""
        return cls(tuple(map(_pattern, volatile)), tools, AnswerMemory() if reasoning else None)

    def __bool__(self) -> bool:
        return bool(self.volatile or self.tools or self.answers is not None)

    def apply(self, body: Body, tenant: str = "") -> tuple[Body, str]:
        """The body to send, and the value of the response header: empty if nothing was changed."""
        changes: dict[str, Any] = {}
        names: list[str] = []
        messages = body.get("messages")
        if isinstance(messages, list):
            changes["messages"], names = self._messages(messages, tenant)
        if self.tools and isinstance(body.get("tools"), list):
            tools = canonical_tools(body["tools"])
            if json.dumps(tools) != json.dumps(body["tools"]):
                changes["tools"] = tools
                names.append("tools")
        return ({**body, **changes}, ", ".join(names)) if names else (body, "")

    def _messages(self, messages: list[Any], tenant: str) -> tuple[list[Any], list[str]]:
        names: list[str] = []
        if self.answers is not None:
            messages, restored = self.answers.restore(tenant, messages)
            names += [f"answers={restored}"] if restored else []
        if self.volatile:
            messages, dropped = drop_volatile_lines(messages, self.volatile)
            names += [f"volatile-lines={dropped}"] if dropped else []
        return messages, names

    def remember(self, tenant: str, body: Body, pieces: Sequence[Piece]) -> None:
        """Keep the answer to `body`, as the client sent it."""
        if self.answers is not None and isinstance(body.get("messages"), list):
            self.answers.remember(tenant, body["messages"], pieces)


def drop_volatile_lines(messages: Sequence[Any], patterns: Sequence[re.Pattern[str]]) -> tuple[list[Any], int]:
    """The messages without those lines of the leading system messages that match, and the number of lines dropped."""
    found, dropped = list(messages), 0
    for index, message in enumerate(found):
        if not (isinstance(message, Mapping) and message.get("role") in _SYSTEM_ROLES):
            break
        content, count = _without_lines(message.get("content"), patterns)
        if count:
            found[index] = {**message, "content": content}
            dropped += count
    return found, dropped


def canonical_tools(tools: Sequence[Any]) -> list[Any]:
    """Tools by name, and the keys of their JSON schemas in order."""
    return sorted((_sorted_keys(tool) for tool in tools), key=lambda tool: (_tool_name(tool), json.dumps(tool)))


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise ConfigError(f"{text!r} is not a regular expression: {error} (--drop-lines)") from error


def _without_lines(content: Any, patterns: Sequence[re.Pattern[str]]) -> tuple[Any, int]:
    if isinstance(content, str):
        lines = content.split("\n")
        kept = [line for line in lines if not _matches(line, patterns)]
        return "\n".join(kept), len(lines) - len(kept)
    if not isinstance(content, list):
        return content, 0
    parts, dropped = [], 0
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) else None
        kept_text, count = _without_lines(text, patterns) if isinstance(text, str) else (text, 0)
        parts.append({**part, "text": kept_text} if count else part)
        dropped += count
    return parts, dropped


def _matches(line: str, patterns: Sequence[re.Pattern[str]]) -> bool:
    return len(line) <= _MAX_LINE and any(pattern.search(line) for pattern in patterns)


def _sorted_keys(value: Any) -> Any:
    return json.loads(json.dumps(value, sort_keys=True))


def _tool_name(tool: Any) -> str:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else ""


def _calls(message: Any) -> list[tuple[str, str]]:
    """Names and arguments of a message's calls; empty if one of them has another shape."""
    calls = message.get("tool_calls") if isinstance(message, Mapping) else None
    if not isinstance(calls, list):
        return []
    found = []
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        arguments = function.get("arguments") if isinstance(function, Mapping) else None
        if not (isinstance(name, str) and isinstance(arguments, str)):
            return []
        found.append((name, arguments))
    return found


def _canonical(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments


def _restored(message: Mapping[str, Any], answer: _Answer) -> Mapping[str, Any]:
    """The message itself if nothing has to be restored."""
    changes: dict[str, Any] = {}
    if answer.reasoning and not (message.get("reasoning_content") or message.get("reasoning")):
        changes["reasoning_content"] = answer.reasoning
    calls = _calls(message)
    if len(calls) == len(answer.arguments) and [text for _, text in calls] != list(answer.arguments):
        changes["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": arguments}}
            for call, arguments in zip(message["tool_calls"], answer.arguments, strict=True)
        ]
    return {**message, **changes} if changes else message
