"""Stop strings, also where they span several tokens. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_SPACE = re.compile(r"\s*")


@dataclass(frozen=True, slots=True)
class ReasoningSpan:
    """How the text of a model begins with reasoning. Stop strings count behind it.

    Attributes:
        opening: the text at the start, which may have white space before it.
        ending: texts that come in this order; the answer begins behind the last one.
        is_open: the prompt ends inside of the reasoning, so `opening` need not come.
    """

    opening: str
    ending: tuple[str, ...]
    is_open: bool = False


class StopFinder:
    """Cuts a stream of text at the first stop string. Text that may become a stop string is held back.

    Args:
        stops: none of them is empty.
        include: the stop string is part of what is returned.
        reasoning: stop strings in this reasoning do not count; None if the text has none.
    """

    __slots__ = ("_ending", "_include", "_pending", "_reasoning", "_stops", "_tail")

    def __init__(self, stops: Sequence[str], *, include: bool, reasoning: ReasoningSpan | None = None) -> None:
        self._stops = stops
        self._include = include
        # Text that was given to `push` and not returned yet.
        self._pending = ""
        # Not None until it is known whether the text begins with reasoning.
        self._reasoning = reasoning if stops else None
        # Inside of the reasoning: what ends it, and the end of the text that was returned, which may be a part of that.
        self._ending: tuple[str, ...] = ()
        self._tail = ""
        if self._reasoning is not None and self._reasoning.is_open:
            self._enter_reasoning()

    def push(self, text: str, *, counts: bool = True) -> tuple[str, str | None]:
        """The text that can be returned now, and the stop string that was found, if any.

        Args:
            counts: stop strings that this text completes end the output.
        """
        if not self._stops:
            return text, None
        if self._reasoning is not None:
            text, self._pending = self._pending + text, ""
            if not self._begins(text, self._reasoning):
                self._pending = text
                return "", None
        answer = self._answer_from(text)
        shown, stop = self._search(text[answer:], counts)
        return text[:answer] + shown, stop

    def close(self, text: str = "", *, counts: bool = True) -> tuple[str, str | None]:
        """End the stream: what was held back is returned, too. what was held back is returned, too."""
        shown, stop = self.push(text, counts=counts)
        if stop is None and self._reasoning is not None:  # it could have become reasoning
            self._reasoning = None
            held, self._pending = self._pending, ""
            shown, stop = self._search(held, counts)
        if stop is None:
            shown, self._pending = shown + self._pending, ""
        return shown, stop

    def _answer_from(self, text: str) -> int:
        """Where the answer begins in this text: at its start, or behind the reasoning."""
        seen = self._tail + text
        while self._ending:
            _, ending, after = seen.partition(self._ending[0])
            if not ending:
                self._tail = seen[max(len(seen) - len(self._ending[0]) + 1, 0) :]
                return len(text)
            self._ending, seen = self._ending[1:], after
        self._tail = ""
        return len(text) - min(len(seen), len(text))

    def _begins(self, text: str, reasoning: ReasoningSpan) -> bool:
        """Decide whether the text begins with reasoning; False if that is not certain yet."""
        start = _SPACE.match(text).end()  # type: ignore[union-attr]  # it matches the empty text
        if text.startswith(reasoning.opening, start):
            self._enter_reasoning()
        elif reasoning.opening.startswith(text[start:]):
            return False
        self._reasoning = None
        return True

    def _enter_reasoning(self) -> None:
        assert self._reasoning is not None
        self._ending, self._reasoning = self._reasoning.ending, None

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
