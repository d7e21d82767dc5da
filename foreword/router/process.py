"""The router as a process: listen, serve, drain, exit."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import socket
import sys
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

from foreword import __version__
from foreword.api import http
from foreword.api.http import bind, configure_logging, url_of
from foreword.errors import ConfigError
from foreword.process_config import ServerConfig
from foreword.router.app import create_front
from foreword.router.auth import RouterAuth
from foreword.router.discovery import Discovery, configured_replicas
from foreword.router.extras import extras_for, extras_of, order_for
from foreword.router.replicas import ReplicaSpec
from foreword.router.router import Router
from foreword.routing.policies import policy_named

if TYPE_CHECKING:
    from foreword.configuration import Config

logger = logging.getLogger(__name__)

# Thresholds of the garbage collector. A collection of a few thousand objects takes less than a millisecond, a full one tens of
# milliseconds, during which all streams wait.
_GC_THRESHOLDS = (5_000, 10, 100)
# How long a tokenizing thread may keep the interpreter from the event loop.
_SWITCH_SECONDS = 0.0005
# A stream needs two connections: to the client and to the replica.
_MIN_OPEN_FILES = 4096


def check(config: Config) -> list[ReplicaSpec]:
    """The replicas that are given as flags. Raises ConfigError for what `run` refuses; starts and writes nothing."""
    specs = configured_replicas(config.router)
    given = config.router
    if not (specs or given.replica_file or given.replica_dns or given.replica_services or config.server.admin_key):
        raise ConfigError("name at least one replica: foreword route --replica http://host:8000")
    policy_named(config.router.policy)
    if (extras := extras_of(config)) is not None:
        extras.check(config)
    order_for(config.server)
    RouterAuth(config)  # raises configuration errors early
    return specs


def run(config: Config, current: Callable[[bytes], bytes] = bytes) -> int:
    """Run the router until a signal; returns the exit status. `current`: as for `Tenants`. Raises ConfigError before anything
    is started."""
    configure_logging(config.server.log_level, config.server.log_format)
    specs = check(config)
    listener = bind(config.server)
    if (files := http.open_files()) < _MIN_OPEN_FILES:
        logger.warning("the limit of %d open files allows %d streams; raise it with ulimit -n", files, files // 2)
    gc.set_threshold(*_GC_THRESHOLDS)
    sys.setswitchinterval(_SWITCH_SECONDS)
    if config.router.workers > 1:
        return extras_for("--workers").run_workers(config, current, lambda router: _serve(listener, specs, router))
    with http.event_loop() as runner:
        return runner.run(_serve(listener, specs, Router(config, current)))


async def _serve(listener: socket.socket, specs: list[ReplicaSpec], router: Router) -> int:
    http.catch_signals(router.ending.set)
    async with serving(listener, specs, router):
        # Exclude everything that is loaded now, such as the tokenizer's libraries, from later collections.
        gc.collect()
        gc.freeze()
        await router.ending.wait()
        await _drain(router, router.server_config.drain_seconds)
    logger.info("stopped")
    return 0


@contextlib.asynccontextmanager
async def serving(listener: socket.socket, specs: list[ReplicaSpec], router: Router) -> AsyncIterator[Router]:
    """A router that serves on a socket, on the running event loop."""
    await router.start()
    front = create_front(router)
    try:
        Discovery(router).start(specs)
        await router.joined()
        async with http.serving(front, listener, router.server_config) as router.leave:
            logger.info("Foreword %s routes on %s", __version__, url_of(listener))
            async with _picking(router, router.server_config):
                yield router
    finally:
        await router.stop()


def _picking(router: Router, limits: ServerConfig) -> contextlib.AbstractAsyncContextManager[None]:
    """Answers gateways, where the router has an address for them. Raises ConfigError."""
    if router.config.picker is None:
        return contextlib.nullcontext()
    return extras_for("--picker").picking(router, limits)


async def _drain(router: Router, seconds: float) -> None:
    """Reject new requests and wait for active ones."""
    router.stopping.set()
    if router.active:
        logger.info("shutting down: running requests may take %g s more", seconds)
    else:
        logger.info("shutting down")
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while router.active:
                await asyncio.sleep(0.05)
