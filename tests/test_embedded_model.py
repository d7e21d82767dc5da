"""Tests of the embedded model's files: they load offline, and the model is no random one."""

from __future__ import annotations

import functools
import json
import math
import socket
import textwrap
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

import foreword

MODEL_FOLDER = Path(foreword.__file__).parent / "models" / "stdlib-nano"

CONVERSATION = [
    {"role": "system", "content": "You answer briefly.\n"},
    {"role": "user", "content": "  What does json.dumps do?"},
    {"role": "assistant", "content": "\n\n Serialize ``obj``. "},
    {"role": "user", "content": "And json.loads?"},
    {"role": "assistant", "content": ""},
]


@functools.cache
def load_tokenizer() -> Any:
    """Load the tokenizer once."""
    return AutoTokenizer.from_pretrained(MODEL_FOLDER, local_files_only=True)


@functools.cache
def load_model() -> Any:
    """Load the model once, in float32."""
    return AutoModelForCausalLM.from_pretrained(MODEL_FOLDER, local_files_only=True, dtype=torch.float32)


def complete(prompt_ids: list[int], max_new_tokens: int) -> list[int]:
    """Return the greedy continuation of a prompt."""
    with torch.inference_mode():
        prompt = torch.tensor([prompt_ids])
        output = load_model().generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=max_new_tokens, do_sample=False
        )
    return [int(token) for token in output[0, len(prompt_ids) :]]


def mean_loss(text: str) -> float:
    """Return the mean loss per token of a text's first 512 tokens."""
    ids = torch.tensor([load_tokenizer()(text).input_ids[:512]])
    with torch.inference_mode():
        return float(load_model()(input_ids=ids, labels=ids).loss)


def test_loads_without_network_or_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder alone yields a tokenizer and a model, without a connection and without a warning."""

    def refuse(*_arguments: object, **_options: object) -> None:
        raise AssertionError("a connection was attempted")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tokenizer = AutoTokenizer.from_pretrained(MODEL_FOLDER)
        model = AutoModelForCausalLM.from_pretrained(MODEL_FOLDER)
    assert len(tokenizer) == model.config.vocab_size
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert model.generation_config.eos_token_id == [tokenizer.eos_token_id]


def test_is_small_and_grouped() -> None:
    """The model is a Llama of three to four million tied parameters with half as many key/value heads as heads."""
    config = load_model().config
    assert config.model_type == "llama"
    assert config.tie_word_embeddings
    assert config.num_attention_heads == 2 * config.num_key_value_heads
    assert config.max_position_embeddings == 8192
    assert 3_000_000 < sum(parameter.numel() for parameter in load_model().parameters()) < 4_000_000
    assert (MODEL_FOLDER / "model.safetensors").stat().st_size < 8_000_000


@pytest.mark.parametrize("length", range(1, len(CONVERSATION)))
def test_chat_template_renders_prefixes(length: int) -> None:
    """A conversation's first messages render to a prefix of the whole, in characters and in tokens."""
    tokenizer = load_tokenizer()
    for tokenize in (False, True):
        whole = tokenizer.apply_chat_template(CONVERSATION, tokenize=tokenize, return_dict=False)
        part = tokenizer.apply_chat_template(CONVERSATION[:length], tokenize=tokenize, return_dict=False)
        assert whole[: len(part)] == part


def test_generation_prompt_is_a_prefix_of_the_answered_conversation() -> None:
    """The prompt for an answer is a prefix of the conversation with that answer, which ends with the end token."""
    tokenizer = load_tokenizer()
    question = tokenizer.apply_chat_template(CONVERSATION[:2], add_generation_prompt=True, return_dict=False)
    answered = tokenizer.apply_chat_template(CONVERSATION[:3], return_dict=False)
    assert answered[: len(question)] == question
    assert answered[-1] == tokenizer.eos_token_id


def test_one_beginning_token() -> None:
    """Plain text and a conversation both start with exactly one beginning-of-sequence token."""
    tokenizer = load_tokenizer()
    plain = tokenizer("import os").input_ids
    chat = tokenizer.apply_chat_template(CONVERSATION, return_dict=False)
    for ids in (plain, chat):
        assert ids[0] == tokenizer.bos_token_id
        assert ids.count(tokenizer.bos_token_id) == 1


def test_chat_template_accepts_text_parts_and_refuses_unknown_roles() -> None:
    """Contents given as text parts render like a string, and an unknown role is an error."""
    tokenizer = load_tokenizer()
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    whole = [{"role": "user", "content": "ab"}]
    rendered = [tokenizer.apply_chat_template(messages, tokenize=False) for messages in (parts, whole)]
    assert rendered[0] == rendered[1]
    with pytest.raises(Exception, match="Unsupported role"):
        tokenizer.apply_chat_template([{"role": "parrot", "content": "a"}], tokenize=False)


@settings(max_examples=examples(200), deadline=None)
@given(st.text(alphabet=st.characters(codec="utf-8"), max_size=200))
def test_tokenizer_round_trip(text: str) -> None:
    """Encoding any text and decoding the tokens gives the text back, character for character."""
    tokenizer = load_tokenizer()
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_loss_on_source_is_below_uniform() -> None:
    """The model predicts a library file it was not trained on clearly better than chance."""
    source = Path(textwrap.__file__).read_text(encoding="utf-8")
    assert mean_loss(source) < 0.65 * math.log(load_model().config.vocab_size)


def test_loss_of_source_is_below_loss_of_its_scrambled_lines() -> None:
    """The model uses the context: a file's words in order are likelier than the same words sorted."""
    source = Path(textwrap.__file__).read_text(encoding="utf-8")[:3000]
    assert mean_loss(source) < mean_loss(" ".join(sorted(source.split()))) - 0.5


@pytest.mark.parametrize("prompt", ["import ", "def main(", "class Reader:\n"])
def test_completion_is_not_degenerate(prompt: str) -> None:
    """A greedy continuation is printable text of several different tokens, not one token repeated."""
    tokenizer = load_tokenizer()
    ids = complete(tokenizer(prompt).input_ids, 24)
    text = tokenizer.decode(ids, skip_special_tokens=True)
    assert len(set(ids)) >= 5
    assert "\N{REPLACEMENT CHARACTER}" not in text
    assert text.strip()


@pytest.mark.parametrize("question", ["What does json.dumps do?", "Hello!"])
def test_chat_answer_ends(question: str) -> None:
    """A chat answer is words, and stops with the end token by itself."""
    tokenizer = load_tokenizer()
    messages = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    ids = complete(prompt, 160)
    assert ids[-1] == tokenizer.eos_token_id
    assert sum(character.isalpha() for character in tokenizer.decode(ids, skip_special_tokens=True)) >= 10


def test_report_matches_the_model() -> None:
    """The training report names the model's true parameter count and losses below chance."""
    report = json.loads((MODEL_FOLDER / "training_report.json").read_text(encoding="utf-8"))
    assert report["parameters"] == sum(parameter.numel() for parameter in load_model().parameters())
    for split in ("training_source", "held_out_source", "held_out_chat"):
        assert report["evaluation"][split]["loss"] < 0.6 * math.log(load_model().config.vocab_size)
    assert "textwrap.py" in report["held_out_paths"]
