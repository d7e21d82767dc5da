"""Configuration of stores and transfers, and how a section is made of untyped values (`process_config.py` has the others).

A section is a frozen dataclass. An unknown key or a wrong value is an error that says what was expected.

The docstring of a key is the help text of its flag. Keys with `repr=False` are secret or may contain a secret: neither the
`repr` of a configuration nor an error message shows their values. Each of them has a second key `NAME_file` (`file_keys`): the
file that contains it, so that it is neither on the command line nor in the environment. `file:PATH` as its value is the same.
"""

from __future__ import annotations

import errno
import ipaddress
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType, UnionType
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

from foreword.errors import ConfigError, StoreConfigError, did_you_mean, reason_of

T = TypeVar("T")

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
ENV_PREFIX = "FOREWORD_"
# What Kubernetes sets in every pod for a Service whose name begins with "foreword" (kubernetes.io, "Service", "Environment
# variables"), without the prefix. A Service `foreword-server` gives FOREWORD_SERVER_PORT, which is also a key's name.
_SERVICE_NAME = re.compile(r"(.*_)?(SERVICE_HOST|SERVICE_PORT(_.+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)")
_SERVICE_URL = re.compile(r"(tcp|udp|sctp)://\S+:\d+")


def is_service_variable(name: str, value: str) -> bool:
    """Whether Kubernetes has set a variable for a Service. `name` is without the prefix."""
    if _SERVICE_NAME.fullmatch(name):
        return True
    return re.fullmatch(r"(.*_)?PORT", name) is not None and _SERVICE_URL.fullmatch(value) is not None


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


def check_section(section: str, config: Any) -> None:
    """Apply the rules of a section's keys. Raises ConfigError."""
    for item in fields(config):
        value = getattr(config, item.name)
        if value is not None and "rule" in item.metadata and not item.metadata["accepts"](value):
            raise ConfigError(f"{section}.{item.name} must be {item.metadata['rule']}, not {value!r}")


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """Stores for blocks off the device.

    Attributes:
        urls: URLs of stores, fastest first, such as `memory://?size=4GiB` and `disk:///var/cache/foreword?size=200GiB`.
        staging: host memory for copies between device and stores, allocated at start, half of it for the write queue. 1 GiB
            with a GPU, which fills blocks faster than stores take them, and 256 MiB without if it is `auto`. A GPU has a copy.
        direct: with a CUDA GPU and a memory:// store in front, page-lock its memory and copy blocks straight between it and the
            device, which seals and checks them; `staging` is 128 MiB then if it is auto. A test at the start decides whether
            it is used, and the log says why not.
        lookup_timeout: seconds that a request waits for a lookup in remote stores, or a tenth of the time to compute the prompt
            if that is longer. Memory and disks, which answer late only on a busy machine, have 8 times as long, or the whole
            time to compute the prompt.
        load_timeout: maximum seconds for loading blocks; loading ends earlier if computing them is faster.
        flush_seconds: seconds that the process waits at exit for blocks that are not written yet.
        integrity_secrets: secrets that authenticate what is written to shared stores, each as `ID:SECRET` with a number: the
            first signs, all verify. What is not signed with one of them is refused.
    """

    urls: tuple[str, ...] = field(default=(), repr=False)  # they may contain passwords
    staging: str = "auto"
    direct: bool = False
    lookup_timeout: float = positive(0.25)
    load_timeout: float = positive(30.0)
    flush_seconds: float = not_negative(20.0)
    integrity_secrets: tuple[str, ...] = field(default=(), repr=False)

    def integrity_keys(self) -> list[tuple[int, str]]:
        """The numbers and texts of `integrity_secrets`. Raises ConfigError."""
        found = []
        for entry in self.integrity_secrets:
            number, _, text = entry.partition(":")
            if not number.isascii() or not number.isdecimal() or not 0 < int(number[:12]) < 1 << 31:
                raise ConfigError("store.integrity_secrets are written ID:SECRET, with a number from 1 as ID")
            check_secret("store.integrity_secrets", text)
            found.append((int(number), text))
        if len({number for number, _ in found}) < len(found):
            raise ConfigError("store.integrity_secrets has a number twice")
        return found

    def __post_init__(self) -> None:
        self.integrity_keys()
        if not self.staging_bytes("cpu"):
            raise ConfigError("store.staging (--store-staging) must have room for a block")
        check_section("store", self)

    def staging_bytes(self, device: str) -> int:
        """Bytes of `staging` for KV on a device of this type."""
        if self.staging == "auto":
            if device in ("cpu", "none"):
                return 256 << 20
            return 128 << 20 if self.direct else 1 << 30
        return parse_bytes(self.staging, "store.staging (--store-staging)")


def encryption_variables() -> dict[str, str]:
    """Settings that FOREWORD_ENCRYPTION_* give, by key."""
    prefix = f"{ENV_PREFIX}ENCRYPTION_"
    found = {name.removeprefix(prefix): text for name, text in os.environ.items() if name.startswith(prefix)}
    return {name.lower(): text for name, text in found.items() if not is_service_variable(name, text)}


@dataclass(frozen=True, slots=True)
class EncryptionConfig:
    """Encryption of blocks and records in stores that outlive the process. Needs stores, a key store and master keys.

    Attributes:
        key_store: folder, or URL of a store, that keeps each tenant's data key, encrypted by a master key; without it nothing
            is encrypted. It is none of the stores for blocks, and has no copies that outlive a deletion.
        master_keys: keys that encrypt data keys, each as `ID:KEY`, 64 hexadecimal digits: the first encrypts, all decrypt.
        master_key_file: file with one such entry per line; it is read again when a data key names an unknown one.
        master_key_command: command that prints such lines, for a key management service; it is run when they are needed.
        read_plain: also read blocks and records that are not encrypted, while encryption is switched on in a fleet.
        check_seconds: seconds after which a server looks again whether a data key exists.
        outage_seconds: seconds for which data keys are used while the key store does not answer.
    """

    key_store: str | None = field(default=None, repr=False)  # it may contain a password
    master_keys: tuple[str, ...] = field(default=(), repr=False)
    master_key_file: str | None = None
    master_key_command: str | None = field(default=None, repr=False)
    read_plain: bool = False
    check_seconds: float = between(0.01, 60.0, 1.0)
    outage_seconds: float = between(0.0, 3600.0, 30.0)

    def __post_init__(self) -> None:
        sources = [one for one in (self.master_keys, self.master_key_file, self.master_key_command) if one]
        if len(sources) != (1 if self.key_store else 0):
            raise ConfigError(
                "encryption needs key_store, and exactly one of master_keys, master_key_file and master_key_command"
            )
        check_section("encryption", self)

    @classmethod
    def from_environment(cls, given: Mapping[str, Any] = MappingProxyType({})) -> EncryptionConfig:
        """The section as FOREWORD_ENCRYPTION_* give it, for tools and connectors without a configuration file. What is given
        here has precedence. Raises ConfigError."""
        return build(cls, "encryption", merged_layers(cls, (encryption_variables(), given)))


SHORTEST_SECRET = 16


def ip_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """An IP address; an IPv4-mapped IPv6 address as the IPv4 address. None for a name."""
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        return None
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return mapped or found


def is_loopback(host: str) -> bool:
    """Whether it is a name or address of the loopback interface."""
    found = ip_address(host)
    return host == "localhost" or (found is not None and found.is_loopback)


def check_secret(key: str, text: str) -> None:
    """Raises ConfigError for a secret that can be guessed, without repeating it."""
    if len(text) < SHORTEST_SECRET:
        raise ConfigError(
            f"{key} must have at least {SHORTEST_SECRET} characters; create one with `openssl rand -hex 32`"
        )


def file_keys(kind: type[Any]) -> dict[str, str]:
    """`NAME_file` of each secret key of a section, and its NAME. A section that has a key for the file itself, as `secret_file`
    for `secret` and `api_key_file` for `api_keys`, reads it in its own way."""
    names = {item.name for item in fields(kind)}
    secret = [item.name for item in fields(kind) if not item.repr]
    return {f"{name}_file": name for name in secret if not {f"{name}_file", f"{name.removesuffix('s')}_file"} & names}


def merged_layers(kind: type[Any], layers: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """A section's values from several places, the last one strongest. A secret and the file with it are one setting: the later
    place decides which is given."""
    files = file_keys(kind)
    other = files | {name: file for file, name in files.items()}
    merged: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            if value or key not in files:  # an empty name of a file takes no secret away
                merged.pop(other.get(key, ""), None)
        merged |= layer
    return merged


def build(kind: type[T], where: str, values: Mapping[str, Any]) -> T:
    """Create a configuration dataclass from untyped values. Raises ConfigError for an unknown key or a wrong value."""
    hints = get_type_hints(kind)
    secret = {item.name for item in fields(cast(Any, kind)) if not item.repr}
    files = file_keys(kind)
    for file, key in files.items():
        if values.get(file) and values.get(key):
            raise ConfigError(f"give {where}.{key} or {where}.{file}, not both")
    found: dict[str, Any] = {}
    for key, value in values.items():
        if key not in files:
            found[key] = _from_file(f"{where}.{key}", hints.get(key), value) if key in secret else value
        elif value:
            text = read_secret(f"file:{value}", f"{where}.{files[key]}")
            found[files[key]] = text.splitlines() if get_origin(hints[files[key]]) is tuple else text
    for key in found:
        if key not in hints:
            raise ConfigError(f"unknown configuration key {where}.{key}{did_you_mean(key, [*hints, *files])}")
    return kind(**{key: _coerce(f"{where}.{key}", hints[key], found[key], secret=key in secret) for key in found})


def _from_file(where: str, hint: Any, value: Any) -> Any:
    """A secret that is written `file:PATH` is what that file contains: a list of secrets has one a line. Raises ConfigError."""
    if get_origin(hint) is tuple and isinstance(value, str):
        value = value.split(",")
    if isinstance(value, list | tuple):
        lists = [_from_file(where, str, item) for item in value]
        return [line for one in lists for line in (one.splitlines() if isinstance(one, str) else [one])]
    # `file://` begins no path but a URL, such as that of a store.
    if not isinstance(value, str) or not value.startswith("file:") or value.startswith("file://"):
        return value
    return read_secret(value, where)


def read_secret(text: str, where: str) -> str:
    """A secret as given to a command: `file:PATH` is what that file contains. Raises ConfigError."""
    if not text.startswith("file:"):
        return text
    path = text.removeprefix("file:")
    found = read_text(path, f"{where} from").strip()
    if not found:
        raise ConfigError(f"cannot read {where} from {path}: the file is empty")
    return found


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


def _coerce(where: str, hint: Any, value: Any, *, secret: bool) -> Any:
    """`value` as type `hint`. Text, as from the environment, is parsed; other values must already have the right type."""
    options = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    if type(None) in options and (value is None or value == ""):
        return None
    wanted = next(option for option in options if option is not type(None))
    if get_origin(wanted) is tuple:
        if not isinstance(value, str | list | tuple):
            raise ConfigError(f"{where} must be a list of strings, not {_shown(value, secret=secret)}")
        items = value.split(",") if isinstance(value, str) else [str(item) for item in value]
        return tuple(item.strip() for item in items if item.strip())
    try:
        return _scalar(wanted, value)
    except (ValueError, TypeError, OverflowError):
        raise ConfigError(f"{where} must be of type {wanted.__name__}, not {_shown(value, secret=secret)}") from None


def _shown(value: Any, *, secret: bool) -> str:
    return f"a {type(value).__name__}" if secret else repr(value)


def _scalar(wanted: type, value: Any) -> Any:
    if wanted is bool:
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in ("1", "true", "yes", "on", "0", "false", "no", "off"):
            return value.lower() in ("1", "true", "yes", "on")
        raise ValueError(value)
    fits = isinstance(value, str | int | float) if wanted is str else wanted is not int or not isinstance(value, float)
    if isinstance(value, bool) or not fits:
        raise ValueError(value)
    return wanted(value)
