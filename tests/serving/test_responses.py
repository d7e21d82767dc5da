"""OpenAI's Responses API, with the official client."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shared_server import SharedServer, SharedServers

from foreword.api.request import Message
from foreword.api.stored_responses import StoredResponses
from foreword.errors import NotFound

SHORT: Any = {"max_output_tokens": 8, "temperature": 0}


def test_response_and_its_continuation(ai: openai.OpenAI, server: SharedServer) -> None:
    """A response can be fetched, continued by its id as if its conversation had been sent again, and deleted."""
    first = ai.responses.create(model=server.model, input="def area(", **SHORT)
    assert first.status in ("completed", "incomplete") and first.output_text
    fetched = ai.responses.retrieve(first.id)
    assert fetched.output_text == first.output_text and fetched.usage == first.usage
    second = ai.responses.create(model=server.model, input="go on", previous_response_id=first.id, **SHORT)
    said: Any = [
        {"role": "user", "content": "def area("},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "go on"},
    ]
    repeated = ai.responses.create(model=server.model, input=said, store=False, **SHORT)
    assert second.usage is not None and repeated.usage is not None
    assert (second.output_text, second.usage.input_tokens) == (repeated.output_text, repeated.usage.input_tokens)
    assert repeated.usage.input_tokens_details.cached_tokens > 0
    ai.responses.delete(first.id)
    for gone in (first.id, repeated.id):
        with pytest.raises(openai.NotFoundError, match="is stored here"):
            ai.responses.retrieve(gone)


def test_streamed_response(ai: openai.OpenAI, server: SharedServer) -> None:
    """The events have consecutive numbers and end with the response that is stored. It is fetched whole: the client's helper
    for streams would wait for events. No tool of the server is called, so their limit holds."""
    asked: Any = {"model": server.model, "input": "def area(", "max_tool_calls": 3, **SHORT}
    events = list(ai.responses.create(**asked, stream=True))
    final = events[-1].response
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == final.output_text
    assert ai.responses.retrieve(final.id, stream=False).output_text == final.output_text
    assert final.max_tool_calls == 3
    with pytest.raises(openai.BadRequestError, match="stream"):
        ai.responses.retrieve(final.id, stream=True)
    assert final.output_text == ai.responses.create(**asked).output_text


def test_tenants_have_their_own_responses(shared: SharedServers) -> None:
    """A response of one tenant can neither be read, continued nor removed by another."""
    alice, bob = (shared.keyed.openai(f"{name}4-secret") for name in ("alice", "bob"))
    made = alice.responses.create(model=shared.keyed.model, input="mine", **SHORT)
    for attempt in (
        lambda: bob.responses.retrieve(made.id),
        lambda: bob.responses.delete(made.id),
        lambda: bob.responses.create(model=shared.keyed.model, input="x", previous_response_id=made.id, **SHORT),
    ):
        with pytest.raises(openai.NotFoundError):
            attempt()
    assert alice.responses.retrieve(made.id).id == made.id


@given(st.lists(st.tuples(st.sampled_from([b"a", b"b", b"c"]), st.integers(0, 9), st.integers(0, 900)), max_size=60))
def test_memory_is_bounded(added: list[tuple[bytes, int, int]]) -> None:
    """All responses together and those of one tenant stay within their limits; the newest of each tenant is kept."""
    kept = StoredResponses(memory=8000, ttl=60, clock=lambda: 0.0)
    for owner, number, size in added:
        kept.add(owner, str(number), [Message("user", "")], b"x" * size)
        assert kept.get(owner, str(number)).body == b"x" * size
        assert kept.used <= 8000 and all(count <= 2000 for count in kept._bytes.values())
    for owner, _, _ in added:
        kept.forget(owner)
    assert kept.used == 0


def test_responses_expire() -> None:
    """A response is kept for a time after its last use."""
    now = [0.0]
    kept = StoredResponses(memory=1 << 20, ttl=10, clock=lambda: now[0])
    kept.add(b"", "r", [Message("user", "hi")], b"{}")
    now[0] = 9.0
    kept.get(b"", "r")
    now[0] = 18.0
    kept.get(b"", "r")
    now[0] = 29.0
    with pytest.raises(NotFound):
        kept.get(b"", "r")
    assert kept.used == 0
