"""Foreword's tiers against LMCache's adapters on the same folder and the same Redis, in turn.

    python -m benchmarks.store.lmcache --lmcache ENVIRONMENT/bin/lmcache [--folder DIR] [--rounds 5]

LMCache measures itself (`lmcache bench l2`: 32 keys at a time, verification off, which is its default: it has no
checksums); Foreword saves and loads the same number of blocks of the same size through a tier, whose reads check every
byte. Both read into the caller's buffers, as the engine does into its staging slots. Each round runs both, and the
first one changes. LMCache's environment: `pip install --no-deps lmcache==0.5.6`
beside torch, and the few packages that it then asks for.
"""

import argparse
import json
import os
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.harness import machine, median, ratio, set_up, table, version_of
from benchmarks.store.serving import redis_server
from foreword.conformance import make_frames
from foreword.store.frame import HEADER_BYTES
from foreword.store.tier import used_once
from foreword.store.urls import open_store

KEYS = 32
Speeds = dict[str, float]


def ours(url: str, size: int, turn: int) -> Speeds:
    """GB/s of one batch saved and loaded, after one that does not count."""
    store = open_store([url])
    buffers = [memoryview(bytearray(size + HEADER_BYTES)) for _ in range(KEYS)]
    taken: dict[str, list[float]] = defaultdict(list)
    for number in range(4):
        frames = make_frames(turn * 100 + number, KEYS, size)
        names = [frame.name for frame in frames]
        deadline = time.monotonic() + 60
        started = time.perf_counter()
        kept = store.tiers[0].put(frames, deadline)
        taken["store"].append(time.perf_counter() - started)
        started = time.perf_counter()
        found = store.tiers[0].get(names, buffers, deadline, used_once)
        taken["load"].append(time.perf_counter() - started)
        assert kept == KEYS and all(frame is not None for frame in found)
        store.delete(names, deadline=deadline)
    store.close()
    return {name: KEYS * size / median(each[1:]) / 1e9 for name, each in taken.items()}


def theirs(program: str, adapter: dict[str, Any], size: int) -> Speeds:
    """GB/s as LMCache reports them, the median of three rounds."""
    command = [program, "bench", "l2", "--l2-adapter", json.dumps(adapter), "--num-keys", str(KEYS)]
    command += ["--data-size-kb", str(size >> 10), "--rounds", "3", "--format", "json"]
    found: Speeds = {}
    # One operation at a time: in one go it stores what its warm-up round left and does not write again.
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=_quiet())
    metrics = json.loads(done.stdout[done.stdout.index("{") : done.stdout.rindex("}") + 1])
    for operation in _operations(metrics):
        found[operation["operation"].lower()] = KEYS * size / operation["duration_p50_ms"] / 1e6
    return found


def _operations(found: Any) -> list[dict[str, Any]]:
    if isinstance(found, dict):
        here = [found] if found.get("operation") in ("Store", "Load") else []
        return here + [one for value in found.values() for one in _operations(value)]
    return []


def _quiet() -> dict[str, str]:
    return {**os.environ, "LMCACHE_DISABLE_BANNER": "1"}


def main() -> None:
    """Runs every case and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lmcache", required=True)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kib", type=int, nargs="+", default=[1024])
    arguments = parser.parse_args()
    print(set_up({**machine(), "rounds": str(arguments.rounds), "foreword": version_of("foreword")}), flush=True)
    rows = []
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as shm,
        tempfile.TemporaryDirectory(dir=arguments.folder) as disk,
        redis_server() as redis,
    ):
        port = int(redis.rsplit(":", 1)[1]) if redis else 0
        cases: list[tuple[str, str, Callable[[int], dict[str, Any]]]] = [
            (f"{place}, {kind}", f"disk://{folder}/ours?size=4GiB", _folder(folder, kind))
            for place, folder in (("tmpfs", shm), ("disk", disk))
            for kind in ("fs", "fs_native")
        ]
        if redis:
            cases.append(("redis, resp", redis, lambda _: {"type": "resp", "host": "127.0.0.1", "port": port}))
        for name, url, adapter in cases:
            for kib in arguments.kib:
                rows.append(compare(arguments, name, url, adapter, kib << 10))
                print(rows[-1], flush=True)
    head = ["case", "store GB/s", "LMCache", "ratio", "load GB/s", "LMCache", "ratio"]
    print("\n" + table(head, rows))


def _folder(folder: str, kind: str) -> Callable[[int], dict[str, Any]]:
    def adapter(turn: int) -> dict[str, Any]:
        path = Path(folder) / f"theirs-{kind}-{turn}"
        path.mkdir(exist_ok=True)
        return {"type": kind, "base_path": str(path)}

    return adapter


def compare(
    arguments: argparse.Namespace, name: str, url: str, adapter: Callable[[int], dict[str, Any]], size: int
) -> list[str]:
    """One row: medians of ours, of theirs, and their ratio."""
    mine: dict[str, list[float]] = defaultdict(list)
    other: dict[str, list[float]] = defaultdict(list)
    for turn in range(arguments.rounds):
        for which in (0, 1) if turn % 2 else (1, 0):
            found = theirs(arguments.lmcache, adapter(turn), size) if which else ours(url, size, turn)
            for key, value in found.items():
                (other if which else mine)[key].append(value)
    row = [f"{name}, {size >> 10} KiB"]
    for key in ("store", "load"):
        a, b = median(mine[key]), median(other[key])
        row += [f"{a:.2f}", f"{b:.2f}", f"{ratio(a, b):.2f}x"]
    return row


if __name__ == "__main__":
    main()
