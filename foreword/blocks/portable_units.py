"""The portable layout of blocks.

In this layout a block consists of units that instances of other sizes can read. A *unit* is the KV of some
consecutive tokens and KV heads, in all layers of a group. A frame of the portable layout has one unit, in the order "tokens".
The size of a unit does not depend on the instance. So ranks of any number, with blocks of any size and packing, find each
other's units:

              head unit 0      head unit 1
    tokens   +---------------+---------------+    block 0 of an instance with blocks of 32 tokens;
     0..31   | one frame     | one frame     |    a block of 64 tokens has four units
    32..63   | one frame     | one frame     |    block 1
             +---------------+---------------+
               rank 0 of 2     rank 1 of 2         an instance with one rank has both columns

The units of a chain have keys of their own: those of a chain whose blocks have the tokens of a unit. Each head unit has its own
layout, whose `shard` is (head unit, number of head units), so units are never confused.
"""

from __future__ import annotations

import math
from dataclasses import replace

from foreword.blocks.layout import BlockUnits, LayerLayout, Layout
from foreword.errors import ConfigError

# Any block size that is usual, and tensor-parallel sizes up to 8.
UNIT_TOKENS = 16
HEAD_UNITS = 8


def portable_units(
    layout: Layout, *, unit_tokens: int = UNIT_TOKENS, head_units: int = HEAD_UNITS, replicas: int = 1
) -> BlockUnits:
    """The units of a rank.

    Args:
        layout: layout of the rank's blocks; its shard is (rank, number of ranks), and its layers have the rank's KV heads.
        unit_tokens: tokens of a unit, a divisor of every block size.
        head_units: the most head units. There are as many as divide the KV heads of every layer.
        replicas: how many consecutive ranks have the same heads.

    Raises ConfigError where blocks and ranks do not consist of whole units.
    """
    if unit_tokens < 1 or layout.block_size % unit_tokens:
        raise ConfigError(
            f"blocks of {layout.block_size} tokens cannot be divided into units of {unit_tokens} tokens; choose a unit that "
            "divides the block size of every instance"
        )
    rank, ranks = layout.shard
    if replicas < 1 or ranks % replicas:
        raise ConfigError(f"{ranks} ranks cannot be divided into groups of {replicas} that have the same KV heads")
    parts = ranks // replicas
    units = math.gcd(head_units, *(layer.kv_heads * parts for layer in layout.layers))
    if head_units < 1 or units % parts:
        raise ConfigError(
            f"the KV heads of this model make {units} head units (at most {head_units}), which {parts} ranks cannot share; set "
            f"head_units to a multiple of {parts}"
        )
    own = units // parts
    layers = tuple(LayerLayout(one.kv_heads // own, one.key_dim, one.value_dim) for one in layout.layers)
    every = tuple(
        replace(layout, block_size=unit_tokens, layers=layers, order="tokens", shard=(unit, units))
        for unit in range(units)
    )
    first = rank // replicas * own
    return BlockUnits(every[first : first + own], every, layout.block_size // unit_tokens, rank % replicas == 0)
