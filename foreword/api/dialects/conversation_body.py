"""Bodies of conversations: messages, their contents, tools and calls of tools, and cache control inside of them."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Final

from msgspec import UNSET, Raw, Struct, UnsetType

from foreword.api.dialects.decode import UNSET_RAW, Limits, bounded_object, check_length, one_of, refuse
from foreword.api.request import CacheBreakpoint, Message, Role, Tool, ToolCall, ToolChoice
from foreword.errors import BadRequest

_NAME_CHARACTERS = 256
_TTLS: Final = {None: 300.0, "5m": 300.0, "1h": 3600.0}
_OPENAI_TTLS: Final = {"30m": 1800.0, "12h": 43_200.0}
DEFAULT_TTL: Final = "30m"
MOST_BREAKPOINTS: Final = 4
# The Responses API tells input from output.
_TEXT_TYPES: Final = ("text", "input_text", "output_text")
# Chat templates know `system`; `developer` is OpenAI's newer name for it.
ROLES: Final[dict[str, Role]] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


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


def left_out(types: Iterable[str | None], known: Container[str | None]) -> tuple[str, ...]:
    """The places of tools that only the provider of a model can run: a client that offers them does without."""
    return tuple(f"tools[{number}]" for number, one in enumerate(types) if one not in known)


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


class CacheMark(Struct):
    """Anthropic's `cache_control`, which others use in chat completions."""

    type: str
    ttl: str | None = None


class ExplicitBreakpoint(Struct):
    """OpenAI's `prompt_cache_breakpoint`."""

    mode: str | None = None
    ttl: str | None = None


class CacheOptions(Struct):
    """OpenAI's `prompt_cache_options`. With `comparison_response_id` the response says why its prompt was not cached."""

    mode: str | None = None
    ttl: str | None = None
    comparison_response_id: str | None = None


class Part(Struct, gc=False):
    type: str
    text: str | None = None
    refusal: str | None = None
    cache_control: CacheMark | None = None
    prompt_cache_breakpoint: ExplicitBreakpoint | None = None


def breakpoint_of(mark: CacheMark | None, path: str) -> CacheBreakpoint | None:
    """Raises BadRequest."""
    if mark is None:
        return None
    if mark.type != "ephemeral":
        raise refuse(f"{path}.cache_control.type", 'must be "ephemeral"')
    if mark.ttl not in _TTLS:
        raise refuse(f"{path}.cache_control.ttl", 'must be "5m" or "1h"')
    return CacheBreakpoint(_TTLS[mark.ttl])


def openai_ttl(ttl: str, path: str) -> float:
    """Seconds. Raises BadRequest."""
    if ttl not in _OPENAI_TTLS:
        raise refuse(f"{path}.ttl", 'must be "30m" or "12h"')
    return _OPENAI_TTLS[ttl]


def part_breakpoints(
    parts: Sequence[Part], path: str, options: CacheOptions | None
) -> Iterator[CacheBreakpoint | None]:
    """Breakpoints of message parts with a mark of either kind. Raises BadRequest."""
    for part in parts:
        yield breakpoint_of(part.cache_control, path)
        explicit = part.prompt_cache_breakpoint
        if explicit is not None:
            ttl = explicit.ttl or (options.ttl if options is not None else None) or DEFAULT_TTL
            yield CacheBreakpoint(openai_ttl(ttl, f"{path}.prompt_cache_breakpoint"))


def longest(breakpoints: Iterable[CacheBreakpoint | None]) -> CacheBreakpoint | None:
    """The breakpoint with the longest ttl, of several in one message."""
    return max((one for one in breakpoints if one is not None), key=lambda one: one.ttl, default=None)


def check_breakpoints(messages: Sequence[Message], tools: Sequence[Tool]) -> None:
    """Raises BadRequest for more breakpoints than Anthropic allows."""
    breakpoints = [one.breakpoint for one in messages] + [one.breakpoint for one in tools]
    count = len(breakpoints) - breakpoints.count(None)
    if count > MOST_BREAKPOINTS:
        reason = f"cache_control: at most {MOST_BREAKPOINTS} messages, blocks and tools may have it, not {count}"
        raise refuse("messages", reason)


def text_of(content: str | Sequence[Part], path: str) -> str:
    """Text, or parts that are all text. Raises BadRequest."""
    if isinstance(content, str):
        return content
    if not content:
        raise refuse(path, "must be a string or a list of text parts")
    return "".join(_part_text(part, path) for part in content)


def _part_text(part: Part, path: str) -> str:
    if part.type == "refusal" and part.refusal is not None:
        return part.refusal
    if part.type not in _TEXT_TYPES:
        raise refuse(path, f"must be text; a part of type {part.type[:40]!r} is not supported")
    if part.text is None:
        raise refuse(path, 'must be made of parts like {"type": "text", "text": "..."}')
    return part.text


class MessageBody(Struct, gc=False):
    role: str
    content: str | list[Part] | UnsetType | None = UNSET
    name: str | None = None
    tool_calls: list[CallBody] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    function_call: CallFunction | None = None
    cache_control: CacheMark | None = None


def messages_of(
    bodies: Sequence[MessageBody], limits: Limits, options: CacheOptions | None = None
) -> tuple[Message, ...]:
    """Raises BadRequest."""
    check_length(bodies, limits.messages, "messages", least=1)
    return tuple(_message(body, f"messages[{number}]", options) for number, body in enumerate(bodies))


def _message(body: MessageBody, path: str, options: CacheOptions | None) -> Message:
    role = ROLES.get(body.role)
    if role is None or body.function_call is not None or (body.tool_calls and role != "assistant"):
        raise _unsuitable(body, path)
    return Message(
        role,
        _content(body, role, path),
        body.name,
        calls_of(body.tool_calls, f"{path}.tool_calls") if body.tool_calls else (),
        body.tool_call_id,
        body.reasoning_content or body.reasoning or "",
        _breakpoint(body, path, options),
    )


def _unsuitable(body: MessageBody, path: str) -> BadRequest:
    one_of(body.role, ROLES, f"{path}.role")
    if body.function_call is not None:
        return refuse(f"{path}.function_call", "not supported by this server; use tool_calls")
    return refuse(f"{path}.tool_calls", "only messages of the assistant may have it")


def _breakpoint(body: MessageBody, path: str, options: CacheOptions | None) -> CacheBreakpoint | None:
    if body.cache_control is None and not isinstance(body.content, list):
        return None
    parts = body.content if isinstance(body.content, list) else ()
    return longest((breakpoint_of(body.cache_control, path), *part_breakpoints(parts, f"{path}.content", options)))


def _content(body: MessageBody, role: Role, path: str) -> str:
    if isinstance(body.content, str):
        return body.content
    path = f"{path}.content"
    if isinstance(body.content, list) and body.content:
        return text_of(body.content, path)
    has_other = body.tool_calls or body.reasoning_content or body.reasoning or body.refusal
    if role == "assistant" and (has_other or body.content is None):
        return body.refusal or ""
    if body.content is UNSET:
        raise refuse(path, "is required")
    if role == "tool":
        return ""
    raise refuse(path, "must be a string or a list of text parts, and not empty")
