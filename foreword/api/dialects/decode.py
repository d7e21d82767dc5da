"""Decode a JSON body into a struct within limits, and explain what is wrong with it.

Limits are checked on the bytes, before objects are built from them. Types are strict (`"16"` is not a number). Unknown fields
are skipped without building them; `unknown_fields` names them.
"""

from __future__ import annotations

import codecs
import functools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import msgspec

from foreword.api.errors import MAX_BODY_BYTES, BodyTooLarge
from foreword.decoders import convert, decode_json
from foreword.errors import BadRequest
from foreword.tokens.structured_output import MAX_CHOICES, MAX_FORMAT_CHARACTERS, MAX_FORMAT_DEPTH

# A field that is kept as JSON and was not given.
NO_JSON: Final = msgspec.Raw()
# Its default where fields are described in a schema, which cannot show the object itself.
UNSET_RAW: Final[Any] = msgspec.field(default_factory=lambda: NO_JSON)
_MOST_MESSAGES: Final = 16_384
_MOST_VALUES: Final = 4_000_000
_PIECE_BYTES: Final = 1 << 18
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
# No part of a longer body is shown or logged: finding it would take memory.
_LOGGED_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a body's content.

    Attributes:
        body_bytes: of the whole body. text_bytes: of one without images.
        values: numbers, objects and arrays in the whole body, and strings that are not keys.
        containers, strings: objects and arrays, and strings, in the whole body. They take more memory than numbers.
        messages, prompts, tools, stop_strings, stop_tokens, biases, choices: entries of these lists. `choices` are those of
            structured output.
        token_ids: of all prompts together.
        schema_bytes, schema_depth: of one JSON schema, grammar or other nested object that the client defines.
    """

    body_bytes: int = MAX_BODY_BYTES
    text_bytes: int = MAX_BODY_BYTES
    values: int = _MOST_VALUES
    containers: int = 5 * _MOST_MESSAGES
    strings: int = 40 * _MOST_MESSAGES
    messages: int = _MOST_MESSAGES
    prompts: int = 2048
    token_ids: int = _MOST_VALUES
    tools: int = 1024
    stop_strings: int = 64
    stop_tokens: int = 1024
    biases: int = 65_536
    choices: int = MAX_CHOICES
    schema_bytes: int = MAX_FORMAT_CHARACTERS
    schema_depth: int = MAX_FORMAT_DEPTH

    @classmethod
    def for_model(cls, max_model_len: int, text_bytes: int = MAX_BODY_BYTES, image_bytes: int = 0) -> Limits:
        """The limits for a model. Every message and every entry of a prompt takes at least a token."""
        messages = min(max(max_model_len, 256), _MOST_MESSAGES)
        values = min(max(16 * max_model_len, 1 << 17), _MOST_VALUES)
        containers = 4 * messages + 16_384
        return cls(
            body_bytes=max(text_bytes, image_bytes),
            text_bytes=text_bytes,
            values=values,
            containers=containers,
            strings=8 * containers,
            messages=messages,
            token_ids=values,
        )

    def check(self, raw: bytes) -> None:
        """Raises BodyTooLarge and BadRequest. Takes a few nanoseconds per byte, in steps that let other threads run."""
        if len(raw) > self.body_bytes:
            raise BodyTooLarge(self.body_bytes)
        if not raw.isascii():
            _check_utf8(raw)
        # Most bodies are short, or have few of these characters, in texts or not.
        if len(raw) <= min(self.containers, self.values, 2 * self.strings):
            return
        if self._fits(_Counts().add(raw)) and raw.count(b'"') <= 2 * self.strings:
            return
        counts = _Counts()
        for piece in _pieces(raw):
            counts.add_piece(piece, 2 * self.strings)
            if not self._fits(counts):
                raise BadRequest("The body has more values, objects or arrays than any request needs")

    def _fits(self, counts: _Counts) -> bool:
        return counts.containers <= self.containers and counts.containers + counts.commas <= self.values


@dataclass(slots=True)
class _Counts:
    """Structural characters of JSON, read piece by piece. `inside`: the next piece begins inside of a string."""

    containers: int = 0
    commas: int = 0
    quotes: int = 0
    inside: bool = False

    def add(self, text: bytes) -> _Counts:
        """Count the characters of a text without strings."""
        self.containers += text.count(b"{") + text.count(b"[")
        self.commas += text.count(b",")
        return self

    def add_piece(self, piece: bytes, most_quotes: int) -> None:
        """Count what stands outside of strings. Raises BadRequest for too many quotes, before the text is split at them."""
        if b"\\" in piece:
            piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        quotes = piece.count(b'"')
        self.quotes += quotes
        if self.quotes > most_quotes:
            raise BadRequest(f"The body has more than {most_quotes // 2} strings, more than any request needs")
        self.add(b" ".join(piece.split(b'"')[self.inside :: 2]))
        self.inside ^= bool(quotes % 2)


def _pieces(raw: bytes) -> Iterator[bytes]:
    """The body in pieces that do not end inside of an escape sequence."""
    start = 0
    while start < len(raw):
        piece = raw[start : start + _PIECE_BYTES]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:
            piece = raw[start : start + _PIECE_BYTES + 1]
        yield piece
        start += len(piece)


def as_utf8(raw: bytes) -> bytes:
    """A body in UTF-8, from JSON in UTF-8, UTF-16 or UTF-32, with or without a byte order mark. Raises BadRequest."""
    if raw[:1] == b"{" and b"\0" not in raw[:4]:  # most bodies; others begin with a mark, or have zeros there
        return raw
    encoding = json.detect_encoding(raw)
    try:
        return raw if encoding == "utf-8" else raw.decode(encoding).encode()
    except UnicodeError:
        raise BadRequest(f"The body is not valid JSON: it is not {encoding.upper()}") from None


def _check_utf8(raw: bytes) -> None:
    decoder = codecs.getincrementaldecoder("utf-8")()
    for start in range(0, len(raw), _PIECE_BYTES):
        end = start + _PIECE_BYTES
        try:
            decoder.decode(raw[start:end], final=end >= len(raw))
        except UnicodeDecodeError:
            raise BadRequest(f"The body is not valid JSON: it is not UTF-8 at byte {start} or after it") from None


def is_set(raw: msgspec.Raw) -> bool:
    """Whether a field that is kept as JSON was given and is not null."""
    if raw is NO_JSON:
        return False
    view = memoryview(raw)
    return bool(view) and view[:4].tobytes() != b"null"


def bounded_object(raw: msgspec.Raw, param: str, limits: Limits) -> dict[str, Any] | None:
    """Decode a nested object that the client defines, such as a JSON schema; None for null. Raises BadRequest."""
    if not is_set(raw):
        return None
    if len(memoryview(raw)) > limits.schema_bytes:
        raise BadRequest(f"{param}: must have at most {limits.schema_bytes} bytes", param=root(param))
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"{param}: is not valid JSON: {error}", param=root(param)) from None
    except RecursionError:
        raise _too_deep(param, limits) from None
    if not isinstance(value, dict):
        raise BadRequest(f"{param}: must be an object", param=root(param))
    check_depth(value, param, limits)
    return value


def check_depth(value: Any, param: str, limits: Limits) -> None:
    """Raises BadRequest for objects and arrays that are nested too deeply."""
    level = [value]
    for _ in range(limits.schema_depth + 1):
        level = [child for node in level for child in _children(node)]
        if not level:
            return
    raise _too_deep(param, limits)


def _children(node: Any) -> list[Any]:
    inner = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    return [child for child in inner if isinstance(child, dict | list)]


def _too_deep(param: str, limits: Limits) -> BadRequest:
    return BadRequest(f"{param}: must be nested at most {limits.schema_depth} levels deep", param=root(param))


def root(path: str) -> str:
    """The parameter to which a path such as `messages[0].content` belongs."""
    return path.partition(".")[0].partition("[")[0]


def decode(kind: type[AnyStruct], raw: bytes, limits: Limits) -> AnyStruct:
    """Raises BadRequest, which names the parameter, and BodyTooLarge."""
    limits.check(raw)
    try:
        found = decode_json(raw, kind)
    except msgspec.ValidationError as error:
        raise _explain(str(error), raw) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        text = str(error).removeprefix("JSON is malformed: ")
        raise BadRequest(f"The body is not valid JSON: {text}") from None
    except RecursionError:
        raise BadRequest("The body is not valid JSON for this server: it is nested too deeply") from None
    return found


def from_texts(kind: type[AnyStruct], values: Mapping[str, str | list[str]]) -> AnyStruct:
    """A struct from texts, as queries have them. Raises BadRequest, which names the parameter."""
    try:
        return convert(values, kind, strict=False)
    except msgspec.ValidationError as error:
        raise _explain(str(error), msgspec.json.encode(values)) from None


def unknown_fields(kind: type[msgspec.Struct], given: Mapping[str, msgspec.Raw]) -> list[str]:
    """The fields of an object that have no effect, because a body of this kind does not have them. Of nested objects only
    `stream_options` is looked at, whose usage in each chunk clients of vLLM ask for."""
    known = frozenset(kind.__struct_encode_fields__)
    options = bytes(given.get("stream_options", b"null")) if "stream_options" in known else b"null"
    said = {} if options == b"null" else decode_json(options, dict[str, msgspec.Raw])
    nested = [
        f"stream_options.{name}" for name in said if name == "continuous_usage_stats" and bytes(said[name]) == b"true"
    ]
    return [*(name for name in given if name not in known), *nested]


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
    """The value that the client sent, if it is short and no object or array."""
    if len(raw) > _LOGGED_BYTES:
        return ""
    value: Any = raw
    try:
        for index, name in _STEP.findall(f".{path}"):
            value = _member(value, name) if name else decode_json(value, list[msgspec.Raw])[int(index)]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, IndexError):
        return ""
    shown = bytes(memoryview(value)[: _SHOWN_BYTES + 1]).strip()
    if not shown or shown[:1] in b"{[":
        return ""
    text = shown[:_SHOWN_BYTES].decode("utf-8", "ignore")
    return f", not {text}{'...' if len(shown) > _SHOWN_BYTES else ''}"


def _member(raw: bytes | msgspec.Raw, name: str) -> msgspec.Raw:
    """A field of an object; the others are not built."""
    found: msgspec.Raw = decode_json(raw, _one_field(name)).value  # type: ignore[attr-defined]
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


class Body(msgspec.Struct, kw_only=True):
    """A body with checks of its own."""

    def check(self, limits: Limits) -> None:
        """Raises BadRequest for what types cannot express."""


AnyBody = TypeVar("AnyBody", bound=Body)


def parse_body(kind: type[AnyBody], raw: bytes, limits: Limits) -> AnyBody:
    """Parse a JSON body. Raises BadRequest, which names the parameter, and BodyTooLarge."""
    body = decode(kind, raw, limits)
    body.check(limits)
    return body
