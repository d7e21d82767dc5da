"""Checks the core without extras: no torch, no framework."""

import importlib.util

from foreword import PrefixCache

assert importlib.util.find_spec("torch") is None
cache = PrefixCache(num_blocks=8, block_size=4)
table = cache.open(range(10))
cache.admit(table, cache.lookup(table))
assert cache.advance(table, 10)
cache.release(table)
assert len(cache.lookup(cache.open(range(10))).blocks) == 2
cache.check()
