"""Text of tokens while they come, for every kind of vocabulary. Never raises for what a model can sample.

A text is decoded as bytes. Tokens that are parts of characters give their bytes: those of byte-level vocabularies (GPT-2,
Llama 3, Qwen) and the byte tokens `<0x00>` to `<0xFF>` of byte-fallback vocabularies (Llama 2, Mistral, Gemma). The tokenizer
decodes all others, each behind the token before it, because decoders may drop or add a space there. One incremental UTF-8
decoder runs over both. So a broken character costs one U+FFFD where it stands (Unicode standard, 3.9, "maximal subpart").
"""

from __future__ import annotations

import codecs
import functools
from collections.abc import Iterable, Sequence
from typing import Any, Final

_BROKEN: Final = "\ufffd"
# A character has at most four bytes, so the end of an incomplete one has at most three.
_MOST_PENDING: Final = 3
# Texts of single tokens, of some hundred bytes each.
_REMEMBERED: Final = 8192
_Utf8: Final = codecs.getincrementaldecoder("utf-8")


class TokenTexts:
    """Texts of a vocabulary's single tokens. Thread-safe.

    Args:
        backend: a `tokenizers.Tokenizer`.

    Attributes:
        special: ids of special tokens.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.alone = functools.lru_cache(_REMEMBERED)(self.decode)
        self.special = frozenset(token for token, added in backend.get_added_tokens_decoder().items() if added.special)
        self._fallback = {
            token: bytes([value])
            for value in range(256)
            for piece in (f"<0x{value:02X}>", f"<0x{value:02x}>")
            # Without the decoder of byte fallback it is text like any other.
            if (token := backend.token_to_id(piece)) is not None and self.decode(token) != piece
        }
        self.anchor = self._find_anchor()

    def decode(self, *tokens: int) -> str:
        """Tokens as one text, special tokens included. `alone` is the same with a memory."""
        return str(self._backend.decode(tokens, skip_special_tokens=False))

    def bytes_of(self, token: int) -> bytes | None:
        """The bytes of a token that is, or may be, a part of a character; None for text."""
        if token in self._fallback:
            return self._fallback[token]
        if _BROKEN not in self.alone(token):
            return None
        piece = self._backend.id_to_token(token)
        return bytes(map(_BYTE_OF_CHAR.__getitem__, piece)) if _BYTE_OF_CHAR.keys() >= set(piece) else None

    def text_behind(self, token: int, before: int | None) -> str:
        """The text of a token behind another one; at the start of a text if that is None."""
        if before is None:
            return self.alone(token)
        start, both = self.alone(before), self.decode(before, token)
        return both[len(start) :] if both.startswith(start) else self.alone(token)

    def known(self, token: int) -> bool:
        """Whether the tokenizer has this id: a model may have more."""
        return self._backend.id_to_token(token) is not None

    def _find_anchor(self) -> int | None:
        """A token of plain text, behind which others are decoded where the token before them is a part of a character."""
        for token in range(self._backend.get_vocab_size()):
            text = self.decode(token) if token not in self.special else ""
            if text.isascii() and text.isalnum() and self.decode(token, token).startswith(text):
                return token
        return None


class TextStream:
    """Incremental detokenizer of one sequence: returns complete characters only.

    The text is that of the bytes behind the prompt's. A character that the prompt begins and the output completes belongs to
    the output, nothing else of the prompt does.

    Args:
        prompt: token ids before the output.
        skip_special_tokens: special tokens have no text.
    """

    __slots__ = ("_before", "_fed", "_hidden", "_texts", "_utf8")

    def __init__(self, texts: TokenTexts, prompt: Sequence[int], skip_special_tokens: bool) -> None:
        self._texts = texts
        self._hidden: frozenset[int] = texts.special if skip_special_tokens else frozenset()
        # The token behind which the next one is decoded. None: no text yet.
        self._before: int | None = None
        self._utf8 = _Utf8("replace")
        self._fed = False
        self._begin_behind(reversed(prompt))

    def push(self, token: int) -> str:
        """The text that the token completes; empty for a part of a character, and for an id that is not in the tokenizer."""
        if token in self._hidden:
            return ""
        texts = self._texts
        data = texts.bytes_of(token)
        if data is not None:
            self._before = texts.anchor
        else:
            text = texts.text_behind(token, self._before)
            if not text and not texts.known(token):
                return ""
            data, self._before = text.encode(), token
        self._fed = True
        return self._utf8.decode(data)

    def flush(self) -> str:
        """U+FFFD for a character that the output has left incomplete; nothing follows."""
        rest = self._utf8.decode(b"", final=True)
        return rest if self._fed else ""

    def _begin_behind(self, backwards: Iterable[int]) -> None:
        """Find the last token with text, and the bytes of a character that the prompt leaves incomplete."""
        tail = b""
        for token in backwards:
            if token in self._hidden or not self._texts.known(token):
                continue
            data = self._texts.bytes_of(token)
            if self._before is None:
                self._before = token if data is None else self._texts.anchor
            if data is None:
                break
            tail = data + tail
            if len(tail) >= _MOST_PENDING:
                break
        self._utf8.decode(tail)


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable characters for bytes (Radford et al. 2019), used in byte-level BPE vocabularies."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    return alphabet | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_alphabet()
