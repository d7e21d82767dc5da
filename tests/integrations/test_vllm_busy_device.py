"""The worker side of the connector on a busy device (busy_device.py): vLLM gets the blocks of an aborted request when nothing
writes into them any more, and its thread waits for no copy."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from busy_device import BusyDevice
from direct_engine import small_pieces
from test_vllm_sleep import FakeWorker, vllm  # noqa: F401 - a fixture

pytest.importorskip("triton")
FRAME_PIECES = 64  # in a piece of the ring, of the frames of direct_engine.py: the blocks here are larger


@pytest.fixture(params=["staging", "direct"])
def busy(
    vllm: Callable[[str], Any],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> Iterator[tuple[FakeWorker, BusyDevice]]:
    """A worker with a chain of four blocks in its stores, and its device; with and without a staging arena between the two."""
    device, direct = BusyDevice(), request.param == "direct"
    small_pieces(monkeypatch, FRAME_PIECES)
    module = vllm("worker_side")
    monkeypatch.setattr(module, "StagingArena", partial(module.StagingArena, queues=device))
    worker = FakeWorker(vllm, direct=direct)
    assert (worker.offload.direct_state == "on") is direct
    for number in range(4):
        worker.compute(number, number)
    yield worker, device
    device.end_step()
    worker.connector.close()


def test_an_aborted_request(busy: tuple[FakeWorker, BusyDevice]) -> None:
    """vLLM has finished a request whose blocks are being loaded. It hears of that when the copies are done, not before."""
    worker, device = busy
    device.begin_step()
    worker.load("aborted", 8, 9, 10, 11)
    [load] = worker.connector._loading.values()
    device.settle(lambda: load.done)
    worker.connector.stop_loads({"aborted"})
    for _ in range(3):
        worker.connector.wait()
        assert not worker.connector.take_received(), "vLLM got blocks that are written to"
    assert not device.waits[threading.get_ident()], "vLLM's thread waited for the device"
    device.end_step()
    assert worker.received() == ({"aborted"}, set())


@pytest.mark.parametrize("way", ["sleep", "degraded"])
def test_blocks_that_vllm_takes_at_once(busy: tuple[FakeWorker, BusyDevice], way: str) -> None:
    """Before vLLM sleeps, or when the connector gives up, blocks are gone when the call returns: it waits for the copies that
    have begun, and no other begins."""
    worker, device = busy
    device.begin_step()
    worker.load("lost", 8, 9, 10, 11)
    [load] = worker.connector._loading.values()
    device.settle(lambda: load.done)
    end = worker.connector.unregister_kv_caches if way == "sleep" else worker.connector.drop_loads
    ending = threading.Thread(target=end)
    ending.start()
    ending.join(0.05)
    assert ending.is_alive(), "vLLM got blocks that are written to"
    device.end_step()
    ending.join(60.0)
    assert not load.copying and not load.close()
