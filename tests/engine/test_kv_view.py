"""Parts of blocks and layers as bytes: on the CPU as views, on a device as copies, and the same bytes from both."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lazy_queues import LazyQueues
from torch import Tensor

from foreword.disaggregation.kv_view import KVView
from foreword.engine.paged_layers import layout_of
from foreword.transfer.parts import payload_bytes
from foreword.transfer.wire_format import KVPart

BLOCKS, SIZE, LAYERS = 12, 4, 3
DEVICES = ["cpu", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))]


@dataclass
class Layer:
    k_blocks: Tensor
    v_blocks: Tensor


def layers_on(device: str, seed: int) -> dict[int, Layer]:
    """Layers 5, 7 and 9, whose keys and values have different widths."""
    draw = torch.Generator().manual_seed(seed)

    def tensor(width: int) -> Tensor:
        return torch.randn(BLOCKS, SIZE, 2, width, generator=draw).bfloat16().to(device)

    return {5 + 2 * number: Layer(tensor(8), tensor(6)) for number in range(LAYERS)}


def by_copies(layers: Mapping[int, Any]) -> KVView:
    """A view that copies as on a device, also for tensors on the CPU."""
    on_host = layers[5].k_blocks.device.type == "cpu"
    return KVView(layers, layout_of(layers, b"model"), (lambda: LazyQueues(1)) if on_host else None)


def by_views(layers: Mapping[int, Any]) -> KVView:
    return KVView(layers, layout_of(layers, b"model"))


@st.composite
def parts(draw: st.DrawFn) -> tuple[KVPart, list[int]]:
    """A part and the blocks that it is of, in any order, the last one perhaps not full."""
    blocks = draw(st.lists(st.integers(0, BLOCKS - 1), min_size=1, unique=True))
    first = draw(st.integers(0, LAYERS - 1))
    count = draw(st.integers(1, LAYERS - first))
    tokens = (len(blocks) - 1) * SIZE + draw(st.integers(1, SIZE))
    return KVPart(first, count, draw(st.integers(0, 50)), len(blocks), tokens, b""), blocks


def joined(buffers: list[Any]) -> bytes:
    return b"".join(map(bytes, buffers))


@pytest.mark.parametrize("device", DEVICES)
@given(parts(), st.integers(0, 100))
def test_copies_are_what_views_are(device: str, case: tuple[KVPart, list[int]], seed: int) -> None:
    """A part read by copy has the bytes of its view; a part written by copy changes the slots of its tokens in its
    layers only, also from read-only memory."""
    part, blocks = case
    there, here = layers_on("cpu", seed), layers_on(device, seed)
    views, copies = by_views(there), by_copies(here)
    payload = joined(views.read(part, blocks))
    assert len(payload) == payload_bytes(views.layout, part)
    assert joined(copies.read(part, blocks, copies.mark())) == payload
    noise = np.random.default_rng(seed).integers(0, 256, len(payload), np.uint8).tobytes()
    assert memoryview(noise).readonly
    views.write(part, blocks, memoryview(noise))
    copies.write(part, blocks, memoryview(noise), copies.mark())
    for number, layer in there.items():
        for one, other in ((layer.k_blocks, here[number].k_blocks), (layer.v_blocks, here[number].v_blocks)):
            assert torch.equal(one.view(torch.uint8), other.cpu().view(torch.uint8))
    assert joined(copies.read(part, blocks)) == noise


@pytest.mark.parametrize("device", DEVICES)
def test_what_was_read_stays(device: str) -> None:
    """Bytes that were copied out do not change when their blocks do, nor when more is read."""
    port = by_copies(layers_on(device, 1))
    part = KVPart(0, LAYERS, 0, 3, 3 * SIZE, b"")
    buffers = port.read(part, [3, 1, 2], port.mark())
    before = joined(buffers)
    port.write(part, [3, 1, 2], memoryview(bytes(len(before))), port.mark())
    assert joined(port.read(part, [3, 1, 2])) == bytes(len(before))
    assert joined(buffers) == before


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_order_on_a_gpu() -> None:
    """A part that another thread reads includes the work before its mark, and a part that it writes is not overwritten
    by that work, although the engine's stream is busy for long."""
    device = f"cuda:{torch.cuda.device_count() - 1}"
    layers = layers_on(device, 2)
    port = by_copies(layers)
    part = KVPart(0, LAYERS, 0, BLOCKS, BLOCKS * SIZE, b"")
    blocks = list(range(BLOCKS))
    size = payload_bytes(port.layout, part)
    big = torch.ones(4096, 4096, device=device)

    def engine(value: int) -> Any:
        work = big
        for _ in range(50):
            work = (work @ big).clamp(0, 1)
        for layer in layers.values():
            layer.k_blocks.view(torch.uint8).fill_(value)
            layer.v_blocks.view(torch.uint8).fill_(value)
        return port.mark()

    with ThreadPoolExecutor(1) as other:
        for value in (1, 2):
            buffers = other.submit(port.read, part, blocks, engine(value)).result()
            assert joined(buffers) == bytes([value]) * size
            payload = memoryview(bytes([7]) * size)
            other.submit(port.write, part, blocks, payload, engine(value)).result()
            torch.cuda.synchronize(device)
            assert joined(port.read(part, blocks)) == bytes(payload)
