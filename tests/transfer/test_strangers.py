"""Slow and hostile peers: bytes one by one, many connections without the secret, receivers that take nothing."""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from actors import LAYOUT, PATIENCE, FrameService, config, until
from link_contract import soon
from test_faults import SECRET

from foreword.blocks.layout import NAME_BYTES
from foreword.transfer import fetch, handshake
from foreword.transfer.errors import BadMessage, TransferError, TransferTimeout
from foreword.transfer.link import Link, TcpLink
from foreword.transfer.sockets import SocketStream, tune
from foreword.transfer.transfer_endpoint import PendingConnections, TransferEndpoint
from foreword.transfer.transfers import TransferService
from foreword.transfer.wire_format import NO_TRANSFER, Get, Heartbeat, KVPart, Locate, encode, join_keys
from foreword.transfer_config import SharedSecret


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def listening(stack: ExitStack, service: TransferService | None = None, **settings: object) -> TransferEndpoint:
    endpoint = TransferEndpoint(config(secret=SECRET, **settings), service or TransferService(LAYOUT))
    stack.callback(endpoint.close)
    endpoint.listen()
    return endpoint


def dial(stack: ExitStack, endpoint: TransferEndpoint) -> socket.socket:
    if endpoint.address.startswith("unix:"):
        sock = stack.enter_context(socket.socket(socket.AF_UNIX))
        sock.connect(endpoint.address.removeprefix("unix:"))
        return sock
    host, _, port = endpoint.address.rpartition(":")
    return stack.enter_context(socket.create_connection((host, int(port))))


def test_a_drip_before_the_proof_does_not_extend_the_deadline(stack: ExitStack) -> None:
    """The deadline of a greeting is for all of it: a client that sends a byte at a time is cut off within it."""
    endpoint = listening(stack, connect_timeout=0.5)
    stranger = dial(stack, endpoint)
    opening = handshake._OPENING.pack(b"FWTH", 1, 1, 1, bytes(range(32))) + bytes(32)
    sent = 0
    with contextlib.suppress(ConnectionError):
        for byte in opening:
            stranger.send(bytes([byte]))
            sent += 1
            time.sleep(0.1)
    assert sent < len(opening), "it could send everything, which took many times the deadline"
    until(lambda: endpoint.status().counts.get("greetings_failed") == 1)


def test_strangers_do_not_lock_out_a_peer(stack: ExitStack) -> None:
    """More silent connections than the endpoint keeps: a peer with the secret connects each time."""
    endpoint = listening(stack)
    for _ in range(100):
        dial(stack, endpoint).send(b"F")
    until(lambda: endpoint.status().counts.get("connections_refused", 0) >= 36)
    for _ in range(10):
        peer = TransferEndpoint(config(secret=SECRET), TransferService(LAYOUT))
        assert peer.connect(endpoint.address).alive
        peer.close()


def test_one_address_does_not_displace_another(stack: ExitStack) -> None:
    """Connections from an address that has many are closed for new ones, never the only one of another address."""
    server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    pending = PendingConnections(threading.Condition(), limit=4, per_address=3)

    def connection(source: str) -> SocketStream:
        stack.enter_context(socket.create_connection(server.getsockname(), source_address=(source, 0)))
        stream = SocketStream(server.accept()[0])
        stack.callback(stream.close)
        pending.add(stream)
        return stream

    first = connection("127.0.0.2")
    crowd = [connection("127.0.0.3") for _ in range(50)]
    other = connection("127.0.0.4")
    assert len(pending) == 4
    assert [pending.remove(stream) for stream in (first, other)] == [True, True]
    assert [pending.remove(stream) for stream in crowd].count(True) == 2, "the newest"
    assert len(pending) == 0


class Still:
    """A peer with the secret that asks for frames and reads no answer."""

    def __init__(self, stack: ExitStack, endpoint: TransferEndpoint, names: list[bytes]) -> None:
        sock = tune(dial(stack, endpoint))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        identity = handshake.Identity(os.urandom(16), (SharedSecret(SECRET),), ("tcp",), None, "", 60.0, 1 << 20)
        self.link: Link = handshake.agree(SocketStream(sock), identity, client=True, deadline=soon())[0]
        for _ in range(8):
            self.link.send(Get(join_keys(names), 1 << 20, 1e6), os.urandom(16), deadline=soon())


def test_receivers_that_take_nothing_do_not_hold_the_threads(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers that ask for frames and do not take them are disconnected, and others are answered meanwhile."""
    monkeypatch.setattr(fetch, "_PATIENCE", 2.0)
    kept = {bytes([number]) * NAME_BYTES: os.urandom(200_000) for number in range(40)}
    endpoint = listening(stack, FrameService(kept))
    for _ in range(6):
        Still(stack, endpoint, list(kept))
    peer = TransferEndpoint(config(secret=SECRET, links=("tcp",)), TransferService())
    stack.callback(peer.close)
    connection = peer.connect(endpoint.address)
    buffers = [memoryview(bytearray(200_000)) for _ in kept]
    deadline = time.monotonic() + PATIENCE
    assert connection.get(list(kept), buffers, deadline=deadline) == [200_000] * 40
    until(lambda: endpoint.status().counts.get("connections_ended", 0) == 6)


def test_a_peer_that_floods_and_reads_no_answer(stack: ExitStack, tmp_path: Path) -> None:
    """A peer with the secret that asks without end and reads nothing is disconnected before the answers pile up."""
    endpoint = listening(stack, bind=f"unix:{tmp_path}/peer", progress_timeout=600.0)
    still = Still(stack, endpoint, [])

    def flood() -> None:
        for _ in range(400_000):
            still.link.send(Locate(bytes(NAME_BYTES)), os.urandom(16), deadline=soon())

    with pytest.raises(TransferError):
        flood()
    until(lambda: endpoint.status().counts.get("connections_ended", 0) == 1)


def memory_of_this_process() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_memory_follows_what_has_arrived(stack: ExitStack) -> None:
    """Heads that announce 432 MiB together, after which a few bytes come, occupy a small part of that."""
    before = memory_of_this_process()
    links = []
    for number in range(4):
        ours, theirs = socket.socketpair()
        stack.callback(theirs.close)
        link = TcpLink(SocketStream(tune(ours)), ring=256 << 20)
        stack.callback(link.close)
        links.append(link)
        head = bytearray(encode(Heartbeat(), NO_TRANSFER))
        head[24:28] = (16 << 20).to_bytes(4, "little")
        whole = encode(KVPart(0, 1, 0, 1, 1), bytes(15) + b"1", payload=200 << 20, payload_sum=1)
        theirs.sendall(head[:64] + bytes(100) if number % 2 else whole + bytes(100))
    for link in links:
        with pytest.raises(TransferTimeout):
            link.receive(deadline=time.monotonic())
    assert memory_of_this_process() - before < 64 << 20


def test_payloads_longer_than_announced_are_refused() -> None:
    """A payload that is longer than this side said it receives ends the link before memory is taken."""
    ours, theirs = socket.socketpair()
    link = TcpLink(SocketStream(tune(ours)), ring=1 << 20)
    theirs.sendall(encode(KVPart(0, 1, 0, 1, 1), bytes(15) + b"1", payload=(1 << 20) + 1, payload_sum=1))
    with pytest.raises(BadMessage, match="at most"):
        link.receive(deadline=soon())
    link.close()
    theirs.close()


def test_a_handshake_message_is_sent_within_its_deadline() -> None:
    """A peer that takes bytes slowly cannot hold a greeting: its deadline is for the whole message."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        theirs = socket.create_connection(server.getsockname())
        stream = SocketStream(tune(server.accept()[0]))
    stop = threading.Event()

    def take() -> None:
        while not stop.wait(0.02):
            theirs.recv(4096)

    thread = threading.Thread(target=take)
    thread.start()
    with pytest.raises(TransferError, match="too few"):
        stream.write(bytes(64 << 20), time.monotonic() + 0.3)
    stop.set()
    thread.join(PATIENCE)
    stream.close()
    theirs.close()
