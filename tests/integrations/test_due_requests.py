"""Requests that may fill a block in a step: against a look at every request, and what a step costs."""

from __future__ import annotations

import random
import sys
from types import FrameType

import pytest

from foreword.integrations.vllm.due_requests import DueRequests

BLOCK = 16


@pytest.mark.parametrize("seed", range(20))
def test_no_filled_block_is_missed(seed: int) -> None:
    """Requests decode, also several tokens in a step of which some are rejected, prefill in chunks, pause, are preempted, start
    again and end. Each step that fills a block of a request has the request among those that are due, once."""
    draw = random.Random(seed)
    per_step = draw.choice((1, 1, 3))
    due = DueRequests(per_step)
    computed: dict[str, int] = {}
    filled: dict[str, int] = {}
    waiting: set[str] = set()
    asked = needed = 0
    for step in range(600):
        if len(computed) < 40 and draw.random() < 0.3:
            name = f"r{step}"
            computed[name], filled[name] = draw.randrange(3 * BLOCK), 0
            due.watch(name)
        for name in [name for name in computed if draw.random() < 0.01]:
            what = draw.choice(("end", "preempt", "resume"))
            if what == "end":
                due.forget(name)
                del computed[name], filled[name]
                waiting.discard(name)
            elif what == "preempt":
                waiting.add(name)
            elif name in waiting:
                waiting.remove(name)
                computed[name] = filled[name] = 0
                due.watch(name)
        scheduled = {}
        for name in computed:
            if name not in waiting and draw.random() < 0.95:
                scheduled[name] = draw.randrange(1, 100) if draw.random() < 0.02 else draw.randint(1, per_step)
        found = due.take(scheduled, sum(scheduled.values()))
        now = list(found)
        assert len(now) == len(set(now))
        for name, tokens in scheduled.items():
            fills = computed[name] + tokens >= (filled[name] + 1) * BLOCK
            needed += fills
            assert not fills or name in now
        for name in now:
            asked += 1
            if name in waiting or name not in computed:
                due.forget(name)
            elif name not in scheduled:
                due.watch(name)
            else:
                position = computed[name] + scheduled[name]
                filled[name] = position // BLOCK
                due.watch(name, (filled[name] + 1) * BLOCK - position)
        for name, tokens in scheduled.items():
            computed[name] += tokens if draw.random() < 0.7 else draw.randint(1, tokens)  # the rest was rejected
    assert needed > 200 and asked < 3 * needed


def test_requests_that_are_due_for_another_reason() -> None:
    due = DueRequests(1)
    assert list(due.take({"a": 1, "b": 1}, 2, ["b", "c"])) == ["b"], "only what is scheduled"


@pytest.mark.parametrize("requests", [1, 16, 64, 10_000])
def test_a_step_costs_what_is_due(requests: int) -> None:
    """A step of decoding in which nothing is due makes the same calls however many requests decode or wait."""
    due, calls = DueRequests(1), 0
    names = {f"r{number}": 1 for number in range(requests)}
    for name in names:
        due.watch(name)
    for name in due.take(names, requests):
        due.watch(name, BLOCK)

    def note(frame: FrameType, event: str, arg: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    for _ in range(BLOCK - 1):
        sys.setprofile(note)
        found = due.take(names, requests)
        sys.setprofile(None)
        assert not found
    assert calls <= 5 * (BLOCK - 1)
    assert len(list(due.take(names, requests))) == requests
