"""Output in one form, whatever dialect writes it.

A source (our engine, or a replica's stream) produces these pieces for each choice; a dialect's writer turns them into a
response or into server-sent events.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from foreword.api.token_entry import TokenEntry

FinishReason = Literal["stop", "length", "tool_calls", "content_filter"]


@dataclass(frozen=True, slots=True)
class Text:
    """More text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """The model begins to call a tool. `index` counts the calls of this choice."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the arguments of call `index`, as JSON text."""

    index: int
    text: str


Piece = Text | Reasoning | CallStart | CallArguments


@dataclass(frozen=True, slots=True)
class PromptInfo:
    """Information on a prompt that a response shows.

    Attributes:
        tokens: its token ids, if the client asked for them.
        text, entries: what `echo` puts before the answer, the entries if log-probabilities were asked for.
        logprobs: vLLM's `prompt_logprobs`.
    """

    tokens: tuple[int, ...] | None = None
    text: str = ""
    entries: tuple[TokenEntry, ...] = ()
    logprobs: tuple[Any, ...] | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Counts of a finished request.

    Attributes:
        prompt_tokens: of all prompts, cached ones included.
        cached_tokens: prompt tokens that were not computed.
        written_tokens: prompt tokens that this request added to the cache because of cache control, by ttl in seconds.
        reasoning_tokens: output tokens before the answer.
    """

    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    written_tokens: Mapping[float, int] = field(default_factory=dict)
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """Output that one step added to choice `index`.

    Attributes:
        pieces: in order; may be empty.
        tokens: the token ids behind them, where they are known.
        logprobs: one per token if they were asked for, else None.
        finish_reason: set on a choice's last delta. `stop_match`: the stop string or token that ended it.
        prompt: on a choice's first delta, if the response shows something of its prompt.
    """

    index: int
    pieces: tuple[Piece, ...] = ()
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenEntry, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_match: str | int | None = None
    prompt: PromptInfo | None = None
