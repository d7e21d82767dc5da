"""How fast a disk store serves a folder of many blocks: after a clean end, after a reboot, and with the index lost.

    python -m benchmarks.store.disk_start [--blocks 50000] [--folder FOLDER]

The blocks have payloads of 64 bytes, since only their number matters here. A second process opens the folder while the
first compares the index with the files, and puts a chain.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import resource
import shutil
import sqlite3
import tempfile
import time
from contextlib import closing
from pathlib import Path

from foreword.conformance import make_frames, names_of, soon
from foreword.store.disk.disk_store import DiskStore
from foreword.store.frame import Frame

CHAIN = 100
PAYLOAD = 64
SIZE = 1 << 50
SAMPLE = 20


def chain(number: int) -> list[Frame]:
    return make_frames(number, CHAIN, PAYLOAD)


def make_folder(folder: Path, chains: int) -> None:
    started = time.perf_counter()
    with closing(DiskStore(folder, SIZE)) as store:
        for number in range(chains):
            store.put(chain(number), deadline=soon(600))
    print(f"made {chains * CHAIN:,} blocks in {time.perf_counter() - started:.0f} s")


def hits(store: DiskStore, chains: int) -> float:
    """The hit rate of some chains."""
    chosen = random.Random(1).sample(range(chains), min(SAMPLE, chains))
    found = 0
    for number in chosen:
        frames = chain(number)
        buffers = [memoryview(bytearray(len(one.data))) for one in frames]
        count = store.lookup(names_of(frames), deadline=soon(10))
        found += sum(n > 0 for n in store.get(names_of(frames)[:count], buffers[:count], deadline=soon(10)))
    return found / (len(chosen) * CHAIN)


def other_process(folder: Path, number: int, results: multiprocessing.SimpleQueue[tuple[float, float, int]]) -> None:
    started = time.perf_counter()
    with closing(DiskStore(folder, SIZE)) as store:
        opened = time.perf_counter() - started
        started = time.perf_counter()
        kept = store.put(chain(number), deadline=soon(60))
        results.put((opened, time.perf_counter() - started, kept))


def start(folder: Path, chains: int, what: str) -> None:
    """Open the folder and print a row of the table."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.perf_counter()
    store = DiskStore(folder, SIZE)
    opened = time.perf_counter() - started
    first = hits(store, chains)
    serving = time.perf_counter() - started
    results: multiprocessing.SimpleQueue[tuple[float, float, int]] = multiprocessing.SimpleQueue()
    other = multiprocessing.Process(
        target=other_process, args=(folder, random.SystemRandom().randrange(chains, 1 << 40), results)
    )
    other.start()
    other_opened, other_put, other_kept = results.get()
    other.join()
    lookups = []
    while store.status().notes["scanning"]:
        asked = time.perf_counter()
        store.lookup(names_of(chain(0)), deadline=soon(10))
        lookups.append(time.perf_counter() - asked)
        time.sleep(0.1)
    compared = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    slowest = max(lookups, default=0.0) * 1000
    print(
        f"| {what} | {opened:.2f} | {serving:.2f} | {first:.2f} | {compared:.1f} | {hits(store, chains):.2f} "
        f"| {slowest:.0f} | {(after - before) / 1024:.0f} | {other_opened:.2f} | {other_put:.2f} ({other_kept}) |",
        flush=True,
    )
    store.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=50_000)
    parser.add_argument("--folder", type=Path, help="keep the blocks here, and use them again")
    arguments = parser.parse_args()
    multiprocessing.set_start_method("spawn")
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="foreword-disk-start-"))
    chains = arguments.blocks // CHAIN
    try:
        if not (folder / "index.sqlite").exists():
            make_folder(folder, chains)
        print("| start | opened s | serving s | hit rate | compared s | hit rate then | slowest lookup ms | memory MB"
              " | other process: opened s | put s (blocks) |")  # fmt: skip
        print("|---|---|---|---|---|---|---|---|---|---|")
        start(folder, chains, "after a clean end")
        with closing(sqlite3.connect(folder / "index.sqlite")) as index:
            index.execute("UPDATE hosts SET boot = 'another'")
            index.commit()
        start(folder, chains, "after a reboot")
        (folder / "index.sqlite").unlink()
        start(folder, chains, "index lost")
    finally:
        if arguments.folder is None:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
