"""Late subscribers to KV events."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any, cast

import psutil
import pytest
import zmq
import zmq.asyncio

from foreword.blocks.keys import Scope, chain_keys, is_public
from foreword.blocks.public_blocks import PublicBlocks, public_keys
from foreword.blocks.salt import NO_SALT, PUBLIC, Salt
from foreword.events import BlocksRemoved
from foreword.kv_event_wire import (
    REPLAY_END,
    BlockRemoved,
    BlockStored,
    decode_batch,
    decode_number,
    encode_batch,
    encode_number,
)
from foreword.router.event_subscriber import KvEventSubscription
from foreword.routing.directory import Directory
from foreword.routing.event_feed import KvEventFeed
from foreword.server.kv_events import KvEventLog, KvEvents

BLOCK = 4
PLACES = ((None, None, None), ("CPU", "LOCAL", "memory"), ("STORAGE", "REMOTE", "redis"))


class Replica:
    """Stores and removes blocks of chains at random: from a chain's end, as pools do. A third of them begins with public
    blocks."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.chains = []
        for number in range(12):
            shared = [number % 3] * BLOCK * 3
            own = [self.random.randrange(1000) for _ in range(BLOCK * self.random.randrange(8))]
            salt = Salt(b"0102") if number % 2 else NO_SALT
            public, scope = PublicBlocks(), Scope(b"m", BLOCK, salt)
            public.set([public_keys(scope, shared)] if number % 3 == 2 else [])
            self.chains.append((salt, shared + own, public.keys_of(scope, shared + own)))
        self.held: dict[object, set[bytes]] = {place: set() for place in PLACES}

    def event(self) -> BlockStored | BlockRemoved | None:
        place = self.random.choice(PLACES)
        salt, tokens, keys = self.random.choice(self.chains)
        held = self.held[place]
        known = sum(key in held for key in keys)
        if self.random.random() < 0.6 and known < len(keys):
            end = self.random.randrange(known, len(keys)) + 1
            public = sum(map(is_public, keys))
            if known < public:
                end, salt = min(end, public), PUBLIC
            held.update(keys[:end])
            extras: list[list[str] | None] | None = None
            if (salt and not known) or 0 < known == public:
                extras = [[salt.text], *[None] * (end - known - 1)]
            parent = keys[known - 1] if known else None
            blocks = tokens[known * BLOCK : end * BLOCK]
            return BlockStored(keys[known:end], parent, blocks, BLOCK, None, place[0], None, extras, *place[1:])
        children = {key for _, _, other in self.chains for i, key in enumerate(other[:-1]) if other[i + 1] in held}
        last = [key for key in keys[:known] if key not in children]
        held.difference_update(last)
        return BlockRemoved(last, place[0], *place[1:]) if last else None


def read(log: KvEventLog, feed: KvEventFeed) -> None:
    for number, payload in log.since(feed.next):
        feed.receive(number, decode_batch(payload) or [], replayed=True)


@pytest.mark.parametrize("seed", range(4))
def test_a_late_subscriber_knows_what_an_early_one_knows(seed: int) -> None:
    """Whenever a router subscribes, and however many messages it misses, it knows then which blocks are where."""
    replica, log = Replica(seed), KvEventLog(messages=20)
    directories = [Directory(10_000) for _ in range(3)]
    early, gap, late = (KvEventFeed(one, "r", b"m", BLOCK, counts_copies=False) for one in directories)
    number = 0
    while number < 400:
        event = replica.event()
        if event is not None:
            log.append(number, encode_batch(0.0, [event]))
            number += 1
            read(log, early)
        if number == 100:
            read(log, gap)
    read(log, gap)
    read(log, late)
    for _, _, keys in replica.chains:
        found = [directory.lookup(keys).of("r") for directory in directories]
        # A gap does not clear what is in a shared store: other replicas report it too.
        assert found[0] == found[2] and found[0][:3] == found[1][:3]
        assert found[0][0] == sum(key in replica.held[PLACES[0]] for key in keys)
    assert late.counters.skipped_blocks == late.counters.malformed == 0


def test_the_snapshot_is_bounded() -> None:
    """A snapshot of more blocks than its limit has the first ones."""
    log, tokens = KvEventLog(messages=1, blocks=10), list(range(BLOCK * 40))
    keys = chain_keys(Scope(b"m", BLOCK).root(), tokens, BLOCK)
    for number in range(40):
        parent = keys[number - 1] if number else None
        blocks = tokens[number * BLOCK : (number + 1) * BLOCK]
        log.append(number, encode_batch(0.0, [BlockStored([keys[number]], parent, blocks, BLOCK, None, None, None)]))
    directory = Directory(10_000)
    read(log, KvEventFeed(directory, "r", b"m", BLOCK))
    assert directory.lookup(keys).of("r")[0] == 10


def test_one_snapshot_serves_several_subscribers() -> None:
    """The snapshot is made again only after another message became part of it."""
    log = KvEventLog(messages=1)

    def snapshot(*numbers: int) -> bytes:
        for number in numbers:
            log.append(number, encode_batch(0.0, [BlockRemoved([b"k"], None)]))
        return next(log.since(0))[1]

    first = snapshot(0, 1)
    assert snapshot() is first
    assert snapshot(2) is not first


@pytest.fixture
def asking() -> Iterator[tuple[KvEvents, zmq.Socket[bytes]]]:
    """A publisher of 4000 messages, and a socket that asks for replays."""
    publisher = KvEvents(BLOCK, "tcp://127.0.0.1:0")
    for _ in range(4000):
        publisher.notify(BlocksRemoved((bytes(32),) * 100))
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger, socket.rcvhwm = 0, 10
        socket.connect(publisher.source.replay_endpoint)
        yield publisher, socket
    publisher.close()


def replayed(socket: zmq.Socket[bytes], start: int) -> list[int]:
    """Numbers of the messages of one replay, read when most of it has been sent."""
    socket.send_multipart([b"", encode_number(start)])
    time.sleep(0.3)
    found: list[int] = []
    while (frames := socket.recv_multipart())[-2] != REPLAY_END:
        found.append(decode_number(frames[-2]) or 0)
    return found


def test_a_replay_is_complete(asking: tuple[KvEvents, zmq.Socket[bytes]]) -> None:
    """A slow subscriber gets all kept messages, however many they are."""
    while not replayed(asking[1], 3999):
        pass
    assert replayed(asking[1], 0) == list(range(4000))


def test_requests_for_replays_do_not_stop_the_events(asking: tuple[KvEvents, zmq.Socket[bytes]]) -> None:
    """While a subscriber asks again and again, new events are published before all of its requests are answered."""
    publisher, asker = asking
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.connect(publisher.source.endpoint)
        socket.subscribe(b"")
        for _ in range(400):
            asker.send_multipart([b"", encode_number(4000)])
        while not socket.poll(50):
            publisher.notify(BlocksRemoved((b"k",)))
        answers = 0
        assert asker.poll(60_000)
        while asker.poll(200):
            answers += asker.recv_multipart()[-2] == REPLAY_END
    assert 0 < answers < 400


class SlowSource:
    """A replica's sockets, whose replayed messages come 4 seconds apart by the loop's clock, which it sets forward."""

    def __init__(self, loop: FastLoop, messages: int) -> None:
        self._loop, self._left, self.is_over = loop, list(range(messages)), asyncio.Event()

    def socket(self, kind: int) -> SlowSource:
        return self

    def connect(self, endpoint: str) -> None: ...
    def set_hwm(self, number: int) -> None: ...
    def subscribe(self, topic: bytes) -> None: ...
    def close(self, linger: int) -> None: ...
    async def send_multipart(self, parts: list[bytes]) -> None: ...

    async def poll(self, milliseconds: int) -> int:
        self.is_over.set()
        return await asyncio.Event().wait()

    async def recv_multipart(self) -> list[bytes]:
        self._loop.passed += 4
        await asyncio.sleep(0.001)
        payload = encode_batch(0.0, [BlockRemoved([b"k" * 32], None)])
        return [b"", encode_number(self._left.pop(0)), payload] if self._left else [b"", REPLAY_END, b""]


class FastLoop(asyncio.SelectorEventLoop):
    """`passed`: seconds by which its clock is fast."""

    passed = 0.0

    def time(self) -> float:
        return super().time() + self.passed


def test_a_replay_may_take_longer_than_one_message_may() -> None:
    """A busy replica's replay goes on as long as its messages come: their number does not limit it."""

    async def run() -> int:
        feed = KvEventFeed(Directory(), "r", b"m", BLOCK)
        context = SlowSource(cast(FastLoop, asyncio.get_running_loop()), 20)
        task = asyncio.ensure_future(KvEventSubscription(cast(Any, context), feed, "tcp://x:1", "tcp://x:2").run())
        await asyncio.wait((task, asyncio.ensure_future(context.is_over.wait())), return_when=asyncio.FIRST_COMPLETED)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return feed.next

    with asyncio.Runner(loop_factory=FastLoop) as runner:
        assert runner.run(run()) == 20


STRANGER = """
import sys, time, zmq
with zmq.Context() as context, context.socket(getattr(zmq, sys.argv[2])) as socket:
    socket.linger, socket.sndtimeo = 0, 2000
    socket.connect(sys.argv[1])
    try:
        for _ in range(40):
            socket.send(bytes(4 << 20), zmq.SNDMORE)
        socket.send(b"end")
    except zmq.Again:
        pass  # the other side does not let it in
    time.sleep(2)
"""


@pytest.mark.parametrize(("which", "kind"), [("endpoint", "XSUB"), ("replay_endpoint", "DEALER")])
@pytest.mark.extended
def test_a_stranger_cannot_fill_the_memory(asking: tuple[KvEvents, zmq.Socket[bytes]], which: str, kind: str) -> None:
    """A message of any size is not kept: its sender is disconnected. Replays go on."""
    publisher, asker = asking
    while not replayed(asker, 3999):
        pass
    before = psutil.Process().memory_info().rss
    sender = subprocess.Popen([sys.executable, "-c", STRANGER, getattr(publisher.source, which), kind])
    most = before
    while sender.poll() is None:
        most = max(most, psutil.Process().memory_info().rss)
        time.sleep(0.005)
    assert sender.returncode == 0 and most - before < 32 << 20
    while not replayed(asker, 3999):
        pass


KEY = "the key of a router of these tests"


async def _reaches(publisher: KvEvents, key: str | None, seconds: float) -> int:
    """How many messages a router's subscription with this key has after this time, or when the first one comes."""
    with zmq.asyncio.Context() as context:
        feed = KvEventFeed(Directory(), "r", b"m", BLOCK)
        source = publisher.source
        subscription = KvEventSubscription(context, feed, source.endpoint, source.replay_endpoint, key)
        task = asyncio.ensure_future(subscription.run())
        deadline = time.monotonic() + seconds
        while not feed.next and time.monotonic() < deadline:
            publisher.notify(BlocksRemoved((b"k" * 32,)))
            await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return feed.next


@pytest.mark.parametrize("key", [None, "another key of the same length...."])
def test_events_with_a_key_are_for_the_router_alone(key: str | None) -> None:
    """A subscription with the router's key gets events and replays; a stranger without it, or with another one, gets nothing
    from either socket, and the events go on."""
    publisher = KvEvents(BLOCK, "tcp://127.0.0.1:0", key=KEY)
    try:
        assert publisher.source.described()["curve"] is True
        assert asyncio.run(_reaches(publisher, key, 2.0)) == 0
        assert asyncio.run(_reaches(publisher, KEY, 60.0)) > 0
    finally:
        publisher.close()


def test_a_stranger_cannot_fill_the_memory_of_encrypted_events() -> None:
    """A message of any size to a socket with a key is not kept either."""
    publisher = KvEvents(BLOCK, "tcp://127.0.0.1:0", key=KEY)
    try:
        before = most = psutil.Process().memory_info().rss
        sender = subprocess.Popen([sys.executable, "-c", STRANGER, publisher.source.replay_endpoint, "DEALER"])
        while sender.poll() is None:
            most = max(most, psutil.Process().memory_info().rss)
            time.sleep(0.005)
        assert most - before < 32 << 20
        assert asyncio.run(_reaches(publisher, KEY, 60.0)) > 0
    finally:
        publisher.close()
