"""Moving requests to other servers: one that is asked for, or all of them when this server is to stop."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import httpx

from foreword.api.tenants import Tenant
from foreword.disaggregation.unclaimed import UnclaimedRequest
from foreword.engine.request import Request as EngineRequest
from foreword.errors import CannotMove, EngineFailed, ForewordError, ShuttingDown, TransferUnavailable
from foreword.server.active_requests import Running
from foreword.server.endpoint import Front
from foreword.server.handoff_message import seal
from foreword.server.instance_api import describe
from foreword.server.peers import server_url

if TYPE_CHECKING:
    from foreword.entrypoints.async_engine import AsyncEngine

logger = logging.getLogger(__name__)

_AT_ONCE: Final = 4
# A request whose KV is being loaded can be moved a moment later.
_TRIES: Final = 20
_BETWEEN: Final = 0.1


async def move(front: Front, running: Running, to: str) -> dict[str, Any]:
    """Move a request to the server at `to`. Returns how it went; raises CannotMove, TransferError: then it goes on here."""
    running.check_movable()
    return await _move(front, running.request, to, running.job.caller.headers, seal(running.job))


async def _move(
    front: Front, request: EngineRequest, to: str, headers: Mapping[str, str], envelope: bytes
) -> dict[str, Any]:
    engine = front.gate.loaded
    assert engine is not None
    target = server_url(to, "to")
    address = _suits(engine, request, await _ask(target, headers), target)
    moved = await engine.migrate(request.id, address, to=target, envelope=envelope)
    return {"id": request.id, "to": target, **asdict(moved)}


async def _ask(target: str, headers: Mapping[str, str]) -> dict[str, Any]:
    """What the server at `target` says of itself to this caller."""
    try:
        async with httpx.AsyncClient(timeout=10, trust_env=False, verify=target.startswith("https")) as client:
            answer = await client.get(f"{target}/v1/instance", headers=dict(headers))
        if answer.status_code == 401:
            raise CannotMove(f"{target} does not know the request's API key; all servers need the same keys")
        found = answer.json()
        if answer.status_code != 200 or not isinstance(found, dict) or "transfer" not in found:
            raise TransferUnavailable(f"{target} is not ready to take requests (HTTP {answer.status_code})")
    except (httpx.HTTPError, ValueError) as error:
        raise TransferUnavailable(f"no answer from {target}: {error or type(error).__name__}") from error
    return found


def _suits(engine: AsyncEngine, request: EngineRequest, there: Mapping[str, Any], target: str) -> str:
    """The transfer address of a server that can go on with the request. Raises CannotMove."""
    here = describe(engine, Tenant("", request.salt))
    if here["transfer"] is None:
        raise CannotMove("this server has no transfer endpoint (--role, --transfer-bind)")
    if not there["transfer"]:
        raise CannotMove(f"{target} has no transfer endpoint (--role, --transfer-bind)")
    if there["transfer"] == here["transfer"]:
        raise CannotMove(f"the request runs at {target} already")
    if there.get("draining"):
        raise CannotMove(f"{target} is about to stop itself")
    for word, what in (("fingerprint", "another model"), ("layout", "another block size, dtype or order of KV")):
        if there.get(word) != here[word]:
            raise CannotMove(f"{target} has {what}")
    if there.get("tenant") != here["tenant"]:
        raise CannotMove(
            f"{target} keeps this caller's blocks under another salt: give all servers the same --tenant-secret and keys"
        )
    return str(there["transfer"])


async def drain(front: Front, targets: Sequence[str], seconds: float = 60.0) -> dict[str, Any]:
    """Let nobody in, and move every request that can move to one of the servers, in turn: those that run for a client here,
    and those that moved here and that nobody has fetched yet. What stays, goes on here."""
    front.gate.close()
    engine = front.gate.loaded
    if engine is None:
        return {"requests": 0, "moved": 0}
    if engine.instance is not None:
        engine.instance.draining = True
    places = asyncio.Semaphore(_AT_ONCE)
    turns = itertools.count()
    deadline = time.monotonic() + seconds

    async def one(name: str, work: Callable[[str], Awaitable[object]]) -> bool:
        async with places:
            start = next(turns)
            order = [targets[(start + i) % len(targets)] for i in range(len(targets))]
            return await _move_somewhere(name, work, order, deadline)

    movable = await _movable(front, engine)
    results = await asyncio.gather(*(one(*item) for item in movable.items())) if targets else []
    moved = sum(results)
    if movable:
        logger.info("draining: %d of %d requests moved", moved, len(movable))
    return {"requests": len(movable), "moved": moved}


async def _movable(front: Front, engine: AsyncEngine) -> dict[str, Callable[[str], Awaitable[object]]]:
    """What moves each request, by its id."""
    waiting: Sequence[UnclaimedRequest] = ()
    with contextlib.suppress(EngineFailed, ShuttingDown):
        # From here on none is added: what arrives while the server drains is not taken.
        waiting = await engine.unclaimed_requests()
    unclaimed = {one.request.id: partial(_move_unclaimed, front, one) for one in waiting if one.is_running}
    # After that: a client that claims a request is in flight before the request is claimed.
    running = [one for one in front.in_flight.all() if one.departure is None]
    return unclaimed | {one.request.id: partial(move, front, one) for one in running}


async def _move_unclaimed(front: Front, unclaimed: UnclaimedRequest, to: str) -> dict[str, Any]:
    """Move on a request that moved here. Whoever comes to fetch it gets what it said here, and is told where it went."""
    request = unclaimed.request
    return await _move(front, request, to, front.tenants.headers_for(request.salt), unclaimed.envelope)


async def _move_somewhere(
    name: str, work: Callable[[str], Awaitable[object]], targets: Sequence[str], deadline: float
) -> bool:
    for _ in range(_TRIES):
        again = False
        for target in targets:
            if time.monotonic() >= deadline:
                return False
            try:
                await work(target)
                return True
            except CannotMove as error:
                again |= error.reason == "busy"
                logger.warning("request %s was not moved to %s: %s", name, target, error.message)
            except ForewordError as error:
                logger.warning("request %s was not moved to %s: %s", name, target, error.message)
        if not again:
            return False
        await asyncio.sleep(_BETWEEN)
    return False
