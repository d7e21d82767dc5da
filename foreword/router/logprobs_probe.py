"""Tells weights apart by the log-probabilities of a fixed text, where a server does not publish their fingerprint.

Two readings are those of the same weights if the text has the same tokens in both, and the log-probabilities of its tokens
differ by no more than batching, chunking and number formats make them differ. So equal weights give equal readings. The reverse
does not hold for weights that hardly differ: `docs/guides/router.md` has figures.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Final

import msgspec

from foreword.api.dialects.answer_reader import AnswerReader
from foreword.errors import BadRequest
from foreword.request_errors import ReplicaFailed

# Plain text, code, numbers and other languages: what a fine-tuned model was trained on is probably among it.
TEXT: Final = (
    "The river rose in the night, and by morning the lower road was under water. The village was not surprised.\n"
    "def merge(left, right):\n    result = []\n    while left and right:\n"
    "        source = left if left[0] <= right[0] else right\n        result.append(source.pop(0))\n"
    "    return result + left + right\n"
    "Q: What is 17 * 23? A: 17 * 23 = 391. El tren sale a las ocho y media. Die Antwort lautet nein.\n"
    'User: Please summarize the report in one sentence. Assistant: {"summary": "Costs fell by 4 %.", "sources": [2, 5]}\n'
)
# Two readings of the same weights differ by less than half of this, also in other number formats (measured in
# `docs/guides/router.md`).
TOLERANCE: Final = 0.02
# One token counts at most this much, so that a few unlikely tokens, whose log-probabilities vary most, do not decide.
_MOST: Final = 1.0
_MIN_TOKENS: Final = 16
# Tokens of a context beside those of the text.
_RESERVED: Final = 8
_MAX_KEPT: Final = 64


@dataclass(frozen=True, slots=True)
class LogprobReading:
    """The tokens of the text, all but the first, and the natural logarithms of their probabilities."""

    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]

    def difference(self, other: LogprobReading) -> float:
        """The mean difference per token; infinite if the tokens differ."""
        if self.tokens != other.tokens:
            return float("inf")
        pairs = zip(self.logprobs, other.logprobs, strict=True)
        return sum(min(abs(one - two), _MOST) for one, two in pairs) / len(self.tokens)


def request_body(model: str, max_model_len: int | None) -> bytes:
    """A completion of one token that returns the log-probabilities of the text, or of what of it certainly fits."""
    text = TEXT if max_model_len is None else TEXT[: max(max_model_len - _RESERVED, 1)]
    asked = {"model": model, "prompt": text, "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1}
    return msgspec.json.encode(asked | {"return_tokens_as_token_ids": True})


def read_response(data: bytes) -> LogprobReading:
    """Raises ReplicaFailed for a response without the log-probabilities of the prompt."""
    reader = AnswerReader()
    try:
        choices = reader.read(data).choices
    except BadRequest as error:
        raise ReplicaFailed(f"it returns no log-probabilities of a prompt: {error}") from None
    found, count = choices[0].read_logprobs() if choices else None, reader.counts.prompt or 0
    entries = () if found is None else found.entries()[1:count]
    logprobs = [one.logprob for one in entries if one.logprob is not None]
    if len(entries) != count - 1 or len(logprobs) != len(entries) or len(entries) < _MIN_TOKENS:
        raise ReplicaFailed("it returns no log-probabilities of a prompt")
    return LogprobReading(tuple(one.text for one in entries), tuple(logprobs))


class LogprobReadings:
    """Names for weights that are only known by readings. A name is never used for other weights again."""

    def __init__(self) -> None:
        self._known: dict[str, list[tuple[str, LogprobReading]]] = {}
        self._numbers = itertools.count(1)

    def name(self, model: str, reading: LogprobReading) -> str:
        """The name of the weights, of which this is a reading, that are served as `model`."""
        known = self._known.setdefault(model, [])
        found = min(known, key=lambda one: one[1].difference(reading), default=None)
        if found is not None and found[1].difference(reading) <= TOLERANCE:
            return found[0]
        known.append((f"logprobs-{next(self._numbers)}", reading))
        del known[:-_MAX_KEPT]
        return known[-1][0]
