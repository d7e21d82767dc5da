"""A store around a store that keeps payloads encoded; to those who use it all frames are raw."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace

from foreword.blocks.layout import Layout
from foreword.errors import BadFrame, StoreConfigError
from foreword.store.base import Entry, Name, Store, StoreStatus, time_left
from foreword.store.codecs.base import Codec, check_tokens
from foreword.store.frame import HEADER_BYTES, RAW, Frame, check, read_header, seal, split_name


class _Scratch(threading.local):
    """Room for one block's payload, each thread its own."""

    def __init__(self, size: int) -> None:
        self.memory = memoryview(bytearray(size))


def named_loss(*codecs: Codec) -> str:
    """What `Layout.loss` says of blocks that may have passed these codecs: the lossy ones' names, sorted, joined by `+`."""
    return "+".join(sorted({codec.name for codec in codecs if codec.lossy}))


class CodedStore:
    """Encodes what is put and decodes what is got; everything else is the inner store's.

    A frame that the codec does not make smaller, or that is of another layout or encoded already, is passed on as it is. What
    comes back encoded is checked to its last byte before it is decoded, and what fails counts as missing (`status().notes`).
    Raw frames come back unchecked, as from any store.

    Args:
        layout: of the blocks to encode. `layout.loss` must name a lossy codec (`named_loss`), or StoreConfigError is raised.
    """

    def __init__(self, store: Store, codec: Codec, layout: Layout) -> None:
        if codec.lossy and codec.name not in layout.loss.split("+"):
            raise StoreConfigError(
                f"The codec {codec.name!r} alters blocks, but the layout's loss is {layout.loss!r}: altered blocks would "
                f"lie under the names of exact ones. Make the layout with loss={named_loss(codec)!r}.",
                param="codec",
            )
        if codec.lossy:
            check_tokens(layout, codec.name)
        self.label = store.label
        self.readers = max(store.readers, 2)  # decoding takes a core
        self._store = store
        self._codec = codec
        self._layout = layout
        self._fingerprint = layout.fingerprint
        self._scratch = _Scratch(layout.block_bytes)
        self._lock = threading.Lock()
        self._notes = {
            "encoded": 0,
            "encoded_bytes_in": 0,
            "encoded_bytes_out": 0,
            "not_smaller": 0,
            "decoded": 0,
            "bad": 0,
        }

    def lookup(self, names: Sequence[Name], *, deadline: float) -> int:
        return self._store.lookup(names, deadline=deadline)

    def get(self, names: Sequence[Name], buffers: Sequence[memoryview], *, deadline: float) -> list[int]:
        """As `Store.get`. Where it returns 0, the buffer may hold anything."""
        lengths = self._store.get(names, buffers, deadline=deadline)
        return [
            self._decoded(name, buffer, length, deadline) if length else 0
            for name, buffer, length in zip(names, buffers, lengths, strict=True)
        ]

    def put(self, frames: Sequence[Frame], *, deadline: float) -> int:
        return self._store.put([self._encoded(frame, deadline) for frame in frames], deadline=deadline)

    def delete(self, names: Sequence[Name], *, deadline: float) -> int:
        return self._store.delete(names, deadline=deadline)

    def pin(self, names: Sequence[Name], *, pinned: bool = True, deadline: float) -> int:
        return self._store.pin(names, pinned=pinned, deadline=deadline)

    def scan(self, *, deadline: float) -> Iterator[Entry]:
        """As `Store.scan`; sizes are those of the encoded frames."""
        return self._store.scan(deadline=deadline)

    def put_record(self, word: str, data: bytes, *, deadline: float) -> None:
        self._store.put_record(word, data, deadline=deadline)

    def get_record(self, word: str, *, deadline: float) -> bytes | None:
        return self._store.get_record(word, deadline=deadline)

    def delete_record(self, word: str, *, deadline: float) -> bool:
        return self._store.delete_record(word, deadline=deadline)

    def records(self, start: str, *, deadline: float) -> list[str]:
        return self._store.records(start, deadline=deadline)

    def status(self) -> StoreStatus:
        """The inner store's. Notes of this one begin with `codec_`; `codec_bad` counts frames that failed to decode."""
        status = self._store.status()
        with self._lock:
            notes = {f"codec_{word}": count for word, count in self._notes.items()}
        return replace(status, notes={**status.notes, **notes})

    def close(self) -> None:
        self._store.close()

    def _encoded(self, frame: Frame, deadline: float) -> Frame:
        header = frame.header
        size = self._layout.block_bytes
        fits = header.layout == self._fingerprint and header.length == size == len(frame.payload)
        if header.codec != RAW or self._codec.number == RAW or not fits:
            return frame
        time_left(deadline)
        data = self._codec.encode(frame.payload, self._layout)
        if len(data) >= header.length:
            self._count(not_smaller=1)
            return frame
        buffer = memoryview(bytearray(HEADER_BYTES + len(data)))
        buffer[HEADER_BYTES:] = data
        self._count(encoded=1, encoded_bytes_in=header.length, encoded_bytes_out=len(data))
        return seal(replace(header, codec=self._codec.number, length=len(data)), buffer)

    def _decoded(self, name: Name, buffer: memoryview, length: int, deadline: float) -> int:
        """The length of the raw frame that the buffer now holds; 0, counted, if what it held is bad."""
        if length < HEADER_BYTES or length > len(buffer):
            return length
        try:
            if read_header(buffer).codec == RAW:
                return length
            time_left(deadline)
            raw_length = self._decode(name, buffer, length)
        except BadFrame:
            self._count(bad=1)
            return 0
        self._count(decoded=1)
        return raw_length

    def _decode(self, name: Name, buffer: memoryview, length: int) -> int:
        """The encoded payload moves aside and is decoded to where it lay: it is shorter than what it becomes."""
        layout, _ = split_name(name)
        header = check(buffer[:length], name).header
        size = self._layout.block_bytes
        if header.codec != self._codec.number:
            raise BadFrame("codec", f"codec {header.codec} is not {self._codec.name}, which this store is set to")
        if layout != self._fingerprint or header.raw_length != size or HEADER_BYTES + size > len(buffer):
            raise BadFrame("layout", "an encoded block of another layout, or a buffer too short for it")
        if header.length > size:
            raise BadFrame("length", "an encoded block is longer than a raw one")
        aside = self._scratch.memory[: header.length]
        aside[:] = buffer[HEADER_BYTES:length]
        self._codec.decode(aside, buffer[HEADER_BYTES : HEADER_BYTES + size], self._layout)
        seal(replace(header, codec=RAW, length=size), buffer)
        return HEADER_BYTES + size

    def _count(self, **more: int) -> None:
        with self._lock:
            for word, count in more.items():
                self._notes[word] += count
