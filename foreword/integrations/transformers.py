"""A cache for `generate()` that is filled from a Foreword store and saved to it: persistent prefixes in a plain script.

    cache = KVCache(model, "disk:///var/cache/foreword?size=20GiB", inputs.input_ids)
    output = model.generate(**inputs, past_key_values=cache)
    cache.save(output)

Blocks are the engine's own (docs/reference/formats.md): what a Foreword server computed, a script finds, and the other
way round.
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
from foreword.blocks.layout import LayerLayout, Layout
from foreword.engine.model import fingerprint_model
from foreword.errors import BadRequest, ModelUnsupported, StoreError
from foreword.store.frame import HEADER_BYTES, RAW, Header, seal
from foreword.store.tiered import TieredStore
from foreword.store.urls import loss_of, open_store

BLOCK_SIZE = 16
_GROUP = 64


@dataclass(frozen=True, slots=True)
class _Shapes:
    fingerprint: bytes
    layers: tuple[LayerLayout, ...]
    dtype: str


_known: weakref.WeakKeyDictionary[Any, _Shapes] = weakref.WeakKeyDictionary()


class KVCache(DynamicCache):  # type: ignore[misc]
    """A `DynamicCache` that begins with the longest stored prefix of a prompt.

    Args:
        model: any causal language model of Transformers whose layers all keep keys and values. Its weights are read once per
            process to fingerprint them; they must not be changed afterwards.
        store: one URL, several (the fastest first), or a `TieredStore` that you opened, keep and close yourself.
        input_ids: the prompt, `[1, tokens]` or `[tokens]`. Its last token is always left to be computed.
        salt: blocks of different salts never meet.
        timeout: seconds that filling may take at most; what is not loaded by then is computed.

    Attributes:
        loaded_tokens: tokens of the prompt that came from the store.

    Raises:
        BadRequest: several sequences at once.
        ModelUnsupported: a layer keeps something else than keys and values.
        StoreError: a wrong URL. A store that fails later is a miss.
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
        known = _shapes(model)
        urls = () if isinstance(store, TieredStore) else (store,) if isinstance(store, str) else tuple(store)
        loss = loss_of(urls) if urls else ""
        self._layout = Layout(known.fingerprint, block_size, known.layers, known.dtype, loss=loss)
        self._opened = not isinstance(store, TieredStore)
        self._store = store if isinstance(store, TieredStore) else open_store(urls, self._layout)
        self._root = Scope(known.fingerprint, block_size, salt).root()
        self._device = model.device
        self._dtype = getattr(torch, known.dtype)
        self.loaded_tokens = 0
        self._fill(time.monotonic() + timeout)

    def save(self, output_ids: Tensor | None = None, *, timeout: float = 60.0) -> int:
        """Keep every full block that this cache holds; returns the number of blocks that are in the store now.

        `output_ids` is what `generate()` returned (the prompt and the new tokens); without it the prompt alone is kept.
        Closes the store, unless it was given open. A store that fails keeps less; that is no error.
        """
        tokens = self._tokens if output_ids is None else _one_sequence(output_ids)
        if tokens[: len(self._tokens)] != self._tokens:
            raise BadRequest("these are not the tokens of this cache: they do not begin with its prompt")
        computed = min(len(tokens), self.get_seq_length())
        full = computed // self._layout.block_size
        start = self.loaded_tokens // self._layout.block_size
        keys = chain_keys(self._root, tokens[: full * self._layout.block_size], self._layout.block_size)
        kept = start
        for low in range(start, full, _GROUP):
            kept += self._put(keys, low, min(low + _GROUP, full), time.monotonic() + timeout)
        self.close()
        return kept

    def close(self) -> None:
        """Let go of the store without saving."""
        if self._opened:
            self._store.close()

    def _fill(self, deadline: float) -> None:
        size = self._layout.block_size
        full = (len(self._tokens) - 1) // size
        keys = chain_keys(self._root, self._tokens[: full * size], size)
        names = [self._layout.fingerprint + key for key in keys]
        found: list[Tensor] = []
        with contextlib.suppress(StoreError):
            names = names[: self._store.lookup(names, deadline=deadline)]
        for low in range(0, len(names), _GROUP):
            group = self._get(names[low : low + _GROUP], deadline)
            found.append(group)
            if len(group) < len(names[low : low + _GROUP]):
                break
        payloads = torch.cat(found) if found else torch.empty(0, 0, dtype=torch.uint8)
        self.loaded_tokens = len(payloads) * size
        if self.loaded_tokens:
            self._spread(payloads)

    def _get(self, names: Sequence[bytes], deadline: float) -> Tensor:
        """Payloads of the first of `names` that come, without a gap, `[blocks, bytes]`."""
        length = HEADER_BYTES + self._layout.block_bytes
        memory = torch.empty(len(names), length, dtype=torch.uint8)
        rows = [memoryview(cast(Any, row.numpy())) for row in memory]
        count = 0
        for one in self._store.fetch(names, rows, deadline=deadline):
            if one is None or one.frame.header.codec != RAW or len(one.frame.data) != length:
                break
            count += 1
        return memory[:count, HEADER_BYTES:]

    def _spread(self, payloads: Tensor) -> None:
        """Payloads into the layers' tensors, `[1, kv_heads, tokens, dim]` each."""
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
        frames = []
        for number in range(low, high):
            parent = keys[number - 1] if number else self._root
            header = Header(
                layout.fingerprint, keys[number], parent, number, RAW, layout.block_bytes, layout.block_bytes
            )
            buffer = memoryview(bytearray(HEADER_BYTES + layout.block_bytes))
            buffer[HEADER_BYTES:] = memoryview(cast(Any, payloads[number - low].numpy()))
            frames.append(seal(header, buffer))
        return self._store.put(frames, deadline=deadline)


def _one_sequence(ids: Tensor) -> list[int]:
    if ids.dim() == 2 and ids.shape[0] == 1:
        ids = ids[0]
    if ids.dim() != 1 or not len(ids):
        raise BadRequest(f"one sequence of tokens is cached at a time, not a tensor of shape {tuple(ids.shape)}")
    tokens: list[int] = ids.tolist()
    return tokens


def _shapes(model: Any) -> _Shapes:
    """What the model's layers keep, seen in one pass over two tokens, and what its weights are; once per model."""
    known = _known.get(model)
    if known is None:
        known = _known[model] = _look(model)
    return known


@torch.inference_mode()
def _look(model: Any) -> _Shapes:
    trial = DynamicCache()
    model(input_ids=torch.tensor([[0, 1]], device=model.device), past_key_values=trial, use_cache=True)
    layers, kinds = [], set()
    for layer in trial.layers:
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is None or values is None or keys.dim() != 4 or keys.shape[2] != 2:
            raise ModelUnsupported("this model's layers keep something else than keys and values of every token")
        layers.append(LayerLayout(keys.shape[1], keys.shape[3], values.shape[3]))
        kinds |= {keys.dtype, values.dtype}
    if len(layers) != model.config.get_text_config().num_hidden_layers or len(kinds) != 1:
        raise ModelUnsupported("not every layer of this model keeps keys and values")
    return _Shapes(fingerprint_model(model), tuple(layers), str(kinds.pop()).removeprefix("torch."))
