"""The process: bind, serve, drain, exit."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys

from aiohttp import web

from foreword import __version__
from foreword.api.listener import bind
from foreword.config import Config
from foreword.errors import ConfigError
from foreword.router.app import create_app
from foreword.router.auth import Callers
from foreword.router.discovery import Membership, named
from foreword.router.replicas import Spec
from foreword.router.service import Router
from foreword.routing.baselines import policy_named

logger = logging.getLogger(__name__)

# Seconds; longer than clients keep idle connections.
_KEEP_ALIVE = 75.0
_FLUSH = 2.0
# Objects after which the youngest are looked at, and how often the older ones are: a look at a few thousand takes less than a
# millisecond, one at all of them tens of milliseconds, with all streams waiting.
_COLLECT_AFTER = (5_000, 10, 100)
# Seconds that a thread that tokenizes may keep the interpreter from the loop.
_SWITCH = 0.0005
# Two connections for each stream.
_FEW_FILES = 4096


def run(config: Config) -> int:
    """Route until a signal; returns the exit status. Raises ConfigError before anything is started."""
    logging.basicConfig(
        level=config.server.log_level.upper(),
        format="%(asctime)s %(levelname)s %(message)s",
        stream=sys.stderr,
        force=True,
    )
    specs = named(config.router)
    if not specs and not config.router.replica_file and not config.router.replica_dns and not config.server.admin_key:
        raise ConfigError("name at least one replica: foreword route --replica http://host:8000")
    policy_named(config.router.policy)
    Callers(config)  # complains now, not on the loop
    listener = bind(config.server)
    _open_more_files()
    gc.set_threshold(*_COLLECT_AFTER)
    sys.setswitchinterval(_SWITCH)
    with _runner() as runner:
        return runner.run(_serve(config, listener, specs))


def _runner() -> asyncio.Runner:
    try:
        import uvloop
    except ImportError:  # not on every platform
        return asyncio.Runner()
    return asyncio.Runner(loop_factory=uvloop.new_event_loop)


def _open_more_files() -> None:
    """As many as the system allows: every stream has a connection to the client and one to the replica."""
    try:
        import resource
    except ImportError:  # not on every platform
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
        except (ValueError, OSError) as error:
            logger.warning("the limit of open files stays at %d: %s", soft, error)
    if 0 <= soft < _FEW_FILES:
        logger.warning("%d open files are enough for %d streams; for more, raise ulimit -n", soft, soft // 2)


async def _serve(config: Config, listener: socket.socket, specs: list[Spec]) -> int:
    router = Router(config)
    await router.start()
    membership = Membership(router, config.router)
    runner = web.AppRunner(
        create_app(router),
        handler_cancellation=True,
        keepalive_timeout=_KEEP_ALIVE,
        access_log=None,
        shutdown_timeout=_FLUSH,
    )
    await runner.setup()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal(number: int) -> None:
        if stop.is_set():  # a second one does not wait
            logging.shutdown()
            os._exit(128 + number)
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    site = web.SockSite(runner, listener)
    # What is loaded by now stays, the tokenizer's libraries too, and no collection looks at it again.
    gc.collect()
    gc.freeze()
    await site.start()
    membership.start(specs)
    host, port = listener.getsockname()[:2]
    logger.info("Foreword %s routes on http://%s:%d", __version__, f"[{host}]" if ":" in host else host, port)
    await stop.wait()
    await _drain(router, config.server.drain_seconds)
    membership.stop()
    await runner.cleanup()
    await router.stop()
    logger.info("stopped")
    return 0


async def _drain(router: Router, seconds: float) -> None:
    """Take no new requests, and let those inside come to their end."""
    router.draining = True
    logger.info("shutting down: running requests may take %g s more", seconds)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while router.inside:
                await asyncio.sleep(0.05)
