"""Parts that the extras add to the connector's messages of a step (`foreword.integrations.vllm.step_messages`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from foreword.integrations.vllm.step_messages import BlockSave


@dataclass(frozen=True, slots=True)
class KVProducer:
    """Another instance that keeps a request's blocks: the lease's id, and the address of each rank."""

    lease: bytes
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BlockLease:
    """Blocks of a request that this step computes and that are to be kept for another instance. `held` stay where they are;
    `copied`, which vLLM may change before the lease ends, are copied."""

    request_id: str
    lease: bytes
    held: tuple[BlockSave, ...]
    copied: tuple[BlockSave, ...]


@dataclass(frozen=True, slots=True)
class RetiredBlocks:
    """Blocks of a tenant, given its digest, that nothing continues. `drop`: no tier keeps them, if nothing else needs them."""

    tenant: str
    root: bytes
    keys: tuple[bytes, ...]
    drop: bool
