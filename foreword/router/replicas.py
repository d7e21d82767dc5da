"""One replica as the router talks to it: what it is, whether it lives, what it serves. Asks and listens; decides nothing."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple
from urllib.parse import SplitResult, urlsplit

import aiohttp

from foreword.config import RouterConfig
from foreword.errors import ConfigError, ReplicaFailed, did_you_mean
from foreword.router.breaker import ReplicaBreaker

_ROLES: Final = ("both", "prefill", "decode")
_METRIC: Final = re.compile(rb"^vllm:(num_requests_running|num_requests_waiting)\{[^}]*\}\s+([0-9.e+]+)", re.MULTILINE)
_CACHE: Final = re.compile(rb"^vllm:cache_config_info\{([^}]*)\}", re.MULTILINE)
_LABEL: Final = re.compile(rb'(\w+)="([^"]*)"')
_MOST_METRICS: Final = 8 << 20
# What an aiohttp call raises when the other side is not there, or goes away.
LOST: Final = (aiohttp.ClientError, OSError, asyncio.TimeoutError)


@dataclass(frozen=True, slots=True)
class Spec:
    """A replica as it is written down: `URL [role=...] [events=...] [replay=...] [max_waiting=N]`."""

    url: str
    role: str = "both"
    events: str | None = None
    replay: str | None = None
    max_waiting: int | None = None


def parse(text: str, role: str = "both") -> Spec:
    """Raises ConfigError."""
    url, *options = text.split()
    if "@" in url or "?" in url or "#" in url:
        raise ConfigError("a replica's URL has no password and no query; give its key with --replica-key")
    parts = url_parts(url)
    if parts is None or parts.scheme not in ("http", "https") or parts.path not in ("", "/", "/v1"):
        raise ConfigError(f"a replica is written as a URL such as http://host:8000, not {url!r}")
    given: dict[str, Any] = {"role": role}
    for option in options:
        name, _, value = option.partition("=")
        if name not in ("role", "events", "replay", "max_waiting") or not value:
            known = did_you_mean(name, ("role", "events", "replay", "max_waiting"))
            raise ConfigError(f"replica {url}: {option!r} is not an option{known}")
        given[name] = value
    if given["role"] not in _ROLES:
        raise ConfigError(f"replica {url}: its role is both, prefill or decode, not {given['role']!r}")
    if "max_waiting" in given:
        if not given["max_waiting"].isdigit() or int(given["max_waiting"]) < 1:
            raise ConfigError(f"replica {url}: max_waiting is a number of at least 1")
        given["max_waiting"] = int(given["max_waiting"])
    return Spec(f"{parts.scheme}://{parts.netloc}", **given)


def url_parts(url: str) -> SplitResult | None:
    """None if the URL has no host, or a port that is none."""
    try:
        parts = urlsplit(url)
        return parts if parts.hostname and parts.port != 0 else None
    except ValueError:
        return None


@dataclass(frozen=True, slots=True)
class Facts:
    """What a replica said about itself.

    Attributes:
        kind: `foreword`, `vllm` or `openai` (anything else).
        models: ids, the base model first.
        cards: the models as `/v1/models` has them.
        transfer: where it takes KV transfers.
        sources: endpoints of its KV events: `(events, replay)`.
        salt_from: who tells a Foreword server's tenants apart for the router.
        tokenize: path of the endpoint that tokenizes, if there is one.
    """

    kind: str
    models: tuple[str, ...]
    cards: tuple[Mapping[str, Any], ...] = ()
    max_model_len: int | None = None
    block_size: int | None = None
    capacity_tokens: int | None = None
    transfer: str | None = None
    sources: tuple[tuple[str, str | None], ...] = ()
    salt_from: str | None = None
    tokenize: str | None = None


@dataclass(eq=False)
class Upstream:
    """One replica.

    Attributes:
        source: who named it: `flag`, `file`, `api` or `dns`.
        facts: None until it answered for the first time.
        drained: takes no new requests by an operator's wish.
        pause_until: it said that it has too much to do.
        in_flight: requests sent there by this router, by whatever path; `most` at a time.
        trying: one request is on its way to show whether it is well again.
        dead: the last probe did not reach it: streams from there will not go on.
        lives: what is awaited from there.
        hands_over: False once it computed a prompt for another vLLM server and did not say where its KV is.
    """

    spec: Spec
    source: str
    breaker: ReplicaBreaker
    facts: Facts | None = None
    drained: bool = False
    pause_until: float = 0.0
    in_flight: int = 0
    most: int = 512
    trying: bool = False
    dead: bool = False
    lives: set[Live] = field(default_factory=set)
    hands_over: bool = True
    problem: str = "it has not answered yet"
    apart: str = ""
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    @property
    def url(self) -> str:
        return self.spec.url

    @property
    def kind(self) -> str:
        return self.facts.kind if self.facts else "openai"

    @property
    def model(self) -> str | None:
        return self.facts.models[0] if self.facts and self.facts.models else None

    def excluded(self, now: float) -> str:
        """Why it takes no new requests now; empty if it does."""
        if self.drained:
            return "draining"
        if self.facts is None:
            return f"unhealthy: {self.problem}"
        if self.breaker.state == "open":
            return f"unhealthy: {self.breaker.reason}"
        if self.apart:
            return self.apart
        if self.trying:
            return "overloaded: it was away, and one request is tried there first"
        if self.pause_until > now:
            return f"overloaded: it asked to wait {self.pause_until - now:.1f} s"
        if self.in_flight >= self.most:
            return f"overloaded: {self.in_flight} requests are in flight there"
        return ""


@dataclass(eq=False)
class Live:
    """Something that comes from a replica: when the last byte came, and how to end it from outside (`end`)."""

    end: Callable[[], object]
    last: float
    begun: bool = False
    aborted: str = ""

    def abort(self, reason: str) -> None:
        self.aborted = reason
        self.end()


class Health(NamedTuple):
    """What a probe found: what is wrong, if anything, whether that leaves no doubt, and whether streams from there are dead.
    `late`: no answer came in time."""

    problem: str | None = None
    certain: bool = False
    dead: bool = False
    late: bool = False


WELL: Final = Health()


class Probe:
    """Asks replicas how they are and what they are."""

    def __init__(self, config: RouterConfig, session: aiohttp.ClientSession, headers: Mapping[str, str]) -> None:
        self._config = config
        self._session = session
        self._headers = headers
        self._timeout = aiohttp.ClientTimeout(total=config.health_timeout)

    async def health(self, upstream: Upstream) -> Health:
        """How it is. Foreword servers say at `/ready` whether they take requests, vLLM at `/health`; of others only
        `/v1/models` is certain to exist."""
        try:
            for path in ("/ready", "/health", "/v1/models"):
                status, body = await self._get(upstream.url + path)
                if status < 400 or (path == "/v1/models" and status in (401, 403)):
                    return WELL
                if status != 404 or path == "/v1/models":
                    reason = body.get("reason") if isinstance(body, dict) else None
                    return Health(f"{path} says {status}{f': {reason}' if reason else ''}", status == 503)
        except aiohttp.ClientConnectorError as error:
            return Health(f"cannot connect: {error.strerror or error}", certain=True, dead=True)
        except TimeoutError:
            return Health(f"no answer within {self._config.health_timeout:g} s", dead=True, late=True)
        except LOST as error:
            return Health(f"the connection broke: {type(error).__name__}", dead=True)
        return WELL

    async def facts(self, upstream: Upstream) -> Facts:
        """Raises ReplicaFailed."""
        try:
            status, listed = await self._get(f"{upstream.url}/v1/models")
            if status != 200 or not isinstance(listed, dict) or not isinstance(listed.get("data"), list):
                hint = " (--replica-key)" if status in (401, 403) else ""
                raise ReplicaFailed(f"/v1/models says {status}{hint}")
            cards = tuple(card for card in listed["data"] if isinstance(card, dict) and isinstance(card.get("id"), str))
            if not cards:
                raise ReplicaFailed("/v1/models names no model")
            return await self._more(upstream, cards, listed.get("salt_from"))
        except LOST as error:
            raise ReplicaFailed(f"it does not say what it serves: {type(error).__name__}") from None

    async def _more(self, upstream: Upstream, cards: tuple[Mapping[str, Any], ...], salt_from: object) -> Facts:
        # Adapters have a parent; the base model comes first.
        cards = tuple(sorted(cards, key=lambda card: bool(card.get("parent"))))
        owner = cards[0].get("owned_by")
        kind = owner if owner in ("foreword", "vllm") else "openai"
        longest = cards[0].get("max_model_len")
        names = tuple(str(card["id"]) for card in cards)
        if kind == "openai":
            return Facts(kind, names, cards, longest if isinstance(longest, int) else None)
        block, capacity = await self._cache_config(upstream)
        transfer = await self._transfer(upstream) if kind == "foreword" else None
        sources = await self._sources(upstream)
        tokenize = "/v1/tokenize" if kind == "foreword" else "/tokenize"
        said = salt_from if isinstance(salt_from, str) else None
        return Facts(
            kind,
            names,
            cards,
            longest if isinstance(longest, int) else None,
            block,
            capacity,
            transfer,
            sources,
            said,
            tokenize,
        )

    async def _cache_config(self, upstream: Upstream) -> tuple[int | None, int | None]:
        found = _CACHE.search(await self._metrics(upstream))
        pairs = _LABEL.findall(found[1]) if found else []
        labels = {name.decode(): value.decode("utf-8", "replace") for name, value in pairs}
        size, blocks = labels.get("block_size", ""), labels.get("num_gpu_blocks", "")
        if not size.isdigit():
            return None, None
        return int(size), int(size) * int(blocks) if blocks.isdigit() else None

    async def load(self, upstream: Upstream) -> tuple[int, int] | None:
        """Requests that run and wait there, whoever sent them; None if it does not say."""
        try:
            found = {name: float(value) for name, value in _METRIC.findall(await self._metrics(upstream))}
        except LOST:
            return None
        if not found:
            return None
        return int(found.get(b"num_requests_running", 0)), int(found.get(b"num_requests_waiting", 0))

    async def _metrics(self, upstream: Upstream) -> bytes:
        """All of them, in however many pieces they come; what is longer than 8 MiB is left."""
        found = bytearray()
        async with self._session.get(f"{upstream.url}/metrics", timeout=self._timeout) as answer:
            while answer.status == 200 and len(found) < _MOST_METRICS:
                if not (piece := await answer.content.readany()):
                    break
                found += piece
        return bytes(found)

    async def _transfer(self, upstream: Upstream) -> str | None:
        status, body = await self._get(f"{upstream.url}/v1/instance")
        found = body.get("transfer") if status == 200 and isinstance(body, dict) else None
        return found if isinstance(found, str) else None

    async def _sources(self, upstream: Upstream) -> tuple[tuple[str, str | None], ...]:
        if upstream.spec.events is not None:
            return ((upstream.spec.events, upstream.spec.replay),)
        status, body = await self._get(f"{upstream.url}/kv_event_sources")
        if status != 200 or not isinstance(body, dict):
            return ()
        host = urlsplit(upstream.url).hostname or ""
        found = [one for one in body.values() if isinstance(one, dict) and isinstance(one.get("endpoint"), str)]
        found = [one for one in found if one.get("publisher", "zmq") == "zmq"]
        return tuple((_reachable(one["endpoint"], host), _replay(one, host)) for one in found)

    async def _get(self, url: str) -> tuple[int, Any]:
        async with self._session.get(url, headers=self._headers, timeout=self._timeout) as answer:
            if not answer.content_type.endswith("json"):
                await answer.read()
                return answer.status, None
            try:
                return answer.status, await answer.json()
            except ValueError:  # what is no JSON says nothing
                return answer.status, None


def _replay(source: Mapping[str, Any], host: str) -> str | None:
    found = source.get("replay_endpoint")
    return _reachable(found, host) if isinstance(found, str) else None


def _reachable(endpoint: str, host: str) -> str:
    """An endpoint that listens on all addresses is reached at the replica's own."""
    shown = f"[{host}]" if ":" in host else host
    for anywhere in ("tcp://*:", "tcp://0.0.0.0:", "tcp://[::]:"):
        if endpoint.startswith(anywhere):
            return f"tcp://{shown}:{endpoint.removeprefix(anywhere)}"
    return endpoint


def clock() -> float:
    """The one clock of the router: seconds that never go back."""
    return time.monotonic()
