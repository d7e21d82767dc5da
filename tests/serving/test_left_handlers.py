"""Handlers whose clients have left: what they raise then is looked at, and never left to the event loop to report."""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from small_front import Client, front, route

from foreword.api import http
from foreword.api.dialects.decode import Body
from foreword.api.front import Call, Front
from foreword.api.routes import NO_BODY, JsonBody, Meter
from foreword.errors import BadRequest, StoreError
from foreword.process_config import ServerConfig
from foreword.server.endpoint import send_events
from foreword.tasks import background, shared, to_its_end

KINDS = [
    {"method": method, "meter": meter, "body": body}
    for method, meter, body in itertools.product(
        ("GET", "POST", "PUT", "DELETE"), (Meter.FREE, Meter.REQUEST, Meter.TOKENS), (NO_BODY, JsonBody.of(Body))
    )
    if method in ("POST", "PUT") or body is NO_BODY
]
ERRORS = [BadRequest("no"), StoreError("no"), RuntimeError("no"), asyncio.CancelledError(), None]


class Handler:
    """Waits at a gate until its client has left, and raises. `streams`: after it has begun to stream."""

    def __init__(self, error: BaseException | None, *, streams: bool = False) -> None:
        self.error = error
        self.begun, self.gate, self.ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._streams = streams

    async def __call__(self, call: Call) -> dict[str, Any] | None:
        try:
            if self._streams:
                await send_events(call, self._events())
                return None
            self.begun.set()
            await self.gate.wait()
            return {}
        finally:
            self.ended.set()
            if self.error is not None:
                raise self.error

    async def _events(self) -> Any:
        yield b"data: 1\n\n"
        self.begun.set()
        await self.gate.wait()


@asynccontextmanager
async def unreported() -> AsyncIterator[None]:
    """Asserts that the block leaves nothing to the event loop's exception handler."""
    reported: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context))
    yield
    for _ in range(20):
        await asyncio.sleep(0)
    gc.collect()
    await asyncio.sleep(0)
    assert not reported


async def over_asgi(served: Front, method: str, left: Callable[[], Awaitable[None]]) -> None:
    client = Client()
    asked = asyncio.ensure_future(client.ask(served, method, body=b"{}" if method in ("POST", "PUT") else b""))
    await left()
    client.gone.set()
    # Of a change the client is not watched, the server cancels the call.
    for _ in range(5):
        await asyncio.sleep(0)
    asked.cancel()
    await asyncio.wait([asked])
    if not asked.cancelled():
        asked.exception()


async def over_http(served: Front, method: str, left: Callable[[], Awaitable[None]]) -> None:
    config = ServerConfig(port=0)
    listener = http.bind(config)
    async with http.serving(served, listener, config):
        loop = asyncio.get_running_loop()
        client = socket.socket()
        client.setblocking(False)
        await loop.sock_connect(client, listener.getsockname()[:2])
        body = (
            b"content-type: application/json\r\ncontent-length: 2\r\n\r\n{}" if method in ("POST", "PUT") else b"\r\n"
        )
        await loop.sock_sendall(client, method.encode() + b" /v1/x HTTP/1.1\r\nhost: x\r\n" + body)
        await left()
        client.close()
        while served.active:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("serve", [over_asgi, over_http])
def test_handlers_that_raise_when_their_client_has_left(serve: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever a route declares and its handler raises: nothing is reported as never retrieved; an error that no code expected
    is in the log with the request's id, and one that the client would have been told at level debug."""

    async def run() -> None:
        errors = ERRORS if serve is over_asgi else [RuntimeError("no")]
        for kind in KINDS:
            async with unreported():
                for error in errors:
                    handler = Handler(error)
                    served, _ = front(route(handler, **kind))
                    await serve(served, kind["method"], handler.begun.wait)
                    handler.gate.set()
                    await handler.ended.wait()
        for error in errors:
            handler = Handler(error, streams=True)
            served, _ = front(route(handler, "POST", meter=Meter.REQUEST))
            async with unreported():
                await serve(served, "POST", handler.begun.wait)

    with caplog.at_level(logging.DEBUG, "foreword"):
        asyncio.run(run())
    records = [one for one in caplog.records if "whose client has left" in one.getMessage()]
    assert {one.levelname for one in records} == ({"DEBUG", "WARNING", "ERROR"} if serve is over_asgi else {"ERROR"})
    assert all((one.exc_info is not None) == (one.levelname == "ERROR") for one in records)


def test_tasks_that_outlive_their_callers(caplog: pytest.LogCaptureFixture) -> None:
    """A task is kept until its end, and its error is logged where no caller is left, and only there."""

    async def fail(gate: asyncio.Event) -> None:
        await gate.wait()
        raise RuntimeError("no")

    async def run() -> None:
        async with unreported():
            gate = asyncio.Event()
            callers = [asyncio.ensure_future(to_its_end(fail(gate), "one")) for _ in range(2)]
            kept, several = background(fail(gate), "two"), shared(fail(gate))
            callers += [asyncio.ensure_future(asyncio.shield(several)) for _ in range(2)]
            await asyncio.sleep(0)
            for caller in callers[::2]:
                caller.cancel()
            gc.collect()
            gate.set()
            ended = await asyncio.gather(*callers, kept, return_exceptions=True)
            assert [type(one) for one in ended] == [asyncio.CancelledError, RuntimeError] * 2 + [RuntimeError]

    asyncio.run(run())
    said = sorted(one.getMessage() for one in caplog.records if one.name == "foreword.tasks")
    assert said == ["one failed", "two failed"]
