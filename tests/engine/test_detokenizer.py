"""The text of tokens while they come: every kind of vocabulary, any ids, prompts that end anywhere."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import vocabularies
from example_counts import examples
from vocabularies import KINDS, SCRIPTS, text_behind

from foreword.tokens.tokenizer import Tokenizer


@functools.cache
def made(kind: str) -> tuple[Any, Tokenizer]:
    inner = KINDS[kind]()
    return inner, Tokenizer(inner)


def streamed(tokenizer: Tokenizer, prompt: list[int], output: list[int], skip_special: bool) -> str:
    stream = tokenizer.stream(prompt, skip_special_tokens=skip_special)
    return "".join([*map(stream.push, output), stream.flush()])


@pytest.mark.parametrize("kind", KINDS)
def test_any_ids(kind: str) -> None:
    """Whatever ids a prompt and an output have, their text is that of their bytes; nothing raises."""
    inner, tokenizer = made(kind)
    draw = random.Random(kind)
    for _ in range(examples(2000)):
        # Some ids are not in the tokenizer: models may have more.
        prompt = [draw.randrange(len(inner) + 3) for _ in range(draw.randrange(12))]
        output = [draw.randrange(len(inner) + 3) for _ in range(draw.randrange(40))]
        skip = draw.random() < 0.5
        expected = text_behind(kind, inner, prompt, output, skip)
        assert streamed(tokenizer, prompt, output, skip) == expected, (prompt, output, skip)


@pytest.mark.parametrize("kind", ["byte level", "byte fallback", "byte fallback, no strip"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_the_seam_of_prompt_and_output(kind: str, script: str) -> None:
    """Cut anywhere, also inside of a character, prompt and output give the text once: the output has what it completes, and no
    word of the prompt. One broken byte costs one U+FFFD."""
    inner, tokenizer = made(kind)
    text = SCRIPTS[script]
    tokens = tokenizer.encode(f"secret words {text} and {text}", add_special_tokens=False)
    whole = streamed(tokenizer, [], tokens, skip_special=True)
    assert whole.lstrip() == f"secret words {text} and {text}"
    for cut in range(1, len(tokens)):
        rest = streamed(tokenizer, tokens[:cut], tokens[cut:], skip_special=True)
        assert whole.endswith(rest) and "\ufffd" not in rest, cut
        assert rest == text_behind(kind, inner, tokens[:cut], tokens[cut:], True)
        broken = [*tokens[:cut], tokens[cut - 1], *tokens[cut:]]
        assert streamed(tokenizer, broken[:1], broken[1:], True) == text_behind(
            kind, inner, broken[:1], broken[1:], True
        )


def test_text_of_a_prompt_may_end_in_any_script() -> None:
    """An output that follows emoji or rare letters keeps its words."""
    for kind in ("byte level", "byte fallback"):
        _, tokenizer = made(kind)
        for text in SCRIPTS.values():
            prompt, output = (
                tokenizer.encode(text),
                tokenizer.encode(f"{text} in the hat")[len(tokenizer.encode(text)) :],
            )
            assert streamed(tokenizer, prompt, output, skip_special=True) == " in the hat"


def test_characters_come_when_they_are_complete() -> None:
    """A part of a character has no text; the token that completes it has all of it; what follows does not wait."""
    _, tokenizer = made("byte fallback")
    smile = [tokenizer.token_id(f"<0x{byte:02X}>") or 0 for byte in "😀".encode()]
    word = tokenizer.token_id("f") or 0
    stream = tokenizer.stream([word])
    assert [stream.push(token) for token in [*smile, smile[0], word]] == ["", "", "", "😀", "", "\ufffdf"]
    assert stream.flush() == ""


def test_bytes_of_tokens() -> None:
    """Log-probabilities name the bytes of a token also where they are a part of a character."""
    for kind in ("byte level", "byte fallback"):
        inner, tokenizer = made(kind)
        for token in range(len(inner)):
            [raw] = vocabularies.spelled(
                "byte fallback, no strip" if "fallback" in kind else kind, inner, [token], False
            )
            assert tokenizer.token_bytes(token) == raw
