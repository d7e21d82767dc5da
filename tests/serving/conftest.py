"""A server for the whole session, and clients of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import httpx
import openai
import pytest
from doors import Door, Doors, serving
from server_process import LedProcess, Process

P = TypeVar("P", bound=Process)


@pytest.fixture(scope="session")
def doors() -> Iterator[Doors]:
    with serving() as made:
        yield made


@pytest.fixture
def door(doors: Doors) -> Door:
    return doors.open


@pytest.fixture
def client(door: Door) -> Iterator[httpx.Client]:
    with door.http() as made:
        yield made


@pytest.fixture
def ai(door: Door) -> openai.OpenAI:
    return door.openai()


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
def start() -> Iterator[Callable[..., Process]]:
    with made_of(Process) as make:
        yield make


@pytest.fixture
def lead() -> Iterator[Callable[..., LedProcess]]:
    with made_of(LedProcess) as make:
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
        process.popen.kill()
        process.popen.wait()
