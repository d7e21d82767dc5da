"""Responses that clients may continue or fetch (`store` of the Responses API): in memory, bounded, per tenant."""

from __future__ import annotations

import math
import time
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from msgspec import Struct

from foreword.api.front import Answer, Call, Handler
from foreword.api.request import Message
from foreword.api.routes import NO_BODY, ClientQuery, Meter, Right, Routes
from foreword.decoders import decode_msgpack
from foreword.errors import BadRequest, NotFound
from foreword.newest import Newest

_SECONDS: Final = 86_400.0  # that a response is kept after its last use
_TENANT_RESPONSES: Final = 1000
# The part of all memory that one tenant may use.
_TENANT_SHARE: Final = 0.25
# Bytes of an entry beside its packed bytes: its key, and its places in dictionaries.
_ENTRY_BYTES: Final = 600
# Longer ones are kept as they are: to compress them would hold up the event loop for more than a millisecond.
_MOST_COMPRESSED: Final = 64 << 10


class StoredResponse(Struct, frozen=True, array_like=True):
    """`messages` is the conversation with the answer; `body` is the response as JSON."""

    messages: tuple[Message, ...]
    body: bytes


@dataclass(frozen=True, slots=True)
class _Packed:
    """A response as it is kept: in one piece, a fifth of the memory of its objects."""

    data: bytes
    compressed: bool
    expires: float
    began: float

    @property
    def size(self) -> int:
        return len(self.data) + _ENTRY_BYTES


class StoredResponses:
    """Runs on the event loop's thread. The responses unused for longest make room for others.

    Args:
        memory: bytes of all responses.
        ttl: seconds that a response is kept after its last use.
    """

    def __init__(self, memory: int, ttl: float = _SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        self._memory = memory
        self._ttl = ttl
        self._clock = clock
        self._kept: OrderedDict[tuple[bytes, str], _Packed] = OrderedDict()
        self._bytes: Counter[bytes] = Counter()
        self._counts: Counter[bytes] = Counter()
        self._forgotten: Newest[bytes, float] = Newest(_TENANT_RESPONSES)
        # Called as `keep` for a response that is added, and with the owner and the id of a removed one.
        self.added: Callable[[bytes, str, bytes, float], object] = lambda owner, response_id, data, began: None
        self.removed: Callable[[bytes, str], object] = lambda owner, response_id: None

    @property
    def used(self) -> int:
        """Bytes of all responses."""
        return self._bytes.total()

    def add(
        self, owner: bytes, response_id: str, messages: Sequence[Message], body: bytes, began: float = math.inf
    ) -> None:
        """Keep a response of the tenant with this salt, if it is not too large. `began`: when its request came, by the clock;
        if the tenant was forgotten since, it is not kept."""
        data, began = msgspec.msgpack.encode(StoredResponse(tuple(messages), body)), min(began, self._clock())
        if self.keep(owner, response_id, data, began):
            self.added(owner, response_id, data, began)

    def keep(self, owner: bytes, response_id: str, data: bytes, began: float = math.inf) -> bool:
        """Keep a packed response, as `add`. Whether it is kept."""
        compressed = len(data) <= _MOST_COMPRESSED
        data = zlib.compress(data, 1) if compressed else data
        response = _Packed(data, compressed, self._clock() + self._ttl, began)
        if response.size > self._memory * _TENANT_SHARE or began <= self._forgotten.get(owner, -math.inf):
            return False
        self._drop((owner, response_id))
        self._make_room(owner, response.size)
        self._kept[owner, response_id] = response
        self._bytes[owner] += response.size
        self._counts[owner] += 1
        return True

    def get(self, owner: bytes, response_id: str) -> StoredResponse:
        """Raises NotFound."""
        found = self._kept.get((owner, response_id))
        if found is None or found.expires < self._clock():
            self._drop((owner, response_id))
            raise NotFound(
                f"No response {response_id[:80]!r} is stored here; it was stored with store=false, on another server, "
                "or too long ago",
                param="previous_response_id",
            )
        self._kept[owner, response_id] = _Packed(found.data, found.compressed, self._clock() + self._ttl, found.began)
        self._kept.move_to_end((owner, response_id))
        return decode_msgpack(zlib.decompress(found.data) if found.compressed else found.data, StoredResponse)

    def remove(self, owner: bytes, response_id: str) -> None:
        """Raises NotFound."""
        self.get(owner, response_id)
        self._drop((owner, response_id))
        self.removed(owner, response_id)

    def discard(self, owner: bytes, response_id: str) -> None:
        """Remove a response, if it is kept here."""
        self._drop((owner, response_id))

    def forget(self, owner: bytes, at: float = math.inf) -> None:
        """Remove all responses of a tenant; those of requests that run now are not kept. `at`: only of requests that came until
        then, by the clock."""
        at = min(at, self._clock())
        self._forgotten[owner] = max(at, self._forgotten.get(owner, at))
        for key in [key for key, one in self._kept.items() if key[0] == owner and one.began <= at]:
            self._drop(key)

    def _make_room(self, owner: bytes, size: int) -> None:
        now = self._clock()
        while self._kept and next(iter(self._kept.values())).expires < now:
            self._drop(next(iter(self._kept)))
        while self._counts[owner] >= _TENANT_RESPONSES or self._bytes[owner] + size > self._memory * _TENANT_SHARE:
            self._drop(next(key for key in self._kept if key[0] == owner))
        while self.used + size > self._memory:
            self._drop(next(iter(self._kept)))

    def _drop(self, key: tuple[bytes, str]) -> None:
        found = self._kept.pop(key, None)
        if found is not None:
            owner = key[0]
            self._bytes[owner] -= found.size
            self._counts[owner] -= 1
            if not self._counts[owner]:
                del self._bytes[owner], self._counts[owner]


class ResponseQuery(ClientQuery, frozen=True, kw_only=True):
    """`GET /v1/responses/{id}`."""

    stream: bool = False


def add_routes(routes: Routes[Handler], responses: StoredResponses) -> None:
    """Add `/v1/responses/{name}`."""

    path, free = "/v1/responses/{name}", Meter.FREE

    @routes.add("GET", path, right=Right.TENANT, meter=free, body=NO_BODY, query=ResponseQuery, tag="generate")
    async def stored_response(call: Call) -> Answer:
        """A stored response."""
        query: ResponseQuery = call.query
        if query.stream:
            raise BadRequest("stream: only a response that is computed in the background has a stream", param="stream")
        body = responses.get(call.tenant.salt, call.names["name"]).body
        return Answer(200, body, {"content-type": "application/json"})

    @routes.add("DELETE", path, right=Right.OWNER, meter=free, body=NO_BODY, query=ClientQuery, tag="generate")
    async def forget_response(call: Call) -> dict[str, Any]:
        """Remove a stored response. Responses that continue it stay."""
        responses.remove(call.tenant.salt, call.names["name"])
        return {"id": call.names["name"], "object": "response", "deleted": True}
