"""Norms and whole decoder layers in one call of the compiled kernels (kernels/decoder.h), without touching model code.

A layer is recognised by what it is made of: two norms, and linear layers of the usual names that this engine has packed.
Whether it also computes what the kernels compute is not read from its code but tried: in one pass of the model over random
tokens every candidate's output, and the K and V that it writes, are compared with the kernels'. If all of them agree within
rounding of their dtype they get another `forward`; else all stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional

from foreword.blocks import PrefixCache
from foreword.engine.attention.base import PagedLayer, Recorder, StepAttention, active, current
from foreword.engine.attention.cpu_backend import NativeAttention, NativeStep
from foreword.engine.kernels.native import TYPES, Decoder, Kernels
from foreword.engine.linear import NativeProduct, PackedForward, Patch, Shared, is_patched, unpatched
from foreword.engine.request import Request, SamplingParams
from foreword.engine.sequence import Chunk, SequenceState, Step

# What rounding explains of the difference between a module's output and the kernels', relative to how far the output is from
# the input, beside what rounding the output itself may change.
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-3}
_TRIAL_BLOCK = 4
_TRIAL_LENGTHS = (11, 1, 6)


@dataclass(frozen=True, slots=True)
class _Parts:
    """What a layer is made of. `heads` are query heads."""

    number: int
    qkv: Shared
    output: Shared
    gate_up: Shared
    down: Shared
    input_norm: NormForward
    output_norm: NormForward
    query_norm: NormForward | None
    key_norm: NormForward | None
    heads: int
    scale: float
    window: int | None


class NormForward(Patch):
    """`forward` of a root mean square norm."""

    __slots__ = ("_kernels", "_module", "epsilon", "weight")

    def __init__(self, module: nn.Module, kernels: Kernels, weight: Tensor, epsilon: float) -> None:
        self._module = module
        self._kernels = kernels
        self.weight = weight
        self.epsilon = epsilon

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype != self.weight.dtype:
            found: Tensor = type(self._module).forward(self._module, x)
            return found
        return self._kernels.norm(x, self.weight, self.epsilon)


class DecoderForward(Patch):
    """`forward` of a decoder layer: `[1, T, hidden]` to the same, in the engine's step; elsewhere what it was."""

    __slots__ = ("_layer", "_parts", "_rotated")

    def __init__(self, layer: nn.Module, parts: _Parts, rotated: bool) -> None:
        self._layer = layer
        self._parts = parts
        self._rotated = rotated

    def __call__(self, hidden_states: Tensor, *arguments: Any, **named: Any) -> Any:
        attention = current()
        places = named.get("position_embeddings")
        native = attention.native if isinstance(attention, StepAttention) else None
        unusual = arguments or any(named.get(name) is not None for name in ("attention_mask", "past_key_values"))
        if native is None or unusual or not _rotary(places, hidden_states):
            return type(self._layer).forward(self._layer, hidden_states, *arguments, **named)
        found = self.compute(native, hidden_states, places)
        assert isinstance(attention, StepAttention)
        attention.written(self._parts.number)
        return found

    def compute(self, step: NativeStep, x: Tensor, places: tuple[Tensor, Tensor]) -> Tensor:
        """The layer's output for the step's tokens; their K and V go into the paged tensors."""
        parts = self._parts
        cosines, sines = (place.contiguous() for place in places)
        rotated = cosines.shape[-1] if self._rotated else 0
        decoder = step.native.decoder(parts.number, parts.heads, lambda layer: self._struct(layer, rotated))
        return step.decode(decoder, x.contiguous(), cosines, sines, parts.window)

    def _struct(self, layer: Any, rotated: int) -> Decoder:
        parts = self._parts
        qkv, output, gate_up, down = (
            _native(product).packed.struct for product in (parts.qkv, parts.output, parts.gate_up, parts.down)
        )
        layer.scale = parts.scale
        query, key = parts.query_norm, parts.key_norm
        return Decoder(
            layer=layer,
            qkv=qkv,
            output=output,
            gate_up=gate_up,
            down=down,
            input_norm=parts.input_norm.weight.data_ptr(),
            output_norm=parts.output_norm.weight.data_ptr(),
            query_norm=None if query is None else query.weight.data_ptr(),
            key_norm=None if key is None else key.weight.data_ptr(),
            input_epsilon=parts.input_norm.epsilon,
            output_epsilon=parts.output_norm.epsilon,
            query_epsilon=0.0 if query is None else query.epsilon,
            key_epsilon=0.0 if key is None else key.epsilon,
            hidden=output.outputs,
            inner=down.inputs,
            rotated=rotated,
        )


def fuse(model: Any, recorder: Recorder, kernels: Kernels, vocab_size: int) -> tuple[int, int]:
    """Replace `forward` of norms and decoder layers that the kernels compute as well. `recorder` saw a pass of the model; its
    linear layers are packed. Returns how many norms and how many layers were replaced."""
    norms = _replace_norms(model, kernels)
    found = [(layer, parts) for layer in model.modules() if (parts := _parts(layer, recorder)) is not None]
    return norms, _replace_layers(model, recorder, kernels, found, vocab_size)


def _replace_norms(model: nn.Module, kernels: Kernels) -> int:
    replaced = 0
    for module in model.modules():
        forward = _norm(module, kernels)
        if forward is not None:
            setattr(module, "forward", forward)  # noqa: B010 - a method is replaced
            replaced += 1
    return replaced


@torch.inference_mode()
def _norm(module: nn.Module, kernels: Kernels) -> NormForward | None:
    """The kernel's norm for a module that is one: it has one vector of weights and an epsilon, and gives the same."""
    parameters = dict(module.named_parameters(recurse=False))
    weight = parameters.get("weight")
    if set(parameters) != {"weight"} or next(module.children(), None) is not None or weight is None:
        return None
    names = ("variance_epsilon", "eps", "epsilon")
    epsilon = next((value for name in names if isinstance(value := getattr(module, name, None), float)), None)
    if epsilon is None or weight.dim() != 1 or weight.dtype not in TYPES or weight.device.type != "cpu":
        return None
    forward = NormForward(module, kernels, weight.detach(), epsilon)
    noise = torch.Generator().manual_seed(0)
    # Small numbers as well, for which the epsilon matters.
    x = torch.randn(2, 3, weight.shape[0], generator=noise) * torch.tensor([1.0, 1e-3, 30.0]).unsqueeze(1)
    x = x.to(weight.dtype)
    try:
        expected = type(module).forward(module, x)
    except (TypeError, RuntimeError, AttributeError, ValueError):
        return None
    return forward if isinstance(expected, Tensor) and _agree(forward(x), expected, None) else None


def _agree(found: Tensor, expected: Tensor, x: Tensor | None) -> bool:
    """Whether a difference is rounding. With `x`, `expected` is x and something added to it."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    error = torch.linalg.vector_norm(found.float() - expected.float())
    added = expected.float() if x is None else expected.float() - x.float()
    limit = _TOLERANCE[expected.dtype] * torch.linalg.vector_norm(added)
    limit += torch.finfo(expected.dtype).eps / 4 * torch.linalg.vector_norm(expected.float())
    return bool(error <= limit)  # false for NaN


def _native(shared: Shared) -> NativeProduct:
    assert isinstance(shared.multiply, NativeProduct)
    return shared.multiply


def _product(modules: Sequence[nn.Module | None]) -> Shared | None:
    """The packed product of exactly these layers, in this order."""
    first = None if not modules or modules[0] is None else modules[0].__dict__.get("forward")
    if not isinstance(first, PackedForward) or not isinstance(first.product.multiply, NativeProduct):
        return None
    same = len(modules) == len(first.product.layers) and all(
        one is other for one, other in zip(modules, first.product.layers, strict=True)
    )
    return first.product if same else None


def _parts(layer: nn.Module, recorder: Recorder) -> _Parts | None:
    """What a decoder layer of Llama's kind is made of; None for any other module."""
    children = dict(layer.named_children())
    attention, mlp = children.get("self_attn"), children.get("mlp")
    number = getattr(attention, "layer_idx", None)
    if attention is None or mlp is None or number not in recorder.layouts or number in recorder.special:
        return None
    inside, feed = dict(attention.named_children()), dict(mlp.named_children())
    qkv = _product(_named(inside, ("q_proj", "k_proj", "v_proj"), ("qkv_proj",)))
    gate_up = _product(_named(feed, ("gate_proj", "up_proj"), ("gate_up_proj",)))
    output, down = _product([inside.get("o_proj")]), _product([feed.get("down_proj")])
    norms = [_norm_of(children.get(name)) for name in ("input_layernorm", "post_attention_layernorm")]
    query_norm, key_norm = _norm_of(inside.get("q_norm")), _norm_of(inside.get("k_norm"))
    if qkv is None or gate_up is None or output is None or down is None or norms[0] is None or norms[1] is None:
        return None
    shape, heads = recorder.layouts[number], recorder.heads[number]
    rows = (heads + shape.kv_heads) * shape.key_dim + shape.kv_heads * shape.value_dim
    fits = (
        sum(held.weight.shape[0] for held in qkv.layers) == rows
        and output.layers[0].weight.shape[1] == heads * shape.value_dim
        and gate_up.layers[0].weight.dtype == recorder.dtype
        and all(norm is None or norm.weight.shape[0] == shape.key_dim for norm in (query_norm, key_norm))
        and _gates_by_silu(feed)
    )
    if not fits:
        return None
    return _Parts(
        number, qkv, output, gate_up, down, norms[0], norms[1], query_norm, key_norm, heads, recorder.scales[number],
        recorder.windows[number],
    )  # fmt: skip


def _gates_by_silu(feed: Mapping[str, nn.Module]) -> bool:
    """Whether a feed-forward's activation is SiLU. Near zero others are like it: a trial of small weights would not tell."""
    x = torch.linspace(-8.0, 8.0, 65)
    activations = [one for one in feed.values() if next(one.parameters(), None) is None]
    return bool(activations) and all(torch.allclose(one(x), functional.silu(x), atol=1e-6) for one in activations)


def _named(children: Mapping[str, nn.Module], *choices: Sequence[str]) -> list[nn.Module | None]:
    """The children of the first choice of names of which there is any."""
    names = next((names for names in choices if names[0] in children), ())
    return [children.get(name) for name in names]


def _norm_of(module: nn.Module | None) -> NormForward | None:
    forward = None if module is None else module.__dict__.get("forward")
    return forward if isinstance(forward, NormForward) else None


@dataclass(slots=True)
class _Seen:
    """What went into a layer, and what came out."""

    x: Tensor
    places: tuple[Tensor, Tensor]
    out: Tensor


@torch.inference_mode()
def _replace_layers(
    model: Any, recorder: Recorder, kernels: Kernels, found: Sequence[tuple[nn.Module, _Parts]], vocab_size: int
) -> int:
    if not found:
        return 0
    step, blocks = _trial_step(vocab_size)
    tensors = [
        {
            number: PagedLayer(layout, recorder.dtype, blocks, _TRIAL_BLOCK, torch.device("cpu"))
            for number, layout in recorder.layouts.items()
        }
        for _ in range(2)
    ]
    for layers in tensors:
        for paged in layers.values():
            paged.k.zero_()
            paged.v.zero_()
    with unpatched(model):
        seen = _watch(
            model, [layer for layer, _ in found], StepAttention(step, tensors[0], _TRIAL_BLOCK, model.device), step
        )
    native = NativeAttention(kernels, tensors[1], _TRIAL_BLOCK)
    attention = StepAttention(step, tensors[1], _TRIAL_BLOCK, model.device, native=native)
    forwards = []
    for layer, parts in found:
        forward = _tried(layer, parts, seen.get(layer), attention, tensors[0][parts.number], tensors[1][parts.number])
        # In a layer that adds little to large numbers rounding hides what it does: its like must agree as well.
        if forward is None:
            return 0
        forwards.append(forward)
    for (layer, _), forward in zip(found, forwards, strict=True):
        setattr(layer, "forward", forward)  # noqa: B010 - a method is replaced
    return len(found)


def _tried(
    layer: nn.Module, parts: _Parts, seen: _Seen | None, attention: StepAttention, own: PagedLayer, ours: PagedLayer
) -> DecoderForward | None:
    """The kernels' layer, with a rotary embedding or without one, if it does what the layer was seen to do."""
    if seen is None or attention.native is None:
        return None
    for rotated in (True, False):
        forward = DecoderForward(layer, parts, rotated)
        out = forward.compute(attention.native, seen.x, seen.places)
        if _agree(out, seen.out, seen.x) and _agree(ours.k, own.k, None) and _agree(ours.v, own.v, None):
            return forward
        attention.native.native.forget(parts.number)
    return None


def _trial_step(vocab_size: int) -> tuple[Step, int]:
    """Random tokens in a few sequences, prompts and one that decodes; and how many blocks they need."""
    noise = torch.Generator().manual_seed(0)
    blocks = 0
    chunks = []
    for length in _TRIAL_LENGTHS:
        tokens = torch.randint(0, vocab_size, (length,), generator=noise).tolist()
        table = PrefixCache(1, _TRIAL_BLOCK).open(tokens)
        needed = -(-length // _TRIAL_BLOCK)
        table.blocks = list(range(blocks, blocks + needed))[::-1]
        blocks += needed
        chunks.append(
            Chunk(
                SequenceState(Request("trial", tuple(tokens), SamplingParams()), table, 0, length + 1),
                0,
                length,
                0,
                True,
                0,
            )
        )
    return Step(tuple(chunks)), blocks


def _watch(model: Any, layers: Sequence[nn.Module], attention: StepAttention, step: Step) -> dict[nn.Module, _Seen]:
    """One pass of the model over the step; what each of the layers was given and made of it."""
    seen: dict[nn.Module, _Seen] = {}

    def note(layer: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any], out: Any) -> None:
        x = arguments[0] if arguments else named.get("hidden_states")
        places = named.get("position_embeddings")
        if len(arguments) < 2 and isinstance(x, Tensor) and isinstance(out, Tensor) and _rotary(places, x):
            seen[layer] = _Seen(x.clone(), places, out.clone())

    hooks = [layer.register_forward_hook(note, with_kwargs=True) for layer in layers]
    tokens = [token for chunk in step.chunks for token in chunk.sequence.table.chain.tokens]
    positions = [place for chunk in step.chunks for place in range(chunk.count)]
    try:
        with active(attention):
            model(
                input_ids=torch.tensor([tokens], dtype=torch.long),
                position_ids=torch.tensor([positions], dtype=torch.long),
                use_cache=False,
                logits_to_keep=torch.tensor([0]),
            )
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def _rotary(places: Any, x: Tensor) -> TypeGuard[tuple[Tensor, Tensor]]:
    """Whether these are cosines and sines of the positions of x, `[1, T, rotated]`."""
    if not isinstance(places, tuple) or len(places) != 2 or x.dim() != 3 or x.shape[0] != 1:
        return False
    return all(isinstance(one, Tensor) and one.shape[:-1] == x.shape[:2] and one.dtype == x.dtype for one in places)


def replaced(model: nn.Module) -> Iterator[nn.Module]:
    """Decoder layers that the kernels compute."""
    for module in model.modules():
        if is_patched(module) and isinstance(module.__dict__["forward"], DecoderForward):
            yield module
