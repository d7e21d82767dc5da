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

from foreword.api.dialects.answer_reader import (
    AnswerChoice,
    AnswerChunk,
    AnswerReader,
    ServerSentEvent,
    UsageCounts,
    read_chunk,
)
from foreword.api.dialects.decode import NO_JSON, is_set
from foreword.api.request import GenerateRequest
from foreword.api.sse import DONE
from foreword.errors import BadRequest
from foreword.request_errors import ReplicaFailed
from foreword.router.continuation import ContinuedResponse, StreamPosition
from foreword.router.replica_body import TRANSLATED, asks_ids, choices_of
from foreword.usage import TokenUsage

if TYPE_CHECKING:
    from foreword.api.misses.causes import Miss


_DONE_EVENT: Final = b"data: [DONE]\n\n"
_MOST_HELD: Final = 1 << 18  # bytes of events that are held back
# More choices than these are forwarded and counted, and not remembered.
_MOST_CHOICES: Final = 1024
_NOT_HEAD: Final = frozenset(("choices", "usage", "prompt_token_ids", "cache_report", "kv_transfer_params"))
_NO_USAGE: Final = b',"usage":null'
_IDS: Final = b',"token_ids":'
_PROMPT_IDS: Final = b',"prompt_token_ids":'
_NO_IDS: Final = _IDS + b"null"
_NO_PROMPT_IDS: Final = _PROMPT_IDS + b"null"
_decode: Final[Callable[[bytes], Any]] = msgspec.json.Decoder().decode
_encode: Final[Callable[[Any], bytes]] = msgspec.json.Encoder().encode


class NotReproduced(ReplicaFailed):
    """The replica that repeats a response does not compute what the client has of it."""


class ChoiceStream:
    """The part of a choice that was sent.

    Attributes:
        tokens: ids of its output.
        settled: numbers of tokens and characters when the text last ended where a token does.
        text: pieces of text that were sent. without_ids: it has output whose tokens are not known.
        has_role: the chunk with the role was sent.
        finish_reason: set once it was sent.
        continuation: converts the next replica's chunks; None if they are those of the client.
        repeated: tokens of the next replica that were compared with `tokens`; None if it continues after them.
    """

    __slots__ = (
        "_entries",
        "_length",
        "continuation",
        "finish_reason",
        "has_role",
        "repeated",
        "settled",
        "text",
        "tokens",
        "without_ids",
    )

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.text: list[str] = []
        self.settled = (0, 0)
        self.without_ids = self.has_role = False
        self.finish_reason: str | None = None
        self.continuation: ContinuedResponse | None = None
        self.repeated: int | None = None
        self._length = self._entries = 0

    @property
    def entries(self) -> int:
        """The number of tokens whose ids and log-probabilities were sent."""
        return max(self._entries, len(self.tokens))

    @property
    def sent_text(self) -> str:
        """All text that was sent."""
        if len(self.text) > 1:
            self.text = ["".join(self.text)]
        return self.text[0] if self.text else ""

    @property
    def can_go_on(self) -> bool:
        """Whether a server can write the rest behind the tokens: all that was sent is in them."""
        return bool(self.tokens) or not (self.without_ids or self.text)

    def add(self, text: str, ids: list[int] | None) -> None:
        """More text that the client gets, with these tokens."""
        self.text.append(text)
        self._length += len(text)
        # One token: nothing is held back; otherwise the text would be that of earlier tokens. Behind a broken character vLLM
        # cannot continue: it would repeat the prompt.
        if ids and len(ids) == 1 and not text.endswith("\ufffd"):
            self.settled = (len(self.tokens), self._length)

    def cut_to(self, tokens: list[int], repeated: int) -> None:
        """Another replica continues after these tokens, and computes the next `repeated` again."""
        self._entries = max(self.entries, len(tokens) + repeated)
        self.tokens = tokens

    def take(self, choice: AnswerChoice, wants_token_ids: bool) -> tuple[dict[str, Any] | None, bool]:
        """The client's choice for one of the replica that continues it, None without any; and whether the router found its end.

        Raises ReplicaFailed for malformed log-probabilities, and NotReproduced.
        """
        assert self.continuation is not None
        if self.finish_reason is not None and self.repeated is None:
            return None, False
        self._compare(choice)
        if self.finish_reason is not None:
            return None, False
        text, made = self.continuation.convert(choice, wants_token_ids)
        if made is None:
            return None, False
        if text:
            self.add(text, choice.token_ids)
        self.finish_reason = made.get("finish_reason")
        return made, self.finish_reason is not None and choice.finish_reason is None

    def _compare(self, choice: AnswerChoice) -> None:
        """Note the tokens of the replica that continues it. Those of the client must be the same again, and all must come."""
        ids = choice.token_ids or []
        if self.repeated is None:
            self.tokens += ids
            return
        known = self.tokens[self.repeated : self.repeated + len(ids)]
        if known != ids[: len(known)]:
            raise NotReproduced("another replica computes other tokens from the same seed")
        unseen = bool(choice.shown) and not ids and self.repeated < len(self.tokens)
        self.repeated += len(ids)
        if unseen or (choice.finish_reason and self.finish_reason is None and self.repeated < len(self.tokens)):
            raise NotReproduced("another replica does not send all tokens again that the client has")
        if self.finish_reason is None:
            self.tokens += ids[len(known) :]


class _Source:
    """The replica whose events come: what is cut out of them."""

    __slots__ = ("asks_ids", "compares", "hides_ids", "is_vllm", "unstamped")

    def __init__(self) -> None:
        self.unstamped = self.compares = self.is_vllm = self.asks_ids = self.hides_ids = False


class ResponseStream:
    """A streamed response.

    Attributes:
        reader: what the replicas have said.
        prompt_ids: token ids of the prompt.
        choices: of the response, in the order of their indices.
        exact: all text came with its tokens.
        text_only: there was no output besides text, such as tool calls.
        head: fields that all chunks share, such as the id.
        opened: a chunk was sent. `begun`: a chunk with output was received, or the end of one of several choices.
        done: the end of the stream was sent.
        cut: all choices have ended, of some the router found the end; the replica would continue.
        converts: after a failover the router converts the rest. `resumed`: the replica writes it as if it were the first.
        stamp: the `system_fingerprint` with which the response began; None if there was none. last_stamp: the last replica's.
        holds_end: the end of the stream is held back, for a cache report in its usage. `end_held`: it is complete.
    """

    # Defaults that most streams leave as they are.
    usage_sent = resumed = end_held = _any_cut = _refused = False
    stamp: str | None = None
    last_stamp: str | None = None
    _last: tuple[dict[str, Any], UsageCounts] | None = None
    _pieces = 0  # of output without token ids
    _held = _finish = b""

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self.reader = AnswerReader()
        self.prompt_ids: list[int] = []
        self._count = self._unfinished = choices_of(request)
        self.choices = tuple(ChoiceStream() for _ in range(min(self._count, _MOST_CHOICES)))
        self.exact = len(request.prompts) <= 1
        self.text_only = True
        self.head: dict[str, Any] = {}
        self.opened = self.begun = self.done = self.cut = self.converts = self.holds_end = self._restarted = False
        self._source = _Source()
        self._passes = request.dialect in TRANSLATED
        # Text of the only choice follows text that was sent, and goes to the client as it comes.
        self._in_text = False

    @property
    def finished(self) -> bool:
        """The finish reason of each choice was sent."""
        return not self._unfinished

    @property
    def tokens(self) -> int:
        """The number of output tokens whose ids are known."""
        return sum(len(choice.tokens) for choice in self.choices)

    @property
    def entries(self) -> int:
        """The number of output tokens that the client has, as far as it is known."""
        return sum(choice.entries for choice in self.choices)

    @property
    def can_continue(self) -> bool:
        """Whether enough is known for another replica to continue the only choice."""
        return len(self.choices) == 1 and self.can_repeat

    @property
    def can_repeat(self) -> bool:
        """Whether enough is known to tell what the client has of a response that another replica repeats."""
        return self.exact and self.text_only and bool(self.prompt_ids)

    @property
    def can_resume(self) -> bool:
        """Whether enough is known for a server of the same kind to write the rest of the response."""
        told = self.exact and bool(self.prompt_ids) and any(choice.tokens for choice in self.choices)
        return told and all(choice.can_go_on for choice in self.choices)

    @property
    def usage(self) -> TokenUsage:
        """Its tokens so far, as well as they are known."""
        if self.converts:  # the last replica counts what came before as a part of the prompt
            return self._usage()[1].usage
        counts, begins_with_0 = self.reader.counts, self.request.dialect in TRANSLATED
        if counts.prompt is not None and (counts.output or (counts.output == 0 and not begins_with_0)):
            return counts.usage
        output = self.tokens or max(self._pieces, sum(len(choice.sent_text) for choice in self.choices) // 4)
        return TokenUsage(counts.prompt or len(self.prompt_ids), output, counts.cached or 0)

    def next_response(self, kind: str) -> None:
        """The chunks of another replica follow. The `system_fingerprint` of a Foreword server says which weights it has; vLLM
        sends null where there is nothing, and the fingerprint of its settings last."""
        source, self._in_text = self._source, False
        source.unstamped, source.compares, source.is_vllm = True, kind == "foreword" and self.begun, kind == "vllm"
        source.asks_ids = asks_ids(self.request, kind)
        source.hides_ids = source.asks_ids and not self.request.return_token_ids

    def restart(self) -> None:
        """Another replica starts again. The client may already have the first chunk, which has the role."""
        self._restarted, self._held = self.opened, b""

    def resume(self) -> None:
        """Another replica writes the rest of the response."""
        self.resumed = self._restarted = True

    def repeat(self) -> None:
        """Another replica computes the response again from its start; the client gets what it does not have."""
        self.converts = True
        for index, choice in enumerate(self.choices):
            position = StreamPosition((), "", choice.sent_text, len(choice.tokens))
            choice.continuation, choice.repeated = ContinuedResponse(self.request, position, index), 0

    def continue_from(self, continuation: ContinuedResponse, position: StreamPosition) -> bytes | None:
        """Another replica continues from `position`. Returns the end of the stream if the response is complete."""
        choice = self.choices[0]
        self.converts, choice.continuation = True, continuation
        choice.cut_to(list(position.tokens), position.repeated)
        if continuation.stopped is None:
            return None
        return self.finish(continuation.take_unsent(), "stop", continuation.stopped)

    def finish(self, text: str, reason: str, match: object = None) -> bytes:
        """The last chunk and the end of the stream."""
        choice = self.choices[0]
        assert choice.continuation is not None
        choice.finish_reason, self._unfinished, self.cut = reason, 0, True
        extra = {"usage": None} if self.request.include_usage else {}
        last = {"choices": [choice.continuation.make_choice(text, None, reason, match)], **extra}
        return self.encode(last) + (self.end() or b"")

    def take(self, event: ServerSentEvent) -> bytes | None:
        """Events to send to the client for an event of the replica.

        Raises ReplicaFailed for malformed events and for errors that another replica may not have, and NotReproduced.
        """
        data = event.data
        if data == DONE:
            self.done |= self._refused
            return _DONE_EVENT if self._refused else self.end()
        if not data:
            return event.raw + b"\n\n" if event.raw.startswith(b":") else None
        chunk = read_chunk(data)
        if self._in_text and not event.name and (found := chunk.choices) and len(found) == 1:
            # Most events: what `note` and `_chunk` would do with them, in fewer steps. It is the cost of every token.
            choice, ids = found[0], found[0].token_ids
            spoken = choice.delta
            text = choice.text if spoken is None else spoken.content
            if (
                text
                and choice.finish_reason is None
                and not (choice.index or chunk.usage or choice.prompt_token_ids or chunk.prompt_token_ids)
                and choice.message is None
                and chunk.type is None
                and chunk.error is chunk.cache_report is NO_JSON
                and (spoken is None or not (spoken.reasoning or spoken.reasoning_content or spoken.tool_calls))
            ):
                stream, self.reader.other = self.choices[0], False
                if ids:
                    stream.tokens += ids
                else:
                    self._pieces += 1
                    stream.without_ids, self.exact = True, False
                stream.add(text, ids)
                return self._forward(event, chunk, found, finishes=False)
        try:
            self.reader.note(chunk, data)
        except BadRequest:
            self._refused, self._unfinished = True, 0
            return event.raw + b"\n\n"
        if self._passes:
            return self._pass(event)
        return event.raw + b"\n\n" if event.name and chunk.choices is msgspec.UNSET else self._chunk(event, chunk)

    def end(self) -> bytes | None:
        """The end of the stream, with a missing usage. Raises ReplicaFailed if the response is incomplete."""
        if self.done or self._refused:
            self.done = True
            return None
        if self._unfinished and not self._ends_early():
            where = "in the middle of the response" if self.begun else "without a response"
            raise ReplicaFailed(f"the replica ended the stream {where}")
        self.done = True
        if self.request.include_usage and not self.usage_sent and self.exact:
            self._last = self._usage()
        if self.holds_end:
            self.end_held = True
            return None
        return self.held_end(None)

    def _ends_early(self) -> bool:
        """Whether a replica has sent fewer choices than were asked for, all of them to their end."""
        begun = [one for one in self.choices if one.finish_reason or one.tokens or one.text or one.without_ids]
        known = not self._source.asks_ids and self._count == len(self.choices)
        return known and bool(begun) and all(one.finish_reason for one in begun)

    def take_finish(self, stamp: str | None = None) -> bytes:
        """The chunks that were held back, with vLLM's fingerprint of its settings."""
        held, self._finish = self._finish, b""
        has_stamp = stamp is None or b'"system_fingerprint":' in held
        return held if has_stamp else held.replace(b"}\n\n", b',"system_fingerprint":%b}\n\n' % _encode(stamp))

    def held_end(self, miss: Miss | None) -> bytes:
        """The end that was held back. The cause of the cache miss stands beside the usage."""
        self.end_held = False
        last = self.take_finish()
        if self._last is not None:
            chunk, counts = self._last
            report = {} if miss is None else {"cache_report": report_of(counts, miss)}
            last += self.encode({**chunk, **report})
        return last + _DONE_EVENT

    def _usage(self) -> tuple[dict[str, Any], UsageCounts]:
        """The usage of the whole response, counted by the router: as a chunk, and as counts."""
        prompt, count, cached = len(self.prompt_ids) or self.reader.counts.prompt or 0, self.tokens, None
        usage: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": count, "total_tokens": prompt + count}
        if self.reader.counts.cached is not None:
            cached = min(self.reader.counts.cached, prompt)
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        return {"choices": [], "usage": usage}, UsageCounts(cached, count, prompt)

    def encode(self, chunk: dict[str, Any]) -> bytes:
        """A chunk with the id, time and model of this response."""
        return b"data: " + _encode({**self.head, **chunk}) + b"\n\n"

    # Events

    def _pass(self, event: ServerSentEvent) -> bytes | None:
        """An event of a dialect that is passed on. No other replica can continue what has begun; what comes before is held
        back, so that until then another one can answer instead."""
        self._held += event.raw + b"\n\n"
        self.begun, self.exact = self.begun or self.reader.begun or len(self._held) > _MOST_HELD, False
        self._pieces += self.reader.begun
        if self.reader.ended:
            self.done, self._unfinished = True, 0
        if not (self.begun or self.done):
            return None
        held, self._held = self._held, b""
        return held

    def _chunk(self, event: ServerSentEvent, chunk: AnswerChunk) -> bytes | None:
        if not chunk.choices:
            return self._usage_chunk(event, chunk)
        if self._source.unstamped:
            self._read_stamp(chunk)
        if not self.head:
            self.head = {name: value for name, value in _decode(event.data).items() if name not in _NOT_HEAD}
        several = len(chunk.choices) > 1
        ends = any(one.finish_reason for one in chunk.choices) if several else bool(chunk.choices[0].finish_reason)
        if not self.begun:
            self.begun = self.reader.begun or (ends and len(self.choices) > 1)
        if self.converts:
            return self._converted(chunk.choices)
        output = ends or self.reader.other or several
        for choice in chunk.choices:
            text = choice.shown
            stream = self._remember(chunk, choice, text)
        if not (output or text) and self._is_dropped(chunk, choice, stream):
            return None
        self._in_text = self.begun and self._count == 1
        return self._forward(event, chunk, chunk.choices, finishes=ends)

    def _read_stamp(self, chunk: AnswerChunk) -> None:
        """Read a replica's stamp from its first chunk. Raises ReplicaFailed if it continues a response of other weights."""
        self._source.unstamped = False
        self.last_stamp = chunk.system_fingerprint
        if self._source.compares and self.stamp and self.last_stamp and self.stamp != self.last_stamp:
            raise ReplicaFailed("it has other weights than those that began the response")
        if not self.begun:
            self.stamp = self.last_stamp
            if "system_fingerprint" in self.head:  # of a replica that sent no output
                self.head["system_fingerprint"] = self.stamp

    def _remember(self, chunk: AnswerChunk, choice: AnswerChoice, text: str) -> ChoiceStream:
        """Note what a continuation will need."""
        prompt, ids, index = chunk.prompt_token_ids or choice.prompt_token_ids, choice.token_ids, choice.index
        if index < len(self.choices):
            stream = self.choices[index]
        else:  # more than are remembered, or than were asked for
            self.exact, stream = False, ChoiceStream() if index < self._count else self.choices[0]
        if prompt and self.exact:
            self.prompt_ids = prompt
        self._pieces += not ids and bool(text or self.reader.other)
        if ids:
            stream.tokens += ids
        elif self.reader.other:
            self.exact = False
        elif text:
            stream.without_ids = True
            self.exact = self.exact and bool(prompt)  # the text with the prompt's ids is the prompt
        if text:
            stream.add(text, ids)
        self.text_only = self.text_only and not self.reader.other
        if choice.finish_reason and stream.finish_reason is None:
            stream.finish_reason = choice.finish_reason
            self._unfinished = max(self._unfinished - 1, 0)
        return stream

    def _is_dropped(self, chunk: AnswerChunk, choice: AnswerChoice, stream: ChoiceStream) -> bool:
        """Whether a chunk without output is empty for this client, or the role, which it has already. vLLM sends empty ones
        for tokens whose text is not complete, also where their ids were not asked for."""
        if choice.delta is not None and choice.delta.role is not None:
            dropped, stream.has_role = self._restarted and stream.has_role, True
            return dropped
        asked = bool(choice.token_ids is not None or choice.prompt_token_ids or chunk.prompt_token_ids)
        asked = asked and (self._restarted or not self._source.is_vllm) and not self.request.return_token_ids
        return asked and self.opened and not is_set(choice.logprobs)

    def _forward(
        self, event: ServerSentEvent, chunk: AnswerChunk, choices: list[AnswerChoice], *, finishes: bool
    ) -> bytes | None:
        """The chunk without what only the router asked for. What it asked for is cut out of the text of most chunks. vLLM's
        last ones wait for its usage, if only the router asked for that: what it says there stands in them otherwise."""
        self.opened = True
        source = self._source
        without_usage = chunk.usage is None and not self.request.include_usage
        if not (source.hides_ids or without_usage or self._restarted or finishes):
            return event.raw + b"\n\n"
        cuts: list[tuple[bytes, bytes]] = []
        if source.hides_ids:
            for choice in choices:
                prompt, ids = chunk.prompt_token_ids or choice.prompt_token_ids, choice.token_ids
                if prompt is not None:
                    cuts.append((_PROMPT_IDS + _encode(prompt), _NO_PROMPT_IDS if source.is_vllm else b""))
                if ids is not None:
                    cuts.append((_IDS + _encode(ids), _NO_IDS if source.is_vllm else b""))
        if without_usage:
            cuts.append((_NO_USAGE, b""))
        data = event.data
        for cut, instead in cuts:
            # It stands there exactly once, unless it is written in another way.
            data = data.replace(cut, instead) if data.count(cut) == 1 else b""
        if self._restarted or not data:
            sent = self._written(event)
        else:
            sent = b"data: " + data + b"\n\n" if cuts else event.raw + b"\n\n"
        if finishes and source.is_vllm and not self.request.include_usage:
            self._finish += sent
            return self.take_finish() if len(self._finish) > _MOST_HELD else None
        return sent

    def _written(self, event: ServerSentEvent) -> bytes:
        """The chunk written anew."""
        chunk = {**_decode(event.data), **(self.head if self._restarted else {})}
        for one in (chunk, *chunk["choices"]) if self._source.hides_ids else ():
            one.pop("token_ids", None)
            one.pop("prompt_token_ids", None)
        if not self.request.include_usage and chunk.get("usage", 0) is None:
            del chunk["usage"]
        return b"data: " + _encode(chunk) + b"\n\n"

    def _converted(self, choices: list[AnswerChoice]) -> bytes | None:
        """Choices of the replica that continues, whose chunks are not those of the client."""
        found: list[dict[str, Any]] = []
        for choice in choices:
            if choice.index >= len(self.choices):
                raise ReplicaFailed("it sent a choice that was not asked for")
            stream = self.choices[choice.index]
            had_ended = stream.finish_reason is not None
            made, cut = stream.take(choice, self.request.return_token_ids)
            if made is not None:
                found.append(made)
            if stream.finish_reason is not None and not had_ended:
                self._unfinished -= 1
                self._any_cut |= cut
                self.cut = self._any_cut and not self._unfinished
        if not found:
            return None
        extra = {"usage": None} if self.request.include_usage else {}
        return self.encode({"choices": found, **extra})

    def _usage_chunk(self, event: ServerSentEvent, chunk: AnswerChunk) -> bytes | None:
        if not self.request.include_usage:
            return self.take_finish(chunk.system_fingerprint) or None
        self.usage_sent = True
        found = self._usage() if self.converts else (_decode(event.data), self.reader.counts)
        if self.holds_end and chunk.usage:
            self._last = found
            return None
        if self.converts:
            return self.encode(found[0])
        return self.encode({**found[0], **self.head}) if self._restarted else event.raw + b"\n\n"


def report_of(counts: UsageCounts, miss: Miss) -> dict[str, Any]:
    """A cache report from what is known of any engine."""
    return {"prompt_tokens": counts.prompt, "cached_tokens": counts.cached, **asdict(miss)}
