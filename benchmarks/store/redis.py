"""Saving and loading blocks in Redis: Foreword's store against redis-py, the same values in the same server, in turns.

    python -m benchmarks.store.redis [--url redis://host] [--unix] [--batch 32] [--rounds 15] [--json FILE]

Without --url it starts its own redis-server that writes nothing to disk. redis-py runs with hiredis and in both of its
ways, MSET/MGET and a pipeline of SET/GET; the faster one of the two is what Foreword is compared with. Foreword's times
include asking which blocks are there before it saves any, and bringing what it loads into the caller's buffers; redis-py's
end with `bytes` objects. Keys are deleted before each save, outside of the time.
"""

import argparse
import random
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import redis

from benchmarks.harness import machine, median, ratio, set_up, table, version_of, write_figures
from foreword.store.frame import HEADER_BYTES, RAW, Frame, Header, frame
from foreword.store.redis.redis_store import RedisStore

SIZES = {"256 KiB": 256 << 10, "1 MiB": 1 << 20, "4 MiB": 4 << 20}
LAYOUT = bytes(16)
PATIENCE = 60.0
Turn = Callable[[], object]


class Contest:
    """The same frames in one server, saved and loaded in each way."""

    def __init__(self, url: str, size: int, batch: int) -> None:
        self.store = RedisStore(url, prefix="benchmark")
        self.client = redis.Redis.from_url(url)
        self.frames = list(_frames(size, batch))
        self.names = [one.name for one in self.frames]
        self.buffers = [memoryview(bytearray(HEADER_BYTES + size)) for _ in self.frames]
        self.values = {b"redis-py:" + one.name: bytes(one.data) for one in self.frames}
        self.keys = list(self.values)

    def saves(self) -> dict[str, Turn]:
        return {
            "foreword": lambda: self.store.put(self.frames, deadline=time.monotonic() + PATIENCE),
            "mset / mget": lambda: self.client.mset(self.values),
            "pipeline": self._pipelined_set,
        }

    def loads(self) -> dict[str, Turn]:
        return {
            "foreword": lambda: self.store.get(self.names, self.buffers, deadline=time.monotonic() + PATIENCE),
            "mset / mget": lambda: self.client.mget(self.keys),
            "pipeline": self._pipelined_get,
        }

    def clear(self) -> None:
        """DEL, which is over when it answers; what UNLINK leaves to another thread would run into the next measurement."""
        self.client.delete(*self.client.keys("benchmark:*"), *self.keys)

    def check(self) -> None:
        """Both hold what was saved."""
        lengths = self.store.get(self.names, self.buffers, deadline=time.monotonic() + PATIENCE)
        if lengths != [len(one.data) for one in self.frames] or self.client.mget(self.keys) != list(
            self.values.values()
        ):
            raise SystemExit("a block did not come back as it was")
        if any(buffer != one.data for buffer, one in zip(self.buffers, self.frames, strict=True)):
            raise SystemExit("a block did not come back as it was")

    def close(self) -> None:
        self.clear()
        self.store.close()
        self.client.close()

    def _pipelined_set(self) -> object:
        pipeline = self.client.pipeline(transaction=False)
        for key, value in self.values.items():
            pipeline.set(key, value)
        return pipeline.execute()

    def _pipelined_get(self) -> object:
        pipeline = self.client.pipeline(transaction=False)
        for key in self.keys:
            pipeline.get(key)
        return pipeline.execute()


def compare(url: str, size: int, batch: int, rounds: int) -> dict[str, dict[str, float]]:
    """Median seconds per batch: save and load, by way."""
    contest = Contest(url, size, batch)
    saved: dict[str, list[float]] = {way: [] for way in contest.saves()}
    loaded: dict[str, list[float]] = {way: [] for way in contest.loads()}
    for number in range(rounds + 1):
        contest.clear()
        for way, turn in _turned(contest.saves(), number):
            if way != "foreword":
                contest.client.delete(*contest.keys)
            saved[way].append(_seconds(turn))
        for way, turn in _turned(contest.loads(), number):
            loaded[way].append(_seconds(turn))
        if not number:  # the first round warms connections and memory up
            contest.check()
            for times in (*saved.values(), *loaded.values()):
                times.clear()
    contest.close()
    return {
        "save": {way: median(times) for way, times in saved.items()},
        "load": {way: median(times) for way, times in loaded.items()},
    }


def report(label: str, size: int, batch: int, times: dict[str, dict[str, float]]) -> Iterator[list[str]]:
    """Rows of the table."""
    volume = size * batch / 1e9
    for what, by_way in times.items():
        best = min(seconds for way, seconds in by_way.items() if way != "foreword")
        rates = [f"{volume / seconds:.2f}" for seconds in by_way.values()]
        yield [f"{label}, {what}", *rates, f"{ratio(best, by_way['foreword']):.2f}x"]


@contextmanager
def server(unix: bool) -> Iterator[str]:
    """A redis-server of our own, and its URL."""
    binary = shutil.which("redis-server") or shutil.which("valkey-server")
    if binary is None:
        raise SystemExit("no redis-server here; give --url")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "redis.sock")
        command = [binary, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--unixsocket", str(place)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=folder)
        url = f"unix://{place}" if unix else f"redis://127.0.0.1:{port}"
        try:
            _wait(url)
            yield url
        finally:
            process.terminate()
            process.wait()


def _wait(url: str) -> None:
    deadline = time.monotonic() + PATIENCE
    with redis.Redis.from_url(url) as client:
        while time.monotonic() < deadline:
            try:
                client.ping()
                return
            except redis.ConnectionError:
                time.sleep(0.05)
    raise SystemExit("the server did not start")


def _frames(size: int, count: int) -> Iterator[Frame]:
    draw, parent = random.Random(size), sha256(b"benchmark").digest()
    for depth in range(count):
        key = sha256(parent).digest()
        yield frame(Header(LAYOUT, bytes(16), key, parent, depth, RAW, size, size), draw.randbytes(size))
        parent = key


def _turned(turns: dict[str, Turn], number: int) -> Sequence[tuple[str, Turn]]:
    """The ways in another order each round."""
    items = list(turns.items())
    first = number % len(items)
    return items[first:] + items[:first]


def _seconds(turn: Turn) -> float:
    started = time.perf_counter()
    turn()
    return time.perf_counter() - started


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="a server that may be written to")
    parser.add_argument("--unix", action="store_true", help="over a Unix socket instead of TCP, to a server of our own")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def _run(url: str, options: argparse.Namespace) -> None:
    with redis.Redis.from_url(url) as client:
        about: Any = client.info("server")
    facts = machine() | {
        "server": f"Redis {about['redis_version']}, {url.partition(':')[0]}",
        "redis-py": f"{version_of('redis')}, hiredis {version_of('hiredis')}",
        "work": f"batches of {options.batch} blocks, median of {options.rounds} rounds, in turns",
    }
    print(set_up(facts), end="\n\n")
    rows: list[list[str]] = []
    found: dict[str, dict[str, dict[str, float]]] = {}
    for label, size in SIZES.items():
        found[label] = compare(url, size, options.batch, options.rounds)
        rows += report(label, size, options.batch, found[label])
    head = ["GB/s", "Foreword", "redis-py MSET/MGET", "redis-py pipeline", "Foreword / best"]
    print(table(head, rows))
    if options.json:
        write_figures(options.json, "Redis against redis-py", head, rows, facts, seconds=found)


if __name__ == "__main__":
    arguments = _arguments()
    if arguments.url:
        _run(arguments.url, arguments)
    else:
        with server(arguments.unix) as started:
            _run(started, arguments)
