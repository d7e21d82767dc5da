"""This side's end of a NIXL connection: an agent, the memory that it has registered, and reads of the peer's memory.

Each connection has an agent of its own, so what a broken peer leaves behind ends with the connection. Memory is registered
once, when the agent is made:

    offset 0             32 bytes  token: random, proves that what was read is what the peer announced
    offset 4096          what this side sends, a ring that the peer reads
    offset 4096 + ring   what this side receives, a ring into which only this side's own reads write

The receiver reads; nobody is asked to write. So no peer, whatever became of it, writes into memory here: the bytes of a part
arrive because this process has a read under way, into a slot that it gives to nobody else before that read has ended.

NIXL's own progress thread spins when it is made through its Python interface and takes a core from those who wait for it, so
there is none: whoever waits makes progress, and `pump` does while the peer reads.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import logging
import mmap
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from foreword.errors import TransferError, TransferUnavailable
from foreword.transfer.messages import Agent as Announced
from foreword.transfer.sockets import interface_of

log = logging.getLogger("foreword.transfer")

TOKEN_BYTES: Final = 32
CONTROL_BYTES: Final = 4096
_BACKEND: Final = "UCX"
_RDMA: Final = Path("/sys/class/infiniband")
_NAPS: Final = (0.0, 0.0, 0.0, 0.0, 20e-6, 50e-6, 100e-6, 200e-6, 500e-6)
_making = threading.Lock()
# A forked child shares UCX's descriptors with its parent: were an inherited agent to end there, the parent's would break.
_live: set[Any] = set()
_inherited: list[Any] = []
os.register_at_fork(after_in_child=lambda: _inherited.extend(_live))


def missing() -> str:
    """Why this process has no NIXL, in words; "" if it has."""
    if importlib.util.find_spec("nixl") is None:
        return "the package nixl is not installed; `pip install 'foreword[nixl]'` installs it"
    try:
        library = _library()
        plain = library.nixl_agent("probe", library.nixl_agent_config(enable_prog_thread=False, backends=[]))
        return "" if _BACKEND in plain.plugin_list else f"nixl has no backend {_BACKEND}"
    except Exception as error:  # noqa: BLE001 - the edge of a C++ library: whatever it raises, it cannot be used here
        return f"nixl cannot be used: {type(error).__name__}: {error}"


def _library() -> Any:
    """The package. Its logger says every call on stdout, unless NIXL_LOG_LEVEL says what is wanted."""
    with _making:
        if not _rdma_here():
            # Without RDMA devices UCX's module for them is of no use, and its copy of libnl crashes as a process exits.
            os.environ.setdefault("UCX_MODULES", "^ib")
        raising = logging.raiseExceptions
        library = importlib.import_module("nixl")
        logging.raiseExceptions = raising
        if "NIXL_LOG_LEVEL" not in os.environ:
            logging.getLogger("nixl").setLevel(logging.WARNING)
        return library


def _rdma_here() -> bool:
    with contextlib.suppress(OSError):
        return any(_RDMA.iterdir())
    return False


def nap(turn: int) -> None:
    """Wait a little before looking again for the `turn`-th time: not at all, then up to half a millisecond."""
    time.sleep(_NAPS[min(turn, len(_NAPS) - 1)])


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of the peer's outgoing ring and where they go in this side's incoming one."""

    place: int
    slot: int
    length: int


class Reading:
    """A read under way, or done."""

    __slots__ = ("began", "done", "handle")

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.began = time.monotonic()
        self.done = False

    def release(self) -> None:
        """The library's part of it, which keeps the agent alive."""
        handle, self.handle = self.handle, None
        if handle is not None:
            handle.release()


class NixlAgent:
    """See the module. Threads may call at once; calls exclude each other.

    Args:
        ring: bytes of each of the two rings.
        sock: the connection; UCX listens on its interface only, unless UCX_NET_DEVICES names others.

    Raises TransferError where the library or the memory is not there.
    """

    def __init__(self, ring: int, sock: socket.socket) -> None:
        self.size = -(-ring // mmap.PAGESIZE) * mmap.PAGESIZE
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self.name = secrets.token_hex(16)
        self._lock = threading.Lock()
        self._peer = ""
        self._theirs: Announced | None = None
        self._under_way: set[Reading] = set()
        try:
            self._memory = mmap.mmap(-1, CONTROL_BYTES + 2 * self.size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._memory[:TOKEN_BYTES] = self.token
            self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
            self._agent: Any = self._make(sock)
        except Exception as error:  # the edge of a C++ library: whatever it raises means that it cannot be used here
            raise TransferError(f"no NIXL agent: {type(error).__name__}: {error}") from error

    def _make(self, sock: socket.socket) -> Any:
        library = _library()
        with _making:
            config = library.nixl_agent_config(enable_prog_thread=False, enable_listen_thread=False, backends=[])
            agent = library.nixl_agent(self.name, config)
            agent.create_backend(_BACKEND, _parameters(sock))
            agent.register_memory([(self._base, len(self._memory), 0, "")], "DRAM", backends=[_BACKEND])
            _live.add(agent)
        return agent

    @property
    def outgoing(self) -> memoryview:
        """The ring that the peer reads."""
        return memoryview(self._memory)[CONTROL_BYTES : CONTROL_BYTES + self.size]

    @property
    def incoming(self) -> memoryview:
        """The ring that reads write to."""
        return memoryview(self._memory)[CONTROL_BYTES + self.size :]

    def announce(self) -> Announced:
        """What the peer needs to know."""
        return Announced(
            self.name, self._call(lambda agent: agent.get_agent_metadata()), self._base, self.size, self.token
        )

    def meet(self, theirs: Announced) -> None:
        """Load what the peer announced. Raises TransferError if the library does not take it."""
        if theirs.size < 1 or theirs.name == self.name:
            raise TransferError("the peer's announcement of its NIXL agent makes no sense")
        name = self._call(lambda agent: agent.add_remote_agent(theirs.metadata))
        self._peer = name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name)
        if self._peer != theirs.name:
            raise TransferError("the metadata of the peer's NIXL agent is another one's")
        self._theirs = theirs

    def reaches(self, deadline: float) -> bool:
        """Whether the peer's memory can be read: its token is there. The peer must call this too, or `pump`."""
        assert self._theirs is not None
        reading = self._read([(self._theirs.base, self._base + CONTROL_BYTES + self.size, TOKEN_BYTES)], b"")
        turn = 0
        while not self.look(reading):
            if time.monotonic() >= deadline:
                return False
            self.pump()
            nap(turn)
            turn += 1
        return secrets.compare_digest(bytes(self.incoming[:TOKEN_BYTES]), self._theirs.token)

    def read(self, spans: Iterable[Span], note: bytes) -> Reading:
        """Begin to read; when it has ended the peer gets `note`. Raises TransferUnavailable."""
        assert self._theirs is not None
        there, here = self._theirs.base + CONTROL_BYTES, self._base + CONTROL_BYTES + self.size
        return self._read([(there + span.place, here + span.slot, span.length) for span in spans], note)

    def _read(self, pieces: list[tuple[int, int, int]], note: bytes) -> Reading:
        def begin(agent: Any) -> Any:
            local = agent.get_xfer_descs([(here, length, 0) for _, here, length in pieces], "DRAM")
            remote = agent.get_xfer_descs([(there, length, 0) for there, _, length in pieces], "DRAM")
            handle = agent.initialize_xfer("READ", local, remote, self._peer, note, backends=[_BACKEND])
            return handle, agent.transfer(handle, note)

        handle, state = self._call(begin)
        reading = Reading(handle)
        self._under_way.add(reading)
        self._note(reading, state)
        return reading

    def look(self, reading: Reading) -> bool:
        """Make progress; whether the read has ended. Raises TransferUnavailable if it failed."""
        if not reading.done:
            self._note(reading, self._call(lambda agent: agent.check_xfer_state(reading.handle)))
        return reading.done

    def _note(self, reading: Reading, state: str) -> None:
        if state == "ERR":
            raise TransferUnavailable("the peer's memory cannot be read any more")
        if state == "DONE":
            reading.done = True
            self._under_way.discard(reading)
            self._call(lambda _: reading.release())

    def pump(self) -> list[bytes]:
        """Make progress for whoever reads here; returns what readers have noted. Raises TransferUnavailable."""
        notes = self._call(lambda agent: agent.get_new_notifs())
        found = notes.get(self._peer) or notes.get(self._peer.encode()) or []
        return [note if isinstance(note, bytes) else bytes(note, "latin-1") for note in found]

    def _call(self, what: Callable[[Any], Any]) -> Any:
        with self._lock:
            if self._agent is None:
                raise TransferUnavailable("the connection is closed")
            try:
                return what(self._agent)
            except Exception as error:  # noqa: BLE001 - the edge of a C++ library, whose errors are of many types
                # Without its traceback, whose frames would keep the agent alive.
                failed = f"NIXL failed: {type(error).__name__}: {error}"
            raise TransferUnavailable(failed)

    def close(self) -> None:
        """End the agent, and with it everything that is under way; only then may its memory go. May be called twice."""
        with self._lock:
            agent, self._agent = self._agent, None
            if agent is None:
                return
            while self._under_way:
                with contextlib.suppress(Exception):  # what cannot be called off ends with the agent
                    self._under_way.pop().release()
            if self._peer:
                with contextlib.suppress(Exception):  # a peer that is gone cannot be left
                    agent.remove_remote_agent(self._peer)
            _live.discard(agent)
            del agent  # the last reference: the agent ends here, on this thread


def _parameters(sock: socket.socket) -> dict[str, str]:
    """Of the UCX backend. Its environment variables (UCX_TLS, UCX_NET_DEVICES) hold; without them it listens where the
    connection goes through and, between hosts that have RDMA devices, at all of those."""
    name = interface_of(sock)
    if "UCX_NET_DEVICES" in os.environ or not name or (name != "lo" and _rdma_here()):
        return {}
    return {"engine_config": f"NET_DEVICES={name}"}
