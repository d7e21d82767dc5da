"""Server-sent events: encode them, and parse a stream of them."""

from __future__ import annotations

import json
from typing import Any, Final, NamedTuple

from foreword.errors import ReplicaFailed

# The data of the last event of an OpenAI stream.
DONE: Final = b"[DONE]"
# One event carries all token ids of a prompt.
_MAX_EVENT_BYTES: Final = 64 << 20


class ServerSentEvent(NamedTuple):
    """One event. A comment (a keep-alive) has neither name nor data. `raw` is the event without the empty line after it."""

    raw: bytes
    data: bytes
    name: str = ""


def encode(data: Any, name: str = "") -> bytes:
    """One event with JSON as its data. JSON contains no line breaks, so one `data:` line is enough."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    head = f"event: {name}\ndata: " if name else "data: "
    return f"{head}{text}\n\n".encode("utf-8", "replace")


class EventParser:
    """Splits a stream of bytes into events, wherever the chunks of the stream end."""

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> list[ServerSentEvent]:
        """The events that this piece completes. Raises ReplicaFailed for an event that is too long."""
        data = self._rest + piece if self._rest else piece
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        complete = data.split(b"\n\n")
        self._rest = complete.pop()
        if len(self._rest) > _MAX_EVENT_BYTES:
            raise ReplicaFailed("the replica sent an event without end")
        return [_parse(raw) for raw in complete if raw]


def _parse(raw: bytes) -> ServerSentEvent:
    if raw.startswith(b"data: ") and b"\n" not in raw:
        return ServerSentEvent(raw, raw[6:])
    name, data = "", []
    for line in raw.split(b"\n"):
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            data.append(value)
        elif field == b"event":
            name = value.decode("utf-8", "replace")
    return ServerSentEvent(raw, b"\n".join(data), name)
