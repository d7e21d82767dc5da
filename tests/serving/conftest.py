"""A server for the whole session, and clients of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

import httpx
import openai
import pytest
from shared_server import ROUTER_KEY, SharedServer, SharedServers, another_server, shared_servers

from foreword.process_config import ServerConfig

# Processes are made with the lab's referee, which is not there where the server's own tests run alone.
if TYPE_CHECKING:
    from server_process import ControlledProcess, ServerProcess

P = TypeVar("P", bound="ServerProcess")


@pytest.fixture(scope="session")
def shared() -> Iterator[SharedServers]:
    with shared_servers() as made:
        yield made


@pytest.fixture
def server(shared: SharedServers) -> SharedServer:
    return shared.open


@pytest.fixture(scope="module")
def replica(shared: SharedServers) -> Iterator[str]:
    """A server that accepts tenants' salts from a router with its key."""
    with another_server(shared, ServerConfig(port=0, router_key=ROUTER_KEY)) as (url, _):
        yield url


@pytest.fixture
def client(server: SharedServer) -> Iterator[httpx.Client]:
    with server.http() as made:
        yield made


@pytest.fixture
def ai(server: SharedServer) -> openai.OpenAI:
    return server.openai()


@pytest.fixture
def metric(client: httpx.Client) -> Callable[..., float]:
    """The value of a metric now; labels besides the model's name are given by keyword."""

    def read(name: str, **labels: str) -> float:
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        for line in client.get("/metrics").text.splitlines():
            if re.match(rf"{re.escape(name)}({{|\s)", line) and all(label in line for label in wanted):
                return float(line.rsplit(" ", 1)[1])
        raise AssertionError(f"no metric {name} with {labels}")

    return read


@pytest.fixture
def start() -> Iterator[Callable[..., ServerProcess]]:
    from server_process import ServerProcess

    with made_of(ServerProcess) as make:
        yield make


@pytest.fixture
def start_controlled() -> Iterator[Callable[..., ControlledProcess]]:
    from server_process import ControlledProcess

    with made_of(ControlledProcess) as make:
        yield make


@contextmanager
def made_of(kind: type[P]) -> Iterator[Callable[..., P]]:
    """Starts processes, and kills them in the end."""
    started: list[P] = []

    def make(*arguments: str, **settings: bool) -> P:
        started.append(kind(*arguments, **settings))
        return started[-1]

    yield make
    for process in started:
        process.kill()
