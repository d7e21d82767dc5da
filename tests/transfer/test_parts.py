from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreword.blocks.layout import LayerLayout, Layout
from foreword.transfer.errors import TransferError
from foreword.transfer.parts import ReceivedParts, payload_bytes, split
from foreword.transfer.wire_format import KVPart, join_keys, split_keys

LAYERS = (LayerLayout(2, 8, 4), LayerLayout(1, 16, 16), LayerLayout(4, 2, 2))
layouts = st.builds(
    Layout,
    st.just(b"m"),
    st.sampled_from([1, 4, 16]),
    st.lists(st.sampled_from(LAYERS), min_size=1, max_size=5).map(tuple),
    st.sampled_from(["float32", "bfloat16"]),
    st.sampled_from(["tokens", "packed"]),
)


def keys_of(count: int) -> list[bytes]:
    return [sha256(bytes([number])).digest() for number in range(count)]


def whole(layout: Layout, tokens: int) -> KVPart:
    full = tokens // layout.block_size
    return KVPart(0, len(layout.layers), 0, -(-tokens // layout.block_size), tokens, join_keys(keys_of(full)))


@given(layouts, st.integers(0, 100), st.integers(1, 5000), st.integers(0, 9))
def test_parts_cover_everything_once(layout: Layout, tokens: int, target: int, first: int) -> None:
    """Every block of every layer is in exactly one part, full blocks have keys, and only the last block may be partial."""
    size = layout.block_size
    keys = keys_of(tokens // size)
    seen: dict[tuple[int, int], int] = {}
    for part in split(layout, tokens, keys, first_block=first, target=target):
        for layer in range(part.first_layer, part.first_layer + part.layers):
            left = part.tokens
            for block in range(part.first_block, part.first_block + part.blocks):
                assert (layer, block) not in seen
                seen[layer, block] = min(left, size)
                left -= seen[layer, block]
            assert left == 0
        low = part.first_block - first
        assert split_keys(part.keys) == keys[low : low + part.tokens // size]
        one = payload_bytes(layout, KVPart(part.first_layer, 1, 0, 1, size))
        assert part.blocks == 1 or part.layers > 1 or payload_bytes(layout, part) <= max(target, one)
    blocks = -(-tokens // size)
    expected = {
        (layer, first + block): min(size, tokens - block * size)
        for layer in range(len(layout.layers))
        for block in range(blocks)
    }
    assert seen == expected


@given(layouts, st.integers(1, 100))
def test_payloads_have_the_bytes_of_their_tokens(layout: Layout, tokens: int) -> None:
    """In the order of tokens a payload is as long as the tokens' K and V; else as long as whole blocks."""
    part = whole(layout, tokens)
    if layout.order == "tokens":
        elements = sum(layer.kv_heads * (layer.key_dim + layer.value_dim) for layer in layout.layers)
        assert payload_bytes(layout, part) == tokens * elements * layout.item_bytes
    else:
        assert payload_bytes(layout, part) == part.blocks * layout.block_bytes


@given(layouts, st.integers(1, 100), st.integers(1, 3000), st.data())
def test_a_missing_part_is_a_gap(layout: Layout, tokens: int, target: int, data: st.DataObject) -> None:
    """No part is missing where all are there; without any one of them there is a gap."""
    keys = keys_of(tokens // layout.block_size)
    parts = list(split(layout, tokens, keys, target=target))
    left_out = data.draw(st.integers(-1, len(parts) - 1))
    received = ReceivedParts(layout, b"", 0)
    for number, part in enumerate(data.draw(st.permutations(parts))):
        assert received.find_fault(part, payload_bytes(layout, part)) is None
        if left_out < 0 or part is not parts[left_out]:
            received.add(part)
        assert number >= 0
    assert (received.find_gap(tokens) is None) == (left_out < 0)


def test_cached_blocks_need_not_arrive() -> None:
    """A destination that has the first blocks needs only the rest, but the keys of all blocks."""
    layout = Layout(b"m", 4, LAYERS, "float32")
    keys = keys_of(5)
    received = ReceivedParts(layout, join_keys(keys), have=3)
    for part in split(layout, 10, keys[3:], first_block=3):
        received.add(part)
    assert received.find_gap(22) is None
    assert received.find_gap(23) is not None, "a token more than has come"
    assert received.find_gap(12) is None
    unnamed = ReceivedParts(layout, b"", have=3)
    assert "no key" in str(unnamed.find_gap(12))


def test_a_block_that_grew() -> None:
    """A partial block may arrive again with more tokens, and finally full and with its key."""
    layout = Layout(b"m", 4, LAYERS, "float32")
    received = ReceivedParts(layout, b"", 0)
    for tokens in (1, 3, 4):
        received.add(whole(layout, tokens))
        assert received.find_gap(tokens) is None
    assert received.keys == {0: keys_of(1)[0]}


@pytest.mark.parametrize(
    ("part", "size", "says"),
    [
        (KVPart(3, 1, 0, 1, 4, keys_of(1)[0]), 0, "layers"),
        (KVPart(0, 0, 0, 1, 4, keys_of(1)[0]), 0, "layers"),
        (KVPart(0, 1, 0, 0, 0), 0, "tokens"),
        (KVPart(0, 1, 0, 2, 4, keys_of(1)[0]), 0, "tokens"),
        (KVPart(0, 1, 0, 1, 5, keys_of(1)[0]), 0, "tokens"),
        (KVPart(0, 1, 0, 1, 4, keys_of(1)[0]), -1, "bytes"),
        (KVPart(0, 1, 0, 1, 4), 0, "keys"),
        (KVPart(0, 1, 1, 1, 4, keys_of(1)[0]), 0, "another key"),
    ],
)
def test_faults_of_parts(part: KVPart, size: int, says: str) -> None:
    """Each possible fault of a part is detected and described."""
    layout = Layout(b"m", 4, LAYERS, "float32")
    received = ReceivedParts(layout, join_keys(keys_of(2)), 0)
    assert says in str(received.find_fault(part, payload_bytes(layout, part) + size))


def test_keys_must_fit_the_tokens() -> None:
    """Splitting requires a key for each full block."""
    with pytest.raises(TransferError):
        list(split(Layout(b"m", 4, LAYERS, "float32"), 9, keys_of(1)))
