"""Parts of the connector that only some users have, in `foreword.integrations.vllm_extras`: KV events of the tiers, the
portable layout, the usage ledger.

Each is imported where a setting asks for it. Without the extras such a setting is an error. KV events are a setting of vLLM:
they then say nothing of the tiers.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from foreword.errors import ConfigError
from foreword.plugins import of_product

if TYPE_CHECKING:
    from foreword.blocks.layout import BlockUnits
    from foreword.integrations.vllm_extras.interfaces import ChangeEvents, ChangeWatch, PortableLayout, UsageNotes
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


def portable_layout(layout: object, units: Mapping[str, object]) -> PortableLayout | None:
    """Read the settings `layout` and, those that are given, `unit_tokens` and `head_units`. None for the native layout. Raises
    ConfigError."""
    if layout == "native" and not units:
        return None
    read = part("portable:read", "layout, unit_tokens and head_units in kv_connector_extra_config need")
    found: PortableLayout | None = read(layout, units)
    return found


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


def usage_notes(path: str, config: Any) -> UsageNotes | None:
    """The ledger in a file; None for "". `config`: vLLM's. Raises ConfigError."""
    found: UsageNotes | None = check_usage(path)(path, config) if path else None
    return found


def check_usage(path: str) -> Any:
    """The ledger's class, if a file is given. Raises ConfigError where the extras are not installed."""
    return part("usage_notes:LedgerNotes", "usage_ledger in kv_connector_extra_config needs") if path else None
