"""Rules of configuration keys, and checks of their values, for the sections of every product (`store_config.py`,
`transfer_config.py`, `process_config.py`, `engine_config.py`; `configuration.py` has all together).

A section is a frozen dataclass, made by `config_layers.py`. An unknown key or a wrong value is an error that says what was
expected. The docstring of a key is the help text of its flag.
"""

from __future__ import annotations

import errno
import math
import os
import re
import tempfile
from collections.abc import Callable
from dataclasses import Field, field, fields
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeVar

from foreword.errors import ConfigError, StoreConfigError, reason_of

T = TypeVar("T")

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def parse_bytes(text: str, where: str = "") -> int:
    """`"4GiB"`, `"500MB"`, `"4g"` or `"1048576"` as a number of bytes. Raises ConfigError, which names the key `where`."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].lower() not in _UNITS:
        name = f"{where}: " if where else ""
        raise ConfigError(f"{name}{text!r} is not a size in bytes; write for example 4GiB, 500MB or 1048576")
    # Exact for any size: a float could overflow or lose bytes.
    return int(Fraction(match[1]) * _UNITS[match[2].lower()])


# Keys with a rule: `check_section` applies it.


def checked(default: T, rule: str, accepts: Callable[[Any], bool]) -> T:
    """A key whose value, unless it is None, must be as `rule` says."""
    return field(default=default, metadata={"rule": rule, "accepts": accepts})


def at_least(low: int, default: T) -> T:
    return checked(default, f"at least {low}", lambda value: value >= low)


def between(low: float, high: float, default: T) -> T:
    return checked(default, f"between {low} and {high}", lambda value: low <= value <= high)


def positive(default: float) -> float:
    return checked(default, "more than 0", lambda value: 0 < value < math.inf)


def not_negative(default: float) -> float:
    return checked(default, "0 or more", lambda value: 0 <= value < math.inf)


def one_of(choices: tuple[str, ...], default: T) -> T:
    return checked(default, f"{', '.join(choices[:-1])} or {choices[-1]}", lambda value: value in choices)


def fixed(value: str) -> str:
    """Why a key is unknown that once was known."""
    return f"it is {value} and cannot be set; remove it"


def constant(default: T, value: str) -> T:
    """A parameter of a section's constructor that no configuration sets. `value` is for the error of who tries."""
    return field(default=default, kw_only=True, metadata={"gone": fixed(value)})


def keys_of(kind: type[Any]) -> list[Field[Any]]:
    """The fields of a section that a configuration may set."""
    return [one for one in fields(kind) if "gone" not in one.metadata]


def check_section(section: str, config: Any) -> None:
    """Apply the rules of a section's keys. Raises ConfigError."""
    for item in fields(config):
        value = getattr(config, item.name)
        if value is not None and "rule" in item.metadata and not item.metadata["accepts"](value):
            raise ConfigError(f"{section}.{item.name} must be {item.metadata['rule']}, not {value!r}")


SHORTEST_SECRET = 16


def check_secret(key: str, text: str) -> None:
    """Raises ConfigError for a secret that can be guessed, without repeating it."""
    if len(text) < SHORTEST_SECRET:
        raise ConfigError(
            f"{key} must have at least {SHORTEST_SECRET} characters; create one with `openssl rand -hex 32`"
        )


def read_text(path: str | Path, what: str, encoding: str = "utf-8") -> str:
    """The text of a file that the user has named, `what` in the error's message. Raises ConfigError."""
    try:
        return Path(path).read_text(encoding=encoding)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {what} {path}: {reason_of(error)}") from None


def vllm_batch_invariant() -> bool:
    """Whether a vLLM of this environment is to compute the same bits whatever else is in the batch."""
    return os.environ.get("VLLM_BATCH_INVARIANT", "0") not in ("", "0")


def check_folder(folder: str) -> None:
    """Raises StoreConfigError if the folder does not exist and cannot be created. Does not create it."""
    place = os.path.abspath(folder)
    if os.path.isdir(place):
        return  # one that cannot be written is only read
    while not os.path.lexists(place):
        place = os.path.dirname(place)
    try:
        # The system alone can tell: a folder is made beside it and removed.
        os.rmdir(tempfile.mkdtemp(prefix=".foreword-", dir=place))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):  # then the store waits for room
            reason = f"the folder {folder} cannot be created: {error.strerror}: {place}"
            raise StoreConfigError(reason) from None
