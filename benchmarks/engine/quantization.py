"""Measures what 8-bit weights change in a model's predictions.

    python -m benchmarks.engine.quantization [MODEL ...] [--texts 12] [--length 512]

The embedded model reads source files of Python's standard library that it was not trained on; other models, which may be random
ones, read random tokens. The numbers are those of the checkpoint's weights in float32, against the same weights in bfloat16 and
rounded by `--quantization int8`:

perplexity   of the text
KL           divergence of the next token's distribution from float32's, nats, mean over positions
top-1        share of positions whose likeliest token is float32's
"""

import argparse
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.harness import machine, set_up, table
from benchmarks.store.codecs import MODEL, windows
from foreword.engine import linear
from foreword.engine.linear import quantize

VARIANTS = (
    ("bfloat16", torch.bfloat16, False),
    ("float32, int8", torch.float32, True),
    ("bfloat16, int8", torch.bfloat16, True),
)


def texts(model: Path, args: argparse.Namespace) -> list[list[int]]:
    """The text that the model reads."""
    if model == MODEL:
        wanted = argparse.Namespace(context=args.length - 1, following=1, texts=args.texts)
        return windows(AutoTokenizer.from_pretrained(model), wanted)
    noise = torch.Generator().manual_seed(0)
    vocabulary = AutoModelForCausalLM.from_pretrained(model).config.vocab_size
    return [torch.randint(1, vocabulary, (args.length,), generator=noise).tolist() for _ in range(args.texts)]


@torch.inference_mode()
def logits(model: Path, dtype: torch.dtype, int8: bool, inputs: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Log-probabilities of the next token, `[length, vocabulary]` for each text."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval().requires_grad_(False)
    if int8:
        quantize(linear.packable(loaded))
    return [loaded(torch.tensor([tokens])).logits[0].float().log_softmax(-1) for tokens in inputs]


def row(
    name: str, found: Sequence[torch.Tensor], exact: Sequence[torch.Tensor], inputs: Sequence[Sequence[int]]
) -> list[str]:
    """A line of the table."""
    pairs = list(zip(found, exact, inputs, strict=True))
    loss = torch.cat([-logs[:-1].gather(1, torch.tensor(tokens)[1:, None])[:, 0] for logs, _, tokens in pairs])
    divergence = torch.cat([(truth.exp() * (truth - logs)).sum(-1) for logs, truth, _ in pairs])
    same = torch.cat([logs.argmax(-1) == truth.argmax(-1) for logs, truth, _ in pairs])
    return [name, f"{math.exp(loss.mean()):.3f}", f"{divergence.mean():.6f}", f"{same.float().mean():.1%}"]


def main() -> None:
    """Prints a table for each model."""
    parser = argparse.ArgumentParser(description="Measure what 8-bit weights change.")
    parser.add_argument("models", type=Path, nargs="*", default=[MODEL])
    parser.add_argument("--texts", type=int, default=12)
    parser.add_argument("--length", type=int, default=512)
    args = parser.parse_args()
    print(set_up(machine() | {"texts": f"{args.texts} of {args.length} tokens"}))
    for model in args.models:
        inputs = texts(model, args)
        exact = logits(model, torch.float32, False, inputs)
        rows = [row("float32", exact, exact, inputs)]
        rows += [row(name, logits(model, dtype, int8, inputs), exact, inputs) for name, dtype, int8 in VARIANTS]
        print(f"\n{table([model.name, 'perplexity', 'KL', 'top-1'], rows)}", flush=True)


if __name__ == "__main__":
    main()
