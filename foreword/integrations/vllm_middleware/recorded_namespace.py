"""The namespace that a server's engine has recorded, for the process that answers requests."""

from __future__ import annotations

from foreword.integrations.vllm.namespace import NAMESPACES, folder_of, records_at
from foreword.store.tiered import TieredStore


def recorded(store: TieredStore, base: bytes, settings: str, engine: str = "") -> bytes | None:
    """The namespace of the server with these settings, as its engine has recorded it; None if there is no record. `engine`: as
    in `engine_of`."""
    records, _ = records_at(store, NAMESPACES.key(folder_of(base), "") + f"{settings[:32]}-", "")
    own = [one for one in records if one.measured or one.resolved.get("engine") in ("", engine)]
    latest = max(own, key=lambda one: one.started, default=None)
    return bytes.fromhex(latest.namespace) if latest is not None else None
