"""How a connection begins: both sides prove that they know the secret, say who they are, and agree on a link.

1. Each side sends 44 bytes of fixed form: magic, version, which links it has, whether it has a secret, a nonce of 32 random
   bytes. Nothing else is read before the other side has proved itself.
2. The client proves first, HMAC-SHA256 under the secret of `foreword/transfer/client`, both openings; the server checks, says
   yes or no in one byte, and proves itself over `foreword/transfer/server` and the same. Versions and links are in the
   openings, so nobody between them can talk them down. Without a secret the same is done under an empty
   one, between local peers only.
3. Each sends `Introduce`; layouts must be the same, unless one side has none.
4. Of the links that both have the client tries its own in their order; one that works both ways carries the payloads. For
   shared memory each opens a segment of the other's, for NIXL each reads a few bytes of the other's memory. TCP always works.

The proof is of the beginning only. What follows is neither encrypted nor signed: between hosts use a network of
your own.
"""

from __future__ import annotations

import hmac
import json
import logging
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

from foreword.blocks.layout import Layout
from foreword.errors import BadMessage, PeerRejected, ProtocolViolation, TransferError, TransferUnavailable
from foreword.transfer.connection import Peer
from foreword.transfer.link import Link
from foreword.transfer.messages import (
    HEAD_BYTES,
    VERSION,
    Agent,
    Bye,
    Chosen,
    Introduce,
    Message,
    Segment,
    decode,
    encode,
    read_head,
)
from foreword.transfer.nixl import NixlLink
from foreword.transfer.nixl_agent import NixlAgent, nap
from foreword.transfer.shm import OwnSegment, ShmLink, open_peers
from foreword.transfer.shm import Segment as Mapped
from foreword.transfer.sockets import Stream, peer_is_local
from foreword.transfer.tcp import TcpLink

log = logging.getLogger("foreword.transfer")

_MAGIC: Final = b"FWTH"
_OPENING: Final = struct.Struct("<4sHBB4x32s")
_SECRET: Final = 1
_BITS: Final = {"tcp": 1, "shm": 2, "nixl": 4}
LINKS: Final = tuple(_BITS)
_PROOF_BYTES: Final = 32
_MOST_INTRODUCTION: Final = 2 << 20
_YES: Final = b"\x01"
_NO: Final = b"\x00"
_TRIED: Final[tuple[type[Message], ...]] = (Segment, Agent)
Kind = TypeVar("Kind", bound=Message)


@dataclass(frozen=True, slots=True)
class Identity:
    """What one side brings.

    Attributes:
        secret: shared by all instances; empty only among local peers.
        links: names of those it can do, the best one first; `tcp` always, and nothing after it is used.
        ring: bytes of a ring of shared memory or of memory that NIXL reads, and of received payloads that are not released.
    """

    instance: bytes
    secret: str = field(repr=False)
    links: tuple[str, ...]
    layout: Layout | None
    address: str
    beat: float
    ring: int

    @property
    def usable(self) -> tuple[str, ...]:
        """Up to `tcp`, which always works."""
        return self.links[: self.links.index("tcp") + 1]

    def introduction(self, largest: int) -> Introduce:
        layout = "" if self.layout is None else json.dumps(self.layout.describe(), sort_keys=True)
        return Introduce(self.instance, layout, self.address, self.beat, largest)


class _Talk:
    """Messages one at a time, before there is a link."""

    def __init__(self, stream: Stream, deadline: float) -> None:
        self.stream = stream
        self.deadline = deadline

    def send(self, message: Message) -> None:
        self.stream.send([encode(message)], self.deadline)

    def receive(self, *kinds: type[Kind]) -> Kind:
        head = self.stream.read(HEAD_BYTES, self.deadline)
        length = read_head(head).metadata
        if length > _MOST_INTRODUCTION:
            raise BadMessage(f"an introduction of {length} bytes")
        message = decode(head, self.stream.read(length, self.deadline))[1]
        if isinstance(message, Bye):
            raise PeerRejected(message.message or "the peer refused")
        if not isinstance(message, kinds):
            raise ProtocolViolation(f"a {type(message).__name__} instead of a {kinds[0].__name__}")
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


def agree(stream: Stream, identity: Identity, *, client: bool, deadline: float) -> tuple[Link, Peer]:
    """Bring a new connection to the point where messages can flow.

    Raises PeerRejected where the two do not fit, with a sentence that says how; other TransferErrors where the link breaks.
    """
    try:
        links = _authenticate(stream, identity, client, deadline)
        talk = _Talk(stream, deadline)
        peer = _introduce(talk, identity)
        link = _choose(talk, identity, links, client)
    except OSError as error:
        raise TransferUnavailable(f"the connection broke: {error.strerror or error}") from error
    return link, replace(peer, largest=min(peer.largest, link.capabilities.largest))


def _authenticate(stream: Stream, identity: Identity, client: bool, deadline: float) -> tuple[str, ...]:
    """Both prove themselves; returns the links that both have."""
    mine = _opening(identity)
    if client:
        stream.send([mine], deadline)
        theirs = stream.read(_OPENING.size, deadline)
    else:
        theirs = stream.read(_OPENING.size, deadline)
        stream.send([mine], deadline)
    magic, version, bits, flags, nonce = _OPENING.unpack(theirs)
    if magic != _MAGIC:
        raise PeerRejected("the peer does not speak Foreword's transfer protocol")
    if version != VERSION:
        raise PeerRejected(
            f"the peer speaks version {version} of the transfer protocol, this instance version {VERSION}"
        )
    if bool(flags & _SECRET) != bool(identity.secret):
        raise PeerRejected(_one_sided(bool(identity.secret)))
    if nonce == mine[-len(nonce) :]:
        raise PeerRejected("the peer repeats what it is sent")
    opening = mine + theirs if client else theirs + mine
    _prove(stream, identity.secret, opening, client, deadline)
    return tuple(name for name in identity.usable if bits & _BITS[name])


def _opening(identity: Identity) -> bytes:
    bits = sum(_BITS[name] for name in identity.usable)
    flags = _SECRET if identity.secret else 0
    return _OPENING.pack(_MAGIC, VERSION, bits, flags, secrets.token_bytes(32))


def _one_sided(have: bool) -> str:
    who = "the peer has no shared secret" if have else "the peer asks for a shared secret"
    return f"{who} and this instance has {'one' if have else 'none'}; give all instances the same transfer.secret"


def _prove(stream: Stream, secret: str, opening: bytes, client: bool, deadline: float) -> None:
    def proof(role: str) -> bytes:
        return hmac.digest(secret.encode(), f"foreword/transfer/{role}".encode() + opening, "sha256")

    wrong = "the peer has another shared secret; give all instances the same transfer.secret"
    if client:
        stream.send([proof("client")], deadline)
        if stream.read(1, deadline) != _YES:
            raise PeerRejected(wrong)
        if not hmac.compare_digest(stream.read(_PROOF_BYTES, deadline), proof("server")):
            raise PeerRejected(wrong)
        return
    if not hmac.compare_digest(stream.read(_PROOF_BYTES, deadline), proof("client")):
        stream.send([_NO], deadline)
        raise PeerRejected(wrong)
    stream.send([_YES, proof("server")], deadline)


def _introduce(talk: _Talk, identity: Identity) -> Peer:
    talk.send(identity.introduction(identity.ring))
    theirs = talk.receive(Introduce)
    layout = _layout_of(theirs.layout)
    if identity.layout is not None and layout is not None:
        differs = _difference(identity.layout.describe(), layout)
        if differs:
            talk.send(Bye(f"the KV of the two instances does not fit: {differs} (the other way round seen from here)"))
            raise PeerRejected(f"the KV of the two instances does not fit: {differs}", reason="layout")
    if not 0.05 <= theirs.beat <= 3600 or theirs.largest < 1 or len(theirs.instance) != 16:
        raise ProtocolViolation("the peer's introduction makes no sense")
    fingerprint = identity.layout.fingerprint if identity.layout is not None and layout is not None else b""
    name = theirs.address or theirs.instance.hex()[:8]
    return Peer(theirs.instance, theirs.address, fingerprint, theirs.beat, theirs.largest, name)


def _layout_of(text: str) -> dict[str, object] | None:
    if not text:
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadMessage("the peer's layout is not JSON") from error
    if not isinstance(found, dict):
        raise BadMessage("the peer's layout is no object")
    return found


def _difference(ours: dict[str, object], theirs: dict[str, object]) -> str:
    """In words; "" for the same layout. Compared field by field, after both went through JSON."""
    ours = json.loads(json.dumps(ours))
    names = [name for name in sorted(ours.keys() | theirs.keys()) if ours.get(name) != theirs.get(name)]
    said = [_field(name, ours.get(name), theirs.get(name)) for name in names]
    return ", ".join(said)[:1000]


def _field(name: str, ours: object, theirs: object) -> str:
    words = {"block_size": "block size", "layers": "number and shape of layers", "model": "weights of the model"}
    if name in ("layers", "model"):
        return f"another {words[name]}"
    return f"{words.get(name, name)} is {str(theirs)[:50]} there and {str(ours)[:50]} here"


def _choose(talk: _Talk, identity: Identity, links: Sequence[str], client: bool) -> Link:
    """Try what both have, in the client's order."""
    for name in links:
        if name == "tcp":
            continue
        link = _propose(talk, identity, name) if client else _consider(talk, identity)
        if link is not None:
            return link
    return TcpLink(talk.stream, arena=identity.ring, same_host=peer_is_local(talk.stream.sock))


def _propose(talk: _Talk, identity: Identity, name: str) -> Link | None:
    """The client's half."""
    return _propose_nixl(talk, identity) if name == "nixl" else _propose_shm(talk, identity)


def _consider(talk: _Talk, identity: Identity) -> Link | None:
    """The server's half; the client's first message says which link it tries."""
    theirs = talk.receive(*_TRIED)
    if isinstance(theirs, Agent):
        return _consider_nixl(talk, identity, theirs)
    assert isinstance(theirs, Segment)
    return _consider_shm(talk, identity, theirs)


def _own(talk: _Talk, identity: Identity) -> OwnSegment | None:
    try:
        return OwnSegment(identity.ring, named=talk.stream.sock.family != socket.AF_UNIX)
    except TransferError:
        return None  # no shared memory here, or none left: TCP it is


def _show(talk: _Talk, own: OwnSegment | None) -> None:
    """Tell the peer where the segment is; size 0 says that there is none."""
    if own is None:
        talk.send(Segment("", 0, b""))
        return
    talk.send(Segment(own.place, own.size, own.token))
    if not own.place:
        talk.send_fd(own.fd)


def _look(talk: _Talk, theirs: Segment) -> Mapped | None:
    """Open the segment that the peer has shown."""
    if not theirs.size:
        return None
    passed = talk.receive_fd() if talk.stream.sock.family == socket.AF_UNIX else None
    try:
        return open_peers(theirs.place, passed, theirs.size, theirs.token)
    except TransferError:
        return None  # another host, or another user's /dev/shm
    finally:
        if passed is not None:
            os.close(passed)


def _propose_shm(talk: _Talk, identity: Identity) -> Link | None:
    own = _own(talk, identity)
    with closing(_Forgotten(own)):
        _show(talk, own)
        theirs = _look(talk, talk.receive(Segment))
        works = own is not None and theirs is not None
        talk.send(Chosen(works))
        works = talk.receive(Chosen).works and works
    return ShmLink(talk.stream, own.segment, theirs) if works and own is not None and theirs is not None else None


def _consider_shm(talk: _Talk, identity: Identity, shown: Segment) -> Link | None:
    """A segment of its own only if it can open the client's."""
    theirs = _look(talk, shown)
    own = _own(talk, identity) if theirs is not None else None
    with closing(_Forgotten(own)):
        _show(talk, own)
        works = talk.receive(Chosen).works and own is not None and theirs is not None
        talk.send(Chosen(works))
    return ShmLink(talk.stream, own.segment, theirs) if works and own is not None and theirs is not None else None


class _Forgotten:
    """A segment whose name goes, whatever happens; its memory stays as long as somebody has it mapped."""

    def __init__(self, own: OwnSegment | None) -> None:
        self.close: Callable[[], None] = own.forget if own is not None else lambda: None


_NONE: Final = Agent("", b"", 0, 0, b"")


def _propose_nixl(talk: _Talk, identity: Identity) -> Link | None:
    agent = _agent(talk, identity)
    talk.send(agent.announce() if agent is not None else _NONE)
    return _try_nixl(talk, agent, talk.receive(Agent))


def _consider_nixl(talk: _Talk, identity: Identity, theirs: Agent) -> Link | None:
    """An agent of its own only if the client has one."""
    agent = _agent(talk, identity) if theirs.size else None
    talk.send(agent.announce() if agent is not None else _NONE)
    return _try_nixl(talk, agent, theirs)


def _agent(talk: _Talk, identity: Identity) -> NixlAgent | None:
    try:
        return NixlAgent(identity.ring, talk.stream.sock)
    except TransferError as error:
        log.warning("%s", error)
        return None


def _try_nixl(talk: _Talk, agent: NixlAgent | None, theirs: Agent) -> Link | None:
    """Both read from each other; each goes on to make progress until it has heard how the other fared."""
    works = False
    try:
        if agent is not None and theirs.size:
            works = _reaches(agent, theirs, talk.deadline)
        talk.send(Chosen(works))
        turn = 0
        while agent is not None and not talk.stream.ready() and time.monotonic() < talk.deadline:
            agent.pump()
            nap(turn)
            turn += 1
        works = talk.receive(Chosen).works and works
        if works and agent is not None:
            local = peer_is_local(talk.stream.sock)
            link, agent = NixlLink(talk.stream, agent, theirs.size, same_host=local), None
            return link
        return None
    finally:
        if agent is not None:
            agent.close()


def _reaches(agent: NixlAgent, theirs: Agent, deadline: float) -> bool:
    try:
        agent.meet(theirs)
        now = time.monotonic()
        return agent.reaches(now + (deadline - now) / 2)  # a wall that swallows packets must leave time for TCP
    except TransferError as error:
        log.warning("NIXL does not reach the peer: %s", error)
        return False
