"""What a worker of vLLM gives to other instances: its memory tiers, and blocks that are kept for whoever decodes.

A lease begins in the step that computes the end of a prompt, before vLLM's answer leaves. It ends when somebody has asked for
it and nobody needs it any more (a transfer per reader says so, and ends if the reader dies), or when nobody has come in time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from foreword.blocks.layout import FINGERPRINT_BYTES, Layout
from foreword.disaggregation.frames import FrameServer, HeldBlock
from foreword.integrations.vllm.step_messages import Lend, Withdraw
from foreword.offload.staging import StagingArena
from foreword.store.base import Name, Store
from foreword.transfer.messages import Reason
from foreword.transfer.transfers import KVSource


@dataclass(eq=False, slots=True)
class _Lease:
    """One request's blocks.

    Attributes:
        until: when it ends if nobody has come (`time.monotonic()`); counts once vLLM has finished the request.
        readers: transfers of those who read it; `read`: there was one.
        copying: blocks of it that are being copied; vLLM must not have them back before.
        mark: on accelerators, when its blocks are computed.
    """

    request_id: str
    number: bytes
    until: float
    blocks: dict[bytes, HeldBlock] = field(default_factory=dict)
    readers: set[KVSource] = field(default_factory=set)
    read: bool = False
    finished: bool = False
    copying: int = 0
    mark: Any = None

    def over(self, now: float) -> bool:
        unused = not self.readers and (self.read or now >= self.until)
        return self.finished and (unused or not self.blocks)


@dataclass(frozen=True, slots=True)
class _Lent(HeldBlock):
    lease: _Lease


class Leases(FrameServer):
    """See the module. The worker's thread lends, withdraws and collects; the endpoint's threads read.

    Args:
        seconds: how long a lease waits for somebody to come.
    """

    def __init__(self, layout: Layout, staging: StagingArena, memory: Sequence[Store], seconds: float) -> None:
        super().__init__(layout, staging, memory)
        self._device = staging.device
        self._seconds = seconds
        self._changed = threading.Condition()
        self._leases: dict[str, _Lease] = {}
        self._numbers: dict[bytes, _Lease] = {}
        self._of_key: dict[bytes, list[_Lease]] = {}
        self.counts = {"leases": 0, "leases_unread": 0}

    # The worker's thread

    def lend(self, lend: Lend) -> None:
        """Blocks that were just computed."""
        mark = _mark(self._device)
        with self._changed:
            lease = self._leases.get(lend.request_id)
            if lease is None:
                lease = _Lease(lend.request_id, lend.lease, time.monotonic() + self._seconds)
                self._leases[lend.request_id] = self._numbers[lend.lease] = lease
                self.counts["leases"] += 1
            lease.mark = mark
            parents = (lend.parent, *lend.keys[:-1])
            for i, (key, parent, block) in enumerate(zip(lend.keys, parents, lend.blocks, strict=True)):
                lease.blocks[key] = HeldBlock(0, block, self._header(key, parent, lend.depth + i))
                self._of_key.setdefault(key, []).append(lease)

    def withdraw(self, withdrawn: Withdraw) -> None:
        """vLLM is about to use the blocks for something else: when this returns, nobody reads them."""
        with self._changed:
            lease = self._leases.get(withdrawn.request_id)
            if lease is None:
                return
            low = withdrawn.blocks
            self._forget(lease, [key for key, one in lease.blocks.items() if low is None or one.header.depth < low])
            self._changed.wait_for(lambda: not lease.copying)
            if withdrawn.ends:
                self._end(lease)

    def finished(self, request_ids: Iterable[str]) -> None:
        """Requests that vLLM has ended; it leaves their blocks alone until `collect` names them."""
        with self._changed:
            for request_id in request_ids:
                lease = self._leases.get(request_id)
                if lease is not None and not lease.finished:
                    lease.finished, lease.until = True, time.monotonic() + self._seconds

    def collect(self) -> set[str]:
        """Requests whose blocks vLLM gets back now. Tells the readers of the others that this instance is well."""
        now = time.monotonic()
        with self._changed:
            ended = [lease for lease in self._leases.values() if lease.over(now)]
            for lease in ended:
                self._forget(lease, list(lease.blocks))
            ended = [lease for lease in ended if not lease.copying]
            for lease in ended:
                self.counts["leases_unread"] += not lease.read
                self._end(lease)
            waiting = [
                one for lease in self._leases.values() if now < lease.until + self._seconds for one in lease.readers
            ]
        for reader in waiting:
            reader.keep_alive()
        return {lease.request_id for lease in ended}

    def _forget(self, lease: _Lease, keys: Collection[bytes]) -> None:
        for key in keys:
            del lease.blocks[key]
            others = [one for one in self._of_key.pop(key) if one is not lease]
            if others:
                self._of_key[key] = others

    def _end(self, lease: _Lease) -> None:
        del self._leases[lease.request_id], self._numbers[lease.number]

    # The endpoint's threads

    def begin(self, source: KVSource) -> None:
        """Somebody wants to read the lease that is named `source.request`."""
        with self._changed:
            lease = self._numbers.get(source.request)
            if lease is not None:
                lease.readers.add(source)
                lease.read = True
                source.context = lease
        if lease is None:
            source.refuse(Reason.REQUEST, "nothing is kept under this name: its time has run out, or it never was")
        else:
            source.accept()

    def end(self, source: KVSource) -> None:
        """That reader needs nothing any more, or is gone."""
        lease = source.context
        if lease is not None:
            with self._changed:
                lease.readers.discard(source)

    def _on_device(self, keys: Sequence[bytes]) -> int:
        return next((i for i, key in enumerate(keys) if key not in self._of_key), len(keys))

    def _hold(self, wanted: Sequence[tuple[int, Name]], deadline: float) -> Sequence[HeldBlock]:
        held: list[_Lent] = []
        with self._changed:
            for number, name in wanted:
                leases = self._of_key.get(name[FINGERPRINT_BYTES:])
                if leases:
                    one = leases[0].blocks[name[FINGERPRINT_BYTES:]]
                    leases[0].copying += 1
                    held.append(_Lent(number, one.block, one.header, leases[0]))
        for mark in {id(one.lease.mark): one.lease.mark for one in held}.values():
            if mark is not None:  # pragma: no cover - needs a GPU
                mark.synchronize()
        return held

    def _release_held(self, held: Sequence[HeldBlock]) -> None:
        with self._changed:
            for one in held:
                assert isinstance(one, _Lent)
                one.lease.copying -= 1
            self._changed.notify_all()


def _mark(device: torch.device) -> Any:
    """Remembers what an accelerator has been told so far; None where everything is done at once."""
    if device.type == "cpu":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # pragma: no cover - needs a GPU
    event.record()  # pragma: no cover - needs a GPU
    return event  # pragma: no cover - needs a GPU
