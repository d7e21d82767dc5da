"""Media and prompt embeddings of requests: what they are, by their content, and in which blocks.

Implements the connector's interface for them (`foreword.integrations.vllm.connector_extras`).
"""

from __future__ import annotations

import struct
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Final

import torch

from foreword.integrations.vllm.request_identity import framed
from foreword.newest import Newest

# Kinds of extras; each has a fixed length.
_MEDIA: Final = b"M"
_EMBEDS: Final = b"E"
# Identifiers whose content is remembered: far more than vLLM's encoder cache holds.
_IDENTIFIERS = 1 << 16


@dataclass(frozen=True, slots=True)
class MediaItem:
    """An image, or audio, or other media, in a prompt.

    Attributes:
        content: 32 bytes that identify everything about it except its place.
        offset, length: tokens of its placeholder.
    """

    content: bytes
    offset: int
    length: int


class InputContents:
    """Identifies the media and the prompt embeddings of requests.

    Args:
        block_size: tokens of the blocks that have keys.
        settings: of vLLM, which change what media become.
    """

    def __init__(self, block_size: int, settings: bytes = b"") -> None:
        self._block_size = block_size
        self._media = MediaDigests(settings)

    def of(self, request: Any) -> list[bytes] | None:
        """By block, the media and embeddings in it; None for a request with some that cannot be identified. The last blocks may
        be missing: they have none."""
        items = [self._media.item(feature) for feature in request.mm_features or ()]
        known = [item for item in items if item is not None]
        if len(known) < len(items):
            return None
        found, embeds = media_extras(known, self._block_size), getattr(request, "prompt_embeds", None)
        if embeds is not None:
            mask = getattr(request, "prompt_is_token_ids", None)
            found = _joined(found, embeds_extras(embeds, mask, self._block_size))
        return found


def media_extras(items: Iterable[MediaItem], block_size: int) -> list[bytes]:
    """Extras of the blocks that items overlap: for each item its content, and its offset in relation to the block."""
    found: list[bytes] = []
    for item in sorted(items, key=lambda item: (item.offset, item.length, item.content)):
        if item.length < 1:
            continue
        last = (item.offset + item.length - 1) // block_size
        found += [b""] * (last + 1 - len(found))
        for block in range(item.offset // block_size, last + 1):
            found[block] += _MEDIA + item.content + struct.pack("<q", item.offset - block * block_size)
    return found


def embeds_extras(embeds: torch.Tensor, is_token: Sequence[bool] | None, block_size: int) -> list[bytes]:
    """Extras of a prompt's blocks that have embeddings, `[tokens, hidden]`. `is_token`: positions that are tokens after all."""
    found = []
    for start in range(0, len(embeds), block_size):
        digest = sha256(b"foreword/embeds\x00")
        _feed(digest, embeds[start : start + block_size])
        mask = is_token[start : start + block_size] if is_token is not None else ()
        digest.update(bytes(map(bool, mask)))
        found.append(_EMBEDS + digest.digest())
    return found


def _joined(one: list[bytes], other: list[bytes]) -> list[bytes]:
    length = max(len(one), len(other))
    pairs = zip(one + [b""] * (length - len(one)), other + [b""] * (length - len(other)), strict=True)
    return [first + second for first, second in pairs]


class MediaDigests:
    """Digests of media. An identifier that once stood for other content is not identified again.

    vLLM keeps processed media and encoder outputs by identifier. If a client gives one identifier to two images, either may
    have been computed.
    """

    def __init__(self, settings: bytes = b"") -> None:
        self._settings = settings
        self._hashed: dict[int, tuple[weakref.ref[Any], bytes]] = {}  # by id of the data
        self._by_identifier: Newest[str, bytes] = Newest(_IDENTIFIERS)

    def item(self, feature: Any) -> MediaItem | None:
        """None for a `MultiModalFeatureSpec` that cannot be identified."""
        data = self._data_digest(feature.data)
        if data is None or not self._is_unambiguous(feature.identifier, data):
            return None
        place = feature.mm_position
        names = (str(feature.modality).encode(), feature.identifier.encode(), (feature.mm_hash or "").encode())
        mask = place.is_embed.numpy().tobytes() if place.is_embed is not None else b""
        content = sha256(b"foreword/media\x00" + framed(self._settings, *names, data, mask))
        content.update(struct.pack("<QB", place.length, place.is_embed is not None))
        return MediaItem(content.digest(), place.offset, place.length)

    def _data_digest(self, data: Any) -> bytes | None:
        if data is None:
            return None
        known = self._hashed.get(id(data))
        if known is not None and known[0]() is data:
            return known[1]
        found = _digest_of_item(data.get_data())
        if found is not None:
            key = id(data)
            self._hashed[key] = (weakref.ref(data, lambda _: self._hashed.pop(key, None)), found)
        return found

    def _is_unambiguous(self, identifier: str, data: bytes) -> bool:
        same = self._by_identifier.get(identifier, data) == data
        self._by_identifier[identifier] = data if same else b""
        return same


def _digest_of_item(data: Mapping[str, Any]) -> bytes | None:
    """None without content: in another process (`mm_processor_cache_type` shm), or encoded by another instance."""
    if not any(_has_content(value) for value in data.values()):
        return None
    digest = sha256(b"foreword/item\x00")
    return digest.digest() if _feed(digest, dict(data)) else None


def _has_content(value: Any) -> bool:
    """Whether there are pixels, samples or embeddings, and not only sizes and positions."""
    if isinstance(value, torch.Tensor):
        return value.numel() > 0 and (value.is_floating_point() or value.dtype == torch.uint8)
    return isinstance(value, list | tuple) and any(map(_has_content, value))


def _feed(digest: Any, value: Any) -> bool:
    """Hash nested tensors, each value after its kind and size. False for a value of an unknown kind."""
    if isinstance(value, torch.Tensor):
        digest.update(b"T" + framed(str(value.dtype).encode(), repr(tuple(value.shape)).encode()))
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        return True
    if isinstance(value, dict):
        digest.update(b"D" + struct.pack("<I", len(value)))
        return all(_feed(digest, key) and _feed(digest, value[key]) for key in sorted(value))
    if isinstance(value, list | tuple):
        digest.update(b"L" + struct.pack("<I", len(value)))
        return all(_feed(digest, one) for one in value)
    if value is None or isinstance(value, str | int | float | bytes):
        digest.update(b"S" + framed(type(value).__name__.encode(), repr(value).encode()))
        return True
    return False
