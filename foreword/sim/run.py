"""The simulation: arrivals, steps and loads in the order of virtual time."""

from __future__ import annotations

import gc
import heapq
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from foreword.api.quotas import Admitted, Quotas
from foreword.blocks.keys import Scope
from foreword.blocks.prefix_cache import BlockTable
from foreword.blocks.salt import Salt
from foreword.errors import ConfigError
from foreword.request_errors import RateLimited
from foreword.routing.directory import CacheTier, Directory
from foreword.routing.disaggregation import DisaggregationPolicy
from foreword.routing.fleet import Fleet
from foreword.routing.placement import PlacementQuery, Policy
from foreword.routing.policies import policy_named
from foreword.sim.changes import ReplicaChange
from foreword.sim.costs import EngineCosts, FleetSpec
from foreword.sim.prefill import SimulatedPrefill
from foreword.sim.replica import MODEL, ReplicaTotals, SimulatedReplica
from foreword.sim.sequence_tokens import RequestOutcome, SequenceTokens
from foreword.sim.stores import SimulatedStores, SimulatedTier
from foreword.sim.trace import TraceRequest


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """The result of a simulation.

    Attributes:
        name: distinguishes it from other simulations.
        outcomes: in the order of the trace, without rejected requests.
        rejected: requests that exceeded their tenant's quota.
        replicas: totals by replica, also of those that failed or were removed.
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
    rejected: Sequence[TraceRequest] = ()


def simulate(
    trace: Iterable[TraceRequest],
    spec: FleetSpec | None = None,
    policy: Policy | str = "cost",
    costs: EngineCosts | None = None,
    *,
    name: str | None = None,
    progress: Callable[[int], None] | None = None,
    fleet: type[Fleet] = Fleet,
) -> SimulationResult:
    """Send a trace through a fleet of simulated replicas.

    The scheduler, block pool, eviction policy of stores, directory and placement are the real ones. Time, device and bytes are
    simulated. `name` is the name of the result, by default the policy's. `progress` is called with the number of arrived
    requests, once per hundred. `fleet` is the state that placements are decided with: a subclass may see something else than
    what is, such as another clock.

    A request whose replica fails is placed again, with the prompt and its output so far. While no replica runs, requests wait.

    Raises ConfigError for an unknown policy, an empty trace, a request that does not fit into a replica's device, a change that
    is impossible, or requests that no replica took.
    """
    simulation = _Simulation(list(trace), spec or FleetSpec(), policy, costs or EngineCosts(), progress, fleet)
    with _no_collections():
        return simulation.run(name)


@contextmanager
def _no_collections() -> Iterator[None]:
    """Garbage collections would go through all requests again and again; only a replica that ends leaves reference cycles."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _Simulation:
    """The state of one simulation."""

    def __init__(
        self,
        trace: Sequence[TraceRequest],
        spec: FleetSpec,
        policy: Policy | str,
        costs: EngineCosts,
        progress: Callable[[int], None] | None,
        fleet: type[Fleet],
    ) -> None:
        if not trace:
            raise ConfigError("the trace has no requests")
        self.trace, self.spec, self.costs, self.progress = trace, spec, costs, progress
        members, self.changes = spec.members(), deque(spec.resolved_changes())
        # The group of each replica that there is at any time.
        self.groups = members | {change.replica: change.group for change in self.changes}
        # More memory than all requests fill makes no difference.
        most = 2 * sum(one.prompt_tokens + one.output_tokens + spec.block_size for one in trace)
        names = ("", *(group.name for group in spec.all_groups))
        self.specs = {name: spec.of(name).at_most(most) for name in names}
        self.costs_of = {"": costs} | {group.name: group.costs or costs for group in spec.all_groups}
        self.smallest_device = min(self.specs[group].device_tokens for group in self.groups.values())
        self.roots: dict[str, bytes] = {}
        self.quotas = Quotas.parse(spec.quotas)
        self.admitted: dict[int, Admitted] = {}
        self.rejected: set[int] = set()
        self.now = 0.0
        self.order = itertools.count()
        # Time, number, and what happens: the step of a replica ends, of which the name is given, or anything else.
        self.agenda: list[tuple[float, int, str, SimulatedReplica | Callable[[], None]]] = []
        self.outcomes = [RequestOutcome(request) for request in trace]
        chosen = policy_named(policy) if isinstance(policy, str) else policy
        self.fleet = fleet(
            chosen, directory=Directory(4 * self._all_blocks()), disaggregation=DisaggregationPolicy().choose
        )
        tokens = self.specs[""].shared_tokens
        self.shared = [SimulatedTier(CacheTier.SHARED, tokens // spec.block_size)] if tokens else []
        self.replicas: dict[str, SimulatedReplica] = {}
        self.totals: dict[str, ReplicaTotals] = {}
        self.draining: set[str] = set()
        self.unplaced: list[SequenceTokens] = []
        self.received_until: dict[str, float] = {}  # end of the last transfer to each replica
        self.started_at: dict[str, float] = {}
        for name in members:
            self._start(name)

    def _all_blocks(self) -> int:
        specs = [self.specs[group] for group in self.groups.values()]
        own = sum(spec.device_tokens + spec.host_tokens + spec.disk_tokens for spec in specs)
        return max((own + self.specs[""].shared_tokens) // self.spec.block_size, 1024)

    # Replicas

    def _start(self, name: str) -> None:
        """Start a replica with empty memory."""
        if name not in self.totals:
            spec, costs = self.specs[self.groups[name]], self.costs_of[self.groups[name]]
            self.totals[name] = ReplicaTotals()
            self.fleet.add(
                name,
                role=self.spec.role(self.groups[name]),
                sends_events=spec.events,
                capacity_tokens=spec.device_tokens,
                costs=None if spec.learns else costs.as_known(spec.max_batch_tokens),
                measured=costs.measured() if spec.learns else None,
            )
        self.fleet.exclude(name, "")
        self.started_at[name] = self.now
        self.replicas[name] = self._make_replica(name)

    def _stop(self, name: str) -> None:
        """The replica has ended; its memory is lost."""
        self.draining.discard(name)
        self.totals[name].up += self.now - self.started_at.pop(name)
        self.fleet.directory.cleared(name)
        del self.replicas[name]

    def _change(self, change: ReplicaChange) -> None:
        name = change.replica
        if change.action == "fail":
            self.fleet.exclude(name, "failed")
            requests = self.replicas[name].fail(self.now)
            self._stop(name)
            for request in requests:
                self.fleet.failed(str(request.number), self.now)
            for request in requests:
                self._place(request)
        elif change.action == "slow":
            # The step that is being computed ends as it was begun.
            self.replicas[name].costs = self.costs_of[self.groups[name]].scaled(change.factor)
        elif change.action == "remove":
            self.fleet.exclude(name, "removed")
            self.draining.add(name)
            self._begin(name)
        elif name in self.draining:
            self.fleet.exclude(name, "")
            self.draining.discard(name)
        else:
            self._start(name)
        if change.action == "start":
            unplaced, self.unplaced = self.unplaced, []
            for request in unplaced:
                self._place(request)

    def _make_replica(self, name: str) -> SimulatedReplica:
        spec, costs, directory = self.specs[self.groups[name]], self.costs_of[self.groups[name]], self.fleet.directory

        def stored(tier: CacheTier, parent: bytes, keys: Sequence[bytes]) -> None:
            if spec.events:
                directory.stored(name, tier, parent, keys)

        def removed(tier: CacheTier, keys: Sequence[bytes]) -> None:
            if spec.events:
                directory.removed(name, tier, keys)

        def published(table: BlockTable, start: int, end: int) -> None:
            stored(CacheTier.DEVICE, table.chain.key_before(start), table.chain.keys_to(end)[start:end])

        def wait(seconds: float, then: Callable[[], None]) -> None:
            self._at(self.now + seconds, lambda: self._after_load(name, replica, then))

        sizes = ((CacheTier.HOST, spec.host_tokens), (CacheTier.DISK, spec.disk_tokens))
        own = [SimulatedTier(tier, tokens // spec.block_size) for tier, tokens in sizes if tokens >= spec.block_size]
        tiers = [*own, *self.shared]
        replica = SimulatedReplica(
            spec,
            costs,
            self.fleet,
            SimulatedStores(tiers, costs, spec.block_size, wait, stored, removed) if tiers else None,
            self.totals[name],
            on_published=published,
            on_removed=lambda keys: removed(CacheTier.DEVICE, keys),
            on_finished=self._release if self.spec.quotas else None,
            on_prefilled=self._prefilled,
        )
        return replica

    # Requests

    def run(self, title: str | None) -> SimulationResult:
        started = time.perf_counter()
        arrivals = iter(enumerate(self.trace))
        upcoming = next(arrivals, None)
        # Changes after the last request has finished are ignored.
        while upcoming is not None or self.agenda or (self.unplaced and self.changes):
            arrival = upcoming[1].arrival if upcoming is not None else math.inf
            event = self.agenda[0][0] if self.agenda else math.inf
            if self.changes and self.changes[0].at < arrival and self.changes[0].at <= event:
                self.now = self.changes[0].at
                self._change(self.changes.popleft())
            elif upcoming is not None and arrival <= event:
                number, request = upcoming
                self.now = arrival
                upcoming = next(arrivals, None)
                self._arrive(number, request)
            else:
                self.now, _, name, what = heapq.heappop(self.agenda)
                if isinstance(what, SimulatedReplica):
                    self._end(name, what)
                else:
                    what()
        self._check_ends()
        wall = time.perf_counter() - started
        outcomes = [one for number, one in enumerate(self.outcomes) if number not in self.rejected]
        seconds, policy = max(outcome.finished for outcome in outcomes), self.fleet.policy.name
        for replica, started_at in self.started_at.items():
            self.totals[replica].up += max(seconds - started_at, 0.0)
        return SimulationResult(
            title or policy,
            policy,
            self.spec,
            self.costs,
            outcomes,
            self.totals,
            self.fleet.sessions_moved,
            seconds,
            wall,
            [self.trace[number] for number in sorted(self.rejected)],
        )

    def _at(self, when: float, then: Callable[[], None]) -> None:
        heapq.heappush(self.agenda, (when, next(self.order), "", then))

    def _arrive(self, number: int, request: TraceRequest) -> None:
        size, tokens = self.spec.block_size, request.prompt_tokens + request.output_tokens
        if -(-tokens // size) > self.smallest_device // size:
            raise ConfigError(
                f"request {number} of the trace has {tokens} tokens: more than a device with {self.smallest_device} tokens "
                "can hold"
            )
        if self._admit(number, request):
            self._place(SequenceTokens(number, self.outcomes[number]))
        if self.progress is not None and number % 100 == 99:
            self.progress(number + 1)

    def _admit(self, number: int, request: TraceRequest) -> bool:
        if self.spec.quotas:
            try:
                self.admitted[number] = self.quotas.admit(request.tenant, self.now)
            except RateLimited:
                self.rejected.add(number)
                return False
        return True

    def _release(self, request: SequenceTokens) -> None:
        admitted = self.admitted.pop(request.number)
        self.quotas.charge(admitted, len(request), self.now)
        self.quotas.finish(admitted)

    def _root(self, tenant: str) -> bytes:
        root = self.roots.get(tenant)
        if root is None:
            root = self.roots[tenant] = Scope(MODEL, self.spec.block_size, Salt(tenant.encode())).root()
        return root

    def _place(self, request: SequenceTokens) -> None:
        """Send a request to a replica; if it was continued, with its output so far. It waits if there is none."""
        size, outcome = self.spec.block_size, request.outcome
        keys = request.keys(self._root(outcome.request.tenant), size)
        query = PlacementQuery(keys, len(request), size, outcome.request.session, outcome.request.output_tokens)
        decision = self.fleet.place(query, self.now)
        if decision.replica is None:
            self.unplaced.append(request)
            return
        self.fleet.sent(str(request.number), query, decision, self.now)
        outcome.replica = name = decision.replica
        if outcome.first_token < 0:
            outcome.expected_cached = decision.expected_cached
        remote = None
        if decision.prefill is not None:
            remote = SimulatedPrefill(
                decision.prefill,
                name,
                len(request),
                size,
                on_begin=lambda remote: self._prefill(request, keys, remote),
                on_end=lambda remote: self._at(self.now, lambda: self._wake(remote.receiver)),
            )
        self._send(name, request, keys, remote)

    def _send(
        self, name: str, request: SequenceTokens, keys: Sequence[bytes], remote: SimulatedPrefill | None = None
    ) -> None:
        self.replicas[name].add(request, keys, remote)
        self._begin(name)

    # Disaggregated prefill

    def _prefill(self, request: SequenceTokens, keys: Sequence[bytes], remote: SimulatedPrefill) -> None:
        """The receiver has room for a prompt: compute it on the other replica, unless that has failed."""
        if remote.source not in self.replicas:
            remote.failed()
            return
        prompt = SequenceTokens(request.number, request.outcome)
        prompt.length, prompt.computed_for = len(request), remote
        self._send(remote.source, prompt, keys)

    def _prefilled(self, prompt: SequenceTokens, cached_tokens: int) -> None:
        """A prompt is computed: send its KV. Transfers to one replica are serialized."""
        remote = prompt.computed_for
        assert remote is not None
        name = remote.receiver
        cost = self.costs_of[self.groups[name]].transfer
        begins = max(self.now, self.received_until.get(name, 0.0))
        ends = begins + cost.latency + max(remote.tokens - remote.held_tokens, 0) * cost.per_token
        self.received_until[name] = ends
        self._at(ends, lambda: remote.arrived(cached_tokens))

    def _wake(self, name: str) -> None:
        """KV for a waiting prompt has come, or never will."""
        if name in self.replicas:
            self._begin(name)

    def _begin(self, name: str) -> None:
        """Start a step unless one is running. A replica that is being removed ends if it has no more requests."""
        replica = self.replicas[name]
        if replica.step is None and replica.begin(self.now):
            heapq.heappush(self.agenda, (replica.ends_at, next(self.order), name, replica))
        if name in self.draining and replica.is_idle:
            self._stop(name)

    def _end(self, name: str, replica: SimulatedReplica) -> None:
        """The step is over, unless the replica failed."""
        if replica.step is not None:
            replica.end(self.now)
            self._begin(name)

    def _after_load(self, name: str, replica: SimulatedReplica, then: Callable[[], None]) -> None:
        if self.replicas.get(name) is replica:
            then()
            self._begin(name)

    def _check_ends(self) -> None:
        if self.unplaced:
            raise ConfigError(
                f"{len(self.unplaced)} requests were not finished: all replicas had failed or were removed"
            )
        unfinished = sum(outcome.finished < 0 for outcome in self.outcomes) - len(self.rejected)
        if unfinished:
            raise ConfigError(f"{unfinished} requests never ended: too little memory for what runs at once")
