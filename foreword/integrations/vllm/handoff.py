"""What two instances of vLLM tell each other about a prompt that one has computed, in `kv_transfer_params`.

    {"do_remote_prefill": true, "foreword": {"lease": ..., "addresses": [...], "tokens": 4096, ...}}

It passes through clients and proxies, so it is checked as any input, and where there is a secret it carries a proof that
somebody who has the secret wrote it: nobody else can send this instance to an address of his choice.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from foreword.errors import TransferRefused
from foreword.integrations.vllm.step_messages import Lender

_VERSION = 1
_LEASE_BYTES = 16


class Handoff(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A prompt's computed blocks, whole ones, and where they are kept for a while.

    Attributes:
        lease: its name at the lender, in hexadecimal digits, as all bytes here.
        addresses: of each rank.
        tokens: from the prompt's first on, a multiple of the block size.
        layouts: fingerprint of each rank's layout.
        last: key of the last block, which says that it is the same prompt.
    """

    version: int
    lease: str
    addresses: tuple[str, ...]
    tokens: int
    block_size: int
    layouts: tuple[str, ...]
    last: str
    proof: str = ""


@dataclass(frozen=True, slots=True)
class Terms:
    """What this instance's blocks look like, and the secret that it shares with others."""

    block_size: int
    layouts: tuple[bytes, ...]
    secret: str = field(repr=False)

    def write(self, lease: bytes, addresses: Sequence[str], tokens: int, last: bytes) -> dict[str, Any]:
        """Values for `kv_transfer_params["foreword"]`."""
        layouts = tuple(one.hex() for one in self.layouts)
        said = Handoff(_VERSION, lease.hex(), tuple(addresses), tokens, self.block_size, layouts, last.hex())
        found: dict[str, Any] = json.loads(msgspec.json.encode(said))
        return {**found, "proof": _proof(said, self.secret)}

    def read(self, params: dict[str, Any]) -> Handoff:
        """What another instance wrote. Raises TransferRefused with a sentence that says why its blocks are of no use here."""
        if "foreword" not in params:
            raise TransferRefused("the prefill instance did not say where its blocks are: it runs another KV connector")
        try:
            said = msgspec.convert(params["foreword"], Handoff)
            lease, last = bytes.fromhex(said.lease), bytes.fromhex(said.last)
        except (msgspec.ValidationError, ValueError) as error:
            raise TransferRefused(f"kv_transfer_params are not understood: {error}") from None
        if not hmac.compare_digest(said.proof.encode(), _proof(said, self.secret).encode()):
            raise TransferRefused(
                "kv_transfer_params were written with another secret; give both the same transfer.secret_env"
            )
        if said.version != _VERSION or len(lease) != _LEASE_BYTES or len(last) != 32:
            raise TransferRefused(f"kv_transfer_params are of version {said.version}, this instance's of {_VERSION}")
        if said.block_size != self.block_size:
            raise TransferRefused(
                f"the block size is {said.block_size} there and {self.block_size} here; start both with the same --block-size"
            )
        if len(said.addresses) != len(self.layouts) or len(said.layouts) != len(self.layouts):
            raise TransferRefused(
                f"there are {len(said.layouts)} ranks there and {len(self.layouts)} here; start both with the same "
                "--tensor-parallel-size"
            )
        if said.layouts != tuple(one.hex() for one in self.layouts):
            raise TransferRefused(
                "the blocks are laid out in another way there, or are of another model (weights, dtype, vLLM)"
            )
        return said


def lender_of(said: Handoff) -> Lender:
    return Lender(bytes.fromhex(said.lease), said.addresses)


def _proof(said: Handoff, secret: str) -> str:
    plain = msgspec.structs.replace(said, proof="")
    return hmac.digest(secret.encode(), b"foreword/vllm/handoff" + msgspec.json.encode(plain), "sha256").hex()
