"""Parts that all writers share: the head of a response, an answer that grows, and why a prompt was not cached, in the words of
OpenAI's and Anthropic's own diagnostics.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, Protocol

import msgspec

from foreword.api.output import (
    CallArguments,
    CallStart,
    ChoiceDelta,
    FinishReason,
    Piece,
    PromptInfo,
    Reasoning,
    Text,
    Usage,
)
from foreword.api.request import GenerateRequest
from foreword.api.token_entry import TokenEntry
from foreword.errors import ForewordError

_NO_MISS: Final = ("all_cached", "new_text")
_TOOLS: Final = ("tools_reordered", "tools_changed")
_SYSTEM: Final = ("system_prompt_changed", "prefix_changed")
_MESSAGES: Final = ("volatile_line", "json_reordered", "reasoning_changed", "compacted", "message_edited")
_SETTINGS: Final = ("template_changed", "salt_changed")
to_json: Final = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """Identifiers of a response. `id` includes the dialect's prefix."""

    id: str
    model: str
    created: int
    system_fingerprint: str = ""


@dataclass(slots=True, eq=False)
class Block:
    """A run of text or of reasoning, or a call with its arguments."""

    kind: Literal["text", "reasoning", "call"]
    parts: list[str] = field(default_factory=list)
    index: int = 0
    id: str = ""
    name: str = ""

    @property
    def text(self) -> str:
        if len(self.parts) > 1:
            self.parts = ["".join(self.parts)]
        return self.parts[0] if self.parts else ""


@dataclass(slots=True)
class ChoiceOutput:
    """Output of one choice so far."""

    blocks: list[Block] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenEntry] | None = None
    finish_reason: FinishReason | None = None
    stop_match: str | int | None = None
    prompt: PromptInfo | None = None

    def add(self, delta: ChoiceDelta) -> None:
        for piece in delta.pieces:
            self.add_piece(piece)
        self.tokens.extend(delta.tokens)
        if delta.logprobs is not None:
            self.logprobs = self.logprobs or []
            self.logprobs.extend(delta.logprobs)
        self.finish_reason = delta.finish_reason or self.finish_reason
        self.stop_match = delta.stop_match if delta.stop_match is not None else self.stop_match
        self.prompt = delta.prompt or self.prompt

    def add_piece(self, piece: Piece) -> Block:
        """The block that the piece belongs to."""
        if isinstance(piece, CallStart):
            block = Block("call", [], piece.index, piece.id, piece.name)
            self.blocks.append(block)
            return block
        if isinstance(piece, CallArguments):
            block = next(one for one in reversed(self.blocks) if one.kind == "call" and one.index == piece.index)
        else:
            block = self._run("text" if isinstance(piece, Text) else "reasoning")
        block.parts.append(piece.text)
        return block

    def _run(self, kind: Literal["text", "reasoning"]) -> Block:
        if not self.blocks or self.blocks[-1].kind != kind:
            self.blocks.append(Block(kind))
        return self.blocks[-1]

    def joined(self, kind: Literal["text", "reasoning"]) -> str:
        """All text of a kind."""
        return "".join(block.text for block in self.blocks if block.kind == kind)

    @property
    def calls(self) -> list[Block]:
        return [block for block in self.blocks if block.kind == "call"]


class Writer(Protocol):
    """Writes one response. Deltas go to `events` of a streamed response, or to `add` before `whole` of another one."""

    def start(self, usage: Usage) -> list[bytes]:
        """Events that need no output. `usage` is what is known before it."""

    def resume(self, index: int, entries: Sequence[TokenEntry] = ()) -> None:
        """Another server has sent the first part of choice `index`, with these tokens."""

    def events(self, delta: ChoiceDelta, report: Any = None) -> list[bytes]:
        """Events for a delta. `report` is the cache report, once it is known."""

    def end(self, usage: Usage, report: Any = None) -> bytes:
        """The last events."""

    def error(self, error: ForewordError) -> bytes:
        """The event that ends a stream early."""

    def add(self, delta: ChoiceDelta) -> None:
        """Keep a delta for `whole`."""

    def whole(self, usage: Usage, report: Any = None) -> dict[str, Any]:
        """The response as JSON."""


class BaseWriter:
    """Keeps what was added. Reasoning that the client does not want is left out."""

    def __init__(self, request: GenerateRequest, head: ResponseHead) -> None:
        self.request = request
        self.head = head
        self.choices: dict[int, ChoiceOutput] = {}

    def choice(self, index: int) -> ChoiceOutput:
        return self.choices.setdefault(index, ChoiceOutput())

    def add(self, delta: ChoiceDelta) -> None:
        choice = self.choice(delta.index)
        choice.add(delta if self.request.reasoning else _without_reasoning(delta))

    def shown(self, delta: ChoiceDelta) -> tuple[Piece, ...]:
        """The pieces that the client wants."""
        return delta.pieces if self.request.reasoning else _without_reasoning(delta).pieces

    def in_order(self) -> Iterator[tuple[int, ChoiceOutput]]:
        return iter(sorted(self.choices.items()))

    def start(self, usage: Usage) -> list[bytes]:
        return []


def _without_reasoning(delta: ChoiceDelta) -> ChoiceDelta:
    if not any(isinstance(piece, Reasoning) for piece in delta.pieces):
        return delta
    pieces = tuple(piece for piece in delta.pieces if not isinstance(piece, Reasoning))
    return replace(delta, pieces=pieces)


def messages_diagnostics(report: Any) -> dict[str, Any] | None:
    """Anthropic's `diagnostics`; None if everything was cached that could be."""
    cause, lost = _cause(report)
    if cause in _NO_MISS:
        return None
    if cause == "new_conversation":
        return {"cache_miss_reason": {"type": "previous_message_not_found"}}
    kind = _message_kind(cause, report)
    tokens = {} if kind == "unavailable" else {"cache_missed_input_tokens": lost}
    return {"cache_miss_reason": {"type": kind, **tokens}}


def _message_kind(cause: str, report: Any) -> str:
    if cause in _TOOLS:
        return "tools_changed"
    if cause in _SYSTEM or (cause in _MESSAGES and str(report.get("where", "")).startswith("system")):
        return "system_changed"
    if cause in _MESSAGES:
        return "messages_changed"
    return "model_changed" if cause == "model_changed" else "unavailable"


def responses_diagnostics(report: Any) -> dict[str, Any]:
    """OpenAI's `prompt_cache_diagnostics`."""
    cause, lost = _cause(report)
    if cause in _NO_MISS:
        return {"type": "cache_hit"}
    if cause == "new_conversation":
        return {"type": "comparison_response_not_found"}
    reason = _response_reason(cause)
    return {"type": "cache_miss", "reason": reason, "cache_missed_tokens": lost} if reason else {"type": "unavailable"}


def _response_reason(cause: str) -> str | None:
    if cause in _TOOLS:
        return "tools_changed"
    if cause == "compacted":
        return "context_compacted"
    if cause == "model_changed":
        return "model_changed"
    return "input_changed" if cause in (*_SYSTEM, *_MESSAGES, *_SETTINGS) else None


def _cause(report: Any) -> tuple[str, int]:
    """The cause and the tokens it cost, of a cache report as JSON."""
    if not isinstance(report, Mapping):
        return "", 0
    lost = report.get("tokens_lost")
    return str(report.get("cause", "")), lost if isinstance(lost, int) else 0
