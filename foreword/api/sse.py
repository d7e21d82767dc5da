"""Server-sent events: bytes as they come from a replica, cut into events."""

from __future__ import annotations

from typing import Final, NamedTuple

from foreword.errors import ReplicaFailed

DONE: Final = b"[DONE]"
# A prompt's token ids come in one event.
_LONGEST: Final = 64 << 20


class Event(NamedTuple):
    """One event. A comment (a sign of life) has neither name nor data. `raw` is as it came, without the empty line after it."""

    raw: bytes
    data: bytes
    name: str = ""


class Events:
    """Cuts a stream into events, wherever its pieces end."""

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> list[Event]:
        """The events that this piece completes. Raises ReplicaFailed for one without end."""
        data = self._rest + piece if self._rest else piece
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        whole = data.split(b"\n\n")
        self._rest = whole.pop()
        if len(self._rest) > _LONGEST:
            raise ReplicaFailed("the replica sent an event without end")
        return [_event(raw) for raw in whole if raw]


def _event(raw: bytes) -> Event:
    if raw.startswith(b"data: ") and b"\n" not in raw:
        return Event(raw, raw[6:])
    name, data = "", []
    for line in raw.split(b"\n"):
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            data.append(value)
        elif field == b"event":
            name = value.decode("utf-8", "replace")
    return Event(raw, b"\n".join(data), name)
