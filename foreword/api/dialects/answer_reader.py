"""Reads what a server answers, in any dialect: server-sent events one by one, or a whole body.

A wrong shape raises ReplicaFailed: a replica is not trusted to send what it should.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, NamedTuple, TypeVar

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from foreword.api.dialects.decode import NO_JSON, is_set
from foreword.api.token_entry import TokenEntry
from foreword.decoders import decode_json, json_decoder
from foreword.errors import BadRequest, ForewordError, NotFound
from foreword.request_errors import PromptTooLong, QueueFull, ReplicaError, ReplicaFailed, RequestEnded
from foreword.usage import TokenUsage

Count = Annotated[int, Meta(ge=0, le=2**53)]
TokenId = Annotated[int, Meta(ge=0, lt=2**32)]
Byte = Annotated[int, Meta(ge=0, le=255)]

_BROKEN: Final = ("abort", "error")
# Statuses of errors in a stream that every replica would return.
_CLIENT_ERRORS: Final = (400, 413, 422)
_SHOWN: Final = 300
# One event carries all token ids of a prompt.
_MAX_EVENT_BYTES: Final = 16 << 20
# Fields of a delta that are text, or say nothing.
_PLAIN: Final = frozenset(("role", "content", "refusal"))
# The last events of Anthropic's messages and OpenAI's responses.
_LAST: Final = frozenset(("message_stop", "response.completed", "response.incomplete", "response.failed"))


def decode_object(data: bytes | bytearray) -> dict[str, Any]:
    """The object that this JSON is, with values of any type; an empty one for anything else."""
    try:
        found = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


class ServerSentEvent(NamedTuple):
    """An event. A comment (a keep-alive) has neither name nor data. `raw` is the event without the empty line after it."""

    raw: bytes
    data: bytes
    name: str = ""


# An event's own constructor takes twice as long.
_new: Final = tuple.__new__


class EventParser:
    """Splits a stream of bytes into events, wherever the chunks of the stream end. Each byte is looked at once or twice."""

    __slots__ = ("_after_return", "_rest")

    def __init__(self) -> None:
        self._rest = bytearray()
        # The last piece ended with a carriage return, which ends a line: a line feed after it is a part of that end.
        self._after_return = False

    def feed(self, piece: bytes) -> list[ServerSentEvent]:
        """The events that this piece completes. Raises ReplicaFailed for an event that is too long."""
        if self._after_return or b"\r" in piece:
            piece = self._with_line_feeds(piece)
        rest = self._rest
        if rest:
            seen = len(rest)
            rest += piece
            if rest.find(b"\n\n", seen - 1) < 0:
                if len(rest) > _MAX_EVENT_BYTES:
                    raise ReplicaFailed("the replica sent an event without end")
                return []
            piece = bytes(rest)
            rest.clear()
        *complete, begun = piece.split(b"\n\n")
        if begun:
            rest += begun
        return [
            _new(ServerSentEvent, (raw, raw[6:], "")) if raw.startswith(b"data: ") and b"\n" not in raw else _parse(raw)
            for raw in complete
            if raw
        ]

    def _with_line_feeds(self, piece: bytes) -> bytes:
        if self._after_return:
            piece = piece.removeprefix(b"\n")
        self._after_return = piece.endswith(b"\r")
        return piece.replace(b"\r\n", b"\n").replace(b"\r", b"\n")


def _parse(raw: bytes) -> ServerSentEvent:
    name, data = "", []
    for line in raw.split(b"\n"):
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            data.append(value)
        elif field == b"event":
            name = value.decode("utf-8", "replace")
    return ServerSentEvent(raw, b"\n".join(data), name)


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


class SpokenFunction(Struct):
    name: str | None = None
    arguments: str | None = None


class SpokenCall(Struct):
    index: Count | None = None
    id: str | None = None
    function: SpokenFunction | None = None


class Spoken(Struct, gc=False):
    """A delta, or a whole message."""

    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[SpokenCall] | None = None


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
    delta: Spoken | None = None
    message: Spoken | None = None
    logprobs: Raw = NO_JSON
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[TokenId] | None = None
    prompt_token_ids: list[TokenId] | None = None

    @property
    def spoken(self) -> Spoken | None:
        """None without any content."""
        found = self.delta if self.delta is not None else self.message
        return found if found is not None or self.text is None else Spoken(content=self.text)

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
    # Fields of responses and messages.
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

    def read(self, data: bytes) -> AnswerChunk:
        """The data of one event, or a whole body.

        Raises ReplicaFailed for another shape and for errors, and BadRequest for errors that every replica would return.
        """
        return self.note(read_chunk(data), data)

    def note(self, chunk: AnswerChunk, data: bytes) -> AnswerChunk:
        """Count what a decoded event says, and return it. Raises what `read` does."""
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


def read_chunk(data: bytes) -> AnswerChunk:
    """The data of one event. Runs for every token. Raises ReplicaFailed for another shape."""
    try:
        return _chunk(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _malformed(error) from None


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
