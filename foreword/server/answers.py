"""From the engine's deltas to pieces of an answer: text, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from foreword.api import logprobs
from foreword.api.output import CallArguments, CallStart, ChoiceDelta, FinishReason, Piece, PromptInfo, Reasoning, Text
from foreword.api.request import GenerateRequest
from foreword.api.tools.parser import AnswerFormats, AnswerParser, opens_reasoning
from foreword.engine.request import Delta, Request, TokenLogprob
from foreword.engine.stops import StopFinder

if TYPE_CHECKING:
    from foreword.engine.tokenizer import Tokenizer

# Last tokens of a prompt in which an opening tag of reasoning is looked for.
_PROMPT_END = 16


class DeltaReader:
    """Reads the deltas of one choice.

    Args:
        prompt: what the response shows of the prompt, given with the first delta.
        echoes: the log-probabilities of the prompt are put before those of the answer.
        scores: they are shown in vLLM's `prompt_logprobs`.
        parser: None for completions, whose text is passed on as it is.
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
        self._index = index
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
            self._index,
            pieces,
            delta.tokens,
            logprobs.entries(self._tokenizer, delta.logprobs) if wanted else None,
            self._finish_reason(delta),
            delta.stop_match,
            prompt,
        )

    def _scored_prompt(self, delta: Delta) -> PromptInfo | None:
        """What is shown of the prompt, with its log-probabilities if they came with this delta."""
        found = delta.prompt_logprobs
        if found is None or not (self._echoes or self._scores):
            return self._prompt
        return replace(
            self._prompt or PromptInfo(),
            entries=logprobs.prompt_entries(self._tokenizer, self._request.tokens[0], found) if self._echoes else (),
            logprobs=logprobs.for_prompt(self._tokenizer, found) if self._scores else None,
        )

    def resume(self, output: Sequence[int]) -> list[TokenLogprob]:
        """Another server has sent these tokens. Returns them as entries without log-probabilities."""
        params, self._prompt = self._request.params, None
        stream = self._tokenizer.stream(self._request.tokens, skip_special_tokens=params.skip_special_tokens)
        stops = StopFinder(params.stop, include=params.include_stop)
        for token in output:
            self._pieces(stops.push(stream.push(token))[0], last=False)
            self.reasoning_tokens += self._reasons
        return [TokenLogprob(token, 0.0) for token in output]

    def _pieces(self, text: str, *, last: bool) -> tuple[Piece, ...]:
        if self._parser is None:
            return (Text(text),) if text else ()
        found = self._parser.feed(text)
        if last:
            found += self._parser.finish()
        kept = tuple(piece for piece in found if self._keeps(piece))
        self._calls += sum(isinstance(piece, CallStart) for piece in kept)
        if found:
            self._reasons = isinstance(found[-1], Reasoning)
        return kept

    def _keeps(self, piece: Piece) -> bool:
        return self._parallel or not isinstance(piece, CallStart | CallArguments) or piece.index == 0

    def _finish_reason(self, delta: Delta) -> FinishReason | None:
        if delta.finish_reason == "stop":
            return "tool_calls" if self._calls else "stop"
        return "length" if delta.finish_reason is not None else None


def prompt_opens_reasoning(tokenizer: Tokenizer, formats: AnswerFormats, tokens: Sequence[int]) -> bool:
    """Whether the answer begins inside of the reasoning."""
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
    """The reader of choice `index`, which continues `prompt`."""
    parser = None
    if request.dialect != "completions":
        tools = () if request.tool_choice.mode == "none" else request.tools
        is_open = prompt_opens_reasoning(tokenizer, formats, prompt.tokens)
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
