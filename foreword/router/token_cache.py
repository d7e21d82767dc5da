"""Conversations to tokens, without tokenizing again what was there before.

The text of a turn begins with that of the turn before, and many conversations begin with the same system prompt. A text may be
cut before special tokens without changing its tokens (`Tokenizer.cuts`), so each message is tokenized once.
"""

from __future__ import annotations

import logging
import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from foreword.engine.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_KEPT_TOKENS: Final = 4_000_000
# Conversations that are tokenized whole as well: a tokenizer that does not keep the rule is found out.
_CHECKED: Final = 16


class Turns:
    """Keeps the tokens of messages: at most 4 million tokens, the least recently used forgotten first. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, most: int = _KEPT_TOKENS) -> None:
        self._tokenizer = tokenizer
        self._most = most
        cuts = sorted(tokenizer.cuts(), key=len, reverse=True)
        # Splits before each of them.
        self._cut = re.compile(f"(?={'|'.join(map(re.escape, cuts))})") if cuts else None
        self._known: OrderedDict[bytes, array[int]] = OrderedDict()
        self._held = 0
        self._to_check = _CHECKED
        self._lock = threading.Lock()

    @property
    def held(self) -> int:
        """Tokens that are remembered."""
        return self._held

    def tokens(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool) -> array[int]:
        """Of a conversation. Raises BadRequest as `Tokenizer.render_chat` does."""
        text = self._tokenizer.chat_text(messages, add_generation_prompt=add_generation_prompt)
        cut = self._cut
        if cut is None:
            return self._encode(text)
        found = array("I")
        for part in cut.split(text):
            found += self._part(part)
        return self._checked(text, found) if self._to_check else found

    def _part(self, text: str) -> array[int]:
        name = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        with self._lock:
            known = self._known.get(name)
            if known is not None:
                self._known.move_to_end(name)
                return known
        made = self._encode(text)
        with self._lock:
            if name not in self._known:
                self._known[name] = made
                self._held += _size(made)
            while self._held > self._most:
                self._held -= _size(self._known.popitem(last=False)[1])
        return made

    def _checked(self, text: str, found: array[int]) -> array[int]:
        self._to_check -= 1
        whole = self._encode(text)
        if whole != found:
            logger.warning("this tokenizer makes other tokens of a whole text than of its parts: nothing is kept")
            with self._lock:
                self._cut, self._to_check, self._held = None, 0, 0
                self._known.clear()
        return whole

    def _encode(self, text: str) -> array[int]:
        return array("I", self._tokenizer.encode(text, add_special_tokens=False))


def _size(tokens: array[int]) -> int:
    """A part that is kept costs more than its tokens."""
    return len(tokens) + 64
