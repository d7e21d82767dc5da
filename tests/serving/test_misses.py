"""Cache misses of a real server, alone and behind a router: each planted cause is named, with its place."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from router_parts import RouterProcess
from server_process import ServerProcess
from shared_server import embedded_model, until
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from foreword.sim.miss_report import traffic_report

# Everything that a client can change is in the prompt: options, tools, reasoning and calls.
TEMPLATE = """
{{- bos_token -}}
{%- if style is defined -%}{{- '<|system|>' ~ style ~ eos_token -}}{%- endif -%}
{%- for message in messages -%}
    {{- '<|system|>' if message.role == 'system' else '<|assistant|>' if message.role == 'assistant' else '<|user|>' -}}
    {%- if message.reasoning_content -%}{{- '<think>' ~ message.reasoning_content ~ '</think>' -}}{%- endif -%}
    {{- message.content -}}
    {%- for call in message.tool_calls or [] -%}
        {{- '<tool_call>' ~ call.function.name ~ (call.function.arguments | tojson) ~ '</tool_call>' -}}
    {%- endfor -%}
    {%- if loop.first -%}{%- for tool in tools or [] -%}{{- tool | tojson -}}{%- endfor -%}{%- endif -%}
    {{- eos_token -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""
RULES = "\n".join(f"Rule {name}: read the file, cite its lines and never guess." for name in "abcdefgh")
LONG = "The function takes a list of numbers and returns their sum as a number. " * 3
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}, "depth": {"type": "integer"}}}


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": f"Can {name} files.", "parameters": SCHEMA}}


def conversation(topic: str) -> dict[str, Any]:
    """A chat that shares no prefix with those of other topics."""
    call = {"id": "c", "type": "function", "function": {"name": "read", "arguments": '{"path": "a", "depth": 1}'}}
    return {
        "messages": [
            {"role": "system", "content": f"{topic} is your name.\nToday is 2026-03-01.\n{RULES}\nkey: a81f-2"},
            {"role": "user", "content": f"Find the mistake. {LONG}"},
            {"role": "assistant", "content": "", "reasoning_content": LONG, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": LONG},
            {"role": "assistant", "content": f"It is here. {LONG}"},
            {"role": "user", "content": "Thank you."},
        ],
        "tools": [tool("read"), tool("list")],
        "prompt_cache_key": topic,
        "max_tokens": 1,
        "temperature": 0,
        "cache_report": True,
    }


class Changes:
    """Changes of a client's next request: each method plants one cause."""

    def date(self, body: Any) -> None:
        self._system(body, "03-01", "03-02")

    def nonce(self, body: Any) -> None:
        self._system(body, "a81f-2", "77b0-9")

    def order_of_tools(self, body: Any) -> None:
        body["tools"].reverse()

    def keys_of_arguments(self, body: Any) -> None:
        body["messages"][2]["tool_calls"][0]["function"]["arguments"] = '{"depth": 1, "path": "a"}'

    def another_tool(self, body: Any) -> None:
        body["tools"].append(tool("write"))

    def dropped_reasoning(self, body: Any) -> None:
        del body["messages"][2]["reasoning_content"]

    def summary(self, body: Any) -> None:
        body["messages"][1:4] = [{"role": "user", "content": "In short: there was a mistake."}]

    def option(self, body: Any) -> None:
        body["chat_template_kwargs"] = {"style": "short"}

    def salt(self, body: Any) -> None:
        body["cache_salt"] = "mine"

    def system_prompt(self, body: Any) -> None:
        self._system(body, "is your name", "is the name that you have")

    def edited_message(self, body: Any) -> None:
        body["messages"][1]["content"] = f"Look for the mistake. {LONG}"

    def nothing(self, body: Any) -> None:
        pass

    def _system(self, body: Any, old: str, new: str) -> None:
        body["messages"][0]["content"] = body["messages"][0]["content"].replace(old, new)


EXPECTED = {
    "date": ("volatile_line", "messages[0].content line 2"),
    "nonce": ("volatile_line", "messages[0].content line 11"),
    "order_of_tools": ("tools_reordered", "tools[0]"),
    "keys_of_arguments": ("json_reordered", "messages[2].tool_calls[0].arguments"),
    "another_tool": ("tools_changed", "tools[2]"),
    "dropped_reasoning": ("reasoning_changed", "messages[2].reasoning"),
    "summary": ("compacted", "messages[1]"),
    "option": ("template_changed", "chat_template_kwargs.style"),
    "salt": ("salt_changed", "cache_salt"),
    "system_prompt": ("system_prompt_changed", "messages[0].content line 1"),
    "edited_message": ("message_edited", "messages[1].content line 1"),
    "nothing": ("new_text", ""),
}
NAMES = dict(
    zip(EXPECTED, ("Amy", "Bob", "Cid", "Dan", "Eve", "Flo", "Gus", "Hal", "Ida", "Jim", "Kay", "Lea"), strict=True)
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model with a chat template that shows everything."""
    return embedded_model(tmp_path_factory.mktemp("models") / "nano", TEMPLATE)


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recordings") / "traffic.jsonl"


@pytest.fixture(scope="module")
def served(model: Path, recording: Path) -> Iterator[ServerProcess]:
    flags = ["--kv-memory", "32768 tokens", "--max-batch-tokens", "128", "--record", str(recording)]
    process = ServerProcess(str(model), *flags)
    process.wait_ready()
    yield process
    process.kill()


@pytest.fixture(scope="module")
def http(served: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url(), timeout=120) as client:
        yield client


def ask(http: httpx.Client, body: Any, path: str = "/v1/chat/completions") -> dict[str, Any]:
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    report = response.json().get("cache_report")
    if report is not None and "computed_tokens" in report:
        assert report["cached_tokens"] + report["computed_tokens"] == report["prompt_tokens"]
    return dict(report or {})


def next_turn(name: str, topic: str) -> dict[str, Any]:
    """The next request of the client that plants a cause."""
    body = conversation(topic)
    body["messages"] += [{"role": "assistant", "content": "You are welcome."}, {"role": "user", "content": "And now?"}]
    getattr(Changes(), name)(body)
    return body


@pytest.mark.parametrize("name", EXPECTED)
def test_planted_causes(name: str, http: httpx.Client) -> None:
    """A change that a client made between two turns is named, with its place in the body; a turn that only adds loses
    nothing."""
    ask(http, conversation(NAMES[name]))
    report = ask(http, next_turn(name, NAMES[name]))
    assert (report["cause"], report["where"]) == EXPECTED[name]
    assert (report["tokens_lost"] == 0) == (name == "nothing")
    assert report["tokens_lost"] <= report["computed_tokens"]


def test_a_streamed_response_names_the_cause(http: httpx.Client) -> None:
    """The last chunk of a stream has the same report."""
    ask(http, conversation("Max"))
    with http.stream("POST", "/v1/chat/completions", json={**next_turn("date", "Max"), "stream": True}) as response:
        chunks = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]
    [report] = [chunk["cache_report"] for chunk in chunks if chunk.get("cache_report")]
    assert report["cause"] == "volatile_line"


def test_evicted(http: httpx.Client) -> None:
    """A prompt whose blocks are gone was evicted, and everything but its last token is lost."""
    ask(http, conversation("Ned"))
    assert http.delete("/v1/cache").status_code == 200
    report = ask(http, conversation("Ned"))
    assert report["cause"] == "evicted"
    assert report["tokens_lost"] >= report["computed_tokens"] * 0.9


def test_other_dialects(http: httpx.Client) -> None:
    """A completion's prompt and an Anthropic client's system prompt are named as in their own bodies."""
    for path, bodies, where in (
        ("/v1/completions", [{"prompt": f"Pia.\nIt is {hour}:00.\n{RULES}"} for hour in (10, 11)], "prompt line 2"),
        (
            "/v1/messages",
            [
                {"system": f"Rex.\nIt is {hour}:00.\n{RULES}", "messages": [{"role": "user", "content": "Hi"}]}
                for hour in (10, 11)
            ],
            "system.content line 2",
        ),
    ):
        for body in bodies:
            report = ask(http, {**body, "max_tokens": 1, "cache_report": True}, path)
        assert (report["cause"], report["where"]) == ("volatile_line", where)


def test_metrics_and_dashboard(http: httpx.Client) -> None:
    """Causes are counted with their tokens, also for requests without a report, and the dashboard's requests have them."""

    def lost() -> float:
        line = next(line for line in http.get("/metrics").text.splitlines() if wanted in line)
        return float(line.rsplit(" ", 1)[1])

    wanted = 'foreword:cache_miss_tokens_total{cause="tools_reordered"}'
    quiet = {"cache_report": False}
    ask(http, {**conversation("Sam"), **quiet})
    assert ask(http, {**next_turn("order_of_tools", "Sam"), **quiet}) == {}
    until(lambda: wanted in http.get("/metrics").text)
    assert lost() > 200
    shown = http.get("/ui/data/now").json()["requests"]
    assert shown[0]["miss"]["cause"] == "tools_reordered"


def test_recording(http: httpx.Client, served: ServerProcess, recording: Path) -> None:
    """The server's recording has the causes, and `foreword traffic report` ranks them."""
    ask(http, conversation("Tom"))
    ask(http, next_turn("date", "Tom"))
    until(lambda: recording.exists() and "volatile_line" in recording.read_text())
    found = {one.cause: one for one in traffic_report([recording]).causes}
    assert found["volatile_line"].saved_tokens > 200
    assert ("messages[0].content line 2", 1) in found["volatile_line"].places or found["volatile_line"].requests > 1
    assert "mistake" not in recording.read_text()


class PlainReplica:
    """A relay in front of the server that looks like any OpenAI-compatible engine: it knows no cache reports."""

    def __init__(self, target: str) -> None:
        self._client = httpx.AsyncClient(base_url=target, timeout=120)
        app = Starlette(routes=[Route("/{path:path}", self._relay, methods=["GET", "POST"])])
        listener = socket.create_server(("127.0.0.1", 0))
        self.url = "http://{}:{}".format(*listener.getsockname())
        self.server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off"))
        self._thread = threading.Thread(target=lambda: asyncio.run(self.server.serve([listener])), daemon=True)
        self._thread.start()

    async def _relay(self, request: Request) -> Response:
        if not request.url.path.startswith(("/v1/models", "/v1/chat", "/health")):
            return Response(status_code=404)
        body = await request.body()
        fields = {k: v for k, v in json.loads(body or b"{}").items() if k != "cache_report"}
        answer = await self._client.request(request.method, request.url.path, json=fields if body else None)
        if answer.headers["content-type"].startswith("text/event-stream"):
            lines = [self._plain(line) for line in answer.text.split("\n")]
            return Response("\n".join(lines), media_type="text/event-stream")
        plain = {k: v for k, v in answer.json().items() if k != "cache_report"}
        for model in plain.get("data", []):
            model["owned_by"] = "another"
        return Response(json.dumps(plain), answer.status_code, media_type="application/json")

    def _plain(self, line: str) -> str:
        if not line.startswith("data: {"):
            return line
        chunk = json.loads(line[6:])
        chunk.pop("cache_report", None)
        return f"data: {json.dumps(chunk)}"

    def close(self) -> None:
        self.server.should_exit = True
        self._thread.join(60)


@pytest.fixture(scope="module")
def routed(served: ServerProcess) -> Iterator[RouterProcess]:
    replica = PlainReplica(served.url())
    router = RouterProcess("--replica", replica.url).wait_for(1)
    yield router
    router.kill()
    router.end()
    replica.close()


ROUTED = dict(
    zip(EXPECTED, ("Una", "Vic", "Wim", "Xia", "Yve", "Zoe", "Abe", "Ben", "Cal", "Deb", "Eli", "Fay"), strict=True)
)


@pytest.mark.parametrize("name", EXPECTED)
def test_through_a_router(name: str, routed: RouterProcess) -> None:
    """A router names the same causes for an engine that only counts cached tokens: in the response, in its log of decisions,
    and in its metrics."""
    cause, where = EXPECTED[name]
    with routed.http() as client:
        ask(client, conversation(ROUTED[name]))
        response = client.post("/v1/chat/completions", json=next_turn(name, ROUTED[name]))
        report = response.json()["cache_report"]
        assert (report["cause"], report["where"]) == (cause, where)
        until(lambda: routed.metric("foreword:router_cache_misses_total", cause=cause) >= 1)
        [newest] = client.get("/v1/router/decisions?last=1").json()["data"]
        assert newest["miss"]["cause"] == cause


def last_report(client: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The only cache report in the events of a stream."""
    text = client.post(path, json={**body, "stream": True}).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    reports = [one.get("cache_report") or one.get("response", {}).get("cache_report") for one in events]
    [found] = [one for one in reports if one]
    return dict(found)


def test_streams_end_with_the_cause(routed: RouterProcess) -> None:
    """For an engine that only counts, the router writes the cause into the last event of a stream, in each dialect."""
    with routed.http() as client:
        before, after = conversation("Hal"), next_turn("date", "Hal")
        model = client.get("/v1/models").json()["data"][0]["id"]
        ask(client, before)
        report = last_report(client, "/v1/chat/completions", {**after, "stream_options": {"include_usage": True}})
        assert (report["cause"], report["where"]) == EXPECTED["date"] and report["prompt_tokens"] > 256
        for path, extra in (("/v1/messages", {"max_tokens": 4}), ("/v1/responses", {"max_output_tokens": 4})):
            name = "messages" if path == "/v1/messages" else "input"
            body = {
                "model": model,
                name: [{"role": "user", "content": f"{name} {LONG * 10}"}],
                "cache_report": True,
            }
            first, second = (last_report(client, path, body | extra) for _ in range(2))
            assert (first["cause"], second["cause"]) == ("new_conversation", "all_cached")
            assert second["cached_tokens"] > 256


def test_a_stream_through_a_router(routed: RouterProcess, served: ServerProcess) -> None:
    """Streams are explained as well. A replica of Foreword's own writes the cause into the response itself."""
    own = RouterProcess("--replica", served.url()).wait_for(1)
    try:
        with own.http() as client:
            ask(client, conversation("Gil"))
            body = {**next_turn("date", "Gil"), "stream": True}
            text = client.post("/v1/chat/completions", json=body).text
            assert '"cause":"volatile_line"' in text.replace(": ", ":")
            until(lambda: own.metric("foreword:router_cache_misses_total", cause="volatile_line") == 1)
    finally:
        own.kill()
        own.end()
