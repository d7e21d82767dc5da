"""The keys that seal what stores keep, as a configuration names them: data keys of tenants, which encrypt, and secrets,
which sign.

The package `foreword-encryption` has them (`sealing.py`, `data_keys.py`, `master_keys.py`). It is imported where a
configuration names keys; without keys a store is as it is.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from importlib import import_module
from typing import TYPE_CHECKING, Final

from foreword.config_layers import ENV_PREFIX, build
from foreword.errors import StoreConfigError
from foreword.store_config import EncryptionConfig, StoreConfig

if TYPE_CHECKING:
    from foreword.store.key_interfaces import Encryption, StoreKeys, TenantKeys

_PACKAGE: Final = "foreword.store.sealing"


def encryption() -> Encryption:
    """The package with the keys. Raises StoreConfigError where it is not installed."""
    try:
        found: Encryption = import_module(_PACKAGE).ENCRYPTION
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("foreword"):
            raise
        raise StoreConfigError("keys of stores need: pip install 'foreword[integrity]'") from None
    return found


def keys_of(config: StoreConfig, encrypted: EncryptionConfig | None = None) -> StoreKeys | None:
    """The configuration's keys; None if there are none. Raises ConfigError, StoreError."""
    if not config.integrity_keys() and (encrypted is None or encrypted.key_store is None):
        return None
    return encryption().keys_of(config, encrypted)


def keys_from_environment(encrypted: EncryptionConfig | None = None) -> StoreKeys | None:
    """The keys in FOREWORD_STORE_INTEGRITY_SECRETS, or in the file of FOREWORD_STORE_INTEGRITY_SECRETS_FILE, and in
    FOREWORD_ENCRYPTION_*, for tools and connectors without a configuration file. `encrypted`: in place of the latter."""
    names = ("integrity_secrets", "integrity_secrets_file")
    secrets = {name: os.environ.get(f"{ENV_PREFIX}STORE_{name.upper()}", "") for name in names}
    found = EncryptionConfig.from_environment() if encrypted is None else encrypted
    return keys_of(build(StoreConfig, "store", secrets), found)


def data_keys_of(config: EncryptionConfig) -> TenantKeys | None:
    """The data keys of a configuration, one object in a process; None without encryption. Raises ConfigError, StoreError."""
    return encryption().shared(config) if config.key_store is not None else None


def check_apart(config: EncryptionConfig, urls: Iterable[str]) -> None:
    """Raises ConfigError if data keys would lie in a store of the blocks that they encrypt, and in each copy of it."""
    if config.key_store is not None:
        encryption().check_apart(config, urls)
