"""The state of the front door: loading, ready, draining. It says who may enter, and counts who is inside."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from foreword.errors import BadRequest, EngineFailed, NotReady, QueueFull, ShuttingDown

if TYPE_CHECKING:
    from foreword.entrypoints.async_engine import AsyncEngine

# Seconds between two looks at what waits to be fetched.
_LOOK = 0.05


class Gate:
    """Everything here runs on the event loop's thread; nothing is locked.

    Args:
        max_queue: sequences that may wait for admission to the engine.
        engine: the engine, if it is loaded already.
    """

    def __init__(self, max_queue: int, engine: AsyncEngine | None = None) -> None:
        self.max_queue = max_queue
        self._engine = engine
        self._draining = False
        # Set when the server has stopped waiting for those inside.
        self.ended = asyncio.Event()
        self._inside = 0
        self._empty = asyncio.Event()
        self._empty.set()
        self._since = time.monotonic()
        self._progress = "it has just begun"

    def open(self, engine: AsyncEngine) -> None:
        """The engine is loaded: let requests in."""
        self._engine = engine

    def note_progress(self, text: str) -> None:
        """Loading has come this far; shown to those who ask too early."""
        self._progress = text

    @property
    def draining(self) -> bool:
        """Whether it lets nobody in because the server is about to stop."""
        return self._draining

    @property
    def loaded(self) -> AsyncEngine | None:
        """The engine, whether or not requests may enter."""
        return self._engine

    def engine(self) -> AsyncEngine:
        """The engine. Raises ShuttingDown, NotReady or EngineFailed where a request may not enter now."""
        if self._draining:
            raise ShuttingDown("The server is shutting down and takes no new requests; retry later")
        return self._checked()

    def _checked(self) -> AsyncEngine:
        if self._engine is None:
            waited = time.monotonic() - self._since
            raise NotReady(f"The model is still being loaded ({waited:.0f} s so far: {self._progress}); retry soon")
        failed = self._engine.status().failed
        if failed is not None:
            raise EngineFailed(f"The engine has stopped: {failed}")
        return self._engine

    def check_loaded(self) -> AsyncEngine:
        """The engine, also while the server drains. Raises NotReady or EngineFailed."""
        return self._checked()

    def check_room(self, sequences: int) -> None:
        """Raises QueueFull if `sequences` more would have to wait beyond the bound, BadRequest if they always would."""
        if sequences > self.max_queue:
            raise BadRequest(
                f"The request asks for {sequences} sequences (prompts times n); "
                f"at most {self.max_queue} may wait here (server.max_queue)",
                param="n",
            )
        # What is inside and does not run, waits or is on its way to the engine: a burst that arrives between two steps
        # is counted although the engine has not seen it yet.
        status = self.engine().status()
        waiting = max(status.waiting, self._inside - status.running)
        if waiting + sequences > self.max_queue:
            raise QueueFull(f"{waiting} sequences wait already and at most {self.max_queue} may; retry later")

    @contextmanager
    def admit(self, sequences: int, *, checked: bool = True) -> Iterator[AsyncEngine]:
        """Count `sequences` as inside until the end of the block. Raises what `engine` and `check_room` raise; those that are
        inside already (their request moved here) are not `checked`."""
        engine = self.engine() if checked else self.check_loaded()
        if checked:
            self.check_room(sequences)
        self._inside += sequences
        self._empty.clear()
        try:
            yield engine
        finally:
            self._inside -= sequences
            if self._inside == 0:
                self._empty.set()

    def close(self) -> None:
        """Let nobody in any more."""
        self._draining = True

    async def drain(self, timeout: float) -> None:
        """Let nobody in, wait up to `timeout` seconds until everybody is out and all that moved here was fetched, then abort
        the rest."""
        self.close()
        deadline = time.monotonic() + timeout
        # A client that claims a request is counted before the request is claimed.
        while self._engine is not None and self._engine.unclaimed.all() and time.monotonic() < deadline:
            await asyncio.sleep(_LOOK)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._empty.wait(), max(deadline - time.monotonic(), 0))
        self.ended.set()
        if self._engine is not None:
            await self._engine.drain(0.0)
