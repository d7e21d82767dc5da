"""A client that goes away frees what its request held."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from doors import Door, until, words


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
    with door.http(timeout=0.2) as client, pytest.raises(httpx.ReadTimeout):
        client.post("/v1/completions", json=long_request(door, n=4))
    until(lambda: is_idle(door), 5)


def test_leaving_the_queue(door: Door) -> None:
    """A client that leaves while its request still waits takes it out of the queue."""
    body = long_request(door, n=4, stream=True)
    with door.http() as busy, busy.stream("POST", "/v1/completions", json=body) as running:
        next(running.iter_lines())
        with door.http(timeout=0.2) as client, pytest.raises(httpx.ReadTimeout):
            client.post("/v1/completions", json=long_request(door))
        until(lambda: door.engine.status().waiting == 0, 5)
    until(lambda: is_idle(door))
