"""A streamed response as the client sees it, independent of the replica that produces it.

Replicas that support `return_token_ids` send the token ids of each chunk. The router remembers them, so that another replica
can continue the response, and removes them unless the client asked for them. After a failover, chunks of the next replica
get the id of the first one, their text continues what was sent, and the usage counts the whole response.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from foreword.api.sse import DONE, ServerSentEvent
from foreword.errors import ReplicaFailed
from foreword.router.client_request import ClientRequest
from foreword.router.continuation import Continuation, StreamPosition

_DONE_EVENT: Final = b"data: [DONE]\n\n"
_TOKEN_IDS: Final = ("token_ids", "prompt_token_ids")
_EMPTY: Final[Mapping[str, Any]] = {}
_TEXT_DELTA: Final = frozenset(("role", "content", "refusal"))
_NOT_HEAD: Final = frozenset(("choices", "usage", "prompt_token_ids", "cache_report", "kv_transfer_params"))
# Codes of errors in a stream that every replica would return.
_CLIENT_ERRORS: Final = range(400, 500)
_decode: Final[Callable[[bytes], Any]] = msgspec.json.Decoder().decode
_encode: Final[Callable[[Any], bytes]] = msgspec.json.Encoder().encode


class ResponseStream:
    """One streamed response.

    Attributes:
        prompt_ids, tokens: token ids of prompt and output.
        exact: all text came with its tokens.
        text_only: there was no output besides text, such as tool calls.
        settled: the text ends where the last token does, as far as the chunks show.
        text: pieces of text that were sent.
        entries: number of tokens whose ids and log-probabilities were sent.
        head: fields that all chunks share, such as the id.
        opened: a chunk was sent. `begun`: a chunk with output was received.
        finish_reason: set once it was sent. `done`: the end of the stream was sent.
        cut: the router found a stop string; the replica would continue.
        prompt_tokens, cached_tokens, output_tokens: from the usage; None until it arrived.
        continuation: set after a failover in the middle of the response.
    """

    def __init__(self, request: ClientRequest) -> None:
        self.request = request
        self.prompt_ids: list[int] = []
        self.tokens: list[int] = []
        self.entries = 0
        self.exact = request.single
        self.text_only = True
        self.settled = True
        self.text: list[str] = []
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
        self.continuation: Continuation | None = None
        self._restarted = False

    @property
    def can_continue(self) -> bool:
        """Whether enough is known for another replica to continue."""
        return self.request.single and self.exact and self.text_only and bool(self.prompt_ids)

    def restart(self) -> None:
        """Another replica starts again. The client may already have the first chunk, which has the role."""
        self._restarted = self.opened

    def continue_from(self, continuation: Continuation, position: StreamPosition) -> bytes | None:
        """Another replica continues from `position`. Returns the end of the stream if the response is complete."""
        self.continuation = continuation
        self.tokens = list(position.tokens)
        self.entries = max(self.entries, len(position.tokens) + position.repeated)
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
        except msgspec.DecodeError as error:
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
        if self.request.single and self.finish_reason is None and self.begun:
            raise ReplicaFailed("the replica ended the stream in the middle of the response")
        if self.done:
            return None
        self.done = True
        usage = b""
        if self.request.wants_usage and not self.usage_sent and self.request.single and self.exact:
            usage = self.encode({"choices": [], "usage": self.usage()})
        return usage + _DONE_EVENT

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
        if not self.head:
            self.head = {name: value for name, value in chunk.items() if name not in _NOT_HEAD}
        if not self.request.single:
            self.begun = True
            return self._multiple(event, chunk)
        choice = choices[0]
        if self.continuation is not None:
            return self._continued(self.continuation, choice)
        self._remember(chunk, choice)
        return self._forward(event, chunk, choice)

    def _remember(self, chunk: dict[str, Any], choice: dict[str, Any]) -> None:
        """Note what a continuation will need."""
        ids, text = choice.get("token_ids"), _text(choice)
        prompt = chunk.get("prompt_token_ids") or choice.get("prompt_token_ids")
        if prompt:
            self.prompt_ids = prompt
        if ids:
            self.tokens += ids
            self.begun = True
        elif text:
            self.exact = False
            self.begun = True
        if len(self.tokens) > self.entries:
            self.entries = len(self.tokens)
        if text:
            self.text.append(text)
        if ids or text:
            # A chunk of one token with text holds nothing back; otherwise its text would be that of earlier tokens.
            self.settled = bool(text) and ids is not None and len(ids) == 1
        for name, value in (choice.get("delta") or _EMPTY).items():
            if value and name not in _TEXT_DELTA:
                self.text_only = False
                self.begun = True
        self.finish_reason = choice.get("finish_reason") or self.finish_reason

    def _forward(self, event: ServerSentEvent, chunk: dict[str, Any], choice: dict[str, Any]) -> bytes | None:
        """The chunk without what only the router asked for."""
        changed = self._restarted
        if self._restarted:
            if "role" in (choice.get("delta") or ()) and not _text(choice) and choice.get("finish_reason") is None:
                return None
            chunk.update(self.head)
        if not self.request.wants_token_ids:
            for place in (choice, chunk):
                for name in _TOKEN_IDS:
                    if name in place:
                        del place[name]
                        changed = True
            if changed and self.opened and _is_empty(choice):
                return None
        self.opened = True
        if not self.request.wants_usage and chunk.get("usage", 0) is None:
            del chunk["usage"]
            changed = True
        return b"data: " + _encode(chunk) + b"\n\n" if changed else event.raw + b"\n\n"

    def _multiple(self, event: ServerSentEvent, chunk: dict[str, Any]) -> bytes:
        """A chunk of a request with several prompts or choices."""
        for choice in chunk["choices"]:
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
        if self.request.wants_usage or chunk.get("usage", 0) is not None:
            return event.raw + b"\n\n"
        del chunk["usage"]
        return b"data: " + _encode(chunk) + b"\n\n"

    def _continued(self, continuation: Continuation, choice: dict[str, Any]) -> bytes | None:
        """A choice of the replica that continues the response."""
        if self.finish_reason is not None:
            return None
        ids = choice.get("token_ids") or []
        self.tokens += ids
        self.entries = max(self.entries, len(self.tokens))
        made = continuation.convert(choice, self.request.wants_token_ids)
        if made is None:
            return None
        text = _text(made)
        if text:
            self.text.append(text)
        self.settled = bool(text) and len(ids) == 1 and not continuation.stops
        self.finish_reason = made.get("finish_reason")
        self.cut = self.finish_reason is not None and choice.get("finish_reason") is None
        extra = {"usage": None} if self.request.wants_usage else {}
        return self.encode({"choices": [made], **extra})

    def _usage_chunk(self, event: ServerSentEvent, chunk: dict[str, Any]) -> bytes | None:
        usage = chunk.get("usage")
        if isinstance(usage, dict):
            details = usage.get("prompt_tokens_details")
            found = details.get("cached_tokens") if isinstance(details, dict) else None
            self.cached_tokens = found if isinstance(found, int) else self.cached_tokens
            self.prompt_tokens = usage.get("prompt_tokens")
            self.output_tokens = usage.get("completion_tokens")
        if not self.request.wants_usage:
            return None
        self.usage_sent = True
        if self.continuation is not None:
            return self.encode({"choices": [], "usage": self.usage()})
        return event.raw + b"\n\n"


def _text(choice: dict[str, Any]) -> str:
    delta = choice.get("delta")
    found = delta.get("content") if isinstance(delta, dict) else choice.get("text")
    return found if isinstance(found, str) else ""


def _is_empty(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta")
    if isinstance(delta, dict) and any(delta.values()):
        return False
    return not (choice.get("text") or choice.get("logprobs")) and choice.get("finish_reason") is None
