"""Images under a real vLLM: KV and encoder outputs in Foreword's stores. Needs FOREWORD_VLLM_PYTHON; skipped without."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from vllm_process import disk, needs_vllm, run

pytestmark = needs_vllm

SPECIAL = ["<fake_token_around_image>", "<image>", "<global-img>", "<end_of_utterance>"]
SIZE = 56


def make_vision_model(folder: Path, seed: int = 0) -> Path:
    """A small random Idefics 3: its processor needs no torchvision."""
    torch.manual_seed(seed)
    words = [f"t{number}" for number in range(512 - len(SPECIAL))] + SPECIAL
    common = {"initializer_range": 0.2, "num_attention_heads": 4, "intermediate_size": 192}
    config = transformers.Idefics3Config(
        vision_config={**common, "hidden_size": 64, "num_hidden_layers": 2, "image_size": SIZE, "patch_size": 14},
        text_config={
            "model_type": "llama", "vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 3,
            "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512, "pad_token_id": 0,
            "bos_token_id": None, "eos_token_id": None, **common,
        },
        scale_factor=2, image_token_id=words.index("<image>"), pad_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    transformers.Idefics3ForConditionalGeneration(config).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="t0", pad_token="t0", additional_special_tokens=SPECIAL
    ).save_pretrained(folder)
    longest = {"longest_edge": SIZE}
    processor = {
        "image_processor_type": "Idefics3ImageProcessor", "processor_class": "Idefics3Processor",
        "size": longest, "max_image_size": longest, "do_image_splitting": False, "do_resize": True,
        "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True, "do_pad": True, "do_convert_rgb": True,
        "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 1,
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    (folder / "processor_config.json").write_text(
        json.dumps({"processor_class": "Idefics3Processor", "image_seq_len": 4})
    )
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model(tmp_path_factory.mktemp("vision") / "model")


def ask(model: Path, rounds: Any, **job: Any) -> list[dict[str, Any]]:
    given = {"model": str(model), "store": None, "rounds": rounds, **job}
    found: list[dict[str, Any]] = run("vllm_encoder_script.py", given)["rounds"]
    return found


def tokens(found: dict[str, Any]) -> list[list[int]]:
    return [one["tokens"] for one in found["answers"]]


def test_a_hundred_images_after_a_restart(model: Path, tmp_path: Path) -> None:
    """100 images that are asked again after a restart are not encoded again, and the answers are the same."""
    asked = [[number] for number in range(100)]
    alone = ask(model, [asked])[0]
    first = ask(model, [asked], encoder_store=[disk(tmp_path)])[0]
    second = ask(model, [asked], encoder_store=[disk(tmp_path)])[0]
    assert (alone["encoded"], first["encoded"], second["encoded"]) == (100, 100, 0)
    assert tokens(first) == tokens(alone) == tokens(second)
    assert len({tuple(one) for one in tokens(alone)}) > 50


def test_damaged_outputs_are_encoded(model: Path, tmp_path: Path) -> None:
    """Outputs whose bytes were changed in the store, and those of other weights, are not used."""
    asked = [[number] for number in range(6)]
    first = ask(model, [asked], encoder_store=[disk(tmp_path)])[0]
    files = [
        path for path in (tmp_path / "kv").rglob("*") if path.is_file() and path.read_bytes()[-192:-188] == b"FWKV"
    ]
    assert len(files) == 6
    for path in files[:3]:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 4
        path.write_bytes(data)
    second = ask(model, [asked], encoder_store=[disk(tmp_path)])[0]
    assert second["encoded"] == 3 and tokens(second) == tokens(first)
    other = make_vision_model(tmp_path / "other", 1)
    assert ask(other, [asked], encoder_store=[disk(tmp_path)])[0]["encoded"] == 6


def test_outputs_of_a_server_with_other_settings(model: Path, tmp_path: Path) -> None:
    """A server whose settings differ in what does not change outputs encodes one image again, sees that the store's output is
    the same, and uses all others, also after a restart."""
    asked, other = [[number] for number in range(8)], {"max_model_len": 448}
    first = ask(model, [asked], encoder_store=[disk(tmp_path)])[0]
    one = ask(model, [asked[:1]], encoder_store=[disk(tmp_path)], llm=other)[0]
    rest = ask(model, [asked], encoder_store=[disk(tmp_path)], llm=other)[0]
    assert (first["encoded"], one["encoded"], rest["encoded"]) == (8, 1, 0)
    assert tokens(rest) == tokens(first)


def test_images_in_prompts(model: Path, tmp_path: Path) -> None:
    """KV of prompts with images is found after a restart, images that are covered are not encoded, and prompts with other
    images, or images elsewhere, miss. An identifier that a client gives to other pixels in another process does not hit."""
    asked = [[1, None, 2, None], [2, None, 1, None], [None, 1, None], [None, None, None]]
    others = [[3, None, 2, None], [2, None, 3, None], [None, 4, None], [None, None, 1]]
    alone = ask(model, [asked, others])
    both = {"store": [disk(tmp_path)], "encoder_store": [disk(tmp_path)]}
    ask(model, [asked], **both)
    second = ask(model, [asked, others], **both)
    assert [tokens(one) for one in second] == [tokens(one) for one in alone]
    cached = [[one["cached"] for one in found["answers"]] for found in second]
    # Blocks of 32 tokens. An image takes 8 tokens, a null 20. The first blocks differ, except in the last prompts.
    assert cached == [[64, 64, 64, 64], [0, 0, 0, 32]]
    assert (second[0]["encoded"], second[1]["encoded"]) == (0, 2)

    named = {"uuids": [[["logo"]]], "store": [disk(tmp_path)], "encoder_store": [disk(tmp_path)]}
    right = ask(model, [[[5, None, None]], [[6, None, None]]])
    assert tokens(ask(model, [[[5, None, None]]], **named)[0]) == tokens(right[0])
    swapped = ask(model, [[[6, None, None]]], **named)[0]
    assert tokens(swapped) == tokens(right[1])
    assert swapped["answers"][0]["cached"] == 0 and swapped["encoded"] == 1
