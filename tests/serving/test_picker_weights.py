"""The endpoint picker in front of replicas that serve one name with different weights."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from types import MappingProxyType
from typing import Any

from router_parts import _config

from foreword.api.dialects.decode import Limits
from foreword.api.front import ByteStream
from foreword.api.routes import JsonBody
from foreword.router.app import create_front
from foreword.router.replica_pool import ReplicaPool, key_model
from foreword.router.replicas import ReplicaBreaker, ReplicaEvents, ReplicaInfo, ReplicaSpec, Upstream
from foreword.router.router import Router
from foreword.router_extras.gateway.picker import DESTINATION, PREFILL, Picker
from foreword.routing.disaggregation import DisaggregationPolicy
from foreword.routing.event_feed import KvEventFeed

TOKENS = list(range(1, 2001))
BLOCK = 16


class Asked:
    """A request whose body was read."""

    method, query, address = "POST", "", None
    headers: Mapping[str, str] = MappingProxyType({"content-type": "application/json"})

    def __init__(self, path: str) -> None:
        self.path = path

    def arrived(self, limit: int) -> bytes | None:
        raise NotImplementedError

    def pieces(self) -> AsyncIterator[bytes]:
        raise NotImplementedError

    def watch(self) -> None:
        raise NotImplementedError

    async def open(self, status: int, headers: Mapping[str, str], at_once: bool) -> ByteStream:
        raise NotImplementedError


class Fleet:
    """A router without sockets whose replicas are as told."""

    def __init__(self, *flags: str) -> None:
        self.router = Router(_config("--replica", "http://10.0.0.1:1", *flags))
        self.pool = self.router.pools["m"] = ReplicaPool(
            "m", self.router.config, {}, disaggregation=DisaggregationPolicy().choose
        )
        self.picker = Picker(self.router)

    def add(self, name: str, weights: str | None, role: str = "both") -> None:
        info = ReplicaInfo(
            "vllm", ("m",), block_size=BLOCK, event_sources=(ReplicaEvents("tcp://x:1", None),), weights=weights
        )
        upstream = Upstream(ReplicaSpec(f"http://{name}", role), "flag", ReplicaBreaker(), info)
        self.router.upstreams[upstream.url] = upstream
        self.pool.add(upstream)

    def stored(self, name: str, medium: str, locality: str | None = None) -> None:
        """A replica reports the prompt's blocks."""
        info = self.router.upstreams[f"http://{name}"].info
        assert info is not None
        feed = KvEventFeed(self.pool.fleet.directory, f"http://{name}", key_model("m", info.weights).encode(), BLOCK)
        event: dict[str, Any] = {
            "type": "BlockStored",
            "block_hashes": list(range(1, len(TOKENS) // BLOCK + 1)),
            "parent_block_hash": None,
            "token_ids": TOKENS[: len(TOKENS) // BLOCK * BLOCK],
            "block_size": BLOCK,
            "lora_id": None,
            "medium": medium,
            "locality": locality,
        }
        feed.apply(event)
        assert not feed.counters.malformed and feed.counters.stored_blocks

    def pick(self) -> tuple[dict[str, str | None], dict[str, int]]:
        """The headers for the gateway, and the tokens that each replica is expected to have."""
        answer = self.answer("/v1/completions", {"model": "m", "prompt": [*TOKENS, 5, 6, 7], "max_tokens": 4})
        estimates = answer.placed[1].decision.estimates
        return answer.headers, {one.replica.removeprefix("http://"): one.reused for one in estimates}

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        """The picker's answer for a request."""

        async def pick() -> Any:
            await self.router.start()
            try:
                raw = json.dumps(body).encode()
                create_front(self.router)
                call = self.picker.front.begin(Asked(path)).call
                assert call.route is not None and isinstance(call.route.body, JsonBody)
                self.picker.front.admit(call, call.route)
                call.body = call.route.body.parse(raw, Limits())
                answer = await self.picker.pick(call)
                assert answer.placed is not None
                self.pool.finished(answer.placed[1], None, None)
                return answer
            finally:
                await self.router.stop()

        return asyncio.run(pick())


def test_only_kv_of_the_same_weights_attracts() -> None:
    """The prompt's blocks in a store that all replicas share are of use for those with the weights that computed them."""
    a, b, c, d = replicas = [f"10.0.0.{number}:1" for number in range(1, 5)]
    for reports, holders in ((a, {a, b}), (c, {c}), (d, {d})):
        fleet = Fleet()
        for name, weights in zip(replicas, ("aa", "aa", "bb", None), strict=True):
            fleet.add(name, weights)
        fleet.stored(reports, "STORAGE", "REMOTE")
        headers, held = fleet.pick()
        assert {name for name, tokens in held.items() if tokens} == holders
        assert str(headers[DESTINATION]).partition(",")[0] in holders


def test_prefill_and_retries_have_the_same_weights() -> None:
    """The prompt is computed by a replica with the weights of the one that decodes, and the gateway may send the request only
    to others with these weights; to none while it is not known that it ends no servers."""
    fleet = Fleet()
    for name, weights in (("10.0.1.1:1", "aa"), ("10.0.1.2:1", "bb")):
        fleet.add(name, weights, "prefill")
        fleet.stored(name, "GPU")
    for name, weights in (("10.0.0.1:1", "aa"), ("10.0.0.2:1", "bb"), ("10.0.0.3:1", "aa"), ("10.0.0.4:1", "bb")):
        fleet.add(name, weights, "decode")
    pool = {"10.0.1.1:1": {"10.0.0.1:1", "10.0.0.3:1"}, "10.0.1.2:1": {"10.0.0.2:1", "10.0.0.4:1"}}
    headers, _ = fleet.pick()
    assert str(headers[DESTINATION]) in pool[str(headers[PREFILL])]
    headers, _ = fleet.pick()
    assert set(str(headers[DESTINATION]).split(",")) == pool[str(headers[PREFILL])]


def test_the_gateway_sends_the_ordered_prompt() -> None:
    """The gateway gets the ordered body where the prompt has an order; one that is in this order already stays the client's."""
    fleet = Fleet("--volatile-lines", "/^Date: /")
    fleet.add("10.0.0.1:1", "aa")
    user = {"role": "user", "content": "hi"}
    given = [{"role": "system", "content": "Date: now\nBe brief."}, user]
    ordered = [{"role": "system", "content": "Be brief."}, {"role": "system", "content": "Date: now"}, user]
    answer = fleet.answer("/v1/chat/completions", {"model": "m", "messages": given})
    assert answer.body is not None and json.loads(answer.body)["messages"] == ordered
    assert fleet.answer("/v1/chat/completions", {"model": "m", "messages": ordered}).body is None
