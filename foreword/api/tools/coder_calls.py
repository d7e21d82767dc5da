"""Tool calls of Qwen3-Coder: `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`.

The model writes values as plain text; the tool's JSON schema says which of them are text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from foreword.api.request import Tool
from foreword.api.tools.formats import (
    CODER_FUNCTION,
    CODER_FUNCTION_CLOSE,
    CODER_PARAMETER,
    CODER_PARAMETER_CLOSE,
    HERMES_CLOSE,
    HERMES_OPEN,
    Markers,
    ToolFormat,
    json_rule,
    more_calls,
)
from foreword.api.tools.json_calls import NAME_CHARACTERS, JsonCalls
from foreword.api.tools.reader import Malformed, PieceCollector, Reading, TextReader
from foreword.errors import BadRequest

_NEW_LINE: Final = "\n"
# Parameters of a tool whose schema names none.
_MOST_PARAMETERS: Final = 64
_LITERALS = {"True": "true", "False": "false", "None": "null"}


class Qwen3Coder(ToolFormat):
    def detects(self, template: str, model_type: str) -> bool:
        return CODER_FUNCTION in template

    def read(self, reader: TextReader, pieces: PieceCollector, tools: Sequence[Tool]) -> Reading[None]:
        schemas = {tool.name: tool.parameters for tool in tools}
        calls = JsonCalls(reader, pieces)
        opening = (HERMES_OPEN, CODER_FUNCTION)
        markers: tuple[str, ...] = opening
        while marker := (yield from reader.until(markers, pieces.text)):
            if marker == HERMES_CLOSE:
                pieces.marker()
                markers = opening
            else:
                yield from calls.attempt(_call(calls, marker, schemas), marker)
                markers = (*opening, HERMES_CLOSE) if calls.started else opening

    def grammar(self, tools: Sequence[Tool], marker: Markers, parallel: bool) -> str:
        """Parameters come in the order of the schema. Of text, which the format does not quote, only choices are checked."""
        more = more_calls('"\\n"', "one", parallel)
        names = " | ".join(f"call_{number}" for number in range(len(tools)))
        close_call = f'{json.dumps(CODER_FUNCTION_CLOSE)} "\\n" {marker(HERMES_CLOSE)}'
        close, name = json.dumps(f"\n{CODER_PARAMETER_CLOSE}\n"), "/[A-Za-z_][A-Za-z0-9_.-]{0,63}/"
        lines = [
            f"calls: one{more}",
            f'one: {marker(HERMES_OPEN)} "\\n" ({names}) {close_call}',
            f"text_value[lazy]: /(?s:.*)/ {close}",
            f"any_parameter: {json.dumps(CODER_PARAMETER)} {name} {json.dumps('>' + _NEW_LINE)} text_value",
        ]
        for number, tool in enumerate(tools):
            lines += _coder_call(number, tool, close)
        return "\n".join(lines)


def _call(calls: JsonCalls, marker: str, schemas: Mapping[str, Mapping[str, Any]]) -> Reading[None]:
    reader = calls.reader
    if marker == HERMES_OPEN:
        yield from reader.space()
        yield from reader.expect(CODER_FUNCTION)
    name = yield from _name(reader)
    calls.start(name)
    separator = "{"
    while (yield from reader.space()) and (yield from reader.literal(CODER_PARAMETER)):
        key = yield from _name(reader)
        calls.pieces.arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
        yield from _value(calls, _types(schemas.get(name, {}), key))
        separator = ", "
    if separator == "{":
        calls.pieces.arguments("{")
    yield from reader.expect(CODER_FUNCTION_CLOSE)
    calls.pieces.arguments("}")


def _name(reader: TextReader) -> Reading[str]:
    """A name up to `>`."""
    parts: list[str] = []
    if not (yield from reader.until((">",), parts.append)):
        raise Malformed
    name = "".join(parts).strip()
    if not name or len(name) > NAME_CHARACTERS:
        raise Malformed
    return name


def _types(schema: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """The JSON types that a parameter may have; empty if its schema does not say."""
    properties = schema.get("properties")
    field = properties.get(key) if isinstance(properties, Mapping) else None
    types = field.get("type") if isinstance(field, Mapping) else None
    return (types,) if isinstance(types, str) else tuple(types) if isinstance(types, list | tuple) else ()


def _value(calls: JsonCalls, types: tuple[str, ...]) -> Reading[None]:
    """A value without the line break after its opening tag and the one before its closing tag."""
    yield from calls.reader.literal("\n")
    if set(types) <= {"string"}:
        return (yield from _text_value(calls))
    parts: list[str] = []
    if not (yield from calls.reader.until((CODER_PARAMETER_CLOSE,), parts.append)):
        raise Malformed
    calls.pieces.arguments(_as_json("".join(parts).removesuffix("\n")))
    return None


def _text_value(calls: JsonCalls) -> Reading[None]:
    held = ""

    def sink(text: str) -> None:
        nonlocal held
        text = held + text
        held = "\n" if text.endswith("\n") else ""
        calls.pieces.arguments(json.dumps(text.removesuffix("\n"), ensure_ascii=False)[1:-1])

    calls.pieces.arguments('"')
    if not (yield from calls.reader.until((CODER_PARAMETER_CLOSE,), sink)):
        raise Malformed
    calls.pieces.arguments('"')


def _as_json(text: str) -> str:
    """The text itself where it is JSON, otherwise a JSON string."""
    stripped = _LITERALS.get(text.strip(), text.strip())
    try:
        json.loads(stripped)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    return stripped


# The grammar


def _coder_call(number: int, tool: Tool, close: str) -> list[str]:
    """The rules of the calls of one tool."""
    head = json.dumps(f"{CODER_FUNCTION}{tool.name}>\n")
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
        rules.append(f"{rule}: {json.dumps(f'{CODER_PARAMETER}{key}>' + _NEW_LINE)} {value}")
        parts.append(rule if key in needed else f"{rule}?")
    return [f"call_{number}: {head} {' '.join(parts)}", *rules]


def _coder_value(tool: Tool, schema: Any, close: str) -> str:
    """A value and what closes it: plain text where the parser reads text, otherwise JSON."""
    if not _is_text(schema):
        defined = {name: tool.parameters[name] for name in ("$defs", "definitions") if name in tool.parameters}
        return f"{json_rule({**defined, **schema}, strict=tool.strict)} {close}"
    choices = schema.get("enum") if isinstance(schema, Mapping) else None
    if isinstance(choices, list | tuple) and choices and all(isinstance(one, str) for one in choices):
        return f"({' | '.join(map(json.dumps, choices))}) {close}"
    return "text_value"


def _is_text(schema: Any) -> bool:
    """Whether the parser reads the parameter's value as plain text, or cannot tell."""
    kinds = schema.get("type") if isinstance(schema, Mapping) else None
    return set((kinds,) if isinstance(kinds, str) else kinds or ()) <= {"string"}
