"""Tool calls written as JSON objects: Hermes and Qwen, Llama 3, Mistral."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence

from foreword.api.request import Tool
from foreword.api.tools.formats import (
    HERMES_ARGUMENTS,
    HERMES_CLOSE,
    HERMES_OPEN,
    LLAMA_ARGUMENTS,
    LLAMA_SEPARATOR,
    LLAMA_TAG,
    MISTRAL_ARGUMENTS,
    MISTRAL_CALL_ID,
    MISTRAL_CALLS,
    Markers,
    ToolFormat,
    call_objects,
    more_calls,
)
from foreword.api.tools.reader import SPACE, Malformed, PieceCollector, Reading, Sink, T, TextReader, short_call_id

NAME_CHARACTERS = 256
NESTING = 200
_PLAIN = re.compile(r'[^"{}\[\]<]+')
_SCALAR = re.compile(r"[\w.+-]+")
_BARE_NAME = re.compile(r"[^\s\[\]{}<>\"]+")
_ARGUMENT_KEYS = (HERMES_ARGUMENTS, LLAMA_ARGUMENTS)
_CLOSED_BY = {"{": "}", "[": "]"}


class JsonCalls:
    """Read `{"name": ..., "arguments": {...}}` and pass the arguments on as they come, as the model wrote them."""

    def __init__(self, reader: TextReader, pieces: PieceCollector) -> None:
        self.reader = reader
        self.pieces = pieces
        # Whether the last call was known to be one before it ended.
        self.started = False

    def attempt(self, call: Reading[T], before: str = "") -> Reading[T | None]:
        """Read a call. What is not one is text, from `before` (which was read already) up to where it went wrong.

        None: the text ended or went wrong before the call was complete.
        """
        self.started = False
        self.reader.record()
        try:
            return (yield from call)
        except Malformed:
            if not self.started:
                self.pieces.text(before + self.reader.recorded())
            return None
        finally:
            self.reader.forget()

    def start(self, name: str) -> None:
        """From here on the call is a call, and what is read is not kept."""
        self.reader.forget()
        self.started = True
        self.pieces.call(name)

    def object(self, names: Collection[str] | None = None) -> Reading[None]:
        """A call. Fields other than name and arguments are ignored. Names not in `names` are malformed."""
        reader = self.reader
        yield from reader.expect("{")
        name: str | None = None
        early: str | None = None
        while (char := (yield from reader.space())) != "}":
            if char == ",":
                yield from reader.expect(",")
                continue
            key = yield from reader.string(NAME_CHARACTERS)
            yield from reader.space()
            yield from reader.expect(":")
            yield from reader.space()
            if key == "name" and name is None:
                name = yield from self._name(names)
            elif key in _ARGUMENT_KEYS and early is None and not self.started:
                early = yield from self._arguments(name)
            else:
                yield from self.value(lambda _: None)
        if not self.started:
            self._write(name, early if early is not None else "{}")
        yield from reader.expect("}")

    def _name(self, names: Collection[str] | None) -> Reading[str]:
        name = yield from self.reader.string(NAME_CHARACTERS)
        if not _sendable(name) or (names is not None and name not in names):
            raise Malformed
        return name

    def _write(self, name: str | None, arguments: str) -> None:
        if not name:
            raise Malformed
        self.start(name)
        self.pieces.arguments(arguments)

    def _arguments(self, name: str | None) -> Reading[str | None]:
        """Pass an object on if the name is known, otherwise keep it."""
        first = yield from self.reader.peek()
        if first == "{" and name:
            self.start(name)
            yield from self.value(self.pieces.arguments)
            return None
        if first == '"':
            return _object_in((yield from self.reader.string()))
        kept: list[str] = []
        yield from self.value(kept.append)
        return _object_in("".join(kept).replace("null", "{}", 1) if first == "n" else "".join(kept))

    def value(self, sink: Sink) -> Reading[None]:
        """Read one JSON value and give its text to `sink`. Brackets must match; the rest is not validated."""
        first = yield from self.reader.peek()
        if first == '"':
            yield from self.reader.raw_string(sink)
        elif first in ("{", "["):
            yield from self._nested(sink)
        elif _SCALAR.match(first):
            yield from self.reader.run(_SCALAR, sink)
        else:
            raise Malformed

    def _nested(self, sink: Sink) -> Reading[None]:
        open_brackets: list[str] = []
        while True:
            yield from self.reader.run(_PLAIN, sink)
            char = yield from self.reader.peek()
            if char == '"':
                yield from self.reader.raw_string(sink)
            elif char in _CLOSED_BY and len(open_brackets) < NESTING:
                open_brackets.append(_CLOSED_BY[(yield from self._pass(char, sink))])
            elif char and open_brackets and char == open_brackets[-1]:
                open_brackets.pop()
                yield from self._pass(char, sink)
                if not open_brackets:
                    return
            else:
                raise Malformed

    def _pass(self, char: str, sink: Sink) -> Reading[str]:
        yield from self.reader.expect(char)
        sink(char)
        return char


def _sendable(text: str) -> bool:
    """Text that is not empty and has a UTF-8 form: JSON can escape halves of surrogate pairs."""
    try:
        return bool(text.encode())
    except UnicodeEncodeError:
        return False


def _object_in(text: str) -> str:
    try:
        if isinstance(json.loads(text, strict=False), dict) and _sendable(text):
            return text
    except (ValueError, RecursionError):
        pass
    raise Malformed


class Hermes(ToolFormat):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes 2 and 3, Qwen 2.5 and Qwen 3 write."""

    def detects(self, template: str, model_type: str) -> bool:
        return HERMES_OPEN in template and "<arg_key>" not in template

    def read(self, reader: TextReader, pieces: PieceCollector, tools: Sequence[Tool]) -> Reading[None]:
        calls = JsonCalls(reader, pieces)
        markers: tuple[str, ...] = (HERMES_OPEN,)
        while marker := (yield from reader.until(markers, pieces.text)):
            if marker == HERMES_CLOSE:
                pieces.marker()
                markers = (HERMES_OPEN,)
            else:
                yield from calls.attempt(_object_after_space(calls), marker)
                markers = (HERMES_OPEN, HERMES_CLOSE) if calls.started else (HERMES_OPEN,)

    def grammar(self, tools: Sequence[Tool], marker: Markers, parallel: bool) -> str:
        one = f'{marker(HERMES_OPEN)} "\\n" call "\\n" {marker(HERMES_CLOSE)}'
        more = more_calls('"\\n"', "one", parallel)
        return f"calls: one{more}\none: {one}\n{call_objects(tools, HERMES_ARGUMENTS)}"


class Llama3Json(ToolFormat):
    """`{"name": ..., "parameters": {...}}`, separated by `;`, at the start of the answer or after `<|python_tag|>`.

    An answer that starts with an object but without the tag is a call only if the client has a tool of this name.
    """

    special_tokens = True

    def detects(self, template: str, model_type: str) -> bool:
        asks_for_parameters = '"parameters":' in template and "<|start_header_id|>" in template
        return LLAMA_TAG in template or asks_for_parameters

    def read(self, reader: TextReader, pieces: PieceCollector, tools: Sequence[Tool]) -> Reading[None]:
        calls = JsonCalls(reader, pieces)
        yield from reader.run(SPACE, pieces.text)
        if (yield from reader.peek()) == "{":
            yield from _llama_calls(calls, "", {tool.name for tool in tools})
        while marker := (yield from reader.until((LLAMA_TAG,), pieces.text)):
            yield from _llama_calls(calls, marker, None)

    def grammar(self, tools: Sequence[Tool], marker: Markers, parallel: bool) -> str:
        more = more_calls(json.dumps(LLAMA_SEPARATOR + " "), "call", parallel)
        return f"calls: call{more}\n{call_objects(tools, LLAMA_ARGUMENTS)}"


def _llama_calls(calls: JsonCalls, before: str, names: Collection[str] | None) -> Reading[None]:
    """Calls up to the first text that is not one."""
    while (yield from calls.attempt(_object_after_space(calls, names), before)):
        if (yield from calls.reader.space()) != LLAMA_SEPARATOR:
            return
        before = yield from calls.reader.literal(LLAMA_SEPARATOR)


def _object_after_space(calls: JsonCalls, names: Collection[str] | None = None) -> Reading[bool]:
    yield from calls.reader.space()
    yield from calls.object(names)
    return True


class Mistral(ToolFormat):
    """`[TOOL_CALLS][{...}, {...}]`, and `[TOOL_CALLS]name[ARGS]{...}` of newer models."""

    special_tokens = True

    def detects(self, template: str, model_type: str) -> bool:
        return MISTRAL_CALLS in template or (not template and model_type.startswith(("mistral", "ministral")))

    def read(self, reader: TextReader, pieces: PieceCollector, tools: Sequence[Tool]) -> Reading[None]:
        calls = JsonCalls(reader, pieces)
        while marker := (yield from reader.until((MISTRAL_CALLS,), pieces.text)):
            form = yield from calls.attempt(_mistral_call(calls), marker)
            if form == "list":
                yield from _rest_of_list(calls)

    def grammar(self, tools: Sequence[Tool], marker: Markers, parallel: bool) -> str:
        more = more_calls('", "', "call", parallel)
        return f'calls: {marker(MISTRAL_CALLS)} "[" call{more} "]"\n{call_objects(tools, HERMES_ARGUMENTS)}'

    def new_id(self) -> str:
        return short_call_id()


def _mistral_call(calls: JsonCalls) -> Reading[str]:
    if (yield from calls.reader.space()) == "[":
        yield from calls.reader.expect("[")
        yield from _object_after_space(calls)
        return "list"
    yield from _named_call(calls)
    return "named"


def _named_call(calls: JsonCalls) -> Reading[None]:
    name: list[str] = []
    yield from calls.reader.run(_BARE_NAME, name.append)
    if not name or sum(map(len, name)) > NAME_CHARACTERS:
        raise Malformed
    yield from calls.reader.space()
    if (yield from calls.reader.literal(MISTRAL_CALL_ID)):
        yield from calls.reader.run(_BARE_NAME)
    yield from calls.reader.literal(MISTRAL_ARGUMENTS)
    if (yield from calls.reader.space()) != "{":
        raise Malformed
    calls.start("".join(name))
    yield from calls.value(calls.pieces.arguments)


def _rest_of_list(calls: JsonCalls) -> Reading[None]:
    """More calls, up to the end of the list."""
    reader = calls.reader
    while (yield from reader.space()) == ",":
        comma = yield from reader.literal(",")
        if not (yield from calls.attempt(_object_after_space(calls), comma)):
            return
    yield from reader.literal("]")
