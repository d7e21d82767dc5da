"""Conversations are tokenized message by message, with the same tokens as the whole text, for any tokenizer."""

from __future__ import annotations

import random
from typing import Any

import pytest
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from vocabularies import KINDS as VOCABULARIES

from foreword.router.prompts import MessageTokenizer, whole_characters
from foreword.tokens.tokenizer import Tokenizer as Foreword

TEXT = ["the cat sat on the mat", "a dog and a cat", "no mat no cat", " two  spaces ", "<b> <bc> <c> [x] aa aaa"]
TEMPLATE = "{% for message in messages %}{{ message['role'] }}{{ message['content'] }}{% endfor %}"


def tokenizer(pre: Any, normalizer: Any, *added: AddedToken) -> Foreword:
    """A small tokenizer, trained here, whose template writes role and content one after another."""
    made = Tokenizer(models.BPE(unk_token="[unk]"))
    made.pre_tokenizer, made.normalizer, made.decoder = pre, normalizer, decoders.ByteLevel()
    made.train_from_iterator(
        TEXT * 4, trainers.BpeTrainer(vocab_size=120, special_tokens=["[unk]"], show_progress=False)
    )
    made.add_tokens(list(added))
    return Foreword(PreTrainedTokenizerFast(tokenizer_object=made, chat_template=TEMPLATE))


def special(content: str, **more: bool) -> AddedToken:
    return AddedToken(content, special=True, **{"normalized": False, **more})


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=True)
FIRST = pre_tokenizers.Metaspace(prepend_scheme="first")
LIKE_LLAMA = normalizers.Sequence([normalizers.Prepend("_"), normalizers.Replace(" ", "_")])
KINDS: dict[str, tuple[Any, ...]] = {
    "bytes": (BYTES, None, special("<b>"), special("<c>")),
    "metaspace": (FIRST, None, special("<b>"), special("<c>")),
    "prepended": (None, LIKE_LLAMA, special("<b>"), special("<c>", rstrip=True)),
    "some that look around": (
        FIRST,
        None,
        special("<b>", lstrip=True),
        special("<c>"),
        special("aa", single_word=True),
    ),
    "some that hide others": (
        BYTES,
        normalizers.Lowercase(),
        special("<b>"),
        special("<b> <c"),
        special("<c>"),
        special("[x]"),
    ),
    "one found after normalising": (BYTES, normalizers.Lowercase(), special("<B>", normalized=True), special("<c>")),
}
PIECES = st.lists(
    st.sampled_from(
        ["<b>", "<c>", "<bc>", "[x]", "<B>", " ", "  ", "a", "aa", "aaa", "cat", "The mat", "<", ">", "\n", "<b", "é"]
    )
).map("".join)


def text(made: Foreword, messages: list[dict[str, Any]]) -> str:
    return made.chat_text(messages, add_generation_prompt=False)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_tokens_as_the_whole_text(kind: str) -> None:
    """The tokens are those of the whole conversation, and the second turn tokenizes only new messages."""
    made = tokenizer(*KINDS[kind])
    tokenized = MessageTokenizer(made)

    @settings(max_examples=examples(150), deadline=None)
    @given(st.lists(PIECES, min_size=1, max_size=4))
    def check(texts: list[str]) -> None:
        messages = [{"role": "<c>", "content": text} for text in texts]
        for end in range(1, len(messages) + 1):
            whole = made.render_chat(messages[:end], add_generation_prompt=False)
            assert list(tokenized.tokens(text(made, messages[:end]))) == whole

    check()
    assert tokenized.held > 0, "nothing was cached"


def test_a_tokenizer_that_cannot_be_split() -> None:
    """Where every special token depends on its neighbors or is part of another, texts are tokenized as a whole."""
    made = tokenizer(FIRST, None, special("<b>", lstrip=True), special("aa"), special("a<c"), special("<c>"))
    assert made.cuts() == ["[unk]"]
    tokenized = MessageTokenizer(made)
    messages = [{"role": "<c>", "content": " aaa<c> <b>"}]
    whole = made.render_chat(messages, add_generation_prompt=False)
    assert list(tokenized.tokens(text(made, messages))) == whole


def test_the_cache_is_bounded() -> None:
    """The cache stays within its budget."""
    made = tokenizer(BYTES, None, special("<c>"))
    tokenized = MessageTokenizer(made, 2000)
    for number in range(200):
        messages = [{"role": "<c>", "content": f"cat {number} " * (number % 50)}]
        whole = made.render_chat(messages, add_generation_prompt=False)
        assert list(tokenized.tokens(text(made, messages))) == whole
        assert tokenized.held <= 2000


@pytest.mark.parametrize("kind", ["byte level", "byte fallback"])
def test_responses_continue_behind_whole_characters(kind: str) -> None:
    """Tokens of a broken stream are sent as a prompt as far as they end in a whole character: a vLLM server repeats a prompt
    that ends in a broken one."""
    tokens, chance = Foreword(VOCABULARIES[kind]()), random.Random(11)
    shortened = 0
    for _ in range(300):
        ids = [chance.randrange(tokens.vocab_size) for _ in range(chance.randrange(1, 12))]
        count, text = whole_characters(tokens, ids[:2], ids[2:])
        stream = tokens.stream(ids[:2])
        assert text == "".join(map(stream.push, ids[2 : 2 + count])) and not text.endswith("\ufffd")
        shortened += count < len(ids) - 2
    assert shortened > 20
