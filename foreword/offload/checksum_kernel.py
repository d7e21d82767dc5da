"""The Triton kernel that computes or compares the checksums of frames on a device (offload/device_checksum.py launches it).

A frame is `payload || header`; its checksum is XXH3-128, seed 0, of the payload and the first 160 bytes of the header, and
stands behind them in big-endian order (store/frame.py). The algorithm is that of xxhash 0.8, bit for bit:

- Inputs of more than 240 bytes are read in blocks of 1,024 bytes, 16 stripes of 8 words. All stripes of a block add to 8
  accumulators in parallel; only the scramble between two blocks is sequential. So some blocks are loaded ahead at once.
- Shorter ones are mixed 32 bytes after 32 bytes.

Accumulators are kept as two vectors, of the even and of the odd words: each word is also added to its pair's other accumulator.
"""

import triton
import triton.language as tl

HEADER = tl.constexpr(160)
SUM = tl.constexpr(32)
HEAD = tl.constexpr(72)


@triton.jit
def _word(place):
    """The 64-bit number at any address, little-endian."""
    byte = tl.arange(0, 8)
    return tl.sum(tl.load(place + byte).to(tl.uint64) << (8 * byte).to(tl.uint64), axis=0)


@triton.jit
def _avalanche(h, prime):
    h = h ^ (h >> 37)
    h = h * prime
    return h ^ (h >> 32)


@triton.jit
def _mix(place, low, high):
    """The folded product of 16 bytes and two keys."""
    a, b = _word(place) ^ low, _word(place + 8) ^ high
    return (a * b) ^ tl.umulhi(a, b)


@triton.jit
def _mix_pair(low, high, first, second, keys):
    """Add 32 bytes, 16 at each of two addresses, to both halves of the sum."""
    low += _mix(first, tl.load(keys), tl.load(keys + 1))
    low = low ^ (_word(second) + _word(second + 8))
    high += _mix(second, tl.load(keys + 2), tl.load(keys + 3))
    return low, high ^ (_word(first) + _word(first + 8))


@triton.jit
def _merge(even, odd, keys, start, prime):
    """The accumulators as one half of the digest."""
    pair = tl.arange(0, 4)
    a, b = even ^ tl.load(keys + 2 * pair), odd ^ tl.load(keys + 2 * pair + 1)
    return _avalanche(start + tl.sum((a * b) ^ tl.umulhi(a, b), axis=0), prime)


@triton.jit
def _product(word, key):
    """The product of the halves of a word and its key."""
    mixed = word ^ key
    return (mixed & 0xFFFFFFFF) * (mixed >> 32)


@triton.jit(do_not_specialize=["payload"])
def checksum_kernel(
    frames, frame_stride, slots, payload, heads, found, table,
    SHORT: tl.constexpr, SEAL: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """The checksum of one frame. Grid: (frames,).

    `frames` is the address of a frame 0, `frame_stride` the bytes between two, a multiple of 8, and `slots` has the number of
    the frame of each program. With SEAL the checksum is written. Else `found[program]` is 1 if the frame has it, with 16 zero
    bytes behind it, and if its header begins with the 72 bytes of `heads[program]` (magic, version, codec, name) and has the
    payload's length, decoded and as stored; and 0 otherwise.

    `table` has XXH3's numbers (`device_checksum.numbers`). SHORT: payload and header have at most 240 bytes together. AHEAD:
    blocks that are loaded at once, a power of 2.
    """
    program = tl.program_id(0)
    start = (frames + tl.load(slots + program) * frame_stride).to(tl.pointer_type(tl.uint8))
    keys = table.to(tl.pointer_type(tl.uint64))
    length = payload + HEADER
    size = length.to(tl.uint64)
    prime1, prime2, prime4 = tl.load(keys + 40), tl.load(keys + 41), tl.load(keys + 42)
    prime, prime32 = tl.load(keys + 43), tl.load(keys + 44)
    zero = size * 0
    if SHORT:
        low, high = size * prime1, zero
        for i in range(4):
            low, high = _mix_pair(low, high, start + 32 * i, start + 32 * i + 16, keys + 4 * i)
        low, high = _avalanche(low, prime), _avalanche(high, prime)
        for i in range(4, length // 32):
            low, high = _mix_pair(low, high, start + 32 * i, start + 32 * i + 16, keys + 48 + 4 * (i - 4))
        low, high = _mix_pair(low, high, start + length - 16, start + length - 32, keys + 60)
        digest_low = _avalanche(low + high, prime)
        digest_high = zero - _avalanche(low * prime1 + high * prime4 + size * prime2, prime)
    else:
        words = start.to(tl.pointer_type(tl.uint64))
        block, stripe, pair = tl.arange(0, AHEAD), tl.arange(0, 16), tl.arange(0, 4)
        place = block[:, None, None] * 128 + stripe[None, :, None] * 8 + 2 * pair[None, None, :]
        key_at = stripe[None, :, None] + 2 * pair[None, None, :]
        even_key, odd_key = tl.load(keys + key_at), tl.load(keys + key_at + 1)
        even_last, odd_last = tl.load(keys + 16 + 2 * pair), tl.load(keys + 16 + 2 * pair + 1)
        even, odd = tl.load(keys + 64 + 2 * pair), tl.load(keys + 64 + 2 * pair + 1)
        stripes = (length - 1) // 64
        blocks = stripes // 16
        inside = (block[:, None, None] * 16 + stripe[None, :, None] < stripes) & (pair[None, None, :] >= 0)
        even_next, odd_next = (
            tl.load(words + place, mask=inside, other=0),
            tl.load(words + place + 1, mask=inside, other=0),
        )
        for first in range(0, blocks + 1, AHEAD):
            even_word, odd_word, valid = even_next, odd_next, inside
            inside = ((first + AHEAD + block[:, None, None]) * 16 + stripe[None, :, None] < stripes) & (
                pair[None, None, :] >= 0
            )
            following = words + (first + AHEAD) * 128 + place
            even_next = tl.load(following, mask=inside, other=0)
            odd_next = tl.load(following + 1, mask=inside, other=0)
            even_sums = tl.sum(tl.where(valid, odd_word + _product(even_word, even_key), 0), axis=1)
            odd_sums = tl.sum(tl.where(valid, even_word + _product(odd_word, odd_key), 0), axis=1)
            for i in tl.static_range(AHEAD):
                chosen = block[:, None] == i
                even += tl.sum(tl.where(chosen, even_sums, 0), axis=0)
                odd += tl.sum(tl.where(chosen, odd_sums, 0), axis=0)
                whole = first + i < blocks
                even = tl.where(whole, (even ^ (even >> 47) ^ even_last) * prime32, even)
                odd = tl.where(whole, (odd ^ (odd >> 47) ^ odd_last) * prime32, odd)
        byte = tl.arange(0, 8)
        tail = start + length - 64 + 16 * pair[:, None] + byte[None, :]
        shift = (8 * byte[None, :]).to(tl.uint64)
        even_word = tl.sum(tl.load(tail).to(tl.uint64) << shift, axis=1)
        odd_word = tl.sum(tl.load(tail + 8).to(tl.uint64) << shift, axis=1)
        even += odd_word + _product(even_word, tl.load(keys + 72 + 2 * pair))
        odd += even_word + _product(odd_word, tl.load(keys + 72 + 2 * pair + 1))
        digest_low = _merge(even, odd, keys + 24, size * prime1, prime)
        digest_high = _merge(even, odd, keys + 32, ~(size * prime2), prime)
    at = tl.arange(0, 32)
    half = tl.where(at < 8, digest_high, digest_low)
    bytes_of = (half >> (56 - 8 * (at % 8)).to(tl.uint64)) & 0xFF
    sealed = tl.where(at < 16, bytes_of, 0).to(tl.uint8)
    if SEAL:
        tl.store(start + length + at, sealed)
    else:
        head = tl.arange(0, 128)
        named = head < HEAD
        wanted = tl.load(heads + program * HEAD + head, mask=named, other=0)
        wrong = tl.sum((tl.load(start + payload + head, mask=named, other=0) != wanted).to(tl.int32), axis=0)
        wrong += tl.sum((tl.load(start + length + at) != sealed).to(tl.int32), axis=0)
        wrong += (_word(start + payload + 112) != payload.to(tl.uint64)).to(tl.int32)
        wrong += (_word(start + payload + 120) != payload.to(tl.uint64)).to(tl.int32)
        tl.store(found + program, (wrong == 0).to(tl.int32))
