"""Where a request goes: the cheapest of the expected times to first token, and the reason in words. Pure.

For each candidate

    queue    tokens computed there before it
    memory   waiting until others give room, where the replica's KV memory is known and full
    load     blocks that come from slower tiers, as far as that is sooner than computing them
    compute  the tokens that are left
    decode   what the sequences that decode there add
    first    what every request takes there

A session stays where it was if its home saves it what that costs more than the cheapest (`Stickiness`).

A prefix that everyone has draws no one: it makes all cheaper by the same. One that only some have draws whoever has little
of his own (a question about a document). But there are two cases in which it must not draw, and all candidates are compared
as if they had what one of them has:

- What is mostly new, such as the first request of a session behind a system prompt that all sessions share: the others would
  have that beginning, too, after one such request, and the session stays for many. Preble (Srivatsa et al., 2024) draws the
  line between going to the prefix and going to where there is least to do at the same place: half of the prompt.
- What is common to so many prompts that it should lie on more replicas than it does: a beginning that two thirds of the
  prompts have, on two of three (`Beginnings`). Else all would queue for the first that had it.

Among candidates whose costs are nearly equal decides what was sent there of late, and then a hash of the prompt's own prefix
and the replica's name (rendezvous hashing).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final, Protocol

from foreword.errors import ConfigError
from foreword.routing.common_prefixes import Beginnings
from foreword.routing.costs import ReplicaCosts
from foreword.routing.directory import NOTHING, Reach, Tier

_TIER_WORDS: Final = ("device", "host memory", "disk", "the shared store")


@dataclass(frozen=True, slots=True)
class Query:
    """A request to be placed.

    Attributes:
        keys: of the prompt's full blocks, in order.
        tokens: length of the prompt.
        block_size: tokens per block.
        session: whatever says that requests belong together; None if nothing does.
        max_output: tokens that it may generate, if it says so.
        other_keys: the keys with other block sizes, for replicas that have those.
    """

    keys: Sequence[bytes]
    tokens: int
    block_size: int
    session: str | None = None
    max_output: int | None = None
    other_keys: Mapping[int, Sequence[bytes]] = field(default_factory=dict)

    def keys_at(self, block_size: int) -> Sequence[bytes]:
        """Keys with this block size; none if they were not given."""
        return self.keys if block_size == self.block_size else self.other_keys.get(block_size, ())


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica as it stands now.

    Attributes:
        reach: leading blocks of the prompt that it finds in its tiers 0 to t.
        queued_tokens: tokens of prompts sent there that are not computed yet; `queued_pairs` of them with tokens before them.
        queued, running: requests before and after their first token.
        memory_wait: seconds until there is room for the prompt.
        block_size: tokens per block of `reach`, where it differs from the query's.
        excluded: why it takes no requests; empty if it does.
        recent_tokens: of prompts that were sent there in the last minutes, whether they were cached or not.
    """

    name: str
    costs: ReplicaCosts = field(default_factory=ReplicaCosts)
    reach: Reach = NOTHING
    queued_tokens: float = 0.0
    queued: int = 0
    running: int = 0
    memory_wait: float = 0.0
    block_size: int | None = None
    excluded: str = ""
    queued_pairs: float = 0.0
    recent_tokens: float = 0.0


@dataclass(frozen=True, slots=True)
class Price:
    """The expected seconds to the first token on one candidate, in parts, and the tokens behind them.

    Attributes:
        reused: tokens that need not be computed; `from_tiers` says where they lie.
        transfer: KV that comes from the prefilling replica.
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
    from_tiers: tuple[int, ...] = (0, 0, 0, 0)
    excluded: str = ""

    @property
    def total(self) -> float:
        return self.queue + self.memory + self.load + self.compute + self.decode + self.first + self.transfer

    @property
    def prefill(self) -> float:
        """Seconds of its own: computing and loading."""
        return self.load + self.compute

    def in_words(self) -> str:
        """Such as `0.42 s (0.10 queued, 0.30 computing 1536 of 9728 tokens, 0.02 loading 8192 from disk)`."""
        if self.excluded:
            return self.excluded
        tiers = [(tokens, word) for tokens, word in zip(self.from_tiers[1:], _TIER_WORDS[1:], strict=True) if tokens]
        source = " and ".join(f"{tokens} from {word}" for tokens, word in tiers)
        length = self.computed + self.reused
        parts = [
            (self.queue, "queued"),
            (self.memory, "waiting for memory"),
            (self.load, f"loading {source}"),
            (self.transfer, "sending the KV over"),
            (self.compute, f"computing {self.computed} of {length} tokens"),
            (self.decode, "for others that decode"),
        ]
        said = ", ".join(f"{seconds:.2f} {word}" for seconds, word in parts if seconds >= 0.005)
        return f"{self.total:.2f} s" + (f" ({said})" if said else "")


@dataclass(frozen=True, slots=True)
class Decision:
    """Where a request goes.

    Attributes:
        replica: its name; None if no candidate takes requests.
        prices: of every candidate that was considered, in the order given.
        reason: one word: `cheapest`, `session` (stayed), `moved` (left its session's replica), `spread` (where least was
            sent of late, though others have its beginning), `only`, `none`, or the name of another policy.
        prefill: the replica that computes the prompt, where that is another one.
        home: the replica where the session was.
    """

    replica: str | None
    prices: tuple[Price, ...]
    reason: str
    prefill: str | None = None
    home: str | None = None

    @property
    def price(self) -> Price | None:
        """What is expected where the request goes."""
        return next((price for price in self.prices if price.replica == self.replica and not price.excluded), None)

    @property
    def expected_cached(self) -> int:
        """Prompt tokens that should be found there."""
        return self.price.reused if self.price else 0

    def in_words(self) -> str:
        """One sentence that explains the decision."""
        if self.replica is None or self.price is None:
            reasons = "; ".join(f"{price.replica}: {price.excluded}" for price in self.prices)
            return f"no replica takes requests: {reasons}" if reasons else "there is no replica"
        where = f"{self.replica} after {self.prefill}" if self.prefill else self.replica
        return f"{where}: {_REASONS.get(self.reason, self.reason)}, {self.price.in_words()}{self._next_in_words()}"

    def _next_in_words(self) -> str:
        open_prices = (price for price in self.prices if not price.excluded and price.replica != self.replica)
        other = min(open_prices, key=lambda price: price.total, default=None)
        return f"; next {other.replica} at {other.in_words()}" if other else ""


_REASONS: Final = {
    "cheapest": "soonest first token",
    "session": "its session is there",
    "moved": "its session was elsewhere, where waiting costs too much",
    "spread": "least was sent there of late, and what others have of it does not draw it",
    "only": "the only one that takes requests",
}


class Policy(Protocol):
    """Decides. A policy may keep state of its own, such as whose turn it is; it does no I/O and asks no clock."""

    name: str

    def choose(self, query: Query, candidates: Sequence[Candidate], home: str | None = None) -> Decision:
        """`home` is where the session's last request went. Same state and arguments, same decision."""


@dataclass(frozen=True, slots=True)
class Stickiness:
    """How much more than the cheapest a session may pay to stay: what its home saves it, and never more than `ratio` times the
    cheapest and `seconds` on top.

    What it saves is in the price already. So a session that stays pays up to twice: for work that its replicas are spared,
    which would hold up others, and for memory that a second copy of it would take.

    Raises ConfigError if `ratio` is below 1 or `seconds` below 0.
    """

    seconds: float = 0.2
    ratio: float = 1.5

    def __post_init__(self) -> None:
        if not self.ratio >= 1 or not self.seconds >= 0:
            raise ConfigError(
                f"a session's price of staying needs a ratio of at least 1 and seconds of at least 0, "
                f"not {self.ratio} and {self.seconds}"
            )

    def limit(self, cheapest: float, saved: float) -> float:
        """Up to what price a session stays, if its home saves it `saved` seconds of computing and loading."""
        return cheapest + min(max(saved, 0.0), cheapest * (self.ratio - 1) + self.seconds)


class CheapestFirstToken:
    """The policy of this project: see the top of the module.

    Args:
        stickiness: of sessions.
        tie: candidates within this share of the cheapest (and 5 ms) count as equal.
    """

    name = "cost"

    def __init__(self, stickiness: Stickiness | None = None, *, tie: float = 0.05) -> None:
        self.stickiness = stickiness or Stickiness()
        self.tie = tie
        self._beginnings = Beginnings()

    def choose(self, query: Query, candidates: Sequence[Candidate], home: str | None = None) -> Decision:
        prices = tuple(price(query, candidate) for candidate in candidates)
        usable = {one.replica: (one, found) for one, found in zip(prices, candidates, strict=True) if not one.excluded}
        if not usable:
            return Decision(None, prices, "none", home=home)
        cheapest = min((one for one, _ in usable.values()), key=lambda one: one.total)
        if home in usable:
            at_home = usable[home][0]
            limit = self.stickiness.limit(cheapest.total, cheapest.prefill - at_home.prefill)
            if at_home.total <= max(limit, self._nearly(cheapest.total)):
                return Decision(home, prices, "session", home=home)
        # A session that is somewhere says nothing about what prompts begin with.
        equals = self._equals(query, [*usable.values()], count=home is None)
        chosen = rendezvous(affinity(query, candidates), least_work(equals))
        dearer = usable[chosen][0].total > self._nearly(cheapest.total)
        reason = "only" if len(usable) == 1 else "moved" if home in usable else "spread" if dearer else "cheapest"
        return Decision(chosen, prices, reason, home=home)

    def _equals(self, query: Query, usable: Sequence[_Usable], *, count: bool) -> list[_Usable]:
        """Those that are nearly as cheap as the cheapest."""
        most = max(one.reused for one, _ in usable)
        spreads = (count and self._is_scarce(query, usable, most)) or 2 * most < query.tokens
        totals = [one.total - (missing(one, found, most) if spreads else 0.0) for one, found in usable]
        limit = self._nearly(min(totals))
        return [pair for pair, total in zip(usable, totals, strict=True) if total <= limit]

    def _is_scarce(self, query: Query, usable: Sequence[_Usable], most: int) -> bool:
        """Whether the first `most` tokens are common to a larger share of the prompts than of the candidates."""
        known = min(-(-most // query.block_size), len(query.keys))
        share = self._beginnings.share(query.keys[known - 1] if known else None)
        return sum(one.reused >= most for one, _ in usable) < math.ceil(share * len(usable))

    def _nearly(self, cheapest: float) -> float:
        return cheapest * (1 + self.tie) + _TIE_SECONDS


_TIE_SECONDS: Final = 0.005
_Usable = tuple[Price, Candidate]


def missing(one: Price, candidate: Candidate, tokens: int) -> float:
    """Seconds that this candidate would save if it had the first `tokens` tokens of the prompt on its device."""
    length = one.reused + one.computed
    return max(one.prefill - candidate.costs.compute(length - tokens, tokens), 0.0)


def least_work(equals: Sequence[_Usable]) -> list[str]:
    """Where what was sent of late and this prompt together take the least time to compute."""
    work = [found.recent_tokens * found.costs.prefill + one.prefill for one, found in equals]
    return [one.replica for (one, _), seconds in zip(equals, work, strict=True) if seconds == min(work)]


def price(query: Query, candidate: Candidate) -> Price:
    """What the request would wait for on this candidate."""
    if candidate.excluded:
        return Price(candidate.name, excluded=candidate.excluded)
    costs, size = candidate.costs, candidate.block_size or query.block_size
    blocks, parts, load = costs.best_load(candidate.reach, size, query.tokens)
    # A prompt that is there to its end computes its last token again.
    computed = max(query.tokens - blocks * size, 1)
    queue = candidate.queued_tokens * costs.prefill + candidate.queued_pairs * costs.attention
    return Price(
        candidate.name,
        queue=queue,
        memory=max(candidate.memory_wait - queue, 0.0),
        load=load,
        compute=costs.compute(computed, query.tokens - computed),
        decode=costs.interference(candidate.queued_tokens + computed, candidate.running),
        first=costs.first,
        reused=query.tokens - computed,
        computed=computed,
        from_tiers=tuple(part * size for part in parts),
    )


def affinity(query: Query, candidates: Sequence[Candidate]) -> bytes:
    """What decides between equals: the session, else the first block that no candidate has, else the prompt's last one."""
    if query.session is not None:
        return query.session.encode()
    if not query.keys:
        return b""
    known = max((candidate.reach[Tier.SHARED] for candidate in candidates), default=0)
    return query.keys[min(known, len(query.keys) - 1)]


def rendezvous(key: bytes, names: Sequence[str]) -> str:
    """The name whose hash with the key is highest: when a name goes, only what had chosen it moves
    (Thaler and Ravishankar, 1998)."""
    return max(names, key=lambda name: (score(key, name), name))


def score(key: bytes, name: str) -> bytes:
    return blake2b(key, key=blake2b(name.encode(), digest_size=32).digest(), digest_size=8).digest()
