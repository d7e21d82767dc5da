"""Every link against the link contract, and tests of single links."""

import os
import secrets
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from link_contract import ID, LinkContract, pair, soon

from foreword.errors import ConfigError
from foreword.transfer.errors import BadMessage, PeerGone, TransferError
from foreword.transfer.handshake import Identity, agree
from foreword.transfer.link import Link, ReceiveBuffers, TcpLink
from foreword.transfer.shm import FOLDER, OwnSegment, ReleaseOrder, RingAllocator, open_peers, remove_stale
from foreword.transfer.sockets import Address, SocketStream, connect, listen, parse_address, tune
from foreword.transfer.wire_format import Heartbeat, KVPart, encode
from foreword.transfer_config import SharedSecret

RING = 1 << 20


class Place:
    """A listening socket and the identities of both sides."""

    def __init__(self, address: str, links: tuple[str, ...]) -> None:
        self.listener, self.address = listen(parse_address(address))
        self.links = links

    def identity(self) -> Identity:
        return Identity(secrets.token_bytes(16), (SharedSecret(""),), self.links, None, "", 1.0, RING)

    def dial(self) -> Link:
        stream = SocketStream(connect(self.address, deadline=soon()))
        return agree(stream, self.identity(), client=True, deadline=soon())[0]

    def answer(self) -> Link:
        stream = SocketStream(tune(self.listener.accept()[0]))
        return agree(stream, self.identity(), client=False, deadline=soon())[0]


class _Contract(LinkContract):
    where = "127.0.0.1:0"
    links_of: tuple[str, ...] = ("tcp",)

    @pytest.fixture
    def meeting(self, tmp_path: Path) -> Iterator[Place]:
        place = Place(self.where.format(tmp_path), self.links_of)
        yield place
        place.listener.close()

    def test_the_link_is_the_one_meant(self, links: tuple[Link, Link]) -> None:
        """Both sides agree on the preferred link that both have."""
        assert {link.name for link in links} == {self.links_of[0]}


class TestTcp(_Contract):
    pass


@pytest.mark.slow
class TestTcpOverUnix(_Contract):
    where = "unix:{}/s"


class TestShm(_Contract):
    links_of = ("shm", "tcp")


class TestShmOverUnix(_Contract):
    where = "unix:{}/s"
    links_of = ("shm", "tcp")


@pytest.mark.slow
class TestTcp6(_Contract):
    where = "[::1]:0"

    @pytest.fixture
    def meeting(self, tmp_path: Path) -> Iterator[Place]:
        if not socket.has_ipv6:
            pytest.skip("no IPv6 here")
        place = Place(self.where, self.links_of)
        yield place
        place.listener.close()


def test_no_segment_stays_behind(tmp_path: Path) -> None:
    """After the handshake no file is left in /dev/shm; before, only the same user could open it."""
    before = set(os.listdir(FOLDER))
    place = Place("127.0.0.1:0", ("shm", "tcp"))
    with pair(place) as (near, _):
        assert near.name == "shm"
        assert not {name for name in set(os.listdir(FOLDER)) - before if name.startswith("foreword-")}
    own = OwnSegment(RING, named=True)
    assert (FOLDER / own.place).stat().st_mode & 0o777 == 0o600
    own.unlink()
    place.listener.close()


def test_only_the_peers_segment_is_opened(tmp_path: Path) -> None:
    """A wrong token, a wrong size, a missing file and a path outside the folder are refused."""
    own = OwnSegment(RING, named=True)
    try:
        with pytest.raises(TransferError):
            open_peers(own.place, None, own.size, bytes(32))
        with pytest.raises(TransferError):
            open_peers(own.place, None, own.size + 4096, own.token)
        with pytest.raises(TransferError):
            open_peers("foreword-" + "0" * 32, None, own.size, own.token)
        with pytest.raises(TransferError):
            open_peers("../etc/passwd", None, own.size, own.token)
        assert open_peers(own.place, None, own.size, own.token).size == own.size
    finally:
        own.unlink()


def test_old_files_are_removed() -> None:
    """An old segment that a killed process left behind is removed when the next process starts; a new one stays."""
    old, fresh = OwnSegment(RING, named=True), OwnSegment(RING, named=True)
    os.utime(FOLDER / old.place, (1, 1))
    remove_stale()
    assert not (FOLDER / old.place).exists() and (FOLDER / fresh.place).exists()
    fresh.unlink()
    old.unlink()


def test_no_room_for_a_segment() -> None:
    """A ring that does not fit into memory is an error when it is made, not a crash when it is written."""
    with pytest.raises(TransferError):
        OwnSegment(1 << 50, named=True)


@given(st.data())
def test_ring_pieces_do_not_overlap(data: st.DataObject) -> None:
    """Allocated pieces are contiguous, lie within the ring, and do not overlap until they are released."""
    size = 4096
    ring, order = RingAllocator(size), ReleaseOrder()
    out: list[tuple[int, int, list[int]]] = []
    for _ in range(60):
        if out and data.draw(st.booleans()):
            place, length, item = out.pop(data.draw(st.integers(0, len(out) - 1)))
            upto = order.release(item)
            if upto is not None:
                ring.release(upto)
        else:
            length = data.draw(st.integers(1, size // 2))
            place = ring.allocate(length)
            if place is None:
                assert out, "an empty ring has room for half its size"
                continue
            start = place % size
            assert start + length <= size
            for other, other_length, _ in out:
                low = other % size
                assert start + length <= low or low + other_length <= start
            out.append((place, length, order.add(place, length)))


def test_a_ring_with_few_pieces_stays_small() -> None:
    """A ring with three pieces in use uses its first megabytes only; with more it uses all of its memory."""
    ring, order = RingAllocator(64 << 20), ReleaseOrder()
    out: list[list[int]] = []
    for number in range(400):
        place = ring.allocate(700_000)
        assert place is not None
        assert place % ring.size < 3 << 20, f"piece {number}"
        out.append(order.add(place, 700_000))
        if len(out) == 3:
            upto = order.release(out.pop(0))
            assert upto is not None
            ring.release(upto)
    while ring.allocate(1 << 20) is not None:
        out.append([])
    assert len(out) > 55


def test_impossible_releases_are_refused() -> None:
    """A release beyond what is allocated, or behind an earlier release, is refused."""
    ring = RingAllocator(4096)
    ring.allocate(100)
    for upto in (129, 1 << 60):
        with pytest.raises(BadMessage):
            ring.release(upto)
    ring.release(128)
    with pytest.raises(BadMessage):
        ring.release(64)


def test_receive_buffers_are_bounded_and_reused() -> None:
    """Unreleased payloads are bounded, one payload is always possible, and released memory is reused."""
    buffers = ReceiveBuffers(1 << 20)
    first = buffers.take(1 << 19, 0)
    second = buffers.take(1 << 19, 0)
    assert first is not None and second is not None
    assert buffers.take(1, 0.01) is None
    first.view[:3] = b"abc"
    first.release()
    first.release()
    again = buffers.take(1 << 19, 0)
    assert again is not None and again.view[:3] == b"abc"
    again.release()
    second.release()
    big = buffers.take(5 << 20, 0)
    assert big is not None and len(big) == 5 << 20
    assert buffers.take(1, 0.01) is None


@pytest.mark.parametrize("place", [100, RING - 10, 1 << 40], ids=["before", "across", "far"])
def test_payloads_outside_of_the_ring(place: int) -> None:
    """A message with an impossible payload position ends the link; nothing is read there."""
    spot = Place("127.0.0.1:0", ("shm", "tcp"))
    with pair(spot) as (near, far):
        far.send(KVPart(0, 1, 0, 1, 1), ID, [b"x" * 500], deadline=soon())
        near.receive(deadline=soon())
        size = (RING // 2) + 1 if place == 1 << 40 else 200
        far._stream.send([encode(KVPart(0, 1, 0, 1, 1), ID, payload=size, payload_sum=1, position=place)], soon())  # type: ignore[attr-defined]
        with pytest.raises(BadMessage):
            near.receive(deadline=soon())
    spot.listener.close()


def test_bytes_that_are_not_a_message() -> None:
    """Random bytes or a truncated message end the link with an error."""
    for noise in (b"GET / HTTP/1.1\r\n" * 10, encode(Heartbeat())[:40], struct.pack("<4sH", b"FWTX", 9) + bytes(100)):
        ours, theirs = socket.socketpair()
        link = TcpLink(SocketStream(tune(ours)), ring=RING)
        theirs.sendall(noise)
        theirs.close()
        with pytest.raises(TransferError):
            link.receive(deadline=soon())
        link.close()


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:80", Address("127.0.0.1", 80)),
        ("tcp://host:1", Address("host", 1)),
        ("[::1]:7", Address("::1", 7)),
        ("unix:/tmp/x", Address(path="/tmp/x")),
    ],
)
def test_addresses(text: str, address: Address) -> None:
    """Valid addresses are parsed, and printing one gives the same address again."""
    assert parse_address(text) == address
    assert parse_address(str(address)) == address


@pytest.mark.parametrize(
    "text",
    [
        "unix:/tmp/\ud800",
        "\ud800:1",
        "unix:/tmp/a\0b",
        "a..b:1",
        "",
        "host",
        ":80",
        "host:",
        "host:x",
        "host:70000",
        "unix:",
        "host:-1",
        "unix:" + "x" * 200,
    ],
)
def test_invalid_addresses(text: str) -> None:
    """An invalid address is a ConfigError."""
    with pytest.raises(ConfigError):
        parse_address(text)


def test_connecting_without_a_listener(tmp_path: Path) -> None:
    """Connecting to an address without a listener raises PeerGone, for TCP and for a stale socket file."""
    listener, address = listen(parse_address("127.0.0.1:0"))
    listener.close()
    with pytest.raises(PeerGone):
        connect(address, deadline=soon())
    left = Address(path=str(tmp_path / "s"))
    listen(left)[0].close()
    for path in (left, Address(path=str(tmp_path / "t"))):
        with pytest.raises(PeerGone):
            connect(path, deadline=soon())
    again, _ = listen(left)
    with pytest.raises(ConfigError):
        listen(left)
    again.close()
