"""Changes of a fleet during a simulation: replicas fail, start again, become slow, are added and are removed."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, cast

from foreword.errors import ConfigError, did_you_mean

_MAX_ADDED: Final = 10_000
_TIME: Final = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)(s|m|h|)")
_FACTORS: Final = {"s": 1, "": 1, "m": 60, "h": 3600}
_MOST_SLOWER: Final = 1000.0
_EXAMPLES: Final = (
    "write for example '120s fail r3', '180s start r3', '2m slow r3 10', '5m add 2', '5m add 2 GROUP' or "
    "'400s remove r0'"
)


@dataclass(frozen=True, slots=True)
class FleetChange:
    """A change as the user gives it.

    Attributes:
        at: seconds of virtual time.
        action: `fail` loses all that a replica has; `start` begins a failed or removed one again, with empty memory; `remove`
            ends a replica when its requests are finished; `slow` lets its steps take `factor` times as long as at its start;
            `add` adds new replicas.
        replica: name, for all but `add`.
        count, group: for `add`.
    """

    at: float
    action: Literal["fail", "start", "remove", "slow", "add"]
    replica: str = ""
    count: int = 1
    group: str = ""
    factor: float = 1.0

    @property
    def text(self) -> str:
        if self.action == "slow":
            return f"{self.at:g}s slow {self.replica} {self.factor:g}"
        return f"{self.at:g}s {self.action} {self.replica or f'{self.count} {self.group}'.strip()}"


@dataclass(frozen=True, slots=True)
class ReplicaChange:
    """A change of one replica."""

    at: float
    action: Literal["fail", "start", "remove", "slow"]
    replica: str
    group: str
    factor: float = 1.0


def parse_seconds(text: str, option: str) -> float:
    """`"60s"`, `"10m"`, `"1h"` or `"60"` as seconds. Raises ConfigError."""
    found = _TIME.fullmatch(text.strip())
    if found is None:
        raise ConfigError(f"{option} needs a time such as 60s or 10m, not {text!r}")
    return float(found[1]) * _FACTORS[found[2]]


def parse_change(text: str) -> FleetChange:
    """`"120s fail r3"` or `"300s add 2"`. Raises ConfigError."""
    time, action, *rest = text.split() if len(text.split()) > 2 else ("", "", text)
    if action in ("fail", "start", "remove") and len(rest) == 1:
        return FleetChange(parse_seconds(time, "--change"), cast(Literal["fail", "start", "remove"], action), rest[0])
    if action == "slow" and len(rest) == 2 and re.fullmatch(r"\d{1,4}(\.\d{1,9})?", rest[1]):
        return FleetChange(parse_seconds(time, "--change"), "slow", rest[0], factor=float(rest[1]))
    if action == "add" and len(rest) <= 2 and re.fullmatch(r"\d{1,9}", rest[0]):
        return FleetChange(parse_seconds(time, "--change"), "add", "", int(rest[0]), "".join(rest[1:]))
    raise ConfigError(f"--change {text!r} is not a change of the fleet: {_EXAMPLES}")


def resolve(changes: Iterable[FleetChange], members: Mapping[str, str], groups: Collection[str]) -> list[ReplicaChange]:
    """The changes of single replicas, in order of time; new replicas get the next numbers of their group.

    `members` are the replicas at the start, each with its group. Raises ConfigError for an unknown replica or group, and for a
    replica that is not in a state to be changed.
    """
    known, up, found = dict(members), set(members), []
    for change in sorted(changes, key=lambda one: one.at):
        action = change.action
        if action == "add":
            names = _new_names(change, known, groups)
            known.update(dict.fromkeys(names, change.group))
            action = "start"
        elif change.replica not in known:
            raise ConfigError(f"{change.text}: there is no such replica{did_you_mean(change.replica, known)}")
        else:
            names = [change.replica]
        if action == "slow" and not 1 / _MOST_SLOWER <= change.factor <= _MOST_SLOWER:
            raise ConfigError(f"{change.text}: a replica can be up to {_MOST_SLOWER:g} times as slow or as fast")
        if any((name in up) is (action == "start") for name in names):
            raise ConfigError(
                f"{change.text}: the replica {'runs already' if action == 'start' else 'does not run then'}"
            )
        if action != "slow":
            up = up | set(names) if action == "start" else up - set(names)
        found += [ReplicaChange(change.at, action, name, known[name], change.factor) for name in names]
    return found


def _new_names(change: FleetChange, known: Mapping[str, str], groups: Collection[str]) -> list[str]:
    if change.group not in groups:
        raise ConfigError(f"{change.text}: there is no such group{did_you_mean(change.group, [*filter(None, groups)])}")
    if not 1 <= change.count <= _MAX_ADDED:
        raise ConfigError(f"{change.text}: from 1 to {_MAX_ADDED} replicas can be added at once")
    first = sum(group == change.group for group in known.values())
    return [f"{change.group}-{i}" if change.group else f"r{i}" for i in range(first, first + change.count)]
