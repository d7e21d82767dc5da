"""Writes a Llama of engine/random_model.py as a GGUF file in bfloat16, for llama.cpp. Needs gguf and numpy, not torch.

    python -m benchmarks.engine.gguf_model MODEL
    python -m benchmarks.engine.gguf_model --random SIZE FILE [--seed 0] [--exact]

With `--random` the weights are drawn here, so that no folder is needed, and quantized to Q8_0, as is usual on laptops, or
float32 with `--exact`. The file has a vocabulary: a token for each byte, and words that no text has.
"""

import argparse
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.engine.random_model import CONTEXT, HEAD_SIZE, SIZES, Size

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


def random_tensors(size: Size, seed: int) -> Iterator[tuple[str, Any]]:
    """Names and float32 numbers of a Llama with random weights, of a deviation with which answers depend on the context."""
    import numpy

    draw = numpy.random.default_rng(seed)
    widths = {
        "q_proj": size.heads * HEAD_SIZE,
        "k_proj": size.kv_heads * HEAD_SIZE,
        "v_proj": size.kv_heads * HEAD_SIZE,
    }
    layer: dict[str, tuple[int, ...]] = {
        **{f"self_attn.{name}": (width, size.hidden) for name, width in widths.items()},
        "self_attn.o_proj": (size.hidden, size.heads * HEAD_SIZE),
        "mlp.gate_proj": (size.feed_forward, size.hidden),
        "mlp.up_proj": (size.feed_forward, size.hidden),
        "mlp.down_proj": (size.hidden, size.feed_forward),
        "input_layernorm": (size.hidden,),
        "post_attention_layernorm": (size.hidden,),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens": (size.vocabulary, size.hidden),
        "model.norm": (size.hidden,),
        "lm_head": (size.vocabulary, size.hidden),
    }
    shapes |= {f"model.layers.{number}.{name}": shape for number in range(size.layers) for name, shape in layer.items()}
    for name, shape in shapes.items():
        deviation = max(size.deviation, 2 / size.hidden**0.5)
        values = numpy.ones(shape) if len(shape) == 1 else draw.standard_normal(shape, dtype=numpy.float32) * deviation
        yield f"{name}.weight", values.astype(numpy.float32)


def write_random(path: Path, size: Size, seed: int = 0, *, exact: bool = False) -> Path:
    """The path of the file, which is written if there is none."""
    config = {
        "max_position_embeddings": CONTEXT, "hidden_size": size.hidden, "num_hidden_layers": size.layers,
        "intermediate_size": size.feed_forward, "num_attention_heads": size.heads, "num_key_value_heads": size.kv_heads,
        "rms_norm_eps": 1e-6, "head_dim": HEAD_SIZE, "rope_theta": 10_000.0, "vocab_size": size.vocabulary,
    }  # fmt: skip
    return path if path.exists() else _write(path, config, random_tensors(size, seed), vocabulary=True, exact=exact)


def write(folder: Path) -> Path:
    """The path of the file, which is written if there is none."""
    path = folder / "model.gguf"
    if path.exists():
        return path
    return _write(path, json.loads((folder / "config.json").read_text(encoding="utf-8")), tensors(folder))


def _write(
    path: Path,
    config: dict[str, Any],
    found: Iterable[tuple[str, Any]],
    *,
    vocabulary: bool = False,
    exact: bool = False,
) -> Path:
    import gguf  # type: ignore[import-not-found,unused-ignore]
    import numpy

    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(str(path.with_suffix(".tmp")), "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base((config.get("rope_parameters") or config)["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    if vocabulary:
        _add_vocabulary(writer, config["vocab_size"])
    else:
        writer.add_tokenizer_model("no_vocab")
    for name, numbers in found:
        if numbers.ndim == 1 and numbers.dtype != numpy.float32:
            writer.add_tensor(target_name(name), (numbers.astype(numpy.uint32) << 16).view(numpy.float32))
            continue
        if numbers.dtype == numpy.float32:
            kind = gguf.GGMLQuantizationType.F32 if exact or numbers.ndim == 1 else gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(target_name(name), gguf.quants.quantize(numbers, kind), raw_dtype=kind)
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


def _add_vocabulary(writer: Any, count: int) -> None:
    """Marks for unknown, start and end, a token for each byte, and words."""
    import gguf

    kinds = gguf.TokenType
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL, *[kinds.BYTE] * 256, *[kinds.NORMAL] * (count - len(words))]
    words += [f"word{number}" for number in range(len(words), count)]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(words)
    writer.add_token_scores([0.0] * count)
    writer.add_token_types(types)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_space_prefix(False)


def main() -> None:
    """Writes the file."""
    parser = argparse.ArgumentParser(description="Write a GGUF file.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--random", choices=SIZES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--exact", action="store_true", help="random weights in float32")
    given = parser.parse_args()
    if given.random:
        print(write_random(given.model, SIZES[given.random], given.seed, exact=given.exact))
    else:
        print(write(given.model))


if __name__ == "__main__":
    main()
