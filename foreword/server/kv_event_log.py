"""Published KV events for late subscribers: the last messages, and a snapshot of what older ones have left.

A message that is too old to be kept is folded into the snapshot: the blocks that it stored are added, those that it removed are
dropped. A subscriber that asks for messages that are gone gets the snapshot as one message, with the number of the last of
them, and then the messages that are kept.
"""

from __future__ import annotations

import time
from array import array
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

import msgspec

from foreword.routing.kv_event_wire import BlockRemoved, BlockStored, encode_batch

_KEPT_MESSAGES: Final = 10_000
# Limit for the memory of all kept messages, about 5 bytes per token id.
_KEPT_BYTES: Final = 64 << 20
# Of the snapshot, each place of a block counted: about 450 bytes per block of 16 tokens.
_SNAPSHOT_BLOCKS: Final = 1 << 16

_decode = msgspec.msgpack.Decoder(tuple[float, list[BlockStored | BlockRemoved], int]).decode
_Place = tuple[str | None, str | None, str | None]


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
            for event in _decode(oldest)[1]:
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
                if run is None or block.parent != run.block_hashes[-1]:
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
