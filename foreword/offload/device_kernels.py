"""The Triton kernel that copies blocks between paged tensors and frames on a device (offload/device.py launches it)."""

import triton
import triton.language as tl

# By bytes of a word.
KINDS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


@triton.jit
def copy_kernel(
    planes, units, frames, frame_stride, found,
    NUMBERS: tl.constexpr, AXES: tl.constexpr, WORDS: tl.constexpr, KIND: tl.constexpr, GATHER: tl.constexpr,
    CHOSEN: tl.constexpr,
):  # fmt: skip
    """Copy some words of one plane of one unit. Grid: (units, planes, words / WORDS).

    A unit is four numbers: three coordinates, which a plane's strides multiply, and the frame. A plane is NUMBERS numbers:
    the address of its tensor, its offset in a frame, three strides, and for each of AXES axes a size in words and the strides
    in the tensor and in a frame. Strides are in bytes, `frames` is an address, and a word is an integer of type KIND. With
    CHOSEN only units are copied whose number in `found` is 1; the others have 0.
    """
    unit = units + tl.program_id(0) * 4
    plane = planes + tl.program_id(1) * NUMBERS
    word = tl.program_id(2) * WORDS + tl.arange(0, WORDS)
    paged = tl.load(plane)
    framed = frames + tl.load(unit + 3) * frame_stride + tl.load(plane + 1)
    for i in tl.static_range(3):
        paged += tl.load(unit + i) * tl.load(plane + 2 + i)
    left = word
    paged_at = tl.zeros([WORDS], tl.int64)
    framed_at = tl.zeros([WORDS], tl.int64)
    for i in tl.static_range(AXES):
        axis = plane + 5 + 3 * (AXES - 1 - i)
        size = tl.load(axis).to(tl.int32)
        index = (left % size).to(tl.int64)
        left = left // size
        paged_at += index * tl.load(axis + 1)
        framed_at += index * tl.load(axis + 2)
    in_tensor = (paged + paged_at).to(tl.pointer_type(KIND))
    in_frame = (framed + framed_at).to(tl.pointer_type(KIND))
    if CHOSEN:
        left += 1 - tl.load(found + tl.program_id(0))
    inside = left == 0
    if GATHER:
        tl.store(in_frame, tl.load(in_tensor, mask=inside), mask=inside)
    else:
        tl.store(in_tensor, tl.load(in_frame, mask=inside), mask=inside)
