"""Several real vLLMs that read each other's blocks: prefill on one, decode on another, and memory tiers of others. Needs
FOREWORD_VLLM_PYTHON, as test_vllm.py does; skipped without. Starting one takes long, so the tests share a few."""

from __future__ import annotations

import glob
import math
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm_process import BLOCK, Told, make_model, needs_vllm, prompts, vllm

pytestmark = needs_vllm

SECRET = "a secret of the right length for tests"
ENVIRONMENT = {"FOREWORD_TEST_SECRET": SECRET, "FOREWORD_OTHER_SECRET": SECRET[::-1]}
# With time for a machine that is busy with other things.
PATIENCE = {"connect_timeout": 60.0, "answer_timeout": 60.0, "beat_seconds": 20.0}
TRANSFER = {"secret_env": "FOREWORD_TEST_SECRET", **PATIENCE}
PROMPTS = prompts(71, [200, 20, 128, 140, 170, 180, 150, 160])
LONG, SHORT, EXACT, AGAIN, REFUSED, OTHER, DYING, DEAD = PROMPTS


Start = Callable[..., Told]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("vllm") / "model")


@pytest.fixture(scope="module")
def start(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Begins to start one; wait for `ready()`."""
    folder = tmp_path_factory.mktemp("logs")
    running: list[Told] = []

    def one(store: list[str], **job: Any) -> Told:
        running.append(Told(folder / f"{len(running)}.log", ENVIRONMENT, model, store, **job))
        return running[-1]

    yield one
    for each in running:
        each.end()


@pytest.fixture(scope="module")
def alone(model: Path) -> dict[int, list[int]]:
    """What one vLLM without a connector answers, by the length of the prompt."""
    found = vllm(model, None, [PROMPTS])["rounds"][0]
    return {len(prompt): one["tokens"] for prompt, one in zip(PROMPTS, found, strict=True)}


@pytest.fixture(scope="module")
def pair(start: Start) -> tuple[Told, Told]:
    """One that only prefills, without stores, and one that only decodes, with a memory tier."""
    first = start([], role="kv_producer", extra={"transfer": {**TRANSFER, "lease_seconds": 20}})
    second = start(["memory://?size=64MiB"], role="kv_consumer", extra={"transfer": TRANSFER})
    return first.ready(), second.ready()


def test_prefill_here_decode_there(pair: tuple[Told, Told], alone: dict[int, list[int]]) -> None:
    """The decode side loads all whole blocks of the prompt and computes the rest, at most one block; the tokens are those of
    one vLLM alone. The prefill side has its blocks back as soon as they were read. What came is in the decode side's store."""
    producer, consumer = pair
    free = producer.tell("state")["free"]
    for prompt in (LONG, EXACT):
        before = consumer.tell("state")["read"]
        params = producer.prefill(prompt)
        assert params["do_remote_prefill"]
        assert producer.tell("state")["free"] == free - math.ceil(len(prompt) / BLOCK)
        found = consumer.ask(prompt, params)
        assert found["tokens"] == alone[len(prompt)]  # of `cached` vLLM says what the prefill side had
        assert consumer.tell("state")["read"] == [before[0], before[1] + len(prompt) // BLOCK]
        after = producer.tell("idle")
        assert after["free"] == free and after["leases_unread"] == 0
    consumer.tell("forget")
    assert consumer.ask(LONG)["cached"] == len(LONG) // BLOCK * BLOCK
    assert consumer.tell("state")["read"][0] == len(LONG) // BLOCK


def test_only_what_is_missing_travels(pair: tuple[Told, Told], alone: dict[int, list[int]]) -> None:
    """Of a prompt whose first blocks the decode side has, on its device or in its store, only the others come; where it has
    them all, none comes, and the prefill side is told so. A prompt shorter than a block is not handed over at all."""
    producer, consumer = pair
    prompt = AGAIN
    consumer.ask(prompt[: 2 * BLOCK + 5])
    for here, forgets in ((2, False), (4, True), (4, False)):
        if forgets:
            consumer.tell("forget")
        lent, read = producer.tell("state")["lent"], consumer.tell("state")["read"][1]
        found = consumer.ask(prompt, producer.prefill(prompt))
        assert found["tokens"] == alone[len(prompt)]
        assert producer.tell("idle")["lent"] - lent == 4 - here
        assert consumer.tell("state")["read"][1] - read == 4 - here
    assert producer.tell("state")["leases_unread"] == 0
    params = producer.ask(SHORT, {"do_remote_decode": True}, 1)["params"]
    assert params is None and consumer.ask(SHORT, params)["tokens"] == alone[len(SHORT)]


def test_what_is_refused(pair: tuple[Told, Told], start: Start, alone: dict[int, list[int]]) -> None:
    """Words that somebody changed, another prompt, nonsense, another connector's words, a side with other blocks: the prompt is
    computed, and the log says why in a sentence. A lease that nobody comes for ends by itself."""
    producer, consumer = pair
    other = start([], role="kv_consumer", extra={"transfer": TRANSFER}, llm={"block_size": 64})
    free = producer.tell("state")["free"]
    params = producer.prefill(REFUSED)
    forged = {**params, "foreword": {**params["foreword"], "addresses": ["127.0.0.1:1"]}}
    cases = [
        (consumer, REFUSED, forged, "written with another secret"),
        (consumer, OTHER, params, "another prompt"),
        (consumer, OTHER, {**params, "foreword": "nonsense"}, "not understood"),
        (consumer, OTHER, {"do_remote_prefill": True, "remote_port": 5600}, "another KV connector"),
        (other.ready(), REFUSED, params, "the block size is 32 there and 64 here"),
    ]
    for side, prompt, given, why in cases:
        side.tell("forget")
        read = side.tell("state")["read"][-1]
        found = side.ask(prompt, given)
        assert found["tokens"] == alone[len(prompt)] and why in " ".join(found["said"])
        assert side.tell("state")["read"][-1] == read
    other.end()
    before, after = producer.tell("state"), producer.tell("idle")
    assert before["free"] < free == after["free"] and after["leases_unread"] == before["leases_unread"] + 1


def test_memory_where_the_worker_is_apart(pair: tuple[Told, Told], start: Start, alone: dict[int, list[int]]) -> None:
    """With the engine, its scheduler and its worker in processes of their own, as under `vllm serve`: blocks are read from the
    memory tier of another vLLM (`peer://`); what vLLM forgot is found in its worker's memory; with another secret nothing is
    taken over. The socket at which the worker's memory is looked for is in a folder that only this user may enter, and goes
    with the worker. vLLM binds the worker to a core (0, in these tests); the connector's threads are not bound to it."""
    producer, consumer = pair
    consumer.ask(LONG)
    consumer.tell("forget")
    before = consumer.tell("state")
    stores = ["memory://?size=64MiB", f"peer://{before['address']}?secret_env=FOREWORD_TEST_SECRET"]
    apart = start(stores, apart=True, extra={"transfer": {**TRANSFER, "secret_env": "FOREWORD_OTHER_SECRET"}}).ready()
    [folder] = set(sockets()) - BEFORE
    assert os.stat(folder).st_mode & 0o777 == 0o700
    blocks = len(LONG) // BLOCK
    for _ in range(2):  # from there, and then from here
        found = apart.ask(LONG)
        assert found["tokens"] == alone[len(LONG)] and found["cached"] == blocks * BLOCK
        assert consumer.tell("state")["shared"] == before["shared"] + blocks
        apart.tell("forget")
    found = apart.ask(OTHER, producer.prefill(OTHER))
    assert found["tokens"] == alone[len(OTHER)] and "written with another secret" in apart.log
    cores = os.sched_getaffinity(apart.pid)
    if cores > {0}:
        [worker] = [process for process in descendants(apart.pid) if thread_cores(process)[0] == {0}]
        assert cores in thread_cores(worker)
    apart.end()
    assert folder not in sockets()


def test_a_prefill_side_that_dies(pair: tuple[Told, Told], alone: dict[int, list[int]]) -> None:
    """Killed while its blocks are read, or before, it costs the decode side a computation and nothing else."""
    producer, consumer = pair
    free = consumer.tell("state")["free"]
    params = [producer.prefill(prompt) for prompt in (DYING, DEAD)]
    found = consumer.tell("ask_and_kill", prompt=DYING, params=params[0], victim=producer.pid)
    assert found["tokens"] == alone[len(DYING)]
    found = consumer.ask(DEAD, params[1])
    assert found["tokens"] == alone[len(DEAD)] and "not taken over" in " ".join(found["said"])
    assert consumer.tell("idle")["free"] == free


def thread_cores(process: int) -> list[set[int]]:
    """On which cores each of a process's threads may run, the first thread first."""
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
