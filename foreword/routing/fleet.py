"""All state that a router decides with: what replicas hold, their load, and their costs. Pure; times are given.

    fleet.add("a"); fleet.add("b")
    decision = fleet.place(query, now)
    fleet.sent("request-1", query, decision, now)
    fleet.first_token("request-1", now)
    fleet.finished("request-1", now, cached_tokens=4096, output_tokens=200)

Not thread-safe. Times are seconds of any monotonic clock.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from types import MappingProxyType
from typing import Final, Literal

from foreword.errors import ConfigError, NotFound, did_you_mean
from foreword.routing.cost_kinds import CostKinds, Measurement
from foreword.routing.costs import FOLLOWERS_PER_PLACE, NO_WORK, CostModel, ReplicaCosts, ReplicaLoad, SentRequest
from foreword.routing.directory import (
    CacheTier,
    Directory,
    EstimateAccuracy,
    EstimatedBlocks,
    Holdings,
    InFlightPrefixes,
    Reach,
)
from foreword.routing.placement import (
    USUAL_OUTPUT,
    USUAL_SHARE,
    Candidate,
    CostEstimate,
    CostPolicy,
    Decision,
    KeySpace,
    PlacementQuery,
    Policy,
)
from foreword.routing.sessions import SessionHome, SessionTable
from foreword.routing.shortlist import MAX_PRICED, Shortlist

Role = Literal["both", "prefill", "decode"]

_DEFAULT_CAPACITY_BLOCKS: Final = 65_536
_RESERVED_OUTPUT: Final = 256
# Weight of a request in the means of recent requests.
_MEAN_WEIGHT: Final = 1 / 64
# Time constant of the means of those that come, in seconds.
_COMING_SECONDS: Final = 60.0
# Shorter outputs say little about the inter-token latency.
_MIN_DECODE_TOKENS: Final = 8
# Learned costs count as stale after this time without an observation.
_STALE_SECONDS: Final = 60.0
# Why a replica takes no request of a certain kind.
_FAILED: Final = "it failed this request"
_OTHER_WEIGHTS: Final = "it is not known to have the weights that began the response"
_OTHER_SESSION: Final = "the session's other requests were served with other weights"
NO_REASONS: Final[Mapping[str, str]] = MappingProxyType({})


@dataclass(slots=True)
class ReplicaState:
    """The router's knowledge of one replica.

    Attributes:
        excluded: why it takes no requests now; empty if it does.
        sends_events: its blocks are known from KV events; otherwise they are estimated.
        capacity_tokens: capacity of its KV memory; None if unknown.
        reported_running: requests that it reports beyond those sent by this router.
        learned_at: time of the last observation of its costs.
        weights: which weights it serves; None if that is not known.
    """

    name: str
    role: Role = "both"
    excluded: str = ""
    sends_events: bool = False
    block_size: int | None = None
    capacity_tokens: int | None = None
    max_queued: int | None = None
    reported_running: int = 0
    load: ReplicaLoad = field(default_factory=ReplicaLoad)
    cost_model: CostModel = field(default_factory=CostModel)
    in_flight_prefixes: InFlightPrefixes = field(default_factory=InFlightPrefixes)
    accuracy: EstimateAccuracy = field(default_factory=EstimateAccuracy)
    estimated_blocks: EstimatedBlocks | None = None
    learned_at: float = -math.inf
    weights: str | None = ""

    def key_space(self, query: PlacementQuery) -> KeySpace:
        """The key space of the query that is for it."""
        return self.weights or "", self.block_size or query.block_size

    def is_stale(self, now: float) -> bool:
        """Whether its costs were never learned, or not recently."""
        return now - self.learned_at > _STALE_SECONDS

    def costs(self, now: float) -> ReplicaCosts:
        """Its expected costs; stale ones are those of all replicas of its kind.

        Otherwise one that once looked slow by mistake would never be used again.
        """
        return self.cost_model.common_costs if self.is_stale(now) else self.cost_model.costs

    def estimate(self, block_size: int) -> EstimatedBlocks:
        """The estimated blocks, created at the first call."""
        if self.estimated_blocks is None:
            tokens = self.capacity_tokens
            self.estimated_blocks = EstimatedBlocks(
                max(tokens // block_size, 1) if tokens else _DEFAULT_CAPACITY_BLOCKS
            )
        return self.estimated_blocks

    def refusal(self, unsuited: str = "") -> str:
        """Why it takes no request, or not one for which it is `unsuited`; empty if it does."""
        if self.excluded or unsuited:
            return self.excluded or unsuited
        return f"overloaded: {len(self.load.waiting)} requests wait there" if self.is_full else ""

    @property
    def is_full(self) -> bool:
        """Whether as many requests wait for their first token as may."""
        return self.max_queued is not None and len(self.load.waiting) >= self.max_queued <= self.load.places

    def leading_without_events(self, keys: Sequence[bytes], above: int = 0, guess: int = 0) -> int:
        """Leading blocks that are being computed there or are estimated to be cached, or `above` if that is more.

        Faster if `guess` blocks are estimated.
        """
        estimated = self.estimated_blocks
        known = above if estimated is None else max(estimated.leading(keys, guess), above)
        return self.in_flight_prefixes.leading(keys, known) or known


@dataclass(slots=True, eq=False, kw_only=True)
class PlacedRequest(SentRequest):
    """A request in flight. It refers to its replicas, which may have been removed or replaced by now.

    Attributes:
        decoding, computing: the replicas that decode and compute the prompt; usually the same.
        expected: cached tokens expected.
        guessed: blocks of these that are an earlier output, assumed to be part of the prompt.
        finished_at, cached_tokens, output_tokens: set when it has succeeded; the numbers are None if unknown.
    """

    decoding: ReplicaState
    computing: ReplicaState
    expected: int
    session: str | None
    guessed: int = 0
    in_prefill: bool = True
    finished_at: float = 0.0
    cached_tokens: int | None = None
    output_tokens: int | None = None

    def end_prefill(self) -> None:
        """The prompt is computed, or never will be."""
        if self.in_prefill:
            self.computing.in_flight_prefixes.remove(self.keys)
        self.in_prefill = False

    def end(self, now: float) -> None:
        """Remove the request from the load of its replicas."""
        self.end_prefill()
        self.computing.load.finished(self, now)
        self.decoding.load.finished(self, now)


# The policy that decides whether a prompt is computed on another replica than the one that decodes, given the replicas for
# either, and the name of the session's (`disaggregation.DisaggregationPolicy.choose`).
Disaggregation = Callable[[PlacementQuery, Sequence[Candidate], Sequence[Candidate], Policy, str | None], Decision]


class Fleet:
    """All replicas of one model, and the placement of requests.

    Args:
        policy: the placement policy (`policies.policy_named`).
        directory: blocks known from KV events; shared with the event feeds.
        disaggregation: when prompts are computed on a separate replica; without it prefill replicas get no requests.
        kinds: learned costs by kind of replica; shared with the fleets of other models.

    Attributes:
        sessions_moved: requests that were not placed on their session's replica.
        on_finished: called with every request that succeeded.
    """

    def __init__(
        self,
        policy: Policy | None = None,
        *,
        directory: Directory | None = None,
        sessions: SessionTable | None = None,
        disaggregation: Disaggregation | None = None,
        kinds: CostKinds | None = None,
    ) -> None:
        self.policy = policy or CostPolicy()
        # Both are empty at first, and what is empty counts as false.
        self.directory = directory if directory is not None else Directory()
        self.sessions = sessions if sessions is not None else SessionTable()
        self.disaggregation = disaggregation
        self.replicas: dict[str, ReplicaState] = {}
        self.sessions_moved = 0
        self.on_finished: Callable[[PlacedRequest], None] | None = None
        self._requests: dict[str, PlacedRequest] = {}
        self._weights: Counter[str | None] = Counter()
        self._shortlist = Shortlist()
        # Averages of recent requests: tokens of the output, seconds to the first token and to the last one.
        self._output, self._ttft, self._end_to_end = USUAL_OUTPUT, USUAL_SHARE, 1.0
        # Requests that went to the shortest queue lately and their prefill seconds, decayed by their age.
        self._came, self._came_work, self._came_at = 0.0, 0.0, 0.0
        self.kinds = kinds or CostKinds()

    # Replicas

    def add(
        self,
        name: str,
        *,
        role: Role = "both",
        sends_events: bool = False,
        block_size: int | None = None,
        capacity_tokens: int | None = None,
        max_queued: int | None = None,
        costs: ReplicaCosts | None = None,
        weights: str | None = "",
        machine: str = "",
        measured: Measurement | None = None,
    ) -> ReplicaState:
        """Add a replica. Raises ConfigError for a duplicate name or an unknown role.

        Only replicas with equal `weights` share KV, continue each other's responses and compute prompts for each other. None
        is equal to nothing. `machine` is what a replica reports about itself, and `measured` the time of a prompt there:
        both say which replicas are of one kind, and so have common costs (`cost_kinds`).
        """
        if name in self.replicas:
            raise ConfigError(f"there is a replica named {name!r} already")
        if role not in ("both", "prefill", "decode"):
            raise ConfigError(f"a replica's role is both, prefill or decode, not {role!r}")
        model = CostModel(costs, self.kinds.of(role, costs, machine, measured))
        replica = ReplicaState(
            name, role, "", sends_events, block_size, capacity_tokens, max_queued, cost_model=model, weights=weights
        )
        self._join(replica)
        self.replicas[name] = replica
        self._weights[weights] += 1
        for one in self.replicas.values() if len(self.replicas) == MAX_PRICED + 1 else (replica,):
            self._rank(one)
        return replica

    def remove(self, name: str) -> None:
        """Remove a replica. Its requests in flight may still be reported as finished. Raises NotFound."""
        weights = self._replica(name).weights
        del self.replicas[name]
        self._weights[weights] -= 1
        self._weights += Counter()  # drops those that no replica has
        self._shortlist.discard(name)
        self.directory.cleared(name)
        self.sessions.remove_replica(name)

    def exclude(self, name: str, reason: str) -> None:
        """Send no new requests to a replica; an empty `reason` includes it again. Raises NotFound."""
        replica = self._replica(name)
        if replica.excluded != reason:
            replica.excluded = reason
            if not reason:
                self._join(replica)
            self._rank(replica)

    def measured(self, name: str, machine: str, measured: Measurement) -> None:
        """Apply the time of a prompt on a replica that was added without it, and begin to learn anew. Raises NotFound."""
        replica = self._replica(name)
        replica.cost_model = CostModel(None, self.kinds.of(replica.role, None, machine, measured))
        self._rank(replica)

    def _join(self, replica: ReplicaState) -> None:
        """Apply that a replica begins to take requests."""
        others = (one for one in self.replicas.values() if one is not replica and one.role == replica.role)
        # Some are enough: a large fleet is added one by one.
        replica.load.join([one.load for one in islice(others, MAX_PRICED) if not one.excluded])

    def _rank(self, replica: ReplicaState) -> None:
        """Apply a change of a replica's load to the order in which replicas of a large fleet are considered."""
        if len(self.replicas) <= MAX_PRICED or self.replicas.get(replica.name) is not replica:
            return
        if replica.refusal():
            self._shortlist.discard(replica.name)
            return
        load, costs = replica.load, replica.cost_model.costs
        queued = load.rank(costs, len(load.running) + replica.reported_running, replica.capacity_tokens)
        self._shortlist.update(replica.name, replica.role, costs.prefill, queued, load.recent_rank())

    # Placement

    def place(self, query: PlacementQuery, now: float, *, avoid: Sequence[str] = ()) -> Decision:
        """Choose a replica. Changes only the policy's state. `avoid` names replicas where the request failed.

        A session stays with its weights while a replica with them takes requests.
        """
        session, unsuited = self.home(query, now), dict.fromkeys(avoid, _FAILED)
        home = session.replica if session is not None else None
        if query.required_weights is not None:
            return self._place(query, now, self._without(query.required_weights, _OTHER_WEIGHTS) | unsuited, home)
        if session is not None and session.weights and len(self._weights) > 1:
            decision = self._place(query, now, self._without(session.weights, _OTHER_SESSION) | unsuited, home)
            if decision.replica is not None:
                return decision
        return self._place(query, now, unsuited, home)

    def home(self, query: PlacementQuery, now: float) -> SessionHome | None:
        """Where the query's session was served last, or else the prompt that it continues."""
        if query.session is not None or not query.other_keys:
            best = self.sessions.find(query.session, query.keys, now)
        else:
            spaces = {query.key_space: query.keys, **query.other_keys}
            found = [(size, self.sessions.find(None, keys, now)) for (_, size), keys in spaces.items()]
            known = [(size * one.blocks, one) for size, one in found if one is not None]
            best = max(known, key=lambda pair: pair[0])[1] if known else None
        if best is None:
            replica = self.replicas.get(query.continues)
            return None if replica is None else SessionHome(replica.name, replica.weights)
        replica = self.replicas.get(best.replica or "") if query.session is None else None
        if replica is not None:
            # A next turn has the answer of the one before. While that waits for its first token, this one only begins alike.
            keys = query.keys_in(replica.key_space(query))
            if replica.in_flight_prefixes.leading(keys) >= best.blocks:
                return None
        return best

    def _without(self, weights: str, reason: str) -> dict[str, str]:
        """The reason for all replicas that are not known to have these weights."""
        return {name: reason for name, one in self.replicas.items() if one.weights != weights}

    def _place(self, query: PlacementQuery, now: float, unsuited: Mapping[str, str], home: str | None) -> Decision:
        """`unsuited`: why some replicas do not take this request."""
        if self.policy.needs_all or len(self.replicas) <= MAX_PRICED:
            return self._choose(query, self.candidates(query, now, unsuited), home)
        decision = self._choose(query, self.shortlisted(query, now, unsuited, home), home)
        if decision.replica is not None:
            return decision
        # Only now the reasons of all replicas matter.
        refusals = [(name, one.refusal(unsuited.get(name, ""))) for name, one in self.replicas.items()]
        if not all(refusal for _, refusal in refusals):
            return self._choose(query, self.candidates(query, now, unsuited), home)
        estimates = tuple([CostEstimate(name, excluded=refusal) for name, refusal in refusals])
        return Decision(None, estimates, "none", home=home)

    def _choose(self, query: PlacementQuery, candidates: Sequence[Candidate], home: str | None) -> Decision:
        decode = [one for one in candidates if self.replicas[one.name].role != "prefill"]
        if len(decode) == len(candidates) or self.disaggregation is None:
            return self.policy.choose(query, decode, home)
        prefill = [one for one in candidates if self.replicas[one.name].role != "decode"]
        return self.disaggregation(query, prefill, decode, self.policy, home)

    def candidates(
        self, query: PlacementQuery, now: float, unsuited: Mapping[str, str] = NO_REASONS
    ) -> list[Candidate]:
        """The present state of every replica for this request. `unsuited`: why some do not take it."""
        return self._candidates(query, now, unsuited, dict.fromkeys(self.replicas, 1.0), {})

    def shortlisted(
        self, query: PlacementQuery, now: float, unsuited: Mapping[str, str] = NO_REASONS, home: str | None = None
    ) -> list[Candidate]:
        """The present state of the replicas that may be the best for this request: a bounded number (`shortlist`)."""
        lookups: dict[KeySpace, Holdings] = {}
        held = {name: tokens for name, tokens in query.held.items() if name in self.replicas}
        own = int(CacheTier.DISK)
        for space in {query.key_space, *query.other_keys}:
            keys = query.keys_in(space)
            lookups[space] = self._lookup(query, space)
            found = self._shortlist.sent_to(keys)
            for name, reach in lookups[space].replicas.items():
                found[name] = reach[own]
            if query.other_keys:  # a replica may have had other weights before
                same = {
                    name for name in found if name in self.replicas and self.replicas[name].key_space(query) == space
                }
                found = {name: blocks for name, blocks in found.items() if name in same}
            held.update([(name, max(blocks * space[1], held.get(name, 0))) for name, blocks in found.items() if blocks])
        return self._candidates(query, now, unsuited, self._shortlist.choose(held, home, unsuited), lookups)

    def _lookup(self, query: PlacementQuery, space: KeySpace) -> Holdings:
        found, public = self.directory.lookup(query.keys_in(space)), query.public_keys.get(space)
        return found.or_else(self.directory.lookup(public)) if public else found

    def _candidates(
        self,
        query: PlacementQuery,
        now: float,
        unsuited: Mapping[str, str],
        chosen: Mapping[str, float],
        lookups: dict[KeySpace, Holdings],
    ) -> list[Candidate]:
        """The state of the chosen replicas, each with the number that it stands for. `lookups`: those done."""
        resident, decode_weight = _resident(query), self._ttft / self._end_to_end
        left = math.exp(-max(now - self._came_at, 0.0) / _COMING_SECONDS)
        filling = left * self._came / (left * self._came_work + _COMING_SECONDS)
        found: list[Candidate] = []
        leading, space, keys, holdings = 0, ("", 0), query.keys, Holdings({})
        for name, weight in chosen.items():
            replica = self.replicas[name]
            excluded = replica.refusal(unsuited.get(name, ""))
            if excluded:
                found.append(Candidate(name, excluded=excluded))
                continue
            if (own := replica.key_space(query)) != space:
                space, keys = own, query.keys_in(own)
                holdings = lookups[space] = lookups.get(space) or self._lookup(query, space)
            reach = holdings.of(name)
            # Many replicas hold the same part of the prompt, so the last result is a good guess.
            leading = replica.leading_without_events(keys, reach[0], leading)
            known = max(leading, query.held.get(name, 0) // space[1]) if query.held else leading
            if known > reach[0]:
                reach = tuple([max(one, known) for one in reach])
            found.append(
                _candidate(replica, resident, keys, reach, space[1], now, weight, self._output, decode_weight, filling)
            )
        return found

    def queued_seconds(self, now: float, unplaced: float = 0.0) -> float:
        """Prompt work that is not done yet, in seconds of one replica. `unplaced`: tokens of prompts not sent to one yet."""
        seconds, prefill = 0.0, 0.0
        for replica in self.replicas.values():
            costs = replica.costs(now)
            seconds += replica.load.queued(now, costs).seconds(costs)
            prefill += costs.prefill
        return seconds + (unplaced * prefill / len(self.replicas) if self.replicas else 0.0)

    # Requests in flight

    def sent(self, name: str, query: PlacementQuery, decision: Decision, now: float) -> None:
        """Note that a request was sent as decided.

        Raises ConfigError if a request of that name is in flight, NotFound if the decision names no replica.
        """
        if name in self._requests:
            raise ConfigError(f"a request named {name!r} is in flight already")
        estimate = decision.estimate
        if decision.replica is None or estimate is None:
            raise NotFound(decision.in_words())
        decoding = self._replica(decision.replica)
        computing = self._replica(decision.prefill) if decision.prefill else decoding
        space = computing.key_space(query)
        keys, size = query.keys_in(space), space[1]
        load = computing.load
        in_flight = computing.in_flight_prefixes.leading(keys)
        own = query.tokens - in_flight * size
        request = self._requests[name] = PlacedRequest(
            tokens=query.tokens,
            computed=estimate.computed,
            resident=_resident(query),
            sent_at=now,
            queued=load.queued(now, computing.cost_model.costs),
            running=len(load.running),
            decoding=decoding,
            computing=computing,
            keys=keys,
            block_size=size,
            expected=estimate.reused,
            session=query.session,
            follows=in_flight > 0 and own <= max(size, query.tokens // FOLLOWERS_PER_PLACE),
        )
        load.sent(request, now)
        if not estimate.queue or estimate.queue <= min([one.queue for one in decision.estimates if not one.excluded]):
            left = math.exp(-max(now - self._came_at, 0.0) / _COMING_SECONDS)
            self._came, self._came_work = self._came * left + 1.0, self._came_work * left + estimate.prefill
            self._came_at = now
        request.crowded = load.is_crowded(computing.capacity_tokens)
        self._rank(computing)
        self._shortlist.sent(computing.name, keys, len(self.replicas))
        computing.in_flight_prefixes.add(keys)
        if computing.sends_events:
            for chain in (keys, query.public_keys.get(space, ())):
                self.directory.touched(computing.name, chain[: estimate.reused // size])
        else:
            estimated = computing.estimate(size)
            request.guessed = max(estimate.reused // size - max(estimated.known(keys), in_flight), 0)
            estimated.sent(keys)
        self.sessions_moved += decision.home is not None and decision.home != decision.replica
        session_keys = query.keys_in(decoding.key_space(query))
        self.sessions.record(query.session, session_keys, decision.replica, now, decoding.weights)

    def first_token(self, name: str, now: float) -> None:
        """Note the first token of a request. Unknown requests are ignored."""
        request = self._requests.get(name)
        if request is None:
            return
        request.end_prefill()
        computing, decoding = request.computing, request.decoding
        if computing.load.first_token(request, now) and computing is not decoding:
            # Disaggregated prefill: from now on the request decodes on the other replica.
            computing.load.finished(request, now)
            decoding.load.received(request)
            self._rank(decoding)
            self._shortlist.sent(decoding.name, request.keys, len(self.replicas))
            if not decoding.sends_events and decoding.block_size in (None, request.block_size):
                decoding.estimate(request.block_size).sent(request.keys)
        self._rank(computing)

    def finished(
        self,
        name: str,
        now: float,
        *,
        cached_tokens: int | None = None,
        output_tokens: int | None = None,
        guessed: bool = False,
    ) -> None:
        """Note that a request succeeded, and learn from it. Unknown requests are ignored.

        Args:
            cached_tokens: as reported in the response's usage.
            guessed: the time of the first token was not observed, so it teaches nothing.
        """
        request = self._requests.pop(name, None)
        if request is None:
            return
        running = len(request.decoding.load.running)
        self._end(request, now)
        request.finished_at, request.cached_tokens, request.output_tokens = now, cached_tokens, output_tokens
        if guessed:
            request.first_at = None
        if cached_tokens is not None:
            _correct_estimate(request, cached_tokens)
        estimated = request.decoding.estimated_blocks
        if estimated is not None and output_tokens:
            # The KV of the last output token is never computed.
            filled = (request.tokens + output_tokens - 1) // request.block_size - len(request.keys)
            estimated.output(request.keys, filled)
        if self.on_finished is not None:
            self.on_finished(request)
        if request.first_at is not None:
            self._learn_prefill(request, request.first_at)
            self._learn_lengths(request, request.first_at)
            if output_tokens is not None and output_tokens >= _MIN_DECODE_TOKENS:
                decoding, seconds = request.decoding, now - request.first_at
                computed = decoding.load.computed_since(request)
                decoding.cost_model.observe_decode(running, output_tokens - 1, seconds, computed)

    def _learn_lengths(self, request: PlacedRequest, first_at: float) -> None:
        """Learn how long outputs are, and which share of a request's time passes before its first token."""
        self._ttft += _MEAN_WEIGHT * (first_at - request.sent_at - self._ttft)
        self._end_to_end += _MEAN_WEIGHT * (request.finished_at - request.sent_at - self._end_to_end)
        if request.output_tokens:
            self._output += _MEAN_WEIGHT * (request.output_tokens - self._output)

    def _learn_prefill(self, request: PlacedRequest, first_at: float) -> None:
        """Learn a replica's prompt costs from a TTFT."""
        replica, now = request.computing, request.finished_at
        if request.cached_tokens is not None:
            request.computed = max(request.tokens - request.cached_tokens, 1)
        before, own = request.queued, request.work
        costs = replica.cost_model.costs
        if replica.is_stale(now):
            replica.cost_model.forget()
        replica.learned_at = now
        if not (request.crowded and replica.cost_model.prefill_measured):
            replica.cost_model.observe_first_token(
                before.tokens + own.tokens, request.running, first_at - request.sent_at, pairs=before.pairs + own.pairs
            )
        if replica.cost_model.costs is not costs:
            self._rank(replica)

    def failed(self, name: str, now: float) -> None:
        """Note that a request failed or its client disconnected. Nothing is learned. Unknown requests are ignored."""
        request = self._requests.pop(name, None)
        if request is not None:
            self._end(request, now)

    def _end(self, request: PlacedRequest, now: float) -> None:
        request.end(now)
        self._rank(request.computing)
        if request.decoding is not request.computing:
            self._rank(request.decoding)

    def _replica(self, name: str) -> ReplicaState:
        if name not in self.replicas:
            raise NotFound(f"there is no replica named {name!r}{did_you_mean(name, self.replicas)}")
        return self.replicas[name]


def _candidate(
    replica: ReplicaState,
    resident: int,
    keys: Sequence[bytes],
    reach: Reach,
    block_size: int,
    now: float,
    stands_for: float,
    output: float,
    decode_weight: float,
    filling: float,
) -> Candidate:
    load, costs, capacity, (tokens, pairs) = replica.load, replica.costs(now), replica.capacity_tokens, NO_WORK
    if load.waiting:
        late = load.lateness(now, costs, len(load.running))
        # A head that waits for memory says nothing about how fast the replica is.
        if late > 1 and not load.is_crowded(capacity):
            costs = costs.slower(late)
        tokens, pairs = load.queued(now, costs)
    return Candidate(
        replica.name,
        costs,
        reach,
        tokens,
        len(load.waiting),
        len(load.running) + replica.reported_running,
        load.memory_wait(resident, keys, block_size, capacity) if capacity is not None else 0.0,
        block_size,
        "",
        pairs,
        load.recent_tokens(now),
        stands_for,
        replica.weights,
        load.resident,
        capacity or 0,
        output,
        decode_weight,
        filling,
    )


def _correct_estimate(request: PlacedRequest, cached_tokens: int) -> None:
    """Compare the expected with the actual cached tokens."""
    replica, size = request.computing, request.block_size
    replica.accuracy.record(request.expected, cached_tokens)
    if replica.estimated_blocks is not None:
        expected = request.expected // size
        replica.estimated_blocks.correct(request.keys, expected, -(-cached_tokens // size), expected - request.guessed)


def _resident(query: PlacementQuery) -> int:
    return query.tokens + min(query.max_output or _RESERVED_OUTPUT, _RESERVED_OUTPUT)
