"""Conversations of the Responses API: what a later request continues, without the instructions of earlier ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from msgspec.structs import replace

from foreword.api.dialects.writer import ChoiceOutput
from foreword.api.request import GenerateRequest, Message, ToolCall

_BETWEEN: Final = "\n\n"


def with_instructions(instructions: str | None, messages: Sequence[Message]) -> tuple[Message, ...]:
    """Many chat templates allow only one system message."""
    if not instructions:
        return tuple(messages)
    if messages and messages[0].role == "system":
        text = f"{instructions}{_BETWEEN}{messages[0].content}"
        return (replace(messages[0], content=text), *messages[1:])
    return (Message("system", instructions), *messages)


def _own_messages(request: GenerateRequest) -> tuple[Message, ...]:
    """The messages without the instructions, which hold for one response only."""
    instructions = request.extra.get("instructions")
    if not instructions:
        return request.messages
    first, *others = request.messages
    rest = first.content.removeprefix(instructions).removeprefix(_BETWEEN)
    return (replace(first, content=rest), *others) if rest else tuple(others)


def continued(request: GenerateRequest, earlier: Sequence[Message]) -> GenerateRequest:
    """The request after the conversation that `previous` names."""
    messages = with_instructions(request.extra.get("instructions"), (*earlier, *_own_messages(request)))
    return replace(request, messages=messages)


def conversation(request: GenerateRequest, answer: ChoiceOutput) -> tuple[Message, ...]:
    """The part of a request that a later one continues: the messages without instructions, and the answer."""
    calls = tuple(ToolCall(block.id, block.name, block.text or "{}") for block in answer.calls)
    said = Message("assistant", answer.joined("text"), tool_calls=calls, reasoning=answer.joined("reasoning"))
    return followed(request, (said,))


def followed(request: GenerateRequest, said: Sequence[Message]) -> tuple[Message, ...]:
    """The messages without instructions, and what was said after them."""
    return (*_own_messages(request), *said)
