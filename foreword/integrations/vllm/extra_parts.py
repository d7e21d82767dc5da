"""Interfaces of parts of the connector that only some users have, in `foreword.integrations.vllm_extras`: KV events of the
tiers, the portable layout, the usage ledger.

Each is imported where a setting asks for it. Without the extras such a setting is an error. KV events are a setting of vLLM:
they then say nothing of the tiers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

from foreword.errors import ConfigError
from foreword.plugins import of_product

if TYPE_CHECKING:
    from foreword.blocks.layout import BlockUnits, Layout
    from foreword.integrations.vllm.groups import ConnectorGroup
    from foreword.integrations.vllm.step_messages import TierChange
    from foreword.offload.frame_copies import PlaneGroup
    from foreword.store.tiered import TieredStore
    from foreword.store.types import Reach

logger = logging.getLogger(__name__)

_PACKAGE: Final = "foreword.integrations.vllm_extras"
_MISSING: Final = "the package foreword-vllm-extras beside foreword-vllm"


def part(place: str, what: str) -> Any:
    """`module:name` of the extras. Raises ConfigError, which says `what` needs them, where they are not installed."""
    found = of_product(f"{_PACKAGE}.{place}")
    if found is None:
        raise ConfigError(f"{what} {_MISSING}")
    return found


class PortableLayout(Protocol):
    """The portable layout of blocks, as the settings choose it. Calls raise ConfigError and ModelUnsupported.

    Attributes:
        tokens: of a unit.
    """

    tokens: int

    def divided(self, config: Any, group: ConnectorGroup, layout: Layout) -> BlockUnits:
        """The units of a group's blocks. `config`: vLLM's; `layout`: of one rank's blocks."""

    def staged(self, kv_caches: Mapping[str, Any], config: Any, group: ConnectorGroup, units: BlockUnits) -> PlaneGroup:
        """A group's layers for a staging arena of units."""


def portable_layout(layout: object, units: Mapping[str, object]) -> PortableLayout | None:
    """Read the settings `layout` and, those that are given, `unit_tokens` and `head_units`. None for the native layout. Raises
    ConfigError."""
    if layout == "native" and not units:
        return None
    read = part("portable:read", "layout, unit_tokens and head_units in kv_connector_extra_config need")
    found: PortableLayout | None = read(layout, units)
    return found


class ChangeWatch(Protocol):
    """Changes in the tiers of one rank's store."""

    @property
    def pending(self) -> bool:
        """Whether there are some."""

    def take(self) -> list[TierChange]:
        """Take the changes since the last call."""


class ChangeEvents(Protocol):
    """vLLM's KV events for the tiers.

    Attributes:
        hash_size: tokens per block hash of vLLM, which may be a part of a block.
    """

    hash_size: int

    def expect(self, request: Any, group: int, numbers: Sequence[int], keys: Sequence[bytes], before: bytes) -> None:
        """Blocks of a request, by their index in it, that a tier may store soon. `before`: the key before the first block."""

    def changed(self, changes: Iterable[TierChange]) -> None:
        """Publish the changes that complete a block in a tier, or make it incomplete."""

    def missing(self, group: int, key: bytes) -> None:
        """A lookup found this block in no tier: publish its removal if another process has evicted it."""

    def take(self) -> list[Any]:
        """Take the events since the last call."""


def tier_watch(store: TieredStore, units: Sequence[BlockUnits]) -> ChangeWatch | None:
    """Collect the changes in the tiers of one rank's store; None without the extras. `units`: how the rank's blocks divide, by
    KV group."""
    make = of_product(f"{_PACKAGE}.tier_events:TierWatch")
    return None if make is None else make(store, units)


def tier_events(
    tiers: Sequence[tuple[Reach, str]], parts: Sequence[int], block_sizes: Sequence[int]
) -> ChangeEvents | None:
    """KV events for these tiers; None and a warning without the extras.

    Args:
        tiers: reach and label of each tier.
        parts: of each KV group, how many layouts keep parts of a block: one per rank, or per head unit.
        block_sizes: tokens per block of each KV group.
    """
    make = of_product(f"{_PACKAGE}.tier_events:TierEvents")
    if make is None:
        logger.warning("Foreword: vLLM's KV events say nothing of the stores: that needs %s", _MISSING)
        return None
    found: ChangeEvents = make(tiers, parts, block_sizes)
    return found


class UsageNotes(Protocol):
    """The usage ledger: a line for each request that has ended."""

    def began(self, request: Any) -> None:
        """vLLM may admit a request."""

    def ended(self, request: Any, tiers: Mapping[str, int], weights: str) -> None:
        """A request has ended. `tiers`: loaded tokens by the label of their tier; `weights`: their fingerprint."""

    def close(self) -> None:
        """Write what is waiting."""


def usage_notes(path: str, config: Any) -> UsageNotes | None:
    """The ledger in a file; None for "". `config`: vLLM's. Raises ConfigError."""
    found: UsageNotes | None = check_usage(path)(path, config) if path else None
    return found


def check_usage(path: str) -> Any:
    """The ledger's class, if a file is given. Raises ConfigError where the extras are not installed."""
    return part("usage_notes:LedgerNotes", "usage_ledger in kv_connector_extra_config needs") if path else None
