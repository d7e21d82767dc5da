"""A `Job` is one HTTP request for a completion or a chat: its prompts, how its answer is written, and its counts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from foreword.api import logprobs
from foreword.engine.request import Delta, Request, TokenLogprob

if TYPE_CHECKING:
    from foreword.engine.tokenizer import Tokenizer

# What another server must be told to treat a caller in the same way.
_PASSED_ON = ("authorization", "x-foreword-salt", "x-request-id")
FOLLOW_HEADER = "x-foreword-follow"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asked.

    Attributes:
        headers: to show on the caller's behalf to the server where a request goes on.
        follows: it knows `foreword.moved` events and goes there itself, as a router does.
    """

    headers: Mapping[str, str] = field(default_factory=dict, repr=False)  # the caller's key is among them
    follows: bool = False

    @classmethod
    def of(cls, headers: Mapping[str, str]) -> Caller:
        """From a request's headers."""
        passed = {name: headers[name] for name in _PASSED_ON if name in headers}
        return cls(passed, headers.get(FOLLOW_HEADER, "") == "1")


class Shape(Protocol):
    """How the answers of one interface are written. It may keep state per choice."""

    whole_object: str
    chunk_object: str

    def opening(self) -> dict[str, Any] | None:
        """A choice's first chunk, sent before any text."""

    def chunk(self, text: str, entries: Sequence[TokenLogprob] | None) -> dict[str, Any]:
        """A choice's further chunk."""

    def whole(self, text: str, entries: Sequence[TokenLogprob] | None) -> dict[str, Any]:
        """A choice of an answer that is not streamed."""


class CompletionShape:
    """`text_completion`. Before the text may come the prompt (`echo`)."""

    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, tokenizer: Tokenizer, echo: str = "") -> None:
        self._tokenizer = tokenizer
        self.echo = echo
        self._offsets = logprobs.Offsets()

    def skip(self, tokens: Sequence[int]) -> None:
        """These were written elsewhere: count their characters."""
        for token in tokens:
            self._offsets.next(self._tokenizer, token)

    def opening(self) -> dict[str, Any] | None:
        return {"text": self.echo, "logprobs": None} if self.echo else None

    def chunk(self, text: str, entries: Sequence[TokenLogprob] | None) -> dict[str, Any]:
        shown = None if entries is None else logprobs.for_completion(self._tokenizer, entries, self._offsets)
        return {"text": text, "logprobs": shown}

    def whole(self, text: str, entries: Sequence[TokenLogprob] | None) -> dict[str, Any]:
        return self.chunk(self.echo + text, entries)


class ChatShape:
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


@dataclass(frozen=True, slots=True)
class Job:
    """One HTTP request on its way through.

    Attributes:
        head: what every answer and chunk begins with.
        requests: one per prompt.
        shapes: one per choice.
        prefix: the named prefix that stands before the prompts.
        token_ids: show the prompts' and the answers' token ids, in vLLM's fields.
        caller: who asked.
        resumed: it began on another server and goes on here after so many tokens; None if it begins here.
    """

    head: dict[str, Any]
    requests: tuple[Request, ...]
    shapes: tuple[Shape, ...]
    streams: bool
    include_usage: bool
    prefix: str | None = None
    token_ids: bool = False
    caller: Caller = field(default_factory=Caller)
    resumed: int | None = None

    @property
    def n(self) -> int:
        return self.requests[0].params.n

    @property
    def wants_logprobs(self) -> bool:
        return self.requests[0].params.logprobs is not None


@dataclass(slots=True)
class Tally:
    """What was counted while a job ran."""

    job: Job
    completion_tokens: int = 0
    cached_tokens: dict[int, int] = field(default_factory=dict)
    reports: dict[int, dict[str, Any]] = field(default_factory=dict)

    def add(self, prompt: int, delta: Delta) -> None:
        self.completion_tokens += len(delta.tokens)
        if delta.index == 0:
            # A prompt counts once, as its first sequence met it; the others found it cached by that one.
            self.cached_tokens[prompt] = delta.cached_tokens
            # The dashboard may have asked for a report that the client did not ask for.
            if delta.cache_report is not None and self.job.requests[prompt].want_cache_report:
                self.reports[prompt] = dataclasses.asdict(delta.cache_report)

    def usage(self) -> dict[str, Any]:
        prompt_tokens = sum(len(request.tokens) for request in self.job.requests)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self.cached_tokens.values())},
        }

    def report(self) -> dict[str, Any]:
        """`{"cache_report": ...}` if one was asked for: one report for one prompt, a list in order for several."""
        if not self.reports:
            return {}
        reports = [self.reports[prompt] for prompt in sorted(self.reports)]
        return {"cache_report": reports[0] if len(self.job.requests) == 1 else reports}
