"""The wire format: a head of 64 bytes, metadata in MessagePack, then the payload (dev/concepts/transfer.md).

Offset  Bytes  Field, integers little-endian
0       4      magic "FWTX"
4       2      version of the protocol, 1
6       1      kind of message
7       1      flags: 1 = the payload has a checksum
8       16     id of the transfer, zeros for messages about the connection
24      4      length of the metadata
28      4      reserved, 0
32      8      length of the payload
40      8      XXH3-64 of the payload, 0 without the flag
48      8      position of the payload in the sender's ring (shared memory), else 0
56      8      XXH3-64 of bytes 0..55 and the metadata

Lengths are checked before anything is allocated. Anything wrong with head or metadata is a `BadMessage` and ends the
connection, because the position of the next message is then unknown. A payload that does not match its checksum fails one
transfer; the connection continues.
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
from foreword.decoders import decode_msgpack
from foreword.transfer.errors import BadMessage

MAGIC: Final = b"FWTX"
VERSION: Final = 1
HEAD_BYTES: Final = 64
ID_BYTES: Final = 16
NO_TRANSFER: Final = bytes(ID_BYTES)
MAX_METADATA: Final = 16 << 20
MAX_PAYLOAD: Final = 256 << 20
_CHECKSUM_FLAG: Final = 1
_HEAD = struct.Struct(f"<4sHBB{ID_BYTES}sIIQQQ")
_CHECKSUM = struct.Struct("<Q")
assert _HEAD.size + _CHECKSUM.size == HEAD_BYTES

Small = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
Large = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
Text = Annotated[str, msgspec.Meta(max_length=2000)]
Document = Annotated[str, msgspec.Meta(max_length=1 << 20)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
Buffer = bytes | bytearray | memoryview


class Reason(StrEnum):
    """Why a transfer was refused or ended early. The values are on the wire and in metrics; the peer decides by them."""

    FULL = "full"  # no memory or no place in the queue now; there may be later
    LAYOUT = "layout"  # other model, block size, dtype or order of the KV
    ROLE = "role"  # this instance does not do that (not a prefill instance, accepts no migrated requests ...)
    DRAINING = "draining"  # the instance is about to stop
    REQUEST = "request"  # the request's description is not understood
    CANCELLED = "cancelled"  # the requester does not need it any more
    FAILED = "failed"  # the computation failed
    CONTENT = "content"  # wrong content arrived: checksum, key, length, position
    GAPS = "gaps"  # finished, but parts are missing
    DEADLINE = "deadline"  # lease, progress or answer took too long
    LOST = "lost"  # the connection broke
    UNKNOWN = "unknown"  # it cannot be found out whether the peer took it


# Fields that hold concatenated keys or names, of this many bytes each.
_KEY_FIELDS: Final = (("keys", KEY_BYTES), ("names", NAME_BYTES))


class TransferMessage:
    """Base of all messages. The names of a message's fields are part of the wire format."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for field, size in _KEY_FIELDS:
            length = len(getattr(self, field, b""))
            if length % size:
                raise ValueError(f"{field}: {length} bytes are not whole names of {size} bytes")


@dataclass(frozen=True, slots=True)
class PullRequest(TransferMessage):
    """Destination to source: compute this and send the KV.

    Attributes:
        request: opaque to this package (JSON of the engine: tokens, sampling, salt).
        keys: of the prompt's full blocks in order, 32 bytes each; empty if there are none.
        have: leading blocks that the destination has and does not need.
        seconds: how long the destination waits between two signs of progress.
    """

    request: bytes
    keys: bytes = b""
    have: Small = 0
    seconds: Seconds = 0.0


@dataclass(frozen=True, slots=True)
class PushRequest(TransferMessage):
    """Source to destination: take over this running request. `tokens` have KV so far; `keys` are those of its full blocks."""

    request: bytes
    keys: bytes = b""
    tokens: Small = 0
    seconds: Seconds = 0.0


@dataclass(frozen=True, slots=True)
class Accept(TransferMessage):
    """Yes. `have`: leading blocks that need not be sent (answer to a push), or that were cached at the source (to a pull)."""

    have: Small = 0


@dataclass(frozen=True, slots=True)
class Refuse(TransferMessage):
    """No, and why."""

    reason: Reason
    message: Text = ""


@dataclass(frozen=True, slots=True)
class KVPart(TransferMessage):
    """KV of `blocks` blocks from `first_block` on, in `layers` layers from `first_layer` on.

    `parts.payload_bytes` describes the payload.

    Attributes:
        tokens: how many of these blocks' tokens have KV: all, or fewer if the last block is partial.
        keys: of the full blocks among them, in order.
    """

    first_layer: Small
    layers: Small
    first_block: Small
    blocks: Small
    tokens: Small
    keys: bytes = b""


@dataclass(frozen=True, slots=True)
class KeepAlive(TransferMessage):
    """Source to destination: nothing to send yet, but the computation continues."""


@dataclass(frozen=True, slots=True)
class Finished(TransferMessage):
    """Source to destination: everything was sent; `tokens` tokens have KV. `result` is opaque to this package."""

    result: bytes
    tokens: Small


@dataclass(frozen=True, slots=True)
class Taken(TransferMessage):
    """Destination to source: the destination owns it now."""


@dataclass(frozen=True, slots=True)
class Cancel(TransferMessage):
    """Either way: this transfer is over, nothing was taken."""

    reason: Reason
    message: Text = ""


@dataclass(frozen=True, slots=True)
class OwnershipQuery(TransferMessage):
    """Source to destination: did you take this? After the answer "no" the destination never takes it."""


@dataclass(frozen=True, slots=True)
class OwnershipAnswer(TransferMessage):
    """The answer to an OwnershipQuery."""

    taken: bool


@dataclass(frozen=True, slots=True)
class Locate(TransferMessage):
    """How many of these blocks (names of 64 bytes), from the first on, do you have?"""

    names: bytes


@dataclass(frozen=True, slots=True)
class Located(TransferMessage):
    """The answer to a Locate."""

    count: Small


@dataclass(frozen=True, slots=True)
class Get(TransferMessage):
    """Send the frames of these names, none longer than `longest` bytes, within `seconds`."""

    names: bytes
    longest: Large
    seconds: Seconds


@dataclass(frozen=True, slots=True)
class Frames(TransferMessage):
    """Whole sealed frames in a row, for the names from number `first` on; length 0 for a missing one.

    Frames carry their own checksums (store/frame.py), so the message has none.
    """

    first: Small
    lengths: tuple[Large, ...]


@dataclass(frozen=True, slots=True)
class Hello(TransferMessage):
    """The first message each way after the peers have authenticated.

    Attributes:
        instance: 16 random bytes of this process's endpoint; other bytes mean that the process was restarted.
        layout: canonical JSON of `Layout.describe`, "" for an instance without blocks (it can only fetch).
        address: where this instance listens, "" if nowhere.
        beat: a heartbeat comes at least this often, in seconds.
        largest: the longest payload that it receives.
    """

    instance: bytes
    layout: Document
    address: Text
    beat: Seconds
    largest: Large


@dataclass(frozen=True, slots=True)
class SharedSegment(TransferMessage):
    """Shared memory that the sender has made: its place, its size, and the token at its start."""

    place: Text
    size: Large
    token: bytes


@dataclass(frozen=True, slots=True)
class LinkResult(TransferMessage):
    """Whether the proposed link works on this side."""

    works: bool


@dataclass(frozen=True, slots=True)
class Heartbeat(TransferMessage):
    """The sender is alive."""


@dataclass(frozen=True, slots=True)
class Goodbye(TransferMessage):
    """The connection ends, and why."""

    message: Text = ""


# A number never changes its meaning; new kinds get new numbers. 45 was used by a link that has been removed.
_KINDS: Final[dict[int, type[TransferMessage]]] = {
    1: PullRequest,
    2: PushRequest,
    3: Accept,
    4: Refuse,
    5: KVPart,
    6: KeepAlive,
    7: Finished,
    8: Taken,
    9: Cancel,
    10: OwnershipQuery,
    11: OwnershipAnswer,
    20: Locate,
    21: Located,
    22: Get,
    23: Frames,
    40: Hello,
    41: SharedSegment,
    42: LinkResult,
    43: Heartbeat,
    44: Goodbye,
}
_NUMBERS: Final = {kind: number for number, kind in _KINDS.items()}
_ENCODER: Final = msgspec.msgpack.Encoder()
# Only these may be followed by a payload; only these belong to no transfer.
_WITH_PAYLOAD: Final = (KVPart, Frames)
_OF_CONNECTION: Final = (Hello, SharedSegment, LinkResult, Heartbeat, Goodbye)


class Head(NamedTuple):
    """The fields of a message's first 64 bytes. Lengths are within bounds; the checksum has not been checked."""

    kind: int
    transfer: bytes
    metadata: int
    payload: int
    payload_sum: int | None
    position: int


def encode(
    message: TransferMessage,
    transfer: bytes = NO_TRANSFER,
    *,
    payload: int = 0,
    payload_sum: int | None = None,
    position: int = 0,
) -> bytes:
    """Head and metadata of a message whose payload of `payload` bytes follows. Raises BadMessage if it is too long."""
    metadata = _ENCODER.encode(message)
    if len(metadata) > MAX_METADATA or payload > MAX_PAYLOAD:
        raise BadMessage(f"a message of {len(metadata)} + {payload} bytes is longer than the protocol allows")
    flags = 0 if payload_sum is None else _CHECKSUM_FLAG
    number = _NUMBERS[type(message)]
    head = _HEAD.pack(MAGIC, VERSION, number, flags, transfer, len(metadata), 0, payload, payload_sum or 0, position)
    return b"".join((head, _CHECKSUM.pack(xxhash.xxh3_64_intdigest(head + metadata)), metadata))


def read_head(data: Buffer) -> Head:
    """The head of a message. Raises BadMessage."""
    if len(data) < HEAD_BYTES:
        raise BadMessage(f"{len(data)} bytes are fewer than a message's head")
    magic, version, kind, flags, transfer, metadata, reserved, payload, payload_sum, position = _HEAD.unpack_from(data)
    if magic != MAGIC:
        raise BadMessage("this is not a message of Foreword")
    if version != VERSION:
        raise BadMessage(f"version {version} of the protocol is not {VERSION}, the version of this program")
    if kind not in _KINDS or flags & ~_CHECKSUM_FLAG or reserved:
        raise BadMessage(f"there is no message of kind {kind} with flags {flags}")
    if metadata > MAX_METADATA or payload > MAX_PAYLOAD:
        raise BadMessage(f"a message of {metadata} + {payload} bytes is longer than the protocol allows")
    return Head(kind, transfer, metadata, payload, payload_sum if flags & _CHECKSUM_FLAG else None, position)


def decode(head_bytes: Buffer, metadata: Buffer, head: Head | None = None) -> tuple[Head, TransferMessage]:
    """Decode a message from its head and metadata; pass `head` if it has been read already.

    Raises BadMessage, and no other exception, for any bytes.
    """
    head = head or read_head(head_bytes)
    if len(metadata) != head.metadata:
        raise BadMessage(f"{len(metadata)} bytes of metadata, the head says {head.metadata}")
    checksum = xxhash.xxh3_64_intdigest(b"".join((head_bytes[: _HEAD.size], metadata)))
    if checksum != _CHECKSUM.unpack_from(head_bytes, _HEAD.size)[0]:
        raise BadMessage("the checksum of a message's head does not match")
    try:
        message: TransferMessage = decode_msgpack(metadata, _KINDS[head.kind])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadMessage(f"a message of kind {head.kind} is malformed: {error}") from error
    if head.payload and not isinstance(message, _WITH_PAYLOAD):
        raise BadMessage(f"a {type(message).__name__} has no payload")
    if isinstance(message, KVPart) and head.payload_sum is None:
        raise BadMessage("a KVPart without a checksum")
    if isinstance(message, _OF_CONNECTION) != (head.transfer == NO_TRANSFER):
        raise BadMessage(f"a {type(message).__name__} with the transfer {head.transfer.hex()}")
    return head, message


def payload_checksum(buffers: Sequence[Buffer]) -> int:
    """XXH3-64 of the concatenated buffers."""
    if len(buffers) == 1:
        return xxhash.xxh3_64_intdigest(buffers[0])
    state = xxhash.xxh3_64()
    for buffer in buffers:
        state.update(buffer)
    return state.intdigest()


def join_keys(keys: Sequence[bytes]) -> bytes:
    """Concatenate keys or names into one field of a message."""
    return b"".join(keys)


def split_keys(keys: bytes, size: int = KEY_BYTES) -> list[bytes]:
    """Split a field of a message into keys or names."""
    return [keys[start : start + size] for start in range(0, len(keys), size)]
