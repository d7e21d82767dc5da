"""Which instance a request goes to. Pure: it decides, and does no I/O (docs/concepts/routing.md).

`Fleet` is what a router needs; the other modules are its parts.
"""
