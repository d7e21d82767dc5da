"""Stop strings in texts that begin with reasoning, inside of which they do not count. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from foreword.tokens.stops import StopFinder

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


class AnswerStopFinder(StopFinder):
    """Cuts a stream of text at the first stop string behind its reasoning.

    Args:
        reasoning: that with which the text may begin.
    """

    __slots__ = ("_ending", "_reasoning", "_tail")

    def __init__(self, stops: Sequence[str], *, include: bool, reasoning: ReasoningSpan) -> None:
        super().__init__(stops, include=include)
        # Not None until it is known whether the text begins with reasoning.
        self._reasoning = reasoning if stops else None
        # Inside of the reasoning: what ends it, and the end of the text that was returned, which may be a part of that.
        self._ending: tuple[str, ...] = ()
        self._tail = ""
        if self._reasoning is not None and self._reasoning.is_open:
            self._enter_reasoning()

    def push(self, text: str, *, counts: bool = True) -> tuple[str, str | None]:
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


def stop_finder(stops: Sequence[str], *, include: bool, reasoning: ReasoningSpan | None) -> StopFinder:
    """A finder for a text that may begin with this reasoning; None if it has none."""
    if reasoning is None:
        return StopFinder(stops, include=include)
    return AnswerStopFinder(stops, include=include, reasoning=reasoning)
