"""Conversations and tools in the form that chat templates expect: plain dictionaries, as at OpenAI."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from foreword.api.request import GenerateRequest, Message, Tool, ToolCall

if TYPE_CHECKING:
    from foreword.tokens.tokenizer import Tokenizer


def chat_text(tokenizer: Tokenizer, request: GenerateRequest, before: Sequence[Mapping[str, Any]] = ()) -> str:
    """A conversation as the model sees it, to be encoded without special tokens. `before`: messages of a named prefix.

    Raises BadRequest if the template rejects it.
    """
    return tokenizer.chat_text(
        [*before, *template_messages(request.messages)],
        tools=template_tools(request.tools),
        options=request.template_options,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
    )


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages for `Tokenizer.render_chat`."""
    return [_message(message) for message in messages]


def template_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Tools for `Tokenizer.render_chat`."""
    described = (
        {"name": one.name, "description": one.description, "parameters": dict(one.parameters)} for one in tools
    )
    return [{"type": "function", "function": one} for one in described]


def _message(message: Message) -> dict[str, Any]:
    plain: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.name is not None:
        plain["name"] = message.name
    if message.tool_calls:
        plain["tool_calls"] = [_call(call) for call in message.tool_calls]
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    if message.reasoning:
        plain["reasoning_content"] = message.reasoning
    return plain


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": _arguments(call.arguments)}}


def _arguments(text: str) -> Any:
    """Templates expect an object. What is not one is shown as the model wrote it."""
    try:
        found = msgspec.json.decode(text or "{}")
    except (msgspec.DecodeError, RecursionError):
        return text
    return found if isinstance(found, dict) else text
