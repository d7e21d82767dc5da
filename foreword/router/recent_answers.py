"""Newest answers of replicas: how fast each replica answered, whether it failed, and with which prefixes the prompts began.
The fleet page shows it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Final, NamedTuple

from foreword.routing.placement import Decision, KeySpace, PlacementQuery

_TIMES: Final = 128
_OUTCOMES: Final = 8
_PROMPTS: Final = 1024


class RecentAnswers:
    """Recent answers of one replica: its last 128 TTFTs and mean ITLs in seconds, and how its last requests ended.

    Attributes:
        problems: why requests failed, "" for those that did not; the newest last.
    """

    def __init__(self) -> None:
        self.ttft: deque[float] = deque(maxlen=_TIMES)
        self.itl: deque[float] = deque(maxlen=_TIMES)
        self.problems: deque[str] = deque(maxlen=_OUTCOMES)


class PromptStart(NamedTuple):
    """A prompt that began with what a replica had. `ends`: the last block of that, in each key space."""

    tenant: str
    name: str | None
    tokens: int
    ends: Mapping[KeySpace, bytes]
    request_id: str


class SharedPrefixes:
    """The starts of the last 1,024 prompts of a model; None for one that began with nothing known. No text, no tokens."""

    def __init__(self) -> None:
        self.prompts: deque[PromptStart | None] = deque(maxlen=_PROMPTS)

    def record(self, request_id: str, tenant: str, name: str | None, query: PlacementQuery, decision: Decision) -> None:
        """Note a prompt. `name`: of the named prefix that it begins with."""
        tokens = max([one.reused for one in decision.estimates], default=0)
        if not tokens:
            self.prompts.append(None)
            return
        spaces = (query.key_space, *query.other_keys)
        known = {space: query.keys_in(space)[: tokens // space[1]] for space in spaces}
        ends = {space: keys[-1] for space, keys in known.items() if keys}
        self.prompts.append(PromptStart(tenant, name, tokens, ends, request_id) if ends else None)
