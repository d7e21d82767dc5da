"""The memory node that a device is attached to: copies from another one cross the link between two processors."""

from __future__ import annotations

import ctypes
import platform
from pathlib import Path
from typing import Final

# Linux' mbind: its number, and what it is asked for. A full node is no error: the pages are elsewhere then.
_MBIND: Final = {"x86_64": 237, "aarch64": 235}
_PREFERRED: Final = 1
_MOVE: Final = 2
_MASK_BITS: Final = 1024  # nodes
_SYSTEM: Final = Path("/sys/bus/pci/devices")


def node_of(address: str, devices: Path = _SYSTEM) -> int | None:
    """The node of a PCI device, such as `0000:3b:00.0`; None where the system does not tell."""
    try:
        node = int((devices / address.lower() / "numa_node").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return node if 0 <= node < _MASK_BITS else None


def prefer(address: int, size: int, node: int) -> bool:
    """Let pages from an address on be on a node, those that are there already too. False where the system does not do that."""
    number = _MBIND.get(platform.machine())
    if number is None or platform.system() != "Linux":
        return False
    mask = (ctypes.c_ubyte * (_MASK_BITS // 8))()
    mask[node // 8] = 1 << node % 8
    call = ctypes.CDLL(None).syscall
    arguments = ctypes.c_void_p(address), ctypes.c_ulong(size), ctypes.c_int(_PREFERRED)
    more = ctypes.byref(mask), ctypes.c_ulong(_MASK_BITS + 1), ctypes.c_uint(_MOVE)
    return bool(call(ctypes.c_long(number), *arguments, *more) == 0)
