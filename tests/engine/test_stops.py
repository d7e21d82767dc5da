"""Where a text ends: end tokens, stop tokens, stop strings across tokens, and lengths."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import TOKENIZER, run, say
from tiny import EOS, prompt

from foreword.engine.request import Delta, SamplingParams
from foreword.entrypoints.llm import LLM
from foreword.errors import BadRequest
from foreword.request_errors import PromptTooLong
from foreword.tokens.reasoning_stops import ReasoningSpan, stop_finder
from foreword.tokens.stops import StopFinder


def answer(text: str, **params: object) -> tuple[str, Delta, int]:
    """The text that is returned when the model generates `text`, the last delta, and the number of tokens."""
    tokens = TOKENIZER.encode(text)
    deltas = run(say([*tokens, EOS, *tokens]), SamplingParams(**params))  # type: ignore[arg-type]
    assert [delta.finish_reason is None for delta in deltas] == [True] * (len(deltas) - 1) + [False]
    return "".join(delta.text for delta in deltas), deltas[-1], sum(len(delta.tokens) for delta in deltas)


def test_end_token() -> None:
    """The end token ends the text and is counted, but is not part of it."""
    text, last, count = answer("the cat")
    assert (text, last.finish_reason, last.stop_match, count) == (
        "the cat",
        "stop",
        None,
        len(TOKENIZER.encode("the cat")) + 1,
    )


def test_ignore_eos() -> None:
    """Generation continues after the end token with `ignore_eos`, and that token has no text."""
    text, last, _ = answer("ab", ignore_eos=True, max_tokens=5)
    assert (text, last.finish_reason) == ("abab", "length")


@pytest.mark.parametrize(
    ("stop", "include", "expected", "match"),
    [
        (("at in",), False, "the c", "at in"),
        (("at in",), True, "the cat in", "at in"),
        (("h",), False, "t", "h"),  # inside the token "th"
        (("the cat in the hat", "x"), False, "", "the cat in the hat"),
        (("hat", "cat"), False, "the ", "cat"),
        (("cat", "at"), False, "the ", "cat"),
        (("hats", "dog"), False, "the cat in the hat", None),  # begins, but never comes: held back, then given
    ],
)
def test_stop_strings(stop: tuple[str, ...], include: bool, expected: str, match: str | None) -> None:
    """The output ends before (or with) the first stop string, also across tokens; no part of it is returned earlier."""
    text, last, _ = answer("the cat in the hat", stop=stop, include_stop=include)
    assert (text, last.stop_match, last.finish_reason) == (expected, match, "stop")


def test_stop_string_at_the_last_token() -> None:
    """A stop string that the last allowed token completes is a stop, not a length."""
    text, last, count = answer("abcd", stop=("cd",), max_tokens=4)
    assert (text, last.finish_reason, last.stop_match, count) == ("ab", "stop", "cd", 4)
    text, last, _ = answer("abcd", stop=("cde",), max_tokens=4)
    assert (text, last.finish_reason) == ("abcd", "length")


def test_stop_token_ids() -> None:
    """A stop token ends the text, with `ignore_eos` too, and is named."""
    token = ord("c") - ord("!")
    assert TOKENIZER.token_text(token) == "c"
    for ignore in (True, False):
        text, last, _ = answer("abcd", stop_token_ids=(token,), ignore_eos=ignore)
        assert (text, last.finish_reason, last.stop_match) == ("ab", "stop", token)


def test_half_characters() -> None:
    """Characters of several tokens are returned whole; one that is never completed becomes U+FFFD."""
    deltas = run(say([*TOKENIZER.encode("a€ö"), EOS]), SamplingParams())
    assert [delta.text for delta in deltas] == ["a", "", "", "€", "", "ö", ""]
    deltas = run(say(TOKENIZER.encode("a€")), SamplingParams(max_tokens=3))
    assert "".join(delta.text for delta in deltas) == "a\ufffd"


@pytest.mark.parametrize("length", [1, 4, 5])
def test_max_tokens(length: int) -> None:
    """No more than `max_tokens` tokens are generated."""
    _, last, count = answer("abcdefgh", max_tokens=length)
    assert (count, last.finish_reason) == (length, "length")


def test_max_tokens_0(engine: Callable[..., LLM]) -> None:
    """`max_tokens=0` computes and caches the prompt, and generates nothing."""
    llm, tokens = engine("llama"), prompt(17, 1)
    output = llm.generate([tokens], SamplingParams(max_tokens=0))[0]
    assert (output.outputs[0].tokens, output.outputs[0].text, output.outputs[0].finish_reason) == ((), "", "length")
    assert llm.generate([tokens], SamplingParams(max_tokens=1))[0].cached_tokens == 16


def test_min_tokens(engine: Callable[..., LLM]) -> None:
    """A model that prefers the end token generates `min_tokens` other tokens first."""
    eager = {EOS: 1000.0}
    llm = engine("llama")
    for least in (0, 1, 6):
        params = SamplingParams(temperature=0.0, logit_bias=eager, min_tokens=least, max_tokens=20)
        output = llm.generate([prompt(5, 1)], params)[0].outputs[0]
        assert (len(output.tokens), output.tokens[-1], output.finish_reason) == (least + 1, EOS, "stop")
        assert EOS not in output.tokens[:-1]


def test_length_of_the_model(engine: Callable[..., LLM]) -> None:
    """Output ends at the model's length, or at the pool's if that is shorter; longer prompts are refused."""
    for options, longest in (({"max_model_len": 40}, 40), ({"kv_memory": "32 tokens"}, 32)):
        llm = engine("llama", **options)
        output = llm.generate([prompt(10, 1)], SamplingParams(ignore_eos=True))[0].outputs[0]
        assert (len(output.tokens), output.finish_reason) == (longest - 10, "length")
        llm.generate([prompt(longest, 2)], SamplingParams(max_tokens=0))
        for length, tokens in ((longest, None), (longest, 1), (longest + 1, 0), (10, longest - 9)):
            with pytest.raises(PromptTooLong, match=f"maximum context length is {longest} tokens"):
                llm.generate([prompt(length, 2)], SamplingParams(max_tokens=tokens))
        llm.check()


@pytest.mark.parametrize(
    ("tokens", "params"),
    [
        ([], {}),
        ([1, 260], {}),
        ([-1], {}),
        ([1], {"logit_bias": {260: 1.0}}),
        ([1], {"stop_token_ids": (-1,)}),
    ],
)
def test_bad_tokens(tokens: list[int], params: dict[str, object], engine: Callable[..., LLM]) -> None:
    """An empty prompt and tokens outside the vocabulary are refused before anything is computed."""
    with pytest.raises(BadRequest):
        engine("llama").generate([[1, 2], tokens], SamplingParams(**params))  # type: ignore[arg-type]


def first_stop(text: str, stops: list[str], behind: int = 0, within: int = 0) -> tuple[int, str] | None:
    """Start of the first stop string to be complete behind some characters; of two that end together, of the longer. None of it
    is among the first `within` characters."""
    for end in range(behind + 1, len(text) + 1):
        found = [stop for stop in stops if text[within:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return end - len(longest), longest
    return None


@settings(max_examples=examples(500), deadline=None)
@given(
    pieces=st.lists(st.text("ab ", max_size=4), max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3, unique=True),
    include=st.booleans(),
)
def test_stops_do_not_depend_on_tokens(pieces: list[str], stops: list[str], include: bool) -> None:
    """However a text is split, it is cut at the same place, and nothing after that is returned."""
    finder = StopFinder(stops, include=include)
    given_text, match = "", None
    for piece in pieces:
        text, match = finder.push(piece)
        given_text += text
        if match is not None:
            break
    else:
        text, match = finder.close()
        given_text += text
    whole = "".join(pieces)
    expected = first_stop(whole, stops)
    if expected is None:
        assert (given_text, match) == (whole, None)
    else:
        place, stop = expected
        assert (given_text, match) == (whole[: place + (len(stop) if include else 0)], stop)


@settings(max_examples=examples(1000), deadline=None)
@given(
    pieces=st.lists(st.text("ab <>", max_size=4), max_size=12),
    stops=st.lists(st.text("ab<>", min_size=1, max_size=4), min_size=1, max_size=3, unique=True),
    include=st.booleans(),
    reasoning=st.sampled_from(
        [
            None,
            ReasoningSpan("<a>", ("<b>",)),
            ReasoningSpan("<a>", ("<b>",), is_open=True),
            ReasoningSpan("<", ("<a", ">"), is_open=True),
        ]
    ),
    least=st.integers(0, 6),
)
def test_stops_count_in_the_answer(
    pieces: list[str], stops: list[str], include: bool, reasoning: ReasoningSpan | None, least: int
) -> None:
    """Stop strings do not count inside of the reasoning, nor if one of the first `least` tokens completes them."""
    finder = stop_finder(stops, include=include, reasoning=reasoning)
    given_text, match = "", None
    for number, piece in enumerate(pieces, 1):
        text, match = finder.push(piece, counts=number > least)
        given_text += text
        if match is not None:
            break
    else:
        text, match = finder.close(counts=len(pieces) > least)
        given_text += text
    whole = "".join(pieces)
    answer = 0
    if reasoning is not None and (reasoning.is_open or whole.lstrip().startswith(reasoning.opening)):
        for ending in reasoning.ending:
            found = whole.find(ending, answer)
            answer = len(whole) if found < 0 else found + len(ending)
    expected = first_stop(whole, stops, max(len("".join(pieces[:least])), answer), answer)
    if expected is None:
        assert (given_text, match) == (whole, None)
    else:
        place, stop = expected
        assert (given_text, match) == (whole[: place + (len(stop) if include else 0)], stop)


@pytest.mark.parametrize("stop", ["c", ["c"], ("c",)])
def test_one_stop_string_may_stand_alone(stop: str | Sequence[str]) -> None:
    """A text is one stop string, not its letters; lists of any kind are taken."""
    assert SamplingParams(stop=stop) == SamplingParams(stop=("c",))
    assert SamplingParams(stop="fer").stop_strings == ("fer",)
    assert SamplingParams(bad_words="of", stop_token_ids=[1], allowed_token_ids=range(2)).bad_words == ("of",)
    assert answer("abcd", stop=stop)[0] == "ab"


@pytest.mark.parametrize("least", [0, 2, 4])
def test_stop_strings_behind_min_tokens(least: int) -> None:
    """A stop string ends the text only if a token behind the first `min_tokens` completes it."""
    text, last, count = answer("abab", stop=("ab",), min_tokens=least)
    assert (text, last.stop_match) == {0: ("", "ab"), 2: ("ab", "ab"), 4: ("abab", None)}[least]
    assert count == {0: 2, 2: 4, 4: 5}[least]
