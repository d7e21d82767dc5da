"""The two faults of `vllm_offload.py --workloads faults`: bytes flipped in a store, other weights under a model's path."""

import json
import os
from pathlib import Path

_EVERY = 256
_PART = 1 << 20
# Of a file, the part with names and sizes: a reader that trips over it has noticed something else than wrong keys and values.
_HEAD = 4096


def flip_bytes(store: Path) -> int:
    """Changes one byte in 256 of everything that a store keeps in files, but for its index; returns how many."""
    files = [store] if store.is_file() else [path for path in store.rglob("*") if path.is_file() and _data(path)]
    return sum(_flip(path) for path in files)


def _data(path: Path) -> bool:
    return not any(word in path.name for word in ("sqlite", ".db", "journal", "-wal", "-shm", ".json"))


def _flip(path: Path) -> int:
    flipped = 0
    with path.open("r+b") as file:
        for offset in range(_HEAD, os.path.getsize(path), _PART):
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


def swap_layers(folder: Path) -> None:
    """Exchanges the weights of a model's first and last layer, in place: another model of the same shape. Twice is none."""
    [path] = folder.glob("*.safetensors")
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    last = json.loads((folder / "config.json").read_text(encoding="utf-8"))["num_hidden_layers"] - 1
    for name in [name for name in header if ".layers.0." in name]:
        other = name.replace(".layers.0.", f".layers.{last}.")
        header[name], header[other] = header[other], header[name]
    words = json.dumps(header).encode()
    words += b" " * (-len(words) % 8)
    draft = path.with_suffix(".draft")
    draft.write_bytes(len(words).to_bytes(8, "little") + words + data[8 + length :])
    draft.replace(path)
