"""Choice of the next token: the filters, the penalties and the randomness, against definitions written in float64."""

from __future__ import annotations

import math
import random
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from example_counts import examples, represented
from hypothesis import assume, given, reject, settings
from hypothesis import strategies as st
from tiny import Reference, prompt

from foreword.engine.kernels import native
from foreword.engine.kernels.native import Kernels
from foreword.engine.request import SamplingParams
from foreword.engine.sampler import next_number, random_bits, reshape, sample
from foreword.engine.sequence import Draw, TokenCounts
from foreword.entrypoints.llm import LLM
from foreword.errors import BadRequest

VOCAB = 12
# Hundredths: far enough from each other to have one order in float32 and float64.
logit_rows = st.lists(st.integers(-600, 600).map(lambda n: n / 100), min_size=VOCAB, max_size=VOCAB, unique=True)
shares = st.one_of(st.just(1.0), st.floats(0.01, 0.99))


@pytest.fixture(scope="module", params=["torch", "native"])
def kernels(request: pytest.FixtureRequest) -> Kernels | None:
    """PyTorch's operators, or the compiled kernels."""
    if request.param == "torch":
        return None
    if shutil.which("c++") is None:
        pytest.skip("there is no C++ compiler")
    return native.load()


def draw(params: SamplingParams, seed: int = 0, **known: Any) -> Draw:
    prompt_tokens, output = known.pop("prompt", ()), known.pop("output", ())
    blank: dict[str, Any] = {"index": 0, "end_tokens": ()}
    tokens = [*prompt_tokens, *output]
    return Draw(params=params, seed=seed, tokens=tokens, num_prompt=len(prompt_tokens), **(blank | known))


def tokens_of(row: Sequence[float], params: SamplingParams, count: int, kernels: Kernels | None) -> list[int]:
    """`count` independent samples from the same logits."""
    logits = torch.tensor([list(row)]).expand(count, -1)
    return [one.token for one in sample(logits, [draw(params, seed) for seed in range(count)], kernels)]


def _certain(clear: bool) -> None:
    if not clear:
        reject()


def distribution(row: Sequence[float], params: SamplingParams) -> list[float]:
    """The distribution that is sampled from, by definition: temperature, top-k, min-p, top-p. Rejects cases on the edge of a
    filter."""
    scaled = [value / params.temperature for value in row]
    weights = [math.exp(value - max(scaled)) for value in scaled]
    probabilities = [weight / sum(weights) for weight in weights]
    ranked = sorted(range(len(row)), key=lambda token: -probabilities[token])
    kept = ranked[: params.top_k or len(row)]
    if len(kept) < len(row):
        _certain(probabilities[kept[-1]] - probabilities[ranked[len(kept)]] > 1e-6)
    edge = params.min_p * max(probabilities)
    _certain(params.min_p == 0 or all(abs(probabilities[token] - edge) > 1e-6 for token in kept))
    kept = [token for token in kept if probabilities[token] >= edge]
    if params.top_p < 1:
        total, before, nucleus = sum(probabilities[token] for token in kept), 0.0, []
        for token in kept:
            _certain(abs(before - params.top_p * total) > 1e-6)
            if before < params.top_p * total:
                nucleus.append(token)
            before += probabilities[token]
        kept = nucleus
    total = sum(probabilities[token] for token in kept)
    return [probabilities[token] / total if token in kept else 0.0 for token in range(len(row))]


@settings(max_examples=examples(100), deadline=None)
@given(row=logit_rows)
def test_greedy(kernels: Kernels | None, row: list[float]) -> None:
    """Temperature 0 takes the likeliest token, whatever the filters say."""
    best = max(range(VOCAB), key=row.__getitem__)
    params = SamplingParams(temperature=0.0, top_k=3, top_p=0.5, min_p=0.2)
    assert tokens_of(row, params, 3, kernels) == [best] * 3


@settings(max_examples=examples(200), deadline=None)
@given(row=logit_rows, temperature=st.floats(0.3, 3.0), top_k=st.integers(0, 15), top_p=shares, min_p=st.floats(0, 0.9))
def test_filters(
    kernels: Kernels | None, row: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    """Only tokens that pass all filters are sampled, and every likely one of them is."""
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    expected = distribution(row, params)
    found = Counter(tokens_of(row, params, 60, kernels))
    assert all(expected[token] > 0 for token in found)
    # A token of probability p is missed by 60 samples with probability (1 - p) ** 60.
    assert all(token in found for token, probability in enumerate(expected) if probability > 0.35)


ROW = [2.0, 1.5, 1.2, 0.9, 0.3, 0.0, -0.4, -1.0, -1.5, -2.0, -3.0, -5.0]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=3.0),
        SamplingParams(top_k=4),
        SamplingParams(top_p=0.7),
        SamplingParams(min_p=0.15),
        SamplingParams(temperature=2.0, top_k=9, top_p=0.9, min_p=0.05),
    ],
    ids=["plain", "cold", "hot", "top_k", "top_p", "min_p", "all"],
)
def test_frequencies(kernels: Kernels | None, params: SamplingParams) -> None:
    """Over many seeds the frequencies of tokens match their probabilities (chi-square, six standard deviations)."""
    count = 4000
    expected = [count * probability for probability in distribution(ROW, params)]
    found = Counter(tokens_of(ROW, params, count, kernels))
    terms = [(found[token] - mean) ** 2 / mean for token, mean in enumerate(expected) if mean > 0]
    freedom = len(terms) - 1
    assert sum(found[token] for token, mean in enumerate(expected) if mean == 0) == 0
    assert sum(terms) < freedom + 6 * math.sqrt(2 * freedom) + 6


def reference(row: torch.Tensor, params: SamplingParams, bits: int, edge: float = 0.0, moved: float = 0.0) -> int:
    """The token of one row, by a full sort and float64; `edge` and `moved` are added to top-p and the random numbers."""
    powers = row.double() * math.log2(math.e) / params.temperature
    powers -= powers.max().floor()
    weights = torch.exp2(powers)
    order = torch.sort(row, descending=True, stable=True).indices
    rank = torch.argsort(order)
    weights[order[params.top_k or len(row) :]] = 0
    weights[weights < params.min_p * weights.max()] = 0
    limit = (params.top_p + edge) * weights.sum()
    left = weights > 0
    chords = torch.where(left, torch.exp2(powers.floor()) * (1 + powers - powers.floor()), 0)
    while True:
        summed = (chords * left).cumsum(0)
        number = min(max(bits / 2**53 + moved, 0.0), 1 - 1e-9)
        token = int(torch.searchsorted(summed, number * summed[-1], right=True))
        bits = next_number(bits)
        kept = (bits / 2**53 + moved) * chords[token] < weights[token]
        bits = next_number(bits)
        if not kept:
            continue
        left &= rank < rank[token]
        if params.top_p == 1.0 or weights[left].sum() < limit:
            return token


def nearly(row: torch.Tensor, params: SamplingParams, bits: int) -> set[int]:
    """The tokens that rounding may choose."""
    moved = (-2e-5, 0, 2e-5)
    return {reference(row, params, bits, edge / 10, place) for edge in moved for place in moved}


@pytest.mark.parametrize("vocab", represented([4096, 20_011], 4096))
def test_a_batch_is_sampled_as_each_row_by_a_full_sort(kernels: Kernels | None, vocab: int) -> None:
    """Peaked, flat, tied and partly excluded rows with every mixture of filters in one batch: each row gets the token that a
    full sort of that row alone gives, and the same alone as in the batch."""
    generator = torch.Generator().manual_seed(vocab)
    made, rows = random.Random(vocab), []
    for number in range(72):
        row = torch.randn(vocab, generator=generator) * (0.1, 1, 3, 6)[number % 4]
        row = row.bfloat16().float() if number % 3 == 0 else row
        row[torch.rand(vocab, generator=generator) < made.choice((0, 0.5, 0.999))] = -math.inf
        row[made.randrange(vocab)] = 1.0
        rows.append(row)
    params = [
        SamplingParams(
            temperature=made.choice((0.4, 1.0, 1.0, 1.7)),
            top_k=made.choice((0, 0, 1, 50, 1000, vocab)),
            top_p=made.choice((1.0, 0.001, 0.5, 0.9, 0.97)),
            min_p=made.choice((0.0, 0.0, 0.02, 0.3)),
        )
        for _ in rows
    ]
    draws = [draw(one, seed) for seed, one in enumerate(params)]
    found = [one.token for one in sample(torch.stack(rows), draws, kernels)]
    close = 0
    for row, one, drawn, token in zip(rows, params, draws, found, strict=True):
        expected = nearly(row, one, random_bits(drawn.seed, 0, 0))
        close += len(expected) > 1
        assert token in expected, one
        assert sample(row[None], [drawn], kernels)[0].token == token
    assert close < 8, "nearly every row has one answer"


def test_equal_logits_are_ranked_by_token(kernels: Kernels | None) -> None:
    """Filters keep, among equally likely tokens, those with lower ids, wherever they are in the vocabulary."""
    row = torch.zeros(1, 9000)
    row[0, [7, 40, 4000, 8999]] = 5.0
    for count in (1, 2, 3, 4):
        found = {sample(row, [draw(SamplingParams(top_k=count), seed)], kernels)[0].token for seed in range(40)}
        assert found == set([7, 40, 4000, 8999][:count])
    assert sample(row, [draw(SamplingParams(temperature=0.0))], kernels)[0].token == 7


def test_counts_follow_the_sequence() -> None:
    """Counts that are kept from token to token give the same tokens as those made anew, also after a jump back or ahead."""
    made, counts = random.Random(5), TokenCounts()
    prompt_tokens, output = [made.randrange(40) for _ in range(30)], [made.randrange(VOCAB * 50) for _ in range(700)]
    params = SamplingParams(temperature=0.0, repetition_penalty=1.4, presence_penalty=0.7, frequency_penalty=0.3)
    lengths = [*range(400), 390, 391, 600, 600, 601, 0, 1]
    logits = torch.randn(1, VOCAB * 50, generator=torch.Generator().manual_seed(1)) * 4
    for length in lengths:
        known = draw(params, prompt=prompt_tokens, output=output[:length], counts=counts)
        anew = draw(params, prompt=prompt_tokens, output=output[:length])
        shaped = []
        for one in (known, anew):
            shaped.append(logits.clone())
            reshape(shaped[-1], [one], [0])
        assert torch.equal(*shaped)


def test_nothing_left_to_sample(kernels: Kernels | None) -> None:
    """A row without any token that may be sampled, or without a number at all, still gives a token of the vocabulary."""
    for row in (torch.full((1, 300), -math.inf), torch.full((1, 300), math.nan)):
        for params in (SamplingParams(), SamplingParams(top_p=0.5), SamplingParams(top_k=3, min_p=0.1)):
            assert 0 <= sample(row, [draw(params)], kernels)[0].token < 300


def test_tiny_temperature_and_equal_logits(kernels: Kernels | None) -> None:
    """A temperature near 0 is greedy and finite; equal logits are sampled evenly."""
    assert set(tokens_of(ROW, SamplingParams(temperature=1e-30), 5, kernels)) == {0}
    assert set(tokens_of([1.0] * 4, SamplingParams(), 100, kernels)) == {0, 1, 2, 3}
    assert set(tokens_of([-math.inf, 3.0, -math.inf], SamplingParams(temperature=2.0), 20, kernels)) == {1}


def test_random_bits() -> None:
    """Random numbers are a fixed function of seed, sequence and position, the same on every machine, and uniform, also those of
    further draws."""
    assert random_bits(1, 2, 3) / 2**53 == 0.7665242227656246
    assert next_number(0) == 0xE220A8397B1DCDAF >> 11
    first = [random_bits(seed, index, position) for seed in range(20) for index in range(10) for position in range(10)]
    for numbers in (first, [next_number(one) for one in first]):
        assert len(set(numbers)) == 2000
        assert all(0 <= number < 2**53 for number in numbers)
        tenths = Counter(number * 10 >> 53 for number in numbers)
        assert sum((count - 200) ** 2 / 200 for count in tenths.values()) < 30


@settings(max_examples=examples(200), deadline=None)
@given(
    row=logit_rows,
    prompt_tokens=st.lists(st.integers(0, VOCAB - 1), max_size=6),
    output=st.lists(st.integers(0, VOCAB - 1), max_size=8),
    presence=st.floats(-2, 2),
    frequency=st.floats(-2, 2),
    repetition=st.floats(0.3, 3.0),
)
def test_penalties(
    kernels: Kernels | None,
    row: list[float],
    prompt_tokens: list[int],
    output: list[int],
    presence: float,
    frequency: float,
    repetition: float,
) -> None:
    """The repetition penalty counts prompt and output, presence and frequency penalties the output, as defined."""
    expected = list(row)
    for token in {*prompt_tokens, *output}:
        expected[token] = expected[token] / repetition if expected[token] > 0 else expected[token] * repetition
    for token, count in Counter(output).items():
        expected[token] -= presence + frequency * count
    best, second = sorted(expected)[-1], sorted(expected)[-2]
    assume(best - second > 1e-4)
    params = SamplingParams(
        temperature=0.0, presence_penalty=presence, frequency_penalty=frequency, repetition_penalty=repetition
    )
    # The other row of the batch asks for none of this.
    plain = draw(SamplingParams(temperature=0.0))
    drawn = sample(torch.tensor([row, row]), [draw(params, prompt=prompt_tokens, output=output), plain], kernels)
    assert [one.token for one in drawn] == [expected.index(best), row.index(max(row))]


@settings(max_examples=examples(100), deadline=None)
@given(row=logit_rows, bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-10, 10), max_size=5))
def test_logit_bias(kernels: Kernels | None, row: list[float], bias: dict[int, float]) -> None:
    """A bias is added to its token's logit; reported log-probabilities stay the model's own."""
    expected = [value + bias.get(token, 0.0) for token, value in enumerate(row)]
    best, second = sorted(expected)[-1], sorted(expected)[-2]
    assume(best - second > 1e-4)
    params = SamplingParams(temperature=0.0, logit_bias=bias, logprobs=VOCAB)
    [found] = sample(torch.tensor([row]), [draw(params)], kernels)
    assert found.token == expected.index(best)
    own = torch.log_softmax(torch.tensor(row).double(), 0)
    assert found.logprob is not None
    assert found.logprob.logprob == pytest.approx(float(own[found.token]), abs=1e-5)
    assert sorted(token for token, _ in found.logprob.top) == list(range(VOCAB))
    assert all(value == pytest.approx(float(own[token]), abs=1e-5) for token, value in found.logprob.top)
    assert [value for _, value in found.logprob.top] == pytest.approx(sorted(own.tolist(), reverse=True), abs=1e-5)


def test_min_tokens_holds_the_end_back(kernels: Kernels | None) -> None:
    """No end token is sampled before `min_tokens` tokens, however likely it is."""
    row = torch.tensor([[0.0, 9.0, 1.0, 8.0]])
    params = SamplingParams(temperature=0.0, min_tokens=2)
    found = [sample(row, [draw(params, output=[0] * n, end_tokens=(1, 3))], kernels)[0].token for n in range(3)]
    assert found == [2, 2, 1]


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"min_p": 1.5},
        {"n": 0},
        {"n": 1000},
        {"max_tokens": -1},
        {"min_tokens": -1},
        {"logprobs": 21},
        {"presence_penalty": 2.1},
        {"frequency_penalty": -2.1},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": math.inf},
        {"stop": ("",)},
        {"logit_bias": {3: math.nan}},
        {"logit_bias": {3: math.inf}},
    ],
    ids=str,
)
def test_bad_parameters(wrong: dict[str, Any]) -> None:
    """A parameter out of range is a client error that names the parameter."""
    with pytest.raises(BadRequest) as refusal:
        SamplingParams(**wrong)
    assert refusal.value.param == next(iter(wrong))


RANDOM = SamplingParams(temperature=1.5, seed=11, max_tokens=20, ignore_eos=True, top_p=0.95)


def outputs(llm: LLM, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]) -> list[tuple[int, ...]]:
    return [output.outputs[0].tokens for output in llm.generate(prompts, params)]


def test_seed_decides(engine: Callable[..., LLM]) -> None:
    """A seed gives the same tokens alone, in a batch, with cached blocks, in chunks and after preemption."""
    mine, others = prompt(19, 1), [prompt(length, length) for length in (3, 12, 21, 30)]
    llm = engine("llama")
    [alone] = outputs(llm, [mine], RANDOM)
    batch = [SamplingParams(temperature=1.0, max_tokens=25, ignore_eos=True)] * 4
    assert outputs(llm, [*others, mine], [*batch, RANDOM])[-1] == alone
    assert outputs(engine("llama", max_batch_tokens=5), [mine], RANDOM) == [alone]
    small = engine("llama", kv_memory="92 tokens", reserve=0.0)
    assert outputs(small, [*others, mine], [*batch, RANDOM])[-1] == alone
    assert small._core.scheduler.num_preemptions > 0
    assert outputs(llm, [mine], SamplingParams(temperature=1.5, seed=12, max_tokens=20, ignore_eos=True)) != [alone]


def test_without_seed(engine: Callable[..., LLM]) -> None:
    """Without a seed in the request the engine's seed decides; without either, runs differ."""
    params = SamplingParams(temperature=1.5, max_tokens=20, ignore_eos=True)
    tokens = [prompt(9, 1)]
    assert outputs(engine("llama", seed=3), tokens, params) == outputs(engine("llama", seed=3), tokens, params)
    assert outputs(engine("llama", seed=3), tokens, params) != outputs(engine("llama", seed=4), tokens, params)
    llm = engine("llama")
    assert outputs(llm, tokens, params) != outputs(llm, tokens, params)


def test_n_sequences(engine: Callable[..., LLM]) -> None:
    """`n` sequences of a prompt differ from each other, and a seed reproduces each of them."""
    params = SamplingParams(temperature=1.5, seed=5, max_tokens=16, ignore_eos=True, n=4)
    llm = engine("llama")
    runs = [llm.generate([prompt(10, 1)], params)[0] for _ in range(2)]
    found = [[completion.tokens for completion in run.outputs] for run in runs]
    assert found[0] == found[1]
    assert len(set(found[0])) == 4
    assert [completion.index for completion in runs[0].outputs] == [0, 1, 2, 3]
    # Fewer sequences are the first of more.
    fewer = llm.generate([prompt(10, 1)], SamplingParams(temperature=1.5, seed=5, max_tokens=16, ignore_eos=True, n=2))
    assert [completion.tokens for completion in fewer[0].outputs] == found[0][:2]


def test_logprobs_are_the_models(engine: Callable[..., LLM], llama: Path) -> None:
    """Log-probabilities are `log_softmax` of the Transformers model's logits, with any penalty or filter."""
    params = SamplingParams(
        temperature=1.4, top_p=0.9, seed=1, max_tokens=15, ignore_eos=True, logprobs=20, repetition_penalty=1.3
    )
    tokens = prompt(11, 3)
    completion = engine("llama").generate([tokens], params)[0].outputs[0]
    own = Reference(llama).logprobs(tokens, completion.tokens)
    assert len(completion.logprobs) == 15
    for row, token, found in zip(own, completion.tokens, completion.logprobs, strict=True):
        assert found.token == token
        assert found.logprob == pytest.approx(float(row[token]), abs=tiny.ROUNDING)
        assert [value for _, value in found.top] == pytest.approx(row.topk(20).values.tolist(), abs=tiny.ROUNDING)
        assert all(value == pytest.approx(float(row[other]), abs=tiny.ROUNDING) for other, value in found.top)


@pytest.mark.parametrize("vocab", [515, 50_257])
def test_logprobs_do_not_depend_on_the_batch(kernels: Kernels | None, vocab: int) -> None:
    """A row has the same alternatives in the same order, and log-probabilities of the same bits, alone and beside rows that
    want more, on any number of threads. Of equal logits the lower tokens are reported."""
    threads = torch.get_num_threads()
    logits = torch.randn(70, vocab, generator=torch.Generator().manual_seed(vocab)).bfloat16()
    draws = [draw(SamplingParams(temperature=0.0, logprobs=row % 21)) for row in range(len(logits))]
    try:
        torch.set_num_threads(1)
        together = sample(logits, draws, kernels)
        torch.set_num_threads(2)
        assert together == [sample(logits[row : row + 1], draws[row : row + 1], kernels)[0] for row in range(70)]
    finally:
        torch.set_num_threads(threads)
    for row, found in zip(logits.float(), together, strict=True):
        assert found.logprob is not None
        ranked = row.argsort(descending=True, stable=True)[: len(found.logprob.top)].tolist()
        assert [token for token, _ in found.logprob.top] == ranked


@pytest.mark.parametrize("count", [0, 1, 5])
def test_number_of_logprobs(count: int, engine: Callable[..., LLM]) -> None:
    """The requested number of alternatives is reported, and none to another request of the batch without `logprobs`."""
    wanted = SamplingParams(temperature=0.0, max_tokens=3, logprobs=count, ignore_eos=True)
    without = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    first, second = engine("llama").generate([prompt(5, 1), prompt(6, 2)], [wanted, without])
    assert [len(one.top) for one in first.outputs[0].logprobs] == [count] * 3
    assert second.outputs[0].logprobs == ()


def test_only_allowed_tokens_come(engine: Callable[..., LLM]) -> None:
    """`allowed_token_ids` excludes everything else, whatever the temperature."""
    llm, allowed = engine("llama"), (7, 8, 200)
    for temperature in (0.0, 1.0, 3.0):
        params = SamplingParams(
            max_tokens=30, temperature=temperature, seed=1, allowed_token_ids=allowed, ignore_eos=True
        )
        assert set(llm.generate([prompt(8, 5)], params)[0].outputs[0].tokens) <= set(allowed)
    for wrong in ((), (10_000,)):
        with pytest.raises(BadRequest) as caught:
            llm.generate("x", SamplingParams(allowed_token_ids=wrong))
        assert caught.value.param == "allowed_token_ids"


def test_bad_words_do_not_come(engine: Callable[..., LLM]) -> None:
    """Words of one token and of several are not generated; their parts are."""
    llm = engine("llama")
    allowed = tuple(llm.tokenizer.encode("abc"))
    common = {"max_tokens": 80, "seed": 4, "allowed_token_ids": allowed, "ignore_eos": True}
    text = llm.generate("x", SamplingParams(**common))[0].outputs[0].text
    assert "ab" in text and "c" in text
    text = llm.generate("x", SamplingParams(bad_words=("ab", "c"), **common))[0].outputs[0].text
    assert "ab" not in text and "c" not in text
    assert text and set(text) <= {"a", "b"}
    with pytest.raises(BadRequest):
        SamplingParams(bad_words=("",))


@pytest.mark.parametrize("name", ["stop", "bad_words"])
def test_half_characters(name: str) -> None:
    """A text with half of a character is no text: it is refused before the tokenizer gets it, and takes no batch with it."""
    for text in ("a\ud800", ["a", "\udfff"]):
        with pytest.raises(BadRequest, match=f"{name} contains an unpaired surrogate"):
            SamplingParams(**{name: text})  # type: ignore[arg-type]
    SamplingParams(**{name: "\ud7ff\ue000\U0001f600"})  # type: ignore[arg-type]
