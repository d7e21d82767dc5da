"""Real traffic through the real scheduler, pool, store policy and placement, in virtual time (docs/concepts/routing.md)."""
