"""The process: bind, load the model in the background, serve, drain, exit."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from foreword import __version__
from foreword.api.listener import bind
from foreword.config import Config, TransferConfig
from foreword.errors import ConfigError, ForewordError
from foreword.events import Observer
from foreword.observability.metrics import PrometheusObserver
from foreword.observability.recording import EngineRecorder, Recorder
from foreword.server.app import create_app
from foreword.server.limits import Gate
from foreword.transfer.sockets import parse_address

if TYPE_CHECKING:
    from foreword.entrypoints.async_engine import AsyncEngine
    from foreword.server.kv_events import KvEvents

logger = logging.getLogger(__name__)

# Seconds. Longer than clients keep idle connections: the side that sends the next request must be the one that closes.
_KEEP_ALIVE = 65
# Seconds for the last bytes to reach slow clients after the engine has ended their requests.
_FLUSH = 5

# Seconds between two looks at what is still under way.
_LOOK = 0.05

Progress = Callable[[str], None]
Load = Callable[[Config, PrometheusObserver, Progress], "AsyncEngine"]


def run(config: Config, load: Load | None = None) -> int:
    """Serve until a signal or a failed load; returns the exit status. Raises ConfigError before anything is started."""
    _configure_logging(config.server.log_level)
    check_salts(config)
    check_transfer(config)
    gate = Gate(config.server.max_queue)
    registry = PrometheusObserver()
    events = _open_events(config)
    app = create_app(gate, registry, config, events.source if events else None)
    listener = bind(config.server)
    settings = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE,
        timeout_graceful_shutdown=_FLUSH,
    )
    server = Server(settings, gate, config.server.drain_seconds, app.state.move_away)
    loader = Loader(config, registry, server, load or partial(load_engine, events=events))
    server.on_started = loader.start
    server.catch_signals()
    logger.info("Foreword %s listens on %s; loading the model", __version__, _url(listener))
    server.run(sockets=[listener])
    status = _leave(server, loader)
    if events is not None:
        events.close()
    return status


def _open_events(config: Config) -> KvEvents | None:
    if config.server.kv_events is None:
        return None
    from foreword.server.kv_events import KvEvents  # needs ZeroMQ

    return KvEvents(config.engine.block_size, config.server.kv_events, config.server.kv_events_replay)


def check_salts(config: Config) -> None:
    """Raises ConfigError if tenants' salts would not outlive this process but the blocks named after them would."""
    lasting = [url for url in config.store.urls if not url.startswith("memory:")]
    tenants = config.server.api_keys or config.server.api_key_file
    if lasting and tenants and not config.server.tenant_secret:
        raise ConfigError(
            "with API keys and a store that lasts, give --tenant-secret (any long random text, the same on every server that "
            "shares the store): tenants' salts are derived from it, and without it no block would be found again"
        )


def check_transfer(config: Config) -> None:
    """Raises ConfigError for a secret that cannot be read, or an address that nobody could use."""
    transfer = config.transfer.with_secret()
    if config.role is not None and transfer.advertise is None and transfer.bind.startswith(("0.0.0.0:", "[::]:", ":")):
        raise ConfigError(
            f"others cannot reach this instance at {transfer.bind}; give --transfer-advertise, its address as they see it"
        )
    if config.role is not None and transfer.secret is None and not parse_address(transfer.bind).is_local:
        raise ConfigError(
            f"other hosts can reach {transfer.bind} (--transfer-bind): give --transfer-secret-file, a file with 16 characters "
            "or more (`openssl rand -hex 32`), the same on all instances, or bind 127.0.0.1"
        )


class Server(uvicorn.Server):
    """uvicorn, but a first signal drains and a second one exits at once.

    While it drains it still listens: probes are answered, `/ready` says 503, and new requests are told to go elsewhere.
    """

    def __init__(
        self,
        settings: uvicorn.Config,
        gate: Gate,
        drain_seconds: float,
        move_away: Callable[..., Awaitable[object]] | None = None,
    ) -> None:
        super().__init__(settings)
        self._move_away = move_away
        self.gate = gate
        self.exit_status = 0
        self.on_started: Callable[[asyncio.AbstractEventLoop], None] | None = None
        self._drain_seconds = drain_seconds
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = False
        self._draining: asyncio.Task[None] | None = None

    def catch_signals(self) -> None:
        """From now on, not only once the loop runs: whoever reads that we listen may already send one."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, self.handle_exit)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._loop = asyncio.get_running_loop()
        if self.on_started is not None:
            self.on_started(self._loop)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # The base class would raise the signal again at the end, and the process would not exit with status 0.
        if self._stopping:
            logging.shutdown()
            os._exit(128 + sig)
        self._stopping = True
        if self._loop is None:
            self.should_exit = True
        else:
            self._loop.call_soon_threadsafe(self._begin_drain)

    def fail(self, reason: str) -> None:
        """End the process with status 1. On the loop's thread."""
        logger.error("%s", reason)
        self.exit_status = 1
        self.should_exit = True

    def _begin_drain(self) -> None:
        self._draining = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        if self.gate.loaded is not None:
            logger.info("shutting down: running requests may take %g s more", self._drain_seconds)
            deadline = time.monotonic() + self._drain_seconds
            if self._move_away is not None:
                await self._move_away(seconds=self._drain_seconds)
            await self.gate.drain(max(deadline - time.monotonic(), 0))
            instance = self.gate.loaded.instance
            while instance is not None and instance.busy and time.monotonic() < deadline:
                await asyncio.sleep(_LOOK)  # prompts of other instances are still being sent
        self.should_exit = True


class Loader:
    """Loads the engine on a thread of its own, so that probes are answered meanwhile."""

    def __init__(self, config: Config, registry: PrometheusObserver, server: Server, load: Load) -> None:
        self._config = config
        self._registry = registry
        self._server = server
        self._load = load
        self._thread = threading.Thread(target=self._run, name="loading", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._thread.start()

    @property
    def busy(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            engine = self._load(self._config, self._registry, self._note)
        except ForewordError as error:
            self._call(self._server.fail, error.message)
        except Exception as error:  # the thread's edge: without this the process would wait for ever for its model
            logger.exception("loading the model failed")
            self._call(self._server.fail, f"loading the model failed: {error}")
        else:
            self._call(self._open, engine)

    def _call(self, function: Callable[..., None], argument: object) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, argument)

    def _note(self, text: str) -> None:
        logger.info("loading: %s", text)
        self._call(self._server.gate.note_progress, text)

    def _open(self, engine: AsyncEngine) -> None:
        self._registry.watch(engine)
        self._server.gate.open(engine)
        logger.info("ready: %s", _describe(engine))


def load_engine(
    config: Config, registry: PrometheusObserver, progress: Progress, *, events: KvEvents | None = None
) -> AsyncEngine:
    """Load the real engine; imports torch. Raises ForewordError."""
    from foreword.entrypoints.async_engine import AsyncEngine

    role, transfer = config.role, config.transfer.with_secret()
    observers: list[Observer] = [registry, events] if events is not None else [registry]
    if config.server.record is not None:
        recorder = Recorder(Path(config.server.record), salt=config.server.record_salt)
        atexit.register(recorder.close)
        observers.append(EngineRecorder(recorder, config.engine.block_size))
    engine = AsyncEngine.from_config(
        config.engine,
        prefixes=config.prefixes,
        store=config.store,
        transfer=transfer if role is not None or transfer != TransferConfig() else None,
        role=role,
        observers=observers,
        progress=progress,
    )
    if events is not None and engine.offload is not None:
        events.watch(engine.offload.store, config.store.urls)
    return engine


def _describe(engine: AsyncEngine) -> str:
    info = engine.info
    pool, each = info.num_blocks * info.block_size, info.kv_bytes_per_block // info.block_size
    kept = f"room for {pool} tokens of KV at {each} bytes each"
    return f"{info.name}, {info.dtype} on {info.device}, texts up to {info.max_model_len} tokens, {kept}"


def _leave(server: Server, loader: Loader) -> int:
    if loader.busy:
        # Native code of the loading thread must not meet an interpreter that is being torn down.
        logging.shutdown()
        sys.stderr.flush()
        os._exit(server.exit_status)
    if server.gate.loaded is not None:
        server.gate.loaded.close()
    logger.info("stopped")
    return server.exit_status


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _configure_logging(level: str) -> None:
    logging.basicConfig(
        level=level.upper(), format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr, force=True
    )
    # uvicorn's own lines say nothing that ours do not.
    for name in ("httpx", "httpcore"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("uvicorn").setLevel(max(logging.WARNING, logging.getLevelName(level.upper())))
