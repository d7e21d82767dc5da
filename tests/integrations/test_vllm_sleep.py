"""Sleep mode: the worker side of the connector around a sleep of vLLM's worker, which is played here over real tensors and real
stores: it takes the memory from under the KV cache, whose contents are then lost. The last test needs FOREWORD_VLLM_PYTHON."""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm_process import BLOCK as VLLM_BLOCK
from vllm_process import RemoteVllm, make_model, needs_vllm, prompts
from vllm_stub import stubbed_vllm
from vllm_waits import WITHIN

from foreword.blocks.layout import LayerLayout, Layout, chain_prefix, whole_blocks
from foreword.blocks.resume import GroupKind, KVGroup
from foreword.offload.staging import StagingArena

pytestmark = pytest.mark.timeout(2 * WITHIN)
BLOCKS, BLOCK, HEADS, DIM = 12, 4, 2, 8
LOST = 0xEE
ROOT = b"r" * 32
KEYS = tuple(bytes([number]) * 32 for number in range(4))
LAYOUT = Layout(b"m" * 16, BLOCK, (LayerLayout(HEADS, DIM, DIM),) * 2, "float32", order="test")


@pytest.fixture(scope="module")
def vllm() -> Iterator[Callable[[str], Any]]:
    """Imports a module of the connector."""
    with stubbed_vllm():
        yield lambda name: importlib.import_module(f"foreword.integrations.{name if '.' in name else f'vllm.{name}'}")


class FakeWorker:
    """A worker of vLLM: its KV cache, the connector's worker side, and steps that save and load blocks."""

    def __init__(self, vllm: Callable[[str], Any], *, direct: bool = False, opens: bool = True) -> None:
        self._messages = vllm("step_messages")
        self.caches = {f"layer {n}": torch.zeros(BLOCKS, HEADS, BLOCK, 2 * DIM) for n in range(2)}
        group = KVGroup(GroupKind.FULL, BLOCK)
        info = SimpleNamespace(
            config=SimpleNamespace(lora_config=None, model_config=SimpleNamespace(model="m")), ranks=1, num_blocks=BLOCKS,
            groups=[SimpleNamespace(layer_names=tuple(self.caches), uneven=False, group=group, facts={})],
            layouts=lambda rank: (LAYOUT,), units=lambda rank: (whole_blocks(LAYOUT),), separate=False,
            events=False, model=LAYOUT.model, settle=lambda namespace: None, key_size=BLOCK, divisible=True,
            trusts=False, base=bytes(32), settings="5e" * 32,
        )  # fmt: skip
        settings = vllm("connector_config").ConnectorSettings.read(
            {"store": "memory://?size=1MiB", "load_timeout": WITHIN, "direct": direct}
        )
        self.connector = vllm("worker_side").ForewordConnectorWorker(info, settings, "engine")
        self.connector.register_kv_caches(self.caches)
        if opens:
            self.connector.open(None)
        self.offload = self.connector.offload

    def compute(self, number: int, block: int) -> None:
        """A step computes block `number` of the chain into vLLM's block `block`, and saves it."""
        for layer, cache in enumerate(self.caches.values()):
            cache[block] = 10 * number + layer + 1
        save = self._messages.BlockSave(0, ROOT, KEYS[number : number + 1], KEYS[number - 1], number, (block,))
        self.connector.save(self._messages.ForewordConnectorMetadata(saves=[save], tokens=BLOCK))
        assert self.offload.flush(WITHIN)

    def load(self, request: str, *blocks: int) -> None:
        """A step starts to load the first blocks of the chain."""
        numbers = tuple(range(len(blocks)))
        part = self._messages.GroupBlocks(0, numbers, KEYS[: len(blocks)], (0,) * len(blocks), blocks)
        load = self._messages.BlockLoad(request, ROOT, 0, BLOCK * len(blocks), (part,))
        self.connector.start_loads([load])

    def received(self) -> tuple[set[str], set[int]]:
        """Collects what the next steps report: requests whose loads have ended, and their blocks that are not loaded."""
        ended: set[str] = set()
        while not ended:
            self.connector.wait()
            ended = self.connector.take_received()
        return ended, self.connector.take_failed_blocks()

    def sleep(self) -> None:
        self.connector.unregister_kv_caches()
        for cache in self.caches.values():
            cache.view(torch.uint8).fill_(LOST)

    def wake_up(self) -> None:
        assert all(bool((cache.view(torch.uint8) == LOST).all()) for cache in self.caches.values()), "was written to"
        self.connector.restore_kv_caches()

    def holds(self, number: int, block: int) -> bool:
        """Whether vLLM's block `block` has what was computed as block `number` of the chain."""
        caches = self.caches.values()
        return all(bool((cache[block] == 10 * number + layer + 1).all()) for layer, cache in enumerate(caches))


@pytest.fixture
def worker(vllm: Callable[[str], Any]) -> Iterator[FakeWorker]:
    found = FakeWorker(vllm)
    yield found
    found.connector.close()


class Gate:
    """Holds up the calls of a method until it is opened."""

    def __init__(self, owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self._open = threading.Event(), threading.Event()
        inner = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.reached.set()
            assert self._open.wait(WITHIN)
            return inner(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    def holds_up(self, call: Callable[[], object]) -> None:
        """Check that `call`, which is made while the gate holds up another, does not end before the gate is open."""
        assert self.reached.wait(WITHIN)
        ended: list[bool] = []

        def run() -> None:
            call()
            ended.append(self._open.is_set())

        thread = threading.Thread(target=run)
        thread.start()
        thread.join(0.05)
        self._open.set()
        thread.join(WITHIN)
        assert ended == [True]


def test_nothing_is_kept_of_a_worker_whose_stores_did_not_open(vllm: Callable[[str], Any]) -> None:
    """When it is closed, no engine of this process finds it any more, nor what it has of vLLM's KV cache."""
    connector = FakeWorker(vllm, opens=False).connector
    assert vllm("worker_side").worker_of("engine") is connector
    connector.close()
    assert vllm("worker_side").worker_of("engine") is None


def test_blocks_survive_a_sleep_in_the_stores(worker: FakeWorker) -> None:
    """Blocks that were saved before a sleep are loaded after it, at once."""
    for number, block in enumerate((3, 7)):
        worker.compute(number, block)
    worker.sleep()
    worker.wake_up()
    worker.load("after", 5, 6)
    assert worker.received() == ({"after"}, set())
    assert worker.holds(0, 5) and worker.holds(1, 6)


def test_a_load_in_flight_ends_before_the_memory_goes(worker: FakeWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM sleeps while a block is copied into its cache: it waits for that copy, nothing is copied after it, and the load has
    failed as a whole, because what was loaded is lost."""
    for number in range(4):
        worker.compute(number, number)
    gate = Gate(worker.offload._staging, "start_scatter", monkeypatch)
    worker.load("loading", 8, 9, 10, 11)
    gate.holds_up(worker.connector.unregister_kv_caches)
    worker.sleep()
    worker.wake_up()
    assert worker.received() == ({"loading"}, {8, 9, 10, 11})


def test_a_load_that_vllm_has_not_heard_of(worker: FakeWorker) -> None:
    """A load that ended before the sleep, and that is reported after it, has failed too."""
    worker.compute(0, 0)
    worker.load("loaded", 8)
    worker.connector.wait()
    while not worker.connector._loading["loaded"].finished:
        worker.offload.wait(worker.offload.changes, 0.01)
    worker.sleep()
    worker.wake_up()
    assert worker.received() == ({"loaded"}, {8})


def test_nothing_is_loaded_or_saved_in_sleep(worker: FakeWorker) -> None:
    """Between the two hooks a load fails at once and a save saves nothing: the memory is not there."""
    worker.compute(0, 0)
    worker.sleep()
    saved = worker.offload.status().saved
    worker.load("asleep", 8)
    assert worker.received() == ({"asleep"}, {8})
    worker.wake_up()
    worker.connector.unregister_kv_caches()
    worker.compute(1, 1)
    assert worker.offload.status().saved == saved
    worker.connector.restore_kv_caches()
    worker.compute(1, 1)
    assert worker.offload.status().saved == saved + 1


def test_a_cache_that_has_moved(worker: FakeWorker, caplog: pytest.LogCaptureFixture) -> None:
    """If the KV cache is elsewhere after a sleep, the log says so, and nothing is saved or loaded any more."""
    worker.compute(0, 0)
    worker.sleep()
    for cache in worker.caches.values():
        cache.set_(torch.zeros_like(cache))  # type: ignore[no-untyped-call]
    with caplog.at_level(logging.ERROR, "vllm.foreword"):
        worker.connector.restore_kv_caches()
    assert "at other addresses after sleep mode" in caplog.text
    worker.load("after", 8)
    assert worker.received() == ({"after"}, {8})


def test_leased_blocks(vllm: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that another instance reads: a sleep waits for the copy that is under way, and no reader finds them after it."""
    cache = torch.ones(BLOCKS, HEADS, BLOCK, 2 * DIM)
    layout = Layout(b"m" * 16, BLOCK, (LayerLayout(HEADS, DIM, DIM),), "float32", order="test")
    staging = StagingArena([[cache]], 8)
    leases = vllm("vllm_extras.endpoints").KVLeases([layout], staging, [], WITHIN)
    save = vllm("step_messages").BlockSave(0, ROOT, KEYS[:2], b"p" * 32, 0, (3, 7))
    leases.add(vllm("vllm_extras.step_parts").BlockLease("request", b"l" * 16, (save,), ()))
    names = [chain_prefix(layout.fingerprint, ROOT) + key for key in KEYS[:2]]
    assert leases.locate(names, WITHIN) == 2
    gate = Gate(staging, "gather", monkeypatch)
    read: list[Any] = []

    def reader() -> None:
        for frames in leases.get(names, staging.frame_bytes, float("inf")):
            read.extend(bytes(one) for one in frames if one is not None)

    thread = threading.Thread(target=reader)
    thread.start()
    gate.holds_up(leases.drop_held)
    thread.join(WITHIN)
    assert len(read) == 2 and leases.locate(names, WITHIN) == 0
    assert leases.take_ended() == set()  # vLLM gets the blocks back once it has finished the request
    leases.finished(["request"])
    assert leases.take_ended() == {"request"}


@pytest.mark.parametrize(
    "version", [pytest.param(name, marks=needs_vllm, id=name or "unnamed") for name in ("step-1", "")]
)
def test_a_sleep_of_vllm(version: str, tmp_path: Path) -> None:
    """vLLM's engine sleeps and wakes up: its answers stay right although the KV cache has lost its contents. What was saved
    before is found again if the weights' version has a name, which is set again; else they may have changed, and it is not."""
    model, [asked] = make_model(tmp_path / "model"), prompts(91, [200])
    remote = RemoteVllm(
        tmp_path / "log", {}, model, ["memory://?size=64MiB"], extra={"weights_version": version}
    ).ready()
    try:
        before = remote.ask(asked)
        remote.call("forget")
        remote.call("sleep", version=version)
        for cached in (len(asked) // VLLM_BLOCK * VLLM_BLOCK if version else 0, len(asked) // VLLM_BLOCK * VLLM_BLOCK):
            found = remote.ask(asked)
            assert (found["tokens"], found["cached"]) == (before["tokens"], cached)
            remote.call("forget")
    finally:
        remote.end()
