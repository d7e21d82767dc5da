"""The last hour of the metrics, in a ring buffer, so that the page has data to draw when it is opened."""

from __future__ import annotations

import asyncio
import math
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from prometheus_client.metrics_core import Metric

from foreword.tasks import log_failure

SAMPLE_SECONDS = 10.0
KEEP_SECONDS = 3600.0
# Labels may be unbounded. A server with four tiers has about 120 series.
MAX_SERIES = 1024

# Histograms whose quantiles the page shows.
_WITH_BUCKETS = (
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
    "foreword:router_time_per_output_token_seconds",
    "foreword:router_time_to_first_token_seconds",
)
# Metrics of a router that the page shows by replica. The others are sums over the replicas, as in `metrics.js`.
_ROUTER = "foreword:router_"
_BY_REPLICA = tuple(
    f"{_ROUTER}{name}_total"
    for name in ("decisions", "failures", "expected_cached_tokens", "usage_prompt_tokens", "usage_cached_tokens")
)
_SHOWN = ("vllm:", "foreword:")
_SKIPPED = ("vllm:cache_config_info", "foreword:model_info", "foreword:http_responses")

Labels = tuple[tuple[str, str], ...]


class MetricsHistory:
    """Samples of counters and gauges, and the sums and counts of histograms.

    Args:
        families: returns all metrics. Called on a thread, one call at a time, or, with `on_loop`, on the event loop.
        clock: seconds since the epoch.
    """

    def __init__(
        self,
        families: Callable[[], Iterable[Metric]],
        clock: Callable[[], float] = time.time,
        *,
        on_loop: bool = False,
    ) -> None:
        self._families = families
        self._clock = clock
        self._columns: dict[tuple[str, Labels], int] = {}
        # Only `take` changes it, one call at a time. It is replaced as a whole, so a reader sees samples that belong together.
        self._samples: tuple[tuple[float, array[float]], ...] = ()
        self._on_loop = on_loop
        self._loop: asyncio.AbstractEventLoop | None = None

    def take(self) -> None:
        """Take a sample now."""
        row = array("d", [math.nan] * len(self._columns))
        # In a large fleet the series by replica do not all fit: the others come first.
        for name, labels, value in sorted(_shown(self._families()), key=lambda one: one[0] in _BY_REPLICA):
            column = self._columns.get((name, labels))
            if column is None:
                if len(self._columns) >= MAX_SERIES:
                    continue
                column = self._columns[name, labels] = len(self._columns)
                row.append(math.nan)
            row[column] = value if math.isnan(row[column]) else row[column] + value
        self._samples = (*self._samples[1 - int(KEEP_SECONDS / SAMPLE_SECONDS) :], (self._clock(), row))

    def keep_sampling(self) -> None:
        """Take a sample every few seconds while the running event loop runs. Repeated calls have no effect."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop = loop
            self._sample(loop)

    def _sample(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._loop is not loop:
            return
        if self._on_loop:
            loop.call_later(SAMPLE_SECONDS, self._sample, loop)
            self.take()
            return
        try:
            taken = loop.run_in_executor(None, self.take)
        except RuntimeError:  # the loop is about to end, and its threads have ended
            return
        log_failure(taken, "sampling the metrics")
        taken.add_done_callback(lambda _: loop.call_later(SAMPLE_SECONDS, self._sample, loop))

    def plain(self) -> dict[str, Any]:
        """The history as JSON: `series` are `[name, labels]`. `values` has a row per time with a number (or null) per series; a
        row may be shorter than `series`."""
        samples = self._samples
        return {
            "every": SAMPLE_SECONDS,
            "series": [[name, dict(labels)] for name, labels in list(self._columns)],
            "times": [round(at, 3) for at, _ in samples],
            "values": [[value if math.isfinite(value) else None for value in row] for _, row in samples],
        }


def _shown(families: Iterable[Metric]) -> Iterator[tuple[str, Labels, float]]:
    for family in families:
        if not family.name.startswith(_SHOWN) or family.name.startswith(_SKIPPED):
            continue
        hidden = "_created" if family.name in _WITH_BUCKETS else ("_bucket", "_created")
        for sample in family.samples:
            if not sample.name.endswith(hidden):
                labels = tuple(sorted(item for item in sample.labels.items() if _is_kept(sample.name, item[0])))
                yield sample.name, labels, sample.value


def _is_kept(name: str, label: str) -> bool:
    if label == "model_name":  # a server has one model; a router may have several
        return name.startswith(_ROUTER)
    if label == "replica":
        return name in _BY_REPLICA
    return label != "reason" or not name.startswith(_ROUTER)
