"""vLLM's KV cache groups: what each needs to continue from a position, and the layout of its blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from foreword.blocks.layout import ITEM_BYTES, LayerLayout
from foreword.blocks.resume import GroupKind, KVGroup
from foreword.errors import ModelUnsupported
from foreword.offload.search import StoredGroup


@dataclass(frozen=True, slots=True)
class ConnectorGroup:
    """A KV cache group of vLLM.

    Attributes:
        index: its number in vLLM.
        group: what it needs to continue.
        specs: vLLM's description of each layer. Where the layers differ, it is the first layer's: vLLM tells the scheduler of
            no other, and both sides must give blocks the same names.
        uneven: the layers differ. The scheduler side never knows it.
        positional: block `i` of a request's table holds the group's block `i`. False for recurrent states, which vLLM moves.
    """

    index: int
    group: KVGroup
    layer_names: tuple[str, ...]
    specs: tuple[Any, ...]
    positional: bool
    uneven: bool = False

    @property
    def block_size(self) -> int:
        return self.group.block_size

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one rank, without vLLM's padding; about right if the layers differ."""
        return sum(int(spec.real_page_size_bytes) for spec in self.specs)

    @property
    def dtype(self) -> str:
        spec = self.specs[0]
        kind = spec.dtypes[0] if isinstance(spec, MambaSpec) else spec.dtype
        return str(kind).removeprefix("torch.")

    @property
    def layers(self) -> tuple[LayerLayout, ...]:
        """Keys and values per token, empty where a block is something else."""
        if not all(isinstance(spec, AttentionSpec) for spec in self.specs) or self.dtype not in ITEM_BYTES:
            return ()
        found = tuple(LayerLayout(one.num_kv_heads, one.head_size, one.head_size_v) for one in self.specs)
        plain = sum(layer.elements for layer in found) * self.block_size * ITEM_BYTES[self.dtype]
        return found if plain == self.block_bytes else ()

    def formats(self, of_layer: Callable[[Any], str]) -> list[str]:
        """How blocks are packed: of attention as `of_layer` says, of states their shapes and dtypes."""
        attention = {spec.head_size: spec for spec in self.specs if isinstance(spec, AttentionSpec)}
        states = {f"{spec.mamba_type}{spec.shapes}{spec.dtypes}" for spec in self.specs if isinstance(spec, MambaSpec)}
        return [of_layer(attention[size]) for size in sorted(attention)] + sorted(states)

    def describe(self, groups: int) -> str:
        """Name this one of the model's groups: keeps the blocks of groups apart. "" for the only one."""
        if groups == 1 and self.positional:
            return ""
        names = sha256("\x00".join(self.layer_names).encode()).hexdigest()[:16]
        return f"{self.index}/{groups} {self.group.kind} {names}"


def read_groups(kv_cache_config: Any) -> tuple[ConnectorGroup, ...]:
    """The groups whose blocks can be cached, in vLLM's order. Raises ModelUnsupported."""
    found = []
    for index, one in enumerate(kv_cache_config.kv_cache_groups):
        spec = one.kv_cache_spec
        if not getattr(spec, "prefix_cacheable", True):
            raise ModelUnsupported(
                f"vLLM caches no prefixes for layers with a {type(spec).__name__}, such as {one.layer_names[0]}; "
                "Foreword's connector cannot restore them"
            )
        each = getattr(spec, "kv_cache_specs", None)
        names = tuple(one.layer_names)
        layers = [each[name] for name in names] if each else [spec]
        first = next(iter(each.values())) if each else spec
        kinds = {_kind(layer, spec) for layer in layers}
        if len(kinds) != 1:
            raise ModelUnsupported(f"vLLM's KV cache group {index} mixes layers that continue at different positions")
        positional = not any(isinstance(layer, MambaSpec) and layer.mamba_cache_mode == "align" for layer in layers)
        uneven = any(layer != first for layer in layers)
        found.append(ConnectorGroup(index, kinds.pop(), names, (first,) * len(names), positional, uneven))
    if not found:
        raise ModelUnsupported("this model has no KV cache, so there is nothing to reuse")
    return tuple(found)


def _kind(spec: Any, group: Any) -> KVGroup:
    """The kind of a layer, by its specification; `group` has the block size. Raises ModelUnsupported for an unknown one."""
    if not isinstance(spec, AttentionSpec | MambaSpec):
        raise _unknown(spec)
    block_size = int(group.block_size)
    if isinstance(spec, SlidingWindowSpec):
        return KVGroup(GroupKind.WINDOW, block_size, spec.sliding_window + getattr(spec, "extra_retained_tokens", 0))
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return KVGroup(GroupKind.CHUNKED, block_size, spec.attention_chunk_size)
    if isinstance(spec, MambaSpec):
        if spec.mamba_cache_mode == "none":
            raise ModelUnsupported("recurrent states are cached only with --enable-prefix-caching")
        return KVGroup(GroupKind.STATE, block_size)
    if isinstance(spec, FullAttentionSpec) and not getattr(spec, "rswa_window", 0):
        if getattr(spec, "non_causal", False):
            raise ModelUnsupported("keys and values of this model depend on later tokens")
        return KVGroup(GroupKind.FULL, block_size)
    raise _unknown(spec)


def _unknown(spec: Any) -> ModelUnsupported:
    return ModelUnsupported(
        f"layers of this model have a {type(spec).__name__}, which Foreword's connector does not know"
    )


def stored_groups(groups: Sequence[ConnectorGroup], layouts: Sequence[Sequence[bytes]]) -> tuple[StoredGroup, ...]:
    """The groups as searches need them. `layouts`: fingerprints by rank, then by group."""
    key_size = key_block_size(groups)
    return tuple(
        StoredGroup(one.group, tuple(rank[number] for rank in layouts), one.block_size // key_size)
        for number, one in enumerate(groups)
    )


def key_block_size(groups: Sequence[ConnectorGroup]) -> int:
    """Tokens per block key: a divisor of every group's block size."""
    return math.gcd(*(one.block_size for one in groups))
