"""KV events of a replica, in vLLM's format, into the directory. Pure: whoever subscribes hands over what was received.

vLLM names blocks by hashes of its own. Its BlockStored carries token ids and the parent's hash, so Foreword's keys are
computed from these, and a bounded table remembers which hash is which key. What cannot be named (an unknown parent, an
adapter, an image) is skipped and counted: then the directory knows less, never something wrong.

Messages are numbered. After a gap the subscriber asks for what is missing (vLLM replays its last messages) and hands it over;
what nobody has any more costs all that is known of the replica, because removals may have been among it. There is no snapshot
for who comes late: the directory fills as blocks are stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from foreword.blocks.keys import KEY_BYTES, Scope, chain_keys
from foreword.errors import BadRequest
from foreword.routing.directory import Directory, Tier

MEDIA: Final[Mapping[str, Tier]] = {
    "GPU": Tier.DEVICE,
    "CPU": Tier.HOST,
    "STORAGE": Tier.DISK,
    "DISK": Tier.DISK,
    "SHARED": Tier.SHARED,
}
_HASH: Final = 8
_RECORD: Final = _HASH + KEY_BYTES
_WAYS: Final = 32
_MOST_ROOTS: Final = 1024
# vLLM before 0.11 sent events as lists.
_STORED_FIELDS: Final = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
)
_REMOVED_FIELDS: Final = ("block_hashes", "medium")


@dataclass(frozen=True, slots=True)
class Missing:
    """Messages from number `first` up to before number `end` were not received: ask for them, hand them over as `replayed`, and
    call `skip_to(end)` if they do not come."""

    first: int
    end: int


@dataclass(slots=True)
class FeedCounters:
    """Events since the start. `skipped` blocks could not be named, `malformed` events were not understood."""

    messages: int = 0
    stored_blocks: int = 0
    removed_blocks: int = 0
    skipped_blocks: int = 0
    malformed: int = 0
    gaps: int = 0
    clears: int = 0


class KeyTable:
    """Which of a replica's hashes is which key: at most `max_blocks` of them, of those that share a bucket the oldest
    forgotten first. About 60 bytes each."""

    def __init__(self, max_blocks: int) -> None:
        self._ways = min(_WAYS, max(max_blocks, 1))
        self._buckets: list[bytearray | None] = [None] * max(max_blocks // self._ways, 1)

    def put(self, name: bytes, key: bytes) -> None:
        number = self._number(name)
        bucket = self._buckets[number]
        if bucket is None:
            bucket = self._buckets[number] = bytearray()
        if self._find(bucket, name) >= 0:
            return
        if len(bucket) >= self._ways * _RECORD:
            del bucket[:_RECORD]
        bucket += name
        bucket += key

    def get(self, name: bytes) -> bytes | None:
        bucket = self._buckets[self._number(name)]
        at = -1 if bucket is None else self._find(bucket, name)
        return bytes(bucket[at + _HASH : at + _RECORD]) if bucket is not None and at >= 0 else None

    def clear(self) -> None:
        self._buckets = [None] * len(self._buckets)

    def _number(self, name: bytes) -> int:
        return int.from_bytes(name, "little") % len(self._buckets)

    @staticmethod
    def _find(bucket: bytearray, name: bytes) -> int:
        at = bucket.find(name)
        while at >= 0 and at % _RECORD:
            at = bucket.find(name, at + 1)
        return at


class Feed:
    """One replica's events.

    Args:
        replica: its name in the directory.
        model: fingerprint of the model in the router's keys; the same for all replicas that serve one model.
        block_size: tokens per block of the router's keys; events with another size are skipped.
        max_blocks: hashes remembered.
        counts_copies: the replica tells of every copy of a block, and of the removal of each, as vLLM does; Foreword's own
            engine tells of a removal only when no copy is left.
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
    ) -> None:
        self.replica = replica
        self.counters = FeedCounters()
        self._directory = directory
        self._model = model
        self._block_size = block_size
        self._counts_copies = counts_copies
        self._known = KeyTable(max_blocks)
        self._roots: dict[bytes, bytes] = {}
        self._next = 0
        self._last_live = -1

    def receive(self, number: int, events: Iterable[object], *, replayed: bool = False) -> Missing | None:
        """A message with its number. If messages before it are missing, nothing is done and the gap is returned.

        A number that came before means that the replica was restarted, unless it was replayed meanwhile."""
        if not replayed:
            if number <= self._last_live:
                self._restart()
            self._last_live = number
        if number < self._next:
            return None
        if number > self._next:
            self.counters.gaps += not replayed
            self._last_live = min(self._last_live, number - 1) if not replayed else self._last_live
            return Missing(self._next, number)
        self._next = number + 1
        self.counters.messages += 1
        for event in events:
            self.apply(event)
        return None

    def skip_to(self, number: int) -> None:
        """Nobody has the messages before this number: what was known of the replica counts no more."""
        if self._next:
            self._clear()
        self._next = max(self._next, number)

    def apply(self, event: object) -> None:
        """One event: a mapping with `type`, or a list that begins with it."""
        kind, fields = _read(event)
        try:
            if kind == "BlockStored":
                self._stored(fields)
            elif kind == "BlockRemoved":
                self._removed(fields)
            elif kind == "AllBlocksCleared":
                self._clear()
            else:
                self.counters.malformed += 1
        except (KeyError, TypeError, ValueError, OverflowError, BadRequest):
            self.counters.malformed += 1

    def _stored(self, fields: Mapping[str, Any]) -> None:
        names = [_name(one) for one in fields["block_hashes"]]
        tier = _tier(fields)
        parent = self._parent(fields)
        if tier is None or parent is None or fields["block_size"] != self._block_size:
            self.counters.skipped_blocks += len(names)
            return
        keys = chain_keys(parent, fields["token_ids"], self._block_size)
        if len(keys) != len(names):
            raise ValueError("as many hashes as blocks of tokens")
        for name, key in zip(names, keys, strict=True):
            self._known.put(name, key)
        self._directory.stored(self.replica, tier, parent, keys, counted=self._counts_copies)
        self.counters.stored_blocks += len(keys)

    def _removed(self, fields: Mapping[str, Any]) -> None:
        tier = _tier(fields)
        names = [_name(one) for one in fields["block_hashes"]]
        keys = [key for key in map(self._known.get, names) if key is not None]
        self.counters.skipped_blocks += len(names) - len(keys)
        if tier is not None:
            self._directory.removed(self.replica, tier, keys)
            self.counters.removed_blocks += len(keys)

    def _parent(self, fields: Mapping[str, Any]) -> bytes | None:
        """The key before an event's first block; None if it cannot be known."""
        extras = fields.get("extra_keys") or ()
        if fields.get("lora_id") is not None or fields.get("lora_name") is not None:
            return None
        parent = fields["parent_block_hash"]
        if parent is not None:
            return None if _named_extras(extras) else self._known.get(_name(parent))
        if _named_extras(extras[1:]):
            return None
        first = list(extras[0] or ()) if extras else []
        if len(first) > 1 or not all(isinstance(one, str) for one in first):
            return None
        return self._root(first[0].encode() if first else b"")

    def _root(self, salt: bytes) -> bytes:
        root = self._roots.get(salt)
        if root is None:
            if len(self._roots) >= _MOST_ROOTS:
                self._roots.clear()
            root = self._roots[salt] = Scope(self._model, self._block_size, salt).root()
        return root

    def _restart(self) -> None:
        self._clear()
        self._known.clear()
        self._next = 0

    def _clear(self) -> None:
        self._directory.cleared(self.replica)
        self.counters.clears += 1


def _read(event: object) -> tuple[str, Mapping[str, Any]]:
    if isinstance(event, Mapping):
        return str(event.get("type", "")), event
    if isinstance(event, Sequence) and not isinstance(event, str | bytes) and event:
        kind = str(event[0])
        fields = _STORED_FIELDS if kind == "BlockStored" else _REMOVED_FIELDS
        return kind, dict(zip(fields, event[1:], strict=False))
    return "", {}


def _name(found: object) -> bytes:
    """A hash of 64 bits (an integer), or the end of a longer one."""
    if isinstance(found, int) and not isinstance(found, bool):
        return (found & 0xFFFF_FFFF_FFFF_FFFF).to_bytes(_HASH, "big")
    if isinstance(found, bytes) and len(found) >= _HASH:
        return found[-_HASH:]
    raise ValueError("a block's hash is an integer or at least 8 bytes")


def _tier(fields: Mapping[str, Any]) -> Tier | None:
    """Where an event's blocks lie. Storage that is not the replica's own is what every replica can reach."""
    medium = fields.get("medium")
    tier = Tier.DEVICE if medium is None else MEDIA.get(str(medium).upper())
    return Tier.SHARED if tier == Tier.DISK and fields.get("locality") == "REMOTE" else tier


def _named_extras(extras: Sequence[object]) -> bool:
    """Whether a block's hash covers more than its tokens."""
    return any(extras)
