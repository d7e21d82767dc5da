"""Log-probabilities in the formats of OpenAI's completions and chat."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from foreword.engine.request import TokenLogprob

if TYPE_CHECKING:
    from foreword.engine.tokenizer import Tokenizer

# JSON has no infinity. OpenAI and vLLM use this value for probability 0.
_IMPOSSIBLE = -9999.0


def name_of(tokenizer: Tokenizer, token: int) -> str:
    """A token as text; as `bytes:\\xf0\\x9f` where it is only a part of a character."""
    text = tokenizer.token_text(token)
    if "\ufffd" not in text:
        return text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in tokenizer.token_bytes(token))


def for_chat(tokenizer: Tokenizer, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    """The `logprobs` of a chat choice."""
    return {"content": [_chat_entry(tokenizer, entry) for entry in entries], "refusal": None}


def _chat_entry(tokenizer: Tokenizer, entry: TokenLogprob) -> dict[str, Any]:
    top = [_chat_token(tokenizer, token, logprob) for token, logprob in entry.top]
    return {**_chat_token(tokenizer, entry.token, entry.logprob), "top_logprobs": top}


def _chat_token(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token)
    return {"token": name_of(tokenizer, token), "logprob": max(logprob, _IMPOSSIBLE), "bytes": list(raw)}


class Offsets:
    """The offset of each token in a completion's text, in characters, while the text grows."""

    def __init__(self, start: int = 0) -> None:
        self._position = start
        # The bytes of one character may belong to several tokens. It counts for the token with its last byte.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def next(self, tokenizer: Tokenizer, token: int) -> int:
        """The offset of the next token. Special tokens have an offset but no text."""
        offset = self._position
        if tokenizer.decode([token]):
            self._position += len(self._decoder.decode(tokenizer.token_bytes(token)))
        return offset


def for_completion(tokenizer: Tokenizer, entries: Sequence[TokenLogprob], offsets: Offsets) -> dict[str, Any]:
    """The `logprobs` of a completion's choice. The chosen token is always in `top_logprobs`, as at OpenAI."""
    return {
        "tokens": [name_of(tokenizer, entry.token) for entry in entries],
        "token_logprobs": [max(entry.logprob, _IMPOSSIBLE) for entry in entries],
        "top_logprobs": [_likeliest(tokenizer, entry) for entry in entries],
        "text_offset": [offsets.next(tokenizer, entry.token) for entry in entries],
    }


def _likeliest(tokenizer: Tokenizer, entry: TokenLogprob) -> dict[str, float]:
    pairs = [*entry.top, (entry.token, entry.logprob)]
    named: dict[str, float] = {}
    for token, logprob in pairs:
        # Of two tokens with the same text, the likelier one comes first and is kept.
        named.setdefault(name_of(tokenizer, token), max(logprob, _IMPOSSIBLE))
    return named
