"""Reading the engine's deltas: text, reasoning and calls, also where another server has sent the first part."""

from __future__ import annotations

from pathlib import Path

import pytest

import foreword
from foreword.api.output import Piece, Text
from foreword.api.request import GenerateRequest, Message, Tool
from foreword.api.tools.parser import AnswerFormats
from foreword.api.tools.reader import joined
from foreword.engine.request import Delta, Request, SamplingParams
from foreword.engine.sequence import OutputText
from foreword.server.job import DeltaReader, reader_for
from foreword.tokens.tokenizer import Tokenizer

FORMATS = AnswerFormats("hermes", "think")
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "héllo"}}\n</tool_call>'
ANSWER = f"<think>\nI think.\n</think>\nSome text.\n{CALL}\n{CALL}"
ASKED = GenerateRequest("chat", messages=(Message("user", "hi"),), tools=(Tool("f"),))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(str(Path(foreword.__file__).parent / "models" / "stdlib-nano"))


def deltas(tokenizer: Tokenizer, request: Request, answer: str) -> list[Delta]:
    """Makes one delta per token, as the engine does."""
    text = OutputText(tokenizer, request)
    tokens = tokenizer.encode(answer, add_special_tokens=False)
    made = [Delta(request.id, 0, (token,), text.push(token)[0]) for token in tokens]
    return [*made, Delta(request.id, 0, (), text.close()[0], finish_reason="stop")]


def read(reader: DeltaReader, some: list[Delta]) -> list[Piece]:
    return [piece for delta in some for piece in reader.read(delta).pieces]


def shape(pieces: list[Piece]) -> list[tuple[type[Piece], str]]:
    """Content of the pieces, without the ids of calls, which are random."""
    return [(type(piece), getattr(piece, "text", getattr(piece, "name", ""))) for piece in joined(pieces)]


@pytest.mark.parametrize("stop", [(), ("\nS!", "</tool_call>!")])
def test_a_migrated_answer_is_read_on(tokenizer: Tokenizer, stop: tuple[str, ...]) -> None:
    """After any token another reader continues: together they give what one reader gives."""
    request = Request("r", tuple(tokenizer.encode("hi")), SamplingParams(stop=stop))
    every = deltas(tokenizer, request, ANSWER)
    whole = read(reader_for(tokenizer, ASKED, FORMATS, request, 0), every)
    assert [kind.__name__ for kind, _ in shape(whole)] == ["Reasoning", "Text", *["CallStart", "CallArguments"] * 2]
    for cut in range(len(every)):
        first = read(reader_for(tokenizer, ASKED, FORMATS, request, 0), every[:cut])
        second = reader_for(tokenizer, ASKED, FORMATS, request, 0)
        second.resume([token for delta in every[:cut] for token in delta.tokens])
        assert shape([*first, *read(second, every[cut:])]) == shape(whole), cut


def test_one_call_only(tokenizer: Tokenizer) -> None:
    """Without parallel calls, further calls are dropped; the reason to stop is still the call."""
    request = Request("r", tuple(tokenizer.encode("hi")), SamplingParams())
    single = GenerateRequest("chat", messages=ASKED.messages, tools=ASKED.tools, parallel_tool_calls=False)
    reader = reader_for(tokenizer, single, FORMATS, request, 0)
    every = deltas(tokenizer, request, ANSWER)
    found = [reader.read(delta) for delta in every]
    starts = [piece for delta in found for piece in delta.pieces if type(piece).__name__ == "CallStart"]
    assert len(starts) == 1 and found[-1].finish_reason == "tool_calls"
    assert 0 < reader.reasoning_tokens < len(every) / 2


def test_completions_are_not_parsed(tokenizer: Tokenizer) -> None:
    """The text of a completion is passed on as it is, whatever markers it contains."""
    request = Request("r", tuple(tokenizer.encode("hi")), SamplingParams())
    asked = GenerateRequest("completions", prompts=("hi",))
    found = read(reader_for(tokenizer, asked, FORMATS, request, 0), deltas(tokenizer, request, ANSWER))
    assert joined(found) == [Text(ANSWER)]
