"""The runner of a Transformers model: its paged KV tensors, and one forward pass per step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from foreword.blocks import Copy
from foreword.engine.attention.base import LayerRecorder, StepAttention, forward_context
from foreword.engine.attention.cpu_backend import CpuLayers
from foreword.engine.attention.kv_tensors import PagedLayer
from foreword.engine.attention.metadata import AttentionMetadata, QueryChunk
from foreword.engine.kernels.native import Kernels
from foreword.engine.kv_groups import GroupedLayers
from foreword.engine.prompt_logprobs import PromptLogprobs
from foreword.engine.sampling import Draw, Sampled, sample
from foreword.engine.sequence import SequenceState, Step


class TorchRunner:
    """Implements `Runner` for a Transformers causal language model with paged attention (attention/base.py).

    A block has room for the layers of one KV group: layers of different groups share tensors, and never a block.

    Args:
        model: on its device, in evaluation mode, with `attn_implementation` set to `attention.base.NAME`.
        layers: the model's layers by KV group, each with what it keeps per token in numbers of `dtype`.
        num_blocks, block_size: the pool.
        share_prefixes: read a prefix that decoding sequences share once per batch.
        kernels: the compiled kernels, if they are to be used.

    `on_written`, where it is set, is called during a step with each layer whose K and V are written.
    """

    def __init__(
        self,
        model: Any,
        layers: GroupedLayers,
        dtype: torch.dtype,
        num_blocks: int,
        block_size: int,
        *,
        share_prefixes: bool = True,
        kernels: Kernels | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.bytes_per_block = bytes_per_block(layers, dtype, block_size)
        self._model = model
        self._device: torch.device = model.device
        self._block_size = block_size
        self._share = share_prefixes
        self.on_written: Callable[[int], None] | None = None
        self._grouped = layers
        self._columns = [PagedLayer(one, dtype, num_blocks, block_size, self._device) for one in layers.columns]
        self.layers = {
            layer: paged for group in layers.groups for layer, paged in zip(group, self._columns, strict=False)
        }
        self._cpu_layers = None if kernels is None else CpuLayers(kernels, self.layers)

    @torch.inference_mode()
    def run(self, step: Step, draws: Mapping[SequenceState, Draw]) -> dict[SequenceState, Sampled]:
        self._copy(step.copies)
        rows, wanted = self._sampled_rows(step, draws)
        scored = self._scored_rows(step)
        logits = self._forward(step, [*rows, *(row for _, of_prompt in scored for row in of_prompt)])
        end = len(rows)
        for prompt, of_prompt in scored:
            prompt.add(logits[end : end + len(of_prompt)])
            end += len(of_prompt)
        if not wanted:
            return {}
        sampled = sample(logits[: len(rows)], [draws[sequence] for sequence in wanted])
        return dict(zip(wanted, sampled, strict=True))

    @torch.inference_mode()
    def logits(self, step: Step) -> Tensor:
        """Float32 logits `[tokens, vocab]` of all tokens of a step (used by the self-check)."""
        self._copy(step.copies)
        return self._forward(step, list(range(step.num_tokens))).float()

    def _sampled_rows(self, step: Step, draws: Mapping[SequenceState, Draw]) -> tuple[list[int], list[SequenceState]]:
        rows: list[int] = []
        wanted: list[SequenceState] = []
        end = 0
        for chunk in step.chunks:
            end += chunk.count
            if chunk.sequence in draws:
                rows.append(end - 1)
                wanted.append(chunk.sequence)
        return rows, wanted

    def _scored_rows(self, step: Step) -> list[tuple[PromptLogprobs, range]]:
        """Rows whose logits are needed for log-probabilities of prompts."""
        found: list[tuple[PromptLogprobs, range]] = []
        begin = 0
        for chunk in step.chunks:
            prompt = chunk.sequence.prompt_logprobs
            positions = range(0) if prompt is None else prompt.positions(chunk.start, chunk.count)
            if prompt is not None and positions:
                offset = begin - chunk.start
                found.append((prompt, range(positions.start + offset, positions.stop + offset)))
            begin += chunk.count
        return found

    def _forward(self, step: Step, rows: Sequence[int]) -> Tensor:
        """Logits of the given rows of the packed step, `[len(rows), vocab]`."""
        tokens: list[int] = []
        positions: list[int] = []
        begins: list[int] = []
        for chunk in step.chunks:
            end, table = chunk.start + chunk.count, chunk.sequence.table
            begins.append(len(tokens))
            tokens += table.chain.tokens[chunk.start : end]
            positions += range(chunk.start, end)
        metadata = {
            layer: of_group
            for group, layers in enumerate(self._grouped.groups)
            for of_group in [self._group_metadata(step, begins, group)]
            for layer in layers
        }
        with forward_context(StepAttention(metadata, self.layers, on_written=self.on_written, cpu=self._cpu_layers)):
            output = self._model(
                input_ids=torch.tensor([tokens], dtype=torch.long, device=self._device),
                position_ids=torch.tensor([positions], dtype=torch.long, device=self._device),
                use_cache=False,
                # At least one row: with no rows the model would keep all of them.
                logits_to_keep=torch.tensor(rows or [0], dtype=torch.long, device=self._device),
            )
        logits: Tensor = output.logits[0]
        return logits

    def _group_metadata(self, step: Step, rows: Sequence[int], group: int) -> AttentionMetadata:
        """What the layers of a group share in a step whose chunks begin at these rows."""
        chunks = []
        for row, chunk in zip(rows, step.chunks, strict=True):
            table = chunk.sequence.table
            blocks = table.others[group - 1] if group else table.blocks
            chunks.append(QueryChunk(row, chunk.start, chunk.count, blocks, chunk.write_from))
        window = self._grouped.windows[group]
        return AttentionMetadata(chunks, self._block_size, share_prefixes=self._share, window=window)

    def _copy(self, copies: Sequence[Copy]) -> None:
        """Copy slots of blocks, in order: the target of one copy may be the source of an earlier one."""
        size = self._block_size
        for copy in copies:
            if copy.others:
                self._copy_groups(copy)
                continue
            source, target, count = copy.source * size, copy.target * size, copy.tokens
            for column in self._columns:
                column.k[target : target + count] = column.k[source : source + count]
                column.v[target : target + count] = column.v[source : source + count]

    def _copy_groups(self, copy: Copy) -> None:
        pairs = ((copy.source, copy.target), *copy.others)
        sources, targets = (torch.tensor(blocks, device=self._device) for blocks in zip(*pairs, strict=True))
        for column in self._columns:
            column.k_blocks[targets, : copy.tokens] = column.k_blocks[sources, : copy.tokens]
            column.v_blocks[targets, : copy.tokens] = column.v_blocks[sources, : copy.tokens]


def bytes_per_block(layers: GroupedLayers, dtype: torch.dtype, block_size: int) -> int:
    """Bytes of one block of the pool: the layers of one KV group."""
    return block_size * dtype.itemsize * sum(layout.elements for layout in layers.columns)


@torch.inference_mode()
def record_layers(model: Any) -> tuple[LayerRecorder, bool]:
    """The layers that call for attention, recorded in one pass over two tokens; and whether the model follows
    `logits_to_keep` (a model that ignores it computes logits for every token of a prompt)."""
    recorder = LayerRecorder()
    ids = torch.tensor([[0, 1]], device=model.device)
    with forward_context(recorder):
        output = model(
            input_ids=ids,
            position_ids=ids,
            use_cache=False,
            logits_to_keep=torch.tensor([1], device=model.device),
        )
    return recorder, output.logits.shape[1] == 1
