"""Codecs: how the payload of a stored block is written. What each of them costs and saves is measured in docs/guides/codecs.md.

    name      number  lossy
    raw            0  no     as it is
    lossless       1  no     planes of exponents and mantissas; those that shrink are compressed (entropy.py)
    int8           2  yes    keys per channel, values per token (quantise.py)
    int4           3  yes    the same, two numbers in a byte
    entropy        4  yes    anchors, differences with fewer steps in later layers, entropy-coded (entropy.py)

The number stands in a frame's header and never changes its meaning: what an older version wrote stays readable. Whoever
stores blocks with a lossy codec names it in `Layout.loss`, so that altered blocks never lie under the name of exact ones.
"""

from __future__ import annotations

from importlib import import_module
from typing import Final, Protocol, cast

from foreword.blocks.layout import Layout
from foreword.errors import BadFrame, StoreConfigError, did_you_mean
from foreword.store.frame import RAW

_HOME: Final = {"lossless": "lossless", "int8": "quantize", "int4": "quantize", "entropy": "lossless"}
NAMES: Final = ("raw", *_HOME)


class Codec(Protocol):
    """One way to write payloads. Without state: threads may call at once."""

    @property
    def name(self) -> str: ...

    @property
    def number(self) -> int:
        """Of the frame header's field."""
        ...

    @property
    def lossy(self) -> bool: ...

    def encode(self, payload: memoryview, layout: Layout) -> bytes | memoryview:
        """The payload (`layout.block_bytes` bytes) written shorter, or a little longer where that fails.

        Raises BadFrame for a payload of another length, StoreConfigError for a layout that the codec cannot take.
        """
        ...

    def decode(self, data: memoryview, out: memoryview, layout: Layout) -> None:
        """Fill `out` (writable, `layout.block_bytes` bytes). Raises BadFrame for anything that `encode` cannot have written;
        `out` may then hold anything. Lengths are checked before memory is asked for."""
        ...


class Raw:
    """The payload as it is."""

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
    """The codec of that name. Raises StoreConfigError for an unknown one, or if its libraries are not installed."""
    if name == Raw.name:
        return Raw()
    if name not in _HOME:
        raise StoreConfigError(f"There is no codec {name!r}{did_you_mean(name, NAMES)}", param="codec")
    try:
        home = import_module(f"foreword.store.codecs.{_HOME[name]}")
    except ModuleNotFoundError as error:
        raise StoreConfigError(
            f"The codec {name!r} needs {error.name}: pip install 'foreword[compression]'", param="codec"
        ) from error
    return cast("Codec", home.CODECS[name])


def check_length(payload: memoryview, layout: Layout) -> None:
    """Raises BadFrame if these are not as many bytes as a block of this layout has."""
    if payload.nbytes != layout.block_bytes:
        raise BadFrame("codec", f"{payload.nbytes} bytes of payload, a block of this layout has {layout.block_bytes}")


def check_tokens(layout: Layout, name: str) -> None:
    """Raises StoreConfigError if a codec that must know keys from values is given another order than `tokens`."""
    if layout.order != "tokens":
        raise StoreConfigError(
            f"The codec {name!r} knows blocks of the order 'tokens', not {layout.order!r}", param="codec"
        )
