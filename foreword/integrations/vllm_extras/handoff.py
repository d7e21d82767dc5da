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
from foreword.decoders import convert
from foreword.integrations.vllm.connector_config import NULL_BLOCK, ConnectorSettings, KVCacheInfo
from foreword.integrations.vllm.connector_extras import Handoffs
from foreword.integrations.vllm.request_state import BlockIds, RequestState
from foreword.integrations.vllm.step_messages import BlockSave, ForewordConnectorMetadata, LeaseRevocation
from foreword.integrations.vllm_extras.step_parts import BlockLease, KVProducer
from foreword.transfer.errors import TransferRefused
from foreword.transfer_config import ALL_RIGHTS

logger = logging.getLogger(__name__)

_VERSION = 1
_LEASE_BYTES = 16


class KVHandoff(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The message: the full blocks of a computed prompt, and where they are kept. Bytes are written in hexadecimal digits.

    Attributes:
        lease: id of the lease at the producer.
        addresses: of each rank.
        tokens: position from which a request can continue with what is kept there.
        block_size: tokens per block key.
        layouts: fingerprints of each rank's layouts.
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
    """Terms that both instances must share: the layout of blocks, and a secret. The first authenticates messages."""

    block_size: int
    layouts: tuple[bytes, ...]
    secrets: tuple[str, ...] = field(repr=False)

    def write(self, lease: bytes, addresses: Sequence[str], tokens: int, last: bytes) -> dict[str, Any]:
        """The value of `kv_transfer_params["foreword"]`."""
        layouts = tuple(one.hex() for one in self.layouts)
        handoff = KVHandoff(_VERSION, lease.hex(), tuple(addresses), tokens, self.block_size, layouts, last.hex())
        found: dict[str, Any] = json.loads(msgspec.json.encode(handoff))
        return {**found, "proof": handoff.proof_with(self.secrets[0])}

    def read(self, params: dict[str, Any]) -> KVHandoff:
        """The message of another instance. Raises TransferRefused if its blocks cannot be used here."""
        if "foreword" not in params:
            raise TransferRefused("the prefill instance did not say where its blocks are: it runs another KV connector")
        try:
            handoff = convert(params["foreword"], KVHandoff)
            lease, last, proof = bytes.fromhex(handoff.lease), bytes.fromhex(handoff.last), handoff.proof.encode()
            proofs = [handoff.proof_with(secret).encode() for secret in self.secrets]
        except (msgspec.ValidationError, ValueError) as error:  # half characters, too: a message in JSON may have them
            raise TransferRefused(f"kv_transfer_params are not valid: {error}") from None
        if not any(hmac.compare_digest(proof, one) for one in proofs):
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
class _Leased:
    """Blocks that a request leases to other instances.

    Attributes:
        position: from which they can continue.
        copied: by group, the blocks that are copied already.
        held: by group, the ids of the blocks that stay where they are, from the start of the prompt.
        announced: the workers have the lease.
    """

    lease: bytes
    position: int
    copied: set[tuple[int, int]] = field(default_factory=set)
    held: dict[int, list[int]] = field(default_factory=dict)
    announced: bool = False


class HandoffScheduler(Handoffs):
    """The scheduler side of hand-offs, in both directions. Called from the engine's thread only."""

    def __init__(self, info: KVCacheInfo, settings: ConnectorSettings) -> None:
        super().__init__()
        self._info = info
        layouts = tuple(b"".join(rank) for rank in info.fingerprints())
        known = settings.transfer.shared_secrets() if settings.transfer is not None else ()
        secrets = tuple(secret.text for secret in known if secret.rights == ALL_RIGHTS) or ("",)
        self._terms = HandoffTerms(info.key_size, layouts, secrets)
        self._settings = settings
        self._addresses: tuple[str, ...] = ()
        # As producer: requests that run with leased blocks, and requests that have ended and whose blocks are kept.
        self._leased: dict[str, _Leased] = {}
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

    @property
    def tells(self) -> bool:  # type: ignore[override]
        """Whether there are instructions for the workers."""
        return bool(self._leases or self._revoked or self._released)

    def fill(self, metadata: ForewordConnectorMetadata) -> None:
        """Add the instructions for the workers."""
        metadata.leases, self._leases = self._leases, []
        metadata.revoked, self._revoked = self._revoked, []
        metadata.released, self._released = self._released, []

    # As consumer (decode)

    def tokens(self, request: Any, chain: TokenChain | None) -> int:
        """The position up to which another instance keeps what this request needs."""
        if request.request_id not in self._received:
            params = request.kv_transfer_params or {}
            self._received[request.request_id] = self._read(params, chain) if params.get("do_remote_prefill") else None
        handoff = self._received[request.request_id]
        return max(handoff.tokens, 0) // self._info.step * self._info.step if handoff is not None else 0

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
        count = handoff.tokens // self._info.key_size
        if chain is None or not 0 < count <= len(chain) // self._info.key_size:
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
        self.tokens(request, None)
        producer = self.take(request.request_id)
        if producer is not None:
            self._released.append(producer)

    # As producer (prefill)

    def computed(self, state: RequestState, tokens: int, ids: BlockIds, states: Mapping[tuple[int, int], int]) -> None:
        """This step brings a request to `tokens` tokens. `states`: block ids of the recurrent states that it computes."""
        request = state.request
        if not self.wanted(request):
            return
        if not self._settings.produces or not self._addresses:
            if tokens >= request.num_prompt_tokens:
                logger.warning(
                    "Foreword: no blocks are kept for a decode instance: this one needs transfer in "
                    "kv_connector_extra_config, or the kv_role kv_producer"
                )
            return
        leased = self._leased.get(request.request_id)
        if leased is None:
            position = self._info.limit(request.num_prompt_tokens) // self._info.step * self._info.step
            leased = self._leased[request.request_id] = _Leased(os.urandom(_LEASE_BYTES), position)
        if leased.announced or not leased.position:
            return
        copied = self._copied(leased, state, tokens, ids, states)
        held: list[BlockSave] = []
        if tokens >= request.num_prompt_tokens:
            leased.announced = True
            held = self._held(leased, state, ids)
        if copied or held:
            self._leases.append(BlockLease(request.request_id, leased.lease, tuple(held), tuple(copied)))

    def _held(self, leased: _Leased, state: RequestState, ids: BlockIds) -> list[BlockSave]:
        """The blocks of groups with full attention: vLLM keeps them as they are until the lease ends."""
        saves: list[BlockSave] = []
        for number, one in enumerate(self._info.groups):
            if one.group.whole:
                count = leased.position // one.block_size
                leased.held[number] = list(ids[one.index][:count])
                saves += state.runs(self._info, number, range(count), ids[one.index])
        return saves

    def _copied(
        self, leased: _Leased, state: RequestState, tokens: int, ids: BlockIds, states: Mapping[tuple[int, int], int]
    ) -> list[BlockSave]:
        """The blocks of windows and recurrent states, which vLLM frees or overwrites in later steps."""
        saves: list[BlockSave] = []
        for number, one in enumerate(self._info.groups):
            table = ids[one.index]
            for block in () if one.group.whole else sorted(one.group.needed(leased.position)):
                if (number, block) in leased.copied or (block + 1) * one.block_size > tokens:
                    continue
                loaded = (block + 1) * one.block_size <= state.request.num_computed_tokens
                in_table = block < len(table) and (one.positional or loaded)
                block_id = states.get((number, block), table[block] if in_table else NULL_BLOCK)
                if block_id != NULL_BLOCK:
                    leased.copied.add((number, block))
                    saves.append(state.save(self._info, number, [block], [block_id]))
        return saves

    def revoke(self, request_ids: Iterable[str]) -> None:
        """Requests that lose their blocks, or whose blocks must not be read any more."""
        for request_id in request_ids:
            if self._leased.pop(request_id, None) is not None:
                self._revoked.append(LeaseRevocation(request_id))

    def finished(self, request: Any, state: RequestState | None, ids: BlockIds) -> dict[str, Any] | None:
        """A request has ended. Returns `kv_transfer_params` for the decode instance; vLLM then keeps the blocks until the
        workers report them as sent. None: vLLM frees them."""
        request_id = request.request_id
        self.release(request)
        del self._received[request_id]
        leased = self._leased.get(request_id)
        if leased is None:
            return None
        ended = request.status in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
        if state is None or not ended or not self._is_complete(leased, ids):
            self.revoke([request_id])
            return None
        del self._leased[request_id]
        self._kept.add(request_id)
        last = state.key_at(self._info, leased.position)
        handoff = self._terms.write(leased.lease, self._addresses, leased.position, last)
        return {"do_remote_prefill": True, "do_remote_decode": False, "foreword": handoff}

    def _is_complete(self, leased: _Leased, ids: BlockIds) -> bool:
        """Whether everything for the lease's position is held, as it was, or copied."""
        for number, one in enumerate(self._info.groups):
            if one.group.whole:
                held = leased.held.get(number)
                if not held or list(ids[one.index][: len(held)]) != held:
                    return False
            elif any((number, block) not in leased.copied for block in one.group.needed(leased.position)):
                return False
        return leased.announced

    def sent(self, request_ids: Iterable[str]) -> None:
        """Requests whose blocks vLLM has taken back."""
        self._kept.difference_update(request_ids)

    def reset(self) -> None:
        """No KV that was computed so far may be read any more."""
        self.revoke(list(self._leased))
        self._revoked += [LeaseRevocation(request_id, ends=False) for request_id in self._kept]
