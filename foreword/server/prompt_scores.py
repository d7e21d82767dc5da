"""Log-probabilities of a prompt in the format of vLLM's `prompt_logprobs`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from foreword.api.logprobs import IMPOSSIBLE, name_of
from foreword.tokens.token_logprob import TokenLogprob

if TYPE_CHECKING:
    from foreword.tokens.tokenizer import Tokenizer


def for_prompt(tokenizer: Tokenizer, found: Sequence[TokenLogprob | None]) -> tuple[dict[str, Any] | None, ...]:
    """vLLM's `prompt_logprobs`: by token id, for each token of the prompt. The first one has None."""
    return tuple(None if one is None else _by_id(tokenizer, one) for one in found)


def _by_id(tokenizer: Tokenizer, one: TokenLogprob) -> dict[str, Any]:
    ranks: dict[int, int | None] = {token: rank for rank, (token, _) in enumerate(one.top, 1)}
    values = {**dict(one.top), one.token: one.logprob}
    return {
        str(token): {
            "logprob": max(logprob, IMPOSSIBLE),
            "rank": ranks.get(token),
            "decoded_token": name_of(tokenizer, token),
        }
        for token, logprob in values.items()
    }
