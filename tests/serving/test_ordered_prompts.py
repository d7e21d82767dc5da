"""Sessions of agents in other folders hit tools and system prompt, at servers and behind routers, with equal tokens at both."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import http_client
import pytest
from aiohttp import web
from chat_replica import ChatReplica
from router_parts import Loop, RouterThread
from shared_server import embedded_model, served

from foreword.api.http import bind
from foreword.configuration import Config
from foreword.engine_config import EngineConfig
from foreword.entrypoints.async_engine import AsyncEngine
from foreword.process_config import ServerConfig
from foreword.server.app import ServerApp
from foreword.server.engine_metrics import PrometheusObserver

# Shows tools behind the first system message, as most templates do.
TEMPLATE = """
{%- for one in messages %}<|{{ one.role if one.role in ('system', 'user', 'assistant') else 'user' }}|>{{ one.content }}
{%- if loop.first and tools %}{{ tools | tojson }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}
"""
RULES = "\n".join(f"Rule {number}: read before you write." for number in range(30))
OPTIONS = {"template_order": ("tools-first",), "volatile_lines": ("profiles",)}
FLAGS = ("--template-order", "tools-first", "--volatile-lines", "profiles")


def body(folder: str, dialect: str = "chat") -> dict[str, Any]:
    """The first request of an agent in a folder."""
    system = f"You are opencode.\n{RULES}\n  Working directory: /home/{folder}\n  Platform: linux\n{RULES}"
    function = {
        "name": "read",
        "description": "Reads a file. " * 20,
        "parameters": {"type": "object", "properties": {}},
    }
    if dialect == "messages":
        tool = {"name": "read", "description": function["description"], "input_schema": function["parameters"]}
        return {"model": "nano", "max_tokens": 1, "system": system, "messages": [_user(folder)], "tools": [tool]}
    messages = [{"role": "system", "content": system}, _user(folder)]
    return {
        "model": "nano",
        "max_tokens": 1,
        "messages": messages,
        "tools": [{"type": "function", "function": function}],
    }


def _user(folder: str) -> dict[str, str]:
    return {"role": "user", "content": f"Work in {folder}."}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return embedded_model(tmp_path_factory.mktemp("models") / "nano", TEMPLATE)


@contextmanager
def server(model: Path, **options: Any) -> Iterator[str]:
    """The URL of a server with an engine of its own."""
    engine = AsyncEngine.from_config(
        EngineConfig(
            str(model),
            dtype="float32",
            max_model_len=4096,
            kv_memory="8192 tokens",
            threads=1,
            served_model_name="nano",
        )
    )
    config = ServerConfig(port=0, tool_parser="hermes", **options)
    listener = bind(config)
    app = ServerApp(engine, PrometheusObserver(), Config(EngineConfig(), config))
    with served((app.front, listener, config)):
        yield "http://{}:{}".format(*listener.getsockname()[:2])
    engine.close()


def chat(url: str, folder: str) -> tuple[int, int]:
    """Prompt tokens and cached ones."""
    answer = http_client.post(f"{url}/v1/chat/completions", json=body(folder))
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def test_a_new_session_in_another_folder(model: Path) -> None:
    """At a server with the order a session in another folder hits at least 85 % of its prompt; without it, less than half."""
    with server(model) as url:
        chat(url, "alpha")
        prompt, cached = chat(url, "zulu")
        assert cached < 0.5 * prompt
        report = http_client.post(f"{url}/v1/chat/completions", json={**body("oscar"), "cache_report": True}).json()
        assert "was cached behind another system prompt" in report["cache_report"]["advice"]
    with server(model, **OPTIONS) as url:
        chat(url, "alpha")
        prompt, cached = chat(url, "zulu")
        assert cached >= 0.85 * prompt


@pytest.mark.parametrize("options", [{}, OPTIONS], ids=["router only", "both"])
def test_equal_tokens_at_router_and_replica(model: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    """A router with the order and a tokenizer counts the tokens that the replica counts, whether or not the replica has the
    order too, and a session in another folder hits behind it."""
    with server(model, **options) as url:
        record = ("--record", str(tmp_path / "traffic.jsonl"))  # so that it tokenizes although it has one replica
        router = RouterThread("--replica", url, "--tokenizer", str(model), *FLAGS, *record).wait_for(1)
        try:
            for folder in ("alpha", "zulu"):
                prompt, cached = chat(router.url, folder)
                [decision] = http_client.get(f"{router.url}/v1/router/decisions?last=1").json()["data"]
                assert decision["tokens_from"] == "tokenizer" and decision["prompt_tokens"] == prompt
            assert cached >= 0.85 * prompt
        finally:
            router.kill()


class VllmReplica(ChatReplica):
    """A replica of vLLM that also takes the Messages API as it comes."""

    def routes(self) -> list[web.RouteDef]:
        taken = [web.post(path, self._count) for path in ("/tokenize", "/v1/messages/count_tokens")]
        return [*super().routes(), web.post("/v1/messages", self._chat), *taken]

    async def _count(self, request: web.Request) -> web.Response:
        self.seen.append((request.path, await request.json()))
        return web.json_response({"input_tokens": 1, "tokens": [1, 2, 3], "count": 3, "max_model_len": 8192})


@pytest.mark.parametrize("dialect", ["chat", "messages"])
def test_replicas_of_vllm_get_the_ordered_body(dialect: str) -> None:
    """In front of vLLM, which renders itself, the router writes the order into the body of a chat, also for clients of the
    Messages API; everything else in the body stays."""
    replica = VllmReplica(Loop())
    router = RouterThread("--replica", replica.url, *FLAGS).wait_for(1)
    try:
        given = {**body("alpha", dialect), "model": "m", "temperature": 0.5}
        path = "/v1/messages" if dialect == "messages" else "/v1/chat/completions"
        assert http_client.post(f"{router.url}{path}", json=given).status_code == 200
        [sent] = replica.bodies("/v1/chat/completions")
        first, stable, moved, user = sent["messages"]
        assert first == {"role": "system", "content": ""} and user == _user("alpha")
        assert stable["content"].count("Rule 29") == 2 and "alpha" not in stable["content"]
        assert moved == {"role": "system", "content": "  Working directory: /home/alpha\n  Platform: linux"}
        assert sent["temperature"] == 0.5 and sent["tools"][0]["function"]["name"] == "read"
    finally:
        router.kill()


def test_prefetches_and_counts_are_of_the_ordered_prompt() -> None:
    """A prefix that is loaded before its requests, and a prompt whose tokens are counted, have the order of requests."""
    replica = VllmReplica(Loop())
    router = RouterThread("--replica", replica.url, *FLAGS).wait_for(1)
    try:
        given = {**body("alpha"), "model": "m"}
        asked = {name: given[name] for name in ("model", "messages", "tools")}
        assert http_client.post(f"{router.url}/v1/cache/prefetch", json=asked).status_code == 200
        counted = {**body("alpha", "messages"), "model": "m"}
        del counted["max_tokens"]
        answer = http_client.post(f"{router.url}/v1/messages/count_tokens", json=counted)
        assert answer.json() == {"input_tokens": 3}, answer.text
        assert not replica.bodies("/v1/messages/count_tokens")
        for sent in (replica.bodies("/v1/cache/prefetch")[0], replica.bodies("/tokenize")[-1]):
            first, stable, moved, user = sent["messages"]
            assert first == {"role": "system", "content": ""} and user == _user("alpha")
            assert "alpha" not in stable["content"] and "Working directory: /home/alpha" in moved["content"]
    finally:
        router.kill()
