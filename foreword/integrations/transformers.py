"""A cache for `generate()` that is loaded from a Foreword store and saved to it: prefix caching for scripts.

    cache = KVCache(model, "disk:///var/cache/foreword?size=20GiB", inputs.input_ids)
    output = model.generate(**inputs, past_key_values=cache)
    cache.save(output)

Blocks have the engine's format (docs/reference/formats.md): a script and a Foreword server share them.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import DynamicCache

from foreword.blocks.keys import Scope, chain_keys
from foreword.blocks.layout import ROOT_BYTES, LayerLayout, Layout, block_names
from foreword.blocks.salt import Salt
from foreword.engine.model import fingerprint_model
from foreword.errors import BadRequest, ModelUnsupported, StoreError
from foreword.store.frame import HEADER_BYTES, RAW, Header, seal
from foreword.store.sealing import KeyRing
from foreword.store.tier import used_once
from foreword.store.tiered import TieredStore
from foreword.store.urls import loss_of, open_store

BLOCK_SIZE = 16
# Blocks per call of the store.
_BATCH_BLOCKS = 64


@dataclass(frozen=True, slots=True)
class _ModelKV:
    """Fingerprint of a model, and layout of its KV."""

    fingerprint: bytes
    layers: tuple[LayerLayout, ...]
    dtype: str


_known_models: weakref.WeakKeyDictionary[Any, _ModelKV] = weakref.WeakKeyDictionary()


class KVCache(DynamicCache):  # type: ignore[misc]
    """A `DynamicCache` that starts with the longest stored prefix of a prompt.

    Args:
        model: a causal language model of Transformers whose layers all keep keys and values. Its weights
            are fingerprinted once per process and must not change afterwards.
        store: one URL, several (the fastest first), or an open `TieredStore`, which the caller closes.
        input_ids: the prompt, `[1, tokens]` or `[tokens]`. Its last token is always computed.
        salt: of the tenant; blocks with different salts are never shared.
        timeout: limit of the load in seconds; tokens that are not loaded by then are computed.

    Attributes:
        loaded_tokens: cached tokens of the prompt, loaded from the store.

    Raises:
        BadRequest: several sequences at once.
        ModelUnsupported: a layer keeps other state than keys and values.
        StoreError: a wrong URL. A store that fails later is a cache miss.
    """

    def __init__(
        self,
        model: Any,
        store: str | Sequence[str] | TieredStore,
        input_ids: Tensor,
        *,
        block_size: int = BLOCK_SIZE,
        salt: bytes = b"",
        timeout: float = 30.0,
    ) -> None:
        super().__init__()
        self._tokens = _one_sequence(input_ids)
        kv = _model_kv(model)
        urls = () if isinstance(store, TieredStore) else (store,) if isinstance(store, str) else tuple(store)
        loss = loss_of(urls) if urls else ""
        self._layout = Layout(kv.fingerprint, block_size, kv.layers, kv.dtype, loss=loss)
        self._opened = not isinstance(store, TieredStore)
        keys = KeyRing.from_environment()
        self._store = store if isinstance(store, TieredStore) else open_store(urls, self._layout, keys=keys)
        self._root = Scope(kv.fingerprint, block_size, Salt(keys.current(salt) if keys else salt)).root()
        self._device = model.device
        self._dtype = getattr(torch, kv.dtype)
        self.loaded_tokens = 0
        self._load(time.monotonic() + timeout)

    def save(self, output_ids: Tensor | None = None, *, timeout: float = 60.0) -> int:
        """Save every full block of this cache; returns the number of its blocks that are in the store now.

        `output_ids` is the result of `generate()` (the prompt and the new tokens); without it only the prompt is saved.
        Closes the store, unless the caller opened it. A store that fails saves fewer blocks and raises no error.
        """
        tokens = self._tokens if output_ids is None else _one_sequence(output_ids)
        if tokens[: len(self._tokens)] != self._tokens:
            raise BadRequest("these are not the tokens of this cache: they do not start with its prompt")
        computed = min(len(tokens), self.get_seq_length())
        full = computed // self._layout.block_size
        start = self.loaded_tokens // self._layout.block_size
        keys = chain_keys(self._root, tokens[: full * self._layout.block_size], self._layout.block_size)
        saved = start
        for low in range(start, full, _BATCH_BLOCKS):
            saved += self._put(keys, low, min(low + _BATCH_BLOCKS, full), time.monotonic() + timeout)
        self.close()
        return saved

    def close(self) -> None:
        """Close the store without saving."""
        if self._opened:
            self._store.close()

    def _load(self, deadline: float) -> None:
        size = self._layout.block_size
        full = (len(self._tokens) - 1) // size
        keys = chain_keys(self._root, self._tokens[: full * size], size)
        names = block_names(self._layout.fingerprint, self._root, keys)
        found: list[Tensor] = []
        with contextlib.suppress(StoreError):
            names = names[: self._store.lookup(names, deadline=deadline)]
        for low in range(0, len(names), _BATCH_BLOCKS):
            group = self._get(names[low : low + _BATCH_BLOCKS], deadline)
            found.append(group)
            if len(group) < len(names[low : low + _BATCH_BLOCKS]):
                break
        payloads = torch.cat(found) if found else torch.empty(0, 0, dtype=torch.uint8)
        self.loaded_tokens = len(payloads) * size
        if self.loaded_tokens:
            self._copy_in(payloads)

    def _get(self, names: Sequence[bytes], deadline: float) -> Tensor:
        """Payloads of the leading `names` that the store has, `[blocks, bytes]`."""
        length = HEADER_BYTES + self._layout.block_bytes
        memory = torch.empty(len(names), length, dtype=torch.uint8)
        rows = [memoryview(cast(Any, row.numpy())) for row in memory]
        count = 0
        for one in self._store.fetch(names, rows, deadline=deadline, on_late=used_once):
            if one is None or one.frame.header.codec != RAW or len(one.frame.data) != length:
                break
            count += 1
        return memory[:count, :-HEADER_BYTES]

    def _copy_in(self, payloads: Tensor) -> None:
        """Copy payloads into the layers' tensors, `[1, kv_heads, tokens, dim]` each."""
        offset = 0
        for number, layer in enumerate(self._layout.layers):
            parts = []
            for dim in (layer.key_dim, layer.value_dim):
                width = self._layout.block_size * layer.kv_heads * dim * self._layout.item_bytes
                part = payloads[:, offset : offset + width].contiguous().view(self._dtype)
                rows = part.reshape(-1, layer.kv_heads, dim).transpose(0, 1).unsqueeze(0)
                parts.append(rows.contiguous().to(self._device))
                offset += width
            self.update(*parts, number)

    def _put(self, keys: Sequence[bytes], low: int, high: int, deadline: float) -> int:
        size, layout = self._layout.block_size, self._layout
        rows = []
        for layer in self.layers:
            if layer.keys.shape[0] != 1:
                raise BadRequest("this cache holds several sequences (beams); only one can be saved")
            for tensor in (layer.keys, layer.values):
                part = tensor[0, :, low * size : high * size].transpose(0, 1).contiguous().cpu()
                rows.append(part.reshape(high - low, -1).view(torch.uint8))
        payloads = torch.cat(rows, dim=1)
        frames, length, root = [], layout.block_bytes, self._root[:ROOT_BYTES]
        for number in range(low, high):
            parent = keys[number - 1] if number else self._root
            header = Header(layout.fingerprint, root, keys[number], parent, number, RAW, length, length)
            buffer = memoryview(bytearray(length + HEADER_BYTES))
            buffer[:length] = memoryview(cast(Any, payloads[number - low].numpy()))
            frames.append(seal(header, buffer))
        return self._store.put(frames, deadline=deadline)


def _one_sequence(ids: Tensor) -> list[int]:
    if ids.dim() == 2 and ids.shape[0] == 1:
        ids = ids[0]
    if ids.dim() != 1 or not len(ids):
        raise BadRequest(f"one sequence of tokens is cached at a time, not a tensor of shape {tuple(ids.shape)}")
    tokens: list[int] = ids.tolist()
    return tokens


def _model_kv(model: Any) -> _ModelKV:
    """Layout of the model's KV, from one pass over two tokens, and fingerprint of its weights; once per model."""
    kv = _known_models.get(model)
    if kv is None:
        kv = _known_models[model] = _inspect(model)
    return kv


@torch.inference_mode()
def _inspect(model: Any) -> _ModelKV:
    trial = DynamicCache()
    model(input_ids=torch.tensor([[0, 1]], device=model.device), past_key_values=trial, use_cache=True)
    layers, kinds = [], set()
    for layer in trial.layers:
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is None or values is None or keys.dim() != 4 or keys.shape[2] != 2:
            raise ModelUnsupported("this model's layers keep other state than keys and values of every token")
        layers.append(LayerLayout(keys.shape[1], keys.shape[3], values.shape[3]))
        kinds |= {keys.dtype, values.dtype}
    if len(layers) != model.config.get_text_config().num_hidden_layers or len(kinds) != 1:
        raise ModelUnsupported("not every layer of this model keeps keys and values")
    return _ModelKV(fingerprint_model(model), tuple(layers), str(kinds.pop()).removeprefix("torch."))
