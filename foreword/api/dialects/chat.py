"""`POST /v1/chat/completions`: OpenAI's fields, and those that vLLM adds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from msgspec import UNSET, Raw, Struct, UnsetType

from foreword.api.dialects.content import (
    CacheMark,
    CacheOptions,
    Part,
    breakpoint_of,
    check_breakpoints,
    longest,
    part_breakpoints,
    text_of,
)
from foreword.api.dialects.decode import check_length, decode, one_of, refuse
from foreword.api.dialects.limits import UNSET_RAW, Limits, bounded_object
from foreword.api.dialects.sampling import (
    Alternatives,
    SamplingBody,
    Whole,
    common,
    output_format,
    refuse_unsupported,
    sampling_of,
)
from foreword.api.dialects.tools import CallBody, CallFunction, NamedChoice, ToolBody, calls_of, choice_of, tools_of
from foreword.api.request import CacheBreakpoint, GenerateRequest, Message, Role
from foreword.errors import BadRequest

# Chat templates know `system`; `developer` is OpenAI's newer name for it.
ROLES: Final[dict[str, Role]] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


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


class ChatBody(SamplingBody, kw_only=True):
    messages: list[MessageBody]
    max_completion_tokens: Whole | None = None
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None
    tools: list[ToolBody] | None = None
    tool_choice: str | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Raw = UNSET_RAW
    service_tier: str | None = None
    functions: Raw = UNSET_RAW
    function_call: Raw = UNSET_RAW
    chat_template: Raw = UNSET_RAW
    modalities: Raw = UNSET_RAW
    audio: Raw = UNSET_RAW
    web_search_options: Raw = UNSET_RAW


def parse(raw: bytes, limits: Limits) -> GenerateRequest:
    """Raises BadRequest, which names the parameter, and BodyTooLarge."""
    body = decode(ChatBody, raw, limits)
    refuse_unsupported(body)
    messages = messages_of(body.messages, limits, body.prompt_cache_options)
    tools = tools_of(body.tools, limits)
    check_breakpoints(messages, tools)
    continues = _continues(body, messages)
    return GenerateRequest(
        "chat",
        messages=messages,
        sampling=_sampling(body, limits),
        tools=tools,
        tool_choice=choice_of(body.tool_choice, tools),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        output_format=output_format(body, limits),
        reasoning=body.include_reasoning is not False,
        template_options=_template_options(body, limits),
        continue_final_message=continues,
        add_generation_prompt=body.add_generation_prompt is not False and not continues,
        extra={"service_tier": "default"} if body.service_tier else {},
        **common(body, limits),
    )


def _sampling(body: ChatBody, limits: Limits) -> dict[str, Any]:
    if body.top_logprobs is not None and not body.logprobs:
        raise refuse("top_logprobs", "needs logprobs to be true")
    if body.echo:
        raise refuse("echo", "not supported for chat; use continue_final_message")
    sampling = sampling_of(body, limits)
    if body.max_completion_tokens is not None:
        sampling["max_tokens"] = body.max_completion_tokens
    if body.logprobs:
        sampling["logprobs"] = body.top_logprobs or 0
    return sampling


def _continues(body: ChatBody, messages: Sequence[Message]) -> bool:
    if not body.continue_final_message:
        return False
    if body.add_generation_prompt:
        raise refuse("continue_final_message", "cannot be combined with add_generation_prompt")
    if messages[-1].role != "assistant" or messages[-1].tool_calls:
        raise refuse("continue_final_message", "needs a last message of the assistant, without tool_calls")
    return True


def _template_options(body: ChatBody, limits: Limits) -> dict[str, Any]:
    given = bounded_object(body.chat_template_kwargs, "chat_template_kwargs", limits) or {}
    return {**reasoning_options(body.reasoning_effort), **given}


def reasoning_options(effort: str | None) -> dict[str, Any]:
    """Template options for an effort: gpt-oss's name, and the switch of Qwen and others."""
    if effort is None:
        return {}
    return {"enable_thinking": False} if effort == "none" else {"reasoning_effort": effort[:40]}


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
