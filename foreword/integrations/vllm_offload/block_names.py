"""Names of the blocks of vLLM's own offloading.

vLLM's key of a block is its hash, which covers the tokens, the salt, and the names that clients give to media, and the number
of its group. A name in the stores covers more: whose KV it is (`offload_identity.py`), the content of media, and the version of
the weights. The tenant is in it as in all names, so that quotas and erasures find the blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from foreword.blocks.keys import Scope
from foreword.blocks.layout import ROOT_BYTES, Layout, chain_prefix
from foreword.blocks.salt import Salt
from foreword.store.base import Name
from foreword.store.frame import RAW, Header

_GROUP_BYTES = 4  # at the end of vLLM's key, big-endian
_STRETCH = 256  # blocks that are looked up together


@dataclass(frozen=True, slots=True)
class BlockGroup:
    """A KV cache group of vLLM's offloading.

    Attributes:
        chunk: tokens of a block.
        hashed: tokens of one of vLLM's block hashes, a divisor of `chunk`.
    """

    layout: Layout
    chunk: int
    hashed: int


@dataclass(slots=True, eq=False)
class RequestBlocks:
    """The blocks of one request.

    Attributes:
        request: vLLM's; its `block_hashes` grow while it runs.
        salt: of the tenant and the client, in its generation.
        inputs: by chunk of `inputs_tokens` tokens, what is known of the media in it (`RequestIdentity`).
        version: of the weights (`WeightsVersion.salt`).
        found: by vLLM's key, whether the stores have the block; None while a lookup runs.
        missed: groups in which a block was missing.
    """

    groups: Mapping[int, BlockGroup]
    request: Any
    salt: Salt
    inputs: Sequence[bytes]
    inputs_tokens: int
    version: bytes
    found: dict[bytes, bool | None] = field(default_factory=dict)
    missed: set[int] = field(default_factory=set)
    _roots: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)

    def begin(self, version: bytes) -> None:
        """From now on the blocks are of another version of the weights."""
        self.version, self.found = version, {}  # a lookup that runs has the former dictionary

    def _root(self, number: int) -> tuple[bytes, bytes]:
        """The root key of the request's chains in a group, and the fingerprint of the group's layout, both made once."""
        if number not in self._roots:
            group = self.groups[number]
            root = Scope(group.layout.model, group.hashed, self.salt).root()
            self._roots[number] = root, group.layout.fingerprint
        return self._roots[number]

    def _key(self, root: bytes, key: bytes, end: int) -> bytes:
        """The stores' key of the block with vLLM's `key`, which ends at token `end`."""
        inputs = self.inputs[: -(-end // self.inputs_tokens)]
        last = max((number for number, one in enumerate(inputs, 1) if one), default=0)  # media behind it change nothing
        digest = sha256(b"foreword/vllm-offload\x00" + root)
        for part in (self.version, key, *inputs[:last]):
            digest.update(len(part).to_bytes(4, "little") + part)
        return digest.digest()

    def name(self, key: bytes, end: int) -> Name:
        """The name of the block with vLLM's `key`, which ends at token `end`."""
        root, layout = self._root(group_of(key))
        return chain_prefix(layout, root) + self._key(root, key, end)

    def header(self, key: bytes, end: int) -> Header:
        """The header of the block's frame."""
        group, (root, layout) = self.groups[group_of(key)], self._root(group_of(key))
        length = group.layout.block_bytes
        before = max(end - 1, 0) // group.chunk * group.chunk
        parent = root if not before else self._key(root, self._key_at(group_of(key), before), before)
        own = self._key(root, key, end)
        facts = root[:ROOT_BYTES], own, parent, before // group.chunk, RAW, length, length, group_of(key)
        return Header(layout, *facts)

    def _key_at(self, group: int, end: int) -> bytes:
        """vLLM's key of the block that ends at token `end`."""
        return bytes(self.request.block_hashes[end // self.groups[group].hashed - 1]) + group.to_bytes(
            _GROUP_BYTES, "big"
        )

    def together(self, key: bytes, end: int) -> dict[bytes, int]:
        """The block, and those near it in its group that are probably asked for next, each with its end."""
        number = group_of(key)
        group, known = self.groups[number], len(self.request.block_hashes) * self.groups[number].hashed
        first = max(end - 1, 0) // group.chunk // _STRETCH * _STRETCH
        ends = [(block + 1) * group.chunk for block in range(first, first + _STRETCH)]
        return {key: end} | {self._key_at(number, one): one for one in ends if one <= known}


def group_of(key: bytes) -> int:
    """The number of the group in vLLM's key."""
    return int.from_bytes(key[-_GROUP_BYTES:], "big")
