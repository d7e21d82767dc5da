"""Merging streams, and work that ends when its client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import pytest
from small_front import Client, front, route

from foreword.api.front import Answer, Call, Front
from foreword.api.sse import encode
from foreword.request_errors import EngineFailed
from foreword.server.endpoint import send_events
from foreword.server.generate_api import merge


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


async def events(source: Source) -> AsyncGenerator[bytes, None]:
    async with aclosing(source.items()) as items:
        async for number in items:
            yield encode({"number": number})


def streaming(source: Source) -> Front:
    async def stream(call: Call) -> None:
        await send_events(call, events(source))

    return front(route(stream))[0]


@pytest.mark.parametrize("limit", [0, 2])
def test_event_stream_closes_its_generator_on_disconnect(limit: int) -> None:
    """When the client goes away the generator is closed, also while it waits for its first event."""

    async def run() -> Client:
        client, source = Client(), Source(limit, "wait")
        stream = asyncio.create_task(client.ask(streaming(source)))
        async with asyncio.timeout(60):
            while not source.waits:
                await asyncio.sleep(0)
        assert not stream.done()
        client.gone.set()
        await asyncio.wait_for(stream, 60)
        assert source.closed
        return client

    assert len(asyncio.run(run()).messages) == (3 if limit else 0)


def test_event_stream_errors() -> None:
    """An error before the first event has its own status; one after it becomes the last event."""

    async def run(limit: int) -> list[dict[str, Any]]:
        client = Client()
        await client.ask(streaming(Source(limit, "fail")))
        return client.messages

    head, body = asyncio.run(run(0))
    assert head["status"] == 500 and b"broken" in body["body"]
    messages = asyncio.run(run(1))
    assert messages[0]["status"] == 200 and b"broken" in messages[-2]["body"]
    assert messages[-1] == {"type": "http.response.body", "body": b"", "more_body": False}


@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_a_client_that_leaves(method: str) -> None:
    """Work ends when its client leaves; a change that computes nothing is carried out."""

    async def run() -> None:
        begun, go, ended = asyncio.Event(), asyncio.Event(), list[str]()

        async def work(call: Call) -> Answer:
            begun.set()
            try:
                await go.wait()
            except asyncio.CancelledError:
                ended.append("cancelled")
                raise
            ended.append("done")
            return Answer(200)

        client = Client()
        asking = asyncio.create_task(client.ask(front(route(work, method))[0], method))
        async with asyncio.timeout(60):
            await begun.wait()
            client.gone.set()
            if method == "DELETE":
                await asyncio.sleep(0)
                go.set()
            await asking
        assert ended == (["cancelled"] if method == "GET" else ["done"])

    asyncio.run(run())


def test_encode_is_one_line() -> None:
    """An event is one line whatever text is in it, and lone surrogates do not break it."""
    assert encode({"text": "a\nb\u2028\r\n"}).count(b"\n") == 2
    assert encode({"text": "\ud800"})
