"""The wire format of KV cache events: vLLM's, over ZeroMQ. Publishers and the router use these definitions.

A PUB socket sends messages `[topic, number (8 bytes, big-endian), MessagePack of [time, events, data-parallel rank]]`. A ROUTER
socket answers a message number with all kept messages from that number on, and an end marker.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

DEVICE_MEDIUM: Final = "GPU"
HOST_MEDIUM: Final = "CPU"
STORAGE_MEDIUM: Final = "STORAGE"
REMOTE: Final = "REMOTE"
REPLAY_END: Final = (-1).to_bytes(8, "big", signed=True)
_NUMBER_BYTES: Final = 8


class BlockStored(msgspec.Struct, omit_defaults=True, tag=True):
    """Blocks of one chain were stored. vLLM's event with its fields in order."""

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[str] | None] | None = None
    locality: str | None = None
    ownership: str | None = None


class BlockRemoved(msgspec.Struct, omit_defaults=True, tag=True):
    """Blocks were removed. vLLM's event with its fields in order."""

    block_hashes: list[bytes]
    medium: str | None
    locality: str | None = None
    ownership: str | None = None


# Before version 0.11 vLLM sent events as lists instead of maps.
_LIST_FIELDS: Final[Mapping[str, Sequence[str]]] = {
    "BlockStored": BlockStored.__struct_fields__[:8],
    "BlockRemoved": BlockRemoved.__struct_fields__[:2],
}
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode


def encode_number(number: int) -> bytes:
    return number.to_bytes(_NUMBER_BYTES, "big")


def decode_number(frame: bytes) -> int | None:
    """A message number, or None for a frame of the wrong length."""
    return int.from_bytes(frame, "big") if len(frame) == _NUMBER_BYTES else None


def encode_batch(time: float, events: Iterable[object]) -> bytes:
    """The payload of a message."""
    return _encode([time, events, 0])


def decode_batch(payload: bytes) -> list[Any] | None:
    """The events of a payload, not checked one by one. None for a payload that is not a list with a list of events.

    Raises msgspec.DecodeError or ValueError for invalid MessagePack.
    """
    batch = _decode(payload)
    if not isinstance(batch, list) or len(batch) < 2 or not isinstance(batch[1], list):
        return None
    return batch[1]


def event_fields(event: object) -> tuple[str, Mapping[str, Any]]:
    """The type and fields of an event: a map with `type`, or a list that starts with it. An empty type if it is neither."""
    if isinstance(event, Mapping):
        return str(event.get("type", "")), event
    if isinstance(event, Sequence) and not isinstance(event, str | bytes) and event:
        kind = str(event[0])
        return kind, dict(zip(_LIST_FIELDS.get(kind, ()), event[1:], strict=False))
    return "", {}
