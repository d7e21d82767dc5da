"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's fields, and Foreword's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from msgspec import Raw, Struct
from msgspec.structs import replace

from foreword.api.dialects.conversation_body import (
    CacheMark,
    breakpoint_of,
    check_breakpoints,
    choice_of,
    left_out,
    longest,
    make_tool,
    require,
)
from foreword.api.dialects.decode import UNSET_RAW, Limits, bounded_object, check_length, decode, is_set, one_of, refuse
from foreword.api.dialects.sampling import (
    CommonFields,
    Whole,
    common_sampling,
    own_fields,
    refuse_unsupported,
    schema_format,
    stop_strings,
)
from foreword.api.request import (
    CacheBreakpoint,
    CacheControl,
    GenerateRequest,
    Message,
    OutputFormat,
    Tool,
    ToolCall,
    ToolChoice,
)
from foreword.request_errors import ThreadUnsupported

_ROLES: Final = ("user", "assistant", "system")
# The client's own. All others are the provider's.
_TOOL_TYPES: Final = (None, "custom")
_THINKING: Final = ("enabled", "disabled", "adaptive", "between_tools")
# Texts of one user's message are separate to the client, such as a document and a question.
_BETWEEN_TEXTS: Final = "\n\n"


class ContentBlock(Struct):
    """Any block of content. Which fields it needs depends on its type."""

    type: str
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: Raw = UNSET_RAW
    tool_use_id: str | None = None
    content: str | list[ContentBlock] | None = None
    thinking: str | None = None
    cache_control: CacheMark | None = None


class TurnBody(Struct):
    role: str
    content: str | list[ContentBlock]


class ClientTool(Struct):
    name: str
    type: str | None = None
    description: str | None = None
    input_schema: Raw = UNSET_RAW
    strict: bool | None = None
    cache_control: CacheMark | None = None


class Choice(Struct):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Struct):
    type: str
    budget_tokens: Whole | None = None
    display: str | None = None


class Diagnostics(Struct):
    """Asks why the prompt was not cached."""

    previous_message_id: str | None = None


class Metadata(Struct):
    user_id: str | None = None


class Format(Struct):
    type: str
    schema: Raw = UNSET_RAW


class OutputConfig(Struct):
    format: Format | None = None
    effort: str | None = None


class MessagesBody(CommonFields, kw_only=True):
    messages: list[TurnBody]
    max_tokens: Whole | None = None
    system: str | list[ContentBlock] | None = None
    tools: list[ClientTool] | None = None
    tool_choice: Choice | None = None
    thinking: Thinking | None = None
    stop_sequences: list[str] | None = None
    metadata: Metadata | None = None
    cache_control: CacheMark | None = None
    output_format: Format | None = None
    output_config: OutputConfig | None = None
    diagnostics: Diagnostics | None = None
    thread: Raw = UNSET_RAW
    mcp_servers: Raw = UNSET_RAW
    chat_template_kwargs: Raw = UNSET_RAW


def parse(raw: bytes, limits: Limits) -> GenerateRequest:
    """Raises BadRequest, which names the parameter, and BodyTooLarge."""
    body = decode(MessagesBody, raw, limits)
    if body.max_tokens is None:
        raise refuse("max_tokens", "is required")
    return _request(body, limits)


def parse_count(raw: bytes, limits: Limits) -> GenerateRequest:
    """The body of `count_tokens`: what `parse` takes, but `max_tokens` is not needed. Raises as `parse`."""
    return _request(decode(MessagesBody, raw, limits), limits)


def _request(body: MessagesBody, limits: Limits) -> GenerateRequest:
    refuse_unsupported(body)
    if is_set(body.thread):  # its messages may be the newest ones only
        raise ThreadUnsupported("thread: conversations are not kept here; send all messages", param="thread")
    messages = _messages(body, limits)
    tools = _tools(body.tools, limits)
    check_breakpoints(messages, tools)
    last = messages[-1]
    continues = last.role == "assistant" and last.content != "" and not last.tool_calls
    choice = body.tool_choice
    return GenerateRequest(
        "messages",
        messages=messages,
        sampling=_sampling(body, limits),
        tools=tools,
        left_out=left_out([tool.type for tool in body.tools or ()], _TOOL_TYPES),
        tool_choice=_choice(choice, tools),
        parallel_tool_calls=not (choice is not None and choice.disable_parallel_tool_use),
        output_format=_output_format(body, limits),
        reasoning=body.thinking is None or body.thinking.display != "omitted",
        template_options=_template_options(body, limits),
        continue_final_message=continues,
        add_generation_prompt=not continues,
        include_usage=True,
        cache=CacheControl(body.prompt_cache_key),
        cache_report=bool(body.cache_report) or body.diagnostics is not None,
        session=(body.metadata.user_id or None) if body.metadata is not None else None,
        extra={"diagnostics": None} if body.diagnostics is not None else {},
        **own_fields(body),
    )


def _sampling(body: MessagesBody, limits: Limits) -> dict[str, Any]:
    stop = stop_strings(body.stop_sequences, limits, "stop_sequences") or None
    return common_sampling(body, max_tokens=body.max_tokens, stop=stop)


def _template_options(body: MessagesBody, limits: Limits) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if body.thinking is not None:
        one_of(body.thinking.type, _THINKING, "thinking.type")
        options["enable_thinking"] = body.thinking.type != "disabled"
    if body.output_config is not None and body.output_config.effort is not None:
        options["reasoning_effort"] = body.output_config.effort[:40]
    return {**options, **(bounded_object(body.chat_template_kwargs, "chat_template_kwargs", limits) or {})}


def _output_format(body: MessagesBody, limits: Limits) -> OutputFormat | None:
    given, path = body.output_format, "output_format"
    if given is None and body.output_config is not None:
        given, path = body.output_config.format, "output_config.format"
    if given is None:
        return None
    one_of(given.type, ("json_schema",), f"{path}.type")
    return schema_format(given.schema, f"{path}.schema", limits)


# Tools


def _tools(bodies: Sequence[ClientTool] | None, limits: Limits) -> tuple[Tool, ...]:
    check_length(bodies or (), limits.tools, "tools")
    known = [(number, body) for number, body in enumerate(bodies or ()) if body.type in _TOOL_TYPES]
    return tuple(_tool(body, f"tools[{number}]", limits) for number, body in known)


def _tool(body: ClientTool, path: str, limits: Limits) -> Tool:
    if not is_set(body.input_schema):
        raise refuse(f"{path}.input_schema", "is required")
    return make_tool(
        body.name,
        body.description,
        body.input_schema,
        bool(body.strict),
        path,
        limits,
        schema="input_schema",
        mark=body.cache_control,
    )


def _choice(choice: Choice | None, tools: Sequence[Tool]) -> ToolChoice:
    kind = "auto" if choice is None else one_of(choice.type, ("auto", "any", "tool", "none"), "tool_choice.type")
    if choice is None or kind != "tool":
        return choice_of("required" if kind == "any" else kind, tools)
    if choice.name is None:
        raise refuse("tool_choice.name", "is required")
    return require(ToolChoice("named", choice.name), tools)


# Messages


def _messages(body: MessagesBody, limits: Limits) -> tuple[Message, ...]:
    check_length(body.messages, limits.messages, "messages", least=1)
    found = list(_system(body.system))
    for number, message in enumerate(body.messages):
        found.extend(_converted(message, f"messages[{number}]"))
    check_length(found, limits.messages, "messages", least=1)
    mark = breakpoint_of(body.cache_control, "cache_control")
    if mark is None or not found:
        return tuple(found)
    last = replace(found[-1], breakpoint=longest((found[-1].breakpoint, mark)))  # for the whole conversation
    return (*found[:-1], last)


def _system(system: str | list[ContentBlock] | None) -> Iterator[Message]:
    blocks = _blocks(system or "")
    if text := _BETWEEN_TEXTS.join(_text(block, "system") for block in blocks if block.text != ""):
        yield Message("system", text, breakpoint=_breakpoint(blocks, "system"))


def _converted(body: TurnBody, path: str) -> Iterator[Message]:
    role = one_of(body.role, _ROLES, f"{path}.role")
    blocks = _blocks(body.content)
    path = f"{path}.content"
    if role == "assistant":
        yield _assistant(blocks, path)
    elif role == "system":
        yield from _system(body.content)
    else:
        yield from _user(blocks, path)


def _blocks(content: str | list[ContentBlock]) -> list[ContentBlock]:
    return [ContentBlock("text", content)] if isinstance(content, str) else content


def _assistant(blocks: Sequence[ContentBlock], path: str) -> Message:
    text: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for number, block in enumerate(blocks):
        place = f"{path}[{number}]"
        if block.type == "thinking":
            thoughts.append(block.thinking or "")
        elif block.type == "tool_use":
            calls.append(_call(block, place))
        elif block.type != "redacted_thinking":
            text.append(_text(block, place))
    return Message(
        "assistant",
        "".join(text),
        tool_calls=tuple(calls),
        reasoning="".join(thoughts),
        breakpoint=_breakpoint(blocks, path),
    )


def _call(block: ContentBlock, path: str) -> ToolCall:
    if not block.id or not block.name:
        raise refuse(f"{path}.{'name' if block.id else 'id'}", "is required")
    if is_set(block.input) and bytes(memoryview(block.input)[:1]) != b"{":
        raise refuse(f"{path}.input", "must be an object")
    return ToolCall(block.id, block.name, bytes(block.input).decode() if is_set(block.input) else "{}")


def _user(blocks: Sequence[ContentBlock], path: str) -> Iterator[Message]:
    """Results of tools are messages of their own."""
    texts: list[ContentBlock] = []
    for number, block in enumerate(blocks):
        if block.type != "tool_result":
            texts.append(block)
            continue
        if texts:
            yield _said(texts, path)
            texts = []
        yield _result(block, f"{path}[{number}]")
    if texts or not blocks:
        yield _said(texts, path)


def _said(blocks: Sequence[ContentBlock], path: str) -> Message:
    text = _BETWEEN_TEXTS.join(_text(block, path) for block in blocks)
    return Message("user", text, breakpoint=_breakpoint(blocks, path))


def _result(block: ContentBlock, path: str) -> Message:
    if not block.tool_use_id:
        raise refuse(f"{path}.tool_use_id", "is required")
    inner = _blocks(block.content or "")
    text = _BETWEEN_TEXTS.join(_text(one, f"{path}.content") for one in inner)
    return Message("tool", text, tool_call_id=block.tool_use_id, breakpoint=_breakpoint([block, *inner], path))


def _text(block: ContentBlock, path: str) -> str:
    if block.type != "text":
        raise refuse(path, f"must be text; a block of type {block.type[:40]!r} is not supported here")
    if block.text is None:
        raise refuse(path, 'must be made of blocks like {"type": "text", "text": "..."}')
    return block.text


def _breakpoint(blocks: Sequence[ContentBlock], path: str) -> CacheBreakpoint | None:
    return longest(breakpoint_of(block.cache_control, path) for block in blocks)
