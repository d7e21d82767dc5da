"""Grammars that force a model to call tools, in the format in which it writes calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from foreword.api.request import Tool, ToolChoice
from foreword.api.tools import formats as f
from foreword.api.tools.detection import AnswerFormats
from foreword.engine.request import StructuredOutput
from foreword.errors import BadRequest

# The id of a token in the model's vocabulary, None if the text is no token.
TokenId = Callable[[str], int | None]

# One space, or a new line with its indent: a model could fill its budget with more.
_WHITESPACE: Final = r"( |\n[ \t]{0,32})?"
_NEW_LINE: Final = "\n"
# Parameters of a tool whose schema names none.
_MOST_PARAMETERS: Final = 64
# Calls of one answer.
_MOST_CALLS: Final = 16


def forced_calls(
    tools: Sequence[Tool],
    choice: ToolChoice,
    formats: AnswerFormats,
    token_id: TokenId,
    *,
    parallel: bool,
    reasoning_open: bool,
) -> StructuredOutput:
    """The grammar of an answer that calls `choice.name`, or at least one of the tools, with valid arguments.

    Reasoning may precede the calls where the model has it, and must be closed if the prompt has opened it.

    Raises BadRequest for a model whose format of calls cannot be forced.
    """
    chosen = [tool for tool in tools if choice.mode != "named" or tool.name == choice.name]
    write = _FORMATS.get(formats.tools or "")
    if write is None:
        raise BadRequest(f"tool_choice: calls in the format {formats.tools!r} cannot be forced", param="tool_choice")
    rules = write(chosen, _Markers(token_id), parallel and choice.mode != "named")
    thought = "" if formats.tools == "harmony" else _thought(formats, token_id, reasoning_open)
    return StructuredOutput("grammar", f"start: {'thought ' if thought else ''}calls\n{thought}{rules}\n")


def after_reasoning(output: StructuredOutput, formats: AnswerFormats, token_id: TokenId) -> StructuredOutput:
    """The same output behind reasoning that the prompt has opened. Only for JSON, which grammars can contain."""
    if output.kind not in ("json_object", "json_schema"):
        return output
    schema = {"type": "object"} if output.kind == "json_object" else output.value
    thought = _thought(formats, token_id, True)
    return StructuredOutput(
        "grammar", f"start: thought answer\n{thought}answer: {_json(schema, strict=output.strict)}\n"
    )


class _Markers:
    """Markers as grammars name them: by the text, or by the special token that has this text."""

    def __init__(self, token_id: TokenId) -> None:
        self._token_id = token_id

    def __call__(self, marker: str) -> str:
        token = self._token_id(marker)
        text = json.dumps(marker)
        return text if token is None else f"({text} | <[{token}]>)"


def _thought(formats: AnswerFormats, token_id: TokenId, is_open: bool) -> str:
    """The rule of the reasoning, which ends with its closing tag. It is optional where the prompt has not opened it."""
    if formats.reasoning is None:
        return ""
    tags, marker = f.REASONING_TAGS[formats.reasoning], _Markers(token_id)
    closing = f"closing[lazy]: /(?s:.*)/ {json.dumps(tags.close)}\n"
    token = token_id(tags.close)
    if token is not None:
        closing = closing.replace("closing[lazy]", "closing_text[lazy]")
        closing += f"closing: closing_text | /(?s:.*)/ <[{token}]>\n"
    inner = r"closing /\s{0,4}/"
    if is_open:
        return f"thought: {inner}\n{closing}"
    return f"thought: ({marker(tags.open)} {inner})?\n{closing}"


def _json(schema: Any, *, strict: bool) -> str:
    """A schema inside of a grammar. Options of the compiler are the engine's, not the client's."""
    own = {name: value for name, value in schema.items() if name != "x-guidance"} if isinstance(schema, Mapping) else {}
    options = {"whitespace_pattern": _WHITESPACE, "lenient": not strict}
    return "%json " + json.dumps({"x-guidance": options, **(own or {"type": "object"})})


def _objects(tools: Sequence[Tool], key: str) -> str:
    """The rule `call`: one of the tools as a JSON object, its arguments under `key`."""
    names = " | ".join(f"call_{number}" for number in range(len(tools)))
    lines = [f"call: {names}"]
    for number, tool in enumerate(tools):
        head = json.dumps(f'{{"name": {json.dumps(tool.name)}, "{key}": ')
        lines.append(f'call_{number}: {head} arguments_{number} "}}"')
        lines.append(f"arguments_{number}: {_json(tool.parameters, strict=tool.strict)}")
    return "\n".join(lines)


def _more(separator: str, call: str, parallel: bool) -> str:
    return f" ({separator} {call}){{0,{_MOST_CALLS - 1}}}" if parallel else ""


def _hermes(tools: Sequence[Tool], marker: _Markers, parallel: bool) -> str:
    one = f'{marker(f.HERMES_OPEN)} "\\n" call "\\n" {marker(f.HERMES_CLOSE)}'
    more = _more('"\\n"', "one", parallel)
    return f"calls: one{more}\none: {one}\n{_objects(tools, f.HERMES_ARGUMENTS)}"


def _llama(tools: Sequence[Tool], marker: _Markers, parallel: bool) -> str:
    return f"calls: call{_more(json.dumps(f.LLAMA_SEPARATOR + ' '), 'call', parallel)}\n{_objects(tools, f.LLAMA_ARGUMENTS)}"


def _mistral(tools: Sequence[Tool], marker: _Markers, parallel: bool) -> str:
    more = _more('", "', "call", parallel)
    return f'calls: {marker(f.MISTRAL_CALLS)} "[" call{more} "]"\n{_objects(tools, f.HERMES_ARGUMENTS)}'


def _harmony(tools: Sequence[Tool], marker: _Markers, parallel: bool) -> str:
    """One call, which may follow an analysis. The token that ends a call ends the answer."""
    channel, message = marker(f.HARMONY_CHANNEL), marker(f.HARMONY_MESSAGE)
    again = f'{marker(f.HARMONY_END)} {marker(f.HARMONY_START)} "assistant"'
    lines = [
        f'calls: ({channel} "analysis" {message} /(?s:.*)/ {again})? call',
        "call: " + " | ".join(f"call_{number}" for number in range(len(tools))),
    ]
    for number, tool in enumerate(tools):
        head = json.dumps(f"commentary to={f.HARMONY_FUNCTIONS}{tool.name} ")
        lines.append(
            f'call_{number}: {channel} {head} {marker(f.HARMONY_CONSTRAIN)} "json" {message} arguments_{number}'
        )
        lines.append(f"arguments_{number}: {_json(tool.parameters, strict=tool.strict)}")
    return "\n".join(lines)


def _qwen3_coder(tools: Sequence[Tool], marker: _Markers, parallel: bool) -> str:
    """Parameters come in the order of the schema. Of text, which the format does not quote, only choices are checked."""
    more = _more('"\\n"', "one", parallel)
    names = " | ".join(f"call_{number}" for number in range(len(tools)))
    one = f'{marker(f.HERMES_OPEN)} "\\n" ({names}) {json.dumps(f.CODER_FUNCTION_CLOSE)} "\\n" {marker(f.HERMES_CLOSE)}'
    close, name = json.dumps(f"\n{f.CODER_PARAMETER_CLOSE}\n"), "/[A-Za-z_][A-Za-z0-9_.-]{0,63}/"
    lines = [
        f"calls: one{more}",
        f"one: {one}",
        f"text_value[lazy]: /(?s:.*)/ {close}",
        f"any_parameter: {json.dumps(f.CODER_PARAMETER)} {name} {json.dumps('>' + _NEW_LINE)} text_value",
    ]
    for number, tool in enumerate(tools):
        lines += _coder_call(number, tool, close)
    return "\n".join(lines)


def _coder_call(number: int, tool: Tool, close: str) -> list[str]:
    """The rules of the calls of one tool."""
    head = json.dumps(f"{f.CODER_FUNCTION}{tool.name}>\n")
    properties, required = tool.parameters.get("properties"), tool.parameters.get("required")
    needed = required if isinstance(required, list | tuple) else ()
    if not isinstance(properties, Mapping) and not needed:
        return [f"call_{number}: {head} any_parameter{{0,{_MOST_PARAMETERS}}}"]
    named = dict(properties) if isinstance(properties, Mapping) else {}
    schemas = named | {key: {} for key in map(str, needed) if key not in named}
    rules, parts = [], []
    for place, (key, schema) in enumerate(schemas.items()):
        if ">" in key:
            raise BadRequest(f"tool_choice: this model cannot write the parameter {key!r}", param="tools")
        rule = f"parameter_{number}_{place}"
        value = _coder_value(tool, schema, close)
        rules.append(f"{rule}: {json.dumps(f'{f.CODER_PARAMETER}{key}>' + _NEW_LINE)} {value}")
        parts.append(rule if key in needed else f"{rule}?")
    return [f"call_{number}: {head} {' '.join(parts)}", *rules]


def _coder_value(tool: Tool, schema: Any, close: str) -> str:
    """A value and what closes it: plain text where the parser reads text, otherwise JSON."""
    if not _is_text(schema):
        defined = {name: tool.parameters[name] for name in ("$defs", "definitions") if name in tool.parameters}
        return f"{_json({**defined, **schema}, strict=tool.strict)} {close}"
    choices = schema.get("enum") if isinstance(schema, Mapping) else None
    if isinstance(choices, list | tuple) and choices and all(isinstance(one, str) for one in choices):
        return f"({' | '.join(map(json.dumps, choices))}) {close}"
    return "text_value"


def _is_text(schema: Any) -> bool:
    """Whether the parser reads the parameter's value as plain text, or cannot tell."""
    kinds = schema.get("type") if isinstance(schema, Mapping) else None
    return set((kinds,) if isinstance(kinds, str) else kinds or ()) <= {"string"}


_FORMATS: Final[dict[str, Callable[[Sequence[Tool], _Markers, bool], str]]] = {
    "hermes": _hermes,
    "llama3_json": _llama,
    "mistral": _mistral,
    "harmony": _harmony,
    "qwen3_coder": _qwen3_coder,
}
