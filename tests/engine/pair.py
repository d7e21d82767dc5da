"""Pairs of connected engines, steps that wait for permission, and records of transfers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foreword.blocks.salt import NO_SALT, Salt
from foreword.engine.request import Delta, Request, SamplingParams
from foreword.engine_config import EngineConfig
from foreword.entrypoints.async_engine import AsyncEngine
from foreword.events import Event, StepFinished, TransferEnded
from foreword.tokens.token_logprob import TokenLogprob
from foreword.transfer_config import TransferConfig

PATIENCE = 60.0
PATIENT = {
    "min_tokens": 1,
    "answer_timeout": 60.0,
    "progress_timeout": 60.0,
    "lease_seconds": 60.0,
    "beat_seconds": 10.0,
}
# For wires that say nothing any more.
QUICK = {"answer_timeout": 5.0, "progress_timeout": 5.0, "lease_seconds": 5.0, "beat_seconds": 2.0}


class Said:
    """An observer that records computed tokens and ended transfers."""

    def __init__(self) -> None:
        self.transfers: list[TransferEnded] = []
        self.prefill_tokens = 0

    def notify(self, event: Event) -> None:
        if isinstance(event, TransferEnded):
            self.transfers.append(event)
        elif isinstance(event, StepFinished):
            self.prefill_tokens += event.prefill_tokens

    def forget(self) -> None:
        self.transfers.clear()
        self.prefill_tokens = 0


class Valve:
    """Every step of an engine waits here while it is shut, and takes at least `pace` seconds."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._permits = threading.Semaphore(0)
        self._open = True
        self.stepwise = False
        self.waiting = 0
        self.pace = 0.0
        runner = engine._core._runner
        self._run = runner.run
        runner.run = self.run

    def run(self, *args: Any) -> Any:
        while not self._open:
            self.waiting += 1
            passed = self._permits.acquire(timeout=0.05)
            self.waiting -= 1
            if passed:
                break
        time.sleep(self.pace)
        return self._run(*args)

    def shut(self) -> None:
        self._open = False
        self._permits = threading.Semaphore(0)

    def let(self, steps: int) -> None:
        if steps:
            self._permits.release(steps)

    def open(self) -> None:
        self._open = True

    def turn(self) -> None:
        """Permit one more step, if the engine waits for turns."""
        if self.stepwise and self.waiting:
            self.let(1)


@dataclass
class Node:
    """An engine of the pair."""

    engine: AsyncEngine
    said: Said
    valve: Valve

    @property
    def address(self) -> str:
        assert self.engine.instance is not None
        return self.engine.instance.address

    @property
    def received(self) -> int:
        """Bytes of KV that came so far."""
        assert self.engine.instance is not None
        return sum(traffic.bytes_received for traffic in self.engine.instance.endpoint.status().traffic.values())

    async def fresh(self) -> None:
        """Forget what is cached and recorded."""
        self.valve.open()
        self.valve.pace = 0.0
        await self.engine.clear_cache()
        self.said.forget()

    async def whole(self) -> None:
        """Everything came back: no block in use, no transfer, and the pool's own check passes."""
        await until(lambda: self.engine.status().free_blocks == self.engine.info.num_blocks)
        assert self.engine.instance is not None
        await until(lambda: not self.engine.instance.endpoint.status().transfers)
        status = self.engine.status()
        assert (status.running, status.waiting, status.failed) == (0, 0, None)
        scheduler = self.engine._core.scheduler
        assert not (scheduler.waiting_for_kv or scheduler.paused)
        assert not self.engine.instance.busy
        await self.engine.check_integrity()


def node(model: Path, role: str, *, transfer: dict[str, Any] | None = None, **options: Any) -> Node:
    """An engine with blocks of 4 tokens and room for 1024, unless the options say otherwise."""
    settings: dict[str, Any] = {"dtype": "float32", "kv_memory": "1024 tokens", "block_size": 4, "threads": 1}
    config = EngineConfig(model=str(model), **(settings | {"max_batch_tokens": 32} | options))
    said = Said()
    engine = AsyncEngine.from_config(
        config, transfer=TransferConfig(**(PATIENT | (transfer or {}))), role=role, observers=[said]
    )
    return Node(engine, said, Valve(engine))


@contextmanager
def stepwise(*nodes: Node) -> Iterator[None]:
    """These engines make a step only when a reader takes a turn, so nothing ends unexpectedly."""
    for each in nodes:
        each.valve.stepwise = True
        each.valve.shut()
    try:
        yield
    finally:
        for each in nodes:
            each.valve.stepwise = False
            each.valve.open()


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition; fail if it does not come true."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        await asyncio.sleep(0.002)


@dataclass
class Answer:
    """The output of a request."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    last: Delta | None = None

    def add(self, delta: Delta) -> None:
        self.tokens += delta.tokens
        self.text += delta.text
        self.logprobs += delta.logprobs
        self.last = delta

    def same(self, other: Answer) -> bool:
        """Asserts that two answers are the same for the client: tokens, text, how they ended, and log-probabilities up to
        rounding."""
        assert self.last is not None and other.last is not None
        close = all(
            abs(a.logprob - b.logprob) < 1e-4 and [t for t, _ in a.top] == [t for t, _ in b.top]
            for a, b in zip(self.logprobs, other.logprobs, strict=True)
        )
        ends = (self.last.finish_reason, self.last.stop_match) == (other.last.finish_reason, other.last.stop_match)
        return self.tokens == other.tokens and self.text == other.text and ends and close


_numbers = iter(range(10**9))


def request(tokens: Sequence[int], params: SamplingParams, prefill: str = "", salt: Salt = NO_SALT) -> Request:
    return Request(f"r{next(_numbers)}", tuple(tokens), params, salt, want_cache_report=True, prefill=prefill)


async def ask(
    engine: AsyncEngine, tokens: Sequence[int], params: SamplingParams, prefill: str = "", salt: Salt = NO_SALT
) -> Answer:
    """The output of a request with one sequence."""
    answer = Answer()
    async for delta in engine.generate(request(tokens, params, prefill, salt)):
        answer.add(delta)
    return answer
