"""The vLLM of the step `vllm` (gpu/vllm_steps.py): the referee's worker, which also compares the stored bytes with vLLM's.

Started by `foreword.referee.process.Worker`. `{"stored": true}` is answered with the number of saved and loaded blocks that
still lie in vLLM's KV cache, and how many of them the stores have with other bytes. What is compared was read from the device
by torch, not by the kernel that saves. vLLM computes some tokens a second time, in another batch, and may round otherwise:
these are not compared. They are the last token of a prompt that was loaded whole, and what follows a hit.
"""

import os
import time
from typing import Any

import torch

from foreword.referee.worker import VllmEngine, serve

_TEST_SECONDS = 30.0


class ComparedEngine(VllmEngine):
    """Remembers which block of vLLM's was saved under which name, and where blocks were loaded."""

    def __init__(self, job: dict[str, Any]) -> None:
        super().__init__(job)
        self._names: dict[int, bytes] = {}
        self._saved: set[bytes] = set()
        self._ends: set[bytes] = set()  # the last blocks of loads
        self._only_loaded = job["only_loaded"]  # the stores had blocks before this process
        self._cache = self._foreword()
        if self._cache is not None and job["load_all"]:
            self._cache.costs.prefill_rate = float  # all that is found is loaded, also where computing is faster
            self._save, self._hand_over = self._cache.save, self._cache.hand_over
            self._cache.save, self._cache.hand_over = self._note_save, self._note_load

    def _note_save(
        self, root: bytes, keys: Any, parent: bytes, depth: int, blocks: Any, group: int = 0, **more: Any
    ) -> int:
        done = int(self._save(root, keys, parent, depth, blocks, group, **more))
        for block, name in zip(blocks[:done], self._cache.units[group].names(root, keys)[:done], strict=True):
            # Of a block that is computed twice, the first is saved.
            if name in self._saved or self._only_loaded:
                self._names.pop(block, None)
            else:
                self._saved.add(name)
                self._names[block] = name
        return done

    def _note_load(self, *args: Any, **more: Any) -> Any:
        load = self._hand_over(*args, **more)
        self._names.update(zip(load.blocks, load.names, strict=True))
        self._saved.update(load.names)
        self._ends.add(load.names[-1])
        return load

    def stored(self) -> dict[str, Any]:
        from foreword.integrations.vllm.worker_side import worker_of

        worker = worker_of(str(self._llm.llm_engine.vllm_config.kv_transfer_config.engine_id))
        assert worker is not None and worker._staging is not None
        [tensors] = worker._tensors
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        counts = {"compared": 0, "different": 0, "absent": 0}
        frame = worker._staging.frame_bytes
        for block, name in self._names.items():
            [found] = self._cache.store.fetch([name], [memoryview(bytearray(frame))], deadline=time.monotonic() + 5)
            if found is None:
                counts["absent"] += 1
                continue
            counts["compared"] += 1
            counts["different"] += not self._equal(
                [tensor[block] for tensor in tensors], found.frame.payload, name in self._ends
            )
        return counts

    def _equal(self, tensors: list[torch.Tensor], payload: memoryview, without_last: bool) -> bool:
        """Whether the bytes of a block's tensors, one for each layer, are these; `without_last`: but for the last token."""
        tokens = self._llm.llm_engine.vllm_config.cache_config.block_size
        start = 0
        for tensor in tensors:
            mine = tensor.cpu().contiguous()
            stored = torch.frombuffer(payload, dtype=mine.dtype, offset=start, count=mine.numel()).view(mine.shape)
            start += mine.numel() * mine.element_size()
            axis = mine.shape.index(tokens)
            pair = [one.narrow(axis, 0, tokens - without_last).contiguous().view(torch.uint8) for one in (mine, stored)]
            if not torch.equal(*pair):
                return False
        return start == len(payload)

    def metrics(self, start: str) -> dict[str, Any]:
        """The counts of the connector, in place of vLLM's metrics; or, with `direct`, whether it copies directly."""
        if start == "direct":
            return {"metrics": [[start, {"state": self._direct_state()}, 0.0]]}
        status = self._cache.status() if self._cache is not None else None
        names = ("saved", "loaded", "cut", "dropped", "failed", "declined", "stopped")
        return {"metrics": [[name, {}, getattr(status, name)] for name in names] if status is not None else []}

    def _direct_state(self) -> str:
        """Whether blocks are copied directly, once the device has been tested, or why not."""
        until = time.monotonic() + _TEST_SECONDS
        while self._cache is not None and not self._cache.direct_state and time.monotonic() < until:
            time.sleep(0.05)
        return "no connector" if self._cache is None else self._cache.direct_state or "the test at the start goes on"


if __name__ == "__main__":
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    serve(ComparedEngine)
