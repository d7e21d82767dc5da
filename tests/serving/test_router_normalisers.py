"""Opt-in changes to chats on their way through the router: each is visible in the response."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import http_client
import httpx
import pytest
from chat_replica import ChatReplica
from router_parts import Loop, RouterThread

HEADER = "x-foreword-normalised"
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"b": 1, "a": 2}}} for name in ("z", "weather")]


@pytest.fixture(scope="module")
def replica() -> ChatReplica:
    return ChatReplica(Loop())


@pytest.fixture(scope="module")
def router(replica: ChatReplica) -> Iterator[RouterThread]:
    flags = ("--drop-lines", "^Now:", "--sort-tools", "--keep-answers")
    process = RouterThread("--replica", replica.url, *flags)
    try:
        yield process.wait_for(1)
        assert "Traceback" not in process.text
    finally:
        process.kill()


def chat(router: RouterThread, messages: list[Any], **more: Any) -> httpx.Response:
    body = {"messages": messages, **more}
    return http_client.post(f"{router.url}/v1/chat/completions", json=body).raise_for_status()


def test_volatile_lines_and_tools(router: RouterThread, replica: ChatReplica) -> None:
    """A volatile line of the system prompt is dropped and tools are sorted; a chat without either is sent unchanged."""
    system = {"role": "system", "content": "Be brief.\nNow: 12:01:07\nBe kind."}
    user = {"role": "user", "content": "Now: what?"}
    answer = chat(router, [system, user], tools=TOOLS)
    assert answer.headers[HEADER] == "volatile-lines=1, tools"
    sent = replica.bodies("/v1/chat/completions")[-1]
    assert sent["messages"] == [{**system, "content": "Be brief.\nBe kind."}, user]
    assert [tool["function"]["name"] for tool in sent["tools"]] == ["weather", "z"]
    assert HEADER not in chat(router, [user]).headers
    assert replica.bodies("/v1/chat/completions")[-1]["messages"] == [user]
    body = {"system": system["content"], "messages": [user], "max_tokens": 4}
    assert http_client.post(f"{router.url}/v1/messages", json=body).headers[HEADER] == "volatile-lines=1"


@pytest.mark.parametrize("streams", [True, False])
def test_answers_are_restored(router: RouterThread, replica: ChatReplica, streams: bool) -> None:
    """Arguments of an earlier call that the client writes in another way are sent as the model wrote them."""
    user = {"role": "user", "content": f"Rome? {streams}"}
    chat(router, [user], tools=TOOLS, stream=streams)
    arguments = json.dumps({"city": "Rome"}, indent=1)
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    turns = [user, {"role": "assistant", "content": None, "tool_calls": [call]}]
    answer = chat(router, [*turns, {"role": "tool", "tool_call_id": "call_1", "content": "sunny"}])
    assert answer.headers[HEADER] == "answers=1"
    sent = replica.bodies("/v1/chat/completions")[-1]["messages"][1]
    assert sent["tool_calls"][0]["function"]["arguments"] == '{"city": "Rome"}'
