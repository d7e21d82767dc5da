"""Replicas whose KV events do not name a prompt's blocks, or whose `/tokenize` is wrong: its bytes tell where it is."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import http_client
import pytest
import zmq
from aiohttp import web
from router_parts import Loop, RouterThread
from shared_server import until
from test_router_late_tokens import BLOCK, TURNS, EventReplica, ask, ids_of, routed

from foreword.kv_event_wire import encode_batch, encode_number


@pytest.fixture(scope="module")
def loop() -> Loop:
    return Loop()


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


class VllmLikeReplica(EventReplica):
    """Tells its blocks as vLLM does: those behind an adapter name it, and those with an image name that. An image has
    600 tokens. `lies`: what `/tokenize` makes of the right tokens."""

    def __init__(self, loop: Loop) -> None:
        self._context = zmq.Context()
        self._source = self._context.socket(zmq.PUB)
        self._source.linger = 0
        self._port = self._source.bind_to_random_port("tcp://127.0.0.1")
        self._numbers = itertools.count()
        self._told = set[int]()
        self.lies: Callable[[list[int]], list[int]] = list
        super().__init__(loop)

    def close(self) -> None:
        self._loop.call(self._source.close)
        self._context.term()

    @property
    def told(self) -> int:
        """Blocks of which it told."""
        return len(self._told)

    def tokens_of(self, body: dict[str, Any]) -> list[int]:
        parts: list[int] = []
        for one in body["messages"]:
            content = one["content"]
            texts = [content] if isinstance(content, str) else content
            for part in texts:
                is_image = isinstance(part, dict) and part["type"] == "image_url"
                text = part if isinstance(part, str) else part.get("text", "")
                parts += [9] * 600 if is_image else ids_of({"messages": [{"role": one["role"], "content": text}]})
        return parts

    def routes(self) -> list[web.RouteDef]:
        return [*super().routes(), web.get("/kv_event_sources", self._sources)]

    async def _sources(self, request: web.Request) -> web.Response:
        return web.json_response({"0": {"publisher": "zmq", "endpoint": f"tcp://127.0.0.1:{self._port}"}})

    async def _models(self, request: web.Request) -> web.Response:
        names = [("m", None), ("alias", None), ("adapter", "m")]
        cards = [{"id": name, "owned_by": "vllm", "root": "m", "parent": parent} for name, parent in names]
        return web.json_response({"object": "list", "data": cards})

    async def _tokenize(self, request: web.Request) -> web.Response:
        tokens = self.lies(self.tokens_of(await request.json()))
        return web.json_response({"tokens": tokens, "count": len(tokens), "max_model_len": -1})

    def heads(self, tokens: list[int], body: dict[str, Any]) -> list[tuple[int, ...]]:
        self._tell(tokens, body)
        return super().heads(tokens, body)

    def _tell(self, tokens: list[int], body: dict[str, Any]) -> None:
        adapter = body["model"] if body["model"] == "adapter" else None
        parent: int | None = None
        for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
            block = tokens[start : start + BLOCK]
            name = hash((parent, adapter, *block)) & (2**64 - 1)
            if name not in self._told:
                self._told.add(name)
                extra = [*([adapter] if adapter else []), *([["digest", start]] if 9 in block else [])]
                event = {
                    "type": "BlockStored",
                    "block_hashes": [name],
                    "parent_block_hash": parent,
                    "token_ids": block,
                    "block_size": BLOCK,
                    "lora_id": 1 if adapter else None,
                    "medium": "GPU",
                    "lora_name": adapter,
                    "extra_keys": [extra] if extra else None,
                }
                self._source.send_multipart([b"", encode_number(next(self._numbers)), encode_batch(0.0, [event])])
            parent = name


def shifted(tokens: list[int]) -> list[int]:
    return [one + 1 for one in tokens]


LIES: dict[str, Callable[[list[int]], list[int]]] = {
    "others": shifted,
    "none": lambda tokens: [],
    "more": lambda tokens: [1, *tokens],
    "half": lambda tokens: tokens[: len(tokens) // 2],
}


ALWAYS = tuple(range(1, TURNS + 1))


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        *((kind, ()) for kind in ("plain", "alias", "adapter", "image")),
        *((kind, (4,)) for kind in LIES),
        *((kind, ALWAYS) for kind in ("none", "more", "half")),
    ],
    ids=lambda one: one if isinstance(one, str) else f"{len(one)} wrong",
)
def test_a_next_turn_is_known_where_no_event_names_its_blocks(loop: Loop, kind: str, wrong: tuple[int, ...]) -> None:
    """A conversation's next turn is expected to find the turn before at the replica that had it, also where events do not tell:
    with an adapter, another name of the model, an image, or where `/tokenize` gives wrong tokens, once or always."""
    with routed(loop, 3, kind=VllmLikeReplica) as (router, made):
        replicas = cast(list[VllmLikeReplica], made)
        model = kind if kind in ("alias", "adapter") else "m"
        text = "conversation: " + "You are a helpful agent. " * 100
        first = [{"type": "text", "text": "look"}, IMAGE] if kind == "image" else "look"
        messages: list[dict[str, Any]] = [{"role": "system", "content": text}, {"role": "user", "content": first}]
        before = 0
        for turn in range(1, TURNS + 1):
            for one in replicas:
                one.lies = LIES[kind] if kind in LIES and turn in wrong else list
            prompt, _ = ask(router, messages, model=model)
            [decision] = http_client.get(f"{router.url}/v1/router/decisions?last=1").json()["data"]
            known = min(before, decision["prompt_tokens"])
            assert decision["expected_cached_tokens"] >= 0.85 * known, (turn, before, decision["in_words"])
            told = sum(one.told for one in replicas)
            until(partial(_has_received, router, told))
            until(partial(_has_ended, router))
            before = prompt
            messages += [{"role": "assistant", "content": "ok"}, {"role": "user", "content": f"go on {turn} " * 20}]
        for one in replicas:
            one.close()


def _has_received(router: RouterThread, told: int) -> bool:
    """Whether events told of so many blocks, which could be named or not."""
    kinds = ("stored_blocks", "skipped_blocks")
    return sum(router.metric("foreword:router_kv_events_total", kind=kind) for kind in kinds) >= told


def _has_ended(router: RouterThread) -> bool:
    """Whether the router has noted what every answer said."""
    return not any(one["in_flight"] for one in http_client.get(f"{router.url}/v1/router/replicas").json()["data"])
