"""Attention over paged K and V, and their write, as Triton kernels (engine/attention/triton_backend.py launches them).

The online softmax over blocks of keys is FlashAttention's (Dao 2023); the division of one sequence's keys among programs
and the merge of their results are Flash-Decoding's (Dao et al. 2023). The query heads that share a KV head are rows of one
tile, so each key is read once for all of them. Scores are in units of log 2.
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
    out, parts, sums, query, k_slots, v_slots, tiles, tables, sinks,
    scale, softcap, window, query_head, query_token, kv_heads, group, block_size,
    K_DIM: tl.constexpr, V_DIM: tl.constexpr, K_PADDED: tl.constexpr, V_PADDED: tl.constexpr,
    ROWS: tl.constexpr, GROUP: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """One tile, one KV head, one share of the keys. Grid: (tiles, kv_heads, SPLITS).

    A tile is four numbers: the step's row of its first token, its number of tokens (0: nothing to do), the position of the
    first, and where the sequence's block table begins in `tables`. Row `i` of the tile is token `i // GROUP` and query head
    `i % GROUP` of the KV head. With several SPLITS, tiles have one token, and results go into `parts` and `sums`.
    WIDEN: multiply in float32, as Triton's interpreter cannot multiply bfloat16. Float32 is never rounded to TF32.
    """
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    first_row = tl.load(tiles + tile * 4).to(tl.int64)
    count = tl.load(tiles + tile * 4 + 1)
    first_position = tl.load(tiles + tile * 4 + 2)
    table = tables + tl.load(tiles + tile * 4 + 3)
    if count == 0:
        return

    row = tl.arange(0, ROWS)
    token = row // GROUP
    head = kv_head * group + row % GROUP
    used = (token < count) & (row % GROUP < group)
    position = first_position + token
    k_dim = tl.arange(0, K_PADDED)
    v_dim = tl.arange(0, V_PADDED)
    at = query + head[:, None] * query_head + (first_row + token)[:, None] * query_token + k_dim[None, :]
    q = tl.load(at, mask=used[:, None] & (k_dim < K_DIM)[None, :], other=0.0)
    if WIDEN:
        q = q.to(tl.float32)

    high = first_position + count
    low = 0
    if WINDOW:
        low = tl.maximum(first_position - window + 1, 0)
    share = tl.cdiv(tl.cdiv(high - low, SPLITS), KEYS) * KEYS
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
    if SPLITS == 1:
        if SINKS:
            sink = tl.load(sinks + head, mask=used, other=0.0).to(tl.float32) * LOG2E
            total += tl.exp2(sink - largest)
        result = result / tl.where(used, total, 1.0)[:, None]
        at = out + ((first_row + token) * heads + head)[:, None] * V_DIM + v_dim[None, :]
        tl.store(at, result.to(out.dtype.element_ty), mask=stored)
    else:
        part = (tile * heads + head) * SPLITS + split
        empty = total == 0.0
        result = result / tl.where(empty, 1.0, total)[:, None]
        tl.store(parts + part[:, None] * V_DIM + v_dim[None, :], result, mask=stored)
        log_sum = tl.where(empty, float("-inf"), largest + tl.log2(tl.where(empty, 1.0, total)))
        tl.store(sums + part, log_sum, mask=used)


@triton.jit
def merge_kernel(
    out, parts, sums, tiles, sinks, heads,
    V_DIM: tl.constexpr, V_PADDED: tl.constexpr, SPLITS: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """The shares of one row's keys, merged. Grid: (tiles, heads)."""
    tile = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.load(tiles + tile * 4).to(tl.int64)
    if tl.load(tiles + tile * 4 + 1) == 0:
        return
    split = tl.arange(0, SPLITS)
    dim = tl.arange(0, V_PADDED)
    first = (tile * heads + head) * SPLITS
    log_sums = tl.load(sums + first + split)
    largest = tl.max(log_sums, 0)
    weights = tl.exp2(log_sums - largest)
    total = tl.sum(weights, 0)
    if SINKS:
        total += tl.exp2(tl.load(sinks + head).to(tl.float32) * LOG2E - largest)
    at = parts + (first + split)[:, None] * V_DIM + dim[None, :]
    values = tl.load(at, mask=(dim < V_DIM)[None, :] & (weights > 0.0)[:, None], other=0.0)
    result = tl.sum(values * weights[:, None], 0) / total
    tl.store(out + (row * heads + head) * V_DIM + dim, result.to(out.dtype.element_ty), mask=dim < V_DIM)
