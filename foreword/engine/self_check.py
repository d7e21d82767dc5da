"""The checks at start: whether the engine computes what the model's own forward pass computes, and, under batch invariance,
whether a token's bits depend on chunks and batch."""

from __future__ import annotations

import hashlib
import logging
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from foreword.blocks.prefix_cache import BlockTable, PrefixCache
from foreword.engine.attention import backend as attention
from foreword.engine.model import FORWARD_ERRORS, LoadedModel, first_line, has_window
from foreword.engine.request import Request, SamplingParams
from foreword.engine.scheduler import Scheduler
from foreword.engine.sequence import Chunk, SequenceState, Step
from foreword.errors import ModelUnsupported

# Tokens of the check's prompts: a few blocks of keys of the kernels, and few words of a vector; and of the probe's.
_LENGTHS = (150, 37, 3)
_PROBE_LENGTHS, _PROBE_BLOCK = (21, 1), 16
# So often the check computes its prompts anew.
_TIMES = 2


def check_bits(loaded: LoadedModel, block_size: int) -> None:
    """Compute random prompts, each at once and alone, then in random chunks and batches, and compare the bits of all KV
    and logits. Raises ModelUnsupported if any differ, or if anything fails."""
    chance = random.Random(0)
    try:
        trial = _alone(loaded, block_size, _LENGTHS)
        for _ in range(_TIMES):
            trial.compute(range(len(_LENGTHS)), lambda left: chance.choice((0, 1, chance.randint(1, left))))
    except FORWARD_ERRORS as failure:
        raise ModelUnsupported(f"a prompt cannot be computed in random chunks: {first_line(failure)}") from failure


def probe_bits(loaded: LoadedModel) -> bytes:
    """A digest of the bits of KV and logits of a few tokens: equal where the same is computed."""
    return _alone(loaded, _PROBE_BLOCK, _PROBE_LENGTHS).digest()


def _alone(loaded: LoadedModel, block_size: int, lengths: Sequence[int]) -> _Trial:
    """Random prompts of these lengths, or as long as sequences may be, each computed at once and alone."""
    chance = random.Random(0)
    sizes = [min(size, loaded.max_model_len) for size in lengths]
    prompts = [[chance.randrange(loaded.vocab_size) for _ in range(size)] for size in sizes]
    trial = _Trial(loaded, block_size, prompts)
    for number in range(len(prompts)):
        trial.compute([number], lambda left: left)
    return trial


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

    def digest(self) -> bytes:
        """The digest of all bits that are kept."""
        found = hashlib.sha256()
        for place, bits in sorted(self._known.items(), key=lambda item: item[0]):
            found.update(f"{place}".encode() + bits.contiguous().view(torch.uint8).numpy().tobytes())
        return found.digest()

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
                        f"between chunks of a prompt (token {position} of {len(self._prompts[number])})"
                    )

    def _results(self, table: BlockTable, position: int, logits: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The results of one token: keys and values of every layer, and logits."""
        block, offset = divmod(position, self._size)
        for layers, blocks in zip(self._loaded.layers.groups, table.groups, strict=True):
            slot = blocks[block] * self._size + offset
            for layer in layers:
                paged = self._runner.layers[layer]
                yield f"keys of layer {layer}", paged.k[slot]
                yield f"values of layer {layer}", paged.v[slot]
        yield "logits", logits


log = logging.getLogger(__name__)

# Relative error of logits that rounding explains; a wrong computation gives an error of about 1.
TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 0.15, torch.float16: 0.05}
# Work of the self-check: tokens times parameters, a few seconds.
_CHECK_WORK = 10**11
_CHECK_WORK_GPU = 10**14


def self_check(loaded: LoadedModel, block_size: int) -> float:
    """Compare the engine's logits with the model's own forward pass on random prompts.

    A prompt is computed in chunks, then extended by one token; a second sequence reuses its cached blocks, in a batch with a
    shorter prompt. The first is longer than the sliding window, unless that would take too long. Returns the largest
    relative error, of a model with experts in 16 bits without an eighth of the rows. Raises ModelUnsupported if it is more
    than rounding explains, or if anything fails.
    """
    short = min(2 * block_size + block_size // 2 + 3, loaded.max_model_len - 1)
    length = max(short, _length_beyond_window(loaded, block_size))
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, loaded.vocab_size, (length,), generator=generator).tolist()
    prompts = [tokens, tokens[::-1][: max(1, short - 2)]]
    family = loaded.model.config.model_type
    try:
        expected = [_own_logits(loaded, prompt, short) for prompt in prompts]
    except FORWARD_ERRORS as failure:
        raise ModelUnsupported(f"{family}: the model's own forward pass fails: {first_line(failure)}") from failure
    if any(torch.isnan(logits).any() for logits in expected):
        raise ModelUnsupported(f"{family}: the model's own logits are not numbers; its weights may be damaged")
    try:
        computed = _engine_logits(loaded, prompts, block_size, short)
    except FORWARD_ERRORS as failure:
        raise ModelUnsupported(f"{family} does not run through paged attention: {first_line(failure)}") from failure
    errors = _errors(
        torch.stack([logits for _, _, logits in computed]),
        torch.stack([expected[prompt][place] for prompt, place, _ in computed]),
    )
    error = float(errors[-1 - (len(errors) // 8 if _chooses_by_rounding(loaded) else 0)])
    limit = TOLERANCE[loaded.dtype]
    if not error <= limit:  # also true for NaN
        raise ModelUnsupported(
            f"{family}: the engine's logits differ from the model's own by {error:.2g} "
            f"(at most {limit:g} is rounding); this family does something that paged attention does not do here"
        )
    return error


def _length_beyond_window(loaded: LoadedModel, block_size: int) -> int:
    """Tokens of a prompt that leaves the sliding window; 0 if there is none, or the check would take too long."""
    text = loaded.model.config.get_text_config()
    if not has_window(text):
        return 0
    window = int(text.sliding_window)
    length = min(window + block_size + 3, loaded.max_model_len - 1)
    if length * loaded.parameters > (_CHECK_WORK if loaded.device.type == "cpu" else _CHECK_WORK_GPU):
        log.info("the self-check ends before the sliding window of %d tokens does", window)
        return 0
    return length


def _own_logits(loaded: LoadedModel, tokens: list[int], last: int) -> Tensor:
    """The model's own forward pass, `[tokens, vocab]` of the last tokens, with Transformers' attention."""
    model = loaded.model
    model.set_attn_implementation("eager")
    kept = torch.arange(max(0, len(tokens) - last), len(tokens), device=loaded.device)
    try:
        with torch.inference_mode():
            ids = torch.tensor([tokens], device=loaded.device)
            output = model(input_ids=ids, use_cache=False, logits_to_keep=kept)
    finally:
        model.set_attn_implementation(attention.NAME)
    logits: Tensor = output.logits[0].float()
    return logits


def _engine_logits(
    loaded: LoadedModel, prompts: list[list[int]], block_size: int, last: int
) -> list[tuple[int, int, Tensor]]:
    """(prompt, place among its last tokens, logits) through the paged engine: the first prompt in chunks, then all prompts in
    one batch, where the first one is a prefix hit; each with a decode step."""
    groups = loaded.layers.kv_groups(block_size)
    blocks = 4 * (len(prompts[0]) // block_size + 2) * len(groups)
    runner = loaded.runner(blocks, block_size)
    cache = PrefixCache(blocks, block_size, groups=groups)
    found: list[tuple[int, int, Tensor]] = []
    for chunk_size, batch in ((max(block_size + 1, len(prompts[0]) // 3), prompts[:1]), (2 * len(prompts[0]), prompts)):
        scheduler = Scheduler(cache, max_batch_tokens=chunk_size)
        running: dict[SequenceState, int] = {}
        for number, tokens in enumerate(batch):
            request = Request(f"self-check {number}", tuple(tokens[:-1]) or tuple(tokens), SamplingParams())
            running[SequenceState(request, cache.open(request.tokens), 0, len(tokens))] = number
        for sequence in running:
            scheduler.add(sequence)
        while running:
            step = scheduler.schedule()
            rows, places = _compared(step, running, {n: max(0, len(tokens) - last) for n, tokens in enumerate(prompts)})
            logits = runner.logits(step, rows or [0])
            found += [(number, place, row) for (number, place), row in zip(places, logits, strict=False)]
            scheduler.settle(step)
            for sequence in list(running):
                tokens = prompts[running[sequence]]
                if sequence.computed == len(tokens):
                    scheduler.finish(sequence)
                    del running[sequence]
                elif sequence.computed == len(tokens) - 1 == len(sequence.table):
                    sequence.table.append(tokens[-1])
    return found


def _compared(
    step: Step, running: Mapping[SequenceState, int], begins: Mapping[int, int]
) -> tuple[list[int], list[tuple[int, int]]]:
    """The rows of a step that are compared, and each one's prompt and place after where the comparison begins."""
    rows: list[int] = []
    places: list[tuple[int, int]] = []
    row = 0
    for chunk in step.chunks:
        number = running[chunk.sequence]
        for position in range(chunk.start, chunk.start + chunk.count):
            if position >= begins[number]:
                rows.append(row)
                places.append((number, position - begins[number]))
            row += 1
    return rows, places


def _chooses_by_rounding(loaded: LoadedModel) -> bool:
    """Whether rounding can give a token another expert: then an eighth of the rows may differ by more than rounding."""
    text = loaded.model.config.get_text_config()
    experts = ("num_local_experts", "num_experts", "n_routed_experts")
    return loaded.dtype != torch.float32 and any(getattr(text, name, None) for name in experts)


def _errors(found: Tensor, expected: Tensor) -> Tensor:
    """Errors of rows of logits, relative to their lengths, in ascending order. What is not finite in `expected` does not
    count."""
    finite = torch.isfinite(expected)
    wanted, difference = (torch.where(finite, one, 0.0) for one in (expected, found - expected))
    errors = torch.linalg.vector_norm(difference, dim=1) / (torch.linalg.vector_norm(wanted, dim=1) + 1e-12)
    return torch.where(torch.isnan(errors), math.inf, errors).sort().values
