"""Disaggregated prefill between server processes: a decode server has prompts computed by a prefill server."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import http_client
import httpx
import openai
import pytest
from server_process import ControlledProcess, ServerProcess, kill, slow
from shared_server import ENGINE, PREFIXES, SharedServer, SharedServers, until

from foreword.configuration import Config
from foreword.process_config import ServerConfig
from foreword.server.app import ServerApp
from foreword.server.engine_metrics import PrometheusObserver

pytestmark = pytest.mark.timeout(300)

FLAGS = ["--dtype", "float32", "transfer.min_tokens=16"]
LINE = "def area(width: float, height: float) -> float:\n    return width * height\n\n"


def server(role: str, *more: str) -> ControlledProcess:
    return ControlledProcess("--role", role, *FLAGS, *more)


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[ControlledProcess, ControlledProcess]]:
    """A prefill server, which computes a long prompt in many steps, and a decode server."""
    prefill, decode = server("prefill", "--max-batch-tokens", "128"), server("decode")
    try:
        for process in (prefill, decode):
            process.wait_ready()
        yield prefill, decode
        for process in (prefill, decode):
            process.popen.send_signal(signal.SIGTERM)
            assert process.end() == 0
            assert "Traceback" not in process.text
    finally:
        kill(prefill, decode)


@pytest.fixture
def urls(servers: tuple[ControlledProcess, ControlledProcess]) -> tuple[str, str]:
    prefill, decode = servers
    return prefill.url(), decode.url()


def instance(url: str) -> dict[str, Any]:
    found: dict[str, Any] = http_client.get(f"{url}/v1/instance").json()
    return found


def forget(*urls: str) -> None:
    for url in urls:
        assert http_client.delete(f"{url}/v1/cache").status_code == 200


def metric(url: str, name: str, **labels: str) -> float:
    """The sum of a metric's lines that have these labels."""
    total = 0.0
    for line in http_client.get(f"{url}/metrics").text.splitlines():
        if re.match(rf"{re.escape(name)}({{|\s)", line) and all(f'{k}="{v}"' in line for k, v in labels.items()):
            total += float(line.rsplit(" ", 1)[1])
    return total


def transfers(url: str, side: str, outcome: str) -> float:
    return metric(url, "foreword:transfer_transfers_total", kind="prefill", side=side, outcome=outcome)


def free(url: str) -> bool:
    load = instance(url)["load"]
    return bool(load["free_blocks"] == load["blocks"] and load["running"] == load["waiting"] == 0)


def test_instance(urls: tuple[str, str], server: SharedServer) -> None:
    """`/v1/instance` reports role, transfer address, model, layout and load; role and address are null on a server
    without a role."""
    prefill, decode = (instance(url) for url in urls)
    assert (prefill["role"], decode["role"]) == ("prefill", "decode")
    assert prefill["transfer"] != decode["transfer"]
    for name in ("model", "fingerprint", "layout", "block_size", "tenant"):
        assert prefill[name] == decode[name]
    assert prefill["load"]["free_blocks"] == prefill["load"]["blocks"] > 0
    plain = instance(server.url)
    assert (plain["role"], plain["transfer"]) == (None, None)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0, "logprobs": 2},
        {"seed": 5, "temperature": 1.0, "logprobs": 0},
        {"seed": 6, "presence_penalty": 1.0, "n": 2},
        {"temperature": 0, "stop": ["\n\n"], "max_tokens": 60},
    ],
)
def test_same_answer(urls: tuple[str, str], params: dict[str, Any]) -> None:
    """A completion whose prompt another process prefilled equals that of a single server, with the same usage."""
    prefill, decode = urls
    body = {"prompt": LINE * 12 + "def volume(", "max_tokens": 24, "cache_report": True, **params}
    forget(*urls)
    alone = http_client.post(f"{decode}/v1/completions", json=body).json()
    forget(*urls)
    address = instance(prefill)["transfer"]
    computed = metric(decode, "vllm:iteration_tokens_total_sum")
    apart = http_client.post(
        f"{decode}/v1/completions", json={**body, "kv_transfer_params": {"prefill": address}}
    ).json()
    computed = metric(decode, "vllm:iteration_tokens_total_sum") - computed
    for one, other in zip(apart["choices"], alone["choices"], strict=True):
        assert (one["text"], one["finish_reason"]) == (other["text"], other["finish_reason"])
        if one["logprobs"]:
            assert one["logprobs"]["tokens"] == other["logprobs"]["tokens"]
            assert one["logprobs"]["token_logprobs"] == pytest.approx(other["logprobs"]["token_logprobs"], abs=1e-4)
    assert apart["usage"] == alone["usage"]
    prompt = apart["usage"]["prompt_tokens"]
    assert apart["cache_report"]["transferred_tokens"] == {f"prefill {address}": prompt}
    assert computed < prompt
    until(lambda: free(prefill) and free(decode))


@pytest.mark.slow
def test_chat_stream(urls: tuple[str, str]) -> None:
    """OpenAI's client sees one ordinary stream."""
    prefill, decode = urls
    address = instance(prefill)["transfer"]
    client = openai.OpenAI(base_url=f"{decode}/v1", api_key="none", max_retries=0)

    def ask(**extra: Any) -> str:
        forget(*urls)
        stream = client.chat.completions.create(
            model="stdlib-nano",
            messages=[{"role": "user", "content": "What does textwrap.dedent do? " * 8}],
            max_tokens=24,
            temperature=0,
            stream=True,
            extra_body=extra,
        )
        return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)

    before = transfers(prefill, "source", "taken")
    assert ask(kv_transfer_params={"prefill": address}) == ask()
    until(lambda: transfers(prefill, "source", "taken") == before + 1)


def test_field_without_endpoint(server: SharedServer) -> None:
    """A server without a role ignores the address of a prefill instance."""
    body = {
        "prompt": LINE,
        "max_tokens": 2,
        "kv_transfer_params": {"prefill": "127.0.0.1:1", "do_remote_prefill": True},
    }
    assert http_client.post(f"{server.url}/v1/completions", json=body).status_code == 200
    wrong = http_client.post(f"{server.url}/v1/completions", json={**body, "kv_transfer_params": {"prefill": 5}})
    assert wrong.status_code == 400


@pytest.mark.slow
def test_addresses_must_be_allowed(urls: tuple[str, str], start: Callable[..., ServerProcess]) -> None:
    """A client cannot make a server connect to another host: 403 with the name of the setting. A malformed address is
    400. A router may name any."""
    prefill, decode = urls

    def ask(url: str, address: str) -> httpx.Response:
        body = {"prompt": LINE * 3, "max_tokens": 1, "kv_transfer_params": {"prefill": address}}
        return http_client.post(f"{url}/v1/completions", json=body)

    refused = ask(decode, "10.255.0.1:9100")
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden")
    assert "--peer 10.255.0.1" in refused.json()["error"]["message"]
    assert ask(decode, "metadata.internal:80").status_code == 403
    assert ask(decode, "nonsense").status_code == 400
    assert ask(prefill, "10.255.0.1:9100").status_code == 200  # it computes its prompts itself, whatever is asked
    drained = http_client.post(f"{prefill}/v1/drain", json={"to": ["http://10.255.0.1:8000"]})
    assert drained.status_code == 403 and http_client.get(f"{prefill}/ready").status_code == 200
    allowing = start("--role", "decode", *FLAGS, "--peer", "10.255.0.0/16", "--peer", "*.internal").wait_ready()
    assert ask(allowing, "10.255.0.1:9100").status_code == 200
    assert transfers(allowing, "destination", "failed") == 1  # no secret for other hosts
    assert ask(allowing, "10.254.0.1:9100").status_code == 403
    assert ask(decode, "unix:/var/run/docker.sock").status_code == 403
    # A tenant cannot find out which ports of this host are open.
    keyed = start("--role", "decode", *FLAGS, "--api-keys", "alice=alices-key").wait_ready()
    body = {"prompt": LINE * 3, "max_tokens": 1, "kv_transfer_params": {"prefill": "127.0.0.1:1"}}
    headers = {"authorization": "Bearer alices-key"}
    answer = http_client.post(f"{keyed}/v1/completions", json=body, headers=headers)
    assert answer.status_code == 403 and "--peer 127.0.0.1" in answer.json()["error"]["message"]


@pytest.mark.slow
def test_disconnected_clients_are_counted(
    urls: tuple[str, str], servers: tuple[ControlledProcess, ControlledProcess]
) -> None:
    """A client that disconnects during the transfer is counted as canceled on both sides, and all blocks are freed."""
    prefill, decode = urls
    forget(*urls)
    address = instance(prefill)["transfer"]
    before = [transfers(url, side, "cancelled") for url, side in ((prefill, "source"), (decode, "destination"))]
    came = metric(decode, "foreword:transfer_link_bytes_total", direction="received")

    async def leave() -> None:
        async with httpx.AsyncClient(timeout=120) as client:
            body = long_body(kv_transfer_params={"prefill": address})
            task = asyncio.create_task(client.post(f"{decode}/v1/completions", json=body))
            while metric(decode, "foreword:transfer_link_bytes_total", direction="received") == came:
                await asyncio.sleep(0.01)
                assert not task.done()
            task.cancel()

    with slow(servers[0], step=0.5):
        asyncio.run(leave())
    until(lambda: transfers(decode, "destination", "cancelled") == before[1] + 1)
    until(lambda: transfers(prefill, "source", "cancelled") == before[0] + 1)
    until(lambda: free(prefill) and free(decode))


def test_tenants_do_not_drain(shared: SharedServers) -> None:
    """Draining takes the operator's key where there are API keys or a router key; without an operator's key it is refused."""
    settings = {
        "routers": ServerConfig(router_key="routers"),
        "alices": ServerConfig(api_keys=("alice=alices",), tenant_secret="a secret of the tests"),
        "": ServerConfig(admin_key="operators"),
    }

    async def drain(key: str, config: ServerConfig) -> int:
        app = ServerApp(shared.open.engine, PrometheusObserver(), Config(ENGINE, config, PREFIXES))
        headers = {"authorization": f"Bearer {key}", "x-foreword-salt": "ca"} if key else {}
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server", headers=headers) as client:
            status = (await client.post("/v1/drain", json={})).status_code
            assert (await client.get("/ready")).status_code == 200
        return status

    for key, config in settings.items():
        assert asyncio.run(drain(key, config)) == (403 if key else 401)


@pytest.mark.slow
def test_twenty_concurrent_requests(urls: tuple[str, str]) -> None:
    """Twenty concurrent requests, a third of them with a common prefix, get the same answers as alone."""
    prefill, decode = urls
    address = instance(prefill)["transfer"]
    prompts = [LINE * (i % 3) + f"# number {i}\n" + f"x{i} = [{i}, {i + 1}]\n" * 12 for i in range(20)]

    def ask(prompt: str, **extra: Any) -> str:
        body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, **extra}
        return str(http_client.post(f"{decode}/v1/completions", json=body, timeout=120).json()["choices"][0]["text"])

    forget(*urls)
    alone = [ask(prompt) for prompt in prompts]
    forget(*urls)
    before = transfers(decode, "destination", "taken")
    found: dict[int, str] = {}

    def one(number: int) -> None:
        found[number] = ask(prompts[number], kv_transfer_params={"prefill": address})

    threads = [threading.Thread(target=one, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[number] for number in range(20)] == alone
    until(lambda: transfers(decode, "destination", "taken") == before + 20)
    until(lambda: free(prefill) and free(decode))


def long_body(**more: Any) -> dict[str, Any]:
    return {"prompt": LINE * 150, "max_tokens": 8, "temperature": 0, **more}


@pytest.mark.slow
def test_prefill_is_killed(urls: tuple[str, str]) -> None:
    """kill -9 of the prefill server during a transfer: the decode server computes the rest, and the client gets its
    answer."""
    decode = urls[1]
    doomed = server("prefill", "--max-batch-tokens", "64")
    answers: list[httpx.Response] = []
    try:
        address = instance(doomed.wait_ready())["transfer"]
        forget(decode)
        before = metric(decode, "foreword:transfer_link_bytes_total", direction="received")
        body = long_body(kv_transfer_params={"prefill": address}, cache_report=True)
        thread = threading.Thread(
            target=lambda: answers.append(http_client.post(f"{decode}/v1/completions", json=body, timeout=120))
        )
        with slow(doomed, step=0.5):
            thread.start()
            until(lambda: metric(decode, "foreword:transfer_link_bytes_total", direction="received") > before)
            kill(doomed)
        thread.join(120)
    finally:
        kill(doomed)
    assert answers[0].status_code == 200
    report = answers[0].json()["cache_report"]
    came = report["transferred_tokens"].get(f"prefill {address}", 0)
    assert 0 <= came < report["prompt_tokens"]
    until(lambda: transfers(decode, "destination", "lost") == 1)
    forget(decode)
    alone = http_client.post(f"{decode}/v1/completions", json=long_body(), timeout=120).json()
    assert answers[0].json()["choices"][0]["text"] == alone["choices"][0]["text"]
    until(lambda: free(decode))


@pytest.mark.slow
def test_decode_is_killed(urls: tuple[str, str], servers: tuple[ControlledProcess, ControlledProcess]) -> None:
    """kill -9 of the decode server during a transfer: the prefill server frees its blocks at once and serves other
    requests."""
    prefill, decode = urls
    forget(prefill)
    doomed = server("decode")
    try:
        url = doomed.wait_ready()
        address = instance(prefill)["transfer"]
        body = json.dumps(long_body(kv_transfer_params={"prefill": address}))

        def ask() -> None:
            with pytest.raises(httpx.HTTPError):
                http_client.post(
                    f"{url}/v1/completions", content=body, headers={"content-type": "application/json"}, timeout=120
                )

        thread = threading.Thread(target=ask)
        with slow(servers[0], step=0.5):
            thread.start()
            until(lambda: metric(url, "foreword:transfer_link_bytes_total", direction="received") > 0)
            kill(doomed)
        thread.join(60)
    finally:
        kill(doomed)
    until(lambda: free(prefill))
    until(lambda: transfers(prefill, "source", "lost") + transfers(prefill, "source", "taken") > 0)
    after = http_client.post(
        f"{decode}/v1/completions",
        json={"prompt": LINE * 3, "max_tokens": 4, "kv_transfer_params": {"prefill": address}},
        timeout=60,
    )
    assert after.status_code == 200
