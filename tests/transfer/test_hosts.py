"""Two network namespaces as two hosts, joined by a wire that delays and loses packets, or all of them.

The wire is this process, between two TUN devices: it needs no kernel module (`tc netem` is missing in many kernels). Needs
root, `ip` and /dev/net/tun; skipped where they are not there.
"""

import ctypes
import fcntl
import heapq
import os
import random
import select
import shutil
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from actors import PATIENCE, QUICK, Decode, Prefill, Recorder, config, keys_of, parts_of
from link_contract import child
from test_faults import Line

from foreword.transfer.errors import PeerGone
from foreword.transfer.protocol import TransferOutcome
from foreword.transfer.transfer_endpoint import TransferEndpoint

SECRET = "a shared secret of the tests"
CLONE_NEWNET = 0x40000000
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
PORT = 9000


def missing() -> str:
    if os.geteuid() != 0 or shutil.which("ip") is None or not os.path.exists("/dev/net/tun"):
        return "needs root, ip and /dev/net/tun"
    name = f"fw-probe-{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode:
        return "no network namespaces can be made here"
    subprocess.run(["ip", "netns", "delete", name], check=True)
    return ""


pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing() or "there")]


def enter(namespace: str) -> None:
    """Move this thread into the network namespace."""
    with open(f"/run/netns/{namespace}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")


class Wire:
    """Carries packets between the two hosts.

    Attributes:
        delay: seconds each way. loss: share of the packets, 1.0 cuts the wire.
    """

    def __init__(self, delay: float, loss: float) -> None:
        self.delay, self.loss = delay, loss
        self.names = [f"fw-{os.getpid()}-{letter}" for letter in "ab"]
        self.addresses = ["10.231.0.1", "10.231.0.2"]
        self.lost = self.carried = 0
        self.devices: list[int] = []
        self.stop_read, self.stop_write = os.pipe()
        for name, here, there in zip(self.names, self.addresses, self.addresses[::-1], strict=True):
            self.ip("netns", "add", name)
            thread = threading.Thread(target=self.open, args=(name,))
            thread.start()
            thread.join()
            self.ip("-n", name, "address", "add", here, "peer", there, "dev", "wire")
            self.ip("-n", name, "link", "set", "wire", "up")
            self.ip("-n", name, "link", "set", "lo", "up")
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def ip(self, *words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    def open(self, name: str) -> None:
        """Open a TUN device in a namespace: it belongs to the namespace of the thread that opens it."""
        enter(name)
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", b"wire", IFF_TUN | IFF_NO_PI))
        self.devices.append(device)

    def run(self) -> None:
        draw = random.Random(1)
        waiting: list[tuple[float, int, int, bytes]] = []
        number = 0
        while True:
            timeout = max(waiting[0][0] - time.monotonic(), 0) if waiting else None
            ready, _, _ = select.select([*self.devices, self.stop_read], [], [], timeout)
            if self.stop_read in ready:
                return
            for device in ready:
                packet = os.read(device, 65536)
                number += 1
                if draw.random() < self.loss:
                    self.lost += 1
                else:
                    other = self.devices[device == self.devices[0]]
                    heapq.heappush(waiting, (time.monotonic() + self.delay, number, other, packet))
            while waiting and waiting[0][0] <= time.monotonic():
                _, _, device, packet = heapq.heappop(waiting)
                self.carried += 1
                try:
                    os.write(device, packet)
                except OSError:
                    self.lost += 1

    def close(self) -> None:
        os.write(self.stop_write, b"x")
        self.thread.join(PATIENCE)
        for number in (*self.devices, self.stop_read, self.stop_write):
            os.close(number)
        for name in self.names:
            self.ip("netns", "delete", name)


@pytest.fixture
def wire() -> Iterator[Wire]:
    wire = Wire(0.002, 0.01)
    yield wire
    wire.close()


def serve(wire: Wire, service: Recorder, links: tuple[str, ...], line: Line, **settings: object) -> None:
    """A child: the first host."""
    enter(wire.names[0])
    endpoint = TransferEndpoint(
        config(bind=f"{wire.addresses[0]}:{PORT}", secret=SECRET, links=links, **settings), service
    )
    endpoint.listen()
    line.tell("listening")
    if isinstance(service, Decode):
        service.await_("ended")
        service.check()
        line.tell("clean")
    time.sleep(PATIENCE)


def call(
    wire: Wire,
    links: tuple[str, ...],
    line: Line,
    work: Callable[[TransferEndpoint, Line], None],
    service: Recorder,
    **settings: object,
) -> None:
    """A child: the second host."""
    enter(wire.names[1])
    endpoint = TransferEndpoint(config(secret=SECRET, links=links, **settings), service)
    work(endpoint, line)


def pull(endpoint: TransferEndpoint, line: Line) -> None:
    decode = endpoint.service
    assert isinstance(decode, Decode)
    connection = endpoint.connect(f"10.231.0.1:{PORT}")
    line.tell(connection.link.name)
    wanted = [
        connection.pull(f"{seed} 600".encode(), keys_of(seed, 600), context=decode.hold(600)) for seed in range(5)
    ]
    for destination in wanted:
        line.tell(str(destination.wait(PATIENCE)))
    decode.check()
    line.tell("clean")


def push(endpoint: TransferEndpoint, line: Line) -> None:
    giving = endpoint.service
    assert isinstance(giving, Recorder)
    connection = endpoint.connect(f"10.231.0.1:{PORT}")
    source = connection.push(b"7 600", keys_of(7, 600), 600)
    giving.await_("accepted")
    for part, data in parts_of(7, 600):
        source.send(part, [data])
    source.finish(b"state", 600)
    line.tell(str(source.wait(PATIENCE)))


@pytest.mark.parametrize("links", [("tcp",), ("shm", "tcp")], ids=["tcp", "shm"])
def test_delay_and_loss(wire: Wire, links: tuple[str, ...]) -> None:
    """Between hosts whose network delays and loses packets, everything arrives. Two namespaces of one host detect that they
    can share memory, although their addresses do not show it."""
    here, there = Line(), Line()
    with child(lambda: serve(wire, Prefill(), links, here)):
        assert here.hear() == "listening"
        with child(lambda: call(wire, links, there, pull, Decode())):
            assert there.hear() == links[0]
            assert [there.hear() for _ in range(5)] == [str(TransferOutcome.TAKEN)] * 5
            assert there.hear() == "clean"
    assert wire.carried and (wire.lost or links[0] == "shm")
    here.close()
    there.close()


def test_push_over_a_lossy_network(wire: Wire) -> None:
    """A request is migrated over a network that delays and loses packets."""
    here, there = Line(), Line()
    with child(lambda: serve(wire, Decode(), ("tcp",), here)):
        assert here.hear() == "listening"
        with child(lambda: call(wire, ("tcp",), there, push, Recorder())):
            assert there.hear() == str(TransferOutcome.TAKEN)
            assert here.hear() == "clean"
    here.close()
    there.close()


def test_a_silent_network_failure(wire: Wire) -> None:
    """When the network silently drops all packets, both hosts notice and free everything."""
    here, there = Line(), Line()
    quick = {**QUICK, "answer_timeout": 20.0}

    def cut_off(endpoint: TransferEndpoint, line: Line) -> None:
        giving = endpoint.service
        assert isinstance(giving, Recorder)
        source = endpoint.connect(f"10.231.0.1:{PORT}").push(b"8 600", keys_of(8, 600), 600)
        giving.await_("accepted")
        line.tell("accepted")
        line.tell(str(source.wait(PATIENCE)))

    with child(lambda: serve(wire, Decode(), ("tcp",), here, **quick)):
        assert here.hear() == "listening"
        with child(lambda: call(wire, ("tcp",), there, cut_off, Recorder(), **quick)):
            assert there.hear() == "accepted"
            wire.loss = 1.0
            assert there.hear() == str(TransferOutcome.NOT_TAKEN)
            assert here.hear() == "clean"
    here.close()
    there.close()


def test_loopback_is_not_reachable_from_other_hosts(wire: Wire) -> None:
    """An instance with the default bind address cannot be reached from another host."""
    here, there = Line(), Line()

    def listen(line: Line) -> None:
        enter(wire.names[0])
        line.tell(TransferEndpoint(config(bind=f"127.0.0.1:{PORT}", secret=SECRET), Recorder()).listen())
        time.sleep(PATIENCE)

    def ask(endpoint: TransferEndpoint, line: Line) -> None:
        with pytest.raises(PeerGone):
            endpoint.connect(f"10.231.0.1:{PORT}")
        line.tell("refused")

    with child(lambda: listen(here)):
        assert here.hear() == f"127.0.0.1:{PORT}"
        with child(lambda: call(wire, ("tcp",), there, ask, Recorder())):
            assert there.hear() == "refused"
    here.close()
    there.close()
