"""Throughput of the links between two processes on one host, compared with a plain socket and a plain copy.

    python -m benchmarks.instances.links [--volume 64MiB] [--rounds 15] [--json FILE]

Each round sends the same blocks once in each way, from one process to another, and ends when the receiver has reported the
last one. The order of the ways changes from round to round.

    plain socket   loopback TCP with `sendall` and `recv_into` of one block at a time into one buffer
    memcpy         copies each block once within this process, into as much memory as the ring has (as the shm link does)
    tcp, shm       the links
    ... summed     with a checksum of every payload, computed by the sender and checked by the receiver
    ... parts      a transfer between two endpoints: queue, threads, checks, and a service that releases each part at once
"""

import argparse
import ctypes
import mmap
import multiprocessing
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

from benchmarks.harness import machine, median, ratio, set_up, table, version_of, write_figures
from foreword.blocks.layout import LayerLayout, Layout
from foreword.config import parse_bytes
from foreword.transfer.handshake import Identity, agree
from foreword.transfer.link import Link, Payload
from foreword.transfer.sockets import SocketStream, tune
from foreword.transfer.transfer_endpoint import TransferEndpoint
from foreword.transfer.transfers import KVDestination, TransferService, TransferSide
from foreword.transfer.wire_format import Frames, KVPart, Reason
from foreword.transfer_config import SharedSecret, TransferConfig

SIZES = {"64 KiB": 64 << 10, "256 KiB": 256 << 10, "1 MiB": 1 << 20}
RING = 32 << 20
PATIENCE = 60.0
ID = bytes([1]) * 16
ONE = KVPart(0, 1, 0, 1, 1)
NAMES = ("tcp", "shm")
BASES = {"plain": "plain socket", "tcp": "plain socket", "memcpy": "memcpy", "shm": "memcpy"}
Turn = Callable[[], object]


def soon() -> float:
    return time.monotonic() + PATIENCE


def layout_of(size: int) -> Layout:
    """One layer whose block has `size` bytes."""
    return Layout(b"benchmark", 16, (LayerLayout(1, size // 64, size // 64),), "bfloat16")


def links_of(name: str) -> tuple[str, ...]:
    return ("tcp",) if name == "tcp" else (name, "tcp")


def link_on(sock: socket.socket, name: str, *, client: bool) -> Link:
    identity = Identity(os.urandom(16), (SharedSecret(""),), links_of(name), None, "", 2.0, RING)
    link, _ = agree(SocketStream(tune(sock)), identity, client=client, deadline=soon())
    if link.name != name:
        raise SystemExit(f"no {name} link comes about here")
    return link


class Receiver(TransferService):
    """Accepts every push and releases its parts."""

    def push_requested(self, destination: KVDestination) -> None:
        destination.accept()

    def part(self, destination: KVDestination, part: KVPart, payload: Payload) -> None:
        payload.release()

    def finished(self, destination: KVDestination, result: bytes, tokens: int) -> None:
        destination.take()


class Sender(TransferService):
    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)
        self.ready = threading.Event()

    def accepted(self, transfer: TransferSide) -> None:
        self.ready.set()


def receive(pipe: Pipe, size: int, count: int, rounds: int) -> None:
    """The other process."""
    server = socket.create_server(("127.0.0.1", 0))
    endpoints = {name: TransferEndpoint(TransferConfig(ring=str(RING), links=links_of(name)), Receiver(layout_of(size)))
                 for name in NAMES}  # fmt: skip
    pipe.send((server.getsockname()[1], {name: one.listen() for name, one in endpoints.items()}))
    plain = server.accept()[0]
    links = {name: link_on(server.accept()[0], name, client=False) for name in NAMES}
    buffer = memoryview(bytearray(size))
    while (way := pipe.recv()) != "over":
        if way == "plain socket":
            for _ in range(count):
                received = 0
                while received < size:
                    received += plain.recv_into(buffer[received:], 0, socket.MSG_WAITALL)
        else:
            name, _, summed = way.partition(" ")
            for _ in range(count):
                got = links[name].receive(deadline=soon())
                if summed and not (got.head.payload_sum is not None and got.sound()):
                    raise SystemExit("a payload arrived that does not fit its checksum")
                got.payload.release()
        pipe.send("done")


class Contest:
    """The same blocks, sent in each way."""

    def __init__(self, size: int, volume: int, rounds: int) -> None:
        self.size, self.count = size, max(volume // size, 4)
        self.memory = mmap.mmap(-1, size * self.count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.blocks = _fill(self.memory, size)
        self.pipe, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self.process = context.Process(target=receive, args=(theirs, size, self.count, rounds), daemon=True)
        self.process.start()
        port, addresses = self.pipe.recv()
        self.plain = socket.create_connection(("127.0.0.1", port))
        self.plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.links = {name: link_on(socket.create_connection(("127.0.0.1", port)), name, client=True) for name in NAMES}
        self.layout = layout_of(size)
        self.endpoints = {
            name: TransferEndpoint(TransferConfig(ring=str(RING), links=links_of(name)), Sender(self.layout))
            for name in NAMES
        }
        self.peers = {name: one.connect(addresses[name]) for name, one in self.endpoints.items()}
        self.ring = bytearray(RING)

    def turns(self) -> dict[str, Turn]:
        turns: dict[str, Turn] = {
            "plain socket": lambda: self._told("plain socket", self._plain),
            "memcpy": self._memcpy,
        }
        for name in NAMES:
            turns[name] = lambda name=name: self._told(name, lambda: self._link(name, False))  # type: ignore[misc]
            turns[f"{name} summed"] = lambda name=name: self._told(f"{name} summed", lambda: self._link(name, True))  # type: ignore[misc]
            turns[f"{name} parts"] = lambda name=name: self._parts(name)  # type: ignore[misc]
        return turns

    def _told(self, way: str, send: Turn) -> None:
        self.pipe.send(way)
        send()
        self.pipe.recv()

    def _plain(self) -> None:
        for block in self.blocks:
            self.plain.sendall(block)

    def _link(self, name: str, summed: bool) -> None:
        link = self.links[name]
        message = ONE if summed else Frames(0, (self.size,))
        for number, block in enumerate(self.blocks, start=1):
            link.send(message, ID, [block], deadline=soon(), checksum=summed, more=number < self.count)

    def _memcpy(self) -> None:
        start = ctypes.addressof(ctypes.c_char.from_buffer(self.ring))
        at = 0
        for block in self.blocks:
            if at + self.size > RING:
                at = 0
            ctypes.memmove(start + at, ctypes.addressof(ctypes.c_char.from_buffer(block)), self.size)
            at += self.size

    def _parts(self, name: str) -> None:
        service = self.endpoints[name].service
        assert isinstance(service, Sender)
        service.ready.clear()
        keys = [number.to_bytes(32, "little") for number in range(self.count)]
        source = self.peers[name].push(b"", keys, 16 * self.count)
        if not service.ready.wait(PATIENCE):
            raise SystemExit("the peer does not answer")
        for number, block in enumerate(self.blocks):
            source.send(KVPart(0, 1, number, 1, 16, keys[number]), [block])
        source.finish(b"", 16 * self.count)
        if str(source.wait(PATIENCE)) != "taken":
            raise SystemExit(f"a transfer failed: {source.reason or Reason.DEADLINE}: {source.message}")

    def close(self) -> None:
        self.pipe.send("over")
        for endpoint in self.endpoints.values():
            endpoint.close()
        self.process.join(PATIENCE)


def _fill(memory: mmap.mmap, size: int) -> list[memoryview]:
    view = memoryview(memory)
    data = random.Random(size).randbytes(size)
    blocks = [view[start : start + size] for start in range(0, len(view), size)]
    for block in blocks:
        block[:] = data
    return blocks


def compare(size: int, volume: int, rounds: int) -> dict[str, float]:
    """Median bytes per second by way."""
    contest = Contest(size, volume, rounds + 1)
    times: dict[str, list[float]] = {way: [] for way in contest.turns()}
    for number in range(rounds + 1):
        items = list(contest.turns().items())
        first = number % len(items)
        for way, turn in items[first:] + items[:first]:
            started = time.perf_counter()
            turn()
            if number:  # the first round warms connections and memory up
                times[way].append(time.perf_counter() - started)
    contest.close()
    moved = contest.size * contest.count
    return {way: moved / median(seconds) for way, seconds in times.items()}


def report(label: str, rates: dict[str, float]) -> Iterator[list[str]]:
    """Rows of the table: each way's rate, and its share of what it is measured against."""
    for way, rate in sorted(rates.items(), key=lambda item: BASES[item[0].split()[0]]):
        base = rates[BASES[way.split()[0]]]
        yield [f"{label}, {way}", f"{rate / 1e9:.2f}", f"{100 * ratio(rate, base):.0f} %"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--volume", default="64MiB", help="bytes per way and round")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    facts = machine() | {
        "xxhash": version_of("xxhash"),
        "work": f"{options.volume} per way and round, median of {options.rounds} rounds, in turns; rings of {RING >> 20} MiB",
    }
    print(set_up(facts), flush=True)
    results = {label: compare(size, parse_bytes(options.volume), options.rounds) for label, size in SIZES.items()}
    rows = [row for label, rates in results.items() for row in report(label, rates)]
    head = ["blocks, way", "GB/s", "of plain"]
    print(table(head, rows))
    if options.json:
        write_figures(options.json, "Links between processes", head, rows, facts, bytes_per_second=results)


if __name__ == "__main__":
    main()
