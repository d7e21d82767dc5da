"""`POST /v1/chat/completions`: OpenAI's fields, and those that vLLM adds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Raw

from foreword.api.dialects.conversation_body import (
    MessageBody,
    NamedChoice,
    ToolBody,
    check_breakpoints,
    choice_of,
    messages_of,
    tools_of,
)
from foreword.api.dialects.decode import UNSET_RAW, Limits, bounded_object, decode, refuse
from foreword.api.dialects.sampling import (
    Alternatives,
    SamplingBody,
    Whole,
    common,
    output_format,
    refuse_unsupported,
    sampling_of,
)
from foreword.api.request import GenerateRequest, Message


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
    documents: Raw = UNSET_RAW


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
    if body.top_logprobs and not body.logprobs:
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
