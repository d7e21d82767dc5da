"""A report of an audit of hits: a cached block whose KV is not what its tokens give."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Final

DEVICE: Final = "device"


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A cached block whose KV is not what its tokens give.

    Attributes:
        tokens: of the chain, the block's own included.
        root: root key of the chain.
        keys: of its blocks, the bad one's included.
        group: KV group of the block.
        source: where the block came from: `device` if it was computed here, the label of a tier, or an instance.
        layers: numbers of the layers of the group.
        distances: of keys and of values, by layer; `noise` are those between two computations.
        found: the KV as it was cached, in payload order (`blocks/layout.py`).
    """

    tokens: array[int]
    root: bytes
    keys: list[bytes]
    group: int
    source: str
    layers: tuple[int, ...]
    distances: list[tuple[float, float]]
    noise: list[tuple[float, float]]
    tolerance: float
    found: bytes

    @property
    def block(self) -> int:
        """Number of the block in its chain."""
        return len(self.keys) - 1
