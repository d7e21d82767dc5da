"""How a gateway sends a request to the endpoint picker: in pieces, with trailers, in part, too much of it, or not at all."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from queue import SimpleQueue
from typing import Any

import pytest
from hostile_replica import HostileReplica
from router_parts import ANY_PORT, Loop, RouterThread
from shared_server import until

grpc = pytest.importorskip("grpc")
METHOD = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
DESTINATION = "x-gateway-destination-endpoint"
BODY = json.dumps({"prompt": "once upon a time", "max_tokens": 2}).encode()
LIMIT = 20_000


class Exchange:
    """A gateway's stream about one request."""

    def __init__(self, port: int, mode: str, path: str = "/v1/completions", **head: Any) -> None:
        from foreword.router_extras.gateway import envoy_messages as envoy

        self.envoy = envoy
        self._channel = grpc.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.use_local_subchannel_pool", 1)])
        self._messages: SimpleQueue[Any] = SimpleQueue()
        process = self._channel.stream_stream(
            METHOD,
            request_serializer=envoy.ProcessingRequest.SerializeToString,
            response_deserializer=envoy.ProcessingResponse.FromString,
        )
        self.answers = process(iter(self._messages.get, None), timeout=60, wait_for_ready=True)
        first = envoy.ProcessingRequest()
        config = first.protocol_config
        config.request_body_mode = config.response_body_mode = getattr(envoy, mode)
        for name, value in {":method": "POST", ":path": path, "content-type": "application/json"}.items():
            first.request_headers.headers.headers.add(key=name, **{head.get("as_", "raw_value"): _typed(value, head)})
        for name, value in head.get("more", {}).items():
            first.request_headers.headers.headers.add(key=name, raw_value=value.encode())
        first.request_headers.end_of_stream = head.get("ends", False)
        self._messages.put(first)

    def send(self, kind: str, **fields: Any) -> None:
        message = self.envoy.ProcessingRequest()
        part = getattr(message, kind)
        part.SetInParent()
        for name, value in fields.items():
            setattr(part, name, value)
        self._messages.put(message)

    def response(self, status: str) -> None:
        message = self.envoy.ProcessingRequest()
        message.response_headers.headers.headers.add(key=":status", raw_value=status.encode())
        self._messages.put(message)

    def body(self, pieces: Sequence[bytes], *, ends: bool = True) -> None:
        for at, piece in enumerate(pieces):
            self.send("request_body", body=piece, end_of_stream=ends and at == len(pieces) - 1)

    def end(self) -> None:
        self._messages.put(None)

    def close(self) -> None:
        self._channel.close()


def _typed(value: str, head: dict[str, Any]) -> Any:
    return value if head.get("as_") == "value" else value.encode()


class Picker:
    def __init__(self) -> None:
        self.router = RouterThread("--replica", HostileReplica(Loop()).url, *ANY_PORT, "--max-body", str(LIMIT))
        self.router.wait_for(1)
        self.port = self.router.picker_port

    def front(self) -> Any:
        return next(one for one in self.router.router.fronts if one.label == "picker ")

    def counted(self, status: int) -> float:
        return self.router.metric(
            "foreword:router_http_responses_total", route="picker /v1/completions", status=str(status)
        )


@pytest.fixture(scope="module")
def picker() -> Iterator[Picker]:
    one = Picker()
    yield one
    one.router.kill()


def picked(exchange: Exchange, mode: str) -> tuple[str, bytes]:
    """The endpoint that is picked, and the body for it."""
    answers = exchange.answers
    first = next(answers)
    common = first.request_headers.response
    if mode == "BUFFERED":
        common = next(answers).request_body.response
    headers = {one.header.key: one.header.raw_value.decode() for one in common.header_mutation.set_headers}
    body = b""
    if mode == "BUFFERED":
        body = common.body_mutation.body
    else:
        for answer in answers:
            if answer.HasField("request_trailers"):
                break
            piece = answer.request_body.response.body_mutation.streamed_response
            body += piece.body
            if piece.end_of_stream:
                break
    return headers[DESTINATION], body


PIECES = {
    "whole": [BODY],
    "one byte each": [BODY[at : at + 1] for at in range(len(BODY))],
    "with empty ones": [b"", BODY[:5], b"", BODY[5:], b""],
}


@pytest.mark.parametrize("form", ["raw_value", "value"])
@pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES.keys())
def test_a_body_in_pieces(picker: Picker, pieces: list[bytes], form: str) -> None:
    """However a body is cut, and in whichever field headers come, the replica gets the same body, once."""
    exchange = Exchange(picker.port, "FULL_DUPLEX_STREAMED", as_=form)
    exchange.body(pieces)
    address, body = picked(exchange, "FULL_DUPLEX_STREAMED")
    assert address.startswith("127.0.0.1:") and json.loads(body)["prompt"] == "once upon a time"
    exchange.close()


@pytest.mark.parametrize("mode", ["BUFFERED", "FULL_DUPLEX_STREAMED"])
def test_a_body_with_trailers(picker: Picker, mode: str) -> None:
    """Trailers end a body, and are answered where the gateway waits for that."""
    exchange = Exchange(picker.port, mode)
    exchange.body([BODY], ends=mode == "BUFFERED")
    exchange.send("request_trailers")
    assert picked(exchange, mode)[0]
    if mode == "BUFFERED":
        assert next(exchange.answers).HasField("request_trailers")
    exchange.close()


def refusal(exchange: Exchange) -> tuple[int, str]:
    """Status and code of the error for the client, which is the last answer."""
    for answer in exchange.answers:
        if answer.HasField("immediate_response"):
            found = answer.immediate_response
            return found.status.code, json.loads(found.body)["error"]["code"]
    raise AssertionError("there was no error")


@pytest.mark.parametrize("mode", ["BUFFERED", "FULL_DUPLEX_STREAMED"])
@pytest.mark.parametrize("declared", [True, False])
def test_a_body_that_is_too_large(picker: Picker, mode: str, declared: bool) -> None:
    """The client gets 413 as soon as it is known, and the gateway is asked for no more of the body; nothing of it is held."""
    more = {"content-length": str(LIMIT + 1)} if declared else {}
    exchange = Exchange(picker.port, mode, more=more)
    if not declared:
        exchange.body([bytes(1000)] * 30, ends=False)
    assert refusal(exchange)[0] == 413
    assert not list(exchange.answers)
    until(lambda: not picker.front().active and not picker.router.router.bodies.used)
    exchange.close()


@pytest.mark.parametrize("mode", ["BUFFERED", "FULL_DUPLEX_STREAMED"])
def test_no_body(picker: Picker, mode: str) -> None:
    """A request without a body, and one whose body is empty, get an error, not an answer for another one."""
    exchange = Exchange(picker.port, mode, ends=True)
    assert refusal(exchange)[0] == 400
    exchange.close()
    exchange = Exchange(picker.port, mode)
    exchange.body([b""])
    assert refusal(exchange)[0] == 400
    exchange.close()


@pytest.mark.parametrize("mode", ["BUFFERED", "FULL_DUPLEX_STREAMED"])
@pytest.mark.parametrize("how", ["cancels", "ends"])
def test_a_gateway_that_leaves_within_a_body(picker: Picker, mode: str, how: str) -> None:
    """A stream that is closed before its body is complete is a request that has ended: nothing runs, and nothing is held."""
    exchange, before = Exchange(picker.port, mode), picker.counted(499) + picker.counted(400)
    exchange.body([BODY[:5]], ends=False)
    until(lambda: picker.router.router.bodies.used == 5)
    if how == "cancels":
        exchange.answers.cancel()
    else:
        exchange.end()
    until(lambda: not picker.front().active and not picker.router.router.bodies.used)
    assert picker.counted(499) + picker.counted(400) == before + 1
    exchange.close()


@pytest.mark.parametrize("mode", ["BUFFERED", "FULL_DUPLEX_STREAMED"])
def test_a_gateway_that_answers_within_a_body(picker: Picker, mode: str) -> None:
    """A gateway may answer a client before its body has come, such as with a timeout. The picker answers the messages about
    this response, which the gateway waits for, and counts the request with its status; it places nothing."""
    exchange, before = Exchange(picker.port, mode), picker.counted(408)
    exchange.body([BODY[:5]], ends=False)
    exchange.response("408")
    answers = iter(exchange.answers)
    first = next(answers)
    if mode == "BUFFERED":
        first = next(answers)
    assert first.HasField("response_headers") and not first.response_headers.response.header_mutation.set_headers
    exchange.send("response_body", body=b"late", end_of_stream=True)
    assert next(answers).HasField("response_body")
    exchange.end()
    assert not list(answers)
    assert picker.counted(408) == before + 1 and not picker.front().active
    exchange.close()
