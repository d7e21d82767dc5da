"""The replicas of one model: placement, and a fair queue for requests when all replicas are overloaded.

Replicas that serve a name may differ in their weights, as during an update of the model. Then all of them get new requests, but
only replicas with equal weights continue each other's responses, compute prompts for each other, and share block keys.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Final

from msgspec import Struct

from foreword.api.request import ReplicaKind
from foreword.blocks.keys import Scope, chain_keys, is_public
from foreword.blocks.salt import Salt
from foreword.errors import BadRequest
from foreword.newest import Newest
from foreword.process_config import RouterConfig
from foreword.request_errors import NoReplica, QueueFull
from foreword.router.attempt import Attempt
from foreword.router.prompts import TokenizedPrompt
from foreword.router.replicas import ReplicaInfo, Upstream, clock
from foreword.router.suspicious import MOST_DEATHS, Ask
from foreword.routing.cost_kinds import MOST_NAME, CostKinds
from foreword.routing.directory import Directory
from foreword.routing.fleet import Disaggregation, Fleet
from foreword.routing.known_prompts import KnownPrompts
from foreword.routing.placement import KeySpace, PlacementQuery
from foreword.routing.policies import policy_named
from foreword.routing.queue import FairQueue, QueueEntry
from foreword.routing.sessions import SessionTable

logger = logging.getLogger(__name__)

_DEFAULT_BLOCK_SIZE: Final = 16
_LEARN_SECONDS: Final = 0.01  # between two requests from which a replica's costs are learned
_MOST_SERVED: Final = 4096
_SESSION_SECONDS: Final = 3600.0  # that an idle session keeps its replica
# Reasons with this prefix are temporary: requests wait for the replica.
_OVERLOADED: Final = "overloaded"


class PlacementRequest(Struct, frozen=True):
    """A request to place.

    Attributes:
        name: unique name of the attempt.
        avoid: URLs of replicas that failed the request.
        ask: which replicas may get it, because of those that died; None for any.
    """

    name: str
    tenant: str
    query: PlacementQuery
    prompt: TokenizedPrompt
    avoid: Sequence[str] = ()
    ask: Ask | None = None


_Queued = tuple[PlacementRequest, asyncio.Future[Attempt]]


class ReplicaPool:
    """The replicas of one model. Runs on one event loop."""

    fleet_type: type[Fleet] = Fleet

    def __init__(
        self,
        model: str,
        config: RouterConfig,
        weights: Mapping[str, float],
        kinds: CostKinds | None = None,
        disaggregation: Disaggregation | None = None,
    ) -> None:
        self.model = model
        self.fleet = self.fleet_type(
            policy_named(config.policy),
            directory=Directory(config.directory_blocks),
            sessions=SessionTable(ttl=_SESSION_SECONDS),
            disaggregation=disaggregation,
            kinds=kinds,
        )
        self.upstreams: dict[str, Upstream] = {}
        # The reports of replicas that joined, also of those that have left and may join again.
        self._served: Newest[str, ReplicaInfo] = Newest(_MOST_SERVED)
        self.known = KnownPrompts(ttl=_SESSION_SECONDS)
        self._patience, self._timeout = config.tokenize_patience, config.tokenize_timeout
        self.queue: FairQueue[_Queued] = FairQueue(config.max_queue, dict(weights))
        # Requests that wait for particular replicas, before the queue and in order: those with the weights that began their
        # response, or those where the same is being asked.
        self._broken: dict[asyncio.Future[Attempt], PlacementRequest] = {}
        self._differing: dict[str, list[str]] = {}
        # All replicas are out because of failed requests, and are used nevertheless.
        self.panic = False
        self._max_waiting, self._max_queue = config.max_waiting, config.max_queue
        self._timer: asyncio.TimerHandle | None = None
        self._note_infos()

    # Replicas

    def _note_infos(self) -> None:
        """Note what each request needs of the replicas, which have joined, changed or left."""
        found = self.upstreams.values()
        kinds = {one.kind for one in found}
        # The kind of server whose requests all replicas understand.
        self.kind: ReplicaKind = (
            "foreword" if kinds <= {"foreword"} else "vllm" if kinds <= {"foreword", "vllm"} else "openai"
        )
        self._tokenizing = [one for one in found if one.info and one.info.tokenize_path]
        self._spaces: dict[str | None, list[KeySpace]] = {}  # by required weights

    def add(self, upstream: Upstream) -> None:
        """Add a replica, or apply a change of what it serves."""
        info = upstream.info
        assert info is not None
        if upstream.url in self.upstreams:
            self.fleet.remove(upstream.url)
        before, self._served[upstream.url] = self._served.get(upstream.url), info
        self.known.interrupted(upstream.url, before is not None and before.has_lost(info))
        self.upstreams[upstream.url] = upstream
        self._note_infos()
        self.fleet.add(
            upstream.url,
            role=upstream.spec.role,  # type: ignore[arg-type]  # checked by parse_spec
            sends_events=bool(info.event_sources),
            block_size=info.block_size,
            capacity_tokens=info.capacity_tokens,
            max_queued=upstream.spec.max_waiting or self._max_waiting,
            weights=info.weights,
            machine=machine_of(info),
            measured=upstream.measured,
        )
        self.refresh(upstream)

    def remove(self, upstream: Upstream) -> None:
        """Streams from the replica continue to their end."""
        if self.upstreams.pop(upstream.url, None) is not None:
            self._note_infos()
            self.fleet.remove(upstream.url)
            self.serve_queue()

    def refresh(self, upstream: Upstream) -> None:
        """Apply a change of a replica's state."""
        if upstream.url in self.upstreams:
            if self.panic or upstream.breaker.state != "closed":
                self._look_for_panic()
            self.fleet.exclude(upstream.url, upstream.excluded(clock()))
            self.serve_queue()

    def _look_for_panic(self) -> None:
        """Use replicas at which requests failed if no other one is in service: then the requests are at fault, most likely, and
        in any case nothing is lost by trying."""
        ones = [one for one in self.upstreams.values() if one.spec.role != "prefill"]
        sound = any(one.breaker.state == "closed" and not one.out_of_service for one in ones)
        panic = not sound and any(one.breaker.by_requests for one in ones)
        if panic == self.panic:
            return
        self.panic = panic
        if panic:
            logger.warning(
                "model %s: all replicas are out because requests failed, and probes succeed: they are used", self.model
            )
        else:
            logger.info("model %s: a replica serves requests again", self.model)
        for one in ones:
            one.panic = panic
            self.fleet.exclude(one.url, one.excluded(clock()))

    def model_names(self) -> set[str]:
        """The names of all models and adapters that its replicas serve."""
        found = {name for upstream in self.upstreams.values() if upstream.info for name in upstream.info.models}
        return found | {self.model}

    def with_weights(self, weights: str) -> list[Upstream]:
        """The replicas that are known to have these weights."""
        return [one for one in self.upstreams.values() if one.weights == weights]

    def check_continuable(self, weights: str) -> None:
        """Raises NoReplica, with the reasons, if no replica in service is known to have these weights."""
        if all(one.out_of_service for one in self.with_weights(weights)):
            reasons = [f"{url}: {one.out_of_service or _other(one)}" for url, one in self.upstreams.items()]
            raise NoReplica(f"no replica with its weights takes requests: {'; '.join(reasons) or 'there is none'}")

    def by_weights(self) -> dict[str, list[str]]:
        """The URLs of the replicas in service whose weights are known, by their weights."""
        found: dict[str, list[str]] = {}
        for url, one in sorted(self.upstreams.items()):
            if one.weights is not None and not one.out_of_service:
                found.setdefault(one.weights, []).append(url)
        return found

    def report_weights(self) -> None:
        """Log when replicas begin to differ in their weights, and when they do not any more."""
        found = self.by_weights()
        differing = found if len(found) > 1 else {}
        if differing.keys() != self._differing.keys():
            if differing:
                listed = "; ".join(f"{short(weights)} at {', '.join(urls)}" for weights, urls in differing.items())
                logger.warning(
                    "model %s: its replicas have different weights: %s. All of them get new requests; a response is only "
                    "continued by a replica with the weights that began it", self.model, listed,
                )  # fmt: skip
            else:
                logger.info("model %s: all of its replicas whose weights are known have the same again", self.model)
        self._differing = differing

    def tokenizing_replicas(self, avoid: Sequence[str] = (), weights: str | None = None) -> list[Upstream]:
        """Replicas that can tokenize: the least loaded first, those to avoid last. With `weights` only those that have them."""
        if not (found := self._tokenizing):
            return []
        now = clock()
        if weights is not None:
            found = [one for one in found if one.weights == weights]
        return sorted(found, key=lambda one: (one.url in avoid, bool(one.excluded(now)), one.in_flight, one.url))

    def speaks(self, dialect: str) -> bool:
        """Whether all of its replicas take requests of this dialect as they came, and compute and answer them alone."""
        found = self.upstreams.values()
        return all(one.info is not None and dialect in one.info.dialects and one.spec.role == "both" for one in found)

    # Placement

    @property
    def needs_prompts(self) -> bool:
        """Whether prompts must be tokenized: placement depends on them, or they are recorded."""
        return (self.fleet.policy.needs_prompts and len(self.upstreams) > 1) or self.fleet.on_finished is not None

    def query(
        self,
        prompt: TokenizedPrompt,
        model: str | None,
        salt: Salt,
        session: str | None,
        max_output: int | None,
        required_weights: str | None = None,
    ) -> PlacementQuery:
        spaces, name = self._key_spaces(required_weights), model or self.model
        weights, size = main = spaces[0]
        keys = self._keys(prompt, name, main, salt)
        several, public = len(spaces) > 1, self.fleet.directory.public.keys
        return PlacementQuery(
            keys,
            max(prompt.count, 1),
            size,
            session,
            max_output,
            {space: self._keys(prompt, name, space, salt) for space in spaces[1:]} if several else {},
            weights,
            required_weights,
            self._public_keys(prompt, name, spaces, salt) if public else {},
            {url: tokens for url, tokens in prompt.held.items() if url in self.fleet.replicas},
            prompt.home,
        )

    def worth_waiting(self, tokens: int, before: int) -> float:
        """Seconds that a request may wait to learn the last `tokens` tokens of its prompt: what it would take to compute them.
        A recorded request waits as long as a replica may take to tokenize it."""
        if self.fleet.on_finished is not None:
            return self._timeout
        now = clock()
        slowest = max((one.costs(now).compute(tokens, before) for one in self.fleet.replicas.values()), default=0.0)
        return min(max(slowest, self._patience), self._timeout)

    def _key_spaces(self, required_weights: str | None) -> list[KeySpace]:
        """Weights and block sizes of the replicas: those of most of them first, for every router the same."""
        found = self._spaces.get(required_weights)
        if found is None:
            infos = [one.info for one in self.upstreams.values() if one.info is not None]
            found = self._spaces[required_weights] = _key_spaces(infos, required_weights)
        return found

    def _keys(self, prompt: TokenizedPrompt, model: str, space: KeySpace, salt: Salt) -> list[bytes]:
        weights, size = space
        try:
            return chain_keys(_root(key_model(model, weights), size, salt), prompt.tokens, size)
        except BadRequest:  # invalid token ids; the replica reports the error
            return []

    def _public_keys(
        self, prompt: TokenizedPrompt, model: str, spaces: Sequence[KeySpace], salt: Salt
    ) -> dict[KeySpace, list[bytes]]:
        public, found = self.fleet.directory.public, dict[KeySpace, list[bytes]]()
        for space in spaces:
            scope = Scope(key_model(model, space[0]).encode(), space[1], salt)
            with contextlib.suppress(BadRequest):
                keys = public.keys_of(scope, prompt.tokens)
                if keys and is_public(keys[0]):
                    found[space] = keys
        return found

    def repeats(self, query: PlacementQuery) -> bool:
        """Whether it is a single prompt that ends with the same full block as an earlier one: not a conversation that grows."""
        if query.session is not None:
            return False
        now, find = clock(), self.fleet.sessions.find
        known = find(None, query.keys[-1:], now)
        return bool(known or (query.other_keys and any(find(None, k[-1:], now) for k in query.other_keys.values())))

    async def place(self, request: PlacementRequest) -> Attempt:
        """Place a request, after waiting in the queue if necessary. Raises QueueFull or NoReplica."""
        has_begun = request.query.required_weights is not None
        ask = request.ask if request.ask is not None and not request.ask.quiet else None
        bound = has_begun or (ask is not None and ask.allowed() is not None)
        attempt = self._try_place(request) if bound or not len(self.queue) else None
        if attempt is not None:
            return attempt
        if bound and not has_begun and self.waiting >= self._max_queue:
            raise QueueFull("The queue is full; retry later")
        return await (self._wait_for_some(request) if bound else self._wait(request))

    def _try_place(self, request: PlacementRequest) -> Attempt | None:
        """None if all suitable replicas are overloaded. Raises NoReplica if there are none, or if too many died."""
        now = clock()
        only = self._only(request) if request.ask is not None and not request.ask.quiet else None
        if only is not None and not any(self._is_free(url, now) for url in only):
            return None
        for upstream in self.upstreams.values():
            if upstream.pause_until:
                self.fleet.exclude(upstream.url, upstream.excluded(now))
        query = request.query
        closed = () if only is None else tuple(self.upstreams.keys() - only)
        decision = self.fleet.place(query, now, avoid=(*request.avoid, *closed))
        if decision.replica is None and request.avoid:
            decision = self.fleet.place(query, now, avoid=closed)
        if decision.replica is None:
            if only is not None or any(estimate.excluded.startswith(_OVERLOADED) for estimate in decision.estimates):
                return None
            raise NoReplica(decision.in_words())
        self.fleet.sent(request.name, query, decision, now)
        upstream = self.upstreams[decision.replica]
        upstream.in_flight += 1
        prefill = self.upstreams.get(decision.prefill) if decision.prefill else None
        for one in (upstream, prefill):
            if one is not None and one.measuring is not None:
                one.measuring.cancel()
        if upstream.breaker.half_open:
            upstream.trial = True
        if upstream.trial or upstream.in_flight >= upstream.max_in_flight:
            self.fleet.exclude(upstream.url, upstream.excluded(now))
        if prefill is not None and request.ask is not None and request.ask.spare < MOST_DEATHS:
            prefill = None
        attempt = Attempt(request.name, upstream, decision, query, request.prompt, 0.0, now, upstream.weights, prefill)
        if request.ask is not None:
            attempt.flight = request.ask.sent(upstream.url, *([prefill.url] if prefill is not None else ()))
        return attempt

    def _only(self, request: PlacementRequest) -> frozenset[str] | None:
        """The only replicas that may get a request, because others died at what it asks, or may be about to; None for any.
        Raises SuspiciousRequest."""
        ask, weights = request.ask, request.query.required_weights
        if ask is None or (only := ask.allowed()) is not None or not ask.deaths:
            return only if ask is not None else None
        # Where it would cost the least, and where a death would tell that it was this request.
        carriers, able = ask.carriers(), self.free(request.avoid, weights)
        best = min(able, key=lambda url: (url in carriers, self.upstreams[url].in_flight, url), default=None)
        return frozenset((best,)) if best is not None else None

    def _is_free(self, url: str, now: float) -> bool:
        """Whether a replica of this URL takes requests to answer them now."""
        one = self.upstreams.get(url)
        return (
            one is not None
            and one.spec.role != "prefill"
            and not one.excluded(now)
            and not self.fleet.replicas[url].is_full
        )

    def free(self, avoid: Sequence[str], weights: str | None) -> set[str]:
        """Replicas that take requests to answer them now, but for those to avoid. With `weights` only those that have them."""
        now = clock()
        able = (url for url, one in self.upstreams.items() if weights in (None, one.weights))
        return {url for url in able if url not in avoid and self._is_free(url, now)}

    # The queue

    @property
    def waiting(self) -> int:
        """Number of requests that wait for a replica."""
        return len(self.queue) + len(self._broken)

    @property
    def queued_seconds(self) -> float:
        """Prompt work that is not done yet, in seconds of one replica."""
        return self.fleet.queued_seconds(clock(), self.queue.cost)

    async def _wait_for_some(self, request: PlacementRequest) -> Attempt:
        """Wait for particular replicas. The number of responses that have begun is bounded by that of the requests in flight:
        unlike a new request, none is refused for it."""
        future: asyncio.Future[Attempt] = asyncio.get_running_loop().create_future()
        self._broken[future] = request
        return await self._placed(future, lambda: self._broken.pop(future, None))

    def _serve_broken(self) -> None:
        """Place requests that wait for particular replicas, each while one of these has room."""
        for future, request in list(self._broken.items()):
            weights = request.query.required_weights
            if future.done() or (self._has_hope(weights) and not self._has_room(weights)):
                continue
            attempt = self._place_waiting(request, future)
            if attempt is not None:
                future.set_result(attempt)

    def _place_waiting(self, request: PlacementRequest, future: asyncio.Future[Attempt]) -> Attempt | None:
        """Place a request that waits. What that raises is its own error, not that of the request which has made room."""
        try:
            return self._try_place(request)
        except Exception as error:  # noqa: BLE001 - handed to the request that waits
            future.set_exception(error)
            return None

    async def _wait(self, request: PlacementRequest) -> Attempt:
        future: asyncio.Future[Attempt] = asyncio.get_running_loop().create_future()
        entry, displaced = self.queue.push((request, future), request.tenant, request.query.tokens, clock())
        if displaced is not None:
            _fail(displaced, QueueFull("The queue is full, and this tenant has the largest share of it; retry later"))

        def leave() -> None:
            self.queue.remove(entry)
            self._broken.pop(future, None)

        return await self._placed(future, leave)

    async def _placed(self, future: asyncio.Future[Attempt], leave: Callable[[], object]) -> Attempt:
        """Wait for a place. `leave` removes what still waits for it."""
        began = clock()
        self._set_timer()
        try:
            attempt = await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                self.failed(future.result())
            raise
        finally:
            leave()
        attempt.queued = clock() - began
        return attempt

    def serve_queue(self) -> None:
        """Place queued requests while a replica has room."""
        if self._broken:
            self._serve_broken()
        while len(self.queue) and self._has_room():
            entry = self.queue.pop(clock())
            if entry is None:
                break
            request, placed = entry.item
            if placed.done():  # its client disconnected
                continue
            attempt = self._place_waiting(request, placed)
            if attempt is not None:
                placed.set_result(attempt)
            elif not placed.done() and request.ask is not None and request.ask.allowed() is not None:
                self._broken[placed] = request
            else:
                _fail(entry, NoReplica("No replica could take the request when its turn in the queue came"))
        if len(self.queue) and not self._has_hope():
            while (entry := self.queue.pop(clock())) is not None:
                _fail(entry, NoReplica("No replica takes requests any more"))
        self._set_timer()

    def _has_room(self, weights: str | None = None) -> bool:
        """Whether a replica takes requests now. With `weights` only those count that have them."""
        return bool(self.free((), weights))

    def _has_hope(self, weights: str | None = None) -> bool:
        """Whether a replica takes requests now or when it is not overloaded any more. `weights` as for `_has_room`."""
        now = clock()
        able = [one for one in self.upstreams.values() if weights in (None, one.weights)]
        reasons = ((one.excluded(now), one.trial) for one in able)
        return any(not reason or reason.startswith(_OVERLOADED) or trial for reason, trial in reasons)

    def _set_timer(self) -> None:
        """Wake up when the pause of an overloaded replica ends."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self.waiting:
            return
        now = clock()
        pauses = [one.pause_until - now for one in self.upstreams.values() if one.pause_until > now]
        if pauses:
            self._timer = asyncio.get_running_loop().call_later(max(min(pauses), 0.005), self.serve_queue)

    # Results of attempts

    def first_token(self, attempt: Attempt) -> None:
        self.fleet.first_token(attempt.id, clock())
        if attempt.flight is not None and attempt.begun:
            attempt.flight.waits = False
        if self.waiting:
            self.serve_queue()

    def expect_first_token(self, attempt: Attempt) -> None:
        """For a response that is not streamed: its prompt counts as computed at the expected time."""
        estimate = attempt.decision.estimate
        seconds = estimate.total if estimate is not None else 0.0
        attempt.first_token_timer = asyncio.get_running_loop().call_later(seconds, self.first_token, attempt)

    def finished(
        self, attempt: Attempt, cached: int | None, output: int | None, prompt_tokens: int | None = None
    ) -> None:
        """The attempt succeeded. `cached` and `prompt_tokens` are as reported by the replica."""
        if attempt.prompt.chain is not None:
            self.known.computed(attempt.prompt.chain, prompt_tokens, named=self._is_named(attempt))
        if cached is not None and attempt.prompt.source == "text":
            # The prompt was compared as text: convert to its units.
            cached = round(cached * attempt.query.tokens / prompt_tokens) if prompt_tokens else None
        if not attempt.prompt.tokens or attempt.prefill is not None:
            # Nothing was expected, or the number includes what came from the prefill replica.
            cached = None
        now, guessed = clock(), attempt.first_token_timer is not None
        if attempt.flight is not None:
            attempt.flight.served()
        try:
            if guessed:
                self.fleet.first_token(attempt.id, now)
            known = guessed or (self.fleet.on_finished is None and self._has_learned(attempt.upstream.url, now))
            self.fleet.finished(attempt.id, now, cached_tokens=cached, output_tokens=output, guessed=known)
        finally:
            self._release(attempt)

    def _has_learned(self, url: str, now: float) -> bool:
        """Whether a replica's costs are those of a request that ended just now. Learning takes more than placing does, and a
        hundred requests a second show as much as all."""
        replica = self.fleet.replicas.get(url)
        return replica is not None and now - replica.learned_at < _LEARN_SECONDS

    def _is_named(self, attempt: Attempt) -> bool:
        """Whether the table of blocks tells where a prompt is: its events may be late, or name none of its blocks."""
        replica, query = self.fleet.replicas.get(attempt.upstream.url), attempt.query
        if replica is None or not replica.sends_events:
            return True
        space = replica.key_space(query)
        ends = [keys[-1:] for keys in (query.keys_in(space), query.public_keys.get(space, ())) if keys]
        return not ends or any(self.fleet.directory.lookup(end).of(replica.name)[-1] for end in ends)

    def failed(self, attempt: Attempt) -> None:
        """The attempt failed, or the client disconnected. Without effect if it was ended."""
        if attempt.ended:
            return
        try:
            self.fleet.failed(attempt.id, clock())
        finally:
            self._release(attempt)

    def _release(self, attempt: Attempt) -> None:
        upstream = attempt.upstream
        attempt.ended = True
        attempt.end_span()
        if attempt.first_token_timer is not None:
            attempt.first_token_timer.cancel()
        upstream.in_flight -= 1
        upstream.trial = False
        self.refresh(upstream)
        if attempt.flight is not None:
            attempt.flight.left()


def _key_spaces(infos: Sequence[ReplicaInfo], required_weights: str | None) -> list[KeySpace]:
    if required_weights is not None:
        infos = [info for info in infos if info.weights == required_weights]
    counts = Counter((info.weights or "", info.block_size) for info in infos if info.block_size is not None)
    known = sorted(counts, key=lambda space: (-counts[space], space))
    size = known[0][1] if known else _DEFAULT_BLOCK_SIZE
    # A replica that does not say its block size is looked up with that of the others.
    rest = {(info.weights or "", size) for info in infos if info.block_size is None}
    return known + sorted(rest.difference(known)) or [(required_weights or "", size)]


def _fail(entry: QueueEntry[_Queued], error: Exception) -> None:
    _, placed = entry.item
    if not placed.done():
        placed.set_exception(error)


def key_model(model: str, weights: str | None) -> str:
    """The model in the router's block keys: KV of other weights never has an equal key."""
    return f"{model}\x00{weights}" if weights else model


def _other(upstream: Upstream) -> str:
    return "it has other weights" if upstream.weights is not None else "its weights are not known"


def short(weights: str) -> str:
    """Weights in a log line."""
    return weights[:16]


@lru_cache(maxsize=1024)
def _root(model: str, block_size: int, salt: Salt) -> bytes:
    return Scope(model.encode(), block_size, salt).root()


def machine_of(info: ReplicaInfo) -> str:
    """The name of a replica's machine, from what it reports that its speed depends on.

    That is engine, model, context, block size and, within a factor of two, the size of its KV memory, which tells most
    accelerators apart: no replica names its own.
    """
    memory = 0 if not info.capacity_tokens else round(math.log2(info.capacity_tokens))
    return f"{info.kind} {info.models[0]} {info.max_model_len} {info.block_size} 2^{memory}"[:MOST_NAME]
