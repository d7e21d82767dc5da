"""The check at start under batch invariance: whether a token's bits depend on chunks and batch."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from foreword.blocks import BlockTable, PrefixCache
from foreword.engine.model import LoadedModel
from foreword.engine.request import Request, SamplingParams
from foreword.engine.sequence import Chunk, SequenceState, Step
from foreword.errors import ModelUnsupported

# Tokens of the check's prompts: a few blocks of keys of the kernels, and few words of a vector.
_LENGTHS = (150, 37, 3)
# The check computes its prompts anew at least and at most so often, and tokens times parameters in between.
_FEWEST, _MOST, _WORK = 2, 8, 10**11


def check_bits(loaded: LoadedModel, block_size: int) -> None:
    """Compute random prompts, each at once and alone, then in random chunks and batches, and compare the bits of all KV
    and logits. Raises ModelUnsupported if any differ."""
    chance = random.Random(0)
    longest = loaded.max_model_len - 1
    prompts = [[chance.randrange(loaded.vocab_size) for _ in range(min(size, longest))] for size in _LENGTHS]
    trial = _Trial(loaded, block_size, prompts)
    for number in range(len(prompts)):
        trial.compute([number], lambda left: left)
    times = _WORK // (loaded.parameters * sum(map(len, prompts)))
    for _ in range(max(_FEWEST, min(_MOST, times))):
        trial.compute(range(len(prompts)), lambda left: chance.choice((0, 1, 1, chance.randint(1, left))))


class _Trial:
    """Prompts and the bits of their tokens, kept when they are computed for the first time and compared later."""

    def __init__(self, loaded: LoadedModel, block_size: int, prompts: Sequence[Sequence[int]]) -> None:
        groups = loaded.layers.kv_groups(block_size)
        blocks = sum(-(-len(prompt) // block_size) for prompt in prompts) * len(groups)
        self._loaded, self._size, self._prompts = loaded, block_size, prompts
        self._runner = loaded.runner(blocks, block_size)
        self._cache = PrefixCache(blocks, block_size, groups=groups, enabled=False)
        # By prompt, position and what it is.
        self._known: dict[tuple[int, int, str], Tensor] = {}

    def compute(self, numbers: Iterable[int], count: Callable[[int], int]) -> None:
        """Compute some of the prompts in one batch. `count` says how many of the tokens left are computed in a step."""
        sequences = {number: self._sequence(self._prompts[number]) for number in numbers}
        running = dict(sequences)
        while running:
            counts = {number: count(len(one.table) - one.computed) for number, one in running.items()}
            chunks = {
                number: Chunk(one, one.computed, counts[number], one.computed, False, 0)
                for number, one in running.items()
                if counts[number]
            }
            if not chunks:
                continue
            logits = self._runner.logits(Step(tuple(chunks.values())))
            for number, chunk in chunks.items():
                self._compare(number, chunk, logits[: chunk.count])
                logits = logits[chunk.count :]
                chunk.sequence.computed += chunk.count
            running = {number: one for number, one in running.items() if one.computed < len(one.table)}
        for one in sequences.values():
            self._cache.release(one.table)

    def _sequence(self, tokens: Sequence[int]) -> SequenceState:
        request = Request("batch invariance", tuple(tokens), SamplingParams())
        table = self._cache.open(tokens)
        self._cache.advance(table, len(tokens))
        return SequenceState(request, table, 0, len(tokens))

    def _compare(self, number: int, chunk: Chunk, logits: Tensor) -> None:
        for offset, position in enumerate(range(chunk.start, chunk.start + chunk.count)):
            for what, found in self._results(chunk.sequence.table, position, logits[offset]):
                known = self._known.setdefault((number, position, what), found.clone())
                if not torch.equal(known.view(torch.uint8), found.view(torch.uint8)):
                    raise ModelUnsupported(
                        f"{self._loaded.model.config.model_type} is not batch-invariant: the {what} of a token differ "
                        f"between chunks of a prompt (token {position} of {len(self._prompts[number])}); "
                        "leave out engine.batch_invariant (--batch-invariant)"
                    )

    def _results(self, table: BlockTable, position: int, logits: Tensor) -> Iterator[tuple[str, Tensor]]:
        """What one token leaves: keys and values of every layer, and logits."""
        block, offset = divmod(position, self._size)
        for layers, blocks in zip(self._loaded.layers.groups, table.groups, strict=True):
            slot = blocks[block] * self._size + offset
            for layer in layers:
                paged = self._runner.layers[layer]
                yield f"keys of layer {layer}", paged.k[slot]
                yield f"values of layer {layer}", paged.v[slot]
        yield "logits", logits
