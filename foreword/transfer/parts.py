"""The parts of a sequence's KV: their payloads, how KV is split into them, and which of them have arrived. No I/O.

Payload of a part for layouts of order `tokens`: layer after layer, K `[tokens, kv_heads, key_dim]`, then V
`[tokens, kv_heads, value_dim]`, of the part's valid tokens only: a partial block takes no more bytes than its tokens. For any
other order the inside of a block is known to its engine only: layer after layer, the whole bytes of each block in that layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from foreword.blocks.keys import KEY_BYTES
from foreword.blocks.layout import Layout
from foreword.transfer.errors import TransferError
from foreword.transfer.wire_format import KVPart, join_keys, split_keys

TARGET_BYTES: Final = 1 << 20
_TOKENS: Final = "tokens"


def payload_bytes(layout: Layout, part: KVPart) -> int:
    """Length of a part's payload. The part's layers must be the layout's."""
    units = part.tokens if layout.order == _TOKENS else part.blocks * layout.block_size
    layers = layout.layers[part.first_layer : part.first_layer + part.layers]
    return units * layout.item_bytes * sum(layer.elements for layer in layers)


def split(
    layout: Layout,
    tokens: int,
    keys: Sequence[bytes],
    *,
    first_block: int = 0,
    layers: range | None = None,
    target: int = TARGET_BYTES,
) -> Iterator[KVPart]:
    """Split the KV of `tokens` tokens into parts of about `target` bytes, layer by layer.

    Args:
        tokens: with KV, counted from the start of block `first_block`; the last block may be partial.
        keys: of the full blocks from `first_block` on.
        layers: which layers; None for all.

    Raises TransferError if there is not one key for each full block.
    """
    size = layout.block_size
    if len(keys) != tokens // size:
        raise TransferError(f"{tokens} tokens fill {tokens // size} blocks, but there are {len(keys)} keys")
    wanted = range(len(layout.layers)) if layers is None else layers
    blocks = -(-tokens // size)
    layer, stop = wanted.start, wanted.stop
    while layer < stop and blocks:
        count = _layers_within(layout, layer, stop, blocks, target)
        one = layout.block_size * layout.item_bytes * layout.layers[layer].elements
        step = blocks if count > 1 or one * blocks <= target else max(target // one, 1)
        for low in range(0, blocks, step):
            some = min(step, blocks - low)
            valid = min(tokens - low * size, some * size)
            named = join_keys(keys[low : low + valid // size])
            yield KVPart(layer, count, first_block + low, some, valid, named)
        layer += count


def _layers_within(layout: Layout, layer: int, stop: int, blocks: int, target: int) -> int:
    """How many layers from `layer` on fit into the target together; at least one."""
    count, room = 0, target
    while layer + count < stop:
        room -= blocks * layout.block_size * layout.item_bytes * layout.layers[layer + count].elements
        if room < 0:
            break
        count += 1
    return max(count, 1)


class ReceivedParts:
    """The KV of a sequence that has arrived, and the key of each block.

    Args:
        keys: of the full blocks that the transfer's opening named.
        have: leading blocks that the destination has already.
    """

    def __init__(self, layout: Layout, keys: bytes, have: int) -> None:
        self.layout = layout
        self.keys: dict[int, bytes] = dict(enumerate(split_keys(keys)))
        self.have = have
        self._tokens: list[dict[int, int]] = [{} for _ in layout.layers]

    def find_fault(self, part: KVPart, payload: int) -> str | None:
        """The fault of a part of `payload` bytes, in words; None if it is right."""
        size = self.layout.block_size
        if not part.layers or part.first_layer + part.layers > len(self.layout.layers):
            return f"layers {part.first_layer} to {part.first_layer + part.layers - 1} are not in the layout"
        if not part.blocks or not (part.blocks - 1) * size < part.tokens <= part.blocks * size:
            return f"{part.tokens} tokens are not {part.blocks} blocks of {size}"
        expected = payload_bytes(self.layout, part)
        if payload != expected:
            return f"the payload has {payload} bytes, not {expected}"
        if len(part.keys) != KEY_BYTES * (part.tokens // size):
            return f"{len(part.keys) // KEY_BYTES} keys for {part.tokens // size} full blocks"
        for number, key in enumerate(split_keys(part.keys), start=part.first_block):
            if self.keys.get(number, key) != key:
                return f"block {number} has another key than announced"
        return None

    def add(self, part: KVPart) -> None:
        """Note a part that has arrived and has no fault."""
        size = self.layout.block_size
        self.keys.update(enumerate(split_keys(part.keys), start=part.first_block))
        arrived = dict.fromkeys(range(part.first_block, part.first_block + part.blocks), size)
        if part.tokens % size:
            arrived[part.first_block + part.blocks - 1] = part.tokens % size
        for layer in range(part.first_layer, part.first_layer + part.layers):
            self._tokens[layer].update(arrived)

    def find_gap(self, tokens: int) -> str | None:
        """The gap in the KV of `tokens` tokens, in words; None if all blocks after the first `have` have arrived."""
        size = self.layout.block_size
        full, rest = divmod(tokens, size)
        for layer, arrived in enumerate(self._tokens):
            for block in range(self.have, full):
                if arrived.get(block) != size:
                    return f"layer {layer} of block {block} is missing"
            if rest and full >= self.have and arrived.get(full, 0) < rest:
                return f"layer {layer} of block {full}, the last one, is missing"
        unnamed = next((block for block in range(full) if block not in self.keys), None)
        return None if unnamed is None else f"no key was sent for block {unnamed}"
