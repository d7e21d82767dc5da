"""The connector's stores as vLLM's API server sees them: records of named prefixes, and the pins of their blocks.

The API server is a process of its own. It opens the same URLs as the engine's; `memory://` lies in the engine's process, where
it sees nothing. Which blocks there are it learns from the records that the connector leaves: `layouts/<fingerprint>`.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from foreword.blocks.keys import Scope, chain_keys
from foreword.blocks.layout import ITEM_BYTES
from foreword.errors import ConfigError, ModelUnsupported, PrefixBudgetExceeded, StoreError
from foreword.integrations.vllm.config import model_digest
from foreword.integrations.vllm.connector import Settings
from foreword.prefixes.erasure import LayoutRecord, layouts
from foreword.prefixes.records import PrefixRecords
from foreword.store.base import Name
from foreword.store.tiered import StoreTier
from foreword.store.urls import open_store, parse

logger = logging.getLogger(__name__)

_CALL_WITHIN = 10.0
_DEFAULT_PIN_SHARE = 0.5
_CONNECTOR = "ForewordConnector"


def connector_settings(vllm_config: Any) -> Settings:
    """What the server's connector was given. Raises ConfigError if it has none of ours."""
    transfer = vllm_config.kv_transfer_config
    given = [] if transfer is None else [(transfer.kv_connector, transfer.kv_connector_extra_config or {})]
    for name, extra in given:
        if name == _CONNECTOR:
            return Settings.read(extra)
        # vLLM's MultiConnector keeps those that it is made of here.
        for inner in extra.get("connectors", ()):
            if isinstance(inner, dict) and inner.get("kv_connector") == _CONNECTOR:
                return Settings.read(inner.get("kv_connector_extra_config") or {})
    raise ConfigError(
        "NamedPrefixes keeps prefixes in the stores of Foreword's connector; give vLLM --kv-transfer-config with "
        '"kv_connector": "ForewordConnector" and "kv_connector_module_path": "foreword.integrations.vllm"'
    )


@dataclass(frozen=True, slots=True)
class Pinned:
    """How much of a prefix is pinned: bytes in the tier that keeps most of it, and whether every tier keeps all of it."""

    bytes: int
    whole: bool


@dataclass(frozen=True, slots=True)
class _Blocks:
    """One arrangement of this model's blocks in the stores."""

    fingerprint: bytes
    block_size: int
    block_bytes: int


class PrefixStores:
    """Blocking: call it on a thread. Raises ConfigError, ModelUnsupported, or StoreError for a store that cannot be opened.

    Attributes:
        seen: whether any tier is one that this process sees.
        budget: bytes that named prefixes may pin in the tier that holds least of them; None without a bound.
    """

    def __init__(self, vllm_config: Any) -> None:
        settings = connector_settings(vllm_config)
        self._model = model_digest(vllm_config, settings)
        self._name = str(vllm_config.model_config.model)
        self._dtype = str(vllm_config.model_config.dtype).removeprefix("torch.")
        self._ranks = int(vllm_config.parallel_config.tensor_parallel_size)
        urls = [url for url in settings.store.urls if parse(url).persistent]
        self.seen = bool(urls)
        self._store = open_store(urls or ["memory://?size=1MiB"])
        self._limits = [_pin_limit(tier, url) for tier, url in zip(self._store.tiers, urls, strict=False)]
        self._blocks: list[_Blocks] = []
        if len(urls) < len(settings.store.urls):
            logger.warning(
                "Foreword: what lies in memory:// or at a peer ends with its process, so named prefixes are %s",
                "pinned in the other stores only" if urls else "pinned nowhere and forgotten when the server ends",
            )

    @property
    def budget(self) -> int | None:
        return min((limit for limit in self._limits if limit is not None), default=None)

    @property
    def block_size(self) -> int:
        """Tokens per block, 0 while the stores do not say."""
        return self._blocks[0].block_size if self._blocks else 0

    @property
    def block_bytes(self) -> int:
        """What a block of `block_size` tokens takes, all ranks and groups together."""
        return sum(blocks.block_bytes * self.block_size // blocks.block_size for blocks in self._blocks)

    def learn(self, within: float = 0.0) -> bool:
        """Look how the connector arranges blocks, for up to `within` seconds. False if the stores do not say."""
        deadline = time.monotonic() + within
        while not self._blocks and self.seen:
            try:
                self._blocks = self._ours(layouts(self._store).values())
            except StoreError as error:
                logger.warning("Foreword: %s does not answer: %s", self._store.label, error.message)
            if self._blocks or time.monotonic() >= deadline:
                break
            time.sleep(0.05)  # the engine's process writes the record; nobody tells this one
        return bool(self._blocks)

    def _ours(self, known: Iterable[LayoutRecord]) -> list[_Blocks]:
        """This server's arrangements: one per rank, and per group of layers. Servers of other versions or dtypes may share
        the stores; where that cannot be told apart, theirs are taken too, which pins more and harms nobody."""
        mine = [record for record in known if record.model == self._model]
        near = [record for record in mine if self._alike(record)]
        return [_Blocks(r.fingerprint, r.block_size, _block_bytes(r)) for r in near or mine]

    def _alike(self, record: LayoutRecord) -> bool:
        import vllm

        version = ".".join(vllm.__version__.split("+")[0].split(".")[:2])
        shard = record.described.get("shard")
        ranks = shard[1] if isinstance(shard, list) and len(shard) == 2 else None
        order = str(record.described.get("order", ""))
        return (
            order.startswith(f"vllm/{version}/")
            and ranks == self._ranks
            and record.described.get("dtype") == self._dtype
        )

    def records(self) -> PrefixRecords:
        """The records of this model's prefixes."""
        return PrefixRecords(self._store, self._model.hex(), self._name, self.block_size)

    def size_of(self, num_tokens: int) -> int:
        """Bytes that a prefix of so many tokens takes: full blocks only."""
        return sum(num_tokens // blocks.block_size * blocks.block_bytes for blocks in self._blocks)

    def last_key(self, tokens: Sequence[int]) -> bytes:
        """The key of the last full block, b"" if there is none."""
        keys = self._keys(tokens, self.block_size) if self._blocks else []
        return keys[-1] if keys else b""

    def check_room(self, name: str, tokens: Sequence[int], pinned: Iterable[Sequence[int]]) -> None:
        """Raises PrefixBudgetExceeded if a bounded tier cannot pin what of `tokens` is not pinned with one of `pinned`."""
        shared = max((_common(tokens, other) for other in pinned), default=0)
        needed = self.size_of(len(tokens)) - self.size_of(shared)
        for tier, limit in zip(self._store.tiers, self._limits, strict=False):
            free = needed if limit is None else max(limit - tier.store.status().pinned_bytes, 0)
            if needed > free:
                raise PrefixBudgetExceeded(
                    f"prefix {name!r} needs {needed:,} bytes, but of the {limit:,} bytes that may be pinned in {tier.label} "
                    f"{free:,} are left; remove a prefix, or raise size or pin_share in the store's URL",
                    param="content",
                )

    def pin(self, tokens: Sequence[int]) -> Pinned:
        """Pin what is there of a prefix's blocks, in every tier."""
        if not self.learn():
            return Pinned(0, not self.seen)
        sizes: dict[str, int] = {}
        for tier in self._store.tiers:
            counts = [(blocks, self._pin_in(tier, self._names(tokens, blocks), True)) for blocks in self._blocks]
            sizes[tier.label] = sum(blocks.block_bytes * count for blocks, count in counts)
        return Pinned(max(sizes.values()), min(sizes.values()) >= self.size_of(len(tokens)))

    def unpin(self, tokens: Sequence[int], needed: Iterable[Sequence[int]]) -> None:
        """Let go of a prefix's blocks, but for those that the prefixes `needed` share with it."""
        shared = max((_common(tokens, other) for other in needed), default=0)
        for blocks in self._blocks:
            names = self._names(tokens, blocks)[shared // blocks.block_size :]
            for tier in self._store.tiers:
                self._pin_in(tier, names, False)

    def _pin_in(self, tier: StoreTier, names: list[Name], pinned: bool) -> int:
        if not names:
            return 0
        deadline = time.monotonic() + _CALL_WITHIN
        count: int = tier.attempt(lambda: tier.store.pin(names, pinned=pinned, deadline=deadline), 0)
        return count

    def _names(self, tokens: Sequence[int], blocks: _Blocks) -> list[Name]:
        return [blocks.fingerprint + key for key in self._keys(tokens, blocks.block_size)]

    def _keys(self, tokens: Sequence[int], block_size: int) -> list[bytes]:
        return chain_keys(Scope(self._model, block_size).root(), tokens, block_size)

    def close(self) -> None:
        self._store.close()


def _pin_limit(tier: StoreTier, url: str) -> int | None:
    place = parse(url)
    if place.scheme != "disk":
        return None
    return int(tier.store.status().budget * float(place.options.get("pin_share", _DEFAULT_PIN_SHARE)))


def _block_bytes(record: LayoutRecord) -> int:
    """Without a codec. Raises ModelUnsupported for a record that does not say it."""
    described: Any = record.described
    try:
        numbers = sum(heads * (key + value) for heads, key, value in described["layers"])
        return int(record.block_size * ITEM_BYTES[described["dtype"]] * numbers)
    except (KeyError, TypeError, ValueError):
        raise ModelUnsupported(
            f"the store's record of layout {record.fingerprint.hex()} is of another version"
        ) from None


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two prefixes begin with alike."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
