"""The interface of rules by which a tier does not take every block, or gets blocks late.

The rules themselves are of another product (`store/tier_admission.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from foreword.store.base import Store

if TYPE_CHECKING:
    from foreword.store.tier import StoreTier


@dataclass(frozen=True, slots=True)
class BlockUse:
    """How blocks came to be offered to the tiers.

    Attributes:
        prompt: tokens of the request's prompt; None: unknown, and the blocks are taken for those of a long prompt.
        block_tokens: tokens of a block.
        again: the request has not computed the blocks: it found them on the device, or loaded them.
        promotion: the blocks were loaded from a slower tier, so they have been used again.
    """

    prompt: int | None = None
    block_tokens: int = 1
    again: bool = False
    promotion: bool = False


class TierRule(ABC):
    """The rule of which blocks a tier takes, and when.

    Attributes:
        hold: bytes that wait in a faster tier before the oldest are written to this one; 0: none wait.
    """

    hold: int

    @abstractmethod
    def at_once(self) -> TierRule:
        """This rule with no blocks that wait."""

    @abstractmethod
    def tier(self, store: Store, clock: Callable[[], float], *, writable: bool) -> StoreTier:
        """A tier that keeps to this rule. `clock`: in seconds."""
