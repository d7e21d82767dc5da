"""Reads an answer of a chat or a completion with one choice as deltas, which a writer of another dialect takes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from msgspec import UNSET

from foreword.api.dialects.answer_reader import AnswerChoice, AnswerReader, Spoken, SpokenCall, SpokenFunction
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
from foreword.request_errors import ReplicaFailed

_FINISH_REASONS: Final[dict[str, FinishReason]] = {
    "length": "length",
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
    "content_filter": "content_filter",
}
_MOST_CALLS: Final = 1024


@dataclass(slots=True)
class _ChoiceState:
    """The calls of one choice: those that began, by the index that the replica gives them."""

    started: set[int] = field(default_factory=set)
    last: int = -1

    def pieces(self, spoken: Spoken) -> tuple[Piece, ...]:
        pieces: list[Piece] = []
        if reasoning := spoken.reasoning_content or spoken.reasoning:
            pieces.append(Reasoning(reasoning))
        if text := spoken.content or spoken.refusal:
            pieces.append(Text(text))
        for call in spoken.tool_calls or ():
            pieces += self._call(call)
        return tuple(pieces)

    def _call(self, call: SpokenCall) -> list[Piece]:
        function = call.function or SpokenFunction()
        index = self._index(call)
        pieces: list[Piece] = []
        if index not in self.started:
            if not function.name or len(self.started) >= _MOST_CALLS:
                raise ReplicaFailed("the replica sent a tool call without a name, or too many of them")
            self.started.add(index)
            self.last = index
            pieces.append(CallStart(index, call.id or f"call_{index}", function.name))
        elif index != self.last and function.arguments:
            raise ReplicaFailed("the replica mixes the arguments of several tool calls")
        if function.arguments:
            pieces.append(CallArguments(index, function.arguments))
        return pieces

    def _index(self, call: SpokenCall) -> int:
        if call.index is not None:
            return call.index
        return self.last + 1 if call.id or self.last < 0 else self.last

    def finish_reason(self, reason: str) -> FinishReason:
        # For a named tool, OpenAI and vLLM say "stop".
        return _FINISH_REASONS.get(reason, "tool_calls" if self.started else "stop")


class ChoiceReader(AnswerReader):
    """Reads one answer: its events in order, or its whole body."""

    def __init__(self) -> None:
        super().__init__()
        self._state = _ChoiceState()
        self._prompt: PromptInfo | None = None

    @property
    def usage(self) -> Usage:
        """The counts; those that did not arrive are 0."""
        cached, output, prompt, reasoning = (count or 0 for count in self.counts)
        return Usage(prompt, output, cached, reasoning_tokens=reasoning)

    def read_deltas(self, data: bytes) -> list[ChoiceDelta]:
        """The deltas in the data of one event of a chat or a completion with one choice. Raises as `read`."""
        chunk = self.read(data)
        if chunk.choices is UNSET:
            raise ReplicaFailed("the replica sent JSON without choices")
        if chunk.prompt_token_ids is not None:
            self._prompt = PromptInfo(tuple(chunk.prompt_token_ids))
        return [self._delta(choice) for choice in chunk.choices or ()]

    def read_whole(self, data: bytes) -> ChoiceDelta:
        """The choice of a whole response, as one delta. Raises as `read`."""
        deltas = self.read_deltas(data)
        if len(deltas) != 1:
            raise ReplicaFailed(f"the replica sent {len(deltas)} choices, not one")
        if deltas[0].finish_reason is None or self.counts.prompt is None:
            raise ReplicaFailed("the replica sent a response without finish_reason or usage")
        return deltas[0]

    def _delta(self, choice: AnswerChoice) -> ChoiceDelta:
        spoken = choice.spoken
        if spoken is None or choice.index:
            raise ReplicaFailed("the replica sent a choice without content, or one that was not asked for")
        prompt, self._prompt = self._prompt, None
        logprobs = choice.read_logprobs()
        return ChoiceDelta(
            choice.index,
            self._state.pieces(spoken),
            tuple(choice.token_ids or ()),
            None if logprobs is None else logprobs.entries(),
            None if choice.finish_reason is None else self._state.finish_reason(choice.finish_reason),
            choice.stop_reason,
            prompt,
        )
