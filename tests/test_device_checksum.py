"""Checksums that a device computes are those of the host, and what a host refuses a device refuses (Triton's interpreter)."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch

from foreword.errors import BadFrame
from foreword.offload.device_checksum import DeviceChecksums, heads
from foreword.store.frame import HEADER_BYTES, RAW, Header, check, seal, set_key

pytest.importorskip("triton")

CPU = torch.device("cpu")
# Payload and 160 bytes: the shortest inputs, the longest that are mixed (240 bytes), the first in blocks, and lengths around
# stripes of 64 bytes, blocks of 1,024, and 4 of them, which are loaded at once; also with a payload that ends in a word.
SIZES = (0, 80, 81, 101, 864, 865, 3937, 4096)
MORE_SIZES = (1, 31, 79, 96, 863, 929, 3935, 5985, *range(2, 80, 7), *range(90, 2300, 83))


def frames_of(size: int, count: int, chance: random.Random, *, group: int = 0) -> tuple[torch.Tensor, list[bytes]]:
    """Frames that the host has sealed, in slots, and their names."""
    stride = -(-(size + HEADER_BYTES) // 64) * 64
    arena = torch.zeros(count, stride, dtype=torch.uint8)
    names = []
    for number in range(count):
        header = header_of(size, chance, depth=number, group=group)
        view = view_of(arena, number)
        view[:size] = chance.randbytes(size)
        seal(header, view[: size + HEADER_BYTES])
        names.append(header.name)
    return arena, names


def header_of(size: int, chance: random.Random, *, depth: int = 0, group: int = 0) -> Header:
    parts = (chance.randbytes(length) for length in (16, 16, 32, 32))
    return Header(*parts, depth, RAW, size, size, group)


def view_of(arena: torch.Tensor, number: int) -> memoryview:
    return memoryview(arena[number].numpy()).cast("B")


def accepted_by_the_host(data: memoryview, name: bytes, size: int) -> bool:
    """Whether a load on the host would use these bytes as this block."""
    try:
        header = check(data, name).header
    except BadFrame:
        return False
    return header.codec == RAW and header.length == header.raw_length == size


@pytest.mark.parametrize("size", [*SIZES, *(pytest.param(size, marks=pytest.mark.extended) for size in MORE_SIZES)])
def test_a_device_seals_as_the_host_does(size: int) -> None:
    """In any order of slots, also where other bytes stood; and finds its own checksums and the host's right."""
    chance = random.Random(size)
    arena, names = frames_of(size, 2, chance)
    wanted = arena.clone()
    arena[:, size + 160 : size + HEADER_BYTES] = torch.randint(0, 255, (2, 32), dtype=torch.uint8)
    checksums, order = DeviceChecksums(CPU), torch.tensor([1, 0])
    checksums.seal(arena, order, size)
    assert torch.equal(arena, wanted)
    assert checksums.check(arena, order, size, heads(names[::-1])).tolist() == [1, 1]


@pytest.mark.parametrize("ahead", [1, 8])
def test_blocks_that_are_loaded_at_once_change_nothing(ahead: int) -> None:
    """Any number of them gives the same checksum."""
    size = 5 * 1024 + 300
    arena, names = frames_of(size, 1, random.Random(ahead))
    assert DeviceChecksums(CPU, ahead=ahead).check(arena, torch.tensor([0]), size, heads(names)).tolist() == [1]


@pytest.mark.parametrize("size", [pytest.param(77, marks=pytest.mark.extended), 1500])
def test_each_flipped_bit_is_found(size: int) -> None:
    """In the payload, each field of the header, the checksum, and the bytes behind it; only in the frame that has it."""
    chance = random.Random(size)
    fields = (0, 4, 6, 8, 24, 40, 72, 104, 108, 110, 112, 120, 128, 132, 144, 159, 160, 175, 176, 191)
    places = [0, size // 2, size - 1, *(size + field for field in fields)]
    one, names = frames_of(size, 1, chance)
    arena = one.repeat(len(places) + 1, 1)
    for number, place in enumerate(places):
        arena[number, place] ^= 1 << chance.randrange(8)
    slots = torch.arange(len(places) + 1)
    found = DeviceChecksums(CPU).check(arena, slots, size, heads(names * len(slots)))
    assert found.tolist() == [0] * len(places) + [1]


def as_another(data: memoryview, size: int, chance: random.Random) -> None:
    """A block of another name, whole."""
    seal(header_of(size, chance), data)


def encoded(data: memoryview, size: int, chance: random.Random) -> None:
    """The block, in a codec, as long as it is raw."""
    parts = bytes(data[size + 8 : size + 104])
    seal(Header(parts[:16], parts[16:32], parts[32:64], parts[64:96], 0, 1, 2 * size, size), data)


def decoded_longer(data: memoryview, size: int, chance: random.Random) -> None:
    """The block, raw, with a wrong length once decoded."""
    parts = bytes(data[size + 8 : size + 104])
    seal(Header(parts[:16], parts[16:32], parts[32:64], parts[64:96], 0, RAW, size + 1, size), data)


def keyed(data: memoryview, size: int, chance: random.Random) -> None:
    """The block, sealed with a key."""
    set_key(data, 5, chance.randbytes(12))
    data[-16:] = chance.randbytes(16)


def nothing(data: memoryview, size: int, chance: random.Random) -> None:
    data[:] = bytes(len(data))


def shuffled(data: memoryview, size: int, chance: random.Random) -> None:
    """Words of the payload in another order."""
    words = [bytes(data[at : at + 8]) for at in range(0, size - size % 8, 8)]
    chance.shuffle(words)
    data[: 8 * len(words)] = b"".join(words)


CHANGES: Sequence[Callable[[memoryview, int, random.Random], None]] = (
    as_another,
    encoded,
    decoded_longer,
    keyed,
    nothing,
    shuffled,
)


@pytest.mark.parametrize("size", [pytest.param(80, marks=pytest.mark.extended), 1032])
def test_a_device_accepts_what_the_host_accepts(size: int) -> None:
    """Whole frames that are not the wanted raw block are refused too, and the others in the same launch are not."""
    chance = random.Random(size)
    arena, names = frames_of(size, 2 * len(CHANGES), chance, group=3)
    for number, change in enumerate(CHANGES):
        change(view_of(arena, 2 * number)[: size + HEADER_BYTES], size, chance)
    slots = list(range(len(names)))
    chance.shuffle(slots)
    found = DeviceChecksums(CPU).check(arena, torch.tensor(slots), size, heads([names[slot] for slot in slots]))
    expected = [accepted_by_the_host(view_of(arena, slot)[: size + HEADER_BYTES], names[slot], size) for slot in slots]
    assert found.tolist() == expected == [slot % 2 == 1 for slot in slots]


def test_wrong_arguments_are_refused() -> None:
    """Slots that are too short or not aligned, and names of another length; no slots are no work."""
    checksums, slots = DeviceChecksums(CPU), torch.tensor([0])
    for frames in (torch.zeros(1, 256, dtype=torch.uint8), torch.zeros(1, 1004, dtype=torch.uint8)):
        with pytest.raises(ValueError, match="slots"):
            checksums.seal(frames, slots, 100)
    with pytest.raises(ValueError, match="64 bytes, not 3"):
        heads([b"abc"])
    arena, _ = frames_of(100, 1, random.Random(0))
    assert checksums.check(arena, slots[:0], 100, heads([])).tolist() == []
