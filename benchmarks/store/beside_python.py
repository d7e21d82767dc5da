"""A disk store that is written to beside a thread that computes in Python, as an engine's does.

    python -m benchmarks.store.beside_python [--folder FOLDER] [--kib 64,512] [--batches 12] [--rounds 3]

Batches of 32 blocks are written by one thread while another computes. By turns with compiled code (store/disk/files.cpp), which
writes the files of a batch in one call, and without, where each call of the system gives the interpreter lock away. `waits` are
how often a thread went to sleep, for each block: mostly for that lock.
"""

import argparse
import resource
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.harness import machine, median, table
from foreword.conformance import make_frames
from foreword.store.disk import files
from foreword.store.disk.disk_store import DiskStore
from foreword.store.frame import Frame

_COMPILED = files.compiled_write
_WAYS: dict[str, Callable[[], object]] = {"compiled": _COMPILED, "Python": lambda: None}


def compute(until: Callable[[], bool]) -> None:
    """A loop in Python, which keeps the interpreter lock as long as it may."""
    total = 0
    while not until():
        for number in range(200):
            total += number


def measure(folder: Path, batches: Sequence[Sequence[Frame]]) -> tuple[float, float]:
    """Seconds and waits per block."""
    with tempfile.TemporaryDirectory(dir=folder) as where:
        store = DiskStore(Path(where), 8 << 30)
        store.put(batches[0], deadline=time.monotonic() + 60)
        ended = threading.Event()

        def write() -> None:
            for batch in batches[1:]:
                store.put(batch, deadline=time.monotonic() + 60)
            ended.set()

        before, begin = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw, time.perf_counter()
        thread = threading.Thread(target=write)
        thread.start()
        compute(ended.is_set)
        seconds = time.perf_counter() - begin
        waits = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - before
        thread.join()
        store.close()
        blocks = sum(map(len, batches[1:]))
    return seconds / blocks, waits / blocks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--kib", default="64,512", help="sizes of a block")
    parser.add_argument("--batches", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print(*(f"{name}: {value}" for name, value in machine().items()), sep=", ")
    if _COMPILED() is None:
        raise SystemExit("there is no compiled code here: install a C++ compiler")
    rows = []
    for kib in map(int, options.kib.split(",")):
        batches = [make_frames(number, 32, kib << 10) for number in range(options.batches + 1)]
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in _WAYS}
        for _ in range(options.rounds):
            for name, way in _WAYS.items():
                files.compiled_write = way  # type: ignore[assignment]
                found[name].append(measure(options.folder, batches))
        for name, runs in found.items():
            seconds, waits = (median(run[i] for run in runs) for i in range(2))
            rows.append([f"{kib} KiB, {name}", f"{seconds * 1e3:.2f} ms", f"{waits:.1f}"])
    print(table(["", "a block", "waits"], rows))


if __name__ == "__main__":
    main()
