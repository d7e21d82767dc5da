"""Whose KV the blocks of vLLM's own offloading are, and the settings of the tier.

The tier runs in the scheduler, which has no tensors: nothing can be measured, as the connector does. So blocks are shared by
servers of which everything that can be read is equal: the content of the weights, settings, versions, environment, the code of
vLLM and of its plug-ins, processor and device, sizes of blocks and ranks, and how vLLM hashes blocks. They must use one folder,
too: then it is the same server after a restart, or one beside it. With `trust_unmeasured` the operator vouches for servers
elsewhere whose settings look the same. Where neither holds, nothing is found after a restart.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from hashlib import sha256
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from foreword.blocks.layout import Layout
from foreword.errors import ConfigError, ModelUnsupported, did_you_mean
from foreword.integrations.vllm.connector_config import ConnectorSettings
from foreword.integrations.vllm.namespace import base_digest, settings_digest, trusted
from foreword.integrations.vllm.request_identity import framed
from foreword.integrations.vllm_offload.block_names import BlockGroup
from foreword.integrations.weight_files import code_digest
from foreword.store.types import Reach
from foreword.store.urls import open_store, parse

logger = logging.getLogger("vllm.foreword")

_SETTINGS: Final = (
    "store", "fingerprint", "weights_version", "encryption", "trust_unmeasured", "lookup_timeout", "load_timeout",
    "flush_seconds",
)  # fmt: skip
_FOLDER: Final = "folder "  # what the location of a folder with a record of its own begins with
_PROCESSOR: Final = ("model name", "flags", "Features", "CPU implementer", "CPU part")
_RESTARTS: Final = "it is not found after a restart, and shared with no other process"


def read_settings(given: dict[str, Any]) -> ConnectorSettings:
    """The settings of the tier. Raises ConfigError, StoreError."""
    for key in given:
        if key not in _SETTINGS:
            raise ConfigError(f"unknown key {key!r} of ForewordTier{did_you_mean(key, (*_SETTINGS, 'queue'))}")
    settings = ConnectorSettings.read(given)
    for url in map(parse, settings.store.urls):
        if url.reach is Reach.INSTANCE:
            raise ConfigError(f"{url.shown}: vLLM's offloading has no stores of other instances; use ForewordConnector")
        if url.codec != "raw":
            raise ConfigError(
                f"{url.shown}: codecs do not know what is in the rows of vLLM's offloading; remove codec="
            )
    return settings


def namespace(vllm_config: Any, offloading: Any, settings: ConnectorSettings) -> bytes:
    """The namespace of this server's blocks, 32 bytes.

    Args:
        offloading: vLLM's `OffloadingConfig`.

    Raises:
        ConfigError: vLLM's block hashes are such that different prompts could have the same.
        ModelUnsupported: the weights cannot be identified, or the rows of memory have not the whole KV of a block.
    """
    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    if not algorithm.startswith("sha256"):
        raise ConfigError(
            f"blocks that outlive vLLM need --prefix-caching-hash-algo sha256 or sha256_cbor: with {algorithm} a client can "
            "make prompts whose hashes are equal"
        )
    if getattr(vllm_config.parallel_config, "nnodes_within_dp", 1) != 1:
        raise ModelUnsupported("the ranks of one instance are on several hosts, so no host has whole blocks")
    base = base_digest(vllm_config, settings.fingerprint)
    digest = sha256(b"foreword/vllm-offload\x00" + trusted(base, settings_digest(vllm_config), vllm_config))
    digest.update(framed(*(part.encode() for part in (_shape(offloading), algorithm, _seed(algorithm), sys.version))))
    why = ""
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        why = "--calculate-kv-scales takes the scales of KV from the first prompts"
    elif not settings.trust_unmeasured:
        folder = _location(settings)
        why = "" if folder else "no store of this server is a folder of its host, and trust_unmeasured is not set"
        digest.update(framed(folder.encode(), _program(), _processor()))
    if why:
        logger.warning("Foreword: this server's KV cannot be measured by vLLM's offloading: %s; %s", why, _RESTARTS)
        digest.update(os.urandom(32))
    return digest.digest()


def block_groups(model: bytes, offloading: Any, row_bytes: int) -> dict[int, BlockGroup]:
    """vLLM's KV cache groups, by number, whose blocks have rows of `row_bytes` with the KV of all ranks. `model`: the
    namespace."""
    hashed = int(offloading.cache.tokens_per_hash)
    found = {}
    for group in offloading.groups:
        chunk = int(group.tokens_per_block * offloading.cache.blocks_per_chunk)
        words = f"{group.group_id} {sha256(repr(group.layer_names).encode()).hexdigest()[:16]}"
        layout = Layout(model, chunk, (), "uint8", order="vllm-offload", group=words, opaque_bytes=row_bytes)
        found[int(group.group_id)] = BlockGroup(layout, chunk, hashed)
    return found


def _shape(offloading: Any) -> str:
    """The shape of blocks, without what only says which engine it is."""
    parallel = replace(
        offloading.parallel, rank=0, data_parallel_index=0, data_parallel_size=1, data_parallel_rank_local=None
    )
    model = replace(offloading.model, name="")
    shape = replace(
        offloading, engine_id="", extra_config={}, enable_kv_cache_events=False, parallel=parallel, model=model
    )
    return repr(shape)


def _seed(algorithm: str) -> str:
    """The seed of vLLM's chains of hashes."""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed

    return str(resolve_none_hash_seed(get_hash_fn_by_name(algorithm)))


def _location(settings: ConnectorSettings) -> str:
    """Identifies the first store that is a folder of this host; "" if there is none. Raises StoreError."""
    for url in settings.store.urls:
        if parse(url).reach is Reach.HOST and parse(url).writable:
            with closing(open_store([url])) as store:
                location = store.tiers[0].location
            return location if location.startswith(_FOLDER) else ""
    return ""


def _program() -> bytes:
    """A digest of the code of vLLM and of its plug-ins."""
    digest = sha256()
    for folder in sorted({*_packages()}):
        digest.update(code_digest(folder))
        for path in sorted(folder.rglob("*.so")):
            digest.update(framed(path.name.encode(), str(path.stat().st_size).encode()))
    return digest.digest()


def _packages() -> Iterator[Path]:
    groups = ("vllm.general_plugins", "vllm.platform_plugins")
    names = {one.module.partition(".")[0] for group in groups for one in entry_points(group=group)}
    for name in ("vllm", *names):
        spec = find_spec(name)
        yield from map(Path, (spec.submodule_search_locations or ()) if spec is not None else ())


def _processor() -> bytes:
    """A digest of the kind of processor: kernels differ between them."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
    except OSError:
        return b""
    lines = [line for line in text.splitlines() if line.startswith(_PROCESSOR)]
    return sha256("\n".join(lines).encode()).digest()
