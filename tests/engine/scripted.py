"""A runner without a model: it samples given tokens, so that the loop can be tested token by token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import tiny

from foreword.blocks.prefix_cache import PrefixCache
from foreword.engine.cache_report import MissHistory
from foreword.engine.loop import EngineCore, EngineLimits
from foreword.engine.request import Delta, Request, SamplingParams
from foreword.engine.scheduler import Scheduler
from foreword.engine.sequence import Draw, Sampled, SequenceState, Step
from foreword.tokens.tokenizer import Tokenizer

TOKENIZER = Tokenizer(tiny.tokenizer(), (tiny.EOS,))
BLOCK = 4


class ScriptedRunner:
    """Implements `Runner`: the next token of a sequence is `choose(sequence)`."""

    bytes_per_block = 64

    def __init__(self, choose: Callable[[SequenceState], int], num_blocks: int = 64) -> None:
        self.num_blocks = num_blocks
        self.steps: list[Step] = []
        self._choose = choose

    def run(self, step: Step, draws: Mapping[SequenceState, Draw]) -> dict[SequenceState, Sampled]:
        self.steps.append(step)
        drawing = [chunk.sequence for chunk in step.chunks if chunk.sequence in draws]
        return {sequence: Sampled(self._choose(sequence), None) for sequence in drawing}


def make_core(runner: ScriptedRunner, **options: int) -> EngineCore:
    cache = PrefixCache(runner.num_blocks, BLOCK)
    limits = EngineLimits(runner.num_blocks * BLOCK, tiny.VOCAB, (tiny.EOS,))
    return EngineCore(runner, cache, Scheduler(cache, **options), TOKENIZER, limits, history=MissHistory(1 << 16))


def say(tokens: Sequence[int]) -> EngineCore:
    """An engine that continues every prompt with these tokens."""
    return make_core(ScriptedRunner(lambda sequence: tokens[sequence.num_output]))


def run(core: EngineCore, params: SamplingParams, prompt: Sequence[int] = (1, 2, 3)) -> list[Delta]:
    """All deltas of one request; afterwards nothing may be left in the pool."""
    core.add(Request("r", tuple(prompt), params))
    deltas = []
    while core.has_work():
        deltas += core.step()
    core.cache.check()
    assert core.cache.pool.num_free == core.cache.pool.num_blocks
    return deltas
