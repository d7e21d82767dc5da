"""Live migration between server processes: clients see one stream, tenants stay separate."""

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
    migrate,
    streamed,
    the_one,
    two_servers,
    whole,
)
from server_process import ControlledProcess, slow
from shared_server import until

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]
Servers = tuple[ControlledProcess, ControlledProcess]


@pytest.fixture(scope="module")
def processes() -> Iterator[Servers]:
    with two_servers() as made:
        yield made


@pytest.fixture
def urls(processes: Servers) -> Iterator[tuple[str, str]]:
    with empty(processes) as found:
        yield found


def test_client_that_does_not_follow(urls: tuple[str, str], processes: Servers) -> None:
    """A client that does not follow reads one stream with the same tokens, offsets, ids and usage as without migration,
    also when the request migrates back."""
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


def test_client_that_follows(urls: tuple[str, str], processes: Servers) -> None:
    """A client that follows gets the new address and continues there."""
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


def test_openai_client(urls: tuple[str, str], processes: Servers) -> None:
    """OpenAI's client reads a chat that migrates in the middle, streamed and not streamed."""
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


def test_permissions(urls: tuple[str, str], processes: Servers) -> None:
    """A tenant lists and migrates its own requests only, the operator all. Draining takes the operator's key."""
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


def test_through_a_router(urls: tuple[str, str], processes: Servers) -> None:
    """Tenants of a router list and migrate their own requests only."""
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


def test_targets_must_be_allowed(urls: tuple[str, str], processes: Servers) -> None:
    """A client cannot make a server call a server that its configuration does not allow: 403 with the name of the
    setting, and the stream continues. The operator can."""
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


def test_requests_that_cannot_migrate(urls: tuple[str, str], processes: Servers) -> None:
    """A wrong target, the same server, a request with two answers and an unknown request are errors with a message, and
    the stream continues."""
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


def test_target_is_killed(urls: tuple[str, str], processes: Servers) -> None:
    """kill -9 of the server that took over a request: a client that does not follow gets an error in its stream."""
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
            third.kill()
            found.read(lines)
        assert url in found.error and not found.done
    finally:
        third.kill()
