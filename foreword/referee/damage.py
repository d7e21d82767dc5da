"""Faults in what a connector keeps in files, and other weights under a model's path."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

# Rare enough to leave most of the short headers in a store's files whole: what notices a damaged header proves little.
_EVERY: Final = 1532
_PART: Final = 1 << 20
# The part of a file with names and sizes: a reader that fails there has noticed something else than wrong keys and values.
_HEAD: Final = 4096


def data_files(store: Path) -> list[Path]:
    """The files of a store (a folder or a file) without its index."""
    if store.is_file():
        return [store]
    return sorted(path for path in store.rglob("*") if path.is_file() and _data(path))


def _data(path: Path) -> bool:
    indexes = ("sqlite", ".db", "journal", "-wal", "-shm", ".json", "lock")
    return path.stat().st_size > 0 and not any(word in path.name for word in indexes)


def flip_bytes(store: Path) -> int:
    """Change one byte in 1,532 of every file; returns how many."""
    return sum(map(_flip, data_files(store)))


def _flip(path: Path) -> int:
    flipped = 0
    with path.open("r+b") as file:
        size = os.path.getsize(path)
        for offset in range(_HEAD if size > 2 * _HEAD else size // 4, size, _PART):
            file.seek(offset)
            part = bytearray(file.read(_PART))
            if not any(part):
                continue
            # The third byte of each group of four is never the least significant one of a float.
            part[3::_EVERY] = bytes(byte ^ 0x14 for byte in part[3::_EVERY])
            file.seek(offset)
            file.write(part)
            flipped += len(part[3::_EVERY])
    return flipped


def cut_files(store: Path) -> int:
    """Truncate every file to half; returns how many."""
    return _resize(store, lambda size: size // 2)


def empty_files(store: Path) -> int:
    """Truncate every file to nothing; returns how many."""
    return _resize(store, lambda size: 0)


def _resize(store: Path, change: Callable[[int], int]) -> int:
    found = data_files(store) if store.is_dir() else []
    for path in found:
        os.truncate(path, change(path.stat().st_size))
    return len(found)


def swap_files(store: Path) -> int:
    """Exchange the contents of files of equal size and equal name or suffix, in a ring; returns how many.

    Each file is valid; it is at the place of another."""
    groups: dict[tuple[int, str], list[Path]] = {}
    for path in data_files(store) if store.is_dir() else []:
        groups.setdefault((path.stat().st_size, path.suffix and path.name), []).append(path)
    rings = [paths for paths in groups.values() if len(paths) > 1]
    for paths in rings:
        contents = [path.read_bytes() for path in paths]
        for path, data in zip(paths, [*contents[1:], contents[0]], strict=True):
            path.write_bytes(data)
    return sum(map(len, rings))


def swap_layers(folder: Path) -> None:
    """Exchange the weights of a model's first and last layer: another model of the same shape. Twice is none."""
    path, data = _swapped(folder)
    draft = path.with_suffix(".draft")
    draft.write_bytes(data)
    draft.replace(path)


def swap_layers_in_place(folder: Path) -> None:
    """Swap layers in the file in place, as `rsync --inplace --times` does: its size, inode and time of modification stay."""
    path, data = _swapped(folder)
    before = path.stat()
    with path.open("r+b") as file:
        file.write(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    if path.stat().st_size != before.st_size:
        raise ValueError(f"the exchange has changed the size of {path}")


def _swapped(folder: Path) -> tuple[Path, bytes]:
    [path] = folder.glob("*.safetensors")
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    last = json.loads((folder / "config.json").read_text(encoding="utf-8"))["num_hidden_layers"] - 1
    for name in [name for name in header if ".layers.0." in name]:
        other = name.replace(".layers.0.", f".layers.{last}.")
        header[name], header[other] = header[other], header[name]
    words = json.dumps(header, separators=(",", ":")).encode()
    words += b" " * (max(length - len(words), 0) or -len(words) % 8)
    return path, len(words).to_bytes(8, "little") + words + data[8 + length :]
