"""Read text that comes in pieces: each read waits, as a generator, until it has what it needs. What was found is collected."""

from __future__ import annotations

import itertools
import json
import re
import secrets
import string
from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

from foreword.api.output import CallArguments, CallStart, Piece, Reasoning, Text

_ALPHANUMERIC = string.ascii_letters + string.digits
T = TypeVar("T")
Reading = Generator[None, None, T]
Sink = Callable[[str], None]

SPACE = re.compile(r"\s+")
# A call whose name or start is longer than this is text.
HELD_CHARACTERS = 1 << 16
STRING_PIECE = re.compile(r'[^"\\]+')


def call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def short_call_id() -> str:
    """Nine letters and digits: Mistral's chat templates accept no other ids."""
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))


class PieceCollector:
    """The pieces since the last `take()`. White space next to a marker is dropped.

    A chat template writes that space itself; an answer that kept it would be rendered with more space than the model
    wrote, and miss the cache.
    """

    def __init__(self, new_id: Callable[[], str] = call_id) -> None:
        self._new_id = new_id
        self._pieces: list[CallStart | tuple[type[Text | Reasoning] | int, list[str]]] = []
        self._calls = 0
        self._space: list[str] = []
        self._after_marker = False
        self._kind: type[Text | Reasoning] = Text

    def take(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return [piece if isinstance(piece, CallStart) else _piece(*piece) for piece in pieces]

    def text(self, text: str) -> None:
        self._write(Text, text)

    def reasoning(self, text: str) -> None:
        self._write(Reasoning, text)

    def marker(self) -> None:
        """A marker was read: the white space before it and after it is not text."""
        self._space.clear()
        self._after_marker = True

    def end(self) -> None:
        """The text is complete: white space at its end belongs to it."""
        self._append(self._kind, "".join(self._space))

    def call(self, name: str) -> None:
        self.marker()
        self._pieces.append(CallStart(self._calls, self._new_id(), name))
        self._calls += 1

    def arguments(self, text: str) -> None:
        """More arguments of the last call."""
        self._append(self._calls - 1, text)

    def _write(self, kind: type[Text | Reasoning], text: str) -> None:
        if self._after_marker:
            text = text.lstrip()
        if not text:
            return
        self._after_marker = False
        shown = text.rstrip()
        if shown:
            self._append(kind, "".join((*self._space, shown)))
            self._space.clear()
        self._kind = kind
        self._space.append(text[len(shown) :])

    def _append(self, kind: type[Text | Reasoning] | int, text: str) -> None:
        last = self._pieces[-1] if self._pieces else None
        if not text:
            return
        if isinstance(last, tuple) and last[0] == kind:
            last[1].append(text)
        else:
            self._pieces.append((kind, [text]))


def _piece(kind: type[Text | Reasoning] | int, texts: list[str]) -> Piece:
    text = "".join(texts)
    return CallArguments(kind, text) if isinstance(kind, int) else kind(text)


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """These pieces, with consecutive ones of one kind made one."""
    result: list[Piece] = []
    for key, group in itertools.groupby(pieces, lambda piece: (type(piece), getattr(piece, "index", None))):
        same = list(group)
        text = "".join(piece.text for piece in same if not isinstance(piece, CallStart))
        if key[0] is CallStart:
            result += same
        elif isinstance(same[0], CallArguments):
            result.append(CallArguments(same[0].index, text))
        else:
            result.append(Reasoning(text) if key[0] is Reasoning else Text(text))
    return result


class Malformed(Exception):  # control flow inside the parsers; never leaves them
    """The text is not what its marker promised."""


class TextReader:
    """The text that is not read yet, and a record of what was read since `record()`.

    Each read takes what it has seen out of the buffer, except for the start of a possible marker. So the work is linear
    in the text, however it is cut into pieces.
    """

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._recorded: list[str] | None = None
        self._size = 0
        self.closed = False

    @property
    def buffered(self) -> int:
        """Characters that the next read looks at again."""
        return len(self._text) - self._at

    def add(self, text: str) -> None:
        self._text = self._text[self._at :] + text
        self._at = 0

    def record(self) -> None:
        """Remember what is read from here on, to give it back if it is malformed."""
        self._recorded, self._size = [], 0

    def forget(self) -> None:
        self._recorded = None

    def recorded(self) -> str:
        """The text read since `record()`; ends the record."""
        text, self._recorded = "".join(self._recorded or ()), None
        return text

    def _take(self, end: int) -> str:
        """Take the text up to `end`, but never more than a record may hold."""
        allowed = end if self._recorded is None else min(end, self._at + HELD_CHARACTERS - self._size)
        text, self._at = self._text[self._at : allowed], allowed
        if self._recorded is not None:
            self._recorded.append(text)
            self._size += len(text)
        if allowed < end:
            raise Malformed
        return text

    def _more(self) -> Reading[bool]:
        """Wait for more text. False: there will be none."""
        while not self.closed:
            before = self.buffered
            yield
            if self.buffered > before:
                return True
        return False

    def peek(self) -> Reading[str]:
        """The next character, which stays; empty at the end."""
        if self.buffered or (yield from self._more()):
            return self._text[self._at]
        return ""

    def available(self) -> str:
        """Take all text that is here."""
        return self._take(len(self._text))

    def take(self, pattern: re.Pattern[str]) -> str:
        """Take what of the text that is here matches `pattern`; may be empty."""
        found = pattern.match(self._text, self._at)
        return self._take(found.end()) if found else ""

    def run(self, pattern: re.Pattern[str], sink: Sink | None = None) -> Reading[None]:
        """Take characters while they match `pattern`, the repetition of a class of characters."""
        while True:
            text = self.take(pattern)
            if text and sink:
                sink(text)
            if self.buffered or not (yield from self._more()):
                return

    def space(self) -> Reading[str]:
        """Take white space; gives the character after it, which stays."""
        yield from self.run(SPACE)
        return (yield from self.peek())

    def literal(self, *literals: str) -> Reading[str]:
        """Take one of `literals` if the text continues with it; empty if it does not."""
        while True:
            for literal in literals:
                if self._text.startswith(literal, self._at):
                    return self._take(self._at + len(literal))
            rest = self._text[self._at : self._at + max(map(len, literals))]
            if not any(literal.startswith(rest) for literal in literals) or not (yield from self._more()):
                return ""

    def expect(self, literal: str) -> Reading[None]:
        if not (yield from self.literal(literal)):
            raise Malformed

    def until(self, markers: tuple[str, ...], sink: Sink) -> Reading[str]:
        """Give the text to `sink` up to the first marker, and take the marker; empty at the end of the text."""
        pattern = re.compile("|".join(map(re.escape, markers)))
        while True:
            found = pattern.search(self._text, self._at)
            end = found.start() if found else len(self._text) - (0 if self.closed else self._open_marker(markers))
            if end > self._at:
                sink(self._take(end))
            if found:
                return self._take(found.end())
            if not (yield from self._more()):
                if self.buffered:
                    sink(self.available())
                return ""

    def _open_marker(self, markers: tuple[str, ...]) -> int:
        """Length of the longest end of the text that may be the start of a marker."""
        longest = min(max(map(len, markers)) - 1, self.buffered)
        for size in range(longest, 0, -1):
            end = self._text[-size:]
            if any(marker.startswith(end) for marker in markers):
                return size
        return 0

    def string(self, limit: int = HELD_CHARACTERS) -> Reading[str]:
        """Take a JSON string and decode it."""
        raw: list[str] = []
        yield from self.raw_string(raw.append)
        if sum(map(len, raw)) > limit:
            raise Malformed
        try:
            return str(json.loads("".join(raw), strict=False))
        except ValueError:
            raise Malformed from None

    def raw_string(self, sink: Sink) -> Reading[None]:
        """Take a JSON string and give its text, quotes included, to `sink`."""
        yield from self.expect('"')
        sink('"')
        while True:
            yield from self.run(STRING_PIECE, sink)
            if not (yield from self.peek()):
                raise Malformed
            if (yield from self.literal('"')):
                sink('"')
                return
            sink((yield from self._escape()))

    def _escape(self) -> Reading[str]:
        while self.buffered < 2 and (yield from self._more()):
            pass
        return self._take(min(self._at + 2, len(self._text)))
