"""The engine for servers: one thread runs the loop, any number of asyncio tasks wait for deltas."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from foreword.blocks.common_prefixes import CommonPrefix
from foreword.blocks.retention import MAX_PRIORITY, RetentionAnswer
from foreword.blocks.salt import NO_SALT, Salt
from foreword.blocks.session_book import SessionBook
from foreword.disaggregation.block_server import BlockServer
from foreword.disaggregation.instance import Instance
from foreword.disaggregation.kv_view import KVView
from foreword.disaggregation.live_migration import MigrationResult
from foreword.disaggregation.unclaimed import UnclaimedRequest, UnclaimedRequests
from foreword.engine.external_kv import EngineStores
from foreword.engine.request import Delta, ModelInfo, Request, SamplingParams
from foreword.engine.structured.compiler import CompiledOutput
from foreword.engine.structured.sequence_constraint import Constraint
from foreword.engine_config import EngineConfig, PrefixConfig
from foreword.entrypoints.build_engine import EngineParts, build_engine
from foreword.entrypoints.engine_verbs import PREFETCH_SECONDS, EngineVerbs, RetentionInfo
from foreword.errors import BadRequest, NotFound
from foreword.events import Event, Observer
from foreword.futures import complete
from foreword.prefixes.prefix_service import AsyncPrefixes, Registration
from foreword.request_errors import EngineFailed, ShuttingDown
from foreword.store.background import background_thread
from foreword.store.background_jobs import BackgroundJobs
from foreword.store_config import EncryptionConfig, StoreConfig
from foreword.tokens.tokenizer import Tokenizer
from foreword.transfer.errors import CannotMigrate
from foreword.transfer_config import TransferConfig

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

_COMPILERS = 4
# Newest remembered texts in which common prefixes are searched.
_COMPARED_TEXTS = 2048


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """The engine at one moment. `kv_usage` is the share of blocks in use; free blocks with cached KV do not count."""

    running: int
    waiting: int
    kv_usage: float
    free_blocks: int
    cached_blocks: int
    pinned_blocks: int
    retained_blocks: int
    preemptions: int
    steps: int
    failed: str | None


@dataclass(frozen=True, slots=True)
class _Listener:
    loop: asyncio.AbstractEventLoop
    queue: asyncio.Queue[Delta]


class AsyncEngine:
    """Runs requests side by side. Make it with `from_config`; `close` ends its thread.

    All work on blocks and tensors happens on the engine's thread; other threads post calls to its inbox.

    Attributes:
        instance: this engine among other instances; None unless it has a role.
        served: what other instances have read of its blocks; None unless it has a role.
        unclaimed: migrated requests whose client has not come for them yet.
        failed: the error that has ended the engine; None while it runs.
        audit, quarantine: the live audit of hits, and the chains that it, or that of another instance, has found to be wrong.
    """

    def __init__(self, parts: EngineParts, transfer: TransferConfig | None = None, role: str | None = None) -> None:
        self.info: ModelInfo = parts.info
        self.tokenizer: Tokenizer = parts.tokenizer
        self.offload: EngineStores | None = parts.offload
        self._verbs = EngineVerbs(parts, self._between_steps)
        self.prefixes = AsyncPrefixes(self._verbs.prefixes, self._compute_prefix, parts.core.leases.book.budget)
        self.unclaimed = UnclaimedRequests(self._expired)
        self.served: BlockServer | None = None
        self.instance: Instance | None = None
        self._parts, self._core, self.audit, self.quarantine = parts, parts.core, parts.core.audit, parts.quarantine
        # Not the loop's own threads: compilers of many grammars may wait for each other.
        self._compilers = BackgroundJobs("compile", most=None, threads=_COMPILERS, bound=False)
        self._inbox: deque[Callable[[], object]] = deque()
        self._wake = threading.Condition()
        self._listeners: dict[str, _Listener] = {}
        self._active: set[str] = set()
        self._closing = False
        self.failed: str | None = None
        if transfer is not None and role is not None:
            self.served = parts.block_server(self.post)
            view = KVView(parts.runner.layers, self.served.layout)
            self.instance = Instance(parts.core, view, transfer, role, self, self.served)
            parts.runner.on_written = self.instance.layer_written
        self._thread = background_thread(self._run, "engine", bound=False, start=False)
        if parts.keys is not None:
            parts.keys.on_end.append(self._generation_ended)
        self._core.post = self.post
        self._thread.start()

    @classmethod
    def from_config(
        cls,
        config: EngineConfig | None = None,
        *,
        prefixes: PrefixConfig | None = None,
        store: StoreConfig | None = None,
        encryption: EncryptionConfig | None = None,
        transfer: TransferConfig | None = None,
        role: str | None = None,
        observers: Sequence[Observer] = (),
        progress: Callable[[str], None] = lambda _: None,
    ) -> AsyncEngine:
        """Load the model and start. Blocking: seconds to minutes. With `transfer` and a `role` (`prefill`, `decode` or `both`)
        it listens for other instances, which may read its blocks, compute prompts for it and migrate requests to it. Raises
        ForewordError."""
        parts = build_engine(
            config or EngineConfig(),
            prefixes=prefixes,
            store=store,
            encryption=encryption,
            transfer=transfer,
            readable=transfer is not None and role is not None,
            observers=observers,
            progress=progress,
        )
        engine = cls(parts, transfer, role)
        if engine.instance is not None:
            engine.instance.listen()
        return engine

    def validate(self, request: Request) -> None:
        """Raises PromptTooLong or BadRequest for a request that `generate` would refuse."""
        self._core.validate(request)

    def generate(
        self, request: Request, unread: Callable[[Delta], None] = lambda delta: None
    ) -> AsyncGenerator[Delta, None]:
        """Deltas of all `params.n` sequences, as they come. Closing the iterator ends the request and frees its blocks; it is
        closed once `unread` has got what the engine had computed by then.

        Raises BadRequest or PromptTooLong at the first step, EngineFailed if the engine breaks.
        """
        compiled: CompiledOutput | None = None
        constraint: Constraint | None = None

        def begin(listener: _Listener) -> None:
            self._core.add(request, None, compiled, constraint)
            self._listeners[request.id] = listener

        async def prepare() -> None:
            nonlocal compiled, constraint
            if time.monotonic() >= self.prefixes.look_at:
                await self.prefixes.know_public()
            compiled = await self.compile(request.params, request.salt)
            if compiled is not None and request.output:
                work = partial(self._core.constraint_after, request, compiled)
                constraint = await asyncio.wrap_future(self._compilers.submit(work))

        return self._stream(request.id, begin, request.params.n, unread, prepare)

    async def compile(self, params: SamplingParams, salt: Salt = NO_SALT) -> CompiledOutput | None:
        """Compile what the text must match, off the event loop and off the engine's thread. Raises BadRequest; `generate`
        does the same at its first step."""
        if params.structured is None:
            return None
        return await asyncio.wrap_future(self._compilers.submit(self._core.compile, params, salt))

    def follow(
        self, request_id: str, unread: Callable[[Delta], None] = lambda delta: None
    ) -> AsyncGenerator[Delta, None]:
        """Claim a request that migrated here: its output since then, and all that follows. Closing the iterator ends it, as in
        `generate`.

        Raises NotFound at the first step if no unclaimed request has this id.
        """

        def begin(listener: _Listener) -> None:
            unclaimed = self.unclaimed.claim(request_id)
            if unclaimed is None:
                raise NotFound(f"no request {request_id!r} has migrated here and waits for its client")
            self._listeners[request_id] = listener
            self.deliver(unclaimed.deltas)

        return self._stream(request_id, begin, 1, unread)

    async def _stream(
        self,
        request_id: str,
        begin: Callable[[_Listener], None],
        left: int,
        unread: Callable[[Delta], None],
        prepare: Callable[[], Awaitable[None]] | None = None,
    ) -> AsyncGenerator[Delta, None]:
        """Deltas until all sequences have ended, of which `left` still run. `begin` runs on the engine's thread between two
        steps: a step that is running may still produce a delta of an earlier request with this id."""
        if request_id in self._active:
            raise BadRequest(f"a request with the id {request_id!r} is already running", param="request_id")
        listener = _Listener(asyncio.get_running_loop(), asyncio.Queue())
        self._active.add(request_id)
        try:
            if prepare is not None:
                await prepare()
            await self._call(lambda: begin(listener))
            while left:
                delta = await listener.queue.get()
                if delta.finish_reason == "error":
                    raise delta.failure
                left -= delta.finish_reason is not None
                yield delta
        finally:
            # Nothing runs between this and the call's way into the inbox: the next request with this id comes behind it.
            self._active.discard(request_id)
            await self._end(request_id, listener, unread if left else None)

    async def _end(self, request_id: str, listener: _Listener, unread: Callable[[Delta], None] | None) -> None:
        """End a request's stream. With `unread` the request runs still: it gets what is computed until the end of a running
        step, also if the caller is cancelled meanwhile."""
        forget = partial(self._forget, request_id, listener)
        if unread is None and self.post(forget):
            return
        ended, cancelled = asyncio.ensure_future(self._call(forget)), None
        while not ended.done():
            try:
                await asyncio.wait([ended])
            except asyncio.CancelledError as error:
                cancelled = error
        if ended.exception() is not None:
            self._listeners.pop(request_id, None)
        while unread is not None and not listener.queue.empty():
            unread(listener.queue.get_nowait())
        if cancelled is not None:
            raise cancelled

    def _forget(self, request_id: str, listener: _Listener) -> None:
        if self._listeners.get(request_id) is listener:  # not if another client follows it by now
            del self._listeners[request_id]
            self._core.abort(request_id)

    async def _compute_prefix(self, one: Registration) -> None:
        """Compute the KV of a named prefix, or load it; its full blocks are kept."""
        async for delta in self.generate(self._verbs.computing(one)):
            if delta.finish_reason == "abort":
                raise ShuttingDown(f"the engine ended before the prefix {one.prefix.name!r} was computed")

    # Cache control

    async def retain(
        self,
        tokens: Sequence[int],
        ttl: float | None,
        priority: int = 0,
        *,
        salt: Salt = NO_SALT,
    ) -> RetentionAnswer:
        """Keep the KV of `tokens` for `ttl` seconds after its last use; it is computed or loaded if necessary. Raises
        BadRequest, PromptTooLong, EngineFailed."""
        answers: tuple[RetentionAnswer, ...] = ()
        async for delta in self.generate(self._verbs.retaining(tokens, ttl, priority, salt)):
            answers = delta.retained
        return answers[0]

    async def pin(self, tokens: Sequence[int], *, salt: Salt = NO_SALT) -> RetentionAnswer:
        """Keep the KV of `tokens` until it is released."""
        return await self.retain(tokens, None, MAX_PRIORITY, salt=salt)

    async def prefetch(
        self,
        tokens: Sequence[int],
        *,
        salt: Salt = NO_SALT,
        seconds: float = PREFETCH_SECONDS,
    ) -> RetentionAnswer:
        """Load what the stores have of `tokens` to the device, and keep it there for some seconds. Nothing is computed. Raises
        BadRequest, PromptTooLong, QueueFull."""
        future: Future[RetentionAnswer] = Future()
        future.set_running_or_notify_cancel()  # as in `_call`
        await self._call(lambda: self._verbs.prefetch(tokens, salt, seconds, future.set_result))
        return await asyncio.wrap_future(future)

    def release(self, tokens: Sequence[int] | None = None, *, salt: Salt = NO_SALT) -> list[RetentionInfo]:
        """End the retentions along a prompt, or all of a salt, without a client's salt all of the tenant. Returns them."""
        return self._verbs.release(tokens, salt)

    def retentions(self, tenant: bytes = b"") -> list[RetentionInfo]:
        """Retentions of a tenant, given its salt."""
        return self._verbs.retentions(tenant)

    async def unclaimed_requests(self) -> Sequence[UnclaimedRequest]:
        """Unclaimed requests, once the engine's thread has done everything posted before."""
        return await self._call(self.unclaimed.all)

    def _expired(self, request_id: str) -> None:
        """The client of a migrated request has not come for it in time."""

        def work() -> None:
            if self.unclaimed.claim(request_id) is not None:
                self._core.abort(request_id)

        self.post(work)

    async def migrate(
        self, request_id: str, address: str, *, to: str = "", new_id: str = "", envelope: bytes = b""
    ) -> MigrationResult:
        """Migrate a running request with its KV to the instance at the transfer address `address`. Its stream here ends with
        `Delta.moved`; there it continues as `new_id`, until its client comes with `follow`.

        Args:
            to: where clients find that instance; the address if not given.
            envelope: for the server there (`UnclaimedRequest.envelope`).

        Raises CannotMigrate, TransferError; then the request continues here.
        """
        instance = self.instance
        if instance is None:
            raise CannotMigrate("this engine has no transfer endpoint (--role, --transfer-bind)")
        future: Future[MigrationResult] = Future()
        future.set_running_or_notify_cancel()  # as in `_call`
        name = new_id or f"{request_id.partition('~')[0]}~{secrets.token_hex(4)}"
        await self._call(lambda: instance.migrations.begin(request_id, address, to or address, name, envelope, future))
        return await asyncio.wrap_future(future)

    async def shorten_session(self, tenant: bytes, name: str, keep: int | None = None) -> dict[str, int]:
        """A session of a tenant, given its salt, has ended; or it has been compacted to its first `keep` tokens. Frees what
        only it has used: on the device, and in all stores before this returns. Returns the number of blocks by tier. Raises
        NotFound."""
        alone = self._verbs.shorten_session(tenant, name, keep)
        keys, blocks = await self._call(partial(self._verbs.retire, alone))
        deleting = self._verbs.delete_unneeded(tenant, alone, keys)
        return {"device": blocks} | (await asyncio.wrap_future(deleting) if deleting is not None else {})

    @property
    def sessions(self) -> SessionBook:
        """The sessions of all tenants."""
        return self._core.sessions

    def queue(self) -> tuple[int, int]:
        """Sequences that run, and those that wait, now. From any thread."""
        return len(self._core.scheduler.running), len(self._core.scheduler.waiting)

    def status(self) -> EngineStatus:
        """From any thread; the numbers may be a step apart from each other."""
        core, pool = self._core, self._core.cache.pool
        return EngineStatus(
            running=len(core.scheduler.running),
            waiting=len(core.scheduler.waiting),
            kv_usage=1.0 - pool.num_free / pool.num_blocks,
            free_blocks=pool.num_free,
            cached_blocks=pool.num_cached,
            pinned_blocks=core.leases.book.named_bytes // self.info.kv_bytes_per_block,
            retained_blocks=core.leases.book.retained_bytes // self.info.kv_bytes_per_block,
            preemptions=core.scheduler.num_preemptions,
            steps=core.steps,
            failed=self.failed,
        )

    async def common_prefixes(self, tenant: bytes = b"", limit: int = 8) -> list[CommonPrefix]:
        """The prefixes that the newest texts of a tenant, given its salt, have in common, the largest saving first."""
        salt = Salt(tenant)
        texts = await self._call(lambda: self._verbs.recent_texts(salt, _COMPARED_TEXTS))
        return await asyncio.to_thread(self._verbs.common_prefixes, texts, salt, limit)

    async def check_integrity(self) -> None:
        """Prove the pool's invariants between two steps. Raises IntegrityError."""
        await self._call(self._verbs.check)

    async def clear_cache(self, salt: Salt | None = None) -> int:
        """Forget all blocks that are not in use, or those of a salt, without a client's salt those of the whole tenant. Returns
        their number."""
        return await self._call(partial(self._verbs.clear, salt))

    async def forget(self, salt: Salt = NO_SALT, *others: Salt) -> dict[str, Any]:
        """Remove a tenant's blocks and named prefixes from every store and its unused blocks from the device; of a salt with a
        client's own only what requests with it have cached. A tenant's data keys are destroyed first, and what waits to be
        written is dropped. Returns what was removed, and
        what was not: `prefixes.erasure.Receipt` as an object, with `device_blocks` and the id for `erasure`. It is repeated in
        the background where it is not complete."""
        return await asyncio.to_thread(self._verbs.forget, (salt, *others))

    def _generation_ended(self, tenant: bytes) -> None:
        """A tenant, given its salt, was forgotten elsewhere."""
        if self.offload is not None:
            background_thread(partial(self._verbs.drop_ended_generation, tenant), "generation")

    def erasure(self, name: str, salt: Salt) -> dict[str, Any]:
        """The receipt of an erasure of this tenant, so far. Raises NotFound."""
        return self._verbs.erasure(name, salt)

    async def drain(self, timeout: float) -> None:
        """Wait until nothing runs, at most `timeout` seconds, then end what is left."""
        deadline = time.monotonic() + timeout
        while self._active and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        for request_id in list(self._active):
            await self._call(lambda name=request_id: self.deliver(self._core.abort(name)))  # type: ignore[misc]

    def close(self) -> None:
        """End the thread; requests that still run get an error. What is not in the stores yet is written."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        if self.instance is not None:
            self.instance.close()
        self._compilers.stop()
        self.unclaimed.close()
        if self._parts.keys is not None:
            self._parts.keys.on_end.remove(self._generation_ended)
        self._parts.close_stores()

    async def _call(self, function: Callable[[], Result]) -> Result:
        """Run a function on the engine's thread, between two steps."""
        return await asyncio.wrap_future(self._posted(function))

    def _between_steps(self, function: Callable[[], Result]) -> Result:
        """Run a function on the engine's thread, between two steps. For threads that may wait."""
        return self._posted(function).result()

    def _posted(self, function: Callable[[], Result]) -> Future[Result]:
        future: Future[Result] = Future()
        future.set_running_or_notify_cancel()  # a caller that is cancelled does not take back what was posted
        if not self.post(partial(complete, future, function)):
            raise EngineFailed(self.failed) if self.failed else ShuttingDown("the engine is closed")
        return future

    def notify(self, event: Event) -> None:
        """Give an event to the engine's observers, on its thread."""
        self.post(lambda: self._core.notify(event))

    def post(self, work: Callable[[], object]) -> bool:
        """Run `work` on the engine's thread between two steps; False if the engine has ended. From any thread."""
        with self._wake:
            if self._closing or self.failed is not None:
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
                    self._do(self._inbox.popleft())
                if self._core.has_work():
                    self.deliver(self._core.step())
                else:
                    self._core.idle_work()
        except Exception as error:
            with self._wake:
                self.failed = f"{type(error).__name__}: {error}"
            message = f"the engine stopped: {self.failed}"
            raise
        finally:
            # `post` refuses from here on. Calls that are in the inbox already still get an answer.
            while self._inbox:
                self._do(self._inbox.popleft())
            ends = [Delta(name, 0, (), "", finish_reason="error", error=message) for name in list(self._listeners)]
            self.deliver(ends)
            self._core.fail_all(message)

    def _do(self, work: Callable[[], object]) -> None:
        """Do what was posted, for one request or transfer; what that raises ends nothing else."""
        try:
            work()
        except Exception:
            logger.exception("a call on the engine's thread failed")

    def _wait(self) -> bool:
        """Sleep until there is something to do; False when the engine closes."""
        with self._wake:
            while not (self._closing or self._inbox or self._core.has_work()):
                pause = self._core.idle_pause()
                if pause == 0.0:
                    break
                self._wake.wait(pause)
            return not self._closing

    def wait(self, seconds: float) -> None:
        """On the engine's thread, without anything to compute: sleep until a call is posted, at most `seconds`."""
        with self._wake:
            self._wake.wait_for(lambda: self._inbox or self._closing, seconds)

    def add_migrated(self, request: Request, output: Sequence[int], envelope: bytes) -> None:
        """A migrated request continues here, and its client has not come for it yet. On the engine's thread."""
        self.unclaimed.add(UnclaimedRequest(request, output, envelope))

    def deliver(self, deltas: Sequence[Delta]) -> None:
        """Put deltas into the queues of their clients, with one call per event loop. On the engine's thread."""
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
