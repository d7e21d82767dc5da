"""Cache control of a request: from breakpoints in messages to positions in the prompt, and what they wrote into the cache.

A breakpoint stands at the end of a message or of a tool. Its position is where the conversation up to there, rendered by
the chat template, stops being a prefix of the whole one: templates may render a message otherwise if others follow.
"""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

from foreword.api.dialects.conversation_body import MOST_BREAKPOINTS
from foreword.api.request import CacheBreakpoint, GenerateRequest, template_messages, template_tools
from foreword.blocks.common_prefixes import common_prefix_length
from foreword.blocks.retention import MAX_PRIORITY, Retention, RetentionAnswer
from foreword.errors import BadRequest

_PLACEHOLDER: Final = {"role": "user", "content": "\x00"}


class ChatTokenizer(Protocol):
    """The part of `engine.tokenizer.Tokenizer` that breakpoints need."""

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = ...,
        options: Mapping[str, Any] = ...,
        add_generation_prompt: bool = ...,
        continue_final_message: bool = ...,
    ) -> str: ...
    def token_ends(self, text: str) -> list[int]: ...


def retentions(
    tokenizer: ChatTokenizer,
    request: GenerateRequest,
    num_tokens: int,
    text: str = "",
    *,
    before: Sequence[Mapping[str, Any]] = (),
) -> tuple[Retention, ...]:
    """Retentions that a request asks for, in order of the positions. Renders and tokenizes: not for an event loop.

    Args:
        num_tokens: length of the prompt; `text`: the rendered conversation.
        before: messages of a named prefix in front of the request's own.
    """
    found = {}
    if text:
        found = _positions(tokenizer, request, num_tokens, text, before)
    if request.cache.retention is not None:
        found[num_tokens] = Retention(num_tokens, request.cache.retention)
    return tuple(found[end] for end in sorted(found) if end > 0)


def _positions(
    tokenizer: ChatTokenizer, request: GenerateRequest, num_tokens: int, text: str, before: Sequence[Mapping[str, Any]]
) -> dict[int, Retention]:
    parts = _parts(request, before)[-MOST_BREAKPOINTS:]  # a continued response may have more than a request
    ends = tokenizer.token_ends(text) if parts else []
    if len(ends) != num_tokens:
        return {}
    found = {}
    for point, messages, tools in parts:
        try:
            part = tokenizer.chat_text(
                messages, tools=tools, options=request.template_options, add_generation_prompt=False
            )
        except BadRequest:  # this template takes only whole turns
            continue
        position = bisect.bisect_right(ends, common_prefix_length(part, text))
        found[position] = Retention(position, point.ttl, min(max(point.priority, 0), MAX_PRIORITY))
    return found


_Part = tuple[CacheBreakpoint, Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]]


def _parts(request: GenerateRequest, before: Sequence[Mapping[str, Any]]) -> list[_Part]:
    """Each breakpoint with the messages and tools up to there. Tools come before the first message of a user."""
    messages, tools = [*before, *template_messages(request.messages)], template_tools(request.tools)
    system = [*itertools.takewhile(lambda message: message["role"] == "system", messages), _PLACEHOLDER]
    in_tools = [(one.breakpoint, system, tools[: i + 1]) for i, one in enumerate(request.tools) if one.breakpoint]
    first = len(before) + 1
    in_messages = [
        (one.breakpoint, messages[: first + i], tools) for i, one in enumerate(request.messages) if one.breakpoint
    ]
    return [*in_tools, *in_messages]


def written_tokens(
    retain: Sequence[Retention], answers: Sequence[RetentionAnswer], cached_tokens: int
) -> Mapping[float, int]:
    """Prompt tokens that a request added to the cache because of cache control, by ttl in seconds.

    Tokens belong to the first retention that ends behind them. Those that were cached before are not written.
    """
    written: Counter[float] = Counter()
    reached = cached_tokens
    for wish, answer in zip(sorted(retain, key=lambda one: one.end), answers, strict=False):
        if wish.ttl is not None and answer.tokens > reached:
            written[wish.ttl] += answer.tokens - reached
            reached = answer.tokens
    return dict(written)
