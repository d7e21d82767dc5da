"""Frozen facts about what happened, and the protocol of those who want to know.

Times are seconds of `time.monotonic()`. An observer is called on the engine's thread: it must be quick and must not raise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Blocks became visible to lookups, in chain order, maybe a step before they are computed.

    A key comes again when a second copy of its block is filled (docs/decisions/0003), in the same place of the same chain;
    `BlocksRemoved` tells of the last copy only. So an observer keeps a set of keys, and never counts events up and down.

    Attributes:
        parent: the key before the first of them.
        tokens: what they hold.
        salt: the tenant's, where the chain begins with them; else None.
    """

    parent: bytes
    keys: tuple[bytes, ...]
    tokens: Sequence[int] = ()
    salt: bytes | None = None


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Keys that no block on the device holds any more."""

    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class PrefixLookup:
    """A request was admitted for the first time: how many of its prompt's tokens were asked for and found, and how many of
    the found ones came from each tier off the device."""

    request_id: str
    queried_tokens: int
    hit_tokens: int
    loaded_tokens: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class RequestPreempted:
    """A running request lost its blocks and waits again."""

    request_id: str


@dataclass(frozen=True, slots=True)
class FirstToken:
    """A request's first token appeared. Seconds since the request arrived; `queued` is the part spent waiting."""

    request_id: str
    seconds: float
    queued: float


@dataclass(frozen=True, slots=True)
class NextTokens:
    """Seconds between a sequence's previous token and this step's, once per sequence and step."""

    seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class RequestFinished:
    """A sequence ended. Seconds since it arrived; `keys` are those of the full blocks of its prompt and answer."""

    request_id: str
    reason: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    seconds: float
    keys: Sequence[bytes] = ()


@dataclass(frozen=True, slots=True)
class StepFinished:
    """One step of the engine: what it computed, how long it took, and the state after it."""

    seconds: float
    prefill_tokens: int
    decode_tokens: int
    running: int
    waiting: int
    kv_usage: float


@dataclass(frozen=True, slots=True)
class TransferEnded:
    """A transfer of KV between two instances is over.

    Attributes:
        kind: `prefill` (a prompt computed for another instance) or `move` (a running request).
        side: `source` or `destination`.
        outcome: `taken`, or why not (`transfer.messages.Reason`).
        seconds: from its beginning to its end.
        hidden_bytes: of the source's `bytes`, what was sent before the last layer of the prompt was computed.
        pause: seconds in which a request that moved was not decoded.
    """

    kind: str
    side: str
    outcome: str
    bytes: int
    parts: int
    seconds: float
    hidden_bytes: int = 0
    pause: float = 0.0


Event = (
    BlocksStored
    | BlocksRemoved
    | PrefixLookup
    | RequestPreempted
    | FirstToken
    | NextTokens
    | RequestFinished
    | StepFinished
    | TransferEnded
)


class Observer(Protocol):
    """Whoever wants to know."""

    def notify(self, event: Event) -> None: ...
