"""Cache misses of a real vLLM behind the router: each planted cause is named, with its place. Needs FOREWORD_VLLM_PYTHON, an
interpreter with vLLM; skipped without it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers
from router_parts import RouterProcess
from test_misses import EXPECTED, NAMES, TEMPLATE, conversation, next_turn
from vllm_behind_router import vllm_behind_router
from vllm_process import needs_vllm

pytestmark = needs_vllm
MARKERS = ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|begin|>"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with random weights, one token per byte, and a chat template that shows everything."""
    folder = tmp_path_factory.mktemp("vllm") / "model"
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    inner = tokenizers.Tokenizer(tokenizers.models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<|begin|>", eos_token="<|end|>", additional_special_tokens=MARKERS[:3]
    )
    tokenizer.chat_template = TEMPLATE.strip()
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=8192, eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.bos_token_id, pad_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def router(model: Path) -> Iterator[RouterProcess]:
    with vllm_behind_router(model, model.parent / "vllm.log") as started:
        yield started


@pytest.mark.parametrize("name", EXPECTED)
def test_planted_causes(name: str, router: RouterProcess) -> None:
    """A change that a client made between two turns is named, with its place in the body."""
    with router.http() as client:
        for body in (conversation(NAMES[name]), next_turn(name, NAMES[name])):
            # vLLM shows tools to the model also if it shall not call them; calling needs a parser.
            response = client.post("/v1/chat/completions", json={**body, "model": "tiny", "tool_choice": "none"})
            assert response.status_code == 200, response.text
    report = response.json()["cache_report"]
    assert (report["cause"], report["where"]) == EXPECTED[name], report
    assert (report["tokens_lost"] == 0) == (name == "nothing")
