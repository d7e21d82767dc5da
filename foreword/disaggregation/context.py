"""Parts of the engine that remote prefill and migration use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from foreword.blocks.salt import Salt
from foreword.engine.loop import EngineCore
from foreword.engine.request import Delta, Request, SamplingParams
from foreword.errors import ForewordError

if TYPE_CHECKING:
    from foreword.disaggregation.kv_view import KVView
    from foreword.engine.structured.compiler import CompiledOutput
    from foreword.transfer.connection import Connection


class EngineThread(Protocol):
    """The thread that runs the engine's loop, and the clients of its requests (`entrypoints.async_engine.AsyncEngine`)."""

    def post(self, work: Callable[[], None]) -> bool:
        """Run `work` on the engine's thread between two steps; False if the engine has ended. From any thread."""
        ...

    def wait(self, seconds: float) -> None:
        """On the engine's thread: sleep until work is posted, at most `seconds`."""
        ...

    def deliver(self, deltas: Sequence[Delta]) -> None:
        """On the engine's thread: hand deltas to the clients."""
        ...

    def add_migrated(self, request: Request, output: Sequence[int], envelope: bytes) -> None:
        """On the engine's thread: a migrated request continues here, and its client has not come for it yet."""
        ...


@dataclass(frozen=True, slots=True)
class EngineContext:
    """An engine, as its remote prefills and migrations see it.

    Attributes:
        dial: opens a connection to a transfer address; may wait for the network.
        background: runs work that may wait for the network.
    """

    core: EngineCore
    view: KVView
    thread: EngineThread
    dial: Callable[[str], Connection]
    background: Callable[[Callable[[], None]], None]

    def compile(
        self,
        params: SamplingParams,
        salt: Salt,
        done: Callable[[CompiledOutput | None], None],
        failed: Callable[[ForewordError], None],
    ) -> None:
        """Compile what a text must match in the background, then call `done` on the engine's thread."""

        def work() -> None:
            try:
                compiled = self.core.compile(params, salt)
            except ForewordError as error:
                failed(error)
                return
            self.thread.post(lambda: done(compiled))

        if params.structured is None:
            self.thread.post(lambda: done(None))
        else:
            self.background(work)
