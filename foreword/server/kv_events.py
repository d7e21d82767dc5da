"""Publishes KV cache events of the device and the store tiers over ZeroMQ, in vLLM's format (`kv_event_wire.py`).

Differences to vLLM's own publisher: a block is published when the step that computes it has ended. A removal is published when
no copy of the block is left, so a repeated key is not another copy. Hashes are Foreword's keys.

The last messages are kept for late subscribers. A message that is too old to be kept is folded into a snapshot: the blocks that
it stored are added, those that it removed are dropped. A subscriber that asks for messages that are gone gets the snapshot as
one message, with the number of the last of them, and then the messages that are kept.

Public blocks have the salt PUBLIC in their extra keys. The first block behind them has the salt of its tenant there, also an
empty one, and the last public block as its parent.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import time
from array import array
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any, Final, NamedTuple

import zmq

from foreword.api.event_curve import secure_publisher
from foreword.blocks.keys import is_public
from foreword.blocks.layout import key_of
from foreword.decoders import decode_msgpack
from foreword.errors import ConfigError
from foreword.events import BlocksRemoved, BlocksStored, Event, StepFinished
from foreword.kv_event_wire import (
    DEVICE_MEDIUM,
    HOST_MEDIUM,
    REPLAY_END,
    STORAGE_MEDIUM,
    BlockRemoved,
    BlockStored,
    decode_number,
    encode_batch,
    encode_number,
)
from foreword.newest import Newest
from foreword.store.background import background_thread
from foreword.store.base import Name
from foreword.store.tiered import TieredStore
from foreword.store.types import Reach
from foreword.store.urls import parse

logger = logging.getLogger(__name__)

_KEPT_MESSAGES: Final = 10_000
# Limit for the memory of all kept messages, about 5 bytes per token id.
_KEPT_BYTES: Final = 64 << 20
# Blocks of the snapshot, each of their places counted: about 450 bytes per block of 16 tokens.
_SNAPSHOT_BLOCKS: Final = 1 << 16

_Message: Any = tuple[float, list[BlockStored | BlockRemoved], int]
_Place = tuple[str | None, str | None, str | None]
_WAITING: Final = 100_000
_POLL_SECONDS: Final = 0.05
# A replay can be 64 MB and a snapshot. Subscribers that ask again and again must not delay the events.
_REPLAYS: Final = 8
_REPLAY_PAUSE_SECONDS: Final = 1.0
# A part of a subscription or of a request for a replay. The sender of a larger one is disconnected before it is in memory.
_REQUEST_BYTES: Final = 64
_HANDSHAKE_BYTES: Final = 1024  # the same with CURVE, whose handshake counts
# Blocks whose tokens are kept for the events of tiers: about 400 bytes per block of 16 tokens.
_KNOWN_BLOCKS: Final = 1 << 14
# Changes of tiers that are not published yet; further ones are dropped.
_MAX_CHANGES: Final = 1 << 17


class _Block(NamedTuple):
    parent: bytes | None
    tokens: array[int]
    extra_keys: list[str] | None


class KvEventLog:
    """The messages of one publisher. Not thread-safe.

    Args:
        messages: how many are kept at most.
        blocks: maximum number of blocks in the snapshot. Further ones are left out: a late subscriber does not know them.
    """

    def __init__(self, messages: int = _KEPT_MESSAGES, blocks: int = _SNAPSHOT_BLOCKS) -> None:
        self.messages = messages
        self._max_blocks = blocks
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._folded = -1  # number of the last message in the snapshot
        self._snapshot = (-1, b"")  # as it was last sent
        self._places: defaultdict[_Place, dict[bytes, _Block]] = defaultdict(dict)
        self._blocks = 0

    def append(self, number: int, payload: bytes) -> None:
        """Keep a message that was published."""
        self._kept.append((number, payload))
        self._kept_bytes += len(payload)
        while len(self._kept) > self.messages or self._kept_bytes > _KEPT_BYTES:
            self._folded, oldest = self._kept.popleft()
            self._kept_bytes -= len(oldest)
            events: list[BlockStored | BlockRemoved] = decode_msgpack(oldest, _Message)[1]
            for event in events:
                self._fold(event)

    def since(self, start: int) -> Iterator[tuple[int, bytes]]:
        """Number and payload of all messages from `start` on, or of the snapshot and all messages after it."""
        if start <= self._folded:
            if self._snapshot[0] != self._folded:
                self._snapshot = self._folded, encode_batch(time.time(), self._folded_blocks())
            yield self._snapshot
        for number, payload in self._kept:
            if number >= start:
                yield number, payload

    def _fold(self, event: BlockStored | BlockRemoved) -> None:
        blocks = self._places[event.medium, event.locality, event.ownership]
        if isinstance(event, BlockRemoved):
            self._blocks -= sum(blocks.pop(key, None) is not None for key in event.block_hashes)
            return
        parent, size, extras = event.parent_block_hash, event.block_size, event.extra_keys
        for number, key in enumerate(event.block_hashes):
            if key not in blocks and self._blocks < self._max_blocks:
                tokens = array("I", event.token_ids[number * size : (number + 1) * size])
                blocks[key] = _Block(parent, tokens, extras[number] if extras else None)
                self._blocks += 1
            parent = key

    def _folded_blocks(self) -> list[BlockStored]:
        """All blocks, parents first, in runs of consecutive ones."""
        events: list[BlockStored] = []
        for place, blocks in self._places.items():
            run: BlockStored | None = None
            for key in _parents_first(blocks):
                block = blocks[key]
                if run is None or block.parent != run.block_hashes[-1] or block.extra_keys:
                    extras: list[list[str] | None] | None = [] if block.extra_keys else None
                    medium, *where = place
                    run = BlockStored([], block.parent, [], len(block.tokens), None, medium, None, extras, *where)
                    events.append(run)
                run.block_hashes.append(key)
                run.token_ids.extend(block.tokens)
                if run.extra_keys is not None:
                    run.extra_keys.append(block.extra_keys)
        return events


def _parents_first(blocks: Mapping[bytes, _Block]) -> Iterator[bytes]:
    seen: set[bytes] = set()
    for key in blocks:
        path: list[bytes] = []
        above: bytes | None = key
        while above is not None and above in blocks and above not in seen:
            seen.add(above)
            path.append(above)
            above = blocks[above].parent
        yield from reversed(path)


class PublisherPlace(NamedTuple):
    """Where blocks are, in the terms of vLLM's events."""

    medium: str
    locality: str | None = None
    ownership: str | None = None


DEVICE: Final = PublisherPlace(DEVICE_MEDIUM)


class _KnownBlock(NamedTuple):
    """A block as it was stored on the device."""

    parent: bytes
    tokens: Sequence[int]
    salt: str | None


class _Change(NamedTuple):
    place: PublisherPlace
    stored: bool
    key: bytes


@dataclass(frozen=True, slots=True)
class EventSource:
    """The addresses of the events, for `GET /kv_event_sources`. `curve`: whether they take the router's key."""

    endpoint: str
    replay_endpoint: str
    kept: int
    curve: bool = False

    def described(self) -> dict[str, Any]:
        """In vLLM's fields, and `curve`, which vLLM does not have."""
        return {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": self.endpoint,
            "replay_endpoint": self.replay_endpoint,
            "buffer_steps": self.kept,
            "topic": "",
            **({"curve": True} if self.curve else {}),
        }


class KvEvents:
    """An observer that publishes the engine's events. `close` ends its thread.

    Args:
        block_size: tokens per block of the engine.
        endpoint: `tcp://HOST:PORT` to listen on (`*` for all addresses, port 0 for a free one), or `ipc://PATH`; replays are
            asked for at the next port, or at PATH.replay.
        key: of the router. With it the events are encrypted (`api/event_curve.py`).

    Raises ConfigError if that is not possible.
    """

    def __init__(self, block_size: int, endpoint: str, key: str | None = None) -> None:
        if key is not None and not zmq.has("curve"):
            raise ConfigError("KV events with a router's key need a ZeroMQ with CURVE: install the wheels of pyzmq")
        self._block_size = block_size
        self._context = zmq.Context()
        self._pub, self._router = self._context.socket(zmq.PUB), self._context.socket(zmq.ROUTER)
        self._log = KvEventLog()
        self._pub.set_hwm(_WAITING)
        self._pub.maxmsgsize = self._router.maxmsgsize = _REQUEST_BYTES if key is None else _HANDSHAKE_BYTES
        if key is not None:
            secure_publisher(self._pub, key)
            secure_publisher(self._router, key)
        self._router.sndhwm = self._log.messages + 2  # what is above this limit is dropped: a whole replay fits
        self._replays_from = 0.0
        try:
            first = _bind(self._pub, endpoint)
            second = _bind(self._router, _replays_at(endpoint))
        except ConfigError:
            self._close_sockets()
            raise
        self._stored: list[BlocksStored] = []
        self._messages: queue.Queue[list[object] | None] = queue.Queue(_WAITING)
        self._lost = 0
        self._watches = False
        self._known: Newest[bytes, _KnownBlock] = Newest(_KNOWN_BLOCKS)
        self._changes: deque[_Change] = deque(maxlen=_MAX_CHANGES)
        self.source = EventSource(first, second, self._log.messages, curve=key is not None)
        self._thread = background_thread(self._run, "kv-events")

    # On the engine's thread

    def notify(self, event: Event) -> None:
        """Keep stored blocks until their step has ended; publish removals at once."""
        if type(event) is BlocksStored:
            self._stored.append(event)
            if self._watches:
                self._remember(event)
        elif type(event) is BlocksRemoved:
            if self._stored:
                self._withdraw(set(event.keys))
            self._send([BlockRemoved(list(event.keys), *DEVICE)])
        elif type(event) is StepFinished and self._stored:
            self._send([self._described(stored) for stored in self._stored])
            self._stored.clear()

    def _withdraw(self, keys: set[bytes]) -> None:
        """Drop blocks that were removed before their step ended: they and their successors were never computed."""
        left: list[BlocksStored] = []
        for event in self._stored:
            good = next((i for i, key in enumerate(event.keys) if key in keys), len(event.keys))
            if good == len(event.keys):
                left.append(event)
            elif good:
                tokens = event.tokens[: good * self._block_size]
                left.append(BlocksStored(event.parent, event.keys[:good], tokens, event.salt))
        self._stored = left

    def _remember(self, event: BlocksStored) -> None:
        size, above = self._block_size, (event.parent, *event.keys)
        for number, (parent, key) in enumerate(pairwise(above)):
            tokens = array("I", event.tokens[number * size : (number + 1) * size])
            self._known[key] = _KnownBlock(parent, tokens, event.salt if not number else None)

    def _described(self, event: BlocksStored, place: PublisherPlace = DEVICE) -> BlockStored:
        behind_public = is_public(event.parent)
        extras: list[list[str] | None] | None = None
        if event.salt or (behind_public and event.salt is not None):
            extras = [[event.salt], *[None] * (len(event.keys) - 1)]
        parent = None if event.salt is not None and not behind_public else event.parent
        tokens = list(event.tokens)
        return BlockStored(
            list(event.keys), parent, tokens, self._block_size, None, place.medium, None, extras, *place[1:]
        )

    def _send(self, events: Sequence[object]) -> None:
        try:
            self._messages.put_nowait(list(events))
        except queue.Full:  # leaves a gap in the numbers that no replay fills, so subscribers start again
            self._lost += 1

    # On the threads that write to stores

    def watch(self, store: TieredStore, urls: Sequence[str]) -> None:
        """Publish also what these tiers, opened from these URLs, store and remove."""
        places = [_place(url) for url in urls]
        self._watches = True

        def note(tier: int, stored: bool, names: Sequence[Name]) -> None:
            self._changes.extend(_Change(places[tier], stored, key_of(name)) for name in names)

        store.subscribe(note)

    # On the publishing thread

    def _changed(self) -> list[object]:
        """The changes of tiers since the last call, as events. Blocks whose tokens are no longer known are left out."""
        changes = [self._changes.popleft() for _ in range(len(self._changes))]
        events: list[object] = []
        for (place, stored), some in groupby(changes, key=lambda one: one[:2]):
            keys = [one.key for one in some]
            if stored:
                events += [self._described(run, place) for run in self._runs(keys)]
            else:
                events.append(BlockRemoved(keys, *place))
        return events

    def _runs(self, keys: Sequence[bytes]) -> list[BlocksStored]:
        """Consecutive runs of the blocks whose tokens are known."""
        # The engine's thread adds blocks meanwhile, for which others go: each is looked at once.
        found = [(key, block) for key in keys if (block := self._known.get(key)) is not None]
        runs: list[list[tuple[bytes, _KnownBlock]]] = []
        for key, block in found:
            if runs and runs[-1][-1][0] == block.parent and block.salt is None:
                runs[-1].append((key, block))
            else:
                runs.append([(key, block)])
        return [
            BlocksStored(
                run[0][1].parent,
                tuple(key for key, _ in run),
                [token for _, block in run for token in block.tokens],
                run[0][1].salt,
            )
            for run in runs
        ]

    def _run(self) -> None:
        number = 0
        while True:
            if time.monotonic() >= self._replays_from:
                self._answer_requests()
            events: list[object] | None = []
            with contextlib.suppress(queue.Empty):
                events = self._messages.get(timeout=_POLL_SECONDS)
            if events is None:
                return
            # The device's events first: subscribers then know the blocks of the tiers' events.
            for some in (events, self._changed()):
                if some:
                    number += self._lost_since()
                    self._publish(number, encode_batch(time.time(), some))
                    number += 1

    def _lost_since(self) -> int:
        lost, self._lost = self._lost, 0
        return lost

    def _publish(self, number: int, payload: bytes) -> None:
        self._pub.send_multipart((b"", encode_number(number), payload))
        self._log.append(number, payload)

    def _answer_requests(self) -> None:
        """Answer some of the requests for replays; the others wait in their sockets' queues."""
        for _ in range(_REPLAYS):
            if not self._router.poll(0):
                return
            self._replay(self._router.recv_multipart())
            self._replays_from = time.monotonic() + _REPLAY_PAUSE_SECONDS

    def _replay(self, frames: list[bytes]) -> None:
        start = decode_number(frames[2]) if len(frames) == 3 else None
        if start is None:
            logger.warning("ignored a malformed request for a replay of KV events")
            return
        peer = frames[0]
        for number, payload in self._log.since(start):
            self._router.send_multipart((peer, b"", b"", encode_number(number), payload))
        self._router.send_multipart((peer, b"", b"", REPLAY_END, b""))

    def close(self) -> None:
        """Publish queued events and end the thread."""
        self._messages.put(None)
        self._thread.join(2)
        self._close_sockets()

    def _close_sockets(self) -> None:
        self._pub.close(linger=200)
        self._router.close(linger=200)
        self._context.term()


def _place(url: str) -> PublisherPlace:
    parsed = parse(url)
    medium = HOST_MEDIUM if parsed.reach is Reach.PROCESS else STORAGE_MEDIUM
    return PublisherPlace(medium, parsed.reach.locality, parsed.label)


def _bind(socket: zmq.Socket[bytes], endpoint: str) -> str:
    """Listen, and return where. Raises ConfigError."""
    port = endpoint.rpartition(":")[2]
    if port.isdecimal() and int(port) > 65535:  # ZeroMQ would take the remainder
        raise ConfigError(f"cannot publish KV events on {endpoint}: there is no port {port} (--kv-events)")
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(f"cannot publish KV events on {endpoint}: {error.strerror} (--kv-events)") from error
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


def _replays_at(endpoint: str) -> str:
    """Where subscribers ask for missed events: at the next port (a free one after port 0), or beside the socket's path."""
    if endpoint.startswith("ipc:"):
        return f"{endpoint}.replay"
    head, _, port = endpoint.rpartition(":")
    if not port.isdigit():
        raise ConfigError(f"{endpoint!r} is not an address such as tcp://127.0.0.1:5557 (--kv-events)")
    return f"{head}:{int(port) + 1 if int(port) else 0}"
