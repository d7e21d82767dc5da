"""The doors of a worker of vLLM: one for its own scheduler, where that is another process, and one for other instances."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from foreword.blocks.layout import FINGERPRINT_BYTES, Layout
from foreword.config import TransferConfig, parse_bytes
from foreword.disaggregation.frames import found_in, num_frame_slots
from foreword.integrations.vllm.leases import Leases
from foreword.integrations.vllm.peers import at_rank
from foreword.integrations.vllm.producers import Lenders, Loan
from foreword.integrations.vllm.step_messages import WorkerAddress
from foreword.offload.staging import StagingArena
from foreword.store.base import Name, Store
from foreword.store.frame import HEADER_BYTES
from foreword.transfer.endpoint import TransferEndpoint
from foreword.transfer.messages import Buffer
from foreword.transfer.service import TransferService
from foreword.transfer.sockets import Address, parse_address
from foreword.transfer.transfers import KVSource, TransferSide

_PREFIX = "foreword-vllm-"
_LONGEST_FOLDER = 80
# A folder younger than this may belong to a worker that is about to listen.
_STALE_SECONDS = 60.0
_FEWEST_FRAMES = 4
_EVERYWHERE = ("0.0.0.0", "::")


class _Memory(TransferService):
    """Says what this worker's memory tiers have."""

    def __init__(self, layout: Layout, memory: Sequence[Store]) -> None:
        super().__init__()
        self._fingerprint = layout.fingerprint
        self._memory = tuple(memory)

    def locate(self, names: Sequence[Name], deadline: float) -> int:
        mine = bool(names) and names[0][:FINGERPRINT_BYTES] == self._fingerprint
        return found_in(self._memory, names, deadline) if mine else 0


class SchedulersDoor:
    """A Unix socket in a folder that only this user may enter, at which the scheduler asks what is in memory."""

    def __init__(self, layout: Layout, memory: Sequence[Store], engine: str, rank: int) -> None:
        remove_stale()
        word = "".join(letter for letter in engine if letter.isalnum())[:16]
        self._folder = _private_folder(f"{_PREFIX}{word}-{rank}-")
        config = TransferConfig(bind=f"unix:{self._folder}/socket", links=("tcp",), ring="64KiB", queue="64KiB")
        self._endpoint = TransferEndpoint(config, _Memory(layout, memory))
        self.address = self._endpoint.listen()

    def close(self) -> None:
        self._endpoint.close()
        shutil.rmtree(self._folder, ignore_errors=True)


class _Service(TransferService):
    """Gives blocks, keeps leases, and passes on to loans how their lenders answer."""

    def __init__(self, layout: Layout, leases: Leases | None) -> None:
        super().__init__(layout)
        self._leases = leases

    def pull_requested(self, source: KVSource) -> None:
        if self._leases is None:
            super().pull_requested(source)
        else:
            self._leases.begin(source)

    def accepted(self, transfer: TransferSide) -> None:
        if isinstance(transfer.context, Loan):
            transfer.context.answer(True)

    def ended(self, transfer: TransferSide) -> None:
        if isinstance(transfer.context, Loan):
            transfer.context.answer(False)
        elif isinstance(transfer, KVSource) and self._leases is not None:
            self._leases.end(transfer)

    def locate(self, names: Sequence[bytes], deadline: float) -> int:
        return 0 if self._leases is None else self._leases.locate(names, deadline)

    def get(self, names: Sequence[bytes], longest: int, deadline: float) -> Iterator[Sequence[Buffer | None]]:
        return iter(()) if self._leases is None else self._leases.get(names, longest, deadline)


class PeersDoor:
    """Where a worker meets other instances.

    Args:
        config: as configured for the whole instance (`for_rank` makes it the rank's).
        tensors: vLLM's, by block.
        listens: whether others may come; if not, this one only goes to them.

    Attributes:
        leases: what others may read; None if nobody may come.
        lenders: what is read from others.
        address: under which others reach it; "" if they cannot.
    """

    def __init__(
        self,
        config: TransferConfig,
        layout: Layout,
        tensors: Sequence[torch.Tensor],
        memory: Sequence[Store],
        *,
        listens: bool,
        lenders: str,
    ) -> None:
        rank = layout.shard[0]
        self.leases: Leases | None = None
        if listens:
            staging = StagingArena(tensors, min(num_frame_slots(layout), max(2 * len(tensors[0]), _FEWEST_FRAMES)))
            self.leases = Leases(layout, staging, memory, config.lease_seconds)
        self._endpoint = TransferEndpoint(config, _Service(layout, self.leases))
        self.lenders = Lenders(self._endpoint, rank, lenders)
        self.address = ""
        if listens:
            self.address = self._endpoint.address = _reachable(self._endpoint.listen())

    def close(self) -> None:
        self.lenders.close()
        self._endpoint.close()


def for_rank(config: TransferConfig, layout: Layout) -> TransferConfig:
    """A rank's own address, and rings that a few of its frames fit into. Raises ConfigError."""
    rank, ranks = layout.shard
    frames = _FEWEST_FRAMES * (layout.block_bytes + HEADER_BYTES)
    ring = max(parse_bytes(config.ring), frames)
    advertise = config.advertise and at_rank(config.advertise, rank, ranks)
    return replace(config, bind=at_rank(config.bind, rank, ranks), advertise=advertise, ring=str(ring))


def address_of(scheduler: SchedulersDoor | None, peers: PeersDoor | None) -> WorkerAddress:
    return WorkerAddress(scheduler.address if scheduler else "", peers.address if peers else "")


def _reachable(bound: str) -> str:
    """An address that others can use, where all interfaces were bound: that of this host as vLLM knows it."""
    place = parse_address(bound)
    if place.path or place.host not in _EVERYWHERE:
        return bound
    from vllm.utils.network_utils import get_ip

    return str(Address(get_ip(), place.port))


def _private_folder(prefix: str) -> Path:
    """A new folder, mode 0700. The path of a socket has room for about a hundred bytes."""
    folder = tempfile.mkdtemp(prefix=prefix)
    if len(os.fsencode(folder)) > _LONGEST_FOLDER:
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix=prefix, dir="/tmp")
    return Path(folder)


def remove_stale() -> None:
    """Folders that killed workers of this user have left behind: nobody listens there."""
    for parent in {Path(tempfile.gettempdir()), Path("/tmp")}:
        for folder in parent.glob(f"{_PREFIX}*"):
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
