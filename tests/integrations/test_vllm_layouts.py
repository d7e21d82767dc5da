"""vLLM's KV caches as rows of blocks. vLLM's own code builds the layouts: those tests need FOREWORD_VLLM_PYTHON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from vllm_process import make_model, needs_vllm, run

from foreword.errors import ModelUnsupported
from foreword.integrations.vllm.kv_views import block_views

KINDS = {
    "attention", "latent", "per-head scales", "fp8", "packed latent", "sparse latent", "compressed keys", "DeepSeek V4",
    "DeepSeek V4 packed", "Mamba", "Mamba2", "gated delta net", "delta attention", "short convolution", "linear attention",
    "window", "window of other heads", "chunked", "unequal heads", "shared KV",
}  # fmt: skip
BACKENDS = {
    "FLASH_ATTN", "TRITON_ATTN", "FLEX_ATTENTION", "CPU_ATTN", "ROCM_ATTN", "TURBOQUANT", "HPC_ATTN", "CPU_MLA", "AMX_MLA",
    "TRITON_MLA", "FLASHMLA", "FLASHMLA_SPARSE", "FLASHMLA_SPARSE_DSV4", "FLASHINFER_MLA_SPARSE_DSV4",
}  # fmt: skip
LAYOUTS = {"LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"}


@pytest.fixture(scope="module", params=[pytest.param(None, marks=needs_vllm, id="vLLM")])
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Outcomes of every case, block size, model runner and layout."""
    model: Path = make_model(tmp_path_factory.mktemp("model"))
    tried: list[dict[str, Any]] = run("vllm_layouts_script.py", {"model": str(model)})["found"]
    return tried


def test_blocks_move_in_every_layout_of_both_model_runners(found: list[dict[str, Any]]) -> None:
    """Blocks go through frames into other blocks, for every KV layout that vLLM's model runners V1 and V2 can register here.

    vLLM's own view of each layer then has their content. No other byte changes: not of other blocks, groups or padding.
    """
    built = [one for one in found if "refused" not in one]
    assert [one for one in built if one["wrong"]] == []
    for runner in ("V1", "V2"):
        mine = [one for one in built if one["runner"] == runner]
        assert {one["kind"] for one in mine} == KINDS
        assert {one["layout"] for one in mine} == LAYOUTS
        assert {one["backend"] for one in mine} >= BACKENDS
        assert {one["size"] for one in mine} == {16, 32, 64, 128, 256, 512}
        assert max(len(one["groups"]) for one in mine) >= 6
        for special in ("kernel_blocks", "kernel_blocks_apart", "padded"):
            assert any(one[special] for one in mine)


def test_payloads_differ_only_by_the_order_of_heads_and_states(found: list[dict[str, Any]]) -> None:
    """A block's payload is the same in all layouts with heads before states, and in all with states before heads, if vLLM puts
    the same layers into groups and does not divide blocks for its kernels."""
    orders: dict[tuple[object, ...], set[str]] = {}
    for one in found:
        if "refused" not in one and not one["kernel_blocks"]:
            heads_first = one["layout"].index("H") < one["layout"].index("N")
            key = (one["kind"], one["backend"], one["size"], repr(one["groups"]), heads_first)
            orders.setdefault(key, set()).add(one["payloads"])
    assert orders and all(len(digests) == 1 for digests in orders.values())


def test_both_model_runners_register_the_same(found: list[dict[str, Any]]) -> None:
    """vLLM refuses a layout for both model runners or for none."""
    outcomes: dict[str, list[tuple[object, ...]]] = {"V1": [], "V2": []}
    for one in found:
        outcomes[one["runner"]].append((one["kind"], one["backend"], one["size"], one["layout"], "refused" in one))
    assert outcomes["V1"] == outcomes["V2"]


def test_blocks_of_the_manager_are_rows() -> None:
    """Where kernels use smaller blocks, the rows are the manager's blocks. Layers that share their KV count once."""
    cache = torch.arange(6 * 2 * 3 * 4).view(6, 2, 3, 4)
    (rows,) = block_views({"a": cache, "b": cache}, ["a", "b"], 3)
    assert rows.shape[0] == 3 and all(row.is_contiguous() for row in rows)
    assert torch.equal(rows.flatten(1), cache.view(3, 48))
    assert rows.data_ptr() == cache.data_ptr()


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        ([torch.zeros(4, 1, 1, 8)], "is a list"),
        (torch.zeros(64), "not [blocks, heads, states, content]"),
        (torch.zeros(2, 4, 1, 1, 8), "not [blocks, heads, states, content]"),
        (torch.zeros(6, 1, 1, 8), "with 4 blocks"),
        (torch.zeros(0, 1, 1, 8), "with 4 blocks"),
        (torch.zeros(4, 1, 2, 16)[:, :, :, ::2], "single elements"),
    ],
)
def test_an_unknown_arrangement_is_refused(cache: Any, message: str) -> None:
    """An arrangement that vLLM does not document is refused with the layer's name or shape, never guessed."""
    with pytest.raises(ModelUnsupported, match="vLLM's") as caught:
        block_views({"layer": cache}, ["layer"], 4)
    assert message in caught.value.message


def test_a_layer_without_kv_is_refused() -> None:
    """A layer that vLLM lists in a group but does not register is refused by name."""
    with pytest.raises(ModelUnsupported, match=r"model\.layers\.3"):
        block_views({}, ["model.layers.3"], 4)
