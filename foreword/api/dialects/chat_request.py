"""Write a request of any dialect as a body of chat completions, for a replica that knows only these."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from foreword.api.request import (
    CacheBreakpoint,
    GenerateRequest,
    Message,
    OutputFormat,
    ReplicaKind,
    Tool,
    ToolCall,
)

# Names of sampling parameters where they differ.
_NAMES: Final = {"include_stop": "include_stop_str_in_output"}
_TTLS: Final = {300.0: "5m", 3600.0: "1h"}
_OPENAI_TTLS: Final = {1800.0: "30m", 43_200.0: "12h"}


def write_request(request: GenerateRequest, kind: ReplicaKind = "foreword") -> dict[str, Any]:
    """The body. What only Foreword understands is left out for other kinds of replicas."""
    own = kind == "foreword"
    body: dict[str, Any] = {
        "messages": [_message(one, cached=own, thinks=kind != "openai") for one in request.messages],
        **_sampling(request.sampling),
        **_tools(request, cached=own),
        **_template(request),
        **(_output_format(request.output_format) if request.output_format is not None else {}),
    }
    if request.model is not None:
        body["model"] = request.model
    if request.stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    if request.cache.key is not None:
        body["prompt_cache_key"] = request.cache.key
    if not request.reasoning and kind != "openai":
        body["include_reasoning"] = False
    return {**body, **_own_fields(request)} if own else body


def _sampling(sampling: Mapping[str, Any]) -> dict[str, Any]:
    given = {_NAMES.get(name, name): value for name, value in sampling.items()}
    if "logprobs" in given:
        given |= {"logprobs": True, "top_logprobs": given["logprobs"]}
    if "logit_bias" in given:
        given["logit_bias"] = {str(token): bias for token, bias in given["logit_bias"].items()}
    if given.get("top_k") == 0:
        given["top_k"] = -1
    return given


def _template(request: GenerateRequest) -> dict[str, Any]:
    options = dict(request.template_options)
    effort = options.pop("reasoning_effort", None)
    found: dict[str, Any] = {"reasoning_effort": effort} if isinstance(effort, str) else {}
    if options:
        found["chat_template_kwargs"] = options
    if request.continue_final_message:
        found["continue_final_message"] = True
    if not request.add_generation_prompt:
        found["add_generation_prompt"] = False
    return found


def _own_fields(request: GenerateRequest) -> dict[str, Any]:
    given = {
        "prefix": request.prefix,
        "cache_report": request.cache_report,
        "cache_salt": request.cache_salt,
        "return_token_ids": request.return_token_ids,
        "priority": request.priority,
        "prompt_cache_retention": request.cache.retention,
    }
    return {name: value for name, value in given.items() if value}


def _output_format(given: OutputFormat) -> dict[str, Any]:
    if given.kind == "json_object":
        return {"response_format": {"type": "json_object"}}
    if given.kind == "json_schema":
        schema = {"name": "answer", "schema": given.value, "strict": True}
        return {"response_format": {"type": "json_schema", "json_schema": schema}}
    return {"structured_outputs": {given.kind: given.value}}


# Messages and tools


def _message(message: Message, *, cached: bool, thinks: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        found |= {"content": message.content or None, "tool_calls": [_call(call) for call in message.tool_calls]}
    if message.name is not None:
        found["name"] = message.name
    if message.tool_call_id is not None:
        found["tool_call_id"] = message.tool_call_id
    if message.reasoning and thinks:
        # vLLM has renamed the field.
        found |= {"reasoning_content": message.reasoning, "reasoning": message.reasoning}
    if cached and message.breakpoint is not None:
        found |= _marked(message, message.breakpoint)
    return found


def _marked(message: Message, mark: CacheBreakpoint) -> dict[str, Any]:
    if mark.ttl in _TTLS or not message.content:
        return {"cache_control": _cache_control(mark)}
    explicit = {"mode": "explicit", "ttl": _OPENAI_TTLS.get(mark.ttl, "12h")}
    return {"content": [{"type": "text", "text": message.content, "prompt_cache_breakpoint": explicit}]}


def _cache_control(mark: CacheBreakpoint) -> dict[str, str]:
    return {"type": "ephemeral", "ttl": _TTLS.get(mark.ttl, "1h")}


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _tools(request: GenerateRequest, *, cached: bool) -> dict[str, Any]:
    if not request.tools:
        return {}
    choice = request.tool_choice
    return {
        "tools": [_tool(tool, cached=cached) for tool in request.tools],
        "tool_choice": {"type": "function", "function": {"name": choice.name}}
        if choice.mode == "named"
        else choice.mode,
        **({} if request.parallel_tool_calls else {"parallel_tool_calls": False}),
    }


def _tool(tool: Tool, *, cached: bool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.parameters}
    if tool.description:
        function["description"] = tool.description
    if tool.strict:
        function["strict"] = True
    mark = {"cache_control": _cache_control(tool.breakpoint)} if cached and tool.breakpoint is not None else {}
    return {"type": "function", "function": function, **mark}
