"""A token with its log-probability, in one form, whatever server it is of and whatever dialect writes it, and in a chat's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


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


def for_chat(found: Sequence[TokenEntry]) -> dict[str, Any]:
    """The `logprobs` of a chat choice."""
    return {"content": [_chat_entry(entry) for entry in found], "refusal": None}


def _chat_entry(entry: TokenEntry) -> dict[str, Any]:
    top = [_chat_token(*one) for one in entry.top]
    return {**_chat_token(entry.text, entry.logprob, entry.raw), "top_logprobs": top}


def _chat_token(text: str, logprob: float | None, raw: bytes) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(raw)}
