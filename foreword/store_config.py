"""Configuration of stores, and of the encryption of what they keep."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from foreword.config import between, check_secret, check_section, constant, not_negative, parse_bytes, positive
from foreword.config_layers import ENV_PREFIX, build, is_service_variable, merged_layers
from foreword.errors import ConfigError


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """Stores for blocks off the device.

    Attributes:
        urls: URLs of stores, fastest first, such as `memory://?size=4GiB` and `disk:///var/cache/foreword?size=200GiB`.
        staging: host memory for copies between device and stores, allocated at start, half of it for the write queue. 1 GiB
            with a GPU, which fills blocks faster than stores take them, and 256 MiB without if it is `auto`. A GPU has a copy.
        direct: with a CUDA GPU and a memory:// store in front, page-lock its memory and copy blocks straight between it and the
            device, which seals and checks them; `staging` is 128 MiB then if it is auto. A test at the start decides whether
            it is used, and the log says why not.
        lookup_timeout: seconds that a request waits for a lookup in remote stores, or a tenth of the time to compute the prompt
            if that is longer. Memory and disks, which answer late only on a busy machine, have 8 times as long, or the whole
            time to compute the prompt.
        load_timeout: maximum seconds for loading blocks; loading ends earlier if computing them is faster.
        flush_seconds: seconds that the process waits at exit for blocks that are not written yet.
        integrity_secrets: secrets that authenticate what is written to shared stores, each as `ID:SECRET` with a number: the
            first signs, all verify. What is not signed with one of them is refused.
    """

    urls: tuple[str, ...] = field(default=(), repr=False)  # they may contain passwords
    staging: str = "auto"
    direct: bool = False
    lookup_timeout: float = positive(0.25)
    load_timeout: float = positive(30.0)
    flush_seconds: float = not_negative(20.0)
    integrity_secrets: tuple[str, ...] = field(default=(), repr=False)

    def integrity_keys(self) -> list[tuple[int, str]]:
        """The numbers and texts of `integrity_secrets`. Raises ConfigError."""
        found = []
        for entry in self.integrity_secrets:
            number, _, text = entry.partition(":")
            if not number.isascii() or not number.isdecimal() or not 0 < int(number[:12]) < 1 << 31:
                raise ConfigError("store.integrity_secrets are written ID:SECRET, with a number from 1 as ID")
            check_secret("store.integrity_secrets", text)
            found.append((int(number), text))
        if len({number for number, _ in found}) < len(found):
            raise ConfigError("store.integrity_secrets has a number twice")
        return found

    def __post_init__(self) -> None:
        self.integrity_keys()
        if not self.staging_bytes("cpu"):
            raise ConfigError("store.staging (--store-staging) must have room for a block")
        check_section("store", self)

    def staging_bytes(self, device: str) -> int:
        """Bytes of `staging` for KV on a device of this type."""
        if self.staging == "auto":
            if device in ("cpu", "none"):
                return 256 << 20
            return 128 << 20 if self.direct else 1 << 30
        return parse_bytes(self.staging, "store.staging (--store-staging)")


def encryption_variables() -> dict[str, str]:
    """Settings that FOREWORD_ENCRYPTION_* give, by key."""
    prefix = f"{ENV_PREFIX}ENCRYPTION_"
    found = {name.removeprefix(prefix): text for name, text in os.environ.items() if name.startswith(prefix)}
    return {name.lower(): text for name, text in found.items() if not is_service_variable(name, text)}


@dataclass(frozen=True, slots=True)
class EncryptionConfig:
    """Encryption of blocks and records in stores that outlive the process. Needs stores, a key store and master keys.

    Attributes:
        key_store: folder, or URL of a store, that keeps each tenant's data key, encrypted by a master key; without it nothing
            is encrypted. It is none of the stores for blocks, and has no copies that outlive a deletion.
        master_keys: keys that encrypt data keys, each as `ID:KEY`, 64 hexadecimal digits: the first encrypts, all decrypt.
        master_key_file: file with one such entry per line; it is read again when a data key names an unknown one.
        master_key_command: command that prints such lines, for a key management service; it is run when they are needed.
        read_plain: also read blocks and records that are not encrypted, while encryption is switched on in a fleet.
        outage_seconds: seconds for which data keys are used while the key store does not answer.
    """

    FILES = (("master_keys", "master_key_file"),)
    key_store: str | None = field(default=None, repr=False)  # it may contain a password
    master_keys: tuple[str, ...] = field(default=(), repr=False)
    master_key_file: str | None = None
    master_key_command: str | None = field(default=None, repr=False)
    read_plain: bool = False
    outage_seconds: float = between(0.0, 3600.0, 30.0)
    check_seconds: float = constant(1.0, "1 s")  # how long a key that is destroyed may still be used elsewhere

    def __post_init__(self) -> None:
        sources = [one for one in (self.master_keys, self.master_key_file, self.master_key_command) if one]
        if len(sources) != (1 if self.key_store else 0):
            raise ConfigError(
                "encryption needs key_store, and exactly one of master_keys, master_key_file and master_key_command"
            )
        check_section("encryption", self)

    @classmethod
    def from_environment(cls, given: Mapping[str, Any] = MappingProxyType({})) -> EncryptionConfig:
        """The section as FOREWORD_ENCRYPTION_* give it, for tools and connectors without a configuration file. What is given
        here has precedence. Raises ConfigError."""
        return build(cls, "encryption", merged_layers(cls, (encryption_variables(), given)))
