"""The engine that the GPU plan measures: an 8B-shaped model with random weights, without entry points and servers.

One runner, whose weights and CUDA graphs take a minute, serves all measurements: `attach` gives it other stores.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import median

ROOT = Path(__file__).resolve().parents[2]
TOKENIZER = ROOT / "foreword" / "models" / "stdlib-nano"

Row = dict[str, Any]
Rows = Iterable[Row]


def row(what: str, figure: str, beside: str = "", **measured: float) -> Row:
    """A row of the table. `beside`: what the figure is compared with; `measured`: its numbers, by name, for the verdicts."""
    found: Row = {"what": what, "figure": figure}
    if beside:
        found["beside"] = beside
    if measured:
        found["measured"] = measured
    return found


@dataclass(frozen=True)
class Shapes:
    """The model and the prompts of a measurement. The model is a Llama; the vocabulary holds the tokenizer's ids.

    Attributes:
        batches, context, prefill, steps: of the steps `decode` and `transformers`, and of vLLM's.
        lengths: tokens of the prompts whose TTFT is measured.
        samples: loads of a prompt of each length; `prompts`: different ones among them.
        others: sequences that decode meanwhile.
        concurrent: sequences that are saved at once; each has `context` tokens and computes `decode` more.
        copy_bytes: bytes that are copied at once.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    feed_forward: int
    vocabulary: int
    batches: tuple[int, ...]
    context: int
    prefill: int
    steps: int
    lengths: tuple[int, ...] = ()
    samples: tuple[int, ...] = ()
    prompts: tuple[int, ...] = ()
    others: int = 0
    concurrent: tuple[int, ...] = ()
    decode: int = 0
    copy_bytes: int = 0

    def config(self) -> Any:
        """The Transformers configuration."""
        from transformers import LlamaConfig

        return LlamaConfig(
            num_hidden_layers=self.layers, hidden_size=self.hidden, num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads, head_dim=self.head_size, intermediate_size=self.feed_forward,
            vocab_size=self.vocabulary, max_position_embeddings=32_768 + 64, tie_word_embeddings=False,
            bos_token_id=None, eos_token_id=None, pad_token_id=None,
        )  # fmt: skip

    @property
    def kv_bytes(self) -> int:
        """Of one token, in bfloat16."""
        return self.layers * self.kv_heads * self.head_size * 2 * 2


# Llama 3.1 8B, longest prompts not first: what decides most is measured first.
LARGE = Shapes(
    32, 4096, 32, 8, 128, 14_336, 128_256, (1, 16, 64, 256), 512, 8192, 32,
    lengths=(8192, 1024, 32_768), samples=(20, 30, 8), prompts=(5, 8, 2), others=32, concurrent=(32, 128), decode=96,
    copy_bytes=1 << 30,
)  # fmt: skip
TINY = Shapes(
    1, 32, 4, 2, 8, 64, 2048, (1, 2), 18, 24, 2,
    lengths=(64, 32, 96), samples=(2, 2, 2), prompts=(1, 1, 1), others=2, concurrent=(2, 3), decode=20,
    copy_bytes=1 << 14,
)  # fmt: skip


class Bench:
    """An engine over a model: the loop, its scheduler, and one prompt per request.

    Attributes:
        offload: the offload manager; None without stores.
        gaps: while it is a list, the seconds between tokens of each sequence that decodes are added.
    """

    def __init__(self, model: Any, settings: Any, device: Any, options: dict[str, Any], *, triton: bool = True) -> None:
        from foreword.blocks.prefix_cache import PrefixCache
        from foreword.engine.loop import EngineLimits
        from foreword.engine.model import prepare_model
        from foreword.engine.torch_runner import TorchRunner
        from foreword.engine_config import EngineConfig
        from foreword.entrypoints.build_engine import kv_blocks
        from foreword.tokens.tokenizer import Tokenizer

        kernels = "triton" if triton else "torch"
        self.config = EngineConfig(device=str(device), kernels=kernels, generation_config="openai", **options)
        self.loaded = loaded = prepare_model(model, settings, "", model.dtype, device, self.config)
        self.device = device
        self.blocks = kv_blocks(self.config, loaded)
        size = self.config.block_size
        self.runner = TorchRunner(loaded.model, loaded.layers, loaded.kv_dtype, self.blocks, size, triton=triton)
        if device.type == "cuda":
            self.runner.record_graphs(self.config.max_num_seqs)
        groups = loaded.layers.kv_groups(size)
        self.cache = PrefixCache(self.blocks, size, groups=groups, model=loaded.fingerprint)
        self._limits = EngineLimits(loaded.max_model_len, loaded.vocab_size, (), seed=0)
        self._tokenizer = Tokenizer.load(str(TOKENIZER))
        self._requests = 0
        self._last: dict[str, float] = {}
        self.gaps: list[float] | None = None
        self.core: Any = None
        self.attach(None)

    def attach(self, offload: Any) -> None:
        """Serve from now on with these stores, an `OffloadManager` or None, and with an empty cache."""
        from foreword.engine.loop import EngineCore
        from foreword.engine.scheduler import Scheduler

        if self.core is not None:
            self.core.fail_all("the plan serves with other stores")
        self._last.clear()
        self.cache.clear()
        self.offload = offload
        scheduler = Scheduler(
            self.cache,
            max_batch_tokens=self.config.max_batch_tokens,
            max_num_seqs=self.config.max_num_seqs,
            offload=offload,
        )
        self.core = EngineCore(self.runner, self.cache, scheduler, self._tokenizer, self._limits, offload=offload)

    def add(self, tokens: list[int], new_tokens: int) -> str:
        """Queue a request; its name."""
        from foreword.engine.request import Request, SamplingParams

        self._requests += 1
        name = f"bench-{self._requests}"
        params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
        self.core.add(Request(name, tuple(tokens), params))
        return name

    def step(self) -> list[Any]:
        """One step. Raises RuntimeError if a request failed."""
        deltas: list[Any] = self.core.step()
        now = time.perf_counter()
        failed = next((delta.error for delta in deltas if delta.error), None)
        if failed:
            raise RuntimeError(failed)
        for delta in deltas:
            if delta.tokens:
                before = self._last.get(delta.request_id)
                if before is not None and self.gaps is not None:
                    self.gaps.append(now - before)
                self._last[delta.request_id] = now
            if delta.finish_reason is not None:
                self._last.pop(delta.request_id, None)
        return deltas

    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        """The new tokens of each prompt."""
        names = [self.add(tokens, new_tokens) for tokens in prompts]
        found: dict[str, list[int]] = {name: [] for name in names}
        left = len(prompts)
        while left:
            for delta in self.step():
                if delta.request_id in found:
                    found[delta.request_id].extend(delta.tokens)
                    left -= delta.finish_reason is not None
        return [found[name] for name in names]

    def first_token(self, tokens: list[int]) -> tuple[float, int]:
        """Seconds until the first token of an answer, and the token. Other requests continue meanwhile."""
        begin = time.perf_counter()
        name = self.add(tokens, 1)
        while True:
            for delta in self.step():
                if delta.request_id == name and delta.tokens:
                    return time.perf_counter() - begin, delta.tokens[0]

    def stop(self, names: Iterable[str]) -> None:
        """End requests."""
        for name in names:
            self.core.abort(name)
            self._last.pop(name, None)

    def finish(self) -> None:
        """Run until no request is left."""
        while self.core.has_work():
            self.step()

    def blocks_of(self, tokens: list[int]) -> list[int]:
        """The blocks of the device that have a prompt's KV."""
        return list(self.cache.lookup(self.cache.open(tokens)).blocks)

    def decode_seconds(self, batch: int, context: int, steps: int, vocabulary: int, shared: int = 0) -> float:
        """The mean time of a step in which `batch` sequences decode, after `shared` common tokens and `context` of their own.
        Their blocks fill in the same steps."""
        common = random_tokens(shared, vocabulary, batch)
        if shared:
            self.generate([common], 1)
        for number in range(batch):
            self.add(common + random_tokens(context, vocabulary, 1000 * batch + number), steps + batch)
        started: set[str] = set()
        while len(started) < batch:
            started.update(delta.request_id for delta in self.step() if delta.tokens)
        begin = time.perf_counter()
        for _ in range(steps):
            self.step()
        seconds = time.perf_counter() - begin
        self.finish()
        return seconds / steps


class Others:
    """Sequences that decode while something else is measured. Their blocks are saved too."""

    def __init__(self, bench: Bench, count: int, context: int, vocabulary: int) -> None:
        self._bench, self._count, self._context, self._vocabulary = bench, count, context, vocabulary
        self._names: list[str] = []
        self._seed = 1_000_000
        self._new = min(2000, max((bench.config.max_model_len or 0) - context - 1, 1))

    def ready(self, steps: int) -> None:
        """All decode now, and will for `steps` more steps."""
        bench = self._bench
        left = {sequence.request.id: sequence.left for sequence in bench.core.scheduler.running}
        ending = [name for name in self._names if left.get(name, 0) <= steps]
        bench.stop(ending)
        self._names = [name for name in self._names if name not in ending]
        waiting = set()
        while len(self._names) < self._count:
            self._seed += 1
            self._names.append(bench.add(random_tokens(self._context, self._vocabulary, self._seed), self._new))
            waiting.add(self._names[-1])
        while waiting:
            waiting -= {delta.request_id for delta in bench.step() if delta.tokens}

    def end(self) -> None:
        """Stop them."""
        self._bench.stop(self._names)
        self._names.clear()


def random_tokens(count: int, vocabulary: int, seed: int) -> list[int]:
    """Token ids."""
    chance = random.Random(seed)
    return [chance.randrange(vocabulary) for _ in range(count)]


def random_model(shapes: Shapes, device: Any, dtype: Any, attention: str) -> tuple[Any, Any]:
    """A model with random weights, made on the device, and its configuration."""
    import torch
    from transformers import AutoModelForCausalLM

    settings = shapes.config()
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(settings, dtype=dtype, attn_implementation=attention)
    return model.eval().requires_grad_(False), settings


def wait(device: Any) -> None:
    """Until the device has done what was queued."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize()


def seconds_of(work: Callable[[], object], device: Any, repeats: int = 5) -> float:
    """The median time of some work on the device, after one run that is not counted."""
    times = []
    for _ in range(repeats + 1):
        wait(device)
        begin = time.perf_counter()
        work()
        wait(device)
        times.append(time.perf_counter() - begin)
    return median(times[1:])


def percentile(values: Iterable[float], share: float) -> float:
    """The smallest value that is at least as large as this share of the values; not a number when there are none."""
    found = sorted(values)
    return found[min(int(share * len(found)), len(found) - 1)] if found else float("nan")


def milliseconds(values: Iterable[float]) -> str:
    """p50 and p99."""
    found = list(values)
    return f"{median(found) * 1e3:.1f} / {percentile(found, 0.99) * 1e3:.1f} ms" if found else "none"
