"""Requests that move between server processes: clients see one stream, tenants stay apart, a server that stops moves its
requests away (R32)."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai
import pytest
from doors import until
from server_process import Process

pytestmark = pytest.mark.timeout(300)

FLAGS = ["--dtype", "float32", "--role", "both", "--tenant-secret", "a long text", "--admin-key", "operators-key"]
FLAGS += ["--api-keys", "alice=alices-key", "--api-keys", "bob=bobs-key", "--router-key", "routers-key"]
ALICE, BOB, OPERATOR = ({"authorization": f"Bearer {key}"} for key in ("alices-key", "bobs-key", "operators-key"))
PROMPT = "def area(width: float, height: float) -> float:\n    return width * height\n\n" * 6
BODY: dict[str, Any] = {
    "prompt": PROMPT,
    "max_tokens": 220,
    "temperature": 0,
    "ignore_eos": True,
    "logprobs": 0,
    "cache_report": True,
}


@pytest.fixture(scope="module")
def processes() -> Iterator[tuple[Process, Process]]:
    made = Process(*FLAGS), Process(*FLAGS)
    try:
        for process in made:
            process.wait_ready()
        yield made
        for process in made:
            process.popen.send_signal(signal.SIGTERM)
            assert process.end() == 0
            assert "Traceback" not in process.text
    finally:
        for process in made:
            process.popen.kill()
            process.popen.wait()


@pytest.fixture
def urls(processes: tuple[Process, Process]) -> Iterator[tuple[str, str]]:
    here, there = (process.url() for process in processes)
    for url in (here, there):
        assert httpx.delete(f"{url}/v1/cache", headers=ALICE).status_code == 200
    yield here, there
    for url in (here, there):
        until(lambda url=url: is_free(url))


def is_free(url: str) -> bool:
    load = httpx.get(f"{url}/v1/instance", headers=ALICE).json()["load"]
    return bool(load["free_blocks"] == load["blocks"] and load["running"] == load["waiting"] == 0)


@dataclass
class Stream:
    """What a client reads of a completion's stream."""

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
    return httpx.stream("GET", url, params={"from": tokens}, headers={**ALICE, "x-foreword-follow": "1"}, timeout=60)


def whole(url: str) -> Stream:
    """The stream without a move; nothing stays cached."""
    with streamed(url) as response:
        found = Stream().read(response.iter_lines())
    assert httpx.delete(f"{url}/v1/cache", headers=ALICE).status_code == 200
    return found


def the_one(url: str, headers: dict[str, str] = ALICE) -> dict[str, Any]:
    """The only request that runs at a server."""
    [running] = httpx.get(f"{url}/v1/requests", headers=headers).json()["data"]
    found: dict[str, Any] = running
    return found


def migrate(url: str, name: str, to: str, headers: dict[str, str] = ALICE) -> httpx.Response:
    return httpx.post(f"{url}/v1/requests/{name}/migrate", json={"to": to}, headers=headers, timeout=60)


def check_same(found: Stream, expected: Stream) -> None:
    assert (found.text, found.offsets, found.finish) == (expected.text, expected.offsets, expected.finish)
    assert found.usage == expected.usage and found.done and not found.error
    assert len(found.heads) == 1
    assert found.report is not None and expected.report is not None
    assert found.report["computed_tokens"] == expected.report["computed_tokens"]


def test_client_sees_nothing(urls: tuple[str, str]) -> None:
    """A client that knows nothing of moves reads one stream, with the same tokens, offsets, ids and usage as without a move,
    also when the request moves on and back."""
    here, there = urls
    expected = whole(here)
    with streamed(here) as response:
        lines = response.iter_lines()
        found = Stream().read(lines, 5)
        moved = migrate(here, the_one(here)["id"], there)
        assert moved.status_code == 200, moved.text
        assert the_one(here)["moved"] == {"to": there, "request_id": moved.json()["request_id"]}
        found.read(lines, moved.json()["tokens"] + 5)
        back = migrate(there, the_one(there)["id"], here)
        assert back.status_code == 200, back.text
        found.read(lines)
    check_same(found, expected)
    assert back.json()["tokens"] > moved.json()["tokens"]
    assert back.json()["bytes"] < moved.json()["bytes"]  # the old instance still has most of it


def test_client_follows(urls: tuple[str, str]) -> None:
    """A client that follows gets told where its request went, and reads on there as if nothing had happened."""
    here, there = urls
    expected = whole(here)
    with streamed(here, **{"x-foreword-follow": "1", "x-request-id": "traced"}) as response:
        lines = response.iter_lines()
        found = Stream().read(lines, 5)
        assert migrate(here, "traced", there).status_code == 200
        found.read(lines)
    assert found.moved is not None and not found.done and found.usage is None
    assert (found.moved["to"], found.moved["tokens"]) == (there, found.tokens)
    stream = f"{there}/v1/requests/{found.moved['request_id']}/stream"
    wrong = httpx.get(stream, params={"from": 1}, headers=ALICE)
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (409, "cannot_move")
    assert httpx.get(stream, params={"from": found.tokens}, headers=BOB).status_code == 404
    with httpx.stream("GET", stream, params={"from": found.tokens}, headers=ALICE, timeout=60) as response:
        assert response.status_code == 200
        found.read(response.iter_lines())
    check_same(found, expected)
    assert httpx.get(stream, params={"from": found.tokens}, headers=ALICE).status_code == 404


def test_openai_client(urls: tuple[str, str]) -> None:
    """OpenAI's own client reads a chat that moves in the middle, streamed and not streamed."""
    here, there = urls
    client = openai.OpenAI(base_url=f"{here}/v1", api_key="alices-key", max_retries=0, timeout=60)
    chat: dict[str, Any] = {
        "model": "stdlib-nano",
        "messages": [{"role": "user", "content": "What does textwrap.dedent do?"}],
        "max_tokens": 120,
        "seed": 3,
        "extra_body": {"ignore_eos": True},
    }
    expected = client.chat.completions.create(**chat)
    text = ""
    for number, chunk in enumerate(client.chat.completions.create(**chat, stream=True)):
        text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
        if number == 3:
            assert migrate(here, chunk.id, there).status_code == 200
    assert text == expected.choices[0].message.content
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(client.chat.completions.create(**chat)))
    thread.start()
    until(lambda: bool(httpx.get(f"{here}/v1/requests", headers=ALICE).json()["data"]))
    assert migrate(here, the_one(here)["id"], there).status_code == 200
    thread.join(60)
    assert found[0].choices[0].message.content == expected.choices[0].message.content
    assert found[0].usage.completion_tokens == expected.usage.completion_tokens


def test_who_may(urls: tuple[str, str]) -> None:
    """A tenant sees and moves its own requests only; the operator sees all; draining is the operator's."""
    here, there = urls
    assert httpx.get(f"{here}/v1/requests").status_code == 401
    with streamed(here) as response:
        lines = response.iter_lines()  # kept: without it the connection is closed
        Stream().read(lines, 3)
        running = the_one(here)
        assert httpx.get(f"{here}/v1/requests", headers=BOB).json()["data"] == []
        assert migrate(here, running["id"], there, BOB).status_code == 404
        assert the_one(here, OPERATOR)["id"] == running["id"]
        refused = httpx.post(f"{here}/v1/drain", json={}, headers=BOB)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden")


def test_through_a_router(urls: tuple[str, str]) -> None:
    """Tenants for whom a router speaks see and move their own requests, and nobody else's."""
    here, there = urls
    carol, dave = ({"authorization": "Bearer routers-key", "x-foreword-salt": salt} for salt in ("ca", "da"))
    expected = whole(here)
    with streamed(here, **carol) as response:
        lines = response.iter_lines()
        found = Stream().read(lines, 3)
        name = the_one(here, carol)["id"]
        for other in (dave, ALICE, {"authorization": "Bearer routers-key"}):
            assert httpx.get(f"{here}/v1/requests", headers=other).json()["data"] == []
            assert migrate(here, name, there, other).status_code == 404
        assert migrate(here, name, there, carol).status_code == 200
        found.read(lines)
    check_same(found, expected)


def test_where_to(urls: tuple[str, str]) -> None:
    """A client cannot make a server call another one that its configuration does not know: 403, with a sentence that names
    the setting, and the stream goes on. Whoever has the operator's key can."""
    here, _ = urls
    with streamed(here) as response:
        lines = response.iter_lines()
        found = Stream().read(lines, 3)
        name = the_one(here)["id"]
        refused = migrate(here, name, "http://10.255.0.1:8000")
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden")
        assert "--peer 10.255.0.1" in refused.json()["error"]["message"]
        assert migrate(here, name, "http://nobody.invalid:8000").status_code == 403
        assert migrate(here, name, "http://nobody.invalid:8000", OPERATOR).status_code == 503
        found.read(lines)
    assert found.done and not found.error


def test_what_cannot_move(urls: tuple[str, str]) -> None:
    """A target that is none, is not there or is the same server, a request with two answers, and one that does not exist: each
    is answered with a sentence, and the stream goes on where it was."""
    here, there = urls
    expected = whole(here)
    assert migrate(here, "nobody", there).status_code == 404
    with streamed(here) as response:
        lines = response.iter_lines()
        found = Stream().read(lines, 3)
        name = the_one(here)["id"]
        assert migrate(here, name, "file:///etc/passwd").status_code == 400
        assert migrate(here, name, here).status_code == 409
        gone = migrate(here, name, "http://127.0.0.1:9")
        assert (gone.status_code, gone.json()["error"]["code"]) == (503, "transfer_unavailable")
        found.read(lines)
    check_same(found, expected)
    with streamed(here, body={"n": 2}) as response:
        lines = response.iter_lines()
        Stream().read(lines, 3)
        assert the_one(here)["movable"] is False
        assert migrate(here, the_one(here)["id"], there).status_code == 409


def test_stopping_moves_requests_away(urls: tuple[str, str], processes: tuple[Process, Process]) -> None:
    """A server that is told to stop moves its requests to the others first: one client follows and one does not, both get the
    whole text, and the process ends with status 0 long before its time is up."""
    here, there = urls
    expected = whole(here)
    third = Process(*FLAGS, "--drain-to", here, "--drain-to", there, "--drain-seconds", "120")
    try:
        url = third.wait_ready()
        with streamed(url, **{"x-foreword-follow": "1"}) as following, streamed(url) as direct:
            lines, others = following.iter_lines(), direct.iter_lines()
            found, relayed = Stream().read(lines, 3), Stream().read(others, 3)
            third.popen.send_signal(signal.SIGTERM)
            found.read(lines)
            relayed.read(others)
        assert found.moved is not None, third.text
        stream = f"{found.moved['to']}/v1/requests/{found.moved['request_id']}/stream"
        with httpx.stream("GET", stream, params={"from": found.tokens}, headers=ALICE, timeout=60) as response:
            found.read(response.iter_lines())
        assert third.end(60) == 0
    finally:
        third.popen.kill()
        third.popen.wait()
    check_same(found, expected)
    # The second of two equal requests finds the first one's blocks, so the usage differs.
    assert (relayed.text, relayed.offsets, relayed.done) == (expected.text, expected.offsets, True)
    assert "2 of 2 requests moved" in third.text and "Traceback" not in third.text


def test_drained_before_it_was_fetched(urls: tuple[str, str]) -> None:
    """A server that is told to stop moves on a request that moved there and that nobody has fetched yet, and stays until its
    client has come and been told where it went: the client reads the same stream over three servers."""
    here, there = urls
    expected = whole(here)
    middle = Process(*FLAGS, "--drain-to", there, "--drain-seconds", "120")
    try:
        url = middle.wait_ready()
        with streamed(here, **{"x-foreword-follow": "1"}) as response:
            lines = response.iter_lines()
            found = Stream().read(lines, 5)
            assert migrate(here, the_one(here)["id"], url).status_code == 200
            found.read(lines)
        first = found.moved
        assert first is not None and first["to"] == url
        middle.popen.send_signal(signal.SIGTERM)
        until(lambda: "requests moved" in middle.text, 60)
        assert "1 of 1 requests moved" in middle.text and middle.popen.poll() is None
        with fetched(first, found.tokens) as response:
            assert response.status_code == 200
            found.read(response.iter_lines())
        assert found.moved is not None and found.moved["to"] == there and not found.done
        with fetched(found.moved, found.tokens) as response:
            assert response.status_code == 200
            found.read(response.iter_lines())
        assert middle.end(60) == 0
    finally:
        middle.popen.kill()
        middle.popen.wait()
    check_same(found, expected)
    assert "Traceback" not in middle.text


def test_two_servers_drain(urls: tuple[str, str]) -> None:
    """A server drains to one that is told to stop a moment later and drains to a third: clients that know nothing of it read
    their whole texts, and both processes end with status 0."""
    here, _ = urls
    expected = whole(here)
    second = Process(*FLAGS, "--drain-to", here, "--drain-seconds", "120")
    first: Process | None = None
    try:
        first = Process(*FLAGS, "--drain-to", second.wait_ready(), "--drain-seconds", "120")
        url = first.wait_ready()
        with streamed(url) as one, streamed(url) as other:
            lines, others = one.iter_lines(), other.iter_lines()
            found, beside = Stream().read(lines, 3), Stream().read(others, 3)
            first.popen.send_signal(signal.SIGTERM)
            until(lambda: " moved to " in first.text, 60)
            second.popen.send_signal(signal.SIGTERM)
            found.read(lines)
            beside.read(others)
        assert (first.end(60), second.end(60)) == (0, 0)
    finally:
        for process in (first, second):
            if process is not None:
                process.popen.kill()
                process.popen.wait()
    assert (found.text, found.offsets, found.done) == (expected.text, expected.offsets, True)
    assert (beside.text, beside.offsets, beside.done) == (expected.text, expected.offsets, True)
    assert "2 of 2 requests moved" in first.text
    assert all("Traceback" not in process.text for process in (first, second))


def test_target_is_killed(urls: tuple[str, str]) -> None:
    """kill -9 of the server that took a request over: its client, which does not follow, is told in the stream."""
    here, _ = urls
    third = Process(*FLAGS)
    try:
        url = third.wait_ready()
        with streamed(here, body={"max_tokens": 2000}) as response:
            lines = response.iter_lines()
            found = Stream().read(lines, 3)
            moved = migrate(here, the_one(here)["id"], url)
            assert moved.status_code == 200
            found.read(lines, moved.json()["tokens"] + 3)
            third.popen.kill()
            third.popen.wait()
            found.read(lines)
        assert url in found.error and not found.done
    finally:
        third.popen.kill()
        third.popen.wait()
