"""KV transfer between instances: remote prefill (pull), migration of running requests (push), reading blocks (fetch).

Bottom up: `messages` (wire format), `sockets`, `link` with `tcp` and `shm` (moving bytes), `handshake`, `channel` (the sending
half of a connection), `protocol` (states without I/O), `transfers` (the two sides of a transfer), `service` (what an instance
does for its peers), `registry`, `fetch`, `connection`, `endpoint` (listen and connect), `peer` (another instance as a store).
dev/concepts/transfer.md describes the whole.
"""
