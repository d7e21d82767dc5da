"""Structured output as a grammar of llguidance: sizes are checked first, then the text is written."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from llguidance import LLMatcher

from foreword.engine.request import MAX_CHOICES, MAX_FORMAT_CHARACTERS, MAX_FORMAT_DEPTH, StructuredOutput
from foreword.errors import BadRequest

# The parsers of grammars and of regular expressions call themselves for each level of brackets.
_MAX_BRACKETS: Final = 100
# One space, or a new line with its indent: a model could fill its budget with more.
_JSON_OPTIONS: Final = {"whitespace_pattern": r"( |\n[ \t]{0,32})?"}


def grammar_text(output: StructuredOutput) -> str:
    """The grammar, as `LLMatcher` reads it. Raises BadRequest for a value of the wrong type or beyond the limits."""
    return _WRITERS[output.kind](output)


def _json_object(output: StructuredOutput) -> str:
    return _from_schema({"type": "object"}, strict=True)


def _json_schema(output: StructuredOutput) -> str:
    schema = output.value
    if not isinstance(schema, Mapping | bool):
        raise BadRequest("a JSON schema must be an object", param="response_format")
    return _from_schema(schema, strict=output.strict)


def _from_schema(schema: Mapping[str, Any] | bool, *, strict: bool) -> str:
    check_schema(schema)
    whole = {"x-guidance": {**_JSON_OPTIONS, "lenient": not strict}, **(_without_options(schema))}
    return str(LLMatcher.grammar_from_json_schema(json.dumps(whole)))


def _without_options(schema: Mapping[str, Any] | bool) -> dict[str, Any]:
    """A schema without options of the compiler: those are the engine's, not the client's."""
    if isinstance(schema, bool):
        return {} if schema else {"enum": []}
    return {name: value for name, value in schema.items() if name != "x-guidance"}


def check_schema(schema: object) -> None:
    """Raises BadRequest for a schema that is too large or too deep to be compiled."""
    size = 0
    for depth, text in _texts(schema):
        size += len(text) + 1
        if depth > MAX_FORMAT_DEPTH:
            raise BadRequest(f"a JSON schema may be nested {MAX_FORMAT_DEPTH} levels deep", param="response_format")
        if size > MAX_FORMAT_CHARACTERS:
            raise BadRequest(
                f"a JSON schema may have at most {MAX_FORMAT_CHARACTERS} characters", param="response_format"
            )


def _texts(schema: object) -> Iterator[tuple[int, str]]:
    """All keys and values of a JSON value, with the depth of the object or array around them. Without recursion; together no
    more text than the JSON has."""
    left: list[tuple[int, object]] = [(0, schema)]
    while left:
        depth, value = left.pop()
        if isinstance(value, Mapping):
            for name, inner in value.items():
                yield depth, str(name)
                left.append((depth + 1, inner))
        elif isinstance(value, list | tuple):
            yield depth, ""
            left.extend((depth + 1, inner) for inner in value)
        else:
            yield depth - 1, value if isinstance(value, str) else ""


def _regex(output: StructuredOutput) -> str:
    return str(LLMatcher.grammar_from_regex(_checked(output.value, "regex")))


def _grammar(output: StructuredOutput) -> str:
    return str(LLMatcher.grammar_from_lark(_checked(output.value, "grammar")))


def _checked(value: object, name: str) -> str:
    if not isinstance(value, str) or not value:
        raise BadRequest(f"{name} must be a text that is not empty", param="structured_outputs")
    if len(value) > MAX_FORMAT_CHARACTERS:
        raise BadRequest(f"{name} may have at most {MAX_FORMAT_CHARACTERS} characters", param="structured_outputs")
    if _deepest(value) > _MAX_BRACKETS:
        raise BadRequest(f"{name} may have brackets {_MAX_BRACKETS} levels deep", param="structured_outputs")
    return value


def _deepest(text: str) -> int:
    """How deep brackets are nested at most. Quoted brackets count too."""
    depth = deepest = 0
    for char in text:
        if char in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif char in ")]}":
            depth = max(depth - 1, 0)
    return deepest


def _choice(output: StructuredOutput) -> str:
    choices = output.value
    if not isinstance(choices, tuple | list) or not choices or not all(isinstance(one, str) for one in choices):
        raise BadRequest("choice must be a list of texts that is not empty", param="structured_outputs")
    if len(choices) > MAX_CHOICES or sum(map(len, choices)) > MAX_FORMAT_CHARACTERS:
        raise BadRequest(
            f"choice may have at most {MAX_CHOICES} texts and {MAX_FORMAT_CHARACTERS} characters",
            param="structured_outputs",
        )
    return str(LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(one) for one in choices)))


_WRITERS: Final = {
    "json_object": _json_object,
    "json_schema": _json_schema,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
}
