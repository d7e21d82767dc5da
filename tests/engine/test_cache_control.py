"""Cache control in the engine: what is retained stays on the device, yields to requests, expires, and is prefetched."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from example_counts import represented
from patience import patient, unhurried
from tiny import Reference, greedy, prompt

from foreword.blocks.retention import Retention
from foreword.blocks.salt import Salt
from foreword.engine.request import Request, SamplingParams
from foreword.engine_config import EngineConfig, PrefixConfig
from foreword.entrypoints.async_engine import AsyncEngine
from foreword.entrypoints.llm import LLM
from foreword.errors import BadRequest

Make = Callable[..., LLM]
Find = Callable[[str], Reference]
each_kind = pytest.mark.parametrize("family", represented(["llama", "mistral", "gpt_oss", "gemma3_5to1"], "llama"))


def flood(llm: LLM, count: int = 40, length: int = 60) -> None:
    """Other prompts that need more memory than the device has, some at a time."""
    for first in range(0, count, 4):
        llm.generate([prompt(length, 1000 + number) for number in range(first, first + 4)], greedy(1))


@each_kind
def test_a_flood_passes_by_what_is_retained(family: str, engine: Make, reference: Find) -> None:
    """After a flood of other prompts a retained prefix is a hit up to its end; the same prefix without retention is not."""
    truth, tokens = reference(family), prompt(81, 1)
    with engine(family) as llm:
        [first] = llm.generate(tokens, greedy(4), retain=[Retention(80, 60.0)])
        assert [(one.status, one.tokens, one.ttl) for one in first.retained] == [("accepted", 80, 60.0)]
        flood(llm)
        [again] = llm.generate(tokens, greedy(4))
        llm.check()
        assert again.cached_tokens == 80
        truth.check(tokens, again.outputs[0], 4)
        assert [one.tokens for one in llm.release(tokens)] == [80]
        flood(llm)
        [third] = llm.generate(tokens, greedy(4))
        assert third.cached_tokens == 0
        llm.check()


def test_breakpoints_of_one_request(engine: Make) -> None:
    """Several ends in one prompt are answered in order; each is rounded down to whole blocks."""
    with engine("llama") as llm:
        wishes = [Retention(end, 60.0) for end in (3, 30, 61)]
        [output] = llm.generate(prompt(61, 1), greedy(1), retain=wishes)
        assert [(one.status, one.tokens) for one in output.retained] == [
            ("refused", 0),
            ("accepted", 28),
            ("accepted", 60),
        ]
        assert "block" in output.retained[0].reason
        with pytest.raises(BadRequest):
            llm.generate(prompt(10, 1), greedy(1), retain=[Retention(11, 60.0)])


def test_budget_of_the_device(folder: Callable[[str], Path]) -> None:
    """More than the budget is clipped, and the answer says to how many tokens."""
    with LLM(str(folder("llama")), dtype="float32", kv_memory="1024 tokens", block_size=4, threads=1) as llm:
        answer = llm.retain(prompt(400, 1), 60.0, 3)
        assert (answer.status, answer.tokens) == ("clipped", 256), "a quarter of the pool"
        assert "budget" in answer.reason
        assert llm.pin(prompt(40, 2)).status == "accepted", "a pin takes the place of what has a ttl"


@each_kind
def test_retention_never_starves_requests(family: str, engine: Make, reference: Find) -> None:
    """Requests that need the whole pool run: retained blocks yield, and the prefix is kept again at its next use."""
    truth, tokens = reference(family), prompt(101, 1)
    with engine(family, kv_memory="288 tokens", max_num_seqs=4) as llm:
        whole = llm.info.max_model_len - 4
        answer = llm.retain(tokens, 60.0)
        assert answer.tokens > 0 or family == "gemma3_5to1"
        long = prompt(min(whole, 280), 2)
        [output] = llm.generate(long, greedy(3))
        truth.check(long, output.outputs[0], 3)
        outputs = llm.generate([prompt(90 + i, 3 + i) for i in range(6)], greedy(8))
        assert all(len(one.outputs[0].tokens) for one in outputs)
        llm.generate(tokens, greedy(2))
        llm.check()


def test_a_ttl_ends(engine: Make) -> None:
    """After its ttl a retention is over, and its blocks are evicted like others."""
    with engine("llama") as llm:
        llm.retain(prompt(80, 1), 0.05)
        time.sleep(0.1)
        flood(llm)
        [again] = llm.generate(prompt(81, 1), greedy(1))
        assert again.cached_tokens == 0
        assert llm.release() == []


@each_kind
@pytest.mark.extended
def test_prefetch_from_disk(family: str, folder: Callable[[str], Path], tmp_path: Path) -> None:
    """A prefetch brings a session's blocks from disk to the device without computing; the next turn finds them there although
    other prompts came between."""
    options: dict[str, Any] = {"dtype": "float32", "kv_memory": "1024 tokens", "block_size": 4, "threads": 1}
    tokens = prompt(81, 1)
    store = f"disk://{tmp_path}/store?size=64MiB"
    with LLM(str(folder(family)), store=store, **options) as llm:
        [first] = llm.generate(tokens, greedy(4))
    with unhurried(LLM(str(folder(family)), store=patient(store), **options)) as llm:
        steps = llm._core.steps
        answer = llm.prefetch(tokens)
        assert (answer.status, answer.tokens) == ("accepted", 80), answer.reason
        assert llm._core.steps == steps, "nothing was computed"
        flood(llm)
        [again] = llm.generate(tokens, greedy(4), cache_report=True)
        assert again.cache_report is not None
        assert (again.cache_report.device_tokens, again.cache_report.loaded_tokens) == (80, {})
        assert again.outputs[0].tokens == first.outputs[0].tokens
        assert llm.prefetch(prompt(40, 9)).status == "refused", "nothing is known of this one"
        llm.check()


def test_prefetch_yields_to_requests(folder: Callable[[str], Path], tmp_path: Path) -> None:
    """Prefetches and requests that together need more memory than there is: all are answered, and no block leaks."""
    options: dict[str, Any] = {"dtype": "float32", "kv_memory": "256 tokens", "block_size": 4, "threads": 1}
    texts = [prompt(90 + i, i) for i in range(8)]
    store = f"disk://{tmp_path}/store?size=64MiB"

    async def run(engine: AsyncEngine) -> None:
        async def one(number: int) -> int:
            params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
            request = Request(f"r{number}", tuple(texts[number]), params)
            return sum([len(delta.tokens) async for delta in engine.generate(request)])

        draw = random.Random(7)
        for _ in range(3):
            order = draw.sample(range(8), 8)
            prefetches = [engine.prefetch(texts[i][: draw.randrange(1, 90)]) for i in order[:5]]
            answers = await asyncio.gather(*prefetches, *(one(i) for i in order))
            assert answers[5:] == [8] * 8
            assert all(answer.status in ("accepted", "clipped", "refused") for answer in answers[:5])
            await engine.check_integrity()

    engine = AsyncEngine.from_config(
        EngineConfig(model=str(folder("llama")), **options), store=patient(store), prefixes=PrefixConfig()
    )
    try:
        asyncio.run(run(engine))
    finally:
        engine.close()


def test_tenants_keep_apart(folder: Callable[[str], Path]) -> None:
    """A tenant sees and releases its own retentions only, those of its clients' salts too. An erasure of one salt ends those of
    that salt."""

    async def run(engine: AsyncEngine) -> None:
        for salt in (Salt(b"a"), Salt(b"b")):
            assert (await engine.retain(prompt(40, 1), 60.0, salt=salt)).status == "accepted"
        assert engine.release(prompt(40, 1), salt=Salt(b"c")) == []
        assert len(engine.release(prompt(40, 1), salt=Salt(b"a"))) == 1
        assert (engine.retentions(b"a"), len(engine.retentions(b"b"))) == ([], 1)
        one, two = Salt.of(b"b", "one"), Salt.of(b"b", "two")
        for salt in (one, two):
            assert (await engine.retain(prompt(40, 1), 60.0, salt=salt)).status == "accepted"
        assert len(engine.retentions(b"b")) == 3
        assert (await engine.forget(one))["device_blocks"] == 10
        assert len(engine.retentions(b"b")) == 2
        assert (await engine.forget(Salt(b"b")))["device_blocks"] == 20
        assert engine.retentions(b"b") == []
        await engine.check_integrity()
        assert engine.status().retained_blocks == 0

    options: dict[str, Any] = {"dtype": "float32", "kv_memory": "1024 tokens", "block_size": 4, "threads": 1}
    engine = AsyncEngine.from_config(EngineConfig(model=str(folder("llama")), **options))
    try:
        asyncio.run(run(engine))
    finally:
        engine.close()


def test_an_idle_engine_frees_what_expires(folder: Callable[[str], Path], tmp_path: Path) -> None:
    """The blocks of a retention that expires are free again without another request."""

    async def run(engine: AsyncEngine) -> None:
        free, deadline = engine.status().free_blocks, time.monotonic() + 60
        assert (await engine.retain(prompt(40, 1), 0.2)).status == "accepted"
        while engine.status().free_blocks < free and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        assert (engine.status().free_blocks, engine.status().retained_blocks) == (free, 0)

    options: dict[str, Any] = {"dtype": "float32", "kv_memory": "1024 tokens", "block_size": 4, "threads": 1}
    config = EngineConfig(model=str(folder("llama")), **options)
    engine = AsyncEngine.from_config(config, store=patient(f"disk://{tmp_path}?size=16MiB"), prefixes=PrefixConfig())
    try:
        asyncio.run(run(engine))
    finally:
        engine.close()


@pytest.mark.parametrize("began", [False, True])
def test_a_prefetch_of_a_tenant_that_is_forgotten(
    folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, began: bool
) -> None:
    """Blocks that a prefetch loads while its tenant is forgotten, or finds afterwards, do not come onto the device, nor into
    the memory tier, whether the load had begun or not."""
    options: dict[str, Any] = {"dtype": "float32", "kv_memory": "1024 tokens", "block_size": 4, "threads": 1}
    store = patient(["memory://?size=1MiB", f"disk://{tmp_path}/store?size=64MiB"])
    salt, tokens = Salt(b"tenant"), prompt(81, 1)
    config = EngineConfig(model=str(folder("llama")), **options)

    async def compute(engine: AsyncEngine) -> None:
        async for _ in engine.generate(Request("first", tuple(tokens), greedy(1), salt=salt)):
            pass

    first = AsyncEngine.from_config(config, store=patient(f"disk://{tmp_path}/store?size=64MiB"))
    asyncio.run(compute(first))
    first.close()
    engine = unhurried(AsyncEngine.from_config(config, store=store))
    assert engine.offload is not None
    disk, reached, passes = engine.offload.store.tiers[1].store, threading.Event(), threading.Event()
    name = "get" if began else "lookup"
    real = getattr(disk, name)

    def waits(*arguments: Any, **named: Any) -> Any:
        found = real(*arguments, **named)  # before the erasure
        reached.set()
        assert passes.wait(60)
        return found

    monkeypatch.setattr(disk, name, waits)
    monkeypatch.setattr(disk, "known", lambda names: [None] * len(names))  # so that a lookup asks the disk

    async def run() -> None:
        prefetching = asyncio.create_task(engine.prefetch(tokens, salt=salt))
        assert await asyncio.to_thread(reached.wait, 60)
        receipt = await engine.forget(salt)
        assert receipt["complete"] and receipt["removed"]["disk"] > 0
        passes.set()
        assert (await prefetching).status == "refused"
        assert await engine.clear_cache(salt) == 0
        assert engine.offload is not None and engine.offload.flush(60)
        assert engine.offload.store.tiers[0].store.status().blocks == 0
        await engine.check_integrity()

    try:
        asyncio.run(run())
    finally:
        passes.set()
        engine.close()
