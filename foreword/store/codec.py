"""Codecs encode the payload of stored blocks. docs/guides/codecs.md has measurements of their ratio, speed and
accuracy.

    name      number  lossy
    raw            0  no     unchanged
    lossless       1  no     planes of exponents and mantissas, compressed with zstd where that helps (lossless.py)
    int8           2  yes    8-bit quantization, keys per channel, values per token (lossy.py)
    int4           3  yes    the same with 4 bits (lossy.py)

The number is stored in the frame header and keeps its meaning forever. Number 4 belonged to a codec that was removed.
Blocks encoded with a lossy codec have another layout (`Layout.loss`), so they never share a name with exact blocks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from typing import Final, Protocol, cast

from foreword.blocks.layout import Layout
from foreword.errors import BadFrame, StoreConfigError, did_you_mean
from foreword.store.base import BAD, FAILED, FOREIGN, Name, Store, time_left
from foreword.store.frame import FOREIGN_REASONS, HEADER_BYTES, RAW, Frame, check, read_header, seal
from foreword.store.types import Codecs
from foreword.store.wrappers import FormChanger

_MODULES: Final = {"lossless": "lossless", "int8": "lossy", "int4": "lossy"}
NAMES: Final = ("raw", *_MODULES)
# Frames, and bytes of those that were encoded. `codec_bad`: those that could not be decoded.
_ENCODED: Final = ("codec_encoded", "codec_encoded_bytes_in", "codec_encoded_bytes_out", "codec_not_smaller")
_NOTES: Final = (*_ENCODED, "codec_decoded", "codec_bad")


class Codec(Protocol):
    """Encodes and decodes payloads. Stateless and thread-safe."""

    @property
    def name(self) -> str: ...

    @property
    def number(self) -> int:
        """The codec field of the frame header."""
        ...

    @property
    def lossy(self) -> bool: ...

    def encode(self, payload: memoryview, layout: Layout) -> bytes | memoryview:
        """Encode a payload of `layout.block_bytes` bytes. The result may be a little longer if the payload does not compress.

        Raises BadFrame if the payload has another length, StoreConfigError if the codec does not support the layout.
        """
        ...

    def decode(self, data: memoryview, out: memoryview, layout: Layout) -> None:
        """Decode into `out` (writable, `layout.block_bytes` bytes).

        Raises BadFrame for data that `encode` cannot have written; the content of `out` is then undefined. Lengths are
        checked before memory is allocated.
        """
        ...


class Raw:
    """The codec that leaves payloads unchanged."""

    name = "raw"
    number = RAW
    lossy = False

    def encode(self, payload: memoryview, layout: Layout) -> memoryview:
        check_length(payload, layout)
        return payload

    def decode(self, data: memoryview, out: memoryview, layout: Layout) -> None:
        check_length(data, layout)
        check_length(out, layout)
        out[:] = data


def codec_named(name: str) -> Codec:
    """The codec of that name. Raises StoreConfigError if there is none, or if its libraries are not installed."""
    if name == Raw.name:
        return Raw()
    if name not in _MODULES:
        raise StoreConfigError(f"There is no codec {name!r}{did_you_mean(name, NAMES)}", param="codec")
    try:
        module = import_module(f"foreword.store.codecs.{_MODULES[name]}")
    except ModuleNotFoundError as error:
        raise StoreConfigError(
            f"The codec {name!r} needs {error.name}: pip install 'foreword[compression]'", param="codec"
        ) from error
    return cast("Codec", module.CODECS[name])


def check_length(payload: memoryview, layout: Layout) -> None:
    """Raise BadFrame unless the payload has the length of a block of this layout."""
    if payload.nbytes != layout.block_bytes:
        raise BadFrame("codec", f"{payload.nbytes} bytes of payload, a block of this layout has {layout.block_bytes}")


def check_tokens(layout: Layout, name: str) -> None:
    """Raise StoreConfigError unless the layout has the order `tokens`, in which keys and values can be told apart."""
    if layout.order != "tokens":
        raise StoreConfigError(
            f"The codec {name!r} supports blocks of the order 'tokens', not {layout.order!r}", param="codec"
        )


class _Scratch(threading.local):
    """A buffer for one payload per thread."""

    def __init__(self, size: int) -> None:
        self.memory = memoryview(bytearray(size))


def named_loss(*codecs: Codec) -> str:
    """The value of `Layout.loss` for blocks encoded by these codecs: names of the lossy ones, sorted and joined by `+`."""
    return "+".join(sorted({codec.name for codec in codecs if codec.lossy}))


class CodedStore(FormChanger):
    """Encodes frames on `put` and decodes them on `get`. All other calls go to the inner store unchanged.

    A frame is stored as it is if the codec does not make it smaller, or if it has another layout or is already encoded.
    An encoded frame is verified before it is decoded; a damaged one is BAD, an intact one of another codec or layout FOREIGN.
    Raw frames are returned unverified, as by any store. `scan` lists the sizes of encoded frames.

    Args:
        layouts: layouts of the blocks to encode.

    Raises:
        StoreConfigError: the codec is lossy and a layout's `loss` does not name it (`named_loss`).
    """

    def __init__(self, store: Store, codec: Codec, *layouts: Layout) -> None:
        for layout in layouts if codec.lossy else ():
            if codec.name not in layout.loss.split("+"):
                raise StoreConfigError(
                    f"The codec {codec.name!r} is lossy, but the layout's loss is {layout.loss!r}: altered blocks would be "
                    f"stored under the names of exact ones. Create the layout with loss={named_loss(codec)!r}.",
                    param="codec",
                )
            check_tokens(layout, codec.name)
        super().__init__(store, _NOTES)
        self.readers = max(store.readers, 2)  # decoding keeps a core busy
        self._codec = codec
        self._layouts = {layout.fingerprint: layout for layout in layouts}
        self._scratch = _Scratch(max(layout.block_bytes for layout in layouts))

    def get(self, names: Sequence[Name], buffers: Sequence[memoryview], *, deadline: float) -> list[int]:
        """Read as `Store.get`. The content of a buffer is undefined where no length is returned."""
        lengths = self.inner.get(names, buffers, deadline=deadline)
        return [
            self._decoded(name, buffer, length, deadline) if length > 0 else length
            for name, buffer, length in zip(names, buffers, lengths, strict=True)
        ]

    def put(self, frames: Sequence[Frame], *, deadline: float) -> int:
        return self.put_changed([self._encoded(frame, deadline) for frame in frames], deadline=deadline)

    def _encoded(self, frame: Frame, deadline: float) -> Frame:
        header = frame.header
        layout = self._layouts.get(header.layout)
        if header.codec != RAW or self._codec.number == RAW or layout is None:
            return frame
        if not header.length == layout.block_bytes == len(frame.payload):
            return frame
        time_left(deadline)
        data = self._codec.encode(frame.payload, layout)
        if len(data) >= header.length:
            self.count(codec_not_smaller=1)
            return frame
        buffer = memoryview(bytearray(len(data) + HEADER_BYTES))
        buffer[: len(data)] = data
        self.count(codec_encoded=1, codec_encoded_bytes_in=header.length, codec_encoded_bytes_out=len(data))
        return seal(replace(header, codec=self._codec.number, length=len(data)), buffer)

    def _decoded(self, name: Name, buffer: memoryview, length: int, deadline: float) -> int:
        """Decode the frame in `buffer` in place. Returns the length of the raw frame, or BAD, FOREIGN, or FAILED at the
        deadline."""
        if length < HEADER_BYTES or length > len(buffer):
            return length
        try:
            if read_header(buffer[:length]).codec == RAW:
                return length
            if time.monotonic() >= deadline:
                return FAILED
            raw_length = self._decode(name, buffer, length)
        except BadFrame as error:
            self.count(codec_bad=1)
            if error.reason == "codec":
                self.note_replaceable(name)
            return FOREIGN if error.reason in {*FOREIGN_REASONS, "codec", "layout"} else BAD
        self.count(codec_decoded=1)
        return raw_length

    def _decode(self, name: Name, buffer: memoryview, length: int) -> int:
        header = check(buffer[:length], name).header
        layout = self._layouts.get(header.layout)
        size = header.raw_length if layout is None else layout.block_bytes
        if header.codec != self._codec.number:
            raise BadFrame("codec", f"codec {header.codec} is not {self._codec.name}, the codec of this store")
        if layout is None or header.raw_length != size or HEADER_BYTES + size > len(buffer):
            raise BadFrame("layout", "an encoded block of another layout, or a buffer too short for it")
        if header.length > size:
            raise BadFrame("length", "an encoded block is longer than a raw one")
        encoded = self._scratch.memory[: header.length]  # a copy, since the raw payload overwrites it
        encoded[:] = buffer[: header.length]
        self._codec.decode(encoded, buffer[:size], layout)
        seal(replace(header, codec=RAW, length=size), buffer)
        return HEADER_BYTES + size


class _Named(Codecs):
    def check(self, name: str) -> None:
        codec_named(name)

    def loss(self, names: Sequence[str]) -> str:
        return named_loss(*map(codec_named, names))

    def coded(self, store: Store, name: str, layouts: Sequence[Layout]) -> Store:
        return CodedStore(store, codec_named(name), *layouts)


CODECS: Final = _Named()
