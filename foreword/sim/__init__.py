"""Trace-driven simulator: the real scheduler, block pool, store eviction and placement in virtual time."""
