"""Codecs are exact or within their error bound, accept any bytes safely, and stay readable; tests of the CodedStore."""

import hashlib
import json
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import zstandard
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from invariants import check_memory_store

from foreword.blocks.layout import LayerLayout, Layout
from foreword.conformance import StoreContract, soon
from foreword.errors import BadFrame, StoreConfigError, StoreTimeout
from foreword.store.base import Store, StoredBlock, StoreStatus, time_left
from foreword.store.codec import NAMES, CodedStore, codec_named, named_loss
from foreword.store.frame import HEADER_BYTES, Frame, Header, check, frame, read_header, seal
from foreword.store.memory.memory_store import MemoryStore

GOLDEN = Path(__file__).parent / "golden"
DTYPES = ("bfloat16", "float16", "float32")
LOSSY = ("int8", "int4")
LEVELS = {"int8": 255, "int4": 15}
EPSILON = {"bfloat16": 2.0**-8, "float16": 2.0**-10, "float32": 2.0**-21}

shapes = st.builds(LayerLayout, st.integers(1, 3), st.integers(0, 40), st.sampled_from([0, 1, 7, 16, 32, 67, 96, 128]))
layouts = st.builds(
    Layout,
    model=st.just(b"model"),
    block_size=st.integers(1, 20),
    layers=st.lists(shapes, min_size=1, max_size=4).map(lambda found: tuple(found + found[-1:])),
    dtype=st.sampled_from(DTYPES),
)
SMALL = Layout(b"model", 16, (LayerLayout(3, 32, 32),) * 3, "bfloat16")


def floats(payload: bytes, dtype: str) -> np.ndarray:
    """The numbers of a payload as float64."""
    with np.errstate(invalid="ignore"):
        if dtype == "bfloat16":
            return (np.frombuffer(payload, "<u2").astype("<u4") << 16).view("<f4").astype(np.float64)
        return np.frombuffer(payload, "<f2" if dtype == "float16" else "<f4").astype(np.float64)


def payload_of(numbers: np.ndarray, dtype: str) -> bytes:
    if dtype == "bfloat16":
        return (numbers.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
    return numbers.astype("<f2" if dtype == "float16" else "<f4").tobytes()


@st.composite
def blocks(draw: st.DrawFn, kinds: Sequence[str] = ("normal", "outliers", "constant", "zeros", "tiny", "bits")):
    """A layout and a payload of one of the given kinds. `bits` are arbitrary, including NaN, infinities and denormal
    numbers."""
    layout = draw(layouts)
    count = layout.block_bytes // layout.item_bytes
    source = np.random.default_rng(draw(st.integers(0, 2**32)))
    kind = draw(st.sampled_from(list(kinds)))
    if kind == "bits":
        return layout, source.bytes(layout.block_bytes)
    numbers = source.normal(size=count)
    if kind == "outliers":
        numbers[source.integers(0, 30, count) == 0] *= 300
    elif kind == "constant":
        numbers[:] = numbers[:1].sum()
    elif kind == "zeros":
        numbers[:] = 0
    elif kind == "tiny":
        numbers *= 1e-41 if layout.dtype != "float16" else 1e-7
    return layout, payload_of(numbers, layout.dtype)


def decoded(name: str, data: bytes | memoryview, layout: Layout) -> bytes:
    """Decode data, and check that nothing outside of the output was written."""
    room = bytearray(b"\xa5" * (layout.block_bytes + 32))
    try:
        codec_named(name).decode(memoryview(data), memoryview(room)[16:-16], layout)
    finally:
        assert room[:16] == room[-16:] == b"\xa5" * 16
    return bytes(room[16:-16])


def encoded(name: str, payload: bytes, layout: Layout) -> bytes:
    return bytes(codec_named(name).encode(memoryview(payload), layout))


def parts(numbers: np.ndarray, layout: Layout) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The keys `[tokens, heads, dim]` and the values of each layer, as layout.py defines them."""
    start = 0
    for layer in layout.layers:
        found = []
        for dim in (layer.key_dim, layer.value_dim):
            size = layout.block_size * layer.kv_heads * dim
            found.append(numbers[start : start + size].reshape(layout.block_size, layer.kv_heads, dim))
            start += size
        yield found[0], found[1]
    assert start == len(numbers)


def groups_of(values: np.ndarray) -> Iterator[np.ndarray]:
    """The numbers of one token and head that share a step: groups of the largest divisor from 64 to 16, or the head."""
    size = values.shape[2]
    group = next((g for g in range(64, 15, -1) if size % g == 0), size)
    for token in values:
        for head in token:
            yield from head.reshape(-1, group) if size else ()


def named_groups(numbers: np.ndarray, layout: Layout) -> Iterator[tuple[int, str, np.ndarray]]:
    """Layer, `key` or `value`, and the numbers that share a step, in a simple reference implementation."""
    for layer, (keys, values) in enumerate(parts(numbers, layout)):
        for head in range(keys.shape[1]):
            for channel in range(keys.shape[2]):
                yield layer, "key", keys[:, head, channel]
        for group in groups_of(values):
            yield layer, "value", group


@given(blocks())
def test_raw_and_lossless_are_exact_to_the_bit(block: tuple[Layout, bytes]):
    """raw and lossless return any payload bit for bit."""
    layout, payload = block
    for name in ("raw", "lossless"):
        assert decoded(name, encoded(name, payload, layout), layout) == payload


@given(blocks(["normal", "outliers", "constant", "zeros", "tiny"]))
@settings(max_examples=examples(60))
def test_int8_and_int4_stay_within_half_a_step(block: tuple[Layout, bytes]):
    """The error of a number is at most half a step of its group (plus 1/128 because steps are rounded up) and the
    rounding to the dtype of the block."""
    layout, payload = block
    exact = floats(payload, layout.dtype)
    for name in LEVELS:
        found = floats(decoded(name, encoded(name, payload, layout), layout), layout.dtype)
        assert np.isfinite(found).all()
        pairs = zip(named_groups(exact, layout), named_groups(found, layout), strict=True)
        for (_, _, group), (_, _, back) in pairs:
            step = (group.max() - group.min()) / LEVELS[name] * (1 + 2**-7)
            bound = step / 2 * (1 + 1e-5) + np.abs(group).max() * EPSILON[layout.dtype] + 6e-8
            assert np.abs(group - back).max() <= bound


@given(blocks(["bits"]))
def test_lossy_codecs_keep_non_finite_numbers(block: tuple[Layout, bytes]):
    """A block with NaN, infinity or a number near the maximum is stored unquantized. Finite numbers stay finite."""
    layout, payload = block
    exact = floats(payload, layout.dtype)
    for name in LOSSY:
        found = decoded(name, encoded(name, payload, layout), layout)
        if not np.isfinite(exact).all():
            assert found == payload
        assert np.isfinite(floats(found, layout.dtype)).all() == np.isfinite(exact).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, "largest"])
def test_one_non_finite_number_keeps_the_block_exact(name: str, bad: float | str, dtype: str):
    """A block with one NaN, infinity or maximum among keys or values comes back bit for bit."""
    layout = replace(SMALL, dtype=dtype)
    numbers = np.random.default_rng(1).normal(size=layout.block_bytes // layout.item_bytes)
    largest = {"bfloat16": 3.3895e38, "float16": 65504.0, "float32": 3.4028e38}[dtype]
    for position in (0, 16 * 96, len(numbers) - 1):
        spoilt = numbers.copy()
        spoilt[position] = largest if bad == "largest" else float(bad)
        payload = payload_of(spoilt, dtype)
        assert decoded(name, encoded(name, payload, layout), layout) == payload


@pytest.mark.parametrize("dtype", DTYPES)
def test_compression_of_normal_numbers(dtype: str):
    """Normal numbers with channels of different scale shrink: lossless by at least a sixth, int8 more, int4 most."""
    layout = replace(SMALL, dtype=dtype)
    numbers = np.random.default_rng(2).normal(size=(3, 2, 16, 96)) * np.linspace(0.2, 3, 96)
    payload = payload_of(numbers.ravel(), dtype)
    sizes = {name: len(encoded(name, payload, layout)) / len(payload) for name in NAMES}
    assert sizes["raw"] == 1
    assert sizes["lossless"] < (0.85 if dtype == "bfloat16" else 0.95)
    assert sizes["int4"] < sizes["int8"] < min(0.7, sizes["lossless"])


def test_planes_of_zeros_vanish():
    """float32 numbers that fit into bfloat16 take at most two more bits per number than in bfloat16."""
    numbers = np.random.default_rng(3).normal(size=SMALL.block_bytes // 2)
    wide = (np.frombuffer(payload_of(numbers, "bfloat16"), "<u2").astype("<u4") << 16).tobytes()
    layout = replace(SMALL, dtype="float32")
    short = encoded("lossless", payload_of(numbers, "bfloat16"), SMALL)
    long = encoded("lossless", wide, layout)
    assert decoded("lossless", long, layout) == wide
    assert len(long) < len(short) + len(numbers) // 4


@given(st.sampled_from(NAMES), layouts, st.binary(max_size=600), st.sampled_from([b"", b"\0", b"\1", b"\2\0", b"\4\0"]))
@settings(max_examples=examples(200))
def test_arbitrary_bytes_are_refused_or_decoded(name: str, layout: Layout, noise: bytes, start: bytes):
    """A decoder fills its output or raises BadFrame, for any bytes."""
    try:
        decoded(name, start + noise, layout)
    except BadFrame as error:
        assert error.reason == "codec"


@given(blocks(), st.sampled_from(NAMES), st.data())
@settings(max_examples=examples(200))
def test_damaged_encodings_are_refused_or_decoded(block: tuple[Layout, bytes], name: str, data: st.DataObject):
    """A damaged encoding decodes to something or raises BadFrame. A truncated or extended one always raises."""
    layout, payload = block
    whole = encoded(name, payload, layout)
    altered = bytearray(whole)
    if altered:
        for _ in range(data.draw(st.integers(1, 4))):
            altered[data.draw(st.integers(0, min(len(altered) - 1, 60)) | st.integers(0, len(altered) - 1))] ^= (
                1 << data.draw(st.integers(0, 7))
            )
    try:
        decoded(name, altered, layout)
    except BadFrame as error:
        assert error.reason == "codec"
    cut = data.draw(st.integers(1, max(1, len(whole))))
    for wrong in (whole + b"\0" * cut, whole[: len(whole) - cut]):
        if len(wrong) != len(whole):
            with pytest.raises(BadFrame):
                decoded(name, wrong, layout)


def test_a_stream_of_wrong_length_is_refused_before_allocation():
    """A compressed stream whose header has a wrong length is refused before memory is allocated."""
    layout = replace(SMALL, dtype="bfloat16")
    count = layout.block_bytes // 2
    bomb = b"\x28\xb5\x2f\xfd" + b"\xe0" + (1 << 40).to_bytes(8, "little") + b"\x01\x00\x00"
    assert zstandard.get_frame_parameters(bomb).content_size == 1 << 40
    data = b"\x02\x00" + b"\x01" + len(bomb).to_bytes(4, "little") + b"\x00" + count.to_bytes(4, "little") + bomb
    with pytest.raises(BadFrame):
        decoded("lossless", data + bytes(count), layout)


def test_a_stream_with_extra_bytes_is_refused():
    """Extra bytes after a compressed stream, within its announced length, are refused."""
    payload = bytes(SMALL.block_bytes)
    whole = encoded("lossless", payload, SMALL)
    first, second = (int.from_bytes(whole[at : at + 4], "little") for at in (3, 8))
    assert len(whole) == 12 + first + second and whole[2] == whole[7] == 1
    more = whole[:8] + (second + 3).to_bytes(4, "little") + whole[12:] + b"abc"
    assert decoded("lossless", whole, SMALL) == payload
    with pytest.raises(BadFrame):
        decoded("lossless", more, SMALL)


def test_wrong_lengths_are_refused_both_ways():
    """A payload to encode or an output to decode into that has the wrong length raises BadFrame."""
    payload = bytes(SMALL.block_bytes)
    for name in NAMES:
        codec = codec_named(name)
        data = codec.encode(memoryview(payload), SMALL)
        for length in (0, SMALL.block_bytes - 1, SMALL.block_bytes + 1):
            with pytest.raises(BadFrame):
                codec.encode(memoryview(bytes(length)), SMALL)
            with pytest.raises(BadFrame):
                codec.decode(memoryview(data), memoryview(bytearray(length)), SMALL)


def test_codecs_are_found_by_name():
    """Each name has the codec with the documented number. The error for an unknown name lists close or known names."""
    found = {name: (codec_named(name).number, codec_named(name).lossy) for name in NAMES}
    assert found == {
        "raw": (0, False),
        "lossless": (1, False),
        "int8": (2, True),
        "int4": (3, True),
    }
    with pytest.raises(StoreConfigError, match="lossless"):
        codec_named("losless")
    with pytest.raises(StoreConfigError, match="'int4', 'int8', 'lossless', 'raw'"):
        codec_named("entropy")  # a codec that was removed


@pytest.mark.parametrize("name", LOSSY)
def test_lossy_codecs_refuse_unknown_orders(name: str):
    """Lossy codecs refuse layouts of other engines, where keys and values cannot be told apart. Lossless codecs accept
    them."""
    layout = replace(SMALL, order="somebody's", loss=name)
    payload = memoryview(bytes(layout.block_bytes))
    with pytest.raises(StoreConfigError, match="order"):
        codec_named(name).encode(payload, layout)
    with pytest.raises(StoreConfigError, match="order"):
        CodedStore(DictStore(), codec_named(name), layout)
    assert decoded("lossless", encoded("lossless", bytes(payload), layout), layout) == payload


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_golden_encodings_stay_readable(name: str, dtype: str):
    """Golden encodings of older versions decode to the same bytes as then; lossless ones to the payload itself."""
    shape = LayerLayout(2, 8, 16)
    layout = Layout(b"golden", 7, (shape, shape, LayerLayout(1, 12, 6)), dtype)
    found = decoded(name, (GOLDEN / f"{dtype}.{name}").read_bytes(), layout)
    digests = json.loads((GOLDEN / "decoded.json").read_text())
    assert hashlib.sha256(found).hexdigest() == digests[f"{dtype}.{name}"]
    if name not in LOSSY:
        assert found == (GOLDEN / f"{dtype}.payload").read_bytes()


def test_threads_share_a_codec():
    """Four threads that use the same codecs concurrently get their own blocks back."""
    failures: list[int] = []
    codecs = [codec_named(name) for name in NAMES]

    def work(number: int) -> None:
        source = np.random.default_rng(number)
        for _ in range(10):
            payload = payload_of(source.normal(size=SMALL.block_bytes // 2), "bfloat16")
            for codec in codecs:
                first, second = bytearray(SMALL.block_bytes), bytearray(SMALL.block_bytes)
                codec.decode(memoryview(codec.encode(memoryview(payload), SMALL)), memoryview(first), SMALL)
                codec.decode(memoryview(codec.encode(memoryview(payload), SMALL)), memoryview(second), SMALL)
                close = np.abs(floats(first, "bfloat16") - floats(payload, "bfloat16")).max() < 1
                if first != second or not close or (not codec.lossy and first != payload):
                    failures.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


class DictStore:
    """A store in a dictionary, to inspect what a CodedStore writes."""

    label = "dict"
    blocking = False
    local = True
    readers = 1

    def __init__(self) -> None:
        self.frames: dict[bytes, bytes] = {}
        self.kept: dict[str, bytes] = {}
        self.pinned: set[bytes] = set()
        self.closed = False

    def lookup(self, names: Sequence[bytes], *, deadline: float) -> int:
        time_left(deadline)
        return next((at for at, name in enumerate(names) if name not in self.frames), len(names))

    def get(self, names: Sequence[bytes], buffers: Sequence[memoryview], *, deadline: float) -> list[int]:
        time_left(deadline)
        lengths = []
        for name, buffer in zip(names, buffers, strict=True):
            data = self.frames.get(name, b"")
            fits = len(data) <= len(buffer)
            if fits:
                buffer[: len(data)] = data
            lengths.append(len(data) if fits else 0)
        return lengths

    def put(self, frames: Sequence[Frame], *, deadline: float) -> int:
        time_left(deadline)
        for each in frames:
            self.frames.setdefault(each.name, bytes(each.data))
        return len(frames)

    def delete(self, names: Sequence[bytes], *, deadline: float) -> int:
        time_left(deadline)
        return sum(self.frames.pop(name, None) is not None for name in names)

    def pin(self, names: Sequence[bytes], *, pinned: bool = True, deadline: float) -> int:
        time_left(deadline)
        self.pinned = self.pinned | set(names) if pinned else self.pinned - set(names)
        return len(names)

    def scan(self, *, deadline: float) -> Iterator[StoredBlock]:
        return iter([StoredBlock(name, size=len(data)) for name, data in self.frames.items()])

    def put_record(self, key: str, data: bytes, *, deadline: float) -> None:
        self.kept[key] = data

    def get_record(self, key: str, *, deadline: float) -> bytes | None:
        return self.kept.get(key)

    def delete_record(self, key: str, *, deadline: float) -> bool:
        return self.kept.pop(key, None) is not None

    def records(self, prefix: str, *, deadline: float) -> list[str]:
        return sorted(key for key in self.kept if key.startswith(prefix))

    def status(self) -> StoreStatus:
        return StoreStatus(blocks=len(self.frames), notes={"mine": 1})

    def close(self) -> None:
        self.closed = True


def block_frame(layout: Layout, number: int, payload: bytes | None = None) -> Frame:
    """A raw frame of normal numbers."""
    if payload is None:
        numbers = np.random.default_rng(number).normal(size=layout.block_bytes // layout.item_bytes)
        payload = payload_of(numbers, layout.dtype)
    key, parent = bytes([number]) * 32, bytes([number - 1]) * 32
    return frame(Header(layout.fingerprint, bytes(16), key, parent, number, 0, len(payload), len(payload)), payload)


def read_one(store: CodedStore, name: bytes, size: int) -> bytes:
    """The bytes of a frame, empty if it is missing or bad. Checks that nothing after the buffer's length was written."""
    room = bytearray(b"\xa5" * (size + 16))
    [length] = store.get([name], [memoryview(room)[:size]], deadline=soon())
    assert room[size:] == b"\xa5" * 16
    return bytes(room[: max(length, 0)])


@pytest.mark.parametrize("name", NAMES)
def test_a_coded_store_returns_raw_frames(name: str):
    """Frames are stored encoded and smaller under their names, and come back raw and verified."""
    layout = replace(SMALL, loss=name if name in LOSSY else "")
    inner = DictStore()
    store = CodedStore(inner, codec_named(name), layout)
    frames = [block_frame(layout, number) for number in range(1, 6)]
    assert store.put(frames, deadline=soon()) == 5
    for each in frames:
        lying = check(memoryview(inner.frames[each.name]), each.name)
        assert lying.header.codec == codec_named(name).number
        assert lying.header.raw_length == layout.block_bytes
        assert (len(lying.data) < len(each.data)) == (name != "raw")
        back = check(memoryview(read_one(store, each.name, len(each.data))), each.name)
        assert back.header == each.header
        if name not in LOSSY:
            assert back.data == each.data
        else:
            away = floats(bytes(back.payload), "bfloat16") - floats(bytes(each.payload), "bfloat16")
            assert 0 < np.abs(away).max() < 0.6
    assert read_one(store, bytes(48), len(frames[0].data)) == b""
    notes = store.status().notes
    assert notes["mine"] == 1 and notes["codec_bad"] == 0
    assert notes["codec_encoded"] == notes["codec_decoded"] == (0 if name == "raw" else 5)


def test_frames_that_cannot_be_encoded_are_stored_unchanged():
    """Noise, frames of another layout and encoded frames are stored unchanged."""
    inner = DictStore()
    store = CodedStore(inner, codec_named("lossless"), SMALL)
    noise = block_frame(SMALL, 1, np.random.default_rng(5).bytes(SMALL.block_bytes))
    other = block_frame(replace(SMALL, block_size=8), 2)
    done = frame(Header(SMALL.fingerprint, bytes(16), b"k" * 32, b"p" * 32, 0, 2, SMALL.block_bytes, 5), b"12345")
    store.put([noise, other, done], deadline=soon())
    for each in (noise, other, done):
        assert inner.frames[each.name] == each.data
    assert read_one(store, noise.name, len(noise.data)) == noise.data
    assert read_one(store, other.name, len(other.data)) == other.data
    assert store.status().notes["codec_not_smaller"] == 1


@given(st.data())
@settings(max_examples=examples(60))
def test_a_damaged_frame_is_a_miss_that_is_counted(data: st.DataObject):
    """An encoded frame that was altered, truncated, extended or renamed is a miss and is counted once."""
    inner = DictStore()
    store = CodedStore(inner, codec_named("lossless"), SMALL)
    good, second = block_frame(SMALL, 1), block_frame(SMALL, 2)
    store.put([good, second], deadline=soon())
    lying = bytearray(inner.frames[good.name])
    how = data.draw(st.sampled_from(["flip", "cut", "extend", "swap"]))
    if how == "flip":
        head = len(lying) - HEADER_BYTES
        position = data.draw(st.integers(head, len(lying) - 1) | st.integers(0, len(lying) - 1))
        # If the codec number becomes 0, it is a raw frame with a wrong checksum, which the caller detects.
        lying[position] ^= 2 if position == head + 6 else 1 << data.draw(st.integers(0, 7))
    elif how == "cut":
        lying = lying[: data.draw(st.integers(HEADER_BYTES, len(lying) - 1))]
    elif how == "extend":
        lying += bytes(data.draw(st.integers(1, 100)))
    else:
        lying = bytearray(inner.frames[second.name])
    inner.frames[good.name] = bytes(lying)
    assert read_one(store, good.name, len(good.data)) == b""
    assert store.status().notes["codec_bad"] == 1
    assert read_one(store, second.name, len(second.data)) == second.data


def test_frames_with_wrong_headers_are_misses():
    """Frames with a valid checksum but a wrong codec, raw length, layout or encoding are misses."""
    inner = DictStore()
    store = CodedStore(inner, codec_named("lossless"), SMALL)
    good = block_frame(SMALL, 1)
    store.put([good], deadline=soon())
    whole = inner.frames[good.name]
    header = read_header(whole)
    payload = whole[:-HEADER_BYTES]
    noise = np.random.default_rng(6).bytes(len(payload))
    liars = [
        (replace(header, codec=3), payload),
        (replace(header, codec=999), payload),
        (replace(header, raw_length=header.raw_length + 2), payload),
        (header, noise),
        (replace(header, length=1), b"x"),
        (replace(header, length=0), b""),
        (replace(header, length=SMALL.block_bytes + 10), bytes(SMALL.block_bytes + 10)),
    ]
    for count, (lie, data) in enumerate(liars, 1):
        buffer = memoryview(bytearray(data) + bytes(HEADER_BYTES))
        inner.frames[good.name] = bytes(seal(lie, buffer).data)
        assert read_one(store, good.name, len(good.data) + 50) == b""
        assert store.status().notes["codec_bad"] == count
    other = replace(header, layout=bytes(16))
    inner.frames[other.name] = bytes(seal(other, memoryview(bytearray(whole))).data)
    assert read_one(store, other.name, len(good.data)) == b""


def test_a_buffer_too_short_for_the_raw_frame_is_a_miss():
    """If a buffer fits the encoded frame but not the raw one, nothing is written past it."""
    store = CodedStore(DictStore(), codec_named("lossless"), SMALL)
    good = block_frame(SMALL, 1)
    store.put([good], deadline=soon())
    assert read_one(store, good.name, len(good.data) - 1) == b""
    assert read_one(store, good.name, len(good.data)) == good.data


def test_lossy_codecs_must_be_named_in_the_layout():
    """A lossy codec is refused unless the layout names it. Such a layout has another fingerprint."""
    for name in LOSSY:
        with pytest.raises(StoreConfigError, match="loss"):
            CodedStore(DictStore(), codec_named(name), SMALL)
        assert replace(SMALL, loss=name).fingerprint != SMALL.fingerprint
    both = named_loss(*(codec_named(name) for name in ("raw", "lossless", "int8", "int4", "int8")))
    assert both == "int4+int8"
    assert named_loss(codec_named("lossless")) == ""
    CodedStore(DictStore(), codec_named("int8"), replace(SMALL, loss=both))


def test_other_calls_are_forwarded():
    """lookup, delete, pin, scan, records, status and close are forwarded to the inner store with their deadlines."""
    inner = DictStore()
    store = CodedStore(inner, codec_named("lossless"), SMALL)
    frames = [block_frame(SMALL, number) for number in (1, 2)]
    names = [each.name for each in frames]
    store.put(frames, deadline=soon())
    assert store.lookup([*names, bytes(48)], deadline=soon()) == 2
    assert store.pin(names[:1], deadline=soon()) == 1 and inner.pinned == set(names[:1])
    assert store.pin(names[:1], pinned=False, deadline=soon()) == 1 and inner.pinned == set()
    assert {entry.name: entry.size for entry in store.scan(deadline=soon())} == {
        name: len(data) for name, data in inner.frames.items()
    }
    store.put_record("a/b", b"data", deadline=soon())
    assert store.get_record("a/b", deadline=soon()) == b"data" == inner.kept["a/b"]
    assert store.records("a/", deadline=soon()) == ["a/b"]
    assert store.delete_record("a/b", deadline=soon()) and not store.delete_record("a/b", deadline=soon())
    assert store.status().blocks == 2 and store.label == "dict"
    assert store.delete(names, deadline=soon()) == 2 and inner.frames == {}
    past = time.monotonic() - 1
    for late in (
        lambda: store.put(frames, deadline=past),
        lambda: store.get(names, [memoryview(bytearray(SMALL.block_bytes + HEADER_BYTES))] * 2, deadline=past),
        lambda: store.lookup(names, deadline=past),
    ):
        with pytest.raises(StoreTimeout):
            late()
    store.close()
    assert inner.closed


def test_threads_share_a_coded_store():
    """Four threads that use one store concurrently read only what was put."""
    store = CodedStore(DictStore(), codec_named("lossless"), SMALL)
    failures: list[int] = []
    interval = sys.getswitchinterval()

    def work(number: int) -> None:
        mine = [block_frame(SMALL, 10 * number + each) for each in range(1, 5)]
        for _ in range(50):
            store.put(mine, deadline=soon())
            room = [memoryview(bytearray(len(each.data))) for each in mine]
            lengths = store.get([each.name for each in mine], room, deadline=soon())
            if lengths != [len(each.data) for each in mine] or any(
                bytes(a) != bytes(b.data) for a, b in zip(room, mine, strict=True)
            ):
                failures.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert failures == []
    assert store.status().notes["codec_decoded"] == 800


class TestContract(StoreContract):
    """A coded store fulfills the contract. The frames of the contract have another layout and pass unchanged."""

    @pytest.fixture
    def store(self) -> Iterator[Store]:
        inner = MemoryStore(64 << 20, slot_bytes=(64 << 10) + HEADER_BYTES)
        yield CodedStore(inner, codec_named("lossless"), SMALL)
        check_memory_store(inner)
        inner.close()


def test_a_coded_store_over_memory_holds_exact_blocks():
    """A chain encoded into a memory store comes back bit for bit in one batch, beside missing names."""
    inner = MemoryStore(8 << 20)
    store = CodedStore(inner, codec_named("lossless"), SMALL)
    frames = [block_frame(SMALL, number) for number in range(1, 30)]
    assert store.put(frames, deadline=soon()) == 29
    names = [bytes(48), *(each.name for each in frames)]
    room = [memoryview(bytearray(len(frames[0].data))) for _ in names]
    lengths = store.get(names, room, deadline=soon())
    assert lengths == [0, *(len(each.data) for each in frames)]
    assert all(found == each.data for found, each in zip(room[1:], frames, strict=True))
    assert all(entry.size < len(frames[0].data) for entry in store.scan(deadline=soon()))
    store.close()
