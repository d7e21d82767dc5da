"""Warm-up: a replica that joins loads the prefixes that the fleet uses most from its stores, before it gets requests.

The router keeps recent prompts: of a session the first one. Where several of one tenant begin alike, the new replica is asked
to prefetch their common prefix: first those that save most. It computes nothing. A replica that finds nothing in its stores (a
shared store, or a peer) answers at once, and so gets requests at once.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import aiohttp
import msgspec

from foreword.api.rights import Tenant
from foreword.blocks.common_prefixes import common_prefix_length, common_prefixes
from foreword.blocks.salt import Salt
from foreword.decoders import decode_json
from foreword.request_errors import ReplicaFailed
from foreword.router.auth import RouterAuth
from foreword.router.extras import WarmUp
from foreword.router.replicas import CONNECTION_ERRORS, ReplicaInfo, clock, read_whole
from foreword.router.router_metrics import RouterMetrics

logger = logging.getLogger(__name__)

_PATH: Final = "/v1/cache/prefetch"
# Prompts that are kept: their number, all tokens (at most 36 bytes each), and tokens of one.
_MAX_PROMPTS: Final = 1024
_MAX_TOKENS: Final = 1 << 20
_MAX_LENGTH: Final = 1 << 16
_MAX_PREFIXES: Final = 64
# The part of the replica's KV memory that is filled. The rest is for the first requests.
_SHARE: Final = 0.5
_UNKNOWN_CAPACITY: Final = 1 << 15
_UNKNOWN_BLOCK: Final = 16
_AT_A_TIME: Final = 4


@dataclass(frozen=True, slots=True)
class _Owner:
    """Whose blocks a prompt has."""

    tenant: Tenant
    model: str | None
    cache_salt: str | None


class PrefixWarmUp(WarmUp):
    """Recent prompts, and the prefetches of replicas that join. Runs on the event loop.

    Args:
        seconds: time limit for one replica; 0 turns it off.
    """

    def __init__(self, auth: RouterAuth, metrics: RouterMetrics, seconds: float) -> None:
        self._auth = auth
        self._metrics = metrics
        self._seconds = seconds
        self._prompts: deque[tuple[_Owner, Sequence[int]]] = deque()
        self._tokens = 0

    def record(self, tenant: Tenant, model: str | None, cache_salt: str | None, tokens: Sequence[int]) -> None:
        if not self._seconds or not tokens:
            return
        kept = tokens if len(tokens) <= _MAX_LENGTH else tokens[:_MAX_LENGTH]
        self._prompts.append((_Owner(tenant, model, cache_salt), kept))
        self._tokens += len(kept)
        while len(self._prompts) > _MAX_PROMPTS or self._tokens > _MAX_TOKENS:
            self._tokens -= len(self._prompts.popleft()[1])

    def forget(self, tenant: str, cache_salts: Collection[str]) -> None:
        kept = [
            one
            for one in self._prompts
            if one[0].tenant.name != tenant or (cache_salts and one[0].cache_salt not in cache_salts)
        ]
        self._prompts, self._tokens = deque(kept), sum(len(tokens) for _, tokens in kept)

    async def warm(self, session: aiohttp.ClientSession, url: str, info: ReplicaInfo) -> None:
        if not self._prompts or info.kind not in ("foreword", "vllm"):
            return
        began, loaded, problem = clock(), 0, ""
        queue = iter(await asyncio.to_thread(_select, list(self._prompts), info))

        async def work() -> None:
            nonlocal loaded, problem
            try:
                for owner, tokens in queue:
                    found = await self._prefetch(session, url, info.kind, owner, tokens)
                    loaded += found
            except (*CONNECTION_ERRORS, ReplicaFailed) as error:
                problem = f", stopped: {error}"

        try:
            async with asyncio.timeout(self._seconds):
                await asyncio.gather(*(work() for _ in range(_AT_A_TIME)))
        except TimeoutError:
            problem = f", stopped after {self._seconds:g} s"
        self._metrics.warmed(loaded, clock() - began)
        logger.info("replica %s loaded %d tokens of common prefixes in %.1f s%s", url, loaded, clock() - began, problem)

    async def _prefetch(
        self, session: aiohttp.ClientSession, url: str, kind: str, owner: _Owner, tokens: Sequence[int]
    ) -> int:
        """Tokens that are on the device then. Raises what aiohttp raises, and ReplicaFailed."""
        salt = Salt.of(owner.tenant.salt, owner.cache_salt).text if kind == "vllm" else owner.cache_salt
        fields = {"model": owner.model, "prompt": list(tokens), "cache_salt": salt or None}
        data = msgspec.json.encode({name: value for name, value in fields.items() if value is not None})
        headers = self._auth.headers_of(owner.tenant, kind) | {
            "content-type": "application/json",
            "accept-encoding": "identity",
        }
        async with session.post(url + _PATH, data=data, headers=headers, allow_redirects=False) as response:
            content = await read_whole(response)
            if response.status != 200:
                raise ReplicaFailed(f"prefetch: status {response.status}")
        try:
            return max(decode_json(content, _Answer).tokens, 0)
        except msgspec.DecodeError as error:
            raise ReplicaFailed(f"prefetch: {error}") from None


class _Answer(msgspec.Struct):
    tokens: int


def _select(prompts: Sequence[tuple[_Owner, Sequence[int]]], info: ReplicaInfo) -> list[tuple[_Owner, array[int]]]:
    """The common prefixes that fit into a share of the replica's memory, those that save most first. Takes time."""
    by_owner: dict[_Owner, list[array[int]]] = defaultdict(list)
    for owner, tokens in prompts:
        if owner.model is None or owner.model in info.models:
            by_owner[owner].append(tokens if isinstance(tokens, array) else array("I", tokens))
    ranked = sorted(_common(by_owner, info.block_size or _UNKNOWN_BLOCK), key=lambda one: one[0], reverse=True)
    room = int(_SHARE * (info.capacity_tokens or _UNKNOWN_CAPACITY))
    chosen: list[tuple[_Owner, array[int]]] = []
    for _, owner, prefix in ranked[:_MAX_PREFIXES]:
        known = max((common_prefix_length(prefix, other) for one, other in chosen if one == owner), default=0)
        if known < len(prefix) <= room + known:
            room -= len(prefix) - known
            chosen.append((owner, prefix))
    return chosen


def _common(by_owner: dict[_Owner, list[array[int]]], block_size: int) -> Iterator[tuple[int, _Owner, array[int]]]:
    """Common prefixes, each with the tokens that sharing it saves."""
    for owner, texts in by_owner.items():
        for found in common_prefixes(texts, block_size, _MAX_PREFIXES):
            yield (found.users - 1) * len(found.tokens), owner, found.tokens
