"""Stop strings, also where they span several tokens. Pure."""

from __future__ import annotations

from collections.abc import Sequence


class StopFinder:
    """Cuts a stream of text at the first stop string. Text that may become a stop string is held back.

    Args:
        stops: none of them is empty.
        include: the stop string is part of what is returned.
    """

    __slots__ = ("_include", "_pending", "_stops")

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        self._stops = stops
        self._include = include
        # Text that was given to `push` and not returned yet.
        self._pending = ""

    def push(self, text: str, *, counts: bool = True) -> tuple[str, str | None]:
        """The text that can be returned now, and the stop string that was found, if any.

        Args:
            counts: stop strings that this text completes end the output.
        """
        return self._search(text, counts) if self._stops else (text, None)

    def close(self, text: str = "", *, counts: bool = True) -> tuple[str, str | None]:
        """End the stream: what was held back is returned, too."""
        shown, stop = self.push(text, counts=counts)
        if stop is None:
            shown, self._pending = shown + self._pending, ""
        return shown, stop

    def _search(self, text: str, counts: bool) -> tuple[str, str | None]:
        known = len(self._pending)
        text = self._pending + text
        ends = (self._first(stop, text, known) for stop in self._stops) if counts else ()
        found = [one for one in ends if one is not None]
        if found:
            # The first to be complete, and the longer of two that end together: independent of how tokens split the
            # text.
            end, start, stop = min(found)
            self._pending = ""
            return text[: end if self._include else start], stop
        # The longest proper prefix of a stop string that the text ends with.
        keep = max(
            next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
            for stop in self._stops
        )
        self._pending = text[len(text) - keep :]
        return text[: len(text) - keep], None

    @staticmethod
    def _first(stop: str, text: str, known: int) -> tuple[int, int, str] | None:
        """End and start of the first place of a stop string that ends behind the first `known` characters."""
        start = text.find(stop, max(known - len(stop) + 1, 0))
        return None if start < 0 else (start + len(stop), start, stop)
