"""Norms and whole decoder layers by the compiled kernels (kernels/decoder.h). Model code stays.

Where the compiled kernels are chosen for all products and the attention, a layer is one call; in a step that only decodes, the
call of the first layer computes all, and the model's own code around the layers is left out (`WholeDecode`). Elsewhere
it is a few calls, between which other kernels multiply or attend.

A layer is a candidate if it has two norms, and linear layers of the usual names that are packed. Whether it also
computes what the kernels compute is not read from its code but tried: in one pass of the model over random tokens, before its
weights are packed (`watch`), every candidate's output, and the K and V that it writes, are kept and then compared with the
kernels' (`fuse`). If all candidates agree within
rounding of their dtype they get another `forward`; otherwise all stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional

from foreword.blocks.layout import LayerLayout
from foreword.engine.attention.backend import (
    AttentionBackend,
    LayerRecorder,
    StepAttention,
    current_attention,
    forward_context,
)
from foreword.engine.attention.cpu_backend import CpuAttention, CpuLayers
from foreword.engine.attention.kv_tensors import PagedLayer
from foreword.engine.attention.metadata import AttentionMetadata, AttentionParams, QueryChunk
from foreword.engine.kernels.kernel_choice import COMPILED, row_bucket
from foreword.engine.kernels.native import (
    TYPES,
    AttentionLayer,
    DecoderLayer,
    Kernels,
    OutputLayer,
    PackedWeight,
    undivided,
)
from foreword.engine.linear import ChosenProduct, PackedForward, Patch

# Rounding's share of the difference between a module's output and the kernels', relative to how far the output is from
# the input, beside what rounding the output itself may change.
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 1e-3}
_TRIAL_BLOCK = 4
_TRIAL_LENGTHS = (11, 1, 6)
# Positions whose angles are computed at least.
_LEAST_ANGLES = 1024

# Root mean square norm of `x` `[..., n]` with weights `[n]` and an epsilon.
Norm = Callable[[Tensor, Tensor, float], Tensor]


class NormForward(Patch):
    """`forward` of a root mean square norm."""

    __slots__ = ("_module", "_norm", "epsilon", "weight")

    def __init__(self, module: nn.Module, norm: Norm, weight: Tensor, epsilon: float) -> None:
        self._module = module
        self._norm = norm
        self.weight = weight
        self.epsilon = epsilon

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype != self.weight.dtype:
            found: Tensor = type(self._module).forward(self._module, x)
            return found
        return self._norm(x, self.weight, self.epsilon)


@dataclass(frozen=True, slots=True)
class _LayerParts:
    """Parts of a decoder layer. `heads` are query heads."""

    number: int
    layout: LayerLayout
    heads: int
    params: AttentionParams
    qkv: ChosenProduct
    output: ChosenProduct
    gate_up: ChosenProduct
    down: ChosenProduct
    input_norm: NormForward
    output_norm: NormForward
    query_norm: NormForward | None
    key_norm: NormForward | None

    @property
    def products(self) -> dict[str, ChosenProduct]:
        return {"qkv": self.qkv, "output": self.output, "gate_up": self.gate_up, "down": self.down}


class DecoderForward(Patch):
    """`forward` of a decoder layer: in the engine's step by the kernels, elsewhere the layer's own."""

    __slots__ = ("_layer", "_parts", "_rotated", "_whole")

    def __init__(self, layer: nn.Module, parts: _LayerParts, rotated: bool) -> None:
        self._layer = layer
        self._parts = parts
        self._rotated = rotated
        # By `row_bucket`: whether one call computes the layer.
        kinds = zip(*(product.served for product in parts.products.values()), strict=True)
        self._whole = [set(served) == {COMPILED} for served in kinds]

    @property
    def number(self) -> int:
        return self._parts.number

    @property
    def kind(self) -> object:
        """Layers of the same kind can be computed by one call."""
        parts = self._parts
        sizes = [(product.inputs, product.outputs) for product in parts.products.values()]
        return sizes, parts.layout, parts.heads, parts.params.window, self._whole

    def __call__(self, hidden_states: Tensor, *arguments: Any, **named: Any) -> Any:
        attention = current_attention()
        rotary = named.get("position_embeddings")
        unusual = arguments or any(named.get(name) is not None for name in ("attention_mask", "past_key_values"))
        cpu = attention.cpu(self.number) if isinstance(attention, StepAttention) else None
        if cpu is None or unusual or not _is_rotary(rotary, hidden_states):
            return type(self._layer).forward(self._layer, hidden_states, *arguments, **named)
        assert isinstance(attention, StepAttention)
        backend = attention.backend(self.number, hidden_states)
        if backend is cpu and self.is_whole(hidden_states.shape[1]):
            out = self.compute(cpu, hidden_states, rotary)
        else:
            out = self.compute_in_parts(cpu, backend, hidden_states, rotary)
        attention.notify_written(self.number)
        return out

    def is_whole(self, rows: int) -> bool:
        """Whether the compiled kernels multiply this number of rows in all products."""
        return self._whole[row_bucket(rows)]

    def compute(
        self,
        cpu: CpuAttention,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        others: Sequence[DecoderForward] = (),
        last: OutputLayer | None = None,
    ) -> Tensor:
        """This layer and others of its kind behind it, and the output layer behind these, in one call: the output of the last
        one for the step's tokens. K and V go into the paged tensors."""
        cosines, sines = (one.contiguous() for one in rotary)
        run = (self, *others)
        decoders = cpu.layers.decoders(
            tuple(one.number for one in run), lambda: [one._decoder(cpu, cosines) for one in run]
        )
        return cpu.decode(decoders, x.contiguous(), cosines, sines, self._parts.params.window, last)

    def compute_in_parts(
        self, cpu: CpuAttention, backend: AttentionBackend, x: Tensor, rotary: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Compute a step with the products that were chosen, and with any attention."""
        parts, kernels = self._parts, cpu.layers.kernels
        cosines, sines = (one.contiguous() for one in rotary)
        decoder = self._decoder(cpu, cosines)
        qkv = parts.qkv.multiply(parts.input_norm(x))
        cpu.prepare(decoder, qkv, cosines, sines)
        query, key, value = _split_heads(qkv, parts.heads, decoder.layer)
        attended = backend.attend(parts.number, query, key, value, parts.params)
        between = parts.output.multiply(attended.flatten(2)).add_(x)
        gate_up = parts.gate_up.multiply(parts.output_norm(between))
        return parts.down.multiply(kernels.gate(gate_up)).add_(between)

    def _decoder(self, cpu: CpuAttention, cosines: Tensor) -> DecoderLayer:
        rotated = cosines.shape[-1] if self._rotated else 0
        return cpu.layers.decoder(self._parts.number, self._parts.heads, lambda layer: self._struct(layer, rotated))

    def _struct(self, layer: AttentionLayer, rotated: int) -> DecoderLayer:
        parts = self._parts
        layer.scale = parts.params.scale
        decoder = DecoderLayer(layer=layer, hidden=parts.output.outputs, inner=parts.down.inputs, rotated=rotated)
        for name, product in parts.products.items():
            sizes = PackedWeight(inputs=product.inputs, outputs=product.outputs)
            setattr(decoder, name, product.compiled.weight if product.compiled else sizes)
        for name in ("input", "output", "query", "key"):
            norm: NormForward | None = getattr(parts, f"{name}_norm")
            if norm is not None:
                setattr(decoder, f"{name}_norm", norm.weight.data_ptr())
                setattr(decoder, f"{name}_epsilon", norm.epsilon)
        return decoder


class WholeDecode:
    """A step that only decodes, of a model whose layers one call computes: embedding, layers, norm, output layer. The model's
    code around them is left out, and so are PyTorch's wrappers of modules.

    `max_model_len`: positions are below it."""

    def __init__(self, model: Any, layers: Sequence[DecoderForward], max_model_len: int) -> None:
        self._layers, self._numbers = layers, [layer.number for layer in layers]
        self._embedding, self._head = model.get_input_embeddings(), model.get_output_embeddings()
        self._rotary, self._norm = model.base_model.rotary_emb, model.base_model.norm
        self._max_model_len = max_model_len
        # Cosines and sines of the positions from 0 on, `[1, positions, rotated]`.
        self._table: tuple[Tensor, ...] = ()

    def logits(
        self, tokens: Sequence[int], positions: Sequence[int], rows: Sequence[int], attention: StepAttention
    ) -> Tensor | None:
        """Logits `[len(rows), vocab]` of some rows; None if the model's own code must compute the step."""
        (first, *others), count = self._layers, len(tokens)
        cpu = attention.decoding(self._numbers)
        if cpu is None or not first.is_whole(count):
            return None
        if count == 1 and type(self._embedding) is nn.Embedding:
            x = self._embedding.weight[tokens[0]].view(1, 1, -1)  # in place: the kernels do not write into it
        else:
            x = self._embedding.forward(torch.tensor([tokens]))
        last = self._last(count) if list(rows) == list(range(count)) else None
        out = first.compute(cpu, x, self._angles(x, positions), others, last)
        for number in self._numbers:
            attention.notify_written(number)
        return (out if last is not None else self._head(self._norm(out[:, list(rows)])))[0]

    def _angles(self, x: Tensor, positions: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Cosines and sines of positions, `[1, T, rotated]`. Raises ValueError for one behind the longest sequence: the kernels
        would read behind the table."""
        end = max(positions) + 1
        if end > self._max_model_len:
            raise ValueError(f"position {end - 1} of sequences of at most {self._max_model_len} tokens")
        if not self._table or end > self._table[0].shape[1]:
            known = min(max(1 << (end - 1).bit_length(), _LEAST_ANGLES), self._max_model_len)
            with undivided():  # as in a step of the model's own code
                self._table = self._rotary(x, torch.arange(known).unsqueeze(0))
        cosines, sines = self._table
        if len(positions) == 1:
            return cosines[:, end - 1 : end], sines[:, end - 1 : end]
        at = torch.tensor(positions)
        return cosines.index_select(1, at), sines.index_select(1, at)

    def _last(self, rows: int) -> OutputLayer | None:
        """Norm and output layer, if the compiled kernels multiply this number of rows by it."""
        norm, head = (module.__dict__.get("forward") for module in (self._norm, self._head))
        if not isinstance(norm, NormForward) or not isinstance(head, PackedForward):
            return None
        product = head.product
        if product.compiled is None or product.kind(rows) != COMPILED or len(product.layers) > 1:
            return None
        return OutputLayer(norm.weight, norm.epsilon, product.compiled.weight)

    @torch.inference_mode()
    def fits(self, model: Any, recorder: LayerRecorder, kernels: Kernels) -> bool:
        """Whether it gives the bits that the model's own `forward` gives with the same layers."""
        ends = (11, 2, 7)
        tables = [range(place * _TRIAL_BLOCK, (place + 1) * _TRIAL_BLOCK) for place in range(len(ends))]
        chunks = [QueryChunk(row, end - 1, 1, tables[row], end - 1) for row, end in enumerate(ends)]
        layers = _zero_layers(recorder, len(ends) * _TRIAL_BLOCK)
        cpu = CpuLayers(kernels, layers)
        noise = torch.Generator().manual_seed(0)
        tokens = torch.randint(0, self._head.weight.shape[0], (len(ends),), generator=noise)
        positions = torch.tensor(ends) - 1

        def attention(count: int) -> StepAttention:
            metadata = AttentionMetadata(chunks[:count], _TRIAL_BLOCK)
            return StepAttention(dict.fromkeys(layers, metadata), layers, cpu=cpu)

        def own(count: int, rows: list[int]) -> Tensor:
            ids = {"input_ids": tokens[None, :count], "position_ids": positions[None, :count]}
            with forward_context(attention(count)):
                found: Tensor = model(**ids, use_cache=False, logits_to_keep=torch.tensor(rows)).logits[0]
            return found

        def same(count: int, rows: list[int]) -> bool:
            found = self.logits(tokens[:count].tolist(), positions[:count].tolist(), rows, attention(count))
            return found is not None and torch.equal(found, own(count, rows))

        if not cpu.supports(self._numbers[0], torch.empty(0, dtype=recorder.dtype)):
            return False
        trials = ((3, [0, 1, 2]), (3, [0, 2]), (3, [2, 0, 0]), (1, [0]))
        try:
            if not self._knows_angles(recorder.dtype) or not all(same(*trial) for trial in trials):
                return False
            # A cap would not be seen in the small logits of a model with small weights.
            large = torch.linspace(-1e4, 1e4, self._head.weight.shape[0]).to(recorder.dtype).expand(1, 1, -1)
            hook = self._head.register_forward_hook(lambda *_: large)
            try:
                return torch.equal(own(1, [0]), large[0])
            finally:
                hook.remove()
        except (TypeError, RuntimeError, AttributeError, ValueError):
            return False

    def _knows_angles(self, dtype: torch.dtype) -> bool:
        """Whether the angles of a position do not depend on what other positions a call has."""
        x, last = torch.zeros(1, 1, 1, dtype=dtype), self._max_model_len - 1
        positions = torch.linspace(0, last, min(last + 1, _LEAST_ANGLES), dtype=torch.float64).long().unsqueeze(0)
        together = self._rotary(x, positions)
        return all(
            torch.equal(one, of_all[:, place : place + 1])
            for place in {0, 1 % positions.shape[1], positions.shape[1] // 2, positions.shape[1] - 1}
            for one, of_all in zip(self._rotary(x, positions[:, place : place + 1]), together, strict=True)
        )


def _split_heads(qkv: Tensor, heads: int, layer: AttentionLayer) -> tuple[Tensor, Tensor, Tensor]:
    """Views of queries, keys and values, `[1, heads, T, dim]`, in `[1, T, outputs]`."""
    kv_heads, key_dim, value_dim = int(layer.kv_heads), int(layer.key_dim), int(layer.value_dim)
    parts = torch.split(qkv, [heads * key_dim, kv_heads * key_dim, kv_heads * value_dim], dim=-1)
    dims = (key_dim, key_dim, value_dim)
    shape = (*qkv.shape[:2], -1)
    query, key, value = (part.view(*shape, dim).transpose(1, 2) for part, dim in zip(parts, dims, strict=True))
    return query, key, value


@dataclass(slots=True)
class _LayerCall:
    """Input and output of a layer."""

    x: Tensor
    rotary: tuple[Tensor, Tensor]
    out: Tensor


@dataclass(frozen=True, slots=True)
class Trial:
    """Results of the model's own code: input and output of decoder layers, and the K and V that they wrote."""

    metadata: AttentionMetadata
    num_blocks: int
    layers: Mapping[int, PagedLayer]
    calls: Mapping[nn.Module, _LayerCall]


@torch.inference_mode()
def watch(model: Any, recorder: LayerRecorder, vocab_size: int) -> Trial:
    """A pass over random tokens of a model that nothing is replaced in yet. `recorder` saw a pass of it."""
    metadata, num_blocks = _trial_metadata()
    layers = _zero_layers(recorder, num_blocks)
    attention = StepAttention(dict.fromkeys(layers, metadata), layers)
    watched = [layer for layer in model.modules() if _attention_number(layer) in recorder.layouts]
    return Trial(
        metadata, num_blocks, layers, _watch(model, watched, attention, metadata, vocab_size) if watched else {}
    )


def _attention_number(layer: nn.Module) -> int | None:
    """The number of a decoder layer that has attention and a feed-forward of the usual names."""
    children = dict(layer.named_children())
    number = getattr(children.get("self_attn"), "layer_idx", None)
    return number if isinstance(number, int) and "mlp" in children else None


def fuse(model: Any, recorder: LayerRecorder, kernels: Kernels, trial: Trial, max_model_len: int) -> WholeDecode | None:
    """Replace `forward` of norms and decoder layers that the kernels compute as well. The model's linear layers are packed.
    Returns what computes steps that only decode, if the kernels compute all of the model."""
    fuse_norms(model, kernels.norm)
    candidates = {layer: parts for layer in model.modules() if (parts := _layer_parts(layer, recorder)) is not None}
    forwards = _decoder_forwards(recorder, kernels, candidates, trial) if candidates else {}
    _replace_forwards(forwards)
    layers = sorted(forwards.values(), key=lambda forward: forward.number)
    around = [getattr(model.base_model, name, None) for name in ("rotary_emb", "norm")]
    alike = len(layers) == len(recorder.layouts) and all(layer.kind == layers[0].kind for layer in layers)
    if not layers or not alike or not all(isinstance(module, nn.Module) for module in around):
        return None
    whole = WholeDecode(model, layers, max_model_len)
    return whole if whole.fits(model, recorder, kernels) else None


def fuse_norms(model: nn.Module, norm: Norm | None = None) -> None:
    """Replace `forward` of norms that `norm` computes as well; by default PyTorch's, one kernel on CUDA instead of eight."""
    norm = norm or (lambda x, weight, epsilon: functional.rms_norm(x, weight.shape, weight, epsilon))
    norms = {module: forward for module in model.modules() if (forward := _norm_forward(module, norm)) is not None}
    _replace_forwards(norms)


def _replace_forwards(forwards: Mapping[nn.Module, Patch]) -> None:
    for module, forward in forwards.items():
        setattr(module, "forward", forward)  # noqa: B010 - a method is replaced


@torch.inference_mode()
def _norm_forward(module: nn.Module, norm: Norm) -> NormForward | None:
    """This norm for a module that has one vector of weights and an epsilon, and gives the same; else None."""
    parameters = dict(module.named_parameters(recurse=False))
    weight = parameters.get("weight")
    if set(parameters) != {"weight"} or next(module.children(), None) is not None or weight is None:
        return None
    names = ("variance_epsilon", "eps", "epsilon")
    epsilon = next((value for name in names if isinstance(value := getattr(module, name, None), float)), None)
    if epsilon is None or weight.dim() != 1 or weight.dtype not in TYPES:
        return None
    forward = NormForward(module, norm, weight.detach(), epsilon)
    noise = torch.Generator().manual_seed(0)
    # Small numbers as well, for which the epsilon matters.
    x = torch.randn(2, 3, weight.shape[0], generator=noise) * torch.tensor([1.0, 1e-3, 30.0]).unsqueeze(1)
    x = x.to(weight)
    try:
        expected = type(module).forward(module, x)
    except (TypeError, RuntimeError, AttributeError, ValueError):
        return None
    return forward if isinstance(expected, Tensor) and _agree(forward(x), expected) else None


def _agree(found: Tensor, expected: Tensor, x: Tensor | None = None) -> bool:
    """Whether a difference is rounding. With `x`, `expected` is x and something added to it."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    error = torch.linalg.vector_norm(found.float() - expected.float())
    added = expected.float() if x is None else expected.float() - x.float()
    limit = _TOLERANCE[expected.dtype] * torch.linalg.vector_norm(added)
    limit += torch.finfo(expected.dtype).eps / 4 * torch.linalg.vector_norm(expected.float())
    return bool(error <= limit)  # false for NaN


def _layer_parts(layer: nn.Module, recorder: LayerRecorder) -> _LayerParts | None:
    """The parts of a decoder layer of Llama's kind; None for any other module."""
    number, children = _attention_number(layer), dict(layer.named_children())
    if number is None or number not in recorder.layouts:
        return None
    attention, mlp = children["self_attn"], children["mlp"]
    layout, heads, params = recorder.layouts[number], recorder.heads[number], recorder.params[number]
    projections, feed_forward = dict(attention.named_children()), dict(mlp.named_children())
    qkv = _product(projections, ("q_proj", "k_proj", "v_proj"), ("qkv_proj",))
    gate_up = _product(feed_forward, ("gate_proj", "up_proj"), ("gate_up_proj",))
    output, down = _product(projections, ("o_proj",)), _product(feed_forward, ("down_proj",))
    input_norm, output_norm = _norm_of(children, "input_layernorm"), _norm_of(children, "post_attention_layernorm")
    query_norm, key_norm = _norm_of(projections, "q_norm"), _norm_of(projections, "k_norm")
    if qkv is None or gate_up is None or output is None or down is None or input_norm is None or output_norm is None:
        return None
    qkv_outputs = (heads + layout.kv_heads) * layout.key_dim + layout.kv_heads * layout.value_dim
    fits = (
        params.softcap is None
        and params.sinks is None
        and qkv.outputs == qkv_outputs
        and output.inputs == heads * layout.value_dim
        and gate_up.layers[0].weight.dtype == recorder.dtype
        and all(norm is None or norm.weight.shape[0] == layout.key_dim for norm in (query_norm, key_norm))
        and _has_silu(feed_forward.values())
    )
    if not fits:
        return None
    return _LayerParts(
        number, layout, heads, params, qkv, output, gate_up, down, input_norm, output_norm, query_norm, key_norm
    )  # fmt: skip


def _product(children: Mapping[str, nn.Module], *choices: Sequence[str]) -> ChosenProduct | None:
    """The product of exactly the layers of the first choice of names that exists, in this order."""
    names = next((names for names in choices if names[0] in children), ())
    modules = [children.get(name) for name in names]
    forward = modules[0].__dict__.get("forward") if modules and modules[0] is not None else None
    if not isinstance(forward, PackedForward):
        return None
    layers = forward.product.layers
    same = len(modules) == len(layers) and all(a is b for a, b in zip(modules, layers, strict=True))
    return forward.product if same else None


def _norm_of(children: Mapping[str, nn.Module], name: str) -> NormForward | None:
    forward = children[name].__dict__.get("forward") if name in children else None
    return forward if isinstance(forward, NormForward) else None


def _has_silu(modules: Iterable[nn.Module]) -> bool:
    """Whether a feed-forward's activation is SiLU. Near zero other activations are like it: a trial with small weights
    would not see the difference."""
    x = torch.linspace(-8.0, 8.0, 65)
    activations = [one for one in modules if next(one.parameters(), None) is None]
    return bool(activations) and all(torch.allclose(one(x), functional.silu(x), atol=1e-6) for one in activations)


@torch.inference_mode()
def _decoder_forwards(
    recorder: LayerRecorder, kernels: Kernels, candidates: Mapping[nn.Module, _LayerParts], trial: Trial
) -> dict[nn.Module, DecoderForward]:
    """The kernels' forward of all candidates; empty unless each of them does what its layer did in the trial."""
    found = _zero_layers(recorder, trial.num_blocks)
    cpu = CpuAttention(trial.metadata, CpuLayers(kernels, found))
    forwards = {}
    for layer, parts in candidates.items():
        expected = trial.layers[parts.number]
        forward = _try_layer(layer, parts, trial.calls.get(layer), cpu, expected, found[parts.number])
        # In a layer that adds little to large numbers rounding hides a difference: the other layers must agree as well.
        if forward is None:
            return {}
        forwards[layer] = forward
    return forwards


def _try_layer(
    layer: nn.Module,
    parts: _LayerParts,
    call: _LayerCall | None,
    cpu: CpuAttention,
    expected: PagedLayer,
    found: PagedLayer,
) -> DecoderForward | None:
    """The kernels' forward, with or without rotary embedding, if it does what the layer did in `call`."""
    if call is None:
        return None
    for rotated in (True, False):
        forward = DecoderForward(layer, parts, rotated)
        ways = [partial(forward.compute_in_parts, cpu, cpu)]
        if all(product.compiled for product in parts.products.values()):
            ways.append(partial(forward.compute, cpu))
        if all(
            _agree(way(call.x, call.rotary), call.out, call.x)
            and _agree(found.k, expected.k)
            and _agree(found.v, expected.v)
            for way in ways
        ):
            return forward
        cpu.layers.forget_decoder(parts.number)
    return None


def _trial_metadata() -> tuple[AttentionMetadata, int]:
    """A step of a few sequences, prompts and one that decodes; and how many blocks they need."""
    chunks = []
    row = blocks = 0
    for length in _TRIAL_LENGTHS:
        needed = -(-length // _TRIAL_BLOCK)
        chunks.append(QueryChunk(row, 0, length, range(blocks, blocks + needed)[::-1], 0))
        row += length
        blocks += needed
    return AttentionMetadata(chunks, _TRIAL_BLOCK), blocks


def _zero_layers(recorder: LayerRecorder, num_blocks: int) -> dict[int, PagedLayer]:
    layers = {}
    for number, layout in recorder.layouts.items():
        paged = PagedLayer(layout, recorder.dtype, num_blocks, _TRIAL_BLOCK, torch.device("cpu"))
        paged.k.zero_()
        paged.v.zero_()
        layers[number] = paged
    return layers


def _watch(
    model: Any, layers: Iterable[nn.Module], attention: StepAttention, metadata: AttentionMetadata, vocab_size: int
) -> dict[nn.Module, _LayerCall]:
    """A pass of the model over random tokens, and what each of the layers made of its input."""
    calls: dict[nn.Module, _LayerCall] = {}

    def note(layer: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any], out: Any) -> None:
        x = arguments[0] if arguments else named.get("hidden_states")
        rotary = named.get("position_embeddings")
        if len(arguments) < 2 and isinstance(x, Tensor) and isinstance(out, Tensor) and _is_rotary(rotary, x):
            calls[layer] = _LayerCall(x.clone(), rotary, out.clone())

    hooks = [layer.register_forward_hook(note, with_kwargs=True) for layer in layers]
    noise = torch.Generator().manual_seed(0)
    try:
        with forward_context(attention):
            model(
                input_ids=torch.randint(0, vocab_size, (1, metadata.num_tokens), generator=noise),
                position_ids=torch.cat([torch.arange(length) for length in _TRIAL_LENGTHS]).unsqueeze(0),
                use_cache=False,
                logits_to_keep=torch.tensor([0]),
            )
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _is_rotary(rotary: Any, x: Tensor) -> TypeGuard[tuple[Tensor, Tensor]]:
    """Whether these are cosines and sines of the positions of x, `[1, T, rotated]`."""
    if not isinstance(rotary, tuple) or len(rotary) != 2 or x.dim() != 3 or x.shape[0] != 1:
        return False
    return all(isinstance(one, Tensor) and one.shape[:-1] == x.shape[:2] and one.dtype == x.dtype for one in rotary)
