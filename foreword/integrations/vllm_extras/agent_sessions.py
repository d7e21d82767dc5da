"""Sessions of agents under vLLM. A request names its session in `kv_transfer_params`, or says what happens to one:

    {"foreword_session": {"session_id": "task-7"}}
    {"foreword_session": {"session_id": "task-7", "action": "end"}}

The fields are those of `/v1/sessions`, which the middleware serves: it tells the connector by a request of one token, and names
the sessions of other requests. A request that tells is answered in the `kv_transfer_params` of its response.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from msgspec import Meta, Struct, ValidationError

from foreword.blocks.leases import Leases
from foreword.blocks.salt import Salt, tenant_digest
from foreword.blocks.session_book import Alone, SessionBook
from foreword.decoders import convert
from foreword.errors import BadRequest, ForewordError
from foreword.integrations.vllm.connector_config import NULL_BLOCK, KVCacheInfo
from foreword.integrations.vllm.connector_extras import SESSION_KEY
from foreword.integrations.vllm.request_state import BlockIds, RequestState
from foreword.integrations.vllm_extras.step_parts import RetiredBlocks

_MOST_BLOCKS: Final = 1 << 18  # of all sessions; some 100 bytes each
_MOST_SESSIONS: Final = 1 << 13  # of all salts, of which clients have as many as they like
_Name = Annotated[str, Meta(max_length=256)]


class ToldOfSession(Struct):
    """Fields of a request about its session. Without an action it belongs to the session."""

    session_id: _Name = ""
    action: Literal["", "open", "fork", "compact", "end", "list"] = ""
    parent_session_id: _Name | None = None
    timeout: Annotated[float, Meta(gt=0, le=86_400)] | None = None
    keep_tokens: Annotated[int, Meta(ge=0)] = 0


def _owner(salt: Salt) -> bytes:
    """Whose sessions a request means: its tenant's, or where salts name no tenants those of its salt."""
    return salt.tenant or salt.client


class ConnectorSessions:
    """The sessions of a vLLM engine. Called from the engine's thread only.

    Args:
        kept: what tenants keep by cache control stays when a session ends.

    Attributes:
        pool: vLLM's block pool, None until vLLM has given it.
    """

    def __init__(self, info: KVCacheInfo, kept: Leases[bytes]) -> None:
        self.pool: Any = None
        self._info, self._kept = info, kept
        self._book = SessionBook(most_of_all=_MOST_SESSIONS, most_blocks=_MOST_BLOCKS)
        self._retired: list[RetiredBlocks] = []
        self._late: list[tuple[str, Alone]] = []

    def ended(self, state: RequestState, salt: Salt, ids: BlockIds) -> dict[str, Any] | None:
        """A request with this salt has ended well. Returns the answer to what it says, None if it asks for nothing."""
        try:
            told = convert((state.request.kv_transfer_params or {}).get(SESSION_KEY) or {}, ToldOfSession)
        except ValidationError as error:
            return {"error": str(error), "status": 400, "param": None}
        if not told.action:
            self._note(state, salt, told.session_id, ids)
            return None
        try:
            return self._act(told, salt)
        except ForewordError as error:
            return {"error": error.message, "status": error.status, "param": getattr(error, "param", None)}

    def _act(self, told: ToldOfSession, salt: Salt) -> dict[str, Any]:
        """Raises BadRequest, NotFound."""
        name, owner = told.session_id, _owner(salt)
        if told.action == "list":
            return {"data": [one.describe() for one in self._book.all(owner)]}
        if not name or (told.action == "fork") != bool(told.parent_session_id):
            raise BadRequest("give session_id, and parent_session_id for a fork only", param="session_id")
        if told.action in ("open", "fork"):
            self._book.open(owner, name, told.parent_session_id or "", told.timeout)
            return {}
        if told.action == "end":
            alone = self._book.end(owner, name)
        else:
            alone = self._book.compact(owner, name, -(-told.keep_tokens // self._info.key_size))
        return {"freed_blocks": self._retire(tenant_digest(salt.tenant), alone)}

    def _note(self, state: RequestState, salt: Salt, name: str, ids: BlockIds) -> None:
        """Without open sessions nothing is noted: what a request has used is cached when a session comes to it."""
        size, request, chain = self._info.key_size, state.request, state.chain
        full = min(request.num_computed_tokens, len(chain)) // size
        if not full or not self._book.follows(_owner(salt)):
            return
        found = self._book.note(
            _owner(salt),
            request.request_id,
            chain.root,
            chain.keys_to(full)[:full],
            max(min(state.cached // size, full), chain.public),
            session=name,
            started=request.arrival_time,
            places=self._in_cache(ids) if name else (),
        )
        for alone in found:
            if alone.drop:  # of a session that has ended; vLLM still has the blocks in use
                self._late.append((tenant_digest(salt.tenant), alone))
            else:
                self._retire(tenant_digest(salt.tenant), alone)

    @property
    def retires(self) -> bool:
        """Whether something was left behind since the last call of `take_retired`."""
        return bool(self._late or self._retired)

    def take_retired(self) -> list[RetiredBlocks]:
        """Blocks that nothing continues since the last call, for the workers."""
        late, self._late = self._late, []
        for tenant, alone in late:
            self._retire(tenant, alone)
        retired, self._retired = self._retired, []
        return retired

    def _in_cache(self, ids: BlockIds) -> list[tuple[int, int, Any]]:
        """Whether each block is in vLLM's own cache: the position of its end, its id, and vLLM's hash."""
        if self.pool is None:
            return []
        blocks = self.pool.blocks
        return [
            ((number + 1) * one.block_size, block_id, blocks[block_id].block_hash)
            for one in self._info.groups
            for number, block_id in enumerate(ids[one.index])
            if block_id != NULL_BLOCK and blocks[block_id].block_hash is not None
        ]

    def _retire(self, tenant: str, alone: Alone) -> dict[str, int]:
        """Retire a tenant's blocks (by its digest): vLLM uses them first, or drops them now. Returns their number."""
        kept = {key for one in self._kept.of(tenant) for key in one.keys}
        keys = [key for key in alone.keys if key not in kept]  # keys are chained: without the first ones, if any
        if keys:
            self._retired.append(RetiredBlocks(tenant, alone.root, tuple(keys), alone.drop))
        start = (alone.first + len(alone.keys) - len(keys)) * self._info.key_size
        freed = sum(self._free(*place, drop=alone.drop) for end, *place in alone.places if end > start)
        return {"device": freed, "stores": len(keys)}

    def _free(self, block_id: int, known: Any, *, drop: bool) -> bool:
        """Free a block that no request has: vLLM uses it before all others. `drop`: its KV is not found any more."""
        block, queue = self.pool.blocks[block_id], self.pool.free_block_queue
        if block.block_hash != known or block.ref_cnt:
            return False  # it has another request's KV now, or is in use
        first = getattr(queue, "prepend_n", queue.append_n)  # vLLM 0.31 has no first place
        if drop:
            self.pool.evict_blocks({block_id})
        queue.remove(block)
        first([block])
        return True
