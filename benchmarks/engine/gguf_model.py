"""Writes a Llama of engine/random_model.py as a GGUF file in bfloat16, for llama.cpp. Needs gguf and numpy, not torch.

python -m benchmarks.engine.gguf_model MODEL
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def tensors(folder: Path) -> Iterator[tuple[str, Any]]:
    """Names and bfloat16 numbers, as unsigned integers, of a folder's safetensors files."""
    import numpy

    for path in sorted(folder.glob("*.safetensors")):
        data = numpy.memmap(path, dtype=numpy.uint8, mode="r")
        size = int.from_bytes(data[:8].tobytes(), "little")
        header = json.loads(data[8 : 8 + size].tobytes())
        for name, entry in header.items():
            if name != "__metadata__":
                first, last = entry["data_offsets"]
                yield name, data[8 + size + first : 8 + size + last].view(numpy.uint16).reshape(entry["shape"])


def target_name(name: str) -> str:
    """llama.cpp's name of a tensor of Transformers."""
    name = name.removesuffix(".weight")
    if name.startswith("model.layers."):
        number, _, rest = name.removeprefix("model.layers.").partition(".")
        return f"blk.{number}.{_NAMES[rest]}.weight"
    return f"{_NAMES[name]}.weight"


def write(folder: Path) -> Path:
    """The path of the file, which is written if there is none."""
    import gguf  # type: ignore[import-not-found,unused-ignore]
    import numpy

    path = folder / "model.gguf"
    if path.exists():
        return path
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(str(path.with_suffix(".tmp")), "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base((config.get("rope_parameters") or config)["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    for name, numbers in tensors(folder):
        if numbers.ndim == 1:
            writer.add_tensor(target_name(name), (numbers.astype(numpy.uint32) << 16).view(numpy.float32))
            continue
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            # llama.cpp rotates adjacent dimensions where Transformers rotates halves.
            count = heads if "q_proj" in name else kv_heads
            halves = numbers.reshape(count, 2, -1, numbers.shape[1])
            numbers = halves.swapaxes(1, 2).reshape(numbers.shape)
        data = numpy.ascontiguousarray(numbers).view(numpy.uint8)
        writer.add_tensor(target_name(name), data, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.with_suffix(".tmp").rename(path)


def main() -> None:
    """Writes the file."""
    parser = argparse.ArgumentParser(description="Write a GGUF file.")
    parser.add_argument("model", type=Path)
    print(write(parser.parse_args().model))


if __name__ == "__main__":
    main()
