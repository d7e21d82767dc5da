"""Measures what the codecs of stored blocks save, cost and spoil, on the KV of real text.

    python -m benchmarks.store.codecs [--texts 12] [--context 1024] [--following 256] [--json FILE]

The embedded model reads `--context` tokens of source files of Python's standard library that it was not trained on. Its KV is
cut into blocks of 16 tokens, each is encoded and decoded, and the model continues from the result:

ratio        bytes before / bytes after, over all blocks
GB/s         of raw payload, median over all blocks, one thread, the blocks' bytes in memory
pays below   the link at which fetching raw takes as long as fetching encoded and decoding: decode GB/s x (1 - 1 / ratio)
perplexity   of the text that follows, given the decoded KV; the row `raw` is the exact one
KL           divergence of the next token's distribution from the exact one, nats, mean over the positions that follow
top-1        share of these positions whose likeliest token is the same
greedy 64    share of 64 greedily generated tokens that are the same as with the exact KV, place by place

A second table has ratio and speed for larger blocks of the same KV. `zstd -1` is the whole payload through zstd as it is.
"""

import argparse
import json
import math
import os
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
import zstandard
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from benchmarks.harness import machine, median, set_up, table, version_of
from foreword.blocks.layout import LayerLayout, Layout
from foreword.store.codec import NAMES, Codec, codec_named

MODEL = Path(__file__).resolve().parents[2] / "foreword" / "models" / "stdlib-nano"
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
SIZES = (16, 64, 256)

Layers = list[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Text:
    """Token ids `[1, context]` and `[1, following]`, and the exact KV of the context: per layer K, V `[tokens, heads, dim]`."""

    context: torch.Tensor
    following: torch.Tensor
    layers: Layers


@dataclass(frozen=True)
class Outcome:
    """The model's answer after some KV: logits `[following, vocabulary]`, the tokens that follow."""

    logits: torch.Tensor
    greedy: list[int]


class Plain:
    """zstd on the payload as it is, for comparison."""

    name = "zstd -1"

    def __init__(self) -> None:
        self._compress = zstandard.ZstdCompressor(level=1).compress
        self._decompress = zstandard.ZstdDecompressor().decompress

    def encode(self, payload: memoryview, layout: Layout) -> bytes:
        return bytes(self._compress(payload))

    def decode(self, data: memoryview, out: memoryview, layout: Layout) -> None:
        out[:] = self._decompress(data)


class Bench:
    """The model in one dtype and the KV of all texts."""

    def __init__(self, dtype: str, args: argparse.Namespace) -> None:
        self.dtype = dtype
        self.args = args
        self.model: Any = AutoModelForCausalLM.from_pretrained(MODEL, dtype=DTYPES[dtype], local_files_only=True).eval()
        tokenizer = AutoTokenizer.from_pretrained(MODEL, local_files_only=True)
        self.texts = [self._text(tokens) for tokens in windows(tokenizer, args)]
        self.exact = [self.outcome(text, text.layers) for text in self.texts]

    def layout(self, block_size: int) -> Layout:
        layers = tuple(LayerLayout(key.shape[1], key.shape[2], value.shape[2]) for key, value in self.texts[0].layers)
        return Layout(b"stdlib-nano", block_size, layers, self.dtype)

    def payloads(self, text: Text, block_size: int) -> list[bytes]:
        """The text's blocks as a store gets them."""
        return [
            b"".join(_bytes(part[start : start + block_size]) for pair in text.layers for part in pair)
            for start in range(0, self.args.context, block_size)
        ]

    def restored(self, payloads: Sequence[memoryview], block_size: int) -> Layers:
        """Layers of KV from the blocks of a text."""
        layout = self.layout(block_size)
        pieces: list[list[torch.Tensor]] = [[] for _ in range(2 * len(layout.layers))]
        for payload in payloads:
            numbers = torch.frombuffer(payload, dtype=DTYPES[self.dtype])
            start = 0
            for number, layer in enumerate(layout.layers):
                for half, dim in enumerate((layer.key_dim, layer.value_dim)):
                    shape = (block_size, layer.kv_heads, dim)
                    size = block_size * layer.kv_heads * dim
                    pieces[2 * number + half].append(numbers[start : start + size].reshape(shape))
                    start += size
        joined = [torch.cat(piece) for piece in pieces]
        return list(zip(joined[::2], joined[1::2], strict=True))

    @torch.inference_mode()
    def outcome(self, text: Text, layers: Layers) -> Outcome:
        logits = self.model(text.following, past_key_values=_cache(layers), use_cache=True).logits[0].float()
        cache, token, greedy = _cache(layers), text.following[:, :1], []
        for _ in range(self.args.greedy):
            token = self.model(token, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
            greedy.append(int(token))
        return Outcome(logits, greedy)

    @torch.inference_mode()
    def _text(self, tokens: list[int]) -> Text:
        ids = torch.tensor([tokens])
        context, following = ids[:, : self.args.context], ids[:, self.args.context :]
        cache = self.model(context, use_cache=True).past_key_values
        layers = [
            (layer.keys[0].transpose(0, 1).contiguous(), layer.values[0].transpose(0, 1).contiguous())
            for layer in cache.layers
        ]
        return Text(context, following, layers)


def windows(tokenizer: Any, args: argparse.Namespace) -> list[list[int]]:
    """Stretches of source text that the model did not see in training, from as many files as there are."""
    report = json.loads((MODEL / "training_report.json").read_text())
    folder = Path(sysconfig.get_path("stdlib"))
    length = args.context + args.following
    cut: list[list[list[int]]] = []
    for name in report["held_out_paths"]:
        path = folder / name
        tokens = tokenizer.encode(path.read_text()) if path.exists() else []
        cut.append([tokens[start : start + length] for start in range(0, len(tokens) - length + 1, length)])
    found = [pieces[turn] for turn in range(max(map(len, cut))) for pieces in cut if turn < len(pieces)]
    if len(found) < args.texts:
        raise SystemExit(f"only {len(found)} texts of {length} tokens are here; ask for fewer or shorter ones")
    return found[: args.texts]


def speeds(
    codec: Plain | Codec, payloads: Sequence[bytes], layout: Layout, seconds: float
) -> tuple[float, float, float]:
    """Ratio, encode GB/s and decode GB/s."""
    encoded = [bytes(codec.encode(memoryview(payload), layout)) for payload in payloads]
    out = memoryview(bytearray(layout.block_bytes))
    jobs = [memoryview(payload) for payload in payloads]
    encode = _median_seconds(lambda number: codec.encode(jobs[number], layout), len(jobs), seconds)
    decode = _median_seconds(lambda number: codec.decode(memoryview(encoded[number]), out, layout), len(jobs), seconds)
    size = layout.block_bytes / 1e9
    return sum(map(len, payloads)) / sum(map(len, encoded)), size / encode, size / decode


def fidelity(bench: Bench, codec: Codec) -> tuple[float, float, float, float]:
    """Perplexity, KL, share of equal top-1 tokens, share of equal greedy tokens, over all texts."""
    block_size = SIZES[0]
    layout = bench.layout(block_size)
    losses: list[float] = []
    divergences: list[float] = []
    agreeing: list[float] = []
    greedy: list[float] = []
    for text, exact in zip(bench.texts, bench.exact, strict=True):
        back = []
        for payload in bench.payloads(text, block_size):
            out = bytearray(layout.block_bytes)
            codec.decode(memoryview(codec.encode(memoryview(payload), layout)), memoryview(out), layout)
            back.append(memoryview(out))
        found = bench.outcome(text, bench.restored(back, block_size))
        logs, truth = found.logits.log_softmax(-1), exact.logits.log_softmax(-1)
        losses += (-logs[:-1].gather(1, text.following[0, 1:, None])[:, 0]).tolist()
        divergences += (truth.exp() * (truth - logs)).sum(-1).tolist()
        agreeing += (logs.argmax(-1) == truth.argmax(-1)).float().tolist()
        greedy += [float(a == b) for a, b in zip(found.greedy, exact.greedy, strict=True)]
    means = [float(np.mean(each)) for each in (losses, divergences, agreeing, greedy)]
    return math.exp(means[0]), means[1], means[2], means[3]


def quality_rows(bench: Bench) -> Iterator[list[str]]:
    layout = bench.layout(SIZES[0])
    payloads = [payload for text in bench.texts for payload in bench.payloads(text, SIZES[0])]
    for name in NAMES:
        codec = codec_named(name)
        ratio, encode, decode = speeds(codec, payloads, layout, bench.args.seconds)
        perplexity, divergence, same, greedy = fidelity(bench, codec)
        yield [
            f"{bench.dtype} {name}", f"{ratio:.2f}", f"{encode:.2f}", f"{decode:.2f}", _pays(ratio, decode),
            f"{perplexity:.2f}", f"{divergence:.5f}", f"{same:.1%}", f"{greedy:.1%}",
        ]  # fmt: skip


def size_rows(bench: Bench) -> Iterator[list[str]]:
    for block_size in SIZES:
        layout = bench.layout(block_size)
        payloads = [payload for text in bench.texts for payload in bench.payloads(text, block_size)]
        codecs: list[Plain | Codec] = [Plain(), *(codec_named(name) for name in NAMES[1:])]
        for codec in codecs:
            ratio, encode, decode = speeds(codec, payloads, layout, bench.args.seconds)
            size = f"{layout.block_bytes / 1024:.0f} KiB"
            cells = [f"{number:.2f}" for number in (ratio, encode, decode)]
            yield [f"{bench.dtype} {codec.name}", str(block_size), size, *cells, _pays(ratio, decode)]


def _pays(ratio: float, decode: float) -> str:
    """GB/s of a link at which decoding takes what the shorter way saves."""
    return f"{decode * (1 - 1 / ratio):.2f}" if ratio > 1 else "-"


def _median_seconds(run: Callable[[int], object], count: int, seconds: float) -> float:
    """Of calls with 0 .. count - 1 in turn, each at least once, for about so many seconds."""
    run(0)
    taken: list[float] = []
    end = time.perf_counter() + seconds
    while len(taken) < count or time.perf_counter() < end:
        number = len(taken) % count
        started = time.perf_counter()
        run(number)
        taken.append(time.perf_counter() - started)
    return median(taken)


def _bytes(part: torch.Tensor) -> bytes:
    return part.contiguous().view(torch.uint8).numpy().tobytes()


def _cache(layers: Layers) -> Any:
    """A cache of the model's own with this KV; the tensors are copied."""
    cache = DynamicCache()
    for number, (key, value) in enumerate(layers):
        cache.update(key.transpose(0, 1)[None].clone(), value.transpose(0, 1)[None].clone(), number)
    return cache


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=12)
    parser.add_argument("--context", type=int, default=1024, help=f"tokens, a multiple of {SIZES[-1]}")
    parser.add_argument("--following", type=int, default=256, help="tokens")
    parser.add_argument("--greedy", type=int, default=64, help="tokens")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each figure of speed, at least")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.context % SIZES[-1]:
        parser.error(f"--context must be a multiple of {SIZES[-1]}")
    torch.set_num_threads(1)
    facts = machine() | {name: version_of(name) for name in ("torch", "transformers", "numpy", "zstandard")}
    facts |= {"model": MODEL.name, "texts": f"{args.texts} of {args.context} + {args.following} tokens"}
    print(set_up(facts), end="\n\n", flush=True)
    quality: list[list[str]] = []
    sizes: list[list[str]] = []
    for dtype in args.dtypes:
        bench = Bench(dtype, args)
        quality += quality_rows(bench)
        sizes += size_rows(bench)
    head = [
        "blocks of 16 tokens", "ratio", "encode GB/s", "decode GB/s", "pays below GB/s",
        "perplexity", "KL", "top-1", f"greedy {args.greedy}",
    ]  # fmt: skip
    print(table(head, quality), end="\n\n")
    print(table(["larger blocks", "tokens", "block", "ratio", "encode GB/s", "decode GB/s", "pays below GB/s"], sizes))
    if args.json:
        args.json.write_text(json.dumps({"set-up": facts, "quality": quality, "sizes": sizes}, indent=2) + "\n")


if __name__ == "__main__":
    main()
