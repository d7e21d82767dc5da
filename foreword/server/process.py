"""The server process: listen, load the model in the background, serve, drain, exit."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from foreword import __version__
from foreword.api import http
from foreword.api.http import bind, configure_logging, url_of
from foreword.configuration import Config
from foreword.engine import preflight
from foreword.engine.without_compiler import without_compiler
from foreword.errors import ConfigError, ForewordError, ModelUnsupported
from foreword.events import Observer
from foreword.host_addresses import is_loopback
from foreword.ledger import UsageLedger
from foreword.observability.recording import TraceRecorder
from foreword.observability.tracing import tracer_for
from foreword.process_config import ServerConfig
from foreword.prompt_order import PromptOrder
from foreword.server.admission import Admission
from foreword.server.app import ServerApp
from foreword.server.engine_metrics import PrometheusObserver
from foreword.server.engine_observers import EngineRecorder, EngineTraces
from foreword.store.background import background_thread
from foreword.tasks import background
from foreword.transfer_config import TransferConfig

if TYPE_CHECKING:
    from foreword.entrypoints.async_engine import AsyncEngine
    from foreword.server.kv_events import KvEvents

logger = logging.getLogger(__name__)

# Seconds between two checks for transfers that are still running.
_POLL_SECONDS = 0.05


def run(config: Config) -> int:
    """Serve until a signal arrives or loading fails. Returns the exit status. Raises ConfigError before it starts."""
    configure_logging(config.server.log_level, config.server.log_format)
    # The lines of these libraries repeat ours.
    for name in ("httpx", "httpcore"):
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))
    preflight.check_server(config)
    recorder = _recorder(config)
    admission = Admission(config.server.max_queue, order=PromptOrder.of(config.server))
    registry = PrometheusObserver()
    events, tracer = _publish_events(config), tracer_for(config.server.otlp_endpoint, "foreword-server")
    traces = EngineTraces(tracer) if tracer is not None else None
    ledger = None if config.server.usage_ledger is None else UsageLedger(Path(config.server.usage_ledger))
    app = ServerApp(admission, registry, config, events.source if events else None, traces, ledger)
    server = DrainingServer(app, bind(config.server), admission, config.server)
    observers: list[Observer] = [one for one in (registry, events, traces, recorder) if one is not None]
    loader = ModelLoader(config, registry, observers, events, server)
    with http.event_loop() as runner:
        runner.run(server.serve(loader.start))
    status = _leave(server, loader)
    for one in (recorder, events, tracer, ledger):
        if one is not None:
            one.close()
    return status


def _publish_events(config: Config) -> KvEvents | None:
    if config.server.kv_events is None:
        return None
    check_events(config.server)
    from foreword.server.kv_events import KvEvents  # needs ZeroMQ

    given = config.server
    assert given.kv_events is not None
    return KvEvents(config.engine.block_size, given.kv_events, given.router_key)


def check_events(config: ServerConfig) -> None:
    """Raises ConfigError for KV events in plain text where other hosts can read them."""
    endpoint = config.kv_events
    if endpoint is None:
        return
    if re.fullmatch(r"tcp://.+:\d+|ipc://.+", endpoint) is None:
        raise ConfigError(f"--kv-events is written tcp://HOST:PORT or ipc://PATH, not {endpoint!r}")
    host = endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    plain = config.router_key is None and not config.kv_events_open
    if endpoint.startswith("tcp://") and not is_loopback(host) and plain:
        raise ConfigError(
            f"other hosts can read the token ids of all prompts at {endpoint} (--kv-events): set --router-key, which encrypts "
            "them for the router, bind 127.0.0.1, or, where the network keeps others away, add --kv-events-open"
        )


def _recorder(config: Config) -> EngineRecorder | None:
    if config.server.record is None:
        return None
    recorder = TraceRecorder(Path(config.server.record), salt=config.server.tenant_secret)
    return EngineRecorder(recorder, config.engine.block_size, explained=True)


class DrainingServer:
    """Serves until a first signal has drained it; a second one exits at once.

    While it drains it still listens: it answers probes, `/ready` with status 503, and new requests with an error.
    """

    def __init__(self, app: ServerApp, listener: socket.socket, admission: Admission, config: ServerConfig) -> None:
        self.admission = admission
        self.exit_status = 0
        self._app = app
        self._listener = listener
        self._config = config
        self._stop = asyncio.Event()
        self._draining: asyncio.Task[None] | None = None

    async def serve(self, on_started: Callable[[asyncio.AbstractEventLoop], None]) -> None:
        http.catch_signals(self._begin_drain)
        async with http.serving(self._app.front, self._listener, self._config):
            logger.info("Foreword %s listens on %s; loading the model", __version__, url_of(self._listener))
            on_started(asyncio.get_running_loop())
            await self._stop.wait()

    def fail(self, reason: str, status: int = 1) -> None:
        """End the process with an exit status. On the loop's thread."""
        logger.error("%s", reason)
        self.exit_status = status
        self._stop.set()

    def _begin_drain(self) -> None:
        self._draining = background(self._drain_then_stop(), "shutting down")

    async def _drain_then_stop(self) -> None:
        try:
            await self._drain()
        finally:
            self._stop.set()

    async def _drain(self) -> None:
        seconds = self._config.drain_seconds
        if self.admission.loaded is not None:
            if self.admission.busy:
                logger.info("shutting down: running requests may take %g s more", seconds)
            else:
                logger.info("shutting down")
            deadline = time.monotonic() + seconds
            await self._app.migrate_all(seconds=seconds)
            await self.admission.drain(max(deadline - time.monotonic(), 0))
            instance = self.admission.loaded.instance
            while instance is not None and instance.busy and time.monotonic() < deadline:
                await asyncio.sleep(_POLL_SECONDS)  # prompts of other instances are still being sent
        else:
            logger.info("shutting down: the model is not loaded yet")


class ModelLoader:
    """Loads the engine on its own thread. Meanwhile the server answers probes."""

    def __init__(
        self,
        config: Config,
        registry: PrometheusObserver,
        observers: Sequence[Observer],
        events: KvEvents | None,
        server: DrainingServer,
    ) -> None:
        self._config = config
        self._registry = registry
        self._observers = observers
        self._events = events
        self._server = server
        self._thread = background_thread(self._run, "loading", bound=False, start=False)
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._thread.start()

    @property
    def busy(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            engine = load_engine(self._config, self._observers, self._events, self._note)
        except ForewordError as error:
            self._call(self._server.fail, error.message, 1 if error.fault == "server" else 2)
        except Exception as error:  # without this the process would wait for its model for ever
            logger.exception("loading the model failed")
            self._call(self._server.fail, f"loading the model failed: {error}")
        else:
            # The garbage collector would walk through torch's and the model's objects, a second or more, whenever requests have
            # made enough new ones.
            gc.collect()
            gc.freeze()
            self._call(self._opened, engine)

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)

    def _note(self, text: str) -> None:
        logger.info("loading: %s", text)
        self._call(self._server.admission.note_progress, text)

    def _opened(self, engine: AsyncEngine) -> None:
        self._registry.watch(engine)
        self._server.admission.set_engine(engine)
        logger.info("ready: %s", _describe(engine))


def load_engine(
    config: Config, observers: Sequence[Observer], events: KvEvents | None, progress: Callable[[str], None]
) -> AsyncEngine:
    """Load the engine, which imports torch. Raises ForewordError."""
    apart = False
    try:
        with without_compiler() as apart:
            engine = _load_engine(config, observers, progress)
    except (ModelUnsupported, ImportError) as error:
        if not apart:
            raise
        logger.info("loading again with torch's compiler: %s", error)
        engine = _load_engine(config, observers, progress)
    PromptOrder.of(config.server).check(engine.tokenizer)
    if events is not None and engine.offload is not None:
        events.watch(engine.offload.store, config.store.urls)
    return engine


def _load_engine(config: Config, observers: Sequence[Observer], progress: Callable[[str], None]) -> AsyncEngine:
    with preflight.without_collections():
        from foreword.entrypoints.async_engine import AsyncEngine

    role, transfer = config.role, config.transfer
    return AsyncEngine.from_config(
        config.engine,
        prefixes=config.prefixes,
        store=config.store,
        encryption=config.encryption,
        transfer=transfer if role is not None or transfer != TransferConfig() else None,
        role=role,
        observers=observers,
        progress=progress,
    )


def _describe(engine: AsyncEngine) -> str:
    info = engine.info
    memory = f"KV memory for {info.kv_tokens} tokens at {info.kv_bytes_per_token} bytes each"
    return f"{info.name}, {info.dtype} on {info.device}, prompt and output up to {info.max_model_len} tokens, {memory}"


def _leave(server: DrainingServer, loader: ModelLoader) -> int:
    if loader.busy:
        # The loading thread runs native code, which must not run while the interpreter shuts down.
        logger.info("stopped")
        logging.shutdown()
        sys.stderr.flush()
        os._exit(server.exit_status)
    if server.admission.loaded is not None:
        server.admission.loaded.close()
    logger.info("stopped")
    return server.exit_status
