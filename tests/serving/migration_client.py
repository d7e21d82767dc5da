"""A client of two servers between which requests migrate."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import http_client
import httpx
from server_process import ControlledProcess, kill
from shared_server import until

FLAGS = [
    "--dtype",
    "float32",
    "--role",
    "both",
    "--tenant-secret",
    "a secret of the tests",
    "--admin-key",
    "operators-key",
    "--peer",
    "127.0.0.1",
]
FLAGS += ["--api-keys", "alice=alices-key", "--api-keys", "bob=bobs-key", "--router-key", "routers-key"]
ALICE, BOB, OPERATOR = ({"authorization": f"Bearer {key}"} for key in ("alices-key", "bobs-key", "operators-key"))
PROMPT = "def area(width: float, height: float) -> float:\n    return width * height\n\n" * 6
BODY: dict[str, Any] = {
    "prompt": PROMPT,
    "max_tokens": 700,
    "temperature": 0,
    "ignore_eos": True,
    "logprobs": 0,
    "cache_report": True,
}


@contextmanager
def two_servers() -> Iterator[tuple[ControlledProcess, ControlledProcess]]:
    """Two servers. Both must exit with status 0 after SIGTERM."""
    made = ControlledProcess(*FLAGS), ControlledProcess(*FLAGS)
    try:
        for process in made:
            process.wait_ready()
        yield made
        for process in made:
            process.popen.send_signal(signal.SIGTERM)
        for process in made:
            assert process.end() == 0
            assert "Traceback" not in process.text
    finally:
        kill(*made)


@contextmanager
def empty(processes: tuple[ControlledProcess, ControlledProcess]) -> Iterator[tuple[str, str]]:
    """URLs of servers with nothing cached; in the end nothing may run there."""
    here, there = (process.url() for process in processes)
    for url in (here, there):
        assert http_client.delete(f"{url}/v1/cache", headers=ALICE).status_code == 200
    yield here, there
    for url in (here, there):
        until(lambda url=url: is_free(url))


def is_free(url: str) -> bool:
    load = http_client.get(f"{url}/v1/instance", headers=ALICE).json()["load"]
    return bool(load["free_blocks"] == load["blocks"] and load["running"] == load["waiting"] == 0)


@dataclass
class Stream:
    """A stream of a completion as a client reads it."""

    text: str = ""
    tokens: int = 0
    offsets: list[int] = field(default_factory=list)
    heads: set[tuple[str, int, str]] = field(default_factory=set)
    usage: dict[str, Any] | None = None
    moved: dict[str, Any] | None = None
    done: bool = False
    error: str = ""
    finish: str | None = None
    report: dict[str, Any] | None = None

    def read(self, lines: Iterator[str], tokens: int = 10**9) -> Stream:
        """Until there are so many tokens, or to the end."""
        name = ""
        for line in lines:
            if line.startswith("event: "):
                name = line[7:]
            elif line.startswith("data: "):
                self._take(name, line[6:])
                name = ""
            if self.tokens >= tokens:
                break
        return self

    def _take(self, name: str, text: str) -> None:
        if text == "[DONE]":
            self.done = True
            return
        event = json.loads(text)
        if name == "foreword.moved":
            self.moved = event
        elif "error" in event:
            self.error = event["error"]["message"]
        else:
            self.heads.add((event["id"], event["created"], event["model"]))
            self.usage = event.get("usage") or self.usage
            self.report = event.get("cache_report") or self.report
            for choice in event["choices"]:
                self.text += choice["text"]
                self.finish = choice["finish_reason"] or self.finish
                if choice["logprobs"]:
                    self.offsets += choice["logprobs"]["text_offset"]
                    self.tokens += len(choice["logprobs"]["tokens"])


def streamed(url: str, **more: Any) -> Any:
    body = {**BODY, "stream": True, "stream_options": {"include_usage": True}, **more.pop("body", {})}
    return httpx.stream("POST", f"{url}/v1/completions", json=body, headers={**ALICE, **more}, timeout=120)


def fetched(moved: dict[str, Any], tokens: int) -> Any:
    """The rest of a stream, from where it went on."""
    url = f"{moved['to']}/v1/requests/{moved['request_id']}/stream"
    return httpx.stream("GET", url, params={"from": tokens}, headers={**ALICE, "x-foreword-follow": "1"}, timeout=120)


def whole(url: str) -> Stream:
    """The stream of a request that is not migrated. Leaves nothing cached."""
    with streamed(url) as response:
        found = Stream().read(response.iter_lines())
    assert http_client.delete(f"{url}/v1/cache", headers=ALICE).status_code == 200
    return found


def the_one(url: str, headers: dict[str, str] = ALICE) -> dict[str, Any]:
    """The only request that runs at a server."""
    [running] = http_client.get(f"{url}/v1/requests", headers=headers).json()["data"]
    found: dict[str, Any] = running
    return found


def migrate(url: str, name: str, to: str, headers: dict[str, str] = ALICE) -> httpx.Response:
    return http_client.post(f"{url}/v1/requests/{name}/migrate", json={"to": to}, headers=headers)


def check_same(found: Stream, expected: Stream) -> None:
    assert (found.text, found.offsets, found.finish) == (expected.text, expected.offsets, expected.finish)
    assert found.usage == expected.usage and found.done and not found.error
    assert len(found.heads) == 1
    assert found.report is not None and expected.report is not None
    assert found.report["computed_tokens"] == expected.report["computed_tokens"]
