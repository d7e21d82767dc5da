"""The server as a process: it answers while it loads, drains on SIGTERM, and fails with a sentence."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Callable

import http_client
import pytest
from server_process import ControlledProcess, ServerProcess, slow
from shared_server import until

pytestmark = pytest.mark.timeout(300)


def ask(url: str, max_tokens: int) -> dict[str, object]:
    longest = http_client.get(f"{url}/v1/models").json()["data"][0]["max_model_len"]
    return {"prompt": "x", "stream": True, "ignore_eos": True, "max_tokens": min(max_tokens, longest - 50)}


@pytest.mark.slow
def test_alive_at_once_and_ready_later(start_controlled: Callable[..., ControlledProcess]) -> None:
    """While the model loads, /health is 200, /ready is 503, and requests get 503 with Retry-After."""
    process = start_controlled(loading=False)
    url = process.url()
    assert http_client.get(f"{url}/health").status_code == 200
    ready = http_client.get(f"{url}/ready")
    assert (ready.status_code, ready.json()["status"]) == (503, "not_ready") and "loaded" in ready.json()["reason"]
    early = http_client.post(f"{url}/v1/completions", json={"prompt": "x"})
    assert (early.status_code, early.json()["error"]["code"]) == (503, "not_ready") and early.headers["retry-after"]
    assert http_client.get(f"{url}/metrics").status_code == 200
    process.load()
    process.wait_ready()
    assert http_client.post(f"{url}/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200
    process.popen.send_signal(signal.SIGINT)
    assert process.end() == 0
    assert "Traceback" not in process.text


@pytest.mark.slow
def test_drain_lets_running_requests_finish(start_controlled: Callable[..., ControlledProcess]) -> None:
    """After SIGTERM a running stream is finished, new requests and /ready are 503, and the exit status is 0."""
    process = start_controlled("--drain-seconds", "200")
    url = process.wait_ready()
    with slow(process) as fast, http_client.stream("POST", f"{url}/v1/completions", json=ask(url, 400)) as stream:
        lines = stream.iter_lines()
        next(lines)
        process.popen.send_signal(signal.SIGTERM)
        until(lambda: "shutting down" in process.text)
        ready = http_client.get(f"{url}/ready")
        assert (ready.status_code, ready.json()["status"]) == (503, "shutting_down")
        refused = http_client.post(f"{url}/v1/completions", json={"prompt": "x"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        assert http_client.get(f"{url}/health").status_code == 200
        fast()
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    assert process.end() == 0
    assert "Traceback" not in process.text


@pytest.mark.slow
def test_drain_aborts_what_takes_too_long(start_controlled: Callable[..., ControlledProcess]) -> None:
    """A request that still runs after `drain_seconds` ends with an error in its stream. The exit status is 0."""
    process = start_controlled("--drain-seconds", "0")
    url = process.wait_ready()
    with slow(process), http_client.stream("POST", f"{url}/v1/completions", json=ask(url, 10**6)) as stream:
        lines = stream.iter_lines()
        next(lines)
        process.popen.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "shutting_down"
    assert process.end() == 0
    assert "Traceback" not in process.text


@pytest.mark.slow
def test_second_signal_exits_at_once(start_controlled: Callable[..., ControlledProcess]) -> None:
    """A second signal ends the process without waiting."""
    process = start_controlled("--drain-seconds", "1000")
    url = process.wait_ready()
    with slow(process), http_client.stream("POST", f"{url}/v1/completions", json=ask(url, 10**6)) as stream:
        lines = stream.iter_lines()  # kept: without it the connection is closed
        next(lines)
        process.popen.send_signal(signal.SIGTERM)
        until(lambda: "shutting down" in process.text)
        process.popen.send_signal(signal.SIGTERM)
        assert process.end() == 128 + signal.SIGTERM


@pytest.mark.slow
def test_signal_while_loading(start_controlled: Callable[..., ControlledProcess]) -> None:
    """A signal while the model loads ends the process with status 0, without waiting for the model."""
    process = start_controlled(loading=False)
    process.url()
    process.popen.send_signal(signal.SIGTERM)
    assert process.end() == 0


@pytest.mark.slow
def test_failed_load(start: Callable[..., ServerProcess]) -> None:
    """A model that cannot be loaded ends the process with status 2 and a message, without a traceback."""
    process = start("/nonexistent/model")
    assert process.end(200) == 2
    assert "/nonexistent/model" in process.text and "Traceback" not in process.text


@pytest.mark.extended
def test_port_in_use(start: Callable[..., ServerProcess]) -> None:
    """A port in use ends the process with status 2 and a message with the port and --port."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        process = start("--port", port)
        assert process.end() == 2
    assert port in process.text and "--port" in process.text and "Traceback" not in process.text


@pytest.mark.extended
def test_bad_settings(start: Callable[..., ServerProcess]) -> None:
    """A wrong value ends the process with status 2 and a message before anything loads; test_mistakes.py has all of them."""
    process = start("--api-keys", "two words", forked=False)
    assert process.end() == 2
    assert process.text.startswith("foreword: ") and process.text.count("\n") == 1
