"""Requests that have ended while their saves wait for room: vLLM keeps their blocks until all is saved, or for a bounded time,
and gets them back at once where it must."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from test_vllm_late_saves import Gated
from test_vllm_sleep import BLOCK, LAYOUT, ROOT, FakeWorker, vllm  # noqa: F401 - a fixture

from foreword.blocks.keys import chain_keys
from foreword.blocks.layout import block_names
from foreword.conformance import soon
from foreword.offload.search import StoredGroup

COUNT = 12


@pytest.fixture
def worker(vllm: Callable[[str], Any]) -> Iterator[FakeWorker]:  # noqa: F811
    """A worker whose store writes nothing, with a request that has computed more blocks than the queue takes."""
    found = FakeWorker(vllm)
    tier = found.offload.store.tiers[0]
    tier.store = Gated(tier.store)
    free = len(found.offload._saving_slots._free)
    found.offload._saving_slots.take(free - found.offload._write_step)  # a small queue
    yield found
    tier.store.gate.set()
    found.connector.close()


def step(worker: FakeWorker, **told: Any) -> set[str]:
    """A step of vLLM's worker. Returns the requests whose blocks vLLM gets back."""
    metadata = worker._messages.ForewordConnectorMetadata(**told)
    worker.connector.begin_step(metadata)
    worker.connector.save(metadata)
    return worker.connector.take_sent(())


CHAIN = tuple(chain_keys(ROOT, [5] * BLOCK * COUNT, BLOCK))


def computed(worker: FakeWorker, request_id: str = "big") -> Any:
    return worker._messages.BlockSave(0, ROOT, CHAIN, ROOT, 0, tuple(range(COUNT)), request_id=request_id)


def test_blocks_are_kept_until_they_are_saved(worker: FakeWorker) -> None:
    """The request ends: vLLM hears nothing of it while saves wait, and gets the blocks when they have been copied."""
    step(worker, saves=[computed(worker)], tokens=COUNT * BLOCK)
    assert worker.connector.is_late("big")
    assert not step(worker, finished=["big"]) and not step(worker)
    assert worker.connector.has_results
    worker.offload.store.tiers[0].store.gate.set()
    sent: set[str] = set()
    while not sent:
        worker.connector.wait()
        sent = step(worker)
    assert sent == {"big"} and worker.offload.flush(60.0)
    assert not worker.offload.status().dropped and worker.offload.status().saved == COUNT


def test_they_are_kept_for_a_bounded_time(worker: FakeWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that writes nothing: vLLM gets the blocks back, and what was not saved is counted."""
    module = __import__(type(worker.connector).__module__, fromlist=["x"])
    monkeypatch.setattr(module, "_KEEP_SECONDS", 0.0)
    step(worker, saves=[computed(worker)], tokens=COUNT * BLOCK)
    assert step(worker, finished=["big"]) == {"big"}
    assert not worker.connector.is_late("big") and worker.offload.status().dropped > 0


def test_a_request_that_loses_its_blocks(worker: FakeWorker) -> None:
    """A preempted request, or one that ended in a step that had begun: the next step drops its saves before it writes."""
    step(worker, saves=[computed(worker)], tokens=COUNT * BLOCK)
    metadata = worker._messages.ForewordConnectorMetadata(ended=["big"])
    assert not metadata.empty
    worker.connector.begin_step(metadata)
    assert not worker.connector.is_late("big")


def test_a_reset_takes_them_at_once(worker: FakeWorker) -> None:
    """Before vLLM resets its cache, the saves of ended requests end, and no step reports them again."""
    step(worker, saves=[computed(worker)], tokens=COUNT * BLOCK)
    step(worker, finished=["big"])
    assert worker.connector.end_loads(["big"]) == {"big"}
    assert not worker.connector.is_late("big") and not step(worker)


@pytest.mark.parametrize("end", ["unregister_kv_caches", "drop_loads"])
def test_sleep_and_giving_up(worker: FakeWorker, end: str) -> None:
    """Before the KV cache loses its memory, and when the connector gives up, nothing is read from it any more."""
    step(worker, saves=[computed(worker)], tokens=COUNT * BLOCK)
    getattr(worker.connector, end)()
    assert not worker.connector.is_late("big")


@pytest.mark.parametrize("case", ["ended", "runs", "computed again", "left behind"])
def test_a_session_ends_while_saves_of_it_wait(worker: FakeWorker, vllm: Callable[[str], Any], case: str) -> None:  # noqa: F811
    """Blocks of an ended session go from the stores, also those that its last request had computed before and that waited for
    room: their saves do not cancel the deletion. Saves of requests that still run, and of those that compute the blocks
    again, do; and blocks that are only left behind are saved."""
    retired = vllm("vllm_extras.step_parts").RetiredBlocks
    worker.connector._info.stored_groups = lambda: (
        StoredGroup(worker.connector._info.groups[0].group, (LAYOUT.fingerprint,)),
    )
    shared, tier = COUNT // 3, worker.offload.store.tiers[0]
    ended = retired((b"t" * 8).hex(), ROOT, CHAIN[shared:], case != "left behind")
    step(worker, saves=[computed(worker)], tokens=COUNT * BLOCK)
    queued = worker.offload.queued
    assert shared < queued < COUNT
    sent = step(worker, finished=[] if case == "runs" else ["big"], retired=[ended])
    if case == "computed again":
        step(worker, saves=[computed(worker, "new")], tokens=COUNT * BLOCK)
    tier.store.gate.set()
    while worker.connector.is_late("big") or worker.connector.is_late("new"):
        worker.connector.wait()
    assert worker.offload.flush(60.0)
    there = tier.store.present(block_names(LAYOUT.fingerprint, ROOT, CHAIN), deadline=soon())
    gone = {"ended": range(shared, COUNT), "runs": range(shared, queued)}.get(case, range(0))
    assert there == [number not in gone for number in range(COUNT)]
    assert not worker.offload.status().dropped and sent | step(worker) == (set() if case == "runs" else {"big"})
