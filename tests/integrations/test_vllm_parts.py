"""Parts of the vLLM connector that need no vLLM: the hand-off message, and the middleware for named prefixes."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from vllm_stub import stubbed_vllm

from foreword.blocks.salt import Salt
from foreword.errors import ConfigError, TransferRefused

SECRET = "a secret of the right length for tests"


@pytest.fixture(scope="module")
def vllm() -> Iterator[Callable[[str], Any]]:
    """Imports a module of the connector."""
    with stubbed_vllm():
        yield lambda name: importlib.import_module(f"foreword.integrations.vllm.{name}")


def test_handoff_message(vllm: Callable[[str], Any]) -> None:
    """A hand-off message is read as it was written. One that was changed, of another block size or layout, or without a
    secret is refused with a reason."""
    terms = vllm("handoff").HandoffTerms
    mine = terms(32, (b"a" * 16, b"b" * 16), (SECRET,))
    message = mine.write(b"l" * 16, ("host:1", "host:2"), 64, b"k" * 32)
    read = mine.read({"do_remote_prefill": True, "foreword": message})
    assert (read.tokens, read.last) == (64, (b"k" * 32).hex())
    assert terms(32, mine.layouts, ("another " + SECRET, SECRET)).read({"foreword": message}), (
        "secrets are being changed"
    )
    assert read.producer.addresses == ("host:1", "host:2") and read.producer.lease == b"l" * 16
    for reader, params, reason in (
        (mine, {}, "another KV connector"),
        (mine, {"foreword": "nonsense"}, "are not valid"),
        (mine, {"foreword": {**message, "extra": 1}}, "are not valid"),
        (mine, {"foreword": {**message, "addresses": ["evil:1", "evil:2"]}}, "another secret"),
        (mine, {"foreword": {**message, "proof": ""}}, "another secret"),
        (terms(32, mine.layouts, ("",)), {"foreword": message}, "another secret"),
        (terms(64, mine.layouts, (SECRET,)), {"foreword": message}, "block size is 32 there and 64 here"),
        (terms(32, mine.layouts[:1], (SECRET,)), {"foreword": message}, "2 ranks there and 1 here"),
        (terms(32, (b"a" * 16, b"c" * 16), (SECRET,)), {"foreword": message}, "another layout"),
    ):
        with pytest.raises(TransferRefused, match=reason):
            reader.read(params)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"layout": "neutral"}, '"native" or "portable", not \'neutral\''),
        ({"unit_tokens": 32}, 'unit_tokens in kv_connector_extra_config needs "layout": "portable"'),
        ({"layout": "native", "head_units": 2}, "head_units in kv_connector_extra_config needs"),
        ({"layout": "portable", "unit_tokens": 0}, "a number from 1 on, not 0"),
        ({"layout": "portable", "head_units": "4"}, "a number from 1 on, not '4'"),
        ({"layout": "portable", "head_units": True}, "a number from 1 on, not True"),
        ({"layout": "portable", "transfer": {}}, "leave out layout or transfer"),
        ({"layuot": "portable"}, "Did you mean 'layout'"),
    ],
)
def test_settings_of_the_portable_layout(vllm: Callable[[str], Any], settings: dict[str, Any], reason: str) -> None:
    """Settings of the portable layout that are wrong, or of no use, are errors that say what is wrong."""
    read = vllm("config").ConnectorSettings.read
    with pytest.raises(ConfigError, match=reason):
        read({"store": "memory://", **settings})
    units = read({"store": "memory://", "layout": "portable", "unit_tokens": 32}).units
    assert (units.tokens, units.heads) == (32, 8)
    assert read({"store": "memory://"}).units is None


class MemoryStorage:
    """Stores that pin every block at once and keep no records."""

    budget_bytes = 1000

    def __init__(self, module: Any) -> None:
        self._pinned_blocks = module.PinnedBlocks
        self.pinned: list[Sequence[int]] = []

    def size_of(self, num_tokens: int) -> int:
        return num_tokens

    def check_room(self, *_: Any) -> None:
        pass

    def all(self, salt: bytes) -> None:
        return None

    def get(self, name: str, salt: bytes) -> None:
        return None

    def put(self, prefix: Any, salt: bytes) -> None:
        pass

    def remove(self, name: str, salt: bytes) -> None:
        pass

    def pin(self, tokens: Sequence[int]) -> Any:
        self.pinned.append(tokens)
        return self._pinned_blocks(len(tokens), True)

    def unpin(self, tokens: Sequence[int], salt: bytes, needed: Sequence[Sequence[int]]) -> None:
        self.pinned.remove(tuple(tokens))

    def position(self, num_tokens: int) -> int:
        return num_tokens // 2 * 2

    def stored(self, tokens: Sequence[int], salt: Salt) -> int:
        return 0 if salt else min(self.position(len(tokens)), 4)

    def close(self) -> None:
        pass


class FakeVllm:
    """The routes of a vLLM server that the middleware calls, one token per character, and its engine's client."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.version, self.paused, self.fails = "default", False, False
        self.bodies: list[dict[str, Any]] = []
        routes = {"/tokenize": self.tokenize, "/v1/completions": self.complete, "/v1/chat/completions": self.complete}
        self.app = Starlette(routes=[Route(path, call, methods=["POST"]) for path, call in routes.items()])

    async def is_paused(self) -> bool:
        return self.paused

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        self.calls.append(("pause", mode, clear_cache))

    async def update_weight_version(self, version: str) -> None:
        self.calls.append(("version", version))
        if self.fails:
            raise RuntimeError("the engine is dead")
        self.version = version

    async def get_weight_version(self) -> str:
        return self.version

    async def resume_generation(self) -> None:
        self.calls.append(("resume",))

    async def tokenize(self, request: Request) -> JSONResponse:
        body = await request.json()
        text = body.get("prompt") or "".join(f"<{one['role']}>{one['content']}" for one in body["messages"])
        return JSONResponse({"tokens": [ord(char) for char in text]})

    async def complete(self, request: Request) -> JSONResponse:
        self.bodies.append(await request.json())
        return JSONResponse({"usage": {"prompt_tokens_details": {"cached_tokens": 4}}})


def served(vllm: Callable[[str], Any], check: Callable[[httpx.AsyncClient, FakeVllm, Any], Awaitable[None]]) -> None:
    """Run a check against a fake vLLM behind the routes for prefixes."""

    async def main() -> None:
        fake, storage = FakeVllm(), MemoryStorage(vllm("prefix_storage"))
        prefixes = vllm("prefixes").VllmPrefixes(storage, vllm("prefixes").InnerServer(fake.app, fake.app, None))
        weights = vllm("middleware").WeightsEndpoints(fake)
        inner = vllm("prefixes").InnerServer(fake.app, fake.app, None)
        prefetch = vllm("prefetch").PrefetchEndpoint(storage, inner)
        routes = vllm("middleware").PrefixRoutes(fake.app, prefixes, weights, prefetch)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(routes), base_url="http://vllm") as client:
            await check(client, fake, storage)
        await prefixes.close()

    asyncio.run(main())


def test_prefetch(vllm: Callable[[str], Any]) -> None:
    """vLLM gets a request for what the stores have and one more token. Where they have nothing it gets none."""

    async def check(client: httpx.AsyncClient, fake: FakeVllm, storage: MemoryStorage) -> None:
        async def ask(**body: Any) -> tuple[str, int, str | None]:
            found = (await client.post("/v1/cache/prefetch", json=body)).json()
            return found["status"], found["tokens"], found["where"]

        asked = {"max_tokens": 1, "temperature": 0.0, "stream": False}
        assert await ask(prompt="abcd") == ("accepted", 4, "device")
        assert await ask(messages=[{"role": "user", "content": "hi"}]) == ("clipped", 4, "device")
        assert fake.bodies == [{"prompt": [97, 98, 99, 100, 100], **asked}, {"prompt": [*b"<user"], **asked}]
        assert await ask(prompt="abcd", cache_salt="x") == ("refused", 0, None)
        assert await ask(prompt="a") == ("refused", 0, None)
        assert len(fake.bodies) == 2
        assert (await client.post("/v1/cache/prefetch", json={})).status_code == 400
        assert (await client.get("/v1/cache/prefetch")).status_code == 404

    served(vllm, check)


def test_named_prefixes(vllm: Callable[[str], Any]) -> None:
    """A prefix is tokenized and computed by vLLM, pinned, put before prompts and messages, counted, and unpinned in the end."""

    async def check(client: httpx.AsyncClient, fake: FakeVllm, storage: MemoryStorage) -> None:
        made = await client.post("/v1/prefixes", json={"name": "rules", "content": "be"})
        assert made.status_code == 201 and (made.json()["num_tokens"], made.json()["bytes"]) == (2, 2)
        rules = [ord("b"), ord("e")]
        assert fake.bodies[0]["prompt"] == rules and fake.bodies[0]["max_tokens"] == 1
        assert storage.pinned == [tuple(rules)]
        chat = {"name": "chat", "messages": [{"role": "system", "content": "x"}]}
        made = await client.post("/v1/prefixes", json=chat)
        # The part that does not depend on the message after it.
        assert made.json()["num_tokens"] == len("<system>x<user>") and made.json()["kind"] == "messages"
        fake.bodies.clear()
        await client.post("/v1/completions", json={"prompt": ["a", [7]], "prefix": "rules", "n": 1})
        question = {"role": "user", "content": "?"}
        await client.post("/v1/chat/completions", json={"messages": [question], "prefix": "chat"})
        await client.post("/v1/completions", json={"prompt": "a"})
        assert fake.bodies == [
            {"prompt": [[*rules, ord("a")], [*rules, 7]], "n": 1},
            {"messages": [*chat["messages"], question]},
            {"prompt": "a"},
        ]
        listed = (await client.get("/v1/prefixes")).json()
        assert [(one["name"], one["uses"], one["hit_tokens"]) for one in listed["data"]] == [
            ("chat", 1, 4),
            ("rules", 1, 2),
        ]
        assert listed["budget_bytes"] == 1000
        assert (await client.put("/v1/prefixes/rules", json={"content": "do"})).json()["version"] == 2
        assert (await client.delete("/v1/prefixes/rules")).json()["deleted"] is True
        assert (await client.get("/v1/prefixes/chat")).json()["messages"] == chat["messages"]
        assert len(storage.pinned) == 1

    served(vllm, check)


def test_bad_prefix_requests(vllm: Callable[[str], Any]) -> None:
    """Bad requests get OpenAI's error JSON with a reason, and vLLM does not see them."""

    async def check(client: httpx.AsyncClient, fake: FakeVllm, storage: MemoryStorage) -> None:
        await client.post("/v1/prefixes", json={"name": "rules", "content": "be"})
        fake.bodies.clear()
        image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]
        for method, path, body, status, reason in (
            ("POST", "/v1/prefixes", {"name": "rules", "content": "x"}, 400, "exists"),
            ("POST", "/v1/prefixes", {"name": "a b", "content": "x"}, 400, "letters"),
            ("POST", "/v1/prefixes", {"name": "both", "content": "x", "messages": image}, 400, "either"),
            ("POST", "/v1/prefixes", {"name": "image", "messages": image}, 400, "text"),
            ("GET", "/v1/prefixes/rulez", None, 404, "'rules'"),
            ("PATCH", "/v1/prefixes/rules", None, 404, "PATCH"),
            ("POST", "/v1/completions", {"prompt": "x", "prefix": "rulez"}, 404, "'rules'"),
            ("POST", "/v1/completions", {"prompt": "x", "prefix": 3}, 400, "name"),
            ("POST", "/v1/completions", {"prompt": None, "prefix": "rules"}, 400, "prompt"),
            ("POST", "/v1/chat/completions", {"messages": [], "prefix": "rules"}, 400, "/v1/completions"),
        ):
            answer = await client.request(method, path, json=body)
            assert answer.status_code == status and reason in answer.json()["error"]["message"], answer.text
        assert fake.bodies == []

    served(vllm, check)


def test_weights_version(vllm: Callable[[str], Any]) -> None:
    """A version of the weights is set while vLLM is paused and after it has dropped its KV. A server that was paused before
    stays paused, and one that fails resumes."""

    async def check(client: httpx.AsyncClient, fake: FakeVllm, storage: MemoryStorage) -> None:
        path, version = "/v1/foreword/weights_version", {"version": "run 7, step 1200"}
        assert (await client.get(path)).json() == {"version": "default"}
        assert (await client.post(path, json=version)).json() == version == (await client.get(path)).json()
        steps = [("pause", "keep", True), ("version", version["version"])]
        assert fake.calls == [*steps, ("resume",)]
        fake.calls.clear()
        fake.paused = True
        await client.post(path, json=version)
        assert fake.calls == steps
        for body in ({}, {"version": ""}, {"version": 3}, {"version": "x", "epoch": 1}):
            assert (await client.post(path, json=body)).status_code == 400
        assert (await client.delete(path)).status_code == 404
        fake.calls.clear()
        fake.paused, fake.fails = False, True
        with pytest.raises(RuntimeError):
            await client.post(path, json=version)
        assert fake.calls == [*steps, ("resume",)]

    served(vllm, check)
