"""Blocks that a vLLM worker keeps for other instances: the producer side of a hand-off, on the worker.

A lease starts in the step that computes the end of a prompt, before vLLM's answer leaves. It ends when a reader has opened it
and no reader needs it any more (a reader says so, or its connection breaks), or when none has opened it in time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from foreword.blocks.layout import FINGERPRINT_BYTES, Layout
from foreword.disaggregation.frame_server import FrameServer, HeldBlock
from foreword.integrations.vllm.step_messages import BlockLease, LeaseRevocation
from foreword.offload.staging import StagingArena
from foreword.store.base import Name, Store
from foreword.transfer.messages import Reason
from foreword.transfer.transfers import KVSource


@dataclass(eq=False, slots=True)
class _Lease:
    """The leased blocks of one request.

    Attributes:
        until: when it ends if no reader has opened it (`time.monotonic()`); counts once vLLM has finished the request.
        readers: open transfers. `read`: there has been one.
        copying: blocks that are being copied; until then vLLM must not have them back.
        computed: on accelerators, an event: its blocks are computed.
    """

    request_id: str
    id: bytes
    until: float
    blocks: dict[bytes, HeldBlock] = field(default_factory=dict)
    readers: set[KVSource] = field(default_factory=set)
    read: bool = False
    finished: bool = False
    copying: int = 0
    computed: Any = None

    def over(self, now: float) -> bool:
        unused = not self.readers and (self.read or now >= self.until)
        return self.finished and (unused or not self.blocks)


@dataclass(frozen=True, slots=True)
class _LeasedBlock(HeldBlock):
    lease: _Lease


class KVLeases(FrameServer):
    """All leases of one worker. The worker's thread adds, revokes and ends them; the endpoint's threads read.

    Args:
        seconds: how long a lease waits for its first reader.
    """

    def __init__(self, layout: Layout, staging: StagingArena, memory: Sequence[Store], seconds: float) -> None:
        super().__init__(layout, staging, memory)
        self._device = staging.device
        self._seconds = seconds
        self._changed = threading.Condition()
        self._leases: dict[str, _Lease] = {}
        self._by_id: dict[bytes, _Lease] = {}
        self._by_key: dict[bytes, list[_Lease]] = {}
        self.counts = {"leases": 0, "leases_unread": 0}

    # On the worker's thread

    def add(self, new: BlockLease) -> None:
        """Keep blocks that were just computed."""
        computed = _record_event(self._device)
        with self._changed:
            lease = self._leases.get(new.request_id)
            if lease is None:
                lease = _Lease(new.request_id, new.lease, time.monotonic() + self._seconds)
                self._leases[new.request_id] = self._by_id[new.lease] = lease
                self.counts["leases"] += 1
            lease.computed = computed
            parents = (new.parent, *new.keys[:-1])
            for i, (key, parent, block) in enumerate(zip(new.keys, parents, new.blocks, strict=True)):
                lease.blocks[key] = HeldBlock(0, block, self._header(key, parent, new.depth + i))
                self._by_key.setdefault(key, []).append(lease)

    def revoke(self, revoked: LeaseRevocation) -> None:
        """vLLM is about to reuse blocks. Once this returns, no reader reads them."""
        with self._changed:
            lease = self._leases.get(revoked.request_id)
            if lease is None:
                return
            end = revoked.blocks
            self._drop(lease, [key for key, one in lease.blocks.items() if end is None or one.header.depth < end])
            self._changed.wait_for(lambda: not lease.copying)
            if revoked.ends:
                self._remove(lease)

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

    def _drop(self, lease: _Lease, keys: Collection[bytes]) -> None:
        for key in keys:
            del lease.blocks[key]
            others = [one for one in self._by_key.pop(key) if one is not lease]
            if others:
                self._by_key[key] = others

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

    def _on_device(self, keys: Sequence[bytes]) -> int:
        return next((i for i, key in enumerate(keys) if key not in self._by_key), len(keys))

    def _hold(self, wanted: Sequence[tuple[int, Name]], deadline: float) -> Sequence[HeldBlock]:
        held: list[_LeasedBlock] = []
        with self._changed:
            for number, name in wanted:
                leases = self._by_key.get(name[FINGERPRINT_BYTES:])
                if leases:
                    one = leases[0].blocks[name[FINGERPRINT_BYTES:]]
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
