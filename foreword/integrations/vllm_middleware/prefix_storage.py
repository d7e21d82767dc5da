"""The connector's stores as vLLM's API server sees them: records of named prefixes, and pins of their blocks.

The API server is a separate process. It opens the same URLs as the engine's process. A `memory://` tier lies in the engine's
process, so it is not visible here. The connector leaves a record of how its blocks are laid out: `layouts/<fingerprint>`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foreword.blocks.keys import Scope
from foreword.blocks.layout import ITEM_BYTES
from foreword.blocks.resume import alignment, longest_resumable
from foreword.blocks.salt import PUBLIC, Salt
from foreword.errors import ConfigError, ModelUnsupported, StoreError
from foreword.integrations.vllm.connector_config import ConnectorSettings
from foreword.integrations.vllm.namespace import base_digest, engine_of, settings_digest, unmeasured
from foreword.integrations.vllm.request_identity import RequestIdentity
from foreword.integrations.vllm_middleware.recorded_namespace import recorded
from foreword.offload.search import StoredGroup
from foreword.prefixes.errors import PrefixBudgetExceeded
from foreword.prefixes.lease_records import PrefixRecord
from foreword.prefixes.pins import StorePins, own_keys
from foreword.prefixes.stored_names import PrefixStorage
from foreword.request_errors import NotReady
from foreword.store.base import Name
from foreword.store.layout_records import LayoutRecord, layouts
from foreword.store.shared_records import FoundRecords
from foreword.store.tier import StoreTier
from foreword.store.tiered import TieredStore
from foreword.store.urls import open_store, parse

logger = logging.getLogger(__name__)

_CALL_WITHIN = 10.0
_LAYOUT_WITHIN = 10.0
_CONNECTOR = "ForewordConnector"


def connector_settings(vllm_config: Any) -> ConnectorSettings:
    """The settings of the server's connector. Raises ConfigError if it has none of ours."""
    transfer = vllm_config.kv_transfer_config
    given = [] if transfer is None else [(transfer.kv_connector, transfer.kv_connector_extra_config or {})]
    for name, extra in given:
        if name == _CONNECTOR:
            return ConnectorSettings.read(extra)
        # vLLM's MultiConnector lists its connectors here.
        for inner in extra.get("connectors", ()):
            if isinstance(inner, dict) and inner.get("kv_connector") == _CONNECTOR:
                return ConnectorSettings.read(inner.get("kv_connector_extra_config") or {})
    raise ConfigError(
        "NamedPrefixes keeps prefixes in the stores of Foreword's connector; give vLLM --kv-transfer-config with "
        '"kv_connector": "ForewordConnector" and "kv_connector_module_path": "foreword.integrations.vllm"'
    )


@dataclass(frozen=True, slots=True)
class _StoredLayout(StoredGroup):
    """A KV group on one rank, which has one layout. `block_bytes`: of a block."""

    block_bytes: int = 0


class ConnectorStorage(PrefixStorage):
    """The connector's stores.

    Raises ConfigError, ModelUnsupported, or StoreError for a store that cannot be opened.

    Attributes:
        budget_bytes: how much may be pinned in the tier with the lowest limit; None without a limit.
    """

    def __init__(self, vllm_config: Any) -> None:
        settings = connector_settings(vllm_config)
        self._base, self._settings = base_digest(vllm_config, settings.fingerprint), settings_digest(vllm_config)
        self._engine = engine_of(vllm_config)
        model = unmeasured(self._base, self._settings)
        self._extras = RequestIdentity().extras(settings.version_of(vllm_config).salt)
        self._units = settings.units
        self._current = settings.current
        self._longest = int(vllm_config.model_config.max_model_len)
        self._ranks = int(vllm_config.parallel_config.tensor_parallel_size)
        urls = [url for url in settings.store.urls if parse(url).persistent]
        self._visible = bool(urls)
        self._store = open_store(urls or ["memory://?size=1MiB"], keys=settings.keys())
        pins = StorePins(self._store, model.hex(), ())
        super().__init__(self._store, pins, str(vllm_config.model_config.model), 0)
        self._pinning = [self._store.tiers[index] for index in self._store.writable] if urls else []
        self._limits = [tier.store.status().pin_budget for tier in self._pinning]
        self.budget_bytes = min((limit for limit in self._limits if limit is not None), default=None)
        self._layouts: list[_StoredLayout] = []
        self._wait = _LAYOUT_WITHIN
        if len(urls) < len(settings.store.urls):
            logger.warning(
                "Foreword: memory:// and peer:// tiers end with their process, so named prefixes are %s",
                "pinned in the other stores only" if urls else "not pinned, and are forgotten when the server ends",
            )

    # The blocks of this server

    def _find_layouts(self, within: float = 0.0) -> bool:
        """Read how the connector lays out blocks, waiting up to `within` seconds. False if the stores do not say."""
        deadline = time.monotonic() + within
        while not self._layouts and self._visible:
            try:
                # The engine's process has found out the namespace.
                model = recorded(self._store, self._base, self._settings, self._engine)
                self.pins.model = self.pins.model if model is None else model.hex()
                self.pins.groups = self._layouts = self._own(layouts(self._store))
            except StoreError as error:
                logger.warning("Foreword: %s does not answer: %s", self._store.label, error.message)
            if self._layouts or time.monotonic() >= deadline:
                break
            time.sleep(0.05)  # the engine's process writes the record
        return bool(self._layouts)

    def _own(self, known: Mapping[bytes, LayoutRecord]) -> list[_StoredLayout]:
        """This server's layouts: one per KV group and rank, or head unit. Servers with other block sizes or ranks may share its
        namespace. Where that cannot be told apart theirs are taken too, which pins more than needed."""
        same_model = [pair for pair in known.items() if pair[1].digest == self.model]
        own = [pair for pair in same_model if self._matches(pair[1])] or same_model
        self.block_size = next((one.key_size or one.group.block_size for _, one in own), 0)
        return [
            _StoredLayout(one.group, (name,), one.group.block_size // self.block_size, block_bytes=_block_bytes(one))
            for name, one in own
            if one.group.block_size % self.block_size == 0
        ]

    def _matches(self, record: LayoutRecord) -> bool:
        if self._units is not None:
            return record.layout.get("order") == "tokens" and record.key_size == self._units.tokens
        shard = record.layout.get("shard")
        return (
            str(record.layout.get("order", "")).startswith("vllm/")
            and (shard[1] if isinstance(shard, list) and len(shard) == 2 else None) == self._ranks
        )

    def position(self, num_tokens: int) -> int:
        """The last position in a prefix from which requests can continue."""
        step = alignment([layout.group for layout in self._layouts]) if self._layouts else 1
        return num_tokens - num_tokens % step

    def stored(self, tokens: Sequence[int], salt: Salt) -> int:
        """After how many tokens of a prompt a request with this salt can continue, with what the stores have."""
        if not self._find_layouts():
            return 0
        root, keys = self._chain(tokens[: self._longest], self._current(salt))
        deadline = time.monotonic() + _CALL_WITHIN

        def names(layout: _StoredLayout, blocks: Iterable[int]) -> list[Name]:
            return layout.names(root, layout.keys(keys, blocks))

        def run(layout: _StoredLayout) -> int:
            every = range(len(keys) // layout.keys_per_block)
            return self._store.lookup(names(layout, every), deadline=deadline) if layout.group.whole else 0

        runs = [run(layout) for layout in self._layouts]

        def present(number: int, block: int) -> bool:
            layout = self._layouts[number]
            if layout.group.whole:
                return block < runs[number]
            return self._store.lookup(names(layout, [block]), deadline=deadline) == 1

        return longest_resumable([layout.group for layout in self._layouts], len(keys) * self.block_size, present)

    @property
    def model(self) -> bytes:
        """Fingerprint of the model."""
        return bytes.fromhex(self.pins.model)

    def chain(self, tokens: Sequence[int], salt: bytes = b"") -> tuple[bytes, list[bytes]]:
        """Named prefixes of vLLM have no salt, or that of public ones."""
        if not self._layouts:
            return b"", []
        return self._chain(tokens[: self.position(len(tokens))], self._current(Salt(salt)))

    def _chain(self, tokens: Sequence[int], salt: Salt) -> tuple[bytes, list[bytes]]:
        scope = Scope(self.model, self.block_size, salt)
        return scope.root(), self.public.keys_of(scope, tokens, self._extras)

    def mark(self, texts: Sequence[Sequence[int]]) -> None:
        """From now on these are the public prefixes."""
        self.public.set(self.chain(tokens, PUBLIC.tenant)[1] for tokens in texts)

    # Records

    def current(self, salt: bytes) -> bytes:
        return self._current(Salt(salt)).tenant

    def all(self, salt: bytes) -> FoundRecords[PrefixRecord]:
        """Raises NotReady while the connector has not said how its blocks are laid out."""
        wait, self._wait = self._wait, 0.0
        if not self._find_layouts(wait) and self._visible:
            raise NotReady(
                "the connector's stores do not say how its blocks are laid out; the log says whether they answer"
            )
        return super().all(salt)

    # Pins

    def check_room(self, name: str, tokens: Sequence[int], salt: bytes) -> None:
        alone = self.pins.alone(self.tenant(salt), self.chain(tokens, salt)[1])
        needed = sum(one.block_bytes * len(keys) for one, keys in zip(self._layouts, alone, strict=True))
        for tier, limit in zip(self._pinning, self._limits, strict=True):
            free = needed if limit is None else max(limit - tier.store.status().pinned_bytes, 0)
            if needed > free:
                raise PrefixBudgetExceeded(
                    f"prefix {name!r} needs {needed:,} bytes, but of the {limit:,} bytes that may be pinned in {tier.label} "
                    f"{free:,} are left; remove a prefix, or raise size or pin_share in the store's URL",
                    param="content",
                )

    def pin(self, tokens: Sequence[int], salt: bytes = b"") -> tuple[int, bool]:
        """Pin the blocks of a prefix that are there, in every tier that is written. Returns the bytes in the tier that has most
        of it, and whether each has all of it."""
        if not self._find_layouts():
            return 0, not self._visible
        root, keys = self.chain(tokens, salt)
        names = [
            (layout.block_bytes, layout.names(root, own_keys(root, layout.behind(keys)))) for layout in self._layouts
        ]
        return pin_in_tiers(self._store, names)

    def close(self) -> None:
        self._store.close()


def pin_in_tiers(store: TieredStore, names: Sequence[tuple[int, list[Name]]]) -> tuple[int, bool]:
    """Pin blocks, given the bytes of each and names, in the tiers that are written: others keep their own pins."""

    def pin(tier: StoreTier, some: list[Name]) -> int:
        deadline = time.monotonic() + _CALL_WITHIN
        return tier.attempt(lambda: tier.store.pin(some, deadline=deadline), 0) if some else 0

    sizes = [sum(size * pin(store.tiers[index], some) for size, some in names) for index in store.writable]
    needed = sum(size * len(some) for size, some in names)
    return max(sizes, default=0), all(size >= needed for size in sizes)


def _block_bytes(record: LayoutRecord) -> int:
    """Without a codec. Raises ModelUnsupported for a record that does not say it."""
    layout = record.layout
    try:
        numbers = sum(heads * (key + value) for heads, key, value in layout["layers"])
        opaque = int(layout.get("opaque_bytes", 0))
        return opaque or int(record.group.block_size * ITEM_BYTES[layout["dtype"]] * numbers)
    except (KeyError, TypeError, ValueError):
        raise ModelUnsupported(f"the store's record of a layout of {record.model} is of another version") from None
