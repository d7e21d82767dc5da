"""The frame format: golden files, and every alteration of a frame is detected."""

import struct
from pathlib import Path

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from foreword.errors import BadFrame
from foreword.store.frame import HEADER_BYTES, Header, check, frame, read_header, seal

GOLDEN = Path(__file__).parent / "golden"
LAYOUT = bytes(range(16))
KEY = bytes(range(32, 64))
PARENT = bytes(range(64, 96))
HEADER = Header(LAYOUT, KEY, PARENT, 7, 1, 4096, 100)

headers = st.builds(
    Header,
    layout=st.binary(min_size=16, max_size=16),
    key=st.binary(min_size=32, max_size=32),
    parent=st.binary(min_size=32, max_size=32),
    depth=st.integers(0, 2**32 - 1),
    codec=st.integers(0, 2**16 - 1),
    raw_length=st.integers(0, 2**64 - 1),
    length=st.just(0),
)


def sealed(header: Header, payload: bytes) -> bytearray:
    """The bytes of a frame, made with `seal`."""
    whole = Header(
        header.layout, header.key, header.parent, header.depth, header.codec, header.raw_length, len(payload)
    )
    buffer = bytearray(HEADER_BYTES) + payload
    seal(whole, memoryview(buffer))
    return buffer


def test_the_golden_frame_agrees_with_the_documentation():
    """The golden file, written without Foreword's code, has each field at its documented offset."""
    data = (GOLDEN / "frame.bin").read_bytes()
    assert len(data) == 228
    assert data[:4] == b"FWKV"
    assert struct.unpack("<HH", data[4:8]) == (1, 1)
    assert (data[8:24], data[24:56], data[56:88]) == (LAYOUT, KEY, PARENT)
    assert struct.unpack("<IIQQ", data[88:112]) == (7, 0, 4096, 100)
    assert data[112:128] == xxhash.xxh3_128_digest(data[:112] + data[128:])
    assert data[112:128].hex() == "9be2e9e6e8e7a2f3f42d39c14eb905aa"
    assert data[128:] == bytes(number * 7 % 256 for number in range(100))


def test_the_golden_frame_stays_readable():
    """The current code reads the golden frame and writes the same bytes."""
    data = (GOLDEN / "frame.bin").read_bytes()
    read = check(memoryview(data), LAYOUT + KEY)
    assert read.header == HEADER
    assert read.name == read.header.name == LAYOUT + KEY
    assert bytes(read.payload) == data[128:]
    assert read_header(data[:HEADER_BYTES]) == HEADER
    assert bytes(frame(HEADER, data[128:]).data) == data


@given(headers, st.binary(max_size=300), st.integers(0, 50))
def test_a_sealed_frame_comes_back_with_every_field(header: Header, payload: bytes, room: int):
    """`seal` and `check` preserve header and payload, and write nothing after the frame."""
    header = Header(
        header.layout, header.key, header.parent, header.depth, header.codec, header.raw_length, len(payload)
    )
    buffer = bytearray(HEADER_BYTES) + payload + b"\xaa" * room
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
    name = header.layout + header.key
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
    with pytest.raises(BadFrame) as raised:
        check(memoryview(data + more))
    assert raised.value.reason == "length"


@given(headers, st.binary(min_size=48, max_size=48))
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
    """Arbitrary bytes, also after a valid magic and version, raise BadFrame with a known reason."""
    data = struct.pack("<4sH", b"FWKV", 1) + noise if dressed else noise
    with pytest.raises(BadFrame) as raised:
        check(memoryview(data))
    assert raised.value.reason in {"truncated", "magic", "version", "reserved", "length", "checksum"}


@pytest.mark.parametrize(
    ("offset", "value", "reason"),
    [(0, b"FWKX", "magic"), (4, b"\x02\x00", "version"), (92, b"\x01", "reserved"), (104, b"\x65", "length")],
)
def test_the_reason_names_the_defect(offset: int, value: bytes, reason: str):
    """A wrong magic, version, reserved field or length is reported before the checksum."""
    data = bytearray((GOLDEN / "frame.bin").read_bytes())
    data[offset : offset + len(value)] = value
    with pytest.raises(BadFrame) as raised:
        check(memoryview(data))
    assert raised.value.reason == reason
