"""KV blocks: keys, the block pool, prefix lookup. Pure Python: no I/O, no torch."""

from foreword.blocks.keys import KEY_BYTES, KEY_FORMAT, Scope, TokenChain, chain_keys
from foreword.blocks.pool import BlockPool
from foreword.blocks.prefix_cache import BlockTable, Copy, Match, PrefixCache
from foreword.blocks.salt import Salt

__all__ = [
    "KEY_BYTES",
    "KEY_FORMAT",
    "BlockPool",
    "BlockTable",
    "Copy",
    "Match",
    "PrefixCache",
    "Salt",
    "Scope",
    "TokenChain",
    "chain_keys",
]
