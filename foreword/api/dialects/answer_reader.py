"""Reads what a server answers, in any dialect: event by event, or whole.

A wrong shape raises ReplicaFailed: a replica is not trusted to send what it should.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Final, NamedTuple, TypeVar

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from foreword.api.dialects.decode import NO_JSON, is_set
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
from foreword.decoders import decode_json, json_decoder
from foreword.errors import BadRequest, ForewordError, NotFound
from foreword.request_errors import PromptTooLong, QueueFull, ReplicaError, ReplicaFailed, RequestEnded
from foreword.usage import TokenUsage

Count = Annotated[int, Meta(ge=0, le=2**53)]
TokenId = Annotated[int, Meta(ge=0, lt=2**32)]
Byte = Annotated[int, Meta(ge=0, le=255)]

_FINISH_REASONS: Final[dict[str, FinishReason]] = {
    "length": "length",
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
    "content_filter": "content_filter",
}
_BROKEN: Final = ("abort", "error")
# Statuses of errors in a stream that every replica would return.
_CLIENT_ERRORS: Final = (400, 413, 422)
_SHOWN: Final = 300
_MOST_CALLS: Final = 1024
# Fields of a delta that are text, or say nothing.
_PLAIN: Final = frozenset(("role", "content", "refusal"))
# The last events of Anthropic's messages and OpenAI's responses.
_LAST: Final = frozenset(("message_stop", "response.completed", "response.incomplete", "response.failed"))


class UsageCounts(NamedTuple):
    """Token counts that an answer names; None where it does not."""

    cached: int | None = None
    output: int | None = None
    prompt: int | None = None
    reasoning: int | None = None

    @property
    def usage(self) -> TokenUsage:
        """The counts of a usage; unknown ones are 0."""
        return TokenUsage(self.prompt or 0, self.output or 0, self.cached or 0, self.reasoning or 0)


class _Details(Struct):
    cached_tokens: Count | None = None
    reasoning_tokens: Count | None = None


class _Usage(Struct):
    """The usage in any dialect."""

    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None
    input_tokens: Count | None = None
    output_tokens: Count | None = None
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None
    output_tokens_details: _Details | None = None
    cache_read_input_tokens: Count | None = None
    cache_creation_input_tokens: Count | None = None

    def counts(self) -> UsageCounts:
        before = self.prompt_tokens_details or self.input_tokens_details or _Details()
        after = self.completion_tokens_details or self.output_tokens_details or _Details()
        cached, prompt = before.cached_tokens, self.prompt_tokens
        if prompt is None and self.input_tokens is not None:
            # Anthropic's input_tokens are without those that were read from and written to the cache.
            read, written = self.cache_read_input_tokens, self.cache_creation_input_tokens or 0
            cached = read if read is not None else cached
            prompt = self.input_tokens + (read or 0) + written
        if cached is not None and prompt is not None:
            cached = min(cached, prompt)
        output = self.completion_tokens if self.completion_tokens is not None else self.output_tokens
        return UsageCounts(cached, output, prompt, after.reasoning_tokens)


class _Function(Struct):
    name: str | None = None
    arguments: str | None = None


class _Call(Struct):
    index: Count | None = None
    id: str | None = None
    function: _Function | None = None


class _Spoken(Struct, gc=False):
    """A delta, or a whole message."""

    role: str | None = None
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


class Logprobs(Struct):
    """Log-probabilities of a chat: `content`. Of a completion: an entry per token, the first of a prompt without a value."""

    content: list[_Odds] | None = None
    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    text_offset: list[int] = []
    top_logprobs: list[dict[str, float] | None] | None = None

    def entries(self) -> tuple[TokenEntry, ...]:
        """Entries, one per token. Raises ReplicaFailed for lists that do not match."""
        if self.content is not None:
            others = (tuple((o.token, o.logprob, _raw(o)) for o in one.top_logprobs or ()) for one in self.content)
            pairs = zip(self.content, others, strict=True)
            return tuple(TokenEntry(one.token, one.logprob, _raw(one), top=top) for one, top in pairs)
        tops = self.top_logprobs or [None] * len(self.tokens)
        if not len(self.tokens) == len(self.token_logprobs) == len(tops):
            raise ReplicaFailed("the replica sent log-probabilities that do not match its tokens")
        ranked = (sorted((top or {}).items(), key=lambda pair: -pair[1]) for top in tops)
        return tuple(
            TokenEntry(text, value, bytes_of(text), top=tuple((other, its, bytes_of(other)) for other, its in top))
            for text, value, top in zip(self.tokens, self.token_logprobs, ranked, strict=True)
        )


class AnswerChoice(Struct, gc=False):
    """A choice of a chat or a completion: more of it, or all."""

    index: Count = 0
    text: str | None = None
    delta: _Spoken | None = None
    message: _Spoken | None = None
    logprobs: Raw = NO_JSON
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[TokenId] | None = None
    prompt_token_ids: list[TokenId] | None = None

    @property
    def spoken(self) -> _Spoken | None:
        """None without any content."""
        found = self.delta if self.delta is not None else self.message
        return found if found is not None or self.text is None else _Spoken(content=self.text)

    @property
    def shown(self) -> str:
        """The text that is seen."""
        spoken = self.delta
        return (self.text if spoken is None else spoken.content or spoken.refusal) or ""

    def read_logprobs(self) -> Logprobs | None:
        """Raises ReplicaFailed."""
        return _decode(self.logprobs, Logprobs) if is_set(self.logprobs) else None


class AnswerChunk(Struct, gc=False):
    """The content of one event, or of a whole body. Of events of other dialects only what counts."""

    choices: list[AnswerChoice] | UnsetType | None = UNSET
    usage: _Usage | UnsetType | None = UNSET
    error: Raw = NO_JSON
    cache_report: Raw = NO_JSON
    prompt_token_ids: list[TokenId] | None = None
    system_fingerprint: str | None = None
    kv_transfer_params: dict[str, Any] | None = None
    # Of responses and messages.
    type: str | None = None
    output: list[Raw] | None = None
    response: Raw = NO_JSON
    message: Raw = NO_JSON


_chunk: Final = json_decoder(AnswerChunk)


class _Nested(Struct):
    usage: _Usage | None = None


class AnswerError(Struct):
    """The error in an answer."""

    message: str | None = None
    type: str | None = None
    code: str | int | None = None
    param: str | None = None


class _ErrorBody(Struct):
    error: AnswerError | str = ""
    message: str | None = None
    detail: Any = None  # of servers on FastAPI


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
        # For a named tool, OpenAI and vLLM say "stop".
        return _FINISH_REASONS.get(reason, "tool_calls" if self.started else "stop")


class AnswerReader:
    """Reads one answer of any dialect: its events in order, or its whole body.

    Attributes:
        counts: of its tokens, those that have arrived.
        report: the cache report of a Foreword replica.
        begun: there was output. other: in what was read last, besides text.
        ended: the last event came, of a dialect whose streams do not end with `[DONE]`. last: the response in it.
    """

    def __init__(self) -> None:
        self.counts = UsageCounts()
        self.report: Any = None
        self.begun = False
        self.other = False
        self.ended = False
        self.last = NO_JSON
        self._state = _ChoiceState()
        self._prompt: PromptInfo | None = None

    @property
    def usage(self) -> Usage:
        """The counts; those that did not arrive are 0."""
        cached, output, prompt, reasoning = (count or 0 for count in self.counts)
        return Usage(prompt, output, cached, reasoning_tokens=reasoning)

    def read(self, data: bytes) -> AnswerChunk:
        """The data of one event, or a whole body. Runs for every token.

        Raises ReplicaFailed for another shape and for errors, and BadRequest for errors that every replica would return.
        """
        try:
            chunk = _chunk(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise _malformed(error) from None
        self.other = False
        if chunk.choices:
            for choice in chunk.choices:
                self._note(choice, data)
        if chunk.usage:
            self._count(chunk.usage)
        if chunk.type is not None:
            self._event(chunk, chunk.type)
        if chunk.error is not NO_JSON and is_set(chunk.error):
            raise _refusal(data)
        if chunk.cache_report is not NO_JSON and is_set(chunk.cache_report):
            self.report = _decode(chunk.cache_report, object)
        return chunk

    def _note(self, choice: AnswerChoice, data: bytes) -> None:
        if choice.finish_reason in _BROKEN:
            raise ReplicaFailed(f"the replica ended the response with finish_reason {choice.finish_reason!r}")
        spoken = choice.delta if choice.delta is not None else choice.message
        if spoken is None:
            self.begun = self.begun or bool(choice.text or choice.token_ids)
            return
        text = spoken.content or spoken.refusal
        if spoken.reasoning or spoken.reasoning_content or spoken.tool_calls or not (text or not _has_more(data)):
            self.begun = self.other = True
        elif text or choice.token_ids:
            self.begun = True

    def _count(self, usage: _Usage) -> None:
        found = usage.counts()
        self.counts = UsageCounts(*(old if new is None else new for old, new in zip(self.counts, found, strict=True)))

    def _event(self, chunk: AnswerChunk, kind: str) -> None:
        """Log-probabilities in events of responses and messages."""
        self.begun = self.begun or kind.endswith("delta")
        self.ended = kind in _LAST
        if self.ended:
            self.last = chunk.response
        for nested in (chunk.response, chunk.message):
            # An error of OpenAI's responses has a text there.
            if is_set(nested) and bytes(memoryview(nested)[:1]) == b"{":
                usage = _decode(nested, _Nested).usage
                if usage is not None:
                    self._count(usage)

    def read_deltas(self, data: bytes) -> list[ChoiceDelta]:
        """The deltas in the data of one event of a chat or a completion with one choice. Raises as `read`."""
        chunk = self.read(data)
        if chunk.choices is UNSET:
            raise ReplicaFailed("the replica sent JSON without choices")
        if chunk.prompt_token_ids is not None:
            self._prompt = PromptInfo(tuple(chunk.prompt_token_ids))
        return [self._delta(choice) for choice in chunk.choices or ()]

    def read_whole(self, data: bytes) -> ChoiceDelta:
        """The choice of a whole response, as one delta. Raises as `read`."""
        deltas = self.read_deltas(data)
        if len(deltas) != 1:
            raise ReplicaFailed(f"the replica sent {len(deltas)} choices, not one")
        if deltas[0].finish_reason is None or self.counts.prompt is None:
            raise ReplicaFailed("the replica sent a response without finish_reason or usage")
        return deltas[0]

    def _delta(self, choice: AnswerChoice) -> ChoiceDelta:
        spoken = choice.spoken
        if spoken is None or choice.index:
            raise ReplicaFailed("the replica sent a choice without content, or one that was not asked for")
        prompt, self._prompt = self._prompt, None
        logprobs = choice.read_logprobs()
        return ChoiceDelta(
            choice.index,
            self._state.pieces(spoken),
            tuple(choice.token_ids or ()),
            None if logprobs is None else logprobs.entries(),
            None if choice.finish_reason is None else self._state.finish_reason(choice.finish_reason),
            choice.stop_reason,
            prompt,
        )


def read_usage(data: bytes) -> UsageCounts:
    """The counts of a JSON object with a usage; none without one. Raises ReplicaFailed for anything else."""
    found = _decode(data, _Nested).usage
    return UsageCounts() if found is None else found.counts()


def check_whole(data: bytes) -> UsageCounts:
    """The counts of a whole answer of any dialect. Raises ReplicaFailed if it is not one."""
    reader = AnswerReader()
    try:
        chunk = reader.read(data)
    except BadRequest as error:
        raise ReplicaFailed(error.message) from None
    found = chunk.choices or chunk.output or ()
    content = (one.spoken is not None for one in found if isinstance(one, AnswerChoice))
    if not (found or chunk.type == "message") or not all(content):
        raise ReplicaFailed("it sent a response without content")
    return reader.counts


def error_of(data: bytes) -> AnswerError:
    """The error in a body of any dialect; one without fields if there is none. vLLM calls a long prompt by its parameter."""
    try:
        found = decode_json(data, _ErrorBody).error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        found = ""
    if isinstance(found, str):
        return AnswerError()
    return (
        msgspec.structs.replace(found, code=PromptTooLong.code)
        if found.param in ("input_text", "input_tokens")
        else found
    )


def read_error(status: int, data: bytes) -> ForewordError:
    """The error in a response with another status than 200, as one of Foreword's."""
    try:
        body = _decode(data, _ErrorBody)
    except ReplicaFailed:
        body = _ErrorBody(AnswerError())
    found = AnswerError(body.error) if isinstance(body.error, str) else body.error
    message = str(found.message or body.message or body.detail or f"the replica answered with status {status}")[:_SHOWN]
    if found.code == PromptTooLong.code:
        return PromptTooLong(message, param=found.param)
    if status in (400, 413, 422):
        return BadRequest(message, param=found.param)
    if status == 404:
        return NotFound(message)
    return QueueFull(message) if status == 429 else ReplicaFailed(message)


def _refusal(data: bytes) -> ForewordError:
    """The error in an event of a stream."""
    found = error_of(data)
    if found.type == "invalid_request_error" or found.code in _CLIENT_ERRORS:
        return read_error(400, data)
    if found.code == RequestEnded.code:
        return RequestEnded(read_error(502, data).message)
    return ReplicaError(f"the replica ended the stream with an error: {read_error(502, data).message}")


AnyType = TypeVar("AnyType")


def _decode(data: bytes | Raw, kind: type[AnyType]) -> AnyType:
    try:
        return decode_json(data, kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _malformed(error) from None


def _malformed(error: Exception) -> ReplicaFailed:
    return ReplicaFailed(f"the replica sent something else than an answer: {str(error)[:_SHOWN]}")


def _has_more(data: bytes) -> bool:
    """Whether a choice has output that this server does not know, such as audio."""
    choices: list[dict[str, Any]] = msgspec.json.decode(data)["choices"]
    spoken = ((one.get("delta") or one.get("message") or {}) for one in choices)
    return any(value for one in spoken for name, value in one.items() if name not in _PLAIN)


def _raw(one: _Alternative) -> bytes:
    return one.token.encode() if one.bytes is None else bytes(one.bytes)


def bytes_of(token: str) -> bytes:
    """The bytes of a token as its text has it: `bytes:\\xf0\\x9f` where it is a part of a character."""
    if token.startswith("bytes:\\x"):
        try:
            return bytes.fromhex(token.removeprefix("bytes:").replace("\\x", ""))
        except ValueError:
            pass
    return token.encode()
