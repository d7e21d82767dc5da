"""The default placement policy: send a request where its expected TTFT is lowest, and explain why. Pure.

The cost estimate of a candidate has these parts:

    queue    prompt tokens queued there before this request
    memory   waiting for KV memory, if the capacity is known and full
    load     loading blocks from slower tiers, where that is faster than recomputing them
    compute  computing the remaining prompt tokens
    decode   interference of the sequences that decode there
    first    the fixed part of every TTFT

Candidates are compared by a price: the estimate, and what the decision costs others. A request delays those that wait at its
replica, and those that come before the queues are empty, each by its own load and compute. In steady traffic as many come as
wait now; how many that is at a replica is the geometric mean over the fleet, which is small as long as some replicas are idle,
for then capacity is to be had. So the price is that of the lowest TTFT where nothing waits, and turns into that of the least
work as queues grow: a request then goes where most of its prefix is, although it would wait for less time where it has to be
computed.

Those that come next go where the queue is the shortest, until it is as long as the next one. Each fills that gap by its own
prefill, and the time until it comes closes the gap by as much: `filling` is how many come for each second of the gap. They save
half of the gap on average, so a gap of `b` seconds saves them `filling * b² / 2`, and who makes it shorter pays for what they
lose. Among equal requests that is less than the gap, and the shortest queue gets them. But prompts that are much longer than
usual, such as those of a batch, queue behind each other, and leave a replica to short ones.

A session stays on its replica unless another replica is cheaper by more than the session saves there (`SessionAffinity`).

A prefix that all candidates hold attracts no request, because it lowers all prices alike. A prefix that only some hold
attracts requests that consist mostly of it, such as a question about a document. In two cases it must not attract them,
and all candidates are compared as if they held the longest cached prefix:

- The prompt is mostly new, such as the first request of a session after a shared system prompt. After one such request any
  replica holds that prefix, and the session stays for many requests. As in Preble (Srivatsa et al., 2024), "mostly new" means
  more than half of the prompt.
- The prefix is so common that more replicas should hold it than do: a prefix of two thirds of the prompts should be on two
  of three replicas (`PrefixPopularity`). Otherwise all requests would queue for the first replica that had it.

Ties between nearly equal prices are broken by the least recent load, then by rendezvous hashing of the prompt's own prefix
with the replica's name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from operator import attrgetter
from typing import Final, NamedTuple, Protocol

from msgspec import Struct

from foreword.errors import ConfigError
from foreword.newest import Newest
from foreword.routing.costs import DEFAULT_COSTS, ReplicaCosts, pairs
from foreword.routing.directory import NOTHING, CacheTier, Reach

_TIER_NAMES: Final = ("device", "host memory", "disk", "the shared store")
_REASONS: Final = {
    "cheapest": "lowest expected TTFT",
    "priced": "lowest expected TTFT together with what others wait",
    "session": "session affinity",
    "moved": "session moved, because waiting at its replica costs too much",
    "spread": "spread: most of this prompt is on no replica; least loaded chosen",
    "common": "spread: too few replicas hold this common prefix; least loaded chosen",
    "only": "the only available replica",
}
_TIE_SECONDS: Final = 0.005
_MAX_REASONS: Final = 32
_SHOWN_SECONDS: Final = 0.005  # parts of an estimate that are less are not worth a word
# Each prompt reduces the weight of earlier ones by 1 %: about the last hundred prompts count.
_DECAY: Final = 0.99
_PRIOR_PROMPTS: Final = 5
USUAL_OUTPUT: Final = 256.0
USUAL_SHARE: Final = 0.1
_FROM_NOWHERE: Final[tuple[int, ...]] = (0,) * len(_TIER_NAMES)


# Weights and block size. A block of other weights, or of another size, never has an equal key.
KeySpace = tuple[str, int]


class PlacementQuery(Struct, frozen=True):
    """A request to place.

    Attributes:
        keys: keys of the prompt's full blocks, in order.
        tokens: length of the prompt.
        block_size: tokens per block.
        session: name of the session, if the client gave one.
        max_output: `max_tokens`, if the client gave it.
        other_keys: keys for replicas with other weights or block sizes.
        weights: of the replicas that `keys` are for.
        public_keys: of prompts that begin with public blocks, by key space: the keys of the chain that begins with those.
        held: leading tokens that replicas were sent beyond what the keys tell: their bytes were the same.
        continues: the replica of the prompt that this one continues, by its bytes; else empty.
        required_weights: a replica with these weights has sent output already, so only one with the same may serve it.
    """

    keys: Sequence[bytes]
    tokens: int
    block_size: int
    session: str | None = None
    max_output: int | None = None
    other_keys: Mapping[KeySpace, Sequence[bytes]] = {}
    weights: str = ""
    required_weights: str | None = None
    public_keys: Mapping[KeySpace, Sequence[bytes]] = {}
    held: Mapping[str, int] = {}
    continues: str = ""

    @property
    def key_space(self) -> KeySpace:
        """The key space of `keys`."""
        return self.weights, self.block_size

    def keys_in(self, space: KeySpace) -> Sequence[bytes]:
        """The keys for replicas of this key space; empty if they were not given."""
        return self.keys if space == (self.weights, self.block_size) else self.other_keys.get(space, ())


class Candidate(NamedTuple):
    """The present state of a replica for one request.

    Attributes:
        reach: leading blocks of the prompt in its tiers 0 to t.
        queued_tokens, queued_pairs: prompt tokens sent there but not computed yet, and their query-key pairs.
        queued, running: requests before and after their first token.
        memory_wait: seconds until the prompt fits into memory.
        block_size: tokens per block of `reach`; None if it is the query's.
        excluded: why it takes no requests; empty if it does.
        recent_tokens: prompt tokens sent there in the last minutes, cached or not.
        stands_for: number of replicas like it, this one included, of which only it is a candidate.
        weights: which weights it serves; None if that is not known.
        resident: tokens of KV memory that its requests in flight need.
        capacity: tokens of KV memory that it has; 0 if that is not known.
        output: tokens of an output, on average.
        decode_weight: what a second of a decoding sequence counts: the mean TTFT as a share of the mean time end to end.
        filling: requests that come while the shortest queue becomes a second longer against the next one.
    """

    name: str
    costs: ReplicaCosts = DEFAULT_COSTS
    reach: Reach = NOTHING
    queued_tokens: float = 0.0
    queued: int = 0
    running: int = 0
    memory_wait: float = 0.0
    block_size: int | None = None
    excluded: str = ""
    queued_pairs: float = 0.0
    recent_tokens: float = 0.0
    stands_for: float = 1.0
    weights: str | None = ""
    resident: int = 0
    capacity: int = 0
    output: float = USUAL_OUTPUT
    decode_weight: float = USUAL_SHARE
    filling: float = 0.0


class CostEstimate(NamedTuple):
    """The expected TTFT on one candidate, in parts (seconds), and the token counts behind it.

    Attributes:
        reused: cached tokens; `from_tiers` says in which tiers they lie.
        transfer: receiving KV from the prefill replica.
        behind: requests that its work will delay, on average, each weighed by how long those at this replica wait.
        slows: sequences that decode while it is computed, each weighed by what a second of decoding counts.
        ageing: what its wait counts beyond its seconds, because it is long.
        coming: seconds that it costs those that will come, because it makes the shortest queue longer.
    """

    replica: str
    queue: float = 0.0
    memory: float = 0.0
    load: float = 0.0
    compute: float = 0.0
    decode: float = 0.0
    first: float = 0.0
    transfer: float = 0.0
    reused: int = 0
    computed: int = 0
    from_tiers: tuple[int, ...] = _FROM_NOWHERE
    excluded: str = ""
    behind: float = 0.0
    slows: float = 0.0
    ageing: float = 0.0
    coming: float = 0.0

    @property
    def total(self) -> float:
        _, queue, memory, load, compute, decode, first, transfer, *_ = self
        return queue + memory + load + compute + decode + first + transfer

    @property
    def prefill(self) -> float:
        """Seconds of computing and loading for this request alone."""
        return self.load + self.compute

    @property
    def delays(self) -> float:
        """Seconds that this request costs those that wait there, together."""
        return self.behind * self.prefill

    @property
    def stalls(self) -> float:
        """Seconds that this request costs those that decode there, together, as far as they count."""
        return self.slows * self.compute

    @property
    def others(self) -> float:
        """Seconds that this request costs others, together."""
        return self.delays + self.stalls + self.coming

    @property
    def price(self) -> float:
        """The price by which candidates are compared: `total`, `others` and `ageing`, without calls, since this is asked for
        most."""
        _, queue, memory, load, compute, decode, first, transfer, _, _, _, _, behind, slows, ageing, coming = self
        total = queue + memory + load + compute + decode + first + transfer
        return total + behind * (load + compute) + slows * compute + ageing + coming

    def in_words(self) -> str:
        """The parts in words, such as `0.42 s (0.10 queued, 0.02 loading 8192 from disk, 0.30 computing 1536 of 9728
        tokens)`."""
        if self.excluded:
            return self.excluded
        _, queue, memory, load, compute, decode, first, transfer, reused, computed, from_tiers, _, behind, *more = self
        slows, ageing, coming = more
        total = queue + memory + load + compute + decode + first + transfer
        delays, stalls, least = behind * (load + compute), slows * compute, _SHOWN_SECONDS
        if total < least and delays < least and stalls < least and ageing < least:
            return f"{total:.2f} s"
        named = (
            (queue, "queued"),
            (memory, "waiting for KV memory"),
            (load, _loading(from_tiers)),
            (transfer, "KV transfer"),
            (compute, f"computing {computed} of {computed + reused} tokens"),
            (decode, "decode interference"),
        )
        parts = [f"{seconds:.2f} {what}" for seconds, what in named if seconds >= least]
        words = f"{total:.2f} s ({', '.join(parts)})" if parts else f"{total:.2f} s"
        others = ((delays, "those that wait"), (stalls, "those that decode"), (ageing, "its long wait"))
        for seconds, what in (*others, (coming, "those that will come")):
            if seconds >= least:
                words += f", and {seconds:.2f} s for {what}"
        return words


def _loading(from_tiers: tuple[int, ...]) -> str:
    tiers = zip(from_tiers[1:], _TIER_NAMES[1:], strict=True)
    return f"loading {' and '.join(f'{tokens} from {name}' for tokens, name in tiers if tokens)}"


_price: Final = attrgetter("price")


class Decision(Struct, frozen=True):
    """Where a request goes.

    Attributes:
        replica: name of the chosen replica; None if no candidate takes requests.
        estimates: one per candidate.
        reason: one word: `cheapest`, `session` (stayed), `moved` (left its session's replica), `spread` (mostly new: least
            loaded, although others hold its prefix), `common` (the same, because too few hold it), `only`, `none`, or the
            name of another policy.
        prefill: the replica that computes the prompt, if it is another one.
        home: the replica that served the session before.
    """

    replica: str | None
    estimates: tuple[CostEstimate, ...]
    reason: str
    prefill: str | None = None
    home: str | None = None

    @property
    def estimate(self) -> CostEstimate | None:
        """The estimate of the chosen replica."""
        return next((one for one in self.estimates if one.replica == self.replica and not one.excluded), None)

    @property
    def expected_cached(self) -> int:
        """Cached prompt tokens expected at the chosen replica."""
        return self.estimate.reused if self.estimate else 0

    def in_words(self) -> str:
        """The decision in one sentence."""
        estimate = self.estimate
        if self.replica is None or estimate is None:
            reasons = "; ".join(f"{one.replica}: {one.excluded}" for one in self.estimates[:_MAX_REASONS])
            more = len(self.estimates) - _MAX_REASONS
            reasons += f"; and {more} more" if more > 0 else ""
            return f"no replica takes requests: {reasons}" if reasons else "there is no replica"
        where = f"{self.replica} after {self.prefill}" if self.prefill else self.replica
        reason = "priced" if self.reason == "cheapest" and estimate.others else self.reason
        return f"{where}: {_REASONS.get(reason, reason)}, {estimate.in_words()}{self._runner_up()}"

    def _runner_up(self) -> str:
        available = [one for one in self.estimates if not one.excluded and one.replica != self.replica]
        other = min(available, key=_price, default=None) if len(available) != 1 else available[0]
        return f"; next {other.replica} at {other.in_words()}" if other else ""


class Policy(Protocol):
    """A placement policy. It may keep state, such as which replica is next, but does no I/O and reads no clock.

    Attributes:
        needs_all: it needs all replicas as candidates, also in a large fleet.
        needs_prompts: it uses the prompt's tokens.
    """

    name: str
    needs_all: bool
    needs_prompts: bool

    def choose(self, query: PlacementQuery, candidates: Sequence[Candidate], home: str | None = None) -> Decision:
        """`home` is the replica of the session's last request. Deterministic, given state and arguments."""


@dataclass(frozen=True, slots=True)
class SessionAffinity:
    """How much a session may pay to stay on its replica: at most the prefill seconds that it saves there, and at most `ratio`
    times the cheapest estimate plus `seconds`.

    The saving is part of the estimate already, so a session that stays may pay up to twice. That accounts for the work that
    replicas are spared, which would delay others, and for the memory of a second copy.

    Raises ConfigError if `ratio` is below 1 or `seconds` below 0.
    """

    seconds: float = 0.2
    ratio: float = 1.5

    def __post_init__(self) -> None:
        if not self.ratio >= 1 or not self.seconds >= 0:
            raise ConfigError(
                f"session affinity needs a ratio of at least 1 and seconds of at least 0, "
                f"not {self.ratio} and {self.seconds}"
            )

    def limit(self, cheapest: float, saved: float) -> float:
        """The highest estimate at which a session stays, if its replica saves it `saved` seconds of prefill."""
        return cheapest + min(max(saved, 0.0), cheapest * (self.ratio - 1) + self.seconds)


class CostPolicy:
    """The default policy, see the module's docstring.

    Args:
        tie: prices within this share of the lowest (plus 5 ms) count as equal.
    """

    name = "cost"
    needs_all = False
    needs_prompts = True

    def __init__(self, affinity: SessionAffinity | None = None, *, tie: float = 0.05) -> None:
        self.affinity = affinity or SessionAffinity()
        self.tie = tie
        self._popularity = PrefixPopularity()

    def choose(self, query: PlacementQuery, candidates: Sequence[Candidate], home: str | None = None) -> Decision:
        around = surroundings(candidates)
        estimates = tuple([estimate_cost(query, candidate, around) for candidate in candidates])
        usable = [(one, found) for one, found in zip(estimates, candidates, strict=True) if not one.excluded]
        if not usable:
            return Decision(None, estimates, "none", home=home)
        prices = {one.replica: one.price for one, _ in usable}
        cheapest = min(prices, key=prices.__getitem__)
        limit = self._tie_limit(prices[cheapest])
        if home in prices:
            prefill = {one.replica: one.prefill for one, _ in usable if one.replica in (home, cheapest)}
            stays = self.affinity.limit(prices[cheapest], prefill[cheapest] - prefill[home])
            if prices[home] <= max(stays, limit):
                return Decision(home, estimates, "session", home=home)
        longest = max([one.reused for one, _ in usable])
        # Later requests of a session say nothing about how common their prefix is.
        as_if = self._as_if_held(query, usable, longest, count=home is None)
        tied = least_loaded(self._tied(usable, prices, longest if as_if else 0))
        chosen = tied[0] if len(tied) == 1 else rendezvous(hash_key(query, candidates), tied)
        moved = home in prices and chosen != home
        dearer = prices[chosen] > limit
        reason = "only" if len(usable) == 1 else as_if if dearer else "moved" if moved else "cheapest"
        return Decision(chosen, estimates, reason, home=home)

    def _as_if_held(self, query: PlacementQuery, usable: Sequence[_Usable], longest: int, *, count: bool) -> str:
        """Why all candidates are compared as if they held the `longest` cached prefix; empty if they are not."""
        common = count and self._is_underreplicated(query, usable, longest)
        return "spread" if 2 * longest < query.tokens else "common" if common else ""

    def _tied(self, usable: Sequence[_Usable], prices: Mapping[str, float], held: int) -> list[_Usable]:
        """The candidates whose prices, by replica, count as equal to the lowest if all of them hold `held` tokens."""
        compared = [*prices.values()]
        if held:
            compared = [
                one.price - missing_seconds(one, found, held) * (1 + one.behind + one.slows) for one, found in usable
            ]
        limit = self._tie_limit(min(compared))
        return [pair for pair, price in zip(usable, compared, strict=True) if price <= limit]

    def _is_underreplicated(self, query: PlacementQuery, usable: Sequence[_Usable], tokens: int) -> bool:
        """Whether a larger share of prompts than of candidates has the first `tokens` tokens."""
        known = min(-(-tokens // query.block_size), len(query.keys))
        share = self._popularity.record(query.keys[known - 1] if known else None)
        holding = sum(found.stands_for for one, found in usable if one.reused >= tokens)
        return holding < math.ceil(share * sum(found.stands_for for _, found in usable))

    def _tie_limit(self, cheapest: float) -> float:
        return cheapest * (1 + self.tie) + _TIE_SECONDS


_Usable = tuple[CostEstimate, Candidate]


def missing_seconds(estimate: CostEstimate, candidate: Candidate, tokens: int) -> float:
    """Seconds that the candidate would save if the first `tokens` tokens of the prompt were on its device."""
    length = estimate.reused + estimate.computed
    return max(estimate.prefill - candidate.costs.compute(length - tokens, tokens), 0.0)


def least_loaded(tied: Sequence[_Usable]) -> list[str]:
    """The candidates with the least recent prompt work, this prompt included."""
    work = [found.recent_tokens * found.costs.prefill + one.prefill for one, found in tied]
    least = min(work)
    return [one.replica for (one, _), seconds in zip(tied, work, strict=True) if seconds == least]


class Surroundings(NamedTuple):
    """The state of all candidates together.

    Attributes:
        coming: how many requests will come to a replica before the queues are empty, see the module.
        wait: seconds that the prompts queued at a replica take, on average.
        shortest, following: seconds of the shortest queue and of the next one.
        filling: as in `Candidate`.
    """

    coming: float = 0.0
    wait: float = 0.0
    shortest: float = 0.0
    following: float = 0.0
    filling: float = 0.0


ALONE: Final = Surroundings()


def surroundings(candidates: Sequence[Candidate]) -> Surroundings:
    """The state of these candidates together."""
    if not sum([one.queued for one in candidates]):
        return ALONE
    weight = logarithms = wait = filling = 0.0
    queues: list[float] = []
    for one in candidates:
        if not one.excluded:
            weight, filling, seconds = weight + (like := one.stands_for), one.filling, 0.0
            if one.queued:
                logarithms += like * math.log1p(one.queued)
                seconds = one.costs.compute_pairs(one.queued_tokens, one.queued_pairs)
                wait += like * seconds
            queues.append(seconds)
            if like > 1:
                queues.append(seconds)
    if not logarithms:
        return ALONE
    queues.sort()
    return Surroundings(
        math.expm1(logarithms / weight), wait / weight, queues[0], queues[min(1, len(queues) - 1)], filling
    )


def estimate_cost(query: PlacementQuery, candidate: Candidate, around: Surroundings = ALONE) -> CostEstimate:
    """The expected TTFT of the request on this candidate, and what it costs others there."""
    # This is most of the time of a decision: positions are several times as fast as names, and calls cost the most.
    name, costs, reach, queued_tokens, queued, running, memory, block_size, excluded, queued_pairs, *_ = candidate
    if excluded:
        return CostEstimate(name, excluded=excluded)
    tokens, size = query.tokens, block_size or query.block_size
    cached, load, from_tiers = reach[0] * size, 0.0, _FROM_NOWHERE
    if reach[-1] > reach[0] or cached > tokens:
        blocks, parts, load = costs.best_load(reach, size, tokens)
        cached, from_tiers = blocks * size, tuple([part * size for part in parts])
    elif cached:
        from_tiers = (cached, 0, 0, 0)
    # The last token is computed even if the whole prompt is cached.
    computed = max(tokens - cached, 1)
    prefill, attention = costs.prefill, costs.attention
    queue = queued_tokens * prefill + queued_pairs * attention
    compute = prefill * computed + attention * pairs(computed, tokens - computed)
    to_come, wait, shortest, following, filling = around
    decoding, behind, ageing, coming = float(running), queued + to_come, 0.0, 0.0
    if queued:
        # When its turn comes, some of those that decode now have ended, and of those that wait now some decode.
        steps, output = queued_tokens / costs.step_tokens, candidate.output
        left = math.exp(-steps / output)
        decoding = running * left + (queued * (1 - left) * output / steps if steps else queued)
    if queue:
        age = queue / (wait + (prefill * tokens + attention * pairs(tokens, 0)))
        behind *= 1 + age * age
        ageing = queue * age * age / 3
    if queue < following and queue <= shortest:
        gap = following - queue
        left = max(gap - load - compute, 0.0)
        coming = filling * (gap * gap - left * left) / 2
    return CostEstimate(
        name,
        queue,
        memory - queue if memory > queue else 0.0,
        load,
        compute,
        costs.interference(queued_tokens + computed, running) if running else 0.0,
        costs.first,
        0.0,
        tokens - computed,
        computed,
        from_tiers,
        "",
        behind,
        candidate.decode_weight * decoding,
        ageing,
        coming,
    )


def hash_key(query: PlacementQuery, candidates: Sequence[Candidate]) -> bytes:
    """The hash that breaks ties: the session, else the first block that no candidate holds, else the last block."""
    if query.session is not None:
        return query.session.encode()
    if not query.keys:
        return b""
    known = max((candidate.reach[CacheTier.SHARED] for candidate in candidates), default=0)
    return query.keys[min(known, len(query.keys) - 1)]


def rendezvous(key: bytes, names: Sequence[str]) -> str:
    """Rendezvous hashing (Thaler and Ravishankar, 1998): removing a name only moves the keys that had chosen it."""
    return max(names, key=lambda name: (score(key, name), name))


def score(key: bytes, name: str) -> bytes:
    return blake2b(key, key=blake2b(name.encode(), digest_size=32).digest(), digest_size=8).digest()


class PrefixPopularity:
    """How common a prefix is among recent prompts: decayed counts of the last cached block of each prompt, about 200 bytes per
    block, of the newest `size` blocks."""

    def __init__(self, size: int = 1024) -> None:
        self._counts: Newest[bytes, tuple[float, int]] = Newest(size)
        self._prompts = 0
        self._total = 0.0

    def __len__(self) -> int:
        return len(self._counts)

    def record(self, key: bytes | None) -> float:
        """Count a prompt whose cached prefix ends with the block `key` (None: nothing is cached).

        Returns the share of recent prompts with this prefix, from 0 to 1. It is biased low while there are few prompts.
        """
        self._prompts += 1
        self._total = self._total * _DECAY + 1.0
        if key is None:
            return 0.0
        count, at = self._counts.get(key, (0.0, self._prompts))
        count = count * _DECAY ** (self._prompts - at) + 1.0
        self._counts[key] = count, self._prompts
        return (count - 1) / (self._total + _PRIOR_PROMPTS)
