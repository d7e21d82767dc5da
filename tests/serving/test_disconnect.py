"""A client that goes away frees what its request held."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Any

import httpx
import pytest
from doors import Door, knocking, slow, until, words


def long_request(door: Door, **more: Any) -> dict[str, Any]:
    room = door.engine.info.max_model_len - 100
    return {"prompt": words("leave", 4), "max_tokens": room, "ignore_eos": True, **more}


def is_idle(door: Door) -> bool:
    status = door.engine.status()
    return status.running == 0 and status.waiting == 0


@pytest.mark.parametrize("n", [1, 3])
def test_leaving_a_stream_frees_blocks(door: Door, n: int) -> None:
    """When a client closes a stream in the middle, nothing runs any more and all blocks are free."""
    until(lambda: is_idle(door))
    free = door.engine.status().free_blocks
    with slow(door):
        with (
            door.http() as client,
            client.stream("POST", "/v1/completions", json=long_request(door, stream=True, n=n)) as s,
        ):
            lines = s.iter_lines()
            for _ in range(6):
                next(lines)
            assert door.engine.status().running > 0
        until(lambda: is_idle(door))
    assert door.engine.status().free_blocks == free


def test_leaving_before_the_answer_frees_blocks(door: Door) -> None:
    """When a client gives up waiting for an answer that is not streamed, nothing runs any more."""
    until(lambda: is_idle(door))
    with slow(door):
        with knocking(door.url, long_request(door, n=4)):
            until(lambda: door.engine.status().running == 4)
        until(lambda: is_idle(door))


def test_leaving_the_queue(door: Door) -> None:
    """A client that leaves while its request still waits takes it out of the queue."""
    until(lambda: is_idle(door))
    body = long_request(door, n=4, stream=True)
    with slow(door), door.http() as busy, busy.stream("POST", "/v1/completions", json=body) as running:
        lines = running.iter_lines()  # kept: without it the connection is closed
        next(lines)
        with knocking(door.url, long_request(door)):
            until(lambda: door.engine.status().waiting == 1)
        until(lambda: door.engine.status().waiting == 0)
        assert door.engine.status().running == 4
    until(lambda: is_idle(door))


def test_many_come_and_go(door: Door) -> None:
    """Clients that stay, leave early and give up, all at once, leave a whole pool and an idle engine behind."""
    until(lambda: is_idle(door))
    free = door.engine.status().free_blocks
    finished: list[int] = []

    def stay(number: int) -> None:
        body = {"prompt": words("crowd", number + 1), "max_tokens": 8, "ignore_eos": True}
        with door.http() as client:
            finished.append(client.post("/v1/completions", json=body).json()["usage"]["completion_tokens"])

    def leave(number: int) -> None:
        body = long_request(door, stream=True, n=1 + number % 2)
        with door.http() as client, client.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            for _ in range(number):
                next(lines)

    def give_up(number: int) -> None:
        with door.http(timeout=0.05 * (number + 1)) as client, contextlib.suppress(httpx.TimeoutException):
            client.post("/v1/completions", json=long_request(door))

    kinds = (stay, leave, give_up)
    threads = [threading.Thread(target=kinds[number % 3], args=(number,)) for number in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert finished == [8] * 8
    until(lambda: is_idle(door))
    assert door.engine.status().free_blocks == free
    asyncio.run(door.engine.check_integrity())
