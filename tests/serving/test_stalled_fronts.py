"""Connections of clients after a time in which the server's process stood still."""

from __future__ import annotations

import asyncio
import time
from contextlib import closing
from socket import create_connection
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop
from small_front import front, route

from foreword.api import http
from foreword.api.front import Call
from foreword.process_config import ServerConfig


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("data", [b"GET /v1/x HTTP/1.1\r\nhost: x\r\n\r\n", b"GET /v1/x HTTP/1.1\r\n"])
def test_requests_that_came_while_the_process_stood_still(
    monkeypatch: pytest.MonkeyPatch, loop_factory: Any, data: bytes
) -> None:
    """A process stands still for longer than a head may take. The requests that have come meanwhile are served: their bytes
    wait in the system, and their clients were not late. A connection whose head is incomplete then is closed."""
    stood_still = [0.0]
    monkeypatch.setattr(http, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + stood_still[0]))
    monkeypatch.setattr(http, "_SWEEP_SECONDS", 0.01)

    async def handler(call: Call) -> dict[str, Any]:
        return {}

    async def run() -> None:
        served, _ = front(route(handler))
        config = ServerConfig(port=0)
        listener = http.bind(config)
        loop = asyncio.get_running_loop()
        async with http.serving(served, listener, config):
            with closing(create_connection(listener.getsockname(), 60)) as client:
                client.setblocking(False)
                accepted = create_connection(listener.getsockname(), 60)
                accepted.sendall(b"GET /v1/x HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
                accepted.setblocking(False)
                with closing(accepted):  # by then `client` was accepted, too
                    assert (await loop.sock_recv(accepted, 1000)).startswith(b"HTTP/1.1 200 ")
                client.send(data)
                stood_still[0] += 2 * config.head_timeout
                time.sleep(0.05)  # a sweep is due at once
                answer = await loop.sock_recv(client, 1000)
                assert answer.startswith(b"HTTP/1.1 200 ") if data.endswith(b"\r\n\r\n") else answer == b""

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(run())
