"""How much the log-probabilities differ by which a router tells weights apart (`foreword/router/logprobs_probe.py`): those of
the built-in model in other settings, and those of changed weights. Transformers computes, on one thread.

python -m benchmarks.router.weights_by_logprobs
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

import foreword
from foreword.router.logprobs_probe import TEXT, TOLERANCE, LogprobReading

MODEL = Path(foreword.__file__).parent / "models" / "stdlib-nano"
OTHER = " ".join(f"The guest {i} orders soup number {i * 7 % 13} and pays {i * 3} crowns." for i in range(60))


class Readings:
    """Readings of a model and of changed copies of it."""

    def __init__(self) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(MODEL)
        self.model: Any = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
        self.ids = self.tokenizer(TEXT, return_tensors="pt").input_ids

    def read(
        self, model: Any, dtype: torch.dtype = torch.float32, *, chunk: int = 0, others: int = 0
    ) -> LogprobReading:
        """The reading of a model, in chunks of tokens, or in a batch with other texts."""
        model, ids = copy.deepcopy(model).to(dtype).eval(), self.ids
        with torch.no_grad():
            if chunk:
                cache = DynamicCache()
                pieces = [ids[:, start : start + chunk] for start in range(0, ids.shape[1], chunk)]
                logits = torch.cat([model(piece, past_key_values=cache, use_cache=True).logits for piece in pieces], 1)
            else:
                torch.manual_seed(0)
                logits = model(torch.cat([ids, torch.randint(5, 1000, (others, ids.shape[1]))])).logits[:1]
        found = torch.log_softmax(logits.float(), -1)[0, :-1].gather(1, ids[0, 1:, None])[:, 0]
        return LogprobReading(tuple(map(str, ids[0, 1:].tolist())), tuple(found.tolist()))

    def matrices(self, model: Any) -> list[str]:
        return [name for name, weight in model.named_parameters() if weight.dim() == 2]

    def noisy(self, share: float, *names: str) -> Any:
        """The model with noise on these matrices, on all without names."""
        model = copy.deepcopy(self.model)
        torch.manual_seed(0)
        for name, weight in model.named_parameters():
            if weight.dim() == 2 and (not names or name in names):
                weight.data *= 1 + share * torch.randn_like(weight)
        return model

    def rounded(self, bits: int) -> Any:
        """The model with its matrices rounded to integers of some bits, with a scale per row."""
        model = copy.deepcopy(self.model)
        for _, weight in model.named_parameters():
            if weight.dim() == 2:
                scale = weight.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
                weight.data = (weight / scale).round() * scale
        return model

    def tuned(self, rate: float, steps: int) -> Any:
        """The model, trained on another text."""
        model = copy.deepcopy(self.model).train()
        ids = self.tokenizer(OTHER, return_tensors="pt").input_ids[:, :256]
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
        for _ in range(steps):
            model(ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return model


def main() -> None:
    torch.set_num_threads(1)
    readings = Readings()
    exact, brain = readings.read(readings.model), readings.read(readings.model, torch.bfloat16)

    def tell(what: str, reading: LogprobReading, beside: LogprobReading = exact) -> None:
        print(f"{what:48} {beside.difference(reading):.7f}", flush=True)

    print(f"{len(exact.tokens)} tokens; equal up to {TOLERANCE}")
    for chunk in (16, 64):
        tell(f"float32, chunks of {chunk}", readings.read(readings.model, chunk=chunk))
        tell(f"bfloat16, chunks of {chunk}", readings.read(readings.model, torch.bfloat16, chunk=chunk), brain)
    tell("float32, batch of 8", readings.read(readings.model, others=7))
    tell("bfloat16, batch of 8", readings.read(readings.model, torch.bfloat16, others=7), brain)
    tell("float16 beside float32", readings.read(readings.model, torch.float16))
    tell("bfloat16 beside float32", brain)
    for bits in (8, 4):
        tell(f"rounded to {bits} bits", readings.read(readings.rounded(bits)))
    names = readings.matrices(readings.model)
    one = next(name for name in reversed(names) if "mlp" in name)
    for share in (0.003, 0.01, 0.03, 0.1, 0.3, 0.8):
        tell(f"all {len(names)} matrices with noise of {share:.1%}", readings.read(readings.noisy(share)))
        tell(f"one of them with noise of {share:.1%}", readings.read(readings.noisy(share, one)))
    for rate in (1e-6, 1e-5, 1e-4):
        for steps in (5, 30):
            tell(f"{steps} steps at {rate:g} on another text", readings.read(readings.tuned(rate, steps)))


if __name__ == "__main__":
    main()
