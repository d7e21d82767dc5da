"""The recorded first conversations of real clients, sent to every front."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from first_calls import FOLDER, PAGE, RECORDED_MODEL, FirstCall, first_calls, fronts, replay
from vllm_process import needs_vllm

CALLS = pytest.mark.parametrize("call", first_calls(), ids=lambda call: call.name)
Fronts = dict[str, tuple[str, str]]


@pytest.fixture(scope="module")
def started() -> Iterator[Fronts]:
    with fronts(vllm=False) as found:
        yield found


@pytest.fixture(scope="module")
def with_vllm() -> Iterator[Fronts]:
    with ExitStack() as stack:
        yield stack.enter_context(fronts(vllm=True))


@pytest.mark.parametrize("front", ["server", "router"])
@CALLS
def test_first_calls(started: Fronts, call: FirstCall, front: str) -> None:
    """Each request of a client's first conversation has the status that it had when it was recorded, and each stream ends as
    its dialect says."""
    assert replay(call, *started[front]) == []


@pytest.mark.slow
@pytest.mark.timeout(1200)
@needs_vllm[1]
@CALLS
def test_first_calls_before_vllm(with_vllm: Fronts, call: FirstCall) -> None:
    """The first calls of the guide work with a real vLLM behind the router."""
    assert replay(call, *with_vllm["router before vLLM"]) == []


def test_the_table_has_every_client() -> None:
    """The guide's table has a row for each recorded client."""
    page = PAGE.read_text(encoding="utf-8")
    for call in first_calls():
        assert f"| {call.client} {call.version} | {', '.join(call.dialects)} |" in page


def test_recordings_are_small_and_name_nothing() -> None:
    """A fixture has at most 64 KiB, no key but "none", no folder of a machine, and the built-in model's name."""
    for path in FOLDER.glob("*.json"):
        text = path.read_text(encoding="utf-8")
        assert len(text) < 64 << 10, path
        assert not re.search(r"/tmp/|/root|/work|authorization|x-api-key|sk-", text, re.IGNORECASE), path
        assert RECORDED_MODEL in text or not any(one["body"] for one in json.loads(text)["requests"])
