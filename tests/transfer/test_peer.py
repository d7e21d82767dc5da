"""Another instance as a store: a block is read or is a miss, in bounded time, whatever happens to the instance."""

import logging
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from actors import LAYOUT, PATIENCE, FrameService, config, until
from test_faults import Proxy

from foreword.blocks.layout import Layout
from foreword.conformance import ReadOnlyStoreContract, make_frames, names_of, read, soon, whole
from foreword.errors import StoreConfigError, StoreTimeout, StoreUnavailable
from foreword.store.base import Store
from foreword.store.frame import Frame
from foreword.store.memory.memory_store import MemoryStore
from foreword.store.tiered import TieredStore
from foreword.store.types import Opener, Reach
from foreword.store.urls import open_store, parse
from foreword.transfer.peer import PeerStore, opener, settings_of
from foreword.transfer.transfer_endpoint import TransferEndpoint
from foreword.transfer.wire_format import Buffer
from foreword.transfer_config import TransferConfig

SECRET = "a shared secret of the tests"


def shelf(frames: Sequence[Frame]) -> dict[bytes, bytes]:
    return {one.name: bytes(one.data) for one in frames}


class Place:
    """An instance that serves frames."""

    def __init__(self, frames: Sequence[Frame] = (), layout: Layout | None = LAYOUT, **settings: object) -> None:
        self.service = FrameService(shelf(frames))
        self.service.layout = layout
        self.endpoint = TransferEndpoint(config(**settings), self.service)
        self.address = self.endpoint.listen()

    def close(self) -> None:
        self.endpoint.close()


Serve = Callable[..., Place]
Open = Callable[..., PeerStore]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def serve(stack: ExitStack) -> Serve:
    def start(*arguments: object, **settings: object) -> Place:
        place = Place(*arguments, **settings)
        stack.callback(place.close)
        return place

    return start


@pytest.fixture
def reader(stack: ExitStack) -> Open:
    def make(address: str, layout: Layout | None = LAYOUT, **settings: object) -> PeerStore:
        store = PeerStore(address, layout, config=config(**settings))
        stack.callback(store.close)
        return store

    return make


class TestContract(ReadOnlyStoreContract):
    @pytest.fixture(params=["shm", "tcp", "unix"])
    def holding(
        self, request: pytest.FixtureRequest, serve: Serve, reader: Open, tmp_path: Path
    ) -> Callable[[Sequence[Frame]], Store]:
        links = ("tcp",) if request.param == "tcp" else ("shm", "tcp")
        bind = f"unix:{tmp_path}/s" if request.param == "unix" else "127.0.0.1:0"
        return lambda frames: reader(serve(frames, links=links, bind=bind).address, links=links)


# Who is there, and who is not


def test_a_peer_that_is_down(reader: Open) -> None:
    """Without a listener every call fails at once with the reason, and the status says that the store is not connected."""
    gone = Place()
    gone.close()
    store = reader(gone.address)
    frames = make_frames(1, 3, 100)
    for _ in range(5):
        with pytest.raises(StoreUnavailable, match="cannot connect"):
            store.lookup(names_of(frames), deadline=soon())
    assert store.status().notes["connected"] == 0
    until(lambda: store.status().notes["failed"] >= 2)


def test_a_peer_that_starts_later_and_restarts(serve: Serve, reader: Open) -> None:
    """A peer that starts after its reader is found, and again after each restart, with its current blocks."""
    first = Place()
    first.close()
    store = reader(first.address)
    with pytest.raises(StoreUnavailable):
        store.lookup([b"x" * 64], deadline=soon())
    for seed in range(3):
        frames = make_frames(seed, 4, 500)
        place = Place(frames, bind=first.address)
        until(lambda: store.status().notes["connected"] == 1)
        assert store.lookup(names_of(frames), deadline=soon()) == 4
        assert read(store, frames) == whole(frames)
        place.close()
        until(lambda: store.status().notes["connected"] == 0)
    assert store.status().notes["connections"] == 3


def test_attempts_to_connect_back_off(reader: Open) -> None:
    """While a peer is down, calls do not trigger attempts to connect; the pauses between attempts grow."""
    gone = Place()
    gone.close()
    store = reader(gone.address)
    until(lambda: store.status().notes["failed"] >= 1)
    for _ in range(2000):
        with pytest.raises(StoreUnavailable):
            store.lookup([b"x" * 64], deadline=soon())
    assert store.status().notes["failed"] < 100


def test_a_wrong_secret(serve: Serve, reader: Open, caplog: pytest.LogCaptureFixture) -> None:
    """A peer with another secret, or with one where this side has none, is not read; the log names the setting once."""
    frames = make_frames(1, 3, 100)
    place = serve(frames, secret=SECRET)
    for settings in ({"secret": "another secret of the tests"}, {}):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            store = reader(place.address, **settings)
            for _ in range(3):
                with pytest.raises(StoreUnavailable, match="secret"):
                    store.get(names_of(frames), [memoryview(bytearray(1000))] * 3, deadline=soon())
            until(lambda store=store: store.status().notes["rejected"] >= 2)  # type: ignore[misc]
        said = [
            one for one in caplog.records if "secret" in one.getMessage() and "cannot read from" in one.getMessage()
        ]
        assert len(said) == 1 and "transfer.secret" in said[0].getMessage()
    store = reader(place.address, secret=SECRET)
    assert read(store, frames) == whole(frames)


def test_another_layout(serve: Serve, reader: Open) -> None:
    """A peer with another layout is refused with a message that says what differs; it is never read."""
    frames = make_frames(1, 3, 100)
    for other, word in ((replace(LAYOUT, block_size=32), "block size"), (replace(LAYOUT, model=b"other"), "model")):
        store = reader(serve(frames, other).address)
        with pytest.raises(StoreUnavailable, match=word):
            store.lookup(names_of(frames), deadline=soon())
        assert store.status().notes["rejected"] >= 1


def test_closing_while_it_dials(reader: Open) -> None:
    """`close` does not wait for a peer that does not answer; waiting calls fail."""
    with ExitStack() as stack:
        silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        store = reader(f"127.0.0.1:{silent.getsockname()[1]}", connect_timeout=PATIENCE)
        with pytest.raises(StoreTimeout):
            store.lookup([b"x" * 64], deadline=soon(0.1))
        store.close()
        with pytest.raises(StoreUnavailable, match="closed"):
            store.lookup([b"x" * 64], deadline=soon())


# Failures on the way


class Slow(FrameService):
    """Serves its first batch and then blocks until the test continues it."""

    def __init__(self, frames: Sequence[Frame]) -> None:
        super().__init__(shelf(frames), batch=2)
        self.go_on = threading.Event()
        self.reached = threading.Event()

    def get(self, names: Sequence[bytes], longest: int, deadline: float) -> Iterator[Sequence[Buffer | None]]:
        for number, batch in enumerate(super().get(names, longest, deadline)):
            if number == 1:
                self.reached.set()
                assert self.go_on.wait(PATIENCE)
            yield batch


def test_a_peer_that_stalls(stack: ExitStack, reader: Open) -> None:
    """A peer that stalls in the middle of a batch costs no more than the deadline. Nothing is written to the buffers after
    that. When it answers again it is read again."""
    frames = make_frames(1, 6, 500)
    slow = Slow(frames)
    endpoint = TransferEndpoint(config(progress_timeout=PATIENCE), slow)
    stack.callback(endpoint.close)
    stack.callback(slow.go_on.set)
    store = reader(endpoint.listen(), progress_timeout=PATIENCE)
    buffers = [memoryview(bytearray(1000)) for _ in frames]
    until(lambda: store.status().notes["connected"] == 1)
    with pytest.raises(StoreTimeout):
        store.get(names_of(frames), buffers, deadline=soon(1.0))
    assert slow.reached.wait(PATIENCE)
    before = [bytes(buffer) for buffer in buffers]
    slow.go_on.set()
    assert read(store, frames) == whole(frames)
    assert [bytes(buffer) for buffer in buffers] == before


def test_a_peer_that_ends_in_the_middle(stack: ExitStack, reader: Open) -> None:
    """A peer that closes in the middle of a batch is an error at once; blocks that had arrived do not count."""
    frames = make_frames(1, 6, 500)
    slow = Slow(frames)
    endpoint = TransferEndpoint(config(), slow)
    stack.callback(endpoint.close)
    store = reader(endpoint.listen())

    def end() -> None:
        slow.reached.wait(PATIENCE)
        endpoint.close()
        slow.go_on.set()

    threading.Thread(target=end).start()
    with pytest.raises(StoreUnavailable):
        store.get(names_of(frames), [memoryview(bytearray(1000)) for _ in frames], deadline=soon())


@pytest.mark.parametrize("count", [2, pytest.param(12, marks=pytest.mark.slow)], ids=["two-places", "many-places"])
@pytest.mark.parametrize("fault", ["flip", "drop", "cut"])
def test_a_wire_that_misbehaves(fault: str, count: int, serve: Serve, stack: ExitStack) -> None:
    """Whatever the wire does to the bytes, every block that the tiers return is correct; the others are misses, and counted."""
    draw = random.Random(fault)
    frames = make_frames(1, 10, 5000)
    place = serve(frames, links=("tcp",))
    spoiled = 0
    for at in [draw.randrange(600, 50_000) for _ in range(count)]:
        proxy = Proxy(place.address, fault, at)
        store = PeerStore(proxy.address, LAYOUT, config=config(links=("tcp",)))
        tiers = TieredStore([store], writable=[])
        buffers = [memoryview(bytearray(6000)) for _ in frames]
        found = tiers.fetch(names_of(frames), buffers, deadline=soon(2.0))
        for one, got in zip(frames, found, strict=True):
            assert got is None or got.frame.data == one.data
        missing = sum(got is None for got in found)
        [tier] = tiers.tiers
        spoiled += missing > 0
        assert (missing > 0) == bool(tier.counters.bad or tier.counters.errors)
        tiers.close()
        proxy.close()
    assert spoiled >= count // 2


# Among other tiers


def test_a_peer_that_stalls_harms_no_other_tier(stack: ExitStack, reader: Open) -> None:
    """A peer that does not answer leaves time for the tier behind it, and the failure counts for the peer alone."""
    silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    memory = MemoryStore(1 << 20)
    frames = make_frames(1, 3, 100)
    memory.put(frames, deadline=soon())
    peer = reader(f"127.0.0.1:{silent.getsockname()[1]}", connect_timeout=PATIENCE)
    tiers = TieredStore([peer, memory], writable=[1])
    assert tiers.lookup(names_of(frames), deadline=soon(2.0)) == 3
    assert sum(tiers.tiers[0].counters.errors.values()) >= 1 and not tiers.tiers[1].counters.errors


def test_several_peers(serve: Serve, reader: Open) -> None:
    """Each of several peers is asked for what those before it do not have; a dead one is a miss like any other."""
    frames = make_frames(1, 12, 500)
    near, far = serve(frames[:5]), serve(frames[3:])
    gone = Place()
    gone.close()
    tiers = TieredStore([reader(place.address) for place in (near, gone, far)], writable=[])
    assert tiers.locate(names_of(frames), deadline=soon()) == [0] * 5 + [2] * 7
    buffers = [memoryview(bytearray(len(one.data))) for one in frames]
    found = tiers.fetch(names_of(frames), buffers, deadline=soon())
    assert [one.tier if one else None for one in found] == [0] * 5 + [2] * 7
    assert [bytes(buffer) for buffer in buffers] == whole(frames)
    assert tiers.tiers[1].counters.errors["store_unavailable"] >= 2


def test_a_tier_that_is_never_written_to(serve: Serve, reader: Open) -> None:
    """Blocks are written to writable tiers only; blocks of a peer are promoted into the tiers before it."""
    frames = make_frames(1, 8, 500)
    place = serve(frames[:4])
    memory = MemoryStore(1 << 20)
    tiers = TieredStore([memory, reader(place.address)], writable=[0])
    found = tiers.fetch(names_of(frames[:4]), [memoryview(bytearray(1000)) for _ in range(4)], deadline=soon())
    assert tiers.promotion_targets(1) == (0,) and tiers.promotion_targets(0) == ()
    assert tiers.put([one.frame for one in found if one is not None], deadline=soon()) == 4
    assert tiers.put(frames[4:], deadline=soon()) == 4
    assert read(memory, frames) == whole(frames)
    assert tiers.pin(names_of(frames), deadline=soon()) == 8
    peer = tiers.tiers[1].counters
    assert (peer.written_blocks, peer.write_seconds, peer.errors) == (0, 0.0, {})
    assert set(place.service.frames) == set(names_of(frames[:4]))


def test_records_stay_here(serve: Serve, reader: Open) -> None:
    """Records are kept by a writable tier, or in this process if there is none."""
    place = serve()
    alone = TieredStore([reader(place.address)], writable=[])
    alone.put_record("a/b", b"one", deadline=soon())
    assert alone.get_record("a/b", deadline=soon()) == b"one" and alone.records("a/", deadline=soon()) == ["a/b"]
    memory, peer = MemoryStore(1 << 20), reader(place.address)
    both = TieredStore([memory, peer], [], writable=[0])
    both.put_record("a/b", b"two", deadline=soon())
    assert memory.get_record("a/b", deadline=soon()) == b"two" and peer.get_record("a/b", deadline=soon()) is None
    assert alone.delete_record("a/b", deadline=soon()) is True


# URLs


def peers(settings: TransferConfig | None = None) -> dict[Reach, Opener]:
    return {Reach.INSTANCE: opener(settings or config())}


def test_urls(serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stack: ExitStack) -> None:
    """A URL names the address and the source of the secret; without one the configured secret is used."""
    frames = make_frames(1, 3, 100)
    place = serve(frames, secret=SECRET)
    serve(frames, bind=f"unix:{tmp_path}/socket", secret=SECRET)
    (tmp_path / "secret").write_text(SECRET + "\n")
    monkeypatch.setenv("PEER_SECRET", SECRET)
    with_secret = config(secret=SECRET)
    for url, settings in (
        (f"peer://{place.address}?secret_file={tmp_path}/secret&ring=1MiB", config(links=("tcp",))),
        (f"peer://{place.address}?secret_env=PEER_SECRET&progress_timeout=15", config()),
        (f"peer://{place.address}/?label=others", with_secret),
        (f"peer://{tmp_path}/socket", with_secret),
    ):
        store = open_store(["memory://?size=1MiB", url], LAYOUT, peers(settings))
        stack.callback(store.close)
        assert store.locate(names_of(frames), deadline=soon()) == [1, 1, 1], url
        assert store.tiers[1].label == ("others" if "label" in url else "peer") and store.writable == (0,)
    assert not parse(url).persistent and not parse(url).writable


def test_time_limits_follow_from_one() -> None:
    """How long a peer is waited for follows from `progress_timeout`; that of a URL holds for its connection, and without one
    all limits are the instance's. There may be four transfers for each connection."""
    ours = TransferConfig(progress_timeout=60.0, max_connections=3)
    assert (ours.connect_timeout, ours.answer_timeout, ours.beat_seconds, ours.max_transfers) == (10.0, 20.0, 4.0, 12)
    plain = TransferConfig()
    assert (plain.connect_timeout, plain.answer_timeout, plain.beat_seconds, plain.max_transfers) == (
        5.0,
        10.0,
        2.0,
        256,
    )
    own = config(connect_timeout=7.0)
    for url, seconds in (("peer://127.0.0.1:1?progress_timeout=90", 15.0), ("peer://127.0.0.1:1", 7.0)):
        assert settings_of(parse(url), own).connect_timeout == seconds


def test_urls_that_are_wrong(tmp_path: Path) -> None:
    """An invalid URL is an error at start that says what to write instead, and shows no secret."""
    for url, word in (
        ("peer://somewhere", "peer://host:port"),
        ("peer://", "peer://host:port"),
        ("peer://10.0.0.7:9100", "secret"),
        ("peer://127.0.0.1:1?secret=abcdefghijklmnopqrst", "secret_env"),
        ("peer://:abcdefghijklmnopqrst@127.0.0.1:1", "secret_env"),
        ("peer://127.0.0.1:1?secret_env=NOT_SET_AT_ALL", "NOT_SET_AT_ALL"),
        (f"peer://127.0.0.1:1?secret_file={tmp_path}/none", "none"),
        (f"peer://127.0.0.1:1?secret_file={tmp_path}/none&secret_env=X", "not both"),
        ("peer://127.0.0.1:1?progres_timeout=3", "progress_timeout"),
        ("peer://127.0.0.1:1?progress_timeout=soon", "soon"),
        ("peer://:abcdefghijklmnopqrst@127.0.0.1:1?progress_timeout=soon", "secret_env"),
        ("peer://127.0.0.1:1?codec=lossless", "codec"),
        (f"peer://{'x' * 80}:1", "peer://host:port"),
    ):
        with pytest.raises(StoreConfigError, match=word) as caught:
            open_store([url], LAYOUT, peers())
        assert "abcdefgh" not in caught.value.message
    with pytest.raises(StoreConfigError, match="only an engine"):
        open_store(["peer://127.0.0.1:1"])


def test_a_disk_that_is_only_read(tmp_path: Path) -> None:
    """A disk opened with read_only=1 is never written either: nothing fails, and it is still read."""
    frames = make_frames(1, 8, 500)
    first = open_store([f"disk://{tmp_path}/kv?size=1MiB"])
    first.put(frames[:4], deadline=soon())
    first.close()
    tiers = open_store(["memory://?size=1MiB", f"disk://{tmp_path}/kv?size=1MiB&read_only=1"])
    for _ in range(5):
        tiers.put(frames, deadline=soon())
    disk = tiers.tiers[1]
    assert tiers.locate(names_of(frames[:4]), deadline=soon()) == [0] * 4
    assert disk.get(names_of(frames[:4]), [memoryview(bytearray(1000)) for _ in range(4)], soon())[3] is not None
    assert disk.counters.errors == {} and disk.counters.written_blocks == 0
    tiers.close()


def test_time_is_bounded_without_an_answer(stack: ExitStack, reader: Open) -> None:
    """A peer that accepts connections and does not answer costs a call no more than its deadline."""
    silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    store = reader(f"127.0.0.1:{silent.getsockname()[1]}", connect_timeout=0.5)
    with pytest.raises((StoreTimeout, StoreUnavailable)):
        store.lookup([b"x" * 64], deadline=time.monotonic() + 0.2)
    until(lambda: store.status().notes["failed"] >= 1)
    with pytest.raises((StoreTimeout, StoreUnavailable)):
        store.lookup([b"x" * 64], deadline=soon(1.0))
