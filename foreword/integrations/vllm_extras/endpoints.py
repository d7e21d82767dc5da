"""Endpoints of a vLLM worker: one for its own scheduler, if that is in another process, and one for other instances, with the
blocks that it keeps for those: the producer side of a hand-off.

A lease starts in the step that computes the end of a prompt, before vLLM's answer leaves. It ends when a reader has opened it
and no reader needs it any more (a reader says so, or its connection breaks), or when none has opened it in time.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from foreword.blocks.keys import FINGERPRINT_BYTES
from foreword.blocks.layout import Layout, block_names
from foreword.config import parse_bytes
from foreword.errors import StoreError
from foreword.integrations.vllm.connector_counts import HandoffCounts
from foreword.integrations.vllm.step_messages import BlockSave, LeaseRevocation
from foreword.integrations.vllm_extras.peer_ranks import NAMES_PREFIX, rank_address
from foreword.integrations.vllm_extras.producers import KVProducers, LeaseReader
from foreword.integrations.vllm_extras.step_parts import BlockLease
from foreword.offload.device import Event
from foreword.offload.slots import StagingSlots
from foreword.offload.staging import StagingArena
from foreword.store.background_jobs import BackgroundJobs
from foreword.store.base import Name, Store
from foreword.store.frame import HEADER_BYTES, seal
from foreword.store.memory.memory_store import MemoryStore
from foreword.store.wrappers import StoreWrapper
from foreword.transfer.frame_server import FrameServer, HeldBlock, found_in, num_frame_slots
from foreword.transfer.name_table import NameTable
from foreword.transfer.sockets import Address, parse_address
from foreword.transfer.transfer_endpoint import TransferEndpoint
from foreword.transfer.transfers import KVSource, TransferService, TransferSide
from foreword.transfer.wire_format import Buffer, Reason
from foreword.transfer_config import TransferConfig

_FOLDER_PREFIX = "foreword-vllm-"
_LONGEST_FOLDER = 80
# A folder younger than this may belong to a worker that is about to listen.
_STALE_SECONDS = 60.0
_MIN_FRAMES = 4
_ALL_INTERFACES = ("0.0.0.0", "::")
# Memory for copies of windows and recurrent states: at least this many bytes and this many blocks.
_COPIED_BYTES = 64 << 20
_COPIED_BLOCKS = 32
_COPY_SECONDS = 5.0


@dataclass(eq=False, slots=True)
class _Lease:
    """The leased blocks of one request.

    Attributes:
        until: when it ends if no reader has opened it (`time.monotonic()`); counts once vLLM has finished the request.
        readers: open transfers. `read`: there has been one.
        copying: blocks that are being copied; until then vLLM must not have them back.
        copied: blocks of windows or recurrent states were copied for it.
        computed: on accelerators, an event: its blocks are computed.
    """

    request_id: str
    id: bytes
    until: float
    blocks: dict[Name, HeldBlock] = field(default_factory=dict)
    readers: set[KVSource] = field(default_factory=set)
    read: bool = False
    finished: bool = False
    copying: int = 0
    copied: bool = False
    computed: Event | None = None

    def over(self, now: float) -> bool:
        unused = not self.readers and (self.read or now >= self.until)
        return self.finished and (unused or not (self.blocks or self.copied))


@dataclass(frozen=True, slots=True)
class _LeasedBlock(HeldBlock):
    lease: _Lease


class KVLeases(FrameServer):
    """All leases of one worker. The worker's thread adds, revokes and ends them; the endpoint's threads read.

    Blocks of windows and recurrent states are copied into a memory store of its own, where they stay until it is full.

    Args:
        seconds: how long a lease waits for its first reader.
    """

    def __init__(
        self, layouts: Sequence[Layout], staging: StagingArena, memory: Sequence[Store], seconds: float
    ) -> None:
        # Blocks of windows are longer than recurrent states, which may come first: slots that grow would drop these.
        size = max(_COPIED_BYTES, _COPIED_BLOCKS * staging.frame_bytes)
        self._copies = MemoryStore(size, label="leases", longest=staging.frame_bytes)
        super().__init__(layouts, staging, [self._copies, *memory])
        # Copies have slots of their own: the engine's thread must not wait for a slow reader.
        own = self._slots.take(max(staging.slots // 2, 1)) or [0]
        self._copy_slots, self._copy_batch = StagingSlots(own), len(own)
        self._batch = max(min(self._batch, staging.slots - len(own)), 1)
        self._copies_hang = False  # the last wait for room was in vain: the next copies do not wait again
        self._copier = BackgroundJobs("lease-copies", most=None)
        self._pending: Counter[Name] = Counter()  # blocks whose copies are queued, and not in their store yet
        self._fingerprints = [layout.fingerprint for layout in layouts]
        self._seconds = seconds
        self._changed = threading.Condition()
        self._leases: dict[str, _Lease] = {}
        self._by_id: dict[bytes, _Lease] = {}
        self._by_name: dict[Name, list[_Lease]] = {}
        self.counts = HandoffCounts()

    def counted(self) -> HandoffCounts:
        """Leases so far, and blocks that others have read from the device and from memory."""
        given = self.status()
        return replace(self.counts, lent_blocks=given.device, shared_blocks=given.memory)

    # On the worker's thread

    def add(self, new: BlockLease) -> None:
        """Keep blocks that were just computed."""
        for save in new.copied:
            self._copy(save)
        computed = self._staging.mark()
        with self._changed:
            lease = self._leases.get(new.request_id)
            if lease is None:
                lease = _Lease(new.request_id, new.lease, time.monotonic() + self._seconds)
                self._leases[new.request_id] = self._by_id[new.lease] = lease
                self.counts.leases += 1
            lease.computed = computed
            lease.copied |= bool(new.copied)
            for save in new.held:
                for name, parent, depth, block in self._named(save):
                    lease.blocks[name] = HeldBlock(0, block, self._header(name, parent, depth))
                    self._by_name.setdefault(name, []).append(lease)

    def _named(self, save: BlockSave) -> Iterator[tuple[Name, bytes, int, int]]:
        """Name, parent, depth and block id of each block."""
        parents = (save.parent, *save.keys[:-1])
        names = block_names(self._fingerprints[save.group], save.root, save.keys)
        for i, (name, parent, block) in enumerate(zip(names, parents, save.blocks, strict=True)):
            yield name, parent, save.depth + i, block

    def _copy(self, save: BlockSave) -> None:
        """Queue the copies of blocks that vLLM may change soon: on return later work may. Only where more is queued than there
        are slots does it wait for earlier copies. A block for which there is no room is missing for the readers."""
        named = list(self._named(save))
        until = time.monotonic() + (0.0 if self._copies_hang else _COPY_SECONDS)
        for low in range(0, len(named), self._copy_batch):
            some = named[low : low + self._copy_batch]
            slots = self._copy_slots.wait_for(len(some), until)
            self._copies_hang = slots is None
            if slots is None:
                return
            try:
                self._staging.gather([block for *_, block in some], slots, save.group)
            except BaseException:
                self._copy_slots.give(slots)
                raise
            with self._changed:
                self._pending.update(name for name, *_ in some)
            self._copier.submit(self._store, some, slots)

    def _store(self, named: Sequence[tuple[Name, bytes, int, int]], slots: Sequence[int]) -> None:
        """Store copies when they are there. On a thread that holds no lock while it waits for the device."""
        try:
            for (name, parent, depth, _), slot in zip(named, slots, strict=True):
                header = self._header(name, parent, depth)
                buffer = self._staging.buffer(slot)[: HEADER_BYTES + header.length]
                with contextlib.suppress(StoreError):
                    self._copies.put([seal(header, buffer)], deadline=time.monotonic() + _COPY_SECONDS)
        finally:
            self._copy_slots.give(slots)
            with self._changed:
                self._pending.subtract(name for name, *_ in named)
                self._pending = +self._pending
                self._changed.notify_all()

    def revoke(self, revoked: LeaseRevocation) -> None:
        """vLLM is about to reuse blocks. Once this returns, no reader reads them."""
        with self._changed:
            lease = self._leases.get(revoked.request_id)
            if lease is None:
                return
            lease.copied = False
            self._drop(lease, list(lease.blocks))
            self._changed.wait_for(lambda: not lease.copying)
            if revoked.ends:
                self._remove(lease)

    def drop_held(self) -> None:
        """The device is about to lose its contents. Once this returns, no reader reads them; copies are left."""
        with self._changed:
            for lease in self._leases.values():
                self._drop(lease, list(lease.blocks))
            self._changed.wait_for(
                lambda: not self._pending and not any(lease.copying for lease in self._leases.values())
            )

    def close(self) -> None:
        """End the copies."""
        self._copier.close(threading.TIMEOUT_MAX)

    def finished(self, request_ids: Iterable[str]) -> None:
        """Requests that vLLM has finished. It keeps their blocks until `take_ended` names them."""
        with self._changed:
            for request_id in request_ids:
                lease = self._leases.get(request_id)
                if lease is not None and not lease.finished:
                    lease.finished, lease.until = True, time.monotonic() + self._seconds

    def take_ended(self) -> set[str]:
        """Requests whose blocks vLLM gets back now. Readers of the other leases get a sign of life."""
        now = time.monotonic()
        with self._changed:
            ended = [lease for lease in self._leases.values() if lease.over(now)]
            for lease in ended:
                self._drop(lease, list(lease.blocks))
            ended = [lease for lease in ended if not lease.copying]
            for lease in ended:
                self.counts.leases_unread += not lease.read
                self._remove(lease)
            waiting = [
                one for lease in self._leases.values() if now < lease.until + self._seconds for one in lease.readers
            ]
        for reader in waiting:
            reader.keep_alive()
        return {lease.request_id for lease in ended}

    def _drop(self, lease: _Lease, names: Collection[Name]) -> None:
        for name in names:
            del lease.blocks[name]
            others = [one for one in self._by_name.pop(name) if one is not lease]
            if others:
                self._by_name[name] = others

    def _remove(self, lease: _Lease) -> None:
        del self._leases[lease.request_id], self._by_id[lease.id]

    # On the endpoint's threads

    def open(self, source: KVSource) -> None:
        """A reader opens the lease with the id `source.request`."""
        with self._changed:
            lease = self._by_id.get(source.request)
            if lease is not None:
                lease.readers.add(source)
                lease.read = True
                source.context = lease
        if lease is None:
            source.refuse(Reason.REQUEST, "there is no lease with this id: it has expired, or never was")
        else:
            source.accept()

    def close_reader(self, source: KVSource) -> None:
        """A reader needs nothing more, or has gone."""
        lease = source.context
        if lease is not None:
            with self._changed:
                lease.readers.discard(source)

    def _on_device(self, names: Sequence[Name]) -> int:
        known = (i for i, name in enumerate(names) if name not in self._by_name and name not in self._pending)
        return next(known, len(names))

    def _frames(self, names: Sequence[Name], slots: Sequence[int], deadline: float) -> list[Buffer | None]:
        """Frames of one batch, when the copies of its blocks that are queued are there."""
        seconds = min(max(deadline - time.monotonic(), 0.0), threading.TIMEOUT_MAX)
        with self._changed:
            self._changed.wait_for(lambda: self._pending.keys().isdisjoint(names), seconds)
        return super()._frames(names, slots, deadline)

    def _hold(self, wanted: Sequence[tuple[int, Name]], deadline: float) -> Sequence[HeldBlock]:
        held: list[_LeasedBlock] = []
        with self._changed:
            for number, name in wanted:
                leases = self._by_name.get(name)
                if leases:
                    one = leases[0].blocks[name]
                    leases[0].copying += 1
                    held.append(_LeasedBlock(number, one.block, one.header, leases[0]))
        try:
            for event in {id(one.lease.computed): one.lease.computed for one in held}.values():
                if event is not None:
                    event.synchronize()
        except BaseException:
            self._release_held(held)
            raise
        return held

    def _release_held(self, held: Sequence[HeldBlock]) -> None:
        with self._changed:
            for one in held:
                assert isinstance(one, _LeasedBlock)
                one.lease.copying -= 1
            self._changed.notify_all()


class _MemoryService(TransferService):
    """Answers lookups in this worker's memory tiers."""

    def __init__(self, layouts: Sequence[Layout], memory: Sequence[Store]) -> None:
        super().__init__()
        self._layouts = {layout.fingerprint for layout in layouts}
        self._memory = tuple(memory)

    def locate(self, names: Sequence[Name], deadline: float) -> int:
        own = bool(names) and names[0][:FINGERPRINT_BYTES] in self._layouts
        return found_in(self._memory, names, deadline) if own else 0


def share_names(store: Store) -> str:
    """Where other processes read the names of a memory tier's blocks; "" if they cannot."""
    while isinstance(store, StoreWrapper):
        store = store.inner
    with contextlib.suppress(OSError, AttributeError):  # a system without such memory
        table = NameTable()
        if isinstance(store, MemoryStore):
            store.share_names(table)
            return table.path
    return ""


class LookupEndpoint:
    """A Unix socket on which the scheduler asks what is in the worker's memory, and the tables in which it sees that without
    asking. Only this user may enter the folder."""

    def __init__(self, layouts: Sequence[Layout], memory: Sequence[Store], engine: str, rank: int) -> None:
        remove_stale_folders()
        word = "".join(letter for letter in engine if letter.isalnum())[:16]
        self.folder = _private_folder(f"{_FOLDER_PREFIX}{word}-{rank}-")
        config = TransferConfig(bind=f"unix:{self.folder}/socket", links=("tcp",), ring="64KiB")
        paths = [share_names(store) for store in memory]
        for number, path in enumerate(paths if all(paths) else ()):
            (self.folder / f"{NAMES_PREFIX}{number:03}").symlink_to(path)
        self._endpoint = TransferEndpoint(config, _MemoryService(layouts, memory))
        self.address = self._endpoint.listen()

    def close(self) -> None:
        self._endpoint.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class _KVService(TransferService):
    """Serves leases and memory tiers to other instances, and passes producers' answers to the readers of their leases."""

    def __init__(self, layout: Layout, leases: KVLeases | None) -> None:
        super().__init__(layout)
        self._leases = leases

    def pull_requested(self, source: KVSource) -> None:
        if self._leases is None:
            super().pull_requested(source)
        else:
            self._leases.open(source)

    def accepted(self, transfer: TransferSide) -> None:
        if isinstance(transfer.context, LeaseReader):
            transfer.context.answer(True)

    def ended(self, transfer: TransferSide) -> None:
        if isinstance(transfer.context, LeaseReader):
            transfer.context.answer(False)
        elif isinstance(transfer, KVSource) and self._leases is not None:
            self._leases.close_reader(transfer)

    def locate(self, names: Sequence[bytes], deadline: float) -> int:
        return 0 if self._leases is None else self._leases.locate(names, deadline)

    def get(self, names: Sequence[bytes], longest: int, deadline: float) -> Iterator[Sequence[Buffer | None]]:
        return iter(()) if self._leases is None else self._leases.get(names, longest, deadline)


class InstanceConnections:
    """A worker's connections with other instances.

    Args:
        config: of this rank (`rank_config`).
        layouts, tensors: of each KV group: the layout of its blocks, and vLLM's KV cache by block.
        listens: whether other instances may connect; if not, this one only connects to them.
        producers: label of the tier that reads from producers.

    Attributes:
        leases: what others may read; None if it does not listen.
        producers: what is read from others.
        address: where others reach it; "" if it does not listen.
    """

    def __init__(
        self,
        config: TransferConfig,
        layouts: Sequence[Layout],
        tensors: Sequence[Sequence[torch.Tensor]],
        memory: Sequence[Store],
        *,
        listens: bool,
        producers: str,
        num_blocks: int,
    ) -> None:
        self.leases: KVLeases | None = None
        if listens:
            slots = num_frame_slots(max(layout.block_bytes for layout in layouts))
            staging = StagingArena(tensors, min(slots, max(2 * num_blocks, _MIN_FRAMES)))
            self.leases = KVLeases(layouts, staging, memory, config.lease_seconds)
        self._endpoint = TransferEndpoint(config, _KVService(layouts[0], self.leases))
        self.producers = KVProducers(self._endpoint, layouts[0].shard[0], producers)
        self.address = ""
        if listens:
            self.address = self._endpoint.address = _reachable(self._endpoint.listen())

    def close(self) -> None:
        self.producers.close()
        self._endpoint.close()
        if self.leases is not None:
            self.leases.close()


def rank_config(config: TransferConfig, shard: tuple[int, int], block_bytes: int) -> TransferConfig:
    """The configuration of one rank: its own address, and rings that hold a few of its frames. Raises ConfigError."""
    rank, ranks = shard
    frames = _MIN_FRAMES * (block_bytes + HEADER_BYTES)
    ring = max(parse_bytes(config.ring), frames)
    advertise = config.advertise and rank_address(config.advertise, rank, ranks)
    return replace(config, bind=rank_address(config.bind, rank, ranks), advertise=advertise, ring=str(ring))


def _reachable(bound: str) -> str:
    """The address for others: where all interfaces are bound, this host's as vLLM knows it."""
    place = parse_address(bound)
    if place.path or place.host not in _ALL_INTERFACES:
        return bound
    from vllm.utils.network_utils import get_ip

    return str(Address(get_ip(), place.port))


def _private_folder(prefix: str) -> Path:
    """A new folder with mode 0700. The path of a socket is limited to about a hundred bytes."""
    folder = tempfile.mkdtemp(prefix=prefix)
    if len(os.fsencode(folder)) > _LONGEST_FOLDER:
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix=prefix, dir="/tmp")
    return Path(folder)


def remove_stale_folders() -> None:
    """Remove the folders of this user's killed workers, on whose sockets no process listens."""
    for parent in {Path(tempfile.gettempdir()), Path("/tmp")}:
        for folder in parent.glob(f"{_FOLDER_PREFIX}*"):
            with contextlib.suppress(OSError):
                found = folder.lstat()
                old = found.st_mtime < time.time() - _STALE_SECONDS
                if found.st_uid == os.getuid() and old and not _listens(folder / "socket"):
                    shutil.rmtree(folder, ignore_errors=True)


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True
    return True
