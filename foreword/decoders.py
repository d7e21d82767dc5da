"""Typed decoding of JSON and MessagePack that is safe in threads. Only this module lets msgspec look at a type.

msgspec (0.22) prepares a `Struct` when a decoder first needs it, runs Python code on the way, and publishes what is half ready:
a second thread that needs the same type then reads null pointers, and the process ends. Here types are prepared one after
another; what is prepared is only read.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

Value = TypeVar("Value")

_lock = threading.Lock()


def decode_json(data: bytes | bytearray | memoryview | str | msgspec.Raw, kind: type[Value]) -> Value:
    """Raises msgspec.DecodeError (ValidationError where the type does not fit), UnicodeDecodeError and RecursionError."""
    found: Value = _json(kind).decode(data)
    return found


def json_decoder(kind: type[Value]) -> Callable[[bytes], Value]:
    """`decode_json` of one type, for what is decoded for every token."""
    return _json(kind).decode


def decode_msgpack(data: bytes | bytearray | memoryview, kind: type[Value]) -> Value:
    """Raises as `decode_json`."""
    found: Value = _msgpack(kind).decode(data)
    return found


def convert(value: Any, kind: type[Value], *, strict: bool = True) -> Value:
    """Check what was decoded without a type. Raises msgspec.ValidationError. `strict`: text is text, also where a number is
    wanted."""
    _json(kind)
    try:
        return msgspec.convert(value, kind, strict=strict)
    except UnicodeEncodeError as error:  # half a character where one of some words is wanted
        raise msgspec.ValidationError(str(error)) from error


def _prepared_json(kind: Any) -> msgspec.json.Decoder[Any]:
    with _lock:
        return msgspec.json.Decoder(kind)


def _prepared_msgpack(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    with _lock:
        return msgspec.msgpack.Decoder(kind)


_json: Callable[[Any], msgspec.json.Decoder[Any]] = functools.cache(_prepared_json)
_msgpack: Callable[[Any], msgspec.msgpack.Decoder[Any]] = functools.cache(_prepared_msgpack)
