"""The scheduler's side of prefill on one vLLM and decode on another: vLLM's own request flow, `kv_transfer_params`.

The prefill request has `{"do_remote_decode": true}`. Its whole blocks are lent in the step that computes the end of its
prompt, so that they can be read before its answer is out; the answer says where. The decode request brings that along, and
loads from there what neither it nor its stores have.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.request import RequestStatus

from foreword.blocks.keys import TokenChain
from foreword.errors import TransferRefused
from foreword.integrations.vllm.config import NULL_BLOCK, Facts, Settings
from foreword.integrations.vllm.handoff import Handoff, Terms, lender_of
from foreword.integrations.vllm.step_messages import Lend, Lender, StepPlan, Withdraw

logger = logging.getLogger(__name__)

_LEASE_BYTES = 16


@dataclass(slots=True)
class _Lent:
    """A request's blocks that others may read: number `first` of its chain and those after it."""

    lease: bytes
    first: int
    blocks: list[int] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.first + len(self.blocks)


class Handover:
    """What requests keep for other instances and take over from them. Called from the engine's thread only."""

    def __init__(self, facts: Facts, settings: Settings) -> None:
        layouts = tuple(facts.layout(rank).fingerprint for rank in range(facts.ranks))
        secret = (settings.transfer.secret if settings.transfer is not None else None) or ""
        self._terms = Terms(facts.block_size, layouts, secret)
        self._size = facts.block_size
        self._settings = settings
        self._addresses: tuple[str, ...] = ()
        self._lent: dict[str, _Lent] = {}
        self._kept: set[str] = set()
        self._offers: dict[str, Handoff | None] = {}
        self._lends: list[Lend] = []
        self._withdrawn: list[Withdraw] = []
        self._forsaken: list[Lender] = []

    def meet(self, addresses: Mapping[int, str]) -> None:
        """Where each rank's worker listens for others."""
        found = tuple(addresses.get(rank, "") for rank in range(len(self._terms.layouts)))
        self._addresses = found if all(found) else ()

    def fill(self, plan: StepPlan) -> None:
        """What the workers are to do about it in this step."""
        plan.lends, self._lends = self._lends, []
        plan.withdrawn, self._withdrawn = self._withdrawn, []
        plan.forsaken, self._forsaken = self._forsaken, []

    # Taking over

    def blocks(self, request: Any, chain: TokenChain | None) -> int:
        """How many blocks, from the prompt's first on, another instance keeps for this request."""
        if request.request_id not in self._offers:
            params = request.kv_transfer_params or {}
            self._offers[request.request_id] = self._read(params, chain) if params.get("do_remote_prefill") else None
        said = self._offers[request.request_id]
        return max(said.tokens, 0) // self._size if said is not None else 0

    def _read(self, params: dict[str, Any], chain: TokenChain | None) -> Handoff | None:
        try:
            if not self._settings.takes_over:
                raise TransferRefused(
                    "this instance takes nothing over: it needs transfer in kv_connector_extra_config, or the kv_role "
                    "kv_consumer"
                )
            said = self._terms.read(params)
            self._check_prompt(said, chain)
        except TransferRefused as error:
            logger.warning("Foreword: a prompt is computed here, not taken over: %s", error.message)
            return None
        return said

    def _check_prompt(self, said: Handoff, chain: TokenChain | None) -> None:
        count = said.tokens // self._size
        if chain is None or not 0 < count <= len(chain) // self._size:
            return
        if chain.keys_to(count)[-1].hex() != said.last:
            raise TransferRefused("the prefill instance computed another prompt (tokens, cache_salt), or was reset")

    def take(self, request_id: str) -> Lender | None:
        """Who keeps blocks for this request; whoever takes it, which is possible once, sees to it that the lease ends."""
        said = self._offers.get(request_id)
        if said is None:
            return None
        self._offers[request_id] = None
        return lender_of(said)

    def forsake(self, request: Any) -> None:
        """Nothing is needed of what is kept for this request."""
        self.blocks(request, None)
        lender = self.take(request.request_id)
        if lender is not None:
            self._forsaken.append(lender)

    # Handing over

    def computed(self, request: Any, chain: TokenChain, tokens: int, blocks: Sequence[int]) -> None:
        """This step brings a request to `tokens` tokens with KV."""
        params = request.kv_transfer_params or {}
        if not params.get("do_remote_decode") or tokens < request.num_prompt_tokens:
            return
        if not self._settings.hands_over or not self._addresses:
            logger.warning(
                "Foreword: nothing is kept for a decode instance: this one needs transfer in kv_connector_extra_config, or the "
                "kv_role kv_producer"
            )
            return
        lent = self._lent.get(request.request_id)
        if lent is None:
            first = next((i for i, block in enumerate(blocks) if block != NULL_BLOCK), len(blocks))
            lent = _Lent(os.urandom(_LEASE_BYTES), first)
        start, full = lent.end, tokens // self._size
        if start < full:
            self._lent[request.request_id] = lent
            lent.blocks += blocks[start:full]
            keys = tuple(chain.keys_to(full)[start:full])
            before = chain.key_before(start)
            self._lends.append(Lend(request.request_id, lent.lease, keys, before, start, tuple(blocks[start:full])))

    def withdraw(self, request_ids: Iterable[str]) -> None:
        """Requests that lose their blocks, or must not be read any more."""
        for request_id in request_ids:
            if self._lent.pop(request_id, None) is not None:
                self._withdrawn.append(Withdraw(request_id))

    def finished(self, request: Any, chain: TokenChain | None, blocks: Sequence[int]) -> dict[str, Any] | None:
        """A request has ended. What its answer says for the decode instance; then its blocks stay until the workers say that
        they were read. None: they go."""
        request_id = request.request_id
        self.forsake(request)
        del self._offers[request_id]
        lent = self._lent.get(request_id)
        if lent is None or chain is None:
            return None
        there = blocks[: lent.end]
        low = next((i for i, block in enumerate(there) if block != NULL_BLOCK), len(there))
        ended = request.status in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
        if (
            not ended
            or len(there) < lent.end
            or low >= lent.end
            or there[low:] != lent.blocks[max(low - lent.first, 0) :]
        ):
            self.withdraw([request_id])
            return None
        if low > lent.first:  # behind the window: vLLM has them back
            self._withdrawn.append(Withdraw(request_id, low, ends=False))
        del self._lent[request_id]
        self._kept.add(request_id)
        last = chain.keys_to(lent.end)[-1]
        said = self._terms.write(lent.lease, self._addresses, lent.end * self._size, last)
        return {"do_remote_prefill": True, "do_remote_decode": False, "foreword": said}

    def sent(self, request_ids: Iterable[str]) -> None:
        """Requests whose blocks vLLM has back."""
        self._kept.difference_update(request_ids)

    def reset(self) -> None:
        """Nothing that was computed so far may be read any more."""
        self.withdraw(list(self._lent))
        self._withdrawn += [Withdraw(request_id, ends=False) for request_id in self._kept]
