"""For any output, a stream says the same as the whole response."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from foreword.api.dialects.choice_reader import ChoiceReader
from foreword.api.dialects.decode import Limits
from foreword.api.dialects.dialect_writers import WRITERS
from foreword.api.dialects.registry import DIALECTS
from foreword.api.dialects.writer import ChoiceOutput, ResponseHead, Writer
from foreword.api.output import CallArguments, CallStart, ChoiceDelta, Piece, Reasoning, Text, Usage
from foreword.api.request import DialectName, GenerateRequest

USAGE = Usage(prompt_tokens=9, output_tokens=4, cached_tokens=3)
BODIES: dict[DialectName, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "x"}]},
    "completions": {"prompt": "x"},
    "responses": {"input": "x"},
    "messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9},
}
texts = st.text(min_size=1, max_size=5)
spoken = st.lists(st.builds(Text, texts) | st.builds(Reasoning, texts), max_size=6)
arguments = st.lists(texts, max_size=3)


@st.composite
def outputs(draw: st.DrawFn) -> list[ChoiceDelta]:
    """Text and reasoning in any order, then calls, cut into deltas anywhere."""
    pieces: list[Piece] = list(draw(spoken))
    calls = draw(st.lists(arguments, max_size=3))
    for index, parts in enumerate(calls):
        pieces.append(CallStart(index, f"call_{index}", "f"))
        pieces += [CallArguments(index, part) for part in parts]
    deltas = []
    while pieces:
        size = draw(st.integers(1, len(pieces)))
        deltas.append(ChoiceDelta(0, tuple(pieces[:size]), (1,)))
        pieces = pieces[size:]
    reason = "tool_calls" if calls else draw(st.sampled_from(["stop", "length"]))
    return [*deltas, ChoiceDelta(0, finish_reason=reason)]


def make(dialect: DialectName) -> tuple[GenerateRequest, Writer]:
    request = DIALECTS[dialect].parse(json.dumps(BODIES[dialect]).encode(), Limits())
    request = msgspec.structs.replace(request, stream=True, include_usage=True)
    return request, WRITERS[request.dialect](request, ResponseHead("x_1", "nano", 0))


def whole(dialect: DialectName, deltas: Sequence[ChoiceDelta]) -> dict[str, Any]:
    _, writer = make(dialect)
    for delta in deltas:
        writer.add(delta)
    return dict(json.loads(json.dumps(writer.whole(USAGE))))


def streamed(dialect: DialectName, deltas: Sequence[ChoiceDelta]) -> list[dict[str, Any]]:
    """The data of all events."""
    _, writer = make(dialect)
    raw = b"".join(
        [*writer.start(Usage()), *(one for delta in deltas for one in writer.events(delta)), writer.end(USAGE)]
    )
    data = [event.split(b"data: ", 1)[1] for event in raw.split(b"\n\n") if event]
    return [json.loads(one) for one in data if one != b"[DONE]"]


def blocks(deltas: Sequence[ChoiceDelta]) -> list[tuple[str, str, str]]:
    choice = ChoiceOutput()
    for delta in deltas:
        choice.add(delta)
    return [(block.kind, block.id, block.text) for block in choice.blocks]


@settings(deadline=None)
@given(outputs())
def test_chat(deltas: list[ChoiceDelta]) -> None:
    """A reader of the stream gets what a reader of the whole response gets."""
    reader, other = ChoiceReader(), ChoiceReader()
    read = [delta for event in streamed("chat", deltas) for delta in reader.read_deltas(json.dumps(event).encode())]
    at_once = [other.read_whole(json.dumps(whole("chat", deltas)).encode())]
    kinds = ("text", "reasoning", "call")
    for kind in kinds:
        found, expected, given_ = (
            [(one[1], one[2]) for one in blocks(each) if one[0] == kind] for each in (read, at_once, deltas)
        )
        if kind == "call":
            assert found == expected == given_
        else:
            assert "".join(text for _, text in found) == "".join(text for _, text in given_)
            assert "".join(text for _, text in expected) == "".join(text for _, text in given_)
    assert reader.usage == other.usage == USAGE
    assert read[-1].finish_reason == at_once[-1].finish_reason == deltas[-1].finish_reason


@settings(deadline=None)
@given(outputs())
def test_completions(deltas: list[ChoiceDelta]) -> None:
    """The texts of the chunks are the text of the response."""
    chunks = streamed("completions", deltas)
    text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
    assert text == whole("completions", deltas)["choices"][0]["text"]


@settings(deadline=None)
@given(outputs())
def test_messages(deltas: list[ChoiceDelta]) -> None:
    """Blocks are opened, filled and closed one after the other, and are those of the whole message."""
    found: list[dict[str, Any]] = []
    is_open = False
    for event in streamed("messages", deltas):
        if event["type"] == "content_block_start":
            assert not is_open and event["index"] == len(found)
            found.append({**event["content_block"], "json": ""})
            is_open = True
        elif event["type"] == "content_block_delta":
            assert is_open and event["index"] == len(found) - 1
            (name, text), *_ = ((key, value) for key, value in event["delta"].items() if key != "type")
            key = "json" if name == "partial_json" else name
            found[-1][key] += text
        elif event["type"] == "content_block_stop":
            assert is_open and event["index"] == len(found) - 1
            is_open = False
    message = whole("messages", deltas)
    kept = [{key: value for key, value in block.items() if key not in ("json", "input")} for block in found]
    assert not is_open and kept == [
        {key: value for key, value in block.items() if key != "input"} for block in message["content"]
    ]
    assert [one["json"] for one in found] == [text if kind == "call" else "" for kind, _, text in blocks(deltas)]


@settings(deadline=None)
@given(outputs())
def test_responses(deltas: list[ChoiceDelta]) -> None:
    """Items are added, filled and done one after the other; the last event has the whole response."""
    events = streamed("responses", deltas)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    added = [event["item"]["id"] for event in events if event["type"] == "response.output_item.added"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    last, expected = events[-1]["response"], whole("responses", deltas)
    assert last == expected and done == expected["output"] and added == [item["id"] for item in done]
    for number, item in enumerate(done):
        texts = [
            event["delta"] for event in events if event["type"].endswith(".delta") and event["output_index"] == number
        ]
        assert "".join(texts) == (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])
