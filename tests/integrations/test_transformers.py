"""`KVCache`: `generate()` of Transformers with persistent prefixes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
import transformers

from foreword.conformance import FlakyStore
from foreword.engine.request import SamplingParams
from foreword.entrypoints.llm import LLM
from foreword.errors import BadRequest, StoreConfigError
from foreword.integrations.transformers import KVCache
from foreword.store.urls import open_store

torch.set_num_threads(1)

_SMALL: dict[str, Any] = {
    "vocab_size": 260, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.2, "max_position_embeddings": 512,
    "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**_SMALL),
    "gemma2": lambda: transformers.Gemma2Config(**_SMALL, sliding_window=24, query_pre_attn_scalar=16),
    "mistral": lambda: transformers.MistralConfig(**_SMALL, sliding_window=24),
}


def make(name: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(CONFIGS[name]()).eval()


def ids(length: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 250, (1, length), generator=generator)


def go(model: Any, prompt: torch.Tensor, cache: Any = None) -> torch.Tensor:
    found: torch.Tensor = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        past_key_values=cache,
        max_new_tokens=12,
        do_sample=False,
    )
    return found


@pytest.mark.parametrize("family", list(CONFIGS))
def test_three_lines(family: str, tmp_path: Path) -> None:
    """A second run of the same script loads the prompt, and the answer with it, and generates the same text; with a sliding
    window too."""
    model, prompt, url = make(family), ids(70), f"disk://{tmp_path}/kv?size=64MiB"
    expected = go(model, prompt)
    cache = KVCache(model, url, prompt)
    output = go(model, prompt, cache)
    assert cache.loaded_tokens == 0
    assert cache.save(output) == (70 + 12 - 1) // 16
    assert torch.equal(output, expected)

    again = KVCache(model, url, prompt)
    assert again.loaded_tokens == 64 and again.get_seq_length() == 64
    assert torch.equal(go(model, prompt, again), expected)
    again.close()

    longer = torch.cat([expected, ids(5, 1)], dim=1)
    turn = KVCache(model, url, longer)
    assert turn.loaded_tokens == 80
    assert torch.equal(go(model, longer, turn), go(model, longer))
    turn.close()


def test_shares_with_the_engine(tmp_path: Path) -> None:
    """A server's blocks are found by a script, and a script's by a server, which is not batch-invariant, as scripts are not."""
    folder, url = tmp_path / "model", f"disk://{tmp_path}/kv?size=64MiB"
    model = make("llama")
    model.save_pretrained(folder)
    _tokenizer(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    first, second = ids(50, 1), ids(50, 2)
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    settings: dict[str, Any] = {"dtype": "float32", "kv_memory": "1024 tokens", "threads": 1, "store": url}
    settings["batch_invariant"] = "off"
    with LLM(str(folder), **settings) as llm:
        [output] = llm.generate(first[0].tolist(), params)
    cache = KVCache(model, url, first)
    assert cache.loaded_tokens == 48
    assert go(model, first, cache)[0, 50:].tolist() == list(output.outputs[0].tokens)
    cache.close()

    cache = KVCache(model, url, second)
    made = go(model, second, cache)
    cache.save(made)
    with LLM(str(folder), **settings) as llm:
        [output] = llm.generate(second[0].tolist(), params)
    assert output.cached_tokens == 48
    assert list(output.outputs[0].tokens) == made[0, 50:].tolist()


def _tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    pieces = pre_tokenizers.ByteLevel.alphabet()
    tokenizer = Tokenizer(models.BPE(vocab={piece: number for number, piece in enumerate(sorted(pieces))}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def test_other_weights_and_salts_find_nothing(tmp_path: Path) -> None:
    """Another model's blocks, or another salt's, are not found."""
    prompt, url = ids(40), f"disk://{tmp_path}/kv?size=64MiB"
    model = make("llama")
    cache = KVCache(model, url, prompt, salt=b"a")
    go(model, prompt, cache)
    assert cache.save() == 2
    for other, salt in ((make("llama", seed=1), b"a"), (model, b"b"), (model, b"")):
        cache = KVCache(other, url, prompt, salt=salt)
        assert cache.loaded_tokens == 0
        cache.close()
    assert KVCache(model, url, prompt, salt=b"a").loaded_tokens == 32


def test_a_store_that_fails(tmp_path: Path) -> None:
    """A failing store, or damaged blocks, is a cache miss and nothing else."""
    model, prompt = make("llama"), ids(60)
    expected = go(model, prompt)
    store = open_store(["memory://?size=16MiB"])
    cache = KVCache(model, store, prompt)
    cache.save(go(model, prompt, cache))
    flaky = store.tiers[0].store = FlakyStore(store.tiers[0].store)
    for fault in ("corrupt", "truncate", "fail"):
        flaky.inject(fault)
        cache = KVCache(model, store, prompt)
        assert cache.loaded_tokens == 0
        assert torch.equal(go(model, prompt, cache), expected)
        cache.save()
        flaky.inject(fault, 0.0)
    store.close()


def test_bad_input(tmp_path: Path) -> None:
    """Several sequences, tokens of another text and a wrong URL are errors that say so."""
    model = make("llama")
    with pytest.raises(BadRequest, match="one sequence"):
        KVCache(model, "memory://?size=1MiB", ids(8).repeat(2, 1))
    cache = KVCache(model, "memory://?size=1MiB", ids(8))
    with pytest.raises(BadRequest, match="not the tokens"):
        cache.save(ids(8, seed=5))
    with pytest.raises(StoreConfigError):
        KVCache(model, "dsik:///tmp", ids(8))
