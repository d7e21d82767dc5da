"""The live audit: wrong KV in the cache is found, put into quarantine everywhere and reported; right KV raises no alarm."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pair import ask, node, until
from servers import wait_until
from tiny import greedy, prompt
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from foreword.cli.main import app
from foreword.engine.hit_audit import HitAudit
from foreword.engine.request import Request, SamplingParams
from foreword.engine_config import EngineConfig
from foreword.entrypoints.async_engine import AsyncEngine
from foreword.entrypoints.llm import LLM
from foreword.prefixes.quarantine import ChainQuarantine
from foreword.store.base import Name
from foreword.store.frame import Frame, check, frame
from foreword.store.tiered import TieredStore

Make = Callable[..., LLM]
AUDITED: dict[str, Any] = {"audit_every": 10, "audit_budget": 1.0}


def audit_of(llm: LLM) -> HitAudit:
    audit = llm._core.audit
    assert audit is not None
    return audit


def quarantine_of(llm: LLM) -> ChainQuarantine:
    return llm._parts.quarantine


def disk(path: Path) -> str:
    return f"disk://{path}/store?size=64MiB"


def read(store: TieredStore, name: Name) -> Frame:
    buffer = memoryview(bytearray(1 << 20))
    [size] = store.tiers[0].store.get([name], [buffer], deadline=time.monotonic() + 60)
    return check(buffer[:size], name)


def rewrite(store: TieredStore, name: Name, payload: bytes) -> None:
    """Replace a block's payload. The frame has a valid checksum."""
    header = read(store, name).header
    until = time.monotonic() + 60
    assert store.tiers[0].store.delete([name], deadline=until) == 1
    assert store.tiers[0].store.put([frame(replace(header), payload)], deadline=until) == 1


def names_of(llm: LLM, tokens: list[int]) -> list[Name]:
    """The stored names of a prompt's full blocks, in order."""
    assert llm.offload is not None
    chain = llm._core.cache.open(tokens).chain
    return llm.offload.units[0].names(chain.root, chain.keys_to(len(tokens) // chain.block_size))


def swapped(blocks: list[bytes], other: list[bytes]) -> tuple[int, bytes]:
    return 3, other[3]


def shifted(blocks: list[bytes], other: list[bytes]) -> tuple[int, bytes]:
    return 5, blocks[4]


def other_layer(blocks: list[bytes], other: list[bytes]) -> tuple[int, bytes]:
    third = len(blocks[2]) // 3
    return 2, blocks[2][third : 2 * third] + blocks[2][:third] + blocks[2][2 * third :]


def find_bad(llm: LLM, tokens: list[int]) -> None:
    """Use a prompt until an audit finds it bad; at one audit in 10 that takes 50 hits at most."""
    for _ in range(50):
        llm.generate(tokens, greedy(1))
        if quarantine_of(llm).chains:
            return
    raise AssertionError("no audit has found the wrong KV")


@pytest.mark.parametrize(
    ("damage", "family"),
    [
        (swapped, "llama"),
        *(pytest.param(*one, marks=pytest.mark.extended) for one in [(shifted, "gpt_oss"), (other_layer, "llama")]),
    ],
)
def test_wrong_kv_is_found(damage: Any, family: str, engine: Make, tmp_path: Path) -> None:
    """KV under a wrong name, with a valid checksum, is found within 50 hits at one audit in 10. From then on no store and no
    device has the block and what continues it, its tier is not read, other instances compute it too, and a report names it."""
    tokens, other = prompt(61, 1), prompt(61, 2)
    options = {**AUDITED, "store": disk(tmp_path), "audit_reports": str(tmp_path / "reports"), "audit_evidence": True}
    with engine(family, **options) as llm, engine(family, store=disk(tmp_path)) as second:
        [right] = llm.generate(tokens, greedy(8))
        llm.generate(other, greedy(8))
        assert llm.flush()
        llm.clear_cache()
        store, names = llm.offload.store, names_of(llm, tokens)
        number, payload = damage(
            *([bytes(read(store, one).payload) for one in names_of(llm, t)] for t in (tokens, other))
        )
        rewrite(store, names[number], payload)
        second.generate(tokens, greedy(1))
        find_bad(llm, tokens)

        assert quarantine_of(llm).flush(30)
        assert not any(store.tiers[0].store.present(names[number:], deadline=time.monotonic() + 60))
        assert [tier.suspended for tier in store.tiers] == [True]
        quarantine_of(second).scan()
        for one in (llm, second):
            [again] = one.generate(tokens, greedy(8), cache_report=True)
            assert again.cached_tokens <= 4 * number
            assert again.outputs[0].tokens == right.outputs[0].tokens
            one.check()
        assert llm.flush()
        assert not any(store.tiers[0].store.present(names[number:], deadline=time.monotonic() + 60)), (
            "a chain in quarantine is not stored"
        )
        [path] = (tmp_path / "reports").iterdir()
        report = json.loads(path.read_text())
        assert report["block"] == number
        assert (report["source"], report["tokens"]) == ("disk", tokens[: 4 * (number + 1)])
        assert max(max(one["keys"], one["values"]) for one in report["layers"]) > 10 * report["tolerance"]
        with engine(family, store=disk(tmp_path)) as third:
            [new] = third.generate(tokens, greedy(8))
            assert (new.cached_tokens, new.outputs[0].tokens) == (0, right.outputs[0].tokens)
    rerun = CliRunner().invoke(app, ["audit", "rerun", str(path), "--model", llm.config.model])
    assert rerun.exit_code == 1, rerun.output
    assert ("block 4" if damage is shifted else "closest") in rerun.output


def test_wrong_kv_on_the_device(engine: Make) -> None:
    """KV that was computed here and is wrong now is found too. The device's cache is not used from then on."""
    tokens = prompt(61, 3)
    with engine("llama", **AUDITED) as llm:
        [right] = llm.generate(tokens, greedy(8))
        [block] = llm._core.cache.lookup(llm._core.cache.open(tokens)).blocks[7:8]
        llm._parts.runner.layers[1].v_blocks[block] *= 1.5
        find_bad(llm, tokens)
        [again] = llm.generate(tokens, greedy(8))
        assert (again.cached_tokens, again.outputs[0].tokens) == (0, right.outputs[0].tokens)
        llm.check()


@pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler")
def test_exact_under_batch_invariance(engine: Make, tmp_path: Path) -> None:
    """A batch-invariant engine allows no difference: one bit of a block is found, and the report can be computed again."""
    tokens, reports = prompt(61, 3), tmp_path / "reports"
    options = {"dtype": "bfloat16", "batch_invariant": "on", "audit_reports": str(reports), "audit_evidence": True}
    with engine("llama", **AUDITED, **options) as llm:
        llm.generate(tokens, greedy(1))
        [block] = llm._core.cache.lookup(llm._core.cache.open(tokens)).blocks[7:8]
        for _ in range(50):  # right KV is no alarm
            llm.generate(tokens, greedy(1))
        assert audit_of(llm).counts.exact == audit_of(llm).counts.blocks > 0
        llm._parts.runner.layers[1].v_blocks[block].view(torch.int16).flatten()[5].bitwise_xor_(1)
        find_bad(llm, tokens)
    [path] = reports.iterdir()
    rerun = CliRunner().invoke(app, ["audit", "rerun", str(path), "--model", llm.config.model])
    assert rerun.exit_code == 1, rerun.output
    assert "layer 1 is closest to that of layer 1, block 7" in rerun.output


def test_other_adapter(engine: Make, folder: Callable[[str], Path], tmp_path: Path) -> None:
    """KV of a model whose weights differ by a small change of low rank, as an adapter's do, is found in float32."""
    tokens = prompt(61, 4)
    model = AutoModelForCausalLM.from_pretrained(folder("llama"), dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if "v_proj" in name or "q_proj" in name:
                down, up = (torch.randn(size, 2, generator=generator) for size in weights.shape)
                change = down @ up.T
                weights += 0.05 * change * weights.norm() / change.norm()
    shutil.copytree(folder("llama"), tmp_path / "adapted")
    model.save_pretrained(tmp_path / "adapted")
    with engine("llama", store=disk(tmp_path), **AUDITED) as llm:
        with LLM(str(tmp_path / "adapted"), dtype="float32", block_size=4, store=disk(tmp_path)) as adapted:
            adapted.generate(tokens, greedy(1))
            adapted.flush()
            payloads = [bytes(read(adapted.offload.store, name).payload) for name in names_of(adapted, tokens)]
        llm.generate(tokens, greedy(1))
        assert llm.flush()
        llm.clear_cache()
        for name, payload in zip(names_of(llm, tokens), payloads, strict=True):
            rewrite(llm.offload.store, name, payload)
        find_bad(llm, tokens)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("llama", "bfloat16"), pytest.param("gemma3_5to1", "bfloat16", marks=pytest.mark.slow)],
)
def test_no_false_alarm(family: str, dtype: str, engine: Make, tmp_path: Path) -> None:
    """Right KV is equal within the tolerance, whatever batches and chunks it was computed in, and wherever it comes from."""
    urls = ["memory://?size=16MiB", disk(tmp_path)]
    draws = random.Random(5)
    texts = [prompt(draws.randrange(20, 90), seed) for seed in range(6)]
    with engine(family, store=urls, dtype=dtype, max_batch_tokens=48, audit_every=1, audit_budget=1.0) as llm:
        for turn in range(8):
            chosen = draws.sample(texts, 3)
            llm.generate(
                [[*one, *prompt(draws.randrange(1, 30), turn)] for one in chosen], greedy(draws.randrange(1, 9))
            )
            if turn % 3 == 0:
                assert llm.flush()
                llm.clear_cache()
                if turn % 2:
                    llm.offload.store.tiers[0].store.erase(deadline=time.monotonic() + 60)
        counts = audit_of(llm).counts
        assert not counts.different
        assert sum(counts.audited.values()) >= 8
        assert {"device", "disk"} <= counts.audited.keys()
        assert not quarantine_of(llm).chains
        llm.check()


def test_audits_wait_for_idle_time(folder: Callable[[str], Path]) -> None:
    """A server's engine audits while it has no requests, and gives its blocks back to a request that arrives."""
    tokens = prompt(200, 6)
    config = EngineConfig(
        model=str(folder("mistral")), dtype="float32", kv_memory="1024 tokens", block_size=4, **AUDITED
    )

    async def run() -> None:
        engine = AsyncEngine.from_config(replace(config, audit_every=1))
        try:
            for number in range(4):
                request = Request(f"r{number}", tuple(tokens), SamplingParams(max_tokens=4, ignore_eos=True))
                assert [delta async for delta in engine.generate(request)][-1].finish_reason == "length"
            audit = engine.audit
            assert audit is not None
            counts = audit.counts
            await asyncio.to_thread(
                wait_until, lambda: sum(counts.audited.values()) + counts.skipped == 3, "three audits"
            )
            assert sum(audit.counts.audited.values()) >= 1
            assert not audit.counts.different
            await engine.check_integrity()
            assert engine.status().free_blocks == engine.info.num_blocks
        finally:
            engine.close()

    asyncio.run(run())


def test_kv_from_another_instance(folder: Callable[[str], Path]) -> None:
    """KV that another instance sent is audited as well: it is right, and if that instance has wrong KV, that is found."""
    options = {"audit_every": 1, "audit_budget": 1.0}
    prefill, decode = node(folder("llama"), "prefill"), node(folder("llama"), "decode", **options)
    audit, params = decode.engine.audit, SamplingParams(max_tokens=2, temperature=0.0)
    assert audit is not None

    async def main() -> None:
        for seed in range(3):
            await ask(decode.engine, prompt(41, seed), params, prefill.address)
        await until(lambda: audit.counts.audited["instance"] == 3)
        assert not audit.counts.different
        cache = prefill.engine._core.cache
        wrong = cache.lookup(cache.open(prompt(41, 0))).blocks[3]
        prefill.engine._parts.runner.layers[2].k_blocks[wrong] *= 1.5
        await decode.engine.clear_cache()
        await ask(decode.engine, prompt(41, 0), params, prefill.address)
        await until(lambda: len(decode.engine.quarantine.chains) == 1)
        [chain] = decode.engine.quarantine.chains
        assert chain.source == f"prefill {prefill.address}"
        await decode.whole()

    try:
        asyncio.run(main())
    finally:
        decode.engine.close()
        prefill.engine.close()
