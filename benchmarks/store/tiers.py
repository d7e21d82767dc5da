"""Measures what the memory and the disk store add to copying memory and to plain files, alternately in one process.

    python -m benchmarks.store.tiers --folder /var/tmp [--rounds 15] [--million]

- memory: blocks of 1 MiB, saved and loaded, against copies of the same bytes between the same kind of buffers (memory that was
  written before). "checksum on" adds sealing and checking, which a plain copy does not do.
- disk: blocks of 256 KiB, 1 MiB and 4 MiB on tmpfs and below --folder, sealed before they are saved and checked after they
  are loaded ("checksum on"), against writing plain files of that size and reading them into a buffer; the variant with
  rename writes to another name first, as every reader of a shared folder needs. Cold: the files were written back and
  dropped from the system's page cache before.
- lookup of 2,048 names, a prompt of 32,768 tokens, among a million blocks, and opening 100,000 blocks (--million).

A batch is 8 MiB, as the cache's own; a round is eight batches, the same bytes in all variants. The variants of a round come
in an order drawn anew (seeded): what ran just before decides what lies in the caches. Removing what the last round wrote is
outside of the clock. A ratio is ours to theirs in speed: 100 % is as fast.
"""

import argparse
import gc
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.harness import machine, median, set_up, table, version_of
from foreword.store.base import Store
from foreword.store.disk.disk_store import DiskStore
from foreword.store.disk.index import DiskIndex
from foreword.store.disk.index_rows import block_id, parent_id
from foreword.store.frame import HEADER_BYTES, RAW, Frame, Header, check, seal
from foreword.store.memory.memory_store import MemoryStore

BATCH = 8 << 20
ROUND = 8 * BATCH
SIZES = (256 << 10, 1 << 20, 4 << 20)
LAYOUT = ROOT = bytes(16)
PROMPT_BLOCKS = 2048
MILLION = 1 << 20
OPENED = 100_000
LATER = time.monotonic() + 1e6

Samples = dict[str, list[float]]


class Blocks:
    """The blocks of one round: headers, buffers that hold payloads, and buffers to load into."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.count = ROUND // size
        self.step = BATCH // size
        length = size - HEADER_BYTES  # frames are of a round size, as the files that they are compared with
        keys = [number.to_bytes(32, "little") for number in range(self.count + 1)]
        self.headers = [Header(LAYOUT, ROOT, keys[n + 1], keys[n], n, RAW, length, length) for n in range(self.count)]
        self.names = [header.name for header in self.headers]
        self.sources = [memoryview(bytearray(os.urandom(size))) for _ in range(self.count)]
        self.targets = [memoryview(bytearray(size)) for _ in range(self.count)]
        self.frames = [seal(*pair) for pair in zip(self.headers, self.sources, strict=True)]

    def batches(self) -> list[slice]:
        return [slice(start, start + self.step) for start in range(0, self.count, self.step)]


def clocked(work: Callable[[], object]) -> float:
    """Seconds that it takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def alternate(kinds: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Median seconds of each kind; two rounds to warm up."""
    samples: Samples = {name: [] for name in kinds}
    draw = random.Random(1)
    for number in range(rounds + 2):
        for name in draw.sample(list(kinds), len(kinds)):
            gc.collect()
            seconds = kinds[name]()
            if number >= 2:
                samples[name].append(seconds)
    return {name: median(values) for name, values in samples.items()}


def save(store: Store, blocks: Blocks, *, checksum: bool) -> None:
    for part in blocks.batches():
        frames = blocks.frames[part]
        if checksum:
            frames = [seal(*pair) for pair in zip(blocks.headers[part], blocks.sources[part], strict=True)]
        if store.put(frames, deadline=LATER) != len(frames):
            raise RuntimeError("the store did not keep everything")


def load(store: Store, blocks: Blocks, *, checksum: bool) -> None:
    for part in blocks.batches():
        lengths = store.get(blocks.names[part], blocks.targets[part], deadline=LATER)
        if min(lengths) != blocks.size:
            raise RuntimeError("the store did not have everything")
        if checksum:
            for name, buffer in zip(blocks.names[part], blocks.targets[part], strict=True):
                check(buffer, name)


def measure_memory(rounds: int) -> list[list[str]]:
    """Rows of the table of the memory store."""
    blocks = Blocks(1 << 20)
    store = MemoryStore(ROUND, slot_bytes=blocks.size)
    arena = [memoryview(bytearray(os.urandom(blocks.size))) for _ in range(blocks.count)]
    time.sleep(1.0)  # the arena's pages are being touched

    def saved(checksum: bool) -> float:
        store.delete(blocks.names, deadline=LATER)
        return clocked(lambda: save(store, blocks, checksum=checksum))

    def copy(sources: Sequence[memoryview], targets: Sequence[memoryview]) -> None:
        for source, target in zip(sources, targets, strict=True):
            target[:] = source

    save(store, blocks, checksum=False)
    found = alternate(
        {
            "save": lambda: saved(False),
            "save, checksum on": lambda: saved(True),
            "memcpy in": lambda: clocked(lambda: copy(blocks.sources, arena)),
            "load": lambda: clocked(lambda: load(store, blocks, checksum=False)),
            "load, checksum on": lambda: clocked(lambda: load(store, blocks, checksum=True)),
            "memcpy out": lambda: clocked(lambda: copy(arena, blocks.targets)),
        },
        rounds,
    )
    store.close()
    return [
        row("memory", blocks, name, found[name], found["memcpy in" if name.startswith("save") else "memcpy out"])
        for name in ("save", "save, checksum on", "load", "load, checksum on")
    ]


class PlainFiles:
    """The blocks as files, without anything else."""

    def __init__(self, folder: Path, blocks: Blocks) -> None:
        self.blocks = blocks
        folder.mkdir()
        self.paths = [str(folder / f"{number:064x}") for number in range(blocks.count)]

    def clear(self) -> None:
        for path in self.paths:
            if os.path.exists(path):
                os.unlink(path)

    def write(self, rename: bool) -> None:
        for path, data in zip(self.paths, self.blocks.sources, strict=True):
            name = path + ".new" if rename else path
            handle = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            if os.write(handle, data) != len(data):
                raise RuntimeError("a short write")
            os.close(handle)
            if rename:
                os.rename(name, path)

    def read(self) -> None:
        for path, buffer in zip(self.paths, self.blocks.targets, strict=True):
            handle = os.open(path, os.O_RDONLY)
            if os.readv(handle, [buffer]) != len(buffer):
                raise RuntimeError("a short read")
            os.close(handle)


def drop_from_cache(folder: Path) -> None:
    """Write the files below a folder back and let go of their pages."""
    for path in folder.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


def measure_disk(where: str, folder: Path, size: int, rounds: int, cold: bool) -> list[list[str]]:
    """Rows of the table of the disk store."""
    blocks = Blocks(size)
    place = Path(tempfile.mkdtemp(dir=folder))
    store = DiskStore(place / "store", 4 * ROUND)
    plain = PlainFiles(place / "plain", blocks)
    save(store, blocks, checksum=False)
    plain.write(rename=False)
    folders = [one for one in (place / "store").rglob("*") if one.is_dir()]

    def saved(checksum: bool) -> float:
        store.delete(blocks.names, deadline=LATER)
        for one in folders:  # a deletion takes those that are empty with it; a store in use has them
            one.mkdir(parents=True, exist_ok=True)
        os.sync()  # what others wrote before is not written back beside us
        return clocked(lambda: save(store, blocks, checksum=checksum))

    def written(rename: bool) -> float:
        plain.clear()
        os.sync()
        return clocked(lambda: plain.write(rename))

    def after_dropping(work: Callable[[], object]) -> float:
        drop_from_cache(place)
        return clocked(work)

    kinds: dict[str, Callable[[], float]] = {
        "save, checksum on": lambda: saved(True),
        "save": lambda: saved(False),
        "plain write": lambda: written(False),
        "plain write, rename": lambda: written(True),
        "load, checksum on": lambda: clocked(lambda: load(store, blocks, checksum=True)),
        "load": lambda: clocked(lambda: load(store, blocks, checksum=False)),
        "plain read": lambda: clocked(plain.read),
    }
    found = alternate(kinds, rounds)
    names = {"save, checksum on": "plain write", "save": "plain write"}
    rows = [row(where, blocks, name, found[name], found[other]) for name, other in names.items()]
    rows.append(
        row(where, blocks, "save, checksum on; rename", found["save, checksum on"], found["plain write, rename"])
    )
    rows += [row(where, blocks, name, found[name], found["plain read"]) for name in ("load, checksum on", "load")]
    if cold:
        kinds = {
            "load, checksum on, cold": lambda: after_dropping(lambda: load(store, blocks, checksum=True)),
            "plain read, cold": lambda: after_dropping(plain.read),
        }
        found = alternate(kinds, max(3, rounds // 3))
        ours, theirs = found.values()
        rows.append(row(where, blocks, "load, checksum on, cold", ours, theirs))
    store.close()
    shutil.rmtree(place)
    return rows


def row(where: str, blocks: Blocks, name: str, ours: float, theirs: float) -> list[str]:
    rate = blocks.count * blocks.size / 1e9
    return [
        f"{where} {blocks.size >> 10} KiB {name}",
        f"{rate / ours:.2f}",
        f"{rate / theirs:.2f}",
        f"{theirs / ours:.0%}",
    ]


def small_frames(first: int, count: int, data: memoryview) -> list[Frame]:
    """Frames in chains of 2,048, unsealed; they are not read."""
    keys = [(number % (1 << 64)).to_bytes(32, "little") for number in range(first - 1, first + count)]
    length = len(data) - HEADER_BYTES
    frames = []
    for number in range(count):
        depth = (first + number) % PROMPT_BLOCKS
        parent = keys[number] if depth else b"r" * 32
        header = Header(LAYOUT, ROOT, keys[number + 1], parent, depth, RAW, length, length)
        frames.append(Frame(header, data))
    return frames


def measure_lookup(folder: Path, rounds: int) -> list[list[str]]:
    """Milliseconds for the lookup of a prompt among a million blocks."""
    data = memoryview(bytes(HEADER_BYTES + 8))
    memory = MemoryStore(MILLION * len(data))
    place = Path(tempfile.mkdtemp(dir=folder))
    DiskStore(place, 1 << 40).close()
    index = DiskIndex(str(place / "index.sqlite"), journal="wal", read_only=False)
    index.open(LATER)
    chains = [small_frames(first, PROMPT_BLOCKS, data) for first in range(0, MILLION, PROMPT_BLOCKS)]
    part = len(chains) // 4
    written = {
        "one chain after another": [one for chain in chains[: 2 * part] for one in chain],
        "64 chains in turn, 8 blocks each": in_turn(chains[2 * part : 3 * part], 64, 8),
        "in any order": random.Random(2).sample(
            [one for chain in chains[3 * part :] for one in chain], part * PROMPT_BLOCKS
        ),
    }
    for frames in written.values():  # rows alone: lookup reads no file
        memory.put(frames, deadline=LATER)
        with index.write(LATER) as transaction:
            by_number = {block_id(one.name): one for one in frames}
            parents = {number: parent_id(one.header) for number, one in by_number.items()}
            called = {number: one.name for number, one in by_number.items()}
            transaction.finish(transaction.add(by_number, called, parents, transaction.tick(), 1, 0.0, {}))
    size = os.path.getsize(index.file)
    disk, other = DiskStore(place, 1 << 40), DiskStore(place, 1 << 40)
    rows = []
    ranges = dict(zip(written, ((0, 2 * part), (2 * part, 3 * part), (3 * part, 4 * part)), strict=True))
    for order, (first, last) in ranges.items():
        for name, store, after_a_write in (
            ("memory", memory, False),
            ("disk", disk, False),
            ("disk, others write", disk, True),
        ):
            times = []
            for number in range(max(rounds, 5) * 3):
                names = [one.name for one in chains[first + number * 11 % (last - first)]]
                if after_a_write:  # another process's write makes SQLite forget what it had in memory
                    other.pin(names[:1], pinned=number % 2 == 0, deadline=LATER)
                times.append(timed_lookup(store, names))
            rows.append([f"{name}; written {order}", f"{median(times) * 1e3:.2f}", f"{max(times) * 1e3:.2f}"])
    for one in (memory, disk, other):
        one.close()
    index.close(LATER)
    shutil.rmtree(place)
    rows.append([f"index of a million blocks: {size / 1e6:.0f} MB", "", ""])
    return rows


def in_turn(chains: Sequence[Sequence[Frame]], together: int, count: int) -> list[Frame]:
    """Blocks in the order in which so many sequences would write them that run at once, so many at a time."""
    return [
        one
        for first in range(0, len(chains), together)
        for start in range(0, PROMPT_BLOCKS, count)
        for chain in chains[first : first + together]
        for one in chain[start : start + count]
    ]


def timed_lookup(store: Store, names: Sequence[bytes]) -> float:
    """Seconds for finding all of a chain."""
    start = time.perf_counter()
    count = store.lookup(names, deadline=LATER)
    seconds = time.perf_counter() - start
    if count != PROMPT_BLOCKS:
        raise RuntimeError(f"only {count} were found")
    return seconds


def measure_opening(folder: Path) -> list[list[str]]:
    """Milliseconds for opening a folder of 100,000 blocks, with its index and without."""
    place = Path(tempfile.mkdtemp(dir=folder))
    data = memoryview(bytearray(HEADER_BYTES + 8))
    with_index, without = [], []
    store = DiskStore(place, 1 << 40)
    for start in range(0, OPENED, 4096):
        frames = small_frames(start, min(4096, OPENED - start), data)
        store.put([seal(one.header, memoryview(bytearray(data))) for one in frames], deadline=LATER)
    store.close()
    for _ in range(3):
        with_index.append(clocked(lambda: DiskStore(place, 1 << 40).close()))
    for _ in range(3):
        (place / "index.sqlite").unlink()
        without.append(clocked(lambda: DiskStore(place, 1 << 40).close()))
    shutil.rmtree(place)
    return [
        [f"open {OPENED:,} blocks", f"{median(with_index) * 1e3:.0f}", f"{max(with_index) * 1e3:.0f}"],
        [f"open {OPENED:,} blocks, index lost", f"{median(without) * 1e3:.0f}", f"{max(without) * 1e3:.0f}"],
    ]


def file_system(folder: Path) -> str:
    """Kind of the file system that a folder lies on."""
    found = ("", "unknown")
    for line in Path("/proc/mounts").read_text().splitlines():
        _, point, kind, *_ = line.split()
        if folder.resolve().is_relative_to(point) and len(point) >= len(found[0]):
            found = point, kind
    return found[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="a folder on the disk")
    parser.add_argument("--tmpfs", type=Path, default=Path("/dev/shm"), help="a folder in memory")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--million", action="store_true", help="lookups among a million blocks, and opening 100,000")
    parser.add_argument("--only", choices=("memory", "tmpfs", "disk", "million"), help="one part")
    options = parser.parse_args()
    facts = {
        **machine(),
        "xxhash": version_of("xxhash"),
        "tmpfs": file_system(options.tmpfs),
        "disk": file_system(options.folder),
        "round": f"{ROUND >> 20} MiB in batches of {BATCH >> 20} MiB; {options.rounds} rounds, medians",
    }
    print(set_up(facts), flush=True)
    rows = []
    if options.only in (None, "memory"):
        rows += measure_memory(options.rounds)
    for where, folder in (("tmpfs", options.tmpfs), ("disk", options.folder)):
        if options.only in (None, where):
            for size in SIZES:
                rows += measure_disk(where, folder, size, options.rounds, cold=where == "disk")
    if rows:
        print("\n" + table(["what", "ours GB/s", "theirs GB/s", "ratio"], rows), flush=True)
    if options.only == "million" or (options.million and options.only is None):
        found = measure_lookup(options.folder, options.rounds)
        print("\n" + table([f"lookup of {PROMPT_BLOCKS:,} names among a million", "ms", "slowest"], found), flush=True)
        print("\n" + table(["opening", "ms", "slowest"], measure_opening(options.folder)))


if __name__ == "__main__":
    main()
