"""Normalisers: what they change, what they leave alone, and that each change is named."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreword.api.normalisers import AnswerMemory, Normalisers
from foreword.api.output import CallArguments, CallStart, Reasoning, Text
from foreword.errors import ConfigError


def tool(name: str, **parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def body(system: Any = "Be brief.", **fields: Any) -> dict[str, Any]:
    return {
        "model": "m",
        "messages": [{"role": "system", "content": system}, {"role": "user", "content": "Hi"}],
        **fields,
    }


def test_volatile_lines_are_dropped() -> None:
    """Lines of the system prompt that match are dropped, in texts and in parts; the same text elsewhere stays."""
    normalisers = Normalisers.make([r"^Date: "])
    for system, expected in (
        ("Date: today\nBe brief.", "Be brief."),
        ([{"type": "text", "text": "Be brief.\nDate: x"}], [{"type": "text", "text": "Be brief."}]),
    ):
        sent = body(system)
        sent["messages"].append({"role": "user", "content": "Date: stays"})
        got, header = normalisers.apply(sent)
        assert got["messages"][0]["content"] == expected
        assert got["messages"][1:] == sent["messages"][1:]
        assert header == "volatile-lines=1"
    assert normalisers.apply(body()) == (body(), "")


def test_tools_have_one_order() -> None:
    """However a client orders tools and keys, the same bytes are sent; a list in order is not touched."""
    normalisers = Normalisers.make(tools=True)
    one = [tool("b", x=1, y={"q": 1, "a": 2}), tool("a")]
    other = [tool("a"), {"function": {"parameters": {"y": {"a": 2, "q": 1}, "x": 1}, "name": "b"}, "type": "function"}]
    sent = [normalisers.apply(body(tools=tools)) for tools in (one, other)]
    assert json.dumps(sent[0][0]["tools"]) == json.dumps(sent[1][0]["tools"])
    assert sent[0][1] == sent[1][1] == "tools"
    assert normalisers.apply(sent[0][0]) == (sent[0][0], "")


def test_answers_are_restored() -> None:
    """Reasoning that a client drops and arguments that it rewrites come back as the model wrote them, in this conversation
    and for this tenant only."""
    normalisers = Normalisers.make(reasoning=True)
    pieces = [
        Reasoning("think"),
        Text("I look. "),
        CallStart(0, "i", "f"),
        CallArguments(0, '{"b": 1,'),
        CallArguments(0, ' "a": 2}'),
    ]
    normalisers.remember("tenant", body(), pieces)
    call = {"id": "i", "type": "function", "function": {"name": "f", "arguments": '{"a":2,"b":1}'}}
    sent = body()
    sent["messages"].append({"role": "assistant", "content": "I look.", "tool_calls": [call]})
    got, header = normalisers.apply(sent, "tenant")
    assert header == "answers=1"
    assert got["messages"][-1]["reasoning_content"] == "think"
    assert got["messages"][-1]["tool_calls"][0]["function"]["arguments"] == '{"b": 1, "a": 2}'
    assert sent["messages"][-1]["tool_calls"][0]["function"]["arguments"] == '{"a":2,"b":1}', (
        "the client's body is unchanged"
    )
    assert normalisers.apply(sent, "another") == (sent, "")
    other = body("Be long.")
    other["messages"].append(sent["messages"][-1])
    assert normalisers.apply(other, "tenant") == (other, "")


def test_memory_of_answers_is_bounded() -> None:
    """The oldest answers are forgotten; one that is larger than the memory is not kept."""
    memory = AnswerMemory(10_000)
    for number in range(100):
        memory.remember("t", [{"role": "user", "content": str(number)}], [Reasoning("x" * 50 * number), Text("a")])
        assert memory.size <= 10_000
    answer = {"role": "assistant", "content": "a"}
    assert memory.restore("t", [{"role": "user", "content": "0"}, answer])[1] == 0
    assert memory.restore("t", [{"role": "user", "content": "99"}, answer])[1] == 1


def test_a_wrong_pattern_is_an_error() -> None:
    """A pattern that is no regular expression is found at start."""
    with pytest.raises(ConfigError, match="regular expression"):
        Normalisers.make(["("])


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda v: (
        st.lists(v, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "text", "tool_calls", "function", "name", "arguments"]), v, max_size=4
        )
    ),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(values, values)
def test_any_body_is_accepted(messages: Any, tools: Any) -> None:
    """A body of any shape passes; only the named parts change."""
    normalisers = Normalisers.make(["1"], tools=True, reasoning=True)
    sent = {"messages": messages, "tools": tools, "other": 1}
    before = json.dumps(sent)
    normalisers.remember("t", sent, [Reasoning("r")])
    got, header = normalisers.apply(sent, "t")
    assert json.dumps(sent) == before
    assert got["other"] == 1 and (got is sent or header)
