"""A seeded campaign of losses of power: disk stores are opened on what a file system may have after one.

    make power-loss [STATES=24] [SEED=1]
    python tests/store/power_loss_campaign.py --replay FOLDER

A process with two disk stores puts, reads, deletes and evicts blocks, keeps and releases leases, and erases tenants, some while
one of the stores fails. All its changes of files are recorded (recorder.cpp). From the record states are drawn that may be
there after a loss of power at any moment (crash_states.py). On each the stores are opened, in another boot, and used. On a copy
of every second one another process goes on, and loses its power at any moment, too: also while it opens the stores. What is
there is counted without the stores' own code. A state with a fault is kept as it was, and the notes name its folder. The table
counts:

- wrong: blocks that were served with bytes that were never stored under their name, and records that were never written,
- missed: blocks that are whole in their file and that lookups or reads do not find,
- known: blocks of which the store says from memory that they are there, or not, and that is not so,
- over: stores that have more bytes of blocks than they may after others were stored,
- came back: blocks and records of tenants whose erasure was answered as complete before the loss, at once and later,
- not ended: those of tenants whose erasure was answered as open, half a minute later at most,
- unpinned: blocks of leases whose record is there that are not pinned again,
- left: files that are there after an erasure later, and files that belong to nothing,
- crash: calls that raised, and stores that do not come to know their blocks within half a minute.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import shutil
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parent))

from crash_states import Recorded, record, recorder
from fault_campaign import print_campaign, scratch_folder

from foreword.blocks.keys import Scope
from foreword.blocks.resume import GroupKind, KVGroup
from foreword.blocks.salt import Salt
from foreword.conformance import FlakyStore, make_frames, names_of, put_all, read, soon
from foreword.conformance.frames import LAYOUT
from foreword.errors import BadFrame
from foreword.offload.search import StoredGroup
from foreword.prefixes.lease_records import RETENTIONS, RetentionRecord
from foreword.prefixes.open_erasures import OpenErasures
from foreword.prefixes.pins import StorePins
from foreword.store import machine
from foreword.store.disk.disk_store import DiskStore
from foreword.store.frame import Frame, check
from foreword.store.machine import clock_id
from foreword.store.shared_records import SharedRecords
from foreword.store.tiered import TieredStore

PAYLOAD, BLOCK = 1000, 16
SIZE = 120 * 1200  # bytes of each store
PIECES = 8 << 10
TENANTS, CHAINS, STEPS = 5, 8, 150
STEPS_AFTER_A_LOSS = 40
STATES_OF_A_RECORD = 4
MODEL = "ab" * 32
SETTLED = 30.0
_PIECE_HEAD, _PIECE_ENTRY = struct.Struct("<8sII"), struct.Struct("<32sQQ")
_OF_A_STORE = (
    "index.sqlite",
    "index.sqlite.broken",
    "index.sqlite-wal",
    "index.sqlite-shm",
    "changes",
    "lock",
    "scan",
    "records.lock",
)


def salt_of(tenant: int) -> Salt:
    return Salt(b"tenant %d" % tenant)


def chain(tenant: int, number: int) -> list[Frame]:
    return make_frames(number, 3 + number, PAYLOAD, root=Scope(b"model", BLOCK, salt_of(tenant)).root())


class Instance:
    """Two disk stores as one, with leases and erasures."""

    def __init__(self, folder: Path, pieces: int) -> None:
        self.disks = [DiskStore(folder / name, SIZE, label=name, pieces=pieces) for name in ("a", "b")]
        self.flaky = [FlakyStore(one) for one in self.disks]
        self.store = TieredStore(self.flaky)
        self.erasures = OpenErasures(self.store, lambda _: contextlib.nullcontext(0), pause=0.05)
        self.records = SharedRecords(self.store, RETENTIONS)
        self.pins = StorePins(self.store, MODEL, [StoredGroup(KVGroup(GroupKind.FULL, BLOCK), (LAYOUT,))])

    def close(self) -> None:
        self.erasures.close()
        self.store.close()


def lease_of(tenant: int, number: int, ttl: float) -> tuple[str, RetentionRecord, list[bytes]]:
    """The record of a lease, its key, and the keys of the blocks."""
    frames = chain(tenant, number)
    keys, root = [one.header.key for one in frames], Scope(b"model", BLOCK, salt_of(tenant)).root()
    lease = RetentionRecord(
        num_tokens=BLOCK * len(keys),
        block_size=BLOCK,
        root=root.hex(),
        keys=b"".join(keys),
        ttl=ttl,
        expires=ttl,
        priority=50,
        clock=clock_id(),
        ends_at=time.monotonic() + ttl,
    )
    return RETENTIONS.key(MODEL[:32], salt_of(tenant).digest.hex(), keys[-1].hex()), lease, keys


class Worker:
    """The process that is recorded. `erased`: how many tenants behind the others an earlier one has erased, before a loss of
    power."""

    def __init__(self, folder: Path, pieces: int, seed: str, erased: int | None) -> None:
        self._folder, self._pieces = folder, pieces
        self._draw = random.Random(seed)
        self._mark = ctypes.CDLL(None).fw_mark
        self._steps = STEPS if erased is None else STEPS_AFTER_A_LOSS
        self._instance = Instance(folder, pieces)
        self._erased = erased or 0

    def say(self, *what: object) -> None:
        self._mark(json.dumps(what).encode())

    def run(self) -> None:
        verbs: dict[Callable[[], None], int] = {
            self._put: 50,
            self._read: 15,
            self._delete: 5,
            self._lease: 8,
            self._release: 3,
            self._erase: 12,
            self._open_again: 2,
        }
        for _ in range(self._steps):
            self._draw.choices(list(verbs), list(verbs.values()))[0]()
        # The power is lost: nothing is closed.
        os._exit(0)

    def _chain(self) -> tuple[int, int]:
        return self._draw.randrange(TENANTS), self._draw.randrange(CHAINS)

    def _put(self) -> None:
        self._instance.store.put(chain(*self._chain()), deadline=soon())

    def _read(self) -> None:
        frames = chain(*self._chain())
        buffers = [memoryview(bytearray(len(one.data))) for one in frames]
        self._instance.store.fetch(names_of(frames), buffers, deadline=soon())

    def _delete(self) -> None:
        frames = chain(*self._chain())
        self._instance.store.delete(names_of(frames[self._draw.randrange(len(frames)) :]), deadline=soon())

    def _lease(self) -> None:
        tenant, number = self._draw.randrange(TENANTS), self._draw.randrange(2)
        self._instance.store.put(chain(tenant, number), deadline=soon())
        key, lease, keys = lease_of(tenant, number, self._draw.choice([500.0, 5000.0]))
        self._instance.records.put(key, lease)
        self._instance.pins.pin(bytes.fromhex(lease.root), keys)

    def _release(self) -> None:
        tenant, number = self._draw.randrange(TENANTS), self._draw.randrange(2)
        key, lease, keys = lease_of(tenant, number, 500.0)
        self._instance.records.remove(key)
        self._instance.pins.unpin(salt_of(tenant).digest.hex(), bytes.fromhex(lease.root), keys)

    def _erase(self) -> None:
        """Store blocks and a lease of a new tenant, and erase it; sometimes while one of the stores fails."""
        tenant = TENANTS + self._erased
        self._erased += 1
        for number in range(self._draw.randint(1, 3)):
            self._instance.store.put(chain(tenant, number), deadline=soon())
        self._instance.records.put(*lease_of(tenant, 0, 5000.0)[:2])
        for _ in range(self._draw.choice([0, 0, 3])):
            self._put()
        fails = self._draw.random() < 0.4
        if fails:
            self._draw.choice(self._instance.flaky).inject("fail", 1.0)
        self.say("erasing", tenant, False)
        name, receipt = self._instance.erasures.erase([salt_of(tenant)])
        self.say("erased", tenant, receipt.complete)
        if fails:
            for _ in range(self._draw.choice([0, 3])):
                self._put()
            for flaky in self._instance.flaky:
                flaky.inject("fail", 0.0)
            for tier in self._instance.store.tiers:
                tier.breaker.succeeded()
            limit = time.monotonic() + SETTLED
            while self._draw.random() < 0.9 and (one := self._instance.erasures.get(name)) and one.tiers:
                assert time.monotonic() < limit, "an erasure stays open"
                time.sleep(0.01)

    def _open_again(self) -> None:
        self._instance.close()
        self._instance = Instance(self._folder, self._pieces)


@dataclass
class Row:
    """The counts of the states of one kind of store."""

    label: str
    states: int = 0
    served: int = 0
    refused: int = 0
    wrong: int = 0
    missed: int = 0
    known: int = 0
    over: int = 0
    came_back: int = 0
    not_ended: int = 0
    unpinned: int = 0
    left: int = 0
    crash: int = 0
    seconds: float = 0.0
    notes: Counter[str] = field(default_factory=Counter)
    kept: list[Path] = field(default_factory=list)

    @property
    def faults(self) -> int:
        counts = self.wrong, self.missed, self.known, self.over, self.came_back, self.not_ended, self.unpinned
        return sum(counts) + self.left + self.crash

    @property
    def good(self) -> bool:
        return not self.faults


# Blocks, files and records that a state has are counted without the stores' own code


def blocks_in(folder: Path) -> Iterator[tuple[str, bytes, Path]]:
    """The key, the bytes and the file of each block in a store's folder, whole or not."""
    for path in folder.glob("?" * 32 + "/*/??/*"):
        yield path.name, path.read_bytes(), path
    for path in folder.glob("?" * 32 + "/*/pieces/*"):
        data = path.read_bytes()
        if "." in path.name or len(data) < _PIECE_HEAD.size:
            continue
        _, count, _ = _PIECE_HEAD.unpack_from(data)
        table = data[_PIECE_HEAD.size : _PIECE_HEAD.size + count * _PIECE_ENTRY.size]
        for key, at, length in _PIECE_ENTRY.iter_unpack(table[: len(table) // _PIECE_ENTRY.size * _PIECE_ENTRY.size]):
            if length and at + length <= len(data):
                yield key.hex(), data[at : at + length], path


def bytes_in(folder: Path) -> int:
    return sum(len(data) for _, data, _ in blocks_in(folder))


def files_in(folder: Path) -> list[str]:
    return [os.path.relpath(os.path.join(root, name), folder) for root, _, names in os.walk(folder) for name in names]


class Check:
    """Opens the stores in the folder of one state, uses them, and counts."""

    def __init__(self, row: Row, folder: Path, pieces: int, said: Sequence[Sequence[Any]], draw: random.Random) -> None:
        self._row, self._folder, self._pieces, self._draw = row, folder, pieces, draw
        self._erased = {tenant: complete for verb, tenant, complete in said if verb == "erased"}
        begun = {tenant for verb, tenant, _ in said if verb == "erasing"}
        tenants = range(TENANTS + len(begun) + 1)
        self._chains = {(tenant, number): chain(tenant, number) for tenant in tenants for number in range(CHAINS)}
        self._frames = {one.header.key.hex(): one for frames in self._chains.values() for one in frames}
        # By tenant: keys of blocks that an erasure has deleted, or may have.
        self._gone = {
            tenant: {one.header.key.hex() for number in range(CHAINS) for one in self._chains[tenant, number]}
            for tenant in begun
        }
        self._disks = [folder / "a", folder / "b"]

    def run(self) -> None:
        self._row.came_back += sum(self._back(tenant) for tenant, complete in self._erased.items() if complete)
        whole = [self._whole(folder) for folder in self._disks]
        boot = self._folder / "boot"
        boot.write_text(os.urandom(16).hex())
        machine._clock_id.cache_clear()
        with mock.patch.object(machine, "_BOOT", boot):
            try:
                self._use(whole)
            except Exception as error:  # noqa: BLE001 - every error is a result
                self._row.crash += 1
                self._row.notes[f"{type(error).__name__}: {error}"[:100]] += 1
        machine._clock_id.cache_clear()

    def _back(self, tenant: int) -> int:
        """Files of blocks and of records of a tenant."""
        blocks = sum(key in self._gone[tenant] for folder in self._disks for key, _, _ in blocks_in(folder))
        records = [str(path) for folder in self._disks for path in (folder / "records").rglob("*~")]
        return blocks + sum(salt_of(tenant).digest.hex() in path for path in records)

    def _whole(self, folder: Path) -> set[str]:
        """Keys of the blocks that are whole, of tenants that were not erased."""
        found = {key for key, data, _ in blocks_in(folder) if key in self._frames and data == self._frames[key].data}
        return found.difference(*self._gone.values())

    def _use(self, whole: Sequence[set[str]]) -> None:
        notes = [path for folder in self._disks for path in folder.glob("records/erasures=/*~")]
        self._row.notes["notes found"] += len(notes)
        instance = Instance(self._folder, self._pieces)
        try:
            if self._draw.random() < 0.5:
                self._read_all(instance)
            self._settle(instance)
            for disk, sound in zip(instance.disks, whole, strict=True):
                self._look(disk, sound)
            self._read_all(instance)
            self._complete(instance)
            self._leases(instance)
            self._fill(instance)
            self._erase(instance)
        finally:
            instance.close()

    def _settle(self, instance: Instance) -> None:
        limit = time.monotonic() + SETTLED
        while any(disk.status().notes["scanning"] for disk in instance.disks):
            if time.monotonic() > limit:
                raise TimeoutError("the index does not list the blocks")
            time.sleep(0.01)

    def _read_all(self, instance: Instance) -> None:
        for frames in self._chains.values():
            buffers = [memoryview(bytearray(len(one.data))) for one in frames]
            found = instance.store.fetch(names_of(frames), buffers, deadline=soon())
            for one, block in zip(frames, found, strict=True):
                self._row.served += block is not None
                self._row.wrong += block is not None and block.frame.data != one.data
        self._row.refused += sum(sum(tier.counters.bad.values()) for tier in instance.store.tiers)
        for tier in instance.store.tiers:
            tier.counters.bad.clear()

    def _look(self, disk: DiskStore, sound: set[str]) -> None:
        """Each whole block is found by lookups and by reads, and what is known from memory is so. Erasures that are open go on
        meanwhile, so what is known may be what is there before or after."""
        for frames in self._chains.values():
            names = names_of(frames)
            there = disk.present(names, deadline=soon())
            for one, found, data in zip(frames, there, read(disk, frames), strict=True):
                if one.header.key.hex() in sound and not (found and data == bytes(one.data)):
                    self._row.missed += 1
            known, later = disk.known(names), disk.present(names, deadline=soon())
            for found, told, after in zip(there, known, later, strict=True):
                self._row.known += told is not None and told not in (found, after)
                self._row.notes["known"] += told is not None

    def _complete(self, instance: Instance) -> None:
        """Wait until open erasures are complete. Nothing is there of a tenant whose erasure was answered."""
        limit = time.monotonic() + SETTLED
        while time.monotonic() < limit:
            left = instance.store.records("erasures/", deadline=soon())
            if not left:
                break
            time.sleep(0.02)
        else:
            self._row.notes["notes that stay"] += len(left)
        for tenant, complete in self._erased.items():
            found = self._back(tenant)
            self._row.came_back += found if complete else 0
            self._row.not_ended += 0 if complete else found
            self._row.notes[f"erased, {'complete' if complete else 'open'}"] += 1

    def _leases(self, instance: Instance) -> None:
        """Each lease whose record is there has its pins, and no record is there that was never written."""
        instance.pins.tick()
        written = {}
        for tenant, number in self._chains:
            if number < 2:
                key, lease, _ = lease_of(tenant, number, 500.0)
                written[key] = lease.root, lease.keys
        found = instance.records.scan().values
        for disk in instance.disks:
            pinned = {block.name for block in disk.scan(deadline=soon()) if block.pinned}
            for key, lease in found.items():
                self._row.notes["leases"] += 1
                self._row.wrong += written.get(key) != (lease.root, lease.keys)
                names = StoredGroup(KVGroup(GroupKind.FULL, BLOCK), (LAYOUT,)).names(
                    bytes.fromhex(lease.root), lease.chain
                )
                there = disk.present(names, deadline=soon())
                self._row.unpinned += sum(
                    is_there and name not in pinned for name, is_there in zip(names, there, strict=True)
                )

    def _fill(self, instance: Instance) -> None:
        """Store all chains again, more than fit."""
        for (tenant, _), frames in self._chains.items():
            if tenant not in self._gone:
                for disk in instance.disks:
                    put_all(disk, frames)
        self._row.over += sum(bytes_in(folder) > SIZE for folder in self._disks)
        self._row.over += sum(disk.status().bytes < bytes_in(Path(disk.path)) for disk in instance.disks)
        self._row.wrong += sum(
            data != one.data
            for disk in instance.disks
            for frames in self._chains.values()
            for one, data in zip(frames, read(disk, frames), strict=True)
            if data is not None and self._passes(data, one)
        )

    def _passes(self, data: bytes, one: Frame) -> bool:
        with contextlib.suppress(BadFrame):
            check(memoryview(bytearray(data)), one.name)
            return True
        return False

    def _erase(self, instance: Instance) -> None:
        """Erase all tenants: no file of a block or a record is left, and none that belongs to nothing."""
        salts = [salt_of(tenant) for tenant, number in self._chains if number == 0]
        receipt = instance.erasures.erase(salts)[1]
        self._row.crash += not receipt.complete
        limit = time.monotonic() + SETTLED
        while instance.store.records("erasures/", deadline=soon()) and time.monotonic() < limit:
            time.sleep(0.02)
        for folder in self._disks:
            left = [name for name in files_in(folder) if not name.startswith("writers/") and name not in _OF_A_STORE]
            self._row.left += len(left)
            for name in left:
                self._row.notes[f"left: {name[:40]}"] += 1


class Campaign:
    """States of stores that keep blocks in one way."""

    def __init__(self, label: str, pieces: int, seed: int, folder: Path) -> None:
        self.row = Row(label)
        self._pieces, self._seed, self._folder = pieces, seed, folder

    def run(self, states: int) -> Row:
        began = time.monotonic()
        library = recorder(self._folder)
        while self.row.states < states:
            number = self.row.states
            recorded = self._recorded(library, number)
            for state in range(number, min(number + STATES_OF_A_RECORD, states)):
                self._state(library, recorded, random.Random(f"{self._seed}/{self.row.label}/{state}"))
        self.row.seconds = time.monotonic() - began
        return self.row

    def _recorded(self, library: Path, number: int) -> Recorded:
        with tempfile.TemporaryDirectory(dir=self._folder) as made:
            folder = Path(made) / "stores"
            folder.mkdir()
            program = [__file__, "--record", str(folder), str(self._pieces), f"{self._seed}/{number}"]
            return Recorded(str(folder), record(folder, program, library, Path(made) / "log"))

    def _state(self, library: Path, recorded: Recorded, draw: random.Random) -> None:
        self.row.states += 1
        at = draw.randint(recorded.count // 8, recorded.count)
        with tempfile.TemporaryDirectory(dir=self._folder) as made:
            folder = Path(made) / "stores"
            what = recorded.write_state(at, folder, draw)
            said = [json.loads(text) for number, text in recorded.marks if number < at]
            if self.row.states % 2 == 0:
                shutil.copytree(folder, again := Path(made) / "again")
                self._lose_again(library, again, said, draw, what)
            self._check(folder, said, draw, what)

    def _lose_again(self, library: Path, folder: Path, said: list[Any], draw: random.Random, what: str) -> None:
        """Another process goes on with the stores of a state, until the power is lost again."""
        before, erased = Recorded.files(folder), sum(verb == "erasing" for verb, *_ in said)
        program = [__file__, "--record", str(folder), str(self._pieces), str(draw.random()), str(erased)]
        recorded = Recorded(str(folder), record(folder, program, library, folder.with_name("log")), before)
        at = draw.choice([draw.randint(0, recorded.count), draw.randint(0, recorded.count // 8)])
        what += f", then {recorded.write_state(at, state := folder.with_name('second'), draw)}"
        said = said + [json.loads(text) for number, text in recorded.marks if number < at]
        self.row.notes["second losses"] += 1
        self._check(state, said, draw, what)

    def _check(self, folder: Path, said: list[Any], draw: random.Random, what: str) -> None:
        before, kept = self.row.faults, folder.with_name("kept")
        shutil.copytree(folder, kept)
        facts = {"pieces": self._pieces, "said": said, "what": what}
        Check(self.row, folder, self._pieces, said, draw).run()
        if self.row.faults > before:
            place = Path(tempfile.mkdtemp(prefix=f"foreword-power-loss-{self._seed}-{self.row.label}-"))
            shutil.copytree(kept, place / "stores")
            (place / "facts.json").write_text(json.dumps(facts), encoding="utf-8")
            self.row.kept.append(place)
            self.row.notes[f"state {self.row.states - 1}, {what}: {place}"] += 1
        shutil.rmtree(kept)


def replay(place: Path) -> Row:
    """The counts of a state that was kept, on a copy of it."""
    facts = json.loads((place / "facts.json").read_text(encoding="utf-8"))
    row = Row("replayed", 1)
    with scratch_folder() as folder:
        shutil.copytree(place / "stores", folder / "stores")
        Check(row, folder / "stores", facts["pieces"], facts["said"], random.Random(0)).run()
    return row


def run(states: int, seed: int, only: Sequence[str] = (), report: Callable[[Row], None] = lambda _: None) -> list[Row]:
    """The campaign: this number of states of stores with a file for each block, and of stores with pieces."""
    rows = []
    with scratch_folder() as folder:
        for label, pieces in (("files", 0), ("pieces", PIECES)):
            if not only or label in only:
                rows.append(Campaign(label, pieces, seed, folder).run(states))
                report(rows[-1])
    return rows


HEAD = (
    "blocks in",
    "states",
    "served",
    "refused",
    "wrong",
    "missed",
    "known",
    "over",
    "came back",
    "not ended",
    "unpinned",
    "left",
    "crash",
    "seconds",
)


def cells(row: Row) -> list[str]:
    numbers = (
        row.states,
        row.served,
        row.refused,
        row.wrong,
        row.missed,
        row.known,
        row.over,
        row.came_back,
        row.not_ended,
        row.unpinned,
        row.left,
        row.crash,
    )
    return [row.label, *(f"{number:,}" for number in numbers), f"{row.seconds:.0f}"]


def main() -> int:
    if sys.argv[1:2] == ["--record"]:
        folder, pieces, seed, *erased = sys.argv[2:]
        with tempfile.NamedTemporaryFile("w") as boot:
            boot.write(os.urandom(16).hex())
            boot.flush()
            with mock.patch.object(machine, "_BOOT", Path(boot.name)):
                Worker(Path(folder), int(pieces), seed, int(erased[0]) if erased else None).run()
    if sys.argv[1:2] == ["--replay"]:
        row = replay(Path(sys.argv[2]))
        print(f"{row.faults} faults: {row}")
        return int(not row.good)
    rows, notes = print_campaign(__doc__, "states", 24, HEAD, run, cells)
    for row in rows if notes else ():
        print(f"\n{row.label}: {dict(row.notes)}")
    return int(not all(row.good for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
