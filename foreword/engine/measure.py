"""Measuring at load which product and which attention is the fastest here, in at most about a second.

Kinds take turns on the same input, on one thread and in processor time of that thread, so that other processes disturb little;
the shortest time of each counts. Weights are the model's own, cut to a sample.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from foreword import compiled_code
from foreword.blocks.layout import LayerLayout
from foreword.engine import linear
from foreword.engine.attention.backend import AttentionBackend, LayerRecorder
from foreword.engine.attention.cpu_backend import CpuAttention, CpuLayers
from foreword.engine.attention.kv_tensors import PagedLayer
from foreword.engine.attention.metadata import AttentionMetadata, AttentionParams, QueryChunk
from foreword.engine.attention.torch_backend import TorchAttention
from foreword.engine.kernels.kernel_choice import (
    ATTENTION_SHAPES,
    COMPILED,
    ROWS,
    TORCH,
    AttentionChoice,
    Times,
    TimesFile,
    fastest,
    row_bucket,
)
from foreword.engine.kernels.native import Kernels
from foreword.engine.linear import Shape, kinds, make_product, scale_of, set_scale

log = logging.getLogger(__name__)

# For all products of a model, and for all its attention.
_SECONDS = 0.6
_ATTENTION_SECONDS = 0.4
# Elements of a weight that are measured: more than a core's own cache holds.
_SAMPLE = 1 << 21
# A kind that is slower than the best by this factor is not measured with more rows.
_HOPELESS = 4.0
_CLOCK_STEP = 1e-7
_MIN_TURNS, _MAX_TURNS = 3, 9
# KV heads that stand for all, with their query heads.
_MEASURED_HEADS = 2
_BLOCK = 16
# Length of the runs of consecutive blocks in a sequence's block table.
_RUN = 4


class Measured:
    """The times of a model's products and attention on this machine."""

    def __init__(self, products: Mapping[Shape, Times], attention: Mapping[str, Times]) -> None:
        self.products = products
        self.attention = attention

    def attention_choice(self, recorder: LayerRecorder) -> AttentionChoice:
        """The attention kernel for each layer."""
        served = {name: fastest(times, (COMPILED, TORCH)) for name, times in self.attention.items()}
        names = {layer: _attention_name(recorder, layer) for layer in recorder.layouts}
        return AttentionChoice({layer: served[name] for layer, name in names.items() if name in served})

    def cost(self, groups: Sequence[Sequence[nn.Linear]], recorder: LayerRecorder) -> tuple[float, str]:
        """The largest share of a step's speed that is lost if the compiled kernels compute all products and all attention
        instead of the fastest, and in which steps. Infinite times count as a loss of everything."""
        worst, where = 0.0, ""
        for place, (rows, keys) in enumerate(ATTENTION_SHAPES):
            columns = []
            for group in groups:
                shape = linear.shape_of(group)
                at = {kind: times[row_bucket(rows)] for kind, times in self.products[shape].items()}
                columns.append((shape[1] / _sampled_outputs(shape), at))
            for layer, layout in recorder.layouts.items():
                at = {kind: times[place] for kind, times in self.attention[_attention_name(recorder, layer)].items()}
                columns.append((layout.kv_heads / min(layout.kv_heads, _MEASURED_HEADS), at))
            fastest_time = sum(scale * min(at.values()) for scale, at in columns)
            lost = 1 - fastest_time / sum(scale * at.get(COMPILED, math.inf) for scale, at in columns)
            if lost > worst:
                worst, where = lost, f"{'prefill' if rows > 16 else 'decode'} of {rows} tokens after {keys}"
        return worst, where


def measure(
    model: nn.Module,
    siblings: Sequence[Sequence[nn.Linear]],
    recorder: LayerRecorder,
    kernels: Kernels | None,
) -> Measured:
    """The times for this model, from the cache folder where they were measured before."""
    groups: dict[Shape, list[nn.Linear]] = {}
    for group in linear.groups(model, siblings):
        groups.setdefault(linear.shape_of(group), group)
    layers = {_attention_name(recorder, layer): layer for layer in recorder.layouts} if kernels is not None else {}
    shapes = [f"{_weights(group)} {inputs}x{outputs}" for (inputs, outputs), group in groups.items()]
    file = TimesFile([*_conditions(kernels), *shapes, *layers])
    known = file.load()
    if known is None or set(known) != {*shapes, *layers}:
        began = time.monotonic()
        with _one_thread():
            known = dict(zip(shapes, _measure_products(list(groups.values()), kernels), strict=True))
            for name, layer in layers.items():
                assert kernels is not None
                known[name] = _measure_attention(recorder, layer, kernels, _ATTENTION_SECONDS / len(layers))
        file.save(known)
        log.info("kernels measured in %.2f s", time.monotonic() - began)
    products = {shape: known[name] for shape, name in zip(groups, shapes, strict=True)}
    return Measured(products, {name: known[name] for name in layers})


def _weights(group: Sequence[nn.Linear]) -> str:
    return str(group[0].weight.dtype) + (" int8" if scale_of(group[0]) is not None else "")


def _conditions(kernels: Kernels | None) -> list[str]:
    """Conditions, beside the shapes, that times depend on."""
    limits = [f"{name}={os.environ.get(name, '')}" for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")]
    compiled = "" if kernels is None else kernels.name
    return [
        "1",
        compiled_code.processor(),
        torch.__version__,
        torch.backends.cpu.get_cpu_capability(),
        compiled,
        *limits,
    ]


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _fastest_turns(calls: Mapping[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """The shortest time of each call; they take turns for about `seconds`."""
    best = dict.fromkeys(calls, math.inf)
    began = time.thread_time()
    for turn in range(_MAX_TURNS):
        for name, call in calls.items():
            start = time.thread_time()
            call()
            best[name] = min(best[name], max(time.thread_time() - start, _CLOCK_STEP))
        if turn + 1 >= _MIN_TURNS and time.thread_time() - began > seconds:
            break
    return best


@torch.inference_mode()
def _measure_products(groups: Sequence[Sequence[nn.Linear]], kernels: Kernels | None) -> list[Times]:
    found: list[Times] = []
    left = _SECONDS
    for number, group in enumerate(groups):
        began = time.thread_time()
        # Later shapes take the times of a shape of about that size when there is no time left.
        if left > 0:
            found.append(_measure_product(group, kernels, left / (len(groups) - number)))
        else:
            sizes = [math.prod(linear.shape_of(other)) for other in groups[: len(found)]]
            size = math.prod(linear.shape_of(group))
            nearest = min(range(len(sizes)), key=lambda place: abs(math.log(sizes[place] / size)))
            possible = kinds(group[0].weight.dtype, group[0].weight.shape[1], kernels)
            found.append({kind: times for kind, times in found[nearest].items() if kind in possible})
        left -= time.thread_time() - began
    return found


def _measure_product(group: Sequence[nn.Linear], kernels: Kernels | None, seconds: float) -> Times:
    sample = _sample(group)
    dtype, inputs = sample.weight.dtype, sample.weight.shape[1]
    products = {kind: make_product(kind, [sample], kernels) for kind in kinds(dtype, inputs, kernels)}
    alive = {kind: product for kind, product in products.items() if product is not None}
    times: dict[str, list[float]] = {kind: [] for kind in products}
    overhead = 0.0 if kernels is None else _call_overhead(kernels, dtype)
    for rows in ROWS:
        x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows)).to(dtype)
        best = _fastest_turns(
            {kind: partial(product.multiply, x) for kind, product in alive.items()},
            seconds / len(ROWS),
        )
        if COMPILED in best:
            best[COMPILED] = max(best[COMPILED] - overhead, _CLOCK_STEP)
        for kind, measured in times.items():
            measured.append(best.get(kind, math.inf))
        alive = {kind: product for kind, product in alive.items() if best[kind] <= _HOPELESS * min(best.values())}
    return {kind: measured for kind, measured in times.items() if measured[0] < math.inf}


def _call_overhead(kernels: Kernels, dtype: torch.dtype) -> float:
    """Seconds that calling the compiled product takes from Python. Its products are parts of calls that compute more."""
    weight = kernels.pack([torch.zeros(1, 2, dtype=dtype)], [])
    return _fastest_turns({COMPILED: partial(kernels.multiply, weight, torch.zeros(1, 2, dtype=dtype))}, 0.0)[COMPILED]


def _sample(group: Sequence[nn.Linear]) -> nn.Linear:
    """A layer with the first outputs of a group's weights."""
    inputs, wanted = group[0].weight.shape[1], _sampled_outputs(linear.shape_of(group))
    weight = torch.cat([layer.weight.detach()[:wanted] for layer in group])[:wanted].contiguous()
    sample = nn.Linear(inputs, len(weight), bias=False, device="meta")
    sample.weight = nn.Parameter(weight, requires_grad=False)
    scales = [scale[:wanted] for layer in group if (scale := scale_of(layer)) is not None]
    if scales:
        set_scale(sample, torch.cat(scales)[:wanted])
    return sample


def _sampled_outputs(shape: Shape) -> int:
    return max(1, min(shape[1], _SAMPLE // shape[0]))


def _attention_name(recorder: LayerRecorder, layer: int) -> str:
    """The name by which layers differ in the speed of attention."""
    layout, params = recorder.layouts[layer], recorder.params[layer]
    extras = [name for name in ("softcap", "sinks") if getattr(params, name) is not None]
    shape = f"{recorder.heads[layer]}/{layout.kv_heads} heads of {layout.key_dim}/{layout.value_dim}"
    return " ".join(["attention", str(recorder.dtype), shape, *extras])


@torch.inference_mode()
def _measure_attention(recorder: LayerRecorder, layer: int, kernels: Kernels, seconds: float) -> Times:
    layout, params = recorder.layouts[layer], recorder.params[layer]
    kv_heads = min(layout.kv_heads, _MEASURED_HEADS)
    heads = recorder.heads[layer] // layout.kv_heads * kv_heads
    layout = LayerLayout(kv_heads, layout.key_dim, layout.value_dim)
    params = AttentionParams(params.scale, None, params.softcap, None if params.sinks is None else params.sinks[:heads])
    blocks = max(rows * keys if rows <= 16 else keys for rows, keys in ATTENTION_SHAPES) // _BLOCK
    noise = torch.Generator().manual_seed(0)
    paged = PagedLayer(layout, recorder.dtype, blocks, _BLOCK, torch.device("cpu"))
    for tensor in (paged.k, paged.v):
        tensor.copy_(torch.randn(tensor.shape[1:], generator=noise))
    native = CpuLayers(kernels, {0: paged})
    if not native.supports(0, paged.k):
        return {TORCH: [1.0] * len(ATTENTION_SHAPES), COMPILED: [math.inf] * len(ATTENTION_SHAPES)}
    times: dict[str, list[float]] = {COMPILED: [], TORCH: []}
    for rows, keys in ATTENTION_SHAPES:
        metadata = _metadata(rows, keys, blocks, noise)
        shapes = (heads, layout.key_dim), (kv_heads, layout.key_dim), (kv_heads, layout.value_dim)
        query, key, value = (
            torch.randn(1, count, metadata.num_tokens, dim, generator=noise).to(recorder.dtype) for count, dim in shapes
        )
        backends: dict[str, AttentionBackend] = {
            COMPILED: CpuAttention(metadata, native),
            TORCH: TorchAttention(metadata, {0: paged}),
        }
        calls = {kind: partial(_attend, backend, query, key, value, params) for kind, backend in backends.items()}
        for kind, shortest in _fastest_turns(calls, seconds / len(ATTENTION_SHAPES)).items():
            times[kind].append(shortest)
    return times


def _attend(backend: AttentionBackend, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> None:
    backend.write(0, key, value)
    backend.attend(0, query, key, value, params)


def _metadata(rows: int, keys: int, blocks: int, noise: torch.Generator) -> AttentionMetadata:
    """`rows` decoding sequences of `keys` tokens each, or a chunk of that many tokens at the end of one."""
    runs = torch.randperm(blocks // _RUN, generator=noise).tolist()
    order = [run * _RUN + block for run in runs for block in range(_RUN)]
    needed = keys // _BLOCK
    if rows > 16:
        return AttentionMetadata([QueryChunk(0, keys - rows, rows, order[:needed], keys - rows)], _BLOCK)
    tables = [order[row * needed : (row + 1) * needed] for row in range(rows)]
    chunks = [QueryChunk(row, keys - 1, 1, table, keys - 1) for row, table in enumerate(tables)]
    return AttentionMetadata(chunks, _BLOCK)


def _phrase(served: Sequence[str], labels: Sequence[str]) -> str:
    if len(set(served)) == 1:
        return served[0]
    return ", ".join(f"{kind} at {label}" for kind, label in zip(served, labels, strict=True))


def _row(numbers: Sequence[float]) -> str:
    return "/".join(f"{number:.0f}" if 0 < number < math.inf else "-" for number in numbers)


def _rates(times: Times, shape: Shape) -> str:
    """Billions of operations per second of one thread at each of `ROWS`."""
    work = [2e-9 * rows * shape[0] * _sampled_outputs(shape) for rows in ROWS]
    rates = (f"{kind} {_row([w / t for w, t in zip(work, seconds, strict=True)])}" for kind, seconds in times.items())
    return f" (GFLOP/s at {_row(ROWS)} rows: {'; '.join(rates)})"


def describe(model: nn.Module, measured: Measured | None) -> tuple[str, ...]:
    """Describe which kernels serve which shapes, and how fast each kind was: one line for each shape."""
    lines: dict[str, None] = {}
    for layer in model.modules():
        forward = layer.__dict__.get("forward")
        if isinstance(forward, linear.PackedForward):
            shape, served = linear.shape_of(forward.product.layers), forward.product.served
            int8 = " (int8)" if scale_of(forward.product.layers[0]) is not None else ""
            line = f"product {shape[0]} x {shape[1]}{int8}: {_phrase(served, [f'{rows} rows' for rows in ROWS])}"
            if measured is not None and shape in measured.products:
                line += _rates(measured.products[shape], shape)
            lines[line] = None
    for name, times in {} if measured is None else measured.attention.items():
        labels = [f"{rows} rows x {keys} keys" for rows, keys in ATTENTION_SHAPES]
        micros = "; ".join(f"{kind} {_row([t * 1e6 for t in seconds])}" for kind, seconds in times.items())
        lines[f"{name}: {_phrase(fastest(times, (COMPILED, TORCH)), labels)} (us: {micros})"] = None
    return tuple(lines)
