"""KV events of tiers: the router knows blocks that a server has in memory, on disk or in a shared store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import http_client
import pytest
from router_parts import RouterProcess
from server_process import ControlledProcess, running
from shared_server import until, words

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
ADMIN = {"authorization": "Bearer admin-secret"}


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ControlledProcess]]:
    shared: Path = tmp_path_factory.mktemp("shared")
    events = ["--kv-events", "tcp://127.0.0.1:0", "--no-self-check", "--kv-memory", "1024 tokens"]
    stores = ["--store", "memory://?size=64MiB", "--store", f"file://{shared}", "--store-lookup-timeout", "60"]
    with running(*events, *stores) as started:
        yield started


@pytest.fixture(scope="module")
def router(servers: list[ControlledProcess]) -> Iterator[RouterProcess]:
    named = [argument for process in servers for argument in ("--replica", process.url())]
    process = RouterProcess(*named, "--admin-key", "admin-secret").wait_for(2)
    yield process
    process.kill()


def ask(url: str, prompt: str) -> tuple[str, int]:
    """The route that the router tells, and how many tokens were cached."""
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0}
    answer = http_client.post(f"{url}/v1/completions", json=body).raise_for_status()
    found: dict[str, Any] = answer.json()["usage"]["prompt_tokens_details"]
    return answer.headers.get("x-foreword-route", ""), found["cached_tokens"]


def known(router: RouterProcess, url: str) -> int:
    listed = http_client.get(f"{router.url}/v1/router/replicas", headers=ADMIN).json()["data"]
    return next(int(one["known_blocks"]) for one in listed if one["replica"] == url)


def shared(router: RouterProcess) -> int:
    """Blocks in the directory that no replica has of its own."""
    listed = http_client.get(f"{router.url}/v1/router/replicas", headers=ADMIN).json()["data"]
    return int(router.metric("foreword:router_directory_blocks")) - sum(int(one["known_blocks"]) for one in listed)


def drain(router: RouterProcess, url: str, *, back: bool = False) -> None:
    word = "undrain" if back else "drain"
    path = f"{router.url}/v1/router/{word}"
    http_client.post(path, json={"replica": url}, headers=ADMIN).raise_for_status()


def test_memory_tier(router: RouterProcess, servers: list[ControlledProcess]) -> None:
    """A prompt evicted from the device to memory is still routed to its server, and the router expects the hit."""
    url = servers[1].url()
    prompts = [words(f"memory{number}", 200) for number in range(3)]
    for prompt in prompts:
        ask(url, prompt)
    route, cached = "", 0

    def is_known() -> bool:
        nonlocal route, cached
        for prompt in prompts[1:]:
            ask(url, prompt)
        route, cached = ask(router.url, prompts[0])
        return "from host memory" in route

    until(is_known, 60)
    assert route.startswith(url) and cached > 100
    http_client.delete(f"{url}/v1/cache").raise_for_status()
    until(lambda: known(router, url) == 0)


def test_shared_store(router: RouterProcess, servers: list[ControlledProcess]) -> None:
    """A prompt that one server computed is loaded by another one from the shared store, and the router expects that."""
    first, second = (process.url() for process in servers)
    prompt = words("shared", 200)
    ask(first, prompt)
    drain(router, first)
    until(lambda: shared(router) > 10)
    route, cached = ask(router.url, prompt)
    drain(router, first, back=True)
    assert route.startswith(second) and "from the shared store" in route
    assert cached > 100
