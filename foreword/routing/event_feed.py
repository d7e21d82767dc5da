"""Applies a replica's KV events to the directory. Pure: the subscriber passes in what it received.

vLLM names blocks by its own hashes. A BlockStored event carries the token ids and the parent's hash, so the feed computes
Foreword's keys from them, and a bounded table maps hashes to keys. Blocks that cannot be named (unknown parent, LoRA adapter,
image) are skipped and counted: then the directory knows less, but nothing wrong.

Messages are numbered. Before a message after a gap the subscriber asks for a replay of the missing ones and passes them in. If
they are not available any more, Foreword's servers send a snapshot, as the last message before those that they have, which
replaces what is known. vLLM's do not. Then everything known stays: a removal that was missed costs one request its hit, but a
forgotten start, which the replica has and does not report again, would hide all that follows it. Only a proof that the
replica has lost its blocks forgets them: it clears them, or counts its messages from the start.

Blocks with the salt PUBLIC in their extra keys are public: the directory learns their keys from the events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from foreword.blocks.keys import KEY_BYTES, Scope, chain_keys, is_public, parent_behind
from foreword.blocks.public_blocks import public_chain
from foreword.blocks.salt import PUBLIC, Salt
from foreword.errors import BadRequest
from foreword.kv_event_wire import DEVICE_MEDIUM, HOST_MEDIUM, REMOTE, STORAGE_MEDIUM, event_fields
from foreword.routing.directory import CacheTier, Directory, find_record

MEDIA: Final[Mapping[str, CacheTier]] = {
    DEVICE_MEDIUM: CacheTier.DEVICE,
    HOST_MEDIUM: CacheTier.HOST,
    STORAGE_MEDIUM: CacheTier.DISK,
    "DISK": CacheTier.DISK,
    "SHARED": CacheTier.SHARED,
}
_HASH_BYTES: Final = 8
_RECORD_BYTES: Final = _HASH_BYTES + KEY_BYTES
_WAYS: Final = 32


@dataclass(slots=True)
class FeedCounters:
    """Counts since the start. `skipped_blocks` could not be named, `malformed` events could not be parsed."""

    messages: int = 0
    stored_blocks: int = 0
    removed_blocks: int = 0
    skipped_blocks: int = 0
    malformed: int = 0
    gaps: int = 0
    clears: int = 0


class KeyTable:
    """Maps a replica's block hashes to keys: at most `max_blocks`, about 60 bytes each.

    A full bucket evicts its oldest entry.
    """

    def __init__(self, max_blocks: int) -> None:
        self._ways = min(_WAYS, max(max_blocks, 1))
        self._buckets: list[bytearray | None] = [None] * max(max_blocks // self._ways, 1)

    def put(self, block_hash: bytes, key: bytes) -> None:
        index = self._bucket_index(block_hash)
        bucket = self._buckets[index]
        if bucket is None:
            bucket = self._buckets[index] = bytearray()
        if find_record(bucket, block_hash, _RECORD_BYTES) >= 0:
            return
        if len(bucket) >= self._ways * _RECORD_BYTES:
            del bucket[:_RECORD_BYTES]
        bucket += block_hash
        bucket += key

    def get(self, block_hash: bytes) -> bytes | None:
        bucket = self._buckets[self._bucket_index(block_hash)]
        at = -1 if bucket is None else find_record(bucket, block_hash, _RECORD_BYTES)
        return bytes(bucket[at + _HASH_BYTES : at + _RECORD_BYTES]) if bucket is not None and at >= 0 else None

    def clear(self) -> None:
        self._buckets = [None] * len(self._buckets)

    def _bucket_index(self, block_hash: bytes) -> int:
        return int.from_bytes(block_hash, "little") % len(self._buckets)


class KvEventFeed:
    """The KV events of one replica.

    Args:
        replica: its name in the directory.
        model: fingerprint of the model in the router's keys; the same for all replicas of a model.
        block_size: tokens per block of the router's keys; events with another size are skipped.
        max_blocks: maximum number of known hashes.
        counts_copies: the replica reports every copy of a block and the removal of each, as vLLM does. Foreword's own engine
            reports a removal only when no copy is left.
        on_doubt: called with the replica's name, and whether it has lost its blocks. Otherwise messages were missed for good,
            or a clear was replayed: that may be older than what the replica was sent since.

    Attributes:
        next: number of the next message. A replay starts there.
    """

    def __init__(
        self,
        directory: Directory,
        replica: str,
        model: bytes,
        block_size: int,
        *,
        max_blocks: int = 1_000_000,
        counts_copies: bool = True,
        on_doubt: Callable[[str, bool], None] = lambda replica, lost: None,
    ) -> None:
        self.replica = replica
        self._on_doubt = on_doubt
        self.counters = FeedCounters()
        self._directory = directory
        self._model = model
        self._block_size = block_size
        self._counts_copies = counts_copies
        self._keys_by_hash = KeyTable(max_blocks)
        self.next = 0
        self._last_published = -1

    def published(self, number: int) -> bool:
        """Note the number of a published message. True if messages before it are missing.

        A number that is not above the last published one means that the replica restarted.
        """
        if number <= self._last_published:
            self._clear()
            self._keys_by_hash.clear()
            self.next = 0
        self._last_published = number
        self.counters.gaps += number > self.next
        return number > self.next

    def receive(self, number: int, events: Iterable[object], *, replayed: bool = False) -> None:
        """Apply a published or replayed message, once. If earlier messages are missing from a replay of a Foreword server, it
        is a snapshot."""
        if number < self.next:
            return
        if number > self.next > 0:
            if replayed and not self._counts_copies:
                self._directory.cleared(self.replica)
            self._on_doubt(self.replica, False)
        self.next = number + 1
        self.counters.messages += 1
        for event in events:
            self.apply(event, replayed=replayed)

    def apply(self, event: object, *, replayed: bool = False) -> None:
        """Apply one event."""
        kind, fields = event_fields(event)
        try:
            if kind == "BlockStored":
                self._stored(fields)
            elif kind == "BlockRemoved":
                self._removed(fields)
            elif kind == "AllBlocksCleared":
                self._clear(proven=not replayed)
            else:
                self.counters.malformed += 1
        except (KeyError, TypeError, ValueError, OverflowError, BadRequest):
            self.counters.malformed += 1

    def _stored(self, fields: Mapping[str, Any]) -> None:
        hashes = [_hash_bytes(one) for one in fields["block_hashes"]]
        tier = _tier(fields)
        parent = self._parent(fields)
        if tier is None or parent is None or fields["block_size"] != self._block_size:
            self.counters.skipped_blocks += len(hashes)
            return
        extras = fields.get("extra_keys") or ((),)
        if is_public(parent) and extras[0]:
            behind = parent_behind(parent, self._root(extras[0]))
            keys = chain_keys(behind, fields["token_ids"], self._block_size)
        elif is_public(parent) or parent == self._root([PUBLIC.text]):
            keys = public_chain(parent, fields["token_ids"], self._block_size)
            self._directory.public.add(keys)
        else:
            keys = chain_keys(parent, fields["token_ids"], self._block_size)
        if len(keys) != len(hashes):
            raise ValueError("the number of hashes differs from the number of blocks")
        for block_hash, key in zip(hashes, keys, strict=True):
            self._keys_by_hash.put(block_hash, key)
        self._directory.stored(self.replica, tier, parent, keys, counted=self._counts_copies)
        self.counters.stored_blocks += len(keys)

    def _removed(self, fields: Mapping[str, Any]) -> None:
        tier = _tier(fields)
        hashes = [_hash_bytes(one) for one in fields["block_hashes"]]
        keys = [key for key in map(self._keys_by_hash.get, hashes) if key is not None]
        self.counters.skipped_blocks += len(hashes) - len(keys)
        if tier is not None:
            self._directory.removed(self.replica, tier, keys)
            self.counters.removed_blocks += len(keys)

    def _parent(self, fields: Mapping[str, Any]) -> bytes | None:
        """The key before an event's first block, or None if it is unknown."""
        extras = fields.get("extra_keys") or ()
        if fields.get("lora_id") is not None or fields.get("lora_name") is not None:
            return None
        first = list(extras[0] or ()) if extras else []
        if any(extras[1:]) or len(first) > 1 or not all(isinstance(one, str) for one in first):
            return None
        if fields["parent_block_hash"] is None:
            return self._root(first)
        parent = self._keys_by_hash.get(_hash_bytes(fields["parent_block_hash"]))
        return None if parent is None or (first and not is_public(parent)) else parent

    def _root(self, extras: Sequence[str]) -> bytes:
        """The root key of a salt, given what extra keys say of it."""
        return Scope(self._model, self._block_size, Salt.parse(extras[0] if extras else None)).root()

    def _clear(self, *, proven: bool = True) -> None:
        self._directory.cleared(self.replica)
        self._on_doubt(self.replica, proven)
        self.counters.clears += 1


def _hash_bytes(found: object) -> bytes:
    """The last 64 bits of a hash, which is an integer or bytes."""
    if isinstance(found, int) and not isinstance(found, bool):
        return (found & 0xFFFF_FFFF_FFFF_FFFF).to_bytes(_HASH_BYTES, "big")
    if isinstance(found, bytes) and len(found) >= _HASH_BYTES:
        return found[-_HASH_BYTES:]
    raise ValueError("a block's hash is an integer or at least 8 bytes")


def _tier(fields: Mapping[str, Any]) -> CacheTier | None:
    """The tier of an event's blocks. Remote storage is shared by all replicas."""
    medium = fields.get("medium")
    tier = CacheTier.DEVICE if medium is None else MEDIA.get(str(medium).upper())
    return CacheTier.SHARED if tier == CacheTier.DISK and fields.get("locality") == REMOTE else tier
