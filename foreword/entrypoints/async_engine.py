"""The engine for servers: one thread runs the loop, any number of asyncio tasks wait for deltas."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import secrets
import threading
import time
from array import array
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from foreword.blocks.common_prefixes import CommonPrefix, common_prefixes
from foreword.blocks.keys import Scope, chain_keys
from foreword.config import EngineConfig, PrefixConfig, StoreConfig, TransferConfig
from foreword.disaggregation.unclaimed import UnclaimedRequest, UnclaimedRequests
from foreword.engine.request import Delta, Request, SamplingParams
from foreword.engine.sequence import SequenceState
from foreword.engine.tokenizer import Tokenizer
from foreword.entrypoints.build import Assembly, ModelInfo, assemble
from foreword.errors import BadRequest, CannotMove, EngineFailed, NotFound, ShuttingDown, UnknownPrefix
from foreword.events import Observer
from foreword.offload.manager import OffloadManager
from foreword.prefixes.async_service import AsyncPrefixes
from foreword.prefixes.erasure import forget_tenant
from foreword.prefixes.records import tenant_digest
from foreword.prefixes.service import PinnedKV, Registration

if TYPE_CHECKING:
    from foreword.disaggregation.instance import Instance
    from foreword.disaggregation.migration import MigrationResult

Result = TypeVar("Result")

# Newest texts that are compared to find what they share.
_COMPARED_TEXTS = 2048


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """A moment's state. `kv_usage` is the share of blocks in use; cached blocks that are free do not count."""

    running: int
    waiting: int
    kv_usage: float
    free_blocks: int
    cached_blocks: int
    pinned_blocks: int
    preemptions: int
    steps: int
    failed: str | None


@dataclass(frozen=True, slots=True)
class _Listener:
    loop: asyncio.AbstractEventLoop
    queue: asyncio.Queue[Delta]


class AsyncEngine:
    """Runs requests side by side. Make it with `from_config`; `close` ends its thread.

    All work on blocks and tensors happens on the engine's thread: others put calls into its inbox (`_call`).
    """

    def __init__(self, assembly: Assembly, transfer: TransferConfig | None = None, role: str | None = None) -> None:
        self.info: ModelInfo = assembly.info
        self.tokenizer: Tokenizer = assembly.tokenizer
        self.prefixes = AsyncPrefixes(assembly.prefixes, self._compute_and_pin)
        assembly.prefixes.book.unpin = self._unpin
        self._prefix_ids = itertools.count()
        self.offload: OffloadManager | None = assembly.offload
        self._core = assembly.core
        self._flush_seconds = assembly.flush_seconds
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._listeners: dict[str, _Listener] = {}
        self._active: set[str] = set()
        self.unclaimed = UnclaimedRequests(self._expired)
        self._closing = False
        self._failed: str | None = None
        # What other instances may read of this one; None unless `transfer` was given.
        self.served = assembly.share(self.post) if assembly.share is not None else None
        # This engine among others; None unless it has a role.
        self.instance = None if transfer is None or role is None else self._join(assembly, transfer, role)
        self._thread = threading.Thread(target=self._run, name="foreword-engine", daemon=True)
        self._thread.start()

    @classmethod
    def from_config(
        cls,
        config: EngineConfig | None = None,
        *,
        prefixes: PrefixConfig | None = None,
        store: StoreConfig | None = None,
        transfer: TransferConfig | None = None,
        role: str | None = None,
        observers: Sequence[Observer] = (),
        progress: Callable[[str], None] = lambda _: None,
    ) -> AsyncEngine:
        """Load the model and start. Blocking: seconds to minutes. With `transfer` other instances may read its blocks, once
        an endpoint listens (`disaggregation.block_server.serve_blocks`); with a `role` too it listens itself, computes prompts
        for others and has its own computed elsewhere (`instance`). Raises ForewordError."""
        chosen = config or EngineConfig()
        assembly = assemble(
            chosen, prefixes=prefixes, store=store, transfer=transfer, observers=observers, progress=progress
        )
        engine = cls(assembly, transfer, role)
        if engine.instance is not None:
            engine.instance.listen()
        return engine

    def _join(self, assembly: Assembly, transfer: TransferConfig, role: str) -> Instance:
        from foreword.disaggregation.instance import Instance  # needs msgspec
        from foreword.disaggregation.kv_view import KVView

        assert assembly.runner is not None and self.served is not None
        view = KVView(assembly.runner.layers, self.served.layout)
        instance = Instance(assembly.core, view, transfer, role, self, self.served)
        assembly.runner.on_written = instance.layer_written
        return instance

    def validate(self, request: Request) -> None:
        """Raises PromptTooLong or BadRequest for a request that `generate` would refuse."""
        self._core.validate(request)

    async def generate(self, request: Request) -> AsyncGenerator[Delta, None]:
        """Deltas of all `params.n` sequences, as they come. Closing the iterator ends the request and frees its blocks.

        Raises BadRequest or PromptTooLong at the first step, EngineFailed if the engine breaks.
        """
        self.validate(request)
        async with contextlib.aclosing(self._listen(request, None)) as deltas:
            async for delta in deltas:
                yield delta

    async def _listen(
        self, request: Request, on_finish: Callable[[SequenceState], None] | None
    ) -> AsyncGenerator[Delta, None]:
        if request.id in self._active:
            raise BadRequest(f"a request with the id {request.id!r} is already running", param="request_id")
        listener = _Listener(asyncio.get_running_loop(), asyncio.Queue())
        began = functools.partial(self._begin, request, listener, on_finish)
        async with contextlib.aclosing(self._deltas(request.id, listener, began, request.params.n)) as deltas:
            async for delta in deltas:
                yield delta

    async def _compute_and_pin(self, one: Registration) -> PinnedKV:
        """Compute the KV of a named prefix, or load it, and pin its full blocks."""
        pinned: list[PinnedKV] = []

        def pin(sequence: SequenceState) -> None:
            blocks = self._core.cache.pin(sequence.table, len(one.tokens) // self.info.block_size)
            pinned.append(PinnedKV(len(blocks) * self.info.kv_bytes_per_block, blocks))

        name = f"prefix-{next(self._prefix_ids)}-{one.prefix.name}"
        request = Request(name, one.tokens, SamplingParams(max_tokens=0), salt=one.salt)
        try:
            self.validate(request)
            async for _ in self._listen(request, pin):
                pass
        except BaseException:
            # Behind the request in the inbox: by then it is pinned, or never will be.
            self.post(lambda: self._core.cache.unpin([block for kv in pinned for block in kv.blocks]))
            raise
        if not pinned:
            raise ShuttingDown(f"the engine ended before the prefix {one.prefix.name!r} was computed")
        return pinned[0]

    def _unpin(self, blocks: Sequence[int]) -> None:
        self.post(lambda: self._core.cache.unpin(blocks))

    async def follow(self, request_id: str) -> AsyncGenerator[Delta, None]:
        """Claim a request that migrated here: its output since then, and all that follows. Closing the iterator ends it.

        Raises NotFound if no unclaimed request has this id.
        """
        listener = _Listener(asyncio.get_running_loop(), asyncio.Queue())
        began = functools.partial(self._attach, request_id, listener)
        async with contextlib.aclosing(self._deltas(request_id, listener, began, 1)) as deltas:
            async for delta in deltas:
                yield delta

    async def unclaimed_requests(self) -> Sequence[UnclaimedRequest]:
        """Unclaimed requests, once the engine's thread has done everything posted before."""
        return await self._call(self.unclaimed.all)

    async def _deltas(
        self, request_id: str, listener: _Listener, begin: Callable[[], None], sequences: int
    ) -> AsyncGenerator[Delta, None]:
        self._active.add(request_id)
        try:
            await self._call(begin)
            left = sequences
            while left:
                delta = await listener.queue.get()
                if delta.finish_reason == "error":
                    raise EngineFailed(delta.error or "the engine failed")
                yield delta
                left -= delta.finish_reason is not None
        finally:
            # In this order: whoever takes the id next is behind this in the inbox.
            if not self.post(lambda: self._forget(request_id, listener)):
                self._listeners.pop(request_id, None)
            self._active.discard(request_id)

    def _begin(self, request: Request, listener: _Listener, on_finish: Callable[[SequenceState], None] | None) -> None:
        # On the engine's thread: a step in flight may still bring a delta for an earlier request of this id.
        self._core.add(request, on_finish)
        self._listeners[request.id] = listener

    def _attach(self, request_id: str, listener: _Listener) -> None:
        unclaimed = self.unclaimed.claim(request_id)
        if unclaimed is None:
            raise NotFound(f"no request {request_id!r} has moved here and waits to be fetched")
        self._listeners[request_id] = listener
        self.deliver(unclaimed.deltas)

    def _expired(self, request_id: str) -> None:
        """The client of a migrated request has not come for it in time."""

        def work() -> None:
            if self.unclaimed.claim(request_id) is not None:
                self._core.abort(request_id)

        self.post(work)

    def _forget(self, request_id: str, listener: _Listener) -> None:
        if self._listeners.get(request_id) is listener:  # or somebody else follows it
            del self._listeners[request_id]
            self._core.abort(request_id)

    async def migrate(
        self, request_id: str, address: str, *, to: str = "", new_id: str = "", envelope: bytes = b""
    ) -> MigrationResult:
        """Move a running request with its KV to the instance at the transfer address `address`, and tell its listener so
        (`Delta.moved`). There it goes on as `new_id`, and waits to be followed.

        Args:
            to: where clients find that instance; the address if not given.
            envelope: for whoever follows it there.

        Raises CannotMove, TransferError; then the request goes on here.
        """
        instance = self.instance
        if instance is None:
            raise CannotMove("this engine has no transfer endpoint (--role, --transfer-bind)")
        future: Future[MigrationResult] = Future()
        name = new_id or f"{request_id.partition('~')[0]}~{secrets.token_hex(4)}"
        await self._call(lambda: instance.migrations.begin(request_id, address, to or address, name, envelope, future))
        return await asyncio.wrap_future(future)

    def _abort_and_tell(self, request_id: str) -> None:
        self.deliver(self._core.abort(request_id))

    def status(self) -> EngineStatus:
        """From any thread; the numbers may be a step apart from each other."""
        core, pool = self._core, self._core.cache.pool
        pinned = self.prefixes.pinned_bytes // self.info.kv_bytes_per_block
        return EngineStatus(
            running=len(core.scheduler.running),
            waiting=len(core.scheduler.waiting),
            kv_usage=1.0 - pool.num_free / pool.num_blocks,
            free_blocks=pool.num_free,
            cached_blocks=pool.num_cached,
            pinned_blocks=pinned,
            preemptions=core.scheduler.num_preemptions,
            steps=core.steps,
            failed=self._failed,
        )

    async def common_prefixes(self, salt: bytes = b"", limit: int = 8) -> list[CommonPrefix]:
        """The beginnings that a tenant's newest texts share, those whose sharing saves most first."""
        texts = await self._call(lambda: self._core.recent_texts(salt, _COMPARED_TEXTS))
        return await asyncio.to_thread(self._find_shared, texts, salt, limit)

    def _find_shared(self, texts: Sequence[array[int]], salt: bytes, limit: int) -> list[CommonPrefix]:
        size, pool = self.info.block_size, self._core.cache.pool
        root = Scope(bytes.fromhex(self.info.fingerprint), size, salt).root()
        found = common_prefixes(texts, size, limit)
        # A lookup only reads: beside the engine's thread it may be a step old.
        return [replace(one, on_device=len(pool.lookup(chain_keys(root, one.tokens, size)))) for one in found]

    async def check_integrity(self) -> None:
        """Prove the pool's invariants between two steps. Raises IntegrityError."""
        await self._call(self._core.cache.check)

    async def clear_cache(self) -> int:
        """Forget all blocks that are not in use; returns their number."""
        return await self._call(self._core.cache.clear)

    async def forget(self, salt: bytes = b"") -> dict[str, Any]:
        """Remove a tenant's blocks and named prefixes from every store, and all unused blocks from the device. Returns what
        was removed: `prefixes.erasure.Receipt` as an object, with `device_blocks`. Raises StoreError if a store cannot."""
        for prefix in self.prefixes.list(salt=salt):
            with contextlib.suppress(UnknownPrefix):
                await self.prefixes.remove(prefix.name, salt=salt)
        cleared = await self.clear_cache()
        off = self.offload
        if off is None:
            return {"what": f"tenant {tenant_digest(salt)}", "device_blocks": cleared, "left": 0}
        await asyncio.to_thread(off.flush)
        receipt = await asyncio.to_thread(forget_tenant, off.store, salt)
        return {**receipt.plain(), "device_blocks": cleared}

    async def drain(self, timeout: float) -> None:
        """Wait until nothing runs, at most `timeout` seconds, then end what is left."""
        deadline = time.monotonic() + timeout
        while self._active and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        for request_id in list(self._active):
            await self._call(functools.partial(self._abort_and_tell, request_id))

    def close(self) -> None:
        """End the thread; requests that still run get an error. What is not in the stores yet is written."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        if self.instance is not None:
            self.instance.close()
        if self.offload is not None:
            self.offload.close(self._flush_seconds)

    async def _call(self, function: Callable[[], Result]) -> Result:
        """Run a function on the engine's thread, between two steps."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()

        def resolve(method: Callable[[Any], None], value: Any) -> None:
            if not future.done():  # the caller may have been cancelled meanwhile
                method(value)

        def work() -> None:
            answer: tuple[Callable[[Any], None], Any]
            try:
                answer = future.set_result, function()
            except BaseException as error:  # noqa: BLE001 - handed to the caller, who waits on another thread
                answer = future.set_exception, error
            with contextlib.suppress(RuntimeError):  # the caller's loop was closed meanwhile
                loop.call_soon_threadsafe(resolve, *answer)

        if not self.post(work):
            raise EngineFailed(self._failed) if self._failed else ShuttingDown("the engine is closed")
        return await future

    def post(self, work: Callable[[], None]) -> bool:
        with self._wake:
            if self._closing or self._failed is not None:
                return False
            self._inbox.append(work)
            self._wake.notify()
        return True

    def _run(self) -> None:
        """The engine's thread."""
        message = "the engine was closed"
        try:
            while self._wait():
                while self._inbox:
                    self._inbox.popleft()()
                if self._core.has_work():
                    self.deliver(self._core.step())
        except Exception as error:
            with self._wake:
                self._failed = f"{type(error).__name__}: {error}"
            message = f"the engine stopped: {self._failed}"
            raise
        finally:
            # From here on nothing is put into the inbox. What is in it came too late for a step, but not for an answer.
            while self._inbox:
                self._inbox.popleft()()
            ends = [Delta(name, 0, (), "", finish_reason="error", error=message) for name in list(self._listeners)]
            self.deliver(ends)
            self._core.fail_all(message)

    def _wait(self) -> bool:
        """Sleep until there is something to do; False when the engine closes."""
        with self._wake:
            while not (self._closing or self._inbox or self._core.has_work()):
                self._wake.wait()
            return not self._closing

    def wait(self, seconds: float) -> None:
        """The engine's thread has nothing to compute: sleep until there is something in the inbox."""
        with self._wake:
            self._wake.wait_for(lambda: self._inbox or self._closing, seconds)

    def add_migrated(self, request: Request, output: Sequence[int], envelope: bytes) -> None:
        """A migrated request continues here, and its client has not come for it yet. On the engine's thread."""
        self.unclaimed.add(UnclaimedRequest(request, output, envelope))

    def deliver(self, deltas: Sequence[Delta]) -> None:
        """Hand deltas over, one wake-up of an event loop per step."""
        batches: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Queue[Delta], Delta]]] = {}
        for delta in deltas:
            listener = self._listeners.get(delta.request_id)
            if listener is None:
                self.unclaimed.keep(delta)
            else:
                batches.setdefault(listener.loop, []).append((listener.queue, delta))
        for loop, batch in batches.items():
            with contextlib.suppress(RuntimeError):  # the loop was closed with requests still in flight
                loop.call_soon_threadsafe(_put_all, batch)


def _put_all(batch: Sequence[tuple[asyncio.Queue[Delta], Delta]]) -> None:
    for queue, delta in batch:
        queue.put_nowait(delta)
