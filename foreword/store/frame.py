"""The frame format of stored and sent blocks: a header of 128 bytes, then the payload (docs/reference/formats.md).

Offset  Bytes  Field, integers little-endian
0       4      magic "FWKV"
4       2      format version, 1
6       2      codec (store/codecs/base.py; 0 is raw)
8       16     layout fingerprint
24      32     key
56      32     parent key
88      4      depth: index of the block in its chain, from 0
92      4      reserved, 0
96      8      length of the payload once decoded
104     8      length of the payload as stored
112     16     XXH3-128 (canonical, big-endian) of bytes 0..111 and the payload

The checksum detects accidental damage: flipped bits, a truncated file, a block under the wrong name. It is not a
signature: a party with write access to a store can write a block that passes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

import xxhash

from foreword.blocks.keys import KEY_BYTES
from foreword.blocks.layout import FINGERPRINT_BYTES
from foreword.errors import BadFrame

MAGIC: Final = b"FWKV"
VERSION: Final = 1
HEADER_BYTES: Final = 128
RAW: Final = 0
_HEAD = struct.Struct(f"<4sHH{FINGERPRINT_BYTES}s{KEY_BYTES}s{KEY_BYTES}sIIQQ")
_SUMMED = _HEAD.size
_SUM_BYTES = 16
assert _SUMMED + _SUM_BYTES == HEADER_BYTES


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a frame. `raw_length` and `length` are the bytes of the payload, decoded and as stored."""

    layout: bytes
    key: bytes
    parent: bytes
    depth: int
    codec: int
    raw_length: int
    length: int

    @property
    def name(self) -> bytes:
        """The name under which a store keeps the block."""
        return self.layout + self.key

    def pack(self) -> bytes:
        """Encode the header without its checksum, 112 bytes."""
        return _HEAD.pack(
            MAGIC, VERSION, self.codec, self.layout, self.key, self.parent, self.depth, 0, self.raw_length, self.length
        )


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
        return self.data[HEADER_BYTES:]


def seal(header: Header, buffer: memoryview) -> Frame:
    """Write the header and checksum in front of a payload that is already in `buffer[128 : 128 + header.length]`."""
    end = HEADER_BYTES + header.length
    head = header.pack()
    buffer[:_SUMMED] = head
    buffer[_SUMMED:HEADER_BYTES] = _checksum(head, buffer[HEADER_BYTES:end])
    return Frame(header, buffer[:end])


def frame(header: Header, payload: bytes | memoryview) -> Frame:
    """Create a frame in new memory from a copy of the payload."""
    buffer = memoryview(bytearray(HEADER_BYTES + len(payload)))
    buffer[HEADER_BYTES:] = payload
    return seal(header, buffer)


def read_header(data: bytes | memoryview) -> Header:
    """Parse a header without verifying the checksum; the payload may be missing. Raises BadFrame."""
    if len(data) < HEADER_BYTES:
        raise BadFrame("truncated", f"{len(data)} bytes are less than a header")
    magic, version, codec, layout, key, parent, depth, reserved, raw_length, length = _HEAD.unpack_from(data)
    if magic != MAGIC:
        raise BadFrame("magic", "this is not a Foreword block")
    if version != VERSION:
        raise BadFrame("version", f"format version {version} is not {VERSION}, which this program reads")
    if reserved:
        raise BadFrame("reserved", "reserved bytes are not zero")
    return Header(layout, key, parent, depth, codec, raw_length, length)


def check(data: memoryview, name: bytes | None = None) -> Frame:
    """Verify that `data` is an intact frame, and the one called `name` if given. Raises BadFrame.

    The checksum is compared last, so the error names the specific defect where there is one.
    """
    header = read_header(data)
    if name is not None and header.name != name:
        raise BadFrame("name", "another block is stored under this name")
    if len(data) != HEADER_BYTES + header.length:
        raise BadFrame("length", f"the frame has {len(data)} bytes, its header says {HEADER_BYTES + header.length}")
    if _checksum(data[:_SUMMED], data[HEADER_BYTES:]) != data[_SUMMED:HEADER_BYTES]:
        raise BadFrame("checksum", "the checksum does not match")
    return Frame(header, data)


def _checksum(head: bytes | memoryview, payload: memoryview) -> bytes:
    state = xxhash.xxh3_128(head)
    state.update(payload)
    return state.digest()
