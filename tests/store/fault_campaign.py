"""A seeded campaign of faults over every tier: damaged blocks, calls that hang, servers that stop, die and lie.

    make faults [FAULTS=100000] [SEED=1]

Each fault changes what a real tier has stored, or what its server does, behind the back of a `TieredStore`. Then the chain
of the damaged block and another chain are read, stored again, and read again. The table counts:

- wrong: blocks that were served with bytes that were never stored under their name,
- crash: calls that raised,
- late: reads, lookups, puts and deletions that returned more than 50 ms after their deadline,
- stalls: of these, calls during which a thread of this process that only sleeps was late too, so the machine was,
- not healed: blocks that a put did not bring back,
- sound deleted: undamaged blocks that the tier no longer had after it had been read,
- leak: file descriptors, threads and MiB that the tier still has at the end and did not have after its first 200 faults,
- hit rate beside: share of the sound blocks that were served although the call had a bad block in it.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import math
import os
import platform
import random
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, TypeVar

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parent.parent / "transfer"))

import skewed_clock
from servers import RedisCluster, RedisServer, S3Server

from foreword.conformance import FlakyStore, make_frames, names_of
from foreword.conformance.flaky import Fault
from foreword.errors import StoreError
from foreword.store.base import Store
from foreword.store.disk.disk_store import DiskStore
from foreword.store.frame import HEADER_BYTES, Frame, frame
from foreword.store.memory.memory_store import MemoryStore
from foreword.store.tiered import TieredStore

SIZE = 2000
CALL = 1.0  # seconds until the deadline of an ordinary call
OUTAGE = 0.15  # and of a call during an outage
PUT = 10.0  # and of a put that must succeed
LATE = 0.05
WARM_UP = 200
RECOVERY = 30.0
# Faults of the memory tier after which what is there has been read as damaged twice.
ON_THE_WAY = ("corrupt", "truncate", "swap")

Mutation = Callable[[random.Random, bytearray, Sequence[Frame]], bytes | bytearray]


def _flip(draw: random.Random, data: bytearray, low: int = 0) -> bytearray:
    bit = draw.randrange(low * 8, len(data) * 8)
    data[bit // 8] ^= 1 << bit % 8
    return data


def _scatter(draw: random.Random, data: bytearray) -> bytearray:
    for _ in range(draw.randrange(2, 64)):
        _flip(draw, data)
    return data


def _zero(draw: random.Random, data: bytearray) -> bytearray:
    at = draw.randrange(len(data))
    data[at : at + 512] = bytes(len(data[at : at + 512]))
    return data


def _word(draw: random.Random, data: bytearray) -> bytearray:
    """A field of the header with an extreme value."""
    at = len(data) - HEADER_BYTES + draw.randrange(0, HEADER_BYTES - 8)
    data[at : at + 8] = draw.choice([0, 1, 1 << 63, (1 << 64) - 1]).to_bytes(8, "little")
    return data


def _resealed(draw: random.Random, others: Sequence[Frame]) -> bytes:
    """A valid frame of another chain, tenant or layout."""
    one = draw.choice(others)
    other = draw.choice([{"key": draw.randbytes(32)}, {"root": draw.randbytes(16)}, {"layout": draw.randbytes(16)}])
    return bytes(frame(replace(one.header, **other), one.payload).data)


MUTATIONS: dict[str, Mutation] = {
    "flip": lambda draw, data, _: _flip(draw, data),
    "header flip": lambda draw, data, _: _flip(draw, data, max(len(data) - HEADER_BYTES, 0)),
    "flips": lambda draw, data, _: _scatter(draw, data),
    "cut": lambda draw, data, _: data[: draw.randrange(len(data))],
    "longer": lambda draw, data, _: data + draw.randbytes(draw.randrange(1, 5000)),
    "empty": lambda draw, data, _: b"",
    "huge": lambda draw, data, _: bytes(3 << 20),
    "zeros": lambda draw, data, _: _zero(draw, data),
    "garbage": lambda draw, data, _: draw.randbytes(draw.randrange(1, 4000)),
    "field": lambda draw, data, _: _word(draw, data),
    "another block": lambda draw, data, frames: bytes(draw.choice(frames).data),
    "resealed": lambda draw, data, frames: _resealed(draw, frames),
}


class Place(Protocol):
    """A tier under test. `objects` are the keys of what it has stored, which `load` and `replace` read and overwrite."""

    label: str
    mutations: Sequence[str]
    special: Sequence[str]
    outages: Sequence[str]
    weight: float

    def open(self) -> Store: ...
    def objects(self) -> list[str]: ...
    def load(self, key: str) -> bytes: ...
    def replace(self, key: str, data: bytes) -> None: ...
    def spoil(self, key: str, kind: str, draw: random.Random) -> None: ...
    def outage(self, kind: str) -> contextlib.AbstractContextManager[None]: ...
    def close(self) -> None: ...


class Base:
    """A place with what most of them have in common."""

    mutations: Sequence[str] = tuple(MUTATIONS)
    special: Sequence[str] = ()
    outages: Sequence[str] = ("hang",)
    writes = True

    def spoil(self, key: str, kind: str, draw: random.Random) -> None:
        raise NotImplementedError

    @contextlib.contextmanager
    def outage(self, kind: str) -> Iterator[None]:
        yield

    def close(self) -> None:
        """Nothing to stop."""


class MemoryPlace(Base):
    """The memory tier. Its bytes are changed as they are read."""

    label, weight = "memory", 0.35
    mutations = ()
    special: tuple[Fault, ...] = ("corrupt", "truncate", "swap", "bad", "block_fails", "fail", "lose")

    def open(self) -> Store:
        return MemoryStore(4 << 20)

    def objects(self) -> list[str]:
        return []


class DiskPlace(Base):
    """Files of the disk tier."""

    label, weight = "disk files", 0.3
    special = ("removed", "folder", "pipe", "link", "loop", "socket")

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def open(self) -> Store:
        return DiskStore(self.folder, 64 << 20, label="disk")

    def objects(self) -> list[str]:
        return [str(path) for path in self.folder.glob("?" * 32 + "/*/??/*")]

    def load(self, key: str) -> bytes:
        return Path(key).read_bytes()

    def replace(self, key: str, data: bytes) -> None:
        Path(key).write_bytes(data)

    def spoil(self, key: str, kind: str, draw: random.Random) -> None:
        path = Path(key)
        path.unlink()
        if kind == "folder":
            path.mkdir()
        elif kind == "pipe":
            os.mkfifo(path)
        elif kind == "link":
            path.symlink_to("/etc/hostname")
        elif kind == "loop":
            path.symlink_to(path)
        elif kind == "socket":
            with contextlib.closing(socket.socket(socket.AF_UNIX)) as made, _inside(path.parent):
                made.bind(path.name[:40])
                os.rename(path.name[:40], path.name)


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[None]:
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


class IndexPlace(DiskPlace):
    """The index of the disk tier, damaged while the store is open or closed."""

    label, weight = "disk index", 0.005
    mutations = ("flip", "flips", "cut", "empty", "zeros", "garbage")
    special = ()
    outages = ()

    def objects(self) -> list[str]:
        return [str(path) for path in self.folder.glob("index.sqlite")]


class PiecePlace(DiskPlace):
    """Files of a disk tier that have several blocks each. What is damaged may be any of them, or their table."""

    label, weight = "disk pieces", 0.05

    def open(self) -> Store:
        return DiskStore(self.folder, 64 << 20, label="disk", pieces=64 << 10)

    def objects(self) -> list[str]:
        # A pipe in the place of a piece that no block of the index is in stays until the folder is compared with it.
        return [str(path) for path in self.folder.glob("?" * 32 + "/*/pieces/*") if path.is_file()]


class RedisPlace(Base):
    label, weight = "Redis", 0.2
    special = ("removed", "list", "hash")
    outages = ("hang", "stopped", "killed", "connections closed")

    def __init__(self, folder: Path) -> None:
        self.server = RedisServer(folder)
        self.client = self.server.client()

    def open(self) -> Store:
        from foreword.store.redis.redis_store import RedisStore

        return RedisStore(self.server.url, prefix="campaign")

    def objects(self) -> list[str]:
        return [key.decode() for key in self.client.keys("campaign:b:*")]

    def load(self, key: str) -> bytes:
        return bytes(self.client.get(key))

    def replace(self, key: str, data: bytes) -> None:
        self.client.set(key, bytes(data))

    def spoil(self, key: str, kind: str, draw: random.Random) -> None:
        self.client.delete(key)
        if kind == "list":
            self.client.rpush(key, "x")
        elif kind == "hash":
            self.client.hset(key, "x", "y")

    @contextlib.contextmanager
    def outage(self, kind: str) -> Iterator[None]:
        if kind == "stopped":
            with self.server.stopped():
                yield
        elif kind == "killed":
            self.server.kill()
            try:
                yield
            finally:
                self.server.start()
        else:
            self.client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            yield

    def close(self) -> None:
        self.client.close()
        self.server.kill()


class ClusterPlace(RedisPlace):
    label, weight = "Redis cluster", 0.04
    special = ("removed",)
    outages = ("hang", "one node stopped")

    def __init__(self, folder: Path) -> None:
        import redis

        self.cluster = RedisCluster(folder)
        self.client = redis.RedisCluster(port=self.cluster.nodes[0].port, host="127.0.0.1")

    def open(self) -> Store:
        from foreword.store.redis.redis_store import RedisStore

        return RedisStore(self.cluster.url, prefix="campaign")

    @contextlib.contextmanager
    def outage(self, kind: str) -> Iterator[None]:
        with self.cluster.nodes[1].stopped():
            yield

    def close(self) -> None:
        self.client.close()
        self.cluster.kill()


class ObjectPlace(Base):
    """An S3-compatible server."""

    label, weight = "S3", 0.005
    special = ("removed",)
    outages = ("hang", "stopped")

    def __init__(self, folder: Path) -> None:
        from obstore.store import S3Store

        self.server = S3Server(folder)
        self.client = S3Store(
            self.server.bucket,
            endpoint=f"http://127.0.0.1:{self.server.port}",
            region="us-east-1",
            access_key_id="tests",
            secret_access_key="tests",
            client_options={"allow_http": True},
        )

    def open(self) -> Store:
        from foreword.store.urls import open_store

        return open_store([self.server.url("/campaign")]).tiers[0].store

    def objects(self) -> list[str]:
        import obstore

        listed = (one["path"] for batch in obstore.list(self.client, "campaign") for one in batch)
        return [path for path in listed if "records" not in path]

    def load(self, key: str) -> bytes:
        import obstore

        return bytes(obstore.get(self.client, key).bytes())

    def replace(self, key: str, data: bytes) -> None:
        import obstore

        obstore.put(self.client, key, bytes(data))

    def spoil(self, key: str, kind: str, draw: random.Random) -> None:
        import obstore

        obstore.delete(self.client, key)

    @contextlib.contextmanager
    def outage(self, kind: str) -> Iterator[None]:
        import signal

        process = self.server._process
        assert process is not None
        process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self.server.kill()


class PeerPlace(Base):
    """Another instance that serves its blocks, and lies."""

    label, weight = "peer", 0.1
    writes = False
    special = ("removed",)
    outages = ("hang", "closed")

    def __init__(self, frames: Sequence[Frame]) -> None:
        from actors import LAYOUT, FrameService, config

        from foreword.transfer.transfer_endpoint import TransferEndpoint

        class Service(FrameService):
            """Sends no frame that is longer than the reader's buffer."""

            def get(self, names: Sequence[bytes], longest: int, deadline: float) -> Iterator[Sequence[object]]:
                short = FrameService({name: one for name, one in self.frames.items() if len(one) <= longest})
                return short.get(names, longest, deadline)

        self._config, self._layout, self._endpoint_type = config, LAYOUT, TransferEndpoint
        self._true = {one.name.hex(): bytes(one.data) for one in frames}
        self.service = Service({one.name: bytes(one.data) for one in frames})
        self.service._layout = LAYOUT
        self.endpoint = TransferEndpoint(config(), self.service)
        self.address = self.endpoint.listen()

    def open(self) -> Store:
        from foreword.transfer.peer import PeerStore

        return PeerStore(self.address, self._layout, config=self._config())

    def objects(self) -> list[str]:
        return list(self._true)

    def load(self, key: str) -> bytes:
        return self._true[key]

    def replace(self, key: str, data: bytes) -> None:
        self.service.frames[bytes.fromhex(key)] = bytes(data)

    def spoil(self, key: str, kind: str, draw: random.Random) -> None:
        self.service.frames.pop(bytes.fromhex(key), None)

    @contextlib.contextmanager
    def outage(self, kind: str) -> Iterator[None]:
        self.endpoint.close()
        try:
            yield
        finally:
            self.endpoint = self._endpoint_type(self._config(bind=self.address), self.service)
            self.endpoint.listen()

    def restore(self) -> None:
        self.service.frames.update({bytes.fromhex(key): data for key, data in self._true.items()})

    def close(self) -> None:
        self.endpoint.close()


@dataclass
class Row:
    """The counts of one tier."""

    label: str
    faults: int = 0
    served: int = 0
    wrong: int = 0
    crash: int = 0
    late: int = 0
    stalls: int = 0
    not_healed: int = 0
    sound_deleted: int = 0
    sound: int = 0
    sound_served: int = 0
    leak: str = ""
    worst: float = 0.0
    seconds: float = 0.0
    kinds: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)


class StallWatch:
    """A thread that only sleeps, and notes when it was woken late: then the machine was late, not a store."""

    def __init__(self) -> None:
        self._stalls: list[tuple[float, float]] = []
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            began = time.monotonic()
            time.sleep(0.002)
            ended = time.monotonic()
            if ended - began > 0.02:
                self._stalls = [*self._stalls[-50:], (began, ended)]

    def seconds(self, low: float, high: float) -> float:
        """Seconds of stalls between two times."""
        time.sleep(0.005)
        return sum(max(min(high, end) - max(low, start), 0.0) for start, end in self._stalls)


class Campaign:
    """Faults in one tier."""

    def __init__(self, place: Base, frames: Sequence[Sequence[Frame]], seed: int, watch: StallWatch) -> None:
        self.place = place
        self.chains = frames
        self.frames = [one for chain in frames for one in chain]
        self.others = make_frames(len(frames), 6, SIZE, root=b"never stored".ljust(32))
        self.by_key = {one.header.key.hex(): one for one in self.frames}
        self.chain_of = {one.name: chain for chain in frames for one in chain}
        self.draw = random.Random(f"{seed}/{place.label}")
        self.row = Row(place.label)
        self.watch = watch
        self.flaky = FlakyStore(place.open(), seed=seed)
        self.store = TieredStore([self.flaky], writable=None if place.writes else [])
        self.tier = self.store.tiers[0]

    def run(self, count: int) -> Row:
        started = time.monotonic()
        self._store_all()
        before = _resources()
        warm = False
        while self.row.faults < count:
            # Collecting garbage takes long in a process that holds much: once.
            if not warm and self.row.faults >= min(WARM_UP, count // 2):
                warm, before = True, _resources()
            kinds = [*self.place.mutations, *self.place.special]
            if self.place.outages and self.draw.random() < 0.002:
                self._outage(self.draw.choice(list(self.place.outages)))
            elif kinds:
                self._damage(self.draw.choice(kinds))
        self.row.seconds = time.monotonic() - started
        self.row.leak = _growth(before)
        self.store.close()
        self.place.close()
        return self.row

    def _store_all(self) -> None:
        for chain in self.chains:
            if self.place.writes and self._put(chain) != len(chain):
                self.row.notes["put"] += 1

    # Damaged blocks

    def _damage(self, kind: str) -> None:
        victim = self._spoil(kind)
        if victim is False:
            return
        self.row.faults += 1
        self.row.kinds[kind] += 1
        chain = self.chain_of[victim.name] if isinstance(victim, Frame) else None
        wanted = [*chain, *self.draw.choice(self.chains)] if chain else self.frames
        found = self._read(wanted)
        if isinstance(victim, Frame):
            sound = [data for one, data in zip(wanted, found, strict=True) if one.name != victim.name]
            self.row.sound += len(sound)
            self.row.sound_served += sum(data is not None for data in sound)
            self.row.notes[f"lost beside: {kind}"] += sum(data is None for data in sound)
        if kind not in ON_THE_WAY and not isinstance(
            self.place, ObjectPlace | PiecePlace
        ):  # these have several blocks in one
            self._count_deleted([one for one in wanted if one is not victim], kind)
        self._calm()
        left = self.row.not_healed
        self._heal(wanted)
        self.row.notes[f"not healed: {kind}"] += self.row.not_healed - left

    def _count_deleted(self, sound: Sequence[Frame], kind: str) -> None:
        """Counts the blocks that the tier has deleted, of which none may be sound. After an outage a place may need a while
        until it answers again."""
        if isinstance(self.place, PeerPlace):
            return  # nothing is deleted there
        if isinstance(self.place, IndexPlace):
            files = {path.name for path in self.place.folder.glob("?" * 32 + "/*/??/*")}
            there = [one.header.key.hex() in files for one in sound]
        else:
            there, until = [False], time.monotonic() + RECOVERY * (kind in self.place.outages)
            while False in there:
                there = self.flaky.inner.present(names_of(sound), deadline=_soon(10))
                if time.monotonic() >= until:
                    break
                time.sleep(0.05)
        self.row.sound_deleted += there.count(False)
        self.row.notes[f"sound deleted: {kind}"] += there.count(False)

    def _spoil(self, kind: str) -> Frame | bool | None:
        """Damage something. Returns the block, None if it is not known which, False if nothing has changed."""
        place = self.place
        if isinstance(place, MemoryPlace):
            return self._spoil_memory(kind)
        listed = isinstance(place, PiecePlace) or not isinstance(place, PeerPlace | DiskPlace) or not self.by_key
        keys = place.objects() if listed else self._known_keys()
        if not keys:
            # A block that is stored again after a fault has a file of its own, alone: until no block is in a piece.
            if isinstance(place, PiecePlace):
                self._call(lambda: self.flaky.inner.delete(names_of(self.frames), deadline=_soon(10)))
            self._store_all()
            self.row.notes["empty"] += 1
            return False
        key = self.draw.choice(keys)
        owner = self.by_key.get(key[-64:])
        try:
            if kind in MUTATIONS:
                data = place.load(key)
                mutated = bytes(MUTATIONS[kind](self.draw, bytearray(data), self.frames)) if data else b"x"
                if mutated == data:
                    return False
                place.replace(key, mutated)
            else:
                place.spoil(key, kind, self.draw)
        except OSError:
            return False
        return owner

    def _known_keys(self) -> list[str]:
        """The keys, without listing them each time."""
        if isinstance(self.place, IndexPlace):
            return self.place.objects()
        if not hasattr(self, "_keys"):
            self._keys = self.place.objects()
        return self._keys

    def _spoil_memory(self, kind: str) -> Frame | None:
        chain = self.draw.choice(self.chains)
        if kind == "bad":
            one = self.draw.choice(chain)
            self.flaky.spoil([one.name])
            return one
        self.flaky.inject(kind, self.draw.choice([0.1, 0.5, 1.0]))
        self._read(chain)
        if kind in ("lose", "fail"):
            self._call(lambda: self.store.put(chain, deadline=_soon(CALL)))
        self.flaky.inject(kind, 0.0)
        self._calm()
        return None

    def _heal(self, wanted: Sequence[Frame]) -> None:
        """Store the chains again; every block of them is there then."""
        if isinstance(self.place, PeerPlace):
            self.place.restore()
        if isinstance(self.place, IndexPlace) and self.draw.random() < 0.5:
            self._reopen()
        for chain in {id(self.chain_of[one.name]): self.chain_of[one.name] for one in wanted}.values():
            if self.place.writes:
                self._put(chain)
        missing = [one for one, data in zip(wanted, self._read(wanted), strict=True) if data is None]
        if missing:
            self._calm()
            self._again(missing)

    def _again(self, missing: Sequence[Frame]) -> None:
        """A second attempt counts as healed where the index was rebuilt or a server was busy; it is noted."""
        if self.place.writes:
            for one in missing:
                self._put(self.chain_of[one.name])
        left = sum(data is None for data in self._read(missing))
        self.row.notes["healed by the second put"] += len(missing) - left
        self.row.not_healed += left
        if left:
            self._call(lambda: self.flaky.inner.delete(names_of(missing), deadline=_soon(10)))
            self._store_all()

    def _reopen(self) -> None:
        def again() -> None:
            self.store.close()
            self.flaky = FlakyStore(self.place.open())
            self.store = TieredStore([self.flaky])
            self.tier = self.store.tiers[0]

        self._call(again)

    # Outages

    def _outage(self, kind: str) -> None:
        self.row.kinds[kind] += 1
        if kind == "hang":
            self.flaky.stick()
            self._calls_in_outage()
            self.flaky.release()
        else:
            with self.place.outage(kind):
                self._calls_in_outage()
        if kind != "killed":  # a server without a disk has nothing then
            self._count_deleted(self.frames, kind)
        until = time.monotonic() + RECOVERY
        chain = self.draw.choice(self.chains)
        while True:
            self._calm()
            self._store_all()
            if None not in self._read(chain):
                return
            if time.monotonic() > until:
                self.row.not_healed += len(chain)
                return
            time.sleep(0.05)

    def _calls_in_outage(self) -> None:
        for _ in range(6):
            self.row.faults += 1
            chain = self.draw.choice(self.chains)
            what = self.draw.choice(
                ["read", "locate", "find", "put", "delete"] if self.place.writes else ["read", "locate"]
            )
            self.row.notes[f"in an outage: {what}"] += 1
            if what == "read":
                self._read(chain, OUTAGE)
            elif what == "put":
                self._put(chain, OUTAGE)
            else:
                deadline = _soon(OUTAGE)
                self._call(lambda what=what, chain=chain, by=deadline: self._ask(what, chain, by), deadline)

    def _ask(self, what: str, chain: Sequence[Frame], deadline: float) -> None:
        if what == "delete":  # blocks that are not there: a tier that fails must say so, and no sound one may be gone
            with contextlib.suppress(StoreError):
                self.store.delete(names_of(self.others), deadline=deadline)
        else:
            call = self.store.locate if what == "locate" else self.store.find
            call(names_of(chain), deadline=deadline)

    # Calls

    def _calm(self) -> None:
        """Close the circuit: this campaign is about single faults."""
        self.tier.breaker.succeeded()

    def _read(self, frames: Sequence[Frame], seconds: float = CALL) -> list[bytes | None]:
        room = self.draw.choice([0, 0, 3000])
        buffers = [memoryview(bytearray(len(one.data) + room)) for one in frames]
        deadline = _soon(seconds)
        found = self._call(lambda: self.store.fetch(names_of(frames), buffers, deadline=deadline), deadline)
        results = [None if one is None else bytes(one.frame.data) for one in found or [None] * len(frames)]
        for one, data in zip(frames, results, strict=True):
            self.row.served += data is not None
            self.row.wrong += data is not None and data != one.data
        return results

    def _put(self, chain: Sequence[Frame], seconds: float | None = None) -> object:
        deadline = _soon(PUT if seconds is None else seconds)
        return self._call(lambda: self.store.put(chain, deadline=deadline), deadline)

    def _call(self, call: Callable[[], object], deadline: float = 0.0) -> object:
        """Make a call; count it if it raises or is late."""
        began = min(time.monotonic(), (deadline or math.inf) - OUTAGE)  # the machine may have stopped before this
        result = None
        try:
            result = call()
        except Exception as error:  # noqa: BLE001 - every error is a result
            self.row.crash += 1
            self.row.notes[f"{type(error).__name__}: {error}"[:100]] += 1
        ended = time.monotonic()
        if deadline and ended - deadline > LATE:
            self.row.late += 1
            self.row.worst = max(self.row.worst, ended - deadline)
            self.row.stalls += ended - deadline - self.watch.seconds(began, ended + 0.005) <= LATE
        return result


def _soon(seconds: float) -> float:
    return time.monotonic() + seconds


def _resources() -> tuple[int, int, int]:
    """Open files, threads, MiB of memory."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return len(os.listdir("/proc/self/fd")), threading.active_count(), pages * os.sysconf("SC_PAGE_SIZE") >> 20


def _growth(before: tuple[int, int, int]) -> str:
    files, threads, memory = (now - then for now, then in zip(_resources(), before, strict=True))
    return f"{max(files, 0)} / {max(threads, 0)} / {max(memory, 0)}"


def places(folder: Path, chains: Sequence[Sequence[Frame]], only: Sequence[str] = ()) -> Iterator[Base]:
    """Every tier that can be started here."""
    makers: dict[str, Callable[[], Base]] = {
        "memory": MemoryPlace,
        "disk files": lambda: DiskPlace(folder / "disk"),
        "disk index": lambda: IndexPlace(folder / "index"),
        "disk pieces": lambda: PiecePlace(folder / "pieces"),
        "Redis": lambda: RedisPlace(folder / "redis"),
        "Redis cluster": lambda: ClusterPlace(folder / "cluster"),
        "S3": lambda: ObjectPlace(folder / "s3"),
        "peer": lambda: PeerPlace([one for chain in chains for one in chain]),
    }
    for label, make in makers.items():
        if not only or label in only:
            yield make()


def run(faults: int, seed: int, only: Sequence[str] = (), report: Callable[[Row], None] = lambda _: None) -> list[Row]:
    """The campaign: `faults` faults, divided among the tiers by their speed."""
    chains = [make_frames(number, 6, SIZE, root=bytes([number]) * 32) for number in range(6)]
    watch = StallWatch()
    rows = []
    with scratch_folder() as folder:
        for place in places(folder, chains, only):
            count = max(round(faults * place.weight), 10)
            rows.append(Campaign(place, chains, seed, watch).run(count))
            report(rows[-1])
    return rows


HEAD = (
    "tier",
    "faults",
    "wrong",
    "crash",
    "late",
    "of these stalls",
    "not healed",
    "sound deleted",
    "leak",
    "hit rate beside",
    "seconds",
)


def cells(row: Row) -> list[str]:
    rate = f"{row.sound_served / row.sound:.4f}" if row.sound else ""
    numbers = (row.faults, row.wrong, row.crash, row.late, row.stalls, row.not_healed, row.sound_deleted)
    return [row.label, *(f"{number:,}" for number in numbers), row.leak, rate, f"{row.seconds:.0f}"]


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A temporary folder. Meanwhile Foreword logs nothing about the faults."""
    logger = logging.getLogger("foreword")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    folder = Path(tempfile.mkdtemp(prefix="foreword-campaign-"))
    try:
        yield folder
    finally:
        logger.setLevel(level)
        shutil.rmtree(folder, ignore_errors=True)


AnyRow = TypeVar("AnyRow")


def print_campaign(
    description: str | None,
    what: str,
    count: int,
    head: Sequence[str],
    run: Callable[[int, int, Sequence[str], Callable[[AnyRow], None]], list[AnyRow]],
    cells: Callable[[AnyRow], list[str]],
) -> tuple[list[AnyRow], bool]:
    """Read the command line, run a campaign and print a line as each part of it ends. `what` is counted, by default `count`
    times. Returns the rows, and whether notes are wanted."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(f"--{what}", dest="count", type=int, default=count)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", action="append", default=[], help="label of a row; may be given several times")
    parser.add_argument("--notes", action="store_true", help="print the kinds of faults and what was noted")
    parser.add_argument("--clocks", action="store_true", help="set the wall clock of each process forward and back")
    given = parser.parse_args()
    if given.clocks:
        skewed_clock.skew(given.seed)
    print(f"{time.strftime('%Y-%m-%d')}, {_processor()}, load {os.getloadavg()[0]:.1f}, seed {given.seed}\n")
    print("| " + " | ".join(head) + " |\n|---|" + "---:|" * (len(head) - 1), flush=True)

    def show(row: AnyRow) -> None:
        print("| " + " | ".join(cells(row)) + " |", flush=True)

    return run(given.count, given.seed, given.only, show), given.notes


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{models[0] if models else platform.machine()}, {len(models)} cores"


def main() -> int:
    rows, notes = print_campaign(__doc__, "faults", 100_000, HEAD, run, cells)
    total = Row("all")
    for row in rows:
        counts = ("faults", "wrong", "crash", "late", "stalls", "not_healed", "sound_deleted", "sound", "sound_served")
        for name in (*counts, "seconds"):
            setattr(total, name, getattr(total, name) + getattr(row, name))
    print("| " + " | ".join(cells(total)) + " |")
    for row in rows if notes else ():
        print(f"\n{row.label}: {dict(row.kinds)}; {dict(row.notes)}; worst {row.worst * 1000:.0f} ms late")
    return int(bool(total.wrong or total.crash or total.late - total.stalls or total.not_healed or total.sound_deleted))


if __name__ == "__main__":
    raise SystemExit(main())
