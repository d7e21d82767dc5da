"""Attention over paged K and V, and their write, as Triton kernels (engine/attention/triton_backend.py launches them).

The online softmax over blocks of keys is FlashAttention's (Dao 2023); the division of one sequence's keys among programs
and the merge of their results are Flash-Decoding's (Dao et al. 2023); a prefix that decoding sequences share is read once
for all of them, as in Hydragen (Juravsky et al. 2024). The query heads that share a KV head are rows of one tile, so each
key is read once for all of them. Scores are in units of log 2.

A tile is five numbers: the step's row of its first token, its number of tokens (0: nothing to do), the position of the
first, where the sequence's block table begins in `tables`, and the number of leading tokens that are read in a group. A
group of decoding sequences is five numbers too: where the list of its members begins in `tables` (each a number of a tile
of the decoding sequences), their number, the last position that they share, where a block table begins, and 0.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def write_kernel(
    key, value, k_slots, v_slots, slots,
    key_head, key_token, value_head, value_token, kv_heads,
    K_DIM: tl.constexpr, V_DIM: tl.constexpr, K_PADDED: tl.constexpr, V_PADDED: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """K and V of one token, `[kv_heads, dim]`, into its slot; nothing if that is -1. Grid: tokens."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot < 0:
        return
    head = tl.arange(0, HEADS)[:, None]
    k_dim = tl.arange(0, K_PADDED)[None, :]
    inside = (head < kv_heads) & (k_dim < K_DIM)
    row = tl.load(key + head * key_head + token * key_token + k_dim, mask=inside)
    tl.store(k_slots + (slot * kv_heads + head) * K_DIM + k_dim, row, mask=inside)
    v_dim = tl.arange(0, V_PADDED)[None, :]
    inside = (head < kv_heads) & (v_dim < V_DIM)
    row = tl.load(value + head * value_head + token * value_token + v_dim, mask=inside)
    tl.store(v_slots + (slot * kv_heads + head) * V_DIM + v_dim, row, mask=inside)


@triton.jit
def attend_kernel(
    out, parts, sums, query, k_slots, v_slots, tiles, members, tables, sinks,
    scale, softcap, window, query_head, query_token, kv_heads, group, block_size, groups, first_part, parts_per_row,
    K_DIM: tl.constexpr, V_DIM: tl.constexpr, K_PADDED: tl.constexpr, V_PADDED: tl.constexpr,
    ROWS: tl.constexpr, GROUP: tl.constexpr, KEYS: tl.constexpr, PARTS: tl.constexpr, SHARED: tl.constexpr,
    REST: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Attend in one tile, one KV head, one share of the keys. Grid: (tiles, kv_heads, shares).

    Row `i` of the tile is token `i // GROUP` and query head `i % GROUP` of the KV head. PARTS: tiles have one token, and
    results are merged: share `s` of tile `t` and head `h` is part `(t * heads + h) * parts_per_row + first_part + s` of
    `parts` and `sums`. REST: keys that are read in a group are left out. SHARED: `tiles` are `groups` groups, of `members`,
    and the programs of each are as many as its members may need.
    WIDEN: multiply in float32, as Triton's interpreter cannot multiply bfloat16. Float32 is never rounded to TF32.
    """
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    first_token = 0
    if SHARED:
        first_token = tile // groups * (ROWS // GROUP)
        tile = tile % groups
    first_row = tl.load(tiles + tile * 5).to(tl.int64)
    count = tl.load(tiles + tile * 5 + 1) - first_token
    first_position = tl.load(tiles + tile * 5 + 2)
    table = tables + tl.load(tiles + tile * 5 + 3)
    if count <= 0:
        return

    row = tl.arange(0, ROWS)
    token = row // GROUP
    head = kv_head * group + row % GROUP
    used = (token < count) & (row % GROUP < group)
    if SHARED:
        of_row = tl.load(tables + first_row + first_token + token, mask=token < count, other=0)
        from_row = tl.load(members + of_row * 5, mask=token < count, other=0).to(tl.int64)
        position = first_position + token * 0
        high = first_position + 1
    else:
        of_row = tile + token
        from_row = first_row + token
        position = first_position + token
        high = first_position + count
    k_dim = tl.arange(0, K_PADDED)
    v_dim = tl.arange(0, V_PADDED)
    at = query + head[:, None] * query_head + from_row[:, None] * query_token + k_dim[None, :]
    q = tl.load(at, mask=used[:, None] & (k_dim < K_DIM)[None, :], other=0.0)
    if WIDEN:
        q = q.to(tl.float32)

    low = 0
    if WINDOW:
        low = tl.maximum(first_position - window + 1, 0)
    if REST:
        low = tl.load(tiles + tile * 5 + 4)
    share = tl.cdiv(tl.cdiv(high - low, tl.num_programs(2)), KEYS) * KEYS
    begin = low + split * share
    end = tl.minimum(begin + share, high)

    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    result = tl.zeros([ROWS, V_PADDED], tl.float32)
    for start in range(begin, end, KEYS):
        keys = start + tl.arange(0, KEYS)
        inside = keys < end
        block = tl.load(table + keys // block_size, mask=inside, other=0).to(tl.int64)
        slot = (block * block_size + keys % block_size) * kv_heads + kv_head
        k = tl.load(
            k_slots + slot[None, :] * K_DIM + k_dim[:, None], mask=inside[None, :] & (k_dim < K_DIM)[:, None], other=0.0
        )
        if WIDEN:
            k = k.to(tl.float32)
        scores = tl.dot(q, k, input_precision="ieee") * scale
        if SOFTCAP:
            # tanh(x) = 2 sigmoid(2x) - 1
            scores = softcap * (2.0 / (1.0 + tl.exp2(scores / softcap * (-2.0 * LOG2E))) - 1.0)
        visible = inside[None, :] & (keys[None, :] <= position[:, None])
        if WINDOW:
            visible = visible & (keys[None, :] > position[:, None] - window)
        scores = tl.where(visible, scores * LOG2E, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        # A row that has seen no key yet has no largest score: -inf - -inf is not a number.
        against = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weights = tl.exp2(scores - against[:, None])
        rescale = tl.exp2(largest - against)
        total = total * rescale + tl.sum(weights, 1)
        v = tl.load(
            v_slots + slot[:, None] * V_DIM + v_dim[None, :], mask=inside[:, None] & (v_dim < V_DIM)[None, :], other=0.0
        )
        weights = weights.to(v.dtype)
        if WIDEN:
            weights = weights.to(tl.float32)
            v = v.to(tl.float32)
        result = result * rescale[:, None] + tl.dot(weights, v, input_precision="ieee")
        largest = new_largest

    heads = kv_heads * group
    stored = used[:, None] & (v_dim < V_DIM)[None, :]
    if PARTS:
        part = (of_row * heads + head) * parts_per_row + first_part + split
        found = total > 0.0
        total = tl.where(found, total, 1.0)
        tl.store(parts + part[:, None] * V_DIM + v_dim[None, :], result / total[:, None], mask=stored & found[:, None])
        log_sum = tl.where(found, largest + tl.log2(total), float("-inf"))
        tl.store(sums + part, log_sum, mask=used)
    else:
        if SINKS:
            sink = tl.load(sinks + head, mask=used, other=0.0).to(tl.float32) * LOG2E
            total += tl.exp2(sink - largest)
        result = result / tl.where(used, total, 1.0)[:, None]
        at = out + (from_row * heads + head)[:, None] * V_DIM + v_dim[None, :]
        tl.store(at, result.to(out.dtype.element_ty), mask=stored)


@triton.jit
def merge_kernel(
    out, parts, sums, tiles, sinks, heads, parts_per_row, shared_parts,
    V_DIM: tl.constexpr, V_PADDED: tl.constexpr, PARTS: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """The parts of one row, merged; at most PARTS. The first `shared_parts` are of keys that are read in a group, and
    missing for a sequence that is in none. Grid: (tiles, heads)."""
    tile = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.load(tiles + tile * 5).to(tl.int64)
    if tl.load(tiles + tile * 5 + 1) == 0:
        return
    part = tl.arange(0, PARTS)
    missing = tl.where(tl.load(tiles + tile * 5 + 4) > 0, 0, shared_parts)
    made = (part >= missing) & (part < parts_per_row)
    dim = tl.arange(0, V_PADDED)
    first = (tile * heads + head) * parts_per_row
    log_sums = tl.load(sums + first + part, mask=made, other=float("-inf"))
    largest = tl.max(log_sums, 0)
    weights = tl.exp2(log_sums - largest)
    total = tl.sum(weights, 0)
    if SINKS:
        total += tl.exp2(tl.load(sinks + head).to(tl.float32) * LOG2E - largest)
    at = parts + (first + part)[:, None] * V_DIM + dim[None, :]
    values = tl.load(at, mask=(dim < V_DIM)[None, :] & (weights > 0.0)[:, None], other=0.0)
    result = tl.sum(values * weights[:, None], 0) / total
    tl.store(out + (row * heads + head) * V_DIM + dim, result.to(out.dtype.element_ty), mask=dim < V_DIM)
