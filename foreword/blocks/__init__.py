"""What a block is: its name, its place in the pool, and how it becomes visible. Pure: no I/O, no torch."""

from foreword.blocks.keys import KEY_BYTES, KEY_FORMAT, Scope, TokenChain, chain_keys
from foreword.blocks.pool import BlockPool
from foreword.blocks.prefix import BlockTable, Copy, Match, PrefixCache

__all__ = [
    "KEY_BYTES",
    "KEY_FORMAT",
    "BlockPool",
    "BlockTable",
    "Copy",
    "Match",
    "PrefixCache",
    "Scope",
    "TokenChain",
    "chain_keys",
]
