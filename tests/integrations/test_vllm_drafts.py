"""Draft models under a real vLLM. Needs FOREWORD_VLLM_PYTHON, an interpreter with vLLM; skipped without."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM, LlamaConfig, LlamaForCausalLM
from vllm_process import answers, disk, needs_vllm, run

pytestmark = needs_vllm

_HIDDEN = 128
_NEW = 48


def write_models(folder: Path, seed: int) -> tuple[Path, Path]:
    """A random Llama, and an EAGLE head that guesses about half of its tokens: a copy of its first layer over the embeddings.

    The rows of the embeddings have a root mean square of 1, since a head has no norm before its first layer."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=512, hidden_size=_HIDDEN, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096, initializer_range=0.15, tie_word_embeddings=False,
        bos_token_id=1, eos_token_id=2, dtype="float32",
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        rows = model.model.embed_tokens.weight
        rows.normal_()
        rows.div_(rows.pow(2).mean(-1, keepdim=True).sqrt())
        for last in (model.model.layers[1].self_attn.o_proj, model.model.layers[1].mlp.down_proj):
            last.weight.mul_(0.3)
    model.save_pretrained(folder / "target")
    first = {
        name.removeprefix("model."): tensor.contiguous()
        for name, tensor in model.state_dict().items()
        if name.startswith("model.layers.0.") and "input_layernorm" not in name
    }
    first["fc.weight"] = torch.cat([torch.eye(_HIDDEN), torch.zeros(_HIDDEN, _HIDDEN)], dim=1)
    head = folder / "head"
    head.mkdir()
    save_file(first, head / "model.safetensors", metadata={"format": "pt"})
    of_head = {**config.to_dict(), "num_hidden_layers": 1, "architectures": ["LlamaForCausalLM"]}
    (head / "config.json").write_text(json.dumps(of_head), encoding="utf-8")
    return folder / "target", head


def write_mtp_model(folder: Path, seed: int) -> Path:
    """A random GLM-4 with experts, and an MTP layer that guesses about half of its tokens, in the same way."""
    torch.manual_seed(seed)
    config = Glm4MoeConfig(
        vocab_size=512, hidden_size=_HIDDEN, intermediate_size=256, moe_intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, n_routed_experts=4, num_experts_per_tok=2,
        n_shared_experts=1, first_k_dense_replace=0, max_position_embeddings=4096, initializer_range=0.15,
        tie_word_embeddings=False, bos_token_id=1, eos_token_id=2, pad_token_id=0, dtype="float32",
    )  # fmt: skip
    config.num_nextn_predict_layers = 1
    model = Glm4MoeForCausalLM(config)
    with torch.no_grad():
        rows = model.model.embed_tokens.weight
        rows.normal_()
        rows.div_(rows.pow(2).mean(-1, keepdim=True).sqrt())
        model.model.layers[1].self_attn.o_proj.weight.mul_(0.3)
        for one in model.model.layers[1].mlp.parameters():
            one.mul_(0.3)
    model.save_pretrained(folder / "target")
    saved = folder / "target" / "model.safetensors"
    tensors, layer = load_file(saved), "model.layers.2."
    first = {name: one for name, one in tensors.items() if name.startswith("model.layers.0.")}
    tensors |= {layer + name.removeprefix("model.layers.0."): one.clone() for name, one in first.items()}
    tensors[f"{layer}eh_proj.weight"] = torch.cat([torch.eye(_HIDDEN), torch.zeros(_HIDDEN, _HIDDEN)], dim=1)
    tensors |= {f"{layer}{name}.weight": torch.ones(_HIDDEN) for name in ("enorm", "hnorm", "shared_head.norm")}
    tensors[f"{layer}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{layer}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, saved, metadata={"format": "pt"})
    return folder / "target"


def prompts_of(block: int, draw: random.Random) -> list[list[int]]:
    """Prompts of all lengths, some of them a whole number of blocks, and pairs that part at the end of a block: the KV that a
    head has there depends on the token that follows."""

    def tokens(count: int) -> list[int]:
        return [draw.randrange(3, 500) for _ in range(count)]

    found = [tokens(length) for length in (3 * block, 5 * block - 1, 700, 1000, 4 * block + 7)]
    for _ in range(4):
        start = tokens(draw.randrange(2, 5) * block)
        found += [start + tokens(draw.randrange(2, 60)), start + tokens(draw.randrange(2, 60))]
    return found


@pytest.mark.parametrize(("method", "block"), [("eagle", 32), ("eagle", 128), ("mtp", 32)])
def test_a_hit_with_a_draft_model(method: str, block: int, tmp_path: Path) -> None:
    """A prompt has as many cached tokens from a store with an EAGLE head or an MTP layer as without drafts, also those of the
    last block, which vLLM drops from its own hits. The answers are those of vLLM alone, and as many drafts are accepted after a
    hit as after a computation, within one percent."""
    drafts: dict[str, Any] = {"method": method, "num_speculative_tokens": 3}
    if method == "mtp":
        target = write_mtp_model(tmp_path, block)
    else:
        target, head = write_models(tmp_path, block)
        drafts["model"] = str(head)
    ask = {"do": "ask", "count": _NEW}

    def one(store: list[str] | None, *passes: Any, **llm: Any) -> dict[str, Any]:
        return {"store": store, "llm": llm, "passes": list(passes)}

    runs = [
        one(None, ask, enable_prefix_caching=False, speculative_config=drafts),
        one([disk(tmp_path / "without")], ask, "forget", ask),
        one([disk(tmp_path / "with")], ask, "forget", ask, speculative_config=drafts),
        one([disk(tmp_path / "with")], ask, speculative_config=drafts),
    ]
    job = {
        "model": str(target),
        "kv_bytes": 64 << 20,
        "llm": {"block_size": block, "max_model_len": 2048, "max_num_batched_tokens": 512},
        "prompts": prompts_of(block, random.Random(block)),
        "runs": runs,
    }
    alone, without, drafted, restarted = run("vllm_kinds_script.py", job)["results"]
    [computed] = alone["answers"]
    for each in (*without["answers"], *drafted["answers"], *restarted["answers"]):
        assert answers(each) == answers(computed)
    hits = without["answers"][1]
    for found in (drafted["answers"][1], restarted["answers"][0]):
        assert [one["cached"] for one in found] == [one["cached"] for one in hits]
        accepted, before = (sum(_NEW - one["steps"] for one in some) for some in (found, computed))
        print(
            f"{method}, block {block}: {before} of {len(found) * _NEW} tokens came from drafts, {accepted} after hits"
        )
        assert before > len(found) * _NEW / 5, "the head guesses nothing: this shows nothing"
        assert abs(accepted - before) <= 0.01 * len(found) * _NEW
