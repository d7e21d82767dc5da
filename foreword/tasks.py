"""Tasks of an event loop that may outlive their callers.

An event loop keeps no reference to its tasks, and reports an error that no caller fetches when the task is collected, without
saying whose it was. These functions keep the task until its end, and log its error where no caller is left.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from functools import partial
from typing import Any, Final, TypeVar

from foreword.errors import ForewordError

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_RUNNING: Final = set[asyncio.Future[Any]]()


def background(work: Coroutine[Any, Any, Result], what: str) -> asyncio.Task[Result]:
    """Run a coroutine in the background. `what`: its name in the log, if it fails."""
    task = asyncio.get_running_loop().create_task(work)
    log_failure(task, what)
    return task


def log_failure(task: asyncio.Future[Any], what: str) -> None:
    """Keep a task until its end, and log its error."""
    _RUNNING.add(task)
    task.add_done_callback(partial(_ended, what))


def shared(work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
    """Run a coroutine for several callers, each of which waits with `asyncio.shield` and gets its error; all may have left."""
    task = asyncio.get_running_loop().create_task(work)
    _RUNNING.add(task)
    task.add_done_callback(_fetched)
    return task


async def to_its_end(work: Coroutine[Any, Any, Result], what: str) -> Result:
    """Run a coroutine that is carried out also if its caller is cancelled, which logs its error then as that of `what`."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        log_failure(task, what)
        raise


def _fetched(task: asyncio.Future[Any]) -> None:
    _RUNNING.discard(task)
    if not task.cancelled():
        task.exception()


def _ended(what: str, task: asyncio.Future[Any]) -> None:
    _RUNNING.discard(task)
    error = None if task.cancelled() else task.exception()
    if isinstance(error, ForewordError):
        # A caller would have been told of its own mistake.
        level = logging.DEBUG if error.fault == "client" else logging.WARNING
        logger.log(level, "%s failed: %s", what, error.message)
    elif error is not None:
        logger.error("%s failed", what, exc_info=error)
