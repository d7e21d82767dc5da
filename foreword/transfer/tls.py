"""TLS for connections of the transfer protocol.

Certificates are not verified against authorities: both sides prove the shared secret over the server's certificate
(`handshake`), so a man in the middle, who has another certificate, is refused. A self-signed certificate will do.
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Final, cast

from foreword.certificate_files import certificate_files
from foreword.errors import ConfigError
from foreword.store_config import EncryptionConfig
from foreword.transfer.errors import PeerRejected, TransferTimeout, TransferUnavailable
from foreword.transfer.sockets import SocketStream
from foreword.transfer.wire_format import Buffer
from foreword.transfer_config import TransferConfig

_PIECE: Final = 256 << 10
# A stranger has no more than this: it grows for a peer that fills it.
_FIRST: Final = 16 << 10
_BEGIN: Final = "-----BEGIN CERTIFICATE-----"
_END: Final = "-----END CERTIFICATE-----"


class TlsSettings:
    """Makes the streams of an endpoint: encrypted if `transfer.tls` is set, except over Unix sockets.

    Raises ConfigError for files that are not a certificate and its key.
    """

    def __init__(self, config: TransferConfig) -> None:
        self._client = _client_context() if config.tls else None
        self._server: ssl.SSLContext | None = None
        self._certificate = b""
        if config.tls and config.tls_certificate_file is not None:
            self._server, self._certificate = _server_context(config.tls_certificate_file)

    @property
    def can_listen(self) -> bool:
        return self._client is None or self._server is not None

    def stream(self, sock: socket.socket, *, client: bool) -> SocketStream:
        """A stream over a connected socket; `begin` does the TLS handshake."""
        context = self._client if client else self._server
        if context is None or sock.family == socket.AF_UNIX:
            return SocketStream(sock)
        return TlsStream(sock, context, b"" if client else self._certificate)


def check_encrypted(config: TransferConfig, encryption: EncryptionConfig) -> None:
    """Raises ConfigError if KV that is encrypted in stores would be sent to other instances as it is."""
    if encryption.key_store is not None and not config.tls:
        raise ConfigError(
            "blocks are encrypted in stores (encryption.key_store): encrypt what is sent to other instances too, with "
            "transfer.tls (--transfer-tls)"
        )


def _client_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _server_context(place: str) -> tuple[ssl.SSLContext, bytes]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0
    try:
        certificate, key = certificate_files(place)
        # An encrypted key is an error; without a password OpenSSL would ask for it at the terminal.
        context.load_cert_chain(certificate, key, password="")
        text = Path(certificate).read_text(encoding="ascii")
        start = text.index(_BEGIN)
        return context, ssl.PEM_cert_to_DER_cert(text[start : text.index(_END, start) + len(_END)])
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot use transfer.tls_certificate_file {place}: certificate and key: "
            f"{getattr(error, 'strerror', None) or error}"
        ) from error


class TlsStream(SocketStream):
    """A stream that encrypts what it sends and decrypts what it receives. See `SocketStream`.

    OpenSSL's state is used under a lock, the socket is not: a thread that waits for bytes does not hinder the one that sends.

    Args:
        certificate: the server's own, in DER; b"" on the client, which learns it.
    """

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, certificate: bytes) -> None:
        super().__init__(sock)
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=bool(certificate))
        self._certificate = certificate
        self._raw = memoryview(bytearray(_FIRST))
        self._state = threading.Lock()

    def begin(self, deadline: float) -> None:
        """Do the TLS handshake. Raises PeerRejected, TransferTimeout, TransferUnavailable."""
        while not self._step():
            self._send_outgoing(deadline)
            self._wait_for_bytes(deadline)
        self._send_outgoing(deadline)
        certificate = self._certificate or self._tls.getpeercert(binary_form=True)
        if not certificate:
            raise PeerRejected("the peer has no certificate")
        self.binding = sha256(certificate).digest()

    def _step(self) -> bool:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        except ssl.SSLError as error:
            raise PeerRejected(
                f"the TLS handshake failed ({error.reason}); set transfer.tls on all instances, or on none"
            ) from error
        return True

    def _send_outgoing(self, deadline: float) -> None:
        data = self._outgoing.read()
        if data:
            self._send_until([data], len(data), deadline, 0.0, deadline)

    def _wait_for_bytes(self, deadline: float) -> None:
        while time.monotonic() < deadline:
            try:
                count = self.sock.recv_into(self._raw)
            except (BlockingIOError, InterruptedError):
                continue
            except OSError as error:
                raise self._unavailable(error) from error
            if not count:
                raise TransferUnavailable("the peer has closed the connection in the TLS handshake")
            self.greeted = True
            self._incoming.write(self._raw[:count])
            return
        raise TransferTimeout("the peer is silent, or too slow")

    def _pieces(self, buffers: Sequence[Buffer]) -> Iterator[Sequence[Buffer]]:
        """Encrypt, and yield some hundred kilobytes at a time."""
        for buffer in buffers:
            view = memoryview(buffer)
            while view:
                with self._state:
                    view = view[self._tls.write(view[:_PIECE]) :]
                    data = self._outgoing.read() if self._outgoing.pending >= _PIECE else b""
                if data:
                    yield [data]
        with self._state:
            data = self._outgoing.read()
        if data:
            yield [data]

    def _receive(self, view: memoryview) -> int:
        """Raises BlockingIOError if no whole record has arrived, so that callers check their deadlines."""
        done = self._decrypt(view)
        if not done:
            count = self.sock.recv_into(self._raw)
            if not count:
                return 0
            with self._state:
                self._incoming.write(self._raw[:count])
            if count == len(self._raw) < _PIECE:
                self._raw = memoryview(bytearray(4 * count))
            done = self._decrypt(view)
        if not done:
            raise BlockingIOError
        return done

    def _decrypt(self, view: memoryview) -> int:
        done = 0
        with self._state:
            while done < len(view):
                try:
                    done += cast(int, self._tls.read(len(view) - done, cast(bytearray, view[done:])))
                except ssl.SSLWantReadError:
                    break
        return done

    def _receive_some(self, most: int) -> bytes:
        data = bytearray(most)
        return bytes(data[: self._receive(memoryview(data))])
