"""Costs of steps and loads, the file of measured ones, and the fleet of a simulation."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final, Literal

from foreword.errors import ConfigError, did_you_mean, reason_of
from foreword.routing.cost_kinds import MEASURED_TOKENS, Measurement
from foreword.routing.costs import LoadCost, ReplicaCosts
from foreword.routing.directory import CacheTier
from foreword.sim.changes import FleetChange, ReplicaChange, resolve

_FORMAT: Final = 1
_MOST_REPLICAS: Final = 20_000


@dataclass(frozen=True, slots=True)
class EngineCosts:
    """Seconds that steps and loads take. A step that prefills P tokens and decodes D sequences with a total context of C takes

        base + prefill * P + attention * (pairs of prefilled tokens and tokens before them)
             + decode_each * D + decode_context * C

    The defaults are roughly those of a 70B model on eight accelerators with 80 GB each.

    Attributes:
        loads: cost of loading a token from host memory, disk and the shared store.
        request: part of each time to first token (TTFT) outside of the engine: network, HTTP, tokenization, router.
    """

    base: float = 0.02
    prefill: float = 1.1e-4
    attention: float = 2e-9
    decode_each: float = 1e-4
    decode_context: float = 3e-8
    loads: tuple[LoadCost, ...] = (LoadCost(1.6e-5, 1e-3), LoadCost(6e-5, 2e-3), LoadCost(3.2e-5, 5e-3))
    request: float = 0.0

    def __post_init__(self) -> None:
        steps = self.base, self.prefill, self.attention, self.decode_each, self.decode_context
        loads = (seconds for one in self.loads for seconds in (one.per_token, one.latency))
        if not all(0 <= seconds < math.inf for seconds in (*steps, self.request, *loads)) or not self.prefill:
            raise ConfigError(
                "costs are numbers that are not negative, and the cost of a prefilled token must be more than 0"
            )
        if len(self.loads) != 3:
            raise ConfigError(f"costs need three tiers to load from, not {len(self.loads)}")

    def load(self, tier: CacheTier) -> LoadCost:
        return self.loads[tier - 1]

    @property
    def transfer(self) -> LoadCost:
        """Cost of sending a token to another replica: as from the shared store."""
        return self.loads[-1]

    def scaled(self, factor: float) -> EngineCosts:
        """The costs of an engine whose steps take `factor` times as long."""
        fields = ("base", "prefill", "attention", "decode_each", "decode_context")
        scaled = {name: getattr(self, name) * factor for name in fields}
        return replace(self, **scaled)

    def measured(self) -> Measurement:
        """The time of the prompt with which a router measures a replica that joins."""
        tokens = MEASURED_TOKENS
        return Measurement(tokens, self.base + self.prefill * tokens + self.attention * tokens * tokens / 2)

    def as_known(self, step_tokens: int) -> ReplicaCosts:
        """The costs as a router knows them after learning."""
        return ReplicaCosts(
            self.prefill,
            self.base,
            self.base,
            self.decode_each,
            step_tokens,
            self.loads,
            self.transfer,
            self.attention,
        )


@dataclass(frozen=True, slots=True)
class ReplicaGroup:
    """Replicas that differ from the others of the fleet. Their names are the group's, a hyphen and a number.

    Attributes:
        replicas: how many there are at the start.
        device_tokens, host_tokens, disk_tokens, max_batch_tokens, max_num_seqs: see `FleetSpec`; None: as the others.
        costs: of their steps and loads; None: as the others.
        role: `prefill` replicas compute prompts for the others, `decode` replicas do not compute them for others.
    """

    name: str
    replicas: int = 1
    device_tokens: int | None = None
    host_tokens: int | None = None
    disk_tokens: int | None = None
    max_batch_tokens: int | None = None
    max_num_seqs: int | None = None
    costs: EngineCosts | None = None
    role: Literal["both", "prefill", "decode"] = "both"

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]{0,63}", self.name):
            raise ConfigError(f"a group's name has letters, digits and underscores, not {self.name!r}")
        if self.replicas < 0:
            raise ConfigError(f"the number of replicas of group {self.name} must not be negative")


@dataclass(frozen=True, slots=True)
class FleetSpec:
    """Replicas and their memory.

    Attributes:
        replicas: number of replicas besides those of `groups`. Their names are r0, r1 and so on.
        device_tokens: KV memory of each replica on its device.
        host_tokens, disk_tokens: KV memory of each replica in host memory and on disk; 0 for none.
        shared_tokens: size of a store that all replicas share; 0 for none.
        block_size: tokens per block.
        max_batch_tokens, max_num_seqs, lookahead_blocks: see `EngineConfig`.
        partial_reuse: see `EngineConfig`; needs a trace with single tokens.
        events: replicas send KV events; otherwise the router estimates what they hold.
        learns: the router starts with general costs and learns; otherwise it starts with the true costs.
        prefill_replicas: number of replicas that only compute prompts, beside `replicas`, which then decode. They are the
            group `prefill`.
        groups: replicas that differ from the others.
        changes: failures, restarts, and replicas that are added or removed during the trace.
        quotas: limits of tenants, as of a router (`--quota`); requests beyond them are rejected.
    """

    replicas: int = 8
    device_tokens: int = 1_000_000
    host_tokens: int = 0
    disk_tokens: int = 0
    shared_tokens: int = 0
    block_size: int = 512
    max_batch_tokens: int = 2048
    max_num_seqs: int = 256
    partial_reuse: bool = False
    lookahead_blocks: int = 0
    events: bool = True
    learns: bool = True
    prefill_replicas: int = 0
    groups: tuple[ReplicaGroup, ...] = ()
    changes: tuple[FleetChange, ...] = ()
    quotas: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.prefill_replicas < 0:
            raise ConfigError("the number of prefill replicas must not be negative")
        if self.replicas + sum(group.replicas for group in self.all_groups) > _MOST_REPLICAS:
            raise ConfigError(f"a fleet has at most {_MOST_REPLICAS:,} replicas")
        if (
            self.replicas < 0
            or not self.replicas + sum(group.replicas for group in self.groups)
            or self.block_size < 1
            or self.device_tokens < self.block_size
        ):
            raise ConfigError("a fleet needs at least one replica, and each device must hold at least one block")
        if min(self.max_batch_tokens, self.max_num_seqs) < 1:
            raise ConfigError("a step must have room for at least one token and one sequence")
        if min(self.host_tokens, self.disk_tokens, self.shared_tokens) < 0:
            raise ConfigError("the size of a tier must not be negative")
        names = [group.name for group in self.all_groups]
        if len(set(names)) < len(names):
            raise ConfigError(f"two groups have one name: {', '.join(names)}")
        for name in names:
            self.of(name)

    def at_most(self, tokens: int) -> FleetSpec:
        """These costs with no memory of more than this number of tokens."""
        names = ("device_tokens", "host_tokens", "disk_tokens", "shared_tokens")
        return replace(self, **{name: min(getattr(self, name), tokens) for name in names})

    @property
    def all_groups(self) -> tuple[ReplicaGroup, ...]:
        """The groups, with that of `prefill_replicas`."""
        own = (ReplicaGroup("prefill", self.prefill_replicas, role="prefill"),) if self.prefill_replicas else ()
        return (*self.groups, *own)

    def role(self, group: str) -> Literal["both", "prefill", "decode"]:
        """The role of the replicas of one group."""
        if not group:
            return "decode" if self.prefill_replicas else "both"
        return next(one.role for one in self.all_groups if one.name == group)

    def of(self, group: str) -> FleetSpec:
        """The values of one group; `""` is the replicas of no group. Raises ConfigError for an unknown group."""
        if not group:
            return self
        found = next((one for one in self.all_groups if one.name == group), None)
        if found is None:
            raise ConfigError(
                f"there is no group {group!r}{did_you_mean(group, [one.name for one in self.all_groups])}"
            )
        own = {
            name: value
            for name, value in asdict(found).items()
            if name not in ("name", "costs", "role") and value is not None
        }
        return replace(self, **own | {"replicas": 1}, prefill_replicas=0, groups=(), changes=())

    def members(self) -> dict[str, str]:
        """The replicas at the start, each with its group."""
        found = {f"r{i}": "" for i in range(self.replicas)}
        return found | {f"{one.name}-{i}": one.name for one in self.all_groups for i in range(one.replicas)}

    def resolved_changes(self) -> list[ReplicaChange]:
        """The changes of single replicas, in order of time. Raises ConfigError for one that is impossible."""
        return resolve(self.changes, self.members(), {"", *(group.name for group in self.all_groups)})


@dataclass(frozen=True, slots=True)
class Profile:
    """Measured costs of an engine: the file that `foreword calibrate` writes and `foreword simulate --costs` reads.

    Attributes:
        costs: costs of steps and loads.
        kv_bytes_per_token: bytes of KV per token; None if unknown.
        block_size, max_batch_tokens, max_num_seqs: configuration of the engine.
        about: where, when and how the costs were measured, for people.
    """

    costs: EngineCosts
    kv_bytes_per_token: int | None = None
    block_size: int | None = None
    max_batch_tokens: int | None = None
    max_num_seqs: int | None = None
    about: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps({"format": _FORMAT, **asdict(self)}, indent=2) + "\n"


def read_profile(path: Path) -> Profile:
    """Read a file of costs. Raises ConfigError with file and reason if it is not one."""
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the costs {path}: {reason_of(error)}") from error
    try:
        return _parse(read)
    except (TypeError, ValueError, KeyError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise ConfigError(f"{path} is not a file of costs: {reason}") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}") from error


def _parse(read: Any) -> Profile:
    if not isinstance(read, dict) or read.get("format") != _FORMAT:
        raise ValueError(f"expected an object with format {_FORMAT}")
    given = {name: value for name, value in read.items() if name != "format"}
    _check_names(given, Profile)
    costs = dict(given.pop("costs"))
    _check_names(costs, EngineCosts)
    loads = tuple(LoadCost(float(one["per_token"]), float(one["latency"])) for one in costs.pop("loads"))
    numbers = {name: float(value) for name, value in costs.items()}
    whole = {name: None if value is None else int(value) for name, value in given.items() if name != "about"}
    for name, number in whole.items():
        if number is not None and number < 1:
            raise ValueError(f"{name} must be at least 1, not {number}")
    return Profile(EngineCosts(**numbers, loads=loads), about=dict(given.get("about", {})), **whole)


def _check_names(given: Mapping[str, Any], kind: type[Any]) -> None:
    known = [one.name for one in fields(kind)]
    for name in given:
        if name not in known:
            raise ValueError(f"unknown key {name!r}{did_you_mean(name, known)}")
