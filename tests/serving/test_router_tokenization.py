"""Replicas that tokenize or detokenize late, or not at once: no request fails because of that."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from router_parts import Loop, Relay, RouterThread, Scissors
from shared_server import SharedServers, until, words

# A stop string may span the failover, so the router must detokenize.
ASKED = {"prompt": "def read_file(path):\n", "max_tokens": 12, "temperature": 0, "ignore_eos": True, "stop": "\x00"}


class Mute(Relay):
    """A relay whose server does not respond to the first `silent` requests at `path`: their connections break, or
    they wait for `speak`. The router detokenizes for servers that are not Foreword's only, as which it takes those that
    are silent there."""

    def __init__(self, loop: Loop, target: str, scissors: Scissors, path: str, silent: int, *, loses: bool) -> None:
        self._path = f"POST {path} ".encode()
        self._silent = silent
        self._loses = loses
        self._speaks = asyncio.Event()
        self.asked = 0
        super().__init__(loop, target, scissors, as_vllm=path.endswith("/detokenize"))

    def speak(self) -> None:
        self._loop.call(self._speaks.set)

    async def _passes(self, data: bytes, left: list[int | None]) -> bool:
        if data.startswith(self._path):
            self.asked += 1
            if self.asked <= self._silent:
                if self._loses:
                    return False
                await self._speaks.wait()
        return await super()._passes(data, left)


@pytest.fixture(scope="module")
def loop() -> Loop:
    return Loop()


@contextmanager
def routed(*relays: Relay, more: tuple[str, ...] = ()) -> Iterator[RouterThread]:
    urls = [argument for relay in relays for argument in ("--replica", relay.url)]
    process = RouterThread(*urls, "--failures", "1000", *more)
    try:
        yield process.wait_for(len(relays))
    finally:
        process.kill()
        for relay in relays:
            relay.close()


def said(url: str, body: dict[str, Any]) -> str:
    """The text of a streamed answer that ends as it should."""
    with httpx.stream("POST", f"{url}/v1/completions", json={**body, "stream": True}, timeout=120) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert answer.status_code == 200 and lines[-1] == "[DONE]", (answer.status_code, lines)
    return "".join(choice["text"] for line in lines[:-1] for choice in json.loads(line)["choices"])


@pytest.mark.parametrize(
    ("replicas", "silent"),
    [(1, 2), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((2, 1), (2, 2)))],
)
@pytest.mark.parametrize("loses", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_broken_stream_is_continued_although_detokenizing_fails(
    shared: SharedServers, loop: Loop, replicas: int, silent: int, loses: bool
) -> None:
    """A broken stream is continued with the same text although replicas detokenize late or lose the request, and
    even if there is no other replica."""
    scissors = Scissors()
    relays = [Mute(loop, shared.open.url, scissors, "/detokenize", silent, loses=loses) for _ in range(replicas)]
    with routed(*relays, more=("router.tokenize_timeout=60" if loses else "router.tokenize_timeout=2",)) as router:
        scissors.cut_after(5)
        assert said(router.url, ASKED) == said(shared.open.url, ASKED)
        assert router.metric("foreword:router_continuations_total", outcome="continued") == 1
        assert sum(relay.asked for relay in relays) > silent


def sent(router: RouterThread, body: dict[str, Any]) -> socket.socket:
    """A connection on which a request was sent."""
    host, _, port = router.url.removeprefix("http://").rpartition(":")
    data = json.dumps(body).encode()
    made = socket.create_connection((host, int(port)), timeout=120)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n"
    made.sendall(f"{head}content-type: application/json\r\n\r\n".encode() + data)
    return made


def test_the_first_of_two_equal_prompts_disconnects(shared: SharedServers, loop: Loop) -> None:
    """Two clients send the same prompt, and the first one disconnects while it is being tokenized: the second one is
    served."""
    relays = [Mute(loop, shared.open.url, Scissors(), "/v1/tokenize", 1, loses=False) for _ in range(2)]
    body = {"prompt": words("both", 30), "max_tokens": 2, "temperature": 0, "ignore_eos": True}
    with routed(*relays, more=("router.tokenize_timeout=60",)) as router:
        with sent(router, body):
            until(lambda: sum(relay.asked for relay in relays) >= 1)  # the second replica is asked 20 ms later
            second = sent(router, body)
            # A later request is answered: so the second one is inside.
            assert httpx.get(f"{router.url}/health", timeout=60).status_code == 200
        until(lambda: " 499 " in router.text)
        for relay in relays:
            relay.speak()
        with second:
            assert second.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
        # Both requests share one question at each replica.
        assert max(relay.asked for relay in relays) == 1
