"""A `Job` is one HTTP request for a completion or a chat: its prompts, how its answer is written, and its progress."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from foreword.api import logprobs
from foreword.engine.request import CacheReport, Delta, MigratedTo, Request, TokenLogprob
from foreword.errors import CannotMigrate

if TYPE_CHECKING:
    from foreword.engine.tokenizer import Tokenizer

# With these headers another server treats a request as the caller's own.
_FORWARDED = ("authorization", "x-foreword-salt", "x-request-id")
FOLLOW_HEADER = "x-foreword-follow"


@dataclass(frozen=True, slots=True)
class Caller:
    """The client of a request.

    Attributes:
        headers: sent on the caller's behalf to the server that continues a migrated request.
        follows: the caller understands `foreword.moved` events and reconnects by itself, as a router does.
    """

    headers: Mapping[str, str] = field(default_factory=dict, repr=False)  # the caller's key is among them
    follows: bool = False

    @classmethod
    def of(cls, headers: Mapping[str, str]) -> Caller:
        """From a request's headers."""
        forwarded = {name: headers[name] for name in _FORWARDED if name in headers}
        return cls(forwarded, headers.get(FOLLOW_HEADER, "") == "1")


class ChoiceFormat(Protocol):
    """How the choices of an answer are written as JSON. There is one object per choice, which may keep state."""

    whole_object: str
    chunk_object: str

    def opening(self) -> dict[str, Any] | None:
        """A choice's first chunk, sent before any text."""

    def chunk(self, text: str, entries: Sequence[TokenLogprob] | None) -> dict[str, Any]:
        """A choice's further chunk."""

    def whole(self, text: str, entries: Sequence[TokenLogprob] | None) -> dict[str, Any]:
        """A choice of an answer that is not streamed."""


class CompletionFormat:
    """`text_completion`. With `echo` the prompt precedes the text."""

    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, tokenizer: Tokenizer, echo: str = "") -> None:
        self._tokenizer = tokenizer
        self.echo = echo
        self._offsets = logprobs.Offsets()

    def skip(self, tokens: Sequence[int]) -> None:
        """Count the characters of tokens that another server has sent."""
        for token in tokens:
            self._offsets.next(self._tokenizer, token)

    def opening(self) -> dict[str, Any] | None:
        return {"text": self.echo, "logprobs": None} if self.echo else None

    def chunk(self, text: str, entries: Sequence[TokenLogprob] | None) -> dict[str, Any]:
        shown = None if entries is None else logprobs.for_completion(self._tokenizer, entries, self._offsets)
        return {"text": text, "logprobs": shown}

    def whole(self, text: str, entries: Sequence[TokenLogprob] | None) -> dict[str, Any]:
        return self.chunk(self.echo + text, entries)


class ChatFormat:
    """`chat.completion`."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def opening(self) -> dict[str, Any] | None:
        return {"delta": {"role": "assistant", "content": "", "refusal": None}, "logprobs": None}

    def chunk(self, text: str, entries: Sequence[TokenLogprob] | None) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}, "logprobs": self._logprobs(entries)}

    def whole(self, text: str, entries: Sequence[TokenLogprob] | None) -> dict[str, Any]:
        return {
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": self._logprobs(entries),
        }

    def _logprobs(self, entries: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
        return None if entries is None else logprobs.for_chat(self._tokenizer, entries)


@dataclass(slots=True)
class PromptProgress:
    """What has been counted for one prompt.

    Attributes:
        output_tokens: of all its sequences.
        cached_tokens, first_token_at, finish_reason, cache_report: of its first sequence. The other sequences find the prompt
            cached by that one. `first_token_at` is on the clock of `time.monotonic`.
    """

    output_tokens: int = 0
    cached_tokens: int = 0
    first_token_at: float | None = None
    finish_reason: str | None = None
    cache_report: CacheReport | None = None

    def note(self, delta: Delta, now: float) -> None:
        """Count a delta."""
        self.output_tokens += len(delta.tokens)
        if delta.index == 0:
            self.cached_tokens, self.finish_reason = delta.cached_tokens, delta.finish_reason
            self.cache_report = delta.cache_report or self.cache_report
            if delta.tokens and self.first_token_at is None:
                self.first_token_at = now


@dataclass(slots=True, eq=False)
class Job:
    """One HTTP request for a completion or a chat. Choice `prompt * n + index` is sequence `index` of prompt `prompt`.

    Attributes:
        head: the fields that every answer and chunk begins with.
        requests: the engine's requests, one per prompt.
        formats: one per choice.
        prefix: the named prefix before the prompts.
        token_ids: show the token ids of prompts and answers, in vLLM's fields.
        resumed: output tokens that another server sent before this request migrated here; None if it started here.
        progress: one per prompt.
        departure: the server that continues this request, if it migrated away. Then this server only relays its output.
    """

    head: dict[str, Any]
    requests: tuple[Request, ...]
    formats: tuple[ChoiceFormat, ...]
    streams: bool
    include_usage: bool
    prefix: str | None = None
    token_ids: bool = False
    caller: Caller = field(default_factory=Caller)
    resumed: int | None = None
    progress: list[PromptProgress] = field(init=False)
    departure: MigratedTo | None = None

    def __post_init__(self) -> None:
        self.progress = [PromptProgress(self.resumed or 0) for _ in self.requests]

    @property
    def n(self) -> int:
        """Sequences per prompt."""
        return self.requests[0].params.n

    @property
    def wants_logprobs(self) -> bool:
        return self.requests[0].params.logprobs is not None

    @property
    def output_tokens(self) -> int:
        return sum(prompt.output_tokens for prompt in self.progress)

    @property
    def prompt_tokens(self) -> int:
        return sum(len(request.tokens) for request in self.requests)

    def usage(self) -> dict[str, Any]:
        """OpenAI's `usage`."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.output_tokens,
            "total_tokens": self.prompt_tokens + self.output_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(prompt.cached_tokens for prompt in self.progress)},
        }

    def cache_report(self) -> dict[str, Any]:
        """`{"cache_report": ...}` if the client asked for it: one report for one prompt, else a list in the prompts' order."""
        # The dashboard may have asked for a report that the client did not ask for.
        if not self.requests[0].want_cache_report:
            return {}
        reports = [dataclasses.asdict(one.cache_report) for one in self.progress if one.cache_report is not None]
        if not reports:
            return {}
        return {"cache_report": reports[0] if len(self.requests) == 1 else reports}

    # Migration

    @property
    def movable(self) -> bool:
        """Whether this request can migrate to another server."""
        return self.departure is None and len(self.requests) == 1 and self.n == 1

    def check_movable(self) -> None:
        """Raises CannotMigrate."""
        if self.departure is not None:
            raise CannotMigrate(
                f"the request has migrated to {self.departure.to} already, as {self.departure.request_id!r}"
            )
        if not self.movable:
            raise CannotMigrate("only requests with one prompt and one answer (n=1) can migrate")
