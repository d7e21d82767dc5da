"""The format of a stored or sent block: a header of 128 bytes, then the payload (docs/reference/formats.md).

Offset  Bytes  Field, integers little-endian
0       4      magic "FWKV"
4       2      format version, 1
6       2      codec (store/codec.py; 0 is raw)
8       16     layout fingerprint
24      32     key
56      32     parent key
88      4      depth: the block's number in its chain
92      4      reserved, 0
96      8      length of the payload once decoded
104     8      length of the payload as it stands here
112     16     XXH3-128 (canonical, big-endian) of bytes 0..111 and the payload

The checksum finds every accident: bits that flipped, a file cut short, a block under another's name. It is not a signature:
whoever may write to a store can write a block that passes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

import xxhash

from foreword.blocks.keys import KEY_BYTES
from foreword.blocks.layout import FINGERPRINT_BYTES, NAME_BYTES
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
    """What a frame says of itself. `raw_length` and `length` are bytes of payload, decoded and as stored."""

    layout: bytes
    key: bytes
    parent: bytes
    depth: int
    codec: int
    raw_length: int
    length: int

    @property
    def name(self) -> bytes:
        """Under which a store keeps it."""
        return self.layout + self.key

    def pack(self) -> bytes:
        """The header without its checksum, 112 bytes."""
        return _HEAD.pack(
            MAGIC, VERSION, self.codec, self.layout, self.key, self.parent, self.depth, 0, self.raw_length, self.length
        )


@dataclass(frozen=True, slots=True)
class Frame:
    """A header and the whole frame's bytes, header included."""

    header: Header
    data: memoryview

    @property
    def name(self) -> bytes:
        return self.header.layout + self.header.key

    @property
    def payload(self) -> memoryview:
        return self.data[HEADER_BYTES:]


def seal(header: Header, buffer: memoryview) -> Frame:
    """Write the header and its checksum before a payload that already lies in `buffer[128 : 128 + header.length]`."""
    end = HEADER_BYTES + header.length
    head = header.pack()
    buffer[:_SUMMED] = head
    buffer[_SUMMED:HEADER_BYTES] = _checksum(head, buffer[HEADER_BYTES:end])
    return Frame(header, buffer[:end])


def frame(header: Header, payload: bytes | memoryview) -> Frame:
    """A frame in memory of its own; the payload is copied."""
    buffer = memoryview(bytearray(HEADER_BYTES + len(payload)))
    buffer[HEADER_BYTES:] = payload
    return seal(header, buffer)


def read_header(data: bytes | memoryview) -> Header:
    """The header of a frame whose payload may be missing: structure only, the checksum is not looked at. Raises BadFrame."""
    if len(data) < HEADER_BYTES:
        raise BadFrame("truncated", f"{len(data)} bytes are less than a header")
    magic, version, codec, layout, key, parent, depth, reserved, raw_length, length = _HEAD.unpack_from(data)
    if magic != MAGIC:
        raise BadFrame("magic", "this is not a block of Foreword's")
    if version != VERSION:
        raise BadFrame("version", f"format version {version} is not {VERSION}, which this program reads")
    if reserved:
        raise BadFrame("reserved", "reserved bytes are not zero")
    return Header(layout, key, parent, depth, codec, raw_length, length)


def check(data: memoryview, name: bytes | None = None) -> Frame:
    """The frame that these bytes are, if they are one to the last bit, and the one called `name`. Raises BadFrame.

    The checksum is looked at last, so that the reason says what is wrong and not only that something is.
    """
    header = read_header(data)
    if name is not None and header.name != name:
        raise BadFrame("name", "another block lies under this name")
    if len(data) != HEADER_BYTES + header.length:
        raise BadFrame("length", f"{len(data)} bytes are there, the header says {HEADER_BYTES + header.length}")
    if _checksum(data[:_SUMMED], data[HEADER_BYTES:]) != data[_SUMMED:HEADER_BYTES]:
        raise BadFrame("checksum", "the checksum does not fit")
    return Frame(header, data)


def _checksum(head: bytes | memoryview, payload: memoryview) -> bytes:
    state = xxhash.xxh3_128(head)
    state.update(payload)
    return state.digest()


def split_name(name: bytes) -> tuple[bytes, bytes]:
    """Layout fingerprint and key of a name."""
    if len(name) != NAME_BYTES:
        raise BadFrame("name", f"a block's name has {NAME_BYTES} bytes, not {len(name)}")
    return name[:FINGERPRINT_BYTES], name[FINGERPRINT_BYTES:]
