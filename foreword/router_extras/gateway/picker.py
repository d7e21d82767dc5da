"""The answers to a gateway: where to send a request (`IP:PORT`), and what to change in it."""

from __future__ import annotations

import asyncio
import functools
import socket
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from foreword.api.errors import BodyTooLarge, UnsupportedMediaType
from foreword.api.front import Call, Front, Handler
from foreword.api.request import GenerateRequest
from foreword.api.request_bodies import declared_length
from foreword.api.rights import SALT_HEADER, Tenant, credentials
from foreword.api.routes import NO_BODY, Routes
from foreword.blocks.salt import Salt
from foreword.host_addresses import ip_address
from foreword.request_errors import NoReplica, QueueFull, ReplicaFailed
from foreword.router.attempt import Attempt, as_header
from foreword.router.completions import check_fields
from foreword.router.prompts import TokenizedPrompt
from foreword.router.proxied_request import RoutedRequest
from foreword.router.replica_body import TRANSLATED, replica_body
from foreword.router.replicas import Upstream, clock
from foreword.router.router import Router
from foreword.router_extras.gateway.flows import flow_name, share_by_flows
from foreword.router_extras.gateway.gateway_headers import HEADERS, GatewaySettings
from foreword.router_extras.translation import chat_request

_FRESH_SECONDS: Final = 5.0
_FAILED_SECONDS: Final = 1.0
PICK_SECONDS: Final = 10.0  # that a gateway's request may wait until a replica is chosen
_RESOLVE_SECONDS: Final = 2.0


class Addresses:
    """The addresses of replicas. Host names are resolved every few seconds, when they are used; one that could not be is asked
    for again after a second."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[str, float]] = {}

    async def of(self, url: str) -> str:
        """`IP:PORT`, with an IPv6 address in brackets. Raises ReplicaFailed if the name cannot be resolved."""
        found, until = self._found.get(url, ("", 0.0))
        if clock() < until:
            if not found:
                raise ReplicaFailed(f"cannot resolve {urlsplit(url).hostname}")
            return found
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
        try:
            address = host if ip_address(host) else await _resolved(host, port)
        except ReplicaFailed:
            self._found[url] = "", clock() + _FAILED_SECONDS
            raise
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
# To which of several replicas behind one address llm-d's sidecar there sends the request. It must be true of all endpoints that
# the gateway may try, so it goes with one alone.
RANK: Final = "x-data-parallel-host-port"
# llm-d's sidecar sends to the addresses in these.
_OF_SIDECARS: Final = ("x-encoder-hosts-ports", "x-kv-cache-source-host-port")
_OWN_HEADERS: Final = (DESTINATION, PREFILL, PICK, ROUTE, RANK, SALT_HEADER, *_OF_SIDECARS, *HEADERS)
_MODELS: Final = "/v1/models"
# Paths that any replica answers.
_ANYWHERE: Final = frozenset(
    ("/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize", "/v1/messages/count_tokens")
)
_NONE_ALLOWED: Final = "None of the endpoints that the gateway allows takes requests"


@dataclass(frozen=True, slots=True)
class Pick:
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


def generates(call: Call) -> bool:
    """Whether a request is placed by its prompt."""
    return call.route is not None and call.route.outcome != ""


@dataclass(eq=False)
class Picker:
    """Places requests for a gateway. Runs on the router's event loop."""

    router: Router
    addresses: Addresses = field(default_factory=Addresses)
    settings: GatewaySettings = field(init=False)

    def __post_init__(self) -> None:
        self.settings = GatewaySettings(self.router.config)
        if self.router.config.picker_trusts_headers:
            share_by_flows(self.router)

    @functools.cached_property
    def front(self) -> Front:
        """Front of its requests: rights, quotas, limits, metrics, log and ledger are the router's.

        While the router shuts down requests are still placed: gateways open their streams elsewhere then."""
        router = self.router
        made = Front(
            routes_of(router.routes),
            router.auth.rights,
            router.quotas,
            router.bodies,
            router.work,
            router.metrics,
            router.limits,
            unknown=router.unknown_fields,
            retry_after=router.retry_after,
            tracer=router.tracer,
            ledger=router.ledger,
            span_name="picker request",
            label="picker ",
        )
        router.fronts.append(made)
        return made

    def check(self, call: Call) -> None:
        """Check what can be checked before the body comes. Raises UnsupportedMediaType or BodyTooLarge."""
        if generates(call) and call.headers.get("content-encoding", "identity") != "identity":
            raise UnsupportedMediaType("Send the body without Content-Encoding, or let the gateway decompress it")
        if declared_length(call.headers) > self.router.limits().body_bytes:
            raise BodyTooLarge(self.router.limits().body_bytes)

    async def anywhere(self, call: Call, among: Collection[str] | None = None) -> Pick:
        """For a request that any replica answers; `among` as for `pick`. Raises NoReplica."""
        for upstream in self.router.healthy():
            address = await self._address(upstream.url)
            if address and (among is None or address in among):
                name = self.router.attempt_name(call.id)
                own: dict[str, str | None] = {DESTINATION: address, PICK: name}
                return Pick(name, self._headers(call, call.tenant, upstream) | own, endpoints=address)
        raise NoReplica(self.router.ready() or _NONE_ALLOWED)

    async def pick(self, call: Call, among: Collection[str] | None = None) -> Pick:
        """Place a request, after waiting in the router's queue if necessary.

        Args:
            among: the endpoints that the gateway allows; None for all.

        Raises BadRequest, UnknownModel, SuspiciousRequest, QueueFull, or NoReplica.
        """
        router, request = self.router, call.body
        assert isinstance(request, GenerateRequest)
        call.ignored, came = [], request.body.raw  # the replica says which fields had no effect
        try:
            async with asyncio.timeout(PICK_SECONDS):
                told = self.settings.read(call.headers, request.priority)
                request = msgspec.structs.replace(request, **told.changes)
                check_fields(router, call, request)
                request = router.order.arranged(request, router.pool(request.model).model)
                routed = await self._routed(call, request, among)
                routed.flow = flow_name(call.tenant.name, told.fairness, router.auth.weights)
                if told.trusted and told.priority is not None:  # else it is the client's, limited by its tenant's
                    routed.priority = told.priority or None
                attempt = await routed.place()
        except TimeoutError:
            raise QueueFull(f"No replica had room within {PICK_SECONDS:g} s") from None
        try:
            return await self._answer(call, routed, attempt, request, came, among)
        except BaseException:
            routed.pool.failed(attempt)
            raise

    async def _routed(self, call: Call, request: GenerateRequest, among: Collection[str] | None) -> RoutedRequest:
        router, pool = self.router, self.router.pool(request.model)
        prompt = TokenizedPrompt((), "unread")
        if request.dialect in TRANSLATED and request.refusal is None:
            request = chat_request(request, pool.kind)
        if pool.needs_prompts:
            prompt = await router.prompts.tokenize(request, pool, Salt.of(call.tenant.salt, request.cache_salt or None))
        session = request.session_name(call.headers)
        name = f"{call.tenant.name}/{session}" if session is not None else None
        routed = RoutedRequest(router, request, call.tenant, call.id, pool, prompt, name, call.arrived, span=call.span)
        if among is not None:
            routed.avoid += [url for url in pool.upstreams if await self._address(url) not in among]
        return routed

    async def _answer(
        self,
        call: Call,
        routed: RoutedRequest,
        attempt: Attempt,
        given: GenerateRequest,
        came: bytes,
        among: Collection[str] | None,
    ) -> Pick:
        upstream = attempt.upstream
        address = await self.addresses.of(upstream.url)
        if among is not None and address not in among:
            raise NoReplica(_NONE_ALLOWED)
        own, headers = routed.own_fields(upstream.kind), self._headers(call, routed.tenant, upstream)
        own |= _model(call, routed.request)
        prefill = attempt.prefill
        if prefill is not None and prefill.info is not None:
            if upstream.kind == "foreword" and prefill.info.transfer is not None:
                own["kv_transfer_params"] = {"prefill": prefill.info.transfer}
            headers[PREFILL] = await self.addresses.of(prefill.url)
        others = await self._others(routed, attempt, among)
        if not others and await self._shares_address(address, routed):
            headers[RANK] = address
        endpoints = ",".join([address, *others])
        headers |= routed.trace_headers or {}
        headers |= {DESTINATION: endpoints, PICK: attempt.id, ROUTE: as_header(routed.decision_text)}
        body = _body(given, own, came)
        return Pick(attempt.id, headers, body, endpoints, (routed, attempt))

    async def _others(self, routed: RoutedRequest, attempt: Attempt, among: Collection[str] | None) -> list[str]:
        """The next best replicas, to which the same headers and body can be sent: with a prefill replica, those with its
        weights. No more than may be lost if it ends servers: one, until a request that asks the same was served."""
        pool, found, flight = routed.pool, list[str](), attempt.flight
        assert flight is not None
        most = min(self.router.config.max_attempts - 1, routed.ask.spare)
        if most <= 0:
            return found
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

    async def _shares_address(self, address: str, routed: RoutedRequest) -> bool:
        """Whether another replica has this IP address with another port."""
        found = [await self._address(url) for url in routed.pool.upstreams]
        return any(one != address and one.rpartition(":")[0] == address.rpartition(":")[0] for one in found)

    async def _address(self, url: str) -> str:
        """Empty if it cannot be found."""
        try:
            return await self.addresses.of(url)
        except ReplicaFailed:
            return ""

    def _headers(self, call: Call, tenant: Tenant, upstream: Upstream) -> dict[str, str | None]:
        changes = _invented(call)
        if self.router.auth.uses_own_key:
            changes["x-api-key"] = None
        changes.update(self.router.auth.headers(tenant, credentials(call.headers), upstream.kind))
        return {**changes, "x-request-id": call.id}


def _invented(call: Call) -> dict[str, str | None]:
    """The headers of the client that only the picker may set, to be removed."""
    return {name: None for name in _OWN_HEADERS if name in call.headers}


def _model(call: Call, request: GenerateRequest) -> dict[str, Any]:
    """The model as a field of the body, where it is not that of the client's."""
    return {"model": request.model} if request.model != call.body.model else {}


def _body(request: GenerateRequest, own: dict[str, Any], came: bytes) -> bytes | None:
    """The body to send; None for the client's, which is `came`."""
    body = replica_body(request, "openai", own)
    return None if body is came else body
