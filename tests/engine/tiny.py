"""Small random models of many families, a byte-level tokenizer, and a reference to compare the engine with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from foreword.engine.request import Completion, SamplingParams

CHAT = (
    "{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
EOS = 256
VOCAB = 260
# Log-probabilities of two correct float32 computations differ by less than this; a wrong mask changes them by 0.1 and more.
ROUNDING = 1e-3

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    # Ten times the usual: attention and logits become sharp, and greedy outputs vary.
    "initializer_range": 0.2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "head_dim": 8,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}


def common(kind: Callable[..., Any], **settings: Any) -> Any:
    """A small configuration of a family that has Llama's names for things."""
    return kind(**{**_COMMON, **settings})


def _gpt2() -> Any:
    return transformers.GPT2Config(
        vocab_size=VOCAB,
        n_embd=64,
        n_layer=3,
        n_head=4,
        n_positions=512,
        initializer_range=0.3,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )


# Every family that the engine promises to run, with its peculiarity made small enough to matter in a short text.
FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: common(transformers.LlamaConfig),
    "qwen2": lambda: common(transformers.Qwen2Config),
    "qwen3": lambda: common(transformers.Qwen3Config),
    "mistral": lambda: common(transformers.MistralConfig, sliding_window=8),
    "phi3": lambda: common(transformers.Phi3Config),
    "gemma2": lambda: common(
        transformers.Gemma2Config,
        num_hidden_layers=4,
        sliding_window=8,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=20.0,
        query_pre_attn_scalar=24,
    ),
    "gemma3": lambda: common(
        transformers.Gemma3TextConfig,
        num_hidden_layers=4,
        sliding_window=8,
        sliding_window_pattern=2,
        query_pre_attn_scalar=24,
    ),
    # Five windows to one layer of full attention, as published: blocks of one layer, and six KV groups.
    "gemma3_5to1": lambda: common(
        transformers.Gemma3TextConfig,
        num_hidden_layers=6,
        sliding_window=8,
        sliding_window_pattern=6,
        query_pre_attn_scalar=24,
    ),
    "gpt_neox": lambda: common(transformers.GPTNeoXConfig),
    "gpt2": _gpt2,
    "mixtral": lambda: common(transformers.MixtralConfig, **_MOE),
    "qwen3_moe": lambda: common(
        transformers.Qwen3MoeConfig, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48
    ),
    "gpt_oss": lambda: common(
        transformers.GptOssConfig,
        **_MOE,
        num_hidden_layers=4,
        sliding_window=8,
        rope_parameters={"rope_type": "default"},
    ),
    "olmo2": lambda: common(transformers.Olmo2Config),
    "smollm3": lambda: common(transformers.SmolLM3Config, no_rope_layer_interval=2),
    "deepseek_v2": lambda: common(transformers.DeepseekV2Config, **_LATENT),
    "deepseek_v3": lambda: common(transformers.DeepseekV3Config, **_LATENT),
}


def tokenizer() -> Any:
    """Bytes as GPT-2 writes them, an end token, three merges, and a chat template."""
    merges = [("t", "h"), ("h", "e"), ("i", "n")]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*alphabet, "<eos>", *("".join(pair) for pair in merges)]
    inner = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<eos>", chat_template=CHAT, clean_up_tokenization_spaces=False
    )


def random_model(config: Any, seed: int = 0) -> Any:
    """A model whose biases, norms and sinks are random as well: initialised to 0 or 1, they could be forgotten unseen."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    noise = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=noise) * 0.3)
    return model


def save(model: Any, folder: Path) -> Path:
    """A checkpoint as one finds it on the hub."""
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def prompt(length: int, seed: int) -> list[int]:
    """Random tokens without the end token."""
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def greedy(max_tokens: int, **options: Any) -> SamplingParams:
    """Greedy, never ended by a token, with the chosen tokens' log-probabilities."""
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logprobs=0, **options)


class Reference:
    """The reference: the same checkpoint, loaded independently, run by Transformers with its eager attention. `prepare` may
    change its weights."""

    def __init__(self, folder: Path, prepare: Callable[[Any], object] = lambda _: None) -> None:
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32
        ).eval()
        prepare(self._model)
        self._known: dict[tuple[tuple[int, ...], int], tuple[int, ...]] = {}

    def greedy(self, tokens: Sequence[int], count: int) -> tuple[int, ...]:
        """`generate()` without sampling."""
        key = (tuple(tokens), count)
        if key not in self._known:
            ids = torch.tensor([list(tokens)])
            with torch.inference_mode():
                found = self._model.generate(
                    ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count, pad_token_id=0
                )
            self._known[key] = tuple(found[0, len(tokens) :].tolist())
        return self._known[key]

    def logprobs(self, tokens: Sequence[int], output: Sequence[int]) -> Tensor:
        """`[len(output), vocab]`: the distribution that each token of `output` was chosen from."""
        with torch.inference_mode():
            logits = self._model(input_ids=torch.tensor([[*tokens, *output]]), use_cache=False).logits[0]
        return torch.log_softmax(logits[len(tokens) - 1 : -1].float(), dim=-1)

    def check(self, tokens: Sequence[int], found: Completion, count: int) -> None:
        """Every token of the engine's greedy completion is the likeliest one, up to rounding, after those before it, and its
        log-probabilities are the model's own. So it is `generate()`'s completion, unless two tokens are equally likely."""
        assert len(found.tokens) == count
        expected = self.logprobs(tokens, found.tokens)
        chosen = expected[torch.arange(count), torch.tensor(found.tokens)]
        reported = torch.tensor([one.logprob for one in found.logprobs])
        assert torch.allclose(reported, chosen, rtol=0, atol=ROUNDING), (reported - chosen).abs().max()
        assert (expected.max(dim=-1).values - chosen).max() < ROUNDING, "not the likeliest token"
