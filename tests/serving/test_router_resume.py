"""Failover in the middle of a stream between Foreword's servers: the next one follows grammar, tool call and reasoning from
where the stream broke, and the client sees one uninterrupted response."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import anthropic
import pytest
import uvicorn
from router_parts import Loop, Relay, RouterProcess, Scissors
from shared_server import ENGINE, PREFIXES, SharedServers
from test_router_continuation import TEXT, ending, ids_of, stream, text, tokens_of

from foreword.api.http import bind
from foreword.configuration import Config
from foreword.process_config import ServerConfig
from foreword.server.app import ServerApp
from foreword.server.engine_metrics import PrometheusObserver

CHAT = "/v1/chat/completions"
ASK: Any = [{"role": "user", "content": "What is the weather in Rome?"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"enum": [1, 3, 7]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "w", "schema": SCHEMA, "strict": True}}
TOOLS: Any = [{"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA, "strict": True}}]


@pytest.fixture(scope="module")
def scissors() -> Scissors:
    return Scissors()


@pytest.fixture(scope="module")
def router(shared: SharedServers, scissors: Scissors) -> Iterator[RouterProcess]:
    loop = Loop()
    relays = [Relay(loop, shared.open.url, scissors) for _ in range(3)]
    urls = [argument for relay in relays for argument in ("--replica", relay.url)]
    process = RouterProcess(*urls, "--policy", "round-robin", "--failures", "1000").wait_for(2)
    yield process
    process.kill()
    for relay in relays:
        relay.close()


def calls(chunks: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Names and arguments, as a client puts them together."""
    found: dict[int, list[str]] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        for call in choice["delta"].get("tool_calls") or ():
            entry = found.setdefault(call["index"], ["", ""])
            assert ("id" in call) == (not entry[0]), "a call begins once"
            entry[0] += call["function"].get("name", "")
            entry[1] += call["function"]["arguments"]
    return [(name, arguments) for name, arguments in found.values()]


def reasoning(chunks: list[dict[str, Any]]) -> str:
    return "".join(
        choice.get("delta", {}).get("reasoning_content") or "" for chunk in chunks for choice in chunk["choices"]
    )


def everything(chunks: list[dict[str, Any]], chat: bool) -> tuple[Any, ...]:
    """All that the client is promised to be equal."""
    usage = next(chunk["usage"] for chunk in chunks if chunk.get("usage"))
    counts = {name: usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    named = calls(chunks) if chat else []
    return text(chunks), reasoning(chunks), named, ending(chunks), ids_of(chunks), counts


CASES: Mapping[str, dict[str, Any]] = {
    "schema": {"messages": ASK, "response_format": FORMAT, "max_tokens": 48},
    "seeded schema": {"messages": ASK, "response_format": FORMAT, "max_tokens": 48, "temperature": 1, "seed": 5},
    "tool": {
        "messages": ASK,
        "tools": TOOLS,
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": 64,
    },
    "penalties": {"messages": ASK, "presence_penalty": 1.5, "frequency_penalty": 0.5, "max_tokens": 10},
    "bad words": {"messages": ASK, "bad_words": ["the", "a"], "min_tokens": 9, "max_tokens": 10},
    "completion": {**TEXT, "max_tokens": 9, "stop": ["\x00\x01"], "echo": True},
    "seeded completion": {**TEXT, "max_tokens": 9, "temperature": 1, "seed": 3},
}
# Choices of different lengths.
SEVERAL: Mapping[str, dict[str, Any]] = {
    "chat": {"messages": ASK, "max_tokens": 12, "temperature": 1, "seed": 5, "logprobs": True},
    "completion": {**TEXT, "max_tokens": 9, "temperature": 1.5, "seed": 3, "ignore_eos": False, "stop": ["e", "\x00"]},
    "schema": {"messages": ASK, "response_format": FORMAT, "max_tokens": 48, "temperature": 1, "seed": 5},
}


@pytest.mark.parametrize("name", ["seeded schema", "tool"])
def test_the_same_response(router: RouterProcess, scissors: Scissors, shared: SharedServers, name: str) -> None:
    """A response that matches a schema, and a call of a tool, are those of an unbroken response after two breaks."""
    check(router, scissors, shared, name, lambda count: {5: count // 3})


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_same_response_wherever_the_stream_breaks(
    router: RouterProcess, scissors: Scissors, shared: SharedServers, name: str
) -> None:
    """A response is the same for every kind of request wherever its stream breaks, at many places, once or twice."""
    check(
        router, scissors, shared, name, lambda count: {at: 2 * (at % 2) for at in {2, 3, 4, 5, *range(7, count - 1, 6)}}
    )


def by_choice(chunks: list[dict[str, Any]]) -> tuple[Any, ...]:
    """The text, token ids, log-probabilities, roles and ending of each choice, the usage, and the ids of the response."""
    found: dict[int, list[Any]] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        entry = found.setdefault(choice["index"], ["", [], [], 0, []])
        delta = choice.get("delta", {})
        entry[0] += choice.get("text", delta.get("content")) or ""
        entry[1] += choice.get("token_ids") or []
        entry[2] += [round(one["logprob"], 3) for one in (choice.get("logprobs") or {}).get("content") or ()]
        entry[3] += "role" in delta
        entry[4] += [(choice["finish_reason"], choice["stop_reason"])] if choice["finish_reason"] else []
    usage = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
    counts = [[one[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")] for one in usage]
    return found, counts, len({(chunk["id"], chunk["created"]) for chunk in chunks})


def check_several(
    router: RouterProcess, scissors: Scissors, shared: SharedServers, name: str, places: Callable[[int], list[int]]
) -> None:
    asked = {**SEVERAL[name], "n": 3, "stream_options": {"include_usage": True}, "return_token_ids": True}
    path = CHAT if "messages" in asked else "/v1/completions"
    whole = stream(shared.open.url, path, asked)
    expected = by_choice(whole)
    assert len({entry[0] for entry in expected[0].values()}) == 3, "choices differ"
    for number, events in enumerate(places(len(whole))):
        scissors.cut_after(events, *([3] if number % 2 else []))
        assert by_choice(stream(router.url, path, asked)) == expected, events


@pytest.mark.parametrize("name", SEVERAL)
def test_several_choices(router: RouterProcess, scissors: Scissors, shared: SharedServers, name: str) -> None:
    """Each choice of a request with a seed goes on from its own place: its text, ids, log-probabilities, role and ending, and
    one usage of all choices, are those of an unbroken response, also where one has ended and another has not begun."""
    check_several(router, scissors, shared, name, lambda count: [1, 2, count // 2, count - 3])


@pytest.mark.slow
@pytest.mark.parametrize("name", SEVERAL)
def test_several_choices_wherever_the_stream_breaks(
    router: RouterProcess, scissors: Scissors, shared: SharedServers, name: str
) -> None:
    """A response of several choices is the same for breaks behind each event, every second time twice."""
    check_several(router, scissors, shared, name, lambda count: [*range(count)])


@pytest.mark.slow
def test_reasoning(shared: SharedServers, scissors: Scissors) -> None:
    """A stream that breaks inside the reasoning, in one of its tags, or after it, keeps reasoning and answer apart."""
    config = ServerConfig(port=0, reasoning_parser="think")
    listener = bind(config)
    observer = PrometheusObserver()
    observer.watch(shared.open.engine)  # which weights it has: other ones continue no stream
    app = ServerApp(shared.open.engine, observer, Config(ENGINE, config, PREFIXES))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off", timeout_graceful_shutdown=1))
    loop = Loop()
    serving = asyncio.run_coroutine_threadsafe(server.serve([listener]), loop.loop)
    relays = [Relay(loop, "http://{}:{}".format(*listener.getsockname()[:2]), scissors) for _ in range(2)]
    named = [argument for relay in relays for argument in ("--replica", relay.url)]
    router = RouterProcess(*named, "--policy", "round-robin", "--failures", "1000").wait_for(2)
    grammar = {"regex": "<think>[a-z ]{12,20}</think>[a-z ]{8,12}"}
    asked = {"messages": ASK, "structured_outputs": grammar, "max_tokens": 60, "temperature": 1, "seed": 4}
    try:
        whole = stream(router.url, CHAT, asked)
        assert reasoning(whole) and text(whole) and "think" not in reasoning(whole) + text(whole)
        for events in range(1, len(whole)):
            scissors.cut_after(events)
            chunks = stream(router.url, CHAT, asked)
            assert (reasoning(chunks), text(chunks)) == (reasoning(whole), text(whole)), events
            assert ending(chunks) == ending(whole)
    finally:
        router.kill()
        server.should_exit = True
        serving.result(60)
        for relay in relays:
            relay.close()


def check(
    router: RouterProcess,
    scissors: Scissors,
    shared: SharedServers,
    name: str,
    places: Callable[[int], Mapping[int, int]],
) -> None:
    """The client has the text, calls, reasoning, token ids, finish reason and usage of an unbroken response, with one id and
    one role. `places`: from the number of its events to the event after which it breaks, and that of a second break, or 0."""
    asked = {**CASES[name], "stream_options": {"include_usage": True}, "return_token_ids": True}
    chat = "messages" in asked
    path = CHAT if chat else "/v1/completions"
    whole = stream(shared.open.url, path, asked)
    expected = everything(whole, chat)
    if name.endswith("schema"):
        assert json.loads(expected[0])["days"] in (1, 3, 7)
    if name == "tool":
        assert [called for called, _ in expected[2]] and json.loads(expected[2][0][1])["days"] in (1, 3, 7)
    before = router.metric("foreword:router_continuations_total", outcome="continued")
    breaks = places(len(whole))
    for events, second in breaks.items():
        scissors.cut_after(events, *([second] if second else []))
        chunks = stream(router.url, path, asked)
        assert everything(chunks, chat) == expected, events
        assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
        roles = [choice for chunk in chunks for choice in chunk["choices"] if "role" in choice.get("delta", {})]
        assert len(roles) == chat
    assert router.metric("foreword:router_continuations_total", outcome="continued") - before >= len(breaks)


def test_log_probabilities(router: RouterProcess, scissors: Scissors, shared: SharedServers) -> None:
    """Each token's log-probability arrives once, with a grammar as well."""
    asked = {**CASES["schema"], "logprobs": True, "top_logprobs": 2}
    whole = tokens_of(stream(shared.open.url, CHAT, asked))
    scissors.cut_after(6)
    found = tokens_of(stream(router.url, CHAT, asked))
    assert [token for token, _ in found] == [token for token, _ in whole]
    assert [value for _, value in found] == pytest.approx([value for _, value in whole], abs=1e-3)


def test_whole_responses_and_other_dialects(router: RouterProcess, scissors: Scissors, shared: SharedServers) -> None:
    """A response that is not streamed is computed again by another server. Anthropic's and OpenAI's clients put together the
    tool call of a stream that broke in the middle of its arguments."""
    asked: Any = {"model": shared.open.model, **CASES["tool"], "temperature": 0}
    whole = shared.open.openai().chat.completions.create(**asked).choices[0].message
    scissors.cut_after(0)
    again = router.openai().chat.completions.create(**asked).choices[0].message
    scissors.cut_after(8)
    with router.openai().chat.completions.stream(**asked) as events:
        streamed = events.get_final_completion().choices[0].message
    expected = [one.function.arguments for one in whole.tool_calls or ()]
    for message in (again, streamed):
        assert [one.function.arguments for one in message.tool_calls or ()] == expected != []
    claude = anthropic.Anthropic(base_url=router.url, api_key="none", max_retries=0, timeout=60)
    tools: Any = [{"name": "get_weather", "input_schema": SCHEMA}]
    scissors.cut_after(8)
    with claude.messages.stream(
        model=shared.open.model,
        max_tokens=64,
        messages=ASK,
        tools=tools,
        tool_choice={"type": "any"},
        extra_body={"temperature": 0},
    ) as answer:
        final = answer.get_final_message()
    used: Any = final.content[0]
    assert used.type == "tool_use" and used.input == json.loads(expected[0])


def test_only_a_router_names_an_output(router: RouterProcess, shared: SharedServers) -> None:
    """The router refuses the field from its clients. A server refuses outputs that nothing can follow."""
    given = {"prompt_token_ids": [5, 6], "token_ids": [7]}
    body: dict[str, Any] = {"messages": ASK, "stream": True, "continuation": given}
    with router.http() as client:
        assert client.post(CHAT, json=body).json()["error"]["param"] == "continuation"
    wrong: list[dict[str, Any]] = [
        {"stream": False},
        {"continuation": {**given, "token_ids": []}},
        {"continuation": {**given, "token_ids": [10**9]}},
        {"continuation": {**given, "token_ids": [7] * 5000}},
        {"n": 2},
        {"n": 2, "continuation": {"prompt_token_ids": [5], "choices": [{"index": 2, "token_ids": [7]}]}},
        {"n": 2, "continuation": {"prompt_token_ids": [5], "choices": [{"index": 1, "token_ids": []}] * 2}},
        {"max_tokens": 1},
    ]
    with shared.open.http() as client:
        for more in wrong:
            answer = client.post(CHAT, json={**body, **more})
            assert answer.status_code == 400 and answer.json()["error"]["param"] in ("continuation", "prompt"), more
        answer = client.post(CHAT, json={**body, "response_format": FORMAT})
        assert "nothing can follow" in answer.text


def test_a_server_continues_a_call(shared: SharedServers) -> None:
    """A server that continues in the middle of a tool call sends the rest of its arguments, and ends the stream properly."""
    asked = {**CASES["tool"], "stream_options": {"include_usage": True}, "return_token_ids": True}
    whole = stream(shared.open.url, CHAT, asked)
    prompt = next(chunk["prompt_token_ids"] for chunk in whole if chunk.get("prompt_token_ids"))
    output, named = ids_of(whole), [choice for chunk in whole for choice in chunk["choices"]]
    at = next(n for n, choice in enumerate(named) if "name" in str(choice["delta"].get("tool_calls")))
    sent = [token for choice in named[: at + 2] for token in choice.get("token_ids") or ()]
    given = {"prompt_token_ids": prompt, "token_ids": sent}
    rest = stream(shared.open.url, CHAT, {**asked, "continuation": given})
    assert sent + ids_of(rest) == output and ending(rest) == ending(whole)
