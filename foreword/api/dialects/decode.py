"""Decode a JSON body into a struct, and explain what is wrong with it.

Types are strict (`"16"` is not a number). Unknown fields are skipped without building them, as OpenAI and vLLM ignore them.
"""

from __future__ import annotations

import functools
import json
import logging
import re
from collections.abc import Mapping
from typing import Any, Final, TypeVar

import msgspec

from foreword.api.dialects.limits import Limits, root
from foreword.errors import BadRequest

logger = logging.getLogger(__name__)

AnyStruct = TypeVar("AnyStruct", bound=msgspec.Struct)

_NAMES: Final = {
    "int": "a valid integer",
    "float": "a valid number",
    "str": "a valid string",
    "bool": "a valid boolean",
    "array": "a valid array",
    "object": "an object",
    "null": "null",
}
# Fields whose allowed shapes are more than a type, by name.
_SHAPES: Final = {
    "prompt": "a string, a list of strings, a list of token ids, or a list of such lists, and not empty",
    "stop": "a string or a list of strings, none of them empty",
    "stop_sequences": "a list of strings, none of them empty",
    "content": "a string or a list of text parts",
    "system": "a string or a list of text blocks",
}
_WRONG_TYPE: Final = re.compile(r"Expected `([^`]*)`, got `([^`]*)`")
_WRONG_RANGE: Final = re.compile(r"Expected `\w+` (<=|>=|<|>) (\S+)")
_WRONG_LENGTH: Final = re.compile(r"Expected `\w+` of length (<=|>=) (\d+)")
_RANGES: Final = {
    "<=": "less than or equal to",
    ">=": "greater than or equal to",
    "<": "less than",
    ">": "greater than",
}
_MISSING: Final = re.compile(r"Object missing required field `([^`]*)`")
_UNKNOWN: Final = re.compile(r"Object contains unknown field `([^`]*)`")
_PLACE: Final = re.compile(r" - at (`key` in )?`\$([^`]*)`$")
_STEP: Final = re.compile(r"\[(\d+)\]|\.([^.\[\]]+)")
_SHOWN_BYTES: Final = 40
# Of longer bodies nothing is shown or logged: finding it would take memory.
_LOGGED_BYTES: Final = 1 << 20


@functools.cache
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def decode(kind: type[AnyStruct], raw: bytes, limits: Limits) -> AnyStruct:
    """Raises BadRequest, which names the parameter, and BodyTooLarge."""
    limits.check(raw)
    try:
        found: AnyStruct = _decoder(kind).decode(raw)
    except msgspec.ValidationError as error:
        raise _explain(str(error), raw) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        text = str(error).removeprefix("JSON is malformed: ")
        raise BadRequest(f"The body is not valid JSON: {text}") from None
    except RecursionError:
        raise BadRequest("The body is not valid JSON for this server: it is nested too deeply") from None
    if logger.isEnabledFor(logging.DEBUG):
        _log_unknown(kind, raw)
    return found


def _log_unknown(kind: type[msgspec.Struct], raw: bytes) -> None:
    if len(raw) > _LOGGED_BYTES:
        return
    unknown = sorted(msgspec.json.decode(raw, type=dict[str, msgspec.Raw]).keys() - set(kind.__struct_encode_fields__))
    if unknown:
        logger.debug("fields without effect in a request: %s", ", ".join(unknown)[:500])


def _explain(message: str, raw: bytes) -> BadRequest:
    found = _PLACE.search(message)
    path = "" if found is None else found[2].removeprefix(".").replace("[...]", "")
    complaint = message if found is None else message[: found.start()]
    if missing := _MISSING.match(complaint):
        path = f"{path}.{missing[1]}" if path else missing[1]
        return BadRequest(f"{path}: is required", param=root(path))
    if unknown := _UNKNOWN.match(complaint):
        return BadRequest(f"{unknown[1]}: there is no such field", param=unknown[1])
    if not path:
        return BadRequest("The body must be a JSON object")
    return BadRequest(f"{path}: {_complaint(complaint, path)}{_given(raw, path)}", param=root(path))


def _complaint(text: str, path: str) -> str:
    name = path.rpartition(".")[2].partition("[")[0]
    if name in _SHAPES:
        return f"must be {_SHAPES[name]}"
    if wrong := _WRONG_RANGE.match(text):
        return f"must be {_RANGES[wrong[1]]} {wrong[2].removesuffix('.0')}"
    if wrong := _WRONG_LENGTH.match(text):
        return f"must have a length {_RANGES[wrong[1]]} {wrong[2]}"
    if wrong := _WRONG_TYPE.match(text):
        kinds = [_NAMES.get(kind, kind) for kind in wrong[1].split(" | ") if kind != "null"]
        return f"must be {' or '.join(kinds)}"
    return text[:1].lower() + text[1:]


def _given(raw: bytes, path: str) -> str:
    """What the client sent, if it is short and no object or array."""
    if len(raw) > _LOGGED_BYTES:
        return ""
    value: Any = raw
    try:
        for index, name in _STEP.findall(f".{path}"):
            value = _member(value, name) if name else msgspec.json.decode(value, type=list[msgspec.Raw])[int(index)]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, IndexError):
        return ""
    shown = bytes(memoryview(value)[: _SHOWN_BYTES + 1]).strip()
    if not shown or shown[:1] in b"{[":
        return ""
    text = shown[:_SHOWN_BYTES].decode("utf-8", "ignore")
    return f", not {text}{'...' if len(shown) > _SHOWN_BYTES else ''}"


def _member(raw: bytes | msgspec.Raw, name: str) -> msgspec.Raw:
    """A field of an object; the others are not built."""
    found: msgspec.Raw = msgspec.json.decode(raw, type=_one_field(name)).value  # type: ignore[attr-defined]
    return found


@functools.cache
def _one_field(name: str) -> type[msgspec.Struct]:
    """A struct with the field `name`, which is one of those that the bodies have."""
    return msgspec.defstruct("OneField", [("value", msgspec.Raw)], rename={"value": name})


# Checks that types cannot express


def refuse(path: str, reason: str) -> BadRequest:
    """The error for a field: `raise refuse("messages[0].content", "must be ...")`."""
    return BadRequest(f"{path}: {reason}", param=root(path))


class TooMany(BadRequest):
    """A list has more entries than any request needs."""


def check_length(values: Any, most: int, path: str, *, least: int = 0) -> None:
    """Raises BadRequest if a list has too few entries, and TooMany."""
    if len(values) < least:
        raise refuse(path, f"must have at least {least} {'entry' if least == 1 else 'entries'}")
    if len(values) > most:
        raise TooMany(f"{path}: must have at most {most} entries, not {len(values)}", param=root(path))


def one_of(value: str, allowed: Mapping[str, Any] | tuple[str, ...], path: str) -> str:
    """The value, if it is allowed. Raises BadRequest."""
    if value not in allowed:
        names = [repr(name) for name in allowed]
        listed = f"{', '.join(names[:-1])} or {names[-1]}" if len(names) > 1 else names[0]
        raise refuse(path, f"must be {listed}, not {json.dumps(value[:_SHOWN_BYTES], ensure_ascii=False)}")
    return value
