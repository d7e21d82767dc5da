"""Admission control: whether the server takes requests now, and how many sequences may wait."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Final

from foreword.api.routes import Meter
from foreword.errors import BadRequest
from foreword.prompt_order import PromptOrder
from foreword.request_errors import EngineFailed, NotReady, QueueFull, ShuttingDown

if TYPE_CHECKING:
    from foreword.api.front import Handler
    from foreword.api.routes import Route
    from foreword.entrypoints.async_engine import AsyncEngine

# Seconds between two checks for migrated requests that no client has fetched yet.
_POLL_SECONDS = 0.05


_AS_IS: Final = PromptOrder()


class Admission:
    """The server's state (loading, ready, draining) and the number of sequences it has admitted.

    Runs on the event loop's thread; nothing is locked.

    Args:
        max_queue: sequences that may wait for the engine.
        engine: the engine, if it is loaded already.
        order: of the parts of prompts.
    """

    def __init__(self, max_queue: int, engine: AsyncEngine | None = None, order: PromptOrder = _AS_IS) -> None:
        self.max_queue = max_queue
        self._order = order
        # Set when the server has stopped waiting for running requests.
        self.stopped = asyncio.Event()
        self._engine: AsyncEngine | None = None
        if engine is not None:
            self.set_engine(engine)
        self.draining = False  # refuses new requests because the server is about to stop
        self._admitted = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._created = time.monotonic()
        self._progress = "it has just begun"

    def set_engine(self, engine: AsyncEngine) -> None:
        """The engine is loaded: take requests from now on."""
        if self._order:
            engine.tokenizer.arrange = partial(self._order.arranged, model=engine.info.name)
        self._engine = engine

    def note_progress(self, text: str) -> None:
        """How far loading has come. Requests that arrive too early get this text in their error."""
        self._progress = text

    @property
    def loaded(self) -> AsyncEngine | None:
        """The engine, whether or not the server takes requests."""
        return self._engine

    def engine(self) -> AsyncEngine:
        """The engine. Raises ShuttingDown, NotReady or EngineFailed if the server takes no requests now."""
        if self.draining:
            raise ShuttingDown("The server is shutting down and takes no new requests; retry later")
        return self.check_loaded()

    def check_loaded(self) -> AsyncEngine:
        """The engine, also while the server drains. Raises NotReady or EngineFailed."""
        if self._engine is None:
            waited = time.monotonic() - self._created
            raise NotReady(f"The model is still being loaded ({waited:.0f} s so far: {self._progress}); retry soon")
        if self._engine.failed is not None:
            raise EngineFailed(f"The engine has stopped: {self._engine.failed}")
        return self._engine

    def check_ready(self, route: Route[Handler]) -> None:
        """Check that a call can be served: one that counts against a quota needs the engine, one that begins here an engine
        that takes requests. Raises NotReady, ShuttingDown or EngineFailed."""
        if route.meter is Meter.CONTINUED:
            self.check_loaded()
        elif route.meter is not Meter.FREE:
            self.engine()

    def check_queue(self, sequences: int) -> None:
        """Raises QueueFull if `sequences` more would exceed the queue's limit, BadRequest if they always would."""
        if sequences > self.max_queue:
            raise BadRequest(
                f"The request asks for {sequences} sequences (prompts times n); "
                f"at most {self.max_queue} may wait here (server.max_queue)",
                param="n",
            )
        # Admitted sequences that do not run are waiting or on their way to the engine. So a burst between two steps counts,
        # although the engine has not seen it yet.
        running, queued = self.engine().queue()
        waiting = max(queued, self._admitted - running)
        if waiting + sequences > self.max_queue:
            raise QueueFull(f"{waiting} sequences wait already and at most {self.max_queue} may; retry later")

    @contextmanager
    def admit(self, sequences: int, *, migrated: bool = False) -> Iterator[AsyncEngine]:
        """Count `sequences` as admitted until the end of the block. Raises what `engine` and `check_queue` raise.

        A `migrated` request runs already, so it is admitted while the server drains and when the queue is full.
        """
        engine = self.check_loaded() if migrated else self.engine()
        if not migrated:
            self.check_queue(sequences)
        self._admitted += sequences
        self._idle.clear()
        try:
            yield engine
        finally:
            self._admitted -= sequences
            if self._admitted == 0:
                self._idle.set()

    @property
    def busy(self) -> bool:
        """Whether a request is running, or a migrated one waits for its client."""
        return self._admitted > 0 or (self._engine is not None and bool(self._engine.unclaimed.all()))

    def close(self) -> None:
        """Refuse new requests from now on."""
        self.draining = True

    async def drain(self, timeout: float) -> None:
        """Refuse new requests, wait up to `timeout` seconds until the running ones have ended and migrated ones were fetched,
        then abort the rest."""
        self.close()
        deadline = time.monotonic() + timeout
        # A client that fetches a migrated request is admitted before the request leaves the engine's list.
        while self._engine is not None and self._engine.unclaimed.all() and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_SECONDS)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), max(deadline - time.monotonic(), 0))
        self.stopped.set()
        if self._engine is not None:
            await self._engine.drain(0.0)
