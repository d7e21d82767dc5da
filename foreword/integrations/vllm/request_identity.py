"""The identity of a request's KV besides its tokens: tenant, adapter, weights version, media and prompt embeddings.

The request's `cache_salt` is the salt of the chain's root, so that all chains of a tenant can be erased. A router or a
gateway writes the tenant into it (`blocks/salt.py`); without one, all requests are of one tenant. Everything else goes into
the extras of the blocks: what holds for the whole request into those of block 0, as each key covers the keys before it. A
request with a part that cannot be identified is never cached.

vLLM's own keys trust the names that clients give: an adapter's path, an image's uuid, the id in its EXIF data. A store outlives
the server and is shared, so here the content counts: digests of adapter files and of processed media.
"""

from __future__ import annotations

import struct
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import torch

from foreword.blocks.salt import Salt
from foreword.integrations.vllm.weights import Adapter, AdapterFiles
from foreword.newest import Newest

# Kinds of extras; each has a fixed length.
_WEIGHTS, _MEDIA, _EMBEDS = b"W", b"M", b"E"
# Identifiers whose content is remembered: far more than vLLM's encoder cache holds.
_IDENTIFIERS = 1 << 16


@dataclass(frozen=True, slots=True)
class RequestIdentity:
    """The parts of a request, besides tokens, tenant and model, that determine its KV.

    Attributes:
        adapter: the request's adapter. Workers check that it is what they compute with.
        adapter_salt: digest of the adapter and of settings that change what it does; b"" without one.
        inputs: by block, the media and embeddings in it. Shorter than the request: the other blocks have none.
        media: how many media items the request had. A session whose count has changed has another identity.
    """

    adapter: Adapter | None = None
    adapter_salt: bytes = b""
    inputs: Sequence[bytes] = ()
    media: int = 0

    def describes(self, request: Any) -> bool:
        """Whether the request still has this identity. Only a session's changes: the next input may bring media."""
        return len(request.mm_features or ()) == self.media

    def extras(self, version: bytes = b"") -> Sequence[bytes]:
        """`TokenChain`'s extras. `version` is `WeightsVersion.salt`."""
        if not self.adapter_salt and not version:
            return self.inputs
        weights = _WEIGHTS + sha256(b"foreword/request\x00" + framed(self.adapter_salt, version)).digest()
        return [weights + (self.inputs[0] if self.inputs else b""), *self.inputs[1:]]


_PLAIN = RequestIdentity()


def salt_of(request: Any) -> Salt:
    """The salt of the root of a request's chain."""
    return Salt.parse(request.cache_salt)


def framed(*parts: bytes) -> bytes:
    """Parts, each after its length (uint32 little-endian): different parts give different bytes."""
    return b"".join(struct.pack("<I", len(part)) + part for part in parts)


def request_identities(vllm_config: Any, block_size: int) -> RequestIdentities:
    """For vLLM's configuration: `RequestIdentities` with blocks of `block_size` tokens."""
    import vllm
    from vllm.v1.core import kv_cache_utils

    lora, media = vllm_config.lora_config, getattr(vllm_config.model_config, "multimodal_config", None)
    names = ("lora_dtype", "target_modules", "enable_tower_connector_lora", "enable_moe_shared_loras")
    settings = [repr(getattr(lora, name, None)) for name in names]
    settings.append(repr(getattr(media, "video_pruning_rate", None)))
    # The probe (`kv_probe.py`) has no adapter and no media, so it shows nothing about what another version makes of them.
    settings.append(vllm.__version__)
    extra_keys = getattr(kv_cache_utils, "generate_block_hash_extra_keys", None)
    return RequestIdentities(block_size, extra_keys, framed(*(one.encode() for one in settings)))


class RequestIdentities:
    """Identifies requests.

    Args:
        block_size: tokens of the blocks that have keys.
        extra_keys: vLLM's `generate_block_hash_extra_keys`; None if this vLLM has none.
        settings: of vLLM, which change what adapters do and what media become.
    """

    def __init__(
        self,
        block_size: int,
        extra_keys: Callable[[Any, int, int, int], tuple[Any, int]] | None = None,
        settings: bytes = b"",
    ) -> None:
        self._block_size = block_size
        self._settings = settings
        self._files = AdapterFiles()
        self._extra_keys = extra_keys
        self._media = MediaDigests(settings)

    def of(self, request: Any) -> RequestIdentity | None:
        """None for a request that must not be cached. Costs microseconds for text, and a hash of the data of new media."""
        if not self._keys_are_known(request):
            return None
        adapter, salt = None, b""
        if request.lora_request is not None:
            digest = self._files.digest(request.lora_request.lora_path)
            if digest is None:
                return None
            adapter = Adapter(int(request.lora_request.lora_int_id), digest)
            salt = self._adapter_salt(request.lora_request, digest)
        features, embeds = request.mm_features or (), getattr(request, "prompt_embeds", None)
        if not features and embeds is None:
            return RequestIdentity(adapter, salt) if adapter else _PLAIN
        items = [self._media.item(feature) for feature in features]
        known = [item for item in items if item is not None]
        if len(known) < len(items):
            return None
        extras = media_extras(known, self._block_size)
        if embeds is not None:
            mask = getattr(request, "prompt_is_token_ids", None)
            extras = _joined(extras, embeds_extras(embeds, mask, self._block_size))
        return RequestIdentity(adapter, salt, extras, len(items))

    def _adapter_salt(self, adapter: Any, digest: bytes) -> bytes:
        fused = bytes([bool(getattr(adapter, "is_3d_lora_weight", False))])
        return sha256(b"foreword/lora\x00" + framed(self._settings, digest, fused)).digest()

    def _keys_are_known(self, request: Any) -> bool:
        """Whether vLLM's own block hashes have as many parts as are known here."""
        if self._extra_keys is None:
            return True
        embeds = getattr(request, "prompt_embeds", None) is not None
        end = 0 if embeds else request.num_prompt_tokens  # vLLM would hash the embeddings of the range
        keys, _ = self._extra_keys(request, 0, end, 0)
        media = sum(feature.mm_position.offset < end for feature in request.mm_features or ())
        known = media + embeds + bool(request.cache_salt) + (request.lora_request is not None)
        return len(keys or ()) == int(known)


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
