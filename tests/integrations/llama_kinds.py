"""Writes a tiny random model of another kind as a GGUF file: KIND FILE. Kinds: a Cohere 2 with a window of 24 tokens in three
of four layers (windows), a Mamba (recurrent)."""

from __future__ import annotations

import sys

import gguf
import numpy

HIDDEN, LAYERS, VOCABULARY, WINDOW = 64, 4, 4096, 24
INNER, STATE, RANK, KERNEL = 128, 16, 4, 4
EVERY: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCABULARY, HIDDEN), "output_norm.weight": (HIDDEN,)}
LAYER: dict[str, dict[str, tuple[int, ...]]] = {
    "cohere2": {
        "attn_norm.weight": (HIDDEN,),
        "attn_q.weight": (HIDDEN, HIDDEN),
        "attn_k.weight": (32, HIDDEN),
        "attn_v.weight": (32, HIDDEN),
        "attn_output.weight": (HIDDEN, HIDDEN),
        "ffn_gate.weight": (96, HIDDEN),
        "ffn_up.weight": (96, HIDDEN),
        "ffn_down.weight": (HIDDEN, 96),
    },
    "mamba": {
        "attn_norm.weight": (HIDDEN,),
        "ssm_in.weight": (2 * INNER, HIDDEN),
        "ssm_conv1d.weight": (INNER, KERNEL),
        "ssm_conv1d.bias": (INNER,),
        "ssm_x.weight": (RANK + 2 * STATE, INNER),
        "ssm_dt.weight": (INNER, RANK),
        "ssm_dt.bias": (INNER,),
        "ssm_a": (INNER, STATE),
        "ssm_d": (INNER,),
        "ssm_out.weight": (HIDDEN, INNER),
    },
}


def main() -> None:
    arch = {"windows": "cohere2", "recurrent": "mamba"}[sys.argv[1]]
    writer = gguf.GGUFWriter(sys.argv[2], arch)
    writer.add_context_length(4096)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_vocab_size(VOCABULARY)
    if arch == "cohere2":
        writer.add_feed_forward_length(96)
        writer.add_head_count(4)
        writer.add_head_count_kv(2)
        writer.add_layer_norm_eps(1e-5)
        writer.add_logit_scale(1.0)
        writer.add_sliding_window(WINDOW)
        writer.add_rope_dimension_count(16)
    else:
        writer.add_feed_forward_length(0)
        writer.add_head_count(0)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_ssm_conv_kernel(KERNEL)
        writer.add_ssm_inner_size(INNER)
        writer.add_ssm_state_size(STATE)
        writer.add_ssm_time_step_rank(RANK)
    writer.add_tokenizer_model("llama")
    kinds = gguf.TokenType
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL, *[kinds.BYTE] * 256]
    fill = VOCABULARY - len(words)
    writer.add_token_list([*words, *(f"word{number}" for number in range(fill))])
    writer.add_token_scores([0.0] * VOCABULARY)
    writer.add_token_types([*types, *[kinds.NORMAL] * fill])
    draw = numpy.random.default_rng(0)
    shapes = EVERY | {f"blk.{number}.{name}": shape for number in range(LAYERS) for name, shape in LAYER[arch].items()}
    for name, shape in shapes.items():
        plain = draw.standard_normal(shape, dtype=numpy.float32) * 0.25
        norm = numpy.ones(shape, numpy.float32)
        decay = -numpy.abs(plain)
        writer.add_tensor(name, norm if "norm" in name else decay if name.endswith("ssm_a") else plain)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
