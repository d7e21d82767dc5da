"""The smallest fleet that meets a service level, and what it costs (`foreword simulate --slo`)."""

from __future__ import annotations

import multiprocessing
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

from foreword.children import end_with_parent
from foreword.errors import ConfigError
from foreword.sim.costs import EngineCosts, FleetSpec
from foreword.sim.plan import SimulationCase
from foreword.sim.report import Summary, markdown_table, summarize
from foreword.sim.run import simulate
from foreword.sim.trace import TraceRequest

# Costs of the simulations of one fleet, relative to the given ones. One placement changes all later ones, so single
# simulations of the same fleet differ.
_FACTORS: Final = (1.0, 0.95, 1.05, 0.9, 1.1, 0.925, 1.075)
MAX_RUNS: Final = len(_FACTORS)
_OBJECTIVE: Final = re.compile(
    r"\s*(mean|p50|p90|p99)\s+(ttft|itl)\s*(<=?)\s*(\d+(?:\.\d+)?)\s*(ms|s)\s*", re.IGNORECASE
)
_FIELDS: Final = {
    ("mean", "ttft"): "mean",
    ("p50", "ttft"): "p50",
    ("p90", "ttft"): "p90",
    ("p99", "ttft"): "p99",
    ("mean", "itl"): "per_token",
    ("p50", "itl"): "per_token_p50",
    ("p90", "itl"): "per_token_p90",
    ("p99", "itl"): "per_token_p99",
}


@dataclass(frozen=True, slots=True)
class Objective:
    """A limit on one latency of a fleet. `field` is that of `Summary`; `limit` is in seconds."""

    text: str
    field: str
    limit: float
    inclusive: bool = False

    def value(self, summary: Summary) -> float:
        return float(getattr(summary, self.field))

    def is_met(self, summary: Summary) -> bool:
        value = self.value(summary)
        return value < self.limit or (self.inclusive and value == self.limit)


def parse_objective(text: str) -> Objective:
    """`"p90 ttft < 1 s"` or `"mean itl < 50 ms"`. Raises ConfigError."""
    match = _OBJECTIVE.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"--slo {text!r} is not a service level: write for example 'p90 ttft < 1 s' or 'mean itl < 50 ms', with mean, "
            "p50, p90 or p99"
        )
    field = _FIELDS[match[1].lower(), match[2].lower()]
    limit = float(match[4]) / (1e3 if match[5].lower() == "ms" else 1)
    return Objective(f"{match[1]} {match[2]}".lower(), field, limit, match[3] == "<=")


@dataclass(frozen=True, slots=True)
class FleetSize:
    """The smallest number of replicas of one case that meets all objectives.

    Attributes:
        replicas: None if none of the numbers meets them.
        runs: the simulations of that fleet, or of the largest one that was tried.
        hours: replica-hours per million tokens of prompts and outputs, the mean of the runs.
        tried: simulated numbers of replicas, in order, and whether they met the objectives.
    """

    case: SimulationCase
    replicas: int | None
    runs: Sequence[Summary]
    hours: float
    tried: Sequence[tuple[int, bool]]


class Sizing:
    """Searches smallest fleets for one trace.

    Args:
        objectives: all of them must be met in every simulation of a fleet.
        runs: simulations of each fleet, from 1 to `MAX_RUNS`, with costs that differ by up to 10 %.
        jobs: processes that simulate at the same time.
    """

    def __init__(
        self,
        trace: Sequence[TraceRequest],
        costs: EngineCosts,
        objectives: Sequence[Objective],
        *,
        runs: int = 3,
        jobs: int = 1,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        if not 1 <= runs <= MAX_RUNS:
            raise ConfigError(f"--runs must be from 1 to {MAX_RUNS}, not {runs}")
        if not 1 <= jobs <= MAX_RUNS:
            raise ConfigError(f"--jobs must be from 1 to {MAX_RUNS}, not {jobs}")
        self._trace, self._costs, self._objectives = trace, costs, objectives
        self._runs, self._jobs, self._progress = runs, jobs, progress

    def search(self, cases: Sequence[SimulationCase], replicas: Sequence[int]) -> list[FleetSize]:
        """The smallest of these numbers of replicas for each case, which gives all other sizes."""
        numbers = sorted(set(replicas))
        if not numbers:
            raise ConfigError("there is no number of replicas to choose from")
        with _executor(self._jobs, self._trace) as executor:
            return [self._smallest(case, numbers, executor) for case in cases]

    def _smallest(self, case: SimulationCase, numbers: Sequence[int], executor: Executor | None) -> FleetSize:
        """Doubles the number until the objectives are met, then halves the interval: a larger fleet is not slower."""
        found: dict[int, list[Summary]] = {}
        tried: list[tuple[int, bool]] = []

        def meets(place: int) -> bool:
            found[place] = self._simulate(case, numbers[place], executor)
            good = len(found[place]) == self._runs and all(self._met(one) for one in found[place])
            tried.append((numbers[place], good))
            if self._progress is not None:
                words = ", ".join(f"{one.text} {_worst(one, found[place]):.3f} s" for one in self._objectives)
                self._progress(f"{case.name}: replicas {numbers[place]}: {words}{'' if good else ', not met'}")
            return good

        failing, place = -1, 0
        while not meets(place):
            failing = place
            if place == len(numbers) - 1:
                return self._size(case, None, numbers[place], found[place], tried)
            place = min(2 * place + 1, len(numbers) - 1)
        while place - failing > 1:
            middle = (place + failing) // 2
            if meets(middle):
                place = middle
            else:
                failing = middle
        return self._size(case, numbers[place], numbers[place], found[place], tried)

    def _met(self, summary: Summary) -> bool:
        return all(one.is_met(summary) for one in self._objectives)

    def _simulate(self, case: SimulationCase, replicas: int, executor: Executor | None) -> list[Summary]:
        """The runs of one fleet. The others are left out if the first does not meet the objectives."""
        spec = replace(case.spec, replicas=replicas)
        costs = [self._costs.scaled(factor) for factor in _FACTORS[: self._runs]]
        if executor is not None:
            return list(executor.map(_simulate_shared, *zip(*((spec, case.policy, one) for one in costs), strict=True)))
        first = summarize(simulate(self._trace, spec, case.policy, costs[0]))
        if not self._met(first):
            return [first]
        return [first, *(summarize(simulate(self._trace, spec, case.policy, one)) for one in costs[1:])]

    def _size(
        self,
        case: SimulationCase,
        replicas: int | None,
        simulated: int,
        runs: Sequence[Summary],
        tried: Sequence[tuple[int, bool]],
    ) -> FleetSize:
        hours = sum(one.replica_hours * one.requests / 1000 / one.tokens for one in runs) / len(runs)
        named = replace(case, spec=replace(case.spec, replicas=simulated))
        return FleetSize(named, replicas, tuple(runs), hours * 1e6, tuple(tried))


def _worst(objective: Objective, runs: Sequence[Summary]) -> float:
    return max(objective.value(one) for one in runs)


# The trace of a process that simulates for another one.
_shared_trace: Sequence[TraceRequest] = ()


def _share_trace(trace: Sequence[TraceRequest]) -> None:
    global _shared_trace
    _shared_trace = trace
    end_with_parent()


def _simulate_shared(spec: FleetSpec, policy: str, costs: EngineCosts) -> Summary:
    return summarize(simulate(_shared_trace, spec, policy, costs))


@contextmanager
def _executor(jobs: int, trace: Sequence[TraceRequest]) -> Iterator[Executor | None]:
    if jobs == 1:
        yield None
        return
    others = set(multiprocessing.active_children())  # of the program that sizes, such as a notebook
    with ProcessPoolExecutor(jobs, initializer=_share_trace, initargs=(trace,)) as executor:
        try:
            yield executor
        except BaseException:
            # Leaving would wait until all that was submitted is simulated.
            executor.shutdown(wait=False, cancel_futures=True)
            for process in set(multiprocessing.active_children()) - others:
                process.kill()
            raise


def sizes_table(
    found: Sequence[FleetSize], objectives: Sequence[Objective], price: float | None, sample: int = 1
) -> str:
    """The fleets as a Markdown table, the cheapest first. `price` is of one replica-hour, in any currency; one in `sample`
    replicas was simulated."""
    head = ["fleet", "replicas", *(f"{one.text} (limit {one.limit:g} s)" for one in objectives), "hit"]
    head += ["replica-h per 1M tokens", *(["price per 1M tokens"] if price is not None else [])]
    body = []
    for size in sorted(found, key=lambda one: (one.replicas is None, one.hours)):
        simulated = sample * size.case.spec.replicas
        number = f"more than {simulated}" if size.replicas is None else str(simulated)
        hits = sorted(one.hit_share for one in size.runs)
        row = [size.case.name, number, *(f"{_worst(one, size.runs):.3f} s" for one in objectives)]
        row += [f"{hits[0]:.1%} to {hits[-1]:.1%}", f"{size.hours:.4f}"]
        body.append(row + ([f"{size.hours * price:.4f}"] if price is not None else []))
    return markdown_table(head, body)
