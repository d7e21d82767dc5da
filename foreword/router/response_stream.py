"""A streamed response as the client sees it, independent of the replica that produces it.

Replicas that support `return_token_ids` send the token ids of each chunk. The router remembers them, so that another replica
can continue the response, and removes them unless the client asked for them. After a failover, chunks of the next replica
get the id of the first one, their text continues what was sent, and the usage counts the whole response.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final

import msgspec

from foreword.api.misses.causes import Miss
from foreword.api.sse import DONE, ServerSentEvent
from foreword.errors import ReplicaFailed
from foreword.router.client_request import ClientRequest
from foreword.router.continuation import ContinuedResponse, StreamPosition
from foreword.router.misses import report_of

_DONE_EVENT: Final = b"data: [DONE]\n\n"
_TEXT_DELTA: Final = frozenset(("role", "content", "refusal"))
_NOT_HEAD: Final = frozenset(("choices", "usage", "prompt_token_ids", "cache_report", "kv_transfer_params"))
# Codes of errors in a stream that every replica would return.
_CLIENT_ERRORS: Final = (400, 413, 422)
_MAX_TOKEN: Final = 2**32
_TokenIds = list[Annotated[int, msgspec.Meta(ge=0, lt=_MAX_TOKEN)]]
# Of a choice: the delta, the text, the finish reason and the token ids.
_Fields = tuple[dict[str, Any] | None, str, str | None, Sequence[int]]
_decode: Final[Callable[[bytes], Any]] = msgspec.json.Decoder().decode
_encode: Final[Callable[[Any], bytes]] = msgspec.json.Encoder().encode


class ResponseStream:
    """One streamed response.

    Attributes:
        prompt_ids, tokens: token ids of prompt and output.
        exact: all text came with its tokens.
        text_only: there was no output besides text, such as tool calls.
        settled: numbers of tokens and characters when the text last ended where a token does.
        text: pieces of text that were sent.
        entries: number of tokens whose ids and log-probabilities were sent.
        head: fields that all chunks share, such as the id.
        opened: a chunk was sent. `begun`: a chunk with output was received.
        finish_reason: set once it was sent. `done`: the end of the stream was sent.
        cut: the router found a stop string; the replica would continue.
        prompt_tokens, cached_tokens, output_tokens: from the usage; None until it arrived.
        continuation: set after a failover in the middle of the response, if the router converts the rest.
        resumed: another replica wrote the rest of the response itself.
        stamp: the `system_fingerprint` with which the response began; None if there was none. last_stamp: the last replica's.
        holds_end: the end of the stream is held back, for a cache report in its usage. `end_held`: it is complete.
    """

    def __init__(self, request: ClientRequest) -> None:
        self.request = request
        self.prompt_ids: list[int] = []
        self.tokens: list[int] = []
        self._entries = 0
        self.exact = request.single
        self.text_only = True
        self.settled = (0, 0)
        self.text: list[str] = []
        self._length = 0  # characters of `text`
        self.head: dict[str, Any] = {}
        self.opened = False
        self.begun = False
        self.finish_reason: str | None = None
        self.usage_sent = False
        self.done = False
        self.cut = False
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.output_tokens: int | None = None
        self.continuation: ContinuedResponse | None = None
        self.resumed = False
        self.stamp: str | None = None
        self.last_stamp: str | None = None
        self._unstamped = self._compares = False
        self.holds_end = False
        self.end_held = False
        self._last: dict[str, Any] | None = None
        self._restarted = False
        # Choices of a request with several that have begun and not ended.
        self._unfinished: set[int] = set()

    @property
    def entries(self) -> int:
        return max(self._entries, len(self.tokens))

    @property
    def can_continue(self) -> bool:
        """Whether enough is known for another replica to continue."""
        return self.request.single and self.exact and self.text_only and bool(self.prompt_ids)

    @property
    def can_resume(self) -> bool:
        """Whether enough is known for a server of the same kind to write the rest of the response."""
        return self.request.single and self.exact and bool(self.prompt_ids) and bool(self.tokens)

    @property
    def used_tokens(self) -> int:
        """Prompt and output tokens so far, as well as they are known."""
        if self.output_tokens is not None and self.prompt_tokens is not None:
            return self.prompt_tokens + self.output_tokens
        return len(self.prompt_ids) + (len(self.tokens) or len(self.sent_text()) // 4)

    def next_response(self, *, stamped: bool) -> None:
        """The chunks of another replica follow. `stamped`: its `system_fingerprint` says which weights it has."""
        self._unstamped, self._compares = True, stamped and self.begun

    def restart(self) -> None:
        """Another replica starts again. The client may already have the first chunk, which has the role."""
        self._restarted = self.opened

    def resume(self) -> None:
        """Another replica writes the rest of the response."""
        self.resumed = self._restarted = True

    def continue_from(self, continuation: ContinuedResponse, position: StreamPosition) -> bytes | None:
        """Another replica continues from `position`. Returns the end of the stream if the response is complete."""
        self.continuation = continuation
        self._entries = max(self.entries, len(position.tokens) + position.repeated)
        self.tokens = list(position.tokens)
        if continuation.stopped is None:
            return None
        return self.finish(continuation.take_unsent(), "stop", continuation.stopped)

    def finish(self, text: str, reason: str, match: object = None) -> bytes:
        """The last chunk and the end of the stream."""
        assert self.continuation is not None
        self.finish_reason, self.cut = reason, True
        extra = {"usage": None} if self.request.wants_usage else {}
        last = self.encode({"choices": [self.continuation.make_choice(text, None, reason, match)], **extra})
        return last + (self.end() or b"")

    def take(self, event: ServerSentEvent) -> bytes | None:
        """What to send to the client for an event of the replica.

        Raises ReplicaFailed for malformed events and for errors that another replica may not have.
        """
        if event.data == DONE:
            return self.end()
        if not event.data:
            return event.raw + b"\n\n" if event.raw.startswith(b":") else None
        try:
            chunk = _decode(event.data)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ReplicaFailed(f"the replica sent an event that is not JSON: {error}") from None
        if not isinstance(chunk, dict):
            raise ReplicaFailed("the replica sent an event that is not a JSON object")
        if "error" in chunk:
            return self._error(event, chunk["error"])
        if event.name:
            return event.raw + b"\n\n"
        return self._chunk(event, chunk)

    def end(self) -> bytes | None:
        """The end of the stream, with a missing usage. Raises ReplicaFailed if the response is incomplete."""
        if self.done:
            return None
        if self.finish_reason is None or self._unfinished:
            where = "in the middle of the response" if self.begun else "without a response"
            raise ReplicaFailed(f"the replica ended the stream {where}")
        self.done = True
        chunk: dict[str, Any] | None = None
        if self.request.wants_usage and not self.usage_sent and self.request.single and self.exact:
            chunk = {"choices": [], "usage": self.usage()}
        if self.holds_end:
            self.end_held, self._last = True, chunk or self._last
            return None
        return (self.encode(chunk) if chunk else b"") + _DONE_EVENT

    def held_end(self, miss: Miss | None) -> bytes:
        """The end that was held back. The cause of the cache miss stands beside the usage."""
        chunk, self.end_held = self._last, False
        if chunk is not None and miss is not None:
            chunk = {**chunk, "cache_report": report_of(chunk["usage"], miss)}
        return (self.encode(chunk) if chunk else b"") + _DONE_EVENT

    def usage(self) -> dict[str, Any]:
        """The usage of the whole response, counted by the router."""
        prompt = len(self.prompt_ids) or self.prompt_tokens or 0
        count = len(self.tokens)
        usage: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": count,
            "total_tokens": prompt + count,
        }
        if self.cached_tokens is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": min(self.cached_tokens, prompt)}
        return usage

    def encode(self, chunk: dict[str, Any]) -> bytes:
        """A chunk with the id, time and model of this response."""
        return b"data: " + _encode({**self.head, **chunk}) + b"\n\n"

    def sent_text(self) -> str:
        """All text that was sent."""
        if len(self.text) > 1:
            self.text = ["".join(self.text)]
        return self.text[0] if self.text else ""

    # Events

    def _error(self, event: ServerSentEvent, error: object) -> bytes:
        code = error.get("code") if isinstance(error, dict) else None
        kind = str(error.get("type", "")) if isinstance(error, dict) else ""
        message = error.get("message") if isinstance(error, dict) else error
        if (isinstance(code, int) and code in _CLIENT_ERRORS) or kind == "invalid_request_error":
            self.done = True
            return event.raw + b"\n\n"
        raise ReplicaFailed(f"the replica ended the stream with an error: {str(message)[:300]}")

    def _chunk(self, event: ServerSentEvent, chunk: dict[str, Any]) -> bytes | None:
        choices = chunk.get("choices")
        if not choices:
            return self._usage_chunk(event, chunk)
        if type(choices) is not list:
            raise _malformed("choices")
        if self._unstamped:
            self._read_stamp(chunk)
        if not self.head:
            self.head = {name: value for name, value in chunk.items() if name not in _NOT_HEAD}
        if not self.request.single:
            self.begun = True
            return self._multiple(event, chunk)
        choice = choices[0]
        fields = _checked(choice)
        if self.continuation is not None:
            return self._continued(self.continuation, choice)
        self._remember(chunk, choice, fields)
        return self._forward(event, chunk, choice, fields)

    def _read_stamp(self, chunk: dict[str, Any]) -> None:
        """Read a replica's stamp from its first chunk. Raises ReplicaFailed if it continues a response of other weights."""
        self._unstamped = False
        stamp = chunk.get("system_fingerprint")
        self.last_stamp = stamp if type(stamp) is str else None
        if self._compares and self.stamp and self.last_stamp and self.stamp != self.last_stamp:
            raise ReplicaFailed("it has other weights than those that began the response")
        if not self.begun:
            self.stamp = self.last_stamp
            if "system_fingerprint" in self.head:  # of a replica that sent no output
                self.head["system_fingerprint"] = self.stamp

    def _remember(self, chunk: dict[str, Any], choice: dict[str, Any], fields: _Fields) -> None:
        """Note what a continuation will need."""
        delta, text, reason, ids = fields
        prompt = chunk.get("prompt_token_ids") or choice.get("prompt_token_ids")
        if prompt:
            _check_ids(prompt, "prompt_token_ids")
            self.prompt_ids = prompt
        if ids:
            self.tokens += ids
            self.begun = True
        elif text:
            self.exact = self.exact and bool(prompt)  # the text with the prompt's ids is the prompt
            self.begun = True
        if text:
            self.text.append(text)
            self._length += len(text)
            if len(ids) == 1:  # nothing is held back; otherwise the text would be that of earlier tokens
                self.settled = (len(self.tokens), self._length)
        if delta and not _TEXT_DELTA.issuperset(delta):
            for name, value in delta.items():
                if value and name not in _TEXT_DELTA:
                    self.text_only = False
                    self.begun = True
                    self.exact = self.exact and bool(ids)
        if reason:
            self.finish_reason = reason

    def _forward(
        self, event: ServerSentEvent, chunk: dict[str, Any], choice: dict[str, Any], fields: _Fields
    ) -> bytes | None:
        """The chunk without what only the router asked for."""
        changed, request = self._restarted, self.request
        delta, text, reason, _ = fields
        if changed:
            if "role" in (delta or ()) and not text and reason is None:
                return None
            chunk.update(self.head)
        if not request.wants_token_ids:
            if "token_ids" in choice:
                del choice["token_ids"]
                changed = True
            if "prompt_token_ids" in choice or "prompt_token_ids" in chunk:
                choice.pop("prompt_token_ids", None)
                chunk.pop("prompt_token_ids", None)
                changed = True
            if changed and not text and self.opened and reason is None and _is_empty(choice):
                return None
        self.opened = True
        if not request.wants_usage and chunk.get("usage", 0) is None:
            del chunk["usage"]
            changed = True
        return b"data: " + _encode(chunk) + b"\n\n" if changed else event.raw + b"\n\n"

    def _multiple(self, event: ServerSentEvent, chunk: dict[str, Any]) -> bytes:
        """A chunk of a request with several prompts or choices."""
        for choice in chunk["choices"]:
            _, _, reason, _ = _checked(choice)
            index = choice.get("index")
            if type(index) is not int:
                raise _malformed("index")
            self._unfinished.add(index)
            if reason:
                self._unfinished.discard(index)
                self.finish_reason = reason
        if self.request.wants_usage or chunk.get("usage", 0) is not None:
            return event.raw + b"\n\n"
        del chunk["usage"]
        return b"data: " + _encode(chunk) + b"\n\n"

    def _continued(self, continuation: ContinuedResponse, choice: dict[str, Any]) -> bytes | None:
        """A choice of the replica that continues the response."""
        if self.finish_reason is not None:
            return None
        ids = choice.get("token_ids") or []
        self.tokens += ids
        made = continuation.convert(choice, self.request.wants_token_ids)
        if made is None:
            return None
        text = _text(made)
        if text:
            self.text.append(text)
            self._length += len(text)
            if len(ids) == 1:
                self.settled = (len(self.tokens), self._length)
        self.finish_reason = made.get("finish_reason")
        self.cut = self.finish_reason is not None and choice.get("finish_reason") is None
        extra = {"usage": None} if self.request.wants_usage else {}
        return self.encode({"choices": [made], **extra})

    def _usage_chunk(self, event: ServerSentEvent, chunk: dict[str, Any]) -> bytes | None:
        usage = chunk.get("usage")
        if isinstance(usage, dict):
            details = usage.get("prompt_tokens_details")
            found = _count(details.get("cached_tokens")) if isinstance(details, dict) else None
            self.cached_tokens = found if found is not None else self.cached_tokens
            self.prompt_tokens = _count(usage.get("prompt_tokens"))
            self.output_tokens = _count(usage.get("completion_tokens"))
        if not self.request.wants_usage:
            return None
        self.usage_sent = True
        if self.continuation is not None:
            chunk = {"choices": [], "usage": self.usage()}
        if self.holds_end and isinstance(chunk.get("usage"), dict):
            self._last = chunk
            return None
        if self.continuation is not None:
            return self.encode(chunk)
        return self.encode({**chunk, **self.head}) if self._restarted else event.raw + b"\n\n"


def _malformed(name: str) -> ReplicaFailed:
    return ReplicaFailed(f"the replica sent a chunk whose {name} is malformed")


def _checked(choice: Any) -> _Fields:
    """The fields of a choice, with the types that the router relies on. Runs for every token. Raises ReplicaFailed."""
    if type(choice) is not dict:
        raise _malformed("choice")
    get = choice.get
    delta, reason, ids = get("delta"), get("finish_reason"), get("token_ids") or ()
    if delta is not None and type(delta) is not dict:
        raise _malformed("delta")
    text = get("text") if delta is None else delta.get("content")
    if not ((text is None or type(text) is str) and (reason is None or type(reason) is str)):
        raise _malformed("text" if delta is None else "delta")
    if ids and not (type(ids) is list and len(ids) == 1 and type(ids[0]) is int and 0 <= ids[0] < _MAX_TOKEN):
        _check_ids(ids, "token_ids")
    return delta, text or "", reason, ids


def _check_ids(ids: Any, name: str) -> None:
    try:
        msgspec.convert(ids, _TokenIds)
    except msgspec.ValidationError:
        raise _malformed(name) from None


def _count(found: object) -> int | None:
    return found if type(found) is int and 0 <= found < _MAX_TOKEN else None


def _text(choice: dict[str, Any]) -> str:
    delta = choice.get("delta")
    found = delta.get("content") if isinstance(delta, dict) else choice.get("text")
    return found if isinstance(found, str) else ""


def _is_empty(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta")
    if isinstance(delta, dict) and any(delta.values()):
        return False
    return not (choice.get("text") or choice.get("logprobs")) and choice.get("finish_reason") is None
