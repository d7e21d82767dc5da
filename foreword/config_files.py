"""Configuration files: TOML with a table per section."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foreword.config import read_text
from foreword.config_layers import build, merged_layers
from foreword.errors import ConfigError
from foreword.store_config import EncryptionConfig, encryption_variables


def read_tables(path: Path) -> Mapping[str, Mapping[str, Any]]:
    """The tables of a TOML file. Raises ConfigError."""
    try:
        data = tomllib.loads(read_text(path, "the configuration file"))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    for name, table in data.items():
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: {name} must be a table, written [{name}]")
    return data


def read_encryption(path: Path) -> EncryptionConfig:
    """The table [encryption] of a file. FOREWORD_ENCRYPTION_* have precedence. Raises ConfigError."""
    given = merged_layers(EncryptionConfig, (read_tables(path).get("encryption", {}), encryption_variables()))
    return build(EncryptionConfig, "encryption", given)
