"""An account of a request by a server or a router: the tokens that it used, and why part of its prompt was not cached."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import msgspec


class TokenUsage(msgspec.Struct, frozen=True, omit_defaults=True):
    """Tokens of one request.

    Attributes:
        prompt: of all prompts, cached ones included.
        output: generated, `reasoning` ones included.
        cached: prompt tokens whose KV was reused.
        read: those of them that came from elsewhere than the device, by tier or instance, where that is known.
        model: as its server names it. weights: the fingerprint of what computed them; empty if it is not known.
    """

    prompt: Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)] = 0
    output: Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)] = 0
    cached: Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)] = 0
    reasoning: int = 0
    read: dict[str, int] = {}
    model: str = ""
    weights: str = ""

    @property
    def charged(self) -> int:
        """The charge against a quota."""
        return self.prompt + self.output


@dataclass(frozen=True, slots=True)
class MissExplained:
    """Why part of a request's prompt was not cached: the cause, the field of the request that differs, and the tokens that it
    cost. It comes after the request's first token, and may come after its end."""

    request_id: str
    cause: str
    where: str
    tokens_lost: int
