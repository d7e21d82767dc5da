"""Tool calls and reasoning in streamed text: the same pieces however the text is cut, nothing lost, nothing raised."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from example_counts import examples, represented
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tool_writer import write_answer

from foreword.api.output import CallArguments, CallStart, Piece, Reasoning, Text
from foreword.api.request import Tool, ToolCall
from foreword.api.tools.parser import (
    AnswerFormats,
    AnswerParser,
    detect,
    formats_named,
    leaves_reasoning_open,
    opens_reasoning,
    parse,
)
from foreword.api.tools.reader import joined
from foreword.errors import ConfigError
from foreword.tokens.reasoning_stops import stop_finder

TOOLS = (
    Tool("get_weather", parameters={"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}),
    Tool("find.files", parameters={"properties": {"pattern": {"type": "string"}, "deep": {"type": "boolean"}}}),
)
FORMATS = {
    "hermes": AnswerFormats("hermes", "think"),
    "llama3_json": AnswerFormats("llama3_json", None),
    "mistral": AnswerFormats("mistral", "mistral_think"),
    "harmony": AnswerFormats("harmony", None),
    "qwen3_coder": AnswerFormats("qwen3_coder", "think"),
}
MARKERS = (
    *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<think>", "</think>"),
    *("[THINK]", "[/THINK]", "<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>", "<|constrain|>"),
    *("<function=f>", "<parameter=a>", "</parameter>", "</function>", " to=functions.f", "analysis", "commentary"),
    *(
        '{"name": "f"',
        ', "arguments": {',
        '"parameters": ',
        "}",
        "}}",
        "]",
        "[",
        ";",
        ",",
        '"',
        "\\",
        "null",
        "\n",
        " ",
    ),
)


def pieces_of(parser: AnswerParser, chunks: list[str]) -> list[Piece]:
    found = [piece for chunk in chunks for piece in parser.feed(chunk)]
    return joined([*found, *parser.finish()])


def parser(name: str, **options: Any) -> AnswerParser:
    ids = itertools.count()
    return AnswerParser(FORMATS[name], TOOLS, new_id=lambda: f"id{next(ids)}", **options)


def whole(name: str, text: str, **options: Any) -> list[Piece]:
    return pieces_of(parser(name, **options), [text])


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted({place % (len(text) + 1) for place in places} | {0, len(text)})
    return [text[a:b] for a, b in itertools.pairwise(ends)] or [text]


def call(index: int, name: str, arguments: str) -> list[Piece]:
    return [CallStart(index, f"id{index}", name), CallArguments(index, arguments)]


EXAMPLES: list[tuple[str, str, list[Piece]]] = [
    (
        "hermes",
        '<think>\nhm\n</think>\n\nLook:\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln }"}}\n</tool_call>',
        [Reasoning("hm"), Text("Look:"), *call(0, "get_weather", '{"city": "Köln }"}')],
    ),
    (
        "hermes",
        '<tool_call>{"arguments": {"a": [1, {}]}, "name": "f"}</tool_call>\n<tool_call>{"name": "g"}</tool_call> done',
        [*call(0, "f", '{"a": [1, {}]}'), *call(1, "g", "{}"), Text("done")],
    ),
    ("hermes", 'a <tool_call>{"nome": 1}</tool_call>', [Text('a <tool_call>{"nome": 1}</tool_call>')]),
    ("hermes", "a <tool_call> b", [Text("a <tool_call> b")]),
    ("hermes", "a <tool_ca", [Text("a <tool_ca")]),
    (
        "hermes",
        '<tool_call>\n<tool_call>{"name": "f", "arguments": {}}</tool_call>',
        [Text("<tool_call>"), *call(0, "f", "{}")],
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        call(0, "f", '{"a": 1}'),
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "x</tool_call>', call(0, "f", '{"a": "x</tool_call>')),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": 1</tool_call> next',
        [*call(0, "f", '{"a": 1'), Text("next")],
    ),
    (
        "hermes",
        '<tool_call>{"name": "\\ud800", "arguments": {}}',
        [Text('<tool_call>{"name": "\\ud800", "arguments": {}}')],
    ),
    (
        "llama3_json",
        '{"name": "get_weather", "parameters": {"city": "Rome"}}; {"name": "find.files", "parameters": {}}',
        [*call(0, "get_weather", '{"city": "Rome"}'), *call(1, "find.files", "{}")],
    ),
    (
        "llama3_json",
        '<|python_tag|>{"type": "function", "name": "any", "parameters": {"a": 1}}',
        call(0, "any", '{"a": 1}'),
    ),
    ("llama3_json", '{"name": "Bob", "parameters": {}}', [Text('{"name": "Bob", "parameters": {}}')]),
    ("llama3_json", "<|python_tag|>print(1)", [Text("<|python_tag|>print(1)")]),
    (
        "mistral",
        'Well [TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
        [Text("Well"), *call(0, "f", '{"a": 1}'), *call(1, "g", "{}")],
    ),
    (
        "mistral",
        '[THINK]so[/THINK][TOOL_CALLS]f[CALL_ID]abc[ARGS]{"a": "]"}[TOOL_CALLS]g{"b": 2}',
        [Reasoning("so"), *call(0, "f", '{"a": "]"}'), *call(1, "g", '{"b": 2}')],
    ),
    ("mistral", "[TOOL_CALLS] are tokens", [Text("[TOOL_CALLS] are tokens")]),
    (
        "harmony",
        "<|channel|>analysis<|message|>think<|end|><|start|>assistant<|channel|>commentary to=functions.f "
        '<|constrain|>json<|message|>{"a": 1}<|call|>',
        [Reasoning("think"), *call(0, "f", '{"a": 1}')],
    ),
    (
        "harmony",
        " to=functions.f<|channel|>commentary json<|message|>{}<|call|><|start|>assistant<|channel|>final<|message|>Done.",
        [*call(0, "f", "{}"), Text("Done.")],
    ),
    (
        "harmony",
        "<|channel|>commentary<|message|>Searching.<|end|><|start|>assistant<|channel|>final<|message|>Hi<|return|>",
        [Text("Searching.Hi")],
    ),
    ("harmony", "plain", [Text("plain")]),
    (
        "qwen3_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nSan\n\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "</function>\n</tool_call>",
        call(0, "get_weather", '{"city": "San\\n", "days": 3}'),
    ),
    (
        "qwen3_coder",
        "<function=find.files>\n<parameter=deep>True</parameter></function>",
        call(0, "find.files", '{"deep": true}'),
    ),
    ("qwen3_coder", "<function=f></function>", call(0, "f", "{}")),
]


@pytest.mark.parametrize(("name", "text", "expected"), EXAMPLES)
def test_examples(name: str, text: str, expected: list[Piece]) -> None:
    """Answers as these models write them, and answers that only look like calls."""
    assert whole(name, text) == expected
    assert pieces_of(parser(name), list(text)) == expected


texts = st.lists(st.one_of(st.sampled_from(MARKERS), st.text(max_size=6)), max_size=30).map("".join)
places = st.lists(st.integers(0, 10_000), max_size=20)
formats = st.sampled_from(list(FORMATS))


@settings(max_examples=examples(300), deadline=None)
@given(formats, texts, places, st.booleans())
@example("hermes", '<tool_call>{"name": "f", "arguments": {"a": ' + '"x' * 40_000, [65_530, 65_540], False)
@example("hermes", '<tool_call>{"arguments": {"a": "' + "<tool_call>" * 10_000, [65_530, 65_540], False)
def test_any_cut_gives_the_same_pieces(name: str, text: str, places: list[int], is_open: bool) -> None:
    """However a text is cut, its pieces are the same; any text is accepted."""
    expected = whole(name, text, reasoning_open=is_open)
    assert pieces_of(parser(name, reasoning_open=is_open), cut(text, places)) == expected
    if len(text) < 1_000:
        assert pieces_of(parser(name, reasoning_open=is_open), list(text)) == expected


@settings(max_examples=examples(200), deadline=None)
@given(formats, texts)
def test_text_without_calls_is_complete(name: str, text: str) -> None:
    """Where no call and no reasoning is found, the text comes out unchanged, in order, whatever markers it contains."""
    found = whole(name, text)
    if (
        all(isinstance(piece, Text) for piece in found)
        and name != "harmony"
        and not any(m in text for m in ("THINK", "think"))
    ):
        assert "".join(piece.text for piece in found if isinstance(piece, Text)) == text


json_objects = st.dictionaries(
    st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=8),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=8,
    ),
    max_size=4,
)
plain = st.text(st.characters(categories=["L", "N", "P", "Zs"], exclude_characters="<[{"), max_size=40).map(str.strip)


@settings(max_examples=examples(200), deadline=None)
@given(
    st.sampled_from(["hermes", "llama3_json", "mistral", "harmony"]),
    plain,
    plain,
    st.lists(st.tuples(st.sampled_from([tool.name for tool in TOOLS]), json_objects), max_size=3),
    places,
)
def test_written_answers_are_read_back(
    name: str, content: str, reasoning: str, made: list[tuple[str, Any]], places: list[int]
) -> None:
    """Reasoning, content and calls that are written in a model's format are read back; arguments are not rewritten."""
    calls = [
        ToolCall(f"id{i}", tool, json.dumps(value, ensure_ascii=i % 2 == 0)) for i, (tool, value) in enumerate(made)
    ]
    reasoning = reasoning if FORMATS[name].reasoning or name == "harmony" else ""
    text = write_answer(FORMATS[name], content, calls, reasoning)
    expected: list[Piece] = [Reasoning(reasoning)] if reasoning else []
    expected += [Text(content)] if content else []
    for i, made_call in enumerate(calls):
        expected += call(i, made_call.name, made_call.arguments)
    assert pieces_of(parser(name), cut(text, places)) == expected


@settings(max_examples=examples(100), deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40), st.integers(), places)
def test_values_of_coder_calls(city: str, days: int, places: list[int]) -> None:
    """Values written as text become JSON of the type that the schema gives."""
    if "</parameter>" in city or "</function>" in city:
        return
    text = write_answer(
        FORMATS["qwen3_coder"], "", [ToolCall("", "get_weather", json.dumps({"city": city, "days": days}))]
    )
    start, arguments = pieces_of(parser("qwen3_coder"), cut(text, places))
    assert isinstance(start, CallStart) and isinstance(arguments, CallArguments)
    assert json.loads(arguments.text) == {"city": city, "days": days}


def test_arguments_stream() -> None:
    """Arguments are passed on with the characters that bring them, once the name is known."""
    stream = parser("hermes")
    stream.feed('<tool_call>{"name": "f", "arguments": {"text": "')
    for word in ("one ", "two ", "three"):
        assert stream.feed(word) == [CallArguments(0, word)]


def test_half_a_marker_is_held_back() -> None:
    """The start of a marker is not shown as text before the next characters decide."""
    stream = parser("hermes")
    assert stream.feed("a <tool") == [Text("a")]
    assert stream.feed("box>") == [Text(" <toolbox>")]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "hostile",
    represented(
        [
            "<tool_call><tool_cal",
            '<tool_call>{"name": "f", "arguments": {"a": [',
            '{"arguments": {"a": "',
            "[TOOL_CALLS][{",
            "<|channel|>analysis",
            "<function=f><parameter=a>\n<",
            "<think></think> \n \n",
            "\\",
        ],
        '{"arguments": {"a": "',
        "<|channel|>analysis",
    ),
)
def test_each_character_is_looked_at_a_few_times(name: str, hostile: str) -> None:
    """The text that a parser looks at again does not grow with the text: the work is linear."""
    stream = parser(name)
    again = 0
    for char in hostile * (20_000 // len(hostile)):
        stream.feed(char)
        again = max(again, stream.buffered)
    assert again < 20


@pytest.mark.parametrize(
    ("template", "model_type", "expected"),
    [
        ("<tools></tools> <tool_call> <think> </think>", "qwen3", AnswerFormats("hermes", "think")),
        ("<function=example> <tool_call>", "qwen3_moe", AnswerFormats("qwen3_coder", None)),
        ("[TOOL_CALLS] [AVAILABLE_TOOLS]", "mistral", AnswerFormats("mistral", None)),
        ("<|python_tag|> <|start_header_id|>", "llama", AnswerFormats("llama3_json", None)),
        ("<|channel|>", "gpt_oss", AnswerFormats("harmony", None)),
        ("<|im_start|>", "qwen2", AnswerFormats(None, None)),
    ],
)
def test_detection(template: str, model_type: str, expected: AnswerFormats) -> None:
    """The formats are seen in the chat template."""
    assert detect(template, model_type) == expected


def test_names_of_formats() -> None:
    """An unknown name is an error that lists the known ones."""
    assert formats_named("mistral", "think") == AnswerFormats("mistral", "think")
    with pytest.raises(ConfigError, match="hermes"):
        formats_named("hermés", None)


def test_reasoning_that_the_prompt_opened() -> None:
    """Where the prompt ends with the opening tag, the answer starts inside the reasoning, and may never leave it."""
    assert opens_reasoning("<|im_start|>assistant\n<think>\n", "think")
    assert whole("hermes", "so\n</think>\n\nyes", reasoning_open=True) == [Reasoning("so"), Text("yes")]
    assert whole("hermes", "so and", reasoning_open=True) == [Reasoning("so and")]
    assert parse("<think>a</think>b", AnswerFormats(None, "think")) == [Reasoning("a"), Text("b")]


def test_reasoning_that_a_continued_message_leaves_open() -> None:
    """A message that begins with reasoning and does not end it is continued with reasoning; a tag in its text is text."""
    assert leaves_reasoning_open("<think>\nLet me", "think") and leaves_reasoning_open(" <think>", "think")
    assert not leaves_reasoning_open("<think>a</think>b", "think")
    assert not leaves_reasoning_open("write <think> first", "think")
    assert not leaves_reasoning_open("<think>", None)


@pytest.mark.parametrize(
    ("formats", "is_open", "text", "stop", "shown"),
    [
        (AnswerFormats(None, "think"), False, "<think>a.b</think>c.d", ".", "<think>a.b</think>c"),
        (AnswerFormats("hermes", "think"), True, "a.b</think>c.d", ".", "a.b</think>c"),
        (AnswerFormats(None, "mistral_think"), False, "[THINK]a.b[/THINK]c.d", ".", "[THINK]a.b[/THINK]c"),
        (AnswerFormats(None, "think"), False, "a.b", ".", "a"),
        (AnswerFormats("hermes", None), False, "<think>a.b", ".", "<think>a"),
        (
            AnswerFormats("harmony", None),
            False,
            "<|channel|>analysis<|message|>a<b<|end|><|start|>assistant<|channel|>final<|message|>c<d",
            "<",
            "<|channel|>analysis<|message|>a<b<|end|><|start|>assistant<|channel|>final<|message|>c",
        ),
    ],
)
def test_where_stop_strings_count(formats: AnswerFormats, is_open: bool, text: str, stop: str, shown: str) -> None:
    """Stop strings count in the answer of a model, not in the reasoning before it, in each format."""
    finder = stop_finder([stop], include=False, reasoning=formats.stops_behind(is_open))
    assert "".join(finder.push(letter)[0] for letter in text[: len(shown) + 1]) == shown
