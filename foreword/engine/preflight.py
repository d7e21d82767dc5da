"""Checks of an engine's configuration that need neither torch nor connections.

Importing torch and loading a model take seconds to minutes, so this comes first. What can only be known later, such as the
memory of a device, is checked then.
"""

from __future__ import annotations

import ctypes
import gc
import json
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from foreword.config import check_folder, parse_bytes
from foreword.configuration import Config
from foreword.engine_config import EngineConfig
from foreword.errors import ConfigError, ModelUnsupported, did_you_mean, reason_of
from foreword.prompt_order import PromptOrder
from foreword.request_errors import ModelNotFound
from foreword.store.store_keys import keys_of
from foreword.store.types import Reach
from foreword.store.urls import loss_of, parse
from foreword.store_config import EncryptionConfig, StoreConfig
from foreword.tokens.model_source import check_source
from foreword.transfer.checks import check_listener, check_stores_and_peers
from foreword.transfer.tls import TlsSettings
from foreword.transfer_config import TransferConfig

logger = logging.getLogger(__name__)

_PACKAGES = ("torch", "transformers")
_DRIVER = "libcuda.so.1"


def check(
    config: EngineConfig, stores: StoreConfig, transfer: TransferConfig, encryption: EncryptionConfig | None = None
) -> None:
    """Raises ForewordError."""
    for package in _PACKAGES:
        if find_spec(package) is None:
            raise ConfigError(f"the engine needs {package}, which is not installed: pip install 'foreword[engine]'")
    if config.model is not None:
        check_model(config.model, trust_remote_code=config.trust_remote_code)
    check_device(config.device)
    if config.threads is not None and config.threads > (cores := os.cpu_count() or config.threads):
        raise ConfigError(f"engine.threads is {config.threads} (--threads), and this machine has {cores} cores")
    if config.kernels == "triton" and config.device == "cpu":
        raise ConfigError("engine.kernels is triton, which needs --device cuda")
    if config.audit_reports is not None:
        check_folder(config.audit_reports)
    if stores.urls and not config.enable_prefix_caching:
        raise ConfigError("a store (--store) needs prefix caching, which is switched off (--no-enable-prefix-caching)")
    check_stores_and_peers(stores.urls, transfer, encryption or EncryptionConfig())
    check_memory(config, stores)
    check_disks(stores)
    if config.batch_invariant == "on" and loss_of(stores.urls):
        raise ConfigError("engine.batch_invariant is on (--batch-invariant), which needs stores without a lossy codec")
    keys_of(stores, encryption)


def check_server(config: Config) -> None:
    """Find the mistakes of `check`, and those that concern a server: salts, the order of prompts, and its part in
    transfers. Raises ForewordError."""
    check_salts(config)
    PromptOrder.of(config.server)
    transfer = config.transfer
    TlsSettings(transfer)
    if config.role is not None:
        check_listener(transfer, config.encryption)
    check(config.engine, config.store, transfer, config.encryption)


def check_salts(config: Config) -> None:
    """Raises ConfigError if blocks would outlive this process but the salts in their names would not."""
    persistent = [url for url in config.store.urls if parse(url).reach is not Reach.PROCESS]
    if persistent and config.server.api_keys and not config.server.tenant_secret:
        raise ConfigError(
            "with API keys and a persistent store, set --tenant-secret (any long random text, the same on every server that "
            "shares the store): tenants' salts are derived from it, and without it no stored block is found after a restart"
        )


@contextmanager
def without_collections() -> Iterator[None]:
    """For the imports of torch and Transformers in a process of Foreword's own: collections of garbage would take a seventh of
    their time, and find nothing. Later ones do not walk through the 660,000 objects that exist by then, half a second each."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def check_model(source: str, *, trust_remote_code: bool = False) -> None:
    """Raises ModelNotFound for what is neither a folder with a model nor a name on the hub, and for a folder whose config.json
    is broken; ModelUnsupported for an architecture that the installed Transformers does not know."""
    if not check_source(source, "a model"):
        return
    path = Path(source).expanduser() / "config.json"
    if not path.is_file():
        raise ModelNotFound(f"cannot read a model configuration from {source!r}: the folder has no config.json")
    try:
        settings = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelNotFound(f"cannot read {path}: {reason_of(error)}") from None
    except ValueError as error:
        raise ModelNotFound(
            f"cannot read a model configuration from {source!r}: config.json is no JSON: {error}"
        ) from None
    if not isinstance(settings, dict):
        raise ModelNotFound(f"cannot read a model configuration from {source!r}: config.json is no JSON object")
    if settings.get("is_encoder_decoder") is True:
        raise ModelUnsupported(f"{source!r} is an encoder-decoder model; Foreword runs decoder-only models")
    kind = settings.get("model_type")
    if (trust_remote_code and "auto_map" in settings) or (known := _architectures()) is None:
        return
    if isinstance(kind, str) and kind and kind not in known:
        raise ModelUnsupported(
            f"{path} has the model_type {kind!r}, which Transformers {metadata.version('transformers')} does not know"
            f"{did_you_mean(kind, close) if (close := get_close_matches(kind, known)) else ''}"
        )
    # Without a type Transformers looks for a known one in the name of the folder.
    if not kind and not any(one in source for one in known):
        raise ModelNotFound(f"{path} has no model_type, which says what architecture the model has")


def _architectures() -> frozenset[str] | None:
    """The model types that the installed Transformers names, read from its tables without its import, which takes seconds. None
    if they are not where they were."""
    found = find_spec("transformers")
    folders = [] if found is None else found.submodule_search_locations or []
    tables = [path for folder in folders for path in Path(folder, "models", "auto").glob("*.py")]
    types = re.compile(r'^\s+\("([\w.-]+)",\s', re.MULTILINE)
    named = frozenset(name for path in tables for name in types.findall(path.read_text(encoding="utf-8")))
    return named if {"llama", "qwen3"} <= named else None


def check_disks(stores: StoreConfig) -> None:
    """Warn of disk stores that may grow larger than the file system that they lie on: they evict late, and writes fail then."""
    for one in (parsed for parsed in map(parse, stores.urls) if parsed.scheme == "disk" and "size" in parsed.options):
        place = Path(one.path).absolute()
        while not place.exists():
            place = place.parent
        found = os.statvfs(place)
        size, whole = parse_bytes(one.options["size"]), found.f_blocks * found.f_frsize
        if 0 < whole < size:
            logger.warning(
                "%s: size=%s is more than its file system has (%.1f GiB)",
                one.shown,
                one.options["size"],
                whole / (1 << 30),
            )


def check_memory(config: EngineConfig, stores: StoreConfig) -> None:
    """Raises ConfigError for memory that this machine does not have: of memory tiers, and of KV without a GPU."""
    tiers = [one for one in map(parse, stores.urls) if one.scheme == "memory"]
    wanted = {one.shown: parse_bytes(one.options.get("size", "0")) for one in tiers}
    size, unit = config.kv_size() or (0, "bytes")
    if unit == "bytes" and (config.device == "cpu" or not _has_driver()):
        wanted[f"--kv-memory {config.kv_memory}"] = size
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if sum(wanted.values()) > machine:
        raise ConfigError(f"{', '.join(wanted)}: more than this machine's memory of {machine >> 30} GiB")


def check_device(name: str) -> None:
    """Raises ConfigError for a CUDA device if the installed torch or this machine has none."""
    if not name.startswith("cuda"):
        return
    version = metadata.version("torch")
    if "+cpu" in version:
        raise ConfigError(f"engine.device is {name}, but torch {version} is a build for CPUs; use --device cpu")
    if "+rocm" in version:
        return
    if not _has_driver():
        raise ConfigError(f"engine.device is {name}, but there is no NVIDIA driver here ({_DRIVER}); use --device cpu")


def _has_driver() -> bool:
    try:
        ctypes.CDLL(_DRIVER)
    except OSError:
        return False
    return True
