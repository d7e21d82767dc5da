"""A short way to end a structured text, byte by byte. Short matches of the regular expressions of its grammar help."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from re import _parser as parser  # type: ignore[attr-defined]
from time import thread_time
from typing import Any, Final

from llguidance import LLMatcher

from foreword.engine.structured.vocabulary import NUM_BYTES
from foreword.tokens.structured_output import StructuredOutput

_MAX_EXAMPLES: Final = 64
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
        text = _shortest_match(pattern)
        if text and len(found) < _MAX_EXAMPLES:
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


def _shortest_match(pattern: str) -> str | None:
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
    "BRANCH": lambda value: min(map(_sequence, value[1]), key=len),
    "SUBPATTERN": lambda value: _sequence(value[-1]),
    "MAX_REPEAT": _repeat,
    "MIN_REPEAT": _repeat,
    "ATOMIC_GROUP": _sequence,
    "POSSESSIVE_REPEAT": _repeat,
}


Fits = Callable[[Sequence[int]], bool]

# Bytes that end something come first, then those with which short values start, then all others but white space.
_ORDERS: Final = (b'}]")>/0123456789ntf-[{:,ae', b'}])>/ntf"0123456789-[{:,ea', b'}][{")>/ntf0123456789-:,zyx')
_CLOSERS: Final = b'}])>"/'
_SPACES: Final = b" \t\r\n"
# Where this many bytes are allowed, the text is inside a string, and a quote ends it.
_FREE_TEXT: Final = 64
_QUOTE: Final = ord('"')
_MAX_SYMBOLS: Final = 2048
# A grammar whose end was not found so often is not searched again.
_MAX_FAILURES: Final = 3
# Processor seconds: of the search at the start of a text, of each later one, and of all later ones of a sequence. Other
# sequences of the batch wait for those.
_FIRST_SECONDS: Final = 5.0
_SEARCH_SECONDS: Final = 0.25
_LATER_SECONDS: Final = 2.0


def _order(first: bytes) -> bytes:
    rest = (byte for byte in range(NUM_BYTES) if byte not in _SPACES)
    return bytes(dict.fromkeys((*first, *rest, *_SPACES)))


# Strategies: in which order bytes are tried, and whether the least used ones come first, which leads out of loops.
_STRATEGIES: Final = (*((_order(first), False) for first in _ORDERS), (_order(_ORDERS[0]), True))


class ClosingPath:
    """A way to end the text, kept up to date while the text grows.

    A path stays valid while the text grows inside a value; otherwise it is searched again. The search follows what the
    grammar forces, and where it leaves a choice, a fixed order of bytes. That finds short paths through JSON. It may find
    none in a grammar whose end is far from obvious. A strategy that has found a path is tried first the next time.

    Args:
        matcher: of the vocabulary of bytes, at the start of the text. It belongs to this object.
        end: the symbol that ends a text.
        examples: texts that may be taken whole where nothing can be closed, the shortest first.

    Attributes:
        path: symbols that end the text from here; None if none is known.
    """

    def __init__(self, matcher: LLMatcher, end: int, examples: Sequence[bytes]) -> None:
        self._matcher = matcher
        self._end = end
        self._examples = examples
        self._failures = 0
        self._strategies = list(_STRATEGIES)
        self._longest = _MAX_SYMBOLS
        self._seconds = self._search_seconds = _FIRST_SECONDS
        self.path = self._search(lambda _: True)
        self._seconds, self._search_seconds = _LATER_SECONDS, _SEARCH_SECONDS
        if self.path is not None:
            self._longest = min(_MAX_SYMBOLS, 512 + 4 * len(self.path))

    def copy(self) -> ClosingPath:
        """A copy at the same place, for another sequence."""
        copy = object.__new__(ClosingPath)
        copy._matcher, copy._end, copy._examples = self._matcher.deep_copy(), self._end, self._examples
        copy._failures, copy._longest = self._failures, self._longest
        copy._seconds, copy._search_seconds = self._seconds, self._search_seconds
        copy._strategies, copy.path = list(self._strategies), self.path
        return copy

    def after(self, symbols: Sequence[int], fits: Fits) -> list[int] | None:
        """A path from where these symbols lead, one that `fits` if there is one; None if none is known."""
        path, count = self.path, len(symbols)
        if path is not None and path[:count] == list(symbols):
            return path[count:]
        taken = self._matcher.try_consume_tokens(list(symbols))
        try:
            if taken < count:
                return None
            if path is not None and fits(path) and self._matcher.validate_tokens([*path, self._end]) == len(path) + 1:
                return path
            return self._search(fits)
        finally:
            self._matcher.rollback(taken)

    def advance(self, symbols: Sequence[int], path: list[int] | None) -> None:
        """The text has grown by these symbols, and `path` ends it. If the grammar does not allow them, no path is known."""
        self.path = path if self._matcher.consume_tokens(list(symbols)) else None

    def _search(self, fits: Fits) -> list[int] | None:
        """The first path found that fits, else the shortest found. None if that takes too long."""
        if self._failures >= _MAX_FAILURES or self._seconds <= 0:
            return None
        began = thread_time()
        try:
            return self._try_all(fits, began + min(self._search_seconds, self._seconds))
        finally:
            self._seconds -= thread_time() - began

    def _try_all(self, fits: Fits, until: float) -> list[int] | None:
        best: list[int] | None = None
        longest = self._longest
        for place, strategy in enumerate(self._strategies):
            order, spread = strategy
            if spread and best is not None:
                continue  # it finds longer ones
            path = self._follow(order, spread, longest, until)
            if path is not None:
                best, longest = path, len(path) - 1
                if fits(path):
                    self._strategies.insert(0, self._strategies.pop(place))
                    return path
        self._failures += best is None
        return best

    def _follow(self, order: bytes, spread: bool, longest: int, until: float) -> list[int] | None:
        """The path of one strategy; None if it is longer, or takes longer."""
        matcher = self._matcher.deep_copy()
        uses: Counter[int] | None = Counter() if spread else None
        path: list[int] = []
        while not matcher.is_accepting():
            symbols = matcher.compute_ff_tokens() or self._choose(matcher, order, uses)
            path += symbols
            if not symbols or len(path) > longest or thread_time() > until or not matcher.consume_tokens(symbols):
                return None
            if uses is not None:
                uses.update(symbols)
        return path

    def _example(self, matcher: LLMatcher) -> list[int]:
        return next((one for one in map(list, self._examples) if matcher.validate_tokens(one) == len(one)), [])

    def _choose(self, matcher: LLMatcher, order: bytes, uses: Counter[int] | None) -> list[int]:
        allowed = int.from_bytes(matcher.compute_bitmask(), "little")
        if uses is None and allowed >> _QUOTE & 1 and allowed.bit_count() > _FREE_TEXT:
            return [_QUOTE]
        choices = (byte for byte in order if allowed >> byte & 1)
        chosen = next(choices, None) if uses is None else min(choices, key=uses.__getitem__, default=None)
        if chosen is not None:
            return [chosen] if chosen in _CLOSERS else self._example(matcher) or [chosen]
        special = allowed >> self._end + 1
        return [self._end + 1 + (special & -special).bit_length() - 1] if special else []
