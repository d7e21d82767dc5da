"""Requests at which replicas die: no number of tries and clients costs more than two of them. The replicas are processes that
really end."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import http_client
import httpx
import pytest
from router_parts import RouterThread, RunningRouter
from shared_server import until

SCRIPT = Path(__file__).with_name("mortal_replica.py")
ANSWER = "one two three four"


class Mortals:
    """Replicas as processes."""

    def __init__(self, count: int, owner: str) -> None:
        command = [sys.executable, str(SCRIPT), owner]
        self.processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(count)]
        self.urls = [one.stdout.readline().strip() for one in self.processes if one.stdout is not None]

    def dead(self) -> int:
        """How many have ended, or say that their engine has."""
        count = 0
        for process, url in zip(self.processes, self.urls, strict=True):
            if process.poll() is None:
                with suppress(httpx.HTTPError):
                    count += http_client.get(f"{url}/health").status_code == 503
                    continue
            count += 1
        return count

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


@contextmanager
def fleet(count: int = 4, *flags: str, owner: str = "vllm") -> Iterator[tuple[Mortals, RouterThread]]:
    mortals = Mortals(count, owner)
    try:
        named = [part for url in mortals.urls for part in ("--replica", url)]
        router = RouterThread(*named, *flags)
        try:
            yield mortals, router.wait_for(count)
        finally:
            router.kill()
    finally:
        mortals.kill()


def post(router: RunningRouter, prompt: str, **more: Any) -> httpx.Response:
    body = {"model": "m", "prompt": prompt, "max_tokens": 8, **more}
    return http_client.post(f"{router.url}/v1/completions", json=body)


def code_of(answer: httpx.Response) -> str | None:
    """The code of an answer's error, also of a stream's; None if it was served."""
    if answer.status_code != 200:
        return str(answer.json()["error"]["code"])
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    last = json.loads(events[-1]) if events else answer.json()
    return str(last["error"]["code"]) if "error" in last else None


@pytest.mark.parametrize("how", ["RESET", "ERROR", "ENGINE"])
@pytest.mark.parametrize("streams", [False, True])
def test_a_request_that_kills(how: str, streams: bool) -> None:
    """Two replicas die of a request, however they do, and of all of its retries, whatever they change beside what is asked. It
    ends as suspicious; no header asks for a retry. Others are served."""
    with fleet() as (mortals, router):
        assert code_of(post(router, "harmless")) is None
        for number in range(3):
            answer = post(router, f"{how}", stream=streams, user=f"u{number}", seed=number)
            assert code_of(answer) == "suspicious_request"
            assert answer.status_code == 503 and "retry-after" not in answer.headers
            assert answer.headers["x-should-retry"] == "false"
        assert mortals.dead() == 2
        assert code_of(post(router, "harmless, too")) is None
        assert router.metric("foreword:router_replica_deaths_total") == 2
        assert router.metric("foreword:router_suspicious_requests_total") == 3
        assert "died at requests that asked the same" in router.text


@pytest.mark.parametrize("policy", ["cost", "round-robin"])
def test_five_clients_at_once(policy: str) -> None:
    """Clients that send the same at once lose two replicas together."""
    with fleet(6, "--policy", policy) as (mortals, router), ThreadPoolExecutor(5) as pool:
        codes = list(pool.map(lambda number: code_of(post(router, "RESET", user=f"u{number}")), range(5)))
        assert codes == ["suspicious_request"] * 5
        assert mortals.dead() == 2
        assert code_of(post(router, "harmless")) is None


def test_an_answer_that_kills() -> None:
    """A stream whose replica dies in the middle, and the next one where it is continued, ends; so does the next one that asks
    this."""
    with fleet() as (mortals, router):
        for _ in range(2):
            assert code_of(post(router, "SPEAK", stream=True)) == "suspicious_request"
        assert mortals.dead() == 2


def test_bystanders_are_served() -> None:
    """Requests that were at a replica when it died of another one are served elsewhere, also where it dies again."""
    with fleet(6) as (mortals, router), ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(post, router, f"SLOW {number}") for number in range(6)]
        until(lambda: sum(http_client.get(f"{url}/running").json() for url in mortals.urls) == 6)
        assert code_of(post(router, "RESET")) == "suspicious_request"
        for process, url in zip(mortals.processes, mortals.urls, strict=True):
            if process.poll() is None:
                http_client.post(f"{url}/release")
        assert [code_of(one.result()) for one in waiting] == [None] * 6
        assert mortals.dead() == 2


@pytest.mark.parametrize("streams", [False, True])
def test_a_request_that_fails_alone(streams: bool) -> None:
    """A request that a replica ended with an error of its own is not sent to another one, and no replica is blamed."""
    with fleet(3, "--failures", "1") as (mortals, router):
        for _ in range(3):
            assert code_of(post(router, "ALONE", stream=streams)) == "request_failed"
        assert router.metric("foreword:router_retries_total") == 0
        assert router.metric("foreword:router_breaker_opened_total") == 0
        assert mortals.dead() == 0


def test_a_connection_that_breaks_is_no_death() -> None:
    """A request whose connections break is tried on three replicas each time; none of them has died of it."""
    with fleet(3) as (mortals, router):
        for _ in range(2):
            assert code_of(post(router, "BREAK")) == "replica_failed"
        assert router.metric("foreword:router_replica_deaths_total") == 0
        assert mortals.dead() == 0


@pytest.mark.extended
@pytest.mark.parametrize("failures", ["1", "3"])
def test_requests_that_fail_everywhere_end_no_service(failures: str) -> None:
    """Where requests break at all replicas and these answer their probes, others are served as before."""
    with fleet(2, "--failures", failures, owner="another") as (_, router):
        assert code_of(post(router, "harmless")) is None
        for number in range(4):
            assert code_of(post(router, "BREAK")) == "replica_failed"
            assert code_of(post(router, f"harmless {number}")) is None
        broken = [post(router, "BREAK") for _ in range(6)]
        assert {one.status_code for one in broken} == {502}
        assert "probes succeed: they are used" in router.text
        until(lambda: code_of(post(router, "harmless")) is None and router.metric("foreword:router_panic") == 0)


def test_the_dead_are_not_used() -> None:
    """Replicas that are dead are not used, however many are out."""
    with fleet(2, "--failures", "1") as (mortals, router):
        mortals.kill()
        for _ in range(2):
            assert post(router, "harmless").status_code in (502, 503)
        assert router.metric("foreword:router_panic") == 0


def test_variants_with_the_same_start() -> None:
    """Prompts that differ near their ends only are one suspect, once replicas have died at them; others are not, and neither
    are those whose start was served."""
    start = "RESET " + "word " * 300
    with fleet(4) as (mortals, router):
        codes = {code_of(post(router, f"{start} at {number}")) for number in range(4)}
        assert codes == {"suspicious_request"} and mortals.dead() == 2
        assert code_of(post(router, "word " * 300)) is None
