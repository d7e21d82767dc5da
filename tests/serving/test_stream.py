"""Merging streams, and work that ends when its client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from foreword.api.sse import encode
from foreword.errors import EngineFailed
from foreword.server.stream import EventStream, merge, unless_disconnected


class Source:
    """Counts to `limit`, then ends, fails or waits for ever; remembers whether it was closed."""

    def __init__(self, limit: int, then: str = "end") -> None:
        self.limit, self.then, self.closed, self.waits = limit, then, False, False

    async def items(self) -> AsyncGenerator[int, None]:
        try:
            for number in range(self.limit):
                await asyncio.sleep(0)
                yield number
            if self.then == "fail":
                raise EngineFailed("broken")
            if self.then == "wait":
                self.waits = True
                await asyncio.Event().wait()
        finally:
            self.closed = True


@pytest.mark.parametrize("limits", [[3], [3, 0, 5]])
def test_merge_gives_everything_in_order(limits: list[int]) -> None:
    """Every item of every stream arrives once, in its stream's order."""

    async def run() -> list[tuple[int, int]]:
        return [item async for item in merge([Source(limit).items() for limit in limits])]

    got = asyncio.run(run())
    for number, limit in enumerate(limits):
        assert [item for stream, item in got if stream == number] == list(range(limit))


@pytest.mark.parametrize("others", [[], [Source(2, "wait"), Source(0, "wait")]])
def test_merge_fails_with_its_first_error(others: list[Source]) -> None:
    """When one stream fails the merged one fails with its error at once, and all others are closed."""
    failing = Source(1, "fail")

    async def run() -> None:
        async for _ in merge([source.items() for source in [failing, *others]]):
            pass

    with pytest.raises(EngineFailed, match="broken"):
        asyncio.run(run())
    assert all(source.closed for source in [failing, *others])


@pytest.mark.parametrize("count", [1, 3])
def test_closing_the_merged_stream_closes_all(count: int) -> None:
    """Closing the merged stream closes every stream before it returns."""
    sources = [Source(5, "wait") for _ in range(count)]

    async def run() -> None:
        merged = merge([source.items() for source in sources])
        for _ in range(2 * count):
            await anext(merged)
        await merged.aclose()
        assert all(source.closed for source in sources)

    asyncio.run(run())


class Client:
    """An ASGI client that disconnects when `gone` is set."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()
        self.messages: list[dict[str, Any]] = []

    async def receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.messages.append(message)


async def events(source: Source) -> AsyncGenerator[bytes, None]:
    async for number in source.items():
        yield encode({"number": number})


def test_event_stream_closes_its_generator_on_disconnect() -> None:
    """When the client goes away the generator is closed, also while it waits for its first event."""

    async def run(limit: int) -> Client:
        client, source = Client(), Source(limit, "wait")
        stream = asyncio.create_task(EventStream(_closing(source))({}, client.receive, client.send))
        async with asyncio.timeout(60):
            while not source.waits:
                await asyncio.sleep(0)
        assert not stream.done()
        client.gone.set()
        await asyncio.wait_for(stream, 60)
        assert source.closed
        return client

    assert len(asyncio.run(run(2)).messages) == 3
    assert asyncio.run(run(0)).messages == []


async def _closing(source: Source) -> AsyncGenerator[bytes, None]:
    from contextlib import aclosing

    async with aclosing(source.items()) as items:
        async for number in items:
            yield encode({"number": number})


def test_event_stream_errors() -> None:
    """An error before the first event leaves the response to others; one after it becomes the last event."""

    async def run(limit: int) -> list[dict[str, Any]]:
        client = Client()
        await EventStream(_closing(Source(limit, "fail")))({}, client.receive, client.send)
        return client.messages

    with pytest.raises(EngineFailed):
        asyncio.run(run(0))
    messages = asyncio.run(run(1))
    assert messages[0]["status"] == 200 and b"broken" in messages[-2]["body"]
    assert messages[-1] == {"type": "http.response.body", "body": b"", "more_body": False}


def test_unless_disconnected() -> None:
    """Work ends with its result, or with None and cancelled when the client goes away or it is cancelled itself."""
    begun = cancelled = 0

    async def work(seconds: float) -> str:
        nonlocal begun, cancelled
        begun += 1
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            cancelled += 1
            raise
        return "done"

    async def run() -> None:
        client = Client()
        assert await unless_disconnected(client.receive, work(0)) == "done"
        asyncio.get_running_loop().call_later(0.01, client.gone.set)
        assert await unless_disconnected(client.receive, work(600)) is None
        assert cancelled == 1
        outer = asyncio.create_task(unless_disconnected(Client().receive, work(600)))
        async with asyncio.timeout(60):
            while begun < 3:
                await asyncio.sleep(0)
        outer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await outer
        assert cancelled == 2

    asyncio.run(run())


def test_encode_is_one_line() -> None:
    """An event is one line whatever text is in it, and lone surrogates do not break it."""
    assert encode({"text": "a\nb\u2028\r\n"}).count(b"\n") == 2
    assert encode({"text": "\ud800"})
