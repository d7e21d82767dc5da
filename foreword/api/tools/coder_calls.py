"""Tool calls of Qwen3-Coder: `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`.

The model writes values as plain text; the tool's JSON schema says which of them are text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from foreword.api.request import Tool
from foreword.api.tools.formats import (
    CODER_FUNCTION,
    CODER_FUNCTION_CLOSE,
    CODER_PARAMETER,
    CODER_PARAMETER_CLOSE,
    HERMES_CLOSE,
    HERMES_OPEN,
)
from foreword.api.tools.json_calls import NAME_CHARACTERS, JsonCalls
from foreword.api.tools.pieces import PieceCollector
from foreword.api.tools.reader import Malformed, Reading, TextReader

_LITERALS = {"True": "true", "False": "false", "None": "null"}


def qwen3_coder(reader: TextReader, pieces: PieceCollector, tools: Sequence[Tool] = ()) -> Reading[None]:
    schemas = {tool.name: tool.parameters for tool in tools}
    calls = JsonCalls(reader, pieces)
    markers: tuple[str, ...] = (HERMES_OPEN, CODER_FUNCTION)
    while marker := (yield from reader.until(markers, pieces.text)):
        if marker == HERMES_CLOSE:
            pieces.marker()
            markers = (HERMES_OPEN, CODER_FUNCTION)
        else:
            yield from calls.attempt(_call(calls, marker, schemas), marker)
            markers = (HERMES_OPEN, CODER_FUNCTION, HERMES_CLOSE) if calls.started else (HERMES_OPEN, CODER_FUNCTION)


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
