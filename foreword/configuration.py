"""All sections of a configuration together (`cli/flags.py` reads them)."""

from __future__ import annotations

from dataclasses import dataclass, field

from foreword.engine_config import EngineConfig, PrefixConfig
from foreword.process_config import RouterConfig, ServerConfig
from foreword.store_config import EncryptionConfig, StoreConfig
from foreword.transfer_config import TransferConfig


@dataclass(frozen=True, slots=True)
class Config:
    """All sections."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    prefixes: PrefixConfig = field(default_factory=PrefixConfig)
    store: StoreConfig = field(default_factory=StoreConfig)
    encryption: EncryptionConfig = field(default_factory=EncryptionConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    router: RouterConfig = field(default_factory=RouterConfig)

    @property
    def role(self) -> str | None:
        """The server's role in transfers. None if it works alone. A server with an address for transfers takes part in them."""
        if self.server.role is None and self.transfer.bind != TransferConfig().bind:
            return "both"
        return self.server.role
