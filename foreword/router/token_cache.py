"""Caches of tokenized text, and tokenization of conversations message by message.

Successive turns of a conversation repeat earlier messages, and many conversations share a system prompt. A chat text may be
split before special tokens without changing its tokens (`Tokenizer.cuts`), so each message is tokenized once.
"""

from __future__ import annotations

import logging
import re
import threading
from array import array
from collections import OrderedDict
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from foreword.engine.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_MAX_TOKENS: Final = 4_000_000
# The size of an entry beyond its tokens.
_ENTRY_TOKENS: Final = 64
# The first conversations are also tokenized as a whole, to detect a tokenizer for which splitting is wrong.
_CHECKED: Final = 16


class TokenLru:
    """A thread-safe LRU cache of token arrays with a budget in tokens."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._entries: OrderedDict[bytes, array[int]] = OrderedDict()
        self._held = 0
        self._lock = threading.Lock()

    @property
    def held(self) -> int:
        """The size of all entries in tokens."""
        return self._held

    def get(self, name: bytes) -> array[int] | None:
        with self._lock:
            found = self._entries.get(name)
            if found is not None:
                self._entries.move_to_end(name)
            return found

    def put(self, name: bytes, tokens: array[int]) -> None:
        size = len(tokens) + _ENTRY_TOKENS
        with self._lock:
            if name in self._entries or size > self._max_tokens:
                return
            self._entries[name] = tokens
            self._held += size
            while self._held > self._max_tokens:
                self._held -= len(self._entries.popitem(last=False)[1]) + _ENTRY_TOKENS

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()
            self._held = 0


def digest(text: bytes) -> bytes:
    """The name of a text in a cache."""
    return blake2b(text, digest_size=16).digest()


class MessageTokenizer:
    """Tokenizes conversations and caches the tokens of their messages. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, max_tokens: int = _MAX_TOKENS) -> None:
        self._tokenizer = tokenizer
        cuts = sorted(tokenizer.cuts(), key=len, reverse=True)
        # Matches before each of them.
        self._cut = re.compile(f"(?={'|'.join(map(re.escape, cuts))})") if cuts else None
        self._cache = TokenLru(max_tokens)
        self._to_check = _CHECKED

    @property
    def held(self) -> int:
        """Cached tokens."""
        return self._cache.held

    def tokens(self, text: str) -> array[int]:
        """Tokens of a rendered conversation."""
        cut = self._cut
        if cut is None:
            return self._encode(text)
        found = array("I")
        for part in cut.split(text):
            found += self._part(part)
        return self._checked(text, found) if self._to_check else found

    def _part(self, text: str) -> array[int]:
        name = digest(text.encode("utf-8", "surrogatepass"))
        tokens = self._cache.get(name)
        if tokens is None:
            tokens = self._encode(text)
            self._cache.put(name, tokens)
        return tokens

    def _checked(self, text: str, found: array[int]) -> array[int]:
        self._to_check -= 1
        whole = self._encode(text)
        if whole != found:
            logger.warning("with this tokenizer a text and its parts have different tokens: messages are not cached")
            self._cut, self._to_check = None, 0
            self._cache.clear()
        return whole

    def _encode(self, text: str) -> array[int]:
        return array("I", self._tokenizer.encode(text, add_special_tokens=False))
