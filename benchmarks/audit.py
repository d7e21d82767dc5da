"""The live audit: distances of right and wrong KV, false alarms, and cost. Random models, seeded.

python benchmarks/audit.py distances    # of right KV, and of KV that is swapped, shifted, of another layer or adapter
python benchmarks/audit.py alarms       # audits of right KV from all sources until there are --count
python benchmarks/audit.py cost         # processor time with and without an audit of one hit in 1,000, in alternation
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from random_model import Size, make
from torch import Tensor
from transformers import AutoModelForCausalLM

from foreword.engine import hit_audit
from foreword.engine.attention.kv_tensors import block_bytes, distances, split_block
from foreword.engine.request import SamplingParams
from foreword.entrypoints.llm import LLM

SMALL = Size("small", 0, 12, 256, 4, 2, 704, 8_192)
BLOCK = 16
CHANGES = (0.01, 0.05, 0.2)


def engine(folder: Path, dtype: str, **options: Any) -> LLM:
    settings: dict[str, Any] = {
        "kv_memory": "16384 tokens",
        "block_size": BLOCK,
        "self_check": False,
        "max_batch_tokens": 256,
    }
    return LLM(str(folder), dtype=dtype, **(settings | options))


def text(draws: random.Random, length: int) -> list[int]:
    return [draws.randrange(1000) for _ in range(length)]


def blocks_of(llm: LLM, tokens: list[int]) -> list[int]:
    cache = llm._core.cache
    return list(cache.lookup(cache.open(tokens)).blocks)


def computed(llm: LLM, tokens: list[int], draws: random.Random) -> list[int]:
    """Compute a prompt beside others, in whatever chunks that gives."""
    others = [text(draws, draws.randrange(1, 300)) for _ in range(draws.randrange(4))]
    order = [tokens, *others]
    draws.shuffle(order)
    llm.generate(order, SamplingParams(max_tokens=draws.randrange(1, 4), temperature=0.0, ignore_eos=True))
    return blocks_of(llm, tokens)


def payloads(llm: LLM, blocks: list[int]) -> list[dict[int, tuple[Tensor, Tensor]]]:
    layers = llm._parts.runner.group_layers(0)
    return [split_block(block_bytes(layers, block), layers) for block in blocks]


def worst(llm: LLM, blocks: list[int], found: list[dict[int, tuple[Tensor, Tensor]]]) -> list[float]:
    """For each block the largest distance over layers, keys and values."""
    layers = llm._parts.runner.group_layers(0)
    return [
        max(float(distances(layers[layer], [block], kv).max()) for layer, kv in one.items())
        for block, one in zip(blocks, found, strict=True)
    ]


def adapted(folder: Path, share: float) -> Path:
    """The model with a change of rank 8 in its query and value projections, of this share of the weights' norm."""
    target = folder.with_name(f"{folder.name}-{share}")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if "q_proj" in name or "v_proj" in name:
                down, up = (torch.randn(size, 8, generator=generator) for size in weights.shape)
                change = down @ up.T
                weights += share * change * weights.norm() / change.norm()
    model.bfloat16().save_pretrained(target)
    for file in folder.iterdir():
        if not (target / file.name).exists():
            (target / file.name).write_bytes(file.read_bytes())
    return target


def measure_distances(folder: Path, seeds: int, kernels: str) -> None:
    for dtype in ("float32", "bfloat16"):
        found: dict[str, list[float]] = {}
        for seed in range(seeds):
            draws, model = random.Random(seed), folder / f"model-{seed}"
            if not model.exists():
                make(SMALL, model, seed)
            tokens, other = text(draws, 512), text(draws, 512)
            with engine(model, dtype, kernels=kernels) as llm:
                right = payloads(llm, computed(llm, tokens, draws))
                swapped = payloads(llm, computed(llm, other, draws))
                for _ in range(4):
                    llm.clear_cache()
                    blocks = computed(llm, tokens, draws)
                    found.setdefault("right", []).extend(worst(llm, blocks, right))
                found.setdefault("swapped", []).extend(worst(llm, blocks, swapped))
                found.setdefault("shifted by a block", []).extend(worst(llm, blocks[1:], right[:-1]))
                moved = [{layer: one[(layer + 1) % len(one)] for layer in one} for one in right]
                found.setdefault("of another layer", []).extend(worst(llm, blocks, moved))
                for share in CHANGES:
                    with engine(adapted(model, share), dtype, kernels=kernels) as changed:
                        foreign = payloads(changed, computed(changed, tokens, draws))
                    found.setdefault(f"adapter, {share:.0%} of the weights", []).extend(worst(llm, blocks, foreign))
        print(f"{dtype}: tolerance {hit_audit.tolerance(getattr(torch, dtype)):g}", flush=True)
        for name, values in found.items():
            low, high = min(values), max(values)
            print(f"  {name:<30} {low:8.2g} .. {high:8.2g}  median {statistics.median(values):8.2g}", flush=True)


def conversations(draws: random.Random) -> Iterator[list[int]]:
    """Prompts that continue earlier ones."""
    known = [text(draws, draws.randrange(40, 200)) for _ in range(24)]
    while True:
        place = draws.randrange(len(known))
        known[place] = [*known[place], *text(draws, draws.randrange(1, 40))]
        if len(known[place]) > 600:
            known[place] = text(draws, draws.randrange(40, 200))
        yield known[place]


def count_alarms(folder: Path, dtype: str, count: int, redis: str | None, seconds: float, reports: str | None) -> None:
    draws, model = random.Random(dtype), folder / "model-0"
    if not model.exists():
        make(SMALL, model, 0)
    urls = ["memory://?size=64MiB", f"disk://{folder}/store-{dtype}?size=1GiB", *([redis] if redis else [])]
    until = time.monotonic() + seconds
    audit_all = {"audit_every": 1, "audit_budget": 1.0, "audit_reports": reports, "audit_evidence": True}
    with engine(model, dtype, store=urls, kv_memory="8192 tokens", **audit_all) as llm:
        prompts, audit = conversations(draws), llm._core.audit
        assert audit is not None and llm.offload is not None
        while sum(audit.counts.audited.values()) < count and time.monotonic() < until:
            batch = [next(prompts) for _ in range(draws.randrange(1, 9))]
            llm.generate(batch, SamplingParams(max_tokens=draws.randrange(1, 6), temperature=1.0, ignore_eos=True))
            if draws.random() < 0.3:
                llm.flush()
                llm.clear_cache()
                for tier in llm.offload.store.tiers[: draws.randrange(len(urls))]:
                    tier.store.erase(deadline=time.monotonic() + 60)
        counts = audit.counts
        print(
            f"{dtype}: audited {dict(counts.audited)}, different {sum(counts.different.values())}; {counts.blocks} blocks,"
        )
        print(f"  {counts.exact} bit for bit, largest distance {counts.largest:.2g} of {audit.tolerance:g}", flush=True)


def measure_cost(folder: Path, rounds: int, every: int) -> None:
    model = folder / "model-0"
    if not model.exists():
        make(SMALL, model, 0)
    draws = random.Random(0)
    shared = [text(draws, 512) for _ in range(8)]
    with engine(model, "bfloat16") as plain, engine(model, "bfloat16", audit_every=every) as audited:
        speeds: dict[LLM, list[float]] = {plain: [], audited: []}
        for number in range(rounds):
            prompts = [[*draws.choice(shared), *text(draws, 32)] for _ in range(64)]
            for llm in (plain, audited) if number % 2 else (audited, plain):
                started = time.process_time()  # what other programs take does not count
                outputs = llm.generate(prompts, SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True))
                spent = time.process_time() - started
                if number:  # the first round has no hits
                    speeds[llm].append(sum(len(one.outputs[0].tokens) for one in outputs) / spent)
        ratios = [with_ / without for with_, without in zip(speeds[audited], speeds[plain], strict=True)]
        assert audited._core.audit is not None
        counts = audited._core.audit.counts
        seconds = {llm: sum(64 * 16 / speed for speed in each) for llm, each in speeds.items()}
        print(f"one hit in {every}: {sum(counts.hits.values())} hits, {sum(counts.audited.values())} audited")
        print(f"  processor time without / with audits: {seconds[plain] / seconds[audited]:.4f} in all,")
        print(f"  of pairs {min(ratios):.3f} .. {max(ratios):.3f}, median {statistics.median(ratios):.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("distances", "alarms", "cost"))
    parser.add_argument("--count", type=int, default=10_000, help="audits for `alarms`, half of them in each dtype")
    parser.add_argument("--seeds", type=int, default=3, help="models for `distances`")
    parser.add_argument("--rounds", type=int, default=40, help="pairs of runs for `cost`")
    parser.add_argument("--every", type=int, default=1000, help="N for `cost`")
    parser.add_argument("--kernels", default="auto", help="kernels for `distances`")
    parser.add_argument("--redis", help="URL of a Redis for `alarms`")
    parser.add_argument("--reports", help="folder for reports of `alarms`")
    parser.add_argument("--seconds", type=float, default=3600.0, help="longest time of `alarms` in each dtype")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        if args.what == "distances":
            measure_distances(Path(folder), args.seeds, args.kernels)
        elif args.what == "alarms":
            for dtype in ("float32", "bfloat16"):
                count_alarms(Path(folder), dtype, args.count // 2, args.redis, args.seconds, args.reports)
        else:
            measure_cost(Path(folder), args.rounds, args.every)


if __name__ == "__main__":
    main()
