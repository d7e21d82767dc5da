"""The layout of a block's KV bytes: layers, heads, dimensions, dtype, block size, order, shard, loss.

The layout is not part of a block's key (a router knows the tokens, not the tensors), but of the name under which a store
keeps it: `name = layout fingerprint (16 bytes) || root (first 16 bytes of the chain's root key) || key (32 bytes)`. The
layout implies the model, and the root begins with a digest of the tenant (`salt.py`), so all blocks of a tenant in one layout
have names with the same first 28 bytes. The written format is in dev/formats.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256

from foreword.blocks.keys import FINGERPRINT_BYTES, KEY_BYTES, PUBLIC_ROOT, is_public
from foreword.blocks.salt import DIGEST_BYTES, TENANT_BYTES
from foreword.errors import BadRequest

LAYOUT_FORMAT = 1
ROOT_BYTES = DIGEST_BYTES
PREFIX_BYTES = FINGERPRINT_BYTES + ROOT_BYTES
NAME_BYTES = PREFIX_BYTES + KEY_BYTES
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1}


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """KV that one layer keeps per token: K is `[kv_heads, key_dim]`, V is `[kv_heads, value_dim]`."""

    kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def elements(self) -> int:
        """Elements of K and V per token."""
        return self.kv_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True, slots=True)
class Layout:
    """The arrangement of one block's bytes.

    With `order` "tokens" a payload is, layer after layer, K `[block_size, kv_heads, key_dim]` and V `[block_size, kv_heads,
    value_dim]`, little-endian. Other engines use other order names.

    Attributes:
        model: fingerprint of the weights. Keys cover it too; here it tells tools which model a store's blocks belong to.
        dtype: `float32`, `bfloat16` or `float16`.
        shard: `(rank, world size)` of tensor parallelism, or `(head unit, head units)` of the portable layout.
        loss: lossy codecs that a block may have passed, "" for none. It keeps lossy and exact blocks apart.
        group: which of the model's KV groups the layers are, "" for all layers. It keeps groups apart.
        opaque_bytes: bytes of a block that is not keys and values per token, such as a recurrent state. 0: as `layers` say.
    """

    model: bytes
    block_size: int
    layers: tuple[LayerLayout, ...]
    dtype: str
    order: str = "tokens"
    shard: tuple[int, int] = (0, 1)
    loss: str = ""
    group: str = ""
    opaque_bytes: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise BadRequest(f"dtype {self.dtype!r} is not supported; supported are {', '.join(ITEM_BYTES)}")

    @property
    def item_bytes(self) -> int:
        """Bytes per element."""
        return ITEM_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block's KV, all layers."""
        return self.opaque_bytes or self.block_size * self.item_bytes * sum(layer.elements for layer in self.layers)

    def describe(self) -> dict[str, object]:
        """The layout as a JSON object. `fingerprint` is a digest of its canonical form."""
        described = {
            name: value for name, value in asdict(self).items() if value or name not in ("group", "opaque_bytes")
        }
        described["model"] = self.model.hex()
        described["layers"] = [[layer.kv_heads, layer.key_dim, layer.value_dim] for layer in self.layers]
        described["format"] = LAYOUT_FORMAT
        return described

    @property
    def fingerprint(self) -> bytes:
        """The first 16 bytes of the SHA-256 of the canonical JSON (sorted keys, no spaces, ASCII)."""
        canonical = json.dumps(self.describe(), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return sha256(b"foreword/layout\x00" + canonical.encode()).digest()[:FINGERPRINT_BYTES]


def chain_prefix(layout: bytes, root: bytes) -> bytes:
    """The first bytes of the names of a tenant's blocks with this layout and root key."""
    return layout + root[:ROOT_BYTES]


def block_names(layout: bytes, root: bytes, keys: Iterable[bytes]) -> list[bytes]:
    """Names of the blocks with these keys in one layout, given the root key of their chain. Public blocks have another."""
    own, shared = chain_prefix(layout, root), layout + PUBLIC_ROOT
    return [(shared if is_public(key) else own) + key for key in keys]


def key_of(name: bytes) -> bytes:
    """The block key in a name."""
    return name[PREFIX_BYTES:]


def tenant_of(name: bytes) -> bytes:
    """The part of a block's name that identifies its tenant."""
    return name[FINGERPRINT_BYTES : FINGERPRINT_BYTES + TENANT_BYTES]


@dataclass(frozen=True, slots=True)
class BlockUnits:
    """How the blocks of one rank divide into frames: `per_block x len(layouts)` units, all heads of the first tokens first.

    Attributes:
        layouts: layout of each head unit that the rank has, in order.
        every: layout of each head unit of the model.
        per_block: number of units in the tokens of a block.
        writes: whether the rank saves its units. Of the ranks that have the same heads, one does.
    """

    layouts: tuple[Layout, ...]
    every: tuple[Layout, ...]
    per_block: int
    writes: bool

    @property
    def tokens(self) -> int:
        """Tokens of a unit."""
        return self.layouts[0].block_size

    @property
    def block_units(self) -> int:
        """Units of a block."""
        return self.per_block * len(self.layouts)

    def names(self, root: bytes, keys: Sequence[bytes]) -> list[bytes]:
        """Names of the rank's units, given the root key of a chain and the keys of its units of tokens."""
        names = [block_names(layout.fingerprint, root, keys) for layout in self.layouts]
        return names[0] if len(names) == 1 else [name for unit in zip(*names, strict=True) for name in unit]

    def of_blocks(self, blocks: Sequence[int]) -> list[int]:
        """Numbers of the units of blocks, in the order of `names`: block `b` has those from `b * block_units` on."""
        size = self.block_units
        return [unit for block in blocks for unit in range(block * size, (block + 1) * size)]


def whole_blocks(layout: Layout) -> BlockUnits:
    """Blocks that are not divided: each is one frame, in the layout of its instance."""
    return BlockUnits((layout,), (layout,), 1, True)
