"""The router in front of two real vLLM servers with Foreword's connector, which send KV to each other. Needs
FOREWORD_VLLM_PYTHON, an interpreter with vLLM; skipped without it. All tests share two servers, and the last test kills
one."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from ports import free_port
from router_parts import Loop, Relay, RouterProcess, Scissors
from safetensors.torch import load_file, save_file
from shared_server import until, words
from vllm_process import needs_vllm
from vllm_server import BLOCK, VllmServer, make_byte_model
from vllm_waits import WITHIN

from foreword.api.rights import Tenants
from foreword.blocks.salt import Salt
from foreword.process_config import ServerConfig
from foreword.router import logprobs_probe
from foreword.router.logprobs_probe import LogprobReading
from foreword.router.replica_metrics import parse_metrics

pytestmark = needs_vllm
ADMIN = {"authorization": "Bearer admin-secret"}


def start(model: Path, folder: Path, core: int) -> VllmServer:
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{free_port()}",
        "replay_endpoint": f"tcp://*:{free_port()}",
    }
    connector = {
        "kv_connector": "PatientConnector",
        "kv_connector_module_path": "vllm_patient",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "load_timeout": 300.0,
            "transfer": {"secret_env": "FOREWORD_TEST_SECRET", "progress_timeout": 300.0},
        },
    }
    return VllmServer(
        model, folder / f"server-{core}.log", "--kv-transfer-config", json.dumps(connector), "--max-model-len", "1024",
        "--block-size", str(BLOCK), "--kv-cache-memory-bytes", str(256 << 20), "--max-num-seqs", "8", "--seed", "0",
        "--kv-events-config", json.dumps(events), "--api-key", "vllm-key",
        core=core, FOREWORD_TEST_SECRET="a secret of the right length for tests",
    )  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_byte_model(tmp_path_factory.mktemp("vllm") / "model")


@pytest.fixture(scope="module")
def servers(model: Path) -> Iterator[list[VllmServer]]:
    started = [start(model, model.parent, core) for core in (0, 1)]
    try:
        for server in started:
            until(server.healthy, 400)
        yield started
    finally:
        for server in started:
            server.kill()


KEYS = ["--replica-key", "vllm-key", "--api-keys", "alice=alice-key", "--api-keys", "bob=bob-key"]
SECRET = ["--tenant-secret", "a secret of the tests", "--admin-key", "admin-secret"]


@pytest.fixture(scope="module")
def router(servers: list[VllmServer]) -> Iterator[RouterProcess]:
    named = [argument for server in servers for argument in ("--replica", server.url)]
    process = RouterProcess(*named, *KEYS, *SECRET).wait_for(2)
    yield process
    process.kill()


def ask(router: RouterProcess, prompt: str, key: str = "alice-key", **more: Any) -> tuple[str, int]:
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True, **more}
    with router.http(key) as client:
        answer = client.post("/v1/completions", json=body).raise_for_status()
    details = answer.json()["usage"]["prompt_tokens_details"] or {}
    return answer.headers["x-foreword-route"].partition(": ")[0], details.get("cached_tokens") or 0


def events_received(router: RouterProcess, kind: str, replica: str = "") -> float:
    """KV events that the router received: `stored_blocks` or `messages`. The number of known blocks may shrink,
    because blocks are evicted."""
    return router.metric("foreword:router_kv_events_total", kind=kind, **({"replica": replica} if replica else {}))


def ask_and_wait(router: RouterProcess, prompt: str, prefix: str = "", **more: Any) -> tuple[str, int]:
    """`ask`, then wait until the router has received the events of the prompt's new blocks; those of its `prefix`
    may be known already."""
    before, new = events_received(router, "stored_blocks"), len(prompt) // BLOCK - len(prefix) // BLOCK
    found = ask(router, prompt, **more)
    until(lambda: events_received(router, "stored_blocks") >= before + new, WITHIN)
    return found


def test_requests_follow_their_prefix(router: RouterProcess) -> None:
    """vLLM's own events report what each server holds, salted by tenant; prompts with a shared prefix hit it."""
    for topic in ("north", "south", "east"):
        shared = words(topic, 40)
        where, cached = ask_and_wait(router, shared + " first")
        assert cached == 0
        again, cached = ask_and_wait(router, shared + " second", shared)
        assert again == where and cached >= 192
    expected = router.metric("foreword:router_expected_cached_tokens_total")
    assert expected >= 500 and expected == router.metric("foreword:router_actual_cached_tokens_total")


def test_tenants_share_no_blocks(router: RouterProcess) -> None:
    """Another tenant's prompt is never a cache hit, on either server; a tenant's own prompt is."""
    prompt = words("secret", 40)
    assert ask_and_wait(router, prompt)[1] == 0
    assert ask_and_wait(router, prompt, key="bob-key")[1] == 0
    assert ask(router, prompt, "bob-key")[1] > 0 and ask(router, prompt)[1] > 0


def test_chat_is_tokenized_as_the_server_does(router: RouterProcess) -> None:
    """The tokens of a conversation, including the chat template, are those that the server counts."""
    messages = [{"role": "user", "content": words("chat", 30)}]
    with router.http("alice-key") as client:
        answer = client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 2}).raise_for_status()
    last = httpx.get(f"{router.url}/v1/router/decisions?last=1", headers=ADMIN, timeout=WITHIN).json()["data"][0]
    assert last["tokens_from"] == "replica" and last["prompt_tokens"] == answer.json()["usage"]["prompt_tokens"]


CHAT = {"messages": [{"role": "user", "content": "Say something."}]}
TEXT = {"prompt": "Once upon a time"}


def stream(url: str, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    asked = {"temperature": 0, "stream": True, "ignore_eos": True, **body}
    headers = {"authorization": "Bearer vllm-key"}
    with httpx.stream("POST", url + path, json=asked, timeout=WITHIN, headers=headers) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert answer.status_code == 200 and lines[-1] == "[DONE]", f"{answer.status_code}: " + "\n".join(lines)
    return [json.loads(line) for line in lines[:-1]]


def text(chunks: list[dict[str, Any]]) -> str:
    assert [chunk for chunk in chunks if "error" in chunk] == []
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(choice.get("text", choice.get("delta", {}).get("content")) or "" for choice in choices)


def ending(chunks: list[dict[str, Any]]) -> tuple[Any, Any]:
    last = [choice for chunk in chunks for choice in chunk["choices"] if choice.get("finish_reason")]
    assert len(last) == 1
    return last[0]["finish_reason"], last[0]["stop_reason"]


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)])
def test_the_same_text_wherever_the_stream_breaks(
    servers: list[VllmServer], model: Path, path: str, body: dict[str, Any], local: bool
) -> None:
    """After a break at any event, a response of vLLM continues on the other server with the same text, usage and
    finish reason, with and without a stop string, with the router's tokenizer and with vLLM's."""
    scissors, loop = Scissors(), Loop()
    relays = [Relay(loop, server.url, scissors) for server in servers]
    named = [argument for relay in relays for argument in ("--replica", relay.url)]
    flags = ["--tokenizer", str(model)] if local else []
    router = RouterProcess(*named, "--replica-key", "vllm-key", "--failures", "1000", *flags).wait_for(2)
    try:
        free = text(stream(servers[0].url, path, {**body, "max_tokens": 14}))
        for more in ({}, {"stop": free[6:9]}):
            asked = {**body, "max_tokens": 14, "stream_options": {"include_usage": True}, **more}
            whole = stream(servers[0].url, path, asked)
            for events in range(len(whole)):
                scissors.cut_after(events)
                chunks = stream(router.url, path, asked)
                assert (text(chunks), ending(chunks)) == (text(whole), ending(whole)), (events, more)
                usage = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
                if not more:  # which token ends a stop string is a matter of taste where characters are broken
                    assert usage[0]["completion_tokens"] == whole[-1]["usage"]["completion_tokens"]
                assert len({chunk["id"] for chunk in chunks}) == 1
        assert router.metric("foreword:router_continuations_total", outcome="continued") >= 3
        assert router.metric("foreword:router_continuations_total", outcome="impossible") == 0
    finally:
        router.kill()
        for relay in relays:
            relay.close()


# Weights


def weights_of(router: RouterProcess) -> dict[str, str | None]:
    found = httpx.get(f"{router.url}/v1/router/replicas", headers=ADMIN, timeout=WITHIN).json()["data"]
    return {one["replica"]: one["weights"] for one in found}


def test_the_connector_publishes_the_weights(servers: list[VllmServer], router: RouterProcess) -> None:
    """Servers of one model have one fingerprint in their metrics, and the router takes it."""
    pages = [httpx.get(f"{server.url}/metrics", timeout=WITHIN).text for server in servers]
    published = {parse_metrics(page).fingerprint for page in pages}
    assert len(published) == 1 and None not in published
    assert set(weights_of(router).values()) == published
    assert router.metric("foreword:router_model_fingerprints", model_name="tiny") == 1


def test_weights_without_the_connector(servers: list[VllmServer], model: Path, tmp_path: Path) -> None:
    """Readings of two servers of one model are equal, also while they are busy. A server without the connector, which serves
    other weights under the same name, has another: no stream is continued there, and the router says that they differ."""
    folder = tmp_path / "other"
    shutil.copytree(model, folder)
    weights = load_file(folder / "model.safetensors")
    torch.manual_seed(1)
    changed = {name: one * (1 + 0.1 * torch.randn_like(one)) for name, one in weights.items()}
    save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
    flags = ["--max-model-len", "1024", "--block-size", str(BLOCK), "--kv-cache-memory-bytes", str(64 << 20)]
    plain = VllmServer(folder, tmp_path / "plain.log", *flags, "--max-num-seqs", "8", "--api-key", "vllm-key")
    try:
        until(plain.healthy, 400)

        def reading(server: VllmServer) -> LogprobReading:
            headers = {"authorization": "Bearer vllm-key", "content-type": "application/json"}
            body = logprobs_probe.request_body("tiny", 1024)
            answer = httpx.post(f"{server.url}/v1/completions", content=body, headers=headers, timeout=WITHIN)
            return logprobs_probe.read_response(answer.raise_for_status().content)

        with ThreadPoolExecutor(8) as pool:
            asked = {"max_tokens": 60, "temperature": 0, "ignore_eos": True}
            busy = [
                pool.submit(post, servers[0].url, "/v1/completions", {"prompt": words(f"busy{number}", 20), **asked})
                for number in range(8)
            ]
            found = [reading(server) for server in (*servers, servers[0])]
            for one in busy:
                one.result(WITHIN)
        equal = max(found[0].difference(one) for one in found[1:])
        assert (
            equal <= logprobs_probe.TOLERANCE / 4 < 2 * logprobs_probe.TOLERANCE < found[0].difference(reading(plain))
        )

        scissors, loop = Scissors(), Loop()
        relays = [Relay(loop, server.url, scissors) for server in (servers[0], plain)]
        named = [argument for relay in relays for argument in ("--replica", relay.url)]
        flags = [
            "--replica-key",
            "vllm-key",
            "--failures",
            "1000",
            "--policy",
            "round-robin",
            "--admin-key",
            "admin-secret",
        ]
        router = RouterProcess(*named, *flags).wait_for(2)
        try:
            first, second = (weights_of(router)[relay.url] for relay in relays)
            assert first == parse_metrics(httpx.get(f"{servers[0].url}/metrics", timeout=WITHIN).text).fingerprint
            assert str(second).startswith("logprobs-")
            until(lambda: "its replicas have different weights" in router.text)
            texts = {
                text(stream(server.url, "/v1/completions", {**TEXT, "max_tokens": 14}))
                for server in (servers[0], plain)
            }
            assert len(texts) == 2
            for _ in range(4):
                scissors.cut_after(5)
                # The replica whose connection broke is still there, and goes on itself.
                assert text(stream(router.url, "/v1/completions", {**TEXT, "max_tokens": 14})) in texts
        finally:
            router.kill()
            for relay in relays:
                relay.close()
    finally:
        plain.kill()


# Prefill at one, decode at the other

TENANTS = Tenants.from_config(ServerConfig(api_keys=("alice=alice-key",), tenant_secret="a secret of the tests"))
ALICE = Salt(TENANTS.authenticate("Bearer alice-key").salt).text
GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}


def disaggregated(prefill: str, decode: str) -> RouterProcess:
    return RouterProcess("--prefill", prefill, "--replica", decode, "--min-prefill", "128", *KEYS, *SECRET)


def post(url: str, path: str, body: dict[str, Any], key: str = "vllm-key") -> httpx.Response:
    return httpx.post(
        url + path, json={**GREEDY, **body}, timeout=WITHIN, headers={"authorization": f"Bearer {key}"}
    ).raise_for_status()


def metric(url: str, name: str) -> float:
    lines = httpx.get(f"{url}/metrics", timeout=WITHIN).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"vllm:foreword_{name}{{"))


def prompt_of(path: str, content: str) -> dict[str, Any]:
    return {"prompt": content} if path == "/v1/completions" else {"messages": [{"role": "user", "content": content}]}


def whole_text(answer: httpx.Response) -> str:
    """The whole text of an answer that is streamed or is not."""
    if not answer.headers["content-type"].startswith("text/event-stream"):
        choice = answer.json()["choices"][0]
        return str(choice["text"] if "text" in choice else choice["message"]["content"])
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert lines[-1] == "[DONE]", lines[-3:]
    return text([json.loads(line) for line in lines[:-1]])


class Prompts:
    """Prompts for which disaggregated prefill is faster: the prefill server holds most of them, and the router knows
    it. A new router may still receive older events, so an older router tells how many to wait for."""

    def __init__(self, older: RouterProcess) -> None:
        self._older = older

    def new(
        self, router: RouterProcess, prefill: VllmServer, path: str, topic: str, relay: Relay | None = None
    ) -> dict[str, Any]:
        """`relay`: by which the router knows the server."""
        before, start = events_received(self._older, "stored_blocks", prefill.url), words(topic, 90)
        post(prefill.url, path, {**prompt_of(path, start + " and so on"), "cache_salt": ALICE})
        new = len(start) // BLOCK
        until(lambda: events_received(self._older, "stored_blocks", prefill.url) >= before + new, WITHIN)
        messages = events_received(self._older, "messages", prefill.url)
        until(lambda: events_received(router, "messages", (relay or prefill).url) >= messages, WITHIN)
        return prompt_of(path, start + " but not")


@pytest.fixture(scope="module")
def prompts(router: RouterProcess) -> Prompts:
    return Prompts(router)


@pytest.fixture
def split(servers: list[VllmServer]) -> Iterator[RouterProcess]:
    """A router without measurements: its cost model does not depend on how busy this machine was."""
    process = disaggregated(servers[0].url, servers[1].url).wait_for(2)
    yield process
    process.kill()


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_disaggregated_prefill(
    servers: list[VllmServer], split: RouterProcess, prompts: Prompts, path: str, streams: bool
) -> None:
    """The prefill server computes a long prompt, the decode server reads its full blocks directly, for the right
    tenant, and the output is that of one vLLM. Short prompts, and prompts that the decode server holds, are not
    split."""
    prefill, decode = (server.url for server in servers)
    body = prompts.new(split, servers[0], path, f"{path[4:6]}{streams:d}-")
    read, leases = metric(decode, "loaded_blocks_total"), metric(prefill, "leases_total")
    answer = post(split.url, path, {**body, "stream": streams}, "alice-key")
    route = answer.headers["x-foreword-route"]
    assert route.startswith(f"{decode} after {prefill}: ") and "fell back" not in route, route
    alone = post(decode, path, {**body, "cache_salt": "none's"})
    assert whole_text(answer) == whole_text(alone)
    blocks = alone.json()["usage"]["prompt_tokens"] // BLOCK
    assert blocks > 10
    # Servers tell what they counted with one of their next steps.
    until(lambda: metric(decode, "loaded_blocks_total") > read and metric(prefill, "leases_total") > leases, WITHIN)
    assert metric(decode, "loaded_blocks_total") - read == blocks
    assert metric(prefill, "leases_total") - leases == 1 and not metric(prefill, "leases_unread_total")

    def computed_where(body: dict[str, Any]) -> str:
        answer = post(split.url, path, {**body, "stream": streams}, "alice-key")
        return answer.headers["x-foreword-route"].partition(": ")[0]

    # Once the router has received the decode server's events.
    until(lambda: computed_where(body) == decode, WITHIN)
    assert computed_where(prompt_of(path, "short")) == decode


def test_several_choices_are_not_split(servers: list[VllmServer], split: RouterProcess, prompts: Prompts) -> None:
    """Requests for which one `kv_transfer_params` is not enough are computed on the decode server, and the header
    says so."""
    prefill = servers[0].url
    body = prompts.new(split, servers[0], "/v1/completions", "several")
    leases = metric(prefill, "leases_total")
    answer = post(split.url, "/v1/completions", {**body, "n": 2, "temperature": 0.5}, "alice-key")
    assert (
        len(answer.json()["choices"]) == 2 and "fell back to the decode replica" in answer.headers["x-foreword-route"]
    )
    assert metric(prefill, "leases_total") == leases


class KillingRelay(Relay):
    """A relay that kills a server as soon as it has computed a prompt for another one, and then forwards its
    response."""

    def __init__(self, loop: Loop, server: VllmServer) -> None:
        super().__init__(loop, server.url)
        self._server_behind = server

    async def _down(self, there: asyncio.StreamReader, writer: asyncio.StreamWriter, left: list[int | None]) -> None:
        while data := await there.read(1 << 16):
            if b'"do_remote_prefill":true' in data:
                self._server_behind.kill()
            writer.write(data)
            await writer.drain()


def test_a_server_is_killed(servers: list[VllmServer], router: RouterProcess, prompts: Prompts) -> None:
    """A vLLM server is killed when it has computed a prompt that was not read yet, and in the middle of another
    response, whose chunks have several tokens: both clients get complete responses, and so does one whose prompt it should
    have computed next."""
    loop = Loop()
    relays = [KillingRelay(loop, server) for server in servers]
    others = [disaggregated(relays[i].url, servers[1 - i].url).wait_for(2) for i in (0, 1)]
    try:
        bodies = [
            [prompts.new(others[i], servers[i], "/v1/completions", f"kill{i}{j}", relays[i]) for j in (0, 1)]
            for i in (0, 1)
        ]
        asked = {**TEXT, "max_tokens": 600, "temperature": 0, "ignore_eos": True}
        whole = whole_text(post(servers[0].url, "/v1/completions", asked))
        with (
            router.http("alice-key") as client,
            client.stream("POST", "/v1/completions", json={**asked, "stream": True, "stream_interval": 3}) as answer,
        ):
            source = answer.headers["x-foreword-route"].partition(": ")[0]
            victim = [server.url for server in servers].index(source)
            survivor = servers[1 - victim].url
            lines = answer.iter_lines()
            seen = [next(lines) for _ in range(20)]
            handed = post(others[victim].url, "/v1/completions", {**bodies[victim][0], "stream": True}, "alice-key")
            assert servers[victim].process.poll() is not None
            later = post(others[victim].url, "/v1/completions", bodies[victim][1], "alice-key")
            seen += list(lines)
        chunks = [json.loads(line.removeprefix("data: ")) for line in seen if line.startswith("data: {")]
        assert text(chunks) == whole
        for body, found in zip(bodies[victim], (handed, later), strict=True):
            alone = post(survivor, "/v1/completions", {**body, "cache_salt": "none's"})
            assert whole_text(found) == whole_text(alone)
        assert handed.headers["x-foreword-route"].startswith(f"{survivor} after {relays[victim].url}: ")
        assert "no blocks are loaded from producer" in servers[1 - victim].log.read_text()
    finally:
        for one in others:
            one.kill()
        for relay in relays:
            relay.close()
