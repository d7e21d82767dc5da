"""Reads of block files with and without O_DIRECT, with a warm and with a cold page cache.

    python -m benchmarks.store.disk_direct [--folder FOLDER] [--mib 512]

Both ways open, read and close each file, as the disk store does. The cold cache is emptied with posix_fadvise. The rows
of one size are interleaved, and each is the fastest of the rounds.
"""

from __future__ import annotations

import argparse
import mmap
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from foreword.store.frame import HEADER_BYTES

PAGE = 4096
ROUNDS = 3


def write_files(folder: Path, size: int, count: int) -> list[Path]:
    paths = []
    for number in range(count):
        path = folder / f"{size}-{number}"
        path.write_bytes(random.Random(number).randbytes(size + HEADER_BYTES))
        paths.append(path)
    os.sync()
    return paths


def drop(paths: Sequence[Path]) -> None:
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def read_with(flags: int, path: Path, buffer: memoryview) -> int:
    """Read a file into a buffer that is aligned and a few pages longer."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    try:
        size = os.fstat(handle).st_size
        done = os.preadv(handle, [buffer[: -(-size // PAGE) * PAGE]], 0)
    finally:
        os.close(handle)
    if done != size:
        raise OSError(f"{done} of {size} bytes of {path}")
    return done


def bandwidth(read: Callable[[Path, memoryview], int], paths: Sequence[Path], threads: int) -> float:
    """Bytes per second of `threads` threads that read all files, each into a buffer of its own."""
    size = paths[0].stat().st_size
    buffers = [memoryview(mmap.mmap(-1, size + 2 * PAGE)) for _ in range(threads)]

    def work(number: int) -> int:
        return sum(read(path, buffers[number]) for path in paths[number::threads])

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(threads)))  # the buffers have pages now
        drop_first = getattr(read, "cold", False)
        if drop_first:
            drop(paths)
        started = time.perf_counter()
        total = sum(pool.map(work, range(threads)))
        return total / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--mib", type=int, default=512, help="bytes of files of one size")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="foreword-direct-", dir=arguments.folder))

    def cold(path: Path, buffer: memoryview) -> int:
        return read_with(0, path, buffer)

    cold.cold = True  # type: ignore[attr-defined]
    ways: dict[str, Callable[[Path, memoryview], int]] = {
        "page cache, warm": lambda path, buffer: read_with(0, path, buffer),
        "page cache, cold": cold,
        "O_DIRECT": lambda path, buffer: read_with(os.O_DIRECT, path, buffer),
    }
    print("| payload | threads | " + " | ".join(f"{way} GB/s" for way in ways) + " |")
    print("|---:|---:|" + "---:|" * len(ways))
    try:
        for size in (64 << 10, 1 << 20, 4 << 20):
            paths = write_files(folder, size, (arguments.mib << 20) // size)
            for threads in (1, 2):
                best = dict.fromkeys(ways, 0.0)
                for _ in range(ROUNDS):
                    for way, read in ways.items():
                        best[way] = max(best[way], bandwidth(read, paths, threads))
                figures = " | ".join(f"{one / 1e9:.2f}" for one in best.values())
                print(f"| {size >> 10} KiB | {threads} | {figures} |", flush=True)
            for path in paths:
                path.unlink()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
