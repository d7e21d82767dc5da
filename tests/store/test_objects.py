"""ObjectStore with an S3 server and with folders: the contract, and faults of the service."""

import gc
import itertools
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import boto3  # type: ignore[import-untyped, unused-ignore]
import obstore
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ports import free_port
from processes import in_child
from servers import CountingProxy, HttpServer, S3Server, ScriptedServer, wait_until

from foreword.conformance import StoreContract, StoreMachine, make_frames, names_of, present, read, soon, whole
from foreword.errors import BadFrame, StoreConfigError, StoreError, StoreReadOnly, StoreTimeout, StoreUnavailable
from foreword.prefixes.erasure import erase_prefixes
from foreword.store.base import BAD, MISSING
from foreword.store.frame import check, frame
from foreword.store.memory.memory_store import MemoryStore
from foreword.store.object.chunks import ObjectChunk
from foreword.store.object.client import ClientLoop
from foreword.store.object.object_store import ObjectStore, Renewals
from foreword.store.tiered import TieredStore

_numbers = itertools.count()
_machine_folder = Path()


def fresh() -> str:
    """A prefix that was not used before: an empty store in a shared bucket."""
    return f"test-{next(_numbers)}"


def path_of(folder: Path, name: bytes) -> Path:
    """The chunk that begins with a block."""
    [path] = folder.glob(f"**/{name[32:].hex()[:16]}/*")
    return path


def at(port: int) -> str:
    """The URL of a bucket on a port."""
    return f"s3://blocks?endpoint=http://127.0.0.1:{port}&region=us-east-1&access_key_id=a&secret_access_key=b"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    started = S3Server(tmp_path_factory.mktemp("s3"))
    yield started
    started.kill()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "objects"


@pytest.fixture
def store(folder: Path) -> Iterator[ObjectStore]:
    opened = ObjectStore(f"file://{folder}")
    yield opened
    opened.close()


@pytest.mark.slow
class TestContractOnS3(StoreContract):
    pins = False

    @pytest.fixture
    def prefix(self) -> str:
        return fresh()

    @pytest.fixture
    def store(self, server: S3Server, prefix: str) -> Iterator[ObjectStore]:
        opened = ObjectStore(server.url(), prefix=prefix)
        yield opened
        opened.close()

    @pytest.fixture
    def second(self, server: S3Server, prefix: str) -> Iterator[ObjectStore]:
        opened = ObjectStore(server.url(f"/{prefix}"))
        yield opened
        opened.close()


class TestContractInAFolder(StoreContract):
    pins = False

    @pytest.fixture
    def store(self, folder: Path) -> Iterator[ObjectStore]:
        opened = ObjectStore(f"file://{folder}", prefix="some/where")
        yield opened
        opened.close()

    @pytest.fixture
    def second(self, folder: Path) -> Iterator[ObjectStore]:
        opened = ObjectStore(f"file://{folder}/some", prefix="where")
        yield opened
        opened.close()


class FolderMachine(StoreMachine):
    pins = False

    def make_store(self) -> ObjectStore:
        return ObjectStore(f"file://{_machine_folder}", prefix=fresh())


@pytest.fixture(scope="module")
def machine_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    global _machine_folder
    _machine_folder = tmp_path_factory.mktemp("machine")


@pytest.mark.usefixtures("machine_folder")
class TestMachine(FolderMachine.TestCase):
    settings = settings(max_examples=15, stateful_step_count=15, deadline=None)


def calls_of(store: ObjectStore, seconds: float) -> dict[str, Callable[[], object]]:
    """Every call that sends a request, with a deadline in the given number of seconds."""
    frames = make_frames(1, 2, 1000)
    names = names_of(frames)

    def then() -> float:
        return time.monotonic() + seconds

    return {
        "lookup": lambda: store.lookup(names, deadline=then()),
        "get": lambda: store.get(names, [memoryview(bytearray(2000)) for _ in names], deadline=then()),
        "put": lambda: store.put(frames, deadline=then()),
        "delete": lambda: store.delete(names, deadline=then()),
        "pin": lambda: store.pin(names, deadline=then()),
        "scan": lambda: list(store.scan(deadline=then())),
        "put_record": lambda: store.put_record("key", b"data", deadline=then()),
        "get_record": lambda: store.get_record("key", deadline=then()),
        "delete_record": lambda: store.delete_record("key", deadline=then()),
        "records": lambda: store.records("", deadline=then()),
    }


@pytest.mark.parametrize("size", [0, 1, 65_537, 7 << 20])
def test_blocks_of_any_size(server: S3Server, size: int):
    """Blocks of any size come back intact, also ones larger than a part of a multipart upload."""
    store = ObjectStore(server.url(), prefix=fresh())
    frames = make_frames(2, 2, size)
    assert store.put(frames, deadline=soon()) == 2
    assert read(store, frames) == whole(frames)
    store.close()


def test_of_two_writers_one_wins(server: S3Server):
    """Stores that concurrently write different bytes under one name leave one of them, intact."""
    prefix = fresh()
    stores = [ObjectStore(server.url(), prefix=prefix) for _ in range(2)]
    [first] = make_frames(3, 1, 100_000)
    other = frame(first.header, bytes(100_000))
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(s.put, [f], deadline=soon()) for s, f in zip(stores, (first, other), strict=True)]:
            assert done.result() == 1
    [kept] = read(stores[0], [first])
    assert kept in (bytes(first.data), bytes(other.data))
    assert stores[0].put([other], deadline=soon()) == stores[1].put([first], deadline=soon()) == 1
    assert read(stores[1], [first]) == [kept]
    assert stores[0].status().notes["conditional_put"] == 1
    for store in stores:
        store.close()


def test_a_service_without_conditional_put(server: S3Server):
    """If the service has no conditional PUT, blocks are written without it."""
    store = ObjectStore(server.url(), prefix=fresh(), conditional_put="disabled")
    frames = make_frames(4, 3, 1000)
    assert store.put(frames, deadline=soon()) == 3 and read(store, frames) == whole(frames)
    assert store.status().notes["conditional_put"] == 0
    assert store.put(frames, deadline=soon()) == 3
    store.close()


def test_a_service_that_rejects_conditional_put():
    """After a service has replied 501 to a conditional PUT, only plain ones are sent."""
    conditional: list[bool] = []

    def status(request: BaseHTTPRequestHandler) -> int:
        if request.command != "PUT":
            return 200
        conditional.append("If-None-Match" in request.headers)
        return 501 if conditional[-1] else 200

    server = HttpServer(status, _NO_OBJECTS)
    store = ObjectStore(at(server.port), parallel=1)
    assert store.put(make_frames(16, 1, 1000), deadline=soon()) == 1
    seen = len(conditional)
    assert conditional[0] and not conditional[-1]
    assert store.put(make_frames(17, 40, 100), deadline=soon()) == 40
    assert conditional[seen:] == [False, False]
    store.close()
    server.close()


_NO_OBJECTS = (
    b'<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Name>blocks</Name><KeyCount>0</KeyCount>'
    b"<MaxKeys>1000</MaxKeys><IsTruncated>false</IsTruncated></ListBucketResult>"
)


@settings(max_examples=15, deadline=None)
@given(length=st.integers(0, 600), there=st.integers(0, 600), seed=st.integers(0, 1000))
def test_lookup_finds_the_end_of_any_chain(
    tmp_path_factory: pytest.TempPathFactory, length: int, there: int, seed: int
):
    """A store that has written nothing finds all blocks that several others have written, each a part of the chain."""
    folder = tmp_path_factory.mktemp("chain")
    draw = random.Random(seed)
    writers = [ObjectStore(f"file://{folder}", chunk=chunk) for chunk in (1, 3, 32)]
    at = 0
    while at < min(there, 600):
        batch = _CHAIN[at : min(at + draw.randint(1, 90), there)]
        assert draw.choice(writers).put(batch, deadline=soon()) == len(batch)
        at += len(batch)
    reader = ObjectStore(f"file://{folder}")
    names = names_of(_CHAIN[:length])
    assert reader.lookup(names, deadline=soon()) == min(length, there)
    assert read(reader, _CHAIN[:length]) == [*whole(_CHAIN[: min(length, there)]), *[None] * max(length - there, 0)]
    for store in (*writers, reader):
        store.close()


_CHAIN = make_frames(5, 600, 1)


def test_blocks_behind_those_of_a_faster_tier_are_found(folder: Path):
    """A store that has written nothing finds the rest of a chain whose first blocks are in memory or on the device."""
    writer = ObjectStore(f"file://{folder}")
    layouts = [make_frames(5, 200, 1, layout=bytes([number]) * 16) for number in range(2)]
    for frames in layouts:
        for at in range(0, 200, 30):
            writer.put(frames[at : at + 30], deadline=soon())
    writer.close()
    names = [frame.name for pair in zip(*layouts, strict=True) for frame in pair]
    for first in (2, 50, 130, 260, 398):
        tiers = TieredStore([MemoryStore(1 << 20), ObjectStore(f"file://{folder}")])
        tiers.tiers[0].put([frame for frames in layouts for frame in frames[: first // 2]], soon())
        assert tiers.locate(names, deadline=soon()) == [0] * first + [1] * (400 - first)
        tiers.close()
        held = TieredStore([ObjectStore(f"file://{folder}")])
        assert held.find(names[first:], deadline=soon(), before=names[:first]) == [0] * (400 - first)
        held.close()


_WRITING = """
import itertools, sys
from foreword.conformance import make_frames, soon
from foreword.store.object.object_store import ObjectStore
store = ObjectStore(sys.argv[1])
for seed in itertools.count():
    store.put(make_frames(seed, 1, 24 << 20), deadline=soon())
"""


def test_an_erasure_of_a_folder_removes_what_killed_writers_left(folder: Path):
    """A process is killed while it writes an object or a record into a folder. An erasure leaves nothing of it, nor an empty
    folder of the root, and all of another root."""
    store = ObjectStore(f"file://{folder}")
    mine, theirs = make_frames(1, 1, 10)[0], make_frames(1, 3, 10, root=b"other" * 7)
    store.put(theirs, deadline=soon())

    def leftovers() -> list[Path]:
        return list(folder.rglob("*#*"))

    for _ in range(20):
        child = subprocess.Popen([sys.executable, "-c", _WRITING, f"file://{folder}"])
        wait_until(lambda: bool(leftovers()), "an object that is being written")
        child.kill()
        child.wait()
        if leftovers():
            break
    assert leftovers()
    other = theirs[0].header.root.hex()
    for number, root in enumerate((mine.header.root.hex(), other)):
        store.put_record(f"prefixes/model/{root}/p", b"a text", deadline=soon())
        record = folder / "records" / f"prefixes!model!{root}!p.record"
        record.rename(f"{record}#{number}")
    store.erase(root=mine.header.root, deadline=soon())
    assert not [path for path in folder.rglob("*") if mine.header.root.hex() in str(path)]
    assert read(store, theirs) == whole(theirs) and [path.name.split("!")[2] for path in leftovers()] == [other]
    store.close()


def test_branches_share_the_blocks_of_their_common_prefix(store: ObjectStore, folder: Path):
    """A chain that branches off within a chunk is stored from the branch on, and read from both chunks."""
    trunk = make_frames(20, 20, 700)
    branch = make_frames(21, 20, 700, after=trunk[9])
    store.put(trunk, deadline=soon())
    stored = sum(path.stat().st_size for path in folder.glob("**/*") if path.is_file())
    store.put([*trunk[:10], *branch], deadline=soon())
    added = sum(path.stat().st_size for path in folder.glob("**/*") if path.is_file()) - stored
    assert added < 20 * (700 + 300)
    other = ObjectStore(f"file://{folder}")
    assert other.lookup(names_of([*trunk[:10], *branch]), deadline=soon()) == 30
    assert read(other, [*trunk[:10], *branch]) == whole([*trunk[:10], *branch])
    other.close()


def test_a_first_block_that_a_listing_does_not_show(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """A lookup finds a chain whose first block is not in the part of its section that a listing shows, whatever its order."""
    monkeypatch.setattr("foreword.store.object.bucket._PAGE", 1)
    writer, reader = (ObjectStore(f"file://{folder}") for _ in range(2))
    for section in range(6):
        [first] = make_frames(section, 1, 10)
        branches = [make_frames(50 * section + 100 + number, 1, 10, after=first)[0] for number in range(20)]
        writer.put([first], deadline=soon())
        writer.put(branches, deadline=soon())
        assert all(reader.lookup([first.name, one.name], deadline=soon()) == 2 for one in branches)
    for store in (reader, writer):
        store.close()


@pytest.mark.extended
def test_a_section_with_more_chunks_than_a_listing_shows(folder: Path):
    """Chunks are found although a thousand other chains branch off in the same section."""
    [first] = make_frames(22, 1, 10)
    writer = ObjectStore(f"file://{folder}")
    writer.put([first], deadline=soon())
    branches = [make_frames(100 + number, 1, 10, after=first)[0] for number in range(1100)]
    for at in range(0, 1100, 100):
        writer.put(branches[at : at + 100], deadline=soon())
    reader = ObjectStore(f"file://{folder}")
    assert all(reader.lookup([first.name, one.name], deadline=soon()) == 2 for one in branches[::50])
    for store in (reader, writer):
        store.close()


def test_deleting_a_part_of_a_chunk(store: ObjectStore, folder: Path):
    """The other blocks of a chunk stay, and nothing of the deleted ones is left in the folder."""
    frames = make_frames(23, 20, 700)
    store.put(frames, deadline=soon())
    assert store.delete(names_of(frames[5:9]), deadline=soon()) == 4
    other = ObjectStore(f"file://{folder}")
    assert read(other, frames[:9]) == [*whole(frames[:5]), *[None] * 4]
    assert present(store, frames) == [number not in range(5, 9) for number in range(20)]
    left = b"".join(path.read_bytes() for path in folder.glob("**/*") if path.is_file())
    assert all((bytes(one.payload) in left) == (number not in range(5, 9)) for number, one in enumerate(frames))
    other.close()


def test_incomplete_objects(folder: Path):
    """A damaged, empty or longer object is BAD, one that is gone is MISSING, others are intact. put heals all."""
    store = ObjectStore(f"file://{folder}", chunk=1)
    frames = make_frames(6, 6, 5000)
    size = len(frames[0].data)
    store.put(frames, deadline=soon())
    paths = [path_of(folder, one.name) for one in frames]
    data = paths[0].read_bytes()
    paths[0].write_bytes(data[:2000])
    paths[1].write_bytes(b"")
    paths[2].write_bytes(paths[2].read_bytes() + b"x")
    paths[3].unlink()
    paths[4].write_bytes(data[:76] + bytes(8) + data[84:])
    for reader in (store, ObjectStore(f"file://{folder}")):
        buffers = [memoryview(bytearray(size)) for _ in frames]
        lengths = reader.get(names_of(frames), buffers, deadline=soon())
        assert lengths[1] == lengths[4] == BAD and lengths[3] == MISSING and lengths[5] == size
        assert lengths[0] in (BAD, 2000 - 84) and lengths[2] in (BAD, size)
        for buffer, one, length in zip(buffers, frames, lengths, strict=True):
            with suppress(BadFrame):
                assert length <= 0 or check(buffer[:length], one.name).data == one.data
    store.delete(names_of(frames[4:5]), deadline=soon())
    assert store.put(frames, deadline=soon()) == 6
    assert read(store, frames) == whole(frames)
    store.close()


def test_an_object_that_becomes_longer(store: ObjectStore, folder: Path):
    """An object that grows by whole slots' worth of bytes, while the store knows its old size, heals with the next put."""
    frames = make_frames(7, 3, 1000)
    store.put(frames, deadline=soon())
    assert read(store, frames) == whole(frames)
    [path] = [path for path in folder.rglob("*") if path.is_file()]
    path.write_bytes(path.read_bytes() + bytes(3 * 225))
    assert read(store, frames) == [None] * 3
    assert store.put(frames, deadline=soon()) == 3
    assert read(store, frames) == whole(frames)


def test_an_object_that_becomes_empty(server: S3Server):
    """An object that another program empties is BAD for a store that knows it as whole; put heals it."""
    store = ObjectStore(server.url(), prefix=fresh(), chunk=1)
    frames = make_frames(8, 3, 500)
    store.put(frames, deadline=soon())
    assert read(store, frames) == whole(frames)
    client = boto3.client(
        "s3",
        endpoint_url=f"http://127.0.0.1:{server.port}",
        region_name="us-east-1",
        aws_access_key_id="tests",
        aws_secret_access_key="tests",
    )
    key = next(
        one["Key"]
        for one in client.list_objects_v2(Bucket=server.bucket)["Contents"]
        if frames[1].header.key.hex()[:16] in one["Key"].split("/")
    )
    client.put_object(Bucket=server.bucket, Key=key, Body=b"")
    buffers = [memoryview(bytearray(len(one.data))) for one in frames]
    assert store.get(names_of(frames), buffers, deadline=soon()) == [len(frames[0].data), BAD, len(frames[2].data)]
    assert store.put(frames, deadline=soon()) == 3
    assert read(store, frames) == whole(frames)
    store.close()


@pytest.fixture
def proxy(server: S3Server) -> Iterator[CountingProxy]:
    opened = CountingProxy(server.port)
    yield opened
    opened.close()


def client_of(server: S3Server) -> Any:
    keys = {"aws_access_key_id": "tests", "aws_secret_access_key": "tests", "region_name": "us-east-1"}
    return boto3.client("s3", endpoint_url=f"http://127.0.0.1:{server.port}", **keys)


def paths_in(server: S3Server, prefix: str) -> list[str]:
    found = client_of(server).list_objects_v2(Bucket=server.bucket, Prefix=f"{prefix}/")
    return [one["Key"] for one in found.get("Contents", [])]


def damage(server: S3Server, path: str, at: int) -> None:
    """Change a byte of an object, which may be counted from its end."""
    data = bytearray(client_of(server).get_object(Bucket=server.bucket, Key=path)["Body"].read())
    data[at] ^= 1
    client_of(server).put_object(Bucket=server.bucket, Key=path, Body=bytes(data))


def hold_writes(proxy: CountingProxy) -> tuple[threading.Event, threading.Event]:
    """From now on writes wait. Returns an event that the first one sets, and one that they wait for."""
    reached, held = threading.Event(), threading.Event()

    def hold(method: str) -> None:
        if method == "PUT":
            reached.set()
            held.wait(60)

    proxy.before = hold
    return reached, held


def test_short_answers_prove_nothing(server: S3Server, proxy: CountingProxy):
    """A service that gives fewer bytes than it has fails: nothing is deleted, neither what was read nor what lies beside it."""
    prefix, frames = fresh(), make_frames(31, 12, 700)
    store = TieredStore([ObjectStore(at(proxy.port), prefix=prefix)])
    store.put(frames, deadline=soon())
    before = paths_in(server, prefix)
    proxy.change = lambda method, path, data: data if method != "GET" or "list-type" in path else data[: len(data) // 2]
    for _ in range(2):
        assert read(store, frames[3:5]) == [None, None]
        assert store.lookup(names_of(frames), deadline=soon()) == 12
    assert store.tiers[0].counters.errors and not store.tiers[0].counters.bad
    proxy.change = lambda method, path, data: data
    assert paths_in(server, prefix) == before
    assert read(ObjectStore(server.url(), prefix=prefix), frames[:1]) == whole(frames[:1])
    store.close()


@pytest.mark.parametrize("kind", ["new", "copies"])
def test_an_erasure_waits_for_writes(
    server: S3Server, proxy: CountingProxy, monkeypatch: pytest.MonkeyPatch, kind: str
):
    """Writes that a service completes only after its caller has given up, of blocks that are stored and copies of those beside
    a damaged one, leave nothing after a complete erasure. Until then the erasure is open."""
    prefix, frames = fresh(), make_frames(32, 6, 700)
    store = ObjectStore(at(proxy.port), prefix=prefix)
    tiered = TieredStore([store])
    if kind == "copies":
        store.put(frames, deadline=soon())
        damage(server, paths_in(server, prefix)[0], -100)
        assert store.lookup(names_of(frames), deadline=soon()) == 6
    reached, held = hold_writes(proxy)
    with ThreadPoolExecutor(1) as pool:
        call = partial(read, tiered, frames) if kind == "copies" else partial(tiered.put, frames, deadline=soon(1))
        begun = pool.submit(call)
        assert reached.wait(60)
        begun.result()
        monkeypatch.setattr("foreword.store.base.STEP_SECONDS", 0.3)
        root = frames[0].header.root
        assert not erase_prefixes(tiered, [root], "a tenant").complete
        held.set()
        wait_until(lambda: erase_prefixes(tiered, [root], "a tenant").complete, "the write ends")
    assert not paths_in(server, prefix)
    tiered.close()


def test_a_write_that_fails_after_it_was_given_up(caplog: pytest.LogCaptureFixture):
    """A write that fails after it was given up is an erasure's business only: it is no error in the log."""
    held, ended = threading.Event(), threading.Event()

    def refuse(request: BaseHTTPRequestHandler) -> int:
        if request.command != "PUT":
            return 404
        held.wait(60)
        ended.set()
        return 403

    server = HttpServer(refuse)
    store = ObjectStore(at(server.port))
    frames = make_frames(38, 2, 500)
    with pytest.raises(StoreTimeout):
        store.put(frames, deadline=soon(1))
    held.set()
    assert ended.wait(60)
    list(store.erase_steps(b"", frames[0].header.root, deadline=soon()))  # waits for its end
    gc.collect()
    store.close()
    server.close()
    assert not caplog.records


# Blocks of one chunk that instances delete at once: different ones, adjacent ones, the same, some of them the same.
AT_ONCE = ([(1,), (5,)], [(3,), (4,)], [(2,), (2,)], [(1, 2, 6), (2, 3)], [(0,), (7,), (3, 4)])


@pytest.mark.parametrize("service", ["folder", "s3"])
@pytest.mark.parametrize("rounds", [10, pytest.param(200, marks=pytest.mark.slow)])
def test_instances_delete_from_one_chunk_at_once(
    service: str, rounds: int, folder: Path, request: pytest.FixtureRequest
) -> None:
    """Blocks that instances delete at the same time are gone when their calls have returned, and all other blocks are there."""
    url = f"file://{folder}" if service == "folder" else request.getfixturevalue("server").url()
    for number in range(rounds):
        prefix, frames, parts = fresh(), make_frames(number, 8, 500), AT_ONCE[number % len(AT_ONCE)]
        stores = [ObjectStore(url, prefix=prefix) for _ in range(len(parts) + 1)]
        assert stores[0].put(frames, deadline=soon()) == 8
        gate = threading.Barrier(len(parts))

        def delete(store: ObjectStore, places: Sequence[int], frames=frames, gate=gate) -> int:
            names = [frames[place].name for place in places]
            store.present(names_of(frames), deadline=soon())  # so it knows the section
            gate.wait()
            return store.delete(names, deadline=soon())

        with ThreadPoolExecutor(len(parts)) as pool:
            counts = list(pool.map(delete, stores, parts))
        assert all(count <= len(places) for count, places in zip(counts, parts, strict=True))
        gone = {place for places in parts for place in places}
        expected = [None if place in gone else bytes(one.data) for place, one in enumerate(frames)]
        assert sum(counts) >= len(gone)
        assert read(stores[-1], frames) == expected
        listed = {name for page in stores[-1].list_names(deadline=soon()) for name in page}
        assert listed == {one.name for place, one in enumerate(frames) if place not in gone}
        for store in stores:
            store.close()


def test_copies_of_what_another_instance_has_erased(server: S3Server, proxy: CountingProxy):
    """An instance copies the blocks beside a deleted one while another erases their tenant: the copies go, too."""
    prefix, frames = fresh(), make_frames(33, 6, 700)
    one, other = ObjectStore(at(proxy.port), prefix=prefix), ObjectStore(server.url(), prefix=prefix)
    one.put(frames, deadline=soon())
    reached, held = hold_writes(proxy)
    with ThreadPoolExecutor(1) as pool:
        begun = pool.submit(one.delete, names_of(frames[2:3]), deadline=soon())
        assert reached.wait(60)
        assert other.erase(b"", frames[0].header.root, deadline=soon()) == 6
        held.set()
        begun.result()
    assert not paths_in(server, prefix)
    one.close()
    other.close()


def test_blocks_beside_one_of_another_length(store: ObjectStore, folder: Path):
    """An instance with another codec stores the first blocks of a chunk again: the others stay."""
    frames = make_frames(34, 10, 700)
    store.put(frames, deadline=soon())
    longer = [frame(replace(one.header, length=900, raw_length=900), bytes(900)) for one in frames[:3]]
    assert store.put(longer, deadline=soon()) == 3
    assert read(ObjectStore(f"file://{folder}"), [*longer, *frames[3:]]) == whole([*longer, *frames[3:]])


def test_a_chunk_whose_index_is_damaged(server: S3Server):
    """Its blocks can be found and read, but not listed: an erasure of some blocks of its tenant takes all of it. A tenant's
    erasure does, too."""
    prefix = fresh()
    frames, theirs = make_frames(35, 6, 700), make_frames(36, 6, 700)
    store = ObjectStore(server.url(), prefix=prefix)
    store.put(frames, deadline=soon())
    damage(server, paths_in(server, prefix)[0], 76 * 5)
    store.put(theirs, deadline=soon())
    assert read(store, frames) == whole(frames)
    steps = store.erase_steps(b"", frames[0].header.root, chosen={frames[5].name}, deadline=soon())
    assert sum(step.removed for step in steps) == 6
    assert read(store, frames) == [None] * 6 and read(store, theirs) == whole(theirs)
    store.close()


def test_a_bucket_that_keeps_versions(server: S3Server):
    """An erasure in a bucket with versioning is not complete: what was deleted can be read there."""
    client, name, frames = client_of(server), f"versions-{fresh()}", make_frames(37, 3, 500)
    client.create_bucket(Bucket=name)
    client.put_bucket_versioning(Bucket=name, VersioningConfiguration={"Status": "Enabled"})
    store = TieredStore([ObjectStore(server.url().replace("s3://blocks", f"s3://{name}"))])
    store.put(frames, deadline=soon())
    for removed in (3, 0):
        receipt = erase_prefixes(store, [frames[0].header.root], "a tenant")
        assert not receipt.complete and "versions" in receipt.unreachable["objects"]
        assert receipt.removed == {"objects": removed}
    assert read(store, frames) == [None] * 3
    store.close()


def test_an_erasure_tells_of_its_progress(store: ObjectStore):
    """An erasure has a step for every few objects, so a slow service is not taken for one that does not answer."""
    frames = [make_frames(seed, 1, 10)[0] for seed in range(200)]
    store.put(frames, deadline=soon())
    for chosen in (set(names_of(frames[:100])), None):
        steps = list(store.erase_steps(b"", frames[0].header.root, chosen=chosen, deadline=soon()))
        assert len(steps) > 1 and sum(one.removed for one in steps) == 100 and all(one.removed < 100 for one in steps)


def test_scan_reads_positions_and_times(server: S3Server, folder: Path):
    """scan reads parent, depth, size and time of each block, in a bucket and in a folder."""
    for url in (server.url(), f"file://{folder}"):
        store = ObjectStore(url, prefix=fresh())
        frames = make_frames(7, 20, 300)
        store.put(frames, deadline=soon())
        entries = {entry.name: entry for entry in store.scan(deadline=soon())}
        for one in frames:
            entry = entries[one.name]
            assert (entry.parent, entry.depth, entry.size) == (one.header.parent, one.header.depth, len(one.data))
            assert abs(entry.stored_at - time.time()) < 3600
        store.close()


@pytest.mark.slow
def test_chunks_that_are_read_stay_young(server: S3Server):
    """An old chunk that is read is written again with `touch`, as it was. One that was erased is not."""
    prefix = fresh()
    keys = {"aws_access_key_id": "tests", "aws_secret_access_key": "tests", "region_name": "us-east-1"}
    client = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{server.port}", **keys)
    writer = ObjectStore(server.url(), prefix=prefix)
    touching = ObjectStore(server.url(), prefix=prefix, touch=1.5 / 86400)
    frames = make_frames(61, 40, 1000)
    writer.put(frames, deadline=soon())

    def listed() -> dict[str, Any]:
        found = client.list_objects_v2(Bucket=server.bucket, Prefix=prefix).get("Contents", [])
        return {one["Key"]: one["LastModified"] for one in found}

    def renewed() -> int:
        return touching.status().notes["renewed"]

    before = listed()
    assert read(touching, frames) == whole(frames)
    time.sleep(2.6)
    assert read(touching, frames) == whole(frames) and read(writer, frames) == whole(frames)
    wait_until(lambda: renewed() >= len(before), "all chunks are written again")
    assert listed().keys() == before.keys() and all(listed()[key] > before[key] for key in before)
    assert read(touching, frames) == whole(frames)
    for key in before:
        client.delete_object(Bucket=server.bucket, Key=key)
    time.sleep(1.6)
    assert read(touching, frames) == [None] * 40
    writer.close()
    touching.close()
    assert not listed()


def test_chunks_are_renewed_one_after_the_other():
    """Chunks that are read while others are written again follow them, once each, and so do those that are read later."""
    client, loop = obstore.store.MemoryStore(), ClientLoop("renewals")
    chunks = [ObjectChunk(f"chunk-{number}", b"", b"", (), 100, 1.0) for number in range(12)]
    for chunk in chunks:
        obstore.put(client, f"some/{chunk.path}", bytes(100))
    renewals = Renewals(client, "some/", loop, 60.0)
    for end in (4, 8, 12):
        for _ in range(3):
            renewals.used(chunks[max(end - 6, 0) : end])
        wait_until(partial(lambda end: renewals.count >= end, end), "a wave is written again")
    assert renewals.count == 12
    loop.close()


def test_foreign_objects_are_ignored(folder: Path):
    """Other objects are neither scanned nor listed, and a chunk with the index of another one has no blocks."""
    store = ObjectStore(f"file://{folder}", chunk=1)
    frames = make_frames(8, 3, 1000)
    store.put(frames, deadline=soon())
    path_of(folder, frames[1].name).write_bytes(b"rubbish" * 100)
    path_of(folder, frames[2].name).write_bytes(path_of(folder, frames[0].name).read_bytes())
    store.put_record("a/b", b"data", deadline=soon())
    (folder / "readme").write_bytes(b"hello")
    (folder / "records" / "note.txt").write_bytes(b"hello")
    path_of(folder, frames[0].name).with_name("short").write_bytes(b"hello")
    assert [entry.name for entry in store.scan(deadline=soon())] == names_of(frames[:1])
    assert store.records("", deadline=soon()) == ["a/b"]
    store.close()


def test_prefixes_are_kept_apart(server: S3Server):
    """Stores with different prefixes in a bucket are independent, also if one prefix starts with the other."""
    prefix = fresh()
    mine = ObjectStore(server.url(), prefix=prefix)
    frames = make_frames(9, 2, 100)
    mine.put(frames, deadline=soon())
    mine.put_record("key", b"data", deadline=soon())
    for other in (ObjectStore(server.url(), prefix=prefix + "x"), ObjectStore(server.url(), prefix=prefix[:-1])):
        assert present(other, frames) == [False, False]
        assert not {entry.name for entry in other.scan(deadline=soon())} & set(names_of(frames))
        assert other.records("", deadline=soon()) == []
        other.close()
    mine.close()


def test_record_keys(store: ObjectStore):
    """Record keys that look like relative paths are ordinary keys. Invalid keys are refused."""
    for key in ("..", ".", "../../x", "a/..", "a.record"):
        store.put_record(key, key.encode(), deadline=soon())
    assert store.records("", deadline=soon()) == sorted(["..", ".", "../../x", "a/..", "a.record"])
    assert store.get_record("../../x", deadline=soon()) == b"../../x"
    for key in ("", "/a", "a/", "a//b", "a b", "a!b", "ä", "a\n"):
        with pytest.raises(StoreConfigError):
            store.put_record(key, b"x", deadline=soon())


# Failures


def test_a_service_that_never_answers():
    """If the service accepts connections and never replies, every call ends at its deadline and leaves nothing running."""
    silent = ScriptedServer([None])
    store = ObjectStore(at(silent.port))
    for call in calls_of(store, 0.15).values():
        with pytest.raises(StoreTimeout):
            call()
    store.status()
    silent.wait_for_disconnects()
    store.close()
    silent.close()


def test_nothing_is_written_to_a_buffer_after_the_deadline(server: S3Server):
    """After a call has ended at its deadline, nothing is written to its buffers."""
    prefix = fresh()
    store = ObjectStore(server.url(), prefix=prefix)
    frames = make_frames(10, 12, 1 << 20)
    store.put(frames, deadline=soon())
    buffers = [memoryview(bytearray(len(one.data))) for one in frames]
    with pytest.raises(StoreTimeout):
        store.get(names_of(frames), buffers, deadline=time.monotonic() + 0.004)
    for buffer in buffers:
        buffer[:] = b"\xaa" * len(buffer)
    assert read(store, frames) == whole(frames)
    assert all(buffer == b"\xaa" * len(buffer) for buffer in buffers)
    store.close()


@pytest.mark.extended
def test_a_service_that_is_gone_and_comes_back(tmp_path: Path):
    """While the service is down every call raises StoreUnavailable. When it is up again, the same store works."""
    server = S3Server(tmp_path / "s3")
    store = ObjectStore(server.url())
    frames = make_frames(11, 3, 1000)
    try:
        assert store.put(frames, deadline=soon()) == 3
        server.kill()
        for call in calls_of(store, 60).values():
            with pytest.raises(StoreUnavailable):
                call()
        server.start()
        assert read(store, frames) == [None] * 3
        assert store.put(frames, deadline=soon()) == 3 and read(store, frames) == whole(frames)
    finally:
        store.close()
        server.kill()


def test_records_of_blocks_stay_young(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A record that says what blocks are is written again while blocks are, also by another store of the process, so that rules
    by age do not remove it before them. A deleted one stays deleted, others are not written."""
    keys = ["namespaces/a/b", "layouts/c", "namespaces/gone", "namespaces/other", "usage/d"]
    first = ObjectStore(f"file://{tmp_path}")
    for key in keys:
        first.put_record(key, b"{}", deadline=soon())
    first.close()
    store = ObjectStore(f"file://{tmp_path}")
    store.delete_record("namespaces/gone", deadline=soon())
    (tmp_path / "records" / "namespaces!other.record").write_bytes(b'{"by": "another process"}')
    for path in (tmp_path / "records").iterdir():
        os.utime(path, (1, 1))
    store.put(make_frames(14, 1, 1000), deadline=soon())
    ages = {path.name: path.stat().st_mtime for path in (tmp_path / "records").iterdir()}
    assert set(ages.values()) == {1.0}  # it is not yet time
    monkeypatch.setattr("foreword.store.object.object_store._RENEWED", -1.0)
    store.put(make_frames(15, 1, 1000), deadline=soon())
    young = {path.name for path in (tmp_path / "records").iterdir() if path.stat().st_mtime > 1.0}
    assert young == {"namespaces!a!b.record", "layouts!c.record"}
    assert sorted(store.records("", deadline=soon())) == sorted({*keys} - {"namespaces/gone"})
    store.close()


def test_a_renewal_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Where records cannot be read, blocks are stored, and only the first of two calls tries to renew them. A store with other
    options is another one."""
    store = ObjectStore(f"file://{tmp_path}")
    store.put_record("namespaces/a", b"{}", deadline=soon())
    reads: list[str] = []

    def get_record(self: ObjectStore, key: str, *, deadline: float) -> None:
        reads.append(key)
        raise StoreUnavailable("the service is gone")

    monkeypatch.setattr(ObjectStore, "get_record", get_record)
    now = time.monotonic()
    monkeypatch.setattr("foreword.store.object.object_store.time.monotonic", lambda: now + 43_201)
    for part in range(2):
        assert store.put(make_frames(part, 1, 1000), deadline=now + 43_300)
    assert reads == ["namespaces/a"]
    store.close()


def test_a_forked_child(tmp_path: Path):
    """A child that was forked while its parent used object stores has none of the client's threads: it misses at once instead
    of waiting for each deadline, with a store of its own too, and its parent goes on."""
    store, frames = ObjectStore(f"file://{tmp_path}/a"), make_frames(13, 2, 1000)
    store.put(frames, deadline=soon())

    def child() -> None:
        own = ObjectStore(f"file://{tmp_path}/b")
        for call in [*calls_of(store, 3600).values(), *calls_of(own, 3600).values()]:
            with pytest.raises(StoreUnavailable, match="forked"):
                call()
        own.close()
        store.close()

    assert in_child(child) == 0
    assert read(store, frames) == whole(frames)
    store.close()


def test_no_server_listens():
    """If no server listens at the endpoint, every call raises StoreUnavailable."""
    store = ObjectStore(at(free_port()))
    for call in calls_of(store, 60).values():
        with pytest.raises(StoreUnavailable):
            call()
    store.close()


@pytest.mark.parametrize(
    ("status", "reading", "writing"),
    [
        (403, StoreConfigError, StoreReadOnly),
        (401, StoreConfigError, StoreReadOnly),
        (400, StoreUnavailable, StoreUnavailable),
        (500, StoreUnavailable, StoreUnavailable),
        (503, StoreUnavailable, StoreUnavailable),
    ],
)
def test_a_service_that_refuses(status: int, reading: type[StoreError], writing: type[StoreError]):
    """HTTP errors map to StoreError classes: no permission to read, no permission to write, or unavailable."""
    server = HttpServer(status, b"<Error><Code>No</Code></Error>")
    store = ObjectStore(at(server.port))
    for name, call in calls_of(store, 60).items():
        with pytest.raises(writing if name in {"put", "put_record", "delete", "delete_record"} else reading):
            call()
    store.close()
    server.close()


@pytest.mark.parametrize(
    "answer", [b"", b"rubbish\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nshort", b"\x00" * 5000]
)
def test_invalid_responses(answer: bytes):
    """An invalid or incomplete response never counts as a block."""
    liar = ScriptedServer([answer])
    store = ObjectStore(at(liar.port))
    with pytest.raises(StoreUnavailable):
        read(store, make_frames(12, 1, 1000), deadline=soon())
    store.close()
    liar.close()


def test_a_bucket_that_does_not_exist(server: S3Server):
    """A missing bucket is empty, and a write to it raises StoreConfigError."""
    store = ObjectStore(server.url().replace("s3://blocks", "s3://nowhere"))
    frames = make_frames(13, 1, 100)
    assert store.lookup(names_of(frames), deadline=soon()) == 0
    with pytest.raises(StoreConfigError):
        store.put(frames, deadline=soon())
    store.close()


def test_a_folder_that_cannot_be_written(tmp_path: Path):
    """If the folder was replaced by a file, a write raises StoreError."""
    store = ObjectStore(f"file://{tmp_path}/place", prefix="below")
    (tmp_path / "place" / "below").write_bytes(b"in the way")
    with pytest.raises(StoreError):
        store.put(make_frames(14, 1, 100), deadline=soon())
    store.close()


def test_wrong_urls(tmp_path: Path):
    """Wrong URLs, unknown options and invalid prefixes are refused by the constructor. Options of the HTTP client are
    accepted."""
    for url in (
        "redis://x",
        "ftp://x/y",
        "",
        "s3://bucket?no_such_option=1",
        "s3://bucket?region",
        "s3://bucket?region=x&access_key_id=a&secret_access_key=b&timeout=soon",
        f"file://{tmp_path}?region=x",
    ):
        with pytest.raises(StoreConfigError):
            ObjectStore(url)
    ObjectStore("s3://bucket?region=x&access_key_id=a&secret_access_key=b&timeout=9s&aws_allow_http=true").close()
    for prefix in ("a b", "../up", "a//b", "ä"):
        with pytest.raises(StoreConfigError):
            ObjectStore(f"file://{tmp_path}", prefix=prefix)
    for options in ({"parallel": 0}, {"chunk": 0}, {"chunk": 33}):
        with pytest.raises(StoreConfigError):
            ObjectStore(f"file://{tmp_path}", **options)


@pytest.mark.extended
def test_requests_of_a_long_prompt(server: S3Server):
    """The lookup and the load of 480 blocks take at most a request per 16 blocks, and so does storing them."""
    proxy = CountingProxy(server.port)
    frames = make_frames(30, 480, 10)
    writer, reader = (ObjectStore(at(proxy.port), prefix="long") for _ in range(2))
    for start in range(0, 480, 32):
        writer.put(frames[start : start + 32], deadline=soon())
    assert proxy.requests <= 2 * 480 / 16
    proxy.requests = 0
    assert reader.lookup(names_of(frames), deadline=soon()) == 480
    assert read(reader, frames) == whole(frames)
    assert proxy.requests <= 480 / 16
    for store in (writer, reader):
        store.close()
    proxy.close()
