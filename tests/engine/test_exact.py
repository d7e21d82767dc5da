"""A hit has the bits of a computation, with default settings: every way to KV within one process against a cold computation
alone, by equality of tokens and of all logits. The wider campaign is benchmarks/engine/bit_exact.py."""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from config_constants import constants, taken
from example_counts import examples, represented
from patience import patient, unhurried

from foreword.engine.request import SamplingParams
from foreword.engine_config import EngineConfig
from foreword.entrypoints.llm import LLM

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler")
# Dense, windows, experts of two kinds, GPT-2, latent attention, and one embedding for input and output.
FAMILIES = ["llama", "gemma3", "mixtral", "gpt_oss", "gpt2", "deepseek_v3", "tied"]
CHUNKS = (16, 33, 64, 256, 2048)
BATCHES = (1, 2, 5, 16, 64)
# Tokens of a beginning that some of the prompts share.
SHARED = 40

# The logits that each token of a prompt's answer was chosen from, by prompt and number of the tokens before.
Logits = dict[tuple[tuple[int, ...], int], torch.Tensor]


@pytest.fixture(scope="module")
def family(folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The checkpoint of a family, by name."""
    made: dict[str, str] = {}

    def find(name: str) -> str:
        if name != "tied":
            return str(folder(name))
        if name not in made:
            config = tiny.FAMILIES["llama"]()
            config.tie_word_embeddings = True
            made[name] = str(tiny.save(tiny.random_model(config), tmp_path_factory.mktemp(name)))
        return made[name]

    return find


def start(model: str, dtype: str, **options: Any) -> LLM:
    """An engine with default settings, but for its sizes and that it loads what it finds."""
    store = options.pop("store", None)
    sizes: dict[str, Any] = {"kv_memory": "12288 tokens", "block_size": 4, "threads": 1, "self_check": False}
    with constants(EngineConfig, **taken(EngineConfig, options)):
        return unhurried(LLM(model, dtype=dtype, store=patient(store) if store else (), **sizes | options))


class Watched:
    """An engine whose logits are kept."""

    def __init__(self, model: str, dtype: str, **options: Any) -> None:
        self.llm = start(model, dtype, **options)
        assert self.llm.info.inexact == ""
        self.logits: Logits = {}
        self.hits = 0
        runner = self.llm._core._runner
        forward = runner._forward

        def kept(step: Any, rows: Sequence[int]) -> torch.Tensor:
            logits: torch.Tensor = forward(step, rows)
            sampled = [chunk for chunk in step.chunks if chunk.samples]
            for chunk, row in zip(sampled, logits, strict=False):
                self.logits[tuple(chunk.sequence.request.tokens), chunk.start + chunk.count] = row.clone()
            return logits

        runner._forward = kept

    def compute(self, prompts: Sequence[list[int]], chunk: int, params: Sequence[SamplingParams]) -> list[Any]:
        """Tokens and logits of the answers to prompts in one batch, whose steps have at most `chunk` tokens."""
        self.llm._core.scheduler._max_batch_tokens = chunk
        self.logits.clear()
        outputs = self.llm.generate(prompts, list(params))
        self.hits += sum(output.cached_tokens > 0 for output in outputs)
        found = []
        for prompt, output in zip(prompts, outputs, strict=True):
            assert output.error is None
            tokens = output.outputs[0].tokens
            rows = [self.logits[tuple(prompt), len(prompt) + number] for number in range(len(tokens))]
            found.append((tokens, torch.stack(rows).float().numpy().tobytes()))
        return found


class Pairs:
    """Prompts, their answers when each is computed alone and cold, and comparisons with them."""

    def __init__(
        self, model: str, dtype: str, seed: str, *, count: int = 14, longest: int = 90, new_tokens: int = 4
    ) -> None:
        self.model, self.dtype = model, dtype
        self.chance = random.Random(seed)
        shared = self._text(SHARED)
        self.prompts = [self._text(self.chance.randint(1, longest)) for _ in range(count - count // 3)]
        self.prompts += [shared + self._text(self.chance.randint(1, 30)) for _ in range(count // 3)]
        # Greedy, and sampled with a seed.
        self.params = [
            SamplingParams(max_tokens=new_tokens, temperature=0.0 if number % 2 else 1.0, seed=number, ignore_eos=True)
            for number in range(count)
        ]
        alone = Watched(model, dtype, enable_prefix_caching=False)
        pairs = zip(self.prompts, self.params, strict=True)
        self.expected = [alone.compute([prompt], 4096, [params])[0] for prompt, params in pairs]
        self.alone = alone

    def _text(self, length: int) -> list[int]:
        return [self.chance.randrange(256) for _ in range(length)]

    def draw(self, count: int) -> list[int]:
        return self.chance.choices(range(len(self.prompts)), k=count)

    def part(self, number: int) -> list[int]:
        """A beginning of a prompt."""
        prompt = self.prompts[number]
        return prompt[: self.chance.randint(1, len(prompt))]

    def check(self, engine: Watched, numbers: Sequence[int]) -> None:
        """Compute some of the prompts in one batch, in chunks of a random size."""
        chunk = self.chance.choice(CHUNKS)
        numbers = list(dict.fromkeys(numbers))
        found = engine.compute([self.prompts[n] for n in numbers], chunk, [self.params[n] for n in numbers])
        for number, one in zip(numbers, found, strict=True):
            assert one == self.expected[number], f"prompt {number} of {len(numbers)} in chunks of {chunk}"


# Every family in bfloat16, and in one of the others.
@pytest.fixture(
    params=represented(
        [(name, dtype) for at, name in enumerate(FAMILIES) for dtype in ("bfloat16", ("float32", "float16")[at % 2])],
        ("llama", "bfloat16"),
    ),
    ids="-".join,
)
def pairs(request: pytest.FixtureRequest, family: Callable[[str], str]) -> Pairs:
    name, dtype = request.param
    return Pairs(family(name), dtype, f"{name} {dtype}")


def test_hits_have_the_bits_of_a_computation(pairs: Pairs, tmp_path: Path) -> None:
    """In chunks and batches of any size; after hits of whole and partial blocks on the device, and of blocks from memory and
    from disk, also where some of them are damaged."""
    for size in BATCHES:
        pairs.check(pairs.alone, pairs.draw(size))
    device = Watched(pairs.model, pairs.dtype)
    for _ in range(examples(9)):
        device.llm.clear_cache()
        numbers = pairs.draw(pairs.chance.choice(BATCHES))
        device.llm.generate([pairs.part(number) for number in numbers], tiny.greedy(1))
        pairs.check(device, numbers)
    for store in ("memory://?size=64MiB", f"disk://{tmp_path}"):
        stored = Watched(pairs.model, pairs.dtype, store=store)
        with stored.llm:
            for number in range(len(pairs.prompts)):
                stored.llm.generate([pairs.part(number)], tiny.greedy(1))
            assert stored.llm.flush()
            for damaged in (False, True) if store.startswith("disk") else (False,):
                if damaged:
                    damage(tmp_path, pairs.chance)
                for _ in range(examples(6)):
                    stored.llm.clear_cache()
                    pairs.check(stored, pairs.draw(8))
            assert stored.hits
    assert device.hits


@pytest.mark.parametrize("name", represented(FAMILIES, "llama"))
def test_preempted(name: str, family: Callable[[str], str]) -> None:
    """Where answers outgrow the memory: a sequence that was preempted continues with the same bits."""
    pairs = Pairs(family(name), "bfloat16", name, count=6, longest=20, new_tokens=24)
    small = Watched(pairs.model, pairs.dtype, kv_memory="128 tokens", reserve=0.0, lookahead_blocks=0)
    for _ in range(examples(6)):
        pairs.check(small, pairs.draw(12))
    assert small.llm._core.scheduler.num_preemptions


def damage(folder: Path, chance: random.Random) -> None:
    """Change a byte in each second file of a store: what it holds is found, and cannot be loaded."""
    # Not those that are being written, whose names have the writer's behind a dot, nor the index.
    files = sorted(path for path in folder.rglob("*") if re.fullmatch("[0-9a-f]{64}", path.name))
    assert files
    for path in files[::2]:
        content = bytearray(path.read_bytes())
        content[chance.randrange(len(content) // 2, len(content))] ^= 1
        path.write_bytes(content)


@pytest.mark.extended
def test_quantized_and_penalised(family: Callable[[str], str]) -> None:
    """Exactness holds with 8-bit weights too, and under penalties."""
    pairs = Pairs(family("llama"), "bfloat16", "quantized")
    params = SamplingParams(max_tokens=8, temperature=0.8, seed=3, repetition_penalty=1.2, frequency_penalty=0.5)
    cold = Watched(pairs.model, pairs.dtype, quantization="int8", enable_prefix_caching=False)
    expected = [cold.compute([prompt], 4096, [params])[0] for prompt in pairs.prompts]
    warm = Watched(pairs.model, pairs.dtype, quantization="int8")
    for _ in range(3):
        assert warm.compute(pairs.prompts, pairs.chance.choice(CHUNKS), [params] * len(expected)) == expected
    assert warm.hits
