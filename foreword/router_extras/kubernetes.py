"""Replicas from Kubernetes Services, whose EndpointSlices are watched.

The protocol is that of the Kubernetes API concepts page: list, then watch from the list's resourceVersion; after 410 Gone list
again. A failing API server changes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import re
import ssl
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

import aiohttp
import msgspec

from foreword.decoders import decode_json
from foreword.errors import ConfigError, ForewordError
from foreword.process_config import RouterConfig
from foreword.router.replicas import ANY_ADDRESS, CONNECTION_ERRORS, ReplicaSpec, parse_spec, read_whole, url_parts

logger = logging.getLogger(__name__)

_SERVICE: Final = re.compile(r"([a-z0-9][a-z0-9-]{0,62})/([a-z0-9][a-z0-9-]{0,62})(?::([a-z0-9-]{1,15}))?")
_NAME: Final = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_PAGE: Final = 500
_MAX_SLICES: Final = 10_000
# etcd stores objects of at most 1.5 MiB; a page of slices is larger.
_MAX_EVENT_BYTES: Final = 8 << 20
_MAX_PAGE_BYTES: Final = 256 << 20
_CALL_SECONDS: Final = 30.0
# The server ends a watch after this time, and token and certificates are read again.
_WATCH_SECONDS: Final = 240
_MIN_PAUSE: Final = 1.0
_MAX_PAUSE: Final = 30.0
_GONE: Final = 410


def check_services(config: RouterConfig) -> None:
    """Raises ConfigError for a Service that cannot be watched: how it is written, or where the API is."""
    ApiServer(config.kubernetes_api, config.kubernetes_credentials)
    for text in config.replica_services:
        ServiceSpec.parse(text)


class ApiError(ForewordError, code="kubernetes_error"):
    """The API server refused a call, or answered something else than the API says."""


class _Gone(Exception):
    """The resource version is too old: list again."""


class _Metadata(msgspec.Struct):
    name: str = ""
    resource_version: str = msgspec.field(name="resourceVersion", default="")
    next_page: str = msgspec.field(name="continue", default="")


class _Conditions(msgspec.Struct):
    ready: bool | None = None
    terminating: bool | None = None


class Pod(msgspec.Struct, frozen=True):
    """Target of an endpoint: a pod if `kind` is `Pod`."""

    kind: str = ""
    name: str = ""
    namespace: str = ""


class _Endpoint(msgspec.Struct):
    addresses: list[str]
    conditions: _Conditions | None = None
    target: Pod | None = msgspec.field(name="targetRef", default=None)


class _Port(msgspec.Struct):
    name: str | None = None
    port: int | None = None


class EndpointSlice(msgspec.Struct):
    """`discovery.k8s.io/v1`; what is not here is ignored."""

    metadata: _Metadata
    family: str = msgspec.field(name="addressType", default="IPv4")
    endpoints: list[_Endpoint] | None = None
    ports: list[_Port] | None = None


class _List(msgspec.Struct):
    metadata: _Metadata
    items: list[EndpointSlice] | None = None


class _Event(msgspec.Struct):
    type: Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK", "ERROR"]
    object: msgspec.Raw


class _Status(msgspec.Struct):
    code: int = 0
    message: str = ""


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """A Service as configured: `NAMESPACE/NAME[:PORT] [role=...] [max_waiting=N] ...`.

    Attributes:
        port: name or number of a port of its pods; None if they have one only.
        replica: the options of its replicas.
    """

    namespace: str
    name: str
    port: str | None
    replica: ReplicaSpec

    @classmethod
    def parse(cls, text: str, role: str = "both") -> ServiceSpec:
        """Raises ConfigError."""
        name, *options = text.split() or [""]
        found = _SERVICE.fullmatch(name)
        if found is None:
            raise ConfigError(f"a Service is written NAMESPACE/NAME or NAMESPACE/NAME:PORT, not {name!r}")
        replica = parse_spec(" ".join(("http://service", *options)), role)
        if any(address and not address.startswith(ANY_ADDRESS) for address in (replica.events, replica.replay)):
            raise ConfigError(f"the Service {name} has several pods: write events=tcp://*:PORT")
        namespace, service, port = found.groups()
        if port is not None and port.isdigit() and not 0 < int(port) < 1 << 16:
            raise ConfigError(f"the Service {name} has no valid port")
        return cls(namespace, service, port, replica)

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"

    def replicas(self, slices: Mapping[str, EndpointSlice]) -> dict[ReplicaSpec, bool]:
        """The replicas that are not terminating, and whether each is ready.

        An endpoint may be in two slices while it moves between them. Pods with addresses of both families count once.
        """
        found: dict[ReplicaSpec, bool] = {}
        for url, endpoint in self._endpoints(slices):
            spec, conditions = replace(self.replica, url=url), endpoint.conditions or _Conditions()
            # An unknown state counts as ready.
            found[spec] = found.get(spec, False) or conditions.ready is not False
        return found

    def pods(self, slices: Mapping[str, EndpointSlice]) -> dict[str, Pod]:
        """The pods of these replicas, by URL, as far as they are pods of the Service's namespace."""
        return {
            url: endpoint.target
            for url, endpoint in self._endpoints(slices)
            if endpoint.target is not None
            and endpoint.target.kind == "Pod"
            and endpoint.target.namespace == self.namespace
            and _NAME.fullmatch(endpoint.target.name)
        }

    def _endpoints(self, slices: Mapping[str, EndpointSlice]) -> Iterator[tuple[str, _Endpoint]]:
        family = min((one.family for one in slices.values() if one.endpoints), default="")
        for one in slices.values():
            port = self._port_of(one)
            if one.family != family or port is None:
                continue
            for endpoint in one.endpoints or ():
                if (endpoint.conditions or _Conditions()).terminating or not endpoint.addresses:
                    continue
                host = endpoint.addresses[0]
                url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
                if url_parts(url) is not None:
                    yield url, endpoint

    def _port_of(self, one: EndpointSlice) -> int | None:
        if self.port is not None and self.port.isdigit():
            return int(self.port)
        ports = [port for port in one.ports or () if self.port is None or port.name == self.port]
        return ports[0].port if len(ports) == 1 else None


class ApiServer:
    """Where the Kubernetes API is, and how this process authenticates.

    Args:
        url: of the API server; by default that of the cluster in which this process runs.
        folder: `token` and `ca.crt` of a service account. They are read for every list and watch, because they are replaced
            while a pod runs. The token is sent over TLS only.

    Raises ConfigError.
    """

    def __init__(self, url: str | None, folder: str) -> None:
        if url is None:
            host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
            if not host:
                raise ConfigError("this process does not run in a Kubernetes cluster: give --kubernetes-api URL")
            url = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
        parts = url_parts(url)
        if parts is None or parts.scheme not in ("http", "https") or "@" in url or parts.query:
            raise ConfigError(f"--kubernetes-api takes a URL such as https://10.96.0.1, not {url!r}")
        self.url = url.rstrip("/")
        self._folder = Path(folder)

    def session(self) -> aiohttp.ClientSession:
        """A session with the present token and certificates. Raises OSError, or ssl.SSLError (an OSError)."""
        headers, connector = {"accept": "application/json"}, None
        if self.url.startswith("https:"):
            authority = self._folder / "ca.crt"
            context = ssl.create_default_context(cafile=str(authority) if authority.exists() else None)
            connector = aiohttp.TCPConnector(ssl=context)
            token = self._folder / "token"
            if token.exists():
                headers["authorization"] = f"Bearer {token.read_text().strip()}"
        return aiohttp.ClientSession(headers=headers, connector=connector, cookie_jar=aiohttp.DummyCookieJar())


class ServiceWatch:
    """Keeps the endpoints of one Service; calls `changed` with `ServiceSpec.replicas` after every change."""

    def __init__(
        self, api: ApiServer, service: ServiceSpec, changed: Callable[[dict[ReplicaSpec, bool]], None]
    ) -> None:
        self._api = api
        self._service = service
        self._changed = changed
        self._slices: dict[str, EndpointSlice] = {}
        self._version = ""

    def pods(self) -> dict[str, Pod]:
        """The pods as of the last change, by the URLs of their replicas."""
        return self._service.pods(self._slices)

    async def run(self) -> None:
        pause = _MIN_PAUSE
        while True:
            try:
                async with self._api.session() as session:
                    if not self._version:
                        await self._list(session)
                    await self._watch(session)
                pause = _MIN_PAUSE
                # A server that ends watches at once is not asked in a loop.
                await asyncio.sleep(_MIN_PAUSE)
            except _Gone:
                logger.info("Kubernetes: the version of the endpoints of %s is too old; listing them", self._service)
                self._version = ""
                await asyncio.sleep(_MIN_PAUSE)
            except CONNECTION_ERRORS as error:
                pause = await self._failed(f"{type(error).__name__}: {error}", pause)
            except (ForewordError, msgspec.DecodeError) as error:
                self._version = ""
                pause = await self._failed(str(error), pause)

    async def _failed(self, problem: str, pause: float) -> float:
        """Wait. Returns the pause after the next failure."""
        logger.warning(
            "Kubernetes: cannot watch the endpoints of %s; the replicas are unchanged: %s", self._service, problem
        )
        await asyncio.sleep(pause * random.uniform(0.5, 1.0))
        return min(pause * 2, _MAX_PAUSE)

    async def _list(self, session: aiohttp.ClientSession) -> None:
        slices: dict[str, EndpointSlice] = {}
        query = {"limit": str(_PAGE)}
        while True:
            async with self._get(session, query, _CALL_SECONDS) as response:
                found = decode_json(await read_whole(response, _MAX_PAGE_BYTES), _List)
            slices.update((one.metadata.name, one) for one in found.items or ())
            _check_number(slices)
            if not found.metadata.next_page:
                break
            query["continue"] = found.metadata.next_page
        self._slices, self._version = slices, found.metadata.resource_version
        self._changed(self._service.replicas(slices))

    async def _watch(self, session: aiohttp.ClientSession) -> None:
        """Apply events until the server ends the watch. Raises _Gone, ApiError and what aiohttp and msgspec raise."""
        seconds = int(_WATCH_SECONDS * random.uniform(0.8, 1.0))
        query = {"watch": "true", "allowWatchBookmarks": "true", "timeoutSeconds": str(seconds)}
        query["resourceVersion"] = self._version
        async with self._get(session, query, seconds + _CALL_SECONDS) as response:
            line = bytearray()
            async for piece in response.content.iter_any():
                for part in piece.splitlines(keepends=True):
                    line += part
                    if len(line) > _MAX_EVENT_BYTES:
                        raise ApiError("an event has no end")
                    if line.endswith(b"\n"):
                        self._apply(decode_json(line, _Event))
                        line.clear()

    def _apply(self, event: _Event) -> None:
        if event.type == "ERROR":
            status = decode_json(event.object, _Status)
            if status.code == _GONE:
                raise _Gone
            raise ApiError(f"the watch ended with {status.code}: {status.message[:200]}")
        one = decode_json(event.object, EndpointSlice)
        self._version = one.metadata.resource_version or self._version
        if event.type == "BOOKMARK":
            return
        if event.type == "DELETED":
            self._slices.pop(one.metadata.name, None)
        else:
            self._slices[one.metadata.name] = one
        _check_number(self._slices)
        self._changed(self._service.replicas(self._slices))

    @contextlib.asynccontextmanager
    async def _get(
        self, session: aiohttp.ClientSession, query: Mapping[str, str], seconds: float
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A successful response. Raises _Gone, ApiError and what aiohttp raises."""
        service = self._service
        url = f"{self._api.url}/apis/discovery.k8s.io/v1/namespaces/{service.namespace}/endpointslices"
        query = {"labelSelector": f"kubernetes.io/service-name={service.name}", **query}
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=_CALL_SECONDS)
        async with session.get(url, params=query, timeout=timeout, allow_redirects=False) as response:
            if response.status == _GONE:
                raise _Gone
            if response.status != 200:
                body = (await response.content.read(4096)).decode("utf-8", "replace")
                hint = " (list and watch of endpointslices must be allowed)" if response.status in (401, 403) else ""
                raise ApiError(f"the API server says {response.status}{hint}: {body[:200]}")
            yield response


def _check_number(slices: Mapping[str, EndpointSlice]) -> None:
    if len(slices) > _MAX_SLICES:
        raise ApiError(f"it has more than {_MAX_SLICES} EndpointSlices")
