"""Attention from PyTorch's operators, for every device and every kind of layer (docs/decisions/0005).

Attention over a set of keys can be cut into parts and put together exactly, given each part's output and log-sum-exp (the
partial softmax of FlashAttention, Dao et al. 2022, and of Hydragen, Juravsky et al. 2024). So

- blocks that lie in a row are read where they are: a run of blocks is a view, and a few long runs are a few parts;
- a prefix that several decoding sequences share is read once for all of them, and merged with each one's own part;
- a chunk of a prompt is causal attention over itself plus unmasked attention over what is cached.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foreword.engine.attention.kv_tensors import PagedLayer
from foreword.engine.attention.metadata import DecodeGroup, Keys, group_decodes, locate
from foreword.engine.sequence import Chunk

# Decoding sequences with at most so many own tokens are gathered and attended to together: for them the calls cost more than
# the copy. Longer ones are read where they lie.
MAX_TOGETHER = 1024
# Sequences go together while padding them to the longest makes them at most so much longer.
_MAX_PADDING = 1.5
_DENSE_ROWS = 256


@dataclass(frozen=True, slots=True)
class Together:
    """Own tokens of several decoding sequences, to be gathered a block at a time into one batch.

    Attributes:
        members: which of the group's sequences.
        blocks: `[members * width]` block numbers, each sequence's padded with its last.
        bias: `[members, 1, 1, width * block_size]`, 0 for a token that counts and -inf for one that does not.
        hidden: the rows of `[members * width * block_size]` that do not count. What lies there is another sequence's, or
            nothing yet; a NaN in it would outlive a weight of zero.
    """

    members: list[int]
    blocks: Tensor
    bias: Tensor
    hidden: Tensor


@dataclass(slots=True)
class _Plan:
    """How one kind of layer (all those with the same sliding window) attends in this step."""

    prefill: list[tuple[int, Chunk, Keys | None, bool]]
    groups: list[_Group]


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows that decode: the part they share, if any, and each one's own part: alone, or in one of the batches."""

    rows: list[int]
    shared: Keys | None
    alone: list[tuple[int, Keys]]
    batches: list[Together]
    order: Tensor | None


class TorchAttention:
    """The attention of one step. `prefills` and `decodes` are rows of the step and the chunks that begin there."""

    def __init__(
        self,
        prefills: Sequence[tuple[int, Chunk]],
        decodes: Sequence[tuple[int, Chunk]],
        block_size: int,
        device: torch.device,
        *,
        share: bool,
        batches: bool,
        dtype: torch.dtype,
    ) -> None:
        self._prefills = prefills
        self._decodes = decodes
        self._num_rows = sum(chunk.count for _, chunk in (*prefills, *decodes))
        self._block_size = block_size
        self._device = device
        self._share = share
        self._batches = batches
        self._layers_dtype = dtype
        self._plans: dict[int | None, _Plan] = {}

    def attend(
        self,
        paged: PagedLayer,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """As `StepAttention.attend`, after the step's K and V were written."""
        plan = self._plans.get(window)
        if plan is None:
            plan = self._plans[window] = self._make_plan(window)
        compute = _Compute(paged, scale, softcap, sinks)
        heads, value_dim = query.shape[1], value.shape[3]
        if not plan.prefill and len(plan.groups) == 1:
            return self._decode(plan.groups[0], query, compute, heads, value_dim).unsqueeze(0)
        out = query.new_empty(self._num_rows, heads, value_dim)
        for row, chunk, context, windowed in plan.prefill:
            rows = slice(row, row + chunk.count)
            part = query[:, :, rows]
            if windowed:
                assert context is not None
                bias = _band(chunk, context.count, window, query)
                result, lse = compute.over_keys(part, context, bias)
            else:
                result, lse = compute.causal(part, key[:, :, rows], value[:, :, rows])
                if context is not None:
                    result, lse = merge(result, lse, *compute.over_keys(part, context, None))
            out[rows] = compute.finish(result, lse)[0].transpose(0, 1)
        for group in plan.groups:
            out[group.rows] = self._decode(group, query, compute, heads, value_dim)
        return out.unsqueeze(0)

    def _decode(self, group: _Group, query: Tensor, compute: _Compute, heads: int, value_dim: int) -> Tensor:
        """Rows of a group, `[rows, heads, value_dim]`. The query heads of one KV head are folded into rows."""
        rows, shared = group.rows, group.shared
        kv_heads = compute.paged.k.shape[1]
        folded = query[0].transpose(0, 1)
        if len(rows) != self._num_rows:
            folded = folded[rows]
        folded = folded.reshape(len(rows), kv_heads, heads // kv_heads, -1)
        parts = [compute.over_keys(folded[one : one + 1], keys, None) for one, keys in group.alone]
        parts += [compute.together(folded, batch) for batch in group.batches]
        result = torch.cat([part[0] for part in parts]) if len(parts) > 1 else parts[0][0]
        lse = torch.cat([part[1] for part in parts]) if len(parts) > 1 else parts[0][1]
        if group.order is not None:
            result, lse = result[group.order], lse[group.order]
        if shared is not None:
            together = folded.transpose(0, 1).reshape(1, kv_heads, -1, folded.shape[-1])
            common, common_lse = compute.over_keys(together, shared, None)
            spread = common.reshape(kv_heads, len(rows), -1, value_dim).transpose(0, 1)
            spread_lse = common_lse.reshape(kv_heads, len(rows), -1).transpose(0, 1)
            result, lse = merge(result, lse, spread, spread_lse)
        result = compute.finish(result, lse, folded=True)
        return result.reshape(len(rows), heads, value_dim)

    def _make_plan(self, window: int | None) -> _Plan:
        size, device = self._block_size, self._device
        prefill = []
        for row, chunk in self._prefills:
            end, blocks = chunk.start + chunk.count, chunk.sequence.table.blocks
            windowed = window is not None and end > window
            if windowed:
                assert window is not None
                keys: Keys | None = locate(blocks, max(0, chunk.start - window + 1), end, size, device, ordered=True)
            else:
                keys = locate(blocks, 0, chunk.start, size, device) if chunk.start else None
            prefill.append((row, chunk, keys, windowed))
        groups = [
            self._plan_group(group, window) for group in group_decodes(self._decodes, window, size, share=self._share)
        ]
        return _Plan(prefill, groups)

    def _plan_group(self, group: DecodeGroup, window: int | None) -> _Group:
        size, device, shared = self._block_size, self._device, group.shared
        spans = []
        for chunk in group.chunks:
            end = chunk.start + 1
            spans.append((shared if window is None else max(shared, end - window), end))
        alone, batches = self._arrange(group.chunks, spans)
        kept = [(one, locate(group.chunks[one].sequence.table.blocks, *spans[one], size, device)) for one in alone]
        common = locate(group.chunks[0].sequence.table.blocks, 0, shared, size, device) if shared else None
        together = [self._gathered(group.chunks, spans, members) for members in batches]
        placed = [*alone, *(one for members in batches for one in members)]
        order = None
        if placed != sorted(placed):
            order = torch.tensor(placed, device=device).argsort()
        return _Group(group.rows, common, kept, together, order)

    def _arrange(self, chunks: Sequence[Chunk], spans: Sequence[tuple[int, int]]) -> tuple[list[int], list[list[int]]]:
        """Which of the sequences are attended to one by one, and which together."""
        short = [one for one, (low, end) in enumerate(spans) if end - low <= MAX_TOGETHER]
        if self._device.type != "cpu" or not self._batches or len(short) < 2:
            return list(range(len(chunks))), []
        widths = {one: self._width(spans[one]) for one in short}
        short.sort(key=lambda one: (widths[one], one))
        batches: list[list[int]] = []
        for one in short:
            if batches and widths[one] <= _MAX_PADDING * widths[batches[-1][0]] + 1:
                batches[-1].append(one)
            else:
                batches.append([one])
        left = {one for members in batches if len(members) == 1 for one in members}
        together = [sorted(members) for members in batches if len(members) > 1]
        members = {one for batch in together for one in batch}
        return [one for one in range(len(chunks)) if one in left or one not in members], together

    def _width(self, span: tuple[int, int]) -> int:
        """Blocks that the span touches."""
        return (span[1] - 1) // self._block_size - span[0] // self._block_size + 1

    def _gathered(self, chunks: Sequence[Chunk], spans: Sequence[tuple[int, int]], members: list[int]) -> Together:
        size = self._block_size
        width = max(self._width(spans[one]) for one in members)
        blocks: list[int] = []
        lows, ends = [], []
        for one in members:
            (low, end), table = spans[one], chunks[one].sequence.table.blocks
            first = low // size
            mine = table[first : (end - 1) // size + 1]
            blocks += mine + mine[-1:] * (width - len(mine))
            lows.append(low - first * size)
            ends.append(end - first * size)
        slots = torch.arange(width * size).unsqueeze(0)
        hidden = (slots < torch.tensor(lows).unsqueeze(1)) | (slots >= torch.tensor(ends).unsqueeze(1))
        bias = torch.zeros(hidden.shape, dtype=self._layers_dtype).masked_fill_(hidden, -math.inf)
        unseen = hidden.flatten().nonzero().flatten()
        return Together(members, torch.tensor(blocks, dtype=torch.long), bias[:, None, None, :], unseen)


class _Compute:
    """The arithmetic of one layer: attention over some keys, with its log-sum-exp.

    Queries are `[1, heads, rows, dim]`, where `heads` may be a multiple of the KV heads; results are
    `[1, heads, rows, value_dim]` and `[1, heads, rows]` (float32).
    """

    __slots__ = ("_flash", "_scale", "_sinks", "_softcap", "paged")

    def __init__(self, paged: PagedLayer, scale: float, softcap: float | None, sinks: Tensor | None) -> None:
        self.paged = paged
        self._scale = scale
        self._softcap = softcap
        self._sinks = sinks
        self._flash = paged.k.device.type == "cpu" and softcap is None and paged.k.shape[2] == paged.v.shape[2]

    def over_keys(self, query: Tensor, keys: Keys, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Every query sees every key, but for `bias` `[rows, keys]`, which is added to the scores (then the keys are ordered:
        one run, or all gathered)."""
        k, v = self.paged.k_heads, self.paged.v_heads
        parts = [self._one(query, k[:, :, low:high], v[:, :, low:high], bias) for low, high in keys.runs]
        if keys.blocks is not None:
            gathered_k = _gather(self.paged.k_blocks, keys)
            gathered_v = _gather(self.paged.v_blocks, keys)
            parts.append(self._one(query, gathered_k, gathered_v, bias))
        result, lse = parts[0]
        for part in parts[1:]:
            result, lse = merge(result, lse, *part)
        return result, lse

    def together(self, folded: Tensor, batch: Together) -> tuple[Tensor, Tensor]:
        """Each of the batch's rows of `folded` `[rows, kv_heads, group, dim]` over its own tokens."""
        count, width = len(batch.members), batch.bias.shape[-1]
        query = folded if count == len(folded) else folded[batch.members]
        k, v = self.paged.k_blocks, self.paged.v_blocks
        key = _gather_batch(k, batch).view(count, width, *k.shape[2:]).transpose(1, 2)
        value = _gather_batch(v, batch).view(count, width, *v.shape[2:]).transpose(1, 2)
        if self._flash:
            flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
            result, lse = flash(query, key, value, 0.0, False, attn_mask=batch.bias, scale=self._scale)
            return result, lse
        scores = torch.matmul(query.float(), key.float().transpose(-1, -2)) * self._scale
        if self._softcap is not None:
            scores = torch.tanh(scores / self._softcap) * self._softcap
        scores += batch.bias
        lse = torch.logsumexp(scores, dim=-1)
        return torch.matmul(torch.exp(scores - lse.unsqueeze(-1)), value.float()).to(query.dtype), lse

    def causal(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Query row i sees keys 0..i."""
        if self._flash:
            flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
            result, lse = flash(query, key, value, 0.0, True, scale=self._scale)
            return result, lse
        rows = query.shape[2]
        bias = query.new_full((rows, rows), -math.inf, dtype=torch.float32).triu_(1)
        return self._dense(query, key, value, bias)

    def _one(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        if not self._flash:
            return self._dense(query, key, value, bias)
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        mask = None if bias is None else bias.to(query.dtype)
        result, lse = flash(query, key, value, 0.0, False, attn_mask=mask, scale=self._scale)
        return result, lse

    def _dense(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """The definition, in float32, a few hundred query rows at a time: soft caps, unequal head sizes, other devices."""
        _, heads, rows, _ = query.shape
        kv_heads = key.shape[1]
        k, v = key.float()[0].unsqueeze(1), value.float()[0].unsqueeze(1)
        results, sums = [], []
        for low in range(0, rows, _DENSE_ROWS):
            part = query[0, :, low : low + _DENSE_ROWS].float().reshape(kv_heads, heads // kv_heads, -1, query.shape[3])
            scores = torch.matmul(part, k.transpose(-1, -2)) * self._scale
            if self._softcap is not None:
                scores = torch.tanh(scores / self._softcap) * self._softcap
            if bias is not None:
                scores = scores + bias[low : low + _DENSE_ROWS]
            lse = torch.logsumexp(scores, dim=-1)
            results.append(torch.matmul(torch.exp(scores - lse.unsqueeze(-1)), v))
            sums.append(lse)
        result = torch.cat(results, dim=2).reshape(1, heads, rows, -1)
        return result.to(query.dtype), torch.cat(sums, dim=2).reshape(1, heads, rows)

    def finish(self, result: Tensor, lse: Tensor, *, folded: bool = False) -> Tensor:
        """Attention sinks: one more key per head whose value is nothing, so it only takes weight away."""
        if self._sinks is None:
            return result
        sinks = self._sinks.float().reshape((1, lse.shape[1], -1) if folded else (1, -1, 1))
        return (result.float() * torch.sigmoid(lse - sinks).unsqueeze(-1)).to(result.dtype)


def merge(first: Tensor, first_lse: Tensor, second: Tensor, second_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint sets of keys, from the attention over each and their log-sum-exps."""
    lse = torch.logaddexp(first_lse, second_lse)
    result = first.float() * torch.exp(first_lse - lse).unsqueeze(-1)
    result += second.float() * torch.exp(second_lse - lse).unsqueeze(-1)
    return result.to(first.dtype), lse


def _gather_batch(blocks: Tensor, batch: Together) -> Tensor:
    """`[members * width * block_size, kv_heads, dim]`, copied a block at a time; zero where nothing counts."""
    return blocks.index_select(0, batch.blocks).flatten(0, 1).index_fill_(0, batch.hidden, 0)


def _gather(blocks: Tensor, keys: Keys) -> Tensor:
    """`[num_blocks, block_size, kv_heads, dim]` to `[1, kv_heads, keys.gathered, dim]`, copied a block at a time."""
    assert keys.blocks is not None
    rows = blocks.index_select(0, keys.blocks).flatten(0, 1)[keys.skip : keys.skip + keys.gathered]
    return rows.transpose(0, 1).unsqueeze(0)


def _band(chunk: Chunk, num_keys: int, window: int | None, like: Tensor) -> Tensor:
    """Which of the last `num_keys` keys up to the chunk's end each of its tokens may see, as scores to add."""
    assert window is not None
    end = chunk.start + chunk.count
    queries = torch.arange(chunk.start, end, device=like.device).unsqueeze(1)
    keys = torch.arange(end - num_keys, end, device=like.device).unsqueeze(0)
    hidden = (keys > queries) | (keys <= queries - window)
    return torch.zeros(hidden.shape, device=like.device).masked_fill_(hidden, -math.inf)
