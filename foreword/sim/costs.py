"""Costs of steps and loads, and the fleet of a simulation."""

from __future__ import annotations

from dataclasses import dataclass, replace

from foreword.errors import ConfigError
from foreword.routing.costs import LoadCost, ReplicaCosts
from foreword.routing.directory import CacheTier


@dataclass(frozen=True, slots=True)
class EngineCosts:
    """Seconds that steps and loads take. A step that prefills P tokens and decodes D sequences with a total context of C takes

        base + prefill * P + attention * (pairs of prefilled tokens and tokens before them)
             + decode_each * D + decode_context * C

    The defaults are roughly those of a 70B model on eight accelerators with 80 GB each.

    Attributes:
        loads: cost of loading a token from host memory, disk and the shared store.
        request: part of each time to first token (TTFT) outside of the engine: network, HTTP, tokenization, router.
    """

    base: float = 0.02
    prefill: float = 1.1e-4
    attention: float = 2e-9
    decode_each: float = 1e-4
    decode_context: float = 3e-8
    loads: tuple[LoadCost, ...] = (LoadCost(1.6e-5, 1e-3), LoadCost(6e-5, 2e-3), LoadCost(3.2e-5, 5e-3))
    request: float = 0.0

    def __post_init__(self) -> None:
        steps = self.base, self.prefill, self.attention, self.decode_each, self.decode_context
        if min(*steps, self.request) < 0 or not self.prefill:
            raise ConfigError("costs must not be negative, and the cost of a prefilled token must be more than 0")
        if len(self.loads) != 3:
            raise ConfigError(f"costs need three tiers to load from, not {len(self.loads)}")

    def load(self, tier: CacheTier) -> LoadCost:
        return self.loads[tier - 1]

    def scaled(self, factor: float) -> EngineCosts:
        """The costs of an engine whose steps take `factor` times as long."""
        fields = ("base", "prefill", "attention", "decode_each", "decode_context")
        scaled = {name: getattr(self, name) * factor for name in fields}
        return replace(self, **scaled)

    def as_known(self, step_tokens: int) -> ReplicaCosts:
        """The costs as a router knows them after learning."""
        return ReplicaCosts(
            self.prefill, self.base, self.base, self.decode_each, step_tokens, self.loads, attention=self.attention
        )


@dataclass(frozen=True, slots=True)
class FleetSpec:
    """Replicas and their memory.

    Attributes:
        replicas: number of replicas.
        device_tokens: KV memory of each replica on its device.
        host_tokens, disk_tokens: KV memory of each replica in host memory and on disk; 0 for none.
        shared_tokens: size of a store that all replicas share; 0 for none.
        block_size: tokens per block.
        max_batch_tokens, max_num_seqs, lookahead_blocks: see `EngineConfig`.
        partial_reuse: see `EngineConfig`; needs a trace with single tokens.
        events: replicas send KV events; otherwise the router estimates what they hold.
        learns: the router starts with general costs and learns; otherwise it starts with the true costs.
    """

    replicas: int = 8
    device_tokens: int = 1_000_000
    host_tokens: int = 0
    disk_tokens: int = 0
    shared_tokens: int = 0
    block_size: int = 512
    max_batch_tokens: int = 2048
    max_num_seqs: int = 256
    partial_reuse: bool = False
    lookahead_blocks: int = 0
    events: bool = True
    learns: bool = True

    def __post_init__(self) -> None:
        if self.replicas < 1 or self.block_size < 1 or self.device_tokens < self.block_size:
            raise ConfigError("a fleet needs at least one replica, and each device must hold at least one block")
        if min(self.host_tokens, self.disk_tokens, self.shared_tokens) < 0:
            raise ConfigError("the size of a tier must not be negative")
