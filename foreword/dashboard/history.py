"""The last half hour of the metrics, in a ring, so that a page that is opened late has something to draw."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from prometheus_client.metrics_core import Metric

if TYPE_CHECKING:  # a router has no Starlette
    from starlette.types import ASGIApp, Receive, Scope, Send

EVERY_SECONDS = 5.0
KEEP_SECONDS = 1800.0
# A bound for labels without end. A server with four tiers has about 120.
MAX_SERIES = 1024

_STARTS = ("vllm:", "foreword:")
_SKIPPED = ("vllm:cache_config_info", "foreword:model_info", "foreword:http_responses")

Labels = tuple[tuple[str, str], ...]


class MetricsHistory:
    """Samples of counters, gauges, and of histograms their sums and counts.

    Args:
        families: all metrics at this moment. Called on a thread, one call at a time, or, with `on_loop`, on the event loop.
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
        self._numbers: dict[tuple[str, Labels], int] = {}
        self._samples: deque[tuple[float, array[float]]] = deque(maxlen=int(KEEP_SECONDS / EVERY_SECONDS))
        self._on_loop = on_loop
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def take(self) -> None:
        """Keep a sample of now."""
        row = array("d", [math.nan] * len(self._numbers))
        for name, labels, value in _wanted(self._families()):
            number = self._numbers.get((name, labels))
            if number is None:
                if len(self._numbers) >= MAX_SERIES:
                    continue
                number = self._numbers[name, labels] = len(self._numbers)
                row.append(math.nan)
            row[number] = value
        with self._lock:
            self._samples.append((self._clock(), row))

    def keep_sampling(self) -> None:
        """From now on take a sample every few seconds while the running event loop runs. Repeated calls change nothing."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop = loop
            self._sample(loop)

    def _sample(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._loop is not loop:
            return
        if self._on_loop:
            loop.call_later(EVERY_SECONDS, self._sample, loop)
            self.take()
        else:
            try:
                taken = loop.run_in_executor(None, self.take)
            except RuntimeError:  # the loop is about to end, and its threads have
                return
            taken.add_done_callback(lambda _: loop.call_later(EVERY_SECONDS, self._sample, loop))

    def plain(self) -> dict[str, Any]:
        """As JSON: `series` are `[name, labels]`, `values` has a row per time and in it a number (or null) per series; a row
        may be shorter than `series`."""
        with self._lock:
            samples = list(self._samples)
        return {
            "every": EVERY_SECONDS,
            "series": [[name, dict(labels)] for name, labels in list(self._numbers)],
            "times": [round(at, 3) for at, _ in samples],
            "values": [[value if math.isfinite(value) else None for value in row] for _, row in samples],
        }


def _wanted(families: Iterable[Metric]) -> Iterator[tuple[str, Labels, float]]:
    for family in families:
        if not family.name.startswith(_STARTS) or family.name.startswith(_SKIPPED):
            continue
        for sample in family.samples:
            if not sample.name.endswith(("_bucket", "_created")):
                # A server has one model; a router may have several.
                drop = "" if family.name.startswith("foreword:router_") else "model_name"
                labels = tuple(sorted((key, text) for key, text in sample.labels.items() if key != drop))
                yield sample.name, labels, sample.value


class Sampling:
    """ASGI middleware: the first request starts the history."""

    def __init__(self, app: ASGIApp, history: MetricsHistory) -> None:
        self._app = app
        self._history = history

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            self._history.keep_sampling()
        await self._app(scope, receive, send)
