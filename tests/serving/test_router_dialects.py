"""Clients of OpenAI's responses and Anthropic's messages, in front of servers that know only chat completions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import http_client
import openai
import pytest
from chat_replica import TEXT, ChatReplica
from router_parts import Loop, Relay, RouterThread, Scissors
from shared_server import SharedServers, until, words

from foreword.blocks.salt import Salt

TOOL = {"name": "weather", "description": "Now.", "input_schema": {"type": "object", "properties": {"city": {}}}}
FUNCTION = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {"city": {}}}}
ASKED: list[Any] = [{"role": "user", "content": "The weather in Rome?"}]
# Paths that the router asks each replica for.
PROBED = {"/ready", "/metrics", "/kv_event_sources", "/tokenize", "/v1/responses", "/v1/messages"}
KEYS = ["--api-keys", "a=alice", "--api-keys", "b=bob", "--replica-key", "r"]


@pytest.fixture(scope="module")
def loop() -> Loop:
    return Loop()


@pytest.fixture(scope="module")
def replicas(loop: Loop) -> list[ChatReplica]:
    return [ChatReplica(loop), ChatReplica(loop)]


@pytest.fixture(scope="module")
def router(replicas: list[ChatReplica]) -> Iterator[RouterThread]:
    named = [argument for one in replicas for argument in ("--replica", one.url)]
    process = RouterThread(*named, *KEYS, "--policy", "round-robin")
    try:
        yield process.wait_for(2)
        assert "Traceback" not in process.text
    finally:
        process.kill()


@pytest.fixture(scope="module")
def claude(router: RouterThread) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=router.url, api_key="alice", max_retries=0, timeout=60)


def test_messages(claude: anthropic.Anthropic, replicas: list[ChatReplica]) -> None:
    """The official client gets a message, whole and streamed; the replica sees a chat completion with the tenant's
    salt."""
    made = claude.messages.create(model="m", max_tokens=9, messages=ASKED, system="Be brief.", stop_sequences=["x"])
    assert made.content[0].type == "text" and made.content[0].text == TEXT and made.stop_reason == "end_turn"
    assert (made.usage.input_tokens, made.usage.cache_read_input_tokens, made.usage.output_tokens) == (4, 16, 5)
    [seen] = [
        body
        for one in replicas
        for body in one.bodies("/v1/chat/completions")
        if body["messages"][0]["content"] == "Be brief." and "stop" in body
    ]
    assert [message["role"] for message in seen["messages"]] == ["system", "user"]
    assert Salt.parse(seen["cache_salt"]).tenant
    assert seen["stop"] == ["x"]
    with claude.messages.stream(model="m", max_tokens=9, messages=ASKED) as stream:
        assert "".join(stream.text_stream) == TEXT
        final = stream.get_final_message()
    assert final.stop_reason == "end_turn" and final.usage.output_tokens == 5
    assert not any(set(one.paths) - PROBED for one in replicas)


def test_tools_of_messages(claude: anthropic.Anthropic) -> None:
    """A tool is called, whole and streamed, and its result answered."""
    options: dict[str, Any] = {"model": "m", "max_tokens": 9, "tools": [TOOL]}
    made = claude.messages.create(messages=ASKED, **options)
    [call] = made.content
    assert call.type == "tool_use" and call.input == {"city": "Rome"} and made.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    turns = [*ASKED, {"role": "assistant", "content": [call.model_dump()]}, {"role": "user", "content": [result]}]
    assert claude.messages.create(messages=turns, **options).content[0].type == "text"
    with claude.messages.stream(messages=ASKED, **options) as stream:
        [block] = stream.get_final_message().content
    assert block.type == "tool_use" and block.input == {"city": "Rome"}


def test_responses(router: RouterThread) -> None:
    """The official client gets a response, whole and streamed, calls tools, and continues a stored conversation that
    other tenants do not see."""
    alice, bob = router.openai("alice"), router.openai("bob")
    made = alice.responses.create(model="m", input="Rome?", instructions="Be brief.")
    assert made.output_text == TEXT and made.usage is not None and made.usage.input_tokens == 20
    again = alice.responses.create(model="m", input="And now?", previous_response_id=made.id)
    assert again.output_text == TEXT and alice.responses.retrieve(again.id).output_text == TEXT
    with pytest.raises(openai.NotFoundError):
        bob.responses.create(model="m", input="And now?", previous_response_id=made.id)
    with pytest.raises(openai.NotFoundError):
        bob.responses.retrieve(made.id)
    tools: list[Any] = [FUNCTION]
    called = alice.responses.create(model="m", input="Rome?", tools=tools)
    assert called.output[0].type == "function_call" and called.output[0].arguments == '{"city": "Rome"}'
    with alice.responses.stream(model="m", input="Rome?") as stream:
        assert stream.get_final_response().output_text == TEXT


def test_continued_conversations_reach_the_replica(router: RouterThread, replicas: list[ChatReplica]) -> None:
    """The replica gets the whole conversation, whose first part only the router knows."""
    alice = router.openai("alice")
    first = alice.responses.create(model="m", input="One?")
    with alice.responses.stream(model="m", input="Two?", previous_response_id=first.id) as stream:
        second = stream.get_final_response()
    alice.responses.create(model="m", input="Three?", previous_response_id=second.id)
    latest = max(
        (body["messages"] for one in replicas for body in one.bodies("/v1/chat/completions")),
        key=lambda messages: messages[-1]["content"] == "Three?",
    )
    assert [message["content"] for message in latest] == ["One?", TEXT, "Two?", TEXT, "Three?"]


def test_errors_in_the_client_s_own_format(claude: anthropic.Anthropic, router: RouterThread) -> None:
    """Errors of the router and of replicas come in the format of the client's dialect."""
    with pytest.raises(anthropic.BadRequestError) as refused:
        claude.messages.create(model="m", max_tokens=9, messages=ASKED, extra_body={"temperature": 2})
    assert refused.value.body["error"]["message"] == "temperature is too high"  # type: ignore[index,call-overload]
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(model="other", max_tokens=9, messages=ASKED)
    stranger = anthropic.Anthropic(base_url=router.url, api_key="mallory", max_retries=0)
    with pytest.raises(anthropic.AuthenticationError):
        stranger.messages.create(model="m", max_tokens=9, messages=ASKED)
    body = {"model": "m", "input": "x", "kv_transfer_params": {"prefill": "evil:1"}}
    answer = http_client.post(f"{router.url}/v1/responses", json=body, headers={"authorization": "Bearer alice"})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "kv_transfer_params"


def test_prefetch_on_other_servers(router: RouterThread, replicas: list[ChatReplica]) -> None:
    """A prefetch reaches vLLM with the tenant's salt, which no other tenant has; the answers are listed by replica."""
    path = "/v1/cache/prefetch"
    with router.http("alice") as client:  # another test may have broken one
        until(lambda: len(client.post(path, json={"prompt": words("first", 9)}).json()["replicas"]) == len(replicas))
    for key in ("alice", "bob"):
        with router.http(key) as client:
            found = client.post(path, json={"prompt": words("prefetch", 9), "cache_salt": "mine"}).json()
            assert (found["status"], found["tokens"]) == ("clipped", 16)
            assert {one["replica"] for one in found["replicas"]} == {one.url for one in replicas}
    salts = [[Salt.parse(body["cache_salt"]) for body in one.bodies(path)][-2:] for one in replicas]
    assert salts[0] == salts[1] and len(set(salts[0])) == 2 and all(salt.tenant and salt.client for salt in salts[0])


def test_retry_and_failure_in_the_middle(claude: anthropic.Anthropic, replicas: list[ChatReplica]) -> None:
    """A stream that breaks before its first token is served by another replica."""
    replicas[0].broken = True
    try:
        for _ in range(4):
            with claude.messages.stream(model="m", max_tokens=9, messages=ASKED) as stream:
                assert "".join(stream.text_stream) == TEXT
    finally:
        replicas[0].broken = False


def test_failover_of_translated_streams(shared: SharedServers, loop: Loop) -> None:
    """A stream that breaks in the middle is continued on another real server, and neither client notices."""
    scissors = Scissors()
    relays = [Relay(loop, shared.open.url, scissors) for _ in range(2)]
    named = [argument for one in relays for argument in ("--replica", one.url)]
    router = RouterThread(*named, "--policy", "round-robin").wait_for(2)
    try:
        messages: list[Any] = [{"role": "user", "content": words("translated", 8)}]
        options: dict[str, Any] = {"extra_body": {"temperature": 0, "ignore_eos": True}}
        claude = anthropic.Anthropic(base_url=router.url, api_key="none", max_retries=0, timeout=60)
        whole = claude.messages.create(model=shared.open.model, max_tokens=24, messages=messages, **options)
        for cut in (1, 5, 12):
            scissors.cut_after(cut)
            with claude.messages.stream(model=shared.open.model, max_tokens=24, messages=messages, **options) as stream:
                begun = next(event.message for event in stream if event.type == "message_start").usage.input_tokens
                final = stream.get_final_message()
            assert final.content[0].type == whole.content[0].type == "text"
            assert final.content[0].text == whole.content[0].text and final.stop_reason == whole.stop_reason
            assert final.usage.output_tokens == whole.usage.output_tokens
        count = claude.messages.count_tokens(model=shared.open.model, messages=messages)
        assert begun == count.input_tokens  # also where the router has not tokenized it
        with pytest.raises(anthropic.NotFoundError, match="No prefix named 'no-such'"):
            claude.messages.count_tokens(model=shared.open.model, messages=messages, extra_body={"prefix": "no-such"})
        text = {"content": words("a prefix of text", 12)}  # both replicas are one server, which gets it twice
        assert http_client.put(f"{router.url}/v1/prefixes/text", json=text).status_code < 300
        with pytest.raises(anthropic.BadRequestError, match="'text' is text"):
            claude.messages.count_tokens(model=shared.open.model, messages=messages, extra_body={"prefix": "text"})
        http_client.delete(f"{router.url}/v1/prefixes/text")
        assert count.input_tokens == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
        assert router.metric("foreword:router_continuations_total", outcome="continued") >= 1
    finally:
        router.kill()
