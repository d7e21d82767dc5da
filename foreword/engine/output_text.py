"""The text of one sequence's output, token by token: complete characters, cut at the first stop string that counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from foreword.engine.request import Request
from foreword.tokens.stops import StopFinder

if TYPE_CHECKING:
    from foreword.tokens.tokenizer import Tokenizer


class OutputText:
    """Used by the engine, and by a server that continues an output of another one."""

    __slots__ = ("_least", "_stops", "_stream", "_tokens")

    def __init__(self, tokenizer: Tokenizer, request: Request) -> None:
        params = request.params
        self._stream = tokenizer.stream(request.tokens, skip_special_tokens=params.skip_special_tokens)
        self._stops: StopFinder | None = None
        if strings := params.stop_strings:
            self._stops = StopFinder(strings, include=params.include_stop, reasoning=params.reasoning)
        self._least, self._tokens = params.min_tokens, 0

    def push(self, token: int) -> tuple[str, str | None]:
        """The text that can be returned after one more token, and the stop string that it completes, if any."""
        self._tokens += 1
        text = self._stream.push(token)
        return (text, None) if self._stops is None else self._stops.push(text, counts=self._counts)

    def close(self) -> tuple[str, str | None]:
        """The text that was held back, as no more tokens follow, and the stop string that it completes, if any."""
        text = self._stream.flush()
        return (text, None) if self._stops is None else self._stops.close(text, counts=self._counts)

    @property
    def _counts(self) -> bool:
        # As in vLLM: a stop string counts if a token behind the first `min_tokens` completes it.
        return self._tokens > self._least
