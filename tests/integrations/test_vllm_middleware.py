"""The middleware for vLLM's API server before hostile clients, a vLLM and stores that fail: what raises for one request ends
that request, and what is kept has limits."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
import uvicorn
from counted_process import entries
from fake_vllm import FakeVllm, routes_before, served
from vllm_stub import stubbed_vllm

from foreword.api.front_contract import Asked, FrontContract, RunningFront
from foreword.api.http import bind
from foreword.conformance import make_frames, names_of, put_all, soon
from foreword.prefixes.book import TENANT_PREFIXES
from foreword.process_config import ServerConfig
from foreword.store.disk.disk_store import DiskStore
from foreword.store.memory.memory_store import MemoryStore
from foreword.store.tiered import TieredStore

RULES = "be brief"
CHAT = [{"role": "system", "content": "x"}]
SEEDS = 250
FULL = 900


@pytest.fixture(scope="module")
def vllm() -> Iterator[Callable[[str], Any]]:
    """Imports a module of the connector."""
    with stubbed_vllm():
        yield lambda name: importlib.import_module(f"foreword.integrations.{name}")


PREFIX_BODIES = {
    path: body
    for start in ("/v1", "/v1/public")
    for path, body in (
        (f"{start}/prefixes", {"name": "rules", "content": RULES, "replace": True}),
        (f"{start}/prefixes/{{name}}", {"content": RULES}),
    )
}


class TestMiddleware(FrontContract):
    """The middleware in a server on a port, before a fake vLLM, which checks keys and counts requests itself."""

    @pytest.fixture
    def front(self, vllm: Callable[[str], Any]) -> Iterator[RunningFront]:
        made: Future[Any] = Future()
        listener = bind(ServerConfig(port=0))

        async def serve() -> None:
            fake = FakeVllm()
            fake.sessions = set()
            routes, prefixes = routes_before(vllm, fake)
            server = uvicorn.Server(uvicorn.Config(routes, log_config=None, lifespan="off"))
            made.set_result((server, routes._routes))
            await server.serve([listener])
            await prefixes.close()

        thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
        thread.start()
        server, table = made.result(60)
        with httpx.Client(base_url="http://{}:{}".format(*listener.getsockname()[:2]), timeout=60) as client:

            def send(method: str, path: str, headers: Mapping[str, str], body: bytes) -> Asked:
                answer = client.request(method, path, headers=dict(headers), content=body)
                return Asked(answer.status_code, answer.headers, answer.content)

            yield RunningFront(table, send, {**PREFIX_BODIES, "/v1/cache/prefetch": {"prompt": "abcd"}})
        server.should_exit = True
        thread.join(60)


async def register(client: httpx.AsyncClient) -> None:
    for body in ({"name": "rules", "content": RULES}, {"name": "chat", "messages": CHAT}):
        assert (await client.post("/v1/prefixes", json=body)).status_code == 201


def tokens(text: str) -> list[int]:
    return [ord(character) for character in text]


ODD = (
    "18446744073709551617",
    "9" * 5000,
    '"\\ud800"',
    "NaN",
    "[[[[1.50]]]]",
    '"\\u0000"',
    "-0.0",
    "1e400",
    "[" * 5000 + "]" * 5000,
)


def odd_body(draw: Random, fields: Mapping[str, Any]) -> bytes:
    """JSON with values that not every reader takes, in one of the encodings that vLLM reads, and the fields among them."""
    parts = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in fields.items()]
    parts += [f'"f{number}": {draw.choice(ODD)}' for number in range(draw.randint(0, 2))]
    draw.shuffle(parts)
    text = draw.choice(("{%s}", " {%s} \n")) % draw.choice((", ", ",")).join(parts)
    if draw.random() < 0.3:
        text = text.replace('"prefix"', '"pre\\u0066ix"')
    if draw.random() < 0.1:
        text = text[: draw.randrange(len(text))]
    return text.encode(draw.choice(("utf-8", "utf-8", "utf-8-sig", "utf-16", "utf-32-le")))


def read(data: bytes) -> Any:
    """A body as vLLM reads it; None if it does not."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def equal(one: Any, other: Any) -> bool:
    """NaN is equal to itself here."""
    return repr(one) == repr(other)


def test_odd_bodies(vllm: Callable[[str], Any]) -> None:
    """Whatever JSON a client sends, vLLM gets every byte of it, or what differs by the session or the prefix alone; or the
    client is told why not. A prefix that a body names is never left out."""

    async def check(client: httpx.AsyncClient, fake: FakeVllm, storage: Any) -> None:
        await register(client)
        with_prefix = 0
        for seed in range(SEEDS):
            draw = Random(seed)
            path = draw.choice(("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"))
            names = path in ("/v1/completions", "/v1/chat/completions")
            fields: dict[str, Any] = {"prompt": "a", "messages": [{"role": "user", "content": "?"}]}
            fields |= draw.choice(({}, {"user": "me"}, {"metadata": {"user_id": "me"}}, {"user": 7}))
            fields |= draw.choice(
                ({}, {"kv_transfer_params": {"x": 1}}, {"kv_transfer_params": [1]}, {"kv_transfer_params": None})
            )
            prefix = "rules" if path == "/v1/completions" else "chat"
            fields |= draw.choice(({}, {"prefix": prefix}, {"prefix": None}, {"prefix": 3}))
            fields = fields if draw.random() < 0.9 else {}
            body = odd_body(draw, fields)
            session = draw.choice(({}, {"x-session-id": "task"}))
            fake.raw.clear()
            answer = await client.post(path, content=body, headers={"content-type": "application/json", **session})
            given, got = read(body), read(fake.raw[0]) if fake.raw else None
            assert answer.status_code in (200, 400, 404), (seed, answer)
            if not fake.raw:
                assert answer.status_code == 404 or answer.json()["error"]["message"], seed
                assert given is None or not names or "prefix" in given or path in ("/v1/responses", "/v1/messages")
                continue
            if given is None:
                assert answer.status_code == 400, seed
                continue
            told = got.pop("kv_transfer_params", None)
            was = given.pop("kv_transfer_params", None)
            assert (
                told == was
                or {**(was or {}), "foreword_session": {"session_id": told["foreword_session"]["session_id"]}} == told
            )
            named = given.get("prefix") if names else None
            if named is not None:
                with_prefix += 1
                del given["prefix"]
                before = tokens(RULES) if prefix == "rules" else CHAT
                field = "prompt" if prefix == "rules" else "messages"
                expected = before + (tokens("a") if prefix == "rules" else given[field])
                assert got[field] == expected, seed
                del got[field], given[field]
            assert equal(got, given), (seed, got, given)
        assert with_prefix > SEEDS / 30, "too few of them name a prefix"

    served(vllm, check)


def test_a_prefix_of_many_prompts(vllm: Callable[[str], Any]) -> None:
    """A prefix comes once for each prompt of a body: a small body that would become a huge one is refused before anything is
    tokenized."""

    async def check(client: httpx.AsyncClient, fake: FakeVllm, storage: Any) -> None:
        assert (await client.put("/v1/prefixes/long", json={"content": "x" * 30_000})).status_code == 201
        asked, sent = fake.tokenized, len(fake.raw)
        for prompts in (["a"] * 2000, [[1]] * 2000, [[1]] * 100_000, [[]] * 2000, ["a"] * 3000):
            answer = await client.post("/v1/completions", json={"prompt": prompts, "prefix": "long"})
            assert answer.status_code == 400 and "more" in answer.json()["error"]["message"]
        assert (fake.tokenized, len(fake.raw)) == (asked, sent)
        few = await client.post("/v1/completions", json={"prompt": ["a", [7], []], "prefix": "long"})
        assert few.status_code == 200
        assert [one[30_000:] for one in fake.bodies[-1]["prompt"]] == [tokens("a"), [7], []]

    served(vllm, check)


def piece(body: bytes, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


def scope_of(path: str, *headers: tuple[bytes, bytes]) -> dict[str, Any]:
    return {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": list(headers),
    }


def test_bodies_are_limited(vllm: Callable[[str], Any]) -> None:
    """A body that is too large, too slow, or too much beside the others is refused, and nothing of it is kept; nor of that of a
    client that leaves, or of one that vLLM has."""

    async def main() -> None:
        fake = FakeVllm()
        routes, prefixes = routes_before(vllm, fake)
        bodies = routes._front.bodies
        bodies.seconds, bodies.total = 0.01, 1 << 20
        large = routes._front.limits().body_bytes

        async def ask(messages: AsyncIterator[dict[str, Any]], *headers: tuple[bytes, bytes]) -> int | None:
            sent: list[Any] = []

            async def send(message: Any) -> None:
                sent.append(message)

            await routes(scope_of("/v1/completions", *headers), lambda: anext(messages), send)
            assert bodies.used == 0
            return sent[0]["status"] if sent else None

        async def these(*messages: dict[str, Any], waits: bool = False) -> AsyncIterator[dict[str, Any]]:
            for one in messages:
                yield one
            if waits:
                await asyncio.Event().wait()
            yield {"type": "http.disconnect"}

        whole = b'{"prompt": "a"}'
        assert await ask(these(piece(whole[:5]), piece(whole[5:], more=False))) == 200
        assert fake.raw == [whole]
        assert await ask(these(), (b"content-length", b"%d" % (large + 1))) == 413
        assert await ask(these(*[piece(bytes(large // 2))] * 3)) in (413, 429)
        assert await ask(these(piece(whole[:5]), waits=True)) == 408
        assert await ask(these(piece(whole[:5]))) is None
        bodies.total = bodies.used = 0
        held = bodies.hold()
        held.add(bytes(large), large)
        before = bodies.used

        async def beside() -> None:
            sent: list[Any] = []

            async def send(message: Any) -> None:
                sent.append(message)

            more = these(piece(whole, more=False))
            await routes(scope_of("/v1/completions"), lambda: anext(more), send)
            assert sent[0]["status"] == 429 and bodies.used == before

        await beside()
        assert fake.raw == [whole]
        await prefixes.close()

    asyncio.run(main())


@pytest.mark.extended
def test_names_are_limited(vllm: Callable[[str], Any]) -> None:
    """A prefix that is shorter than a block takes nothing of the stores' budget; the number of names has a limit nevertheless,
    and so has what they contain. vLLM is not asked for one that is too many. A version of a known name is not."""

    async def check(client: httpx.AsyncClient, fake: FakeVllm, storage: Any) -> None:
        for number in range(TENANT_PREFIXES):
            assert (await client.put(f"/v1/prefixes/p{number}", json={"content": "be"})).status_code == 201
        asked = fake.tokenized, len(fake.raw)
        for send in (
            client.put("/v1/prefixes/more", json={"content": "be"}),
            client.post("/v1/prefixes", json={"name": "m", "content": "b"}),
        ):
            refused = await send
            assert refused.status_code == 409 and refused.json()["error"]["code"] == "prefix_budget_exceeded"
        assert (fake.tokenized, len(fake.raw)) == asked
        assert (await client.put("/v1/prefixes/p7", json={"content": "do"})).status_code == 200
        assert (await client.delete("/v1/prefixes/p7")).status_code == 200
        assert (await client.put("/v1/prefixes/more", json={"content": "be"})).status_code == 201
        assert len((await client.get("/v1/prefixes")).json()["data"]) == TENANT_PREFIXES

    served(vllm, check)


def test_contents_are_limited(vllm: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Contents and tokens of a tenant's prefixes have a limit in bytes, also of those that are registered at once."""
    monkeypatch.setattr("foreword.prefixes.book.TENANT_BYTES", 1 << 20)

    async def check(client: httpx.AsyncClient, fake: FakeVllm, storage: Any) -> None:
        text = {"content": "x" * 10_000}  # 370,000 bytes with its tokens, as Python keeps them
        puts = [client.put(f"/v1/prefixes/p{number}", json=text) for number in range(8)]
        assert sorted([one.status_code for one in await asyncio.gather(*puts)]) == [201] * 2 + [409] * 6
        asked = fake.tokenized
        assert (await client.put("/v1/prefixes/q", json={"content": "x" * 500_000})).status_code == 409
        assert fake.tokenized == asked and len(storage.pinned) == 2

    served(vllm, check)


def test_calls_at_a_time(vllm: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of each kind run up to the number that the middleware allows, also of clients that have left; more are refused, and
    all are allowed again when these have ended."""
    middleware = vllm("vllm_middleware.middleware")
    for name in ("_REGISTRATIONS", "_PREFETCHES", "_SESSION_CALLS", "_WEIGHT_CHANGES"):
        monkeypatch.setattr(middleware, name, 2)
    calls = (
        ("PUT", "/v1/prefixes/{}", {"content": "be"}),
        ("POST", "/v1/cache/prefetch", {"prompt": "abcd"}),
        ("POST", "/v1/sessions", {"action": "open", "session_id": "{}"}),
        ("POST", "/v1/foreword/weights_version", {"version": "v{}"}),
    )

    async def check(client: httpx.AsyncClient, fake: FakeVllm, storage: Any) -> None:
        fake.sessions = set()
        for method, path, body in calls:
            fake.gate.clear()

            def ask(name: str, method: str = method, path: str = path, body: dict[str, str] = body) -> Any:
                given = {key: value.format(name) for key, value in body.items()}
                return client.request(method, path.format(name), json=given)

            running = [asyncio.create_task(ask(f"n{number}")) for number in range(2)]
            while fake.waiting < (1 if "version" in body else 2):
                await asyncio.sleep(0)
            if "version" in body:  # the second one waits for the first
                await asyncio.sleep(0.05)
            refused = await ask("more")
            assert refused.status_code == 429 and int(refused.headers["retry-after"]) > 0, path
            fake.gate.set()
            assert all(one.status_code < 300 for one in await asyncio.gather(*running)), path
            assert (await ask("again")).status_code < 300, path

    served(vllm, check)


FAILS: tuple[tuple[str, str, tuple[str, str, Any]], ...] = (
    ("storage", "check_room", ("PUT", "/v1/prefixes/new", {"content": "be"})),
    ("storage", "put", ("PUT", "/v1/prefixes/new", {"content": "be"})),
    ("storage", "pin", ("PUT", "/v1/prefixes/new", {"content": "be"})),
    ("storage", "remove", ("DELETE", "/v1/prefixes/gone", None)),
    ("storage", "stored", ("POST", "/v1/cache/prefetch", {"prompt": "abcd"})),
    ("storage", "position", ("POST", "/v1/cache/prefetch", {"prompt": "abcd"})),
    ("vllm", "tokenize", ("PUT", "/v1/prefixes/new", {"content": "be"})),
    ("vllm", "tokenize", ("POST", "/v1/completions", {"prompt": "a", "prefix": "rules"})),
    ("vllm", "tokenize", ("POST", "/v1/cache/prefetch", {"messages": CHAT})),
    ("vllm", "complete", ("PUT", "/v1/prefixes/new", {"content": "be"})),
    ("vllm", "complete", ("POST", "/v1/sessions", {"action": "open", "session_id": "x"})),
    ("vllm", "complete", ("GET", "/v1/sessions", None)),
    ("vllm", "get_weight_version", ("GET", "/v1/foreword/weights_version", None)),
    ("prefixes", "encode", ("POST", "/v1/completions", {"prompt": "a", "prefix": "rules"})),
    ("prefixes", "refresh", ("POST", "/v1/chat/completions", {"messages": CHAT, "prefix": "chat"})),
    ("prefixes", "used", ("POST", "/v1/completions", {"prompt": "a", "prefix": "rules"})),
    ("prefixes", "list", ("GET", "/v1/prefixes", None)),
)


@pytest.mark.parametrize(("where", "name", "asked"), FAILS)
@pytest.mark.parametrize("error", [RuntimeError, KeyError, RecursionError, MemoryError])
def test_what_raises_ends_one_request(
    vllm: Callable[[str], Any], where: str, name: str, asked: tuple[str, str, Any], error: type[Exception]
) -> None:
    """A call that raises ends one request alone: it is answered with an error in JSON, another one that runs meanwhile is
    served, and so is the same request afterwards."""

    async def main() -> None:
        fake = FakeVllm()
        fake.sessions = set()
        routes, prefixes = routes_before(vllm, fake)
        owner = {"storage": prefixes._storage, "vllm": fake, "prefixes": prefixes}[where]
        method, path, body = asked
        transport = httpx.ASGITransport(routes, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://vllm") as client:
            await register(client)
            await client.put("/v1/prefixes/gone", json={"content": "go"})
            fake.gate.clear()
            beside = asyncio.create_task(client.post("/v1/cache/prefetch", json={"prompt": "abcd"}))
            while not fake.waiting:
                await asyncio.sleep(0)
            with pytest.MonkeyPatch.context() as patch:

                def fails(*_: Any, **__: Any) -> Any:
                    raise error("a bug")

                patch.setattr(owner, name, fails)
                held = fake.pass_by()
                answer = await client.request(method, path, json=body)
                if name == "used":  # its answer was there
                    assert answer.status_code == 200
                else:
                    assert answer.status_code >= 500 and answer.json()["error"]["message"], answer
            held.set()
            assert (await beside).json()["status"] == "accepted"
            assert (await client.request(method, path, json=body)).status_code < 300
        await prefixes.close()

    asyncio.run(main())


def mixed(draw: Random) -> tuple[str, str, Any]:
    """A request with names that no other has."""
    name, known = f"n{draw.getrandbits(40):x}", f"p{draw.randrange(120)}"
    text = " ".join(f"{draw.getrandbits(24):x}" for _ in range(draw.randint(1, 5)))
    return draw.choice(
        (
            ("PUT", f"/v1/prefixes/{known}", {"content": text}),
            ("PUT", f"/v1/prefixes/{name}", {"content": text}),
            ("PUT", f"/v1/prefixes/{draw.choice((known, name))}", {"messages": [{"role": "user", "content": text}]}),
            *[("DELETE", f"/v1/prefixes/{known}", None)] * 4,
            ("DELETE", f"/v1/prefixes/{name}", None),
            ("POST", "/v1/cache/prefetch", {"prompt": text, "cache_salt": draw.choice((None, name))}),
            ("POST", "/v1/sessions", {"action": "open", "session_id": name, "cache_salt": name}),
            ("GET", f"/v1/sessions?cache_salt={name}", None),
            ("POST", "/v1/completions", {"prompt": text, "prefix": draw.choice((known, name)), "user": name}),
            ("POST", "/v1/chat/completions", {"messages": [], "prefix": known, "metadata": {"user_id": name}}),
            ("GET", f"/v1/prefixes/{draw.choice((known, name))}", None),
        )
    )


@pytest.mark.extended
def test_tables_are_full(vllm: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the limits are reached, no container of the middleware grows with requests, each of which has names of its own."""
    monkeypatch.setattr("foreword.prefixes.book.TENANT_PREFIXES", 100)
    monkeypatch.setattr(vllm("vllm_middleware.vllm_prefixes"), "_MOST_CHECKED", 100)

    async def check(client: httpx.AsyncClient, fake: FakeVllm, storage: Any) -> None:
        fake.sessions = set()
        draw, counts = Random(57), []
        for _ in range(3):
            for _ in range(FULL // 2 if counts else FULL):
                method, path, body = mixed(draw)
                answer = await client.request(
                    method, path, json=body, headers={"x-request-id": f"{draw.getrandbits(40):x}"}
                )
                assert answer.status_code < 500, answer
            fake.forget()
            await asyncio.sleep(0.01)
            counts.append({name: count for name, count in entries()[0].items() if "foreword" in name})
        grown = {
            name: (counts[1].get(name, 0), count)
            for name, count in counts[2].items()
            if count > counts[1].get(name, 0) + 5
        }
        assert not grown

    served(vllm, check)


class Lazy(dict[str, Any]):
    """A table that loads what it is asked for, as Transformers has: here it cannot."""

    def _load(self, *_: Any) -> Any:
        raise ValueError("not there")

    __len__ = __iter__ = __getitem__ = values = items = keys = __class__ = property(_load)  # type: ignore[assignment]


class Owner:
    """Has such a table, and its own."""

    def __init__(self) -> None:
        self.lazy, self.table = Lazy(one=[1, 2]), {"a": [3]}


def test_a_count_runs_no_code_of_others() -> None:
    """Tables of libraries that other tests have imported do not end a count of what this process keeps: they are counted."""
    owner = Owner()
    label = f"{Owner.__module__}.{Owner.__qualname__}"
    counted = {name.removeprefix(f"{label}."): count for name, count in entries()[0].items() if name.startswith(label)}
    assert counted == {"lazy": 1, "lazy[]": 2, "table": 1, "table[]": 1}
    del owner


def test_sessions_of_many_salts(vllm: Callable[[str], Any]) -> None:
    """Clients may open sessions under as many salts as they like; the connector remembers the newest."""
    sessions = importlib.import_module("foreword.blocks.session_book").SessionBook(most_of_all=50)
    for number in range(200):
        sessions.open(b"%d" % number, "one")
    assert [bool(sessions.all(b"%d" % number)) for number in range(200)] == [False] * 150 + [True] * 50


def test_pins_in_tiers_that_are_written(vllm: Callable[[str], Any], tmp_path: Path) -> None:
    """A prefix is pinned as a whole where all tiers that are written have pinned it. One that is only read is not asked, which
    would count as its failure."""
    frames = make_frames(1, 4, 1000)
    with contextlib.closing(DiskStore(tmp_path, 1 << 20)) as shared:
        assert put_all(shared, frames) == 4
    stores = MemoryStore(1 << 20), DiskStore(tmp_path, 1 << 20, read_only=True)
    with contextlib.closing(TieredStore(stores, writable=[0])) as store:
        pin = vllm("vllm_middleware.prefix_storage").pin_in_tiers
        assert pin(store, [(1000, names_of(frames))]) == (0, False)
        store.put(frames, deadline=soon())
        assert pin(store, [(1000, names_of(frames[:3])), (1000, names_of(frames[3:]))]) == (4000, True)
        assert not store.tiers[1].counters.errors and store.tiers[1].breaker.closed
