"""Tokens that a sequence may generate next, so that its text matches a grammar."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from llguidance import LLMatcher
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from numpy.typing import NDArray

from foreword.engine.structured.closing import ClosingPath
from foreword.engine.structured.vocabulary import Vocabulary

# Tokens, and times the length of the last known path: so near to the limit, each token is checked.
_NEAR: Final = 64
_MARGIN: Final = 3
_MAX_PENDING: Final = 64


class Constraint:
    """The state of a grammar after the tokens of a sequence.

    Args:
        matcher, closing: at the start of the text; they belong to this object. Without `closing` the text is not completed.
        on_failure: called when the grammar cannot be followed any more.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        matcher: LLMatcher,
        closing: ClosingPath | None,
        on_failure: Callable[[], None],
    ) -> None:
        self._vocabulary = vocabulary
        self._on_failure = on_failure
        self.matcher = matcher
        self._closing = closing
        # With more tokens left than this, the end of the text is far, and searched from time to time only.
        self._near = _NEAR if closing is None or closing.path is None else max(_NEAR, _MARGIN * len(closing.path))
        # Symbols that `closing` has not seen yet.
        self._pending: list[int] = []
        # A token and the path after it, from `choose` to `accept`.
        self._chosen: tuple[int, list[int] | None] | None = None

    @property
    def ended(self) -> bool:
        """Nothing can follow the text."""
        return self.matcher.is_stopped()

    def error(self) -> str | None:
        """Why the grammar cannot be followed any more; None if it can."""
        if not self.matcher.is_error():
            return None
        self._on_failure()
        return self.matcher.get_error().partition("\n")[0]

    def choose(self, token: int, left: int) -> int:
        """The token, if the text can end in time after it; else one that leads to its end. `left`: tokens that may follow."""
        closing = self._closing
        if closing is None or left > self._near or token in self._vocabulary.end_tokens:
            return token
        self._catch_up(closing, left + 1)
        path = self._path_after(closing, token, left)
        if path is not None and self._fits(path, left):
            self._chosen = token, path
            return token
        if closing.path is None or not self._fits(closing.path, left + 1):
            self._closing = None  # too few tokens are left for any known end
            return token
        if not closing.path:
            return self._vocabulary.end_tokens[0]
        first = self._vocabulary.spell(closing.path)[0]
        if self.matcher.validate_tokens([first]) != 1:
            self._closing = None  # a marker that the vocabulary of bytes spells in another way
            return token
        self._chosen = first, self._path_after(closing, first, left)
        return first

    def accept(self, token: int, left: int) -> bool:
        """The token is part of the text now. False if the grammar does not allow it."""
        if token in self._vocabulary.end_tokens:
            return self.matcher.is_accepting()
        chosen, self._chosen = self._chosen, None
        closing, symbols = self._closing, self._vocabulary.symbols(token)
        if closing is not None and left > self._near:
            self._pending += symbols
            if len(self._pending) > _MAX_PENDING:
                self._catch_up(closing, left)
        elif closing is not None:
            self._catch_up(closing, left + 1)
            known = chosen is not None and chosen[0] == token
            path = chosen[1] if known and chosen is not None else self._path_after(closing, token, left)
            closing.advance(symbols, path)
        return self.matcher.consume_token(token)

    def replay(self, tokens: Sequence[int], left: int) -> bool:
        """Accept tokens that were chosen elsewhere. False if the grammar does not allow them, or nothing can follow. `left`:
        tokens that might have been generated before the first one."""
        return all(self.accept(token, left - count) and not self.ended for count, token in enumerate(tokens, 1))

    def _catch_up(self, closing: ClosingPath, left: int) -> None:
        if self._pending:
            path = closing.after(self._pending, lambda found: self._fits(found, left))
            closing.advance(self._pending, path)
            self._pending = []
            self._near = max(self._near, _MARGIN * len(path or ()))

    def _path_after(self, closing: ClosingPath, token: int, left: int) -> list[int] | None:
        return closing.after(self._vocabulary.symbols(token), lambda found: self._fits(found, left))

    def _fits(self, path: Sequence[int], left: int) -> bool:
        """Whether the path and an end token take at most `left` tokens. A token has a byte at least."""
        return len(path) < left or len(self._vocabulary.spell(path)) < left


def allowed_tokens(constraints: Sequence[Constraint], vocab_size: int) -> NDArray[np.uint8]:
    """The tokens that may come next: bits, the lowest of a byte first, `[constraints, bytes]`.

    One after the other: threads of another pool would wait for those of the model, which spin between its operators.
    """
    mask = allocate_token_bitmask(len(constraints), vocab_size)
    for row, one in enumerate(constraints):
        fill_next_token_bitmask(one.matcher, mask, row)
    return mask.view(np.uint8)
