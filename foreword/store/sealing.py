"""Seals of frames and records: encrypted with the data key of their tenant, or signed with a secret of the deployment.

Encrypted (AES-256-GCM), a copy of a store tells nothing but names and lengths, and nothing at all once the tenant's data key is
destroyed. Signed (AES-256-GMAC), it can be read, but a party without the secret cannot plant KV in it. Both are in the same
place of a frame (dev/formats.md). Keys are derived for each root, so a tenant's frames have keys of their own.

    signed record    = magic "FWRA", key id (4 bytes, little-endian), nonce (12), tag (16), data
    encrypted record = magic "FWRE", key id (4), nonce (12), encrypted data, tag (16)

Nonces are random, 96 bits. An encrypted frame's key is one of 64 of its data key, layout and root, chosen by the block's key.
With n frames under one of them, two have the same nonce with a probability below n² / 2^97: 2^-33 for 2^32 frames, which are
2^38 frames of one tenant in one layout, 16 PiB in blocks of 64 KiB. `foreword keys rotate` begins anew.
"""

from __future__ import annotations

import hmac
import os
import struct
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from foreword.blocks.layout import PREFIX_BYTES, tenant_of
from foreword.blocks.salt import TENANT_BYTES
from foreword.errors import BadFrame, StoreConfigError, StoreReadOnly, StoreWithoutKeys
from foreword.store.base import BAD, FAILED, FOREIGN, Name, Store, record_tenant, time_left
from foreword.store.data_keys import SHARED, DataKey, DataKeys, check_apart, check_exists, data_keys_of
from foreword.store.frame import (
    ENCRYPTED,
    HEADER_BYTES,
    MAGIC,
    NONCE_BYTES,
    TAG_BYTES,
    UNAUTHENTICATED,
    UNKEYED,
    Frame,
    check,
    set_key,
)
from foreword.store.key_interfaces import Encryption, StoreKeys
from foreword.store.wrappers import FormChanger
from foreword.store_config import EncryptionConfig, StoreConfig

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

_RECORD: Final = struct.Struct(f"<4sI{NONCE_BYTES}s")
_SIGNED, _ENCRYPTED = b"FWRA", b"FWRE"
_NO_TAG: Final = bytes(TAG_BYTES)
# A header: what says how it is sealed; what an encryption leaves in the clear, and the rest; the same with the seal removed.
_SEAL: Final = struct.Struct(f"<4s4x{PREFIX_BYTES}s88xI{NONCE_BYTES}s32x{TAG_BYTES}s")
_SPLIT: Final = struct.Struct("160s32s")
_PLAIN: Final = struct.Struct("128s32x16s16x")
_ROOTS: Final = 4096
_CHECKSUM_BYTES: Final = 16
_CLEAR: Final = HEADER_BYTES - _CHECKSUM_BYTES - TAG_BYTES  # bytes of the header before its checksum
_PARTS: Final = 64
# Frames and records that were refused.
_NOTES: Final = (
    "unauthenticated",
    "unauthenticated_records",
    "unknown_key",
    "without_key",
)


@dataclass(frozen=True, slots=True)
class IntegritySecret:
    """A secret and its number, which frames name."""

    number: int
    text: str = field(repr=False)


class KeyRing(StoreKeys):
    """See `StoreKeys`.

    Args:
        read_plain: what is not sealed is read too.

    Raises StoreConfigError if the package `cryptography` is missing.
    """

    def __init__(
        self, secrets: Sequence[IntegritySecret] = (), data: DataKeys | None = None, *, read_plain: bool = False
    ) -> None:
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ModuleNotFoundError:
            raise StoreConfigError("keys of stores need: pip install 'foreword[integrity]'") from None
        self.data: DataKeys | None = data
        self.read_plain = read_plain
        self.invalid_tag = InvalidTag
        self._texts = {secret.number: secret.text.encode() for secret in secrets}
        self._signing = next(iter(self._texts), UNKEYED)

        @lru_cache(_ROOTS)
        def cipher(number: int, scope: bytes) -> AESGCM:
            return AESGCM(hmac.digest(self._texts[number], b"foreword/store/" + scope, "sha256"))

        self._cipher = cipher

    @classmethod
    def of(cls, config: StoreConfig, encryption: EncryptionConfig | None = None) -> KeyRing | None:
        """The configuration's keys; None if there are none. Raises ConfigError, StoreError."""
        found = [IntegritySecret(number, text) for number, text in config.integrity_keys()]
        data = None if encryption is None else data_keys_of(encryption)
        plain = encryption is not None and encryption.read_plain
        return cls(found, data, read_plain=plain) if found or data is not None else None

    def sealed(self, store: Store) -> Store:
        return SealedStore(store, self)

    def signing(self, scope: bytes) -> tuple[int, AESGCM]:
        return self._signing, self._cipher(self._signing, scope)

    def verifying(self, number: int, scope: bytes) -> AESGCM | None:
        return self._cipher(number, scope) if number in self._texts else None

    def opening(self, tenant: bytes, number: int, deadline: float) -> DataKey | None:
        """A data key, None if it is not known (any more), or not by the deadline."""
        return None if self.data is None else self.data.opening(tenant, number, deadline)

    def ended(self, tenant: bytes, number: int, deadline: float) -> bool:
        return self.data is not None and self.data.ended(tenant, number, deadline)


class SealedStore(FormChanger):
    """Seals what is written to `inner`, and passes on only what is sealed, as it was before.

    A frame whose tag is not that of its key is returned with a key id that no reader has: `frame.check` refuses it as
    `unauthenticated`, and the tier deletes it. One without a tag, or with the tag of an unknown or destroyed key, is FOREIGN;
    the first is replaced when the block is put, and so is one whose data key is known to have ended. What belongs to a tenant
    whose data keys were destroyed is not written. Records that are not sealed count as missing. They are bound to their keys.
    """

    authenticates = True

    def __init__(self, inner: Store, keys: KeyRing) -> None:
        super().__init__(inner, _NOTES)
        self._keys = keys

    # Frames

    def put(self, frames: Sequence[Frame], *, deadline: float) -> int:
        data = self._keys.data
        if data is None:
            return self.put_changed([self._signed(frame) for frame in frames], deadline=deadline)
        found = [(frame, data.sealing(tenant_of(frame.name), deadline)) for frame in frames]
        sealed = [_encrypted(frame, key) for frame, key in found if key is not None]
        if not sealed:
            time_left(deadline)
        self.count(without_key=len(found) - len(sealed))
        if not (sealed or data.answers):
            raise StoreWithoutKeys("the key store does not answer")
        return self.put_changed(sealed, deadline=deadline) if sealed else 0

    def _signed(self, frame: Frame) -> Frame:
        """A signed copy: other tiers use the frame's memory."""
        buffer = memoryview(bytearray(frame.data))
        number, cipher = self._keys.signing(frame.header.layout + frame.header.root)
        nonce = os.urandom(NONCE_BYTES)
        set_key(buffer, number, nonce)
        buffer[-TAG_BYTES:] = cipher.encrypt(nonce, b"", buffer[:-TAG_BYTES])
        return Frame(replace(frame.header, key_id=number, nonce=nonce), buffer)

    def get(self, names: Sequence[Name], buffers: Sequence[memoryview], *, deadline: float) -> list[int]:
        lengths = self.inner.get(names, buffers, deadline=deadline)
        read = zip(names, buffers, lengths, strict=True)
        return [self._opened(name, buffer, length, deadline) if length > 0 else length for name, buffer, length in read]

    def _opened(self, name: Name, buffer: memoryview, length: int, deadline: float) -> int:
        """Make a sealed frame one without a seal, as it was before. What `frame.check` refuses stays as it is. Returns the
        result of `get`."""
        if length > len(buffer):
            return BAD
        if length < HEADER_BYTES:
            return length
        data = buffer[:length]
        magic, scope, number, nonce, tag = _SEAL.unpack_from(data, length - HEADER_BYTES)
        if magic != MAGIC or scope != name[:PREFIX_BYTES] or (number != UNKEYED and tag == _NO_TAG):
            return length  # a damaged header: `frame.check` says so
        if number == UNKEYED:
            return self._plain(name, data)
        if number & ENCRYPTED:
            key = self._keys.opening(tenant_of(name), number, deadline)
            sound = None if key is None else self._decrypted(name, data, key, nonce)
            if key is None and self._keys.ended(tenant_of(name), number, deadline):
                self.note_replaceable(name)
        else:
            cipher = self._keys.verifying(number, scope)
            sound = None if cipher is None else self._verified(data, cipher, nonce, tag)
        if sound is None and time.monotonic() >= deadline:
            return FAILED
        if sound is None:
            self.count(unknown_key=1)
            return FOREIGN
        if not sound:
            self.count(unauthenticated=1)
            set_key(data, UNAUTHENTICATED, bytes(NONCE_BYTES))
        return length

    def _plain(self, name: Name, data: memoryview) -> int:
        """The result of `get` for a frame that is not sealed. Its checksum is compared here, as the caller will not."""
        if not self._keys.read_plain:
            self.count(unauthenticated=1)
            self.note_replaceable(name)
            return FOREIGN
        try:
            check(data, name)
        except BadFrame as error:
            return BAD if error.reason == "checksum" else len(data)
        return len(data)

    def _verified(self, data: memoryview, cipher: AESGCM, nonce: bytes, tag: bytes) -> bool:
        try:
            cipher.decrypt(nonce, tag, data[:-TAG_BYTES])
        except self._keys.invalid_tag:
            return False
        set_key(data, UNKEYED, bytes(NONCE_BYTES))
        data[-TAG_BYTES:] = _NO_TAG
        return True

    def _decrypted(self, name: Name, data: memoryview, key: DataKey, nonce: bytes) -> bool:
        """Decrypt a frame in place. The encrypted checksum and the tag are moved behind the payload for that."""
        end = len(data) - HEADER_BYTES
        checksum = end + _CHECKSUM_BYTES
        head, sealed = _SPLIT.unpack_from(data, end)
        data[end : checksum + TAG_BYTES] = sealed
        try:
            key.cipher(_part(name)).decrypt_into(nonce, data[: checksum + TAG_BYTES], head, data[:checksum])
        except self._keys.invalid_tag:
            data[end : end + _CLEAR] = head
            return False
        _PLAIN.pack_into(data, end, head, bytes(data[end:checksum]))
        return True

    # Records

    def put_record(self, key: str, data: bytes, *, deadline: float) -> None:
        """Store a record. Raises StoreReadOnly for a record of a tenant whose data keys were destroyed, and StoreTimeout if
        they were not found by the deadline."""
        nonce = os.urandom(NONCE_BYTES)
        if self._keys.data is None:
            number, cipher = self._keys.signing(b"record")
            head = _RECORD.pack(_SIGNED, number, nonce)
            sealed = cipher.encrypt(nonce, b"", _signed_record(head, key, data)) + data
        else:
            data_key = self._keys.data.sealing(_owner(key), deadline)
            if data_key is None:
                time_left(deadline)
                raise StoreReadOnly("the record has no data key: those of its tenant were destroyed, or cannot be read")
            head = _RECORD.pack(_ENCRYPTED, data_key.id, nonce)
            sealed = data_key.cipher(b"record").encrypt(nonce, bytes(data), head + key.encode())
        self.inner.put_record(key, head + sealed, deadline=deadline)

    def get_record(self, key: str, *, deadline: float) -> bytes | None:
        found = self.inner.get_record(key, deadline=deadline)
        if found is None:
            return None
        try:
            data = self._opened_record(key, bytes(found), deadline)
        except self._keys.invalid_tag:
            data = None
        if data is None:
            self.count(unauthenticated_records=1)
        return data

    def _opened_record(self, key: str, found: bytes, deadline: float) -> bytes | None:
        """The content of a record; None for one that is not sealed with a known key. Raises InvalidTag."""
        magic = found[:4]
        if magic not in (_SIGNED, _ENCRYPTED):
            return found if self._keys.read_plain else None
        if len(found) < _RECORD.size + TAG_BYTES:
            return None
        _, number, nonce = _RECORD.unpack_from(found)
        head, rest = found[: _RECORD.size], found[_RECORD.size :]
        if magic == _ENCRYPTED:
            data_key = self._keys.opening(_owner(key), number, deadline)
            if data_key is None:
                time_left(deadline)
                return None
            return data_key.cipher(b"record").decrypt(nonce, rest, head + key.encode())
        cipher = self._keys.verifying(number, b"record")
        if cipher is None:
            return None
        tag, data = rest[:TAG_BYTES], rest[TAG_BYTES:]
        cipher.decrypt(nonce, tag, _signed_record(head, key, data))
        return data


def _encrypted(frame: Frame, key: DataKey) -> Frame:
    """An encrypted copy: payload and checksum, with all before the checksum as associated data."""
    end = len(frame.data) - HEADER_BYTES
    checksum = end + _CHECKSUM_BYTES
    buffer = memoryview(bytearray(frame.data))
    nonce = os.urandom(NONCE_BYTES)
    set_key(buffer, key.id, nonce)
    head, plain = _SPLIT.unpack_from(buffer, end)
    buffer[end:checksum] = plain[:_CHECKSUM_BYTES]
    key.cipher(_part(frame.name)).encrypt_into(nonce, buffer[:checksum], head, buffer[: checksum + TAG_BYTES])
    _SPLIT.pack_into(buffer, end, head, bytes(buffer[end : checksum + TAG_BYTES]))
    return Frame(replace(frame.header, key_id=key.id, nonce=nonce), buffer)


def _part(name: Name) -> bytes:
    """The input from which an encrypted frame's key is derived, besides the data key."""
    return b"frame" + name[:PREFIX_BYTES] + bytes([name[PREFIX_BYTES] % _PARTS])


def _signed_record(head: bytes, key: str, data: bytes) -> bytes:
    return head + bytes(TAG_BYTES) + key.encode() + b"\x00" + data


def _owner(key: str) -> bytes:
    """The tenant of a record, as in the names of its blocks; `SHARED` if it belongs to none."""
    return bytes.fromhex(record_tenant(key))[:TENANT_BYTES] or SHARED


class InstalledEncryption(Encryption):
    """The keys of this package."""

    def keys_of(self, config: StoreConfig, encryption: EncryptionConfig | None) -> KeyRing | None:
        return KeyRing.of(config, encryption)

    def shared(self, config: EncryptionConfig) -> DataKeys:
        found = data_keys_of(config)
        assert found is not None, "it has a key store"
        return found

    def open(self, config: EncryptionConfig) -> DataKeys:
        return DataKeys(config)

    def check_apart(self, config: EncryptionConfig, urls: Iterable[str]) -> None:
        check_apart(config, urls)

    def check_exists(self, config: EncryptionConfig) -> None:
        check_exists(config)


ENCRYPTION: Final = InstalledEncryption()
