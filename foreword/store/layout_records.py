"""Records that say what the blocks of a layout are: tools and other processes need them to tell a block's model."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from foreword.blocks.resume import GroupKind, KVGroup
from foreword.store.shared_records import RecordKind, SharedRecords
from foreword.store.tiered import OnFailure, TieredStore, raise_failure


class LayoutRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """The description of one layout. Its record is named after the layout's fingerprint.

    Attributes:
        model: its name.
        layout: `Layout.describe`.
        fingerprint: of the weights, hexadecimal; "" if it is not known.
        kind, span, sinks: see `KVGroup`.
        key_size: tokens per block key; 0: those of a block.
    """

    model: str
    layout: dict[str, Any]
    fingerprint: str = ""
    kind: GroupKind = GroupKind.FULL
    span: int = 0
    sinks: int = 0
    key_size: int = 0

    def __post_init__(self) -> None:
        if not (self.digest and self.group.block_size > 0):
            raise ValueError("the layout of no model")

    @property
    def digest(self) -> bytes:
        """The digest that names the model's KV."""
        return bytes.fromhex(self.layout["model"])

    @property
    def group(self) -> KVGroup:
        """The layers, and which blocks they need."""
        return KVGroup(self.kind, int(self.layout["block_size"]), self.span, self.sinks)


LAYOUTS: Final = RecordKind("layouts", LayoutRecord)


def layouts(store: TieredStore, failed: OnFailure = raise_failure) -> dict[bytes, LayoutRecord]:
    """The layouts described in a store, by fingerprint, without damaged records. `failed` is called for each tier, and each
    record, that cannot be read."""
    found = SharedRecords(store, LAYOUTS).scan(failed=failed, unread=failed)
    return {bytes.fromhex(key.rpartition("/")[2]): record for key, record in found.values.items()}
