"""The engine over stores: blocks that left the device come back, and the output is right whatever a store does."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from example_counts import represented
from patience import patient, unhurried
from servers import wait_until
from tiny import Reference, greedy, prompt

from foreword.blocks.salt import Salt
from foreword.conformance import Fault, FlakyStore
from foreword.engine.request import Request, SamplingParams
from foreword.engine_config import EngineConfig
from foreword.entrypoints.async_engine import AsyncEngine
from foreword.entrypoints.llm import LLM
from foreword.errors import ConfigError, StoreConfigError, StoreUnavailable
from foreword.store.frame import HEADER_BYTES
from foreword.store_config import StoreConfig

Make = Callable[..., LLM]
Find = Callable[[str], Reference]

MEMORY = "memory://?size=16MiB"
# For stores that hang: waits, of which nothing is expected, are short.
BRIEF = StoreConfig(urls=(MEMORY,), lookup_timeout=0.01, flush_seconds=0.1)
# One KV group of full attention, one of windows, one of each, and one of full attention beside five of windows.
# How many groups of full attention and of windows each has.
GROUPS = {"llama": (1, 0), "mistral": (0, 1), "gpt_oss": (1, 1), "gemma3_5to1": (1, 5)}
each_kind = pytest.mark.parametrize("family", represented(["llama", "mistral", "gpt_oss", "gemma3_5to1"], "gpt_oss"))


def disk(path: Path, size: str = "64MiB") -> str:
    return f"disk://{path}/store?size={size}"


@contextmanager
def flaky(engine: Make, family: str = "llama", **options: Any) -> Iterator[tuple[LLM, FlakyStore]]:
    """An engine whose only tier misbehaves on request."""
    with engine(family, **({"store": MEMORY} | options)) as llm:
        [tier] = llm.offload.store.tiers
        tier.store = store = FlakyStore(tier.store)
        yield llm, store


def fill(llm: LLM, tokens: list[int], count: int = 8) -> tuple[int, ...]:
    """Compute a text, have it written, and let the device forget it."""
    [output] = llm.generate(tokens, greedy(count))
    assert llm.flush()
    llm.clear_cache()
    return output.outputs[0].tokens


@pytest.mark.parametrize(
    "family",
    represented(
        ["llama", "gemma2", "gpt_neox", "mixtral", "deepseek_v2", "gpt_oss", "mistral", "gemma3_5to1"],
        "deepseek_v2",
    ),
)
def test_restart(family: str, engine: Make, reference: Find, tmp_path: Path) -> None:
    """Blocks that one process computed are loaded from disk by the next one, for every kind of layer, with the same
    output."""
    truth, tokens = reference(family), prompt(61, 1)
    with engine(family, store=disk(tmp_path)) as first:
        [output] = first.generate(tokens, greedy(8))
    with engine(family, store=disk(tmp_path)) as second:
        [again] = second.generate(tokens, greedy(8), cache_report=True)
        second.check()
    assert again.cached_tokens == 60
    assert again.cache_report is not None and again.cache_report.loaded_tokens == {"disk": 60}
    assert again.outputs[0].tokens == output.outputs[0].tokens
    truth.check(tokens, again.outputs[0], 8)


@each_kind
def test_generated_tokens_are_kept(family: str, engine: Make, tmp_path: Path) -> None:
    """The next turn of a conversation also finds the last output in the store, not only the prompt."""
    tokens = prompt(20, 2)
    with engine(family, store=disk(tmp_path)) as llm:
        [first] = llm.generate(tokens, greedy(16))
    turn = [*tokens, *first.outputs[0].tokens, 7, 8, 9]
    with engine(family, store=disk(tmp_path)) as llm:
        [second] = llm.generate(turn, greedy(4), cache_report=True)
    # The last generated token was never computed: 35 of 36 tokens, 32 in whole blocks.
    assert second.cached_tokens == 32


@each_kind
def test_a_tier_that_takes_blocks_at_their_second_use(family: str, engine: Make, tmp_path: Path) -> None:
    """A prompt used once is not written to the tier. When a later request finds it on the device, it is, and a new process
    continues from there. The answers of both requests differ, so they stay out."""
    tokens = prompt(40, 2)
    with engine(family, store=f"{disk(tmp_path)}&admit=second") as llm:
        llm.generate(tokens, greedy(16))
        assert llm.flush() and llm.offload.store.status().blocks == 0
        [again] = llm.generate([*tokens, *prompt(21, 3)], greedy(16))
        assert again.cached_tokens >= 40 and llm.flush()
        assert llm.offload.status().saved == llm.offload.store.status().blocks > 0
    with engine(family, store=disk(tmp_path)) as llm:
        [third] = llm.generate([*tokens, *prompt(21, 3)], greedy(4), cache_report=True)
    assert third.cached_tokens == 40
    assert third.cache_report is not None and third.cache_report.loaded_tokens == {"disk": 40}


@each_kind
def test_two_instances_share(family: str, engine: Make, tmp_path: Path) -> None:
    """Blocks that one engine computed are loaded by another one that runs beside it, on first use."""
    tokens = prompt(50, 3)
    with engine(family, store=disk(tmp_path)) as one, engine(family, store=disk(tmp_path)) as other:
        [output] = one.generate(tokens, greedy(6))
        assert one.flush()
        [shared] = other.generate(tokens, greedy(6))
    assert shared.cached_tokens == 48
    assert shared.outputs[0].tokens == output.outputs[0].tokens


@pytest.mark.extended
def test_two_instances_write_the_same(engine: Make, reference: Find, tmp_path: Path) -> None:
    """Two engines that compute and write the same blocks at the same time leave blocks that a third one loads."""
    prompts = [prompt(40, seed) for seed in range(4)]
    with engine("llama", store=disk(tmp_path)) as one, engine("llama", store=disk(tmp_path)) as other:
        one.generate(prompts, greedy(4))
        other.generate(prompts, greedy(4))
    with engine("llama", store=disk(tmp_path)) as third:
        for tokens, output in zip(prompts, third.generate(prompts, greedy(4)), strict=True):
            assert output.cached_tokens >= 39
            reference("llama").check(tokens, output.outputs[0], 4)
        third.check()


def test_tiers_in_order(engine: Make, tmp_path: Path) -> None:
    """Blocks are loaded from the fastest tier that has them, and are promoted from a slower tier into the faster one."""
    tokens, urls = prompt(41, 4), [MEMORY, disk(tmp_path)]
    with engine("llama", store=urls) as llm:
        fill(llm, tokens)
        [warm] = llm.generate(tokens, greedy(2), cache_report=True)
        assert warm.cache_report is not None and warm.cache_report.loaded_tokens == {"memory": 40}
    with engine("llama", store=urls) as llm:
        for expected in ({"disk": 40}, {"memory": 40}):
            [output] = llm.generate(tokens, greedy(2), cache_report=True)
            assert output.cache_report is not None and output.cache_report.loaded_tokens == expected
            assert llm.flush()
            llm.clear_cache()


def test_part_of_a_chain(engine: Make, reference: Find) -> None:
    """A chain with a missing block is loaded up to there and computed from there."""
    tokens = prompt(48, 5)
    with engine("llama", store=MEMORY) as llm:
        fill(llm, tokens)
        store = llm.offload.store
        names = sorted((entry.depth, entry.name) for entry in store.scan(deadline=1e18))
        assert store.delete([names[5][1]], deadline=1e18) == 1
        [output] = llm.generate(tokens, greedy(6), cache_report=True)
        llm.check()
    assert output.cache_report is not None and output.cache_report.loaded_tokens == {"memory": 20}
    reference("llama").check(tokens, output.outputs[0], 6)


def test_what_a_store_lost_is_written_again(engine: Make) -> None:
    """Blocks that a store evicted or removed are written again when they are recomputed."""
    tokens = prompt(48, 18)
    with engine("llama", store=MEMORY) as llm:
        fill(llm, tokens)
        store = llm.offload.store
        assert store.delete([entry.name for entry in store.scan(deadline=1e18)], deadline=1e18) > 0
        assert llm.generate(tokens, greedy(2))[0].cached_tokens == 0
        assert llm.flush()
        llm.clear_cache()
        assert llm.generate(tokens, greedy(2))[0].cached_tokens == 47


def test_a_tier_that_hangs_holds_up_no_other(engine: Make) -> None:
    """While a write to one tier hangs, the other tiers are still written."""
    with engine("llama", store=replace(BRIEF, urls=(MEMORY, MEMORY))) as llm:
        fast, slow = llm.offload.store.tiers
        slow.store = hanging = FlakyStore(slow.store)
        hanging.inject("hang")
        for seed in range(4):
            llm.generate(prompt(16, seed), greedy(1))
            wait_until(lambda seed=seed: fast.counters.written_blocks == 4 * (seed + 1), "the fast tier writes")
        assert slow.counters.written_blocks == 0
        hanging.inject("hang", 0.0)


def test_a_search_that_ends_after_a_step_was_planned(engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that waits for a search is computed whenever the search ends: also between the planning of a step that had
    nothing to do and the engine's look for stuck requests."""
    with flaky(engine) as (llm, store):
        llm.offload.store.tiers[0].blocking = True  # what does not block is searched on the engine's thread
        scheduler = llm._core.scheduler
        plan = scheduler.schedule

        def schedule() -> Any:
            step = plan()
            for sequence in scheduler.waiting:
                if sequence.store is not None:
                    waited.append(sequence)
                    wait_until(lambda store=sequence.store: store.answered, "the search ends")
            return step

        waited: list[Any] = []
        monkeypatch.setattr(scheduler, "schedule", schedule)
        store.delay(0.1)
        assert len(llm.generate(prompt(16, 1), greedy(2))[0].outputs[0].tokens) == 2
        assert waited


@pytest.mark.extended
def test_another_model_finds_nothing(engine: Make, tmp_path: Path) -> None:
    """Blocks of other weights, another dtype or another block size are never found, though the tokens are the same."""
    tokens = prompt(40, 6)
    with engine("llama", store=disk(tmp_path)) as llm:
        llm.generate(tokens, greedy(2))
    for family, options in (("qwen2", {}), ("llama", {"dtype": "bfloat16"}), ("llama", {"block_size": 8})):
        with engine(family, store=disk(tmp_path), **options) as llm:
            assert llm.generate(tokens, greedy(2))[0].cached_tokens == 0
    with engine("llama", store=disk(tmp_path)) as llm:
        assert llm.generate(tokens, greedy(2))[0].cached_tokens == 39


@each_kind
@pytest.mark.parametrize("fault", represented(["corrupt", "truncate", "swap"], "swap"))
def test_damaged_blocks(fault: Fault, family: str, engine: Make, reference: Find) -> None:
    """A block that is altered, cut short or another block is not used: it is counted, removed and recomputed."""
    tokens = prompt(40, 7)
    with flaky(engine, family) as (llm, store):
        fill(llm, tokens)
        store.inject(fault)
        [output] = llm.generate(tokens, greedy(6))
        reference(family).check(tokens, output.outputs[0], 6)
        [tier] = llm.offload.store.tiers
        # A swapped block can be sound where nothing was read before it.
        assert sum(tier.counters.bad.values()) >= 1 and output.cached_tokens <= 4
        store.inject(fault, 0.0)
        assert llm.flush()
        llm.clear_cache()
        [healed] = llm.generate(tokens, greedy(6))
        assert healed.outputs[0].tokens == output.outputs[0].tokens
        llm.check()


@pytest.mark.parametrize("trouble", ["fail", "hang"])
def test_a_store_that_does_not_answer(trouble: Fault, engine: Make, reference: Find) -> None:
    """A store that fails at everything or never answers is a miss: requests are computed, errors are counted, and after
    a few of them the circuit opens."""
    with flaky(engine, store=BRIEF) as (llm, store):
        fill(llm, prompt(40, 8))
        store.inject(trouble)
        [tier] = llm.offload.store.tiers
        # A success counts for a quarter of a second, in which a fast machine answers many requests.
        for seed in range(8, 2000):
            [output] = llm.generate(prompt(40, seed), greedy(4))
            assert output.cached_tokens == 0
            if seed < 40:
                reference("llama").check(prompt(40, seed), output.outputs[0], 4)
            if seed >= 11 and tier.counters.skipped:
                break
        assert sum(tier.counters.errors.values()) >= 3 and tier.counters.skipped >= 1
        store.inject(trouble, 0.0)
        llm.check()


def test_a_load_that_breaks_off(engine: Make, reference: Find) -> None:
    """A store that fails or hangs in the middle of a load costs the rest of the load, not the request."""
    tokens = prompt(200, 12)
    for trouble in ("fail", "hang"):
        # A load that hangs costs what a load may take.
        with flaky(engine, store=patient(MEMORY, load_timeout=8.0, flush_seconds=0.5)) as (llm, store):
            fill(llm, tokens)
            unhurried(llm)
            read = store.inner.get

            def once(
                *args: Any, store: FlakyStore = store, read: Any = read, trouble: Fault = trouble, **named: Any
            ) -> Any:
                sizes = read(*args, **named)
                store.inject(trouble)
                return [*sizes[:7], *[0] * len(sizes[7:])]

            store.inner.get = once  # type: ignore[method-assign]
            [output] = llm.generate(tokens, greedy(4))
            reference("llama").check(tokens, output.outputs[0], 4)
            assert output.cached_tokens == 28
            assert llm.offload.status().cut == 1
            store.inject(trouble, 0.0)
            llm.check()


@pytest.mark.parametrize("family", represented(["mistral", "gpt_oss", "gemma3_5to1"], "gpt_oss"))
@pytest.mark.parametrize("trouble", ["missing", "damaged"])
def test_a_window_that_breaks_off(family: str, trouble: str, engine: Make, reference: Find) -> None:
    """A load that breaks off brings nothing for a model with windows: the prompt is computed, and no block is kept."""
    tokens = prompt(100, 12)
    with flaky(engine, family, store=patient(MEMORY, load_timeout=8.0, flush_seconds=0.5)) as (llm, store):
        fill(llm, tokens)
        unhurried(llm)
        read = store.inner.get

        def spoil_last(names: Any, buffers: Any, **named: Any) -> Any:
            sizes = read(names, buffers, **named)
            if trouble == "missing":
                return [*sizes[:-1], 0]
            buffers[len(sizes) - 1][sizes[-1] - 1] ^= 1
            return sizes

        store.inner.get = spoil_last  # type: ignore[method-assign]
        [output] = llm.generate(tokens, greedy(4))
        reference(family).check(tokens, output.outputs[0], 4)
        assert output.cached_tokens == 0
        assert llm.offload.status().cut == 1
        llm.check()
        assert llm._core.cache.pool.num_free == llm.info.num_blocks


@pytest.mark.parametrize("family", represented(["mistral", "gpt_oss", "gemma3_5to1"], "gpt_oss"))
@pytest.mark.extended
def test_a_longer_prefix_in_the_store(family: str, engine: Make, reference: Find) -> None:
    """A prefix on the device is continued with what the store has of the text: of windows, the last blocks only."""
    tokens = prompt(120, 19)
    with engine(family, store=MEMORY) as llm:
        fill(llm, tokens, 4)
        llm.generate(tokens[:47], greedy(1))
        before = llm.offload.status().loaded
        [output] = llm.generate([*tokens, 5], greedy(6), cache_report=True)
        llm.check()
        report = output.cache_report
        assert report is not None
        assert report.device_tokens + sum(report.loaded_tokens.values()) == 120
        held, (full, windows) = report.device_tokens // 4, GROUPS[family]
        assert llm.offload.status().loaded - before == (30 - held) * full + 2 * windows
    reference(family).check([*tokens, 5], output.outputs[0], 6)


@pytest.mark.parametrize("family", represented(["mistral", "gpt_oss", "gemma3_5to1"], "gpt_oss"))
def test_a_pinned_prefix_of_windows(family: str, engine: Make, reference: Find, tmp_path: Path) -> None:
    """A named prefix of a model with windows survives in a small store: all that a request needs to continue is pinned."""
    with engine(family, store=disk(tmp_path, "8MiB")) as llm:
        made = llm.add_prefix("rules", "Be brief, and say so if you do not know. " * 2)
        assert llm.flush()
    whole, (full, windows) = len(made.tokens) // 4, GROUPS[family]
    with engine(family, store=disk(tmp_path, "8MiB")) as llm:
        [tier] = llm.offload.store.tiers
        block = llm.info.kv_bytes_per_block
        assert tier.store.status().pinned_bytes >= (whole * full + 2 * windows) * block
        [output] = llm.generate([[*made.tokens, 9, 8]], greedy(3), cache_report=True)
        assert output.cached_tokens == whole * 4
        llm.remove_prefix("rules")
    with engine(family, store=disk(tmp_path, "8MiB")) as llm:
        assert llm.offload.store.tiers[0].store.status().pinned_bytes == 0


@pytest.mark.slow
@each_kind
def test_eviction_in_a_small_store(family: str, engine: Make, reference: Find) -> None:
    """A small store that is read and written by more prompts than it holds gives right outputs."""
    draw = random.Random(13)
    with engine(family, store="memory://?size=96KiB", kv_memory="256 tokens") as llm:
        heads = [prompt(24, seed) for seed in range(6)]
        for round_ in range(6):
            prompts = [[*draw.choice(heads), *prompt(draw.randrange(1, 20), 100 + round_ * 10 + i)] for i in range(4)]
            for tokens, output in zip(prompts, llm.generate(prompts, greedy(4)), strict=True):
                reference(family).check(tokens, output.outputs[0], 4)
            llm.check()
        assert llm.flush()
        status = llm.offload.store.tiers[0].store.status()
        assert status.evictions > 0 and status.bytes <= status.budget


@pytest.mark.slow
@each_kind
def test_like_no_store(family: str, engine: Make, tmp_path: Path) -> None:
    """Random batches with common prefixes, a small device (so that blocks are evicted and reloaded, and requests
    preempted) and two tiers give the outputs of an engine without a store."""
    draw = random.Random(14)
    heads = [prompt(40, seed) for seed in range(3)]
    batches = [
        [
            [*draw.choice(heads)[: draw.randrange(1, 40)], *prompt(draw.randrange(1, 30), draw.randrange(5))]
            for _ in range(5)
        ]
        for _ in range(5)
    ]
    plain = engine(family, kv_memory="160 tokens", max_batch_tokens=32)
    expected = [[o.outputs[0].tokens for o in plain.generate(batch, greedy(12))] for batch in batches]
    stores = ["memory://?size=128KiB", disk(tmp_path)]
    with engine(family, kv_memory="160 tokens", max_batch_tokens=32, store=stores) as llm:
        for batch, tokens in zip(batches, expected, strict=True):
            assert [o.outputs[0].tokens for o in llm.generate(batch, greedy(12))] == tokens
            llm.check()
        assert llm.offload.status().loaded > 0


def test_slower_than_computing(engine: Make, reference: Find) -> None:
    """A tier measured as slower than computing is not read; a load that turns out slower is cut off."""
    tokens = prompt(200, 15)
    with flaky(engine) as (llm, store):
        fill(llm, tokens)
        [tier] = llm.offload.store.tiers
        llm.offload.costs.prefill_rate = lambda: 1e6  # it was made unhurried
        llm.offload.prefill_rate.note(1e6, 1.0)
        tier.read_rate.note(1e3, 1.0)
        [output] = llm.generate(tokens, greedy(4))
        assert output.cached_tokens == 0 and llm.offload.status().declined == 1
        reference("llama").check(tokens, output.outputs[0], 4)
    with flaky(engine, store=patient(MEMORY)) as (llm, store):
        fill(llm, tokens)
        store.delay(0.2)
        for _ in range(20):  # a fast engine, as measured
            llm.offload.prefill_rate.note(1e4, 1.0)
        [output] = llm.generate(tokens, greedy(4))
        assert output.cached_tokens < 199 and llm.offload.status().cut == 1
        reference("llama").check(tokens, output.outputs[0], 4)


def test_the_fixed_cost_of_a_load(engine: Make, reference: Find) -> None:
    """The fixed cost of a load, beyond its bytes and until its blocks can be used, is measured. Below that nothing is loaded,
    and it is counted."""
    tokens = prompt(200, 16)
    with flaky(engine, store=MEMORY) as (llm, _):
        fill(llm, tokens)
        costs = llm.offload.costs
        rate, costs.prefill_rate = costs.prefill_rate, lambda: 0.0  # all that is found is loaded
        [tier] = llm.offload.store.tiers
        tier.read_rate.note(1e9, 1.0)
        [output] = llm.generate(tokens, greedy(4))
        assert output.cached_tokens and costs.fixed.measured[0] > 0.0
        llm.clear_cache()
        costs.prefill_rate = lambda: 1e3
        costs.fixed.note(0, 1e6)
        [output] = llm.generate(tokens, greedy(4))
        status = llm.offload.status()
        assert output.cached_tokens == 0 and (status.declined, status.too_small) == (1, 1)
        reference("llama").check(tokens, output.outputs[0], 4)
        costs.prefill_rate = rate


def test_a_queue_that_is_full(engine: Make) -> None:
    """When the write queue is full, new blocks are dropped and counted; no step waits."""
    with flaky(engine, store=StoreConfig(urls=(MEMORY,), staging="1KiB")) as (llm, store):
        store.delay(0.05)
        for seed in range(6):
            llm.generate(prompt(200, seed), greedy(2))
        assert llm.flush()
        status = llm.offload.status()
        assert status.dropped > 0 and status.queued == 0 and status.saved > 0
        llm.check()


@pytest.mark.extended
def test_a_prompt_longer_than_the_queue(engine: Make, reference: Find) -> None:
    """A prompt of more blocks than the write queue holds is saved from its first block on, while there is room, so that its
    first blocks hit. What had no room is saved in later steps while its request runs."""
    tokens, saved = prompt(400, 3), []
    for new_tokens, delay in ((1, 0.01), (100, 0.0)):
        with flaky(engine, store=replace(patient(MEMORY), staging="1KiB")) as (llm, store):
            store.delay(delay)
            llm.generate(tokens, greedy(new_tokens))
            assert llm.flush()
            status = llm.offload.status()
            saved.append(status.saved)
            assert status.saved + status.dropped == (len(tokens) + new_tokens - 1) // 4
            store.delay(0.0)
            llm.clear_cache()
            [again] = unhurried(llm).generate(tokens, greedy(new_tokens))
            reference("llama").check(tokens, again.outputs[0], new_tokens)
            assert again.cached_tokens == min(status.saved * 4, 399), "the first blocks were saved, without holes"
            llm.check()
    assert saved[0] < saved[1]


def test_others_continue_while_one_loads(llama: Path) -> None:
    """While one request waits for a store that hangs, others are served; it gets its output in the end, and an abort
    returns its blocks."""

    async def collect(engine: AsyncEngine, request: Request) -> tuple[int, ...]:
        return tuple([token async for delta in engine.generate(request) for token in delta.tokens])

    def ask(name: str, seed: int, length: int = 100) -> Request:
        params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
        return Request(name, tuple(prompt(length, seed)), params)

    async def main(engine: AsyncEngine) -> None:
        assert engine.offload is not None
        expected = await collect(engine, ask("first", 1))
        await asyncio.to_thread(engine.offload.flush)
        await engine.clear_cache()
        [tier] = engine.offload.store.tiers
        inner = tier.store
        store = FlakyStore(inner)

        class Stuck:
            label = inner.label
            readers = 1
            lookup = staticmethod(inner.lookup)
            put = staticmethod(inner.put)
            get = staticmethod(store.get)
            lend = staticmethod(store.lend)
            status = staticmethod(inner.status)
            close = staticmethod(inner.close)

        tier.store = Stuck()  # type: ignore[assignment]
        store.inject("hang")
        slow = asyncio.create_task(collect(engine, ask("slow", 1)))
        gone = engine.generate(ask("gone", 1))
        going = asyncio.create_task(anext(gone))  # type: ignore[arg-type]
        while not engine._core.scheduler.waiting_for_kv:
            await asyncio.sleep(0.001)
        await collect(engine, ask("other", 2, 3))
        going.cancel()
        await asyncio.gather(going, return_exceptions=True)
        await gone.aclose()
        assert await slow == expected
        await engine.check_integrity()
        assert engine.status().kv_usage == 0.0

    config = EngineConfig(model=str(llama), dtype="float32", kv_memory="1024 tokens", block_size=4, threads=1)
    engine = AsyncEngine.from_config(config, store=patient(MEMORY, load_timeout=2.0))
    try:
        asyncio.run(main(engine))
    finally:
        engine.close()


@each_kind
def test_a_prompt_that_another_request_loads(family: str, engine: Make) -> None:
    """Concurrent requests with the same prefix load it once."""
    tokens = prompt(80, 16)
    with engine(family, store=MEMORY) as llm:
        fill(llm, tokens)
        before = llm.offload.status().loaded
        outputs = llm.generate([[*tokens, seed] for seed in range(5)], greedy(2))
        full, windows = GROUPS[family]
        assert llm.offload.status().loaded - before == 20 * full + 2 * windows
        assert all(output.cached_tokens == 80 for output in outputs)
        llm.check()


@pytest.mark.parametrize(
    ("tier", "quota"),
    [
        (None, ""),
        ("memory://?size={}", "&tenant_quota=50%"),
        *(
            pytest.param(*others, marks=pytest.mark.slow)
            for others in (
                ("memory://?size={}", ""),
                ("disk://{}/store?size={}", ""),
                ("disk://{}/store?size={}", "&tenant_quota=50%"),
            )
        ),
    ],
)
def test_a_client_with_many_salts_is_one_tenant(
    engine: Make, llama: Path, tmp_path: Path, tier: str | None, quota: str
) -> None:
    """A tenant that asks everything under a new salt of its client has one share of a tier, and of the device. Another one,
    whose prompts fit into its share, finds what it finds alone. Nothing is found under another salt, or by another tenant."""
    mine = [prompt(101, seed) for seed in range(4)]

    async def cached(engine: AsyncEngine, name: str, tokens: list[int], salt: Salt) -> int:
        asked = Request(name, tuple(tokens), SamplingParams(temperature=0.0, max_tokens=1), salt)
        found = [delta.cached_tokens async for delta in engine.generate(asked)][-1]
        assert engine.offload is None or await asyncio.to_thread(engine.offload.flush, 60.0)
        return found

    async def main(served: AsyncEngine) -> None:
        for number, tokens in enumerate(mine):
            assert await cached(served, f"mine {number}", tokens, Salt(b"ann")) == 0
        for number in range(48):
            flood = mine[0] if number % 3 else prompt(101, 100 + number)
            assert await cached(served, f"flood {number}", flood, Salt.of(b"bob", f"salt {number}")) == 0
            if number % 12 == 11:
                assert await cached(served, f"again {number}", mine[number // 12], Salt(b"ann")) == 100
        if served.offload is not None:
            [filled] = served.offload.store.tiers
            assert filled.store.status().evictions > 500

    # Four prompts take 400 tokens. The device's share of two tenants is more or, with a tier, less.
    memory = "256 tokens" if tier else "1024 tokens"
    config = EngineConfig(model=str(llama), dtype="float32", kv_memory=memory, block_size=4, threads=1)
    size = 250 * (engine("llama").info.kv_bytes_per_block + HEADER_BYTES)
    if tier is None:
        served = AsyncEngine.from_config(config)
    else:
        places = (size,) if tier.startswith("memory") else (tmp_path, size)
        served = unhurried(AsyncEngine.from_config(config, store=patient(tier.format(*places) + quota)))
    try:
        asyncio.run(main(served))
    finally:
        served.close()


def test_settings_that_do_not_go_together(engine: Make, tmp_path: Path) -> None:
    """A store without prefix caching, an unknown store, an invalid size and an unknown option are errors that say what
    to do."""
    with pytest.raises(ConfigError, match="prefix caching"):
        engine("llama", store=MEMORY, enable_prefix_caching=False)
    for url, words in (
        ("memroy://?size=1GiB", "memory"),
        ("memory://?size=lots", "size"),
        (f"disk://{tmp_path}?sise=1GiB", "size"),
        ("disk://host/path", "host"),
        (f"disk://{tmp_path}?codec=zstd", "codec"),
    ):
        with pytest.raises(StoreConfigError, match=words):
            engine("llama", store=url)


def test_a_closed_engine_has_written_everything(engine: Make, tmp_path: Path) -> None:
    """`close` waits for the write queue: no computed block is lost."""
    tokens = prompt(300, 17)
    with engine("llama", store=disk(tmp_path)) as llm:
        llm.generate(tokens, greedy(2))
    shutil.copytree(tmp_path / "store", tmp_path / "copy")
    with engine("llama", store=f"disk://{tmp_path}/copy?size=64MiB") as llm:
        assert llm.generate(tokens, greedy(2))[0].cached_tokens == 299


def test_the_store_is_unavailable_at_start(engine: Make, tmp_path: Path) -> None:
    """A folder that cannot be created is an error at start that names the path."""
    (tmp_path / "file").write_text("in the way")
    with pytest.raises((StoreUnavailable, StoreConfigError), match="file"):
        engine("llama", store=f"disk://{tmp_path}/file/store?size=1MiB")


def test_prefixes_of_an_earlier_process(engine: Make, llama: Path, reference: Find, tmp_path: Path) -> None:
    """Named prefixes registered by an earlier process work; one that this model's tokenizer cannot render is skipped."""
    with engine("llama", store=disk(tmp_path)) as llm:
        made = llm.add_prefix("rules", "Be brief. " * 8)
        llm.add_prefix("persona", messages=[{"role": "system", "content": "Be kind."}])
    bare = tmp_path / "bare"
    shutil.copytree(llama, bare)
    (bare / "chat_template.jinja").unlink()
    with LLM(str(bare), dtype="float32", kv_memory="1024 tokens", block_size=4, store=patient(disk(tmp_path))) as llm:
        [known] = llm.list_prefixes()
        assert (known.name, known.version, known.tokens) == ("rules", made.version, made.tokens)
        [output] = llm.generate(["Why?"], greedy(3), prefix="rules")
        assert output.cached_tokens >= len(made.tokens) // 4 * 4
        reference("llama").check(list(output.prompt_tokens), output.outputs[0], 3)
        llm.remove_prefix("rules")
    with engine("llama", store=disk(tmp_path)) as llm:
        assert [prefix.name for prefix in llm.list_prefixes()] == ["persona"]
