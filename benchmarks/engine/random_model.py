"""Makes a model with random weights, as a Hugging Face folder, for measuring speed.

    python -m benchmarks.engine.random_model 88m OUTDIR [--kind KIND]

Kinds: a Llama, also with one embedding for input and output (tied); a Gemma 3 with five layers of 512-token windows to one with
full attention (windows); a Mixtral (experts); a GPT-2; a DeepSeek V3 (latent); a Qwen3-Next with three layers of gated delta
net to one with full attention (recurrent). The size `tiny` has ten times the usual weights: its attention is sharp.

Speed does not depend on what the weights say, so nothing has to be downloaded or trained. The weights are seeded and
stored in bfloat16; the tokenizer is that of the model that ships with Foreword, or a byte-level one if there is none.
"""

import argparse
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HEAD_SIZE = 64
CONTEXT = 40_960
SHIPPED = Path(__file__).resolve().parents[2] / "foreword" / "models" / "stdlib-nano"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


@dataclass(frozen=True)
class Size:
    """The shape of a Llama; embedding and output matrix are separate."""

    name: str
    parameters: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    feed_forward: int
    vocabulary: int
    deviation: float = 0.02  # of the weights

    def count(self) -> int:
        """The parameters this shape has."""
        attention = self.hidden * HEAD_SIZE * (2 * self.heads + 2 * self.kv_heads)
        per_layer = attention + 3 * self.hidden * self.feed_forward + 2 * self.hidden
        return self.layers * per_layer + self.hidden + 2 * self.vocabulary * self.hidden

    def kv_bytes_per_token(self) -> int:
        """Bytes of bfloat16 keys and values that one token leaves in the cache."""
        return self.layers * self.kv_heads * HEAD_SIZE * 2 * 2


SIZES = {
    "tiny": Size("tiny", 1_800_000, 4, 128, 4, 2, 192, 4_096, deviation=0.2),
    "88m": Size("88m", 88_000_000, 12, 768, 12, 4, 2_048, 8_192),
    "370m": Size("370m", 370_000_000, 24, 1_024, 16, 8, 3_584, 16_384),
}


def make(size: Size, folder: Path, seed: int = 0, kind: str = "llama") -> int:
    """Writes configuration, weights and tokenizer into the folder; returns the number of parameters."""
    import torch
    from transformers import AutoModelForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    copy_tokenizer(size, folder)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(KINDS[kind](size)).bfloat16()
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def llama_config(size: Size) -> Any:
    """The Transformers configuration of a size."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.feed_forward,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=HEAD_SIZE,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        initializer_range=size.deviation,
        dtype="bfloat16",
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=None,
    )


def windows_config(size: Size) -> Any:
    """The same shape with sliding windows in five of six layers."""
    from transformers import Gemma3TextConfig

    kinds = ["full_attention" if layer % 6 == 5 else "sliding_attention" for layer in range(size.layers)]
    shape = llama_config(size).to_dict()
    return Gemma3TextConfig(
        **{name: shape[name] for name in _SHAPE}, sliding_window=512, layer_types=kinds, query_pre_attn_scalar=HEAD_SIZE
    )


def tied_config(size: Size) -> Any:
    """A Llama with one embedding for input and output."""
    config = llama_config(size)
    config.tie_word_embeddings = True
    return config


def experts_config(size: Size) -> Any:
    """The same shape with four experts of a quarter of the size, of which two compute a token."""
    from transformers import MixtralConfig

    shape = llama_config(size).to_dict()
    sizes = {"intermediate_size": size.feed_forward // 4, "num_local_experts": 4, "num_experts_per_tok": 2}
    return MixtralConfig(**{name: shape[name] for name in _SHAPE} | sizes)


def gpt2_config(size: Size) -> Any:
    """A GPT-2 of these layers."""
    from transformers import GPT2Config

    return GPT2Config(
        vocab_size=size.vocabulary,
        n_embd=size.hidden,
        n_layer=size.layers,
        n_head=size.heads,
        n_positions=2_048,
        initializer_range=size.deviation,
        dtype="bfloat16",
        bos_token_id=None,
        eos_token_id=0,
    )


def latent_config(size: Size) -> Any:
    """The same layers with latent attention, and experts behind the first layer."""
    from transformers import DeepseekV3Config

    shape = llama_config(size).to_dict()
    return DeepseekV3Config(
        **{name: shape[name] for name in _SHAPE} | {"num_key_value_heads": size.heads, "head_dim": HEAD_SIZE // 2},
        kv_lora_rank=size.hidden // 2,
        q_lora_rank=size.hidden // 2,
        qk_nope_head_dim=HEAD_SIZE,
        qk_rope_head_dim=HEAD_SIZE // 2,
        v_head_dim=HEAD_SIZE,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=size.feed_forward // 4,
        n_shared_experts=1,
        first_k_dense_replace=1,
        n_group=2,
        topk_group=1,
    )


def recurrent_config(size: Size) -> Any:
    """The same shape with a gated delta net in three of four layers, and four experts of a quarter of the size."""
    from transformers import Qwen3NextConfig

    kinds = ["full_attention" if layer % 4 == 3 else "linear_attention" for layer in range(size.layers)]
    shape = llama_config(size).to_dict()
    return Qwen3NextConfig(
        **{name: shape[name] for name in _SHAPE},
        layer_types=kinds,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=size.feed_forward // 4,
        shared_expert_intermediate_size=size.feed_forward // 4,
        linear_key_head_dim=HEAD_SIZE,
        linear_value_head_dim=HEAD_SIZE,
        linear_num_key_heads=size.kv_heads,
        linear_num_value_heads=size.heads,
    )


_SHAPE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "tie_word_embeddings",
    "dtype",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "initializer_range",
)
KINDS = {
    "llama": llama_config,
    "tied": tied_config,
    "windows": windows_config,
    "experts": experts_config,
    "gpt2": gpt2_config,
    "latent": latent_config,
    "recurrent": recurrent_config,
}


def copy_tokenizer(size: Size, folder: Path) -> None:
    """Takes the shipped model's tokenizer, or makes one; its vocabulary must fit the model's."""
    if (SHIPPED / "tokenizer.json").exists():
        for name in TOKENIZER_FILES:
            if (SHIPPED / name).exists():
                shutil.copyfile(SHIPPED / name, folder / name)
    else:
        make_byte_tokenizer(folder)
    highest = highest_token(folder / "tokenizer.json")
    if highest >= size.vocabulary:
        raise ValueError(f"the tokenizer has token {highest}, the model only {size.vocabulary} tokens")


def highest_token(tokenizer_file: Path) -> int:
    """The largest token id in a tokenizer.json."""
    stored = json.loads(tokenizer_file.read_text(encoding="utf-8"))
    added = [token["id"] for token in stored["added_tokens"]]
    return int(max([*stored["model"]["vocab"].values(), *added]))


def make_byte_tokenizer(folder: Path) -> None:
    """One token per byte, and one that ends a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    end = "<|endoftext|>"
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate([end, *letters])}, []))
    tokenizer.add_special_tokens([end])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "model_max_length": CONTEXT}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def main() -> None:
    """Makes one model and says what it is."""
    parser = argparse.ArgumentParser(description="Make a model with random weights.")
    parser.add_argument("size", choices=sorted(SIZES))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=sorted(KINDS), default="llama")
    arguments = parser.parse_args()
    size = SIZES[arguments.size]
    made = make(size, arguments.folder, arguments.seed, arguments.kind)
    kept = f", {size.kv_bytes_per_token():,} bytes of KV a token" if arguments.kind == "llama" else ""
    print(f"{size.name}: {made:,} parameters{kept}, in {arguments.folder}")


if __name__ == "__main__":
    main()
