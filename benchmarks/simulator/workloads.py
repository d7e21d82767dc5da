"""Traffic for the simulator's benchmarks: real traces scaled to small models, agents' sessions, documents asked about."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from foreword.sim.trace import TraceRequest, read_trace

# Tokens below are left to the tokenizers' special ones.
FIRST_TOKEN = 256


def scaled(path: Path, tokens_per_block: int, vocabulary: int) -> list[TraceRequest]:
    """A trace of blocks with so many tokens per block, as tokens of a small vocabulary. A block's tokens are drawn with its
    number as the seed, so equal prefixes stay equal."""
    blocks: dict[int, array[int]] = {}
    found: list[TraceRequest] = []
    for one in read_trace(path):
        factor = one.ids_tokens / tokens_per_block
        tokens: array[int] = array("I")
        for number in one.ids:
            if number not in blocks:
                blocks[number] = drawn(number, tokens_per_block, vocabulary)
            tokens.extend(blocks[number])
        length = max(round(one.prompt_tokens / factor), 1)
        found.append(tokenised(one, tokens[:length], max(round(one.output_tokens / factor), 2)))
    return found


def sessions(
    paths: Sequence[Path], copies: int, seconds: float, vocabulary: int | None, *, common: int = 300, seed: int = 1
) -> list[TraceRequest]:
    """Agents' sessions, each several times, begun at random within so many seconds. Copies differ from each other after the
    first `common` tokens, as sessions of different people under one system prompt do. Four bytes of text count as a token."""
    rng = random.Random(seed)
    read = [read_trace(path) for path in paths]
    found: list[TraceRequest] = []
    for copy in range(copies):
        for number, session in enumerate(read):
            start = rng.uniform(0, seconds)
            for one in session:
                tokens = one.prompt()
                own = tokens[:common] + array("I", (token ^ copy * 7919 for token in tokens[common:]))
                if vocabulary is not None:
                    own = array("I", (within(token, vocabulary) for token in own))
                moved = replace(one, arrival=start + one.arrival, session=f"{copy}-{number}")
                found.append(tokenised(moved, own, one.output_tokens))
    return sorted(found, key=lambda one: one.arrival)


def growing(
    count: int, steps: int, think: float, vocabulary: int, *, system: int = 600, seed: int = 1
) -> list[TraceRequest]:
    """Agents' sessions under one system prompt, all at once: each step has the text before it and 60 to 260 tokens more, and
    comes `think` seconds after the one before, on average."""
    rng = random.Random(seed)
    common, found = drawn(-1, system, vocabulary), []
    for number in range(count):
        text, now = common + drawn(rng.randrange(2**40), rng.randrange(600, 1800), vocabulary), rng.uniform(0, think)
        for _ in range(steps):
            found.append(TraceRequest(now, text, 1, len(text), 24, f"s{number}"))
            text, now = (
                text + drawn(rng.randrange(2**40), rng.randrange(60, 260), vocabulary),
                now + rng.expovariate(1 / think),
            )
    return sorted(found, key=lambda one: one.arrival)


def system_prompts(
    count: int,
    rate: float,
    vocabulary: int,
    *,
    prompts: int = 32,
    tokens: int = 1500,
    own: tuple[int, int] = (15, 60),
    seed: int = 1,
) -> list[TraceRequest]:
    """Short questions behind system prompts, which one by Zipf's law; Poisson arrivals."""
    rng, now, found = random.Random(seed), 0.0, []
    texts = [drawn(i, tokens, vocabulary) for i in range(prompts)]
    for i, text in enumerate(rng.choices(texts, [1 / (i + 1) for i in range(prompts)], k=count)):
        now += rng.expovariate(rate)
        asked = text + drawn(10**9 + i, rng.randrange(*own), vocabulary)
        found.append(TraceRequest(now, asked, 1, len(asked), 24))
    return found


def documents(
    count: int,
    rate: float,
    vocabulary: int,
    *,
    number: int = 60,
    system: int = 1024,
    lengths: tuple[int, int] = (2000, 16000),
    question: tuple[int, int] = (50, 300),
    answer: tuple[int, int] = (50, 300),
    seed: int = 1,
) -> list[TraceRequest]:
    """Questions about documents under one system prompt. Which document is asked about follows Zipf's law; arrivals are
    Poisson's at `rate` a second."""
    rng = random.Random(seed)
    prompt = drawn(-1, system, vocabulary)
    texts = [drawn(i, rng.randrange(*lengths), vocabulary) for i in range(number)]
    weights = [1 / (i + 1) for i in range(number)]
    now, found = 0.0, []
    for i in range(count):
        now += rng.expovariate(rate)
        [text] = rng.choices(texts, weights)
        tokens = prompt + text + drawn(10**9 + i, rng.randrange(*question), vocabulary)
        found.append(TraceRequest(now, tokens, 1, len(tokens), rng.randrange(*answer)))
    return found


def tokenised(one: TraceRequest, tokens: array[int], output: int) -> TraceRequest:
    return replace(one, ids=tokens, ids_tokens=1, prompt_tokens=len(tokens), output_tokens=output)


def drawn(seed: int, count: int, vocabulary: int) -> array[int]:
    rng = random.Random(seed)
    return array("I", (rng.randrange(FIRST_TOKEN, vocabulary) for _ in range(count)))


def within(token: int, vocabulary: int) -> int:
    return FIRST_TOKEN + token * 2654435761 % 2**32 % (vocabulary - FIRST_TOKEN)


def spread(requests: Iterable[TraceRequest], seconds: float) -> list[TraceRequest]:
    """The same requests over so many seconds."""
    ordered = sorted(requests, key=lambda one: one.arrival)
    begin, end = ordered[0].arrival, ordered[-1].arrival
    factor = seconds / max(end - begin, 1e-9)
    return [replace(one, arrival=(one.arrival - begin) * factor) for one in ordered]
