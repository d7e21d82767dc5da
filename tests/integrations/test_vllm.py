"""A real vLLM over Foreword's stores. Needs an environment with vLLM, named in FOREWORD_VLLM_PYTHON; skipped without."""

from __future__ import annotations

import json
import os
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

PYTHON = os.environ.get("FOREWORD_VLLM_PYTHON", "")
pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="FOREWORD_VLLM_PYTHON names no interpreter with vLLM"),
    pytest.mark.timeout(600),
]

CHECKOUT = Path(__file__).parent.parent.parent


def make_model(folder: Path, seed: int) -> None:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=192, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, initializer_range=0.2, max_position_embeddings=512,
        pad_token_id=0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vllm") / "model"
    make_model(folder, 0)
    return folder


def vllm(model: Path, store: list[str] | None, rounds: list[list[list[int]]], **job: Any) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1"}
    script = Path(__file__).parent / "vllm_script.py"
    given = {"model": str(model), "store": store, "rounds": rounds, **job}
    done = subprocess.run(
        [PYTHON, str(script), json.dumps(given)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def prompts(seed: int, lengths: list[int]) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(1, 500) for _ in range(length)] for length in lengths]


def disk(folder: Path) -> str:
    return f"disk://{folder}/kv?size=256MiB"


LENGTHS = [10, 31, 32, 33, 63, 64, 65, 96, 100, 127, 128, 129, 200, 256, 300]


def expected_hit(length: int) -> int:
    """Whole blocks. Of a prompt that is whole blocks vLLM computes the last token again, and counts it as a hit."""
    return length // 32 * 32


def test_the_same_answers_and_a_warm_restart(model: Path, tmp_path: Path) -> None:
    """vLLM with the store answers as vLLM without it does, at every kind of block boundary, when it computes, when it loads
    from memory what its own cache forgot, and in a fresh process that loads from disk (R24, R25)."""
    asked = prompts(1, LENGTHS)
    alone = vllm(model, None, [asked])["rounds"][0]
    tiers = ["memory://?size=64MiB", disk(tmp_path)]
    first = vllm(model, tiers, [asked, asked])
    second = vllm(model, tiers, [asked])
    for found in (*first["rounds"], *second["rounds"]):
        assert [one["tokens"] for one in found] == [one["tokens"] for one in alone]
    for found in (first["rounds"][1], second["rounds"][0]):
        assert [one["cached"] for one in found] == [expected_hit(length) for length in LENGTHS]
    assert first["closed_in_time"] and first["status"]["dropped"] == 0


def test_damaged_blocks_are_computed(model: Path, tmp_path: Path) -> None:
    """Bytes that were flipped in the store never reach an answer: they are found, and vLLM computes (R25)."""
    asked = prompts(2, [200, 300])
    first = vllm(model, [disk(tmp_path)], [asked])
    files = [path for path in (tmp_path / "kv").rglob("*") if path.is_file() and path.read_bytes()[:4] == b"FWKV"]
    assert files
    for path in files[::2]:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 4
        path.write_bytes(data)
    second = vllm(model, [disk(tmp_path)], [asked])
    assert [one["tokens"] for one in second["rounds"][0]] == [one["tokens"] for one in first["rounds"][0]]
    assert second["bad"]["disk"]["checksum"] >= 1


def test_other_weights_under_the_same_path(tmp_path: Path) -> None:
    """A model that was replaced under its path gives its own answers, and finds nothing of the other's (R25)."""
    folder, asked = tmp_path / "model", prompts(3, [150])
    make_model(folder, 1)
    vllm(folder, [disk(tmp_path)], [asked])
    make_model(folder, 2)
    alone = vllm(folder, None, [asked])["rounds"][0]
    found = vllm(folder, [disk(tmp_path)], [asked])["rounds"][0]
    assert found[0]["tokens"] == alone[0]["tokens"] and found[0]["cached"] == 0


def test_salts_are_kept_apart(model: Path, tmp_path: Path) -> None:
    """Requests of another cache_salt find nothing; those of the same one do."""
    asked = prompts(4, [100])
    vllm(model, [disk(tmp_path)], [asked], **{"with": {"cache_salt": "ann"}})
    assert vllm(model, [disk(tmp_path)], [asked], **{"with": {"cache_salt": "bob"}})["rounds"][0][0]["cached"] == 0
    assert vllm(model, [disk(tmp_path)], [asked], **{"with": {"cache_salt": "ann"}})["rounds"][0][0]["cached"] == 96


def test_small_memory_and_many_prompts(model: Path, tmp_path: Path) -> None:
    """With a cache of its own too small for the working set, and requests preempted, vLLM gives the same answers from the
    store as it does alone; answers are kept too."""
    asked = prompts(5, [180, 170, 160, 150, 140, 130])
    alone = vllm(model, None, [asked, asked], max_tokens=40)["rounds"]
    found = vllm(model, ["memory://?size=64MiB", disk(tmp_path)], [asked, asked], max_tokens=40, kv_bytes=3 << 19)
    for mine, theirs in zip(found["rounds"], alone, strict=True):
        assert [one["tokens"] for one in mine] == [one["tokens"] for one in theirs]
    assert found["status"]["loaded"] > 0
