"""The router in front of real servers that transfer KV to each other: migration and disaggregated prefill."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import http_client
import pytest
from router_parts import RouterProcess
from server_process import ControlledProcess, running, slow
from shared_server import until, words

# Two real servers: a quick test with scripted ones is in test_router_faults.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def servers() -> Iterator[list[ControlledProcess]]:
    with running("--dtype", "float32", "--max-num-seqs", "12", "--role", "both") as started:
        yield started


def chunks(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def text(chunk: dict[str, Any]) -> str:
    choice = chunk["choices"][0]
    return str(choice.get("text", choice.get("delta", {}).get("content")) or "")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_migrated_stream_is_followed(servers: list[ControlledProcess], path: str) -> None:
    """A stream whose request migrates to the other server continues from there with the same output."""
    urls = [process.url() for process in servers]
    asked: dict[str, Any] = {"max_tokens": 500, "temperature": 0, "ignore_eos": True}
    if "chat" in path:
        asked["messages"] = [{"role": "user", "content": words("moving", 20)}]
    else:
        asked["prompt"] = words("moving", 20)
    choice = http_client.post(urls[0] + path, json=asked).json()["choices"][0]
    whole = choice["message"]["content"] if "chat" in path else choice["text"]
    router = RouterProcess("--replica", urls[0], "--replica", urls[1], "--policy", "round-robin").wait_for(2)
    try:
        asked["stream"] = True
        with slow(*servers) as fast, http_client.stream("POST", router.url + path, json=asked) as answer:
            source = answer.headers["x-foreword-route"].partition(": ")[0]
            target = next(url for url in urls if url != source)
            found = chunks(answer.iter_lines())
            seen = [next(found) for _ in range(5)]
            name = answer.headers["x-request-id"]
            moved = http_client.post(f"{source}/v1/requests/{name}/migrate", json={"to": target})
            assert moved.status_code == 200, moved.text
            fast()
            seen += list(found)
        assert not any("error" in chunk for chunk in seen), seen[-1]
        assert "".join(text(chunk) for chunk in seen) == whole
        assert len({chunk["id"] for chunk in seen}) == 1
        assert router.metric("foreword:router_moved_total") == 1
        assert router.metric("foreword:router_continuations_total") == 0
    finally:
        router.kill()


def test_disaggregated_prefill(servers: list[ControlledProcess]) -> None:
    """While many sequences decode, a long prompt is computed by the prefill server and decoded by the other one,
    with the same output; short and cached prompts use one server."""
    prefill, decode = (process.url() for process in servers)
    router = RouterProcess("--replica", decode, "--prefill", prefill, "--min-prefill", "128").wait_for(2)
    ended = threading.Event()
    # Those that keep it busy stay where they are until the end.
    servers[1].pace(0.05)

    def keep_busy() -> None:
        body = {"prompt": "x", "max_tokens": 600, "ignore_eos": True, "stream": True}
        while not ended.is_set():
            with http_client.stream("POST", f"{router.url}/v1/completions", json=body) as answer:
                for _ in answer.iter_lines():
                    if ended.is_set():
                        return

    threads = [threading.Thread(target=keep_busy) for _ in range(9)]
    for thread in threads:
        thread.start()
    try:
        until(lambda: router.metric("foreword:router_in_flight", replica=decode) == 9)
        until(lambda: router.metric("foreword:router_waiting", replica=decode) == 0)

        def ask(prompt: str) -> tuple[str, dict[str, Any]]:
            body = {"prompt": prompt, "max_tokens": 4, "temperature": 0}
            answer = http_client.post(f"{router.url}/v1/completions", json=body)
            return answer.headers["x-foreword-route"], answer.json()

        long = words("elsewhere", 200)
        route, answer = ask(long)
        assert f"{decode} after {prefill}: " in route, route
        assert "after" not in ask("short")[0]
        again, cached = ask(long)
        assert "after" not in again
        assert cached["choices"][0]["text"] == answer["choices"][0]["text"]
        known = http_client.get(f"{prefill}/metrics").text.splitlines()
        lookups = [line for line in known if line.startswith("vllm:prefix_cache_queries_total")]
        assert float(lookups[0].rsplit(" ", 1)[1]) >= 600
    finally:
        servers[1].pace(None)
        ended.set()
        for thread in threads:
            thread.join(60)
        router.kill()
