"""What a simulated replica is made of, and how long its steps and loads take."""

from __future__ import annotations

from dataclasses import dataclass

from foreword.errors import ConfigError
from foreword.routing.costs import LoadCost, ReplicaCosts
from foreword.routing.directory import CacheTier


@dataclass(frozen=True, slots=True)
class EngineCosts:
    """Seconds. A step that computes P tokens of prompts and decodes D sequences with C tokens of context together takes

        base + prefill * P + attention * (tokens of prompts times tokens before them) + decode_each * D + decode_context * C

    The defaults are about those of a model of 70 billion parameters on eight accelerators with 80 GB each.

    Attributes:
        loads: what bringing blocks from host memory, disk and the shared store takes per token.
    """

    base: float = 0.02
    prefill: float = 1.1e-4
    attention: float = 2e-9
    decode_each: float = 1e-4
    decode_context: float = 3e-8
    loads: tuple[LoadCost, ...] = (LoadCost(1.6e-5, 1e-3), LoadCost(6e-5, 2e-3), LoadCost(3.2e-5, 5e-3))

    def __post_init__(self) -> None:
        if min(self.base, self.prefill, self.attention, self.decode_each, self.decode_context) < 0 or not self.prefill:
            raise ConfigError("costs must not be negative, and computing a token must cost something")
        if len(self.loads) != 3:
            raise ConfigError(f"costs have three tiers to load from, not {len(self.loads)}")

    def load(self, tier: CacheTier) -> LoadCost:
        return self.loads[tier - 1]

    def as_known(self, step_tokens: int) -> ReplicaCosts:
        """The same as a router would know it after some time."""
        return ReplicaCosts(
            self.prefill, self.base, self.base, self.decode_each, step_tokens, self.loads, attention=self.attention
        )


@dataclass(frozen=True, slots=True)
class FleetSpec:
    """The machines.

    Attributes:
        replicas: how many.
        device_tokens: KV memory of each on its device.
        host_tokens, disk_tokens: of each below that; 0 for none.
        shared_tokens: of a store that all share; 0 for none.
        block_size: tokens per block of the simulated engines.
        max_batch_tokens, max_num_seqs: see `EngineConfig`.
        partial_reuse, lookahead_blocks: see `EngineConfig`. The first needs a trace that tells every token.
        events: replicas tell what they hold; else the router estimates it.
        learns: the router begins with general costs and learns; else it begins with the true ones.
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
            raise ConfigError("a fleet needs at least one replica, and each room for at least one block on its device")
        if min(self.host_tokens, self.disk_tokens, self.shared_tokens) < 0:
            raise ConfigError("the size of a tier must not be negative")
