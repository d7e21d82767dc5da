"""Reads of block files with and without O_DIRECT, with a warm and with a cold page cache.

    python -m benchmarks.store.disk_direct [--folder FOLDER] [--mib 512]

Both ways open, read and close each file, as the disk store does. The cold cache is emptied with posix_fadvise. The rows
of one size are interleaved, and each is the fastest of the rounds.
"""

from __future__ import annotations

import argparse
import itertools
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
# Files of these sizes are read in parts of these: one block, and a piece by blocks, by a few and as a whole.
SIZES = {64 << 10: [1 << 30], 1 << 20: [1 << 30], 8 << 20: [64 << 10, 1 << 20, 1 << 30]}


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


def read_with(flags: int, path: Path, buffer: memoryview, part: int) -> int:
    """Read a file, so many bytes at a time, into a buffer that is aligned and a few pages longer."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    try:
        size = os.fstat(handle).st_size
        end = -(-size // PAGE) * PAGE
        done = sum(os.preadv(handle, [buffer[at : min(at + part, end)]], at) for at in range(0, end, part))
    finally:
        os.close(handle)
    if done != size:
        raise OSError(f"{done} of {size} bytes of {path}")
    return done


def speed(read: Callable[[Path, memoryview], int], paths: Sequence[Path], threads: int) -> tuple[float, float]:
    """Bytes per second of threads that read all files, each into a buffer of its own, and per second of processors."""
    size = paths[0].stat().st_size
    buffers = [memoryview(mmap.mmap(-1, size + 2 * PAGE)) for _ in range(threads)]

    def work(number: int) -> int:
        return sum(read(path, buffers[number]) for path in paths[number::threads])

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(threads)))  # the buffers have pages now
        drop_first = getattr(read, "cold", False)
        if drop_first:
            drop(paths)
        started, spent = time.perf_counter(), time.process_time()
        total = sum(pool.map(work, range(threads)))
        return total / (time.perf_counter() - started), total / (time.process_time() - spent)


def reader(way: str, part: int) -> Callable[[Path, memoryview], int]:
    """A read of a file in one of the ways, with the attribute `cold` if the file is dropped from the page cache before."""
    flags = os.O_DIRECT if way == "O_DIRECT" else 0

    def read(path: Path, buffer: memoryview) -> int:
        return read_with(flags, path, buffer, part)

    read.cold = way != "page cache, warm"  # type: ignore[attr-defined]
    return read


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--mib", type=int, default=512, help="bytes of files of one size")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="foreword-direct-", dir=arguments.folder))

    ways = ("page cache, warm", "page cache, cold", "O_DIRECT")
    print(
        "| file | read by | threads | " + " | ".join(f"{way} GB/s" for way in ways) + " | GB per second of processors |"
    )
    print("|---:|---:|---:|" + "---:|" * len(ways) + "---:|")
    try:
        for size, parts in SIZES.items():
            paths = write_files(folder, size, (arguments.mib << 20) // size)
            for part, threads in itertools.product(parts, (1, 2, 8)):
                best = dict.fromkeys(ways, (0.0, 0.0))
                for _ in range(ROUNDS):
                    for way in ways:
                        found = speed(reader(way, part), paths, threads)
                        best[way] = max(best[way][0], found[0]), max(best[way][1], found[1])
                figures = " | ".join(f"{one / 1e9:.2f}" for one, _ in best.values())
                spent = " / ".join(f"{one / 1e9:.1f}" for _, one in best.values())
                print(
                    f"| {size >> 10} KiB | {min(part, size) >> 10} KiB | {threads} | {figures} | {spent} |", flush=True
                )
            for path in paths:
                path.unlink()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
