"""Cache reports: why a prompt hit or missed, and which requests share: tenants, models, and copies of models."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tiny
import torch
import transformers
from test_engine import collect, idle, request, started
from tiny import prompt

from foreword.blocks.salt import NO_SALT, Salt
from foreword.engine.model import load_model
from foreword.engine.request import CacheReport, Delta, SamplingParams
from foreword.engine_config import EngineConfig
from foreword.entrypoints.async_engine import AsyncEngine
from foreword.entrypoints.llm import LLM

Make = Callable[..., LLM]
ONE = SamplingParams(temperature=0.0, max_tokens=1)


def report(llm: LLM, tokens: list[int], params: SamplingParams = ONE) -> CacheReport:
    found = llm.generate([tokens], params, cache_report=True)[0].cache_report
    assert found is not None
    assert found.prompt_tokens == len(tokens) == found.cached_tokens + found.computed_tokens
    assert found.cached_tokens == found.device_tokens + found.copied_tokens
    assert found.detail
    return found


def test_never_seen_and_all_cached(engine: Make) -> None:
    """The first time nothing is cached; the second time all but the last token is."""
    llm, tokens = engine("llama"), prompt(22, 1)
    first = report(llm, tokens)
    assert (first.reason, first.cached_tokens, first.diverged_at) == ("never_seen", 0, None)
    second = report(llm, tokens)
    assert (second.reason, second.device_tokens, second.copied_tokens) == ("all_cached", 20, 1)
    assert report(llm, prompt(22, 2)).reason == "never_seen"


def test_diverged(engine: Make) -> None:
    """Where a prompt leaves the nearest one that was computed, the report names the position, counted from 0."""
    llm, tokens = engine("llama"), prompt(40, 1)
    report(llm, tokens[:30])
    report(llm, tokens)
    for position in (4, 17, 39):
        other = [*tokens[:position], (tokens[position] + 1) % 256, *prompt(12, position)]
        found = report(llm, other)
        assert (found.reason, found.diverged_at) == ("diverged", position)
        assert found.device_tokens == position // 4 * 4
        assert f"position {position}" in found.detail


def test_evicted(engine: Make) -> None:
    """The report distinguishes a prefix that was evicted from one that was never computed."""
    llm, tokens = engine("llama", kv_memory="128 tokens"), prompt(60, 1)
    report(llm, tokens)
    for seed in range(3):
        report(llm, prompt(100, 10 + seed))
    found = report(llm, tokens)
    assert (found.reason, found.diverged_at) == ("evicted", None)
    assert found.cached_tokens < 60


def test_shorter_than_block(engine: Make) -> None:
    """A prompt shorter than a block shares nothing, and neither does the last, unfilled block of a longer one."""
    llm = engine("llama", block_size=16, partial_reuse=False)
    assert report(llm, prompt(9, 1)).reason == "shorter_than_block"
    assert report(llm, prompt(9, 1)).reason == "shorter_than_block"
    report(llm, prompt(30, 2))
    found = report(llm, prompt(30, 2))
    assert (found.reason, found.cached_tokens) == ("shorter_than_block", 16)


def test_disabled(engine: Make) -> None:
    """A report says so where caching is off."""
    llm = engine("llama", enable_prefix_caching=False)
    assert [report(llm, prompt(22, 1)).reason for _ in range(2)] == ["disabled", "disabled"]


def test_generated_text_counts(engine: Make) -> None:
    """Generated tokens are remembered too: the next turn of a conversation is cached, one that changes the output
    diverges."""
    llm, tokens = engine("llama"), prompt(21, 1)
    answer = llm.generate([tokens], tiny.greedy(12))[0].outputs[0].tokens
    went_on = report(llm, [*tokens, *answer, 1, 2, 3])
    assert went_on.cached_tokens == 21 + 11
    changed = report(llm, [*tokens, *answer[:5], (answer[5] + 1) % 256, *prompt(5, 2)])
    assert (changed.reason, changed.diverged_at) == ("diverged", 26)


def test_no_report_unless_asked(engine: Make) -> None:
    """A request that did not ask for a report gets none."""
    assert engine("llama").generate([prompt(5, 1)], ONE)[0].cache_report is None


def test_preemption_does_not_change_the_report(engine: Make) -> None:
    """A request that was preempted reports what it found when it was first admitted."""
    llm = engine("llama", kv_memory="96 tokens", reserve=0.0)
    outputs = llm.generate([prompt(13, i) for i in range(5)], tiny.greedy(24), cache_report=True)
    assert llm._core.scheduler.num_preemptions > 0
    assert all(output.cache_report and output.cache_report.reason == "never_seen" for output in outputs)
    assert all(output.cached_tokens == 0 for output in outputs)


async def ask(engine: AsyncEngine, tokens: list[int], salt: Salt) -> Delta:
    deltas = [d async for d in engine.generate(request(tokens, 4, salt=salt, want_cache_report=True))]
    return deltas[-1]


def test_salts_never_share(llama: Path) -> None:
    """Requests share within their salt only, and a report mentions other tenants only where that is configured."""

    async def main(engine: AsyncEngine) -> None:
        tokens = prompt(33, 1)
        for salt in (NO_SALT, Salt(b"alice"), Salt(b"bob")):
            assert (await ask(engine, tokens, salt)).cached_tokens == 0
        for salt in (NO_SALT, Salt(b"alice"), Salt(b"bob")):
            assert (await ask(engine, tokens, salt)).cached_tokens == 32
        report = (await ask(engine, tokens, Salt(b"carol"))).cache_report
        assert report is not None
        assert (report.reason, report.cached_tokens) == ("never_seen", 0)
        together = [collect(engine.generate(request(tokens, 9, salt=Salt(b"together")))) for _ in range(3)]
        assert len({one.tokens for one in await asyncio.gather(*together)}) == 1
        await idle(engine)

    with started(llama) as engine:
        asyncio.run(main(engine))


def test_prefixes_of_tenants(llama: Path) -> None:
    """Named prefixes belong to a tenant: others neither see nor use them, and may use the same name."""

    async def main(engine: AsyncEngine) -> None:
        text = "abcd" * 10
        await engine.prefixes.add("rules", content=text, salt=b"alice")
        assert engine.prefixes.list(salt=b"bob") == []
        await engine.prefixes.add("rules", content=text, salt=b"bob")
        assert [prefix.version for prefix in engine.prefixes.list(salt=b"bob")] == [1]
        rules = engine.prefixes.get("rules", salt=b"alice").tokens
        tokens = [*rules, *engine.tokenizer.encode("Where?", add_special_tokens=False)]
        assert (await ask(engine, tokens, Salt(b"alice"))).cached_tokens >= 40
        assert (await ask(engine, tokens, Salt(b"carol"))).cached_tokens == 0
        assert engine.status().pinned_blocks == 2 * (len(text) // 4)
        for salt in (b"alice", b"bob"):
            await engine.prefixes.remove("rules", salt=salt)
        await idle(engine)

    with started(llama) as engine:
        asyncio.run(main(engine))


def test_cancelled_prefix_leaves_no_reservation(llama: Path) -> None:
    """A registration that is cancelled at any moment either registers the prefix or leaves no reservation in the
    budget."""

    async def main(engine: AsyncEngine) -> None:
        text = "a long text " * 20
        for turns in (*range(10), 20, 50):
            adding = asyncio.create_task(engine.prefixes.add("rules", content=text))
            for _ in range(turns):
                await asyncio.sleep(0.0005 if turns > 10 else 0)
            adding.cancel()
            await asyncio.gather(adding, return_exceptions=True)
            await engine.check_integrity()
            for prefix in engine.prefixes.list():
                await engine.prefixes.remove(prefix.name)
            assert engine._core.scheduler.running == []
            assert engine._core.leases.book.free == engine._core.leases.book.budget
            await idle(engine)

    with started(llama) as engine:
        asyncio.run(main(engine))


def fingerprint(path: Path, **options: Any) -> bytes:
    return load_model(EngineConfig(model=str(path), **({"dtype": "float32"} | options))).fingerprint


def test_fingerprint(llama: Path, tmp_path: Path) -> None:
    """A model's fingerprint is that of its copy in another folder, whatever its configuration says about names and generation;
    one number of one weight changes it, and so do settings."""
    original = fingerprint(llama)
    shutil.copytree(llama, tmp_path / "copy")
    settings = json.loads((tmp_path / "copy" / "config.json").read_text())
    settings |= {"eos_token_id": [2, 5], "id2label": {"0": "a"}, "_name_or_path": "elsewhere"}
    (tmp_path / "copy" / "config.json").write_text(json.dumps(settings))
    assert fingerprint(tmp_path / "copy") == original
    found = {original}
    model = transformers.AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    names = [
        "lm_head.weight",
        "model.norm.weight",
        "model.layers.1.self_attn.k_proj.weight",
        "model.embed_tokens.weight",
    ]
    for number, name in enumerate(names):
        weight = model.state_dict()[name].view(-1)
        kept = weight[3].item()
        weight[3] += 0.01
        found.add(fingerprint(tiny.save(model, tmp_path / f"weight{number}")))
        weight[3] = kept
    for number, (key, value) in enumerate({"rms_norm_eps": 1e-3, "max_position_embeddings": 400}.items()):
        setattr(model.config, key, value)
        found.add(fingerprint(tiny.save(model, tmp_path / f"config{number}")))
    found.add(fingerprint(llama, dtype="bfloat16"))
    assert len(found) == 1 + len(names) + 2 + 1


def test_fingerprint_covers_code_of_the_checkpoint(llama: Path, tmp_path: Path) -> None:
    """Code that a checkpoint contains is part of its fingerprint, with what it imports: it decides what the weights compute."""
    angles = "LIMIT = {}\n"
    code = """
from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaRotaryEmbedding
from .angles import LIMIT

class OwnRotaryEmbedding(LlamaRotaryEmbedding):
    def forward(self, x, position_ids):
        return super().forward(x, position_ids.clamp(max=LIMIT{}))

class OwnForCausalLM(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model.rotary_emb = OwnRotaryEmbedding(config=config)
"""
    found = []
    for number, (limit, more) in enumerate([(100, ""), (100, ""), (200, ""), (100, " + 1")]):
        folder = tmp_path / f"own{number}"
        shutil.copytree(llama, folder)
        settings = json.loads((folder / "config.json").read_text())
        settings["auto_map"] = {"AutoModelForCausalLM": "own_model.OwnForCausalLM"}
        (folder / "config.json").write_text(json.dumps(settings))
        (folder / "own_model.py").write_text(code.format(more))
        (folder / "angles.py").write_text(angles.format(limit))
        found.append(fingerprint(folder, trust_remote_code=True))
    assert found[0] == found[1] and len(set(found)) == 3


def test_other_models_have_other_keys(engine: Make, folder: Callable[[str], Path]) -> None:
    """A prompt has other keys under another model, block size or salt."""
    caches = [engine("llama")._core.cache, engine("qwen2")._core.cache, engine("llama", block_size=8)._core.cache]
    keys = [
        tuple(cache.open(prompt(16, 1), salt=salt).chain.keys_to(2))
        for cache in caches
        for salt in (NO_SALT, Salt(b"x"))
    ]
    assert all(not set(one) & set(other) for one, other in itertools.combinations(keys, 2))
    assert tuple(engine("llama")._core.cache.open(prompt(16, 1)).chain.keys_to(2)) == keys[0]
