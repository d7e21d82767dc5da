"""Hostile bodies are refused before objects are built from them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
from example_counts import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from foreword.api.dialects import decode
from foreword.api.dialects.chat import ChatBody
from foreword.api.dialects.completions import CompletionBody
from foreword.api.dialects.decode import Limits
from foreword.api.dialects.dialect import Dialect
from foreword.api.dialects.messages import MessagesBody
from foreword.api.dialects.registry import DIALECTS
from foreword.api.dialects.responses import ResponsesBody
from foreword.api.request import GenerateRequest
from foreword.errors import BadRequest

LIMITS = Limits.for_model(4096)
FUZZ = settings(max_examples=examples(80), deadline=None, suppress_health_check=[HealthCheck.too_slow])
every_dialect = pytest.mark.parametrize("dialect", DIALECTS.values(), ids=lambda dialect: dialect.name)

MILLION = 1_000_000
HOSTILE: dict[str, Callable[[], bytes]] = {
    "messages": lambda: b'{"messages":[' + b",".join([b'{"role":"user","content":"a"}'] * MILLION) + b"]}",
    "token ids": lambda: b'{"prompt":[' + b"1," * 15 * MILLION + b"1]}",
    "unknown object": lambda: b'{"x":{' + b",".join(b'"%d":1' % n for n in range(MILLION)) + b"}}",
    "empty strings": lambda: b'{"stop":[' + b'"",' * 10 * MILLION + b'""]}',
    "escapes": lambda: b'{"x":"' + b'\\"{,[' * 6 * MILLION + b'"}',
    "deep arrays": lambda: b'{"messages":' + b"[" * MILLION,
    "deep objects": lambda: b'{"a":' * MILLION,
    "not UTF-8": lambda: b'{"messages":[{"role":"user","content":"' + b"\xc3\xa9" * MILLION + b'\xff"}]}',
}


@pytest.fixture(scope="module", params=HOSTILE.values(), ids=HOSTILE.keys())
def hostile(request: pytest.FixtureRequest) -> bytes:
    """A huge body."""
    made: bytes = request.param()
    return made


@pytest.mark.parametrize(
    "dialect",
    [pytest.param(one, marks=[] if one.name == "chat" else pytest.mark.slow) for one in DIALECTS.values()],
    ids=lambda dialect: dialect.name,
)
def test_hostile_bodies(dialect: Dialect, hostile: bytes) -> None:
    """A huge body of any kind is a BadRequest at once, and never a RecursionError."""
    body, start = hostile, time.process_time()
    with pytest.raises(BadRequest):
        dialect.parse(body, LIMITS)
    assert time.process_time() - start < 2.5


def test_long_texts_are_no_reason() -> None:
    """Braces, commas, quotes and backslashes inside of a text do not count as objects."""
    text = '{"a": [1, 2, {"b": "c\\\\"}]}, ' * 40_000
    body = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
    assert DIALECTS["chat"].parse(body, LIMITS).messages[0].content == text


pieces = st.text(st.sampled_from('ab"\\\\,{}[]é\n'), max_size=12)
documents = st.recursive(
    pieces | st.integers(0, 9), lambda inner: st.lists(inner, max_size=4) | st.dictionaries(pieces, inner, max_size=4)
)


def count(value: Any) -> tuple[int, int, int]:
    """Containers, commas and strings of a document."""
    if isinstance(value, str):
        return 0, 0, 1
    if not isinstance(value, list | dict):
        return 0, 0, 0
    inner = [count(child) for child in (value.values() if isinstance(value, dict) else value)]
    keys = len(value) if isinstance(value, dict) else 0
    return (
        1 + sum(one[0] for one in inner),
        max(len(value) - 1, 0) + sum(one[1] for one in inner),
        keys + sum(one[2] for one in inner),
    )


@settings(max_examples=examples(300), deadline=None)
@given(document=documents, size=st.integers(1, 9), ascii_only=st.booleans())
def test_counts_are_exact(document: Any, size: int, ascii_only: bool) -> None:
    """Just as many values, containers and strings as allowed pass, one less does not, wherever the body is cut into pieces."""
    raw = json.dumps(document, ensure_ascii=ascii_only).encode()
    containers, commas, strings = count(document)
    exact = {"containers": containers, "values": containers + commas, "strings": strings}
    with mock.patch.object(decode, "_PIECE_BYTES", size):
        Limits(**exact).check(raw)
        for name, number in exact.items():
            if number:
                with pytest.raises(BadRequest):
                    Limits(**{**exact, name: number - 1}).check(raw)


def test_schemas_are_bounded() -> None:
    """A schema that is too deep or too long is refused; one of ordinary depth is not."""
    for depth, fits in ((20, True), (200, False), (900, False), (15_000, False)):
        schema = b'{"a":' * depth + b"{}" + b"}" * depth
        body = b'{"messages":[{"role":"user","content":"x"}],"guided_json":' + schema + b"}"
        if fits:
            DIALECTS["chat"].parse(body, LIMITS)
            continue
        with pytest.raises(BadRequest, match="nested"):
            DIALECTS["chat"].parse(body, LIMITS)
    long = json.dumps({"prompt": "x", "guided_json": {"description": "x" * 300_000}}).encode()
    with pytest.raises(BadRequest, match="guided_json: must have at most"):
        DIALECTS["completions"].parse(long, LIMITS)


@pytest.mark.extended
def test_counts_are_bounded() -> None:
    """Messages, prompts, tools and choices have limits of their own."""
    message = {"role": "user", "content": "x"}
    tool = {"type": "function", "function": {"name": "f"}}
    for dialect, fields in (
        ("chat", {"messages": [message] * 5000}),
        ("chat", {"messages": [message], "tools": [tool] * 1025}),
        (
            "responses",
            {"input": "x", "tools": [{"type": "namespace", "name": "n", "tools": [{"type": "f"}] * 513}] * 2},
        ),
        ("chat", {"messages": [message], "guided_choice": ["x"] * 5000}),
        ("chat", {"messages": [message], "stop_token_ids": [1] * 1025}),
        ("completions", {"prompt": ["x"] * 3000}),
        ("completions", {"prompt": "x", "logit_bias": {str(token): 1 for token in range(65_537)}}),
    ):
        with pytest.raises(BadRequest, match="must have at most"):
            DIALECTS[dialect].parse(json.dumps(fields).encode(), LIMITS)  # type: ignore[index]


text = st.text(max_size=8)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | text
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3), max_leaves=8
)
FIELDS = sorted(
    {name for kind in (ChatBody, CompletionBody, ResponsesBody, MessagesBody) for name in kind.__struct_fields__}
)
TYPES = (
    "text",
    "function",
    "message",
    "function_call",
    "function_call_output",
    "reasoning",
    "tool_use",
    "tool_result",
    "thinking",
    "redacted_thinking",
    "input_text",
    "output_text",
    "json_schema",
    "ephemeral",
    "auto",
    "tool",
    "custom",
)
words = st.sampled_from([*TYPES, "user", "assistant", "system", "tool"]) | text
node = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(("type", "role", "name", "id", "call_id", "tool_use_id", "ttl", "signature"), words | anything),
        **dict.fromkeys(("text", "arguments", "input", "schema", "parameters", "input_schema", "output"), anything),
        "content": text
        | anything
        | st.lists(st.fixed_dictionaries({"type": words, "text": text | anything}), max_size=2),
        "function": st.fixed_dictionaries({}, optional={"name": words, "arguments": text, "parameters": anything}),
        "cache_control": st.fixed_dictionaries({"type": words}),
    },
)
values = anything | node | st.lists(node, max_size=3) | st.lists(words, max_size=3) | words
bodies = st.dictionaries(st.sampled_from(FIELDS), values, max_size=6)


def check(dialect: Dialect, body: bytes) -> None:
    try:
        request = dialect.parse(body, LIMITS)
    except BadRequest as error:
        assert error.message
    else:
        assert isinstance(request, GenerateRequest) and (request.messages or request.prompts or request.previous)


@every_dialect
@FUZZ
@given(body=bodies, messages=st.lists(node, max_size=3))
def test_any_json(dialect: Dialect, body: dict[str, Any], messages: list[Any]) -> None:
    """Any JSON gives a request or a BadRequest, nothing else."""
    check(dialect, json.dumps(body).encode("utf-8", "surrogatepass"))
    check(
        dialect,
        json.dumps({"max_tokens": 1, **body, "messages": messages, "input": messages}).encode("utf-8", "surrogatepass"),
    )


@every_dialect
@FUZZ
@given(body=st.binary(max_size=60) | anything.map(lambda value: json.dumps(value).encode()))
def test_any_bytes(dialect: Dialect, body: bytes) -> None:
    """Any bytes, likewise."""
    check(dialect, body)
