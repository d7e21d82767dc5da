"""Live migration: move one running request to another server, or all of them when this server is about to stop, and fetch the
deltas from there for a client that stayed here.

The hand-off message says how a migrated request's answer is written. It travels with the request; engines do not read it.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import quote

import msgspec
from msgspec.structs import replace

from foreword.api import sse
from foreword.api.dialects.answer_reader import EventParser, ServerSentEvent, error_of
from foreword.api.dialects.dialect_writers import WRITERS
from foreword.api.dialects.writer import ResponseHead
from foreword.api.request import GenerateRequest
from foreword.api.tools.parser import AnswerFormats
from foreword.decoders import convert, decode_json
from foreword.disaggregation.unclaimed import UnclaimedRequest
from foreword.engine.request import Delta, MigratedTo, Request
from foreword.errors import BadRequest, ForewordError
from foreword.request_errors import EngineFailed, ShuttingDown
from foreword.server.endpoint import ServerContext
from foreword.server.instance_api import describe
from foreword.server.job import FOLLOW_HEADER, Caller, Job, reader_for
from foreword.server.peers import server_url
from foreword.transfer.errors import CannotMigrate, TransferUnavailable

if TYPE_CHECKING:
    from foreword.entrypoints.async_engine import AsyncEngine
    from foreword.tokens.tokenizer import Tokenizer

T = TypeVar("T")
VERSION: Final = 2
# Names of events between servers, and between a server and a router.
MOVED: Final = "foreword.moved"
DELTA: Final = "foreword.delta"
logger = logging.getLogger(__name__)

_CONCURRENT: Final = 4
# A request whose KV is being loaded cannot migrate now, but a moment later.
_ATTEMPTS: Final = 20
_RETRY_SECONDS: Final = 0.1
# Seconds without any byte after which the other server counts as dead. It sends a comment every KEEP_ALIVE seconds.
_READ_TIMEOUT: Final = 30.0


async def migrate(context: ServerContext, job: Job, to: str) -> dict[str, Any]:
    """Migrate a request to the server at `to`. Returns a summary.

    Raises CannotMigrate or TransferError; the request then continues here.
    """
    job.check_movable()
    return await _migrate(context, job.requests[0], job.owner, to, job.caller.headers, encode(job))


async def _migrate(
    context: ServerContext, request: Request, owner: bytes, to: str, headers: Mapping[str, str], message: bytes
) -> dict[str, Any]:
    engine = context.admission.loaded
    assert engine is not None
    target = server_url(to, "to")
    address = _check_target(engine, owner, await _instance(target, headers), target)
    moved = await engine.migrate(request.id, address, to=target, envelope=message)
    return {"id": request.id, "to": target, **asdict(moved)}


async def _instance(target: str, headers: Mapping[str, str]) -> dict[str, Any]:
    """The `/v1/instance` of the server at `target`, as this caller sees it."""
    import httpx

    try:
        async with httpx.AsyncClient(timeout=10, trust_env=False, verify=target.startswith("https")) as client:
            answer = await client.get(f"{target}/v1/instance", headers=dict(headers))
        if answer.status_code == 401:
            raise CannotMigrate(f"{target} does not know the request's API key; all servers need the same keys")
        found = answer.json()
        if answer.status_code != 200 or not isinstance(found, dict) or "transfer" not in found:
            raise TransferUnavailable(f"{target} is not ready to take requests (HTTP {answer.status_code})")
    except (httpx.HTTPError, ValueError) as error:
        raise TransferUnavailable(f"no answer from {target}: {error or type(error).__name__}") from error
    return found


def _check_target(engine: AsyncEngine, owner: bytes, there: Mapping[str, Any], target: str) -> str:
    """The transfer address of a server that can continue the request. Raises CannotMigrate."""
    here = describe(engine, owner)
    if here["transfer"] is None:
        raise CannotMigrate("this server has no transfer endpoint (--role, --transfer-bind)")
    if not there["transfer"]:
        raise CannotMigrate(f"{target} has no transfer endpoint (--role, --transfer-bind)")
    if there["transfer"] == here["transfer"]:
        raise CannotMigrate(f"the request runs at {target} already")
    if there.get("draining"):
        raise CannotMigrate(f"{target} is draining itself")
    for key, difference in (("fingerprint", "another model"), ("layout", "another KV layout (block size, dtype)")):
        if there.get(key) != here[key]:
            raise CannotMigrate(f"{target} has {difference}")
    if there.get("tenant") != here["tenant"]:
        raise CannotMigrate(
            f"{target} keeps this caller's blocks under another salt: give all servers the same --tenant-secret and keys"
        )
    return str(there["transfer"])


async def drain(context: ServerContext, targets: Sequence[str], seconds: float = 60.0) -> dict[str, Any]:
    """Refuse new requests, and migrate those that can migrate to the targets, in turn.

    That includes requests that migrated here and that no client has fetched yet. The others finish here.
    """
    context.admission.close()
    engine = context.admission.loaded
    if engine is None:
        return {"requests": 0, "moved": 0}
    if engine.instance is not None:
        engine.instance.draining = True
    slots = asyncio.Semaphore(_CONCURRENT)
    turns = itertools.count()
    deadline = time.monotonic() + seconds

    async def one(request_id: str, work: Callable[[str], Awaitable[object]]) -> bool:
        async with slots:
            first = next(turns)
            order = [targets[(first + i) % len(targets)] for i in range(len(targets))]
            return await _migrate_to_any(request_id, work, order, deadline)

    movable = await _movable(context, engine)
    results = await asyncio.gather(*(one(*item) for item in movable.items())) if targets else []
    moved = sum(results)
    if movable:
        logger.info("draining: %d of %d requests migrated", moved, len(movable))
    return {"requests": len(movable), "moved": moved}


async def _movable(context: ServerContext, engine: AsyncEngine) -> Mapping[str, Callable[[str], Awaitable[object]]]:
    """Per request id, the function that migrates it to a URL."""
    found: Sequence[UnclaimedRequest] = ()
    with suppress(EngineFailed, ShuttingDown):
        # The list does not grow from here on: a draining server takes no migrated requests.
        found = await engine.unclaimed_requests()
    unclaimed = {one.request.id: partial(_migrate_unclaimed, context, one) for one in found if one.is_running}
    # In this order: a fetched request is active before it leaves the list of unclaimed ones.
    active = {
        job.requests[0].id: partial(migrate, context, job) for job in context.active.all() if job.departure is None
    }
    return unclaimed | active


async def _migrate_unclaimed(context: ServerContext, unclaimed: UnclaimedRequest, to: str) -> dict[str, Any]:
    """Migrate a request on that migrated here and was not fetched. Its client gets the output so far and the new address."""
    owner = owner_of(unclaimed.envelope)
    headers = context.tenants.headers_for(owner)
    return await _migrate(context, unclaimed.request, owner, to, headers, unclaimed.envelope)


async def _migrate_to_any(
    request_id: str, work: Callable[[str], Awaitable[object]], targets: Sequence[str], deadline: float
) -> bool:
    for _ in range(_ATTEMPTS):
        retry = False
        for target in targets:
            if time.monotonic() >= deadline:
                return False
            try:
                await work(target)
                return True
            except ForewordError as error:
                retry |= isinstance(error, CannotMigrate) and error.reason == "busy"
                logger.warning("request %s was not migrated to %s: %s", request_id, target, error.message)
        if not retry:
            return False
        await asyncio.sleep(_RETRY_SECONDS)
    return False


class HandoffMessage(msgspec.Struct, frozen=True):
    """`owner` is the salt of the tenant; `request` is without its messages and prompts."""

    version: int
    request: GenerateRequest
    head: ResponseHead
    owner: bytes
    streams: bool


def encode(job: Job) -> bytes:
    """From a job with one prompt and one answer."""
    request = replace(job.request, messages=(), prompts=(), output_format=None)
    return msgspec.json.encode(HandoffMessage(VERSION, request, job.head, job.owner, job.streams))


def owner_of(message: bytes) -> bytes:
    """The salt of the tenant that the request belongs to. Raises BadRequest."""
    return _decode(message).owner


def resume(tokenizer: Tokenizer, unclaimed: UnclaimedRequest, formats: AnswerFormats, caller: Caller) -> Job:
    """The job that continues after `unclaimed.output`. Raises BadRequest for a message that this version does not know."""
    message = _decode(unclaimed.envelope)
    request = message.request
    writer = WRITERS[request.dialect](request, message.head)
    job = Job(
        request,
        message.head,
        writer,
        (unclaimed.request,),
        (reader_for(tokenizer, request, formats, unclaimed.request, 0),),
        message.owner,
        message.streams,
        caller,
        resumed=len(unclaimed.output),
    )
    job.resume(tokenizer, [unclaimed.output])
    return job


def _decode(message: bytes) -> HandoffMessage:
    try:
        found = decode_json(message, HandoffMessage)
    except (msgspec.DecodeError, ValueError) as error:
        raise _unknown() from error
    if found.version != VERSION:
        raise _unknown()
    return found


def _unknown() -> BadRequest:
    return BadRequest("the migrated request's hand-off message has a format that this server does not know")


def moved_event(departure: MigratedTo) -> bytes:
    """The last event of a stream whose client reconnects by itself."""
    return sse.encode(asdict(departure), MOVED)


def delta_event(delta: Delta) -> bytes:
    """A delta for another server."""
    return sse.encode(msgspec.to_builtins(delta, builtin_types=(bytes,)), DELTA)


async def follow(departure: MigratedTo, caller: Caller, stop: asyncio.Event) -> AsyncGenerator[Delta, None]:
    """The deltas of a migrated request, also when it migrates again.

    Raises ShuttingDown once `stop` is set, TransferUnavailable if the other server is gone, EngineFailed with the other
    server's error.
    """
    source: MigratedTo | None = departure
    while source is not None:
        onward: MigratedTo | None = None
        async with aclosing(_until_stopped(_fetch(source, caller), stop)) as items:
            async for item in items:
                if isinstance(item, MigratedTo):
                    onward = item
                    break
                yield item
                if item.finish_reason is not None:
                    return
        if onward is None:
            raise TransferUnavailable(f"the server at {source.to}, where the request migrated to, has ended")
        source = onward


async def _fetch(source: MigratedTo, caller: Caller) -> AsyncGenerator[Delta | MigratedTo, None]:
    import httpx

    url = f"{source.to.rstrip('/')}/v1/requests/{quote(source.request_id, safe='')}/stream"
    headers = {**caller.headers, FOLLOW_HEADER: "1"}
    timeout = httpx.Timeout(10, read=_READ_TIMEOUT)
    query = {"from": str(source.tokens), "format": "deltas"}
    parser = EventParser()
    try:
        async with (
            httpx.AsyncClient(timeout=timeout, trust_env=False, verify=url.startswith("https")) as client,
            client.stream("GET", url, params=query, headers=headers) as response,
        ):
            if response.status_code != 200:
                message = _error_message(await response.aread())
                raise TransferUnavailable(f"{source.to} does not continue the request: {message}")
            async for piece in response.aiter_bytes():
                for event in parser.feed(piece):
                    if event.data:
                        yield _read_event(event)
    except httpx.HTTPError as error:
        text = f"the connection to {source.to}, where the request migrated to, broke: {error}"
        raise TransferUnavailable(text) from error


def _read_event(event: ServerSentEvent) -> Delta | MigratedTo:
    if event.name == MOVED:
        return decode_json(event.data, MigratedTo)
    if event.name == DELTA:
        return convert(json.loads(event.data), Delta)
    raise EngineFailed(_error_message(event.data))


def _error_message(data: bytes) -> str:
    return error_of(data).message or "it did not answer as a Foreword server does"


async def _until_stopped(items: AsyncGenerator[T, None], stop: asyncio.Event) -> AsyncGenerator[T, None]:
    """The items. Raises ShuttingDown once `stop` is set."""
    stopped = asyncio.ensure_future(stop.wait())
    following: asyncio.Future[T] | None = None
    try:
        while True:
            following = asyncio.ensure_future(anext(items))
            await asyncio.wait((following, stopped), return_when=asyncio.FIRST_COMPLETED)
            if not following.done():
                raise ShuttingDown("The server is shutting down and ended the request before its end")
            try:
                item = following.result()
            except StopAsyncIteration:
                return
            following = None
            yield item
    finally:
        stopped.cancel()
        if following is not None:
            following.cancel()
            with suppress(asyncio.CancelledError, StopAsyncIteration, ForewordError):
                await following
        await items.aclose()
