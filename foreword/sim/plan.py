"""The simulations that `foreword simulate` runs: every combination of the given values, each with a name."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from foreword.config import parse_bytes
from foreword.errors import ConfigError, did_you_mean
from foreword.routing.policies import policy_named
from foreword.sim.costs import FleetSpec, ReplicaGroup, read_profile

# Keys of --group that are numbers or sizes, and their fields of `ReplicaGroup`.
_NUMBERS: Final = {"replicas": "replicas", "max-batch-tokens": "max_batch_tokens", "max-num-seqs": "max_num_seqs"}
_SIZES: Final = {"device": "device_tokens", "memory": "host_tokens", "disk": "disk_tokens"}
# Fields of `FleetSpec` that may have several values, and their labels.
AXES: Final[Mapping[str, str]] = {
    "replicas": "replicas",
    "prefill_replicas": "prefill",
    "device_tokens": "device",
    "host_tokens": "memory",
    "disk_tokens": "disk",
    "shared_tokens": "shared",
}


@dataclass(frozen=True, slots=True)
class SimulationCase:
    """A simulation. `name` distinguishes it from the others."""

    name: str
    spec: FleetSpec
    policy: str


def simulation_cases(
    base: FleetSpec, axes: Mapping[str, Sequence[tuple[int, str]]], policies: Sequence[str]
) -> list[SimulationCase]:
    """All combinations of sizes and placement policies. Raises ConfigError for an unknown policy or an impossible fleet.

    `base` is the common part of all fleets. `axes` has values of the fields in `AXES`, each with the text that gave it.
    """
    for policy in policies:
        policy_named(policy)
    cases = []
    for values in itertools.product(*axes.values()):
        chosen = dict(zip(axes, values, strict=True))
        sizes: dict[str, Any] = {name: number for name, (number, _) in chosen.items()}
        spec = replace(base, **sizes)
        varied = [f"{AXES[name]} {text}" for name, (_, text) in chosen.items() if len(axes[name]) > 1]
        for policy in policies:
            parts = [policy, *varied] if len(policies) > 1 else varied
            cases.append(SimulationCase(", ".join(parts) or policy, spec, policy))
    return cases


def counts(text: str, option: str, sample: int = 1) -> list[tuple[int, str]]:
    """`"4,8"` as numbers, divided by `sample`. Raises ConfigError, also if that leaves a remainder."""
    found = [part.strip() for part in text.split(",") if part.strip()]
    if not found or not all(re.fullmatch(r"\d+", part) for part in found):
        raise ConfigError(f"{option} takes whole numbers separated by commas, not {text!r}")
    for part in found:
        if int(part) % sample:
            raise ConfigError(f"--sample {sample}: {option} takes multiples of {sample}, not {part}")
    return [(int(part) // sample, part) for part in found]


def sizes(text: str, option: str, bytes_per_token: int | None) -> list[tuple[int, str]]:
    """`"1000000"` (tokens) or `"40GiB,80GiB"` as tokens. Raises ConfigError, also if the bytes per token are unknown."""
    found = [part.strip() for part in text.split(",") if part.strip()]
    if not found:
        raise ConfigError(f"{option} takes sizes separated by commas, not {text!r}")
    return [(_tokens(part, option, bytes_per_token), part) for part in found]


def _tokens(part: str, option: str, bytes_per_token: int | None) -> int:
    if re.fullmatch(r"\d+", part):
        return int(part)
    size = parse_bytes(part)
    if not bytes_per_token:
        raise ConfigError(
            f"{option} {part}: the bytes of KV per token are unknown; give --kv-bytes, a file with measured costs (--costs), "
            "or the size in tokens, as a plain number"
        )
    return size // bytes_per_token


def parse_group(text: str, bytes_per_token: int | None) -> ReplicaGroup:
    """`"fast replicas=2 device=80GiB costs=fast.json"`. Raises ConfigError, also for an unknown key.

    A file of costs also gives the group's largest step and its number of sequences, unless there are keys for them.
    """
    name, *pairs = text.split() or [""]
    fields: dict[str, Any] = {}
    for pair in pairs:
        key, _, value = pair.partition("=")
        option = f"--group {name}: {key}"
        if key == "costs":
            profile = read_profile(Path(value))
            own = {"max_batch_tokens": profile.max_batch_tokens, "max_num_seqs": profile.max_num_seqs}
            fields = own | fields | {"costs": profile.costs}
        elif key == "role" and value in ("both", "prefill", "decode"):
            fields["role"] = value
        elif key in _SIZES and "," not in value:
            fields[_SIZES[key]] = sizes(value, option, bytes_per_token)[0][0]
        elif key in _NUMBERS and re.fullmatch(r"\d{1,9}", value):
            fields[_NUMBERS[key]] = int(value)
        elif key in _SIZES or key in _NUMBERS:
            raise ConfigError(f"{option} takes one number, not {value!r}")
        else:
            known = ["costs", "role", *_SIZES, *_NUMBERS]
            if key == "role":
                raise ConfigError(f"{option} is both, prefill or decode, not {value!r}")
            raise ConfigError(f"{option} is not a key; choose from {', '.join(known)}{did_you_mean(key, known)}")
    return ReplicaGroup(name, **fields)
