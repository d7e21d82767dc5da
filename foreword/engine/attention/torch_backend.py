"""Attention backend of PyTorch operators, for every device and every kind of layer (dev/decisions/0005-attention.md).

Attention over a set of keys can be cut into parts and merged exactly, given each part's output and log-sum-exp (the
partial softmax of FlashAttention, Dao et al. 2022, and of Hydragen, Juravsky et al. 2024). Therefore

- consecutive blocks are read in place: a run of blocks is a view, and a few long runs are a few parts;
- a prefix that several decoding sequences share is read once for all of them, and merged with each one's own part;
- a chunk of a prompt is causal attention over itself plus unmasked attention over what is cached.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from foreword.engine.attention.kv_tensors import PagedLayer
from foreword.engine.attention.metadata import (
    AttentionMetadata,
    AttentionParams,
    DecodeGroup,
    KVSlots,
    QueryChunk,
    find_kv_slots,
)

# Decoding sequences with at most this many own tokens are gathered into one batch: for them the calls cost more than
# the copy. Longer ones are read in place.
MAX_GATHERED_TOKENS = 1024
# Padding to the longest sequence of a batch makes the others at most this much longer.
_MAX_PADDING = 1.5
_DENSE_ROWS = 256


@dataclass(frozen=True, slots=True)
class _GatheredBatch:
    """Own tokens of several decoding sequences, to be gathered a block at a time into one batch.

    Attributes:
        members: which of the group's sequences.
        blocks: `[members * width]` block numbers, each sequence's padded with its last.
        bias: `[members, 1, 1, width * block_size]`, 0 for a token that counts and -inf for one that does not.
        hidden: the rows of `[members * width * block_size]` that do not count. They may be uninitialized, and are zeroed:
            a NaN would survive a weight of zero.
    """

    members: list[int]
    blocks: Tensor
    bias: Tensor
    hidden: Tensor

    def gather(self, blocks: Tensor) -> Tensor:
        """`[num_blocks, block_size, kv_heads, dim]` to `[members, kv_heads, width * block_size, dim]`."""
        rows = blocks.index_select(0, self.blocks).flatten(0, 1).index_fill_(0, self.hidden, 0)
        return rows.view(len(self.members), -1, *blocks.shape[2:]).transpose(1, 2)


@dataclass(frozen=True, slots=True)
class _DecodeBatch:
    """Decoding sequences: the prefix that they share, if any, and each one's own part, alone or in one of the batches.

    Attributes:
        rows: their rows in the step.
        order: puts the results, first of those alone, then of the batches, into the order of `rows`; None if they are.
    """

    rows: list[int]
    shared: KVSlots | None
    alone: list[tuple[int, KVSlots]]
    batches: list[_GatheredBatch]
    order: Tensor | None


@dataclass(frozen=True, slots=True)
class _Prefill:
    """A chunk of a prompt. Without `windowed`, `context` is what precedes the chunk (None for nothing); with it, all
    keys that any of the chunk's tokens sees, in order."""

    chunk: QueryChunk
    context: KVSlots | None
    windowed: bool


class TorchAttention:
    """Attention of one step by PyTorch operators."""

    def __init__(self, metadata: AttentionMetadata, layers: Mapping[int, PagedLayer]) -> None:
        self._metadata = metadata
        self._layers = layers
        any_layer = next(iter(layers.values()))
        self._dtype, self._device = any_layer.k.dtype, any_layer.k.device
        self._batches = self._device.type == "cpu" and all(
            layer.k.shape[2] == layer.v.shape[2] for layer in layers.values()
        )
        # By sliding window: layers with the same window attend to the same keys.
        self._plans: dict[int | None, tuple[list[_Prefill], list[_DecodeBatch]]] = {}

    @cached_property
    def _written(self) -> tuple[Tensor, Tensor | None]:
        """The slots that are written, and which rows of the step go there (None: all, in order)."""
        mapping = self._metadata.slot_mapping
        rows = [row for row, slot in enumerate(mapping) if slot >= 0]
        slots = torch.tensor([mapping[row] for row in rows], dtype=torch.long, device=self._device)
        if len(rows) == len(mapping):
            return slots, None
        return slots, torch.tensor(rows, dtype=torch.long, device=self._device)

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """The step's K and V into their slots."""
        paged = self._layers[layer]
        slots, rows = self._written
        for cache, new in ((paged.k, key[0].transpose(0, 1)), (paged.v, value[0].transpose(0, 1))):
            cache.index_copy_(0, slots, new if rows is None else new[rows])

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
        """Attend as `StepAttention.attend`, after `write`."""
        plan = self._plans.get(params.window)
        if plan is None:
            plan = self._plans[params.window] = self._make_plan(params.window)
        prefills, decodes = plan
        compute = _LayerAttention(self._layers[layer], params)
        num_tokens, heads, value_dim = self._metadata.num_tokens, query.shape[1], value.shape[3]
        if not prefills and len(decodes) == 1:
            return self._decode(decodes[0], query, compute, value_dim).unsqueeze(0)
        out = query.new_empty(num_tokens, heads, value_dim)
        for prefill in prefills:
            rows, context = prefill.chunk.rows, prefill.context
            part = query[:, :, rows]
            if prefill.windowed:
                assert context is not None
                bias = _window_bias(prefill.chunk, context.count, params.window, query.device)
                result, lse = compute.over_slots(part, context, bias)
            else:
                result, lse = compute.over_keys(part, key[:, :, rows], value[:, :, rows], causal=True)
                if context is not None:
                    result, lse = merge(result, lse, *compute.over_slots(part, context))
            out[rows] = compute.apply_sinks(result, lse)[0].transpose(0, 1)
        for batch in decodes:
            out[batch.rows] = self._decode(batch, query, compute, value_dim)
        return out.unsqueeze(0)

    def _decode(self, batch: _DecodeBatch, query: Tensor, compute: _LayerAttention, value_dim: int) -> Tensor:
        """Rows of a group, `[rows, heads, value_dim]`. The query heads of one KV head are folded into rows."""
        rows, heads = batch.rows, query.shape[1]
        kv_heads = compute.paged.k.shape[1]
        folded = query[0].transpose(0, 1)
        if len(rows) != self._metadata.num_tokens:
            folded = folded[rows]
        folded = folded.reshape(len(rows), kv_heads, heads // kv_heads, -1)
        parts = [compute.over_slots(folded[one : one + 1], slots) for one, slots in batch.alone]
        parts += [compute.over_batch(folded, gathered) for gathered in batch.batches]
        result = torch.cat([part[0] for part in parts]) if len(parts) > 1 else parts[0][0]
        lse = torch.cat([part[1] for part in parts]) if len(parts) > 1 else parts[0][1]
        if batch.order is not None:
            result, lse = result[batch.order], lse[batch.order]
        if batch.shared is not None:
            together = folded.transpose(0, 1).reshape(1, kv_heads, -1, folded.shape[-1])
            common, common_lse = compute.over_slots(together, batch.shared)
            spread = common.reshape(kv_heads, len(rows), -1, value_dim).transpose(0, 1)
            spread_lse = common_lse.reshape(kv_heads, len(rows), -1).transpose(0, 1)
            result, lse = merge(result, lse, spread, spread_lse)
        result = compute.apply_sinks(result, lse, folded=True)
        return result.reshape(len(rows), heads, value_dim)

    def _make_plan(self, window: int | None) -> tuple[list[_Prefill], list[_DecodeBatch]]:
        prefills = []
        for chunk in self._metadata.prefills:
            if window is not None and chunk.end > window:
                slots = self._find(chunk, max(0, chunk.start - window + 1), chunk.end, ordered=True)
                prefills.append(_Prefill(chunk, slots, windowed=True))
            else:
                context = self._find(chunk, 0, chunk.start) if chunk.start else None
                prefills.append(_Prefill(chunk, context, windowed=False))
        return prefills, [self._plan_decodes(group, window) for group in self._metadata.decode_groups(window)]

    def _find(self, chunk: QueryChunk, start: int, stop: int, *, ordered: bool = False) -> KVSlots:
        return find_kv_slots(chunk.block_table, start, stop, self._metadata.block_size, self._device, ordered=ordered)

    def _plan_decodes(self, group: DecodeGroup, window: int | None) -> _DecodeBatch:
        chunks, shared = group.chunks, group.shared
        spans = [(shared if window is None else max(shared, chunk.end - window), chunk.end) for chunk in chunks]
        alone, batches = self._arrange(spans)
        order = None
        placed = [*alone, *(one for members in batches for one in members)]
        if placed != sorted(placed):
            order = torch.tensor(placed, device=self._device).argsort()
        return _DecodeBatch(
            rows=[chunk.row for chunk in chunks],
            shared=self._find(chunks[0], 0, shared) if shared else None,
            alone=[(one, self._find(chunks[one], *spans[one])) for one in alone],
            batches=[self._gathered(chunks, spans, members) for members in batches],
            order=order,
        )

    def _arrange(self, spans: Sequence[tuple[int, int]]) -> tuple[list[int], list[list[int]]]:
        """Choose which sequences are attended to one by one, and which in batches of about the same length."""
        short = [one for one, (low, end) in enumerate(spans) if end - low <= MAX_GATHERED_TOKENS]
        if not self._batches or len(short) < 2:
            return list(range(len(spans))), []
        widths = {one: self._width(spans[one]) for one in short}
        batches: list[list[int]] = []
        for one in sorted(short, key=lambda one: (widths[one], one)):
            if batches and widths[one] <= _MAX_PADDING * widths[batches[-1][0]] + 1:
                batches[-1].append(one)
            else:
                batches.append([one])
        together = [sorted(members) for members in batches if len(members) > 1]
        batched = {one for members in together for one in members}
        return [one for one in range(len(spans)) if one not in batched], together

    def _width(self, span: tuple[int, int]) -> int:
        """Number of blocks that the span touches."""
        size = self._metadata.block_size
        return (span[1] - 1) // size - span[0] // size + 1

    def _gathered(
        self, chunks: Sequence[QueryChunk], spans: Sequence[tuple[int, int]], members: list[int]
    ) -> _GatheredBatch:
        size = self._metadata.block_size
        width = max(self._width(spans[one]) for one in members)
        blocks: list[int] = []
        lows, ends = [], []
        for one in members:
            low, end = spans[one]
            first = low // size
            own = chunks[one].block_table[first : (end - 1) // size + 1]
            blocks += [*own, *[own[-1]] * (width - len(own))]
            lows.append(low - first * size)
            ends.append(end - first * size)
        slots = torch.arange(width * size).unsqueeze(0)
        hidden = (slots < torch.tensor(lows).unsqueeze(1)) | (slots >= torch.tensor(ends).unsqueeze(1))
        bias = torch.zeros(hidden.shape, dtype=self._dtype).masked_fill_(hidden, -math.inf)
        rows = hidden.flatten().nonzero().flatten()
        return _GatheredBatch(members, torch.tensor(blocks, dtype=torch.long), bias[:, None, None, :], rows)


class _LayerAttention:
    """The arithmetic of one layer: attention over some keys, with its log-sum-exp.

    Queries are `[batch, heads, rows, dim]`, where `heads` may be a multiple of the KV heads; results are
    `[batch, heads, rows, value_dim]` and `[batch, heads, rows]` (float32).
    """

    __slots__ = ("_flash", "_params", "paged")

    def __init__(self, paged: PagedLayer, params: AttentionParams) -> None:
        self.paged = paged
        self._params = params
        self._flash = paged.k.device.type == "cpu" and params.softcap is None and paged.k.shape[2] == paged.v.shape[2]

    def over_slots(self, query: Tensor, slots: KVSlots, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Every query sees every key. `bias` `[rows, keys]` is added to the scores; then `slots` must be ordered."""
        k, v = self.paged.k_heads, self.paged.v_heads
        parts = [self.over_keys(query, k[:, :, low:high], v[:, :, low:high], bias) for low, high in slots.runs]
        if slots.blocks is not None:
            k, v = _gather(self.paged.k_blocks, slots), _gather(self.paged.v_blocks, slots)
            parts.append(self.over_keys(query, k, v, bias))
        result, lse = parts[0]
        for part in parts[1:]:
            result, lse = merge(result, lse, *part)
        return result, lse

    def over_batch(self, folded: Tensor, batch: _GatheredBatch) -> tuple[Tensor, Tensor]:
        """Each of the batch's rows of `folded` `[rows, kv_heads, group, dim]` over its own tokens."""
        query = folded if len(batch.members) == len(folded) else folded[batch.members]
        key, value = batch.gather(self.paged.k_blocks), batch.gather(self.paged.v_blocks)
        return self.over_keys(query, key, value, batch.bias)

    def over_keys(
        self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None, *, causal: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Attention over the given keys. With `causal` query row i sees keys 0..i."""
        if self._flash:
            flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
            mask = None if bias is None else bias.to(query.dtype)
            result, lse = flash(query, key, value, 0.0, causal, attn_mask=mask, scale=self._params.scale)
            return result, lse
        if causal:
            rows = query.shape[2]
            bias = query.new_full((rows, rows), -math.inf, dtype=torch.float32).triu_(1)
        return self._dense(query, key, value, bias)

    def _dense(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """The definition in float32, some query rows at a time: for soft caps, unequal head sizes, other devices."""
        batch, heads, rows, dim = query.shape
        kv_heads, softcap = key.shape[1], self._params.softcap
        k, v = key.float().unsqueeze(2), value.float().unsqueeze(2)
        if bias is not None:
            bias = bias.expand(batch, 1, rows, -1).unsqueeze(1)
        results, sums = [], []
        for low in range(0, rows, _DENSE_ROWS):
            part = query[:, :, low : low + _DENSE_ROWS].float().reshape(batch, kv_heads, heads // kv_heads, -1, dim)
            scores = torch.matmul(part, k.transpose(-1, -2)) * self._params.scale
            if softcap is not None:
                scores = torch.tanh(scores / softcap) * softcap
            if bias is not None:
                scores = scores + bias[..., low : low + _DENSE_ROWS, :]
            lse = torch.logsumexp(scores, dim=-1)
            results.append(torch.matmul(torch.exp(scores - lse.unsqueeze(-1)), v))
            sums.append(lse)
        result = torch.cat(results, dim=3).reshape(batch, heads, rows, -1)
        return result.to(query.dtype), torch.cat(sums, dim=3).reshape(batch, heads, rows)

    def apply_sinks(self, result: Tensor, lse: Tensor, *, folded: bool = False) -> Tensor:
        """Attention sinks: one more key per head whose value is zero, so it only takes weight away."""
        sinks = self._params.sinks
        if sinks is None:
            return result
        shape = (1, lse.shape[1], -1) if folded else (1, -1, 1)
        return (result.float() * torch.sigmoid(lse - sinks.float().reshape(shape)).unsqueeze(-1)).to(result.dtype)


def merge(first: Tensor, first_lse: Tensor, second: Tensor, second_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint sets of keys, from the attention over each and their log-sum-exps."""
    lse = torch.logaddexp(first_lse, second_lse)
    result = first.float() * torch.exp(first_lse - lse).unsqueeze(-1)
    result += second.float() * torch.exp(second_lse - lse).unsqueeze(-1)
    return result.to(first.dtype), lse


def _gather(blocks: Tensor, slots: KVSlots) -> Tensor:
    """`[num_blocks, block_size, kv_heads, dim]` to `[1, kv_heads, slots.gathered, dim]`, copied a block at a time."""
    assert slots.blocks is not None
    rows = blocks.index_select(0, slots.blocks).flatten(0, 1)[slots.skip : slots.skip + slots.gathered]
    return rows.transpose(0, 1).unsqueeze(0)


def _window_bias(chunk: QueryChunk, num_keys: int, window: int | None, device: torch.device) -> Tensor:
    """`[chunk.count, num_keys]`, 0 where a token of the chunk sees one of the last keys, else -inf."""
    assert window is not None
    queries = torch.arange(chunk.start, chunk.end, device=device).unsqueeze(1)
    keys = torch.arange(chunk.end - num_keys, chunk.end, device=device).unsqueeze(0)
    hidden = (keys > queries) | (keys <= queries - window)
    return torch.zeros(hidden.shape, device=device).masked_fill_(hidden, -math.inf)
