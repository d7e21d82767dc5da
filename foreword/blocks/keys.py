"""Block keys: chained SHA-256 hashes of tokens. The format is specified in dev/formats.md.

    key_0     = salt's digest (16 bytes) || first 16 bytes of SHA-256(scope)
    key_{i+1} = SHA-256(key_i || tokens of block i as uint32 little-endian || extras of block i)

Keys are equal in all processes, on all machines and after restarts. The block size is part of the scope. It fixes the
length of the tokens within a chain, so two different inputs never concatenate to the same bytes.

Blocks of a text that an administrator has marked are public: all tenants share them (`public_blocks.py`). Their keys say so to
every process that sees one, with the 8 bytes `MARK` in the middle of a digest:

    key_0      the root of the salt PUBLIC
    digest     SHA-256(key_i || tokens of block i || extras of block i)
    key_{i+1}  digest[:16] || MARK || digest[24:]

A chain begins with as many public blocks as are marked. What follows is its tenant's: the parent of the first block behind
them is SHA-256(last public key || the tenant's root). So a marked range ends in keys that only the tenant can compute, and the
last, partial block of a marked text is never public.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Final

from foreword.blocks.salt import DIGEST_BYTES, NO_SALT, PUBLIC, Salt
from foreword.errors import BadRequest

KEY_FORMAT = 2
KEY_BYTES = 32
# Names of blocks begin with this: the fingerprint of their layout (`layout.py`).
FINGERPRINT_BYTES = 16
MARK: Final = b"\x00public\x00"
MARKED: Final = slice(16, 24)
PUBLIC_ROOT: Final = PUBLIC.digest  # in the names of public blocks
_MAGIC = b"foreword/key\x00"
_TOKEN_BYTES = 4

if array("I").itemsize != _TOKEN_BYTES:  # pragma: no cover - no supported platform
    raise ImportError("Foreword needs a C unsigned int of 4 bytes")


@dataclass(frozen=True, slots=True)
class Scope:
    """Everything besides the tokens that determines KV: equal scopes and equal tokens mean equal KV.

    Attributes:
        model: fingerprint of the weights (of their content, not their path).
        block_size: tokens per block.
        salt: of the tenant and the client. Equal salts share blocks, others never do.
    """

    model: bytes
    block_size: int
    salt: Salt = NO_SALT

    def encode(self) -> bytes:
        """Canonical bytes: magic, format, block size, then model, tenant and the client's salt if there is one, each after its
        length (uint32 LE)."""
        head = struct.pack("<II", KEY_FORMAT, self.block_size)
        given = (self.model, *self.salt) if self.salt.client else (self.model, self.salt.tenant)
        return _MAGIC + head + b"".join(struct.pack("<I", len(part)) + part for part in given)

    def root(self) -> bytes:
        """`key_0`, the parent of a chain's first block. It begins with `Salt.digest`."""
        return self.salt.digest + sha256(self.encode()).digest()[:16]


def token_bytes(tokens: Iterable[int]) -> bytes:
    """Tokens as uint32 little-endian. Raises BadRequest for a token outside 0..2**32-1."""
    data = _array(tokens)
    if sys.byteorder == "big":  # pragma: no cover - the written format does not depend on the machine
        data = data[:]
        data.byteswap()
    return data.tobytes()


def chain_keys(parent: bytes, tokens: Iterable[int], block_size: int, extras: Sequence[bytes] = ()) -> list[bytes]:
    """Keys of the full blocks of `tokens` that follow the block (or root) with key `parent`. A partial last block has none.

    `extras[i]` is other input that changes the KV of block i, such as an adapter's name or an image's digest. b"" means none.
    """
    data, width = token_bytes(tokens), block_size * _TOKEN_BYTES
    keys: list[bytes] = []
    append = keys.append
    if not extras:
        # Hot loop: its cost is the lower bound of admission's cost.
        for start in range(0, len(data) - width + 1, width):
            parent = sha256(parent + data[start : start + width]).digest()
            append(parent)
        return keys
    for i, start in enumerate(range(0, len(data) - width + 1, width)):
        extra = extras[i] if i < len(extras) else b""
        parent = sha256(parent + data[start : start + width] + extra).digest()
        append(parent)
    return keys


def parent_behind(public: bytes, root: bytes) -> bytes:
    """The parent of a tenant's first block behind public ones, given the last of them and the tenant's root key."""
    return sha256(public + root).digest()


class TokenChain:
    """The tokens of one sequence and the keys of its full blocks.

    Keys are computed on demand (`keys_to`): appending a token is only an append to `tokens`.

    Attributes:
        root: the root key of the tenant's chains.
        public: how many of the first blocks are public (`public_blocks.py`).
    """

    __slots__ = ("_behind", "_extras", "_first", "block_size", "keys", "public", "root", "tokens")

    def __init__(self, root: bytes, block_size: int, tokens: Iterable[int] = (), extras: Sequence[bytes] = ()) -> None:
        self.root = root
        self.block_size = block_size
        self.tokens: array[int] = _array(tokens)[:]
        self._extras = extras
        self.begin([])

    def begin(self, public: Sequence[bytes], root: bytes = b"") -> None:
        """The chain begins with public blocks that have these keys, and the root key `root`."""
        self.keys, self.public, self._first = list(public), len(public), root if public else self.root
        self._behind = parent_behind(public[-1], self.root) if public else self.root

    def __len__(self) -> int:
        return len(self.tokens)

    def keys_to(self, num_blocks: int) -> list[bytes]:
        """All keys computed so far, at least those of the first `num_blocks` blocks, which must be full.

        The list is the chain's internal one: do not change it.
        """
        known = len(self.keys)
        if known < num_blocks:
            size = self.block_size
            parent = self.keys[-1] if known > self.public else self._behind
            fresh = self.tokens[known * size : num_blocks * size]
            self.keys += chain_keys(parent, fresh, size, self._extras[known:num_blocks])
        return self.keys

    def key_before(self, block: int) -> bytes:
        """The parent key of block `block`: the key of the block before it, or the root for block 0."""
        return self.keys_to(block)[block - 1] if block else self._first

    def own_before(self, block: int) -> bytes:
        """The key before a block, but behind the last public block a key that only the tenant's chains have."""
        return self._behind if block == self.public else self.key_before(block)

    def fork(self, num_tokens: int) -> TokenChain:
        """A new chain with the first `num_tokens` tokens."""
        child = TokenChain(self.root, self.block_size, self.tokens[:num_tokens], self._extras)
        full = num_tokens // self.block_size
        child.begin(self.keys[: min(self.public, full)], self._first)
        child.keys = self.keys[:full]
        return child


def _array(tokens: Iterable[int]) -> array[int]:
    if isinstance(tokens, array) and tokens.typecode == "I":
        return tokens
    if isinstance(tokens, bytes | bytearray):
        tokens = list(tokens)  # `array` would read bytes as machine-encoded integers
    try:
        return array("I", tokens)
    except (OverflowError, TypeError) as error:
        raise BadRequest(f"a token must be an integer from 0 to {2**32 - 1}: {error}", param="prompt") from None


def is_public(key: bytes) -> bool:
    """Whether a key is that of a public block."""
    return key[MARKED] == MARK


def named_root(root: bytes, key: bytes) -> bytes:
    """The root in the name of a block, 16 bytes, given the root key of its chain."""
    return PUBLIC_ROOT if is_public(key) else root[:DIGEST_BYTES]
