"""A request on its way between two engines: MessagePack of frozen dataclasses, opaque to the package `transfer`.

The names of the fields are the wire format. A message comes over an authenticated link, and is still checked like a request of
a client.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from foreword.blocks.keys import token_bytes
from foreword.blocks.retention import Retention
from foreword.blocks.salt import NO_SALT, Salt
from foreword.decoders import decode_msgpack
from foreword.engine.request import MAX_N, CacheReport, SamplingParams
from foreword.errors import BadRequest
from foreword.tokens.token_logprob import TokenLogprob

VERSION = 2


@dataclass(frozen=True, slots=True)
class PrefillTask:
    """A prompt to compute for another instance, and how to sample the token after it.

    Attributes:
        tokens: uint32, little-endian.
        index, seed: of the sequence; with its position they determine the sample (`engine.sampling`).
    """

    id: str
    tokens: bytes
    params: SamplingParams
    seed: int
    index: int = 0
    salt: Salt = NO_SALT
    version: int = VERSION

    def __post_init__(self) -> None:
        _check_draw(self.seed, self.index)


@dataclass(frozen=True, slots=True)
class PrefillResult:
    """The token after a computed prompt. `cached_tokens` of the prompt were cached where it was computed."""

    token: int
    logprob: TokenLogprob | None
    cached_tokens: int
    version: int = VERSION


@dataclass(frozen=True, slots=True)
class MigrationOffer:
    """A request that is to migrate, as it is when it is offered.

    Attributes:
        id: its new and unique id at the destination.
        tokens: prompt and output so far; the first `prompt` of them are the prompt.
        max_total: length at which it ends.
        room: the destination needs blocks for so many tokens: no more have KV when it arrives.
        envelope: the server's: how the response is written. Opaque to engines.
        retain: what it keeps, as in `engine.request.Request`.
    """

    id: str
    tokens: bytes
    prompt: int
    params: SamplingParams
    seed: int
    max_total: int
    room: int
    index: int = 0
    salt: Salt = NO_SALT
    want_cache_report: bool = False
    envelope: bytes = b""
    version: int = VERSION
    retain: tuple[Retention, ...] = ()

    def __post_init__(self) -> None:
        _check_draw(self.seed, self.index)


@dataclass(frozen=True, slots=True)
class MigrationState:
    """The final state of a request that was offered: the `tokens` since then, and its counters. Seconds are ages. `hidden`: its
    tenant was forgotten while it ran."""

    tokens: bytes
    cached_tokens: int
    shared_tokens: int
    age: float
    token_age: float
    preemptions: int = 0
    report: CacheReport | None = None
    hidden: bool = False
    version: int = VERSION


Kind = TypeVar("Kind")
_ENCODER = msgspec.msgpack.Encoder()


def encode(message: object) -> bytes:
    return _ENCODER.encode(message)


def decode(kind: type[Kind], data: bytes) -> Kind:
    """Raises BadRequest for what is not a message of this kind and version."""
    try:
        found = decode_msgpack(data, kind)
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
    """Tokens from uint32 little-endian. Raises BadRequest."""
    if len(data) % 4:
        raise BadRequest("the tokens of a request are not whole")
    return struct.unpack(f"<{len(data) // 4}I", data)
