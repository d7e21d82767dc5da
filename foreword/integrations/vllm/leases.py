"""Blocks that a vLLM worker keeps for other instances: the producer side of a hand-off, on the worker.

A lease starts in the step that computes the end of a prompt, before vLLM's answer leaves. It ends when a reader has opened it
and no reader needs it any more (a reader says so, or its connection breaks), or when none has opened it in time.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from foreword.blocks.layout import Layout, block_names
from foreword.disaggregation.frame_server import FrameServer, HeldBlock
from foreword.errors import StoreError
from foreword.integrations.vllm.step_messages import BlockLease, BlockSave, LeaseRevocation
from foreword.offload.staging import StagingArena
from foreword.store.base import Name, Store
from foreword.store.frame import HEADER_BYTES, seal
from foreword.store.memory.memory_store import MemoryStore
from foreword.transfer.transfers import KVSource
from foreword.transfer.wire_format import Reason

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
    computed: Any = None

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
        self._copies = MemoryStore(max(_COPIED_BYTES, _COPIED_BLOCKS * staging.frame_bytes), label="leases")
        super().__init__(layouts, staging, [self._copies, *memory])
        # Copies have a slot of their own: the engine's thread must not wait for a slow reader.
        [self._copy_slot] = self._slots.take(1) or [0]
        self._batch = max(min(self._batch, staging.slots - 1), 1)
        self._fingerprints = [layout.fingerprint for layout in layouts]
        self._device = staging.device
        self._seconds = seconds
        self._changed = threading.Condition()
        self._leases: dict[str, _Lease] = {}
        self._by_id: dict[bytes, _Lease] = {}
        self._by_name: dict[Name, list[_Lease]] = {}
        self.counts = {"leases": 0, "leases_unread": 0}

    # On the worker's thread

    def add(self, new: BlockLease) -> None:
        """Keep blocks that were just computed."""
        for save in new.copied:
            self._copy(save)
        computed = _record_event(self._device)
        with self._changed:
            lease = self._leases.get(new.request_id)
            if lease is None:
                lease = _Lease(new.request_id, new.lease, time.monotonic() + self._seconds)
                self._leases[new.request_id] = self._by_id[new.lease] = lease
                self.counts["leases"] += 1
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
        """Copy blocks that vLLM may change soon. A block for which there is no room is missing for the readers."""
        for name, parent, depth, block in self._named(save):
            header = self._header(name, parent, depth)
            with self._copying, contextlib.suppress(StoreError):
                self._staging.gather([block], [self._copy_slot], save.group)
                buffer = self._staging.buffer(self._copy_slot)[: HEADER_BYTES + header.length]
                self._copies.put([seal(header, buffer)], deadline=time.monotonic() + _COPY_SECONDS)

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
            self._changed.wait_for(lambda: not any(lease.copying for lease in self._leases.values()))

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
                self.counts["leases_unread"] += not lease.read
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
        return next((i for i, name in enumerate(names) if name not in self._by_name), len(names))

    def _hold(self, wanted: Sequence[tuple[int, Name]], deadline: float) -> Sequence[HeldBlock]:
        held: list[_LeasedBlock] = []
        with self._changed:
            for number, name in wanted:
                leases = self._by_name.get(name)
                if leases:
                    one = leases[0].blocks[name]
                    leases[0].copying += 1
                    held.append(_LeasedBlock(number, one.block, one.header, leases[0]))
        for event in {id(one.lease.computed): one.lease.computed for one in held}.values():
            if event is not None:  # pragma: no cover - needs a GPU
                event.synchronize()
        return held

    def _release_held(self, held: Sequence[HeldBlock]) -> None:
        with self._changed:
            for one in held:
                assert isinstance(one, _LeasedBlock)
                one.lease.copying -= 1
            self._changed.notify_all()


def _record_event(device: torch.device) -> Any:
    """An event behind all work queued on an accelerator; None on CPUs, which compute at once."""
    if device.type == "cpu":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # pragma: no cover - needs a GPU
    event.record()  # pragma: no cover - needs a GPU
    return event  # pragma: no cover - needs a GPU
