"""Stores where the package with the keys is not installed: they work without keys, and with keys say what to install."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from foreword.errors import StoreConfigError
from foreword.store.store_keys import check_apart, data_keys_of, keys_from_environment, keys_of
from foreword.store_config import EncryptionConfig, StoreConfig

SECRETS = ("1:a secret of the tests",)


@pytest.fixture(autouse=True)
def not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FOREWORD_STORE_INTEGRITY_SECRETS", "FOREWORD_ENCRYPTION_KEY_STORE"):
        monkeypatch.delenv(name, raising=False)
    for module in ("sealing", "data_keys", "master_keys"):
        monkeypatch.setitem(sys.modules, f"foreword.store.{module}", None)


def test_no_keys() -> None:
    """Without keys in the configuration nothing is missing."""
    plain = EncryptionConfig()
    assert keys_of(StoreConfig(), plain) is data_keys_of(plain) is keys_from_environment() is None
    check_apart(plain, ["disk:///var/cache/foreword"])


def test_keys_name_what_to_install(tmp_path: Path) -> None:
    """Keys are never left out in silence: secrets that sign, and data keys that encrypt, are an error that says what to
    install."""
    encrypted = EncryptionConfig(key_store=str(tmp_path), master_keys=(f"m:{'5a' * 32}",))
    for call in (
        lambda: keys_of(StoreConfig(integrity_secrets=SECRETS)),
        lambda: keys_of(StoreConfig(), encrypted),
        lambda: data_keys_of(encrypted),
        lambda: check_apart(encrypted, []),
    ):
        with pytest.raises(StoreConfigError, match=r"pip install 'foreword\[integrity\]'"):
            call()
