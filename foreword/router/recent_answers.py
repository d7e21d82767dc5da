"""Newest answers of replicas: how fast each replica answered, and whether it failed. The fleet page shows it."""

from __future__ import annotations

from collections import deque
from typing import Final

_TIMES: Final = 128
_OUTCOMES: Final = 8


class RecentAnswers:
    """Recent answers of one replica: its last 128 TTFTs and mean ITLs in seconds, and how its last requests ended.

    Attributes:
        problems: why requests failed, "" for those that did not; the newest last.
    """

    def __init__(self) -> None:
        self.ttft: deque[float] = deque(maxlen=_TIMES)
        self.itl: deque[float] = deque(maxlen=_TIMES)
        self.problems: deque[str] = deque(maxlen=_OUTCOMES)
