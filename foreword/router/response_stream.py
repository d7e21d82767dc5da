"""A streamed answer on its way through: what the client has seen of it, so that another replica can go on where one is lost.

Replicas that can (`return_token_ids`) tell each chunk's tokens. They are remembered, and taken out again unless the client
asked for them. After a seam the chunks of the continuing replica get the first one's id, their text follows on what was
sent, and the usage is that of the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from foreword.api.sse import DONE, ServerSentEvent
from foreword.errors import ReplicaFailed
from foreword.router.client_request import Asked
from foreword.router.continuation import Known, Seam

_DONE_EVENT: Final = b"data: [DONE]\n\n"
_TOKEN_IDS: Final = ("token_ids", "prompt_token_ids")
_NOTHING: Final[Mapping[str, Any]] = {}
_PLAIN_DELTA: Final = frozenset(("role", "content", "refusal"))
# Errors in a stream that another replica may not have.
_CLIENT_ERRORS: Final = range(400, 500)
_decode: Final[Callable[[bytes], Any]] = msgspec.json.Decoder().decode
_encode: Final[Callable[[Any], bytes]] = msgspec.json.Encoder().encode


class Answer:
    """One streamed answer.

    Attributes:
        prompt_ids, tokens: of prompt and answer; `exact` is false once text came without its tokens.
        text: pieces of text that were sent; `entries` are the tokens whose ids and log-probabilities were.
        settled: the text ends where the last token does, as far as can be told from the chunks alone.
        finish_reason: set once the client knows how it ended. `done`: the client has the end of the stream.
        cut: it ended by a stop string that the router found: the replica would go on.
        prompt_tokens, cached_tokens, output_tokens: from the usage, None until it came.
    """

    def __init__(self, asked: Asked) -> None:
        self.asked = asked
        self.prompt_ids: list[int] = []
        self.tokens: list[int] = []
        self.entries = 0
        self.exact = asked.single
        self.plain = True
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
        self.seam: Seam | None = None
        self._again = False

    @property
    def continues(self) -> bool:
        """Whether it is known well enough for another replica to go on."""
        return self.asked.single and self.exact and self.plain and bool(self.prompt_ids)

    def begin_again(self) -> None:
        """Another replica begins from the start; the client may have the first chunk, which brings the role."""
        self._again = self.opened

    def go_on(self, seam: Seam, known: Known) -> bytes | None:
        """Another replica goes on from `known`. Returns the end of the answer if there is nothing left to do."""
        self.seam = seam
        self.tokens = list(known.tokens)
        self.entries = max(self.entries, len(known.tokens) + known.repeated)
        if seam.stopped is None:
            return None
        return self.finish(seam.opening(), "stop", seam.stopped)

    def finish(self, text: str, reason: str, match: object = None) -> bytes:
        """The answer's last chunk and the end of the stream."""
        assert self.seam is not None
        self.finish_reason, self.cut = reason, True
        extra = {"usage": None} if self.asked.wants_usage else {}
        last = self.encode({"choices": [self.seam.piece(text, None, reason, match)], **extra})
        return last + (self.end() or b"")

    def take(self, event: ServerSentEvent) -> bytes | None:
        """What the client gets for an event, if anything. Raises ReplicaFailed for an error that another replica may not
        have, and for nonsense."""
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
        """The stream's end, with what is missing before it. Raises ReplicaFailed if the answer had none."""
        if self.asked.single and self.finish_reason is None and self.begun:
            raise ReplicaFailed("the replica ended the stream in the middle of the answer")
        if self.done:
            return None
        self.done = True
        usage = b""
        if self.asked.wants_usage and not self.usage_sent and self.asked.single and self.exact:
            usage = self.encode({"choices": [], "usage": self.usage()})
        return usage + _DONE_EVENT

    def usage(self) -> dict[str, Any]:
        """The usage of the whole, from what was seen."""
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
        """A chunk of this answer: with its id, time and model."""
        return b"data: " + _encode({**self.head, **chunk}) + b"\n\n"

    def sent_text(self) -> str:
        """All text that the client has."""
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
        raise ReplicaFailed(f"the replica ended the answer with an error: {str(message)[:300]}")

    def _chunk(self, event: ServerSentEvent, chunk: dict[str, Any]) -> bytes | None:
        choices = chunk.get("choices")
        if not choices:
            return self._last(event, chunk)
        if not self.head:
            self.head = {name: value for name, value in chunk.items() if name not in _NOT_HEAD}
        if not self.asked.single:
            self.begun = True
            return self._without_usage(event, chunk)
        choice = choices[0]
        if self.seam is not None:
            return self._continued(chunk, choice)
        ids, text = choice.get("token_ids"), _text(choice)
        self._remember(chunk, choice, ids, text)
        return self._shown(event, chunk, choice)

    def _remember(self, chunk: dict[str, Any], choice: dict[str, Any], ids: list[int] | None, text: str) -> None:
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
            # A chunk of one token that has text holds nothing back: if it had, the text would be that of earlier tokens.
            self.settled = bool(text) and ids is not None and len(ids) == 1
        for name, value in (choice.get("delta") or _NOTHING).items():
            if value and name not in _PLAIN_DELTA:
                self.plain = False
                self.begun = True
        self.finish_reason = choice.get("finish_reason") or self.finish_reason

    def _shown(self, event: ServerSentEvent, chunk: dict[str, Any], choice: dict[str, Any]) -> bytes | None:
        """The chunk without what only the router asked for."""
        changed = self._again
        if self._again:
            if "role" in (choice.get("delta") or ()) and not _text(choice) and choice.get("finish_reason") is None:
                return None
            chunk.update(self.head)
        if not self.asked.wants_token_ids:
            for place in (choice, chunk):
                for name in _TOKEN_IDS:
                    if name in place:
                        del place[name]
                        changed = True
            if changed and self.opened and _says_nothing(choice):
                return None
        self.opened = True
        if not self.asked.wants_usage and chunk.get("usage", 0) is None:
            del chunk["usage"]
            changed = True
        return b"data: " + _encode(chunk) + b"\n\n" if changed else event.raw + b"\n\n"

    def _without_usage(self, event: ServerSentEvent, chunk: dict[str, Any]) -> bytes:
        for choice in chunk["choices"]:
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
        if self.asked.wants_usage or chunk.get("usage", 0) is not None:
            return event.raw + b"\n\n"
        del chunk["usage"]
        return b"data: " + _encode(chunk) + b"\n\n"

    def _continued(self, chunk: dict[str, Any], choice: dict[str, Any]) -> bytes | None:
        """A chunk of the continuing replica: a completion, whatever the client asked for."""
        assert self.seam is not None
        if self.finish_reason is not None:
            return None
        ids = choice.get("token_ids") or []
        self.tokens += ids
        self.entries = max(self.entries, len(self.tokens))
        made = self.seam.chunk(choice, self.asked.wants_token_ids)
        if made is None:
            return None
        text = _text(made)
        if text:
            self.text.append(text)
        self.settled = bool(text) and len(ids) == 1 and not self.seam.stops
        self.finish_reason = made.get("finish_reason")
        self.cut = self.finish_reason is not None and choice.get("finish_reason") is None
        extra = {"usage": None} if self.asked.wants_usage else {}
        return self.encode({"choices": [made], **extra})

    def _last(self, event: ServerSentEvent, chunk: dict[str, Any]) -> bytes | None:
        usage = chunk.get("usage")
        if isinstance(usage, dict):
            details = usage.get("prompt_tokens_details")
            found = details.get("cached_tokens") if isinstance(details, dict) else None
            self.cached_tokens = found if isinstance(found, int) else self.cached_tokens
            self.prompt_tokens = usage.get("prompt_tokens")
            self.output_tokens = usage.get("completion_tokens")
        if not self.asked.wants_usage:
            return None
        self.usage_sent = True
        if self.seam is not None:
            return self.encode({"choices": [], "usage": self.usage()})
        return event.raw + b"\n\n"


_NOT_HEAD: Final = frozenset(("choices", "usage", "prompt_token_ids", "cache_report", "kv_transfer_params"))


def _text(choice: dict[str, Any]) -> str:
    delta = choice.get("delta")
    found = delta.get("content") if isinstance(delta, dict) else choice.get("text")
    return found if isinstance(found, str) else ""


def _says_nothing(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta")
    if isinstance(delta, dict) and any(delta.values()):
        return False
    return not (choice.get("text") or choice.get("logprobs")) and choice.get("finish_reason") is None
