"""`attach`: `generate()` and pipelines of Transformers with persistent prefixes."""

from __future__ import annotations

import copy
import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import tokenizers
import torch
import transformers
from example_counts import represented
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from foreword.conformance import FlakyStore
from foreword.errors import BadRequest, ModelUnsupported, StoreConfigError
from foreword.integrations.transformers import attach
from foreword.store.urls import open_store

torch.set_num_threads(1)

_ENDS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
_SMALL: dict[str, Any] = {
    "vocab_size": 260, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.2, "max_position_embeddings": 512, **_ENDS,
}  # fmt: skip
_GEMMA: dict[str, Any] = {**_SMALL, "sliding_window": 24, "query_pre_attn_scalar": 16}
# Full attention, windows in all layers and in some, chunks, experts, compressed KV, learned positions.
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**_SMALL),
    "mistral": lambda: transformers.MistralConfig(**_SMALL, sliding_window=24),
    "gemma2": lambda: transformers.Gemma2Config(**_GEMMA),
    "llama4": lambda: transformers.Llama4TextConfig(
        **_SMALL, intermediate_size_mlp=96, num_local_experts=2, attention_chunk_size=32
    ),
    "gpt-oss": lambda: transformers.GptOssConfig(**_SMALL, sliding_window=24, num_local_experts=4),
    "deepseek": lambda: transformers.DeepseekV3Config(
        **{**_SMALL, "num_key_value_heads": 4, "head_dim": 8}, moe_intermediate_size=32, n_routed_experts=4, n_group=1,
        topk_group=1, num_experts_per_tok=2, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, v_head_dim=16,
        qk_nope_head_dim=16, first_k_dense_replace=1,
    ),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=260, n_embd=64, n_layer=3, n_head=4, n_positions=512, initializer_range=0.2, **_ENDS
    ),
}  # fmt: skip
WINDOWS = ("mistral", "gemma2", "llama4", "gpt-oss")
MEMORY = "memory://?size=64MiB"


def make(name: str, seed: int = 0, **more: Any) -> Any:
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(CONFIGS[name](), **more).eval()


def ids(length: int, seed: int = 0) -> Tensor:
    return torch.randint(1, 250, (1, length), generator=torch.Generator().manual_seed(seed))


def batch(*prompts: Tensor, side: str = "left") -> dict[str, Tensor]:
    """Prompts as a tokenizer pads them."""
    longest = max(prompt.shape[1] for prompt in prompts)
    rows, masks = [], []
    for prompt in prompts:
        gap = torch.zeros(1, longest - prompt.shape[1], dtype=torch.long)
        parts = ((gap, prompt), (gap, torch.ones_like(prompt)))
        for whole, part in zip((rows, masks), parts, strict=True):
            whole.append(torch.cat(part if side == "left" else part[::-1], dim=1))
    return {"input_ids": torch.cat(rows), "attention_mask": torch.cat(masks)}


def go(model: Any, inputs: Tensor | dict[str, Tensor], **more: Any) -> Any:
    given = {"input_ids": inputs, "attention_mask": torch.ones_like(inputs)} if isinstance(inputs, Tensor) else inputs
    given = {**given, "max_new_tokens": 12, "do_sample": False, **more}
    return model.generate(**given, return_dict_in_generate=True, output_logits=True)


def same(one: Any, other: Any) -> None:
    """Equal tokens, and logits that differ by rounding only."""
    assert torch.equal(one.sequences, other.sequences)
    for mine, expected in zip(one.logits, other.logits, strict=True):
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("cache", represented(["dynamic", "static"], "dynamic"))
@pytest.mark.parametrize("family", represented(CONFIGS, "gpt-oss"))
def test_batches(family: str, cache: str) -> None:
    """In a batch of prompts of different lengths each row loads its own prefix: all of it, some, or none. The answers are those
    that are computed, with each kind of cache, with windows too."""
    how = {} if cache == "dynamic" else {"cache_implementation": cache}
    model, first = make(family), batch(ids(70, 1), ids(33, 2), ids(5, 3))
    second = batch(torch.cat([ids(70, 1)[:, :50], ids(30, 4)], 1), ids(60, 5), ids(5, 3), ids(33, 2), ids(1, 6))
    expected = [go(model, one, **how) for one in (first, second)]
    store = attach(model, MEMORY)
    same(go(model, first, **how), expected[0])
    assert store.loaded_tokens == (0, 0, 0)
    same(go(model, second, **how), expected[1])
    assert store.loaded_tokens == (48, 0, 0, 32, 0)
    same(go(model, first, **how), expected[0])
    assert store.loaded_tokens == (64, 32, 0)
    assert not store.not_used
    store.close()


@pytest.mark.parametrize("family", represented(["llama", "gemma2"], "gemma2"))
def test_a_conversation(family: str, tmp_path: Path) -> None:
    """A later process loads the prompt, and the answer with it, which layers that keep a window only have lost. A turn that
    goes on loads both."""
    model, prompt, url = make(family), ids(70), f"disk://{tmp_path}/kv?size=64MiB"
    expected = go(model, prompt)
    store = attach(model, url)
    same(go(model, prompt), expected)
    store.close()
    assert store.saved_blocks == (4 if family in WINDOWS else 5)
    model = make(family)
    longer = torch.cat([expected.sequences, ids(5, 1)], dim=1)
    alone = go(model, longer)
    store = attach(model, url)
    same(go(model, prompt), expected)
    assert store.loaded_tokens == (64,)
    same(go(model, longer), alone)
    assert store.loaded_tokens == (64 if family in WINDOWS else 80,)
    store.close()


def test_answers_that_end_early() -> None:
    """Each row of a batch is saved up to its answer's end, without the padding behind it."""
    model, prompts = make("llama"), batch(ids(30, 1), ids(20, 2))
    alone = go(model, prompts, max_new_tokens=40).sequences
    end = int(alone[1, 30 + 3])
    lengths = [(row.tolist().index(end) + 1) if end in row else 40 for row in alone[:, 30:]]
    store = attach(model, MEMORY)
    ended = go(model, prompts, max_new_tokens=40, eos_token_id=end).sequences
    assert store.saved_blocks == sum(
        (start + length - (length == 40)) // 16 for start, length in zip((30, 20), lengths, strict=True)
    )
    turn = ended[:1, : 30 + lengths[0]]
    same(go(model, turn), go(make("llama"), turn))
    assert store.loaded_tokens[0] >= (29 + lengths[0]) // 16 * 16 - 16
    store.close()


@pytest.mark.parametrize("how", [{"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}], ids=str)
@pytest.mark.parametrize("family", represented(["llama", "gemma2"], "llama"))
def test_beams(family: str, how: dict[str, int]) -> None:
    """Beams start from the cached prompt, which is loaded once for all of them. Only prompts are saved."""
    model, prompts = make(family), batch(ids(50, 1), ids(20, 2))
    expected = go(model, prompts, **how).sequences
    store = attach(model, MEMORY)
    for loaded in ((0, 0), (48, 16)):
        assert torch.equal(go(model, prompts, **how).sequences, expected)
        assert store.loaded_tokens == tuple(one for one in loaded for _ in range(how["num_beams"]))
        assert store.saved_blocks == 4
    store.close()


def test_several_samples_of_a_prompt() -> None:
    """Each of several samples continues the one prompt, and its own answer is saved."""
    model, prompt = make("llama"), ids(33, 1)
    how: dict[str, Any] = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 32}
    torch.manual_seed(5)
    expected = go(model, prompt, **how)
    store = attach(model, MEMORY)
    torch.manual_seed(5)
    found = go(model, prompt, **how)
    same(found, expected)
    assert store.saved_blocks == 2 + 3 * 2
    turn = torch.cat([found.sequences, ids(3, 2).repeat(3, 1)], dim=1)
    same(go(model, turn), go(make("llama"), turn))
    assert store.loaded_tokens == (64, 64, 64)
    store.close()


@pytest.mark.extended
def test_pipelines(tmp_path: Path) -> None:
    """A pipeline for text finds what an earlier one saved: of single texts, of batches, of chats."""
    tokenizer, url = _tokenizer(), f"disk://{tmp_path}/kv?size=64MiB"
    texts = [
        "Once upon a time there was a cache. " * 3,
        "Short.",
        "Once upon a time there was a cache. " * 3 + "And then?",
    ]
    chat = [{"role": "system", "content": "You answer questions at length. " * 3}, {"role": "user", "content": "Why?"}]

    def answers() -> tuple[list[Any], list[tuple[int, ...]]]:
        model, loaded = make("llama"), []
        pipe = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
        store = attach(pipe.model, url) if use else None
        found = []
        for given, size in ((texts[0], 1), (texts, 3), (chat, 1)):
            found.append(pipe(given, batch_size=size, max_new_tokens=8, do_sample=False))
            loaded.append(store.loaded_tokens if store is not None else ())
        assert store is None or not store.not_used
        return found, loaded

    use = False
    expected, _ = answers()
    use = True
    first, loaded = answers()
    assert first == expected and loaded[0] == (0,) and loaded[1] == (96, 0, 96)
    second, loaded = answers()
    assert second == expected and loaded[0] == (96,) and loaded[2][0] > 80


def _tokenizer() -> Any:
    pieces = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={piece: i + 1 for i, piece in enumerate(pieces)}, merges=[])
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<pad>"])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", padding_side="left")
    fast.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    return fast


def test_a_cache_of_the_caller() -> None:
    """An empty cache of the caller is filled, and one that has tokens is left as it is."""
    model, prompt = make("gemma2"), ids(50)
    expected = go(model, prompt)
    store = attach(model, MEMORY)
    for kind in (transformers.DynamicCache, transformers.DynamicCache, transformers.StaticCache):
        size = {"max_cache_len": 128} if kind is transformers.StaticCache else {}
        cache = kind(config=model.config, **size)
        same(go(model, prompt, cache=cache), expected)
    assert store.loaded_tokens == (48,)
    longer = torch.cat([expected.sequences, ids(3, 2)], dim=1)
    same(go(model, longer, cache=cache), go(make("gemma2"), longer))
    assert list(store.not_used) == ["the cache already has tokens"]
    store.close()


def _assistant(_model: Any) -> dict[str, Any]:
    return {"assistant_model": make("llama", seed=1)}


NOT_USED: dict[str, tuple[Callable[[Any], dict[str, Any]], str]] = {
    "positions": (lambda _: {"position_ids": torch.arange(3, 43)[None]}, "positions"),
    "padding": (lambda _: batch(ids(40), ids(20), side="right"), "padding"),
    "holes": (lambda _: {"attention_mask": torch.cat([ids(20) // 250, ids(20) // 250 + 1], 1).roll(1)}, "padding"),
    "embeddings": (lambda model: {"inputs_embeds": model.get_input_embeddings()(ids(40))}, "inputs_embeds"),
    "no cache": (lambda _: {"use_cache": False}, "NoneType"),
    "hidden states": (lambda _: {"output_hidden_states": True}, "hidden_states"),
    "an assistant": (_assistant, ""),
    "prompt lookup": (lambda _: {"prompt_lookup_num_tokens": 3}, ""),
}


@pytest.mark.parametrize("case", represented(NOT_USED, "holes", "an assistant"))
def test_not_used(case: str) -> None:
    """Inputs that are not the KV of a prompt's tokens alone, and generation with drafts, are computed without the stores:
    neither loaded nor saved, and with the answers of before."""
    make_inputs, reason = NOT_USED[case]
    model = make("llama")
    more = make_inputs(model)
    prompt = {"input_ids": ids(40), "attention_mask": torch.ones(1, 40, dtype=torch.long), **more}
    expected = go(model, prompt)
    store = attach(model, MEMORY)
    go(model, ids(40))
    saved = store.saved_blocks
    found = go(model, prompt)
    assert torch.equal(found.sequences, expected.sequences)
    assert store.saved_blocks == saved and [one for one in store.not_used if reason and reason in one] == list(
        store.not_used
    )
    assert bool(store.not_used) == bool(reason)
    store.close()


def _scale(model: Any) -> None:
    model.model.layers[0].self_attn.k_proj.weight.data *= 1.5  # without a trace in the tensor's version


def _steer(model: Any) -> None:
    model.model.layers[0].register_forward_hook(lambda _, __, output: output + 0.5)


def _half(model: Any) -> None:
    model.to(torch.bfloat16)


def _rope(model: Any) -> None:
    model.model.rotary_emb.inv_freq *= 0.5


def _window(model: Any) -> None:
    model.config.sliding_window = 20


def _steer_some(model: Any) -> None:
    def steer(module: Any, inputs: Any, output: Any) -> Any:
        return output + (inputs[0] % 250 > 224)[..., None]  # tokens that the probe does not have

    model.model.embed_tokens.register_forward_hook(steer)


def _in_windows(module: Any, query: Any, key: Any, value: Any, mask: Any, **how: Any) -> Any:
    """Attention that is dense in short prompts."""
    if key.shape[2] > 20:
        places = torch.arange(key.shape[2])
        ago = places[-query.shape[2] :, None] - places
        mask = torch.zeros(ago.shape).masked_fill((ago < 0) | (ago > 19), -torch.inf)[None, None]
    return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask, **how)


def _sparse(model: Any) -> None:
    model.set_attn_implementation("in_windows")


ALL_ATTENTION_FUNCTIONS.register("in_windows", _in_windows)
CHANGES = {"weights": _scale, "hook": _steer, "dtype": _half, "rope": _rope, "configuration": _window}
CHANGES |= {"hook for some": _steer_some, "attention": _sparse}


@pytest.mark.parametrize("change", represented(CHANGES, "weights", "rope", "attention"))
def test_a_model_that_changes(change: str) -> None:
    """Weights that are changed in place, hooks, another attention, dtype, rotary embedding or configuration make another model,
    while a store is attached and at the next start, also if the first tokens do not show it. Each finds its own blocks only."""
    prompt, family = ids(50), "mistral" if change == "configuration" else "llama"
    changed, model = make(family), make(family)
    CHANGES[change](changed)
    expected, shared = go(changed, prompt), open_store([MEMORY])
    store = attach(model, shared)
    go(model, prompt)
    CHANGES[change](model)
    same(go(model, prompt), expected)
    assert store.loaded_tokens == (0,)
    attached = {}
    for one in (changed, make(family)):
        attached[one] = attach(one, shared)
        go(one, prompt)
        assert attached[one].loaded_tokens == (48,)
    same(go(changed, prompt), expected)
    shared.close()


class _Moves(transformers.StoppingCriteria):
    """Changes a model's weights in place once an answer has some tokens, as an asynchronous trainer does, also through `.data`,
    which counts as no new version."""

    def __init__(self, model: Any, after: int, data: bool) -> None:
        self.model, self.after, self.data, self.calls = model, after, data, 0

    def __call__(self, tokens: Tensor, scores: Any, **_: Any) -> Tensor:
        self.calls += 1
        if self.calls == self.after:
            with torch.no_grad():
                weight = self.model.model.layers[1].self_attn.v_proj.weight
                (weight.data if self.data else weight).mul_(1.5)
        return torch.zeros(len(tokens), dtype=torch.bool)


@pytest.mark.parametrize("data", [False, True], ids=["tensor", "data"])
@pytest.mark.parametrize("after", [1, 20])
def test_weights_that_change_during_an_answer(after: int, data: bool) -> None:
    """Nothing is saved of an answer during which the weights changed: neither the weights before nor those after find KV that
    both have computed. Without a change the answer is found."""
    model, prompt = make("llama"), ids(40)
    before, memory = copy.deepcopy(model.state_dict()), open_store([MEMORY])
    store = attach(model, memory)
    moved = go(model, prompt, max_new_tokens=40, stopping_criteria=[_Moves(model, after, data)]).sequences
    plain = make("llama")
    plain.load_state_dict(model.state_dict())
    same(go(model, moved), go(plain, moved))
    model.load_state_dict(before)
    same(go(model, moved), go(make("llama"), moved))
    kept = go(model, prompt, max_new_tokens=40).sequences
    same(go(model, kept), go(make("llama"), kept))
    assert store.loaded_tokens == (64,)
    assert any("changed during the call" in reason for reason in store.not_used)
    memory.close()


class _Adapted(torch.nn.Module):
    """An embedding with adapters that change one token each, of which an attribute says which is active."""

    def __init__(self, plain: torch.nn.Embedding) -> None:
        super().__init__()
        self.plain, self.active, self.num_embeddings = plain, ["none"], plain.num_embeddings

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.plain(tokens)
        changed = (tokens == 7)[..., None] & (self.active != ["none"])
        return torch.where(changed, found * (2.0 if self.active == ["one"] else -1.0), found)


def test_an_attribute_that_switches_adapters() -> None:
    """An active adapter that only an attribute names, and that changes only tokens which the probe lacks, has KV of its own:
    switched in place, back, and in another model."""
    model, prompt = make("llama"), torch.cat([torch.full((1, 1), 7), ids(60)], 1)
    model.set_input_embeddings(_Adapted(model.get_input_embeddings()))
    expected, loaded, memory = {}, [], open_store([MEMORY])
    for active in ("none", "one", "two"):
        model.get_input_embeddings().active = [active]
        expected[active] = go(model, prompt)
    store = attach(model, memory)
    for active in ("none", "one", "two", "one", "none"):
        model.get_input_embeddings().active = [active]
        same(go(model, prompt), expected[active])
        loaded.append(store.loaded_tokens[0])
    assert loaded == [0, 0, 0, 48, 48]
    memory.close()


class _Counts(torch.nn.Module):
    """Counts its calls, and remembers the longest sequence, from when it is computed."""

    def __init__(self, plain: torch.nn.Embedding) -> None:
        super().__init__()
        self.plain, self.calls, self.longest, self.num_embeddings = plain, 0, 0, plain.num_embeddings

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls, self.longest, self.mean = (
            self.calls + 1,
            max(self.longest, tokens.shape[1]),
            tokens.sum().item() / 3,
        )
        found: Tensor = self.plain(tokens)
        return found


def test_attributes_that_a_forward_pass_changes() -> None:
    """A module that counts its calls, and one that stores the longest sequence so far, are no other model after a call: each
    prompt is saved, and loaded in the next calls, and by another process's model."""
    memory, loaded = open_store([MEMORY]), []
    for _ in range(2):
        model = make("llama")
        model.set_input_embeddings(_Counts(model.get_input_embeddings()))
        store = attach(model, memory)
        for length in (40, 60, 80):
            go(model, ids(length))
            loaded.append(store.loaded_tokens[0])
        assert not store.not_used
    assert loaded == [0, 32, 48, 32, 48, 64]
    memory.close()


class _Model(transformers.LlamaForCausalLM):
    """A class of the user's own."""


def test_folders_of_one_model(tmp_path: Path) -> None:
    """A model of a user's own class that was loaded from two folders is one model."""
    memory, loaded = open_store([MEMORY]), []
    for folder in (tmp_path / "one", tmp_path / "two"):
        torch.manual_seed(0)
        _Model(CONFIGS["llama"]()).save_pretrained(folder)
        model = _Model.from_pretrained(folder).eval()
        store = attach(model, memory)
        go(model, ids(40))
        loaded.append(store.loaded_tokens[0])
    assert loaded == [0, 32]
    memory.close()


def _passed_on(plain: Callable[[Tensor], Tensor], data: Tensor) -> Tensor:
    return plain(data)


def _hooked(module: torch.nn.Module) -> None:
    """Place a hook on a module as accelerate does."""
    plain = module.forward

    def new_forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        return module._old_forward(*args, **kwargs)

    new_forward.__module__ = "accelerate.hooks"
    given: Any = module
    given._hf_hook, given._old_forward = object(), plain
    given.forward = functools.update_wrapper(functools.partial(new_forward, module), plain)


def test_hooks_of_accelerate() -> None:
    """Hooks that move tensors between devices are no part of a model; a `forward` that they wrap is."""
    memory, loaded = open_store([MEMORY]), []
    for case in ("plain", "hooked", "replaced", "replaced and hooked"):
        model = make("llama")
        model.set_input_embeddings(_Adapted(model.get_input_embeddings()))
        if "replaced" in case:
            layer = model.model.layers[1].self_attn.v_proj
            layer.forward = functools.partial(_passed_on, layer.forward)
        if "hooked" in case:
            model.hf_device_map = {"": "cpu"}
            for module in (*model.modules(),):
                _hooked(module)
        store = attach(model, memory)
        go(model, ids(40))
        loaded.append(store.loaded_tokens[0])
    assert loaded == [0, 32, 0, 32]
    memory.close()


def test_a_forward_that_was_replaced_in_a_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel's library that replaces the `forward` of a class changes the model."""
    memory, loaded = open_store([MEMORY]), []
    plain = LlamaRotaryEmbedding.forward
    for limit in (0, 70, 70):
        if limit:
            monkeypatch.setattr(LlamaRotaryEmbedding, "forward", _clamped(plain))
        model = make("llama")
        store = attach(model, memory)
        go(model, ids(40))
        loaded.append(store.loaded_tokens[0])
    assert loaded == [0, 0, 32]
    memory.close()


def _clamped(plain: Any) -> Any:
    def forward(self: Any, x: Any, position_ids: Tensor) -> Any:
        return plain(self, x, position_ids.clamp(max=70))

    return forward


def test_a_replaced_forward() -> None:
    """A method that was replaced on one module counts as a hook does: what it does to far tokens the probe does not show."""
    model, prompt = make("llama"), ids(60)
    expected = go(model, prompt)
    store = attach(model, MEMORY)
    same(go(model, prompt), expected)
    layer = model.model.layers[1].self_attn.v_proj
    plain = layer.forward

    def forward(data: Tensor) -> Tensor:
        scale = torch.ones(data.shape[1], 1)
        scale[30:] = 1.5
        return plain(data) * scale if data.shape[1] > 30 else plain(data)

    layer.forward = forward
    go(model, prompt)
    assert store.loaded_tokens == (0,)


def test_identity() -> None:
    """Other weights, salts, blocks and ways to compute attention share nothing; a copy of the model shares all."""
    prompt, shared = ids(40), open_store([MEMORY])

    def loaded(model: Any, **how: Any) -> int:
        store = attach(model, shared, **how)
        go(model, prompt)
        store.close()
        return store.loaded_tokens[0]

    model = make("llama")
    assert loaded(model, salt=b"a") == 0
    for other, how in (
        (make("llama", seed=1), {"salt": b"a"}),
        (make("llama", attn_implementation="eager"), {"salt": b"a"}),
        (model, {"salt": b"b"}),
        (model, {}),
        (model, {"salt": b"a", "block_size": 8}),
    ):
        assert loaded(other, **how) == 0
    assert loaded(make("llama"), salt=b"a") == 32
    shared.close()


class _Clamped(LlamaRotaryEmbedding):
    def forward(self, x: Any, position_ids: Tensor) -> Any:
        return super().forward(x, position_ids.clamp(max=70))


class _ClampedLess(LlamaRotaryEmbedding):
    def forward(self, x: Any, position_ids: Tensor) -> Any:
        return super().forward(x, position_ids.clamp(max=60))


class _Hooks:
    def one(self, *given: Any) -> Any:
        return given[-1]

    def other(self, *given: Any) -> Any:
        return given[-1]

    def __call__(self, *given: Any) -> Any:
        return given[-1]


def test_hooks_of_one_file() -> None:
    """Hooks that are at different places of one file are different models, be they methods, objects or parts of functions."""
    prompt, shared, hooks, loaded = ids(50), open_store([MEMORY]), _Hooks(), []
    for hook in (hooks.one, hooks.one, hooks.other, hooks, functools.partial(_Hooks.one, hooks)):
        model = make("llama")
        model.model.layers[0].register_forward_hook(hook)
        store = attach(model, shared)
        go(model, prompt)
        store.close()
        loaded.append(store.loaded_tokens[0])
    assert loaded == [0, 48, 0, 0, 48]
    shared.close()


def test_classes_of_the_users_own(tmp_path: Path) -> None:
    """The source of a class that is not Transformers' is part of a model, also where its code shows behind many tokens only.
    One that is in no file is served, too."""
    source = """
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

class Own(LlamaRotaryEmbedding):
    def forward(self, x, position_ids):
        return super().forward(x, position_ids.clamp(max={}))
"""
    prompt, shared = ids(150), open_store([MEMORY])

    def loaded(own: type) -> int:
        model = make("llama")
        model.model.rotary_emb.__class__ = own
        store = attach(model, shared)
        go(model, prompt)
        store.close()
        return store.loaded_tokens[0]

    def own(number: int, limit: int) -> type:
        path = tmp_path / f"own{number}.py"
        path.write_text(source.format(limit))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        sys.modules[path.stem] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        found: type = module.Own
        return found

    assert [loaded(own(number, limit)) for number, limit in enumerate((100, 100, 90))] == [0, 144, 0]
    nowhere = [type("Own", (own(3 + number, 80),), {"__module__": "a notebook"}) for number in range(2)]
    assert [loaded(nowhere[number]) for number in (0, 0, 1)] == [0, 144, 0]
    assert [loaded(one) for one in (_Clamped, _Clamped, _ClampedLess)] == [0, 144, 0]
    shared.close()


def test_attach_again_and_close() -> None:
    """A cell of a notebook that runs twice attaches once. A copy of the model has no store, and after `close` nor has the
    model."""
    model, prompt = make("llama"), ids(40)
    kind = type(model)
    first, second = attach(model, MEMORY), attach(model, MEMORY)
    go(model, prompt)
    assert first.lookups.total() == 0 and second.lookups.total() == 1
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.model.embed_tokens.weight.mul_(2)
    twin_alone = make("llama")
    with torch.no_grad():
        twin_alone.model.embed_tokens.weight.mul_(2)
    same(go(twin, prompt), go(twin_alone, prompt))
    assert second.lookups.total() == 1
    second.close()
    assert type(model) is kind
    go(model, prompt)
    assert second.lookups.total() == 1


@pytest.mark.extended
def test_threads() -> None:
    """Threads that generate with one model get their own answers."""
    model = make("llama")
    prompts: Sequence[Tensor] = [torch.cat([ids(40, 9), ids(10 + seed, seed)], 1) for seed in range(4)]
    expected = [go(model, prompt) for prompt in prompts]
    store = attach(model, MEMORY)
    with ThreadPoolExecutor(4) as pool:
        for _ in range(2):
            for found, alone in zip(pool.map(lambda prompt: go(model, prompt), prompts), expected, strict=True):
                same(found, alone)
    assert not store.not_used
    store.close()


def test_a_store_that_fails() -> None:
    """A failing store, or damaged blocks, is a miss and nothing else."""
    model, prompt = make("llama"), ids(60)
    expected = go(model, prompt)
    shared = open_store([MEMORY])
    store = attach(model, shared)
    go(model, prompt)
    flaky = shared.tiers[0].store = FlakyStore(shared.tiers[0].store)
    for fault in ("corrupt", "truncate", "fail"):
        flaky.inject(fault)
        same(go(model, prompt), expected)
        assert store.loaded_tokens == (0,)
        flaky.inject(fault, 0.0)
    store.close()
    shared.close()


def test_rotary_embeddings_that_change_with_the_length() -> None:
    """Where sequences beyond a length have another rotary embedding, they are computed without the stores."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    config = transformers.Phi3Config(
        **_SMALL, rope_parameters=rope, original_max_position_embeddings=64, tie_word_embeddings=False
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    expected = [go(model, ids(length)) for length in (45, 90)]
    store = attach(model, MEMORY)
    for _ in range(2):
        for prompt, alone in zip((ids(45), ids(90)), expected, strict=True):
            same(go(model, prompt), alone)
    assert store.lookups.total() == 2 and store.not_used.total() == 2
    store.close()


def _qwen3_next() -> Any:
    return transformers.Qwen3NextConfig(
        **{**_SMALL, "num_hidden_layers": 4}, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
        shared_expert_intermediate_size=32, linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=16,
        linear_value_head_dim=16,
    )  # fmt: skip


def test_recurrent_states_are_refused() -> None:
    """A model with a recurrent state in some layers, or in all, is refused with the reason."""
    for config in (_qwen3_next(), transformers.MambaConfig(vocab_size=260, hidden_size=64, num_hidden_layers=2)):
        with pytest.raises(ModelUnsupported, match="other state"):
            attach(transformers.AutoModelForCausalLM.from_config(config).eval(), MEMORY)


def test_bad_input() -> None:
    """Training mode, encoders, what has no `generate()`, a wrong size and a wrong URL are errors that say so."""
    model = make("llama")
    with pytest.raises(ModelUnsupported, match="training"):
        attach(make("llama").train(), MEMORY)
    with pytest.raises(ModelUnsupported, match="generate"):
        attach(model.model, MEMORY)
    t5 = transformers.T5Config(vocab_size=260, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    with pytest.raises(ModelUnsupported, match="encoder"):
        attach(transformers.T5ForConditionalGeneration(t5).eval(), MEMORY)
    with pytest.raises(BadRequest, match="block_size"):
        attach(model, MEMORY, block_size=0)
    with pytest.raises(StoreConfigError):
        attach(model, "dsik:///tmp")
