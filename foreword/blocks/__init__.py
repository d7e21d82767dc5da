"""KV blocks: keys, the block pool, prefix lookup. Pure Python: no I/O, no torch."""
