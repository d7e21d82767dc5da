"""Text of the only choice, which most events of a stream are, is taken with less work: nothing else may follow from that."""

from __future__ import annotations

import json
import random
from typing import Any, Literal

import pytest

from foreword.api.dialects.answer_reader import ServerSentEvent
from foreword.api.dialects.decode import Limits
from foreword.request_errors import ReplicaFailed
from foreword.router.replica_body import parse_request
from foreword.router.response_stream import ResponseStream

_CHAT = {"messages": [{"role": "user", "content": "a"}]}
_TEXTS = ("a", " word", "", "\ufffd", "x\ufffd", "\n\n", '"finish_reason":"stop"', "\U0001f600")


def drawn(draw: random.Random, dialect: str) -> dict[str, Any]:
    """An event as servers send them, mostly text and nothing else."""
    choice: dict[str, Any] = {"index": 0, "finish_reason": None}
    text = draw.choice(_TEXTS)
    if dialect == "completions":
        choice["text"] = text
    else:
        choice["delta"] = {"content": text}
        if draw.random() < 0.2:
            choice["delta"] = draw.choice(
                (
                    {"role": "assistant", "content": text},
                    {"content": text, "reasoning_content": "hm"},
                    {"reasoning": "hm"},
                    {"content": text, "reasoning": "hm"},
                    {"refusal": text},
                    {"content": text, "tool_calls": [{"index": 0, "id": "c", "function": {"name": "f"}}]},
                    {},
                )
            )
    if draw.random() < 0.6:
        choice["token_ids"] = [draw.randrange(1000) for _ in range(draw.choice((1, 1, 1, 2, 0)))]
    chunk: dict[str, Any] = {"id": "c", "choices": [choice]}
    rare = draw.random()
    if rare < 0.04:
        choice["index"] = 1
    elif rare < 0.08:
        choice["finish_reason"] = "stop"
    elif rare < 0.12:
        chunk["prompt_token_ids"] = [1, 2, 3]
    elif rare < 0.16:
        choice["prompt_token_ids"] = [4, 5]
    elif rare < 0.2:
        chunk["usage"] = draw.choice((None, {"prompt_tokens": 3, "completion_tokens": 1}))
    elif rare < 0.22:
        chunk["choices"] = []
    elif rare < 0.24:
        chunk["choices"] = [choice, {**choice, "index": 1}]
    elif rare < 0.26:
        chunk["error"] = {"message": "broken", "code": 500}
    elif rare < 0.28:
        chunk["cache_report"] = {"cached_tokens": 1}
    elif rare < 0.3:
        choice["message"] = {"content": "whole"}
    elif rare < 0.32:
        chunk["type"] = draw.choice(("response.output_text.delta", "message_stop"))
    return chunk


def state(stream: ResponseStream) -> tuple[Any, ...]:
    """The state of a stream, from which follows all that the router does next."""
    reader, choices = stream.reader, stream.choices
    return (
        (stream.begun, stream.opened, stream.done, stream.cut, stream.exact, stream.text_only, stream.finished),
        (stream.can_continue, stream.can_repeat, stream.can_resume, stream.entries, stream.tokens, stream.usage),
        (stream.prompt_ids, stream.head, stream.stamp),
        (reader.begun, reader.other, reader.counts, bool(reader.report), reader.ended),
        [(one.tokens, one.sent_text, one.settled, one.without_ids, one.has_role, one.finish_reason) for one in choices],
    )


def took(stream: ResponseStream, event: ServerSentEvent) -> bytes | str | None:
    """Take an event: what the client gets, or the error."""
    try:
        return stream.take(event)
    except ReplicaFailed as error:
        return f"failed: {error.message}"


@pytest.mark.parametrize("kind", ["vllm", "openai", "foreword"])
@pytest.mark.parametrize("dialect", ["completions", "chat"])
def test_text_is_taken_as_any_event(dialect: Literal["completions", "chat"], kind: str) -> None:
    """An event with a name is never taken as mere text, and otherwise says the same: client and state are the same after every
    event of 400 streams, some of which another replica begins again."""
    draw = random.Random(f"{dialect} {kind}")
    texts = 0
    for _ in range(400):
        body: dict[str, Any] = {
            "model": "m",
            "stream": True,
            **({"prompt": "a"} if dialect == "completions" else _CHAT),
        }
        body |= draw.choice(({}, {"stream_options": {"include_usage": True}}, {"return_token_ids": True}, {"n": 2}))
        request = parse_request(dialect, json.dumps(body).encode(), Limits())
        short, long = ResponseStream(request), ResponseStream(request)
        for one in (short, long):
            one.next_response(kind)
        for _ in range(draw.randrange(1, 30)):
            data = json.dumps(drawn(draw, dialect), separators=(",", ":")).encode()
            got = took(short, ServerSentEvent(b"data: " + data, data))
            assert got == took(long, ServerSentEvent(b"data: " + data, data, "message"))
            assert state(short) == state(long)
            texts += isinstance(got, bytes)
            if draw.random() < 0.03:
                for one in (short, long):
                    one.restart()
                    one.next_response(kind)
    assert texts > 1000
