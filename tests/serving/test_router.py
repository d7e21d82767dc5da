"""The router in front of two real servers that publish KV events, each in its own process."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import http_client
import httpx
import pytest
from router_parts import RouterProcess
from server_process import ControlledProcess, running, slow
from shared_server import abandoned_request, until, words

pytestmark = pytest.mark.timeout(300)
ADMIN = {"authorization": "Bearer admin-secret"}


@pytest.fixture(scope="module")
def servers() -> Iterator[list[ControlledProcess]]:
    flags = ["--kv-events", "tcp://127.0.0.1:0", "--dtype", "float32", "--max-num-seqs", "8"]
    with running(*flags) as started:
        yield started


def replicas(servers: list[ControlledProcess]) -> list[str]:
    return [argument for process in servers for argument in ("--replica", process.url())]


@pytest.fixture(scope="module")
def router(servers: list[ControlledProcess]) -> Iterator[RouterProcess]:
    process = RouterProcess(*replicas(servers), "--admin-key", "admin-secret").wait_for(2)
    yield process
    process.kill()


def ask(router: RouterProcess, prompt: str, headers: dict[str, str] | None = None, **more: Any) -> tuple[str, int]:
    """Returns the replica that served the request, and its cached tokens."""
    body = {"prompt": prompt, "max_tokens": 2, "temperature": 0, **more}
    answer = http_client.post(f"{router.url}/v1/completions", json=body, headers=headers).raise_for_status()
    where = answer.headers["x-foreword-route"].partition(": ")[0]
    return where, answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def state(router: RouterProcess) -> dict[str, dict[str, Any]]:
    listed = http_client.get(f"{router.url}/v1/router/replicas", headers=ADMIN).json()["data"]
    return {one["replica"]: one for one in listed}


def known_blocks(router: RouterProcess) -> int:
    """Blocks that the router knows from the servers' events."""
    return sum(one["known_blocks"] for one in state(router).values())


def test_requests_follow_their_prefix(router: RouterProcess, servers: list[ControlledProcess]) -> None:
    """Prompts with a shared prefix go to the replica that holds it and hit its cache; the header gives the reason."""
    names = [f"foreword:router_{kind}_cached_tokens_total" for kind in ("expected", "actual")]
    before = [router.metric(name) for name in names]
    for topic in ("north", "south", "east", "west"):
        shared = words(topic, 80)
        known = known_blocks(router)
        where, cached = ask(router, shared + " first")
        assert cached < 16
        until(lambda known=known: known_blocks(router) > known)  # type: ignore[misc]
        for ending in ("second", "third"):
            again, cached = ask(router, f"{shared} {ending}")
            assert again == where and cached > 100
    expected, actual = (router.metric(name) - known for name, known in zip(names, before, strict=True))
    assert expected > 800 and abs(expected - actual) < actual * 0.1


def knows(router: RouterProcess, url: str, blocks: int) -> bool:
    return bool(state(router)[url]["known_blocks"] > blocks)


def test_blocks_computed_for_other_clients_are_known(router: RouterProcess, servers: list[ControlledProcess]) -> None:
    """A prompt that a server computed for another client is known to the router from the server's events."""
    for process in servers:
        prompt = words(f"elsewhere{process.url()[-3:]}", 90)
        before = state(router)[process.url()]["known_blocks"]
        body = {"prompt": prompt, "max_tokens": 1}
        http_client.post(f"{process.url()}/v1/completions", json=body).raise_for_status()
        url = process.url()
        until(partial(knows, router, url, before + 10))
        where, cached = ask(router, prompt)
        assert where == url and cached > 100


def test_cleared_blocks_are_known(router: RouterProcess, servers: list[ControlledProcess]) -> None:
    """When a server clears its cache, the router's directory follows."""
    url = servers[0].url()
    body = {"prompt": words("forgotten", 90), "max_tokens": 1}
    http_client.post(f"{url}/v1/completions", json=body).raise_for_status()
    until(lambda: state(router)[url]["known_blocks"] > 0)
    http_client.delete(f"{url}/v1/cache").raise_for_status()
    until(lambda: state(router)[url]["known_blocks"] == 0)


def test_a_late_router_catches_up_by_replay(router: RouterProcess, servers: list[ControlledProcess]) -> None:
    """A second router learns from the replay what the servers hold."""
    prompt, known = words("late", 90), known_blocks(router)
    where, _ = ask(router, prompt)
    until(lambda: known_blocks(router) > known + 10)
    late = RouterProcess(*replicas(servers), "--admin-key", "admin-secret").wait_for(2)
    try:
        until(lambda: known_blocks(late) >= known_blocks(router))
        again, cached = ask(late, prompt)
        assert again == where and cached > 100
    finally:
        late.kill()


def test_erasure_on_all_replicas(router: RouterProcess, servers: list[ControlledProcess]) -> None:
    """The receipt has one of each replica, and names those that were not reached. A `cache_salt` erases only its requests,
    and a client cannot clear the cache of other tenants."""
    prompt, salted = words("erased", 90), {"cache_salt": "session 1"}
    for more in ({}, salted):
        assert ask(router, prompt, **more)[1] < 16, "no more than a first character of another test's prompt"
    partial_router = RouterProcess(*replicas(servers), "--replica", "http://127.0.0.1:9").wait_for(2)
    try:
        receipt = http_client.delete(f"{partial_router.url}/v1/cache?cache_salt=session%201").raise_for_status().json()
        assert set(receipt["replicas"]) == {one.url() for one in servers} and receipt["device_blocks"] > 0
        assert list(receipt["unreachable"]) == ["http://127.0.0.1:9"] and receipt["complete"] is False
        assert http_client.delete(f"{partial_router.url}/v1/cache?scope=device").status_code == 400
    finally:
        partial_router.kill()
    assert ask(router, prompt)[1] > 100 and ask(router, prompt, **salted)[1] == 0
    receipt = http_client.delete(f"{router.url}/v1/cache", headers=ADMIN).raise_for_status().json()
    assert receipt["complete"] is True and receipt["unreachable"] == {}
    assert ask(router, prompt)[1] < 16


@pytest.mark.parametrize("how", ["prompt_cache_key", "user", "x-session-id"])
def test_sessions_stay_on_one_replica(router: RouterProcess, how: str) -> None:
    """Requests of one session go to one replica, whatever their prompts are."""
    for session in range(6):
        name = f"{how}-{session}"
        named: dict[str, Any] = {"headers": {how: name}} if how == "x-session-id" else {how: name}
        asked = [ask(router, words(f"{name}-{turn}", 3), **named)[0] for turn in range(4)]
        assert len(set(asked)) == 1


def test_conversations_stay_on_one_replica(router: RouterProcess) -> None:
    """A conversation without a session name stays on its replica and hits its cache."""
    client = router.openai()
    messages: list[Any] = [{"role": "user", "content": words("conversation", 60)}]
    seen = []
    for turn in range(4):
        raw = client.chat.completions.with_raw_response.create(
            model="stdlib-nano", messages=messages, max_tokens=8, temperature=0
        )
        answer = raw.parse()
        seen.append(raw.headers["x-foreword-route"].partition(": ")[0])
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        assert turn == 0 or (answer.usage.prompt_tokens_details.cached_tokens or 0) > 100
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        messages.append({"role": "user", "content": f"And then, {turn}?"})
    assert len(set(seen)) == 1


def test_decisions_are_explained(router: RouterProcess) -> None:
    """The last decisions are listed with estimates and reasons, newest first; only the operator may read them."""
    ask(router, words("explained", 40), headers={"x-request-id": "why-not"})
    last = http_client.get(f"{router.url}/v1/router/decisions?last=2", headers=ADMIN).json()["data"]
    assert len(last) == 2 and last[0]["request_id"] == "why-not" and last[0]["tokens_from"] == "replica"
    assert len(last[0]["prices"]) == 2 and "computing" in last[0]["in_words"]
    assert http_client.get(f"{router.url}/v1/router/decisions").status_code == 401


def test_models_and_other_paths(router: RouterProcess) -> None:
    """Models are listed once, unknown models are refused with a hint, and so are paths that are not in the
    router's table."""
    with router.http() as client:
        assert [card["id"] for card in client.get("/v1/models").json()["data"]] == ["stdlib-nano"]
        assert client.get("/v1/models/stdlib-nano").json()["max_model_len"] > 0
        wrong = client.post("/v1/completions", json={"model": "stdlib-nan", "prompt": "x"})
        assert wrong.status_code == 404 and "stdlib-nano" in wrong.json()["error"]["message"]
        tokens = client.post("/v1/tokenize", json={"prompt": "hello"}).json()["tokens"]
        assert client.post("/v1/detokenize", json={"tokens": tokens}).json()["prompt"].strip() == "hello"
        unknown = client.get("/v1/nothing")
        assert unknown.status_code == 404 and unknown.json()["error"]["message"]
        missing = client.get("/elsewhere").json()["error"]["message"]
        assert missing.startswith("There is no route '/elsewhere'; the main paths are /v1/chat/completions")
        broken = client.post("/v1/completions", content=b"{", headers={"content-type": "application/json"})
        assert broken.status_code == 400 and "JSON" in broken.json()["error"]["message"]


def test_named_prefixes_are_registered_on_all_replicas(router: RouterProcess, servers: list[ControlledProcess]) -> None:
    """A named prefix that is registered through the router can be used on any replica."""
    with router.http() as client:
        made = client.post("/v1/prefixes", json={"name": "shared", "content": words("named", 30)})
        assert made.status_code == 201 and made.headers["x-foreword-replicas"] == "2 of 2"
        for process in servers:
            listed = http_client.get(f"{process.url()}/v1/prefixes").json()["data"]
            assert [one["name"] for one in listed] == ["shared"]
        assert ask(router, " and more", prefix="shared")[1] > 40
        assert client.delete("/v1/prefixes/shared").status_code == 200
        assert client.get("/v1/prefixes").json()["data"] == []


def test_cache_control_reaches_all_replicas(router: RouterProcess, servers: list[ControlledProcess]) -> None:
    """A retention through the router is kept on every replica, and released there."""
    body = {"prompt": words("kept", 30), "ttl": "1h"}
    with router.http() as client:
        kept = client.post("/v1/cache/retain", json=body)
        assert (kept.json()["status"], kept.headers["x-foreword-replicas"]) == ("accepted", "2 of 2")
        for process in servers:
            [one] = http_client.get(f"{process.url()}/v1/cache/retained").json()["data"]
            assert one["tokens"] == kept.json()["tokens"]
        [one] = client.get("/v1/cache/retained").json()["data"]
        assert sorted(one["replicas"]) == sorted(process.url() for process in servers)
        assert len(client.post("/v1/cache/release", json=body).json()["released"]) == 1
        for process in servers:
            assert http_client.get(f"{process.url()}/v1/cache/retained").json()["data"] == []


def test_sessions_live_on_all_replicas(router: RouterProcess, servers: list[ControlledProcess]) -> None:
    """A session is open on every replica, requests bring its name there, and its end frees its blocks where it was served."""
    text = words("a session behind a router", 60)

    def tell(client: httpx.Client, **body: str) -> httpx.Response:
        return client.post("/v1/sessions", json=body)

    with router.http() as client:
        opened = tell(client, action="open", session_id="routed")
        assert (opened.status_code, opened.headers["x-foreword-replicas"]) == (200, "2 of 2")
        forked = tell(client, action="fork", session_id="forked", parent_session_id="routed")
        assert forked.headers["x-foreword-replicas"] == "2 of 2"
        body = {"prompt": text, "max_tokens": 1}
        client.post("/v1/completions", json=body, headers={"x-session-id": "routed"}).raise_for_status()
        listed = {one["id"]: one for one in client.get("/v1/sessions").json()["data"]}
        assert listed.keys() == {"routed", "forked"} and len(listed["routed"]["replicas"]) == 2
        counts = [
            one["requests"]
            for process in servers
            for one in http_client.get(f"{process.url()}/v1/sessions").json()["data"]
        ]
        assert sorted(counts) == [0, 0, 0, 1]
        assert tell(client, action="end", session_id="forked").json()["freed_blocks"]["device"] == 0
        ended = tell(client, action="end", session_id="routed")
        assert ended.json()["freed_blocks"]["device"] > 8
        assert tell(client, action="end", session_id="routed").status_code == 404
        assert tell(client, action="stop", session_id="routed").status_code == 400
        again = client.post("/v1/completions", json=body).raise_for_status().json()
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] < 16


def test_cache_control_goes_where_the_prefix_is(router: RouterProcess, servers: list[ControlledProcess]) -> None:
    """A prefix that one replica has is kept on that replica only, and so is a session's; each replica's answer is shown."""
    text = words("placed", 60)
    messages = [{"role": "user", "content": words("conversation", 40)}]
    with router.http() as client:
        served = client.post("/v1/completions", json={"prompt": text, "max_tokens": 1})
        assert served.status_code == 200
        kept = client.post("/v1/cache/retain", json={"prompt": text, "ttl": "1h"})
        assert kept.headers["x-foreword-replicas"] == "1 of 1"
        [replica] = kept.json()["replicas"]
        assert replica["why"].startswith("holds ") and replica["tokens"] == kept.json()["tokens"] > 0
        assert replica["replica"] in served.headers["x-foreword-route"]
        held = {
            process.url(): http_client.get(f"{process.url()}/v1/cache/retained").json()["data"] for process in servers
        }
        assert {url: len(found) for url, found in held.items()} == {
            process.url(): int(process.url() == replica["replica"]) for process in servers
        }
        [listed] = client.get("/v1/cache/retained").json()["data"]
        assert listed["replicas"] == [replica["replica"]]
        chat = {"messages": messages, "max_tokens": 1}
        assert client.post("/v1/chat/completions", json=chat, headers={"x-session-id": "s"}).status_code == 200
        more = {"messages": [*messages, {"role": "assistant", "content": words("tool", 50)}]}
        fetched = client.post("/v1/cache/prefetch", json=more, headers={"x-session-id": "s"}).json()
        assert len(fetched["replicas"]) == 1
        assert len(client.post("/v1/cache/prefetch", json={"prompt": words("unknown", 9)}).json()["replicas"]) == 2
        released = client.post("/v1/cache/release", json={"all": True}, headers=ADMIN)
        assert released.headers["x-foreword-replicas"] == "2 of 2" and len(released.json()["released"]) == 2
        assert client.get("/v1/cache/retained").json()["data"] == []


def test_lost_prefixes_are_registered_again(router: RouterProcess, servers: list[ControlledProcess]) -> None:
    """A replica that has lost a named prefix gets it again, before or when it is asked for; no client notices."""
    with router.http() as client:
        client.post("/v1/prefixes", json={"name": "lost", "content": words("lost", 30)}).raise_for_status()
        for process in servers:
            http_client.request("DELETE", f"{process.url()}/v1/prefixes/lost").raise_for_status()
        for number in range(6):
            ask(router, words(f"lost{number}", 20), prefix="lost")
        late = RouterProcess("--replica", servers[0].url(), "--admin-key", "admin-secret").wait_for(1)
        try:
            late_content = {"content": words("late", 30)}
            http_client.request("PUT", f"{late.url}/v1/prefixes/late", json=late_content).raise_for_status()
            added = {"replica": servers[1].url()}
            http_client.post(f"{late.url}/v1/router/replicas", json=added, headers=ADMIN).raise_for_status()
            late.wait_for(2)
            found = http_client.get(f"{servers[1].url()}/v1/prefixes/late").json()
            assert found["content"] == late_content["content"]
        finally:
            late.kill()
        for name in ("lost", "late"):
            client.delete(f"/v1/prefixes/{name}").raise_for_status()


def test_drain_and_undrain(router: RouterProcess, servers: list[ControlledProcess]) -> None:
    """A drained replica gets no new requests, also not those of its sessions, until it is undrained."""
    where, _ = ask(router, "x", user="drained")
    body = {"replica": where}
    assert http_client.post(f"{router.url}/v1/router/drain", json=body).status_code == 401
    said = http_client.post(f"{router.url}/v1/router/drain", json=body, headers=ADMIN).json()
    assert said["reason"] == "draining" and not said["takes_requests"]
    others = {ask(router, words(f"drained{number}", 20), user="drained")[0] for number in range(4)}
    assert len(others) == 1 and where not in others
    assert http_client.post(f"{router.url}/v1/router/undrain", json=body, headers=ADMIN).json()["takes_requests"]
    unknown = http_client.post(f"{router.url}/v1/router/drain", json={"replica": "http://x:1"}, headers=ADMIN)
    assert unknown.status_code == 404


def test_replicas_added_and_removed_by_api(servers: list[ControlledProcess]) -> None:
    """Replicas are added and removed by the API; without a replica requests get 503 with Retry-After."""
    router = RouterProcess("--admin-key", "admin-secret")
    try:
        refused = http_client.post(f"{router.url}/v1/completions", json={"prompt": "x"})
        assert refused.status_code == 503 and refused.headers["retry-after"]
        # A client that lists models once would keep an empty list.
        for path in ("/v1/models", "/v1/models/stdlib-nano"):
            listed = http_client.get(router.url + path)
            assert listed.status_code == 503 and listed.headers["retry-after"]
            assert "there is no replica" in listed.json()["error"]["message"]
        for process in servers:
            made = http_client.post(f"{router.url}/v1/router/replicas", json={"replica": process.url()}, headers=ADMIN)
            assert made.status_code == 201
        twice = http_client.post(f"{router.url}/v1/router/replicas", json={"replica": servers[0].url()}, headers=ADMIN)
        assert twice.status_code == 400
        router.wait_for(2)
        gone = {"replica": servers[0].url()}
        http_client.request("DELETE", f"{router.url}/v1/router/replicas", json=gone, headers=ADMIN).raise_for_status()
        assert {ask(router, words(f"gone{number}", 20))[0] for number in range(4)} == {servers[1].url()}
    finally:
        router.kill()


@pytest.mark.slow
def test_replicas_from_a_file(servers: list[ControlledProcess], tmp_path: Path) -> None:
    """Replicas follow a watched file; a broken file changes nothing, and is counted."""
    path = tmp_path / "replicas"
    path.write_text(f"# all of them\n{servers[0].url()}  # the first\n")
    router = RouterProcess("--replica-file", str(path), "--admin-key", "admin-secret").wait_for(1)
    try:
        assert set(state(router)) == {servers[0].url()}
        path.write_text("no URL at all\n")
        until(lambda: "is unchanged" in router.text)
        assert set(state(router)) == {servers[0].url()}
        until(lambda: router.metric("foreword:router_watch_failures_total", watched="replica file") > 0)
        path.write_text(f"{servers[1].url()} max_waiting=7\n")
        until(lambda: set(state(router)) == {servers[1].url()})
        until(lambda: state(router)[servers[1].url()]["takes_requests"])
        assert ask(router, "x")[0] == servers[1].url()
    finally:
        router.kill()


def test_replicas_from_dns(servers: list[ControlledProcess]) -> None:
    """Every address of a DNS name is a replica."""
    port = servers[0].url().rpartition(":")[2]
    router = RouterProcess("--replica-dns", f"http://localhost:{port}", "--admin-key", "admin-secret").wait_for(1)
    try:
        assert state(router)[f"http://127.0.0.1:{port}"]["source"].startswith("dns")
        assert ask(router, "x")[0] == f"http://127.0.0.1:{port}"
    finally:
        router.kill()


@pytest.mark.slow
def test_a_local_tokenizer(servers: list[ControlledProcess], router: RouterProcess) -> None:
    """The router makes the same tokens as the replicas with `--tokenizer`, including the chat template."""
    from foreword.engine.model import embedded_model

    local = RouterProcess(
        *replicas(servers), "--tokenizer", str(embedded_model()), "--admin-key", "admin-secret"
    ).wait_for(2)
    try:
        until(lambda: known_blocks(local) >= known_blocks(router))
        known = known_blocks(local)
        message = {"role": "user", "content": words("local", 60)}
        body = {"messages": [message], "max_tokens": 1}
        first = http_client.post(f"{router.url}/v1/chat/completions", json=body)
        until(lambda: known_blocks(local) > known + 5)
        second = http_client.post(f"{local.url}/v1/chat/completions", json=body)
        routes = [answer.headers["x-foreword-route"].partition(": ")[0] for answer in (first, second)]
        assert routes[0] == routes[1]
        assert second.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 100
        last = http_client.get(f"{local.url}/v1/router/decisions?last=1", headers=ADMIN).json()["data"][0]
        assert last["tokens_from"] == "tokenizer" and last["prompt_tokens"] == second.json()["usage"]["prompt_tokens"]
    finally:
        local.kill()


def test_router_drains_on_sigterm(servers: list[ControlledProcess]) -> None:
    """After SIGTERM active streams finish, new requests are refused, and the exit status is 0."""
    router = RouterProcess(*replicas(servers)).wait_for(2)
    body = {"prompt": "x", "stream": True, "max_tokens": 400, "ignore_eos": True}
    with slow(*servers) as fast, http_client.stream("POST", f"{router.url}/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        router.popen.send_signal(signal.SIGTERM)
        until(lambda: "shutting down" in router.text)
        assert http_client.get(f"{router.url}/ready").status_code == 503
        refused = http_client.post(f"{router.url}/v1/completions", json={"prompt": "x"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        fast()
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert router.end() == 0 and "Traceback" not in router.text


def test_client_disconnects_stop_the_replica(router: RouterProcess, servers: list[ControlledProcess]) -> None:
    """When a client disconnects, streaming or not, the replica stops computing its request."""

    def running() -> float:
        texts = [http_client.get(f"{process.url()}/metrics").text.splitlines() for process in servers]
        found = [line for text in texts for line in text if line.startswith("vllm:num_requests_running{")]
        return sum(float(line.rsplit(" ", 1)[1]) for line in found)

    body = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True}
    with slow(*servers):
        with http_client.stream("POST", f"{router.url}/v1/completions", json={**body, "stream": True}) as answer:
            lines = answer.iter_lines()
            next(lines)
            until(lambda: running() == 1)
        until(lambda: running() == 0)
        with abandoned_request(router.url, body):
            until(lambda: running() == 1)
        until(lambda: running() == 0)
    until(lambda: all(one["in_flight"] == 0 for one in state(router).values()))


def test_no_secrets_in_the_log(router: RouterProcess) -> None:
    """Neither keys nor prompts are logged."""
    ask(router, "a-very-private-prompt", headers={"authorization": "Bearer a-private-key"})
    assert "private" not in router.text and "admin-secret" not in router.text


@pytest.mark.slow
def test_failover_of_streams_after_sigkill(servers: list[ControlledProcess], router: RouterProcess) -> None:
    """A replica is killed under a dozen streams: every client gets the same complete output as without the
    failure."""
    prompts = [words(f"killed{number}", 12) for number in range(12)]
    body = {"max_tokens": 200, "temperature": 0, "ignore_eos": True}
    killed = servers[0].url()
    found: dict[str, str] = {}
    errors: list[str] = []
    begun = threading.Semaphore(0)

    def stream(prompt: str) -> None:
        asked = {**body, "prompt": prompt, "stream": True, "prompt_cache_key": prompt}
        text = ""
        with http_client.stream("POST", f"{router.url}/v1/completions", json=asked, timeout=120) as answer:
            for number, line in enumerate(line for line in answer.iter_lines() if line.startswith("data: {")):
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    errors.append(chunk["error"]["message"])
                    return
                text += chunk["choices"][0]["text"]
                if number == 4 and answer.headers["x-foreword-route"].startswith(f"{killed}: "):
                    begun.release()
        found[prompt] = text

    threads = [threading.Thread(target=stream, args=(prompt,)) for prompt in prompts]
    with slow(servers[0]):
        for thread in threads:
            thread.start()
        for _ in range(2):
            assert begun.acquire(timeout=60)
        servers[0].popen.kill()
    for thread in threads:
        thread.join(120)
    # Asked only now: before, the prompts would have been drawn to the server that has computed them.
    whole = {}
    for prompt in prompts:
        answer = http_client.post(f"{servers[1].url()}/v1/completions", json={**body, "prompt": prompt})
        whole[prompt] = answer.json()["choices"][0]["text"]
    assert errors == [] and found == whole
    assert router.metric("foreword:router_continuations_total", outcome="continued") >= 1
