"""The portable layout of a vLLM engine's blocks (`blocks/portable_units.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from foreword.blocks.layout import BlockUnits, Layout
from foreword.blocks.portable_units import HEAD_UNITS, UNIT_TOKENS, portable_units
from foreword.errors import ConfigError, ModelUnsupported
from foreword.integrations.vllm.groups import ConnectorGroup
from foreword.integrations.vllm_extras.packing import unit_group
from foreword.offload.unit_group import UnitGroup

_DTYPES: Final = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class PortableSettings:
    """How many tokens a unit has, and how many head units a model has at most. All instances that share stores need the same.
    Implements `PortableLayout` of the connector."""

    tokens: int = UNIT_TOKENS
    heads: int = HEAD_UNITS

    def divided(self, config: Any, group: ConnectorGroup, layout: Layout) -> BlockUnits:
        if not group.layers or group.dtype not in _DTYPES or group.uneven:
            raise ModelUnsupported(
                f"the portable layout is for keys and values in {', '.join(_DTYPES)}; {group.layer_names[0]} has others"
            )
        return portable_units(layout, unit_tokens=self.tokens, head_units=self.heads, replicas=_replicas(group, config))

    def staged(self, kv_caches: Mapping[str, Any], config: Any, group: ConnectorGroup, units: BlockUnits) -> UnitGroup:
        return unit_group(kv_caches, config, group, units)


def read(layout: object, units: Mapping[str, object]) -> PortableSettings | None:
    """The settings `layout`, `unit_tokens` and `head_units`. None for the native layout. Raises ConfigError."""
    if layout not in ("native", "portable"):
        raise ConfigError(f'layout in kv_connector_extra_config is "native" or "portable", not {layout!r}')
    counts: dict[str, int] = {}
    for name, count in units.items():
        if layout == "native":
            raise ConfigError(f'{name} in kv_connector_extra_config needs "layout": "portable"')
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ConfigError(f"{name} in kv_connector_extra_config is a number from 1 on, not {count!r}")
        counts[name] = count
    if layout == "native":
        return None
    return PortableSettings(counts.get("unit_tokens", UNIT_TOKENS), counts.get("head_units", HEAD_UNITS))


def _replicas(group: ConnectorGroup, config: Any) -> int:
    """How many ranks of tensor parallelism have the same KV heads. Raises ModelUnsupported where that is not certain."""
    ranks = int(config.parallel_config.tensor_parallel_size)
    shards = {min(getattr(spec, "max_tp_shards", None) or ranks, ranks) for spec in group.specs}
    heads = int(config.model_config.get_total_num_kv_heads())
    latent = all(layer.value_dim == 0 for layer in group.layers)
    if not latent and ranks > 1:
        if any(layer.kv_heads != max(1, heads // ranks) for layer in group.layers):
            raise ModelUnsupported("the portable layout needs layers with equal numbers of KV heads for several ranks")
        shards = {min(heads, ranks)}
    if len(shards) != 1 or ranks % min(shards):
        raise ModelUnsupported(f"it is unclear how {ranks} ranks share the KV heads of {group.layer_names[0]}")
    return ranks // min(shards)
