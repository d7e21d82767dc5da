"""What time costs on one replica, learned from what requests there took, with bounded memory and in spite of outliers.

A request's first token is expected after

    first + prefill * tokens + attention * pairs + steps * decode_each * running

where `tokens` are those computed before it and for it, `pairs` are each of them with each token before it in its prompt,
`steps` the steps that this takes, and `running` the sequences that decode meanwhile. Lines through samples are Theil's and
Sen's: the median of the slopes of all pairs, which up to 29 % of wild samples do not move far.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import median
from typing import Final

from foreword.routing.directory import NUM_TIERS, Reach, Tier

_KEPT: Final = 48
_REFIT_EVERY: Final = 8
_FEWEST: Final = 6
# Fewer samples of first tokens tell how much slower or quicker all is, not which part of it.
_FITTED: Final = 24
# As many samples as this count what was believed before.
_BELIEF: Final = 2
_QUICKEST: Final = 1e-12
_QUICKEST_PAIR: Final = 1e-11
# Prompts of fewer tokens tell nothing of what a token takes; contexts that differ by less, nothing of what context takes.
_TELLING_TOKENS: Final = 256
_TELLING_CONTEXT: Final = 2048
_ROUNDS: Final = 2
# What is left of a first token's time at least when the decoding of others is taken off.
_LEAST_SHARE: Final = 0.25


@dataclass(frozen=True, slots=True)
class LoadCost:
    """What it takes to load blocks from a tier: `latency` seconds, and seconds for each token."""

    per_token: float
    latency: float = 0.0


@dataclass(frozen=True, slots=True)
class ReplicaCosts:
    """What time costs on a replica.

    Attributes:
        prefill: seconds for each token of a prompt that is computed.
        attention: seconds on top for each token before it in its prompt: what makes long prompts dear.
        first: seconds that every first token takes besides: network, tokenizing, one step.
        decode_base, decode_each: a step with n decoding sequences takes `decode_base + decode_each * n` seconds.
        step_tokens: tokens of prompts that one step computes at most.
        loads: tiers below the device: HOST, DISK, SHARED.
        transfer: what it takes to bring KV from another replica.
    """

    prefill: float = 2e-4
    first: float = 0.02
    decode_base: float = 0.02
    decode_each: float = 2e-4
    step_tokens: int = 2048
    loads: tuple[LoadCost, ...] = (LoadCost(1e-5), LoadCost(4e-5), LoadCost(8e-5, 2e-3))
    transfer: LoadCost = LoadCost(4e-5, 5e-3)
    attention: float = 0.0

    def compute(self, tokens: float, before: float) -> float:
        """Seconds to compute `tokens` tokens of a prompt behind the first `before`."""
        return self.compute_pairs(tokens, pairs(tokens, before))

    def compute_pairs(self, tokens: float, pairs: float) -> float:
        """Seconds to compute tokens that make so many pairs with tokens before them."""
        return self.prefill * tokens + self.attention * pairs

    def load(self, tier: Tier) -> LoadCost:
        return self.loads[tier - 1]

    def interference(self, tokens: float, running: int) -> float:
        """Seconds that the decoding of others adds while this many tokens are computed."""
        return math.ceil(tokens / self.step_tokens) * self.decode_each * running

    def best_load(self, reach: Reach, block_size: int, tokens: int) -> tuple[int, tuple[int, ...], float]:
        """How far to load a prefix rather than to compute it: `(blocks reused, blocks from each tier, seconds)`.

        A prefix is loaded from its front, so what lies behind a slow stretch must pay for that too.
        """
        full = min(reach[-1], tokens // block_size)
        parts, seconds, gain = [min(reach[0], full)], 0.0, 0.0
        best_gain = 0.0
        best: tuple[int, tuple[int, ...], float] = (parts[0], (*parts, *(0,) * (NUM_TIERS - 1)), 0.0)
        for tier in range(1, NUM_TIERS):
            more = min(reach[tier], full) - min(reach[tier - 1], full)
            parts.append(more)
            if not more:
                continue
            cost = self.load(Tier(tier))
            spent = cost.latency + more * block_size * cost.per_token
            seconds += spent
            before = (sum(parts) - more) * block_size
            gain += self.compute(more * block_size, before) - spent
            if gain > best_gain:
                best_gain = gain
                best = (sum(parts), (*parts, *(0,) * (NUM_TIERS - len(parts))), seconds)
        return best


def pairs(tokens: float, before: float) -> float:
    """Tokens with each token before them, if `tokens` are computed behind `before`."""
    return tokens * (before + tokens / 2)


class Line:
    """y = base + slope * x through recent samples, robustly; a prior until there are enough that differ in x.

    Args:
        base, slope: what is believed before there are samples. Neither ever becomes negative.
    """

    __slots__ = ("_fresh", "_samples", "base", "slope")

    def __init__(self, base: float, slope: float) -> None:
        self.base, self.slope = base, slope
        self._samples: deque[tuple[float, float]] = deque(maxlen=_KEPT)
        self._fresh = 0

    def note(self, x: float, y: float) -> bool:
        """One more sample; True if the line was drawn anew. What is not a finite number of at least 0 is ignored."""
        if not (math.isfinite(x) and math.isfinite(y) and x >= 0 and y >= 0):
            return False
        self._samples.append((x, y))
        self._fresh += 1
        if len(self._samples) < _FEWEST or (self._fresh < _REFIT_EVERY and len(self._samples) > _FEWEST):
            return False
        self._fresh = 0
        self._fit()
        return True

    def refit(self, samples: Iterable[tuple[float, float]]) -> None:
        """Forget the samples and take these."""
        self._samples.clear()
        self._samples.extend(samples)
        self._fit()

    def _fit(self) -> None:
        samples = sorted(self._samples)
        spread = samples[-1][0] - samples[0][0]
        slopes: list[float] = []
        for i, (x, y) in enumerate(samples):
            for right, above in samples[i + 1 :]:
                if (right - x) * 8 >= spread and right > x:
                    slopes.append((above - y) / (right - x))
        if len(slopes) >= _FEWEST and spread * 2 >= samples[-1][0]:
            self.slope = max(median(slopes), _QUICKEST)
            self.base = max(median(y - self.slope * x for x, y in samples), 0.0)
            return
        # All samples lie close together: they tell one number, not two. The line keeps the share of its parts.
        scale = median(y / max(self.base + self.slope * x, _QUICKEST) for x, y in samples)
        self.base, self.slope = self.base * scale, max(self.slope * scale, _QUICKEST)

    def at(self, x: float) -> float:
        return self.base + self.slope * x


class Prefill:
    """y = first + prefill * tokens + attention * pairs through recent samples, robustly.

    The first samples scale what was believed, by their median ratio to it and with more weight the more there are: a few
    requests that waited for each other must not make a replica look so slow that it gets no others. Then, where contexts
    differ, what a token takes is a line over how much stands before it, on average, and `first` is what remains of the short
    prompts. Else it is a line over the number of tokens, and `attention` stays what it was.
    """

    __slots__ = ("_belief", "_context", "_fresh", "_samples", "_tokens", "attention", "first", "prefill")

    def __init__(self, costs: ReplicaCosts) -> None:
        self._samples: deque[tuple[float, float, float]] = deque(maxlen=_KEPT)
        self._fresh = 0
        self.believe(costs)

    def believe(self, costs: ReplicaCosts) -> None:
        """Begin with these costs, and forget the samples."""
        self.first, self.prefill, self.attention = costs.first, costs.prefill, costs.attention
        self._belief = costs
        self._tokens = Line(costs.first, costs.prefill)
        self._context = Line(costs.prefill, costs.attention)
        self._samples.clear()

    def note(self, tokens: float, pairs: float, seconds: float) -> bool:
        """One more sample; True if the lines were drawn anew. What is not a finite number of at least 0 is ignored."""
        if not all(math.isfinite(value) and value >= 0 for value in (tokens, pairs, seconds)):
            return False
        self._samples.append((tokens, pairs, seconds))
        self._fresh += 1
        if len(self._samples) < _FITTED:
            self._scale()
            return True
        if self._fresh < _REFIT_EVERY and len(self._samples) > _FITTED:
            return False
        self._fresh = 0
        if not self._fit_context():
            self._fit_tokens()
        return True

    def _scale(self) -> None:
        told, count = self._belief, len(self._samples)
        ratio = median(
            y / max(told.first + told.compute_pairs(tokens, pairs), _QUICKEST) for tokens, pairs, y in self._samples
        )
        scale = max(ratio, _QUICKEST) ** (count / (count + _BELIEF))
        self.first, self.prefill, self.attention = told.first * scale, told.prefill * scale, told.attention * scale

    def _fit_context(self) -> bool:
        """False if the samples do not tell what context costs."""
        long = [sample for sample in self._samples if sample[0] >= _TELLING_TOKENS]
        contexts = sorted(pairs / tokens for tokens, pairs, _ in long)
        if len(long) < _KEPT // 4 or contexts[-1] - contexts[0] < _TELLING_CONTEXT:
            return False
        for _ in range(_ROUNDS):
            self._context.refit((pairs / tokens, max(y - self.first, 0.0) / tokens) for tokens, pairs, y in long)
            if not self._context.base > 0:
                return False
            self.prefill = self._context.base
            self.attention = self._context.slope if self._context.slope > _QUICKEST_PAIR else 0.0
            short = sorted(self._samples)[: len(self._samples) // 3]
            self.first = max(median(y - self.prefill * t - self.attention * p for t, p, y in short), 0.0)
        self._tokens.base, self._tokens.slope = self.first, self.prefill
        return True

    def _fit_tokens(self) -> None:
        self._tokens.refit((tokens, max(y - self.attention * pairs, 0.0)) for tokens, pairs, y in self._samples)
        self.first, self.prefill = self._tokens.base, self._tokens.slope


class Learner:
    """One replica's costs, corrected by what is seen. Memory: a few hundred numbers.

    Attributes:
        is_guess: nobody told the costs, and nothing was learned of what computing a prompt takes.
    """

    def __init__(self, prior: ReplicaCosts | None = None) -> None:
        self.is_guess = prior is None
        self.costs = prior or ReplicaCosts()
        self._first = Prefill(self.costs)
        self._decode = Line(self.costs.decode_base, self.costs.decode_each)
        self._loads = [Line(load.latency, load.per_token) for load in self.costs.loads]
        self._transfer = Line(self.costs.transfer.latency, self.costs.transfer.per_token)

    def note_first_token(
        self, computed_tokens: float, running: int, seconds: float, *, pairs: float = 0.0, loading: float = 0.0
    ) -> None:
        """A first token came `seconds` after its request was sent. Before it these tokens were computed, its own included, and
        `pairs` of them with tokens before them, while `running` others decoded; `loading` seconds are known to have gone into
        loading."""
        others = self.costs.interference(computed_tokens, running) + loading
        learned = self._first
        if learned.note(computed_tokens, pairs, max(seconds - others, seconds * _LEAST_SHARE)):
            self.is_guess = False
            self.costs = replace(self.costs, first=learned.first, prefill=learned.prefill, attention=learned.attention)

    def believe(self, costs: ReplicaCosts) -> None:
        """Take what prompts cost elsewhere for what they cost here, until samples tell more."""
        self._first.believe(costs)
        self.costs = replace(self.costs, first=costs.first, prefill=costs.prefill, attention=costs.attention)

    def note_decode(self, running: int, seconds: float) -> None:
        """One token of one sequence came `seconds` after the one before, while this many decoded."""
        if self._decode.note(running, seconds):
            self.costs = replace(self.costs, decode_base=self._decode.base, decode_each=self._decode.slope)

    def note_load(self, tier: Tier, tokens: int, seconds: float) -> None:
        """This many tokens' blocks came from a tier."""
        line = self._loads[tier - 1]
        if line.note(tokens, seconds):
            self.costs = replace(self.costs, loads=tuple(_load(line) for line in self._loads))

    def note_transfer(self, tokens: int, seconds: float) -> None:
        """This many tokens' KV came from another replica."""
        if self._transfer.note(tokens, seconds):
            self.costs = replace(self.costs, transfer=_load(self._transfer))


def _load(line: Line) -> LoadCost:
    return LoadCost(line.slope, line.base)
