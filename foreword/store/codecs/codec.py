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

from importlib import import_module
from typing import Final, Protocol, cast

from foreword.blocks.layout import Layout
from foreword.errors import BadFrame, StoreConfigError, did_you_mean
from foreword.store.frame import RAW

_MODULES: Final = {"lossless": "lossless", "int8": "lossy", "int4": "lossy"}
NAMES: Final = ("raw", *_MODULES)


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
