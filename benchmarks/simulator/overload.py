"""Placement by cost against six rules, two simple ones and those of other routers, where a fleet has more to do than it can.

    python -m benchmarks.simulator.overload --conversation mooncake-conversation.jsonl --synthetic synthetic_trace.jsonl \\
        --coding coding-sessions.jsonl.gz [--sets overload,held-out,odd] [--draws 2] [--jobs 2] [--only REGEX] \\
        [--out RESULTS.jsonl]

Virtual time: what the machine does meanwhile makes no difference. A case is a fleet and its traffic; its figures are of all
requests of several draws (other sessions, other starts), since the slowest hundredth of one draw is a handful of requests.
The cases are in three sets: those below, those of `held_out`, which were drawn before the price of 2026-11-29 and not looked at
for it, and the odd fleets of `odd_fleets`. The tables have mean, p50, p90 and p99 of the time to first token, and the mean time
end to end; after each set it says in how many of these figures placement by cost is the best or close to it. A case without its
trace is left out.

With `--out` each result is kept in a file as soon as it is there, and the same command continues where it was stopped. Results
of other code of the simulator, router or rules are computed anew, but with `--keep` they count. A case that was changed needs
another file. `--limit` takes the first requests of each case, for a trial.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import blake2b
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import foreword
from benchmarks.simulator import rivals
from benchmarks.simulator.results import Results, Run
from benchmarks.simulator.rivals import RIVALS
from foreword.errors import ForewordError
from foreword.routing.fleet import Fleet
from foreword.routing.policies import policy_named
from foreword.sim.changes import FleetChange
from foreword.sim.costs import EngineCosts, FleetSpec, ReplicaGroup
from foreword.sim.report import quantile
from foreword.sim.run import simulate
from foreword.sim.trace import TraceRequest, read_trace

POLICIES = ("cost", "longest-prefix", "least-loaded", "two-choices", "sglang", "llm-d", "dynamo")
FIGURES = ("mean", "p50", "p90", "p99", "e2e")
BLOCK = 512
# Within this share of the best a figure counts as the best.
CLOSE = 0.03
FAR = 0.15
_RARE = 0.06

Trace = list[TraceRequest]

# A model of 70 billion parameters on eight accelerators, about.
LARGE = EngineCosts()


@dataclass(frozen=True)
class Traces:
    """The traces that were given, by what they are; empty if not."""

    conversation: Path | None
    synthetic: Path | None
    coding: Path | None

    def has(self, names: str) -> bool:
        return all(getattr(self, name) is not None for name in names.split())


class Draw:
    """Traffic of one draw. Blocks that two parts do not share have different numbers."""

    def __init__(self, traces: Traces, seed: int) -> None:
        self.traces = traces
        self.rng = random.Random(seed)
        self._numbers = count(1)

    def block(self) -> int:
        return next(self._numbers)

    def blocks(self, tokens: int) -> list[int]:
        """Numbers of new blocks for so many tokens."""
        return [self.block() for _ in range(-(-tokens // BLOCK))]

    def renamed(self, requests: Sequence[TraceRequest], **changes: Any) -> Trace:
        """The requests with numbers of this draw: they share blocks with each other only."""
        names = defaultdict[int, int](self.block)
        return [replace(one, ids=array("I", [names[n] for n in one.ids]), **changes) for one in requests]

    # From traces

    def coding(self, sessions: int, spread: float, horizon: float, *, tenant: str = "", longest: int = 10**9) -> Trace:
        """Coding agents' sessions with sub-agents, drawn with replacement; each is another user's. They begin at random within
        `spread` seconds."""
        assert self.traces.coding is not None
        pool = coding_sessions(self.traces.coding)
        found: Trace = []
        for session in self.rng.choices(pool, k=sessions):
            start = self.rng.uniform(0, spread)
            moved = [replace(one, arrival=start + one.arrival) for one in session if one.prompt_tokens < longest]
            found += self.renamed([one for one in moved if one.arrival < horizon], tenant=tenant)
        return found

    def conversation(self, start: float, seconds: float, speed: float = 1.0, *, tenant: str = "") -> Trace:
        """Some minutes of Mooncake's conversations; each draw takes others."""
        assert self.traces.conversation is not None
        start += self.rng.uniform(-300, 300)
        part = [one for one in read(self.traces.conversation) if start <= one.arrival < start + seconds]
        return self.renamed([replace(one, arrival=(one.arrival - start) / speed) for one in part], tenant=tenant)

    def synthetic(self, requests: int, speed: float = 1.0) -> Trace:
        """Some of Mooncake's synthetic requests, about long documents."""
        assert self.traces.synthetic is not None
        whole = read(self.traces.synthetic)
        first = self.rng.randrange(len(whole) - requests)
        part = whole[first : first + requests]
        return self.renamed([replace(one, arrival=(one.arrival - part[0].arrival) / speed) for one in part])

    # Made here

    def arrivals(self, rate: Callable[[float], float] | float, seconds: float) -> Iterator[float]:
        """Poisson arrivals, at most two a second more than the largest rate would be thinned for."""
        if not callable(rate):
            now = self.rng.expovariate(rate)
            while now < seconds:
                yield now
                now += self.rng.expovariate(rate)
            return
        most = max(rate(seconds * i / 100) for i in range(101))
        for now in self.arrivals(most, seconds):
            if self.rng.random() * most < rate(now):
                yield now

    def request(self, now: float, ids: Sequence[int], tokens: int, output: int, **more: Any) -> TraceRequest:
        return TraceRequest(now, array("I", ids), BLOCK, tokens, max(output, 1), **more)

    def lognormal(self, median: float, spread: float, most: float) -> int:
        return int(min(self.rng.lognormvariate(0, spread) * median, most))

    def single(
        self,
        rate: Callable[[float], float] | float,
        seconds: float,
        prompt: tuple[float, float, float],
        output: tuple[float, float, float],
        *,
        common: int = 0,
    ) -> Trace:
        """Single requests. `prompt`, `output`: median, spread and limit of their lengths in tokens; `common`: tokens of
        a system prompt of all."""
        system = self.blocks(common)
        found = []
        for now in self.arrivals(rate, seconds):
            own = max(self.lognormal(*prompt), 1)
            tokens = len(system) * BLOCK + own
            found.append(self.request(now, [*system, *self.blocks(own)], tokens, self.lognormal(*output)))
        return found

    def chats(
        self,
        sessions: int,
        spread: float,
        *,
        turns: int,
        first: tuple[float, float, float],
        more: tuple[float, float, float],
        output: tuple[float, float, float],
        think: float,
        common: int = 0,
    ) -> Trace:
        """Conversations: each turn has the prompt and output before it and some tokens more."""
        system = self.blocks(common)
        found = []
        for number in range(sessions):
            now, length = self.rng.uniform(0, spread), len(system) * BLOCK + self.lognormal(*first)
            ids = [*system]
            for _ in range(1 + int(self.rng.expovariate(1 / max(turns - 1, 1e-9)))):
                ids += self.blocks(max(length - len(ids) * BLOCK, 0))
                answer = max(self.lognormal(*output), 1)
                found.append(self.request(now, ids[: -(-length // BLOCK)], length, answer, session=f"chat-{number}"))
                length += answer + self.lognormal(*more)
                now += self.rng.expovariate(1 / think)
        return found

    def documents(self, rate: Callable[[float], float] | float, seconds: float, number: int, median: float) -> Trace:
        """Questions about documents under one system prompt, which one by Zipf's law."""
        system = self.blocks(2 * BLOCK)
        texts = [[*system, *self.blocks(self.lognormal(median, 0.7, 120_000))] for _ in range(number)]
        weights = [1 / (i + 1) for i in range(number)]
        found = []
        for now in self.arrivals(rate, seconds):
            [text] = self.rng.choices(texts, weights)
            own = self.rng.randrange(50, 400)
            ids = [*text, *self.blocks(own)]
            found.append(self.request(now, ids, len(text) * BLOCK + own, self.lognormal(200, 0.7, 2000)))
        return found

    def fan_outs(self, rate: float, seconds: float) -> Trace:
        """A main agent with a long context that starts four to ten sub-agents at once, several times; each sub-agent has the
        context and a task of its own."""
        found = []
        for now in self.arrivals(rate, seconds):
            ids, length = self.blocks(self.lognormal(30_000, 0.5, 100_000)), 0
            for _ in range(self.rng.randrange(1, 5)):
                length = len(ids) * BLOCK
                for _ in range(self.rng.randrange(4, 11)):
                    own = self.rng.randrange(200, 3000)
                    found.append(
                        self.request(now, [*ids, *self.blocks(own)], length + own, self.lognormal(400, 0.8, 4000))
                    )
                now += self.rng.uniform(15, 60)
                ids = [*ids, *self.blocks(self.lognormal(4000, 0.5, 20_000))]
        return found


@dataclass(frozen=True)
class Case:
    """A fleet and its traffic.

    Attributes:
        needs: the traces that the traffic is of.
        knows: the state that the router decides with.
    """

    traffic: Callable[[Draw], Trace]
    spec: FleetSpec
    needs: str = ""
    costs: EngineCosts = LARGE
    knows: type[Fleet] = Fleet


def fleet(replicas: int, **more: Any) -> FleetSpec:
    return FleetSpec(replicas=replicas, **{"device_tokens": 2_000_000, "block_size": BLOCK} | more)


def slow(*spans: tuple[float, float, str, float]) -> tuple[FleetChange, ...]:
    """Replicas that are slower for a while: from, to, name, factor."""
    return tuple(
        one
        for start, end, name, factor in spans
        for one in (FleetChange(start, "slow", name, factor=factor), FleetChange(end, "slow", name, factor=1.0))
    )


# An eight-billion model on one accelerator, about.
SMALL = EngineCosts(base=0.008, prefill=2.5e-5, attention=6e-10, decode_each=5e-5, decode_context=1.2e-8)
UNEQUAL = (ReplicaGroup("half", 2, costs=LARGE.scaled(2)), ReplicaGroup("quarter", 2, costs=LARGE.scaled(4)))
RESTARTS = tuple(
    change
    for i in range(6)
    for change in (FleetChange(250 + 130 * i, "fail", f"r{i}"), FleetChange(280 + 130 * i, "start", f"r{i}"))
)
TINY: dict[str, Any] = {"device_tokens": 500_000}


def wave(low: float, high: float, seconds: float) -> Callable[[float], float]:
    """A rate that goes from low to high and back in each period of so many seconds."""
    return lambda now: low + (high - low) * abs((now / seconds * 2) % 2 - 1)


CASES: dict[str, Case] = {
    # Agents' sessions.
    "coding-r4": Case(lambda d: d.coding(80, 900, 1500), fleet(4), "coding"),
    "coding-r8": Case(lambda d: d.coding(140, 600, 1200), fleet(8), "coding"),
    "coding-r16": Case(lambda d: d.coding(220, 500, 800), fleet(16), "coding"),
    "slow-r4": Case(
        lambda d: d.coding(60, 600, 1200),
        fleet(4, changes=slow((400, 460, "r1", 10), (800, 860, "r2", 10))),
        "coding",
    ),
    "slow-r8": Case(
        lambda d: d.coding(110, 600, 1200),
        fleet(8, changes=slow((400, 460, "r1", 10), (800, 860, "r2", 10))),
        "coding",
    ),
    "unequal-r6": Case(lambda d: d.coding(75, 600, 1200), fleet(2, groups=UNEQUAL), "coding"),
    "tiny-r6": Case(lambda d: d.coding(110, 600, 1200, longest=300_000), fleet(6, **TINY), "coding"),
    "tiny-host-r6": Case(
        lambda d: d.coding(110, 600, 1200, longest=300_000), fleet(6, **TINY, host_tokens=4_000_000), "coding"
    ),
    "tiny-shared-r6": Case(
        lambda d: d.coding(110, 600, 1200, longest=300_000),
        fleet(6, **TINY, host_tokens=2_000_000, shared_tokens=50_000_000),
        "coding",
    ),
    "burst-r6": Case(
        lambda d: [
            *d.coding(50, 400, 1000),
            *(replace(one, arrival=one.arrival + 400) for one in d.coding(60, 5, 600)),
        ],
        fleet(6),
        "coding",
    ),
    "restarts-r6": Case(lambda d: d.coding(90, 500, 1200), fleet(6, changes=RESTARTS), "coding"),
    "no-events-r6": Case(lambda d: d.coding(110, 600, 1200), fleet(6, events=False), "coding"),
    "scale-out-r4": Case(
        lambda d: d.coding(120, 500, 1200), fleet(4, changes=(FleetChange(400, "add", count=4),)), "coding"
    ),
    # Conversations and documents.
    "conversation-r4": Case(lambda d: d.conversation(1050, 300), fleet(4, device_tokens=1_000_000), "conversation"),
    "conversation-r8": Case(lambda d: d.conversation(1050, 300), fleet(8, device_tokens=1_000_000), "conversation"),
    "conversation-2x-r12": Case(lambda d: d.conversation(2100, 400, 2.0), fleet(12), "conversation"),
    "synthetic-r6": Case(lambda d: d.synthetic(1000), fleet(6, device_tokens=1_000_000), "synthetic"),
    "documents-r4": Case(lambda d: d.documents(2.5, 400, 60, 16_000), fleet(4, device_tokens=400_000)),
    "documents-r12": Case(lambda d: d.documents(8.0, 120, 200, 12_000), fleet(12, device_tokens=400_000)),
    # Several kinds at once.
    "heavy-tenant-r6": Case(
        lambda d: [*d.conversation(450, 300, 0.5, tenant="small"), *d.coding(60, 100, 600, tenant="heavy")],
        fleet(6),
        "conversation coding",
    ),
    "synthetic+coding-r8": Case(
        lambda d: [*d.synthetic(600, 0.5), *d.coding(60, 200, 700)], fleet(8), "synthetic coding"
    ),
    "conversation+coding-r8": Case(
        lambda d: [*d.conversation(1650, 300), *d.coding(60, 100, 400)], fleet(8), "conversation coding"
    ),
    "answers+documents-r6": Case(
        lambda d: [
            *d.single(8.0, 120, (600, 0.8, 8000), (700, 0.7, 4000), common=1024),
            *d.single(0.5, 120, (30_000, 0.6, 150_000), (300, 0.7, 2000)),
        ],
        fleet(6),
    ),
    "batch+chats-r4": Case(
        lambda d: [
            *d.chats(
                60, 300, turns=5, first=(1500, 0.8, 20_000), more=(300, 0.8, 4000), output=(350, 0.8, 3000), think=20
            ),
            *(replace(one, arrival=100.0) for one in d.single(2.0, 60, (20_000, 0.5, 60_000), (400, 0.5, 2000))),
        ],
        fleet(4),
    ),
    # Long outputs.
    "answers-r4": Case(lambda d: d.single(9.0, 120, (900, 0.8, 8000), (800, 0.7, 4000), common=1536), fleet(4)),
    "reasoning-r6": Case(
        lambda d: d.chats(
            150, 200, turns=3, first=(3000, 0.9, 30_000), more=(600, 0.8, 8000), output=(3000, 0.6, 12_000), think=40
        ),
        fleet(6),
    ),
    # Load that changes, and replicas that differ.
    "waves-r6": Case(
        lambda d: d.single(wave(0.5, 5.0, 80), 320, (8000, 1.0, 100_000), (250, 0.8, 2000), common=1024), fleet(6)
    ),
    "one-fast-r7": Case(
        lambda d: d.chats(
            160, 300, turns=6, first=(6000, 0.9, 60_000), more=(1200, 0.9, 20_000), output=(300, 0.8, 3000), think=15
        ),
        fleet(1, groups=(ReplicaGroup("slow", 6, costs=LARGE.scaled(3)),)),
    ),
    "two-kinds-r8": Case(
        lambda d: d.chats(
            260, 300, turns=6, first=(8000, 0.9, 60_000), more=(1500, 0.9, 20_000), output=(300, 0.8, 3000), think=15
        ),
        fleet(
            4,
            device_tokens=1_000_000,
            groups=(ReplicaGroup("old", 4, device_tokens=300_000, costs=LARGE.scaled(2.5)),),
        ),
    ),
    "fan-outs-r5": Case(lambda d: d.fan_outs(0.13, 300), fleet(5, device_tokens=800_000)),
    "small-model-r3": Case(
        lambda d: d.chats(
            200, 120, turns=8, first=(3000, 0.8, 30_000), more=(800, 0.8, 10_000), output=(250, 0.8, 2000), think=6,
            common=1024,
        ),
        fleet(3, device_tokens=300_000),
        costs=SMALL,
    ),
    "small-model-answers-r3": Case(
        lambda d: d.single(55.0, 40, (700, 0.8, 6000), (300, 0.8, 2000), common=2048), fleet(3), costs=SMALL
    ),
}  # fmt: skip


@lru_cache
def read(path: Path) -> Trace:
    return read_trace(path)


@lru_cache
def coding_sessions(path: Path) -> list[Trace]:
    """Requests that share their first rare block, in blocks of `BLOCK` tokens; times from the first one."""
    trace = read_trace(path)
    having: dict[int, int] = defaultdict(int)
    for one in trace:
        for number in set(one.ids):
            having[number] += 1
    groups: dict[int, Trace] = defaultdict(list)
    for one in trace:
        rare = next((number for number in one.ids if having[number] <= max(_RARE * len(trace), 6)), one.ids[-1])
        groups[rare].append(joined(one))
    return [[replace(one, arrival=one.arrival - many[0].arrival) for one in many] for many in groups.values()]


def joined(one: TraceRequest) -> TraceRequest:
    """The request in blocks of `BLOCK` tokens; the number of the last block in each is its number."""
    size = BLOCK // one.ids_tokens
    last = len(one.ids) - 1
    ids = [one.ids[min(i * size + size - 1, last)] for i in range(-(-one.prompt_tokens // BLOCK))]
    return replace(one, ids=array("I", ids), ids_tokens=BLOCK)


def sets() -> dict[str, dict[str, Case]]:
    """The cases of each set, by name. No two have one name."""
    from benchmarks.simulator.held_out import HELD_OUT  # these need this module
    from benchmarks.simulator.odd_fleets import ODD

    return {"overload": CASES, "held-out": HELD_OUT, "odd": ODD}


def made(name: str) -> Any:
    return RIVALS[name]() if name in RIVALS else policy_named(name)


class Job(NamedTuple):
    """One simulation."""

    case: str
    policy: str
    draw: int
    traces: Traces
    known: bool
    limit: int | None

    @property
    def key(self) -> Run:
        return Run(self.case, self.policy, self.draw, self.known, self.limit)


def run(job: Job) -> dict[str, Any]:
    """The times of one simulation."""
    case = {name: one for cases in sets().values() for name, one in cases.items()}[job.case]
    trace = sorted(case.traffic(Draw(job.traces, job.draw)), key=lambda one: one.arrival)[: job.limit]
    spec = replace(case.spec, learns=not job.known)
    began = time.perf_counter()
    result = simulate(trace, spec, made(job.policy), case.costs, fleet=case.knows)
    outcomes = result.outcomes
    return {
        **job.key._asdict(),
        "ttft": [round(one.ttft, 4) for one in outcomes],
        "e2e": [round(one.finished - one.request.arrival, 4) for one in outcomes],
        "itl": [round(one.seconds_per_token, 5) for one in outcomes if one.request.output_tokens > 1],
        "hit": sum(one.cached_tokens for one in outcomes) / sum(one.request.prompt_tokens for one in outcomes),
        "busy": sum(one.busy for one in result.replicas.values()) / sum(one.up for one in result.replicas.values()),
        "wall": time.perf_counter() - began,
    }


def all_runs(jobs: Sequence[Job], processes: int) -> Iterator[tuple[Job, dict[str, Any] | Exception]]:
    """The results of all jobs as they come, or why there is none; with one process in this one."""
    if processes == 1:
        for job in jobs:
            yield job, _tried(job)
        return
    with ProcessPoolExecutor(processes) as pool:
        found = {pool.submit(_tried, job): job for job in jobs}
        for future in as_completed(found):
            yield found[future], future.result()


def _tried(job: Job) -> dict[str, Any] | Exception:
    try:
        return run(job)
    except (ForewordError, ArithmeticError, LookupError, TypeError, ValueError) as error:  # of a rule on an odd fleet
        return error


def figures(runs: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The figures of all draws together."""
    ttft = sorted(seconds for one in runs for seconds in one["ttft"])
    return {
        "mean": fmean(ttft),
        "p50": quantile(ttft, 0.5),
        "p90": quantile(ttft, 0.9),
        "p99": quantile(ttft, 0.99),
        "e2e": fmean(seconds for one in runs for seconds in one["e2e"]),
        "itl": fmean(seconds for one in runs for seconds in one["itl"]),
        "hit": fmean(one["hit"] for one in runs),
        "busy": fmean(one["busy"] for one in runs),
    }


Ratio = tuple[float, str, str, str]


def report(runs: Sequence[dict[str, Any]]) -> str:
    """A table of each set, and how often placement by cost is the best or close to it, in each and in all."""
    parts: list[str] = []
    every: list[Ratio] = []
    for title, cases in sets().items():
        part = [one for one in runs if one["case"] in cases]
        if part:
            lines, ratios = table(part)
            parts.append("\n".join([f"{title}:\n", *lines]))
            every += ratios
    if len(parts) > 1 and every:
        parts.append(f"All sets: {_counted(every)}")
    return "\n\n".join(parts)


def table(runs: Sequence[dict[str, Any]]) -> tuple[list[str], list[Ratio]]:
    """The lines of a table of all cases with what follows from it, and each figure of ours as a multiple of the best other's.

    Figures of other draws than ours are not compared.
    """
    by_case: dict[str, dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for one in runs:
        by_case[one["case"]][one["policy"]].append(one)
    order = {name: place for place, name in enumerate(POLICIES)}
    names = sorted({one["policy"] for one in runs}, key=lambda name: (order.get(name, len(order)), name))
    lines = ["| case (requests) | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    ratios: list[Ratio] = []
    lacking: list[str] = []
    for case, policies in by_case.items():
        found = {name: figures(policies[name]) for name in names if policies[name]}
        requests = sum(len(one["ttft"]) for one in next(iter(policies.values())))
        cells = [" / ".join(_digits(found[name][key]) for key in FIGURES) if name in found else "-" for name in names]
        lines.append(f"| {case} ({requests}) | " + " | ".join(cells) + " |")
        draws = {name: {one["draw"] for one in policies[name]} for name in names}
        others = [name for name in found if name != "cost" and draws[name] == draws.get("cost")]
        lacking += [case] if len(others) < len(names) - 1 else []
        for key in FIGURES if others else ():
            best = min(others, key=lambda name, key=key, found=found: found[name][key])  # type: ignore[misc]
            ratios.append((found["cost"][key] / max(found[best][key], 1e-9), case, key, best))
    if ratios:
        lines.append(f"\n{_counted(ratios)}")
        behind = sorted((one for one in ratios if one[0] > 1 + CLOSE), reverse=True)
        lines += [f"- {case}, {key}: {ratio:.2f} of {best}'s" for ratio, case, key, best in behind]
    if lacking:
        lines.append(f"\nNot all rules were run, with the same draws, in {len(lacking)} cases: {', '.join(lacking)}.")
    return lines, ratios


def _digits(seconds: float) -> str:
    """Three digits, as far as they are hundredths or more."""
    return f"{seconds:.0f}" if seconds >= 99.95 else f"{seconds:.1f}" if seconds >= 9.995 else f"{seconds:.2f}"


def _counted(ratios: Sequence[Ratio]) -> str:
    close, far = (sum(one[0] <= 1 + CLOSE for one in ratios), sum(one[0] > 1 + FAR for one in ratios))
    return (
        f"placement by cost is the best or within {CLOSE:.0%} in {close} of {len(ratios)} figures ({close / len(ratios):.1%}), "
        f"and more than {FAR:.0%} behind in {far}."
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for and print the tables. Returns 1 if a simulation failed."""
    options = _options(arguments)
    traces = Traces(options.conversation, options.synthetic, options.coding)
    results = Results(options.out, options.read, _code())
    wanted = [
        Job(name, policy, options.first_draw + i, traces, options.known, options.limit)
        for title in options.sets.split(",")
        for name, case in sets()[title].items()
        if traces.has(case.needs) and re.search(options.only, name)
        for policy in filter(None, options.policies.split(","))
        for i in range(options.draws)
    ]
    jobs = [job for job in wanted if not results.has(job.key, any_code=options.keep)]
    began, failed = time.perf_counter(), 0
    for number, (job, found) in enumerate(all_runs(jobs, options.jobs), 1):
        if isinstance(found, Exception):
            failed += 1
            text = f"failed: {found!r}"
        else:
            results.add(found)
            text = f"{found['wall']:.1f} s"
        passed = time.perf_counter() - began
        print(
            f"{passed:6.0f} s {number}/{len(jobs)} {' '.join(map(str, job[:3]))}: {text}", file=sys.stderr, flush=True
        )
    shown = results.of([job.key for job in wanted]) if wanted else results.all()
    print(report(shown))
    if others := sum(one["code"] != _code() for one in shown):
        print(f"\n{others} of the {len(shown)} results are of other code than this.")
    if failed:
        print(f"\n{failed} simulations failed.")
    return 1 if failed else 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversation", type=Path)
    parser.add_argument("--synthetic", type=Path)
    parser.add_argument("--coding", type=Path)
    parser.add_argument("--sets", default="overload", help=f"which sets of cases, of {','.join(sets())}")
    parser.add_argument("--draws", type=int, default=2)
    parser.add_argument("--first-draw", type=int, default=1, help="number of the first draw")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", default="", help="a regular expression for names of cases")
    parser.add_argument("--policies", default=",".join(POLICIES), help="none: only print what was read")
    parser.add_argument("--limit", type=int, help="only the first requests of each case")
    parser.add_argument("--known", action="store_true", help="the router knows the costs of replicas from the start")
    parser.add_argument("--out", type=Path, help="append all times to this file, and leave out what is in it")
    parser.add_argument("--keep", action="store_true", help="results of other code in the file count too")
    parser.add_argument("--read", type=Path, nargs="*", default=[], help="results of earlier runs, for the table")
    options = parser.parse_args(arguments)
    if unknown := set(options.sets.split(",")) - set(sets()):
        parser.error(f"there is no set {', '.join(sorted(unknown))}: the sets are {', '.join(sets())}")
    return options


@lru_cache
def _code() -> str:
    """A digest of all code that decides a simulation but the cases."""
    package = Path(foreword.__file__).parent
    folders = "routing", "sim", "blocks"
    paths = [path for folder in folders for path in sorted((package / folder).glob("*.py"))]
    digest = blake2b(digest_size=8)
    for path in (*paths, package / "engine" / "scheduler.py", Path(rivals.__file__)):
        digest.update(path.read_bytes())
    return digest.hexdigest()


if __name__ == "__main__":
    sys.exit(main())
