"""The simulation: arrivals, steps and loads in order of virtual time."""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from foreword.blocks import BlockTable
from foreword.blocks.keys import Scope, chain_keys
from foreword.errors import ConfigError
from foreword.routing.baselines import policy_named
from foreword.routing.directory import CacheTier, Directory
from foreword.routing.fleet import Fleet
from foreword.routing.placement import PlacementQuery, Policy
from foreword.sim.costs import EngineCosts, FleetSpec
from foreword.sim.replica import MODEL, Outcome, ReplicaTotals, SimReplica
from foreword.sim.stores import SimStores, SimTier
from foreword.sim.trace import TraceRequest


@dataclass(frozen=True, slots=True)
class Result:
    """What a simulation gave.

    Attributes:
        name: what it is called among others.
        outcomes: in the order of the trace.
        replicas: what each did.
        moved: requests whose session or conversation was somewhere else before.
        seconds: virtual time from the first arrival to the last token; `wall` is what simulating took.
    """

    name: str
    policy: str
    spec: FleetSpec
    costs: EngineCosts
    outcomes: Sequence[Outcome]
    replicas: dict[str, ReplicaTotals]
    moved: int
    seconds: float
    wall: float


def simulate(
    trace: Iterable[TraceRequest],
    spec: FleetSpec | None = None,
    policy: Policy | str = "cost",
    costs: EngineCosts | None = None,
    *,
    name: str | None = None,
    progress: Callable[[int], None] | None = None,
) -> Result:
    """Send a trace through a fleet.

    The scheduler, the pool, the eviction policy of stores, the directory and the placement are the real ones; time, the
    device and the bytes are not. `name` is the result's, the policy's if it is not given. `progress` is called with the number
    of requests that arrived, every hundred.

    Raises ConfigError for an unknown policy, an empty trace, or a prompt that does not fit into a replica's device.
    """
    run = _Run(list(trace), spec or FleetSpec(), policy, costs or EngineCosts(), progress)
    return run.go(name)


class _Run:
    """State of one simulation."""

    def __init__(
        self,
        trace: Sequence[TraceRequest],
        spec: FleetSpec,
        policy: Policy | str,
        costs: EngineCosts,
        progress: Callable[[int], None] | None,
    ) -> None:
        if not trace:
            raise ConfigError("the trace has no requests")
        self.trace, self.spec, self.costs, self.progress = trace, spec, costs, progress
        self.root = Scope(MODEL, spec.block_size, b"").root()
        self.now = 0.0
        self.next_arrival = trace[0].arrival
        self.order = itertools.count()
        self.agenda: list[tuple[float, int, Callable[[], None]]] = []
        self.outcomes = [Outcome(request) for request in trace]
        chosen = policy_named(policy) if isinstance(policy, str) else policy
        self.fleet = Fleet(chosen, directory=Directory(4 * self._all_blocks()))
        shared = [SimTier(CacheTier.SHARED, spec.shared_tokens // spec.block_size)] if spec.shared_tokens else []
        self.replicas = {f"r{i}": self._make_replica(f"r{i}", shared) for i in range(spec.replicas)}

    def _all_blocks(self) -> int:
        spec = self.spec
        own = spec.device_tokens + spec.host_tokens + spec.disk_tokens
        return max((own * spec.replicas + spec.shared_tokens) // spec.block_size, 1024)

    def _make_replica(self, name: str, shared: Sequence[SimTier]) -> SimReplica:
        spec, directory = self.spec, self.fleet.directory
        self.fleet.add(
            name,
            sends_events=spec.events,
            capacity_tokens=spec.device_tokens,
            costs=None if spec.learns else self.costs.as_known(spec.max_batch_tokens),
        )

        def stored(tier: CacheTier, parent: bytes, keys: Sequence[bytes]) -> None:
            if spec.events:
                directory.stored(name, tier, parent, keys)

        def removed(tier: CacheTier, keys: Sequence[bytes]) -> None:
            if spec.events:
                directory.removed(name, tier, keys)

        def published(table: BlockTable, start: int, end: int) -> None:
            stored(CacheTier.DEVICE, table.chain.key_before(start), table.chain.keys_to(end)[start:end])

        def wait(seconds: float, then: Callable[[], None]) -> None:
            self._at(self.now + seconds, lambda: self._after_load(name, then))

        sizes = ((CacheTier.HOST, spec.host_tokens), (CacheTier.DISK, spec.disk_tokens))
        own = [SimTier(tier, tokens // spec.block_size) for tier, tokens in sizes if tokens >= spec.block_size]
        tiers = [*own, *shared]
        stores = SimStores(tiers, self.costs, spec.block_size, wait, stored, removed) if tiers else None
        return SimReplica.make(
            name,
            spec,
            self.costs,
            stores,
            self,
            published,
            lambda keys: removed(CacheTier.DEVICE, keys),
        )

    def go(self, name: str | None) -> Result:
        started = time.perf_counter()
        arrivals = iter(enumerate(self.trace))
        upcoming = next(arrivals, None)
        while upcoming is not None or self.agenda:
            if upcoming is not None and (not self.agenda or upcoming[1].arrival <= self.agenda[0][0]):
                number, request = upcoming
                self.now = request.arrival
                upcoming = next(arrivals, None)
                self.next_arrival = upcoming[1].arrival if upcoming is not None else math.inf
                self._arrive(number, request)
            else:
                self.now, _, then = heapq.heappop(self.agenda)
                then()
        self._check_ends()
        wall = time.perf_counter() - started
        totals = {name: replica.totals for name, replica in self.replicas.items()}
        policy = self.fleet.policy.name
        return Result(
            name or policy,
            policy,
            self.spec,
            self.costs,
            self.outcomes,
            totals,
            self.fleet.sessions_moved,
            self.now,
            wall,
        )

    def _at(self, when: float, then: Callable[[], None]) -> None:
        heapq.heappush(self.agenda, (when, next(self.order), then))

    def _arrive(self, number: int, request: TraceRequest) -> None:
        size = self.spec.block_size
        if -(-(request.prompt_tokens + request.output_tokens) // size) > self.spec.device_tokens // size:
            raise ConfigError(
                f"request {number} of the trace has {request.prompt_tokens + request.output_tokens} tokens: more than a "
                f"device with {self.spec.device_tokens} can hold"
            )
        tokens = request.tokens()
        keys = chain_keys(self.root, tokens, size)
        query = PlacementQuery(keys, request.prompt_tokens, size, request.session)
        decision = self.fleet.place(query, self.now)
        self.fleet.sent(str(number), query, decision, self.now)
        assert decision.replica is not None
        outcome = self.outcomes[number]
        outcome.replica, outcome.expected_cached = decision.replica, decision.expected_cached
        replica = self.replicas[decision.replica]
        replica.add(number, outcome, tokens, keys)
        self._begin(replica)
        if self.progress is not None and number % 100 == 99:
            self.progress(number + 1)

    def _begin(self, replica: SimReplica) -> None:
        """Start a step if none is under way."""
        if replica.step is not None:
            return
        seconds = replica.begin(self.now, self.next_arrival)
        if seconds is not None:
            self._at(self.now + seconds, lambda: self._end(replica))

    def _end(self, replica: SimReplica) -> None:
        replica.end(self.now)
        self._begin(replica)

    def _after_load(self, name: str, then: Callable[[], None]) -> None:
        then()
        self._begin(self.replicas[name])

    # What a router sees

    def first_token(self, number: int, outcome: Outcome) -> None:
        self.fleet.first_token(str(number), self.now)

    def finished(self, number: int, outcome: Outcome) -> None:
        self.fleet.finished(
            str(number),
            self.now,
            cached_tokens=outcome.cached_tokens,
            output_tokens=outcome.request.output_tokens,
        )

    def _check_ends(self) -> None:
        open_ends = sum(outcome.finished < 0 for outcome in self.outcomes)
        if open_ends:
            raise ConfigError(f"{open_ends} requests never ended: too little memory for what runs at once")
