"""Anthropic's messages: bodies, and responses as Anthropic's own client reads them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import anthropic
import pytest
from dialect_server import SENTENCE, USAGE, WEATHER, DialectServer

from foreword.api.dialects.decode import Limits
from foreword.api.dialects.messages import parse, parse_count
from foreword.api.dialects.messages_writer import usage_of
from foreword.api.output import ChoiceDelta, Text
from foreword.api.request import CacheBreakpoint, GenerateRequest, OutputFormat, Tool, ToolCall, ToolChoice
from foreword.errors import BadRequest
from foreword.request_errors import EngineFailed, QueueFull

LIMITS = Limits.for_model(4096)
HI: list[Any] = [{"role": "user", "content": "hi"}]
TOOL: Any = {"name": "weather", "description": "Now.", "input_schema": WEATHER}


def body(**fields: Any) -> GenerateRequest:
    return parse(json.dumps({"messages": HI, "max_tokens": 8, **fields}).encode(), LIMITS)


@contextmanager
def client_of(server: DialectServer) -> Iterator[anthropic.Anthropic]:
    with server.running() as url, anthropic.Anthropic(api_key="k", base_url=url, max_retries=0) as client:
        yield client


def test_conversation_with_tools() -> None:
    """System blocks, calls, results beside text, and thinking become messages in the order of the conversation."""
    request = body(
        system=[{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}],
        messages=[
            {"role": "user", "content": "Rome?"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "Let me see."},
                    {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Rome"}},
                    {"type": "tool_use", "id": "b", "name": "weather", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "sunny"}]},
                    {"type": "tool_result", "tool_use_id": "b", "is_error": True},
                    {"type": "text", "text": "And now?"},
                ],
            },
        ],
        tools=[TOOL],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
    )
    assert [(one.role, one.content) for one in request.messages] == [
        ("system", "Be\n\nbrief."),
        ("user", "Rome?"),
        ("assistant", "Let me see."),
        ("tool", "sunny"),
        ("tool", ""),
        ("user", "And now?"),
    ]
    assistant = request.messages[2]
    assert assistant.reasoning == "hm" and [json.loads(call.arguments) for call in assistant.tool_calls] == [
        {"city": "Rome"},
        {},
    ]
    assert [one.tool_call_id for one in request.messages] == [None, None, None, "a", "b", None]
    assert request.tools == (Tool("weather", "Now.", WEATHER),)
    assert request.tool_choice == ToolChoice("required") and not request.parallel_tool_calls


def test_fields() -> None:
    """Sampling, thinking, metadata, structured output and a prefilled answer."""
    request = body(
        messages=[*HI, {"role": "assistant", "content": "We"}],
        temperature=0.5,
        top_k=3,
        stop_sequences=["x"],
        metadata={"user_id": "ada"},
        thinking={"type": "enabled", "budget_tokens": 1024},
        output_config={"format": {"type": "json_schema", "schema": WEATHER}},
    )
    assert dict(request.sampling) == {"max_tokens": 8, "temperature": 0.5, "top_k": 3, "stop": ("x",)}
    assert request.continue_final_message and not request.add_generation_prompt
    assert request.session == "ada" and request.template_options == {"enable_thinking": True}
    assert request.output_format == OutputFormat("json_schema", WEATHER)


def test_cache_control() -> None:
    """`cache_control` on blocks, tools and the whole request becomes breakpoints with a ttl."""
    five, hour = {"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}
    request = body(
        system=[{"type": "text", "text": "s", "cache_control": hour}],
        tools=[{**TOOL, "cache_control": hour}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": five}]},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": "c"},
        ],
        cache_control=five,
    )
    found = [one.breakpoint and one.breakpoint.ttl for one in (*request.messages, *request.tools)]
    assert found == [3600.0, 300.0, None, 300.0, 3600.0]
    assert request.messages[0].breakpoint == CacheBreakpoint(3600.0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": None}, "max_tokens: is required"),
        ({"messages": []}, "messages: must have at least 1 entry"),
        ({"messages": [{"role": "system", "content": ""}]}, "messages: must have at least 1 entry"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "block of type 'image'"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role: must be 'user', 'assistant'"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id: is required"),
        (
            {
                "tools": [{"type": "web_search_20250305", "name": "web_search"}],
                "tool_choice": {"type": "tool", "name": "web_search"},
            },
            "tool_choice: needs tools",
        ),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema: is required"),
        ({"tool_choice": {"type": "any"}}, "tool_choice: needs tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}}, "no tool named 'x'"),
        ({"thinking": {"type": "much"}}, "thinking.type: must be 'enabled'"),
        ({"mcp_servers": [{}]}, "mcp_servers: not supported"),
        ({"thread": {"type": "create"}}, "thread: conversations are not kept"),
        ({"system": [{"type": "text", "text": "s", "cache_control": {"type": "forever"}}]}, '"ephemeral"'),
        ({"cache_control": {"type": "ephemeral", "ttl": "2h"}}, '"5m" or "1h"'),
        ({"tools": [{**TOOL, "cache_control": {"type": "ephemeral"}}] * 5}, "at most 4"),
        ({"stop_sequences": [""]}, "stop_sequences: must be"),
    ],
)
def test_bad_bodies(fields: dict[str, Any], message: str) -> None:
    """A fault of a body is named by its path."""
    with pytest.raises(BadRequest) as caught:
        body(**fields)
    assert message in caught.value.message


def test_count_needs_no_max_tokens() -> None:
    """The body of `count_tokens` is the same, without `max_tokens`."""
    assert parse_count(json.dumps({"messages": HI, "system": "s"}).encode(), LIMITS).messages[0].role == "system"


def test_client_reads_a_whole_message() -> None:
    """Anthropic's client gets thinking, text and calls as blocks, and the usage split by the cache."""
    with client_of(DialectServer()) as client:
        message = client.messages.create(model="nano", max_tokens=9, messages=HI, tools=[TOOL])
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    calls = [block for block in message.content if block.type == "tool_use"]
    assert [(call.id, call.input) for call in calls] == [("call_1", {"city": "Rome"}), ("call_2", {})]
    assert (message.stop_reason, message.stop_sequence) == ("tool_use", None)
    usage = message.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.cache_creation_input_tokens) == (1, 4, 2)
    assert usage.cache_creation is not None and usage.cache_creation.ephemeral_5m_input_tokens == 2


def test_client_reads_a_stream() -> None:
    """A client puts the same message together from the events of a stream."""
    with client_of(DialectServer()) as client:
        whole = client.messages.create(model="nano", max_tokens=9, messages=HI)
        with client.messages.stream(model="nano", max_tokens=9, messages=HI) as stream:
            kinds = [event.type for event in stream]
            message = stream.get_final_message()
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 4
    given, expected = message.to_dict(), whole.to_dict()
    assert given["content"] == expected["content"] and given["stop_reason"] == expected["stop_reason"]
    assert message.usage.output_tokens == 5 and message.usage.cache_read_input_tokens == 4


def test_stop_sequences_are_named() -> None:
    """A stop sequence that was hit is named; the model's own end is the end of its turn."""
    for match, reason in (("x", "stop_sequence"), (None, "end_turn"), (7, "end_turn")):
        server = DialectServer([ChoiceDelta(0, (Text("a"),), finish_reason="stop", stop_match=match)])
        with client_of(server) as client:
            message = client.messages.create(model="nano", max_tokens=9, messages=HI)
        assert (message.stop_reason, message.stop_sequence) == (reason, match if isinstance(match, str) else None)


def test_client_raises_its_own_exceptions() -> None:
    """Errors have Anthropic's format, before a stream and inside of one."""
    with client_of(DialectServer()) as client, pytest.raises(anthropic.BadRequestError, match="messages") as caught:
        client.messages.create(model="nano", max_tokens=9, messages=[])
    shown: Any = caught.value.body
    assert shown["error"]["type"] == "invalid_request_error" and shown["request_id"] == "req_1"
    assert caught.value.error_code == "invalid_request"
    for error, kind in ((EngineFailed("broken"), "api_error"), (QueueFull("later"), "rate_limit_error")):
        server = DialectServer(SENTENCE[:1], error)
        with (
            client_of(server) as client,
            pytest.raises(anthropic.APIStatusError, match=error.message) as broken,
            client.messages.stream(model="nano", max_tokens=9, messages=HI) as stream,
        ):
            stream.until_done()
        assert isinstance(broken.value.body, dict) and broken.value.body["error"]["type"] == kind


def test_usage_adds_up() -> None:
    """Tokens that were read, written and computed add up to the whole prompt."""
    usage = usage_of(USAGE)
    parts = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    assert sum(usage[name] for name in parts) == USAGE.prompt_tokens


def test_calls_are_kept_as_sent() -> None:
    """The input of a call keeps the order of its keys."""
    block = {"type": "tool_use", "id": "a", "name": "f", "input": {"z": 1, "a": [2]}}
    message = body(messages=[*HI, {"role": "assistant", "content": [block]}]).messages[1]
    assert message.tool_calls == (ToolCall("a", "f", '{"z": 1, "a": [2]}'),)


@pytest.mark.parametrize(
    ("cause", "kind"),
    [
        ("tools_reordered", "tools_changed"),
        ("volatile_line", "messages_changed"),
        ("system_prompt_changed", "system_changed"),
        ("model_changed", "model_changed"),
        ("new_conversation", "previous_message_not_found"),
        ("evicted", "unavailable"),
        ("all_cached", None),
    ],
)
def test_diagnostics(cause: str, kind: str | None) -> None:
    """Anthropic's client reads the cause of a miss as its own type, whole and streamed."""
    server = DialectServer(report={"cause": cause, "where": "messages[1]", "tokens_lost": 9})
    asked: Any = {"diagnostics": {"previous_message_id": None}, "messages": HI, "model": "nano", "max_tokens": 9}
    with client_of(server) as client:
        message = client.messages.create(**asked)
        plain = client.messages.create(model="nano", max_tokens=9, messages=HI)
        events = list(client.messages.create(**asked, stream=True))
    found = message.to_dict().get("diagnostics")
    assert (found and found["cache_miss_reason"]["type"]) == kind  # type: ignore[index]
    assert next(one for one in events if one.type == "message_delta").to_dict()["diagnostics"] == found
    assert "diagnostics" not in plain.to_dict() and server.requests[0].cache_report
    if kind is not None and kind.endswith("_changed"):
        assert anthropic.types.Message.model_validate(message.to_dict()).diagnostics is not None


def test_thinking_can_be_left_out() -> None:
    """`display: omitted` gives no thinking blocks."""
    thinking: Any = {"type": "adaptive", "display": "omitted"}
    with client_of(DialectServer()) as client:
        message = client.messages.create(model="nano", max_tokens=9, messages=HI, thinking=thinking)
    assert [block.type for block in message.content] == ["text", "tool_use", "tool_use"]
