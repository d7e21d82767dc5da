"""Long steps of the GPU plan (gpu/plan.py --all): kernels and tokens against PyTorch and Transformers, the engine's speed as a
share of what the device can do, and a server. Each makes its own model.
"""

import importlib
import json
import tempfile
import textwrap
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.bench import Bench, Row, Shapes, random_model, random_tokens, row, seconds_of, wait
from benchmarks.harness import median


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


def step_kernels(name: str, allowed: float, shapes: Shapes, device: Any, tiny: bool) -> Iterator[Row]:
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
    yield row(f"largest error, {name}", f"{worst[0]:.2g}", f"allowed {allowed:g}")


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


def step_tokens(shapes: Shapes, device: Any, tiny: bool) -> Iterator[Row]:
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
    for name in ("cold", "from the prefix cache"):
        found = bench.generate(prompts, new)
        right = sum(a == b for one, two in zip(found, expected, strict=True) for a, b in zip(one, two, strict=True))
        yield row(f"greedy tokens as Transformers, {name}", f"{right} of {new * len(prompts)}")
        if found != expected:
            raise RuntimeError(f"{name}: {right} of {new * len(prompts)} tokens are those of Transformers")


def step_decode(shapes: Shapes, device: Any, tiny: bool) -> Iterator[Row]:
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
    yield row("copy on the device, bytes read and written", f"{bandwidth / 1e9:.0f} GB/s")
    yield row("bfloat16 product", f"{product / 1e12:.1f} TFLOP/s")
    yield row("start of the engine", f"{time.perf_counter() - begin:.1f} s")
    yield row("KV pool", f"{bench.blocks * bench.runner.bytes_per_block / 1e9:.1f} GB")
    yield row("batch sizes with CUDA graphs", str(len(bench.runner.graph_sizes)))

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
    speed = f"{shapes.prefill / seconds:.0f} tok/s"
    yield row(f"prefill of {shapes.prefill}", speed, f"{operations / seconds / product:.0%} of a product")
    for batch in shapes.batches:
        seconds = bench.decode_seconds(batch, shapes.context, shapes.steps, shapes.vocabulary)
        read = 2 * weights + batch * (shapes.context + shapes.steps // 2) * shapes.kv_bytes
        share = f"{read / seconds / bandwidth:.0%} of a copy's bandwidth"
        yield row(f"decode, batch {batch}", f"{batch / seconds:.0f} tok/s", share)
    batch, shared = shapes.batches[-2], shapes.prefill // 2
    for once in (True, False):
        bench.runner.share_prefixes = once
        seconds = bench.decode_seconds(batch, shapes.context, shapes.steps, shapes.vocabulary, shared)
        how = "read once" if once else "read by each sequence"
        yield row(f"decode, batch {batch}, a prefix of {shared} {how}", f"{batch / seconds:.0f} tok/s")


def step_transformers(shapes: Shapes, device: Any, tiny: bool) -> Iterator[Row]:
    """Transformers with a static cache and torch.compile, same model, same context."""
    import torch

    model, settings = random_model(shapes, device, torch.bfloat16, "sdpa")
    forward = model.forward if tiny else torch.compile(model.forward, mode="reduce-overhead", fullgraph=False)

    @torch.inference_mode()
    def prefill() -> None:
        ids = torch.randint(0, shapes.vocabulary, (1, shapes.prefill), device=device)
        model(input_ids=ids, use_cache=True, logits_to_keep=1)

    seconds = seconds_of(prefill, device, 3)
    yield row(f"prefill of {shapes.prefill}", f"{shapes.prefill / seconds:.0f} tok/s")
    for batch in shapes.batches[:2]:
        rate = static_decode(shapes, model, forward, settings, batch, device)
        yield row(f"decode, batch {batch}", f"{rate:.0f} tok/s")


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


def step_serve(shapes: Shapes, device: Any, tiny: bool) -> Iterator[Row]:
    """`foreword serve` with the built-in model and a disk: asked twice, killed, started again, asked again. Raises
    RuntimeError if the second or third answer differs or was not read from the cache."""
    missing = [name for name in ("aiohttp", "httpx", "llguidance", "prometheus_client", "zmq") if not importable(name)]
    if missing:
        yield row("left out: not installed here", ", ".join(missing))
        return
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
    yield row("foreword serve, ready, first and second start", ", ".join(f"{s:.1f} s" for s in starts))
    yield row("cached tokens: first, again, after a restart", ", ".join(map(str, cached)))
    yield row("answers equal", "3 of 3")


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
