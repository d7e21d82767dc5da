"""The tests that every link must pass. Needs pytest.

    class TestMine(LinkContract):
        @pytest.fixture
        def meeting(self): ...      # a `Meeting`: one side dials, the other one answers

`answer` is also called in a child process that the tests fork and kill.
"""

from __future__ import annotations

import os
import random
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Protocol

import pytest

from foreword.transfer.errors import TransferError, TransferTimeout, TransferUnavailable
from foreword.transfer.link import Link, Received
from foreword.transfer.wire_format import Finished, Frames, Heartbeat, KVPart, Taken

ID = bytes(range(16))
PATIENCE = 60.0


class Meeting(Protocol):
    """Connects two sides. Each call returns one end of a new link; both must run at the same time."""

    def dial(self) -> Link: ...
    def answer(self) -> Link: ...


def soon(seconds: float = PATIENCE) -> float:
    """A deadline that a working link does not reach in a test."""
    return time.monotonic() + seconds


@contextmanager
def pair(meeting: Meeting) -> Iterator[tuple[Link, Link]]:
    """Two ends of a link in this process."""
    with ThreadPoolExecutor(1) as threads:
        answered = threads.submit(meeting.answer)
        near = meeting.dial()
        far = answered.result(PATIENCE)
    try:
        yield near, far
    finally:
        near.close()
        far.close()


@contextmanager
def child(work: Callable[[], None]) -> Iterator[int]:
    """A forked process that runs `work`; killed at the end if it still runs."""
    number = os.fork()
    if not number:
        try:
            work()
        finally:
            os._exit(0)
    try:
        yield number
    finally:
        os.kill(number, signal.SIGKILL)
        os.waitpid(number, 0)


def take(link: Link) -> tuple[object, bytes]:
    """The next message and its payload's bytes, released."""
    received = link.receive(deadline=soon())
    assert received.sound(), "a payload fits its checksum"
    with received.payload as view:
        return received.message, bytes(view)


class LinkContract:
    """The tests of `foreword.transfer.link.Link`. Subclass it as `Test...` and give the fixture `meeting`."""

    @pytest.fixture
    def meeting(self) -> Iterator[Meeting]:
        raise NotImplementedError("give a fixture `meeting`")

    @pytest.fixture
    def links(self, meeting: Meeting) -> Iterator[tuple[Link, Link]]:
        with pair(meeting) as both:
            yield both

    def test_messages_arrive_in_order_and_whole(self, links: tuple[Link, Link]) -> None:
        """Hundreds of messages, without payload or with one of any size in one or more buffers, arrive as they were sent."""
        near, far = links
        draw = random.Random(5)
        plan = [draw.choice([0, 1, 63, 64, 65, 4097, 70_000]) for _ in range(300)]
        payloads = [draw.randbytes(size) for size in plan]

        def send() -> None:
            for number, data in enumerate(payloads):
                cut = draw.randrange(len(data) + 1)
                if data:
                    near.send(KVPart(number, 1, 0, 1, 1), ID, [data[:cut], memoryview(data)[cut:]], deadline=soon())
                else:
                    near.send(Finished(b"", number), ID, deadline=soon())

        with ThreadPoolExecutor(1) as threads:
            sending = threads.submit(send)
            for number, data in enumerate(payloads):
                message, got = take(far)
                assert got == data
                assert message == (KVPart(number, 1, 0, 1, 1) if data else Finished(b"", number))
            sending.result(PATIENCE)

    def test_the_longest_payload(self, links: tuple[Link, Link]) -> None:
        """Payloads of exactly the longest length that the link announces arrive, several in a row."""
        near, far = links
        size = near.largest
        data = random.Random(6).randbytes(size)

        def send() -> None:
            for number in range(5):
                near.send(Frames(number, ()), ID, [data], deadline=soon())

        with ThreadPoolExecutor(1) as threads:
            sending = threads.submit(send)
            for number in range(5):
                message, got = take(far)
                assert message == Frames(number, ()) and got == data
            sending.result(PATIENCE)

    def test_batched_messages(self, links: tuple[Link, Link]) -> None:
        """Batched messages arrive in order and whole, also if they are more than the link holds. The last one of a batch is
        sent at once."""
        near, far = links
        size = near.largest // 5
        data = random.Random(10).randbytes(size)

        def send() -> None:
            for number in range(40):
                near.send(KVPart(number, 1, 0, 1, 1), ID, [data], deadline=soon(), more=number % 10 != 9)
                near.send(Taken(), ID, deadline=soon(), more=number % 10 != 9)

        with ThreadPoolExecutor(1) as threads:
            sending = threads.submit(send)
            for number in range(40):
                message, got = take(far)
                assert message == KVPart(number, 1, 0, 1, 1) and got == data
                assert take(far) == (Taken(), b"")
            sending.result(PATIENCE)
        near.send(Taken(), ID, deadline=soon(), more=True)
        near.send(Heartbeat(), deadline=soon())
        assert [take(far)[0], take(far)[0]] == [Taken(), Heartbeat()]

    def test_both_ways_at_once(self, links: tuple[Link, Link]) -> None:
        """Each side sends large payloads while it receives large payloads."""
        data = random.Random(7).randbytes(300_000)

        def send(link: Link) -> None:
            for number in range(60):
                link.send(KVPart(number, 1, 0, 1, 1), ID, [data], deadline=soon())

        def receive(link: Link) -> list[object]:
            taken = [take(link) for _ in range(60)]
            assert all(got == data for _, got in taken)
            return [message for message, _ in taken]

        with ThreadPoolExecutor(4) as threads:
            sending = [threads.submit(send, link) for link in links]
            receiving = [threads.submit(receive, link) for link in links]
            for one in sending:
                one.result(PATIENCE)
            for other in receiving:
                assert other.result(PATIENCE) == [KVPart(number, 1, 0, 1, 1) for number in range(60)]

    def test_buffers_may_change_after_send(self, links: tuple[Link, Link]) -> None:
        """Changes of the sender's buffers after `send` has returned do not reach the receiver."""
        near, far = links
        buffer = bytearray(20_000)
        for number in range(5):
            buffer[:] = bytes([number + 1]) * len(buffer)
            near.send(KVPart(number, 1, 0, 1, 1), ID, [buffer], deadline=soon())
            buffer[:] = bytes(len(buffer))
        for number in range(5):
            assert take(far)[1] == bytes([number + 1]) * len(buffer)

    def test_payloads_stay_until_released(self, links: tuple[Link, Link]) -> None:
        """An unreleased payload does not change while more arrive, in any order of releases."""
        near, far = links
        draw = random.Random(8)
        held: list[tuple[bytes, Received]] = []
        for number in range(400):
            data = bytes([number % 256]) * draw.choice([100, 5000, 50_000])
            near.send(KVPart(number, 1, 0, 1, 1), ID, [data], deadline=soon())
            held.append((data, far.receive(deadline=soon())))
            if len(held) > 4:
                expected, one = held.pop(draw.randrange(len(held)))
                assert one.payload.view == expected and one.sound()
                one.payload.release()

    def test_a_slow_receiver_blocks_the_sender(self, links: tuple[Link, Link]) -> None:
        """While nothing is released the sender blocks after a bounded number of bytes; after that everything arrives."""
        near, far = links
        size = min(near.largest // 4, 1 << 20)
        count = 40 + 4 * near.largest // size
        data = memoryview(random.Random(9).randbytes(size))
        sent = 0
        stop = threading.Event()

        def send() -> None:
            nonlocal sent
            for number in range(count):
                near.send(KVPart(number, 1, 0, 1, 1), ID, [data], deadline=soon())
                sent += 1

        with ThreadPoolExecutor(2) as threads:
            sending = threads.submit(send)
            before, since = -1, time.monotonic()
            while not stop.wait(0.02):  # until it has not moved for a while
                if sent != before:
                    before, since = sent, time.monotonic()
                elif time.monotonic() - since > 0.7:
                    break
            assert not sending.done(), "the sender waits while nothing is released"
            for number in range(count):
                message, got = take(far)
                assert message == KVPart(number, 1, 0, 1, 1) and got == data
            sending.result(PATIENCE)

    def test_a_sender_gives_up_at_its_deadline(self, links: tuple[Link, Link]) -> None:
        """Without progress `send` raises TransferTimeout."""
        near, _ = links
        data = bytes(min(near.largest, 1 << 20))
        with pytest.raises(TransferTimeout):  # noqa: PT012 - the kernel decides how many fit
            for _ in range(1000):
                near.send(KVPart(0, 1, 0, 1, 1), ID, [data], deadline=soon(0.3))

    def test_receiving_in_time_slices_loses_nothing(self, links: tuple[Link, Link]) -> None:
        """A TransferTimeout of `receive` loses nothing: the next call gets the next message."""
        near, far = links
        for number in range(3):
            with pytest.raises(TransferTimeout):
                far.receive(deadline=time.monotonic() - 1)
            near.send(KVPart(number, 1, 0, 1, 1), ID, [b"x" * 100], deadline=soon())
            assert take(far) == (KVPart(number, 1, 0, 1, 1), b"x" * 100)

    def test_close_wakes_the_receiver(self, links: tuple[Link, Link]) -> None:
        """Closing ends a `receive` that waits on another thread, and all later calls fail; closing twice is allowed."""
        near, _ = links
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(lambda: near.receive(deadline=soon()))
            near.close()
            with pytest.raises(TransferUnavailable):
                waiting.result(PATIENCE)
        near.close()
        with pytest.raises(TransferUnavailable):
            near.receive(deadline=soon())
        with pytest.raises(TransferUnavailable):
            near.send(Heartbeat(), deadline=soon())

    def test_messages_before_the_end_arrive(self, links: tuple[Link, Link]) -> None:
        """After the peer has closed, its last messages still arrive, then TransferUnavailable; payloads stay readable."""
        near, far = links
        near.send(KVPart(0, 1, 0, 1, 1), ID, [b"last words"], deadline=soon())
        near.send(Taken(), ID, deadline=soon())
        near.close()
        received = far.receive(deadline=soon())
        assert far.receive(deadline=soon()).message == Taken()
        with pytest.raises(TransferUnavailable):
            far.receive(deadline=soon())
        far.close()
        assert bytes(received.payload.view) == b"last words"
        received.payload.release()

    def test_a_killed_receiver(self, meeting: Meeting) -> None:
        """When the peer's process is killed while payloads are on the way, the sender gets an error."""
        ready, tell = os.pipe()

        def work() -> None:
            link = meeting.answer()
            held = [link.receive(deadline=soon()) for _ in range(3)]
            os.write(tell, b"x")
            time.sleep(PATIENCE * len(held))

        with child(work) as number:
            link = meeting.dial()
            data = bytes(min(link.largest // 4, 1 << 20))
            for _ in range(3):
                link.send(KVPart(0, 1, 0, 1, 1), ID, [data], deadline=soon())
            assert select.select([ready], [], [], PATIENCE)[0]
            os.kill(number, signal.SIGKILL)
            with pytest.raises(TransferError):  # noqa: PT012 - the kernel decides how many fit
                while True:
                    link.send(KVPart(0, 1, 0, 1, 1), ID, [data], deadline=soon(1))
            with pytest.raises(TransferUnavailable):
                link.receive(deadline=soon())
            link.close()
        os.close(ready)
        os.close(tell)

    def test_a_killed_sender(self, meeting: Meeting) -> None:
        """When the peer's process is killed, whole messages may still arrive, then TransferUnavailable; never half a one."""

        def work() -> None:
            link = meeting.answer()
            number = 0
            while True:
                number += 1
                link.send(KVPart(number, 1, 0, 1, 1), ID, [bytes([number % 256]) * 100_000], deadline=soon())

        with child(work) as number:
            link = meeting.dial()
            seen = 0

            def receive() -> None:
                nonlocal seen
                message, data = take(link)
                seen += 1
                assert message == KVPart(seen, 1, 0, 1, 1) and data == bytes([seen % 256]) * 100_000

            for _ in range(20):
                receive()
            os.kill(number, signal.SIGKILL)
            with pytest.raises(TransferUnavailable):  # noqa: PT012
                while True:
                    receive()
            link.close()
