"""Requests that move between server processes: clients see one stream, tenants stay apart (R32)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import http_client
import openai
import pytest
from migration_client import (
    ALICE,
    BOB,
    FLAGS,
    OPERATOR,
    Stream,
    check_same,
    empty,
    end,
    migrate,
    streamed,
    the_one,
    two_servers,
    whole,
)
from server_process import ControlledProcess, slow
from shared_server import until

pytestmark = pytest.mark.timeout(300)
Servers = tuple[ControlledProcess, ControlledProcess]


@pytest.fixture(scope="module")
def processes() -> Iterator[Servers]:
    with two_servers() as made:
        yield made


@pytest.fixture
def urls(processes: Servers) -> Iterator[tuple[str, str]]:
    with empty(processes) as found:
        yield found


def test_client_sees_nothing(urls: tuple[str, str], processes: Servers) -> None:
    """A client that knows nothing of moves reads one stream, with the same tokens, offsets, ids and usage as without a move,
    also when the request moves on and back."""
    here, there = urls
    expected = whole(here)
    with slow(*processes) as fast, streamed(here) as response:
        lines = response.iter_lines()
        found = Stream().read(lines, 5)
        moved = migrate(here, the_one(here)["id"], there)
        assert moved.status_code == 200, moved.text
        assert the_one(here)["moved"] == {"to": there, "request_id": moved.json()["request_id"]}
        found.read(lines, moved.json()["tokens"] + 5)
        back = migrate(there, the_one(there)["id"], here)
        assert back.status_code == 200, back.text
        fast()
        found.read(lines)
    check_same(found, expected)
    assert back.json()["tokens"] > moved.json()["tokens"]
    assert back.json()["bytes"] < moved.json()["bytes"]  # the old instance still has most of it


def test_client_follows(urls: tuple[str, str], processes: Servers) -> None:
    """A client that follows gets told where its request went, and reads on there as if nothing had happened."""
    here, there = urls
    expected = whole(here)
    follow = {"x-foreword-follow": "1", "x-request-id": "traced"}
    with slow(*processes), streamed(here, **follow) as response:
        lines = response.iter_lines()
        found = Stream().read(lines, 5)
        assert migrate(here, "traced", there).status_code == 200
        found.read(lines)
    assert found.moved is not None and not found.done and found.usage is None
    assert (found.moved["to"], found.moved["tokens"]) == (there, found.tokens)
    stream = f"{there}/v1/requests/{found.moved['request_id']}/stream"
    wrong = http_client.get(stream, params={"from": 1}, headers=ALICE)
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (409, "cannot_move")
    assert http_client.get(stream, params={"from": found.tokens}, headers=BOB).status_code == 404
    with http_client.stream("GET", stream, params={"from": found.tokens}, headers=ALICE) as response:
        assert response.status_code == 200
        found.read(response.iter_lines())
    check_same(found, expected)
    assert http_client.get(stream, params={"from": found.tokens}, headers=ALICE).status_code == 404


@pytest.mark.slow
def test_openai_client(urls: tuple[str, str], processes: Servers) -> None:
    """OpenAI's own client reads a chat that moves in the middle, streamed and not streamed."""
    here, there = urls
    client = openai.OpenAI(base_url=f"{here}/v1", api_key="alices-key", max_retries=0, timeout=60)
    chat: dict[str, Any] = {
        "model": "stdlib-nano",
        "messages": [{"role": "user", "content": "What does textwrap.dedent do?"}],
        "max_tokens": 400,
        "seed": 3,
        "extra_body": {"ignore_eos": True},
    }
    expected = client.chat.completions.create(**chat)
    text = ""
    with slow(*processes) as fast:
        for number, chunk in enumerate(client.chat.completions.create(**chat, stream=True)):
            text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
            if number == 3:
                assert migrate(here, chunk.id, there).status_code == 200
                fast()
    assert text == expected.choices[0].message.content
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(client.chat.completions.create(**chat)))
    with slow(*processes):
        thread.start()
        until(lambda: bool(http_client.get(f"{here}/v1/requests", headers=ALICE).json()["data"]))
        assert migrate(here, the_one(here)["id"], there).status_code == 200
    thread.join(120)
    assert found[0].choices[0].message.content == expected.choices[0].message.content
    assert found[0].usage.completion_tokens == expected.usage.completion_tokens


def test_who_may(urls: tuple[str, str], processes: Servers) -> None:
    """A tenant sees and moves its own requests only; the operator sees all; draining is the operator's."""
    here, there = urls
    assert http_client.get(f"{here}/v1/requests").status_code == 401
    with slow(*processes), streamed(here) as response:
        lines = response.iter_lines()  # kept: without it the connection is closed
        Stream().read(lines, 3)
        running = the_one(here)
        assert http_client.get(f"{here}/v1/requests", headers=BOB).json()["data"] == []
        assert migrate(here, running["id"], there, BOB).status_code == 404
        assert the_one(here, OPERATOR)["id"] == running["id"]
        refused = http_client.post(f"{here}/v1/drain", json={}, headers=BOB)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden")


@pytest.mark.slow
def test_through_a_router(urls: tuple[str, str], processes: Servers) -> None:
    """Tenants for whom a router speaks see and move their own requests, and nobody else's."""
    here, there = urls
    carol, dave = ({"authorization": "Bearer routers-key", "x-foreword-salt": salt} for salt in ("ca", "da"))
    expected = whole(here)
    with slow(*processes) as fast, streamed(here, **carol) as response:
        lines = response.iter_lines()
        found = Stream().read(lines, 3)
        name = the_one(here, carol)["id"]
        for other in (dave, ALICE, {"authorization": "Bearer routers-key"}):
            assert http_client.get(f"{here}/v1/requests", headers=other).json()["data"] == []
            assert migrate(here, name, there, other).status_code == 404
        assert migrate(here, name, there, carol).status_code == 200
        fast()
        found.read(lines)
    check_same(found, expected)


def test_where_to(urls: tuple[str, str], processes: Servers) -> None:
    """A client cannot make a server call another one that its configuration does not know: 403, with a sentence that names
    the setting, and the stream goes on. Whoever has the operator's key can."""
    here, _ = urls
    with slow(*processes) as fast, streamed(here) as response:
        lines = response.iter_lines()
        found = Stream().read(lines, 3)
        name = the_one(here)["id"]
        refused = migrate(here, name, "http://10.255.0.1:8000")
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden")
        assert "--peer 10.255.0.1" in refused.json()["error"]["message"]
        assert migrate(here, name, "http://nobody.invalid:8000").status_code == 403
        assert migrate(here, name, "http://nobody.invalid:8000", OPERATOR).status_code == 503
        fast()
        found.read(lines)
    assert found.done and not found.error


def test_what_cannot_move(urls: tuple[str, str], processes: Servers) -> None:
    """A target that is none, is not there or is the same server, a request with two answers, and one that does not exist: each
    is answered with a sentence, and the stream goes on where it was."""
    here, there = urls
    expected = whole(here)
    assert migrate(here, "nobody", there).status_code == 404
    with slow(*processes) as fast, streamed(here) as response:
        lines = response.iter_lines()
        found = Stream().read(lines, 3)
        name = the_one(here)["id"]
        assert migrate(here, name, "file:///etc/passwd").status_code == 400
        assert migrate(here, name, here).status_code == 409
        gone = migrate(here, name, "http://127.0.0.1:9")
        assert (gone.status_code, gone.json()["error"]["code"]) == (503, "transfer_unavailable")
        fast()
        found.read(lines)
    check_same(found, expected)
    with slow(*processes), streamed(here, body={"n": 2}) as response:
        lines = response.iter_lines()
        Stream().read(lines, 3)
        assert the_one(here)["movable"] is False
        assert migrate(here, the_one(here)["id"], there).status_code == 409


@pytest.mark.slow
def test_target_is_killed(urls: tuple[str, str], processes: Servers) -> None:
    """kill -9 of the server that took a request over: its client, which does not follow, is told in the stream."""
    here, _ = urls
    third = ControlledProcess(*FLAGS)
    try:
        url = third.wait_ready()
        with slow(*processes, third), streamed(here) as response:
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
        end(third)
