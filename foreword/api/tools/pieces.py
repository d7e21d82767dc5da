"""Collect what a parser found, as pieces of output."""

from __future__ import annotations

import itertools
import secrets
import string
from collections.abc import Callable, Iterable

from foreword.api.output import CallArguments, CallStart, Piece, Reasoning, Text

_ALPHANUMERIC = string.ascii_letters + string.digits


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
    """The same pieces, with consecutive ones of one kind made one."""
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
