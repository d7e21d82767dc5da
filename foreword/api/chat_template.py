"""Conversations and tools in the form that chat templates expect: plain dictionaries, as at OpenAI."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from foreword.api.request import Message, Tool, ToolCall


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages for `Tokenizer.render_chat`."""
    return [_message(message) for message in messages]


def template_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Tools for `Tokenizer.render_chat`."""
    return [{"type": "function", "function": _function(tool)} for tool in tools]


def _function(tool: Tool) -> dict[str, Any]:
    return {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}


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
