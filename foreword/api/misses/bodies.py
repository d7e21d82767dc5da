"""The conversation in the body of a completion or a chat, for a router that leaves the validation to its replicas."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Literal, cast

from foreword.api.request import CacheControl, GenerateRequest, Message, Prompt, Role, Tool, ToolCall

_ROLES = ("system", "user", "assistant", "tool")


def conversation_of(dialect: Literal["chat", "completions"], body: Mapping[str, Any]) -> GenerateRequest:
    """What matters for the prompt. Fields of a wrong type are empty; parts that are not text are compared as JSON."""
    options = body.get("chat_template_kwargs")
    key = next((body[name] for name in ("prompt_cache_key", "user") if isinstance(body.get(name), str)), None)
    return GenerateRequest(
        dialect,
        model=_text(body.get("model")) or None,
        messages=tuple(map(_message, _items(body, "messages"))) if dialect == "chat" else (),
        prompts=tuple(_prompts(body.get("prompt"))) if dialect == "completions" else (),
        tools=tuple(map(_tool, _items(body, "tools"))),
        template_options=options if isinstance(options, Mapping) else {},
        prefix=_text(body.get("prefix")) or None,
        cache=CacheControl(key=key),
    )


def _message(fields: Mapping[str, Any]) -> Message:
    role = fields.get("role")
    return Message(
        cast(Role, role if role in _ROLES else "system" if role == "developer" else "user"),
        _content(fields.get("content")),
        tool_calls=tuple(map(_call, _items(fields, "tool_calls"))),
        reasoning=_text(fields.get("reasoning_content")) or _text(fields.get("reasoning")),
    )


def _content(content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    return "\n".join(_part(part) for part in content)


def _part(part: Any) -> str:
    text = part.get("text") if isinstance(part, Mapping) else part
    return text if isinstance(text, str) else json.dumps(part, default=str)


def _call(fields: Mapping[str, Any]) -> ToolCall:
    function = fields.get("function")
    function = function if isinstance(function, Mapping) else {}
    return ToolCall("", _text(function.get("name")), _text(function.get("arguments")))


def _tool(fields: Mapping[str, Any]) -> Tool:
    function = fields.get("function")
    function = function if isinstance(function, Mapping) else fields
    parameters = function.get("parameters")
    return Tool(
        _text(function.get("name")),
        _text(function.get("description")),
        parameters if isinstance(parameters, Mapping) else {},
    )


def _prompts(prompt: Any) -> Iterator[Prompt]:
    if isinstance(prompt, str):
        yield prompt
    elif isinstance(prompt, list) and prompt:
        if all(isinstance(one, int) and 0 <= one < 2**63 for one in prompt):
            yield tuple(prompt)
        else:
            for one in prompt:
                yield from _prompts(one) if not isinstance(one, list) or _are_ids(one) else ()


def _are_ids(prompt: list[Any]) -> bool:
    return all(isinstance(one, int) for one in prompt)


def _items(fields: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    found = fields.get(name)
    return [one for one in found if isinstance(one, Mapping)] if isinstance(found, list) else []


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
