"""Small random models of many kinds, as folders that vLLM reads, and prompts that share prefixes.

The models have 2 to 6 layers, a vocabulary of 512 and a context of 2,048 tokens. Their weights are seeded, and large enough
that answers depend on every part of a prompt. torch and transformers are imported only where models are made. As a script:

    python models.py KIND FOLDER [SEED]              makes a model
    python models.py adapter FOLDER MODEL [SEED]     makes a LoRA adapter of a model
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CONTEXT = 2_048
VOCABULARY = 512
WINDOW = 128
IMAGE = 56  # pixels in each direction
_SPECIAL = ["<fake_token_around_image>", "<image>", "<global-img>", "<end_of_utterance>"]
_WORDS = [f"t{number}" for number in range(VOCABULARY - len(_SPECIAL))] + _SPECIAL


@dataclass(frozen=True)
class Kind:
    """A kind of model.

    Attributes:
        layers: what its layers keep, in words.
        make: a new model with random weights.
        dtype: the type in which vLLM's CPU build computes it.
        exact: whether vLLM's answers are the same whatever is computed together; never in bfloat16.
        llm: vLLM's arguments that it needs.
        write_more: writes what a folder needs besides weights and configuration, such as a tokenizer.
    """

    name: str
    layers: str
    make: Callable[[], Any]
    dtype: str = "float32"
    exact: bool = True
    llm: dict[str, Any] = field(default_factory=dict)
    write_more: Callable[[Path], None] | None = None

    def build(self, folder: Path, seed: int = 0) -> Path:
        """Write the model into the folder."""
        import torch

        torch.manual_seed(seed)
        model = self.make()
        if model.config.tie_word_embeddings:  # or the model repeats its last token
            model.get_input_embeddings().weight.data.mul_(0.05)
        model.to(getattr(torch, self.dtype)).save_pretrained(folder)
        if self.write_more is not None:
            self.write_more(folder)
        return folder

    def arguments(self) -> dict[str, Any]:
        """vLLM's arguments."""
        return {
            "dtype": self.dtype,
            "max_model_len": CONTEXT,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 512,
            **self.llm,
        }


def _model(name: str, **sizes: Any) -> Callable[[], Any]:
    """Make a model of Transformers' classes `<name>Config` and `<name>ForCausalLM` (without `Text`)."""
    common = {
        "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "initializer_range": 0.2,
        "max_position_embeddings": CONTEXT, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
        "tie_word_embeddings": False,
    }  # fmt: skip

    def make() -> Any:
        import transformers

        config = getattr(transformers, f"{name}Config")(**{**common, **sizes})
        return getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")(config)

    return make


# fmt: off
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_EXPANDED = {
    "num_key_value_heads": 4, "q_lora_rank": 64, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32,
    "v_head_dim": 64,
}
_TURNS = {"num_hidden_layers": 4, "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2}
_WINDOWS = {
    "num_hidden_layers": 4, "sliding_window": WINDOW, "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
}
_ALTERNATE = {
    "num_hidden_layers": 6, "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
}
_GEMMA = {"tie_word_embeddings": True, "query_pre_attn_scalar": 32}
_GEMMA_3N = {
    "tie_word_embeddings": True, "num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.0] * 6, "laurel_rank": 16,
    "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCABULARY, "intermediate_size": [192] * 6,
}
_GEMMA_4 = {"global_head_dim": 64, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCABULARY}
_CHUNKS = {
    "num_hidden_layers": 4, "num_local_experts": 4, "num_experts_per_tok": 1, "attention_chunk_size": 256,
    "intermediate_size_mlp": 192,
}
_CONVOLUTION = {
    "num_hidden_layers": 4, "layer_types": ["conv", "conv", "full_attention", "conv"], "conv_dim": 128, "conv_dim_out": 128,
    "block_dim": 128, "block_auto_adjust_ff_dim": False, "tie_word_embeddings": True,
}
_DELTA_NET = {
    "num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"], "linear_key_head_dim": 64,
    "linear_value_head_dim": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_conv_kernel_dim": 4,
    **_EXPERTS, "shared_expert_intermediate_size": 64,
}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 32, "mamba_n_groups": 1, "mamba_chunk_size": 64}
_FALCON = {"mamba_d_ssm": 256, **_MAMBA}
_GRANITE = {
    "num_hidden_layers": 4, "layer_types": ["mamba", "mamba", "attention", "mamba"], "shared_intermediate_size": 64,
    **_LOCAL_EXPERTS, **_MAMBA,
}
_NEMOTRON = {
    "num_hidden_layers": 4, "layers_block_type": ["mamba", "mlp", "attention", "mamba"], "mamba_num_heads": 8,
    "mamba_head_dim": 32, "ssm_state_size": 32, "n_groups": 1, "chunk_size": 64,
}
_MAMBA2 = {"intermediate_size": 256, "num_heads": 8, "head_dim": 32, "state_size": 32, "n_groups": 1, "chunk_size": 64}
_LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
}
_ROUTED = {
    **_LATENT, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}
_BIASED = {"q_lora_rank": 64, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
_GLM = {"q_lora_rank": 64, "head_dim": 64}
_LARGE_BLOCKS = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128}
# fmt: on

# vLLM's CPU operators for Mamba2 export no state from the middle of a chunk, so a chunk may not be longer than a block.
_ONE_BLOCK = {"max_num_batched_tokens": 96}
_CACHED_MAMBA = {"enable_prefix_caching": True, "block_size": 128, "max_num_batched_tokens": 128}

KINDS = {
    kind.name: kind
    for kind in (
        Kind("Llama", "full attention", _model("Llama")),
        Kind("Qwen3", "full attention", _model("Qwen3")),
        Kind("Qwen3-MoE", "full attention, experts", _model("Qwen3Moe", **_EXPERTS)),
        Kind("Mixtral", "full attention, experts", _model("Mixtral", **_LOCAL_EXPERTS)),
        Kind("Phi-3", "full attention, fused projections", _model("Phi3")),
        Kind("MiniCPM 3", "latent attention, expanded", _model("MiniCPM3", **_EXPANDED)),
        Kind("Mistral", "windows in all layers", _model("Mistral", sliding_window=WINDOW)),
        Kind("Gemma 2", "windows and full attention, in turn", _model("Gemma2", **_GEMMA, **_TURNS)),
        Kind("Gemma 3", "windows and full attention", _model("Gemma3Text", **_GEMMA, **_ALTERNATE)),
        Kind("Gemma 3n", "windows and full attention", _model("Gemma3nText", **_GEMMA_3N, **_ALTERNATE)),
        Kind("Gemma 4", "windows and full attention, two head sizes", _model("Gemma4Text", **_GEMMA_4, **_ALTERNATE)),
        Kind("Cohere 2", "windows and full attention", _model("Cohere2", **_WINDOWS)),
        Kind("OLMo 3", "windows and full attention", _model("Olmo3", **_WINDOWS)),
        Kind("EXAONE 4", "windows and full attention", _model("Exaone4", **_WINDOWS)),
        Kind("gpt-oss", "windows and full attention, sinks, experts", _model("GptOss", **_LOCAL_EXPERTS, **_TURNS)),
        Kind("Llama 4", "chunked and full attention, experts", _model("Llama4Text", **_CHUNKS)),
        Kind("LFM2", "short convolution and full attention", _model("Lfm2", **_CONVOLUTION), exact=False),
        Kind("Qwen3-Next", "gated delta net and full attention", _model("Qwen3Next", **_DELTA_NET), "bfloat16", False),
        Kind("Mamba2", "Mamba2 alone", _model("Mamba2", **_MAMBA2), llm=_CACHED_MAMBA),
        Kind("Falcon-H1", "Mamba2 beside full attention", _model("FalconH1", **_FALCON), llm=_ONE_BLOCK),
        Kind("Granite 4", "Mamba2 and full attention", _model("GraniteMoeHybrid", **_GRANITE), llm=_ONE_BLOCK),
        Kind("Nemotron-H", "Mamba2 and full attention", _model("NemotronH", **_NEMOTRON), llm=_ONE_BLOCK),
        Kind(
            "DeepSeek V2",
            "latent attention, experts",
            _model("DeepseekV2", **_ROUTED, q_lora_rank=None),
            "bfloat16",
            False,
        ),
        Kind("DeepSeek V3", "latent attention, experts", _model("DeepseekV3", **_ROUTED, **_BIASED), "bfloat16", False),
        Kind("GLM-4 MoE lite", "latent attention", _model("Glm4MoeLite", **_ROUTED, **_GLM), "bfloat16", False),
    )
}


def _image_model() -> Any:
    """A small random Idefics 3: its processor needs no torchvision."""
    import transformers

    common = {"initializer_range": 0.2, "num_attention_heads": 4, "intermediate_size": 192}
    config = transformers.Idefics3Config(
        vision_config={**common, "hidden_size": 64, "num_hidden_layers": 2, "image_size": IMAGE, "patch_size": 14},
        text_config={
            "model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": 128, "num_hidden_layers": 3,
            "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": VOCABULARY, "pad_token_id": 0,
            "bos_token_id": None, "eos_token_id": None, **common,
        },
        scale_factor=2, image_token_id=_WORDS.index("<image>"), pad_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.Idefics3ForConditionalGeneration(config)


def _write_tokenizer(folder: Path) -> None:
    """A tokenizer of whole words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(_WORDS)}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="t0", pad_token="t0", additional_special_tokens=_SPECIAL
    ).save_pretrained(folder)


def _write_processor(folder: Path) -> None:
    """A tokenizer, and a processor that makes 4 tokens of an image, and 4 around them."""
    _write_tokenizer(folder)
    longest = {"longest_edge": IMAGE}
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


# Kinds for claims of their own. A block of 32 tokens of the first has 512 KiB.
LARGE_BLOCKS = Kind("Llama with large blocks", "full attention", _model("Llama", **_LARGE_BLOCKS))
IMAGES = Kind(
    "Idefics 3",
    "full attention, images",
    _image_model,
    llm={"max_model_len": VOCABULARY, "skip_tokenizer_init": False, "limit_mm_per_prompt": {"image": 8}},
    write_more=_write_processor,
)
EMBEDDINGS = Kind(
    "Llama for embeddings",
    "full attention",
    _model("Llama"),
    llm={"runner": "pooling", "convert": "embed", "skip_tokenizer_init": False},
    write_more=_write_tokenizer,
)
_MADE = {**KINDS, **{kind.name: kind for kind in (LARGE_BLOCKS, IMAGES, EMBEDDINGS)}}


def kind_named(text: str) -> Kind | None:
    """The kind with this name, whatever its spaces, hyphens and capitals are."""

    def plain(name: str) -> str:
        return "".join(filter(str.isalnum, name.lower()))

    return next((kind for name, kind in KINDS.items() if plain(name) == plain(text)), None)


def make_adapter(folder: Path, model: Path, seed: int) -> Path:
    """Write a random LoRA adapter of a model's attention layers into a new folder."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    torch.manual_seed(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{prefix}.lora_A.weight"] = 0.2 * torch.randn(8, config["hidden_size"])
            tensors[f"{prefix}.lora_B.weight"] = 0.2 * torch.randn(config[heads] * config["head_dim"], 8)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    described = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["q_proj", "k_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(described), encoding="utf-8")
    return folder


def fresh_prompts(seed: int | str, count: int, length: int) -> list[list[int]]:
    """Prompts without a common prefix, of `length` tokens and a few more. Their ends repeat themselves, so that drafts by
    n-grams are made."""
    draw = random.Random(seed)
    found = []
    for number in range(count):
        cycle = draw_tokens(draw, 7)
        found.append(draw_tokens(draw, length + 9 * number - 28) + cycle * 4)
    return found


def mixed_prompts(seed: int | str, count: int, longest: int = 1_500) -> list[list[int]]:
    """Prompts of 20 to `longest` tokens: fresh ones, one shortened to 700 and 333 tokens, one with another end, a longer turn
    of a conversation, and repeats."""
    draw = random.Random(seed)
    found: list[list[int]] = []
    while len(found) < count:
        document, chat = draw_tokens(draw, longest), draw_tokens(draw, draw.randrange(100, longest // 2))
        found += [
            document,
            draw_tokens(draw, draw.randrange(20, 200)),
            document[:700],
            document[:333],
            chat,
            document[: draw.randrange(400, 1_200)] + draw_tokens(draw, draw.randrange(20, 200)),
            chat + draw_tokens(draw, draw.randrange(50, 300)),
            draw.choice(found or [document]),
        ]
    return found[:count]


def draw_tokens(draw: random.Random, count: int) -> list[int]:
    """Random tokens of the vocabulary."""
    return [draw.randrange(1, VOCABULARY - 12) for _ in range(count)]


def main(what: str, folder: str, *more: str) -> None:
    """The script."""
    if what == "adapter":
        make_adapter(Path(folder), Path(more[0]), int(more[1]))
    else:
        _MADE[what].build(Path(folder), *map(int, more))


if __name__ == "__main__":
    main(*sys.argv[1:])
