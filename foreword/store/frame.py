"""The frame format of stored and sent blocks: a payload, then a header of 192 bytes (dev/formats.md).

The header stands behind the payload. So the payload begins at an aligned place of a file, a buffer or an object, and a
small block does not pay for padding.

Offset  Bytes  Field of the header, integers little-endian
0       4      magic "FWKV"
4       2      format version, 2
6       2      codec (store/codec.py; 0 is raw)
8       16     layout fingerprint
24      16     root: the first 16 bytes of the chain's root key
40      32     key
72      32     parent key
104     4      depth: index of the block in its chain, from 0
108     2      index of the KV group in the model
110     2      reserved, 0
112     8      length of the payload once decoded
120     8      length of the payload as stored
128     4      key id; 0 for a frame that is not sealed, the highest bit is set if the payload is encrypted
132     12     nonce of the seal, 0 without one
144     16     reserved, 0
160     16     XXH3-128 (canonical, big-endian) of the payload and bytes 0..159, in which key id and nonce count as 0; encrypted
               with the payload
176     16     seal (store/sealing.py): a signature over the payload and bytes 0..175, or the tag of the encryption; 0 without

The checksum detects accidental damage: flipped bits, a truncated file, a block under the wrong name. A party with write
access to a store can write a block that passes, unless frames are sealed.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final, NamedTuple

import xxhash

from foreword.blocks.keys import FINGERPRINT_BYTES, KEY_BYTES, named_root
from foreword.blocks.layout import ROOT_BYTES
from foreword.errors import BadFrame

MAGIC: Final = b"FWKV"
VERSION: Final = 2
HEADER_BYTES: Final = 192
RAW: Final = 0
UNKEYED: Final = 0
ENCRYPTED: Final = 1 << 31  # is set in the id of a data key, not in that of a secret that signs
UNAUTHENTICATED: Final = (1 << 32) - 1  # the key id that a frame with a wrong signature gets; no key has it
NONCE_BYTES: Final = 12
TAG_BYTES: Final = 16
# Reasons of BadFrame for a frame that another reader may use: one with its key, its version of the format, its codec.
FOREIGN_REASONS: Final = frozenset({"unknown_key", "version"})
_KEY: Final = struct.Struct(f"<I{NONCE_BYTES}s")
_KEY_AT: Final = 128
_LIKELY_VERSIONS: Final = 2
_HEAD = struct.Struct(f"<4sHH{FINGERPRINT_BYTES}s{ROOT_BYTES}s{KEY_BYTES}s{KEY_BYTES}sIHHQQI{NONCE_BYTES}s16s")
_PLACE = struct.Struct(f"<8x{FINGERPRINT_BYTES}s{ROOT_BYTES}s{KEY_BYTES}x{KEY_BYTES}sI")
_SUMMED = _HEAD.size
_SUM_BYTES = 32
_RESERVED = bytes(16)
assert _SUMMED + _SUM_BYTES == HEADER_BYTES


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a frame. `raw_length` and `length` are the bytes of the payload, decoded and as stored.

    Attributes:
        root: the first 16 bytes of the root key of the block's chain, which stand for a tenant.
        group: index of the KV group in the model.
        key_id, nonce: of the seal.
    """

    layout: bytes
    root: bytes
    key: bytes
    parent: bytes
    depth: int
    codec: int
    raw_length: int
    length: int
    group: int = 0
    key_id: int = UNKEYED
    nonce: bytes = bytes(NONCE_BYTES)

    @property
    def name(self) -> bytes:
        """The name under which a store keeps the block."""
        return self.layout + self.root + self.key

    @property
    def prefix(self) -> bytes:
        """The prefix of the names of all blocks with this layout and root."""
        return self.layout + self.root

    @property
    def parent_name(self) -> bytes:
        """The name of the previous block of the chain. For the first block it is a name that no block has."""
        return self.layout + named_root(self.root, self.parent) + self.parent

    def pack(self) -> bytes:
        """Encode the header without its checksum, 160 bytes."""
        return _HEAD.pack(
            MAGIC,
            VERSION,
            self.codec,
            self.layout,
            self.root,
            self.key,
            self.parent,
            self.depth,
            self.group,
            0,
            self.raw_length,
            self.length,
            self.key_id,
            self.nonce,
            _RESERVED,
        )


class UnreadBlock(NamedTuple):
    """A raw block as far as it is known before its frame is read.

    Attributes:
        parent_name: name of the block that is probably its parent; its own name: unknown.
        length: bytes of its payload.
    """

    name: bytes
    parent_name: bytes
    length: int
    depth: int = 0


@dataclass(frozen=True, slots=True)
class Frame:
    """A header and the bytes of the whole frame, including the header."""

    header: Header
    data: memoryview

    @property
    def name(self) -> bytes:
        return self.header.name

    @property
    def payload(self) -> memoryview:
        return self.data[:-HEADER_BYTES]


def seal(header: Header, buffer: memoryview) -> Frame:
    """Write header and checksum behind a payload that is already in `buffer[: header.length]`."""
    end = header.length + HEADER_BYTES
    head = header.pack()
    buffer[header.length : header.length + _SUMMED] = head
    buffer[header.length + _SUMMED : end] = _checksum(buffer[: header.length], head)
    return Frame(header, buffer[:end])


def frame(header: Header, payload: bytes | memoryview) -> Frame:
    """Create a frame in new memory from a copy of the payload."""
    buffer = memoryview(bytearray(len(payload) + HEADER_BYTES))
    buffer[: len(payload)] = payload
    return seal(header, buffer)


def read_header(data: bytes | memoryview) -> Header:
    """Parse the header at the end of `data` without verifying the checksum; the payload may be missing. Raises BadFrame."""
    start = len(data) - HEADER_BYTES
    if start < 0:
        raise BadFrame("truncated", f"{len(data)} bytes are less than a header")
    fields = _HEAD.unpack_from(data, start)
    magic, version, codec, layout, root, key, parent, depth, group, reserved, raw_length, length = fields[:12]
    key_id, nonce, more = fields[12:]
    if magic != MAGIC and data[:6] == MAGIC + b"\x01\x00":
        raise BadFrame("version", f"format version 1 is not {VERSION}, which this program reads")
    if magic != MAGIC:
        raise BadFrame("magic", "this is not a Foreword block, or not all of it")
    if version != VERSION:
        # A later version counts up and keeps the checksum where it is (dev/formats.md). All else is damage.
        likely = VERSION < version <= VERSION + _LIKELY_VERSIONS and _is_summed(data, start)
        reason = "version" if likely else "reserved"
        raise BadFrame(reason, f"format version {version} is not {VERSION}, which this program reads")
    if key_id not in (UNKEYED, UNAUTHENTICATED) and not any(data[-TAG_BYTES:]):
        raise BadFrame("reserved", "there is a key without a signature")
    if reserved or more != _RESERVED or (key_id != UNAUTHENTICATED and (key_id == UNKEYED) == any(nonce)):
        raise BadFrame("reserved", "reserved bytes are not zero, or there is a key without a nonce")
    return Header(layout, root, key, parent, depth, codec, raw_length, length, group, key_id, nonce)


def place_in_chain(data: memoryview, end: int) -> tuple[bytes, int]:
    """The name of the parent of a block, as `Header.parent_name` is, and its depth, by its frame, which was verified and ends
    at byte `end` of the data."""
    layout, root, parent, depth = _PLACE.unpack_from(data, end - HEADER_BYTES)
    return layout + named_root(root, parent) + parent, depth


def _is_summed(data: bytes | memoryview, start: int) -> bool:
    """Whether the checksum is that of the frame whose header starts there, or is encrypted and cannot be read here."""
    head = bytearray(data[start : start + _SUMMED])
    key_id, _ = _KEY.unpack_from(head, _KEY_AT)
    _KEY.pack_into(head, _KEY_AT, UNKEYED, bytes(NONCE_BYTES))
    summed = _checksum(memoryview(data)[:start], memoryview(head))[:-TAG_BYTES]
    return bool(key_id & ENCRYPTED) or summed == data[start + _SUMMED : -TAG_BYTES]


def set_key(data: memoryview, key_id: int, nonce: bytes) -> None:
    """Change key id and nonce in the header at the end of a frame."""
    _KEY.pack_into(data, len(data) - HEADER_BYTES + _KEY_AT, key_id, nonce)


def check(data: memoryview, name: bytes | None = None, *, authenticated: bool = False) -> Frame:
    """Verify that `data` is an intact frame, and the one called `name` if given. Raises BadFrame.

    The checksum is compared last, so the error names the specific defect where there is one. It is not compared if a
    seal of the same bytes was verified (`authenticated`). The reasons in `FOREIGN_REASONS` do not say that the frame is
    damaged.
    """
    header = read_header(data)
    if name is not None and header.name != name:
        raise BadFrame("name", "another block is stored under this name")
    if len(data) != header.length + HEADER_BYTES:
        raise BadFrame("length", f"the frame has {len(data)} bytes, its header says {header.length + HEADER_BYTES}")
    if header.key_id == UNAUTHENTICATED:
        raise BadFrame("unauthenticated", "the seal is not that of the block")
    if header.key_id != UNKEYED and _is_summed(data, header.length):  # else the key, too, may be damage
        raise BadFrame("unknown_key", "the block is sealed, and its key is not known here")
    end = header.length + _SUMMED
    if not authenticated and _checksum(data[: header.length], data[header.length : end]) != data[end:]:
        raise BadFrame("checksum", "the checksum does not match")
    return Frame(header, data)


def _checksum(payload: memoryview, head: bytes | memoryview) -> bytes:
    state = xxhash.xxh3_128(payload)
    state.update(head)
    return state.digest() + bytes(_SUM_BYTES - state.digest_size)
