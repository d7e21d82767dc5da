"""Placement by cost against six rules, two simple ones and those of other routers, where a fleet has more to do than it can.

    python -m benchmarks.simulator.overload --conversation mooncake-conversation.jsonl --synthetic synthetic_trace.jsonl \\
        --coding coding-sessions.jsonl.gz [--held-out] [--draws 2] [--jobs 2] [--only REGEX] [--out RESULTS.jsonl]

Virtual time: what the machine does meanwhile makes no difference. A case is a fleet and its traffic; its figures are of all
requests of several draws (other sessions, other starts), since the slowest hundredth of one draw is a handful of requests.
`--held-out` takes the cases of `held_out` instead, which were drawn before the price was changed last and not looked at for it.
The tables have mean, p50, p90 and p99 of the time to first token, and the mean time end to end. A case without its trace is
left out.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.simulator.rivals import RIVALS
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
    """

    traffic: Callable[[Draw], Trace]
    spec: FleetSpec
    needs: str = ""
    costs: EngineCosts = LARGE


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


def cases(held_out: bool = False, *, both: bool = False) -> dict[str, Case]:
    """The cases, the held-out ones, or both."""
    from benchmarks.simulator.held_out import HELD_OUT  # it needs this module

    return CASES | HELD_OUT if both else HELD_OUT if held_out else CASES


def made(name: str) -> Any:
    return RIVALS[name]() if name in RIVALS else policy_named(name)


Job = tuple[str, str, int, Traces, bool]


def run(job: Job) -> dict[str, Any]:
    """The times of one simulation."""
    name, policy, seed, traces, known = job
    case = cases(both=True)[name]
    trace = sorted(case.traffic(Draw(traces, seed)), key=lambda one: one.arrival)
    spec = replace(case.spec, learns=not known)
    began = time.perf_counter()
    result = simulate(trace, spec, made(policy), case.costs)
    outcomes = result.outcomes
    return {
        "case": name,
        "policy": policy,
        "draw": seed,
        "known": known,
        "ttft": [round(one.ttft, 4) for one in outcomes],
        "e2e": [round(one.finished - one.request.arrival, 4) for one in outcomes],
        "itl": [round(one.seconds_per_token, 5) for one in outcomes if one.request.output_tokens > 1],
        "hit": sum(one.cached_tokens for one in outcomes) / sum(one.request.prompt_tokens for one in outcomes),
        "busy": sum(one.busy for one in result.replicas.values()) / sum(one.up for one in result.replicas.values()),
        "wall": time.perf_counter() - began,
    }


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


def report(runs: Sequence[dict[str, Any]]) -> str:
    """The table of all cases, and how often placement by cost is the best or close to it."""
    by_case: dict[str, dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for one in runs:
        by_case[one["case"]][one["policy"]].append(one)
    names = list(dict.fromkeys(one["policy"] for one in runs))
    lines = ["| case (requests) | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    ratios: list[tuple[float, str, str, str]] = []
    for case, policies in by_case.items():
        found = {name: figures(policies[name]) for name in names if policies[name]}
        requests = sum(len(one["ttft"]) for one in next(iter(policies.values())))
        cells = [" / ".join(f"{found[name][key]:.2f}" for key in FIGURES) if name in found else "-" for name in names]
        lines.append(f"| {case} ({requests}) | " + " | ".join(cells) + " |")
        others = [name for name in found if name != "cost"]
        for key in FIGURES if "cost" in found and others else ():
            best = min(others, key=lambda name, key=key, found=found: found[name][key])  # type: ignore[misc]
            ratios.append((found["cost"][key] / max(found[best][key], 1e-9), case, key, best))
    if ratios:
        close = [one for one in ratios if one[0] <= 1 + CLOSE]
        lines.append(
            f"\nPlacement by cost is the best or within {CLOSE:.0%} in {len(close)} of {len(ratios)} figures "
            f"({len(close) / len(ratios):.1%}), and more than {FAR:.0%} behind in "
            f"{sum(one[0] > 1 + FAR for one in ratios)}."
        )
        behind = sorted((one for one in ratios if one[0] > 1 + CLOSE), reverse=True)
        lines += [f"- {case}, {key}: {ratio:.2f} of {best}'s" for ratio, case, key, best in behind]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversation", type=Path)
    parser.add_argument("--synthetic", type=Path)
    parser.add_argument("--coding", type=Path)
    parser.add_argument("--draws", type=int, default=2)
    parser.add_argument("--first-draw", type=int, default=1, help="number of the first draw")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", default="", help="a regular expression for names of cases")
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--held-out", action="store_true", help="the held-out cases")
    parser.add_argument("--known", action="store_true", help="the router knows the costs of replicas from the start")
    parser.add_argument("--out", type=Path, help="append all times to this file")
    parser.add_argument("--read", type=Path, nargs="*", default=[], help="results of earlier runs, for the table")
    arguments = parser.parse_args()
    traces = Traces(arguments.conversation, arguments.synthetic, arguments.coding)
    runs = [json.loads(line) for path in arguments.read for line in path.read_text().splitlines()]
    jobs: list[Job] = [
        (name, policy, arguments.first_draw + i, traces, arguments.known)
        for name, case in cases(arguments.held_out).items()
        if traces.has(case.needs) and re.search(arguments.only, name)
        for policy in filter(None, arguments.policies.split(","))
        for i in range(arguments.draws)
    ]
    began = time.perf_counter()
    with ProcessPoolExecutor(arguments.jobs) as pool:
        for one in pool.map(run, jobs):
            runs.append(one)
            if arguments.out is not None:
                with arguments.out.open("a") as file:
                    print(json.dumps(one), file=file)
            print(f"{time.perf_counter() - began:6.0f} s {one['case']} {one['policy']}", file=sys.stderr, flush=True)
    print(report(runs))


if __name__ == "__main__":
    main()
