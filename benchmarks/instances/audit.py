"""The live audit: distances of right and wrong KV, false alarms, and cost. Random models, seeded.

python -m benchmarks.instances.audit distances    # of right KV, and of KV that is swapped, shifted, of another layer or adapter
python -m benchmarks.instances.audit alarms --redis redis://HOST:PORT/1     # audits of right KV from all sources
python -m benchmarks.instances.audit cost         # processor time with and without audits, in alternation
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.engine.random_model import Size, make
from benchmarks.harness import table
from benchmarks.instances.instance_pair import InstancePair
from foreword.engine import hit_audit
from foreword.engine.attention.kv_tensors import block_bytes, distances, split_block
from foreword.engine.request import SamplingParams
from foreword.engine_config import Dtype
from foreword.entrypoints.llm import LLM

SMALL = Size("small", 0, 12, 256, 4, 2, 704, 8_192)
SMALLER = Size("smaller", 0, 6, 128, 2, 1, 352, 4_096)  # for `alarms`
BLOCK = 16
CHANGES = (0.01, 0.05, 0.2)
SETTINGS: dict[str, Any] = {"block_size": BLOCK, "self_check": False, "max_batch_tokens": 256, "threads": 1}
AUDITED: dict[str, Any] = {"audit_every": 1, "audit_evidence": True}
# For `alarms`: engines, audits of a round, and where KV comes from.
MODES: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16, kernels=torch": {"dtype": "bfloat16", "kernels": "torch"},
    "bfloat16, batch-invariant": {"dtype": "bfloat16", "batch_invariant": "on"},
}
ROUND = 60
SOURCES = ("device", "memory", "disk", "redis", "instance")


def engine(folder: Path, dtype: Dtype, **options: Any) -> LLM:
    return LLM(str(folder), dtype=dtype, **(SETTINGS | {"kv_memory": "16384 tokens"} | options))


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
        if len(known[place]) > 400:
            known[place] = text(draws, draws.randrange(40, 200))
        yield known[place]


class Local:
    """An engine with stores that audits its own hits."""

    def __init__(self, folder: Path, model: Path, urls: list[str], **options: Any) -> None:
        self._llm = engine(model, store=urls, kv_memory="8192 tokens", **AUDITED, **options)
        assert self._llm._core.audit is not None
        self.audit = self._llm._core.audit
        self.audit._budget = 1.0

    def generate(self, draws: random.Random, prompts: Iterator[list[int]]) -> None:
        """Some prompts in a batch; now and then the next ones have to come from one of the stores."""
        batch = [next(prompts) for _ in range(draws.randrange(1, 9))]
        params = SamplingParams(max_tokens=draws.randrange(1, 6), temperature=1.0, ignore_eos=True)
        self._llm.generate(batch, params)
        if draws.random() < 0.3:
            assert self._llm.offload is not None
            tiers = self._llm.offload.store.tiers
            self._llm.flush()
            self._llm.clear_cache()
            for tier in tiers[: draws.randrange(len(tiers))]:
                tier.store.erase(deadline=time.monotonic() + 60)

    def close(self) -> None:
        self._llm.close()


class Remote:
    """An engine that audits the KV of prompts that another instance has computed or cached."""

    def __init__(self, model: Path, **options: Any) -> None:
        self._pair = InstancePair(str(model), **(SETTINGS | {"kv_memory": "8192 tokens"} | AUDITED | options))
        assert self._pair.second.audit is not None
        self.audit = self._pair.second.audit

    def generate(self, draws: random.Random, prompts: Iterator[list[int]]) -> None:
        batch = [next(prompts) for _ in range(draws.randrange(1, 5))]
        params = SamplingParams(max_tokens=draws.randrange(1, 6), temperature=1.0, ignore_eos=True)
        self._pair.prefill(batch, params)
        while self.audit.pause() is not None:  # in the engine's thread, while it is idle
            time.sleep(0.002)
        if draws.random() < 0.3:
            self._pair.clear()

    def close(self) -> None:
        self._pair.close()


def count_alarms(folder: Path, arguments: argparse.Namespace) -> None:
    """Audit right KV from all sources, in rounds that take turns between the modes, each with prompts of its own."""
    model = folder / "model-0"
    make(SMALLER, model, 0)
    audited: dict[str, list[Local | Remote]] = {}
    for name, options in MODES.items():
        urls = [
            "memory://?size=64MiB",
            f"disk://{folder}/{name}?size=1GiB",
            *([arguments.redis] if arguments.redis else []),
        ]
        given = options | {"audit_reports": arguments.reports}
        audited[name] = [Local(folder, model, urls, **given), Remote(model, **given)]
    total, number, started = 0, arguments.first_round, time.monotonic()
    while total < arguments.count:
        name = list(MODES)[number % len(MODES)]
        draws = random.Random(f"{name} {number}")
        prompts, share = conversations(draws), min(ROUND, arguments.count - total)
        for part, of_part in zip(audited[name], (share - share // 4, share // 4), strict=True):
            before = audits(part)
            while audits(part) - before < of_part:
                part.generate(draws, prompts)
        total = sum(audits(part) for parts in audited.values() for part in parts)
        alarms = sum(sum(part.audit.counts.different.values()) for parts in audited.values() for part in parts)
        seconds = time.monotonic() - started
        by_source = ", ".join(
            f"{source} {count}" for source, count in sources(itertools.chain(*audited.values())).items()
        )
        print(f"{seconds:,.0f} s, round {number}: {total:,} audited ({by_source}), {alarms} different", flush=True)
        number += 1
    columns = ("audited", *SOURCES, "different", "blocks", "equal bit for bit", "largest distance", "tolerance")
    print(table(["mode", *columns], [row(name, parts) for name, parts in audited.items()]))
    for part in itertools.chain(*audited.values()):
        part.close()


def audits(part: Local | Remote) -> int:
    return sum(part.audit.counts.audited.values())


def sources(parts: Iterable[Local | Remote]) -> Counter[str]:
    """Audited hits by source."""
    return sum((part.audit.counts.audited for part in parts), Counter())


def row(name: str, parts: list[Local | Remote]) -> list[str]:
    """Counts of a mode."""
    counts = [part.audit.counts for part in parts]
    by_source = sources(parts)
    assert set(by_source) <= set(SOURCES)
    figures = (
        by_source.total(), *(by_source[source] for source in SOURCES), sum(one.different.total() for one in counts),
        sum(one.blocks for one in counts), sum(one.exact for one in counts),
    )  # fmt: skip
    largest = max(one.largest for one in counts)
    return [name, *(f"{figure:,}" for figure in figures), f"{largest:.2g}", f"{parts[0].audit.tolerance:g}"]


def measure_cost(folder: Path, rounds: int, every: list[int]) -> None:
    """Processor time of the same batches without audits and with one hit in N audited, in alternation. What an audit costs is
    measured where there are many, and scaled to one hit in 1,000."""
    model = folder / "model-0"
    make(SMALL, model, 0)
    draws = random.Random(0)
    shared = [text(draws, 512) for _ in range(8)]
    engines = {n: engine(model, "bfloat16", audit_every=n) for n in [0, *every]}
    for one in engines.values():
        if one._core.audit is not None:
            one._core.audit._budget = 1.0
    spent: dict[int, list[float]] = {n: [] for n in engines}
    for number in range(rounds + 1):
        prompts = [[*draws.choice(shared), *text(draws, 32)] for _ in range(64)]
        for n in draws.sample(list(engines), len(engines)):
            started = time.process_time()  # what other programs take does not count
            engines[n].generate(prompts, SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True))
            if number:  # the first round has no hits
                spent[n].append(time.process_time() - started)
        print(f"round {number} of {rounds}", flush=True)
    rows = []
    for n in every:
        audit = engines[n]._core.audit
        assert audit is not None
        hits, audited = audit.counts.hits.total(), audit.counts.audited.total()
        ratios = [with_ / without for with_, without in zip(spent[n], spent[0], strict=True)]
        extra = sum(spent[n]) / sum(spent[0]) - 1
        median = statistics.median(ratios)
        scaled = extra * hits / max(audited, 1) / 1000
        figures = (
            f"{extra:+.2%}",
            f"{median - 1:+.2%}",
            f"{min(ratios) - 1:+.1%} .. {max(ratios) - 1:+.1%}",
            f"{scaled:+.3%}",
        )
        rows.append([f"1 in {n}", f"{hits:,}", f"{audited:,}", *figures])
    print(
        table(["audited", "hits", "audits", "more time", "median of rounds", "of rounds", "scaled to 1 in 1,000"], rows)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("distances", "alarms", "cost"))
    parser.add_argument("--count", type=int, default=10_000, help="audits for `alarms`")
    parser.add_argument("--first-round", type=int, default=0, help="of `alarms`: the round after the last printed")
    parser.add_argument("--seeds", type=int, default=3, help="models for `distances`")
    parser.add_argument("--rounds", type=int, default=20, help="of 64 hits, for `cost`")
    parser.add_argument("--every", type=int, nargs="+", default=[2, 20, 100], help="N for `cost`")
    parser.add_argument("--kernels", default="auto", help="kernels for `distances`")
    parser.add_argument("--redis", help="URL of a Redis for `alarms`")
    parser.add_argument("--reports", help="folder for reports of `alarms`")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        if args.what == "distances":
            measure_distances(Path(folder), args.seeds, args.kernels)
        elif args.what == "alarms":
            count_alarms(Path(folder), args)
        else:
            measure_cost(Path(folder), args.rounds, args.every)


if __name__ == "__main__":
    main()
