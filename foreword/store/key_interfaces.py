"""Calls of stores and engines to the keys that seal what stores keep, as types.

`sealing.py` and `data_keys.py` implement them, and type checkers read them. A process without keys does not import them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from foreword.blocks.salt import Salt
    from foreword.store.base import Store
    from foreword.store_config import EncryptionConfig, StoreConfig


class TenantKeys(ABC):
    """The data keys of all tenants. Thread-safe.

    Attributes:
        on_end: functions that are called with a tenant's salt in a generation that has ended, on any thread: they must be quick
            and must not raise.
    """

    on_end: list[Callable[[bytes], object]]

    @property
    @abstractmethod
    def master(self) -> str:
        """The id of the master key that encrypts."""

    @abstractmethod
    def current(self, salt: bytes) -> bytes:
        """The salt of a tenant in its generation now, given its salt in any generation. While the key store does not answer,
        that of the last one known. Does no I/O unless it is time to look again."""

    @abstractmethod
    def sessions(self, tenant: bytes, cache_salt: str) -> list[Salt]:
        """The salts of requests with a `cache_salt`, given the tenant's salt in its first generation: in all generations, and
        derived from the salt of either. Raises StoreError."""

    @abstractmethod
    def destroy(self, tenant: bytes) -> list[tuple[bytes, int]]:
        """Destroy all keys of a tenant, given 12 bytes of any of its generations. Returns them: the generation, and the id.

        When this returns, nothing that was encrypted for it can be read, here at once and elsewhere within `check_seconds`.
        Raises StoreError, and may then be repeated.
        """

    @abstractmethod
    def count(self) -> tuple[int, int]:
        """How many keys of tenants whose keys live the key store has, and how many of them these master keys do not decrypt.
        Raises StoreError."""

    @abstractmethod
    def close(self) -> None:
        """Close the key store."""


class StoreKeys(ABC):
    """The keys of a deployment: data keys encrypt if there are any, else the first secret signs. All of them are known.

    Attributes:
        data: the data keys, None if there are none.
    """

    data: TenantKeys | None

    @abstractmethod
    def sealed(self, store: Store) -> Store:
        """A store that seals what it writes into this one, and passes on only what is sealed."""

    def current(self, salt: bytes) -> bytes:
        """The salt of a tenant in its generation now."""
        return salt if self.data is None else self.data.current(salt)


class Encryption(ABC):
    """Calls of stores and engines to the package with the keys. It has no state but the data keys that a process shares."""

    @abstractmethod
    def keys_of(self, config: StoreConfig, encryption: EncryptionConfig | None) -> StoreKeys | None:
        """The configuration's keys. Raises ConfigError, StoreError."""

    @abstractmethod
    def shared(self, config: EncryptionConfig) -> TenantKeys:
        """The data keys of a configuration with a key store, one object in a process. Raises ConfigError, StoreError."""

    @abstractmethod
    def open(self, config: EncryptionConfig) -> TenantKeys:
        """Open the key store of a configuration. The caller closes it. Raises ConfigError, StoreError."""

    @abstractmethod
    def check_apart(self, config: EncryptionConfig, urls: Iterable[str]) -> None:
        """Raises ConfigError if data keys would lie in a store of the blocks that they encrypt, and in each copy of it."""

    @abstractmethod
    def check_exists(self, config: EncryptionConfig) -> None:
        """Raises StoreUnavailable if there is no key store where there should be one: a tool creates none, since what it says
        of the keys in an empty one would be about others."""
