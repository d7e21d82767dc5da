"""A server that shuts down migrates its requests first, also those that migrated to it a moment before."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import http_client
import pytest
from migration_client import (
    ALICE,
    FLAGS,
    Stream,
    check_same,
    empty,
    fetched,
    migrate,
    streamed,
    the_one,
    two_servers,
    whole,
)
from server_process import ControlledProcess, kill, slow
from shared_server import until

pytestmark = [pytest.mark.extended, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def processes() -> Iterator[tuple[ControlledProcess, ControlledProcess]]:
    with two_servers() as made:
        yield made


@pytest.fixture
def urls(processes: tuple[ControlledProcess, ControlledProcess]) -> Iterator[tuple[str, str]]:
    with empty(processes) as found:
        yield found


def test_shutdown_migrates_requests(urls: tuple[str, str]) -> None:
    """A server migrates its requests when it shuts down: a client that follows and one that does not both get the whole
    stream."""
    here, there = urls
    expected = whole(here)
    third = ControlledProcess(*FLAGS, "--drain-to", here, "--drain-to", there, "--drain-seconds", "120")
    try:
        url = third.wait_ready()
        with slow(third), streamed(url, **{"x-foreword-follow": "1"}) as following, streamed(url) as direct:
            lines, others = following.iter_lines(), direct.iter_lines()
            found, relayed = Stream().read(lines, 3), Stream().read(others, 3)
            third.popen.send_signal(signal.SIGTERM)
            found.read(lines)
            relayed.read(others)
        assert found.moved is not None, third.text
        stream = f"{found.moved['to']}/v1/requests/{found.moved['request_id']}/stream"
        with http_client.stream("GET", stream, params={"from": found.tokens}, headers=ALICE) as response:
            found.read(response.iter_lines())
        assert third.end() == 0
    finally:
        third.kill()
    check_same(found, expected)
    # The second of two equal requests finds the first one's blocks, so the usage differs.
    assert (relayed.text, relayed.offsets, relayed.done) == (expected.text, expected.offsets, True)
    assert "2 of 2 requests migrated" in third.text and "Traceback" not in third.text


def test_unclaimed_requests_migrate_again(
    urls: tuple[str, str], processes: tuple[ControlledProcess, ControlledProcess]
) -> None:
    """A draining server migrates a request on that no client has fetched yet, and stays until its client has the new
    address."""
    here, there = urls
    expected = whole(here)
    middle = ControlledProcess(*FLAGS, "--drain-to", there, "--drain-seconds", "120")
    try:
        url = middle.wait_ready()
        with slow(processes[0], middle):
            with streamed(here, **{"x-foreword-follow": "1"}) as response:
                lines = response.iter_lines()
                found = Stream().read(lines, 5)
                assert migrate(here, the_one(here)["id"], url).status_code == 200
                found.read(lines)
            first = found.moved
            assert first is not None and first["to"] == url
            middle.popen.send_signal(signal.SIGTERM)
            until(lambda: "requests migrated" in middle.text)
        assert "1 of 1 requests migrated" in middle.text and middle.popen.poll() is None
        with fetched(first, found.tokens) as response:
            assert response.status_code == 200
            found.read(response.iter_lines())
        assert found.moved is not None and found.moved["to"] == there and not found.done
        with fetched(found.moved, found.tokens) as response:
            assert response.status_code == 200
            found.read(response.iter_lines())
        assert middle.end() == 0
    finally:
        middle.kill()
    check_same(found, expected)
    assert "Traceback" not in middle.text


def test_two_servers_drain(urls: tuple[str, str]) -> None:
    """A server drains to one that drains to a third: clients that do not follow read their whole stream."""
    here, _ = urls
    expected = whole(here)
    second = ControlledProcess(*FLAGS, "--drain-to", here, "--drain-seconds", "120")
    first = ControlledProcess(*FLAGS, "--drain-to", second.url(), "--drain-seconds", "120")
    try:
        url, _ = first.wait_ready(), second.wait_ready()
        with slow(first, second) as fast, streamed(url) as one, streamed(url) as other:
            lines, others = one.iter_lines(), other.iter_lines()
            found, beside = Stream().read(lines, 3), Stream().read(others, 3)
            first.popen.send_signal(signal.SIGTERM)
            until(lambda: "requests migrated" in first.text)
            second.popen.send_signal(signal.SIGTERM)
            until(lambda: "requests migrated" in second.text)
            fast()
            found.read(lines)
            beside.read(others)
        assert (first.end(), second.end()) == (0, 0)
    finally:
        kill(first, second)
    assert (found.text, found.offsets, found.done) == (expected.text, expected.offsets, True)
    assert (beside.text, beside.offsets, beside.done) == (expected.text, expected.offsets, True)
    assert "2 of 2 requests migrated" in first.text
    assert all("Traceback" not in process.text for process in (first, second))
