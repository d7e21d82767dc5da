"""A router with a tokenizer counts the tokens that the replica counts, whatever the conversation and its dialect."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import conversations
import http_client
import pytest
from router_parts import RouterThread
from shared_server import embedded_model, served

from foreword.api.dialects.decode import Limits
from foreword.api.dialects.registry import DIALECTS
from foreword.api.http import bind
from foreword.api.request import DialectName, GenerateRequest
from foreword.api.rights import Tenant
from foreword.configuration import Config
from foreword.engine_config import EngineConfig
from foreword.entrypoints.async_engine import AsyncEngine
from foreword.errors import BadRequest
from foreword.process_config import ServerConfig
from foreword.router.prompts import PromptTokenizer
from foreword.router.replica_body import PATHS, TRANSLATED, parse_request
from foreword.router.replicas import Upstream
from foreword.router_extras.translation import chat_request
from foreword.routing.known_prompts import KnownPrompts
from foreword.server.app import ServerApp
from foreword.server.engine_metrics import PrometheusObserver
from foreword.server.prepare import count_prompt

# Shows everything that a template can be given.
TEMPLATE = """
{%- if tools %}<|system|>{{ tools | tojson }}{% endif %}
{%- for one in messages %}<|{{ one.role if one.role in ('system', 'user', 'assistant') else 'user' }}|>{{ one.role }}
{%- if one.name %} {{ one.name }}{% endif %}{% if one.tool_call_id %} {{ one.tool_call_id }}{% endif %}
{%- if one.reasoning_content %} <think>{{ one.reasoning_content }}</think>{% endif %} {{ one.content }}
{%- for call in one.tool_calls or () %} {{ call.id }} {{ call.function.name }} {{ call.function.arguments | tojson }}
{%- if call.function.arguments is mapping %}!{% endif %}{% endfor %}
{%- endfor %}{% if add_generation_prompt %}<|assistant|>{{ style }} {{ reasoning_effort }} {{ enable_thinking }}{% endif %}
"""
LIMITS = Limits()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return embedded_model(tmp_path_factory.mktemp("models") / "nano", TEMPLATE)


@pytest.fixture(scope="module")
def engine(model: Path) -> AsyncEngine:
    config = EngineConfig(str(model), dtype="float32", max_model_len=4096, kv_memory="8192 tokens", threads=1)
    return AsyncEngine.from_config(config)


class Pool:
    """A pool of servers like this one, none of which is asked."""

    kind: Any = "foreword"
    model = "m"

    def __init__(self) -> None:
        self.known = KnownPrompts()

    def worth_waiting(self, tokens: int, before: int) -> float:
        raise AssertionError("the router has a tokenizer")

    def tokenizing_replicas(self) -> Sequence[Upstream]:
        raise AssertionError("the router has a tokenizer")


async def compare(engine: AsyncEngine, model: Path, seeds: Sequence[int]) -> dict[str, int]:
    """Counts each conversation on both sides. Returns how many of each dialect were equal, and how many were refused."""
    seen = dict.fromkeys((*DIALECTS, "refused"), 0)
    async with aiohttp.ClientSession() as session:
        tokenizer = PromptTokenizer(session, {}, 1.0)
        await tokenizer.load(str(model))
        for seed in seeds:
            dialect, body = conversations.request(seed)
            routed = parse_request(dialect, json.dumps(body).encode(), LIMITS)
            try:
                expected = count(engine, DIALECTS[dialect].parse(json.dumps(body).encode(), LIMITS))
            except BadRequest:
                assert routed.refusal is not None, (seed, body)
                seen["refused"] += 1
                continue
            assert routed.refusal is None, (seed, body)
            placed = chat_request(routed, "foreword") if dialect in TRANSLATED else routed
            prompt = await tokenizer.tokenize(placed, Pool())
            assert (len(prompt.tokens), prompt.exact) == (expected, True), (seed, body)
            seen[dialect] += 1
        tokenizer.close()
    return seen


def count(engine: AsyncEngine, request: GenerateRequest) -> int:
    """Tokens of the first prompt at the server."""
    if not request.prompts:
        return count_prompt(engine, Tenant("", b""), request)
    prompt = request.prompts[0]
    if not isinstance(prompt, str):
        return len(prompt)
    return len(engine.tokenizer.encode(prompt, add_special_tokens=request.add_special_tokens))


@pytest.mark.parametrize("seeds", [range(400), pytest.param(range(5000), marks=pytest.mark.slow)], ids=len)
def test_equal_tokens(engine: AsyncEngine, model: Path, seeds: range) -> None:
    """Seeded conversations have equal tokens at the router and at the server, of all dialects; what the server refuses, the
    router knows it does not understand."""
    seen = asyncio.run(compare(engine, model, seeds))
    assert all(number > len(seeds) / 100 for number in seen.values()), seen
    assert sum(seen.values()) == len(seeds)


@pytest.fixture(scope="module")
def router(engine: AsyncEngine, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterThread]:
    """A router that tokenizes, because it records, in front of a server."""
    config = ServerConfig(port=0, tool_parser="hermes")
    app = ServerApp(engine, PrometheusObserver(), Config(EngineConfig(), config))
    listener = bind(config)
    with served((app.front, listener, config)):
        url = "http://{}:{}".format(*listener.getsockname()[:2])
        record = tmp_path_factory.mktemp("recordings") / "traffic.jsonl"
        process = RouterThread("--replica", url, "--tokenizer", str(model), "--record", str(record))
        try:
            yield process.wait_for(1)
        finally:
            process.kill()


def used(dialect: DialectName, usage: dict[str, Any]) -> int:
    if dialect == "messages":
        names = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
        return sum(usage.get(name) or 0 for name in names)
    return int(usage["input_tokens" if dialect == "responses" else "prompt_tokens"])


@pytest.mark.extended
def test_equal_usage(router: RouterThread) -> None:
    """Tokens of a placement are those of the replica's usage, through sockets too."""
    compared = 0
    for seed in range(60):
        dialect, body = conversations.request(seed)
        limit = {"responses": "max_output_tokens"}.get(dialect, "max_tokens")
        answer = http_client.post(f"{router.url}{PATHS[dialect]}", json={**body, limit: 1})
        if answer.status_code != 200:
            assert answer.status_code == 400, (seed, body, answer.text)
            continue
        [decision] = http_client.get(f"{router.url}/v1/router/decisions?last=1").json()["data"]
        assert decision["tokens_from"] in ("tokenizer", "client"), (seed, body)
        assert decision["prompt_tokens"] == used(dialect, answer.json()["usage"]), (seed, body)
        compared += 1
    assert compared > 50
