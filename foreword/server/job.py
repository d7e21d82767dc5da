"""A `Job` is one HTTP request to generate text: its prompts, how the engine's deltas become its answer, and its progress."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from foreword.api import logprobs
from foreword.api.breakpoints import written_tokens
from foreword.api.dialects.writer import ResponseHead, Writer
from foreword.api.misses.causes import Miss
from foreword.api.misses.outline import Conversation
from foreword.api.output import (
    CallArguments,
    CallStart,
    ChoiceDelta,
    FinishReason,
    Piece,
    PromptInfo,
    Reasoning,
    Text,
    Usage,
)
from foreword.api.request import GenerateRequest
from foreword.api.tools.parser import AnswerFormats, AnswerParser, leaves_reasoning_open, opens_reasoning
from foreword.blocks.retention import RetentionAnswer
from foreword.engine.request import CacheReport, Delta, MigratedTo, Request
from foreword.engine.sequence import OutputText
from foreword.server.prompt_scores import for_prompt
from foreword.tokens.token_logprob import TokenLogprob
from foreword.transfer.errors import CannotMigrate
from foreword.usage import TokenUsage

if TYPE_CHECKING:
    from foreword.tokens.tokenizer import Tokenizer

# Last tokens of a prompt in which an opening tag of reasoning is looked for.
_PROMPT_END = 16
# With these headers another server treats a request as the caller's own.
_FORWARDED = ("authorization", "x-api-key", "x-foreword-salt", "x-request-id", "traceparent", "tracestate")
FOLLOW_HEADER = "x-foreword-follow"


class DeltaReader:
    """Reads the deltas of one choice.

    Args:
        prompt: what the response shows of the prompt, given with the first delta.
        echoes: the log-probabilities of the prompt are put before those of the answer.
        scores: they are shown in vLLM's `prompt_logprobs`.
        parser: None where all is text, which is passed on as it is.
        parallel: the model may call several tools at once; further calls are dropped otherwise.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        request: Request,
        index: int,
        *,
        prompt: PromptInfo | None = None,
        echoes: bool = False,
        scores: bool = False,
        parser: AnswerParser | None = None,
        parallel: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._request = request
        self.index = index
        self._prompt = prompt
        self._echoes = echoes
        self._scores = scores
        self._parser = parser
        self._parallel = parallel
        self._calls = 0
        self._reasons = False
        self.reasoning_tokens = 0

    def read(self, delta: Delta) -> ChoiceDelta:
        """A delta of this choice that neither failed nor moved."""
        pieces = self._pieces(delta.text, last=delta.finish_reason is not None)
        self.reasoning_tokens += len(delta.tokens) if self._reasons else 0
        prompt, self._prompt = self._scored_prompt(delta), None
        wanted = self._request.params.logprobs is not None
        return ChoiceDelta(
            self.index,
            pieces,
            delta.tokens,
            logprobs.entries(self._tokenizer, delta.logprobs) if wanted else None,
            self._finish_reason(delta),
            delta.stop_match,
            prompt,
        )

    def _scored_prompt(self, delta: Delta) -> PromptInfo | None:
        """The prompt as it is shown, with its log-probabilities if they came with this delta."""
        found = delta.prompt_logprobs
        if found is None or not (self._echoes or self._scores):
            return self._prompt
        return replace(
            self._prompt or PromptInfo(),
            entries=logprobs.prompt_entries(self._tokenizer, self._request.tokens[0], found) if self._echoes else (),
            logprobs=for_prompt(self._tokenizer, found) if self._scores else None,
        )

    def resume(self, output: Sequence[int]) -> list[Piece]:
        """Another server has sent these tokens. Returns what they say."""
        self._prompt = None
        text = OutputText(self._tokenizer, self._request)
        said: list[Piece] = []
        for token in output:
            said += self._pieces(text.push(token)[0], last=False)
            self.reasoning_tokens += self._reasons
        return said

    def _pieces(self, text: str, *, last: bool) -> tuple[Piece, ...]:
        if self._parser is None:
            return (Text(text),) if text else ()
        found = self._parser.feed(text)
        if last:
            found += self._parser.finish()
        kept = tuple(
            one for one in found if self._parallel or not isinstance(one, CallStart | CallArguments) or one.index == 0
        )
        self._calls += sum(isinstance(piece, CallStart) for piece in kept)
        if found:
            self._reasons = isinstance(found[-1], Reasoning)
        return kept

    def _finish_reason(self, delta: Delta) -> FinishReason | None:
        if delta.finish_reason == "stop":
            return "tool_calls" if self._calls else "stop"
        return "length" if delta.finish_reason is not None else None


def prompt_opens_reasoning(
    tokenizer: Tokenizer, formats: AnswerFormats, request: GenerateRequest, tokens: Sequence[int]
) -> bool:
    """Whether the answer begins inside of the reasoning."""
    if request.continue_final_message and leaves_reasoning_open(request.messages[-1].content, formats.reasoning):
        return True
    end = tokenizer.decode(tokens[-_PROMPT_END:], skip_special_tokens=False)
    return opens_reasoning(end, formats.reasoning)


def reader_for(
    tokenizer: Tokenizer,
    request: GenerateRequest,
    formats: AnswerFormats,
    prompt: Request,
    index: int,
    shown: PromptInfo | None = None,
) -> DeltaReader:
    """The reader of choice `index`, which continues `prompt`. What can only be text is not parsed."""
    parser = None
    tools = () if request.tool_choice.mode == "none" else request.tools
    if request.dialect != "completions" and (tools or formats.divided):
        is_open = prompt_opens_reasoning(tokenizer, formats, request, prompt.tokens)
        parser = AnswerParser(formats, tools, reasoning_open=is_open)
    return DeltaReader(
        tokenizer,
        prompt,
        index,
        prompt=shown,
        echoes=request.echo and prompt.params.logprobs is not None,
        scores="prompt_logprobs" in request.sampling,
        parser=parser,
        parallel=request.parallel_tool_calls,
    )


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


@dataclass(slots=True)
class PromptProgress:
    """Counts for one prompt.

    Attributes:
        output_tokens: of all its sequences. first: the index of the first one.
        cached_tokens, first_token_at, finish_reason, cache_report, retained: of its first sequence. The other sequences find
            the prompt cached by that one. `first_token_at` is on the clock of `time.monotonic`.
        miss: why part of the prompt was not cached, once it has ended.
    """

    output_tokens: int = 0
    first: int = 0
    cached_tokens: int = 0
    first_token_at: float | None = None
    finish_reason: str | None = None
    cache_report: CacheReport | None = None
    retained: tuple[RetentionAnswer, ...] = ()
    miss: Miss | None = None

    def unread(self, delta: Delta) -> None:
        """Count a delta that the engine had computed when the client left."""
        self.output_tokens += len(delta.tokens)

    def note(self, delta: Delta, now: float) -> None:
        """Count a delta."""
        self.output_tokens += len(delta.tokens)
        if delta.index == self.first:
            self.cached_tokens, self.finish_reason = delta.cached_tokens, delta.finish_reason
            self.cache_report = delta.cache_report or self.cache_report
            self.retained = delta.retained or self.retained
            if delta.tokens and self.first_token_at is None:
                self.first_token_at = now


@dataclass(slots=True, eq=False)
class Job:
    """An HTTP request to generate text. Choice `prompt * n + index` is sequence `index` of prompt `prompt`.

    Attributes:
        request: what the client asks for.
        requests: the engine's requests, one per prompt; where choices of one prompt are continued, one per choice.
        readers: one per choice.
        owner: salt of the tenant.
        streams: deltas go out as they come.
        resumed: output tokens that another server sent before this one continued; None if it started here.
        charge: charges the tenant for these tokens.
        progress: one per prompt.
        conversations: what is compared with other requests to explain misses, one per prompt.
        answer: the pieces of the first choice.
        arrived: when it came to this server, by `time.monotonic`.
        departure: the server that continues this request, if it migrated away. Then this server only relays its output.
    """

    request: GenerateRequest
    head: ResponseHead
    writer: Writer
    requests: tuple[Request, ...]
    readers: tuple[DeltaReader, ...]
    owner: bytes
    streams: bool
    caller: Caller = field(default_factory=Caller)
    resumed: int | None = None
    charge: Callable[[TokenUsage], None] = lambda usage: None
    progress: list[PromptProgress] = field(init=False)
    departure: MigratedTo | None = None
    conversations: tuple[Conversation, ...] = ()
    answer: list[Piece] = field(default_factory=list)
    arrived: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.progress = [PromptProgress(first=request.index) for request in self.requests]
        self.progress[0].output_tokens = self.resumed or 0

    @property
    def _continues_choices(self) -> bool:
        """Whether it continues choices of a request that has several."""
        return self.request.continuation is not None and bool(self.request.continuation.choices)

    @property
    def prompts(self) -> int:
        """The number of its prompts: the first `requests`."""
        return len(self.requests) if self.resumed is None else 1

    @property
    def n(self) -> int:
        """Sequences per prompt."""
        return self.requests[0].params.n

    @property
    def migrated_here(self) -> bool:
        """The engine has it already. Otherwise it begins here, or after an output that came with it."""
        return self.resumed is not None and not self.requests[0].output and not self._continues_choices

    @property
    def output_tokens(self) -> int:
        return sum(prompt.output_tokens for prompt in self.progress)

    @property
    def prompt_tokens(self) -> int:
        return sum(len(request.tokens) for request in self.requests[: self.prompts])

    def first_token_at(self) -> float | None:
        """When the first token of any prompt came, by `time.monotonic`."""
        return min((one.first_token_at for one in self.progress if one.first_token_at is not None), default=None)

    def read(self, prompt: int, delta: Delta) -> ChoiceDelta:
        """A delta as the writer takes it."""
        reader = self.readers[prompt * self.n + delta.index - self.requests[prompt].index]
        read = reader.read(delta)
        if not reader.index and self.conversations:
            self.answer += read.pieces
        return read

    def resume(self, tokenizer: Tokenizer, outputs: Sequence[Sequence[int]]) -> None:
        """Go to where another server's answer ended: it has sent these tokens, of each choice that continues. They have no
        log-probabilities here. A choice without tokens begins here."""
        for reader, output in zip(self.readers, outputs, strict=True):
            if not output and self._continues_choices:
                continue
            said = reader.resume(output)
            if not reader.index:
                self.answer += said
            wanted = self.requests[0].params.logprobs is not None
            sent = [TokenLogprob(token, 0.0) for token in output] if wanted else ()
            self.writer.resume(reader.index, logprobs.entries(tokenizer, sent))

    def usage(self) -> Usage:
        written: Counter[float] = Counter()
        for request, progress in zip(self.requests, self.progress, strict=True):
            if request.retain:
                written.update(written_tokens(request.retain, progress.retained, progress.cached_tokens))
        return Usage(
            self.prompt_tokens,
            self.output_tokens,
            sum(prompt.cached_tokens for prompt in self.progress[: self.prompts]),
            dict(written),
            sum(reader.reasoning_tokens for reader in self.readers),
        )

    def charged(self, weights: str) -> TokenUsage:
        """The charge to its tenant here, until now: not for what another server has charged before the request came."""
        read: Counter[str] = Counter()
        for progress in self.progress:
            if progress.cache_report is not None:
                read.update(progress.cache_report.loaded_tokens)
        usage = self.usage()
        output = usage.output_tokens - (self.resumed or 0)
        prompt = (0, 0) if self.migrated_here else (usage.prompt_tokens, usage.cached_tokens)
        reasoning = min(usage.reasoning_tokens, output)
        return TokenUsage(prompt[0], output, prompt[1], reasoning, dict(read), self.head.model, weights)

    def cache_report(self) -> dict[str, Any] | Sequence[dict[str, Any]] | None:
        """The cache report that the client asked for: one report for one prompt, else a list in the prompts' order."""
        # The dashboard may have asked for a report that the client did not ask for.
        if not self.request.cache_report:
            return None
        reports = [
            asdict(one.cache_report) | (asdict(one.miss) if one.miss is not None else {})
            for one in self.progress
            if one.cache_report is not None
        ]
        if not reports:
            return None
        return reports[0] if self.prompts == 1 else reports

    # Migration

    @property
    def movable(self) -> bool:
        """Whether this request can migrate to another server."""
        return self.departure is None and len(self.requests) == 1 and self.n == 1 and not self._continues_choices

    def check_movable(self) -> None:
        """Raises CannotMigrate."""
        if self.departure is not None:
            raise CannotMigrate(
                f"the request has migrated to {self.departure.to} already, as {self.departure.request_id!r}"
            )
        if not self.movable:
            raise CannotMigrate("only requests with one prompt and one answer (n=1) can migrate")

    @property
    def client_follows(self) -> bool:
        """Whether the client continues the stream at the server that the request migrates to. Chunks of chat completions and
        completions can be continued by another server; events of other dialects refer to earlier ones."""
        return self.streams and self.caller.follows and self.request.dialect in ("chat", "completions")
