"""Processor time of puts of short blocks to a store, with room and full: per block, of all threads.

    python -m benchmarks.store.puts [--kinds memory,files,pieces] [--blocks 2000,20000] [--tenants 1,200] [--put 32]
        [--room | --full] [--beside CHECKOUT]

Tenants put chains by turns, into memory or a folder, where blocks have files of their own or lie in pieces. In a full store
each block that is written evicts another. With --beside, the code of another checkout of this repository does the same, by
turns, each in a process of its own. Printed: least, lower quartile and median of the puts of all processes, in us for a block.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from itertools import product
from pathlib import Path

from foreword.blocks.keys import Scope
from foreword.blocks.salt import Salt
from foreword.conformance import make_frames, soon
from foreword.store.base import Store
from foreword.store.disk.disk_store import DiskStore
from foreword.store.frame import HEADER_BYTES
from foreword.store.memory.memory_store import MemoryStore

PAYLOAD = 64
PIECE = 8 << 20
KINDS = ("memory", "files", "pieces")


def opened(kind: str, folder: str, size: int) -> Store:
    if kind == "memory":
        return MemoryStore(size, slot_bytes=HEADER_BYTES + PAYLOAD)
    return DiskStore(folder, size, pieces=PIECE if kind == "pieces" else 0)


def measure(folder: str, kind: str, room: bool, blocks: int, tenants: int, put: int, rounds: int) -> list[float]:
    """Microseconds for each block of `rounds` puts."""
    roots = [Scope(b"model", 16, Salt.of(b"tenant %d" % number, None)).root() for number in range(tenants)]
    block = HEADER_BYTES + PAYLOAD
    spent = list[float]()
    with tempfile.TemporaryDirectory(dir=folder) as where:
        size = (2 * blocks + put * (rounds + 2) if room else blocks) * block
        with closing(opened(kind, where, size)) as store:
            first = min(put, max(blocks // tenants, 1))  # of a tenant's first chains: each has some
            fill = -(-blocks // first) + 2  # the first eviction counts tenants
            for number in range(fill + rounds):
                count = first if number < fill else put
                frames = make_frames(number, count, PAYLOAD, root=roots[number % tenants])
                began = time.process_time()
                kept = store.put(frames, deadline=soon())
                took = time.process_time() - began
                assert kept == count, kept
                if number >= fill:
                    spent.append(took / put * 1e6)
            evicted = store.status().evictions
            assert room or evicted >= put * rounds, evicted
    return spent


def one_process(checkout: Path, arguments: argparse.Namespace, case: tuple[str, bool, int, int]) -> list[float]:
    """The same in a new process with the code of a checkout."""
    values = json.dumps([str(arguments.folder), *case, arguments.put, arguments.rounds])
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    command = [sys.executable, __file__, "--once", values]
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{checkout}: {done.stderr}")
    return [float(one) for one in json.loads(done.stdout)]


def row(spent: list[float]) -> list[str]:
    ordered = sorted(spent)
    return [f"{ordered[int(part * (len(ordered) - 1))]:.1f}" for part in (0, 0.25, 0.5)]


def main() -> None:
    def numbers(text: str) -> list[int]:
        return [int(one) for one in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=KINDS)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--blocks", type=numbers, default=[2000, 20000], help="in the store")
    parser.add_argument("--tenants", type=numbers, default=[1, 200])
    parser.add_argument("--put", type=int, default=32, help="blocks of a put")
    parser.add_argument("--rounds", type=int, default=60, help="puts of a process")
    parser.add_argument("--turns", type=int, default=3, help="processes of each kind")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--room", action="store_true", help="only stores with room")
    which.add_argument("--full", action="store_true", help="only full stores")
    parser.add_argument("--beside", type=Path, help="another checkout")
    parser.add_argument("--once", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.once:
        print(json.dumps(measure(*json.loads(arguments.once))))
        return
    from benchmarks.harness import machine, table  # the other checkout's processes do without

    here = Path(__file__).resolve().parents[2]
    checkouts = {"this code": here} | ({"the other": arguments.beside.resolve()} if arguments.beside else {})
    with_room = [True] if arguments.room else [False] if arguments.full else [True, False]
    print(machine(), "load", os.getloadavg()[0])
    rows = []
    for kind, room, blocks, tenants in product(arguments.kinds, with_room, arguments.blocks, arguments.tenants):
        spent: dict[str, list[float]] = {name: [] for name in checkouts}
        for _ in range(arguments.turns):
            for name, checkout in checkouts.items():
                spent[name] += one_process(checkout, arguments, (kind, room, blocks, tenants))
        head = [kind, "room" if room else "full", f"{blocks:,}", f"{tenants:,}"]
        rows += [[*head, name, *row(found)] for name, found in spent.items()]
    print(table(["kind", "store", "blocks", "tenants", "code", "least", "quartile", "median"], rows))
    print("load", os.getloadavg()[0])


if __name__ == "__main__":
    main()
