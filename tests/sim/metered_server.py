"""A server in virtual time whose steps take known times, and its metrics as vLLM and Foreword report them."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from foreword.routing.costs import pairs
from foreword.sim.costs import EngineCosts


@dataclass(eq=False)
class _Sequence:
    arrival: float
    prompt: int
    cached: int
    output: int
    scheduled: float = -1.0
    first: float = -1.0
    last: float = -1.0
    computed: int = 0
    made: int = 0


@dataclass
class MeteredServer:
    """Continuous batching with chunked prefill, first come first served, decoding sequences first.

    `rate` is requests per second (Poisson); `prompts` the range of the new tokens of a prompt, uniform in its logarithm.
    """

    costs: EngineCosts
    rate: float
    prompts: tuple[int, int]
    outputs: tuple[int, int] = (16, 128)
    budget: int = 2048
    own_steps: bool = False
    seed: int = 0
    cached: tuple[int, int] = (0, 0)
    _rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        registry = self.registry = CollectorRegistry()

        def times(name: str) -> Histogram:
            return Histogram(name, name, registry=registry)

        self.running = Gauge("vllm:num_requests_running", "n", registry=registry)
        self.generated = Counter("vllm:generation_tokens", "n", registry=registry)
        self.cached_tokens = Counter("vllm:prompt_tokens_cached", "n", registry=registry)
        self.iteration = times("vllm:iteration_tokens_total")
        self.itl, self.ttft = times("vllm:inter_token_latency_seconds"), times("vllm:time_to_first_token_seconds")
        self.prompt_sizes = times("vllm:request_prompt_tokens")
        if self.own_steps:
            self.steps = times("foreword:step_seconds")
            self.pairs = Counter("foreword:prefill_pairs", "n", registry=registry)
            self.context = Counter("foreword:decode_context", "n", registry=registry)
        else:
            self.prefill = times("vllm:request_prefill_time_seconds")
            self.decode = times("vllm:request_decode_time_seconds")
            self.computed = times("vllm:request_prefill_kv_computed_tokens")

    def pages(self, seconds: float, every: float = 0.5) -> Iterator[tuple[float, str]]:
        """The metrics page at times `every` seconds apart."""
        now, due = 0.0, 0.0
        arrival = self._rng.expovariate(self.rate)
        waiting: deque[_Sequence] = deque()
        running: list[_Sequence] = []
        while due <= seconds:
            end = now
            chunks: list[tuple[_Sequence, int]] = []
            while arrival <= now:
                waiting.append(self._request(arrival))
                arrival += self._rng.expovariate(self.rate)
            chunks = self._schedule(waiting, running, now)
            end = now + self._seconds(chunks) if chunks else arrival
            while due <= min(end, seconds) and due < end:
                yield due, generate_latest(self.registry).decode()
                due += every
            now = end
            if chunks:
                self._settle(chunks, running, now)

    def _request(self, arrival: float) -> _Sequence:
        low, high = self.prompts
        new = round(low * (high / low) ** self._rng.random())
        cached = self._rng.randint(*self.cached)
        return _Sequence(arrival, new + cached, cached, self._rng.randint(*self.outputs), computed=cached)

    def _schedule(self, waiting: deque[_Sequence], running: list[_Sequence], now: float) -> list[tuple[_Sequence, int]]:
        chunks = [(one, 1) for one in running if one.first >= 0]
        left = self.budget - len(chunks)
        prefilling = [one for one in running if one.first < 0]
        while left > 0 and (prefilling or waiting):
            one = prefilling.pop(0) if prefilling else waiting.popleft()
            if one.scheduled < 0:
                one.scheduled = now
                running.append(one)
            count = min(left, one.prompt - one.computed)
            chunks.append((one, count))
            left -= count
        return chunks

    def _seconds(self, chunks: list[tuple[_Sequence, int]]) -> float:
        costs = self.costs
        seconds = costs.base
        for one, count in chunks:
            if one.first < 0:
                seconds += costs.prefill * count + costs.attention * pairs(count, one.computed)
            else:
                seconds += costs.decode_each + costs.decode_context * (one.prompt + one.made)
        self._last = seconds
        return seconds

    def _settle(self, chunks: list[tuple[_Sequence, int]], running: list[_Sequence], now: float) -> None:
        tokens = 0
        scheduled = sum(count for _, count in chunks)
        if self.own_steps:
            self.pairs.inc(sum(pairs(count, one.computed) for one, count in chunks if one.first < 0))
            self.context.inc(sum(one.prompt + one.made for one, _ in chunks if one.first >= 0))
        for one, count in chunks:
            if one.first >= 0:
                self.itl.observe(now - one.last)
                tokens += 1
            else:
                one.computed += count
                if one.computed < one.prompt:
                    continue
                one.first = now
                self.ttft.observe(now - one.arrival)
                self.cached_tokens.inc(one.cached)
                tokens += 1 + one.prompt - one.cached
            one.last = now
            one.made += 1
            self.generated.inc()
            if one.made >= one.output:
                self._finish(one, running)
        if self.own_steps:
            self.steps.observe(self._last)
            self.iteration.observe(scheduled)
        elif tokens:
            self.iteration.observe(tokens)
        self.running.set(len(running))

    def _finish(self, one: _Sequence, running: list[_Sequence]) -> None:
        running.remove(one)
        self.prompt_sizes.observe(one.prompt)
        if not self.own_steps:
            self.prefill.observe(one.first - one.scheduled)
            self.decode.observe(one.last - one.first)
            self.computed.observe(one.prompt - one.cached)
