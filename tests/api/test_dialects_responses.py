"""OpenAI's Responses API: bodies, and responses as OpenAI's own client reads them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest
from dialect_server import SENTENCE, USAGE, WEATHER, DialectServer
from openai.types.responses import Response

from foreword.api.dialects.conversations import continued, conversation
from foreword.api.dialects.decode import Limits
from foreword.api.dialects.responses import parse
from foreword.api.dialects.responses_writer import ResponsesWriter
from foreword.api.dialects.writer import ResponseHead
from foreword.api.output import CallArguments, CallStart, ChoiceDelta, Text
from foreword.api.request import CacheBreakpoint, GenerateRequest, Message, OutputFormat, Tool, ToolCall, ToolChoice
from foreword.api.token_entry import TokenEntry
from foreword.errors import BadRequest
from foreword.request_errors import EngineFailed

LIMITS = Limits.for_model(4096)
TOOL: Any = {"type": "function", "name": "weather", "description": "Now.", "parameters": WEATHER, "strict": True}


def body(**fields: Any) -> GenerateRequest:
    return parse(json.dumps({"input": "hi", **fields}).encode(), LIMITS)


@contextmanager
def client_of(server: DialectServer) -> Iterator[openai.OpenAI]:
    with server.running() as url, openai.OpenAI(api_key="k", base_url=f"{url}/v1", max_retries=0) as client:
        yield client


def test_items() -> None:
    """Items of one turn of the assistant become one message; instructions and a first system message are one."""
    request = body(
        instructions="Be brief.",
        input=[
            {"role": "developer", "content": "In English."},
            {"role": "user", "content": [{"type": "input_text", "text": "Rome?"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {
                "type": "message",
                "id": "msg_1",
                "role": "assistant",
                "status": "completed",
                "content": [{"type": "output_text", "text": "Let me see.", "annotations": []}],
            },
            {"type": "function_call", "call_id": "a", "name": "weather", "arguments": '{"city": "Rome"}'},
            {"type": "function_call", "call_id": "b", "name": "weather", "arguments": ""},
            {"type": "function_call_output", "call_id": "a", "output": "sunny"},
            {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "?"}]},
        ],
        tools=[TOOL],
        tool_choice={"type": "function", "name": "weather"},
    )
    assert [(one.role, one.content) for one in request.messages] == [
        ("system", "Be brief.\n\nIn English."),
        ("user", "Rome?"),
        ("assistant", "Let me see."),
        ("tool", "sunny"),
        ("tool", "?"),
    ]
    assistant = request.messages[2]
    assert assistant.reasoning == "hm"
    assert assistant.tool_calls == (ToolCall("a", "weather", '{"city": "Rome"}'), ToolCall("b", "weather", "{}"))
    assert [one.tool_call_id for one in request.messages[3:]] == ["a", "b"]
    assert request.tools == (Tool("weather", "Now.", WEATHER, True),)
    assert request.tool_choice == ToolChoice("named", "weather")


def test_fields() -> None:
    """Sampling, structured output, storage and cache control."""
    mark = {"mode": "explicit"}
    request = body(
        input=[{"role": "user", "content": [{"type": "input_text", "text": "x", "prompt_cache_breakpoint": mark}]}],
        max_output_tokens=9,
        temperature=0,
        include=["message.output_text.logprobs"],
        text={"format": {"type": "json_schema", "name": "w", "schema": WEATHER, "strict": True}},
        reasoning={"effort": "high"},
        previous_response_id="resp_0",
        prompt_cache_options={"ttl": "12h", "mode": "explicit"},
        user="ada",
    )
    assert dict(request.sampling) == {"max_tokens": 9, "temperature": 0.0, "logprobs": 0}
    assert request.output_format == OutputFormat("json_schema", WEATHER)
    assert (request.store, request.previous, request.session) == (True, "resp_0", "ada")
    assert request.messages[0].breakpoint == CacheBreakpoint(43_200.0) and request.cache.retention is None
    assert body(prompt_cache_options={"ttl": "30m"}).cache.retention == 1800.0
    assert not body(store=False).store and request.template_options == {"reasoning_effort": "high"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"input": []}, "input: must have at least 1 entry"),
        ({"input": 3}, "input: must be a valid string or a valid array, not 3"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "items of type 'item_reference' are not supported"),
        ({"input": [{"role": "user"}]}, "input[0].content: is required"),
        ({"input": [{"content": "x"}]}, "input[0].role: is required"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id: is required"),
        ({"input": [{"type": "function_call_output", "call_id": "f"}]}, "input[0].output: is required"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "part of type 'input_image'"),
        (
            {"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}},
            "tool_choice: this server has no tool of type 'web_search'",
        ),
        (
            {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "x"}]}]},
            "tools[0].tools[0].name: is required",
        ),
        ({"tools": [{"type": "namespace", "tools": [TOOL]}]}, "tools[0].name: is required"),
        ({"tool_choice": "required"}, "tool_choice: needs tools"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema: is required"),
        ({"background": True}, "background: responses are not computed"),
        ({"conversation": "c"}, "conversation: not supported"),
        ({"prompt": {"id": "p"}}, "prompt: prompts are not stored"),
        ({"truncation": "auto"}, "truncation: prompts are never shortened"),
        ({"prompt_cache_options": {"ttl": "9h"}}, 'prompt_cache_options.ttl: must be "30m" or "12h"'),
    ],
)
def test_bad_bodies(fields: dict[str, Any], message: str) -> None:
    """A fault of a body is named by its path; tools of OpenAI's own servers are refused clearly."""
    with pytest.raises(BadRequest) as caught:
        body(**fields)
    assert message in caught.value.message


AGENTS: Any = [
    TOOL,
    {"type": "namespace", "name": "agents", "description": "Others.", "tools": [{**TOOL, "name": "ask"}]},
    {"type": "custom", "name": "patch", "description": "Change files.", "format": {"type": "text"}},
    {"type": "web_search", "external_web_access": False},
]


def test_kinds_of_tools() -> None:
    """Functions in namespaces and tools with a free text are functions of the model; what only a provider runs is left out and
    named. Earlier calls have the names and arguments that the model wrote."""
    request = body(
        tools=AGENTS,
        tool_choice={"type": "function", "name": "ask", "namespace": "agents"},
        input=[
            {"type": "function_call", "call_id": "a", "name": "ask", "namespace": "agents", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "a", "output": "yes"},
            {"type": "custom_tool_call", "call_id": "b", "name": "patch", "input": 'say "hi"'},
            {"type": "custom_tool_call_output", "call_id": "b", "output": "done"},
        ],
    )
    assert [tool.name for tool in request.tools] == ["weather", "agents__ask", "patch"]
    assert request.tools[2].parameters["required"] == ["input"] and request.left_out == ("tools[3]",)
    assert request.tool_choice == ToolChoice("named", "agents__ask")
    calls = [call for message in request.messages for call in message.tool_calls]
    assert calls == [ToolCall("a", "agents__ask", "{}"), ToolCall("b", "patch", '{"input":"say \\"hi\\""}')]


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools(mode: str) -> None:
    """The model sees the tools that it may call only, and must call one of them if it is required. The client reads its
    choice in the response."""
    named = [{"type": "function", "name": "ask", "namespace": "agents"}, {"type": "web_search"}]
    choice = {"type": "allowed_tools", "mode": mode, "tools": named}
    request = body(tools=AGENTS, tool_choice=choice)
    assert [tool.name for tool in request.tools] == ["agents__ask"] and request.tool_choice == ToolChoice(mode)
    answer = ResponsesWriter(request, ResponseHead("resp_1", "nano", 0)).whole(USAGE)
    assert Response.model_validate(answer).to_dict()["tool_choice"] == choice
    with pytest.raises(BadRequest, match="tool_choice"):
        body(tools=AGENTS, tool_choice={**choice, "mode": "sometimes"})


@pytest.mark.parametrize("named", [{"name": "nobody"}, {"name": "ask"}, {"name": "ask", "namespace": "weather"}])
def test_allowed_tools_that_there_are_not(named: dict[str, str]) -> None:
    """A name that no tool of the request has is refused, as at OpenAI: the model would go without."""
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "weather"}]}
    assert [tool.name for tool in body(tools=AGENTS, tool_choice=choice).tools] == ["weather"]
    with pytest.raises(BadRequest, match="there is no tool named") as refused:
        body(tools=AGENTS, tool_choice={**choice, "tools": [*choice["tools"], {"type": "function", **named}]})
    assert refused.value.param == "tool_choice"


def test_calls_of_every_kind_are_written() -> None:
    """Calls are items of the kind of their tool, whole and streamed; a free text is that and not JSON."""
    writer = ResponsesWriter(body(tools=AGENTS), ResponseHead("resp_1", "nano", 0))
    pieces = (
        CallStart(0, "a", "agents__ask"),
        CallArguments(0, '{"city":1}'),
        CallStart(1, "b", "patch"),
        CallArguments(1, '{"input": "a\\n'),
        CallArguments(1, 'b"}'),
    )
    sent = [*writer.events(ChoiceDelta(0, pieces)), *writer.events(ChoiceDelta(0, finish_reason="tool_calls"))]
    whole = writer.whole(USAGE)
    ask, patch = whole["output"]
    assert (ask["type"], ask["name"], ask["namespace"]) == ("function_call", "ask", "agents")
    assert (patch["type"], patch["name"], patch["input"]) == ("custom_tool_call", "patch", "a\nb")
    Response.model_validate(whole)
    events = [json.loads(event.split(b"data: ")[1]) for event in sent]
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[2:5] == ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done"]
    assert events[4]["name"] == "ask"
    assert kinds[6:] == [
        *("output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done", "output_item.done")
    ]
    assert events[-1]["item"] == patch and events[-2]["input"] == "a\nb"


def test_client_reads_a_whole_response() -> None:
    """OpenAI's client gets reasoning, text and calls as items, and the usage with its details."""
    with client_of(DialectServer()) as client:
        response = client.responses.create(model="nano", input="Rome?", tools=[TOOL], metadata={"a": "b"})
    Response.model_validate(response.to_dict())
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call", "function_call"]
    assert response.output_text == "So so." and response.metadata == {"a": "b"}
    calls = [item for item in response.output if item.type == "function_call"]
    assert [(call.call_id, call.arguments) for call in calls] == [("call_1", '{"city":"Rome"}'), ("call_2", "{}")]
    assert response.usage is not None and response.usage.input_tokens_details.cached_tokens == 4
    assert response.usage.output_tokens_details.reasoning_tokens == 2


def test_client_reads_a_stream() -> None:
    """The events are numbered, and the client puts the same response together from them."""
    with client_of(DialectServer()) as client:
        whole = client.responses.create(model="nano", input="Rome?", tools=[TOOL])
        with client.responses.stream(model="nano", input="Rome?", tools=[TOOL]) as stream:
            final = stream.get_final_response()
        events = list(client.responses.create(model="nano", input="Rome?", tools=[TOOL], stream=True))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 4
    last = events[-1]
    assert last.type == "response.completed" and last.response.output == whole.output
    assert final.output_text == whole.output_text and [item.type for item in final.output] == [
        item.type for item in whole.output
    ]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "So so."


def test_cut_answers_are_incomplete() -> None:
    """An answer that reached its limit says so."""
    server = DialectServer([ChoiceDelta(0, (Text("a"),), finish_reason="length")])
    with client_of(server) as client:
        response = client.responses.create(model="nano", input="x")
        with client.responses.stream(model="nano", input="x") as stream:
            last = [event.type for event in stream][-1]
    assert (response.status, last) == ("incomplete", "response.incomplete")
    assert response.incomplete_details is not None and response.incomplete_details.reason == "max_output_tokens"


def test_logprobs() -> None:
    """Log-probabilities come with the text they belong to, streamed and whole."""
    entries = (TokenEntry("a", -0.5, b"a", top=(("a", -0.5, b"a"),)), TokenEntry("b", -1.5, b"b"))
    deltas = [
        ChoiceDelta(0, (Text("a"),), (1,), entries[:1]),
        ChoiceDelta(0, (Text("b"),), (2,), entries[1:], "stop"),
    ]
    with client_of(DialectServer(deltas)) as client:
        response = client.responses.create(model="nano", input="x", top_logprobs=1)
        with client.responses.stream(model="nano", input="x", top_logprobs=1) as stream:
            shown = [event.logprobs for event in stream if event.type == "response.output_text.delta"]
    item = response.output[0]
    assert item.type == "message" and item.content[0].type == "output_text"
    assert [entry.logprob for entry in item.content[0].logprobs or ()] == [-0.5, -1.5]
    assert [[entry.logprob for entry in entries] for entries in shown] == [[-0.5], [-1.5]]


def test_an_error_in_a_stream_fails_the_response() -> None:
    """The last event says what failed."""
    server = DialectServer(SENTENCE[:2], EngineFailed("broken"))
    with client_of(server) as client:
        events = list(client.responses.create(model="nano", input="x", stream=True))
    last = events[-1]
    assert last.type == "response.failed" and last.response.error is not None
    assert (last.response.error.code, last.response.error.message) == ("server_error", "broken")


def test_conversations_continue_without_old_instructions() -> None:
    """A later request sees messages and answers of earlier ones, and its own instructions only."""
    first = body(instructions="Old.", input="one", store=True)
    writer = ResponsesWriter(first, ResponseHead("resp_1", "nano", 0))
    for delta in SENTENCE:
        writer.add(delta)
    stored = conversation(first, writer.choice(0))
    assert stored[0] == Message("user", "one")
    assert (stored[1].content, stored[1].reasoning, len(stored[1].tool_calls)) == ("So so.", "It is. ", 2)
    second = continued(body(instructions="New.", input="two", previous_response_id="resp_1"), stored)
    assert second.messages == (Message("system", "New."), *stored, Message("user", "two"))
    plain = continued(body(input="two", previous_response_id="resp_1"), stored)
    assert plain.messages == (*stored, Message("user", "two"))


def test_usage_of_a_whole_response() -> None:
    """Totals are those of the request."""
    with client_of(DialectServer()) as client:
        usage = client.responses.create(model="nano", input="x").usage
    assert usage is not None and usage.total_tokens == USAGE.prompt_tokens + USAGE.output_tokens


@pytest.mark.parametrize(
    ("cause", "kind", "reason"),
    [
        ("tools_changed", "cache_miss", "tools_changed"),
        ("compacted", "cache_miss", "context_compacted"),
        ("message_edited", "cache_miss", "input_changed"),
        ("new_conversation", "comparison_response_not_found", None),
        ("evicted", "unavailable", None),
        ("new_text", "cache_hit", None),
    ],
)
def test_diagnostics(cause: str, kind: str, reason: str | None) -> None:
    """OpenAI's client reads the cause of a miss as its own type."""
    server = DialectServer(report={"cause": cause, "where": "messages[1]", "tokens_lost": 9})
    options: Any = {"comparison_response_id": "resp_0"}
    with client_of(server) as client:
        response = client.responses.create(model="nano", input="x", prompt_cache_options=options)
        plain = client.responses.create(model="nano", input="x")
    found = response.to_dict()["prompt_cache_diagnostics"]
    assert (found["type"], found.get("reason")) == (kind, reason)  # type: ignore[attr-defined, index]
    assert "prompt_cache_diagnostics" not in plain.to_dict()
    Response.model_validate(response.to_dict())
