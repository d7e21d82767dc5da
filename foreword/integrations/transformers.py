"""Prefix caching for `generate()` and pipelines of Transformers, over Foreword's stores:

    attach(model, "disk:///var/cache/foreword?size=20GiB")

From then on each row of a batch loads the longest prefix that the stores have. What is missing is computed row by row, without
padding, and saved. Then the cache that `generate()` has made, of any kind, is filled: it lacks only the last token of each
prompt. Where that is not possible, `generate()` computes as before, and the reason is counted.
"""

from __future__ import annotations

import inspect
import json
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationMixin, StaticCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from foreword.blocks.layout import LayerLayout, Layout
from foreword.errors import BadRequest, ForewordError, ModelUnsupported
from foreword.integrations.model_identity import (
    code_of,
    fingerprint_model,
    fixed_rope_length,
    is_of_library,
    own_attributes,
    replaced_forward,
)
from foreword.store.engine_store import BATCH_BLOCKS, EngineStore
from foreword.store.frame import HEADER_BYTES
from foreword.store.tier_counters import LookupOutcome
from foreword.store.tiered import TieredStore

BLOCK_SIZE = 16
_PROBE_TOKENS = 16
# The argument of `generate()` and of models: releases before 5.20 have another name for it.
_NAMES = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
_CACHE = "cache" if "cache" in _NAMES else "past_key_values"
# Arguments of a model that `generate()` makes from the tokens, or that change no KV.
_KNOWN = {_CACHE, "attention_mask", "position_ids", "logits_to_keep", "use_cache"}

Pair = tuple[Tensor, Tensor]


class _ModelKV(NamedTuple):
    """The names of a model's KV.

    Attributes:
        state: what tells that the model has changed since: configuration, memory and versions of its tensors, attention,
            hooks, attributes (`_mark`), KV of a probe.
        digest: of the weights, the configuration, attention, hooks, and the KV of the probe, bit for bit.
        layers, dtype, devices: of its KV.
        longest: sequences are shorter than this. The rotary embedding of longer ones is another. 0: there is no limit.
    """

    state: tuple[Any, ...]
    digest: bytes
    layers: tuple[LayerLayout, ...]
    dtype: str
    devices: tuple[torch.device, ...]
    longest: int


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of `generate()`: the model when it began, the prompts, the first column of each, and the cache with their KV by
    column."""

    kv: _ModelKV
    prompts: list[list[int]]
    starts: list[int]
    cache: Any
    pad: int | None


class _Obstacle(Exception):
    """Why a call is computed without the stores."""


_known: weakref.WeakKeyDictionary[Any, _ModelKV] = weakref.WeakKeyDictionary()
_attached: weakref.WeakKeyDictionary[Any, AttachedStore] = weakref.WeakKeyDictionary()
# By model, attributes that a forward pass changes, such as a counter: they say nothing about KV.
_counters: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()


def attach(
    model: Any,
    store: str | Sequence[str] | TieredStore,
    *,
    block_size: int = BLOCK_SIZE,
    salt: bytes = b"",
    timeout: float = 10.0,
) -> AttachedStore:
    """Let `model.generate()`, and pipelines with this model, find and save prefixes in stores. It replaces what was attached
    before; a copy of the model has nothing attached.

    Args:
        model: a causal language model of Transformers whose layers all keep keys and values.
        store: one URL, several (the fastest first), or an open `TieredStore`, which the caller closes.
        block_size: tokens per block. Only stores that are attached with the same one share blocks.
        salt: of the tenant; blocks with different salts are never shared.
        timeout: limit of the loads and saves of a call in seconds; tokens that are not loaded by then are computed.

    Raises:
        BadRequest: a block has less than a token.
        ModelUnsupported: a layer keeps other state than keys and values, or the KV of a prefix depends on what follows it.
        StoreError: a wrong URL. A store that fails later is a miss.
    """
    if block_size < 1:
        raise BadRequest(f"block_size is {block_size}; a block has at least one token", param="block_size")
    _check(model)
    made = AttachedStore(model, store, block_size, salt, timeout)
    if (before := _attached.get(model)) is not None:
        before.close()
    kind = type(model)
    model.__class__ = type(kind.__name__, (_Attached, kind), {"__module__": kind.__module__})
    _attached[model] = made
    return made


class _Attached:
    """Stands before the class of a model that has a store."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        store = _attached.get(self)
        if store is not None:
            store.begin()
        output = super().generate(*args, **kwargs)  # type: ignore[misc]
        if store is not None:
            store.save_answers(output)
        return output

    def _prefill(self, input_ids: Tensor, generation_config: Any, model_kwargs: Any, *args: Any, **kwargs: Any) -> Any:
        store = _attached.get(self)
        if store is not None:
            store.fill(self, input_ids, generation_config, model_kwargs)
        return super()._prefill(input_ids, generation_config, model_kwargs, *args, **kwargs)  # type: ignore[misc]


class AttachedStore:
    """Stores that a model's `generate()` uses; made by `attach`. Any number of threads may generate.

    Attributes:
        loaded_tokens: of the last call, tokens of each row's prompt that were loaded from the stores.
        not_used: how many calls were computed without the stores, by reason.
        store: the tiers.
    """

    def __init__(
        self, model: Any, store: str | Sequence[str] | TieredStore, block_size: int, salt: bytes, timeout: float
    ) -> None:
        self._given, self._block_size, self._salt, self._timeout = store, block_size, salt, timeout
        self._model = weakref.ref(model)
        self._lock = threading.Lock()
        self._calls = threading.local()
        self._kv = _identify(model)
        self._chains = self._open()
        self.loaded_tokens: tuple[int, ...] = ()
        self.not_used: Counter[str] = Counter()

    @property
    def store(self) -> TieredStore:
        return self._chains.store

    @property
    def lookups(self) -> Counter[LookupOutcome]:
        """How many prompts were looked up, by outcome."""
        return self._chains.lookups

    @property
    def saved_blocks(self) -> int:
        """How many blocks were saved."""
        return self._chains.saved_blocks

    def close(self) -> None:
        """Detach the stores from the model, and close them, unless the caller opened them."""
        model = self._model()
        if model is not None and _attached.get(model) is self:
            del _attached[model]
            model.__class__ = type(model).__mro__[2]
        self._chains.close()

    def begin(self) -> None:
        """A call of `generate()` begins in this thread."""
        self._calls.last = None

    def fill(self, model: Any, input_ids: Tensor, generation: Any, given: dict[str, Any]) -> None:
        """Load or compute the KV of all prompts but their last tokens, and put it into the cache of a call."""
        with self._lock:
            self.loaded_tokens = ()
            try:
                starts = _starts(model, input_ids, generation, given)
                self._refresh(model)
                if self._kv.longest and generation.max_length >= self._kv.longest:
                    raise _Obstacle(f"sequences of {self._kv.longest} tokens have another rotary embedding")
            except _Obstacle as reason:
                self.not_used[str(reason)] += 1
                return
            deadline, cache = time.monotonic() + self._timeout, given[_CACHE]
            prompts = [row[start:] for row, start in zip(input_ids.tolist(), starts, strict=True)]
            rows: dict[tuple[int, ...], tuple[list[Pair], int]] = {}
            for prompt in map(tuple, prompts):
                if prompt not in rows:
                    rows[prompt] = self._row(model, prompt, deadline, generation.prefill_chunk_size)
            self.loaded_tokens = tuple(rows[tuple(prompt)][1] for prompt in prompts)
            self._join([rows[tuple(prompt)][0] for prompt in prompts], input_ids.shape[1] - 1, cache)
            if generation.num_beams == 1:  # the cache of beams does not say which rows they are
                pad = getattr(generation, "_pad_token_tensor", None)
                self._calls.last = _Call(self._kv, prompts, starts, cache, None if pad is None else int(pad))

    def save_answers(self, output: Any) -> None:
        """Save the blocks that end in the answers of this thread's call. Layers that keep a window only have lost them."""
        call, deadline = self._calls.last, time.monotonic() + self._timeout
        if call is None or any(call.cache.is_sliding):
            return
        sequences = getattr(output, "sequences", output)[:, : int(call.cache.get_seq_length())].tolist()
        width, size = len(sequences[0]), self._block_size
        if not any(
            (width - start) // size > (len(one) - 1) // size
            for one, start in zip(call.prompts, call.starts, strict=True)
        ):
            return
        with self._lock:
            if not self._unchanged(self._model(), call.kv):
                return
            for row, (prompt, start, sequence) in enumerate(zip(call.prompts, call.starts, sequences, strict=True)):
                tokens = sequence[start:]
                while len(tokens) > len(prompt) and tokens[-1] == call.pad:
                    tokens.pop()
                kv = [(layer.keys[row, :, start:], layer.values[row, :, start:]) for layer in call.cache.layers]
                if tokens[: len(prompt)] == prompt:
                    self._save(kv, self._chains.keys(tokens), (len(prompt) - 1) // self._block_size, deadline)

    def _open(self) -> EngineStore:
        layout = Layout(self._kv.digest, self._block_size, self._kv.layers, self._kv.dtype)
        return EngineStore(layout, self._given, self._salt, lossy=True)

    def _refresh(self, model: Any) -> None:
        """The identity of the model as it is now. Raises _Obstacle if it has none."""
        try:
            kv = _identify(model)
            if kv is not self._kv:
                before, self._kv = self._chains, kv
                before.close()
                self._chains = self._open()
                self._chains.lookups += before.lookups
                self._chains.saved_blocks = before.saved_blocks
        except ForewordError as error:
            raise _Obstacle(error.message) from error

    def _unchanged(self, model: Any, kv: _ModelKV) -> bool:
        """Whether the model is still what it was: what it computed while weights changed is no one's. Counted if not."""
        *mark, _, probe = _probe(model)[2]
        same = kv is self._kv and kv.state == (*mark, kv.state[-2], probe)
        if not same:
            self.not_used["the model changed during the call, so nothing was saved"] += 1
        return same

    def _row(self, model: Any, prompt: Sequence[int], deadline: float, chunk: int | None) -> tuple[list[Pair], int]:
        """The KV of a prompt but its last token, `[kv_heads, tokens, dim]` by layer, and how many tokens of it were loaded."""
        cache, keys = DynamicCache(), self._chains.keys(prompt[:-1])
        found = self._load(keys, deadline, cache)
        rest = torch.tensor([prompt[found * self._block_size : -1]], device=model.device)
        for part in torch.split(rest, chunk or rest.shape[1], dim=1) if rest.numel() else ():
            _forward(model, part, cache)
        kv = [(layer.keys[0], layer.values[0]) for layer in cache.layers]
        if found < len(keys) and self._unchanged(model, self._kv):
            self._save(kv, keys, found, deadline)
        return kv, found * self._block_size

    def _join(self, rows: Sequence[list[Pair]], length: int, cache: Any) -> None:
        """Put the KV of rows into a cache, each at the end of `length` columns."""
        dtype = getattr(torch, self._kv.dtype)
        for number, (layer, device) in enumerate(zip(self._kv.layers, self._kv.devices, strict=True)):
            pair = []
            for part, dim in enumerate((layer.key_dim, layer.value_dim)):
                whole = torch.zeros(len(rows), layer.kv_heads, length, dim, dtype=dtype, device=device)
                for row, kv in enumerate(rows):
                    if kv:  # prompts of one token have none
                        whole[row, :, length - kv[number][part].shape[1] :] = kv[number][part]
                pair.append(whole)
            if length:
                cache.update(*pair, number)

    def _load(self, keys: Sequence[bytes], deadline: float, cache: Any) -> int:
        """How many of the leading blocks were loaded into an empty cache."""
        layout, found = self._chains.layout, self._chains.find(keys, deadline)
        length, count = layout.block_bytes + HEADER_BYTES, 0
        memory = torch.empty(found, length, dtype=torch.uint8)
        rows = [memoryview(cast(Any, row.numpy())) for row in memory]
        for low in range(0, found, BATCH_BLOCKS):
            high = min(low + BATCH_BLOCKS, found)
            count += self._chains.load(keys[low:high], rows[low:high], deadline)
            if count < high:
                break
        offset = 0
        for number, (layer, device) in enumerate(zip(layout.layers, self._kv.devices, strict=True)) if count else ():
            pair = []
            for dim in (layer.key_dim, layer.value_dim):
                width = layout.block_size * layer.kv_heads * dim * layout.item_bytes
                part = memory[:count, offset : offset + width].contiguous().view(getattr(torch, layout.dtype))
                pair.append(part.reshape(1, -1, layer.kv_heads, dim).transpose(1, 2).contiguous().to(device))
                offset += width
            cache.update(*pair, number)
        return count

    def _save(self, kv: Sequence[Pair], keys: Sequence[bytes], low: int, deadline: float) -> None:
        """Save the blocks from `low` on."""
        size, layout = self._block_size, self._chains.layout
        for first in range(low, len(keys), BATCH_BLOCKS):
            end, offset = min(first + BATCH_BLOCKS, len(keys)), 0
            memory = torch.empty(end - first, layout.block_bytes + HEADER_BYTES, dtype=torch.uint8)
            for tensor in (one for pair in kv for one in pair):
                part = tensor[:, first * size : end * size].transpose(0, 1).contiguous().cpu()
                part = part.reshape(end - first, -1).view(torch.uint8)
                memory[:, offset : offset + part.shape[1]] = part
                offset += part.shape[1]
            rows = [memoryview(cast(Any, row.numpy())) for row in memory]
            if not self._chains.save(keys, first, rows, deadline):
                break


def _starts(model: Any, input_ids: Tensor, generation: Any, given: dict[str, Any]) -> list[int]:
    """The first column of each row's prompt. Raises _Obstacle if the KV of a row is not that of its tokens alone, or if the
    call wants more of the prompt than its KV."""
    cache: Any = given.get(_CACHE)
    mask: Tensor | None = given.get("attention_mask")
    ones = torch.ones_like(input_ids) if mask is None else mask.long()
    other = sorted(name for name, value in given.items() if value is not None and name not in _KNOWN)
    if other:
        raise _Obstacle(f"the model gets {', '.join(other)} beside tokens")
    if type(cache) not in (DynamicCache, StaticCache) or getattr(cache, "offloading", False):
        raise _Obstacle(f"the cache is a {type(cache).__name__}, or it is offloaded")
    if int(cache.get_seq_length()):
        raise _Obstacle("the cache already has tokens")
    if model.training:
        raise _Obstacle("the model is in training mode")
    if generation.output_attentions or generation.output_hidden_states:
        raise _Obstacle("attentions or hidden states of the prompt are wanted")
    if ones.shape != input_ids.shape or not _left_padded(ones):
        raise _Obstacle("the padding is not on the left")
    places, expected = given.get("position_ids"), ones.cumsum(1) - 1
    if places is None and not ones.all():
        raise _Obstacle("the model does not take positions, so its KV depends on padding")
    if places is not None and (places.dim() != 2 or ((places - expected) * ones).any()):
        raise _Obstacle("the positions of the tokens are not 0, 1, 2, ...")
    return cast(list[int], (input_ids.shape[1] - ones.sum(1)).tolist())


def _left_padded(mask: Tensor) -> bool:
    return bool((mask[:, 1:] >= mask[:, :-1]).all() and (mask[:, -1] == 1).all() and ((mask == 0) | (mask == 1)).all())


def _check(model: Any) -> None:
    """Raises ModelUnsupported for models whose prefixes cannot be reused."""
    if not isinstance(model, GenerationMixin) or not hasattr(model, "_prefill"):
        raise ModelUnsupported(
            "this is no model of Transformers with generate(); of an adapter's wrapper take its base model"
        )
    config = model.config
    state = {type(layer) for layer in DynamicCache(config=config).layers} - {DynamicLayer, DynamicSlidingWindowLayer}
    reasons = {
        "its decoder's KV depends on what its encoder has read": config.is_encoder_decoder,
        "it may see images or hear sound, which its tokens do not name": config.get_text_config() is not config,
        "its layers keep other state than keys and values of every token": state,
        "it is in training mode; call model.eval()": model.training,
        "some of its weights are not loaded": any(one.is_meta for one in model.parameters()),
    }
    for reason, applies in reasons.items():
        if applies:
            raise ModelUnsupported(f"prefixes of this model cannot be cached: {reason}")


@torch.no_grad()
def _forward(model: Any, ids: Tensor, cache: Any) -> Any:
    """Compute the KV of tokens into a cache, and logits of the last one only, where the model can."""
    keep = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    model(input_ids=ids, use_cache=True, **{_CACHE: cache}, **keep)
    return cache


def _identify(model: Any) -> _ModelKV:
    """Identity of a model's KV. It is measured anew if the model has changed. Raises ModelUnsupported."""
    ids, cache, state = _probe(model)
    kv = _known.get(model)
    if kv is None or kv.state != state:
        kv = _known[model] = _inspect(model, ids, cache, state)
    return kv


def _probe(model: Any) -> tuple[Tensor, Any, tuple[Any, ...]]:
    """The tokens of the probe, their KV, and the model's state.

    Numbers that this changes are left out from then on. Texts and truth values, which switch adapters, never are.
    """
    ids = (
        torch.arange(1, 37 * _PROBE_TOKENS, 37, device=model.device)[None] % model.get_input_embeddings().num_embeddings
    )
    *mark, before = _mark(model)
    cache = _forward(model, ids, DynamicCache())
    after, counters = _attributes(model), _counters.setdefault(model, set())
    changed = {name: one for name, one in after.items() if before.get(name) != one}
    counters.update(name for name, one in changed.items() if type(one) in (int, float))
    kept = {name: one for name, one in before.items() if name not in counters}
    return ids, cache, (*mark, kept, _versions(model.buffers()), _digest(cache))


def _mark(model: Any) -> tuple[Any, ...]:
    """A part of a model's state that no forward pass changes, and that tells changes without computing anything. Buffers that
    are in no checkpoint are left out: some models make new ones for each length."""
    tensors = [*model.parameters()]
    for module in model.modules():
        kept = module._buffers.keys() - module._non_persistent_buffers_set
        tensors += [one for name, one in module._buffers.items() if name in kept and one is not None]
    settings = json.dumps(model.config.to_dict(), sort_keys=True, default=str)
    return settings, _versions(tensors), *_code(model), _attributes(model)


def _versions(tensors: Iterable[Tensor]) -> tuple[tuple[int, int, torch.dtype], ...]:
    return tuple((one.data_ptr(), 0 if one.is_inference() else one._version, one.dtype) for one in tensors)


def _code(model: Any) -> tuple[str, tuple[tuple[str, Any], ...]]:
    """The name of a model's attention; functions of other origin that compute KV, by place: that attention, hooks, and each
    replaced `forward` of a module or class. The probe does not show what they do to other or later tokens only."""
    attention = model.config._attn_implementation
    found = [(attention, ALL_ATTENTION_FUNCTIONS.get(attention))]
    for name, module in model.named_modules():
        found += [(name, one) for one in (*module._forward_pre_hooks.values(), *module._forward_hooks.values())]
        found.append((name, replaced_forward(module)))
    kinds: set[Any] = {kind for module in model.modules() for kind in type(module).__mro__ if "forward" in vars(kind)}
    for kind in sorted(kinds, key=lambda one: (one.__qualname__, one.__module__)):
        package = str(getattr(kind.forward, "__module__", None) or kind.__module__)
        if package != kind.__module__ and not is_of_library(kind.forward):
            found.append((kind.__qualname__, kind.forward))
    own = (one for one in found if not str(getattr(one[1], "__module__", "transformers.")).startswith("transformers."))
    return attention, tuple(own)


def _attributes(model: Any) -> dict[str, object]:
    """Attributes of modules of other origin, such as the active adapter, by place and name, less those that a forward pass
    changes."""
    left_out = _counters.get(model, set())
    places = ((name, module) for name, module in model.named_modules() if not is_of_library(type(module)))
    found = {f"{place} {name}": one for place, module in places for name, one in own_attributes(module).items()}
    return {name: one for name, one in found.items() if name not in left_out}


def _digest(cache: Any) -> bytes:
    digest = sha256()
    for tensor in (one for layer in cache.layers for one in (layer.keys, layer.values)):
        digest.update(tensor.contiguous().cpu().view(torch.uint8).numpy().data)
    return digest.digest()


def _inspect(model: Any, ids: Tensor, cache: Any, state: tuple[Any, ...]) -> _ModelKV:
    text, layers = model.config.get_text_config(), cache.layers
    dtypes = {tensor.dtype for layer in layers for tensor in (layer.keys, layer.values)}
    if len(layers) != text.num_hidden_layers or len(dtypes) != 1 or any(one.keys.dim() != 4 for one in layers):
        raise ModelUnsupported("not every layer of this model keeps keys and values")
    half = ids.shape[1] // 2
    other = _forward(model, torch.cat([ids[:, :half], ids[:, :half]], 1), DynamicCache())
    for one, two in zip(layers, other.layers, strict=True):
        if not torch.allclose(one.keys[:, :, :half], two.keys[:, :, :half], 1e-2, 1e-2):
            raise ModelUnsupported("the KV of a prefix depends on the tokens behind it")
    *_, attention, functions, attributes, _, probe = state
    code = repr((attention, [(name, code_of(one)) for name, one in functions])).encode()
    code += repr(sorted(attributes.items())).encode() if attributes else b""
    digest = sha256(b"foreword/transformers\x00" + fingerprint_model(model) + probe + code).digest()
    return _ModelKV(
        state,
        digest,
        tuple(LayerLayout(one.keys.shape[1], one.keys.shape[3], one.values.shape[3]) for one in layers),
        str(dtypes.pop()).removeprefix("torch."),
        tuple(one.keys.device for one in layers),
        fixed_rope_length(text) or 0,
    )
