"""Configuration of the vLLM connector: its settings, and the model and KV cache that vLLM has configured."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from foreword.blocks.keys import Scope
from foreword.blocks.layout import BlockUnits, Layout, whole_blocks
from foreword.blocks.resume import GroupKind, alignment
from foreword.blocks.salt import Salt
from foreword.config_layers import build
from foreword.errors import ConfigError, ModelUnsupported, did_you_mean
from foreword.integrations.vllm.connector_extras import check_usage, portable_layout, transfer_extra
from foreword.integrations.vllm.groups import ConnectorGroup, key_block_size, read_groups, stored_groups
from foreword.integrations.vllm.namespace import (
    base_digest,
    engine_of,
    plain_dtype,
    private,
    settings_digest,
    trusted,
)
from foreword.integrations.vllm.weights import WeightsVersion
from foreword.offload.direct_extra import direct_extra
from foreword.offload.search import StoredGroup
from foreword.store.store_keys import check_apart, data_keys_of, keys_from_environment
from foreword.store.types import Reach
from foreword.store.urls import check_stores, loss_of, parse
from foreword.store_config import EncryptionConfig, StoreConfig

if TYPE_CHECKING:
    from foreword.integrations.vllm_extras.interfaces import PortableLayout
    from foreword.store.key_interfaces import StoreKeys
    from foreword.transfer_config import TransferConfig

logger = logging.getLogger(__name__)

_UNITS = ("unit_tokens", "head_units")  # settings of the portable layout
_OWN = {"weights_version": "", "usage_ledger": "", "trust_unmeasured": False}
_STORE = ("staging", "direct", "lookup_timeout", "load_timeout", "flush_seconds")
_KNOWN = ("store", "fingerprint", "transfer", "encryption", "layout", *_UNITS, *_OWN, *_STORE)

NULL_BLOCK = 0  # vLLM's block id in place of blocks behind a sliding window


@dataclass(frozen=True, slots=True)
class ConnectorSettings:
    """The settings in `kv_connector_extra_config`, and what follows from vLLM's `kv_role`.

    Attributes:
        fingerprint: a digest of the weights, 32 or 64 hexadecimal digits, for weights that are not in safetensors files.
        weights_version: name of the version of the weights at start, where they are updated in place.
        transfer: how KV is transferred to and from other instances; None: not at all.
        listens: whether other instances may read this one's memory tiers and leases.
        produces, consumes: whether requests may have `do_remote_decode`, and `do_remote_prefill`.
        units: the portable layout; None for the native layout.
        encryption: of the stores.
        usage_ledger: file to which a line is appended for each request that has ended; "" for none.
        trust_unmeasured: where this server's KV cannot be measured, share it with servers whose settings look the same.
    """

    store: StoreConfig
    fingerprint: str | None = None
    transfer: TransferConfig | None = None
    listens: bool = False
    produces: bool = False
    consumes: bool = False
    units: PortableLayout | None = None
    weights_version: str = ""
    encryption: EncryptionConfig = field(default_factory=EncryptionConfig)
    usage_ledger: str = ""
    trust_unmeasured: bool = False

    @classmethod
    def read(cls, extra: dict[str, Any], role: str = "kv_both") -> ConnectorSettings:
        """Raises ConfigError for an unknown key or a bad value."""
        for key in extra:
            if key not in _KNOWN:
                raise ConfigError(f"unknown key {key!r} in kv_connector_extra_config{did_you_mean(key, _KNOWN)}")
        urls = [extra["store"]] if isinstance(extra.get("store"), str) else extra.get("store", ())
        if not isinstance(urls, list | tuple) or not all(isinstance(url, str) for url in urls):
            raise ConfigError(f"store in kv_connector_extra_config is a list of URLs, not {urls!r}")
        own: dict[str, Any] = {name: extra.get(name, default) for name, default in _OWN.items()}
        for name, value in own.items():
            if type(value) is not type(_OWN[name]):
                raise ConfigError(
                    f"{name} in kv_connector_extra_config is a {type(_OWN[name]).__name__}, not {value!r}"
                )
        fingerprint, listens = extra.get("fingerprint"), "transfer" in extra
        transfer = transfer_extra().config(extra.get("transfer", {})) if listens or role != "kv_both" else None
        encryption = _encryption(extra.get("encryption", {}))
        units = portable_layout(extra.get("layout", "native"), {name: extra[name] for name in _UNITS if name in extra})
        if units is not None and transfer is not None:
            raise ConfigError("KV is transferred between instances in the native layout; leave out layout or transfer")
        store = build(StoreConfig, "store", {"urls": list(urls), **{key: extra[key] for key in _STORE if key in extra}})
        if store.direct:
            direct_extra()
        check_usage(own["usage_ledger"])
        check_apart(encryption, store.urls)
        reaches = {one.reach for one in check_stores(store.urls)}
        if transfer is not None or Reach.INSTANCE in reaches:
            transfer_extra().check(store.urls, transfer, encryption, listens=listens)
        if not store.urls and transfer is None:
            raise ConfigError('give stores in kv_connector_extra_config: {"store": ["disk:///var/cache/foreword"]}')
        return cls(
            store,
            None if fingerprint is None else _digest(fingerprint),
            transfer,
            listens or role == "kv_producer",
            transfer is not None and role != "kv_consumer",
            transfer is not None and role != "kv_producer",
            units,
            encryption=encryption,
            **own,
        )

    def keys(self) -> StoreKeys | None:
        """The keys that seal what is in the stores. Raises ConfigError, StoreError."""
        return keys_from_environment(self.encryption)

    def current(self, salt: Salt) -> Salt:
        """The salt in its tenant's generation now."""
        keys = None if self.encryption.key_store is None else data_keys_of(self.encryption)
        return salt if keys is None else Salt(keys.current(salt.tenant), salt.client)

    def check_processes(self, separate: bool) -> None:
        """Raises ConfigError where a scheduler in another process than the workers (`separate`) could not look into their
        memory: before a store opens."""
        if separate and any(parse(url).reach is Reach.PROCESS for url in self.store.urls):
            transfer_extra()

    def version_of(self, vllm_config: Any) -> WeightsVersion:
        """The version of the weights when vLLM starts. Dummy weights are random: without a name they have one of their own."""
        version = WeightsVersion(self.weights_version)
        dummy = str(getattr(vllm_config.load_config, "load_format", "")) == "dummy"
        if dummy and not self.weights_version and self.fingerprint is None:
            version.reset()
        return version


def _encryption(given: object) -> EncryptionConfig:
    """`encryption` of the settings: the keys of `EncryptionConfig` without `master_keys`, because vLLM logs its configuration.
    Those that are not given are the environment's. Raises ConfigError."""
    if not isinstance(given, dict) or "master_keys" in given:
        raise ConfigError(
            'encryption in kv_connector_extra_config is an object: {"key_store": "/var/lib/foreword/keys", '
            '"master_key_file": "/run/secrets/masters"}; master_keys are for FOREWORD_ENCRYPTION_MASTER_KEYS'
        )
    return EncryptionConfig.from_environment(given)


def _digest(text: object) -> str:
    """Check a digest in hexadecimal digits. Raises ConfigError."""
    try:
        found = bytes.fromhex(text) if isinstance(text, str) else b""
    except ValueError:
        found = b""
    if len(found) not in (16, 32):
        raise ConfigError(f"fingerprint in kv_connector_extra_config must be 32 or 64 hexadecimal digits, not {text!r}")
    return found.hex()


def _continues_prompts(vllm_config: Any) -> bool:
    """Whether vLLM itself may compute the rest of a prompt whose start is cached.

    It may not for most ways to pool (MEAN, CLS), which need all of a prompt in one step; and not for latent attention on CPUs
    without AMX, whose kernels compute whole prompts only (`CpuPlatform.check_and_update_config`). A user who turns off vLLM's
    own prefix cache changes nothing here.
    """
    model = vllm_config.model_config
    if getattr(model, "runner_type", "generate") == "pooling" and not model.is_prefix_caching_supported:
        return False
    if not getattr(model, "use_mla", False):
        return True
    chunked = vllm_config.scheduler_config.enable_chunked_prefill
    return bool(chunked or vllm_config.cache_config.enable_prefix_caching)


def warn_of_lost_writes(vllm_config: Any, command: Sequence[str]) -> None:
    """Log what a stop costs where `vllm serve` gives its processes no time for it. `command`: of this process, which a child of
    vLLM has from its parent."""
    serves = list(command[1:2]) == ["serve"] or any("api_server" in word for word in command[:1])
    if serves and getattr(vllm_config, "shutdown_timeout", None) == 0:
        logger.warning(
            "vLLM kills its processes at once when it is stopped, and the blocks that still wait to be written are lost; start "
            "it with --shutdown-timeout 30"
        )


class KVCacheInfo:
    """vLLM's model and KV cache as both sides of the connector need to know them.

    Raises ModelUnsupported for a model or configuration whose KV cannot be cached correctly.

    Attributes:
        groups: vLLM's KV cache groups.
        key_size: tokens per block key, a divisor of every group's block size.
        step: positions from which a request can continue are multiples of this many tokens.
        chunk: the most tokens that one step computes.
        selective: whether a tier refuses some blocks (`store/tier_admission.py`).
        current: the salt of a request in its tenant's generation now.
        whole: every group has full attention, so a request can continue behind any block, and at the end of its prompt.
        events: whether vLLM publishes KV events.
        base: digest of the weights (`namespace.py`).
        model: the namespace of the blocks; b"" until `settle`.
        fingerprint: that the settings give in place of the weights.
        trusts: whether KV that cannot be measured is shared all the same.
        loads: whether vLLM can compute the rest of a prompt whose start is loaded.
        separate: whether the scheduler is in another process than the workers.
    """

    def __init__(self, vllm_config: Any, kv_cache_config: Any, settings: ConnectorSettings) -> None:
        self.groups = read_groups(kv_cache_config)
        self.num_blocks = int(kv_cache_config.num_blocks)
        self._memory_order = str(getattr(kv_cache_config, "kv_cache_layout", None))
        self._units = settings.units
        self.key_size = key_block_size(self.groups) if settings.units is None else settings.units.tokens
        self.step = alignment([one.group for one in self.groups])
        self.whole = all(one.group.whole for one in self.groups)
        self.config = vllm_config
        self.chunk = int(vllm_config.scheduler_config.max_num_batched_tokens)
        parallel = vllm_config.parallel_config
        self.ranks: int = int(parallel.tensor_parallel_size)
        self.separate = self.ranks > 1 or parallel.distributed_executor_backend != "uni"
        settings.check_processes(self.separate)
        if parallel.pipeline_parallel_size != 1:
            raise ModelUnsupported(
                "pipeline parallelism is not supported by Foreword's connector: vLLM's scheduler does not know the layers of "
                "later stages"
            )
        for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
            if getattr(parallel, name, 1) != 1:
                raise ModelUnsupported("context parallelism is not supported by Foreword's connector")
        self.loads = _continues_prompts(vllm_config)
        self.fingerprint, self.trusts = settings.fingerprint, settings.trust_unmeasured
        self.base = base_digest(vllm_config, settings.fingerprint)
        self.settings = settings_digest(vllm_config)
        self.model = b""
        self.loss = loss_of(settings.store.urls)
        self.selective = any(parse(url).rule is not None for url in settings.store.urls)
        self.current = settings.current
        self.units(0)
        events = getattr(vllm_config, "kv_events_config", None)
        self.events = bool(events is not None and events.enable_kv_cache_events)

    def settle(self, namespace: bytes = b"") -> None:
        """From now on blocks have the names of this namespace. Without one nothing was measured, and no other tells this
        process a random namespace: then it is one that the processes of this engine have in common."""
        self.model = namespace or (self.trusted() if self.trusts else self._private())

    def trusted(self) -> bytes:
        """The namespace of unmeasured servers whose operators trust their settings."""
        return trusted(self.base, self.settings, self.config)

    def _private(self) -> bytes:
        engine = self.config.kv_transfer_config.engine_id
        return private(self.base, self.settings, f"{engine} {engine_of(self.config)}")

    @property
    def divisible(self) -> bool:
        """Whether a part of a load is of use: vLLM takes failed blocks, not only failed requests, if there is one group."""
        return self.whole and len(self.groups) == 1

    @property
    def speculative(self) -> bool:
        """Whether a step may compute tokens that are rejected afterwards."""
        return getattr(self.config, "speculative_config", None) is not None

    @property
    def decoded_tokens(self) -> int:
        """The most tokens of a request that a step of decoding computes."""
        speculative = getattr(self.config, "speculative_config", None)
        return 1 + int(getattr(speculative, "num_speculative_tokens", 0) or 0)

    def limit(self, num_tokens: int) -> int:
        """How many of a prompt's tokens may be loaded. vLLM computes the last token of a prompt again. That would enter a
        recurrent state twice; and the token's own window or chunk may begin in a block that is not needed behind it."""
        return num_tokens - 1 if any(map(_needs_last_token, self.groups)) else num_tokens

    def layouts(self, rank: int) -> tuple[Layout, ...]:
        """The layout of one rank's blocks, by group. The scheduler, which has no tensors, gets the same as the workers."""
        return tuple(self._layout(one, rank) for one in self.groups)

    def _layout(self, one: ConnectorGroup, rank: int) -> Layout:
        layers = one.layers
        return Layout(
            self.model,
            one.block_size,
            layers,
            one.dtype if layers else "uint8",
            order=self._order(one),
            shard=(rank, self.ranks),
            loss=self.loss,
            group=one.describe(len(self.groups)),
            opaque_bytes=0 if layers else one.block_bytes,
        )

    def _order(self, one: ConnectorGroup) -> str:
        """Everything else that determines what the bytes of a block mean."""
        return "/".join(
            (
                "vllm",
                plain_dtype(str(self.config.cache_config.cache_dtype), self.config.model_config.dtype),
                self._memory_order,
                *one.formats(lambda spec: _block_format(self.config, spec.dtype, one.block_size, spec.head_size)),
            )
        )

    def units(self, rank: int) -> tuple[BlockUnits, ...]:
        """How one rank's blocks divide into frames, by group. Raises ConfigError, ModelUnsupported."""
        if self._units is None:
            return tuple(map(whole_blocks, self.layouts(rank)))
        return tuple(
            self._units.divided(self.config, one, layout)
            for one, layout in zip(self.groups, self.layouts(rank), strict=True)
        )

    def stored_groups(self) -> tuple[StoredGroup, ...]:
        """The groups as searches need them."""
        if self._units is None:
            return stored_groups(self.groups, self.fingerprints())
        return tuple(
            StoredGroup(one.group, tuple(layout.fingerprint for layout in units.every), units.per_block, divided=True)
            for one, units in zip(self.groups, self.units(0), strict=True)
        )

    def keys_before(self, number: int) -> int:
        """How many block keys before the end of a block of a group have frames of its own."""
        return 1 if self._units is None else self.groups[number].block_size // self.key_size

    def fingerprints(self) -> list[list[bytes]]:
        """Fingerprints of the layouts by rank, then by group."""
        return [[layout.fingerprint for layout in self.layouts(rank)] for rank in range(self.ranks)]

    def scope(self, salt: Salt) -> Scope:
        """The scope of the keys of a salt's chains."""
        return Scope(self.model, self.key_size, salt)


def _needs_last_token(one: ConnectorGroup) -> bool:
    """Whether a group cannot compute the token before a position again with the blocks that it needs at the position."""
    if one.group.kind is GroupKind.WINDOW:
        return one.group.span % one.block_size == 1
    return not one.group.whole


def _block_format(config: Any, dtype: torch.dtype, block_size: int, head_size: int) -> str:
    """How vLLM packs a block: on CPUs for the instruction set, elsewhere as the device's attention backend wants it."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        return f"cpu-{_get_attn_isa(dtype, block_size, head_size)}"
    backend = getattr(config.attention_config, "backend", None)
    return f"{current_platform.get_device_name()}-{getattr(backend, 'name', backend)}"
