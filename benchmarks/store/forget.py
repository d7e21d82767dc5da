"""Time and memory of `foreword forget` on a folder with many blocks of many tenants, with gaps and without an index.

    python -m benchmarks.store.forget [--blocks 1000000] [--tenants 100] [--folder DIR]

Writes the block files of all tenants, a tenth of which are missing, then erases one tenant, in a process of its own. It prints
the seconds and the peak memory of that process, and checks that nothing of the tenant is left and that all others are whole.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from hashlib import sha256
from pathlib import Path

from foreword.blocks.keys import Scope
from foreword.blocks.layout import LayerLayout, Layout
from foreword.blocks.salt import Salt
from foreword.store.frame import RAW, Header, frame

MODEL = b"m" * 32
LAYOUT = Layout(MODEL, 16, (LayerLayout(1, 8, 8),), "bfloat16").fingerprint
ERASE = """
import json, resource, sys, time
from foreword.blocks.salt import Salt
from foreword.prefixes.erasure import forget_tenant
from foreword.store.urls import open_store
started = time.perf_counter()
store = open_store([sys.argv[1]])
opened = time.perf_counter()
receipt = forget_tenant(store, Salt(sys.argv[2].encode()))
seconds = time.perf_counter() - opened
store.close()
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
print(json.dumps({**receipt.plain(), "open_seconds": opened - started, "seconds": seconds, "peak_mib": peak}))
"""


def write_tenant(folder: Path, salt: bytes, count: int) -> int:
    """Write a tenant's chain without every tenth block. Returns how many blocks it has."""
    root = Scope(MODEL, 16, Salt(salt)).root()
    place = folder / LAYOUT.hex() / root[:16].hex()
    for number in range(256):
        (place / f"{number:02x}").mkdir(parents=True, mode=0o700)
    parent, written = root, 0
    for depth in range(count):
        key = sha256(parent).digest()
        if depth % 10:
            name = key.hex()
            handle = os.open(f"{place}/{name[:2]}/{name}", os.O_WRONLY | os.O_CREAT, 0o600)
            os.write(handle, frame(Header(LAYOUT, root[:16], key, parent, depth, RAW, 8, 8), bytes(8)).data)
            os.close(handle)
            written += 1
        parent = key
    return written


def files_of(folder: Path, salt: bytes) -> int:
    place = folder / LAYOUT.hex() / Scope(MODEL, 16, Salt(salt)).root()[:16].hex()
    return sum(len(files) for _, _, files in os.walk(place))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--tenants", type=int, default=100)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        salts = [f"tenant {number}".encode() for number in range(options.tenants)]
        started = time.perf_counter()
        written = {salt: write_tenant(folder, salt, options.blocks // options.tenants) for salt in salts}
        print(
            f"{sum(written.values())} blocks of {len(salts)} tenants written in {time.perf_counter() - started:.0f} s"
        )
        for salt in (salts[0], salts[1]):
            url = f"disk://{folder}?size=1TiB"
            done = subprocess.run([sys.executable, "-c", ERASE, url, salt.decode()], capture_output=True, text=True)
            print(done.stdout or done.stderr)
            receipt = json.loads(done.stdout)
            assert receipt["complete"] and receipt["removed"] == {"disk": written.pop(salt)}, receipt
            assert files_of(folder, salt) == 0
            assert all(files_of(folder, other) == count for other, count in written.items())
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
