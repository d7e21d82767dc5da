"""Records of which namespace's encoder outputs a server uses."""

from __future__ import annotations

from hashlib import sha256
from typing import Final

import msgspec

from foreword.store.shared_records import RecordKind


class EncoderRecord(msgspec.Struct, frozen=True):
    """The namespace whose encoder outputs are used by the servers of the namespace after which the record is named. `model`:
    hexadecimal."""

    model: str

    def __post_init__(self) -> None:
        if len(bytes.fromhex(self.model)) != sha256().digest_size:
            raise ValueError("model")


ENCODERS: Final = RecordKind("encoders", EncoderRecord)
