"""Anthropic's messages, with the official client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from shared_server import SharedServer, SharedServers, words

TOOL: Any = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 10}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def client_of(server: SharedServer, key: str = "none") -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0, timeout=60)


@pytest.fixture
def claude(server: SharedServer) -> Iterator[anthropic.Anthropic]:
    with client_of(server) as made:
        yield made


def ask(text: str = "def area(") -> Any:
    return [{"role": "user", "content": text}]


def test_message(claude: anthropic.Anthropic, server: SharedServer) -> None:
    """A message has text, a reason why it stopped, and the usage; the second time its prompt is read from the cache."""
    asked: Any = {"model": server.model, "max_tokens": 8, "system": words("claude", 60), "messages": ask()}
    first, second = (claude.messages.create(**asked) for _ in range(2))
    assert first.role == "assistant" and first.content[0].type == "text" and first.content[0].text
    assert first.stop_reason in ("max_tokens", "end_turn") and first.usage.output_tokens <= 8
    # Any two prompts begin with the same token.
    before, read = ((one.usage.cache_read_input_tokens or 0) for one in (first, second))
    asked_tokens = first.usage.input_tokens + before
    assert before < 16 < read and second.usage.input_tokens + read == asked_tokens
    counted = claude.messages.count_tokens(model=server.model, system=asked["system"], messages=ask())
    assert counted.input_tokens == asked_tokens


def test_streamed_message_is_the_same(claude: anthropic.Anthropic, server: SharedServer) -> None:
    """The client's own accumulation of events gives the message that is not streamed."""
    asked: Any = {"model": server.model, "max_tokens": 12, "messages": ask(), "extra_body": {"temperature": 0}}
    whole = claude.messages.create(**asked)
    with claude.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == "".join(b.text for b in whole.content if b.type == "text")
        final = stream.get_final_message()
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_errors_in_anthropics_format(claude: anthropic.Anthropic, shared: SharedServers) -> None:
    """Anthropic's client raises the exception that belongs to each error."""
    with pytest.raises(anthropic.NotFoundError, match="No model named"):
        claude.messages.create(model="claude-nine", max_tokens=1, messages=ask())
    with pytest.raises(anthropic.BadRequestError, match="max_tokens") as caught:
        claude.messages.create(model=shared.open.model, max_tokens=-1, messages=ask())
    assert caught.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]
    with client_of(shared.keyed, "wrong") as stranger, pytest.raises(anthropic.AuthenticationError):
        stranger.messages.create(model=shared.keyed.model, max_tokens=1, messages=ask())
    with client_of(shared.keyed, "alice4-secret") as alice:
        alice.messages.create(model=shared.keyed.model, max_tokens=1, messages=ask())


def test_cache_control_is_accepted(claude: anthropic.Anthropic, server: SharedServer) -> None:
    """A breakpoint writes the prefix into the cache, and the next request reads it: the usage says both."""
    system: Any = [{"type": "text", "text": words("marked", 80), "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
    asked: Any = {"model": server.model, "max_tokens": 1, "system": system, "messages": ask()}
    first, second = (claude.messages.create(**asked).usage for _ in range(2))
    assert (first.cache_creation_input_tokens or 0) > 0
    assert first.cache_creation is not None
    assert first.cache_creation.ephemeral_1h_input_tokens == first.cache_creation_input_tokens
    assert (second.cache_read_input_tokens or 0) > 0


def test_streamed_tool_calls(claude: anthropic.Anthropic, server: SharedServer) -> None:
    """The client's accumulation of a streamed call gives the call that is not streamed, and its result continues it."""
    asked: Any = {"model": server.model, "max_tokens": 60, "messages": ask("Weather?"), "tools": [TOOL]}
    asked |= {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}, "extra_body": {"temperature": 0}}
    whole = claude.messages.create(**asked)
    with claude.messages.stream(**asked) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    [call], [expected] = final.content, whole.content
    assert call.type == expected.type == "tool_use" and final.stop_reason == whole.stop_reason == "tool_use"
    assert (call.name, call.input) == (expected.name, expected.input) == ("get_weather", call.input)
    assert set(call.input) == {"city"} and len(pieces) > 1
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    turns = [*ask("Weather?"), {"role": "assistant", "content": final.content}, {"role": "user", "content": [result]}]
    asked |= {"messages": turns, "tool_choice": {"type": "none"}}
    with claude.messages.stream(**asked) as stream:
        assert stream.get_final_message().stop_reason in ("end_turn", "max_tokens")


def test_the_clients_own_loop_of_tools(claude: anthropic.Anthropic, server: SharedServer) -> None:
    """The client would leave the conversation on the server. Told that nothing is kept there, it sends all of it."""
    asked: list[str] = []

    @anthropic.beta_tool
    def remember(word: str) -> str:
        """Remember a word."""
        return asked.append(word) or "done"

    choice: Any = {"type": "any", "disable_parallel_tool_use": True}
    runner = claude.beta.messages.tool_runner(
        model=server.model, max_tokens=60, messages=ask(), tools=[remember], tool_choice=choice, max_iterations=2
    )
    used = [message.usage for message in runner]
    prompts = [one.input_tokens + (one.cache_read_input_tokens or 0) for one in used]
    assert len(asked) == 2 and prompts[1] > prompts[0]
    thread: Any = {"type": "continue", "previous_message_id": "msg_1"}
    with pytest.raises(anthropic.BadRequestError, match="thread: ") as caught:
        claude.beta.messages.create(model=server.model, max_tokens=1, messages=ask(), thread=thread)
    assert caught.value.error_code == "thread_unsupported_request"


def test_streamed_thinking(shared: SharedServers) -> None:
    """Reasoning is a block of its own in the client's accumulation, streamed or not. The prompt has opened it."""
    begun = {"role": "assistant", "content": "<think>"}
    asked: Any = {"model": shared.limited.model, "max_tokens": 12, "messages": [*ask(), begun]}
    asked |= {"thinking": {"type": "enabled", "budget_tokens": 1024}}
    asked |= {"extra_body": {"temperature": 0, "ignore_eos": True}}
    with client_of(shared.limited, "dave-key") as claude:
        whole = claude.messages.create(**asked)
        with claude.messages.stream(**asked) as stream:
            pieces = [event.thinking for event in stream if event.type == "thinking"]
            final = stream.get_final_message()
    [thought], [expected] = final.content, whole.content
    assert thought.type == expected.type == "thinking"
    assert "".join(pieces) == thought.thinking == expected.thinking != ""


def test_stop_strings_count_behind_the_reasoning(shared: SharedServers) -> None:
    """An answer that continues inside of the reasoning, at its tag or behind some words of it, gives reasoning. A stop string
    in the reasoning does not end it, unless the client asks for that."""
    asked: Any = {"model": shared.limited.model, "max_tokens": 24}
    greedy = {"temperature": 0, "ignore_eos": True}
    with client_of(shared.limited, "dave-key") as claude:
        for begun in ("<think>", "<think>\nLet me"):
            messages: Any = [*ask(), {"role": "assistant", "content": begun}]
            whole = claude.messages.create(**asked, messages=messages, extra_body=greedy)
            [thought] = whole.content
            assert thought.type == "thinking" and whole.stop_reason == "max_tokens"
            stop = thought.thinking[4:6]
            same = claude.messages.create(**asked, messages=messages, stop_sequences=[stop], extra_body=greedy)
            assert same.content == whole.content and same.stop_reason == "max_tokens"
            everywhere = {**greedy, "stop_in_reasoning": True}
            cut = claude.messages.create(**asked, messages=messages, stop_sequences=[stop], extra_body=everywhere)
            assert cut.stop_reason == "stop_sequence" and cut.stop_sequence == stop
