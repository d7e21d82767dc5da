"""The simulation: arrivals, steps and loads in the order of virtual time."""

from __future__ import annotations

import heapq
import itertools
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
from foreword.sim.replica import MODEL, ReplicaTotals, RequestOutcome, SimulatedReplica
from foreword.sim.stores import SimulatedStores, SimulatedTier
from foreword.sim.trace import TraceRequest


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """The result of a simulation.

    Attributes:
        name: distinguishes it from other simulations.
        outcomes: in the order of the trace.
        replicas: totals by replica.
        moved: requests whose session or conversation was on another replica before.
        seconds: virtual time from the first arrival to the last token; `wall` is the real time that the simulation took.
    """

    name: str
    policy: str
    spec: FleetSpec
    costs: EngineCosts
    outcomes: Sequence[RequestOutcome]
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
) -> SimulationResult:
    """Send a trace through a fleet of simulated replicas.

    The scheduler, block pool, eviction policy of stores, directory and placement are the real ones. Time, device and bytes are
    simulated. `name` is the name of the result, by default the policy's. `progress` is called with the number of arrived
    requests, once per hundred.

    Raises ConfigError for an unknown policy, an empty trace, or a request that does not fit into a replica's device.
    """
    simulation = _Simulation(list(trace), spec or FleetSpec(), policy, costs or EngineCosts(), progress)
    return simulation.run(name)


class _Simulation:
    """The state of one simulation."""

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
        self.order = itertools.count()
        self.agenda: list[tuple[float, int, Callable[[], None]]] = []
        self.outcomes = [RequestOutcome(request) for request in trace]
        chosen = policy_named(policy) if isinstance(policy, str) else policy
        self.fleet = Fleet(chosen, directory=Directory(4 * self._all_blocks()))
        shared = [SimulatedTier(CacheTier.SHARED, spec.shared_tokens // spec.block_size)] if spec.shared_tokens else []
        self.replicas = {f"r{i}": self._make_replica(f"r{i}", shared) for i in range(spec.replicas)}

    def _all_blocks(self) -> int:
        spec = self.spec
        own = spec.device_tokens + spec.host_tokens + spec.disk_tokens
        return max((own * spec.replicas + spec.shared_tokens) // spec.block_size, 1024)

    def _make_replica(self, name: str, shared: Sequence[SimulatedTier]) -> SimulatedReplica:
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
        own = [SimulatedTier(tier, tokens // spec.block_size) for tier, tokens in sizes if tokens >= spec.block_size]
        tiers = [*own, *shared]
        return SimulatedReplica(
            spec,
            self.costs,
            self.fleet,
            SimulatedStores(tiers, self.costs, spec.block_size, wait, stored, removed) if tiers else None,
            on_published=published,
            on_removed=lambda keys: removed(CacheTier.DEVICE, keys),
        )

    def run(self, name: str | None) -> SimulationResult:
        started = time.perf_counter()
        arrivals = iter(enumerate(self.trace))
        upcoming = next(arrivals, None)
        while upcoming is not None or self.agenda:
            if upcoming is not None and (not self.agenda or upcoming[1].arrival <= self.agenda[0][0]):
                number, request = upcoming
                self.now = request.arrival
                upcoming = next(arrivals, None)
                self._arrive(number, request)
            else:
                self.now, _, then = heapq.heappop(self.agenda)
                then()
        self._check_ends()
        wall = time.perf_counter() - started
        totals = {name: replica.totals for name, replica in self.replicas.items()}
        policy = self.fleet.policy.name
        return SimulationResult(
            name or policy,
            policy,
            self.spec,
            self.costs,
            self.outcomes,
            totals,
            self.fleet.sessions_moved,
            max(outcome.finished for outcome in self.outcomes),
            wall,
        )

    def _at(self, when: float, then: Callable[[], None]) -> None:
        heapq.heappush(self.agenda, (when, next(self.order), then))

    def _arrive(self, number: int, request: TraceRequest) -> None:
        size = self.spec.block_size
        if -(-(request.prompt_tokens + request.output_tokens) // size) > self.spec.device_tokens // size:
            raise ConfigError(
                f"request {number} of the trace has {request.prompt_tokens + request.output_tokens} tokens: more than a "
                f"device with {self.spec.device_tokens} tokens can hold"
            )
        keys = chain_keys(self.root, request.prompt(), size)
        query = PlacementQuery(keys, request.prompt_tokens, size, request.session)
        decision = self.fleet.place(query, self.now)
        self.fleet.sent(str(number), query, decision, self.now)
        assert decision.replica is not None
        outcome = self.outcomes[number]
        outcome.replica, outcome.expected_cached = decision.replica, decision.expected_cached
        replica = self.replicas[decision.replica]
        ends_at = replica.ends_at
        replica.add(self.now, number, outcome, keys)
        if replica.ends_at != ends_at:
            self._await_end(replica)
        self._begin(replica)
        if self.progress is not None and number % 100 == 99:
            self.progress(number + 1)

    def _begin(self, replica: SimulatedReplica) -> None:
        """Start a step unless one is running."""
        if replica.step is not None:
            return
        if replica.begin(self.now):
            self._await_end(replica)

    def _await_end(self, replica: SimulatedReplica) -> None:
        self._at(replica.ends_at, lambda: self._end(replica))

    def _end(self, replica: SimulatedReplica) -> None:
        """The step is over, unless an arrival has brought its end forward since this was planned."""
        if replica.step is not None and replica.ends_at == self.now:
            replica.end(self.now)
            self._begin(replica)

    def _after_load(self, name: str, then: Callable[[], None]) -> None:
        then()
        self._begin(self.replicas[name])

    def _check_ends(self) -> None:
        unfinished = sum(outcome.finished < 0 for outcome in self.outcomes)
        if unfinished:
            raise ConfigError(f"{unfinished} requests never ended: too little memory for what runs at once")
