"""A streamed response as the client sees it, independent of the replica that produces it.

Replicas that support `return_token_ids` send the token ids of each chunk. The router remembers them, so that another replica
can continue the response, and removes them unless the client asked for them. After a failover, chunks of the next replica
get the id of the first one, their text continues what was sent, and the usage counts the whole response.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import msgspec

from foreword.api.dialects.answer_reader import AnswerChoice, AnswerChunk, AnswerReader, UsageCounts
from foreword.api.dialects.decode import is_set
from foreword.api.request import GenerateRequest
from foreword.api.sse import DONE, ServerSentEvent
from foreword.errors import BadRequest, ReplicaFailed
from foreword.router.continuation import ContinuedResponse, StreamPosition
from foreword.router.replica_body import TRANSLATED, asks_ids
from foreword.usage import TokenUsage

if TYPE_CHECKING:
    from foreword.api.misses.causes import Miss

_DONE_EVENT: Final = b"data: [DONE]\n\n"
_MOST_HELD: Final = 1 << 18  # bytes of events that are held back
_NOT_HEAD: Final = frozenset(("choices", "usage", "prompt_token_ids", "cache_report", "kv_transfer_params"))
_NO_USAGE: Final = b',"usage":null'
_IDS: Final = b',"token_ids":'
_PROMPT_IDS: Final = b',"prompt_token_ids":'
_NO_IDS: Final = _IDS + b"null"
_NO_PROMPT_IDS: Final = _PROMPT_IDS + b"null"
_decode: Final[Callable[[bytes], Any]] = msgspec.json.Decoder().decode
_encode: Final[Callable[[Any], bytes]] = msgspec.json.Encoder().encode


class ResponseStream:
    """A streamed response.

    Attributes:
        reader: what the replicas have said.
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
        continuation: set after a failover in the middle of the response, if the router converts the rest.
        resumed: another replica wrote the rest of the response itself.
        stamp: the `system_fingerprint` with which the response began; None if there was none. last_stamp: the last replica's.
        holds_end: the end of the stream is held back, for a cache report in its usage. `end_held`: it is complete.
    """

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self.reader = AnswerReader()
        self.prompt_ids: list[int] = []
        self.tokens: list[int] = []
        self._entries = 0
        self.exact = self._single = request.single
        self.text_only = True
        self.settled = (0, 0)
        self.text: list[str] = []
        self._length = self._pieces = 0  # characters of `text`, and pieces of output that is not in it
        self.head: dict[str, Any] = {}
        self.opened = False
        self.begun = False
        self.finish_reason: str | None = None
        self.usage_sent = False
        self.done = False
        self.cut = False
        self.continuation: ContinuedResponse | None = None
        self.resumed = False
        self.stamp: str | None = None
        self.last_stamp: str | None = None
        self._unstamped = self._compares = False
        self.holds_end = False
        self.end_held = False
        self._last: tuple[dict[str, Any], UsageCounts] | None = None
        self._restarted = self._is_vllm = self._refused = self._hides_ids = False
        self._held = self._finish = b""
        # Choices of a request with several that have begun and not ended.
        self._unfinished: set[int] = set()

    @property
    def entries(self) -> int:
        return max(self._entries, len(self.tokens))

    @property
    def can_continue(self) -> bool:
        """Whether enough is known for another replica to continue."""
        return self._single and self.exact and self.text_only and bool(self.prompt_ids)

    @property
    def can_resume(self) -> bool:
        """Whether enough is known for a server of the same kind to write the rest of the response."""
        return self._single and self.exact and bool(self.prompt_ids) and bool(self.tokens)

    @property
    def usage(self) -> TokenUsage:
        """Its tokens so far, as well as they are known."""
        if self.continuation is not None:  # the last replica counts what came before as a part of the prompt
            return self._usage()[1].usage
        counts, begins_with_0 = self.reader.counts, self.request.dialect in TRANSLATED
        if counts.prompt is not None and (counts.output or (counts.output == 0 and not begins_with_0)):
            return counts.usage
        output = len(self.tokens) or self._pieces or len(self.sent_text()) // 4
        return TokenUsage(counts.prompt or len(self.prompt_ids), output, counts.cached or 0)

    def next_response(self, kind: str) -> None:
        """The chunks of another replica follow. The `system_fingerprint` of a Foreword server says which weights it has; vLLM
        sends null where there is nothing, and the fingerprint of its settings last."""
        self._unstamped, self._compares, self._is_vllm = True, kind == "foreword" and self.begun, kind == "vllm"
        self._hides_ids = asks_ids(self.request, kind) and not self.request.return_token_ids

    def restart(self) -> None:
        """Another replica starts again. The client may already have the first chunk, which has the role."""
        self._restarted, self._held = self.opened, b""

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
        extra = {"usage": None} if self.request.include_usage else {}
        return self.encode({"choices": [self.continuation.make_choice(text, None, reason, match)], **extra}) + (
            self.end() or b""
        )

    def take(self, event: ServerSentEvent) -> bytes | None:
        """Events to send to the client for an event of the replica.

        Raises ReplicaFailed for malformed events and for errors that another replica may not have.
        """
        if event.data == DONE:
            self.done |= self._refused
            return _DONE_EVENT if self._refused else self.end()
        if not event.data:
            return event.raw + b"\n\n" if event.raw.startswith(b":") else None
        try:
            chunk = self.reader.read(event.data)
        except BadRequest:
            self._refused, self.finish_reason = True, "error"
            return event.raw + b"\n\n"
        if self.request.dialect in TRANSLATED:
            return self._pass(event)
        return event.raw + b"\n\n" if event.name and chunk.choices is msgspec.UNSET else self._chunk(event, chunk)

    def end(self) -> bytes | None:
        """The end of the stream, with a missing usage. Raises ReplicaFailed if the response is incomplete."""
        if self.done or self._refused:
            self.done = True
            return None
        if self.finish_reason is None or self._unfinished:
            where = "in the middle of the response" if self.begun else "without a response"
            raise ReplicaFailed(f"the replica ended the stream {where}")
        self.done = True
        if self.request.include_usage and not self.usage_sent and self._single and self.exact:
            self._last = self._usage()
        if self.holds_end:
            self.end_held = True
            return None
        return self.held_end(None)

    def held_end(self, miss: Miss | None) -> bytes:
        """The end that was held back. The cause of the cache miss stands beside the usage."""
        self.end_held = False
        last = self._take_finish()
        if self._last is not None:
            chunk, counts = self._last
            report = {} if miss is None else {"cache_report": report_of(counts, miss)}
            last += self.encode({**chunk, **report})
        return last + _DONE_EVENT

    def _usage(self) -> tuple[dict[str, Any], UsageCounts]:
        """The usage of the whole response, counted by the router: as a chunk, and as counts."""
        prompt, count, cached = len(self.prompt_ids) or self.reader.counts.prompt or 0, len(self.tokens), None
        usage: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": count,
            "total_tokens": prompt + count,
        }
        if self.reader.counts.cached is not None:
            cached = min(self.reader.counts.cached, prompt)
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        return {"choices": [], "usage": usage}, UsageCounts(cached, count, prompt)

    def encode(self, chunk: dict[str, Any]) -> bytes:
        """A chunk with the id, time and model of this response."""
        return b"data: " + _encode({**self.head, **chunk}) + b"\n\n"

    def sent_text(self) -> str:
        """All text that was sent."""
        if len(self.text) > 1:
            self.text = ["".join(self.text)]
        return self.text[0] if self.text else ""

    # Events

    def _pass(self, event: ServerSentEvent) -> bytes | None:
        """An event of a dialect that is passed on. No other replica can continue what has begun; what comes before is held
        back, so that until then another one can answer instead."""
        self._held += event.raw + b"\n\n"
        self.begun, self.exact = self.begun or self.reader.begun or len(self._held) > _MOST_HELD, False
        self._pieces += self.reader.begun
        if self.reader.ended:
            self.done, self.finish_reason = True, "stop"
        if not (self.begun or self.done):
            return None
        held, self._held = self._held, b""
        return held

    def _chunk(self, event: ServerSentEvent, chunk: AnswerChunk) -> bytes | None:
        if not chunk.choices:
            return self._usage_chunk(event, chunk)
        if self._unstamped:
            self._read_stamp(chunk)
        if not self.head:
            self.head = {name: value for name, value in _decode(event.data).items() if name not in _NOT_HEAD}
        if not self._single:
            self.begun = True
            return self._multiple(event, chunk, chunk.choices)
        self.begun = self.begun or self.reader.begun
        choice = chunk.choices[0]
        if self.continuation is not None:
            return self._continued(self.continuation, choice)
        text = choice.shown
        self._remember(chunk, choice, text)
        silent = not (text or choice.finish_reason or self.reader.other)
        return None if silent and self._is_dropped(chunk, choice) else self._forward(event, chunk, choice)

    def _read_stamp(self, chunk: AnswerChunk) -> None:
        """Read a replica's stamp from its first chunk. Raises ReplicaFailed if it continues a response of other weights."""
        self._unstamped = False
        self.last_stamp = chunk.system_fingerprint
        if self._compares and self.stamp and self.last_stamp and self.stamp != self.last_stamp:
            raise ReplicaFailed("it has other weights than those that began the response")
        if not self.begun:
            self.stamp = self.last_stamp
            if "system_fingerprint" in self.head:  # of a replica that sent no output
                self.head["system_fingerprint"] = self.stamp

    def _remember(self, chunk: AnswerChunk, choice: AnswerChoice, text: str) -> None:
        """Note what a continuation will need."""
        prompt, ids = chunk.prompt_token_ids or choice.prompt_token_ids, choice.token_ids
        if prompt:
            self.prompt_ids = prompt
        if ids:
            self.tokens += ids
        elif self.reader.other:
            self.exact = False
        elif text:
            self.exact = self.exact and bool(prompt)  # the text with the prompt's ids is the prompt
        if text:
            self._add(text, ids)
        if self.reader.other:
            self.text_only = False
        if choice.finish_reason:
            self.finish_reason = choice.finish_reason

    def _is_dropped(self, chunk: AnswerChunk, choice: AnswerChoice) -> bool:
        """Whether a chunk without output is empty for this client, or the role, which it has already. vLLM sends empty ones
        for tokens whose text is not complete, also where their ids were not asked for."""
        if choice.delta is not None and choice.delta.role is not None:
            return self._restarted
        asked = bool(choice.token_ids is not None or choice.prompt_token_ids or chunk.prompt_token_ids)
        asked = asked and (self._restarted or not self._is_vllm) and not self.request.return_token_ids
        return asked and self.opened and not is_set(choice.logprobs)

    def _add(self, text: str, ids: list[int] | None) -> None:
        """More text that the client gets, with these tokens."""
        self.text.append(text)
        self._length += len(text)
        # One token: nothing is held back; otherwise the text would be that of earlier tokens. Behind a broken character vLLM
        # cannot continue: it would repeat the prompt.
        if ids and len(ids) == 1 and not text.endswith("\ufffd"):
            self.settled = (len(self.tokens), self._length)

    def _forward(self, event: ServerSentEvent, chunk: AnswerChunk, choice: AnswerChoice) -> bytes | None:
        """The chunk without what only the router asked for. What it asked for is cut out of the text of most chunks."""
        self.opened = True
        cuts: list[tuple[bytes, bytes]] = []
        if self._hides_ids:
            prompt, ids = chunk.prompt_token_ids or choice.prompt_token_ids, choice.token_ids
            if prompt is not None:
                cuts.append((_PROMPT_IDS + _encode(prompt), _NO_PROMPT_IDS if self._is_vllm else b""))
            if ids is not None:
                cuts.append((_IDS + _encode(ids), _NO_IDS if self._is_vllm else b""))
        return self._sent(event, chunk, cuts, choice.finish_reason)

    def _sent(
        self, event: ServerSentEvent, chunk: AnswerChunk, cuts: list[tuple[bytes, bytes]], finish_reason: str | None
    ) -> bytes | None:
        """The event with other text in the place of each cut. vLLM's last ones wait for its usage, if only the router asked
        for that: what it says there stands in them otherwise."""
        if chunk.usage is None and not self.request.include_usage:
            cuts.append((_NO_USAGE, b""))
        data = event.data
        for cut, instead in cuts:
            # It stands there exactly once, unless it is written in another way.
            data = data.replace(cut, instead) if data.count(cut) == 1 else b""
        if self._restarted or not data:
            sent = self._written(event)
        else:
            sent = b"data: " + data + b"\n\n" if cuts else event.raw + b"\n\n"
        if finish_reason and self._is_vllm and not self.request.include_usage:
            self._finish += sent
            return self._take_finish() if len(self._finish) > _MOST_HELD else None
        return sent

    def _take_finish(self, stamp: str | None = None) -> bytes:
        """The chunks that were held back, with vLLM's fingerprint of its settings."""
        held, self._finish = self._finish, b""
        has_stamp = stamp is None or b'"system_fingerprint":' in held
        return held if has_stamp else held.replace(b"}\n\n", b',"system_fingerprint":%b}\n\n' % _encode(stamp))

    def _written(self, event: ServerSentEvent) -> bytes:
        """The chunk written anew."""
        chunk = {**_decode(event.data), **(self.head if self._restarted else {})}
        for one in (chunk, *chunk["choices"]) if self._hides_ids else ():
            one.pop("token_ids", None)
            one.pop("prompt_token_ids", None)
        if not self.request.include_usage and chunk.get("usage", 0) is None:
            del chunk["usage"]
        return b"data: " + _encode(chunk) + b"\n\n"

    def _multiple(self, event: ServerSentEvent, chunk: AnswerChunk, choices: list[AnswerChoice]) -> bytes | None:
        """A chunk of a request with several prompts or choices."""
        for choice in choices:
            self._pieces += bool(choice.shown)
            self._unfinished.add(choice.index)
            if choice.finish_reason:
                self._unfinished.discard(choice.index)
                self.finish_reason = choice.finish_reason
        return self._sent(event, chunk, [], next((one.finish_reason for one in choices if one.finish_reason), None))

    def _continued(self, continuation: ContinuedResponse, choice: AnswerChoice) -> bytes | None:
        """A choice of the replica that continues the response."""
        if self.finish_reason is not None:
            return None
        self.tokens += choice.token_ids or ()
        text, made = continuation.convert(choice, self.request.return_token_ids)
        if made is None:
            return None
        if text:
            self._add(text, choice.token_ids)
        self.finish_reason = made.get("finish_reason")
        self.cut = self.finish_reason is not None and choice.finish_reason is None
        extra = {"usage": None} if self.request.include_usage else {}
        return self.encode({"choices": [made], **extra})

    def _usage_chunk(self, event: ServerSentEvent, chunk: AnswerChunk) -> bytes | None:
        if not self.request.include_usage:
            return self._take_finish(chunk.system_fingerprint) or None
        self.usage_sent = True
        found = self._usage() if self.continuation is not None else (_decode(event.data), self.reader.counts)
        if self.holds_end and chunk.usage:
            self._last = found
            return None
        if self.continuation is not None:
            return self.encode(found[0])
        return self.encode({**found[0], **self.head}) if self._restarted else event.raw + b"\n\n"


def report_of(counts: UsageCounts, miss: Miss) -> dict[str, Any]:
    """A cache report from what is known of any engine."""
    return {"prompt_tokens": counts.prompt, "cached_tokens": counts.cached, **asdict(miss)}
