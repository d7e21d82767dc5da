"""Subscribes to a replica's KV events over ZeroMQ. Fills gaps by replay and passes the events to the feed."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final

import msgspec
import zmq
import zmq.asyncio

from foreword.api.event_curve import secure_subscriber
from foreword.kv_event_wire import REPLAY_END, decode_batch, decode_number, encode_number
from foreword.routing.event_feed import KvEventFeed

logger = logging.getLogger(__name__)

_REPLAY_SECONDS: Final = 5.0
# Messages handled before other tasks get a turn on the loop.
_BATCH: Final = 32
_IDLE_SECONDS: Final = 2
_MAX_QUEUED: Final = 10_000
# A replica that sends a larger message is disconnected. One has the blocks of a step, or a part of a snapshot.
_MESSAGE_BYTES: Final = 64 << 20


class KvEventSubscription:
    """The events of one source. `run` runs until it is cancelled.

    Args:
        endpoint, replay: endpoints of the source.
        key: that the source shares with this router; None for one in plain text.
    """

    def __init__(
        self, context: zmq.asyncio.Context, feed: KvEventFeed, endpoint: str, replay: str | None, key: str | None = None
    ) -> None:
        self.feed = feed
        self.endpoint = endpoint
        self._replay = replay
        self._context = context
        self._key = key

    async def run(self) -> None:
        socket = self._socket(zmq.SUB)
        socket.set_hwm(_MAX_QUEUED)
        try:
            socket.connect(self.endpoint)
            socket.subscribe(b"")
            await self._request_replay()
            while True:
                if not await socket.poll(_IDLE_SECONDS * 1000):
                    # Messages sent before the subscription was active, and lost last messages, leave no visible gap.
                    await self._request_replay()
                    continue
                await self._receive(await socket.recv_multipart())
                for _ in range(_BATCH):
                    if not await socket.poll(0):
                        break
                    await self._receive(await socket.recv_multipart())
                await asyncio.sleep(0)
        except zmq.ZMQError as error:
            logger.warning("no KV events from %s: %s", self.endpoint, error)
        finally:
            socket.close(linger=0)

    def _socket(self, kind: int) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        socket.maxmsgsize = _MESSAGE_BYTES
        if self._key is not None:
            secure_subscriber(socket, self._key)
        return socket

    async def _receive(self, frames: list[bytes]) -> None:
        message = self._parse(frames)
        if message is None:
            return
        if self.feed.published(message[0]):
            await self._request_replay()
        self.feed.receive(*message)

    async def _request_replay(self) -> None:
        """Ask for all messages from the next one on. Does nothing for a source without replay."""
        if self._replay is None:
            return
        socket = self._socket(zmq.DEALER)
        try:
            socket.connect(self._replay)
            await socket.send_multipart([b"", encode_number(self.feed.next)])
            async with asyncio.timeout(_REPLAY_SECONDS) as limit:
                while True:
                    frames = await socket.recv_multipart()
                    if len(frames) < 3 or frames[-2] == REPLAY_END:
                        return
                    message = self._parse(frames[-3:])
                    if message is not None and message[0] >= self.feed.next:
                        self.feed.receive(*message, replayed=True)
                        # A busy replica may take long for all of them.
                        limit.reschedule(asyncio.get_running_loop().time() + _REPLAY_SECONDS)
        except (TimeoutError, zmq.ZMQError):
            logger.info("no replay of KV events from %s", self._replay)
        finally:
            socket.close(linger=0)

    def _parse(self, frames: list[bytes]) -> tuple[int, list[Any]] | None:
        """The number and the events of `[topic, number, payload]`; None for an unreadable message."""
        number = decode_number(frames[1]) if len(frames) == 3 else None
        try:
            events = decode_batch(frames[2]) if number is not None else None
        except (msgspec.DecodeError, ValueError):
            events = None
        if number is None or events is None:
            self.feed.counters.malformed += 1
            return None
        return number, events
