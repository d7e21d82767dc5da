"""What a response says about a request: when its first token came, and how many tokens it had. Reads, and changes nothing."""

from __future__ import annotations

from typing import Final

import msgspec

from foreword.api.sse import EventParser
from foreword.errors import ReplicaFailed
from foreword.router.whole_response import TokenCounts

# The usage stands at the end of a stream.
_TAIL_BYTES: Final = 32 << 10
_MAX_WHOLE_BYTES: Final = 16 << 20
_MOST_TOKENS: Final = 2**32


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    """The usage in any dialect."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None

    def counts(self) -> TokenCounts:
        details = self.prompt_tokens_details or self.input_tokens_details
        cached, prompt = details.cached_tokens if details is not None else None, self.prompt_tokens
        if prompt is None and self.input_tokens is not None:
            # Anthropic's input_tokens are without those that were read from and written to the cache.
            read, written = self.cache_read_input_tokens, self.cache_creation_input_tokens or 0
            cached = read if read is not None else cached
            prompt = self.input_tokens + (read or 0) + written
        output = self.completion_tokens if self.completion_tokens is not None else self.output_tokens
        return TokenCounts(*(_valid(found) for found in (cached, output, prompt)))


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    @property
    def has_output(self) -> bool:
        delta = self.delta or _Delta()
        texts = (self.text, delta.content, delta.reasoning, delta.reasoning_content, delta.tool_calls)
        return any(texts) or self.finish_reason is not None


class _Nested(msgspec.Struct):
    usage: _Usage | None = None


class _Message(msgspec.Struct):
    """An event, or a whole response, in any dialect."""

    type: str | None = None
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    response: _Nested | None = None

    @property
    def has_output(self) -> bool:
        if self.choices is not None:
            return any(choice.has_output for choice in self.choices)
        return self.type is not None and self.type.endswith("delta")


class ObservedResponse:
    """One response with status 200.

    Attributes:
        begun: output was seen.
        events: number of events; about the number of output tokens.
        kept: the whole response, or the end of a stream.
    """

    def __init__(self, *, streams: bool) -> None:
        self.streams = streams
        self.begun = False
        self.events = 0
        self._parser = EventParser()
        self.kept = bytearray()

    def feed(self, data: bytes) -> bool:
        """Take the next bytes. True if the first token is among them."""
        self._keep(data)
        if not self.streams:
            return False
        self.events += data.count(b"data:")
        if self.begun:
            return False
        try:
            events = self._parser.feed(data)
        except ReplicaFailed:
            events = []
        self.begun = any(event.data and _decoded(event.data).has_output for event in events)
        return self.begun

    def _keep(self, data: bytes) -> None:
        self.kept += data
        if self.streams and len(self.kept) > 2 * _TAIL_BYTES:
            del self.kept[:-_TAIL_BYTES]
        elif len(self.kept) > _MAX_WHOLE_BYTES:
            self.kept.clear()

    def counts(self) -> TokenCounts:
        """The counts in the usage, once the response is complete; None where there are none."""
        data = bytes(self.kept)
        if not self.streams:
            return _counts(_decoded(data))
        found = data.rfind(b'"usage"')
        while found >= 0:
            start, end = data.rfind(b"\n", 0, found) + 1, data.find(b"\n", found)
            line = data[start : end if end >= 0 else len(data)]
            if line.startswith(b"data:") and (counts := _counts(_decoded(line[5:].strip()))) != TokenCounts():
                return counts
            found = data.rfind(b'"usage"', 0, start)
        return TokenCounts()


def _decoded(data: bytes) -> _Message:
    try:
        return msgspec.json.decode(data, type=_Message)
    except (msgspec.DecodeError, RecursionError):
        return _Message()


def _counts(message: _Message) -> TokenCounts:
    usage = message.usage or (message.response.usage if message.response is not None else None)
    return usage.counts() if usage is not None else TokenCounts()


def _valid(found: int | None) -> int | None:
    return found if found is not None and 0 <= found < _MOST_TOKENS else None
