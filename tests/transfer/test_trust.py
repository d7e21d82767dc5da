"""Secrets of transfers: several while they are changed, secrets with fewer rights, and the certificate under TLS."""

import datetime
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from actors import LAYOUT, PATIENCE, Decode, FrameService, Prefill, config, keys_of, until
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from foreword.blocks.layout import NAME_BYTES
from foreword.config_layers import build
from foreword.errors import ConfigError
from foreword.transfer.errors import PeerRejected, TransferError, TransferRefused
from foreword.transfer.protocol import TransferOutcome
from foreword.transfer.transfer_endpoint import TransferEndpoint
from foreword.transfer.transfers import KVDestination, TransferService
from foreword.transfer.wire_format import Reason
from foreword.transfer_config import TransferConfig

OLD, NEW, READER = "the old secret of the tests", "the new secret of the tests", "a secret only for reading"


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def endpoint(stack: ExitStack, service: TransferService | None = None, **settings: object) -> TransferEndpoint:
    one = TransferEndpoint(config(**settings), service or TransferService(LAYOUT))
    stack.callback(one.close)
    return one


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ((OLD,), (NEW, OLD)),
        ((NEW, OLD), (OLD,)),
        ((NEW, OLD), (NEW,)),
        ((OLD, NEW), (NEW, OLD)),
    ],
)
def test_a_secret_is_changed_while_instances_run(
    stack: ExitStack, theirs: tuple[str, ...], ours: tuple[str, ...]
) -> None:
    """An instance with the new and the old secret and one with either of them connect, in both directions."""
    for server, client in ((theirs, ours), (ours, theirs)):
        listening = endpoint(stack, secret="\n".join(server))
        assert endpoint(stack, secret="\n".join(client)).connect(listening.listen()).alive


def test_a_removed_secret_is_refused(stack: ExitStack) -> None:
    """When the old secret is removed everywhere, a peer that has only the old one is refused."""
    listening = endpoint(stack, secret=NEW)
    with pytest.raises(PeerRejected, match=r"transfer\.secret"):
        endpoint(stack, secret=OLD).connect(listening.listen())


def test_a_file_of_secrets(tmp_path: Path) -> None:
    """A file has one secret per line: the current one, previous ones, and those with fewer rights. Without a full one, and with
    an empty one, it is an error."""
    path = tmp_path / "secrets"
    path.write_text(f"{NEW}\n\nget={READER}\n{OLD}\n")
    found = build(TransferConfig, "transfer", {"secret_file": str(path)}).shared_secrets()
    assert [(one.text, one.rights == {"get"}) for one in found] == [(NEW, False), (OLD, False), (READER, True)]
    for wrong in ("", "\n \n", f"get={READER}\n", f"{NEW}\nshort\n"):
        path.write_text(wrong)
        with pytest.raises(ConfigError, match="secret") as raised:
            build(TransferConfig, "transfer", {"secret_file": str(path)})
        assert "short" not in raised.value.message and READER not in raised.value.message


@pytest.mark.parametrize(
    "wrong",
    [
        {"secret": f"{NEW}\nget=short"},
        {"secret": f"{NEW}\ndance={READER}"},
        {"secret": f"{NEW}\npull+push+get={READER}"},
        {"secret": f"{NEW}\nshort"},
        {"secret": f"get={READER}"},
        {"secret": ""},
        {"secret": " \n"},
        {"tls": True},
    ],
)
def test_wrong_settings_of_secrets(wrong: dict[str, object]) -> None:
    """A short secret, unknown rights, and settings that need a secret where there is none are errors that repeat no secret."""
    with pytest.raises(ConfigError, match="secret") as raised:
        config(**wrong)
    assert READER not in raised.value.message


def test_rights_of_a_secret(stack: ExitStack) -> None:
    """A peer whose secret only allows to read may read, and may neither have prompts computed nor hand requests over."""
    kept = {bytes([1]) * NAME_BYTES: b"a frame"}
    listening = endpoint(stack, FrameService(kept), secret=f"{NEW}\nget={READER}\npull={OLD}")
    address = listening.listen()
    reader = endpoint(stack, Decode(), secret=READER).connect(address)
    buffer = memoryview(bytearray(100))
    assert reader.get(list(kept), [buffer], deadline=time.monotonic() + PATIENCE) == [7]
    for begun in (reader.pull(b"1 16"), reader.push(b"1 16", keys_of(1, 16), 16)):
        assert begun.wait(PATIENCE) is TransferOutcome.NOT_TAKEN
        assert begun.reason is Reason.ROLE and "right to pu" in begun.message
    puller = endpoint(stack, secret=OLD).connect(address)
    with pytest.raises(TransferRefused, match="right to get"):
        puller.get(list(kept), [buffer], deadline=time.monotonic() + PATIENCE)
    assert listening.status().counts["rights_refused"] == 3


def test_a_limited_peer_cannot_claim_an_address(stack: ExitStack) -> None:
    """A message for an instance is not sent over the connection of a limited peer that says it is that instance."""
    real = endpoint(stack, secret=NEW)
    address = real.listen()
    listening = endpoint(stack, secret=f"{NEW}\nget={READER}")
    liar = endpoint(stack, secret=READER, advertise=address)
    liar.listen()
    liar.connect(listening.listen())
    assert listening.connect(address).peer.instance == real.instance


# TLS


def make_certificate(folder: Path, name: str) -> dict[str, str]:
    """A self-signed certificate and its key in a folder; returns the setting that names it."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    start = datetime.datetime(2020, 1, 1)
    builder = x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number(), start)
    certificate = builder.not_valid_after(start + datetime.timedelta(days=1)).sign(key, hashes.SHA256())
    (folder / name).mkdir()
    (folder / name / "tls.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    (folder / name / "tls.key").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return {"tls_certificate_file": str(folder / name)}


class Recording:
    """A wire between two endpoints that keeps a copy of all bytes."""

    def __init__(self, stack: ExitStack, target: str) -> None:
        host, _, port = target.rpartition(":")
        self.target = (host, int(port))
        self.seen = bytearray()
        self.listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self.run, daemon=True).start()

    def run(self) -> None:
        here, _ = self.listener.accept()
        there = socket.create_connection(self.target)
        for source, sink in ((here, there), (there, here)):
            threading.Thread(target=self.copy, args=(source, sink), daemon=True).start()

    def copy(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                self.seen += data
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            return


def test_transfers_over_tls(stack: ExitStack, tmp_path: Path) -> None:
    """Pulls and reads work over TLS in both directions at once, and neither KV nor messages can be seen on the wire."""
    tls = {"secret": NEW, "tls": True, "links": ("tcp",)}
    frame = b"a recognisable frame" * 100_000
    kept = {bytes([1]) * NAME_BYTES: frame}
    serving = Prefill()
    frames = FrameService(kept)
    serving.locate, serving.get = frames.locate, frames.get  # type: ignore[method-assign]
    listening = endpoint(stack, serving, **tls, ring="8MiB", **make_certificate(tmp_path, "here"))
    wire = Recording(stack, listening.listen())
    decode = Decode()
    connection = endpoint(stack, decode, **tls, ring="8MiB").connect(wire.address)
    buffer = memoryview(bytearray(len(frame)))
    wanted: list[KVDestination] = [
        connection.pull(f"{seed} 600".encode(), keys_of(seed, 600), context=decode.hold(600)) for seed in range(3)
    ]
    assert connection.get(list(kept), [buffer], deadline=time.monotonic() + PATIENCE) == [len(frame)]
    assert buffer == frame
    assert [one.wait(PATIENCE) for one in wanted] == [TransferOutcome.TAKEN] * 3
    decode.check()
    assert len(wire.seen) > len(frame)
    assert b"recognisable" not in wire.seen and not wire.seen.startswith(b"FWT")


def test_a_man_in_the_middle(stack: ExitStack, tmp_path: Path) -> None:
    """A proxy that ends TLS with a certificate of its own and passes the handshake on is refused by both sides."""
    theirs, others = make_certificate(tmp_path, "theirs"), make_certificate(tmp_path, "others")
    listening = endpoint(stack, secret=NEW, tls=True, **theirs)
    host, _, port = listening.listen().rpartition(":")
    front = TransferEndpoint(config(secret=OLD, tls=True, **others), TransferService())
    server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

    def relay() -> None:
        near = front._tls.stream(_ready(server.accept()[0]), client=False)
        far = front._tls.stream(_ready(socket.create_connection((host, int(port)))), client=True)
        deadline = time.monotonic() + PATIENCE
        near.begin(deadline)
        far.begin(deadline)
        far.write(near.read(44, deadline), deadline)
        near.write(far.read(44, deadline), deadline)
        far.write(near.read(32, deadline), deadline)
        near.write(far.read(1, deadline), deadline)
        near.close()
        far.close()

    thread = threading.Thread(target=relay)
    thread.start()
    with pytest.raises(PeerRejected, match="another shared secret"):
        endpoint(stack, secret=NEW, tls=True).connect(f"127.0.0.1:{server.getsockname()[1]}")
    thread.join(PATIENCE)
    front.close()
    until(lambda: listening.status().counts.get("peers_rejected") == 1)


def _ready(sock: socket.socket) -> socket.socket:
    from foreword.transfer.sockets import tune

    return tune(sock)


def test_tls_on_one_side_only(stack: ExitStack, tmp_path: Path) -> None:
    """An instance with TLS and one without refuse each other."""
    with_tls = {"tls": True, **make_certificate(tmp_path, "one")}
    for server, client in (({}, with_tls), (with_tls, {})):
        listening = endpoint(stack, secret=NEW, **server)
        with pytest.raises(TransferError):
            endpoint(stack, secret=NEW, **client).connect(listening.listen())
        until(lambda listening=listening: listening.status().counts.get("peers_rejected") == 1)  # type: ignore[misc]


def test_a_drip_in_the_tls_handshake(stack: ExitStack, tmp_path: Path) -> None:
    """The deadline of a greeting includes the TLS handshake, also if bytes keep coming."""
    listening = endpoint(stack, secret=NEW, tls=True, connect_timeout=0.5, **make_certificate(tmp_path, "one"))
    host, _, port = listening.listen().rpartition(":")
    with socket.create_connection((host, int(port))) as stranger:
        record, sent = b"\x16\x03\x01\x01\x00" + os.urandom(100), 0
        try:
            for byte in record:
                stranger.send(bytes([byte]))
                sent += 1
                time.sleep(0.1)
        except ConnectionError:
            pass
        assert sent < len(record)


def test_certificates_that_cannot_be_used(tmp_path: Path) -> None:
    """A missing file, a key of another certificate, and no certificate where one is needed are errors at the start."""
    one, other = make_certificate(tmp_path, "one"), make_certificate(tmp_path, "other")
    key, mixed = Path(one["tls_certificate_file"], "tls.key"), tmp_path / "mixed"
    mixed.mkdir()
    (mixed / "tls.crt").write_bytes(Path(other["tls_certificate_file"], "tls.crt").read_bytes())
    (mixed / "tls.key").write_bytes(key.read_bytes())
    for wrong in (tmp_path / "none", mixed, key, tmp_path):
        with pytest.raises(ConfigError, match="tls_certificate_file"):
            TransferEndpoint(config(secret=NEW, tls=True, tls_certificate_file=str(wrong)), TransferService())
    without = TransferEndpoint(config(secret=NEW, tls=True), TransferService())
    with pytest.raises(ConfigError, match="tls_certificate_file"):
        without.listen()
    without.close()
