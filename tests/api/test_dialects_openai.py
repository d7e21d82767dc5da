"""Bodies of chat completions and completions, and their responses as OpenAI's own types."""

from __future__ import annotations

import json
from typing import Any

import pytest
from dialect_server import SENTENCE, USAGE, WEATHER
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from foreword.api.dialects.decode import Limits
from foreword.api.dialects.dialect_writers import WRITERS
from foreword.api.dialects.registry import DIALECTS
from foreword.api.dialects.writer import ResponseHead, Writer
from foreword.api.output import CallStart, ChoiceDelta, PromptInfo, Text, Usage
from foreword.api.request import CacheBreakpoint, DialectName, GenerateRequest, OutputFormat, Tool, ToolCall, ToolChoice
from foreword.api.token_entry import TokenEntry
from foreword.errors import BadRequest
from foreword.request_errors import EngineFailed

LIMITS = Limits.for_model(4096)
TOOL = {"type": "function", "function": {"name": "weather", "description": "Now.", "parameters": WEATHER}}
HI = [{"role": "user", "content": "hi"}]


def parse(dialect: DialectName, **body: Any) -> GenerateRequest:
    return DIALECTS[dialect].parse(json.dumps(body).encode(), LIMITS)


def chat(**body: Any) -> GenerateRequest:
    return parse("chat", **{"messages": HI, **body})


def writer(request: GenerateRequest) -> Writer:
    return WRITERS[request.dialect](request, ResponseHead("chatcmpl-1", "nano", 1700000000, "fp_1"))


def events(request: GenerateRequest, *deltas: ChoiceDelta) -> list[Any]:
    """The data of a whole stream."""
    made = writer(request)
    raw = [*made.start(Usage(prompt_tokens=7)), *(one for delta in deltas for one in made.events(delta))]
    lines = (b"".join(raw) + made.end(USAGE)).decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def whole(request: GenerateRequest, *deltas: ChoiceDelta) -> dict[str, Any]:
    made = writer(request)
    for delta in deltas:
        made.add(delta)
    return made.whole(USAGE)


def test_conversation_with_tools() -> None:
    """Every shape of message that agents send becomes a message: null contents, parts, calls, results, reasoning."""
    request = chat(
        messages=[
            {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
            {"role": "user", "content": "Rome?", "name": "ada"},
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "hm",
                "tool_calls": [
                    {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
                ],
            },
            {"role": "tool", "tool_call_id": "a", "content": "sunny"},
        ],
        tools=[TOOL],
        tool_choice={"type": "function", "function": {"name": "weather"}},
        parallel_tool_calls=False,
    )
    system, user, assistant, tool = request.messages
    assert (system.role, system.content) == ("system", "Be brief.")
    assert (user.content, user.name) == ("Rome?", "ada")
    assert (assistant.content, assistant.reasoning) == ("", "hm")
    assert assistant.tool_calls == (ToolCall("a", "weather", '{"city": "Rome"}'),)
    assert (tool.role, tool.content, tool.tool_call_id) == ("tool", "sunny", "a")
    assert request.tools == (Tool("weather", "Now.", WEATHER),)
    assert request.tool_choice == ToolChoice("named", "weather") and not request.parallel_tool_calls


def test_sampling_fields() -> None:
    """OpenAI's and vLLM's names of sampling parameters arrive under the engine's names; nothing else is set."""
    request = chat(
        max_tokens=9,
        max_completion_tokens=3,
        top_k=-1,
        stop="x",
        include_stop_str_in_output=True,
        logprobs=True,
        top_logprobs=2,
        logit_bias={"5": -100},
        allowed_token_ids=[1, 2],
        bad_words=["no"],
        temperature=0,
        seed=None,
    )
    assert dict(request.sampling) == {
        "max_tokens": 3,
        "top_k": 0,
        "stop": ("x",),
        "include_stop": True,
        "logprobs": 2,
        "logit_bias": {5: -100.0},
        "allowed_token_ids": (1, 2),
        "bad_words": ("no",),
        "temperature": 0.0,
    }
    assert not chat(logprobs=False, top_logprobs=0).sampling  # some clients send all fields


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, OutputFormat("json_object")),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "w", "strict": True, "schema": WEATHER},
                }
            },
            OutputFormat("json_schema", WEATHER),
        ),
        ({"structured_outputs": {"regex": "a+"}}, OutputFormat("regex", "a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, OutputFormat("choice", ("a", "b"))),
        ({"structured_outputs": {"json": json.dumps(WEATHER)}}, OutputFormat("json_schema", WEATHER)),
        ({"guided_json": WEATHER}, OutputFormat("json_schema", WEATHER)),
        ({"guided_grammar": 'start: "a"'}, OutputFormat("grammar", 'start: "a"')),
    ],
)
def test_output_formats(fields: dict[str, Any], expected: OutputFormat | None) -> None:
    """Every way to ask for structured output gives the same form."""
    assert chat(**fields).output_format == expected
    assert parse("completions", prompt="x", **fields).output_format == expected


def test_cache_fields() -> None:
    """Cache control in parts, messages and tools, keys and retentions."""
    mark = {"type": "ephemeral", "ttl": "1h"}
    request = chat(
        messages=[
            {"role": "system", "content": [{"type": "text", "text": "a", "cache_control": mark}]},
            {"role": "user", "content": "b", "cache_control": {"type": "ephemeral"}},
        ],
        tools=[{**TOOL, "cache_control": mark}],
        prompt_cache_key="k",
        prompt_cache_retention="24h",
        cache_salt="s",
        user="u",
    )
    assert [one.breakpoint for one in (*request.messages, *request.tools)] == [
        CacheBreakpoint(3600.0),
        CacheBreakpoint(300.0),
        CacheBreakpoint(3600.0),
    ]
    assert (request.cache.key, request.cache.retention) == ("k", 86400.0)
    assert (request.cache_salt, request.session) == ("s", "u")
    assert chat(prompt_cache_retention="in_memory").cache.retention is None


def test_template_fields() -> None:
    """Template arguments, reasoning effort and continuing the last message."""
    assert chat(chat_template_kwargs={"a": [1]}, reasoning_effort="low").template_options == {
        "a": [1],
        "reasoning_effort": "low",
    }
    assert chat(reasoning_effort="none").template_options == {"enable_thinking": False}
    answer = [*HI, {"role": "assistant", "content": "We"}]
    request = chat(messages=answer, continue_final_message=True)
    assert request.continue_final_message and not request.add_generation_prompt


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("a", ("a",)), (["a", "b"], ("a", "b")), ([1, 2], ((1, 2),)), ([[1], [2, 3]], ((1,), (2, 3)))],
)
def test_prompts(prompt: Any, expected: tuple[Any, ...]) -> None:
    """OpenAI's four shapes of a prompt."""
    assert parse("completions", prompt=prompt).prompts == expected


def test_completion_fields() -> None:
    """A completion has OpenAI's default length."""
    request = parse("completions", prompt="x", echo=True, logprobs=1, n=1, best_of=1)
    assert dict(request.sampling) == {"max_tokens": 16, "n": 1, "logprobs": 1}
    assert request.echo


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": []}, "messages: must have at least 1 entry"),
        ({"messages": "hi"}, 'messages: must be a valid array, not "hi"'),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role: must be 'system', 'developer'"),
        ({"messages": [{"role": "user"}]}, "messages[0].content: is required"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content: must be a string"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "part of type 'image_url'"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content: must be a string or a list of text"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type: only tools of type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function: is required"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 3}}]}, "must be an object"),
        ({"tool_choice": "required"}, "tool_choice: needs tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "no tool named 'x'"),
        ({"functions": [{}]}, "functions: not supported"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema: is required"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex: cannot be combined with"),
        ({"temperature": "1"}, 'temperature: must be a valid number, not "1"'),
        ({"logprobs": 2}, "logprobs: must be a valid boolean, not 2"),
        ({"top_logprobs": 2}, "top_logprobs: needs logprobs"),
        ({"n": True}, "n: must be a valid integer, not true"),
        ({"seed": 2**64}, "seed: must be less than or equal to 9223372036854775807"),
        ({"logit_bias": {"a": 1}}, "logit_bias: must be a valid integer"),
        ({"logit_bias": {"1": 101}}, "logit_bias: must be less than or equal to 100"),
        ({"stop": ["a", ""]}, "stop: must be a string or a list of strings, none of them empty"),
        ({"stop": ["a"] * 65}, "stop: must have at most 64"),
        ({"stream_options": {}}, "stream_options: may be set only together with stream"),
        ({"continue_final_message": True}, "continue_final_message: needs a last message of the assistant"),
        ({"modalities": ["audio"]}, "modalities: only text"),
        ({"prompt_cache_retention": "soon"}, "prompt_cache_retention: must be"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs: cannot be streamed"),
        ({"messages": [{"role": "user", "content": "x", "cache_control": {"type": "ephemeral"}}] * 5}, "at most 4"),
    ],
)
def test_bad_chats(fields: dict[str, Any], message: str) -> None:
    """A fault of a body is named by its path, with what was sent."""
    with pytest.raises(BadRequest) as caught:
        chat(**fields)
    assert message in caught.value.message
    assert caught.value.param is not None and caught.value.param in message.replace("image_url", "messages") + str(
        fields
    )


def test_chat_stream_has_openais_types() -> None:
    """Every chunk is one of OpenAI's; put together they are the whole response."""
    request = chat(stream=True, stream_options={"include_usage": True}, tools=[TOOL])
    chunks = [ChatCompletionChunk.model_validate(event) for event in events(request, *SENTENCE)]
    assert chunks[0].choices[0].delta.role == "assistant"
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == "So so."
    assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == "It is. "
    calls = [call for delta in deltas for call in delta.tool_calls or ()]
    assert [(call.index, call.id, call.type) for call in calls if call.id] == [
        (0, "call_1", "function"),
        (1, "call_2", "function"),
    ]
    arguments = ["".join(c.function.arguments or "" for c in calls if c.index == n and c.function) for n in (0, 1)]
    assert arguments == ['{"city":"Rome"}', "{}"]
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices][-1] == "tool_calls"
    assert chunks[-1].usage is not None and chunks[-1].usage.total_tokens == 12
    assert chunks[-1].usage.completion_tokens_details is not None
    assert chunks[-1].usage.completion_tokens_details.reasoning_tokens == 2


def test_whole_chat_has_openais_type() -> None:
    """A whole response has text, reasoning, calls and the usage with its details."""
    answer = ChatCompletion.model_validate(whole(chat(tools=[TOOL]), *SENTENCE))
    message = answer.choices[0].message
    assert (message.content, message.model_dump()["reasoning_content"]) == ("So so.", "It is. ")
    assert [call.to_dict()["function"] for call in message.tool_calls or ()] == [
        {"name": "weather", "arguments": '{"city":"Rome"}'},
        {"name": "weather", "arguments": "{}"},
    ]
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 4
    only_calls = whole(chat(tools=[TOOL]), ChoiceDelta(0, (CallStart(0, "a", "weather"),)))
    assert only_calls["choices"][0]["message"]["content"] is None


def test_reasoning_can_be_left_out() -> None:
    """`include_reasoning: false` hides the reasoning, streamed or whole."""
    request = chat(include_reasoning=False)
    assert "reasoning_content" not in json.dumps([events(request, *SENTENCE), whole(request, *SENTENCE)])


def test_ids_of_the_prompt_are_in_the_first_chunk() -> None:
    """Without `echo` a stream of a completion has no chunk before its first token, so that clients measure no pause."""
    request = parse("completions", prompt="ab", stream=True, return_token_ids=True)
    first = ChoiceDelta(0, (Text("c"),), (3,), prompt=PromptInfo((1, 2)))
    chunks = events(request, first, ChoiceDelta(0, (Text("d"),), (4,), finish_reason="length"))
    shown = [(one["text"], one.get("prompt_token_ids"), one["token_ids"]) for one in (c["choices"][0] for c in chunks)]
    assert shown == [("c", [1, 2], [3]), ("d", None, [4])]


def test_completion_with_echo_and_logprobs() -> None:
    """The prompt's tokens come first, the first one without a log-probability; offsets count characters."""
    prompt = PromptInfo((1, 2), "ab", (TokenEntry("a", None, b"a"), TokenEntry("b", -0.5, b"b")))
    first = ChoiceDelta(
        0, (Text("é"),), (3,), (TokenEntry("é", -1.0, "é".encode(), top=(("e", -0.1, b"e"),)),), prompt=prompt
    )
    last = ChoiceDelta(0, (Text("!"),), (4,), (TokenEntry("!", -2.0, b"!"),), "length")
    request = parse("completions", prompt="ab", echo=True, logprobs=1, return_token_ids=True)
    answer = Completion.construct(**whole(request, first, last))
    odds = answer.choices[0].logprobs
    assert answer.choices[0].text == "abé!" and odds is not None
    assert (odds.tokens, odds.text_offset) == (["a", "b", "é", "!"], [0, 1, 2, 3])
    assert odds.token_logprobs == [None, -0.5, -1.0, -2.0] and odds.top_logprobs is not None
    assert odds.top_logprobs[0] is None and odds.top_logprobs[2] == {"e": -0.1, "é": -1.0}
    chunks = [Completion.construct(**event) for event in events(request, first, last)]
    assert "".join(chunk.choices[0].text for chunk in chunks) == "abé!"
    offsets = [n for chunk in chunks if chunk.choices[0].logprobs for n in chunk.choices[0].logprobs.text_offset or ()]
    assert offsets == [0, 1, 2, 3]


def test_errors_in_a_stream() -> None:
    """An error is an event with OpenAI's error object."""
    event = json.loads(writer(chat()).error(EngineFailed("broken")).decode().removeprefix("data: "))
    assert event["error"]["message"] == "broken" and event["error"]["code"] == "engine_error"
