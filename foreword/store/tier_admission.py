"""Admission: which blocks a tier of a tiered store takes, by their use and by a rate of writes.

A block is decided about when it is computed, and again when a later request uses it from the device: a tier that takes blocks
at their second use gets them then. A block behind one that was refused is refused too, since no lookup would find it.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from foreword.errors import StoreConfigError, StoreTimeout
from foreword.store.base import Name, Store
from foreword.store.deferred_writes import DeferredWrites
from foreword.store.frame import HEADER_BYTES, Frame, Header
from foreword.store.tier import StoreTier
from foreword.store.tier_counters import TierState
from foreword.store.tier_rules import BlockUse, TierRule

RULES: Final = ("every", "second", "prompts")
_REMEMBERED: Final = 1 << 18  # blocks of a generation, of which there are two: at most about 50 MB per tier
_DEFERRED_BLOCKS: Final = 32  # of what is deferred, read and written together


@dataclass(frozen=True, slots=True)
class AdmissionRule(TierRule):
    """The rule of which blocks a tier takes.

    Attributes:
        admit: "every" block; a block at its "second" use; or blocks of "prompts", not those of answers.
        min_tokens: blocks of requests whose prompts have at least this number of tokens.
        write_rate: bytes per second, with bursts of one second; 0: no limit. What exceeds it is not written.
        hold: bytes that wait in a faster tier before the oldest are written here (`deferred_writes.py`).

    Raises StoreConfigError.
    """

    admit: str = "every"
    min_tokens: int = 0
    write_rate: int = 0
    hold: int = 0

    def __post_init__(self) -> None:
        if self.admit not in RULES:
            raise StoreConfigError(f"admit is one of {', '.join(RULES)}, not {self.admit!r}")
        if self.min_tokens < 0 or self.write_rate < 0 or self.hold < 0:
            raise StoreConfigError("min_tokens, write_rate and hold are 0 or more")

    def at_once(self) -> AdmissionRule:
        return replace(self, hold=0)

    def tier(self, store: Store, clock: Callable[[], float] = time.monotonic, *, writable: bool = True) -> RuledTier:
        return RuledTier(self, store, clock, writable=writable)


class TierAdmission:
    """Decides for one tier, and remembers what it decided for recent blocks. Not thread-safe: the tier's lock guards it.

    Attributes:
        refused: number of blocks by reason: `first_use`, `answer`, `short`, `rate`, `gap` (behind a refused block), `unneeded`
            (`DeferredWrites`) and `gone` (no faster tier had it any more when it was its turn).
    """

    def __init__(self, rule: AdmissionRule, clock: Callable[[], float] = time.monotonic) -> None:
        self.rule = rule
        self.refused: Counter[str] = Counter()
        self._clock = clock
        # Whether a block was admitted, by the hash of its name. A wrong entry costs a block its place in this tier.
        self._recent: dict[int, bool] = {}
        self._older: dict[int, bool] = {}
        self._left = float(rule.write_rate)
        self._at = clock()

    def has(self, name: Name) -> bool:
        """Whether this block is remembered as admitted. The blocks before it in its chain were too."""
        return bool(self._known(hash(name)))

    def choose(self, headers: Sequence[Header], use: BlockUse) -> list[bool]:
        """Choose the blocks, in chain order, that the tier takes."""
        refused: set[int] = set()
        return [self._admits(header, use, refused) for header in headers]

    def _admits(self, header: Header, use: BlockUse, refused: set[int]) -> bool:
        key, parent = hash(header.name), hash(header.parent_name)
        known = self._known(key)
        if known and use.again:  # the tier has got it already
            return False
        # Blocks between the given ones of a chain that is used again have left a window: they are not needed.
        behind_gap = parent in refused or (not use.again and self._known(parent) is False)
        reason = self._reason(header, use, seen=known is not None) or ("gap" if behind_gap else self._over_rate(header))
        self._remember(key, not reason)
        if reason:
            refused.add(key)
            self.refused[reason] += 1
        return not reason

    def _reason(self, header: Header, use: BlockUse, *, seen: bool) -> str:
        """Why the rule for uses refuses a block; "" if it does not."""
        rule, end = self.rule, (header.depth + 1) * use.block_tokens
        if use.promotion:
            return ""
        if rule.admit == "second" and not seen and not use.again:
            return "first_use"
        if use.prompt is not None and use.prompt < rule.min_tokens:
            return "short"
        return "answer" if rule.admit == "prompts" and use.prompt is not None and end > use.prompt else ""

    def _over_rate(self, header: Header) -> str:
        """Take a block's bytes from the token bucket. It may be larger than what is left; then later ones wait longer."""
        rate = self.rule.write_rate
        if not rate:
            return ""
        now = self._clock()
        self._left = min(self._left + (now - self._at) * rate, float(rate))
        self._at = now
        if self._left <= 0:
            return "rate"
        self._left -= HEADER_BYTES + header.length
        return ""

    def _known(self, key: int) -> bool | None:
        known = self._recent.get(key)
        return self._older.get(key) if known is None else known

    def _remember(self, key: int, admitted: bool) -> None:
        self._recent[key] = admitted
        if len(self._recent) >= _REMEMBERED:
            self._older, self._recent = self._recent, {}


class RuledTier(StoreTier):
    """A tier that takes those blocks that its rule admits. With `hold`, it gets them late, from the faster tiers.

    Attributes:
        admission: what decides about blocks.
        deferred: blocks that are not written yet.
    """

    def __init__(self, rule: AdmissionRule, store: Store, clock: Callable[[], float], *, writable: bool) -> None:
        super().__init__(store, clock, writable=writable)
        self.admission = TierAdmission(rule, clock)
        self.deferred = DeferredWrites(rule.hold, self.admission.refused)
        self.counters.refused = self.admission.refused
        self.selective, self.defers = True, bool(rule.hold)

    def after_fork(self) -> None:
        super().after_fork()
        self._writing_deferred = threading.Lock()

    @property
    def state(self) -> TierState:
        found = super().state
        return TierState.HOLDING if found is TierState.OK and len(self.deferred) else found

    def admits(self, headers: Sequence[Header], use: BlockUse) -> list[bool]:
        with self._threads.lock:
            return self.admission.choose(headers, use)

    def takes_again(self, name: Name) -> bool:
        return not self.admission.has(name)

    def put(self, frames: Sequence[Frame], deadline: float, *, wait: bool = True) -> int:
        if not self.defers:
            return super().put(frames, deadline, wait=wait)
        with self._writing_deferred:
            self.deferred.add(frames)
        self.write_deferred(deadline)
        return 0

    def write_deferred(self, deadline: float, *, everything: bool = False) -> None:
        more = self.defers
        while more and self._writing_deferred.acquire(timeout=max(deadline - time.monotonic(), 0.0)):
            try:
                more = self._write_oldest(deadline, everything)
            finally:
                self._writing_deferred.release()

    def _write_oldest(self, deadline: float, everything: bool) -> bool:
        names, found = self.deferred.take(_DEFERRED_BLOCKS, everything=everything), dict[Name, Frame]()
        for tier in self.faster:
            missing = [name for name in names if name not in found]
            buffers = [memoryview(bytearray(names[name])) for name in missing]
            frames = tier.get(missing, buffers, deadline) if missing else ()
            found.update((frame.name, frame) for frame in frames if frame is not None)
        if len(found) < len(names):
            self.counters.refused["gone"] += len(names) - len(found)
        if found:
            super().put([found[name] for name in names if name in found], deadline, wait=not everything)
        return bool(names)

    def drop_deferred(self, chosen: Callable[[Name], bool], deadline: float) -> None:
        if not self.defers:
            return
        if not self._writing_deferred.acquire(timeout=max(deadline - time.monotonic(), 0.0)):
            raise StoreTimeout(f"{self.label}: blocks that were deferred are still being written")
        self.deferred.drop(chosen)
        self._writing_deferred.release()
