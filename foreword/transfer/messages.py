"""The wire format: a head of 64 bytes, metadata in MessagePack, then the payload (docs/concepts/transfer.md).

Offset  Bytes  Field, integers little-endian
0       4      magic "FWTX"
4       2      version of the protocol, 1
6       1      kind of message
7       1      flags: 1 = the payload has a checksum
8       16     id of the transfer, zeros for what concerns the connection
24      4      length of the metadata
28      4      reserved, 0
32      8      length of the payload
40      8      XXH3-64 of the payload, 0 without the flag
48      8      place of the payload in a shared segment, 0 elsewhere
56      8      XXH3-64 of bytes 0..55 and the metadata

Lengths are bounded before anything is allocated. Whatever is wrong with a message is a `BadMessage`: its bytes cannot be
trusted to say where the next one begins, so the connection ends with it. A payload that does not fit its checksum is another
matter: it fails one transfer, the connection goes on.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Final, NamedTuple

import msgspec
import xxhash

from foreword.blocks.keys import KEY_BYTES
from foreword.blocks.layout import NAME_BYTES
from foreword.errors import BadMessage

MAGIC: Final = b"FWTX"
VERSION: Final = 1
HEAD_BYTES: Final = 64
ID_BYTES: Final = 16
NO_TRANSFER: Final = bytes(ID_BYTES)
MAX_METADATA: Final = 16 << 20
MAX_PAYLOAD: Final = 256 << 20
_SUMMED: Final = 1
_HEAD = struct.Struct(f"<4sHBB{ID_BYTES}sIIQQQ")
_SUM = struct.Struct("<Q")
assert _HEAD.size + _SUM.size == HEAD_BYTES

Small = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
Large = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
Text = Annotated[str, msgspec.Meta(max_length=2000)]
Word = Annotated[str, msgspec.Meta(max_length=100)]
Document = Annotated[str, msgspec.Meta(max_length=1 << 20)]
Blob = Annotated[bytes, msgspec.Meta(max_length=1 << 16)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
Buffer = bytes | bytearray | memoryview


class Reason(StrEnum):
    """Why a transfer was refused or ended early. Stable words, for counters and for the peer's decision to try elsewhere."""

    FULL = "full"  # no memory or no place in the queue now; later there may be
    LAYOUT = "layout"  # other model, block size, dtype or order of the KV
    ROLE = "role"  # this instance does not do that (not a prefill instance, takes no requests ...)
    DRAINING = "draining"  # the instance is about to stop
    REQUEST = "request"  # the request's description is not understood
    CANCELLED = "cancelled"  # whoever wanted it does not want it any more
    FAILED = "failed"  # computing it failed
    CONTENT = "content"  # what arrived is not what it should be: checksum, key, length, place
    GAPS = "gaps"  # finished, but parts are missing
    DEADLINE = "deadline"  # lease, progress or answer took too long
    LOST = "lost"  # the connection broke
    UNKNOWN = "unknown"  # nobody can say whether the peer has it


@dataclass(frozen=True, slots=True)
class Want:
    """Destination to source: compute this and send me the KV.

    Attributes:
        request: opaque to this room (JSON of the engine: tokens, sampling, salt).
        keys: of the prompt's full blocks in order, 32 bytes each; empty where there are none.
        have: leading blocks that the destination has and does not want.
        seconds: how long the destination waits between two signs of progress.
    """

    request: bytes
    keys: bytes = b""
    have: Small = 0
    seconds: Seconds = 0.0

    def __post_init__(self) -> None:
        _whole(self.keys, KEY_BYTES)


@dataclass(frozen=True, slots=True)
class Offer:
    """Source to destination: take this request over. `tokens` have KV so far; `keys` name its full blocks."""

    request: bytes
    keys: bytes = b""
    tokens: Small = 0
    seconds: Seconds = 0.0

    def __post_init__(self) -> None:
        _whole(self.keys, KEY_BYTES)


@dataclass(frozen=True, slots=True)
class Accept:
    """Yes. `have`: after an Offer, leading blocks that need not travel; after a Want, leading blocks that were cached there."""

    have: Small = 0


@dataclass(frozen=True, slots=True)
class Refuse:
    """No, and why."""

    reason: Reason
    message: Text = ""


@dataclass(frozen=True, slots=True)
class Part:
    """KV of `blocks` blocks from `first_block` on, in `layers` layers from `first_layer` on; the payload is described in
    `parts.payload_bytes`.

    Attributes:
        tokens: how many of these blocks' tokens have KV: all, or fewer where the last block is not full.
        keys: of the full blocks among them, in order.
    """

    first_layer: Small
    layers: Small
    first_block: Small
    blocks: Small
    tokens: Small
    keys: bytes = b""

    def __post_init__(self) -> None:
        _whole(self.keys, KEY_BYTES)


@dataclass(frozen=True, slots=True)
class Working:
    """Source to destination: nothing to send yet, but it is being worked on."""


@dataclass(frozen=True, slots=True)
class Finished:
    """Source to destination: everything was sent; `tokens` tokens have KV. `result` is opaque to this room."""

    result: bytes
    tokens: Small


@dataclass(frozen=True, slots=True)
class Taken:
    """Destination to source: it is mine now."""


@dataclass(frozen=True, slots=True)
class Cancel:
    """Either way: this transfer is over, nothing was taken."""

    reason: Reason
    message: Text = ""


@dataclass(frozen=True, slots=True)
class Query:
    """Source to destination: was this transfer taken? After the answer "no" it never will be."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a Query."""

    taken: bool


@dataclass(frozen=True, slots=True)
class Locate:
    """How many of these blocks (names of 48 bytes), from the first on, are there?"""

    names: bytes

    def __post_init__(self) -> None:
        _whole(self.names, NAME_BYTES)


@dataclass(frozen=True, slots=True)
class Located:
    count: Small


@dataclass(frozen=True, slots=True)
class Get:
    """Send the frames of these names, none longer than `longest` bytes, within `seconds`."""

    names: bytes
    longest: Large
    seconds: Seconds

    def __post_init__(self) -> None:
        _whole(self.names, NAME_BYTES)


@dataclass(frozen=True, slots=True)
class Frames:
    """Whole sealed frames, one after the other, for the names from number `first` on; length 0 for a missing one. They carry
    their own checksums (store/frame.py), so the message has none."""

    first: Small
    lengths: tuple[Large, ...]


@dataclass(frozen=True, slots=True)
class Introduce:
    """The first message each way once the peers have proved themselves.

    Attributes:
        instance: 16 random bytes of this process's endpoint: another one means that it was started again.
        layout: canonical JSON of `Layout.describe`, "" for whoever has no blocks of its own (it can only fetch).
        address: where this instance listens, "" if nowhere.
        beat: a sign of life comes at least this often, in seconds.
        largest: the longest payload that it receives.
    """

    instance: bytes
    layout: Document
    address: Text
    beat: Seconds
    largest: Large


@dataclass(frozen=True, slots=True)
class Segment:
    """Shared memory that the sender of this message has opened: its place, size, and what stands at its beginning."""

    place: Text
    size: Large
    token: bytes


@dataclass(frozen=True, slots=True)
class Agent:
    """A NIXL agent of the sender's: its name, its metadata (opaque here, read by NIXL), where its memory begins in its process,
    how long its ring is, and what stands at the beginning."""

    name: Word
    metadata: Blob
    base: Large
    size: Large
    token: bytes


@dataclass(frozen=True, slots=True)
class Chosen:
    """Whether the proposed link works on this side."""

    works: bool


@dataclass(frozen=True, slots=True)
class Beat:
    """A sign of life."""


@dataclass(frozen=True, slots=True)
class Bye:
    """The connection ends, and why."""

    message: Text = ""


Message = (
    Want
    | Offer
    | Accept
    | Refuse
    | Part
    | Working
    | Finished
    | Taken
    | Cancel
    | Query
    | Answer
    | Locate
    | Located
    | Get
    | Frames
    | Introduce
    | Segment
    | Agent
    | Chosen
    | Beat
    | Bye
)

# A number never changes its meaning; new kinds get new numbers.
_KINDS: Final[dict[int, type[Message]]] = {
    1: Want,
    2: Offer,
    3: Accept,
    4: Refuse,
    5: Part,
    6: Working,
    7: Finished,
    8: Taken,
    9: Cancel,
    10: Query,
    11: Answer,
    20: Locate,
    21: Located,
    22: Get,
    23: Frames,
    40: Introduce,
    41: Segment,
    42: Chosen,
    43: Beat,
    44: Bye,
    45: Agent,
}
_NUMBERS: Final = {kind: number for number, kind in _KINDS.items()}
_DECODERS: Final = {number: msgspec.msgpack.Decoder(kind) for number, kind in _KINDS.items()}
_ENCODER: Final = msgspec.msgpack.Encoder()
# Only these may be followed by a payload, only these belong to no transfer.
_WITH_PAYLOAD: Final = (Part, Frames)
_OF_CONNECTION: Final = (Introduce, Segment, Agent, Chosen, Beat, Bye)


class Head(NamedTuple):
    """What the first 64 bytes say. Lengths are bounded; the checksum has not been looked at."""

    kind: int
    transfer: bytes
    metadata: int
    payload: int
    payload_sum: int | None
    place: int


def encode(
    message: Message,
    transfer: bytes = NO_TRANSFER,
    *,
    payload: int = 0,
    payload_sum: int | None = None,
    place: int = 0,
) -> bytes:
    """Head and metadata of a message whose payload of `payload` bytes follows. Raises BadMessage if it is too long."""
    metadata = _ENCODER.encode(message)
    if len(metadata) > MAX_METADATA or payload > MAX_PAYLOAD:
        raise BadMessage(f"a message of {len(metadata)} + {payload} bytes is longer than the protocol allows")
    flags = 0 if payload_sum is None else _SUMMED
    number = _NUMBERS[type(message)]
    head = _HEAD.pack(MAGIC, VERSION, number, flags, transfer, len(metadata), 0, payload, payload_sum or 0, place)
    return b"".join((head, _SUM.pack(xxhash.xxh3_64_intdigest(head + metadata)), metadata))


def read_head(data: Buffer) -> Head:
    """The head of a message. Raises BadMessage."""
    if len(data) < HEAD_BYTES:
        raise BadMessage(f"{len(data)} bytes are less than a message's head")
    magic, version, kind, flags, transfer, metadata, reserved, payload, payload_sum, place = _HEAD.unpack_from(data)
    if magic != MAGIC:
        raise BadMessage("this is not a message of Foreword's")
    if version != VERSION:
        raise BadMessage(f"version {version} of the protocol is not {VERSION}, which this program speaks")
    if kind not in _KINDS or flags & ~_SUMMED or reserved:
        raise BadMessage(f"there is no message of kind {kind} with flags {flags}")
    if metadata > MAX_METADATA or payload > MAX_PAYLOAD:
        raise BadMessage(f"a message of {metadata} + {payload} bytes is longer than the protocol allows")
    return Head(kind, transfer, metadata, payload, payload_sum if flags & _SUMMED else None, place)


def decode(head_bytes: Buffer, metadata: Buffer, head: Head | None = None) -> tuple[Head, Message]:
    """The message that a head and its metadata are; `head` if it has been read already. Raises BadMessage, and nothing else,
    whatever the bytes."""
    head = head or read_head(head_bytes)
    if len(metadata) != head.metadata:
        raise BadMessage(f"{len(metadata)} bytes of metadata are there, the head says {head.metadata}")
    summed = xxhash.xxh3_64_intdigest(b"".join((head_bytes[: _HEAD.size], metadata)))
    if summed != _SUM.unpack_from(head_bytes, _HEAD.size)[0]:
        raise BadMessage("the checksum of a message's head does not fit")
    try:
        message: Message = _DECODERS[head.kind].decode(metadata)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadMessage(f"a message of kind {head.kind} is malformed: {error}") from error
    if head.payload and not isinstance(message, _WITH_PAYLOAD):
        raise BadMessage(f"a {type(message).__name__} has no payload")
    if isinstance(message, Part) and head.payload_sum is None:
        raise BadMessage("a Part without a checksum")
    if isinstance(message, _OF_CONNECTION) != (head.transfer == NO_TRANSFER):
        raise BadMessage(f"a {type(message).__name__} with the transfer {head.transfer.hex()}")
    return head, message


def payload_checksum(buffers: Sequence[Buffer]) -> int:
    """XXH3-64 of the buffers' bytes in a row."""
    if len(buffers) == 1:
        return xxhash.xxh3_64_intdigest(buffers[0])
    state = xxhash.xxh3_64()
    for buffer in buffers:
        state.update(buffer)
    return state.intdigest()


def join_keys(keys: Sequence[bytes]) -> bytes:
    """Keys (or names) as one field of a message."""
    return b"".join(keys)


def split_keys(keys: bytes, size: int = KEY_BYTES) -> list[bytes]:
    """The other way."""
    return [keys[start : start + size] for start in range(0, len(keys), size)]


def _whole(field: bytes, size: int) -> None:
    if len(field) % size:
        raise ValueError(f"{len(field)} bytes are not whole names of {size} bytes")
