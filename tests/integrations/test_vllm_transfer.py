"""Real vLLMs that read each other's blocks: disaggregated prefill, and memory tiers of other instances. Needs
FOREWORD_VLLM_PYTHON; skipped without. The tests share instances, because one takes long to start."""

from __future__ import annotations

import glob
import math
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from servers import wait_until
from vllm_process import BLOCK, RemoteVllm, make_model, needs_vllm, prompts, vllm

pytestmark = needs_vllm

SECRET = "a secret of the right length for tests"
ENVIRONMENT = {"FOREWORD_TEST_SECRET": SECRET, "FOREWORD_OTHER_SECRET": SECRET[::-1]}
# Generous, for a busy machine.
PATIENCE = {"progress_timeout": 300.0}
TRANSFER = {"secret_env": "FOREWORD_TEST_SECRET", **PATIENCE}
PROMPTS = prompts(71, [200, 20, 128, 140, 170, 180, 150, 160])
LONG, SHORT, EXACT, AGAIN, REFUSED, OTHER, DYING, DEAD = PROMPTS


Start = Callable[..., RemoteVllm]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("vllm") / "model")


@pytest.fixture(scope="module")
def start(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Starts an instance; wait for `ready()`."""
    folder = tmp_path_factory.mktemp("logs")
    running: list[RemoteVllm] = []

    def one(store: list[str], **job: Any) -> RemoteVllm:
        running.append(RemoteVllm(folder / f"{len(running)}.log", ENVIRONMENT, model, store, **job))
        return running[-1]

    yield one
    for each in running:
        each.end()


@pytest.fixture(scope="module")
def alone(model: Path) -> dict[int, list[int]]:
    """The answers of a vLLM without a connector, by the length of the prompt."""
    found = vllm(model, None, [PROMPTS])["rounds"][0]
    return {len(prompt): one["tokens"] for prompt, one in zip(PROMPTS, found, strict=True)}


@pytest.fixture(scope="module")
def pair(start: Start) -> tuple[RemoteVllm, RemoteVllm]:
    """A producer without stores, and a consumer with a memory tier."""
    first = start([], role="kv_producer", extra={"transfer": {**TRANSFER, "lease_seconds": 20}})
    second = start(["memory://?size=64MiB"], role="kv_consumer", extra={"transfer": TRANSFER})
    return first.ready(), second.ready()


def test_disaggregated_prefill(pair: tuple[RemoteVllm, RemoteVllm], alone: dict[int, list[int]]) -> None:
    """The consumer loads all full blocks of the prompt and computes the rest, at most one block; the answers are those of one
    vLLM alone. The producer has its blocks back once they were read. The consumer's store keeps what was loaded."""
    producer, consumer = pair
    free = producer.call("state")["free"]
    for prompt in (LONG, EXACT):
        before = consumer.call("state")["read"]
        params = producer.prefill(prompt)
        assert params["do_remote_prefill"]
        assert producer.call("state")["free"] == free - math.ceil(len(prompt) / BLOCK)
        found = consumer.ask(prompt, params)
        assert found["tokens"] == alone[len(prompt)]  # vLLM reports the producer's `cached`
        assert consumer.call("state")["read"] == [before[0], before[1] + len(prompt) // BLOCK]
        after = producer.call("idle")
        assert after["free"] == free and after["leases_unread"] == 0
    consumer.call("forget")
    assert consumer.ask(LONG)["cached"] == len(LONG) // BLOCK * BLOCK
    assert consumer.call("state")["read"][0] == len(LONG) // BLOCK


def test_only_missing_blocks_are_transferred(pair: tuple[RemoteVllm, RemoteVllm], alone: dict[int, list[int]]) -> None:
    """Blocks that the consumer has on its device or in its store are not transferred; if it has all, the lease ends at once. A
    prompt shorter than a block is not handed off."""
    producer, consumer = pair
    prompt = AGAIN
    consumer.ask(prompt[: 2 * BLOCK + 5])
    for here, forgets in ((2, False), (4, True), (4, False)):
        if forgets:
            consumer.call("forget")
        leased, read = producer.call("state")["leased"], consumer.call("state")["read"][1]
        found = consumer.ask(prompt, producer.prefill(prompt))
        assert found["tokens"] == alone[len(prompt)]
        assert producer.call("idle")["leased"] - leased == 4 - here
        assert consumer.call("state")["read"][1] - read == 4 - here
    assert producer.call("state")["leases_unread"] == 0
    params = producer.ask(SHORT, {"do_remote_decode": True}, 1)["params"]
    assert params is None and consumer.ask(SHORT, params)["tokens"] == alone[len(SHORT)]


def test_refused_handoffs(pair: tuple[RemoteVllm, RemoteVllm], start: Start, alone: dict[int, list[int]]) -> None:
    """A forged message, another prompt, an invalid message, one of another connector, another block size: the prompt is
    computed, and the log says why. A lease that no instance reads expires."""
    producer, consumer = pair
    other = start([], role="kv_consumer", extra={"transfer": TRANSFER}, llm={"block_size": 64})
    free = producer.call("state")["free"]
    params = producer.prefill(REFUSED)
    forged = {**params, "foreword": {**params["foreword"], "addresses": ["127.0.0.1:1"]}}
    cases = [
        (consumer, REFUSED, forged, "written with another secret"),
        (consumer, OTHER, params, "another prompt"),
        (consumer, OTHER, {**params, "foreword": "nonsense"}, "are not valid"),
        (consumer, OTHER, {"do_remote_prefill": True, "remote_port": 5600}, "another KV connector"),
        (other.ready(), REFUSED, params, "the block size is 32 there and 64 here"),
    ]
    for side, prompt, given, why in cases:
        side.call("forget")
        read = side.call("state")["read"][-1]
        found = side.ask(prompt, given)
        assert found["tokens"] == alone[len(prompt)] and why in " ".join(found["warnings"])
        assert side.call("state")["read"][-1] == read
    other.end()
    before, after = producer.call("state"), producer.call("idle")
    assert before["free"] < free == after["free"] and after["leases_unread"] == before["leases_unread"] + 1


def test_memory_tier_of_a_separate_worker(
    pair: tuple[RemoteVllm, RemoteVllm], start: Start, alone: dict[int, list[int]]
) -> None:
    """Blocks are read from the memory tier of another vLLM (`peer://`), and evicted ones found in its worker's memory, with
    scheduler and worker in separate processes, as under `vllm serve`. With another secret no hand-off is accepted. The socket
    for lookups in the worker's memory is in a folder that only this user may enter, and is removed with the worker. vLLM binds
    the worker to a core (0, in these tests); the connector's threads are not bound to it."""
    producer, consumer = pair
    consumer.ask(LONG)
    consumer.call("forget")
    before = consumer.call("state")
    stores = ["memory://?size=64MiB", f"peer://{before['address']}?secret_env=FOREWORD_TEST_SECRET"]
    separate = start(
        stores, separate=True, extra={"transfer": {**TRANSFER, "secret_env": "FOREWORD_OTHER_SECRET"}}
    ).ready()
    [folder] = set(sockets()) - BEFORE
    assert os.stat(folder).st_mode & 0o777 == 0o700
    blocks = len(LONG) // BLOCK

    def read_from_peer() -> int:
        """How many of the prompt's blocks, all of which are loaded."""
        earlier = consumer.call("state")["shared"]
        found = separate.ask(LONG)
        assert found["tokens"] == alone[len(LONG)] and found["cached"] == blocks * BLOCK
        separate.call("forget")
        return int(consumer.call("state")["shared"] - earlier)

    assert read_from_peer() == blocks
    # Its own memory has them when nothing was loaded for a moment.
    wait_until(lambda: read_from_peer() == 0, "the memory tier")
    found = separate.ask(OTHER, producer.prefill(OTHER))
    assert found["tokens"] == alone[len(OTHER)] and "written with another secret" in separate.log
    cores = os.sched_getaffinity(separate.pid)
    if cores > {0}:
        [worker] = [process for process in descendants(separate.pid) if thread_cores(process)[0] == {0}]
        assert cores in thread_cores(worker)
    separate.end()
    assert folder not in sockets()


def test_producer_dies(pair: tuple[RemoteVllm, RemoteVllm], alone: dict[int, list[int]]) -> None:
    """If the producer is killed before or while its blocks are read, the consumer recomputes."""
    producer, consumer = pair
    free = consumer.call("state")["free"]
    params = [producer.prefill(prompt) for prompt in (DYING, DEAD)]
    found = consumer.call("ask_and_kill", prompt=DYING, params=params[0], victim=producer.pid)
    assert found["tokens"] == alone[len(DYING)]
    found = consumer.ask(DEAD, params[1])
    assert found["tokens"] == alone[len(DEAD)] and "no blocks are loaded from producer" in " ".join(found["warnings"])
    assert consumer.call("idle")["free"] == free


def thread_cores(process: int) -> list[set[int]]:
    """The cores of each thread of a process, the main thread first."""
    return [os.sched_getaffinity(int(thread)) for thread in sorted(os.listdir(f"/proc/{process}/task"), key=int)]


def descendants(process: int) -> list[int]:
    found = []
    for thread in os.listdir(f"/proc/{process}/task"):
        for child in Path(f"/proc/{process}/task/{thread}/children").read_text().split():
            found += [int(child), *descendants(int(child))]
    return found


def sockets() -> list[str]:
    return glob.glob(f"{tempfile.gettempdir()}/foreword-vllm-*")


BEFORE = set(sockets())
