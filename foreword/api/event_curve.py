"""Encryption of KV events with ZeroMQ's CURVE, from a key that server and router share.

The key pair of the server's sockets follows from the key. A client must know the server's public key, which is sent nowhere,
before it can say anything: who does not have the shared key learns nothing and is not read.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Any

import zmq
from zmq.utils import z85


def secure_publisher(socket: zmq.Socket[Any], key: str) -> None:
    """Make a listening socket take only clients with the key."""
    socket.curve_server = True
    socket.curve_secretkey = _secret_key(key)


def secure_subscriber(socket: zmq.Socket[Any], key: str) -> None:
    """Make a connecting socket talk only to a server with the key."""
    socket.curve_serverkey = zmq.curve_public(_secret_key(key))
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()


def _secret_key(key: str) -> bytes:
    return z85.encode(hmac.digest(key.encode(), b"foreword kv events 1", hashlib.sha256))
