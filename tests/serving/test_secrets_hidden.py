"""Keys, secrets and passwords that a server and a router were given: neither says any of them while it runs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
from ports import free_port
from shared_server import until

pytestmark = pytest.mark.slow

PATIENCE = 300.0
SECRETS = {
    "api-keys": "alice=caller-QuietPlease",
    "admin-key": "admin-QuietPlease",
    "tenant-secret": "tenant-QuietPlease",
}
OF_A_SERVER = {"router-key": "router-QuietPlease", "transfer-secret": "transfer-QuietPlease"}
OF_A_ROUTER = {"replica-key": "router-QuietPlease"}
CALLERS = ("caller-QuietPlease", "admin-QuietPlease", "router-QuietPlease", "nobody")
READ = (
    "/metrics",
    "/health",
    "/ready",
    "/version",
    "/openapi.json",
    "/kv_event_sources",
    "/ui/data/kind",
    "/ui/data/history",
    "/ui/data/now",
    "/v1/models",
    "/v1/requests",
    "/v1/prefixes",
    "/v1/prefixes/none",
    "/v1/router/state",
    "/v1/router/replicas",
    "/v1/router/decisions",
)


class Command:
    """`foreword`, and all that it writes."""

    def __init__(self, log: Path, *words: str) -> None:
        self._log = log
        with log.open("wb") as out:
            command = [sys.executable, "-m", "foreword", *words]
            environ = {key: value for key, value in os.environ.items() if not key.startswith("FOREWORD_")}
            self.popen = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environ)

    @property
    def text(self) -> str:
        return self._log.read_text(encoding="utf-8")


@contextmanager
def running(log: Path, url: str, *words: str) -> Iterator[Command]:
    """A command that serves `url`, from when it is ready; ended like from a terminal."""
    command = Command(log, *words)

    def ready() -> bool:
        try:
            return httpx.get(f"{url}/ready", timeout=PATIENCE).status_code == 200
        except httpx.TransportError:
            return False

    try:
        until(lambda: command.popen.poll() is not None or ready(), PATIENCE)
        assert command.popen.poll() is None, command.text
        yield command
    finally:
        command.popen.terminate()
        command.popen.wait(PATIENCE)


def answers_of(url: str) -> str:
    """Answers of `url` to several callers, right and wrong ones."""
    found = []
    for caller in CALLERS:
        headers = {"authorization": f"Bearer {caller}", "x-foreword-salt": "00"}
        with httpx.Client(base_url=url, headers=headers, timeout=PATIENCE) as client:
            for body in ({"prompt": "One two three", "max_tokens": 2}, {"prompt": 1}, {"stream": "perhaps"}):
                found.append(client.post("/v1/completions", json=body))
            found += [client.get(path) for path in READ]
    return "\n".join(f"{one.status_code} {one.headers} {one.text}" for one in found)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[str], Callable[[], str]]]:
    """A server and a router in front of it with every secret there is: their URLs, and what they wrote."""
    folder = tmp_path_factory.mktemp("secrets")
    ports = free_port(), free_port()
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    common = ["--log-level", "debug"]
    redis = f"redis://me:store-QuietPlease@127.0.0.1:{free_port()}?password=option-QuietPlease"
    own = ["--role", "both", "--store", redis, "--kv-memory", "8192 tokens", "--threads", "1", "--drain-seconds", "1"]
    server = ["serve", "--port", str(ports[0]), "--record", str(folder / "s"), *common, *own]
    router = ["route", "--port", str(ports[1]), "--record", str(folder / "r"), *common, "--replica", urls[0]]
    for words, secrets in ((server, SECRETS | OF_A_SERVER), (router, SECRETS | OF_A_ROUTER)):
        for name, text in secrets.items():
            words += [f"--{name}", text]
    with ExitStack() as stack:
        one = stack.enter_context(running(folder / "server.log", urls[0], *server))
        other = stack.enter_context(running(folder / "router.log", urls[1], *router))
        yield urls, lambda: one.text + other.text


@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", [0, 1])
def test_secrets_are_hidden(both: tuple[list[str], Callable[[], str]], number: int) -> None:
    """Metrics, dashboard, state, errors and the debug log contain no key, secret, salt or password."""
    urls, written = both
    answers = answers_of(urls[number])
    assert "200" in answers and "401" in answers and "400" in answers
    assert "QuietPlease" not in answers
    assert "DEBUG" in written() and "/v1/completions" in written()
    assert "QuietPlease" not in written()
