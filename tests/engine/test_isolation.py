"""Failures that cost one request: each call behind the sampler raises for one of two requests, and the other one never
notices."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import tiny
from scripted import ScriptedRunner, make_core

import foreword
from foreword.blocks.retention import Retention
from foreword.blocks.salt import tenant_digest
from foreword.engine import loop
from foreword.engine.loop import EngineCore
from foreword.engine.prompt_leases import EngineLeases
from foreword.engine.request import Delta, Request, SamplingParams
from foreword.entrypoints.llm import LLM
from foreword.events import Event, RequestBroken
from foreword.request_errors import RequestFailed
from foreword.tokens.reasoning_stops import ReasoningSpan

ROOT = str(Path(foreword.__file__).parent)
BLOCKS = str(Path(foreword.__file__).parent / "blocks")
PARAMS = SamplingParams(
    max_tokens=3, temperature=0.0, ignore_eos=True, stop="never", reasoning=ReasoningSpan("<", (">",)), logprobs=1
)


class Planted(Exception):
    """An error of a kind that no code expects."""


class Saboteur:
    """A trace function that lets the n-th call of Foreword's code raise, of those that the engine makes for one request. Calls
    inside of the data structures of `blocks` are left out: they are not made to be cut in half."""

    def __init__(self, victim: str, nth: int | None = None) -> None:
        self.calls: list[str] = []
        self._victim, self._nth = victim, nth

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        caller = frame.f_back.f_code.co_filename if frame.f_back is not None else ""
        if not frame.f_code.co_filename.startswith(ROOT) or caller.startswith(BLOCKS):
            return
        if self._for_victim(frame.f_back):
            self.calls.append(frame.f_code.co_qualname)
            if len(self.calls) - 1 == self._nth:
                raise Planted(self.calls[-1])

    def _for_victim(self, frame: FrameType | None) -> bool:
        while frame is not None:
            if frame.f_code is loop.EngineCore._alone.__code__:
                return bool(frame.f_locals["sequence"].request.id == self._victim)
            frame = frame.f_back
        return False

    @contextmanager
    def at_work(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self)
        try:
            yield
        finally:
            sys.settrace(before)


class Seen:
    """An observer."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def notify(self, event: Event) -> None:
        self.events.append(event)


def run(core: EngineCore, *requests: Request) -> dict[str, list[Delta]]:
    found: dict[str, list[Delta]] = {}
    for request in requests:
        core.add(request)
    for _ in range(200):
        if not core.has_work():
            break
        for delta in core.step():
            found.setdefault(delta.request_id, []).append(delta)
    assert not core.has_work()
    return found


def text(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def asked(name: str, session: str = "") -> Request:
    prompt = tuple(range(1, 23))
    keeps = (Retention(8, 60.0),)
    return Request(name, prompt, PARAMS, retain=keeps, session=session, want_cache_report=True)


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "foreword")


def sabotage(make: Callable[[], EngineCore], *, every: bool = False, of: tuple[str, ...] = ("",)) -> set[str]:
    """Let calls of these classes raise, each in an engine of its own: every one, or the first and last of each function.
    Returns all functions that were called."""
    run(make(), asked("victim", "s"), asked("other"))  # what is remembered from here on is not called again
    counting = Saboteur("victim")
    with counting.at_work():
        whole = run(make(), asked("victim", "s"), asked("other"))
    assert [deltas[-1].finish_reason for deltas in whole.values()] == ["length", "length"]
    calls = counting.calls
    wanted = [number for number, where in enumerate(calls) if where.startswith(of)]
    if not every:
        first = {calls[number]: number for number in reversed(wanted)}
        last = {calls[number]: number for number in wanted}
        wanted = sorted({*first.values(), *last.values()})
    for nth in wanted:
        core, seen, saboteur = make(), Seen(), Saboteur("victim", nth)
        core._observers = (*core._observers, seen)
        with saboteur.at_work():
            found = run(core, asked("victim", "s"), asked("other"))
        assert text(found["other"]) == text(whole["other"]), calls[nth]
        assert found["other"][-1].finish_reason == "length", calls[nth]
        end = found["victim"][-1]
        assert end.finish_reason == "error" and isinstance(end.failure, RequestFailed), calls[nth]
        assert "Planted" in end.failure.message
        assert RequestBroken("victim", "Planted") in seen.events, calls[nth]
        assert core.scheduler.num_admitted == 0
        again = run(core, asked("victim"))
        assert text(again["victim"]) == text(whole["victim"]), calls[nth]
        book, tenant = core.leases.book, tenant_digest(b"")
        book.release(tenant, [one.key for one in book.of(tenant)])
        core.leases.settle()
        core.cache.check()
        # A retention that is cut in half may leave the blocks of its 8 tokens pinned; nothing else is lost.
        lost = core.cache.pool.num_blocks - core.cache.pool.num_free
        assert lost <= (2 * len(core.cache.groups) if "Lease" in calls[nth] else 0), calls[nth]
    return set(calls)


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.extended)])
def test_each_call_behind_the_sampler(every: bool) -> None:
    """Whatever the engine calls for a request behind the sampler, and at its end, raises once: that request ends with an error
    that names it, the other one completes, its blocks go back, and the engine serves the next."""

    def make() -> EngineCore:
        core = make_core(ScriptedRunner(lambda sequence: 60 + sequence.num_output))
        core.leases = EngineLeases(core.cache, 32, 32)
        core._observers = (Seen(),)
        return core

    places = sabotage(make, every=every)
    expected = {"OutputText.push", "AnswerStopFinder.push", "TextStream.push", "EngineCore.notify", "Scheduler.finish"}
    assert expected <= places


@pytest.mark.extended
def test_each_call_with_stores(engine: Callable[..., LLM]) -> None:
    """A call that raises for one of two requests costs only that one, also where blocks are saved, of a model with windows."""
    made: list[LLM] = []

    def make() -> EngineCore:
        llm = engine("gemma3", store="memory://?size=16MiB")
        made.append(llm)
        return llm._core

    try:
        places = sabotage(make, of=("BlockSaver", "OffloadManager", "CheckpointPlan", "LeaseFollower"))
    finally:
        for llm in made:
            llm.close()
    assert {"BlockSaver.save_chunk", "BlockSaver._save_turn", "OffloadManager.save", "BlockSaver.end"} <= places


def test_prompts_of_a_batch(engine: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    """`LLM.generate` returns the error of the prompt that failed, and the outputs of all others."""
    llm, prompts = engine("llama"), [tiny.prompt(9, number) for number in range(8)]
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    whole = llm.generate(prompts, params)
    push = loop.OutputText.push

    def fail(self: Any, token: int) -> tuple[str, str | None]:
        if self in broken:
            raise Planted("a tokenizer of another package")
        return push(self, token)

    opened = loop.OutputText.__init__
    broken: list[Any] = []

    def remember(self: Any, tokenizer: Any, request: Request) -> None:
        opened(self, tokenizer, request)
        if request.tokens == tuple(prompts[5]):
            broken.append(self)

    monkeypatch.setattr(loop.OutputText, "__init__", remember)
    monkeypatch.setattr(loop.OutputText, "push", fail)
    outputs = llm.generate(prompts, params)
    assert [output.error is None for output in outputs] == [True] * 5 + [False] + [True] * 2
    assert isinstance(outputs[5].error, RequestFailed)
    for number, output in enumerate(outputs):
        assert number == 5 or output.outputs[0].tokens == whole[number].outputs[0].tokens
    with pytest.raises(RequestFailed):
        llm.generate([prompts[5]], params)
    llm.check()
