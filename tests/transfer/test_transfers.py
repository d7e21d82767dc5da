"""Transfers between two endpoints, over each link, through the API that an engine uses."""

import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from actors import (
    LAYOUT,
    PATIENCE,
    Decode,
    FrameService,
    Prefill,
    Recorder,
    config,
    content,
    keys_of,
    parts_of,
    until,
)
from networks import LINKS

from foreword.blocks.layout import Layout
from foreword.transfer import transfer_endpoint
from foreword.transfer.connection import Connection
from foreword.transfer.errors import PeerGone, TransferError, TransferRefused, TransferTimeout, TransferUnavailable
from foreword.transfer.link import Payload
from foreword.transfer.protocol import Role, State, TransferOutcome
from foreword.transfer.transfer_endpoint import TransferEndpoint
from foreword.transfer.transfers import KVDestination, KVSource, TransferService
from foreword.transfer.wire_format import Buffer, KVPart, Reason, Taken


@contextmanager
def endpoints(
    theirs: TransferService, ours: TransferService, link: str = "shm", **settings: object
) -> Iterator[tuple[TransferEndpoint, TransferEndpoint]]:
    """Their endpoint listens; ours does not yet."""
    with ExitStack() as stack:
        listening = TransferEndpoint(config(links=LINKS[link], **settings), theirs)
        stack.callback(listening.close)
        calling = TransferEndpoint(config(links=LINKS[link], **settings), ours)
        stack.callback(calling.close)
        listening.listen()
        yield calling, listening


@contextmanager
def two(
    theirs: TransferService, ours: TransferService, link: str = "shm", **settings: object
) -> Iterator[tuple[Connection, TransferEndpoint]]:
    """Their endpoint listens, ours connects to it."""
    with endpoints(theirs, ours, link, **settings) as (calling, listening):
        connection = calling.connect(listening.address)
        assert connection.link.name == link
        yield connection, listening


def request(seed: int, tokens: int) -> bytes:
    return f"{seed} {tokens}".encode()


def pull(connection: Connection, decode: Decode, seed: int, tokens: int, have: int = 0) -> KVDestination:
    return connection.pull(request(seed, tokens), keys_of(seed, tokens), have=have, context=decode.hold(tokens))


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("tokens", [1, 16, 100, 1000])
def test_pull(link: str, tokens: int) -> None:
    """KV computed on another instance arrives complete and checked, with a partial last block and the result."""
    prefill, decode = Prefill(), Decode()
    with two(prefill, decode, link) as (connection, listening):
        destination = pull(connection, decode, 1, tokens)
        assert destination.wait(PATIENCE) is TransferOutcome.TAKEN
        assert prefill.await_("ended").outcome is TransferOutcome.TAKEN
        assert decode.results == [b"result 1"]
        assert decode.taken_bytes == tokens * LAYOUT.block_bytes // LAYOUT.block_size
        assert listening.status().transfers == {} and listening.status().ended == {"taken": 1}
        assert listening.status().traffic[link].bytes_sent == decode.taken_bytes
        decode.check()


@pytest.mark.parametrize("link", LINKS)
def test_only_missing_blocks_are_sent(link: str) -> None:
    """The KV of 496 tokens is sent of 4,000 of which 3,504 are cached, and no more."""
    prefill, decode = Prefill(), Decode()
    with two(prefill, decode, link) as (connection, _):
        assert pull(connection, decode, 2, 4000, have=219).wait(PATIENCE) is TransferOutcome.TAKEN
        assert decode.taken_bytes == 496 * LAYOUT.block_bytes // LAYOUT.block_size
        decode.check()


@pytest.mark.parametrize("link", LINKS)
def test_push_in_rounds(link: str) -> None:
    """A request that decodes while its KV is sent: full blocks first, then new tokens, then the change of ownership."""
    decode, giving = Decode(), Recorder()
    with two(decode, giving, link) as (connection, _):
        source = connection.push(request(3, 330), keys_of(3, 160), 160)
        assert giving.await_("accepted") is source and source.have == 0
        for part, data in parts_of(3, 160):
            source.send(part, [data])
        for tokens in (250, 330):  # the second round sends the block again that was not full in the first one
            for part, data in parts_of(3, tokens, first=10 if tokens == 250 else 15):
                source.send(part, [data[:100], data[100:]])
        source.finish(b"state", 330)
        assert source.wait(PATIENCE) is TransferOutcome.TAKEN
        until(lambda: decode.ends != {})
        assert decode.results == [b"state"]
        assert decode.keys == dict(enumerate(keys_of(3, 330)))
        decode.check()


def test_a_refusal_reaches_the_peer() -> None:
    """A refusal reaches the other side with its reason and its message."""
    prefill, decode = Prefill(stop="refused"), Decode()
    with two(prefill, decode) as (connection, _):
        destination = pull(connection, decode, 4, 100)
        assert destination.wait(PATIENCE) is TransferOutcome.NOT_TAKEN
        assert (destination.reason, destination.message) == (Reason.FULL, "no room for it here")
        decode.check()
    with two(TransferService(LAYOUT), Recorder()) as (connection, _):
        for side in (connection.pull(b"", []), connection.push(b"", [], 0)):
            assert side.wait(PATIENCE) is TransferOutcome.NOT_TAKEN and side.reason is Reason.ROLE


def test_a_destination_without_memory() -> None:
    """A push to an instance without free blocks is refused, and the source keeps its request."""
    decode, giving = Decode(blocks=4), Recorder()
    with two(decode, giving) as (connection, _):
        source = connection.push(request(5, 100), keys_of(5, 96), 96)
        assert source.wait(PATIENCE) is TransferOutcome.NOT_TAKEN
        assert source.reason is Reason.FULL
        decode.check()


@pytest.mark.parametrize("link", LINKS)
def test_a_hundred_at_once(link: str) -> None:
    """A hundred transfers over one connection, some cancelled: nothing is mixed up, nothing leaks."""
    prefill, decode = Prefill(), Decode(blocks=2000)
    with two(prefill, decode, link) as (connection, listening):
        draw = random.Random(6)
        wanted = [pull(connection, decode, seed, draw.randrange(1, 300)) for seed in range(100)]
        for destination in wanted[::10]:
            destination.cancel()
        outcomes = [destination.wait(PATIENCE) for destination in wanted]
        others = [wanted[n] for n, outcome in enumerate(outcomes) if n % 10 and outcome is not TransferOutcome.TAKEN]
        assert not others, [(one.reason, one.message) for one in others]
        assert {f"result {n}".encode() for n in range(100) if n % 10} <= set(decode.results)
        until(lambda: listening.status().transfers == {})
        assert set(prefill.ends.values()) <= {1}
        assert all(int(source.request.split()[0]) % 10 == 0 for source in prefill.cut_off), "only cancelled ones are"
        decode.check()


def test_more_than_allowed() -> None:
    """Transfers beyond the limit are refused on both sides; those in progress continue."""
    prefill, decode = Prefill(stop="asked"), Decode()
    with two(prefill, decode, max_connections=1) as (connection, _):
        held = [pull(connection, decode, seed, 10) for seed in range(4)]
        with pytest.raises(TransferError) as raised:
            connection.pull(b"")
        assert raised.value.reason == Reason.FULL
        assert [one.state for one in held] == [State.WANTED] * 4
        for one in held:
            assert one.cancel()
        until(lambda: len(prefill.ends) == 4)
        decode.check()


@pytest.mark.parametrize("link", LINKS)
def test_a_slow_service_blocks_the_sender(link: str) -> None:
    """A receiver that does not release payloads blocks the sender: queue and ring are bounded, and each buffer is returned."""
    hold = threading.Event()

    class Slow(Decode):
        def part(self, destination: KVDestination, part: KVPart, payload: Payload) -> None:
            hold.wait(PATIENCE)
            super().part(destination, part, payload)

    decode, giving = Slow(blocks=4000), Recorder()
    freed = threading.Semaphore(0)
    with two(decode, giving, link) as (connection, _):
        source = connection.push(request(7, 60_000), [], 0)
        giving.await_("accepted")
        queued = refused = 0
        pieces = list(parts_of(7, 60_000, target=100_000))
        for part, data in pieces:
            if source.send(part, [data], sent=freed.release, wait=0.05 if refused < 2 else 0.0):
                queued += len(data)
                assert connection.channel.queued_bytes <= 1 << 20
            else:
                refused += 1
        assert refused and queued < 16 << 20
        hold.set()
        source.cancel()
        for _ in pieces:
            assert freed.acquire(timeout=PATIENCE), "each buffer is given back once"
        assert not freed.acquire(blocking=False)
        until(lambda: decode.ends != {})
        decode.check()


def test_an_end_frees_a_waiting_sender() -> None:
    """A thread that waits for room in the queue stops waiting when its transfer ends."""
    hold, end = threading.Event(), threading.Event()

    class Stuck(Decode):
        """Cancels in its first part, when the test says so, and then blocks the reader for a while."""

        def part(self, destination: KVDestination, part: KVPart, payload: Payload) -> None:
            payload.release()
            end.wait(PATIENCE)
            destination.cancel()
            hold.wait(PATIENCE)

    decode, giving = Stuck(blocks=4000), Recorder()
    with two(decode, giving, progress_timeout=600.0, lease_seconds=600.0) as (connection, _):
        source = connection.push(request(7, 60_000), [], 0)
        giving.await_("accepted")
        pieces = list(parts_of(7, 60_000, target=100_000))
        while source.send(pieces[0][0], [pieces[0][1]], wait=0.1):
            pass
        waiting = threading.Thread(target=lambda: source.send(pieces[0][0], [pieces[0][1]], wait=10 * PATIENCE))
        waiting.start()
        end.set()
        waiting.join(PATIENCE)
        assert not waiting.is_alive()
        hold.set()
        until(lambda: decode.ends != {})
        decode.check()


def test_deadlines_end_stuck_transfers() -> None:
    """Deadlines end a source that stops sending, a service that never answers, and one that never takes."""
    for stop in ("asked", "sending"):
        prefill, decode = Prefill(stop=stop), Decode()
        with two(prefill, decode, answer_timeout=0.3, progress_timeout=0.3) as (connection, listening):
            destination = pull(connection, decode, 8, 500)
            assert destination.wait(PATIENCE) is TransferOutcome.NOT_TAKEN
            assert destination.reason is Reason.DEADLINE and "0.3 s" in destination.message
            until(lambda listening=listening: listening.status().transfers == {})
            decode.check()
    prefill, decode = Prefill(), Decode(stop="complete")
    with two(prefill, decode, lease_seconds=0.3) as (connection, _):
        destination = pull(connection, decode, 8, 500)
        assert destination.wait(PATIENCE) is TransferOutcome.NOT_TAKEN
        decode.check()
        assert not destination.take(), "it is too late"


def test_keep_alive() -> None:
    """A source that computes for longer than the time limits stays alive with `keep_alive`."""

    class Busy(Prefill):
        def send(self, source: KVSource, seed: int, tokens: int, first: int) -> None:
            ends = time.monotonic() + 6.0
            while time.monotonic() < ends:
                source.keep_alive()
                time.sleep(0.01)
            super().send(source, seed, tokens, first)

    prefill, decode = Busy(), Decode()
    with two(prefill, decode, progress_timeout=4.0, lease_seconds=4.0) as (connection, _):
        assert pull(connection, decode, 9, 100).wait(PATIENCE) is TransferOutcome.TAKEN
        decode.check()


def test_a_part_with_a_wrong_key() -> None:
    """A part with a wrong key fails the transfer with a reason on both sides; the service never sees it."""

    class Wrong(Prefill):
        def send(self, source: KVSource, seed: int, tokens: int, first: int) -> None:
            for number, (part, data) in enumerate(parts_of(seed, tokens)):
                if number == 1:
                    wrong = KVPart(
                        part.first_layer,
                        part.layers,
                        part.first_block,
                        part.blocks,
                        part.tokens,
                        b"\x01" * len(part.keys),
                    )
                    source.send(wrong, [data])
                    return
                source.send(part, [data])

    prefill, decode = Wrong(), Decode()
    with two(prefill, decode) as (connection, _):
        destination = pull(connection, decode, 10, 800)
        assert destination.wait(PATIENCE) is TransferOutcome.NOT_TAKEN and destination.reason is Reason.CONTENT
        source = prefill.await_("ended")
        assert source.reason is Reason.CONTENT and "another key" in source.message
        decode.check()


def test_an_end_with_gaps() -> None:
    """A source that finishes while a part is missing fails the transfer."""

    class Hasty(Prefill):
        def send(self, source: KVSource, seed: int, tokens: int, first: int) -> None:
            for part, data in list(parts_of(seed, tokens))[1:]:
                source.send(part, [data])
            source.finish(b"", tokens)

    prefill, decode = Hasty(), Decode()
    with two(prefill, decode) as (connection, _):
        destination = pull(connection, decode, 11, 300)
        assert destination.wait(PATIENCE) is TransferOutcome.NOT_TAKEN and destination.reason is Reason.GAPS
        assert decode.results == []
        decode.check()


def test_a_service_that_fails() -> None:
    """An exception in a service ends its transfer on both sides with a reason; the connection and other transfers continue."""

    class Broken(Decode):
        def part(self, destination: KVDestination, part: KVPart, payload: Payload) -> None:
            payload.release()
            raise RuntimeError("a defect")

    prefill, decode = Prefill(), Broken()
    with two(prefill, decode) as (connection, _):
        for seed in (1, 2):
            destination = pull(connection, decode, seed, 300)
            assert destination.wait(PATIENCE) is TransferOutcome.NOT_TAKEN and destination.reason is Reason.FAILED
            assert "RuntimeError" in prefill.await_("ended").message
        assert connection.alive
        decode.check()


def test_cancel_does_not_wait_for_the_part_under_way() -> None:
    """A part may wait for a device: the engine's thread does not, when it ends the transfer. No other part follows."""
    inside, go, left = threading.Event(), threading.Event(), threading.Event()
    parts: list[bytes] = []

    class Slow(Decode):
        def part(self, destination: KVDestination, part: KVPart, payload: Payload) -> None:
            parts.append(destination.id)
            inside.set()
            assert go.wait(PATIENCE)
            if destination.id == parts[0]:
                payload.release()
            else:
                super().part(destination, part, payload)
            left.set()

    prefill, decode = Prefill(), Slow()
    with two(prefill, decode) as (connection, _):
        destination = pull(connection, decode, 12, 300)
        assert inside.wait(PATIENCE)
        assert destination.cancel() and not left.is_set()
        assert decode.ends == {destination.id: 1}
        go.set()
        assert left.wait(PATIENCE)
        assert pull(connection, decode, 13, 100).wait(PATIENCE) is TransferOutcome.TAKEN
        assert parts.count(destination.id) == 1
        decode.check()


def test_commands_in_the_wrong_state() -> None:
    """A command that is not possible now raises TransferError with the reason and changes nothing."""
    prefill, decode = Prefill(stop="asked"), Decode()
    with two(prefill, decode) as (connection, _):
        destination = pull(connection, decode, 13, 100)
        source = prefill.await_("wanted")
        assert isinstance(source, KVSource) and source.role is Role.PULL_SOURCE
        part, data = next(iter(parts_of(13, 100)))
        freed: list[int] = []
        with pytest.raises(TransferError, match="asked"):
            source.send(part, [data], sent=lambda: freed.append(1))
        assert freed == [1]
        with pytest.raises(TransferError):
            source.finish(b"", 100)
        source.accept()
        with pytest.raises(TransferError, match="bytes"):
            source.send(part, [data[1:]])
        with pytest.raises(TransferError):
            destination.take()
        source.cancel(Reason.DRAINING, "going down")
        assert destination.wait(PATIENCE) is TransferOutcome.NOT_TAKEN
        assert (destination.reason, destination.message) == (Reason.DRAINING, "going down")
        with pytest.raises(TransferError, match="draining"):
            source.send(part, [data])
        assert not destination.take()
        decode.check()


def test_messages_that_the_protocol_does_not_allow() -> None:
    """A peer that sends a message that is not allowed loses the connection, and its transfers end."""
    prefill, decode = Prefill(stop="asked"), Decode()
    with two(prefill, decode) as (connection, listening):
        destination = pull(connection, decode, 14, 100)
        prefill.await_("wanted")
        connection.channel.post(Taken(), destination.id)
        assert destination.wait(PATIENCE) is TransferOutcome.NOT_TAKEN and destination.reason is Reason.LOST
        assert prefill.await_("ended").reason is Reason.LOST
        assert not connection.alive
        until(lambda: listening.status().connections == {})
        decode.check()


def frames(count: int, size: int) -> dict[bytes, bytes]:
    draw = random.Random(count)
    return {draw.randbytes(64): draw.randbytes(draw.randrange(1, size)) for _ in range(count)}


@pytest.mark.parametrize("link", LINKS)
def test_fetch(link: str) -> None:
    """Reading another instance: how many blocks of a chain it has, and their frames; missing ones have length 0."""
    kept = frames(50, 30_000)
    names = [*kept]
    asked = [*names[:20], bytes(64), *names[20:], bytes([1]) * 64]
    with two(FrameService(kept), TransferService(), link) as (connection, _):
        deadline = time.monotonic() + PATIENCE
        assert connection.locate(asked, deadline=deadline) == 20
        assert connection.locate(names, deadline=deadline) == 50
        assert connection.locate([], deadline=deadline) == 0
        buffers = [memoryview(bytearray(30_000)) for _ in asked]
        lengths = connection.get(asked, buffers, deadline=deadline)
        found = [bytes(buffer[:length]) for buffer, length in zip(buffers, lengths, strict=True)]
        assert found == [kept.get(name, b"") for name in asked]
        small = [memoryview(bytearray(10)) for _ in names]
        lengths = connection.get(names, small, deadline=deadline)
        assert lengths == [len(kept[name]) if len(kept[name]) <= 10 else 0 for name in names]


def test_fetching_over_a_connection_that_has_ended() -> None:
    """A read over a connection that has ended says so, and waits for no answer."""
    kept = frames(2, 100)
    with two(FrameService(kept), TransferService(), "tcp") as (connection, _):
        connection.close()
        buffers = [memoryview(bytearray(100)) for _ in kept]
        for _ in range(2):
            with pytest.raises(TransferUnavailable):
                connection.get([*kept], buffers, deadline=time.monotonic() + 1.0)


def test_fetching_from_several_threads() -> None:
    """Fetches of many threads over one connection are not mixed up while parts are sent over it too."""
    kept = frames(200, 5000)
    names = [*kept]
    failures: list[object] = []

    class Both(FrameService, Prefill):
        def __init__(self) -> None:
            Prefill.__init__(self)
            self.frames, self.batch = kept, 3

    decode = Decode()
    with two(Both(), decode) as (connection, _):

        def fetch(seed: int) -> None:
            draw = random.Random(seed)
            for _ in range(10):
                some = draw.sample(names, 20)
                buffers = [memoryview(bytearray(5000)) for _ in some]
                lengths = connection.get(some, buffers, deadline=time.monotonic() + PATIENCE)
                if [bytes(b[:n]) for b, n in zip(buffers, lengths, strict=True)] != [kept[name] for name in some]:
                    failures.append(seed)

        threads = [threading.Thread(target=fetch, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        destination = pull(connection, decode, 15, 1000)
        for thread in threads:
            thread.join(PATIENCE)
        assert not failures
        assert destination.wait(PATIENCE) is TransferOutcome.TAKEN
        decode.check()


def test_a_frame_service_that_fails_or_hangs() -> None:
    """An exception in a service refuses the fetch; a slow service causes a timeout, after which no buffer is written."""
    go = threading.Event()

    class Bad(FrameService):
        def locate(self, names: Sequence[bytes], deadline: float) -> int:
            raise RuntimeError("a defect")

        def get(self, names: Sequence[bytes], longest: int, deadline: float) -> Iterator[Sequence[Buffer | None]]:
            go.wait(PATIENCE)
            return super().get(names, longest, deadline)

    kept = frames(3, 100)
    with two(Bad(kept), TransferService()) as (connection, _):
        with pytest.raises(TransferRefused, match="RuntimeError"):
            connection.locate([*kept], deadline=time.monotonic() + PATIENCE)
        buffers = [memoryview(bytearray(100)) for _ in kept]
        with pytest.raises(TransferTimeout):
            connection.get([*kept], buffers, deadline=time.monotonic() + 0.2)
        go.set()
        other = [memoryview(bytearray(100)) for _ in kept]
        lengths = connection.get([*kept], other, deadline=time.monotonic() + PATIENCE)
        assert [bytes(b[:n]) for b, n in zip(other, lengths, strict=True)] == [*kept.values()]
        assert all(bytes(buffer) == bytes(100) for buffer in buffers)


def test_requests_above_the_limit_are_refused_and_their_places_come_back() -> None:
    """64 requests of peers wait or are answered at a time; one more is refused at once, and each answer makes room for one."""
    go, begun = threading.Event(), threading.Semaphore(0)

    class Slow(FrameService):
        def locate(self, names: Sequence[bytes], deadline: float) -> int:
            begun.release()
            assert go.wait(PATIENCE)
            return super().locate(names, deadline)

    kept = frames(3, 100)
    found: list[int] = []
    with two(Slow(kept), TransferService()) as (connection, listening):

        def ask() -> None:
            found.append(connection.locate([*kept], deadline=time.monotonic() + PATIENCE))

        threads = [threading.Thread(target=ask) for _ in range(64)]
        for thread in threads:
            thread.start()
        until(lambda: listening._server._open == 64)
        assert begun.acquire(timeout=PATIENCE)
        for _ in range(2):
            with pytest.raises(TransferRefused, match="too many requests"):
                connection.locate([*kept], deadline=time.monotonic() + PATIENCE)
        go.set()
        for thread in threads:
            thread.join(PATIENCE)
        assert found == [3] * 64
        until(lambda: listening._server._open == 0)
        ask()
        assert found == [3] * 65


def test_an_instance_without_blocks_can_only_fetch() -> None:
    """An instance without a layout can fetch frames; it can neither pull nor push."""
    with two(FrameService(frames(1, 10)), TransferService()) as (connection, _):
        with pytest.raises(TransferError):
            connection.pull(b"")
        with pytest.raises(TransferError):
            connection.push(b"", [], 0)
        assert connection.locate([bytes(64)], deadline=time.monotonic() + PATIENCE) == 0


def test_one_connection_per_peer() -> None:
    """Connecting again returns the existing connection, from either side; a broken one is replaced."""
    with endpoints(TransferService(LAYOUT), TransferService(LAYOUT)) as (calling, listening):
        connection = calling.connect(listening.address)
        assert calling.connect(listening.address) is connection
        address = calling.listen()
        connection.close()
        again = calling.connect(listening.address)
        assert again is not connection and again.alive
        until(lambda: bool(listening.status().connections))
        assert listening.connect(address).peer.instance == calling.instance
        assert sum(listening.status().connections.values()) == 1


def test_one_attempt_to_connect_per_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that need a peer at once wait for one attempt to connect, each until its own deadline, and share its connection;
    after an attempt that failed, the next thread makes another one."""
    real, begun, go, fail = transfer_endpoint.connect, threading.Semaphore(0), threading.Semaphore(0), [False, True]

    def gated(*given: Any, **more: Any) -> Any:
        begun.release()
        assert go.acquire(timeout=PATIENCE)
        if fail.pop():
            raise TransferUnavailable("no route")
        return real(*given, **more)

    monkeypatch.setattr(transfer_endpoint, "connect", gated)
    with endpoints(TransferService(LAYOUT), TransferService(LAYOUT)) as (calling, listening):
        found: list[object] = []

        def connect() -> None:
            try:
                found.append(calling.connect(listening.address, deadline=time.monotonic() + PATIENCE))
            except TransferUnavailable as error:
                found.append(error.message)

        threads = [threading.Thread(target=connect) for _ in range(4)]
        for thread in threads:
            thread.start()
        assert begun.acquire(timeout=PATIENCE)
        with pytest.raises(TransferUnavailable, match="earlier attempt"):
            calling.connect(listening.address, deadline=time.monotonic())
        assert not begun.acquire(blocking=False), "one attempt at a time"
        go.release()
        until(lambda: found == ["no route"])
        assert begun.acquire(timeout=PATIENCE)
        go.release()
        for thread in threads:
            thread.join(PATIENCE)
        assert len(found) == 4 and len(set(map(id, found[1:]))) == 1
        assert found[1] is calling.connect(listening.address)
        assert not begun.acquire(blocking=False)


def test_close_ends_everything() -> None:
    """Closing an endpoint ends its transfers on both sides and closes its listener."""
    prefill, decode = Prefill(stop="sending"), Decode()
    with endpoints(prefill, decode) as (calling, listening):
        connection = calling.connect(listening.address)
        destination = pull(connection, decode, 16, 500)
        decode.await_("part")
        listening.close()
        assert destination.wait(PATIENCE) is TransferOutcome.NOT_TAKEN and destination.reason is Reason.LOST
        assert prefill.await_("ended").outcome is TransferOutcome.NOT_TAKEN
        with pytest.raises(TransferUnavailable):
            connection.locate([bytes(64)], deadline=time.monotonic() + PATIENCE)
        with pytest.raises(PeerGone):
            calling.connect(listening.address)
        decode.check()


def test_engine_specific_order() -> None:
    """KV in an order that only its engine knows is sent in whole blocks."""
    packed = Layout(LAYOUT.model, 16, LAYOUT.layers, "bfloat16", order="vllm-cpu-amx")
    got: list[int] = []

    class Take(Recorder):
        def push_requested(self, destination: KVDestination) -> None:
            destination.accept()

        def part(self, destination: KVDestination, part: KVPart, payload: Payload) -> None:
            got.append(len(payload))
            payload.release()

        def finished(self, destination: KVDestination, result: bytes, tokens: int) -> None:
            destination.take()

    giving = Recorder(packed)
    with two(Take(packed), giving) as (connection, _):
        source = connection.push(b"", keys_of(1, 32), 40)
        giving.await_("accepted")
        part = KVPart(0, 3, 0, 3, 40, b"".join(keys_of(1, 32)))
        source.send(part, [bytes(3 * packed.block_bytes)])
        source.finish(b"", 40)
        assert source.wait(PATIENCE) is TransferOutcome.TAKEN
        assert got == [3 * packed.block_bytes]
    assert len(content(1, KVPart(0, 1, 0, 1, 5))) == 5 * LAYOUT.block_bytes // 16 // 3
