"""Streams of several choices or prompts, whose replica is lost or does not send what it should: a client gets each choice once
and to its end, or an error."""

from __future__ import annotations

import json
from typing import Any

import http_client
import pytest
from aiohttp import web
from router_parts import Loop, RouterThread
from scripted_replica import ScriptedReplica

from foreword.api.dialects.answer_reader import EventParser, ServerSentEvent
from foreword.api.dialects.decode import Limits
from foreword.request_errors import ReplicaFailed
from foreword.router.replica_body import asks_ids, parse_request
from foreword.router.response_stream import NotReproduced, ResponseStream


class Broken(ScriptedReplica):
    """Sends these events in each stream, and breaks the connection."""

    events: tuple[ServerSentEvent, ...]

    def routes(self) -> list[web.RouteDef]:
        return [web.post("/v1/completions", self._answer)]

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        out = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await out.prepare(request)
        await out.write(b"".join(one.raw + b"\n\n" for one in self.events))
        transport = request.transport
        assert transport is not None
        transport.close()
        return out


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


@pytest.mark.parametrize("fields", [{"prompt": ["a"] * 1100}, {"n": 1100}])
def test_all_choices_must_end(fields: dict[str, Any]) -> None:
    """A stream of more choices than the router remembers is whole when the last one has ended, and before that its end is an
    error."""
    stream = opened("openai", **fields)
    for index in range(1099):
        stream.take(chunk(index, "x", None, "length"))
        assert not stream.finished
    with pytest.raises(ReplicaFailed):
        stream.end()
    stream.take(chunk(1099, "x", None, "length"))
    assert stream.finished and (stream.end() or b"").endswith(b"[DONE]\n\n")


def test_the_end_of_a_stream_whose_tokens_were_asked_for() -> None:
    """A server that gives token ids sends all choices; its end before that is an error, also if the client asked for them."""
    for shown in (False, True):
        stream = opened("vllm", n=2, seed=3, return_token_ids=shown)
        stream.take(chunk(0, "a", [1], "stop", prompt_token_ids=[9]))
        with pytest.raises(ReplicaFailed):
            stream.end()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_choice_that_the_router_ends(order: tuple[int, int]) -> None:
    """If a stop string ended one of the repeated choices, the stream ends with the other one, whichever ends last: the replica
    would go on with the first."""
    stream = opened("vllm", n=2, seed=3, stop=["X"])
    for index in (0, 1):
        stream.take(chunk(index, "a", [1], prompt_token_ids=[9]))
    stream.repeat()
    stream.next_response("vllm")
    for index in (0, 1):
        stream.take(chunk(index, "a", [1]))
    ends = {0: chunk(0, "X", [2]), 1: chunk(1, "b", [3], "length")}
    for index in order:
        assert not stream.cut
        stream.take(ends[index])
    assert stream.cut and stream.finished


def test_output_without_token_ids_is_counted_by_the_piece() -> None:
    """A client that leaves pays at least a token for each piece of each choice whose ids are not known."""
    for fields in ({"prompt": ["a", "b"]}, {"n": 2}):
        stream = opened("openai", **fields)
        for number in range(40):
            stream.take(chunk(number % 2, "x"))
        assert stream.usage.output == 40
        stream.take(chunk(0, "x" * 400))
        assert stream.usage.output == 110


@pytest.mark.parametrize("kind", ["foreword", "vllm"])
def test_ids_are_asked_for_few_choices(kind: str) -> None:
    """A router asks for the prompt's ids of at most 16 choices, since a replica repeats them with each choice."""
    assert asks_ids(opened(kind, n=16, seed=1).request, kind)
    assert not asks_ids(opened(kind, n=17, seed=1).request, kind)


def test_a_number_of_choices_below_one() -> None:
    """A server's answer to a number of choices below one is forwarded."""
    stream = opened("openai", n=-1)
    assert stream.take(chunk(0, "b", None, "stop")) and stream.finished


@pytest.mark.parametrize(("kind", "others"), [("openai", ()), ("vllm", (chunk(1, "b"),))])
@pytest.mark.parametrize("text", ["", "all of it"])
def test_the_end_of_a_choice_comes_before_the_error(kind: str, others: tuple[ServerSentEvent, ...], text: str) -> None:
    """A client gets the last chunk of the choice that has ended, once, and then the error, if the replica is lost before the
    other choice has ended."""
    loop = Loop()
    replicas = [Broken(loop, kind), Broken(loop, kind)]
    for one in replicas:
        one.events = (*others, chunk(0, text, None, "stop"))
    router = RouterThread(*(part for one in replicas for part in ("--replica", one.url))).wait_for(2)
    try:
        body = {"model": "m", "prompt": "a", "n": 2, "stream": True}
        sent = http_client.post(f"{router.url}/v1/completions", json=body).content
    finally:
        router.kill()
    events = [json.loads(one.data) for one in EventParser().feed(sent) if one.data.startswith(b"{")]
    assert [list(one)[-1] for one in events] == ["choices"] * len(others) + ["choices", "error"], sent
    assert events[-2]["choices"][0]["text"] == text and events[-2]["choices"][0]["finish_reason"] == "stop"
