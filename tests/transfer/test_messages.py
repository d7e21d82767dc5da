import contextlib
import dataclasses
import struct

import msgspec
import pytest
from example_counts import examples
from hypothesis import Phase, example, find, given, settings
from hypothesis import strategies as st

from foreword.transfer import wire_format
from foreword.transfer.errors import BadMessage, TransferError
from foreword.transfer.wire_format import (
    HEAD_BYTES,
    MAX_METADATA,
    MAX_PAYLOAD,
    Accept,
    Cancel,
    Finished,
    Frames,
    Get,
    Goodbye,
    Heartbeat,
    Hello,
    KeepAlive,
    KVPart,
    LinkResult,
    Locate,
    Located,
    OwnershipAnswer,
    OwnershipQuery,
    PullRequest,
    PushRequest,
    Reason,
    Refuse,
    SharedSegment,
    Taken,
    TransferMessage,
    decode,
    encode,
    join_keys,
    payload_checksum,
    split_keys,
)

ID = bytes(range(16))
small = st.integers(0, (1 << 32) - 1)
large = st.integers(0, 1 << 62)
seconds = st.floats(0, 1e6)
text = st.text(max_size=200)
keys = st.lists(st.binary(min_size=32, max_size=32), max_size=5).map(b"".join)
names = st.lists(st.binary(min_size=64, max_size=64), max_size=5).map(b"".join)
reasons = st.sampled_from(Reason)
_OF_TRANSFER = (
    st.builds(PullRequest, st.binary(), keys, small, seconds),
    st.builds(PushRequest, st.binary(), keys, small, seconds),
    st.builds(Accept, small),
    st.builds(Refuse, reasons, text),
    st.builds(KVPart, small, small, small, small, small, keys),
    st.just(KeepAlive()),
    st.builds(Finished, st.binary(), small),
    st.just(Taken()),
    st.builds(Cancel, reasons, text),
    st.just(OwnershipQuery()),
    st.builds(OwnershipAnswer, st.booleans()),
    st.builds(Locate, names),
    st.builds(Located, small),
    st.builds(Get, names, large, seconds),
    st.builds(Frames, small, st.lists(large, max_size=5).map(tuple)),
)
_OF_CONNECTION = (
    st.builds(Hello, st.binary(), text, text, seconds, large),
    st.builds(SharedSegment, text, large, st.binary()),
    st.builds(LinkResult, st.booleans()),
    st.just(Heartbeat()),
    st.builds(Goodbye, text),
)
OF_TRANSFER, OF_CONNECTION = st.one_of(*_OF_TRANSFER), st.one_of(*_OF_CONNECTION)


def read(data: bytes) -> tuple[wire_format.Head, TransferMessage]:
    return decode(data[:HEAD_BYTES], data[HEAD_BYTES:])


@given(OF_TRANSFER, st.integers(0, MAX_PAYLOAD), st.integers(0, (1 << 64) - 1), large)
def test_messages_of_transfers_round_trip(message: TransferMessage, size: int, summed: int, position: int) -> None:
    """Decoding returns what was encoded: the message, its transfer, and the description of its payload."""
    size = size if isinstance(message, KVPart | Frames) else 0
    head, found = read(encode(message, ID, payload=size, payload_sum=summed, position=position))
    assert found == message and type(found) is type(message)
    assert (head.transfer, head.payload, head.payload_sum, head.position) == (ID, size, summed, position)


@given(OF_CONNECTION)
def test_messages_of_connections_round_trip(message: TransferMessage) -> None:
    """Messages that belong to no transfer are read as they were written."""
    head, found = read(encode(message))
    assert found == message and head.transfer == bytes(16)


def test_every_kind_is_tried() -> None:
    """The strategies above produce every kind of message, and every kind is frozen."""
    once = settings(max_examples=1, phases=[Phase.generate], database=None)
    tried = {type(find(strategy, lambda _: True, settings=once)) for strategy in (*_OF_TRANSFER, *_OF_CONNECTION)}
    assert tried == set(wire_format._NUMBERS)
    assert all(dataclasses.is_dataclass(kind) and kind.__dataclass_params__.frozen for kind in tried)


def test_the_written_form() -> None:
    """The bytes of two messages are fixed, because other versions and machines must read them."""
    part = encode(KVPart(1, 2, 3, 4, 50, bytes(range(96))), ID, payload=100, payload_sum=7, position=9)
    assert part[:56].hex() == (
        "46575458" "0100" "05" "01" "000102030405060708090a0b0c0d0e0f" "9a000000" "00000000"
        "6400000000000000" "0700000000000000" "0900000000000000"
    )  # fmt: skip
    assert part[HEAD_BYTES:].startswith(b"\x86\xabfirst_layer\x01\xa6layers\x02\xabfirst_block\x03\xa6blocks\x04")
    assert encode(Heartbeat()).hex() == (
        "46575458" "0100" "2b" "00" + 16 * "00" + "01000000" "00000000" + 24 * "00" + "d2b86630b8b9ad5b" "80"
    )  # fmt: skip


@given(OF_TRANSFER | OF_CONNECTION, st.data())
def test_cut_messages_are_refused(message: TransferMessage, data: st.DataObject) -> None:
    """A truncated message, and one with extra bytes, raises TransferError and no other exception."""
    whole = _encoded(message)
    cut = whole[: data.draw(st.integers(0, len(whole) - 1))]
    for wrong in (cut, whole + b"\x00"):
        with pytest.raises(TransferError):
            read(wrong)


@given(OF_TRANSFER | OF_CONNECTION, st.data())
@settings(max_examples=examples(300))
def test_flipped_bits_are_noticed(message: TransferMessage, data: st.DataObject) -> None:
    """A flipped bit anywhere in head or metadata raises TransferError."""
    whole = bytearray(_encoded(message))
    bit = data.draw(st.integers(0, 8 * len(whole) - 1))
    whole[bit // 8] ^= 1 << bit % 8
    with pytest.raises(TransferError):
        read(bytes(whole))


@given(st.binary(max_size=300))
@example(b"")
@example(b"FWTX" + bytes(60))
def test_noise_is_refused(data: bytes) -> None:
    """For any bytes the decoder raises TransferError and no other exception."""
    with pytest.raises(TransferError):
        read(data)


@given(st.sampled_from(sorted(wire_format._KINDS)), st.binary(max_size=100), st.booleans())
@settings(max_examples=examples(300))
def test_arbitrary_metadata_is_refused(kind: int, metadata: bytes, summed: bool) -> None:
    """Arbitrary metadata under a valid head and checksum is a message or raises TransferError."""
    transfer = bytes(16) if wire_format._KINDS[kind] in wire_format._OF_CONNECTION else ID
    head = wire_format._HEAD.pack(b"FWTX", 1, kind, int(summed), transfer, len(metadata), 0, 0, 0, 0)
    whole = head + struct.pack("<Q", wire_format.payload_checksum([head + metadata])) + metadata
    with contextlib.suppress(TransferError):
        assert isinstance(read(whole)[1], wire_format._KINDS[kind])


PART = {"first_layer": 0, "layers": 1, "first_block": 0, "blocks": 1, "tokens": 1}


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (5, PART | {"first_layer": 1 << 32}),
        (5, PART | {"first_layer": -1}),
        (5, PART | {"keys": b"half a key"}),
        (5, PART | {"tokens": "7"}),
        (1, {"request": b"", "keys": bytes(31)}),
        (1, {"keys": b""}),
        (22, {"names": bytes(47), "longest": 1, "seconds": 1.0}),
        (22, {"names": b"", "longest": 1, "seconds": -1.0}),
        (22, {"names": b"", "longest": 1, "seconds": float("nan")}),
        (4, {"reason": "full", "message": "x" * 2001}),
        (4, {"reason": "because"}),
    ],
    ids=str,
)
def test_values_out_of_bounds_are_refused(kind: int, values: dict[str, object]) -> None:
    """Numbers, texts and names that the protocol does not allow are refused when they are read."""
    metadata = msgspec.msgpack.encode(values)
    head = wire_format._HEAD.pack(b"FWTX", 1, kind, 1, ID, len(metadata), 0, 0, 0, 0)
    with pytest.raises(BadMessage):
        read(head + struct.pack("<Q", payload_checksum([head + metadata])) + metadata)


def test_lengths_are_bounded() -> None:
    """Lengths beyond the protocol's limits are refused before anything is allocated, on both sides."""
    with pytest.raises(BadMessage):
        encode(KVPart(0, 1, 0, 1, 1), ID, payload=MAX_PAYLOAD + 1)
    with pytest.raises(BadMessage):
        encode(PullRequest(bytes(MAX_METADATA)), ID)
    head = wire_format._HEAD.pack(b"FWTX", 1, 5, 1, ID, MAX_METADATA + 1, 0, 0, 0, 0) + bytes(8)
    with pytest.raises(BadMessage):
        wire_format.read_head(head)
    head = wire_format._HEAD.pack(b"FWTX", 1, 5, 1, ID, 0, 0, MAX_PAYLOAD + 1, 0, 0) + bytes(8)
    with pytest.raises(BadMessage):
        wire_format.read_head(head)


@pytest.mark.parametrize(
    ("message", "transfer", "payload"),
    [(Taken(), ID, 5), (Taken(), bytes(16), 0), (Heartbeat(), ID, 0)],
    ids=["payload", "no-transfer", "transfer"],
)
def test_messages_in_the_wrong_place(message: TransferMessage, transfer: bytes, payload: int) -> None:
    """Only some messages may have a payload, and only messages about a transfer have a transfer id."""
    with pytest.raises(BadMessage):
        read(encode(message, transfer, payload=payload, payload_sum=1))


def test_a_part_has_a_checksum() -> None:
    """KV without a checksum is refused."""
    with pytest.raises(BadMessage):
        read(encode(KVPart(0, 1, 0, 1, 1), ID, payload=10))


@given(st.lists(st.binary(max_size=50), max_size=5))
def test_the_checksum_does_not_depend_on_the_buffers(buffers: list[bytes]) -> None:
    """A checksum is the same for the same bytes in one buffer or in several."""
    assert payload_checksum(buffers) == payload_checksum([b"".join(buffers)])


@given(st.lists(st.binary(min_size=32, max_size=32), max_size=5))
def test_keys_round_trip(some: list[bytes]) -> None:
    """Joining and splitting keys is the identity."""
    assert split_keys(join_keys(some)) == some


def _encoded(message: TransferMessage) -> bytes:
    size = 10 if isinstance(message, KVPart | Frames) else 0
    transfer = bytes(16) if isinstance(message, wire_format._OF_CONNECTION) else ID
    return encode(message, transfer, payload=size, payload_sum=1)
