"""What signatures cost: loading blocks from a disk store with and without `integrity_secrets`, alternately in one process.

    python -m benchmarks.store.integrity --folder /dev/shm [--rounds 15] [--functions]

A load is `TieredStore.fetch` of 64 MiB in batches of 8 MiB, with the checksum of each frame as in a server. The files are in
the system's page cache. Speeds are GB per second of processor time; a ratio is signed to plain.

With --functions it measures the functions alone instead: single calls on buffers of 2 MiB, the fastest of 7 rounds. BLAKE3 is
measured if the package `blake3` is installed.
"""

import argparse
import contextlib
import hashlib
import importlib
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import xxhash
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.poly1305 import Poly1305

from benchmarks.harness import machine, median, set_up, table, version_of
from foreword.config import StoreConfig
from foreword.store.frame import HEADER_BYTES, RAW, Frame, Header, frame
from foreword.store.sealing import KeyRing
from foreword.store.tier import used_once
from foreword.store.tiered import TieredStore
from foreword.store.urls import open_store

TOTAL, BATCH = 64 << 20, 8 << 20
SIZES = (64 << 10, 256 << 10, 1 << 20, 4 << 20)
LATER = time.monotonic() + 1e6


def blocks_of(size: int) -> list[Frame]:
    length = size - HEADER_BYTES
    payload = os.urandom(length)
    return [
        frame(Header(bytes(16), bytes(16), n.to_bytes(32, "little"), bytes(32), n, RAW, length, length), payload)
        for n in range(TOTAL // size)
    ]


def seconds_to_load(store: TieredStore, frames: list[Frame], buffers: list[memoryview]) -> float:
    """Processor seconds of this process: on a machine that others use, elapsed time measures them."""
    step = len(buffers)
    started = time.process_time()
    for low in range(0, len(frames), step):
        found = store.fetch([one.name for one in frames[low : low + step]], buffers, deadline=LATER, on_late=used_once)
        assert None not in found
    return time.process_time() - started


def measure(folder: Path, size: int, rounds: int) -> list[str]:
    frames = blocks_of(size)
    buffers = [memoryview(bytearray(size)) for _ in range(BATCH // size)]
    keys = KeyRing.of(StoreConfig(integrity_secrets=("1:a secret of the benchmark",)))
    stores = {
        name: open_store([f"disk://{folder}/{size}/{name}?size=1GiB"], keys=k)
        for name, k in (("plain", None), ("signed", keys))
    }
    for store in stores.values():
        for low in range(0, len(frames), len(buffers)):
            store.put(frames[low : low + len(buffers)], deadline=LATER)
        seconds_to_load(store, frames, buffers)
    times: dict[str, list[float]] = {name: [] for name in stores}
    for number in range(rounds):
        for name in sorted(stores, reverse=number % 2 == 1):
            times[name].append(seconds_to_load(stores[name], frames, buffers))
    for store in stores.values():
        store.close()
    plain, signed = median(times["plain"]), median(times["signed"])
    ratio = median([a / b for a, b in zip(times["plain"], times["signed"], strict=True)])
    return [f"{size >> 10} KiB", f"{TOTAL / plain / 1e9:.2f}", f"{TOTAL / signed / 1e9:.2f}", f"{ratio:.0%}"]


def functions() -> list[list[str]]:
    """Speeds of functions that may authenticate, and of the checksum without a key."""
    key, nonce, data = os.urandom(32), bytes(12), os.urandom(2 << 20)
    gmac = AESGCM(key)
    calls: dict[str, Callable[[], object]] = {
        "XXH3-128, no key": lambda: xxhash.xxh3_128_digest(data),
        "AES-256-GMAC": lambda: gmac.encrypt(nonce, b"", data),
        "Poly1305": lambda: Poly1305.generate_tag(key, data),
        "BLAKE2b, keyed": lambda: hashlib.blake2b(data, key=key).digest(),
    }
    with contextlib.suppress(ModuleNotFoundError):
        blake3 = importlib.import_module("blake3").blake3
        calls["BLAKE3, keyed"] = lambda: blake3(data, key=key).digest()
    return [[name, f"{max(_speed(call, len(data)) for _ in range(7)):.1f}"] for name, call in calls.items()]


def _speed(call: Callable[[], object], length: int) -> float:
    started = time.perf_counter()
    for _ in range(20):
        call()
    return 20 * length / (time.perf_counter() - started) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--functions", action="store_true")
    options = parser.parse_args()
    print(set_up({**machine(), "cryptography": version_of("cryptography")}))
    if options.functions:
        print(table(["function", "GB/s"], functions()))
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        rows = [measure(Path(folder), size, options.rounds) for size in SIZES]
    print(table(["block", "plain", "signed", "signed / plain"], rows))


if __name__ == "__main__":
    main()
