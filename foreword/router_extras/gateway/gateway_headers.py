"""Headers by which a gateway says what a request is, in the names of llm-d and the older ones of the inference extension.

A client could send them as well, so only a gateway that sets or removes each of them itself is believed.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from foreword.errors import ConfigError
from foreword.process_config import RouterConfig

if TYPE_CHECKING:
    from foreword.router_extras.gateway.objectives import PoolObjectives

_OBJECTIVE: Final = ("x-llm-d-inference-objective", "x-gateway-inference-objective")
_FAIRNESS: Final = ("x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id")
_MODEL: Final = ("x-llm-d-model-name-rewrite", "x-gateway-model-name-rewrite")
# Headers that are read here are not for replicas.
HEADERS: Final = (*_OBJECTIVE, *_FAIRNESS, *_MODEL)


@dataclass(frozen=True, slots=True)
class GatewayHeaders:
    """A request as its gateway describes it.

    Attributes:
        priority: of its objective, as replicas count: lower is more urgent. None without a known objective.
        fairness: whose share of its tenant's share of the queue it has; empty for none in particular.
        model: that it is for, in place of the one in its body; None for that one.
        trusted: no client can have set these.
    """

    priority: int | None = None
    fairness: str = ""
    model: str | None = None
    trusted: bool = False

    @property
    def changes(self) -> dict[str, Any]:
        """Fields of the client's request that it replaces."""
        named = {"priority": self.priority, "model": self.model}
        return {name: value for name, value in named.items() if value is not None}


class GatewaySettings:
    """Headers that count, and the objectives. Raises ConfigError."""

    def __init__(self, config: RouterConfig) -> None:
        self._trusted = config.picker_trusts_headers
        pools = [entry for entry in config.picker_objectives if "=" not in entry and "/" in entry]
        self._objectives = _objectives(entry for entry in config.picker_objectives if entry not in pools)
        self._pools = _pools(config, pools) if pools else []

    def watches(self, failed: Callable[[str], object]) -> Iterator[Coroutine[Any, Any, None]]:
        """Watch the objectives of the cluster: see `ObjectWatch.run`."""
        for pool in self._pools:
            yield from pool.watches(failed)

    def read(self, headers: Mapping[str, str], wanted: int) -> GatewayHeaders:
        """`wanted`: the priority that the body asks for, which an objective replaces. Of a gateway that is not trusted only an
        objective counts that is less urgent: a client may ask for less."""
        number = self._priority(_first(headers, _OBJECTIVE))
        priority = -number if number is not None else None
        if not self._trusted:
            return GatewayHeaders(priority if priority is not None and priority > max(wanted, 0) else None)
        return GatewayHeaders(priority, _first(headers, _FAIRNESS), _first(headers, _MODEL) or None, trusted=True)

    def _priority(self, name: str) -> int | None:
        """The priority of an objective. One of the configuration counts before the cluster's of this name."""
        if not name or name in self._objectives:
            return self._objectives.get(name)
        return next((found for pool in self._pools if (found := pool.get(name)) is not None), None)


def _first(headers: Mapping[str, str], names: Iterable[str]) -> str:
    return next((headers[name] for name in names if headers.get(name)), "")


def _objectives(entries: Iterable[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for entry in entries:
        name, _, number = entry.partition("=")
        try:
            value = int(number)
        except ValueError:
            name, value = "", 0
        if name in found:
            raise ConfigError(f"--picker-objectives has {name!r} twice: give each objective one priority")
        if not name or abs(value) >= 1 << 31:
            raise ConfigError(
                "an objective is written NAME=NUMBER, such as batch=-1, or the cluster's as NAMESPACE/POOL, not "
                f"{entry!r}"
            )
        found[name] = value
    return found


def _pools(config: RouterConfig, entries: Iterable[str]) -> list[PoolObjectives]:
    from foreword.router_extras.gateway.objectives import POOL, PoolObjectives

    found = dict.fromkeys(entries)
    for entry in found:
        if not POOL.fullmatch(entry):
            raise ConfigError(f"the objectives of a pool are written NAMESPACE/POOL, not {entry!r}")
    return [PoolObjectives(config, entry) for entry in found]
