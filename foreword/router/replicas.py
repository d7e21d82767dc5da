"""A replica as the router sees it: its specification, its circuit breaker, its health, and what it serves. Sends probes;
decides nothing.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple
from urllib.parse import SplitResult, urlsplit

import aiohttp

from foreword.api.dialects.answer_reader import decode_object
from foreword.errors import ConfigError, did_you_mean
from foreword.process_config import RouterConfig
from foreword.request_errors import ReplicaFailed, RequestLost, connection_reason
from foreword.router import logprobs_probe
from foreword.router.logprobs_probe import LogprobReadings
from foreword.router.replica_body import PATHS, TRANSLATED
from foreword.router.replica_metrics import UNKNOWN, ReplicaMetrics, parse_metrics
from foreword.routing.cost_kinds import Measurement

_FIRST_PAUSE: Final = 1.0
_MAX_PAUSE: Final = 30.0
_PROBE_INTERVAL: Final = 1.0
_ROLES: Final = ("both", "prefill", "decode")
_OPTIONS: Final = ("role", "events", "replay", "max_waiting")
_MAX_METRICS_BYTES: Final = 8 << 20
_MAX_PROBE_BYTES: Final = 8 << 20
MAX_RESPONSE_BYTES: Final = 64 << 20
_MAX_MODEL_LEN: Final = 1 << 24
# To compute the log-probabilities of a short text, also on a server with much to do.
_LOGPROBS_SECONDS: Final = 10.0
# A vLLM server publishes its fingerprint with its first step: how often, and at what interval, the router looks after one.
_LOOKS: Final = 20
_LOOK_SECONDS: Final = 0.1
ANY_ADDRESS: Final = ("tcp://*:", "tcp://0.0.0.0:", "tcp://[::]:")
# Errors that an aiohttp call raises when the server is unreachable or the connection breaks.
CONNECTION_ERRORS: Final = (aiohttp.ClientError, OSError, asyncio.TimeoutError)
_ROW: Final = 16
_SAMPLE: Final = 256
_MAX_KINDS: Final = 1024
_TIMES: Final = 128
_OUTCOMES: Final = 8
# The kind of refusals that only the request can cause.
ABOUT_REQUEST: Final = 400
# The router's clock: monotonic seconds.
clock: Final = time.monotonic


class RecentAnswers:
    """Newest answers of a replica, for the fleet page: TTFTs and mean ITLs in seconds, and in `problems` why its last requests
    failed, "" for those that did not; the newest last."""

    def __init__(self) -> None:
        self.ttft: deque[float] = deque(maxlen=_TIMES)
        self.itl: deque[float] = deque(maxlen=_TIMES)
        self.problems: deque[str] = deque(maxlen=_OUTCOMES)


class Refusals:
    """Whether a replica is believed when it refuses a request (4xx), by kind of refusal: once another replica has refused one
    of the kind too; one of what only the request can cause (`ABOUT_REQUEST`), also once it has served another request. One of
    256 refusals, and the 16th, 128th, 1,024th ... in a row, are checked even so: another replica is asked. If that one serves
    the request, all of the kind are checked until others have agreed with 256.
    """

    def __init__(self) -> None:
        # With how many refusals of a kind others must agree before it is believed: with one of a kind that is not here.
        self._doubts = dict[Hashable, int]()
        self._row, self._total, self._next = 0, 0, _ROW

    def checked(self, kind: Hashable) -> bool:
        """Note a refusal. Whether another replica is to be asked."""
        self._row, self._total = self._row + 1, self._total + 1
        many = self._row == self._next
        self._next *= 8 if many else 1
        return self._doubts.get(kind, 1) > 0 or many or self._total % _SAMPLE == 0

    def served(self) -> None:
        """The replica answered a request."""
        self._row, self._next = 0, _ROW
        self._doubts.setdefault(ABOUT_REQUEST, 0)

    def compared(self, kind: Hashable, agreed: bool) -> None:
        """Whether another replica agreed with a refusal."""
        if len(self._doubts) >= _MAX_KINDS:
            self._doubts.clear()
        self._doubts[kind] = max(self._doubts.get(kind, 1) - 1, 0) if agreed else _SAMPLE


class ReplicaBreaker:
    """Opens after `failures` consecutive failures, or after one that proves that the replica is down. Requests and health
    probes are counted apart: a replica that answers probes and fails requests is not healthy.

    While it is open, the replica gets no requests. After a pause a health probe is sent, then one every second. When a probe
    succeeds, the breaker is half-open: one request at a time is sent until one succeeds. If that request fails, the next pause
    is twice as long. So a replica that answers probes and fails requests is tried less and less often, and a replica that
    was down is used again as soon as it answers.

    Attributes:
        by_requests: only failed requests have opened it; no probe has failed since.
    """

    def __init__(self, failures: int = 3) -> None:
        self.failures = failures
        self.reason = ""
        self.opened = 0
        self._failed_requests = 0
        self._failed_probes = 0
        self._pause = _FIRST_PAUSE
        self._open_until: float | None = None
        self.half_open = False
        self.by_requests = False

    @property
    def state(self) -> str:
        return "open" if self._open_until is not None else "half-open" if self.half_open else "closed"

    def failed(self, now: float, reason: str, *, certain: bool = False) -> bool:
        """Note a failed request; `certain` failures open the breaker at once. True if it has just opened."""
        self._failed_requests += 1
        opens = self._maybe_open(now, reason, certain or self._failed_requests >= self.failures)
        self.by_requests = not certain and (opens or self.by_requests)
        return opens

    def _maybe_open(self, now: float, reason: str, enough: bool) -> bool:
        if self._open_until is not None or not (enough or self.half_open):
            return False
        self.reason, self.half_open = reason, False
        self._open_until = now + self._pause
        self._pause = min(self._pause * 2, _MAX_PAUSE)
        self.opened += 1
        return True

    def succeeded(self) -> None:
        """Note a successful request. Ignored while open, because the request was sent before."""
        if self._open_until is None:
            self._failed_requests = self._failed_probes = 0
            self.half_open, self.reason, self._pause = False, "", _FIRST_PAUSE
            self.by_requests = False

    def due(self, now: float) -> bool:
        """Whether a probe should be sent; always true while not open."""
        return self._open_until is None or now >= self._open_until

    def probed(self, now: float, problem: str | None, *, certain: bool = False) -> bool:
        """Note the result of a probe. True if the breaker has just opened."""
        self.by_requests = self.by_requests and problem is None
        if self._open_until is None:
            self._failed_probes = 0 if problem is None else self._failed_probes + 1
            enough = certain or self._failed_probes >= self.failures
            return problem is not None and self._maybe_open(now, problem, enough)
        if problem is not None:
            self.reason, self._open_until = problem, now + _PROBE_INTERVAL
        else:
            self._open_until, self.half_open = None, True
            self._failed_requests = self._failed_probes = 0
        return False


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """A replica as configured: `URL [role=...] [events=...] [replay=...] [max_waiting=N]`."""

    url: str
    role: str = "both"
    events: str | None = None
    replay: str | None = None
    max_waiting: int | None = None


def parse_spec(text: str, role: str = "both") -> ReplicaSpec:
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
        if name not in _OPTIONS or not value:
            raise ConfigError(f"replica {url}: {option!r} is not an option{did_you_mean(name, _OPTIONS)}")
        given[name] = value
    if given["role"] not in _ROLES:
        raise ConfigError(f"replica {url}: its role is both, prefill or decode, not {given['role']!r}")
    if "max_waiting" in given:
        if not given["max_waiting"].isdigit() or int(given["max_waiting"]) < 1:
            raise ConfigError(f"replica {url}: max_waiting is a number of at least 1")
        given["max_waiting"] = int(given["max_waiting"])
    for name in ("events", "replay"):
        if name in given and not _is_endpoint(given[name]):
            raise ConfigError(f"replica {url}: {name} is written tcp://HOST:PORT or ipc://PATH, not {given[name]!r}")
    if "replay" in given and "events" not in given:
        raise ConfigError(f"replica {url}: replay needs events")
    return ReplicaSpec(f"{parts.scheme}://{parts.netloc.lower()}", **given)


def _is_endpoint(text: str) -> bool:
    """Whether ZeroMQ could connect to it. `*` stands for the replica's host."""
    if text.startswith("ipc://"):
        return len(text) > len("ipc://")
    found = re.fullmatch(r"tcp://(?:[^\s:/]+|\[[0-9a-fA-F:.%]+\]):(\d{1,5})", text)
    return found is not None and 0 < int(found[1]) <= 65535


def url_parts(url: str) -> SplitResult | None:
    """None if the URL has no host, one that no name server can know, or an invalid port."""
    try:
        parts = urlsplit(url)
        # Name resolution raises no OSError for a label that is empty or too long.
        (parts.hostname or "").encode("idna")
        return parts if parts.hostname and parts.port != 0 else None
    except ValueError:
        return None


class ReplicaEvents(NamedTuple):
    """Where a replica publishes KV events, and whether it takes the router's key there."""

    endpoint: str
    replay: str | None
    curve: bool = False


@dataclass(frozen=True, slots=True)
class ReplicaInfo:
    """A replica's report about itself.

    Attributes:
        kind: `foreword`, `vllm` or `openai` (any other server).
        models: model ids, the base model first.
        cards: the models as in `/v1/models`.
        transfer: address for KV transfers.
        event_sources: its KV events.
        salt_from: where a Foreword server takes tenants' salts from.
        tokenize_path: path of its tokenization endpoint; None if it has none.
        dialects: those of `TRANSLATED` that it speaks itself.
        weights: the fingerprint of its weights, or a name that this router gave them; None if they are not known.
        published: whether `weights` is the fingerprint that the replica publishes.
        unknown_because: why they are not known.
        started: when its process started, in seconds since 1970; None if it does not say.
    """

    kind: str
    models: tuple[str, ...]
    cards: tuple[Mapping[str, Any], ...] = ()
    max_model_len: int | None = None
    block_size: int | None = None
    capacity_tokens: int | None = None
    transfer: str | None = None
    event_sources: tuple[ReplicaEvents, ...] = ()
    salt_from: str | None = None
    tokenize_path: str | None = None
    dialects: frozenset[str] = frozenset()
    weights: str | None = None
    published: bool = False
    unknown_because: str = ""
    started: float | None = None

    def is_process_of(self, other: ReplicaInfo) -> bool:
        """Whether it certainly is the same process, which says the same about itself."""
        return self.started is not None and replace(self, cards=()) == replace(other, cards=())

    def has_lost(self, now: ReplicaInfo) -> bool:
        """Whether what it had then is certainly lost now: its process is another one, or it has other weights."""
        restarted = None not in (self.started, now.started) and self.started != now.started
        same_kind = self.published == now.published and None not in (self.weights, now.weights)
        return restarted or (same_kind and self.weights != now.weights)


@dataclass(eq=False)
class Upstream:
    """A replica and its present state.

    Attributes:
        source: where it was configured: `flag`, `file`, `api`, `dns NAME` or `service NAME`.
        info: None until the replica has answered for the first time.
        metrics: its metrics as last read.
        drained: an operator drained it; it gets no new requests. unready: Kubernetes says that it is not ready; the same.
        pause_until: it replied that it is overloaded; it gets no requests until then.
        in_flight: requests that this router sent there and that have not ended, at most `max_in_flight`.
        trial: the breaker is half-open, and the trial request is in flight.
        panic: all replicas of its pool are out because of failed requests: it is used if probes succeed.
        unreachable: the last probe got no answer, so its streams will not continue.
        awaited: responses that are being awaited or read.
        alive_at: when it last answered a request of the router's own. checked: such a request is in flight.
        erred_at: when it last answered with 5xx.
        dead: it died `died_at`, and has not answered a probe since. deaths: how often it died. inquest: asks whether it has.
        crowd: requests that it had when it died last, at which others had died before.
        returns_transfer: False after it computed a prompt for another vLLM server without returning `kv_transfer_params`.
        problem: result of the last failed probe.
        isolation_problem: why it would let tenants share blocks; empty if it would not.
        tasks: its watcher, then its KV event subscriptions.
        unconfirmed: it was away, or showed other weights: it gets no requests until its watcher has asked what it serves.
        wake: lets its watcher go on.
        recent: its last times and failures.
        measured: the time of a prompt there, if it was measured. measuring: it is being measured; a request that is sent there
            cancels that.
        reading: one reading of its weights at a time. next_reading: one that has not begun yet.
    """

    spec: ReplicaSpec
    source: str
    breaker: ReplicaBreaker
    info: ReplicaInfo | None = None
    metrics: ReplicaMetrics = UNKNOWN
    drained: bool = False
    unready: bool = False
    pause_until: float = 0.0
    in_flight: int = 0
    max_in_flight: int = 512
    trial: bool = False
    panic: bool = False
    unreachable: bool = False
    awaited: set[AwaitedResponse] = field(default_factory=set)
    alive_at: float = 0.0
    erred_at: float = -math.inf
    checked: bool = False
    dead: bool = False
    died_at: float = -math.inf
    deaths: int = 0
    crowd: int = 0
    inquest: asyncio.Task[str] | None = None
    returns_transfer: bool = True
    problem: str = "it has not answered yet"
    isolation_problem: str = ""
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    unconfirmed: bool = False
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    measured: Measurement | None = None
    measuring: asyncio.Task[Measurement] | None = None
    reading: asyncio.Lock = field(default_factory=asyncio.Lock)
    next_reading: asyncio.Task[None] | None = None
    refusals: Refusals = field(default_factory=Refusals)
    recent: RecentAnswers = field(default_factory=RecentAnswers)

    @property
    def url(self) -> str:
        return self.spec.url

    @property
    def kind(self) -> str:
        return self.info.kind if self.info else "openai"

    @property
    def model(self) -> str | None:
        return self.info.models[0] if self.info and self.info.models else None

    @property
    def weights(self) -> str | None:
        """The weights that it serves: a replica with an equal value may continue its responses. None if that is not known."""
        return self.info.weights if self.info is not None and not self.unconfirmed else None

    def sends_since(self, time: float) -> bool:
        """Whether output of a request has come from it since then."""
        return any(one.begun and one.last > time for one in self.awaited)

    @property
    def longest(self) -> float:
        """Tokens of the longest prompt that it takes; infinite if that is not known."""
        return min(
            filter(None, (self.info.max_model_len, self.info.capacity_tokens) if self.info else ()), default=math.inf
        )

    @property
    def ignores_breaker(self) -> bool:
        """Whether it is used although requests failed there."""
        return self.panic and self.breaker.by_requests and not self.unreachable

    @property
    def out_of_service(self) -> str:
        """Why it gets no new requests, however little it has to do; empty if it does."""
        if self.drained:
            return "draining"
        if self.unready:
            return "unhealthy: its pod is not ready"
        if self.info is None:
            return f"unhealthy: {self.problem}"
        if self.breaker.state == "open" and not self.ignores_breaker:
            return f"unhealthy: {self.breaker.reason}"
        if self.unconfirmed:
            return "unhealthy: it was away, or its weights have changed, and it was not asked yet what it serves"
        return self.isolation_problem

    def excluded(self, now: float) -> str:
        """Why it gets no new requests now; empty if it does."""
        if problem := self.out_of_service:
            return problem
        if self.trial and not self.ignores_breaker:
            return "overloaded: the circuit is half-open, and one trial request is in flight"
        if self.pause_until > now:
            return f"overloaded: it asked to retry in {self.pause_until - now:.1f} s"
        if self.in_flight >= self.max_in_flight:
            return f"overloaded: {self.in_flight} requests are in flight there"
        return ""


@dataclass(eq=False)
class AwaitedResponse:
    """A response that is awaited or read from a replica.

    Attributes:
        cancel: ends it from outside.
        last: time of the last byte; infinite while the client is not ready for more.
        begun: whether output has arrived.
        request_id: of the request. headers: gives those with which the replica may be asked for it.
        streams: it is to be a stream. headless: its head has not arrived. comments: seconds after which a comment comes at the
            latest; 0 if that is not known.
        asked: the replica is being asked for it. asked_at: when it was asked last. why_lost: why no answer will come, by what
            it said; empty if it may. judged_at: the time of the last byte that this is about.
        aborted: why it was ended from outside; empty if it was not.
    """

    cancel: Callable[[], object]
    last: float
    begun: bool = False
    request_id: str = ""
    headers: Callable[[], Mapping[str, str]] = field(default=dict, repr=False)
    streams: bool = False
    headless: bool = True
    comments: float = 0.0
    asked: bool = False
    asked_at: float = -math.inf
    why_lost: str = ""
    judged_at: float = -math.inf
    aborted: str = ""
    lost: bool = False

    @property
    def is_lost(self) -> bool:
        """Whether its replica does not have it (any more), and nothing has come since that was known."""
        return bool(self.why_lost) and self.judged_at == self.last

    def abort(self, reason: str, *, lost: bool = False) -> None:
        """`lost`: its connection is dead, and the replica may be alive."""
        if not self.aborted:  # a task that is cancelled twice does not know why
            self.aborted, self.lost = reason, lost
            self.cancel()

    def error(self) -> ReplicaFailed:
        """Why it was ended from outside."""
        return (RequestLost if self.lost else ReplicaFailed)(self.aborted)


def no_answer(error: BaseException, seconds: float | None = None) -> str:
    """Why a request to a replica had no answer, for people, by one of `CONNECTION_ERRORS`; within `seconds`, if given."""
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"cannot connect: {connection_reason(error)}"
    if isinstance(error, TimeoutError):
        return "no answer in time" if seconds is None else f"no answer within {seconds:g} s"
    return f"the connection broke ({type(error).__name__})"


def is_refusal(status: int) -> bool:
    """Whether a status of 400 or more is about the request, not about the replica: 501 is vLLM's for what a model cannot do."""
    return status < 500 or status == 501


def stamp_of(weights: str) -> str:
    """The `system_fingerprint` of a Foreword server's responses."""
    return f"fp_{weights[:12]}"


class ProbeResult(NamedTuple):
    """Result of a health probe.

    Attributes:
        problem: None if the replica is healthy.
        certain: one such result is enough to open the circuit.
        unreachable: no answer; streams from the replica will not continue.
        timed_out: no answer within the time limit.
    """

    problem: str | None = None
    certain: bool = False
    unreachable: bool = False
    timed_out: bool = False


HEALTHY: Final = ProbeResult()


class ReplicaProbe:
    """Asks replicas for their health and for what they serve."""

    def __init__(self, config: RouterConfig, session: aiohttp.ClientSession, headers: Mapping[str, str]) -> None:
        self._config = config
        self._session = session
        self._headers = headers
        self._timeout = aiohttp.ClientTimeout(total=config.health_seconds)
        self._readings = LogprobReadings()

    async def health(self, upstream: Upstream) -> ProbeResult:
        """Probe `/ready` (Foreword servers), then `/health` (vLLM), then `/v1/models` (any other server)."""
        try:
            for path in ("/ready", "/health", "/v1/models"):
                status, body = await self._get(upstream.url + path)
                if status < 300 or (path == "/v1/models" and status in (401, 403)):
                    return HEALTHY
                if status != 404 or path == "/v1/models":
                    reason = body.get("reason")
                    return ProbeResult(f"{path} says {status}{f': {reason}' if reason else ''}", status == 503)
        except CONNECTION_ERRORS as error:
            problem, late = no_answer(error, self._config.health_seconds), isinstance(error, TimeoutError)
            return ProbeResult(problem, isinstance(error, aiohttp.ClientConnectorError), True, late)
        return HEALTHY

    async def death(self, upstream: Upstream) -> str:
        """Why a replica counts as dead; empty if it is alive: also while it refuses new requests. A client waits for it."""
        try:
            status, _ = await self._get(f"{upstream.url}/health", self._config.health_timeout)
        except CONNECTION_ERRORS as error:
            return no_answer(error, self._config.health_timeout)
        return f"/health says {status}" if status >= 500 else ""

    async def has_restarted(self, upstream: Upstream) -> bool:
        """Whether its process is another one than when it was asked what it serves. False if that is not known."""
        known = upstream.info.started if upstream.info is not None else None
        if known is None:
            return False
        try:
            return (await self.metrics(upstream)).started not in (None, known)
        except CONNECTION_ERRORS:
            return False

    async def post(self, url: str, data: bytes, timeout: aiohttp.ClientTimeout) -> tuple[int, bytes]:
        """Status and body of the answer. Raises what aiohttp raises, and ReplicaFailed."""
        headers = {**self._headers, "content-type": "application/json"}
        async with self._session.post(
            url, data=data, headers=headers, timeout=timeout, allow_redirects=False
        ) as response:
            return response.status, await read_whole(response, _MAX_PROBE_BYTES)

    async def info(self, upstream: Upstream) -> ReplicaInfo:
        """Raises ReplicaFailed."""
        try:
            status, listed = await self._get(f"{upstream.url}/v1/models")
            if status != 200 or not isinstance(listed.get("data"), list):
                hint = " (--replica-key)" if status in (401, 403) else ""
                raise ReplicaFailed(f"/v1/models says {status}{hint}")
            cards = tuple(card for card in listed["data"] if isinstance(card, dict) and isinstance(card.get("id"), str))
            if not cards:
                raise ReplicaFailed("/v1/models names no model")
            return await self._details(upstream, cards, listed.get("salt_from"))
        except CONNECTION_ERRORS as error:
            raise ReplicaFailed(f"/v1/models failed: {type(error).__name__}") from None

    async def _details(
        self, upstream: Upstream, cards: tuple[Mapping[str, Any], ...], salt_from: object
    ) -> ReplicaInfo:
        # Adapters have a parent; the base model comes first.
        cards = tuple(sorted(cards, key=lambda card: bool(card.get("parent"))))
        owner, length = cards[0].get("owned_by"), cards[0].get("max_model_len")
        kind = owner if owner in ("foreword", "vllm") else "openai"
        names = tuple(str(card["id"]) for card in cards)
        max_model_len = length if isinstance(length, int) and 0 < length <= _MAX_MODEL_LEN else None
        if kind == "openai":
            return ReplicaInfo(kind, names, cards, max_model_len)
        metrics = await self.metrics(upstream)
        metrics, name, problem = await self._weights(upstream, names[0], max_model_len, kind, metrics)
        return ReplicaInfo(
            kind,
            names,
            cards,
            max_model_len,
            metrics.block_size,
            metrics.capacity_tokens,
            transfer=await self._transfer(upstream) if kind == "foreword" else None,
            event_sources=await self._event_sources(upstream),
            salt_from=salt_from if isinstance(salt_from, str) else None,
            tokenize_path="/v1/tokenize" if kind == "foreword" else "/tokenize",
            dialects=await self._dialects(upstream) if kind == "vllm" else frozenset(),
            weights=metrics.fingerprint or name,
            published=metrics.fingerprint is not None,
            unknown_because=problem,
            started=metrics.started,
        )

    async def _weights(
        self, upstream: Upstream, model: str, max_model_len: int | None, kind: str, metrics: ReplicaMetrics
    ) -> tuple[ReplicaMetrics, str | None, str]:
        """The metrics with the fingerprint of the weights. Without one, a name for them by their log-probabilities, or None and
        the reason. Raises what aiohttp raises for `/metrics`."""
        if metrics.fingerprint is not None:
            return metrics, None, ""
        if kind != "vllm":
            return metrics, None, "its /metrics do not contain their fingerprint"
        name, problem = None, ""
        try:
            name = await self.name_by_logprobs(upstream, model, max_model_len)
        except ReplicaFailed as error:
            problem = error.message
        for _ in range(_LOOKS if metrics.has_connector else 0):
            if (found := await self.metrics(upstream)).fingerprint is not None:
                return found, None, ""
            await asyncio.sleep(_LOOK_SECONDS)
        return metrics, name, problem

    async def name_by_logprobs(self, upstream: Upstream, model: str, max_model_len: int | None) -> str:
        """A name for its weights, the same as for other replicas that compute the same. Raises ReplicaFailed."""
        body, limit = logprobs_probe.request_body(model, max_model_len), aiohttp.ClientTimeout(total=_LOGPROBS_SECONDS)
        try:
            status, data = await self.post(f"{upstream.url}/v1/completions", body, limit)
        except CONNECTION_ERRORS as error:
            raise ReplicaFailed(f"it returned no log-probabilities: {type(error).__name__}") from None
        if status != 200:
            hint = " (--replica-key)" if status in (401, 403) else ""
            raise ReplicaFailed(f"it returned no log-probabilities: /v1/completions says {status}{hint}")
        return self._readings.name(model, logprobs_probe.read_response(data))

    async def metrics(self, upstream: Upstream) -> ReplicaMetrics:
        """The replica's metrics, from the first 8 MiB. Raises what aiohttp raises."""
        found = bytearray()
        async with self._session.get(f"{upstream.url}/metrics", timeout=self._timeout) as response:
            while response.status == 200 and len(found) < _MAX_METRICS_BYTES:
                if not (piece := await response.content.readany()):
                    break
                found += piece
        return await asyncio.to_thread(parse_metrics, found.decode("utf-8", "replace"))

    async def _transfer(self, upstream: Upstream) -> str | None:
        status, body = await self._get(f"{upstream.url}/v1/instance")
        found = body.get("transfer") if status == 200 else None
        return found if isinstance(found, str) else None

    async def _event_sources(self, upstream: Upstream) -> tuple[ReplicaEvents, ...]:
        host, spec = urlsplit(upstream.url).hostname or "", upstream.spec
        status, body = await self._get(f"{upstream.url}/kv_event_sources")
        found = list(body.values()) if status == 200 else []
        found = [one for one in found if isinstance(one, dict) and isinstance(one.get("endpoint"), str)]
        found = [one for one in found if one.get("publisher", "zmq") == "zmq"]
        if spec.events is not None:
            curve = any(one.get("curve") is True for one in found)
            found = [{"endpoint": spec.events, "replay_endpoint": spec.replay, "curve": curve}]
        return tuple(_source(one, host) for one in found)

    async def _dialects(self, upstream: Upstream) -> frozenset[str]:
        """Dialects whose paths the replica knows: it refuses another method there."""
        statuses = {name: (await self._get(upstream.url + PATHS[name]))[0] for name in TRANSLATED}
        return frozenset(name for name, status in statuses.items() if status == 405)

    async def _get(self, url: str, seconds: float | None = None) -> tuple[int, dict[str, Any]]:
        """Status and the object in the body; an empty one for any other body."""
        timeout = self._timeout if seconds is None else aiohttp.ClientTimeout(total=seconds)
        async with self._session.get(url, headers=self._headers, timeout=timeout, allow_redirects=False) as response:
            try:
                data = await read_whole(response, _MAX_PROBE_BYTES)
            except ReplicaFailed:
                return response.status, {}
            return response.status, decode_object(data) if response.content_type.endswith("json") else {}


def _source(told: Mapping[str, Any], host: str) -> ReplicaEvents:
    replay = told.get("replay_endpoint")
    reachable = _reachable(replay, host) if isinstance(replay, str) else None
    return ReplicaEvents(_reachable(told["endpoint"], host), reachable, told.get("curve") is True)


def _reachable(endpoint: str, host: str) -> str:
    """Replace "all addresses" in a ZeroMQ endpoint by the replica's host."""
    shown = f"[{host}]" if ":" in host else host
    for anywhere in ANY_ADDRESS:
        if endpoint.startswith(anywhere):
            return f"tcp://{shown}:{endpoint.removeprefix(anywhere)}"
    return endpoint


async def read_whole(response: aiohttp.ClientResponse, limit: int = MAX_RESPONSE_BYTES) -> bytes:
    """A whole body. Raises ReplicaFailed if it is too long, and what aiohttp raises."""
    data = bytearray()
    while piece := await response.content.readany():
        data += piece
        if len(data) > limit:
            raise ReplicaFailed("the replica sent a response without end")
    return bytes(data)
