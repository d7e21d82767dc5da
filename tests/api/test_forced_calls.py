"""Grammars that force calls of tools: what they accept is what the parsers read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken
from tokenizers import Tokenizer as RustTokenizer

import foreword
from foreword.api.output import CallArguments, CallStart, Reasoning
from foreword.api.request import Tool, ToolChoice
from foreword.api.tools.constraint import after_reasoning, forced_calls
from foreword.api.tools.parser import AnswerFormats, parse
from foreword.errors import BadRequest
from foreword.tokens.structured_output import StructuredOutput

WEATHER = Tool("get_weather", "", {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]})
TOOLS = (WEATHER, Tool("add"))
CALL = '{"name": "get_weather", "arguments": {"city": "Rome"}}'
HERMES = f"<tool_call>\n{CALL}\n</tool_call>"
LLAMA = CALL.replace("arguments", "parameters")
HARMONY = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Rome"}'
ANALYSIS = "<|channel|>analysis<|message|>so\nthen<|end|><|start|>assistant"
CODER = "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>"
SPECIAL = ("[TOOL_CALLS]", "<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|constrain|>")
REQUIRED = ToolChoice("required")

Accepts = Callable[[StructuredOutput, str], bool]


@pytest.fixture(scope="module")
def tokenizer() -> RustTokenizer:
    """The embedded model's, with the markers of all formats as tokens: special ones, as in those models, and others."""
    found = RustTokenizer.from_file(str(Path(foreword.__file__).parent / "models" / "stdlib-nano" / "tokenizer.json"))
    found.add_tokens([AddedToken(text, special=False, normalized=False) for text in ("<tool_call>", "</think>")])
    found.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    return found


@pytest.fixture(scope="module")
def accepts(tokenizer: RustTokenizer) -> Accepts:
    vocabulary = LLTokenizer(tokenizer.to_str(), n_vocab=tokenizer.get_vocab_size(), eos_token=0)

    def whether(output: StructuredOutput, text: str) -> bool:
        matcher = LLMatcher(vocabulary, LLMatcher.grammar_from_lark(output.value))
        assert not matcher.is_error(), matcher.get_error()
        tokens = tokenizer.encode(text, add_special_tokens=False).ids
        return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())

    return whether


CASES = [
    (AnswerFormats("hermes"), HERMES, False),
    (AnswerFormats("hermes"), f"{HERMES}\n{HERMES}", False),
    (AnswerFormats("hermes"), '<tool_call>\n{"name": "add", "arguments": {"x": [1, "a"]}}\n</tool_call>', False),
    (AnswerFormats("hermes", "think"), HERMES, False),
    (AnswerFormats("hermes", "think"), f"<think>\nhm < 3\n</think>\n\n{HERMES}", False),
    (AnswerFormats("hermes", "think"), f"hm\n</think>\n\n{HERMES}", True),
    (AnswerFormats("llama3_json"), LLAMA, False),
    (AnswerFormats("llama3_json"), f"{LLAMA}; {LLAMA}", False),
    (AnswerFormats("mistral"), f"[TOOL_CALLS][{CALL}]", False),
    (AnswerFormats("mistral"), f"[TOOL_CALLS][{CALL}, {CALL}]", False),
    (AnswerFormats("qwen3_coder"), CODER, False),
    (AnswerFormats("qwen3_coder"), f"{CODER}\n{CODER.replace('get_weather', 'add')}", False),
    (AnswerFormats("qwen3_coder", "think"), f"hm\n</think>\n\n{CODER}", True),
    (AnswerFormats("harmony"), HARMONY, False),
    (AnswerFormats("harmony"), ANALYSIS + HARMONY, False),
]


@pytest.mark.parametrize(("formats", "text", "is_open"), CASES)
def test_what_is_forced_can_be_parsed(
    accepts: Accepts, tokenizer: RustTokenizer, formats: AnswerFormats, text: str, is_open: bool
) -> None:
    """Each accepted answer is one or more calls with valid arguments, and no text but reasoning."""
    output = forced_calls(TOOLS, REQUIRED, formats, tokenizer.token_to_id, parallel=True, reasoning_open=is_open)
    assert accepts(output, text)
    found = parse(text, formats, TOOLS, reasoning_open=is_open)
    assert any(isinstance(piece, CallStart) for piece in found)
    assert all(isinstance(piece, CallStart | CallArguments | Reasoning) for piece in found)
    last = max(piece.index for piece in found if isinstance(piece, CallStart))
    arguments = "".join(p.text for p in found if isinstance(p, CallArguments) and p.index == last)
    assert isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize(
    "text",
    [
        "hello",
        HERMES[:-1],
        HERMES.replace("get_weather", "wipe_disk"),
        HERMES.replace("city", "town"),
        HERMES.replace('"Rome"', "7"),
        f"{HERMES} and more",
    ],
)
def test_nothing_else_is_accepted(accepts: Accepts, tokenizer: RustTokenizer, text: str) -> None:
    """Text, unknown tools and arguments that the schema does not allow are not accepted."""
    formats = AnswerFormats("hermes")
    assert not accepts(
        forced_calls(TOOLS, REQUIRED, formats, tokenizer.token_to_id, parallel=True, reasoning_open=False), text
    )


def test_one_call_of_one_tool(accepts: Accepts, tokenizer: RustTokenizer) -> None:
    """A named tool is the only one; without parallel calls there is one call."""
    formats, named = AnswerFormats("hermes"), ToolChoice("named", "add")
    only = forced_calls(TOOLS, named, formats, tokenizer.token_to_id, parallel=True, reasoning_open=False)
    assert not accepts(only, HERMES)
    single = forced_calls(TOOLS, REQUIRED, formats, tokenizer.token_to_id, parallel=False, reasoning_open=False)
    assert accepts(single, HERMES) and not accepts(single, f"{HERMES}\n{HERMES}")


def test_reasoning_that_is_open_must_be_closed(accepts: Accepts, tokenizer: RustTokenizer) -> None:
    """Where the prompt ends inside the reasoning, neither calls nor JSON come before its end."""
    formats = AnswerFormats("hermes", "think")
    calls = forced_calls(TOOLS, REQUIRED, formats, tokenizer.token_to_id, parallel=True, reasoning_open=True)
    assert not accepts(calls, HERMES)
    schema = StructuredOutput("json_schema", {"type": "object", "properties": {"a": {"type": "integer"}}})
    answer = after_reasoning(schema, formats, tokenizer.token_to_id)
    assert accepts(answer, 'so\n</think>\n\n{"a": 3}')
    assert not accepts(answer, '{"a": 3}') and not accepts(answer, 'so\n</think>\n\n{"a": "x"}')


def test_formats_that_cannot_be_forced(tokenizer: RustTokenizer) -> None:
    """A model whose calls have no such grammar is refused, not left to chance."""
    with pytest.raises(BadRequest, match="cannot be forced"):
        forced_calls(TOOLS, REQUIRED, AnswerFormats(None), tokenizer.token_to_id, parallel=True, reasoning_open=False)


TYPED = Tool(
    "book",
    "",
    {
        "type": "object",
        "properties": {
            "note": {"type": "string"},
            "nights": {"type": "integer"},
            "kind": {"type": "string", "enum": ["single", "double"]},
            "guests": {"type": "array", "items": {"$ref": "#/$defs/guest"}},
        },
        "required": ["nights"],
        "$defs": {"guest": {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}},
    },
)


def coder_call(**values: str) -> str:
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function=book>\n{parameters}</function>\n</tool_call>"


def test_typed_values_of_qwen3_coder(accepts: Accepts, tokenizer: RustTokenizer) -> None:
    """Values that are not text are JSON of the right type, choices are held, and required parameters are not left out."""
    formats = AnswerFormats("qwen3_coder")
    output = forced_calls((TYPED,), REQUIRED, formats, tokenizer.token_to_id, parallel=False, reasoning_open=False)
    full = coder_call(note='two\nlines, "a" <b>', nights="3", kind="double", guests='[{"age": 7}]')
    assert accepts(output, full) and accepts(output, coder_call(nights="2"))
    arguments = "".join(p.text for p in parse(full, formats, (TYPED,)) if isinstance(p, CallArguments))
    assert json.loads(arguments) == {
        "note": 'two\nlines, "a" <b>',
        "nights": 3,
        "kind": "double",
        "guests": [{"age": 7}],
    }
    for wrong in (
        {"note": "x"},
        {"nights": "three"},
        {"nights": "1", "kind": "suite"},
        {"nights": "1", "guests": '[{"age": "x"}]'},
    ):
        assert not accepts(output, coder_call(**wrong))
