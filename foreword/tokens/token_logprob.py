"""Log-probabilities of tokens, as the engine reports them. No torch."""

from __future__ import annotations

from dataclasses import dataclass

# The most alternatives that are reported of a token.
MAX_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability (natural) of a chosen token and of the likeliest alternatives, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
