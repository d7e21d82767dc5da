"""Failover in the middle of a stream where replicas only complete prompts, as vLLM: the router converts the rest, and the
client sees one uninterrupted response."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from router_parts import Loop, Relay, RouterProcess, Scissors
from shared_server import SharedServers

CHAT = {"messages": [{"role": "user", "content": "Write a Python function that reads a file."}]}
TEXT = {"prompt": "def read_file(path):\n", "ignore_eos": True}


@pytest.fixture(scope="module")
def scissors() -> Scissors:
    return Scissors()


@pytest.fixture(scope="module")
def relays(shared: SharedServers, scissors: Scissors) -> Iterator[tuple[Relay, ...]]:
    loop = Loop()
    made = tuple(Relay(loop, shared.open.url, scissors, as_vllm=True) for _ in range(3))
    yield made
    for relay in made:
        relay.close()


@pytest.fixture(scope="module")
def router(relays: tuple[Relay, ...]) -> Iterator[RouterProcess]:
    urls = [argument for relay in relays for argument in ("--replica", relay.url)]
    process = RouterProcess(*urls, "--policy", "round-robin", "--failures", "1000").wait_for(2)
    yield process
    process.kill()


def stream(url: str, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """All chunks of a streamed answer, which ends as it should."""
    with httpx.stream("POST", url + path, json={"temperature": 0, "stream": True, **body}, timeout=120) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert answer.status_code == 200 and lines[-1] == "[DONE]", lines[-3:]
    return [json.loads(line) for line in lines[:-1]]


def text(chunks: list[dict[str, Any]]) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(choice.get("text", choice.get("delta", {}).get("content")) or "" for choice in choices)


def ending(chunks: list[dict[str, Any]]) -> tuple[Any, Any]:
    last = [choice for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
    assert len(last) == 1
    return last[0]["finish_reason"], last[0]["stop_reason"]


def continued(router: RouterProcess) -> float:
    return router.metric("foreword:router_continuations_total", outcome="continued")


_CHAT, _TEXT = ("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)
CHAT_FIRST = pytest.mark.parametrize(("path", "body"), [_CHAT, pytest.param(*_TEXT, marks=pytest.mark.slow)])
TEXT_FIRST = pytest.mark.parametrize(("path", "body"), [_TEXT, pytest.param(*_CHAT, marks=pytest.mark.slow)])


@CHAT_FIRST
def test_the_same_text_wherever_the_stream_breaks(
    router: RouterProcess, scissors: Scissors, shared: SharedServers, path: str, body: dict[str, Any]
) -> None:
    """After a break at any event, once or twice, text, finish reason and usage are those of an unbroken response,
    with one id, time and role."""
    asked = {**body, "max_tokens": 11, "stream_options": {"include_usage": True}}
    whole = stream(shared.open.url, path, asked)
    before = continued(router)
    for events in range(len(whole)):
        scissors.cut_after(events, *([2] if events % 2 else []))
        chunks = stream(router.url, path, asked)
        assert text(chunks) == text(whole), events
        assert ending(chunks) == ending(whole)
        for name in ("id", "created", "model", "object", "system_fingerprint"):
            assert len({chunk[name] for chunk in chunks}) == 1, (events, name)
        usage = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
        assert len(usage) == 1
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert usage[0][name] == whole[-1]["usage"][name], events
        roles = [choice for chunk in chunks for choice in chunk["choices"] if "role" in choice.get("delta", {})]
        assert len(roles) == (1 if "messages" in body else 0)
        # vLLM writes null where there are none.
        assert not any(choice.get("token_ids") for chunk in chunks for choice in chunk["choices"])
        assert not any(chunk.get("prompt_token_ids") for chunk in chunks)
    assert continued(router) - before >= len(whole) * 1.3 - 4


@TEXT_FIRST
def test_stop_strings_across_a_failover(
    router: RouterProcess, scissors: Scissors, shared: SharedServers, path: str, body: dict[str, Any]
) -> None:
    """A stop string ends the response where it would have, also if the stream broke in the middle of it."""
    free = text(stream(shared.open.url, path, {**body, "max_tokens": 9}))
    # Of the answer's own text: one that is found in its middle, one that spans several tokens, two that begin alike.
    stops: list[tuple[Any, bool]] = [(free[5:7], False), (free[8:16], False), (free[8:16], True)]
    stops.append(([free[6:9] + "\x00", free[7:12]], True))
    for stop, include in stops:
        asked = {**body, "max_tokens": 9, "stop": stop, "include_stop_str_in_output": include}
        whole = stream(shared.open.url, path, asked)
        assert ending(whole)[0] == "stop" and ending(whole)[1]
        for events in range(1, len(whole) + 1):
            scissors.cut_after(events)
            chunks = stream(router.url, path, asked)
            assert (text(chunks), ending(chunks)) == (text(whole), ending(whole)), (events, stop)


SIGNS = "\U0001f98a\u00e9\u6f22"
# The model copies what stands in its prompt.
SIGNS_TEXT = {**TEXT, "prompt": SIGNS * 12}
SIGNS_CHAT = {**CHAT, "messages": [{"role": "user", "content": SIGNS * 12}]}


def half_characters(client: httpx.Client) -> dict[str, int]:
    """A logit bias that makes tokens with parts of characters likely, so that nearly every token holds text back."""
    found: set[int] = set()
    for sign in SIGNS:
        found |= set(client.post("/v1/tokenize", json={"prompt": sign, "add_special_tokens": False}).json()["tokens"])
    return {str(token): 100 for token in found}


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", SIGNS_CHAT), ("/v1/completions", SIGNS_TEXT)])
def test_characters_split_by_a_failover(
    router: RouterProcess, scissors: Scissors, shared: SharedServers, path: str, body: dict[str, Any]
) -> None:
    """A character whose bytes lie on both sides of the failover arrives once and complete."""
    with shared.open.http() as client:
        asked = {**body, "max_tokens": 9, "logit_bias": half_characters(client), "ignore_eos": True}
    whole = stream(shared.open.url, path, asked)
    assert set(text(whole)) & set(SIGNS)
    for events in range(1, len(whole) + 1):
        scissors.cut_after(events)
        chunks = stream(router.url, path, asked)
        assert (text(chunks), ending(chunks)) == (text(whole), ending(whole)), events


@pytest.mark.extended
def test_replicas_that_detokenize_otherwise(shared: SharedServers, scissors: Scissors) -> None:
    """A greedy response continues exactly although the replicas' text of its tokens is not the text that was sent: tokens
    after the last certain place are generated again."""
    loop = Loop()
    relays = [Relay(loop, shared.open.url, scissors, as_vllm=True, shouts=True) for _ in range(2)]
    urls = [argument for relay in relays for argument in ("--replica", relay.url)]
    router = RouterProcess(*urls, "--policy", "round-robin", "--failures", "1000").wait_for(2)
    try:
        with shared.open.http() as client:
            bias = half_characters(client)
        asked = {**SIGNS_TEXT, "max_tokens": 24, "logit_bias": bias}
        whole = stream(shared.open.url, "/v1/completions", asked)
        before = continued(router)
        for events in range(1, len(whole) + 1):
            scissors.cut_after(events)
            chunks = stream(router.url, "/v1/completions", asked)
            assert (text(chunks), ending(chunks)) == (text(whole), ending(whole)), events
        assert continued(router) > before
    finally:
        router.kill()
        for relay in relays:
            relay.close()


def tokens_of(chunks: list[dict[str, Any]]) -> list[tuple[str, float]]:
    """Tokens and log-probabilities of either interface."""
    found: list[tuple[str, float]] = []
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        said = choice.get("logprobs") or {}
        found += [(entry["token"], entry["logprob"]) for entry in said.get("content") or ()]
        found += list(zip(said.get("tokens", ()), said.get("token_logprobs", ()), strict=True))
    return found


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 3}),
        pytest.param("/v1/completions", {**TEXT, "logprobs": 2}, marks=pytest.mark.extended),
    ],
)
def test_log_probabilities_and_token_ids(
    router: RouterProcess, scissors: Scissors, shared: SharedServers, path: str, body: dict[str, Any]
) -> None:
    """Each token's log-probability and id arrive once and in order, in the format of the interface, including
    offsets."""
    asked = {**body, "max_tokens": 7, "return_token_ids": True}
    whole = stream(shared.open.url, path, asked)
    for events in range(1, len(whole) + 1):
        scissors.cut_after(events)
        chunks = stream(router.url, path, asked)
        ours, theirs = tokens_of(chunks), tokens_of(whole)
        assert [token for token, _ in ours] == [token for token, _ in theirs]
        assert [value for _, value in ours] == pytest.approx([value for _, value in theirs], abs=1e-3)
        assert ids_of(chunks) == ids_of(whole)
        assert shapes(chunks) == shapes(whole)


def ids_of(chunks: list[dict[str, Any]]) -> list[int]:
    return [token for chunk in chunks for choice in chunk["choices"] for token in choice.get("token_ids", ())]


def shapes(chunks: list[dict[str, Any]]) -> list[Any]:
    """The parts of log-probabilities that must be equal to an unbroken response."""
    said = [choice.get("logprobs") or {} for chunk in chunks for choice in chunk["choices"]]
    entries = [entry for one in said for entry in one.get("content") or ()]
    offsets = [offset for one in said for offset in one.get("text_offset", ())]
    return [[(entry["bytes"], [top["token"] for top in entry["top_logprobs"]]) for entry in entries], offsets]


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"n": 2, "temperature": 1}, "several"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"frequency_penalty": 1}, "frequency_penalty"),
    ],
)
def test_what_cannot_be_continued_exactly(
    router: RouterProcess, scissors: Scissors, more: dict[str, Any], reason: str
) -> None:
    """Where no replica can continue exactly, the stream ends with an error event with the reason, and nothing is
    sent twice."""
    scissors.cut_after(6)
    body = {**CHAT, "max_tokens": 16, "temperature": 0, "stream": True, **more}
    with httpx.stream("POST", f"{router.url}/v1/chat/completions", json=body, timeout=120) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    error = json.loads(lines[-1])["error"]
    assert error["code"] == "replica_failed" and reason in error["message"]
    assert len(lines) <= 7


def test_the_official_client_notices_nothing(router: RouterProcess, scissors: Scissors, shared: SharedServers) -> None:
    """The official client sees an unbroken stream, and a request that is not streamed is served by another
    replica."""
    body = {"model": shared.open.model, "max_tokens": 12, "temperature": 0}
    asked: Any = {**body, **CHAT}
    whole = shared.open.openai().chat.completions.create(**asked)
    scissors.cut_after(5)
    chunks = router.openai().chat.completions.create(**asked, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    scissors.cut_after(0)
    again = router.openai().chat.completions.create(**asked)
    assert again.choices[0].message.content == whole.choices[0].message.content


def test_sampled_responses_are_continued(router: RouterProcess, scissors: Scissors) -> None:
    """A broken sampled response is continued to its full length."""
    scissors.cut_after(5)
    asked = {**TEXT, "max_tokens": 16, "temperature": 1, "stream_options": {"include_usage": True}}
    chunks = stream(router.url, "/v1/completions", asked)
    assert chunks[-1]["usage"]["completion_tokens"] == 16 and ending(chunks) == ("length", None)


@pytest.mark.parametrize(("path", "body"), [_CHAT, _TEXT])
def test_choices_with_a_seed(
    router: RouterProcess, scissors: Scissors, shared: SharedServers, path: str, body: dict[str, Any]
) -> None:
    """Several choices with a seed are repeated by another replica, and the client gets the rest of each: text, ending and
    usage are those of an unbroken response, also after a second break."""
    asked = {**body, "max_tokens": 8, "n": 3, "temperature": 1, "seed": 5, "stream_options": {"include_usage": True}}
    whole = stream(shared.open.url, path, asked)
    before = continued(router)
    for events in (4, len(whole) // 2, len(whole) - 3):
        for cuts in ((events,), (events, events // 2)):
            scissors.cut_after(*cuts)
            chunks = stream(router.url, path, asked)
            assert by_choice(chunks) == by_choice(whole), cuts
            usage = [chunk["usage"]["completion_tokens"] for chunk in chunks if chunk.get("usage")]
            assert usage == [whole[-1]["usage"]["completion_tokens"]]
            assert not any(choice.get("token_ids") for chunk in chunks for choice in chunk["choices"])
    assert continued(router) - before >= 6


def by_choice(chunks: list[dict[str, Any]]) -> dict[int, tuple[str, tuple[Any, Any]]]:
    """The text and the ending of each choice."""
    found: dict[int, list[dict[str, Any]]] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        found.setdefault(choice["index"], []).append({"choices": [choice]})
    return {index: (text(ones), ending(ones)) for index, ones in found.items()}
