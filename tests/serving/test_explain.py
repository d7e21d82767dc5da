"""`foreword explain`: planted mistakes are named, and healthy set-ups are not accused. Servers and routers are processes."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import http_client
import httpx
import pytest
import torch
from aiohttp.web import Request, Response, RouteDef, json_response, post
from explained import broken, explain, sound
from router_parts import Loop, RouterProcess
from safetensors.torch import load_file, save_file
from scripted_replica import ScriptedReplica
from server_process import ControlledProcess, ServerProcess
from servers import RedisServer
from shared_server import until

import foreword

KEY = "0123456789abcdef"
KEYED = ("--api-keys", f"ann={KEY}", "--tenant-secret", "a secret of these tests")
MODEL = Path(foreword.__file__).parent / "models" / "stdlib-nano"
# An address where nothing listens.
NOWHERE = "127.0.0.1:1"


@contextmanager
def serving(*arguments: str) -> Iterator[str]:
    """The URL of a server that is ready."""
    server = ServerProcess(*arguments)
    try:
        yield server.wait_ready()
    finally:
        server.popen.kill()
        server.end()


@contextmanager
def routing(replicas: int, *arguments: str) -> Iterator[str]:
    """The URL of a router once this number of replicas takes requests."""
    router = RouterProcess(*arguments)
    try:
        yield router.wait_for(replicas).url if replicas else router.url
    finally:
        router.kill()


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


# Servers

BROKEN_SERVERS = [
    (("--no-enable-prefix-caching",), (), "device", "`--enable-prefix-caching`"),
    slow(("--store", "disk://{folder}/kv?min_tokens=100000"), (), "written", "`min_tokens=`"),
    (("--store", "memory://?size=1MiB", "--store", f"redis://{NOWHERE}"), (), "written", "redis is off"),
    slow(("--store", "disk://{folder}/kv?write_rate=1"), (), "written", "`write_rate=`"),
    slow(("--store", "memory://?size=64MiB", "--store", f"peer://{NOWHERE}", "--transfer-secret", KEY),
         (), "written", "peer: calls fail"),
    slow(("--store", "disk://{folder}/kv?size=100KiB"), (), "loaded", "`size=`"),
    slow(("--store", "memory://?size=100KiB"), (), "loaded", "`size=`"),
    slow(("--store", f"s3://bucket?endpoint=http://{NOWHERE}&access_key_id=a&secret_access_key=b&region=us-east-1"),
         (), "written", "the store's URL"),
    slow(("--max-model-len", "256", "--block-size", "256"), (), "computed", "`--block-size`"),
    slow(("--quota", "* requests=1"), (), "answer", "`--quota`"),
    slow(("--max-body", "300"), (), "answer", "`--max-body`"),
    slow(("--store", "disk://{folder}/kv?tenant_quota=50KiB"), (), "written", "`tenant_quota=`"),
    slow(("--store", "disk://{folder}/kv", "--store-load-timeout", "1e-6"), (), "loaded", "`--store-load-timeout`"),
    slow(KEYED, (), "server", "wants an API key"),
    slow(KEYED, ("--api-key", "another key"), "server", "refuses the API key"),
    slow((), ("--model", "another-model"), "server", "it serves stdlib-nano"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "options", "link", "words"), BROKEN_SERVERS)
def test_a_broken_server(
    tmp_path: Path, arguments: tuple[str, ...], options: tuple[str, ...], link: str, words: str
) -> None:
    """The first broken link of a server, and the setting to change."""
    (tmp_path / "empty").mkdir()
    with serving(*(one.replace("{folder}", str(tmp_path)) for one in arguments)) as url:
        broken(explain(url, *options), link, words)


HEALTHY_SERVERS = [
    ("--store", "memory://?size=64MiB", "--store", "disk://{folder}/kv?size=64MiB"),
    slow(),
    slow("--store", "disk://{folder}/kv?size=64MiB&min_tokens=200"),
    slow("--store", "disk://{folder}/kv?size=64MiB"),
    slow("--store", "file://{folder}/objects"),
    slow("--store", "disk://{folder}/kv?size=64MiB&codec=lossless"),
    slow("--store", "disk://{folder}/kv?size=64MiB&admit=second"),
    slow("--store", "disk://{folder}/kv?size=64MiB&admit=prompts"),
    slow("--store", "disk://{folder}/kv?size=64MiB&write_rate=1GiB"),
    slow("--store", "disk://{folder}/kv?size=64MiB&tenant_quota=50%"),
    slow("--store", "memory://?size=64MiB", "--store", "disk://{folder}/kv?hold=16MiB"),
    slow("--store", "memory://?size=64MiB", "--store", "disk://{folder}/empty?read_only=1"),
    slow("--store", "disk://{folder}/kv?size=64MiB", "--block-size", "4"),
    slow("--store", "disk://{folder}/kv?size=64MiB", "--block-size", "64"),
    slow("--store", "disk://{folder}/kv?size=64MiB", "--max-model-len", "100"),
    slow("--store", "disk://{folder}/kv?size=64MiB", "--store-integrity-secrets", "1:a secret of these tests"),
    slow("--store", "disk://{folder}/kv?size=64MiB", "--quota", "* requests=100"),
    slow("--quantization", "int8", "--store", "memory://?size=64MiB"),
    slow(*KEYED, "--store", "disk://{folder}/kv?size=64MiB"),
]  # fmt: skip


def _flat(cases: Sequence[Any]) -> list[Any]:
    """Makes one parameter per case: its arguments."""
    return [pytest.param(one.values, marks=one.marks) if hasattr(one, "marks") else pytest.param(one) for one in cases]


@pytest.mark.parametrize("arguments", _flat(HEALTHY_SERVERS))
def test_a_healthy_server(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    """No link of a healthy server is called broken, the probe comes back from a store where there is one, and the probes'
    blocks are gone in the end."""
    (tmp_path / "empty").mkdir()
    with serving(*(one.replace("{folder}", str(tmp_path)) for one in arguments)) as url:
        options = ("--api-key", KEY) if "--api-keys" in arguments else ()
        said = explain(url, *options)
        sound(said)
        names = said.names
        assert names[:4] == ["server", "computed", "device", "salt"] and names[-1] == "template"
        assert names[4:-1] == (["written", "loaded"] if "--store" in arguments else ["stores"])
        cached = [
            line
            for line in http_client.get(f"{url}/metrics").text.splitlines()
            if line.startswith("foreword:blocks_cached{")
        ]
        assert [float(line.split()[-1]) for line in cached] == [0.0]


@pytest.mark.extended
def test_a_busy_server(tmp_path: Path) -> None:
    """Other requests, and their hits, misses and writes, change nothing of what is said."""
    with serving("--store", f"disk://{tmp_path}/kv?size=64MiB") as url, ExitStack() as stack:
        ended = threading.Event()

        def others(number: int) -> None:
            for turn in range(10_000):
                if ended.is_set():
                    return
                body = {"prompt": [100 + number] * (50 + turn % 200), "max_tokens": 4, "model": "stdlib-nano"}
                httpx.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status()

        for number in range(3):
            thread = threading.Thread(target=others, args=(number,))
            thread.start()
            stack.callback(thread.join)
        stack.callback(ended.set)
        sound(explain(url))


def test_no_server() -> None:
    """Nothing listens, or something else does."""
    broken(explain(f"http://{NOWHERE}"), "server", "no answer from")
    with web(lambda handler: (404, b"not found")) as url:
        broken(explain(url), "server", "is neither a vLLM nor of Foreword's")


def test_a_server_that_loads() -> None:
    """While the model is loaded that is what is said."""
    server = ControlledProcess(loading=False)
    try:
        broken(explain(server.url()), "server", "is not ready: The model is still being loaded")
    finally:
        server.popen.kill()
        server.end()


def test_a_template_with_the_time(tmp_path: Path) -> None:
    """A chat template that shows the time is named, with the first token that differs."""
    shutil.copytree(MODEL, tmp_path / "model")
    path = tmp_path / "model" / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["chat_template"] = "{{ strftime_now('%H:%M:%S') }}" + config["chat_template"]
    path.write_text(json.dumps(config))
    with serving(str(tmp_path / "model")) as url:
        broken(explain(url), "template", "the model's chat template")


@contextmanager
def web(answer: Callable[[BaseHTTPRequestHandler], tuple[int, bytes]]) -> Iterator[str]:
    """An HTTP server that answers all requests so."""

    class Handler(BaseHTTPRequestHandler):
        def respond(self) -> None:
            status, body = answer(self)
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = do_DELETE = respond

        def log_message(self, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


_numbers = itertools.count()
Change = Callable[[BaseHTTPRequestHandler, dict[str, Any]], tuple[int, bytes] | None]


@contextmanager
def proxy(url: str, change: Change, after: Callable[[bytes], bytes] = bytes) -> Iterator[str]:
    """A proxy in front of a server.

    Args:
        change: changes the JSON of a request, or answers it.
        after: changes the bodies of the server's answers.
    """

    def forward(handler: BaseHTTPRequestHandler) -> tuple[int, bytes]:
        data = handler.rfile.read(int(handler.headers.get("content-length", 0)))
        body = json.loads(data) if data else {}
        if (answered := change(handler, body)) is not None:
            return answered
        headers = {name: handler.headers[name] for name in ("content-type", "authorization") if name in handler.headers}
        data = json.dumps(body).encode() if data else b""
        answer = httpx.request(handler.command, url + handler.path, content=data, headers=headers, timeout=60)
        return answer.status_code, after(answer.content)

    with web(forward) as address:
        yield address


@contextmanager
def balanced(*urls: str) -> Iterator[str]:
    """A balancer, which takes the next of these servers for each connection."""
    loop, ports = Loop(), itertools.cycle(int(url.rpartition(":")[2]) for url in urls)

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
        writer.close()

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection("127.0.0.1", next(ports))
        await asyncio.gather(copy(reader, there[1]), copy(there[0], writer), return_exceptions=True)

    balancer = loop.call(lambda: asyncio.start_server(forward, "127.0.0.1", 0))
    yield f"http://127.0.0.1:{balancer.sockets[0].getsockname()[1]}"


def hidden(*paths: str) -> Change:
    """Answers 404 for paths that begin so."""
    return lambda handler, body: (404, b"not found") if handler.path.startswith(paths) else None


def instead(answer: tuple[int, bytes]) -> Change:
    """Answers completions so."""
    return lambda handler, body: answer if handler.path == "/v1/completions" else None


def changed(change: Callable[[dict[str, Any]], object]) -> Change:
    """Changes the bodies of completions."""

    def apply(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        if handler.path == "/v1/completions":
            change(body)

    return apply


PROXIES = [
    (changed(lambda body: body.pop("cache_salt")), "salt", "it drops `cache_salt`"),
    slow(changed(lambda body: body.update(cache_salt=f"{next(_numbers)}")), "device", "changes prompts or salts"),
    slow(changed(lambda body: body["prompt"].__setitem__(0, 100 + next(_numbers) % 100)), "device", "changes prompts"),
    (changed(lambda body: body["prompt"].insert(64, 100 + next(_numbers) % 100)), "computed", "it changes requests"),
    slow(changed(lambda body: body.update(prompt=body["prompt"][-10:])), "computed", "as one of 10"),
    (hidden("/metrics"), "server", "/metrics has no metrics (HTTP status 404)"),
    slow(hidden("/metrics", "/ui"), "server", "something in front of it hides `/metrics`"),
    slow(instead((502, b"<html>bad gateway</html>")), "answer", "what stands between here and the server"),
    (instead((200, b"<html>log in</html>")), "answer", "what stands between here and the server"),
    slow(lambda handler, body: (200, b"<html>log in</html>"), "server", "is neither a vLLM nor of Foreword's"),
]


@pytest.fixture(scope="module")
def one() -> Iterator[str]:
    """A server without stores."""
    with serving() as url:
        yield url


@pytest.mark.parametrize(("change", "link", "words"), PROXIES)
def test_a_proxy_that_changes_requests(one: str, change: Change, link: str, words: str) -> None:
    """A proxy that changes or answers requests is named."""
    with proxy(one, change) as url:
        broken(explain(url), link, words)


@pytest.mark.slow
def test_proxies_that_repeat_themselves(one: str) -> None:
    """Proxies that repeat themselves are found: one that makes all prompts the same, and one that answers a completion with the
    answer to another."""
    with proxy(one, changed(lambda body: body.update(prompt=[101, 102] * 100, cache_salt="one"))) as url:
        explain(url)
        broken(explain(url), "computed", "it changes or replays requests")
    answers: list[bytes] = []

    def keep(content: bytes) -> bytes:
        if b"text_completion" in content:
            answers.append(content)
            return answers[0]
        return content

    with proxy(one, hidden("/none"), keep) as url:
        broken(explain(url), "device", "what stands in front of the server")


@pytest.mark.slow
def test_a_proxy_that_drops_keys() -> None:
    """The server gets no key, though the command has one."""

    def drop(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        del handler.headers["authorization"]

    with serving(*KEYED) as server, proxy(server, drop) as url:
        broken(explain(url, "--api-key", KEY), "server", "a proxy that drops `authorization`")


HEALTHY_PROXIES = [
    (hidden("/none"), bytes),
    (hidden("/ui"), bytes),
    (hidden("/v1/cache"), bytes),
    (hidden("/v1/tokenize"), bytes),
    (hidden("/none"), lambda content: content.replace(b"cached_tokens", b"other_tokens")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("change", "after"), HEALTHY_PROXIES)
def test_a_proxy_that_hides_little(tmp_path: Path, change: Change, after: Callable[[bytes], bytes]) -> None:
    """A proxy that changes nothing of a completion is not accused, nor is a URL that ends as those of clients do."""
    with serving("--store", f"disk://{tmp_path}/kv?size=64MiB") as server, proxy(server, change, after) as url:
        sound(explain(url))
        sound(explain(f"{url}/v1/"))


@pytest.mark.slow
def test_servers_behind_a_balancer(two: list[str], tmp_path: Path) -> None:
    """A balancer in front of servers that share nothing is named; with a store that all share it is not, and one server behind
    it is looked at as ever."""
    with balanced(*two) as url:
        broken(explain(url), "placed", "`foreword route` in front of them")
    with balanced(two[0]) as url:
        said = explain(url)
        sound(said)
        assert "loaded" in said.names
    shared = ("--store", f"disk://{tmp_path}/kv?size=64MiB")
    with serving(*shared) as first, serving(*shared) as second, balanced(first, second) as url:
        said = explain(url)
        sound(said)
        assert said.last["name"] == "placed" and "several servers answer here" in said.last["text"]


@pytest.mark.slow
def test_redis(tmp_path: Path) -> None:
    """A server over a Redis with room, and over one without."""
    small = ("--maxmemory", "1mb", "--maxmemory-policy", "noeviction")
    with ExitStack() as stack:
        room, full = (RedisServer(tmp_path / f"{len(options)}", *options) for options in ((), small))
        stack.callback(room.kill)
        stack.callback(full.kill)
        sound(explain(stack.enter_context(serving("--store", room.url))))
        broken(explain(stack.enter_context(serving("--store", full.url))), "written", "Redis's `maxmemory`")


@pytest.mark.slow
def test_encrypted_tenants(tmp_path: Path) -> None:
    """Two tenants of a server whose store is encrypted."""
    (tmp_path / "masters").write_text(f"1:{'11' * 32}\n")
    keys = ("--encryption-key-store", f"disk://{tmp_path}/keys", "--encryption-master-key-file", f"{tmp_path}/masters")
    other = KEY[::-1]
    with serving(*KEYED, "--api-keys", f"bob={other}", "--store", f"disk://{tmp_path}/kv?size=64MiB", *keys) as url:
        for key in (KEY, other):
            said = explain(url, "--api-key", key)
            sound(said)
            assert "loaded" in said.names


def test_sglang() -> None:
    """An SGLang is recognized, and not accused."""
    with web(lambda handler: (200, b"# TYPE x counter\nsglang:num_running_reqs 0.0\n")) as url:
        said = explain(url)
        sound(said)
        assert "docs/guides/sglang.md" in said.last["text"]


def test_a_proxy_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy that the environment names, and that does not lead to the server."""
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("http_proxy", f"http://{NOWHERE}")
    broken(explain("http://127.0.0.1:8000"), "server", "`NO_PROXY=127.0.0.1`")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    broken(explain(f"http://{NOWHERE}"), "server", "`--host` and `--port`")


# Routers


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Two servers with a store of their own each."""
    with ExitStack() as stack:
        folders = [tmp_path_factory.mktemp("store") for _ in range(2)]
        yield [stack.enter_context(serving("--store", f"disk://{folder}/kv?size=64MiB")) for folder in folders]


def given(urls: Sequence[str]) -> list[str]:
    return [part for url in urls for part in ("--replica", url)]


BROKEN_ROUTERS = [
    (("--policy", "round-robin"), (), "placed", "`--policy cost`"),
    slow(("--policy", "least-loaded"), (), "placed", "`--policy cost`"),
    slow(("--policy", "random"), (), "placed", "`--policy cost`"),
    slow(("--policy", "round-robin", "--admin-key", "the key of an operator"), (), "placed", "`--policy cost`"),
    slow(("--request-timeout", "0.001"), (), "answer", "`--request-timeout` of the router"),
    slow(("--max-body", "300"), (), "answer", "`--max-body`"),
]


@pytest.mark.parametrize(("arguments", "options", "link", "words"), BROKEN_ROUTERS)
def test_a_broken_router(
    two: list[str], arguments: tuple[str, ...], options: tuple[str, ...], link: str, words: str
) -> None:
    """The first broken link of a router in front of two healthy servers."""
    with routing(2, *given(two), *arguments) as url:
        broken(explain(url, *options), link, words)


HEALTHY_ROUTERS = [
    (),
    slow("--policy", "longest-prefix"),
    slow("--policy", "consistent-hashing"),
    slow("--policy", "two-choices"),
    slow("--admin-key", "the key of an operator"),
]


@pytest.mark.parametrize("arguments", _flat(HEALTHY_ROUTERS))
def test_a_healthy_router(two: list[str], arguments: tuple[str, ...]) -> None:
    """No link of a healthy router is called broken, and the stores of both replicas are looked at."""
    with routing(2, *given(two), *arguments) as url:
        said = explain(url)
        sound(said)
        places = [link["text"].partition(": ")[0] for link in said.links if link["name"] == "loaded"]
        assert places == ([] if "--admin-key" in arguments else two)


def test_replicas_out_of_service(two: list[str]) -> None:
    """A replica that does not answer, one that was drained, and a router without any."""
    with routing(1, *given([two[0], f"http://{NOWHERE}"])) as url:
        until(lambda: "cannot connect" in http_client.get(f"{url}/v1/router/replicas").text)
        broken(explain(url), "replicas", f"http://{NOWHERE} takes no requests")
    with routing(2, *given(two)) as url:
        http_client.post(f"{url}/v1/router/drain", json={"replica": two[1]}).raise_for_status()
        broken(explain(url), "replicas", "`POST /v1/router/undrain`")
    with routing(0, *given([f"http://{NOWHERE}"])) as url:
        broken(explain(url), "server", "`--replica`")


@pytest.mark.slow
def test_routers_in_other_places(two: list[str], tmp_path: Path) -> None:
    """A router in another place is not accused, and what restricts is said: one replica by turns, a router in front of a
    router, one behind a proxy that drops headers, and replicas with blocks of different sizes."""
    with routing(1, *given(two[:1]), "--policy", "round-robin") as url:
        sound(explain(url))
        with routing(1, *given([url])) as outer:
            sound(explain(outer))
    with routing(2, *given(two)) as router, proxy(router, hidden("/none")) as url:
        said = explain(url)
        sound(said)
        assert "it drops `x-foreword-route`" in "".join(link["setting"] for link in said.links if link["ok"] is None)
    larger = ("--block-size", "32", "--store", f"disk://{tmp_path}/kv?size=64MiB")
    with serving(*larger) as other, routing(2, *given([two[0], other])) as url:
        said = explain(url)
        sound(said)
        [note] = [link for link in said.links if link["ok"] is None]
        assert "blocks of 16 and 32 tokens" in note["text"] and "`--block-size`" in note["setting"]


@pytest.mark.slow
def test_keys_of_a_router(two: list[str]) -> None:
    """A router that wants keys, in front of a server that knows them and of one that does not."""
    keys = ("--api-keys", f"ann={KEY}")
    with serving(*KEYED) as server, routing(1, *given([server]), *keys) as url:
        broken(explain(url), "server", "wants an API key")
        sound(explain(url, "--api-key", KEY))
    with routing(0, *given(two[:1]), *keys) as url:
        until(lambda: "does not separate tenants" in http_client.get(f"{url}/ready").text)
        broken(explain(url, "--api-key", KEY), "server", "it does not separate tenants")


@pytest.mark.slow
def test_a_server_that_only_reads(tmp_path: Path) -> None:
    """A server that may only read its stores is not called broken; that it keeps nothing is said, with the setting."""
    (tmp_path / "kv").mkdir()
    secret = tmp_path / "secret"
    secret.write_text(KEY)
    secret.chmod(0o600)
    with serving("--role", "prefill", "--transfer-bind", "127.0.0.1:0", "--transfer-secret", KEY) as peer:
        address = http_client.get(f"{peer}/v1/instance").json()["transfer"]
        for store in (f"disk://{tmp_path}/kv?read_only=1", f"peer://{address}?secret_file={secret}"):
            with serving("--store", store) as url:
                said = explain(url)
                sound(said)
            [written] = [link for link in said.links if link["name"] == "written"]
            assert written["ok"] is None and "`read_only=`" in written["setting"]


@pytest.mark.slow
def test_a_key_store_that_does_not_answer(tmp_path: Path) -> None:
    """Blocks that cannot be encrypted are not written, and the key store is named."""
    (tmp_path / "masters").write_text(f"1:{'11' * 32}\n")
    keys = ("--encryption-key-store", f"redis://{NOWHERE}", "--encryption-master-key-file", f"{tmp_path}/masters")
    with serving("--store", f"disk://{tmp_path}/kv?size=64MiB", *keys) as url:
        broken(explain(url), "written", "`--encryption-key-store`")


@pytest.mark.extended
def test_what_is_broken_behind_a_router(tmp_path: Path) -> None:
    """A replica without prefix caching, and one whose store is down, are named with their URL."""
    with serving("--no-enable-prefix-caching") as server, routing(1, *given([server])) as url:
        broken(explain(url), "device", f"{server}: prefix caching is switched off")
    with serving("--store", f"redis://{NOWHERE}") as server, routing(1, *given([server])) as url:
        broken(explain(url), "written", f"{server}: redis is off")


@pytest.mark.slow
def test_replicas_with_other_weights(two: list[str], tmp_path: Path) -> None:
    """Replicas that serve different weights under one name."""
    shutil.copytree(MODEL, tmp_path / MODEL.name)
    weights = load_file(tmp_path / MODEL.name / "model.safetensors")
    weights = {name: one + torch.full_like(one, 0.01) for name, one in weights.items()}
    save_file(weights, tmp_path / MODEL.name / "model.safetensors", {"format": "pt"})
    with serving(str(tmp_path / MODEL.name)) as other, routing(2, *given([two[0], other])) as url:
        broken(explain(url), "replicas", "2 different weights")


@pytest.mark.slow
def test_several_servers_behind_one_address(two: list[str]) -> None:
    """A replica that is a balancer, which takes another of two servers for each connection."""
    with balanced(*two) as balancer, routing(1, *given([balancer])) as url:
        broken(explain(url), "placed", "several servers behind one address")


@pytest.mark.slow
def test_another_tokenizer(two: list[str], tmp_path: Path) -> None:
    """A router whose own tokenizer is not that of its replicas, and one with theirs."""
    tokenizer = json.loads((MODEL / "tokenizer.json").read_text(encoding="utf-8"))
    tokenizer["model"]["merges"] = []
    shutil.copytree(MODEL, tmp_path / "other", ignore=shutil.ignore_patterns("*.safetensors"))
    (tmp_path / "other" / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    with routing(2, *given(two), "--tokenizer", str(tmp_path / "other")) as url:
        broken(explain(url), "tokens", "`--tokenizer` of the router")
    with routing(2, *given(two), "--tokenizer", str(MODEL)) as url:
        sound(explain(url))


@pytest.mark.slow
def test_a_replica_that_always_refuses() -> None:
    """A replica with a quota for the router, which waits for it until its time is over."""
    key, quota = ("--api-keys", f"router={KEY}"), ("--quota", "router requests=1")
    with serving(*key, *KEYED[2:], *quota) as server, routing(1, *given([server]), "--replica-key", KEY) as url:
        said = explain(url, "--within", "30")
        broken(said, "answer", "the replicas: their `--quota`")
        assert f"{server}: overloaded" in said.last["text"]


@pytest.mark.slow
def test_events_that_do_not_arrive() -> None:
    """A replica publishes events, and the router listens elsewhere; with the right address nothing is broken, and with the
    address of another replica it is."""
    with serving("--kv-events", "tcp://127.0.0.1:0") as server:
        with routing(1, "--replica", f"{server} events=tcp://{NOWHERE} replay=tcp://{NOWHERE}") as url:
            broken(explain(url), "events", "`--kv-events` of the replica")
        of_one = "events=tcp://127.0.0.1:9 replay=tcp://127.0.0.1:9"
        with serving() as other, routing(2, "--replica", f"{server} {of_one}", "--replica", f"{other} {of_one}") as url:
            broken(explain(url), "events", "`events=` of `--replica`")
        with routing(1, "--replica", server, "--directory-blocks", "3") as url:
            broken(explain(url), "events", "`--directory-blocks`")
        with routing(1, "--replica", server) as url:
            sound(explain(url))


class ForeignReplica(ScriptedReplica):
    """Answers completions, and tokenizes nothing. `cached`: tokens that its usage says next; None for a usage without them."""

    def __init__(self, loop: Loop) -> None:
        self.cached: list[int | None] = []
        super().__init__(loop, owner="someone")

    def routes(self) -> list[RouteDef]:
        return [post("/v1/completions", self._complete)]

    async def _complete(self, request: Request) -> Response:
        body = await request.json()
        cached = self.cached.pop(0) if self.cached else 0
        details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": 1, **details}
        choices = [{"index": 0, "text": "a", "finish_reason": "length"}]
        return json_response({"id": "x", "object": "text_completion", "choices": choices, "usage": usage})


def test_replicas_of_another_kind() -> None:
    """A replica that does not say what was cached, and one that does not tokenize."""
    replica = ForeignReplica(Loop())
    with routing(1, *given([replica.url])) as url:
        replica.cached = [None] * 4
        broken(explain(url), "placed", "`--enable-prompt-tokens-details`")
        replica.cached = [0, 128, 128, 128]
        broken(explain(url), "tokens", "`--tokenizer` of the router")


@pytest.mark.slow
def test_another_master_key(tmp_path: Path) -> None:
    """Where two servers of a store have different master keys, the prompts of the explanation are stored and found; that the
    blocks of a tenant cannot be read is said, with the setting, once a request has met some."""
    request = {"model": "stdlib-nano", "prompt": list(range(300, 500)), "max_tokens": 1, "cache_salt": "bob"}
    for number in "12":
        (tmp_path / "masters").write_text(f"1:{number * 64}\n")
        keys = (
            "--encryption-key-store",
            f"disk://{tmp_path}/keys",
            "--encryption-master-key-file",
            f"{tmp_path}/masters",
        )
        with serving("--store", f"disk://{tmp_path}/kv?size=64MiB", *keys) as url:
            http_client.post(f"{url}/v1/completions", json=request).raise_for_status()
            until(lambda: "tier_written_blocks_total" in http_client.get(f"{url}/metrics").text)
            said = explain(url)
            sound(said)
            notes = [link["setting"] for link in said.links if link["name"] == "earlier"]
    assert notes == ["the secrets, `--encryption-master-key-file` and release: the same for all servers of a store"]
