"""Measures seals: loading blocks from a disk store, plain, signed (`integrity_secrets`) and encrypted, alternately in one
process.

    python -m benchmarks.store.integrity --folder /dev/shm [--rounds 15] [--functions] [--forget 1000000]

A load is `TieredStore.fetch` of 64 MiB in batches of 8 MiB, with the checksum of each frame as in a server. The files are in
the system's page cache. Speeds are GB per second of processor time; ratios are medians of rounds.

With --forget it measures instead how long the first step of an erasure takes, after which nothing can be read: a tenant of so
many blocks, with one tier and one peer that are down.

With --functions it measures the functions alone instead: single calls on buffers of 2 MiB, the fastest of 7 rounds. BLAKE3 is
measured if the package `blake3` is installed.
"""

import argparse
import contextlib
import hashlib
import importlib
import itertools
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import xxhash
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.poly1305 import Poly1305

from benchmarks.harness import machine, median, set_up, table, version_of
from foreword.prefixes.erasure import destroy_keys
from foreword.store.data_keys import DataKeys
from foreword.store.frame import HEADER_BYTES, RAW, Frame, Header, frame
from foreword.store.memory.memory_store import MemoryStore
from foreword.store.sealing import KeyRing
from foreword.store.tier import used_once
from foreword.store.tiered import TieredStore
from foreword.store.urls import open_store, parse
from foreword.store_config import EncryptionConfig, StoreConfig
from foreword.transfer.peer import opener
from foreword.transfer_config import TransferConfig

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
    stores = {
        name: open_store([f"disk://{folder}/{size}/{name}?size=1GiB"], keys=keys)
        for name, keys in (("plain", None), ("signed", signing()), ("encrypted", KeyRing(data=data_keys(folder))))
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
    speeds = [f"{TOTAL / median(one) / 1e9:.2f}" for one in times.values()]
    ratios = [
        f"{median([a / b for a, b in zip(times[other], times[one], strict=True)]):.0%}"
        for one, other in (("signed", "plain"), ("encrypted", "plain"), ("encrypted", "signed"))
    ]
    return [f"{size >> 10} KiB", *speeds, *ratios]


def signing() -> KeyRing | None:
    return KeyRing.of(StoreConfig(integrity_secrets=("1:a secret of the benchmark",)))


def data_keys(folder: Path) -> DataKeys:
    return DataKeys(EncryptionConfig(key_store=f"{folder}/keys", master_keys=(f"benchmark:{'5a' * 32}",)))


def forget(folder: Path, count: int) -> None:
    """Print how long it takes to the point from which nothing can be read."""
    keys, length = data_keys(folder), 64
    inner = MemoryStore(2 * count * (length + HEADER_BYTES))
    redis, peer = parse("redis://127.0.0.1:9?socket_connect_timeout=0.2"), parse("peer://127.0.0.1:19")
    down = redis.type.open(redis, None), opener(TransferConfig())(peer, None)
    with closing(TieredStore([KeyRing(data=keys).sealed(one) for one in (inner, *down)])) as store:
        blocks = (
            frame(Header(bytes(16), bytes(16), n.to_bytes(32, "big"), bytes(32), 0, RAW, length, length), bytes(length))
            for n in range(count)
        )
        while batch := list(itertools.islice(blocks, 4096)):
            store.tiers[0].put(batch, LATER)
        buffers = [memoryview(bytearray(length + HEADER_BYTES)) for _ in range(512)]
        names = [bytes(32) + n.to_bytes(32, "big") for n in range(0, count, count // 512)][:512]
        assert None not in store.tiers[0].get(names, buffers, LATER)
        began = time.perf_counter()
        done = destroy_keys(keys, [bytes(12)])
        seconds = time.perf_counter() - began
        assert done.keys and set(store.tiers[0].get(names, buffers, LATER)) == {None}
    print(f"{count:,} blocks: {seconds * 1000:.1f} ms, {len(done.keys)} key destroyed")


def functions() -> list[list[str]]:
    """Speeds of functions that may authenticate, and of the checksum without a key."""
    key, nonce, data = os.urandom(32), bytes(12), os.urandom(2 << 20)
    sealed = bytearray(len(data) + 16)
    gmac = AESGCM(key)
    calls: dict[str, Callable[[], object]] = {
        "XXH3-128, no key": lambda: xxhash.xxh3_128_digest(data),
        "AES-256-GMAC": lambda: gmac.encrypt(nonce, b"", data),
        "AES-256-GCM": lambda: gmac.encrypt_into(nonce, data, b"", sealed),
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
    parser.add_argument("--forget", type=int, metavar="BLOCKS")
    options = parser.parse_args()
    print(set_up({**machine(), "cryptography": version_of("cryptography")}))
    if options.functions:
        print(table(["function", "GB/s"], functions()))
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        if options.forget:
            forget(Path(folder), options.forget)
            return
        rows = [measure(Path(folder), size, options.rounds) for size in SIZES]
    print(
        table(
            ["block", "plain", "signed", "encrypted", "signed / plain", "encrypted / plain", "encrypted / signed"], rows
        )
    )


if __name__ == "__main__":
    main()
