"""Tools and calls of tools in OpenAI's chat format."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Raw, Struct

from foreword.api.dialects.content import CacheMark, breakpoint_of
from foreword.api.dialects.decode import check_length, refuse
from foreword.api.dialects.limits import UNSET_RAW, Limits, bounded_object
from foreword.api.request import Tool, ToolCall, ToolChoice

_NAME_CHARACTERS = 256


class FunctionBody(Struct):
    name: str
    description: str | None = None
    parameters: Raw = UNSET_RAW
    strict: bool | None = None


class ToolBody(Struct):
    type: str
    function: FunctionBody | None = None
    cache_control: CacheMark | None = None


class CallFunction(Struct):
    name: str
    arguments: str | None = None


class CallBody(Struct):
    function: CallFunction
    id: str | None = None
    type: str | None = None


class NamedFunction(Struct):
    name: str


class NamedChoice(Struct):
    type: str
    function: NamedFunction | None = None


def tools_of(bodies: Sequence[ToolBody] | None, limits: Limits) -> tuple[Tool, ...]:
    """Raises BadRequest."""
    check_length(bodies or (), limits.tools, "tools")
    return tuple(_tool(body, f"tools[{number}]", limits) for number, body in enumerate(bodies or ()))


def _tool(body: ToolBody, path: str, limits: Limits) -> Tool:
    if body.type != "function":
        raise refuse(f"{path}.type", f'only tools of type "function" are supported, not {body.type[:40]!r}')
    if body.function is None:
        raise refuse(f"{path}.function", "is required")
    return make_tool(
        body.function.name,
        body.function.description,
        body.function.parameters,
        bool(body.function.strict),
        f"{path}.function",
        limits,
        mark=body.cache_control,
    )


def make_tool(
    name: str,
    description: str | None,
    parameters: Raw,
    strict: bool,
    path: str,
    limits: Limits,
    *,
    schema: str = "parameters",
    mark: CacheMark | None = None,
) -> Tool:
    """A tool. `schema` is the dialect's name of its parameters. Raises BadRequest."""
    if not 0 < len(name) <= _NAME_CHARACTERS:
        raise refuse(f"{path}.name", f"must have between 1 and {_NAME_CHARACTERS} characters")
    found = bounded_object(parameters, f"{path}.{schema}", limits)
    return Tool(name, description or "", found or {}, strict, breakpoint_of(mark, path))


def choice_of(choice: str | NamedChoice | None, tools: Sequence[Tool]) -> ToolChoice:
    """Raises BadRequest."""
    if choice is None or choice == "auto":
        return ToolChoice()
    if choice == "none":
        return ToolChoice("none")
    if choice == "required":
        return require(ToolChoice("required"), tools)
    if isinstance(choice, str) or choice.type != "function":
        raise refuse("tool_choice", 'must be "none", "auto", "required" or {"type": "function", "function": {...}}')
    if choice.function is None:
        raise refuse("tool_choice.function", "is required")
    return require(ToolChoice("named", choice.function.name), tools)


def require(choice: ToolChoice, tools: Sequence[Tool]) -> ToolChoice:
    """The choice, if the tools allow it. Raises BadRequest."""
    if not tools:
        raise refuse("tool_choice", "needs tools")
    if choice.name is not None and all(tool.name != choice.name for tool in tools):
        raise refuse("tool_choice", f"there is no tool named {choice.name[:80]!r} among tools")
    return choice


def calls_of(bodies: Sequence[CallBody] | None, path: str) -> tuple[ToolCall, ...]:
    """The calls in an assistant's message. Raises BadRequest."""
    return tuple(_call(body, number, f"{path}[{number}]") for number, body in enumerate(bodies or ()))


def _call(body: CallBody, number: int, path: str) -> ToolCall:
    if body.type not in (None, "function"):
        raise refuse(f"{path}.type", 'must be "function"')
    return ToolCall(body.id or f"call_{number}", body.function.name, body.function.arguments or "{}")
