"""Two `vllm serve` processes over one disk store, and named prefixes. Needs FOREWORD_VLLM_PYTHON, as test_vllm.py does; skipped
without. All tests share two servers, and the last ones start one of them again, by the command."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
import transformers
from ports import free_port
from vllm_process import needs_vllm
from vllm_server import BLOCK, VllmServer, make_byte_model
from vllm_waits import WITHIN

from foreword.blocks.salt import Salt
from foreword.prefixes.book import NamedPrefix
from foreword.store.urls import open_store

pytestmark = needs_vllm

KEY = "a key that only the second server asks for"


class Server(VllmServer):
    """A server that asks for a key, or for none."""

    key: str | None = None

    def ask(self, method: str, path: str, body: Any = None, *, key: str | None = None) -> httpx.Response:
        given = key or self.key
        headers = {"authorization": f"Bearer {given}"} if given else {}
        return httpx.request(method, self.url + path, json=body, headers=headers, timeout=WITHIN)

    def complete(self, prompt: Any, **more: Any) -> dict[str, Any]:
        """Greedy; `tokens`: of the answer, `cached`: how many of the prompt's were."""
        asked = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        return self._answer("/v1/completions", {**asked, **more})

    def chat(self, messages: list[dict[str, str]], **more: Any) -> dict[str, Any]:
        asked = {"messages": messages, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        return self._answer("/v1/chat/completions", {**asked, **more})

    def _answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        response = self.ask("POST", path, body)
        assert response.status_code == 200, response.text
        found = response.json()
        details = found["usage"]["prompt_tokens_details"] or {}
        return {
            "tokens": found["choices"][0]["token_ids"],
            "cached": details.get("cached_tokens") or 0,
            "prompt": found["usage"]["prompt_tokens"],
        }

    def metric(self, name: str) -> float:
        lines = self.ask("GET", "/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name + "{"))


@dataclass
class Pair:
    """Two servers, one store."""

    model: Path
    folder: Path
    first: Server
    second: Server

    @property
    def store(self) -> str:
        return f"disk://{self.folder}/kv?size=256MiB"

    def blocks(self, *, pinned: bool = False) -> int:
        """Number of blocks in the store."""
        store = open_store([self.store])
        try:
            return sum(entry.pinned or not pinned for entry in store.scan(deadline=time.monotonic() + WITHIN))
        finally:
            store.close()

    def reference(self, text: str, count: int = 12) -> list[int]:
        """The model's answer without vLLM and without any cache."""
        tokenizer = transformers.AutoTokenizer.from_pretrained(self.model)
        model = transformers.LlamaForCausalLM.from_pretrained(self.model, dtype=torch.float32)
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
        for _ in range(count):
            with torch.inference_mode():
                ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
        found: list[int] = ids[0, -count:].tolist()
        return found


def wait_for(happened: Callable[[], bool], within: float = WITHIN) -> None:
    deadline = time.monotonic() + within
    while not happened():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def start(model: Path, folder: Path, core: int, key: str | None, **how: Any) -> Server:
    transfer = {
        "kv_connector": "ForewordConnector",
        "kv_connector_module_path": "vllm_patient",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "store": [f"disk://{folder}/kv?size=256MiB"],
            "lookup_timeout": 60.0,
            "load_timeout": 300.0,
        },
    }
    server = Server(
        model, folder / f"server-{core}.log", "--max-model-len", "1024",
        "--block-size", str(BLOCK), "--kv-cache-memory-bytes", str(64 << 20), "--max-num-seqs", "8", "--seed", "0",
        "--shutdown-timeout", "120", "--kv-transfer-config", json.dumps(transfer),
        "--middleware", "foreword.integrations.vllm.NamedPrefixes", *(("--api-key", key) if key else ()),
        core=core, **how,
    )  # fmt: skip
    server.key = key
    return server


def ready(server: Server) -> Server:
    wait_for(server.healthy, 400)
    return server


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("serve")
    model = folder / "model"
    make_byte_model(model)
    started = Pair(model, folder, start(model, folder, 0, None), start(model, folder, 1, KEY))
    try:
        ready(started.first)
        ready(started.second)
        yield started
    finally:
        for server in (started.first, started.second):
            server.kill()


def foreword(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "foreword", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=WITHIN, check=False)


def text(seed: int, length: int) -> str:
    words = [f"w{(seed * 7919 + i * i) % 997}" for i in range(length)]
    return " ".join(words)[:length]


def test_servers_share_blocks(pair: Pair) -> None:
    """A prompt that one server has computed is loaded by the other. Both give the answers of the model without any cache, and
    the metrics count the hit."""
    prompt = text(1, 400)
    right = pair.reference(prompt)
    computed = pair.first.complete(prompt)
    assert (computed["tokens"], computed["cached"], computed["prompt"]) == (right, 0, 400)
    wait_for(lambda: pair.blocks() >= 400 // BLOCK)
    before = pair.second.metric("vllm:external_prefix_cache_hits_total")
    loaded = pair.second.complete(prompt)
    assert (loaded["tokens"], loaded["cached"]) == (right, 400 // BLOCK * BLOCK)
    assert pair.second.metric("vllm:external_prefix_cache_hits_total") - before == 400 // BLOCK * BLOCK


def test_prefetch(pair: Pair) -> None:
    """Blocks that the store has of a coming prompt are brought to the device of a server that never saw it; the next turn
    computes the rest only. The answer is clipped to what is stored, and refused where nothing is, as for another salt."""
    known, turn = text(61, 400), text(62, 100)
    path, held = "/v1/cache/prefetch", 400 // BLOCK * BLOCK
    assert pair.first.complete(known)["cached"] == 0
    wait_for(lambda: pair.second.ask("POST", path, {"prompt": known}).json()["tokens"] == held)
    before = pair.second.metric("vllm:external_prefix_cache_hits_total")
    answer = pair.second.ask("POST", path, {"prompt": known + turn}).json()
    assert (answer["status"], answer["tokens"], answer["where"]) == ("clipped", held, "device")
    assert answer["prompt_tokens"] == 500
    assert pair.second.complete(known + turn)["cached"] == held
    assert pair.second.metric("vllm:external_prefix_cache_hits_total") == before, "it was on the device"
    for body in ({"prompt": text(63, 200)}, {"prompt": known, "cache_salt": "other"}):
        answer = pair.second.ask("POST", path, body).json()
        assert (answer["status"], answer["tokens"], answer["where"]) == ("refused", 0, None)
    assert pair.second.ask("POST", path, {}).status_code == 400
    assert pair.second.ask("POST", path, {"prompt": known}, key="wrong").status_code == 401


def tell(server: Server, action: str, name: str, **more: Any) -> dict[str, Any]:
    answer = server.ask("POST", "/v1/sessions", {"action": action, "session_id": name, **more})
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


def test_the_end_of_a_session(pair: Pair) -> None:
    """Blocks that only an ended session has used are gone from vLLM's cache and from the store; what another request has used
    before or since stays, and every answer is the model's without any cache."""
    head, own, other = text(81, 160), text(82, 224), text(83, 96)
    right = pair.reference(head + own)
    assert pair.first.complete(head)["cached"] == 0
    before = pair.blocks()
    tell(pair.first, "open", "task")
    assert pair.first.complete(head + own, user="task")["tokens"] == right
    longer = pair.first.complete(head + own + other, user="task")
    assert longer["cached"] == 384
    wait_for(lambda: pair.blocks() - before >= (384 + 96) // BLOCK - 160 // BLOCK)
    assert pair.first.complete(head + own[:64])["cached"] == 224, "another request shares two blocks more"
    freed = tell(pair.first, "end", "task")["freed_blocks"]
    assert freed["device"] == freed["stores"] == (384 + 96 - 224) // BLOCK
    wait_for(lambda: pair.blocks() == before + 2)
    assert pair.first.ask("POST", "/v1/sessions", {"action": "end", "session_id": "task"}).status_code == 404
    for server, cached in ((pair.first, 224), (pair.second, 384)):
        again = server.complete(head + own)
        assert (again["tokens"], again["cached"]) == (right, cached)
        wait_for(lambda: pair.blocks() >= before + 7)


def test_forks_and_compaction(pair: Pair) -> None:
    """A fork keeps what its parent has when that one ends. After a compaction only what is kept of the history is cached, and
    what a tenant keeps by cache control stays to the end."""
    start, tail, pinned, before = text(84, 192), text(85, 128), pair.blocks(pinned=True), pair.blocks()
    salt = {"cache_salt": Salt(b"of forks").text}
    tell(pair.first, "open", "parent", **salt)
    assert pair.first.complete(start, prompt_cache_key="parent", **salt)["cached"] == 0
    assert pair.first.ask("POST", "/v1/sessions", {"action": "end", "session_id": "parent"}).status_code == 404
    tell(pair.first, "fork", "child", parent_session_id="parent", **salt)
    assert tell(pair.first, "end", "parent", **salt)["freed_blocks"] == {"device": 0, "stores": 0}
    assert pair.first.complete(start + tail, prompt_cache_key="child", **salt)["cached"] == 192
    assert pair.first.complete(start + tail, prompt_cache_key="child", **salt)["cached"] == 320
    listed = pair.first.ask("GET", f"/v1/sessions?cache_salt={salt['cache_salt']}").json()["data"]
    assert [(one["id"], one["parent"], one["requests"], one["blocks"]) for one in listed] == [
        ("child", "parent", 2, 10)
    ]
    assert tell(pair.first, "compact", "child", keep_tokens=256, **salt)["freed_blocks"]["device"] == 2
    wait_for(lambda: pair.blocks() == before + 256 // BLOCK)  # the answer comes before the store has deleted them
    keep = {"kv_transfer_params": {"foreword_cache": [{"action": "retain", "tokens": 128, "ttl": 60}]}}
    assert pair.first.complete(start + tail, prompt_cache_key="child", **salt, **keep)["cached"] == 256
    assert tell(pair.first, "end", "child", **salt)["freed_blocks"] == {"device": 6, "stores": 6}
    wait_for(lambda: pair.blocks() == before + 128 // BLOCK)
    release = {"kv_transfer_params": {"foreword_cache": [{"action": "release"}]}}
    assert pair.first.complete(start + tail, **salt, **release)["cached"] == 128
    wait_for(lambda: pair.blocks(pinned=True) == pinned)


def test_every_dialect_names_its_session(pair: Pair) -> None:
    """A header or a field of each kind of request says which session it belongs to. A name that is not open is ignored, an
    action that cannot be is refused."""
    messages = [{"role": "user", "content": text(86, 200)}]
    asked: list[tuple[str, dict[str, Any], dict[str, str]]] = [
        ("/v1/chat/completions", {"messages": messages, "max_tokens": 4, "user": "talk"}, {}),
        ("/v1/chat/completions", {"messages": messages, "max_tokens": 4}, {"x-session-id": "talk"}),
        ("/v1/responses", {"input": text(87, 200), "max_output_tokens": 4, "prompt_cache_key": "talk"}, {}),
        ("/v1/messages", {"messages": messages, "max_tokens": 4, "metadata": {"user_id": "talk"}}, {}),
    ]
    for path, body, headers in asked:
        tell(pair.first, "open", "talk")
        sent = httpx.post(pair.first.url + path, json={"model": "tiny", **body}, headers=headers, timeout=WITHIN)
        assert sent.status_code == 200, sent.text
        [one] = pair.first.ask("GET", "/v1/sessions").json()["data"]
        assert (one["id"], one["requests"]) == ("talk", 1) and one["blocks"] >= 200 // BLOCK, path
        tell(pair.first, "end", "talk")
    assert pair.first.complete(text(88, 64), user="never opened")["cached"] == 0
    tell(pair.first, "open", "private", cache_salt="mine")
    for other in ({}, {"cache_salt": "another"}):
        ended = {"action": "end", "session_id": "private", **other}
        assert pair.first.ask("POST", "/v1/sessions", ended).status_code == 404
    assert pair.first.ask("GET", "/v1/sessions").json()["data"] == []
    tell(pair.first, "end", "private", cache_salt="mine")
    for wrong in ({"action": "close", "session_id": "x"}, {"action": "fork", "session_id": "x"}):
        assert pair.first.ask("POST", "/v1/sessions", wrong).status_code == 400
    assert (
        pair.second.ask("POST", "/v1/sessions", {"action": "open", "session_id": "x"}, key="wrong").status_code == 401
    )


@contextlib.contextmanager
def routed(server: Server, folder: Path) -> Iterator[str]:
    """The URL of a router with two tenants in front of a server."""
    port = free_port()
    keys = [word for name in ("alice", "bob") for word in ("--api-keys", f"{name}={name}-has-this-key")]
    options = ["--replica", server.url, "--port", str(port), "--tenant-secret", "the tenants of these tests", *keys]
    variables = {name: value for name, value in os.environ.items() if not name.startswith("FOREWORD_")}
    with (folder / "router.log").open("w") as log:
        command = [sys.executable, "-m", "foreword", "route", *options]
        process = subprocess.Popen(command, stdout=log, stderr=log, env=variables)
    url = f"http://127.0.0.1:{port}"

    def serves() -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{url}/ready", timeout=WITHIN).status_code == 200
        return False

    try:
        wait_for(serves)
        yield url
    finally:
        process.kill()
        process.wait()


def test_sessions_through_a_router(pair: Pair, tmp_path: Path) -> None:
    """A router asks vLLM of its tenants' sessions: each has its own of one name, and one that ends leaves the other's."""
    prompt, path = text(89, 270), "/v1/sessions"
    with routed(pair.first, tmp_path) as url:

        def ask(method: str, path: str, tenant: str, body: Any = None, **headers: str) -> httpx.Response:
            given = {"authorization": f"Bearer {tenant}-has-this-key", **headers}
            return httpx.request(method, url + path, json=body, headers=given, timeout=WITHIN)

        def cached(tenant: str) -> int:
            body = {"model": "tiny", "prompt": prompt, "max_tokens": 1}
            answer = ask("POST", "/v1/completions", tenant, body, **{"x-session-id": "mine"}).raise_for_status()
            return int((answer.json()["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0)

        for tenant in ("alice", "bob"):
            opened = ask("POST", path, tenant, {"action": "open", "session_id": "mine"})
            assert opened.status_code == 200 and opened.headers["x-foreword-replicas"] == "1 of 1", opened.text
            assert cached(tenant) == 0
        for tenant in ("alice", "bob"):
            [one] = ask("GET", path, tenant).json()["data"]
            assert (one["id"], one["blocks"]) == ("mine", 256 // BLOCK)
        assert ask("POST", path, "bob", {"action": "end", "session_id": "mine"}).json()["freed_blocks"]["device"] == 8
        assert ask("GET", path, "bob").json()["data"] == []
        assert ask("POST", path, "bob", {"action": "end", "session_id": "mine"}).status_code == 404
        assert cached("alice") == 256 and cached("bob") == 0


def test_the_openai_client_streams(pair: Pair) -> None:
    """OpenAI's client streams a chat with a named prefix, and gets the answer for the full messages."""
    client = openai.OpenAI(base_url=pair.second.url + "/v1", api_key=KEY, max_retries=0)
    start_of = [{"role": "system", "content": text(2, 150)}]
    question: list[Any] = [{"role": "user", "content": "What is it about?"}]
    made = pair.second.ask("POST", "/v1/prefixes", {"name": "stream", "messages": start_of})
    assert made.status_code == 201, made.text

    def stream(messages: list[Any], **more: Any) -> tuple[str, Any]:
        chunks = client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=12, temperature=0, stream=True,
            stream_options={"include_usage": True}, extra_body={"ignore_eos": True, **more},
        )  # fmt: skip
        pieces = list(chunks)
        return "".join(one.choices[0].delta.content or "" for one in pieces if one.choices), pieces[-1].usage

    named, usage = stream(question, prefix="stream")
    written, _ = stream([*start_of, *question])
    assert named == written and named
    assert usage.prompt_tokens_details.cached_tokens >= 150 // BLOCK * BLOCK
    wait_for(lambda: pair.second.ask("GET", "/v1/prefixes/stream").json()["hit_tokens"] >= 150 // BLOCK * BLOCK)


def test_servers_share_named_prefixes(pair: Pair) -> None:
    """A prefix registered on one server is pinned in the store and can be used on the other, with the answer for the full text.
    An unknown name is a 404 that suggests a similar one."""
    content, rest = text(3, 300), " and then what?"
    made = pair.first.ask("POST", "/v1/prefixes", {"name": "manual", "content": content})
    assert made.status_code == 201, made.text
    described = made.json()
    assert set(described) == set(NamedPrefix("x", 1, "x", (1,), 0.0).describe())
    assert (described["version"], described["num_tokens"], described["ready"]) == (1, 300, True)
    assert described["bytes"] == 300 // BLOCK * BLOCK * 3 * 2 * 2 * 32 * 4
    assert pair.blocks(pinned=True) >= 300 // BLOCK
    used = pair.second.complete(rest, prefix="manual")
    assert used["tokens"] == pair.reference(content + rest)
    assert (used["cached"], used["prompt"]) == (300 // BLOCK * BLOCK, 300 + len(rest))
    several = pair.second.ask(
        "POST", "/v1/completions", {"prompt": [rest, [5, 6]], "prefix": "manual", "max_tokens": 1}
    )
    assert several.json()["usage"]["prompt_tokens"] == 600 + len(rest) + 2
    wrong = pair.second.ask("POST", "/v1/completions", {"prompt": rest, "prefix": "manul"})
    assert wrong.status_code == 404 and "'manual'" in wrong.json()["error"]["message"]
    other = pair.second.ask("POST", "/v1/chat/completions", {"messages": [], "prefix": "manual"})
    assert other.status_code == 400 and "messages" in other.json()["error"]["message"]
    shown = pair.second.ask("GET", "/v1/prefixes/manual").json()
    assert shown["content"] == content and shown["uses"] == 2 and shown["version"] == 1


def test_replaced_and_removed_by_the_command(pair: Pair) -> None:
    """`foreword prefix` adds, replaces, lists and removes on a vLLM server. Removed prefixes are unpinned, except for blocks
    that another prefix shares, and both servers see it."""
    was = pair.blocks(pinned=True)
    shared, tail = text(4, 160), text(5, 128)

    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        return foreword("prefix", *arguments, "--server", pair.second.url, "--api-key", KEY)

    def add(*arguments: str) -> str:
        done = command("add", *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "version 1" in add("short", "--text", shared)
    assert "version 1" in add("long", "--text", shared + tail)
    assert pair.blocks(pinned=True) - was == (160 + 128) // BLOCK
    assert command("add", "long", "--text", shared).returncode == 2
    assert "version 2" in add("long", "--text", shared + text(6, 64), "--replace")
    assert pair.blocks(pinned=True) - was == (160 + 64) // BLOCK
    assert "long  version 2  text  224 tokens" in command("list").stdout
    assert pair.first.ask("GET", "/v1/prefixes/long").json()["version"] == 2
    assert "removed long (version 2)" in command("remove", "long").stdout
    assert pair.blocks(pinned=True) - was == 160 // BLOCK
    wait_for(lambda: pair.first.ask("GET", "/v1/prefixes/long").status_code == 404)
    assert command("remove", "short").returncode == 0
    assert pair.blocks(pinned=True) == was
    assert "Did you mean" in command("show", "strem").stderr


def test_api_key(pair: Pair) -> None:
    """Prefixes of a server with an API key cannot be listed, registered, guessed or used without it."""
    for method, path, body in (
        ("GET", "/v1/prefixes", None),
        ("POST", "/v1/prefixes", {"name": "mine", "content": "x"}),
        ("DELETE", "/v1/prefixes/stream", None),
        ("POST", "/v1/completions", {"prompt": "x", "prefix": "manul"}),
    ):
        refused = pair.second.ask(method, path, body, key="another key")
        assert refused.status_code == 401 and "manual" not in refused.text
    assert pair.second.ask("GET", "/v1/prefixes/mine").status_code == 404


def test_bad_requests(pair: Pair) -> None:
    """A bad prefix is refused with an explanation and not registered."""
    for body, status, word in (
        ({"name": "a b", "content": "x"}, 400, "letters"),
        ({"name": "both", "content": "x", "messages": [{"role": "user", "content": "x"}]}, 400, "either"),
        ({"name": "none"}, 400, "either"),
        ({"name": "empty", "content": ""}, 400, "empty"),
        ({"content": "x"}, 400, "name"),
        ({"name": "long", "content": "x" * 5000}, 400, "1024"),
    ):
        answer = pair.first.ask("POST", "/v1/prefixes", body)
        assert answer.status_code == status and word in answer.json()["error"]["message"], answer.text
    found = pair.first.ask("GET", "/v1/prefixes").json()
    assert {prefix["name"] for prefix in found["data"]} == {"manual", "stream"}
    assert found["budget_bytes"] == 128 << 20


def test_public_prefixes(pair: Pair) -> None:
    """A text that a program on the host of one server marks is loaded by both, for every salt, and each answer is the model's
    without any cache. What follows it is its salt's only, on both. A caller from elsewhere marks nothing. Unmarked, it is every
    salt's own again."""
    content, own, path = text(71, 330), text(72, 200), "/v1/public/prefixes"
    shared, fresh = 330 // BLOCK * BLOCK, (Salt(f"tenant {number}".encode()).text for number in itertools.count())
    body = {"name": "house", "content": content}
    far = {"authorization": f"Bearer {KEY}", "x-forwarded-for": "192.0.2.1"}
    assert httpx.post(pair.second.url + path, json=body, headers=far, timeout=WITHIN).status_code == 403
    made = pair.second.ask("POST", path, body)
    assert made.status_code == 201 and made.json()["bytes"] == shared * 3 * 2 * 2 * 32 * 4
    assert pair.second.ask("GET", "/v1/prefixes/house").json()["version"] == 1
    for server in (pair.first, pair.second):
        wait_for(lambda server=server: server.complete(content, cache_salt=next(fresh))["cached"] == shared)  # type: ignore[misc]
    one, other = next(fresh), next(fresh)
    right = pair.reference(content + own)
    before, blocks = pair.first.metric("vllm:external_prefix_cache_hits_total"), pair.blocks()
    answer = pair.first.complete(content + own, cache_salt=one)
    assert (answer["tokens"], answer["cached"]) == (right, shared)
    assert pair.first.metric("vllm:external_prefix_cache_hits_total") - before == shared, "loaded, not computed"
    wait_for(lambda: pair.blocks() - blocks >= (530 - shared) // BLOCK)
    for salt, cached in ((one, 530 // BLOCK * BLOCK), (other, shared)):
        answer = pair.second.complete(content + own, cache_salt=salt)
        assert (answer["tokens"], answer["cached"]) == (right, cached)
    named = pair.second.complete(own, prefix="house", cache_salt=next(fresh))
    assert (named["tokens"], named["cached"]) == (right, shared)
    assert pair.second.ask("DELETE", f"{path}/house").status_code == 200
    for server in (pair.first, pair.second):
        wait_for(lambda server=server: server.complete(content, cache_salt=next(fresh))["cached"] == 0)  # type: ignore[misc]


def test_a_restarted_server_is_warm(pair: Pair) -> None:
    """A server that stops with `--shutdown-timeout` writes what it has computed, and loads it after a restart. It knows the
    named prefixes, and has recomputed and pinned what the store had lost of one."""
    prompt, content, rest = text(7, 350), text(3, 300), " and then what?"
    answer = pair.second.complete(prompt)["tokens"]
    pair.second.stop()
    with contextlib.closing(open_store([pair.store])) as store:
        mine = [e.name for e in store.scan(deadline=time.monotonic() + WITHIN) if e.pinned and e.depth >= 5]
        assert store.delete(mine, deadline=time.monotonic() + WITHIN) == 300 // BLOCK - 5
    left = pair.blocks(pinned=True)
    pair.second = ready(start(pair.model, pair.folder, 1, KEY, forked=False))
    again = pair.second.complete(prompt)
    assert (again["tokens"], again["cached"]) == (answer, 350 // BLOCK * BLOCK)
    wait_for(lambda: pair.blocks(pinned=True) - left == 300 // BLOCK - 5)
    used = pair.second.complete(rest, prefix="manual")
    assert used["tokens"] == pair.reference(content + rest) and used["cached"] == 300 // BLOCK * BLOCK


def test_forget(pair: Pair) -> None:
    """`foreword inspect` lists the prefixes of vLLM servers; after `foreword forget` no server knows the prefix."""
    shown = json.loads(foreword("inspect", "--json", pair.store).stdout)
    assert {prefix["name"]: prefix["tokens"] for prefix in shown["prefixes"]}["manual"] == 300
    receipt = json.loads(foreword("forget", "--prefix", "manual", pair.store).stdout)
    assert (receipt["left"], len(receipt["records"])) == (0, 1) and receipt["blocks"] >= 300 // BLOCK
    for server in (pair.first, pair.second):
        wait_for(lambda server=server: server.ask("GET", "/v1/prefixes/manual").status_code == 404)  # type: ignore[misc]


def test_weights_version(pair: Pair) -> None:
    """Servers with the same weights version share blocks; under another version they are not found; when the version returns
    they are. The API key is needed."""
    path, prompt = "/v1/foreword/weights_version", text(9, 330)
    full = 330 // BLOCK * BLOCK
    assert pair.second.ask("POST", path, {"version": "one"}, key="another key").status_code == 401
    for server in (pair.first, pair.second):
        answer = server.ask("POST", path, {"version": "one"})
        assert (answer.status_code, answer.json()) == (200, {"version": "one"})
    was = pair.blocks()
    first = pair.first.complete(prompt)
    wait_for(lambda: pair.blocks() - was >= 330 // BLOCK)
    for version, cached in (("one", full), ("two", 0), ("one", full)):
        assert pair.second.ask("POST", path, {"version": version}).status_code == 200
        found = pair.second.complete(prompt)
        assert (found["tokens"], found["cached"]) == (first["tokens"], cached)
    assert pair.second.ask("POST", path, {"versoin": "one"}).status_code == 400
