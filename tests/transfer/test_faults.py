"""Faults: wires that flip, drop, stall and cut; processes killed in every state; peers that do not match."""

import os
import random
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest
from actors import LAYOUT, PATIENCE, QUICK, Decode, Prefill, Recorder, config, keys_of, parts_of, until
from link_contract import child
from networks import over_each_link

from foreword.blocks.layout import LayerLayout, Layout
from foreword.errors import ConfigError
from foreword.transfer import handshake
from foreword.transfer.connection import Connection
from foreword.transfer.errors import PeerRejected, TransferError
from foreword.transfer.protocol import State, TransferOutcome
from foreword.transfer.transfer_endpoint import TransferEndpoint
from foreword.transfer.transfers import KVDestination, TransferService
from foreword.transfer.wire_format import Reason
from foreword.transfer_config import TransferConfig

SECRET = "a shared secret of the tests"


def request(seed: int, tokens: int) -> bytes:
    return f"{seed} {tokens}".encode()


class Proxy:
    """A faulty wire: passes bytes between a client and a server, and injects one fault into those from the server.

    Args:
        fault: `flip`, `drop`, `stall` or `cut`, at byte `at` of what the server sends.
    """

    def __init__(self, target: str, fault: str, at: int) -> None:
        host, _, port = target.rpartition(":")
        self.target = (host, int(port))
        self.fault, self.at = fault, at
        self.passed = 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.sockets: list[socket.socket] = []
        threading.Thread(target=self.run, daemon=True).start()

    def run(self) -> None:
        client, _ = self.listener.accept()
        server = socket.create_connection(self.target)
        self.sockets = [client, server]
        threading.Thread(target=self.pump, args=(client, server, False), daemon=True).start()
        self.pump(server, client, True)

    def pump(self, source: socket.socket, target: socket.socket, spoiled: bool) -> None:
        try:
            while data := source.recv(65536):
                target.sendall(self.spoil(bytearray(data)) if spoiled else data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def spoil(self, data: bytearray) -> bytes:
        start, self.passed = self.passed, self.passed + len(data)
        where = self.at - start
        if not 0 <= where < len(data):
            return bytes(data)
        if self.fault == "flip":
            data[where] ^= 1 << self.at % 8
        elif self.fault == "drop":
            del data[where : where + 100]
        elif self.fault == "cut":
            self.close()
        else:
            threading.Event().wait(PATIENCE)
        return bytes(data)

    def close(self) -> None:
        for one in (self.listener, *self.sockets):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()


@pytest.mark.parametrize("count", [1, pytest.param(12, marks=pytest.mark.slow)], ids=["one-place", "many-places"])
@pytest.mark.parametrize("fault", ["flip", "drop", "cut", "stall"])
def test_a_wire_that_misbehaves(fault: str, count: int) -> None:
    """Wherever in the stream the fault is, no wrong KV reaches the service, both sides end, and all blocks are free again."""
    draw = random.Random(fault)
    for at in [draw.randrange(600, 90_000) for _ in range(min(count, 3) if fault == "stall" else count)]:
        prefill, decode = Prefill(), Decode()
        with ExitStack() as stack:
            listening = TransferEndpoint(config(links=("tcp",), **QUICK), prefill)
            stack.callback(listening.close)
            calling = TransferEndpoint(config(links=("tcp",), **QUICK), decode)
            stack.callback(calling.close)
            proxy = Proxy(listening.listen(), fault, at)
            stack.callback(proxy.close)
            connection = calling.connect(proxy.address)
            destination = connection.pull(request(1, 400), keys_of(1, 400), context=decode.hold(400))
            assert destination.wait(PATIENCE) is TransferOutcome.NOT_TAKEN, f"{fault} at {at} of {proxy.passed}"
            assert destination.reason in (Reason.LOST, Reason.CONTENT, Reason.DEADLINE, Reason.GAPS)
            until(lambda listening=listening: not listening.status().transfers)
            decode.check()
            assert not decode.results


def test_a_flipped_payload_fails_one_transfer() -> None:
    """A payload that does not match its checksum ends its transfer with that reason; the connection continues."""
    prefill, decode = Prefill(), Decode()
    with ExitStack() as stack:
        listening = TransferEndpoint(config(links=("tcp",)), prefill)
        stack.callback(listening.close)
        calling = TransferEndpoint(config(links=("tcp",)), decode)
        stack.callback(calling.close)
        # The first payload is some 16 kB long and begins in the first 2 kB.
        proxy = Proxy(listening.listen(), "flip", 9000)
        stack.callback(proxy.close)
        connection = calling.connect(proxy.address)
        destination = connection.pull(request(1, 400), keys_of(1, 400), context=decode.hold(400))
        assert destination.wait(PATIENCE) is TransferOutcome.NOT_TAKEN and destination.reason is Reason.CONTENT
        assert prefill.await_("ended").reason is Reason.CONTENT
        again = connection.pull(request(2, 400), keys_of(2, 400), context=decode.hold(400))
        assert again.wait(PATIENCE) is TransferOutcome.TAKEN
        decode.check()


# Peers that do not fit


def refused(theirs: TransferConfig, ours: TransferConfig, layouts: tuple[Layout | None, Layout | None]) -> str:
    """Why a connection is refused; both sides must notice it and stay usable."""
    with ExitStack() as stack:
        listening = TransferEndpoint(theirs, TransferService(layouts[0]))
        stack.callback(listening.close)
        calling = TransferEndpoint(ours, TransferService(layouts[1]))
        stack.callback(calling.close)
        address = listening.listen()
        with pytest.raises(PeerRejected) as raised:
            calling.connect(address)
        until(
            lambda: (
                listening.status().counts.get("peers_rejected", 0)
                + listening.status().counts.get("greetings_failed", 0)
                == 1
            )
        )
        assert listening.status().connections == {} and calling.status().connections == {}
        return raised.value.message


def test_a_probe_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    """A process that connects and closes at once, to see whether one listens, is counted but logged at debug level only."""
    caplog.set_level("DEBUG", "foreword.transfer")
    with ExitStack() as stack:
        listening = TransferEndpoint(config(), TransferService())
        stack.callback(listening.close)
        host, port = listening.listen().rsplit(":", 1)
        socket.create_connection((host, int(port))).close()
        until(lambda: listening.status().counts.get("greetings_failed") == 1)
        until(lambda: bool(caplog.records))
    assert [record.levelname for record in caplog.records] == ["DEBUG"]


@pytest.mark.parametrize(("theirs", "ours"), [(SECRET, SECRET + "!"), (SECRET, None), (None, SECRET)])
def test_the_wrong_secret(theirs: str | None, ours: str | None) -> None:
    """A different secret, or none on one side, is refused with a message that names the setting."""
    assert "transfer.secret" in refused(config(secret=theirs), config(secret=ours), (LAYOUT, LAYOUT))


def test_the_right_secret() -> None:
    """Two sides with the same secret connect."""
    with ExitStack() as stack:
        listening = TransferEndpoint(config(secret=SECRET), TransferService(LAYOUT))
        stack.callback(listening.close)
        calling = TransferEndpoint(config(secret=SECRET), TransferService(LAYOUT))
        stack.callback(calling.close)
        assert calling.connect(listening.listen()).alive


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (Layout(b"model", 32, LAYOUT.layers, "bfloat16"), "block size"),
        (Layout(b"model", 16, LAYOUT.layers, "float16"), "dtype"),
        (Layout(b"model", 16, (LayerLayout(2, 16, 16),), "bfloat16"), "layers"),
        (Layout(b"other", 16, LAYOUT.layers, "bfloat16"), "weights"),
        (Layout(b"model", 16, LAYOUT.layers, "bfloat16", order="packed"), "order"),
    ],
    ids=["block-size", "dtype", "layers", "model", "order"],
)
def test_another_layout(other: Layout, says: str) -> None:
    """A peer with another KV layout is refused with a message that says what differs, in both directions."""
    assert says in refused(config(), config(), (other, LAYOUT))
    assert says in refused(config(), config(), (LAYOUT, other))


def test_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer with another protocol version is refused with both versions in the message."""
    listening = TransferEndpoint(config(), TransferService(LAYOUT))
    address = listening.listen()
    with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2]))) as peer:
        opening = handshake._OPENING.pack(b"FWTH", 7, 1, 0, bytes(range(32)))
        peer.sendall(opening)
        peer.settimeout(PATIENCE)
        answer = b""
        while data := peer.recv(1000):
            answer += data
        assert handshake._OPENING.unpack(answer)[1] == 1, "it says its version and nothing else"
    until(lambda: listening.status().counts.get("peers_rejected") == 1)

    server = socket.create_server(("127.0.0.1", 0))
    calling = TransferEndpoint(config(), TransferService(LAYOUT))

    def answer_as_another() -> None:
        peer, _ = server.accept()
        with peer:
            peer.recv(handshake._OPENING.size, socket.MSG_WAITALL)
            peer.sendall(handshake._OPENING.pack(b"FWTH", 7, 1, 0, bytes(range(32))))
            peer.recv(1)

    thread = threading.Thread(target=answer_as_another)
    thread.start()
    with pytest.raises(PeerRejected, match=r"version 7 .* version 1"):
        calling.connect(f"127.0.0.1:{server.getsockname()[1]}")
    thread.join(PATIENCE)
    server.close()
    calling.close()
    listening.close()


@pytest.mark.parametrize(
    "sends", [b"", b"GET / HTTP/1.1\r\n\r\n" + bytes(100), "echo"], ids=["silence", "http", "echo"]
)
def test_strangers(sends: bytes | str) -> None:
    """A client that sends nothing, sends garbage, or echoes is disconnected in time; other clients are served meanwhile."""
    listening = TransferEndpoint(config(connect_timeout=4.0, secret=SECRET), TransferService(LAYOUT))
    address = listening.listen()
    calling = TransferEndpoint(config(secret=SECRET), TransferService(LAYOUT))
    with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2]))) as stranger:
        stranger.settimeout(PATIENCE)
        if isinstance(sends, bytes):
            stranger.sendall(sends)
        else:
            opening = handshake._OPENING.pack(b"FWTH", 1, 1, 1, bytes(32))
            stranger.sendall(opening)
            stranger.sendall(stranger.recv(44, socket.MSG_WAITALL)[:32])
        assert calling.connect(address).alive
        try:
            while stranger.recv(1000):
                pass
        except ConnectionResetError:
            pass
    until(lambda: sum(listening.status().counts.values()) == 1)
    until(lambda: listening.status().connections == {"shm": 1})
    calling.close()
    listening.close()


def test_a_wrong_proof() -> None:
    """A client that does not know the secret gets one byte ("no") and nothing from which it could learn the secret."""
    listening = TransferEndpoint(config(secret=SECRET), TransferService(LAYOUT))
    address = listening.listen()
    with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2]))) as stranger:
        stranger.settimeout(PATIENCE)
        stranger.sendall(handshake._OPENING.pack(b"FWTH", 1, 1, 1, bytes(32)) + bytes(32))
        answer = b""
        while data := stranger.recv(1000):
            answer += data
        assert len(answer) == handshake._OPENING.size + 1 and answer[-1:] == b"\x00"
    until(lambda: listening.status().counts.get("peers_rejected") == 1)
    listening.close()


@pytest.mark.parametrize("bind", ["0.0.0.0:0", "[::]:0", "10.1.2.3:9000", "example.org:1"])
def test_no_public_address_without_a_secret(bind: str) -> None:
    """An address that other hosts can reach is not bound without a secret; the error names the setting."""
    with pytest.raises(ConfigError, match=r"transfer\.secret"):
        TransferEndpoint(TransferConfig(bind=bind))
    endpoint = TransferEndpoint(config(), TransferService())
    with pytest.raises(ConfigError, match=r"transfer\.secret"):
        endpoint.connect("10.1.2.3:9000")
    endpoint.close()


@pytest.mark.parametrize(
    "wrong",
    [{"secret": "short"}, {"links": ("shm",)}, {"links": ("tcp", "pigeon")}, {"ring": "1KiB"}, {"lease_seconds": 0.0},
     {"lease_seconds": float("nan")}, {"max_connections": 0}],
    ids=lambda wrong: next(iter(wrong)),
)  # fmt: skip
def test_settings_out_of_range(wrong: dict[str, object]) -> None:
    """Values out of range are ConfigErrors that name the key."""
    with pytest.raises(ConfigError, match=f"transfer.{next(iter(wrong))}"):
        TransferConfig(**wrong)  # type: ignore[arg-type]


def test_shared_memory_that_cannot_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """If either peer cannot open the other's segment (containers, other hosts), both fall back to TCP."""
    for fails_at in (0, 1):
        calls = iter(range(10))
        real = handshake.open_peers

        def sometimes(
            *args: object, calls: Iterator[int] = calls, fails_at: int = fails_at, real: Callable[..., object] = real
        ) -> object:
            if next(calls) == fails_at:
                raise TransferError("not here")
            return real(*args)

        monkeypatch.setattr(handshake, "open_peers", sometimes)
        prefill, decode = Prefill(), Decode()
        listening, calling = TransferEndpoint(config(), prefill), TransferEndpoint(config(), decode)
        connection = calling.connect(listening.listen())
        assert connection.link.name == "tcp"
        destination = connection.pull(request(1, 100), keys_of(1, 100), context=decode.hold(100))
        assert destination.wait(PATIENCE) is TransferOutcome.TAKEN
        decode.check()
        calling.close()
        listening.close()
        monkeypatch.setattr(handshake, "open_peers", real)


# kill -9


class Line:
    """A pipe from a child process to its parent: words, one per line."""

    def __init__(self) -> None:
        self.read, self.write = os.pipe()

    def tell(self, word: str) -> None:
        os.write(self.write, word.encode() + b"\n")

    def hear(self) -> str:
        word = b""
        while not word.endswith(b"\n"):
            assert select.select([self.read], [], [], PATIENCE)[0], "the child says nothing"
            data = os.read(self.read, 1)
            assert data, "the child has ended"
            word += data
        return word.decode().strip()

    def close(self) -> None:
        os.close(self.read)
        os.close(self.write)


@contextmanager
def other_process(work: Callable[[Line], None]) -> Iterator[tuple[int, Line]]:
    """A child process that runs `work`, which reports its address."""
    line = Line()
    with child(lambda: work(line)) as number:
        yield number, line
    line.close()


def listen_with(
    service: Callable[[Line], Recorder], links: tuple[str, ...], **settings: object
) -> Callable[[Line], None]:
    def work(line: Line) -> None:
        endpoint = TransferEndpoint(config(links=links, **settings), service(line))
        line.tell(endpoint.listen())
        time.sleep(PATIENCE)

    return work


def settled(endpoint: TransferEndpoint) -> bool:
    status = endpoint.status()
    return not status.transfers and not status.connections and not status.queued_bytes


@over_each_link
@pytest.mark.parametrize("state", ["asked", "sending", "delivered"])
def test_a_killed_source_of_a_pull(state: str, links: tuple[str, ...]) -> None:
    """If the source is killed in any state, the destination ends and frees its blocks, or has everything already."""
    with other_process(listen_with(lambda line: Prefill(stop=state, tell=line.tell), links)) as (number, line):
        decode = Decode(stop="complete" if state == "delivered" else "")
        calling = TransferEndpoint(config(links=links), decode)
        connection = calling.connect(line.hear())
        destination = connection.pull(request(1, 500), keys_of(1, 500), context=decode.hold(500))
        assert line.hear() == state
        if state == "delivered":
            decode.await_("finished")
        os.kill(number, signal.SIGKILL)
        if state == "delivered":
            until(lambda: not connection.alive)
            assert destination.state is State.COMPLETE and destination.take()
        outcome = destination.wait(PATIENCE)
        assert outcome is (TransferOutcome.TAKEN if state == "delivered" else TransferOutcome.NOT_TAKEN)
        assert destination.reason is (None if state == "delivered" else Reason.LOST)
        until(lambda: settled(calling))
        decode.check()
        calling.close()


@over_each_link
@pytest.mark.parametrize("state", ["considered", "receiving", "complete"])
def test_a_killed_destination_of_a_push(state: str, links: tuple[str, ...]) -> None:
    """If the destination is killed before it took the request, the source owns it again and gets every buffer back."""
    with other_process(listen_with(lambda line: Decode(stop=state, tell=line.tell), links)) as (number, line):
        giving = Recorder()
        calling = TransferEndpoint(config(links=links), giving)
        connection = calling.connect(line.hear())
        source = connection.push(request(2, 500), keys_of(2, 500), 500)
        freed = threading.Semaphore(0)
        count = 0
        if state != "considered":
            giving.await_("accepted")
            for part, data in parts_of(2, 500):
                source.send(part, [data], sent=freed.release)
                count += 1
        if state == "complete":
            source.finish(b"state", 500)
        while line.hear() != state:
            pass
        os.kill(number, signal.SIGKILL)
        assert source.wait(PATIENCE) is TransferOutcome.NOT_TAKEN and source.reason is Reason.LOST
        for _ in range(count):
            assert freed.acquire(timeout=PATIENCE)
        until(lambda: settled(calling))
        assert giving.ends == {source.id: 1}
        calling.close()


def ask_from(address: str, line: Line, stop: str, links: tuple[str, ...]) -> None:
    """A child process that requests a pull and stops at the state `stop`."""
    decode = Decode(stop=stop, tell=line.tell)
    endpoint = TransferEndpoint(config(links=links), decode)
    connection = endpoint.connect(address)
    connection.pull(request(3, 500), keys_of(3, 500), context=decode.hold(500))
    line.tell("wanted")
    time.sleep(PATIENCE)


def offer_from(address: str, line: Line, stop: str, links: tuple[str, ...]) -> None:
    """A child process that requests a push and stops at the state `stop`."""
    giving = Recorder()
    endpoint = TransferEndpoint(config(links=links), giving)
    source = endpoint.connect(address).push(request(4, 500), keys_of(4, 500), 500)
    if stop != "offered":
        giving.await_("accepted")
        for number, (part, data) in enumerate(parts_of(4, 500)):
            if stop != "sending" or number < 2:
                source.send(part, [data])
        if stop == "delivered":
            source.finish(b"state", 500)
    line.tell(stop)
    time.sleep(PATIENCE)


def caller(
    work: Callable[[str, Line, str, tuple[str, ...]], None], stop: str, links: tuple[str, ...]
) -> Callable[[Line, int], None]:
    def run(line: Line, address: int) -> None:
        work(os.read(address, 200).decode(), line, stop, links)

    return run


@contextmanager
def calling_process(
    run: Callable[[Line, int], None], service: Recorder, links: tuple[str, ...]
) -> Iterator[tuple[int, Line, TransferEndpoint]]:
    """A child process, forked before this process has threads, that gets the address to connect to later."""
    told, tell = os.pipe()
    line = Line()
    with child(lambda: run(line, told)) as number:
        listening = TransferEndpoint(config(links=links), service)
        os.write(tell, listening.listen().encode())
        yield number, line, listening
        listening.close()
    line.close()
    os.close(told)
    os.close(tell)


@over_each_link
@pytest.mark.parametrize(("stop", "until_word"), [("asked", "wanted"), ("sending", "receiving"), ("", "complete")])
def test_a_killed_destination_of_a_pull(stop: str, until_word: str, links: tuple[str, ...]) -> None:
    """If the destination is killed in any state, the source's lease ends at once."""
    prefill = Prefill(stop=stop)
    here = until_word if until_word in ("receiving", "complete") else ""
    with calling_process(caller(ask_from, here, links), prefill, links) as (number, line, listening):
        while line.hear() != until_word:
            pass
        source = prefill.await_("wanted")
        os.kill(number, signal.SIGKILL)
        assert source.wait(PATIENCE) is TransferOutcome.NOT_TAKEN and source.reason is Reason.LOST
        until(lambda: settled(listening))
        assert prefill.ends == {source.id: 1}


@over_each_link
@pytest.mark.parametrize("state", ["offered", "sending", "delivered"])
def test_a_killed_source_of_a_push(state: str, links: tuple[str, ...]) -> None:
    """If the source is killed in any state, the destination frees its blocks, or has taken the request already."""
    decode = Decode(stop="considered" if state == "offered" else "complete")
    with calling_process(caller(offer_from, state, links), decode, links) as (number, line, listening):
        assert line.hear() == state
        destination = decode.await_("finished" if state == "delivered" else "offered")
        os.kill(number, signal.SIGKILL)
        assert destination.wait(PATIENCE) is TransferOutcome.NOT_TAKEN
        assert isinstance(destination, KVDestination) and not destination.take()
        until(lambda: settled(listening))
        decode.check()


# Who has it?


def delivered(giving: Recorder, connection: Connection, seed: int = 5) -> object:
    source = connection.push(request(seed, 100), keys_of(seed, 100), 100)
    giving.await_("accepted")
    for part, data in parts_of(seed, 100):
        source.send(part, [data])
    source.finish(b"state", 100)
    return source


def test_a_lost_taken_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection breaks after the destination took a request and before `Taken` arrives: the source asks and learns it."""
    decode, giving = Decode(stop="complete"), Recorder()
    with ExitStack() as stack:
        listening, calling = TransferEndpoint(config(), decode), TransferEndpoint(config(), giving)
        stack.callback(listening.close)
        stack.callback(calling.close)
        connection = calling.connect(listening.listen())
        source = delivered(giving, connection)
        destination = decode.await_("finished")
        assert isinstance(destination, KVDestination)
        # Taken says so into a connection that breaks before it is sent.
        monkeypatch.setattr(destination.channel, "post", lambda *_, **__: None)
        assert destination.take()
        connection.close()
        assert source.wait(PATIENCE) is TransferOutcome.TAKEN  # type: ignore[attr-defined]
        assert destination.outcome is TransferOutcome.TAKEN
        assert len(calling._connections) == 1, "it asked over a new connection"
        decode.check()


def test_an_ownership_query_decides() -> None:
    """The connection breaks before the destination took the request: the source asks and owns it again. The destination
    cannot take it any more, even if it has not noticed."""
    decode, giving = Decode(stop="complete"), Recorder()
    with ExitStack() as stack:
        listening, calling = TransferEndpoint(config(), decode), TransferEndpoint(config(), giving)
        stack.callback(listening.close)
        stack.callback(calling.close)
        connection = calling.connect(listening.listen())
        source = delivered(giving, connection)
        destination = decode.await_("finished")
        connection.close()
        assert source.wait(PATIENCE) is TransferOutcome.NOT_TAKEN  # type: ignore[attr-defined]
        assert isinstance(destination, KVDestination) and not destination.take()
        decode.check()


def test_a_destination_that_takes_too_long() -> None:
    """After its lease the source asks over the existing connection, and the answer decides."""
    decode, giving = Decode(stop="complete"), Recorder()
    with ExitStack() as stack:
        listening = TransferEndpoint(config(lease_seconds=60.0), decode)
        calling = TransferEndpoint(config(lease_seconds=4.0), giving)
        stack.callback(listening.close)
        stack.callback(calling.close)
        connection = calling.connect(listening.listen())
        source = delivered(giving, connection)
        destination = decode.await_("finished")
        assert source.wait(PATIENCE) is TransferOutcome.NOT_TAKEN  # type: ignore[attr-defined]
        assert isinstance(destination, KVDestination) and not destination.take()
        assert connection.alive
        decode.check()


@pytest.mark.slow
def test_a_peer_that_does_not_answer_the_query() -> None:
    """If a running peer does not answer, the source gives the request up after two leases: never do both sides own it."""
    stuck = listen_with(lambda line: Decode(stop="complete", tell=line.tell), ("tcp",), beat_seconds=1.0)
    with other_process(stuck) as (number, line):
        giving = Recorder()
        calling = TransferEndpoint(config(links=("tcp",), lease_seconds=4.0, connect_timeout=4.0), giving)
        connection = calling.connect(line.hear())
        source = delivered(giving, connection)
        assert line.hear() == "complete"
        os.kill(number, signal.SIGSTOP)
        assert source.wait(PATIENCE) is TransferOutcome.UNKNOWN  # type: ignore[attr-defined]
        assert source.reason is Reason.UNKNOWN  # type: ignore[attr-defined]
        calling.close()


@pytest.mark.slow
def test_a_peer_that_is_stopped() -> None:
    """A stopped process, whose connections do not break, is detected by its missing heartbeats."""
    stuck = listen_with(lambda line: Prefill(stop="sending", tell=line.tell), ("shm", "tcp"), beat_seconds=1.0)
    with other_process(stuck) as (number, line):
        decode = Decode()
        calling = TransferEndpoint(config(), decode)
        connection = calling.connect(line.hear())
        destination = connection.pull(request(6, 500), keys_of(6, 500), context=decode.hold(500))
        assert line.hear() == "sending"
        os.kill(number, signal.SIGSTOP)
        assert destination.wait(PATIENCE) is TransferOutcome.NOT_TAKEN and destination.reason is Reason.LOST
        assert "heartbeat" in destination.message
        until(lambda: settled(calling))
        decode.check()
        calling.close()
