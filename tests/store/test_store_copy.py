"""`foreword copy`: the contents of a store into another one, verified, and continued after a kill."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from servers import CountingProxy, FaultyWire, RedisServer, S3Server
from typer.testing import CliRunner

from foreword.cli import main as cli
from foreword.conformance import make_frames, names_of, read, soon, whole
from foreword.errors import StoreConfigError, StoreFull
from foreword.prefixes.open_erasures import ERASURES, ErasureRecord
from foreword.prefixes.store_copy import StoreCopy, copy_store
from foreword.store.base import FAILED, UNREADABLE, Store, StoredBlock
from foreword.store.frame import Frame
from foreword.store.memory.memory_store import MemoryStore
from foreword.store.sealing import KeyRing
from foreword.store.tier import StoreTier
from foreword.store.tiered import TieredStore
from foreword.store.urls import open_store
from foreword.store_config import StoreConfig

ANN, BOB = b"a" * 32, b"b" * 32
PAYLOAD = 1000
RECORD = json.dumps({"model": "m"}).encode()


def chains(seed: int) -> list[Frame]:
    """Chains of two tenants, longer than a batch, with branches."""
    draw = random.Random(seed)
    found: list[Frame] = []
    for number in range(6):
        trunk = make_frames(seed + number, draw.randrange(1, 150), PAYLOAD, root=draw.choice((ANN, BOB)))
        found += trunk
        for branch in range(3):
            at = draw.choice(trunk)
            root = ANN if at.header.root == ANN[:16] else BOB
            found += make_frames(1000 + 10 * number + branch, draw.randrange(1, 20), PAYLOAD, root=root, after=at)
    return found


def fill(store: Store, frames: list[Frame]) -> None:
    """Each chain in its order, records, and a pin."""
    assert store.put(frames, deadline=soon()) == len(frames)
    assert store.pin(names_of(frames[:5]), deadline=soon()) == 5
    store.put_record("layouts/one", RECORD, deadline=soon())
    store.put_record(f"prefixes/m/{ANN[:16].hex()}/style", RECORD, deadline=soon())


@pytest.fixture
def closed() -> Iterator[Callable[[Callable[[], object]], object]]:
    """Takes what is called when a test ends."""
    with ExitStack() as stack:
        yield stack.callback


@pytest.fixture
def opened(closed: Callable[[Callable[[], object]], object]) -> Callable[[str], TieredStore]:
    def store(url: str) -> TieredStore:
        made = open_store([url])
        closed(made.close)
        return made

    return store


def tier(store: TieredStore) -> StoreTier:
    return store.tiers[0]


def memory(size: int = 1 << 24) -> TieredStore:
    return TieredStore([MemoryStore(size=size)])


@pytest.mark.parametrize("kind", ["disk", "file", "redis"])
def test_every_block_hits_in_the_copy(
    kind: str,
    tmp_path: Path,
    opened: Callable[[str], TieredStore],
    closed: Callable[[Callable[[], object]], object],
) -> None:
    """From a disk to another one, to an object store and to Redis: every block is found and has its bytes, chain by chain;
    records and pins are there. A second copy finds all of them there. Back again it is the same."""
    url = f"disk://{tmp_path}/new?size=64MiB" if kind == "disk" else f"file://{tmp_path}/new?chunk=8"
    if kind == "redis":
        if shutil.which("redis-server") is None:
            pytest.skip("needs redis-server")
        server = RedisServer(tmp_path / "redis")
        closed(server.kill)
        url = f"redis://127.0.0.1:{server.port}/0"
    frames = chains(1)
    source = opened(f"disk://{tmp_path}/old?size=64MiB")
    fill(source.tiers[0].store, frames)
    target = opened(url)
    seen: list[tuple[int, int]] = []
    done = copy_store(tier(source), tier(target), lambda count, blocks: seen.append((count, blocks)))
    assert done.complete and (done.blocks, done.present, done.records) == (len(frames), 0, 2)
    assert seen[-1] == (len(frames), len(frames)) and seen == sorted(seen)
    assert done.unpinned == 0  # an object store evicts nothing
    again = copy_store(tier(source), tier(target))
    assert again.complete and (again.blocks, again.present, again.records) == (0, len(frames), 2)
    # A fresh process, and the way back.
    fresh, back = opened(url), opened(f"disk://{tmp_path}/back?size=64MiB")
    assert copy_store(tier(fresh), tier(back)).blocks == len(frames)
    assert read(back.tiers[0].store, frames) == whole(frames)
    found = {block.name: block for block in target.tiers[0].store.scan(deadline=soon())}
    assert {*found} == {*names_of(frames)}
    if kind == "disk":
        assert [one.pinned for one in map(found.__getitem__, names_of(frames))] == [True] * 5 + [False] * (
            len(frames) - 5
        )
    for key in ("layouts/one", f"prefixes/m/{ANN[:16].hex()}/style"):
        assert back.tiers[0].store.get_record(key, deadline=soon()) == RECORD


_KILLED = """
import os, signal, sys
from contextlib import closing
from foreword.prefixes.store_copy import copy_store
from foreword.store.urls import open_store
source, target, most = sys.argv[1:]
batches = 0
def progress(done, blocks):
    global batches
    batches += 1
    if batches == int(most):
        os.kill(os.getpid(), signal.SIGKILL)
with closing(open_store([source])) as old, closing(open_store([target])) as new:
    print(copy_store(old.tiers[0], new.tiers[0], progress).complete)
"""


def test_killed_twice_and_continued(tmp_path: Path, opened: Callable[[str], TieredStore]) -> None:
    """A copy that is killed twice in its middle is continued by the same call: it copies the rest and no block twice, and every
    block of the source hits in the target."""
    frames = chains(2)
    urls = [f"disk://{tmp_path}/{name}?size=64MiB" for name in ("old", "new")]
    with closing(open_store([urls[0]])) as source:
        fill(source.tiers[0].store, frames)
    there = [0]
    for most in (4, 7):
        killed = subprocess.run([sys.executable, "-c", _KILLED, *urls, str(most)], capture_output=True, text=True)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        with closing(open_store([urls[1]])) as target:
            there.append(sum(1 for _ in target.tiers[0].store.scan(deadline=soon())))
    assert 0 < there[1] < there[2] < len(frames)
    source, target = opened(urls[0]), opened(urls[1])
    done = copy_store(tier(source), tier(target))
    assert done.complete and (done.present, done.blocks) == (there[2], len(frames) - there[2])
    assert read(target.tiers[0].store, frames) == whole(frames)
    assert all(target.tiers[0].store.present(names_of(frames), deadline=soon()))


def test_damage_is_not_copied() -> None:
    """A damaged block of the source is counted and not copied; one of the target is replaced by the source's."""
    frames = make_frames(3, 20, PAYLOAD)
    source, target = memory(), memory()
    torn = [memoryview(bytearray(one.data)) for one in (frames[4], frames[7])]
    for one in torn:
        one[10] ^= 1
    bad = [Frame(frames[4].header, torn[0]), Frame(frames[7].header, torn[1])]
    source.tiers[0].store.put([*frames[:4], bad[0], *frames[5:]], deadline=soon())
    target.tiers[0].store.put([*frames[:7], bad[1]], deadline=soon())
    target.tiers[0].store.delete([frames[4].name], deadline=soon())
    done = copy_store(tier(source), tier(target))
    assert not done.complete and done.damaged == {"checksum": 1} and done.present == 6
    expected = [None if one is frames[4] else bytes(one.data) for one in frames]
    assert read(target.tiers[0].store, frames) == expected


def test_erasures_hold() -> None:
    """Blocks that an open erasure of either store names are not copied; what is erased in the source while the rest is copied
    is not in the target afterwards, blocks and records."""
    frames = {root: make_frames(4, 150, PAYLOAD, root=root) for root in (ANN, BOB)}
    for place in (0, 1):
        source, target = stores = memory(), memory()
        for root, some in frames.items():
            source.tiers[0].store.put(some, deadline=soon())
            source.put_record(f"prefixes/m/{root[:16].hex()}/x", RECORD, deadline=soon())
        record = ERASURES.encode(ErasureRecord([ANN[:12].hex()], "tenant", ["disk"]))
        stores[place].put_record(ERASURES.key("some"), record, deadline=soon())
        done = copy_store(tier(source), tier(target))
        assert done.complete and (done.blocks, done.erased, done.records) == (150, 151, 1)
        assert not any(target.tiers[0].store.present(names_of(frames[ANN]), deadline=soon()))
        # An erasure that is written while the other tenant is copied again.
        assert target.tiers[0].store.erase(b"", BOB[:16], deadline=soon()) == 150
        target.delete_record(f"prefixes/m/{BOB[:16].hex()}/x", deadline=soon())

        def erase(count: int, blocks: int, store: Store = source.tiers[0].store) -> None:
            store.erase(b"", BOB[:16], deadline=soon())
            store.delete_record(f"prefixes/m/{BOB[:16].hex()}/x", deadline=soon())

        done = copy_store(tier(source), tier(target), erase)
        assert done.removed == 64 and done.records == 0
        assert not any(target.tiers[0].store.present(names_of(frames[BOB]), deadline=soon()))
        assert target.records("prefixes/", deadline=soon()) == []


def test_an_erasure_that_begins_meanwhile_holds() -> None:
    """Blocks named by an erasure that begins while its tenant is copied, and has erased nothing when the copy ends, are not in
    the target; records of no tenant are, and the other tenant's."""
    frames = {root: make_frames(4, 70, PAYLOAD, root=root) for root in (ANN, BOB)}
    source, target = memory(), memory()
    for root, some in frames.items():
        source.tiers[0].store.put(some, deadline=soon())
        source.put_record(f"prefixes/m/{root[:16].hex()}/x", RECORD, deadline=soon())
    source.put_record("layouts/one", RECORD, deadline=soon())

    def begin(count: int, blocks: int) -> None:
        if count == blocks:
            record = ERASURES.encode(ErasureRecord([BOB[:12].hex()], "tenant", ["disk"]))
            source.put_record(ERASURES.key("some"), record, deadline=soon())

    done = copy_store(tier(source), tier(target), begin)
    assert done.removed == 70
    assert not any(target.tiers[0].store.present(names_of(frames[BOB]), deadline=soon()))
    assert all(target.tiers[0].store.present(names_of(frames[ANN]), deadline=soon()))
    assert target.records("prefixes/", deadline=soon()) == [f"prefixes/m/{ANN[:16].hex()}/x"]
    assert target.records("layouts/", deadline=soon()) == ["layouts/one"]


def test_records() -> None:
    """A record that the target has in another version stays there; a damaged one, and those of unknown kinds, open erasures and
    the identity of the folder are not copied."""
    source, target = memory(), memory()
    for key, data in (
        ("layouts/mine", RECORD),
        ("layouts/torn", b'{"model": "m", "checksum": "00"}'),
        ("somebody/else", RECORD),
        ("location/id", b"12"),
        ("namespaces/n", RECORD),
    ):
        source.put_record(key, data, deadline=soon())
    target.put_record("layouts/mine", b'{"model": "newer"}', deadline=soon())
    done = copy_store(tier(source), tier(target))
    assert (done.records, done.kept_records, done.left_records, done.bad_records) == (1, 1, 1, 1)
    assert target.records("", deadline=soon()) == ["layouts/mine", "namespaces/n"]
    assert target.get_record("layouts/mine", deadline=soon()) == b'{"model": "newer"}'


def test_a_target_without_room_is_refused() -> None:
    """A target that is too small is named before anything is written; what it has already does not count twice."""
    frames = make_frames(5, 100, PAYLOAD)
    source, small = memory(), memory(1 << 16)
    source.tiers[0].store.put(frames, deadline=soon())
    with pytest.raises(StoreConfigError, match="give it a larger size="):
        copy_store(tier(source), tier(small))
    assert list(small.tiers[0].store.scan(deadline=soon())) == []
    exact = memory(sum(len(one.data) for one in frames) + (1 << 14))
    assert copy_store(tier(source), tier(exact)) == StoreCopy(blocks=100, bytes=sum(len(one.data) for one in frames))
    assert copy_store(tier(source), tier(exact)).present == 100


def test_sealed_blocks(tmp_path: Path) -> None:
    """Signed blocks are copied by who has the secret, and are signed in the target; without the secret they are counted, and
    not copied, since nothing could verify them."""
    frames = make_frames(6, 10, PAYLOAD)
    keys = KeyRing.of(StoreConfig(integrity_secrets=("1:the first secret of the tests",)))
    url, other = f"disk://{tmp_path}/old?size=8MiB", f"disk://{tmp_path}/new?size=8MiB"
    with closing(open_store([url], keys=keys)) as source:
        source.tiers[0].store.put(frames, deadline=soon())
        with closing(open_store([other], keys=keys)) as target:
            assert copy_store(tier(source), tier(target)).blocks == 10
    for name in ("new", "old"):
        with closing(open_store([f"disk://{tmp_path}/{name}"])) as source:
            done = copy_store(tier(source), tier(memory()))
            assert (done.blocks, done.foreign, done.complete) == (0, 10, False), name


def test_the_command(tmp_path: Path) -> None:
    """`foreword copy` makes the target, prints what it has done, and refuses a source that does not exist, the same place
    twice, and memory."""
    frames = make_frames(7, 10, PAYLOAD)
    with closing(open_store([f"disk://{tmp_path}/old?size=8MiB"])) as source:
        fill(source.tiers[0].store, frames)
    run = CliRunner()
    old, new = f"disk://{tmp_path}/old", f"disk://{tmp_path}/new?size=8MiB"
    first = run.invoke(cli.app, ["copy", old, new], catch_exceptions=False)
    assert first.exit_code == 0 and "10 blocks copied (11.6 KiB), 0 there already; all verified" in first.stdout
    shown = json.loads(run.invoke(cli.app, ["copy", old, new, "--json"]).stdout)
    assert (shown["blocks"], shown["present"], shown["records"], shown["complete"]) == (0, 10, 2, True)
    for arguments in ([f"disk://{tmp_path}/none", new], [old, f"{old}?size=1GiB"], [old, "memory://?size=1GiB"]):
        assert run.invoke(cli.app, ["copy", *arguments]).exit_code != 0, arguments


def run_copy(*arguments: str) -> tuple[int, str, str]:
    """Status, output and errors of `foreword copy`."""
    done = CliRunner().invoke(cli.app, ["copy", *arguments], catch_exceptions=False)
    return done.exit_code, done.stdout, done.stderr


def test_a_source_that_is_late_and_fails(tmp_path: Path, closed: Callable[[Callable[[], object]], object]) -> None:
    """A Redis whose connection stalls once and is cut three times, while it is listed, read, and listed at the end, is asked
    again: all blocks are in the copy, the status is 0, and the store is named where it was late."""
    server = RedisServer(tmp_path / "redis")
    closed(server.kill)
    frames = chains(8)
    with closing(open_store([server.url])) as source:
        source.tiers[0].store.put(frames, deadline=soon())
    wire = FaultyWire(server.port, {5_000: "cut", 400_000: "stall", 600_000: "cut", 1_130_000: "cut"})
    closed(wire.close)
    url, new = f"redis://127.0.0.1:{wire.port}", f"disk://{tmp_path}/new?size=64MiB"
    status, output, errors = run_copy(url, new, "--patience", "10")
    assert wire.left == [], wire.passed
    assert (status, f"{len(frames)} blocks copied" in output) == (0, True), output + errors
    assert f"{url} has not returned " in errors and "they are read again" in errors
    with closing(open_store([new])) as target:
        assert read(target.tiers[0].store, frames) == whole(frames)


def test_a_source_that_goes_away_is_named(tmp_path: Path, closed: Callable[[Callable[[], object]], object]) -> None:
    """When a Redis has gone in the middle, the copy ends within its patience with status 1, names the store and how to go on,
    and keeps its blocks; the same command then copies the rest. One that was never there is not waited for."""
    server = RedisServer(tmp_path / "redis")
    closed(server.kill)
    frames = chains(9)
    with closing(open_store([server.url])) as source:
        source.tiers[0].store.put(frames, deadline=soon())
    wire = FaultyWire(server.port, {400_000: "down"})
    closed(wire.close)
    url, new = f"redis://127.0.0.1:{wire.port}", f"disk://{tmp_path}/new?size=64MiB"
    status, output, errors = run_copy(url, new, "--patience", "1", "--json")
    done = json.loads(output)
    assert (status, done["complete"], wire.left) == (1, False, [])
    assert done["ended"].startswith(f"{url} has failed for 1 s: ") and done["ended"] in errors
    assert f" of {len(frames)} blocks, which stay" in errors and "run the same command" in errors
    assert 0 < done["blocks"] < len(frames) and done["named"] == []
    status, output, errors = run_copy(url, new, "--patience", "100000", "--json")
    assert (status, json.loads(output)["blocks"]) == (1, 0) and url in errors and "before the first block" in errors
    wire.mend()
    status, output, _ = run_copy(url, new, "--json")
    again = json.loads(output)
    assert (status, again["complete"], again["ended"]) == (0, True, "")
    assert (again["present"], again["blocks"]) == (done["blocks"], len(frames) - done["blocks"])


@pytest.mark.slow
def test_a_bucket_that_is_late(tmp_path: Path, closed: Callable[[Callable[[], object]], object]) -> None:
    """A bucket that leaves two writes and a read without an answer gets them again: every block is verified there."""
    server = S3Server(tmp_path / "s3")
    closed(server.kill)
    proxy = CountingProxy(server.port)
    closed(proxy.close)
    ended, left = threading.Event(), Counter({"PUT": 2, "GET": 1})
    closed(ended.set)  # before the proxy is closed, which waits for its requests
    frames = chains(10)[:200]
    old = f"disk://{tmp_path}/old?size=64MiB"
    with closing(open_store([old])) as source:
        source.tiers[0].store.put(frames, deadline=soon())

    def stall(method: str) -> None:
        if proxy.requests > 20 and left[method] > 0:
            left[method] -= 1
            ended.wait(60)

    proxy.before = stall
    new = server.url("/kv").replace(f":{server.port}", f":{proxy.port}")
    status, output, errors = run_copy(old, new, "--patience", "20")
    assert (status, f"{len(frames)} blocks copied" in output, +left) == (0, True, Counter()), output + errors
    assert "s3://blocks/kv: " in errors and "secret" not in errors
    ended.set()
    with closing(open_store([server.url("/kv")])) as target:
        assert read(target.tiers[0].store, frames) == whole(frames)


class Unread(MemoryStore):
    """A store that does not give some of its blocks: each for a number of reads, with a result that says why."""

    def __init__(self, faults: dict[bytes, list[int]]) -> None:
        super().__init__(size=1 << 24)
        self.faults = faults

    def get(self, names: Sequence[bytes], buffers: Sequence[memoryview], *, deadline: float) -> list[int]:
        sizes = super().get(names, buffers, deadline=deadline)
        return [
            self.faults[name].pop() if self.faults.get(name) else size for name, size in zip(names, sizes, strict=True)
        ]


def test_a_block_that_cannot_be_read() -> None:
    """A block that its store does not give at first is read again; those that it never gives are counted and named, once each,
    and all others are copied. A target that does not give one back is told apart."""
    frames = make_frames(11, 20, PAYLOAD)
    late, never, sector, lost = (frames[at].name for at in (3, 9, 12, 15))
    source = TieredStore([Unread({late: [FAILED] * 2, never: [FAILED] * 100, sector: [UNREADABLE]})])
    source.tiers[0].store.put(frames, deadline=soon())
    target = TieredStore([Unread({lost: [FAILED] * 100})])
    done = copy_store(tier(source), tier(target))
    assert (done.blocks, done.unread, done.lost, done.complete, done.ended) == (17, 2, 1, False, "")
    keys = [frames[at].header.key.hex() for at in (9, 12, 15)]
    reasons = ["could not be read"] * 2 + ["the target does not return it as it was written"]
    assert [one.rpartition("/")[2] for one in done.named] == [
        ": ".join(pair) for pair in zip(keys, reasons, strict=True)
    ]


class LateToWrite(MemoryStore):
    """A store whose first call to put writes all frames but the last one, and whose later ones raise, if `full`."""

    def __init__(self, *, full: bool) -> None:
        super().__init__(size=1 << 24)
        self.full, self.puts = full, 0

    def put(self, frames: Sequence[Frame], *, deadline: float) -> int:
        self.puts += 1
        if self.full:
            raise StoreFull("no space is left")
        return super().put(frames[: -1 if self.puts == 1 else None], deadline=deadline)


def test_blocks_that_were_not_written_are_written_again() -> None:
    """A block that a target has not after a write is written once more. A full target ends the copy at once, and is named."""
    frames = make_frames(13, 10, PAYLOAD)
    source = memory()
    source.tiers[0].store.put(frames, deadline=soon())
    late, full = LateToWrite(full=False), LateToWrite(full=True)
    done = copy_store(tier(source), tier(TieredStore([late])))
    assert (done.blocks, done.lost, done.complete, late.puts) == (10, 0, True, 2)
    done = copy_store(tier(source), tier(TieredStore([full])), shown=("old", "new"), patience=1e6)
    assert (done.ended, done.complete, full.puts) == ("new: no space is left", False, 1)


class SlowToList(MemoryStore):
    """A store that may block, whose first listing takes long before its first block."""

    blocking = True

    def __init__(self) -> None:
        super().__init__(size=1 << 24)
        self.listings = 0

    def scan(self, *, deadline: float) -> Iterator[StoredBlock]:
        self.listings += 1
        if self.listings == 1:
            threading.Event().wait(0.5)
        yield from super().scan(deadline=deadline)


def test_a_listing_may_take_as_long_as_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A source that looks through much before its first block, longer than a step of an erasure may take, is not late."""
    monkeypatch.setattr("foreword.prefixes.tier_erasure.STEP_SECONDS", 0.02)
    frames, late = make_frames(14, 10, PAYLOAD), list[str]()
    slow = SlowToList()
    slow.put(frames, deadline=soon())
    done = copy_store(tier(TieredStore([slow])), tier(memory()), late=late.append)
    assert (done.blocks, done.complete, late) == (10, True, [])


def test_a_damaged_block_is_named(tmp_path: Path, closed: Callable[[Callable[[], object]], object]) -> None:
    """The command names a damaged block and its reason, copies all others, and ends with status 1."""
    server = RedisServer(tmp_path / "redis")
    closed(server.kill)
    frames = make_frames(12, 10, PAYLOAD)
    with closing(open_store([server.url])) as source:
        source.tiers[0].store.put(frames, deadline=soon())
    with server.client() as client:
        key = next(one for one in client.keys("*:b:*") if one.endswith(frames[4].name.hex().encode()))
        client.setrange(key, len(frames[4].data) - 1, b"\x55")
    status, output, _ = run_copy(server.url, f"disk://{tmp_path}/new?size=8MiB")
    assert status == 1 and "9 blocks copied" in output
    assert f"/{frames[4].header.key.hex()}: damaged (checksum)" in output and output.count(": damaged") == 1
