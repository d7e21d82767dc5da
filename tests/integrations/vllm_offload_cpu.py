"""vLLM's own offloading on processors, which vLLM refuses: scheduler, managers and host memory are vLLM's, and only the copies
between the device and host memory are made here, as the device is host memory, too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CpuTieringSpec(TieringOffloadingSpec):  # type: ignore[misc]
    """vLLM's spec of several tiers, with `CpuCopies` for its worker."""

    _worker: CpuCopies | None

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = CpuCopies(kv_caches, region, self.blocks_per_chunk)
        return self._worker


class CpuCopies(OffloadingWorker):  # type: ignore[misc]
    """Copies blocks to and from rows of host memory, at once."""

    def __init__(self, kv_caches: Any, region: SharedOffloadRegion, per_chunk: int) -> None:
        self._region = region
        self._tensors = [one.tensor for one in kv_caches.tensors]
        self._refs = kv_caches.group_data_refs
        self._per_chunk = per_chunk
        self._rows = [region.create_next_worker_view(one.page_size_bytes * per_chunk) for one in kv_caches.tensors]
        self._ended: list[TransferResult] = []

    def _pairs(self, device: Any, host: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """A block's bytes on the device and in its row, for each tensor of its group."""
        start = row = 0
        for group, count in enumerate(device.group_sizes):
            offset = device.block_indices[group] % self._per_chunk
            for number, block in enumerate(device.block_ids[start : start + count].tolist(), offset):
                chunk = int(host.chunk_ids[row + number // self._per_chunk])
                for ref in self._refs[group]:
                    page = self._tensors[ref.tensor_idx].shape[1]
                    low = number % self._per_chunk * page
                    yield self._tensors[ref.tensor_idx][block], self._rows[ref.tensor_idx][chunk, low : low + page]
            start, row = start + count, row + -(-(offset + count) // self._per_chunk) * bool(count)

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for device, host in self._pairs(src_spec, dst_spec):
            host.copy_(device)
        self._ended.append(TransferResult(job_id, True))
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for device, host in self._pairs(dst_spec, src_spec):
            device.copy_(host)
        self._ended.append(TransferResult(job_id, True))
        return True

    def get_finished(self) -> list[TransferResult]:
        ended, self._ended = self._ended, []
        return ended

    def wait(self, job_ids: set[int]) -> None:
        """Every job has ended when it was asked for."""

    def shutdown(self) -> None:
        self._rows = []
        self._region.cleanup()  # which removes the file if this side has made it
