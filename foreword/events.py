"""Events of the engine, and the protocol of observers that receive them.

Observers are called on the engine's thread: they must be fast and must not raise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from foreword.usage import MissExplained


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Blocks were published, in chain order, possibly one step before they are computed.

    A key is reported again when a second copy of its block is filled (dev/decisions/0003). `BlocksRemoved` reports only the
    loss of the last copy. So an observer keeps a set of keys and does not count.

    Attributes:
        parent: key of the block before the first of these.
        tokens: tokens of these blocks.
        salt: `Salt.text` if these are the first blocks of a chain, or the first behind its public blocks; else None.
    """

    parent: bytes
    keys: tuple[bytes, ...]
    tokens: Sequence[int] = ()
    salt: str | None = None


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks with these keys are not on the device any more."""

    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class PrefixLookup:
    """A request was admitted for the first time: its prompt tokens, how many were cached, how many of these came from each
    tier off the device, and how long they took to come."""

    request_id: str
    queried_tokens: int
    hit_tokens: int
    loaded_tokens: tuple[tuple[str, int], ...] = ()
    load_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class RequestPreempted:
    """A running request lost its blocks and waits to be admitted again."""

    request_id: str


@dataclass(frozen=True, slots=True)
class FirstToken:
    """A request's first token was generated: time to first token, and the part of it spent in the queue."""

    request_id: str
    seconds: float
    queued: float


@dataclass(frozen=True, slots=True)
class NextTokens:
    """Inter-token latencies of one step: per sequence, seconds since its previous token."""

    seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class RequestFinished:
    """A sequence ended, `seconds` after its arrival. `keys` are the keys of the full blocks of its prompt and output."""

    request_id: str
    reason: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    seconds: float
    keys: Sequence[bytes] = ()


@dataclass(frozen=True, slots=True)
class RequestBroken:
    """Something raised while the engine worked on one request, which has ended with an error. `error`: the class of it."""

    request_id: str
    error: str


@dataclass(frozen=True, slots=True)
class StepFinished:
    """A step of the engine: what it computed, how long it took, and the state after it.

    Attributes:
        prefill_pairs: pairs of prefilled tokens and tokens before them.
        decode_context: tokens before those that were decoded, of all sequences together.
    """

    seconds: float
    prefill_tokens: int
    prefill_pairs: int
    decode_tokens: int
    decode_context: int
    running: int
    waiting: int
    kv_usage: float


@dataclass(frozen=True, slots=True)
class TransferEnded:
    """A KV transfer between two instances has ended.

    Attributes:
        kind: `prefill` (a prompt computed for another instance) or `move` (migration of a running request).
        side: `source` or `destination`.
        outcome: `taken`, or the reason of the failure (`transfer.messages.Reason`).
        seconds: duration of the transfer.
        hidden_bytes: those of the source's `bytes` that were sent before the last layer of the prompt was computed.
        pause: seconds in which a migrated request was not decoded.
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
    | RequestBroken
    | StepFinished
    | TransferEnded
    | MissExplained
)


class Observer(Protocol):
    """Receives events."""

    def notify(self, event: Event) -> None: ...
