"""Replicas from Kubernetes Services, whose EndpointSlices are watched."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from foreword.errors import ConfigError
from foreword.process_config import RouterConfig
from foreword.router.replicas import ANY_ADDRESS, ReplicaSpec, parse_spec, url_parts
from foreword.router_extras.kubernetes_watch import ApiObject, ApiServer, ObjectsOf, ObjectWatch

_SERVICE: Final = re.compile(r"([a-z0-9][a-z0-9-]{0,62})/([a-z0-9][a-z0-9-]{0,62})(?::([a-z0-9-]{1,15}))?")
_NAME: Final = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")


def check_services(config: RouterConfig) -> None:
    """Raises ConfigError for a Service that cannot be watched: how it is written, or where the API is."""
    ApiServer(config.kubernetes_api, config.kubernetes_credentials)
    for text in config.replica_services:
        ServiceSpec.parse(text)


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


class EndpointSlice(ApiObject):
    """`discovery.k8s.io/v1`; what is not here is ignored."""

    family: str = msgspec.field(name="addressType", default="IPv4")
    endpoints: list[_Endpoint] | None = None
    ports: list[_Port] | None = None


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


class ServiceWatch:
    """Keeps the endpoints of one Service; calls `changed` with `ServiceSpec.replicas` after every change."""

    def __init__(
        self, api: ApiServer, service: ServiceSpec, changed: Callable[[dict[ReplicaSpec, bool]], None]
    ) -> None:
        self._service = service
        slices = ObjectsOf(
            "discovery.k8s.io/v1",
            "endpointslices",
            service.namespace,
            f"endpoints of {service}",
            labels=f"kubernetes.io/service-name={service.name}",
        )
        self._watch = ObjectWatch(api, slices, EndpointSlice, lambda found: changed(service.replicas(found)))

    def pods(self) -> dict[str, Pod]:
        """The pods as of the last change, by the URLs of their replicas."""
        return self._service.pods(self._watch.objects)

    async def run(self, failed: Callable[[str], object]) -> None:
        """See `ObjectWatch.run`."""
        await self._watch.run(failed)
