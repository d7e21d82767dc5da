"""A client that goes away frees what its request held."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Any

import httpx
import pytest
from shared_server import SharedServer, abandoned_request, slow, until, words


def long_request(server: SharedServer, **more: Any) -> dict[str, Any]:
    room = server.engine.info.max_model_len - 100
    return {"prompt": words("leave", 4), "max_tokens": room, "ignore_eos": True, **more}


def is_idle(server: SharedServer) -> bool:
    status = server.engine.status()
    return status.running == 0 and status.waiting == 0


@pytest.mark.parametrize("n", [1, 3])
def test_disconnect_from_a_stream_frees_blocks(server: SharedServer, n: int) -> None:
    """When a client closes a stream in the middle, nothing runs any more and all blocks are free."""
    until(lambda: is_idle(server))
    free = server.engine.status().free_blocks
    with slow(server):
        with (
            server.http() as client,
            client.stream("POST", "/v1/completions", json=long_request(server, stream=True, n=n)) as s,
        ):
            lines = s.iter_lines()
            for _ in range(6):
                next(lines)
            assert server.engine.status().running > 0
        until(lambda: is_idle(server))
    assert server.engine.status().free_blocks == free


def test_disconnect_before_the_answer_frees_blocks(server: SharedServer) -> None:
    """When a client gives up waiting for an answer that is not streamed, nothing runs any more."""
    until(lambda: is_idle(server))
    with slow(server):
        with abandoned_request(server.url, long_request(server, n=4)):
            until(lambda: server.engine.status().running == 4)
        until(lambda: is_idle(server))


def test_disconnect_while_queued(server: SharedServer) -> None:
    """A client that leaves while its request still waits takes it out of the queue."""
    until(lambda: is_idle(server))
    body = long_request(server, n=4, stream=True)
    with slow(server), server.http() as busy, busy.stream("POST", "/v1/completions", json=body) as running:
        lines = running.iter_lines()  # kept: without it the connection is closed
        next(lines)
        with abandoned_request(server.url, long_request(server)):
            until(lambda: server.engine.status().waiting == 1)
        until(lambda: server.engine.status().waiting == 0)
        assert server.engine.status().running == 4
    until(lambda: is_idle(server))


@pytest.mark.slow
def test_many_disconnects(server: SharedServer) -> None:
    """Clients that stay, leave early and give up, all at once, leave a whole pool and an idle engine behind."""
    until(lambda: is_idle(server))
    free = server.engine.status().free_blocks
    finished: list[int] = []

    def stay(number: int) -> None:
        body = {"prompt": words("crowd", number + 1), "max_tokens": 8, "ignore_eos": True}
        with server.http() as client:
            finished.append(client.post("/v1/completions", json=body).json()["usage"]["completion_tokens"])

    def leave(number: int) -> None:
        body = long_request(server, stream=True, n=1 + number % 2)
        with server.http() as client, client.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            for _ in range(number):
                next(lines)

    def give_up(number: int) -> None:
        with server.http(timeout=0.05 * (number + 1)) as client, contextlib.suppress(httpx.TimeoutException):
            client.post("/v1/completions", json=long_request(server))

    kinds = (stay, leave, give_up)
    threads = [threading.Thread(target=kinds[number % 3], args=(number,)) for number in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert finished == [8] * 8
    until(lambda: is_idle(server))
    assert server.engine.status().free_blocks == free
    asyncio.run(server.engine.check_integrity())
