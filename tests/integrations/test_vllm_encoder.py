"""Images under a real vLLM: KV and encoder outputs in Foreword's stores. Needs FOREWORD_VLLM_PYTHON; skipped without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm_process import disk, needs_vllm, run

from foreword.referee.models import IMAGES

pytestmark = needs_vllm


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return IMAGES.build(tmp_path_factory.mktemp("vision") / "model")


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
    other = IMAGES.build(tmp_path / "other", 1)
    assert ask(other, [asked], encoder_store=[disk(tmp_path)])[0]["encoded"] == 6


def test_outputs_of_a_server_with_other_settings(model: Path, tmp_path: Path) -> None:
    """A server whose settings differ in what does not change outputs encodes one image again, sees that the store's output is
    the same, and uses all others, also after a restart, and where its first requests come before the store has answered."""
    asked, other = [[number] for number in range(8)], {"max_model_len": 448}
    first = ask(model, [asked], encoder_store=[disk(tmp_path)])[0]
    one = ask(model, [asked[:1]], encoder_store=[disk(tmp_path)], llm=other, late=True)[0]
    rest = ask(model, [asked], encoder_store=[disk(tmp_path)], llm=other, late=True)[0]
    assert (first["encoded"], one["encoded"], rest["encoded"]) == (8, 1, 0)
    assert tokens(rest) == tokens(first)


def test_a_namespace_that_changes_while_a_step_is_planned(model: Path, tmp_path: Path) -> None:
    """An output that the scheduler has found is used, also if it learns meanwhile that the server's outputs are in another
    namespace: vLLM would end at one that is missing."""
    asked, store, other = [[[0]]], [disk(tmp_path)], {"max_model_len": 448}
    first = ask(model, asked, encoder_store=store, llm=other)[0]
    ask(model, asked, encoder_store=store)
    found = ask(model, asked, encoder_store=store, llm=other, switched=True)[0]
    assert (first["encoded"], found["encoded"]) == (1, 0) and tokens(found) == tokens(first)


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


def test_an_output_that_was_read_for_another_image(model: Path, tmp_path: Path) -> None:
    """An output is read for a request that ends before it uses it. A request whose other image has the same identifier does
    not get it: its own image is encoded."""
    named = {"uuids": [[["logo"]], [["logo"]]], "encoder_store": [disk(tmp_path)]}
    asked = [[[5, None, None]], [[6, None, None]]]
    right = ask(model, asked)
    ask(model, asked[:1], **named)
    found = ask(model, asked, **named, abandon=True, llm={"mm_processor_cache_gb": 0})
    assert tokens(found[1]) == tokens(right[1]) != tokens(right[0]) and found[1]["encoded"] == 1
