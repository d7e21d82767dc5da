"""Read chat completions of any OpenAI-compatible server, streamed and whole.

A wrong shape raises ReplicaFailed: a replica is not trusted to send what it should.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from foreword.api.dialects.limits import UNSET_RAW, is_set
from foreword.api.output import (
    CallArguments,
    CallStart,
    ChoiceDelta,
    FinishReason,
    Piece,
    PromptInfo,
    Reasoning,
    Text,
    TokenEntry,
    Usage,
)
from foreword.errors import BadRequest, ForewordError, NotFound, PromptTooLong, QueueFull, ReplicaFailed

Count = Annotated[int, Meta(ge=0, le=2**53)]
Byte = Annotated[int, Meta(ge=0, le=255)]

_FINISH_REASONS: Final[dict[str, FinishReason]] = {
    "length": "length",
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
    "content_filter": "content_filter",
}
_BROKEN: Final = ("abort", "error")
_SHOWN: Final = 300
_MOST_CALLS: Final = 1024


class _Function(Struct):
    name: str | None = None
    arguments: str | None = None


class _Call(Struct):
    index: Count | None = None
    id: str | None = None
    function: _Function | None = None


class _Spoken(Struct):
    """A delta, or a whole message."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[_Call] | None = None


class _Alternative(Struct):
    token: str
    logprob: float
    bytes: list[Byte] | None = None


class _Odds(_Alternative):
    top_logprobs: list[_Alternative] | None = None


class _Logprobs(Struct):
    content: list[_Odds] | None = None


class _Choice(Struct):
    index: Count = 0
    delta: _Spoken | UnsetType = UNSET
    message: _Spoken | UnsetType = UNSET
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[Count] | None = None


class _InputDetails(Struct):
    cached_tokens: Count | None = None


class _OutputDetails(Struct):
    reasoning_tokens: Count | None = None


class _Usage(Struct):
    prompt_tokens: Count
    completion_tokens: Count | None = None
    prompt_tokens_details: _InputDetails | None = None
    completion_tokens_details: _OutputDetails | None = None


class _Chunk(Struct):
    """A chunk of a stream, or a whole response."""

    choices: list[_Choice] | UnsetType = UNSET
    usage: _Usage | None = None
    error: Raw = UNSET_RAW
    cache_report: Raw = UNSET_RAW
    prompt_token_ids: list[Count] | None = None


class _Error(Struct):
    message: str | None = None
    type: str | None = None
    code: str | int | None = None
    param: str | None = None


class _ErrorBody(Struct):
    error: _Error | str
    message: str | None = None


@dataclass(slots=True)
class _ChoiceState:
    """The calls of one choice: those that began, by the index that the replica gives them."""

    started: set[int] = field(default_factory=set)
    last: int = -1

    def pieces(self, spoken: _Spoken) -> tuple[Piece, ...]:
        pieces: list[Piece] = []
        if reasoning := spoken.reasoning_content or spoken.reasoning:
            pieces.append(Reasoning(reasoning))
        if text := spoken.content or spoken.refusal:
            pieces.append(Text(text))
        for call in spoken.tool_calls or ():
            pieces += self._call(call)
        return tuple(pieces)

    def _call(self, call: _Call) -> list[Piece]:
        function = call.function or _Function()
        index = self._index(call)
        pieces: list[Piece] = []
        if index not in self.started:
            if not function.name or len(self.started) >= _MOST_CALLS:
                raise ReplicaFailed("the replica sent a tool call without a name, or too many of them")
            self.started.add(index)
            self.last = index
            pieces.append(CallStart(index, call.id or f"call_{index}", function.name))
        elif index != self.last and function.arguments:
            raise ReplicaFailed("the replica mixes the arguments of several tool calls")
        if function.arguments:
            pieces.append(CallArguments(index, function.arguments))
        return pieces

    def _index(self, call: _Call) -> int:
        if call.index is not None:
            return call.index
        return self.last + 1 if call.id or self.last < 0 else self.last

    def finish_reason(self, reason: str) -> FinishReason:
        if reason in _BROKEN:
            raise ReplicaFailed(f"the replica ended the response with finish_reason {reason!r}")
        # For a named tool, OpenAI and vLLM say "stop".
        return _FINISH_REASONS.get(reason, "tool_calls" if self.started else "stop")


class ChatReader:
    """Reads one response, with one choice.

    Attributes:
        usage: None until it arrived.
        report: the cache report of a Foreword replica.
    """

    def __init__(self) -> None:
        self.usage: Usage | None = None
        self.report: Any = None
        self._state = _ChoiceState()
        self._prompt: PromptInfo | None = None

    def read_chunk(self, data: bytes) -> list[ChoiceDelta]:
        """The deltas in the data of one event. Raises ReplicaFailed, and BadRequest if the replica refuses the request."""
        return self._read(data, whole=False)

    def read_whole(self, data: bytes) -> list[ChoiceDelta]:
        """The choices of a whole response, each as one delta. Raises as `read_chunk`."""
        deltas = self._read(data, whole=True)
        if len(deltas) != 1:
            raise ReplicaFailed(f"the replica sent {len(deltas)} choices, not one")
        if any(delta.finish_reason is None for delta in deltas) or self.usage is None:
            raise ReplicaFailed("the replica sent a response without finish_reason or usage")
        return deltas

    def _read(self, data: bytes, *, whole: bool) -> list[ChoiceDelta]:
        chunk = _decode(data, _Chunk)
        if is_set(chunk.error):
            raise _refusal(data)
        if isinstance(chunk.choices, UnsetType):
            raise ReplicaFailed("the replica sent JSON without choices")
        if chunk.prompt_token_ids is not None:
            self._prompt = PromptInfo(tuple(chunk.prompt_token_ids))
        if chunk.usage is not None:
            self.usage = _usage(chunk.usage)
        if is_set(chunk.cache_report):
            self.report = _decode(chunk.cache_report, object)
        return [self._delta(choice, whole) for choice in chunk.choices]

    def _delta(self, choice: _Choice, whole: bool) -> ChoiceDelta:
        spoken = choice.message if whole else choice.delta
        if isinstance(spoken, UnsetType) or choice.index:
            raise ReplicaFailed("the replica sent a choice without content, or one that was not asked for")
        prompt, self._prompt = self._prompt, None
        return ChoiceDelta(
            choice.index,
            self._state.pieces(spoken),
            tuple(choice.token_ids or ()),
            _entries(choice.logprobs),
            None if choice.finish_reason is None else self._state.finish_reason(choice.finish_reason),
            choice.stop_reason,
            prompt,
        )


def read_error(status: int, data: bytes) -> ForewordError:
    """The error in a response with another status than 200, as one of Foreword's."""
    try:
        body = _decode(data, _ErrorBody)
    except ReplicaFailed:
        body = _ErrorBody(_Error())
    found = _Error(body.error) if isinstance(body.error, str) else body.error
    message = (found.message or body.message or f"the replica answered with status {status}")[:_SHOWN]
    if found.code == PromptTooLong.code:
        return PromptTooLong(message, param=found.param)
    if status in (400, 413, 422):
        return BadRequest(message, param=found.param)
    if status == 404:
        return NotFound(message)
    return QueueFull(message) if status == 429 else ReplicaFailed(message)


def _refusal(data: bytes) -> ForewordError:
    """The error in an event of a stream."""
    body = _decode(data, _ErrorBody)
    found = _Error(body.error) if isinstance(body.error, str) else body.error
    is_client = found.type == "invalid_request_error" or (isinstance(found.code, int) and 400 <= found.code < 500)
    return read_error(400 if is_client else 502, data)


AnyType = TypeVar("AnyType")


def _decode(data: bytes | Raw, kind: type[AnyType]) -> AnyType:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ReplicaFailed(f"the replica sent something else than chat completions: {str(error)[:_SHOWN]}") from None


def _usage(found: _Usage) -> Usage:
    cached = found.prompt_tokens_details.cached_tokens if found.prompt_tokens_details is not None else 0
    reasoned = found.completion_tokens_details.reasoning_tokens if found.completion_tokens_details is not None else 0
    return Usage(
        prompt_tokens=found.prompt_tokens,
        output_tokens=found.completion_tokens or 0,
        cached_tokens=min(cached or 0, found.prompt_tokens),
        reasoning_tokens=reasoned or 0,
    )


def _entries(found: _Logprobs | None) -> tuple[TokenEntry, ...] | None:
    if found is None or found.content is None:
        return None
    return tuple(
        TokenEntry(one.token, one.logprob, _raw(one), top=_alternatives(one.top_logprobs or ()))
        for one in found.content
    )


def _alternatives(found: Sequence[_Alternative]) -> tuple[tuple[str, float, bytes], ...]:
    return tuple((one.token, one.logprob, _raw(one)) for one in found)


def _raw(one: _Alternative) -> bytes:
    return one.token.encode() if one.bytes is None else bytes(one.bytes)
