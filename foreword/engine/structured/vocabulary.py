"""A model's tokens as llguidance needs them, and the vocabulary of single bytes in which endings of texts are searched."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Final

from llguidance import LLTokenizer, TokenizerWrapper

NUM_BYTES: Final = 256
_TOKEN_ID: Final = re.compile(r"<\[(\d{1,7})\]>")


class Vocabulary:
    """Made once per model: takes up to a second for 150,000 tokens.

    The vocabulary of bytes has the 256 bytes, then an end token, then the model's special tokens.

    Args:
        tokenizer_json: of the model's tokenizer.
        size: entries of a row of logits.
        end_tokens: token ids that end a text.
    """

    def __init__(self, tokenizer_json: str, size: int, end_tokens: Sequence[int]) -> None:
        self.size = size
        self.end_tokens = tuple(end_tokens)
        self.tokens = LLTokenizer(tokenizer_json, n_vocab=size, eos_token=list(end_tokens))
        special = [token for token in range(size) if self.tokens.is_special_token(token)]
        self._symbol_of_special = {token: NUM_BYTES + 1 + place for place, token in enumerate(special)}
        self._special_of_symbol = {symbol: token for token, symbol in self._symbol_of_special.items()}
        names = [self.tokens.decode_bytes([token]) for token in special]
        self.end_symbol = NUM_BYTES
        wrapped = TokenizerWrapper(_Bytes(names))
        self.bytes = LLTokenizer(wrapped, n_vocab=len(wrapped.tokens), eos_token=NUM_BYTES, slices=[])

    def symbols(self, token: int) -> list[int]:
        """A token in the vocabulary of bytes."""
        special = self._symbol_of_special.get(token)
        return list(self.tokens.decode_bytes([token])) if special is None else [special]

    def grammar_in_bytes(self, lark: str) -> str:
        """A Lark grammar with its token ids (`<[17]>`) as this vocabulary of bytes has them."""
        return _TOKEN_ID.sub(lambda found: self._in_bytes(int(found[1])), lark)

    def _in_bytes(self, token: int) -> str:
        if token >= self.size:
            return f"<[{token}]>"
        symbol = self._symbol_of_special.get(token)
        return json.dumps(self.tokens.decode_str([token])) if symbol is None else f"<[{symbol}]>"

    def spell(self, symbols: Sequence[int]) -> list[int]:
        """Tokens of the model for these symbols, the longest that fits first. What is left after some of its tokens is
        spelled as those that follow them."""
        tokens: list[int] = []
        start = 0
        for place, symbol in enumerate(symbols):
            if symbol >= NUM_BYTES:
                tokens += self._greedy(symbols[start:place])
                tokens.append(self._special_of_symbol[symbol])
                start = place + 1
        return tokens + self._greedy(symbols[start:])

    def _greedy(self, symbols: Sequence[int]) -> list[int]:
        # `greedy_tokenize` takes a text, and a path may end a character that has begun.
        text = bytes(symbols).decode("utf-8", "surrogateescape")
        if text.isascii() or not any("\udc80" <= char <= "\udcff" for char in text):
            return self.tokens.greedy_tokenize(text)
        return [token for symbol in symbols for token in self.tokens.tokenize_bytes(bytes([symbol]))]


class _Bytes:
    """The tokenizer of the vocabulary of bytes, in the form that llguidance takes."""

    def __init__(self, special: Sequence[bytes]) -> None:
        self.eos_token_id = NUM_BYTES
        self.bos_token_id = None
        self.tokens = [bytes([value]) for value in range(NUM_BYTES)] + [b"<|end of text|>", *special]
        self.special_token_ids = list(range(NUM_BYTES, len(self.tokens)))

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)
