"""Blocks that a long text of a window model takes in the engine and in a store, of those of all its layers.

    python -m benchmarks.engine.window_memory [--tokens 8192] [--windows 128,1024]

A small random Gemma 3 with five layers of windows to one of full attention. These are counts, so the processor does not matter.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.engine.random_model import SHIPPED, TOKENIZER_FILES
from benchmarks.harness import machine, set_up, table
from foreword import LLM, SamplingParams

BLOCK = 16


def make(folder: Path, window: int, longest: int) -> Path:
    """A model with the shipped tokenizer."""
    torch.manual_seed(0)
    config = transformers.Gemma3TextConfig(
        vocab_size=8192, hidden_size=32, intermediate_size=64, num_hidden_layers=12, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, query_pre_attn_scalar=16, sliding_window=window, bos_token_id=None,
        eos_token_id=0, pad_token_id=None, max_position_embeddings=2 * longest,
        layer_types=["full_attention" if layer % 6 == 5 else "sliding_attention" for layer in range(12)],
    )  # fmt: skip
    transformers.Gemma3ForCausalLM(config).save_pretrained(folder)
    for name in TOKENIZER_FILES:
        if (SHIPPED / name).exists():
            (folder / name).write_bytes((SHIPPED / name).read_bytes())
    return folder


def measure(folder: Path, tokens: int) -> tuple[int, int, int, int]:
    """Blocks held at most and when the prompt is computed, blocks stored, and blocks of all layers."""
    options: dict[str, Any] = {
        "dtype": "float32",
        "kv_memory": f"{2 * tokens} tokens",
        "block_size": BLOCK,
    }
    with LLM(str(folder), store="memory://?size=1GiB", **options) as llm:
        pool, held = llm._core.cache.pool, []
        llm._core.cache._lookahead = 0
        settle = llm._core.scheduler.settle

        def watched(step: Any) -> None:
            settle(step)
            held.append(pool.num_blocks - pool.num_free)

        llm._core.scheduler.settle = watched  # type: ignore[method-assign]
        prompt = torch.randint(1, 8000, (tokens,), generator=torch.Generator().manual_seed(1)).tolist()
        llm.generate([prompt], SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True))
        assert llm.flush() and llm.offload is not None
        stored = llm.offload.store.tiers[0].store.status().blocks
        return max(held), min(held[-8:-1]), stored, tokens // BLOCK * llm.info.kv_groups


def main() -> None:
    """Prints a line for each window."""
    parser = argparse.ArgumentParser(description="Memory of window models.")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--windows", default="128,1024", help="numbers with commas between")
    arguments = parser.parse_args()
    rows = []
    for window in map(int, arguments.windows.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            *counts, everything = measure(make(Path(folder), window, arguments.tokens), arguments.tokens)
        rows.append([str(window), *(f"{count} ({count / everything:.0%})" for count in counts), str(everything)])
    print(set_up({**machine(), "tokens": str(arguments.tokens), "block size": str(BLOCK)}))
    print(table(["window", "held at most", "held after the prompt", "stored", "blocks of all layers"], rows))


if __name__ == "__main__":
    main()
