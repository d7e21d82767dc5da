"""Keys of public blocks: blocks of a text that an administrator has marked, which all tenants share (`public_blocks.py`).

Their keys say so to every process that sees one, with the 8 bytes `MARK` in the middle of a digest
(dev/formats.md):

    key_0      the root of the salt PUBLIC
    digest     SHA-256(key_i || tokens of block i || extras of block i)
    key_{i+1}  digest[:16] || MARK || digest[24:]

A chain begins with as many public blocks as are marked. What follows is its tenant's: the parent of the first block behind
them is SHA-256(last public key || the tenant's root). So a marked range ends in keys that only the tenant can compute, and the
last, partial block of a marked text is never public.
"""

from __future__ import annotations

from typing import Final

from foreword.blocks.salt import DIGEST_BYTES, PUBLIC

MARK: Final = b"\x00public\x00"
MARKED: Final = slice(16, 24)
PUBLIC_ROOT: Final = PUBLIC.digest  # in the names of public blocks


def is_public(key: bytes) -> bool:
    """Whether a key is that of a public block."""
    return key[MARKED] == MARK


def named_root(root: bytes, key: bytes) -> bytes:
    """The root in the name of a block, 16 bytes, given the root key of its chain."""
    return PUBLIC_ROOT if is_public(key) else root[:DIGEST_BYTES]
