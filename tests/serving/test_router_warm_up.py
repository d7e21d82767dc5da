"""Replicas that join a fleet load common prefixes before they get requests."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import http_client
import pytest
from aiohttp import web
from chat_replica import ChatReplica
from router_parts import Loop, RouterThread
from server_process import ServerProcess
from shared_server import until, words

KEYS = ["--api-keys", "a=alice", "--api-keys", "b=bob", "--tenant-secret", "a secret of the tests"]
OPERATOR = ["--replica-key", "r", "--admin-key", "root", "--max-body", "1MiB"]
RULES, NOTES = list(range(100, 148)), list(range(300, 332))


class JoiningReplica(ChatReplica):
    """Answers a prefetch only after `release`."""

    async def _prefetch(self, request: web.Request) -> web.Response:
        answer = await super()._prefetch(request)
        await self._gate.wait()
        return answer


@pytest.fixture(scope="module")
def loop() -> Loop:
    return Loop()


def post(router: RouterThread, path: str, key: str, body: Any) -> Any:
    headers = {"authorization": f"Bearer {key}"}
    answer = http_client.request("POST", f"{router.url}{path}", json=body, headers=headers)
    assert answer.status_code < 300, answer.text
    return answer.json()


def ask(router: RouterThread, key: str, prompt: list[int], **more: Any) -> None:
    post(router, "/v1/completions", key, {"prompt": prompt, "max_tokens": 4, **more})


def taking(router: RouterThread) -> set[str]:
    headers = {"authorization": "Bearer root"}
    listed = http_client.request("GET", f"{router.url}/v1/router/replicas", headers=headers).json()["data"]
    return {one["replica"] for one in listed if one["takes_requests"]}


def test_an_erased_tenants_prompts_are_not_prefetched(loop: Loop) -> None:
    """A tenant that erases what is cached, or what requests with a salt have cached, is not remembered for replicas that join;
    others are."""
    old, new = [ChatReplica(loop), ChatReplica(loop)], ChatReplica(loop)
    process = RouterThread(*[part for one in old for part in ("--replica", one.url)], *KEYS, *OPERATOR)
    try:
        router = process.wait_for(2)
        for number in range(2):
            ask(router, "alice", [*RULES, number])
            for salt in ("x", "y"):
                ask(router, "bob", [*NOTES, number], cache_salt=salt)
        for key, query in (("alice", ""), ("bob", "?cache_salt=x")):
            headers = {"authorization": f"Bearer {key}"}
            http_client.request("DELETE", f"{router.url}/v1/cache{query}", headers=headers)
        post(router, "/v1/router/replicas", "root", {"replica": new.url})
        until(lambda: new.url in taking(router))
        asked = [(body["prompt"], body["cache_salt"]) for body in new.bodies("/v1/cache/prefetch")]
        ask(router, "bob", NOTES, cache_salt="y")
        [kept] = [
            body["cache_salt"]
            for one in (*old, new)
            for body in one.bodies("/v1/completions")
            if body["prompt"] == NOTES
        ]
        assert asked == [(NOTES, kept)]
    finally:
        process.kill()


def test_a_joining_replica_prefetches_what_prompts_share(loop: Loop) -> None:
    """A joining replica is asked for the full blocks that several prompts of one tenant begin with, with that tenant's salt,
    gets no request before it has answered, and what only one prompt has is not asked for."""
    old, new = [ChatReplica(loop), ChatReplica(loop)], JoiningReplica(loop)
    process = RouterThread(*[part for one in old for part in ("--replica", one.url)], *KEYS, *OPERATOR)
    try:
        router = process.wait_for(2)
        for number in range(4):
            ask(router, "alice", [*RULES, 1000 + number, *range(500, 540)])
        for number in range(2):
            ask(router, "bob", [*NOTES, 2000 + number], cache_salt="x")
        ask(router, "bob", [*RULES, *NOTES])
        new.hold()
        post(router, "/v1/router/replicas", "root", {"replica": new.url})
        until(lambda: len(new.bodies("/v1/cache/prefetch")) == 2)
        assert new.url not in taking(router)
        ask(router, "alice", [*RULES, 7])
        assert not new.bodies("/v1/completions")
        new.release()
        until(lambda: new.url in taking(router))
        asked = sorted(new.bodies("/v1/cache/prefetch"), key=lambda body: body["prompt"])  # they were sent at once
        assert [body["prompt"] for body in asked] == [RULES, NOTES]
        sent = [body for one in old for body in one.bodies("/v1/completions")]
        alice, bob = ({body["cache_salt"] for body in sent if n in body["prompt"]} for n in (1000, 2000))
        assert [{body["cache_salt"]} for body in asked] == [alice, bob] and alice != bob
        metrics = http_client.get(f"{router.url}/metrics", headers={"authorization": "Bearer root"}).text
        assert "foreword:router_warm_up_tokens_total 32.0" in metrics
        assert "foreword:router_warm_up_seconds_count 1.0" in metrics
        assert "Traceback" not in process.text
    finally:
        process.kill()


@pytest.mark.parametrize("owner", ["openai", "vllm"])
def test_a_replica_without_prefetch_gets_requests_at_once(loop: Loop, owner: str) -> None:
    """A server that knows no prefetch, and one that never answers it, are replicas after the time limit at the latest."""
    old, new = [ChatReplica(loop, owner), ChatReplica(loop, owner)], JoiningReplica(loop, owner)
    flags = [part for one in old for part in ("--replica", one.url)]
    process = RouterThread(*flags, "--warm-seconds", "0.2")
    try:
        router = process.wait_for(2)
        for number in range(3):
            ask(router, "none", [*RULES, 1000 + number])
        new.hold()
        post(router, "/v1/router/replicas", "none", {"replica": new.url})
        until(lambda: new.url in taking(router))
        assert bool(new.bodies("/v1/cache/prefetch")) is (owner == "vllm")
    finally:
        process.kill()


def saved_blocks(url: str) -> float:
    lines = http_client.get(f"{url}/metrics").text.splitlines()
    [line] = [line for line in lines if line.startswith("foreword:store_saved_blocks_total{")]
    return float(line.rsplit(" ", 1)[1])


@pytest.mark.slow
def test_a_joining_server_has_the_common_prefix_on_its_device(tmp_path: Path) -> None:
    """Real servers that share a folder: the third one loads the system prompt of other conversations when it joins, so that it
    is a hit on its device for a conversation that no server has seen."""
    limits = ["--store-lookup-timeout", "60", "--store-load-timeout", "60"]
    store = ["--store", f"disk://{tmp_path}/kv?size=64MiB", *limits]
    servers, router = [ServerProcess(*store) for _ in range(3)], None

    def talk(url: str, topic: str) -> dict[str, Any]:
        system = {"role": "system", "content": words("rule", 120)}
        body = {"messages": [system, {"role": "user", "content": topic}], "max_tokens": 2, "cache_report": True}
        answer = http_client.request("POST", f"{url}/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    try:
        replicas = [part for one in servers[:2] for part in ("--replica", one.wait_ready())]
        router = RouterThread(*replicas, "--admin-key", "root", "--warm-seconds", "60").wait_for(2)
        for topic in ("alpha", "beta", "gamma"):
            talk(router.url, topic)
        until(lambda: sum(saved_blocks(one.url()) for one in servers[:2]) >= 20)
        new = servers[2].wait_ready()
        post(router, "/v1/router/replicas", "root", {"replica": new})
        until(lambda: new in taking(router))
        assert talk(new, "delta")["cache_report"]["device_tokens"] > 200, router.text
    finally:
        if router is not None:
            router.kill()
        for one in servers:
            one.popen.send_signal(signal.SIGTERM)
            one.end()
