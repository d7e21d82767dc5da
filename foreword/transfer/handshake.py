"""How a connection begins: both sides authenticate, introduce themselves, and agree on a link.

1. Each side sends an opening of 44 bytes: magic, version, which links it has, whether it has a secret, a nonce of 32 random
   bytes. Nothing else is parsed before the other side has authenticated.
2. The client proves first that it knows the secret: HMAC-SHA256 over `foreword/transfer/client` and both openings. The server
   checks it, answers yes or no in one byte, and proves the same over `foreword/transfer/server`. Version and links are in the
   openings, so a man in the middle cannot downgrade them. Under TLS (`tls`), which comes first, the proofs are also over the
   server's certificate. Without a secret the same is done with an empty one, between local
   peers only.
3. Each sends `Hello`. The layouts must be equal unless one side has none.
4. The client tries the links that both have in its own order; the first one that works both ways carries the payloads. For
   shared memory each side opens a segment of the other. TCP always works.

Only the handshake is authenticated. Without TLS what follows is neither encrypted nor signed.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from foreword.blocks.layout import Layout
from foreword.transfer.errors import BadMessage, PeerRejected, ProtocolViolation, TransferError, TransferUnavailable
from foreword.transfer.link import Link, TcpLink
from foreword.transfer.shm import MappedSegment, OwnSegment, ShmLink, open_peers
from foreword.transfer.sockets import SocketStream
from foreword.transfer.wire_format import (
    HEAD_BYTES,
    VERSION,
    Goodbye,
    Hello,
    LinkResult,
    SharedSegment,
    TransferMessage,
    decode,
    encode,
    read_head,
)
from foreword.transfer_config import ALL_RIGHTS, SharedSecret

_MAGIC: Final = b"FWTH"
_OPENING: Final = struct.Struct("<4sHBB4x32s")
_HAS_SECRET: Final = 1
# Bit 4 was used by a link that has been removed.
_BITS: Final = {"tcp": 1, "shm": 2}
LINKS: Final = tuple(_BITS)
_PROOF_BYTES: Final = 32
_MAX_METADATA: Final = 2 << 20
_YES: Final = b"\x01"
_NO: Final = b"\x00"
_TLS: Final = 0x16  # the first byte of a connection with TLS
_WRONG: Final = "the peer has another shared secret; give all instances the same transfer.secret"
WRONG_SECRET: Final = "secret"
Kind = TypeVar("Kind", bound=TransferMessage)


@dataclass(frozen=True, slots=True)
class Identity:
    """This instance's part of the handshake.

    Attributes:
        secrets: a server accepts any of them; a client has the one that it proves. An empty one only among local peers.
        links: names of its links, the preferred one first; must contain `tcp`, and links after it are not used.
        heartbeat: seconds between its heartbeats.
        ring: bytes of a ring of shared memory, and of received payloads that are not released.
    """

    instance: bytes
    secrets: tuple[SharedSecret, ...]
    links: tuple[str, ...]
    layout: Layout | None
    address: str
    heartbeat: float
    ring: int

    @property
    def usable(self) -> tuple[str, ...]:
        """Up to `tcp`, which always works."""
        return self.links[: self.links.index("tcp") + 1]

    @property
    def has_secret(self) -> bool:
        return bool(self.secrets[0].text)

    def hello(self) -> Hello:
        layout = "" if self.layout is None else json.dumps(self.layout.describe(), sort_keys=True)
        return Hello(self.instance, layout, self.address, self.heartbeat, self.ring)


@dataclass(frozen=True, slots=True)
class Peer:
    """The instance at the other end.

    Attributes:
        instance: id of its endpoint; another id at the same address means that the process was restarted.
        address: where it listens, "" if nowhere.
        layout: fingerprint of its blocks' layout, b"" if it has none.
        heartbeat: seconds between its heartbeats.
        largest: bytes of a payload that it receives.
        rights: what it may begin here.
    """

    instance: bytes
    address: str
    layout: bytes
    heartbeat: float
    largest: int
    rights: frozenset[str] = ALL_RIGHTS

    @property
    def name(self) -> str:
        return self.address or self.instance.hex()[:8]


class _HandshakeMessages:
    """Sends and receives messages one at a time, before there is a link."""

    def __init__(self, stream: SocketStream, deadline: float) -> None:
        self.stream = stream
        self.deadline = deadline

    def send(self, message: TransferMessage) -> None:
        self.stream.write(encode(message), self.deadline)

    def receive(self, kind: type[Kind]) -> Kind:
        head = self.stream.read(HEAD_BYTES, self.deadline)
        length = read_head(head).metadata
        if length > _MAX_METADATA:
            raise BadMessage(f"a handshake message of {length} bytes")
        message = decode(head, self.stream.read(length, self.deadline))[1]
        if isinstance(message, Goodbye):
            raise PeerRejected(message.message or "the peer refused")
        if not isinstance(message, kind):
            raise ProtocolViolation(f"a {type(message).__name__} instead of a {kind.__name__}")
        return message

    def send_fd(self, fd: int) -> None:
        socket.send_fds(self.stream.sock, [b"\x00"], [fd])

    def receive_fd(self) -> int:
        while time.monotonic() < self.deadline:
            try:
                _, fds, _, _ = socket.recv_fds(self.stream.sock, 1, 1)
            except BlockingIOError:
                continue
            if len(fds) == 1:
                return fds[0]
            break
        raise TransferUnavailable("the peer passed no file descriptor")


def agree(
    stream: SocketStream,
    identity: Identity,
    *,
    client: bool,
    deadline: float,
    authenticated: Callable[[], object] = lambda: None,
) -> tuple[Link, Peer]:
    """Do the handshake on a new connection; returns its link and the peer.

    Args:
        deadline: for all of it, however often bytes come.
        authenticated: called when the peer has proven that it knows the secret.

    Raises PeerRejected, with the reason in words, if the two instances do not match, and other TransferErrors if the connection
    breaks.
    """
    try:
        links, rights = _authenticate(stream, identity, client, deadline)
        authenticated()
        messages = _HandshakeMessages(stream, deadline)
        peer = _exchange_hellos(messages, identity)
        link = _choose(messages, identity, links, client)
    except OSError as error:
        raise TransferUnavailable(f"the connection broke: {error.strerror or error}") from error
    return link, replace(peer, largest=min(peer.largest, link.largest), rights=rights)


def _authenticate(
    stream: SocketStream, identity: Identity, client: bool, deadline: float
) -> tuple[tuple[str, ...], frozenset[str]]:
    """Authenticate both sides; returns the links that both have, and the peer's rights."""
    mine = _opening(identity)
    if client:
        stream.write(mine, deadline)
        theirs = stream.read(_OPENING.size, deadline)
    else:
        theirs = stream.read(_OPENING.size, deadline)
        stream.write(mine, deadline)
    magic, version, bits, flags, nonce = _OPENING.unpack(theirs)
    if magic != _MAGIC:
        tls = ", it begins with TLS; set transfer.tls on all instances, or on none" if magic[0] == _TLS else ""
        raise PeerRejected(f"the peer does not speak Foreword's transfer protocol{tls}")
    if version != VERSION:
        raise PeerRejected(
            f"the peer speaks version {version} of the transfer protocol, this instance version {VERSION}"
        )
    if bool(flags & _HAS_SECRET) != identity.has_secret:
        raise PeerRejected(_secret_mismatch(identity.has_secret))
    if nonce == mine[-len(nonce) :]:
        raise PeerRejected("the peer echoes what it receives")
    opening = mine + theirs if client else theirs + mine
    signed = opening + stream.binding
    prove = _prove_as_client if client else _prove_as_server
    rights = prove(stream, identity.secrets, signed, deadline)
    return tuple(name for name in identity.usable if bits & _BITS[name]), rights


def _opening(identity: Identity) -> bytes:
    bits = sum(_BITS[name] for name in identity.usable)
    flags = _HAS_SECRET if identity.has_secret else 0
    return _OPENING.pack(_MAGIC, VERSION, bits, flags, secrets.token_bytes(32))


def _secret_mismatch(have: bool) -> str:
    peer = "the peer has no shared secret" if have else "the peer requires a shared secret"
    return f"{peer} and this instance has {'one' if have else 'none'}; give all instances the same transfer.secret"


def _proof(secret: SharedSecret, role: str, signed: bytes) -> bytes:
    return hmac.digest(secret.text.encode(), f"foreword/transfer/{role}".encode() + signed, "sha256")


def _prove_as_client(
    stream: SocketStream, secrets: Sequence[SharedSecret], signed: bytes, deadline: float
) -> frozenset[str]:
    stream.write(_proof(secrets[0], "client", signed), deadline)
    if stream.read(1, deadline) != _YES:
        raise PeerRejected(_WRONG, reason=WRONG_SECRET)
    if not hmac.compare_digest(stream.read(_PROOF_BYTES, deadline), _proof(secrets[0], "server", signed)):
        raise PeerRejected(_WRONG, reason=WRONG_SECRET)
    return ALL_RIGHTS


def _prove_as_server(
    stream: SocketStream, secrets: Sequence[SharedSecret], signed: bytes, deadline: float
) -> frozenset[str]:
    """Returns the rights of the secret that the client has proven."""
    given = stream.read(_PROOF_BYTES, deadline)
    proven = [secret for secret in secrets if hmac.compare_digest(given, _proof(secret, "client", signed))]
    if not proven:
        stream.write(_NO, deadline)
        raise PeerRejected(_WRONG, reason=WRONG_SECRET)
    stream.write(_YES + _proof(proven[0], "server", signed), deadline)
    return proven[0].rights


def _exchange_hellos(messages: _HandshakeMessages, identity: Identity) -> Peer:
    messages.send(identity.hello())
    theirs = messages.receive(Hello)
    layout = _layout_of(theirs.layout)
    if identity.layout is not None and layout is not None:
        differs = _difference(identity.layout.describe(), layout)
        if differs:
            messages.send(Goodbye(f"the KV layouts of the two instances differ: {differs} (as seen by the peer)"))
            raise PeerRejected(f"the KV layouts of the two instances differ: {differs}", reason="layout")
    if not 0.05 <= theirs.beat <= 3600 or theirs.largest < 1 or len(theirs.instance) != 16:
        raise ProtocolViolation("the peer's Hello has values out of range")
    fingerprint = identity.layout.fingerprint if identity.layout is not None and layout is not None else b""
    return Peer(theirs.instance, theirs.address, fingerprint, theirs.beat, theirs.largest)


def _layout_of(text: str) -> dict[str, object] | None:
    if not text:
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadMessage("the peer's layout is not JSON") from error
    if not isinstance(found, dict):
        raise BadMessage("the peer's layout is not a JSON object")
    return found


def _difference(ours: dict[str, object], theirs: dict[str, object]) -> str:
    """How two layouts differ, in words; "" for equal ones. Both are compared after a round trip through JSON."""
    ours = json.loads(json.dumps(ours))
    names = [name for name in sorted(ours.keys() | theirs.keys()) if ours.get(name) != theirs.get(name)]
    return ", ".join(_difference_of(name, ours.get(name), theirs.get(name)) for name in names)[:1000]


def _difference_of(name: str, ours: object, theirs: object) -> str:
    if name == "layers":
        return "different number or shape of layers"
    if name == "model":
        return "different weights of the model"
    return f"{name.replace('_', ' ')} is {str(theirs)[:50]} there and {str(ours)[:50]} here"


def _choose(messages: _HandshakeMessages, identity: Identity, links: Sequence[str], client: bool) -> Link:
    """The best link that works. `links` are those that both sides have."""
    if "shm" in links:
        link = _propose_shm(messages, identity) if client else _answer_shm(messages, identity)
        if link is not None:
            return link
    return TcpLink(messages.stream, ring=identity.ring)


def _propose_shm(messages: _HandshakeMessages, identity: Identity) -> Link | None:
    """The client's half: show a segment and open the server's."""
    with ExitStack() as stack:
        own = _make_segment(messages, identity, stack)
        _show(messages, own)
        theirs = _open_shown(messages)
        messages.send(LinkResult(own is not None and theirs is not None))
        works = messages.receive(LinkResult).works
    return ShmLink(messages.stream, own, theirs) if works and own is not None and theirs is not None else None


def _answer_shm(messages: _HandshakeMessages, identity: Identity) -> Link | None:
    """The server's half: open the client's segment and, if that works, show one."""
    with ExitStack() as stack:
        theirs = _open_shown(messages)
        own = _make_segment(messages, identity, stack) if theirs is not None else None
        _show(messages, own)
        works = messages.receive(LinkResult).works and own is not None and theirs is not None
        messages.send(LinkResult(works))
    return ShmLink(messages.stream, own, theirs) if works and own is not None and theirs is not None else None


def _make_segment(messages: _HandshakeMessages, identity: Identity, stack: ExitStack) -> OwnSegment | None:
    """A segment whose name is removed when the handshake ends; its memory lives as long as it is mapped."""
    try:
        own = OwnSegment(identity.ring, named=messages.stream.sock.family != socket.AF_UNIX)
    except TransferError:
        return None  # no shared memory here, or not enough: use TCP
    stack.callback(own.unlink)
    return own


def _show(messages: _HandshakeMessages, own: OwnSegment | None) -> None:
    """Tell the peer where the segment is; size 0 says that there is none."""
    if own is None:
        messages.send(SharedSegment("", 0, b""))
        return
    messages.send(SharedSegment(own.place, own.size, own.token))
    if not own.place:
        messages.send_fd(own.fd)


def _open_shown(messages: _HandshakeMessages) -> MappedSegment | None:
    """Open the segment that the peer shows."""
    theirs = messages.receive(SharedSegment)
    if not theirs.size:
        return None
    passed = messages.receive_fd() if messages.stream.sock.family == socket.AF_UNIX else None
    try:
        return open_peers(theirs.place, passed, theirs.size, theirs.token)
    except TransferError:
        return None  # another host, or another user's /dev/shm
    finally:
        if passed is not None:
            os.close(passed)
