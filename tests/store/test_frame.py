"""The frame format: golden files, and every alteration of a frame is detected."""

import struct
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from foreword.errors import BadFrame
from foreword.store.frame import HEADER_BYTES, Header, check, frame, read_header, seal, set_key

GOLDEN = Path(__file__).parent / "golden"
LAYOUT = bytes(range(16))
ROOT = bytes(range(16, 32))
KEY = bytes(range(32, 64))
PARENT = bytes(range(64, 96))
HEADER = Header(LAYOUT, ROOT, KEY, PARENT, 7, 1, 4096, 100, 3)
NAME = LAYOUT + ROOT + KEY

headers = st.builds(
    Header,
    layout=st.binary(min_size=16, max_size=16),
    root=st.binary(min_size=16, max_size=16),
    key=st.binary(min_size=32, max_size=32),
    parent=st.binary(min_size=32, max_size=32),
    depth=st.integers(0, 2**32 - 1),
    codec=st.integers(0, 2**16 - 1),
    raw_length=st.integers(0, 2**64 - 1),
    length=st.just(0),
    group=st.integers(0, 2**16 - 1),
)


def sealed(header: Header, payload: bytes) -> bytearray:
    """The bytes of a frame, made with `seal`."""
    buffer = bytearray(payload) + bytes(HEADER_BYTES)
    seal(replace(header, length=len(payload)), memoryview(buffer))
    return buffer


def test_the_golden_frame_agrees_with_the_documentation():
    """The golden file, written without Foreword's code, has the payload first and each field at its documented offset."""
    data = (GOLDEN / "frame2.bin").read_bytes()
    payload, head = data[:100], data[100:]
    assert payload == bytes(number * 7 % 256 for number in range(100)) and len(head) == 192
    assert head[:4] == b"FWKV"
    assert struct.unpack("<HH", head[4:8]) == (2, 1)
    assert (head[8:24], head[24:40], head[40:72], head[72:104]) == (LAYOUT, ROOT, KEY, PARENT)
    assert struct.unpack("<IHHQQI", head[104:132]) == (7, 3, 0, 4096, 100, 0)
    assert head[132:160] == bytes(28)
    assert head[160:] == xxhash.xxh3_128_digest(payload + head[:160]) + bytes(16)
    assert head[160:176].hex() == "551c6372cd9467981bca4e737a51a9d5"


def test_the_golden_frame_stays_readable():
    """The current code reads the golden frame and writes the same bytes."""
    data = (GOLDEN / "frame2.bin").read_bytes()
    read = check(memoryview(data), NAME)
    assert read.header == HEADER
    assert read.name == read.header.name == NAME
    assert bytes(read.payload) == data[:100]
    assert read_header(data[-HEADER_BYTES:]) == HEADER
    assert bytes(frame(HEADER, data[:100]).data) == data


def test_a_frame_of_version_1_is_refused_as_such():
    """A frame of the first version, whose header is in front, is refused with the reason `version`."""
    data = (GOLDEN / "frame.bin").read_bytes()
    with pytest.raises(BadFrame) as raised:
        check(memoryview(data))
    assert raised.value.reason == "version"


def test_a_signed_frame_is_refused_without_the_key():
    """A frame that is signed is refused with the reason `unknown_key` where its signature was not verified."""
    data = frame(HEADER, bytes(100)).data
    set_key(data, 7, bytes(range(12)))
    data[-16:] = bytes(range(16))
    with pytest.raises(BadFrame) as raised:
        check(data)
    assert raised.value.reason == "unknown_key"


@given(headers, st.binary(max_size=300), st.integers(0, 50))
def test_a_sealed_frame_comes_back_with_every_field(header: Header, payload: bytes, room: int):
    """`seal` and `check` preserve header and payload, and write nothing after the frame."""
    header = replace(header, length=len(payload))
    buffer = bytearray(payload) + bytes(HEADER_BYTES) + b"\xaa" * room
    written = seal(header, memoryview(buffer))
    assert buffer[HEADER_BYTES + len(payload) :] == b"\xaa" * room
    assert len(written.data) == HEADER_BYTES + len(payload)
    read = check(memoryview(bytes(written.data)), header.name)
    assert read.header == header
    assert bytes(read.payload) == payload


@given(headers, st.binary(min_size=1, max_size=80))
def test_no_frame_with_a_flipped_byte_is_accepted(header: Header, payload: bytes):
    """A frame with any altered byte is refused, with and without its name given."""
    data = sealed(header, payload)
    name = header.layout + header.root + header.key
    check(memoryview(data), name)
    for position in range(len(data)):
        altered = bytearray(data)
        altered[position] ^= 1 << position % 8
        for asked in (name, None):
            with pytest.raises(BadFrame):
                check(memoryview(altered), asked)


@given(headers, st.binary(max_size=80), st.binary(min_size=1, max_size=20))
def test_no_truncated_or_extended_frame_is_accepted(header: Header, payload: bytes, more: bytes):
    """A truncated frame, and a frame with extra bytes, is refused."""
    data = sealed(header, payload)
    for end in range(len(data)):
        with pytest.raises(BadFrame):
            check(memoryview(data)[:end])
    with pytest.raises(BadFrame):
        check(memoryview(data + more))
    with pytest.raises(BadFrame) as raised:
        check(memoryview(more + data))
    assert raised.value.reason == "length"


@given(headers, st.binary(min_size=64, max_size=64))
def test_a_frame_is_refused_under_another_name(header: Header, other: bytes):
    """A valid frame under the wrong name is refused with the reason `name`."""
    data = sealed(header, b"payload")
    if other == header.name:
        return
    with pytest.raises(BadFrame) as raised:
        check(memoryview(data), other)
    assert raised.value.reason == "name"


@given(st.binary(max_size=400), st.booleans())
def test_arbitrary_bytes_raise_badframe(noise: bytes, dressed: bool):
    """Arbitrary bytes, also before a header with a valid magic and version, raise BadFrame with a known reason."""
    data = noise + struct.pack("<4sH", b"FWKV", 2) + bytes(HEADER_BYTES - 6) if dressed else noise
    with pytest.raises(BadFrame) as raised:
        check(memoryview(data))
    assert raised.value.reason in {"truncated", "magic", "version", "reserved", "length", "checksum"}


@pytest.mark.parametrize(
    ("offset", "value", "reason"),
    [
        (0, b"FWKX", "magic"),
        (4, b"\x03\x00", "reserved"),  # whole once its version is 2
        (4, b"\xff\x7f", "reserved"),
        (110, b"\x01", "reserved"),
        (140, b"\x01", "reserved"),
        (120, b"\x65", "length"),
        (128, b"\x01", "reserved"),
        (128, b"\x01\x00\x00\x00\x01", "reserved"),
    ],
)
def test_the_reason_names_the_defect(offset: int, value: bytes, reason: str):
    """A wrong magic, version, reserved field or length is reported before the checksum."""
    data = bytearray((GOLDEN / "frame2.bin").read_bytes())
    data[100 + offset : 100 + offset + len(value)] = value
    with pytest.raises(BadFrame) as raised:
        check(memoryview(data))
    assert raised.value.reason == reason
