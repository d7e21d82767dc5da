"""The identity of a request's KV besides its tokens: tenant, adapter, weights version, media and prompt embeddings.

The request's `cache_salt` is the salt of the chain's root, so that all chains of a tenant can be erased. A router or a
gateway writes the tenant into it (`blocks/salt.py`); without one, all requests are of one tenant. Everything else goes into
the extras of the blocks: what holds for the whole request into those of block 0, as each key covers the keys before it. A
request with a part that cannot be identified is never cached.

vLLM's own keys trust the names that clients give: an adapter's path, an image's uuid, the id in its EXIF data. A store outlives
the server and is shared, so here the content counts: digests of adapter files and of processed media. The extras make these
(`connector_extras.py`), where vLLM loads adapters, or the model takes media or embeddings.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final

from foreword.blocks.salt import Salt
from foreword.integrations.vllm.connector_extras import adapter_digests, input_digests

if TYPE_CHECKING:
    from foreword.integrations.vllm_extras.interfaces import AdapterDigests, InputDigests

# The kind of the extras of weights; media and embeddings have others (`vllm_extras/media.py`).
_WEIGHTS: Final = b"W"


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter: vLLM's number for it, and the digest of its files."""

    number: int
    digest: bytes


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
    known = framed(*(one.encode() for one in settings))
    inputs = input_digests(vllm_config, block_size, known)
    return RequestIdentities(extra_keys, known, adapter_digests(vllm_config), inputs)


class RequestIdentities:
    """Identifies requests.

    Args:
        extra_keys: vLLM's `generate_block_hash_extra_keys`; None if this vLLM has none.
        settings: of vLLM, which change what adapters do.
        adapters: identifies adapters. None: no request with one is identified.
        inputs: identifies media and embeddings. None: no request with some is identified.
    """

    def __init__(
        self,
        extra_keys: Callable[[Any, int, int, int], tuple[Any, int]] | None = None,
        settings: bytes = b"",
        adapters: AdapterDigests | None = None,
        inputs: InputDigests | None = None,
    ) -> None:
        self._settings = settings
        self._adapters = adapters
        self._extra_keys = extra_keys
        self._inputs = inputs

    def of(self, request: Any) -> RequestIdentity | None:
        """None for a request that must not be cached. Costs microseconds for text, and a hash of the data of new media."""
        if not self._keys_are_known(request):
            return None
        adapter, salt = None, b""
        if request.lora_request is not None:
            digest = None if self._adapters is None else self._adapters.digest(request.lora_request.lora_path)
            if digest is None:
                return None
            adapter = Adapter(int(request.lora_request.lora_int_id), digest)
            salt = self._adapter_salt(request.lora_request, digest)
        if not request.mm_features and getattr(request, "prompt_embeds", None) is None:
            return RequestIdentity(adapter, salt) if adapter else _PLAIN
        inputs = None if self._inputs is None else self._inputs.of(request)
        return None if inputs is None else RequestIdentity(adapter, salt, inputs, len(request.mm_features or ()))

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
