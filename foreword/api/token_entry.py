"""A token with its log-probability, in one form, whatever server it is of and whatever dialect writes it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """A token with its log-probability, as texts and numbers. `api.logprobs` makes them.

    Attributes:
        text: `bytes:\\xf0\\x9f` where the token is only a part of a character.
        logprob: None for the first token of a prompt.
        raw: the token's bytes. `hidden`: it is not part of the text (a special token).
        top: the likeliest tokens, best first: text, log-probability and bytes of each.
    """

    text: str
    logprob: float | None
    raw: bytes
    hidden: bool = False
    top: tuple[tuple[str, float, bytes], ...] = ()
