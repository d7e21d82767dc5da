"""`POST /v1/responses`: OpenAI's fields, and Foreword's. Conversations are stored by the server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

from foreword.api.dialects.chat import reasoning_options
from foreword.api.dialects.conversation_body import (
    ROLES,
    CacheOptions,
    Part,
    check_breakpoints,
    choice_of,
    left_out,
    longest,
    make_tool,
    part_breakpoints,
    require,
    text_of,
)
from foreword.api.dialects.conversations import with_instructions
from foreword.api.dialects.decode import UNSET_RAW, Limits, bounded_object, check_length, decode, one_of, refuse
from foreword.api.dialects.sampling import (
    Alternatives,
    OpenAIFields,
    Whole,
    openai_cache,
    openai_sampling,
    own_fields,
    refuse_unsupported,
    schema_format,
)
from foreword.api.request import GenerateRequest, Message, OutputFormat, Tool, ToolCall, ToolChoice

_LOGPROBS: Final = "message.output_text.logprobs"
# Tools that the client runs. All other tools are the provider's.
_TOOL_TYPES: Final = ("function", "custom", "namespace")
_FREE_TEXT: Final = Raw(b'{"type":"object","properties":{"input":{"type":"string"}},"required":["input"]}')


class Thought(Struct):
    """A part of a reasoning item."""

    type: str
    text: str | None = None


class Item(Struct):
    """Any item of the input. Which fields it needs depends on its type."""

    type: str | None = None
    role: str | None = None
    content: str | list[Part] | None = None
    summary: list[Thought] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | list[Part] | None = None


class AnyTool(Struct):
    """A tool of any type. A namespace has `tools`; a custom one is called with a text, in a `format` if it says so."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: Raw = UNSET_RAW
    strict: bool | None = None
    tools: list[AnyTool] | None = None
    format: Raw = UNSET_RAW


class NamedTool(Struct, omit_defaults=True):
    type: str
    name: str | None = None
    namespace: str | None = None
    # The fields of `allowed_tools`.
    mode: str | None = None
    tools: list[NamedTool] | None = None


class TextFormat(Struct):
    type: str
    name: str | None = None
    schema: Raw = UNSET_RAW
    strict: bool | None = None


class TextConfig(Struct):
    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningConfig(Struct):
    effort: str | None = None
    summary: str | None = None


class ResponsesBody(OpenAIFields, kw_only=True):
    input: str | list[Item]
    instructions: str | None = None
    tools: list[AnyTool] | None = None
    tool_choice: str | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    max_output_tokens: Whole | None = None
    top_logprobs: Alternatives | None = None
    include: list[str] | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    max_tool_calls: Whole | None = None
    background: Raw = UNSET_RAW
    conversation: Raw = UNSET_RAW
    prompt: Raw = UNSET_RAW
    truncation: Raw = UNSET_RAW
    # Not OpenAI's.
    chat_template_kwargs: Raw = UNSET_RAW
    previous_input_messages: Raw = UNSET_RAW
    structured_outputs: Raw = UNSET_RAW


def parse(raw: bytes, limits: Limits) -> GenerateRequest:
    """Raises BadRequest, which names the parameter, and BodyTooLarge."""
    body = decode(ResponsesBody, raw, limits)
    refuse_unsupported(body)
    check_length(body.metadata or (), limits.stop_strings, "metadata")
    messages = with_instructions(body.instructions, _messages(body, limits))
    tools = _allowed(body.tool_choice, _tools(body.tools, limits))
    check_breakpoints(messages, tools)
    choice = _choice(body.tool_choice, tools)
    return GenerateRequest(
        "responses",
        messages=messages,
        sampling=_sampling(body, limits),
        tools=tools,
        left_out=left_out([tool.type for tool in body.tools or ()], _TOOL_TYPES),
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        output_format=_output_format(body.text, limits),
        template_options=_template_options(body, limits),
        include_usage=True,
        cache=openai_cache(body),
        cache_report=bool(body.cache_report) or _diagnosed(body),
        session=body.user or None,
        store=body.store is not False,
        previous=body.previous_response_id,
        extra=_repeated(body, choice, limits),
        **own_fields(body),
    )


def _sampling(body: ResponsesBody, limits: Limits) -> dict[str, Any]:
    wanted = _LOGPROBS in (body.include or ()) or body.top_logprobs
    logprobs = (body.top_logprobs or 0) if wanted else None
    return openai_sampling(body, limits, max_tokens=body.max_output_tokens, logprobs=logprobs)


def _template_options(body: ResponsesBody, limits: Limits) -> dict[str, Any]:
    given = bounded_object(body.chat_template_kwargs, "chat_template_kwargs", limits) or {}
    return {**reasoning_options(body.reasoning.effort if body.reasoning is not None else None), **given}


def _output_format(text: TextConfig | None, limits: Limits) -> OutputFormat | None:
    if text is None or text.format is None or text.format.type == "text":
        return None
    one_of(text.format.type, ("text", "json_object", "json_schema"), "text.format.type")
    if text.format.type == "json_object":
        return OutputFormat("json_object")
    return schema_format(text.format.schema, "text.format.schema", limits)


def _repeated(body: ResponsesBody, choice: ToolChoice, limits: Limits) -> dict[str, Any]:
    """Fields of the response that repeat the request."""
    text = body.text or TextConfig()
    kind = text.format or TextFormat("text")
    shown: dict[str, Any] = {"type": kind.type}
    if kind.type == "json_schema":
        schema = bounded_object(kind.schema, "text.format.schema", limits)
        shown |= {"name": kind.name or "schema", "schema": schema, "strict": kind.strict}
    reasoning = body.reasoning or ReasoningConfig()
    return {
        "instructions": body.instructions,
        "metadata": body.metadata or {},
        "text": {"format": shown, **({"verbosity": text.verbosity} if text.verbosity else {})},
        "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary},
        "tool_choice": msgspec.to_builtins(body.tool_choice)
        if isinstance(body.tool_choice, NamedTool)
        else choice.mode,
        "max_tool_calls": body.max_tool_calls,
        "user": body.user,
        "safety_identifier": body.safety_identifier,
        "prompt_cache_key": body.prompt_cache_key,
        "service_tier": "default" if body.service_tier else None,
        **({"prompt_cache_diagnostics": None} if _diagnosed(body) else {}),
    }


def _diagnosed(body: ResponsesBody) -> bool:
    return body.prompt_cache_options is not None and body.prompt_cache_options.comparison_response_id is not None


# Tools


def _tools(bodies: Sequence[AnyTool] | None, limits: Limits) -> tuple[Tool, ...]:
    check_length([one for body in bodies or () for one in (body.tools or (body,))], limits.tools, "tools")
    found: list[Tool] = []
    for number, body in enumerate(bodies or ()):
        path = f"tools[{number}]"
        if body.type == "namespace":
            inner = enumerate(body.tools or ())
            found += [_tool(one, f"{path}.tools[{place}]", limits, _named(body, path)) for place, one in inner]
        elif body.type in _TOOL_TYPES:
            found.append(_tool(body, path, limits))
    return tuple(found)


def _tool(body: AnyTool, path: str, limits: Limits, namespace: str = "") -> Tool:
    name, parameters = flat_name(namespace, _named(body, path)), body.parameters
    if one_of(body.type, ("function", "custom"), f"{path}.type") == "custom":
        parameters = _FREE_TEXT
    made = make_tool(name, body.description, parameters, bool(body.strict), path, limits)
    return replace(made, namespace=namespace, free_text=body.type == "custom")


def _named(body: AnyTool, path: str) -> str:
    return str(_required(body.name, f"{path}.name"))


def flat_name(namespace: str | None, name: str) -> str:
    """The name by which the model knows a tool, as at vLLM."""
    return f"{namespace}__{name}" if namespace else name


def _allowed(choice: str | NamedTool | None, tools: tuple[Tool, ...]) -> tuple[Tool, ...]:
    """The tools that the model may call. What it may not call is not shown to it. Raises BadRequest for an unknown one."""
    if not isinstance(choice, NamedTool) or choice.type != "allowed_tools":
        return tools
    names = {
        require(ToolChoice("named", flat_name(one.namespace, one.name)), tools).name
        for one in choice.tools or ()
        if one.name is not None
    }
    return tuple(one for one in tools if one.name in names)


def _choice(choice: str | NamedTool | None, tools: Sequence[Tool]) -> ToolChoice:
    if not isinstance(choice, NamedTool) or choice.type == "allowed_tools":
        return choice_of(choice.mode if isinstance(choice, NamedTool) else choice, tools)
    if choice.type not in ("function", "custom"):
        raise refuse("tool_choice", f"this server has no tool of type {choice.type[:40]!r}; only those of the client")
    if choice.name is None:
        raise refuse("tool_choice.name", "is required")
    return require(ToolChoice("named", flat_name(choice.namespace, choice.name)), tools)


# Input


class _Answer(Struct):
    id: str
    output: list[Item]


def read_response(raw: bytes) -> tuple[str, tuple[Message, ...]]:
    """The id of a whole response, and its output as messages. Raises BadRequest for what cannot be continued here."""
    limits = Limits()
    found = decode(_Answer, raw, limits)
    return found.id, tuple(_messages(ResponsesBody(input=found.output), limits))


class _Turn:
    """An assistant's message, made from the items of one turn: reasoning, text and calls."""

    def __init__(self) -> None:
        self.reasoning: list[str] = []
        self.text: list[str] = []
        self.calls: list[ToolCall] = []

    @property
    def begun(self) -> bool:
        return bool(self.reasoning or self.text or self.calls)

    def take(self) -> Message:
        """The message. The turn is empty afterwards."""
        message = Message(
            "assistant", "".join(self.text), tool_calls=tuple(self.calls), reasoning="".join(self.reasoning)
        )
        self.reasoning, self.text, self.calls = [], [], []
        return message


def _messages(body: ResponsesBody, limits: Limits) -> list[Message]:
    if isinstance(body.input, str):
        return [Message("user", body.input)]
    check_length(body.input, limits.messages, "input", least=0 if body.previous_response_id else 1)
    messages: list[Message] = []
    turn = _Turn()
    for number, item in enumerate(body.input):
        _add(item, f"input[{number}]", turn, messages, body.prompt_cache_options)
    if turn.begun:
        messages.append(turn.take())
    if not messages and not body.previous_response_id:
        raise refuse("input", "has no message")
    return messages


def _add(item: Item, path: str, turn: _Turn, messages: list[Message], options: CacheOptions | None) -> None:
    kind = item.type or "message"
    if kind == "reasoning":
        if turn.text or turn.calls:
            messages.append(turn.take())
        turn.reasoning += _thoughts(item)
    elif kind in ("function_call", "custom_tool_call"):
        turn.calls.append(_call(item, path))
    elif kind == "message" and item.role == "assistant":
        if turn.text:
            messages.append(turn.take())
        turn.text.append(text_of(_required(item.content, f"{path}.content"), f"{path}.content"))
    else:
        if turn.begun:
            messages.append(turn.take())
        is_result = kind in ("function_call_output", "custom_tool_call_output")
        messages.append(_result(item, path) if is_result else _said(item, kind, path, options))


def _thoughts(item: Item) -> list[str]:
    parts: Sequence[Part | Thought] = item.content if isinstance(item.content, list) and item.content else ()
    return [part.text for part in parts or item.summary or () if part.text]


def _call(item: Item, path: str) -> ToolCall:
    name, call_id = _required(item.name, f"{path}.name"), _required(item.call_id, f"{path}.call_id")
    text = item.arguments or "{}"
    if item.type == "custom_tool_call":
        text = msgspec.json.encode({"input": item.input or ""}).decode()
    return ToolCall(call_id, flat_name(item.namespace, name), text)


def _result(item: Item, path: str) -> Message:
    output = _required(item.output, f"{path}.output")
    text = text_of(output, f"{path}.output") if output else ""
    return Message("tool", text, tool_call_id=_required(item.call_id, f"{path}.call_id"))


def _said(item: Item, kind: str, path: str, options: CacheOptions | None) -> Message:
    if kind != "message":
        raise refuse(f"{path}.type", f"items of type {kind[:40]!r} are not supported")
    role = ROLES[one_of(_required(item.role, f"{path}.role"), ROLES, f"{path}.role")]
    content = _required(item.content, f"{path}.content")
    parts = content if isinstance(content, list) else ()
    place = f"{path}.content"
    return Message(role, text_of(content, place), breakpoint=longest(part_breakpoints(parts, place, options)))


def _required(value: Any, path: str) -> Any:
    if value is None:
        raise refuse(path, "is required")
    return value
