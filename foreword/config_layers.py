"""How a section of the configuration is made of untyped values from several places: files, the environment, flags.

Keys with `repr=False` are secret or may contain a secret: neither the `repr` of a configuration nor an error message shows
their values. Each of them has a second key `NAME_file` (`file_keys`): the file that contains it, so that it is neither on the
command line nor in the environment. `file:PATH` as its value is the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from types import UnionType
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

from foreword.config import keys_of, read_text
from foreword.errors import ConfigError, did_you_mean

T = TypeVar("T")

ENV_PREFIX = "FOREWORD_"
# Variables that Kubernetes sets in every pod for a Service whose name begins with "foreword" (its "Environment variables"
# of Services), without the prefix. A Service `foreword-server` gives FOREWORD_SERVER_PORT, which is also a key's name.
_SERVICE_NAME = re.compile(r"(.*_)?(SERVICE_HOST|SERVICE_PORT(_.+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)")
_SERVICE_URL = re.compile(r"(tcp|udp|sctp)://\S+:\d+")


def is_service_variable(name: str, value: str) -> bool:
    """Whether Kubernetes has set a variable for a Service. `name` is without the prefix."""
    if _SERVICE_NAME.fullmatch(name):
        return True
    return re.fullmatch(r"(.*_)?PORT", name) is not None and _SERVICE_URL.fullmatch(value) is not None


def file_keys(kind: type[Any]) -> dict[str, str]:
    """The key of the file with a secret key of a section, and the secret key: `NAME_file` of NAME, unless the section's `FILES`
    name it. A section that has the former among its own keys, as `master_key_file`, reads the file in its own way."""
    named, keys = dict(getattr(kind, "FILES", ())), keys_of(kind)
    files = {named.get(item.name, f"{item.name}_file"): item.name for item in keys if not item.repr}
    return {file: name for file, name in files.items() if file not in {item.name for item in keys}}


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
    """Create a configuration dataclass from untyped values. Raises ConfigError for an unknown key or a wrong value. `GONE` of a
    class has keys of earlier versions, and what to do about each."""
    types, keys = get_type_hints(kind), keys_of(kind)
    hints = {item.name: types[item.name] for item in keys}
    secret = {item.name for item in keys if not item.repr}
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
            gone = {one.name: one.metadata.get("gone") for one in fields(cast(Any, kind))} | dict(
                getattr(kind, "GONE", ())
            )
            hint = f": {gone[key]}" if key in gone else did_you_mean(key, [*hints, *files])
            raise ConfigError(f"unknown configuration key {where}.{key}{hint}")
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
