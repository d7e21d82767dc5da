"""A seeded campaign of erasures while places fail, processes are killed and queues are full.

    make erasures [ERASURES=10000] [SEED=1]

Each round stores blocks and records of a new tenant in all tiers of a mixture, some through a write queue that is still busy,
and erases the tenant while a fault is there. Once it has ended, what is left open must complete itself. What is there is
counted without the stores' own code: files, keys of Redis, objects of a bucket. The table counts:

- erasures, and how many of them were complete at once, later, and only when asked again, because their process was killed;
- false: receipts that said `complete` while something of the tenant was there,
- left: tenants of which something was there 30 s after the fault had ended, and came back: of which something was there again,
- sound deleted: blocks and records of other tenants that are gone, also after `verify --repair` under the same faults,
- crash: calls that raised,
- slowest: seconds until the answer, with all places there and with one that is not.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import skewed_clock
import torch
from fault_campaign import (
    Base,
    ClusterPlace,
    DiskPlace,
    MemoryPlace,
    ObjectPlace,
    PiecePlace,
    RedisPlace,
    print_campaign,
    scratch_folder,
)

from foreword.blocks.keys import Scope
from foreword.blocks.salt import Salt
from foreword.cli.store import _verify_tier
from foreword.conformance import FlakyStore, make_frames, names_of, soon
from foreword.errors import StoreError
from foreword.offload.slots import StagingSlots
from foreword.offload.staging import StagingArena
from foreword.offload.writer import WriteBatch, WriteBehind
from foreword.prefixes.open_erasures import OpenErasures
from foreword.store.base import Store
from foreword.store.data_keys import DataKeys
from foreword.store.frame import Frame
from foreword.store.sealing import KeyRing
from foreword.store.tiered import TieredStore
from foreword.store.urls import open_store
from foreword.store_config import EncryptionConfig

SIZE = 500
SLOTS = 64
WITHIN = 30.0  # seconds until an open erasure must be complete after its fault has ended
PAUSE = 0.05  # seconds between its repetitions; a server waits 5
AGAIN = 100  # rounds after which erased tenants are looked for again
MASTER = f"campaign:{'11' * 32}"

# The tiers of each mixture, its share of all erasures, and whether it is encrypted.
MIXTURES: dict[str, tuple[tuple[str, ...], float, bool]] = {
    "memory": (("memory",), 0.2, False),
    "disk": (("disk",), 0.2, False),
    "disk pieces": (("pieces",), 0.1, False),
    "Redis": (("redis",), 0.16, False),
    "Redis cluster": (("cluster",), 0.03, False),
    "S3": (("s3",), 0.01, False),
    "memory, disk, Redis": (("memory", "disk", "redis"), 0.2, False),
    "two disks": (("disk", "disk"), 0.1, False),
    "disk, Redis, encrypted": (("disk", "redis"), 0.1, True),
}
# Per round. Those that take seconds are rare.
FAULTS = {
    "none": 20,
    "calls fail": 30,
    "folder unreadable": 10,
    "deletes fail": 10,
    "queue full": 10,
    "killed": 2,
    "restarted": 2,
    "hang": 0.1,
    "outage": 1,
}
_OUTAGES = {
    RedisPlace: ("stopped", "connections closed"),
    ClusterPlace: ("one node stopped",),
    ObjectPlace: ("stopped",),
}


def paths(place: Base) -> list[str]:
    """Names of everything that a place has, as its server or file system tells them."""
    if isinstance(place, DiskPlace):
        return [os.path.join(root, name) for root, _, files in os.walk(place.folder) for name in files]
    if isinstance(place, RedisPlace):
        return [key.decode("utf-8", "backslashreplace") for key in place.client.keys("campaign*")]
    import obstore

    assert isinstance(place, ObjectPlace)
    return [one["path"] for batch in obstore.list(place.client, "campaign") for one in batch]


def record_of(salt: Salt, kind: str) -> str:
    return f"{kind}/{'0' * 32}/{salt.digest.hex()}/manual"


@dataclass
class Row:
    """The counts of one mixture."""

    label: str
    erasures: int = 0
    at_once: int = 0
    later: int = 0
    asked_again: int = 0
    false: int = 0
    left: int = 0
    came_back: int = 0
    sound_deleted: int = 0
    crash: int = 0
    slowest: float = 0.0
    slowest_outage: float = 0.0
    seconds: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)

    @property
    def good(self) -> bool:
        return not (self.false or self.left or self.came_back or self.sound_deleted or self.crash)


class Instance:
    """An engine's parts: tiers that may be made to fail, a write queue, and its erasures."""

    def __init__(self, stores: Sequence[Store], locations: Sequence[str], seed: int, keys: DataKeys | None) -> None:
        self.flaky = [FlakyStore(one, seed=seed + number) for number, one in enumerate(stores)]
        ring = None if keys is None else KeyRing(data=keys)
        sealed = [one if ring is None else ring.sealed(one) for one in self.flaky]
        self.store = TieredStore(sealed, locations=locations)
        arena = StagingArena([[torch.zeros(2, SIZE, dtype=torch.uint8)]], SLOTS)
        self._arena, self._slots = arena, StagingSlots(range(SLOTS))
        self.queue = WriteBehind(self.store, arena, lambda names, slots, deadline: ([], set()))  # nothing is promoted
        self.erasures = OpenErasures(self.store, partial(self.queue.erasing, timeout=0.2), keys, pause=PAUSE)

    def write(self, frames: Sequence[Frame]) -> int:
        """Queue blocks to be written behind. Returns how many found room."""
        slots = self._slots.take(len(frames))
        if slots is None:
            return 0
        for one, slot in zip(frames, slots, strict=True):
            self._arena.buffer(slot)[:SIZE] = one.data[:SIZE]
        self.queue.add([WriteBatch([one.header for one in frames], slots, self._slots, set(self.store.writable))])
        return len(frames)

    def calm(self) -> None:
        """Close all circuits: this campaign is about single faults."""
        for tier in self.store.tiers:
            tier.breaker.succeeded()

    def close(self) -> None:
        self.erasures.close()
        self.queue.close()
        self.store.close()


def _erase_in_child(urls: Sequence[str], salt: Salt, key_store: str, pipe: Connection, unreadable: str) -> None:
    """Another process of the same deployment: says that it is ready, erases, says what it answered, and waits to be killed.
    `unreadable`: a folder that it cannot list."""
    logging.disable()
    skewed_clock.follow_parent()
    if unreadable:
        _deny("scandir", unreadable)
    keys = DataKeys(EncryptionConfig(key_store=key_store, master_keys=(MASTER,))) if key_store else None
    store = open_store(urls) if keys is None else open_store(urls, keys=KeyRing(data=keys))
    erasures = OpenErasures(store, lambda _: contextlib.nullcontext(0), keys, pause=60.0)
    pipe.send("ready")
    name, receipt = erasures.erase([salt])
    pipe.send((name, receipt.complete))
    pipe.recv()


class Campaign:
    """Erasures in one mixture of tiers."""

    def __init__(self, label: str, folder: Path, seed: int) -> None:
        kinds, _, encrypted = MIXTURES[label]
        self.row = Row(label)
        self.draw = random.Random(f"{seed}/{label}")
        self._keys_folder = str(folder / "keys") if encrypted else ""
        self.places = [_make(kind, folder / f"{number}-{kind}") for number, kind in enumerate(kinds)]
        self.keys = self._data_keys()
        opened = open_store([_url(place) for place in self.places]).tiers
        self.inner = [tier.store for tier in opened]
        self.instance = Instance(
            self.inner, [tier.location for tier in opened], self.draw.randrange(1 << 30), self.keys
        )
        self._others = [Salt(b"other %d" % number) for number in range(2)]
        self._sound = [one for number, salt in enumerate(self._others) for one in self._frames(salt, number, 8)]
        self._records = [record_of(salt, kind) for salt in self._others for kind in ("prefixes", "retained")]
        self._erased: list[Salt] = []
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__name__, "torch", "foreword.store.urls", "fault_campaign"])

    def _data_keys(self) -> DataKeys | None:
        if not self._keys_folder:
            return None
        return DataKeys(EncryptionConfig(key_store=self._keys_folder, master_keys=(MASTER,)))

    def _frames(self, salt: Salt, seed: int, count: int) -> list[Frame]:
        return make_frames(seed, count, SIZE, root=Scope(b"model", 16, salt).root())

    def run(self, count: int) -> Row:
        began = time.monotonic()
        self._restore()
        while self.row.erasures < count:
            self._round()
            if self.row.erasures % AGAIN == 0:
                self._look_again()
        self._look_again()
        self.instance.close()
        if self.keys is not None:
            self.keys.close()
        for place in self.places:
            place.close()
        self.row.seconds = time.monotonic() - began
        return self.row

    # A round

    def _round(self) -> None:
        self.row.erasures += 1
        salt = Salt(b"tenant %d" % self.row.erasures)
        target = Salt.of(salt.tenant, "a session") if self.draw.random() < 0.1 else salt
        chains = [self._frames(target, number, self.draw.randint(1, 12)) for number in range(self.draw.randint(1, 3))]
        fault = self._choose()
        self.row.faults[fault] += 1
        for kind in ("prefixes", "retained"):
            self._tolerantly(
                partial(self.instance.store.put_record, record_of(target, kind), b"private", deadline=soon(10))
            )
        if fault != "queue full":
            for frames in chains:
                self.instance.store.put(frames, deadline=soon(10))
        handled = {"killed": self._killed, "restarted": self._restarted}.get(fault)
        if handled is not None:
            handled(target)
        else:
            self._erase_under(fault, target, chains)
        self.instance.calm()
        self._erased.append(target)
        self._check_others()

    def _choose(self) -> str:
        known = dict(FAULTS)
        if not any(isinstance(place, DiskPlace) for place in self.places):
            del known["folder unreadable"], known["deletes fail"], known["restarted"]
        if any(isinstance(place, MemoryPlace) for place in self.places):
            known.pop("restarted", None)  # another process's memory is not erased by the one that starts
        if all(isinstance(place, MemoryPlace) for place in self.places):
            del known["killed"]
        if not any(type(place) in _OUTAGES for place in self.places):
            del known["outage"]
        return self.draw.choices(list(known), list(known.values()))[0]

    @contextlib.contextmanager
    def _fault(self, kind: str) -> Iterator[None]:
        flaky = self.draw.choice(self.instance.flaky)
        with contextlib.ExitStack() as ends:
            if kind == "calls fail":
                flaky.inject("fail", self.draw.choice([0.05, 0.2, 0.5, 1.0]))
                ends.callback(flaky.inject, "fail", 0.0)
            elif kind == "hang":
                flaky.stick()
                ends.callback(flaky.release)
            elif kind in ("folder unreadable", "deletes fail"):
                ends.enter_context(self._broken_disk(kind))
            elif kind == "outage":
                place = self.draw.choice([one for one in self.places if type(one) in _OUTAGES])
                ends.enter_context(place.outage(self.draw.choice(_OUTAGES[type(place)])))
            yield

    @contextlib.contextmanager
    def _broken_disk(self, kind: str) -> Iterator[None]:
        """Calls of the system fail for a part of one disk, also for root."""
        place = self.draw.choice([one for one in self.places if isinstance(one, DiskPlace)])
        folders = [root for root, folders, files in os.walk(place.folder) if files and root != str(place.folder)]
        bad = self.draw.choice(folders or [str(place.folder)])
        with _denied("scandir" if kind == "folder unreadable" else "unlink", bad):
            yield

    def _erase_under(self, fault: str, salt: Salt, chains: Sequence[Sequence[Frame]]) -> None:
        """Erase while a fault is there. What is not complete must be, soon after it has ended."""
        other = threading.Thread(target=self._write_others)
        with self._fault(fault):
            if fault == "queue full":
                slow = self.draw.choice(self.instance.flaky)
                slow.delay(self.draw.choice([0.0, 0.01, 0.3]))
                for frames in chains:
                    self.row.notes["queued"] += self.instance.write(frames)
            other.start()
            answered = self._erase(salt, fault in ("outage", "hang"))
            other.join()
            if answered is not None and answered[1]:
                self.row.at_once += 1
                self._count_false(fault, self._there(salt, fault in ("outage", "hang")))
        for flaky in self.instance.flaky:
            flaky.delay(0.0)
        if answered is not None and not answered[1]:
            self._complete_later(answered[0], salt)
        if self.draw.random() < 0.02:
            self._verify(fault if fault in ("calls fail", "folder unreadable") else "calls fail")

    def _erase(self, salt: Salt, outage: bool) -> tuple[str, bool] | None:
        began = time.monotonic()
        try:
            name, receipt = self.instance.erasures.erase([salt])
        except Exception as error:  # noqa: BLE001 - every error is a result
            self.row.crash += 1
            self.row.notes[f"{type(error).__name__}: {error}"[:100]] += 1
            return None
        seconds = time.monotonic() - began
        if outage:
            self.row.slowest_outage = max(self.row.slowest_outage, seconds)
        else:
            self.row.slowest = max(self.row.slowest, seconds)
        return name, receipt.complete

    def _count_false(self, fault: str, there: Sequence[str]) -> None:
        """A receipt said that it was complete."""
        self.row.false += bool(there)
        if there:
            self.row.notes[f"false ({fault}): {len(there)}, {there[0]}"[:220]] += 1

    def _complete_later(self, name: str, salt: Salt) -> None:
        self.instance.calm()
        until = time.monotonic() + WITHIN
        while (found := self.instance.erasures.get(name)) is not None and found.tiers and time.monotonic() < until:
            time.sleep(PAUSE / 5)
            self.instance.calm()
        there = self._there(salt)
        self.row.later += not there
        self.row.left += bool(there)
        self.row.false += bool(there) and found is not None and found.receipt.complete
        if there:
            self.row.notes[f"left: {there[0]}"[:160]] += 1

    # Processes that die

    def _child(self, salt: Salt, unreadable: str = "") -> tuple[Any, Connection]:
        urls = [_url(place) for place in self.places if not isinstance(place, MemoryPlace)]
        mine, theirs = self._context.Pipe()
        given = (urls, salt, self._keys_folder, theirs, unreadable)
        child = self._context.Process(target=_erase_in_child, args=given, daemon=True)
        child.start()
        theirs.close()
        assert mine.recv() == "ready"
        return child, mine

    def _killed(self, salt: Salt) -> None:
        """Another process is killed in the middle of the erasure; the client asks again."""
        child, pipe = self._child(salt)
        time.sleep(self.draw.random() * 0.03)
        _kill(child, pipe)
        answered = self._erase(salt, False)
        self.row.asked_again += 1
        if answered is not None:
            self._count_false("killed", self._there(salt) if answered[1] else ())
            self.row.left += not answered[1]

    def _restarted(self, salt: Salt) -> None:
        """A process that cannot read a folder answers "not complete" and is killed; one that starts later completes it."""
        [disk] = self.draw.sample([one for one in self.places if isinstance(one, DiskPlace)], 1)
        folders = sorted({str(path.parent) for path in disk.folder.glob(f"*/{salt.digest.hex()}/*/*")})
        child, pipe = self._child(salt, self.draw.choice(folders))
        _, complete = pipe.recv()
        _kill(child, pipe)
        if complete:
            self.row.at_once += 1
            self._count_false("restarted", self._there(salt))
            return
        adopted = OpenErasures(self.instance.store, lambda _: contextlib.nullcontext(0), self.keys, pause=PAUSE)
        until = time.monotonic() + WITHIN
        while self._there(salt) and time.monotonic() < until:
            time.sleep(PAUSE)
        adopted.close()
        there = self._there(salt)
        self.row.later += not there
        self.row.left += bool(there)

    # Blocks that are there

    def _there(self, salt: Salt, outage: bool = False) -> list[str]:
        """Blocks that places have of a tenant. During an outage, those that would not answer are not asked."""
        digits = salt.prefix.hex()
        found: list[str] = []
        for place, store in zip(self.places, self.inner, strict=True):
            if isinstance(place, MemoryPlace):
                listed = store.list_names(b"", salt.prefix, deadline=soon(10))
                found += [name.hex() for names in listed for name in names]
            elif not outage or isinstance(place, DiskPlace):
                found += [path for path in paths(place) if digits in path]
        return found

    def _look_again(self) -> None:
        """Nothing of the erased tenants has come back with what was queued, promoted or written late."""
        self.instance.queue.flush(60)
        every = [path for place in self.places if not isinstance(place, MemoryPlace) for path in paths(place)]
        for salt in self._erased:
            there = any(salt.prefix.hex() in path for path in every) or (
                isinstance(self.places[0], MemoryPlace) and self._there(salt)
            )
            self.row.came_back += bool(there)
        self._erased.clear()

    def _write_others(self) -> None:
        """Another tenant's blocks are written meanwhile."""
        for number in range(3):
            self.instance.write(self._frames(Salt(b"beside"), number, 4))

    def _restore(self) -> None:
        for store in self.instance.flaky:
            tier = self.instance.store.tiers[self.instance.flaky.index(store)]
            tier.put(self._sound, soon(30))
        for key in self._records:
            self.instance.store.put_record(key, b"of another tenant", deadline=soon(30))

    def _check_others(self) -> None:
        """Blocks and records of the other tenants are still there. A store tells nothing of what it could not reach just now:
        only what stays away is gone, since nothing writes it again."""
        until = time.monotonic() + WITHIN
        while (gone := self._gone()) and time.monotonic() < until:
            time.sleep(PAUSE)
            self.instance.calm()
        if gone:
            self.row.sound_deleted += gone
            self._restore()

    def _gone(self) -> int:
        """How many blocks and records of the other tenants are not found."""
        gone = 0
        for tier in self.instance.store.tiers:
            there = self._tolerantly(partial(tier.store.present, names_of(self._sound), deadline=soon(30)))
            gone += sum(not one for one in there or ())
        known: set[str] = set()
        for tier in self.instance.store.record_tiers:
            known.update(self._tolerantly(partial(tier.store.records, "", deadline=soon(30))) or ())
        return gone + sum(key not in known for key in self._records)

    def _verify(self, fault: str) -> None:
        """`verify --repair` while calls fail: nothing is damaged, so nothing may be deleted."""
        if fault == "folder unreadable" and not any(isinstance(place, DiskPlace) for place in self.places):
            fault = "calls fail"
        with self._fault(fault), open(os.devnull, "w", encoding="utf-8") as quiet, contextlib.redirect_stderr(quiet):
            for tier in self.instance.store.tiers:
                found = self._tolerantly(partial(_verify_tier, tier, True))
                self.row.notes["verified"] += 1
                self.row.sound_deleted += 0 if found is None else found.removed

    def _tolerantly(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except StoreError as error:
            self.row.notes[f"{type(error).__name__}"] += 1
            return None


def _deny(name: str, folder: str) -> Callable[[], None]:
    """Let `os.scandir` of a folder, or `os.unlink` in it, fail, also for root. Returns what ends it."""
    real = getattr(os, name)

    def fails(path: Any = ".", **more: Any) -> Any:
        where = "" if isinstance(path, int) else os.path.abspath(os.fspath(path))
        if folder == (os.path.dirname(where) if name == "unlink" else where):
            raise PermissionError(13, "Permission denied", where)
        return real(path, **more)

    setattr(os, name, fails)
    return partial(setattr, os, name, real)


@contextlib.contextmanager
def _denied(name: str, folder: str) -> Iterator[None]:
    end = _deny(name, folder)
    try:
        yield
    finally:
        end()


def _kill(child: Any, pipe: Connection) -> None:
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    pipe.close()


def _make(kind: str, folder: Path) -> Base:
    if kind == "memory":
        return MemoryPlace()
    folder.mkdir(parents=True, mode=0o700)
    makers: dict[str, Callable[[Path], Base]] = {
        "disk": DiskPlace,
        "pieces": PiecePlace,
        "redis": RedisPlace,
        "cluster": ClusterPlace,
        "s3": ObjectPlace,
    }
    return makers[kind](folder)


def _url(place: Base) -> str:
    if isinstance(place, MemoryPlace):
        return "memory://?size=4MiB"
    if isinstance(place, DiskPlace):
        return f"disk://{place.folder}?size=64MiB{'&pieces=64KiB' * isinstance(place, PiecePlace)}"
    if isinstance(place, ObjectPlace):
        return place.server.url("/campaign")
    assert isinstance(place, RedisPlace)
    url = place.cluster.url if isinstance(place, ClusterPlace) else place.server.url
    return f"{url}{'&' if '?' in url else '?'}prefix=campaign"


def run(
    erasures: int, seed: int, only: Sequence[str] = (), report: Callable[[Row], None] = lambda _: None
) -> list[Row]:
    """The campaign: `erasures` erasures, divided among the mixtures."""
    rows = []
    with scratch_folder() as folder:
        for number, label in enumerate(MIXTURES):
            if not only or label in only:
                count = max(round(erasures * MIXTURES[label][1]), 10)
                rows.append(Campaign(label, folder / str(number), seed).run(count))
                report(rows[-1])
    return rows


HEAD = (
    "tiers",
    "erasures",
    "complete at once",
    "later",
    "asked again",
    "false",
    "left",
    "came back",
    "sound deleted",
    "crash",
    "slowest, s",
    "with an outage",
    "seconds",
)


def cells(row: Row) -> list[str]:
    counts = (row.erasures, row.at_once, row.later, row.asked_again, row.false, row.left, row.came_back)
    times = (f"{row.slowest:.2f}", f"{row.slowest_outage:.2f}", f"{row.seconds:.0f}")
    return [row.label, *(f"{one:,}" for one in (*counts, row.sound_deleted, row.crash)), *times]


def main() -> int:
    rows, notes = print_campaign(__doc__, "erasures", 10_000, HEAD, run, cells)
    for row in rows if notes else ():
        print(f"\n{row.label}: {dict(row.faults)}; {dict(row.notes)}")
    return int(not all(row.good for row in rows))


if __name__ == "__main__":
    sys.exit(main())
