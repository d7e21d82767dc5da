"""The cost model of replicas, learned from observed requests with bounded memory and robust to outliers, and the load that this
router put on one of them. Pure; times are given.

The expected time to first token (TTFT) of a request is

    first + prefill * tokens + attention * pairs + steps * decode_each * running

`tokens` counts the prompt tokens computed before and for the request, `pairs` the query-key pairs of these tokens, `steps` the
engine steps that this takes, and `running` the sequences that decode meanwhile. Lines are fitted with the Theil-Sen
estimator (the median of all pairwise slopes), which tolerates up to 29 % outliers.

All replicas of a kind have the costs that their requests together show. A fit for each replica would depend on which prompts it
got: real costs are not linear, so equal replicas would seem to differ, and the one that seems slow would stay unused with its
memory. A replica has costs of its own only while its TTFTs contradict the common ones.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Final, NamedTuple

from foreword.routing.directory import NUM_TIERS, CacheTier, PromptMemory, Reach

_LIFETIME_WEIGHT: Final = 0.1
_LONGEST_WAIT: Final = 16  # for memory, in lifetimes of all that is there
_RECENT_SECONDS: Final = 180.0
_USUAL_PROMPT: Final = 1024
FOLLOWERS_PER_PLACE: Final = 16
_NO_LOADS: Final = (0,) * (NUM_TIERS - 1)
_MAX_SAMPLES: Final = 48
_REFIT_EVERY: Final = 16
_MIN_SAMPLES: Final = 6
# With fewer TTFT samples than this all costs are scaled together instead of fitted one by one.
_MIN_FIT_SAMPLES: Final = 24
# Weight of the prior costs, in samples.
_PRIOR_SAMPLES: Final = 2
_MIN_SLOPE: Final = 1e-12
# The least part of the prior cost of a prompt token. Where TTFTs do not grow with the prompt (a slow network, a busy
# proxy), a token costs at least this: else a hit would be worth nothing, and the prices of all candidates would be equal.
_MIN_PREFILL: Final = 1 / 64
_MIN_PAIR_SLOPE: Final = 1e-11
# Shorter prompts do not show the cost of a token; a smaller spread of contexts does not show the cost of attention.
_MIN_PROMPT_TOKENS: Final = 256
_MIN_CONTEXT_SPREAD: Final = 2048
_FIT_ROUNDS: Final = 2
# At least this share of a TTFT remains after the interference of other sequences is subtracted.
_MIN_TTFT_SHARE: Final = 0.25
# A replica differs from the others if its TTFTs do by more than this factor.
_DIFFERENT: Final = 1.4


# Costs of computation, which are learned.
LEARNED: Final = ("prefill", "first", "attention", "decode_base", "decode_each")


@dataclass(frozen=True, slots=True)
class LoadCost:
    """Cost of loading blocks from a tier: `latency` seconds plus `per_token` seconds for each token."""

    per_token: float
    latency: float = 0.0


@dataclass(frozen=True, slots=True)
class ReplicaCosts:
    """Costs of one replica, in seconds.

    Attributes:
        prefill: per computed prompt token.
        attention: additionally per query-key pair; makes long prompts more expensive.
        first: fixed part of every TTFT: network, tokenization, one step.
        decode_base, decode_each: a step with n decoding sequences takes `decode_base + decode_each * n`.
        step_tokens: maximum number of prompt tokens in one step.
        loads: loading from the tiers below the device: HOST, DISK, SHARED.
        transfer: receiving KV from another replica.
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
        """Seconds to compute `tokens` prompt tokens that follow `before` cached ones."""
        return self.prefill * tokens + self.attention * pairs(tokens, before)

    def compute_pairs(self, tokens: float, pairs: float) -> float:
        """Seconds to compute `tokens` prompt tokens with `pairs` query-key pairs."""
        return self.prefill * tokens + self.attention * pairs

    def slower(self, factor: float) -> ReplicaCosts:
        """The costs if all computation takes `factor` times as long."""
        return replace(self, **{name: getattr(self, name) * factor for name in LEARNED})

    def load(self, tier: CacheTier) -> LoadCost:
        return self.loads[tier - 1]

    def interference(self, tokens: float, running: int) -> float:
        """Seconds that `running` decoding sequences add while this many prompt tokens are computed."""
        return math.ceil(tokens / self.step_tokens) * self.decode_each * running

    def best_load(self, reach: Reach, block_size: int, tokens: int) -> tuple[int, tuple[int, ...], float]:
        """How many leading blocks to load rather than recompute: `(blocks reused, blocks from each tier, seconds)`.

        A prefix is loaded from its start, so blocks after a slow stretch must also pay for that stretch.
        """
        full = min(reach[-1], tokens // block_size)
        if reach[0] >= full:
            return full, (full, *_NO_LOADS), 0.0
        parts, seconds, gain = [min(reach[0], full)], 0.0, 0.0
        best_gain = 0.0
        best: tuple[int, tuple[int, ...], float] = (parts[0], (*parts, *_NO_LOADS), 0.0)
        for tier in range(1, NUM_TIERS):
            more = min(reach[tier], full) - min(reach[tier - 1], full)
            parts.append(more)
            if not more:
                continue
            cost = self.load(CacheTier(tier))
            spent = cost.latency + more * block_size * cost.per_token
            seconds += spent
            before = (sum(parts) - more) * block_size
            gain += self.compute(more * block_size, before) - spent
            if gain > best_gain:
                best_gain = gain
                best = (sum(parts), (*parts, *(0,) * (NUM_TIERS - len(parts))), seconds)
        return best


# Attention is that of dense models of 8 to 70 billion parameters: a pair costs about a fifty-thousandth of a token. Short
# prompts do not show it, such as that with which a replica is measured, and a long one takes most of its time there.
DEFAULT_COSTS: Final = ReplicaCosts(attention=4e-9)


def pairs(tokens: float, before: float) -> float:
    """Query-key pairs of `tokens` prompt tokens that follow `before` others."""
    return tokens * (before + tokens / 2)


class PrefillWork(NamedTuple):
    """Prompt tokens to compute, and the query-key pairs they make with earlier tokens of their prompts."""

    tokens: float
    pairs: float

    def seconds(self, costs: ReplicaCosts) -> float:
        return self.tokens * costs.prefill + self.pairs * costs.attention


NO_WORK: Final = PrefillWork(0.0, 0.0)


class RobustLine:
    """A robust fit of y = base + slope * x to recent samples.

    Args:
        base, slope: prior, used until there are enough samples that differ in x. Neither ever becomes negative.
        least: the smallest slope.

    Attributes:
        fitted: the slope is that of samples, not a multiple of the prior and not the smallest one.
    """

    __slots__ = ("_fresh", "_least", "_samples", "base", "fitted", "slope")

    def __init__(self, base: float, slope: float, least: float = _MIN_SLOPE) -> None:
        self.base, self.slope, self._least = base, slope, least
        self.fitted = False
        self._samples: deque[tuple[float, float]] = deque(maxlen=_MAX_SAMPLES)
        self._fresh = 0

    def add(self, x: float, y: float) -> bool:
        """Add a sample; True if the line was refitted. Negative and non-finite values are ignored."""
        if not (math.isfinite(x) and math.isfinite(y) and x >= 0 and y >= 0):
            return False
        self._samples.append((x, y))
        self._fresh += 1
        if len(self._samples) < _MIN_SAMPLES or (self._fresh < _REFIT_EVERY and len(self._samples) > _MIN_SAMPLES):
            return False
        self._fresh = 0
        self._fit()
        return True

    def refit(self, samples: Iterable[tuple[float, float]]) -> None:
        """Replace the samples and fit them."""
        self._samples.clear()
        self._samples.extend(samples)
        self._fit()

    def _fit(self) -> None:
        samples = sorted(self._samples)
        spread = samples[-1][0] - samples[0][0]
        slopes: list[float] = []
        first, enough = 1, spread * 2 >= samples[-1][0]
        for x, y in samples if enough else ():
            # Those far enough to the right of this sample are to the right of `first`.
            while first < len(samples) and not ((samples[first][0] - x) * 8 >= spread and samples[first][0] > x):
                first += 1
            slopes += [(above - y) / (right - x) for right, above in samples[first:]]
        if len(slopes) >= _MIN_SAMPLES:
            found = median(slopes)
            self.fitted, self.slope = found > self._least, max(found, self._least)
            self.base = max(median(y - self.slope * x for x, y in samples), 0.0)
            return
        # The samples are too close together in x to fit two numbers: scale both by the same factor.
        scale = median(y / max(self.base + self.slope * x, _MIN_SLOPE) for x, y in samples)
        self.fitted = False
        self.base, self.slope = self.base * scale, max(self.slope * scale, self._least)


class PrefillModel:
    """A robust fit of y = first + prefill * tokens + attention * pairs to recent samples.

    The first samples only scale the prior costs, by their median ratio and with a weight that grows with their number: a few
    requests that waited for each other must not make a replica look too slow to get more. Later, if contexts differ enough,
    the cost per token is a line over the mean context length, and `first` is the remainder of short prompts. Otherwise the
    cost is a line over the number of tokens, and `attention` does not change. A token costs at least 1/64 of its prior cost.

    Attributes:
        measured: the cost of a token is that of samples. Otherwise it is assumed.
    """

    __slots__ = (
        "_context",
        "_fresh",
        "_least",
        "_prior",
        "_samples",
        "_tokens",
        "attention",
        "first",
        "measured",
        "prefill",
    )

    def __init__(self, costs: ReplicaCosts) -> None:
        self._samples: deque[tuple[float, float, float]] = deque(maxlen=_MAX_SAMPLES)
        self._fresh = 0
        self._least = costs.prefill * _MIN_PREFILL
        self.reset(costs)

    def reset(self, costs: ReplicaCosts) -> None:
        """Restart from these costs without samples."""
        self.first, self.prefill, self.attention = costs.first, costs.prefill, costs.attention
        self._prior, self.measured = costs, False
        self._tokens = RobustLine(costs.first, costs.prefill, self._least)
        self._context = RobustLine(costs.prefill, costs.attention)
        self._samples.clear()

    @property
    def count(self) -> int:
        """Samples that it keeps."""
        return len(self._samples)

    def add(self, tokens: float, pairs: float, seconds: float) -> bool:
        """Add a sample; True if it is time for a fit. Negative and non-finite values are ignored."""
        if not (min(tokens, pairs, seconds) >= 0 and math.isfinite(tokens + pairs + seconds)):
            return False
        self._samples.append((tokens, pairs, seconds))
        self._fresh += 1
        if self._fresh < _REFIT_EVERY and len(self._samples) > _MIN_FIT_SAMPLES:
            return False
        self._fresh = 0
        return True

    def fit(self) -> None:
        """Fit the costs to the samples."""
        if len(self._samples) < _MIN_FIT_SAMPLES:
            self._scale()
        elif not self._fit_context():
            self._fit_tokens()

    def contradicts(self, costs: ReplicaCosts) -> bool:
        """Whether the samples differ from what these costs expect: in most short TTFTs, or in most long ones."""
        ratios = sorted(
            [
                (max(costs.first + costs.compute_pairs(t, p), _MIN_SLOPE), max(y, _MIN_SLOPE))
                for t, p, y in self._samples
            ]
        )
        return any(
            abs(math.log(median([y / expected for expected, y in part]))) * len(part) / (len(part) + _PRIOR_SAMPLES)
            > math.log(_DIFFERENT)
            for part in (ratios[: (len(ratios) + 1) // 2], ratios[-((len(ratios) + 3) // 4) :])
        )

    def _scale(self) -> None:
        prior, count = self._prior, len(self._samples)
        ratio = median(
            y / max(prior.first + prior.compute_pairs(tokens, pairs), _MIN_SLOPE) for tokens, pairs, y in self._samples
        )
        scale = max(ratio, _MIN_SLOPE) ** (count / (count + _PRIOR_SAMPLES))
        self.first, self.attention = prior.first * scale, prior.attention * scale
        self.prefill = max(prior.prefill * scale, self._least)

    def _fit_context(self) -> bool:
        """False if the contexts of the samples do not differ enough."""
        long = [sample for sample in self._samples if sample[0] >= _MIN_PROMPT_TOKENS]
        contexts = sorted(pairs / tokens for tokens, pairs, _ in long)
        if len(long) < _MAX_SAMPLES // 4 or contexts[-1] - contexts[0] < _MIN_CONTEXT_SPREAD:
            return False
        for _ in range(_FIT_ROUNDS):
            self._context.refit((pairs / tokens, max(y - self.first, 0.0) / tokens) for tokens, pairs, y in long)
            if not self._context.base > self._least:
                return False
            self.prefill = self._context.base
            self.attention = self._context.slope if self._context.slope > _MIN_PAIR_SLOPE else 0.0
            short = sorted(self._samples)[: len(self._samples) // 3]
            self.first = max(median(y - self.prefill * t - self.attention * p for t, p, y in short), 0.0)
        self._tokens.base, self._tokens.slope = self.first, self.prefill
        self.measured = True
        return True

    def _fit_tokens(self) -> None:
        self._tokens.refit((tokens, max(y - self.attention * pairs, 0.0)) for tokens, pairs, y in self._samples)
        self.first, self.prefill, self.measured = self._tokens.base, self._tokens.slope, self._tokens.fitted


class CostModel:
    """A replica's costs, corrected by observations. Keeps a few hundred numbers.

    Args:
        prior: its costs, if they were configured.
        common: the costs of all replicas of its kind. They are learned from its observations too.
        slowness: its times as a multiple of the common ones.
    """

    def __init__(
        self, prior: ReplicaCosts | None = None, common: CostModel | None = None, slowness: float = 1.0
    ) -> None:
        self._common, self._slowness = common, slowness
        self._own = prior or DEFAULT_COSTS
        if prior is None and common is not None:
            self._own = self.common_costs
        # Whether its observations contradict the common costs.
        self._differs = common is None
        self._prefill = PrefillModel(self._own)
        self._decode = RobustLine(self._own.decode_base, self._own.decode_each)

    @property
    def costs(self) -> ReplicaCosts:
        """The expected costs of this replica."""
        return self._own if self._differs else self.common_costs

    @property
    def common_costs(self) -> ReplicaCosts:
        """The expected costs of replicas of its kind."""
        if self._common is None:
            return self._own
        return self._common.costs if self._slowness == 1.0 else self._common.costs.slower(self._slowness)

    @property
    def has_learned(self) -> bool:
        """Whether enough prompts of different lengths have shaped its costs to make a record: in front of one replica
        a router reads none."""
        return self._prefill.measured and self._prefill.count >= _MIN_FIT_SAMPLES

    @property
    def prefill_measured(self) -> bool:
        """Whether the cost of a prompt token is that of observations; otherwise it is assumed."""
        return self._prefill.measured if self._differs or self._common is None else self._common.prefill_measured

    def observe_first_token(self, computed_tokens: float, running: int, seconds: float, *, pairs: float = 0.0) -> None:
        """Learn from a TTFT of `seconds`, counted from sending.

        Args:
            computed_tokens, pairs: prompt work done before the first token, including that of requests queued before it.
            running: sequences that decoded meanwhile.
        """
        common, learned = self._common, self._prefill
        if common is not None:
            common.observe_first_token(computed_tokens, running, seconds / self._slowness, pairs=pairs)
        interference = self.costs.interference(computed_tokens, running)
        if not learned.add(computed_tokens, pairs, max(seconds - interference, seconds * _MIN_TTFT_SHARE)):
            return
        if common is not None:
            differed, self._differs = self._differs, learned.contradicts(self.common_costs)
            if self._differs and not differed:
                self._own = self.common_costs
                self._decode = RobustLine(self._own.decode_base, self._own.decode_each)
        if self._differs:
            learned.fit()
            self._own = replace(self._own, first=learned.first, prefill=learned.prefill, attention=learned.attention)

    def forget(self) -> None:
        """Restart from the common costs."""
        if self._common is not None:
            self._differs = False
            self._prefill.reset(self.common_costs)

    def observe_decode(self, running: int, tokens: int, seconds: float, prefilled: PrefillWork = NO_WORK) -> None:
        """Learn from `tokens` that took `seconds` while `running` sequences decoded.

        The time of prompts that were computed meanwhile is not of decoding: with it, sequences would seem to slow each
        other down as much as the prompts do that came with them.
        """
        if self._common is not None:
            self._common.observe_decode(running, tokens, seconds / self._slowness, prefilled)
        stalled = min(prefilled.seconds(self.costs), seconds * (1 - _MIN_TTFT_SHARE))
        seconds = (seconds - stalled) / tokens
        if self._differs and self._decode.add(running, seconds):
            self._own = replace(self._own, decode_base=self._decode.base, decode_each=self._decode.slope)


@dataclass(slots=True, eq=False, kw_only=True)
class SentRequest:
    """A request in flight.

    Attributes:
        keys, block_size: its blocks.
        tokens: length of the prompt; the last `computed` of them are expected to be computed.
        resident: tokens of KV memory that it needs, including its output.
        queued, running: load of the replica when the request was sent.
        first_at: time of the first token; None before it.
        computed_before: prompt work that its replica had computed until then, since the router knows it.
        follows: it waits for a prefix that another request computes: at most `1 / FOLLOWERS_PER_PLACE` of it is its own work.
        crowded: it was sent where the requests in flight needed all KV memory, so it waited for that.
    """

    tokens: int
    computed: int
    resident: int
    sent_at: float
    queued: PrefillWork = NO_WORK
    running: int = 0
    first_at: float | None = None
    follows: bool = False
    crowded: bool = False
    keys: Sequence[bytes] = ()
    block_size: int = 1
    computed_before: PrefillWork = NO_WORK

    @property
    def work(self) -> PrefillWork:
        return PrefillWork(self.computed, pairs(self.computed, self.tokens - self.computed))


@dataclass(slots=True)
class ReplicaLoad:
    """Requests in flight on one replica: `waiting` have no first token yet (in send order), `running` decode.

    `computed` is the prompt work of all that had their first token there, `own` what they need of KV memory beside `prompts`.
    `lifetime` and `freed` are means over recent ends: seconds since the request was sent, and tokens of memory that it freed.
    """

    waiting: dict[SentRequest, None] = field(default_factory=dict)
    running: dict[SentRequest, None] = field(default_factory=dict)
    own: int = 0
    prompts: PromptMemory = field(default_factory=PromptMemory)
    lifetime: float = 0.0
    freed: float = 0.0
    _waiting_tokens: int = 0
    _waiting_pairs: float = 0.0
    _followers: int = 0
    computed: PrefillWork = NO_WORK
    _head_since: float = 0.0
    _recent: float = 0.0
    _recent_at: float = 0.0

    def queued(self, now: float, costs: ReplicaCosts) -> PrefillWork:
        """Prompt work that is not done yet. The head of the queue has been computing since it became the head."""
        if not self.waiting:
            return NO_WORK
        head = next(iter(self.waiting))
        tokens = head.computed
        head_pairs = pairs(tokens, head.tokens - tokens)
        done = min(max(now - self._head_since, 0.0) / (tokens * costs.prefill + head_pairs * costs.attention), 1.0)
        return PrefillWork(self._waiting_tokens - done * tokens, max(self._waiting_pairs - done * head_pairs, 0.0))

    @property
    def resident(self) -> int:
        """Tokens of KV memory that the requests in flight need; a prefix that several share counts once."""
        return self.own + self.prompts.tokens

    def is_crowded(self, capacity: int | None) -> bool:
        """Whether the requests in flight need more KV memory than there is, so that some wait for it."""
        return capacity is not None and self.resident > capacity

    def lateness(self, now: float, costs: ReplicaCosts, running: int) -> float:
        """How many times as long the head of the queue has taken as computing its whole prompt should take; 1 unless it is
        late.

        That none of it was cached, and that a full step of others had to end first, is granted to the replica: what is later
        still shows that it is slower than these costs.
        """
        passed, step = now - self._head_since, costs.step_tokens * costs.prefill
        if passed <= step or not self.waiting:
            return 1.0
        head = next(iter(self.waiting))
        expected = costs.first + costs.compute(head.tokens, 0) + costs.interference(head.tokens, running)
        return max(passed / (expected + step), 1.0)

    @property
    def places(self) -> int:
        """Places of a queue that waiting prompts take. Followers share them by their work: a flood of equal prompts costs the
        replica no more than as many different ones as it takes places."""
        return len(self.waiting) - self._followers + self._followers // FOLLOWERS_PER_PLACE

    def recent_tokens(self, now: float) -> float:
        """Prompt tokens sent recently, exponentially decayed with a time constant of three minutes."""
        passed = now - self._recent_at
        return self._recent * math.exp(-passed / _RECENT_SECONDS) if passed > 0 else self._recent

    def rank(self, costs: ReplicaCosts, running: int, capacity: int | None) -> tuple[float, float]:
        """For comparing replicas: those without a queue by the time that a usual prompt takes, then others by when it would be
        computed there, then those without free memory. Lower is better. Does not change while time passes."""
        if capacity is not None and self.resident >= capacity:
            return 2.0, self.resident / max(capacity, 1)
        usual = costs.prefill * _USUAL_PROMPT + costs.interference(_USUAL_PROMPT, running)
        if not self.waiting:
            return 0.0, usual
        return 1.0, self._head_since + PrefillWork(self._waiting_tokens, self._waiting_pairs).seconds(costs) + usual

    def recent_rank(self) -> float:
        """For comparing replicas by `recent_tokens`: its logarithm on a scale that does not change while time passes."""
        return math.log(self._recent) + self._recent_at / _RECENT_SECONDS if self._recent > 0 else -math.inf

    def join(self, others: Collection[ReplicaLoad]) -> None:
        """Count as having had no less recent work than these on average: what had none would get every request whose prices
        tie."""
        now = max([one._recent_at for one in others], default=0.0)
        mean = sum([one.recent_tokens(now) for one in others]) / max(len(others), 1)
        if mean > self.recent_tokens(now):
            self._recent, self._recent_at = mean, now

    def memory_wait(self, needed: int, keys: Sequence[bytes], block_size: int, capacity: int | None) -> float:
        """Expected seconds until a prompt of these blocks fits, which needs so many tokens if it shares none, if requests keep
        finishing at their present rate (Little's law) and each frees as much as earlier ones."""
        resident = self.resident
        if capacity is None or not resident or resident + needed <= capacity:
            return 0.0
        missing = resident + min(needed, capacity) - self.prompts.shared(keys, block_size) - capacity
        # Memory that others in flight share is not freed, so all of them may end before much is.
        freed = min((len(self.waiting) + len(self.running)) * self.freed, resident)
        return missing * self.lifetime / max(freed, resident / _LONGEST_WAIT) if missing > 0 else 0.0

    def sent(self, request: SentRequest, now: float) -> None:
        if not self.waiting:
            self._head_since = now
        self.waiting[request] = None
        self._followers += request.follows
        self._waiting_tokens += request.computed
        self._waiting_pairs += request.work.pairs
        self._take(request)
        self._recent, self._recent_at = self.recent_tokens(now) + request.tokens, now

    def first_token(self, request: SentRequest, now: float) -> bool:
        """Move a request from waiting to running. False if it is not waiting."""
        if request not in self.waiting:
            return False
        self._leave_queue(request, now)
        own, before = request.work, self.computed
        self.computed = PrefillWork(before.tokens + own.tokens, before.pairs + own.pairs)
        request.first_at, request.computed_before = now, self.computed
        self.running[request] = None
        return True

    def computed_since(self, request: SentRequest) -> PrefillWork:
        """Prompt work done here since the first token of a request: in steps in which its sequence decoded."""
        return PrefillWork(
            self.computed.tokens - request.computed_before.tokens, self.computed.pairs - request.computed_before.pairs
        )

    def received(self, request: SentRequest) -> None:
        """Add a request that had its first token on another replica."""
        self.running[request] = None
        request.computed_before = self.computed
        self._take(request)

    def finished(self, request: SentRequest, now: float) -> None:
        """Remove a request that succeeded or failed, if it is here."""
        if request in self.waiting:
            self._leave_queue(request, now)
        elif request in self.running:
            del self.running[request]
        else:
            return
        before, weight = self.resident, _LIFETIME_WEIGHT if self.lifetime else 1.0
        self.own -= request.resident - self.prompts.remove(request.keys, request.block_size)
        self.freed += weight * (before - self.resident - self.freed)
        self.lifetime += weight * (now - request.sent_at - self.lifetime)

    def _take(self, request: SentRequest) -> None:
        self.own += request.resident - self.prompts.add(request.keys, request.block_size)

    def _leave_queue(self, request: SentRequest, now: float) -> None:
        del self.waiting[request]
        self._followers -= request.follows
        self._waiting_tokens -= request.computed
        self._waiting_pairs = self._waiting_pairs - request.work.pairs if self.waiting else 0.0
        self._head_since = now
