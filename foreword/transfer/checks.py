"""Checks of transfers, and of stores of other instances, that need no connections."""

from __future__ import annotations

import os
from collections.abc import Sequence

from foreword.errors import ConfigError
from foreword.store.store_keys import check_apart
from foreword.store.types import Reach
from foreword.store.urls import check_stores
from foreword.store_config import EncryptionConfig
from foreword.transfer.peer import settings_of
from foreword.transfer.sockets import parse_address
from foreword.transfer.tls import TlsSettings, check_encrypted
from foreword.transfer_config import TransferConfig


def check_listener(transfer: TransferConfig, encryption: EncryptionConfig) -> None:
    """Raises ConfigError for a certificate that cannot be used, or an address that no other instance could use."""
    check_encrypted(transfer, encryption)
    where = parse_address(transfer.bind)
    if transfer.advertise is not None:
        parse_address(transfer.advertise)
    folder = os.path.dirname(where.path)
    if folder and not os.path.isdir(folder):
        raise ConfigError(f"transfer.bind (--transfer-bind): there is no folder {folder}")
    if not TlsSettings(transfer).can_listen:
        raise ConfigError("transfer.tls (--transfer-tls) needs a certificate: --transfer-tls-certificate-file")
    if transfer.advertise is None and transfer.bind.startswith(("0.0.0.0:", "[::]:", ":")):
        raise ConfigError(
            f"other instances cannot reach {transfer.bind}: set transfer.advertise (--transfer-advertise), this instance's "
            "address as they see it"
        )
    if transfer.secret is None and not where.is_local:
        raise ConfigError(
            f"other hosts can reach {transfer.bind} (--transfer-bind): set --transfer-secret-file, a file with 16 characters "
            "or more (`openssl rand -hex 32`), the same on all instances, or bind 127.0.0.1"
        )


def check_stores_and_peers(urls: Sequence[str], transfer: TransferConfig, encryption: EncryptionConfig) -> None:
    """`check_stores`, that data keys lie elsewhere, and the settings of connections to other instances. Raises ConfigError,
    StoreError."""
    check_apart(encryption, urls)
    for url in check_stores(urls):
        if url.reach is Reach.INSTANCE:
            check_encrypted(settings_of(url, transfer), encryption)
