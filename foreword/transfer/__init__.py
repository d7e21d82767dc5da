"""How KV travels between instances: pulled while it is computed, pushed with a running request, fetched as from a store.

`endpoint.Endpoint` is the door: it listens, connects, and calls a `service.Service`. Under it, top down: `transfers` (what a
service holds in its hands), `connection` (many transfers over one link), `protocol` (the states, without I/O), `messages` (the
wire format), `link` with `tcp` and `shm` (how bytes move). docs/concepts/transfer.md tells it from outside.
"""
