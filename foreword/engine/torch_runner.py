"""The runner of a Transformers model: its paged KV tensors, and one forward pass per step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foreword.blocks.prefix_cache import Copy
from foreword.engine.attention.backend import AttentionBackend, LayerRecorder, StepAttention, forward_context
from foreword.engine.attention.cpu_backend import CpuLayers
from foreword.engine.attention.kv_tensors import PagedLayer
from foreword.engine.attention.metadata import AttentionMetadata, QueryChunk, pinned
from foreword.engine.kernels import native
from foreword.engine.kernels.kernel_choice import AttentionChoice
from foreword.engine.kernels.native import Kernels
from foreword.engine.kv_groups import GroupedLayers
from foreword.engine.prompt_logprobs import PromptLogprobs
from foreword.engine.sampler import sample
from foreword.engine.sequence import Draw, Sampled, SequenceState, Step

if TYPE_CHECKING:
    from foreword.engine.cuda_graphs import Capture, DecodeGraphs
    from foreword.engine.decoder import WholeDecode


class TorchRunner:
    """Implements `Runner` for a Transformers causal language model with paged attention (attention/backend.py).

    A block has room for the layers of one KV group: layers of different groups share tensors, and never a block.

    Args:
        model: on its device, in evaluation mode, with `attn_implementation` set to `attention.base.NAME`.
        layers: the model's layers by KV group, each with what it keeps per token in numbers of `dtype`.
        num_blocks, block_size: the pool.
        kernels: the compiled kernels, if they are to be used, where `choice` says so.
        triton: Triton kernels compute attention.
        decode: computes steps that only decode, where it can.
        undivided: the model's own code has one thread, and the kernels as many as there are (`native.undivided`).

    A prefix that decoding sequences share is read once per batch, unless `share_prefixes` is False. `on_written`, where it is
    set, is called during a step with each layer whose K and V are written.
    """

    def __init__(
        self,
        model: Any,
        layers: GroupedLayers,
        dtype: torch.dtype,
        num_blocks: int,
        block_size: int,
        *,
        kernels: Kernels | None = None,
        triton: bool = False,
        choice: AttentionChoice | None = None,
        decode: WholeDecode | None = None,
        undivided: bool = False,
    ) -> None:
        self.num_blocks = num_blocks
        self.kv_dtype = dtype
        self.bytes_per_block = bytes_per_block(layers, dtype, block_size)
        self._model = model
        self._device: torch.device = model.device
        self._block_size = block_size
        self.share_prefixes = True
        self.on_written: Callable[[int], None] | None = None
        self._grouped = layers
        self._columns = [PagedLayer(one, dtype, num_blocks, block_size, self._device) for one in layers.columns]
        self.layers = {
            layer: paged for group in layers.groups for layer, paged in zip(group, self._columns, strict=False)
        }
        self._kernels, self._decode = kernels, decode
        self._model_threads = native.undivided if undivided else nullcontext
        self._cpu_layers = None if kernels is None else CpuLayers(kernels, self.layers, choice)
        self._make_backend = self._triton_backends() if triton else None
        self._graphs: DecodeGraphs | None = None

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
        sampled = sample(logits[: len(rows)], [draws[sequence] for sequence in wanted], self._kernels)
        return dict(zip(wanted, sampled, strict=True))

    @torch.inference_mode()
    def logits(self, step: Step, rows: Sequence[int] | None = None) -> Tensor:
        """Float32 logits `[tokens, vocab]` of all tokens of a step, or of some rows (used by the self-check)."""
        self._copy(step.copies)
        return self._forward(step, range(step.num_tokens) if rows is None else rows).float()

    def group_layers(self, group: int) -> dict[int, PagedLayer]:
        """The layers of a KV group, by number."""
        return {layer: self.layers[layer] for layer in sorted(self._grouped.groups[group])}

    def record_graphs(self, largest: int, capture: Capture | None = None) -> None:
        """Record steps in which up to `largest` sequences decode (cuda_graphs.py). `capture` is a CUDA graph's by default."""
        from foreword.engine.cuda_graphs import DecodeGraphs, capture_in_one_pool

        self._graphs = DecodeGraphs(
            self._compute, self.layers, self._grouped, self.num_blocks, self._block_size, largest,
            capture=capture or capture_in_one_pool(),
        )  # fmt: skip
        self._graphs.record()

    @property
    def graph_sizes(self) -> list[int]:
        """The batch sizes for which steps were recorded."""
        return [] if self._graphs is None else self._graphs.sizes

    def _triton_backends(self) -> Callable[[AttentionMetadata], AttentionBackend]:
        from foreword.engine.attention.triton_backend import StepTensors, TritonAttention, sharing_pays

        saving = sharing_pays(self.layers)
        return lambda metadata: TritonAttention(StepTensors.of(metadata, self._device, saving), self.layers)

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
        groups = [self._group_metadata(step, begins, group) for group in range(len(self._grouped.groups))]
        if self._graphs is not None and len(tokens) == len(step.chunks):
            logits = self._graphs.logits(tokens, positions, groups)
            if logits is not None:
                if self.on_written is not None:
                    for layer in self.layers:
                        self.on_written(layer)
                return logits if list(rows) == list(range(len(tokens))) else logits[self._on_device(rows)]
        metadata = {
            layer: of_group for of_group, layers in zip(groups, self._grouped.groups, strict=True) for layer in layers
        }
        attention = StepAttention(
            metadata, self.layers, on_written=self.on_written, cpu=self._cpu_layers, make_backend=self._make_backend
        )
        if self._decode is not None and len(tokens) == len(step.chunks):
            found = self._decode.logits(tokens, positions, rows, attention)
            if found is not None:
                return found
        # At least one row: with no rows the model would keep all of them.
        input_ids, position_ids, kept = map(self._on_device, ([tokens], [positions], rows or [0]))
        return self._compute(input_ids, position_ids, kept, attention)

    def _on_device(self, numbers: Sequence[Any]) -> Tensor:
        return pinned(numbers, torch.long, self._device).to(self._device, non_blocking=True)

    def _compute(self, input_ids: Tensor, position_ids: Tensor, rows: Tensor, attention: StepAttention) -> Tensor:
        """The model's forward pass over a packed step: logits of some rows."""
        with forward_context(attention), self._model_threads():
            output = self._model(input_ids=input_ids, position_ids=position_ids, use_cache=False, logits_to_keep=rows)
        logits: Tensor = output.logits[0]
        return logits

    def _group_metadata(self, step: Step, rows: Sequence[int], group: int) -> AttentionMetadata:
        """Metadata that the layers of a group share in a step whose chunks begin at these rows."""
        chunks = []
        for row, chunk in zip(rows, step.chunks, strict=True):
            table = chunk.sequence.table
            blocks = table.others[group - 1] if group else table.blocks
            chunks.append(QueryChunk(row, chunk.start, chunk.count, blocks, chunk.write_from))
        window = self._grouped.windows[group]
        return AttentionMetadata(chunks, self._block_size, share_prefixes=self.share_prefixes, window=window)

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
