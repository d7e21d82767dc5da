"""Saves for which the write queue had no room: they wait, in order, while vLLM keeps the blocks, and a thread retries them.

A prompt may be larger than the queue. What does not fit stays in vLLM's blocks, which do not change while their request has
them, and which vLLM keeps behind its end until the rest is saved (`request_finished`), for a bounded time. No step is needed.
Before vLLM may use blocks for something else, their saves are dropped, and counted.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

from foreword.integrations.vllm.step_messages import BlockSave
from foreword.store.background import background_thread

_ROOM_SECONDS = 0.05


class LateSaves:
    """See the module. vLLM's thread adds and drops saves; one thread of this class, started with the first, retries them.

    Args:
        save: saves blocks, and returns for how many of the first there was room. Called under `lock`, which is held for the
            copies of a few blocks at most and never while a device is waited for.
        await_room: waits until there may be room, at most so many seconds.
        dropped: called with a number of blocks that are not saved.
    """

    def __init__(
        self,
        save: Callable[[BlockSave], int],
        await_room: Callable[[float], object],
        dropped: Callable[[int], None],
    ) -> None:
        self._save, self._await_room, self._dropped = save, await_room, dropped
        self.lock = threading.Condition()  # guards all of it
        self._waiting: dict[str, deque[BlockSave]] = {}
        self._thread: threading.Thread | None = None
        self._closed = False

    def requests(self) -> frozenset[str]:
        """Requests of which something waits."""
        with self.lock:
            return frozenset(self._waiting)

    def has(self, request_id: str) -> bool:
        """Whether something of a request waits."""
        return request_id in self._waiting

    def add(self, saves: Sequence[BlockSave]) -> None:
        """Save blocks behind those of their request that wait already: no lookup finds a chain without its first block."""
        with self.lock:
            for save in saves:
                waiting = self._waiting.get(save.request_id)
                rest = save if waiting else self._rest(save)
                if rest is not None:
                    self._waiting.setdefault(save.request_id, deque()).append(rest)
            if self._waiting and self._thread is None:
                self._thread = background_thread(self._run, "late-saves")
            self.lock.notify_all()

    def drop(self, request_ids: Iterable[str]) -> None:
        """vLLM takes back the blocks of these requests. On return nothing of them is read any more."""
        # `_run` copies under the same lock. So either its copy is done, or it will not find the request.
        with self.lock:
            for request_id in request_ids:
                self._dropped(sum(len(save.blocks) for save in self._waiting.pop(request_id, ())))

    def retire(self, request_ids: Collection[str], keys: Collection[bytes]) -> None:
        """Blocks with these keys are to be deleted: what waits of them is not saved, of requests that have ended. Requests that
        run, and those that come, save theirs, and then they are not deleted."""
        with self.lock:
            for request_id in [one for one in self._waiting if one in request_ids]:
                left = deque(rest for save in self._waiting[request_id] if (rest := _before(save, keys)).blocks)
                if left:
                    self._waiting[request_id] = left
                else:
                    del self._waiting[request_id]
            self.lock.notify_all()

    def close(self, seconds: float) -> None:
        """Wait until nothing waits, so many seconds at most, and drop the rest."""
        with self.lock:
            self.lock.wait_for(lambda: not self._waiting, seconds)
            self._closed = True
            self.drop(list(self._waiting))
            self.lock.notify_all()

    def _rest(self, save: BlockSave) -> BlockSave | None:
        """Save the blocks for which there is room. Returns the rest."""
        done = self._save(save)
        if done == len(save.blocks):
            return None
        keys = done * (len(save.keys) // len(save.blocks))
        parent = save.keys[keys - 1] if keys else save.parent
        return replace(save, keys=save.keys[keys:], parent=parent, depth=save.depth + keys, blocks=save.blocks[done:])

    def _run(self) -> None:
        while True:
            with self.lock:
                self.lock.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
            self._await_room(_ROOM_SECONDS)
            with self.lock:
                for request_id, waiting in list(self._waiting.items())[:1]:  # the oldest
                    rest = self._rest(waiting[0])
                    if rest is not None:
                        waiting[0] = rest
                        continue
                    waiting.popleft()
                    if not waiting:
                        del self._waiting[request_id]
                        self.lock.notify_all()


def _before(save: BlockSave, keys: Collection[bytes]) -> BlockSave:
    """The blocks of a save before the first with one of these keys."""
    frames = len(save.keys) // len(save.blocks)
    count = next((at for at, key in enumerate(save.keys) if key in keys), len(save.keys)) // frames
    return replace(save, keys=save.keys[: count * frames], blocks=save.blocks[:count])
