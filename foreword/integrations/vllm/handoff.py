"""Hand-off of a computed prompt from one vLLM (prefill) to another (decode), with vLLM's own `kv_transfer_params`.

The prefill request has `{"do_remote_decode": true}`. The step that computes the end of its prompt leases its full blocks, so
other instances can read them before the answer is out. The answer says where they are:

    {"do_remote_prefill": true, "foreword": {"lease": ..., "addresses": [...], "tokens": 4096, ...}}

The decode request brings that along, and loads from there what neither vLLM nor its stores have.

The message passes through clients and proxies, so it is validated like any input. With a secret it is authenticated: a
client without the secret cannot direct this instance to an address.
"""

from __future__ import annotations

import hmac
import json
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from vllm.v1.request import RequestStatus

from foreword.blocks.keys import TokenChain
from foreword.errors import TransferRefused
from foreword.integrations.vllm.config import NULL_BLOCK, ConnectorSettings, KVCacheInfo
from foreword.integrations.vllm.step_messages import BlockLease, ForewordConnectorMetadata, KVProducer, LeaseRevocation

logger = logging.getLogger(__name__)

_VERSION = 1
_LEASE_BYTES = 16


class KVHandoff(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The message: the full blocks of a computed prompt, and where they are kept. Bytes are written in hexadecimal digits.

    Attributes:
        lease: id of the lease at the producer.
        addresses: of each rank.
        tokens: how many tokens of the prompt have KV there, a multiple of the block size.
        layouts: fingerprint of each rank's layout.
        last: key of the last block, which identifies the prompt.
    """

    version: int
    lease: str
    addresses: tuple[str, ...]
    tokens: int
    block_size: int
    layouts: tuple[str, ...]
    last: str
    proof: str = ""

    @property
    def producer(self) -> KVProducer:
        return KVProducer(bytes.fromhex(self.lease), self.addresses)

    def proof_with(self, secret: str) -> str:
        """Authenticates the message."""
        plain = msgspec.json.encode(msgspec.structs.replace(self, proof=""))
        return hmac.digest(secret.encode(), b"foreword/vllm/handoff" + plain, "sha256").hex()


@dataclass(frozen=True, slots=True)
class HandoffTerms:
    """What both instances must have in common: the layout of blocks, and the secret."""

    block_size: int
    layouts: tuple[bytes, ...]
    secret: str = field(repr=False)

    def write(self, lease: bytes, addresses: Sequence[str], tokens: int, last: bytes) -> dict[str, Any]:
        """The value of `kv_transfer_params["foreword"]`."""
        layouts = tuple(one.hex() for one in self.layouts)
        handoff = KVHandoff(_VERSION, lease.hex(), tuple(addresses), tokens, self.block_size, layouts, last.hex())
        found: dict[str, Any] = json.loads(msgspec.json.encode(handoff))
        return {**found, "proof": handoff.proof_with(self.secret)}

    def read(self, params: dict[str, Any]) -> KVHandoff:
        """The message of another instance. Raises TransferRefused if its blocks cannot be used here."""
        if "foreword" not in params:
            raise TransferRefused("the prefill instance did not say where its blocks are: it runs another KV connector")
        try:
            handoff = msgspec.convert(params["foreword"], KVHandoff)
            lease, last = bytes.fromhex(handoff.lease), bytes.fromhex(handoff.last)
        except (msgspec.ValidationError, ValueError) as error:
            raise TransferRefused(f"kv_transfer_params are not valid: {error}") from None
        if not hmac.compare_digest(handoff.proof.encode(), handoff.proof_with(self.secret).encode()):
            raise TransferRefused(
                "kv_transfer_params were written with another secret; give both the same transfer.secret_env"
            )
        if handoff.version != _VERSION or len(lease) != _LEASE_BYTES or len(last) != 32:
            raise TransferRefused(f"kv_transfer_params have version {handoff.version}; this instance reads {_VERSION}")
        if handoff.block_size != self.block_size:
            raise TransferRefused(
                f"the block size is {handoff.block_size} there and {self.block_size} here; start both with the same "
                "--block-size"
            )
        if len(handoff.addresses) != len(self.layouts) or len(handoff.layouts) != len(self.layouts):
            raise TransferRefused(
                f"there are {len(handoff.layouts)} ranks there and {len(self.layouts)} here; start both with the same "
                "--tensor-parallel-size"
            )
        if handoff.layouts != tuple(one.hex() for one in self.layouts):
            raise TransferRefused("the blocks have another layout there, or another model (weights, dtype, vLLM)")
        return handoff


@dataclass(slots=True)
class _LeasedBlocks:
    """Blocks of a request that other instances may read: block `first` of its chain and those after it."""

    lease: bytes
    first: int
    blocks: list[int] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.first + len(self.blocks)


class HandoffScheduler:
    """The scheduler side of hand-offs, in both directions. Called from the engine's thread only."""

    def __init__(self, info: KVCacheInfo, settings: ConnectorSettings) -> None:
        layouts = tuple(info.layout(rank).fingerprint for rank in range(info.ranks))
        secret = (settings.transfer.secret if settings.transfer is not None else None) or ""
        self._terms = HandoffTerms(info.block_size, layouts, secret)
        self._size = info.block_size
        self._settings = settings
        self._addresses: tuple[str, ...] = ()
        # As producer: requests that run with leased blocks, and requests that have ended and whose blocks are kept.
        self._leased: dict[str, _LeasedBlocks] = {}
        self._kept: set[str] = set()
        # As consumer: what each request brought along, until it is used.
        self._received: dict[str, KVHandoff | None] = {}
        # For the workers, with the next step.
        self._leases: list[BlockLease] = []
        self._revoked: list[LeaseRevocation] = []
        self._released: list[KVProducer] = []

    def set_workers(self, addresses: Mapping[int, str]) -> None:
        """Where each rank's worker listens for other instances."""
        found = tuple(addresses.get(rank, "") for rank in range(len(self._terms.layouts)))
        self._addresses = found if all(found) else ()

    def fill(self, metadata: ForewordConnectorMetadata) -> None:
        """Add the instructions for the workers."""
        metadata.leases, self._leases = self._leases, []
        metadata.revoked, self._revoked = self._revoked, []
        metadata.released, self._released = self._released, []

    # As consumer (decode)

    def blocks(self, request: Any, chain: TokenChain | None) -> int:
        """How many leading blocks of the request's prompt another instance keeps for it."""
        if request.request_id not in self._received:
            params = request.kv_transfer_params or {}
            self._received[request.request_id] = self._read(params, chain) if params.get("do_remote_prefill") else None
        handoff = self._received[request.request_id]
        return max(handoff.tokens, 0) // self._size if handoff is not None else 0

    def _read(self, params: dict[str, Any], chain: TokenChain | None) -> KVHandoff | None:
        try:
            if not self._settings.consumes:
                raise TransferRefused(
                    "this instance loads from no other: it needs transfer in kv_connector_extra_config, or the kv_role "
                    "kv_consumer"
                )
            handoff = self._terms.read(params)
            self._check_prompt(handoff, chain)
        except TransferRefused as error:
            logger.warning("Foreword: a prompt is recomputed instead of loaded from its producer: %s", error.message)
            return None
        return handoff

    def _check_prompt(self, handoff: KVHandoff, chain: TokenChain | None) -> None:
        count = handoff.tokens // self._size
        if chain is None or not 0 < count <= len(chain) // self._size:
            return
        if chain.keys_to(count)[-1].hex() != handoff.last:
            raise TransferRefused("the prefill instance computed another prompt (tokens, cache_salt), or was reset")

    def take(self, request_id: str) -> KVProducer | None:
        """The producer that keeps blocks for this request. Works once; the caller must end the lease."""
        handoff = self._received.get(request_id)
        if handoff is None:
            return None
        self._received[request_id] = None
        return handoff.producer

    def release(self, request: Any) -> None:
        """The request needs no block of its producer."""
        self.blocks(request, None)
        producer = self.take(request.request_id)
        if producer is not None:
            self._released.append(producer)

    # As producer (prefill)

    def computed(self, request: Any, chain: TokenChain, tokens: int, blocks: Sequence[int]) -> None:
        """This step brings a request to `tokens` tokens with KV."""
        params = request.kv_transfer_params or {}
        if not params.get("do_remote_decode") or tokens < request.num_prompt_tokens:
            return
        if not self._settings.produces or not self._addresses:
            logger.warning(
                "Foreword: no blocks are kept for a decode instance: this one needs transfer in "
                "kv_connector_extra_config, or the kv_role kv_producer"
            )
            return
        leased = self._leased.get(request.request_id)
        if leased is None:
            first = next((i for i, block in enumerate(blocks) if block != NULL_BLOCK), len(blocks))
            leased = _LeasedBlocks(os.urandom(_LEASE_BYTES), first)
        start, full = leased.end, tokens // self._size
        if start < full:
            self._leased[request.request_id] = leased
            leased.blocks += blocks[start:full]
            keys, parent = tuple(chain.keys_to(full)[start:full]), chain.key_before(start)
            new = BlockLease(keys, parent, start, tuple(blocks[start:full]), request.request_id, leased.lease)
            self._leases.append(new)

    def revoke(self, request_ids: Iterable[str]) -> None:
        """Requests that lose their blocks, or whose blocks must not be read any more."""
        for request_id in request_ids:
            if self._leased.pop(request_id, None) is not None:
                self._revoked.append(LeaseRevocation(request_id))

    def finished(self, request: Any, chain: TokenChain | None, blocks: Sequence[int]) -> dict[str, Any] | None:
        """A request has ended. Returns `kv_transfer_params` for the decode instance; vLLM then keeps the blocks until the
        workers report them as sent. None: vLLM frees them."""
        request_id = request.request_id
        self.release(request)
        del self._received[request_id]
        leased = self._leased.get(request_id)
        if leased is None or chain is None:
            return None
        present = blocks[: leased.end]
        low = next((i for i, block in enumerate(present) if block != NULL_BLOCK), len(present))
        ended = request.status in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
        unchanged = low < leased.end == len(present) and present[low:] == leased.blocks[max(low - leased.first, 0) :]
        if not ended or not unchanged:
            self.revoke([request_id])
            return None
        if low > leased.first:  # vLLM has taken back the blocks behind a sliding window
            self._revoked.append(LeaseRevocation(request_id, low, ends=False))
        del self._leased[request_id]
        self._kept.add(request_id)
        last = chain.keys_to(leased.end)[-1]
        handoff = self._terms.write(leased.lease, self._addresses, leased.end * self._size, last)
        return {"do_remote_prefill": True, "do_remote_decode": False, "foreword": handoff}

    def sent(self, request_ids: Iterable[str]) -> None:
        """Requests whose blocks vLLM has taken back."""
        self._kept.difference_update(request_ids)

    def reset(self) -> None:
        """No KV that was computed so far may be read any more."""
        self.revoke(list(self._leased))
        self._revoked += [LeaseRevocation(request_id, ends=False) for request_id in self._kept]
