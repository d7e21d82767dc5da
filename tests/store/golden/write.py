"""Write the golden files of this folder. Existing files are never changed.

    python tests/store/golden/write.py

The frame is built without Foreword's code. The encodings are what the codecs wrote when they were created. They must stay
readable; a codec that writes other bytes later needs no new file.
"""

import hashlib
import json
import random
import struct
from pathlib import Path

import numpy as np
import xxhash

from foreword.blocks.layout import LayerLayout, Layout
from foreword.store.codec import NAMES, codec_named

FOLDER = Path(__file__).parent
DTYPES = ("bfloat16", "float16", "float32")


def layout_of(dtype: str) -> Layout:
    """Two layers of one shape and one of another, with seven tokens."""
    return Layout(b"golden", 7, (LayerLayout(2, 8, 16), LayerLayout(2, 8, 16), LayerLayout(1, 12, 6)), dtype)


def write(name: str, data: bytes) -> None:
    path = FOLDER / name
    if not path.exists():
        path.write_bytes(data)


def frame() -> bytes:
    """The frame that test_frame.py reads."""
    layout, root = bytes(range(16)), bytes(range(16, 32))
    key, parent = bytes(range(32, 64)), bytes(range(64, 96))
    payload = bytes(number * 7 % 256 for number in range(100))
    head = struct.pack("<4sHH", b"FWKV", 2, 1) + layout + root + key + parent
    head += struct.pack("<IHHQQI", 7, 3, 0, 4096, 100, 0) + bytes(28)
    return payload + head + xxhash.xxh3_128(payload + head).digest() + bytes(16)


def payload(layout: Layout) -> bytes:
    """Seeded random numbers in the dtype of the layout."""
    source = random.Random(layout.dtype)
    numbers = np.array([source.gauss(0.0, 1.0) for _ in range(layout.block_bytes // layout.item_bytes)], "<f4")
    if layout.dtype == "bfloat16":
        return (numbers.view("<u4") >> 16).astype("<u2").tobytes()
    return numbers.astype(f"<f{layout.item_bytes}").tobytes()


def main() -> None:
    write("frame2.bin", frame())
    digests = {}
    for dtype in DTYPES:
        layout = layout_of(dtype)
        write(f"{dtype}.payload", payload(layout))
        exact = (FOLDER / f"{dtype}.payload").read_bytes()
        for name in NAMES:
            codec = codec_named(name)
            write(f"{dtype}.{name}", bytes(codec.encode(memoryview(exact), layout)))
            out = bytearray(layout.block_bytes)
            codec.decode(memoryview((FOLDER / f"{dtype}.{name}").read_bytes()), memoryview(out), layout)
            digests[f"{dtype}.{name}"] = hashlib.sha256(out).hexdigest()
    write("decoded.json", json.dumps(digests, indent=2).encode() + b"\n")


if __name__ == "__main__":
    main()
