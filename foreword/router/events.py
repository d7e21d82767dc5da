"""KV events of a replica: subscribed to over ZeroMQ, gaps filled by replay, handed to the directory."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final

import msgspec
import zmq
import zmq.asyncio

from foreword.routing.event_feed import KvEventFeed, MessageGap

logger = logging.getLogger(__name__)

_END: Final = (-1).to_bytes(8, "big", signed=True)
_REPLAY_SECONDS: Final = 5.0
# Messages handled before others get a turn on the loop.
_AT_ONCE: Final = 32
_IDLE_SECONDS: Final = 2
_WAITING: Final = 10_000


class Subscription:
    """The events of one source. `run` goes on until it is cancelled.

    Args:
        feed: what is told of them.
        endpoint, replay: of the source; without `replay` a gap costs what is known of the replica.
    """

    def __init__(self, context: zmq.asyncio.Context, feed: KvEventFeed, endpoint: str, replay: str | None) -> None:
        self.feed = feed
        self.endpoint = endpoint
        self._replay = replay
        self._context = context
        self._next = 0
        self._decode: Callable[[bytes], Any] = msgspec.msgpack.Decoder().decode

    async def run(self) -> None:
        socket = self._context.socket(zmq.SUB)
        socket.set_hwm(_WAITING)
        try:
            socket.connect(self.endpoint)
            socket.subscribe(b"")
            await self._join()
            while True:
                if not await socket.poll(_IDLE_SECONDS * 1000):
                    await self._look_behind()
                    continue
                await self._take(await socket.recv_multipart())
                for _ in range(_AT_ONCE):
                    if not await socket.poll(0):
                        break
                    await self._take(await socket.recv_multipart())
                await asyncio.sleep(0)
        except zmq.ZMQError as error:
            logger.warning("no KV events from %s: %s", self.endpoint, error)
        finally:
            socket.close(linger=0)

    async def _join(self) -> None:
        """Who comes late asks for what is still kept."""
        if self._replay is not None:
            await self._catch_up(0)

    async def _look_behind(self) -> None:
        """Nothing came for a while. What was sent before the subscription stood, or was lost with nothing after it, leaves no
        gap to be seen: ask."""
        if self._replay is not None:
            await self._catch_up(self._next)

    async def _take(self, frames: list[bytes]) -> None:
        number, events = self._read(frames)
        if number is None:
            return
        self._next = number + 1
        missing = self.feed.receive(number, events)
        if missing is None:
            return
        await self._fill(missing)
        if self.feed.receive(number, events) is not None:
            self.feed.skip_to(number)
            self.feed.receive(number, events)

    async def _fill(self, missing: MessageGap) -> None:
        if self._replay is None:
            self.feed.skip_to(missing.end)
        else:
            await self._catch_up(missing.first)

    async def _catch_up(self, first: int) -> None:
        """Ask for all messages from number `first` on. What is not kept any more is given up."""
        assert self._replay is not None
        socket = self._context.socket(zmq.DEALER)
        try:
            socket.connect(self._replay)
            await socket.send_multipart([b"", first.to_bytes(8, "big")])
            async with asyncio.timeout(_REPLAY_SECONDS):
                while True:
                    frames = await socket.recv_multipart()
                    if len(frames) < 3 or frames[-2] == _END:
                        return
                    self._take_replayed(frames[-3:])
        except (TimeoutError, zmq.ZMQError):
            logger.info("no replay of KV events from %s", self._replay)
        finally:
            socket.close(linger=0)

    def _take_replayed(self, frames: list[bytes]) -> None:
        number, events = self._read(frames)
        if number is None:
            return
        self._next = max(self._next, number + 1)
        missing = self.feed.receive(number, events, replayed=True)
        if missing is not None:
            self.feed.skip_to(missing.end)
            self.feed.receive(number, events, replayed=True)

    def _read(self, frames: list[bytes]) -> tuple[int | None, list[Any]]:
        """`[topic, number, payload]`."""
        if len(frames) != 3 or len(frames[1]) != 8:
            self.feed.counters.malformed += 1
            return None, []
        try:
            payload = self._decode(frames[2])
        except (msgspec.DecodeError, ValueError):
            self.feed.counters.malformed += 1
            return None, []
        number = int.from_bytes(frames[1], "big")
        if not isinstance(payload, list) or len(payload) < 2 or not isinstance(payload[1], list):
            self.feed.counters.malformed += 1
            return number, []
        return number, payload[1]
