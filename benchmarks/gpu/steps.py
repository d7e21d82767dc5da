"""The steps of the GPU plan (gpu/plan.py): each makes its own model and returns rows of a table."""

import functools
import importlib
import json
import random
import tempfile
import textwrap
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import median

ROOT = Path(__file__).resolve().parents[2]
TOKENIZER = ROOT / "foreword" / "models" / "stdlib-nano"

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Shapes:
    """What is measured. The model is a Llama; the vocabulary holds the tokenizer's ids."""

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
    copies: tuple[int, ...]

    def config(self) -> Any:
        """The Transformers configuration."""
        from transformers import LlamaConfig

        return LlamaConfig(
            num_hidden_layers=self.layers, hidden_size=self.hidden, num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads, head_dim=self.head_size, intermediate_size=self.feed_forward,
            vocab_size=self.vocabulary, max_position_embeddings=32_768, tie_word_embeddings=False,
            bos_token_id=None, eos_token_id=None, pad_token_id=None,
        )  # fmt: skip

    @property
    def kv_bytes(self) -> int:
        """Of one token, in bfloat16."""
        return self.layers * self.kv_heads * self.head_size * 2 * 2


# Llama 3.1 8B.
LARGE = Shapes(32, 4096, 32, 8, 128, 14_336, 128_256, (1, 16, 64, 256), 512, 8192, 32,
               (48 << 20, 256 << 20, 1 << 30, 2 << 30))  # fmt: skip
TINY = Shapes(1, 32, 4, 2, 8, 64, 2048, (1, 2), 18, 24, 2, (1 << 16, 1 << 18))


class Bench:
    """An engine over a model, without entry points and servers: the loop, its scheduler, and one prompt per request."""

    def __init__(
        self, model: Any, settings: Any, device: Any, options: dict[str, Any], store: str | None = None
    ) -> None:
        from foreword.blocks.prefix_cache import PrefixCache
        from foreword.engine.loop import EngineCore, EngineLimits
        from foreword.engine.model import prepare_model
        from foreword.engine.scheduler import Scheduler
        from foreword.engine.tokenizer import Tokenizer
        from foreword.engine.torch_runner import TorchRunner
        from foreword.entrypoints.build_engine import kv_blocks
        from foreword.process_config import EngineConfig

        config = EngineConfig(device=str(device), kernels="triton", generation_config="openai", **options)
        loaded = prepare_model(model, settings, "", model.dtype, device, config)
        self.blocks = kv_blocks(config, loaded)
        size = config.block_size
        self.runner = TorchRunner(loaded.model, loaded.layers, loaded.kv_dtype, self.blocks, size, triton=True)
        if device.type == "cuda":
            self.runner.record_graphs(config.max_num_seqs)
        cache = PrefixCache(self.blocks, size, groups=loaded.layers.kv_groups(size), model=loaded.fingerprint)
        self.offload: Any = None if store is None else self._open(store, loaded)
        scheduler = Scheduler(
            cache, max_batch_tokens=config.max_batch_tokens, max_num_seqs=config.max_num_seqs, offload=self.offload
        )
        limits = EngineLimits(loaded.max_model_len, loaded.vocab_size, (), seed=0)
        tokenizer = Tokenizer.load(str(TOKENIZER))
        self.core = EngineCore(self.runner, cache, scheduler, tokenizer, limits, offload=self.offload)
        self._requests = 0

    def _open(self, url: str, loaded: Any) -> Any:
        from foreword.config import StoreConfig
        from foreword.offload.manager import OffloadManager
        from foreword.offload.staging import StagingArena, layout_of, tensors_of
        from foreword.store.urls import open_store

        layout = layout_of(self.runner.layers, loaded.fingerprint)
        slots = max(StoreConfig().staging_bytes(loaded.device.type) // layout.block_bytes, 8)
        staging = StagingArena([tensors_of(self.runner.layers)], min(slots, 2 * self.blocks))
        return OffloadManager(open_store([url], layout), staging, [layout])

    def add(self, tokens: list[int], new_tokens: int) -> None:
        from foreword.engine.request import Request, SamplingParams

        self._requests += 1
        params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
        self.core.add(Request(f"bench-{self._requests}", tuple(tokens), params))

    def step(self) -> list[Any]:
        """One step. Raises RuntimeError if a request failed."""
        deltas = self.core.step()
        failed = next((delta.error for delta in deltas if delta.error), None)
        if failed:
            raise RuntimeError(failed)
        return deltas

    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        """The new tokens of each prompt."""
        found: dict[str, list[int]] = {}
        first = self._requests + 1
        for tokens in prompts:
            self.add(tokens, new_tokens)
        left = len(prompts)
        while left:
            for delta in self.step():
                found.setdefault(delta.request_id, []).extend(delta.tokens)
                left -= delta.finish_reason is not None
        return [found[f"bench-{first + i}"] for i in range(len(prompts))]

    def first_token(self, tokens: list[int], new_tokens: int) -> tuple[float, int]:
        """Seconds until the first token of an answer, and the token."""
        begin = time.perf_counter()
        self.add(tokens, new_tokens)
        while not (deltas := [delta for delta in self.step() if delta.tokens]):
            pass
        seconds = time.perf_counter() - begin
        while self.core.scheduler.running:
            self.step()
        return seconds, deltas[0].tokens[0]

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
        while self.core.scheduler.running:
            self.step()
        return seconds / steps


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


def limits_of(device: Any, tiny: bool) -> tuple[float, float]:
    """Bytes per second that a copy on the device reads and writes, and bfloat16 operations per second of a product."""
    import torch

    size = 256 if tiny else 8192
    a = torch.randn(size, size, dtype=torch.bfloat16, device=device)
    product = 2 * size**3 / seconds_of(lambda: a @ a, device)
    source = torch.empty((1 << 16) if tiny else (2 << 30), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds_of(lambda: target.copy_(source), device), product


@dataclass(frozen=True)
class AttentionCase:
    """A kind of layer for the comparison of kernels; two KV heads."""

    dim: int
    group: int
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    value_dim: int | None = None


CASES = (
    AttentionCase(128, 4), AttentionCase(64, 1, window=100), AttentionCase(64, 8, softcap=30.0),
    AttentionCase(96, 3, window=128, sinks=True), AttentionCase(256, 2, softcap=5.0, sinks=True),
    AttentionCase(192, 1, value_dim=128),
)  # fmt: skip
# Steps of chunks `(start, count)`.
SHORT_STEPS = [[(37, 1), (5, 1), (0, 24), (30, 8)], [(90, 1)] * 3, [(60, 70)]]
# Sequences after common blocks of 20 x 16 tokens.
SHARED_STEPS = [[(330 + 40 * i, 1) for i in range(20)], [(325, 20), *[(400, 1)] * 3]]
LONG_STEPS = [[(5000, 1)], [(700 + i, 1) for i in range(300)], [(0, 1500), (900, 400), (3000, 1)]]


def step_kernels(name: str, allowed: float, shapes: Shapes, device: Any, tiny: bool) -> Rows:
    """Attention kernels of a dtype against PyTorch's operators in float32 on the same device."""
    import torch

    dtype = getattr(torch, name)
    steps = SHORT_STEPS[:2] if tiny else SHORT_STEPS + LONG_STEPS
    worst = max(
        (attention_error(case, step, shared, dtype, device), f"{case}, {step}, {shared} shared blocks")
        for case in CASES[: 2 if tiny else None]
        for shared, several in ((0, steps), (20, SHARED_STEPS[tiny:]))
        for step in several
    )
    if not worst[0] <= allowed:
        raise RuntimeError(f"attention in {name} differs by {worst[0]:.3g}: {worst[1]}")
    return [{"what": f"largest error, {name}", "figure": f"{worst[0]:.2g}", "limit": f"{allowed:g}"}]


def attention_error(case: AttentionCase, step: list[tuple[int, int]], shared: int, dtype: Any, device: Any) -> float:
    """The largest difference of a step's attention after `shared` common blocks. Raises RuntimeError if K or V are not written
    exactly."""
    import torch

    from foreword.blocks.layout import LayerLayout
    from foreword.engine.attention.backend import StepAttention
    from foreword.engine.attention.kv_tensors import PagedLayer
    from foreword.engine.attention.metadata import AttentionMetadata, AttentionParams, QueryChunk
    from foreword.engine.attention.triton_backend import StepTensors, TritonAttention

    noise = torch.Generator(device=device).manual_seed(0)
    blocks, row, chunks = shared, 0, []
    for start, count in step:
        needed = -(-(start + count) // 16) - shared
        table = [*range(shared), *range(blocks, blocks + needed)[::-1]]
        chunks.append(QueryChunk(row, start, count, table, start))
        row, blocks = row + count, blocks + needed
    grouped, metadata = (AttentionMetadata(chunks, 16, share_prefixes=share) for share in (True, False))
    layout = LayerLayout(2, case.dim, case.value_dim or case.dim)
    ours, theirs = (PagedLayer(layout, kind, blocks, 16, device) for kind in (dtype, torch.float32))
    for cache, copy in ((ours.k, theirs.k), (ours.v, theirs.v)):
        copy.copy_(cache.normal_(generator=noise))
    sizes = ((2 * case.group, case.dim), (2, case.dim), (2, layout.value_dim))
    q, k, v = (torch.randn(1, heads, row, dim, device=device, generator=noise).to(dtype) for heads, dim in sizes)
    sinks = torch.randn(2 * case.group, device=device, generator=noise) if case.sinks else None
    params = AttentionParams(case.dim**-0.5, case.window, case.softcap, sinks)

    def kernels(one: AttentionMetadata) -> TritonAttention:
        return TritonAttention(StepTensors.of(one, device, saving=1), {0: ours})

    found = StepAttention({0: grouped}, {0: ours}, make_backend=kernels).attend(0, q, k, v, params)
    expected = StepAttention({0: metadata}, {0: theirs}).attend(0, q.float(), k.float(), v.float(), params)
    if not (torch.equal(ours.k, theirs.k.to(dtype)) and torch.equal(ours.v, theirs.v.to(dtype))):
        raise RuntimeError(f"{dtype}, {case}, {step}: K or V were not written as they are")
    return float((found.float() - expected).abs().max())


def step_tokens(shapes: Shapes, device: Any, tiny: bool) -> Rows:
    """Greedy tokens of a small float32 model against Transformers, cold and from the prefix cache. The prompts share a prefix,
    which decode steps read once however short it is."""
    import torch

    from foreword.engine.attention import triton_backend

    triton_backend._SAVED_BYTES = 1
    torch.backends.cuda.matmul.allow_tf32 = False
    small = Shapes(2, 64, 4, 2, 16, 96, 2048, (), 0, 0, 0, ())
    from foreword.engine.attention.backend import NAME

    model, settings = random_model(small, device, torch.float32, NAME)
    # Sharp logits: rounding then changes no choice.
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.normal_(std=0.2)
    own, _ = random_model(small, device, torch.float32, "eager")
    own.load_state_dict(model.state_dict())
    new = 3 if tiny else 32
    lengths = (5, 21) if tiny else (5, 40, 133, 600)
    prompts = [random_tokens(48, 2048, 0) + random_tokens(length, 2048, length) for length in lengths]
    expected = []
    for tokens in prompts:
        ids = torch.tensor([tokens], device=device)
        mask = torch.ones_like(ids)  # else token 0 would be padding
        found = own.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False, pad_token_id=0)
        expected.append(found[0, len(tokens) :].tolist())
    bench = Bench(model, settings, device, {"kv_memory": "8192 tokens", "max_num_seqs": 4, "max_batch_tokens": 256})
    rows: Rows = []
    for name in ("cold", "from the prefix cache"):
        found = bench.generate(prompts, new)
        right = sum(a == b for one, two in zip(found, expected, strict=True) for a, b in zip(one, two, strict=True))
        rows.append({"what": f"greedy tokens as Transformers, {name}", "figure": f"{right} of {new * len(prompts)}"})
        if found != expected:
            raise RuntimeError(f"{name}: {right} of {new * len(prompts)} tokens are those of Transformers")
    return rows


def step_decode(shapes: Shapes, device: Any, tiny: bool) -> Rows:
    """Decode and prefill of the large model, as shares of what the device can do."""
    import torch

    from foreword.engine.attention.backend import NAME

    bandwidth, product = limits_of(device, tiny)
    begin = time.perf_counter()
    model, settings = random_model(shapes, device, torch.bfloat16, NAME)
    embedding = model.get_input_embeddings().weight.numel()
    weights = sum(parameter.numel() for parameter in model.parameters()) - embedding
    length = shapes.prefill + shapes.steps + 64
    options = {
        "max_num_seqs": shapes.batches[-1], "max_batch_tokens": shapes.prefill, "max_model_len": length,
        "kv_memory": "4096 tokens" if tiny else "auto",
    }  # fmt: skip
    bench = Bench(model, settings, device, options)
    rows: Rows = [
        {"what": "copy on the device, bytes read and written", "figure": f"{bandwidth / 1e9:.0f} GB/s"},
        {"what": "bfloat16 product", "figure": f"{product / 1e12:.1f} TFLOP/s"},
        {"what": "start of the engine", "figure": f"{time.perf_counter() - begin:.1f} s"},
        {"what": "KV pool", "figure": f"{bench.blocks * bench.runner.bytes_per_block / 1e9:.1f} GB"},
        {"what": "batch sizes with CUDA graphs", "figure": str(len(bench.runner.graph_sizes))},
    ]

    def prefill() -> float:
        bench.add(random_tokens(shapes.prefill, shapes.vocabulary, time.perf_counter_ns()), 1)
        begin = time.perf_counter()
        while not any(delta.finish_reason for delta in bench.step()):
            pass
        return time.perf_counter() - begin

    prefill()
    seconds = min(prefill() for _ in range(3))
    attended = 2 * shapes.layers * shapes.heads * shapes.head_size * shapes.prefill**2
    operations = 2 * (weights - embedding) * shapes.prefill + attended
    rows.append(
        {
            "what": f"prefill of {shapes.prefill}",
            "figure": f"{shapes.prefill / seconds:.0f} tok/s",
            "share": f"{operations / seconds / product:.0%} of a product",
        }
    )
    for batch in shapes.batches:
        seconds = bench.decode_seconds(batch, shapes.context, shapes.steps, shapes.vocabulary)
        read = 2 * weights + batch * (shapes.context + shapes.steps // 2) * shapes.kv_bytes
        rows.append(
            {
                "what": f"decode, batch {batch}",
                "figure": f"{batch / seconds:.0f} tok/s",
                "share": f"{read / seconds / bandwidth:.0%} of a copy's bandwidth",
            }
        )
    batch, shared = shapes.batches[-2], shapes.prefill // 2
    for once in (True, False):
        bench.runner.share_prefixes = once
        seconds = bench.decode_seconds(batch, shapes.context, shapes.steps, shapes.vocabulary, shared)
        how = "read once" if once else "read by each sequence"
        rows.append(
            {"what": f"decode, batch {batch}, a prefix of {shared} {how}", "figure": f"{batch / seconds:.0f} tok/s"}
        )
    return rows


def step_transformers(shapes: Shapes, device: Any, tiny: bool) -> Rows:
    """Transformers with a static cache and torch.compile, same model, same context."""
    import torch

    model, settings = random_model(shapes, device, torch.bfloat16, "sdpa")
    forward = model.forward if tiny else torch.compile(model.forward, mode="reduce-overhead", fullgraph=False)
    rows: Rows = []

    @torch.inference_mode()
    def prefill() -> None:
        ids = torch.randint(0, shapes.vocabulary, (1, shapes.prefill), device=device)
        model(input_ids=ids, use_cache=True, logits_to_keep=1)

    seconds = seconds_of(prefill, device, 3)
    rows.append({"what": f"prefill of {shapes.prefill}", "figure": f"{shapes.prefill / seconds:.0f} tok/s"})
    for batch in shapes.batches[:2]:
        rate = static_decode(shapes, model, forward, settings, batch, device)
        rows.append({"what": f"decode, batch {batch}", "figure": f"{rate:.0f} tok/s"})
        print(json.dumps(rows), flush=True)  # what there is, if the time runs out
    return rows


def static_decode(shapes: Shapes, model: Any, forward: Any, settings: Any, batch: int, device: Any) -> float:
    """Tokens per second."""
    import torch
    from transformers import StaticCache

    with torch.inference_mode():
        cache = StaticCache(config=settings, max_cache_len=shapes.context + shapes.steps + 8)
        ids = torch.randint(0, shapes.vocabulary, (batch, shapes.context), device=device)
        model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        token, times = ids[:, :1].clone(), []
        for step in range(shapes.steps + 4):
            wait(device)
            begin = time.perf_counter()
            place = torch.tensor([[shapes.context + step]], device=device).expand(batch, 1)
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
            out = forward(input_ids=token, position_ids=place, past_key_values=cache, use_cache=True)
            token = out.logits[:, -1:].argmax(-1).clone()
            token.tolist()
            times.append(time.perf_counter() - begin)
    return batch / median(times[4:])


def step_copies(shapes: Shapes, device: Any, tiny: bool) -> Rows:
    """Saving and loading blocks, all layers of 16 tokens each, against one plain copy from and to pinned memory."""
    import torch

    from foreword.blocks.layout import LayerLayout
    from foreword.engine.attention.kv_tensors import PagedLayer
    from foreword.offload.staging import StagingArena, tensors_of

    block = 16 * shapes.kv_bytes
    most = max(shapes.copies) // block
    layout = LayerLayout(shapes.kv_heads, shapes.head_size, shapes.head_size)
    layers = {i: PagedLayer(layout, torch.bfloat16, most, 16, device) for i in range(shapes.layers)}
    paged = tensors_of(layers)
    for tensor in paged:
        tensor.normal_()
    arena = StagingArena([paged], most)
    rows: Rows = []
    for size in shapes.copies:
        blocks = random.Random(size).sample(range(most), size // block)
        for name, rate, plain in copy_rates(arena, blocks, block, device):
            what, share = f"{name} {size >> 10} KiB", f"{rate / plain:.0%} of a pinned copy"
            rows.append({"what": what, "figure": f"{rate / 1e9:.1f} GB/s", "share": share})
    check_copies(arena, paged, blocks)
    return rows


def copy_rates(arena: Any, blocks: list[int], block_bytes: int, device: Any) -> list[tuple[str, float, float]]:
    """Name, bytes per second, and those of a plain copy, of saving and of loading."""
    import torch

    size, slots = len(blocks) * block_bytes, list(range(len(blocks)))
    host = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    there = torch.empty(size, dtype=torch.uint8, device=device)

    def save() -> None:
        arena.gather(blocks, slots)
        arena.buffer(slots[-1])

    def rate(work: Callable[[], object]) -> float:
        return size / seconds_of(work, device)

    return [
        ("save", rate(save), rate(functools.partial(host.copy_, there, non_blocking=True))),
        (
            "load",
            rate(functools.partial(arena.scatter, slots, blocks)),
            rate(functools.partial(there.copy_, host, non_blocking=True)),
        ),
    ]


def check_copies(arena: Any, paged: list[Any], blocks: list[int]) -> None:
    """Raises RuntimeError if blocks do not come back as they were."""
    import torch

    wanted, slots = [tensor[blocks] for tensor in paged], list(range(len(blocks)))
    arena.gather(blocks, slots)
    for tensor in paged:
        tensor.zero_()
    arena.scatter(slots, blocks)
    for number, (tensor, before) in enumerate(zip(paged, wanted, strict=True)):
        if not torch.equal(tensor[blocks], before):
            raise RuntimeError(f"tensor {number} came back with other bytes")


def step_saving(shapes: Shapes, device: Any, tiny: bool) -> Rows:
    """Decode with a memory store that takes every block, against decode without a store."""
    import torch

    from foreword.engine.attention.backend import NAME

    batch = shapes.batches[1]
    model, rates = None, {}
    for name, store in (("without a store", None), ("saving", "memory://?size=4GiB")):
        options = {
            "max_num_seqs": batch, "max_batch_tokens": max(shapes.context, 64), "max_model_len": 4 * shapes.context,
            "kv_memory": f"{2 * batch * 4 * shapes.context} tokens",
        }  # fmt: skip
        # On a CPU an engine drops the weights that it has packed.
        if model is None or device.type == "cpu":
            model, settings = random_model(shapes, device, torch.bfloat16, NAME)
        bench = Bench(model, settings, device, options, store)
        rates[name] = batch / bench.decode_seconds(batch, shapes.context, 2 * shapes.steps, shapes.vocabulary)
        saved = 0
        if bench.offload is not None:
            bench.offload.flush(20)
            saved = bench.offload.status().saved
            bench.offload.close()
        del bench
    ratio = rates["saving"] / rates["without a store"]
    rows: Rows = [
        {"what": f"decode, batch {batch}, {name}", "figure": f"{rate:.0f} tok/s"} for name, rate in rates.items()
    ]
    return [*rows, {"what": f"saving against not, {saved} blocks saved", "figure": f"{ratio:.1%}", "limit": "97 %"}]


def step_hits(shapes: Shapes, device: Any, tiny: bool) -> Rows:
    """TTFT of a long prompt: computed, from the prefix cache on the device, from memory, and from disk. Raises RuntimeError
    if nothing was loaded."""
    import torch

    from foreword.engine.attention.backend import NAME

    rows: Rows = []
    model = None
    with tempfile.TemporaryDirectory() as folder:
        for tier, store in (("memory", "memory://?size=8GiB"), ("disk", f"disk://{folder}?size=8GiB")):
            if model is None or device.type == "cpu":
                model, settings = random_model(shapes, device, torch.bfloat16, NAME)
            options = {
                "max_num_seqs": 2, "max_batch_tokens": shapes.prefill, "max_model_len": shapes.prefill + 64,
                "kv_memory": f"{4 * (shapes.prefill + 64)} tokens",
            }  # fmt: skip
            bench = Bench(model, settings, device, options, store)
            bench.offload.costs.prefill_rate = float  # all that is found is loaded, also where computing is faster
            bench.first_token(random_tokens(shapes.prefill, shapes.vocabulary, 1), shapes.steps)
            runs = [ttft_by_path(bench, shapes, seed) for seed in (2, 3, 4)]
            status = bench.offload.status()
            bench.offload.close()
            if not status.loaded:
                raise RuntimeError(f"no block was loaded from {tier}: {status}")
            computed, device_hit, stored = (median(run[0][i] for run in runs) for i in range(3))
            if not rows:
                rows += [
                    {"what": f"TTFT of {shapes.prefill} tokens, computed", "figure": f"{computed * 1e3:.1f} ms"},
                    {"what": "the same from the prefix cache", "figure": f"{device_hit * 1e3:.1f} ms"},
                ]
            same = sum(run[1] for run in runs)
            rows.append(
                {
                    "what": f"the same from {tier}, {status.loaded} of {len(runs) * (shapes.prefill // 16)} blocks loaded",
                    "figure": f"{stored * 1e3:.1f} ms",
                    "share": f"{stored / computed:.0%} of computing",
                }
            )
            rows.append({"what": f"first tokens as computed, {tier}", "figure": f"{same} of {2 * len(runs)}"})
            del bench
    return rows


def ttft_by_path(bench: Bench, shapes: Shapes, seed: int) -> tuple[list[float], int]:
    """Seconds to the first token of a new prompt: computed, from the device, and from the store after the device forgot it;
    and how many of the latter two began with the token of the first."""
    prompt = random_tokens(shapes.prefill, shapes.vocabulary, seed)
    seconds, tokens = zip(*(bench.first_token(prompt, shapes.steps) for _ in range(2)), strict=True)
    bench.offload.flush(60)
    bench.core.cache.clear()
    third, token = bench.first_token(prompt, 1)
    return [*seconds, third], (tokens[1] == tokens[0]) + (token == tokens[0])


def step_serve(shapes: Shapes, device: Any, tiny: bool) -> Rows:
    """`foreword serve` with the built-in model and a disk: asked twice, killed, started again, asked again. Raises
    RuntimeError if the second or third answer differs or was not read from the cache."""
    missing = [name for name in ("aiohttp", "httpx", "llguidance", "prometheus_client", "zmq") if not importable(name)]
    if missing:
        return [{"what": "left out: not installed here", "figure": ", ".join(missing)}]
    from benchmarks.router.fleet import Process

    source = Path(textwrap.__file__).read_text(encoding="utf-8")[-8000:]
    messages = [{"role": "system", "content": source}, {"role": "user", "content": "What does dedent do?"}]
    answers = []
    with tempfile.TemporaryDirectory() as folder:
        command = ["serve", "--device", str(device), "--dtype", "float32", "--store", f"disk://{folder}/kv?size=1GiB"]
        server = Process(Path(folder), "serve", command)
        starts = []
        for asked in (2, 1):
            begin = time.perf_counter()
            server.start()
            server.wait_ready()
            starts.append(time.perf_counter() - begin)
            answers += [ask(server.url, messages) for _ in range(asked)]
            server.stop()
    (text, *others) = [answer["choices"][0]["message"]["content"] for answer in answers]
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    if others != [text, text] or cached[0] or not min(cached[1:]):
        raise RuntimeError(f"answers {[text, *others]}, cached tokens {cached}")
    return [
        {"what": "foreword serve, ready, first and second start", "figure": ", ".join(f"{s:.1f} s" for s in starts)},
        {"what": "cached tokens: first, again, after a restart", "figure": ", ".join(map(str, cached))},
        {"what": "answers equal", "figure": "3 of 3"},
    ]


def importable(name: str) -> bool:
    """Whether a module can be imported here."""
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


def ask(url: str, messages: list[dict[str, str]]) -> Any:
    """The answer of a chat, greedy."""
    body = json.dumps({"messages": messages, "max_tokens": 32, "temperature": 0}).encode()
    request = urllib.request.Request(f"{url}/v1/chat/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as reply:
        return json.load(reply)


@dataclass(frozen=True)
class PlanStep:
    """A step, the seconds that it may take, and whether it measures time: such steps run alone, after the others."""

    run: Callable[[Shapes, Any, bool], Rows]
    limit: int
    timed: bool = True


def step_vllm(shapes: Shapes, device: Any, tiny: bool) -> Rows:
    """`gpu/vllm_steps.py`."""
    from benchmarks.gpu.vllm_steps import step_vllm

    return step_vllm(device, tiny)


STEPS = {
    "kernels-float32": PlanStep(functools.partial(step_kernels, "float32", 1e-4), 200, timed=False),
    "kernels-bfloat16": PlanStep(functools.partial(step_kernels, "bfloat16", 5e-2), 150, timed=False),
    "kernels-float16": PlanStep(functools.partial(step_kernels, "float16", 1e-2), 150, timed=False),
    "tokens": PlanStep(step_tokens, 100, timed=False),
    "serve": PlanStep(step_serve, 120, timed=False),
    "decode": PlanStep(step_decode, 130),
    "copies": PlanStep(step_copies, 50),
    "saving": PlanStep(step_saving, 80),
    "hits": PlanStep(step_hits, 80),
    "transformers": PlanStep(step_transformers, 120),
    "vllm": PlanStep(step_vllm, 330),
}
