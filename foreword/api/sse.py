"""Server-sent events: encode them, and parse a stream of them."""

from __future__ import annotations

import json
from typing import Any, Final, NamedTuple

from foreword.request_errors import ReplicaFailed
from foreword.texts import readable

# The data of the last event of an OpenAI stream.
DONE: Final = b"[DONE]"
# One event carries all token ids of a prompt.
_MAX_EVENT_BYTES: Final = 16 << 20


class ServerSentEvent(NamedTuple):
    """An event. A comment (a keep-alive) has neither name nor data. `raw` is the event without the empty line after it."""

    raw: bytes
    data: bytes
    name: str = ""


def encode(data: Any, name: str = "") -> bytes:
    """An event with JSON as its data. JSON contains no line breaks, so one `data:` line is enough."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    head = f"event: {name}\ndata: " if name else "data: "
    return utf8(f"{head}{text}\n\n")


# An event's own constructor takes twice as long.
_new: Final = tuple.__new__


class EventParser:
    """Splits a stream of bytes into events, wherever the chunks of the stream end. Each byte is looked at once or twice."""

    __slots__ = ("_after_return", "_rest")

    def __init__(self) -> None:
        self._rest = bytearray()
        # The last piece ended with a carriage return, which ends a line: a line feed after it is a part of that end.
        self._after_return = False

    def feed(self, piece: bytes) -> list[ServerSentEvent]:
        """The events that this piece completes. Raises ReplicaFailed for an event that is too long."""
        if self._after_return or b"\r" in piece:
            piece = self._with_line_feeds(piece)
        rest = self._rest
        if rest:
            seen = len(rest)
            rest += piece
            if rest.find(b"\n\n", seen - 1) < 0:
                if len(rest) > _MAX_EVENT_BYTES:
                    raise ReplicaFailed("the replica sent an event without end")
                return []
            piece = bytes(rest)
            rest.clear()
        *complete, begun = piece.split(b"\n\n")
        if begun:
            rest += begun
        return [
            _new(ServerSentEvent, (raw, raw[6:], "")) if raw.startswith(b"data: ") and b"\n" not in raw else _parse(raw)
            for raw in complete
            if raw
        ]

    def _with_line_feeds(self, piece: bytes) -> bytes:
        if self._after_return:
            piece = piece.removeprefix(b"\n")
        self._after_return = piece.endswith(b"\r")
        return piece.replace(b"\r\n", b"\n").replace(b"\r", b"\n")


def _parse(raw: bytes) -> ServerSentEvent:
    name, data = "", []
    for line in raw.split(b"\n"):
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            data.append(value)
        elif field == b"event":
            name = value.decode("utf-8", "replace")
    return ServerSentEvent(raw, b"\n".join(data), name)


def utf8(text: str) -> bytes:
    """A text as UTF-8, whatever it is."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        return readable(text).encode()
