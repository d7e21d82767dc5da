"""RedisStore with real servers: the contract over TCP, a Unix socket, TLS and in a cluster, and faults of servers."""

import itertools
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from ports import free_port
from processes import in_child
from servers import RedisCluster, RedisServer, ScriptedServer, Sentinel, wait_until

from foreword.conformance import Damage, StoreContract, StoreMachine, make_frames, names_of, present, read, soon, whole
from foreword.conformance.frames import LAYOUT, ROOT
from foreword.errors import (
    BadFrame,
    StoreConfigError,
    StoreError,
    StoreFull,
    StoreReadOnly,
    StoreTimeout,
    StoreUnavailable,
)
from foreword.store.base import BAD, FAILED, MISSING
from foreword.store.frame import Frame, check, frame
from foreword.store.redis import redis_store, resp
from foreword.store.redis.redis_store import RedisStore

MiB = 1 << 20
_numbers = itertools.count()
_machine_url = ""


def fresh() -> str:
    """A prefix that was not used before: an empty store on a shared server."""
    return f"test-{next(_numbers)}"


def key_of(prefix: str, name: bytes) -> str:
    return f"{prefix}:b:{name.hex()}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    global _machine_url
    started = RedisServer(tmp_path_factory.mktemp("redis"))
    _machine_url = started.url
    yield started
    started.kill()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    started = RedisCluster(tmp_path_factory.mktemp("cluster"))
    yield started
    started.kill()


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RedisServer, str]]:
    """A server with TLS, a self-signed certificate and a password, and its URL."""
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl to make a certificate")
    request = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    request += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(request, check=True, capture_output=True)
    secure = ["--tls-cert-file", str(certificate), "--tls-key-file", str(key), "--tls-auth-clients", "no"]
    port = free_port()
    started = RedisServer(folder, "--tls-port", str(port), *secure, password="geheim")
    yield started, f"rediss://:geheim@localhost:{port}?ssl_ca_certs={certificate}"
    started.kill()


@pytest.fixture
def own(tmp_path: Path) -> Iterator[RedisServer]:
    """A server for one test, which may kill it."""
    started = RedisServer(tmp_path / "own")
    yield started
    started.kill()


@pytest.fixture
def store(server: RedisServer) -> Iterator[RedisStore]:
    opened = RedisStore(server.url, prefix=fresh())
    yield opened
    opened.close()


class TestContract(StoreContract):
    @pytest.fixture
    def prefix(self) -> str:
        return fresh()

    @pytest.fixture
    def store(self, server: RedisServer, prefix: str) -> Iterator[RedisStore]:
        opened = RedisStore(server.url, prefix=prefix)
        yield opened
        opened.close()

    @pytest.fixture
    def second(self, server: RedisServer, prefix: str) -> Iterator[RedisStore]:
        opened = RedisStore(f"unix://{server.socket}", prefix=prefix)
        yield opened
        opened.close()

    @pytest.fixture
    def damage(self, server: RedisServer, prefix: str) -> Iterator[Damage]:
        with server.client() as client:
            yield lambda _, one, data: client.set(key_of(prefix, one.name), data) and None


class TestContractOverUnixSocketWithTtl(StoreContract):
    @pytest.fixture
    def store(self, server: RedisServer) -> Iterator[RedisStore]:
        opened = RedisStore(f"unix://{server.socket}", prefix=fresh(), ttl=600)
        yield opened
        opened.close()


class TestContractInACluster(StoreContract):
    @pytest.fixture
    def store(self, cluster: RedisCluster) -> Iterator[RedisStore]:
        opened = RedisStore(cluster.url, prefix=fresh())
        yield opened
        opened.close()


class TestContractOverTls(StoreContract):
    @pytest.fixture
    def store(self, tls: tuple[RedisServer, str]) -> Iterator[RedisStore]:
        opened = RedisStore(tls[1], prefix=fresh())
        yield opened
        opened.close()


class RedisMachine(StoreMachine):
    def make_store(self) -> RedisStore:
        return RedisStore(_machine_url, prefix=fresh())


@pytest.mark.usefixtures("server")
class TestMachine(RedisMachine.TestCase):
    settings = settings(max_examples=20, stateful_step_count=20, deadline=None)


def calls_of(store: RedisStore, seconds: float) -> dict[str, Callable[[], object]]:
    """Every call that sends a command, with a deadline in the given number of seconds."""
    frames = make_frames(1, 2, 1000)
    names = names_of(frames)

    def at() -> float:
        return time.monotonic() + seconds

    return {
        "lookup": lambda: store.lookup(names, deadline=at()),
        "get": lambda: store.get(names, [memoryview(bytearray(2000)) for _ in names], deadline=at()),
        "put": lambda: store.put(frames, deadline=at()),
        "delete": lambda: store.delete(names, deadline=at()),
        "pin": lambda: store.pin(names, deadline=at()),
        "scan": lambda: list(store.scan(deadline=at())),
        "put_record": lambda: store.put_record("key", b"data", deadline=at()),
        "get_record": lambda: store.get_record("key", deadline=at()),
        "delete_record": lambda: store.delete_record("key", deadline=at()),
        "records": lambda: store.records("", deadline=at()),
    }


# Sizes


@pytest.mark.parametrize("size", [0, 1, 16_383, 65_537, 4 * MiB])
def test_blocks_of_any_size(store: RedisStore, size: int):
    """Blocks smaller and larger than every internal buffer come back intact, also several in a row."""
    frames = make_frames(2, 5, size)
    assert store.put(frames, deadline=soon()) == 5
    assert read(store, frames) == whole(frames)


def test_more_blocks_than_the_window(store: RedisStore):
    """A load much longer than the window of outstanding replies, with misses in it, returns each block in its buffer."""
    frames = make_frames(3, 40, MiB)
    store.put(frames[::2], deadline=soon())
    assert read(store, frames) == [data if number % 2 == 0 else None for number, data in enumerate(whole(frames))]


def test_a_long_lookup_takes_few_round_trips(server: RedisServer, store: RedisStore):
    """A lookup of 2,048 names takes few round trips: the server reads from its socket a hundred times less often."""
    frames = make_frames(4, 2048, 16)
    names = names_of(frames)
    store.put(frames, deadline=soon())
    with server.client() as client:
        before = client.info("stats")["total_reads_processed"]
        assert store.lookup(names, deadline=soon()) == 2048
        assert client.info("stats")["total_reads_processed"] - before < 100


def test_putting_again_sends_no_payload(server: RedisServer, store: RedisStore):
    """A block that is present is not sent again."""
    frames = make_frames(5, 4, MiB)
    store.put(frames, deadline=soon())
    with server.client() as client:
        before = client.info("stats")["total_net_input_bytes"]
        assert store.put(frames, deadline=soon()) == 4
        assert client.info("stats")["total_net_input_bytes"] - before < 10_000


def test_of_two_writers_the_first_wins(server: RedisServer):
    """After concurrent puts of different bytes under one name, all readers get the same block."""
    prefix = fresh()
    stores = [RedisStore(server.url, prefix=prefix) for _ in range(2)]
    for number in range(25):
        mine = make_frames(2000 + number, 6, 60_000)
        together = threading.Barrier(2)

        def write(store: RedisStore, frames: list[Frame], together: threading.Barrier = together) -> list[bytes | None]:
            together.wait()
            assert store.put(frames, deadline=soon()) == len(frames)
            return read(store, frames)

        both = (mine, [frame(one.header, bytes(60_000)) for one in mine])
        with ThreadPoolExecutor(2) as pool:
            running = [pool.submit(write, store, frames) for store, frames in zip(stores, both, strict=True)]
            first, second = (future.result() for future in running)
        assert first == second == read(stores[0], mine)
    for store in stores:
        store.close()


# Stored data


@pytest.mark.parametrize("ttl", [None, 600])
def test_values_that_are_no_frames_are_bad_and_put_replaces_them(server: RedisServer, ttl: float | None):
    """An empty, longer or other value is BAD, a truncated one has its own length, the rest is intact. put heals all."""
    prefix = fresh()
    store = RedisStore(server.url, prefix=prefix, ttl=ttl)
    frames = make_frames(6, 6, 50_000)
    size = len(frames[0].data)
    store.put(frames, deadline=soon())
    with server.client() as client:
        keys = [key_of(prefix, one.name) for one in frames]
        client.set(keys[0], bytes(frames[0].data[:40_000]))
        client.set(keys[1], b"")
        client.set(keys[2], bytes(size + 1))
        client.set(keys[3], bytes(5 * MiB))
        client.delete(keys[4])
        client.rpush(keys[4], b"x")
    assert {entry.size for entry in store.scan(deadline=soon())} == {40_000, size, size + 1, 5 * MiB}
    buffers = [memoryview(bytearray(size)) for _ in frames]
    assert store.get(names_of(frames), buffers, deadline=soon()) == [40_000, BAD, BAD, BAD, BAD, size]
    with pytest.raises(BadFrame):
        check(buffers[0][:40_000], frames[0].name)
    assert buffers[5] == frames[5].data
    assert store.put(frames, deadline=soon()) == 6
    assert read(store, frames) == whole(frames)
    store.close()


def test_scan_of_values_that_are_not_frames(server: RedisServer):
    """scan lists a value with an unreadable or wrong header without a parent."""
    prefix = fresh()
    store = RedisStore(server.url, prefix=prefix)
    frames = make_frames(9, 3, 1000)
    store.put(frames, deadline=soon())
    with server.client() as client:
        client.set(key_of(prefix, frames[1].name), b"rubbish" * 100)
        client.set(key_of(prefix, frames[2].name), bytes(frames[0].data))
    entries = {entry.name: entry for entry in store.scan(deadline=soon())}
    assert entries[frames[0].name].parent == frames[0].header.parent
    assert entries[frames[1].name].parent == entries[frames[2].name].parent == b""
    store.close()


def test_prefixes_and_databases_are_kept_apart(server: RedisServer):
    """Stores with different prefixes or databases on one server are independent, including records."""
    prefix = fresh()
    frames = make_frames(10, 2, 100)
    stores = [RedisStore(server.url, prefix=fresh()), RedisStore(f"{server.url}/3", prefix=prefix)]
    mine = RedisStore(server.url, prefix=prefix)
    mine.put(frames, deadline=soon())
    mine.put_record("key", b"data", deadline=soon())
    for other in stores:
        assert present(other, frames) == [False, False]
        assert list(other.scan(deadline=soon())) == [] and other.records("", deadline=soon()) == []
        other.close()
    mine.close()


# Limits


def test_ttl_and_pins(server: RedisServer):
    """Blocks expire after their time to live, pinned ones do not, and unpinned ones do again."""
    prefix = fresh()
    store = RedisStore(server.url, prefix=prefix, ttl=500)
    frames = make_frames(11, 3, 100)
    names = names_of(frames)
    store.put(frames, deadline=soon())
    store.pin(names[:2], deadline=soon())
    store.pin(names[1:2], pinned=False, deadline=soon())
    with server.client() as client:
        left = [client.pttl(key_of(prefix, name)) for name in names]
        assert left[0] == -1 and 0 < left[1] <= 500_000 and 0 < left[2] <= 500_000
        client.pexpire(key_of(prefix, names[1]), 1)
    wait_until(lambda: store.lookup([names[1]], deadline=soon()) == 0, "the block expires")
    assert present(store, frames) == [True, False, True]
    store.close()


def test_use_renews_the_time_to_live(server: RedisServer):
    """get and put of a block renew its time to live. Pinned blocks still do not expire."""
    prefix = fresh()
    store = RedisStore(server.url, prefix=prefix, ttl=500)
    frames = make_frames(35, 4, 100)
    keys = [key_of(prefix, one.name) for one in frames]
    store.put(frames, deadline=soon())
    store.pin(names_of(frames[:1]), deadline=soon())
    with server.client() as client:
        for key in keys[1:]:
            client.pexpire(key, 100_000)
        assert read(store, frames[:2]) == whole(frames[:2])
        assert store.put(frames[2:3], deadline=soon()) == 1
        left = [client.pttl(key) for key in keys]
    assert left[0] == -1 and min(left[1:3]) > 400_000 and left[3] <= 100_000
    store.close()


def test_a_full_server_that_evicts_nothing(tmp_path: Path):
    """A put into a full server with `noeviction` raises StoreFull, and blocks can still be read."""
    server = RedisServer(tmp_path / "full", "--maxmemory", "8mb", "--maxmemory-policy", "noeviction")
    try:
        store = RedisStore(server.url)
        frames = make_frames(12, 12, MiB)
        with pytest.raises(StoreFull):
            store.put(frames, deadline=soon())
        with pytest.raises(StoreFull):
            store.put(frames[-1:], deadline=soon())
        there = present(store, frames)
        assert 0 < sum(there) < 12
        assert read(store, frames) == [
            bytes(one.data) if known else None for one, known in zip(frames, there, strict=True)
        ]
        assert store.status().budget == 8 * MiB
        store.close()
    finally:
        server.kill()


def test_volatile_lru_keeps_pins_and_records(tmp_path: Path):
    """The server evicts neither pinned blocks nor records with a ttl and `volatile-lru`, and counts evictions."""
    server = RedisServer(tmp_path / "lru", "--maxmemory", "16mb", "--maxmemory-policy", "volatile-lru")
    try:
        store = RedisStore(server.url, ttl=3600)
        kept = make_frames(13, 3, MiB)
        store.put(kept, deadline=soon())
        store.put_record("prefix/a", b"data", deadline=soon())
        assert store.pin(names_of(kept), deadline=soon()) == 3
        for number in range(40):
            store.put(make_frames(1000 + number, 1, MiB), deadline=soon())
        assert read(store, kept) == whole(kept)
        assert store.get_record("prefix/a", deadline=soon()) == b"data"
        status = store.status()
        assert status.evictions > 20 and status.budget == 16 * MiB and status.notes["unreachable"] == 0
        store.close()
    finally:
        server.kill()


def test_a_replica_is_read_only(tmp_path: Path, own: RedisServer):
    """A read-only replica serves reads, and a put raises StoreReadOnly."""
    with own.client() as client:
        client.config_set("repl-diskless-sync-delay", 0)
    first = RedisStore(own.url)
    frames = make_frames(14, 2, 1000)
    first.put(frames[:1], deadline=soon())
    replica = RedisServer(tmp_path / "replica", "--replicaof", "127.0.0.1", str(own.port))
    try:
        store = RedisStore(replica.url)
        wait_until(lambda: store.lookup(names_of(frames[:1]), deadline=soon()) == 1, "the replica has the block")
        with pytest.raises(StoreReadOnly):
            store.put(frames, deadline=soon())
        with pytest.raises(StoreReadOnly):
            store.put_record("key", b"data", deadline=soon())
        assert read(store, frames) == [frames[0].data, None]
        store.close()
    finally:
        replica.kill()
        first.close()


def test_passwords(tmp_path: Path):
    """The password in the URL is used. A wrong or missing one raises StoreConfigError."""
    server = RedisServer(tmp_path / "locked", password="p@ss:/w")
    try:
        right = RedisStore(f"redis://:p%40ss%3A%2Fw@127.0.0.1:{server.port}/1")
        frames = make_frames(15, 2, 1000)
        assert right.put(frames, deadline=soon()) == 2 and read(right, frames) == whole(frames)
        user = RedisStore(f"redis://default:p%40ss%3A%2Fw@127.0.0.1:{server.port}/1")
        assert read(user, frames) == whole(frames)
        for wrong in (
            RedisStore(f"redis://:no@127.0.0.1:{server.port}"),
            RedisStore(f"redis://127.0.0.1:{server.port}"),
        ):
            for call in calls_of(wrong, 60).values():
                with pytest.raises(StoreConfigError):
                    call()
            assert wrong.status().notes["unreachable"] == 1
            wrong.close()
        right.close()
        user.close()
    finally:
        server.kill()


# Failures


def test_too_many_clients(own: RedisServer):
    """A server without room for another client is unavailable, not misconfigured, and works again later."""
    frames = make_frames(32, 2, 1000)
    holder, late = RedisStore(own.url), RedisStore(f"{own.url}/1")
    holder.put(frames, deadline=soon())
    with own.client() as client:
        client.config_set("maxclients", 2)
        for call in calls_of(late, 60).values():
            with pytest.raises(StoreUnavailable):
                call()
        assert read(holder, frames) == whole(frames)
        client.config_set("maxclients", 100)
    assert late.put(frames, deadline=soon()) == 2
    late.close()
    holder.close()


def test_a_server_that_never_replies():
    """If the server accepts connections and never replies, every call ends at its deadline. status neither waits nor
    raises."""
    silent = ScriptedServer([None])
    store = RedisStore(silent.url)
    for call in calls_of(store, 0.1).values():
        with pytest.raises(StoreTimeout):
            call()
    assert store.status().notes == {"unreachable": 1}
    wait_until(
        lambda: silent.connections > 5, "a new connection for each call: one that owes an answer is not used again"
    )
    store.close()
    silent.close()


def test_late_replies(own: RedisServer):
    """Replies after the deadline are never assigned to later commands."""
    store = RedisStore(own.url)
    frames = make_frames(16, 8, 200_000)
    store.put(frames, deadline=soon())
    with own.stopped():
        for one in frames:
            with pytest.raises(StoreTimeout):
                read(store, [one], deadline=time.monotonic() + 0.05)
    for one in reversed(frames):
        assert read(store, [one]) == [one.data]
    store.close()


def test_put_into_a_server_that_stopped_reading(own: RedisServer):
    """A put that the server does not read ends at its deadline, and its partial data never becomes visible."""
    store = RedisStore(own.url)
    frames = make_frames(17, 12, 4 * MiB)

    def put_until_it_fails() -> None:
        while True:
            store.put(frames, deadline=time.monotonic() + 0.5)
            store.delete(names_of(frames), deadline=time.monotonic() + 0.5)

    timer = threading.Timer(0.03, own.signal, [signal.SIGSTOP])
    timer.start()
    try:
        with pytest.raises((StoreTimeout, StoreUnavailable)):
            put_until_it_fails()
    finally:
        timer.join()
        own.signal(signal.SIGCONT)
    for one, data in zip(frames, read(store, frames), strict=True):
        assert data in (None, one.data)
    assert store.put(frames, deadline=soon()) == len(frames)
    assert read(store, frames) == whole(frames)
    store.close()


def test_a_restart_between_calls(own: RedisServer):
    """After a server restart the next call of every kind succeeds, and lost blocks are misses."""
    store = RedisStore(own.url)
    frames = make_frames(18, 3, 1000)
    for call in calls_of(store, 60).values():
        store.put(frames, deadline=soon())
        own.restart()
        call()
        store.delete(names_of(frames), deadline=soon())
    own.restart()
    assert read(store, frames) == [None] * 3
    store.close()


def test_a_restart_under_tls(tls: tuple[RedisServer, str]):
    """A restart under TLS is survived as one without. An untrusted certificate is refused."""
    server, url = tls
    store = RedisStore(url, prefix=fresh())
    frames = make_frames(33, 4, 3 * MiB)
    store.put(frames, deadline=soon())
    server.restart()
    assert read(store, frames) == [None] * 4
    server.restart()
    assert store.put(frames, deadline=soon()) == 4
    assert read(store, frames) == whole(frames)
    store.close()
    stranger = RedisStore(url.partition("?")[0])
    with pytest.raises(StoreUnavailable):
        stranger.lookup(names_of(frames), deadline=soon())
    stranger.close()


def test_unsolicited_bytes():
    """Bytes that arrive between two calls are not taken for the reply of the second."""
    [one] = make_frames(34, 1, 10)
    sent = threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        for extra in (b":1\r\n", b""):
            connection, _ = listener.accept()
            with connection:
                while connection.recv(1 << 16):
                    connection.sendall(b":0\r\n")
                    time.sleep(0.05)  # so the reply has been read before the extra one arrives
                    connection.sendall(extra)
                    sent.set()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    store = RedisStore(f"redis://127.0.0.1:{listener.getsockname()[1]}")
    assert store.lookup([one.name], deadline=soon()) == 0
    sent.wait()
    assert store.lookup([one.name], deadline=soon()) == 0
    store.close()
    thread.join()
    listener.close()


def test_a_server_that_is_down(own: RedisServer):
    """While the server is down every call raises StoreUnavailable. When it is up again, the same store works."""
    store = RedisStore(own.url)
    frames = make_frames(19, 3, 1000)
    store.put(frames, deadline=soon())
    assert store.status().bytes > 0
    own.kill()
    for call in calls_of(store, 60).values():
        with pytest.raises(StoreUnavailable):
            call()
    own.start()
    assert store.put(frames, deadline=soon()) == 3 and read(store, frames) == whole(frames)
    store.close()


def test_killed_and_restarted_while_threads_load(own: RedisServer):
    """Threads that use a server which is killed and restarted get intact blocks, misses or StoreError."""
    store = RedisStore(own.url)
    chains = [make_frames(20 + number, 6, 300_000) for number in range(3)]
    over = threading.Event()

    def work(chain: list[Frame]) -> int:
        loaded = 0
        while not over.is_set() or not loaded:
            with suppress(StoreUnavailable, StoreTimeout):
                store.put(chain, deadline=soon(5))
                for one, data in zip(chain, read(store, chain, deadline=soon(5)), strict=True):
                    assert data in (None, one.data)
                    loaded += data is not None
        return loaded

    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(work, chain) for chain in chains]
        try:
            for _ in range(4):
                time.sleep(0.1)
                own.restart()
        finally:
            over.set()
        assert all(future.result() for future in running)
    store.put(chains[0], deadline=soon())
    assert read(store, chains[0]) == whole(chains[0])
    store.close()


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"$99999999999\r\n",
        b"$-5\r\n",
        b"*99999999999\r\n",
        b":one\r\n",
        b"?\r\n",
        b"\r\n",
        b"+" + b"x" * 200_000,
        b"$5\r\nab",
        b"$3\r\nabcdef\r\n",
        b"*1\r\n" * 50,
        b":1\r\n" * 500,
        b"$3\r\nabc\r\n" * 500,
    ],
)
def test_invalid_replies(answer: bytes):
    """An invalid reply raises StoreUnavailable, and the connection is not used again."""
    liar = ScriptedServer([answer])
    store = RedisStore(liar.url)
    for number, call in enumerate(calls_of(store, 60).values(), 1):
        with pytest.raises(StoreUnavailable):
            call()
        assert liar.connections >= number
    assert store.status().blocks == -1
    store.close()
    liar.close()


@pytest.mark.parametrize("announced", [1 << 29, 9 << 20])
def test_an_announced_length_allocates_nothing(announced: int):
    """A server that announces a long value and sends a few bytes makes the client allocate little."""
    liar = ScriptedServer([b"$%d\r\n" % announced + bytes(1000)])
    store = RedisStore(liar.url)
    tracemalloc.start()
    try:
        with pytest.raises(StoreUnavailable):
            store.get_record("key", deadline=soon())
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
        store.close()
        liar.close()


def test_records_are_listed_up_to_a_limit(store: RedisStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """More records than are listed, which may be of others, are an error that says how many there are and what to do: a list of
    some would look as if others had been deleted. The server is not asked for their keys."""
    monkeypatch.setattr(redis_store, "_MOST_RECORDS", 3)
    for number in range(3):
        store.put_record(f"kind/{number}", b"data", deadline=soon())
    assert store.records("", deadline=soon()) == [f"kind/{number}" for number in range(3)]
    store.put_record("kind/3", b"data", deadline=soon())
    asked = list[bytes]()

    def noted(*parts: bytes) -> resp.Command:
        asked.append(parts[1])
        return resp.make_command(*parts)

    monkeypatch.setattr(redis_store, "make_command", noted)
    with pytest.raises(StoreUnavailable, match="has 4 records, and 3 are listed at most"):
        store.records("kind/", deadline=soon())
    assert asked == [b"HLEN"]


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(b"*1000\r\n" + (b"$100000\r\n" + bytes(100_000) + b"\r\n") * 30, id="values"),
        pytest.param(b"*1000000\r\n" + b":1\r\n" * 100_000, id="numbers"),
        pytest.param((b"*1000\r\n" + b"*0\r\n" * 1000) * 100, id="arrays"),
        pytest.param(b"*1000\r\n" + (b"*1000\r\n" + b"*0\r\n" * 1000) * 100, id="nested"),
    ],
)
def test_a_reply_of_many_values_is_bounded(answer: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """An array takes no more memory than one reply may, whatever it is made of: the rest is not read."""
    monkeypatch.setattr(resp, "_LARGEST_REPLY", 1 << 20)
    liar = ScriptedServer([b":1\r\n", answer])
    store = RedisStore(liar.url)
    tracemalloc.start()
    try:
        with pytest.raises(StoreUnavailable):
            store.records("", deadline=soon())
        assert tracemalloc.get_traced_memory()[1] < 3 << 20
    finally:
        tracemalloc.stop()
        store.close()
        liar.close()


replies = st.recursive(
    st.one_of(
        st.integers(-2, 3000).map(lambda n: b":%d\r\n" % n),
        st.binary(max_size=300).map(lambda value: b"$%d\r\n%b\r\n" % (len(value), value)),
        st.sampled_from(
            [b"$-1\r\n", b"+OK\r\n", b"-ERR x\r\n", b"-WRONGTYPE x\r\n", b"-MOVED 1 :1\r\n", b"-\r\n", b"$1128\r\n"]
        ),
        st.binary(max_size=20),
    ),
    lambda inner: st.lists(inner, max_size=4).map(lambda parts: b"*%d\r\n" % len(parts) + b"".join(parts)),
    max_leaves=6,
)


@settings(max_examples=examples(150), deadline=None)
@given(st.lists(replies, max_size=4).map(b"".join), st.sampled_from(sorted(calls_of(RedisStore("redis://x"), 0))))
def test_arbitrary_replies(answer: bytes, what: str):
    """For any reply a call returns or raises StoreError."""
    liar = ScriptedServer([answer])
    store = RedisStore(liar.url)
    try:
        calls_of(store, 60)[what]()
    except StoreError:
        pass
    finally:
        store.close()
        liar.close()


def test_wrong_urls():
    """A wrong URL is refused by the constructor, without a connection."""
    for url in (
        "http://localhost",
        "redis+cluster://a,b/1",
        "redis://a,b",
        "redis://localhost:port",
        "redis://localhost?no_such_option=1",
        "unix+cluster:///tmp/x",
        "redis+sentinel://a,b",
        "",
    ):
        with pytest.raises(StoreConfigError):
            RedisStore(url)
    for prefix in ("", "a b", "{tag}", "*", "x" * 200):
        with pytest.raises(StoreConfigError):
            RedisStore("redis://localhost", prefix=prefix)
    with pytest.raises(StoreConfigError):
        RedisStore("redis://localhost", ttl=0)


def test_record_keys(store: RedisStore):
    """Invalid record keys are refused."""
    for key in ("", "/a", "a/", "a//b", "a b", "ä", "a\n"):
        with pytest.raises(StoreConfigError):
            store.put_record(key, b"x", deadline=soon())


def test_a_listing_of_very_many_keys(server: RedisServer, store: RedisStore, monkeypatch: pytest.MonkeyPatch):
    """A listing of names that finds none among very many keys ends with its deadline, and asks for nothing afterwards: a start
    that looks for the blocks of a namespace waits for it, and memory holds one answer of the server at a time."""
    monkeypatch.setattr(redis_store, "_SCAN_BATCH", 1)
    with server.client() as client:
        prefix = fresh()
        client.mset({f"{prefix}{number}": b"" for number in range(20_000)})  # of another program
        client.scan(count=1)
        asked = [client.info("commandstats")["cmdstat_scan"]["calls"]]
        with pytest.raises(StoreTimeout):
            list(store.list_names(bytes(16), deadline=soon(0.05)))
        asked += [client.info("commandstats")["cmdstat_scan"]["calls"] for _ in range(2)]
        client.delete(*(f"{prefix}{number}" for number in range(20_000)))
    assert asked[1] == asked[2] < asked[0] + 20_000


def test_a_store_crosses_a_fork(server: RedisServer, store: RedisStore):
    """A forked child opens its own connections, and both processes read their own blocks concurrently."""
    mine, theirs = make_frames(30, 5, 50_000), make_frames(31, 5, 50_000)
    store.put([*mine, *theirs], deadline=soon())
    context = multiprocessing.get_context("fork")
    begun = context.Event()

    def child() -> None:
        with server.client() as client:
            before = {one["id"] for one in client.client_list()}
            right = read(store, theirs) == whole(theirs)
            own = {one["id"] for one in client.client_list()} - before
        begun.set()
        for _ in range(50):
            right = right and read(store, theirs) == whole(theirs)
        os._exit(0 if right and own else 1)

    process = context.Process(target=child)
    process.start()
    begun.wait(60)
    while process.is_alive():
        assert read(store, mine) == whole(mine)
    process.join()
    assert process.exitcode == 0


@pytest.mark.parametrize("scheme", ["redis", "redis+cluster"])
def test_a_child_is_not_held_up_by_its_parents_threads(scheme: str):
    """A child that is forked while threads of its parent ask for the status and for a node does both itself."""
    store = RedisStore(f"{scheme}://127.0.0.1:{free_port()}")

    def child() -> None:
        signal.alarm(60)  # ends the child: a call waits for the lock
        with pytest.raises(StoreUnavailable):
            store.present(names_of(make_frames(1, 1, 10)), deadline=soon())
        assert store.status().notes["unreachable"] == 1

    with store._status_lock, getattr(store._nodes, "_lock", threading.Lock()):
        assert in_child(child) == 0
    store.close()


# Clusters


def test_a_cluster_is_found_through_any_node(cluster: RedisCluster):
    """A cluster is found by the address of one node, an unreachable one does no harm, and blocks are spread over all nodes."""
    prefix = fresh()
    dead = ScriptedServer([b""])
    store = RedisStore(f"redis+cluster://127.0.0.1:{dead.port},127.0.0.1:{cluster.nodes[2].port}", prefix=prefix)
    frames = make_frames(40, 60, 1000)
    assert store.put(frames, deadline=soon()) == 60
    assert read(store, frames) == whole(frames)
    for node in cluster.nodes:
        with node.client() as client:
            assert client.keys(f"{prefix}:b:*")
    assert store.status().bytes > 0
    store.close()
    dead.close()


def test_slots_that_migrate(cluster: RedisCluster):
    """A block is found while its slot migrates (ASK) and afterwards (MOVED), and so are other blocks."""
    for number in range(3):
        cluster.command(number, "FLUSHALL")
    prefix = fresh()
    store = RedisStore(cluster.url, prefix=prefix)
    frames = make_frames(41, 20, 30_000)
    store.put(frames, deadline=soon())
    slot, old, new = cluster.move(key_of(prefix, frames[7].name).encode())
    try:
        assert read(store, frames) == whole(frames)
        assert store.lookup(names_of(frames), deadline=soon()) == 20
        cluster.settle(slot, new)
        assert read(store, frames) == whole(frames)
        assert len(list(store.scan(deadline=soon()))) == 20
    finally:
        store.delete(names_of(frames), deadline=soon())
        store.close()
        cluster.settle(slot, old)


@pytest.mark.slow
def test_a_cluster_that_loses_a_node(tmp_path: Path):
    """Blocks of a dead node are lost, and all others can be read. When they are written again, another node takes them. The
    tier as a whole does not fail, and deleting reaches both nodes."""
    cluster = RedisCluster(tmp_path / "cluster", "--cluster-require-full-coverage", "no")
    prefix = fresh()
    store = RedisStore(cluster.url, prefix=prefix)
    frames = make_frames(42, 60, 1000)
    try:
        store.put(frames, deadline=soon())
        gone = cluster.names_on(0, prefix)
        assert 0 < len(gone) < 40
        cluster.nodes[0].kill()
        for lost in (FAILED, MISSING):
            sizes = [lost if one.name in gone else len(one.data) for one in frames]
            assert lengths_of(store, frames, soon()) == sizes
        assert store.lookup(names_of(frames), deadline=soon()) == sizes.index(MISSING)
        assert store.status().notes["unreachable"] == 1
        for _ in range(2):
            assert store.put(frames, deadline=soon()) == 60
            assert store.lookup(names_of(frames), deadline=soon()) == 60
            assert read(store, frames) == whole(frames)
        with pytest.raises(StoreUnavailable):
            store.delete(names_of(frames), deadline=soon())
        store.put(frames, deadline=soon())
        cluster.nodes[0].start()
        wait_until(lambda: lengths_of(store, frames, soon()).count(MISSING) == len(gone), "the node is used again")
        assert store.put(frames, deadline=soon()) == 60
        assert read(store, frames) == whole(frames)
        listed = [name for names in store.list_names(LAYOUT, ROOT[:16], deadline=soon()) for name in names]
        assert len(listed) == 60 + len(gone) and set(listed) == set(names_of(frames))
        assert len(list(store.scan(deadline=soon()))) == 60
        assert store.delete(names_of(frames), deadline=soon()) == 60
        assert not list(store.scan(deadline=soon()))
    finally:
        store.close()
        cluster.kill()


def test_a_node_that_hangs_costs_one_deadline(cluster: RedisCluster):
    """A node that hangs costs one call its deadline. Later calls skip it, until it replies again."""
    prefix = fresh()
    store = RedisStore(cluster.url, prefix=prefix)
    frames = make_frames(44, 60, 1000)
    store.put(frames, deadline=soon())
    gone = cluster.names_on(1, prefix)
    with cluster.nodes[1].stopped():
        before = time.monotonic()
        for lost in (FAILED, *[MISSING] * 6):
            sizes = [lost if one.name in gone else len(one.data) for one in frames]
            assert lengths_of(store, frames, soon(3.0 if lost == FAILED else 60.0)) == sizes
        assert time.monotonic() - before < 60, "a later call has waited for the node until its deadline"
    wait_until(lambda: read(store, frames) == whole(frames), "the node is used again")
    store.close()


def lengths_of(store: RedisStore, frames: Sequence[Frame], deadline: float) -> list[int]:
    return store.get(names_of(frames), [memoryview(bytearray(len(one.data))) for one in frames], deadline=deadline)


@pytest.mark.extended
def test_a_cluster_url_for_a_single_server(server: RedisServer):
    """A cluster URL for a single server raises StoreConfigError."""
    store = RedisStore(server.url.replace("redis://", "redis+cluster://"))
    with pytest.raises(StoreConfigError):
        store.lookup(names_of(make_frames(43, 1, 10)), deadline=soon())
    store.close()


# Sentinel


@pytest.mark.slow
def test_sentinel_replaces_the_primary(tmp_path: Path):
    """A store follows Sentinel to the replica that replaces a dead primary, and finds the blocks there."""
    primary = RedisServer(tmp_path / "primary", "--repl-diskless-sync-delay", "0")
    replica = RedisServer(tmp_path / "replica", "--replicaof", "127.0.0.1", str(primary.port))
    sentinel = Sentinel(tmp_path / "sentinel", primary.port)
    store = RedisStore(f"redis+sentinel://127.0.0.1:{free_port()},127.0.0.1:{sentinel.port}/main/2")
    frames = make_frames(50, 8, 10_000)
    try:
        assert store.put(frames, deadline=soon()) == 8
        with replica.client() as client:
            wait_until(lambda: client.info("keyspace").get("db2", {}).get("keys") == 8, "the replica has the blocks")
        wait_until(lambda: sentinel.replicas == 1, "Sentinel knows the replica")
        primary.kill()

        def found() -> bool:
            with suppress(StoreUnavailable, StoreTimeout):
                return (
                    store.lookup(names_of(frames), deadline=soon(1)) == 8 and store.put(frames, deadline=soon(1)) == 8
                )
            return False

        wait_until(found, "the replica is the primary")
        assert read(store, frames) == whole(frames)
        assert store.put(make_frames(51, 3, 10), deadline=soon()) == 3
        unknown = RedisStore(f"redis+sentinel://127.0.0.1:{sentinel.port}/other")
        with pytest.raises(StoreConfigError):
            unknown.lookup(names_of(frames), deadline=soon())
        unknown.close()
    finally:
        store.close()
        sentinel.kill()
        replica.kill()
