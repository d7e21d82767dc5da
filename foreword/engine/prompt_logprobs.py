"""Log-probabilities of a prompt's own tokens, gathered while its chunks are computed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from foreword.engine.request import Request
from foreword.tokens.token_logprob import TokenLogprob

if TYPE_CHECKING:
    from torch import Tensor

# Rows of logits that a step computes for prompts; a row of 150,000 entries takes a megabyte with its softmax.
MAX_ROWS: Final = 64


class PromptLogprobs:
    """The log-probabilities of one prompt. The sequences of a request share it; the first one computes the prompt.

    Attributes:
        entries: one per token so far; None for the first, which nothing precedes.
    """

    def __init__(self, request: Request, count: int) -> None:
        self._tokens = request.tokens
        self._count = count
        self.entries: list[TokenLogprob | None] = [None]

    @property
    def complete(self) -> bool:
        return len(self.entries) == len(self._tokens)

    def positions(self, start: int, count: int) -> range:
        """Positions of a chunk whose logits are needed: those before the tokens that have no entry yet."""
        return range(max(start, len(self.entries) - 1), min(start + count, len(self._tokens) - 1))

    def add(self, logits: Tensor) -> None:
        """Rows of logits of the next positions."""
        import torch

        first = len(self.entries)
        logprobs = torch.log_softmax(logits.float(), dim=-1)
        chosen = torch.tensor(self._tokens[first : first + len(logits)], device=logits.device)
        own = logprobs.gather(1, chosen[:, None])[:, 0].tolist()
        top = torch.topk(logprobs, self._count, dim=-1)
        ranked = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        for token, logprob, (tokens, values) in zip(chosen.tolist(), own, ranked, strict=True):
            self.entries.append(TokenLogprob(token, logprob, tuple(zip(tokens, values, strict=True))))
