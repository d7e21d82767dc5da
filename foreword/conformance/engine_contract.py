"""Tests of engines over Foreword's stores: what each integration promises (docs/guides/own-engine.md)."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import ClassVar, NamedTuple, Protocol

import pytest

from foreword.conformance.flaky import Fault, FlakyStore
from foreword.conformance.frames import soon
from foreword.store.background import at_once
from foreword.store.background_jobs import BackgroundJobs
from foreword.store.base import Name
from foreword.store.memory.memory_store import MemoryStore
from foreword.store.tiered import TieredStore
from foreword.store.urls import open_store

FAULTS: tuple[Fault, ...] = ("fail", "lose", "corrupt", "truncate", "swap", "bad", "block_fails", "unreadable")


class EngineRun(NamedTuple):
    """The result of an engine's run of a prompt.

    Attributes:
        cached: tokens that it did not compute, because their KV was loaded.
        kv: the KV that it has of the prompt, by KV group and by the number of tokens up to the end of the block.
    """

    cached: int
    kv: Mapping[tuple[int, int], bytes]


class EngineUnderTest(Protocol):
    """An engine with one model, over a store that the test opens and closes."""

    def run(self, tokens: Sequence[int], tenant: str = "") -> EngineRun:
        """Compute a prompt, and save its KV before the call ends. A tenant of another name shares nothing. Calls do not
        overlap."""
        ...


# Starts an engine over a store. Models with other numbers have other weights and the same shape.
Start = Callable[[TieredStore, int], EngineUnderTest]


class EngineContract:
    """Subclass it as `Test...` and provide the fixture `start`. An engine waits 5 seconds at most for a store.

    Attributes:
        vocabulary: tokens are below this number.
        length: tokens of a prompt. An engine loads at least half of a prompt that is stored.
    """

    vocabulary: ClassVar[int] = 200
    length: ClassVar[int] = 96

    @pytest.fixture
    def start(self) -> Start:
        """A function that starts an engine: `start(store, model)`."""
        raise NotImplementedError("provide the fixture `start`")

    def prompt(self, seed: int, after: Sequence[int] = ()) -> list[int]:
        draw = random.Random(seed)
        return [*after, *(draw.randrange(1, self.vocabulary) for _ in range(self.length - len(after)))]

    def check(self, run: EngineRun, computed: EngineRun) -> None:
        """Check that loaded KV has the bytes that were computed."""
        loaded = {at for at in run.kv if at[1] <= run.cached}
        assert not run.cached or loaded
        for at in loaded & computed.kv.keys():
            assert run.kv[at] == computed.kv[at], (
                f"other bytes in the block of group {at[0]} that ends after {at[1]} tokens"
            )

    def test_a_restart(self, start: Start, tmp_path: Path) -> None:
        """A later engine loads what an earlier one saved, with the same bytes; of a prompt with the same start, the start."""
        url, prompt = f"disk://{tmp_path}/store?size=1GiB", self.prompt(1)
        with closing(open_store([url])) as store:
            computed = start(store, 0).run(prompt)
            assert computed.cached == 0
        with closing(open_store([url])) as store:
            engine = start(store, 0)
            again = engine.run(prompt)
            assert self.length // 2 <= again.cached <= self.length
            self.check(again, computed)
            shared = 2 * self.length // 3
            other = engine.run(self.prompt(2, prompt[:shared]))
            assert 0 < other.cached <= shared
            self.check(other, computed)
            assert engine.run(self.prompt(3)).cached == 0

    def test_tenants_and_models(self, start: Start) -> None:
        """Another tenant and another model load nothing, and what they save is not loaded by others."""
        prompt = self.prompt(1)
        with closing(TieredStore([MemoryStore(1 << 28)])) as store:
            runs = {}
            for model in (0, 1):
                for tenant in ("", "a", "b"):
                    runs[model, tenant] = start(store, model).run(prompt, tenant)
                    assert runs[model, tenant].cached == 0
            for (model, tenant), computed in runs.items():
                again = start(store, model).run(prompt, tenant)
                assert again.cached > 0
                self.check(again, computed)

    @pytest.mark.parametrize("fault", FAULTS)
    def test_faults(self, fault: Fault, start: Start) -> None:
        """A store that fails, loses or damages blocks costs time, not answers: what is loaded has the right bytes."""
        flaky = FlakyStore(MemoryStore(1 << 28), seed=1)
        with closing(TieredStore([flaky], clock=iter(range(0, 10**9, 100)).__next__)) as store:
            engine, prompts = start(store, 0), [self.prompt(seed) for seed in range(3)]
            computed = [engine.run(prompt) for prompt in prompts]
            for seed, rate in enumerate((1.0, 0.2, 0.2, 0.2, 0.0), 3):
                flaky.inject(fault, rate)
                fresh = engine.run(self.prompt(seed))
                self.check(engine.run(self.prompt(seed)), fresh)
                for prompt, before in zip(prompts, computed, strict=True):
                    self.check(engine.run(prompt), before)
            assert flaky.injected[fault]
            if fault != "unreadable":  # a tier does not ask for such a block for a while
                assert all(engine.run(prompt).cached > 0 for prompt in prompts)

    def test_a_store_that_hangs(self, start: Start) -> None:
        """An engine does not wait for a store that does not answer."""
        flaky = FlakyStore(MemoryStore(1 << 28))
        with closing(TieredStore([flaky])) as store:
            engine, prompt = start(store, 0), self.prompt(1)
            engine.run(prompt)
            flaky.stick()
            try:
                assert BackgroundJobs("engine", most=1).submit(engine.run, prompt).result(60).cached == 0
            finally:
                flaky.release()

    def test_eviction(self, start: Start) -> None:
        """In a store that is too small for all prompts, what is loaded has the right bytes."""
        with closing(TieredStore([MemoryStore(1 << 28)])) as store:
            start(store, 0).run(self.prompt(0))
            size = store.status().bytes
        with closing(TieredStore([MemoryStore(2 * size)])) as store:
            engine, prompts = start(store, 0), [self.prompt(seed) for seed in range(5)]
            computed = [engine.run(prompt) for prompt in prompts]
            for prompt, before in [*zip(prompts, computed, strict=True)] * 2:
                self.check(engine.run(prompt), before)
            assert store.status().evictions > 0

    def test_events_and_erasure(self, start: Start) -> None:
        """Each block that is saved is reported with its name, and listed under it. What is erased is not loaded."""
        events: list[tuple[bool, Name]] = []

        def listen(_tier: int, stored: bool, names: Sequence[Name]) -> None:
            events.extend([(stored, name) for name in names])  # by a list: in one step

        with closing(TieredStore([MemoryStore(1 << 28)])) as store:
            store.subscribe(listen)
            engine, prompt = start(store, 0), self.prompt(1)
            computed = engine.run(prompt)
            stored = {name for there, name in events if there}
            assert stored == {one.name for one in store.scan(deadline=soon())}
            assert len(stored) >= len(computed.kv) > 0
            store.erase(deadline=soon())
            assert start(store, 0).run(prompt).cached == 0

    def test_engines_at_once(self, start: Start) -> None:
        """Engines that save and load the same prompts at once load the right bytes."""
        with closing(TieredStore([MemoryStore(1 << 28)])) as store:
            prompts = [self.prompt(seed, self.prompt(9)[: self.length // 2]) for seed in range(4)]
            with closing(TieredStore([MemoryStore(1 << 28)])) as apart:
                computed = [start(apart, 0).run(prompt, str(number)) for number, prompt in enumerate(prompts)]
            engines = [start(store, 0) for _ in range(2)]

            def run_all(engine: EngineUnderTest) -> list[EngineRun]:
                return [engine.run(prompt) for prompt in prompts * 2]

            for runs in at_once([partial(run_all, one) for one in engines]):
                for run, before in zip(runs, computed * 2, strict=True):
                    self.check(run, before)
