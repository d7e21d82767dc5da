"""Short texts that match the regular expressions of a grammar: they help to find a way to the end of a text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any, Final

from foreword.engine.structured.structured_output import StructuredOutput

MAX_EXAMPLES: Final = 64
_MAX_LENGTH: Final = 512
# A regular expression between slashes, as Lark has it.
_LARK_PATTERN: Final = re.compile(r"/((?:[^/\\\n]|\\.){1,2000})/")
_CATEGORIES: Final = {"CATEGORY_DIGIT": "0", "CATEGORY_SPACE": " ", "CATEGORY_WORD": "a", "CATEGORY_NOT_DIGIT": "a"}


class _NoExample(Exception):
    """The expression has something that is not understood here, or matches only long texts."""


def examples(output: StructuredOutput) -> list[bytes]:
    """Short matches of the expressions in a schema or grammar, each once."""
    found: dict[bytes, None] = {}
    for pattern in _patterns(output):
        text = shortest_match(pattern)
        if text and len(found) < MAX_EXAMPLES:
            found[text.encode()] = None
    return sorted(found, key=len)


def _patterns(output: StructuredOutput) -> Iterator[str]:
    if output.kind == "regex":
        yield str(output.value)
    elif output.kind == "grammar":
        yield from _LARK_PATTERN.findall(str(output.value))
        yield from re.findall(r'"pattern"\s*:\s*"((?:[^"\\]|\\.)*)"', str(output.value))
    elif output.kind == "json_schema":
        yield from _schema_patterns(output.value)


def _schema_patterns(schema: Any) -> Iterator[str]:
    left = [schema]
    while left:
        value = left.pop()
        if isinstance(value, Mapping):
            if isinstance(pattern := value.get("pattern"), str):
                yield pattern
            left.extend(value.values())
        elif isinstance(value, list | tuple):
            left.extend(value)


def shortest_match(pattern: str) -> str | None:
    """A short text that the expression matches from its start to its end; None if none is found."""
    try:
        return _sequence(parser.parse(pattern))
    except (re.error, _NoExample, RecursionError, OverflowError):
        return None


def _sequence(items: Any) -> str:
    text = "".join(_one(str(op), value) for op, value in items)
    if len(text) > _MAX_LENGTH:
        raise _NoExample
    return text


def _one(op: str, value: Any) -> str:
    if op not in _WRITERS:
        raise _NoExample
    return _WRITERS[op](value)


def _repeat(value: Any) -> str:
    least, _, items = value
    text = _sequence(items) if least else ""
    if len(text) * least > _MAX_LENGTH:
        raise _NoExample
    return text * int(least)


def _branch(value: Any) -> str:
    return min((_sequence(branch) for branch in value[1]), key=len)


def _set(value: Any) -> str:
    if str(value[0][0]) == "NEGATE":
        excluded = {_one(str(op), one) for op, one in value[1:] if str(op) == "LITERAL"}
        return next((char for char in "a0 -" if char not in excluded), "b")
    op, first = value[0]
    return chr(first[0]) if str(op) == "RANGE" else _one(str(op), first)


_WRITERS: Final[dict[str, Callable[[Any], str]]] = {
    "LITERAL": chr,
    "NOT_LITERAL": lambda value: "b" if chr(value) == "a" else "a",
    "ANY": lambda _: "a",
    "AT": lambda _: "",
    "IN": _set,
    "CATEGORY": lambda value: _CATEGORIES.get(str(value), "-"),
    "BRANCH": _branch,
    "SUBPATTERN": lambda value: _sequence(value[-1]),
    "MAX_REPEAT": _repeat,
    "MIN_REPEAT": _repeat,
    "ATOMIC_GROUP": _sequence,
    "POSSESSIVE_REPEAT": _repeat,
}
