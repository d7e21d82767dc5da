"""Messages that strangers may send to the endpoint picker's port."""

from __future__ import annotations

import contextlib
import importlib
import logging
import socket
from collections.abc import Iterator
from queue import SimpleQueue
from random import Random
from typing import Any

import pytest
import stranger_messages
from hostile_replica import HostileReplica
from router_parts import ANY_PORT, Loop, RouterThread
from stranger_messages import call_head, grpc_call, h2_frame

grpc = pytest.importorskip("grpc")
RESET = b"\x00\x00\x04\x03\x00\x00\x00\x00\x01"  # a frame that ends the first stream
METHOD = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"


@pytest.fixture
def port() -> Iterator[int]:
    router = RouterThread("--replica", HostileReplica(Loop()).url, *ANY_PORT)
    try:
        router.wait_for(1)
        yield router.picker_port
    finally:
        router.kill()


class GatewayCall:
    """A gateway's exchange with the picker about one request."""

    def __init__(self, port: int) -> None:
        from foreword.router_extras.gateway import envoy_messages as envoy

        self._envoy = envoy
        self._channel = grpc.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.use_local_subchannel_pool", 1)])
        self._messages: SimpleQueue[Any] = SimpleQueue()
        process = self._channel.stream_stream(
            METHOD,
            request_serializer=envoy.ProcessingRequest.SerializeToString,
            response_deserializer=envoy.ProcessingResponse.FromString,
        )
        self._answers = process(iter(self._messages.get, None), timeout=60, wait_for_ready=True)
        first = envoy.ProcessingRequest()
        first.protocol_config.request_body_mode = envoy.BUFFERED
        heads = {":method": "POST", ":path": "/v1/completions", "content-type": "application/json"}
        for name, value in heads.items():
            first.request_headers.headers.headers.add(key=name, raw_value=value.encode())
        self._messages.put(first)
        self.first = str(next(self._answers))

    def end(self) -> str:
        """Send the body. Returns what was picked."""
        last = self._envoy.ProcessingRequest()
        last.request_body.body, last.request_body.end_of_stream = b'{"prompt": "once"}', True
        self._messages.put(last)
        picked = str(next(self._answers))
        self._messages.put(None)
        self._channel.close()
        return picked


def test_a_method_without_a_valid_name(port: int, caplog: pytest.LogCaptureFixture) -> None:
    """Calls of methods whose names are not UTF-8, or that there are not, are cancelled: exchanges that are under way and new
    ones are answered, and the log has no traceback."""
    with caplog.at_level(logging.INFO), contextlib.ExitStack() as stack:
        under_way = GatewayCall(port)
        for method in (b"/x\xb6/y", b"/x/y") * 20:
            stranger = stack.enter_context(socket.create_connection(("127.0.0.1", port), 60))
            stranger.sendall(b"".join(grpc_call(method)))
            assert RESET in _received(stranger, RESET)
            assert "x-gateway-destination-endpoint" in GatewayCall(port).end()
        assert "x-gateway-destination-endpoint" in under_way.end()
    assert not [one for one in caplog.records if one.exc_info]


def test_calls_that_are_cancelled_at_once(port: int) -> None:
    """Strangers who begin calls and cancel them, by thousands, do not take the place of a gateway's."""
    begin, call = grpc_call(METHOD.encode())[0], call_head(METHOD.encode())
    flood = b"".join(h2_frame(1, 4, 2 * one + 1, call) + h2_frame(3, 0, 2 * one + 1, bytes(4)) for one in range(300))
    with contextlib.ExitStack() as stack:
        for _ in range(5):
            for _ in range(5):
                stranger = stack.enter_context(socket.create_connection(("127.0.0.1", port), 60))
                stranger.sendall(begin + flood)
            assert "x-gateway-destination-endpoint" in GatewayCall(port).end()


CALLEES: list[tuple[str, str, str]] = [
    ("foreword.api.front", "Front", "admit"),
    ("foreword.router_extras.gateway.picker", "Picker", "pick"),
    ("foreword.router_extras.gateway.external_processor", "Accounting", "answered"),
    ("foreword.router.replica_pool", "ReplicaPool", "query"),
    ("foreword.routing.fleet", "Fleet", "place"),
    ("foreword.routing.fleet", "Fleet", "sent"),
]


@pytest.mark.parametrize(("module", "owner", "callee"), CALLEES)
def test_each_callee_raises_for_one_of_two(
    port: int,
    module: str,
    owner: str,
    callee: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A callee that raises for one request of a gateway ends that one, with an error for its client and a line in the log. One
    that is under way, and the next one, are answered."""
    owners = getattr(importlib.import_module(module), owner)
    real, raised = getattr(owners, callee), list[str]()

    def planted(*given: Any, **named: Any) -> Any:
        if not raised:
            raised.append(callee)
            raise ZeroDivisionError(callee)
        return real(*given, **named)

    under_way = None if callee == "admit" else GatewayCall(port)
    with caplog.at_level(logging.ERROR):
        monkeypatch.setattr(owners, callee, planted)
        answers = []
        with contextlib.suppress(StopIteration):
            victim = GatewayCall(port)
            answers = [victim.first, victim.end()] if callee != "admit" else [victim.first]
        assert raised and "immediate_response" in answers[-1] and "internal_error" in answers[-1]
        assert [one for one in caplog.records if "/v1/completions failed" in one.getMessage() and one.exc_info]
        for other in filter(None, (under_way, GatewayCall(port))):
            assert "x-gateway-destination-endpoint" in other.end()


def test_what_is_malformed_is_no_traceback(port: int, caplog: pytest.LogCaptureFixture) -> None:
    """A message that is none of the protocol, and a header that is not UTF-8, leave no traceback in the log."""
    with caplog.at_level(logging.INFO):
        for more, data in (((), b"\xff" * 20), (((b"x-\xb6", b"y"),), b"")):
            with socket.create_connection(("127.0.0.1", port), 60) as stranger:
                head = h2_frame(1, 4, 1, call_head(METHOD.encode(), *more))
                message = b"\0" + len(data).to_bytes(4) + data
                stranger.sendall(grpc_call(METHOD.encode())[0] + head + h2_frame(0, 1, 1, message))
                assert _received(stranger, b"grpc-status")
        assert "x-gateway-destination-endpoint" in GatewayCall(port).end()
    assert not [one for one in caplog.records if one.exc_info]


@pytest.mark.parametrize("abuse", [one.__name__.strip("_") for one in stranger_messages._ABUSES])
def test_abuses_of_http2(port: int, abuse: str, caplog: pytest.LogCaptureFixture) -> None:
    """Connections whose headers abuse the decoder's table, whose trailers, windows or calls have no end, and those that send
    frames of nothing, stay open or end alone: gateways are answered meanwhile, and the log has no traceback."""
    make, draw = getattr(stranger_messages, f"_{abuse}"), Random(abuse)
    with caplog.at_level(logging.INFO), contextlib.ExitStack() as stack:
        under_way = GatewayCall(port)
        for number in range(40):
            stranger = stack.enter_context(socket.create_connection(("127.0.0.1", port), 60))
            stranger.setblocking(False)
            data = memoryview(b"".join([grpc_call(METHOD.encode())[0], *make(draw, call_head(METHOD.encode()))]))
            with contextlib.suppress(OSError):  # it is not read any more, or has ended
                while data:
                    data = data[stranger.send(data) :]
            if number % 10 == 9:
                assert "x-gateway-destination-endpoint" in GatewayCall(port).end()
        assert "x-gateway-destination-endpoint" in under_way.end()
    assert not [one for one in caplog.records if one.exc_info]


def _received(stranger: socket.socket, until: bytes) -> bytes:
    data = b""
    while until not in data and (more := stranger.recv(1 << 16)):
        data += more
    return data
