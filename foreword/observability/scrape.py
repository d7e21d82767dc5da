"""Metrics of a server as Prometheus reads them, and their growth between two looks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final, Literal

from foreword.store.series import series_of

Kind = Literal["server", "router", "vllm", "sglang"]

# How the names of metrics begin; a Foreword server has vLLM's, too.
KINDS: Final[dict[Kind, str]] = {
    "router": "\nforeword:router_",
    "server": "\nforeword:",
    "vllm": "\nvllm:",
    "sglang": "\nsglang:",
}

# How the names of counters of stores begin.
COUNTED: Final = {"server": "foreword:", "vllm": "vllm:foreword_", "sglang": "sglang:foreword_"}


def metric(kind: str, counters: type, name: str) -> str:
    """The name in a server's `/metrics` of the counter `name` of a class with series."""
    series = next(one for one in series_of(counters) if one.field == name)
    named = series.server if kind == "server" else series.engine
    return f"{COUNTED[kind]}{named}{'_total' if series.kind == 'counter' else ''}"


class Scrape:
    """The values of `/metrics` at one time.

    Attributes:
        kind: the kind of the server; None if it is none of them.
        families: names of its metrics without `_total`, also of those that have no series yet.
    """

    def __init__(self, text: str) -> None:
        """Raises ValueError for what is not Prometheus' text format."""
        from prometheus_client.parser import text_string_to_metric_families

        self.kind = next((kind for kind, name in KINDS.items() if name in f"\n{text}"), None)
        self.families: set[str] = set()
        self._series: dict[str, list[tuple[Mapping[str, str], float]]] = {}
        try:
            for family in text_string_to_metric_families(text):
                self.families.add(family.name)
                for one in family.samples:
                    self._series.setdefault(one.name, []).append((one.labels, one.value))
        except IndexError as error:  # of the parser, for some lines that end too early
            raise ValueError("a line of the metrics ends too early") from error

    def __contains__(self, name: object) -> bool:
        return name in self._series

    def total(self, name: str, **labels: str) -> float:
        """The sum of the series of this name that have these labels."""
        wanted = labels.items()
        return sum(value for given, value in self._series.get(name, ()) if wanted <= given.items())

    def by(self, label: str, name: str, **labels: str) -> dict[str, float]:
        """Values of a metric, by the value of a label."""
        wanted, found = labels.items(), dict[str, float]()
        for given, value in self._series.get(name, ()):
            if label in given and wanted <= given.items():
                found[given[label]] = found.get(given[label], 0.0) + value
        return found

    def labels(self, name: str) -> Mapping[str, str]:
        """The labels of the first series of this name."""
        return next((given for given, _ in self._series.get(name, ())), {})

    def tier_states(self) -> dict[str, set[str]]:
        """The states that the processes of a server see each tier in. Series without a tier or a state are skipped."""
        found: dict[str, set[str]] = {}
        for name in self._series:
            if name.endswith("foreword:tier_state") or name == "vllm:foreword_tier_state":
                for given, value in self._series[name]:
                    if not {"tier", "state"} <= given.keys():
                        continue
                    states = found.setdefault(given["tier"], set())
                    if value:
                        states.add(given["state"])
        return found


class Period:
    """Growth of counters and histograms between two scrapes of one process.

    Attributes:
        seconds: the length of the period; None if it began with the process, whose start is not known.
    """

    def __init__(self, before: Scrape | None, after: Scrape, seconds: float | None) -> None:
        """`before`: None for all that the process has counted. A counter that fell began again at 0."""
        self.before = before
        self.after = after
        self.seconds = seconds

    def grown(self, name: str, **labels: str) -> float:
        """How much a counter grew."""
        now = self.after.total(name, **labels)
        before = 0.0 if self.before is None else self.before.total(name, **labels)
        return now - before if now >= before else now

    def rate(self, name: str, **labels: str) -> float | None:
        """Growth per second; None if the metric or the length of the period is not known."""
        return self.grown(name, **labels) / self.seconds if self.seconds and name in self.after else None

    def quantile(self, share: float, histogram: str, **labels: str) -> float | None:
        """A quantile of what a histogram observed; None for nothing.

        Linear within a bucket, as Prometheus' `histogram_quantile`; above the last finite bound it is that bound. Buckets
        whose bound is no number are skipped.
        """
        name = f"{histogram}_bucket"
        counts = self.after.by("le", name, **labels)
        if self.before is not None:
            before = self.before.by("le", name, **labels)
            if all(counts.get(bound, 0.0) >= count for bound, count in before.items()):
                counts = {bound: count - before.get(bound, 0.0) for bound, count in counts.items()}
        steps = sorted(
            (bound, count)
            for bound, count in ((_number(one), count) for one, count in counts.items())
            if not math.isnan(bound)
        )
        if not steps or steps[-1][1] <= 0:
            return None
        rank, low, below = share * steps[-1][1], 0.0, 0.0
        for bound, count in steps:
            if count >= rank and count > below:
                return low if math.isinf(bound) else low + (bound - low) * (rank - below) / (count - below)
            low, below = bound if not math.isinf(bound) else low, count
        return low


def _number(text: str) -> float:
    """NaN for what is no number."""
    try:
        return float(text)
    except ValueError:
        return math.nan
