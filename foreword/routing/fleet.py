"""All that a router decides with: what replicas hold, what they have to do, what time costs there. Pure; times are given.

    fleet.add("a"); fleet.add("b")
    decision = fleet.place(query, now)            where to?
    fleet.sent("request-1", query, decision, now)
    fleet.first_token("request-1", now)
    fleet.finished("request-1", now, cached_tokens=4096, output_tokens=200)

One thread calls it. Seconds are of any one clock that never goes back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from foreword.errors import ConfigError, NotFound, did_you_mean
from foreword.routing.costs import Learner, ReplicaCosts
from foreword.routing.directory import Directory, Holdings, Reach
from foreword.routing.disaggregation import Disaggregation
from foreword.routing.estimated_directory import Accuracy, Estimate, InFlight
from foreword.routing.load import Load, Sent
from foreword.routing.placement import Candidate, CheapestFirstToken, Decision, Policy, Query
from foreword.routing.sessions import Sessions

Role = Literal["both", "prefill", "decode"]

_UNKNOWN_CAPACITY: Final = 65_536
_USUAL_OUTPUT: Final = 256
# Answers shorter than this tell little of the time between tokens.
_TOLD_TOKENS: Final = 8
# What was learned of a replica is believed for so long without anything new.
_STALE_SECONDS: Final = 60.0


@dataclass(slots=True)
class Replica:
    """One replica as the router knows it.

    Attributes:
        role: whether it computes prompts, decodes, or both.
        excluded: why it takes no requests at this moment; empty if it does.
        sends_events: what it holds is known from events; else it is estimated.
        capacity_tokens: of its KV memory, None if that is not known.
        reported_tokens, reported_running: what it says itself that it has to do, beyond what was sent from here.
        learned_at: when something was learned of its costs last.
    """

    name: str
    role: Role = "both"
    excluded: str = ""
    sends_events: bool = False
    block_size: int | None = None
    capacity_tokens: int | None = None
    max_queued: int | None = None
    reported_tokens: int = 0
    reported_running: int = 0
    load: Load = field(default_factory=Load)
    learner: Learner = field(default_factory=Learner)
    in_flight: InFlight = field(default_factory=InFlight)
    accuracy: Accuracy = field(default_factory=Accuracy)
    estimate: Estimate | None = None
    learned_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Ended:
    """A request that ended well, for whoever keeps a record (`Fleet.on_finished`).

    Attributes:
        keys: of the prompt's full blocks of `block_size` tokens.
        first_at: when its first token came, None if nobody told.
    """

    replica: str
    session: str | None
    keys: Sequence[bytes]
    block_size: int
    prompt_tokens: int
    output_tokens: int | None
    cached_tokens: int | None
    sent_at: float
    first_at: float | None
    ended_at: float


@dataclass(slots=True)
class _Request:
    """A request in flight. It keeps its replicas, which may be gone by now, or gone and come back. `expected` tokens should be
    found; `guessed` blocks of them are an answer that is only assumed to stand there."""

    replica: Replica
    computes: Replica
    keys: Sequence[bytes]
    block_size: int
    expected: int
    session: str | None
    guessed: int = 0
    in_flight: bool = True


class Fleet:
    """The replicas, and where the next request goes.

    Args:
        policy: decides (`baselines.policy_named`).
        directory: what events tell; give it to the feeds.
        sessions: where sessions were.
        disaggregation: when prompts are computed apart, if there are replicas for that.

    Attributes:
        on_finished: told of every request that ended well.
    """

    def __init__(
        self,
        policy: Policy | None = None,
        *,
        directory: Directory | None = None,
        sessions: Sessions | None = None,
        disaggregation: Disaggregation | None = None,
    ) -> None:
        self.policy = policy or CheapestFirstToken()
        self.directory = directory or Directory()
        self.sessions = sessions or Sessions()
        self.disaggregation = disaggregation or Disaggregation()
        self.replicas: dict[str, Replica] = {}
        self.moved = 0
        self.on_finished: Callable[[Ended], None] | None = None
        self._requests: dict[str, _Request] = {}

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
    ) -> Replica:
        """A replica comes. Raises ConfigError if there is one of that name, or for an unknown role."""
        if name in self.replicas:
            raise ConfigError(f"there is a replica named {name!r} already")
        if role not in ("both", "prefill", "decode"):
            raise ConfigError(f"a replica's role is both, prefill or decode, not {role!r}")
        replica = Replica(name, role, "", sends_events, block_size, capacity_tokens, max_queued, learner=Learner(costs))
        self.replicas[name] = replica
        return replica

    def remove(self, name: str) -> None:
        """A replica goes; requests in flight there are still told as finished. Raises NotFound."""
        self._replica(name)
        del self.replicas[name]
        self.directory.cleared(name)
        self.sessions.left(name)

    def exclude(self, name: str, reason: str) -> None:
        """A replica takes no new requests: `reason` says why (`draining`, `unhealthy: ...`); an empty one takes it back in.
        Raises NotFound."""
        self._replica(name).excluded = reason

    def restarted(self, name: str) -> None:
        """A replica lost what it held. Raises NotFound."""
        estimate = self._replica(name).estimate
        if estimate is not None:
            estimate.cleared()
        self.directory.cleared(name)

    # Requests

    def place(self, query: Query, now: float, *, avoid: Sequence[str] = ()) -> Decision:
        """Where a request should go. Changes nothing but the policy's own state. `avoid` names replicas where it failed."""
        home = self.sessions.home(query.session, query.keys, now)
        found = self.candidates(query, now, avoid)
        decode = [one for one in found if self.replicas[one.name].role != "prefill"]
        if len(decode) == len(found):
            return self.policy.choose(query, decode, home)
        prefill = [one for one in found if self.replicas[one.name].role != "decode"]
        return self.disaggregation.choose(query, prefill, decode, self.policy, home)

    def candidates(self, query: Query, now: float, avoid: Sequence[str] = ()) -> list[Candidate]:
        """Every replica as it stands now, for this request."""
        held: dict[int, Holdings] = {}
        found: list[Candidate] = []
        for replica in self.replicas.values():
            size = replica.block_size or query.block_size
            keys = query.keys_at(size)
            if size not in held:
                held[size] = self.directory.held(keys)
            reach = _at_least(held[size].of(replica.name), _expected_blocks(replica, keys))
            found.append(self._candidate(replica, query, reach, size, now, replica.name in avoid))
        return found

    def _candidate(
        self, replica: Replica, query: Query, reach: Reach, size: int, now: float, avoided: bool
    ) -> Candidate:
        load, costs = replica.load, self._costs(replica, now)
        excluded = replica.excluded or ("it failed this request" if avoided else "")
        queued, work = len(load.waiting), load.queued(now, costs)
        if not excluded and replica.max_queued is not None and queued >= replica.max_queued:
            excluded = f"overloaded: {queued} requests wait there"
        return Candidate(
            replica.name,
            costs,
            reach,
            work.tokens + replica.reported_tokens,
            queued,
            len(load.running) + replica.reported_running,
            load.memory_wait(_resident(query), replica.capacity_tokens),
            size,
            excluded,
            work.pairs,
            load.recent_tokens(now),
        )

    def _costs(self, replica: Replica, now: float) -> ReplicaCosts:
        """What time costs on a replica. One that has served nothing yet, or nothing for a minute while others did, is taken for
        one like these: else one that looks slow by mistake would be avoided for ever."""
        if not self._is_stale(replica, now):
            return replica.learner.costs
        known = [one.learner.costs for one in self.replicas.values() if not self._is_stale(one, now)]
        known.sort(key=lambda costs: costs.prefill)
        return known[(len(known) - 1) // 2] if known else replica.learner.costs

    def _is_stale(self, replica: Replica, now: float) -> bool:
        return replica.learner.is_guess or now - replica.learned_at > _STALE_SECONDS

    def sent(self, request: str, query: Query, decision: Decision, now: float) -> None:
        """A request went where the decision says. Raises ConfigError if a request of that name is in flight, NotFound if the
        decision names no replica."""
        if request in self._requests:
            raise ConfigError(f"a request named {request!r} is in flight already")
        chosen = decision.price
        if decision.replica is None or chosen is None:
            raise NotFound(decision.in_words())
        decoding = self._replica(decision.replica)
        computing = self._replica(decision.prefill) if decision.prefill else decoding
        size = computing.block_size or query.block_size
        keys = query.keys_at(size)
        load = computing.load
        queued = load.queued(now, computing.learner.costs)
        sent = Sent(query.tokens, chosen.computed, _resident(query), now, queued, len(load.running))
        load.sent(request, sent, now)
        coming = computing.in_flight.leading(keys)
        computing.in_flight.add(keys)
        guessed = 0
        if not computing.sends_events:
            estimate = self._estimate(computing, size)
            guessed = max(chosen.reused // size - max(estimate.known(keys), coming), 0)
            estimate.sent(keys)
        else:
            self.directory.touched(computing.name, keys[: chosen.reused // size])
        self._requests[request] = _Request(decoding, computing, keys, size, chosen.reused, query.session, guessed)
        self.moved += decision.home is not None and decision.home != decision.replica
        self.sessions.went(query.session, query.keys, decision.replica, now)

    def first_token(self, request: str, now: float) -> None:
        """The first token of a request came. Unknown requests are ignored."""
        known = self._requests.get(request)
        if known is None:
            return
        _land(known)
        sent = known.computes.load.first_token(request, now)
        if sent is not None and known.computes is not known.replica:
            # The prompt was computed apart: from now on the request decodes elsewhere.
            known.computes.load.finished(request, now)
            known.replica.load.running[request] = sent
            known.replica.load.resident += sent.resident
            if not known.replica.sends_events and known.replica.block_size in (None, known.block_size):
                self._estimate(known.replica, known.block_size).sent(known.keys)

    def finished(
        self,
        request: str,
        now: float,
        *,
        cached_tokens: int | None = None,
        output_tokens: int | None = None,
        guessed: bool = False,
    ) -> None:
        """A request ended well; `cached_tokens` is what the answer says was found. `guessed`: when its first token came was not
        seen, so nothing is learned from that. Unknown requests are ignored."""
        known = self._requests.pop(request, None)
        if known is None:
            return
        _land(known)
        computing, decoding = known.computes, known.replica
        running = len(decoding.load.running)
        sent = _end(request, known, now)
        if cached_tokens is not None:
            computing.accuracy.note(known.expected, cached_tokens)
            if computing.estimate is not None:
                size = known.block_size
                expected = known.expected // size
                computing.estimate.answered(known.keys, expected, -(-cached_tokens // size), expected - known.guessed)
        if sent is None:
            return
        if decoding.estimate is not None and output_tokens:
            # The last token of an answer is never computed.
            filled = (sent.tokens + output_tokens - 1) // known.block_size - len(known.keys)
            decoding.estimate.ended(known.keys, filled)
        if self.on_finished is not None:
            self.on_finished(_ended(known, sent, now, cached_tokens, output_tokens, guessed))
        if not sent.has_begun or guessed:
            return
        if cached_tokens is not None:
            sent = replace(sent, computed=max(sent.tokens - cached_tokens, 1))
        own, before = sent.work, sent.queued
        if self._is_stale(computing, now):
            computing.learner.believe(self._costs(computing, now))
        computing.learned_at = now
        computing.learner.note_first_token(
            before.tokens + own.tokens,
            sent.running,
            sent.first_at - sent.sent_at,
            pairs=before.pairs + own.pairs,
        )
        if output_tokens is not None and output_tokens >= _TOLD_TOKENS:
            decoding.learner.note_decode(running, (now - sent.first_at) / (output_tokens - 1))

    def failed(self, request: str, now: float) -> None:
        """A request ended without an answer, or its client went away: nothing is learned from it. Unknown ones are ignored."""
        known = self._requests.pop(request, None)
        if known is not None:
            _land(known)
            _end(request, known, now)

    def _estimate(self, replica: Replica, block_size: int) -> Estimate:
        if replica.estimate is None:
            tokens = replica.capacity_tokens
            replica.estimate = Estimate(max(tokens // block_size, 1) if tokens else _UNKNOWN_CAPACITY)
        return replica.estimate

    def _replica(self, name: str) -> Replica:
        if name not in self.replicas:
            raise NotFound(f"there is no replica named {name!r}{did_you_mean(name, self.replicas)}")
        return self.replicas[name]

    @property
    def requests_in_flight(self) -> int:
        return len(self._requests)


def _ended(
    known: _Request, sent: Sent, now: float, cached_tokens: int | None, output_tokens: int | None, guessed: bool
) -> Ended:
    first_at = sent.first_at if sent.has_begun and not guessed else None
    return Ended(
        known.replica.name,
        known.session,
        known.keys,
        known.block_size,
        sent.tokens,
        output_tokens,
        cached_tokens,
        sent.sent_at,
        first_at,
        now,
    )


def _land(known: _Request) -> None:
    """Its prompt is computed, or never will be."""
    if known.in_flight:
        known.computes.in_flight.remove(known.keys)
    known.in_flight = False


def _end(request: str, known: _Request, now: float) -> Sent | None:
    ended = known.computes.load.finished(request, now)
    return ended or known.replica.load.finished(request, now)


def _expected_blocks(replica: Replica, keys: Sequence[bytes]) -> int:
    """Leading blocks that no event has told of: being computed now, or estimated."""
    coming = replica.in_flight.leading(keys)
    return max(coming, replica.estimate.leading(keys)) if replica.estimate is not None else coming


def _at_least(reach: Reach, blocks: int) -> Reach:
    return tuple(max(one, blocks) for one in reach) if blocks else reach


def _resident(query: Query) -> int:
    return query.tokens + min(query.max_output or _USUAL_OUTPUT, _USUAL_OUTPUT)
