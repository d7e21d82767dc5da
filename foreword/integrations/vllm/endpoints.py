"""Endpoints of a vLLM worker: one for its own scheduler, if that is in another process, and one for other instances."""

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
from foreword.disaggregation.frame_server import found_in, num_frame_slots
from foreword.integrations.vllm.leases import KVLeases
from foreword.integrations.vllm.producers import KVProducers, LeaseReader
from foreword.integrations.vllm.rank_stores import rank_address
from foreword.offload.staging import StagingArena
from foreword.store.base import Name, Store
from foreword.store.frame import HEADER_BYTES
from foreword.transfer.sockets import Address, parse_address
from foreword.transfer.transfer_endpoint import TransferEndpoint
from foreword.transfer.transfers import KVSource, TransferService, TransferSide
from foreword.transfer.wire_format import Buffer

_FOLDER_PREFIX = "foreword-vllm-"
_LONGEST_FOLDER = 80
# A folder younger than this may belong to a worker that is about to listen.
_STALE_SECONDS = 60.0
_MIN_FRAMES = 4
_ALL_INTERFACES = ("0.0.0.0", "::")


class _MemoryService(TransferService):
    """Answers lookups in this worker's memory tiers."""

    def __init__(self, layouts: Sequence[Layout], memory: Sequence[Store]) -> None:
        super().__init__()
        self._layouts = {layout.fingerprint for layout in layouts}
        self._memory = tuple(memory)

    def locate(self, names: Sequence[Name], deadline: float) -> int:
        own = bool(names) and names[0][:FINGERPRINT_BYTES] in self._layouts
        return found_in(self._memory, names, deadline) if own else 0


class LookupEndpoint:
    """A Unix socket on which the scheduler asks what is in the worker's memory. Only this user may enter its folder."""

    def __init__(self, layouts: Sequence[Layout], memory: Sequence[Store], engine: str, rank: int) -> None:
        remove_stale_folders()
        word = "".join(letter for letter in engine if letter.isalnum())[:16]
        self._folder = _private_folder(f"{_FOLDER_PREFIX}{word}-{rank}-")
        config = TransferConfig(bind=f"unix:{self._folder}/socket", links=("tcp",), ring="64KiB", queue="64KiB")
        self._endpoint = TransferEndpoint(config, _MemoryService(layouts, memory))
        self.address = self._endpoint.listen()

    def close(self) -> None:
        self._endpoint.close()
        shutil.rmtree(self._folder, ignore_errors=True)


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


class InstanceEndpoint:
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
