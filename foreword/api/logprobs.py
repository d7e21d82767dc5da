"""Log-probabilities of tokens with their texts, and in the format of OpenAI's completions."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from foreword.api.token_entry import TokenEntry
from foreword.tokens.token_logprob import TokenLogprob

if TYPE_CHECKING:
    from foreword.tokens.tokenizer import Tokenizer

# JSON has no infinity. OpenAI and vLLM use this value for probability 0.
IMPOSSIBLE = -9999.0


def name_of(tokenizer: Tokenizer, token: int) -> str:
    """A token as text; as `bytes:\\xf0\\x9f` where it is only a part of a character."""
    text = tokenizer.token_text(token)
    if "\ufffd" not in text:
        return text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in tokenizer.token_bytes(token))


def entries(tokenizer: Tokenizer, found: Sequence[TokenLogprob]) -> tuple[TokenEntry, ...]:
    """Entries for the tokens that the engine reports, with their texts."""
    return tuple(_entry(tokenizer, one) for one in found)


def prompt_entries(tokenizer: Tokenizer, first: int, found: Sequence[TokenLogprob | None]) -> tuple[TokenEntry, ...]:
    """Entries of a prompt, whose `first` token has no log-probability."""
    text, _, raw = _named(tokenizer, first, 0.0)
    known = [one for one in found if one is not None]
    return (TokenEntry(text, None, raw, not tokenizer.decode([first])), *entries(tokenizer, known))


def _entry(tokenizer: Tokenizer, one: TokenLogprob) -> TokenEntry:
    top = tuple(_named(tokenizer, token, logprob) for token, logprob in one.top)
    text, logprob, raw = _named(tokenizer, one.token, one.logprob)
    return TokenEntry(text, logprob, raw, not tokenizer.decode([one.token]), top)


def _named(tokenizer: Tokenizer, token: int, logprob: float) -> tuple[str, float, bytes]:
    return name_of(tokenizer, token), max(logprob, IMPOSSIBLE), tokenizer.token_bytes(token)


class Offsets:
    """The offset of each token in a completion's text, in characters, while the text grows."""

    def __init__(self) -> None:
        self._position = 0
        # The bytes of one character may belong to several tokens. It counts for the token with its last byte.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def next(self, entry: TokenEntry) -> int:
        """The offset of the next token. Special tokens have an offset but no text."""
        offset = self._position
        if not entry.hidden:
            self._position += len(self._decoder.decode(entry.raw))
        return offset


def for_completion(found: Sequence[TokenEntry], offsets: Offsets) -> dict[str, Any]:
    """The `logprobs` of a completion's choice. The chosen token is always in `top_logprobs`, as at OpenAI."""
    return {
        "tokens": [entry.text for entry in found],
        "token_logprobs": [entry.logprob for entry in found],
        "top_logprobs": [_likeliest(entry) for entry in found],
        "text_offset": [offsets.next(entry) for entry in found],
    }


def _likeliest(entry: TokenEntry) -> dict[str, float] | None:
    if entry.logprob is None:
        return None
    named: dict[str, float] = {}
    for text, logprob, _ in (*entry.top, (entry.text, entry.logprob, b"")):
        # The likelier one of two tokens with the same text comes first and is kept.
        named.setdefault(text, logprob)
    return named
