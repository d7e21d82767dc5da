"""Models that the engine would compute wrongly are refused at start with a reason, or limited to a safe length."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers
from example_counts import represented
from tiny import Reference, common, greedy, prompt
from transformers import AttentionInterface

from foreword.engine import torch_runner
from foreword.engine.attention import backend as attention
from foreword.engine.attention.metadata import AttentionMetadata
from foreword.engine.model import load_model
from foreword.engine.self_check import self_check
from foreword.engine_config import EngineConfig
from foreword.entrypoints.llm import LLM
from foreword.errors import ConfigError, ModelUnsupported
from foreword.request_errors import ModelNotFound, PromptTooLong

SIZES: dict[str, Any] = {"vocab_size": tiny.VOCAB, "hidden_size": 32}


def _next() -> Any:
    linear = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    }
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
    return common(transformers.Qwen3NextConfig, num_hidden_layers=4, **linear, **experts)


def _jamba() -> Any:
    layers = {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1}
    return common(transformers.JambaConfig, num_hidden_layers=4, num_experts=2, mamba_d_state=4, **layers)


# Family: its configuration, and a part of the refusal's message.
FOREIGN: dict[str, tuple[Callable[[], Any], str]] = {
    "mamba": (lambda: transformers.MambaConfig(**SIZES, num_hidden_layers=2, state_size=4), "linear_attention"),
    "jamba": (_jamba, "linear_attention"),
    "bamba": (
        lambda: common(transformers.BambaConfig, attn_layer_indices=[1], mamba_n_heads=8, mamba_d_head=16),
        "linear_attention",
    ),
    "falcon_h1": (
        lambda: common(transformers.FalconH1Config, mamba_n_heads=4, mamba_d_head=8, mamba_d_ssm=32),
        "hybrid",
    ),
    "qwen3_next": (_next, "linear_attention"),
    "recurrent_gemma": (lambda: common(transformers.RecurrentGemmaConfig, lru_width=64), "linear_attention"),
    "lfm2": (lambda: common(transformers.Lfm2Config, full_attn_idxs=[1], block_ff_dim=64), "conv"),
    "llama4": (
        lambda: common(transformers.Llama4TextConfig, intermediate_size_mlp=64, num_local_experts=2),
        "chunked_attention",
    ),
    # Sparse only beyond 2048 tokens, which no short comparison would see.
    "minimax_m3": (
        lambda: common(transformers.MiniMaxM3VLTextConfig, layer_types=["full_attention"] * 2 + ["minimax_m3_sparse"]),
        "minimax_m3_sparse",
    ),
    "rwkv": (lambda: transformers.RwkvConfig(**SIZES, num_hidden_layers=2), "only 0 of them attend"),
    "bloom": (lambda: transformers.BloomConfig(**SIZES, n_layer=2, n_head=4), "only 0 of them attend"),
    "gpt_neo": (
        lambda: transformers.GPTNeoConfig(
            vocab_size=tiny.VOCAB, hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global"], 2]]
        ),
        "does not go through Transformers' attention interface",
    ),
    "mpt": (
        lambda: transformers.MptConfig(vocab_size=tiny.VOCAB, d_model=32, n_layers=2, n_heads=4),
        "does not run through paged attention",
    ),
    "doge": (lambda: common(transformers.DogeConfig), "passes an attention mask"),
    "diffllama": (lambda: common(transformers.DiffLlamaConfig), "differ from the model's own"),
    "gemma3_bidirectional": (
        lambda: common(transformers.Gemma3TextConfig, use_bidirectional_attention=True),
        "differ from the model's own",
    ),
}


def start(path: Path, **options: Any) -> LLM:
    return LLM(str(path), dtype="float32", kv_memory="1024 tokens", block_size=4, threads=1, **options)


def saved(config: Any, folder: Path) -> Path:
    return tiny.save(tiny.random_model(config), folder)


@pytest.mark.parametrize("family", represented(FOREIGN, *list(FOREIGN)[::4]))
def test_foreign_family(family: str, tmp_path: Path) -> None:
    """An unsupported family is refused before the first request, with the reason."""
    make, reason = FOREIGN[family]
    path = saved(make(), tmp_path / family)
    with pytest.raises(ModelUnsupported, match=reason) as refusal:
        start(path)
    assert refusal.value.fault == "operator"


def test_encoder_decoder(tmp_path: Path) -> None:
    """An encoder-decoder model is refused before its weights are read."""
    config = transformers.T5Config(vocab_size=tiny.VOCAB, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4)
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelUnsupported, match="is an encoder-decoder model"):
        start(tmp_path)


def test_no_model(tmp_path: Path) -> None:
    """A folder that does not exist, is empty, or lacks its weights is an error that says so."""
    with pytest.raises(ModelNotFound, match="is not a folder"):
        start(tmp_path / "none")
    with pytest.raises(ModelNotFound, match="cannot read a model configuration"):
        start(tmp_path)
    tiny.FAMILIES["llama"]().save_pretrained(tmp_path)
    with pytest.raises(ModelNotFound, match="cannot load the model"):
        start(tmp_path)


def test_damaged_weights(tmp_path: Path) -> None:
    """A model whose own logits are not numbers is refused."""
    model = tiny.random_model(tiny.FAMILIES["llama"]())
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] = float("nan")
    with pytest.raises(ModelUnsupported, match="not numbers"):
        start(tiny.save(model, tmp_path))


def test_model_that_fails_by_itself(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose own forward pass raises an error is refused with that error."""

    def fail(*_: Any, **__: Any) -> Any:
        raise ValueError("heads do not match")

    monkeypatch.setattr(transformers.models.llama.modeling_llama, "eager_attention_forward", fail)
    with pytest.raises(ModelUnsupported, match="own forward pass fails: heads do not match"):
        start(llama)


@pytest.fixture
def crooked() -> Iterator[Callable[..., None]]:
    """Register an interface that changes the model's parameters."""

    def register(**wrong: Any) -> None:
        def interface(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
            for name, change in wrong.items():
                options[name] = change(options.get(name))
            return attention._interface(module, query, key, value, mask, **options)

        AttentionInterface.register(attention.NAME, interface)

    yield register
    AttentionInterface.register(attention.NAME, attention._interface)


FAULTS: dict[str, tuple[str, dict[str, Callable[[Any], Any]]]] = {
    "scale": ("llama", {"scaling": lambda scale: scale * 1.05}),
    "no window": ("mistral", {"sliding_window": lambda _: None}),
    "window too long": ("mistral", {"sliding_window": lambda window: window + 1}),
    "window too short": ("mistral", {"sliding_window": lambda window: window - 1}),
    "window where there is none": ("llama", {"sliding_window": lambda _: 8}),
    "no soft cap": ("gemma2", {"softcap": lambda _: None}),
    "no sinks": ("gpt_oss", {"s_aux": lambda _: None}),
}


@pytest.mark.parametrize("fault", represented(FAULTS, "no window", "no soft cap"))
@pytest.mark.parametrize("dtype", represented(["float32", "bfloat16"], "bfloat16"))
def test_self_check(fault: str, dtype: str, folder: Callable[[str], Path], crooked: Callable[..., None]) -> None:
    """The self-check catches attention that is slightly wrong, and passes the right one."""
    family, wrong = FAULTS[fault]
    # With PyTorch's operators, since layers that the kernels compute whole do not come to the interface.
    loaded = load_model(EngineConfig(model=str(folder(family)), dtype=dtype, kernels="torch"))
    assert self_check(loaded, 4) < (1e-4 if dtype == "float32" else 0.1)
    if dtype == "bfloat16" and fault == "scale":
        return  # as large as bfloat16's rounding in a model with such sharp attention
    crooked(**wrong)
    with pytest.raises(ModelUnsupported, match=r"differ from the model's own|attends to more than"):
        self_check(loaded, 4)


def test_self_check_leaves_a_long_window(tmp_path: Path, crooked: Callable[..., None]) -> None:
    """A window that is wrong by one token is found, though it is much longer than a few blocks."""
    config = tiny.FAMILIES["mistral"]()
    config.sliding_window = 60
    path = tiny.save(tiny.random_model(config), tmp_path)
    loaded = load_model(EngineConfig(model=str(path), dtype="float32", kernels="torch"))
    assert self_check(loaded, 4) < 1e-4
    crooked(sliding_window=lambda window: window + 1)
    with pytest.raises(ModelUnsupported, match=r"differ from the model's own|attends to more than"):
        self_check(loaded, 4)


def test_self_check_sees_a_batch(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault that only a batch shows is found: the second sequence of a step gets the first one's blocks."""
    loaded = load_model(EngineConfig(model=str(llama), dtype="float32"))
    right = AttentionMetadata

    def mixed(chunks: Sequence[Any], *args: Any, **options: Any) -> Any:
        own = [dataclasses.replace(chunk, block_table=chunks[0].block_table) for chunk in chunks]
        return right(own, *args, **options)

    monkeypatch.setattr(torch_runner, "AttentionMetadata", mixed)
    with pytest.raises(ModelUnsupported, match="differ from the model's own"):
        self_check(loaded, 4)


@pytest.mark.parametrize("block_size", represented([1, 4, 16, 128], 4))
def test_self_check_for_block_sizes(block_size: int, folder: Callable[[str], Path]) -> None:
    """The self-check passes for small and large blocks, and for a model shorter than its prompt."""
    for length in (None, 2, 7):
        loaded = load_model(EngineConfig(model=str(folder("gemma2")), dtype="float32", max_model_len=length))
        assert self_check(loaded, block_size) < 1e-4


def test_attention_outside_the_interface(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The self-check catches a model class whose attention differs from what it passes to the interface."""
    kind = transformers.models.llama.modeling_llama.LlamaAttention
    honest = kind.forward

    def forward(self: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        output, weights = honest(self, hidden_states, *args, **kwargs)
        # A gate that depends on all earlier tokens: state that no KV cache holds.
        return output * torch.sigmoid(hidden_states.cumsum(1)), weights

    monkeypatch.setattr(kind, "forward", forward)
    with pytest.raises(ModelUnsupported, match="differ from the model's own"):
        start(llama)
    assert start(llama, self_check=False).info.name == "llama"


def _dynamic() -> Any:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    return common(transformers.LlamaConfig, rope_parameters=rope, max_position_embeddings=48)


def _longrope() -> Any:
    factors = {"short_factor": [1.0] * 8, "long_factor": [3.0] * 8}
    return common(
        transformers.Phi3Config,
        rope_parameters={"rope_type": "longrope", "rope_theta": 10000.0, **factors},
        max_position_embeddings=128,
        original_max_position_embeddings=32,
    )


@pytest.mark.parametrize(("make", "length"), [(_dynamic, 48), (_longrope, 32)])
def test_rotary_embedding_that_changes_with_length(make: Callable[[], Any], length: int, tmp_path: Path) -> None:
    """Where the rotary embedding depends on the sequence length, sequences are limited to its constant range."""
    config = make()
    path = saved(config, tmp_path)
    llm, truth = start(path), Reference(path)
    assert llm.info.max_model_len == length
    tokens = prompt(length - 12, 1)
    truth.check(tokens, llm.generate([tokens], greedy(12))[0].outputs[0], 12)
    with pytest.raises(PromptTooLong, match=f"maximum context length is {length} tokens"):
        llm.generate([tokens], greedy(13))
    with pytest.raises(ConfigError, match=f"supports only {length}"):
        start(path, max_model_len=length + 1)


def _moe(kind: Any, **settings: Any) -> Any:
    experts = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    return common(kind, **experts, shared_expert_intermediate_size=48, **settings)


@pytest.mark.parametrize(
    "config",
    [
        lambda: common(transformers.PhimoeConfig, num_local_experts=4, sliding_window=40),
        lambda: _moe(transformers.Qwen2MoeConfig, sliding_window=40, use_sliding_window=True, max_window_layers=2),
    ],
    ids=["phimoe", "qwen2_moe"],
)
def test_window_in_a_mask_only(config: Callable[[], Any], tmp_path: Path) -> None:
    """A family that applies its window in a mask only is limited to the window's length."""
    path = saved(config(), tmp_path)
    llm, truth = start(path), Reference(path)
    assert llm.info.max_model_len == 40
    tokens = prompt(20, 1)
    truth.check(tokens, llm.generate([tokens], greedy(20))[0].outputs[0], 20)


def test_window_that_is_not_used(tmp_path: Path) -> None:
    """A window that the configuration switches off is no limit."""
    path = saved(_moe(transformers.Qwen2MoeConfig, sliding_window=40, use_sliding_window=False), tmp_path)
    llm, truth = start(path), Reference(path)
    assert llm.info.max_model_len == 512
    tokens = prompt(60, 1)
    truth.check(tokens, llm.generate([tokens], greedy(20))[0].outputs[0], 20)
