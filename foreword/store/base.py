"""The `Store` contract: what every backend that keeps KV blocks must do.

A store keeps two kinds of data:

- *Frames* (`store/frame.py`): encoded KV blocks, stored under a *name* of 64 bytes: layout fingerprint, root of the chain,
  block key (`blocks/layout.py`). A frame is immutable: putting it again has no effect. Losing it is a cache miss.
- *Records*: small values such as named prefixes and layout descriptions, stored under a record key such as
`prefixes/a/b`.

`foreword.conformance.StoreContract` tests this contract. A store does not verify the bytes that it returns:
`TieredStore` verifies every frame that it reads from any store.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from foreword.blocks.keys import FINGERPRINT_BYTES
from foreword.blocks.salt import DIGEST_BYTES
from foreword.errors import StoreConfigError, StoreError, StoreTimeout, StoreUnreadable
from foreword.store.frame import Frame, Header, UnreadBlock

Name = bytes

# Values that `Store.get` returns for a block that it did not read, in place of a length.
MISSING: Final = 0
BAD: Final = -1  # something is stored under the name, but it cannot be a frame: empty, too long, a pipe
FAILED: Final = -2  # the store could not tell in time: a node that does not answer, an error, the deadline
UNREADABLE: Final = -3  # the device or its permissions do not let this block be read, which may pass
FOREIGN: Final = -4  # not for this reader: signed with a key that it does not have, or of another codec or version
RECORD_BYTES: Final = 8 << 20
STEP_SECONDS: Final = 5.0  # within which a place answers a step of a long call, or counts as unreachable
_LISTED: Final = 1024
_RECORD_KEY: Final = re.compile(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*")
_OF_TENANT: Final = re.compile(rf"[^/]+/[^/]+/([0-9a-f]{{{2 * DIGEST_BYTES}}})/[^/]+")


class PartialListing(StoreUnreadable):
    """A listing of records that is not complete. `keys`: what was found."""

    def __init__(self, message: str, keys: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.keys = sorted(keys)


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """The metadata of one block in a store, as `scan` lists it.

    Attributes:
        parent: key of the previous block (the root key for the first block of a chain); b"" if the store does not know.
        depth: index of the block in its chain, from 0.
        size: bytes of the frame.
        stored_at, used_at: seconds since the epoch, 0.0 if the store does not know.
    """

    name: Name
    parent: bytes = b""
    depth: int = 0
    size: int = 0
    stored_at: float = 0.0
    used_at: float = 0.0
    hits: int = 0
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class Loan:
    """Frames where they lie in a store's memory: nothing is copied.

    Attributes:
        memory: slots of `stride` bytes each.
        slots, frames: the slot of each frame, and its bytes, which begin with the slot.
    """

    memory: memoryview | bytes = b""
    stride: int = 1
    slots: Sequence[int] = ()
    frames: Sequence[memoryview] = ()


@dataclass(slots=True, eq=False, weakref_slot=True)
class ReservedSlots:
    """Slots in a store's memory for new blocks, which the caller writes there, or has a device write there. No call
    finds the blocks before `Store.publish`, and nothing else uses the slots before that or `Store.abandon`.

    Attributes:
        memory: slots of `stride` bytes each.
        slots, lengths: the slot of each block that has one, and the bytes of its frame, which begin with the slot.
        positions: which of the given headers these are.
        present: how many of the other blocks are there already, or come twice.
        full: a block has found no slot, since all that could be evicted are pinned or in use.
        unread: `publish` takes parents and depths from the frames.
        busy: it is full, and slots are in use that others will give back.
        unused: gives the slots back when nothing refers to the reservation any more; dead when that has ended.
    """

    memory: memoryview | bytes = b""
    stride: int = 1
    slots: Sequence[int] = ()
    lengths: Sequence[int] = ()
    positions: Sequence[int] = ()
    present: int = 0
    full: bool = False
    unread: bool = False
    busy: bool = False
    unused: weakref.finalize[..., Any] | None = None

    def frames(self) -> list[memoryview]:
        """The place of each frame."""
        memory = memoryview(self.memory)
        pairs = zip(self.slots, self.lengths, strict=True)
        return [memory[slot * self.stride : slot * self.stride + length] for slot, length in pairs]


@dataclass(frozen=True, slots=True)
class StoreStatus:
    """How full a store is.

    Attributes:
        blocks: -1 if the store does not know without a scan.
        budget: 0 if the store has no limit of bytes itself.
        pin_budget: bytes that may be pinned; None without a limit.
        notes: further numbers, specific to the backend.
    """

    blocks: int = -1
    bytes: int = 0
    budget: int = 0
    pinned_bytes: int = 0
    evictions: int = 0
    notes: dict[str, int] = field(default_factory=dict)
    pin_budget: int | None = None


@dataclass(frozen=True, slots=True)
class Erased:
    """A step of an erasure: what was removed, or why something may be left.

    Attributes:
        removed: how many copies of blocks, or records, were there.
        place: a folder or a node; "" for the store as a whole.
        problem: why the place may still have some; None if it has none.
    """

    removed: int = 0
    place: str = ""
    problem: StoreError | None = None

    @classmethod
    def failed(cls, error: StoreError, place: str = "") -> Erased:
        return cls(0, place, copy_error(error))


class Store(Protocol):
    """A store of blocks and records. All methods are thread-safe.

    `deadline` is a time of `time.monotonic()`. A call that passes it raises `StoreTimeout`. Methods raise `StoreError`
    and no other exception.

    Attributes:
        label: name of the store in metrics and reports.
        blocking: whether calls wait for a device or a network. If not, they are made on the caller's thread.
        local: whether it is memory or a disk of this machine. A lookup that takes long there usually waits for a processor.
        readers: number of threads that read a large batch faster than one thread does.
        authenticates: whether `get` has verified a signature of each frame that `frame.check` does not refuse.
        refusal: why it takes no blocks now, or evicts although its budget is not used up: StoreFull, StoreReadOnly. None if
            it takes them, or does not know.
        memory: where it lends and reserves slots, for as long as it is open; None: it does not. `slot_bytes`: of a slot, the
            `stride` of what it lends and reserves now; 0: it has none yet.
        on_evicted: if set, called with the name of each block that the store itself evicts to make room. It may be
            called under the store's lock, so it must be quick, and it must not raise.
    """

    label: str
    blocking: bool = True
    local: bool = False
    readers: int = 1
    authenticates: bool = False
    on_evicted: Callable[[Name], None] | None = None

    @property
    def refusal(self) -> StoreError | None:
        return None

    @property
    def memory(self) -> memoryview | None:
        return None

    @property
    def slot_bytes(self) -> int:
        return 0

    @property
    def pin_epoch(self) -> int:
        """The epoch of pins: another number each time that pins may have been lost, and be set again from what says that
        blocks are kept. 0 from a store that loses none. Never blocks for long and never raises."""
        return 0

    def lookup(self, names: Sequence[Name], *, deadline: float) -> int:
        """Count how many of `names` are present, from the first up to the first that is missing. Not a use for LRU.

        At the deadline the call returns the prefix that it has proven until then. It raises only if it has proven nothing.
        """
        ...

    def present(self, names: Sequence[Name], *, deadline: float) -> list[bool]:
        """Tell which of `names` are present, each by itself. Not a use for LRU."""
        return [self.lookup([name], deadline=deadline) == 1 for name in names]

    def known(self, names: Sequence[Name]) -> Sequence[bool | None]:
        """Tell of each name whether the block is present, as far as the store knows without a call that may wait: no I/O, no
        lock that is held during I/O. None: not known. What it says is a hint, as the result of `lookup` is: a block that
        another process has just removed may count as present. A block that is present never counts as absent."""
        return [None] * len(names)

    def note_chain(self, before: Sequence[Name], names: Sequence[Name]) -> None:
        """Tell the store which blocks come before those of the next lookup in their chain.

        A store that keeps several blocks of a chain together may need this to find them. It does no I/O and never raises.
        """
        return

    def get(self, names: Sequence[Name], buffers: Sequence[memoryview], *, deadline: float) -> list[int]:
        """Read each frame into its buffer (writable, contiguous, at least as long as the frame), such as a slot that another
        store has reserved. No byte outside of the buffers is written.

        Returns, for each name, the length of the frame, or MISSING, BAD, FAILED, UNREADABLE or FOREIGN. Only what is BAD, or
        fails verification, may be deleted. The bytes are not verified. At the deadline the call returns what it has read until
        then. It raises only if it has read nothing and failed as a whole.
        """
        ...

    def lend(self, names: Sequence[Name], *, deadline: float) -> AbstractContextManager[Loan]:
        """The frames of these names, empty where there is none. They stay as they are until the context ends, and count as
        read. None at all from a store that does not keep frames in the memory of this process as `get` returns them."""
        return contextlib.nullcontext(Loan())

    def reserve(
        self, headers: Sequence[Header] | Sequence[UnreadBlock], *, unread: bool = False, deadline: float
    ) -> ReservedSlots:
        """Take slots for blocks, in chain order, that the store does not have, and evict others for them as `put` does.

        `unread`: the frames are there already, in another store, which reads them into the slots: `headers` has guesses of
        parents and depths (`UnreadBlock`), and `publish` takes those in the frames. It ends at the first block that gets no
        slot: later ones are not read, and would evict others for nothing.

        A slot counts in the store's budget, and in its tenant's. It is neither evicted nor lent until the reservation ends: by
        `publish`, by `abandon`, or when nothing refers to it any more. A block that is deleted or erased before does not
        appear. No slots at all from a store that does not keep frames in the memory of this process as `get` returns them.
        """
        return ReservedSlots()

    def publish(self, reserved: ReservedSlots, chosen: Collection[int] | None = None) -> int:
        """The frames are in their slots, whole and sealed: from now on the blocks are found. Returns how many are.

        `chosen`: indexes of those that are; None: all. The slots of the others are given back. Does not wait. A reservation
        that has ended publishes nothing.
        """
        return 0

    def abandon(self, reserved: ReservedSlots) -> None:
        """Give the slots back: nothing writes into them any more. Never raises, also after `close`."""
        return

    def put(self, frames: Sequence[Frame], *, deadline: float) -> int:
        """Store frames, in chain order, and return how many of them are present now. A frame already present stays as it is.

        The caller may reuse the buffers after the call. A store with a budget evicts the least recently used chains
        first, and within a chain the deepest blocks.
        """
        ...

    def delete(self, names: Sequence[Name], *, deadline: float) -> int:
        """Delete blocks, pinned ones too. Returns how many were present."""
        ...

    def pin(self, names: Sequence[Name], *, pinned: bool = True, deadline: float) -> int:
        """Protect blocks from eviction, within the store's budget for pins, or end the protection.

        Returns how many of the blocks have the wanted state now.
        """
        ...

    def scan(self, *, deadline: float) -> Iterator[StoredBlock]:
        """List all blocks, in no order. Blocks that are added or removed during the scan may be missed."""
        ...

    def list_names(self, layout: bytes = b"", root: bytes = b"", *, deadline: float) -> Iterator[Sequence[Name]]:
        """List the names of all blocks with this layout and roots that begin with these bytes (b"": any), in batches and in no
        order.

        The listing does not rely on an index. A block may be listed twice, and blocks that are added meanwhile may be missed.
        Deleting blocks of a batch does not hide blocks of the next one.
        """
        names = (block.name for block in self.scan(deadline=deadline) if has_prefix(block.name, layout, root))
        while batch := list(itertools.islice(names, _LISTED)):
            yield batch

    def erase_steps(
        self, layout: bytes = b"", root: bytes = b"", *, chosen: Collection[Name] | None = None, deadline: float
    ) -> Iterator[Erased]:
        """Delete the blocks that `list_names` lists, or those of them that are chosen, pinned ones too.

        Yields a step after each batch, and one for each place that fails: the others are erased all the same. Does not raise.
        It may be repeated after a failure and then continues. Blocks that are added meanwhile may stay.
        """
        try:
            for batch in self.list_names(layout, root, deadline=deadline):
                names = batch if chosen is None else [name for name in batch if name in chosen]
                yield Erased(self.delete(names, deadline=step_deadline(deadline)) if names else 0)
        except StoreError as error:
            yield Erased.failed(error)

    def sync_deletions(
        self, prefixes: Sequence[tuple[bytes, bytes]], *, records: bool = False, deadline: float
    ) -> Iterator[None]:
        """Make what was deleted with these layouts and roots that begin so, and records of these tenants, stay deleted after a
        loss of power, in steps. Raises StoreError. Only a disk store does it."""
        return iter(())

    def erase(self, layout: bytes = b"", root: bytes = b"", *, deadline: float) -> int:
        """Delete blocks as `erase_steps` does. Returns how many were there. Raises StoreError if some may be left."""
        steps = list(self.erase_steps(layout, root, deadline=deadline))
        problem = next((one.problem for one in steps if one.problem is not None), None)
        if problem is not None:
            raise problem
        return sum(one.removed for one in steps)

    def put_record(self, key: str, data: bytes, *, deadline: float) -> None:
        """Store a record of up to 8 MiB, replacing the previous one. A key is parts of `[A-Za-z0-9._-]` joined by `/`."""
        ...

    def get_record(self, key: str, *, deadline: float) -> bytes | None: ...

    def add_record(self, key: str, data: bytes, *, deadline: float) -> bytes:
        """Store a record unless there is one. Returns the one that is there.

        A store that several processes write to returns the same to all of them, also at once.
        """
        found = self.get_record(key, deadline=deadline)
        if found is None:
            self.put_record(key, data, deadline=deadline)
        return data if found is None else found

    def delete_record(self, key: str, *, deadline: float) -> bool: ...

    def records(self, prefix: str, *, deadline: float) -> list[str]:
        """List the record keys that start with `prefix`, sorted. Raises PartialListing with those that were found if a place
        could not be read."""
        ...

    def status(self) -> StoreStatus:
        """Report how full the store is. Never blocks for long and never raises."""
        ...

    def close(self) -> None:
        """Flush and release all resources. Later calls raise `StoreUnavailable`."""
        ...


def has_prefix(name: Name, layout: bytes, root: bytes) -> bool:
    """Whether a block has this layout and a root that begins with these bytes; b"" stands for any."""
    return name.startswith(layout) and name.startswith(root, FINGERPRINT_BYTES)


def step_deadline(deadline: float) -> float:
    """The deadline of one step of a long call. A place that does not answer a step does not answer at all."""
    return min(deadline, time.monotonic() + STEP_SECONDS)


def time_left(deadline: float) -> float:
    """Seconds until the deadline, more than 0. Raises StoreTimeout."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise StoreTimeout("the deadline passed")
    return left


def copy_error(error: StoreError) -> StoreError:
    """An equal exception, to raise in place of one that was kept: an exception refers to all frames that it has passed.

    If these refer to the exception, their buffers and streams live until the next garbage collection.
    """
    return type(error)(error.message)


def check_record_key(key: str) -> str:
    """Return `key` if it is a valid record key. Raises StoreConfigError."""
    if not _RECORD_KEY.fullmatch(key):
        raise StoreConfigError(f"a record key has parts of letters, digits and ._- joined by slashes, unlike {key!r}")
    return key


def record_tenant(key: str) -> str:
    """The digest of the tenant that a record belongs to, "" if it belongs to none: the third of four parts of its key.

    So a record of any kind is encrypted with its tenant's data key, and is erased with the tenant.
    """
    found = _OF_TENANT.fullmatch(key)
    return found[1] if found is not None else ""


def check_record(data: bytes) -> bytes:
    """Return `data` if it is small enough for a record. Raises StoreError."""
    if len(data) > RECORD_BYTES:
        raise StoreError(f"a record has at most {RECORD_BYTES} bytes, not {len(data)}")
    return data


def quota_of(quota: float | None, size: int) -> int:
    """Bytes that a tenant may have in a store of `size` bytes: all (None), a share (a float), or a number of bytes (an int).

    Raises StoreConfigError.
    """
    if quota is None:
        return size
    amount = int(quota * size) if isinstance(quota, float) else quota
    if not 0 < amount <= size:
        raise StoreConfigError(f"tenant_quota is from 1 byte to the size of the store, not {amount} bytes")
    return amount
