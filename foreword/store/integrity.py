"""Frames and records authenticated with keys: a party that can write to a store, but has no key, cannot plant KV in it.

The tag of a frame is AES-256-GMAC (GCM without plaintext) over payload and header, docs/reference/formats.md. The key is
derived from the secret for each root, so a tenant's frames have a key of their own; the nonce is random.

    record = magic "FWRA", key id (4 bytes, little-endian), nonce (12), tag (16), data
"""

from __future__ import annotations

import hmac
import os
import struct
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Final

from foreword.config import ENV_PREFIX, StoreConfig
from foreword.errors import BadFrame, StoreConfigError
from foreword.store.base import BAD, FOREIGN, Name, Store, StoreStatus
from foreword.store.frame import (
    NONCE_BYTES,
    TAG_BYTES,
    UNAUTHENTICATED,
    UNKEYED,
    Frame,
    Header,
    read_key,
    set_key,
)
from foreword.store.wrappers import FormChanger

_RECORD: Final = struct.Struct(f"<4sI{NONCE_BYTES}s{TAG_BYTES}s")
_RECORD_MAGIC: Final = b"FWRA"
_ROOTS: Final = 4096


@dataclass(frozen=True, slots=True)
class IntegritySecret:
    """A secret and its number, which frames name."""

    number: int
    text: str = field(repr=False)


class KeyRing:
    """The secrets of a deployment: the first one signs, all of them verify.

    Raises StoreConfigError if the package `cryptography` is missing.
    """

    def __init__(self, secrets: Sequence[IntegritySecret]) -> None:
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ModuleNotFoundError:
            raise StoreConfigError("store.integrity_secrets need: pip install 'foreword[integrity]'") from None
        self._texts = {secret.number: secret.text.encode() for secret in secrets}
        self._signing = secrets[0].number
        self._invalid_tag = InvalidTag

        @lru_cache(_ROOTS)
        def cipher(number: int, scope: bytes) -> AESGCM:
            return AESGCM(hmac.digest(self._texts[number], b"foreword/store/" + scope, "sha256"))

        self._cipher = cipher

    @classmethod
    def of(cls, config: StoreConfig) -> KeyRing | None:
        """The configuration's keys; None if there are none. Raises StoreConfigError."""
        found = [IntegritySecret(number, text) for number, text in config.integrity_keys()]
        return cls(found) if found else None

    @classmethod
    def from_environment(cls) -> KeyRing | None:
        """The keys in FOREWORD_STORE_INTEGRITY_SECRETS, for tools and connectors without a configuration file."""
        entries = os.environ.get(ENV_PREFIX + "STORE_INTEGRITY_SECRETS", "").split(",")
        return cls.of(StoreConfig(integrity_secrets=tuple(one.strip() for one in entries if one.strip())))

    def sign(self, scope: bytes, data: Callable[[int, bytes], bytes | memoryview]) -> bytes:
        """The tag of what `data` returns for the key id and the nonce that it is given."""
        nonce = os.urandom(NONCE_BYTES)
        signed = data(self._signing, nonce)
        return self._cipher(self._signing, scope).encrypt(nonce, b"", signed)

    def knows(self, number: int) -> bool:
        return number in self._texts

    def verifies(self, number: int, scope: bytes, nonce: bytes, tag: bytes, data: bytes | memoryview) -> bool:
        """Whether the tag is that of the data under a known key."""
        if not self.knows(number):
            return False
        try:
            self._cipher(number, scope).decrypt(nonce, tag, data)
        except self._invalid_tag:
            return False
        return True


class AuthenticatedStore(FormChanger):
    """Signs what is written to `inner`, and passes on only what is signed.

    A frame whose tag is not that of its key is returned with a key id that no reader has: `frame.check` refuses it as
    `unauthenticated`, and the tier deletes it. One without a tag, or with the tag of an unknown key, is FOREIGN; the first is
    replaced when the block is put. Records without a valid tag count as missing. Records are bound to their keys.
    """

    authenticates = True

    def __init__(self, inner: Store, keys: KeyRing) -> None:
        super().__init__(inner)
        self._keys = keys
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def put(self, frames: Sequence[Frame], *, deadline: float) -> int:
        return self.put_changed([self._signed(frame) for frame in frames], deadline=deadline)

    def _signed(self, frame: Frame) -> Frame:
        """A signed copy: other tiers use the frame's memory."""
        buffer = memoryview(bytearray(frame.data))
        number = UNKEYED

        def data(key_id: int, nonce: bytes) -> memoryview:
            nonlocal number
            number = key_id
            set_key(buffer, key_id, nonce)
            return buffer[:-TAG_BYTES]

        buffer[-TAG_BYTES:] = self._keys.sign(_scope(frame.header), data)
        return Frame(replace(frame.header, key_id=number), buffer)

    def get(self, names: Sequence[Name], buffers: Sequence[memoryview], *, deadline: float) -> list[int]:
        lengths = self.inner.get(names, buffers, deadline=deadline)
        return [self._verified(*item) if item[2] > 0 else item[2] for item in zip(names, buffers, lengths, strict=True)]

    def _verified(self, name: Name, buffer: memoryview, length: int) -> int:
        """Make a signed frame one without a signature, as it was before. What `frame.check` refuses stays as it is. Returns the
        result of `get`."""
        if length > len(buffer):
            return BAD
        data = buffer[:length]
        try:
            scope, number, nonce = read_key(data)
        except BadFrame:
            return length
        if number != UNKEYED and not any(data[-TAG_BYTES:]):
            return length  # a damaged header: `frame.check` says so
        if not self._keys.knows(number):
            self._count("unauthenticated")
            if number == UNKEYED:
                self.note_replaceable(name)
            return FOREIGN
        if self._keys.verifies(number, scope, nonce, bytes(data[-TAG_BYTES:]), data[:-TAG_BYTES]):
            set_key(data, UNKEYED, bytes(NONCE_BYTES))
            data[-TAG_BYTES:] = bytes(TAG_BYTES)
        else:
            self._count("unauthenticated")
            set_key(data, UNAUTHENTICATED, bytes(NONCE_BYTES))
        return length

    def put_record(self, key: str, data: bytes, *, deadline: float) -> None:
        head = b""

        def signed(key_id: int, nonce: bytes) -> bytes:
            nonlocal head
            head = _RECORD.pack(_RECORD_MAGIC, key_id, nonce, bytes(TAG_BYTES))
            return head + key.encode() + b"\x00" + data

        tag = self._keys.sign(b"record", signed)
        self.inner.put_record(key, head[:-TAG_BYTES] + tag + data, deadline=deadline)

    def get_record(self, key: str, *, deadline: float) -> bytes | None:
        found = self.inner.get_record(key, deadline=deadline)
        if found is None:
            return None
        if len(found) >= _RECORD.size:
            magic, number, nonce, tag = _RECORD.unpack_from(found)
            data = found[_RECORD.size :]
            head = _RECORD.pack(magic, number, nonce, bytes(TAG_BYTES))
            signed = head + key.encode() + b"\x00" + data
            if magic == _RECORD_MAGIC and self._keys.verifies(number, b"record", nonce, tag, signed):
                return data
        self._count("unauthenticated_records")
        return None

    def status(self) -> StoreStatus:
        """The inner store's status, with notes of what was refused."""
        status = self.inner.status()
        with self._lock:
            notes = {key: self._counts[key] for key in ("unauthenticated", "unauthenticated_records")}
        return replace(status, notes={**status.notes, **notes})

    def _count(self, key: str) -> None:
        with self._lock:
            self._counts[key] += 1


def _scope(header: Header) -> bytes:
    return header.layout + header.root
