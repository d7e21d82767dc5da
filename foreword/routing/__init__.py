"""Request placement across replicas. Pure: decides, and does no I/O (dev/concepts/routing.md).

`Fleet` is the entry point for a router; the other modules are its parts.
"""
