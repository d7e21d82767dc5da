"""Checksums of frames that lie in a device's memory: computed, or compared with those they have, without a byte for the host.

The checksum is the one that `store/frame.py` computes, bit for bit: what a device seals a host reads, and the other way round.
Frames that are sealed or encrypted with a key, and those of a codec, are the host's: here they count as wrong, and the host's
`check` says why.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from foreword.blocks.layout import NAME_BYTES
from foreword.store.frame import HEADER_BYTES, MAGIC, RAW, VERSION

_SUMMED: Final = HEADER_BYTES - 32  # bytes of the header that the checksum covers
_LONGEST_SHORT: Final = 240  # bytes; longer inputs are read in blocks
_HEAD: Final = struct.pack("<4sHH", MAGIC, VERSION, RAW)
HEAD_BYTES: Final = len(_HEAD) + NAME_BYTES  # of one of the `heads`
# XXH3's default secret.
_SECRET: Final = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_P32: Final = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
_P64: Final = (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5)
_AVALANCHE: Final = 0x165667919E3779F9


def numbers() -> list[int]:
    """Constants of the kernel, 64 bits each: the secret; its words for the two halves of a merge; primes; its words for short
    inputs; the first accumulators; its words for the last stripe."""

    def words(start: int, count: int) -> list[int]:
        return [int.from_bytes(_SECRET[at : at + 8], "little") for at in range(start, start + 8 * count, 8)]

    merges = words(11, 8) + words(192 - 64 - 11, 8)
    primes = [_P64[0], _P64[1], _P64[3], _AVALANCHE, _P32[0], 0, 0, 0]
    short = words(3, 12) + words(136 - 17 - 16, 4)
    first = [_P32[2], *_P64[:4], _P32[1], _P64[4], _P32[0]]
    return words(0, 24) + merges + primes + short + first + words(192 - 64 - 7, 8)


class DeviceChecksums:
    """Seals and checks frames on a device.

    Args:
        device: of the frames.
        ahead: blocks of 1,024 bytes that a program loads at once, a power of 2.
        warps: of a program; a frame has one program.
    """

    def __init__(self, device: torch.device, *, ahead: int = 4, warps: int = 1) -> None:
        signed = [number - (1 << 64) if number >> 63 else number for number in numbers()]
        self._table = torch.tensor(signed, dtype=torch.int64, device=device)
        self._device, self._ahead, self._warps = device, ahead, warps

    def seal(self, frames: Tensor, slots: Tensor, payload: int) -> None:
        """Write the checksums of frames, on the current stream. Payloads and the first 160 bytes of headers are there.

        Args:
            frames: bytes `[slots, stride]` of the device; the stride is a multiple of 8.
            slots: int64, on the device: the frames.
            payload: bytes of a payload.
        """
        self._launch(frames, slots, payload, None, None)

    def check(self, frames: Tensor, slots: Tensor, payload: int, heads: Tensor, found: Tensor | None = None) -> Tensor:
        """Tell which frames are intact, raw and wanted: int32 on the device, 1 or 0 for each slot, on the current stream.

        Args:
            heads: what `heads` gives for the wanted names, on the device.
            found: where to write it; by default new memory.
        """
        if found is None:
            found = torch.empty(len(slots), dtype=torch.int32, device=self._device)
        self._launch(frames, slots, payload, heads, found)
        return found

    def _launch(self, frames: Tensor, slots: Tensor, payload: int, heads: Tensor | None, found: Tensor | None) -> None:
        # Triton is imported where kernels run.
        from foreword.offload.checksum_kernel import checksum_kernel

        if frames.stride(0) % 8 or frames.data_ptr() % 8 or frames.shape[1] < payload + HEADER_BYTES:
            raise ValueError(f"frames of {payload + HEADER_BYTES} bytes do not lie in slots of {tuple(frames.shape)}")
        if not len(slots):
            return
        checksum_kernel[(len(slots),)](
            frames.data_ptr(), frames.stride(0), slots, payload,
            slots if heads is None else heads, slots if found is None else found, self._table,
            SHORT=payload + _SUMMED <= _LONGEST_SHORT, SEAL=found is None, AHEAD=self._ahead, num_warps=self._warps,
        )  # fmt: skip


def heads(names: Sequence[bytes]) -> Tensor:
    """How the headers of raw frames with these names begin, one after the other, on the host."""
    if wrong := {*map(len, names)} - {NAME_BYTES}:
        raise ValueError(f"a name has {NAME_BYTES} bytes, not {wrong.pop()}")
    return torch.from_numpy(np.frombuffer(bytearray(_HEAD.join([b"", *names])), np.uint8))
