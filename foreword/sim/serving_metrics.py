"""Costs of steps, fitted to the metrics of running servers (`foreword calibrate --metrics URL`).

A Foreword server reports the time of its steps and the context of their tokens: the time between two polls is a mean step.
Longer periods would all have about as many decoding sequences in a step, and not show what a step and what a sequence costs.
vLLM reports times of requests only. Three kinds of periods show the times of its steps, one at each load:

- Requests that are computed alone: the prefill time of a request that ended, if no other request had its first token then.
- Nothing but decoding: the mean inter-token latency of two seconds without prompts.
- The server is busy all the time, because several sequences run at each poll: the period divided by its steps.

With vLLM's metrics, a decoding sequence costs the same at all contexts, because they do not say how long the context of a step
is.
"""

from __future__ import annotations

import math
import re
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from foreword import __version__
from foreword.errors import ConfigError
from foreword.sim.calibrate import StepSample, fit
from foreword.sim.costs import Profile

if TYPE_CHECKING:
    import httpx

POLL_SECONDS: Final = 0.5
_MOST_BYTES: Final = 1 << 24
_TIMEOUT: Final = 10.0
_MOST_MISSES: Final = 3
_ROW_SECONDS: Final = 2.0
# A period of a busy server is longer if it has fewer steps than `_FEWEST_STEPS`.
_LONGEST_ROW: Final = 20.0
_REPORT_SECONDS: Final = 10.0
_FEWEST_STEPS: Final = 16
# With this many sequences at each poll a server is taken for busy all the time.
_BUSY: Final = 2
_FEWEST_ROWS: Final = 8

_LINE: Final = re.compile(
    r"^((?:vllm:(?:iteration_tokens_total|inter_token_latency_seconds|request_prefill_time_seconds"
    r"|request_decode_time_seconds|request_prefill_kv_computed_tokens|request_prompt_tokens|time_to_first_token_seconds)"
    r"|foreword:step_seconds)_(?:sum|count)"
    r"|vllm:(?:num_requests_running|generation_tokens_total|prompt_tokens_cached_total|cache_config_info)"
    r"|foreword:(?:prefill_pairs|decode_context)_total)"
    r"(?:\{(.*)\})?\s+(\S+)",
    re.MULTILINE,
)
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_GAUGE: Final = "vllm:num_requests_running"
_CONFIG: Final = "vllm:cache_config_info"
_ITL, _STEPS, _STEP_TOKENS = "vllm:inter_token_latency_seconds", "foreword:step_seconds", "vllm:iteration_tokens_total"
_PREFILL, _COMPUTED = "vllm:request_prefill_time_seconds", "vllm:request_prefill_kv_computed_tokens"
_DECODE, _PROMPTS, _TTFT = (
    "vllm:request_decode_time_seconds",
    "vllm:request_prompt_tokens",
    "vllm:time_to_first_token_seconds",
)
_PAIRS, _CONTEXT = "foreword:prefill_pairs_total", "foreword:decode_context_total"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The metrics of one engine at a time in seconds."""

    at: float
    values: Mapping[str, float]
    block_size: int | None = None


def parse(text: str, at: float) -> dict[str, Snapshot]:
    """The engines of a server's `/metrics`, by their label. Empty if it is not the page of a vLLM or Foreword server."""
    engines: dict[str, dict[str, float]] = {}
    sizes: dict[str, int] = {}
    for name, given, number in _LINE.findall(text):
        labels = dict(_LABEL.findall(given))
        engine = labels.get("engine", "")
        if name == _CONFIG:
            size = labels.get("block_size", "")
            sizes |= {engine: int(size)} if size.isascii() and size.isdigit() and len(size) < 10 else {}
            continue
        values = engines.setdefault(engine, {})
        try:
            values[name] = values.get(name, 0.0) + float(number)
        except ValueError:
            continue
    needed = (f"{_ITL}_sum", f"{_STEP_TOKENS}_sum", f"{_TTFT}_count")
    return {
        engine: Snapshot(at, values, sizes.get(engine))
        for engine, values in engines.items()
        if all(map(values.__contains__, needed))
    }


def sample(
    urls: Sequence[str], seconds: float, api_key: str | None = None, report: Callable[[str], None] = lambda _: None
) -> dict[str, list[Snapshot]]:
    """Poll servers for a period. Returns the snapshots of each engine.

    Raises ConfigError if a server has no such metrics, or does not answer several times in a row.
    """
    import httpx

    found: dict[str, list[Snapshot]] = {}
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    with httpx.Client(timeout=_TIMEOUT, headers=headers) as client:
        misses: dict[str, int] = {}
        began = time.monotonic()
        told = began
        while True:
            for url in urls:
                try:
                    page = _poll(client, url)
                except ConfigError:
                    if misses.get(url, _MOST_MISSES) == _MOST_MISSES:
                        raise
                    misses[url] += 1
                    continue
                misses[url] = 0
                for engine, snapshot in page.items():
                    found.setdefault(f"{url} engine {engine}" if engine else url, []).append(snapshot)
            now = time.monotonic()
            if now - began >= seconds:
                return found
            if now - told >= _REPORT_SECONDS:
                told = now
                report(f"{now - began:.0f} of {seconds:.0f} s")
            time.sleep(min(POLL_SECONDS, began + seconds - now))


def _poll(client: httpx.Client, url: str) -> dict[str, Snapshot]:
    import httpx

    address = url if url.rstrip("/").endswith("/metrics") else f"{url.rstrip('/')}/metrics"
    try:
        with client.stream("GET", address) as answer:
            if answer.status_code != 200:
                raise ConfigError(f"{address} answers with status {answer.status_code}")
            text = bytearray()
            for part in answer.iter_bytes():
                text += part
                if len(text) > _MOST_BYTES:
                    raise ConfigError(f"{address} answers with more than {_MOST_BYTES >> 20} MiB")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ConfigError(f"no metrics from {address}: {error or type(error).__name__}") from error
    found = parse(text.decode("utf-8", "replace"), time.monotonic())
    if not found:
        raise ConfigError(f"{address} is not the metrics page of a vLLM or Foreword server that has loaded its model")
    return found


def calibrate(series: Mapping[str, Sequence[Snapshot]], max_batch_tokens: int) -> Profile:
    """Fit the costs of a step to the snapshots of engines of one kind.

    Args:
        max_batch_tokens: the largest number of tokens in a step of these servers, which their metrics do not contain.

    Raises ConfigError if a server was restarted, had no traffic, or the traffic does not determine the cost of a token.
    """
    rows: list[tuple[StepSample, float]] = []
    totals = dict.fromkeys(("requests", "prompt", "output"), 0.0)
    for name, snapshots in series.items():
        whole = _Period(snapshots)
        if whole.restarted:
            raise ConfigError(f"the counters of {name} went back: it was restarted in the period")
        if not whole.requests:
            raise ConfigError(f"{name} had no traffic in {whole.seconds:.0f} s: no request had its first token")
        totals["requests"] += whole.requests
        totals["prompt"] += whole.prefilled
        totals["output"] += whole.decoded
        rows += _rows(snapshots, whole, max_batch_tokens)
    if len(rows) < _FEWEST_ROWS:
        raise ConfigError(
            f"only {len(rows)} periods had enough traffic to measure, {_FEWEST_ROWS} are needed: sample for longer (--for)"
        )
    fitted = fit(rows)
    sizes = {snapshots[-1].block_size for snapshots in series.values()}
    about = {
        "model": "servers in operation",
        "metrics": ", ".join(series),
        "measured": time.strftime("%Y-%m-%d"),
        "foreword": __version__,
        "seconds": round(max(s[-1].at - s[0].at for s in series.values()), 1),
        **{name: round(value) for name, value in totals.items()},
        "periods": len(rows),
        "steps_median_error": round(fitted.median_error, 4),
        "steps_worst_error": round(fitted.worst_error, 4),
        "terms": fitted.notes,
        "loads": "not measured: default",
    }
    size = sizes.pop() if len(sizes) == 1 else None
    return Profile(fitted.costs, None, size, max_batch_tokens, None, about)


class _Period:
    """Differences of an engine's counters between the first and the last of some snapshots."""

    def __init__(self, snapshots: Sequence[Snapshot]) -> None:
        self._snapshots = snapshots
        self._first, self._last = snapshots[0], snapshots[-1]
        self.seconds = self._last.at - self._first.at

    def delta(self, name: str) -> float:
        return self._last.values.get(name, 0.0) - self._first.values.get(name, 0.0)

    def mean(self, name: str) -> float:
        return self.delta(f"{name}_sum") / (self.delta(f"{name}_count") or 1.0)

    @property
    def restarted(self) -> bool:
        return any(
            after.values.get(name, -1.0) < value
            for before, after in pairwise(self._snapshots)
            for name, value in before.values.items()
            if name != _GAUGE
        )

    @property
    def has_steps(self) -> bool:
        return f"{_STEPS}_sum" in self._last.values

    @property
    def requests(self) -> float:
        return self.delta(f"{_TTFT}_count")

    @property
    def decoded(self) -> float:
        return self.delta(f"{_ITL}_count")

    @property
    def prefilled(self) -> float:
        """Computed prompt tokens. vLLM counts the first token of an output beside them."""
        outputs = self.decoded if self.has_steps else self.delta("vllm:generation_tokens_total")
        return max(self.delta(f"{_STEP_TOKENS}_sum") - outputs, 0.0)

    @property
    def pairs(self) -> float:
        """Pairs of prefilled tokens and tokens before them; of vLLM, as if all prompts of the period were equal."""
        if self.has_steps:
            return self.delta(_PAIRS)
        if not self.requests:
            return 0.0
        return self.prefilled * (self.delta("vllm:prompt_tokens_cached_total") + self.prefilled / 2) / self.requests

    @property
    def running(self) -> tuple[float, ...]:
        return tuple(one.values.get(_GAUGE, 0.0) for one in self._snapshots)


def _rows(snapshots: Sequence[Snapshot], whole: _Period, budget: int) -> Iterator[tuple[StepSample, float]]:
    start = 0
    for i in range(1, len(snapshots)):
        row = _Period(snapshots[start : i + 1])
        if not whole.has_steps and (found := _alone(snapshots, i, budget)) is not None:
            yield found
        steps, busy = row.delta(f"{_STEP_TOKENS}_count"), min(row.running) >= _BUSY
        longest = _LONGEST_ROW if busy and steps < _FEWEST_STEPS else _ROW_SECONDS
        if row.seconds < longest and not whole.has_steps:
            continue
        start = i
        if whole.has_steps:
            yield from _mean_step(row, steps, row.delta(f"{_STEPS}_sum"))
        elif busy:
            yield from _mean_step(row, steps if steps >= _FEWEST_STEPS else 0, row.seconds)
        elif row.decoded >= _FEWEST_STEPS and not _Period(snapshots[max(i - 5, 0) : i + 2]).requests:
            running = sum(n * n for n in row.running) / max(sum(row.running), 1.0)
            yield StepSample(0, 0, max(running, 1.0), 0), row.mean(_ITL)


def _mean_step(row: _Period, steps: float, seconds: float) -> Iterator[tuple[StepSample, float]]:
    if steps:
        yield (
            StepSample(row.prefilled / steps, row.pairs / steps, row.decoded / steps, row.delta(_CONTEXT) / steps),
            seconds / steps,
        )


def _alone(snapshots: Sequence[Snapshot], i: int, budget: int) -> tuple[StepSample, float] | None:
    """The mean step of the prompt of a request that ended before snapshot `i`, if no other prompt was computed then."""
    last = _Period(snapshots[i - 1 : i + 1])
    if last.delta(f"{_PREFILL}_count") != 1:
        return None
    seconds, own = last.delta(f"{_PREFILL}_sum"), last.delta(f"{_COMPUTED}_sum")
    decoding = last.delta(f"{_DECODE}_sum")
    times = [one.at for one in snapshots]
    begin = bisect_right(times, times[i - 1] - decoding - seconds) - 1
    end = bisect_left(times, times[i] - decoding)
    if begin < 0 or not own or not seconds > 0 or _Period(snapshots[begin : end + 1]).requests != 1:
        return None
    steps = math.ceil(own / budget)
    before = last.delta(f"{_PROMPTS}_sum") - own / 2
    running = snapshots[begin].values.get(_GAUGE, 0.0)
    return StepSample(own / steps, own * before / steps, running, 0), seconds / steps
