"""The answers to a gateway: where to send a request (`IP:PORT`), and what to change in it."""

from __future__ import annotations

import asyncio
import functools
import socket
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final
from urllib.parse import urlsplit

from foreword.api.dialects.decode import as_utf8
from foreword.api.errors import BodyTooLarge, UnsupportedMediaType
from foreword.api.front import Handler
from foreword.api.outcomes import request_id_from
from foreword.api.request import GenerateRequest
from foreword.api.request_bodies import check_media_type, declared_length
from foreword.api.rights import credentials
from foreword.api.routes import NO_BODY, JsonBody, Route, Routes
from foreword.api.tenants import SALT_HEADER, Tenant
from foreword.blocks.salt import Salt
from foreword.config import ip_address
from foreword.errors import NoReplica, NotFound, QueueFull, ReplicaFailed
from foreword.observability.tracing import Span, Tracer
from foreword.router.attempt import Attempt, as_header
from foreword.router.prompts import TokenizedPrompt
from foreword.router.proxied_request import RoutedRequest
from foreword.router.replica_body import TRANSLATED, replica_body
from foreword.router.replicas import Upstream, clock
from foreword.router.service import Router
from foreword.router.suspicious import SuspiciousRequest
from foreword.router_extras.translation import chat_request

_FRESH_SECONDS: Final = 5.0
PICK_SECONDS: Final = 10.0  # that a gateway's request may wait until a replica is chosen
_RESOLVE_SECONDS: Final = 2.0


class Addresses:
    """The addresses of replicas. Host names are resolved every few seconds, when they are used."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[str, float]] = {}

    async def of(self, url: str) -> str:
        """`IP:PORT`, with an IPv6 address in brackets. Raises ReplicaFailed if the name cannot be resolved."""
        found, until = self._found.get(url, ("", 0.0))
        if found and clock() < until:
            return found
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
        address = host if ip_address(host) else await _resolved(host, port)
        found = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
        self._found[url] = found, clock() + _FRESH_SECONDS
        return found

    def forget(self, urls: set[str]) -> None:
        """Forget all replicas but these."""
        self._found = {url: found for url, found in self._found.items() if url in urls}


async def _resolved(host: str, port: int) -> str:
    try:
        async with asyncio.timeout(_RESOLVE_SECONDS):
            entries = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, TimeoutError) as error:
        raise ReplicaFailed(f"cannot resolve {host}: {error}") from None
    return str(sorted(entry[4][0] for entry in entries)[0])


# Set by the picker only. A client's own header of such a name is removed.
DESTINATION: Final = "x-gateway-destination-endpoint"
PREFILL: Final = "x-prefiller-host-port"
PICK: Final = "x-foreword-pick"
ROUTE: Final = "x-foreword-route"
_OWN_HEADERS: Final = (DESTINATION, PREFILL, PICK, ROUTE, SALT_HEADER)
_MODELS: Final = "/v1/models"
# Errors of gRPC's library that a client causes: what it sent, or did not wait for.
FAULTS_OF_CLIENTS: Final = ("ExecuteBatchError", "DecodeError", "UnicodeDecodeError")
# Paths that any replica answers.
_ANYWHERE: Final = frozenset(
    ("/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize", "/v1/messages/count_tokens")
)
_NONE_ALLOWED: Final = "None of the endpoints that the gateway allows takes requests"


@dataclass(frozen=True, slots=True)
class RequestHead:
    """The head of a client's request. `path` is without the query; names of headers are in lower case. `span`: of its trace."""

    method: str
    path: str
    query: str
    headers: Mapping[str, str]
    id: str
    route: Route[Handler] | None = None
    span: Span | None = None

    @classmethod
    def of(cls, headers: Mapping[str, str], routes: Routes[Handler], tracer: Tracer | None = None) -> RequestHead:
        (path, _, query), method = headers.get(":path", "/").partition("?"), headers.get(":method", "GET")
        found = routes.find(method, path.removesuffix("/"))
        name, span = request_id_from(headers.get("x-request-id")), None
        if tracer is not None:
            span = tracer.request("picker request", headers, {"url.path": path, "gen_ai.request.id": name})
        return cls(method, path, query, headers, name, found.route if found is not None else None, span)

    @property
    def generates(self) -> bool:
        """Whether it is placed by its prompt."""
        return self.outcome != ""

    @property
    def lists_models(self) -> bool:
        """Whether the picker itself knows the answer."""
        return self.route is not None and self.route.method == "GET"

    @property
    def outcome(self) -> str:
        """The name under which it is counted."""
        return self.route.outcome if self.route is not None else ""


@dataclass(frozen=True, slots=True)
class Answer:
    """The picker's answer for a request.

    Attributes:
        headers: to set; None removes a header.
        body: the new body; None leaves it as it is.
        name: of the answer, unique.
        endpoints: `IP:PORT` of the replica, then of those for retries, separated by commas; empty if the gateway chooses.
        placed: the request and its attempt, to be ended with the response.
    """

    name: str
    headers: dict[str, str | None]
    body: bytes | None = None
    endpoints: str = ""
    placed: tuple[RoutedRequest, Attempt] | None = None


def routes_of(routes: Routes[Handler]) -> Routes[Handler]:
    """Routes of the router that the picker lets through: with the same rights and costs. Replicas have other paths, that only
    their operator may call. A body that does not matter for the choice of a replica goes by unread."""
    taken = Routes[Handler]()
    for route in routes:
        if route.path in _ANYWHERE:
            taken.put(replace(route, body=NO_BODY))
        elif route.outcome or route.path.startswith(_MODELS):
            taken.put(route)
    return taken


@dataclass(eq=False)
class Picker:
    """Places requests for a gateway. Runs on the router's event loop."""

    router: Router
    addresses: Addresses = field(default_factory=Addresses)

    @functools.cached_property
    def routes(self) -> Routes[Handler]:
        return routes_of(self.router.routes)

    def admit(self, head: RequestHead) -> tuple[Route[Handler], Tenant]:
        """The route and the tenant. Checks what can be checked before the body comes.

        Raises Unauthorized, NotFound, BadRequest, UnsupportedMediaType or BodyTooLarge.
        """
        router = self.router
        if head.route is None:
            raise NotFound(f"There is no {head.method} {head.path}")
        tenant = router.auth.rights.check(head.route.right, head.headers, None, head.route.name)
        head.route.read_query(head.query)
        if head.generates:
            check_media_type(head.headers)
            if head.headers.get("content-encoding", "identity") != "identity":
                raise UnsupportedMediaType("Send the body without Content-Encoding, or let the gateway decompress it")
        if declared_length(head.headers) > router.limits().body_bytes:
            raise BodyTooLarge(router.limits().body_bytes)
        return head.route, tenant

    async def anywhere(self, head: RequestHead, tenant: Tenant, among: Collection[str] | None = None) -> Answer:
        """For a request that any replica answers; `among` as for `pick`. Raises NoReplica."""
        for upstream in self.router.healthy():
            address = await self._address(upstream.url)
            if address and (among is None or address in among):
                name = self.router.attempt_name(head.id)
                own: dict[str, str | None] = {DESTINATION: address, PICK: name}
                return Answer(name, self._headers(head, tenant, upstream) | own, endpoints=address)
        raise NoReplica(self.router.ready() or _NONE_ALLOWED)

    async def pick(self, head: RequestHead, tenant: Tenant, raw: bytes, among: Collection[str] | None = None) -> Answer:
        """Place a request, after waiting in the router's queue if necessary.

        Args:
            among: the endpoints that the gateway allows; None for all.

        Raises BadRequest, UnknownModel, SuspiciousRequest, QueueFull, or NoReplica. Where the gateway may choose instead
        (`picker_open`), the answer for the last two has no endpoint.
        """
        router, arrived = self.router, clock()
        request = await self._parsed(head, raw)
        came = request.body.raw
        try:
            async with asyncio.timeout(PICK_SECONDS):
                request = router.order.arranged(request, router.pool(request.model).model)
                routed = await self._routed(head, tenant, request, arrived, among)
                attempt = await routed.place()
        except SuspiciousRequest:  # the gateway would send it to a third replica
            raise
        except (NoReplica, QueueFull, TimeoutError) as error:
            if router.config.picker_open and not router.auth.has_tenants:
                # Without API keys there is no tenant to set, and a client must not invent one.
                given, own = request.cache_salt, Salt.of(b"", request.cache_salt or None)
                salt = {"cache_salt": given if Salt.parse(given) == own else own.text} if given else {}
                name = router.attempt_name(head.id)
                return Answer(name, {**dict.fromkeys(_OWN_HEADERS), PICK: name}, _body(request, salt, came))
            if isinstance(error, TimeoutError):
                raise QueueFull(f"No replica had room within {PICK_SECONDS:g} s") from None
            raise
        try:
            return await self._answer(head, routed, attempt, request, came, among)
        except BaseException:
            routed.pool.failed(attempt)
            raise

    async def _parsed(self, head: RequestHead, raw: bytes) -> GenerateRequest:
        """Raises BadRequest."""
        assert head.route is not None and isinstance(head.route.body, JsonBody)
        parse, limits, work = head.route.body.parse, self.router.limits(), self.router.work

        def read() -> Any:
            return parse(as_utf8(raw), limits)

        request = read() if len(raw) <= work.inline else await work.run(len(raw), read)
        assert isinstance(request, GenerateRequest)
        return request

    async def _routed(
        self, head: RequestHead, tenant: Tenant, request: GenerateRequest, arrived: float, among: Collection[str] | None
    ) -> RoutedRequest:
        router, pool = self.router, self.router.pool(request.model)
        prompt = TokenizedPrompt((), "unread")
        if head.outcome in TRANSLATED and request.refusal is None:
            request = chat_request(request, pool.kind)
        if pool.needs_prompts:
            prompt = await router.prompts.tokenize(request, pool, Salt.of(tenant.salt, request.cache_salt or None))
        session = request.session_name(head.headers)
        name = f"{tenant.name}/{session}" if session is not None else None
        routed = RoutedRequest(router, request, tenant, head.id, pool, prompt, name, arrived, span=head.span)
        if among is not None:
            routed.avoid += [url for url in pool.upstreams if await self._address(url) not in among]
        return routed

    async def _answer(
        self,
        head: RequestHead,
        routed: RoutedRequest,
        attempt: Attempt,
        given: GenerateRequest,
        came: bytes,
        among: Collection[str] | None,
    ) -> Answer:
        upstream = attempt.upstream
        address = await self.addresses.of(upstream.url)
        if among is not None and address not in among:
            raise NoReplica(_NONE_ALLOWED)
        own, headers = routed.own_fields(upstream.kind), self._headers(head, routed.tenant, upstream)
        prefill = attempt.prefill
        if prefill is not None and prefill.info is not None:
            if upstream.kind == "foreword" and prefill.info.transfer is not None:
                own["kv_transfer_params"] = {"prefill": prefill.info.transfer}
            headers[PREFILL] = await self.addresses.of(prefill.url)
        endpoints = ",".join([address, *await self._others(routed, attempt, among)])
        headers |= routed.trace_headers
        headers |= {DESTINATION: endpoints, PICK: attempt.id, ROUTE: as_header(routed.decision_text)}
        body = _body(given, own, came)
        return Answer(attempt.id, headers, body, endpoints, (routed, attempt))

    async def _others(self, routed: RoutedRequest, attempt: Attempt, among: Collection[str] | None) -> list[str]:
        """The next best replicas, to which the same headers and body can be sent: with a prefill replica, those with its
        weights. No more than may be lost if it ends servers: one, until a request that asks the same was served."""
        pool, found, flight = routed.pool, list[str](), attempt.flight
        assert flight is not None
        most = min(self.router.config.max_attempts - 1, routed.ask.spare)
        for one in sorted(attempt.decision.estimates, key=lambda estimate: estimate.total):
            upstream = pool.upstreams.get(one.replica)
            if upstream is None or upstream is attempt.upstream or one.excluded or upstream.spec.role == "prefill":
                continue
            if attempt.prefill is not None and upstream.weights != attempt.weights:
                continue
            if upstream.kind == attempt.upstream.kind and upstream.url not in routed.avoid and len(found) < most:
                address = await self._address(upstream.url)
                if address and (among is None or address in among) and routed.ask.spare:
                    found.append(address)
                    flight.urls.add(upstream.url)
        return found

    async def _address(self, url: str) -> str:
        """Empty if it cannot be found."""
        try:
            return await self.addresses.of(url)
        except ReplicaFailed:
            return ""

    def _headers(self, head: RequestHead, tenant: Tenant, upstream: Upstream) -> dict[str, str | None]:
        changes: dict[str, str | None] = dict.fromkeys(_OWN_HEADERS)
        if self.router.auth.uses_own_key:
            changes["x-api-key"] = None
        changes.update(self.router.auth.headers(tenant, credentials(head.headers), upstream.kind))
        return {**changes, "x-request-id": head.id}


def _body(request: GenerateRequest, own: dict[str, Any], came: bytes) -> bytes | None:
    """The body to send; None for the client's, which is `came`."""
    body = replica_body(request, "openai", own)
    return None if body is came else body
