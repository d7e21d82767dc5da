"""The file of measured costs that `foreword calibrate` writes and `foreword simulate --costs` reads."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from foreword.errors import ConfigError, did_you_mean, reason_of
from foreword.routing.costs import LoadCost
from foreword.sim.costs import EngineCosts

FORMAT: Final = 1


@dataclass(frozen=True, slots=True)
class Profile:
    """Measured costs of an engine.

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
        return json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, indent=2) + "\n"


def read_profile(path: Path) -> Profile:
    """Read a file of costs. Raises ConfigError with file and reason if it is not one."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the costs {path}: {reason_of(error)}") from error
    try:
        return _parse(fields)
    except (TypeError, ValueError, KeyError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise ConfigError(f"{path} is not a file of costs: {reason}") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}") from error


def _parse(fields: Any) -> Profile:
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        raise ValueError(f"expected an object with format {FORMAT}")
    given = {name: value for name, value in fields.items() if name != "format"}
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
    known = [one.name for one in dataclasses.fields(kind)]
    for name in given:
        if name not in known:
            raise ValueError(f"unknown key {name!r}{did_you_mean(name, known)}")
