"""The loop without a model: failures, memory pinned by named prefixes, aborts, and events."""

from __future__ import annotations

from typing import Any

import pytest
from memory import VOCAB, FakeMemory, expected
from scripted import TOKENIZER

from foreword.blocks.prefix_cache import PrefixCache
from foreword.blocks.salt import NO_SALT
from foreword.engine.loop import EngineCore, EngineLimits
from foreword.engine.request import Delta, Request, SamplingParams
from foreword.engine.scheduler import Scheduler
from foreword.errors import BadRequest
from foreword.events import (
    Event,
    FirstToken,
    NextTokens,
    PrefixLookup,
    RequestFinished,
    RequestPreempted,
    StepFinished,
)


class Notes:
    """An observer that remembers."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def notify(self, event: Event) -> None:
        self.events.append(event)

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


class Core(EngineCore):
    """A loop over fake memory; requests are tokens and counts."""

    def __init__(self, num_blocks: int = 64, **options: Any) -> None:
        self.memory = FakeMemory(num_blocks, 4)
        self.notes = Notes()
        cache = PrefixCache(num_blocks, 4)
        scheduler = Scheduler(cache, **({"reserve": 0.0} | options))
        super().__init__(
            self.memory, cache, scheduler, TOKENIZER, EngineLimits(num_blocks * 4, VOCAB, ()), observers=[self.notes]
        )

    def ask(self, name: str, tokens: range | tuple[int, ...], count: int, **options: Any) -> None:
        self.add(Request(name, tuple(tokens), SamplingParams(temperature=0.0, max_tokens=count, **options)))

    def finish(self, limit: int = 1000) -> dict[str, list[Delta]]:
        deltas: dict[str, list[Delta]] = {}
        for _ in range(limit):
            if not self.has_work():
                break
            for delta in self.step():
                deltas.setdefault(delta.request_id, []).append(delta)
        assert not self.has_work(), "no end"
        return deltas

    def check_idle(self, pinned: int = 0) -> None:
        self.cache.check()
        assert self.cache.pool.num_free == self.cache.pool.num_blocks - pinned


def tokens_of(deltas: list[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.tokens]


def test_tokens_in_order() -> None:
    """The loop gives every request its own tokens, in order, and one last delta."""
    core = Core()
    for name, start in (("a", 0), ("b", 10), ("c", 0)):
        core.ask(name, range(start, start + 9), 7)
    for name, deltas in core.finish().items():
        start = 10 if name == "b" else 0
        assert tokens_of(deltas) == expected(NO_SALT, tuple(range(start, start + 9)), 7)
        assert [delta.finish_reason for delta in deltas] == [None] * 6 + ["length"]
    core.check_idle()


def test_a_failed_step() -> None:
    """A failed step ends its requests with an error and is withdrawn: all later requests are right."""
    core = Core(max_batch_tokens=24)
    core.ask("a", range(9), 20)
    core.step()
    core.ask("b", range(14), 20)
    core.ask("late", range(30, 40), 5)
    core.memory.fail = True
    failed = core.step()
    assert sorted(delta.request_id for delta in failed) == ["a", "b", "late"]
    assert {delta.finish_reason for delta in failed} == {"error"}
    assert all("RuntimeError: the device is on fire" in (delta.error or "") for delta in failed)
    core.check_idle()
    for name, prompt in (("c", range(14)), ("d", range(30, 40)), ("e", range(9))):
        core.ask(name, prompt, 6)
    found = core.finish()
    for name, prompt in (("c", range(14)), ("d", range(30, 40)), ("e", range(9))):
        assert tokens_of(found[name]) == expected(NO_SALT, tuple(prompt), 6)
    core.check_idle()


def test_requests_outside_a_failed_step_continue() -> None:
    """A request that only waited while a step failed is computed afterwards."""
    core = Core(max_num_seqs=1)
    core.ask("a", range(9), 20)
    core.ask("b", range(20, 29), 5)
    core.memory.fail = True
    assert [delta.request_id for delta in core.step()] == ["a"]
    assert tokens_of(core.finish()["b"]) == expected(NO_SALT, tuple(range(20, 29)), 5)
    core.check_idle()


def pin(core: Core, num_blocks: int) -> None:
    """Hold blocks as a named prefix does."""
    table = core.cache.open(range(num_blocks * 4))
    core.cache.advance(table, num_blocks * 4)
    core.cache.pin(table, num_blocks)
    core.cache.release(table)


def test_no_room_beside_pinned_prefixes() -> None:
    """A prompt that can never be admitted, because pinned prefixes hold the memory, ends with an error that says so."""
    core = Core(num_blocks=16)
    pin(core, 10)
    core.ask("large", range(20, 50), 5)
    core.ask("small", range(10, 22), 5)
    found = core.finish()
    assert found["large"][-1].finish_reason == "error"
    assert "10 of 16 blocks" in (found["large"][-1].error or "")
    assert tokens_of(found["small"]) == expected(NO_SALT, tuple(range(10, 22)), 5)
    core.check_idle(pinned=10)


def test_no_more_room_beside_pinned_prefixes() -> None:
    """A text that grows until pinned prefixes leave it no block ends there, with reason `length` and all its text."""
    core = Core(num_blocks=16)
    pin(core, 10)
    core.ask("grows", range(10, 20), 40, stop=("never said",))
    [deltas] = core.finish().values()
    assert deltas[-1].finish_reason == "length"
    said = tokens_of(deltas)
    assert len(said) == 24 - 10 + 1  # the last token needs no block
    assert said == expected(NO_SALT, tuple(range(10, 20)), len(said))
    assert "".join(delta.text for delta in deltas) == TOKENIZER.decode(said)
    core.check_idle(pinned=10)


def test_abort_anywhere() -> None:
    """An abort of a waiting, prefilling, decoding or preempted request returns its blocks; the others are right."""
    core = Core(num_blocks=12, max_batch_tokens=8, max_num_seqs=3)
    prompts = {name: range(5 * i, 5 * i + 11) for i, name in enumerate("abcdef")}
    for name, prompt in prompts.items():
        core.ask(name, prompt, 20)
    found: dict[str, list[Delta]] = {}
    for number in range(400):
        for delta in core.step():
            found.setdefault(delta.request_id, []).append(delta)
        if number in (0, 2, 9, 20):
            name = {0: "f", 2: "a", 9: "b", 20: "c"}[number]
            [last] = core.abort(name)
            assert last.finish_reason == "abort"
            assert core.abort(name) == []
            core.cache.check()
    assert not core.has_work()
    for name in "de":
        assert tokens_of(found[name]) == expected(NO_SALT, tuple(prompts[name]), 20)
    core.check_idle()


def test_unknown_and_double_ids() -> None:
    """Aborting an unknown request does nothing; a second request with an id in use is refused, until the first has ended."""
    core = Core()
    assert core.abort("unknown") == []
    core.ask("a", range(5), 3)
    with pytest.raises(BadRequest, match="already running"):
        core.ask("a", range(5), 3)
    core.finish()
    core.ask("a", range(5), 3)
    core.finish()
    core.check_idle()


def test_events() -> None:
    """Observers get an event for every admission, token, preemption, end and step, with numbers that add up."""
    core = Core(num_blocks=10)
    for name, start in (("a", 0), ("b", 15), ("c", 30)):
        core.ask(name, range(start, start + 11), 14)
    core.finish()
    core.ask("d", range(30, 41), 2)
    core.finish()
    notes = core.notes
    lookups = notes.of(PrefixLookup)
    assert [(one.request_id, one.queried_tokens) for one in lookups] == [(name, 11) for name in "abcd"]
    assert lookups[3].hit_tokens > 0
    assert [one.hit_tokens for one in lookups[:3]] == [0, 0, 0]
    assert len(notes.of(RequestPreempted)) == core.scheduler.num_preemptions > 0
    assert sorted(one.request_id for one in notes.of(FirstToken)) == ["a", "b", "c", "d"]
    assert all(one.seconds >= one.queued >= 0 for one in notes.of(FirstToken))
    ends = {one.request_id: one for one in notes.of(RequestFinished)}
    assert {name: (one.reason, one.prompt_tokens, one.output_tokens) for name, one in ends.items()} == {
        "a": ("length", 11, 14),
        "b": ("length", 11, 14),
        "c": ("length", 11, 14),
        "d": ("length", 11, 2),
    }
    assert sum(len(one.seconds) for one in notes.of(NextTokens)) == 3 * 13 + 1
    steps = notes.of(StepFinished)
    assert len(steps) == core.steps
    computed = sum(step.num_tokens for step in core.memory.steps)
    assert sum(step.prefill_tokens + step.decode_tokens for step in steps) == computed
    assert all(0 <= step.kv_usage <= 1 for step in steps)
    assert (steps[-1].running, steps[-1].waiting, steps[-1].kv_usage) == (0, 0, 0.0)
