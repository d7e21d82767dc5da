"""What a request is on its way between two engines: MessagePack of frozen dataclasses, opaque to the room `transfer`.

Nothing of it is trusted further than a request of a client's: it comes over an authenticated link, and is checked again.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from foreword.blocks.keys import token_bytes
from foreword.engine.request import MAX_N, CacheReport, SamplingParams, TokenLogprob
from foreword.errors import BadRequest

VERSION = 1


@dataclass(frozen=True, slots=True)
class Task:
    """A prompt to be computed for another instance, and the draw of the token that follows it.

    Attributes:
        tokens: uint32, little-endian.
        index, seed: of the sequence; with its position they decide the draw (engine/sampling.py).
    """

    id: str
    tokens: bytes
    params: SamplingParams
    seed: int
    index: int = 0
    salt: bytes = b""
    version: int = VERSION

    def __post_init__(self) -> None:
        _check_draw(self.seed, self.index)


@dataclass(frozen=True, slots=True)
class Computed:
    """The token that follows a computed prompt. `cached_tokens` of the prompt were cached where it was computed."""

    token: int
    logprob: TokenLogprob | None
    cached_tokens: int
    version: int = VERSION


@dataclass(frozen=True, slots=True)
class Moving:
    """A request that could move, as it is at the offer.

    Attributes:
        id: under which the new instance keeps it; nobody else's.
        tokens: prompt and output so far; `prompt` of them are the prompt.
        max_total: length at which it ends.
        room: the new instance needs blocks for so many tokens: no more have KV when it arrives.
        envelope: the front door's: how its answer is written. Opaque to engines.
    """

    id: str
    tokens: bytes
    prompt: int
    params: SamplingParams
    seed: int
    max_total: int
    room: int
    index: int = 0
    salt: bytes = b""
    want_cache_report: bool = False
    envelope: bytes = b""
    version: int = VERSION

    def __post_init__(self) -> None:
        _check_draw(self.seed, self.index)


@dataclass(frozen=True, slots=True)
class Rest:
    """What became of it until it was paused: `tokens` followed, and what was counted. Seconds are ages."""

    tokens: bytes
    cached_tokens: int
    shared_tokens: int
    age: float
    token_age: float
    preemptions: int = 0
    report: CacheReport | None = None
    version: int = VERSION


Kind = TypeVar("Kind")
_ENCODER = msgspec.msgpack.Encoder()


def encode(message: object) -> bytes:
    return _ENCODER.encode(message)


def decode(kind: type[Kind], data: bytes) -> Kind:
    """Raises BadRequest for what is not a message of this kind and version."""
    try:
        found = msgspec.msgpack.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise BadRequest(f"the description of a request is malformed: {error}") from error
    version = getattr(found, "version", VERSION)
    if version != VERSION:
        raise BadRequest(
            f"a request is described in version {version}, not {VERSION}: both instances need the same Foreword"
        )
    return found


def _check_draw(seed: int, index: int) -> None:
    if not (0 <= seed < 2**63 and 0 <= index < MAX_N):
        raise BadRequest("a request's seed or index is out of range")


def pack(tokens: Iterable[int]) -> bytes:
    """Tokens as uint32 little-endian."""
    return token_bytes(tokens)


def unpack(data: bytes) -> tuple[int, ...]:
    """The other way. Raises BadRequest."""
    if len(data) % 4:
        raise BadRequest("the tokens of a request are not whole")
    return (
        tuple(array("I", data))
        if _LITTLE
        else tuple(int.from_bytes(data[i : i + 4], "little") for i in range(0, len(data), 4))
    )


_LITTLE = array("I", [1]).tobytes()[0] == 1
