"""Measures what this machine's memory and oneDNN allow for a model: prints one line of JSON.

    python -m benchmarks.engine.limits --model DIR --threads 2

- `bandwidth`: bytes per second that PyTorch's threads read from memory (the sum of 1 GiB);
- `step_bytes`: bytes of weights that each decode step reads, and `token_bytes`: of KV, for each token of the context;
- `products`: tokens per second of prefill if nothing but linear layers took time, at oneDNN's rate for 512 rows of bfloat16
  and a packed weight; of float32, where oneDNN has no bfloat16 on this processor.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.engine.worker import clock

ROWS = 512


def best(call: Callable[[], object], turns: int) -> float:
    """The shortest time of a call in seconds."""
    taken = []
    for _ in range(turns):
        start = clock()
        call()
        taken.append(clock() - start)
    return min(taken)


def limits(model: Path, threads: int) -> dict[str, float]:
    """The figures for a model."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    memory = torch.ones(1 << 28)
    bandwidth = memory.nbytes / best(memory.sum, 8)
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    head = loaded.get_output_embeddings()
    weights = [layer.weight for layer in loaded.modules() if isinstance(layer, torch.nn.Linear)]
    dtype = torch.bfloat16 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32
    seconds: dict[torch.Size, float] = {}
    with torch.inference_mode():
        for weight in weights:
            if weight.shape not in seconds and weight is not head.weight:
                packed = torch.ops.mkldnn._reorder_linear_weight(weight.to(dtype), None)
                x = torch.randn(ROWS, weight.shape[1], dtype=dtype)
                multiply = torch.ops.mkldnn._linear_pointwise
                seconds[weight.shape] = best(lambda: multiply(x, packed, None, "none", [], ""), 12)  # noqa: B023
    config = loaded.config
    token_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * head.weight.itemsize
    total = sum(seconds[weight.shape] for weight in weights if weight is not head.weight)
    return {
        "bandwidth": bandwidth,
        "step_bytes": float(sum(weight.nbytes for weight in weights)),
        "token_bytes": float(token_bytes),
        "products": ROWS / total,
    }


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description="Measure memory bandwidth and oneDNN's products.")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--processor-time", action="store_true", help="for one thread on a busy machine")
    found = parser.parse_args()
    print(json.dumps(limits(found.model, found.threads)))


if __name__ == "__main__":
    main()
