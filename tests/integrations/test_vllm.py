"""A real vLLM with Foreword's stores. Needs FOREWORD_VLLM_PYTHON, an interpreter with vLLM; skipped without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from vllm_process import BLOCK, answers, attempt, disk, make_model, needs_vllm, prompts, vllm

pytestmark = needs_vllm


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("vllm") / "model")


LENGTHS = [10, 31, 32, 33, 63, 64, 65, 96, 100, 127, 128, 129, 200, 256, 300]


def expected_hit(length: int) -> int:
    """Full blocks. Of a prompt of full blocks vLLM recomputes the last token, and counts it as a hit."""
    return length // BLOCK * BLOCK


def test_the_same_answers_and_a_warm_restart(model: Path, tmp_path: Path) -> None:
    """Answers of vLLM with a store are those without, around block boundaries: computed, loaded from memory after its own cache
    was reset, and loaded from disk in a new process."""
    asked = prompts(1, LENGTHS)
    alone = vllm(model, None, [asked])["rounds"][0]
    tiers = ["memory://?size=64MiB", disk(tmp_path)]
    first = vllm(model, tiers, [asked, asked])
    second = vllm(model, tiers, [asked], forked=False)
    for found in (*first["rounds"], *second["rounds"]):
        assert answers(found) == answers(alone)
    for found in (first["rounds"][1], second["rounds"][0]):
        assert [one["cached"] for one in found] == [expected_hit(length) for length in LENGTHS]
    assert first["closed_in_time"] and first["status"]["dropped"] == 0


def test_damaged_blocks_are_computed(model: Path, tmp_path: Path) -> None:
    """Flipped bits in the store are detected, and vLLM recomputes the blocks."""
    asked = prompts(2, [200, 300])
    first = vllm(model, [disk(tmp_path)], [asked])
    files = [
        path for path in (tmp_path / "kv").rglob("*") if path.is_file() and path.read_bytes()[-192:-188] == b"FWKV"
    ]
    assert files
    for path in files[::2]:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 4
        path.write_bytes(data)
    second = vllm(model, [disk(tmp_path)], [asked])
    assert answers(second["rounds"][0]) == answers(first["rounds"][0])
    assert second["bad"]["disk"]["checksum"] >= 1


def test_other_weights_under_the_same_path(tmp_path: Path) -> None:
    """A model that replaces another under the same path does not hit the other's blocks."""
    folder, asked = tmp_path / "model", prompts(3, [150])
    make_model(folder, 1)
    vllm(folder, [disk(tmp_path)], [asked])
    make_model(folder, 2)
    alone = vllm(folder, None, [asked])["rounds"][0]
    found = vllm(folder, [disk(tmp_path)], [asked])["rounds"][0]
    assert found[0]["tokens"] == alone[0]["tokens"] and found[0]["cached"] == 0


def test_cache_salt(model: Path, tmp_path: Path) -> None:
    """Requests with another cache_salt miss; those with the same one hit."""
    asked = prompts(4, [100])
    vllm(model, [disk(tmp_path)], [asked], **{"with": {"cache_salt": "ann"}})
    assert vllm(model, [disk(tmp_path)], [asked], **{"with": {"cache_salt": "bob"}})["rounds"][0][0]["cached"] == 0
    assert vllm(model, [disk(tmp_path)], [asked], **{"with": {"cache_salt": "ann"}})["rounds"][0][0]["cached"] == 96


@pytest.mark.slow
def test_a_tier_that_takes_blocks_at_their_second_use(model: Path, tmp_path: Path) -> None:
    """The second of two prompts of one round finds the start on the device: these blocks are written, the others are not."""
    [one] = prompts(5, [100])
    asked = [one, [*one, *prompts(6, [90])[0]]]
    first = vllm(model, [f"{disk(tmp_path)}&admit=second"], [asked])
    assert [one["cached"] for one in first["rounds"][0]] == [0, 96] and first["status"]["saved"] == 3
    second = vllm(model, [disk(tmp_path)], [asked[1:]])
    assert answers(second["rounds"][0]) == answers(first["rounds"][0][1:]) and second["rounds"][0][0]["cached"] == 96
    # So are those of a prompt that is asked again and fills no further block.
    again = vllm(model, [f"{disk(tmp_path / 'again')}&admit=second"], [[one, one]], max_tokens=1)
    assert [one["cached"] for one in again["rounds"][0]] == [0, 96] and again["status"]["saved"] == 3


@pytest.mark.parametrize("connector", ["PatientConnector", "ForewordConnector"])
def test_small_memory_and_many_prompts(model: Path, tmp_path: Path, connector: str) -> None:
    """Answers are the same as without a store where the KV cache is too small for the working set, and under preemptions.
    Blocks of answers are saved too. The connector that users have loads what is faster than computing, which depends on the
    machine; the patient one loads whatever is there."""
    asked = prompts(5, [180, 170, 160, 150, 140, 130])
    alone = vllm(model, None, [asked, asked], max_tokens=40)["rounds"]
    found = vllm(
        model,
        ["memory://?size=64MiB", disk(tmp_path)],
        [asked, asked],
        max_tokens=40,
        kv_bytes=3 << 19,
        connector=connector,
    )
    for mine, theirs in zip(found["rounds"], alone, strict=True):
        assert answers(mine) == answers(theirs)
    assert found["status"]["loaded"] > 0 or connector == "ForewordConnector"


def test_resets(model: Path, tmp_path: Path) -> None:
    """After a reset of vLLM's prefix cache the stores still hit. After a reset of the connector, which means that weights may
    have changed, blocks saved before are misses and blocks saved later are hits. A new process hits the first ones again."""
    asked = prompts(6, [130])
    found = vllm(model, ["memory://?size=64MiB", disk(tmp_path)], [asked] * 4, resets=[False, True, False])["rounds"]
    assert [one[0]["cached"] for one in found] == [0, 128, 0, 128]
    assert len({tuple(answers(one)[0]) for one in found}) == 1
    assert vllm(model, [disk(tmp_path)], [asked])["rounds"][0][0]["cached"] == 128


def make_windowed(folder: Path, kind: str) -> Path:
    """Attention over a window of 96 tokens, in all layers ("mistral") or all but every third ("gemma3")."""
    torch.manual_seed(3)
    common: dict[str, Any] = {
        "vocab_size": 512, "hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 32, "initializer_range": 0.2, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": None,
        "eos_token_id": None, "sliding_window": 96,
    }  # fmt: skip
    if kind == "mistral":
        transformers.MistralForCausalLM(transformers.MistralConfig(num_hidden_layers=3, **common)).save_pretrained(
            folder
        )
    else:
        layers = ["sliding_attention", "sliding_attention", "full_attention"] * 2
        transformers.Gemma3ForCausalLM(
            transformers.Gemma3TextConfig(num_hidden_layers=6, layer_types=layers, query_pre_attn_scalar=32, **common)
        ).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["mistral", "gemma3"])
def test_sliding_windows(kind: str, tmp_path: Path) -> None:
    """Sliding windows in all layers, or in some: the same answers, although blocks behind the window are not loaded."""
    folder, asked = make_windowed(tmp_path / "model", kind), prompts(7, [90, 128, 200, 330, 400])
    alone = vllm(folder, None, [asked])["rounds"][0]
    first = vllm(folder, ["memory://?size=64MiB", disk(tmp_path)], [asked, asked], llm={"max_num_batched_tokens": 128})
    second = vllm(folder, [disk(tmp_path)], [asked])
    for found in (*first["rounds"], *second["rounds"]):
        assert answers(found) == answers(alone)
    for found in (first["rounds"][1], second["rounds"][0]):
        assert [one["cached"] for one in found] == [expected_hit(len(prompt)) for prompt in asked]
    whole = sum(len(prompt) // BLOCK for prompt in asked)
    assert second["status"]["loaded"] < (whole if kind == "mistral" else 2 * whole)


def test_without_the_hybrid_manager(tmp_path: Path) -> None:
    """A model of several KV groups also runs with vLLM's hybrid KV cache manager switched off: its layers are one group then,
    and what was saved with the manager is not found."""
    folder, asked = make_windowed(tmp_path / "model", "gemma3"), prompts(8, [100])
    store = [disk(tmp_path)]
    grouped = vllm(folder, store, [asked], llm={"disable_hybrid_kv_cache_manager": False})
    merged = vllm(folder, store, [asked, asked], llm={"disable_hybrid_kv_cache_manager": True})
    assert [one["cached"] for found in merged["rounds"] for one in found] == [0, 96]
    assert merged["status"]["saved"] == 3 < grouped["status"]["saved"]
    assert answers(merged["rounds"][0]) == answers(merged["rounds"][1])


def test_bad_settings(model: Path) -> None:
    """An unknown key in the settings makes the start fail with a message that names it."""
    job = {"model": str(model), "store": ["memory://?size=64MiB"], "rounds": [], "extra": {"stageing": "64MiB"}}
    refused = attempt("vllm_script.py", job)
    assert refused.returncode != 0 and "unknown key 'stageing'" in refused.stderr
