"""Streams of several choices or prompts, whose replica is lost or does not send what it should: a client gets each choice once
and to its end, or an error."""

from __future__ import annotations

import json
from typing import Any

import pytest

from foreword.api.dialects.decode import Limits
from foreword.api.sse import EventParser, ServerSentEvent
from foreword.router.choice_stream import NotReproduced
from foreword.router.replica_body import parse_request
from foreword.router.response_stream import ResponseStream


def event(data: bytes) -> ServerSentEvent:
    return EventParser().feed(b"data: " + data + b"\n\n")[0]


def chunk(
    index: int, text: str, ids: list[int] | None = None, finish: str | None = None, **more: Any
) -> ServerSentEvent:
    choice = {"index": index, "text": text, "finish_reason": finish, "token_ids": ids, **more}
    return event(json.dumps({"id": "c", "object": "text_completion", "choices": [choice]}).encode())


def opened(kind: str, **fields: Any) -> ResponseStream:
    """A stream of a completion with these fields, as a replica of this kind opens it."""
    body = {"model": "m", "prompt": "a", "stream": True, **fields}
    stream = ResponseStream(parse_request("completions", json.dumps(body).encode(), Limits()))
    stream.next_response(kind)
    return stream


def repeated() -> ResponseStream:
    """A stream of two choices with two tokens each, which another vLLM computes again."""
    stream = opened("vllm", n=2, seed=3)
    for index, text in ((0, "The cat"), (1, "One dog")):
        assert stream.take(chunk(index, text, [5, 6], prompt_token_ids=[9]))
    stream.repeat()
    stream.next_response("vllm")
    return stream


@pytest.mark.parametrize(
    "sent",
    [chunk(0, "The cat ran"), chunk(0, "The", [5], "stop"), chunk(0, "", None, "stop"), chunk(0, "The cow", [5, 7])],
    ids=["text without tokens", "an early end", "nothing", "another token"],
)
def test_what_is_not_repeated_ends_the_stream(sent: ServerSentEvent) -> None:
    """A replica that computes a choice again sends all tokens that the client has, and the same; nothing else is joined."""
    with pytest.raises(NotReproduced):
        repeated().take(sent)
    stream = repeated()
    assert stream.take(chunk(0, "The cat", [5, 6])) is None
    assert b'" ran"' in (stream.take(chunk(0, " ran", None, "stop")) or b"")


@pytest.mark.parametrize("kind", ["openai", "vllm", "foreword"])
@pytest.mark.parametrize(("text", "finish"), [("", "stop"), ("x", None), ("x", "stop")])
def test_a_choice_is_never_sent_twice(kind: str, text: str, finish: str | None) -> None:
    """Once a client has text or the end of one of several choices, no other replica begins the stream again."""
    stream = opened(kind, n=2)
    stream.take(chunk(0, "", None))
    assert not stream.begun
    stream.take(chunk(0, text, None, finish))
    assert stream.begun
