"""Requests of any dialect as chat completions, and chat completions of any server as output."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from dialect_server import SENTENCE, USAGE, WEATHER
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from foreword.api.dialects.answer_reader import EventParser, check_whole, decode_object, read_error
from foreword.api.dialects.chat_request import write_request
from foreword.api.dialects.choice_reader import ChoiceReader
from foreword.api.dialects.decode import Limits
from foreword.api.dialects.dialect_writers import WRITERS
from foreword.api.dialects.registry import DIALECTS
from foreword.api.dialects.writer import ChoiceOutput, ResponseHead, to_json
from foreword.api.output import CallArguments, CallStart, ChoiceDelta, Reasoning, Text
from foreword.api.request import DialectName, GenerateRequest
from foreword.api.sse import DONE
from foreword.api.token_entry import TokenEntry
from foreword.errors import BadRequest
from foreword.request_errors import PromptTooLong, QueueFull, ReplicaFailed

LIMITS = Limits.for_model(4096)
HEAD = ResponseHead("chatcmpl-1", "nano", 1700000000, "fp")
CHAT_TOOL = {"type": "function", "function": {"name": "weather", "description": "Now.", "parameters": WEATHER}}


def parse(dialect: DialectName, **body: Any) -> GenerateRequest:
    return DIALECTS[dialect].parse(json.dumps(body).encode(), LIMITS)


CALL = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
BODIES: dict[str, tuple[DialectName, dict[str, Any]]] = {
    "chat": (
        "chat",
        {
            "model": "m",
            "messages": [
                {"role": "system", "content": "s", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
                {"role": "user", "content": "Rome?", "name": "ada"},
                {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "hm"},
                {"role": "tool", "tool_call_id": "a", "content": "sunny"},
                {"role": "assistant", "content": "It"},
            ],
            "tools": [{**CHAT_TOOL, "cache_control": {"type": "ephemeral"}}],
            "tool_choice": {"type": "function", "function": {"name": "weather"}},
            "parallel_tool_calls": False,
            "max_tokens": 3,
            "top_k": -1,
            "stop": ["x"],
            "logprobs": True,
            "top_logprobs": 2,
            "logit_bias": {"5": 1},
            "include_stop_str_in_output": True,
            "structured_outputs": {"regex": "a+"},
            "chat_template_kwargs": {"a": 1},
            "reasoning_effort": "low",
            "continue_final_message": True,
            "include_reasoning": False,
            "prompt_cache_key": "k",
            "prompt_cache_retention": 60,
            "prefix": "p",
            "cache_report": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    ),
    "responses": (
        "responses",
        {
            "instructions": "s",
            "input": [
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "input_text",
                            "text": "x",
                            "prompt_cache_breakpoint": {"mode": "explicit", "ttl": "12h"},
                        }
                    ],
                },
                {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "a", "output": "y"},
            ],
            "text": {"format": {"type": "json_schema", "name": "w", "schema": WEATHER}},
        },
    ),
    "messages": (
        "messages",
        {
            "system": "s",
            "max_tokens": 9,
            "thinking": {"type": "disabled"},
            "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "We"}],
        },
    ),
}
SAME = (
    "model messages sampling tools tool_choice parallel_tool_calls output_format reasoning template_options prefix cache"
    " continue_final_message add_generation_prompt stream cache_report"
)


@pytest.mark.parametrize(("dialect", "body"), BODIES.values(), ids=BODIES.keys())
def test_a_request_survives_translation(dialect: DialectName, body: dict[str, Any]) -> None:
    """Written as a chat and parsed again, a request asks for the same."""
    request = parse(dialect, **body)
    again = DIALECTS["chat"].parse(to_json(write_request(request)), LIMITS)
    for name in SAME.split():
        assert getattr(again, name) == getattr(request, name), name


def test_other_servers_get_no_fields_of_foreword() -> None:
    """A body for another engine has OpenAI's and vLLM's fields only."""
    dialect, body = BODIES["chat"]
    written = json.dumps(write_request(parse(dialect, **body), "vllm"))
    for name in ("cache_control", "prefix", "cache_report", "prompt_cache_retention"):
        assert f'"{name}"' not in written


def output(deltas: list[ChoiceDelta]) -> tuple[list[tuple[str, str, str, str]], str | None]:
    choice = ChoiceOutput()
    for delta in deltas:
        choice.add(delta)
    return [(block.kind, block.id, block.name, block.text) for block in choice.blocks], choice.finish_reason


def streamed(*deltas: ChoiceDelta) -> tuple[list[ChoiceDelta], ChoiceReader]:
    """Reads a chat writer's stream with a reader, and returns what it made of it."""
    request = parse(
        "chat", messages=[{"role": "user", "content": "x"}], stream=True, stream_options={"include_usage": True}
    )
    writer = WRITERS[request.dialect](request, HEAD)
    raw = b"".join(event for delta in deltas for event in writer.events(delta)) + writer.end(USAGE, {"reason": "new"})
    reader, read = ChoiceReader(), list[ChoiceDelta]()
    for event in raw.split(b"\n\n")[:-2]:
        read += reader.read_deltas(event.removeprefix(b"data: "))
    return read, reader


def test_streams_are_read_as_they_were_written() -> None:
    """Reasoning, text, calls, finish reason, usage and report of a stream."""
    read, reader = streamed(*SENTENCE)
    assert output(read) == output(list(SENTENCE))
    assert reader.report == {"reason": "new"}
    assert (reader.usage.cached_tokens, reader.usage.reasoning_tokens, reader.usage.output_tokens) == (4, 2, 5)


def test_logprobs_are_read() -> None:
    """Log-probabilities with their bytes and alternatives."""
    entry = TokenEntry("é", -0.5, "é".encode(), top=(("é", -0.5, "é".encode()), ("bytes:\\xc3", -2.0, b"\xc3")))
    read, _ = streamed(ChoiceDelta(0, (Text("é"),), (1,), (entry,), "stop"))
    assert read[-1].logprobs == (entry,)


def test_whole_responses_are_read() -> None:
    """A response that is not streamed is read as the stream of the same answer is."""
    writer = WRITERS["chat"](parse("chat", messages=[{"role": "user", "content": "x"}]), HEAD)
    for delta in SENTENCE:
        writer.add(delta)
    reader = ChoiceReader()
    assert output([reader.read_whole(to_json(writer.whole(USAGE)))]) == output(list(SENTENCE))
    assert reader.counts.prompt == 7


def chunk(**delta: Any) -> bytes:
    return json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": delta.pop("end", None)}]}).encode()


def test_other_servers_habits() -> None:
    """`reasoning` for `reasoning_content`, calls without index or id, ids that are repeated, "stop" after a named call."""
    reader = ChoiceReader()
    pieces = [
        *reader.read_deltas(chunk(reasoning="hm"))[0].pieces,
        *reader.read_deltas(chunk(tool_calls=[{"function": {"name": "f", "arguments": "{"}}]))[0].pieces,
        *reader.read_deltas(chunk(tool_calls=[{"index": 0, "id": "x", "function": {"name": "f", "arguments": "}"}}]))[
            0
        ].pieces,
    ]
    assert pieces == [Reasoning("hm"), CallStart(0, "call_0", "f"), CallArguments(0, "{"), CallArguments(0, "}")]
    assert reader.read_deltas(chunk(end="stop"))[0].finish_reason == "tool_calls"


@pytest.mark.parametrize(
    "data",
    [
        b"<html>",
        b"{}",
        b"[]",
        b"null",
        b'{"choices": [7]}',
        b'{"choices": {}}',
        b'{"choices": [{"delta": "str"}]}',
        b'{"choices": [{"index": 0}]}',
        b'{"choices": [{"index": 1, "delta": {}}]}',
        b'{"choices": [{"index": -1, "delta": {}}]}',
        b'{"choices": [{"delta": {"content": 3}}]}',
        b'{"choices": [{"delta": {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]}}]}',
        b'{"choices": [{"delta": {}, "logprobs": {"content": [{"token": "a", "logprob": 0, "bytes": [300]}]}}]}',
        b'{"choices": [{"delta": {}, "finish_reason": "abort"}]}',
        b'{"choices": [], "usage": {"prompt_tokens": -1}}',
        b'{"choices": [' + b"[" * 100_000,
        b'{"error": {"message": "broken"}}',
        b'{"error": 5}',
        b"\xff",
    ],
)
def test_wrong_shapes_are_the_replicas_fault(data: bytes) -> None:
    """Whatever a replica sends instead of chat completions is ReplicaFailed, streamed or whole."""
    with pytest.raises(ReplicaFailed):
        ChoiceReader().read_deltas(data)
    with pytest.raises(ReplicaFailed):
        ChoiceReader().read_whole(data.replace(b"delta", b"message"))


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["choices", "delta", "message", "index", "usage", "error", "content", "tool_calls", "function"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=examples(150), deadline=None)
@given(st.dictionaries(st.sampled_from(["choices", "usage", "error", "cache_report"]), anything) | anything)
def test_any_json_is_read_or_refused(value: Any) -> None:
    """Any JSON is read, or raises ReplicaFailed or BadRequest."""
    data = json.dumps(value).encode()
    for read in (ChoiceReader().read_deltas, ChoiceReader().read_whole):
        with contextlib.suppress(ReplicaFailed, BadRequest):
            assert all(isinstance(delta, ChoiceDelta) for delta in read(data))


def test_errors_keep_their_kind() -> None:
    """A client's error stays one; everything else is the replica's."""
    refused = b'{"error": {"message": "no", "type": "invalid_request_error", "param": "n", "code": null}}'
    error = read_error(400, refused)
    assert type(error) is BadRequest and (error.message, error.param) == ("no", "n")
    long = b'{"error": {"message": "long", "type": "invalid_request_error", "code": "context_length_exceeded"}}'
    assert isinstance(read_error(400, long), PromptTooLong)
    assert isinstance(read_error(429, b"slow"), QueueFull) and isinstance(read_error(200, b""), ReplicaFailed)
    with pytest.raises(BadRequest, match="no"):
        ChoiceReader().read_deltas(refused)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_counts_of_every_dialect(dialect: DialectName) -> None:
    """Counts of a stream and of a whole answer: tokens, whether output began, and the end where the dialect has one."""
    streams = {"stream": True, "stream_options": {"include_usage": True}}
    asked: dict[DialectName, dict[str, Any]] = {
        "chat": {"messages": [{"role": "user", "content": "x"}], **streams},
        "completions": {"prompt": "x", **streams},
        "responses": {"input": "x"},
        "messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9},
    }
    request = parse(dialect, **asked[dialect])
    writer, whole = (WRITERS[request.dialect](request, HEAD) for _ in range(2))
    events = [*writer.start(USAGE), *(event for delta in SENTENCE for event in writer.events(delta)), writer.end(USAGE)]
    for delta in SENTENCE:
        whole.add(delta)
    reader, parser = ChoiceReader(), EventParser()
    for event in parser.feed(b"".join(events)):
        if event.data != DONE:
            assert not reader.ended
            reader.read(event.data)
    assert reader.begun and reader.ended == (dialect in ("responses", "messages"))
    assert reader.counts[:3] == check_whole(to_json(whole.whole(USAGE)))[:3] == (4, 5, 7)


@pytest.mark.parametrize("data", [b"", b"{", b"[1]", b"null", b'{"a": "\xff"}', b"[" * 100_000], ids=range(6))
def test_what_is_no_object(data: bytes) -> None:
    """A text that is no JSON, not UTF-8, too deep, or another value than an object is read as an empty object."""
    assert decode_object(b'{"a": 1}') == {"a": 1}
    assert decode_object(data) == {}
