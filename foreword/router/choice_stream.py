"""A choice of a streamed response: what the client has of it, and how another replica continues it."""

from __future__ import annotations

from typing import Any

from foreword.api.dialects.answer_reader import AnswerChoice
from foreword.request_errors import ReplicaFailed
from foreword.router.continuation import ContinuedResponse


class NotReproduced(ReplicaFailed):
    """The replica that repeats a response does not compute what the client has of it."""


class ChoiceStream:
    """The part of a choice that was sent.

    Attributes:
        tokens: ids of its output.
        settled: numbers of tokens and characters when the text last ended where a token does.
        text: pieces of text that were sent. without_ids: it has output whose tokens are not known.
        has_role: the chunk with the role was sent.
        finish_reason: set once it was sent.
        continuation: converts the next replica's chunks; None if they are those of the client.
        repeated: tokens of the next replica that were compared with `tokens`; None if it continues after them.
    """

    __slots__ = (
        "_entries",
        "_length",
        "continuation",
        "finish_reason",
        "has_role",
        "repeated",
        "settled",
        "text",
        "tokens",
        "without_ids",
    )

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.text: list[str] = []
        self.settled = (0, 0)
        self.without_ids = self.has_role = False
        self.finish_reason: str | None = None
        self.continuation: ContinuedResponse | None = None
        self.repeated: int | None = None
        self._length = self._entries = 0

    @property
    def entries(self) -> int:
        """The number of tokens whose ids and log-probabilities were sent."""
        return max(self._entries, len(self.tokens))

    @property
    def sent_text(self) -> str:
        """All text that was sent."""
        if len(self.text) > 1:
            self.text = ["".join(self.text)]
        return self.text[0] if self.text else ""

    @property
    def can_go_on(self) -> bool:
        """Whether a server can write the rest behind the tokens: all that was sent is in them."""
        return bool(self.tokens) or not (self.without_ids or self.text)

    def add(self, text: str, ids: list[int] | None) -> None:
        """More text that the client gets, with these tokens."""
        self.text.append(text)
        self._length += len(text)
        # One token: nothing is held back; otherwise the text would be that of earlier tokens. Behind a broken character vLLM
        # cannot continue: it would repeat the prompt.
        if ids and len(ids) == 1 and not text.endswith("\ufffd"):
            self.settled = (len(self.tokens), self._length)

    def cut_to(self, tokens: list[int], repeated: int) -> None:
        """Another replica continues after these tokens, and computes the next `repeated` again."""
        self._entries = max(self.entries, len(tokens) + repeated)
        self.tokens = tokens

    def take(self, choice: AnswerChoice, wants_token_ids: bool) -> tuple[dict[str, Any] | None, bool]:
        """The client's choice for one of the replica that continues it, None without any; and whether the router found its end.

        Raises ReplicaFailed for malformed log-probabilities, and NotReproduced.
        """
        assert self.continuation is not None
        if self.finish_reason is not None and self.repeated is None:
            return None, False
        self._compare(choice)
        if self.finish_reason is not None:
            return None, False
        text, made = self.continuation.convert(choice, wants_token_ids)
        if made is None:
            return None, False
        if text:
            self.add(text, choice.token_ids)
        self.finish_reason = made.get("finish_reason")
        return made, self.finish_reason is not None and choice.finish_reason is None

    def _compare(self, choice: AnswerChoice) -> None:
        """Note the tokens of the replica that continues it. Those of the client must be the same again, and all must come."""
        ids = choice.token_ids or []
        if self.repeated is None:
            self.tokens += ids
            return
        known = self.tokens[self.repeated : self.repeated + len(ids)]
        if known != ids[: len(known)]:
            raise NotReproduced("another replica computes other tokens from the same seed")
        unseen = bool(choice.shown) and not ids and self.repeated < len(self.tokens)
        self.repeated += len(ids)
        if unseen or (choice.finish_reason and self.finish_reason is None and self.repeated < len(self.tokens)):
            raise NotReproduced("another replica does not send all tokens again that the client has")
        if self.finish_reason is None:
            self.tokens += ids[len(known) :]
