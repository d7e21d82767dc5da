"""Stop strings, also where they span several tokens. Pure."""

from __future__ import annotations

from collections.abc import Sequence


class StopFinder:
    """Cuts a stream of text at the first stop string. Text that may become a stop string is held back."""

    __slots__ = ("_include", "_pending", "_stops")

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        self._stops = stops
        self._include = include
        self._pending = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """The text that can be returned now, and the stop string that was found, if any."""
        if not self._stops:
            return text, None
        text = self._pending + text
        found = [(text.find(stop), stop) for stop in self._stops if stop in text]
        if found:
            # The first to be complete, and the longer of two that end together: independent of how tokens split the
            # text.
            place, stop = min(found, key=lambda item: (item[0] + len(item[1]), item[0]))
            self._pending = ""
            return text[: place + (len(stop) if self._include else 0)], stop
        # The longest proper prefix of a stop string that the text ends with.
        keep = max(
            next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
            for stop in self._stops
        )
        self._pending = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def flush(self) -> str:
        """The text that was held back, at the end of the stream."""
        text, self._pending = self._pending, ""
        return text
